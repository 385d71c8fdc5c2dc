#include "engine/model.h"

#include "base/buf.h"
#include "engine/gguf.h"
#include "engine/model_impl.h"
#include "engine/safetensors.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* Both files' names of each role. %u is the layer. */
static const struct {
    const char *gguf, *hf;
} NAME[DN_T_ROLES] = {
    [DN_T_EMBED] = {"token_embd.weight", "model.embed_tokens.weight"},
    [DN_T_FINAL_NORM] = {"output_norm.weight", "model.norm.weight"},
    [DN_T_HEAD] = {"output.weight", "lm_head.weight"},
    [DN_T_ROPE_FREQS] = {"rope_freqs.weight", NULL},
    [DN_T_ATTN_NORM] = {"blk.%u.attn_norm.weight", "model.layers.%u.input_layernorm.weight"},
    [DN_T_Q] = {"blk.%u.attn_q.weight", "model.layers.%u.self_attn.q_proj.weight"},
    [DN_T_K] = {"blk.%u.attn_k.weight", "model.layers.%u.self_attn.k_proj.weight"},
    [DN_T_V] = {"blk.%u.attn_v.weight", "model.layers.%u.self_attn.v_proj.weight"},
    [DN_T_Q_BIAS] = {"blk.%u.attn_q.bias", "model.layers.%u.self_attn.q_proj.bias"},
    [DN_T_K_BIAS] = {"blk.%u.attn_k.bias", "model.layers.%u.self_attn.k_proj.bias"},
    [DN_T_V_BIAS] = {"blk.%u.attn_v.bias", "model.layers.%u.self_attn.v_proj.bias"},
    [DN_T_Q_NORM] = {"blk.%u.attn_q_norm.weight", "model.layers.%u.self_attn.q_norm.weight"},
    [DN_T_K_NORM] = {"blk.%u.attn_k_norm.weight", "model.layers.%u.self_attn.k_norm.weight"},
    [DN_T_O] = {"blk.%u.attn_output.weight", "model.layers.%u.self_attn.o_proj.weight"},
    [DN_T_FFN_NORM] = {"blk.%u.ffn_norm.weight", "model.layers.%u.post_attention_layernorm.weight"},
    [DN_T_GATE] = {"blk.%u.ffn_gate.weight", "model.layers.%u.mlp.gate_proj.weight"},
    [DN_T_UP] = {"blk.%u.ffn_up.weight", "model.layers.%u.mlp.up_proj.weight"},
    [DN_T_DOWN] = {"blk.%u.ffn_down.weight", "model.layers.%u.mlp.down_proj.weight"},
};

static const char *const ARCH_NAME[DN_ARCHS] = {"llama", "qwen2", "qwen3"};

const char *dn_arch_name(enum dn_arch a)
{
    return (unsigned)a < DN_ARCHS ? ARCH_NAME[a] : "unknown";
}

int dn_model_parse_arch(const char *name, size_t len, enum dn_arch *out, struct dn_err *err)
{
    for (int a = 0; a < DN_ARCHS; a++) {
        if (strlen(ARCH_NAME[a]) == len && memcmp(ARCH_NAME[a], name, len) == 0) {
            *out = (enum dn_arch)a;
            return 0;
        }
    }
    return dn_err_set(err, DN_MODEL_FILE, "architecture \"%.*s\" is not supported, expected one of llama, qwen2, qwen3",
                      (int)(len < 64 ? len : 64), name);
}

