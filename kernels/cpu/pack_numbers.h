/* The small number formats: f16, bf16 and e4m3 to and from f32, rounding to nearest even.
 *
 * All functions are static, so that files compiled for different instruction sets never share one. None depends on
 * the rounding of subnormal f32 (DAZ, FTZ). Pure values; any thread.
 */
#ifndef DN_KERNELS_CPU_PACK_NUMBERS_H
#define DN_KERNELS_CPU_PACK_NUMBERS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

static inline uint32_t dn_f32_bits(float f)
{
    uint32_t u;
    memcpy(&u, &f, sizeof u);
    return u;
}

static inline float dn_f32_from_bits(uint32_t u)
{
    float f;
    memcpy(&f, &u, sizeof f);
    return f;
}

static inline float dn_bf16_to_f32(uint16_t h)
{
    return dn_f32_from_bits((uint32_t)h << 16);
}

static inline uint16_t dn_f32_to_bf16(float f)
{
    uint32_t u = dn_f32_bits(f);
    if ((u & 0x7fffffff) > 0x7f800000)
        return (uint16_t)(u >> 16 | 0x40); /* stays a NaN */
    return (uint16_t)((u + 0x7fff + (u >> 16 & 1)) >> 16);
}

static inline float dn_f16_to_f32(uint16_t h)
{
    uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 31, mantissa = h & 1023;
    if (exponent == 0) {
        float f = (float)mantissa * 0x1p-24f;
        return sign ? -f : f;
    }
    exponent = exponent == 31 ? 255 : exponent + 112;
    return dn_f32_from_bits(sign | exponent << 23 | mantissa << 13);
}

static inline uint16_t dn_f32_to_f16(float f)
{
    uint32_t u = dn_f32_bits(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffff;
    if (a > 0x7f800000)
        return (uint16_t)(sign | 0x7e00);
    if (a >= 0x47800000) /* 65536; rounding below takes 65520 and more to infinity */
        return (uint16_t)(sign | 0x7c00);
    if (a < 0x38800000) /* below 2^-14: the ulp of 0.5 is that of an f16 subnormal, so the addition rounds */
        return (uint16_t)(sign | (dn_f32_bits(dn_f32_from_bits(a) + 0.5f) - 0x3f000000));
    a += 0xfff + (a >> 13 & 1);
    return (uint16_t)(sign | (a - 0x38000000) >> 13);
}

/* e4m3 (the "fn" kind: no infinity, S.1111.111 is NaN, largest 448). */
static inline float dn_e4m3_to_f32(uint8_t q)
{
    uint32_t sign = (uint32_t)(q & 0x80) << 24, a = q & 0x7f;
    if (a == 0x7f)
        return dn_f32_from_bits(sign | 0x7fc00000);
    if (a < 8) {
        float f = (float)a * 0x1p-9f;
        return sign ? -f : f;
    }
    return dn_f32_from_bits(sign | ((a << 20) + (120u << 23)));
}

/* Saturates: all beyond 448 and infinities give 448. NaN stays NaN. */
static inline uint8_t dn_f32_to_e4m3(float f)
{
    uint32_t u = dn_f32_bits(f), sign = u >> 24 & 0x80, a = u & 0x7fffffff, q;
    if (a > 0x7f800000)
        return (uint8_t)(sign | 0x7f);
    if (a >= 0x43e00000) /* 448 */
        q = 0x7e;
    else if (a < 0x3c800000) /* below 2^-6: the ulp of 2^14 is that of an e4m3 subnormal */
        q = dn_f32_bits(dn_f32_from_bits(a) + 0x1p14f) - 0x46800000;
    else
        q = (a + 0x7ffff + (a >> 20 & 1) - (120u << 23)) >> 20;
    return (uint8_t)(sign | q);
}

/* 16-bit scales are f16 or bf16 as struct dn_matrix says. */
static inline float dn_scale16_to_f32(uint16_t h, bool is_bf16)
{
    return is_bf16 ? dn_bf16_to_f32(h) : dn_f16_to_f32(h);
}

static inline uint16_t dn_f32_to_scale16(float f, bool is_bf16)
{
    return is_bf16 ? dn_f32_to_bf16(f) : dn_f32_to_f16(f);
}

#endif
