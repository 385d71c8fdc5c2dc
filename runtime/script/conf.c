#include "script/conf.h"

#include "script/conf_schema.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PATH_BYTES = 256 };

struct dn_conf *dn_conf_open(void)
{
    struct dn_conf *c = dn_alloc0(1, sizeof *c);
    c->origin = dn_arena_alloc0(&c->arena, dn_conf_n_rows, sizeof *c->origin);
    for (size_t i = 0; i < dn_conf_n_rows; i++) {
        const struct dn_conf_row *row = &dn_conf_rows[i];
        if (row->scope == DN_CONF_NODE)
            DN_BUG_ON(dn_conf_put_text(c, row, c, row->path, row->fallback, NULL) != 0);
    }
    return c;
}

void dn_conf_close(struct dn_conf *c)
{
    if (!c)
        return;
    dn_arena_release(&c->arena);
    free(c);
}

void dn_conf_error_add(struct dn_conf_errors *errors, const char *file, int line, const char *format, ...)
{
    errors->item = dn_realloc(errors->item, errors->n + 1, sizeof *errors->item);
    struct dn_conf_error *e = &errors->item[errors->n++];
    e->file = file;
    e->line = line;
    struct dn_err cut; /* cuts long texts at a whole character */
    char text[2 * DN_ERR_TEXT];
    va_list ap;
    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    dn_err_set(&cut, DN_CONFIG, "%s", text);
    memcpy(e->text, cut.text, sizeof e->text);
}

static int by_place(const void *a, const void *b)
{
    const struct dn_conf_error *x = a, *y = b;
    int files = strcmp(x->file, y->file);
    if (files)
        return files;
    return x->line != y->line ? (x->line > y->line) - (x->line < y->line) : strcmp(x->text, y->text);
}

void dn_conf_errors_print(struct dn_conf_errors *errors, struct dn_buf *out)
{
    if (errors->n == 0)
        return;
    qsort(errors->item, errors->n, sizeof *errors->item, by_place);
    size_t n_files = 0;
    for (size_t i = 0; i < errors->n; i++) {
        const struct dn_conf_error *e = &errors->item[i];
        n_files += i == 0 || strcmp(e->file, errors->item[i - 1].file) != 0;
        if (e->line > 0)
            dn_buf_printf(out, "%s:%d: %s\n", e->file, e->line, e->text);
        else
            dn_buf_printf(out, "%s: %s\n", e->file, e->text);
    }
    dn_buf_printf(out, "%zu error%s in %zu file%s.\n", errors->n, errors->n == 1 ? "" : "s", n_files,
                  n_files == 1 ? "" : "s");
}

void dn_conf_errors_release(struct dn_conf_errors *errors)
{
    free(errors->item);
    *errors = (struct dn_conf_errors){0};
}

/* What one reading needs. */
struct reading {
    struct dn_conf *c;
    const char *file;
    struct dn_conf_errors *errors;
};

/* The words that may stand at this place of the schema ("limits." -> "connections", ...), for "did you mean". */
static const char *suggest(struct reading *r, const char *prefix, const char *wrong)
{
    const char *word[64];
    size_t n = 0, n_prefix = strlen(prefix);
    for (size_t i = 0; i < dn_conf_n_rows && n < 64; i++) {
        const char *path = dn_conf_rows[i].path;
        if (strncmp(path, prefix, n_prefix) != 0)
            continue;
        size_t len = strcspn(path + n_prefix, ".[");
        const char *w = dn_arena_strndup(&r->c->arena, path + n_prefix, len);
        if (n == 0 || strcmp(word[n - 1], w) != 0)
            word[n++] = w;
    }
    return dn_conf_nearest(wrong, word, n);
}

static bool is_section(const char *path)
{
    for (size_t i = 0; i < dn_conf_n_sections; i++) {
        if (strcmp(dn_conf_sections[i].path, path) == 0)
            return true;
    }
    return false;
}

static void read_table(struct reading *r, const struct dn_literal *table, const char *prefix, const char *place,
                       void *base);

/* Defaults of one model or policy, then what the file says, then what must not be missing. */
static void read_item(struct reading *r, const struct dn_literal *v, enum dn_conf_scope scope, const char *prefix,
                      const char *place, void *base)
{
    for (size_t i = 0; i < dn_conf_n_rows; i++) {
        const struct dn_conf_row *row = &dn_conf_rows[i];
        if (row->scope == scope && row->fallback)
            DN_BUG_ON(dn_conf_put_text(r->c, row, base, row->path, row->fallback, NULL) != 0);
    }
    char inner[PATH_BYTES + 2];
    snprintf(inner, sizeof inner, "%s.", place);
    read_table(r, v, prefix, inner, base);
    for (size_t i = 0; i < dn_conf_n_rows; i++) {
        const struct dn_conf_row *row = &dn_conf_rows[i];
        if (row->scope == scope && !row->fallback && !dn_literal_find(v, row->path + strlen(prefix)))
            dn_conf_error_add(r->errors, r->file, v->line, "%s.%s: missing", place, row->path + strlen(prefix));
    }
}

