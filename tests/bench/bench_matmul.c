/* Speed of the CPU matmuls: bench_matmul [--threads N] [--isa NAME] [--ms MILLISECONDS] [--all].
 *
 * Before each round of a case it measures how fast this machine reads memory with as many threads, and prints the best
 * round of each: other work on the machine only ever makes a round slower. GB/s counts the packed weights once a call;
 * up to 16 rows, the weights are copied often enough that no call finds them in a cache. */
#include "base/buf.h"
#include "kernels/cpu/device.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { COLD_BYTES = 160 << 20, ROUNDS = 7 };

static double now(void)
{
    struct timespec ts;
    clock_gettime(CLOCK_MONOTONIC, &ts);
    return (double)ts.tv_sec + 1e-9 * (double)ts.tv_nsec;
}

static void *big_alloc(size_t bytes)
{
    enum { HUGE_PAGE = 2 << 20 };
    bytes = (bytes + HUGE_PAGE - 1) / HUGE_PAGE * HUGE_PAGE;
    void *p = aligned_alloc(HUGE_PAGE, bytes);
    if (!p) {
        fprintf(stderr, "bench_matmul: no memory for %zu bytes\n", bytes);
        exit(1);
    }
    madvise(p, bytes, MADV_HUGEPAGE);
    memset(p, 1, bytes);
    return p;
}

/* ---- Reading ---- */

/* Bytes a second of the best piece of 4 MiB of one pass, or `best` if that is more. */
static double read_ceiling(struct dn_threads *t, const void *p, size_t bytes, double best)
{
    enum { PIECE = 4 << 20 };
    for (size_t at = 0; at + PIECE <= bytes; at += PIECE) {
        double speed = dn_cpu_read_piece(t, (const char *)p + at, PIECE);
        best = speed > best ? speed : best;
    }
    return best;
}

/* ---- Cases ---- */

struct bench_case {
    const char *name;
    enum dn_weight_format format;
    bool symmetric;
    uint32_t n_out, n_in;
    size_t m;
    struct dn_matrix w;
    size_t n_copies, next;
    uint8_t *copies;
    float *a, *out;
    double best; /* seconds a call */
};

static void prepare(struct bench_case *c)
{
    c->w = (struct dn_matrix){.format = c->format, .n_out = c->n_out, .n_in = c->n_in, .symmetric = c->symmetric};
    c->w.bytes = dn_cpu_matrix_bytes(&c->w);
    c->n_copies = c->m > 16 ? 1 : COLD_BYTES / c->w.bytes + 1;
    c->copies = big_alloc(c->n_copies * c->w.bytes);
    float *w = dn_alloc0((size_t)c->n_out * c->n_in, sizeof *w);
    for (size_t i = 0; i < (size_t)c->n_out * c->n_in; i++)
        w[i] = (float)((i * 2654435761u >> 8) % 2001) / 1000.0F - 1;
    struct dn_rows rows = {.f32 = w};
    c->w.data = c->copies;
    if (dn_cpu_matrix_pack(&c->w, 0, c->n_out, &rows)) {
        fprintf(stderr, "bench_matmul: %s %u x %u can't be packed\n", c->name, c->n_out, c->n_in);
        exit(1);
    }
    free(w);
    for (size_t i = 1; i < c->n_copies; i++)
        memcpy(c->copies + i * c->w.bytes, c->copies, c->w.bytes);
    c->a = dn_alloc0(c->m * c->n_in, sizeof *c->a);
    for (size_t i = 0; i < c->m * c->n_in; i++)
        c->a[i] = (float)((i * 40503u >> 4) % 2001) / 1000.0F - 1;
    c->out = dn_alloc0(c->m * c->n_out, sizeof *c->out);
    c->best = 1e9;
}

/* Calls for about `seconds`, timed in groups of half a millisecond or more. */
static void measure(const struct dn_cpu_exec *x, struct bench_case *c, double seconds)
{
    double end = now() + seconds;
    size_t group = 1;
    do {
        double start = now();
        for (size_t i = 0; i < group; i++) {
            c->w.data = c->copies + c->next * c->w.bytes;
            c->next = (c->next + 1) % c->n_copies;
            dn_cpu_matmul(x, c->a, c->m, &c->w, NULL, c->out);
        }
        double each = (now() - start) / (double)group;
        if (each * (double)group < 0.0005)
            group *= 2;
        else
            c->best = each < c->best ? each : c->best;
    } while (now() < end);
}

