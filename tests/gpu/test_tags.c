/* The tag check on the GPU against a plain loop: which page is the first wrong one, what the table holds afterwards. */
#include "gpu/gpu.h"

enum { SEQS = 70, PAGES = 30000, TABLE = 5000, TAGS = 512 };

struct check {
    uint64_t *table;
    uint32_t n_pages;
};

static void ops(struct gpu *g, void *ctx)
{
    struct check *c = ctx;
    g->ops->check_tags(g->d, &(struct dn_check_tags){.table = c->table, .n_pages = c->n_pages});
}

static uint32_t below(uint32_t n)
{
    return (uint32_t)(gpu_rng() % n);
}

/* Sequence q has these pages, not all of whose last one are tokens. */
static void set_pages(struct dn_step *s, uint32_t q, uint32_t at, uint32_t pages)
{
    s->page_start[q] = (int32_t)at;
    s->kv_len[q] = (int32_t)(pages * 64 - below(64));
    s->position[q] = s->kv_len[q] - 1;
}

static uint32_t pages_of(const struct dn_step *s, uint32_t q)
{
    return ((uint32_t)s->kv_len[q] + 63) / 64;
}

/* n sequences with some pages each; as many as fit, one with thousands; tables in any order, wild pages between them.
 */
static void make_step(struct gpu *g, enum dn_step_kind kind, uint32_t n, const uint64_t *table, uint32_t n_table)
{
    struct dn_step *s = g->s;
    gpu_rows_step(g, kind, n);
    uint32_t at = 0, first = below(n);
    memset(s->page, 0xff, PAGES * sizeof *s->page);
    for (uint32_t k = 0; k < n; k++) {
        static const uint32_t len[] = {1, 2, 3, 31, 32, 33, 255, 256, 257, 700};
        uint32_t q = (k + first) % n, pages = k == n / 2 ? 4000 : len[below(10)], room = PAGES - at - 2 * (n - k);
        pages = pages < room ? pages : 1;
        set_pages(s, q, at, pages);
        for (uint32_t i = 0; i < pages; i++, at++) {
            s->page[at] = below(n_table);
            s->tag[at] = table[s->page[at]];
        }
        at += below(2);
        s->check[q] = below(8) != 0;
    }
}

/* Some entries go wrong: another tag, another page, a page out of range; anywhere, first and last ones too. */
static void spoil(struct gpu *g, uint32_t n_table)
{
    struct dn_step *s = g->s;
    static const uint32_t outside[] = {0, 1, 1000, 0x7fffffff, 0xffffffff};
    for (uint32_t q = 0; q < s->n_seqs; q++) {
        uint32_t first = (uint32_t)s->page_start[q], pages = pages_of(s, q);
        for (uint32_t k = below(4); k > 0; k--) {
            uint32_t i = below(4) == 0 ? 0 : below(4) == 0 ? pages - 1 : below(pages);
            uint32_t what = below(4);
            if (what == 0)
                s->tag[first + i] ^= 1ull << below(64);
            else if (what == 1)
                s->page[first + i] = below(n_table);
            else if (what == 2)
                s->page[first + i] =
                    outside[below(5)] < 0x7fffffff ? n_table + outside[below(3)] : 0xffffffff - below(5);
            else
                s->tag[first + i] = s->tag[first + (i + 1) % pages];
        }
    }
}

static int32_t expected(const struct dn_step *s, const uint64_t *table, uint32_t n_table, uint32_t q)
{
    if (!s->check[q])
        return 0;
    uint32_t at = (uint32_t)s->page_start[q], n = pages_of(s, q);
    for (uint32_t i = 0; i < n; i++)
        if (s->page[at + i] >= n_table || table[s->page[at + i]] != s->tag[at + i])
            return 1 + (int32_t)i;
    return 0;
}

static void run(struct gpu *g, uint32_t list, enum dn_step_kind kind, uint32_t n, struct check *c, uint64_t *table)
{
    struct dn_step *s = g->s;
    make_step(g, kind, n, table, c->n_pages);
    static const uint32_t changed[] = {0, 0, 1, 17, 300, TAGS};
    s->n_tags = changed[below(6)];
    s->tag_first = below(c->n_pages - s->n_tags + 1);
    for (uint32_t i = 0; i < s->n_tags; i++) {
        s->tag_new[i] = gpu_rng();
        if (below(2)) /* pages that the step names are among them: some already with the new tag */
            for (uint32_t k = 0; k < PAGES; k++)
                if (s->page[k] == s->tag_first + i)
                    s->tag[k] = s->tag_new[i];
    }
    spoil(g, c->n_pages);
    memcpy(table + s->tag_first, s->tag_new, s->n_tags * sizeof *table);
    int32_t want[SEQS];
    for (uint32_t q = 0; q < n; q++) {
        want[q] = expected(s, table, c->n_pages, q);
        s->bad[q] = 77;
    }
    gpu_step(g, list, ops, c);
    uint64_t *got = malloc(TABLE * sizeof *got);
    g->ops->download(g->d, got, c->table, TABLE * sizeof *got);
    for (uint32_t q = 0; q < n; q++)
        cr_expect_eq(s->bad[q], want[q], "list %u, kind %d, n %u: bad[%u] is %d, expected %d", list, kind, n, q,
                     s->bad[q], want[q]);
    cr_expect_eq(memcmp(got, table, TABLE * sizeof *got), 0, "list %u, kind %d, n %u: the table", list, kind, n);
    free(got);
}

