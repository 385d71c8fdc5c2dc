/* Speed of the engine alone: a prompt and a decode run straight on the runner, without scheduler, cache policy or HTTP.
 *
 *   bench_engine MODEL [THREADS] [WEIGHTS] [KV]
 *
 * Prints tokens a second of a prompt of 512 in one chunk, of 128 decode steps behind it for 1 and 16 sequences, each
 * the best of three, and the time of each operation within a step. The times of operations come from a run of their
 * own, with a clock around each call: it makes the step a little slower than the figures above it.
 */
#include "base/buf.h"
#include "engine/runner.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { PROMPT = 512, STEPS = 128, MAX_SEQS = 16 };
enum op {
    EMBED,
    RMSNORM,
    MATMUL_QKV,
    MATMUL_O,
    MATMUL_FF,
    MATMUL_DOWN,
    MATMUL_HEAD,
    QKV_WRITE,
    ATTENTION,
    SILU,
    SAMPLE,
    BEGIN,
    OPS
};
static const char *const OP_NAME[OPS] = {"embed",          "rmsnorm",     "matmul qkv",  "matmul o",
                                         "matmul gate|up", "matmul down", "matmul head", "qkv_write",
                                         "attention",      "silu_mul",    "sample_rows", "step_begin"};

static uint64_t spent_ns[OPS];
static const struct dn_kernels *real;
static const struct dn_weights *weights;
static clockid_t clock_id = CLOCK_MONOTONIC;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(clock_id, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#define TIMED(op, call)                                                                                                \
    do {                                                                                                               \
        uint64_t begin_ns = now_ns();                                                                                  \
        call;                                                                                                          \
        spent_ns[op] += now_ns() - begin_ns;                                                                           \
    } while (0)

static void timed_embed(struct dn_device *d, const struct dn_embed *p)
{
    TIMED(EMBED, real->embed(d, p));
}

static void timed_rmsnorm(struct dn_device *d, const struct dn_rmsnorm *p)
{
    TIMED(RMSNORM, real->rmsnorm(d, p));
}

static void timed_matmul(struct dn_device *d, const struct dn_matmul *p)
{
    const struct dn_layer_weights *l = weights->layer;
    enum op op = p->out_f32                                                         ? MATMUL_HEAD
                 : p->w->n_out == l->gate_up.n_out && p->w->n_in == l->gate_up.n_in ? MATMUL_FF
                 : p->w->n_in == l->down.n_in && p->w->n_out == l->down.n_out       ? MATMUL_DOWN
                 : p->w->n_out == l->qkv.n_out                                      ? MATMUL_QKV
                                                                                    : MATMUL_O;
    TIMED(op, real->matmul(d, p));
}

static void timed_qkv_write(struct dn_device *d, const struct dn_qkv_write *p)
{
    TIMED(QKV_WRITE, real->qkv_write(d, p));
}

static void timed_attention(struct dn_device *d, const struct dn_attention *p)
{
    TIMED(ATTENTION, real->attention(d, p));
}

static void timed_silu_mul(struct dn_device *d, const struct dn_silu_mul *p)
{
    TIMED(SILU, real->silu_mul(d, p));
}

static void timed_sample_rows(struct dn_device *d, const struct dn_sample_rows *p)
{
    TIMED(SAMPLE, real->sample_rows(d, p));
}

static bool timed_step_begin(struct dn_device *d, uint32_t list)
{
    bool call = true;
    TIMED(BEGIN, call = real->step_begin(d, list));
    return call;
}

/* n tokens each of `seqs` sequences, all at position `at`; every sequence has pages of its own. */
static void fill(struct dn_runner *r, enum dn_kv_format kv, uint32_t seqs, uint32_t at, uint32_t n)
{
    struct dn_step *s = dn_runner_arrays(r);
    const struct dn_kv_layout *l = &r->layout;
    uint32_t in_slab = l->format[kv].pages_per_slab, per_seq = (PROMPT + STEPS) / l->page_tokens + 1;
    uint32_t n_pages = (at + n + l->page_tokens - 1) / l->page_tokens, token = 0, page = 0;
    s->token_start[0] = s->page_start[0] = 0;
    for (uint32_t q = 0; q < seqs; q++) {
        for (uint32_t i = 0; i < n; i++, token++) {
            s->token_id[token] = (int32_t)((at + i) * 37 + q * 11 + 1) % (int32_t)weights->model->hyper.n_vocab;
            s->position[token] = (int32_t)(at + i);
            s->token_seq[token] = (int32_t)q;
            s->token_count[token] = 0;
        }
        s->row_token[q] = (int32_t)token - 1;
        s->sample[q] = (struct dn_sample){.top_p = 1, .repetition = 1, .slot = -1, .target = -1, .n_top = -1};
        s->token_start[q + 1] = (int32_t)token;
        s->kv_len[q] = (int32_t)(at + n);
        s->slot[q] = -1;
        s->kv_format[q] = (uint8_t)kv;
        s->check[q] = 0;
        for (uint32_t i = 0; i < n_pages; i++, page++) {
            uint32_t k = q * per_seq + i;
            s->page[page] = k / in_slab * l->slab_pages + k % in_slab;
            s->tag[page] = 0;
        }
        s->page_start[q + 1] = (int32_t)page;
    }
    s->n_tokens = token;
    s->n_seqs = s->n_rows = seqs;
}

static void step(struct dn_runner *r, enum dn_kv_format kv, uint32_t seqs, uint32_t at, uint32_t n)
{
    fill(r, kv, seqs, at, n);
    if (dn_runner_step(r, NULL) != 0)
        abort();
}

static void prefill(struct dn_runner *r, enum dn_kv_format kv, uint32_t seqs)
{
    (void)seqs;
    step(r, kv, 1, 0, PROMPT);
}

static void decode(struct dn_runner *r, enum dn_kv_format kv, uint32_t seqs)
{
    for (uint32_t i = 0; i < STEPS; i++)
        step(r, kv, seqs, PROMPT + i, 1);
}

static void measure(struct dn_runner *r, const char *what, void (*run)(struct dn_runner *, enum dn_kv_format, uint32_t),
                    enum dn_kv_format kv, uint32_t seqs, uint32_t tokens)
{
    double best = 1e9;
    for (int i = 0; i < 3; i++) {
        uint64_t begin = now_ns();
        run(r, kv, seqs);
        double s = (double)(now_ns() - begin) / 1e9;
        best = s < best ? s : best;
    }
    printf("%-28s %9.1f tok/s\n", what, tokens / best);
    struct dn_kernels timed = *real;
    timed.embed = timed_embed;
    timed.rmsnorm = timed_rmsnorm;
    timed.matmul = timed_matmul;
    timed.qkv_write = timed_qkv_write;
    timed.attention = timed_attention;
    timed.silu_mul = timed_silu_mul;
    timed.sample_rows = timed_sample_rows;
    timed.step_begin = timed_step_begin;
    memset(spent_ns, 0, sizeof spent_ns);
    r->device->ops = &timed;
    run(r, kv, seqs);
    r->device->ops = real;
    uint64_t sum = 0;
    for (int i = 0; i < OPS; i++)
        sum += spent_ns[i];
    for (int i = 0; i < OPS; i++)
        printf("    %-16s %9.3f ms %5.1f %%\n", OP_NAME[i], (double)spent_ns[i] / 1e6,
               100.0 * (double)spent_ns[i] / (double)sum);
}

int main(int argc, char **argv)
{
    struct dn_err err = {0};
    struct dn_model *model;
    struct dn_device *device;
    struct dn_weights *w;
    struct dn_runner *r;
    int format = DN_WEIGHTS_AUTO;
    enum dn_kv_format kv = DN_KV_BF16;
    if (argc < 2 || (argc > 3 && dn_weights_format_parse(argv[3], &format) != 0) ||
        (argc > 4 && dn_kv_format_parse(argv[4], &kv) != 0)) {
        fprintf(stderr, "usage: %s MODEL [THREADS] [auto|bf16|fp8|int8|int4] [bf16|fp8]\n", argv[0]);
        return 2;
    }
    struct dn_step_limits limits = {.tokens = PROMPT, .seqs = MAX_SEQS, .rows = MAX_SEQS, .pages = 4096};
    struct dn_device_conf dc = {.n_threads = argc > 2 ? (unsigned)strtoul(argv[2], NULL, 10) : 0, .limits = limits};
    struct dn_weights_conf wc = {.format = format};
    struct dn_runner_conf rc = {.limits = limits, .arena_bytes = 1ull << 30};
    int code = dn_model_open(argv[1], &model, &err);
    dc.n_vocab = code == 0 ? model->hyper.n_vocab : 0;
    uint64_t begin = now_ns();
    if (code != 0 || dn_kernels_open_cpu(&dc, &device, &err) != 0 ||
        dn_weights_open(device, model, &wc, &w, &err) != 0 || dn_runner_open(device, w, &rc, &r, &err) != 0) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    uint64_t loaded_ns = now_ns() - begin;
    real = device->ops;
    weights = w;
    if (dc.n_threads == 1)
        clock_id = CLOCK_THREAD_CPUTIME_ID;
    char text[256];
    real->describe(device, text, sizeof text);
    printf("%s on %s\nweights %s (%.1f MB), kv %s, loaded in %.0f ms\n", model->name, text,
           dn_weights_format_name(format), (double)w->bytes / 1e6, dn_kv_format_name(kv), (double)loaded_ns / 1e6);
    measure(r, "prefill 512", prefill, kv, 1, PROMPT);
    measure(r, "decode 1 sequence", decode, kv, 1, STEPS);
    measure(r, "decode 16 sequences", decode, kv, MAX_SEQS, STEPS * MAX_SEQS);
    dn_runner_close(r);
    dn_weights_close(w);
    real->close(device);
    dn_model_close(model);
    return 0;
}
