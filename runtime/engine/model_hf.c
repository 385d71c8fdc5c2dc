#include "engine/model_impl.h"

#include "base/buf.h"
#include "base/json.h"
#include "engine/mapfile.h"
#include "engine/tokenizer.h"
#include "engine/tokenizer_config.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_CONFIG_BYTES = 4 << 20, MAX_TOKENIZER_CONFIG_BYTES = 16 << 20, MAX_TEMPLATE_BYTES = 16 << 20 };

static char *path_in(const struct dn_model *m, const char *file)
{
    struct dn_buf b = {0};
    dn_buf_printf(&b, "%s/%s", m->path, file);
    char *path = dn_strdup(dn_buf_str(&b));
    dn_buf_release(&b);
    return path;
}

/* The path if the file is there, else NULL. */
static char *path_if_there(const struct dn_model *m, const char *file)
{
    char *path = path_in(m, file);
    if (access(path, F_OK) == 0)
        return path;
    free(path);
    return NULL;
}

/* Reads a JSON object; a file that is not there gives *out = NULL if `optional`. */
static int read_json_at(const char *path, uint64_t max, bool optional, json_t **out, struct dn_err *err)
{
    char *text;
    size_t len;
    *out = NULL;
    if (optional && access(path, F_OK) != 0)
        return 0;
    int code = dn_mapfile_read_text(path, max, &text, &len, err);
    if (code == 0) {
        struct dn_err why = {0};
        if (dn_json_parse(text, len, out, &why) != 0)
            code = dn_err_set(err, DN_MODEL_FILE, "%s: %s", path, why.text);
        else if (!json_is_object(*out))
            code = dn_err_set(err, DN_MODEL_FILE, "%s: not a JSON object", path);
        free(text);
    }
    if (code != 0) {
        json_decref(*out);
        *out = NULL;
    }
    return code;
}

static int read_json(const struct dn_model *m, const char *file, uint64_t max, bool optional, json_t **out,
                     struct dn_err *err)
{
    char *path = path_in(m, file);
    int code = read_json_at(path, max, optional, out, err);
    free(path);
    return code;
}

/* Getters of base/json.h blame a request's parameter; here the file is at fault, and the key belongs in the text. */
int dn_config_blame(int code, const char *key, struct dn_err *err)
{
    if (code == 0 || err == NULL)
        return code == 0 ? 0 : -DN_MODEL_FILE;
    err->code = DN_MODEL_FILE;
    err->param[0] = '\0';
    size_t n = strlen(key);
    if (strncmp(err->text, key, n) == 0 && strncmp(err->text + n, ": ", 2) == 0) /* as a request's parameter */
        memmove(err->text, err->text + n + 2, strlen(err->text + n + 2) + 1);
    return dn_err_prefix(err, "\"%s\"", key);
}

int dn_config_u32(const json_t *c, const char *key, int64_t max, int64_t fallback, uint32_t *out, struct dn_err *err)
{
    int64_t v = fallback;
    if (!dn_json_has(c, key) && fallback <= 0)
        return dn_err_set(err, DN_MODEL_FILE, "\"%s\" is missing", key);
    int code = dn_json_get_int(c, key, 1, max, fallback, &v, err);
    if (code == 0)
        *out = (uint32_t)v;
    return dn_config_blame(code, key, err);
}

int dn_config_f64(const json_t *c, const char *key, double min, double max, double fallback, double *out,
                  struct dn_err *err)
{
    return dn_config_blame(dn_json_get_number(c, key, min, max, fallback, out, err), key, err);
}

int dn_config_bool(const json_t *c, const char *key, bool fallback, bool *out, struct dn_err *err)
{
    return dn_config_blame(dn_json_get_bool(c, key, fallback, out, err), key, err);
}

