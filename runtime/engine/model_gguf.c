#include "engine/model_impl.h"

#include "base/buf.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The key of an architecture, "llama.block_count", in a buffer of the caller. */
static const char *arch_key(const struct dn_model *m, const char *name, char text[96])
{
    snprintf(text, 96, "%s.%s", dn_arch_name(m->hyper.arch), name);
    return text;
}

static int read_u32(const struct dn_model *m, const char *name, uint64_t max, uint32_t *out, bool *found,
                    struct dn_err *err)
{
    char key[96];
    uint64_t v = *out;
    int code = dn_gguf_u64(m->gguf, arch_key(m, name, key), 1, max, &v, found, err);
    if (code == 0)
        *out = (uint32_t)v;
    return code;
}

/* Keys that change the mathematics and that the forward pass does not know: refused unless they say "off". */
static int refuse_extras(const struct dn_model *m, struct dn_err *err)
{
    static const char *const zero[] = {"expert_count", "attention.sliding_window", "attention.causal_disabled"};
    char key[96];
    bool found;
    for (size_t i = 0; i < sizeof zero / sizeof *zero; i++) {
        uint64_t v = 0;
        int code = dn_gguf_u64(m->gguf, arch_key(m, zero[i], key), 0, UINT64_MAX, &v, &found, err);
        if (code != 0)
            return code;
        if (v != 0)
            return dn_err_set(err, DN_MODEL_FILE, "key \"%s\": %" PRIu64 " is not supported, expected 0", key, v);
    }
    struct dn_gguf_str type = {"none", 4};
    int code = dn_gguf_string(m->gguf, arch_key(m, "rope.scaling.type", key), &type, &found, err);
    if (code == 0 && (type.len != 4 || memcmp(type.data, "none", 4) != 0))
        return dn_err_set(err, DN_MODEL_FILE, "key \"%s\": rope scaling \"%.*s\" is not supported", key,
                          (int)(type.len < 40 ? type.len : 40), type.data);
    static const char *const factor[] = {"rope.scaling.factor", "rope.scale_linear"};
    for (size_t i = 0; i < 2 && code == 0; i++) {
        double v = 1;
        code = dn_gguf_f64(m->gguf, arch_key(m, factor[i], key), 0, 1e9, &v, &found, err);
        if (code == 0 && v != 1 && v != 0)
            code = dn_err_set(err, DN_MODEL_FILE, "key \"%s\": linear rope scaling by %g is not supported", key, v);
    }
    return code;
}

static int read_heads(struct dn_model *m, struct dn_err *err)
{
    struct dn_hyper *h = &m->hyper;
    char key[96];
    bool found;
    int code = read_u32(m, "attention.head_count", 4096, &h->n_heads, NULL, err);
    h->n_kv_heads = h->n_heads;
    if (code == 0)
        code = read_u32(m, "attention.head_count_kv", 4096, &h->n_kv_heads, &found, err);
    if (code == 0)
        code = read_u32(m, "attention.key_length", 1024, &h->head_dim, &found, err);
    if (code != 0)
        return code;
    if (!found) {
        if (h->dim % h->n_heads != 0)
            return dn_err_set(err, DN_MODEL_FILE, "%" PRIu32 " values over %" PRIu32 " heads, expected a multiple",
                              h->dim, h->n_heads);
        h->head_dim = h->dim / h->n_heads;
        if (h->head_dim > 1024)
            return dn_err_set(err, DN_MODEL_FILE, "heads of %" PRIu32 " values, expected at most 1024", h->head_dim);
    }
    uint32_t value_length = h->head_dim;
    code = read_u32(m, "attention.value_length", 1024, &value_length, &found, err);
    if (code == 0 && value_length != h->head_dim)
        return dn_err_set(err, DN_MODEL_FILE, "key \"%s\": %" PRIu32 ", expected that of the keys, %" PRIu32,
                          arch_key(m, "attention.value_length", key), value_length, h->head_dim);
    h->rotary_dim = h->head_dim;
    if (code == 0)
        code = read_u32(m, "rope.dimension_count", 1024, &h->rotary_dim, &found, err);
    return code;
}

