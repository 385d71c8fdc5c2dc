/* The inside of the scheduler, shared by sched.c (messages, queue, admission), step.c (batch and results), stats.c
 * (metrics) and the fault-injection tests. Nobody else includes it. All of it belongs to the scheduler's thread, but
 * for the inbox, the snapshot cell and n_waiting.
 */
#ifndef DN_SCHED_SCHED_IMPL_H
#define DN_SCHED_SCHED_IMPL_H

#include "base/inbox.h"
#include "sched/batch.h"
#include "sched/sched.h"

#include <pthread.h>
#include <stdatomic.h>

struct dn_sched_stats; /* stats.c */

struct dn_sched {
    struct dn_sched_conf conf;
    struct dn_pool *pool;
    struct dn_sink sink;
    struct dn_inbox inbox;
    pthread_t thread;
    bool has_thread;
    atomic_bool stop;
    atomic_uint n_waiting; /* submitted and not running; bounds the queue */

    struct dn_seq *waiting;  /* best first (dn_seq_before) */
    struct dn_seq **running; /* [max_sequences], index = slot; NULL = free */
    struct dn_seq **order;   /* [max_sequences] scratch of a step: the runnable ones, best first */
    uint32_t n_running;
    uint64_t next_order;
    bool room_changed; /* pages or slots were freed: the head of the queue may fit now */

    struct dn_batch batch;
    struct dn_event_batch **out; /* [n_loops] events since the last flush */
    uint64_t results_ns;         /* when the last step's results were there */
    uint32_t *audit_refs;        /* [pages] scratch of the audit */

    struct dn_snapshot now; /* counters live here; published after each turn */
    struct dn_snapshot_cell cell;
    struct dn_sched_stats *stats; /* NULL without metrics */
};

/* sched.c */
void dn_sched_emit(struct dn_sched *s, const struct dn_seq *q, struct dn_event e, const struct dn_sampled *detail);
void dn_sched_flush(struct dn_sched *s); /* publishes the snapshot and delivers the events that there are */
void dn_sched_end(struct dn_sched *s, struct dn_seq *q); /* gives pages and slot back, frees */
void dn_sched_fail(struct dn_sched *s, struct dn_seq *q, int code);
void dn_sched_preempt(struct dn_sched *s, struct dn_seq *q); /* back to the queue, to be computed again */
void dn_sched_admit(struct dn_sched *s, uint64_t now_ns);
/* Pages of each format that the running sequences may still take without asking again. */
void dn_sched_promised(const struct dn_sched *s, uint32_t want[DN_KV_FORMATS]);

/* step.c: one step over what runs. False if nothing could be computed. */
bool dn_sched_step(struct dn_sched *s);

/* stats.c; all take a NULL stats. */
struct dn_sched_stats *dn_sched_stats_open(struct dn_metrics *m, struct dn_sched *s);
void dn_sched_stats_close(struct dn_sched_stats *t);
void dn_sched_stats_queue(struct dn_sched_stats *t, uint64_t wait_ns);
void dn_sched_stats_first_token(struct dn_sched_stats *t, uint64_t ttft_ns);
void dn_sched_stats_gap(struct dn_sched_stats *t, uint64_t gap_ns);
void dn_sched_stats_done(struct dn_sched_stats *t, const char *reason, uint64_t e2e_ns);
void dn_sched_stats_violation(struct dn_sched_stats *t, const char *kind);

#endif
