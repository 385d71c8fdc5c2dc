#include "base/buf.h"
#include "base/clock.h"
#include "base/log.h"
#include "sched/sched_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { DEFAULT_QUEUE = 256, DEFAULT_RESERVE = 512 };

enum message_kind { MSG_SUBMIT, MSG_CANCEL, MSG_STOPPED, MSG_PAUSE, MSG_RESUME };
struct message {
    struct dn_inbox_node node; /* first */
    enum message_kind kind;
    struct dn_request *req;  /* MSG_SUBMIT, owned */
    struct dn_request_id id; /* the others */
};

static bool post(struct dn_sched *s, enum message_kind kind, struct dn_request *req, struct dn_request_id id)
{
    struct message *m = dn_alloc0(1, sizeof *m);
    *m = (struct message){.kind = kind, .req = req, .id = id};
    if (dn_inbox_push(&s->inbox, &m->node))
        return true;
    free(m);
    return false;
}

int dn_sched_submit(struct dn_sched *s, struct dn_request *r, struct dn_err *err)
{
    unsigned n = atomic_fetch_add(&s->n_waiting, 1);
    if (n >= s->conf.queue_max) {
        atomic_fetch_sub(&s->n_waiting, 1);
        return dn_err_set(err, DN_OVERLOADED, "the queue is full (%u requests are waiting)", n);
    }
    if (!post(s, MSG_SUBMIT, r, r->id)) {
        atomic_fetch_sub(&s->n_waiting, 1);
        return dn_err_set(err, DN_DRAINING, "the node is shutting down");
    }
    return 0;
}

void dn_sched_cancel(struct dn_sched *s, struct dn_request_id id)
{
    post(s, MSG_CANCEL, NULL, id);
}

void dn_sched_stopped(struct dn_sched *s, struct dn_request_id id)
{
    post(s, MSG_STOPPED, NULL, id);
}

void dn_sched_pause(struct dn_sched *s, struct dn_request_id id, bool paused)
{
    post(s, paused ? MSG_PAUSE : MSG_RESUME, NULL, id);
}

void dn_sched_snapshot(struct dn_sched *s, struct dn_snapshot *out)
{
    dn_snapshot_read(&s->cell, out);
}

uint32_t dn_sched_waiting(struct dn_sched *s)
{
    return atomic_load(&s->n_waiting);
}

/* ---- Events --------------------------------------------------------------------------------------------------------
 */

void dn_sched_emit(struct dn_sched *s, const struct dn_seq *q, struct dn_event e, const struct dn_sampled *detail)
{
    uint32_t loop = q->req->id.loop;
    DN_BUG_ON(loop >= s->sink.n_loops);
    struct dn_event_batch *b = s->out[loop];
    if (!b)
        b = s->out[loop] = dn_alloc0(1, sizeof *b);
    e.id = q->req->id;
    e.detail = -1;
    if (detail) {
        if (b->n_details == b->cap_details) {
            b->cap_details = b->cap_details ? 2 * b->cap_details : 8;
            b->detail = dn_realloc(b->detail, b->cap_details, sizeof *b->detail);
        }
        e.detail = (int32_t)b->n_details;
        b->detail[b->n_details++] = *detail;
    }
    if (b->n_events == b->cap_events) {
        b->cap_events = b->cap_events ? 2 * b->cap_events : 16;
        b->event = dn_realloc(b->event, b->cap_events, sizeof *b->event);
    }
    b->event[b->n_events++] = e;
}

static void deliver(struct dn_sched *s)
{
    for (uint32_t i = 0; i < s->sink.n_loops; i++) {
        if (!s->out[i])
            continue;
        struct dn_event_batch *b = s->out[i];
        s->out[i] = NULL;
        b->step_ns = s->results_ns;
        s->sink.deliver(s->sink.user, i, b);
    }
}

/* ---- Life of a sequence --------------------------------------------------------------------------------------------
 */

static void enqueue(struct dn_sched *s, struct dn_seq *q)
{
    struct dn_seq **link = &s->waiting;
    while (*link && dn_seq_before(*link, q))
        link = &(*link)->next;
    q->next = *link;
    *link = q;
    s->now.waiting++;
}

static void leave_slot(struct dn_sched *s, struct dn_seq *q)
{
    if (q->slot < 0)
        return;
    s->running[q->slot] = NULL;
    s->n_running--;
    dn_batch_leave(&s->batch, q->slot);
    q->slot = -1;
    s->room_changed = true;
}

