/* Operations that this version does not have yet: calling one ends the device with its name. */
#include "kernels/cuda/device.cuh"

#define MISSING(op, params)                                                                                            \
    __attribute__((weak)) void dn_cuda_##op(struct dn_device *d, const struct params *p)                               \
    {                                                                                                                  \
        dn_cuda_failed(dn_cuda(d), cudaErrorNotSupported, #op);                                                        \
    }

MISSING(embed, dn_embed)
MISSING(rmsnorm, dn_rmsnorm)
MISSING(norm_act, dn_norm_act)
MISSING(silu_mul, dn_silu_mul)
MISSING(check_tags, dn_check_tags)
MISSING(route, dn_route)
MISSING(qkv_write, dn_qkv_write)
MISSING(attention, dn_attention)
MISSING(mla_write, dn_mla_write)
MISSING(mla_attention, dn_mla_attention)
MISSING(mla_prefill, dn_mla_prefill)
MISSING(sample_rows, dn_sample_rows)
MISSING(matmul, dn_matmul)
MISSING(group_matmul, dn_group_matmul)
MISSING(experts, dn_experts)

__attribute__((weak)) void dn_cuda_slot_fill(struct dn_device *d, int32_t slot, const int32_t *prompt_id, size_t n)
{
    dn_cuda_failed(dn_cuda(d), cudaErrorNotSupported, "slot_fill");
}

__attribute__((weak)) size_t dn_cuda_matrix_bytes(const struct dn_matrix *m)
{
    return 0;
}

__attribute__((weak)) int dn_cuda_matrix_pack(struct dn_device *d, struct dn_matrix *m, uint32_t row0, uint32_t n,
                                              const struct dn_rows *rows)
{
    return -DN_INTERNAL;
}