static int read_hyper(struct dn_model *m, struct dn_err *err)
{
    struct dn_hyper *h = &m->hyper;
    struct dn_gguf_str arch;
    char key[96];
    bool found;
    int code = dn_gguf_string(m->gguf, "general.architecture", &arch, NULL, err);
    if (code == 0)
        code = dn_model_parse_arch(arch.data, arch.len, DN_MODEL_GGUF, &h->arch, err);
    if (code == 0)
        code = read_u32(m, "block_count", DN_MODEL_MAX_LAYERS, &h->n_layers, NULL, err);
    if (code == 0)
        code = read_u32(m, "embedding_length", 1 << 16, &h->dim, NULL, err);
    if (code == 0)
        code = read_heads(m, err);
    if (code == 0)
        code = read_u32(m, "feed_forward_length", 1 << 20, &h->ff_dim, NULL, err);
    if (code == 0)
        code = read_u32(m, "context_length", 1 << 26, &h->context_tokens, NULL, err);
    double eps = 0;
    h->rope_theta = 10000;
    if (code == 0)
        code = dn_gguf_f64(m->gguf, arch_key(m, "attention.layer_norm_rms_epsilon", key), 0, 1, &eps, NULL, err);
    if (code == 0)
        code = dn_gguf_f64(m->gguf, arch_key(m, "rope.freq_base", key), 1, 1e12, &h->rope_theta, &found, err);
    if (code == 0)
        code = refuse_extras(m, err);
    h->norm_eps = (float)eps;
    h->rope_interleaved = h->arch == DN_ARCH_LLAMA;
    h->qkv_bias = h->arch == DN_ARCH_QWEN2;
    h->qk_norm = h->arch == DN_ARCH_QWEN3;
    return code == 0 ? dn_model_check_hyper(h, err) : code;
}

/* Everything in the file that ends a text or a turn. */
static int read_special(struct dn_model *m, struct dn_err *err)
{
    static const char *const end[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                      "tokenizer.ggml.eom_token_id"};
    bool found;
    uint64_t id;
    for (size_t i = 0; i < sizeof end / sizeof *end; i++) {
        int code = dn_gguf_u64(m->gguf, end[i], 0, DN_MODEL_MAX_VOCAB, &id, &found, err);
        if (code != 0)
            return code;
        if (found && (code = dn_model_add_eos(m, (int64_t)id, err)) != 0)
            return code;
    }
    int code = dn_gguf_u64(m->gguf, "tokenizer.ggml.bos_token_id", 0, DN_MODEL_MAX_VOCAB, &id, &found, err);
    if (code == 0 && found)
        m->bos_id = (int32_t)id;
    if (code == 0)
        code = dn_gguf_bool(m->gguf, "tokenizer.ggml.add_bos_token", &m->add_bos, &found, err);
    return code;
}

int dn_model_read_gguf(struct dn_model *m, struct dn_err *err)
{
    struct dn_gguf_str text;
    bool found;
    int code = read_hyper(m, err);
    if (code == 0)
        code = read_special(m, err);
    if (code == 0)
        code = dn_gguf_string(m->gguf, "general.name", &text, &found, err);
    if (code == 0 && found && text.len > 0 && text.len < 256 && memchr(text.data, '\0', text.len) == NULL)
        m->title = dn_strndup(text.data, text.len);
    if (code == 0)
        code = dn_gguf_string(m->gguf, "tokenizer.chat_template", &text, &found, err);
    if (code == 0 && found)
        code = dn_model_take_template(m, dn_strndup(text.data, text.len), text.len, "tokenizer.chat_template", err);
    if (code != 0)
        return code;
    /* The table is the truth about the size of the vocabulary: files may pad it beyond their list of tokens. */
    const struct dn_tensor *embed = dn_gguf_find_tensor(m->gguf, "token_embd.weight");
    if (embed == NULL || embed->n_dims != 2 || embed->dim[0] > DN_MODEL_MAX_VOCAB)
        return dn_err_set(err, DN_MODEL_FILE, "tensor \"token_embd.weight\" %s",
                          embed == NULL ? "is missing" : "is not a matrix of at most 2097152 rows");
    m->hyper.n_vocab = (uint32_t)embed->dim[0];
    m->hyper.tied_head = dn_gguf_find_tensor(m->gguf, "output.weight") == NULL;
    const struct dn_gguf_value *tokens = dn_gguf_find(m->gguf, "tokenizer.ggml.tokens");
    if (tokens != NULL && tokens->type == DN_GGUF_ARRAY && tokens->n > m->hyper.n_vocab)
        return dn_err_set(err, DN_MODEL_FILE, "%" PRIu64 " tokens, but the embedding table has only %" PRIu32 " rows",
                          tokens->n, m->hyper.n_vocab);
    return 0;
}