int dn_config_expect(const json_t *c, const char *key, const char *expected, struct dn_err *err)
{
    const char *is;
    size_t n;
    int code = dn_config_blame(dn_json_get_string(c, key, &is, &n, err), key, err);
    if (code == 0 && is != NULL && strcmp(is, expected) != 0)
        return dn_err_set(err, DN_MODEL_FILE, "\"%s\": \"%.40s\" is not supported, expected %s", key, is, expected);
    return code;
}

static int read_llama3(struct dn_hyper *h, const json_t *rope, struct dn_err *err)
{
    static const char *const key[] = {"factor", "low_freq_factor", "high_freq_factor",
                                      "original_max_position_embeddings"};
    double *out[] = {&h->rope_factor, &h->rope_low, &h->rope_high, &h->rope_original};
    for (int i = 0; i < 4; i++) {
        if (!dn_json_has(rope, key[i]))
            return dn_err_set(err, DN_MODEL_FILE, "rope scaling llama3: \"%s\" is missing", key[i]);
        int code = dn_config_f64(rope, key[i], 1e-6, 1e9, 0, out[i], err);
        if (code != 0)
            return code;
    }
    if (h->rope_high <= h->rope_low)
        return dn_err_set(err, DN_MODEL_FILE,
                          "rope scaling llama3: high_freq_factor %g, expected more than low_freq_factor %g",
                          h->rope_high, h->rope_low);
    h->rope_llama3 = true;
    return 0;
}

/* YaRN as transformers' own function reads it (modeling_rope_utils.py). */
static int read_yarn(struct dn_hyper *h, const json_t *rope, struct dn_err *err)
{
    static const struct {
        const char *key;
        size_t member;
        double min, fallback; /* fallback 0: must be there */
    } number[] = {{"factor", offsetof(struct dn_hyper, rope_factor), 1, 0},
                  {"original_max_position_embeddings", offsetof(struct dn_hyper, rope_original), 1, 0},
                  {"beta_fast", offsetof(struct dn_hyper, rope_beta_fast), 1e-3, 32},
                  {"beta_slow", offsetof(struct dn_hyper, rope_beta_slow), 1e-3, 1}};
    if (h->arch != DN_ARCH_KIMI)
        return dn_err_set(err, DN_MODEL_FILE,
                          "rope scaling \"yarn\" is not supported for this architecture, expected default or llama3");
    for (size_t i = 0; i < sizeof number / sizeof *number; i++) {
        if (number[i].fallback == 0 && !dn_json_has(rope, number[i].key))
            return dn_err_set(err, DN_MODEL_FILE, "rope scaling yarn: \"%s\" is missing", number[i].key);
        int code = dn_config_f64(rope, number[i].key, number[i].min, 1e9, number[i].fallback,
                                 (double *)(void *)((char *)h + number[i].member), err);
        if (code != 0)
            return code;
    }
    if (h->rope_theta <= 1)
        return dn_err_set(err, DN_MODEL_FILE, "rope scaling yarn: rope_theta %g, expected more than 1", h->rope_theta);
    int code = dn_config_f64(rope, "mscale", 0, 100, 0, &h->rope_mscale, err);
    if (code == 0)
        code = dn_config_f64(rope, "mscale_all_dim", 0, 100, 0, &h->rope_mscale_all_dim, err);
    if (code == 0 && dn_json_has(rope, "attention_factor"))
        code = dn_err_set(err, DN_MODEL_FILE, "rope scaling yarn: \"attention_factor\" is not supported");
    bool truncate = true;
    if (code == 0)
        code = dn_config_bool(rope, "truncate", true, &truncate, err);
    if (code == 0 && !truncate)
        code = dn_err_set(err, DN_MODEL_FILE, "rope scaling yarn: \"truncate\": false is not supported");
    if (code == 0 && h->rope_beta_fast < h->rope_beta_slow)
        code = dn_err_set(err, DN_MODEL_FILE, "rope scaling yarn: beta_fast %g, expected at least beta_slow %g",
                          h->rope_beta_fast, h->rope_beta_slow);
    h->rope_yarn = true;
    return code;
}

/* The object with the rotary embedding's numbers, NULL without one: rope_scaling, or rope_parameters as newer files
 * call it. Of both, other readers take the one or the other. */
