/* Steps on the GPU: recorded and eager ones give the same bits, counts below the bucket write nothing beyond, a step
 * that fails ends the device with a reason and nothing worse; what a step costs the host. */
#include "gpu/gpu.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

enum { DIM = 512, VOCAB = 300, SEQS = 100, TOKENS = 200, ROWS = 120, LAYERS = 3 };

/* A model of what there is without weights' matrices but one: embed, then layers of norm and silu, then rows. */
struct small {
    struct dn_matrix table;
    float *x;
    void *normed, *ff, *out;
    float *weight;
    uint64_t *tags;
    uint32_t n_tags;
};

static void small_ops(struct gpu *g, void *ctx)
{
    struct small *m = ctx;
    if (m->tags)
        g->ops->check_tags(g->d, &(struct dn_check_tags){.table = m->tags, .n_pages = m->n_tags});
    g->ops->embed(g->d, &(struct dn_embed){.table = &m->table, .out = m->x});
    struct dn_rmsnorm norm = {.x = m->x, .weight = m->weight, .eps = 1e-5f, .dim = DIM, .out = m->normed};
    for (int i = 0; i < LAYERS; i++) {
        g->ops->rmsnorm(g->d, &norm);
        g->ops->silu_mul(g->d, &(struct dn_silu_mul){.gate_up = m->normed, .dim = DIM / 2, .out = m->ff});
        norm.add = m->normed;
    }
    norm.rows_only = true;
    norm.out = m->out;
    g->ops->rmsnorm(g->d, &norm);
}

static void open_small(struct gpu *g, struct small *m)
{
    gpu_open(g, &(struct dn_step_limits){.tokens = TOKENS, .seqs = SEQS, .rows = ROWS, .pages = 64 * 128, .tags = 8}, 2,
             VOCAB);
    *m = (struct small){.table = {.format = DN_W_BF16, .n_out = VOCAB, .n_in = DIM}};
    m->table.bytes = g->ops->matrix_bytes(&m->table);
    m->table.data = gpu_alloc(g, m->table.bytes);
    uint16_t *rows = malloc((size_t)VOCAB * DIM * 2);
    for (size_t i = 0; i < (size_t)VOCAB * DIM; i++)
        rows[i] = f32_to_bf16(gpu_normal());
    cr_assert_eq(g->ops->matrix_pack(g->d, &m->table, 0, VOCAB, &(struct dn_rows){.bf16 = rows}), 0);
    free(rows);
    float w[DIM];
    for (int i = 0; i < DIM; i++)
        w[i] = 1 + 0.2f * gpu_normal();
    m->weight = gpu_copy(g, w, sizeof w);
    m->x = gpu_alloc(g, (size_t)TOKENS * DIM * 4);
    m->normed = gpu_alloc(g, (size_t)TOKENS * DIM * 2);
    m->ff = gpu_alloc(g, (size_t)TOKENS * DIM);
    m->out = gpu_alloc(g, (size_t)ROWS * DIM * 2);
}

/* What a step left in its buffers: x, ff, out. */
struct trace {
    uint8_t *byte;
    size_t x, ff, out, n;
};

static void take_trace(struct gpu *g, const struct small *m, struct trace *t)
{
    t->x = 0;
    t->ff = (size_t)TOKENS * DIM * 4;
    t->out = t->ff + (size_t)TOKENS * DIM;
    t->n = t->out + (size_t)ROWS * DIM * 2;
    t->byte = malloc(t->n);
    g->ops->download(g->d, t->byte + t->x, m->x, t->ff - t->x);
    g->ops->download(g->d, t->byte + t->ff, m->ff, t->out - t->ff);
    g->ops->download(g->d, t->byte + t->out, m->out, t->n - t->out);
}

static void poison(struct gpu *g, const struct small *m)
{
    gpu_poison(g, m->x, (size_t)TOKENS * DIM * 4);
    gpu_poison(g, m->normed, (size_t)TOKENS * DIM * 2);
    gpu_poison(g, m->ff, (size_t)TOKENS * DIM);
    gpu_poison(g, m->out, (size_t)ROWS * DIM * 2);
}

