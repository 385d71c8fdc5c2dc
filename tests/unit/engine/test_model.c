#include "engine/model.h"

#include "engine/gguf_write.h"
#include "engine/safetensors.h"
#include "engine/tiny.h"
#include "engine/tokenizer.h"
#include "unit/engine/tiny_checkpoint.h"

#include <math.h>

Test(model, a_checkpoint_folder_is_described)
{
    const char *folder = tiny_checkpoint(&TINY_KIND[1], 2, DN_TT_BF16, "");
    struct dn_model *m;
    struct dn_err err = {0};
    struct dn_buf b = {0};
    dn_buf_puts(&b, "{\"eos_token_id\": 7}");
    tiny_file(folder, "generation_config.json", &b);
    dn_buf_clear(&b);
    dn_buf_puts(&b, "{\"model_max_length\":1000000000000000019884624838656,\"chat_template\":[{\"name\":\"tool_use\","
                    "\"template\":\"T\"},{\"name\":\"default\",\"template\":"
                    "\"D{{ x }}\"}]}");
    tiny_file(folder, "tokenizer_config.json", &b);
    cr_assert_eq(dn_model_open(folder, &m, &err), 0, "%s", err.text);
    const struct dn_hyper *h = &m->hyper;
    cr_assert(h->arch == DN_ARCH_LLAMA && h->n_layers == 2 && h->dim == 96 && h->ff_dim == 192 && h->n_heads == 3);
    cr_assert(h->n_kv_heads == 1 && h->head_dim == 32 && h->rotary_dim == 32 && h->n_vocab == 256 &&
              h->context_tokens == 512);
    cr_assert(!h->tied_head && !h->rope_interleaved && !h->qkv_bias && !h->qk_norm && h->rope_llama3);
    cr_assert(m->n_eos == 3 && m->eos_id[0] == 2 && m->eos_id[1] == 5 && m->eos_id[2] == 7);
    cr_assert_eq(m->bos_id, 1);
    cr_assert_str_eq(m->chat_template, "D{{ x }}");
    cr_assert_str_eq(m->chat_template_from, "tokenizer_config.json");
    cr_assert_str_eq(m->type_text, "safetensors BF16");
    cr_assert_not_null(m->tokenizer_config);
    cr_assert_null(m->tokenizer_json);
    cr_assert_eq(m->n_params, 256u * 96 * 2 + 96 + 2u * (96 * 2 + 96 * 96 + 2 * 32 * 96 + 96 * 96 + 3 * 96 * 192));
    cr_assert_eq(dn_model_kv_bytes(m, false), 2u * 2 * 32 * 2);
    cr_assert_eq(dn_model_kv_bytes(m, true), 2u * 2 * (32 + 4));
    dn_model_close(m);
    dn_buf_clear(&b);
    dn_buf_puts(&b, "from a file");
    tiny_file(folder, "chat_template.jinja", &b);
    cr_assert_eq(dn_model_open(folder, &m, &err), 0, "%s", err.text);
    cr_assert_str_eq(m->chat_template, "from a file");
    cr_assert_str_eq(m->name, folder + 5);
    dn_model_close(m);
    char path[64];
    snprintf(path, sizeof path, "%s/.", folder);
    cr_assert_eq(dn_model_open(path, &m, &err), 0, "%s", err.text);
    cr_assert_str_eq(m->name, folder + 5, "\"%s\" is the folder's own name, not the path's last part", m->name);
    dn_model_close(m);
    dn_buf_release(&b);
    tiny_remove(folder);
}

/* A tokenizer of "a" and "b", the ids that end a text (2 and 5), and what a test adds. */
#define TOKENIZER(vocab, added)                                                                                        \
    "{\"pre_tokenizer\":{\"type\":\"ByteLevel\"},\"decoder\":{\"type\":\"ByteLevel\"},\"added_tokens\":[" added        \
    "],\"model\":{\"type\":\"BPE\",\"vocab\":{\"a\":0,\"b\":1" vocab "},\"merges\":[]}}"
#define END2       "{\"id\":2,\"content\":\"<end>\",\"special\":true}"
#define END5       "{\"id\":5,\"content\":\"<turn>\",\"special\":true}"
#define BOTH_ENDS  END2 "," END5
#define CONFIG(in) "{\"added_tokens_decoder\":{" in "}}"

