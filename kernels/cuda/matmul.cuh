/* What matmul.cu (few tokens) and matmul_large.cu (prefill) have of one another. The pool's thread. */
#ifndef DN_KERNELS_CUDA_MATMUL_CUH
#define DN_KERNELS_CUDA_MATMUL_CUH

#include "kernels/cuda/device.cuh"

/* Where results go; strides in values. */
struct dn_cuda_few_out {
    void *data;
    const float *bias;   /* [group_rows] or NULL */
    uint32_t group_rows; /* outputs of a group */
    uint64_t stride, group_stride;
    bool f32;
};
/* out[t][g] = x[t][g] * W[g]^T + bias. */
struct dn_cuda_few {
    const struct dn_matrix *w;
    const void *x; /* bf16, 16-byte aligned; strides are multiples of 8 values */
    uint64_t x_stride, x_group_stride;
    struct dn_cuda_few_out out;
};
/* For any n, 64 at a time; a row's bits do not depend on n. */
void dn_cuda_few(struct dn_cuda *c, const struct dn_cuda_few *f, uint32_t n);

/* Prefill: unpacks to bf16 and has cuBLASLt multiply. A row's bits do not depend on n. */
void dn_cuda_matmul_large(struct dn_cuda *c, const struct dn_matmul *p, uint32_t n);

#endif
