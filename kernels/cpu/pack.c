#include "kernels/cpu/matmul.h"
#include "kernels/cpu/matmul_layout.h"
#include "kernels/cpu/pack_numbers.h"
#include "kernels/cpu/pack_quantise.h"

#include <stdlib.h>

size_t dn_cpu_matrix_bytes(const struct dn_matrix *m)
{
    if (m->n_out == 0 || m->n_in == 0 || m->n_in > DN_CPU_MAX_N_IN || (unsigned)m->format >= DN_W_FORMATS)
        return 0;
    if ((m->format == DN_W_INT8 || m->format == DN_W_INT4) && m->n_in % DN_GROUP)
        return 0;
    uint32_t step = m->format == DN_W_FP8 ? DN_FP8_BLOCK : DN_GROUP_ROWS;
    if (m->n_groups > 1 && (m->n_out % step || dn_cpu_rows(m) > UINT32_MAX))
        return 0;
    struct dn_layout l = dn_layout_of(m);
    size_t bytes;
    return __builtin_mul_overflow((size_t)l.n_blocks, l.block_bytes, &bytes) ? 0 : bytes;
}

/* Where one row lives. */
struct place {
    uint8_t *data, *scale, *offset;
    struct dn_fp8_head *head;
    uint32_t row; /* within its block */
};

static struct place place_of(const struct dn_matrix *m, const struct dn_layout *l, uint32_t row)
{
    uint8_t *block = (uint8_t *)m->data + (size_t)(row / DN_BLOCK_ROWS) * l->block_bytes;
    return (struct place){block + l->data_at, block, block + l->offset_at, (struct dn_fp8_head *)block,
                          row % DN_BLOCK_ROWS};
}

static uint16_t *scale_at(uint8_t *scales, uint32_t row, uint32_t group)
{
    return (uint16_t *)scales + (size_t)group * DN_BLOCK_ROWS + row;
}

static void put_bf16(const struct place *p, uint32_t k, uint16_t v)
{
    ((uint16_t *)p->data)[dn_at_pair(p->row, k)] = v;
}

static void put_int8(const struct place *p, uint32_t group, const int8_t q[DN_GROUP], uint16_t scale)
{
    for (uint32_t i = 0; i < DN_GROUP; i++)
        p->data[dn_at_int8(p->row, group * DN_GROUP + i)] = (uint8_t)(q[i] + 128);
    *scale_at(p->scale, p->row, group) = scale;
}

/* q: one code a byte. */
static void put_int4(const struct dn_matrix *m, const struct place *p, uint32_t group, const uint8_t q[DN_GROUP],
                     uint16_t scale, uint16_t offset)
{
    for (uint32_t i = 0; i < DN_GROUP / 2; i++)
        p->data[dn_at_int4(p->row, group * DN_GROUP + i)] = (uint8_t)(q[i] | q[i + DN_GROUP / 2] << 4);
    *scale_at(p->scale, p->row, group) = scale;
    if (!m->symmetric)
        *scale_at(p->offset, p->row, group) = offset;
}

static void put_fp8(const struct place *p, uint32_t k, uint8_t q, float scale)
{
    struct dn_fp8_head *head = &p->head[k / DN_FP8_BLOCK];
    p->data[dn_at_pair(p->row, k)] = q;
    head->scale = scale;
    if ((q & 0x7f) == 0x7f)
        head->nan_rows |= 1u << p->row;
}

/* ---- Lossless ---------------------------------------------------------------------------------------------------- */

static void pack_bf16(const struct dn_matrix *m, const struct place *p, const uint16_t *v)
{
    for (uint32_t k = 0; k < m->n_in; k++)
        put_bf16(p, k, v[k]);
}

static void pack_q8(const struct dn_matrix *m, const struct place *p, const struct dn_rows *rows, size_t i)
{
    for (uint32_t g = 0; g < m->n_in / DN_GROUP; g++)
        put_int8(p, g, rows->q8 + i * m->n_in + g * DN_GROUP, rows->scale16[i * (m->n_in / DN_GROUP) + g]);
}

static void nibbles(const uint8_t *packed, uint8_t q[DN_GROUP])
{
    for (int b = 0; b < DN_GROUP / 2; b++) {
        q[2 * b] = packed[b] & 15;
        q[2 * b + 1] = packed[b] >> 4;
    }
}

static void pack_q4(const struct dn_matrix *m, const struct place *p, const struct dn_rows *rows, size_t i)
{
    for (uint32_t g = 0; g < m->n_in / DN_GROUP; g++) {
        size_t at = i * (m->n_in / DN_GROUP) + g;
        uint8_t q[DN_GROUP];
        nibbles(rows->q4 + at * DN_GROUP / 2, q);
        put_int4(m, p, g, q, rows->scale16[at], m->symmetric ? 0 : rows->offset16[at]);
    }
}

