#include "engine/tokenizer_impl.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

/* Characters below U+0300 never change under NFC: none is a combining mark, and none of them composes with another. */
static bool is_nfc_trivially(const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if ((unsigned char)text[i] >= 0xCC)
            return false;
    return true;
}

/* utf8proc sorts combining marks by exchanging neighbours, which is quadratic in the length of a run. Real text has a
 * handful in a row (Unicode's own stream-safe format allows 30). */
enum { MAX_MARKS = 1024 };

static bool has_long_mark_run(const char *text, size_t n)
{
    size_t run = 0;
    for (size_t at = 0; at < n;) {
        utf8proc_int32_t c;
        utf8proc_ssize_t len = utf8proc_iterate((const utf8proc_uint8_t *)text + at, (utf8proc_ssize_t)(n - at), &c);
        if (len <= 0)
            return true;
        run = utf8proc_get_property(c)->combining_class ? run + 1 : 0;
        if (run > MAX_MARKS)
            return true;
        at += (size_t)len;
    }
    return false;
}

int dn_tok_normalize(const struct dn_tokenizer *t, const char *text, size_t n, struct dn_buf *buf, const char **out,
                     size_t *n_out, struct dn_err *err)
{
    *out = text;
    *n_out = n;
    if (!t->has_nfc || n == 0 || is_nfc_trivially(text, n))
        return 0;
    if (has_long_mark_run(text, n))
        return dn_err_set(err, DN_INVALID_VALUE, "the text has more than %d combining marks in a row", MAX_MARKS);
    utf8proc_uint8_t *normal = NULL;
    utf8proc_ssize_t len =
        utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)n, &normal, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    if (len < 0)
        return dn_err_set(err, len == UTF8PROC_ERROR_NOMEM ? DN_NO_MEMORY : DN_INVALID_VALUE,
                          "the text can't be normalized (NFC): %s", utf8proc_errmsg(len));
    dn_buf_clear(buf);
    dn_buf_put(buf, normal, (size_t)len);
    free(normal);
    if ((size_t)len == n && memcmp(buf->data, text, n) == 0)
        return 0;
    *out = buf->data;
    *n_out = buf->len;
    return 0;
}

/* SentencePiece writes U+2581 for a space, in its vocabulary and in its text. Here both have the space itself: the same
 * tokens with shorter text, and pieces that need no rewriting when they are decoded. */
static const char lower_block[] = "\xE2\x96\x81";

void dn_tok_spm_space(const char *text, size_t n, struct dn_buf *out)
{
    dn_buf_reserve(out, n);
    for (size_t i = 0; i < n;) {
        if (n - i >= 3 && memcmp(text + i, lower_block, 3) == 0) {
            dn_buf_putc(out, ' ');
            i += 3;
        } else {
            dn_buf_putc(out, text[i++]);
        }
    }
}

/* Byte-level vocabularies show bytes as printable characters: 33-126, 161-172 and 174-255 are themselves, the other
 * 68 in ascending order are U+0100 and up. */
static int mapped_byte(uint32_t c)
{
    if ((c >= 33 && c <= 126) || (c >= 161 && c <= 172) || (c >= 174 && c <= 255))
        return (int)c;
    if (c < 256 || c >= 256 + 68)
        return -1;
    c -= 256;
    return (int)(c < 33 ? c : c < 67 ? 127 + (c - 33) : 173);
}

bool dn_tok_unmap_bytes(const char *text, size_t n, struct dn_buf *out)
{
    for (size_t i = 0; i < n;) {
        const unsigned char *p = (const unsigned char *)text + i;
        unsigned len = dn_tok_utf8_len(p, n - i);
        if (len != 1 && len != 2)
            return false;
        int byte = mapped_byte(len == 1 ? p[0] : (uint32_t)(p[0] & 0x1F) << 6 | (p[1] & 0x3Fu));
        if (byte < 0)
            return false;
        dn_buf_putc(out, (char)byte);
        i += len;
    }
    return true;
}
