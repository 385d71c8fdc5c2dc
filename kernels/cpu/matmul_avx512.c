#include "kernels/cpu/matmul_tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

/* One zmm holds 16 rows. Each tile height has its own copy of the code, so that all sums stay in registers.
 *
 * Measured on Ice Lake: two dot products or FMAs a cycle from registers, but hardly more than one 64-byte load or
 * broadcast. Thus two blocks are done at once, so that each broadcast activation is used twice: 6 rows times 2 blocks
 * make 24 registers of sums, which leaves 8 for weights. A single row is bound by memory and takes one block at a time.
 */

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum { BLOCKS = 2 };

INLINE void prefetch_lines(const struct dn_tile *t, const uint8_t *at, int n)
{
    UNROLL
    for (int i = 0; i < n; i++)
        _mm_prefetch((const char *)at + t->ahead + 64 * i, _MM_HINT_T0);
}

INLINE void store(const struct dn_tile *t, int b, int m, __m512 sum)
{
    uint32_t first = (uint32_t)b * DN_BLOCK_ROWS, left = t->n_out - first;
    __mmask16 rows = left >= DN_BLOCK_ROWS ? 0xffff : (__mmask16)((1u << left) - 1);
    if (t->bias)
        sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(rows, t->bias + first));
    _mm512_mask_storeu_ps(t->out + (size_t)m * t->out_stride + first, rows, sum);
}

INLINE __m512 broadcast(const float *p)
{
    return _mm512_set1_ps(*p);
}

/* In all of these, nb blocks and n rows are constants of the copy. */

INLINE void bf16_rows(const struct dn_tile *t, const int nb, const int n)
{
    const float *a = (const float *)t->act;
    const uint8_t *w = t->block;
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    __m512 even[BLOCKS][DN_TILE_ROWS], odd[BLOCKS][DN_TILE_ROWS];
    UNROLL
    for (int b = 0; b < nb; b++) {
        UNROLL
        for (int m = 0; m < n; m++)
            even[b][m] = odd[b][m] = _mm512_setzero_ps();
    }
    for (uint32_t k = 0; k < t->n_in; k += 2, w += 64, a += 2 * n) {
        __m512 w0[BLOCKS], w1[BLOCKS];
        UNROLL
        for (int b = 0; b < nb; b++) {
            const uint8_t *at = w + (size_t)b * t->block_bytes;
            if (t->ahead)
                prefetch_lines(t, at, 1);
            __m512i v = _mm512_load_si512(at);
            w0[b] = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
            w1[b] = _mm512_castsi512_ps(_mm512_and_si512(v, high));
        }
        UNROLL
        for (int m = 0; m < n; m++) {
            __m512 a0 = broadcast(a + m), a1 = broadcast(a + n + m);
            UNROLL
            for (int b = 0; b < nb; b++) {
                even[b][m] = _mm512_fmadd_ps(w0[b], a0, even[b][m]);
                odd[b][m] = _mm512_fmadd_ps(w1[b], a1, odd[b][m]);
            }
        }
    }
    UNROLL
    for (int b = 0; b < nb; b++) {
        UNROLL
        for (int m = 0; m < n; m++)
            store(t, b, m, _mm512_add_ps(even[b][m], odd[b][m]));
    }
}

/* e4m3 in the high byte of each word: as an f16 it is 2^-8 times its value, subnormals included. NaN comes out as a
 * number; the header's mask puts it back. */
INLINE __m512i e4m3_to_f16(__m512i v)
{
    return _mm512_and_si512(_mm512_srai_epi16(v, 1), _mm512_set1_epi16((short)0xbf80));
}

INLINE __m512 half_to_f32(__m512i v, const int half)
{
    return _mm512_cvtph_ps(half ? _mm512_extracti64x4_epi64(v, 1) : _mm512_castsi512_si256(v));
}

INLINE __m512 fp8_scale(const struct dn_fp8_head *head)
{
    return _mm512_mask_mov_ps(_mm512_set1_ps(head->scale), (__mmask16)head->nan_rows, _mm512_set1_ps(NAN));
}

