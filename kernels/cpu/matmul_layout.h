/* The packed form of a weight matrix on the CPU, and of the activations that it is multiplied with.
 *
 * Weights: blocks of 16 rows, one after the other; a last block that is not full is padded with zero rows. A block is
 *   BF16  [n_in / 2][16 rows][2] bf16: a 32-bit lane holds two inputs of one row
 *   FP8   header [n_in / 128] of {f32 scale, u32 mask of rows with a NaN code}, padded to 64 bytes; [n_in / 2][16
 * rows][2] e4m3 INT8  scales [n_in / 32][16 rows], padded to 64 bytes; groups of [8 quads][16 rows][4] u8 = q + 128: a
 * 64-byte vector holds four inputs of every row, as vpdpbusd and vpmaddubsw (unsigned times signed) want it INT4
 * scales, offsets (unless symmetric) as INT8; groups of [4][16 rows][4] bytes: quad j in the low nibbles of vector j,
 * quad j + 4 in the high ones BF16 and FP8 pad the inputs with zeros to a multiple of 4.
 *
 * Activations: tiles of m <= 6 rows, built anew for each matmul.
 *   BF16, FP8   [n_in padded][m] f32
 *   INT8, INT4  for each group of 32: [m][32 high][32 low] s8: an activation is scale * (256 * high + low), 16 bits in
 *               all; [m] f32 scale, [m] third value: with s = sum of the group's 16-bit numbers, -128 s (INT8) or
 *               -8 s (INT4 symmetric) as s32, which is added to the sum of products; scale * s as f32 (INT4)
 *
 * Why 16 bits: with 8, as others do, SmolLM2's logits differ from transformers' by 0.165 in the mean and its greedy
 * text leaves the reference at the first near-tie; with 16 the difference is 0.012 and the text is the same. One 32-bit
 * sum takes both halves (the high one shifted by 8), so that only the dot products double; a single row stays
 * bound by memory. No state; any thread.
 */
#ifndef DN_KERNELS_CPU_MATMUL_LAYOUT_H
#define DN_KERNELS_CPU_MATMUL_LAYOUT_H

#include "kernels/cpu/matmul.h"

enum {
    DN_BLOCK_ROWS = 16,
    DN_TILE_ROWS = 6,
    DN_GROUP = 32,
    DN_ACT_BYTES = 2 * DN_GROUP,               /* high and low halves of one row's group */
    DN_ACT_GROUP_BYTES = DN_ACT_BYTES + 4 + 4, /* and its scale and third value */
    DN_ACT_MAX = 127 * 256,                    /* what a group's largest activation becomes */
    DN_FP8_BLOCK = 128,
    DN_GROUP_ROWS = 64, /* n_out of several groups is a multiple */
    DN_FP8_HEAD_BYTES = 8,
};

struct dn_layout {
    uint32_t n_blocks;
    uint32_t n_in_padded;
    size_t offset_at, data_at, block_bytes; /* offsets within a block */
};

struct dn_fp8_head {
    float scale;
    uint32_t nan_rows;
};

static inline size_t dn_up(size_t n, size_t to)
{
    return (n + to - 1) / to * to;
}

/* Of all groups together. */
static inline struct dn_layout dn_layout_of(const struct dn_matrix *m)
{
    struct dn_layout l = {.n_blocks = (uint32_t)((dn_cpu_rows(m) + DN_BLOCK_ROWS - 1) / DN_BLOCK_ROWS)};
    size_t n_in = dn_up(m->n_in, 4), scales = dn_up(n_in / DN_GROUP * DN_BLOCK_ROWS * 2, 64);
    l.n_in_padded = (uint32_t)n_in;
    switch (m->format) {
    case DN_W_BF16:
        l.block_bytes = n_in * DN_BLOCK_ROWS * 2;
        break;
    case DN_W_FP8:
        l.data_at = dn_up(dn_up(n_in, DN_FP8_BLOCK) / DN_FP8_BLOCK * DN_FP8_HEAD_BYTES, 64);
        l.block_bytes = l.data_at + n_in * DN_BLOCK_ROWS;
        break;
    case DN_W_INT8:
        l.data_at = scales;
        l.block_bytes = l.data_at + n_in * DN_BLOCK_ROWS;
        break;
    case DN_W_INT4:
        l.offset_at = scales;
        l.data_at = m->symmetric ? scales : 2 * scales;
        l.block_bytes = l.data_at + n_in * DN_BLOCK_ROWS / 2;
        break;
    default:
        DN_BUG_ON(true);
    }
    return l;
}

/* Where a value lies, in bytes from the block's data. BF16, FP8: in values. */
static inline size_t dn_at_pair(uint32_t row, uint32_t k)
{
    return (size_t)(k / 2) * (DN_BLOCK_ROWS * 2) + row * 2 + k % 2;
}

static inline size_t dn_at_int8(uint32_t row, uint32_t k)
{
    return (size_t)(k / 4) * (DN_BLOCK_ROWS * 4) + row * 4 + k % 4;
}

/* INT4: k % 32 < 16 is the low nibble of its byte. */
static inline size_t dn_at_int4(uint32_t row, uint32_t k)
{
    return (size_t)(k / DN_GROUP) * (DN_GROUP * DN_BLOCK_ROWS / 2) + dn_at_int8(row, k % 16);
}

#endif
