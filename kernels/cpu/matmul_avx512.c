#include "kernels/cpu/matmul_tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

/* One zmm holds 16 rows. Each tile height has its own copy of the code, so that all sums stay in registers: 8 sums, 8
 * vectors of weights and the 8 sums of the group fill the 32 registers. */

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* How far ahead of use lines are asked for. The hardware's prefetcher stops at every 4 KiB. */
enum { AHEAD = 4096 };

INLINE void prefetch_lines(const uint8_t *at, int n)
{
    UNROLL
    for (int i = 0; i < n; i++)
        _mm_prefetch((const char *)at + AHEAD + 64 * i, _MM_HINT_T0);
}

INLINE void store(const struct dn_tile *t, int m, __m512 sum)
{
    __mmask16 rows = (__mmask16)((1u << t->n_out) - 1);
    if (t->bias)
        sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(rows, t->bias));
    _mm512_mask_storeu_ps(t->out + (size_t)m * t->out_stride, rows, sum);
}

INLINE __m512 broadcast(const float *p)
{
    return _mm512_set1_ps(*p);
}

INLINE void bf16_rows(const struct dn_tile *t, const int n)
{
    const float *a = (const float *)t->act;
    const uint8_t *w = t->block;
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    __m512 even[DN_TILE_ROWS], odd[DN_TILE_ROWS];
    UNROLL
    for (int m = 0; m < n; m++)
        even[m] = odd[m] = _mm512_setzero_ps();
    for (uint32_t k = 0; k < t->n_in; k += 4, w += 128, a += 4 * n) {
        if (t->prefetch)
            prefetch_lines(w, 2);
        UNROLL
        for (int p = 0; p < 2; p++) {
            __m512i v = _mm512_load_si512(w + 64 * p);
            __m512 w0 = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16)),
                   w1 = _mm512_castsi512_ps(_mm512_and_si512(v, high));
            UNROLL
            for (int m = 0; m < n; m++) {
                even[m] = _mm512_fmadd_ps(w0, broadcast(a + 2 * p * n + m), even[m]);
                odd[m] = _mm512_fmadd_ps(w1, broadcast(a + (2 * p + 1) * n + m), odd[m]);
            }
        }
    }
    UNROLL
    for (int m = 0; m < n; m++)
        store(t, m, _mm512_add_ps(even[m], odd[m]));
}

/* e4m3 in the high byte of each word: as an f16 it is 2^-8 times its value, subnormals included. NaN comes out as a
 * number; the header's mask puts it back. */
INLINE __m512i e4m3_to_f16(__m512i v)
{
    return _mm512_and_si512(_mm512_srai_epi16(v, 1), _mm512_set1_epi16((short)0xbf80));
}

INLINE void fp8_rows(const struct dn_tile *t, const int n)
{
    const float *a = (const float *)t->act;
    const struct dn_fp8_head *head = (const struct dn_fp8_head *)t->block;
    const uint8_t *w = t->block + t->data_at;
    __m512 sum[DN_TILE_ROWS];
    UNROLL
    for (int m = 0; m < n; m++)
        sum[m] = _mm512_setzero_ps();
    for (uint32_t k0 = 0; k0 < t->n_in; k0 += DN_FP8_BLOCK, head++) {
        uint32_t k1 = k0 + DN_FP8_BLOCK < t->n_in ? k0 + DN_FP8_BLOCK : t->n_in;
        __m512 even[DN_TILE_ROWS], odd[DN_TILE_ROWS];
        UNROLL
        for (int m = 0; m < n; m++)
            even[m] = odd[m] = _mm512_setzero_ps();
        for (uint32_t k = k0; k < k1; k += 4, w += 64, a += 4 * n) {
            if (t->prefetch)
                prefetch_lines(w, 1);
            __m512i v = _mm512_load_si512(w), v0 = e4m3_to_f16(_mm512_slli_epi16(v, 8)), v1 = e4m3_to_f16(v);
            __m512 w0 = _mm512_cvtph_ps(_mm512_castsi512_si256(v0)), w1 = _mm512_cvtph_ps(_mm512_castsi512_si256(v1)),
                   w2 = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v0, 1)),
                   w3 = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(v1, 1));
            UNROLL
            for (int m = 0; m < n; m++) {
                even[m] = _mm512_fmadd_ps(w0, broadcast(a + m), even[m]);
                odd[m] = _mm512_fmadd_ps(w1, broadcast(a + n + m), odd[m]);
                even[m] = _mm512_fmadd_ps(w2, broadcast(a + 2 * n + m), even[m]);
                odd[m] = _mm512_fmadd_ps(w3, broadcast(a + 3 * n + m), odd[m]);
            }
        }
        __m512 scale = _mm512_mask_mov_ps(_mm512_set1_ps(head->scale), (__mmask16)head->nan_rows, _mm512_set1_ps(NAN));
        UNROLL
        for (int m = 0; m < n; m++) {
            __m512 part = _mm512_mul_ps(_mm512_add_ps(even[m], odd[m]), _mm512_set1_ps(256));
            sum[m] = _mm512_fmadd_ps(part, scale, sum[m]);
        }
    }
    UNROLL
    for (int m = 0; m < n; m++)
        store(t, m, sum[m]);
}

