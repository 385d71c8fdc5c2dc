/* Faults that have happened to others (bugreports.md part A), put in by hand. Each must end exactly the damaged
 * request, with kv_integrity, and leave its neighbour's text as it is; and each has a control without the check, which
 * shows that the fault is real: there the text comes out wrong.
 */
#include "node.h"

#include <math.h>

enum { VICTIM = 0, NEIGHBOUR = 1, N_PROMPT = 70, N_OUTPUT = 60 };

/* Victim and neighbour in mid-generation: both decode. */
static struct node *two_running(bool check)
{
    struct node *n = node_open(64, 256, (struct dn_sched_conf){0});
    struct dn_request *a = request(n, VICTIM, 1, N_PROMPT, N_OUTPUT), *b = request(n, NEIGHBOUR, 2, N_PROMPT, N_OUTPUT);
    a->check = b->check = check;
    submit(n, a);
    submit(n, b);
    for (int i = 0; i < 6; i++)
        dn_sched_turn(n->sched);
    cr_assert(n->answer[VICTIM].n >= 4 && n->answer[NEIGHBOUR].n >= 4);
    return n;
}

static void expect_only_the_victim_ends(struct node *n)
{
    struct answer want = alone(2, N_PROMPT, N_OUTPUT, DN_KV_BF16), before = alone(1, N_PROMPT, N_OUTPUT, DN_KV_BF16);
    uint32_t sent = n->answer[VICTIM].n;
    run(n);
    cr_assert_eq(n->answer[VICTIM].code, DN_KV_INTEGRITY);
    cr_assert_eq(n->answer[VICTIM].n, sent, "no token of the damaged step was sent");
    cr_assert_eq(memcmp(n->answer[VICTIM].token, before.token, sent * sizeof before.token[0]), 0);
    cr_assert(n->answer[NEIGHBOUR].done);
    cr_assert(same(&n->answer[NEIGHBOUR], &want), "the neighbour must not notice");
    cr_assert_eq(n->sched->now.integrity_violations, 1);
    expect_no_pages_held(n);
    /* The node goes on. */
    submit(n, request(n, 2, 2, N_PROMPT, N_OUTPUT));
    run(n);
    cr_assert(same(&n->answer[2], &want));
    expect_no_pages_held(n);
}

static void expect_wrong_text(struct node *n, uint32_t slot)
{
    struct answer want = alone(slot == VICTIM ? 1 : 2, N_PROMPT, N_OUTPUT, DN_KV_BF16);
    run(n);
    cr_assert(n->answer[slot].done, "nothing stopped it");
    cr_assert(!same(&n->answer[slot], &want), "the fault does no harm, so the test proves nothing");
    cr_assert_eq(n->sched->now.integrity_violations, 0);
}

/* ---- A page table entry names another sequence's page ---- */

static void swap_entry(struct node *n)
{
    seq_of(n, VICTIM)->page[1].page = seq_of(n, NEIGHBOUR)->page[1].page;
    table_changed(n, VICTIM);
}

Test(faults, swapped_entry_is_caught)
{
    struct node *n = two_running(true);
    swap_entry(n);
    expect_only_the_victim_ends(n);
    node_close(n);
}

Test(faults, swapped_entry_without_the_check)
{
    struct node *n = two_running(false);
    swap_entry(n);
    expect_wrong_text(n, VICTIM);
    node_close(n);
}

Test(faults, entry_outside_the_arena_is_caught)
{
    struct node *n = two_running(true);
    seq_of(n, VICTIM)->page[1].page = dn_pages_count(n->pool->pages) + 7;
    table_changed(n, VICTIM);
    expect_only_the_victim_ends(n);
    node_close(n);
}

/* ---- A page is freed while its owner still reads it, and given to someone else ---- */

static void free_in_use(struct node *n)
{
    struct dn_page_ref ref = seq_of(n, VICTIM)->page[2];
    dn_prefix_forget(n->pool->prefix, ref.page);
    cr_assert_eq(dn_pages_put(n->pool->pages, ref, false), 0);
    /* A third request with a prompt of its own gets the page and fills it. */
    struct dn_request *r = request(n, 2, 77, 200, 2);
    r->check = seq_of(n, VICTIM)->req->check;
    submit(n, r);
    for (int i = 0; i < 3; i++)
        dn_sched_turn(n->sched);
}

Test(faults, page_freed_in_use_is_caught)
{
    struct node *n = two_running(true);
    free_in_use(n);
    struct answer want = alone(2, N_PROMPT, N_OUTPUT, DN_KV_BF16);
    run(n);
    cr_assert_eq(n->answer[VICTIM].code, DN_KV_INTEGRITY);
    cr_assert(same(&n->answer[NEIGHBOUR], &want));
    cr_assert(n->answer[2].done, "the page's new owner keeps it");
    cr_assert_eq(n->sched->now.integrity_violations, 1);
    expect_no_pages_held(n);
    node_close(n);
}

