#include "base/buf.h"
#include "base/clock.h"
#include "base/log.h"
#include "sched/sched_impl.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- Building the batch ---------------------------------------------------------------------------------------------
 */

/* The running sequences that may take part, best first. Insertion sort: slots are nearly in that order already. */
static uint32_t sort_runnable(struct dn_sched *s)
{
    uint32_t n = 0;
    for (uint32_t slot = 0; slot < s->pool->conf.max_sequences; slot++) {
        struct dn_seq *q = s->running[slot];
        if (!q || q->paused)
            continue;
        uint32_t at = n++;
        for (; at > 0 && dn_seq_before(q, s->order[at - 1]); at--)
            s->order[at] = s->order[at - 1];
        s->order[at] = q;
    }
    return n;
}

/* The least important running sequence that this step does not use yet. */
static struct dn_seq *find_victim(const struct dn_sched *s)
{
    struct dn_seq *worst = NULL;
    for (uint32_t slot = 0; slot < s->pool->conf.max_sequences; slot++) {
        struct dn_seq *q = s->running[slot];
        if (q && q->step_idx < 0 && q->n_pages > 0 && (!worst || dn_seq_before(worst, q)))
            worst = q;
    }
    return worst;
}

/* Pages for the sequence's tokens up to n_tokens, taken from less important sequences if there is no other way.
 * Admission keeps this from happening; quarantined pages or reserves that were overtaken make it possible all the same.
 */
static bool have_pages(struct dn_sched *s, struct dn_seq *q, uint32_t n_tokens)
{
    while (dn_seq_take_pages(q, s->pool, n_tokens) != 0) {
        struct dn_seq *victim = find_victim(s);
        if (!victim || (victim != q && dn_seq_before(victim, q)))
            victim = q;
        dn_sched_preempt(s, victim);
        if (victim == q)
            return false;
    }
    return true;
}

/* How many of its tokens may go into this step. Prompt log-probabilities take a row a token, and leave one to each
 * sequence that may still join: so there is always one for the next token. */
static uint32_t chunk_of(const struct dn_sched *s, const struct dn_seq *q, uint32_t budget, bool split)
{
    uint32_t n = (split && q->n_computed < q->req->n_prompt ? q->req->n_prompt : q->n_tokens) - q->n_computed;
    if (n > budget)
        n = budget;
    uint32_t others = s->pool->conf.max_sequences - s->batch.n_seqs - 1;
    uint32_t rows = dn_batch_rows_left(&s->batch) - others;
    if (q->req->prompt_logprobs && n > rows)
        n = rows;
    return n;
}

/* Its next token is one that the model generated. More than one of them are left after a preemption: where steps are
 * split they go through decode again, one by one, to the bits that they had. */
static bool is_decoding(const struct dn_seq *q)
{
    return q->n_computed >= q->req->n_prompt && q->n_tokens > q->n_computed;
}

static bool any_decoding(const struct dn_sched *s, uint32_t n_runnable)
{
    for (uint32_t i = 0; i < n_runnable; i++)
        if (s->order[i]->slot >= 0 && is_decoding(s->order[i]))
            return true;
    return false;
}

/* `kind` NULL: everything in one step. Else only what is of that kind, for backends with a path of its own for each. */
static void build(struct dn_sched *s, const enum dn_step_kind *kind)
{
    uint32_t promised[DN_KV_FORMATS];
    dn_sched_promised(s, promised);
    dn_pages_promise(s->pool->pages, promised);
    dn_batch_begin(&s->batch);
    s->batch.step->kind = kind ? *kind : DN_STEP_PREFILL;
    uint32_t n = sort_runnable(s);
    for (uint32_t i = 0; i < n; i++) { /* decoding sequences: one token each, all of them */
        struct dn_seq *q = s->order[i];
        if (kind && !(*kind == DN_STEP_DECODE && is_decoding(q)))
            continue;
        if (q->slot >= 0 && (kind || q->n_tokens - q->n_computed == 1) && have_pages(s, q, q->n_computed + 1))
            dn_batch_add(&s->batch, q, 1);
    }
    uint32_t budget = dn_batch_tokens_left(&s->batch);
    if ((s->batch.n_seqs > 0 || any_decoding(s, n)) && budget > s->conf.decode_chunk_tokens)
        budget = s->conf.decode_chunk_tokens;
    for (uint32_t i = 0; i < n && budget > 0; i++) { /* then prefill, in chunks */
        struct dn_seq *q = s->order[i];
        if (q->slot < 0 || q->step_idx >= 0 || (kind && (*kind == DN_STEP_DECODE || is_decoding(q))))
            continue;
        uint32_t chunk = chunk_of(s, q, budget, kind != NULL);
        if (chunk > 0 && have_pages(s, q, q->n_computed + chunk)) {
            dn_batch_add(&s->batch, q, chunk);
            budget -= chunk;
        }
    }
}

/* ---- Results --------------------------------------------------------------------------------------------------------
 */

