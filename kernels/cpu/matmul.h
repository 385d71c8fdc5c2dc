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

/* Bytes of m's packed form from its format, sizes and flags: a multiple of 64. 0 if it can't be packed: a size of 0,
 * n_in above DN_CPU_MAX_N_IN, or INT8/INT4 with n_in not a multiple of 32. For streaming at full speed from memory,
 * m->data should be 64-byte aligned and lie in huge pages (madvise). */
size_t dn_cpu_matrix_bytes(const struct dn_matrix *m);

/* Packs rows [row0, row0 + n) into m->data. -DN_INVALID_VALUE: m can't be packed, rows outside it, not exactly one
 * group of pointers, or FP8 blocks not whole (row0 % 128, or n % 128 short of the end). -DN_NO_MEMORY: no memory for a
 * conversion. */
int dn_cpu_matrix_pack(struct dn_matrix *m, uint32_t row0, uint32_t n, const struct dn_rows *rows);

/* One row as f32: exact for every format. out [n_in]. */
void dn_cpu_matrix_row(const struct dn_matrix *m, uint32_t row, float *out);

/* out[n][n_out] = a[n][n_in] * W^T (+ bias[n_out], NULL for none). out must not overlap a. */
void dn_cpu_matmul(const struct dn_cpu_exec *x, const float *a, size_t n, const struct dn_matrix *w, const float *bias,
                   float *out);

#endif