static void put_text(const char *folder, const char *name, const char *text)
{
    struct dn_buf b = {0};
    dn_buf_puts(&b, text);
    tiny_file(folder, name, &b);
    dn_buf_release(&b);
}

/* Opens the tokenizer of a checkpoint; text: what the error ends with, NULL for none. config may be NULL. */
static void open_tokenizer(const char *name, const char *tokenizer, const char *config, const char *text)
{
    const char *folder = tiny_checkpoint(&TINY_KIND[1], 1, DN_TT_BF16, "");
    struct dn_model *m;
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    put_text(folder, name, tokenizer);
    if (config)
        put_text(folder, "tokenizer_config.json", config);
    cr_assert_eq(dn_model_open(folder, &m, &err), 0, "%s", err.text);
    int rc = dn_model_open_tokenizer(m, &t, &err);
    cr_expect_eq(rc, text ? -DN_MODEL_FILE : 0, "%d, \"%s\", expected \"%s\"", rc, err.text, text ? text : "");
    if (text) {
        size_t n = strlen(err.text), k = strlen(text);
        cr_expect(n >= k && strcmp(err.text + n - k, text) == 0, "\"%s\", expected \"%s\"", err.text, text);
        cr_expect_eq(strncmp(err.text, folder, strlen(folder)), 0, "\"%s\" begins with the path", err.text);
    }
    if (rc == 0)
        dn_tokenizer_close(t);
    dn_model_close(m);
    tiny_remove(folder);
}

/* What a client's text becomes is looked up in the embedding table. */
Test(model, a_tokenizer_with_ids_beyond_the_embedding_is_refused)
{
    open_tokenizer("tokenizer.json", TOKENIZER(",\"c\":255", BOTH_ENDS), NULL, NULL);
    open_tokenizer("tokenizer.json", TOKENIZER(",\"c\":256", BOTH_ENDS), NULL,
                   ": the tokenizer has ids up to 256, but the embedding table has only 256 rows");
    open_tokenizer("tokenizer.json", TOKENIZER("", BOTH_ENDS ",{\"id\":256,\"content\":\"<x>\"}"), NULL,
                   ": the tokenizer has ids up to 256, but the embedding table has only 256 rows");
}

/* Else control tokens are text, a turn never ends, and the model talks nonsense. */
Test(model, what_ends_a_text_must_be_a_token_of_its_own)
{
    open_tokenizer("tokenizer.json", TOKENIZER("", END2), NULL,
                   ": end-of-text id 5 has no token: the tokenizer is not this model's, or a file of it is missing");
    open_tokenizer("tokenizer.json", TOKENIZER("", ""), NULL,
                   ": end-of-text id 2 has no token: the tokenizer is not this model's, or a file of it is missing");
    open_tokenizer("tokenizer.json", TOKENIZER(",\"<turn>\":5", END2), NULL,
                   ": end-of-text id 5 is plain text to the tokenizer, \"<turn>\", expected one of its added tokens");
    open_tokenizer("tokenizer.json", TOKENIZER(",\"<turn>\":5", END2), "{\"bos_token\":\"<end>\"}",
                   ": end-of-text id 5 is plain text to the tokenizer, \"<turn>\", expected one of its added tokens");
    open_tokenizer("tokenizer.json", TOKENIZER(",\"<turn>\":5", BOTH_ENDS), NULL, NULL);
    open_tokenizer("tokenizer.json", TOKENIZER(",\"<turn>\":5", END2), "{\"eos_token\":\"<turn>\"}", NULL);
}