void dn_sched_end(struct dn_sched *s, struct dn_seq *q)
{
    leave_slot(s, q);
    s->now.integrity_refused += dn_seq_give_pages(q, s->pool);
    s->room_changed = true;
    dn_seq_close(q);
}

void dn_sched_fail(struct dn_sched *s, struct dn_seq *q, int code)
{
    dn_sched_emit(s, q, (struct dn_event){.kind = DN_EVENT_ERROR, .code = code, .logprob = NAN}, NULL);
    dn_sched_stats_done(s->stats, dn_code_info(code)->code, dn_now_ns() - q->req->arrival_ns);
    dn_sched_end(s, q);
}

void dn_sched_preempt(struct dn_sched *s, struct dn_seq *q)
{
    struct dn_log_line l;
    if (dn_log_begin_limited(&l, DN_LOG_WARN, "sched.preempt", s->pool->conf.name, dn_now_ns())) {
        dn_log_str(&l, "id", q->req->name);
        dn_log_uint(&l, "computed_tokens", q->n_computed);
        dn_log_str(&l, "why", "out of KV pages; it will be computed again");
    }
    dn_log_end(&l);
    leave_slot(s, q);
    dn_seq_rewind(q, s->pool);
    s->now.preemptions++;
    atomic_fetch_add(&s->n_waiting, 1);
    enqueue(s, q);
}

static struct dn_seq *unlink_waiting(struct dn_sched *s, struct dn_seq **link)
{
    struct dn_seq *q = *link;
    *link = q->next;
    q->next = NULL;
    s->now.waiting--;
    atomic_fetch_sub(&s->n_waiting, 1);
    return q;
}

/* ---- Admission ------------------------------------------------------------------------------------------------------
 */

static uint32_t pages_for(const struct dn_sched *s, uint64_t tokens)
{
    const uint32_t page_tokens = s->pool->runner->layout.page_tokens;
    return (uint32_t)((tokens + page_tokens - 1) / page_tokens);
}

/* What a sequence may still grow to without asking again. */
static uint32_t promised_pages(const struct dn_sched *s, const struct dn_seq *q)
{
    uint32_t left = q->req->max_tokens - dn_seq_n_output(q);
    uint32_t reserve = left < s->conf.reserve_tokens ? left : s->conf.reserve_tokens;
    uint32_t pages = pages_for(s, (uint64_t)q->n_tokens + reserve);
    return pages < q->cap_pages ? pages : q->cap_pages;
}

void dn_sched_promised(const struct dn_sched *s, uint32_t want[DN_KV_FORMATS])
{
    memset(want, 0, DN_KV_FORMATS * sizeof *want);
    for (uint32_t i = 0; i < s->pool->conf.max_sequences; i++) {
        const struct dn_seq *r = s->running[i];
        if (r) {
            uint32_t promised = promised_pages(s, r);
            want[r->req->kv] += promised > r->n_pages ? promised - r->n_pages : 0;
        }
    }
}

static bool fits(struct dn_sched *s, const struct dn_seq *q)
{
    uint32_t want[DN_KV_FORMATS];
    dn_sched_promised(s, want);
    want[q->req->kv] += promised_pages(s, q) - q->n_pages;
    return dn_pages_can_take(s->pool->pages, want);
}

static void start(struct dn_sched *s, struct dn_seq *q, uint64_t now_ns)
{
    uint32_t slot = 0;
    while (s->running[slot])
        slot++;
    q->slot = (int32_t)slot;
    s->running[slot] = q;
    s->n_running++;
    if (q->counts)
        s->pool->device->ops->slot_fill(s->pool->device, q->slot, q->token, q->req->n_prompt);
    if (q->started)
        return;
    q->started = true;
    q->start_ns = now_ns;
    s->now.prompt_tokens += q->req->n_prompt;
    s->now.cached_tokens += q->n_cached;
    dn_sched_stats_queue(s->stats, now_ns - q->req->arrival_ns);
    dn_sched_emit(s, q, (struct dn_event){.kind = DN_EVENT_STARTED, .n = q->n_cached, .at_ns = now_ns, .logprob = NAN},
                  NULL);
}

