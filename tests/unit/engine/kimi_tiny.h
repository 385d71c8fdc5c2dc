/* Writes the tiny checkpoints of tests/oracle/make_kimi_tiny.py, in BF16, FP8 blocks or pack-quantized INT4: the same
 * generator of bytes as there. */
#ifndef DN_TEST_KIMI_TINY_H
#define DN_TEST_KIMI_TINY_H

#include "unit/engine/tiny_checkpoint.h"

enum kimi_form { KIMI_BF16, KIMI_FP8, KIMI_INT4 };

struct kimi_kind {
    const char *name; /* tiny_<name>.f32 */
    unsigned dim, layers, q_lora, experts, top, groups, top_groups, ff, shared, dense;
    bool tied, normalise;
    const char *scale; /* routed_scaling_factor */
    enum kimi_form expert_form, form;
    int sizes;    /* index of KIMI_SIZES */
    bool wrapped; /* kimi_k25: text_config, names with a prefix, tensors for pictures */
    const char *rope;
};
enum { KIMI_VOCAB = 256, KIMI_HEADS = 2, KIMI_LATENT = 64, KIMI_NOPE = 64, KIMI_ROPE = 16, KIMI_V = 128 };

/* Sizes of the attention, and of the dense layers: of small models and of those with Kimi's own head sizes. */
struct kimi_sizes {
    unsigned heads, latent, nope, rope, v, dense_ff;
};
static const struct kimi_sizes KIMI_SIZES[] = {{KIMI_HEADS, KIMI_LATENT, KIMI_NOPE, KIMI_ROPE, KIMI_V, 192},
                                               {4, 512, 128, 64, 128, 256}};

#define KIMI_YARN                                                                                                      \
    "\"rope_theta\":50000.0,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":8.0,\"original_max_position_embeddings\":"  \
    "64,\"beta_fast\":32.0,\"beta_slow\":1.0,\"mscale\":1.0,\"mscale_all_dim\":1.0}"
#define KIMI_PLAIN "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":50000.0}"

static const struct kimi_kind KIMI_KIND[] = {
    {"kimi", 128, 3, 128, 16, 4, 4, 2, 128, 1, 1, true, true, "2.827", KIMI_BF16, KIMI_BF16, 0, false, KIMI_YARN},
    {"kimi_fp8", 128, 3, 128, 16, 4, 4, 2, 128, 1, 1, true, true, "2.827", KIMI_FP8, KIMI_FP8, 0, false, KIMI_YARN},
    {"kimi_int4", 128, 3, 128, 16, 4, 4, 2, 128, 1, 1, true, true, "2.827", KIMI_INT4, KIMI_BF16, 0, true, KIMI_YARN},
    {"moonlight", 128, 2, 0, 16, 4, 1, 1, 128, 2, 0, false, false, "1.25", KIMI_BF16, KIMI_BF16, 0, true, KIMI_PLAIN},
    {"moonlight_int4", 128, 2, 0, 16, 4, 1, 1, 128, 2, 0, false, false, "1.25", KIMI_INT4, KIMI_INT4, 0, false,
     KIMI_PLAIN},
    {"many", 64, 3, 128, 1024, 8, 8, 3, 32, 1, 2, true, true, "2.827", KIMI_BF16, KIMI_BF16, 0, false, KIMI_YARN},
    {"wide", 256, 2, 256, 32, 4, 1, 1, 128, 1, 1, true, true, "2.827", KIMI_BF16, KIMI_BF16, 1, false, KIMI_YARN},
    {"wide_fp8", 256, 2, 256, 32, 4, 1, 1, 128, 1, 1, true, true, "2.827", KIMI_FP8, KIMI_FP8, 1, false, KIMI_YARN},
    {"wide_int4", 256, 2, 256, 32, 4, 1, 1, 128, 1, 1, true, true, "2.827", KIMI_INT4, KIMI_BF16, 1, true, KIMI_YARN},
};
enum { KIMI_KINDS = sizeof KIMI_KIND / sizeof *KIMI_KIND };

/* What a test wants otherwise: a tensor that is left out, has another name, another type or one row more. */
struct kimi_fault {
    const char *tensor;   /* full name, without the prefix; NULL = none */
    const char *name;     /* written instead; "" = left out */
    const char *dtype;    /* said instead (of the same size), or NULL */
    bool transposed;      /* dimensions said the other way round */
    const char *extra;    /* members of config.json, each with a comma before it */
    const char *without;  /* a member of config.json that is left out */
    const char *shape_of; /* a packed module whose weight_shape says the dimensions the other way round */
    const char *one_more; /* a tensor that is there as well, of 2 values */
};

struct kimi_writer {
    struct tiny_writer w;
    const struct kimi_kind *kind;
    struct kimi_fault fault;
};

