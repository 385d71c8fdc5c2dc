#include "kernels/cpu/matmul_tile.h"
#include "kernels/cpu/pack_numbers.h"

/* Plain C in the shape that compilers vectorise: the 16 rows of a block are the inner loop. */

static void store(const struct dn_tile *t, uint32_t m, const float sum[DN_BLOCK_ROWS])
{
    float *out = t->out + m * t->out_stride;
    for (uint32_t r = 0; r < t->n_out; r++)
        out[r] = t->bias ? sum[r] + t->bias[r] : sum[r];
}

static void block_bf16(const struct dn_tile *t)
{
    const float *a = (const float *)t->act;
    uint32_t n_in = (uint32_t)dn_up(t->n_in, 4), n = t->n_rows;
    for (uint32_t m = 0; m < n; m++) {
        float even[DN_BLOCK_ROWS] = {0}, odd[DN_BLOCK_ROWS] = {0};
        const uint32_t *w = (const uint32_t *)t->block;
        for (uint32_t k = 0; k < n_in; k += 2, w += DN_BLOCK_ROWS) {
            float a0 = a[k * n + m], a1 = a[(k + 1) * n + m];
            for (int r = 0; r < DN_BLOCK_ROWS; r++) {
                even[r] += dn_f32_from_bits(w[r] << 16) * a0;
                odd[r] += dn_f32_from_bits(w[r] & 0xffff0000) * a1;
            }
        }
        for (int r = 0; r < DN_BLOCK_ROWS; r++)
            even[r] += odd[r];
        store(t, m, even);
    }
}

/* The NaN code comes out as a number; the header's mask puts the NaN back. */
static inline float e4m3_finite(uint32_t q)
{
    uint32_t a = q & 0x7f, normal = (a << 20) + (120u << 23);
    float f = a < 8 ? (float)(int32_t)a * 0x1p-9f : dn_f32_from_bits(normal);
    return dn_f32_from_bits(dn_f32_bits(f) | (q & 0x80) << 24);
}

static void block_fp8(const struct dn_tile *t)
{
    const float *a = (const float *)t->act;
    const struct dn_fp8_head *head = (const struct dn_fp8_head *)t->block;
    uint32_t n_in = (uint32_t)dn_up(t->n_in, 4), n = t->n_rows;
    float sum[DN_TILE_ROWS][DN_BLOCK_ROWS] = {0};
    for (uint32_t k0 = 0; k0 < n_in; k0 += DN_FP8_BLOCK, head++) {
        uint32_t k1 = k0 + DN_FP8_BLOCK < n_in ? k0 + DN_FP8_BLOCK : n_in;
        float part[2][DN_TILE_ROWS][DN_BLOCK_ROWS] = {0};
        for (uint32_t k = k0; k < k1; k++) {
            const uint8_t *q = t->block + t->data_at + dn_at_pair(0, k);
            float w[DN_BLOCK_ROWS];
            for (int r = 0; r < DN_BLOCK_ROWS; r++)
                w[r] = e4m3_finite(q[2 * r]);
            for (uint32_t m = 0; m < n; m++)
                for (int r = 0; r < DN_BLOCK_ROWS; r++)
                    part[k & 1][m][r] += w[r] * a[k * n + m];
        }
        float scale[DN_BLOCK_ROWS];
        for (int r = 0; r < DN_BLOCK_ROWS; r++)
            scale[r] = head->nan_rows >> r & 1 ? NAN : head->scale;
        for (uint32_t m = 0; m < n; m++)
            for (int r = 0; r < DN_BLOCK_ROWS; r++)
                sum[m][r] += (part[0][m][r] + part[1][m][r]) * scale[r];
    }
    for (uint32_t m = 0; m < n; m++)
        store(t, m, sum[m]);
}

enum int_kind { INT8, INT4_SYM, INT4 };

/* sum[r] += products of one group of 32. */
static inline void dot_int8(const uint8_t *w, const int8_t *q, int32_t sum[DN_BLOCK_ROWS])
{
    for (int j = 0; j < DN_GROUP / 4; j++, w += 4 * DN_BLOCK_ROWS, q += 4)
        for (int r = 0; r < DN_BLOCK_ROWS; r++)
            sum[r] += w[4 * r] * q[0] + w[4 * r + 1] * q[1] + w[4 * r + 2] * q[2] + w[4 * r + 3] * q[3];
}

static inline void dot_int4(const uint8_t *w, const int8_t *q, int32_t sum[DN_BLOCK_ROWS])
{
    for (int j = 0; j < DN_GROUP / 8; j++, w += 4 * DN_BLOCK_ROWS, q += 4)
        for (int r = 0; r < DN_BLOCK_ROWS; r++)
            for (int i = 0; i < 4; i++)
                sum[r] += (w[4 * r + i] & 15) * q[i] + (w[4 * r + i] >> 4) * q[i + 16];
}