Test(tags, against_a_loop)
{
    struct gpu g;
    gpu_open(&g, &(struct dn_step_limits){.tokens = 128, .seqs = SEQS, .rows = SEQS, .pages = PAGES, .tags = TAGS}, 4,
             100);
    uint64_t *table = malloc(TABLE * sizeof *table);
    for (uint32_t i = 0; i < TABLE; i++)
        table[i] = gpu_rng();
    struct check c = {.table = gpu_copy(&g, table, TABLE * sizeof *table), .n_pages = TABLE};
    gpu_prepare(&g, 1, ops, &c);
    static const uint32_t count[] = {1, 2, 3, 16, 23, 64, SEQS};
    for (int round = 0; round < 6; round++) {
        for (size_t i = 0; i < sizeof count / sizeof *count; i++) {
            run(&g, 1, DN_STEP_DECODE, count[i], &c, table);
            run(&g, 7, DN_STEP_DECODE, count[i], &c, table);
            run(&g, 1, DN_STEP_PREFILL, count[i], &c, table);
        }
    }
    printf("tags: done\n");
    free(table);
    gpu_close(&g);
}

static void nothing(struct gpu *g, void *ctx) {}

/* A step without the check has bad = 0, also after one that found something. */
Test(tags, without_a_check)
{
    struct gpu g;
    gpu_open(&g, &(struct dn_step_limits){.tokens = 64, .seqs = 64, .rows = 64, .pages = 64, .tags = 1}, 0, 0);
    uint64_t zero[64] = {0};
    struct check c = {.table = gpu_copy(&g, zero, sizeof zero), .n_pages = 64};
    gpu_prepare(&g, 1, ops, &c);
    gpu_prepare(&g, 2, nothing, NULL);
    gpu_rows_step(&g, DN_STEP_DECODE, 64);
    for (uint32_t q = 0; q < 64; q++) {
        g.s->page[q] = q;
        g.s->tag[q] = 1;
        g.s->check[q] = 1;
        g.s->page_start[q + 1] = (int32_t)q + 1;
    }
    gpu_step(&g, 1, ops, &c);
    for (uint32_t q = 0; q < 64; q++)
        cr_expect_eq(g.s->bad[q], 1);
    gpu_step(&g, 2, nothing, NULL);
    for (uint32_t q = 0; q < 64; q++)
        cr_expect_eq(g.s->bad[q], 0);
    for (uint32_t q = 0; q < 64; q += 2)
        g.s->check[q] = 0;
    gpu_step(&g, 1, ops, &c);
    for (uint32_t q = 0; q < 64; q++)
        cr_expect_eq(g.s->bad[q], (int32_t)(q % 2));
    gpu_close(&g);
}

/* What the check costs at 64 sequences: alone in the step, so its whole latency; in a model it runs beside other work.
 */
Test(tags, bench)
{
    static const uint32_t contexts[] = {1024, 8192, 32768};
    struct gpu g;
    gpu_open(&g, &(struct dn_step_limits){.tokens = 64, .seqs = 64, .rows = 64, .pages = 64 * 512, .tags = TAGS}, 0, 0);
    uint64_t *table = calloc(64 * 512, sizeof *table);
    struct check c = {.table = gpu_copy(&g, table, 64 * 512 * sizeof *table), .n_pages = 64 * 512};
    gpu_prepare(&g, 1, ops, &c);
    gpu_prepare(&g, 2, nothing, NULL);
    gpu_rows_step(&g, DN_STEP_DECODE, 64);
    for (size_t i = 0; i < 3; i++) {
        uint32_t pages = contexts[i] / 64;
        for (uint32_t q = 0; q < 64; q++) {
            for (uint32_t k = 0; k < pages; k++) {
                g.s->page[q * pages + k] = (q * pages + k) * 7919 % (64 * 512);
                g.s->tag[q * pages + k] = 0;
            }
            g.s->check[q] = 1;
            set_pages(g.s, q, q * pages, pages);
        }
        g.s->n_tags = 64;
        memset(g.s->tag_new, 0, 64 * sizeof *g.s->tag_new);
        double with = gpu_time(&g, 1, ops, &c), without = gpu_time(&g, 2, nothing, NULL);
        printf("BENCH check_tags 64x%u %.2f us (step %.2f us, without %.2f us)\n", contexts[i], with - without, with,
               without);
    }
    free(table);
    gpu_close(&g);
}
