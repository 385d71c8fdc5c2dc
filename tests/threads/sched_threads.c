/* The scheduler's thread, a device that works on a thread of its own, and two event loops that submit, cancel, pause
 * and receive: what is done between the start of a step and its end touches nothing that the device reads, nobody gets
 * another's tokens, and whoever was told nothing else is told of the end. A plain program so that it can run under the
 * thread sanitizer.
 *
 * The device computes nothing: each page holds the ids of its tokens, and the next id is a hash of all that a sequence
 * finds through its page table. */
#include "base/buf.h"
#include "base/clock.h"
#include "engine/tiny.h"
#include "sched/sched.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { PAGE = 16, KV_PAGES = 30, LOOPS = 2, SLOTS = 8, MAX_LENGTH = 120, N_DONE = 800, N_FAULTS = 5 };

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                                            \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static uint32_t below(uint64_t *state, uint32_t n)
{
    *state = *state * 6364136223846793005ull + 1442695040888963407ull;
    return (uint32_t)(*state >> 33) % n;
}

static int32_t next_id(const int32_t *token, uint32_t n)
{
    uint32_t hash = 2166136261u;
    for (uint32_t i = 0; i < n; i++)
        hash = (hash ^ (uint32_t)token[i]) * 16777619u;
    return 20 + (int32_t)(hash >> 8) % 200;
}

/* ---- The device ---- */

static struct dn_pool *pool;
static struct dn_kernels table;
static int32_t (*page_ids)[PAGE]; /* [pages] */
static uint64_t device_random = 1;
static uint32_t n_faults;
static struct {
    pthread_mutex_t lock;
    pthread_cond_t changed;
    bool work, quit;
} job = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, false, false};
static atomic_bool busy;

static void check_table(const struct dn_step *s, uint32_t q)
{
    uint32_t n = ((uint32_t)s->kv_len[q] + PAGE - 1) / PAGE, at = (uint32_t)s->page_start[q];
    for (uint32_t i = at; i < at + n; i++)
        CHECK(s->page[i] < pool->runner->n_pages && pool->runner->tags[s->page[i]] == s->tag[i]);
    bool wrong = n_faults < N_FAULTS && below(&device_random, 1000) == 0; /* each costs a page for good */
    s->bad[q] = wrong ? 1 + (int32_t)below(&device_random, n) : 0;
    n_faults += wrong;
}

static void compute(void)
{
    const struct dn_step *s = table.step_arrays(pool->device);
    memcpy(pool->runner->tags + s->tag_first, s->tag_new, s->n_tags * sizeof *s->tag_new);
    for (uint32_t q = 0; q < s->n_seqs; q++)
        check_table(s, q);
    for (uint32_t t = 0; t < s->n_tokens; t++) {
        uint32_t q = (uint32_t)s->token_seq[t], at = (uint32_t)s->position[t];
        if (s->bad[q] == 0)
            page_ids[s->page[(uint32_t)s->page_start[q] + at / PAGE]][at % PAGE] = s->token_id[t];
    }
    usleep(below(&device_random, 50));
    for (uint32_t i = 0; i < s->n_rows; i++) {
        int32_t token[MAX_LENGTH], q = s->token_seq[s->row_token[i]];
        uint32_t n = (uint32_t)s->position[s->row_token[i]] + 1;
        CHECK(n <= MAX_LENGTH);
        for (uint32_t at = 0; at < n; at++)
            token[at] = page_ids[s->page[(uint32_t)s->page_start[q] + at / PAGE]][at % PAGE];
        s->result[i] = (struct dn_sampled){.id = s->bad[q] ? -1 : next_id(token, n)};
    }
}

static void *device_main(void *arg)
{
    (void)arg;
    pthread_mutex_lock(&job.lock);
    for (;;) {
        while (!job.work && !job.quit)
            pthread_cond_wait(&job.changed, &job.lock);
        if (!job.work)
            break;
        pthread_mutex_unlock(&job.lock);
        compute();
        atomic_store(&busy, false);
        pthread_mutex_lock(&job.lock);
        job.work = false;
        pthread_cond_broadcast(&job.changed);
    }
    pthread_mutex_unlock(&job.lock);
    return NULL;
}

static bool step_begin(struct dn_device *d, uint32_t list)
{
    (void)d, (void)list;
    atomic_store(&busy, true);
    pthread_mutex_lock(&job.lock);
    CHECK(!job.work);
    job.work = true;
    pthread_cond_broadcast(&job.changed);
    pthread_mutex_unlock(&job.lock);
    return false;
}

static void step_end(struct dn_device *d) {}

static int step_wait(struct dn_device *d, struct dn_err *err)
{
    (void)d, (void)err;
    pthread_mutex_lock(&job.lock);
    while (job.work)
        pthread_cond_wait(&job.changed, &job.lock);
    pthread_mutex_unlock(&job.lock);
    return 0;
}

