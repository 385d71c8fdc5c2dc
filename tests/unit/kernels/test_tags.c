/* The tag check: which page of which sequence is found. */
#include "unit/kernels/oracle.h"

enum { N_PAGES = 300 };

static void check(struct fix *f, uint64_t *table)
{
    f->ops->step_begin(f->d, 1);
    f->ops->check_tags(f->d, &(struct dn_check_tags){table, N_PAGES, f->layout.page_tokens});
    f->ops->step_end(f->d);
    cr_assert_eq(f->ops->step_wait(f->d, NULL), 0);
}

static void setup(struct fix *f, struct seq *q, uint64_t *table)
{
    fix_open(f, NULL, 2, 16);
    fix_arena(f, 1, 1, 16, 16, 64);
    for (uint32_t i = 0; i < N_PAGES; i++)
        table[i] = 1 + rng();
    step_clear(f);
    for (uint32_t i = 0; i < 5; i++) {
        seq_init(f, q + i, i % 2 ? DN_KV_FP8 : DN_KV_BF16, 100);
        step_add(f, q + i, 90, 10);
        f->s->check[i] = 1;
    }
    for (int32_t i = 0; i < f->s->page_start[5]; i++)
        f->s->tag[i] = table[f->s->page[i]];
}

Test(tags, every_single_wrong_page_is_found_in_its_sequence_alone)
{
    struct fix f;
    struct seq q[5];
    uint64_t table[N_PAGES];
    setup(&f, q, table);
    check(&f, table);
    for (int i = 0; i < 5; i++)
        cr_assert_eq(f.s->bad[i], 0);
    for (int i = 0; i < 5; i++) {
        for (int32_t p = f.s->page_start[i]; p < f.s->page_start[i + 1]; p++) {
            f.s->tag[p] ^= 1ull << (p % 64); /* any one bit */
            check(&f, table);
            for (int j = 0; j < 5; j++)
                cr_assert_eq(f.s->bad[j], j == i ? 1 + p - f.s->page_start[i] : 0);
            f.s->tag[p] = table[f.s->page[p]];
        }
    }
    fix_close(&f);
}

Test(tags, the_first_of_several_wrong_pages_is_named)
{
    struct fix f;
    struct seq q[5];
    uint64_t table[N_PAGES];
    setup(&f, q, table);
    int32_t at = f.s->page_start[3];
    f.s->tag[at + 2]++;
    f.s->tag[at + 4]++;
    check(&f, table);
    cr_assert_eq(f.s->bad[3], 3);
    fix_close(&f);
}

Test(tags, a_page_outside_the_table_is_wrong)
{
    struct fix f;
    struct seq q[5];
    uint64_t table[N_PAGES];
    setup(&f, q, table);
    static const uint32_t outside[] = {N_PAGES, N_PAGES + 1, INT32_MAX, (uint32_t)INT32_MAX + 1, UINT32_MAX};
    for (size_t i = 0; i < 5; i++) {
        f.s->page[f.s->page_start[1] + 1] = outside[i];
        check(&f, table);
        cr_assert_eq(f.s->bad[1], 2);
        cr_assert_eq(f.s->bad[0] | f.s->bad[2], 0);
    }
    fix_close(&f);
}

Test(tags, an_unchecked_sequence_is_never_bad)
{
    struct fix f;
    struct seq q[5];
    uint64_t table[N_PAGES];
    setup(&f, q, table);
    f.s->tag[f.s->page_start[2]]++;
    f.s->page[f.s->page_start[2] + 1] = UINT32_MAX;
    check(&f, table);
    cr_assert_eq(f.s->bad[2], 1);
    f.s->check[2] = 0;
    check(&f, table);
    cr_assert_eq(f.s->bad[2], 0);
    /* A step without the operation starts with nobody bad, whatever the last one found. */
    f.s->check[2] = 1;
    check(&f, table);
    f.ops->step_begin(f.d, 1);
    cr_assert_eq(f.s->bad[2], 0);
    fix_close(&f);
}
