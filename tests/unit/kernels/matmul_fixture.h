/* Random weights in every format with their float64 values, for the tests of packing and of the matmuls. */
#ifndef DN_TEST_MATMUL_FIXTURE_H
#define DN_TEST_MATMUL_FIXTURE_H

#include "base/buf.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/pack_numbers.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The kinds of matrix that the kernels treat differently. */
struct kind {
    const char *name;
    enum dn_weight_format format;
    bool symmetric, scale_is_bf16;
};
static const struct kind kinds[] = {
    {"bf16", DN_W_BF16, false, false},        {"fp8", DN_W_FP8, false, false},
    {"int8 f16", DN_W_INT8, false, false},    {"int8 bf16", DN_W_INT8, false, true},
    {"int4 sym f16", DN_W_INT4, true, false}, {"int4 sym bf16", DN_W_INT4, true, true},
    {"int4 f16", DN_W_INT4, false, false},    {"int4 bf16", DN_W_INT4, false, true},
};
enum { N_KINDS = sizeof kinds / sizeof *kinds };

static inline bool is_int(const struct kind *k)
{
    return k->format == DN_W_INT8 || k->format == DN_W_INT4;
}

static inline uint64_t rnd(uint64_t *seed)
{
    uint64_t z = (*seed += 0x9e3779b97f4a7c15);
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
    z = (z ^ z >> 27) * 0x94d049bb133111eb;
    return z ^ z >> 31;
}

/* Roughly normal: the sum of four uniforms, variance 1. */
static inline float rnd_normal(uint64_t *seed)
{
    double s = 0;
    for (int i = 0; i < 4; i++)
        s += (double)(rnd(seed) >> 11) * 0x1p-53 - 0.5;
    return (float)(s * sqrt(3));
}

struct weights {
    struct dn_matrix m;
    struct dn_rows rows;
    void *buf[3];
    double *value,
        *magnitude; /* [n_out][n_in]; magnitude: |q * scale| + |offset|, what rounding errors are relative to */
};

static inline void weights_alloc(struct weights *w, const struct kind *k, uint32_t n_out, uint32_t n_in)
{
    memset(w, 0, sizeof *w);
    w->m = (struct dn_matrix){.format = k->format,
                              .n_out = n_out,
                              .n_in = n_in,
                              .symmetric = k->symmetric,
                              .scale_is_bf16 = k->scale_is_bf16};
    w->m.bytes = dn_cpu_matrix_bytes(&w->m);
    cr_assert(w->m.bytes > 0 && w->m.bytes % 64 == 0);
    w->m.data = aligned_alloc(64, w->m.bytes);
    memset(w->m.data, 0xa5, w->m.bytes); /* packing may not rely on zeroed memory */
    w->value = dn_alloc0((size_t)n_out * n_in, sizeof *w->value);
    w->magnitude = dn_alloc0((size_t)n_out * n_in, sizeof *w->magnitude);
}

static inline void random_scales(struct weights *w, uint64_t *seed)
{
    size_t n = (size_t)w->m.n_out * w->m.n_in / 32;
    uint16_t *s = w->buf[1] = dn_alloc0(n, 2), *o = w->buf[2] = dn_alloc0(n, 2);
    for (size_t i = 0; i < n; i++) {
        s[i] = dn_f32_to_scale16(0.01F * (1 + fabsf(rnd_normal(seed))), w->m.scale_is_bf16);
        o[i] = dn_f32_to_scale16(0.1F * rnd_normal(seed), w->m.scale_is_bf16);
    }
    w->rows.scale16 = s;
    if (w->m.format == DN_W_INT4 && !w->m.symmetric)
        w->rows.offset16 = o;
}

static inline void random_source(struct weights *w, uint64_t *seed)
{
    size_t n = (size_t)w->m.n_out * w->m.n_in;
    if (w->m.format == DN_W_BF16) {
        uint16_t *v = w->buf[0] = dn_alloc0(n, 2);
        for (size_t i = 0; i < n; i++)
            v[i] = dn_f32_to_bf16(0.05F * rnd_normal(seed));
        w->rows.bf16 = v;
    } else if (w->m.format == DN_W_FP8) {
        uint8_t *v = w->buf[0] = dn_alloc0(n, 1);
        for (size_t i = 0; i < n; i++)
            v[i] = dn_f32_to_e4m3(100 * rnd_normal(seed));
        size_t n_blocks = (size_t)((w->m.n_out + 127) / 128) * ((w->m.n_in + 127) / 128);
        float *s = w->buf[1] = dn_alloc0(n_blocks, 4);
        for (size_t i = 0; i < n_blocks; i++)
            s[i] = 0.0005F * (1 + fabsf(rnd_normal(seed)));
        w->rows.fp8 = v;
        w->rows.block_scale = s;
    } else {
        uint8_t *v = w->buf[0] = dn_alloc0(n, 1);
        for (size_t i = 0; i < n; i++)
            v[i] = (uint8_t)rnd(seed);
        if (w->m.format == DN_W_INT8)
            w->rows.q8 = (int8_t *)v;
        else
            w->rows.q4 = v;
        random_scales(w, seed);
    }
}

/* The float64 value of every weight from the source, without any code of the backend's layout. */
static inline void weights_values(struct weights *w)
{
    const struct dn_rows *r = &w->rows;
    for (size_t i = 0; i < (size_t)w->m.n_out * w->m.n_in; i++) {
        size_t row = i / w->m.n_in, col = i % w->m.n_in, g = i / 32;
        double v = 0, mag = -1;
        if (r->bf16)
            v = dn_bf16_to_f32(r->bf16[i]);
        else if (r->fp8)
            v = (double)dn_e4m3_to_f32(r->fp8[i]) * r->block_scale[row / 128 * ((w->m.n_in + 127) / 128) + col / 128];
        else if (r->q8)
            v = (double)r->q8[i] * dn_scale16_to_f32(r->scale16[g], w->m.scale_is_bf16);
        else {
            int q = i % 2 ? r->q4[i / 2] >> 4 : r->q4[i / 2] & 15;
            double s = dn_scale16_to_f32(r->scale16[g], w->m.scale_is_bf16);
            double o = r->offset16 ? dn_scale16_to_f32(r->offset16[g], w->m.scale_is_bf16) : 0;
            v = r->offset16 ? q * s + o : (q - 8) * s;
            mag = r->offset16 ? fabs(q * s) + fabs(o) : fabs(v);
        }
        w->value[i] = v;
        w->magnitude[i] = mag < 0 ? fabs(v) : mag;
    }
}

/* Random weights, packed. */
static inline void weights_make(struct weights *w, const struct kind *k, uint32_t n_out, uint32_t n_in, uint64_t seed)
{
    weights_alloc(w, k, n_out, n_in);
    random_source(w, &seed);
    weights_values(w);
    cr_assert_eq(dn_cpu_matrix_pack(&w->m, 0, n_out, &w->rows), 0, "%s %ux%u", k->name, n_out, n_in);
}

static inline void weights_free(struct weights *w)
{
    free(w->m.data);
    for (int i = 0; i < 3; i++)
        free(w->buf[i]);
    free(w->value);
    free(w->magnitude);
}

static inline void exec_open(struct dn_cpu_exec *x, enum dn_isa isa, unsigned n_threads)
{
    x->isa = isa;
    cr_assert_eq(dn_threads_open(n_threads, NULL, &x->threads, NULL), 0);
    x->scratch = aligned_alloc(64, DN_CPU_MATMUL_SCRATCH);
}

static inline void exec_close(struct dn_cpu_exec *x)
{
    dn_threads_close(x->threads);
    free(x->scratch);
}

#endif
