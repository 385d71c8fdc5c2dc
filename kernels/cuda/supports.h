/* Which models the CUDA backend's operations are made for: known before a device is open or a weight is loaded.
 *
 * For: dn_backend.supports; plain C, so that a test needs no GPU. load.cu holds the numbers to those of the kernels.
 * Any thread.
 */
#ifndef DN_KERNELS_CUDA_SUPPORTS_H
#define DN_KERNELS_CUDA_SUPPORTS_H

#include "kernels/kernels.h"

enum {
    DN_CUDA_PAGE_TOKENS = 64,
    DN_CUDA_MLA_ROPE = 64,     /* the only one */
    DN_CUDA_MLA_LATENT = 512,  /* the largest; a multiple of 64 */
    DN_CUDA_MLA_ITEMS = 65536, /* sequences of a step times 64 heads */
    DN_CUDA_MAX_HEAD = 256,    /* without MLA; a multiple of 16 */
    DN_CUDA_MAX_HEADS = 65535, /* blocks of a grid in y */
};

int dn_cuda_supports(const struct dn_step_limits *limits, const struct dn_model_sizes *m, struct dn_err *err);

#endif
