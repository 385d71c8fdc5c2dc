/* config.json of the DeepSeek-V3 graph: kimi_k2, kimi_k25's text_config, deepseek_v3. */
#include "engine/model_impl.h"

#include <inttypes.h>
#include <string.h>

static int read_attention(struct dn_hyper *h, const json_t *c, struct dn_err *err)
{
    int code = 0;
    const struct {
        const char *key;
        int64_t max;
        uint32_t *out;
    } number[] = {{"kv_lora_rank", 1 << 14, &h->latent_dim},
                  {"qk_nope_head_dim", 1024, &h->nope_dim},
                  {"qk_rope_head_dim", 1024, &h->rope_dim},
                  {"v_head_dim", 1024, &h->v_dim}};
    for (size_t i = 0; i < sizeof number / sizeof *number && code == 0; i++)
        code = dn_config_u32(c, number[i].key, number[i].max, 0, number[i].out, err);
    if (code == 0 && dn_json_has(c, "q_lora_rank"))
        code = dn_config_u32(c, "q_lora_rank", 1 << 14, 0, &h->q_lora_dim, err);
    /* The reference rotates neighbouring pairs, and says so by nothing. */
    if (code == 0)
        code = dn_config_bool(c, "rope_interleave", true, &h->rope_interleaved, err);
    /* "head_dim" and "num_key_value_heads" of these files say nothing about the attention that is computed. */
    h->head_dim = h->nope_dim + h->rope_dim;
    h->rotary_dim = h->rope_dim;
    h->n_kv_heads = 1;
    return code;
}

/* How a token's experts are chosen: only the way of DeepSeek-V3 is known. */
static int read_routing(struct dn_hyper *h, const json_t *c, struct dn_err *err)
{
    static const char *const needed[] = {"norm_topk_prob", "routed_scaling_factor", "n_shared_experts",
                                         "first_k_dense_replace"};
    double scale = 1;
    /* Other readers have defaults of their own for these, and not the same ones. */
    for (size_t i = 0; i < sizeof needed / sizeof *needed; i++)
        if (!dn_json_has(c, needed[i]))
            return dn_err_set(err, DN_MODEL_FILE, "\"%s\" is missing", needed[i]);
    int code = dn_config_expect(c, "scoring_func", "sigmoid", err);
    if (code == 0)
        code = dn_config_expect(c, "topk_method", "noaux_tc", err);
    if (code == 0)
        code = dn_config_u32(c, "n_group", DN_MODEL_MAX_EXPERTS, 0, &h->expert_groups, err);
    if (code == 0)
        code = dn_config_u32(c, "topk_group", DN_MODEL_MAX_EXPERTS, 0, &h->top_groups, err);
    if (code == 0)
        code = dn_config_bool(c, "norm_topk_prob", true, &h->normalise_experts, err);
    if (code == 0)
        code = dn_config_f64(c, "routed_scaling_factor", 1e-6, 1e6, 1, &scale, err);
    h->expert_scale = (float)scale;
    return code;
}

static int read_experts(struct dn_hyper *h, const json_t *c, struct dn_err *err)
{
    int64_t shared = 0, dense = 0;
    int code = dn_config_u32(c, "n_routed_experts", DN_MODEL_MAX_EXPERTS, 0, &h->n_experts, err);
    if (code == 0)
        code = dn_config_u32(c, "num_experts_per_tok", DN_MODEL_MAX_TOP_EXPERTS, 0, &h->top_experts, err);
    if (code == 0)
        code = dn_config_u32(c, "moe_intermediate_size", 1 << 18, 0, &h->expert_ff, err);
    if (code == 0)
        code = dn_config_blame(dn_json_get_int(c, "n_shared_experts", 0, 64, 0, &shared, err), "n_shared_experts", err);
    if (code == 0)
        code = dn_config_blame(dn_json_get_int(c, "first_k_dense_replace", 0, DN_MODEL_MAX_LAYERS, 0, &dense, err),
                               "first_k_dense_replace", err);
    if (code == 0)
        code = dn_config_u32(c, "moe_layer_freq", DN_MODEL_MAX_LAYERS, 1, &h->moe_every, err);
    h->shared_ff = (uint32_t)shared * h->expert_ff;
    h->n_dense_layers = (uint32_t)dense;
    return code == 0 ? read_routing(h, c, err) : code;
}

int dn_model_read_kimi(struct dn_hyper *h, uint32_t *n_extra_layers, const json_t *c, struct dn_err *err)
{
    int64_t extra = 0;
    int code = read_attention(h, c, err);
    if (code == 0)
        code = read_experts(h, c, err);
    if (code == 0)
        code = dn_config_blame(dn_json_get_int(c, "num_nextn_predict_layers", 0, 16, 0, &extra, err),
                               "num_nextn_predict_layers", err);
    *n_extra_layers = (uint32_t)extra;
    return code;
}

/* ---- Quantised weights ------------------------------------------------------------------------------------------- */

/* What a matrix is decided by its tensors; this refuses what their names alone would not show. */
static int check_fp8(const json_t *q, struct dn_err *err)
{
    json_t *block;
    int code = dn_config_expect(q, "fmt", "e4m3", err);
    if (code == 0)
        code = dn_config_blame(dn_json_get_array(q, "weight_block_size", &block, err), "weight_block_size", err);
    if (code != 0)
        return code;
    if (json_array_size(block) != 2 || json_integer_value(json_array_get(block, 0)) != 128 ||
        json_integer_value(json_array_get(block, 1)) != 128)
        return dn_err_set(err, DN_MODEL_FILE, "\"weight_block_size\": expected [128, 128]");
    return 0;
}

