#include "engine/tokenizer_config.h"
#include "engine/tokenizer_impl.h"

#include <stdlib.h>
#include <string.h>

enum { MAX_FILE = 256 << 20, MAX_DEPTH = 3 };

static const char *type_of(const json_t *j)
{
    const char *type = json_string_value(json_object_get(j, "type"));
    return type ? type : "";
}

static bool is_type(const json_t *j, const char *type)
{
    return strcmp(type_of(j), type) == 0;
}

static int unsupported(const char *where, const json_t *j, struct dn_err *err)
{
    return dn_err_set(err, DN_MODEL_FILE, "%s \"%.40s\" is not supported in this place", where, type_of(j));
}

/* Whether a (nested) list of steps has one of this type. */
static bool has_step(const json_t *j, const char *list, const char *type, int depth)
{
    if (is_type(j, type))
        return true;
    size_t i;
    const json_t *item;
    if (is_type(j, "Sequence") && depth < MAX_DEPTH)
        json_array_foreach(json_object_get(j, list), i, item)
        {
            if (has_step(item, list, type, depth + 1))
                return true;
        }
    return false;
}

static int read_normalizer(struct dn_tokenizer *t, const json_t *j, int depth, struct dn_err *err)
{
    static const char block[] = "\xE2\x96\x81";
    if (j == NULL || json_is_null(j))
        return 0;
    if (is_type(j, "Sequence") && depth < MAX_DEPTH) {
        size_t i;
        const json_t *item;
        json_array_foreach(json_object_get(j, "normalizers"), i, item)
        {
            int rc = read_normalizer(t, item, depth + 1, err);
            if (rc)
                return rc;
        }
        return 0;
    }
    if (is_type(j, "NFC") && !t->is_spm) {
        t->has_nfc = true;
        return 0;
    }
    const char *prepend = json_string_value(json_object_get(j, "prepend"));
    if (is_type(j, "Prepend") && t->is_spm && prepend && strcmp(prepend, block) == 0) {
        t->space_prefix = true;
        return 0;
    }
    const char *from = json_string_value(json_object_get(json_object_get(j, "pattern"), "String"));
    const char *to = json_string_value(json_object_get(j, "content"));
    if (is_type(j, "Replace") && t->is_spm && from && to && strcmp(from, " ") == 0 && strcmp(to, block) == 0)
        return 0;
    return unsupported("normalizer", j, err);
}

static int read_split(struct dn_tokenizer *t, const json_t *j, struct dn_err *err)
{
    const json_t *pattern = json_object_get(j, "pattern");
    const char *regex = json_string_value(json_object_get(pattern, "Regex"));
    const char *behavior = json_string_value(json_object_get(j, "behavior"));
    bool invert = json_is_true(json_object_get(j, "invert"));
    if (regex == NULL)
        return dn_err_set(err, DN_MODEL_FILE, "pre_tokenizer \"Split\": expected pattern.Regex");
    if (strlen(regex) != json_string_length(json_object_get(pattern, "Regex")))
        return dn_err_set(err, DN_MODEL_FILE, "pre_tokenizer \"Split\": NUL in the pattern");
    if (behavior && strcmp(behavior, "Isolated") == 0)
        return dn_tok_pre_add(t, regex, true, true, err);
    if (behavior && strcmp(behavior, "Removed") == 0)
        return dn_tok_pre_add(t, regex, invert, !invert, err);
    return dn_err_set(err, DN_MODEL_FILE, "pre_tokenizer \"Split\": behavior \"%.40s\" is not supported",
                      behavior ? behavior : "");
}

static int read_metaspace(struct dn_tokenizer *t, const json_t *j, struct dn_err *err)
{
    const char *scheme = json_string_value(json_object_get(j, "prepend_scheme"));
    if (!t->is_spm || !json_is_false(json_object_get(j, "split")) || scheme == NULL)
        return unsupported("pre_tokenizer", j, err);
    t->space_prefix = strcmp(scheme, "never") != 0;
    t->space_prefix_first_only = strcmp(scheme, "first") == 0;
    return 0;
}

