#include "api/worker.h"

#include <criterion/criterion.h>
#include <semaphore.h>
#include <stdatomic.h>
#include <time.h>

/* Jobs need a loop to come back to. */
static struct dn_loop *the_loop;
static atomic_int n_started, n_back;
static sem_t begun, go_on;

static void *on_loop_start(struct dn_loop *loop, unsigned idx, void *user)
{
    the_loop = loop;
    atomic_store(&n_started, 1);
    return user;
}

static void on_request(struct dn_loop *loop, struct dn_http_req *req, void *user) {}

static void on_gone(struct dn_loop *loop, struct dn_http_req *req, void *user) {}

static const struct dn_http_handler handler = {
    .on_loop_start = on_loop_start, .on_request = on_request, .on_gone = on_gone};

static void wait_for(atomic_int *counter, int value)
{
    for (int i = 0; i < 5000 && atomic_load(counter) != value; i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    cr_assert_eq(atomic_load(counter), value);
}

static void work(struct dn_job *job, struct dn_template_vm *vm)
{
    sem_post(&begun);
    sem_wait(&go_on);
}

static void back(struct dn_loop *loop, struct dn_loop_msg *msg, void *user)
{
    atomic_fetch_add(&n_back, 1);
}

static void drop(struct dn_job *job) {}

Test(worker, is_full_while_so_many_jobs_wait)
{
    enum { N = 4, MAX = 3 };
    struct dn_err err = {0};
    struct dn_http *http;
    struct dn_workers *w;
    struct dn_http_conf conf = {.listen_cleartext = "127.0.0.1:0", .n_loops = 1};
    struct dn_job job[N + 1] = {0};
    sem_init(&begun, 0, 0);
    sem_init(&go_on, 0, 0);
    cr_assert_eq(dn_http_open(&conf, &handler, NULL, &http, &err), 0, "%s", err.text);
    cr_assert_eq(dn_http_run(http, &err), 0, "%s", err.text);
    wait_for(&n_started, 1);
    cr_assert_eq(dn_workers_open(1, MAX, &w, &err), 0, "%s", err.text);
    for (int i = 0; i <= N; i++) {
        job[i] = (struct dn_job){.loop = the_loop, .work = work, .drop = drop, .back = {.fn = back}};
        cr_assert_eq(dn_workers_are_full(w), i > MAX);
        cr_assert(dn_workers_submit(w, &job[i])); /* what has been taken in goes on, full or not */
        if (i == 0)
            sem_wait(&begun); /* this one does not wait any more */
    }
    for (int i = 0; i <= N; i++)
        sem_post(&go_on);
    wait_for(&n_back, N + 1);
    cr_assert(!dn_workers_are_full(w));
    dn_workers_close(w);
    dn_http_close(http);
}
