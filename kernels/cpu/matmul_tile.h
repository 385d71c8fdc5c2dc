/* Inside the matmuls: some blocks of 16 weight rows times one tile of activation rows, for each instruction set.
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
    const float *bias;    /* [n_out] of these blocks or NULL */
    float *out;           /* [n_rows][out_stride], first of these blocks' columns */
    size_t out_stride;    /* floats */
    uint32_t n_in, n_out; /* n_out: rows of weights that exist from the first block's on */
    uint32_t n_blocks;    /* 1..2, or as dn_matmul_ops says */
    uint32_t block_rows;  /* rows of weights from one block to the next: DN_BLOCK_ROWS if they are neighbours */
    uint32_t n_rows;      /* activation rows, 1..DN_TILE_ROWS */
    uint32_t ahead;       /* if not 0, the blocks come from memory: ask for what lies so many bytes behind */
    /* INT8 and INT4 with AVX-512: the next blocks, or NULL if each block is part of a stream of its own (`ahead`). Each
     * tile asks for its share while it computes, next_step bytes of each block in each group of inputs. */
    const uint8_t *next;
    uint32_t next_step;
    bool scale_is_bf16;
    size_t block_bytes; /* from one block to the next */
    size_t offset_at, data_at;
    const uint8_t *wide; /* what dn_matmul_ops.widen_* made of these blocks, or NULL */
    size_t wide_bytes;   /* of one block */
};

typedef void dn_tile_fn(const struct dn_tile *t);

/* n_rows rows of activations to 16 bits, into one tile. zero is 128, 8 or 0: what is subtracted from the stored weight.
 */
typedef void dn_act_fn(const float *a, uint32_t n_in, uint32_t n_rows, int zero, uint8_t *act);

/* Unpacks the weights of t's blocks for several tiles: INT4 to the data of an INT8 block (with codes 0..15), FP8 to
 * that of a BF16 block (of 2^-8 times the code's value, which is exact). Gives the same results, bit for bit. */
typedef void dn_widen_fn(const struct dn_tile *t, uint8_t *out);

struct dn_matmul_ops {
    dn_tile_fn *bf16, *fp8, *int8, *int4_sym, *int4;
    dn_act_fn *act;
    dn_widen_fn *widen_fp8, *widen_int4; /* NULL: not worth it */
    uint32_t row_blocks;                 /* blocks side by side for INT8 and INT4 with one row of activations */
    /* Tiles of INT8 and INT4, at most: int4_shape for INT4 with offsets and more rows than int_shape has. Others have
     * DN_TILE_ROWS rows and two blocks. */
    struct dn_tile_shape {
        uint32_t rows, blocks;
    } int_shape, int4_shape;
};

extern const struct dn_matmul_ops dn_matmul_portable;
#if defined(__x86_64__)
extern const struct dn_matmul_ops dn_matmul_avx2, dn_matmul_avx512;
#endif

/* A group whose largest activation is smaller than this counts as zero (its reciprocal would overflow); the error is
 * below that times the sum of 32 weights. */
#define DN_ACT_TINY 0x1p-100f

#endif
