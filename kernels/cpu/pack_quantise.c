#include "kernels/cpu/pack_quantise.h"
#include "kernels/cpu/pack_numbers.h"

#include <float.h>

enum { GROUP = 32 };

/* To nearest even, for |x| < 2^22: the ulp of 1.5 * 2^23 is 1. */
static inline float round_even(float x)
{
    return x + 0x1.8p23f - 0x1.8p23f;
}

static inline float clamp(float x, float low, float high)
{
    x = x > low ? x : low;
    return x < high ? x : high;
}

static bool all_finite(const float x[GROUP])
{
    uint32_t top = 0;
    for (int i = 0; i < GROUP; i++) {
        uint32_t u = dn_f32_bits(x[i]) & 0x7fffffff;
        top = u > top ? u : top;
    }
    return top < 0x7f800000;
}

static float largest(const float x[GROUP])
{
    float top = 0;
    for (int i = 0; i < GROUP; i++)
        top = fabsf(x[i]) > top ? fabsf(x[i]) : top;
    return top;
}

/* A scale as stored: rounded to 16 bits, but never to infinity. */
static uint16_t stored(float v, bool is_bf16)
{
    float top = is_bf16 ? 0x1.fep127f : 65504;
    return dn_f32_to_scale16(clamp(v, -top, top), is_bf16);
}

static uint16_t stored_nan(bool is_bf16)
{
    return is_bf16 ? 0x7fc0 : 0x7e00;
}

/* 1 / s, or 0 where that is no number: all codes are then those of 0. */
static float inverse(float s)
{
    float i = s != 0 ? 1 / s : 0;
    return isfinite(i) ? i : 0;
}

void dn_quantise_int8(const float x[32], bool scale_is_bf16, int8_t q[32], uint16_t *scale)
{
    if (!all_finite(x)) {
        memset(q, 0, GROUP);
        *scale = stored_nan(scale_is_bf16);
        return;
    }
    *scale = stored(largest(x) / 127, scale_is_bf16);
    float inv = inverse(dn_scale16_to_f32(*scale, scale_is_bf16));
    for (int i = 0; i < GROUP; i++)
        q[i] = (int8_t)round_even(clamp(x[i] * inv, -127, 127));
}

/* Codes as floats, for value = code * scale + offset; low..high. */
static void codes(const float x[GROUP], float scale, float offset, float low, float high, float c[GROUP])
{
    float inv = inverse(scale);
    for (int i = 0; i < GROUP; i++)
        c[i] = round_even(clamp((x[i] - offset) * inv, low, high));
}

/* Sums in four lanes, so that the compiler may vectorise without reordering. */
static float squared_error(const float x[GROUP], float scale, float offset, const float c[GROUP])
{
    float e[4] = {0};
    for (int i = 0; i < GROUP; i += 4)
        for (int l = 0; l < 4; l++) {
            float d = c[i + l] * scale + offset - x[i + l];
            e[l] += d * d;
        }
    return e[0] + e[1] + e[2] + e[3];
}

struct fit {
    float error;
    uint16_t scale, offset;
    float code[GROUP];
};

/* Rounds scale and offset to 16 bits, then the values with those, and keeps the result if it is the best so far. */
static void consider(const float x[GROUP], float scale, float offset, bool affine, bool is_bf16, struct fit *best)
{
    struct fit f = {.scale = stored(scale, is_bf16), .offset = affine ? stored(offset, is_bf16) : 0};
    float s = dn_scale16_to_f32(f.scale, is_bf16), o = affine ? dn_scale16_to_f32(f.offset, is_bf16) : 0;
    codes(x, s, o, affine ? 0 : -8, affine ? 15 : 7, f.code);
    f.error = squared_error(x, s, o, f.code);
    if (f.error < best->error)
        *best = f;
}

/* The scale and offset with the least squared error for given codes. */
static bool least_squares(const float x[GROUP], const float c[GROUP], float *scale, float *offset)
{
    float sc = 0, sx = 0, scc = 0, scx = 0;
    for (int i = 0; i < GROUP; i++) {
        sc += c[i];
        sx += x[i];
        scc += c[i] * c[i];
        scx += c[i] * x[i];
    }
    float var = GROUP * scc - sc * sc;
    if (var <= 0)
        return false;
    *scale = (GROUP * scx - sc * sx) / var;
    *offset = (sx - *scale * sc) / GROUP;
    return isfinite(*scale) && isfinite(*offset);
}

