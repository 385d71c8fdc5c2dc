#include "engine/model_impl.h"

#include "base/buf.h"
#include "engine/safetensors.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FP8_BLOCK = 128, INT4_GROUP = 32, NIBBLES = 8, MAX_MODULE = 160, MAX_NAME = MAX_MODULE + 64 };

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
    [DN_T_Q_A] = {NULL, "model.layers.%u.self_attn.q_a_proj.weight"},
    [DN_T_Q_A_NORM] = {NULL, "model.layers.%u.self_attn.q_a_layernorm.weight"},
    [DN_T_Q_B] = {NULL, "model.layers.%u.self_attn.q_b_proj.weight"},
    [DN_T_KV_A] = {NULL, "model.layers.%u.self_attn.kv_a_proj_with_mqa.weight"},
    [DN_T_KV_A_NORM] = {NULL, "model.layers.%u.self_attn.kv_a_layernorm.weight"},
    [DN_T_KV_B] = {NULL, "model.layers.%u.self_attn.kv_b_proj.weight"},
    [DN_T_ROUTER] = {NULL, "model.layers.%u.mlp.gate.weight"},
    [DN_T_ROUTER_BIAS] = {NULL, "model.layers.%u.mlp.gate.e_score_correction_bias"},
    [DN_T_SHARED_GATE] = {NULL, "model.layers.%u.mlp.shared_experts.gate_proj.weight"},
    [DN_T_SHARED_UP] = {NULL, "model.layers.%u.mlp.shared_experts.up_proj.weight"},
    [DN_T_SHARED_DOWN] = {NULL, "model.layers.%u.mlp.shared_experts.down_proj.weight"},
};
static const char *const EXPERT_NAME[DN_EXPERT_PARTS] = {"gate_proj", "up_proj", "down_proj"};

/* ---- What a model must have -------------------------------------------------------------------------------------- */

uint32_t dn_model_expected_shape(const struct dn_hyper *h, enum dn_tensor_role role, uint64_t dim[2])
{
    uint64_t q = (uint64_t)h->n_heads * h->head_dim, kv = (uint64_t)h->n_kv_heads * h->head_dim;
    uint64_t o = h->latent_dim > 0 ? (uint64_t)h->n_heads * h->v_dim : q;
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
        [DN_T_O] = {h->dim, o},
        [DN_T_FFN_NORM] = {h->dim},
        [DN_T_GATE] = {h->ff_dim, h->dim},
        [DN_T_UP] = {h->ff_dim, h->dim},
        [DN_T_DOWN] = {h->dim, h->ff_dim},
        [DN_T_Q_A] = {h->q_lora_dim, h->dim},
        [DN_T_Q_A_NORM] = {h->q_lora_dim},
        [DN_T_Q_B] = {q, h->q_lora_dim},
        [DN_T_KV_A] = {(uint64_t)h->latent_dim + h->rope_dim, h->dim},
        [DN_T_KV_A_NORM] = {h->latent_dim},
        [DN_T_KV_B] = {(uint64_t)h->n_heads * (h->nope_dim + h->v_dim), h->latent_dim},
        [DN_T_ROUTER] = {h->n_experts, h->dim},
        [DN_T_ROUTER_BIAS] = {h->n_experts},
        [DN_T_SHARED_GATE] = {h->shared_ff, h->dim},
        [DN_T_SHARED_UP] = {h->shared_ff, h->dim},
        [DN_T_SHARED_DOWN] = {h->dim, h->shared_ff},
    };
    memcpy(dim, shape[role], sizeof shape[role]);
    return shape[role][1] != 0 ? 2 : 1;
}

bool dn_model_needs(const struct dn_hyper *h, enum dn_tensor_role role, uint32_t layer)
{
    bool mla = h->latent_dim > 0, has_experts = role >= DN_T_ATTN_NORM && dn_hyper_has_experts(h, layer);
    switch (role) {
    case DN_T_HEAD:
        return !h->tied_head;
    case DN_T_ROPE_FREQS:
        return false;
    case DN_T_Q:
        return !mla || h->q_lora_dim == 0;
    case DN_T_K:
    case DN_T_V:
        return !mla;
    case DN_T_Q_BIAS:
    case DN_T_K_BIAS:
    case DN_T_V_BIAS:
        return h->qkv_bias;
    case DN_T_Q_NORM:
    case DN_T_K_NORM:
        return h->qk_norm;
    case DN_T_Q_A:
    case DN_T_Q_A_NORM:
    case DN_T_Q_B:
        return mla && h->q_lora_dim > 0;
    case DN_T_KV_A:
    case DN_T_KV_A_NORM:
    case DN_T_KV_B:
        return mla;
    case DN_T_GATE:
    case DN_T_UP:
    case DN_T_DOWN:
        return !has_experts;
    case DN_T_ROUTER:
    case DN_T_ROUTER_BIAS:
        return has_experts;
    case DN_T_SHARED_GATE:
    case DN_T_SHARED_UP:
    case DN_T_SHARED_DOWN:
        return has_experts && h->shared_ff > 0;
    default:
        return true;
    }
}

