#include "engine/tensor.h"

#include "engine/mapfile.h"

#include <criterion/criterion.h>
#include <math.h>
#include <string.h>

/* tests/oracle/make_dequant.py says what the file holds. */
struct sample {
    uint32_t ggml, n, n_bytes;
    const uint8_t *raw;
    float value[512];
};

static enum dn_tensor_type type_of(uint32_t ggml)
{
    switch (ggml) {
    case 2:
        return DN_TT_Q4_0;
    case 3:
        return DN_TT_Q4_1;
    case 8:
        return DN_TT_Q8_0;
    case 12:
        return DN_TT_Q4_K;
    case 14:
        return DN_TT_Q6_K;
    case 1:
        return DN_TT_F16;
    default:
        return DN_TT_BF16;
    }
}

static size_t read_samples(struct dn_mapfile *map, struct sample *sample)
{
    struct dn_err err = {0};
    size_t n = 0;
    cr_assert_eq(dn_mapfile_init(map, DN_SOURCE_DIR "/tests/fixtures/dequant.bin", &err), 0, "%s", err.text);
    for (uint64_t at = 0; at < map->bytes; n++) {
        struct sample *s = &sample[n];
        memcpy(s, map->data + at, 12);
        s->raw = map->data + at + 12;
        cr_assert_eq(s->n, 512);
        memcpy(s->value, s->raw + s->n_bytes, 4 * s->n);
        at += 12 + s->n_bytes + 4 * s->n;
    }
    return n;
}

Test(tensor, values_of_every_type_are_those_of_ggml)
{
    struct dn_mapfile map;
    struct sample sample[7];
    size_t n = read_samples(&map, sample);
    cr_assert_eq(n, 7);
    for (size_t i = 0; i < n; i++) {
        float out[512];
        enum dn_tensor_type t = type_of(sample[i].ggml);
        cr_assert_eq(dn_tensor_row_bytes(t, 512), sample[i].n_bytes);
        dn_tensor_row_f32(t, sample[i].raw, 512, out);
        for (size_t k = 0; k < 512; k++)
            cr_assert_float_eq(out[k], sample[i].value[k], 1e-6f * fabsf(sample[i].value[k]),
                               "%s value %zu: %g, expected %g", dn_tensor_type_info(t)->name, k, (double)out[k],
                               (double)sample[i].value[k]);
    }
    dn_mapfile_release(&map);
}

Test(tensor, packed_rows_have_the_values_of_their_blocks)
{
    struct dn_mapfile map;
    struct sample sample[7];
    size_t n = read_samples(&map, sample);
    for (size_t i = 0; i < n; i++) {
        enum dn_tensor_type t = type_of(sample[i].ggml);
        uint8_t q4[256];
        int8_t q8[512];
        uint16_t scale[16], offset[16];
        if (t != DN_TT_Q4_0 && t != DN_TT_Q4_1 && t != DN_TT_Q4_K && t != DN_TT_Q8_0)
            continue;
        if (t == DN_TT_Q8_0)
            dn_tensor_row_q8(sample[i].raw, 512, q8, scale);
        else
            cr_assert(dn_tensor_row_q4(t, sample[i].raw, 512, q4, scale, offset));
        for (size_t k = 0; k < 512; k++) {
            float s = dn_f16_to_f32(scale[k / 32]), is;
            if (t == DN_TT_Q8_0)
                is = (float)q8[k] * s;
            else
                is = (float)(q4[k / 2] >> (k % 2 * 4) & 15) * s + dn_f16_to_f32(offset[k / 32]);
            /* Q4_K's products of two scales are rounded to f16: 2^-11 of each term. */
            float loose = t == DN_TT_Q4_K ? (15 * fabsf(s) + fabsf(dn_f16_to_f32(offset[k / 32]))) / 2048 : 1e-6f;
            cr_assert_float_eq(is, sample[i].value[k], loose, "%s value %zu: %g, expected %g",
                               dn_tensor_type_info(t)->name, k, (double)is, (double)sample[i].value[k]);
        }
    }
    dn_mapfile_release(&map);
}

Test(tensor, a_scale_too_large_for_f16_is_not_packed)
{
    uint8_t block[18] = {0xff, 0x7b}, q4[16]; /* 65504: eight times that has no f16 */
    uint16_t scale[1], offset[1];
    cr_assert_not(dn_tensor_row_q4(DN_TT_Q4_0, block, 32, q4, scale, offset));
}

/* Against the compiler's own conversion where it has one; every f16 there and back, and the halves between them. */
Test(tensor, f16_rounds_to_nearest_even)
{
    for (uint32_t h = 0; h < 0x7c00; h++) {
        float f = dn_f16_to_f32((uint16_t)h), next = h + 1 < 0x7c00 ? dn_f16_to_f32((uint16_t)(h + 1)) : 65536;
        float middle = f + (next - f) / 2;
        cr_assert_eq(dn_f32_to_f16(f), h);
        cr_assert_eq(dn_f32_to_f16(-f), h | 0x8000);
        cr_assert_eq(dn_f32_to_f16(middle), h + (h & 1), "%x", h);
        cr_assert_eq(dn_f32_to_f16(nextafterf(middle, 0)), h, "%x", h);
        cr_assert_eq(dn_f32_to_f16(nextafterf(middle, INFINITY)), h + 1, "%x", h);
    }
    cr_assert_eq(dn_f32_to_f16(1e9f), 0x7c00);
    cr_assert_eq(dn_f32_to_f16(INFINITY), 0x7c00);
    cr_assert_eq(dn_f32_to_f16(1e-30f), 0);
    cr_assert(isnan(dn_f16_to_f32(dn_f32_to_f16(NAN))));
    cr_assert_eq(dn_f16_to_f32(0x3c00), 1);
    cr_assert_eq(dn_f16_to_f32(0x0001), 0x1p-24f);
}

Test(tensor, bf16_rounds_to_nearest_even)
{
    cr_assert_eq(dn_f32_to_bf16(1.0f), 0x3f80);
    cr_assert_eq(dn_f32_to_bf16(1.0f + 0x1p-8f), 0x3f80);
    cr_assert_eq(dn_f32_to_bf16(1.0f + 0x3p-8f), 0x3f82);
    cr_assert_eq(dn_f32_to_bf16(1.0f + 0x1.1p-8f), 0x3f81);
    cr_assert_eq(dn_f32_to_bf16(INFINITY), 0x7f80);
    cr_assert(isnan(dn_bf16_to_f32(dn_f32_to_bf16(NAN))));
}