Test(model, files_of_a_tokenizer_must_agree)
{
    static const char *const config[][2] = {
        {CONFIG("\"2\":{\"content\":\"<end>\"},\"5\":{\"content\":\"<turn>\"}"), NULL},
        {CONFIG("\"2\":{\"content\":\"<END>\"}"), "token 2 is \"<END>\", but in tokenizer.json \"<end>\""},
        {CONFIG("\"7\":{\"content\":\"<tool>\"}"),
         "token 7 is \"<tool>\", which tokenizer.json has not among its added_tokens"},
        {CONFIG("\"1\":{\"content\":\"b\"}"), "token 1 is \"b\", which tokenizer.json has not among its added_tokens"},
        {CONFIG("\"99999999999\":{\"content\":\"b\"}"),
         "token 99999999999 is \"b\", which tokenizer.json has not among its added_tokens"},
        {CONFIG("\"2\":{}"), "added token 2: content is missing"},
        {"{\"eos_token\":\"<|im_end|>\"}", "eos_token \"<|im_end|>\" is not in the vocabulary"},
        {"{\"bos_token\":{\"content\":\"<s>\"}}", "bos_token \"<s>\" is not in the vocabulary"},
        {"{\"eos_token\":\"<turn>\",\"bos_token\":null,\"pad_token\":\"<pad>\"}", NULL}};
    for (size_t i = 0; i < sizeof config / sizeof *config; i++)
        open_tokenizer("tokenizer.json", TOKENIZER("", BOTH_ENDS), config[i][0], config[i][1]);
    open_tokenizer("tokenizer.json", TOKENIZER("", BOTH_ENDS ",{\"id\":0,\"content\":\"<x>\"}"), NULL,
                   "added token 0 is \"<x>\", but the vocabulary has \"a\" there");
    open_tokenizer("tokenizer.json", TOKENIZER("", BOTH_ENDS ",{\"id\":5,\"content\":\"<x>\"}"), NULL,
                   "added token 5 is \"<x>\", but the vocabulary has \"<turn>\" there");
    open_tokenizer("tokenizer.json", TOKENIZER("", BOTH_ENDS ",{\"id\":6,\"content\":\"<turn>\"}"), NULL,
                   "added token 6 is \"<turn>\", and so is 5");
    /* In the vocabulary's own spelling: 0xC4 0xA0 is a blank. */
    open_tokenizer("tokenizer.json", TOKENIZER(",\"\u0120\":3", BOTH_ENDS ",{\"id\":3,\"content\":\" \"}"), NULL, NULL);
}

/* tiktoken.model holds no control tokens at all. */
Test(model, tiktoken_needs_the_config_with_its_control_tokens)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    struct dn_buf ranks = {0};
    for (int b = 0; b < 256; b++)
        dn_buf_printf(&ranks, "%c%c== %d\n", digit[b >> 2], digit[(b & 3) << 4], b);
    open_tokenizer("tiktoken.model", dn_buf_str(&ranks), NULL,
                   ": tokenizer_config.json is missing, which names the control tokens of tiktoken.model");
    open_tokenizer("tiktoken.model", dn_buf_str(&ranks), "{\"model_max_length\":100}",
                   "added_tokens_decoder is missing: control tokens would be plain text");
    open_tokenizer("tiktoken.model", dn_buf_str(&ranks), CONFIG(""),
                   ": end-of-text id 2 is plain text to the tokenizer, \"?\", expected one of its added tokens");
    open_tokenizer("tiktoken.model", dn_buf_str(&ranks), CONFIG("\"256\":{\"content\":\"[EOS]\"}"),
                   ": the tokenizer has ids up to 256, but the embedding table has only 256 rows");
    dn_buf_release(&ranks);
}

/* Of generation_config.json, too. */
Test(model, ids_that_end_a_text_are_within_the_vocabulary)
{
    static const char *const text[][2] = {
        {"{\"eos_token_id\":[2,256]}", ": end-of-text id 256 outside the vocabulary of 256"},
        {"{\"eos_token_id\":-1}", "generation_config.json: \"eos_token_id\""},
        {"{\"eos_token_id\":\"x\"}", "generation_config.json: \"eos_token_id\""},
        {"{\"eos_token_id\":2097153}", "generation_config.json: \"eos_token_id\""}};
    for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
        const char *folder = tiny_checkpoint(&TINY_KIND[1], 1, DN_TT_BF16, "");
        struct dn_model *m = NULL;
        struct dn_err err = {0};
        put_text(folder, "generation_config.json", text[i][0]);
        cr_expect_eq(dn_model_open(folder, &m, &err), -DN_MODEL_FILE);
        cr_expect(strstr(err.text, text[i][1]) != NULL, "\"%s\", expected \"%s\" in it", err.text, text[i][1]);
        tiny_remove(folder);
    }
}

/* The golden numbers of Llama 3.1's scaling for head 64, theta 500000, factor 8, 1..4, 8192 by transformers' own
 * function. */
