#include "engine/model.h"
#include "unit/engine/kimi_tiny.h"

#include <math.h>

/* ---- YaRN -------------------------------------------------------------------------------------------------------- */

static struct dn_model yarn(double factor, double fast, double slow)
{
    return (struct dn_model){.hyper = {.rotary_dim = 64,
                                       .head_dim = 192,
                                       .rope_theta = 50000,
                                       .rope_yarn = true,
                                       .rope_factor = factor,
                                       .rope_original = 4096,
                                       .rope_beta_fast = fast,
                                       .rope_beta_slow = slow,
                                       .rope_mscale = 1,
                                       .rope_mscale_all_dim = 1}};
}

struct golden {
    int i;
    double inv_freq;
};

static void check_frequencies(const struct dn_model *m, const struct golden *want, size_t n)
{
    double f[32];
    dn_model_rope_freqs(m, f);
    for (size_t i = 0; i < n; i++)
        cr_expect_float_eq(f[want[i].i], want[i].inv_freq, 2e-8 * want[i].inv_freq, "%d: %.9g, expected %.9g",
                           want[i].i, f[want[i].i], want[i].inv_freq);
}

/* Kimi K2.5 (betas 32 and 1), K2-0905 (1 and 1: a step) and K2-Instruct (factor 32): by hand from the formulas of
 * DeepSeek-V3, heads of 128 + 64. */
Test(model_kimi, yarn_has_its_golden_numbers)
{
    struct dn_model m = yarn(64, 32, 1);
    check_frequencies(&m,
                      (const struct golden[]){{0, 1},
                                              {1, 0.713111085},
                                              {8, 0.0668740305},
                                              {9, 0.043776656},
                                              {14, 0.00446584875},
                                              {19, 0.000158374991},
                                              {20, 1.80702339e-05},
                                              {31, 4.38220646e-07}},
                      8);
    cr_expect_float_eq(dn_hyper_attention_scale(&m.hyper), 0.14467962580268923, 1e-16);
    cr_expect_eq(dn_hyper_rope_magnitude(&m.hyper), 1);
    m = yarn(64, 1, 1);
    check_frequencies(
        &m,
        (const struct golden[]){
            {9, 0.0476886124}, {14, 0.00879428677}, {19, 0.00162175991}, {20, 1.80702339e-05}, {31, 4.38220646e-07}},
        5);
    m = yarn(32, 1, 1);
    check_frequencies(&m, (const struct golden[]){{20, 3.61404677e-05}, {31, 8.76441291e-07}}, 2);
    cr_expect_float_eq(dn_hyper_attention_scale(&m.hyper), 0.13086079996295005, 1e-16);
    m.hyper.rope_yarn = false;
    cr_expect_float_eq(dn_hyper_attention_scale(&m.hyper), 1 / sqrt(192), 1e-16);
}

/* What the two mscales do when they are not both 1: cos and sin are stretched by their ratio, logits by the second. */
Test(model_kimi, yarn_magnitudes)
{
    struct dn_model m = yarn(40, 32, 1);
    m.hyper.rope_mscale = 0.707;
    double a = 0.1 * 0.707 * log(40) + 1, b = 0.1 * log(40) + 1;
    cr_expect_float_eq(dn_hyper_rope_magnitude(&m.hyper), a / b, 1e-15);
    m.hyper.rope_mscale = m.hyper.rope_mscale_all_dim = 0;
    cr_expect_float_eq(dn_hyper_rope_magnitude(&m.hyper), b, 1e-15);
    cr_expect_float_eq(dn_hyper_attention_scale(&m.hyper), 1 / sqrt(192), 1e-16);
}

/* ---- What is read ------------------------------------------------------------------------------------------------ */

static struct dn_model *open_kind(int kind, struct kimi_fault fault)
{
    struct dn_model *m = NULL;
    struct dn_err err = {0};
    const char *folder = kimi_checkpoint(&KIMI_KIND[kind], fault);
    cr_assert_eq(dn_model_open(folder, &m, &err), 0, "%s", err.text);
    tiny_remove(folder);
    return m;
}

