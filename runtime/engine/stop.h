/* Stop strings: watches the text of one sequence and cuts it exactly before the first stop string that completes.
 *
 * Text that may yet turn out to be the beginning of a stop string is held back, and nothing more: after each call the
 * held text is the longest end of what was fed that is a proper beginning of some stop string. Where the text was cut
 * into feeds makes no difference to what comes out. If several stop strings complete with the same byte, the longest
 * one counts. Each byte costs at most a step per stop string (Knuth-Morris-Pratt), whatever the text.
 *
 * open allocates and copies the strings; close frees. One thread at a time.
 */
#ifndef DN_ENGINE_STOP_H
#define DN_ENGINE_STOP_H

#include "base/buf.h"
#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>

#define DN_STOP_MAX_STRINGS 16
#define DN_STOP_MAX_BYTES   1024 /* of one string */

struct dn_stop;

/* Errors: DN_INVALID_VALUE (param "stop") for an empty string, too many, or one that is too long. n may be 0. */
int dn_stop_open(struct dn_stop **out, const char *const *string, const size_t *len, size_t n, struct dn_err *err);
void dn_stop_close(struct dn_stop *s);

/* Appends to out what of the text is certain not to belong to a stop string. Returns true once a stop string is
 * complete; then and from then on all further text is ignored. */
bool dn_stop_feed(struct dn_stop *s, const char *text, size_t n, struct dn_buf *out);

/* The text ends without a stop string: appends what was held back. */
void dn_stop_finish(struct dn_stop *s, struct dn_buf *out);

/* Index of the stop string that was found, or -1. */
int dn_stop_found(const struct dn_stop *s);

#endif