/* ---- Event loops ---- */

struct call {
    int32_t token[MAX_LENGTH];
    uint32_t n, n_prompt, max_tokens;
    uint64_t generation;
    bool runs, paused, started;
};

struct loop {
    pthread_mutex_t lock;
    struct dn_event_batch *batch[4096]; /* not read yet */
    uint32_t n_batches;
    uint32_t idx;
    uint64_t random, generation;
    struct call call[SLOTS];
    uint32_t n_done, n_cancelled, n_paused, n_failed, n_drained;
    bool is_draining;
};

static struct loop loops[LOOPS];
static struct dn_sched *sched;
static atomic_uint n_done, n_while_busy;
static atomic_bool stopped;

static void deliver(void *user, uint32_t loop, struct dn_event_batch *b)
{
    (void)user;
    if (atomic_load(&busy))
        atomic_fetch_add(&n_while_busy, 1);
    struct loop *l = &loops[loop];
    pthread_mutex_lock(&l->lock);
    CHECK(l->n_batches < sizeof l->batch / sizeof *l->batch);
    l->batch[l->n_batches++] = b;
    pthread_mutex_unlock(&l->lock);
}

static void receive_event(struct loop *l, const struct dn_event *e)
{
    struct call *c = &l->call[e->id.slot];
    if (!c->runs || e->id.generation != c->generation)
        return; /* it was cancelled */
    if (e->kind == DN_EVENT_STARTED) {
        CHECK(!c->started);
        c->started = true;
    } else if (e->kind == DN_EVENT_TOKEN) {
        CHECK(c->started && e->n == c->n - c->n_prompt && c->n < c->n_prompt + c->max_tokens);
        CHECK(e->token == next_id(c->token, c->n));
        c->token[c->n++] = e->token;
    } else if (e->kind == DN_EVENT_DONE) {
        CHECK(c->n == c->n_prompt + c->max_tokens);
        c->runs = false;
        l->n_done++;
        atomic_fetch_add(&n_done, 1);
    } else {
        CHECK(e->kind == DN_EVENT_ERROR && (e->code == DN_KV_INTEGRITY || e->code == DN_DRAINING));
        CHECK(e->code != DN_DRAINING || atomic_load(&n_done) >= N_DONE);
        c->runs = false;
        l->n_failed += e->code == DN_KV_INTEGRITY;
        l->n_drained += e->code == DN_DRAINING;
    }
}

static void receive(struct loop *l)
{
    struct dn_event_batch *batch[sizeof l->batch / sizeof *l->batch];
    pthread_mutex_lock(&l->lock);
    uint32_t n = l->n_batches;
    memcpy(batch, l->batch, n * sizeof *batch);
    l->n_batches = 0;
    pthread_mutex_unlock(&l->lock);
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t k = 0; k < batch[i]->n_events; k++)
            receive_event(l, &batch[i]->event[k]);
        dn_event_batch_free(batch[i]);
    }
}

/* One of a few prompts, cut anywhere, so that many share pages. */
static void submit(struct loop *l, uint32_t slot)
{
    struct call *c = &l->call[slot];
    struct dn_request *r = dn_alloc0(1, sizeof *r);
    struct dn_err err;
    uint64_t words = below(&l->random, 4);
    *c = (struct call){.generation = ++l->generation, .runs = true};
    c->n = c->n_prompt = 1 + below(&l->random, 70);
    c->max_tokens = 1 + below(&l->random, MAX_LENGTH - c->n);
    for (uint32_t i = 0; i < c->n; i++)
        c->token[i] = 20 + (int32_t)below(&words, 200);
    *r = (struct dn_request){.id = {.loop = l->idx, .slot = slot, .generation = c->generation},
                             .prompt = dn_alloc(c->n * sizeof *c->token),
                             .n_prompt = c->n_prompt,
                             .max_tokens = c->max_tokens,
                             .ignore_eos = true,
                             .check = true,
                             .priority = (int)below(&l->random, 3),
                             .cache_read = true,
                             .cache_write = true,
                             .arrival_ns = dn_now_ns(),
                             .sample = {.top_p = 1, .top_k = -1, .repetition = 1, .n_top = -1}};
    memcpy(r->prompt, c->token, c->n * sizeof *c->token);
    if (dn_sched_submit(sched, r, &err) != 0) {
        CHECK(err.code == DN_DRAINING);
        dn_request_free(r);
        c->runs = false;
        l->is_draining = true;
    }
}

static void act(struct loop *l, uint32_t slot)
{
    struct call *c = &l->call[slot];
    const struct dn_request_id id = {.loop = l->idx, .slot = slot, .generation = c->generation};
    uint32_t what = below(&l->random, 400);
    if (c->paused && what < 20) {
        dn_sched_pause(sched, id, c->paused = false);
    } else if (what == 20) {
        dn_sched_pause(sched, id, c->paused = true);
        l->n_paused++;
    } else if (what == 21) {
        dn_sched_cancel(sched, id);
        c->runs = false;
        l->n_cancelled++;
    }
}

