/* Rounding f32 weights to the groups and blocks of the weight formats, and what every backend asks of the rows it
 * packs.
 *
 * A group with a NaN or an infinity becomes NaN as a whole (INT8, INT4: a NaN scale) or in that value (FP8), so that a
 * broken checkpoint is seen and not hidden. Pure functions; any thread.
 */
#ifndef DN_KERNELS_CPU_PACK_QUANTISE_H
#define DN_KERNELS_CPU_PACK_QUANTISE_H

#include "kernels/formats.h"

/* 32 values to q * scale, |q| <= 127; scale = largest magnitude / 127, rounded to its 16 bits before q is. */
void dn_quantise_int8(const float x[32], bool scale_is_bf16, int8_t q[32], uint16_t *scale);

/* 32 values to q * scale + offset, 0 <= q <= 15. Among a few ranges shrunk from [min, max], each refined by a
 * least-squares fit of scale and offset to its codes, takes the one with the least squared error after rounding both to
 * 16 bits. On normal values that is an RMS error some 7 % below that of the plain range. */
void dn_quantise_int4(const float x[32], bool scale_is_bf16, uint8_t q[32], uint16_t *scale, uint16_t *offset);

/* 32 values to (q - 8) * scale; the same search over scales that put the largest value on -8, between, or on 7. */
void dn_quantise_int4_sym(const float x[32], bool scale_is_bf16, uint8_t q[32], uint16_t *scale);

/* The scale of a block of e4m3: the largest finite magnitude among n values goes to 448. */
float dn_fp8_scale(float largest);
float dn_largest_finite(const float *x, size_t n);
/* x / scale to e4m3; infinities become NaN. */
uint8_t dn_quantise_fp8(float x, float scale);

/* Exactly one source, with all that belongs to it. */
bool dn_rows_are_complete(const struct dn_rows *r, uint32_t n_in);
/* Of the matrix's own family: what is packed is what was given. */
bool dn_rows_are_lossless(const struct dn_matrix *m, const struct dn_rows *r);

#endif
