/* Where mla_write.cu leaves a token's values in a layer's part of a page: kernels/cuda/mla.cuh's layout, written again
 * for the tests that read pages back. Everything is static and belongs to the program that includes it.
 */
#ifndef DN_TESTS_MLA_PAGE_H
#define DN_TESTS_MLA_PAGE_H

#include "gpu/gpu.h"

enum { LATENT = 512, ROPE = 64, WIDTH = LATENT + ROPE, PAGE = 64 };

static UNUSED size_t swizzled(uint32_t token, uint32_t column)
{
    return token * 128 + ((column / 8) ^ (token & 7)) * 16 + column % 8 * 2;
}
static UNUSED size_t code_at(uint32_t token, uint32_t i)
{
    return i / 128 * 8192 + token * 128 + ((i % 128 / 16) ^ (token & 7)) * 16 + i % 16;
}
/* Value i of a token as attention sees it; from LATENT on its rope key. */
static UNUSED float stored(const struct dn_kv_layout *l, const uint8_t *page, enum dn_kv_format f, uint32_t token,
                           uint32_t i)
{
    uint16_t u;
    float s = 0;
    if (f == DN_KV_FP8)
        memcpy(&s, page + l->format[f].k_scale_offset + token * 4, 4);
    if (f == DN_KV_BF16 || i >= LATENT) {
        const uint8_t *block = f == DN_KV_BF16 ? page + i / 64 * 8192 : page + l->format[f].v_offset;
        memcpy(&u, block + swizzled(token, i % 64), 2);
        return s == 0 ? bf16_to_f32(u) : (float)((double)bf16_to_f32(u) * s);
    }
    return (float)(e4m3_to_f64(page[code_at(token, i)]) * s);
}

#endif
