#include "kernels/cpu/attention.h"

#include "kernels/cpu/device.h"

#include <string.h>

const struct dn_attn_ops *dn_attn_ops(enum dn_isa isa)
{
#ifdef __x86_64__
    if (isa == DN_ISA_AVX512)
        return &dn_attn_ops_avx512;
    if (isa == DN_ISA_AVX2)
        return &dn_attn_ops_avx2;
#endif
    return &dn_attn_ops_portable;
}

size_t dn_attn_scratch_floats(const struct dn_attn_work *w, uint32_t rows)
{
    size_t tile = (size_t)DN_ATTN_KEYS + dn_attn_v_stride(w->padded_dim);
    return (size_t)rows * (w->key_dim + DN_ATTN_TILE + 16) + tile * DN_ATTN_TILE;
}

float *dn_attn_scratch(struct dn_attn_work *w, uint32_t rows, float *scratch)
{
    float *q = scratch;
    w->q = q;
    w->kt = q + (size_t)rows * w->key_dim;
    w->v = w->kt + (size_t)DN_ATTN_KEYS * DN_ATTN_TILE;
    w->s = w->v + (size_t)dn_attn_v_stride(w->padded_dim) * DN_ATTN_TILE;
    w->alpha = w->s + (size_t)rows * DN_ATTN_TILE;
    return q;
}

/* Some tokens of a sequence, one KV head, and either all positions or one split of them. */
struct item {
    uint32_t seq, token, n_tokens; /* token: index in the step */
    uint32_t kv_head;
    uint32_t split; /* first position, or ALL */
    uint32_t n_splits;
    uint32_t pass;
    size_t part; /* where the states of the splits lie, in floats */
};
enum { ALL = UINT32_MAX };

/* Spread items go in passes whose states take no more than that, or one item's: 512 splits of Kimi K2's 64 heads, work
 * for any number of threads. Without a bound a batch of long contexts would want more than there is of memory. */
enum { PASS_FLOATS = (64 << 20) / sizeof(float) };

struct call {
    struct dn_cpu_device *d;
    struct dn_attn_work work; /* what is the same for all items */
    const float *q;
    float *out;
    uint32_t q_stride, n_heads, n_kv_heads;
    uint32_t max_rows;
    size_t state_floats, thread_floats;
    float *scratch;    /* [threads][thread_floats] */
    struct item *item; /* of the pass */
    float *parts;
};

/* Fills w for an item and copies its queries together, so that they lie densely in the cache. */
static void work_init(const struct call *c, const struct item *it, float *scratch, struct dn_attn_work *w)
{
    const struct dn_step *s = &c->d->step;
    *w = c->work;
    float *q = dn_attn_scratch(w, c->max_rows, scratch);
    w->n_tokens = it->n_tokens;
    w->position = (uint32_t)s->position[it->token];
    w->format = (enum dn_kv_format)s->kv_format[it->seq];
    w->kv_head = it->kv_head;
    w->page = s->page + s->page_start[it->seq];
    size_t width = (size_t)w->group * w->key_dim;
    for (uint32_t t = 0; t < it->n_tokens; t++)
        memcpy(q + t * width, c->q + (size_t)(it->token + t) * c->q_stride + it->kv_head * width, width * sizeof *q);
}

static void write_out(const struct call *c, const struct item *it, const struct dn_attn_state *total)
{
    uint32_t group = c->work.group, dim = c->work.value_dim;
    for (uint32_t r = 0; r < it->n_tokens * group; r++) {
        size_t token = it->token + r / group, head = it->kv_head * group + r % group;
        c->d->attn->finish(total, r, dim, c->work.padded_dim, c->out + (token * c->n_heads + head) * dim);
    }
}

static void run_items(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    const struct dn_attn_ops *ops = c->d->attn;
    uint32_t group = c->work.group, padded = c->work.padded_dim;
    float *scratch = c->scratch + part * c->thread_floats;
    float *states = scratch + c->thread_floats - 2 * c->state_floats;
    for (size_t i = begin; i < end; i++) {
        const struct item *it = c->item + i;
        struct dn_attn_work w;
        uint32_t rows = it->n_tokens * group;
        work_init(c, it, scratch, &w);
        if (it->split != ALL) {
            size_t at = it->part + it->split / DN_ATTN_SPLIT * dn_attn_state_floats(rows, padded);
            struct dn_attn_state state = dn_attn_state_at(c->parts + at, rows, padded);
            ops->split(&w, it->split, &state);
            continue;
        }
        struct dn_attn_state total = dn_attn_state_at(states, rows, padded);
        struct dn_attn_state next = dn_attn_state_at(states + c->state_floats, rows, padded);
        ops->split(&w, 0, &total);
        for (uint32_t n = 1; n < it->n_splits; n++) {
            uint32_t at = n * DN_ATTN_SPLIT, first = at > w.position ? at - w.position : 0;
            ops->split(&w, at, &next);
            ops->merge(&total, &next, first * group, rows, padded);
        }
        write_out(c, it, &total);
    }
}

