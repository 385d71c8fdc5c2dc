#include "node.h"

Test(sched, an_answer_does_not_depend_on_its_neighbours_or_their_format)
{
    struct answer want[6];
    for (unsigned i = 0; i < 6; i++)
        want[i] = alone(i, 5 + 13 * i, 30, i % 2 ? DN_KV_FP8 : DN_KV_BF16);
    struct node *n = node_open(64, 48, (struct dn_sched_conf){0});
    for (unsigned i = 0; i < 6; i++) {
        struct dn_request *r = request(n, i, i, 5 + 13 * i, 30);
        r->kv = i % 2 ? DN_KV_FP8 : DN_KV_BF16;
        submit(n, r);
        if (i % 2)
            dn_sched_turn(n->sched);
    }
    run(n);
    for (unsigned i = 0; i < 6; i++) {
        cr_assert(n->answer[i].done);
        cr_assert(same(&n->answer[i], &want[i]), "request %u", i);
    }
    struct dn_snapshot s;
    dn_sched_snapshot(n->sched, &s);
    cr_assert(s.mixed_steps > 20 && s.mixed_steps <= s.steps, "they did not share steps");
    expect_no_pages_held(n);
    node_close(n);
}

Test(sched, the_chunking_of_a_prefill_changes_nothing)
{
    struct answer want = alone(7, 150, 20, DN_KV_FP8);
    for (uint32_t step = 8; step <= 64; step += 28) {
        struct node *n = node_open(64, step, (struct dn_sched_conf){0});
        struct dn_request *r = request(n, 0, 7, 150, 20);
        r->kv = DN_KV_FP8;
        submit(n, r);
        run(n);
        cr_assert(same(&n->answer[0], &want), "step of %u tokens", step);
        node_close(n);
    }
}

Test(sched, a_cached_prefix_saves_work_and_changes_nothing)
{
    struct answer want = alone(3, 100, 20, DN_KV_BF16);
    struct node *n = node_open(64, 256, (struct dn_sched_conf){0});
    submit(n, request(n, 0, 3, 100, 20));
    run(n);
    submit(n, request(n, 1, 3, 100, 20));
    run(n);
    cr_assert_eq(n->answer[0].cached, 0);
    cr_assert_eq(n->answer[1].cached, 96, "six full pages");
    cr_assert(same(&n->answer[1], &want));
    struct dn_request *other = request(n, 2, 3, 100, 20);
    memset(other->salt, 1, sizeof other->salt);
    other->n_salt = sizeof other->salt;
    submit(n, other);
    run(n);
    cr_assert_eq(n->answer[2].cached, 0, "another tenant's prefix");
    cr_assert(same(&n->answer[2], &want));
    expect_no_pages_held(n);
    node_close(n);
}

Test(sched, cancelling_frees_the_pages_within_a_step)
{
    struct node *n = node_open(64, 64, (struct dn_sched_conf){0});
    struct answer want = alone(2, 40, 30, DN_KV_BF16);
    struct dn_request *a = request(n, 0, 1, 60, 190), *b = request(n, 1, 2, 40, 30);
    struct dn_request_id id = a->id, waiting_id;
    submit(n, a);
    submit(n, b);
    for (int i = 0; i < 5; i++)
        dn_sched_turn(n->sched);
    cr_assert(n->answer[0].n > 0);
    dn_sched_cancel(n->sched, id);
    dn_sched_turn(n->sched);
    cr_assert_eq(n->sched->n_running, 1);
    run(n);
    cr_assert(!n->answer[0].done && n->answer[0].code == 0, "nothing is sent to a client that is gone");
    cr_assert(same(&n->answer[1], &want));
    /* One that still waits, and one that nobody knows. */
    struct dn_request *c = request(n, 2, 5, 20, 5);
    waiting_id = c->id;
    submit(n, c);
    dn_sched_cancel(n->sched, waiting_id);
    dn_sched_cancel(n->sched, (struct dn_request_id){.slot = 3, .generation = 999});
    run(n);
    cr_assert_eq(n->answer[2].n, 0);
    cr_assert_eq(dn_sched_waiting(n->sched), 0);
    expect_no_pages_held(n);
    node_close(n);
}

