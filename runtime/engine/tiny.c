#include "engine/tiny.h"

#include "engine/gguf_write.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DIM = 64,
    FF = 128,
    LAYERS = 2,
    HEADS = 4,
    KV_HEADS = 2,
    HEAD_DIM = 16,
    CONTEXT = 4096,
    MAX_TOKENS = 1024,
    BYTES = 256
};
enum { ENDOFTEXT = 0, IM_START = 1, IM_END = 2, FIRST_BYTE = 3 };

/* Each becomes a token, with the space in front; the letters on the way to it become tokens, too, since BPE needs them.
 */
static const char *const WORD[] = {
    "a",     "the",    "and",   "of",    "to",    "in",    "on",     "at",     "by",    "with",  "bird",
    "birds", "sea",    "shore", "sand",  "mud",   "wind",  "wave",   "tide",   "wing",  "wings", "flock",
    "nest",  "egg",    "small", "fast",  "grey",  "white", "runs",   "flies",  "turns", "calls", "looks",
    "eats",  "sleeps", "comes", "goes",  "north", "south", "winter", "summer", "day",   "night", "light",
    "over",  "under",  "along", "again", "many",  "one",   "two",    "dunlin",
};
enum { N_WORDS = sizeof WORD / sizeof *WORD };

static const char TEMPLATE[] = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
                               "message['content'] + '<|im_end|>' + '\\n' }}"
                               "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

struct vocabulary {
    char *token[MAX_TOKENS];
    int32_t type[MAX_TOKENS];
    bool likely[MAX_TOKENS]; /* words, stops and the end of the turn: what the head may choose */
    int32_t n;
    char *merge[MAX_TOKENS];
    size_t n_merges;
};

/* The code point that stands for a byte in byte-level vocabularies (GPT-2's map). */
static unsigned byte_char(unsigned b)
{
    unsigned shifted = 0;
    for (unsigned i = 0; i <= b; i++) {
        bool plain = (i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174;
        if (i == b)
            return plain ? b : 256 + shifted;
        shifted += !plain;
    }
    return 0;
}

static void byte_text(unsigned b, char text[3])
{
    unsigned c = byte_char(b);
    text[0] = (char)(c < 0x80 ? c : 0xc0 | c >> 6);
    text[1] = (char)(c < 0x80 ? 0 : 0x80 | (c & 63));
    text[2] = '\0';
}

static int32_t find_token(const struct vocabulary *v, const char *text)
{
    for (int32_t i = 0; i < v->n; i++)
        if (strcmp(v->token[i], text) == 0)
            return i;
    return -1;
}

static int32_t add_token(struct vocabulary *v, const char *text, int32_t type)
{
    DN_BUG_ON(v->n == MAX_TOKENS);
    v->token[v->n] = dn_strdup(text);
    v->type[v->n] = type;
    return v->n++;
}

/* " word" letter by letter: each new prefix is a token and a merge of the one before with its last letter. */
static void add_word(struct vocabulary *v, const char *word)
{
    char left[64], whole[80], letter[3];
    byte_text(' ', left);
    for (const char *c = word; *c; c++) {
        byte_text((unsigned char)*c, letter);
        snprintf(whole, sizeof whole, "%s%s", left, letter);
        if (find_token(v, whole) < 0) {
            char merge[128];
            add_token(v, whole, 1);
            snprintf(merge, sizeof merge, "%s %s", left, letter);
            v->merge[v->n_merges++] = dn_strdup(merge);
        }
        DN_BUG_ON(strlen(whole) >= sizeof left);
        memcpy(left, whole, strlen(whole) + 1);
    }
    v->likely[find_token(v, left)] = true;
}

static void make_vocabulary(struct vocabulary *v)
{
    add_token(v, "<|endoftext|>", 3);
    add_token(v, "<|im_start|>", 3);
    add_token(v, "<|im_end|>", 3);
    v->likely[IM_END] = true;
    for (unsigned b = 0; b < BYTES; b++) {
        char text[3];
        byte_text(b, text);
        add_token(v, text, 1);
    }
    v->likely[FIRST_BYTE + '.'] = v->likely[FIRST_BYTE + ','] = true;
    for (size_t i = 0; i < N_WORDS; i++)
        add_word(v, WORD[i]);
}

static uint64_t seed_of(const char *name)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (; *name; name++)
        h = (h ^ (uint8_t)*name) * 0x100000001b3u;
    return h;
}

/* Number i of a stream, -128..127 (splitmix64). */
static int draw(uint64_t seed, uint64_t i)
{
    uint64_t z = seed + i + 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (int)((z ^ z >> 31) >> 56) - 128;
}

/* A matrix of multiples of scale / 128: a power of two, so that bf16 holds every value exactly. */
static void write_matrix(struct dn_gguf_writer *w, const char *name, uint32_t n_out, uint32_t n_in, float scale,
                         const bool *row_used)
{
    uint16_t *v = dn_alloc0((size_t)n_out * n_in, sizeof *v);
    uint64_t seed = seed_of(name);
    for (size_t i = 0; i < (size_t)n_out * n_in; i++)
        if (row_used == NULL || row_used[i / n_in])
            v[i] = dn_f32_to_bf16((float)draw(seed, i) / 128 * scale);
    dn_gguf_write_tensor(w, name, DN_TT_BF16, n_out, n_in, v);
    free(v);
}

