/* Progress of long work, on stderr: on a terminal one line that is rewritten at most ten times a second, elsewhere one
 * line each 10 % or 10 s. One thread.
 */
#ifndef DN_CLI_PROGRESS_H
#define DN_CLI_PROGRESS_H

#include <stdbool.h>
#include <stdint.h>

struct dn_progress {
    const char *stage; /* "weights int4" */
    bool is_terminal, quiet;
    uint64_t start_ns, last_ns, last_tenth;
};

void dn_progress_begin(struct dn_progress *p, const char *stage, bool quiet);
void dn_progress_update(struct dn_progress *p, uint64_t done_bytes, uint64_t total_bytes);
void dn_progress_end(struct dn_progress *p);

/* "15.3 GiB", "144 KiB" into a buffer of 16. */
const char *dn_bytes_text(uint64_t bytes, char text[16]);

#endif