static size_t written(const uint8_t *p, size_t from, size_t to)
{
    size_t n = 0;
    for (size_t i = from; i < to; i++)
        n += p[i] != 0xff;
    return n;
}

static void random_ids(struct gpu *g, uint32_t n)
{
    for (uint32_t i = 0; i < n; i++)
        g->s->token_id[i] = (int32_t)(gpu_rng() % VOCAB);
}

static void compare(struct gpu *g, struct small *m, uint32_t list, uint32_t n, uint32_t n_rows)
{
    struct trace replay, eager;
    gpu_rows_step(g, DN_STEP_DECODE, n);
    random_ids(g, n);
    g->s->n_rows = n_rows;
    poison(g, m);
    gpu_step(g, list, small_ops, m);
    take_trace(g, m, &replay);
    poison(g, m);
    gpu_step(g, 7, small_ops, m);
    take_trace(g, m, &eager);
    cr_expect_eq(memcmp(replay.byte, eager.byte, replay.n), 0, "list %u, n %u: replay differs from eager", list, n);
    size_t beyond = written(replay.byte, (size_t)n * DIM * 4, replay.ff) +
                    written(replay.byte, replay.ff + (size_t)n * DIM, replay.out) +
                    written(replay.byte, replay.out + (size_t)n_rows * DIM * 2, replay.n);
    cr_expect_eq(beyond, 0, "list %u, n %u: %zu bytes beyond the counts were written", list, n, beyond);
    size_t within = written(replay.byte, 0, (size_t)n * DIM * 4);
    cr_expect_gt(within, (size_t)n * DIM * 3, "list %u, n %u: nothing was computed", list, n);
    free(replay.byte), free(eager.byte);
}

Test(step, replay_equals_eager)
{
    struct gpu g;
    struct small m;
    open_small(&g, &m);
    gpu_prepare(&g, 1, small_ops, &m);
    uint64_t tags[500] = {0};
    m.n_tags = 500;
    m.tags = gpu_copy(&g, tags, sizeof tags);
    gpu_prepare(&g, 2, small_ops, &m);
    static const uint32_t count[] = {1,  2,  3,  4,  5,  8,  9,  16, 17, 24, 25,  31,
                                     32, 33, 48, 49, 63, 64, 65, 96, 97, 99, SEQS};
    for (size_t i = 0; i < sizeof count / sizeof *count; i++) {
        m.tags = NULL;
        compare(&g, &m, 1, count[i], count[i]);
        m.tags = gpu_copy(&g, tags, sizeof tags);
        compare(&g, &m, 2, count[i], (count[i] + 1) / 2);
    }
    printf("step: replay equals eager\n");
    gpu_close(&g);
}

static void empty(struct gpu *g, void *ctx) {}

/* A list may be made ready again, for other operations: the old record is gone. */
Test(step, prepared_again)
{
    struct gpu g;
    struct small m;
    open_small(&g, &m);
    gpu_prepare(&g, 1, empty, NULL);
    gpu_prepare(&g, 1, small_ops, &m);
    compare(&g, &m, 1, 5, 5);
    gpu_prepare(&g, 2, small_ops, &m);
    compare(&g, &m, 1, 64, 64);
    compare(&g, &m, 2, 64, 64);
    gpu_prepare(&g, 1, empty, NULL);
    gpu_rows_step(&g, DN_STEP_DECODE, 8);
    poison(&g, &m);
    gpu_step(&g, 1, empty, NULL);
    struct trace t;
    take_trace(&g, &m, &t);
    cr_expect_eq(written(t.byte, 0, t.n), 0, "the old list ran");
    free(t.byte);
    gpu_close(&g);
}

