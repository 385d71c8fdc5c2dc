/* What the tests of the CUDA backend share: the device behind kernels.h, buffers, one operation as a step, times.
 *
 * Everything is static and belongs to the program that includes it. Oracles are float64, on values rounded to bf16
 * first where the operation takes bf16. Where no GPU is, gpu_open() prints why and the test ends as skipped. Numbers
 * from fixed seeds: gpu_rng.
 */
#ifndef DN_TESTS_GPU_H
#define DN_TESTS_GPU_H

#include "base/clock.h"
#include "kernels/kernels.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UNUSED __attribute__((unused))

static uint64_t gpu_rng_state = 1;
static UNUSED uint64_t gpu_rng(void)
{
    uint64_t z = (gpu_rng_state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
static UNUSED double gpu_unit(void)
{
    return (double)(gpu_rng() >> 11) * 0x1p-53;
}
/* Roughly normal, variance 1: the sum of four uniforms. */
static UNUSED float gpu_normal(void)
{
    return (float)((gpu_unit() + gpu_unit() + gpu_unit() + gpu_unit() - 2) * sqrt(3));
}

static UNUSED float bf16_to_f32(uint16_t x)
{
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}
static UNUSED uint16_t f32_to_bf16(float x) /* to nearest even; NaN stays NaN */
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    if ((u & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static UNUSED double e4m3_to_f64(uint8_t x)
{
    int e = (x >> 3) & 15, m = x & 7;
    double v = (x & 0x7f) == 0x7f ? NAN : e ? ldexp(8 + m, e - 7 - 3) : ldexp(m, -6 - 3);
    return x & 0x80 ? -v : v;
}

struct gpu {
    struct dn_device *d;
    const struct dn_kernels *ops;
    struct dn_step *s;
};

static UNUSED const char *gpu_library(void)
{
    const char *path = getenv("DN_CUDA_LIBRARY");
    return path ? path : DN_BUILD_DIR "/libdunlin-cuda.so";
}

/* Ends the test as skipped if there is no GPU. */
static UNUSED void gpu_open(struct gpu *g, const struct dn_step_limits *limits, uint32_t n_slots, uint32_t n_vocab)
{
    struct dn_device_conf conf = {.limits = *limits, .n_slots = n_slots, .n_vocab = n_vocab};
    struct dn_err err = {0};
    memset(g, 0, sizeof *g);
    if (dn_kernels_open_library(gpu_library(), &conf, &g->d, &err) != 0) {
        if (getenv("DN_GPU_REQUIRED"))
            cr_assert_fail("%s", err.text);
        printf("SKIPPED: no GPU backend: %s\n", err.text);
        fflush(stdout);
        cr_skip_test("no GPU");
    }
    g->ops = g->d->ops;
    g->s = g->ops->step_arrays(g->d);
}
static UNUSED void gpu_close(struct gpu *g)
{
    g->ops->close(g->d);
}

static UNUSED void *gpu_alloc(struct gpu *g, size_t bytes)
{
    void *p = g->ops->alloc(g->d, bytes);
    cr_assert_not_null(p, "%zu bytes on the device", bytes);
    return p;
}
static UNUSED void *gpu_copy(struct gpu *g, const void *host, size_t bytes) /* allocates and uploads */
{
    void *p = gpu_alloc(g, bytes);
    g->ops->upload(g->d, p, host, bytes);
    return p;
}
/* n activations: rounds x to bf16 in place and uploads them. */
static UNUSED void *gpu_act(struct gpu *g, float *x, size_t n)
{
    uint16_t *h = malloc(n * sizeof *h);
    for (size_t i = 0; i < n; i++)
        x[i] = bf16_to_f32(h[i] = f32_to_bf16(x[i]));
    void *p = gpu_copy(g, h, n * sizeof *h);
    free(h);
    return p;
}
static UNUSED float *gpu_read_act(struct gpu *g, const void *device, size_t n) /* caller frees */
{
    uint16_t *h = malloc(n * sizeof *h);
    float *x = malloc(n * sizeof *x);
    g->ops->download(g->d, h, device, n * sizeof *h);
    for (size_t i = 0; i < n; i++)
        x[i] = bf16_to_f32(h[i]);
    free(h);
    return x;
}
/* Fills device memory with a byte: 0xff is NaN in bf16 and f32, so that what is not written shows. */
static UNUSED void gpu_poison(struct gpu *g, void *device, size_t bytes)
{
    void *h = malloc(bytes);
    memset(h, 0xff, bytes);
    g->ops->upload(g->d, device, h, bytes);
    free(h);
}

/* A step without sequences' pages, for operations on rows: n tokens at position 0 of n sequences, n rows. */
static UNUSED void gpu_rows_step(struct gpu *g, enum dn_step_kind kind, uint32_t n)
{
    struct dn_step *s = g->s;
    s->kind = kind;
    s->n_tokens = s->n_seqs = s->n_rows = n;
    s->n_tags = s->tag_first = 0;
    s->token_start[0] = s->page_start[0] = 0;
    for (uint32_t i = 0; i < n; i++) {
        s->token_id[i] = s->position[i] = 0;
        s->token_seq[i] = s->row_token[i] = (int32_t)i;
        s->token_count[i] = s->kv_format[i] = s->check[i] = 0;
        s->token_start[i + 1] = (int32_t)i + 1;
        s->kv_len[i] = 1;
        s->slot[i] = -1;
        s->page_start[i + 1] = 0;
        memset(&s->sample[i], 0, sizeof s->sample[i]);
        s->sample[i].slot = s->sample[i].target = s->sample[i].n_top = -1;
        s->sample[i].repetition = s->sample[i].top_p = 1;
    }
}

/* Makes ready for steps of list 1..6 whose operations `ops` calls: sizes, memory, recorded decode steps. List 7 is
 * never prepared: its decode steps run eagerly (in memory that another list has measured). */
static UNUSED void gpu_prepare(struct gpu *g, uint32_t list, void (*ops)(struct gpu *, void *), void *ctx)
{
    struct dn_err err = {0};
    int more;
    while ((more = g->ops->prepare(g->d, list, &err)) > 0) {
        ops(g, ctx);
        g->ops->step_end(g->d);
    }
    cr_assert_eq(more, 0, "%s", err.text);
}
/* The step that g->s describes. */
static UNUSED void gpu_step(struct gpu *g, uint32_t list, void (*ops)(struct gpu *, void *), void *ctx)
{
    struct dn_err err = {0};
    if (g->ops->step_begin(g->d, list))
        ops(g, ctx);
    g->ops->step_end(g->d);
    cr_assert_eq(g->ops->step_wait(g->d, &err), 0, "%s", err.text);
}

/* Packs a BF16 matrix, whose format and shape are set, with random numbers of variance 1 / 484; their f32, to be freed.
 */
static UNUSED float *gpu_pack_random(struct gpu *g, struct dn_matrix *m)
{
    size_t rows = (size_t)m->n_groups * m->n_out, n = rows * m->n_in;
    float *x = malloc(n * sizeof *x);
    uint16_t *h = malloc(n * sizeof *h);
    for (size_t i = 0; i < n; i++)
        x[i] = bf16_to_f32(h[i] = f32_to_bf16(gpu_normal() / 22));
    m->bytes = g->ops->matrix_bytes(m);
    m->data = gpu_alloc(g, m->bytes);
    cr_assert_eq(g->ops->matrix_pack(g->d, m, 0, (uint32_t)rows, &(struct dn_rows){.bf16 = h}), 0);
    free(h);
    return x;
}

static UNUSED int gpu_by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}
/* Median microseconds of a step, of 31 after 5. Subtract that of an empty list; put an operation many times into `ops`,
 * on buffers in turn, so that neither the launch nor the L2 cache (60 MB) is what is measured. */
static UNUSED double gpu_time(struct gpu *g, uint32_t list, void (*ops)(struct gpu *, void *), void *ctx)
{
    enum { WARM = 5, N = 31 };
    double us[N];
    for (int i = 0; i < WARM + N; i++) {
        uint64_t t = dn_now_ns();
        gpu_step(g, list, ops, ctx);
        if (i >= WARM)
            us[i - WARM] = (double)(dn_now_ns() - t) / 1000;
    }
    qsort(us, N, sizeof *us, gpu_by_value);
    return us[N / 2];
}

/* Compares n values with bounds |got - want| <= tolerance; prints the first wrong ones with their places. NaN wants
 * NaN. */
static UNUSED void gpu_expect(const char *what, const float *got, const double *want, const double *tolerance, size_t n,
                              size_t n_cols)
{
    size_t wrong = 0;
    double worst = 0;
    for (size_t i = 0; i < n; i++) {
        bool ok = isnan(want[i]) ? isnan(got[i]) : got[i] == want[i] || fabs(got[i] - want[i]) <= tolerance[i];
        if (!isnan(want[i]) && tolerance[i] > 0 && fabs(got[i] - want[i]) / tolerance[i] > worst)
            worst = fabs(got[i] - want[i]) / tolerance[i];
        if (!ok && wrong++ < 8)
            printf("%s: [%zu][%zu] is %.9g, expected %.9g +- %.3g\n", what, i / n_cols, i % n_cols, got[i], want[i],
                   tolerance[i]);
    }
    if (wrong)
        printf("%s: %zu of %zu wrong\n", what, wrong, n);
    else
        printf("%s: ok, worst error %.2f of its bound\n", what, worst);
    fflush(stdout);
    cr_expect_eq(wrong, 0, "%s: %zu of %zu wrong", what, wrong, n);
}

#endif