static void pack_fp8(const struct dn_matrix *m, const struct place *p, const struct dn_rows *rows, size_t i)
{
    const float *scale = rows->block_scale + i / DN_FP8_BLOCK * ((m->n_in + DN_FP8_BLOCK - 1) / DN_FP8_BLOCK);
    for (uint32_t k = 0; k < m->n_in; k++)
        put_fp8(p, k, rows->fp8[i * m->n_in + k], scale[k / DN_FP8_BLOCK]);
}

/* ---- Through f32 ------------------------------------------------------------------------------------------------- */

/* Row i of `rows` as f32. */
static void row_to_f32(const struct dn_matrix *m, const struct dn_rows *rows, size_t i, float *out)
{
    size_t n_in = m->n_in, at = i * n_in;
    bool is_bf16 = m->scale_is_bf16;
    DN_BUG_ON(!rows->f32 && !rows->bf16 && !rows->q8 && !rows->q4 && !rows->fp8);
    for (size_t k = 0; k < n_in; k++) {
        size_t group = (at + k) / DN_GROUP;
        if (rows->f32) {
            out[k] = rows->f32[at + k];
        } else if (rows->bf16) {
            out[k] = dn_bf16_to_f32(rows->bf16[at + k]);
        } else if (rows->q8) {
            out[k] = (float)rows->q8[at + k] * dn_scale16_to_f32(rows->scale16[group], is_bf16);
        } else if (rows->q4) {
            int q = rows->q4[(at + k) / 2] >> (k % 2 * 4) & 15;
            float s = dn_scale16_to_f32(rows->scale16[group], is_bf16);
            out[k] =
                rows->offset16 ? (float)q * s + dn_scale16_to_f32(rows->offset16[group], is_bf16) : (float)(q - 8) * s;
        } else {
            size_t n_across = (n_in + DN_FP8_BLOCK - 1) / DN_FP8_BLOCK;
            out[k] =
                dn_e4m3_to_f32(rows->fp8[at + k]) * rows->block_scale[i / DN_FP8_BLOCK * n_across + k / DN_FP8_BLOCK];
        }
    }
}

static void quantise_row(const struct dn_matrix *m, const struct place *p, const float *x)
{
    for (uint32_t g = 0; g < m->n_in / DN_GROUP; g++, x += DN_GROUP) {
        uint16_t scale, offset = 0;
        if (m->format == DN_W_INT8) {
            int8_t q[DN_GROUP];
            dn_quantise_int8(x, m->scale_is_bf16, q, &scale);
            put_int8(p, g, q, scale);
        } else {
            uint8_t q[DN_GROUP];
            if (m->symmetric)
                dn_quantise_int4_sym(x, m->scale_is_bf16, q, &scale);
            else
                dn_quantise_int4(x, m->scale_is_bf16, q, &scale, &offset);
            put_int4(m, p, g, q, scale, offset);
        }
    }
}

/* Up to 128 rows, x [n][n_in]: one row of blocks. */
static void quantise_fp8_rows(const struct dn_matrix *m, const struct dn_layout *l, uint32_t row0, uint32_t n,
                              const float *x)
{
    for (uint32_t k0 = 0; k0 < m->n_in; k0 += DN_FP8_BLOCK) {
        uint32_t width = m->n_in - k0 < DN_FP8_BLOCK ? m->n_in - k0 : DN_FP8_BLOCK;
        float top = 0;
        for (uint32_t i = 0; i < n; i++) {
            float t = dn_largest_finite(x + (size_t)i * m->n_in + k0, width);
            top = t > top ? t : top;
        }
        float scale = dn_fp8_scale(top);
        for (uint32_t i = 0; i < n; i++) {
            struct place p = place_of(m, l, row0 + i);
            for (uint32_t k = k0; k < k0 + width; k++)
                put_fp8(&p, k, dn_quantise_fp8(x[(size_t)i * m->n_in + k], scale), scale);
        }
    }
}

static int pack_through_f32(const struct dn_matrix *m, const struct dn_layout *l, uint32_t row0, uint32_t n,
                            const struct dn_rows *rows)
{
    uint32_t step = m->format == DN_W_FP8 ? DN_FP8_BLOCK : 1;
    float *x = malloc((size_t)step * m->n_in * sizeof *x);
    if (!x)
        return -DN_NO_MEMORY;
    for (uint32_t i = 0; i < n; i += step) {
        uint32_t now = n - i < step ? n - i : step;
        for (uint32_t r = 0; r < now; r++)
            row_to_f32(m, rows, i + r, x + (size_t)r * m->n_in);
        struct place p = place_of(m, l, row0 + i);
        if (m->format == DN_W_FP8)
            quantise_fp8_rows(m, l, row0 + i, now, x);
        else if (m->format == DN_W_BF16)
            for (uint32_t k = 0; k < m->n_in; k++)
                put_bf16(&p, k, dn_f32_to_bf16(x[k]));
        else
            quantise_row(m, &p, x);
    }
    free(x);
    return 0;
}