static inline uint64_t kimi_hash(const char *name)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (const char *c = name; *c; c++)
        h = (h ^ (uint8_t)*c) * 0x100000001b3u;
    return h;
}

static inline void kimi_raw(struct kimi_writer *k, const char *name, const char *dtype, unsigned n_out, unsigned n_in,
                            const void *data, size_t bytes)
{
    struct dn_buf *header = &k->w.header[0], *all = &k->w.data[0];
    bool is_fault = k->fault.tensor != NULL && strcmp(k->fault.tensor, name) == 0;
    if (is_fault && k->fault.name != NULL && k->fault.name[0] == '\0')
        return;
    const char *shown = is_fault && k->fault.name ? k->fault.name : name;
    size_t begin = all->len;
    bool swap = is_fault && k->fault.transposed;
    dn_buf_put(all, data, bytes);
    dn_buf_printf(
        header, "%s\"%s%s\":{\"dtype\":\"%s\",\"shape\":[", header->len ? "," : "{",
        k->kind->wrapped && strncmp(shown, "vision", 6) != 0 && strncmp(shown, "mm_", 3) != 0 ? "language_model." : "",
        shown, is_fault && k->fault.dtype ? k->fault.dtype : dtype);
    if (n_out)
        dn_buf_printf(header, "%u,", swap ? n_in : n_out);
    dn_buf_printf(header, "%u],\"data_offsets\":[%zu,%zu]}", swap ? n_out : n_in, begin, all->len);
}

static inline void kimi_plain(struct kimi_writer *k, const char *name, unsigned n_out, unsigned n_in)
{
    size_t n = (size_t)(n_out ? n_out : 1) * n_in, len = strlen(name);
    bool is_norm = len > 11 && strcmp(name + len - 11, "norm.weight") == 0;
    bool is_bias = len > 5 && strcmp(name + len - 5, "_bias") == 0;
    uint64_t h = kimi_hash(name);
    float *f32 = dn_alloc0(n, sizeof *f32);
    uint16_t *bf16 = dn_alloc0(n, sizeof *bf16);
    for (size_t i = 0; i < n; i++) {
        int v = tiny_draw(h, i);
        f32[i] = is_norm ? 1 + (float)(v >> 3) / 128 : (float)v / (is_bias ? 1024 : 512);
        bf16[i] = dn_f32_to_bf16(f32[i]);
    }
    kimi_raw(k, name, is_bias ? "F32" : "BF16", n_out, n_in, is_bias ? (void *)f32 : (void *)bf16,
             n * (is_bias ? 4 : 2));
    free(f32);
    free(bf16);
}

static inline void kimi_int4(struct kimi_writer *k, const char *module, unsigned n_out, unsigned n_in)
{
    char name[192];
    size_t n = (size_t)n_out * n_in;
    uint8_t *q = dn_alloc0(n / 2, 1);
    uint16_t *scale = dn_alloc0(n / 32, sizeof *scale);
    snprintf(name, sizeof name, "%s.weight_packed", module);
    uint64_t h = kimi_hash(name);
    for (size_t i = 0; i < n; i++)
        q[i / 2] |= (uint8_t)((tiny_draw(h, i) & 15) << (i % 2 ? 4 : 0));
    kimi_raw(k, name, "I32", n_out, n_in / 8, q, n / 2);
    snprintf(name, sizeof name, "%s.weight_scale", module);
    h = kimi_hash(name);
    for (size_t i = 0; i < n / 32; i++)
        scale[i] = dn_f32_to_bf16((float)((tiny_draw(h, i) & 127) + 128) / 8192);
    kimi_raw(k, name, "BF16", n_out, n_in / 32, scale, n / 16);
    snprintf(name, sizeof name, "%s.weight_shape", module);
    /* Published files have I32, compressed-tensors itself writes I64. */
    bool other = k->fault.shape_of != NULL && strcmp(k->fault.shape_of, module) == 0;
    int64_t wide[2] = {other ? n_in : n_out, other ? n_out : n_in};
    int32_t narrow[2] = {(int32_t)wide[0], (int32_t)wide[1]};
    if (k->kind->form == KIMI_INT4)
        kimi_raw(k, name, "I64", 0, 2, wide, sizeof wide);
    else
        kimi_raw(k, name, "I32", 0, 2, narrow, sizeof narrow);
    free(q);
    free(scale);
}

