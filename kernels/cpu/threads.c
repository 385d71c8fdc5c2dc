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
 * (sampling, batch building), far shorter than the pause between two requests. After the first few microseconds it
 * yields between looks, since what it waits for may need this very core. */
enum { SPIN_NS = 100 * 1000, YIELD_NS = 5 * 1000, SPINS_PER_LOOK = 32, CACHE_LINE = 64 };

/* The gate of a run: number of the run, whether it is closed, workers inside. A worker joins an open run by adding
 * itself, and the caller closes the run when nothing is left to take, so that it waits for those inside alone: a worker
 * whose core is busy with something else costs its share of the work, not the time until it wakes. Numbers may wrap: a
 * worker that takes a new run for an old one does not join, no more. */
enum { GATE_COUNT = 0xffff, GATE_CLOSED = 0x10000, GATE_RUN = 0x20000 };

struct worker {
    struct dn_threads *t;
    pthread_t thread;
    unsigned part;
};

struct dn_threads {
    unsigned n;
    bool running;          /* caller only: catches nested calls */
    struct worker *worker; /* [n - 1] */
    /* The run. Written by the caller while nobody is inside. */
    dn_range_fn *fn;
    void *arg;
    size_t n_items, chunk;
    _Atomic bool stop;
    _Alignas(CACHE_LINE) _Atomic uint32_t gate;
    _Atomic uint32_t sleepers;      /* workers that wait for the gate to change */
    _Atomic uint32_t caller_sleeps; /* 1: the last worker to leave must wake the caller */
    _Alignas(CACHE_LINE) _Atomic size_t ticket;
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

/* Spins while (*word & mask) == value; false when SPIN_NS have passed first. */
static bool spin(_Atomic uint32_t *word, uint32_t mask, uint32_t value)
{
    uint64_t start = 0, now = 0;
    for (;;) {
        for (int i = 0; i < SPINS_PER_LOOK; i++) {
            if ((atomic_load_explicit(word, memory_order_acquire) & mask) != value)
                return true;
            cpu_relax();
        }
        now = now_ns();
        start = start ? start : now;
        if (now - start > SPIN_NS)
            return false;
        if (now - start > YIELD_NS)
            sched_yield();
    }
}

/* Takes pieces until none is left. */
static void take_pieces(struct dn_threads *t, unsigned part)
{
    size_t last = (t->n_items - 1) / t->chunk;
    for (;;) {
        size_t piece = atomic_fetch_add_explicit(&t->ticket, 1, memory_order_relaxed);
        if (piece > last)
            return;
        size_t begin = piece * t->chunk, left = t->n_items - begin;
        t->fn(t->arg, begin, begin + (left < t->chunk ? left : t->chunk), part);
    }
}

static void leave(struct dn_threads *t)
{
    /* Releases what this worker wrote to the caller's load of a count of 0. */
    uint32_t g = atomic_fetch_sub(&t->gate, 1) - 1;
    if ((g & GATE_CLOSED) && !(g & GATE_COUNT) && atomic_exchange(&t->caller_sleeps, 0))
        futex_wake(&t->caller_sleeps, 1);
}

static void wait_for_change(struct dn_threads *t, uint32_t g)
{
    if (spin(&t->gate, UINT32_MAX, g))
        return;
    /* Sequentially consistent with the caller's "gate, then sleepers": either it sees us asleep or we see its gate. */
    atomic_fetch_add(&t->sleepers, 1);
    /* The gate's last change may be the stop, and g its value after it: whoever sees that gate sees the stop as well.
     */
    if (atomic_load(&t->gate) == g && !atomic_load(&t->stop))
        futex_wait(&t->gate, g);
    atomic_fetch_sub(&t->sleepers, 1);
}

static void *work(void *arg)
{
    struct worker *w = arg;
    struct dn_threads *t = w->t;
    const uint32_t run_mask = ~(uint32_t)(GATE_COUNT | GATE_CLOSED);
    uint32_t seen = 0;
    while (!atomic_load_explicit(&t->stop, memory_order_acquire)) {
        uint32_t g = atomic_load_explicit(&t->gate, memory_order_acquire);
        if ((g & GATE_CLOSED) || (g & run_mask) == seen) {
            wait_for_change(t, g);
        } else if (atomic_compare_exchange_weak(&t->gate, &g, g + 1)) { /* acquires fn, arg and the rest */
            seen = g & run_mask;
            take_pieces(t, w->part);
            leave(t);
        }
    }
    return NULL;
}

/* Opens the next run; nobody is inside the last one. */
static void open_gate(struct dn_threads *t)
{
    uint32_t g = atomic_load_explicit(&t->gate, memory_order_relaxed) & ~(uint32_t)(GATE_COUNT | GATE_CLOSED);
    atomic_store(&t->gate, g + GATE_RUN); /* publishes the run */
    if (atomic_load(&t->sleepers))
        futex_wake(&t->gate, DN_THREADS_MAX);
}

static void close_gate(struct dn_threads *t)
{
    uint32_t g = atomic_fetch_or(&t->gate, GATE_CLOSED);
    while (g & GATE_COUNT) {
        if (!spin(&t->gate, UINT32_MAX, g | GATE_CLOSED)) {
            atomic_store(&t->caller_sleeps, 1);
            if (atomic_load(&t->gate) & GATE_COUNT)
                futex_wait(&t->caller_sleeps, 1);
            atomic_store(&t->caller_sleeps, 0);
        }
        g = atomic_load_explicit(&t->gate, memory_order_acquire);
    }
}

void dn_threads_for(struct dn_threads *t, size_t n_items, size_t chunk, dn_range_fn *fn, void *arg)
{
    DN_BUG_ON(chunk == 0 || t->running);
    if (n_items == 0)
        return;
    t->running = true;
    if (t->n == 1 || n_items <= chunk) {
        fn(arg, 0, n_items, 0);
    } else {
        t->fn = fn;
        t->arg = arg;
        t->n_items = n_items;
        t->chunk = chunk;
        atomic_store_explicit(&t->ticket, 0, memory_order_relaxed);
        open_gate(t);
        take_pieces(t, 0);
        close_gate(t);
    }
    t->running = false;
}

struct parts {
    dn_part_fn *fn;
    void *arg;
    unsigned n;
};

static void run_parts(void *arg, size_t begin, size_t end, unsigned thread)
{
    const struct parts *p = arg;
    for (size_t i = begin; i < end; i++)
        p->fn(p->arg, (unsigned)i, p->n);
}

void dn_threads_run(struct dn_threads *t, dn_part_fn *fn, void *arg)
{
    struct parts p = {fn, arg, t->n};
    dn_threads_for(t, t->n, 1, run_parts, &p);
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
        atomic_store(&t->stop, true);
        atomic_fetch_add(&t->gate, GATE_RUN); /* closed or not, it changes */
        futex_wake(&t->gate, DN_THREADS_MAX);
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
    t->gate = GATE_CLOSED;
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