static void write_norm(struct dn_gguf_writer *w, const char *name)
{
    float v[DIM];
    uint64_t seed = seed_of(name);
    for (int i = 0; i < DIM; i++)
        v[i] = 1 + (float)draw(seed, (uint64_t)i) / 1024;
    dn_gguf_write_tensor(w, name, DN_TT_F32, 0, DIM, v);
}

static void write_weights(struct dn_gguf_writer *w, const struct vocabulary *v)
{
    static const struct {
        const char *name;
        uint32_t n_out, n_in;
        float scale; /* near 1.7 / sqrt(n_in), a power of two */
    } matrix[] = {
        {"attn_q", HEADS * HEAD_DIM, DIM, 0.25f},
        {"attn_k", KV_HEADS * HEAD_DIM, DIM, 0.25f},
        {"attn_v", KV_HEADS * HEAD_DIM, DIM, 0.25f},
        {"attn_output", DIM, HEADS * HEAD_DIM, 0.25f},
        {"ffn_gate", FF, DIM, 0.25f},
        {"ffn_up", FF, DIM, 0.25f},
        {"ffn_down", DIM, FF, 0.125f},
    };
    char name[64];
    write_matrix(w, "token_embd.weight", (uint32_t)v->n, DIM, 1, NULL);
    for (int l = 0; l < LAYERS; l++) {
        snprintf(name, sizeof name, "blk.%d.attn_norm.weight", l);
        write_norm(w, name);
        snprintf(name, sizeof name, "blk.%d.ffn_norm.weight", l);
        write_norm(w, name);
        for (size_t i = 0; i < sizeof matrix / sizeof *matrix; i++) {
            snprintf(name, sizeof name, "blk.%d.%s.weight", l, matrix[i].name);
            write_matrix(w, name, matrix[i].n_out, matrix[i].n_in, matrix[i].scale, NULL);
        }
    }
    write_norm(w, "output_norm.weight");
    /* Zero rows give a logit of 0, far below the best of the others: bytes are read but hardly ever written. */
    write_matrix(w, "output.weight", (uint32_t)v->n, DIM, 1, v->likely);
}

static void write_keys(struct dn_gguf_writer *w, const struct vocabulary *v)
{
    dn_gguf_write_string(w, "general.architecture", "llama");
    dn_gguf_write_string(w, "general.name", DN_TINY_NAME " (random weights)");
    dn_gguf_write_u32(w, "llama.block_count", LAYERS);
    dn_gguf_write_u32(w, "llama.context_length", CONTEXT);
    dn_gguf_write_u32(w, "llama.embedding_length", DIM);
    dn_gguf_write_u32(w, "llama.feed_forward_length", FF);
    dn_gguf_write_u32(w, "llama.attention.head_count", HEADS);
    dn_gguf_write_u32(w, "llama.attention.head_count_kv", KV_HEADS);
    dn_gguf_write_u32(w, "llama.rope.dimension_count", HEAD_DIM);
    dn_gguf_write_f32(w, "llama.rope.freq_base", 10000);
    dn_gguf_write_f32(w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    dn_gguf_write_string(w, "tokenizer.ggml.model", "gpt2");
    dn_gguf_write_string(w, "tokenizer.ggml.pre", "smollm");
    dn_gguf_write_strings(w, "tokenizer.ggml.tokens", (const char *const *)v->token, (uint64_t)v->n);
    dn_gguf_write_i32s(w, "tokenizer.ggml.token_type", v->type, (uint64_t)v->n);
    dn_gguf_write_strings(w, "tokenizer.ggml.merges", (const char *const *)v->merge, v->n_merges);
    dn_gguf_write_u32(w, "tokenizer.ggml.bos_token_id", IM_START);
    dn_gguf_write_u32(w, "tokenizer.ggml.eos_token_id", IM_END);
    dn_gguf_write_u32(w, "tokenizer.ggml.unknown_token_id", ENDOFTEXT);
    dn_gguf_write_u32(w, "tokenizer.ggml.padding_token_id", IM_END);
    dn_gguf_write_bool(w, "tokenizer.ggml.add_bos_token", false);
    dn_gguf_write_bool(w, "tokenizer.ggml.add_space_prefix", false);
    dn_gguf_write_string(w, "tokenizer.chat_template", TEMPLATE);
}

int dn_tiny_write(const char *path, struct dn_err *err)
{
    struct vocabulary *v = dn_alloc0(1, sizeof *v);
    struct dn_gguf_writer w = {0};
    make_vocabulary(v);
    write_keys(&w, v);
    write_weights(&w, v);
    int code = dn_gguf_write_finish(&w, path, err);
    dn_gguf_write_release(&w);
    for (int32_t i = 0; i < v->n; i++)
        free(v->token[i]);
    for (size_t i = 0; i < v->n_merges; i++)
        free(v->merge[i]);
    free(v);
    return code;
}
