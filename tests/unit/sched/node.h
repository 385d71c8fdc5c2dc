/* A pool with the tiny model and a scheduler that the test turns by hand; answers are collected by slot. */
#ifndef TESTS_SCHED_NODE_H
#define TESTS_SCHED_NODE_H

#include "base/buf.h"
#include "base/clock.h"
#include "engine/tiny.h"
#include "sched/sched_impl.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { MAX_ANSWERS = 32, MAX_TOKENS = 512 };

struct answer {
    int32_t token[MAX_TOKENS];
    float logprob[MAX_TOKENS];
    uint32_t n, cached, n_prompt_events;
    bool started, done;
    int code, finish;
};

struct node {
    struct dn_model *model;
    struct dn_pool *pool;
    struct dn_sched *sched;
    struct answer answer[MAX_ANSWERS];
    uint64_t generation;
};

static void on_batch(void *user, uint32_t loop, struct dn_event_batch *b)
{
    struct node *n = user;
    (void)loop;
    for (uint32_t i = 0; i < b->n_events; i++) {
        const struct dn_event *e = &b->event[i];
        struct answer *a = &n->answer[e->id.slot];
        cr_assert(!a->done && a->code == 0, "an event after the last one");
        if (e->kind == DN_EVENT_STARTED) {
            a->started = true;
            a->cached = e->n;
        } else if (e->kind == DN_EVENT_PROMPT) {
            a->n_prompt_events++;
            cr_assert_eq(e->n, a->n_prompt_events);
        } else if (e->kind == DN_EVENT_TOKEN) {
            cr_assert_eq(e->n, a->n);
            a->logprob[a->n] = e->logprob;
            a->token[a->n++] = e->token;
        } else if (e->kind == DN_EVENT_DONE) {
            a->done = true;
            a->finish = e->finish;
        } else {
            a->code = e->code;
        }
    }
    dn_event_batch_free(b);
}

/* pages: KV memory in bf16 pages of 16 tokens. A context longer than the model's: for devices that compute nothing. */
static inline struct node *node_open_context(uint32_t pages, uint32_t step_tokens, uint32_t context,
                                             struct dn_sched_conf sc)
{
    struct node *n = dn_alloc0(1, sizeof *n);
    struct dn_err err = {0};
    char path[] = "/tmp/dunlin-tiny-XXXXXX";
    close(mkstemp(path));
    cr_assert_eq(dn_tiny_write(path, &err), 0, "%s", err.text);
    cr_assert_eq(dn_model_open(path, &n->model, &err), 0, "%s", err.text);
    unlink(path);
    if (n->model->hyper.context_tokens < context)
        n->model->hyper.context_tokens = context;
    struct dn_pool_conf pc = {.backend = "cpu", /* its pages of 16 tokens, and steps that mix, where a GPU is, too */
                              .n_threads = 2,
                              .weights = DN_WEIGHTS_AUTO,
                              .max_sequences = 8,
                              .step_tokens = step_tokens,
                              .echo_rows = 8,
                              .context_tokens = context,
                              .kv_bytes = (uint64_t)pages * 16 * dn_model_kv_bytes(n->model, false)};
    cr_assert_eq(dn_pool_open(&pc, n->model, &n->pool, &err), 0, "%s", err.text);
    const struct dn_sink sink = {.deliver = on_batch, .user = n, .n_loops = 1};
    cr_assert_eq(dn_sched_open(&sc, n->pool, &sink, NULL, &n->sched, &err), 0, "%s", err.text);
    return n;
}

static inline struct node *node_open(uint32_t pages, uint32_t step_tokens, struct dn_sched_conf sc)
{
    return node_open_context(pages, step_tokens, 256, sc);
}

static inline void node_close(struct node *n)
{
    dn_sched_close(n->sched);
    dn_pool_close(n->pool);
    dn_model_close(n->model);
    free(n);
}

/* A prompt that depends on the seed alone; ids without special meaning. */
static inline struct dn_request *request(struct node *n, uint32_t slot, unsigned seed, uint32_t n_prompt,
                                         uint32_t max_tokens)
{
    struct dn_request *r = dn_alloc0(1, sizeof *r);
    *r = (struct dn_request){
        .id = {.slot = slot, .generation = ++n->generation},
        .n_prompt = n_prompt,
        .max_tokens = max_tokens,
        .ignore_eos = true,
        .check = true,
        .priority = 50,
        .cache_read = true,
        .cache_write = true,
        .arrival_ns = dn_now_ns(),
        .sample = {.top_p = 1, .top_k = -1, .repetition = 1, .n_top = 0},
    };
    snprintf(r->name, sizeof r->name, "test%u", slot);
    r->prompt = dn_alloc(n_prompt * sizeof *r->prompt);
    for (uint32_t i = 0; i < n_prompt; i++) {
        seed = seed * 1103515245 + 12345;
        r->prompt[i] = (int32_t)((seed >> 16) % 200) + 20;
    }
    memset(&n->answer[slot], 0, sizeof n->answer[slot]);
    return r;
}

static inline void submit(struct node *n, struct dn_request *r)
{
    struct dn_err err = {0};
    cr_assert_eq(dn_sched_submit(n->sched, r, &err), 0, "%s", err.text);
}

static inline void run(struct node *n)
{
    for (int i = 0; dn_sched_turn(n->sched); i++)
        cr_assert_lt(i, 5000, "does not end");
}

/* The answer to a request that is alone on a fresh node: what everything else is compared with. */
static inline struct answer alone(unsigned seed, uint32_t n_prompt, uint32_t max_tokens, enum dn_kv_format kv)
{
    struct node *n = node_open(64, 256, (struct dn_sched_conf){0});
    struct dn_request *r = request(n, 0, seed, n_prompt, max_tokens);
    r->kv = kv;
    submit(n, r);
    run(n);
    struct answer a = n->answer[0];
    cr_assert(a.done && a.n == max_tokens);
    node_close(n);
    return a;
}

static inline bool same(const struct answer *a, const struct answer *b)
{
    return a->n == b->n && memcmp(a->token, b->token, a->n * sizeof a->token[0]) == 0 &&
           memcmp(a->logprob, b->logprob, a->n * sizeof a->logprob[0]) == 0;
}

static inline void expect_no_pages_held(struct node *n)
{
    struct dn_pages_stats s;
    dn_pages_stats(n->pool->pages, &s);
    cr_assert_eq(s.held[0] + s.held[1], 0, "%u + %u pages are still held", s.held[0], s.held[1]);
}

/* The running sequence of a slot. */
static inline struct dn_seq *seq_of(struct node *n, uint32_t slot)
{
    for (uint32_t i = 0; i < n->pool->conf.max_sequences; i++)
        if (n->sched->running[i] && n->sched->running[i]->req->id.slot == slot)
            return n->sched->running[i];
    cr_assert(false, "slot %u does not run", slot);
    return NULL;
}

/* A test has changed the page table of this sequence by hand. */
static inline void table_changed(struct node *n, uint32_t slot)
{
    dn_batch_leave(&n->sched->batch, seq_of(n, slot)->slot);
}

#endif
