/* dunlin bench kernels: the operations of a decode step one by one, through kernels.h alone.
 *
 * An operation is called many times in one step, on weights or cache layers in turn that are too many for any cache,
 * and once more with a quarter of the calls: the difference is what calls take, without the start of a step. */
#include "cli/bench_steps.h"

#include "base/buf.h"
#include "base/clock.h"
#include "cli/args.h"
#include "cli/bench_table.h"
#include "cli/cli.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] = "dunlin bench kernels   the operations of a decode step, one by one\n"
                            "\n"
                            "GB: what an operation must read and write; % : of the rate at which memory can be read, "
                            "measured first. Lists are\n"
                            "separated by commas.\n";

enum { MAX_COPIES = 32, MAX_CALLS = 48, COLD_BYTES = 256 << 20, STEPS = 15, WARM = 3, CHUNK = 128 };

struct shapes {
    const char *name;
    uint32_t dim, ff, n_vocab, n_heads;
    uint32_t n_kv_heads, head_dim;              /* GQA */
    uint32_t q_lora, latent, nope, rope, v_dim; /* MLA */
    uint32_t n_experts, top, expert_ff;
};
static const struct shapes known[] = {
    {"kimi-k2", 7168, 18432, 163840, 64, 0, 0, 1536, 512, 128, 64, 128, 384, 8, 2048},
    {"llama-8b", 4096, 14336, 128256, 32, 8, 128, 0, 0, 0, 0, 0, 0, 0, 0},
    {"small-mla", 256, 384, 1024, 4, 0, 0, 128, 128, 64, 32, 64, 16, 4, 128},
    {"small-gqa", 256, 512, 1024, 4, 2, 64, 0, 0, 0, 0, 0, 0, 0, 0},
};

struct bench {
    struct dn_device *d;
    const struct dn_kernels *ops;
    struct dn_step *s;
    const struct shapes *shape;
    struct dn_bench_table table;
    const char *filter;
    double read_rate;
    uint32_t batch, context;
    uint64_t random;
    unsigned n_threads;
    uint8_t *noise;        /* NOISE bytes on the host: finite as bf16, e4m3 and (positive) f32 */
    void *in, *out, *more; /* device, IO_BYTES a token of the largest batch, noise */
    void (*call)(struct bench *b, uint32_t copy);
    uint32_t n_copies, n_calls; /* of the step being prepared or run */
    bool preparing;
    uint32_t n_rows; /* reported */

    /* Of the case at hand. */
    struct dn_matrix w[MAX_COPIES], w2;
    struct dn_kv_layout layout;
    void *arena;
    int32_t *expert;
    float *vector, *rope, *weight;
    uint64_t *tags;
    uint32_t n_pages, fused;
    bool out_f32;
};
enum { NOISE = 16 << 20, IO_BYTES = 1 << 20 }; /* of activations: a token */

/* ---- Weights ---- */

struct packing {
    struct bench *b;
    struct dn_matrix *m;
    uint32_t n_rows;
    atomic_uint next;
    atomic_int code;
    uint16_t *scale; /* bf16, small */
    float *block;
};

static void *pack_rows(void *arg)
{
    struct packing *p = arg;
    const uint8_t *noise = p->b->noise;
    for (uint32_t row; (row = atomic_fetch_add(&p->next, CHUNK)) < p->n_rows;) {
        uint32_t n = p->n_rows - row < CHUNK ? p->n_rows - row : CHUNK;
        struct dn_rows rows = {0};
        size_t at = (row * 4096u) % (NOISE / 4) & ~(size_t)63; /* other noise for other rows */
        if (p->m->format == DN_W_INT4)
            rows = (struct dn_rows){.q4 = noise + at, .scale16 = p->scale};
        else if (p->m->format == DN_W_FP8)
            rows = (struct dn_rows){.fp8 = noise + at, .block_scale = p->block};
        else
            rows = (struct dn_rows){.bf16 = (const uint16_t *)(const void *)(noise + at)};
        int code = p->b->ops->matrix_pack(p->b->d, p->m, row, n, &rows);
        if (code != 0)
            atomic_store(&p->code, code);
    }
    return NULL;
}

/* A matrix of noise; false: this backend has none such, or no memory for it. */
static bool make_matrix(struct bench *b, struct dn_matrix *m, enum dn_weight_format f, uint32_t n_out, uint32_t n_in,
                        uint32_t n_groups)
{
    *m = (struct dn_matrix){.format = f,
                            .n_out = n_out,
                            .n_in = n_in,
                            .n_groups = n_groups,
                            .symmetric = f == DN_W_INT4,
                            .scale_is_bf16 = f == DN_W_INT4};
    size_t need = (size_t)CHUNK * n_in * 2;
    m->bytes = need > NOISE / 2 ? 0 : b->ops->matrix_bytes(m);
    m->data = m->bytes ? b->ops->alloc(b->d, m->bytes) : NULL;
    if (!m->data)
        return false;
    struct packing p = {.b = b, .m = m, .n_rows = n_groups > 1 ? n_groups * n_out : n_out};
    size_t n_scale = (size_t)CHUNK * (n_in / 32 + 1), n_block = n_in / 128 + 2;
    p.scale = dn_alloc0(n_scale, sizeof *p.scale);
    p.block = dn_alloc0(n_block, sizeof *p.block);
    for (size_t i = 0; i < n_scale; i++)
        p.scale[i] = 0x3b80; /* 2^-8 */
    for (size_t i = 0; i < n_block; i++)
        p.block[i] = 0x1p-14f;
    pthread_t thread[32];
    unsigned n = 0;
    while (n + 1 < b->n_threads && n < 32 && p.n_rows > 4 * CHUNK &&
           pthread_create(&thread[n], NULL, pack_rows, &p) == 0)
        n++;
    pack_rows(&p);
    for (unsigned i = 0; i < n; i++)
        pthread_join(thread[i], NULL);
    free(p.scale);
    free(p.block);
    return p.code == 0;
}