void dn_quantise_int4(const float x[32], bool scale_is_bf16, uint8_t q[32], uint16_t *scale, uint16_t *offset)
{
    static const float cut[] = {0, 0.025F, 0.05F, 0.1F};
    memset(q, 0, GROUP);
    if (!all_finite(x)) {
        *scale = *offset = stored_nan(scale_is_bf16);
        return;
    }
    float low = x[0], high = x[0];
    for (int i = 1; i < GROUP; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    struct fit best = {.error = INFINITY};
    best.offset = stored(0.5F * low + 0.5F * high, scale_is_bf16); /* where even the squared error overflows */
    for (size_t i = 0; i < sizeof cut / sizeof *cut; i++) {
        float range = high / 15 - low / 15, s = range * (1 - 2 * cut[i]), o = low + range * 15 * cut[i], c[GROUP];
        if (i == 0)
            consider(x, s, o, true, scale_is_bf16, &best);
        codes(x, s, o, 0, 15, c);
        if (least_squares(x, c, &s, &o))
            consider(x, s, o, true, scale_is_bf16, &best);
    }
    *scale = best.scale;
    *offset = best.offset;
    for (int i = 0; i < GROUP; i++)
        q[i] = (uint8_t)best.code[i];
}

void dn_quantise_int4_sym(const float x[32], bool scale_is_bf16, uint8_t q[32], uint16_t *scale)
{
    static const float at[] = {-8.5F, -8, -7.5F, -7, 6.5F, 7, 7.5F}; /* where the value of largest magnitude goes */
    memset(q, 8, GROUP);
    if (!all_finite(x)) {
        *scale = stored_nan(scale_is_bf16);
        return;
    }
    float top = 0;
    for (int i = 0; i < GROUP; i++)
        top = fabsf(x[i]) > fabsf(top) ? x[i] : top;
    struct fit best = {.error = INFINITY};
    for (size_t i = 0; i < sizeof at / sizeof *at; i++) {
        float s = top / at[i], c[GROUP], scc = 0, scx = 0;
        consider(x, s, 0, false, scale_is_bf16, &best);
        codes(x, s, 0, -8, 7, c);
        for (int k = 0; k < GROUP; k++) {
            scc += c[k] * c[k];
            scx += c[k] * x[k];
        }
        if (scc > 0 && isfinite(scx / scc))
            consider(x, scx / scc, 0, false, scale_is_bf16, &best);
    }
    *scale = best.scale;
    for (int i = 0; i < GROUP; i++)
        q[i] = (uint8_t)(best.code[i] + 8);
}

float dn_largest_finite(const float *x, size_t n)
{
    float top = 0;
    for (size_t i = 0; i < n; i++) {
        float a = fabsf(x[i]);
        top = a > top && a <= FLT_MAX ? a : top;
    }
    return top;
}

float dn_fp8_scale(float largest_finite)
{
    float s = largest_finite / 448;
    return s < FLT_MIN ? FLT_MIN : s; /* 1 / s must be finite */
}

uint8_t dn_quantise_fp8(float x, float scale)
{
    return isinf(x) ? 0x7f : dn_f32_to_e4m3(x / scale);
}

/* ---- What is packed ---- */

bool dn_rows_are_complete(const struct dn_rows *r, uint32_t n_in)
{
    int n = !!r->f32 + !!r->bf16 + !!r->q4 + !!r->q8 + !!r->fp8;
    if (n != 1 || ((r->q4 || r->q8) && (!r->scale16 || n_in % GROUP)) || (r->fp8 && !r->block_scale))
        return false;
    return !(r->offset16 && !r->q4) && !(r->scale16 && !r->q4 && !r->q8) && !(r->block_scale && !r->fp8);
}

bool dn_rows_are_lossless(const struct dn_matrix *m, const struct dn_rows *r)
{
    switch (m->format) {
    case DN_W_BF16:
        return r->bf16;
    case DN_W_FP8:
        return r->fp8;
    case DN_W_INT8:
        return r->q8;
    default:
        return r->q4 && m->symmetric == !r->offset16;
    }
}