static int read_pre_tokenizer(struct dn_tokenizer *t, const json_t *j, int depth, struct dn_err *err)
{
    if (j == NULL || json_is_null(j))
        return 0;
    if (is_type(j, "Sequence") && depth < MAX_DEPTH) {
        size_t i;
        const json_t *item;
        json_array_foreach(json_object_get(j, "pretokenizers"), i, item)
        {
            int rc = read_pre_tokenizer(t, item, depth + 1, err);
            if (rc)
                return rc;
        }
        return 0;
    }
    if (is_type(j, "Split"))
        return read_split(t, j, err);
    if (is_type(j, "Digits")) /* numeric characters of every script and kind, not only decimal digits */
        return dn_tok_pre_add(t, json_is_true(json_object_get(j, "individual_digits")) ? "\\p{N}" : "\\p{N}+", true,
                              true, err);
    if (is_type(j, "Metaspace"))
        return read_metaspace(t, j, err);
    if (!is_type(j, "ByteLevel") || t->is_spm)
        return unsupported("pre_tokenizer", j, err);
    if (json_is_true(json_object_get(j, "add_prefix_space"))) {
        if (t->n_step)
            return dn_err_set(err, DN_MODEL_FILE, "pre_tokenizer \"ByteLevel\": add_prefix_space behind another step");
        t->space_prefix = true;
    }
    if (json_is_false(json_object_get(j, "use_regex")))
        return 0;
    return dn_tok_pre_add(t, dn_tok_gpt2_pattern, true, true, err);
}

static int put_affix(struct dn_tokenizer *t, const json_t *special, bool behind, struct dn_err *err)
{
    const char *name = json_string_value(json_object_get(special, "id"));
    int32_t id = name ? dn_tokenizer_find(t, name, strlen(name)) : -1;
    size_t *n = behind ? &t->n_suffix : &t->n_prefix;
    if (id < 0 || *n == DN_TOK_MAX_AFFIX)
        return dn_err_set(err, DN_MODEL_FILE,
                          "post_processor: token \"%.40s\" is not in the vocabulary, or one too many",
                          name ? name : "");
    (behind ? t->suffix : t->prefix)[(*n)++] = id;
    return 0;
}

static int read_post_processor(struct dn_tokenizer *t, const json_t *j, int depth, struct dn_err *err)
{
    if (j == NULL || json_is_null(j) || is_type(j, "ByteLevel"))
        return 0;
    bool is_sequence = is_type(j, "Sequence") && depth < MAX_DEPTH;
    if (!is_sequence && !is_type(j, "TemplateProcessing"))
        return unsupported("post_processor", j, err);
    bool behind = false;
    size_t i;
    const json_t *item;
    json_array_foreach(json_object_get(j, is_sequence ? "processors" : "single"), i, item)
    {
        int rc = 0;
        const json_t *special = json_object_get(item, "SpecialToken");
        if (is_sequence)
            rc = read_post_processor(t, item, depth + 1, err);
        else if (special)
            rc = put_affix(t, special, behind, err);
        else
            behind = true;
        if (rc)
            return rc;
    }
    return 0;
}

static bool is_blank(const json_t *j)
{
    return j == NULL || json_is_null(j) || (json_is_string(j) && json_string_length(j) == 0);
}

static int check_model(struct dn_tokenizer *t, const json_t *root, const json_t *model, struct dn_err *err)
{
    const json_t *pre = json_object_get(root, "pre_tokenizer"), *decoder = json_object_get(root, "decoder");
    if (!json_is_object(model))
        return dn_err_set(err, DN_MODEL_FILE, "model is missing");
    if (json_object_get(model, "type") && !is_type(model, "BPE"))
        return dn_err_set(err, DN_MODEL_FILE, "model.type \"%.40s\" is not supported; expected BPE", type_of(model));
    if (!is_blank(json_object_get(model, "continuing_subword_prefix")) ||
        !is_blank(json_object_get(model, "end_of_word_suffix")))
        return dn_err_set(err, DN_MODEL_FILE,
                          "model.continuing_subword_prefix and model.end_of_word_suffix are not supported");
    if (json_number_value(json_object_get(model, "dropout")) != 0)
        return dn_err_set(err, DN_MODEL_FILE, "model.dropout is not supported");
    bool byte_level = has_step(pre, "pretokenizers", "ByteLevel", 0);
    t->is_spm = !byte_level && json_is_true(json_object_get(model, "byte_fallback"));
    t->fuse_unk = json_is_true(json_object_get(model, "fuse_unk"));
    t->ignore_merges = json_is_true(json_object_get(model, "ignore_merges"));
    if (!byte_level && !t->is_spm)
        return dn_err_set(err, DN_MODEL_FILE, "neither pre_tokenizer \"ByteLevel\" nor model.byte_fallback");
    if (t->is_spm && t->ignore_merges)
        return dn_err_set(err, DN_MODEL_FILE, "model.ignore_merges with byte_fallback is not supported");
    if (byte_level && !has_step(decoder, "decoders", "ByteLevel", 0))
        return dn_err_set(err, DN_MODEL_FILE, "decoder \"%.40s\": expected ByteLevel", type_of(decoder));
    return 0;
}

