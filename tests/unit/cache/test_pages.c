#include "cache/pages.h"

#include <criterion/criterion.h>
#include <string.h>

/* bf16 pages are twice the fp8 ones: 4 and 8 a slab. */
static struct dn_kv_layout layout(void)
{
    struct dn_kv_layout l = {.n_layers = 1, .n_kv_heads = 1, .head_dim = 16, .page_tokens = 4, .slab_pages = 8};
    l.format[DN_KV_BF16].page_bytes = 256;
    l.format[DN_KV_BF16].pages_per_slab = 4;
    l.format[DN_KV_FP8].page_bytes = 128;
    l.format[DN_KV_FP8].pages_per_slab = 8;
    l.slab_bytes = 1024;
    return l;
}

static struct dn_pages *open_pages(uint32_t n_slabs)
{
    struct dn_kv_layout l = layout();
    return dn_pages_open(&l, n_slabs, 42);
}

static struct dn_page_ref take(struct dn_pages *p, enum dn_kv_format f)
{
    struct dn_page_ref r = {0};
    cr_assert_eq(dn_pages_take(p, f, &r), 0);
    return r;
}

Test(pages, gives_every_page_once_and_then_says_so)
{
    struct dn_pages *p = open_pages(2);
    bool seen[16] = {0};
    for (int i = 0; i < 8; i++) {
        struct dn_page_ref r = take(p, DN_KV_BF16);
        cr_assert(r.page < 16 && r.page % 8 < 4 && !seen[r.page]);
        seen[r.page] = true;
    }
    struct dn_page_ref r;
    cr_assert_eq(dn_pages_take(p, DN_KV_BF16, &r), -DN_NO_MEMORY);
    cr_assert_eq(dn_pages_take(p, DN_KV_FP8, &r), -DN_NO_MEMORY);
    dn_pages_close(p);
}

Test(pages, memory_moves_between_formats_when_a_slab_is_empty)
{
    struct dn_pages *p = open_pages(1);
    struct dn_page_ref bf16[4], r;
    for (int i = 0; i < 4; i++)
        bf16[i] = take(p, DN_KV_BF16);
    for (int i = 0; i < 3; i++)
        cr_assert_eq(dn_pages_put(p, bf16[i], false), 0);
    cr_assert_eq(dn_pages_take(p, DN_KV_FP8, &r), -DN_NO_MEMORY, "one bf16 page still pins the slab");
    cr_assert_eq(dn_pages_put(p, bf16[3], false), 0);
    for (int i = 0; i < 8; i++)
        take(p, DN_KV_FP8);
    struct dn_pages_stats s;
    dn_pages_stats(p, &s);
    cr_assert_eq(s.held[DN_KV_FP8], 8);
    cr_assert_eq(s.bytes_held, 1024);
    dn_pages_close(p);
}

Test(pages, tag_changes_at_every_allocation_and_every_free)
{
    struct dn_pages *p = open_pages(1);
    uint64_t seen[64];
    int n = 0;
    for (int i = 0; i < 20; i++) {
        struct dn_page_ref r = take(p, DN_KV_BF16);
        cr_assert_eq(r.page, 0, "the same page comes back");
        cr_assert_eq(dn_pages_tags(p)[0], r.tag);
        seen[n++] = r.tag;
        cr_assert_eq(dn_pages_put(p, r, false), 0);
        seen[n++] = dn_pages_tags(p)[0];
    }
    for (int i = 0; i < n; i++)
        for (int j = 0; j < i; j++)
            cr_assert_neq(seen[i], seen[j]);
    dn_pages_close(p);
}

Test(pages, double_free_changes_nothing_and_is_counted)
{
    struct dn_pages *p = open_pages(1);
    struct dn_page_ref a = take(p, DN_KV_BF16);
    cr_assert_eq(dn_pages_put(p, a, false), 0);
    cr_assert_eq(dn_pages_put(p, a, false), -DN_KV_INTEGRITY);
    struct dn_page_ref b = take(p, DN_KV_BF16);
    cr_assert_eq(b.page, a.page);
    cr_assert_eq(dn_pages_put(p, a, false), -DN_KV_INTEGRITY, "the old owner must not free the new one's page");
    cr_assert_eq(dn_pages_get(p, a), -DN_KV_INTEGRITY);
    cr_assert_eq(dn_pages_put(p, b, false), 0);
    struct dn_pages_stats s;
    dn_pages_stats(p, &s);
    cr_assert_eq(s.refused_refs, 3);
    dn_pages_close(p);
}

