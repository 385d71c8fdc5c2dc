#include "base/inbox.h"

#include "base/clock.h"

#include <criterion/criterion.h>

struct msg {
    struct dn_inbox_node node;
    int number;
};

Test(inbox, hands_over_in_order)
{
    struct dn_inbox in;
    struct msg m[3] = {{.number = 0}, {.number = 1}, {.number = 2}};
    dn_inbox_init(&in);
    cr_assert_null(dn_inbox_take(&in));
    for (int i = 0; i < 3; i++)
        cr_assert(dn_inbox_push(&in, &m[i].node));
    cr_assert_eq(dn_inbox_length(&in), 3u);
    int want = 0;
    for (struct dn_inbox_node *n = dn_inbox_take(&in); n; n = n->next)
        cr_assert_eq(((struct msg *)n)->number, want++);
    cr_assert_eq(want, 3);
    cr_assert_null(dn_inbox_take(&in));
    cr_assert(dn_inbox_push(&in, &m[0].node), "usable again after a take");
    cr_assert_eq(dn_inbox_take(&in), &m[0].node);
    dn_inbox_release(&in);
}

Test(inbox, a_wait_ends_at_its_deadline)
{
    struct dn_inbox in;
    dn_inbox_init(&in);
    uint64_t start = dn_now_ns();
    cr_assert_null(dn_inbox_wait(&in, start + 20 * DN_NS_PER_MS));
    cr_assert_geq(dn_now_ns() - start, 20 * DN_NS_PER_MS);
    cr_assert_null(dn_inbox_wait(&in, 0), "a deadline that is over returns at once");
    dn_inbox_release(&in);
}

Test(inbox, a_wake_is_not_lost_and_counts_once)
{
    struct dn_inbox in;
    dn_inbox_init(&in);
    dn_inbox_wake(&in);
    cr_assert_null(dn_inbox_wait(&in, UINT64_MAX), "returns since it was woken before");
    uint64_t start = dn_now_ns();
    dn_inbox_wait(&in, start + 10 * DN_NS_PER_MS);
    cr_assert_geq(dn_now_ns() - start, 10 * DN_NS_PER_MS);
    dn_inbox_release(&in);
}

Test(inbox, closed_refuses_and_hands_over_the_rest)
{
    struct dn_inbox in;
    struct msg m[2] = {{.number = 0}, {.number = 1}};
    dn_inbox_init(&in);
    dn_inbox_push(&in, &m[0].node);
    dn_inbox_close(&in);
    cr_assert_not(dn_inbox_push(&in, &m[1].node));
    cr_assert_eq(dn_inbox_wait(&in, UINT64_MAX), &m[0].node);
    cr_assert_null(dn_inbox_wait(&in, UINT64_MAX));
    cr_assert(dn_inbox_is_closed(&in));
    dn_inbox_release(&in);
}