static void free_case(struct bench *b)
{
    for (int i = 0; i < MAX_COPIES; i++)
        if (b->w[i].data)
            b->ops->free(b->d, b->w[i].data);
    void *p[] = {b->w2.data, b->arena, b->expert, b->vector, b->rope, b->weight, b->tags};
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if (p[i])
            b->ops->free(b->d, p[i]);
    memset(b->w, 0, sizeof b->w);
    memset(&b->w2, 0, sizeof b->w2);
    b->arena = NULL;
    b->expert = NULL;
    b->vector = b->rope = b->weight = NULL;
    b->tags = NULL;
    b->out_f32 = false;
}

/* ---- Measuring ---- */

static void call_all(struct bench *b)
{
    /* Of what is recorded for other batches nothing is needed, and of what is measured one call tells all. */
    bool other = b->preparing && (b->s->kind != DN_STEP_DECODE || b->s->n_seqs != b->batch);
    for (uint32_t i = 0; i < (other ? 1 : b->n_calls); i++)
        b->call(b, i % b->n_copies);
}

static int prepare(struct bench *b, uint32_t list, uint32_t n_calls, struct dn_err *err)
{
    int code;
    b->n_calls = n_calls;
    b->preparing = true;
    while ((code = b->ops->prepare(b->d, list, err)) > 0) {
        call_all(b);
        b->ops->step_end(b->d);
    }
    b->preparing = false;
    return code;
}

static int time_step(struct bench *b, uint32_t list, uint32_t n_calls, double *us, struct dn_err *err)
{
    b->n_calls = n_calls;
    b->s->kind = DN_STEP_DECODE;
    b->s->n_tokens = b->s->n_seqs = b->s->n_rows = b->batch;
    b->s->n_tags = b->s->tag_first = 0;
    uint64_t start = dn_now_ns();
    if (b->ops->step_begin(b->d, list))
        call_all(b);
    b->ops->step_end(b->d);
    int code = b->ops->step_wait(b->d, err);
    *us = (double)(dn_now_ns() - start) * 1e-3;
    return code;
}

/* bytes: of one call, on average. */
static int report(struct bench *b, const char *op, const char *what, double bytes, struct dn_err *err)
{
    double each[STEPS];
    uint32_t n = (uint32_t)(COLD_BYTES / (bytes + 1)) + 1;
    n = n < 8 ? 8 : n > MAX_CALLS ? MAX_CALLS : n;
    n = bytes > 1e9 ? 4 : n;
    int code = prepare(b, 1, n, err);
    if (code == 0)
        code = prepare(b, 2, n / 4, err);
    for (int i = -WARM; i < STEPS && code == 0; i++) {
        const uint32_t between = n - n / 4;
        const double n_between = between;
        double many, few;
        code = time_step(b, 1, n, &many, err);
        if (code == 0)
            code = time_step(b, 2, n / 4, &few, err);
        if (code == 0 && i >= 0)
            each[i] = (many - few) / n_between;
    }
    if (code != 0)
        return code;
    double us = dn_bench_quantile(each, STEPS, 0.5);
    b->n_rows++;
    struct dn_bench_table *t = &b->table;
    dn_bench_text(t, b->shape->name);
    dn_bench_text(t, op);
    dn_bench_text(t, what);
    dn_bench_number(t, 0, b->batch);
    dn_bench_number(t, 4, bytes * 1e-9);
    dn_bench_number(t, 2, us);
    dn_bench_number(t, 2, dn_bench_quantile(each, STEPS, 0.1));
    dn_bench_number(t, 2, dn_bench_quantile(each, STEPS, 0.9));
    dn_bench_number(t, 3, bytes / us * 1e-6);
    dn_bench_number(t, 1, b->read_rate > 0 ? bytes / (us * 1e-6) / b->read_rate * 100 : NAN);
    return 0;
}

static bool wanted(const struct bench *b, const char *op)
{
    return !b->filter || strstr(op, b->filter);
}

static void skip(const struct bench *b, const char *op, const char *what)
{
    printf("# %s %s %s: not on this backend, or no memory for it\n", b->shape->name, op, what);
}

static uint32_t copies_for(double bytes)
{
    uint32_t n = (uint32_t)(COLD_BYTES / bytes) + 1;
    return n < MAX_COPIES ? n : MAX_COPIES;
}

/* ---- Matrices ---- */

static void call_matmul(struct bench *b, uint32_t i)
{
    b->ops->matmul(b->d, &(struct dn_matmul){.a = b->in, .w = &b->w[i], .out = b->out, .out_f32 = b->out_f32});
}