static void read_models(struct reading *r, const struct dn_literal *table)
{
    struct dn_conf_model *model = dn_arena_alloc0(&r->c->arena, table->n_entries, sizeof *model);
    size_t n = 0;
    for (const struct dn_literal *v = table->first; v; v = v->next) {
        char place[PATH_BYTES];
        snprintf(place, sizeof place, "models[\"%.100s\"]", v->key ? v->key : "");
        if (!v->key || !*v->key || v->type != DN_LITERAL_TABLE) {
            dn_conf_error_add(r->errors, r->file, v->line, "models: expected [\"name\"] = { path = ... }");
            continue;
        }
        model[n].name = v->key;
        model[n].line = v->line;
        read_item(r, v, DN_CONF_MODEL, "models.*.", place, &model[n]);
        n++;
    }
    r->c->model = model;
    r->c->n_models = n;
}

static void read_policies(struct reading *r, const struct dn_literal *table)
{
    struct dn_conf_policy *policy = dn_arena_alloc0(&r->c->arena, table->n_entries, sizeof *policy);
    size_t n = 0;
    for (const struct dn_literal *v = table->first; v; v = v->next) {
        char place[PATH_BYTES];
        snprintf(place, sizeof place, "policy.list[%zu]", n + 1);
        if (v->key || v->type != DN_LITERAL_TABLE) {
            dn_conf_error_add(r->errors, r->file, v->line, "policy.list: expected a list of { file = ... }");
            continue;
        }
        policy[n].line = v->line;
        read_item(r, v, DN_CONF_POLICY, "policy.list[].", place, &policy[n]);
        n++;
    }
    r->c->policy = policy;
    r->c->n_policies = n;
}

/* A key that is no row: a section, a collection, or wrong. */
static void read_other(struct reading *r, const struct dn_literal *v, const char *prefix, const char *path,
                       const char *place)
{
    if (!is_section(path)) {
        const char *near = suggest(r, prefix, v->key);
        if (near)
            dn_conf_error_add(r->errors, r->file, v->line, "%s: unknown key (did you mean \"%s\"?)", place, near);
        else
            dn_conf_error_add(r->errors, r->file, v->line, "%s: unknown key", place);
        return;
    }
    if (v->type != DN_LITERAL_TABLE) {
        dn_conf_error_add(r->errors, r->file, v->line, "%s: expected a table", place);
        return;
    }
    if (strcmp(path, "models") == 0) {
        read_models(r, v);
        return;
    }
    if (strcmp(path, "policy.list") == 0) {
        read_policies(r, v);
        return;
    }
    char inner[PATH_BYTES + 2];
    snprintf(inner, sizeof inner, "%s.", path);
    read_table(r, v, inner, inner, r->c);
}

/* prefix is the place in the schema, place the one that messages show. Recursion follows the schema: at most 3 deep. */
static void read_table(struct reading *r, const struct dn_literal *table, const char *prefix, const char *place,
                       void *base)
{
    for (const struct dn_literal *v = table->first; v; v = v->next) {
        char path[PATH_BYTES], where[PATH_BYTES];
        if (!v->key) {
            dn_conf_error_add(r->errors, r->file, v->line, "%sexpected key = value", *place ? place : "");
            continue;
        }
        snprintf(path, sizeof path, "%s%.100s", prefix, v->key);
        snprintf(where, sizeof where, "%s%.100s", place, v->key);
        const struct dn_conf_row *row = dn_conf_row_find(path);
        if (!row) {
            read_other(r, v, prefix, path, where);
            continue;
        }
        struct dn_err err;
        if (dn_conf_put_literal(r->c, row, base, where, v, &err)) {
            dn_conf_error_add(r->errors, r->file, v->line, "%s", err.text);
            continue;
        }
        if (row->scope == DN_CONF_MODEL)
            ((struct dn_conf_model *)base)->given |= dn_conf_row_bit(row);
        else if (row->scope == DN_CONF_POLICY)
            ((struct dn_conf_policy *)base)->given |= dn_conf_row_bit(row);
        else
            r->c->origin[row - dn_conf_rows].what = dn_arena_printf(&r->c->arena, "%s:%d", r->file, v->line);
    }
}