Test(faults, page_freed_in_use_without_the_check)
{
    struct node *n = two_running(false);
    free_in_use(n);
    expect_wrong_text(n, VICTIM);
    node_close(n);
}

/* ---- Double free ---- */

Test(faults, double_free_is_refused)
{
    struct node *n = two_running(true);
    struct dn_page_ref ref = seq_of(n, VICTIM)->page[2];
    dn_prefix_forget(n->pool->prefix, ref.page);
    cr_assert_eq(dn_pages_put(n->pool->pages, ref, false), 0);
    cr_assert_eq(dn_pages_put(n->pool->pages, ref, false), -DN_KV_INTEGRITY);
    struct dn_pages_stats s;
    dn_pages_stats(n->pool->pages, &s);
    cr_assert_eq(s.refused_refs, 1);
    expect_only_the_victim_ends(n);
    node_close(n);
}

/* An allocator without tags would put the page on the free list twice and give it to two owners. */
Test(faults, double_free_without_tags)
{
    struct node *n = two_running(false);
    seq_of(n, VICTIM)->page[4] = seq_of(n, NEIGHBOUR)->page[4]; /* both write it, both with a valid tag */
    table_changed(n, VICTIM);
    expect_wrong_text(n, VICTIM);
    node_close(n);
}

/* ---- ABA: freed and taken again by the same owner, the old entry still in its table ---- */

static void reuse_by_the_same_owner(struct node *n)
{
    struct dn_seq *q = seq_of(n, VICTIM);
    struct dn_page_ref old = q->page[1], again;
    dn_prefix_forget(n->pool->prefix, old.page);
    cr_assert_eq(dn_pages_put(n->pool->pages, old, false), 0);
    while (q->n_pages < q->cap_pages) { /* its next pages; the freed one is among them */
        cr_assert_eq(dn_pages_take(n->pool->pages, DN_KV_BF16, &again), 0);
        q->page[q->n_pages++] = again;
        if (again.page == old.page)
            break;
    }
    cr_assert_eq(again.page, old.page, "the same page came back to the same owner");
    cr_assert_neq(again.tag, old.tag);
}

Test(faults, reuse_by_the_same_owner_is_caught)
{
    struct node *n = two_running(true);
    reuse_by_the_same_owner(n);
    expect_only_the_victim_ends(n);
    node_close(n);
}

Test(faults, reuse_by_the_same_owner_without_the_check)
{
    struct node *n = two_running(false);
    reuse_by_the_same_owner(n);
    expect_wrong_text(n, VICTIM);
    node_close(n);
}

/* ---- A write after the page was freed and given to someone else ---- */

static void stale_writer(struct node *n)
{
    /* The page that the victim writes now becomes the neighbour's, in the middle of its context. */
    struct dn_seq *a = seq_of(n, VICTIM), *b = seq_of(n, NEIGHBOUR);
    struct dn_page_ref *last = &a->page[a->n_computed / 16];
    last->page = b->page[1].page;
    table_changed(n, VICTIM);
}

Test(faults, stale_write_is_gated)
{
    struct node *n = two_running(true);
    stale_writer(n);
    expect_only_the_victim_ends(n); /* the neighbour's bytes are as they were */
    node_close(n);
}

Test(faults, stale_write_without_the_check_corrupts_the_neighbour)
{
    struct node *n = two_running(false);
    stale_writer(n);
    expect_wrong_text(n, NEIGHBOUR);
    node_close(n);
}

/* ---- Off means off ---- */

Test(faults, off_runs_no_check)
{
    struct node *n = two_running(false);
    run(n);
    cr_assert_eq(n->sched->now.integrity_checks, 0);
    node_close(n);
}

/* ---- Logits that are not finite ---- */

Test(faults, pages_of_a_numeric_error_are_never_found_again)
{
    for (int echo = 0; echo < 2; echo++) {
        struct answer want = alone(1, N_PROMPT, N_OUTPUT, DN_KV_BF16);
        struct node *n = node_open(64, 32, (struct dn_sched_conf){0});
        float *weight = n->pool->weights->layer[0].attn_norm, sound = weight[0];
        struct dn_request *r = request(n, VICTIM, 1, N_PROMPT, N_OUTPUT);
        r->prompt_logprobs = echo;
        weight[0] = NAN;
        submit(n, r);
        run(n);
        cr_assert_eq(n->answer[VICTIM].code, DN_NUMERIC);
        cr_assert_eq(n->answer[VICTIM].n + n->answer[VICTIM].n_prompt_events, 0);
        weight[0] = sound;
        submit(n, request(n, 2, 1, N_PROMPT, N_OUTPUT));
        run(n);
        cr_assert_eq(n->answer[2].cached, 0);
        cr_assert(same(&n->answer[2], &want));
        expect_no_pages_held(n);
        node_close(n);
    }
}
