#include "kernels/cpu/matmul_tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

/* A ymm holds half a block of 16 rows, so that each tile is done in two halves, and each half in parts of at most 4
 * activation rows for want of registers. Sums run in the order of the AVX-512 code. */

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum { PART = 4, HALF = 8 };

/* Half h of block b times rows [m0, m0 + n) of the tile. */
struct part {
    const struct dn_tile *t;
    const uint8_t *block;
    uint32_t b, half, m0;
};

INLINE void prefetch_lines(const struct part *p, const uint8_t *at, int n)
{
    if (!p->t->ahead || p->half || p->m0)
        return;
    for (int i = 0; i < n; i++)
        _mm_prefetch((const char *)at + p->t->ahead + 64 * i, _MM_HINT_T0);
}

INLINE void store(const struct part *p, int m, __m256 sum)
{
    const struct dn_tile *t = p->t;
    uint32_t first = p->b * t->block_rows + p->half * HALF, left = t->n_out > first ? t->n_out - first : 0;
    float *out = t->out + (p->m0 + (uint32_t)m) * t->out_stride + first;
    const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    __m256i rows = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)left), lane);
    if (t->bias)
        sum = _mm256_add_ps(sum, _mm256_maskload_ps(t->bias + first, rows));
    if (left >= HALF)
        _mm256_storeu_ps(out, sum);
    else
        _mm256_maskstore_ps(out, rows, sum);
}

INLINE void bf16_rows(const struct part *p, const int n)
{
    const struct dn_tile *t = p->t;
    const float *a = (const float *)t->act + p->m0;
    const uint8_t *w = p->block + p->half * 32;
    const uint32_t stride = t->n_rows;
    const __m256i high = _mm256_set1_epi32((int)0xffff0000);
    __m256 even[PART], odd[PART];
    UNROLL
    for (int m = 0; m < n; m++)
        even[m] = odd[m] = _mm256_setzero_ps();
    for (uint32_t k = 0; k < t->n_in; k += 4) {
        prefetch_lines(p, w, 2);
        UNROLL
        for (int i = 0; i < 2; i++, w += 64, a += 2 * stride) {
            __m256i v = _mm256_load_si256((const __m256i *)w);
            __m256 w0 = _mm256_castsi256_ps(_mm256_slli_epi32(v, 16)),
                   w1 = _mm256_castsi256_ps(_mm256_and_si256(v, high));
            UNROLL
            for (int m = 0; m < n; m++) {
                even[m] = _mm256_fmadd_ps(w0, _mm256_broadcast_ss(a + m), even[m]);
                odd[m] = _mm256_fmadd_ps(w1, _mm256_broadcast_ss(a + stride + m), odd[m]);
            }
        }
    }
    UNROLL
    for (int m = 0; m < n; m++)
        store(p, m, _mm256_add_ps(even[m], odd[m]));
}

/* e4m3 in the high byte of each word: as an f16 it is 2^-8 times its value (matmul_avx512.c). */
INLINE __m256 e4m3_to_f32(__m128i v)
{
    return _mm256_cvtph_ps(_mm_and_si128(_mm_srai_epi16(v, 1), _mm_set1_epi16((short)0xbf80)));
}

INLINE __m256 fp8_scale(const struct dn_fp8_head *head, uint32_t half)
{
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    __m256i rows = _mm256_and_si256(_mm256_set1_epi32((int)(head->nan_rows >> (half * HALF))), bit);
    return _mm256_blendv_ps(_mm256_set1_ps(head->scale), _mm256_set1_ps(NAN),
                            _mm256_castsi256_ps(_mm256_cmpeq_epi32(rows, bit)));
}