/* Items of split 0 stand for their whole row of splits. */
static void merge_items(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    uint32_t group = c->work.group, padded = c->work.padded_dim;
    for (size_t i = begin; i < end; i++) {
        const struct item *it = c->item + i;
        if (it->split != 0)
            continue;
        uint32_t rows = it->n_tokens * group, position = (uint32_t)c->d->step.position[it->token];
        struct dn_attn_state total = dn_attn_state_at(c->parts + it->part, rows, padded);
        for (uint32_t n = 1; n < it->n_splits; n++) {
            uint32_t at = n * DN_ATTN_SPLIT, first = at > position ? at - position : 0;
            struct dn_attn_state next =
                dn_attn_state_at(c->parts + it->part + n * dn_attn_state_floats(rows, padded), rows, padded);
            c->d->attn->merge(&total, &next, first * group, rows, padded);
        }
        write_out(c, it, &total);
    }
}

static uint32_t split_count(const struct dn_step *s, uint32_t last_token)
{
    return (uint32_t)s->position[last_token] / DN_ATTN_SPLIT + 1;
}

/* Tokens of an item, at most. */
static uint32_t item_tokens(const struct call *c)
{
    return c->work.group < DN_ATTN_ROWS ? DN_ATTN_ROWS / c->work.group : 1;
}

/* Cuts the step into items, later tokens first because they take longest. With `spread`, splits become items of their
 * own, in passes. Returns the number of items, and the floats of the largest pass; `items` may be NULL to count first.
 */
static size_t cut(const struct call *c, bool spread, struct item *items, size_t *part_floats)
{
    const struct dn_step *s = &c->d->step;
    uint32_t tokens = item_tokens(c), pass = 0;
    size_t n = 0, floats = 0, most = 0;
    for (uint32_t q = 0; q < s->n_seqs; q++) {
        uint32_t begin = (uint32_t)s->token_start[q], end = (uint32_t)s->token_start[q + 1];
        if (s->bad[q])
            continue;
        while (end > begin) {
            uint32_t m = end - begin < tokens ? end - begin : tokens, n_splits = split_count(s, end - 1);
            bool is_spread = spread && n_splits > 1;
            size_t need = is_spread ? n_splits * dn_attn_state_floats(m * c->work.group, c->work.padded_dim) : 0;
            end -= m;
            for (uint32_t h = 0; h < c->n_kv_heads; h++) {
                if (floats > 0 && floats + need > PASS_FLOATS) {
                    pass++;
                    floats = 0;
                }
                struct item it = {q, end, m, h, ALL, n_splits, pass, floats};
                for (uint32_t i = 0; i < (is_spread ? n_splits : 1); i++, n++) {
                    it.split = is_spread ? i * DN_ATTN_SPLIT : ALL;
                    if (items)
                        items[n] = it;
                }
                floats += need;
                most = floats > most ? floats : most;
            }
        }
    }
    *part_floats = most;
    return n;
}

uint32_t dn_cpu_pages_of(const struct dn_cpu_device *d, uint32_t q, uint32_t page_tokens)
{
    const struct dn_step *s = &d->step;
    uint32_t n = ((uint32_t)s->kv_len[q] + page_tokens - 1) / page_tokens;
    DN_BUG_ON(n > d->limits.pages - (uint32_t)s->page_start[q]);
    return n;
}

void dn_cpu_check_pages(const struct dn_cpu_device *d, const struct dn_kv_layout *l)
{
    for (uint32_t q = 0; q < d->step.n_seqs; q++)
        dn_cpu_pages_of(d, q, l->page_tokens);
}

void dn_cpu_zero_bad(const struct dn_step *s, float *out, size_t width)
{
    for (uint32_t q = 0; q < s->n_seqs; q++) {
        if (s->bad[q])
            memset(out + (size_t)s->token_start[q] * width, 0,
                   (size_t)(s->token_start[q + 1] - s->token_start[q]) * width * sizeof *out);
    }
}

/* Few units would leave threads idle, so long contexts are spread over them. The result is the same. */
static bool wants_spread(unsigned n_threads, size_t n_items)
{
    return n_threads > 1 && n_items < 4 * (size_t)n_threads;
}

/* Scratch at the limits: items of a token and head each if groups are wide; spread, fewer than 4 a thread before, each
 * with all splits of the longest sequence. */
