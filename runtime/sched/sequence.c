#include "sched/sequence.h"

#include "base/buf.h"

#include <stdlib.h>
#include <string.h>

void dn_request_free(struct dn_request *r)
{
    if (!r)
        return;
    free(r->prompt);
    free(r);
}

void dn_event_batch_free(struct dn_event_batch *b)
{
    if (!b)
        return;
    free(b->event);
    free(b->detail);
    free(b);
}

struct dn_seq *dn_seq_open(struct dn_request *req, const struct dn_pool *pool, uint64_t order)
{
    struct dn_seq *s = dn_alloc0(1, sizeof *s);
    const uint32_t page_tokens = pool->runner->layout.page_tokens;
    uint32_t cap = req->n_prompt + req->max_tokens;
    DN_BUG_ON(req->n_prompt == 0 || cap < req->n_prompt);
    s->req = req;
    s->order = order;
    s->slot = -1;
    s->step_idx = -1;
    s->token = dn_alloc0(cap, sizeof *s->token);
    memcpy(s->token, req->prompt, req->n_prompt * sizeof *s->token);
    s->n_tokens = req->n_prompt;
    s->cap_pages = (cap + page_tokens - 1) / page_tokens;
    s->page = dn_alloc0(s->cap_pages, sizeof *s->page);
    s->counts = req->sample.repetition != 1.0f || req->sample.frequency != 0.0f || req->sample.presence != 0.0f;
    s->root = dn_pool_prefix_root(pool, req->kv, req->salt, req->n_salt);
    s->chain = s->root;
    return s;
}

void dn_seq_close(struct dn_seq *s)
{
    if (!s)
        return;
    dn_request_free(s->req);
    free(s->token);
    free(s->page);
    free(s);
}

void dn_seq_attach_prefix(struct dn_seq *s, struct dn_pool *pool)
{
    const uint32_t page_tokens = pool->runner->layout.page_tokens;
    if (s->n_pages > 0 || !s->req->cache_read || s->req->prompt_logprobs)
        return;
    /* At least one token is left to compute: its hidden state gives the next one. Output that penalties must count is
     * fed again rather than found, as is output whose pages would be of another kind of step (dn_pool_splits_steps()).
     */
    uint32_t n = s->counts || dn_pool_splits_steps(pool) ? s->req->n_prompt : s->n_tokens;
    uint32_t max_pages = (n - 1) / page_tokens;
    s->n_pages = dn_prefix_find(pool->prefix, s->root, s->token, n, max_pages, s->page, &s->chain);
    s->n_sealed = s->n_pages;
    s->n_computed = s->n_pages * page_tokens;
    if (!s->started)
        s->n_cached = s->n_computed;
}

int dn_seq_take_pages(struct dn_seq *s, struct dn_pool *pool, uint32_t n_tokens)
{
    const uint32_t page_tokens = pool->runner->layout.page_tokens;
    uint32_t need = (n_tokens + page_tokens - 1) / page_tokens;
    DN_BUG_ON(need > s->cap_pages);
    while (s->n_pages < need) {
        int rc = dn_pages_take(pool->pages, s->req->kv, &s->page[s->n_pages]);
        if (rc != 0)
            return rc;
        s->n_pages++;
    }
    return 0;
}

void dn_seq_seal(struct dn_seq *s, struct dn_pool *pool)
{
    const uint32_t page_tokens = pool->runner->layout.page_tokens;
    const uint32_t n_shared = dn_pool_splits_steps(pool) ? s->req->n_prompt : s->n_computed;
    for (; (s->n_sealed + 1) * page_tokens <= s->n_computed; s->n_sealed++) {
        const int32_t *token = s->token + (size_t)s->n_sealed * page_tokens;
        struct dn_hash128 hash = dn_prefix_next(pool->prefix, s->chain, token);
        if (s->req->cache_write && (s->n_sealed + 1) * page_tokens <= n_shared)
            dn_prefix_enter(pool->prefix, s->chain, hash, token, s->page[s->n_sealed]);
        s->chain = hash;
    }
}

uint32_t dn_seq_give_pages(struct dn_seq *s, struct dn_pool *pool)
{
    uint32_t n_refused = 0, n_pages = dn_pages_count(pool->pages);
    while (s->n_pages > 0) {
        struct dn_page_ref ref = s->page[--s->n_pages];
        bool keep = ref.page < n_pages && dn_prefix_has(pool->prefix, ref.page);
        n_refused += dn_pages_put(pool->pages, ref, keep) != 0;
    }
    s->n_sealed = 0;
    s->chain = s->root;
    return n_refused;
}

void dn_seq_rewind(struct dn_seq *s, struct dn_pool *pool)
{
    dn_seq_give_pages(s, pool);
    s->n_computed = 0;
    s->slot = -1;
}

bool dn_seq_before(const struct dn_seq *a, const struct dn_seq *b)
{
    if (a->req->priority != b->req->priority)
        return a->req->priority > b->req->priority;
    return a->order < b->order;
}