static int find_rope(const json_t *c, json_t **rope, struct dn_err *err)
{
    static const char *const key[] = {"rope_scaling", "rope_parameters"};
    json_t *found[2];
    for (int i = 0; i < 2; i++) {
        int code = dn_config_blame(dn_json_get_object(c, key[i], &found[i], err), key[i], err);
        if (code != 0)
            return code;
        if (found[i] != NULL && json_object_size(found[i]) == 0)
            found[i] = NULL;
    }
    if (found[0] != NULL && found[1] != NULL && !json_equal(found[0], found[1]))
        return dn_err_set(err, DN_MODEL_FILE,
                          "\"rope_scaling\" and \"rope_parameters\" say different things, expected one of them");
    *rope = found[0] != NULL ? found[0] : found[1];
    return 0;
}

static int read_rope_type(const json_t *rope, const char **out, struct dn_err *err)
{
    const char *old_type = NULL;
    size_t n;
    int code = dn_config_blame(dn_json_get_string(rope, "rope_type", out, &n, err), "rope_type", err);
    if (code == 0)
        code = dn_config_blame(dn_json_get_string(rope, "type", &old_type, &n, err), "type", err);
    if (code == 0 && *out != NULL && old_type != NULL && strcmp(*out, old_type) != 0)
        return dn_err_set(err, DN_MODEL_FILE, "rope scaling: \"rope_type\" is \"%.40s\", but \"type\" is \"%.40s\"",
                          *out, old_type);
    if (code == 0 && *out == NULL)
        *out = old_type != NULL ? old_type : "default";
    return code;
}

/* What each type knows, beside what all know: a member of another type, or of none, would change nothing. */
static const struct rope_type {
    const char *name;
    const char *key[9];
} ROPE_TYPE[] = {
    {"default", {NULL}},
    {"llama3", {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}},
    {"yarn",
     {"factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
      "attention_factor", "truncate"}},
};

static bool knows_key(const struct rope_type *type, const char *key)
{
    static const char *const all[] = {"type", "rope_type", "rope_theta", "partial_rotary_factor"};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        if (strcmp(key, all[i]) == 0)
            return true;
    for (size_t i = 0; type->key[i] != NULL; i++)
        if (strcmp(key, type->key[i]) == 0)
            return true;
    return false;
}

/* Whether the object names its type, if that is not the default one, and holds nothing that the type does not know. */
static int check_rope_keys(json_t *rope, const char *name, struct dn_err *err)
{
    const char *key;
    json_t *value;
    const struct rope_type *type = NULL;
    for (size_t i = 0; i < sizeof ROPE_TYPE / sizeof *ROPE_TYPE; i++)
        if (strcmp(ROPE_TYPE[i].name, name) == 0)
            type = &ROPE_TYPE[i];
    json_object_foreach(rope, key, value)
    {
        if (type == NULL || json_is_null(value) || knows_key(type, key))
            continue;
        if (!dn_json_has(rope, "rope_type") && !dn_json_has(rope, "type"))
            return dn_err_set(err, DN_MODEL_FILE, "rope scaling: \"%.40s\" is there, but no \"rope_type\"", key);
        return dn_err_set(err, DN_MODEL_FILE, "rope scaling %s: \"%.40s\" is not known", name, key);
    }
    return 0;
}

/* A number that lies in that object or beside it. */
static int read_rope_number(const json_t *c, const json_t *rope, const char *key, double min, double max,
                            double fallback, double *out, struct dn_err *err)
{
    double beside = 0;
    bool both = rope != NULL && dn_json_has(rope, key) && dn_json_has(c, key);
    int code = dn_config_f64(rope != NULL && dn_json_has(rope, key) ? rope : c, key, min, max, fallback, out, err);
    if (code == 0 && both)
        code = dn_config_f64(c, key, min, max, fallback, &beside, err);
    if (code == 0 && both && beside != *out)
        code =
            dn_err_set(err, DN_MODEL_FILE, "\"%s\" is %g, and %g in the rotary embedding's object", key, beside, *out);
    return code;
}

