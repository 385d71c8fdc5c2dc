#include "api/worker.h"

#include "base/buf.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

struct worker {
    struct dn_workers *pool;
    pthread_t thread;
    struct dn_template_vm *vm;
};

/* One inbox for all: the worker that is free takes the oldest job. dn_inbox has one owner, so a lock makes the owner.
 */
struct dn_workers {
    struct dn_inbox inbox;
    pthread_mutex_t lock;
    struct dn_inbox_node *next; /* taken from the inbox, not yet begun */
    atomic_size_t n_waiting;    /* in the inbox and behind next */
    size_t n_waiting_max;
    unsigned n;
    struct worker worker[];
};

static struct dn_job *take(struct dn_workers *w)
{
    pthread_mutex_lock(&w->lock);
    while (!w->next && !dn_inbox_is_closed(&w->inbox))
        w->next = dn_inbox_wait(&w->inbox, UINT64_MAX);
    if (!w->next)
        w->next = dn_inbox_take(&w->inbox);
    struct dn_inbox_node *node = w->next;
    if (node) {
        w->next = node->next;
        atomic_fetch_sub_explicit(&w->n_waiting, 1, memory_order_relaxed); /* a count that orders nothing */
    }
    pthread_mutex_unlock(&w->lock);
    return (struct dn_job *)node;
}

static void *worker_main(void *arg)
{
    struct worker *self = arg;
    for (struct dn_job *job; (job = take(self->pool)) != NULL;) {
        job->work(job, self->vm);
        if (!dn_loop_post(job->loop, &job->back))
            job->drop(job);
    }
    return NULL;
}

int dn_workers_open(unsigned n_threads, size_t n_waiting_max, struct dn_workers **out, struct dn_err *err)
{
    struct dn_workers *w = dn_alloc0(1, sizeof *w + n_threads * sizeof w->worker[0]);
    w->n_waiting_max = n_waiting_max;
    dn_inbox_init(&w->inbox);
    pthread_mutex_init(&w->lock, NULL);
    for (; w->n < n_threads; w->n++) {
        struct worker *self = &w->worker[w->n];
        self->pool = w;
        int rc = dn_template_vm_open(&self->vm, err);
        if (rc == 0 && (rc = pthread_create(&self->thread, NULL, worker_main, self)) != 0) {
            dn_template_vm_close(self->vm);
            rc = dn_err_set(err, DN_IO, "worker thread: %s", strerror(rc));
        }
        if (rc != 0) {
            dn_workers_close(w);
            return rc;
        }
    }
    *out = w;
    return 0;
}

void dn_workers_stop(struct dn_workers *w)
{
    dn_inbox_close(&w->inbox);
    for (; w->n > 0; w->n--) {
        pthread_join(w->worker[w->n - 1].thread, NULL);
        dn_template_vm_close(w->worker[w->n - 1].vm);
    }
}

void dn_workers_close(struct dn_workers *w)
{
    if (!w)
        return;
    dn_workers_stop(w);
    dn_inbox_release(&w->inbox);
    pthread_mutex_destroy(&w->lock);
    free(w);
}

bool dn_workers_submit(struct dn_workers *w, struct dn_job *job)
{
    atomic_fetch_add_explicit(&w->n_waiting, 1, memory_order_relaxed);
    if (dn_inbox_push(&w->inbox, &job->node))
        return true;
    atomic_fetch_sub_explicit(&w->n_waiting, 1, memory_order_relaxed);
    return false;
}

bool dn_workers_are_full(struct dn_workers *w)
{
    return atomic_load_explicit(&w->n_waiting, memory_order_relaxed) >= w->n_waiting_max;
}
