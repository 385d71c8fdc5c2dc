#include "engine/hyper.h"

#include "base/err.h"
#include "engine/model_impl.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

static const char *const ARCH_NAME[DN_ARCHS] = {"llama", "qwen2", "qwen3", "kimi_k2"};

const char *dn_arch_name(enum dn_arch a)
{
    return (unsigned)a < DN_ARCHS ? ARCH_NAME[a] : "unknown";
}

int dn_model_parse_arch(const char *name, size_t len, enum dn_model_source source, enum dn_arch *out,
                        struct dn_err *err)
{
    static const struct {
        const char *name;
        enum dn_arch arch;
        bool gguf;
    } known[] = {{"llama", DN_ARCH_LLAMA, true},       {"qwen2", DN_ARCH_QWEN2, true},
                 {"qwen3", DN_ARCH_QWEN3, true},       {"kimi_k2", DN_ARCH_KIMI, false},
                 {"deepseek_v3", DN_ARCH_KIMI, false}, {"kimi_k25", DN_ARCH_KIMI, false}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        if (strlen(known[i].name) == len && memcmp(known[i].name, name, len) == 0 &&
            (known[i].gguf || source == DN_MODEL_HF)) {
            *out = known[i].arch;
            return 0;
        }
    }
    return dn_err_set(
        err, DN_MODEL_FILE, "architecture \"%.*s\" is not supported, expected one of llama, qwen2, qwen3%s",
        (int)(len < 64 ? len : 64), name, source == DN_MODEL_HF ? ", kimi_k2, kimi_k25, deepseek_v3" : "");
}

static int check_mla(const struct dn_hyper *h, struct dn_err *err)
{
    if (h->rope_dim % 2 != 0)
        return dn_err_set(err, DN_MODEL_FILE, "rotary keys of %" PRIu32 " values, expected an even number",
                          h->rope_dim);
    if (h->n_experts == 0)
        return 0;
    if (h->top_experts > h->n_experts || h->top_experts > DN_MODEL_MAX_TOP_EXPERTS)
        return dn_err_set(err, DN_MODEL_FILE, "%" PRIu32 " of %" PRIu32 " experts a token, expected at most %d of them",
                          h->top_experts, h->n_experts, DN_MODEL_MAX_TOP_EXPERTS);
    if (h->n_experts % h->expert_groups != 0 || h->top_groups > h->expert_groups)
        return dn_err_set(err, DN_MODEL_FILE,
                          "%" PRIu32 " experts in %" PRIu32 " groups of which %" PRIu32
                          " are taken, expected equal groups",
                          h->n_experts, h->expert_groups, h->top_groups);
    uint32_t in_group = h->n_experts / h->expert_groups;
    if (h->top_experts > h->top_groups * in_group || (h->expert_groups > 1 && in_group < 2))
        return dn_err_set(err, DN_MODEL_FILE,
                          "%" PRIu32 " experts a token from %" PRIu32 " groups of %" PRIu32
                          ", expected groups of at least 2 that hold as many",
                          h->top_experts, h->top_groups, in_group);
    return 0;
}

int dn_model_check_hyper(const struct dn_hyper *h, struct dn_err *err)
{
    if (h->latent_dim > 0)
        return check_mla(h, err);
    if (h->n_kv_heads > h->n_heads || h->n_heads % h->n_kv_heads != 0)
        return dn_err_set(err, DN_MODEL_FILE, "%" PRIu32 " heads over %" PRIu32 " KV heads, expected a multiple",
                          h->n_heads, h->n_kv_heads);
    if (h->head_dim == 0 || h->head_dim % 2 != 0)
        return dn_err_set(err, DN_MODEL_FILE, "heads of %" PRIu32 " values, expected an even number", h->head_dim);
    if (h->rotary_dim != h->head_dim)
        return dn_err_set(err, DN_MODEL_FILE,
                          "rotary embedding of %" PRIu32 " of %" PRIu32 " values a head, expected all of them",
                          h->rotary_dim, h->head_dim);
    return 0;
}

struct dn_model_sizes dn_hyper_sizes(const struct dn_hyper *h)
{
    return (struct dn_model_sizes){.n_heads = h->n_heads,
                                   .n_kv_heads = h->n_kv_heads,
                                   .head_dim = h->head_dim,
                                   .rotary_dim = h->rotary_dim,
                                   .latent_dim = h->latent_dim,
                                   .nope_dim = h->nope_dim,
                                   .rope_dim = h->rope_dim,
                                   .v_dim = h->v_dim};
}

bool dn_hyper_has_experts(const struct dn_hyper *h, uint32_t layer)
{
    return h->n_experts > 0 && layer >= h->n_dense_layers && layer % h->moe_every == 0;
}

/* ---- Rotary embedding -------------------------------------------------------------------------------------------- */

/* Llama 3.1: long waves are slowed by `factor`, short ones stay, those between are blended. */
static double scale_llama3(const struct dn_hyper *h, double inv_freq)
{
    double wave = 2 * M_PI / inv_freq;
    if (wave < h->rope_original / h->rope_high)
        return inv_freq;
    if (wave > h->rope_original / h->rope_low)
        return inv_freq / h->rope_factor;
    double blend = (h->rope_original / wave - h->rope_low) / (h->rope_high - h->rope_low);
    return (1 - blend) * inv_freq / h->rope_factor + blend * inv_freq;
}

/* The index of the frequency that turns `turns` times over the trained context: not an integer. */
static double yarn_index(const struct dn_hyper *h, double turns)
{
    return h->rotary_dim * log(h->rope_original / (turns * 2 * M_PI)) / (2 * log(h->rope_theta));
}

/* YaRN: frequencies of many turns stay, those of few are slowed by `factor`, those between are blended. */
static double scale_yarn(const struct dn_hyper *h, uint32_t i, double inv_freq)
{
    double low = floor(yarn_index(h, h->rope_beta_fast)), high = ceil(yarn_index(h, h->rope_beta_slow));
    low = low < 0 ? 0 : low;
    high = high > h->rotary_dim - 1 ? h->rotary_dim - 1 : high;
    high = low == high ? high + 0.001 : high;
    double ramp = (i - low) / (high - low);
    ramp = ramp < 0 ? 0 : ramp > 1 ? 1 : ramp;
    return inv_freq * (1 - ramp) + inv_freq / h->rope_factor * ramp;
}

double dn_hyper_rope_freq(const struct dn_hyper *h, uint32_t i)
{
    double inv_freq = pow(h->rope_theta, -2.0 * i / h->rotary_dim);
    if (h->rope_llama3)
        return scale_llama3(h, inv_freq);
    return h->rope_yarn ? scale_yarn(h, i, inv_freq) : inv_freq;
}

static double yarn_magnitude(double factor, double mscale)
{
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

double dn_hyper_rope_magnitude(const struct dn_hyper *h)
{
    if (!h->rope_yarn)
        return 1;
    if (h->rope_mscale == 0 || h->rope_mscale_all_dim == 0)
        return yarn_magnitude(h->rope_factor, 1);
    return yarn_magnitude(h->rope_factor, h->rope_mscale) / yarn_magnitude(h->rope_factor, h->rope_mscale_all_dim);
}

/* DeepSeek-V3 puts YaRN's temperature into the scale, squared, for the rotated and the other dimensions alike. */
double dn_hyper_attention_scale(const struct dn_hyper *h)
{
    double m = h->rope_yarn ? yarn_magnitude(h->rope_factor, h->rope_mscale_all_dim) : 1;
    return m * m / sqrt(h->head_dim);
}