int dn_conf_read(struct dn_conf *c, const char *path, struct dn_conf_errors *errors)
{
    struct dn_literal *table;
    struct dn_err err;
    int line;
    size_t before = errors->n;
    if (dn_literal_read(&c->arena, path, &table, &line, &err)) {
        dn_conf_error_add(errors, path, line, "%s", err.text);
        return -DN_CONFIG;
    }
    c->file = dn_arena_strndup(&c->arena, path, strlen(path));
    struct reading r = {.c = c, .file = c->file, .errors = errors};
    read_table(&r, table, "", "", c);
    return errors->n == before ? 0 : -DN_CONFIG;
}

int dn_conf_set(struct dn_conf *c, const char *key, const char *text, const char *origin, struct dn_err *err)
{
    const struct dn_conf_row *row = dn_conf_row_find(key);
    if (!row || row->scope != DN_CONF_NODE)
        return dn_err_set(err, DN_CONFIG, "%s: unknown key", key);
    int rc = dn_conf_put_text(c, row, c, origin, text, err);
    if (rc == 0)
        c->origin[row - dn_conf_rows].what = dn_arena_strndup(&c->arena, origin, strlen(origin));
    return rc;
}

bool dn_conf_address(const char *text, char host[64], uint16_t *port)
{
    const char *colon = strrchr(text, ':');
    if (!colon || colon[1] == '\0' || strlen(colon + 1) > 5 || strspn(colon + 1, "0123456789") != strlen(colon + 1))
        return false;
    long number = strtol(colon + 1, NULL, 10);
    size_t n = (size_t)(colon - text);
    if (text[0] == '[') {
        if (n < 3 || text[n - 1] != ']')
            return false;
        text++;
        n -= 2;
        if (strspn(text, "0123456789abcdefABCDEF:.") < n)
            return false;
    } else if (strcspn(text, ": []/") < n) {
        return false;
    }
    if (number > 65535 || n >= 64)
        return false;
    memcpy(host, text, n);
    host[n] = '\0';
    *port = (uint16_t)number;
    return true;
}

bool dn_conf_is_loopback(const char *address)
{
    char host[64];
    uint16_t port;
    if (!dn_conf_address(address, host, &port))
        return false;
    if (strcmp(host, "localhost") == 0 || strcmp(host, "::1") == 0)
        return true;
    unsigned a, b, c, d;
    char rest;
    return sscanf(host, "%3u.%3u.%3u.%3u%c", &a, &b, &c, &d, &rest) == 4 && a == 127 && b < 256 && c < 256 && d < 256;
}

/* Reports at the place where the key was given. */
static void wrong(const struct dn_conf *c, struct dn_conf_errors *errors, const char *key, const char *text)
{
    const char *what = c->origin[dn_conf_row_find(key) - dn_conf_rows].what;
    const char *colon = what ? strrchr(what, ':') : NULL;
    if (colon && c->file)
        dn_conf_error_add(errors, c->file, (int)strtol(colon + 1, NULL, 10), "%s", text);
    else
        dn_conf_error_add(errors, what ? "command line" : "configuration", 0, "%s", text);
}

int dn_conf_check(const struct dn_conf *c, struct dn_conf_errors *errors)
{
    size_t before = errors->n;
    char text[DN_ERR_TEXT];
    if (!*c->cert != !*c->key)
        wrong(c, errors, *c->cert ? "tls.cert" : "tls.key", "tls: cert and key must be given together");
    if (*c->cleartext && !dn_conf_is_loopback(c->cleartext)) {
        snprintf(text, sizeof text, "cleartext = \"%.80s\": plain HTTP is served on loopback only", c->cleartext);
        wrong(c, errors, "cleartext", text);
    }
    if (!*c->keys && !dn_conf_is_loopback(c->listen)) {
        snprintf(text, sizeof text,
                 "listen = \"%.80s\": not loopback, and there are no keys: anyone could use this node (set keys; "
                 "dunlin key add NAME makes one)",
                 c->listen);
        wrong(c, errors, "listen", text);
    }
    if (c->limits.stream_cut_bytes <= c->limits.stream_pause_bytes)
        wrong(c, errors, "limits.stream_cut_bytes", "limits.stream_cut_bytes must be above limits.stream_pause_bytes");
    if (c->limits.body_bytes_inflight < c->limits.body_bytes)
        wrong(c, errors, "limits.body_bytes_inflight", "limits.body_bytes_inflight is below limits.body_bytes");
    if (c->page_tokens & (c->page_tokens - 1))
        wrong(c, errors, "engine.page_tokens", "engine.page_tokens: expected a power of two");
    if (c->step_tokens && c->prefill_chunk_tokens > c->step_tokens)
        wrong(c, errors, "engine.prefill_chunk_tokens", "engine.prefill_chunk_tokens is above engine.step_tokens");
    return errors->n == before ? 0 : -DN_CONFIG;
}
