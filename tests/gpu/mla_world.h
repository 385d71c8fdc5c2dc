/* Sequences of latents in pages on the device, for test_mla.c: where things lie (the layout of mla.cuh, written down a
 * second time), pages, steps.
 *
 * Everything is static and belongs to the program that includes it.
 */
#ifndef DN_TESTS_MLA_WORLD_H
#define DN_TESTS_MLA_WORLD_H

#include "gpu/mla_page.h"

enum { MAX_SEQS = 64, TOKENS = 4096, MAX_POSITION = 1 << 15 };

struct seq {
    uint32_t n; /* tokens */
    enum dn_kv_format format;
    uint32_t *page;
    uint16_t *kv;   /* [n][WIDTH] as projected, bf16 */
    float *content; /* [n][WIDTH] as stored */
    float *scale;   /* [n] FP8 */
    bool bad;
};
struct world {
    struct gpu g;
    struct dn_kv_layout l;
    uint8_t *arena;
    size_t arena_bytes;
    uint32_t n_pages;
    struct seq seq[MAX_SEQS];
    uint32_t n_seqs, layer;
    float *rope, *norm; /* host */
    void *d_rope, *d_norm, *d_kv, *d_q, *d_q_rope;
    uint64_t *tags;
};

/* ---- Where things lie ---- */

static uint64_t page_at(const struct world *w, const struct seq *s, uint32_t index)
{
    return dn_kv_page_offset(&w->l, s->format, s->page[index]) +
           (uint64_t)w->layer * w->l.format[s->format].layer_bytes;
}

/* ---- A world of sequences ---- */

static void world_open(struct world *w, uint32_t n_pages, uint32_t n_layers, uint32_t pages)
{
    struct dn_step_limits limits = {.tokens = TOKENS, .seqs = MAX_SEQS, .rows = MAX_SEQS, .pages = pages, .tags = 1};
    memset(w, 0, sizeof *w);
    gpu_open(&w->g, &limits, 1, 1);
    cr_assert_eq(dn_kv_layout_init_mla(&w->l, n_layers, LATENT, ROPE, PAGE, 4 << 20), 0);
    w->n_pages = (n_pages + w->l.slab_pages - 1) / w->l.slab_pages * w->l.slab_pages;
    w->arena_bytes = (size_t)(w->n_pages / w->l.slab_pages) * w->l.slab_bytes;
    w->arena = gpu_alloc(&w->g, w->arena_bytes);
    w->rope = malloc((size_t)MAX_POSITION * ROPE * sizeof *w->rope);
    w->norm = malloc(LATENT * sizeof *w->norm);
    for (uint32_t i = 0; i < MAX_POSITION; i++)
        for (int k = 0; k < ROPE / 2; k++) {
            double angle = i * pow(50000, -2.0 * k / ROPE);
            w->rope[(i * ROPE / 2 + k) * 2] = (float)cos(angle);
            w->rope[(i * ROPE / 2 + k) * 2 + 1] = (float)sin(angle);
        }
    for (int i = 0; i < LATENT; i++)
        w->norm[i] = (float)(0.5 + gpu_unit());
    w->d_rope = gpu_copy(&w->g, w->rope, (size_t)MAX_POSITION * ROPE * sizeof *w->rope);
    w->d_norm = gpu_copy(&w->g, w->norm, LATENT * sizeof *w->norm);
    w->d_kv = gpu_alloc(&w->g, TOKENS * WIDTH * 2);
    w->d_q = gpu_alloc(&w->g, TOKENS * 256 * 2);
    w->d_q_rope = gpu_alloc(&w->g, TOKENS * 256 * 2);
    w->tags = gpu_alloc(&w->g, w->n_pages * sizeof *w->tags); /* all 0 */
    w->layer = n_layers - 1;
}

