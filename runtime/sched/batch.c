#include "sched/batch.h"

#include "base/buf.h"

#include <stdlib.h>
#include <string.h>

enum { SLACK_PAGES = 8, SPARE_PAGES = 1024 };

void dn_batch_init(struct dn_batch *b, struct dn_pool *pool)
{
    *b = (struct dn_batch){.pool = pool,
                           .seq = dn_alloc0(pool->conf.max_sequences, sizeof *b->seq),
                           .pages = dn_alloc0(pool->conf.max_sequences, sizeof *b->pages)};
}

void dn_batch_release(struct dn_batch *b)
{
    free(b->seq);
    free(b->pages);
}

static void forget_pages(struct dn_batch *b)
{
    memset(b->pages, 0, b->pool->conf.max_sequences * sizeof *b->pages);
    b->pages_end = b->pages_live = 0;
}

void dn_batch_leave(struct dn_batch *b, int32_t slot)
{
    b->pages_live -= b->pages[slot].cap;
    b->pages[slot] = (struct dn_batch_pages){0};
}

void dn_batch_begin(struct dn_batch *b)
{
    b->step = dn_runner_arrays(b->pool->runner);
    b->step->n_tokens = b->step->n_seqs = b->step->n_rows = b->step->n_tags = 0;
    b->step->kind = DN_STEP_PREFILL;
    b->step->token_start[0] = 0;
    b->n_seqs = 0;
    /* What lies between the tables is uploaded with them. */
    if (b->pages_end > 2 * b->pages_live + SPARE_PAGES)
        forget_pages(b);
}

uint32_t dn_batch_tokens_left(const struct dn_batch *b)
{
    return b->pool->conf.step_tokens - b->step->n_tokens;
}

uint32_t dn_batch_rows_left(const struct dn_batch *b)
{
    return b->pool->conf.max_sequences + b->pool->conf.echo_rows - b->step->n_rows;
}

static void add_row(struct dn_batch *b, struct dn_seq *s, uint32_t token_idx, int32_t target)
{
    struct dn_step *st = b->step;
    DN_BUG_ON(dn_batch_rows_left(b) == 0);
    uint32_t row = st->n_rows++;
    st->row_token[row] = (int32_t)token_idx;
    struct dn_sample *p = &st->sample[row];
    *p = s->req->sample;
    p->target = target;
    p->slot = s->counts && target < 0 ? s->slot : -1;
    p->counter = dn_seq_n_output(s);
    p->n_ban = 0;
    if (target < 0 && dn_seq_n_output(s) < s->req->min_tokens) {
        const struct dn_model *m = b->pool->model;
        for (size_t i = 0; i < m->n_eos; i++)
            p->ban[p->n_ban++] = m->eos_id[i];
        for (uint32_t i = 0; i < s->req->n_stop && p->n_ban < DN_MAX_BAN; i++)
            p->ban[p->n_ban++] = s->req->stop[i];
    }
    s->step_rows++;
}

/* A place for a table of n pages that has none, or has outgrown it: some pages more, so that it is seldom moved. False
 * if there is none behind the others. */
static bool place_pages(struct dn_batch *b, struct dn_batch_pages *p, uint32_t n)
{
    const struct dn_step_limits *l = &b->pool->runner->conf.limits;
    uint32_t cap = n + n / 8 + SLACK_PAGES;
    DN_BUG_ON(n > l->seq_pages);
    if (cap > l->seq_pages)
        cap = l->seq_pages;
    if (cap > l->pages - b->pages_end)
        return false;
    b->pages_live += cap - p->cap;
    *p = (struct dn_batch_pages){.start = b->pages_end, .cap = cap};
    b->pages_end += cap;
    return true;
}

static bool add_pages(struct dn_batch *b, uint32_t idx)
{
    struct dn_step *st = b->step;
    const struct dn_seq *s = b->seq[idx];
    const uint32_t page_tokens = b->pool->runner->layout.page_tokens;
    uint32_t n = ((uint32_t)st->kv_len[idx] + page_tokens - 1) / page_tokens;
    struct dn_batch_pages *p = &b->pages[s->slot];
    DN_BUG_ON(n > s->n_pages || p->n > s->n_pages || (p->n > 0 && p->seq != s));
    if (n > p->cap && !place_pages(b, p, n))
        return false;
    for (; p->n < n; p->n++) {
        st->page[p->start + p->n] = s->page[p->n].page;
        st->tag[p->start + p->n] = s->page[p->n].tag;
    }
    p->seq = s;
    st->page_start[idx] = (int32_t)p->start;
    return true;
}

void dn_batch_add(struct dn_batch *b, struct dn_seq *s, uint32_t n_tokens)
{
    struct dn_step *st = b->step;
    const uint32_t idx = b->n_seqs, first = st->n_tokens, end = s->n_computed + n_tokens;
    DN_BUG_ON(n_tokens == 0 || n_tokens > dn_batch_tokens_left(b) || end > s->n_tokens || s->slot < 0);
    for (uint32_t i = 0; i < n_tokens; i++) {
        uint32_t pos = s->n_computed + i;
        st->token_id[first + i] = s->token[pos];
        st->position[first + i] = (int32_t)pos;
        st->token_seq[first + i] = (int32_t)idx;
        st->token_count[first + i] = s->counts && pos >= s->req->n_prompt;
    }
    st->n_tokens += n_tokens;
    st->token_start[idx + 1] = (int32_t)st->n_tokens;
    st->kv_len[idx] = (int32_t)end;
    st->slot[idx] = s->counts ? s->slot : -1;
    st->kv_format[idx] = (uint8_t)s->req->kv;
    st->check[idx] = s->req->check;
    b->seq[idx] = s;
    /* Tables that moved have left gaps. Without them there is room: no table takes more than a longest sequence's, and
     * each sequence has one. */
    bool has_room = add_pages(b, idx);
    if (!has_room)
        forget_pages(b);
    for (uint32_t i = 0; i <= idx && !has_room; i++) {
        bool fits = add_pages(b, i);
        DN_BUG_ON(!fits);
    }

    s->step_idx = (int32_t)idx;
    s->step_tokens = n_tokens;
    s->step_rows = 0;
    s->first_row = st->n_rows;
    if (s->req->prompt_logprobs)
        for (uint32_t i = 0; i < n_tokens && s->n_computed + i + 1 < s->req->n_prompt; i++)
            if (s->n_computed + i + 1 > s->n_prompt_reported) /* else it was sent before a preemption */
                add_row(b, s, first + i, s->token[s->n_computed + i + 1]);
    if (end == s->n_tokens && s->req->max_tokens > 0)
        add_row(b, s, first + n_tokens - 1, -1);
    st->n_seqs = ++b->n_seqs;
}
