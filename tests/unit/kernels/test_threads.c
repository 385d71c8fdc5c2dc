#include "kernels/cpu/threads.h"

#include <criterion/criterion.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

enum { MAX_PARTS = 8, N_ITEMS = 1000 };

struct seen {
    unsigned n_parts;
    unsigned char part[MAX_PARTS]; /* plain memory: what a part writes must be visible after the run */
    unsigned char item[N_ITEMS];
    atomic_uint calls, largest, shortest;
};

static void mark_part(void *arg, unsigned part, unsigned n_parts)
{
    struct seen *s = arg;
    s->part[part]++;
    if (part == 0)
        s->n_parts = n_parts;
}

Test(threads, run_every_part_once)
{
    for (unsigned n = 1; n <= MAX_PARTS; n++) {
        struct dn_threads *t;
        cr_assert_eq(dn_threads_open(n, "test", &t, NULL), 0);
        cr_assert_eq(dn_threads_count(t), n);
        for (int round = 0; round < 500; round++) {
            struct seen s = {0};
            dn_threads_run(t, mark_part, &s);
            cr_assert_eq(s.n_parts, n);
            for (unsigned i = 0; i < MAX_PARTS; i++)
                cr_assert_eq(s.part[i], i < n, "part %u of %u in round %d", i, n, round);
        }
        dn_threads_close(t);
    }
}

static void mark_items(void *arg, size_t begin, size_t end, unsigned part)
{
    struct seen *s = arg;
    for (size_t i = begin; i < end; i++)
        s->item[i]++;
    atomic_fetch_add(&s->calls, 1);
    unsigned n = (unsigned)(end - begin), old = atomic_load(&s->largest);
    while (n > old && !atomic_compare_exchange_weak(&s->largest, &old, n))
        ;
}

Test(threads, hand_out_every_item_once)
{
    static const size_t chunks[] = {1, 3, 7, 100, 999, 1000, 5000, SIZE_MAX};
    for (unsigned n = 1; n <= MAX_PARTS; n += 3) {
        struct dn_threads *t;
        cr_assert_eq(dn_threads_open(n, NULL, &t, NULL), 0);
        for (size_t c = 0; c < sizeof chunks / sizeof *chunks; c++)
            for (size_t items = 0; items <= N_ITEMS; items += items < 10 ? 1 : 99) {
                struct seen s = {0};
                dn_threads_for(t, items, chunks[c], mark_items, &s);
                for (size_t i = 0; i < N_ITEMS; i++)
                    cr_assert_eq(s.item[i], i < items, "item %zu of %zu", i, items);
                size_t pieces = items ? (items - 1) / chunks[c] + 1 : 0;
                cr_assert_eq(atomic_load(&s.calls), n == 1 && items ? 1 : pieces);
                cr_assert(n == 1 || atomic_load(&s.largest) <= chunks[c]);
            }
        dn_threads_close(t);
    }
}

static double cpu_seconds(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static void sleep_ms(long ms)
{
    nanosleep(&(struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000}, NULL);
}

Test(threads, use_no_processor_while_idle_and_wake_again)
{
    struct dn_threads *t;
    cr_assert_eq(dn_threads_open(4, NULL, &t, NULL), 0);
    for (int round = 0; round < 5; round++) {
        struct seen s = {0};
        dn_threads_run(t, mark_part, &s);
        for (unsigned i = 0; i < 4; i++)
            cr_assert_eq(s.part[i], 1);
        sleep_ms(20); /* they stop spinning */
        double before = cpu_seconds();
        sleep_ms(100);
        double used = cpu_seconds() - before;
        cr_assert(used < 0.01, "%.0f ms of processor in 100 ms of idling", used * 1000);
    }
    dn_threads_close(t);
}

static void slow_part(void *arg, unsigned part, unsigned n_parts)
{
    if (part == n_parts - 1)
        sleep_ms(5); /* longer than the caller spins: it blocks and must be woken */
    mark_part(arg, part, n_parts);
}

Test(threads, wait_for_a_slow_part)
{
    struct dn_threads *t;
    cr_assert_eq(dn_threads_open(3, NULL, &t, NULL), 0);
    for (int round = 0; round < 20; round++) {
        struct seen s = {0};
        dn_threads_run(t, slow_part, &s);
        for (unsigned i = 0; i < 3; i++)
            cr_assert_eq(s.part[i], 1);
    }
    dn_threads_close(t);
}

Test(threads, refuse_too_many_and_take_null)
{
    struct dn_threads *t = NULL;
    struct dn_err err = {0};
    cr_assert_eq(dn_threads_open(DN_THREADS_MAX + 1, NULL, &t, &err), -DN_INVALID_VALUE);
    cr_assert(strstr(err.text, "1025") && strstr(err.text, "1024"), "%s", err.text);
    cr_assert_null(t);
    dn_threads_close(NULL);
    cr_assert_eq(dn_threads_open(0, NULL, &t, &err), 0);
    cr_assert_geq(dn_threads_count(t), 1);
    dn_threads_close(t);
}

Test(threads, open_and_close_often)
{
    for (int i = 0; i < 200; i++) {
        struct dn_threads *t;
        cr_assert_eq(dn_threads_open(1 + (unsigned)i % 6, NULL, &t, NULL), 0);
        if (i % 3) {
            struct seen s = {0};
            dn_threads_run(t, mark_part, &s);
        }
        dn_threads_close(t);
    }
}
