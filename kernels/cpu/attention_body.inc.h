/* The attention kernels (attention.h) on the vectors of simd.inc.h. The includer defines ATTN_OPS, the name of its
 * table. Both products run over register tiles of up to MR rows times NV vectors: scores with the positions of a tile
 * in the lanes (hence the transposed keys: no sum runs across a vector), outputs with the head's values in the lanes.
 */
#include "kernels/cpu/attention.h"

#include <math.h>

/* FEW: rows of one register tile, with room in registers for decoding values on the way */
enum { TILE = DN_ATTN_TILE, BLOCK = DN_PAGE_TOKENS_STEP, FEW = 4 };

/* ---- Loading a tile: pages -> f32 ---- */

/* Transposes a block of BLOCK keys: kt[d][0..BLOCK) from k [BLOCK][dim]. */
INLINE float bf16_value(uint16_t x)
{
    uint32_t u = (uint32_t)x << 16;
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

INLINE float fp8_value(uint8_t x)
{
    uint32_t u = (uint32_t)(x & 0x7f) << 20 | (uint32_t)(x & 0x80) << 24;
    float f;
    memcpy(&f, &u, sizeof f);
    return f * 0x1p120f;
}

#if defined(__AVX512F__) && defined(__AVX512BW__)
/* 16 x 16 words: r[i] word j becomes r[j] word i. */
INLINE void transpose_words(__m512i *r)
{
    __m512i t[16], u[16];
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        u[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    /* u[4a + c]: in 128-bit part p the words (4p + c) of rows 4a..4a+3 */
    for (int c = 0; c < 4; c++) {
        __m512i a = _mm512_shuffle_i32x4(u[c], u[4 + c], 0x88), b = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0x88);
        __m512i d = _mm512_shuffle_i32x4(u[c], u[4 + c], 0xdd), e = _mm512_shuffle_i32x4(u[8 + c], u[12 + c], 0xdd);
        r[c] = _mm512_shuffle_i32x4(a, b, 0x88);
        r[8 + c] = _mm512_shuffle_i32x4(a, b, 0xdd);
        r[4 + c] = _mm512_shuffle_i32x4(d, e, 0x88);
        r[12 + c] = _mm512_shuffle_i32x4(d, e, 0xdd);
    }
}

static void keys_bf16(float *kt, const uint16_t *k, size_t stride, uint32_t dim)
{
    for (uint32_t d = 0; d < dim; d += 32) {
        uint32_t n = dim - d < 32 ? dim - d : 32;
        __mmask32 mask = (__mmask32)(0xffffffffu >> (32 - n));
        __m512i r[16];
        for (int i = 0; i < 16; i++)
            r[i] = _mm512_maskz_loadu_epi16(mask, k + (size_t)i * stride + d);
        transpose_words(r);
#pragma GCC unroll 16
        for (uint32_t j = 0; j < 16; j++) {
            if (2 * j < n)
                _mm512_storeu_si512(kt + (d + 2 * j) * TILE, _mm512_slli_epi32(r[j], 16));
            if (2 * j + 1 < n)
                _mm512_storeu_si512(kt + (d + 2 * j + 1) * TILE,
                                    _mm512_and_si512(r[j], _mm512_set1_epi32((int)0xffff0000)));
        }
    }
}

static void keys_f32(float *kt, const float *k, size_t stride, uint32_t dim)
{
    for (uint32_t d = 0; d < dim; d += 16) {
        uint32_t n = dim - d < 16 ? dim - d : 16;
        __mmask16 mask = (__mmask16)(0xffffu >> (16 - n));
        __m512i r[16];
        for (uint32_t i = 0; i < 16; i++)
            r[i] = _mm512_maskz_loadu_epi32(mask, k + i * stride + d);
        transpose_words(r);
#pragma GCC unroll 16
        for (uint32_t j = 0; j < 16; j++) {
            if (j < n)
                _mm512_storeu_si512(kt + (d + j) * TILE, r[j]);
        }
    }
}

/* Byte order for fp8_decode(): out[b] takes byte b of every word (keys after the transposition). */
INLINE __m512i order_words(void)
{
    return _mm512_broadcast_i32x4(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
}

static void keys_fp8(float *kt, const uint8_t *k, size_t stride, uint32_t dim)
{
    struct fp8_table table = fp8_table();
    for (uint32_t d = 0; d < dim; d += 64) {
        uint32_t n = dim - d < 64 ? dim - d : 64;
        __mmask64 mask = (__mmask64)(~0ull >> (64 - n));
        __m512i r[16];
        for (int i = 0; i < 16; i++)
            r[i] = _mm512_maskz_loadu_epi8(mask, k + (size_t)i * stride + d);
        transpose_words(r);
#pragma GCC unroll 16
        for (uint32_t j = 0; j < 16; j++) {
            vf x[4];
            fp8_decode(&table, _mm512_shuffle_epi8(r[j], order_words()), x);
#pragma GCC unroll 4
            for (uint32_t b = 0; b < 4; b++) {
                if (4 * j + b < n)
                    v_store(kt + (d + 4 * j + b) * TILE, x[b]);
            }
        }
    }
}
#elif defined(__AVX2__) && defined(__FMA__)
/* 8 x 8 words: r[i] word j becomes r[j] word i. */
INLINE void transpose_words(__m256i *r)
{
    __m256i t[8], u[8];
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 8; i += 4) {
        u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
    for (int c = 0; c < 4; c++) {
        r[c] = _mm256_permute2x128_si256(u[c], u[4 + c], 0x20);
        r[4 + c] = _mm256_permute2x128_si256(u[c], u[4 + c], 0x31);
    }
}

static void keys_bf16(float *kt, const uint16_t *k, size_t stride, uint32_t dim)
{
    for (uint32_t half = 0; half < BLOCK; half += 8, kt += 8, k += 8 * stride) {
        uint32_t d = 0;
        for (; d + 16 <= dim; d += 16) {
            __m256i r[8];
            for (int i = 0; i < 8; i++)
                r[i] = _mm256_loadu_si256((const __m256i *)(k + (size_t)i * stride + d));
            transpose_words(r);
            for (uint32_t j = 0; j < 8; j++) {
                float *to = kt + (d + 2 * j) * TILE;
                _mm256_storeu_si256((__m256i *)to, _mm256_slli_epi32(r[j], 16));
                _mm256_storeu_si256((__m256i *)(to + TILE), _mm256_and_si256(r[j], _mm256_set1_epi32((int)0xffff0000)));
            }
        }
        for (; d < dim; d++) {
            for (uint32_t i = 0; i < 8; i++)
                kt[d * TILE + i] = bf16_value(k[i * stride + d]);
        }
    }
}

static void keys_f32(float *kt, const float *k, size_t stride, uint32_t dim)
{
    for (uint32_t half = 0; half < BLOCK; half += 8, kt += 8, k += 8 * stride) {
        uint32_t d = 0;
        for (; d + 8 <= dim; d += 8) {
            __m256i r[8];
            for (uint32_t i = 0; i < 8; i++)
                r[i] = _mm256_loadu_si256((const __m256i *)(k + i * stride + d));
            transpose_words(r);
            for (uint32_t j = 0; j < 8; j++)
                _mm256_storeu_si256((__m256i *)(kt + (d + j) * TILE), r[j]);
        }
        for (; d < dim; d++) {
            for (uint32_t i = 0; i < 8; i++)
                kt[d * TILE + i] = k[i * stride + d];
        }
    }
}

INLINE __m256 fp8_top(__m256i x)
{
    __m256i magnitude = _mm256_and_si256(_mm256_srli_epi32(x, 4), _mm256_set1_epi32(0x07f00000));
    __m256i sign = _mm256_and_si256(x, _mm256_set1_epi32((int)0x80000000));
    return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_or_si256(magnitude, sign)), _mm256_set1_ps(0x1p120f));
}