/* A token's values are the same bits alone, in any batch, in a prefill step and after another step of another size. */
Test(step, rows_do_not_depend_on_the_batch)
{
    struct gpu g;
    struct small m;
    open_small(&g, &m);
    gpu_prepare(&g, 1, small_ops, &m);
    static uint8_t want[VOCAB][DIM * 4];
    for (int32_t id = 0; id < VOCAB; id += 7) {
        gpu_rows_step(&g, DN_STEP_DECODE, 1);
        g.s->token_id[0] = id;
        gpu_step(&g, 1, small_ops, &m);
        g.ops->download(g.d, want[id], m.x, DIM * 4);
    }
    for (int round = 0; round < 20; round++) {
        uint32_t n = 1 + (uint32_t)(gpu_rng() % SEQS);
        enum dn_step_kind kind = round % 4 == 3 ? DN_STEP_PREFILL : DN_STEP_DECODE;
        gpu_rows_step(&g, kind, n);
        for (uint32_t i = 0; i < n; i++)
            g.s->token_id[i] = (int32_t)(gpu_rng() % (VOCAB / 7)) * 7;
        gpu_step(&g, 1, small_ops, &m);
        uint8_t *x = malloc((size_t)n * DIM * 4);
        g.ops->download(g.d, x, m.x, (size_t)n * DIM * 4);
        for (uint32_t i = 0; i < n; i++)
            cr_expect_eq(memcmp(x + (size_t)i * DIM * 4, want[g.s->token_id[i]], DIM * 4), 0,
                         "round %d, token %u of %u", round, i, n);
        free(x);
    }
    gpu_close(&g);
}

/* Large copies take another way than small ones; memory is zero and aligned. */
Test(step, memory_and_copies)
{
    struct gpu g;
    gpu_open(&g, &(struct dn_step_limits){.tokens = 1, .seqs = 1, .rows = 1, .pages = 1, .tags = 1}, 1, 10);
    static const size_t size[] = {1, 255, 65536, 65537, 4 << 20, (4 << 20) + 1, (8 << 20) + 12345, 40 << 20};
    for (size_t i = 0; i < sizeof size / sizeof *size; i++) {
        uint8_t *h = malloc(size[i]), *back = malloc(size[i]), *p = gpu_alloc(&g, size[i]);
        cr_expect_eq((uintptr_t)p % 256, 0);
        g.ops->download(g.d, back, p, size[i]);
        for (size_t k = 0; k < size[i]; k++)
            cr_assert_eq(back[k], 0, "byte %zu of %zu is not zero", k, size[i]);
        for (size_t k = 0; k < size[i]; k++)
            h[k] = (uint8_t)gpu_rng();
        g.ops->upload(g.d, p, h, size[i]);
        g.ops->download(g.d, back, p, size[i]);
        cr_expect_eq(memcmp(h, back, size[i]), 0, "%zu bytes", size[i]);
        if (i % 2)
            g.ops->free(g.d, p);
        free(h), free(back);
    }
    uint64_t free_bytes, total;
    g.ops->memory(g.d, &free_bytes, &total);
    char text[256];
    g.ops->describe(g.d, text, sizeof text);
    printf("device: %s; %.1f of %.1f GiB free\n", text, (double)free_bytes / (1 << 30), (double)total / (1 << 30));
    cr_expect(free_bytes > 0 && free_bytes < total);
    cr_expect_null(g.ops->alloc(g.d, SIZE_MAX), "everything");
    if (!getenv("DN_GPU_SMALL")) /* which is for sanitizers: to them a refused call is an error */
        cr_expect_null(g.ops->alloc(g.d, (size_t)1 << 50), "a petabyte");
    gpu_close(&g);
}

