#include "engine/tensor.h"

#include "base/err.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

static const struct dn_tensor_type_info INFO[DN_TT_COUNT] = {
    [DN_TT_F32] = {"F32", 1, 4, true},          [DN_TT_F16] = {"F16", 1, 2, true},
    [DN_TT_BF16] = {"BF16", 1, 2, true},        [DN_TT_F64] = {"F64", 1, 8, false},
    [DN_TT_Q4_0] = {"Q4_0", 32, 18, true},      [DN_TT_Q4_1] = {"Q4_1", 32, 20, true},
    [DN_TT_Q5_0] = {"Q5_0", 32, 22, false},     [DN_TT_Q5_1] = {"Q5_1", 32, 24, false},
    [DN_TT_Q8_0] = {"Q8_0", 32, 34, true},      [DN_TT_Q8_1] = {"Q8_1", 32, 36, false},
    [DN_TT_Q2_K] = {"Q2_K", 256, 84, false},    [DN_TT_Q3_K] = {"Q3_K", 256, 110, false},
    [DN_TT_Q4_K] = {"Q4_K", 256, 144, true},    [DN_TT_Q5_K] = {"Q5_K", 256, 176, false},
    [DN_TT_Q6_K] = {"Q6_K", 256, 210, true},    [DN_TT_Q8_K] = {"Q8_K", 256, 292, false},
    [DN_TT_F8_E4M3] = {"F8_E4M3", 1, 1, false}, [DN_TT_F8_E5M2] = {"F8_E5M2", 1, 1, false},
    [DN_TT_F8_E8M0] = {"F8_E8M0", 1, 1, false}, [DN_TT_I8] = {"I8", 1, 1, false},
    [DN_TT_I16] = {"I16", 1, 2, false},         [DN_TT_I32] = {"I32", 1, 4, false},
    [DN_TT_I64] = {"I64", 1, 8, false},         [DN_TT_U8] = {"U8", 1, 1, false},
    [DN_TT_U16] = {"U16", 1, 2, false},         [DN_TT_U32] = {"U32", 1, 4, false},
    [DN_TT_U64] = {"U64", 1, 8, false},         [DN_TT_BOOL] = {"BOOL", 1, 1, false},
};

const struct dn_tensor_type_info *dn_tensor_type_info(enum dn_tensor_type t)
{
    DN_BUG_ON((unsigned)t >= DN_TT_COUNT);
    return &INFO[t];
}

char *dn_tensor_shape_text(const struct dn_tensor *t, char *text, size_t n)
{
    size_t len = 0;
    snprintf(text, n, "scalar");
    for (uint32_t i = 0; i < t->n_dims && len < n; i++)
        len += (size_t)snprintf(text + len, n - len, "[%" PRIu64 "]", t->dim[i]);
    return text;
}

uint64_t dn_tensor_row_bytes(enum dn_tensor_type t, uint64_t n)
{
    return n / INFO[t].block_values * INFO[t].block_bytes;
}

static float bits_to_f32(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static uint32_t f32_to_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

float dn_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = (h >> 10) & 31, mantissa = h & 0x3ff;
    if (exponent == 31)
        return bits_to_f32(sign | 0x7f800000 | mantissa << 13);
    if (exponent != 0)
        return bits_to_f32(sign | (exponent + 112) << 23 | mantissa << 13);
    /* Zero and subnormals: mantissa * 2^-24 is exact in f32. */
    float f = (float)mantissa * 0x1p-24f;
    return sign ? -f : f;
}

uint16_t dn_f32_to_f16(float f)
{
    uint32_t u = f32_to_bits(f), sign = (u >> 16) & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (a >= 0x477ff000) /* 65520 and above round to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000) { /* below 2^-14: subnormal, let the FPU round to a multiple of 2^-24 */
        float shifted = bits_to_f32(a) + 0.5f;
        return (uint16_t)(sign | (f32_to_bits(shifted) - 0x3f000000));
    }
    uint32_t rounded = a + 0xfff + ((a >> 13) & 1);
    return (uint16_t)(sign | ((rounded >> 13) - (112u << 10)));
}

