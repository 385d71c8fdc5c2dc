/* Inside the matmuls: one block of 16 weight rows times one tile of up to 8 activation rows, for each instruction set.
 *
 * matmul.c cuts the work and calls these through a table; both layouts are described in matmul_layout.h. The sum of an
 * output runs in the same order in every tile height. Borrowed pointers only; any thread.
 */
#ifndef DN_KERNELS_CPU_MATMUL_TILE_H
#define DN_KERNELS_CPU_MATMUL_TILE_H

#include "kernels/cpu/matmul_layout.h"

struct dn_tile {
    const uint8_t *block; /* packed weights */
    const uint8_t *act;   /* packed activations */
    const float *bias;    /* [n_out] of this block or NULL */
    float *out;           /* [n_rows][out_stride], first of this block's columns */
    size_t out_stride;    /* floats */
    uint32_t n_in, n_out; /* n_out: rows of the block that exist, 1..16 */
    uint32_t n_rows;      /* activation rows, 1..8 */
    bool scale_is_bf16;
    bool prefetch; /* the block comes from memory: ask for what lies behind it in time */
    size_t offset_at, data_at;
};

typedef void dn_tile_fn(const struct dn_tile *t);

/* n_rows rows of activations to s8, into one tile. zero is 128, 8 or 0: what is subtracted from the stored weight. */
typedef void dn_act_fn(const float *a, uint32_t n_in, uint32_t n_rows, int zero, uint8_t *act);

struct dn_matmul_ops {
    dn_tile_fn *bf16, *fp8, *int8, *int4_sym, *int4;
    dn_act_fn *act;
};

extern const struct dn_matmul_ops dn_matmul_portable;
#if defined(__x86_64__)
extern const struct dn_matmul_ops dn_matmul_avx2, dn_matmul_avx512;
#endif

/* A group whose largest activation is smaller than this counts as zero (its reciprocal would overflow); the error is
 * below that times the sum of 32 weights. */
#define DN_ACT_TINY 0x1p-100f

#endif
