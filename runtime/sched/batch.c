#include "sched/batch.h"

#include <string.h>

void dn_batch_begin(struct dn_batch *b)
{
    b->step = dn_runner_arrays(b->pool->runner);
    b->step->n_tokens = b->step->n_seqs = b->step->n_rows = b->step->n_tags = 0;
    b->step->kind = DN_STEP_PREFILL;
    b->step->token_start[0] = 0;
    b->step->page_start[0] = 0;
    b->n_seqs = 0;
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

static void add_pages(struct dn_batch *b, const struct dn_seq *s, uint32_t kv_len)
{
    struct dn_step *st = b->step;
    const uint32_t page_tokens = b->pool->runner->layout.page_tokens;
    uint32_t n = (kv_len + page_tokens - 1) / page_tokens;
    uint32_t at = (uint32_t)st->page_start[b->n_seqs];
    DN_BUG_ON(n > s->n_pages);
    for (uint32_t i = 0; i < n; i++) {
        st->page[at + i] = s->page[i].page;
        st->tag[at + i] = s->page[i].tag;
    }
    st->page_start[b->n_seqs + 1] = (int32_t)(at + n);
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
    add_pages(b, s, end);

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
    b->seq[idx] = s;
    st->n_seqs = ++b->n_seqs;
}