static void keys_fp8(float *kt, const uint8_t *k, size_t stride, uint32_t dim)
{
    for (uint32_t half = 0; half < BLOCK; half += 8, kt += 8, k += 8 * stride) {
        uint32_t d = 0;
        for (; d + 32 <= dim; d += 32) {
            __m256i r[8];
            for (int i = 0; i < 8; i++)
                r[i] = _mm256_loadu_si256((const __m256i *)(k + (size_t)i * stride + d));
            transpose_words(r);
            for (uint32_t j = 0; j < 8; j++) {
                float *to = kt + (d + 4 * j) * TILE;
                _mm256_storeu_ps(to, fp8_top(_mm256_slli_epi32(r[j], 24)));
                _mm256_storeu_ps(to + TILE, fp8_top(_mm256_slli_epi32(r[j], 16)));
                _mm256_storeu_ps(to + 2 * TILE, fp8_top(_mm256_slli_epi32(r[j], 8)));
                _mm256_storeu_ps(to + 3 * TILE, fp8_top(r[j]));
            }
        }
        for (; d < dim; d++) {
            for (uint32_t i = 0; i < 8; i++)
                kt[d * TILE + i] = fp8_value(k[i * stride + d]);
        }
    }
}
#else
static void keys_bf16(float *kt, const uint16_t *k, size_t stride, uint32_t dim)
{
    for (uint32_t d = 0; d < dim; d++) {
        for (uint32_t i = 0; i < BLOCK; i++)
            kt[d * TILE + i] = bf16_value(k[i * stride + d]);
    }
}