static int bench_matmul(struct bench *b, const char *name, enum dn_weight_format f, uint32_t n_out, uint32_t n_in,
                        bool out_f32, struct dn_err *err)
{
    char what[64];
    snprintf(what, sizeof what, "%s %s %ux%u", name, dn_weight_format_name(f), n_out, n_in);
    if (!wanted(b, "matmul"))
        return 0;
    bool ok = make_matrix(b, &b->w[0], f, n_out, n_in, 1);
    b->n_copies = ok ? copies_for((double)b->w[0].bytes) : 0;
    for (uint32_t i = 1; i < b->n_copies && ok; i++)
        ok = make_matrix(b, &b->w[i], f, n_out, n_in, 1);
    b->call = call_matmul;
    b->out_f32 = out_f32;
    double act = (double)b->ops->act_bytes;
    int code = 0;
    if (ok)
        code = report(b, "matmul", what, (double)b->w[0].bytes + b->batch * (n_in * act + n_out * (out_f32 ? 4 : act)),
                      err);
    else
        skip(b, "matmul", what);
    free_case(b);
    return code;
}

static void call_group(struct bench *b, uint32_t i)
{
    const struct dn_matrix *w = &b->w[i];
    b->ops->group_matmul(b->d, &(struct dn_group_matmul){.a = b->in,
                                                         .a_stride = w->n_groups * w->n_in,
                                                         .a_group_stride = w->n_in,
                                                         .w = w,
                                                         .out = b->out,
                                                         .out_stride = w->n_groups * w->n_out,
                                                         .out_group_stride = w->n_out});
}

static int bench_group(struct bench *b, const char *name, uint32_t n_groups, uint32_t n_out, uint32_t n_in,
                       struct dn_err *err)
{
    char what[64];
    snprintf(what, sizeof what, "%s bf16 %u of %ux%u", name, n_groups, n_out, n_in);
    if (!wanted(b, "group_matmul"))
        return 0;
    bool ok = make_matrix(b, &b->w[0], DN_W_BF16, n_out, n_in, n_groups);
    b->n_copies = ok ? copies_for((double)b->w[0].bytes) : 0;
    for (uint32_t i = 1; i < b->n_copies && ok; i++)
        ok = make_matrix(b, &b->w[i], DN_W_BF16, n_out, n_in, n_groups);
    b->call = call_group;
    double io = (double)b->ops->act_bytes * b->batch * n_groups * (n_in + n_out);
    int code = 0;
    if (ok)
        code = report(b, "group_matmul", what, (double)b->w[0].bytes + io, err);
    else
        skip(b, "group_matmul", what);
    free_case(b);
    return code;
}

static void call_experts(struct bench *b, uint32_t i)
{
    b->ops->experts(b->d, &(struct dn_experts){.a = b->in,
                                               .expert = b->expert,
                                               .weight = b->weight,
                                               .top_k = b->shape->top,
                                               .gate_up = &b->w[i],
                                               .down = &b->w2,
                                               .out = b->out});
}

/* Random experts of each token, no one twice. Returns how many are chosen at all. */
static uint32_t choose_experts(struct bench *b)
{
    const struct shapes *s = b->shape;
    size_t n = (size_t)b->batch * s->top;
    int32_t *e = dn_alloc0(n, sizeof *e);
    float *w = dn_alloc0(n, sizeof *w);
    uint8_t *used = dn_alloc0(s->n_experts, 1);
    uint32_t n_used = 0;
    for (size_t i = 0; i < n; i++) {
        bool again;
        do {
            e[i] = (int32_t)(dn_bench_random(&b->random) % s->n_experts);
            again = false;
            for (size_t k = i / s->top * s->top; k < i; k++)
                again = again || e[k] == e[i];
        } while (again);
        w[i] = 1.0f / (float)s->top;
        n_used += !used[e[i]];
        used[e[i]] = 1;
    }
    b->expert = b->ops->alloc(b->d, n * sizeof *e);
    b->weight = b->ops->alloc(b->d, n * sizeof *w);
    b->ops->upload(b->d, b->expert, e, n * sizeof *e);
    b->ops->upload(b->d, b->weight, w, n * sizeof *w);
    free(e);
    free(w);
    free(used);
    return n_used;
}

static int bench_experts(struct bench *b, enum dn_weight_format f, const uint32_t *batch, size_t n_batch,
                         struct dn_err *err)
{
    const struct shapes *s = b->shape;
    int code = 0;
    if (!wanted(b, "experts"))
        return 0;
    b->n_copies = 1;
    b->call = call_experts;
    bool ok = make_matrix(b, &b->w[0], f, 2 * s->expert_ff, s->dim, s->n_experts) &&
              make_matrix(b, &b->w2, f, s->dim, s->expert_ff, s->n_experts);
    for (size_t i = 0; i < n_batch && code == 0; i++) { /* packed once: it is the largest of all */
        char what[64];
        b->batch = batch[i];
        if (!ok) {
            skip(b, "experts", dn_weight_format_name(f));
            break;
        }
        uint32_t n_used = choose_experts(b);
        snprintf(what, sizeof what, "%s %u of %u top %u", dn_weight_format_name(f), n_used, s->n_experts, s->top);
        double each = (double)(b->w[0].bytes + b->w2.bytes) / s->n_experts;
        code = report(b, "experts", what, each * n_used + 2.0 * b->batch * s->dim * (double)b->ops->act_bytes, err);
        b->ops->free(b->d, b->expert);
        b->ops->free(b->d, b->weight);
        b->expert = NULL;
        b->weight = NULL;
    }
    free_case(b);
    return code;
}

/* ---- The cache ---- */

