#include "pool/pool.h"

#include "base/buf.h"
#include "base/memory.h"
#include "pool/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    DEFAULT_SEQUENCES = 32,
    DEFAULT_GPU_SEQUENCES = 64,
    DEFAULT_STEP_TOKENS = 512,
    DEFAULT_GPU_STEP_TOKENS = 2048,
    DEFAULT_ECHO_ROWS = 64,
    DEFAULT_PAGE_TOKENS = 16,
    STEP_TAGS = 512
};
static const uint64_t default_kv_bytes_max = 1ull << 30, slab_bytes_max = 16 << 20;
/* Of a GPU's memory, beside a tenth of what is free: workspace and recorded steps, which are measured last. */
static const uint64_t gpu_reserve_bytes = 1ull << 30;

static uint32_t or_default(uint32_t value, uint32_t fallback)
{
    return value ? value : fallback;
}

static void choose_sizes(struct dn_pool_conf *c, const struct dn_model *m, bool gpu, uint32_t page_tokens)
{
    c->max_sequences = or_default(c->max_sequences, gpu ? DEFAULT_GPU_SEQUENCES : DEFAULT_SEQUENCES);
    c->step_tokens = or_default(c->step_tokens, gpu ? DEFAULT_GPU_STEP_TOKENS : DEFAULT_STEP_TOKENS);
    if (c->step_tokens < c->max_sequences) /* every running sequence can decode in every step */
        c->step_tokens = c->max_sequences;
    c->echo_rows = or_default(c->echo_rows, DEFAULT_ECHO_ROWS);
    c->page_tokens = or_default(c->page_tokens, page_tokens ? page_tokens : DEFAULT_PAGE_TOKENS);
    c->n_valid = or_default(c->n_valid, m->hyper.n_vocab);
    c->context_tokens = or_default(c->context_tokens, m->hyper.context_tokens);
    if (c->context_tokens > m->hyper.context_tokens)
        c->context_tokens = m->hyper.context_tokens;
}

/* Full contexts in bf16; a sixteenth more for what is lost in pages and slabs that are not full. */
static uint64_t contexts_bytes(const struct dn_pool *p, uint32_t n)
{
    uint64_t bytes = (uint64_t)n * p->conf.context_tokens * dn_model_kv_bytes(p->model, false);
    return bytes + bytes / 16;
}

/* The arena of a GPU takes what the rest leaves. The device's memory is asked after the weights have theirs. */
static int choose_kv(struct dn_pool *p, const struct dn_step_limits *limits, struct dn_err *err)
{
    struct dn_pool_conf *c = &p->conf;
    uint64_t free_bytes, activations, rope;
    p->device->ops->memory(p->device, &free_bytes, &p->device_total_bytes);
    if (c->kv_bytes != 0)
        return 0;
    if (p->device_total_bytes == 0) {
        c->kv_bytes = contexts_bytes(p, 4);
        if (c->kv_bytes > default_kv_bytes_max)
            c->kv_bytes = default_kv_bytes_max;
        return 0;
    }
    int rc = dn_runner_sizes(p->model, p->device->ops->act_bytes, limits, c->context_tokens, &activations, &rope, err);
    if (rc != 0)
        return rc;
    uint64_t others = activations + rope + gpu_reserve_bytes;
    if (free_bytes <= others)
        return dn_err_set(
            err, DN_NO_MEMORY,
            "%s: %.1f GiB are free beside the weights, and a step of %u tokens needs %.1f GiB before any KV "
            "cache: lower engine.step_tokens or choose smaller weights",
            p->device_text, (double)free_bytes / (1 << 30), limits->tokens, (double)others / (1 << 30));
    c->kv_bytes = (free_bytes - others) / 10 * 9;
    uint64_t most = contexts_bytes(p, c->max_sequences);
    if (c->kv_bytes > most)
        c->kv_bytes = most;
    return 0;
}