Test(sched, a_paused_sequence_sits_out_alone)
{
    struct node *n = node_open(64, 64, (struct dn_sched_conf){0});
    struct answer want = alone(1, 20, 40, DN_KV_BF16);
    struct dn_request *a = request(n, 0, 1, 20, 40), *b = request(n, 1, 2, 20, 40);
    struct dn_request_id id = a->id;
    submit(n, a);
    submit(n, b);
    for (int i = 0; i < 5; i++)
        dn_sched_turn(n->sched);
    dn_sched_pause(n->sched, id, true);
    run(n);
    cr_assert(n->answer[1].done);
    cr_assert(!n->answer[0].done && n->answer[0].n < 8);
    dn_sched_pause(n->sched, id, false);
    run(n);
    cr_assert(same(&n->answer[0], &want));
    node_close(n);
}

Test(sched, refuses_what_the_queue_can_not_hold_and_times_out_what_waits_too_long)
{
    struct node *n = node_open(64, 64, (struct dn_sched_conf){.queue_max = 2});
    struct dn_err err = {0};
    struct dn_request *late = request(n, 0, 1, 20, 5);
    late->queue_deadline_ns = 1;
    submit(n, late);
    submit(n, request(n, 1, 2, 20, 5));
    struct dn_request *third = request(n, 2, 3, 20, 5);
    cr_assert_eq(dn_sched_submit(n->sched, third, &err), -DN_OVERLOADED);
    dn_request_free(third);
    run(n);
    cr_assert_eq(n->answer[0].code, DN_QUEUE_TIMEOUT);
    cr_assert(n->answer[1].done);
    node_close(n);
}

Test(sched, higher_priority_goes_first)
{
    struct node *n = node_open(16, 64, (struct dn_sched_conf){0}); /* room for one at a time */
    for (uint32_t i = 0; i < 3; i++) {
        struct dn_request *r = request(n, i, i, 120, 60);
        r->priority = i == 2 ? 90 : 10;
        submit(n, r);
    }
    while (!n->answer[0].done && !n->answer[1].done && !n->answer[2].done)
        cr_assert(dn_sched_turn(n->sched));
    cr_assert(n->answer[2].done);
    run(n);
    cr_assert(n->answer[0].done && n->answer[1].done);
    node_close(n);
}

Test(sched, preempted_sequences_are_computed_again_to_the_same_text)
{
    /* A reserve of one token admits more than fits in the end. */
    struct answer want[4];
    for (unsigned i = 0; i < 4; i++)
        want[i] = alone(20 + i, 30, 120, DN_KV_BF16);
    struct node *n = node_open(20, 64, (struct dn_sched_conf){.reserve_tokens = 1});
    for (unsigned i = 0; i < 4; i++)
        submit(n, request(n, i, 20 + i, 30, 120));
    run(n);
    cr_assert_gt(n->sched->now.preemptions, 0);
    for (unsigned i = 0; i < 4; i++) {
        cr_assert(n->answer[i].done, "request %u: code %d", i, n->answer[i].code);
        cr_assert(same(&n->answer[i], &want[i]), "request %u", i);
    }
    expect_no_pages_held(n);
    node_close(n);
}

Test(sched, preemption_reports_no_prompt_token_twice)
{
    struct node *n = node_open(14, 64, (struct dn_sched_conf){.reserve_tokens = 1});
    for (unsigned i = 0; i < 3; i++) {
        struct dn_request *r = request(n, i, 40 + i, 60, 60);
        r->prompt_logprobs = true;
        submit(n, r);
    }
    run(n);
    cr_assert_gt(n->sched->now.preemptions, 0);
    for (unsigned i = 0; i < 3; i++) {
        cr_assert(n->answer[i].done && n->answer[i].n == 60, "request %u", i);
        cr_assert_eq(n->answer[i].n_prompt_events, 59, "request %u: %u", i, n->answer[i].n_prompt_events);
    }
    node_close(n);
}

