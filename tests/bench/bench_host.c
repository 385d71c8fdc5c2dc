/* bench_host [sequences [steps [cuda]]]: what the scheduler's thread does between the end of a decode step and the
 * start of the next one, while a GPU waits: results, events, bookkeeping, filling the next step.
 *
 * The device computes nothing: tokens are invented when a step ends. Or it is a GPU, with a tiny model. Cold: 64 MiB
 * are read when a step has ended, so that the caches hold other things, as after other threads' work. Times are medians
 * and 95th percentiles, in us; BETWEEN: from the return of step_wait() to the call of step_begin(); BEGIN: of a GPU,
 * how long it takes to start a step; else the CPU backend's checks of the step, which read every array but the pages.
 */
#include "base/buf.h"
#include "base/clock.h"
#include "base/metrics.h"
#include "engine/tiny.h"
#include "sched/sched.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { MAX_STEPS = 4000, FLUSH = 64 << 20, LOOPS = 2, WARMUP = 40, STEP_TOKENS = 2048 };

static struct dn_kernels table; /* the CPU's, but for what is below */
static bool (*real_begin)(struct dn_device *d, uint32_t list);
static int (*real_wait)(struct dn_device *d, struct dn_err *err);
static bool on_gpu;
static uint8_t *flush;
static bool cold, measuring;
static volatile uint64_t sink_of_reads;
static uint64_t ended_ns, n_invented;
static double between[MAX_STEPS], begin[MAX_STEPS];
static size_t n_steps;
static int fd[LOOPS];
static uint32_t n_ready; /* sequences that have decoded a while */

static bool step_begin(struct dn_device *d, uint32_t list)
{
    uint64_t t0 = dn_now_ns();
    bool calls = real_begin(d, list);
    if (measuring && ended_ns && n_steps < MAX_STEPS) {
        between[n_steps] = (double)(t0 - ended_ns) * 1e-3;
        begin[n_steps++] = (double)(dn_now_ns() - t0) * 1e-3;
    }
    return calls && on_gpu;
}

static void step_end(struct dn_device *d) {}

static int step_wait(struct dn_device *d, struct dn_err *err)
{
    struct dn_step *s = table.step_arrays(d);
    int code = on_gpu ? real_wait(d, err) : 0;
    for (uint32_t i = 0; i < s->n_rows && !on_gpu; i++)
        s->result[i] = (struct dn_sampled){.id = 20 + (int32_t)(n_invented++ % 200)};
    uint64_t sum = 0;
    if (cold)
        for (size_t i = 0; i < FLUSH; i += 64)
            sum += flush[i];
    sink_of_reads = sum;
    ended_ns = s->kind == DN_STEP_DECODE ? dn_now_ns() : 0;
    return code;
}

