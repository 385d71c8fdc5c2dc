#include "engine/model.h"

#include "base/buf.h"
#include "engine/gguf.h"
#include "engine/model_impl.h"
#include "engine/safetensors.h"
#include "engine/synthetic.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

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

void dn_model_add_eos(struct dn_model *m, int64_t id)
{
    if (id < 0 || id >= DN_MODEL_MAX_VOCAB || m->n_eos == DN_MODEL_MAX_EOS)
        return;
    for (size_t i = 0; i < m->n_eos; i++)
        if (m->eos_id[i] == id)
            return;
    m->eos_id[m->n_eos++] = (int32_t)id;
}

int dn_model_take_template(struct dn_model *m, char *text, size_t len, const char *from, struct dn_err *err)
{
    if (memchr(text, '\0', len) != NULL) {
        free(text);
        return dn_err_set(err, DN_MODEL_FILE, "%s: has a NUL in it", from);
    }
    free(m->chat_template);
    m->chat_template = text;
    m->chat_template_len = len;
    m->chat_template_from = from;
    return 0;
}

static char *name_from_path(const char *path)
{
    size_t n = strlen(path);
    while (n > 1 && path[n - 1] == '/')
        n--;
    size_t begin = n;
    while (begin > 0 && path[begin - 1] != '/')
        begin--;
    if ((n - begin == 1 && path[begin] == '.') || (n - begin == 2 && memcmp(path + begin, "..", 2) == 0)) {
        char *whole = realpath(path, NULL);
        char *name = whole != NULL && strlen(whole) > 1 ? name_from_path(whole) : dn_strdup("model");
        free(whole);
        return name;
    }
    if (n - begin > 5 && memcmp(path + n - 5, ".gguf", 5) == 0)
        n -= 5;
    return n > begin ? dn_strndup(path + begin, n - begin) : dn_strdup("model");
}

static int open_hf_tensors(struct dn_model *m, struct dn_err *err)
{
    struct dn_buf path = {0};
    dn_buf_printf(&path, "%s/model.safetensors.index.json", m->path);
    int code;
    if (access(dn_buf_str(&path), F_OK) == 0) {
        code = dn_safetensors_open_index(dn_buf_str(&path), &m->safetensors, err);
    } else {
        dn_buf_clear(&path);
        dn_buf_printf(&path, "%s/model.safetensors", m->path);
        code = dn_safetensors_open(dn_buf_str(&path), &m->safetensors, err);
    }
    dn_buf_release(&path);
    return code;
}

static int check_ids(const struct dn_model *m, struct dn_err *err)
{
    for (size_t i = 0; i < m->n_eos; i++)
        if ((uint32_t)m->eos_id[i] >= m->hyper.n_vocab)
            return dn_err_set(err, DN_MODEL_FILE, "end-of-text id %" PRId32 " outside the vocabulary of %" PRIu32,
                              m->eos_id[i], m->hyper.n_vocab);
    if (m->bos_id >= 0 && (uint32_t)m->bos_id >= m->hyper.n_vocab)
        return dn_err_set(err, DN_MODEL_FILE, "begin-of-text id %" PRId32 " outside the vocabulary of %" PRIu32,
                          m->bos_id, m->hyper.n_vocab);
    return 0;
}

int dn_model_open(const char *path, struct dn_model **out, struct dn_err *err)
{
    struct stat st;
    struct dn_model *m = dn_alloc0(1, sizeof *m);
    m->path = dn_strdup(path);
    m->name = name_from_path(path);
    m->bos_id = -1;
    m->prefix = "";
    m->source = stat(path, &st) == 0 && S_ISDIR(st.st_mode) ? DN_MODEL_HF : DN_MODEL_GGUF;
    int code;
    if (m->source == DN_MODEL_GGUF) {
        code = dn_gguf_open(path, &m->gguf, err); /* puts the path in front itself */
        if (code == 0) {
            code = dn_model_read_gguf(m, err);
            if (code == 0)
                code = dn_model_find_tensors(m, err);
            if (code == 0)
                code = check_ids(m, err);
            if (code != 0)
                dn_err_prefix(err, "%s", path);
        }
    } else {
        code = dn_model_read_hf(m, err);
        if (code == 0)
            code = open_hf_tensors(m, err);
        if (code == 0) {
            code = dn_model_find_tensors(m, err);
            if (code == 0)
                code = check_ids(m, err);
            if (code != 0)
                dn_err_prefix(err, "%s", path);
        }
    }
    if (code != 0) {
        dn_model_close(m);
        return code;
    }
    if (m->title == NULL)
        m->title = dn_strdup(m->name);
    *out = m;
    return 0;
}

