#include "kernels/cpu/matmul_tile.h"

#if defined(__x86_64__)
#include <immintrin.h>
#include <math.h>
#include <string.h>

/* One zmm holds 16 rows. Each tile height has its own copy of the code, so that all sums stay in registers.
 *
 * Measured on Ice Lake: two dot products or FMAs a cycle from registers, but hardly more than one 64-byte load or
 * broadcast. Thus several blocks are done at once, so that each broadcast activation is used for each of them.
 *
 * BF16, FP8: 6 rows times 2 blocks make 24 registers of sums, which leaves 8 for weights. A single row is bound by
 * memory and takes one block at a time.
 *
 * INT8, INT4: a row and a block have three registers, sums of the high and the low halves of the activations and the
 * f32 sum, so that each weight is loaded and unpacked once. 3 rows times 3 blocks need 11.0 cycles for a row, a block
 * and a group, of which the dot products are 8 (both halves one after the other in one register, 6 rows times 2
 * blocks: 13.2); with INT4's offsets, which are one FMA more, 12.0 as 4 times 2 do, whose weights are unpacked for more
 * rows. A single row is bound by memory and takes up to 8 blocks, of as many streams. */

#define INLINE static inline __attribute__((always_inline))
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum { BLOCKS = 2, INT_ROWS = 4, FEW_ROWS = 3, ROW_BLOCKS = 8 };

INLINE void prefetch_lines(const struct dn_tile *t, const uint8_t *at, int n)
{
    UNROLL
    for (int i = 0; i < n; i++)
        _mm_prefetch((const char *)at + t->ahead + 64 * i, _MM_HINT_T0);
}