static void report(const struct bench_case *c, double ceiling)
{
    double bytes = (double)c->w.bytes, ops = 2.0 * (double)c->m * c->n_out * c->n_in;
    printf("%-9s %6u x %-5u m %-4zu %10.1f us %7.2f GB/s %5.0f %% of reading %8.1f GOP/s\n", c->name, c->n_out, c->n_in,
           c->m, c->best * 1e6, bytes / c->best * 1e-9, 100 * bytes / c->best / ceiling, ops / c->best * 1e-9);
}

static const struct {
    const char *name;
    enum dn_weight_format format;
    bool symmetric;
} formats[] = {{"int4", DN_W_INT4, false},
               {"int4 sym", DN_W_INT4, true},
               {"int8", DN_W_INT8, false},
               {"fp8", DN_W_FP8, false},
               {"bf16", DN_W_BF16, false}};

/* The shapes of SmolLM2-135M: q|k|v, o, gate|up, down; its head. */
static const uint32_t shapes[][2] = {{960, 576}, {576, 576}, {3072, 576}, {576, 1536}, {49152, 576}};
static const size_t heights[] = {1, 2, 4, 8, 16, 64, 512};
enum { N_FORMATS = sizeof formats / sizeof *formats, N_SHAPES = 5, HEAD = 4, N_HEIGHTS = 7 };

/* Without `all`: 1, 16 and 512 rows; every shape in INT4, gate|up in the others, and the head in INT8. */
static bool is_usual(size_t format, size_t shape, size_t m)
{
    if (m != 1 && m != 16 && m != 512)
        return false;
    if (shape == HEAD)
        return formats[format].format == DN_W_INT8;
    return format == 0 || shape == 2;
}

static size_t list_cases(struct bench_case *out, bool all)
{
    size_t n = 0;
    for (size_t i = 0; i < (size_t)N_FORMATS * N_SHAPES * N_HEIGHTS; i++) {
        size_t f = i / (N_SHAPES * N_HEIGHTS), s = i / N_HEIGHTS % N_SHAPES, m = heights[i % N_HEIGHTS];
        if ((all || is_usual(f, s, m)) && !(s == HEAD && m > 16))
            out[n++] = (struct bench_case){.name = formats[f].name,
                                           .format = formats[f].format,
                                           .symmetric = formats[f].symmetric,
                                           .n_out = shapes[s][0],
                                           .n_in = shapes[s][1],
                                           .m = m};
    }
    return n;
}

struct options {
    unsigned n_threads;
    const char *isa;
    double ms;
    bool all;
};

static bool parse_options(int argc, char **argv, struct options *o)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc)
            o->n_threads = (unsigned)strtoul(argv[++i], NULL, 10);
        else if (strcmp(argv[i], "--isa") == 0 && i + 1 < argc)
            o->isa = argv[++i];
        else if (strcmp(argv[i], "--ms") == 0 && i + 1 < argc)
            o->ms = strtod(argv[++i], NULL);
        else if (strcmp(argv[i], "--all") == 0)
            o->all = true;
        else
            return false;
    }
    return true;
}

int main(int argc, char **argv)
{
    static struct bench_case cases[N_FORMATS * N_SHAPES * N_HEIGHTS];
    struct options o = {1, "auto", 100, false};
    if (!parse_options(argc, argv, &o)) {
        fprintf(stderr, "usage: bench_matmul [--threads N] [--isa NAME] [--ms MILLISECONDS] [--all]\n");
        return 2;
    }
    struct dn_err err = {0};
    struct dn_cpu_exec x;
    if (dn_isa_parse(o.isa, &x.isa, &err) || dn_threads_open(o.n_threads, NULL, &x.threads, &err)) {
        fprintf(stderr, "bench_matmul: %s\n", err.text);
        return 1;
    }
    x.scratch = big_alloc(DN_CPU_MATMUL_SCRATCH);
    size_t n = list_cases(cases, o.all), read_bytes = 256 << 20;
    void *mem = big_alloc(read_bytes);
    double ceiling = 0;
    for (size_t i = 0; i < n; i++) { /* one case's memory at a time */
        prepare(&cases[i]);
        for (int r = 0; r < ROUNDS; r++) {
            ceiling = read_ceiling(x.threads, mem, read_bytes, ceiling);
            measure(&x, &cases[i], o.ms * 1e-3 / ROUNDS);
        }
        free(cases[i].copies);
        free(cases[i].a);
        free(cases[i].out);
    }
    printf("%s, %u threads; reading memory: %.1f GB/s\n", dn_isa_name(x.isa), dn_threads_count(x.threads),
           ceiling * 1e-9);
    for (size_t i = 0; i < n; i++)
        report(&cases[i], ceiling);
    dn_threads_close(x.threads);
    free(x.scratch);
    free(mem);
    return 0;
}
