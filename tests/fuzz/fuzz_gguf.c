/* Any bytes as a GGUF file: the parser, the model that it describes, and the tokenizer in it.
 *
 *   cmake -G Ninja -B build/fuzz -DCMAKE_C_COMPILER=clang -DDN_FUZZ=ON -DDN_SANITIZE=address,undefined,fuzzer-no-link
 *   cmake --build build/fuzz --target fuzz_gguf
 *   build/fuzz/tests/fuzz_gguf -max_len=4096 -max_total_time=60 NEW tests/fuzz/corpus/gguf
 */
#include "engine/gguf.h"
#include "engine/model.h"
#include "engine/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Touches every byte that the parser says is there. */
static uint64_t read_all(const struct dn_gguf *g)
{
    uint64_t sum = 0;
    for (size_t i = 0; i < g->n_values; i++) {
        const struct dn_gguf_value *v = &g->value[i];
        const uint8_t *cursor = v->data;
        if (v->type == DN_GGUF_ARRAY && v->elem_type == DN_GGUF_STRING) {
            for (uint64_t k = 0; k < v->n; k++) {
                struct dn_gguf_str s = dn_gguf_next_string(&cursor);
                for (size_t c = 0; c < s.len; c++)
                    sum += (uint8_t)s.data[c];
            }
        } else {
            for (uint64_t k = 0; k < v->bytes; k++)
                sum += v->data[k];
        }
    }
    for (size_t i = 0; i < g->n_tensors; i++)
        for (uint64_t k = 0; k < g->tensor[i].bytes; k++)
            sum += g->tensor[i].data[k];
    return sum;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dn_err err;
    struct dn_gguf *g;
    struct dn_model *m;
    struct dn_tokenizer *t;
    if (dn_gguf_open_memory(data, size, &g, &err) != 0)
        return 0;
    static volatile uint64_t sink;
    sink = read_all(g);
    if (dn_tokenizer_read_gguf(&t, g, &err) == 0)
        dn_tokenizer_close(t);
    dn_gguf_close(g);
    char path[64];
    int fd = memfd_create("fuzz", 0);
    if (fd < 0 || write(fd, data, size) != (ssize_t)size)
        abort();
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (dn_model_open(path, &m, &err) == 0)
        dn_model_close(m);
    close(fd);
    return 0;
}
