#include "script/keys.h"

#include "base/json.h"
#include "script/conf_schema.h"

#include <stdio.h>
#include <string.h>

enum { MAX_LABELS = 16, MAX_BYTES = 64 };

static const char *const known[] = {"hash", "tenant", "id", "labels"};

struct reading {
    struct dn_keys *keys;
    const char *file;
    struct dn_conf_errors *errors;
};

/* A short printable word: it goes into logs and metric labels. */
static bool is_word(const struct dn_literal *v)
{
    if (v->type != DN_LITERAL_STRING || v->len == 0 || v->len > MAX_BYTES)
        return false;
    for (size_t i = 0; i < v->len; i++) {
        if ((unsigned char)v->string[i] <= ' ' || (unsigned char)v->string[i] >= 0x7F)
            return false;
    }
    return true;
}

static void read_labels(struct reading *r, const struct dn_literal *table, size_t number, struct dn_key *key)
{
    if (table->type != DN_LITERAL_TABLE || table->n_entries > MAX_LABELS) {
        dn_conf_error_add(r->errors, r->file, table->line, "keys[%zu].labels: expected a table of at most %d strings",
                          number, MAX_LABELS);
        return;
    }
    struct dn_key_label *label = dn_arena_alloc0(&r->keys->arena, table->n_entries, sizeof *label);
    size_t n = 0;
    for (const struct dn_literal *v = table->first; v; v = v->next) {
        if (v->key && strlen(v->key) <= MAX_BYTES && is_word(v))
            label[n++] = (struct dn_key_label){v->key, v->string};
        else
            dn_conf_error_add(r->errors, r->file, v->line,
                              "keys[%zu].labels.%.40s: expected name = \"value\" of at most %d printable characters",
                              number, v->key ? v->key : "?", MAX_BYTES);
    }
    key->label = label;
    key->n_labels = n;
}

static void read_hash(struct reading *r, const struct dn_literal *v, size_t number, struct dn_key *key)
{
    if (v->type == DN_LITERAL_STRING && strncmp(v->string, "sha256:", 7) == 0 && v->len == 7 + 2 * DN_SHA256_BYTES &&
        dn_hex_parse(v->string + 7, key->hash, DN_SHA256_BYTES))
        return;
    dn_conf_error_add(
        r->errors, r->file, v->line,
        "keys[%zu].hash: expected \"sha256:\" and 64 hex digits (of the key; the key itself does not belong here)",
        number);
}

static void read_field(struct reading *r, const struct dn_literal *v, size_t number, struct dn_key *key)
{
    if (!v->key) {
        dn_conf_error_add(r->errors, r->file, v->line, "keys[%zu]: expected key = value", number);
    } else if (strcmp(v->key, "hash") == 0) {
        read_hash(r, v, number, key);
    } else if (strcmp(v->key, "labels") == 0) {
        read_labels(r, v, number, key);
    } else if (strcmp(v->key, "tenant") == 0 || strcmp(v->key, "id") == 0) {
        if (!is_word(v))
            dn_conf_error_add(r->errors, r->file, v->line,
                              "keys[%zu].%s: expected 1 to %d printable characters without spaces", number, v->key,
                              MAX_BYTES);
        else if (*v->key == 't')
            key->tenant = v->string;
        else
            key->id = v->string;
    } else {
        const char *near = dn_conf_nearest(v->key, known, sizeof known / sizeof known[0]);
        dn_conf_error_add(r->errors, r->file, v->line, "keys[%zu].%.60s: unknown key%s%s%s", number, v->key,
                          near ? " (did you mean \"" : "", near ? near : "", near ? "\"?)" : "");
    }
}