static int read_rope(struct dn_hyper *h, const json_t *c, struct dn_err *err)
{
    json_t *rope = NULL;
    const char *type = NULL;
    double partial = 1;
    int code = find_rope(c, &rope, err);
    if (code != 0)
        return code;
    code = read_rope_number(c, rope, "rope_theta", 1, 1e12, 10000, &h->rope_theta, err);
    if (code == 0)
        code = read_rope_number(c, rope, "partial_rotary_factor", 0, 1, 1, &partial, err);
    if (code == 0 && partial != 1)
        code = dn_err_set(err, DN_MODEL_FILE, "\"partial_rotary_factor\": %g is not supported, expected 1", partial);
    if (code != 0 || rope == NULL)
        return code;
    code = read_rope_type(rope, &type, err);
    if (code == 0)
        code = check_rope_keys(rope, type, err);
    if (code != 0 || strcmp(type, "default") == 0)
        return code;
    if (strcmp(type, "llama3") == 0)
        return read_llama3(h, rope, err);
    if (strcmp(type, "yarn") == 0)
        return read_yarn(h, rope, err);
    return dn_err_set(err, DN_MODEL_FILE, "rope scaling \"%.40s\" is not supported, expected default%s", type,
                      h->arch == DN_ARCH_KIMI ? ", yarn or llama3" : " or llama3");
}

/* Switches that change the mathematics and that the forward pass does not know. */
static int refuse_extras(const struct dn_hyper *h, const json_t *c, struct dn_err *err)
{
    static const char *const off[] = {"attention_bias", "mlp_bias", "use_sliding_window"};
    for (size_t i = 0; i < sizeof off / sizeof *off; i++) {
        bool on;
        int code = dn_config_bool(c, off[i], false, &on, err);
        if (code != 0)
            return code;
        if (on)
            return dn_err_set(err, DN_MODEL_FILE, "\"%s\": true is not supported", off[i]);
    }
    if (dn_json_has(c, "quantization_config") && h->arch != DN_ARCH_KIMI)
        return dn_err_set(err, DN_MODEL_FILE,
                          "\"quantization_config\": quantised safetensors are not supported for this "
                          "architecture, expected BF16, F16 or F32 tensors");
    return dn_config_expect(c, "hidden_act", "silu", err);
}

static int read_arch(struct dn_model *m, const json_t *c, struct dn_err *err)
{
    const char *type;
    size_t n;
    int code = dn_config_blame(dn_json_get_string(c, "model_type", &type, &n, err), "model_type", err);
    if (code == 0 && type == NULL)
        code = dn_err_set(err, DN_MODEL_FILE, "\"model_type\" is missing");
    return code == 0 ? dn_model_parse_arch(type, n, m->source, &m->hyper.arch, err) : code;
}

/* Numbers that every family has. */
static int read_sizes(struct dn_hyper *h, const json_t *c, struct dn_err *err)
{
    const struct {
        const char *key;
        int64_t max;
        uint32_t *out;
    } number[] = {{"num_hidden_layers", DN_MODEL_MAX_LAYERS, &h->n_layers},
                  {"hidden_size", 1 << 16, &h->dim},
                  {"intermediate_size", 1 << 20, &h->ff_dim},
                  {"vocab_size", DN_MODEL_MAX_VOCAB, &h->n_vocab},
                  {"max_position_embeddings", 1 << 26, &h->context_tokens},
                  {"num_attention_heads", 4096, &h->n_heads}};
    int code = 0;
    for (size_t i = 0; i < sizeof number / sizeof *number && code == 0; i++)
        code = dn_config_u32(c, number[i].key, number[i].max, 0, number[i].out, err);
    double eps = 0;
    if (code == 0)
        code = dn_config_f64(c, "rms_norm_eps", 0, 1, 1e-6, &eps, err);
    h->norm_eps = (float)eps;
    return code == 0 ? dn_config_bool(c, "tie_word_embeddings", false, &h->tied_head, err) : code;
}