/* Page tables of the batch: sequences of `context` tokens, pages in no order. 0: no memory for the arena. */
static bool make_cache(struct bench *b, enum dn_kv_format f, double *bytes)
{
    const struct shapes *s = b->shape;
    uint32_t page_tokens = b->ops->page_tokens ? b->ops->page_tokens : 16;
    uint32_t n_each = (b->context + page_tokens - 1) / page_tokens, n = n_each * b->batch;
    struct dn_kv_layout *l = &b->layout;
    double token = s->latent
                       ? s->latent * (f == DN_KV_FP8 ? 1.0 : 2.0) + 2.0 * s->rope + (f == DN_KV_FP8 ? 4 : 0)
                       : 2.0 * s->n_kv_heads * (s->head_dim * (f == DN_KV_FP8 ? 1.0 : 2.0) + (f == DN_KV_FP8 ? 4 : 0));
    uint32_t n_layers = copies_for(token * b->context * b->batch);
    n_layers = n_layers > 8 ? 8 : n_layers;
    int code = s->latent ? dn_kv_layout_init_mla(l, n_layers, s->latent, s->rope, page_tokens, 16 << 20)
                         : dn_kv_layout_init(l, n_layers, s->n_kv_heads, s->head_dim, page_tokens, 16 << 20);
    if (code != 0)
        return false;
    uint64_t n_slabs = (n + l->format[f].pages_per_slab - 1) / l->format[f].pages_per_slab;
    b->arena = b->ops->alloc(b->d, n_slabs * l->slab_bytes);
    if (!b->arena)
        return false;
    for (uint64_t at = 0; at < n_slabs * l->slab_bytes; at += NOISE) {
        uint64_t left = n_slabs * l->slab_bytes - at;
        b->ops->upload(b->d, (char *)b->arena + at, b->noise, left < NOISE ? left : NOISE);
    }
    b->n_pages = (uint32_t)n_slabs * l->slab_pages;
    for (uint32_t i = 0; i < n; i++)
        b->s->page[i] = i / l->format[f].pages_per_slab * l->slab_pages + i % l->format[f].pages_per_slab;
    for (uint32_t i = n; i > 1; i--) {
        uint32_t j = (uint32_t)(dn_bench_random(&b->random) % i), swap = b->s->page[i - 1];
        b->s->page[i - 1] = b->s->page[j];
        b->s->page[j] = swap;
    }
    for (uint32_t q = 0; q < b->batch; q++) {
        b->s->position[q] = (int32_t)b->context - 1;
        b->s->kv_len[q] = (int32_t)b->context;
        b->s->kv_format[q] = (uint8_t)f;
        b->s->page_start[q + 1] = (int32_t)((q + 1) * n_each);
    }
    b->n_copies = n_layers;
    *bytes = token * b->context * b->batch;
    return true;
}

static void call_attention(struct bench *b, uint32_t i)
{
    const struct shapes *s = b->shape;
    if (s->latent)
        b->ops->mla_attention(b->d, &(struct dn_mla_attention){.q = b->in,
                                                               .n_heads = s->n_heads,
                                                               .latent_dim = s->latent,
                                                               .rope_dim = s->rope,
                                                               .scale = 0.07f,
                                                               .layout = &b->layout,
                                                               .arena = b->arena,
                                                               .layer = i,
                                                               .out = b->out});
    else
        b->ops->attention(b->d, &(struct dn_attention){.q = b->in,
                                                       .q_stride = b->fused,
                                                       .n_heads = s->n_heads,
                                                       .n_kv_heads = s->n_kv_heads,
                                                       .head_dim = s->head_dim,
                                                       .scale = 0.09f,
                                                       .layout = &b->layout,
                                                       .arena = b->arena,
                                                       .layer = i,
                                                       .out = b->out});
}

static void call_write(struct bench *b, uint32_t i)
{
    const struct shapes *s = b->shape;
    if (s->latent)
        b->ops->mla_write(b->d, &(struct dn_mla_write){.kv = b->in,
                                                       .kv_stride = s->latent + s->rope,
                                                       .q = b->more,
                                                       .q_rope = (char *)b->out + s->latent * b->ops->act_bytes,
                                                       .q_rope_stride = s->n_heads * (s->latent + s->rope),
                                                       .q_rope_head_stride = s->latent + s->rope,
                                                       .n_heads = s->n_heads,
                                                       .nope_dim = s->nope,
                                                       .rope_dim = s->rope,
                                                       .latent_dim = s->latent,
                                                       .kv_norm = b->vector,
                                                       .norm_eps = 1e-6f,
                                                       .rope = b->rope,
                                                       .interleaved = true,
                                                       .layout = &b->layout,
                                                       .arena = b->arena,
                                                       .layer = i});
    else
        b->ops->qkv_write(b->d, &(struct dn_qkv_write){.qkv = b->more,
                                                       .n_heads = s->n_heads,
                                                       .n_kv_heads = s->n_kv_heads,
                                                       .head_dim = s->head_dim,
                                                       .rope = b->rope,
                                                       .rotary_dim = s->head_dim,
                                                       .layout = &b->layout,
                                                       .arena = b->arena,
                                                       .layer = i});
}

static void call_tags(struct bench *b, uint32_t i)
{
    (void)i;
    b->ops->check_tags(b->d, &(struct dn_check_tags){b->tags, b->n_pages, b->layout.page_tokens});
}