INLINE void fp8_rows(const struct part *p, const int n)
{
    const struct dn_tile *t = p->t;
    const float *a = (const float *)t->act + p->m0;
    const struct dn_fp8_head *head = (const struct dn_fp8_head *)p->block;
    const uint8_t *w = p->block + t->data_at + p->half * 16;
    const uint32_t stride = t->n_rows;
    __m256 sum[PART];
    UNROLL
    for (int m = 0; m < n; m++)
        sum[m] = _mm256_setzero_ps();
    for (uint32_t k0 = 0; k0 < t->n_in; k0 += DN_FP8_BLOCK, head++) {
        uint32_t k1 = k0 + DN_FP8_BLOCK < t->n_in ? k0 + DN_FP8_BLOCK : t->n_in;
        __m256 even[PART], odd[PART];
        UNROLL
        for (int m = 0; m < n; m++)
            even[m] = odd[m] = _mm256_setzero_ps();
        for (uint32_t k = k0; k < k1; k += 4) {
            prefetch_lines(p, w, 1);
            UNROLL
            for (int i = 0; i < 2; i++, w += 32, a += 2 * stride) {
                __m128i v = _mm_load_si128((const __m128i *)w);
                __m256 w0 = e4m3_to_f32(_mm_slli_epi16(v, 8)), w1 = e4m3_to_f32(v);
                UNROLL
                for (int m = 0; m < n; m++) {
                    even[m] = _mm256_fmadd_ps(w0, _mm256_broadcast_ss(a + m), even[m]);
                    odd[m] = _mm256_fmadd_ps(w1, _mm256_broadcast_ss(a + stride + m), odd[m]);
                }
            }
        }
        __m256 scale = fp8_scale(head, p->half);
        UNROLL
        for (int m = 0; m < n; m++) {
            __m256 part = _mm256_mul_ps(_mm256_add_ps(even[m], odd[m]), _mm256_set1_ps(256));
            sum[m] = _mm256_fmadd_ps(part, scale, sum[m]);
        }
    }
    UNROLL
    for (int m = 0; m < n; m++)
        store(p, m, sum[m]);
}

enum int_kind { INT8, INT4_SYM, INT4 };

INLINE __m256 load_scale(const uint8_t *p, bool is_bf16)
{
    __m128i v = _mm_load_si128((const __m128i *)p);
    return is_bf16 ? _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16)) : _mm256_cvtph_ps(v);
}

INLINE __m256i broadcast_quad(const uint8_t *p)
{
    int32_t quad;
    memcpy(&quad, p, sizeof quad);
    return _mm256_set1_epi32(quad);
}

/* Adds the products of nibbles and activations in 16 bits: a lane gets at most 16 products of 15 * 128 in a group,
 * 30,720. */
INLINE __m256i add_quad(__m256i sum, __m256i nibbles, __m256i a)
{
    return _mm256_add_epi16(sum, _mm256_maddubs_epi16(nibbles, a));
}

/* Sums of products of one group for n rows of activations, 8 rows of weights. INT8: the low and the high nibble of each
 * unsigned weight have sums of their own, since 255 * 128 * 2 does not fit in 16 bits. */
INLINE void dot_group(const uint8_t *data, const uint8_t *act, enum int_kind kind, const int n, __m256i dot[PART])
{
    const __m256i low = _mm256_set1_epi8(15), ones = _mm256_set1_epi16(1);
    __m256i lo[PART], hi[PART];
    UNROLL
    for (int m = 0; m < n; m++)
        lo[m] = hi[m] = _mm256_setzero_si256();
    const int n_vectors = kind == INT8 ? 8 : 4;
    UNROLL
    for (int j = 0; j < n_vectors; j++) {
        __m256i v = _mm256_load_si256((const __m256i *)(data + 64 * j));
        __m256i v0 = _mm256_and_si256(v, low), v1 = _mm256_and_si256(_mm256_srli_epi16(v, 4), low);
        UNROLL
        for (int m = 0; m < n; m++) {
            const uint8_t *q = act + m * DN_ACT_BYTES + 4 * j;
            __m256i a = broadcast_quad(q);
            lo[m] = add_quad(lo[m], v0, a);
            if (kind == INT8)
                hi[m] = add_quad(hi[m], v1, a);
            else
                lo[m] = add_quad(lo[m], v1, broadcast_quad(q + 16));
        }
    }
    UNROLL
    for (int m = 0; m < n; m++) {
        dot[m] = _mm256_madd_epi16(lo[m], ones);
        if (kind == INT8)
            dot[m] = _mm256_add_epi32(dot[m], _mm256_slli_epi32(_mm256_madd_epi16(hi[m], ones), 4));
    }
}