static int read_heads(struct dn_hyper *h, const json_t *c, struct dn_err *err)
{
    int code = dn_config_u32(c, "num_key_value_heads", 4096, h->n_heads, &h->n_kv_heads, err);
    if (code == 0 && !dn_json_has(c, "head_dim") && h->dim % h->n_heads != 0)
        code = dn_err_set(err, DN_MODEL_FILE,
                          "\"hidden_size\" %" PRIu32 " is not a multiple of \"num_attention_heads\" %" PRIu32, h->dim,
                          h->n_heads);
    if (code == 0)
        code = dn_config_u32(c, "head_dim", 1024, h->dim / h->n_heads, &h->head_dim, err);
    h->rotary_dim = h->head_dim;
    h->qkv_bias = h->arch == DN_ARCH_QWEN2;
    h->qk_norm = h->arch == DN_ARCH_QWEN3;
    return code;
}

static int read_hyper(struct dn_model *m, const json_t *c, struct dn_err *err)
{
    struct dn_hyper *h = &m->hyper;
    int code = read_sizes(h, c, err);
    if (code == 0)
        code = h->arch == DN_ARCH_KIMI ? dn_model_read_kimi(h, &m->n_extra_layers, c, err) : read_heads(h, c, err);
    if (code == 0)
        code = refuse_extras(h, c, err);
    if (code == 0)
        code = read_rope(h, c, err);
    return code == 0 ? dn_model_check_hyper(h, err) : code;
}

/* An id or a list of ids. */
static int read_eos(struct dn_model *m, const json_t *c, struct dn_err *err)
{
    const json_t *v = json_object_get(c, "eos_token_id");
    size_t n = json_is_array(v) ? json_array_size(v) : 1;
    if (v == NULL || json_is_null(v))
        return 0;
    if (n > DN_MODEL_MAX_EOS)
        return dn_err_set(err, DN_MODEL_FILE, "\"eos_token_id\": %zu ids, expected at most %d", n, DN_MODEL_MAX_EOS);
    for (size_t i = 0; i < n; i++) {
        int64_t id;
        int code =
            dn_json_int(json_is_array(v) ? json_array_get(v, i) : v, "eos_token_id", 0, DN_MODEL_MAX_VOCAB, &id, err);
        if (code != 0)
            return dn_config_blame(code, "eos_token_id", err);
        code = dn_model_add_eos(m, id, err);
        if (code != 0)
            return code;
    }
    return 0;
}

static int read_bos(struct dn_model *m, const json_t *c, struct dn_err *err)
{
    int64_t id;
    int code =
        dn_config_blame(dn_json_get_int(c, "bos_token_id", 0, DN_MODEL_MAX_VOCAB, -1, &id, err), "bos_token_id", err);
    if (code == 0)
        m->bos_id = (int32_t)id;
    return code;
}

static int read_text_config(struct dn_model *m, const json_t *c, struct dn_err *err)
{
    const char *type;
    size_t n;
    int code = dn_config_blame(dn_json_get_string(c, "model_type", &type, &n, err), "model_type", err);
    if (code == 0 && type != NULL && strcmp(type, "kimi_k2") != 0 && strcmp(type, "deepseek_v3") != 0)
        code = dn_err_set(err, DN_MODEL_FILE,
                          "\"model_type\": \"%.40s\" is not supported, expected kimi_k2 or deepseek_v3", type);
    if (code == 0)
        code = dn_model_check_quantisation(c, err);
    if (code == 0)
        code = read_eos(m, c, err);
    if (code == 0 && m->bos_id < 0)
        code = read_bos(m, c, err);
    return code == 0 ? read_hyper(m, c, err) : code;
}