/* Steps without a token, recorded and launched one by one: nothing is written, and the next step is as good as any. */
Test(step, nothing_to_do)
{
    struct gpu g;
    struct small m;
    open_small(&g, &m);
    gpu_prepare(&g, 1, small_ops, &m);
    uint64_t tags[500] = {0};
    m.n_tags = 500;
    for (uint32_t i = 0; i < 6; i++) {
        struct trace t;
        m.tags = i % 2 ? gpu_copy(&g, tags, sizeof tags) : NULL;
        gpu_rows_step(&g, i < 4 ? DN_STEP_PREFILL : DN_STEP_DECODE, 0);
        poison(&g, &m);
        gpu_step(&g, i < 4 ? 7 : 1, small_ops, &m);
        take_trace(&g, &m, &t);
        cr_expect_eq(written(t.byte, 0, t.n), 0, "step %u without tokens wrote", i);
        free(t.byte);
    }
    m.tags = NULL;
    compare(&g, &m, 1, 3, 2);
    gpu_close(&g);
}

/* A page id beyond the arena in a sequence whose tags nobody checks: the process ends before a kernel reads there. */
static void attend_ops(struct gpu *g, void *ctx)
{
    struct small *m = ctx;
    static struct dn_kv_layout l;
    cr_assert_eq(dn_kv_layout_init(&l, 1, 1, 64, 64, 1 << 20), 0);
    if (m->tags)
        g->ops->check_tags(g->d, &(struct dn_check_tags){.table = m->tags, .n_pages = m->n_tags});
    g->ops->attention(g->d, &(struct dn_attention){.q = m->normed,
                                                   .q_stride = 64,
                                                   .n_heads = 1,
                                                   .n_kv_heads = 1,
                                                   .head_dim = 64,
                                                   .scale = 1,
                                                   .layout = &l,
                                                   .arena = m->x,
                                                   .out = m->out});
}

/* A process of its own: ends with 77 if there is no GPU, 1 if the id got through. */
static void wild_page(void)
{
    struct dn_device_conf conf = {.limits = {.tokens = 1, .seqs = 1, .rows = 1, .pages = 1}, .n_vocab = 1};
    struct dn_device *d;
    struct gpu g;
    struct small m;
    if (dn_kernels_open_library(gpu_library(), &conf, &d, NULL) != 0)
        _exit(77);
    d->ops->close(d);
    open_small(&g, &m);
    uint64_t tags[2] = {0};
    m.n_tags = 2;
    gpu_prepare(&g, 1, attend_ops, &m);
    m.tags = gpu_copy(&g, tags, sizeof tags);
    gpu_prepare(&g, 2, attend_ops, &m);
    for (uint32_t i = 0; i < 3; i++) {
        gpu_rows_step(&g, DN_STEP_DECODE, 2);
        for (uint32_t q = 0; q < 2; q++) {
            g.s->page_start[q + 1] = (int32_t)q + 1;
            g.s->page[q] = q + (i == 2); /* in the end one is the arena's end */
            g.s->tag[q] = 0;
            g.s->check[q] = i == 1;
        }
        if (i == 2)
            fclose(stderr); /* what it has to say is for people who look for a bug */
        gpu_step(&g, i == 1 ? 2 : 1, attend_ops, &m);
    }
    _exit(1);
}

Test(step, wild_page)
{
    int status = 0;
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0)
        wild_page();
    cr_assert_eq(waitpid(pid, &status, 0), pid);
    if (WIFEXITED(status) && WEXITSTATUS(status) == 77) {
        struct gpu g;
        gpu_open(&g, &(struct dn_step_limits){.tokens = 1, .seqs = 1, .rows = 1, .pages = 1}, 1, 1); /* says why */
    }
    cr_expect(WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT, "status %#x", (unsigned)status);
}

/* No GPU is needed for this one. */
Test(step, too_many_tokens)
{
    struct dn_device_conf conf = {.limits = {.tokens = 65536, .seqs = 1, .rows = 1, .pages = 1}, .n_vocab = 1};
    struct dn_device *d = NULL;
    struct dn_err err = {0};
    int rc = dn_kernels_open_library(gpu_library(), &conf, &d, &err);
    if (rc == -DN_NOT_FOUND) {
        printf("SKIPPED: %s\n", err.text);
        return;
    }
    cr_expect_eq(rc, -DN_CONFIG);
    cr_expect_not_null(strstr(err.text, "step_tokens 65536"), "%s", err.text);
    cr_expect_null(d);
}