INLINE void fp8_rows(const struct dn_tile *t, const int nb, const int n)
{
    const float *a = (const float *)t->act;
    const uint8_t *head = t->block, *w = t->block + t->data_at;
    __m512 sum[BLOCKS][DN_TILE_ROWS];
    UNROLL
    for (int b = 0; b < nb; b++) {
        UNROLL
        for (int m = 0; m < n; m++)
            sum[b][m] = _mm512_setzero_ps();
    }
    for (uint32_t k0 = 0; k0 < t->n_in; k0 += DN_FP8_BLOCK, head += DN_FP8_HEAD_BYTES) {
        uint32_t k1 = k0 + DN_FP8_BLOCK < t->n_in ? k0 + DN_FP8_BLOCK : t->n_in;
        __m512 even[BLOCKS][DN_TILE_ROWS], odd[BLOCKS][DN_TILE_ROWS];
        UNROLL
        for (int b = 0; b < nb; b++) {
            UNROLL
            for (int m = 0; m < n; m++)
                even[b][m] = odd[b][m] = _mm512_setzero_ps();
        }
        for (uint32_t k = k0; k < k1; k += 4, w += 64, a += 4 * n) {
            __m512i v0[BLOCKS], v1[BLOCKS];
            UNROLL
            for (int b = 0; b < nb; b++) {
                const uint8_t *at = w + (size_t)b * t->block_bytes;
                if (t->ahead)
                    prefetch_lines(t, at, 1);
                __m512i v = _mm512_load_si512(at);
                v0[b] = e4m3_to_f16(_mm512_slli_epi16(v, 8));
                v1[b] = e4m3_to_f16(v);
            }
            UNROLL
            for (int half = 0; half < 2; half++) {
                __m512 w0[BLOCKS], w1[BLOCKS];
                UNROLL
                for (int b = 0; b < nb; b++) {
                    w0[b] = half_to_f32(v0[b], half);
                    w1[b] = half_to_f32(v1[b], half);
                }
                UNROLL
                for (int m = 0; m < n; m++) {
                    __m512 a0 = broadcast(a + 2 * half * n + m), a1 = broadcast(a + (2 * half + 1) * n + m);
                    UNROLL
                    for (int b = 0; b < nb; b++) {
                        even[b][m] = _mm512_fmadd_ps(w0[b], a0, even[b][m]);
                        odd[b][m] = _mm512_fmadd_ps(w1[b], a1, odd[b][m]);
                    }
                }
            }
        }
        UNROLL
        for (int b = 0; b < nb; b++) {
            __m512 scale = fp8_scale((const struct dn_fp8_head *)(head + (size_t)b * t->block_bytes));
            UNROLL
            for (int m = 0; m < n; m++) {
                __m512 part = _mm512_mul_ps(_mm512_add_ps(even[b][m], odd[b][m]), _mm512_set1_ps(256));
                sum[b][m] = _mm512_fmadd_ps(part, scale, sum[b][m]);
            }
        }
    }
    UNROLL
    for (int b = 0; b < nb; b++) {
        UNROLL
        for (int m = 0; m < n; m++)
            store(t, b, m, sum[b][m]);
    }
}

enum int_kind { INT8, INT4_SYM, INT4 };

INLINE __m512 load_scale(const uint8_t *p, bool is_bf16)
{
    __m256i v = _mm256_load_si256((const __m256i *)p);
    return is_bf16 ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)) : _mm512_cvtph_ps(v);
}

INLINE __m512i broadcast_quad(const uint8_t *p)
{
    int32_t quad;
    memcpy(&quad, p, sizeof quad);
    return _mm512_set1_epi32(quad);
}

/* Adds the products of quad `at` of the n rows' group with one vector of each block. */
INLINE void dot_quad(const uint8_t *act, const int at, const int nb, const int n, const __m512i w[BLOCKS],
                     __m512i dot[BLOCKS][DN_TILE_ROWS])
{
    UNROLL
    for (int m = 0; m < n; m++) {
        __m512i a = broadcast_quad(act + m * DN_GROUP + 4 * at);
        UNROLL
        for (int b = 0; b < nb; b++)
            dot[b][m] = _mm512_dpbusd_epi32(dot[b][m], w[b], a);
    }
}