/* A queue timeout is over once a request has started: it must not wake the thread again and again. */
Test(sched, a_preempted_request_waits_without_spinning)
{
    struct node *n = node_open(16, 64, (struct dn_sched_conf){.reserve_tokens = 1});
    for (uint32_t i = 0; i < 2; i++) {
        struct dn_request *r = request(n, i, i, 90, 150);
        r->queue_deadline_ns = dn_now_ns() + DN_NS_PER_S / 1000;
        submit(n, r);
        dn_sched_turn(n->sched);
    }
    struct dn_request_id first = seq_of(n, 0)->req->id;
    while (n->sched->now.preemptions == 0)
        cr_assert(dn_sched_turn(n->sched));
    dn_sched_pause(n->sched, first, true);
    cr_assert(!dn_sched_turn(n->sched));
    cr_assert_eq(dn_sched_waiting(n->sched), 1);
    usleep(2000);
    struct dn_err err = {0};
    struct dn_snapshot before, after;
    cr_assert_eq(dn_sched_start(n->sched, &err), 0, "%s", err.text);
    usleep(100 * 1000);
    dn_sched_snapshot(n->sched, &before);
    usleep(100 * 1000);
    dn_sched_snapshot(n->sched, &after);
    cr_assert_eq(before.at_ns, after.at_ns, "the idle thread turns all the time");
    node_close(n);
}

Test(sched, preemption_keeps_penalties_right)
{
    struct answer want[3];
    for (int pass = 0; pass < 2; pass++) {
        struct node *n = node_open(pass ? 14 : 64, 64, (struct dn_sched_conf){.reserve_tokens = 1});
        for (unsigned i = 0; i < 3; i++) {
            struct dn_request *r = request(n, i, 40 + i, 30, 100);
            r->sample.frequency = 0.5f;
            r->sample.repetition = 1.2f;
            r->sample.temperature = 0.8f;
            r->sample.seed = i;
            submit(n, r);
        }
        run(n);
        cr_assert_eq(n->sched->now.preemptions > 0, pass == 1);
        for (unsigned i = 0; i < 3; i++) {
            if (pass == 0)
                want[i] = n->answer[i];
            else
                cr_assert(same(&n->answer[i], &want[i]), "request %u", i);
        }
        node_close(n);
    }
}

Test(sched, no_admitted_request_runs_out_of_memory)
{
    struct node *n = node_open(24, 64, (struct dn_sched_conf){0});
    for (uint32_t i = 0; i < 16; i++) {
        struct dn_request *r = request(n, i, i, 10 + 7 * (i % 9), 20 + 11 * (i % 7));
        r->kv = i % 3 ? DN_KV_BF16 : DN_KV_FP8;
        submit(n, r);
    }
    run(n);
    for (uint32_t i = 0; i < 16; i++)
        cr_assert(n->answer[i].done, "request %u: code %d", i, n->answer[i].code);
    cr_assert_eq(n->sched->now.preemptions, 0);
    expect_no_pages_held(n);
    node_close(n);
}

Test(sched, the_same_seed_gives_the_same_answer_in_any_company)
{
    struct answer first = {0};
    for (uint32_t company = 0; company < 4; company++) {
        struct node *n = node_open(64, 64, (struct dn_sched_conf){0});
        for (uint32_t i = 1; i <= company; i++)
            submit(n, request(n, i, 90 + i, 11 * i, 50));
        struct dn_request *r = request(n, 0, 9, 33, 50);
        r->sample.temperature = 1;
        r->sample.top_p = 0.9f;
        r->sample.seed = 1234;
        submit(n, r);
        run(n);
        if (company == 0)
            first = n->answer[0];
        cr_assert(same(&n->answer[0], &first), "with %u others", company);
        node_close(n);
    }
}

