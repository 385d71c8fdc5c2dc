/* A config.json of the Kimi family, any bytes of it, and what follows: a checkpoint's header over it, or a synthetic
 * model of these sizes that is planned, and loaded and run if it is small.
 *
 * The input is: a byte of choices, a config.json, and (after a NUL) a safetensors header whose data are zeros. Half of
 * the mutations are of numbers, the rest libFuzzer's own: keys and braces mostly stay, so sizes get past the parser.
 *
 *   cmake --build build/fuzz --target fuzz_kimi
 *   build/fuzz/tests/fuzz_kimi -max_len=16384 -max_total_time=300 NEW tests/fuzz/corpus/kimi
 */
#include "base/buf.h"
#include "engine/runner.h"
#include "engine/synthetic.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { MAX_DATA = 1 << 20, MAX_WEIGHTS = 4 << 20, TOKENS = 24, SEQS = 2, PAGES = 64 };

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed);
size_t LLVMFuzzerMutate(uint8_t *data, size_t size, size_t max_size);

static void write_file(const char *folder, const char *name, const void *data, size_t n, size_t zeros)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    int fd = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    if (fd < 0 || write(fd, data, n) != (ssize_t)n || ftruncate(fd, (off_t)(n + zeros)) != 0)
        abort();
    close(fd);
}

/* The largest number in a header is where its data end, unless it is too large to be. */
static size_t data_bytes(const uint8_t *text, size_t n)
{
    size_t most = 0, v = 0;
    for (size_t i = 0; i < n; i++) {
        v = text[i] >= '0' && text[i] <= '9' && v <= MAX_DATA ? 10 * v + text[i] - '0' : 0;
        most = v > most && v <= MAX_DATA ? v : most;
    }
    return most;
}

static void put_sequence(struct dn_step *s, const struct dn_kv_layout *l, enum dn_kv_format f, uint32_t seq,
                         uint32_t position, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        uint32_t t = s->n_tokens + i;
        s->token_id[t] = 0;
        s->position[t] = (int32_t)(position + i);
        s->token_seq[t] = (int32_t)seq;
        s->token_count[t] = 0;
    }
    s->n_tokens += n;
    s->row_token[seq] = (int32_t)s->n_tokens - 1;
    s->sample[seq] = (struct dn_sample){.top_p = 1, .repetition = 1, .slot = -1, .target = -1};
    s->token_start[seq + 1] = (int32_t)s->n_tokens;
    s->kv_len[seq] = (int32_t)(position + n);
    s->slot[seq] = -1;
    s->kv_format[seq] = (uint8_t)f;
    s->check[seq] = 0;
    uint32_t n_pages = (position + n + l->page_tokens - 1) / l->page_tokens;
    for (uint32_t i = 0; i < n_pages; i++)
        s->page[(uint32_t)s->page_start[seq] + i] =
            (seq * 2 + i / l->format[f].pages_per_slab) * l->slab_pages + i % l->format[f].pages_per_slab;
    s->page_start[seq + 1] = s->page_start[seq] + (int32_t)n_pages;
    s->n_seqs = s->n_rows = seq + 1;
}

/* A prefill of two sequences in two formats, then a token of each. */
static void run_steps(struct dn_runner *r, uint32_t context)
{
    struct dn_err err;
    struct dn_step *s = dn_runner_arrays(r);
    uint32_t n = context - 1 < TOKENS / SEQS ? context - 1 : TOKENS / SEQS;
    for (uint32_t position = n ? 0 : n; position <= n; position += n ? n : 1) {
        s->kind = position < n ? DN_STEP_PREFILL : DN_STEP_DECODE;
        s->n_tokens = s->n_seqs = s->n_rows = s->n_tags = 0;
        s->token_start[0] = s->page_start[0] = 0;
        for (uint32_t seq = 0; seq < SEQS; seq++)
            put_sequence(s, &r->layout, (enum dn_kv_format)seq, seq, position, position < n ? n : 1);
        if (dn_runner_step(r, &err) != 0)
            abort();
    }
}