INLINE void dot_group(const struct dn_tile *t, const uint8_t *data, const uint8_t *act, const int nb, const int n,
                      const enum int_kind kind, __m512i dot[BLOCKS][DN_TILE_ROWS])
{
    const __m512i low = _mm512_set1_epi8(15);
    const int n_vectors = kind == INT8 ? 8 : 4;
    UNROLL
    for (int j = 0; j < n_vectors; j++) {
        __m512i w[BLOCKS], w_high[BLOCKS];
        UNROLL
        for (int b = 0; b < nb; b++) {
            w[b] = _mm512_load_si512(data + (size_t)b * t->block_bytes + 64 * j);
            if (kind != INT8) {
                w_high[b] = _mm512_and_si512(_mm512_srli_epi16(w[b], 4), low);
                w[b] = _mm512_and_si512(w[b], low);
            }
        }
        dot_quad(act, j, nb, n, w, dot);
        if (kind != INT8)
            dot_quad(act, j + 4, nb, n, w_high, dot);
    }
}

INLINE void int_rows(const struct dn_tile *t, const int nb, const int n, const enum int_kind kind)
{
    const uint8_t *scale = t->block, *offset = t->block + t->offset_at, *data = t->block + t->data_at, *act = t->act;
    const uint8_t *next = t->block;
    const int group_bytes = kind == INT8 ? 512 : 256, lines = kind == INT8 ? 9 : 5;
    const size_t next_step = kind == INT8 ? 544 : kind == INT4 ? 320 : 288;
    __m512 sum[BLOCKS][DN_TILE_ROWS];
    UNROLL
    for (int b = 0; b < nb; b++) {
        UNROLL
        for (int m = 0; m < n; m++)
            sum[b][m] = _mm512_setzero_ps();
    }
    for (uint32_t k = 0; k < t->n_in; k += DN_GROUP) {
        const float *act_scale = (const float *)(act + n * DN_GROUP);
        __m512i dot[BLOCKS][DN_TILE_ROWS];
        UNROLL
        for (int m = 0; m < n; m++) {
            __m512i start =
                kind == INT4 ? _mm512_setzero_si512() : broadcast_quad((const uint8_t *)(act_scale + n + m));
            dot[0][m] = dot[1][m] = start;
        }
        dot_group(t, data, act, nb, n, kind, dot);
        UNROLL
        for (int b = 0; b < nb; b++) {
            if (t->ahead)
                prefetch_lines(t, next + (size_t)b * t->block_bytes, lines);
            __m512 ws = load_scale(scale + (size_t)b * t->block_bytes, t->scale_is_bf16), wo = ws;
            if (kind == INT4)
                wo = load_scale(offset + (size_t)b * t->block_bytes, t->scale_is_bf16);
            UNROLL
            for (int m = 0; m < n; m++) {
                __m512 s = _mm512_mul_ps(ws, broadcast(act_scale + m));
                sum[b][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot[b][m]), s, sum[b][m]);
                if (kind == INT4)
                    sum[b][m] = _mm512_fmadd_ps(wo, broadcast(act_scale + n + m), sum[b][m]);
            }
        }
        scale += 32;
        offset += 32;
        data += group_bytes;
        next += next_step;
        act += n * DN_ACT_GROUP_BYTES;
    }
    UNROLL
    for (int b = 0; b < nb; b++) {
        UNROLL
        for (int m = 0; m < n; m++)
            store(t, b, m, sum[b][m]);
    }
}

/* One block of two, as a tile of its own. */
INLINE struct dn_tile one_block(const struct dn_tile *t, uint32_t b)
{
    struct dn_tile one = *t;
    one.n_blocks = 1;
    one.block += b * t->block_bytes;
    one.out += b * DN_BLOCK_ROWS;
    one.bias = t->bias ? t->bias + b * DN_BLOCK_ROWS : NULL;
    one.n_out -= b * DN_BLOCK_ROWS;
    return one;
}

