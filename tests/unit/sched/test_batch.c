/* Page tables stay in the step's arrays and only what is new is written: after every history, what a step sees must be
 * what writing all of it anew would give. The device computes nothing: it compares, and invents tokens and faults. */
#include "node.h"

#include <stddef.h>

enum { SEQS = 8, TURNS = 6000 };

static struct node *node;
static struct dn_kernels table;
static const struct dn_kernels *real;
static uint64_t random_state;
static unsigned n_steps, n_stayed, n_moved, n_gathered, n_faults, n_decode, n_mixed;
static uint64_t n_preempted;
static bool faults; /* results say now and then that a table or a row is bad */
static struct {
    const struct dn_seq *seq;
    int32_t start;
} last[SEQS]; /* of each slot */

static uint32_t below(uint32_t n)
{
    random_state = random_state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(random_state >> 33) % n;
}

/* The table of sequence q of the step against the sequence's own. */
static void compare(const struct dn_step *s, uint32_t q)
{
    static uint32_t page[4096];
    static uint64_t tag[4096];
    const struct dn_batch *b = &node->sched->batch;
    const struct dn_seq *seq = b->seq[q];
    uint32_t n = ((uint32_t)s->kv_len[q] + 15) / 16, at = (uint32_t)s->page_start[q];
    cr_assert(n <= seq->n_pages && n <= 4096 && at + n <= node->pool->runner->conf.limits.pages);
    for (uint32_t i = 0; i < n; i++) {
        page[i] = seq->page[i].page;
        tag[i] = seq->page[i].tag;
    }
    cr_assert(memcmp(page, s->page + at, n * sizeof *page) == 0, "step %u: page ids of sequence %u", n_steps, q);
    cr_assert(memcmp(tag, s->tag + at, n * sizeof *tag) == 0, "step %u: tags of sequence %u", n_steps, q);
    n_stayed += last[seq->slot].seq == seq && last[seq->slot].start == s->page_start[q];
    n_moved += last[seq->slot].seq == seq && last[seq->slot].start != s->page_start[q];
    last[seq->slot].seq = seq;
    last[seq->slot].start = s->page_start[q];
}

/* How row i of the step is sampled: what the request asks for. */
static void compare_row(const struct dn_step *s, uint32_t i)
{
    const struct dn_seq *seq = node->sched->batch.seq[s->token_seq[s->row_token[i]]];
    const struct dn_sample *got = &s->sample[i], *want = &seq->req->sample;
    uint32_t n_output = dn_seq_n_output(seq);
    struct dn_sample x = *want;
    x.counter = n_output;
    x.slot = -1;
    x.target = -1;
    x.n_ban = 0;
    if (i + 1 < seq->first_row + seq->step_rows || seq->n_computed + seq->step_tokens < seq->n_tokens) {
        x.target = seq->token[s->position[s->row_token[i]] + 1]; /* a prompt token's log-probability */
    } else {
        x.slot = seq->counts ? seq->slot : -1;
        for (size_t k = 0; k < node->model->n_eos && n_output < seq->req->min_tokens; k++)
            x.ban[x.n_ban++] = node->model->eos_id[k];
    }
    cr_assert(memcmp(&x.temperature, &got->temperature, offsetof(struct dn_sample, slot)) == 0);
    cr_assert(x.slot == got->slot && x.target == got->target && x.n_top == got->n_top && x.n_ban == got->n_ban);
    cr_assert(memcmp(x.ban, got->ban, (size_t)x.n_ban * sizeof *x.ban) == 0);
    cr_assert(x.seed == got->seed && x.counter == got->counter, "step %u, row %u", n_steps, i);
}

/* Places of tables don't meet, and the counts of them are right. */
static void check_places(void)
{
    const struct dn_batch *b = &node->sched->batch;
    uint32_t sum = 0;
    for (int i = 0; i < SEQS; i++) {
        const struct dn_batch_pages *p = &b->pages[i];
        sum += p->cap;
        cr_assert(p->n <= p->cap && p->start + p->cap <= b->pages_end);
        for (int k = 0; k < i; k++)
            cr_assert(p->start + p->cap <= b->pages[k].start || b->pages[k].start + b->pages[k].cap <= p->start);
    }
    cr_assert_eq(sum, b->pages_live);
    cr_assert_leq(b->pages_end, node->pool->runner->conf.limits.pages);
    if (node->sched->now.preemptions == 0) /* 2 x + 1,024 before the step, whose own may have moved */
        cr_assert_leq(b->pages_end, 3 * b->pages_live + 1024, "gaps are uploaded, too");
}

static bool step_begin(struct dn_device *d, uint32_t list)
{
    static uint32_t end;
    const struct dn_step *s = d->ops->step_arrays(d);
    bool mixed = false;
    n_steps++;
    n_decode += s->kind == DN_STEP_DECODE;
    for (uint32_t q = 0; q < s->n_seqs; q++) {
        compare(s, q);
        mixed = mixed || s->kv_format[q] != s->kv_format[0];
    }
    n_mixed += mixed;
    for (uint32_t i = 0; i < s->n_rows; i++)
        compare_row(s, i);
    check_places();
    n_gathered += node->sched->batch.pages_end < end;
    end = node->sched->batch.pages_end;
    real->step_begin(d, list); /* checks the rest */
    return false;
}