static int bench_cache(struct bench *b, enum dn_kv_format f, struct dn_err *err)
{
    const struct shapes *s = b->shape;
    const char *attention = s->latent ? "mla_attention" : "attention", *write = s->latent ? "mla_write" : "qkv_write";
    bool do_attention = wanted(b, attention), do_write = wanted(b, write), do_tags = wanted(b, "check_tags");
    char what[64];
    double bytes, act = (double)b->ops->act_bytes;
    int code = 0;
    snprintf(what, sizeof what, "%s %u tokens", dn_kv_format_name(f), b->context);
    if (!do_attention && !do_write && !do_tags)
        return 0;
    b->fused = (s->n_heads + 2 * s->n_kv_heads) * s->head_dim;
    uint32_t vector = s->latent > s->head_dim ? s->latent : s->head_dim, rope = s->latent ? s->rope : s->head_dim;
    size_t rope_bytes = (size_t)b->context * rope * sizeof(float);
    bool ok = make_cache(b, f, &bytes) && (b->vector = b->ops->alloc(b->d, vector * sizeof *b->vector)) &&
              (b->rope = b->ops->alloc(b->d, rope_bytes)) &&
              (b->tags = b->ops->alloc(b->d, b->n_pages * sizeof *b->tags));
    if (!ok)
        skip(b, attention, what);
    /* Else a device that was told of the tags of a smaller arena would take this one's ids for wild. */
    memset(b->s->check, 1, b->batch);
    if (ok) {
        b->ops->upload(b->d, b->vector, b->noise, vector * sizeof *b->vector);
        memset(b->s->tag, 0, (size_t)b->s->page_start[b->batch] * sizeof *b->s->tag);
        for (size_t at = 0; at < rope_bytes; at += NOISE)
            b->ops->upload(b->d, (char *)b->rope + at, b->noise, rope_bytes - at < NOISE ? rope_bytes - at : NOISE);
    }
    if (ok && do_attention) {
        b->call = call_attention;
        double io = b->batch * act * s->n_heads * (s->latent ? 2.0 * s->latent + s->rope : 2.0 * s->head_dim);
        code = report(b, attention, what, bytes + io, err);
    }
    if (ok && do_write && code == 0) { /* after it the cache has one token that is no noise */
        b->call = call_write;
        double io = s->latent ? s->n_heads * (double)s->rope * 2 + s->latent + s->rope : 2.0 * b->fused;
        code = report(b, write, dn_kv_format_name(f), b->batch * act * io + bytes / b->context, err);
    }
    if (ok && do_tags && code == 0) {
        b->call = call_tags;
        snprintf(what, sizeof what, "%d pages", b->s->page_start[b->batch]);
        code = report(b, "check_tags", what, 20.0 * b->s->page_start[b->batch], err);
    }
    memset(b->s->check, 0, b->batch);
    free_case(b);
    return code;
}

/* ---- The rest ---- */

static void call_rmsnorm(struct bench *b, uint32_t i)
{
    (void)i;
    b->ops->rmsnorm(
        b->d, &(struct dn_rmsnorm){
                  .x = b->more, .add = b->in, .weight = b->vector, .eps = 1e-6f, .dim = b->shape->dim, .out = b->out});
}

static void call_norm_act(struct bench *b, uint32_t i)
{
    (void)i;
    uint32_t n = b->shape->q_lora;
    b->ops->norm_act(b->d, &(struct dn_norm_act){b->in, n, b->vector, 1e-6f, n, b->out});
}

static void call_silu(struct bench *b, uint32_t i)
{
    (void)i;
    b->ops->silu_mul(b->d, &(struct dn_silu_mul){b->in, b->shape->ff, b->out});
}

static void call_route(struct bench *b, uint32_t i)
{
    (void)i;
    const struct shapes *s = b->shape;
    b->ops->route(b->d, &(struct dn_route){.logits = b->in,
                                           .n_experts = s->n_experts,
                                           .top_k = s->top,
                                           .n_groups = 1,
                                           .top_groups = 1,
                                           .normalise = true,
                                           .scale = 2.5f,
                                           .expert = b->expert,
                                           .weight = b->weight});
}

static void call_embed(struct bench *b, uint32_t i)
{
    b->ops->embed(b->d, &(struct dn_embed){&b->w[i], b->out});
}

static void call_sample(struct bench *b, uint32_t i)
{
    (void)i;
    b->ops->sample_rows(b->d, &(struct dn_sample_rows){b->in, b->shape->n_vocab, b->shape->n_vocab});
}

