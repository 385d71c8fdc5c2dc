/* What the CPU backend does with one row of values at a time: normalise, rotate, activate, encode for the KV cache, and
 * the passes of the sampler over the vocabulary. One table an instruction set; rows_body.inc.h is the code of all.
 *
 * A result depends on the arguments alone. Borrowed memory only, no state; any thread.
 */
#ifndef DN_KERNELS_CPU_ROWS_H
#define DN_KERNELS_CPU_ROWS_H

#include "kernels/cpu/isa.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DN_EXP_BLOCK = 256 }; /* values to a partial sum of exp_blocks() */

struct dn_row_ops {
    /* x += y, [n] */
    void (*add)(float *x, const float *y, size_t n);

    /* out = x * rsqrt(mean(x^2) + eps) * weight, [n]; out may be x */
    void (*rmsnorm)(const float *x, const float *weight, float eps, size_t n, float *out);

    /* out = silu(gate) * up, [n] */
    void (*silu_mul)(const float *gate, const float *up, size_t n, float *out);

    /* Rotates the first 2 * n_pairs values of x by table [n_pairs][2] (cos, sin): pairs (2i, 2i + 1) or (i, i +
     * n_pairs) */
    void (*rope)(float *x, const float *table, size_t n_pairs, bool interleaved);

    /* bf16, round to nearest even; NaN stays NaN. [n] */
    void (*encode_bf16)(const float *x, size_t n, uint16_t *out);

    /* e4m3 with one scale: x ~ out * scale, scale = largest |x| / 448, round to nearest even, saturating (an infinity
     * becomes the largest f32). All values below 1e-30: zeros and scale 0. Any NaN: the scale is NaN as well, so that
     * readers need not look for the NaN code. [n] */
    void (*encode_fp8)(const float *x, size_t n, uint8_t *out, float *scale);

    /* x += a * y, [n] */
    void (*add_scaled)(float *x, const float *y, float a, size_t n);

    /* The values that encode_bf16 and encode_fp8 left, [n]; those of a vector with a NaN are all NaN. */
    void (*decode_bf16)(const uint16_t *x, size_t n, float *out);
    void (*decode_fp8)(const uint8_t *x, size_t n, float scale, float *out);

    /* Index of the largest value, the first one on ties; *finite = no NaN, no +inf, not all -inf. n >= 1 */
    uint32_t (*argmax)(const float *x, uint32_t n, bool *finite);

    /* e^((x - max) * inv_t), [n] */
    void (*exps)(const float *x, size_t n, float max, float inv_t, float *out);

    /* The same summed over blocks of DN_EXP_BLOCK values: sum [ceil(n / DN_EXP_BLOCK)] */
    void (*exp_blocks)(const float *x, size_t n, float max, float inv_t, float *sum);

    /* Ids of the values >= cut, ascending, at most `cap` of them. Returns their number, > cap if there are more. */
    uint32_t (*gather)(const float *x, uint32_t n, float cut, uint32_t *id, uint32_t cap);
};

extern const struct dn_row_ops dn_row_ops_portable;
extern const struct dn_row_ops dn_row_ops_avx2, dn_row_ops_avx512;

const struct dn_row_ops *dn_row_ops(enum dn_isa isa);

#endif
