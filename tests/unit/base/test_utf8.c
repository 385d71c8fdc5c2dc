#include "base/utf8.h"

#include <criterion/criterion.h>
#include <string.h>

Test(utf8, every_code_point_survives_the_round_trip)
{
    for (uint32_t cp = 0; cp <= 0x10FFFF; cp++) {
        if (cp >= 0xD800 && cp <= 0xDFFF)
            continue;
        char s[4];
        uint32_t back;
        bool valid;
        size_t n = dn_utf8_put(cp, s);
        cr_assert_eq(dn_utf8_next_valid(s, n, &back, &valid), n, "U+%04X", cp);
        cr_assert(valid && back == cp, "U+%04X", cp);
        cr_assert_eq(dn_utf8_tail(s, n), 0u);
        for (size_t cut = 1; cut < n; cut++) {
            cr_assert_eq(dn_utf8_tail(s, cut), cut, "U+%04X cut to %zu", cp, cut);
            cr_assert_eq(dn_utf8_next_valid(s, cut, &back, &valid), cut);
            cr_assert(!valid && back == DN_UTF8_REPLACEMENT);
        }
    }
}

/* An independent decoder: computes the value and checks it afterwards, instead of narrowing the second byte. */
static bool slow_valid(const unsigned char *s, size_t n)
{
    for (size_t i = 0; i < n;) {
        int extra = s[i] < 0x80 ? 0 : s[i] >> 5 == 6 ? 1 : s[i] >> 4 == 14 ? 2 : s[i] >> 3 == 30 ? 3 : -1;
        static const uint32_t least[] = {0, 0x80, 0x800, 0x10000};
        if (extra < 0 || i + (size_t)extra >= n)
            return false;
        uint32_t cp = extra == 0 ? s[i] : s[i] & (0x3Fu >> extra);
        for (int k = 1; k <= extra; k++) {
            if (s[i + (size_t)k] >> 6 != 2)
                return false;
            cp = cp << 6 | (s[i + (size_t)k] & 0x3F);
        }
        if (cp < least[extra] || cp > 0x10FFFF || (cp >= 0xD800 && cp <= 0xDFFF))
            return false;
        i += (size_t)extra + 1;
    }
    return true;
}

Test(utf8, agrees_with_an_independent_decoder_on_all_short_sequences)
{
    unsigned char s[4];
    for (unsigned a = 0; a < 256; a++) {
        for (unsigned b = 0; b < 256; b++) {
            s[0] = (unsigned char)a, s[1] = (unsigned char)b;
            cr_assert_eq(dn_utf8_is_valid((char *)s, 2), slow_valid(s, 2), "%02x %02x", a, b);
            static const unsigned char edge[] = {0, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC2, 0xE0, 0xFF};
            for (size_t c = 0; c < sizeof edge; c++) {
                s[2] = edge[c];
                for (size_t d = 0; d < sizeof edge; d++) {
                    s[3] = edge[d];
                    cr_assert_eq(dn_utf8_is_valid((char *)s, 4), slow_valid(s, 4), "%02x %02x %02x %02x", a, b, s[2],
                                 s[3]);
                }
                cr_assert_eq(dn_utf8_is_valid((char *)s, 3), slow_valid(s, 3), "%02x %02x %02x", a, b, s[2]);
            }
        }
    }
}

/* The example of the Unicode standard, section 3.9: 61 F1 80 80 E1 80 C2 62 80 63 80 BF 64. */
Test(utf8, replaces_maximal_parts)
{
    static const char s[] = "\x61\xF1\x80\x80\xE1\x80\xC2\x62\x80\x63\x80\xBF\x64";
    static const uint32_t want[] = {'a', 0xFFFD, 0xFFFD, 0xFFFD, 'b', 0xFFFD, 'c', 0xFFFD, 0xFFFD, 'd'};
    size_t at = 0, n = 0;
    while (at < sizeof s - 1) {
        uint32_t cp;
        at += dn_utf8_next(s + at, sizeof s - 1 - at, &cp);
        cr_assert_lt(n, sizeof want / sizeof want[0]);
        cr_assert_eq(cp, want[n], "number %zu", n);
        n++;
    }
    cr_assert_eq(n, sizeof want / sizeof want[0]);
}

Test(utf8, the_tail_is_only_what_can_still_become_a_character)
{
    cr_assert_eq(dn_utf8_tail("", 0), 0u);
    cr_assert_eq(dn_utf8_tail("abc", 3), 0u);
    cr_assert_eq(dn_utf8_tail("a\xE2\x82", 3), 2u);
    cr_assert_eq(dn_utf8_tail("a\xF0\x9F\x98", 4), 3u);
    cr_assert_eq(dn_utf8_tail("\x82\x82\x82\x82", 4), 0u); /* continuation bytes alone */
    cr_assert_eq(dn_utf8_tail("\xE0\x80", 2), 0u);         /* overlong: no byte can save it */
    cr_assert_eq(dn_utf8_tail("\xED\xA0", 2), 0u);         /* surrogate */
    cr_assert_eq(dn_utf8_tail("\xC0", 1), 0u);
    cr_assert_eq(dn_utf8_tail("\xC3\xA9\xC3", 3), 1u);
}

Test(utf8, writes_no_surrogate)
{
    char s[4];
    cr_assert_eq(dn_utf8_put(0xD800, s), 3u);
    cr_assert_eq(memcmp(s, "\xEF\xBF\xBD", 3), 0);
    cr_assert_eq(dn_utf8_put(0x110000, s), 3u);
}