static int bench_rows(struct bench *b, struct dn_err *err)
{
    const struct shapes *s = b->shape;
    double act = (double)b->ops->act_bytes, n = b->batch;
    char what[64];
    int code = 0;
    b->n_copies = 1;
    b->vector = b->ops->alloc(b->d, (size_t)s->ff * sizeof *b->vector);
    if (!b->vector)
        return dn_err_set(err, DN_NO_MEMORY, "no memory for a vector of %u", s->ff);
    b->ops->upload(b->d, b->vector, b->noise, (size_t)s->ff * sizeof *b->vector);
    snprintf(what, sizeof what, "%u", s->dim);
    b->call = call_rmsnorm;
    if (wanted(b, "rmsnorm"))
        code = report(b, "rmsnorm", what, n * s->dim * (8 + 2 * act), err);
    snprintf(what, sizeof what, "%u", s->q_lora);
    b->call = call_norm_act;
    if (code == 0 && s->q_lora && wanted(b, "norm_act"))
        code = report(b, "norm_act", what, n * s->q_lora * 2 * act, err);
    snprintf(what, sizeof what, "%u", s->ff);
    b->call = call_silu;
    if (code == 0 && wanted(b, "silu_mul"))
        code = report(b, "silu_mul", what, n * s->ff * 3 * act, err);
    if (code == 0 && s->n_experts && wanted(b, "route")) {
        choose_experts(b);
        snprintf(what, sizeof what, "%u of %u", s->top, s->n_experts);
        b->call = call_route;
        code = report(b, "route", what, n * (4.0 * s->n_experts + 8.0 * s->top), err);
    }
    if (code == 0 && wanted(b, "embed") && make_matrix(b, &b->w[0], DN_W_BF16, s->n_vocab, s->dim, 1)) {
        b->call = call_embed;
        snprintf(what, sizeof what, "bf16 %u", s->dim);
        code = report(b, "embed", what, n * s->dim * 6, err);
    }
    b->call = call_sample;
    for (int k = 0; k < 3 && code == 0 && wanted(b, "sample_rows"); k++) {
        for (uint32_t i = 0; i < b->batch; i++)
            b->s->sample[i] = (struct dn_sample){.temperature = k > 0,
                                                 .top_p = k > 1 ? 0.9f : 1,
                                                 .repetition = 1,
                                                 .slot = -1,
                                                 .target = -1,
                                                 .n_top = -1,
                                                 .seed = i};
        code = report(b, "sample_rows",
                      k == 0   ? "greedy"
                      : k == 1 ? "temperature"
                               : "top-p 0.9",
                      4.0 * n * s->n_vocab, err);
    }
    free_case(b);
    return code;
}

static int bench_dense(struct bench *b, enum dn_weight_format f, struct dn_err *err)
{
    const struct shapes *s = b->shape;
    int code = 0;
    if (s->latent) {
        if (code == 0)
            code = bench_matmul(b, "kv_a", f, s->q_lora + s->latent + s->rope, s->dim, false, err);
        if (code == 0)
            code = bench_matmul(b, "q_b", f, s->n_heads * (s->nope + s->rope), s->q_lora, false, err);
        if (code == 0)
            code = bench_matmul(b, "o", f, s->dim, s->n_heads * s->v_dim, false, err);
        if (code == 0)
            code = bench_matmul(b, "shared gate|up", f, 2 * s->expert_ff, s->dim, false, err);
        if (code == 0)
            code = bench_matmul(b, "shared down", f, s->dim, s->expert_ff, false, err);
    } else {
        code = bench_matmul(b, "q|k|v", f, (s->n_heads + 2 * s->n_kv_heads) * s->head_dim, s->dim, false, err);
        if (code == 0)
            code = bench_matmul(b, "o", f, s->dim, s->n_heads * s->head_dim, false, err);
    }
    if (code == 0)
        code = bench_matmul(b, "gate|up", f, 2 * s->ff, s->dim, false, err);
    if (code == 0)
        code = bench_matmul(b, "down", f, s->dim, s->ff, false, err);
    return code;
}

/* A step of the batch on nothing: rows, no pages. */
static void reset_step(struct bench *b)
{
    struct dn_step *s = b->s;
    s->token_start[0] = s->page_start[0] = 0;
    for (uint32_t i = 0; i < b->batch; i++) {
        s->token_id[i] = (int32_t)(dn_bench_random(&b->random) % b->shape->n_vocab);
        s->position[i] = 0;
        s->token_seq[i] = s->row_token[i] = (int32_t)i;
        s->token_count[i] = s->kv_format[i] = s->check[i] = 0;
        s->token_start[i + 1] = (int32_t)i + 1;
        s->kv_len[i] = 1;
        s->slot[i] = -1;
        s->page_start[i + 1] = 0;
        s->sample[i] = (struct dn_sample){.top_p = 1, .repetition = 1, .slot = -1, .target = -1, .n_top = -1};
    }
}

static const char gpu_shapes[] = "kimi-k2,llama-8b", cpu_shapes[] = "small-mla,small-gqa";

struct options {
    const char *shapes, *weights, *kv, *batch, *context, *filter, *device, *threads, *csv;
};

struct plan {
    struct dn_bench_list weights, kv;
    const struct shapes *shape[DN_BENCH_MAX_LIST];
    size_t n_shapes;
    uint32_t batch[DN_BENCH_MAX_LIST], context[DN_BENCH_MAX_LIST];
    size_t n_batch, n_context;
    uint64_t threads;
    enum dn_weight_format weight[DN_BENCH_MAX_LIST];
    enum dn_kv_format format[DN_BENCH_MAX_LIST];
};

static int run_shape(struct bench *b, const struct plan *p, struct dn_err *err)
{
    const struct shapes *s = b->shape;
    int code = 0;
    for (size_t n = 0; n < p->n_batch && code == 0; n++) {
        b->batch = p->batch[n];
        reset_step(b);
        for (size_t i = 0; i < p->weights.n && code == 0; i++)
            code = bench_dense(b, p->weight[i], err);
        if (code == 0 && s->latent)
            code = bench_group(b, "q to latent", s->n_heads, s->latent, s->nope, err);
        if (code == 0 && s->latent)
            code = bench_group(b, "latent to v", s->n_heads, s->v_dim, s->latent, err);
        if (code == 0 && s->n_experts)
            code = bench_matmul(b, "router", DN_W_BF16, s->n_experts, s->dim, true, err);
        if (code == 0)
            code = bench_matmul(b, "head", DN_W_BF16, s->n_vocab, s->dim, true, err);
        if (code == 0)
            code = bench_rows(b, err);
        for (size_t c = 0; c < p->n_context && code == 0; c++)
            for (size_t f = 0; f < p->kv.n && code == 0; f++) {
                b->context = p->context[c];
                code = bench_cache(b, p->format[f], err);
                reset_step(b);
            }
    }
    for (size_t i = 0; i < p->weights.n && code == 0 && s->n_experts; i++)
        if (p->weight[i] == DN_W_INT4)
            code = bench_experts(b, p->weight[i], p->batch, p->n_batch, err);
    return code;
}