enum int_kind { INT8, INT4_SYM, INT4 };

INLINE __m512 load_scale(const uint8_t *p, bool is_bf16)
{
    __m256i v = _mm256_load_si256((const __m256i *)p);
    return is_bf16 ? _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16)) : _mm512_cvtph_ps(v);
}

INLINE void load_group(const uint8_t *data, enum int_kind kind, __m512i w[8])
{
    if (kind == INT8) {
        UNROLL
        for (int j = 0; j < 8; j++)
            w[j] = _mm512_load_si512(data + 64 * j);
    } else {
        const __m512i low = _mm512_set1_epi8(15);
        UNROLL
        for (int j = 0; j < 4; j++) {
            __m512i v = _mm512_load_si512(data + 64 * j);
            w[j] = _mm512_and_si512(v, low);
            w[j + 4] = _mm512_and_si512(_mm512_srli_epi16(v, 4), low);
        }
    }
}

INLINE __m512i broadcast_quad(const uint8_t *p)
{
    int32_t quad;
    memcpy(&quad, p, sizeof quad);
    return _mm512_set1_epi32(quad);
}

INLINE void int_rows(const struct dn_tile *t, const int n, const enum int_kind kind)
{
    const uint8_t *scale = t->block, *offset = t->block + t->offset_at, *data = t->block + t->data_at, *act = t->act;
    const uint8_t *next = t->block;
    const int group_bytes = kind == INT8 ? 512 : 256, lines = kind == INT8 ? 9 : 5;
    const size_t next_step = kind == INT8 ? 544 : kind == INT4 ? 320 : 288;
    __m512 sum[DN_TILE_ROWS];
    UNROLL
    for (int m = 0; m < n; m++)
        sum[m] = _mm512_setzero_ps();
    for (uint32_t k = 0; k < t->n_in; k += DN_GROUP) {
        if (t->prefetch)
            prefetch_lines(next, lines);
        const float *act_scale = (const float *)(act + n * DN_GROUP);
        __m512i w[8];
        load_group(data, kind, w);
        __m512 ws = load_scale(scale, t->scale_is_bf16);
        __m512 wo = kind == INT4 ? load_scale(offset, t->scale_is_bf16) : ws;
        UNROLL
        for (int m = 0; m < n; m++) {
            __m512i dot = kind == INT4 ? _mm512_setzero_si512() : broadcast_quad((const uint8_t *)(act_scale + n + m));
            UNROLL
            for (int j = 0; j < 8; j++)
                dot = _mm512_dpbusd_epi32(dot, w[j], broadcast_quad(act + m * DN_GROUP + 4 * j));
            sum[m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), _mm512_mul_ps(ws, broadcast(act_scale + m)), sum[m]);
            if (kind == INT4)
                sum[m] = _mm512_fmadd_ps(wo, broadcast(act_scale + n + m), sum[m]);
        }
        scale += 32;
        offset += 32;
        data += group_bytes;
        next += next_step;
        act += n * DN_ACT_GROUP_BYTES;
    }
    UNROLL
    for (int m = 0; m < n; m++)
        store(t, m, sum[m]);
}

#define BY_HEIGHT(call)                                                                                                \
    switch (t->n_rows) {                                                                                               \
    case 1:                                                                                                            \
        call(1);                                                                                                       \
    case 2:                                                                                                            \
        call(2);                                                                                                       \
    case 3:                                                                                                            \
        call(3);                                                                                                       \
    case 4:                                                                                                            \
        call(4);                                                                                                       \
    case 5:                                                                                                            \
        call(5);                                                                                                       \
    case 6:                                                                                                            \
        call(6);                                                                                                       \
    case 7:                                                                                                            \
        call(7);                                                                                                       \
    default:                                                                                                           \
        call(8);                                                                                                       \
    }

static void tile_bf16(const struct dn_tile *t)
{
#define CALL(n) return bf16_rows(t, n)
    BY_HEIGHT(CALL)
#undef CALL
}

static void tile_fp8(const struct dn_tile *t)
{
#define CALL(n) return fp8_rows(t, n)
    BY_HEIGHT(CALL)
#undef CALL
}

static void tile_int8(const struct dn_tile *t)
{
#define CALL(n) return int_rows(t, n, INT8)
    BY_HEIGHT(CALL)
#undef CALL
}

static void tile_int4_sym(const struct dn_tile *t)
{
#define CALL(n) return int_rows(t, n, INT4_SYM)
    BY_HEIGHT(CALL)
#undef CALL
}

static void tile_int4(const struct dn_tile *t)
{
#define CALL(n) return int_rows(t, n, INT4)
    BY_HEIGHT(CALL)
#undef CALL
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