static int expect_int(const json_t *w, const char *key, int64_t expected, struct dn_err *err)
{
    int64_t is = expected;
    int code = dn_config_blame(dn_json_get_int(w, key, INT32_MIN, INT32_MAX, expected, &is, err), key, err);
    if (code == 0 && is != expected)
        return dn_err_set(err, DN_MODEL_FILE, "\"%s\": %" PRId64 " is not supported, expected %" PRId64, key, is,
                          expected);
    return code;
}

static int check_group(const json_t *group, struct dn_err *err)
{
    json_t *w;
    bool symmetric = true;
    int code = dn_config_blame(dn_json_get_object(group, "weights", &w, err), "weights", err);
    static const char *const activations[] = {"input_activations", "output_activations"};
    for (size_t i = 0; i < 2 && code == 0; i++)
        if (dn_json_has(group, activations[i]))
            code = dn_err_set(err, DN_MODEL_FILE, "\"%s\": quantised activations are not supported", activations[i]);
    if (code == 0)
        code = dn_config_expect(group, "format", "pack-quantized", err);
    if (code == 0 && w == NULL)
        code = dn_err_set(err, DN_MODEL_FILE, "\"weights\" is missing");
    if (code == 0)
        code = expect_int(w, "num_bits", 4, err);
    if (code == 0)
        code = expect_int(w, "group_size", 32, err);
    if (code == 0)
        code = dn_config_expect(w, "type", "int", err);
    if (code == 0)
        code = dn_config_expect(w, "strategy", "group", err);
    if (code == 0)
        code = dn_config_bool(w, "symmetric", true, &symmetric, err);
    if (code == 0 && !symmetric)
        code = dn_err_set(err, DN_MODEL_FILE, "\"symmetric\": false is not supported, expected true");
    if (code == 0 && dn_json_has(w, "actorder") && !json_is_false(json_object_get(w, "actorder")))
        code = dn_err_set(err, DN_MODEL_FILE, "\"actorder\" is not supported, expected null");
    return code;
}

/* What may be done to the values besides: rotations, which activations would need as well, and sparse forms. */
static int check_extras(const json_t *q, struct dn_err *err)
{
    json_t *transform, *sparsity;
    int code = dn_config_blame(dn_json_get_object(q, "transform_config", &transform, err), "transform_config", err);
    if (code == 0 && transform != NULL && json_object_size(transform) > 0) {
        json_t *groups = json_object_get(transform, "config_groups");
        if (!json_is_object(groups) || json_object_size(groups) > 0)
            return dn_err_set(err, DN_MODEL_FILE, "\"transform_config\": transformed weights are not supported");
    }
    if (code == 0)
        code = dn_config_blame(dn_json_get_object(q, "sparsity_config", &sparsity, err), "sparsity_config", err);
    if (code == 0 && sparsity != NULL && (code = dn_config_expect(sparsity, "format", "dense", err)) != 0)
        dn_err_prefix(err, "\"sparsity_config\"");
    return code;
}

static int check_compressed(const json_t *q, struct dn_err *err)
{
    json_t *groups, *group;
    const char *name;
    if (dn_json_has(q, "kv_cache_scheme"))
        return dn_err_set(err, DN_MODEL_FILE,
                          "\"kv_cache_scheme\" is not supported, expected null (the cache has scales of its own)");
    int code = dn_config_expect(q, "format", "pack-quantized", err);
    if (code == 0)
        code = check_extras(q, err);
    if (code == 0)
        code = dn_config_blame(dn_json_get_object(q, "config_groups", &groups, err), "config_groups", err);
    if (code == 0 && groups != NULL) {
        json_object_foreach(groups, name, group)
        {
            code = json_is_object(group) ? check_group(group, err) : dn_err_set(err, DN_MODEL_FILE, "not an object");
            if (code != 0)
                return dn_err_prefix(err, "\"%.40s\"", name);
        }
    }
    return code;
}

static int check_method(const json_t *c, const char *key, struct dn_err *err)
{
    json_t *q;
    const char *method;
    size_t n;
    int code = dn_config_blame(dn_json_get_object(c, key, &q, err), key, err);
    if (code != 0 || q == NULL)
        return code;
    code = dn_config_blame(dn_json_get_string(q, "quant_method", &method, &n, err), "quant_method", err);
    if (code == 0 && method != NULL && strcmp(method, "fp8") == 0)
        code = check_fp8(q, err);
    else if (code == 0 && method != NULL && strcmp(method, "compressed-tensors") == 0)
        code = check_compressed(q, err);
    else if (code == 0)
        code = dn_err_set(err, DN_MODEL_FILE,
                          "\"quant_method\": \"%.40s\" is not supported, expected fp8 or compressed-tensors",
                          method ? method : "");
    return code == 0 ? 0 : dn_err_prefix(err, "\"%s\"", key);
}

int dn_model_check_quantisation(const json_t *c, struct dn_err *err)
{
    int code = check_method(c, "quantization_config", err);
    return code == 0 ? check_method(c, "compression_config", err) : code; /* an older name */
}
