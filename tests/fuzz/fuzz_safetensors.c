/* Any bytes as a safetensors file. As fuzz_gguf.c; corpus tests/fuzz/corpus/safetensors. */
#include "engine/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct dn_err err;
    struct dn_safetensors *s;
    static volatile uint64_t sink;
    if (dn_safetensors_open_memory(data, size, &s, &err) != 0)
        return 0;
    for (size_t i = 0; i < s->n_tensors; i++)
        for (uint64_t k = 0; k < s->tensor[i].bytes; k++)
            sink += s->tensor[i].data[k];
    dn_safetensors_close(s);
    return 0;
}