static void read_key(struct reading *r, const struct dn_literal *entry, size_t number, struct dn_key *key)
{
    key->line = entry->line;
    if (entry->key || entry->type != DN_LITERAL_TABLE) {
        dn_conf_error_add(r->errors, r->file, entry->line, "keys[%zu]: expected { hash = ..., tenant = ... }", number);
        return;
    }
    for (const struct dn_literal *v = entry->first; v; v = v->next)
        read_field(r, v, number, key);
    for (size_t i = 0; i < 2; i++) {
        if (!dn_literal_find(entry, known[i]))
            dn_conf_error_add(r->errors, r->file, entry->line, "keys[%zu].%s: missing", number, known[i]);
    }
    if (!key->id) {
        char hex[9];
        dn_hex_print(key->hash, 4, hex);
        key->id = dn_arena_strndup(&r->keys->arena, hex, 8);
    }
}

static void refuse_twins(struct reading *r, const struct dn_key *key, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        for (size_t k = 0; k < i; k++) {
            bool same_hash = memcmp(key[i].hash, key[k].hash, DN_SHA256_BYTES) == 0;
            if (!same_hash && strcmp(key[i].id, key[k].id) != 0)
                continue;
            dn_conf_error_add(r->errors, r->file, key[i].line, "keys[%zu]: the same %s as keys[%zu] in line %d", i + 1,
                              same_hash ? "hash" : "id", k + 1, key[k].line);
            break;
        }
    }
}

int dn_keys_read(struct dn_keys *keys, const char *path, struct dn_conf_errors *errors)
{
    *keys = (struct dn_keys){0};
    struct dn_literal *table;
    struct dn_err err;
    int line;
    size_t before = errors->n;
    if (dn_literal_read(&keys->arena, path, &table, &line, &err)) {
        dn_conf_error_add(errors, path, line, "%s", err.text);
        return -DN_CONFIG;
    }
    if (table->n_entries > 10000) {
        dn_conf_error_add(errors, path, table->line, "%zu keys, at most 10000", table->n_entries);
        return -DN_CONFIG;
    }
    struct reading r = {.keys = keys, .file = path, .errors = errors};
    struct dn_key *key = dn_arena_alloc0(&keys->arena, table->n_entries, sizeof *key);
    size_t n = 0;
    for (const struct dn_literal *v = table->first; v; v = v->next, n++)
        read_key(&r, v, n + 1, &key[n]);
    if (errors->n == before)
        refuse_twins(&r, key, n);
    keys->item = key;
    keys->n = n;
    return errors->n == before ? 0 : -DN_CONFIG;
}

void dn_keys_release(struct dn_keys *keys)
{
    dn_arena_release(&keys->arena);
    *keys = (struct dn_keys){0};
}

const struct dn_key *dn_keys_find(const struct dn_keys *keys, const char *key, size_t n)
{
    uint8_t hash[DN_SHA256_BYTES];
    dn_sha256(key, n, hash);
    const struct dn_key *found = NULL;
    for (size_t i = 0; i < keys->n; i++) {
        if (dn_ct_equal(keys->item[i].hash, hash, sizeof hash))
            found = &keys->item[i];
    }
    return found;
}

void dn_keys_new(const char *tenant, const char *id, char key[48], struct dn_buf *entry)
{
    static const char digit[] = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";
    size_t n = 0;
    memcpy(key, "dn-", 3);
    while (n < 43) {
        uint8_t byte;
        dn_random_bytes(&byte, 1);
        if (byte < 4 * 62) /* no digit is likelier than another */
            key[3 + n++] = digit[byte % 62];
    }
    key[46] = '\0';
    uint8_t hash[DN_SHA256_BYTES];
    char hex[DN_SHA256_HEX];
    dn_sha256(key, 46, hash);
    dn_hex_print(hash, sizeof hash, hex);
    dn_buf_printf(entry, "  { hash = \"sha256:%s\",\n    tenant = ", hex);
    dn_json_put_string(entry, tenant, strlen(tenant));
    dn_buf_puts(entry, ", id = ");
    dn_json_put_string(entry, id, strlen(id));
    dn_buf_puts(entry, " },\n");
}
