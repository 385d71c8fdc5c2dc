/* The row operations (rows.h) on the vectors of simd.inc.h. The includer defines ROW_OPS, the name of its table.
 * Loops without vectors in them are left to the compiler, which vectorises them. */
#include "kernels/cpu/rows.h"

#include <math.h>

static void row_add(float *x, const float *y, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] += y[i];
}

static float square_sum(const float *x, size_t n)
{
    vf a = v_zero(), b = v_zero(), c = v_zero(), d = v_zero();
    size_t i = 0;
    for (; i + 4 * VW <= n; i += 4 * VW) {
        vf p = v_load(x + i), q = v_load(x + i + VW), r = v_load(x + i + 2 * VW), s = v_load(x + i + 3 * VW);
        a = v_fma(p, p, a);
        b = v_fma(q, q, b);
        c = v_fma(r, r, c);
        d = v_fma(s, s, d);
    }
    float tail = 0.0f;
    for (; i < n; i++)
        tail += x[i] * x[i];
    return v_sum((a + b) + (c + d)) + tail;
}

static void row_rmsnorm(const float *x, const float *weight, float eps, size_t n, float *out)
{
    float scale = 1.0f / sqrtf(square_sum(x, n) / (float)n + eps);
    for (size_t i = 0; i < n; i++)
        out[i] = x[i] * scale * weight[i];
}

INLINE vf silu_mul(vf g, vf u)
{
    return g / (v_set(1.0f) + v_exp(v_zero() - g)) * u;
}

static void row_silu_mul(const float *gate, const float *up, size_t n, float *out)
{
    size_t i = 0;
    for (; i + VW <= n; i += VW)
        v_store(out + i, silu_mul(v_load(gate + i), v_load(up + i)));
    if (i < n) {
        float g[VW] = {0}, u[VW] = {0};
        memcpy(g, gate + i, (n - i) * sizeof *g);
        memcpy(u, up + i, (n - i) * sizeof *u);
        v_store(g, silu_mul(v_load(g), v_load(u)));
        memcpy(out + i, g, (n - i) * sizeof *g);
    }
}

static void row_rope(float *x, const float *table, size_t n_pairs, bool interleaved)
{
    if (interleaved) {
        for (size_t i = 0; i < n_pairs; i++) {
            float a = x[2 * i], b = x[2 * i + 1], c = table[2 * i], s = table[2 * i + 1];
            x[2 * i] = a * c - b * s;
            x[2 * i + 1] = b * c + a * s;
        }
        return;
    }
    float *y = x + n_pairs;
    for (size_t i = 0; i < n_pairs; i++) {
        float a = x[i], b = y[i], c = table[2 * i], s = table[2 * i + 1];
        x[i] = a * c - b * s;
        y[i] = b * c + a * s;
    }
}

INLINE uint32_t bits_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static void row_encode_bf16(const float *x, size_t n, uint16_t *out)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t u = bits_of(x[i]);
        uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
        uint32_t nan = (u >> 16) | 0x40;
        out[i] = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : rounded);
    }
}

static void row_encode_fp8(const float *x, size_t n, uint8_t *out, float *scale)
{
    /* |x| ordered as integers: a NaN is above every number and makes itself known. */
    uint32_t top = 0;
    for (size_t i = 0; i < n; i++) {
        uint32_t a = bits_of(x[i]) & 0x7fffffffu;
        top = top > a ? top : a;
    }
    float amax;
    memcpy(&amax, &top, sizeof amax);
    bool nan = top > 0x7f800000u;
    if (nan || top == 0x7f800000u)
        amax = 0x1.fffffep127f;
    bool zero = amax < 1e-30f;
    float inv = zero ? 0.0f : 448.0f / amax;
    *scale = nan ? NAN : zero ? 0.0f : amax / 448.0f;
    for (size_t i = 0; i < n; i++) {
        float y = x[i] * inv;
        uint32_t u = bits_of(y), a = u & 0x7fffffffu;
        uint32_t normal = ((a + 0x7ffffu + ((a >> 20) & 1)) >> 20) - (120u << 3);
        /* Below 2^-6 codes are multiples of 2^-9; adding 2^14 makes the FPU round to them. */
        uint32_t small = bits_of(fabsf(y) + 16384.0f) - 0x46800000u;
        uint32_t code = a < 0x3c800000u ? small : normal;
        code = code > 0x7e ? 0x7e : code;
        code = a > 0x7f800000u ? 0x7f : code;
        out[i] = (uint8_t)(code | ((u >> 24) & 0x80));
    }
}

static void row_add_scaled(float *x, const float *y, float a, size_t n)
{
    for (size_t i = 0; i < n; i++)
        x[i] += a * y[i];
}

static void row_decode_bf16(const uint16_t *x, size_t n, float *out)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t u = (uint32_t)x[i] << 16;
        memcpy(out + i, &u, sizeof u);
    }
}

