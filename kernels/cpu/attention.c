#include "kernels/cpu/attention.h"

#include "kernels/cpu/device.h"

#include <string.h>

enum { ROWS = 96 /* of a unit: enough that loading a tile costs little against using it */ };

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

/* Some tokens of a sequence, one KV head, and either all positions or one split of them. */
struct item {
    uint32_t seq, token, n_tokens; /* token: index in the step */
    uint32_t kv_head;
    uint32_t split; /* first position, or ALL */
    uint32_t n_splits;
    size_t part; /* where the states of the splits lie, in floats */
};
enum { ALL = UINT32_MAX };

struct call {
    struct dn_cpu_device *d;
    const struct dn_attention *p;
    uint32_t group, padded, max_rows;
    size_t state_floats, thread_floats;
    struct item *item;
    float *parts;
};

static size_t state_floats(uint32_t rows, uint32_t padded)
{
    return (size_t)rows * (padded + 2);
}

static struct dn_attn_state state_at(float *at, uint32_t rows, uint32_t padded)
{
    return (struct dn_attn_state){.o = at, .max = at + (size_t)rows * padded, .sum = at + (size_t)rows * (padded + 1)};
}

/* Fills w for an item and copies its queries together, so that they lie densely in the cache. */
static void work_init(const struct call *c, const struct item *it, float *scratch, struct dn_attn_work *w)
{
    const struct dn_attention *p = c->p;
    const struct dn_step *s = &c->d->step;
    uint32_t dim = p->head_dim;
    float *q = scratch;
    scratch += (size_t)c->max_rows * c->padded;
    *w = (struct dn_attn_work){.q = q,
                               .n_tokens = it->n_tokens,
                               .group = c->group,
                               .head_dim = dim,
                               .padded_dim = c->padded,
                               .position = (uint32_t)s->position[it->token],
                               .scale = p->scale,
                               .layout = p->layout,
                               .format = (enum dn_kv_format)s->kv_format[it->seq],
                               .layer = p->layer,
                               .kv_head = it->kv_head,
                               .arena = p->arena,
                               .page = s->page + s->page_start[it->seq]};
    w->kt = scratch;
    w->v = w->kt + (size_t)c->padded * DN_ATTN_TILE;
    w->s = w->v + (size_t)c->padded * DN_ATTN_TILE;
    w->alpha = w->s + (size_t)c->max_rows * DN_ATTN_TILE;
    for (uint32_t t = 0; t < it->n_tokens; t++) {
        const float *from =
            (const float *)p->q + (size_t)(it->token + t) * p->q_stride + (size_t)it->kv_head * c->group * dim;
        memcpy(q + (size_t)t * c->group * dim, from, (size_t)c->group * dim * sizeof *q);
    }
}

static void write_out(const struct call *c, const struct item *it, const struct dn_attn_state *total)
{
    const struct dn_attention *p = c->p;
    float *out = p->out;
    for (uint32_t r = 0; r < it->n_tokens * c->group; r++) {
        size_t token = it->token + r / c->group, head = it->kv_head * c->group + r % c->group;
        c->d->attn->finish(total, r, p->head_dim, c->padded, out + (token * p->n_heads + head) * p->head_dim);
    }
}

static void run_items(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    const struct dn_attn_ops *ops = c->d->attn;
    float *scratch = (float *)c->d->thread_scratch.data + part * c->thread_floats;
    float *states = scratch + c->thread_floats - 2 * c->state_floats;
    for (size_t i = begin; i < end; i++) {
        const struct item *it = c->item + i;
        struct dn_attn_work w;
        uint32_t rows = it->n_tokens * c->group;
        work_init(c, it, scratch, &w);
        if (it->split != ALL) {
            size_t at = it->part + it->split / DN_ATTN_SPLIT * state_floats(rows, c->padded);
            struct dn_attn_state state = state_at(c->parts + at, rows, c->padded);
            ops->split(&w, it->split, &state);
            continue;
        }
        struct dn_attn_state total = state_at(states, rows, c->padded);
        struct dn_attn_state next = state_at(states + c->state_floats, rows, c->padded);
        ops->split(&w, 0, &total);
        for (uint32_t n = 1; n < it->n_splits; n++) {
            uint32_t at = n * DN_ATTN_SPLIT, first = at > w.position ? at - w.position : 0;
            ops->split(&w, at, &next);
            ops->merge(&total, &next, first * c->group, rows, c->padded);
        }
        write_out(c, it, &total);
    }
}

