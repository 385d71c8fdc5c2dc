/* One number of a checkpoint that is none: the load is refused, and the tensor and the first place are named. */
#include "engine/gguf_write.h"
#include "engine/weights.h"
#include "unit/engine/kimi_tiny.h"

#include <fcntl.h>
#include <math.h>

/* Overwrites bytes of a tensor in the folder's only file. */
static void poke(const char *folder, const char *tensor, size_t at, const void *bytes, size_t n)
{
    char path[128], quoted[224];
    static char text[1 << 24];
    uint64_t n_header;
    unsigned long long begin;
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    snprintf(quoted, sizeof quoted, "\"%s\":", tensor);
    int fd = open(path, O_RDWR);
    ssize_t len = read(fd, text, sizeof text - 1);
    cr_assert_gt(len, 8, "%s", path);
    memcpy(&n_header, text, 8);
    char *entry = memmem(text + 8, (size_t)n_header, quoted, strlen(quoted));
    cr_assert_not_null(entry, "%s", tensor);
    cr_assert_eq(sscanf(strstr(entry, "\"data_offsets\":["), "\"data_offsets\":[%llu", &begin), 1);
    cr_assert_eq(pwrite(fd, bytes, n, (off_t)(8 + n_header + begin + at)), (ssize_t)n);
    close(fd);
}

/* Loads a model on the CPU; the whole error, or "". */
static const char *load(const char *path, int format, unsigned n_threads)
{
    static struct dn_err err;
    struct dn_model *m = NULL;
    struct dn_device *d;
    struct dn_weights *w = NULL;
    const struct dn_device_conf dc = {
        .n_threads = 1, .limits = {.tokens = 1, .seqs = 1, .rows = 1, .pages = 1}, .n_slots = 1, .n_vocab = KIMI_VOCAB};
    err = (struct dn_err){0};
    cr_assert_eq(dn_model_open(path, &m, &err), 0, "%s", err.text);
    cr_assert_eq(dn_kernels_open_cpu(&dc, &d, &err), 0, "%s", err.text);
    int code = dn_weights_open(d, m, &(struct dn_weights_conf){.format = format, .n_threads = n_threads}, &w, &err);
    cr_expect_eq(code, err.text[0] ? -DN_MODEL_FILE : 0);
    dn_weights_close(w);
    d->ops->close(d);
    dn_model_close(m);
    return err.text;
}

#define QNAN16 "\xc0\x7f"
#define INF16  "\x80\xff"
#define INF32  "\0\0\x80\x7f"
#define NAN32  "\1\0\x80\xff" /* a signalling one */

