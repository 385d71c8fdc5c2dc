#include "cli/local.h"

#include "base/buf.h"
#include "base/clock.h"
#include "cli/progress.h"

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
    int rc = dn_sched_submit(l->sched, r, err);
    if (rc != 0)
        dn_request_free(r);
    return rc;
}

void dn_local_run(struct dn_local *l)
{
    while (dn_sched_turn(l->sched))
        ;
}