struct head {
    float *logits;
    uint32_t n_vocab;
};
static void head_ops(struct gpu *g, void *ctx)
{
    struct head *h = ctx;
    g->ops->sample_rows(g->d,
                        &(struct dn_sample_rows){.logits = h->logits, .n_vocab = h->n_vocab, .n_valid = h->n_vocab});
}

/* Two devices on one GPU whose kernels want different amounts of shared memory: that of the second, which wants less,
 * takes nothing away from the first, whose launches already had theirs. */
Test(step, two_devices)
{
    static const uint32_t vocab[] = {163840, 100000};
    struct gpu g[2];
    struct head h[2];
    for (int i = 0; i < 2; i++) {
        gpu_open(&g[i], &(struct dn_step_limits){.tokens = 8, .seqs = 8, .rows = 8, .pages = 8, .tags = 1}, 1,
                 vocab[i]);
        float *logits = calloc((size_t)8 * vocab[i], sizeof *logits);
        for (uint32_t r = 0; r < 8; r++)
            logits[(size_t)r * vocab[i] + 1000 * r + 7] = 1;
        h[i] = (struct head){gpu_copy(&g[i], logits, (size_t)8 * vocab[i] * sizeof *logits), vocab[i]};
        free(logits);
    }
    for (int round = 0; round < 4; round++) {
        struct gpu *one = &g[round % 2];
        gpu_rows_step(one, DN_STEP_PREFILL, 1 + 7 * (round % 2 == 0));
        gpu_step(one, 7, head_ops, &h[round % 2]);
        for (uint32_t r = 0; r < one->s->n_rows; r++)
            cr_expect_eq(one->s->result[r].id, (int32_t)(1000 * r + 7), "round %d, row %u: %d", round, r,
                         one->s->result[r].id);
    }
    gpu_close(&g[0]);
    gpu_close(&g[1]);
}

/* A kernel that fails: the step says so, with its reason, and so does every later one; nothing crashes. */
Test(step, lost)
{
    struct gpu g;
    struct small m;
    if (getenv("DN_GPU_SMALL")) {
        printf("SKIPPED: step/lost: a sanitizer stops at what it provokes\n");
        cr_skip_test("sanitizer");
    }
    open_small(&g, &m);
    m.weight = (float *)16; /* no address of anything */
    gpu_rows_step(&g, DN_STEP_PREFILL, 3);
    for (int i = 0; i < 3; i++) {
        struct dn_err err = {0};
        if (g.ops->step_begin(g.d, 7))
            small_ops(&g, &m);
        g.ops->step_end(g.d);
        cr_expect_eq(g.ops->step_wait(g.d, &err), -DN_INTERNAL);
        cr_expect_eq(strncmp(err.text, "CUDA: ", 6), 0);
        printf("step: lost: %s\n", err.text);
    }
    uint8_t byte[100000] = {0};
    g.ops->upload(g.d, m.x, byte, sizeof byte);
    g.ops->download(g.d, byte, m.x, sizeof byte);
    struct dn_err err = {0};
    cr_expect_eq(g.ops->prepare(g.d, 1, &err), -DN_INTERNAL);
    gpu_close(&g);
}

/* ---- Times ---- */

static void long_ops(struct gpu *g, void *ctx)
{
    for (int i = 0; i < 300; i++)
        small_ops(g, ctx);
}

struct split {
    double begin, wait;
};

/* What the host has done before a step: nothing else, read 64 MiB, slept for 30 ms. */
enum before { WARM, COLD, SLEPT };

static void prepare_host(enum before before)
{
    enum { BYTES = 64 << 20 };
    static uint8_t *other;
    static volatile uint8_t sink;
    if (!other)
        memset(other = malloc(BYTES), 1, BYTES);
    for (size_t i = 0; i < BYTES && before == COLD; i += 64)
        sink = (uint8_t)(sink + other[i]);
    if (before == SLEPT)
        usleep(30000);
}