Test(model_kimi, a_wrapped_int4_checkpoint_is_described)
{
    struct dn_model *m = open_kind(2, (struct kimi_fault){0});
    const struct dn_hyper *h = &m->hyper;
    cr_expect(h->arch == DN_ARCH_KIMI && h->n_layers == 3 && h->n_heads == 2 && h->n_kv_heads == 1);
    cr_expect(h->head_dim == 80 && h->rotary_dim == 16 && h->latent_dim == 64 && h->nope_dim == 64 && h->v_dim == 128);
    cr_expect(h->n_experts == 16 && h->top_experts == 4 && h->expert_groups == 4 && h->top_groups == 2);
    cr_expect(h->expert_ff == 128 && h->shared_ff == 128 && h->n_dense_layers == 1 && h->moe_every == 1);
    cr_expect(h->normalise_experts && h->expert_scale == 2.827f && h->tied_head && h->rope_interleaved);
    cr_expect(h->rope_yarn && h->rope_factor == 8 && h->rope_original == 64 && h->rope_beta_fast == 32);
    cr_expect(m->n_eos == 1 && m->eos_id[0] == 2 && m->bos_id == 1);
    cr_expect_str_eq(m->prefix, "language_model.");
    cr_expect_str_eq(m->type_text, "safetensors INT4");
    cr_expect_eq(m->n_ignored, 3);
    cr_expect_str_eq(m->note, "2 tensors for pictures (vision_tower, mm_projector), 1024 bytes, not used");
    struct dn_linear l = dn_model_expert(m, 2, 15, DN_EXPERT_DOWN);
    cr_expect(l.n_out == 128 && l.n_in == 128 && l.values->type == DN_TT_I32 && l.scale->type == DN_TT_BF16);
    cr_expect_str_eq(l.values->name, "language_model.model.layers.2.mlp.experts.15.down_proj.weight_packed");
    uint64_t attention = 128 * 128 + 128 + 160 * 128 + 80 * 128 + 64 + 384 * 64 + 128 * 256 + 256;
    uint64_t dense = 3 * 192 * 128, experts = 17 * 3 * 128 * 128 + 16 * 128 + 16;
    cr_expect_eq(m->n_params, 256 * 128 + 128 + 3 * attention + dense + 2 * experts);
    cr_expect_eq(dn_model_kv_bytes(m, false), 3 * 2 * 80);
    cr_expect_eq(dn_model_kv_bytes(m, true), 3 * (64 + 4 + 32));
    dn_model_close(m);
}

Test(model_kimi, one_projection_of_queries_and_an_untied_head)
{
    struct dn_model *m = open_kind(3, (struct kimi_fault){0});
    cr_expect(m->hyper.q_lora_dim == 0 && !m->hyper.tied_head && m->hyper.shared_ff == 256);
    cr_expect(dn_hyper_has_experts(&m->hyper, 0) && !m->hyper.rope_yarn && !m->hyper.normalise_experts);
    cr_expect_not_null(dn_model_tensor(m, DN_T_HEAD, 0));
    cr_expect_not_null(dn_model_tensor(m, DN_T_Q, 1));
    cr_expect_null(dn_model_tensor(m, DN_T_Q_A, 1));
    dn_model_close(m);
}

/* The rotary embedding has been spelt in four ways. */
Test(model_kimi, yarn_is_read_however_it_is_spelt)
{
    static const char *const rope[] = {
        KIMI_YARN,
        "\"rope_theta\":50000.0,\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":8,"
        "\"original_max_position_embeddings\":64,\"mscale\":1.0,\"mscale_all_dim\":1.0}",
        "\"rope_scaling\":{\"rope_type\":\"yarn\",\"rope_theta\":50000.0,\"factor\":8,"
        "\"original_max_position_embeddings\":64,\"mscale\":1.0,\"mscale_all_dim\":1.0}",
        "\"rope_parameters\":{\"rope_type\":\"yarn\",\"rope_theta\":50000.0,\"factor\":8.0,\"beta_fast\":32,"
        "\"beta_slow\":1,\"original_max_position_embeddings\":64,\"mscale\":1.0,\"mscale_all_dim\":1.0}",
        "\"rope_theta\":5e4,\"rope_parameters\":{\"rope_type\":\"yarn\",\"type\":\"yarn\",\"rope_theta\":50000.0,"
        "\"factor\":8.0,\"original_max_position_embeddings\":64,\"mscale\":1.0,\"mscale_all_dim\":1.0,\"truncate\":"
        "true,"
        "\"low_freq_factor\":null,\"partial_rotary_factor\":1.0}"};
    double want[8], f[8];
    for (size_t i = 0; i < sizeof rope / sizeof *rope; i++) {
        struct kimi_kind k = KIMI_KIND[0];
        struct dn_model *m = NULL;
        struct dn_err err = {0};
        k.rope = rope[i];
        const char *folder = kimi_checkpoint(&k, (struct kimi_fault){0});
        cr_assert_eq(dn_model_open(folder, &m, &err), 0, "%s", err.text);
        tiny_remove(folder);
        dn_model_rope_freqs(m, i == 0 ? want : f);
        cr_expect(i == 0 || memcmp(f, want, sizeof f) == 0, "%s", rope[i]);
        cr_expect(m->hyper.rope_yarn && m->hyper.rope_theta == 50000 && dn_hyper_rope_magnitude(&m->hyper) == 1);
        dn_model_close(m);
    }
}