uint16_t dn_f32_to_bf16(float f)
{
    uint32_t u = f32_to_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(u >> 16 | 0x40);
    return (uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16);
}

static uint16_t load_u16(const uint8_t *p)
{
    uint16_t v;
    memcpy(&v, p, sizeof v);
    return v;
}

/* The 6-bit scale and minimum of sub-block j (0..7) of a Q4_K block, out of its 12 bytes s. */
static void q4_k_scale(const uint8_t *s, int j, uint8_t *scale, uint8_t *min)
{
    if (j < 4) {
        *scale = s[j] & 63;
        *min = s[j + 4] & 63;
    } else {
        *scale = (uint8_t)((s[j + 4] & 15) | (s[j - 4] >> 6) << 4);
        *min = (uint8_t)((s[j + 4] >> 4) | (s[j] >> 6) << 4);
    }
}

static void row_q4(const uint8_t *row, size_t n, bool has_min, float *out)
{
    for (size_t b = 0; b < n / 32; b++, row += has_min ? 20 : 18, out += 32) {
        float d = dn_f16_to_f32(load_u16(row));
        float m = has_min ? dn_f16_to_f32(load_u16(row + 2)) : 0;
        const uint8_t *q = row + (has_min ? 4 : 2);
        for (int j = 0; j < 16; j++) {
            out[j] = has_min ? (float)(q[j] & 15) * d + m : (float)((q[j] & 15) - 8) * d;
            out[j + 16] = has_min ? (float)(q[j] >> 4) * d + m : (float)((q[j] >> 4) - 8) * d;
        }
    }
}

static void row_q8_0(const uint8_t *row, size_t n, float *out)
{
    for (size_t b = 0; b < n / 32; b++, row += 34, out += 32) {
        float d = dn_f16_to_f32(load_u16(row));
        for (int j = 0; j < 32; j++)
            out[j] = (float)(int8_t)row[2 + j] * d;
    }
}

static void row_q4_k(const uint8_t *row, size_t n, float *out)
{
    for (size_t b = 0; b < n / 256; b++, row += 144, out += 256) {
        float d = dn_f16_to_f32(load_u16(row)), dmin = dn_f16_to_f32(load_u16(row + 2));
        for (int j = 0; j < 8; j++) {
            uint8_t sc, mn;
            q4_k_scale(row + 4, j, &sc, &mn);
            float scale = d * (float)sc, min = dmin * (float)mn;
            const uint8_t *q = row + 16 + 32 * (j / 2);
            for (int l = 0; l < 32; l++)
                out[32 * j + l] = scale * (float)(j % 2 ? q[l] >> 4 : q[l] & 15) - min;
        }
    }
}

static void row_q6_k(const uint8_t *row, size_t n, float *out)
{
    for (size_t b = 0; b < n / 256; b++, row += 210, out += 256) {
        float d = dn_f16_to_f32(load_u16(row + 208));
        for (int half = 0; half < 2; half++) {
            const uint8_t *ql = row + 64 * half, *qh = row + 128 + 32 * half;
            const int8_t *sc = (const int8_t *)row + 192 + 8 * half;
            float *y = out + 128 * half;
            for (int l = 0; l < 32; l++) {
                int is = l / 16;
                int q0 = (ql[l] & 15) | (qh[l] & 3) << 4, q1 = (ql[l + 32] & 15) | ((qh[l] >> 2) & 3) << 4;
                int q2 = (ql[l] >> 4) | ((qh[l] >> 4) & 3) << 4, q3 = (ql[l + 32] >> 4) | (qh[l] >> 6) << 4;
                y[l] = d * (float)sc[is] * (float)(q0 - 32);
                y[l + 32] = d * (float)sc[is + 2] * (float)(q1 - 32);
                y[l + 64] = d * (float)sc[is + 4] * (float)(q2 - 32);
                y[l + 96] = d * (float)sc[is + 6] * (float)(q3 - 32);
            }
        }
    }
}