INLINE void int_rows(const struct part *p, const int n, const enum int_kind kind)
{
    const struct dn_tile *t = p->t;
    const uint32_t stride = t->n_rows;
    const uint8_t *scale = p->block + p->half * 16, *offset = scale + t->offset_at;
    const uint8_t *data = p->block + t->data_at + p->half * 32, *act = t->act, *next = p->block;
    const int group_bytes = kind == INT8 ? 512 : 256, lines = kind == INT8 ? 9 : 5;
    const size_t next_step = kind == INT8 ? 544 : kind == INT4 ? 320 : 288;
    __m256 sum[PART];
    UNROLL
    for (int m = 0; m < n; m++)
        sum[m] = _mm256_setzero_ps();
    for (uint32_t k = 0; k < t->n_in; k += DN_GROUP) {
        prefetch_lines(p, next, lines);
        const float *act_scale = (const float *)(act + stride * DN_ACT_BYTES) + p->m0;
        const uint8_t *high = act + p->m0 * DN_ACT_BYTES;
        __m256i dot[PART], low[PART];
        dot_group(data, high, kind, n, dot);
        dot_group(data, high + DN_GROUP, kind, n, low);
        __m256 ws = load_scale(scale, t->scale_is_bf16), wo = kind == INT4 ? load_scale(offset, t->scale_is_bf16) : ws;
        UNROLL
        for (int m = 0; m < n; m++) {
            __m256i d = _mm256_add_epi32(_mm256_slli_epi32(dot[m], 8), low[m]);
            if (kind != INT4)
                d = _mm256_add_epi32(d, broadcast_quad((const uint8_t *)(act_scale + stride + m)));
            __m256 s = _mm256_mul_ps(ws, _mm256_broadcast_ss(act_scale + m));
            sum[m] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(d), s, sum[m]);
            if (kind == INT4)
                sum[m] = _mm256_fmadd_ps(wo, _mm256_broadcast_ss(act_scale + stride + m), sum[m]);
        }
        scale += 32;
        offset += 32;
        data += group_bytes;
        next += next_step;
        act += stride * DN_ACT_GROUP_BYTES;
    }
    UNROLL
    for (int m = 0; m < n; m++)
        store(p, m, sum[m]);
}

/* Both halves of each block, in parts of at most 4 rows: 5 are 3 + 2, 6 are 3 + 3. */
#define BY_PARTS(rows, ...)                                                                                            \
    for (uint32_t h = 0, n; h < 2 * t->n_blocks; h++)                                                                  \
        for (uint32_t m0 = 0; m0 < t->n_rows; m0 += n) {                                                               \
            const struct part p = {t, t->block + h / 2 * t->block_bytes, h / 2, h % 2, m0};                            \
            n = t->n_rows - m0 > PART ? 3 : t->n_rows - m0;                                                            \
            switch (n) {                                                                                               \
            case 1:                                                                                                    \
                rows(&p, 1 __VA_ARGS__);                                                                               \
                break;                                                                                                 \
            case 2:                                                                                                    \
                rows(&p, 2 __VA_ARGS__);                                                                               \
                break;                                                                                                 \
            case 3:                                                                                                    \
                rows(&p, 3 __VA_ARGS__);                                                                               \
                break;                                                                                                 \
            default:                                                                                                   \
                rows(&p, 4 __VA_ARGS__);                                                                               \
            }                                                                                                          \
        }

static void tile_bf16(const struct dn_tile *t)
{
    BY_PARTS(bf16_rows, )
}