/* ---- What is refused --------------------------------------------------------------------------------------------- */

static void refused(int kind, struct kimi_fault fault, const char *text)
{
    const char *folder = kimi_checkpoint(&KIMI_KIND[kind], fault);
    struct dn_model *m = NULL;
    struct dn_err err = {0};
    char whole[1024];
    cr_expect_eq(dn_model_open(folder, &m, &err), -DN_MODEL_FILE, "%s", text);
    snprintf(whole, sizeof whole, "%s%s", folder, text);
    cr_expect_str_eq(err.text, whole);
    dn_model_close(m);
    tiny_remove(folder);
}

#define FAULT(...) ((struct kimi_fault){__VA_ARGS__})

Test(model_kimi, every_tensor_must_be_there)
{
    static const struct {
        int kind;
        const char *name;
    } gone[] = {{0, "model.embed_tokens.weight"},
                {0, "model.norm.weight"},
                {0, "model.layers.0.input_layernorm.weight"},
                {0, "model.layers.2.self_attn.q_a_proj.weight"},
                {0, "model.layers.2.self_attn.q_a_layernorm.weight"},
                {0, "model.layers.2.self_attn.q_b_proj.weight"},
                {0, "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"},
                {0, "model.layers.1.self_attn.kv_a_layernorm.weight"},
                {0, "model.layers.1.self_attn.kv_b_proj.weight"},
                {0, "model.layers.1.self_attn.o_proj.weight"},
                {0, "model.layers.1.post_attention_layernorm.weight"},
                {0, "model.layers.0.mlp.gate_proj.weight"},
                {0, "model.layers.1.mlp.gate.weight"},
                {0, "model.layers.1.mlp.gate.e_score_correction_bias"},
                {0, "model.layers.2.mlp.shared_experts.down_proj.weight"},
                {0, "model.layers.1.mlp.experts.0.gate_proj.weight"},
                {0, "model.layers.2.mlp.experts.15.down_proj.weight"},
                {1, "model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"},
                {1, "model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"},
                {4, "model.layers.1.mlp.experts.3.up_proj.weight_scale"},
                {4, "model.layers.1.mlp.experts.3.up_proj.weight_shape"},
                {4, "model.layers.0.self_attn.q_proj.weight_scale"},
                {3, "lm_head.weight"}};
    for (size_t i = 0; i < sizeof gone / sizeof *gone; i++) {
        char text[256];
        snprintf(text, sizeof text, ": tensor \"%s%s\" is missing",
                 KIMI_KIND[gone[i].kind].wrapped ? "language_model." : "", gone[i].name);
        refused(gone[i].kind, FAULT(.tensor = gone[i].name, .name = ""), text);
    }
    /* Without its words a matrix is not INT4, so what is missed is the plain one. */
    refused(4, FAULT(.tensor = "model.layers.1.mlp.experts.3.up_proj.weight_packed", .name = ""),
            ": tensor \"model.layers.1.mlp.experts.3.up_proj.weight\" is missing");
}