static void *loop_main(void *arg)
{
    struct loop *l = arg;
    struct dn_snapshot snapshot;
    while (!atomic_load(&stopped)) {
        receive(l);
        for (uint32_t i = 0; i < SLOTS; i++) {
            if (l->call[i].runs)
                act(l, i);
            else if (!l->is_draining)
                submit(l, i);
        }
        dn_sched_snapshot(sched, &snapshot);
        CHECK(snapshot.running <= pool->conf.max_sequences);
        usleep(30);
    }
    receive(l);
    for (uint32_t i = 0; i < SLOTS; i++)
        CHECK(!l->call[i].runs);
    return NULL;
}

/* ---- */

static struct dn_model *open_model(void)
{
    struct dn_model *m;
    struct dn_err err;
    char path[] = "/tmp/dunlin-tiny-XXXXXX";
    int fd = mkstemp(path);
    CHECK(fd >= 0 && close(fd) == 0);
    CHECK(dn_tiny_write(path, &err) == 0 && dn_model_open(path, &m, &err) == 0);
    unlink(path);
    return m;
}

static void open_pool(const struct dn_model *m)
{
    struct dn_err err;
    const struct dn_pool_conf conf = {.backend = "cpu",
                                      .n_threads = 1,
                                      .weights = DN_WEIGHTS_AUTO,
                                      .max_sequences = 8,
                                      .step_tokens = 48,
                                      .page_tokens = PAGE,
                                      .context_tokens = MAX_LENGTH,
                                      .kv_bytes = (uint64_t)KV_PAGES * PAGE * dn_model_kv_bytes(m, false)};
    CHECK(dn_pool_open(&conf, m, &pool, &err) == 0);
    page_ids = dn_alloc0(pool->runner->n_pages, sizeof *page_ids);
    table = *pool->device->ops;
    table.splits_steps = table.asynchronous = true;
    table.step_begin = step_begin;
    table.step_end = step_end;
    table.step_wait = step_wait;
}

int main(void)
{
    struct dn_model *m = open_model();
    struct dn_err err;
    pthread_t device, thread[LOOPS];
    open_pool(m);
    const struct dn_kernels *real = pool->device->ops;
    pool->device->ops = &table;
    const struct dn_sink sink = {.deliver = deliver, .n_loops = LOOPS};
    CHECK(dn_sched_open(&(struct dn_sched_conf){.reserve_tokens = 1}, pool, &sink, NULL, &sched, &err) == 0);
    CHECK(pthread_create(&device, NULL, device_main, NULL) == 0 && dn_sched_start(sched, &err) == 0);
    for (uint32_t i = 0; i < LOOPS; i++) {
        pthread_mutex_init(&loops[i].lock, NULL);
        loops[i].idx = i;
        loops[i].random = i + 7;
        CHECK(pthread_create(&thread[i], NULL, loop_main, &loops[i]) == 0);
    }
    while (atomic_load(&n_done) < N_DONE)
        usleep(1000);
    dn_sched_stop(sched); /* while all of them are at work */
    atomic_store(&stopped, true);
    for (uint32_t i = 0; i < LOOPS; i++)
        pthread_join(thread[i], NULL);

    struct dn_snapshot last;
    struct dn_pages_stats pages;
    dn_sched_snapshot(sched, &last);
    dn_pages_stats(pool->pages, &pages);
    uint32_t n_drained = 0, n_failed = 0, n_cancelled = 0, n_paused = 0;
    for (uint32_t i = 0; i < LOOPS; i++) {
        n_drained += loops[i].n_drained;
        n_failed += loops[i].n_failed;
        n_cancelled += loops[i].n_cancelled;
        n_paused += loops[i].n_paused;
    }
    printf(
        "%u answers, %u cancelled, %u pauses, %u failed of %u faults, %u at the end; %llu steps, %llu preemptions; %u "
        "batches went out while the device was at work\n",
        n_done, n_cancelled, n_paused, n_failed, n_faults, n_drained, (unsigned long long)last.steps,
        (unsigned long long)last.preemptions, n_while_busy);
    CHECK(pages.held[DN_KV_BF16] == 0 && n_cancelled > 50 && n_paused > 50 && n_failed > 0 && n_failed <= n_faults);
    CHECK(n_drained > 0 && last.preemptions > 0 && n_while_busy > last.steps / 4);

    dn_sched_close(sched);
    pthread_mutex_lock(&job.lock);
    job.quit = true;
    pthread_cond_broadcast(&job.changed);
    pthread_mutex_unlock(&job.lock);
    pthread_join(device, NULL);
    pool->device->ops = real;
    dn_pool_close(pool);
    dn_model_close(m);
    free(page_ids);
    return 0;
}