/* What a step may hold; device and runner are opened with the same. */
static int choose_limits(const struct dn_pool_conf *c, struct dn_step_limits *out, struct dn_err *err)
{
    uint32_t seq_pages = (c->context_tokens + c->page_tokens - 1) / c->page_tokens;
    uint64_t pages = (uint64_t)c->max_sequences * seq_pages;
    if (pages > UINT32_MAX / 2)
        return dn_err_set(err, DN_CONFIG, "max_sequences %u x context %u: page tables of %llu entries are too large",
                          c->max_sequences, c->context_tokens, (unsigned long long)pages);
    *out = (struct dn_step_limits){.tokens = c->step_tokens,
                                   .seqs = c->max_sequences,
                                   .rows = c->max_sequences + c->echo_rows,
                                   .pages = (uint32_t)pages,
                                   .tags = STEP_TAGS,
                                   .seq_pages = seq_pages};
    return 0;
}

static int open_backend(struct dn_pool *p, const struct dn_backend *b, int index, struct dn_step_limits *limits,
                        struct dn_err *err)
{
    struct dn_pool_conf c = p->conf; /* kept only if this device is the one */
    choose_sizes(&c, p->model, b != NULL, b ? b->page_tokens : 0);
    if (b && b->page_tokens && c.page_tokens != b->page_tokens)
        return dn_err_set(err, DN_CONFIG, "engine.page_tokens %u: the %s backend has pages of %u tokens", c.page_tokens,
                          b->name, b->page_tokens);
    int rc = choose_limits(&c, limits, err);
    if (rc != 0)
        return rc;
    if (b && b->supports) {
        const struct dn_model_sizes sizes = dn_hyper_sizes(&p->model->hyper);
        rc = b->supports(limits, &sizes, err);
        if (rc != 0)
            return rc;
    }
    struct dn_device_conf dc = {
        .n_threads = c.n_threads,
        .isa = c.isa,
        .index = index,
        .limits = *limits,
        .n_slots = c.max_sequences,
        .n_vocab = p->model->hyper.n_vocab,
    };
    rc = b ? b->open(&dc, &p->device, err) : dn_kernels_open_cpu(&dc, &p->device, err);
    if (rc != 0)
        return rc;
    p->conf = c;
    p->device->ops->describe(p->device, p->device_text, sizeof p->device_text);
    return 0;
}

static int open_library(struct dn_pool *p, const struct dn_device_choice *choice, struct dn_step_limits *limits,
                        struct dn_err *err)
{
    char path[4096];
    const struct dn_backend *b;
    int rc = choice->path ? 0 : dn_device_library(path, sizeof path, err);
    if (rc == 0)
        rc = dn_kernels_load_library(choice->path ? choice->path : path, &b, err);
    return rc ? rc : open_backend(p, b, choice->index, limits, err);
}

static int open_device(struct dn_pool *p, struct dn_err *err)
{
    struct dn_device_choice choice;
    struct dn_step_limits *limits = &p->limits;
    int rc = dn_device_parse(p->conf.backend, &choice, err);
    if (rc != 0)
        return rc;
    if (choice.kind == DN_DEVICE_CUDA)
        return open_library(p, &choice, limits, err);
    if (choice.kind == DN_DEVICE_AUTO) {
        struct dn_err why;
        if (open_library(p, &choice, limits, &why) == 0)
            return 0;
        snprintf(p->no_gpu, sizeof p->no_gpu, "%s", why.text);
    }
    return open_backend(p, NULL, 0, limits, err);
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
    uint64_t free_before, free_after, total;
    p->device->ops->memory(p->device, &free_before, &total);
    int rc_open = dn_runner_open(p->device, p->weights, &rc, &p->runner, err);
    if (rc_open != 0)
        return rc_open;
    p->device->ops->memory(p->device, &free_after, &total);
    const struct dn_kv_layout *l = &p->runner->layout;
    uint64_t taken = free_before > free_after ? free_before - free_after : 0, /* others may use the GPU as well */
        known = p->runner->n_slabs * l->slab_bytes + p->runner->activation_bytes + p->runner->rope_bytes;
    p->device_free_bytes = free_after;
    p->workspace_bytes = taken > known ? taken - known : 0;
    for (int f = 0; f < DN_KV_FORMATS; f++) {
        uint64_t tokens = (uint64_t)p->runner->n_slabs * l->format[f].pages_per_slab * l->page_tokens;
        p->capacity_tokens[f] = tokens > UINT32_MAX ? UINT32_MAX : (uint32_t)tokens;
    }
    if (p->capacity_tokens[DN_KV_BF16] < c->context_tokens)
        c->context_tokens = p->capacity_tokens[DN_KV_BF16]; /* the receipt and /v1/models show what is left */
    return 0;
}