static void row_decode_fp8(const uint8_t *x, size_t n, float scale, float *out)
{
    size_t i = 0;
    for (; i + VW <= n; i += VW)
        v_store(out + i, v_load_fp8(x + i) * v_set(scale));
    if (i < n) {
        uint8_t rest[16] = {0}; /* as many as a vector loads */
        float y[VW];
        memcpy(rest, x + i, n - i);
        v_store(y, v_load_fp8(rest) * v_set(scale));
        memcpy(out + i, y, (n - i) * sizeof *y);
    }
}

/* ---- Sampler ---- */

enum { ARGMAX_BLOCK = 1024 };

/* Largest value of x [n], n >= 1; *nan says whether any is NaN (then the value means nothing). */
static float block_max(const float *x, uint32_t n, uint32_t *nan)
{
    vf a = v_set(-INFINITY), b = a;
    uint32_t i = 0, unordered = 0;
    for (; i + 2 * VW <= n; i += 2 * VW) {
        vf p = v_load(x + i), q = v_load(x + i + VW);
        unordered |= v_mask_nan(p) | v_mask_nan(q);
        a = v_max(a, p);
        b = v_max(b, q);
    }
    float top = v_top(v_max(a, b));
    for (; i < n; i++) {
        unordered |= x[i] != x[i];
        top = x[i] > top ? x[i] : top;
    }
    *nan = unordered;
    return top;
}

static uint32_t row_argmax(const float *x, uint32_t n, bool *finite)
{
    uint32_t best = 0, nan = 0;
    float top = -INFINITY;
    for (uint32_t i = 0; i < n; i += ARGMAX_BLOCK) {
        uint32_t more;
        float t = block_max(x + i, n - i < ARGMAX_BLOCK ? n - i : ARGMAX_BLOCK, &more);
        nan |= more;
        if (t > top) {
            top = t;
            best = i;
        }
    }
    *finite = !nan && top < INFINITY && top > -INFINITY;
    if (*finite) {
        while (x[best] != top)
            best++;
    }
    return best;
}

static void row_exps(const float *x, size_t n, float max, float inv_t, float *out)
{
    vf m = v_set(max), s = v_set(inv_t);
    size_t i = 0;
    for (; i + VW <= n; i += VW)
        v_store(out + i, v_exp((v_load(x + i) - m) * s));
    if (i < n) {
        float a[VW] = {0};
        memcpy(a, x + i, (n - i) * sizeof *a);
        v_store(a, v_exp((v_load(a) - m) * s));
        memcpy(out + i, a, (n - i) * sizeof *a);
    }
}

static void row_exp_blocks(const float *x, size_t n, float max, float inv_t, float *sum)
{
    vf m = v_set(max), s = v_set(inv_t);
    for (; n >= DN_EXP_BLOCK; n -= DN_EXP_BLOCK, x += DN_EXP_BLOCK) {
        vf a = v_zero(), b = v_zero(), c = v_zero(), d = v_zero();
        for (size_t i = 0; i < DN_EXP_BLOCK; i += 4 * VW) {
            a += v_exp((v_load(x + i) - m) * s);
            b += v_exp((v_load(x + i + VW) - m) * s);
            c += v_exp((v_load(x + i + 2 * VW) - m) * s);
            d += v_exp((v_load(x + i + 3 * VW) - m) * s);
        }
        *sum++ = v_sum((a + b) + (c + d));
    }
    if (n) {
        float e[DN_EXP_BLOCK], total = 0.0f;
        row_exps(x, n, max, inv_t, e);
        for (size_t i = 0; i < n; i++)
            total += e[i];
        *sum = total;
    }
}

static uint32_t row_gather(const float *x, uint32_t n, float cut, uint32_t *id, uint32_t cap)
{
    vf c = v_set(cut);
    uint32_t found = 0, i = 0;
    for (; i + VW <= n; i += VW) {
        vf a = v_load(x + i);
        uint32_t mask = v_mask_less(c, a) | v_mask_equal(c, a);
#if defined(__AVX512F__) && defined(__AVX512BW__)
        if (mask && found + VW <= cap) { /* through a register: storing compressed is slow on Zen 4 */
            __m512i lane = _mm512_add_epi32(_mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15),
                                            _mm512_set1_epi32((int)i));
            _mm512_storeu_si512(id + found, _mm512_maskz_compress_epi32((__mmask16)mask, lane));
            found += (uint32_t)__builtin_popcount(mask);
            continue;
        }
#endif
        for (; mask; mask &= mask - 1) {
            if (found < cap)
                id[found] = i + (uint32_t)__builtin_ctz(mask);
            found++;
        }
    }
    for (; i < n; i++) {
        if (x[i] >= cut) {
            if (found < cap)
                id[found] = i;
            found++;
        }
    }
    return found;
}

const struct dn_row_ops ROW_OPS = {
    .add = row_add,
    .rmsnorm = row_rmsnorm,
    .silu_mul = row_silu_mul,
    .rope = row_rope,
    .encode_bf16 = row_encode_bf16,
    .encode_fp8 = row_encode_fp8,
    .add_scaled = row_add_scaled,
    .decode_bf16 = row_decode_bf16,
    .decode_fp8 = row_decode_fp8,
    .argmax = row_argmax,
    .exps = row_exps,
    .exp_blocks = row_exp_blocks,
    .gather = row_gather,
};
