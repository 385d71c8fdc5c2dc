/* What policies, metrics and readiness may know of a scheduler: numbers, published after every step, read by anyone.
 *
 * One writer (the scheduler's thread), any readers, no lock: a sequence lock over relaxed atomic words. A reader that
 * meets a write tries again; it never holds the writer up. Values are at most one step, or one idle second, old.
 */
#ifndef DN_SCHED_SNAPSHOT_H
#define DN_SCHED_SNAPSHOT_H

#include <stdatomic.h>
#include <stdint.h>

struct dn_snapshot { /* uint64_t only: copied word by word */
    uint64_t at_ns;
    uint64_t healthy; /* 1, or 0 after the device was lost */
    uint64_t waiting, oldest_wait_ns, running, paused;
    uint64_t kv_bytes_total, kv_bytes_held, kv_bytes_cached, kv_bytes_quarantined;
    uint64_t pages_total, pages_free, quarantined_pages; /* pages in units of bf16 pages; free counts evictable ones */
    uint64_t steps, prompt_tokens, cached_tokens, output_tokens, preemptions;
    uint64_t mixed_steps; /* those with sequences of more than one KV format */
    uint64_t prefix_query_tokens, prefix_hit_tokens, evictions;
    uint64_t integrity_checks, integrity_violations, integrity_refused;
    uint64_t step_ns; /* duration of the last step */
};

enum { DN_SNAPSHOT_WORDS = sizeof(struct dn_snapshot) / sizeof(uint64_t) };

struct dn_snapshot_cell {
    atomic_uint sequence; /* odd while it is being written */
    _Atomic uint64_t word[DN_SNAPSHOT_WORDS];
};

void dn_snapshot_publish(struct dn_snapshot_cell *c, const struct dn_snapshot *s); /* the writer */
void dn_snapshot_read(struct dn_snapshot_cell *c, struct dn_snapshot *out);        /* any thread */

#endif