static void keys_fp8(float *kt, const uint8_t *k, size_t stride, uint32_t dim)
{
    for (uint32_t d = 0; d < dim; d++) {
        for (uint32_t i = 0; i < BLOCK; i++)
            kt[d * TILE + i] = fp8_value(k[i * stride + d]);
    }
}

static void keys_f32(float *kt, const float *k, size_t stride, uint32_t dim)
{
    for (uint32_t d = 0; d < dim; d++) {
        for (uint32_t i = 0; i < BLOCK; i++)
            kt[d * TILE + i] = k[i * stride + d];
    }
}
#endif

static void values_bf16(float *v, const uint16_t *x, uint32_t n, uint32_t dim, uint32_t padded, uint32_t stride)
{
    for (uint32_t i = 0; i < n; i++, v += stride, x += dim) {
        uint32_t d = 0;
        for (; d + VW <= dim; d += VW)
            v_store(v + d, v_load_bf16(x + d));
        for (; d < dim; d++)
            v[d] = bf16_value(x[d]);
        for (; d < padded; d++)
            v[d] = 0.0f;
    }
}

static void values_fp8(float *v, const uint8_t *x, uint32_t n, uint32_t dim, uint32_t padded, uint32_t stride)
{
#if defined(__AVX512VBMI__)
    struct fp8_table table = fp8_table();
    for (uint32_t i = 0; i < n; i++, v += stride, x += dim) {
        for (uint32_t d = 0; d < dim; d += 64) {
            vf y[4];
            fp8_decode_in_turn(&table, x + d, dim - d < 64 ? dim - d : 64, y);
#pragma GCC unroll 4
            for (uint32_t j = 0; j < 4; j++) {
                if (d + j * VW < padded)
                    v_store(v + d + j * VW, y[j]);
            }
        }
    }
#else
    for (uint32_t i = 0; i < n; i++, v += stride, x += dim) {
        uint32_t d = 0;
        for (; d + VW <= dim; d += VW)
            v_store(v + d, v_load_fp8(x + d));
        for (; d < dim; d++)
            v[d] = fp8_value(x[d]);
        for (; d < padded; d++)
            v[d] = 0.0f;
    }
#endif
}

static void values_f32(float *v, const float *x, size_t x_stride, uint32_t n, uint32_t dim, uint32_t padded,
                       uint32_t stride)
{
    for (uint32_t i = 0; i < n; i++, v += stride, x += x_stride) {
        memcpy(v, x, dim * sizeof *v);
        memset(v + dim, 0, (padded - dim) * sizeof *v);
    }
}

/* A tile as it was loaded. */
struct tile {
    bool is_scaled; /* FP8 */
    float k_scale[TILE], v_scale[TILE];
    const uint8_t *key[TILE / BLOCK], *rope[TILE / BLOCK], *value[TILE / BLOCK]; /* of each block, in its page */
};