Test(weights_check, the_tensor_and_the_first_place_are_named)
{
    static const struct {
        int kind;
        const char *tensor; /* without the prefix */
        size_t at;
        const char *bytes;
        size_t n;
        const char *text;
    } bad[] = {
        {0, "model.embed_tokens.weight", 2 * (5 * 128 + 7), QNAN16, 2, "value [5][7] is NaN"},
        {0, "model.layers.1.mlp.experts.3.up_proj.weight", 2 * (127 * 128 + 127), INF16, 2,
         "value [127][127] is infinite"},
        {0, "model.layers.2.self_attn.kv_b_proj.weight", 2 * (200 * 64 + 1), QNAN16, 2, "value [200][1] is NaN"},
        {0, "model.layers.1.mlp.gate.weight", 0, INF16, 2, "value [0][0] is infinite"},
        {0, "model.layers.1.mlp.gate.e_score_correction_bias", 4 * 9, NAN32, 4, "value [9] is NaN"},
        {0, "model.layers.1.mlp.gate.e_score_correction_bias", 4 * 15, INF32, 4, "value [15] is infinite"},
        {0, "model.norm.weight", 2 * 3, INF16, 2, "value [3] is infinite"},
        {0, "model.layers.0.input_layernorm.weight", 2 * 127, QNAN16, 2, "value [127] is NaN"},
        {0, "model.layers.2.post_attention_layernorm.weight", 0, QNAN16, 2, "value [0] is NaN"},
        {0, "model.layers.2.self_attn.q_a_layernorm.weight", 2, QNAN16, 2, "value [1] is NaN"},
        {0, "model.layers.2.self_attn.kv_a_layernorm.weight", 2 * 63, QNAN16, 2, "value [63] is NaN"},
        {1, "model.layers.1.mlp.experts.15.down_proj.weight", 3 * 128 + 2, "\x7f", 1, "value [3][2] is NaN"},
        {1, "model.layers.0.self_attn.kv_b_proj.weight", 383 * 64, "\xff", 1, "value [383][0] is NaN"},
        {1, "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv", 0, NAN32, 4, "value [0][0] is NaN"},
        {1, "model.layers.0.mlp.gate_proj.weight_scale_inv", 4, INF32, 4, "value [1][0] is infinite"},
        {2, "model.layers.2.mlp.experts.15.down_proj.weight_scale", 2 * (4 * 127 + 3), INF16, 2,
         "value [127][3] is infinite"},
        {4, "model.layers.0.self_attn.q_proj.weight_scale", 2 * 6, QNAN16, 2, "value [1][2] is NaN"},
    };
    char want[512];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const struct kimi_kind *k = &KIMI_KIND[bad[i].kind];
        const char *folder = kimi_checkpoint(k, (struct kimi_fault){0}), *prefix = k->wrapped ? "language_model." : "";
        char name[192];
        snprintf(name, sizeof name, "%s%s", prefix, bad[i].tensor);
        cr_expect_str_eq(load(folder, DN_WEIGHTS_AUTO, 2), "", "case %zu", i);
        poke(folder, name, bad[i].at, bad[i].bytes, bad[i].n);
        snprintf(want, sizeof want, "%s: tensor \"%s\": %s, expected a number", folder, name, bad[i].text);
        for (int format = DN_WEIGHTS_AUTO; format < DN_W_FORMATS; format++)
            cr_expect_str_eq(load(folder, format, 1 + i % 3), want, "case %zu, format %d", i, format);
        tiny_remove(folder);
    }
}

/* Of several it is the first, however many threads look. */
Test(weights_check, the_first_of_several_is_named)
{
    const char *folder = kimi_checkpoint(&KIMI_KIND[5], (struct kimi_fault){0});
    for (unsigned e = 40; e < 1024; e += 7) {
        char name[128];
        snprintf(name, sizeof name, "model.layers.2.mlp.experts.%u.up_proj.weight", e);
        poke(folder, name, 2 * (31 - e % 5), QNAN16, 2);
        poke(folder, name, 2 * (64 + e % 5), QNAN16, 2);
    }
    char want[512];
    snprintf(want, sizeof want,
             "%s: tensor \"model.layers.2.mlp.experts.40.up_proj.weight\": value [0][31] is NaN, expected a number",
             folder);
    for (int i = 0; i < 8; i++)
        cr_expect_str_eq(load(folder, DN_WEIGHTS_AUTO, 8), want);
    tiny_remove(folder);
}

/* ---- GGUF -------------------------------------------------------------------------------------------------------- */

enum { DIM = 256, VOCAB = 160, DIVISORS = 32 };
static uint8_t zero[VOCAB * DIM * 2];