/* A model that also sees has its language model's numbers in "text_config", and the tensors' names begin otherwise. */
static int read_config(struct dn_model *m, const json_t *c, struct dn_err *err)
{
    json_t *text = NULL;
    int code = read_arch(m, c, err);
    bool is_wrapper = code == 0 && strcmp(json_string_value(json_object_get(c, "model_type")), "kimi_k25") == 0;
    if (is_wrapper) {
        code = dn_config_blame(dn_json_get_object(c, "text_config", &text, err), "text_config", err);
        if (code == 0 && text == NULL)
            code = dn_err_set(err, DN_MODEL_FILE, "\"text_config\" is missing");
        m->prefix = "language_model.";
    }
    if (code == 0 && m->hyper.arch == DN_ARCH_KIMI)
        code = dn_model_check_quantisation(c, err);
    if (code == 0)
        code = read_eos(m, c, err);
    if (code == 0)
        code = read_bos(m, c, err);
    if (!is_wrapper)
        return code == 0 ? read_hyper(m, c, err) : code;
    if (code == 0)
        code = read_text_config(m, text, err);
    return code == 0 || text == NULL ? code : dn_err_prefix(err, "\"text_config\"");
}

int dn_model_read_config(struct dn_model *m, const char *path, struct dn_err *err)
{
    json_t *c;
    int code = read_json_at(path, MAX_CONFIG_BYTES, false, &c, err);
    if (code != 0)
        return code;
    code = read_config(m, c, err);
    json_decref(c);
    return code == 0 ? 0 : dn_err_prefix(err, "%s", path);
}

/* config.json and generation_config.json: both are asked for the ids that end a text. */
static int read_configs(struct dn_model *m, struct dn_err *err)
{
    json_t *g;
    char *path = path_in(m, "config.json");
    int code = dn_model_read_config(m, path, err);
    free(path);
    if (code != 0)
        return code;
    code = read_json(m, "generation_config.json", MAX_CONFIG_BYTES, true, &g, err);
    if (code != 0 || g == NULL)
        return code;
    code = read_eos(m, g, err);
    json_decref(g);
    return code == 0 ? 0 : dn_err_prefix(err, "%s/generation_config.json", m->path);
}

/* tokenizer_config.json's chat_template: a string, or a list of named ones, of which "default" is taken. */
static const json_t *find_template(const json_t *v)
{
    if (json_is_string(v))
        return v;
    for (size_t i = 0; i < json_array_size(v); i++) {
        const json_t *e = json_array_get(v, i), *name = json_object_get(e, "name");
        if (json_is_string(name) && strcmp(json_string_value(name), "default") == 0)
            return json_object_get(e, "template");
    }
    return NULL;
}

/* *out = NULL if the file is not there. Its numbers may be larger than integers: a model_max_length of 1e30 is usual.
 */
static int read_tokenizer_config(const struct dn_model *m, json_t **out, struct dn_err *err)
{
    char *path = path_if_there(m, "tokenizer_config.json"), *text;
    size_t len;
    *out = NULL;
    if (path == NULL)
        return 0;
    int code = dn_mapfile_read_text(path, MAX_TOKENIZER_CONFIG_BYTES, &text, &len, err);
    if (code == 0) {
        *out = dn_tok_json_load(text, len, true, err);
        code = *out != NULL ? 0 : dn_err_prefix(err, "%s", path);
        free(text);
    }
    free(path);
    return code;
}

static int read_template(struct dn_model *m, struct dn_err *err)
{
    char *path = path_if_there(m, "chat_template.jinja"), *text;
    size_t len;
    if (path != NULL) {
        int code = dn_mapfile_read_text(path, MAX_TEMPLATE_BYTES, &text, &len, err);
        free(path);
        if (code == 0 && (code = dn_model_take_template(m, text, len, "chat_template.jinja", err)) != 0)
            dn_err_prefix(err, "%s", m->path);
        return code;
    }
    json_t *c;
    int code = read_tokenizer_config(m, &c, err);
    if (code != 0 || c == NULL)
        return code;
    const json_t *t = find_template(json_object_get(c, "chat_template"));
    if (json_is_string(t))
        code = dn_model_take_template(m, dn_strndup(json_string_value(t), json_string_length(t)), json_string_length(t),
                                      "tokenizer_config.json", err);
    json_decref(c);
    return code == 0 ? 0 : dn_err_prefix(err, "%s", m->path);
}