static int parse_shapes(const char *text, struct plan *p, struct dn_err *err)
{
    struct dn_bench_list l;
    int code = dn_bench_split("shapes", text, &l, err);
    p->n_shapes = 0;
    for (size_t i = 0; i < l.n && code == 0; i++) {
        for (size_t k = 0; k < sizeof known / sizeof *known; k++)
            if (strcmp(known[k].name, l.text[i]) == 0)
                p->shape[p->n_shapes++] = &known[k];
        if (p->n_shapes == i)
            code =
                dn_err_set(err, DN_CONFIG, "--shapes %s: expected kimi-k2, llama-8b, small-mla, small-gqa", l.text[i]);
    }
    free(l.copy);
    return code;
}

/* Operations, and which shapes have them. */
static const struct {
    const char *name;
    enum { OF_ALL, OF_MLA, OF_GQA, OF_EXPERTS } of;
} operations[] = {{"matmul", OF_ALL},     {"group_matmul", OF_MLA}, {"experts", OF_EXPERTS},   {"route", OF_EXPERTS},
                  {"attention", OF_GQA},  {"qkv_write", OF_GQA},    {"mla_attention", OF_MLA}, {"mla_write", OF_MLA},
                  {"check_tags", OF_ALL}, {"rmsnorm", OF_ALL},      {"norm_act", OF_MLA},      {"silu_mul", OF_ALL},
                  {"embed", OF_ALL},      {"sample_rows", OF_ALL}};

static bool has_operation(const struct shapes *s, size_t i)
{
    return operations[i].of == OF_ALL || (operations[i].of == OF_MLA && s->latent) ||
           (operations[i].of == OF_GQA && !s->latent) || (operations[i].of == OF_EXPERTS && s->n_experts);
}

/* Whether --filter names an operation of one of the shapes. */
static int check_filter(const char *filter, const struct plan *p, struct dn_err *err)
{
    struct dn_buf names = {0};
    int code = filter ? -DN_CONFIG : 0;
    for (size_t i = 0; i < sizeof operations / sizeof *operations && code != 0; i++) {
        bool there = false;
        for (size_t k = 0; k < p->n_shapes; k++)
            there = there || has_operation(p->shape[k], i);
        if (there && strstr(operations[i].name, filter))
            code = 0;
        if (there)
            dn_buf_printf(&names, "%s%s", names.len ? ", " : "", operations[i].name);
    }
    if (code != 0)
        dn_err_set(err, DN_CONFIG, "--filter %s: expected a part of %s", filter, dn_buf_str(&names));
    dn_buf_release(&names);
    return code;
}

static int parse(const struct options *o, struct plan *p, struct dn_err *err)
{
    int code;
    if ((code = parse_shapes(o->shapes ? o->shapes : gpu_shapes, p, err)) ||
        (code = dn_bench_split("weights", o->weights, &p->weights, err)) ||
        (code = dn_bench_split("kv", o->kv, &p->kv, err)) ||
        (code = dn_args_uint(o->threads, "threads", 0, 1024, false, &p->threads, err)) ||
        (code = dn_bench_numbers("batch", o->batch, 256, p->batch, &p->n_batch, err)) ||
        (code = dn_bench_numbers("context", o->context, 1 << 20, p->context, &p->n_context, err)))
        return code;
    for (size_t i = 0; i < p->weights.n; i++)
        if (dn_weight_format_parse(p->weights.text[i], &p->weight[i]) != 0 || p->weight[i] == DN_W_INT8)
            return dn_err_set(err, DN_CONFIG, "--weights %s: expected bf16, fp8, int4", p->weights.text[i]);
    for (size_t i = 0; i < p->kv.n; i++)
        if (dn_kv_format_parse(p->kv.text[i], &p->format[i]) != 0)
            return dn_err_set(err, DN_CONFIG, "--kv %s: expected bf16, fp8", p->kv.text[i]);
    return 0;
}

