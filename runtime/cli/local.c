#include "cli/local.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/hash.h"
#include "cli/args.h"
#include "cli/commit.h"
#include "cli/progress.h"
#include "pool/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void deliver(void *user, uint32_t loop, struct dn_event_batch *b)
{
    struct dn_local *l = user;
    (void)loop;
    for (uint32_t i = 0; i < b->n_events; i++) {
        const struct dn_event *e = &b->event[i];
        if (l->on_event)
            l->on_event(l->ctx, e, e->detail >= 0 ? &b->detail[e->detail] : NULL, b->step_ns);
    }
    dn_event_batch_free(b);
}

static void on_progress(void *ctx, uint64_t done, uint64_t total)
{
    dn_progress_update(ctx, done, total);
}

/* The flag's number if it is given: more than `above` or from it on, up to max. */
static int get_number(const char *text, const char *flag, float above, bool inclusive, float max, float *out,
                      struct dn_err *err)
{
    if (!text)
        return 0;
    char *end;
    float v = strtof(text, &end);
    if (end == text || *end || !(inclusive ? v >= above : v > above) || !(v <= max))
        return dn_err_set(err, DN_CONFIG, "--%s %s: expected a number %s %g, up to %g", flag, text,
                          inclusive ? "from" : "above", (double)above, (double)max);
    *out = v;
    return 0;
}

int dn_local_sampling(const struct dn_local_options *o, float temperature, struct dn_request *r, struct dn_err *err)
{
    uint64_t seed;
    int rc;
    r->sample.temperature = temperature;
    if ((rc = get_number(o->temperature, "temperature", 0, true, 2, &r->sample.temperature, err)) != 0 ||
        (rc = get_number(o->top_p, "top-p", 0, false, 1, &r->sample.top_p, err)) != 0)
        return rc;
    dn_random_bytes(&seed, sizeof seed);
    if (o->seed && (rc = dn_args_uint(o->seed, "seed", 0, UINT64_MAX, false, &seed, err)) != 0)
        return rc;
    r->sample.seed = seed;
    if (o->kv_dtype && dn_kv_format_parse(o->kv_dtype, &r->kv) != 0)
        return dn_err_set(err, DN_CONFIG, "--kv-dtype %s: expected bf16 or fp8_e4m3", o->kv_dtype);
    return 0;
}

int dn_local_max_tokens(const struct dn_local_options *o, uint64_t fallback, uint32_t room, uint32_t *out,
                        struct dn_err *err)
{
    uint64_t n = fallback;
    int rc = o->max_tokens ? dn_args_uint(o->max_tokens, "max-tokens", 1, 1 << 24, false, &n, err) : 0;
    *out = n < room ? (uint32_t)n : room;
    return rc;
}

int dn_local_pool_conf(const struct dn_local_options *o, struct dn_pool_conf *conf, struct dn_err *err)
{
    uint64_t threads = 0, ctx = 0;
    int rc;
    *conf = (struct dn_pool_conf){.max_sequences = 1, .weights = DN_WEIGHTS_AUTO};
    if ((o->threads && (rc = dn_args_uint(o->threads, "threads", 1, 1024, false, &threads, err)) != 0) ||
        (o->ctx && (rc = dn_args_uint(o->ctx, "ctx", 16, 1 << 24, true, &ctx, err)) != 0))
        return rc;
    if (o->weights && dn_weights_format_parse(o->weights, &conf->weights) != 0)
        return dn_err_set(err, DN_CONFIG, "--weights %s: expected auto, bf16, fp8, int8 or int4", o->weights);
    /* Whatever else is wrong is said now, not after minutes of loading. */
    struct dn_request trial = {0};
    uint32_t max_tokens;
    if ((rc = dn_local_sampling(o, 0, &trial, err)) != 0 || (rc = dn_local_max_tokens(o, 1, 1, &max_tokens, err)) != 0)
        return rc;
    struct dn_device_choice device;
    if ((rc = dn_device_parse(o->device, &device, err)) != 0)
        return rc;
    conf->backend = o->device;
    conf->n_threads = (unsigned)threads;
    conf->context_tokens = (uint32_t)ctx;
    conf->context_is_asked = true;
    return 0;
}

int dn_local_open(struct dn_local *l, const char *path, const struct dn_pool_conf *conf, bool quiet, struct dn_err *err)
{
    *l = (struct dn_local){0};
    struct dn_progress progress;
    struct dn_pool_conf c = *conf;
    int rc = dn_load_model(path, NULL, &l->loaded, err);
    if (rc != 0)
        return rc;
    dn_progress_begin(&progress, "weights", quiet);
    c.progress = on_progress;
    c.progress_ctx = &progress;
    rc = dn_load_pool(&l->loaded, &c, err);
    dn_progress_end(&progress);
    char stale[200];
    if (rc == 0 && dn_commit_differs(l->loaded.pool->device->ops, stale))
        fprintf(stderr, "dunlin: %s\n", stale);
    if (rc == 0) {
        const struct dn_sink sink = {.deliver = deliver, .user = l, .n_loops = 1};
        rc = dn_sched_open(&(struct dn_sched_conf){.queue_max = 1 << 20}, l->loaded.pool, &sink, NULL, &l->sched, err);
    }
    if (rc != 0)
        dn_local_close(l);
    return rc;
}

void dn_local_close(struct dn_local *l)
{
    l->on_event = NULL;
    dn_sched_close(l->sched);
    dn_load_release(&l->loaded);
    l->sched = NULL;
}

struct dn_request *dn_local_request(const int32_t *prompt, size_t n_prompt, uint32_t max_tokens)
{
    struct dn_request *r = dn_alloc0(1, sizeof *r);
    *r = (struct dn_request){
        .n_prompt = (uint32_t)n_prompt,
        .max_tokens = max_tokens,
        .check = true,
        .priority = 50,
        .cache_read = true,
        .cache_write = true,
        .arrival_ns = dn_now_ns(),
        .sample = {.top_p = 1, .top_k = -1, .repetition = 1, .n_top = -1},
    };
    r->prompt = dn_alloc(n_prompt * sizeof *prompt);
    memcpy(r->prompt, prompt, n_prompt * sizeof *prompt);
    return r;
}

int dn_local_submit(struct dn_local *l, struct dn_request *r, struct dn_err *err)
{
    const uint32_t context = l->loaded.pool->conf.context_tokens;
    int rc;
    if ((uint64_t)r->n_prompt + r->max_tokens > context)
        rc = dn_err_set(err, DN_CONTEXT_LENGTH, "%u prompt tokens and %u of output: the context is %u", r->n_prompt,
                        r->max_tokens, context);
    else
        rc = dn_sched_submit(l->sched, r, err);
    if (rc != 0)
        dn_request_free(r);
    return rc;
}

void dn_local_run(struct dn_local *l)
{
    while (dn_sched_turn(l->sched))
        ;
}