static void audit(struct dn_sched *s)
{
    const uint32_t n_pages = dn_pages_count(s->pool->pages);
    memset(s->audit_refs, 0, n_pages * sizeof *s->audit_refs);
    for (uint32_t slot = 0; slot < s->pool->conf.max_sequences; slot++) {
        const struct dn_seq *q = s->running[slot];
        for (uint32_t i = 0; q && i < q->n_pages; i++)
            if (q->page[i].page < n_pages)
                s->audit_refs[q->page[i].page]++;
    }
    dn_pages_audit(s->pool->pages, s->audit_refs);
}

/* The page table of this sequence names a page that is not, or no longer, its own. Nothing of this step has been
 * written to that page, sampled or sent for this sequence. It ends; the page is taken out of use; the others go on. */
static void violation(struct dn_sched *s, struct dn_seq *q, uint32_t first_bad)
{
    const uint64_t *tag = dn_pages_tags(s->pool->pages);
    const uint32_t n_pages = dn_pages_count(s->pool->pages);
    struct dn_page_ref ref = q->page[first_bad];
    const char *kind = ref.page < n_pages ? "tag" : "range";
    struct dn_log_line l;
    dn_log_begin(&l, DN_LOG_ERROR, "integrity.violation");
    dn_log_str(&l, "id", q->req->name);
    dn_log_str(&l, "kind", kind);
    dn_log_uint(&l, "page", ref.page);
    dn_log_uint(&l, "page_idx", first_bad);
    dn_log_uint(&l, "expected", ref.tag);
    if (ref.page < n_pages)
        dn_log_uint(&l, "found", tag[ref.page]);
    dn_log_end(&l);
    s->now.integrity_violations++;
    dn_sched_stats_violation(s->stats, kind);
    for (uint32_t i = 0; i < q->n_pages; i++) {
        ref = q->page[i];
        if (ref.page < n_pages && (i == first_bad || tag[ref.page] != ref.tag)) {
            dn_prefix_forget(s->pool->prefix, ref.page);
            dn_pages_quarantine(s->pool->pages, ref.page);
        }
    }
    dn_sched_fail(s, q, DN_KV_INTEGRITY);
    audit(s);
}

static bool is_stop_id(const struct dn_sched *s, const struct dn_seq *q, int32_t id)
{
    const struct dn_model *m = s->pool->model;
    if (!q->req->ignore_eos)
        for (size_t i = 0; i < m->n_eos; i++)
            if (m->eos_id[i] == id)
                return true;
    for (uint32_t i = 0; i < q->req->n_stop; i++)
        if (q->req->stop[i] == id)
            return true;
    return false;
}

static void finish(struct dn_sched *s, struct dn_seq *q, enum dn_finish why, uint64_t now_ns)
{
    dn_sched_emit(s, q, (struct dn_event){.kind = DN_EVENT_DONE, .finish = (uint8_t)why, .logprob = NAN}, NULL);
    dn_sched_stats_done(s->stats, why == DN_FINISH_STOP ? "stop" : "length", now_ns - q->req->arrival_ns);
    dn_sched_end(s, q);
}

/* Logits that are not finite: what the sequence has in its pages can't be trusted either. None is found again. */
static void numeric_error(struct dn_sched *s, struct dn_seq *q)
{
    const uint32_t n_pages = dn_pages_count(s->pool->pages);
    for (uint32_t i = 0; i < q->n_pages; i++)
        if (q->page[i].page < n_pages)
            dn_prefix_forget(s->pool->prefix, q->page[i].page);
    dn_sched_fail(s, q, DN_NUMERIC);
}

/* False: one was not finite, and the sequence has ended. */
static bool prompt_rows(struct dn_sched *s, struct dn_seq *q, const struct dn_step *st, uint32_t n_rows)
{
    for (uint32_t i = 0; i < n_rows; i++) {
        const struct dn_sampled *r = &st->result[q->first_row + i];
        if (r->id < 0) {
            numeric_error(s, q);
            return false;
        }
        uint32_t n = ++q->n_prompt_reported;
        dn_sched_emit(s, q,
                      (struct dn_event){.kind = DN_EVENT_PROMPT, .token = q->token[n], .logprob = r->logprob, .n = n},
                      r->n_top > 0 ? r : NULL);
    }
    return true;
}

static void output_row(struct dn_sched *s, struct dn_seq *q, const struct dn_sampled *r, uint64_t now_ns)
{
    if (r->id < 0) {
        numeric_error(s, q);
        return;
    }
    bool stop = is_stop_id(s, q, r->id);
    uint32_t n = dn_seq_n_output(q);
    q->token[q->n_tokens++] = r->id;
    s->now.output_tokens++;
    if (n == 0)
        dn_sched_stats_first_token(s->stats, now_ns - q->req->arrival_ns);
    else
        dn_sched_stats_gap(s->stats, now_ns - q->last_token_ns);
    q->last_token_ns = now_ns;
    bool wants_logprob = q->req->sample.n_top >= 0;
    dn_sched_emit(s, q,
                  (struct dn_event){.kind = DN_EVENT_TOKEN,
                                    .hidden = stop,
                                    .token = r->id,
                                    .logprob = wants_logprob ? r->logprob : NAN,
                                    .n = n},
                  wants_logprob && r->n_top > 0 ? r : NULL);
    if (stop)
        finish(s, q, DN_FINISH_STOP, now_ns);
    else if (n + 1 == q->req->max_tokens)
        finish(s, q, DN_FINISH_LENGTH, now_ns);
}