Test(sched, prompt_logprobs_come_for_every_token_but_the_first)
{
    struct node *n = node_open(64, 64, (struct dn_sched_conf){0});
    struct dn_request *r = request(n, 0, 1, 50, 0);
    r->prompt_logprobs = true;
    submit(n, r);
    struct dn_request *s = request(n, 1, 1, 50, 4);
    s->prompt_logprobs = true;
    submit(n, s);
    run(n);
    cr_assert(n->answer[0].done && n->answer[1].done);
    cr_assert_eq(n->answer[0].n_prompt_events, 49);
    cr_assert_eq(n->answer[0].n, 0);
    cr_assert_eq(n->answer[1].n_prompt_events, 49);
    cr_assert_eq(n->answer[1].n, 4);
    node_close(n);
}

/* Rows are scarcer than tokens: an echoed prompt must leave one to everyone else who may sample in the same step. */
Test(sched, echoed_prompts_leave_a_row_to_everyone_else)
{
    struct answer want = alone(9, 10, 6, DN_KV_BF16);
    struct node *n = node_open(64, 256, (struct dn_sched_conf){.decode_chunk_tokens = 256});
    for (uint32_t i = 0; i < 3; i++) { /* each is longer than the rows of a step */
        struct dn_request *r = request(n, i, 20 + i, 100, 4);
        r->prompt_logprobs = true;
        submit(n, r);
    }
    for (uint32_t i = 3; i < 10; i++)
        submit(n, request(n, i, 9, 10, 6));
    run(n);
    for (uint32_t i = 0; i < 3; i++) {
        cr_assert(n->answer[i].done);
        cr_assert_eq(n->answer[i].n_prompt_events, 99);
    }
    for (uint32_t i = 3; i < 10; i++)
        cr_assert(n->answer[i].done && same(&n->answer[i], &want), "request %u", i);
    expect_no_pages_held(n);
    node_close(n);
}

Test(sched, min_tokens_holds_stop_ids_back)
{
    struct answer want = alone(5, 30, 40, DN_KV_BF16);
    struct node *n = node_open(64, 64, (struct dn_sched_conf){0});
    struct dn_request *r = request(n, 0, 5, 30, 40);
    r->stop[r->n_stop++] = want.token[2];
    submit(n, r);
    run(n);
    cr_assert(n->answer[0].done && n->answer[0].finish == DN_FINISH_STOP);
    cr_assert_leq(n->answer[0].n, 3);
    r = request(n, 1, 5, 30, 40);
    r->stop[r->n_stop++] = want.token[2];
    r->min_tokens = 20;
    submit(n, r);
    run(n);
    cr_assert_geq(n->answer[1].n, 20);
    node_close(n);
}

Test(sched, closing_tells_everyone_who_is_left)
{
    struct node *n = node_open(64, 64, (struct dn_sched_conf){0});
    submit(n, request(n, 0, 1, 20, 200));
    dn_sched_turn(n->sched);
    submit(n, request(n, 1, 2, 20, 200));
    dn_sched_stop(n->sched);
    cr_assert_eq(n->answer[0].code, DN_DRAINING);
    cr_assert_eq(n->answer[1].code, DN_DRAINING);
    expect_no_pages_held(n);
    node_close(n);
}

Test(sched, the_snapshot_says_what_goes_on)
{
    struct node *n = node_open(64, 64, (struct dn_sched_conf){0});
    struct dn_snapshot s;
    submit(n, request(n, 0, 1, 40, 20));
    dn_sched_turn(n->sched);
    dn_sched_snapshot(n->sched, &s);
    cr_assert_eq(s.running, 1);
    cr_assert_gt(s.kv_bytes_held, 0);
    cr_assert_lt(s.pages_free, s.pages_total);
    run(n);
    dn_sched_snapshot(n->sched, &s);
    cr_assert_eq(s.running, 0);
    cr_assert_eq(s.output_tokens, 20);
    cr_assert_eq(s.integrity_checks, s.steps);
    cr_assert_eq(s.mixed_steps, 0, "all were of one KV format");
    node_close(n);
}