Test(model, llama3_frequencies)
{
    struct dn_model m = {.hyper = {.rotary_dim = 64,
                                   .rope_theta = 500000,
                                   .rope_llama3 = true,
                                   .rope_factor = 8,
                                   .rope_low = 1,
                                   .rope_high = 4,
                                   .rope_original = 8192}};
    static const struct {
        int i;
        double inv_freq;
    } want[] = {{0, 1},
                {1, 0.663601279},
                {8, 0.0376060307},
                {12, 0.00729266508},
                {14, 0.00321144611},
                {15, 0.00137189368},
                {16, 0.000524846022},
                {17, 0.000178507791},
                {18, 7.78465546e-05},
                {20, 3.42810235e-05},
                {24, 6.64786967e-06},
                {31, 3.7673226e-07}};
    double f[32];
    dn_model_rope_freqs(&m, f);
    for (size_t i = 0; i < sizeof want / sizeof *want; i++)
        cr_expect_float_eq(f[want[i].i], want[i].inv_freq, 2e-6 * want[i].inv_freq, "%d: %.9g", want[i].i,
                           f[want[i].i]);
}

static void refused(const struct tiny_kind *k, const char *extra, const char *text)
{
    const char *folder = tiny_checkpoint(k, 1, DN_TT_BF16, extra);
    struct dn_model *m = NULL;
    struct dn_err err = {0};
    cr_expect_eq(dn_model_open(folder, &m, &err), -DN_MODEL_FILE, "%s", extra);
    cr_expect(strstr(err.text, text) != NULL, "\"%s\", expected \"%s\" in it", err.text, text);
    cr_expect_eq(strncmp(err.text, folder, strlen(folder)), 0, "\"%s\" begins with the path", err.text);
    dn_model_close(m);
    tiny_remove(folder);
}

static struct tiny_kind changed(const char *arch, const char *rope)
{
    struct tiny_kind k = TINY_KIND[0];
    k.arch = arch ? arch : k.arch;
    k.rope = rope ? rope : k.rope;
    return k;
}

Test(model, what_the_forward_pass_does_not_know_is_refused_by_name)
{
    struct tiny_kind k = changed("gemma3", NULL);
    refused(&k, "", "config.json: architecture \"gemma3\" is not supported, expected one of llama, qwen2, qwen3");
    k = changed(NULL, "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0}");
    refused(&k, "", "rope scaling \"yarn\" is not supported for this architecture, expected default or llama3");
    k = changed(NULL, "\"rope_parameters\":{\"rope_type\":\"llama3\",\"rope_theta\":1e4,\"factor\":8.0}");
    refused(&k, "", "rope scaling llama3: \"low_freq_factor\" is missing");
    k = changed(NULL, "\"rope_scaling\":{\"factor\":8.0,\"low_freq_factor\":1.0}");
    refused(&k, "", "rope scaling: \"factor\" is there, but no \"rope_type\"");
    k = changed(NULL, "\"rope_theta\":1e4,\"rope_scaling\":{\"rope_type\":\"default\",\"factor\":8.0}");
    refused(&k, "", "rope scaling default: \"factor\" is not known");
    k = changed(NULL,
                "\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":1e4,\"partial_rotary_factor\":0.5}");
    refused(&k, "", "\"partial_rotary_factor\": 0.5 is not supported");
    refused(&TINY_KIND[0], ",\"attention_bias\":true", "\"attention_bias\": true is not supported");
    refused(&TINY_KIND[2], ",\"use_sliding_window\":true", "\"use_sliding_window\": true is not supported");
    refused(&TINY_KIND[0], ",\"quantization_config\":{}", "\"quantization_config\"");
    k = changed("qwen2", NULL);
    refused(&k, "", "tensor \"model.layers.0.self_attn.q_proj.bias\" is missing");
    k = changed("qwen3", NULL);
    refused(&k, "", "tensor \"model.layers.0.self_attn.q_norm.weight\" is missing");
    k = TINY_KIND[2];
    k.arch = "llama";
    refused(&k, "", "self_attn.k_proj.bias\" is not one of a llama model of 2 layers");
    k = TINY_KIND[3];
    k.head_dim = 47;
    refused(&k, "", "heads of 47 values, expected an even number");
}

