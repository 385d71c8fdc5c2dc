/* How much of the host's memory this process may still take: the machine's, or what a container's limit leaves of it.
 *
 * For: whoever asks before taking gigabytes (weights.c, `dunlin show`, `dunlin doctor`). Systems promise memory that
 * they do not have and end the process when it is used, so that malloc() says nothing about it. Reads files of /proc
 * and /sys/fs/cgroup (version 2, and version 1's memory controller). No state; any thread.
 */
#ifndef DN_BASE_MEMORY_H
#define DN_BASE_MEMORY_H

#include <stdbool.h>
#include <stdint.h>

struct dn_memory {
    uint64_t total_bytes; /* 0: the system does not say */
    uint64_t free_bytes;  /* without pushing others out to swap; caches count as free */
    uint64_t swap_bytes;  /* free swap space that may be used besides */
    bool is_limited;      /* a control group's limit is less than the machine has, and total is that limit */
};

void dn_memory_read(struct dn_memory *out);
/* The same of a system whose files lie below a folder: "" is the one that runs. */
void dn_memory_read_at(const char *root, struct dn_memory *out);

#endif