static int open_all(struct bench *b, const struct options *o, struct plan *p, struct dn_err *err)
{
    uint32_t batch = 1, context = 1;
    int gpu;
    for (size_t i = 0; i < p->n_batch; i++)
        batch = p->batch[i] > batch ? p->batch[i] : batch;
    for (size_t i = 0; i < p->n_context; i++)
        context = p->context[i] > context ? p->context[i] : context;
    const struct dn_device_conf dc = {
        .n_threads = (unsigned)p->threads,
        .limits = {.tokens = batch, .seqs = batch, .rows = batch, .pages = batch * (context / 16 + 1), .tags = 1},
        .n_vocab = known[0].n_vocab};
    struct dn_model_sizes sizes[DN_BENCH_MAX_LIST];
    for (size_t i = 0; i < p->n_shapes; i++) {
        const struct shapes *s = p->shape[i];
        sizes[i] = (struct dn_model_sizes){.n_heads = s->n_heads,
                                           .n_kv_heads = s->n_kv_heads,
                                           .head_dim = s->head_dim,
                                           .rotary_dim = s->head_dim,
                                           .latent_dim = s->latent,
                                           .nope_dim = s->nope,
                                           .rope_dim = s->rope,
                                           .v_dim = s->v_dim};
    }
    int code = dn_bench_open_device(o->device, &dc, sizes, p->n_shapes, &b->d, &gpu, err);
    if (code == 0 && !o->shapes && gpu < 0)
        code = parse_shapes(cpu_shapes, p, err);
    if (code != 0 || (code = check_filter(o->filter, p, err)) != 0)
        return code;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    b->n_threads = p->threads ? (unsigned)p->threads : cores > 0 ? (unsigned)cores : 1;
    b->ops = b->d->ops;
    b->s = b->ops->step_arrays(b->d);
    b->filter = o->filter;
    b->read_rate = b->ops->read_rate(b->d, gpu >= 0 ? (size_t)4 << 30 : (size_t)256 << 20);
    b->noise = dn_alloc(NOISE);
    for (size_t i = 0; i < NOISE; i += 4) {
        uint32_t x = ((uint32_t)dn_bench_random(&b->random) & 0x03bf83bfu) | 0x3c003c00u;
        memcpy(b->noise + i, &x, 4);
    }
    void **io[] = {&b->in, &b->out, &b->more};
    for (int i = 0; i < 3; i++) {
        size_t bytes = (size_t)batch * IO_BYTES;
        *io[i] = b->ops->alloc(b->d, bytes);
        if (!*io[i])
            return dn_err_set(err, DN_NO_MEMORY, "no memory for activations: %zu bytes", bytes);
        for (size_t at = 0; at < bytes; at += NOISE)
            b->ops->upload(b->d, (char *)*io[i] + at, b->noise, bytes - at < NOISE ? bytes - at : NOISE);
    }
    dn_bench_print_head(b->d, b->read_rate, gpu);
    return 0;
}

static const struct dn_bench_column columns[] = {{"SHAPES", "shapes", -9}, {"OPERATION", "operation", -13},
                                                 {"WHAT", "what", -28},    {"BATCH", "batch", 5},
                                                 {"GB", "gb", 8},          {"US", "us", 9},
                                                 {"P10", "p10_us", 9},     {"P90", "p90_us", 9},
                                                 {"TB/S", "tb_per_s", 7},  {"%", "of_read_rate_percent", 6},
                                                 {NULL, NULL, 0}};

static int run(struct bench *b, const struct options *o, struct dn_err *err)
{
    struct plan p = {0};
    struct dn_err close_err;
    int code = parse(o, &p, err);
    if (code == 0)
        code = dn_bench_table_open(&b->table, columns, o->csv, err);
    if (code == 0)
        code = open_all(b, o, &p, err);
    if (code == 0)
        dn_bench_table_head(&b->table);
    for (size_t i = 0; i < p.n_shapes && code == 0; i++) {
        b->shape = p.shape[i];
        code = run_shape(b, &p, err);
    }
    if (code == 0 && b->n_rows == 0)
        code = dn_err_set(err, DN_CONFIG, "nothing was measured%s%s", o->filter ? ": --filter " : "",
                          o->filter ? o->filter : "");
    if (dn_bench_table_close(&b->table, &close_err) != 0 && code == 0) {
        *err = close_err;
        code = -DN_IO;
    }
    if (b->d)
        b->d->ops->close(b->d);
    free(b->noise);
    free(p.weights.copy);
    free(p.kv.copy);
    return code;
}

int dn_bench_kernels(int argc, char **argv)
{
    struct options o = {.weights = "bf16,fp8,int4",
                        .kv = "bf16,fp8",
                        .batch = "1,16,64",
                        .context = "8k",
                        .device = "auto",
                        .threads = "0"};
    const struct dn_flag flag[] = {
        {"shapes", "LIST", "kimi-k2, llama-8b [both], small-mla, small-gqa [both on the CPU]", &o.shapes, NULL},
        {"filter", "TEXT", "operations whose names contain it", &o.filter, NULL},
        {"weights", "LIST", "of matmuls: bf16, fp8, int4 [all]; experts are int4", &o.weights, NULL},
        {"kv", "LIST", "bf16, fp8 [both]", &o.kv, NULL},
        {"batch", "LIST", "[1,16,64]", &o.batch, NULL},
        {"context", "LIST", "tokens of each sequence [8k]", &o.context, NULL},
        {"device", "NAME", "auto, cpu, cuda or cuda:N [auto]", &o.device, NULL},
        {"threads", "N", "of the CPU; 0: all cores [0]", &o.threads, NULL},
        {"csv", "FILE", "the table as comma-separated values, too", &o.csv, NULL},
        {NULL, NULL, NULL, NULL, NULL},
    };
    struct dn_args args;
    struct dn_err err = {0};
    bool help;
    if (dn_args_parse(argc, argv, usage, flag, &args, &help, &err) != 0 || (!help && args.n_positional)) {
        fprintf(stderr, "dunlin: %s\n", err.code ? err.text : "unexpected argument; dunlin bench kernels --help");
        return DN_EXIT_USAGE;
    }
    if (help)
        return DN_EXIT_OK;
    struct bench *b = dn_alloc0(1, sizeof *b);
    int code = run(b, &o, &err);
    free(b);
    if (code == 0)
        return DN_EXIT_OK;
    fprintf(stderr, "dunlin: %s\n", err.text);
    return err.code == DN_CONFIG ? DN_EXIT_USAGE : DN_EXIT_FAILED;
}