/* The layer's part of the page of `position`. */
INLINE const uint8_t *layer_at(const struct dn_attn_work *w, uint32_t position)
{
    const struct dn_kv_layout *l = w->layout;
    return w->arena + dn_kv_page_offset(l, w->format, w->page[position / l->page_tokens]) +
           (uint64_t)w->layer * l->format[w->format].layer_bytes;
}

static void prefetch(const uint8_t *p, size_t bytes)
{
    for (size_t i = 0; i < bytes; i += 64)
        __builtin_prefetch(p + i, 0, 2);
}

/* Asks for the keys and values of the block at `position`. A page holds a head's keys in one short run (2 KB at 16
 * tokens of 64 values), too short for the processor to see the stream by itself: 10 to 30 % of the time at 16,384
 * tokens. */
static void prefetch_block(const struct dn_attn_work *w, uint32_t position)
{
    const struct dn_kv_layout *l = w->layout;
    size_t bytes = (size_t)w->value_dim * (w->format == DN_KV_FP8 ? 1 : 2);
    const uint8_t *first = layer_at(w, position), *second = first + l->format[w->format].v_offset;
    size_t token = (size_t)w->kv_head * l->page_tokens + position % l->page_tokens;
    if (w->source == DN_ATTN_GQA)
        prefetch(second + token * bytes, BLOCK * bytes);
    else
        prefetch(second + token * w->rope_dim * 2, (size_t)BLOCK * w->rope_dim * 2);
    if (w->source != DN_ATTN_EXPANDED)
        prefetch(first + token * bytes, BLOCK * bytes);
}

/* A block: addresses, scales and the m values, to v (NULL: not wanted). Of MLA keys and values are the latents. */
static void load_block(const struct dn_attn_work *w, uint32_t at, uint32_t m, float *v, struct tile *tile, uint32_t b)
{
    const struct dn_kv_layout *l = w->layout;
    const uint8_t *layer = layer_at(w, at), *second = layer + l->format[w->format].v_offset;
    uint32_t dim = w->value_dim, stride = dn_attn_v_stride(w->padded_dim);
    size_t token = (size_t)w->kv_head * l->page_tokens + at % l->page_tokens;
    size_t run = token * dim * (w->format == DN_KV_FP8 ? 1 : 2);
    const uint8_t *value = (w->source == DN_ATTN_GQA ? second : layer) + run;
    tile->key[b / BLOCK] = layer + run;
    tile->rope[b / BLOCK] = second + token * w->rope_dim * 2;
    tile->value[b / BLOCK] = value;
    if (w->format == DN_KV_FP8) {
        size_t k_scale = l->format[DN_KV_FP8].k_scale_offset, v_scale = l->format[DN_KV_FP8].v_scale_offset;
        if (v)
            values_fp8(v, value, m, dim, w->padded_dim, stride);
        memcpy(tile->k_scale + b, layer + k_scale + token * sizeof(float), BLOCK * sizeof(float));
        memcpy(tile->v_scale + b, layer + (w->source == DN_ATTN_GQA ? v_scale : k_scale) + token * sizeof(float),
               BLOCK * sizeof(float));
    } else if (v) {
        values_bf16(v, (const uint16_t *)value, m, dim, w->padded_dim, stride);
    }
}

/* The same of expanded ones, `row` rows behind the split's begin. */
static void load_expanded(const struct dn_attn_work *w, uint32_t at, uint32_t row, uint32_t m, float *v,
                          struct tile *tile, uint32_t b)
{
    const struct dn_kv_layout *l = w->layout;
    const uint8_t *rope = layer_at(w, at) + l->format[w->format].v_offset;
    tile->key[b / BLOCK] = (const uint8_t *)(w->k_row + row * w->k_stride);
    tile->rope[b / BLOCK] = rope + (size_t)(at % l->page_tokens) * w->rope_dim * 2;
    values_f32(v, w->v_row + row * w->v_stride, w->v_stride, m, w->value_dim, w->padded_dim,
               dn_attn_v_stride(w->padded_dim));
}

/* Finds positions [at, at + n) of the split at `begin`, and loads their values into w->v or leaves them in the pages.
 */
