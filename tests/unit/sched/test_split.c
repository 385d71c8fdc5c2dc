/* Backends that want decode and prefill in steps of their own (dn_kernels.splits_steps): what the steps hold, and that
 * the answers are the same as in mixed steps. */
#include "node.h"

static const struct dn_kernels *real;
static unsigned n_decode, n_prefill;

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