/* Both forms in one folder: the index decides, and the other file is named. */
Test(model, a_file_that_the_index_leaves_out_is_noted)
{
    const char *other = tiny_checkpoint(&TINY_KIND[1], 1, DN_TT_F32, "");
    char from[64], to[64];
    struct dn_model *m;
    struct dn_err err = {0};
    snprintf(from, sizeof from, "%s/model.safetensors", other);
    char other_folder[64];
    snprintf(other_folder, sizeof other_folder, "%s", other);
    const char *folder = tiny_checkpoint(&TINY_KIND[1], 2, DN_TT_BF16, "");
    cr_assert_eq(dn_model_open(folder, &m, &err), 0, "%s", err.text);
    cr_expect_null(m->note);
    dn_model_close(m);
    snprintf(to, sizeof to, "%s/model.safetensors", folder);
    cr_assert_eq(rename(from, to), 0);
    cr_assert_eq(dn_model_open(folder, &m, &err), 0, "%s", err.text);
    cr_expect_str_eq(m->note, "model.safetensors is not used: model.safetensors.index.json names other files");
    cr_expect_str_eq(m->type_text, "safetensors BF16");
    dn_model_close(m);
    /* An index of that one file. */
    struct dn_buf b = {0};
    const struct dn_tensor *t;
    cr_assert_eq(rename(to, from), 0);
    cr_assert_eq(dn_model_open(other_folder, &m, &err), 0, "%s", err.text);
    dn_buf_puts(&b, "{\"weight_map\":{");
    for (size_t i = 0; i < m->safetensors->n_tensors; i++) {
        t = &m->safetensors->tensor[i];
        dn_buf_printf(&b, "%s\"%s\":\"model.safetensors\"", i ? "," : "", t->name);
    }
    dn_buf_puts(&b, "}}");
    dn_model_close(m);
    tiny_file(other_folder, "model.safetensors.index.json", &b);
    dn_buf_release(&b);
    cr_assert_eq(dn_model_open(other_folder, &m, &err), 0, "%s", err.text);
    cr_expect_null(m->note);
    dn_model_close(m);
    tiny_remove(folder);
    tiny_remove(other_folder);
}

/* A checkpoint that is written with its head, though config.json ties it. */
Test(model, a_tied_head_that_is_no_copy_is_refused)
{
    struct tiny_kind k = TINY_KIND[1];
    struct dn_model *m = NULL;
    struct dn_err err = {0};
    for (int copy = 0; copy < 2; copy++) {
        const char *folder = tiny_checkpoint(&k, 1, DN_TT_BF16, ""); /* with a head */
        char path[64];
        static char text[1 << 22];
        snprintf(path, sizeof path, "%s/config.json", folder);
        FILE *f = fopen(path, "r+");
        size_t n = fread(text, 1, sizeof text - 1, f);
        text[n] = '\0';
        char *at = strstr(text, "\"tie_word_embeddings\":false");
        cr_assert_not_null(at);
        memcpy(at, "\"tie_word_embeddings\": true", 27);
        rewind(f);
        fwrite(text, 1, n, f);
        fclose(f);
        if (copy) { /* the embedding's bytes over the head's */
            unsigned long long embed, head;
            uint64_t n_header;
            snprintf(path, sizeof path, "%s/model.safetensors", folder);
            f = fopen(path, "r+");
            n = fread(text, 1, sizeof text, f);
            memcpy(&n_header, text, 8);
            at = memmem(text, n, "\"model.embed_tokens.weight\"", 27);
            cr_assert_eq(sscanf(strstr(at, "offsets"), "offsets\":[%llu", &embed), 1);
            at = memmem(text, n, "\"lm_head.weight\"", 16);
            cr_assert_eq(sscanf(strstr(at, "offsets"), "offsets\":[%llu", &head), 1);
            fseek(f, (long)(8 + n_header + head), SEEK_SET);
            fwrite(text + 8 + n_header + embed, 1, 2 * TINY_VOCAB * TINY_DIM, f);
            fclose(f);
        }
        cr_expect_eq(dn_model_open(folder, &m, &err), copy ? 0 : -DN_MODEL_FILE, "%s", err.text);
        if (copy) {
            cr_expect(m->hyper.tied_head && m->n_ignored == 1);
            dn_model_close(m);
        } else {
            cr_expect(strstr(err.text, ": tensor \"lm_head.weight\" is not a copy of \"model.embed_tokens.weight\""),
                      "%s", err.text);
        }
        tiny_remove(folder);
    }
}