bool dn_model_may_be_quantised(const struct dn_model *m, enum dn_tensor_role role)
{
    uint64_t dim[2];
    return m->hyper.arch == DN_ARCH_KIMI && role >= DN_T_ATTN_NORM && role != DN_T_ROUTER &&
           dn_model_expected_shape(&m->hyper, role, dim) == 2;
}

/* ---- Finding ----------------------------------------------------------------------------------------------------- */

struct finder {
    struct dn_model *m;
    const struct dn_tensor *tensor;
    size_t n;
    bool *used; /* [n] */
};

static const struct dn_tensor *find_tensor(const struct finder *f, const char *name)
{
    const struct dn_model *m = f->m;
    return m->source == DN_MODEL_GGUF ? dn_gguf_find_tensor(m->gguf, name) : dn_safetensors_find(m->safetensors, name);
}

static const char *type_name(const struct dn_tensor *t)
{
    return dn_tensor_type_info(t->type)->name;
}

static int check_shape(const struct dn_tensor *t, uint32_t n, const uint64_t *dim, struct dn_err *err)
{
    char is[200], want[200];
    struct dn_tensor expected = {.n_dims = n, .dim = {dim[0], n == 2 ? dim[1] : 0}};
    if (t->n_dims == n && t->dim[0] == dim[0] && (n == 1 || t->dim[1] == dim[1]))
        return 0;
    return dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\": shape %s, expected %s", t->name,
                      dn_tensor_shape_text(t, is, sizeof is), dn_tensor_shape_text(&expected, want, sizeof want));
}

static bool is_plain(const struct dn_tensor *t)
{
    return t->type == DN_TT_F32 || t->type == DN_TT_F16 || t->type == DN_TT_BF16;
}

static int check_type(const struct dn_model *m, const struct dn_tensor *t, enum dn_tensor_role role, uint32_t n_dims,
                      struct dn_err *err)
{
    if (role == DN_T_ROUTER_BIAS && t->type != DN_TT_F32)
        return dn_err_set(err, DN_MODEL_FILE,
                          "tensor \"%s\": type %s, expected F32 (in 16 bits its small differences are lost, and other "
                          "experts are chosen)",
                          t->name, type_name(t));
    if ((n_dims == 1 || m->hyper.arch == DN_ARCH_KIMI) && !is_plain(t))
        return dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\": type %s, expected F32, F16 or BF16", t->name,
                          type_name(t));
    if (!dn_tensor_type_info(t->type)->decodes)
        return dn_err_set(
            err, DN_MODEL_FILE,
            "tensor \"%s\": type %s is not supported, expected F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K or Q6_K", t->name,
            type_name(t));
    return 0;
}

/* A tensor `module` + `suffix` of this type and shape. */
static int find_part(struct finder *f, const char *module, const char *suffix, enum dn_tensor_type type,
                     const uint64_t dim[2], const struct dn_tensor **out, struct dn_err *err)
{
    char name[MAX_NAME];
    snprintf(name, sizeof name, "%s.%s", module, suffix);
    const struct dn_tensor *t = find_tensor(f, name);
    if (t == NULL)
        return dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\" is missing", name);
    if (t->type != type)
        return dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\": type %s, expected %s", name, type_name(t),
                          dn_tensor_type_info(type)->name);
    f->used[t - f->tensor] = true;
    *out = t;
    return check_shape(t, 2, dim, err);
}

