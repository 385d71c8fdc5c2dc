#include "base/arena.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>

Test(arena, gives_aligned_memory_that_does_not_overlap)
{
    struct dn_arena a = {0};
    unsigned char *p[200];
    for (int i = 0; i < 200; i++) {
        p[i] = dn_arena_alloc(&a, (size_t)i * 7 + 1);
        cr_assert_eq((uintptr_t)p[i] % 16, 0u);
        memset(p[i], i, (size_t)i * 7 + 1);
    }
    for (int i = 0; i < 200; i++) {
        for (int j = 0; j < i * 7 + 1; j++)
            cr_assert_eq(p[i][j], (unsigned char)i);
    }
    dn_arena_release(&a);
    cr_assert_null(a.first);
    cr_assert_eq(a.used_bytes, 0u);
}

Test(arena, takes_requests_larger_than_a_block)
{
    struct dn_arena a = {0};
    char *big = dn_arena_alloc(&a, 1000000);
    memset(big, 'x', 1000000);
    char *small = dn_arena_alloc(&a, 1);
    *small = 'y';
    cr_assert_eq(big[999999], 'x');
    cr_assert_geq(a.used_bytes, 1000001u);
    dn_arena_release(&a);
}

Test(arena, zeroed_memory_is_zero_even_after_reuse)
{
    for (int round = 0; round < 3; round++) {
        struct dn_arena a = {0};
        unsigned char *p = dn_arena_alloc0(&a, 100, 8);
        for (int i = 0; i < 800; i++)
            cr_assert_eq(p[i], 0);
        memset(p, 0xAB, 800);
        dn_arena_release(&a);
    }
}

Test(arena, copies_keep_nul_and_are_terminated)
{
    struct dn_arena a = {0};
    char *s = dn_arena_strndup(&a, "a\0bcd", 3);
    cr_assert_eq(memcmp(s, "a\0b", 4), 0);
    cr_assert_str_eq(dn_arena_printf(&a, "%s-%d", "x", 42), "x-42");
    dn_arena_release(&a);
}

Test(arena, a_product_that_overflows_aborts, .signal = SIGABRT)
{
    struct dn_arena a = {0};
    dn_arena_alloc0(&a, SIZE_MAX / 4, 8);
}

Test(arena, an_absurd_size_aborts, .signal = SIGABRT)
{
    struct dn_arena a = {0};
    dn_arena_alloc(&a, SIZE_MAX - 3);
}