static void tile_fp8(const struct dn_tile *t)
{
    BY_PARTS(fp8_rows, )
}

static void tile_int8(const struct dn_tile *t)
{
    BY_PARTS(int_rows, , INT8)
}

static void tile_int4_sym(const struct dn_tile *t)
{
    BY_PARTS(int_rows, , INT4_SYM)
}

static void tile_int4(const struct dn_tile *t){BY_PARTS(int_rows, , INT4)}

INLINE uint32_t reduce_max(__m256i v)
{
    __m128i m = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
    m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1));
    return (uint32_t)_mm_cvtsi128_si32(m);
}

INLINE int32_t reduce_add(__m256i v)
{
    __m128i s = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0x4e));
    s = _mm_add_epi32(s, _mm_shuffle_epi32(s, 0xb1));
    return _mm_cvtsi128_si32(s);
}

/* 32 values, to 8 bits in order. */
INLINE void store_bytes(const __m256i q[4], int8_t *out)
{
    /* Packing works within 128-bit lanes; the permutation puts the 32-bit pieces back in order. */
    __m256i b = _mm256_packs_epi16(_mm256_packs_epi32(q[0], q[1]), _mm256_packs_epi32(q[2], q[3]));
    b = _mm256_permutevar8x32_epi32(b, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i *)out, b);
}

/* 32 values times `inverse`, to their high and low halves; returns their sum. */
INLINE int32_t round_group(const float *x, float inverse, int8_t *out)
{
    __m256i q[4], high[4], low[4];
    UNROLL
    for (int i = 0; i < 4; i++) {
        q[i] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * i), _mm256_set1_ps(inverse)));
        high[i] = _mm256_srai_epi32(_mm256_add_epi32(q[i], _mm256_set1_epi32(128)), 8);
        low[i] = _mm256_sub_epi32(q[i], _mm256_slli_epi32(high[i], 8));
    }
    store_bytes(high, out);
    store_bytes(low, out + DN_GROUP);
    return reduce_add(_mm256_add_epi32(_mm256_add_epi32(q[0], q[1]), _mm256_add_epi32(q[2], q[3])));
}

static void act(const float *a, uint32_t n_in, uint32_t n_rows, int zero, uint8_t *out)
{
    const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
    for (uint32_t g = 0; g < n_in / DN_GROUP; g++, out += (size_t)n_rows * DN_ACT_GROUP_BYTES) {
        float *scale = (float *)(out + n_rows * DN_ACT_BYTES);
        for (uint32_t m = 0; m < n_rows; m++) {
            const float *x = a + (size_t)m * n_in + g * DN_GROUP;
            /* As bits: a NaN is larger than infinity, infinity larger than all numbers. */
            __m256i top = _mm256_setzero_si256();
            UNROLL
            for (int i = 0; i < 4; i++)
                top =
                    _mm256_max_epi32(top, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(x + 8 * i)), no_sign));
            uint32_t top_bits = reduce_max(top);
            float amax;
            memcpy(&amax, &top_bits, sizeof amax);
            bool finite = top_bits < 0x7f800000, counts = finite && amax >= DN_ACT_TINY;
            scale[m] = counts ? amax / DN_ACT_MAX : finite ? 0 : NAN;
            int8_t *q = (int8_t *)out + m * DN_ACT_BYTES;
            int32_t sum = 0;
            if (counts)
                sum = round_group(x, DN_ACT_MAX / amax, q);
            else
                memset(q, 0, DN_ACT_BYTES);
            int32_t start = -zero * sum;
            if (zero)
                memcpy(&scale[n_rows + m], &start, sizeof start);
            else
                scale[n_rows + m] = scale[m] * (float)sum;
        }
    }
}

const struct dn_matmul_ops dn_matmul_avx2 = {tile_bf16, tile_fp8, tile_int8, tile_int4_sym,     tile_int4,        act,
                                             NULL,      NULL,     2,         {DN_TILE_ROWS, 2}, {DN_TILE_ROWS, 2}};
#endif