/* What the host spends in a step: until it has been handed over, and until the results are there. */
static struct split host_time(struct gpu *g, uint32_t list, void (*ops)(struct gpu *, void *), void *ctx,
                              enum before before)
{
    enum { N = 101 };
    double begin[N], all[N];
    int n = before == SLEPT ? 31 : N;
    for (int i = 0; i < n; i++) {
        prepare_host(before);
        uint64_t t0 = dn_now_ns();
        if (g->ops->step_begin(g->d, list))
            ops(g, ctx);
        g->ops->step_end(g->d);
        uint64_t t1 = dn_now_ns();
        struct dn_err err = {0};
        cr_assert_eq(g->ops->step_wait(g->d, &err), 0);
        begin[i] = (double)(t1 - t0) / 1000;
        all[i] = (double)(dn_now_ns() - t0) / 1000;
    }
    qsort(begin, (size_t)n, sizeof *begin, gpu_by_value);
    qsort(all, (size_t)n, sizeof *all, gpu_by_value);
    return (struct split){begin[n / 2], all[n / 2]};
}

/* 64 sequences of 8,192 tokens: pages and tags travel too. */
static void long_contexts(struct gpu *g, uint32_t n)
{
    struct dn_step *s = g->s;
    for (uint32_t i = 0; i < n * 128; i++) {
        s->page[i] = i % 500;
        s->tag[i] = 0;
    }
    for (uint32_t q = 0; q < n; q++) {
        s->check[q] = 1;
        s->page_start[q + 1] = (int32_t)(q + 1) * 128;
        s->kv_len[q] = 8192;
        s->position[q] = 8191;
    }
}

Test(step, bench)
{
    struct gpu g;
    struct small m;
    open_small(&g, &m);
    gpu_prepare(&g, 1, empty, NULL);
    gpu_prepare(&g, 2, long_ops, &m);
    uint64_t tags[500] = {0};
    m.n_tags = 500;
    m.tags = gpu_copy(&g, tags, sizeof tags);
    gpu_prepare(&g, 3, small_ops, &m);
    uint64_t *table = m.tags;
    for (uint32_t n = 1; n <= 64; n *= 8) {
        m.tags = NULL;
        gpu_rows_step(&g, DN_STEP_DECODE, n);
        random_ids(&g, n);
        struct split e = host_time(&g, 1, empty, NULL, WARM), l = host_time(&g, 2, long_ops, &m, WARM),
                     x = host_time(&g, 7, long_ops, &m, WARM);
        printf("BENCH step empty n %u: handed over %.1f us, done %.1f us\n", n, e.begin, e.wait);
        printf("BENCH step 2400 kernels n %u: handed over %.1f us, done %.1f us; eager %.1f, %.1f us\n", n, l.begin,
               l.wait, x.begin, x.wait);
        m.tags = table;
        long_contexts(&g, n);
        static const char *const name[] = {"warm", "cold", "slept"};
        for (int how = WARM; how <= (n < 64 ? WARM : SLEPT); how++) {
            struct split c = host_time(&g, 3, small_ops, &m, (enum before)how);
            printf("BENCH step checked, 8k tokens, n %u, %s: handed over %.1f us, done %.1f us\n", n, name[how],
                   c.begin, c.wait);
            fflush(stdout);
        }
    }
    /* Loading: one thread, from memory that is not pinned. */
    enum { BYTES = 512 << 20 };
    uint8_t *h = malloc(BYTES), *p = gpu_alloc(&g, BYTES);
    memset(h, 1, BYTES);
    uint64_t t = dn_now_ns();
    g.ops->upload(g.d, p, h, BYTES);
    printf("BENCH upload %.1f GB/s\n", (double)BYTES / (double)(dn_now_ns() - t));
    t = dn_now_ns();
    g.ops->upload(g.d, p, h, BYTES);
    printf("BENCH upload again %.1f GB/s\n", (double)BYTES / (double)(dn_now_ns() - t));
    free(h);
    gpu_close(&g);
}
