/* The scheduler of one pool: continuous batching with chunked prefill.
 *
 * For: admitting requests by tokens so that no admitted request runs out of memory, building a batch for each step
 * (every decoding sequence first, then prefill in chunks), running it on the pool, turning results into events,
 * cancelling, pausing, preempting by recomputation when the unexpected happens, and ending exactly the request whose
 * pages fail their check.
 *
 * Threads: open and close from the node's main thread; one thread of its own runs everything; submit, cancel, pause,
 * snapshot, capacity from any thread. The pool is borrowed and belongs to that thread between start and close.
 */
#ifndef DN_SCHED_SCHED_H
#define DN_SCHED_SCHED_H

#include "base/metrics.h"
#include "pool/pool.h"
#include "sched/request.h"
#include "sched/snapshot.h"

struct dn_sched_conf {
    uint32_t queue_max;           /* waiting requests; 0 = 256 */
    uint32_t reserve_tokens;      /* room promised for output beyond what is there; at most max_tokens; 0 = 512 */
    uint32_t decode_chunk_tokens; /* prefill tokens of a step in which others decode; 0 = a quarter of step_tokens */
};

struct dn_sched;

/* `metrics` may be NULL (tests, benchmarks). Does not start the thread. */
int dn_sched_open(const struct dn_sched_conf *conf, struct dn_pool *pool, const struct dn_sink *sink,
                  struct dn_metrics *metrics, struct dn_sched **out, struct dn_err *err);
int dn_sched_start(struct dn_sched *s, struct dn_err *err);
/* Ends the thread; requests that are left get DN_EVENT_ERROR DN_DRAINING. Calls from other threads stay allowed until
 * close. */
void dn_sched_stop(struct dn_sched *s);
void dn_sched_close(struct dn_sched *s); /* stops if need be, frees */

/* Takes the request over on success. -DN_OVERLOADED when the queue is full (the request stays the caller's). */
int dn_sched_submit(struct dn_sched *s, struct dn_request *r, struct dn_err *err);
/* The client is gone: ends within a step, its pages are free then. No event follows. */
void dn_sched_cancel(struct dn_sched *s, struct dn_request_id id);
/* The same, because the answer is complete: its text has reached a stop string. */
void dn_sched_stopped(struct dn_sched *s, struct dn_request_id id);
/* The client reads too slowly: its sequence sits out until resumed. */
void dn_sched_pause(struct dn_sched *s, struct dn_request_id id, bool paused);

void dn_sched_snapshot(struct dn_sched *s, struct dn_snapshot *out);
uint32_t dn_sched_waiting(struct dn_sched *s); /* requests submitted and not yet running */

/* One turn without the thread: handles messages, runs at most one step (where steps are split: of each kind), delivers
 * events; those of an asynchronous device's last step in the next turn. False when there was nothing to do. Tests and
 * benchmarks drive the scheduler with it on their own thread. */
bool dn_sched_turn(struct dn_sched *s);

#endif
