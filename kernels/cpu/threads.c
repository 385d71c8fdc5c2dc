#include "kernels/cpu/threads.h"
#include "base/buf.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* How long a thread spins before it blocks. Longer than the pause between two operations and between two steps
 * (sampling, batch building), far shorter than the pause between two requests. */
enum { SPIN_NS = 100 * 1000, SPINS_PER_LOOK = 32, CACHE_LINE = 64 };

struct worker {
    struct dn_threads *t;
    pthread_t thread;
    unsigned part;
};

struct dn_threads {
    unsigned n;
    bool running;          /* caller only: catches nested calls */
    struct worker *worker; /* [n - 1] */
    dn_part_fn *fn;
    void *arg;
    bool stop;
    /* Changes once a run; workers wait for it to differ from what they saw last. */
    _Alignas(CACHE_LINE) _Atomic uint32_t epoch;
    _Atomic uint32_t sleepers;
    /* Workers that have not finished the current run. */
    _Alignas(CACHE_LINE) _Atomic uint32_t pending;
    _Atomic uint32_t caller_sleeps;
    _Alignas(CACHE_LINE) _Atomic size_t ticket; /* dn_threads_for */
};

static void cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static uint64_t now_ns(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

static void futex_wait(_Atomic uint32_t *word, uint32_t expected)
{
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, expected, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word, int n)
{
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, n, NULL, NULL, 0);
}

/* Spins until *word is (or, if `equal` is false, is no longer) `value`; false when SPIN_NS have passed first. */
static bool spin(_Atomic uint32_t *word, uint32_t value, bool equal)
{
    uint64_t end = 0;
    for (;;) {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if ((atomic_load_explicit(word, memory_order_acquire) == value) == equal)
                return true;
            cpu_relax();
        }
        uint64_t now = now_ns();
        if (!end)
            end = now + SPIN_NS;
        else if (now > end)
            return false;
    }
}

static void wait_for_epoch(struct dn_threads *t, uint32_t seen)
{
    if (spin(&t->epoch, seen, false))
        return;
    /* Sequentially consistent with the caller's "epoch, then sleepers": either it sees us asleep or we see its epoch.
     */
    atomic_fetch_add(&t->sleepers, 1);
    while (atomic_load(&t->epoch) == seen)
        futex_wait(&t->epoch, seen);
    atomic_fetch_sub(&t->sleepers, 1);
}

static void *work(void *arg)
{
    struct worker *w = arg;
    struct dn_threads *t = w->t;
    for (uint32_t seen = 0;; seen++) {
        wait_for_epoch(t, seen);
        if (t->stop)
            return NULL;
        t->fn(t->arg, w->part, t->n);
        /* Pairs with the caller's acquire load of 0: the part's writes are visible to it. */
        if (atomic_fetch_sub(&t->pending, 1) == 1 && atomic_load(&t->caller_sleeps))
            futex_wake(&t->pending, 1);
    }
}

static void start_run(struct dn_threads *t)
{
    atomic_store_explicit(&t->pending, t->n - 1, memory_order_relaxed);
    atomic_fetch_add(&t->epoch, 1); /* publishes fn, arg, pending */
    if (atomic_load(&t->sleepers))
        futex_wake(&t->epoch, DN_THREADS_MAX);
}

static void finish_run(struct dn_threads *t)
{
    if (spin(&t->pending, 0, true))
        return;
    atomic_store(&t->caller_sleeps, 1);
    for (uint32_t left; (left = atomic_load(&t->pending)) != 0;)
        futex_wait(&t->pending, left);
    atomic_store(&t->caller_sleeps, 0);
}

void dn_threads_run(struct dn_threads *t, dn_part_fn *fn, void *arg)
{
    DN_BUG_ON(t->running);
    if (t->n == 1) {
        t->running = true;
        fn(arg, 0, 1);
        t->running = false;
        return;
    }
    t->running = true;
    t->fn = fn;
    t->arg = arg;
    start_run(t);
    fn(arg, 0, t->n);
    finish_run(t);
    t->running = false;
}

struct range {
    struct dn_threads *t;
    dn_range_fn *fn;
    void *arg;
    size_t n_items, chunk;
};

static void run_range(void *arg, unsigned part, unsigned n_parts)
{
    struct range *r = arg;
    for (;;) {
        size_t piece = atomic_fetch_add_explicit(&r->t->ticket, 1, memory_order_relaxed);
        if (piece > (r->n_items - 1) / r->chunk)
            return;
        size_t begin = piece * r->chunk, left = r->n_items - begin;
        r->fn(r->arg, begin, begin + (left < r->chunk ? left : r->chunk), part);
    }
}

void dn_threads_for(struct dn_threads *t, size_t n_items, size_t chunk, dn_range_fn *fn, void *arg)
{
    DN_BUG_ON(chunk == 0);
    if (n_items == 0)
        return;
    if (t->n == 1 || n_items <= chunk) {
        DN_BUG_ON(t->running);
        t->running = true;
        fn(arg, 0, n_items, 0);
        t->running = false;
        return;
    }
    struct range r = {t, fn, arg, n_items, chunk};
    atomic_store_explicit(&t->ticket, 0, memory_order_relaxed);
    dn_threads_run(t, run_range, &r);
}

unsigned dn_threads_count(const struct dn_threads *t)
{
    return t->n;
}

static unsigned usable_cores(void)
{
    cpu_set_t set;
    if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
        return (unsigned)CPU_COUNT(&set);
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (unsigned)n : 1;
}

/* Ends the first n_started workers and frees all. */
static void stop_workers(struct dn_threads *t, unsigned n_started)
{
    if (n_started) {
        t->stop = true;
        start_run(t);
        for (unsigned i = 0; i < n_started; i++)
            pthread_join(t->worker[i].thread, NULL);
    }
    free(t->worker);
    free(t);
}

int dn_threads_open(unsigned n, const char *name, struct dn_threads **out, struct dn_err *err)
{
    if (n == 0) {
        n = usable_cores();
        n = n > DN_THREADS_MAX ? DN_THREADS_MAX : n;
    }
    if (n > DN_THREADS_MAX)
        return dn_err_set(err, DN_INVALID_VALUE, "%u threads, expected at most %d", n, DN_THREADS_MAX);
    struct dn_threads *t = aligned_alloc(CACHE_LINE, sizeof *t);
    if (!t)
        return dn_err_set(err, DN_NO_MEMORY, "no memory for %u threads", n);
    memset(t, 0, sizeof *t);
    t->n = n;
    t->worker = dn_alloc0(n, sizeof *t->worker);
    for (unsigned i = 0; i + 1 < n; i++) {
        struct worker *w = &t->worker[i];
        *w = (struct worker){.t = t, .part = i + 1};
        int rc = pthread_create(&w->thread, NULL, work, w);
        if (rc) {
            stop_workers(t, i);
            return dn_err_set(err, DN_IO, "thread %u of %u: %s", i + 1, n - 1, strerror(rc));
        }
        pthread_setname_np(w->thread, name ? name : "dn-cpu");
    }
    *out = t;
    return 0;
}

void dn_threads_close(struct dn_threads *t)
{
    if (!t)
        return;
    DN_BUG_ON(t->running);
    stop_workers(t, t->n - 1);
}
