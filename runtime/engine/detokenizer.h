/* Detokenizer: the ids of one sequence, one after the other, to text that is always whole UTF-8 characters.
 *
 * A token may end inside a character. Its incomplete tail (at most 3 bytes) is held back until the next token completes
 * it; bytes that can't become a character give one U+FFFD per maximal subpart at once, so nothing waits for ever. At
 * the end an incomplete tail is dropped: a character that max_tokens cut in two is not shown as U+FFFD, and a stream
 * says the same as a whole answer, since both are the output of this one function.
 *
 * The caller owns the struct, which is a value without memory of its own; the tokenizer is borrowed and must outlive
 * it. One thread at a time.
 */
#ifndef DN_ENGINE_DETOKENIZER_H
#define DN_ENGINE_DETOKENIZER_H

#include "base/buf.h"
#include "engine/tokenizer.h"

#include <stdbool.h>
#include <stdint.h>

enum dn_detok_flags {
    DN_DETOK_SKIP_SPECIAL = 1, /* special tokens give no text */
    DN_DETOK_TEXT_START = 2,   /* the text begins here: Llama 2's space in front is left out; not for an answer that
                                  continues a prompt */
};

struct dn_detok {
    const struct dn_tokenizer *tokenizer;
    unsigned flags;
    bool strip_space; /* the next normal piece loses its first space */
    uint8_t n_held;
    char held[3];
};

void dn_detok_init(struct dn_detok *d, const struct dn_tokenizer *tokenizer, unsigned flags);

/* Appends the text that is certain after this id. An id without a token gives nothing. */
void dn_detok_feed(struct dn_detok *d, int32_t id, struct dn_buf *out);

/* The same for bytes that are not a token. */
void dn_detok_feed_bytes(struct dn_detok *d, const char *data, size_t n, struct dn_buf *out);

/* The end of the sequence: the incomplete character is dropped; returns how many bytes that were (0..3). */
size_t dn_detok_finish(struct dn_detok *d);

#endif
