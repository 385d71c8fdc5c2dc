/* What the tests of the engine share: a model on a device with a runner, and sequences whose pages they place
 * themselves. The device is the CPU, or that of the backend in $DN_TEST_LIBRARY (tests/cmake/tests_gpu.cmake). */
#ifndef DN_TEST_ENGINE_FIXTURE_H
#define DN_TEST_ENGINE_FIXTURE_H

#include "base/buf.h"
#include "engine/runner.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct fixture {
    struct dn_model *model;
    struct dn_device *device;
    struct dn_weights *weights;
    struct dn_runner *runner;
    uint32_t next_slab;
    uint32_t n_rows; /* of the step being filled */
};

struct sequence {
    enum dn_kv_format format;
    uint32_t page[2048];
    uint32_t n_pages, n_tokens; /* tokens in the cache */
};

enum rows { ROWS_NONE, ROWS_LAST, ROWS_ALL };

/* Not the CPU's backend: activations are bf16, and only steps of one kind are alike bit for bit. */
static inline bool fixture_is_gpu(void)
{
    return getenv("DN_TEST_LIBRARY") != NULL;
}

static inline void fixture_device(struct fixture *f, const struct dn_device_conf *conf)
{
    struct dn_err err = {0};
    const char *library = getenv("DN_TEST_LIBRARY");
    int code = library ? dn_kernels_open_library(library, conf, &f->device, &err)
                       : dn_kernels_open_cpu(conf, &f->device, &err);
    if (code != 0 && library && !getenv("DN_GPU_REQUIRED")) {
        printf("SKIPPED: no GPU backend: %s\n", err.text);
        fflush(stdout);
        cr_skip_test("no GPU");
    }
    cr_assert_eq(code, 0, "%s", err.text);
}

/* format: enum dn_weight_format or DN_WEIGHTS_AUTO. */
static inline void fixture_open(struct fixture *f, const char *path, int format, unsigned n_threads, uint32_t tokens)
{
    struct dn_err err = {0};
    *f = (struct fixture){0};
    cr_assert_eq(dn_model_open(path, &f->model, &err), 0, "%s", err.text);
    struct dn_step_limits limits = {.tokens = tokens, .seqs = 64, .rows = tokens, .pages = 4096};
    struct dn_device_conf conf = {.n_threads = n_threads,
                                  .limits = limits,
                                  .n_slots = 1,
                                  .n_vocab = f->model->hyper.n_vocab,
                                  .isa = getenv("DN_TEST_ISA")};
    fixture_device(f, &conf);
    struct dn_weights_conf weights = {.format = format};
    cr_assert_eq(dn_weights_open(f->device, f->model, &weights, &f->weights, &err), 0, "%s", err.text);
    struct dn_runner_conf runner = {.limits = limits, .arena_bytes = 256 << 20, .slab_bytes = 1 << 20};
    cr_assert_eq(dn_runner_open(f->device, f->weights, &runner, &f->runner, &err), 0, "%s", err.text);
}

static inline void fixture_close(struct fixture *f)
{
    dn_runner_close(f->runner);
    dn_weights_close(f->weights);
    f->device->ops->close(f->device);
    dn_model_close(f->model);
}

static inline void step_clear(struct fixture *f)
{
    struct dn_step *s = dn_runner_arrays(f->runner);
    s->kind = DN_STEP_PREFILL;
    s->n_tokens = s->n_seqs = s->n_rows = 0;
    s->token_start[0] = s->page_start[0] = 0;
}

/* Appends n tokens of a sequence to the step; gives it the pages that it needs, a slab at a time. */
static inline void step_add(struct fixture *f, struct sequence *q, const int32_t *id, uint32_t n, enum rows rows)
{
    struct dn_step *s = dn_runner_arrays(f->runner);
    const struct dn_kv_layout *l = &f->runner->layout;
    uint32_t at = s->n_tokens, seq = s->n_seqs, n_in_slab = l->format[q->format].pages_per_slab;
    while (q->n_pages * l->page_tokens < q->n_tokens + n) {
        cr_assert_lt(f->next_slab, f->runner->n_slabs);
        for (uint32_t i = 0; i < n_in_slab; i++)
            q->page[q->n_pages++] = f->next_slab * l->slab_pages + i;
        f->next_slab++;
    }
    for (uint32_t i = 0; i < n; i++) {
        s->token_id[at + i] = id[i];
        s->position[at + i] = (int32_t)(q->n_tokens + i);
        s->token_seq[at + i] = (int32_t)seq;
        s->token_count[at + i] = 0;
        if (rows == ROWS_ALL || (rows == ROWS_LAST && i == n - 1)) {
            s->row_token[s->n_rows] = (int32_t)(at + i);
            s->sample[s->n_rows] =
                (struct dn_sample){.top_p = 1, .repetition = 1, .slot = -1, .target = -1, .n_top = 0};
            s->n_rows++;
        }
    }
    q->n_tokens += n;
    s->n_tokens += n;
    s->token_start[seq + 1] = (int32_t)s->n_tokens;
    s->kv_len[seq] = (int32_t)q->n_tokens;
    s->slot[seq] = -1;
    s->kv_format[seq] = (uint8_t)q->format;
    s->check[seq] = 0;
    uint32_t n_pages = (q->n_tokens + l->page_tokens - 1) / l->page_tokens;
    for (uint32_t i = 0; i < n_pages; i++) {
        s->page[(uint32_t)s->page_start[seq] + i] = q->page[i];
        s->tag[(uint32_t)s->page_start[seq] + i] = 0;
    }
    s->page_start[seq + 1] = s->page_start[seq] + (int32_t)n_pages;
    s->n_seqs++;
}

static inline void step_run(struct fixture *f)
{
    struct dn_err err = {0};
    cr_assert_eq(dn_runner_step(f->runner, &err), 0, "%s", err.text);
}

/* Runs one sequence from where it is by n more tokens; logits of all of them to out (if given), chunked by `chunk`
 * tokens. */
static inline void run_tokens(struct fixture *f, struct sequence *q, const int32_t *id, uint32_t n, uint32_t chunk,
                              float *out)
{
    size_t row = f->model->hyper.n_vocab;
    for (uint32_t i = 0; i < n; i += chunk) {
        uint32_t now = n - i < chunk ? n - i : chunk;
        step_clear(f);
        step_add(f, q, id + i, now, out ? ROWS_ALL : ROWS_LAST);
        step_run(f);
        if (out)
            dn_runner_logits(f->runner, 0, now, out + i * row);
    }
}

/* The model of SmolLM2: $DN_TEST_MODEL or the cache of ./dev; NULL if it is not there. */
static inline const char *smollm2_path(void)
{
    static char path[4096];
    const char *named = getenv("DN_TEST_MODEL"), *home = getenv("HOME");
    snprintf(path, sizeof path, "%s", named ? named : "");
    if (!named)
        snprintf(path, sizeof path, "%s/.cache/dunlin/SmolLM2-135M-Instruct.Q4_1.gguf", home ? home : "");
    return access(path, R_OK) == 0 ? path : NULL;
}

#endif
