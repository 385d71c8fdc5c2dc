/* Backends that want decode and prefill in steps of their own (dn_kernels.splits_steps): what the steps hold, and that
 * the answers are the same as in mixed steps. */
#include "node.h"

static const struct dn_kernels *real;
static unsigned n_decode, n_prefill;
static int32_t prompt_end; /* of all requests of a test: no prefill beyond it; 0 = not checked */

static bool begin(struct dn_device *d, uint32_t list)
{
    const struct dn_step *s = d->ops->step_arrays(d);
    if (s->kind == DN_STEP_DECODE) {
        n_decode++;
        cr_assert_eq(s->n_tokens, s->n_seqs);
        for (uint32_t i = 0; i < s->n_seqs; i++)
            cr_assert(s->token_start[i] == (int32_t)i && s->kv_len[i] == s->position[i] + 1);
    } else {
        n_prefill++;
        for (uint32_t i = 0; prompt_end && i < s->n_tokens; i++)
            cr_assert_lt(s->position[i], prompt_end);
    }
    return real->step_begin(d, list);
}

static struct dn_kernels split_ops(struct node *n)
{
    real = n->pool->device->ops;
    struct dn_kernels ops = *real;
    ops.splits_steps = true;
    ops.step_begin = begin;
    n_decode = n_prefill = 0;
    prompt_end = 0;
    return ops;
}

Test(split, answers_are_those_of_mixed_steps)
{
    struct answer want[6];
    for (unsigned i = 0; i < 6; i++)
        want[i] = alone(i, 1 + 30 * i, 20, i % 2 ? DN_KV_FP8 : DN_KV_BF16);
    struct node *n = node_open(64, 48, (struct dn_sched_conf){0});
    struct dn_kernels ops = split_ops(n);
    n->pool->device->ops = &ops;
    for (unsigned i = 0; i < 6; i++) {
        struct dn_request *r = request(n, i, i, 1 + 30 * i, 20);
        r->kv = i % 2 ? DN_KV_FP8 : DN_KV_BF16;
        submit(n, r);
        if (i % 2)
            dn_sched_turn(n->sched);
    }
    run(n);
    for (unsigned i = 0; i < 6; i++)
        cr_assert(n->answer[i].done && same(&n->answer[i], &want[i]), "request %u", i);
    cr_assert_gt(n_decode, 19);
    cr_assert_gt(n_prefill, 3);
    n->pool->device->ops = real;
    expect_no_pages_held(n);
    node_close(n);
}

Test(split, a_sequence_alone_decodes_in_decode_steps_only)
{
    struct node *n = node_open(64, 64, (struct dn_sched_conf){0});
    struct dn_kernels ops = split_ops(n);
    n->pool->device->ops = &ops;
    submit(n, request(n, 0, 3, 65, 10)); /* chunks of 64 and of 1: both are prefill */
    run(n);
    cr_assert_eq(n_prefill, 2);
    cr_assert_eq(n_decode, 9, "the first of ten tokens comes from prefill");
    n->pool->device->ops = real;
    node_close(n);
}

Test(split, a_preempted_sequence_decodes_its_output_again)
{
    struct answer want[4];
    for (unsigned i = 0; i < 4; i++)
        want[i] = alone(20 + i, 30, 120, DN_KV_BF16);
    struct node *n = node_open(20, 64, (struct dn_sched_conf){.reserve_tokens = 1});
    struct dn_kernels ops = split_ops(n);
    n->pool->device->ops = &ops;
    prompt_end = 30;
    for (unsigned i = 0; i < 4; i++)
        submit(n, request(n, i, 20 + i, 30, 120));
    run(n);
    cr_assert_gt(n->sched->now.preemptions, 0);
    for (unsigned i = 0; i < 4; i++)
        cr_assert(n->answer[i].done && same(&n->answer[i], &want[i]), "request %u", i);
    n->pool->device->ops = real;
    expect_no_pages_held(n);
    node_close(n);
}

/* Asks for 40 tokens, then again with the answer in the prompt; the second time's cached tokens. */
static uint32_t cached_in_second_turn(bool split)
{
    struct node *n = node_open(64, 64, (struct dn_sched_conf){0});
    struct dn_kernels ops = split_ops(n);
    ops.splits_steps = split;
    n->pool->device->ops = &ops;
    submit(n, request(n, 0, 3, 40, 40));
    run(n);
    struct dn_request *first = request(n, 1, 3, 40, 1), *r = request(n, 2, 3, 90, 5);
    memcpy(r->prompt, first->prompt, 40 * sizeof *r->prompt);
    memcpy(r->prompt + 40, n->answer[0].token, 40 * sizeof *r->prompt);
    dn_request_free(first);
    submit(n, r);
    run(n);
    uint32_t cached = n->answer[2].cached;
    n->pool->device->ops = real;
    node_close(n);
    return cached;
}

Test(split, pages_that_decode_filled_are_nobody_elses_prompt)
{
    cr_assert_eq(cached_in_second_turn(false), 64, "four full pages of 79 computed tokens");
    cr_assert_eq(cached_in_second_turn(true), 32, "the prompt's two full pages");
}

/* ---- When events go out ---- */

static struct node *watched;
static bool late;
static unsigned n_behind;

static uint32_t delivered(void)
{
    uint32_t n = 0;
    for (int i = 0; i < MAX_ANSWERS; i++)
        n += watched->answer[i].n;
    return n;
}

/* When a step begins: a decode step of an asynchronous device finds the tokens of the step before not sent yet. */
static bool begin_watched(struct dn_device *d, uint32_t list)
{
    const struct dn_step *s = d->ops->step_arrays(d);
    uint32_t behind = (uint32_t)watched->sched->now.output_tokens - delivered();
    cr_assert_leq(behind, late && s->kind == DN_STEP_DECODE ? 2 : 0);
    n_behind += behind > 0;
    return begin(d, list);
}

Test(split, events_go_out_while_the_next_step_runs)
{
    struct answer want[2] = {alone(1, 40, 30, DN_KV_BF16), alone(2, 120, 30, DN_KV_BF16)};
    for (int i = 0; i < 3; i++) { /* the last: asynchronous, but all in one step */
        struct node *n = watched = node_open(64, 16, (struct dn_sched_conf){0});
        struct dn_kernels ops = split_ops(n);
        ops.step_begin = begin_watched;
        ops.splits_steps = i < 2;
        ops.asynchronous = i > 0;
        late = i == 1;
        n_behind = 0;
        n->pool->device->ops = &ops;
        for (uint32_t k = 0; k < 2; k++) {
            submit(n, request(n, k, k + 1, k ? 120 : 40, 30));
            for (int turn = 0; turn < 8; turn++)
                dn_sched_turn(n->sched);
        }
        run(n); /* a turn without work sends all that is left */
        for (uint32_t k = 0; k < 2; k++)
            cr_assert(n->answer[k].done && same(&n->answer[k], &want[k]));
        cr_assert(late ? n_behind > 20 : n_behind == 0, "%u", n_behind);
        n->pool->device->ops = real;
        expect_no_pages_held(n);
        node_close(n);
    }
}