static inline void kimi_fp8(struct kimi_writer *k, const char *module, unsigned n_out, unsigned n_in)
{
    char name[192];
    size_t n = (size_t)n_out * n_in, blocks = (size_t)((n_out + 127) / 128) * ((n_in + 127) / 128);
    unsigned rows = (n_out + 127) / 128, columns = (n_in + 127) / 128;
    uint8_t *q = dn_alloc0(n, 1);
    float *scale = dn_alloc0(blocks, sizeof *scale);
    snprintf(name, sizeof name, "%s.weight", module);
    uint64_t h = kimi_hash(name);
    for (size_t i = 0; i < n; i++) {
        q[i] = (uint8_t)(tiny_draw(h, i) + 128);
        q[i] -= (q[i] & 127) == 127; /* no NaN */
    }
    kimi_raw(k, name, "F8_E4M3", n_out, n_in, q, n);
    snprintf(name, sizeof name, "%s.weight_scale_inv", module);
    h = kimi_hash(name);
    for (size_t i = 0; i < blocks; i++)
        scale[i] = (float)((tiny_draw(h, i) & 127) + 128) / 262144;
    kimi_raw(k, name, "F32", rows, columns, scale, blocks * 4);
    free(q);
    free(scale);
}

static inline void kimi_linear(struct kimi_writer *k, const char *module, unsigned n_out, unsigned n_in,
                               enum kimi_form form)
{
    char name[176];
    snprintf(name, sizeof name, "%s.weight", module);
    if (form == KIMI_FP8)
        kimi_fp8(k, module, n_out, n_in);
    else if (form == KIMI_INT4)
        kimi_int4(k, module, n_out, n_in);
    else
        kimi_plain(k, name, n_out, n_in);
}

static inline void kimi_ffn(struct kimi_writer *k, const char *module, unsigned ff, enum kimi_form form)
{
    char name[160];
    static const char *const part[] = {"gate_proj", "up_proj", "down_proj"};
    for (int i = 0; i < 3; i++) {
        snprintf(name, sizeof name, "%.100s.%s", module, part[i]);
        kimi_linear(k, name, i < 2 ? ff : k->kind->dim, i < 2 ? k->kind->dim : ff, form);
    }
}

static inline void kimi_layer(struct kimi_writer *k, unsigned l)
{
    const struct kimi_kind *d = k->kind;
    const struct kimi_sizes *z = &KIMI_SIZES[d->sizes];
    const struct {
        const char *name;
        unsigned n_out, n_in;
        bool used;
    } t[] = {
        {"input_layernorm.weight", 0, d->dim, true},
        {"self_attn.q_proj", z->heads * (z->nope + z->rope), d->dim, d->q_lora == 0},
        {"self_attn.q_a_proj", d->q_lora, d->dim, d->q_lora > 0},
        {"self_attn.q_a_layernorm.weight", 0, d->q_lora, d->q_lora > 0},
        {"self_attn.q_b_proj", z->heads * (z->nope + z->rope), d->q_lora, d->q_lora > 0},
        {"self_attn.kv_a_proj_with_mqa", z->latent + z->rope, d->dim, true},
        {"self_attn.kv_a_layernorm.weight", 0, z->latent, true},
        {"self_attn.kv_b_proj", z->heads * (z->nope + z->v), z->latent, true},
        {"self_attn.o_proj", d->dim, z->heads * z->v, true},
        {"post_attention_layernorm.weight", 0, d->dim, true},
    };
    char name[128];
    for (size_t i = 0; i < sizeof t / sizeof *t; i++) {
        snprintf(name, sizeof name, "model.layers.%u.%s", l, t[i].name);
        if (t[i].used && t[i].n_out == 0)
            kimi_plain(k, name, 0, t[i].n_in);
        else if (t[i].used)
            kimi_linear(k, name, t[i].n_out, t[i].n_in, d->form);
    }
    snprintf(name, sizeof name, "model.layers.%u.mlp", l);
    if (l < d->dense) {
        kimi_ffn(k, name, z->dense_ff, d->form);
        return;
    }
    for (unsigned e = 0; e < d->experts; e++) {
        snprintf(name, sizeof name, "model.layers.%u.mlp.experts.%u", l, e);
        kimi_ffn(k, name, d->ff, d->expert_form);
    }
    snprintf(name, sizeof name, "model.layers.%u.mlp.shared_experts", l);
    kimi_ffn(k, name, d->shared * d->ff, d->form);
    snprintf(name, sizeof name, "model.layers.%u.mlp.gate.weight", l);
    kimi_plain(k, name, d->experts, d->dim);
    snprintf(name, sizeof name, "model.layers.%u.mlp.gate.e_score_correction_bias", l);
    kimi_plain(k, name, 0, d->experts);
}

static inline void kimi_member(const struct kimi_fault *f, struct dn_buf *b, const char *key, const char *format, ...)
{
    va_list ap;
    char text[64];
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    if (f->without == NULL || strcmp(f->without, key) != 0)
        dn_buf_printf(b, ",\"%s\":%s", key, text);
}