void dn_model_close(struct dn_model *m)
{
    if (m == NULL)
        return;
    dn_gguf_close(m->gguf);
    dn_safetensors_close(m->safetensors);
    dn_synthetic_release(m->synthetic);
    free(m->layer);
    for (uint32_t l = 0; m->expert != NULL && l < m->hyper.n_layers; l++)
        free(m->expert[l]);
    free(m->expert);
    free(m->note);
    free(m->path);
    free(m->name);
    free(m->title);
    free(m->type_text);
    free(m->tokenizer_json);
    free(m->tokenizer_tiktoken);
    free(m->tokenizer_config);
    free(m->chat_template);
    free(m);
}

struct dn_linear dn_model_linear(const struct dn_model *m, enum dn_tensor_role role, uint32_t layer)
{
    DN_BUG_ON(role >= DN_T_ROLES || (role >= DN_T_ATTN_NORM && layer >= m->hyper.n_layers));
    return role < DN_T_ATTN_NORM ? m->global[role] : m->layer[layer][role - DN_T_ATTN_NORM];
}

const struct dn_tensor *dn_model_tensor(const struct dn_model *m, enum dn_tensor_role role, uint32_t layer)
{
    return dn_model_linear(m, role, layer).values;
}

struct dn_linear dn_model_expert(const struct dn_model *m, uint32_t layer, uint32_t expert, enum dn_expert_part part)
{
    DN_BUG_ON(layer >= m->hyper.n_layers || m->expert[layer] == NULL || expert >= m->hyper.n_experts);
    return m->expert[layer][expert][part];
}

uint64_t dn_model_kv_bytes(const struct dn_model *m, bool fp8)
{
    const struct dn_hyper *h = &m->hyper;
    if (h->latent_dim > 0) /* one latent and one rope key a token and layer; in FP8 the rope key stays bf16 */
        return h->n_layers * (fp8 ? h->latent_dim + sizeof(float) + 2 * (uint64_t)h->rope_dim
                                  : 2 * ((uint64_t)h->latent_dim + h->rope_dim));
    return (uint64_t)h->n_layers * 2 * h->n_kv_heads * (fp8 ? h->head_dim + sizeof(float) : 2 * (uint64_t)h->head_dim);
}

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

static double yarn_magnitude(double factor, double mscale)
{
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

double dn_model_rope_magnitude(const struct dn_hyper *h)
{
    if (!h->rope_yarn)
        return 1;
    if (h->rope_mscale == 0 || h->rope_mscale_all_dim == 0)
        return yarn_magnitude(h->rope_factor, 1);
    return yarn_magnitude(h->rope_factor, h->rope_mscale) / yarn_magnitude(h->rope_factor, h->rope_mscale_all_dim);
}

/* DeepSeek-V3 puts YaRN's temperature into the scale, squared, for the rotated and the other dimensions alike. */
double dn_model_attention_scale(const struct dn_hyper *h)
{
    double m = h->rope_yarn ? yarn_magnitude(h->rope_factor, h->rope_mscale_all_dim) : 1;
    return m * m / sqrt(h->head_dim);
}

void dn_model_rope_freqs(const struct dn_model *m, double *inv_freq)
{
    const struct dn_hyper *h = &m->hyper;
    const struct dn_tensor *t = m->global[DN_T_ROPE_FREQS].values;
    for (uint32_t i = 0; i < h->rotary_dim / 2; i++) {
        inv_freq[i] = pow(h->rope_theta, -2.0 * i / h->rotary_dim);
        if (h->rope_llama3)
            inv_freq[i] = scale_llama3(h, inv_freq[i]);
        if (h->rope_yarn)
            inv_freq[i] = scale_yarn(h, i, inv_freq[i]);
    }
    if (t == NULL)
        return;
    float *divisor = dn_alloc0(h->rotary_dim / 2, sizeof *divisor);
    dn_tensor_row_f32(t->type, t->data, h->rotary_dim / 2, divisor);
    for (uint32_t i = 0; i < h->rotary_dim / 2; i++)
        inv_freq[i] /= (double)divisor[i];
    free(divisor);
}