int dn_model_read_hf(struct dn_model *m, struct dn_err *err)
{
    int code = read_configs(m, err);
    if (code == 0)
        code = read_template(m, err);
    if (code != 0)
        return code;
    m->tokenizer_json = path_if_there(m, "tokenizer.json");
    m->tokenizer_tiktoken = path_if_there(m, "tiktoken.model");
    m->tokenizer_config = path_if_there(m, "tokenizer_config.json");
    return 0;
}

static int open_tokenizer(const struct dn_model *m, struct dn_tokenizer **out, struct dn_err *err)
{
    if (m->source == DN_MODEL_GGUF) {
        int code = dn_tokenizer_read_gguf(out, m->gguf, err);
        return code == 0 ? 0 : dn_err_prefix(err, "%s", m->path);
    }
    if (m->tokenizer_json != NULL)
        return dn_tokenizer_open_json(out, m->tokenizer_json, m->tokenizer_config, err);
    if (m->tokenizer_tiktoken != NULL && m->tokenizer_config == NULL)
        return dn_err_set(err, DN_MODEL_FILE,
                          "%s: tokenizer_config.json is missing, which names the control tokens of tiktoken.model",
                          m->path);
    if (m->tokenizer_tiktoken != NULL)
        return dn_tokenizer_open_tiktoken(out, m->tokenizer_tiktoken, m->tokenizer_config, "kimi-k2", err);
    return dn_err_set(err, DN_MODEL_FILE, "%s: neither tokenizer.json nor tiktoken.model is there", m->path);
}

/* What ends a text must be a token that only the model writes: a prompt's "<|im_end|>" is text, and an id that has no
 * token ends nothing that a template says. Otherwise the files are not of one model, and answers are nonsense. */
static int check_end_ids(const struct dn_model *m, const struct dn_tokenizer *t, struct dn_err *err)
{
    for (size_t i = 0; i < m->n_eos; i++) {
        int32_t id = m->eos_id[i];
        struct dn_tok_str s = dn_tokenizer_piece(t, id);
        if (!dn_tokenizer_has_token(t, id))
            return dn_err_set(err, DN_MODEL_FILE,
                              "%s: end-of-text id %" PRId32 " has no token: the tokenizer is not this model's, or a "
                              "file of it is missing",
                              m->path, id);
        if (!dn_tokenizer_is_added(t, id))
            return dn_err_set(err, DN_MODEL_FILE,
                              "%s: end-of-text id %" PRId32 " is plain text to the tokenizer, \"%.*s\", expected %s",
                              m->path, id, (int)(s.len < 40 ? s.len : 40), s.data,
                              m->source == DN_MODEL_GGUF ? "a control token in tokenizer.ggml.token_type"
                                                         : "one of its added tokens");
    }
    return 0;
}

int dn_model_open_tokenizer(const struct dn_model *m, struct dn_tokenizer **out, struct dn_err *err)
{
    struct dn_tokenizer *t;
    int code = open_tokenizer(m, &t, err);
    if (code != 0)
        return code;
    /* A prompt's ids index the embedding table: one beyond it must never come out of a text. */
    int32_t n = dn_tokenizer_n_vocab(t);
    if ((uint32_t)n > m->hyper.n_vocab) {
        dn_tokenizer_close(t);
        return dn_err_set(err, DN_MODEL_FILE,
                          "%s: the tokenizer has ids up to %" PRId32 ", but the embedding table has only %" PRIu32
                          " rows",
                          m->path, n - 1, m->hyper.n_vocab);
    }
    code = check_end_ids(m, t, err);
    if (code != 0) {
        dn_tokenizer_close(t);
        return code;
    }
    *out = t;
    return 0;
}