static void take_results(struct dn_sched *s, struct dn_seq *q, uint32_t idx, uint64_t now_ns)
{
    const struct dn_step *st = s->batch.step;
    if (st->bad[idx] > 0) {
        violation(s, q, (uint32_t)st->bad[idx] - 1);
        return;
    }
    q->n_computed += q->step_tokens;
    dn_seq_seal(q, s->pool);
    uint32_t n_rows = q->step_rows;
    bool sampled = q->n_computed == q->n_tokens && q->req->max_tokens > 0;
    if (sampled)
        n_rows--;
    if (!prompt_rows(s, q, st, n_rows))
        return;
    if (sampled)
        output_row(s, q, &st->result[q->first_row + n_rows], now_ns);
    else if (q->n_computed == q->n_tokens)
        finish(s, q, DN_FINISH_LENGTH, now_ns);
}

static void device_lost(struct dn_sched *s, const struct dn_err *err)
{
    struct dn_log_line l;
    dn_log_begin(&l, DN_LOG_ERROR, "pool.lost");
    dn_log_str(&l, "pool", s->pool->conf.name);
    dn_log_err(&l, err);
    dn_log_end(&l);
    s->now.healthy = 0;
    for (uint32_t slot = 0; slot < s->pool->conf.max_sequences; slot++)
        if (s->running[slot])
            dn_sched_fail(s, s->running[slot], DN_NOT_READY);
}

static bool is_mixed(const struct dn_step *st)
{
    for (uint32_t i = 1; i < st->n_seqs; i++)
        if (st->kv_format[i] != st->kv_format[0])
            return true;
    return false;
}

/* A device has worked for milliseconds, others have used the caches, and what results need lies all over the memory:
 * asked for at once it comes together. */
static void fetch(const struct dn_batch *b)
{
    enum { LINE = 64 };
    for (uint32_t i = 0; i < b->n_seqs; i++)
        for (size_t at = 0; at < sizeof *b->seq[i]; at += LINE)
            __builtin_prefetch((const char *)b->seq[i] + at);
    for (uint32_t i = 0; i < b->n_seqs; i++) {
        const struct dn_seq *q = b->seq[i];
        for (size_t at = 0; at < sizeof *q->req; at += LINE)
            __builtin_prefetch((const char *)q->req + at);
        __builtin_prefetch(&q->token[q->n_tokens]);
        __builtin_prefetch(&b->step->result[q->first_row]);
    }
}

/* Events of the step before go out while the device decodes, so that it does not wait for them; or else before a step
 * that takes long. */
static bool run_step(struct dn_sched *s, const enum dn_step_kind *kind)
{
    build(s, kind);
    if (s->batch.n_seqs == 0)
        return false;
    struct dn_err err = {0};
    bool late = s->pool->device->ops->asynchronous && s->batch.step->kind == DN_STEP_DECODE;
    if (!late)
        dn_sched_flush(s);
    uint64_t start_ns = dn_now_ns();
    dn_pool_start(s->pool);
    if (late)
        dn_sched_flush(s);
    if (dn_pool_wait(s->pool, &err) != 0) {
        device_lost(s, &err);
        return true;
    }
    uint64_t now_ns = s->results_ns = dn_now_ns();
    fetch(&s->batch);
    s->now.steps++;
    s->now.mixed_steps += is_mixed(s->batch.step);
    s->now.step_ns = now_ns - start_ns;
    for (uint32_t i = 0; i < s->batch.n_seqs; i++) {
        struct dn_seq *q = s->batch.seq[i];
        q->step_idx = -1;
        s->now.integrity_checks += s->batch.step->check[i];
    }
    for (uint32_t i = 0; i < s->batch.n_seqs; i++)
        take_results(s, s->batch.seq[i], i, now_ns);
    return true;
}

static bool wants_prefill(const struct dn_sched *s)
{
    for (uint32_t slot = 0; slot < s->pool->conf.max_sequences; slot++) {
        const struct dn_seq *q = s->running[slot];
        if (q && !q->paused && !is_decoding(q))
            return true;
    }
    return false;
}

bool dn_sched_step(struct dn_sched *s)
{
    static const enum dn_step_kind decode = DN_STEP_DECODE, prefill = DN_STEP_PREFILL;
    /* MLA computes each kind in a form of its own (kernels.h), on every backend. */
    if (!dn_pool_splits_steps(s->pool))
        return run_step(s, NULL);
    bool did = run_step(s, &decode);
    return (wants_prefill(s) && run_step(s, &prefill)) || did;
}