/* Page ids of both formats in turn from the slabs, in random order within a slab. */
static uint32_t next_page(struct world *w, enum dn_kv_format f)
{
    static uint32_t slab[2], used[2];
    static struct world *of;
    if (of != w) {
        slab[0] = 0;
        slab[1] = 1;
        used[0] = used[1] = 0;
        of = w;
    }
    uint32_t n = w->l.format[f].pages_per_slab;
    if (used[f] == n) {
        slab[f] += 2;
        used[f] = 0;
    }
    uint32_t k = used[f]++;
    cr_assert(slab[f] < w->n_pages / w->l.slab_pages);
    for (uint32_t step = 7;; step++) /* a permutation if step and n have no common divisor */
        if (n % step || n == 1) {
            uint32_t a = n, b = step;
            while (b) {
                uint32_t r = a % b;
                a = b;
                b = r;
            }
            if (a == 1)
                return slab[f] * w->l.slab_pages + (uint32_t)((uint64_t)k * step % n);
        }
}

static void add_seq(struct world *w, uint32_t n, enum dn_kv_format f)
{
    struct seq *s = &w->seq[w->n_seqs++];
    *s = (struct seq){.n = n, .format = f};
    uint32_t n_pages = (n + PAGE - 1) / PAGE;
    s->page = malloc(n_pages * sizeof *s->page);
    s->kv = malloc((size_t)n * WIDTH * 2);
    s->content = malloc((size_t)n * WIDTH * sizeof *s->content);
    s->scale = calloc(n, sizeof *s->scale);
    for (uint32_t i = 0; i < n_pages; i++)
        s->page[i] = next_page(w, f);
    for (size_t i = 0; i < (size_t)n * WIDTH; i++)
        s->kv[i] = f32_to_bf16((i % WIDTH < LATENT ? 4.0f : 1.0f) * gpu_normal());
}

/* Sequence i of the step is w->seq[which[i]], its tokens first[i] .. end[i] - 1. */
static void set_step(struct world *w, enum dn_step_kind kind, uint32_t n, const uint32_t *which, const uint32_t *first,
                     const uint32_t *end)
{
    struct dn_step *s = w->g.s;
    gpu_rows_step(&w->g, kind, n);
    uint32_t t = 0, p = 0;
    for (uint32_t i = 0; i < n; i++) {
        const struct seq *q = &w->seq[which[i]];
        for (uint32_t k = first[i]; k < end[i]; k++, t++) {
            s->token_id[t] = 0;
            s->token_count[t] = 0;
            s->position[t] = (int32_t)k;
            s->token_seq[t] = (int32_t)i;
        }
        s->token_start[i + 1] = (int32_t)t;
        s->row_token[i] = (int32_t)t - 1;
        s->kv_len[i] = (int32_t)end[i];
        s->kv_format[i] = (uint8_t)q->format;
        s->check[i] = 1;
        for (uint32_t k = 0; k < (end[i] + PAGE - 1) / PAGE; k++, p++) {
            s->page[p] = q->page[k];
            s->tag[p] = q->bad && k == 0 ? 77 : 0;
        }
        s->page_start[i + 1] = (int32_t)p;
    }
    s->n_tokens = t;
}

struct ops {
    struct world *w;
    struct dn_mla_write write;
    struct dn_mla_attention attention;
    struct dn_mla_prefill prefill;
    int which, repeat, layers; /* 0: write, 1: attention, 2: prefill */
};
static void run_ops(struct gpu *g, void *ctx)
{
    struct ops *o = ctx;
    if (o->w->tags)
        g->ops->check_tags(g->d, &(struct dn_check_tags){.table = o->w->tags, .n_pages = o->w->n_pages});
    for (int i = 0; i < o->repeat; i++) {
        if (o->layers)
            o->attention.layer = o->write.layer = o->prefill.layer = (uint32_t)(i % o->layers);
        if (o->which == 0)
            g->ops->mla_write(g->d, &o->write);
        else if (o->which == 1)
            g->ops->mla_attention(g->d, &o->attention);
        else
            g->ops->mla_prefill(g->d, &o->prefill);
    }
}
#endif
