/* UTF-8 as Unicode 15 table 3-7 defines it: no overlong forms, no surrogates, nothing above U+10FFFF.
 *
 * Who needs it: JSON writing (invalid bytes become U+FFFD), detokenizing (a character is held back until it is whole),
 * tokenizers. Pure functions over borrowed bytes; any thread.
 */
#ifndef DN_BASE_UTF8_H
#define DN_BASE_UTF8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DN_UTF8_REPLACEMENT 0xFFFDu

/* Reads one code point from s[0..n) into *cp and returns how many bytes it took (1..4); 0 if n is 0. Where the bytes
 * are not valid, *cp is U+FFFD and the maximal prefix of a valid sequence is taken (1..3 bytes), as Unicode recommends,
 * so that every decoder shows the same number of replacement characters. */
size_t dn_utf8_next(const char *s, size_t n, uint32_t *cp);

/* As dn_utf8_next, and tells an invalid sequence from a real U+FFFD in the text. */
size_t dn_utf8_next_valid(const char *s, size_t n, uint32_t *cp, bool *valid);

bool dn_utf8_is_valid(const char *s, size_t n);

/* How many bytes at the end of s[0..n) (0..3) begin a character that further bytes could still complete. */
size_t dn_utf8_tail(const char *s, size_t n);

/* Writes cp as 1..4 bytes and returns their number; a surrogate or a number above U+10FFFF is written as U+FFFD. */
size_t dn_utf8_put(uint32_t cp, char out[4]);

#endif