/* ---- Entry ------------------------------------------------------------------------------------------------------- */

/* A block must not keep what was there before: padding, and the NaN masks that put_fp8() adds to. */
static void clear_blocks(const struct dn_matrix *m, const struct dn_layout *l, uint32_t row0, uint32_t n)
{
    uint32_t n_out = (uint32_t)dn_cpu_rows(m);
    for (uint32_t row = row0; row < row0 + n; row++) {
        uint8_t *block = (uint8_t *)m->data + (size_t)(row / DN_BLOCK_ROWS) * l->block_bytes;
        bool ends = row + 1 == n_out && n_out % DN_BLOCK_ROWS;
        if (row % DN_BLOCK_ROWS == 0 && (ends || row + DN_BLOCK_ROWS > n_out || m->format == DN_W_FP8 || m->n_in % 4))
            memset(block, 0, l->block_bytes);
    }
}

int dn_cpu_matrix_pack(struct dn_matrix *m, uint32_t row0, uint32_t n, const struct dn_rows *rows)
{
    size_t bytes = dn_cpu_matrix_bytes(m);
    uint32_t n_out = (uint32_t)dn_cpu_rows(m);
    if (!bytes || m->bytes != bytes || !m->data || row0 > n_out || n > n_out - row0 ||
        !dn_rows_are_complete(rows, m->n_in))
        return -DN_INVALID_VALUE;
    if ((m->format == DN_W_FP8 || rows->fp8) && (row0 % DN_FP8_BLOCK || (n % DN_FP8_BLOCK && row0 + n != n_out)))
        return -DN_INVALID_VALUE;
    struct dn_layout l = dn_layout_of(m);
    clear_blocks(m, &l, row0, n);
    if (!dn_rows_are_lossless(m, rows))
        return pack_through_f32(m, &l, row0, n, rows);
    for (uint32_t i = 0; i < n; i++) {
        struct place p = place_of(m, &l, row0 + i);
        switch (m->format) {
        case DN_W_BF16:
            pack_bf16(m, &p, rows->bf16 + (size_t)i * m->n_in);
            break;
        case DN_W_FP8:
            pack_fp8(m, &p, rows, i);
            break;
        case DN_W_INT8:
            pack_q8(m, &p, rows, i);
            break;
        default:
            pack_q4(m, &p, rows, i);
        }
    }
    return 0;
}

/* Inputs k0..k1-1 of a row, all of one group or block. */
static void unpack(const struct dn_matrix *m, const struct place *p, uint32_t k0, uint32_t k1, float *out)
{
    uint32_t g = k0 / DN_GROUP;
    bool is_bf16 = m->scale_is_bf16;
    float scale = 1, offset = 0;
    if (m->format == DN_W_INT8 || m->format == DN_W_INT4)
        scale = dn_scale16_to_f32(*scale_at(p->scale, p->row, g), is_bf16);
    if (m->format == DN_W_INT4 && !m->symmetric)
        offset = dn_scale16_to_f32(*scale_at(p->offset, p->row, g), is_bf16);
    for (uint32_t k = k0; k < k1; k++) {
        if (m->format == DN_W_BF16) {
            out[k] = dn_bf16_to_f32(((const uint16_t *)p->data)[dn_at_pair(p->row, k)]);
        } else if (m->format == DN_W_FP8) {
            out[k] = dn_e4m3_to_f32(p->data[dn_at_pair(p->row, k)]) * p->head[k / DN_FP8_BLOCK].scale;
        } else if (m->format == DN_W_INT8) {
            out[k] = (float)(p->data[dn_at_int8(p->row, k)] - 128) * scale;
        } else {
            int q = p->data[dn_at_int4(p->row, k)] >> (k % DN_GROUP < 16 ? 0 : 4) & 15;
            out[k] = m->symmetric ? (float)(q - 8) * scale : (float)q * scale + offset;
        }
    }
}

void dn_cpu_matrix_row(const struct dn_matrix *m, uint32_t row, float *out)
{
    DN_BUG_ON(row >= dn_cpu_rows(m));
    struct dn_layout l = dn_layout_of(m);
    struct place p = place_of(m, &l, row);
    for (uint32_t k = 0; k < m->n_in; k += DN_GROUP)
        unpack(m, &p, k, k + DN_GROUP < m->n_in ? k + DN_GROUP : m->n_in, out);
}