/* What the server's does: memory for a message, and a system call that wakes an event loop. */
static void deliver(void *user, uint32_t loop, struct dn_event_batch *b)
{
    uint64_t one = 1;
    for (uint32_t i = 0; i < b->n_events; i++)
        n_ready += b->event[i].kind == DN_EVENT_TOKEN && b->event[i].n == WARMUP;
    free(dn_alloc0(1, 64));
    if (write(fd[loop], &one, sizeof one) != sizeof one || read(fd[loop], &one, sizeof one) != sizeof one)
        abort();
    dn_event_batch_free(b);
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(uint32_t n, uint32_t context)
{
    qsort(between, n_steps, sizeof *between, by_value);
    qsort(begin, n_steps, sizeof *begin, by_value);
    printf("%3u x %5u %-4s  BETWEEN %7.1f %7.1f  BEGIN %6.1f %6.1f\n", n, context, cold ? "cold" : "warm",
           between[n_steps / 2], between[n_steps * 95 / 100], begin[n_steps / 2], begin[n_steps * 95 / 100]);
}

static struct dn_pool *open_pool(struct dn_model *m, uint32_t n, uint32_t context)
{
    struct dn_pool *p;
    struct dn_err err = {0};
    const struct dn_pool_conf conf = {.backend = on_gpu ? "cuda" : "cpu",
                                      .n_threads = 1,
                                      .weights = DN_WEIGHTS_AUTO,
                                      .max_sequences = n,
                                      .step_tokens = STEP_TOKENS,
                                      .page_tokens = 64,
                                      .context_tokens = context + 8192,
                                      .kv_bytes = (uint64_t)n * (context + 8192) * dn_model_kv_bytes(m, false) * 9 / 8};
    if (dn_pool_open(&conf, m, &p, &err) != 0) {
        fprintf(stderr, "bench_host: %s\n", err.text);
        exit(1);
    }
    table = *p->device->ops;
    real_begin = table.step_begin;
    real_wait = table.step_wait;
    table.step_begin = step_begin;
    table.step_wait = step_wait;
    if (!on_gpu)
        table.step_end = step_end;
    table.splits_steps = table.asynchronous = true;
    p->device->ops = &table;
    return p;
}

static void submit(struct dn_sched *s, uint32_t i, uint32_t n_prompt, uint32_t max_tokens)
{
    struct dn_request *r = dn_alloc0(1, sizeof *r);
    struct dn_err err = {0};
    *r = (struct dn_request){.id = {.loop = i % LOOPS, .slot = i, .generation = i + 1},
                             .n_prompt = n_prompt,
                             .max_tokens = max_tokens,
                             .ignore_eos = true,
                             .check = true,
                             .priority = 50,
                             .cache_read = true,
                             .cache_write = true,
                             .arrival_ns = dn_now_ns(),
                             .sample = {.temperature = 1, .top_p = 1, .top_k = -1, .repetition = 1, .n_top = -1}};
    r->prompt = dn_alloc(n_prompt * sizeof *r->prompt);
    for (uint32_t k = 0; k < n_prompt; k++)
        r->prompt[k] = 20 + (int32_t)((k * 31 + i * 7 + k / 97) % 200);
    if (dn_sched_submit(s, r, &err) != 0) {
        fprintf(stderr, "bench_host: %s\n", err.text);
        exit(1);
    }
}

static void bench(struct dn_model *m, uint32_t n, uint32_t context, uint64_t steps)
{
    struct dn_pool *p = open_pool(m, n, context);
    struct dn_sched *s;
    struct dn_err err = {0};
    struct dn_metrics *metrics = dn_metrics_open();
    const struct dn_sink sink = {.deliver = deliver, .n_loops = LOOPS};
    if (dn_sched_open(&(struct dn_sched_conf){.queue_max = n, .decode_chunk_tokens = STEP_TOKENS}, p, &sink, metrics,
                      &s, &err) != 0)
        exit(1);
    cold = measuring = false;
    for (uint32_t i = 0; i < n; i++) /* ends of pages are not met by all at once */
        submit(s, i, context - i * 64 / n, 8000);
    for (n_ready = 0; n_ready < n;)
        dn_sched_turn(s);
    for (int c = 0; c < 2; c++) {
        cold = c;
        measuring = true;
        n_steps = 0;
        while (n_steps < steps)
            dn_sched_turn(s);
        measuring = false;
        report(n, context);
    }
    dn_sched_close(s);
    dn_metrics_close(metrics);
    dn_pool_close(p);
}

int main(int argc, char **argv)
{
    uint32_t n = argc > 1 ? (uint32_t)strtoul(argv[1], NULL, 10) : 64;
    uint64_t steps = argc > 2 ? strtoull(argv[2], NULL, 10) : 300;
    char path[] = "/tmp/dunlin-bench-XXXXXX";
    struct dn_model *m;
    struct dn_err err = {0};
    int file = mkstemp(path);
    on_gpu = argc > 3 && strcmp(argv[3], "cuda") == 0;
    if (n == 0 || n > 512 || steps == 0 || steps > MAX_STEPS || file < 0 || dn_tiny_write(path, &err) != 0 ||
        dn_model_open(path, &m, &err) != 0) {
        fprintf(stderr, "bench_host [sequences, up to 512 [steps, up to %d [cuda]]] %s\n", MAX_STEPS, err.text);
        return 1;
    }
    close(file);
    unlink(path);
    m->hyper.context_tokens = 1 << 17; /* nothing is computed */
    flush = dn_alloc(FLUSH);
    memset(flush, 1, FLUSH);
    for (int i = 0; i < LOOPS; i++)
        fd[i] = eventfd(0, EFD_CLOEXEC);
    static const uint32_t context[] = {8192, 32768};
    for (size_t i = 0; i < (on_gpu ? 1 : 2); i++) /* a GPU has to compute the prompts */
        bench(m, n, context[i], steps);
    free(flush);
    dn_model_close(m);
    return 0;
}
