/* The naive oracle of kernels/kernels.h in float64, and what the kernel tests share: random numbers, a device with a KV
 * arena, steps. Written from the definitions, not from the kernels: formats by ldexp, no tiles, no tricks.
 *
 * Everything is static and belongs to the test that includes it. Seeds are fixed (rng_state), so that a failure
 * repeats.
 */
#ifndef DN_TESTS_KERNELS_ORACLE_H
#define DN_TESTS_KERNELS_ORACLE_H

#include "kernels/kernels.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define UNUSED __attribute__((unused))

/* ---- Random numbers (splitmix64) ---- */

static uint64_t rng_state = 1;
static UNUSED uint64_t rng(void)
{
    uint64_t z = (rng_state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
static UNUSED double rng_unit(void)
{
    return (double)(rng() >> 11) * 0x1p-53;
}
static UNUSED uint32_t rng_below(uint32_t n)
{
    return (uint32_t)(rng() % n);
}
static UNUSED float rng_normal(void)
{
    double u = rng_unit(), v = rng_unit();
    return (float)(sqrt(-2.0 * log(1.0 - u)) * cos(6.283185307179586 * v));
}
static UNUSED void fill_normal(float *x, size_t n, float sigma)
{
    for (size_t i = 0; i < n; i++)
        x[i] = sigma * rng_normal();
}

/* ---- Formats, from their definitions ---- */

static UNUSED double bf16_value(uint16_t x)
{
    int e = (x >> 7) & 0xff, m = x & 0x7f;
    double v = e == 255 ? (m ? NAN : INFINITY) : e ? ldexp(128 + m, e - 127 - 7) : ldexp(m, -126 - 7);
    return x & 0x8000 ? -v : v;
}
static UNUSED double e4m3_value(uint8_t x)
{
    int e = (x >> 3) & 15, m = x & 7;
    double v = (x & 0x7f) == 0x7f ? NAN : e ? ldexp(8 + m, e - 7 - 3) : ldexp(m, -6 - 3);
    return x & 0x80 ? -v : v;
}

/* ---- A device with a KV arena ---- */

struct fix {
    struct dn_device *d;
    const struct dn_kernels *ops;
    struct dn_step *s;
    struct dn_kv_layout layout;
    uint8_t *arena;
    uint32_t n_slabs, used[DN_KV_FORMATS]; /* pages given out of the slabs of a format */
    float *memory[64];
    unsigned n_memory;
};

enum { FIX_TOKENS = 2048, FIX_SEQS = 64, FIX_ROWS = 256, FIX_PAGES = 16384, FIX_SLOTS = 4 };

static UNUSED bool fix_has_isa(const char *isa)
{
    struct dn_device_conf conf = {.n_threads = 1,
                                  .isa = isa,
                                  .limits = {.tokens = 1, .seqs = 1, .rows = 1, .pages = 1},
                                  .n_slots = 1,
                                  .n_vocab = 1};
    struct dn_device *d;
    struct dn_err err = {0};
    if (dn_kernels_open_cpu(&conf, &d, &err) != 0)
        return false;
    d->ops->close(d);
    return true;
}

static UNUSED const char *const all_isas[] = {"portable", "avx2", "avx512"};
#define FOR_EACH_ISA(isa)                                                                                              \
    for (const char *const *isa##_at = all_isas, *isa = *isa##_at; isa##_at < all_isas + 3;                            \
         isa##_at++, isa = isa##_at < all_isas + 3 ? *isa##_at : NULL)                                                 \
        if (!fix_has_isa(isa))                                                                                         \
            printf("not on this machine: %s\n", isa);                                                                  \
        else

static UNUSED void fix_open(struct fix *f, const char *isa, unsigned n_threads, uint32_t n_vocab)
{
    struct dn_device_conf conf = {
        .n_threads = n_threads,
        .isa = isa,
        .limits = {.tokens = FIX_TOKENS, .seqs = FIX_SEQS, .rows = FIX_ROWS, .pages = FIX_PAGES},
        .n_slots = FIX_SLOTS,
        .n_vocab = n_vocab};
    struct dn_err err = {0};
    memset(f, 0, sizeof *f);
    cr_assert_eq(dn_kernels_open_cpu(&conf, &f->d, &err), 0, "%s", err.text);
    f->ops = f->d->ops;
    f->s = f->ops->step_arrays(f->d);
}

/* Slabs alternate between the formats: even ones BF16, odd ones FP8. Every byte of the arena is 0xff: NaN in all
 * formats. */
static UNUSED void fix_arena(struct fix *f, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim,
                             uint32_t page_tokens, uint32_t n_slabs)
{
    uint64_t bytes = (uint64_t)n_layers * n_kv_heads * head_dim * page_tokens * 4 * 5; /* some 5 pages to a slab */
    cr_assert_eq(dn_kv_layout_init(&f->layout, n_layers, n_kv_heads, head_dim, page_tokens, bytes), 0);
    f->n_slabs = n_slabs;
    f->arena = f->ops->alloc(f->d, f->layout.slab_bytes * n_slabs);
    cr_assert_not_null(f->arena);
    memset(f->arena, 0xff, f->layout.slab_bytes * n_slabs);
}

static UNUSED uint32_t fix_page(struct fix *f, enum dn_kv_format format)
{
    uint32_t per_slab = f->layout.format[format].pages_per_slab, n = f->used[format]++;
    uint32_t slab = n / per_slab * DN_KV_FORMATS + format;
    cr_assert_lt(slab, f->n_slabs, "the test's arena is too small");
    return slab * f->layout.slab_pages + n % per_slab;
}

static UNUSED float *fix_floats(struct fix *f, size_t n)
{
    float *p = f->ops->alloc(f->d, n * sizeof *p);
    cr_assert_not_null(p);
    return p;
}

static UNUSED void fix_close(struct fix *f)
{
    f->ops->close(f->d);
}

/* ---- Steps ---- */

/* A sequence of a test: its pages, and what a step adds. */
struct seq {
    enum dn_kv_format format;
    uint32_t page[512];
    uint32_t n_pages;
};

static UNUSED void seq_init(struct fix *f, struct seq *q, enum dn_kv_format format, uint32_t n_tokens)
{
    q->format = format;
    q->n_pages = (n_tokens + f->layout.page_tokens - 1) / f->layout.page_tokens;
    for (uint32_t i = 0; i < q->n_pages; i++)
        q->page[i] = fix_page(f, format);
}

static UNUSED void step_clear(struct fix *f)
{
    f->s->n_tokens = f->s->n_seqs = f->s->n_rows = 0;
    f->s->token_start[0] = f->s->page_start[0] = 0;
}

/* Adds n tokens of q beginning at `position`. Returns the index of the sequence in the step. */
static UNUSED uint32_t step_add(struct fix *f, const struct seq *q, uint32_t position, uint32_t n)
{
    struct dn_step *s = f->s;
    uint32_t i = s->n_seqs++, pages = (position + n + f->layout.page_tokens - 1) / f->layout.page_tokens;
    for (uint32_t t = 0; t < n; t++) {
        s->token_id[s->n_tokens] = 0;
        s->token_count[s->n_tokens] = 0;
        s->token_seq[s->n_tokens] = (int32_t)i;
        s->position[s->n_tokens++] = (int32_t)(position + t);
    }
    s->token_start[i + 1] = (int32_t)s->n_tokens;
    s->kv_len[i] = (int32_t)(position + n);
    s->slot[i] = -1;
    s->kv_format[i] = (uint8_t)q->format;
    s->check[i] = 0;
    s->page_start[i + 1] = s->page_start[i] + (int32_t)pages;
    memcpy(s->page + s->page_start[i], q->page, pages * sizeof *s->page);
    return i;
}

/* ---- KV as the layout says ---- */

static UNUSED uint8_t *kv_layer(const struct fix *f, const struct seq *q, uint32_t position, uint32_t layer)
{
    const struct dn_kv_layout *l = &f->layout;
    uint32_t id = q->page[position / l->page_tokens];
    return f->arena + id / l->slab_pages * l->slab_bytes +
           (uint64_t)(id % l->slab_pages) * l->format[q->format].page_bytes +
           (uint64_t)layer * l->format[q->format].layer_bytes;
}

/* Element i of K (plane 0) or V (1) */
static UNUSED double kv_get(const struct fix *f, const struct seq *q, uint32_t position, uint32_t layer, uint32_t head,
                            int plane, uint32_t i)
{
    const struct dn_kv_layout *l = &f->layout;
    const uint8_t *at = kv_layer(f, q, position, layer);
    size_t token = (size_t)head * l->page_tokens + position % l->page_tokens;
    size_t plane_values = (size_t)l->n_kv_heads * l->page_tokens * l->head_dim;
    if (q->format == DN_KV_BF16)
        return bf16_value(((const uint16_t *)at)[plane * plane_values + token * l->head_dim + i]);
    const float *scales = (const float *)(at + 2 * plane_values) + (size_t)plane * l->n_kv_heads * l->page_tokens;
    return e4m3_value(at[plane * plane_values + token * l->head_dim + i]) * (double)scales[token];
}

/* Random K and V of a position in all heads of a layer. */
static UNUSED void kv_fill(struct fix *f, const struct seq *q, uint32_t position, uint32_t layer)
{
    const struct dn_kv_layout *l = &f->layout;
    uint8_t *at = kv_layer(f, q, position, layer);
    size_t plane_values = (size_t)l->n_kv_heads * l->page_tokens * l->head_dim;
    for (uint32_t h = 0; h < l->n_kv_heads; h++) {
        size_t token = (size_t)h * l->page_tokens + position % l->page_tokens;
        for (int plane = 0; plane < 2; plane++) {
            float *scales = (float *)(at + 2 * plane_values) + (size_t)plane * l->n_kv_heads * l->page_tokens;
            size_t first = plane * plane_values + token * l->head_dim;
            if (q->format == DN_KV_FP8)
                scales[token] = (float)(0.5 + rng_unit()) / 100.0f;
            for (uint32_t i = 0; i < l->head_dim; i++) {
                float x = rng_normal();
                if (q->format == DN_KV_BF16) {
                    uint32_t u;
                    memcpy(&u, &x, sizeof u);
                    ((uint16_t *)at)[first + i] = (uint16_t)(u >> 16);
                } else {
                    uint8_t code = (uint8_t)rng(); /* any but NaN; most are large */
                    at[first + i] = (code & 0x7f) == 0x7f ? 0 : code;
                }
            }
        }
    }
}

#endif