/* weight_shape holds the matrix's own shape: I32 in published files, I64 as the library writes it. */
static int check_weight_shape(struct finder *f, const char *module, const struct dn_linear *l, struct dn_err *err)
{
    char name[MAX_NAME];
    snprintf(name, sizeof name, "%s.weight_shape", module);
    const struct dn_tensor *t = find_tensor(f, name);
    if (t == NULL)
        return dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\" is missing", name);
    if (t->type != DN_TT_I32 && t->type != DN_TT_I64)
        return dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\": type %s, expected I32", name, type_name(t));
    int code = check_shape(t, 1, (uint64_t[]){2}, err);
    if (code != 0)
        return code;
    int64_t v[2];
    for (int i = 0; i < 2; i++) {
        int32_t v32;
        if (t->type == DN_TT_I64) {
            memcpy(&v[i], t->data + 8 * i, 8);
        } else {
            memcpy(&v32, t->data + 4 * i, 4);
            v[i] = v32;
        }
    }
    f->used[t - f->tensor] = true;
    if (v[0] != (int64_t)l->n_out || v[1] != (int64_t)l->n_in)
        return dn_err_set(err, DN_MODEL_FILE,
                          "tensor \"%s\": says [%" PRId64 "][%" PRId64 "], expected [%" PRIu64 "][%" PRIu64 "]", name,
                          v[0], v[1], l->n_out, l->n_in);
    return 0;
}

static int find_int4(struct finder *f, const char *module, struct dn_linear *l, struct dn_err *err)
{
    static const char *const unknown[] = {"weight_zero_point", "weight_g_idx"};
    char name[MAX_NAME];
    for (size_t i = 0; i < sizeof unknown / sizeof *unknown; i++) {
        snprintf(name, sizeof name, "%s.%s", module, unknown[i]);
        if (find_tensor(f, name) != NULL)
            return dn_err_set(err, DN_MODEL_FILE,
                              "tensor \"%s\" is not supported: INT4 is expected to be symmetric and without act-order",
                              name);
    }
    if (l->n_in % INT4_GROUP != 0)
        return dn_err_set(err, DN_MODEL_FILE,
                          "tensor \"%s.weight_packed\": rows of %" PRIu64 " values, expected a multiple of %d", module,
                          l->n_in, INT4_GROUP);
    int code =
        find_part(f, module, "weight_packed", DN_TT_I32, (uint64_t[]){l->n_out, l->n_in / NIBBLES}, &l->values, err);
    if (code == 0)
        code = find_part(f, module, "weight_scale", DN_TT_BF16, (uint64_t[]){l->n_out, l->n_in / INT4_GROUP}, &l->scale,
                         err);
    return code == 0 ? check_weight_shape(f, module, l, err) : code;
}

/* A matrix in whichever of the three forms the checkpoint has it. `name` ends with ".weight". */
static int find_linear(struct finder *f, const char *name, struct dn_linear *l, struct dn_err *err)
{
    char module[MAX_MODULE], packed[MAX_NAME + 8];
    const uint64_t dim[2] = {l->n_out, l->n_in};
    snprintf(module, sizeof module, "%.*s", (int)(strlen(name) - strlen(".weight")), name);
    snprintf(packed, sizeof packed, "%s_packed", name);
    if (find_tensor(f, packed) != NULL)
        return find_int4(f, module, l, err);
    const struct dn_tensor *t = find_tensor(f, name);
    if (t == NULL)
        return dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\" is missing", name);
    if (!is_plain(t) && t->type != DN_TT_F8_E4M3)
        return dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\": type %s, expected BF16, F16, F32 or F8_E4M3", name,
                          type_name(t));
    f->used[t - f->tensor] = true;
    l->values = t;
    int code = check_shape(t, 2, dim, err);
    if (code != 0 || t->type != DN_TT_F8_E4M3)
        return code;
    const uint64_t blocks[2] = {(dim[0] + FP8_BLOCK - 1) / FP8_BLOCK, (dim[1] + FP8_BLOCK - 1) / FP8_BLOCK};
    return find_part(f, module, "weight_scale_inv", DN_TT_F32, blocks, &l->scale, err);
}