/* What operations need is known last: where the arena was our choice, it gives way. */
static int open_runner_within(struct dn_pool *p, const struct dn_step_limits *limits, bool may_shrink,
                              struct dn_err *err)
{
    int rc = open_runner(p, limits, err);
    for (int i = 0; i < 4 && rc == -DN_NO_MEMORY && may_shrink; i++) {
        p->conf.kv_bytes -= p->conf.kv_bytes / 8;
        rc = open_runner(p, limits, err);
    }
    return rc;
}

int dn_pool_check_context(uint32_t context_tokens, const struct dn_model *model, struct dn_err *err)
{
    if (context_tokens <= model->hyper.context_tokens)
        return 0;
    return dn_err_set(err, DN_CONFIG, "%s: --ctx %u: the model has a context of %u tokens", model->path, context_tokens,
                      model->hyper.context_tokens);
}

int dn_pool_open_device(const struct dn_pool_conf *conf, const struct dn_model *model, struct dn_pool **out,
                        struct dn_err *err)
{
    struct dn_pool *p = dn_alloc0(1, sizeof *p);
    p->conf = *conf;
    p->conf.name = dn_strdup(conf->name ? conf->name : "main");
    p->conf.backend = dn_strdup(conf->backend ? conf->backend : "auto");
    p->model = model;
    int rc = conf->context_is_asked ? dn_pool_check_context(conf->context_tokens, model, err) : 0;
    if (rc == 0)
        rc = open_device(p, err);
    if (rc != 0) {
        dn_pool_close(p);
        return rc;
    }
    *out = p;
    return 0;
}

void dn_pool_room(const struct dn_pool *p, const struct dn_plan *plan, struct dn_pool_room *out)
{
    struct dn_pool_room r = {0};
    uint64_t needed = plan->weight_bytes + plan->activation_bytes + plan->rope_bytes;
    p->device->ops->memory(p->device, &r.free_bytes, &r.total_bytes);
    bool gpu = r.total_bytes > 0;
    if (gpu) {
        needed += gpu_reserve_bytes;
    } else {
        struct dn_memory host;
        dn_memory_read(&host);
        r.free_bytes = host.free_bytes;
        r.total_bytes = host.total_bytes;
        r.is_limited = host.is_limited;
    }
    if (r.free_bytes < needed)
        r.missing_bytes = needed - r.free_bytes;
    else
        r.kv_bytes = gpu ? (r.free_bytes - needed) / 10 * 9 : r.free_bytes - needed;
    *out = r;
}

int dn_pool_open(const struct dn_pool_conf *conf, const struct dn_model *model, struct dn_pool **out,
                 struct dn_err *err)
{
    struct dn_pool *p;
    int rc = dn_pool_open_device(conf, model, &p, err);
    if (rc != 0)
        return rc;
    struct dn_weights_conf wc = {.format = p->conf.weights,
                                 .n_threads = p->conf.n_threads,
                                 .progress = p->conf.progress,
                                 .progress_ctx = p->conf.progress_ctx};
    rc = dn_weights_open(p->device, model, &wc, &p->weights, err);
    if (rc == 0)
        rc = choose_kv(p, &p->limits, err);
    if (rc == 0)
        rc = open_runner_within(p, &p->limits, conf->kv_bytes == 0 && p->device_total_bytes > 0, err);
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

bool dn_pool_splits_steps(const struct dn_pool *p)
{
    return p->device->ops->splits_steps || p->runner->layout.latent_dim != 0;
}

struct dn_hash128 dn_pool_prefix_root(const struct dn_pool *p, enum dn_kv_format f, const void *salt, size_t n_salt)
{
    return dn_prefix_root(p->prefix, p->model->path, dn_weights_format_name(p->weights->format), f, salt, n_salt);
}

void dn_pool_start(struct dn_pool *p)
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
    dn_runner_start(p->runner);
}

int dn_pool_wait(struct dn_pool *p, struct dn_err *err)
{
    return dn_runner_wait(p->runner, err);
}