static void take_limits(struct call *c, unsigned n_threads)
{
    const struct dn_step_limits *l = &c->d->limits;
    size_t n_items = ((size_t)c->d->step.n_tokens / item_tokens(c) + l->seqs) * c->n_kv_heads,
           few = 4 * (size_t)n_threads;
    size_t seq_pages = l->seq_pages && l->seq_pages < l->pages ? l->seq_pages : l->pages;
    size_t n_splits = seq_pages * c->work.layout->page_tokens / DN_ATTN_SPLIT + 1;
    few = wants_spread(n_threads, 0) ? few < n_items ? few : n_items : 0;
    size_t item_floats = n_splits * dn_attn_state_floats(item_tokens(c) * c->work.group, c->work.padded_dim);
    size_t pass = item_floats > PASS_FLOATS ? item_floats : PASS_FLOATS;
    size_t floats = few > pass / item_floats ? pass : few * item_floats;
    dn_cpu_take(c->d, DN_SCRATCH_ITEMS, 0, (n_items > few * n_splits ? n_items : few * n_splits) * sizeof(struct item));
    dn_cpu_take(c->d, DN_SCRATCH_PARTS, 0, floats * sizeof(float));
}

static void run(struct call *c)
{
    struct dn_cpu_device *d = c->d;
    const struct dn_step *s = &d->step;
    struct dn_attn_work *w = &c->work;
    w->padded_dim = (w->value_dim + DN_ATTN_PAD - 1) / DN_ATTN_PAD * DN_ATTN_PAD;
    c->max_rows = w->group > DN_ATTN_ROWS ? w->group : DN_ATTN_ROWS;
    c->state_floats = (dn_attn_state_floats(c->max_rows, w->padded_dim) + 15) & ~(size_t)15;
    c->thread_floats = ((dn_attn_scratch_floats(w, c->max_rows) + 15) & ~(size_t)15) + 2 * c->state_floats;
    unsigned n_threads = dn_threads_count(d->exec.threads);
    size_t bytes = n_threads * c->thread_floats * sizeof(float);
    c->scratch = dn_cpu_take(d, DN_SCRATCH_THREAD, bytes, bytes);
    if (d->measuring) {
        take_limits(c, n_threads);
        return;
    }
    dn_cpu_check_pages(d, w->layout);
    size_t floats, n = cut(c, false, NULL, &floats);
    bool spread = wants_spread(n_threads, n);
    if (spread)
        n = cut(c, true, NULL, &floats);
    struct item *items = dn_cpu_take(d, DN_SCRATCH_ITEMS, n * sizeof(struct item), 0);
    c->parts = dn_cpu_take(d, DN_SCRATCH_PARTS, floats * sizeof(float), 0);
    cut(c, spread, items, &floats);
    dn_cpu_zero_bad(s, c->out, (size_t)c->n_heads * w->value_dim);
    for (size_t begin = 0, end; begin < n; begin = end) {
        for (end = begin + 1; end < n && items[end].pass == items[begin].pass;)
            end++;
        c->item = items + begin;
        dn_threads_for(d->exec.threads, end - begin, 1, run_items, c);
        if (floats)
            dn_threads_for(d->exec.threads, end - begin, 1, merge_items, c);
    }
}

void dn_cpu_attention(struct dn_device *device, const struct dn_attention *p)
{
    DN_BUG_ON(p->n_kv_heads == 0 || p->n_heads % p->n_kv_heads != 0 || p->layer >= p->layout->n_layers ||
              p->n_kv_heads != p->layout->n_kv_heads || p->head_dim != p->layout->head_dim || p->layout->latent_dim);
    struct call c = {.d = dn_cpu(device),
                     .work = {.source = DN_ATTN_GQA,
                              .group = p->n_heads / p->n_kv_heads,
                              .key_dim = p->head_dim,
                              .value_dim = p->head_dim,
                              .scale = p->scale,
                              .layout = p->layout,
                              .layer = p->layer,
                              .arena = p->arena},
                     .q = p->q,
                     .out = p->out,
                     .q_stride = p->q_stride,
                     .n_heads = p->n_heads,
                     .n_kv_heads = p->n_kv_heads};
    run(&c);
}

void dn_cpu_mla_attention(struct dn_device *device, const struct dn_mla_attention *p)
{
    DN_BUG_ON(p->n_heads == 0 || p->layer >= p->layout->n_layers || p->latent_dim != p->layout->latent_dim ||
              p->rope_dim != p->layout->rope_dim || p->latent_dim == 0);
    struct call c = {.d = dn_cpu(device),
                     .work = {.source = DN_ATTN_MLA,
                              .group = p->n_heads,
                              .key_dim = p->latent_dim + p->rope_dim,
                              .rope_dim = p->rope_dim,
                              .value_dim = p->latent_dim,
                              .scale = p->scale,
                              .layout = p->layout,
                              .layer = p->layer,
                              .arena = p->arena},
                     .q = p->q,
                     .out = p->out,
                     .q_stride = p->n_heads * (p->latent_dim + p->rope_dim),
                     .n_heads = p->n_heads,
                     .n_kv_heads = 1};
    run(&c);
}