static inline void block_int(const struct dn_tile *t, enum int_kind kind)
{
    uint32_t n_groups = t->n_in / DN_GROUP, n = t->n_rows;
    size_t group_bytes = kind == INT8 ? DN_GROUP * DN_BLOCK_ROWS : DN_GROUP * DN_BLOCK_ROWS / 2;
    float sum[DN_TILE_ROWS][DN_BLOCK_ROWS] = {0};
    for (uint32_t g = 0; g < n_groups; g++) {
        const uint8_t *act = t->act + (size_t)g * n * DN_ACT_GROUP_BYTES;
        const float *scale = (const float *)(act + n * DN_ACT_BYTES);
        const uint16_t *w_scale = (const uint16_t *)t->block + g * DN_BLOCK_ROWS;
        const uint16_t *w_offset = (const uint16_t *)(t->block + t->offset_at) + g * DN_BLOCK_ROWS;
        float ws[DN_BLOCK_ROWS], wo[DN_BLOCK_ROWS] = {0};
        for (int r = 0; r < DN_BLOCK_ROWS; r++) {
            ws[r] = dn_scale16_to_f32(w_scale[r], t->scale_is_bf16);
            if (kind == INT4)
                wo[r] = dn_scale16_to_f32(w_offset[r], t->scale_is_bf16);
        }
        for (uint32_t m = 0; m < n; m++) {
            int32_t dot[DN_BLOCK_ROWS] = {0}, third = kind == INT4 ? 0 : ((const int32_t *)(scale + n))[m];
            const int8_t *q = (const int8_t *)act + m * DN_ACT_BYTES;
            const uint8_t *data = t->block + t->data_at + g * group_bytes;
            for (int half = 0; half < 2; half++, q += DN_GROUP) {
                if (kind == INT8)
                    dot_int8(data, q, dot);
                else
                    dot_int4(data, q, dot);
                for (int r = 0; half == 0 && r < DN_BLOCK_ROWS; r++)
                    dot[r] = dot[r] * 256 + third;
            }
            for (int r = 0; r < DN_BLOCK_ROWS; r++) {
                sum[m][r] += (float)dot[r] * (ws[r] * scale[m]);
                if (kind == INT4)
                    sum[m][r] += wo[r] * scale[n + m];
            }
        }
    }
    for (uint32_t m = 0; m < n; m++)
        store(t, m, sum[m]);
}

/* The blocks of a tile one after the other. */
#define BY_BLOCK(block_fn, ...)                                                                                        \
    for (uint32_t b = 0; b < t->n_blocks; b++) {                                                                       \
        struct dn_tile one = *t;                                                                                       \
        one.block += b * t->block_bytes;                                                                               \
        one.out += b * t->block_rows;                                                                                  \
        one.bias = t->bias ? t->bias + b * t->block_rows : NULL;                                                       \
        one.n_out = t->n_out - b * t->block_rows < DN_BLOCK_ROWS ? t->n_out - b * t->block_rows : DN_BLOCK_ROWS;       \
        block_fn(&one __VA_ARGS__);                                                                                    \
    }

static void tile_bf16(const struct dn_tile *t)
{
    BY_BLOCK(block_bf16, )
}

static void tile_fp8(const struct dn_tile *t)
{
    BY_BLOCK(block_fp8, )
}

static void tile_int8(const struct dn_tile *t)
{
    BY_BLOCK(block_int, , INT8)
}

static void tile_int4_sym(const struct dn_tile *t)
{
    BY_BLOCK(block_int, , INT4_SYM)
}

static void tile_int4(const struct dn_tile *t)
{
    BY_BLOCK(block_int, , INT4)
}

/* To nearest even, for |x| < 2^22: the ulp of 1.5 * 2^23 is 1. */
static inline int32_t to_int(float x)
{
    return (int32_t)(dn_f32_bits(x + 0x1.8p23f) - 0x4b400000);
}

static void act(const float *a, uint32_t n_in, uint32_t n_rows, int zero, uint8_t *out)
{
    for (uint32_t g = 0; g < n_in / DN_GROUP; g++, out += (size_t)n_rows * DN_ACT_GROUP_BYTES) {
        float *scale = (float *)(out + n_rows * DN_ACT_BYTES);
        for (uint32_t m = 0; m < n_rows; m++) {
            const float *x = a + (size_t)m * n_in + g * DN_GROUP;
            int8_t *q = (int8_t *)out + m * DN_ACT_BYTES;
            uint32_t top = 0; /* as bits: a NaN is larger than infinity, infinity larger than all numbers */
            for (int i = 0; i < DN_GROUP; i++) {
                uint32_t u = dn_f32_bits(x[i]) & 0x7fffffff;
                top = u > top ? u : top;
            }
            float amax = dn_f32_from_bits(top), inverse = 0;
            if (top >= 0x7f800000) {
                scale[m] = NAN;
            } else {
                inverse = amax < DN_ACT_TINY ? 0 : DN_ACT_MAX / amax;
                scale[m] = amax < DN_ACT_TINY ? 0 : amax / DN_ACT_MAX;
            }
            int32_t sum = 0;
            for (int i = 0; i < DN_GROUP; i++) {
                int32_t v = inverse != 0 ? to_int(x[i] * inverse) : 0, high = (v + 128) >> 8;
                q[i] = (int8_t)high;
                q[DN_GROUP + i] = (int8_t)(v - high * 256);
                sum += v;
            }
            if (zero)
                ((int32_t *)(scale + n_rows))[m] = -zero * sum;
            else
                scale[n_rows + m] = scale[m] * (float)sum;
        }
    }
}

const struct dn_matmul_ops dn_matmul_portable = {
    tile_bf16, tile_fp8, tile_int8, tile_int4_sym, tile_int4, act, NULL, NULL, 2, {DN_TILE_ROWS, 2}, {DN_TILE_ROWS, 2}};