void dn_tensor_row_f32(enum dn_tensor_type t, const uint8_t *row, size_t n, float *out)
{
    DN_BUG_ON(!INFO[t].decodes || n % INFO[t].block_values != 0);
    switch (t) {
    case DN_TT_F32:
        memcpy(out, row, 4 * n);
        return;
    case DN_TT_F16:
        for (size_t i = 0; i < n; i++)
            out[i] = dn_f16_to_f32(load_u16(row + 2 * i));
        return;
    case DN_TT_BF16:
        for (size_t i = 0; i < n; i++)
            out[i] = dn_bf16_to_f32(load_u16(row + 2 * i));
        return;
    case DN_TT_Q4_0:
    case DN_TT_Q4_1:
        row_q4(row, n, t == DN_TT_Q4_1, out);
        return;
    case DN_TT_Q8_0:
        row_q8_0(row, n, out);
        return;
    case DN_TT_Q4_K:
        row_q4_k(row, n, out);
        return;
    case DN_TT_Q6_K:
        row_q6_k(row, n, out);
        return;
    default:
        DN_BUG_ON(true && "a type without a decoder");
    }
}

/* 16 bytes of ggml's order (element j low, j + 16 high) to ours (column 2b low, 2b + 1 high). */
static void reorder_nibbles(const uint8_t *q, uint8_t *out)
{
    for (int b = 0; b < 8; b++) {
        out[b] = (uint8_t)((q[2 * b] & 15) | (q[2 * b + 1] & 15) << 4);
        out[b + 8] = (uint8_t)(q[2 * b] >> 4 | (q[2 * b + 1] & 0xf0));
    }
}

static bool finite_f16(uint16_t h)
{
    return (h & 0x7c00) != 0x7c00;
}

static bool row_q4_k_packed(const uint8_t *row, size_t n, uint8_t *q4, uint16_t *scale, uint16_t *offset)
{
    bool fits = true;
    for (size_t b = 0; b < n / 256; b++, row += 144, q4 += 128, scale += 8, offset += 8) {
        float d = dn_f16_to_f32(load_u16(row)), dmin = dn_f16_to_f32(load_u16(row + 2));
        for (int j = 0; j < 8; j++) {
            uint8_t sc, mn;
            q4_k_scale(row + 4, j, &sc, &mn);
            scale[j] = dn_f32_to_f16(d * (float)sc);
            offset[j] = dn_f32_to_f16(-dmin * (float)mn);
            fits = fits && finite_f16(scale[j]) && finite_f16(offset[j]);
            const uint8_t *q = row + 16 + 32 * (j / 2);
            for (int l = 0; l < 16; l++)
                q4[16 * j + l] = j % 2 ? (uint8_t)(q[2 * l] >> 4 | (q[2 * l + 1] & 0xf0))
                                       : (uint8_t)((q[2 * l] & 15) | (q[2 * l + 1] & 15) << 4);
        }
    }
    return fits;
}

bool dn_tensor_row_q4(enum dn_tensor_type t, const uint8_t *row, size_t n, uint8_t *q4, uint16_t *scale,
                      uint16_t *offset)
{
    if (t == DN_TT_Q4_K)
        return row_q4_k_packed(row, n, q4, scale, offset);
    DN_BUG_ON(t != DN_TT_Q4_0 && t != DN_TT_Q4_1);
    bool fits = true;
    for (size_t b = 0; b < n / 32; b++, row += t == DN_TT_Q4_1 ? 20 : 18) {
        scale[b] = load_u16(row);
        offset[b] = t == DN_TT_Q4_1 ? load_u16(row + 2) : dn_f32_to_f16(-8 * dn_f16_to_f32(scale[b]));
        fits = fits && finite_f16(scale[b]) && finite_f16(offset[b]);
        reorder_nibbles(row + (t == DN_TT_Q4_1 ? 4 : 2), q4 + 16 * b);
    }
    return fits;
}

void dn_tensor_row_q8(const uint8_t *row, size_t n, int8_t *q8, uint16_t *scale)
{
    for (size_t b = 0; b < n / 32; b++, row += 34) {
        scale[b] = load_u16(row);
        memcpy(q8 + 32 * b, row + 2, 32);
    }
}
