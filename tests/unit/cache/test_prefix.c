#include "cache/prefix.h"

#include <criterion/criterion.h>
#include <string.h>

enum { T = 4 };

static struct dn_pages *pages;
static struct dn_prefix *x;

static void setup(void)
{
    struct dn_kv_layout l = {.n_layers = 1, .n_kv_heads = 1, .head_dim = 16, .page_tokens = T, .slab_pages = 8};
    l.format[DN_KV_BF16].page_bytes = 256;
    l.format[DN_KV_BF16].pages_per_slab = 4;
    l.format[DN_KV_FP8].page_bytes = 128;
    l.format[DN_KV_FP8].pages_per_slab = 8;
    l.slab_bytes = 1024;
    pages = dn_pages_open(&l, 2, 7);
    x = dn_prefix_open(pages, T, (struct dn_hash_key){1, 2});
}

static void teardown(void)
{
    dn_prefix_close(x);
    dn_pages_close(pages);
}

TestSuite(prefix, .init = setup, .fini = teardown);

static struct dn_hash128 root(const char *salt)
{
    return dn_prefix_root(x, "m", "int4", DN_KV_BF16, salt, strlen(salt));
}

/* Fills pages for token[0..n) as a sequence would and gives them back. */
static void remember(struct dn_hash128 chain, const int32_t *token, uint32_t n_pages)
{
    for (uint32_t i = 0; i < n_pages; i++, token += T) {
        struct dn_page_ref r;
        cr_assert_eq(dn_pages_take(pages, DN_KV_BF16, &r), 0);
        struct dn_hash128 h = dn_prefix_next(x, chain, token);
        dn_prefix_enter(x, chain, h, token, r);
        chain = h;
        cr_assert_eq(dn_pages_put(pages, r, dn_prefix_has(x, r.page)), 0);
    }
}

static uint32_t hits(struct dn_hash128 from, const int32_t *token, uint32_t n)
{
    struct dn_page_ref r[16];
    struct dn_hash128 chain;
    uint32_t n_hit = dn_prefix_find(x, from, token, n, 16, r, &chain);
    for (uint32_t i = 0; i < n_hit; i++)
        cr_assert_eq(dn_pages_put(pages, r[i], true), 0);
    return n_hit;
}

static const int32_t tokens[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};

Test(prefix, finds_the_longest_known_run_of_full_pages)
{
    remember(root("a"), tokens, 2);
    cr_assert_eq(hits(root("a"), tokens, 12), 2);
    cr_assert_eq(hits(root("a"), tokens, 7), 1, "half a page is no page");
    int32_t other[] = {1, 2, 3, 4, 5, 6, 7, 99};
    cr_assert_eq(hits(root("a"), other, 8), 1);
    cr_assert_eq(hits(root("a"), tokens + 4, 4), 0, "a page is what stands before it, too");
}

Test(prefix, never_crosses_a_salt_a_format_or_the_weights)
{
    remember(root("tenant-a"), tokens, 1);
    cr_assert_eq(hits(root("tenant-b"), tokens, 4), 0);
    cr_assert_eq(hits(dn_prefix_root(x, "m", "int4", DN_KV_FP8, "tenant-a", 8), tokens, 4), 0);
    cr_assert_eq(hits(dn_prefix_root(x, "m", "bf16", DN_KV_BF16, "tenant-a", 8), tokens, 4), 0);
    cr_assert_eq(hits(dn_prefix_root(x, "mi", "nt4", DN_KV_BF16, "tenant-a", 8), tokens, 4), 0,
                 "fields can't run together");
}

Test(prefix, compares_tokens_even_if_the_hash_is_the_same)
{
    struct dn_page_ref r;
    struct dn_hash128 from = root("a");
    cr_assert_eq(dn_pages_take(pages, DN_KV_BF16, &r), 0);
    dn_prefix_enter(x, from, dn_prefix_next(x, from, tokens + 4), tokens,
                    r); /* entered under the hash of other tokens */
    cr_assert_eq(hits(from, tokens + 4, 4), 0);
}

Test(prefix, forgets_evicted_pages)
{
    remember(root("a"), tokens, 3);
    struct dn_page_ref r;
    for (int i = 0; i < 8; i++)
        cr_assert_eq(dn_pages_take(pages, DN_KV_BF16, &r), 0);
    cr_assert_eq(hits(root("a"), tokens, 12), 0);
    struct dn_prefix_stats s;
    dn_prefix_stats(x, &s);
    cr_assert_eq(s.entries, 0);
}

Test(prefix, a_page_that_changed_hands_is_never_a_hit)
{
    remember(root("a"), tokens, 1);
    dn_pages_forget(pages, 0); /* freed behind the index's back */
    struct dn_page_ref r;
    cr_assert_eq(dn_pages_take(pages, DN_KV_BF16, &r), 0);
    cr_assert_eq(r.page, 0);
    cr_assert_eq(hits(root("a"), tokens, 4), 0);
}

Test(prefix, peek_agrees_with_find_while_nothing_changes)
{
    remember(root("a"), tokens, 2);
    cr_assert_eq(dn_prefix_peek(x, root("a"), tokens, 12), 8);
    cr_assert_eq(dn_prefix_peek(x, root("b"), tokens, 12), 0);
    dn_prefix_clear(x);
    cr_assert_eq(dn_prefix_peek(x, root("a"), tokens, 12), 0);
}