#define BY_HEIGHT(rows, ...)                                                                                           \
    if (t->n_rows == 1 || t->n_blocks == 1) {                                                                          \
        for (uint32_t b = 0; b < t->n_blocks; b++) {                                                                   \
            const struct dn_tile one = one_block(t, b);                                                                \
            switch (t->n_rows) {                                                                                       \
            case 1:                                                                                                    \
                rows(&one, 1, 1 __VA_ARGS__);                                                                          \
                break;                                                                                                 \
            case 2:                                                                                                    \
                rows(&one, 1, 2 __VA_ARGS__);                                                                          \
                break;                                                                                                 \
            case 3:                                                                                                    \
                rows(&one, 1, 3 __VA_ARGS__);                                                                          \
                break;                                                                                                 \
            case 4:                                                                                                    \
                rows(&one, 1, 4 __VA_ARGS__);                                                                          \
                break;                                                                                                 \
            case 5:                                                                                                    \
                rows(&one, 1, 5 __VA_ARGS__);                                                                          \
                break;                                                                                                 \
            default:                                                                                                   \
                rows(&one, 1, 6 __VA_ARGS__);                                                                          \
            }                                                                                                          \
        }                                                                                                              \
        return;                                                                                                        \
    }                                                                                                                  \
    switch (t->n_rows) {                                                                                               \
    case 2:                                                                                                            \
        rows(t, 2, 2 __VA_ARGS__);                                                                                     \
        break;                                                                                                         \
    case 3:                                                                                                            \
        rows(t, 2, 3 __VA_ARGS__);                                                                                     \
        break;                                                                                                         \
    case 4:                                                                                                            \
        rows(t, 2, 4 __VA_ARGS__);                                                                                     \
        break;                                                                                                         \
    case 5:                                                                                                            \
        rows(t, 2, 5 __VA_ARGS__);                                                                                     \
        break;                                                                                                         \
    default:                                                                                                           \
        rows(t, 2, 6 __VA_ARGS__);                                                                                     \
    }

static void tile_bf16(const struct dn_tile *t)
{
    BY_HEIGHT(bf16_rows, )
}

static void tile_fp8(const struct dn_tile *t)
{
    BY_HEIGHT(fp8_rows, )
}

static void tile_int8(const struct dn_tile *t)
{
    BY_HEIGHT(int_rows, , INT8)
}

static void tile_int4_sym(const struct dn_tile *t)
{
    BY_HEIGHT(int_rows, , INT4_SYM)
}

static void tile_int4(const struct dn_tile *t)
{
    BY_HEIGHT(int_rows, , INT4)
}

static void act(const float *a, uint32_t n_in, uint32_t n_rows, int zero, uint8_t *out)
{
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
    for (uint32_t g = 0; g < n_in / DN_GROUP; g++, out += (size_t)n_rows * DN_ACT_GROUP_BYTES) {
        float *scale = (float *)(out + n_rows * DN_GROUP);
        for (uint32_t m = 0; m < n_rows; m++) {
            const float *x = a + (size_t)m * n_in + g * DN_GROUP;
            __m512 x0 = _mm512_loadu_ps(x), x1 = _mm512_loadu_ps(x + 16);
            /* As bits: a NaN is larger than infinity, infinity larger than all numbers. */
            __m512i top = _mm512_max_epi32(_mm512_and_si512(_mm512_castps_si512(x0), no_sign),
                                           _mm512_and_si512(_mm512_castps_si512(x1), no_sign));
            uint32_t top_bits = (uint32_t)_mm512_reduce_max_epi32(top);
            float amax, inverse = 0;
            memcpy(&amax, &top_bits, sizeof amax);
            bool finite = top_bits < 0x7f800000, counts = finite && amax >= DN_ACT_TINY;
            if (counts)
                inverse = 127 / amax;
            scale[m] = counts ? amax / 127 : finite ? 0 : NAN;
            __mmask16 keep = counts ? 0xffff : 0;
            __m512i q0 = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(x0, _mm512_set1_ps(inverse))),
                    q1 = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(x1, _mm512_set1_ps(inverse)));
            int8_t *q = (int8_t *)out + m * DN_GROUP;
            _mm_storeu_si128((__m128i *)q, _mm512_cvtsepi32_epi8(q0));
            _mm_storeu_si128((__m128i *)(q + 16), _mm512_cvtsepi32_epi8(q1));
            int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(q0, q1)), start = -zero * sum;
            if (zero)
                memcpy(&scale[n_rows + m], &start, sizeof start);
            else
                scale[n_rows + m] = scale[m] * (float)sum;
        }
    }
}

const struct dn_matmul_ops dn_matmul_avx512 = {tile_bf16, tile_fp8, tile_int8, tile_int4_sym, tile_int4, act};
#endif
