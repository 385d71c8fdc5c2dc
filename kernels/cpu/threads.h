/* The threads of a CPU device: run one function on all of them and return when every part is done.
 *
 * A step of a small model has some 300 such calls of 10 to 1000 µs each, so that starting and joining must cost about
 * a microsecond: between calls the threads spin for a short while (SPIN_NS in threads.c), then block on a futex, so
 * that an idle server uses no CPU. The calling thread takes part, and a thread that gets no core in time is not waited
 * for.
 *
 * The opener owns the struct. Only one thread may call dn_threads_run() or dn_threads_for() at a time, and not from
 * inside a part. What the caller wrote before is visible to the parts, and what they wrote to the caller afterwards.
 */
#ifndef DN_KERNELS_CPU_THREADS_H
#define DN_KERNELS_CPU_THREADS_H

#include "base/err.h"

#include <stddef.h>

enum { DN_THREADS_MAX = 1024 };

struct dn_threads;

/* Starts n - 1 threads named `name` (at most 15 characters; NULL: "dn-cpu"); n = 0: one a core that this process may
 * use. -DN_INVALID_VALUE for n > DN_THREADS_MAX, -DN_IO when the system gives no thread. */
int dn_threads_open(unsigned n, const char *name, struct dn_threads **out, struct dn_err *err);
void dn_threads_close(struct dn_threads *t);           /* NULL is fine; must not be running */
unsigned dn_threads_count(const struct dn_threads *t); /* the caller's included, >= 1 */

/* fn(arg, part, n_parts) for every part in 0..n_parts-1, n_parts = dn_threads_count(). Parts run on threads as these
 * become free, so that one thread may run several, one after the other: a part must not wait for another. */
typedef void dn_part_fn(void *arg, unsigned part, unsigned n_parts);
void dn_threads_run(struct dn_threads *t, dn_part_fn *fn, void *arg);

/* fn(arg, begin, end, part) over [0, n_items) in pieces of `chunk` items (the last may be shorter), handed out as
 * threads become free; `part` is the thread, for scratch memory. Which thread gets which piece must not change the
 * result. Runs on the caller alone, in one call for all of it, when there is one piece or one thread. */
typedef void dn_range_fn(void *arg, size_t begin, size_t end, unsigned part);
void dn_threads_for(struct dn_threads *t, size_t n_items, size_t chunk, dn_range_fn *fn, void *arg);

#endif
