/* Weights of the CPU backend: packing them, multiplying by them, looking a row up.
 *
 * One packed layout serves every instruction set (matmul_layout.h): blocks of 16 output rows, in each the inputs in
 * order, so that one vector holds the same inputs of 16 rows and no sum runs across a vector.
 *
 * Arithmetic: BF16 and FP8 weights are widened exactly and multiplied with f32 activations in f32. For INT8 and INT4
 * the activations are first rounded to 16 bits with one f32 scale for each row and group of 32 inputs, products are
 * summed exactly within a group and in f32 over groups. Sums run in one fixed order for each instruction set, so that
 * the result for a row depends on nothing but that row: not on n, the threads or the rows around it. A row with an
 * infinite or NaN activation gives NaN in all outputs for INT8 and INT4, and what IEEE gives for BF16 and FP8; other
 * rows are untouched.
 *
 * The caller owns all memory. Packing may run on several threads at once as kernels.h says; a matmul uses the threads
 * and the scratch of its struct dn_cpu_exec, which one thread may use at a time.
 */
#ifndef DN_KERNELS_CPU_MATMUL_H
#define DN_KERNELS_CPU_MATMUL_H

#include "kernels/cpu/isa.h"
#include "kernels/cpu/threads.h"
#include "kernels/kernels.h"

enum {
    DN_CPU_MATMUL_SCRATCH =
        2 << 20,            /* bytes of dn_cpu_exec.scratch: activations of one pass, kept within the L2 cache */
    DN_CPU_MAX_N_IN = 49152 /* so that 8 rows of activations fit there */
};

/* What a matmul runs on. A device has one. */
struct dn_cpu_exec {
    struct dn_threads *threads;
    enum dn_isa isa;
    void *scratch; /* DN_CPU_MATMUL_SCRATCH bytes, 64-byte aligned */
};

/* Rows of all groups of a matrix. */
static inline uint64_t dn_cpu_rows(const struct dn_matrix *m)
{
    return (uint64_t)m->n_out * (m->n_groups > 1 ? m->n_groups : 1);
}

/* The groups of a matrix as one: they lie one after the other in whole blocks. */
static inline struct dn_matrix dn_cpu_flat(const struct dn_matrix *m)
{
    struct dn_matrix flat = *m;
    flat.n_out = (uint32_t)dn_cpu_rows(m); /* dn_cpu_matrix_bytes(): no more than that */
    flat.n_groups = 0;
    return flat;
}

/* Bytes of m's packed form from its format, sizes and flags: a multiple of 64. 0 if it can't be packed: a size of 0,
 * n_in above DN_CPU_MAX_N_IN, INT8/INT4 with n_in not a multiple of 32, or several groups with more than 2^32 - 1 rows
 * in all or n_out not a multiple of 64 (FP8: 128). For streaming at full speed from memory,
 * m->data should be 64-byte aligned and lie in huge pages (madvise). */
size_t dn_cpu_matrix_bytes(const struct dn_matrix *m);

/* Packs rows [row0, row0 + n) into m->data. -DN_INVALID_VALUE: m can't be packed, rows outside it, not exactly one
 * group of pointers, or FP8 blocks not whole (row0 % 128, or n % 128 short of the end). -DN_NO_MEMORY: no memory for a
 * conversion. */
int dn_cpu_matrix_pack(struct dn_matrix *m, uint32_t row0, uint32_t n, const struct dn_rows *rows);

/* One row as f32: exact for every format. out [n_in]. */
void dn_cpu_matrix_row(const struct dn_matrix *m, uint32_t row, float *out);

/* out[n][n_out] = a[n][n_in] * W^T (+ bias[n_out], NULL for none). out must not overlap a. No groups: dn_cpu_flat(). */
void dn_cpu_matmul(const struct dn_cpu_exec *x, const float *a, size_t n, const struct dn_matrix *w, const float *bias,
                   float *out);

/* Rows of activations times the groups of a matrix, any rows with any group: row i of group g gives
 *   out[i * out_stride + g * out_group_stride + 0..n_out) = W[g] * a[index[i] * a_stride + g * a_group_stride +
 * 0..n_in) Sums are those of dn_cpu_matmul(), bit for bit. */
struct dn_cpu_grouped {
    const struct dn_matrix *w;
    const float *a;
    size_t a_stride, a_group_stride;
    float *out;
    size_t out_stride, out_group_stride;
    const uint32_t
        *start; /* [groups + 1]: rows start[g] <= i < start[g + 1] are those of g; NULL: 0 <= i < n of each */
    const uint32_t *index; /* NULL: index[i] = i */
    uint32_t n;
};
/* `scratch` is dn_cpu_grouped_scratch() bytes, 64-byte aligned. */
size_t dn_cpu_grouped_scratch(const struct dn_cpu_exec *x, const struct dn_matrix *w);
void dn_cpu_matmul_grouped(const struct dn_cpu_exec *x, const struct dn_cpu_grouped *p, void *scratch);

#endif