INLINE void store(const struct dn_tile *t, int b, int m, __m512 sum)
{
    uint32_t first = (uint32_t)b * t->block_rows, left = t->n_out - first;
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

/* Inputs k and k + 1 of a block that widen_fp8() unpacked. */
INLINE void wide_pair(const uint8_t *block, uint32_t k, __m512 *w0, __m512 *w1)
{
    __m512i v = _mm512_load_si512(block + (size_t)k * 2 * DN_BLOCK_ROWS);
    *w0 = _mm512_castsi512_ps(_mm512_slli_epi32(v, 16));
    *w1 = _mm512_castsi512_ps(_mm512_and_si512(v, _mm512_set1_epi32((int)0xffff0000)));
}

/* Inputs k..k+3 of block b, 2^-8 times their values. */
INLINE void fp8_quad(const struct dn_tile *t, const int b, uint32_t k, __m512 w[4][BLOCKS])
{
    const uint8_t *at = t->block + t->data_at + (size_t)b * t->block_bytes + (size_t)k * DN_BLOCK_ROWS;
    if (t->ahead)
        prefetch_lines(t, at, 1);
    __m512i v = _mm512_load_si512(at), v0 = e4m3_to_f16(_mm512_slli_epi16(v, 8)), v1 = e4m3_to_f16(v);
    UNROLL
    for (int i = 0; i < 2; i++) {
        w[2 * i][b] = half_to_f32(v0, i);
        w[2 * i + 1][b] = half_to_f32(v1, i);
    }
}

static void widen_fp8(const struct dn_tile *t, uint8_t *out)
{
    const __m512i high = _mm512_set1_epi32((int)0xffff0000);
    for (int b = 0; b < (int)t->n_blocks; b++)
        for (uint32_t k = 0; k < t->n_in; k += 4) {
            __m512 w[4][BLOCKS];
            fp8_quad(t, b, k, w);
            uint8_t *at = out + (size_t)b * t->wide_bytes + (size_t)k * 2 * DN_BLOCK_ROWS;
            UNROLL
            for (int i = 0; i < 2; i++) {
                __m512i even = _mm512_srli_epi32(_mm512_castps_si512(w[2 * i][b]), 16);
                __m512i odd = _mm512_and_si512(_mm512_castps_si512(w[2 * i + 1][b]), high);
                _mm512_store_si512(at + 64 * i, _mm512_or_si512(even, odd));
            }
        }
}

INLINE void fp8_rows(const struct dn_tile *t, const int nb, const int n, const bool wide)
{
    const float *a = (const float *)t->act;
    const uint8_t *head = t->block;
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
        for (uint32_t k = k0; k < k1; k += 4, a += 4 * n) {
            __m512 w[4][BLOCKS];
            UNROLL
            for (int b = 0; b < nb && !wide; b++)
                fp8_quad(t, b, k, w);
            UNROLL
            for (int i = 0; i < 4; i += 2) {
                UNROLL
                for (int b = 0; b < nb && wide; b++)
                    wide_pair(t->wide + (size_t)b * t->wide_bytes, k + (uint32_t)i, &w[i][b], &w[i + 1][b]);
                UNROLL
                for (int m = 0; m < n; m++) {
                    __m512 a0 = broadcast(a + i * n + m), a1 = broadcast(a + (i + 1) * n + m);
                    UNROLL
                    for (int b = 0; b < nb; b++) {
                        even[b][m] = _mm512_fmadd_ps(w[i][b], a0, even[b][m]);
                        odd[b][m] = _mm512_fmadd_ps(w[i + 1][b], a1, odd[b][m]);
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

/* Nibbles in the high half of each byte. */
INLINE __m512i high_nibbles(__m512i v)
{
    return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15));
}

INLINE __m512i low_nibbles(__m512i v)
{
    return _mm512_and_si512(v, _mm512_set1_epi8(15));
}

/* Of one block: the data as in an INT8 block, then [n_in / 32][16] f32 scales, then as many offsets. */
static void widen_block(const struct dn_tile *t, uint32_t b, uint8_t *out)
{
    const uint8_t *block = t->block + b * t->block_bytes, *data = block + t->data_at;
    uint8_t *scale = out + (size_t)t->n_in * DN_BLOCK_ROWS, *offset = scale + t->n_in / DN_GROUP * 64;
    for (uint32_t k = 0; k < t->n_in; k += DN_GROUP, data += 256, out += 512, block += 32, scale += 64, offset += 64) {
        UNROLL
        for (int j = 0; j < 4; j++) {
            __m512i v = _mm512_load_si512(data + 64 * j);
            _mm512_store_si512(out + 64 * j, low_nibbles(v));
            _mm512_store_si512(out + 64 * j + 256, high_nibbles(v));
        }
        _mm512_store_ps(scale, load_scale(block, t->scale_is_bf16));
        if (t->data_at > t->offset_at) /* not symmetric */
            _mm512_store_ps(offset, load_scale(block + t->offset_at, t->scale_is_bf16));
    }
}

static void widen_int4(const struct dn_tile *t, uint8_t *out)
{
    for (uint32_t b = 0; b < t->n_blocks; b++)
        widen_block(t, b, out + b * t->wide_bytes);
}

/* t from block b on. */
INLINE struct dn_tile from_block(const struct dn_tile *t, uint32_t b)
{
    struct dn_tile rest = *t;
    rest.n_blocks -= b;
    rest.block += b * t->block_bytes;
    rest.out += b * t->block_rows;
    rest.bias = t->bias ? t->bias + b * t->block_rows : NULL;
    rest.n_out -= b * t->block_rows;
    rest.wide = t->wide ? t->wide + b * t->wide_bytes : NULL;
    return rest;
}

/* Where a tile is in each of its blocks, `stride` bytes apart. */
struct at {
    const uint8_t *data, *scale, *offset;
    size_t stride;
};

INLINE struct at first_group(const struct dn_tile *t, const bool wide)
{
    if (!wide)
        return (struct at){t->block + t->data_at, t->block, t->block + t->offset_at, t->block_bytes};
    const uint8_t *scale = t->wide + (size_t)t->n_in * DN_BLOCK_ROWS;
    return (struct at){t->wide, scale, scale + t->n_in / DN_GROUP * 64, t->wide_bytes};
}

INLINE __m512 scale_at(const struct dn_tile *t, const uint8_t *p, const bool wide)
{
    return wide ? _mm512_load_ps(p) : load_scale(p, t->scale_is_bf16);
}

/* Adds the products of one vector of each block with quad `at` of the rows' high and low halves. */
INLINE void dot_quad(const uint8_t *act, const int at, const int nb, const int n, const __m512i w[ROW_BLOCKS],
                     __m512i high[ROW_BLOCKS][INT_ROWS], __m512i low[ROW_BLOCKS][INT_ROWS])
{
    UNROLL
    for (int m = 0; m < n; m++) {
        __m512i a = broadcast_quad(act + m * DN_ACT_BYTES + 4 * at);
        __asm__("" : "+v"(a)); /* one load for all blocks */
        UNROLL
        for (int b = 0; b < nb; b++)
            high[b][m] = _mm512_dpbusd_epi32(high[b][m], w[b], a);
        a = broadcast_quad(act + m * DN_ACT_BYTES + DN_GROUP + 4 * at);
        __asm__("" : "+v"(a));
        UNROLL
        for (int b = 0; b < nb; b++)
            low[b][m] = _mm512_dpbusd_epi32(low[b][m], w[b], a);
    }
}

/* The products of one group, both halves of the activations at once: each weight is loaded and unpacked once. */
INLINE void dot_group(const struct at *at, const uint8_t *act, const int nb, const int n, const bool nibbles,
                      __m512i high[ROW_BLOCKS][INT_ROWS], __m512i low[ROW_BLOCKS][INT_ROWS])
{
    const int n_vectors = nibbles ? 4 : 8;
    UNROLL
    for (int j = 0; j < n_vectors; j++) {
        __m512i v[ROW_BLOCKS], w[ROW_BLOCKS];
        UNROLL
        for (int b = 0; b < nb; b++) {
            v[b] = _mm512_load_si512(at->data + (size_t)b * at->stride + 64 * j);
            w[b] = nibbles ? low_nibbles(v[b]) : v[b];
        }
        dot_quad(act, j, nb, n, w, high, low);
        if (!nibbles)
            continue;
        UNROLL
        for (int b = 0; b < nb; b++)
            w[b] = high_nibbles(v[b]);
        dot_quad(act, j + 4, nb, n, w, high, low);
    }
}

/* What is to come from memory: of streams all of it, `ahead` bytes behind; else this tile's share of the next blocks.
 */
INLINE void prefetch_group(const struct dn_tile *t, const int nb, const int n, const int lines, const uint8_t *next)
{
    if (n <= FEW_ROWS && !t->next) {
        UNROLL
        for (int b = 0; b < nb; b++)
            prefetch_lines(t, next + (size_t)b * t->block_bytes, lines);
        return;
    }
    for (size_t i = 0; i < t->next_step; i += 64) {
        UNROLL
        for (int b = 0; b < nb; b++)
            _mm_prefetch((const char *)next + (size_t)b * t->block_bytes + i, _MM_HINT_T1);
    }
}

INLINE void int_tile(const struct dn_tile *t, const int nb, const int n, const enum int_kind kind, const bool wide)
{
    struct at at = first_group(t, wide);
    const uint8_t *act = t->act, *next = n > FEW_ROWS || t->next ? t->next : t->block;
    const bool nibbles = kind != INT8 && !wide;
    const int lines = kind == INT8 ? 9 : 5;
    const size_t next_step = n > FEW_ROWS || t->next ? t->next_step : kind == INT8 ? 544 : kind == INT4 ? 320 : 288;
    __m512 sum[ROW_BLOCKS][INT_ROWS];
    UNROLL
    for (int b = 0; b < nb; b++) {
        UNROLL
        for (int m = 0; m < n; m++)
            sum[b][m] = _mm512_setzero_ps();
    }
    for (uint32_t k = 0; k < t->n_in; k += DN_GROUP) {
        const float *act_scale = (const float *)(act + n * DN_ACT_BYTES);
        __m512i high[ROW_BLOCKS][INT_ROWS], low[ROW_BLOCKS][INT_ROWS];
        UNROLL
        for (int m = 0; m < n; m++) {
            __m512i start =
                kind == INT4 ? _mm512_setzero_si512() : broadcast_quad((const uint8_t *)(act_scale + n + m));
            UNROLL
            for (int b = 0; b < nb; b++) {
                high[b][m] = _mm512_setzero_si512();
                low[b][m] = start;
            }
        }
        dot_group(&at, act, nb, n, nibbles, high, low);
        prefetch_group(t, nb, n, lines, next);
        UNROLL
        for (int b = 0; b < nb; b++) {
            __m512 ws = scale_at(t, at.scale + (size_t)b * at.stride, wide), wo = ws;
            if (kind == INT4)
                wo = scale_at(t, at.offset + (size_t)b * at.stride, wide);
            UNROLL
            for (int m = 0; m < n; m++) {
                __m512i dot = _mm512_add_epi32(_mm512_slli_epi32(high[b][m], 8), low[b][m]);
                __m512 s = _mm512_mul_ps(ws, broadcast(act_scale + m));
                sum[b][m] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(dot), s, sum[b][m]);
                if (kind == INT4)
                    sum[b][m] = _mm512_fmadd_ps(wo, broadcast(act_scale + n + m), sum[b][m]);
            }
        }
        at.scale += wide ? 64 : 32;
        at.offset += wide ? 64 : 32;
        at.data += nibbles ? 256 : 512;
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

INLINE void int_row(const struct dn_tile *t, const uint32_t nb, const enum int_kind kind)
{
    switch (nb) {
    case 8:
        int_tile(t, 8, 1, kind, false);
        break;
    case 6:
        int_tile(t, 6, 1, kind, false);
        break;
    case 4:
        int_tile(t, 4, 1, kind, false);
        break;
    case 2:
        int_tile(t, 2, 1, kind, false);
        break;
    default:
        int_tile(t, 1, 1, kind, false);
    }
}

INLINE void int_rows(const struct dn_tile *t, const uint32_t nb, const enum int_kind kind, const bool wide)
{
    enum { ROW = 4 };
    switch (t->n_rows * ROW + nb) {
    case 2 * ROW + 1:
        int_tile(t, 1, 2, kind, wide);
        break;
    case 2 * ROW + 2:
        int_tile(t, 2, 2, kind, wide);
        break;
    case 2 * ROW + 3:
        int_tile(t, 3, 2, kind, wide);
        break;
    case 3 * ROW + 1:
        int_tile(t, 1, 3, kind, wide);
        break;
    case 3 * ROW + 2:
        int_tile(t, 2, 3, kind, wide);
        break;
    case 3 * ROW + 3:
        int_tile(t, 3, 3, kind, wide);
        break;
    case 4 * ROW + 1:
        int_tile(t, 1, 4, kind, wide);
        break;
    default:
        int_tile(t, 2, 4, kind, wide);
    }
}

INLINE void int_blocks(const struct dn_tile *t, const enum int_kind kind)
{
    for (uint32_t b = 0, nb; b < t->n_blocks; b += nb) {
        const struct dn_tile rest = from_block(t, b);
        uint32_t left = rest.n_blocks;
        if (t->n_rows == 1) {
            nb = left >= 8 ? 8 : left >= 6 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
            int_row(&rest, nb, kind);
            continue;
        }
        nb = left >= 3 && t->n_rows < 4 ? 3 : left >= 2 ? 2 : 1;
        if (kind != INT8 && t->wide)
            int_rows(&rest, nb, kind, true);
        else
            int_rows(&rest, nb, kind, false);
    }
}

#define BY_HEIGHT(rows, ...)                                                                                           \
    if (t->n_rows == 1 || t->n_blocks == 1) {                                                                          \
        for (uint32_t b = 0; b < t->n_blocks; b++) {                                                                   \
            const struct dn_tile one = from_block(t, b);                                                               \
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
    if (t->wide) {
        BY_HEIGHT(fp8_rows, , true)
        return;
    }
    BY_HEIGHT(fp8_rows, , false)
}

static void tile_int8(const struct dn_tile *t)
{
    int_blocks(t, INT8);
}

static void tile_int4_sym(const struct dn_tile *t)
{
    int_blocks(t, INT4_SYM);
}

static void tile_int4(const struct dn_tile *t)
{
    int_blocks(t, INT4);
}

static void act(const float *a, uint32_t n_in, uint32_t n_rows, int zero, uint8_t *out)
{
    const __m512i no_sign = _mm512_set1_epi32(0x7fffffff);
    for (uint32_t g = 0; g < n_in / DN_GROUP; g++, out += (size_t)n_rows * DN_ACT_GROUP_BYTES) {
        float *scale = (float *)(out + n_rows * DN_ACT_BYTES);
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
                inverse = DN_ACT_MAX / amax;
            scale[m] = counts ? amax / DN_ACT_MAX : finite ? 0 : NAN;
            __mmask16 keep = counts ? 0xffff : 0;
            __m512i q0 = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(x0, _mm512_set1_ps(inverse))),
                    q1 = _mm512_maskz_cvtps_epi32(keep, _mm512_mul_ps(x1, _mm512_set1_ps(inverse)));
            const __m512i half = _mm512_set1_epi32(128);
            __m512i h0 = _mm512_srai_epi32(_mm512_add_epi32(q0, half), 8),
                    h1 = _mm512_srai_epi32(_mm512_add_epi32(q1, half), 8);
            int8_t *q = (int8_t *)out + m * DN_ACT_BYTES;
            _mm_storeu_si128((__m128i *)q, _mm512_cvtepi32_epi8(h0));
            _mm_storeu_si128((__m128i *)(q + 16), _mm512_cvtepi32_epi8(h1));
            /* The low bytes as they are: q - 256 * high lies in -128..127. */
            _mm_storeu_si128((__m128i *)(q + 32), _mm512_cvtepi32_epi8(q0));
            _mm_storeu_si128((__m128i *)(q + 48), _mm512_cvtepi32_epi8(q1));
            int32_t sum = _mm512_reduce_add_epi32(_mm512_add_epi32(q0, q1)), start = -zero * sum;
            if (zero)
                memcpy(&scale[n_rows + m], &start, sizeof start);
            else
                scale[n_rows + m] = scale[m] * (float)sum;
        }
    }
}

const struct dn_matmul_ops dn_matmul_avx512 = {tile_bf16, tile_fp8,   tile_int8,  tile_int4_sym, tile_int4,    act,
                                               widen_fp8, widen_int4, ROW_BLOCKS, {3, 3},        {INT_ROWS, 2}};
#endif