static void load_tile(const struct dn_attn_work *w, uint32_t begin, uint32_t at, uint32_t n, bool with_values,
                      struct tile *tile)
{
    tile->is_scaled = w->source != DN_ATTN_EXPANDED && w->format == DN_KV_FP8;
    for (uint32_t b = 0; b < n; b += BLOCK) {
        uint32_t m = n - b < BLOCK ? n - b : BLOCK;
        float *v = w->v + (size_t)b * dn_attn_v_stride(w->padded_dim);
        if (w->n_tokens == 1 && at + TILE + b <= w->position)
            prefetch_block(w, at + TILE + b);
        if (w->source == DN_ATTN_EXPANDED)
            load_expanded(w, at + b, at + b - begin, m, v, tile, b);
        else
            load_block(w, at + b, m, with_values ? v : NULL, tile, b);
    }
}

/* Values [from, from + dim) of the keys to w->kt, of whole blocks: what lies behind the tile's positions in the last
 * one is stale and masked. All of them are rope keys or none. */
static void load_keys(const struct dn_attn_work *w, const struct tile *tile, uint32_t columns, uint32_t from,
                      uint32_t dim)
{
    uint32_t first_rope = w->key_dim - w->rope_dim;
    for (uint32_t b = 0; b < columns; b += BLOCK) {
        const uint8_t *key = tile->key[b / BLOCK];
        if (from >= first_rope && w->rope_dim)
            keys_bf16(w->kt + b, (const uint16_t *)tile->rope[b / BLOCK] + (from - first_rope), w->rope_dim, dim);
        else if (w->source == DN_ATTN_EXPANDED)
            keys_f32(w->kt + b, (const float *)key + from, w->k_stride, dim);
        else if (w->format == DN_KV_FP8)
            keys_fp8(w->kt + b, key + from, w->value_dim, dim);
        else
            keys_bf16(w->kt + b, (const uint16_t *)key + from, w->value_dim, dim);
    }
}

/* ---- Products ---- */

/* s[m][0..nv) = q[m] . keys over `dim` values, vectors of positions from kt on; with `more`, on top of what s holds,
 * times each position's k_scale if there is one. */
