#include "engine/tokenizer_config.h"

#include <stdlib.h>
#include <string.h>

json_t *dn_tok_json_load(const char *text, size_t n, bool is_config, struct dn_err *err)
{
    json_error_t at;
    size_t flags = JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL | (is_config ? JSON_DECODE_INT_AS_REAL : 0);
    json_t *root = json_loadb(text ? text : "", n, flags, &at);
    if (root == NULL) {
        dn_err_set(err, DN_MODEL_FILE, "not valid JSON: line %d, column %d: %.80s", at.line, at.column, at.text);
        return NULL;
    }
    if (!json_is_object(root)) {
        json_decref(root);
        dn_err_set(err, DN_MODEL_FILE, "expected a JSON object");
        return NULL;
    }
    return root;
}

int dn_tok_config_added(struct dn_tokenizer *t, int64_t id, const json_t *entry, struct dn_err *err)
{
    const json_t *content = json_object_get(entry, "content");
    if (!json_is_string(content))
        return dn_err_set(err, DN_MODEL_FILE, "added token %lld: content is missing", (long long)id);
    struct dn_tok_added options = {
        .lstrip = json_is_true(json_object_get(entry, "lstrip")),
        .rstrip = json_is_true(json_object_get(entry, "rstrip")),
        .single_word = json_is_true(json_object_get(entry, "single_word")),
        .normalized = json_is_true(json_object_get(entry, "normalized")),
    };
    return dn_tok_build_added(t, id, json_string_value(content), json_string_length(content), options,
                              json_is_true(json_object_get(entry, "special")), err);
}

static int apply_added(struct dn_tokenizer *t, const json_t *root, struct dn_err *err)
{
    const json_t *added = json_object_get(root, "added_tokens_decoder");
    if (added == NULL)
        return 0;
    if (!json_is_object(added))
        return dn_err_set(err, DN_MODEL_FILE, "added_tokens_decoder: expected an object");
    const char *key;
    json_t *entry;
    json_object_foreach((json_t *)added, key, entry)
    {
        char *end;
        long long id = strtoll(key, &end, 10);
        if (end == key || *end || id < 0 || !json_is_object(entry))
            return dn_err_set(err, DN_MODEL_FILE, "added_tokens_decoder: \"%.32s\" is not an id with an object", key);
        int rc = dn_tok_config_added(t, id, entry, err);
        if (rc)
            return rc;
    }
    return 0;
}

/* "bos_token": "<s>", or an object with content, or null. A token that the vocabulary does not have stays -1. */
static void apply_id(const struct dn_tokenizer *t, const json_t *root, const char *key, int32_t *id)
{
    const json_t *value = json_object_get(root, key);
    if (json_is_object(value))
        value = json_object_get(value, "content");
    if (!json_is_string(value))
        return;
    int32_t found = dn_tokenizer_find(t, json_string_value(value), json_string_length(value));
    if (found >= 0)
        *id = found;
}

int dn_tok_config_apply(struct dn_tokenizer *t, const char *text, size_t n, bool with_added, struct dn_err *err)
{
    json_t *root = dn_tok_json_load(text, n, true, err);
    if (root == NULL) {
        dn_err_prefix(err, "tokenizer_config.json");
        return -DN_MODEL_FILE;
    }
    int rc = with_added ? apply_added(t, root, err) : 0;
    if (rc) {
        dn_err_prefix(err, "tokenizer_config.json");
    } else {
        apply_id(t, root, "bos_token", &t->bos);
        apply_id(t, root, "eos_token", &t->eos);
        apply_id(t, root, "pad_token", &t->pad);
        apply_id(t, root, "unk_token", &t->unk);
        if (json_is_true(json_object_get(root, "add_bos_token")) && t->n_prefix == 0 && t->bos >= 0)
            t->prefix[t->n_prefix++] = t->bos;
    }
    json_decref(root);
    return rc;
}
