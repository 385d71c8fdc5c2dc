/* Writes the tiny checkpoints of tests/oracle/make_tiny.py: a folder with config.json and safetensors, one file or two
 * shards. The same generator of weights as there, so that the logits of transformers in tests/fixtures are the
 * reference. */
#ifndef DN_TEST_TINY_CHECKPOINT_H
#define DN_TEST_TINY_CHECKPOINT_H

#include "base/buf.h"
#include "engine/tensor.h"

#include <criterion/criterion.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { TINY_VOCAB = 256, TINY_DIM = 96, TINY_FF = 192, TINY_LAYERS = 2, TINY_HEADS = 3, TINY_TOKENS = 40 };

struct tiny_kind {
    const char *name; /* tiny_<name>.f32 */
    const char *arch; /* model_type */
    unsigned head_dim;
    bool tied, bias, qk_norm;
    const char *rope; /* members of config.json */
};

static const struct tiny_kind TINY_KIND[] = {
    {"llama", "llama", 32, true, false, false, "\"rope_theta\":100000.0,\"rope_scaling\":null"},
    {"llama3", "llama", 32, false, false, false,
     "\"rope_theta\":10000.0,\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_"
     "factor\":4.0,"
     "\"original_max_position_embeddings\":64}"},
    {"qwen2", "qwen2", 32, true, true, false,
     "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":1000000.0}"},
    {"qwen3", "qwen3", 48, true, false, true,
     "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":1000000.0}"},
};
enum { TINY_KINDS = sizeof TINY_KIND / sizeof *TINY_KIND };

struct tiny_writer {
    const char *folder;
    unsigned n_shards, shard;
    enum dn_tensor_type type; /* BF16, F16 or F32: all hold the values exactly */
    struct dn_buf header[2], data[2], map;
};

static inline int tiny_id(int i)
{
    return (7 * i * i + 3 * i + 11) % 256;
}

static inline int tiny_draw(uint64_t seed, uint64_t i)
{
    uint64_t z = seed + i + 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (int)((z ^ z >> 31) >> 56) - 128;
}

static inline float tiny_value(const char *name, uint64_t i)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (const char *c = name; *c; c++)
        h = (h ^ (uint8_t)*c) * 0x100000001b3u;
    size_t n = strlen(name);
    int v = tiny_draw(h, i);
    bool is_norm = n > 11 && strcmp(name + n - 11, "norm.weight") == 0;
    return is_norm ? 1 + (float)(v >> 3) / 128 : (float)v / 512;
}

static inline void tiny_tensor(struct tiny_writer *w, const char *name, unsigned n_out, unsigned n_in)
{
    unsigned s = w->shard++ % w->n_shards;
    size_t n = (size_t)(n_out ? n_out : 1) * n_in, begin = w->data[s].len;
    for (size_t i = 0; i < n; i++) {
        float v = tiny_value(name, i);
        uint16_t half = w->type == DN_TT_BF16 ? dn_f32_to_bf16(v) : dn_f32_to_f16(v);
        dn_buf_put(&w->data[s], w->type == DN_TT_F32 ? (void *)&v : (void *)&half, w->type == DN_TT_F32 ? 4 : 2);
    }
    dn_buf_printf(&w->header[s], "%s\"%s\":{\"dtype\":\"%s\",\"shape\":[", w->header[s].len ? "," : "{", name,
                  dn_tensor_type_info(w->type)->name);
    if (n_out)
        dn_buf_printf(&w->header[s], "%u,", n_out);
    dn_buf_printf(&w->header[s], "%u],\"data_offsets\":[%zu,%zu]}", n_in, begin, w->data[s].len);
    dn_buf_printf(&w->map, "%s\"%s\":\"model-%u.safetensors\"", w->map.len ? "," : "", name, s);
}

static inline void tiny_file(const char *folder, const char *name, const struct dn_buf *b)
{
    char path[512];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *f = fopen(path, "wb");
    cr_assert_not_null(f, "%s", path);
    cr_assert_eq(fwrite(b->data, 1, b->len, f), b->len);
    fclose(f);
}

static inline void tiny_shard(struct tiny_writer *w, unsigned s, const char *name)
{
    struct dn_buf b = {0};
    dn_buf_putc(&w->header[s], '}');
    while (w->header[s].len % 8 != 0)
        dn_buf_putc(&w->header[s], ' ');
    uint64_t n = w->header[s].len;
    dn_buf_put(&b, &n, 8);
    dn_buf_put(&b, w->header[s].data, w->header[s].len);
    dn_buf_put(&b, w->data[s].data, w->data[s].len);
    tiny_file(w->folder, name, &b);
    dn_buf_release(&b);
}