/* A model of one type whose ffn_gate has two bytes of another value; divisors of the rotary embedding, or NULL. */
static const char *write_gguf(enum dn_tensor_type t, size_t at, uint16_t value, const float *divisor)
{
    static char path[64];
    static const char *const matrix[] = {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_up", "ffn_down"};
    struct dn_gguf_writer w = {0};
    struct dn_err err = {0};
    float ones[DIM];
    for (int i = 0; i < DIM; i++)
        ones[i] = 1;
    snprintf(path, sizeof path, "/tmp/dn_check_test.%ld.gguf", (long)getpid());
    dn_gguf_write_string(&w, "general.architecture", "llama");
    dn_gguf_write_u32(&w, "llama.block_count", 1);
    dn_gguf_write_u32(&w, "llama.context_length", 512);
    dn_gguf_write_u32(&w, "llama.embedding_length", DIM);
    dn_gguf_write_u32(&w, "llama.feed_forward_length", DIM);
    dn_gguf_write_u32(&w, "llama.attention.head_count", 4);
    dn_gguf_write_f32(&w, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    dn_gguf_write_tensor(&w, "token_embd.weight", DN_TT_BF16, VOCAB, DIM, zero);
    dn_gguf_write_tensor(&w, "output_norm.weight", DN_TT_F32, 0, DIM, ones);
    dn_gguf_write_tensor(&w, "blk.0.attn_norm.weight", DN_TT_F32, 0, DIM, ones);
    dn_gguf_write_tensor(&w, "blk.0.ffn_norm.weight", DN_TT_F32, 0, DIM, ones);
    for (size_t k = 0; k < sizeof matrix / sizeof *matrix; k++) {
        char name[64];
        snprintf(name, sizeof name, "blk.0.%s.weight", matrix[k]);
        dn_gguf_write_tensor(&w, name, t, DIM, DIM, zero);
    }
    memcpy(zero + at, &value, 2);
    dn_gguf_write_tensor(&w, "blk.0.ffn_gate.weight", t, DIM, DIM, zero);
    memset(zero + at, 0, 2);
    if (divisor)
        dn_gguf_write_tensor(&w, "rope_freqs.weight", DN_TT_F32, 0, DIVISORS, divisor);
    cr_assert_eq(dn_gguf_write_finish(&w, path, &err), 0, "%s", err.text);
    dn_gguf_write_release(&w);
    return path;
}

/* GGUF's blocks have their scales between the values. */
Test(weights_check, scales_within_blocks)
{
    static const struct {
        enum dn_tensor_type type;
        size_t at; /* in a block */
        const char *what;
    } bad[] = {{DN_TT_Q4_0, 0, "scale"}, {DN_TT_Q4_1, 0, "scale"},  {DN_TT_Q4_1, 2, "offset"}, {DN_TT_Q8_0, 0, "scale"},
               {DN_TT_Q4_K, 0, "scale"}, {DN_TT_Q4_K, 2, "offset"}, {DN_TT_Q6_K, 208, "scale"}};
    char want[256];
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        const struct dn_tensor_type_info *info = dn_tensor_type_info(bad[i].type);
        bool small = info->block_values < DIM;
        size_t block = (size_t)3 * (DIM / info->block_values) + small; /* of row 3 */
        const char *path = write_gguf(bad[i].type, 0, 0, NULL);
        cr_expect_str_eq(load(path, DN_WEIGHTS_AUTO, 2), "", "case %zu", i);
        path = write_gguf(bad[i].type, block * info->block_bytes + bad[i].at, 0xfc00, NULL);
        snprintf(want, sizeof want,
                 "%s: tensor \"blk.0.ffn_gate.weight\": %s of the block at [3][%u] is infinite, expected a number",
                 path, bad[i].what, small ? info->block_values : 0);
        cr_expect_str_eq(load(path, DN_WEIGHTS_AUTO, 2), want, "case %zu", i);
        unlink(path);
    }
}

Test(weights_check, divisors_of_the_rotary_embedding)
{
    static const struct {
        float value;
        const char *text;
    } c[] = {{8, ""},
             {0, ": tensor \"rope_freqs.weight\": value [31] is 0, expected more than 0"},
             {-1, ": tensor \"rope_freqs.weight\": value [31] is -1, expected more than 0"},
             {NAN, ": tensor \"rope_freqs.weight\": value [31] is NaN, expected a number"},
             {INFINITY, ": tensor \"rope_freqs.weight\": value [31] is infinite, expected a number"}};
    for (size_t i = 0; i < sizeof c / sizeof *c; i++) {
        float divisor[DIVISORS];
        char want[256] = "";
        for (int k = 0; k < DIVISORS; k++)
            divisor[k] = k == DIVISORS - 1 ? c[i].value : 1;
        const char *path = write_gguf(DN_TT_Q8_0, 0, 0, divisor);
        if (c[i].text[0])
            snprintf(want, sizeof want, "%s%s", path, c[i].text);
        cr_expect_str_eq(load(path, DN_WEIGHTS_AUTO, 1), want);
        unlink(path);
    }
}