/* ---- GGUF -------------------------------------------------------------------------------------------------------- */

/* The tiny model's file, changed in place: as long as before, so that nothing moves. */
static void patched(const char *find, size_t len, const char *with, const char *text)
{
    char path[64];
    struct dn_err err = {0};
    struct dn_model *m = NULL;
    snprintf(path, sizeof path, "/tmp/dn_model_test.%ld.gguf", (long)getpid());
    cr_assert_eq(dn_tiny_write(path, &err), 0, "%s", err.text);
    FILE *f = fopen(path, "r+b");
    static char bytes[1 << 19];
    size_t n = fread(bytes, 1, sizeof bytes, f);
    char *at = memmem(bytes, n, find, len);
    cr_assert_not_null(at, "%s", find);
    fseek(f, at - bytes, SEEK_SET);
    fwrite(with, 1, len, f);
    fclose(f);
    cr_expect_eq(dn_model_open(path, &m, &err), -DN_MODEL_FILE, "%s", with);
    cr_expect(strstr(err.text, text) != NULL, "\"%s\", expected \"%s\" in it", err.text, text);
    unlink(path);
}

Test(model, gguf_tensors_are_all_known_and_all_there)
{
    patched("blk.1.ffn_up.weight", 19, "blk.2.ffn_up.weight", "tensor \"blk.1.ffn_up.weight\" is missing");
    patched("llama.block_count", 17, "llama.block_cuont", "key \"llama.block_count\" is missing");
    patched("\x0d\0\0\0\0\0\0\0output.weight", 21, "\x0d\0\0\0\0\0\0\0outpud.weight",
            "tensor \"outpud.weight\" is not one of a llama model of 2 layers");
    patched("general.architecture", 20, "general.architecturf", "key \"general.architecture\" is missing");
}

Test(model, gguf_values_are_checked)
{
    static const struct {
        const char *key;
        uint32_t value;
        const char *text;
    } bad[] = {
        {"llama.block_count", 1025, "\"llama.block_count\": 1025, expected 1 to 1024"},
        {"llama.block_count", 0, "\"llama.block_count\": 0, expected 1 to 1024"},
        {"llama.block_count", 1, "is not one of a llama model of 1 layers"},
        {"llama.embedding_length", 128, "rotary embedding of 16 of 32 values a head"},
        {"llama.feed_forward_length", 64, "tensor \"blk.0.ffn_gate.weight\": shape [128][64], expected [64][64]"},
        {"llama.attention.head_count_kv", 3, "4 heads over 3 KV heads, expected a multiple"},
        {"llama.attention.head_count_kv", 4, "tensor \"blk.0.attn_k.weight\": shape [32][64], expected [64][64]"},
        {"llama.attention.head_count", 0, "\"llama.attention.head_count\": 0, expected 1 to"},
        {"llama.rope.dimension_count", 8, "rotary embedding of 8 of 16 values a head"},
        {"tokenizer.ggml.eos_token_id", 9999, "end-of-text id 9999 outside the vocabulary"},
    };
    char path[64];
    static char bytes[1 << 19];
    snprintf(path, sizeof path, "/tmp/dn_model_test.%ld.gguf", (long)getpid());
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct dn_err err = {0};
        struct dn_model *m = NULL;
        cr_assert_eq(dn_tiny_write(path, &err), 0, "%s", err.text);
        FILE *f = fopen(path, "r+b");
        size_t n = fread(bytes, 1, sizeof bytes, f), len = strlen(bad[i].key);
        /* A key ends where its type (u32 = 4) begins: head_count is a prefix of head_count_kv. */
        char want[64];
        memcpy(want, bad[i].key, len);
        memcpy(want + len, "\x04\0\0\0", 4);
        char *at = memmem(bytes, n, want, len + 4);
        cr_assert_not_null(at);
        fseek(f, at - bytes + (long)len + 4, SEEK_SET);
        fwrite(&bad[i].value, 4, 1, f);
        fclose(f);
        cr_expect_eq(dn_model_open(path, &m, &err), -DN_MODEL_FILE, "%s = %u", bad[i].key, bad[i].value);
        cr_expect(strstr(err.text, bad[i].text) != NULL, "\"%s\", expected \"%s\" in it", err.text, bad[i].text);
        dn_model_close(m);
    }
    unlink(path);
}