static void expire(struct dn_sched *s, uint64_t now_ns)
{
    for (struct dn_seq **link = &s->waiting; *link;) {
        struct dn_seq *q = *link;
        if (!q->started && q->req->queue_deadline_ns && now_ns >= q->req->queue_deadline_ns) {
            unlink_waiting(s, link);
            dn_sched_fail(s, q, DN_QUEUE_TIMEOUT);
        } else {
            link = &q->next;
        }
    }
}

/* Strictly in order: a request that does not fit yet is not overtaken, so that a large one can't starve. */
void dn_sched_admit(struct dn_sched *s, uint64_t now_ns)
{
    expire(s, now_ns);
    while (s->waiting && s->room_changed && s->n_running < s->pool->conf.max_sequences) {
        struct dn_seq *q = s->waiting;
        dn_seq_attach_prefix(q, s->pool);
        if (fits(s, q)) {
            start(s, unlink_waiting(s, &s->waiting), now_ns);
            continue;
        }
        dn_seq_rewind(q, s->pool);
        if (s->n_running == 0) { /* nothing will be given back: it can never fit (pages in quarantine) */
            unlink_waiting(s, &s->waiting);
            dn_sched_fail(s, q, DN_NO_MEMORY);
            continue;
        }
        s->room_changed = false;
    }
}

/* ---- Messages -------------------------------------------------------------------------------------------------------
 */

static bool same_id(struct dn_request_id a, struct dn_request_id b)
{
    return a.loop == b.loop && a.slot == b.slot && a.generation == b.generation;
}

static void leave(struct dn_sched *s, struct dn_seq *q, const char *reason)
{
    dn_sched_stats_done(s->stats, reason, dn_now_ns() - q->req->arrival_ns);
    dn_sched_end(s, q);
}

static void command(struct dn_sched *s, const struct message *c)
{
    const char *reason = c->kind == MSG_CANCEL ? "cancelled" : c->kind == MSG_STOPPED ? "stop" : NULL;
    for (struct dn_seq **link = &s->waiting; *link; link = &(*link)->next) {
        if (!same_id((*link)->req->id, c->id))
            continue;
        if (reason)
            leave(s, unlink_waiting(s, link), reason);
        else
            (*link)->paused = c->kind == MSG_PAUSE;
        return;
    }
    for (uint32_t i = 0; i < s->pool->conf.max_sequences; i++) {
        struct dn_seq *q = s->running[i];
        if (!q || !same_id(q->req->id, c->id))
            continue;
        if (reason)
            leave(s, q, reason);
        else
            q->paused = c->kind == MSG_PAUSE;
        return;
    }
}

static void handle(struct dn_sched *s, struct dn_inbox_node *first)
{
    for (struct dn_inbox_node *n = first, *next; n; n = next) {
        struct message *m = (struct message *)n;
        next = n->next;
        if (m->kind == MSG_SUBMIT) {
            enqueue(s, dn_seq_open(m->req, s->pool, s->next_order++));
            s->room_changed = true;
        } else {
            command(s, m);
        }
        free(m);
    }
}

/* ---- The thread -----------------------------------------------------------------------------------------------------
 */

static void publish(struct dn_sched *s)
{
    struct dn_snapshot *n = &s->now;
    struct dn_pages_stats pages;
    struct dn_prefix_stats prefix;
    dn_pages_stats(s->pool->pages, &pages);
    dn_prefix_stats(s->pool->prefix, &prefix);
    n->at_ns = dn_now_ns();
    n->running = s->n_running;
    n->paused = 0;
    for (uint32_t i = 0; i < s->pool->conf.max_sequences; i++)
        n->paused += s->running[i] && s->running[i]->paused;
    n->oldest_wait_ns = 0;
    for (const struct dn_seq *q = s->waiting; q; q = q->next)
        if (n->at_ns - q->req->arrival_ns > n->oldest_wait_ns)
            n->oldest_wait_ns = n->at_ns - q->req->arrival_ns;
    n->kv_bytes_total = pages.bytes_total;
    n->kv_bytes_held = pages.bytes_held;
    n->kv_bytes_cached = pages.bytes_cached;
    n->kv_bytes_quarantined = pages.bytes_quarantined;
    uint64_t page_bytes = s->pool->runner->layout.format[DN_KV_BF16].page_bytes;
    n->pages_total = pages.bytes_total / page_bytes;
    n->pages_free = (pages.bytes_total - pages.bytes_held - pages.bytes_quarantined) / page_bytes;
    n->quarantined_pages = pages.quarantined;
    n->evictions = pages.evictions;
    n->prefix_query_tokens = prefix.queries_tokens;
    n->prefix_hit_tokens = prefix.hit_tokens;
    dn_snapshot_publish(&s->cell, n);
}