int dn_model_check_hyper(const struct dn_hyper *h, struct dn_err *err)
{
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

/* The shape that a role must have; returns the number of dimensions. */
static uint32_t expected_shape(const struct dn_hyper *h, enum dn_tensor_role role, uint64_t dim[2])
{
    uint64_t q = (uint64_t)h->n_heads * h->head_dim, kv = (uint64_t)h->n_kv_heads * h->head_dim;
    uint64_t shape[DN_T_ROLES][2] = {
        [DN_T_EMBED] = {h->n_vocab, h->dim},
        [DN_T_FINAL_NORM] = {h->dim},
        [DN_T_HEAD] = {h->n_vocab, h->dim},
        [DN_T_ROPE_FREQS] = {h->rotary_dim / 2},
        [DN_T_ATTN_NORM] = {h->dim},
        [DN_T_Q] = {q, h->dim},
        [DN_T_K] = {kv, h->dim},
        [DN_T_V] = {kv, h->dim},
        [DN_T_Q_BIAS] = {q},
        [DN_T_K_BIAS] = {kv},
        [DN_T_V_BIAS] = {kv},
        [DN_T_Q_NORM] = {h->head_dim},
        [DN_T_K_NORM] = {h->head_dim},
        [DN_T_O] = {h->dim, q},
        [DN_T_FFN_NORM] = {h->dim},
        [DN_T_GATE] = {h->ff_dim, h->dim},
        [DN_T_UP] = {h->ff_dim, h->dim},
        [DN_T_DOWN] = {h->dim, h->ff_dim},
    };
    memcpy(dim, shape[role], sizeof shape[role]);
    return shape[role][1] != 0 ? 2 : 1;
}

static int check_tensor(const struct dn_hyper *h, enum dn_tensor_role role, const struct dn_tensor *t,
                        struct dn_err *err)
{
    uint64_t dim[2];
    uint32_t n = expected_shape(h, role, dim);
    char is[200], want[200];
    struct dn_tensor expected = {.n_dims = n, .dim = {dim[0], dim[1]}};
    if (t->n_dims != n || t->dim[0] != dim[0] || (n == 2 && t->dim[1] != dim[1]))
        return dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\": shape %s, expected %s", t->name,
                          dn_tensor_shape_text(t, is, sizeof is), dn_tensor_shape_text(&expected, want, sizeof want));
    bool plain = t->type == DN_TT_F32 || t->type == DN_TT_F16 || t->type == DN_TT_BF16;
    if (n == 1 && !plain)
        return dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\": type %s, expected F32, F16 or BF16", t->name,
                          dn_tensor_type_info(t->type)->name);
    if (!dn_tensor_type_info(t->type)->decodes)
        return dn_err_set(
            err, DN_MODEL_FILE,
            "tensor \"%s\": type %s is not supported, expected F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K or Q6_K", t->name,
            dn_tensor_type_info(t->type)->name);
    return 0;
}

static const struct dn_tensor *find_tensor(const struct dn_model *m, const char *name)
{
    return m->source == DN_MODEL_GGUF ? dn_gguf_find_tensor(m->gguf, name) : dn_safetensors_find(m->safetensors, name);
}

static bool is_needed(const struct dn_hyper *h, enum dn_tensor_role role)
{
    switch (role) {
    case DN_T_HEAD:
        return !h->tied_head;
    case DN_T_ROPE_FREQS:
        return false;
    case DN_T_Q_BIAS:
    case DN_T_K_BIAS:
    case DN_T_V_BIAS:
        return h->qkv_bias;
    case DN_T_Q_NORM:
    case DN_T_K_NORM:
        return h->qk_norm;
    default:
        return true;
    }
}

static bool is_known(const struct dn_hyper *h, enum dn_tensor_role role)
{
    return is_needed(h, role) || role == DN_T_ROPE_FREQS;
}

static int find_role(struct dn_model *m, enum dn_tensor_role role, uint32_t layer, bool *used, struct dn_err *err)
{
    const char *format = m->source == DN_MODEL_GGUF ? NAME[role].gguf : NAME[role].hf;
    if (format == NULL || !is_known(&m->hyper, role))
        return 0;
    char name[128];
    /* The formats are the table's own. */
    snprintf(name, sizeof name, format, (unsigned)layer);
    const struct dn_tensor *t = find_tensor(m, name);
    if (t == NULL)
        return is_needed(&m->hyper, role) ? dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\" is missing", name) : 0;
    int code = check_tensor(&m->hyper, role, t, err);
    if (code != 0)
        return code;
    if (role < DN_T_ATTN_NORM)
        m->global[role] = t;
    else
        m->layer[layer][role - DN_T_ATTN_NORM] = t;
    used[t - (m->source == DN_MODEL_GGUF ? m->gguf->tensor : m->safetensors->tensor)] = true;
    return 0;
}

/* Tensors that some checkpoints carry and that say nothing: tables that we compute, and a tied head's copy. */
static bool is_ignored(const struct dn_model *m, const char *name)
{
    static const char inv_freq[] = ".rotary_emb.inv_freq";
    size_t n = strlen(name), k = sizeof inv_freq - 1;
    if (m->source != DN_MODEL_HF)
        return false;
    return (n > k && strcmp(name + n - k, inv_freq) == 0) ||
           (m->hyper.tied_head && strcmp(name, "lm_head.weight") == 0);
}