Test(model_kimi, no_tensor_may_be_left_over)
{
    static const char *const more[] = {"model.layers.0.mlp.experts.0.gate_proj.weight",
                                       "model.layers.1.mlp.experts.16.gate_proj.weight",
                                       "model.layers.3.input_layernorm.weight",
                                       "model.layers.1.self_attn.q_proj.weight",
                                       "model.layers.1.self_attn.k_scale",
                                       "model.layers.1.mlp.gate_proj.weight",
                                       "vision_tower.x"};
    for (size_t i = 0; i < sizeof more / sizeof *more; i++) {
        char text[256];
        snprintf(text, sizeof text, ": tensor \"%s\" is not one of a kimi_k2 model of 3 layers", more[i]);
        refused(0, FAULT(.one_more = more[i]), text);
    }
    refused(1, FAULT(.one_more = "model.layers.1.mlp.gate.weight_scale_inv"),
            ": tensor \"model.layers.1.mlp.gate.weight_scale_inv\" is not one of a kimi_k2 model of 3 layers");
    refused(1, FAULT(.one_more = "model.layers.1.self_attn.o_proj.input_scale"),
            ": tensor \"model.layers.1.self_attn.o_proj.input_scale\" is not one of a kimi_k2 model of 3 layers");
    refused(2, FAULT(.tensor = "model.layers.1.mlp.gate.weight", .name = "vision_tower.gate.weight"),
            ": tensor \"language_model.model.layers.1.mlp.gate.weight\" is missing");
}

/* A head beside "tie_word_embeddings": true is the embedding's copy, or the model is another than config.json says. */
Test(model_kimi, a_tied_head_is_a_copy)
{
    refused(
        0, FAULT(.one_more = "lm_head.weight"),
        ": tensor \"lm_head.weight\" is not a copy of \"model.embed_tokens.weight\", but \"tie_word_embeddings\" is "
        "true");
    refused(
        2, FAULT(.one_more = "lm_head.weight"),
        ": tensor \"language_model.lm_head.weight\" is not a copy of \"language_model.model.embed_tokens.weight\", but "
        "\"tie_word_embeddings\" is true");
}

/* Of a multi-token prediction layer, if config.json says that there is one. */
Test(model_kimi, layers_for_drafts_are_noted)
{
    struct dn_model *m =
        open_kind(0, FAULT(.one_more = "model.layers.3.enorm.weight", .extra = ",\"num_nextn_predict_layers\":1"));
    cr_expect_str_eq(m->note, "1 tensor of a multi-token prediction layer, 8 bytes, not used");
    dn_model_close(m);
    refused(0, FAULT(.one_more = "model.layers.4.enorm.weight", .extra = ",\"num_nextn_predict_layers\":1"),
            ": tensor \"model.layers.4.enorm.weight\" is not one of a kimi_k2 model of 3 layers");
}

