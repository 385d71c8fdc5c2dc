#include "engine/detokenizer.h"

#include "base/utf8.h"

#include <string.h>

void dn_detok_init(struct dn_detok *d, const struct dn_tokenizer *tokenizer, unsigned flags)
{
    *d = (struct dn_detok){.tokenizer = tokenizer, .flags = flags};
    d->strip_space = flags & DN_DETOK_TEXT_START && dn_tokenizer_has_space_prefix(tokenizer);
}

/* Appends data without its incomplete tail, invalid parts as U+FFFD; returns the length of the tail. */
static size_t put_valid(const char *data, size_t n, struct dn_buf *out)
{
    size_t tail = dn_utf8_tail(data, n);
    size_t start = 0;
    for (size_t at = 0; at < n - tail;) {
        uint32_t cp;
        bool valid;
        size_t len = dn_utf8_next_valid(data + at, n - tail - at, &cp, &valid);
        if (!valid) {
            dn_buf_put(out, data + start, at - start);
            dn_buf_put(out, "\xEF\xBF\xBD", 3);
            start = at + len;
        }
        at += len;
    }
    dn_buf_put(out, data + start, n - tail - start);
    return tail;
}

void dn_detok_feed_bytes(struct dn_detok *d, const char *data, size_t n, struct dn_buf *out)
{
    if (n == 0)
        return;
    /* The held bytes with as much of the new ones as a character can need decide where the new ones start. */
    if (d->n_held) {
        char joined[3 + 4];
        size_t n_new = n < 4 ? n : 4, n_held = d->n_held;
        memcpy(joined, d->held, n_held);
        memcpy(joined + n_held, data, n_new);
        uint32_t cp;
        bool valid;
        if (n_new == n && dn_utf8_tail(joined, n_held + n) == n_held + n) { /* still not a whole character */
            memcpy(d->held, joined, n_held + n);
            d->n_held = (uint8_t)(n_held + n);
            return;
        }
        size_t len = dn_utf8_next_valid(joined, n_held + n_new, &cp, &valid);
        dn_buf_put(out, valid ? joined : "\xEF\xBF\xBD", valid ? len : 3);
        /* What was held is a prefix of a character, so an invalid subpart is exactly that prefix or longer. */
        data += len - n_held;
        n -= len - n_held;
        d->n_held = 0;
    }
    size_t tail = put_valid(data, n, out);
    memcpy(d->held, data + n - tail, tail);
    d->n_held = (uint8_t)tail;
}

void dn_detok_feed(struct dn_detok *d, int32_t id, struct dn_buf *out)
{
    if (d->flags & DN_DETOK_SKIP_SPECIAL && dn_tokenizer_is_special(d->tokenizer, id))
        return;
    struct dn_tok_str piece = dn_tokenizer_piece(d->tokenizer, id);
    if (piece.len == 0)
        return;
    size_t cut = d->strip_space && piece.data[0] == ' ' && !dn_tokenizer_is_added(d->tokenizer, id);
    d->strip_space = false;
    dn_detok_feed_bytes(d, piece.data + cut, piece.len - cut, out);
}

size_t dn_detok_finish(struct dn_detok *d)
{
    size_t n = d->n_held;
    d->n_held = 0;
    return n;
}
