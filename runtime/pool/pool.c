#include "pool/pool.h"

#include "base/buf.h"

#include <stdlib.h>
#include <string.h>

enum {
    DEFAULT_SEQUENCES = 32,
    DEFAULT_STEP_TOKENS = 512,
    DEFAULT_ECHO_ROWS = 64,
    DEFAULT_PAGE_TOKENS = 16,
    STEP_TAGS = 512
};
static const uint64_t default_kv_bytes_max = 1ull << 30, slab_bytes_max = 16 << 20;

static uint32_t or_default(uint32_t value, uint32_t fallback)
{
    return value ? value : fallback;
}

static void choose_sizes(struct dn_pool *p)
{
    struct dn_pool_conf *c = &p->conf;
    c->max_sequences = or_default(c->max_sequences, DEFAULT_SEQUENCES);
    c->step_tokens = or_default(c->step_tokens, DEFAULT_STEP_TOKENS);
    if (c->step_tokens < c->max_sequences) /* every running sequence can decode in every step */
        c->step_tokens = c->max_sequences;
    c->echo_rows = or_default(c->echo_rows, DEFAULT_ECHO_ROWS);
    c->page_tokens = or_default(c->page_tokens, DEFAULT_PAGE_TOKENS);
    c->n_valid = or_default(c->n_valid, p->model->hyper.n_vocab);
    c->context_tokens = or_default(c->context_tokens, p->model->hyper.context_tokens);
    if (c->context_tokens > p->model->hyper.context_tokens)
        c->context_tokens = p->model->hyper.context_tokens;
    if (c->kv_bytes == 0) {
        /* Four full contexts; a sixteenth more for what is lost in pages and slabs that are not full. */
        c->kv_bytes = 4 * (uint64_t)c->context_tokens * dn_model_kv_bytes(p->model, false);
        c->kv_bytes += c->kv_bytes / 16;
        if (c->kv_bytes > default_kv_bytes_max)
            c->kv_bytes = default_kv_bytes_max;
    }
}

/* What a step may hold; device and runner are opened with the same. */
static int choose_limits(const struct dn_pool_conf *c, struct dn_step_limits *out, struct dn_err *err)
{
    uint64_t pages = (uint64_t)c->max_sequences * ((c->context_tokens + c->page_tokens - 1) / c->page_tokens);
    if (pages > UINT32_MAX / 2)
        return dn_err_set(err, DN_CONFIG, "max_sequences %u x context %u: page tables of %llu entries are too large",
                          c->max_sequences, c->context_tokens, (unsigned long long)pages);
    *out = (struct dn_step_limits){.tokens = c->step_tokens,
                                   .seqs = c->max_sequences,
                                   .rows = c->max_sequences + c->echo_rows,
                                   .pages = (uint32_t)pages,
                                   .tags = STEP_TAGS};
    return 0;
}

static int open_device(struct dn_pool *p, const struct dn_step_limits *limits, struct dn_err *err)
{
    const struct dn_pool_conf *c = &p->conf;
    struct dn_device_conf dc = {
        .n_threads = c->n_threads,
        .isa = c->isa,
        .limits = *limits,
        .n_slots = c->max_sequences,
        .n_vocab = p->model->hyper.n_vocab,
    };
    if (strcmp(c->backend, "cpu") == 0)
        return dn_kernels_open_cpu(&dc, &p->device, err);
    return dn_kernels_open_library(c->backend, &dc, &p->device, err);
}

static int open_runner(struct dn_pool *p, const struct dn_step_limits *limits, struct dn_err *err)
{
    struct dn_pool_conf *c = &p->conf;
    struct dn_runner_conf rc = {
        .limits = *limits,
        .context_tokens = c->context_tokens,
        .page_tokens = c->page_tokens,
        .arena_bytes = c->kv_bytes,
        .n_valid = c->n_valid,
    };
    /* Large slabs round less away between formats; small ones let memory change its format sooner. */
    rc.slab_bytes = c->kv_bytes / 32 < slab_bytes_max ? c->kv_bytes / 32 : slab_bytes_max;
    int rc_open = dn_runner_open(p->device, p->weights, &rc, &p->runner, err);
    if (rc_open != 0)
        return rc_open;
    const struct dn_kv_layout *l = &p->runner->layout;
    for (int f = 0; f < DN_KV_FORMATS; f++) {
        uint64_t tokens = (uint64_t)p->runner->n_slabs * l->format[f].pages_per_slab * l->page_tokens;
        p->capacity_tokens[f] = tokens > UINT32_MAX ? UINT32_MAX : (uint32_t)tokens;
    }
    if (p->capacity_tokens[DN_KV_BF16] < c->context_tokens)
        c->context_tokens = p->capacity_tokens[DN_KV_BF16]; /* the receipt and /v1/models show what is left */
    return 0;
}

int dn_pool_open(const struct dn_pool_conf *conf, const struct dn_model *model, struct dn_pool **out,
                 struct dn_err *err)
{
    struct dn_pool *p = dn_alloc0(1, sizeof *p);
    p->conf = *conf;
    p->conf.name = dn_strdup(conf->name ? conf->name : "main");
    p->conf.backend = dn_strdup(conf->backend ? conf->backend : "cpu");
    p->model = model;
    choose_sizes(p);
    struct dn_step_limits limits = {0};
    int rc = choose_limits(&p->conf, &limits, err);
    if (rc == 0)
        rc = open_device(p, &limits, err);
    if (rc == 0) {
        struct dn_weights_conf wc = {.format = p->conf.weights,
                                     .n_threads = p->conf.n_threads,
                                     .progress = p->conf.progress,
                                     .progress_ctx = p->conf.progress_ctx};
        rc = dn_weights_open(p->device, model, &wc, &p->weights, err);
    }
    if (rc == 0)
        rc = open_runner(p, &limits, err);
    if (rc != 0) {
        dn_pool_close(p);
        return rc;
    }
    uint64_t seed;
    dn_random_bytes(&seed, sizeof seed);
    p->pages = dn_pages_open(&p->runner->layout, p->runner->n_slabs, seed);
    p->prefix = dn_prefix_open(p->pages, p->runner->layout.page_tokens, dn_hash_key_random());
    *out = p;
    return 0;
}

void dn_pool_close(struct dn_pool *p)
{
    if (!p)
        return;
    dn_prefix_close(p->prefix);
    dn_pages_close(p->pages);
    dn_runner_close(p->runner);
    dn_weights_close(p->weights);
    if (p->device)
        p->device->ops->close(p->device);
    free((char *)p->conf.name);
    free((char *)p->conf.backend);
    free(p);
}

struct dn_hash128 dn_pool_prefix_root(const struct dn_pool *p, enum dn_kv_format f, const void *salt, size_t n_salt)
{
    return dn_prefix_root(p->prefix, p->model->path, dn_weights_format_name(p->weights->format), f, salt, n_salt);
}

int dn_pool_step(struct dn_pool *p, struct dn_err *err)
{
    struct dn_step *s = dn_runner_arrays(p->runner);
    s->n_tags = 0;
    if (dn_runner_checks(s)) {
        uint32_t first, n;
        dn_pages_take_dirty(p->pages, &first, &n);
        const uint64_t *tag = dn_pages_tags(p->pages) + first;
        s->tag_first = 0;
        if (n > STEP_TAGS) { /* seldom: much was freed at once */
            dn_runner_set_tags(p->runner, first, n, tag);
        } else if (n > 0) {
            s->tag_first = first;
            memcpy(s->tag_new, tag, n * sizeof *tag);
            s->n_tags = n;
        }
    }
    return dn_runner_step(p->runner, err);
}
