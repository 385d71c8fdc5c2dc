#include "policy/host.h"

#include "base/hash.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FILE_MAX_BYTES (1u << 20)

/* The text of a file, in the set's arena. */
static int read_file(struct dn_policy_set *s, struct dn_policy_file *f, struct dn_err *err)
{
    FILE *in = fopen(f->file, "rbe");
    if (!in)
        return dn_err_set(err, DN_POLICY, "%s: %s", f->file, strerror(errno));
    struct dn_buf text = {0};
    dn_buf_reserve(&text, 16384);
    size_t n;
    do {
        dn_buf_reserve(&text, 16384);
        n = fread(text.data + text.len, 1, 16384, in);
        text.len += n;
    } while (n > 0 && text.len <= FILE_MAX_BYTES);
    int failed = ferror(in), reason = errno;
    fclose(in);
    int rc = 0;
    if (failed)
        rc = dn_err_set(err, DN_POLICY, "%s: %s", f->file, strerror(reason));
    else if (text.len > FILE_MAX_BYTES)
        rc = dn_err_set(err, DN_POLICY, "%s: larger than %u bytes", f->file, FILE_MAX_BYTES);
    else
        f->source = dn_arena_strndup(&s->arena, text.data, text.len);
    f->len = text.len;
    dn_buf_release(&text);
    return rc;
}

static const struct dn_policy_param *copy_params(struct dn_policy_set *s, const struct dn_policy_item *item)
{
    struct dn_policy_param *p = dn_arena_alloc0(&s->arena, item->n_params ? item->n_params : 1, sizeof *p);
    for (size_t i = 0; i < item->n_params; i++) {
        p[i] = item->param[i];
        p[i].name = dn_arena_strndup(&s->arena, p[i].name, strlen(p[i].name));
        if (p[i].kind == DN_PARAM_STRING)
            p[i].string = dn_arena_strndup(&s->arena, p[i].string, strlen(p[i].string));
    }
    return p;
}

static void put_digest(struct dn_sha256 *sha, const void *data, size_t n)
{
    uint64_t len = n; /* lengths between, so that two different lists never give the same bytes */
    dn_sha256_put(sha, &len, sizeof len);
    dn_sha256_put(sha, data, n);
}

static void make_revision(struct dn_policy_set *s)
{
    struct dn_sha256 sha;
    dn_sha256_init(&sha);
    for (size_t i = 0; i < s->n_files; i++) {
        const struct dn_policy_file *f = &s->file[i];
        put_digest(&sha, f->file, strlen(f->file));
        put_digest(&sha, f->source, f->len);
        uint8_t flags[3] = {f->is_shadow, (uint8_t)f->on_error[DN_HOOK_ADMIT], (uint8_t)f->on_error[DN_HOOK_ROUTE]};
        put_digest(&sha, flags, sizeof flags);
        for (size_t k = 0; k < f->n_params; k++) {
            const struct dn_policy_param *p = &f->param[k];
            put_digest(&sha, p->name, strlen(p->name));
            if (p->kind == DN_PARAM_NUMBER)
                put_digest(&sha, &p->number, sizeof p->number);
            else if (p->kind == DN_PARAM_BOOLEAN)
                put_digest(&sha, &p->boolean, sizeof p->boolean);
            else
                put_digest(&sha, p->string, strlen(p->string));
        }
    }
    uint8_t digest[DN_SHA256_BYTES];
    dn_sha256_finish(&sha, digest);
    dn_hex_print(digest, 4, s->revision);
}

int dn_policy_set_read(struct dn_policy_set **out, const struct dn_policy_config *config, struct dn_err *err)
{
    if (config->n_items > DN_POLICY_MAX)
        return dn_err_set(err, DN_POLICY, "policy.list: %zu files: expected at most %d", config->n_items,
                          DN_POLICY_MAX);
    struct dn_policy_set *s = dn_alloc0(1, sizeof *s);
    s->n_refs = 1;
    s->config = *config;
    s->config.item = NULL;
    s->config.node = NULL;
    if (!s->config.wall_ns)
        s->config.wall_ns = 1000000;
    if (!s->config.instructions)
        s->config.instructions = 200000;
    if (!s->config.memory_bytes)
        s->config.memory_bytes = 8u << 20;
    s->n_files = config->n_items;
    for (size_t i = 0; i < s->n_files; i++) {
        const struct dn_policy_item *item = &config->item[i];
        struct dn_policy_file *f = &s->file[i];
        f->file = dn_arena_strndup(&s->arena, item->file, strlen(item->file));
        f->is_shadow = item->is_shadow;
        f->on_error[DN_HOOK_ADMIT] = item->on_admit_error;
        f->on_error[DN_HOOK_ROUTE] = item->on_route_error;
        f->param = copy_params(s, item);
        f->n_params = item->n_params;
        if (item->source) {
            f->len = strlen(item->source);
            f->source = dn_arena_strndup(&s->arena, item->source, f->len);
        } else {
            int rc = read_file(s, f, err);
            if (rc) {
                dn_policy_set_put(s);
                return rc;
            }
        }
        s->item[i] = *item;
        s->item[i].file = f->file;
        s->item[i].source = item->source ? f->source : NULL;
        s->item[i].param = f->param;
    }
    make_revision(s);
    *out = s;
    return 0;
}

struct dn_policy_set *dn_policy_set_get(struct dn_policy_set *s)
{
    atomic_fetch_add_explicit(&s->n_refs, 1, memory_order_relaxed);
    return s;
}

void dn_policy_set_put(struct dn_policy_set *s)
{
    if (!s || atomic_fetch_sub(&s->n_refs, 1) != 1)
        return;
    dn_arena_release(&s->arena);
    free(s);
}