static inline void kimi_config(const struct kimi_kind *d, const struct kimi_fault *f, struct dn_buf *b)
{
    const struct kimi_sizes *z = &KIMI_SIZES[d->sizes];
    if (d->wrapped)
        dn_buf_printf(b, "{\"model_type\":\"kimi_k25\",\"vision_config\":{},\"text_config\":");
    dn_buf_printf(b, "{\"model_type\":\"%s\",\"hidden_act\":\"silu\",\"bos_token_id\":1,%s",
                  d->q_lora ? "kimi_k2" : "deepseek_v3", d->rope);
    const struct {
        const char *key;
        unsigned value;
    } number[] = {{"vocab_size", KIMI_VOCAB},
                  {"hidden_size", d->dim},
                  {"intermediate_size", z->dense_ff},
                  {"moe_intermediate_size", d->ff},
                  {"num_hidden_layers", d->layers},
                  {"num_attention_heads", z->heads},
                  {"num_key_value_heads", z->heads},
                  {"head_dim", 7},
                  {"n_routed_experts", d->experts},
                  {"num_experts_per_tok", d->top},
                  {"n_group", d->groups},
                  {"topk_group", d->top_groups},
                  {"n_shared_experts", d->shared},
                  {"first_k_dense_replace", d->dense},
                  {"moe_layer_freq", 1},
                  {"kv_lora_rank", z->latent},
                  {"qk_nope_head_dim", z->nope},
                  {"qk_rope_head_dim", z->rope},
                  {"v_head_dim", z->v},
                  {"max_position_embeddings", 512}};
    for (size_t i = 0; i < sizeof number / sizeof *number; i++)
        kimi_member(f, b, number[i].key, "%u", number[i].value);
    kimi_member(f, b, "eos_token_id", "2");
    if (d->q_lora)
        kimi_member(f, b, "q_lora_rank", "%u", d->q_lora);
    else
        kimi_member(f, b, "q_lora_rank", "null");
    kimi_member(f, b, "rms_norm_eps", "1e-06");
    kimi_member(f, b, "norm_topk_prob", d->normalise ? "true" : "false");
    kimi_member(f, b, "routed_scaling_factor", "%s", d->scale);
    kimi_member(f, b, "tie_word_embeddings", d->tied ? "true" : "false");
    dn_buf_printf(b, "%s}%s", f->extra ? f->extra : "", d->wrapped ? "}" : "");
}

/* Returns the folder, in /tmp; tiny_remove() removes it. */
static inline const char *kimi_checkpoint(const struct kimi_kind *d, struct kimi_fault fault)
{
    static char folder[64];
    snprintf(folder, sizeof folder, "/tmp/dn_kimi_XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
    struct kimi_writer k = {.w = {.folder = folder, .n_shards = 1}, .kind = d, .fault = fault};
    kimi_plain(&k, "model.embed_tokens.weight", KIMI_VOCAB, d->dim);
    for (unsigned l = 0; l < d->layers; l++)
        kimi_layer(&k, l);
    kimi_plain(&k, "model.norm.weight", 0, d->dim);
    if (!d->tied)
        kimi_plain(&k, "lm_head.weight", KIMI_VOCAB, d->dim);
    kimi_plain(&k, "model.layers.0.self_attn.rotary_emb.inv_freq", 0, KIMI_SIZES[d->sizes].rope / 2);
    if (d->wrapped) {
        kimi_plain(&k, "vision_tower.patch_embed.proj.weight", 24, 16);
        kimi_plain(&k, "mm_projector.linear_1.weight", 8, 16);
    }
    if (fault.one_more != NULL)
        kimi_raw(&k, fault.one_more, "F32", 0, 2, (float[]){1, 2}, 8);
    tiny_shard(&k.w, 0, "model.safetensors");
    struct dn_buf b = {0};
    kimi_config(d, &fault, &b);
    tiny_file(folder, "config.json", &b);
    dn_buf_release(&b);
    dn_buf_release(&k.w.header[0]);
    dn_buf_release(&k.w.data[0]);
    return folder;
}

/* Logits [TINY_TOKENS][KIMI_VOCAB] and the experts of the last layer, sorted, [TINY_TOKENS][top], by transformers. */
static inline void kimi_reference(const struct kimi_kind *d, float *logits, float *experts)
{
    char path[512];
    const char *folder = getenv("DN_TEST_FIXTURES"); /* of a program that runs away from its sources */
    snprintf(path, sizeof path, "%s/tiny_%s.f32", folder ? folder : DN_SOURCE_DIR "/tests/fixtures", d->name);
    FILE *f = fopen(path, "rb");
    cr_assert_not_null(f, "%s", path);
    cr_assert_eq(fread(logits, 4, TINY_TOKENS * KIMI_VOCAB, f), TINY_TOKENS * KIMI_VOCAB);
    cr_assert_eq(fread(experts, 4, TINY_TOKENS * d->top, f), TINY_TOKENS * d->top);
    fclose(f);
}

#endif