Test(pages, refuses_a_page_outside_the_arena)
{
    struct dn_pages *p = open_pages(1);
    cr_assert_eq(dn_pages_put(p, (struct dn_page_ref){8, 1}, false), -DN_KV_INTEGRITY);
    cr_assert_eq(dn_pages_get(p, (struct dn_page_ref){UINT32_MAX, 1}), -DN_KV_INTEGRITY);
    dn_pages_quarantine(p, UINT32_MAX);
    dn_pages_close(p);
}

static uint32_t evicted[16], n_evicted;
static void on_evict(void *user, uint32_t page)
{
    evicted[n_evicted++] = page;
}

Test(pages, evicts_the_longest_unused_first_and_revives_what_is_used_again)
{
    struct dn_pages *p = open_pages(1);
    dn_pages_on_evict(p, on_evict, NULL);
    struct dn_page_ref r[4];
    for (int i = 0; i < 4; i++)
        r[i] = take(p, DN_KV_BF16);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(dn_pages_put(p, r[i], true), 0);
    cr_assert_eq(dn_pages_get(p, r[0]), 0);
    struct dn_page_ref fresh = take(p, DN_KV_BF16);
    cr_assert_eq(n_evicted, 1);
    cr_assert_eq(evicted[0], r[1].page);
    cr_assert_eq(fresh.page, r[1].page);
    cr_assert_eq(dn_pages_get(p, r[1]), -DN_KV_INTEGRITY, "an evicted page is no longer the one that was cached");
    dn_pages_close(p);
}

Test(pages, empties_a_slab_of_cached_pages_for_another_format)
{
    struct dn_pages *p = open_pages(1);
    n_evicted = 0;
    dn_pages_on_evict(p, on_evict, NULL);
    for (int i = 0; i < 4; i++)
        cr_assert_eq(dn_pages_put(p, take(p, DN_KV_BF16), true), 0);
    for (int i = 0; i < 8; i++)
        take(p, DN_KV_FP8);
    cr_assert_geq(n_evicted, 1);
    dn_pages_close(p);
}

Test(pages, can_take_tells_what_take_will_do)
{
    /* Random histories; the promise must hold for every mix that it grants, and be refused only if it can't be kept. */
    unsigned seed = 1;
    for (int round = 0; round < 2000; round++) {
        struct dn_pages *p = open_pages(3);
        struct dn_page_ref held[64];
        int n = 0;
        for (int i = 0; i < 40; i++) {
            seed = seed * 1103515245 + 12345;
            unsigned x = seed >> 16;
            struct dn_page_ref r;
            if (x % 3 && n < 24 && dn_pages_take(p, x & 8 ? DN_KV_FP8 : DN_KV_BF16, &r) == 0)
                held[n++] = r;
            else if (n > 0) {
                int at = (int)(x >> 5) % n;
                cr_assert_eq(dn_pages_put(p, held[at], x & 16), 0);
                held[at] = held[--n];
            }
        }
        uint32_t want[DN_KV_FORMATS] = {(seed >> 10) % 8, (seed >> 20) % 12};
        bool promised = dn_pages_can_take(p, want);
        bool kept = true;
        uint32_t left[DN_KV_FORMATS] = {want[0], want[1]};
        dn_pages_promise(p, want);
        while (left[0] + left[1] > 0) { /* in any order */
            seed = seed * 1103515245 + 12345;
            int f = (seed >> 16) % (left[0] + left[1]) < left[0] ? DN_KV_BF16 : DN_KV_FP8;
            struct dn_page_ref r;
            kept = dn_pages_take(p, (enum dn_kv_format)f, &r) == 0 && kept;
            left[f]--;
        }
        cr_assert(!promised || kept, "round %d: promised %u + %u", round, want[0], want[1]);
        dn_pages_close(p);
    }
}

