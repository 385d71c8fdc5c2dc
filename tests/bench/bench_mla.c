/* Speed of the CPU's operations of a Kimi-like step: bench_mla [--threads N] [--isa NAME] [--ms MILLISECONDS].
 *
 * Layer shapes of Kimi K2 (64 heads, latent 512 + 64, experts of 7168 x 2048 in INT4, 12 of 384 of them) and of a
 * miniature (4 heads, experts of 512 x 256). Each line has the best of the rounds: bytes that must be read (cache,
 * weights in use) and multiply-adds that must be made, a second, and both as a share of what this machine reads from
 * memory and multiplies in f32 from registers, measured in the same rounds. */
#include "base/buf.h"
#include "kernels/kernels.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    PIECE = 4 << 20,
    TOKENS = 512,
    SEQS = 16,
    PAGE = 64,
    ROUNDS = 5,
    CONTEXT = 4096,
    LATENT = 512,
    ROPE = 64,
    NOPE = 128,
    V = 128
};

/* With one thread the time that it ran, so that other work on the machine takes away only its share of the caches. */
static clockid_t clock_id = CLOCK_THREAD_CPUTIME_ID;

static double now(void)
{
    struct timespec ts;
    clock_gettime(clock_id, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

struct bench {
    struct dn_device *d;
    const struct dn_kernels *ops;
    struct dn_step *s;
    struct dn_kv_layout layout;
    void *arena;
    size_t arena_bytes, at; /* at: what is read next */
    double seconds;         /* of a round */
    unsigned n_threads;
};

static float *floats(struct bench *b, size_t n)
{
    float *p = b->ops->alloc(b->d, n * sizeof *p);
    if (!p) {
        fprintf(stderr, "bench_mla: no memory for %zu values\n", n);
        exit(1);
    }
    for (size_t i = 0; i < n; i++)
        p[i] = (float)((i * 2654435761u >> 8) % 2001) / 1000.0f - 1.0f;
    return p;
}

static struct dn_matrix matrix(struct bench *b, enum dn_weight_format f, uint32_t groups, uint32_t n_out, uint32_t n_in)
{
    struct dn_matrix m = {.format = f, .n_out = n_out, .n_in = n_in, .n_groups = groups, .symmetric = true};
    m.bytes = b->ops->matrix_bytes(&m);
    m.data = b->ops->alloc(b->d, m.bytes);
    float *w = floats(b, (size_t)n_out * n_in);
    for (uint32_t g = 0; g < groups; g++) {
        if (!m.data || b->ops->matrix_pack(b->d, &m, g * n_out, n_out, &(struct dn_rows){.f32 = w})) {
            fprintf(stderr, "bench_mla: %u groups of %u x %u can't be packed\n", groups, n_out, n_in);
            exit(1);
        }
    }
    b->ops->free(b->d, w);
    return m;
}

/* n_seqs sequences of n tokens each, ending at context tokens. */
static void fill_step(struct bench *b, uint32_t n_seqs, uint32_t n, uint32_t context, enum dn_kv_format f)
{
    struct dn_step *s = b->s;
    s->n_seqs = n_seqs;
    s->n_tokens = n_seqs * n;
    for (uint32_t q = 0; q < n_seqs; q++) {
        for (uint32_t t = 0; t < n; t++) {
            s->token_seq[q * n + t] = (int32_t)q;
            s->position[q * n + t] = (int32_t)(context - n + t);
        }
        s->token_start[q + 1] = (int32_t)((q + 1) * n);
        s->kv_len[q] = (int32_t)context;
        s->kv_format[q] = (uint8_t)f;
        s->slot[q] = -1;
        uint32_t pages = (context + PAGE - 1) / PAGE;
        s->page_start[q + 1] = s->page_start[q] + (int32_t)pages;
        for (uint32_t i = 0; i < pages; i++) { /* scattered over the slabs */
            uint32_t id = (q * pages + i) * 7 % (SEQS * CONTEXT / PAGE), per = b->layout.format[f].pages_per_slab;
            s->page[(uint32_t)s->page_start[q] + i] = id / per * b->layout.slab_pages + id % per;
        }
    }
}

/* ---- Ceilings ---- */

static double read_seconds(const uint64_t *p, size_t bytes)
{
    typedef uint64_t vec __attribute__((vector_size(64)));
    const vec *v = (const vec *)p;
    vec a[4] = {{0}};
    double start = now();
    for (size_t i = 0; i + 4 <= bytes / 64; i += 4) {
#pragma GCC unroll 4
        for (int l = 0; l < 4; l++) {
            __builtin_prefetch((const char *)(v + i + l) + 4096);
            a[l] += v[i + l];
        }
    }
    volatile uint64_t sink = a[0][0] + a[1][1] + a[2][2] + a[3][3];
    (void)sink;
    return now() - start;
}

/* Twelve chains of multiply-adds in registers for one thread. */
typedef float lanes __attribute__((vector_size(64)));
static double fma_seconds(unsigned n)
{
    lanes x[12], a = {0}, c = {0};
    for (int i = 0; i < 16; i++) {
        a[i] = 0.999f;
        c[i] = 0.001f;
    }
    for (int i = 0; i < 12; i++)
        x[i] = c;
    double start = now();
    for (unsigned k = 0; k < n; k++) {
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++)
            x[i] = x[i] * a + c;
    }
    double t = now() - start;
    float sum = 0;
    for (int i = 0; i < 12; i++)
        sum += x[i][i];
    volatile float sink = sum;
    (void)sink;
    return t;
}

/* What one thread reads and multiplies a second, now. */
struct ceiling {
    double bytes, products;
};

static void measure(struct bench *b, struct ceiling *top)
{
    for (int i = 0; i < 4; i++) {
        b->at = b->at + 2 * PIECE <= b->arena_bytes ? b->at + PIECE : 0;
        double r = PIECE / read_seconds((uint64_t *)((char *)b->arena + b->at), PIECE),
               m = 12.0 * 16 * 1e5 / fma_seconds(100000);
        top->bytes = r > top->bytes ? r : top->bytes;
        top->products = m > top->products ? m : top->products;
    }
}

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* ---- Cases ---- */

struct one {
    const char *name;
    double bytes, products; /* of a call */
    void (*call)(struct bench *b, const void *p);
    const void *p;
};

static void run(struct bench *b, const struct one *c)
{
    double best = 1e9, read[ROUNDS], mul[ROUNDS];
    b->ops->step_begin(b->d, 1);
    c->call(b, c->p);
    for (int round = 0; round < ROUNDS; round++) {
        struct ceiling top = {0, 0};
        measure(b, &top);
        double start = now(), t;
        unsigned n = 0;
        do {
            c->call(b, c->p);
            n++;
            t = now() - start;
        } while (t < b->seconds);
        t /= n;
        measure(b, &top);
        best = t < best ? t : best;
        read[round] = c->bytes / t / (top.bytes * b->n_threads);
        mul[round] = c->products / t / (top.products * b->n_threads);
    }
    qsort(read, ROUNDS, sizeof *read, by_value);
    qsort(mul, ROUNDS, sizeof *mul, by_value);
    printf("%-44s %10.1f us %7.2f GB/s %5.1f %% %8.1f GFMA/s %5.1f %%\n", c->name, best * 1e6, c->bytes / best / 1e9,
           100 * read[ROUNDS / 2], c->products / best / 1e9, 100 * mul[ROUNDS / 2]);
    fflush(stdout);
}

static void call_attention(struct bench *b, const void *p)
{
    b->ops->mla_attention(b->d, p);
}
static void call_prefill(struct bench *b, const void *p)
{
    b->ops->mla_prefill(b->d, p);
}
static void call_experts(struct bench *b, const void *p)
{
    b->ops->experts(b->d, p);
}
static void call_groups(struct bench *b, const void *p)
{
    b->ops->group_matmul(b->d, p);
}
static void call_route(struct bench *b, const void *p)
{
    b->ops->route(b->d, p);
}

static const char *const kv_name[] = {"bf16", "fp8"};

static void attention_cases(struct bench *b, uint32_t n_heads)
{
    struct dn_matrix w_k = matrix(b, DN_W_BF16, n_heads, NOPE, LATENT), w_v = matrix(b, DN_W_BF16, n_heads, V, LATENT),
                     w_t = matrix(b, DN_W_BF16, n_heads, LATENT, NOPE);
    float *q = floats(b, (size_t)TOKENS * n_heads * (LATENT + ROPE)),
          *out = floats(b, (size_t)TOKENS * n_heads * LATENT);
    char name[96];
    struct dn_mla_attention a = {q, n_heads, LATENT, ROPE, 0.07f, &b->layout, b->arena, 0, out};
    struct dn_mla_prefill e = {q, &w_k, &w_v, n_heads, NOPE, ROPE, V, LATENT, 0.07f, &b->layout, b->arena, 0, out};
    for (int f = 0; f < 2; f++) {
        for (uint32_t n = 1; n <= 8; n *= 8) {
            fill_step(b, n, 1, CONTEXT, (enum dn_kv_format)f);
            double bytes = f ? LATENT + 2 * ROPE + 4 : 2 * (LATENT + ROPE);
            snprintf(name, sizeof name, "decode %u x %u heads, %d, %s", n, n_heads, CONTEXT, kv_name[f]);
            run(b, &(struct one){name, n * CONTEXT * bytes, (double)n * CONTEXT * n_heads * (2 * LATENT + ROPE),
                                 call_attention, &a});
        }
    }
    for (uint32_t context = TOKENS; context <= CONTEXT; context *= 4) {
        fill_step(b, 1, TOKENS, context, DN_KV_BF16);
        double pairs = (double)TOKENS * (context - TOKENS / 2.0);
        snprintf(name, sizeof name, "prefill of %d x %u heads to %u", TOKENS, n_heads, context);
        run(b, &(struct one){name, (double)(w_k.bytes + w_v.bytes),
                             n_heads * (pairs * (NOPE + ROPE + V) + (double)context * LATENT * (NOPE + V)),
                             call_prefill, &e});
    }
    struct dn_group_matmul g = {q, n_heads * NOPE, NOPE, &w_t, out, n_heads * (LATENT + ROPE), LATENT + ROPE};
    for (uint32_t n = 1; n <= 16; n *= 16) {
        fill_step(b, n, 1, 64, DN_KV_BF16);
        snprintf(name, sizeof name, "queries x %u, %u heads", n, n_heads);
        run(b, &(struct one){name, (double)w_t.bytes, (double)n * n_heads * LATENT * NOPE, call_groups, &g});
    }
}

static void expert_cases(struct bench *b, uint32_t n_experts, uint32_t top_k, uint32_t dim, uint32_t ff,
                         enum dn_weight_format f)
{
    struct dn_matrix gate_up = matrix(b, f, n_experts, 2 * ff, dim), down = matrix(b, f, n_experts, dim, ff);
    float *a = floats(b, (size_t)TOKENS * dim), *out = floats(b, (size_t)TOKENS * dim),
          *weight = floats(b, (size_t)TOKENS * top_k);
    int32_t *expert = (int32_t *)floats(b, (size_t)TOKENS * top_k);
    struct dn_experts e = {a, expert, weight, top_k, &gate_up, &down, NULL, out};
    static const uint32_t n_tokens[] = {1, 2, 16, 256};
    for (size_t i = 0; i < sizeof n_tokens / sizeof *n_tokens; i++) {
        uint32_t n = n_tokens[i], used = n * top_k < n_experts ? n * top_k : n_experts;
        char name[96];
        for (uint32_t k = 0; k < n * top_k; k++)
            expert[k] = (int32_t)(k % n_experts);
        fill_step(b, n > SEQS ? 1 : n, n > SEQS ? n : 1, n > SEQS ? n : 64, DN_KV_BF16);
        snprintf(name, sizeof name, "experts %u x %u of %u, %u x %u, %s", n, top_k, n_experts, dim, ff,
                 dn_weight_format_name(f));
        run(b, &(struct one){name, (double)(gate_up.bytes + down.bytes) / n_experts * used, 3.0 * n * top_k * dim * ff,
                             call_experts, &e});
    }
    b->ops->free(b->d, gate_up.data);
    b->ops->free(b->d, down.data);
}

static void route_cases(struct bench *b)
{
    float *logits = floats(b, (size_t)TOKENS * 384), *bias = floats(b, 384), *weight = floats(b, TOKENS * 8);
    int32_t *expert = (int32_t *)floats(b, TOKENS * 8);
    struct dn_route r = {logits, bias, 384, 8, 1, 1, true, 2.8f, expert, weight};
    fill_step(b, 1, 1, 64, DN_KV_BF16);
    run(b, &(struct one){"route 1, 8 of 384", 384 * 4, 0, call_route, &r});
    fill_step(b, 16, 1, 64, DN_KV_BF16);
    run(b, &(struct one){"route 16, 8 of 384", 16 * 384 * 4, 0, call_route, &r});
}

int main(int argc, char **argv)
{
    struct bench b = {.seconds = 0.1};
    struct dn_device_conf conf = {
        .n_threads = 1,
        .limits = {.tokens = TOKENS, .seqs = SEQS, .rows = SEQS, .pages = 2 * SEQS * CONTEXT / PAGE},
        .n_slots = 1,
        .n_vocab = 16};
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--threads") == 0)
            conf.n_threads = (unsigned)atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--isa") == 0)
            conf.isa = argv[i + 1];
        else if (strcmp(argv[i], "--ms") == 0)
            b.seconds = atof(argv[i + 1]) / 1000;
    }
    struct dn_err err = {0};
    if (dn_kernels_open_cpu(&conf, &b.d, &err)) {
        fprintf(stderr, "bench_mla: %s\n", err.text);
        return 1;
    }
    b.ops = b.d->ops;
    b.s = b.ops->step_arrays(b.d);
    b.n_threads = conf.n_threads ? conf.n_threads : 1;
    if (b.n_threads > 1)
        clock_id = CLOCK_MONOTONIC;
    char text[200];
    b.ops->describe(b.d, text, sizeof text);
    dn_kv_layout_init_mla(&b.layout, 1, LATENT, ROPE, PAGE, 1 << 20);
    size_t arena = (size_t)(SEQS * CONTEXT / PAGE + 64) * b.layout.format[DN_KV_BF16].page_bytes;
    b.arena = b.ops->alloc(b.d, arena);
    for (size_t i = 0; i < arena / 2; i++) /* small numbers as bf16, as codes and as scales */
        ((uint16_t *)b.arena)[i] = (uint16_t)(0x3c00 + i % 0x80);
    b.arena_bytes = arena;
    struct ceiling top = {0, 0};
    for (int i = 0; i < 20; i++)
        measure(&b, &top);
    printf("%s; one thread reads %.1f GB/s, multiplies %.1f GFMA/s\n", text, top.bytes / 1e9, top.products / 1e9);
    attention_cases(&b, 64);
    attention_cases(&b, 4);
    expert_cases(&b, 12, 8, 7168, 2048, DN_W_INT4);
    expert_cases(&b, 32, 4, 512, 256, DN_W_INT4);
    expert_cases(&b, 32, 4, 512, 256, DN_W_BF16);
    route_cases(&b);
    b.ops->close(b.d);
    return 0;
}