Test(model_kimi, shapes_are_checked)
{
    static const struct {
        int kind;
        const char *name, *text;
    } bad[] = {
        {0, "model.layers.1.self_attn.kv_b_proj.weight", "shape [64][384], expected [384][64]"},
        {0, "model.layers.1.self_attn.q_b_proj.weight", "shape [128][160], expected [160][128]"},
        {0, "model.layers.1.mlp.gate.weight", "shape [128][16], expected [16][128]"},
        {1, "model.layers.1.self_attn.kv_b_proj.weight_scale_inv", "shape [1][3], expected [3][1]"},
        {4, "model.layers.1.self_attn.kv_b_proj.weight_packed", "shape [8][384], expected [384][8]"},
        {4, "model.layers.1.mlp.experts.2.up_proj.weight_scale", "shape [4][128], expected [128][4]"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[256];
        snprintf(text, sizeof text, ": tensor \"%s\": %s", bad[i].name, bad[i].text);
        refused(bad[i].kind, FAULT(.tensor = bad[i].name, .transposed = true), text);
    }
    refused(4, FAULT(.shape_of = "model.layers.1.self_attn.kv_b_proj"),
            ": tensor \"model.layers.1.self_attn.kv_b_proj.weight_shape\": says [64][384], expected [384][64]");
}

Test(model_kimi, types_are_checked)
{
    static const struct {
        int kind;
        const char *name, *dtype, *text;
    } bad[] = {
        {0, "model.layers.1.mlp.gate.e_score_correction_bias", "I32",
         "type I32, expected F32 (in 16 bits its small differences are lost, and other experts are chosen)"},
        {0, "model.layers.1.mlp.gate.weight", "I16", "type I16, expected F32, F16 or BF16"},
        {0, "model.embed_tokens.weight", "U16", "type U16, expected F32, F16 or BF16"},
        {0, "model.layers.1.self_attn.o_proj.weight", "I16", "type I16, expected BF16, F16, F32 or F8_E4M3"},
        {1, "model.layers.1.self_attn.o_proj.weight", "F8_E5M2", "type F8_E5M2, expected BF16, F16, F32 or F8_E4M3"},
        {1, "model.layers.1.self_attn.o_proj.weight_scale_inv", "I32", "type I32, expected F32"},
        {2, "model.layers.1.mlp.experts.2.up_proj.weight_packed", "U32", "type U32, expected I32"},
        {2, "model.layers.1.mlp.experts.2.up_proj.weight_scale", "F16", "type F16, expected BF16"},
        {2, "model.layers.1.mlp.experts.2.up_proj.weight_shape", "F32", "type F32, expected I32"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[256];
        snprintf(text, sizeof text, ": tensor \"%s%s\": %s", KIMI_KIND[bad[i].kind].wrapped ? "language_model." : "",
                 bad[i].name, bad[i].text);
        refused(bad[i].kind, FAULT(.tensor = bad[i].name, .dtype = bad[i].dtype), text);
    }
}

Test(model_kimi, unknown_parts_of_int4_are_named)
{
    refused(
        2, FAULT(.one_more = "model.layers.1.mlp.experts.0.up_proj.weight_zero_point"),
        ": tensor \"language_model.model.layers.1.mlp.experts.0.up_proj.weight_zero_point\" is not supported: INT4 is "
        "expected to be symmetric and without act-order");
    refused(2, FAULT(.one_more = "model.layers.1.mlp.experts.0.up_proj.weight_g_idx"),
            ": tensor \"language_model.model.layers.1.mlp.experts.0.up_proj.weight_g_idx\" is not supported: INT4 is "
            "expected to be symmetric and without act-order");
}

/* ---- config.json ------------------------------------------------------------------------------------------------- */

Test(model_kimi, missing_members_of_the_config_are_named)
{
    static const char *const key[] = {"kv_lora_rank",
                                      "qk_nope_head_dim",
                                      "qk_rope_head_dim",
                                      "v_head_dim",
                                      "n_routed_experts",
                                      "num_experts_per_tok",
                                      "moe_intermediate_size",
                                      "n_shared_experts",
                                      "first_k_dense_replace",
                                      "n_group",
                                      "topk_group",
                                      "norm_topk_prob",
                                      "routed_scaling_factor",
                                      "hidden_size",
                                      "vocab_size"};
    for (size_t i = 0; i < sizeof key / sizeof *key; i++) {
        char text[256];
        snprintf(text, sizeof text, "/config.json: \"%s\" is missing", key[i]);
        refused(0, FAULT(.without = key[i]), text);
    }
    refused(2, FAULT(.without = "n_group"), "/config.json: \"text_config\": \"n_group\" is missing");
}

#define COMPRESSED(weights, more)                                                                                      \
    ",\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":\"pack-quantized\","                 \
    "\"config_groups\":{\"group_0\":{\"weights\":{" weights "}}}" more "}"

static struct kimi_fault without(const char *key, const char *extra)
{
    return FAULT(.without = key, .extra = extra);
}

Test(model_kimi, what_the_forward_pass_does_not_know_is_refused_by_name)
{
    static const struct {
        const char *key, *extra, *text;
    } bad[] = {
        {NULL, ",\"scoring_func\":\"softmax\"", "\"scoring_func\": \"softmax\" is not supported, expected sigmoid"},
        {NULL, ",\"topk_method\":\"greedy\"", "\"topk_method\": \"greedy\" is not supported, expected noaux_tc"},
        {NULL, ",\"attention_bias\":true", "\"attention_bias\": true is not supported"},
        {"n_group", ",\"n_group\":5", "16 experts in 5 groups of which 2 are taken, expected equal groups"},
        {"topk_group", ",\"topk_group\":5", "16 experts in 4 groups of which 5 are taken, expected equal groups"},
        {"num_experts_per_tok", ",\"num_experts_per_tok\":9",
         "9 experts a token from 2 groups of 4, expected groups of at least 2 that hold as many"},
        {"num_experts_per_tok", ",\"num_experts_per_tok\":17",
         "\"num_experts_per_tok\": expected an integer from 1 to 16, got 17"},
        {"n_routed_experts", ",\"n_routed_experts\":1025",
         "\"n_routed_experts\": expected an integer from 1 to 1024, got 1025"},
        {"hidden_size", ",\"hidden_size\":\"wide\"", "\"hidden_size\": expected an integer, got a string"},
        {"norm_topk_prob", ",\"norm_topk_prob\":1", "\"norm_topk_prob\": expected a boolean, got an integer"},
        {"rms_norm_eps", ",\"rms_norm_eps\":2", "\"rms_norm_eps\": expected a number from 0 to 1, got 2"},
        {NULL, ",\"quantization_config\":7", "\"quantization_config\": expected an object, got an integer"},
        {NULL, ",\"scoring_func\":7", "\"scoring_func\": expected a string, got an integer"},
        {"eos_token_id", ",\"eos_token_id\":[1,-2]", "\"eos_token_id\": expected an integer from 0 to 2097152, got -2"},
        {"qk_rope_head_dim", ",\"qk_rope_head_dim\":15", "rotary keys of 15 values, expected an even number"},
        {NULL, ",\"quantization_config\":{\"quant_method\":\"awq\"}",
         "\"quantization_config\": \"quant_method\": \"awq\" is not supported, expected fp8 or compressed-tensors"},
        {NULL, ",\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[64,128]}",
         "\"quantization_config\": \"weight_block_size\": expected [128, 128]"},
        {NULL, ",\"quantization_config\":{\"quant_method\":\"fp8\",\"fmt\":\"e5m2\"}",
         "\"quantization_config\": \"fmt\": \"e5m2\" is not supported, expected e4m3"},
        {NULL, COMPRESSED("\"num_bits\":8", ""),
         "\"quantization_config\": \"group_0\": \"num_bits\": 8 is not supported, expected 4"},
        {NULL, COMPRESSED("\"num_bits\":4,\"group_size\":128", ""),
         "\"quantization_config\": \"group_0\": \"group_size\": 128 is not supported, expected 32"},
        {NULL, COMPRESSED("\"symmetric\":false", ""),
         "\"quantization_config\": \"group_0\": \"symmetric\": false is not supported, expected true"},
        {NULL, COMPRESSED("\"actorder\":\"group\"", ""),
         "\"quantization_config\": \"group_0\": \"actorder\" is not supported, expected null"},
        {NULL, COMPRESSED("\"num_bits\":4", ",\"kv_cache_scheme\":{\"num_bits\":8}"),
         "\"quantization_config\": \"kv_cache_scheme\" is not supported, expected null (the cache has scales of its "
         "own)"},
        {NULL,
         COMPRESSED("\"num_bits\":4", ",\"transform_config\":{\"config_groups\":{\"u\":{\"type\":\"hadamard\"}}}"),
         "\"quantization_config\": \"transform_config\": transformed weights are not supported"},
        {NULL, COMPRESSED("\"num_bits\":4", ",\"sparsity_config\":{\"format\":\"sparse-24-bitmask\"}"),
         "\"quantization_config\": \"sparsity_config\": \"format\": \"sparse-24-bitmask\" is not supported, expected "
         "dense"},
        {NULL, COMPRESSED("\"num_bits\":4},\"output_activations\":{\"num_bits\":8", ""),
         "\"quantization_config\": \"group_0\": \"output_activations\": quantised activations are not supported"},
        {NULL, COMPRESSED("\"num_bits\":4},\"format\":\"marlin-24\",\"x\":{", ""),
         "\"quantization_config\": \"group_0\": \"format\": \"marlin-24\" is not supported, expected pack-quantized"},
        {NULL, ",\"compression_config\":{\"quant_method\":\"compressed-tensors\",\"format\":\"int-quantized\"}",
         "\"compression_config\": \"format\": \"int-quantized\" is not supported, expected pack-quantized"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        char text[512];
        snprintf(text, sizeof text, "/config.json: %s", bad[i].text);
        refused(0, without(bad[i].key, bad[i].extra), text);
    }
}

/* What compressed-tensors writes where it did nothing more. */
Test(model_kimi, empty_parts_of_the_quantisation_say_nothing)
{
    dn_model_close(open_kind(0, FAULT(.extra = COMPRESSED("\"num_bits\":4},\"output_activations\":null,\"format\":"
                                                          "\"pack-quantized\",\"x\":{",
                                                          ",\"transform_config\":{},\"sparsity_config\":{}"))));
    dn_model_close(
        open_kind(0, FAULT(.extra = COMPRESSED("\"num_bits\":4", ",\"transform_config\":{\"config_groups\":{}},"
                                                                 "\"sparsity_config\":{\"format\":\"dense\"}"))));
}

/* None may be dropped: a model would write on behind what it means as an end. */
Test(model_kimi, ids_that_end_a_text_are_all_kept_or_refused)
{
    struct kimi_kind k = KIMI_KIND[0];
    static const char *const rope[] = {"\"rope_theta\":1e4,\"eos_token_id\":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]",
                                       "\"rope_theta\":1e4,\"eos_token_id\":2097152"};
    static const char *const text[] = {
        "/generation_config.json: end-of-text id 100 is one too many, expected at most 16",
        ": end-of-text id 2097152 outside the vocabulary of 256"};
    for (int i = 0; i < 2; i++) {
        char whole[300];
        struct dn_buf b = {0};
        struct dn_model *m = NULL;
        struct dn_err err = {0};
        k.rope = rope[i];
        const char *folder = kimi_checkpoint(&k, FAULT(.without = "eos_token_id"));
        dn_buf_puts(&b, i == 0 ? "{\"eos_token_id\":[15,100,101]}" : "{}");
        tiny_file(folder, "generation_config.json", &b);
        dn_buf_release(&b);
        snprintf(whole, sizeof whole, "%s%s", folder, text[i]);
        cr_expect_eq(dn_model_open(folder, &m, &err), -DN_MODEL_FILE);
        cr_expect_str_eq(err.text, whole);
        dn_model_close(m);
        tiny_remove(folder);
    }
}

Test(model_kimi, rope_scaling_is_checked)
{
    static const struct {
        const char *rope, *text;
    } bad[] = {
        {"\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0}",
         "rope scaling yarn: \"original_max_position_embeddings\" is missing"},
        {"\"rope_scaling\":{\"type\":\"yarn\",\"original_max_position_embeddings\":64}",
         "rope scaling yarn: \"factor\" is missing"},
        {"\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":64,"
         "\"attention_factor\":2.0}",
         "rope scaling yarn: \"attention_factor\" is not supported"},
        {"\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":64},"
         "\"rope_parameters\":{\"rope_type\":\"default\"}",
         "\"rope_scaling\" and \"rope_parameters\" say different things, expected one of them"},
        {"\"rope_scaling\":{\"type\":\"yarn\",\"rope_type\":\"default\"}",
         "rope scaling: \"rope_type\" is \"default\", but \"type\" is \"yarn\""},
        /* What would be left out without a word, and every answer another one. */
        {"\"rope_scaling\":{\"factor\":4.0,\"original_max_position_embeddings\":1024}",
         "rope scaling: \"factor\" is there, but no \"rope_type\""},
        {"\"rope_scaling\":{\"rope_type\":\"default\",\"beta_fast\":32}",
         "rope scaling default: \"beta_fast\" is not known"},
        {"\"rope_parameters\":{\"type\":\"default\",\"rope_theta\":5e4,\"factor\":8.0}",
         "rope scaling default: \"factor\" is not known"},
        {"\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":64,\"beta_fats\":2}",
         "rope scaling yarn: \"beta_fats\" is not known"},
        {"\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0,\"original_max_position_embeddings\":64,"
         "\"low_freq_factor\":1}",
         "rope scaling yarn: \"low_freq_factor\" is not known"},
        {"\"rope_scaling\":{\"type\":\"llama3\",\"factor\":4.0,\"low_freq_factor\":1,\"high_freq_factor\":4,"
         "\"original_max_position_embeddings\":64,\"mscale\":1}",
         "rope scaling llama3: \"mscale\" is not known"},
        {"\"rope_theta\":1e4,\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":5e4}",
         "\"rope_theta\" is 10000, and 50000 in the rotary embedding's object"},
        {"\"rope_scaling\":{\"type\":\"dynamic\"}",
         "rope scaling \"dynamic\" is not supported, expected default, yarn or llama3"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct kimi_kind k = KIMI_KIND[0];
        char text[256];
        k.rope = bad[i].rope;
        const char *folder = kimi_checkpoint(&k, FAULT(0));
        struct dn_model *m = NULL;
        struct dn_err err = {0};
        snprintf(text, sizeof text, "%s/config.json: %s", folder, bad[i].text);
        cr_expect_eq(dn_model_open(folder, &m, &err), -DN_MODEL_FILE);
        cr_expect_str_eq(err.text, text);
        tiny_remove(folder);
    }
}