static void use_model(const struct dn_model *m, uint8_t choice)
{
    struct dn_err err;
    struct dn_device *d;
    struct dn_weights *w;
    struct dn_runner *r;
    struct dn_plan plan;
    int format = (choice >> 2) % (DN_W_FORMATS + 1) - 1;
    struct dn_step_limits limits = {.tokens = TOKENS, .seqs = SEQS, .rows = SEQS, .pages = PAGES, .seq_pages = PAGES};
    struct dn_device_conf conf = {
        .n_threads = 1 + (choice >> 6), .limits = limits, .n_slots = 1, .n_vocab = m->hyper.n_vocab};
    if (dn_kernels_open_cpu(&conf, &d, &err) != 0)
        abort();
    int code = dn_weights_plan(d->ops, m, format, &limits, m->hyper.context_tokens, &plan, &err);
    if (code == 0 && plan.weight_bytes < MAX_WEIGHTS && plan.activation_bytes < MAX_WEIGHTS * 4 &&
        plan.rope_bytes < MAX_WEIGHTS) {
        struct dn_weights_conf wc = {.format = format, .n_threads = conf.n_threads};
        code = dn_weights_open(d, m, &wc, &w, &err);
        if (code != 0 ? code != -DN_MODEL_FILE : w->bytes != plan.weight_bytes)
            abort();
        if (code != 0) { /* values that are no numbers */
            d->ops->close(d);
            return;
        }
        struct dn_runner_conf rc = {.limits = limits, .arena_bytes = 8 << 20, .slab_bytes = 1 << 20};
        if (dn_runner_open(d, w, &rc, &r, &err) == 0) {
            if (r->n_slabs >= 2 * SEQS)
                run_steps(r, r->conf.context_tokens);
            dn_runner_close(r);
        }
        dn_weights_close(w);
    }
    d->ops->close(d);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    static char folder[64], config[96];
    struct dn_err err = {0};
    struct dn_model *m;
    if (size < 1)
        return 0;
    if (folder[0] == '\0') {
        snprintf(folder, sizeof folder, "/dev/shm/fuzz_kimi_%d", (int)getpid());
        snprintf(config, sizeof config, "%s/config.json", folder);
        mkdir(folder, 0700);
    }
    const uint8_t *text = data + 1, *end = data + size, *nul = memchr(text, 0, (size_t)(end - text));
    write_file(folder, "config.json", text, (size_t)((nul ? nul : end) - text), 0);
    if (data[0] & 1 && nul != NULL) {
        uint64_t n = (uint64_t)(end - nul - 1);
        struct dn_buf file = {0};
        dn_buf_put(&file, &n, sizeof n);
        dn_buf_put(&file, nul + 1, n);
        write_file(folder, "model.safetensors", dn_buf_str(&file), file.len, data_bytes(nul + 1, n));
        dn_buf_release(&file);
        if (dn_model_open(folder, &m, &err) != 0)
            return 0;
    } else if (dn_synthetic_open(config, 0, data[0] & 2 ? DN_W_FP8 : DN_W_INT4, &m, &err) != 0) {
        return 0;
    }
    use_model(m, data[0]);
    dn_model_close(m);
    return 0;
}

/* Puts another number in the place of one. */
static size_t mutate_number(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    static const char *const number[] = {"0",    "1",     "-1",    "2",      "16",         "32", "63",
                                         "64",   "65",    "128",   "17",     "24",         "3",  "96",
                                         "1024", "65536", "1e999", "262144", "4294967296", "0.5"};
    size_t n_digits = 0, at = 0, begin = 1 + seed / 64 % size;
    for (size_t i = 0; i < size && n_digits == 0; i++) {
        at = (begin + i) % size;
        while (at + n_digits < size && data[at + n_digits] >= '0' && data[at + n_digits] <= '9')
            n_digits++;
    }
    const char *to = number[seed % (sizeof number / sizeof *number)];
    size_t n = strlen(to);
    if (n_digits == 0 || size - n_digits + n > max_size)
        return size;
    memmove(data + at + n, data + at + n_digits, size - at - n_digits);
    memcpy(data + at, to, n);
    return size - n_digits + n;
}

size_t LLVMFuzzerCustomMutator(uint8_t *data, size_t size, size_t max_size, unsigned seed)
{
    if (seed % 4 != 0 && size > 2)
        return mutate_number(data, size, max_size, seed / 4);
    return LLVMFuzzerMutate(data, size, max_size);
}