static int find_tensors(struct dn_model *m, struct dn_err *err)
{
    const struct dn_tensor *tensor = m->source == DN_MODEL_GGUF ? m->gguf->tensor : m->safetensors->tensor;
    size_t n = m->source == DN_MODEL_GGUF ? m->gguf->n_tensors : m->safetensors->n_tensors;
    bool *used = dn_alloc0(n, sizeof *used);
    m->layer = dn_alloc0(m->hyper.n_layers, sizeof *m->layer);
    int code = 0;
    for (int role = 0; role < DN_T_ATTN_NORM && code == 0; role++)
        code = find_role(m, (enum dn_tensor_role)role, 0, used, err);
    for (uint32_t l = 0; l < m->hyper.n_layers && code == 0; l++)
        for (int role = DN_T_ATTN_NORM; role < DN_T_ROLES && code == 0; role++)
            code = find_role(m, (enum dn_tensor_role)role, l, used, err);
    uint64_t type_bytes[DN_TT_COUNT] = {0};
    enum dn_tensor_type most = DN_TT_F32;
    for (size_t i = 0; i < n && code == 0; i++) {
        if (!used[i] && !is_ignored(m, tensor[i].name))
            code = dn_err_set(err, DN_MODEL_FILE, "tensor \"%.200s\" is not one of a %s model of %" PRIu32 " layers",
                              tensor[i].name, dn_arch_name(m->hyper.arch), m->hyper.n_layers);
        if (!used[i]) {
            m->n_ignored++;
            continue;
        }
        uint64_t values = 1;
        for (uint32_t d = 0; d < tensor[i].n_dims; d++)
            values *= tensor[i].dim[d];
        m->n_params += values;
        m->file_bytes += tensor[i].bytes;
        type_bytes[tensor[i].type] += tensor[i].bytes;
        if (type_bytes[tensor[i].type] > type_bytes[most])
            most = tensor[i].type;
    }
    free(used);
    struct dn_buf text = {0};
    dn_buf_printf(&text, "%s %s", m->source == DN_MODEL_GGUF ? "GGUF" : "safetensors", dn_tensor_type_info(most)->name);
    m->type_text = dn_strdup(dn_buf_str(&text));
    dn_buf_release(&text);
    return code;
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
    m->source = stat(path, &st) == 0 && S_ISDIR(st.st_mode) ? DN_MODEL_HF : DN_MODEL_GGUF;
    int code;
    if (m->source == DN_MODEL_GGUF) {
        code = dn_gguf_open(path, &m->gguf, err); /* puts the path in front itself */
        if (code == 0) {
            code = dn_model_read_gguf(m, err);
            if (code == 0)
                code = find_tensors(m, err);
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
            code = find_tensors(m, err);
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
    free(m->layer);
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

const struct dn_tensor *dn_model_tensor(const struct dn_model *m, enum dn_tensor_role role, uint32_t layer)
{
    DN_BUG_ON(role >= DN_T_ROLES || (role >= DN_T_ATTN_NORM && layer >= m->hyper.n_layers));
    return role < DN_T_ATTN_NORM ? m->global[role] : m->layer[layer][role - DN_T_ATTN_NORM];
}

uint64_t dn_model_kv_bytes(const struct dn_model *m, bool fp8)
{
    const struct dn_hyper *h = &m->hyper;
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

void dn_model_rope_freqs(const struct dn_model *m, double *inv_freq)
{
    const struct dn_hyper *h = &m->hyper;
    const struct dn_tensor *t = m->global[DN_T_ROPE_FREQS];
    for (uint32_t i = 0; i < h->rotary_dim / 2; i++) {
        inv_freq[i] = pow(h->rope_theta, -2.0 * i / h->rotary_dim);
        if (h->rope_llama3)
            inv_freq[i] = scale_llama3(h, inv_freq[i]);
    }
    if (t == NULL)
        return;
    float *divisor = dn_alloc0(h->rotary_dim / 2, sizeof *divisor);
    dn_tensor_row_f32(t->type, t->data, h->rotary_dim / 2, divisor);
    for (uint32_t i = 0; i < h->rotary_dim / 2; i++)
        inv_freq[i] /= (double)divisor[i];
    free(divisor);
}
