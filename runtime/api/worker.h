/* Workers: threads for what takes too long on an event loop and needs no device: large JSON, chat templates,
 * tokenizing.
 *
 * A loop hands a job over and gets it back through its own message queue; a job and all that it points to belong to the
 * worker in between. Each worker has a template VM of its own. Owned by the node.
 */
#ifndef DN_API_WORKER_H
#define DN_API_WORKER_H

#include "base/inbox.h"
#include "engine/template.h"
#include "http/http.h"

struct dn_workers;

struct dn_job {
    struct dn_inbox_node node; /* first */
    struct dn_loop_msg back;   /* runs on the loop when the work is done; set fn before submitting */
    struct dn_loop *loop;
    void (*work)(struct dn_job *job, struct dn_template_vm *vm); /* on the worker's thread */
    void (*drop)(
        struct dn_job *job); /* there, too: frees it, when its loop has ended meanwhile and takes nothing back */
};

/* n_waiting_max: see dn_workers_are_full(). */
int dn_workers_open(unsigned n_threads, size_t n_waiting_max, struct dn_workers **out, struct dn_err *err);
void dn_workers_stop(struct dn_workers *w);                       /* joins the threads; jobs that wait are still done */
void dn_workers_close(struct dn_workers *w);                      /* stops if need be, frees */
bool dn_workers_submit(struct dn_workers *w, struct dn_job *job); /* any thread; false once stopped */

/* Whether n_waiting_max jobs wait: then new requests are refused, each of which holds its body. Jobs of requests that
 * have been taken in are still accepted. Any thread. */
bool dn_workers_are_full(struct dn_workers *w);

#endif
