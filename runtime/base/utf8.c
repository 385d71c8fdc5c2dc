#include "base/utf8.h"

/* Length of the sequence that `lead` begins, and the range of its second byte; 0 for a byte that begins none. */
static size_t lead_length(unsigned char lead, unsigned char *low, unsigned char *high)
{
    *low = 0x80;
    *high = 0xBF;
    if (lead >= 0xC2 && lead <= 0xDF)
        return 2;
    if (lead >= 0xE0 && lead <= 0xEF) {
        if (lead == 0xE0)
            *low = 0xA0;
        if (lead == 0xED)
            *high = 0x9F;
        return 3;
    }
    if (lead >= 0xF0 && lead <= 0xF4) {
        if (lead == 0xF0)
            *low = 0x90;
        if (lead == 0xF4)
            *high = 0x8F;
        return 4;
    }
    return 0;
}

/* Bytes of s[0..n) that agree with the sequence its first byte begins (at least 1); *want is that sequence's length,
 * 0 if the first byte begins none. Not for ASCII. */
static size_t matched(const unsigned char *s, size_t n, size_t *want)
{
    unsigned char low, high;
    *want = lead_length(s[0], &low, &high);
    size_t have = 1;
    while (have < *want && have < n && s[have] >= low && s[have] <= high) {
        low = 0x80;
        high = 0xBF;
        have++;
    }
    return have;
}

size_t dn_utf8_next_valid(const char *text, size_t n, uint32_t *cp, bool *valid)
{
    const unsigned char *s = (const unsigned char *)text;
    *valid = true;
    if (n == 0)
        return 0;
    if (s[0] < 0x80) {
        *cp = s[0];
        return 1;
    }
    size_t want;
    size_t have = matched(s, n, &want);
    if (have != want) {
        *cp = DN_UTF8_REPLACEMENT;
        *valid = false;
        return have;
    }
    uint32_t c = s[0] & (0x7Fu >> want);
    for (size_t i = 1; i < want; i++)
        c = c << 6 | (s[i] & 0x3Fu);
    *cp = c;
    return want;
}

size_t dn_utf8_next(const char *s, size_t n, uint32_t *cp)
{
    bool valid;
    return dn_utf8_next_valid(s, n, cp, &valid);
}

bool dn_utf8_is_valid(const char *s, size_t n)
{
    for (size_t i = 0; i < n;) {
        if ((unsigned char)s[i] < 0x80) {
            i++;
            continue;
        }
        uint32_t cp;
        bool valid;
        i += dn_utf8_next_valid(s + i, n - i, &cp, &valid);
        if (!valid)
            return false;
    }
    return true;
}

size_t dn_utf8_tail(const char *text, size_t n)
{
    const unsigned char *s = (const unsigned char *)text;
    for (size_t back = 1; back <= 3 && back <= n; back++) {
        const unsigned char *lead = s + n - back;
        if ((*lead & 0xC0) == 0x80)
            continue;
        if (*lead < 0x80)
            return 0;
        size_t want;
        return matched(lead, back, &want) == back && back < want ? back : 0;
    }
    return 0;
}

size_t dn_utf8_put(uint32_t cp, char out[4])
{
    if (cp > 0x10FFFF || (cp >= 0xD800 && cp <= 0xDFFF))
        cp = DN_UTF8_REPLACEMENT;
    if (cp < 0x80) {
        out[0] = (char)cp;
        return 1;
    }
    if (cp < 0x800) {
        out[0] = (char)(0xC0 | cp >> 6);
        out[1] = (char)(0x80 | (cp & 0x3F));
        return 2;
    }
    if (cp < 0x10000) {
        out[0] = (char)(0xE0 | cp >> 12);
        out[1] = (char)(0x80 | (cp >> 6 & 0x3F));
        out[2] = (char)(0x80 | (cp & 0x3F));
        return 3;
    }
    out[0] = (char)(0xF0 | cp >> 18);
    out[1] = (char)(0x80 | (cp >> 12 & 0x3F));
    out[2] = (char)(0x80 | (cp >> 6 & 0x3F));
    out[3] = (char)(0x80 | (cp & 0x3F));
    return 4;
}