static int read_merges(struct dn_tokenizer *t, const json_t *merges, struct dn_err *err)
{
    if (!json_is_array(merges))
        return dn_err_set(err, DN_MODEL_FILE, "model.merges is missing");
    size_t i;
    const json_t *m;
    json_array_foreach(merges, i, m)
    {
        const json_t *left = json_array_get(m, 0), *right = json_array_get(m, 1);
        const char *text = json_string_value(m);
        const char *space = text ? memchr(text, ' ', json_string_length(m)) : NULL;
        int rc;
        if (space && memchr(space + 1, ' ', json_string_length(m) - (size_t)(space - text) - 1) == NULL)
            rc = dn_tok_build_merge_text(t, text, (size_t)(space - text), space + 1,
                                         json_string_length(m) - (size_t)(space - text) - 1, err);
        else if (json_array_size(m) == 2 && json_is_string(left) && json_is_string(right))
            rc = dn_tok_build_merge_text(t, json_string_value(left), json_string_length(left), json_string_value(right),
                                         json_string_length(right), err);
        else
            rc = dn_err_set(err, DN_MODEL_FILE, "merge %zu: expected \"left right\" or [\"left\", \"right\"]", i);
        if (rc)
            return dn_err_prefix(err, "model.merges");
    }
    return 0;
}

static int read_vocab(struct dn_tokenizer *t, const json_t *vocab, struct dn_err *err)
{
    if (!json_is_object(vocab))
        return dn_err_set(err, DN_MODEL_FILE, "model.vocab is missing");
    const char *key;
    json_t *id;
    json_object_foreach((json_t *)vocab, key, id)
    {
        if (!json_is_integer(id))
            return dn_err_set(err, DN_MODEL_FILE, "model.vocab[\"%.40s\"]: expected a number", key);
        int rc = dn_tok_build_vocab(t, json_integer_value(id), key, strlen(key), err);
        if (rc)
            return dn_err_prefix(err, "model.vocab[\"%.40s\"]", key);
    }
    return 0;
}

static int read_added(struct dn_tokenizer *t, const json_t *added, struct dn_err *err)
{
    size_t i;
    const json_t *entry;
    json_array_foreach(added, i, entry)
    {
        const json_t *id = json_object_get(entry, "id");
        int rc = json_is_integer(id) ? dn_tok_config_added(t, json_integer_value(id), entry, err)
                                     : dn_err_set(err, DN_MODEL_FILE, "id is missing");
        if (rc)
            return dn_err_prefix(err, "added_tokens[%zu]", i);
    }
    return 0;
}

static int read_root(struct dn_tokenizer *t, const json_t *root, struct dn_err *err)
{
    const json_t *model = json_object_get(root, "model");
    int rc = check_model(t, root, model, err);
    if (rc == 0)
        rc = read_normalizer(t, json_object_get(root, "normalizer"), 0, err);
    if (rc == 0)
        rc = read_pre_tokenizer(t, json_object_get(root, "pre_tokenizer"), 0, err);
    if (rc == 0)
        rc = read_vocab(t, json_object_get(model, "vocab"), err);
    if (rc == 0)
        rc = read_merges(t, json_object_get(model, "merges"), err);
    if (rc == 0)
        rc = read_added(t, json_object_get(root, "added_tokens"), err);
    if (rc == 0)
        rc = read_post_processor(t, json_object_get(root, "post_processor"), 0, err);
    const json_t *unk = json_object_get(model, "unk_token");
    if (rc == 0 && json_is_string(unk))
        t->unk = dn_tokenizer_find(t, json_string_value(unk), json_string_length(unk));
    return rc;
}

int dn_tokenizer_parse_json(struct dn_tokenizer **out, const char *json, size_t n_json, const char *config,
                            size_t n_config, struct dn_err *err)
{
    json_t *root = dn_tok_json_load(json, n_json, false, err);
    if (root == NULL)
        return -DN_MODEL_FILE;
    struct dn_tokenizer *t = dn_alloc(sizeof *t);
    dn_tok_build_init(t);
    int rc = read_root(t, root, err);
    json_decref(root);
    if (rc == 0 && n_config)
        rc = dn_tok_config_apply(t, config, n_config, false, err);
    if (rc == 0)
        rc = dn_tok_build_finish(t, err);
    if (rc) {
        dn_tokenizer_close(t);
        return rc;
    }
    *out = t;
    return 0;
}

int dn_tokenizer_open_json(struct dn_tokenizer **out, const char *path, const char *config_path, struct dn_err *err)
{
    struct dn_buf json = {0}, config = {0};
    int rc = dn_tok_read_file(path, MAX_FILE, &json, err);
    if (rc == 0 && config_path)
        rc = dn_tok_read_file(config_path, MAX_FILE, &config, err);
    if (rc == 0) {
        rc = dn_tokenizer_parse_json(out, json.data, json.len, config.data, config.len, err);
        if (rc)
            dn_err_prefix(err, "%s", path);
    }
    dn_buf_release(&json);
    dn_buf_release(&config);
    return rc;
}