void dn_sched_flush(struct dn_sched *s)
{
    publish(s); /* before the events: who has his answer finds it counted */
    deliver(s);
}

bool dn_sched_turn(struct dn_sched *s)
{
    handle(s, dn_inbox_take(&s->inbox));
    dn_sched_admit(s, dn_now_ns());
    uint64_t n_preempted = s->now.preemptions;
    bool worked = dn_sched_step(s) || s->now.preemptions > n_preempted; /* who was put back may start again at once */
    /* Else events go out when the next step runs. */
    if (!worked || !s->pool->device->ops->asynchronous)
        dn_sched_flush(s);
    return worked;
}

/* Until when there is nothing to do but wait for a message: a queue timeout, or a second, so that the snapshot stays
 * fresh. */
static uint64_t idle_deadline(const struct dn_sched *s)
{
    uint64_t deadline = dn_now_ns() + DN_NS_PER_S;
    for (const struct dn_seq *q = s->waiting; q; q = q->next)
        if (!q->started && q->req->queue_deadline_ns && q->req->queue_deadline_ns < deadline)
            deadline = q->req->queue_deadline_ns;
    return deadline;
}

static void *thread_main(void *arg)
{
    struct dn_sched *s = arg;
    while (!atomic_load(&s->stop)) {
        if (!dn_sched_turn(s))
            handle(s, dn_inbox_wait(&s->inbox, idle_deadline(s)));
    }
    return NULL;
}

int dn_sched_open(const struct dn_sched_conf *conf, struct dn_pool *pool, const struct dn_sink *sink,
                  struct dn_metrics *metrics, struct dn_sched **out, struct dn_err *err)
{
    (void)err;
    struct dn_sched *s = dn_alloc0(1, sizeof *s);
    s->conf = *conf;
    if (s->conf.queue_max == 0)
        s->conf.queue_max = DEFAULT_QUEUE;
    if (s->conf.reserve_tokens == 0)
        s->conf.reserve_tokens = DEFAULT_RESERVE;
    if (s->conf.decode_chunk_tokens == 0)
        s->conf.decode_chunk_tokens = pool->conf.step_tokens / 4 ? pool->conf.step_tokens / 4 : 1;
    s->pool = pool;
    s->sink = *sink;
    dn_inbox_init(&s->inbox);
    s->running = dn_alloc0(pool->conf.max_sequences, sizeof *s->running);
    dn_batch_init(&s->batch, pool);
    s->out = dn_alloc0(sink->n_loops, sizeof *s->out);
    s->order = dn_alloc0(pool->conf.max_sequences, sizeof *s->order);
    s->audit_refs = dn_alloc0(dn_pages_count(pool->pages), sizeof *s->audit_refs);
    s->room_changed = true;
    s->now.healthy = 1;
    publish(s);
    s->stats = dn_sched_stats_open(metrics, s);
    *out = s;
    return 0;
}

int dn_sched_start(struct dn_sched *s, struct dn_err *err)
{
    int rc = pthread_create(&s->thread, NULL, thread_main, s);
    if (rc != 0)
        return dn_err_set(err, DN_IO, "scheduler thread: %s", strerror(rc));
    s->has_thread = true;
    return 0;
}

void dn_sched_stop(struct dn_sched *s)
{
    atomic_store(&s->stop, true);
    dn_inbox_close(&s->inbox);
    if (s->has_thread)
        pthread_join(s->thread, NULL);
    s->has_thread = false;
    handle(s, dn_inbox_take(&s->inbox));
    while (s->waiting)
        dn_sched_fail(s, unlink_waiting(s, &s->waiting), DN_DRAINING);
    for (uint32_t i = 0; i < s->pool->conf.max_sequences; i++)
        if (s->running[i])
            dn_sched_fail(s, s->running[i], DN_DRAINING);
    deliver(s);
}

void dn_sched_close(struct dn_sched *s)
{
    if (!s)
        return;
    dn_sched_stop(s);
    dn_inbox_release(&s->inbox);
    dn_sched_stats_close(s->stats);
    free(s->running);
    dn_batch_release(&s->batch);
    free(s->out);
    free(s->order);
    free(s->audit_refs);
    free(s);
}