/* Both formats are promised something: what one takes must not be what the other needs. */
Test(pages, what_is_promised_to_one_format_is_not_taken_by_the_other)
{
    static const uint32_t want[DN_KV_FORMATS] = {1, 1};
    struct dn_page_ref r, held[8];
    for (int variant = 0; variant < 3; variant++) {
        struct dn_pages *p = open_pages(2);
        for (int i = 0; i < 8; i++)
            held[i] = take(p, DN_KV_BF16);
        /* Slab 1 keeps one page in use and has room; slab 0 is free, half cached, or cached. */
        for (int i = 0; i < 4; i++)
            cr_assert_eq(dn_pages_put(p, held[i], variant == 2 || (variant == 1 && i < 2)), 0);
        for (int i = 5; i < 8; i++)
            cr_assert_eq(dn_pages_put(p, held[i], variant != 1), 0);
        cr_assert(dn_pages_can_take(p, want));
        dn_pages_promise(p, want);
        cr_assert_eq(dn_pages_take(p, DN_KV_BF16, &r), 0);
        cr_assert_eq(dn_pages_take(p, DN_KV_FP8, &r), 0, "variant %d", variant);
        dn_pages_close(p);
    }
}

Test(pages, quarantine_takes_a_free_page_out_of_use)
{
    struct dn_pages *p = open_pages(1);
    struct dn_page_ref r[4], x;
    for (int i = 0; i < 4; i++)
        r[i] = take(p, DN_KV_BF16);
    for (int i = 0; i < 2; i++)
        cr_assert_eq(dn_pages_put(p, r[i], false), 0);
    dn_pages_quarantine(p, r[0].page);
    x = take(p, DN_KV_BF16);
    cr_assert_eq(x.page, r[1].page);
    cr_assert_eq(dn_pages_take(p, DN_KV_BF16, &x), -DN_NO_MEMORY);
    struct dn_pages_stats s;
    dn_pages_stats(p, &s);
    cr_assert_eq(s.quarantined, 1);
    dn_pages_close(p);
}

Test(pages, quarantine_leaves_a_rightful_holder_his_page_until_he_is_done)
{
    struct dn_pages *p = open_pages(1);
    struct dn_page_ref r = take(p, DN_KV_BF16);
    dn_pages_quarantine(p, r.page);
    cr_assert_eq(dn_pages_tags(p)[r.page], r.tag);
    cr_assert_eq(dn_pages_get(p, r), -DN_KV_INTEGRITY, "nobody else may join");
    cr_assert_eq(dn_pages_put(p, r, true), 0);
    struct dn_pages_stats s;
    dn_pages_stats(p, &s);
    cr_assert_eq(s.quarantined, 1);
    cr_assert_eq(s.cached[DN_KV_BF16], 0);
    dn_pages_close(p);
}

Test(pages, audit_finds_pages_that_a_damaged_table_lost)
{
    struct dn_pages *p = open_pages(1);
    struct dn_page_ref a = take(p, DN_KV_BF16), b = take(p, DN_KV_BF16);
    uint32_t refs[8] = {0};
    refs[a.page] = 1;
    cr_assert_eq(dn_pages_audit(p, refs), 1);
    cr_assert_eq(dn_pages_put(p, b, false), -DN_KV_INTEGRITY);
    cr_assert_eq(dn_pages_put(p, a, false), 0);
    dn_pages_close(p);
}

Test(pages, reports_which_tags_changed)
{
    struct dn_pages *p = open_pages(2);
    uint32_t first, n;
    dn_pages_take_dirty(p, &first, &n);
    cr_assert_eq(first, 0);
    cr_assert_eq(n, 16);
    dn_pages_take_dirty(p, &first, &n);
    cr_assert_eq(n, 0);
    struct dn_page_ref r = take(p, DN_KV_BF16);
    dn_pages_take_dirty(p, &first, &n);
    cr_assert_eq(first, r.page);
    cr_assert_eq(n, 1);
    dn_pages_close(p);
}
