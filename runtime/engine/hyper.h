/* The numbers that say what a model computes, and what follows from them alone.
 *
 * For: model.h, which reads them from files; the forward passes and `dunlin show`. Plain data: any thread.
 */
#ifndef DN_ENGINE_HYPER_H
#define DN_ENGINE_HYPER_H

#include "kernels/kernels.h"

#include <stdbool.h>
#include <stdint.h>

enum {
    DN_MODEL_MAX_LAYERS = 1024,
    DN_MODEL_MAX_EOS = 16,
    DN_MODEL_MAX_VOCAB = 1 << 21,
    DN_MODEL_MAX_EXPERTS = 1024, /* as kernels.h has them */
    DN_MODEL_MAX_TOP_EXPERTS = 16
};

/* KIMI is the graph of DeepSeek-V3 and Kimi K2 (MLA, experts); config.json calls it kimi_k2, kimi_k25 or deepseek_v3.
 */
enum dn_arch { DN_ARCH_LLAMA, DN_ARCH_QWEN2, DN_ARCH_QWEN3, DN_ARCH_KIMI, DN_ARCHS };
const char *dn_arch_name(enum dn_arch a); /* "llama" "qwen2" "qwen3" "kimi_k2" */

struct dn_hyper {
    enum dn_arch arch;
    uint32_t n_layers, dim, ff_dim, n_heads, n_kv_heads, head_dim, n_vocab;
    uint32_t context_tokens; /* what the model was trained for */
    uint32_t rotary_dim;
    bool rope_interleaved; /* GGUF of arch llama: its converter permutes the rows of q and k */
    bool qkv_bias, qk_norm, tied_head;
    float norm_eps;
    double rope_theta;
    bool rope_llama3; /* scaled as Llama 3.1 does, by the four numbers below (config.json) */
    double rope_factor, rope_low, rope_high, rope_original;
    bool rope_yarn; /* YaRN (arXiv 2309.00071) as DeepSeek-V3 has it, by rope_factor, rope_original and these */
    double rope_beta_fast, rope_beta_slow, rope_mscale, rope_mscale_all_dim; /* mscales: 0 = not given */

    /* MLA: latent_dim is 0 without it. With it head_dim is nope_dim + rope_dim, rotary_dim is rope_dim, n_kv_heads 1 */
    uint32_t q_lora_dim; /* 0: one q_proj (Moonlight) */
    uint32_t latent_dim, nope_dim, rope_dim, v_dim;

    /* Experts: n_experts is 0 without them. A layer has them from n_dense_layers on, if moe_every divides its index. */
    uint32_t n_experts, top_experts, expert_groups, top_groups, expert_ff;
    uint32_t shared_ff; /* of all shared experts together, 0 = none */
    uint32_t n_dense_layers, moe_every;
    bool normalise_experts;
    float expert_scale;
};

/* Whether a layer has experts instead of one feed-forward network. */
bool dn_hyper_has_experts(const struct dn_hyper *h, uint32_t layer);

/* What a backend is asked whether it supports. */
struct dn_model_sizes dn_hyper_sizes(const struct dn_hyper *h);

/* The inverse frequency of rotary pair i, scaling included; what cos and sin are multiplied by (1 but for unusual
 * YaRN); the factor on the logits of attention. */
double dn_hyper_rope_freq(const struct dn_hyper *h, uint32_t i);
double dn_hyper_rope_magnitude(const struct dn_hyper *h);
double dn_hyper_attention_scale(const struct dn_hyper *h);

#endif