static void step_end(struct dn_device *d) {}

static int step_wait(struct dn_device *d, struct dn_err *err)
{
    struct dn_step *s = d->ops->step_arrays(d);
    for (uint32_t i = 0; i < s->n_rows; i++)
        s->result[i] = (struct dn_sampled){.id = faults && below(2000) == 0 ? -1 : 20 + (int32_t)below(200)};
    if (faults && below(300) == 0) {
        uint32_t q = below(s->n_seqs);
        s->bad[q] = 1 + (int32_t)below(((uint32_t)s->kv_len[q] + 15) / 16);
        n_faults++;
    }
    return 0;
}

/* One of a few prompts, cut anywhere: many share a prefix. */
static void submit_random(uint32_t slot, uint32_t context)
{
    uint32_t n_prompt = 1 + below(below(3) ? 60 : context / 2), n_output = 1 + below(below(3) ? 40 : context / 2 - 1);
    struct dn_request *r = request(node, slot, below(6), n_prompt, n_output < MAX_TOKENS ? n_output : MAX_TOKENS);
    r->kv = below(2) ? DN_KV_FP8 : DN_KV_BF16;
    r->priority = (int)below(3);
    r->check = below(4) != 0;
    r->prompt_logprobs = below(8) == 0;
    r->sample.repetition = below(4) ? 1.0f : 1.1f;
    r->sample.seed = below(1000);
    r->min_tokens = below(4) ? 0 : 1 + below(8);
    r->ignore_eos = below(2);
    submit(node, r);
}

/* Two entries of a table change places. */
static void swap_entries(struct dn_seq *q)
{
    if (!q || q->n_pages < 2)
        return;
    struct dn_page_ref first = q->page[0];
    q->page[0] = q->page[q->n_pages - 1];
    q->page[q->n_pages - 1] = first;
    dn_batch_leave(&node->sched->batch, q->slot);
}

static void act(uint32_t context)
{
    uint32_t slot = below(MAX_ANSWERS);
    struct answer *a = &node->answer[slot];
    struct dn_request_id id = {.slot = slot};
    for (uint32_t i = 0; i < SEQS; i++)
        if (node->sched->running[i] && node->sched->running[i]->req->id.slot == slot)
            id = node->sched->running[i]->req->id;
    if (a->done || a->code)
        submit_random(slot, context);
    else if (id.generation == 0)
        return;
    else if (below(6) == 0)
        dn_sched_pause(node->sched, id, true);
    else if (below(3) == 0)
        dn_sched_pause(node->sched, id, false);
    else if (below(12) == 0) {
        dn_sched_cancel(node->sched, id);
        a->done = true;
    }
}

static void history(uint32_t pages, uint32_t context, bool split, bool with_faults, uint64_t seed)
{
    random_state = seed;
    n_steps = n_stayed = n_moved = n_gathered = n_faults = n_decode = n_mixed = 0;
    memset(last, 0, sizeof last);
    faults = with_faults;
    node = node_open_context(pages, 64, context, (struct dn_sched_conf){.queue_max = MAX_ANSWERS, .reserve_tokens = 1});
    table = *(real = node->pool->device->ops);
    table.step_begin = step_begin;
    table.step_end = step_end;
    table.step_wait = step_wait;
    table.splits_steps = split;
    node->pool->device->ops = &table;
    for (uint32_t i = 0; i < MAX_ANSWERS; i++)
        node->answer[i].done = true;
    for (int turn = 0; turn < TURNS; turn++) {
        for (uint32_t k = below(3); k > 0; k--)
            act(context);
        if (!with_faults && below(20) == 0)
            swap_entries(node->sched->running[below(SEQS)]);
        dn_sched_turn(node->sched);
    }
    n_preempted = node->sched->now.preemptions;
    printf("%u pages, context %u%s: %u steps (%u of decode, %u of two formats), tables stayed %u times, moved %u, "
           "gathered %u, preempted %llu, faults %u\n",
           pages, context, split ? ", split" : "", n_steps, n_decode, n_mixed, n_stayed, n_moved, n_gathered,
           (unsigned long long)n_preempted, n_faults);
    node->pool->device->ops = real;
    node_close(node);
}

Test(batch, tables_are_those_of_the_sequences_in_every_step)
{
    for (unsigned split = 0; split < 2; split++) {
        history(200, 256, split, false, 1 + split);
        cr_assert(n_steps > TURNS / 2 && n_mixed > 100 && n_gathered > 3, "the history is too dull");
        cr_assert_gt(n_stayed, 20 * n_moved, "tables are kept where they are");
        history(24, 256, split, false, 3 + split); /* too few pages for all */
        cr_assert_gt(n_preempted, 20);
        history(2000, 4096, split, false, 5 + split);
        cr_assert_gt(n_stayed, 20 * n_moved);
        cr_assert_gt(n_gathered, 3);
    }
}

Test(batch, a_fault_is_handled_before_the_next_step)
{
    for (unsigned split = 0; split < 2; split++) {
        history(2000, 256, split, true, 7 + split);
        cr_assert_gt(n_faults, 10);
    }
}
