/* Small vocabularies made on the spot, so that a clean clone tests the tokenizers too. */
#ifndef TOK_SMALL_H
#define TOK_SMALL_H

#include "base/buf.h"
#include "base/utf8.h"
#include "engine/tokenizer.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

/* The printable stand-in of a byte in byte-level vocabularies. */
static inline size_t small_map_byte(unsigned b, char out[4])
{
    static uint16_t map[256];
    if (map[255] == 0) {
        uint16_t next = 256;
        for (unsigned i = 0; i < 256; i++)
            map[i] = (uint16_t)((i >= 33 && i <= 126) || (i >= 161 && i <= 172) || i >= 174 ? i : next++);
    }
    return dn_utf8_put(map[b], out);
}

static inline void small_put_mapped(struct dn_buf *b, const char *raw)
{
    char c[4];
    for (; *raw; raw++) {
        size_t n = small_map_byte((unsigned char)*raw, c);
        if (n == 1 && (c[0] == '"' || c[0] == '\\'))
            dn_buf_putc(b, '\\');
        dn_buf_put(b, c, n);
    }
}

/* tokenizer.json with ids 0-255 for the bytes and one more for each pair of `merge` (NULL ends: left, right, left,
 * right). The texts of the other members of the file are given as JSON. */
struct small {
    const char *const *merge;
    const char *pre_tokenizer, *normalizer, *added, *post_processor, *model; /* NULL: a plain default */
};

static inline struct dn_buf small_json(const struct small *s)
{
    struct dn_buf b = {0};
    dn_buf_printf(&b, "{\"added_tokens\":%s,\"normalizer\":%s,", s->added ? s->added : "[]",
                  s->normalizer ? s->normalizer : "null");
    dn_buf_printf(&b, "\"pre_tokenizer\":%s,",
                  s->pre_tokenizer ? s->pre_tokenizer
                                   : "{\"type\":\"ByteLevel\",\"add_prefix_space\":false,\"use_regex\":true}");
    dn_buf_printf(&b, "\"post_processor\":%s,\"decoder\":{\"type\":\"ByteLevel\"},",
                  s->post_processor ? s->post_processor : "null");
    dn_buf_printf(&b, "\"model\":{\"type\":\"BPE\",%s\"vocab\":{", s->model ? s->model : "");
    char c[4];
    for (unsigned i = 0; i < 256; i++) {
        size_t n = small_map_byte(i, c);
        dn_buf_printf(&b, "%s\"%s%.*s\":%u", i ? "," : "", n == 1 && (c[0] == '"' || c[0] == '\\') ? "\\" : "", (int)n,
                      c, i);
    }
    unsigned id = 256;
    for (const char *const *m = s->merge; m && *m; m += 2) {
        dn_buf_puts(&b, ",\"");
        small_put_mapped(&b, m[0]);
        small_put_mapped(&b, m[1]);
        dn_buf_printf(&b, "\":%u", id++);
    }
    dn_buf_puts(&b, "},\"merges\":[");
    for (const char *const *m = s->merge; m && *m; m += 2) {
        dn_buf_puts(&b, m == s->merge ? "[\"" : ",[\"");
        small_put_mapped(&b, m[0]);
        dn_buf_puts(&b, "\",\"");
        small_put_mapped(&b, m[1]);
        dn_buf_puts(&b, "\"]");
    }
    dn_buf_puts(&b, "]}}");
    return b;
}

static inline struct dn_tokenizer *small_open(const struct small *s)
{
    struct dn_buf b = small_json(s);
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    cr_assert_eq(dn_tokenizer_parse_json(&t, b.data, b.len, NULL, 0, &err), 0, "%s", err.text);
    dn_buf_release(&b);
    return t;
}

/* tiktoken lines: the 256 bytes, then `more` (NULL ends), ranks in this order. */
static inline struct dn_buf small_tiktoken(const char *const *more)
{
    static const char digit[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    struct dn_buf b = {0};
    for (unsigned rank = 0; rank < 256 || (more && more[rank - 256]); rank++) {
        char one = (char)rank;
        const char *text = rank < 256 ? &one : more[rank - 256];
        size_t n = rank < 256 ? 1 : strlen(text);
        for (size_t i = 0; i < n; i += 3) {
            uint32_t bits = (uint32_t)(unsigned char)text[i] << 16;
            if (i + 1 < n)
                bits |= (uint32_t)(unsigned char)text[i + 1] << 8;
            if (i + 2 < n)
                bits |= (unsigned char)text[i + 2];
            dn_buf_putc(&b, digit[bits >> 18]);
            dn_buf_putc(&b, digit[bits >> 12 & 63]);
            dn_buf_putc(&b, i + 1 < n ? digit[bits >> 6 & 63] : '=');
            dn_buf_putc(&b, i + 2 < n ? digit[bits & 63] : '=');
        }
        dn_buf_printf(&b, " %u\n", rank);
    }
    return b;
}

/* "12 300 7" of the ids of a text; valid until the next call. */
static inline const char *small_ids(const struct dn_tokenizer *t, const char *text, unsigned flags)
{
    static struct dn_buf b;
    struct dn_tokens ids = {0};
    struct dn_err err = {0};
    cr_assert_eq(dn_tokenizer_encode(t, text, strlen(text), flags, &ids, &err), 0, "%s", err.text);
    dn_buf_clear(&b);
    for (size_t i = 0; i < ids.len; i++)
        dn_buf_printf(&b, i ? " %d" : "%d", ids.data[i]);
    dn_tokens_release(&ids);
    return dn_buf_str(&b);
}

/* The pieces of a text with a bar between them, for tests of splitting: needs a vocabulary in which each piece is a
 * token, or shows single bytes. */
static inline const char *small_pieces(const struct dn_tokenizer *t, const char *text, unsigned flags)
{
    static struct dn_buf b;
    struct dn_tokens ids = {0};
    struct dn_err err = {0};
    cr_assert_eq(dn_tokenizer_encode(t, text, strlen(text), flags, &ids, &err), 0, "%s", err.text);
    dn_buf_clear(&b);
    for (size_t i = 0; i < ids.len; i++) {
        struct dn_tok_str piece = dn_tokenizer_piece(t, ids.data[i]);
        if (i)
            dn_buf_putc(&b, '|');
        dn_buf_put(&b, piece.data, piece.len);
    }
    dn_tokens_release(&ids);
    return dn_buf_str(&b);
}

#endif