/* Items of split 0 stand for their whole row of splits. */
static void merge_items(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    for (size_t i = begin; i < end; i++) {
        const struct item *it = c->item + i;
        if (it->split != 0)
            continue;
        uint32_t rows = it->n_tokens * c->group, position = (uint32_t)c->d->step.position[it->token];
        struct dn_attn_state total = state_at(c->parts + it->part, rows, c->padded);
        for (uint32_t n = 1; n < it->n_splits; n++) {
            uint32_t at = n * DN_ATTN_SPLIT, first = at > position ? at - position : 0;
            struct dn_attn_state next =
                state_at(c->parts + it->part + n * state_floats(rows, c->padded), rows, c->padded);
            c->d->attn->merge(&total, &next, first * c->group, rows, c->padded);
        }
        write_out(c, it, &total);
    }
}

static uint32_t split_count(const struct dn_step *s, uint32_t last_token)
{
    return (uint32_t)s->position[last_token] / DN_ATTN_SPLIT + 1;
}

/* Cuts the step into items, later tokens first because they take longest. With `spread`, splits become items of their
 * own. Returns the number of items; `items` and `parts` may be NULL to count first. */
static size_t cut(const struct call *c, bool spread, struct item *items, size_t *part_floats)
{
    const struct dn_step *s = &c->d->step;
    uint32_t tokens = c->group < ROWS ? ROWS / c->group : 1;
    size_t n = 0, floats = 0;
    for (uint32_t q = 0; q < s->n_seqs; q++) {
        uint32_t begin = (uint32_t)s->token_start[q], end = (uint32_t)s->token_start[q + 1];
        if (s->bad[q])
            continue;
        while (end > begin) {
            uint32_t m = end - begin < tokens ? end - begin : tokens, n_splits = split_count(s, end - 1);
            end -= m;
            for (uint32_t h = 0; h < c->p->n_kv_heads; h++) {
                struct item it = {q, end, m, h, ALL, n_splits, floats};
                if (!spread || n_splits == 1) {
                    if (items)
                        items[n] = it;
                    n++;
                    continue;
                }
                for (uint32_t i = 0; i < n_splits; i++, n++) {
                    it.split = i * DN_ATTN_SPLIT;
                    if (items)
                        items[n] = it;
                }
                floats += n_splits * state_floats(m * c->group, c->padded);
            }
        }
    }
    *part_floats = floats;
    return n;
}

static void check_pages(const struct dn_step *s, const struct dn_kv_layout *l)
{
    for (uint32_t q = 0; q < s->n_seqs; q++) {
        uint64_t n = (uint64_t)(s->page_start[q + 1] - s->page_start[q]);
        DN_BUG_ON(n * l->page_tokens < (uint64_t)s->kv_len[q]);
    }
}

void dn_cpu_attention(struct dn_device *device, const struct dn_attention *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    const struct dn_step *s = &d->step;
    DN_BUG_ON(p->n_kv_heads == 0 || p->n_heads % p->n_kv_heads != 0 || p->layer >= p->layout->n_layers ||
              p->n_kv_heads != p->layout->n_kv_heads || p->head_dim != p->layout->head_dim);
    check_pages(s, p->layout);
    struct call c = {.d = d, .p = p, .group = p->n_heads / p->n_kv_heads};
    c.padded = (p->head_dim + DN_ATTN_PAD - 1) / DN_ATTN_PAD * DN_ATTN_PAD;
    c.max_rows = c.group > ROWS ? c.group : ROWS;
    c.state_floats = (state_floats(c.max_rows, c.padded) + 15) & ~(size_t)15;
    c.thread_floats =
        (size_t)c.max_rows * (c.padded + DN_ATTN_TILE + 16) + 2 * (size_t)c.padded * DN_ATTN_TILE + 2 * c.state_floats;
    unsigned n_threads = dn_threads_count(d->exec.threads);
    dn_cpu_scratch(&d->thread_scratch, n_threads * c.thread_floats * sizeof(float));

    size_t floats, n = cut(&c, false, NULL, &floats);
    /* Few units would leave threads idle, so long contexts are spread over them. The result is the same. */
    bool spread = n_threads > 1 && n < 4 * (size_t)n_threads;
    if (spread)
        n = cut(&c, true, NULL, &floats);
    c.item = dn_cpu_scratch(&d->attn_items, n * sizeof(struct item));
    c.parts = dn_cpu_scratch(&d->attn_parts, floats * sizeof(float));
    cut(&c, spread, c.item, &floats);
    for (uint32_t q = 0; q < s->n_seqs; q++) {
        size_t width = (size_t)p->n_heads * p->head_dim;
        if (s->bad[q])
            memset((float *)p->out + (size_t)s->token_start[q] * width, 0,
                   (size_t)(s->token_start[q + 1] - s->token_start[q]) * width * sizeof(float));
    }
    dn_threads_for(d->exec.threads, n, 1, run_items, &c);
    if (floats)
        dn_threads_for(d->exec.threads, n, 1, merge_items, &c);
}
