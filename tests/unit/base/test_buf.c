#include "base/buf.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

Test(buf, grows_and_keeps_what_was_written)
{
    struct dn_buf b = {0};
    for (int i = 0; i < 10000; i++)
        dn_buf_printf(&b, "%04d", i);
    cr_assert_eq(b.len, 40000u);
    cr_assert_eq(memcmp(b.data + 4 * 1234, "1234", 4), 0);
    cr_assert_eq(memcmp(b.data + 4 * 9999, "9999", 4), 0);
    dn_buf_release(&b);
    cr_assert_null(b.data);
}

Test(buf, zeroed_is_an_empty_string)
{
    struct dn_buf b = {0};
    cr_assert_str_eq(dn_buf_str(&b), "");
    cr_assert_eq(b.len, 0u);
    dn_buf_release(&b);
}

Test(buf, putting_nothing_needs_no_memory)
{
    struct dn_buf b = {0};
    dn_buf_put(&b, NULL, 0);
    dn_buf_puts(&b, "");
    cr_assert_null(b.data);
}

Test(buf, keeps_nul_bytes)
{
    struct dn_buf b = {0};
    dn_buf_put(&b, "a\0b", 3);
    dn_buf_putc(&b, '\0');
    cr_assert_eq(b.len, 4u);
    cr_assert_eq(memcmp(b.data, "a\0b\0", 4), 0);
    dn_buf_release(&b);
}

Test(buf, drop_removes_from_the_front)
{
    struct dn_buf b = {0};
    dn_buf_puts(&b, "hello world");
    dn_buf_drop(&b, 6);
    cr_assert_str_eq(dn_buf_str(&b), "world");
    dn_buf_drop(&b, 5);
    cr_assert_eq(b.len, 0u);
    dn_buf_drop(&b, 0);
    dn_buf_release(&b);
}

Test(buf, dropping_more_than_there_is_aborts, .signal = SIGABRT)
{
    struct dn_buf b = {0};
    dn_buf_puts(&b, "abc");
    dn_buf_drop(&b, 4);
}

Test(buf, a_size_that_overflows_aborts, .signal = SIGABRT)
{
    dn_realloc(NULL, SIZE_MAX / 2, 3);
}

Test(buf, copies_are_terminated)
{
    char *s = dn_strndup("hello", 3);
    cr_assert_str_eq(s, "hel");
    free(s);
    s = dn_strdup("");
    cr_assert_str_eq(s, "");
    free(s);
}
