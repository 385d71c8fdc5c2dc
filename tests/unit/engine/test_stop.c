#include "engine/stop.h"

#include <criterion/criterion.h>
#include <stdlib.h>
#include <string.h>

static struct dn_stop *open_list(const char *const *string, size_t n)
{
    struct dn_stop *s = NULL;
    struct dn_err err = {0};
    size_t len[DN_STOP_MAX_STRINGS];
    for (size_t i = 0; i < n; i++)
        len[i] = strlen(string[i]);
    cr_assert_eq(dn_stop_open(&s, string, len, n, &err), 0, "%s", err.text);
    return s;
}

/* Feeds `parts` (NULL ends); checks what came out before the end, in all, and which string was found. */
static void check(const char *const *stop, size_t n, const char *const *parts, const char *before, const char *all,
                  int found)
{
    struct dn_stop *s = open_list(stop, n);
    struct dn_buf out = {0};
    for (; *parts; parts++)
        dn_stop_feed(s, *parts, strlen(*parts), &out);
    cr_expect_str_eq(dn_buf_str(&out), before);
    dn_stop_finish(s, &out);
    cr_expect_str_eq(dn_buf_str(&out), all);
    cr_expect_eq(dn_stop_found(s), found);
    dn_buf_release(&out);
    dn_stop_close(s);
}

#define LIST(...)  ((const char *const[]){__VA_ARGS__})
#define PARTS(...) ((const char *const[]){__VA_ARGS__, NULL})

Test(stop, holds_the_beginning_of_a_stop_string)
{
    check(LIST("\nUser:"), 1, PARTS("Hi", "\nUser", ":"), "Hi", "Hi", 0);
    check(LIST("\nUser:"), 1, PARTS("Hi", "\nUser"), "Hi", "Hi\nUser", -1);
    check(LIST("Observation:"), 1, PARTS("Thought \xE2\x80\xA6 Obs", "ervation", ":", " more"), "Thought \xE2\x80\xA6 ",
          "Thought \xE2\x80\xA6 ", 0);
}

Test(stop, releases_held_text_at_the_end)
{
    check(LIST("Hello world"), 1, PARTS("Hello"), "", "Hello", -1);
    check(LIST("Hello world"), 1, PARTS("Hello", " there"), "Hello there", "Hello there", -1);
}

Test(stop, cuts_exactly_before_the_string)
{
    check(LIST("beta gamma"), 1, PARTS("alpha beta", " gamma delta"), "alpha ", "alpha ", 0);
    check(LIST("STOP"), 1, PARTS("oneSTOPtwo"), "one", "one", 0);
    check(LIST("STOP"), 1, PARTS("STOP"), "", "", 0);
}

Test(stop, nothing_follows_a_found_string)
{
    check(LIST("x"), 1, PARTS("abxcd", "efx"), "ab", "ab", 0);
}

Test(stop, finds_a_string_behind_a_false_start)
{
    check(LIST("aab"), 1, PARTS("a", "a", "a", "b"), "a", "a", 0);
    check(LIST("ababc"), 1, PARTS("abab", "abab", "c!"), "abab", "abab", 0);
}

Test(stop, the_first_to_complete_wins_and_the_longest_of_those)
{
    check(LIST("abcd", "bc"), 2, PARTS("xabcd"), "xa", "xa", 1);
    check(LIST("c", "abc"), 2, PARTS("xabc"), "x", "x", 1);
    check(LIST("abc", "c"), 2, PARTS("xabc"), "x", "x", 0);
}

Test(stop, without_strings_all_text_passes)
{
    check(LIST("unused"), 0, PARTS("abc"), "abc", "abc", -1);
}

Test(stop, refuses_bad_lists)
{
    struct dn_stop *s = NULL;
    struct dn_err err = {0};
    size_t len[DN_STOP_MAX_STRINGS + 1] = {0};
    const char *list[DN_STOP_MAX_STRINGS + 1];
    for (size_t i = 0; i <= DN_STOP_MAX_STRINGS; i++)
        list[i] = "x";
    cr_expect_eq(dn_stop_open(&s, list, len, 1, &err), -DN_INVALID_VALUE);
    cr_expect_str_eq(err.param, "stop");
    for (size_t i = 0; i <= DN_STOP_MAX_STRINGS; i++)
        len[i] = 1;
    cr_expect_eq(dn_stop_open(&s, list, len, DN_STOP_MAX_STRINGS + 1, &err), -DN_INVALID_VALUE);
    len[0] = DN_STOP_MAX_BYTES + 1;
    cr_expect_eq(dn_stop_open(&s, list, len, 1, &err), -DN_INVALID_VALUE);
    cr_expect_null(s);
}

/* What is right, the slow way: looks at every end of the text for a stop string. */
static size_t first_cut(const char *text, size_t n, const char *const *stop, size_t n_stop, int *which)
{
    for (size_t end = 1; end <= n; end++) {
        size_t longest = 0;
        for (size_t i = 0; i < n_stop; i++) {
            size_t len = strlen(stop[i]);
            if (len <= end && len > longest && memcmp(text + end - len, stop[i], len) == 0) {
                longest = len;
                *which = (int)i;
            }
        }
        if (longest)
            return end - longest;
    }
    *which = -1;
    return n;
}

static size_t must_hold(const char *text, size_t n, const char *const *stop, size_t n_stop)
{
    for (size_t k = n; k > 0; k--)
        for (size_t i = 0; i < n_stop; i++)
            if (k < strlen(stop[i]) && memcmp(text + n - k, stop[i], k) == 0)
                return k;
    return 0;
}

Test(stop, agrees_with_the_definition_on_random_text)
{
    uint32_t seed = 12345;
    for (int round = 0; round < 20000; round++) {
        char text[40], words[3][8];
        const char *stop[3];
        seed = seed * 1664525u + 1013904223u;
        size_t n = 1 + seed / 65536u % 30, n_stop = 1 + seed / 7919u % 3;
        for (size_t i = 0; i < n; i++) {
            seed = seed * 1664525u + 1013904223u;
            text[i] = (char)('a' + (seed >> 20) % 2);
        }
        for (size_t i = 0; i < n_stop; i++) {
            seed = seed * 1664525u + 1013904223u;
            size_t len = 1 + (seed >> 20) % 7;
            for (size_t j = 0; j < len; j++) {
                seed = seed * 1664525u + 1013904223u;
                words[i][j] = (char)('a' + (seed >> 20) % 2);
            }
            words[i][len] = '\0';
            stop[i] = words[i];
        }
        int which;
        size_t cut = first_cut(text, n, stop, n_stop, &which);
        struct dn_stop *s = open_list(stop, n_stop);
        struct dn_buf out = {0};
        for (size_t i = 0; i < n; i++) {
            bool found = dn_stop_feed(s, text + i, 1, &out);
            if (!found)
                cr_assert_eq(out.len, i + 1 - must_hold(text, i + 1, stop, n_stop), "round %d", round);
        }
        dn_stop_finish(s, &out);
        cr_assert(out.len == cut && memcmp(out.data ? out.data : "", text, cut) == 0, "round %d", round);
        cr_assert_eq(dn_stop_found(s), which, "round %d", round);
        dn_buf_release(&out);
        dn_stop_close(s);
    }
}