static int find_role(struct finder *f, enum dn_tensor_role role, uint32_t layer, struct dn_err *err)
{
    struct dn_model *m = f->m;
    const char *format = m->source == DN_MODEL_GGUF ? NAME[role].gguf : NAME[role].hf;
    bool needed = dn_model_needs(&m->hyper, role, layer);
    if (format == NULL || (!needed && role != DN_T_ROPE_FREQS))
        return 0;
    char name[MAX_NAME];
    size_t n = (size_t)snprintf(name, sizeof name, "%s", m->prefix);
    /* The formats are the table's own. */
    snprintf(name + n, sizeof name - n, format, (unsigned)layer);
    uint64_t dim[2];
    uint32_t n_dims = dn_model_expected_shape(&m->hyper, role, dim);
    struct dn_linear *out = role < DN_T_ATTN_NORM ? &m->global[role] : &m->layer[layer][role - DN_T_ATTN_NORM];
    struct dn_linear l = {.n_out = dim[0], .n_in = n_dims == 2 ? dim[1] : 1};
    int code;
    if (dn_model_may_be_quantised(m, role)) {
        code = find_linear(f, name, &l, err);
    } else {
        l.values = find_tensor(f, name);
        if (l.values == NULL)
            return needed ? dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\" is missing", name) : 0;
        code = check_shape(l.values, n_dims, dim, err);
        if (code == 0)
            code = check_type(m, l.values, role, n_dims, err);
        f->used[l.values - f->tensor] = true;
    }
    if (code == 0)
        *out = l;
    return code;
}

static int find_experts(struct finder *f, uint32_t layer, struct dn_err *err)
{
    struct dn_model *m = f->m;
    const struct dn_hyper *h = &m->hyper;
    int code = 0;
    if (!dn_hyper_has_experts(h, layer))
        return 0;
    m->expert[layer] = dn_alloc0(h->n_experts, sizeof *m->expert[layer]);
    for (uint32_t e = 0; e < h->n_experts && code == 0; e++) {
        for (int p = 0; p < DN_EXPERT_PARTS && code == 0; p++) {
            struct dn_linear *l = &m->expert[layer][e][p];
            char name[MAX_NAME];
            snprintf(name, sizeof name, "%smodel.layers.%u.mlp.experts.%u.%s.weight", m->prefix, (unsigned)layer,
                     (unsigned)e, EXPERT_NAME[p]);
            l->n_out = p == DN_EXPERT_DOWN ? h->dim : h->expert_ff;
            l->n_in = p == DN_EXPERT_DOWN ? h->expert_ff : h->dim;
            code = find_linear(f, name, l, err);
        }
    }
    return code;
}

/* ---- What is left over ------------------------------------------------------------------------------------------- */

static bool begins(const char *text, const char *with)
{
    return strncmp(text, with, strlen(with)) == 0;
}

static bool is_vision(const struct dn_model *m, const char *name)
{
    return m->prefix[0] != '\0' && (begins(name, "vision_tower.") || begins(name, "mm_projector."));
}

/* Of a multi-token prediction layer, which lies behind the last one. */
static bool is_extra_layer(const struct dn_model *m, const char *name)
{
    char *end;
    size_t n = strlen(m->prefix);
    if (m->n_extra_layers == 0 || strncmp(name, m->prefix, n) != 0 || !begins(name + n, "model.layers."))
        return false;
    unsigned long layer = strtoul(name + n + strlen("model.layers."), &end, 10);
    return *end == '.' && layer >= m->hyper.n_layers && layer < (unsigned long)m->hyper.n_layers + m->n_extra_layers;
}

/* Tensors that some checkpoints carry and that say nothing: tables that we compute. */
static bool says_nothing(const struct dn_model *m, const char *name)
{
    static const char inv_freq[] = ".rotary_emb.inv_freq";
    size_t n = strlen(name), k = sizeof inv_freq - 1;
    return m->source == DN_MODEL_HF && n > k && strcmp(name + n - k, inv_freq) == 0;
}

static bool is_tied_head(const struct dn_model *m, const char *name)
{
    size_t p = strlen(m->prefix);
    return m->source == DN_MODEL_HF && m->hyper.tied_head && strncmp(name, m->prefix, p) == 0 &&
           strcmp(name + p, "lm_head.weight") == 0;
}

/* A tied head's copy says nothing; one that is no copy was trained, and answers without it are another model's. */
static int check_tied_head(const struct dn_model *m, const struct dn_tensor *head, struct dn_err *err)
{
    const struct dn_tensor *embed = m->global[DN_T_EMBED].values;
    if (head->type == embed->type && head->bytes == embed->bytes && head->n_dims == 2 &&
        head->dim[0] == embed->dim[0] && memcmp(head->data, embed->data, embed->bytes) == 0)
        return 0;
    return dn_err_set(err, DN_MODEL_FILE,
                      "tensor \"%.100s\" is not a copy of \"%.100s\", but \"tie_word_embeddings\" is true", head->name,
                      embed->name);
}