INLINE void score_tile(int mr, int nv, const float *q, size_t q_stride, uint32_t dim, const float *kt, bool more,
                       const float *k_scale, float *s)
{
    vf acc[MR][NV];
#pragma GCC unroll 8
    for (int m = 0; m < mr; m++) {
#pragma GCC unroll 4
        for (int n = 0; n < nv; n++) {
            acc[m][n] = more ? v_load(s + (size_t)m * TILE + n * VW) : v_zero();
            if (k_scale)
                acc[m][n] = acc[m][n] * v_load(k_scale + n * VW);
        }
    }
    for (uint32_t d = 0; d < dim; d++) {
        vf k[NV];
#pragma GCC unroll 4
        for (int n = 0; n < nv; n++)
            k[n] = v_load(kt + (size_t)d * TILE + n * VW);
#pragma GCC unroll 8
        for (int m = 0; m < mr; m++) {
            vf x = v_set(q[m * q_stride + d]);
#pragma GCC unroll 4
            for (int n = 0; n < nv; n++)
                acc[m][n] = v_fma(x, k[n], acc[m][n]);
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < mr; m++) {
#pragma GCC unroll 4
        for (int n = 0; n < nv; n++)
            v_store(s + (size_t)m * TILE + n * VW, acc[m][n]);
    }
}

/* Where value_tile() finds the values */
enum source { SCRATCH, PAGE_BF16, PAGE_FP8 };
struct values {
    const float *v;              /* SCRATCH: [count][stride] */
    const uint8_t *const *block; /* PAGE: blocks of [BLOCK][stride] */
    uint32_t stride, offset;     /* in values: of a token, of the first column */
};

/* o[m][0..nv) = o * alpha[m] + weights p[m][0..count) times values [count] */
INLINE void value_tile(int mr, int nv, enum source source, const float *p, const float *alpha,
                       const struct values *from, uint32_t count, uint32_t padded, float *o)
{
    vf acc[MR][NV];
#if defined(__AVX512VBMI__)
    struct fp8_table table = fp8_table();
#endif
#pragma GCC unroll 8
    for (int m = 0; m < mr; m++) {
        vf a = v_set(alpha[m]);
#pragma GCC unroll 4
        for (int n = 0; n < nv; n++)
            acc[m][n] = v_load(o + (size_t)m * padded + n * VW) * a;
    }
    for (uint32_t b = 0; b < count; b += BLOCK) {
        uint32_t end = count - b < BLOCK ? count - b : BLOCK;
        const float *v = source == SCRATCH ? from->v + (size_t)b * from->stride + from->offset : NULL;
        const uint8_t *page = source == SCRATCH ? NULL : from->block[b / BLOCK];
        for (uint32_t i = 0; i < end; i++) {
            vf x[4];
            size_t at = (size_t)i * from->stride;
            if (source == PAGE_FP8) {
#if defined(__AVX512VBMI__)
                fp8_decode_in_turn(&table, page + at + from->offset, nv * VW, x);
#else
#pragma GCC unroll 4
                for (int n = 0; n < nv; n++)
                    x[n] = v_load_fp8(page + at + from->offset + n * VW);
#endif
            } else {
#pragma GCC unroll 4
                for (int n = 0; n < nv; n++)
                    x[n] = source == SCRATCH ? v_load(v + at + n * VW)
                                             : v_load_bf16((const uint16_t *)page + at + from->offset + n * VW);
            }
#pragma GCC unroll 8
            for (int m = 0; m < mr; m++) {
                vf w = v_set(p[(size_t)m * TILE + b + i]);
#pragma GCC unroll 4
                for (int n = 0; n < nv; n++)
                    acc[m][n] = v_fma(w, x[n], acc[m][n]);
            }
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < mr; m++) {
#pragma GCC unroll 4
        for (int n = 0; n < nv; n++)
            v_store(o + (size_t)m * padded + n * VW, acc[m][n]);
    }
}
INLINE void value_scratch(int mr, int nv, const float *p, const float *alpha, const struct values *from, uint32_t count,
                          uint32_t padded, float *o)
{
    value_tile(mr, nv, SCRATCH, p, alpha, from, count, padded, o);
}
INLINE void value_bf16(int mr, int nv, const float *p, const float *alpha, const struct values *from, uint32_t count,
                       uint32_t padded, float *o)
{
    value_tile(mr, nv, PAGE_BF16, p, alpha, from, count, padded, o);
}
INLINE void value_fp8(int mr, int nv, const float *p, const float *alpha, const struct values *from, uint32_t count,
                      uint32_t padded, float *o)
{
    value_tile(mr, nv, PAGE_FP8, p, alpha, from, count, padded, o);
}

/* Calls tile(mr, nv, ...) with both as constants, so that the accumulators live in registers. Only some sizes exist:
 * the next smaller one is taken, the rest is another call. */
#define ROW_STEP(n)    ((n) >= MR ? MR : (n) >= 4 ? 4 : (n))
#define COLUMN_STEP(n) ((n) >= NV ? NV : (n) >= 2 ? 2 : 1)
#define WITH_ROWS(tile, mr, nv, ...)                                                                                   \
    do {                                                                                                               \
        if (mr == 4)                                                                                                   \
            tile(4, nv, __VA_ARGS__);                                                                                  \
        else if (mr == 3)                                                                                              \
            tile(3, nv, __VA_ARGS__);                                                                                  \
        else if (mr == 2)                                                                                              \
            tile(2, nv, __VA_ARGS__);                                                                                  \
        else if (mr == 1)                                                                                              \
            tile(1, nv, __VA_ARGS__);                                                                                  \
        else if (MAX_ROWS > 4)                                                                                         \
            tile(MAX_ROWS, nv, __VA_ARGS__);                                                                           \
    } while (0)
#define WITH_TILE(tile, mr, nv, ...)                                                                                   \
    do {                                                                                                               \
        if (nv == NV)                                                                                                  \
            WITH_ROWS(tile, mr, NV, __VA_ARGS__);                                                                      \
        else if (NV > 2 && nv == 2)                                                                                    \
            WITH_ROWS(tile, mr, 2, __VA_ARGS__);                                                                       \
        else                                                                                                           \
            WITH_ROWS(tile, mr, 1, __VA_ARGS__);                                                                       \
    } while (0)

#define MAX_ROWS MR
/* Scores of rows [row0, n_rows). Long keys come in chunks, which stay in the L1 cache while all rows use them; a sum
 * waits in w->s between two. In FP8 the sum over the latent is scaled before the rope key's products come on top. */
static void scores(const struct dn_attn_work *w, const struct tile *tile, uint32_t row0, uint32_t n_rows,
                   uint32_t columns)
{
    uint32_t first_rope = w->key_dim - w->rope_dim, dim;
    for (uint32_t from = 0; from < w->key_dim; from += dim) {
        uint32_t end = from < first_rope ? first_rope : w->key_dim, left = end - from;
        dim = left <= DN_ATTN_KEYS ? left : DN_ATTN_KEYS / 2;
        load_keys(w, tile, columns, from, dim);
        bool scale = from == first_rope && tile->is_scaled;
        for (uint32_t c = 0, nv; c < columns; c += nv * VW) {
            nv = COLUMN_STEP((columns - c) / VW);
            for (uint32_t r = row0, mr; r < n_rows; r += mr) {
                const float *q = w->q + (size_t)r * w->key_dim + from;
                float *s = w->s + (size_t)r * TILE + c;
                mr = ROW_STEP(n_rows - r);
                WITH_TILE(score_tile, mr, nv, q, w->key_dim, dim, w->kt + c, from > 0, scale ? tile->k_scale + c : NULL,
                          s);
            }
        }
    }
}

static void outputs(const struct dn_attn_work *w, uint32_t row0, uint32_t n_rows, uint32_t count, float *out)
{
    for (uint32_t c = 0, nv; c < w->padded_dim; c += nv * VW) {
        struct values from = {.v = w->v, .stride = dn_attn_v_stride(w->padded_dim), .offset = c};
        nv = COLUMN_STEP((w->padded_dim - c) / VW);
        for (uint32_t r = row0, mr; r < n_rows; r += mr) {
            const float *p = w->s + (size_t)r * TILE;
            float *o = out + (size_t)r * w->padded_dim + c;
            mr = ROW_STEP(n_rows - r);
            WITH_TILE(value_scratch, mr, nv, p, w->alpha + r, &from, count, w->padded_dim, o);
        }
    }
}
#undef MAX_ROWS

/* The same for up to FEW rows, whose values are not worth a copy: they are read where they lie. */
#define MAX_ROWS FEW
static void outputs_from_pages(const struct dn_attn_work *w, const struct tile *tile, uint32_t n_rows, uint32_t count,
                               float *out)
{
    for (uint32_t c = 0, nv; c < w->padded_dim; c += nv * VW) {
        struct values from = {.block = tile->value, .stride = w->value_dim, .offset = c};
        float *o = out + c;
        nv = COLUMN_STEP((w->padded_dim - c) / VW);
        if (w->format == DN_KV_FP8)
            WITH_TILE(value_fp8, n_rows, nv, w->s, w->alpha, &from, count, w->padded_dim, o);
        else
            WITH_TILE(value_bf16, n_rows, nv, w->s, w->alpha, &from, count, w->padded_dim, o);
    }
}
#undef MAX_ROWS

/* Scores of one row over `count` positions become weights e^(s - max); the row's maximum and sum move on. */
INLINE void softmax_row(float *s, uint32_t count, float scale, const float *k_scale, const float *v_scale, float *max,
                        float *sum, float *alpha)
{
    vf top = v_set(-INFINITY), x[TILE / VW];
    uint32_t n = (count + VW - 1) / VW;
    for (uint32_t i = 0; i < n; i++) {
        x[i] = v_load(s + i * VW) * v_set(scale);
        if (k_scale)
            x[i] = x[i] * v_load(k_scale + i * VW);
        if (count - i * VW < VW)
            x[i] = v_first((int)(count - i * VW), x[i], v_set(-INFINITY));
        top = v_max(top, x[i]);
    }
    float new_max = v_top(top);
    new_max = *max > new_max ? *max : new_max;
    vf total = v_zero();
    for (uint32_t i = 0; i < n; i++) {
        vf p = v_exp(x[i] - v_set(new_max));
        total += p;
        if (v_scale)
            p = p * v_load(v_scale + i * VW);
        v_store(s + i * VW, p);
    }
    float a = 1.0f;
    if (*max != new_max) {
        float lanes[VW];
        v_store(lanes, v_exp(v_set(*max - new_max)));
        a = lanes[0];
    }
    *alpha = a;
    *sum = *sum * a + v_sum(total);
    *max = new_max;
}

static void attn_split(const struct dn_attn_work *w, uint32_t begin, struct dn_attn_state *out)
{
    struct tile tile;
    uint32_t n_rows = w->n_tokens * w->group, last = w->position + w->n_tokens - 1;
    uint32_t end = last - begin < DN_ATTN_SPLIT ? last + 1 : begin + DN_ATTN_SPLIT;
    uint32_t first = begin > w->position ? begin - w->position : 0; /* token */
    bool few = w->n_tokens == 1 && n_rows <= FEW && w->source != DN_ATTN_EXPANDED && w->value_dim == w->padded_dim;
    for (uint32_t r = first * w->group; r < n_rows; r++) {
        out->max[r] = -INFINITY;
        out->sum[r] = 0.0f;
        memset(out->o + (size_t)r * w->padded_dim, 0, w->padded_dim * sizeof(float));
    }
    for (uint32_t at = begin; at < end; at += TILE) {
        uint32_t n = end - at < TILE ? end - at : TILE;
        uint32_t t = at > w->position ? at - w->position : 0; /* first token that sees the tile */
        load_tile(w, begin, at, n, !few, &tile);
        scores(w, &tile, t * w->group, n_rows, (n + BLOCK - 1) / BLOCK * BLOCK);
        for (uint32_t r = t * w->group; r < n_rows; r++) {
            uint32_t seen = w->position + r / w->group - at + 1;
            softmax_row(w->s + (size_t)r * TILE, seen < TILE ? seen : TILE, w->scale,
                        tile.is_scaled && w->source == DN_ATTN_GQA ? tile.k_scale : NULL,
                        tile.is_scaled ? tile.v_scale : NULL, out->max + r, out->sum + r, w->alpha + r);
        }
        if (few) {
            outputs_from_pages(w, &tile, n_rows, n, out->o);
            continue;
        }
        for (; t < w->n_tokens && w->position + t < at + TILE - 1; t++)
            outputs(w, t * w->group, (t + 1) * w->group, w->position + t - at + 1, out->o);
        outputs(w, t * w->group, n_rows, TILE, out->o);
    }
}

static void attn_merge(struct dn_attn_state *total, const struct dn_attn_state *part, uint32_t row0, uint32_t n_rows,
                       uint32_t padded)
{
    for (uint32_t r = row0; r < n_rows; r++) {
        float max = total->max[r] > part->max[r] ? total->max[r] : part->max[r];
        vf a = v_exp(v_set(total->max[r] - max)), b = v_exp(v_set(part->max[r] - max));
        float lane_a[VW], lane_b[VW];
        v_store(lane_a, a);
        v_store(lane_b, b);
        total->max[r] = max;
        total->sum[r] = total->sum[r] * lane_a[0] + part->sum[r] * lane_b[0];
        float *o = total->o + (size_t)r * padded;
        const float *p = part->o + (size_t)r * padded;
        for (uint32_t d = 0; d < padded; d += VW)
            v_store(o + d, v_fma(v_load(o + d), a, v_load(p + d) * b));
    }
}

static void attn_finish(const struct dn_attn_state *total, uint32_t row, uint32_t dim, uint32_t padded, float *out)
{
    const float *o = total->o + (size_t)row * padded;
    float inv = 1.0f / total->sum[row];
    for (uint32_t d = 0; d < dim; d++)
        out[d] = o[d] * inv;
}

const struct dn_attn_ops ATTN_OPS = {.split = attn_split, .merge = attn_merge, .finish = attn_finish};