static inline void tiny_layer(struct tiny_writer *w, const struct tiny_kind *k, unsigned l)
{
    char name[128];
    const struct {
        const char *name;
        unsigned n_out, n_in;
        bool used;
    } tensor[] = {
        {"input_layernorm.weight", 0, TINY_DIM, true},
        {"self_attn.q_proj.weight", TINY_HEADS * k->head_dim, TINY_DIM, true},
        {"self_attn.k_proj.weight", k->head_dim, TINY_DIM, true},
        {"self_attn.v_proj.weight", k->head_dim, TINY_DIM, true},
        {"self_attn.q_proj.bias", 0, TINY_HEADS * k->head_dim, k->bias},
        {"self_attn.k_proj.bias", 0, k->head_dim, k->bias},
        {"self_attn.v_proj.bias", 0, k->head_dim, k->bias},
        {"self_attn.q_norm.weight", 0, k->head_dim, k->qk_norm},
        {"self_attn.k_norm.weight", 0, k->head_dim, k->qk_norm},
        {"self_attn.o_proj.weight", TINY_DIM, TINY_HEADS * k->head_dim, true},
        {"post_attention_layernorm.weight", 0, TINY_DIM, true},
        {"mlp.gate_proj.weight", TINY_FF, TINY_DIM, true},
        {"mlp.up_proj.weight", TINY_FF, TINY_DIM, true},
        {"mlp.down_proj.weight", TINY_DIM, TINY_FF, true},
    };
    for (size_t i = 0; i < sizeof tensor / sizeof *tensor; i++) {
        snprintf(name, sizeof name, "model.layers.%u.%s", l, tensor[i].name);
        if (tensor[i].used)
            tiny_tensor(w, name, tensor[i].n_out, tensor[i].n_in);
    }
}

/* `extra` goes into config.json and may replace nothing: duplicate keys are refused. Returns the folder, in /tmp. */
static inline const char *tiny_checkpoint(const struct tiny_kind *k, unsigned n_shards, enum dn_tensor_type type,
                                          const char *extra)
{
    static char folder[64];
    snprintf(folder, sizeof folder, "/tmp/dn_tiny_XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
    struct tiny_writer w = {.folder = folder, .n_shards = n_shards, .type = type};
    tiny_tensor(&w, "model.embed_tokens.weight", TINY_VOCAB, TINY_DIM);
    for (unsigned l = 0; l < TINY_LAYERS; l++)
        tiny_layer(&w, k, l);
    tiny_tensor(&w, "model.norm.weight", 0, TINY_DIM);
    if (!k->tied)
        tiny_tensor(&w, "lm_head.weight", TINY_VOCAB, TINY_DIM);
    for (unsigned s = 0; s < n_shards; s++) {
        char name[32];
        snprintf(name, sizeof name, n_shards > 1 ? "model-%u.safetensors" : "model.safetensors", s);
        tiny_shard(&w, s, name);
    }
    struct dn_buf b = {0};
    if (n_shards > 1) {
        dn_buf_printf(&b, "{\"metadata\":{},\"weight_map\":{%s}}", dn_buf_str(&w.map));
        tiny_file(folder, "model.safetensors.index.json", &b);
        dn_buf_clear(&b);
    }
    dn_buf_printf(&b,
                  "{\"model_type\":\"%s\",\"vocab_size\":256,\"hidden_size\":96,\"intermediate_size\":192,\"num_hidden_"
                  "layers\":2,"
                  "\"num_attention_heads\":3,\"num_key_value_heads\":1,\"head_dim\":%u,\"max_position_embeddings\":512,"
                  "\"rms_norm_eps\":1e-05,\"tie_word_embeddings\":%s,\"hidden_act\":\"silu\",\"eos_token_id\":[2,5],"
                  "\"bos_token_id\":1,%s%s}",
                  k->arch, k->head_dim, k->tied ? "true" : "false", k->rope, extra);
    tiny_file(folder, "config.json", &b);
    dn_buf_release(&b);
    for (unsigned s = 0; s < 2; s++) {
        dn_buf_release(&w.header[s]);
        dn_buf_release(&w.data[s]);
    }
    dn_buf_release(&w.map);
    return folder;
}

static inline void tiny_remove(const char *folder)
{
    static const char *const file[] = {"config.json",           "generation_config.json",
                                       "model.safetensors",     "model-0.safetensors",
                                       "model-1.safetensors",   "model.safetensors.index.json",
                                       "tokenizer_config.json", "chat_template.jinja",
                                       "tokenizer.json",        "tiktoken.model"};
    char path[512];
    for (size_t i = 0; i < sizeof file / sizeof *file; i++) {
        snprintf(path, sizeof path, "%s/%s", folder, file[i]);
        unlink(path);
    }
    rmdir(folder);
}

/* [TINY_TOKENS][TINY_VOCAB], by transformers. */
static inline void tiny_reference(const struct tiny_kind *k, float *out)
{
    char path[512];
    snprintf(path, sizeof path, DN_SOURCE_DIR "/tests/fixtures/tiny_%s.f32", k->name);
    FILE *f = fopen(path, "rb");
    cr_assert_not_null(f, "%s", path);
    cr_assert_eq(fread(out, 4, TINY_TOKENS * TINY_VOCAB, f), TINY_TOKENS * TINY_VOCAB);
    fclose(f);
}

#endif
