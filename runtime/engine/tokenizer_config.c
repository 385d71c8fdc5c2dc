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
    int32_t other = dn_tokenizer_find(t, json_string_value(content), json_string_length(content));
    if (other >= 0 && other != id && dn_tokenizer_is_added(t, other))
        return dn_err_set(err, DN_MODEL_FILE, "added token %lld is \"%.40s\", and so is %d", (long long)id,
                          json_string_value(content), other);
    return dn_tok_build_added(t, id, json_string_value(content), json_string_length(content), options,
                              json_is_true(json_object_get(entry, "special")), err);
}

/* tokenizer.json has the tokens already; one that it does not have, or has otherwise, is of another tokenizer. */
static int check_added(const struct dn_tokenizer *t, int64_t id, const json_t *entry, struct dn_err *err)
{
    const json_t *content = json_object_get(entry, "content");
    struct dn_tok_str is = {NULL, 0};
    if (id <= INT32_MAX)
        is = dn_tokenizer_piece(t, (int32_t)id);
    if (!json_is_string(content))
        return dn_err_set(err, DN_MODEL_FILE, "added token %lld: content is missing", (long long)id);
    if (is.data == NULL || !dn_tokenizer_is_added(t, (int32_t)id))
        return dn_err_set(err, DN_MODEL_FILE,
                          "added_tokens_decoder: token %lld is \"%.40s\", which tokenizer.json has not among its "
                          "added_tokens",
                          (long long)id, json_string_value(content));
    if (is.len != json_string_length(content) || memcmp(is.data, json_string_value(content), is.len) != 0)
        return dn_err_set(err, DN_MODEL_FILE,
                          "added_tokens_decoder: token %lld is \"%.40s\", but in tokenizer.json \"%.*s\"",
                          (long long)id, json_string_value(content), (int)(is.len < 40 ? is.len : 40), is.data);
    return 0;
}

/* What the file calls added: taken from it, or only compared with what is there. */
static int apply_added(struct dn_tokenizer *t, const json_t *root, bool take, struct dn_err *err)
{
    const json_t *added = json_object_get(root, "added_tokens_decoder");
    if (added == NULL && take)
        return dn_err_set(err, DN_MODEL_FILE, "added_tokens_decoder is missing: control tokens would be plain text");
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
        int rc = take ? dn_tok_config_added(t, id, entry, err) : check_added(t, id, entry, err);
        if (rc)
            return rc;
    }
    return 0;
}

/* "bos_token": "<s>", or an object with content, or null. One that the vocabulary does not have is an error where it
 * begins or ends texts: a template would write it, and it would be no token. One that the vocabulary has as a plain
 * word becomes a control token, as other readers have it. */
static int apply_id(struct dn_tokenizer *t, const json_t *root, const char *key, bool needed, int32_t *id,
                    struct dn_err *err)
{
    const json_t *value = json_object_get(root, key);
    if (json_is_object(value))
        value = json_object_get(value, "content");
    if (!json_is_string(value) || json_string_length(value) == 0)
        return 0;
    int32_t found = dn_tokenizer_find(t, json_string_value(value), json_string_length(value));
    if (found < 0 && needed)
        return dn_err_set(err, DN_MODEL_FILE, "%s \"%.40s\" is not in the vocabulary", key, json_string_value(value));
    if (found >= 0)
        *id = found;
    if (needed && !dn_tokenizer_is_added(t, found))
        return dn_tok_build_added(t, found, json_string_value(value), json_string_length(value),
                                  (struct dn_tok_added){0}, true, err);
    return 0;
}

int dn_tok_config_apply(struct dn_tokenizer *t, const char *text, size_t n, bool with_added, struct dn_err *err)
{
    json_t *root = dn_tok_json_load(text, n, true, err);
    if (root == NULL) {
        dn_err_prefix(err, "tokenizer_config.json");
        return -DN_MODEL_FILE;
    }
    const struct {
        const char *key;
        bool needed;
        int32_t *id;
    } special[] = {{"bos_token", true, &t->bos},
                   {"eos_token", true, &t->eos},
                   {"pad_token", false, &t->pad},
                   {"unk_token", false, &t->unk}};
    int rc = apply_added(t, root, with_added, err);
    for (size_t i = 0; i < sizeof special / sizeof *special && rc == 0; i++)
        rc = apply_id(t, root, special[i].key, special[i].needed, special[i].id, err);
    if (rc)
        dn_err_prefix(err, "tokenizer_config.json");
    else if (json_is_true(json_object_get(root, "add_bos_token")) && t->n_prefix == 0 && t->bos >= 0)
        t->prefix[t->n_prefix++] = t->bos;
    json_decref(root);
    return rc;
}
