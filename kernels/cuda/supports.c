#include "kernels/cuda/supports.h"

#include <inttypes.h>

static int refuse(struct dn_err *err, const char *what, uint32_t value, const char *expected)
{
    return dn_err_set(err, DN_CONFIG, "%s %" PRIu32 ": the CUDA backend expects %s", what, value, expected);
}

static int check_mla(const struct dn_step_limits *limits, const struct dn_model_sizes *m, struct dn_err *err)
{
    if (m->rope_dim != DN_CUDA_MLA_ROPE)
        return refuse(err, "the model's rope dimension (qk_rope_head_dim) of", m->rope_dim, "64");
    if (m->latent_dim % 64 != 0 || m->latent_dim > DN_CUDA_MLA_LATENT)
        return refuse(err, "the model's latent (kv_lora_rank) of", m->latent_dim, "64, 128, 192, ... or 512");
    uint64_t items = (uint64_t)limits->seqs * ((m->n_heads + 63) / 64);
    if (items > DN_CUDA_MLA_ITEMS)
        return dn_err_set(err, DN_CONFIG,
                          "engine.max_sequences %" PRIu32 " with %" PRIu32
                          " heads: the CUDA backend expects sequences times heads / 64 up to %d",
                          limits->seqs, m->n_heads, DN_CUDA_MLA_ITEMS);
    return 0;
}

int dn_cuda_supports(const struct dn_step_limits *limits, const struct dn_model_sizes *m, struct dn_err *err)
{
    if (m->n_heads > DN_CUDA_MAX_HEADS)
        return refuse(err, "the model's number of heads,", m->n_heads, "at most 65535");
    if (m->latent_dim != 0)
        return check_mla(limits, m, err);
    if (m->head_dim % 16 != 0 || m->head_dim > DN_CUDA_MAX_HEAD)
        return refuse(err, "the model's head dimension of", m->head_dim, "16, 32, 48, ... or 256");
    if (m->rotary_dim > m->head_dim)
        return refuse(err, "the model's rotary dimension of", m->rotary_dim, "no more than its head dimension");
    return 0;
}