static void write_note(struct dn_model *m, const size_t n[2], const uint64_t bytes[2])
{
    static const char *const what[2] = {"for pictures (vision_tower, mm_projector)",
                                        "of a multi-token prediction layer"};
    struct dn_buf b = {0};
    for (int i = 0; i < 2; i++)
        if (n[i] > 0)
            dn_buf_printf(&b, "%s%zu tensor%s %s, %" PRIu64 " bytes, not used", b.len ? "; " : "", n[i],
                          n[i] == 1 ? "" : "s", what[i], bytes[i]);
    if (b.len > 0)
        dn_model_add_note(m, dn_buf_str(&b));
    dn_buf_release(&b);
}

static int check_unused(struct finder *f, struct dn_err *err)
{
    struct dn_model *m = f->m;
    size_t n[2] = {0};
    uint64_t bytes[2] = {0};
    for (size_t i = 0; i < f->n; i++) {
        const char *name = f->tensor[i].name;
        if (f->used[i])
            continue;
        if (is_tied_head(m, name)) {
            int code = check_tied_head(m, &f->tensor[i], err);
            if (code != 0)
                return code;
            m->n_ignored++;
            continue;
        }
        bool vision = is_vision(m, name), extra = is_extra_layer(m, name);
        if (!vision && !extra && !says_nothing(m, name))
            return dn_err_set(err, DN_MODEL_FILE, "tensor \"%.200s\" is not one of a %s model of %" PRIu32 " layers",
                              name, dn_arch_name(m->hyper.arch), m->hyper.n_layers);
        m->n_ignored++;
        if (vision || extra) {
            n[extra]++;
            bytes[extra] += f->tensor[i].bytes;
        }
    }
    write_note(m, n, bytes);
    return 0;
}

/* ---- What was found ---------------------------------------------------------------------------------------------- */

static void count(struct dn_model *m, const struct dn_linear *l, uint64_t *type_values)
{
    if (l->values == NULL)
        return;
    m->n_params += l->n_out * l->n_in;
    m->file_bytes += l->values->bytes + (l->scale ? l->scale->bytes : 0);
    type_values[l->values->type] += l->n_out * l->n_in;
}

void dn_model_describe(struct dn_model *m, const char *source)
{
    uint64_t type_values[DN_TT_COUNT] = {0};
    int most = 0;
    for (int role = 0; role < DN_T_ATTN_NORM; role++)
        count(m, &m->global[role], type_values);
    for (uint32_t l = 0; l < m->hyper.n_layers; l++) {
        for (int role = 0; role < DN_T_LAYER_ROLES; role++)
            count(m, &m->layer[l][role], type_values);
        for (uint32_t e = 0; m->expert[l] != NULL && e < m->hyper.n_experts; e++)
            for (int p = 0; p < DN_EXPERT_PARTS; p++)
                count(m, &m->expert[l][e][p], type_values);
    }
    for (int t = 1; t < DN_TT_COUNT; t++)
        most = type_values[t] > type_values[most] ? t : most;
    struct dn_buf text = {0};
    dn_buf_printf(&text, "%s %s", source,
                  most == DN_TT_I32 ? "INT4" : dn_tensor_type_info((enum dn_tensor_type)most)->name);
    m->type_text = dn_strdup(dn_buf_str(&text));
    dn_buf_release(&text);
}

int dn_model_find_tensors(struct dn_model *m, struct dn_err *err)
{
    struct finder f = {.m = m,
                       .tensor = m->source == DN_MODEL_GGUF ? m->gguf->tensor : m->safetensors->tensor,
                       .n = m->source == DN_MODEL_GGUF ? m->gguf->n_tensors : m->safetensors->n_tensors};
    f.used = dn_alloc0(f.n, sizeof *f.used);
    m->layer = dn_alloc0(m->hyper.n_layers, sizeof *m->layer);
    m->expert = dn_alloc0(m->hyper.n_layers, sizeof *m->expert);
    int code = 0;
    for (int role = 0; role < DN_T_ATTN_NORM && code == 0; role++)
        code = find_role(&f, (enum dn_tensor_role)role, 0, err);
    for (uint32_t l = 0; l < m->hyper.n_layers && code == 0; l++) {
        for (int role = DN_T_ATTN_NORM; role < DN_T_ROLES && code == 0; role++)
            code = find_role(&f, (enum dn_tensor_role)role, l, err);
        if (code == 0)
            code = find_experts(&f, l, err);
    }
    if (code == 0)
        code = check_unused(&f, err);
    if (code == 0)
        dn_model_describe(m, m->source == DN_MODEL_GGUF ? "GGUF" : "safetensors");
    free(f.used);
    return code;
}
