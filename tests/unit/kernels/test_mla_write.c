/* Norm of the latent, rope of the key and the queries, and the paged write of multi-head latent attention, against
 * float64. The encoders themselves are tested bit by bit in test_qkv_write.c. */
#include "unit/kernels/mla_fixture.h"

struct shape {
    struct mla_shape m;
    bool interleaved, in_place;
};

static const struct shape shapes[] = {
    {{4, 128, 64, 0, 512, 64}, true, true},   {{3, 20, 10, 0, 52, 16}, false, false},
    {{64, 128, 64, 0, 512, 64}, true, false}, {{1, 0, 2, 0, 1, 48}, false, true},
    {{5, 48, 32, 0, 80, 32}, true, false},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes, MAX_POSITION = 400, LAYER = 1 };

static const double eps = 1e-6;

static void make_rope(float *table, uint32_t dim)
{
    for (uint32_t p = 0; p < MAX_POSITION; p++) {
        for (uint32_t i = 0; i < dim / 2; i++) {
            double angle = p * pow(50000.0, -2.0 * i / dim);
            table[((size_t)p * dim / 2 + i) * 2] = (float)cos(angle);
            table[((size_t)p * dim / 2 + i) * 2 + 1] = (float)sin(angle);
        }
    }
}

static void rotate(const float *x, const float *table, uint32_t dim, bool interleaved, double *out)
{
    for (uint32_t i = 0; i < dim / 2; i++) {
        uint32_t a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + dim / 2;
        double p = (double)x[a], q = (double)x[b], c = (double)table[2 * i], s = (double)table[2 * i + 1];
        out[a] = p * c - q * s;
        out[b] = q * c + p * s;
    }
}

struct run {
    struct fix f;
    struct seq seq[4];
    float *kv, *q, *q_before, *q_rope, *norm, *rope;
    uint32_t kv_stride, rope_stride, head_stride;
};

static const uint32_t part[4][2] = {{0, 1}, {5, 50}, {63, 2}, {300, 18}}; /* position, tokens */

static void run_open(struct run *r, const char *isa, unsigned n_threads, const struct shape *h)
{
    const struct mla_shape *m = &h->m;
    fix_open(&r->f, isa, n_threads, 16);
    mla_arena(&r->f, 2, m, 128);
    step_clear(&r->f);
    for (int i = 0; i < 4; i++) {
        mla_seq(&r->f, r->seq + i, i % 2 ? DN_KV_FP8 : DN_KV_BF16, part[i][0] + part[i][1]);
        step_add(&r->f, r->seq + i, part[i][0], part[i][1]);
    }
    size_t n = r->f.s->n_tokens, head = m->nope + m->rope, width = m->n_heads * head;
    r->kv_stride = m->latent + m->rope + 3;
    r->kv = fix_floats(&r->f, n * r->kv_stride);
    r->q = fix_floats(&r->f, n * width);
    r->q_before = fix_floats(&r->f, n * width);
    r->norm = fix_floats(&r->f, m->latent);
    r->rope = fix_floats(&r->f, (size_t)MAX_POSITION * m->rope);
    make_rope(r->rope, m->rope);
    for (size_t t = 0; t < n; t++) /* from tiny to large */
        fill_normal(r->kv + t * r->kv_stride, r->kv_stride, expf((float)(t % 9) * 2.0f - 8.0f));
    fill_normal(r->q, n * width, 2.0f);
    memcpy(r->q_before, r->q, n * width * sizeof *r->q);
    fill_normal(r->norm, m->latent, 1.0f);
    if (h->in_place) {
        r->q_rope = r->q + m->nope;
        r->rope_stride = (uint32_t)width;
        r->head_stride = (uint32_t)head;
    } else { /* behind the latents of absorbed queries */
        r->head_stride = m->latent + m->rope;
        r->rope_stride = m->n_heads * r->head_stride;
        float *all = fix_floats(&r->f, n * r->rope_stride);
        memset(all, 0xff, n * r->rope_stride * sizeof *all);
        r->q_rope = all + m->latent;
    }
}

static void run_write(struct run *r, const struct shape *h)
{
    const struct mla_shape *m = &h->m;
    r->f.ops->mla_write(r->f.d, &(struct dn_mla_write){.kv = r->kv,
                                                       .kv_stride = r->kv_stride,
                                                       .q = r->q,
                                                       .q_rope = r->q_rope,
                                                       .q_rope_stride = r->rope_stride,
                                                       .q_rope_head_stride = r->head_stride,
                                                       .n_heads = m->n_heads,
                                                       .nope_dim = m->nope,
                                                       .rope_dim = m->rope,
                                                       .latent_dim = m->latent,
                                                       .kv_norm = r->norm,
                                                       .norm_eps = (float)eps,
                                                       .rope = r->rope,
                                                       .interleaved = h->interleaved,
                                                       .layout = &r->f.layout,
                                                       .arena = r->f.arena,
                                                       .layer = LAYER});
    mla_step(&r->f);
}

/* Two products and a sum of values up to the pair's length, which is at most 1.5 times the largest value. */
static double rope_bound(const float *x, uint32_t dim)
{
    double top = 0;
    for (uint32_t i = 0; i < dim; i++)
        top = fmax(top, fabs((double)x[i]));
    return 4 * 0x1p-24 * 1.5 * top;
}

static void check_queries(const struct run *r, const struct shape *h, const char *isa, uint32_t t)
{
    const struct mla_shape *m = &h->m;
    uint32_t dim = m->nope + m->rope;
    double want[64];
    const float *table = r->rope + (size_t)r->f.s->position[t] * m->rope;
    for (uint32_t head = 0; head < m->n_heads; head++) {
        size_t at = ((size_t)t * m->n_heads + head) * dim;
        const float *before = r->q_before + at,
                    *got = r->q_rope + (size_t)t * r->rope_stride + (size_t)head * r->head_stride;
        rotate(before + m->nope, table, m->rope, h->interleaved, want);
        for (uint32_t i = 0; i < m->rope; i++)
            cr_assert(fabs((double)got[i] - want[i]) <= rope_bound(before + m->nope, m->rope),
                      "%s: query of token %u, head %u, value %u: %g, not %g", isa, t, head, i, (double)got[i], want[i]);
        cr_assert(memcmp(r->q + at, before, m->nope * sizeof *before) == 0, "the part without rope was changed");
        if (!h->in_place)
            cr_assert(memcmp(r->q + at, before, dim * sizeof *before) == 0, "the query was changed");
    }
}

/* Half a unit of bf16 (8 bits); of e4m3 (4 bits) or of its smallest step, amax / 448 / 2^9; the norm as in test_norm.c:
 * half of dim roundings for its root, and four. */
static void check_cache(const struct run *r, const struct shape *h, const char *isa, uint32_t t)
{
    const struct mla_shape *m = &h->m;
    const struct seq *s = r->seq + r->f.s->token_seq[t];
    uint32_t position = (uint32_t)r->f.s->position[t];
    const float *kv = r->kv + (size_t)t * r->kv_stride;
    double sum = 0, amax = 0, want[512], key[64], norm = (m->latent / 2 + 4) * 0x1p-24;
    for (uint32_t i = 0; i < m->latent; i++)
        sum += (double)kv[i] * (double)kv[i];
    for (uint32_t i = 0; i < m->latent; i++) {
        want[i] = (double)kv[i] / sqrt(sum / m->latent + eps) * (double)r->norm[i];
        amax = fmax(amax, fabs(want[i]));
    }
    for (uint32_t i = 0; i < m->latent; i++) {
        double got = mla_get(&r->f, s, position, LAYER, i);
        double format = s->format == DN_KV_BF16 ? fabs(want[i]) * 0x1p-8 * 1.01
                                                : fmax(fabs(want[i]) * 0x1p-4, amax / 448 * 0x1p-10) * 1.01;
        cr_assert(fabs(got - want[i]) <= format + norm * amax + 1e-38,
                  "%s: latent of position %u, value %u: %g, not %g", isa, position, i, got, want[i]);
    }
    if (s->format == DN_KV_FP8 && amax > 1e-20) { /* the scale is that of the largest value */
        const struct dn_kv_layout *l = &r->f.layout;
        const float *scale = (const float *)(kv_layer(&r->f, s, position, LAYER) + l->format[DN_KV_FP8].k_scale_offset);
        double got = (double)scale[position % l->page_tokens];
        cr_assert(fabs(got - amax / 448) <= (norm + 0x1p-22) * amax / 448, "%s: scale %g, not %g", isa, got,
                  amax / 448);
    }
    rotate(kv + m->latent, r->rope + (size_t)position * m->rope, m->rope, h->interleaved, key);
    for (uint32_t i = 0; i < m->rope; i++) {
        double got = mla_get(&r->f, s, position, LAYER, m->latent + i);
        cr_assert(fabs(got - key[i]) <= fabs(key[i]) * 0x1p-8 * 1.01 + rope_bound(kv + m->latent, m->rope),
                  "%s: rope key of position %u, value %u: %g, not %g", isa, position, i, got, key[i]);
    }
}

Test(mla_write, is_within_rounding_of_float64_and_writes_nothing_else)
{
    FOR_EACH_ISA(isa)
    {
        for (size_t k = 0; k < N_SHAPES; k++) {
            struct run r;
            const struct shape *h = shapes + k;
            run_open(&r, isa, 1 + k % 3, h);
            r.f.ops->step_begin(r.f.d, 1);
            run_write(&r, h);
            for (uint32_t t = 0; t < r.f.s->n_tokens; t++) {
                check_queries(&r, h, isa, t);
                check_cache(&r, h, isa, t);
            }
            uint64_t written = 0, own = 0;
            for (uint64_t b = 0; b < r.f.layout.slab_bytes * r.f.n_slabs; b++)
                written += r.f.arena[b] != 0xff;
            for (int i = 0; i < 4; i++)
                own += (uint64_t)part[i][1] * (r.seq[i].format == DN_KV_BF16 ? (h->m.latent + h->m.rope) * 2
                                                                             : h->m.latent + h->m.rope * 2 + 4);
            cr_assert(written <= own && written > own * 9 / 10, "%s: %lu bytes changed, of %lu", isa, written, own);
            fix_close(&r.f);
        }
    }
}

/* A sequence whose tag does not match: the foreign page keeps its bytes. */
Test(mla_write, of_a_bad_sequence_leaves_its_pages_alone)
{
    FOR_EACH_ISA(isa)
    {
        struct run r;
        const struct shape *h = shapes + 1;
        run_open(&r, isa, 2, h);
        uint64_t bytes = r.f.layout.slab_bytes * r.f.n_slabs, *table = calloc(8192, sizeof *table);
        for (uint64_t b = 0; b < bytes; b++)
            r.f.arena[b] = (uint8_t)rng();
        uint8_t *before = malloc(bytes);
        memcpy(before, r.f.arena, bytes);
        for (int i = 0; i < 4; i++)
            r.f.s->check[i] = 1;
        for (int32_t i = 0; i < r.f.s->page_start[4]; i++)
            r.f.s->tag[i] = table[r.f.s->page[i]] = 77;
        r.f.s->tag[r.f.s->page_start[2] - 1] = 78;      /* of the second sequence */
        r.f.s->page[r.f.s->page_start[3]] = UINT32_MAX; /* of the fourth */
        r.f.ops->step_begin(r.f.d, 1);
        r.f.ops->check_tags(r.f.d, &(struct dn_check_tags){table, 8192, r.f.layout.page_tokens});
        run_write(&r, h);
        cr_assert(!r.f.s->bad[0] && r.f.s->bad[1] && !r.f.s->bad[2] && r.f.s->bad[3]);
        for (uint32_t t = 0; t < r.f.s->n_tokens; t++) {
            check_queries(&r, h, isa, t);
            if (!r.f.s->bad[r.f.s->token_seq[t]])
                check_cache(&r, h, isa, t);
        }
        for (int i = 1; i < 4; i += 2) {
            for (uint32_t p = 0; p < r.seq[i].n_pages; p++) {
                uint64_t at = dn_kv_page_offset(&r.f.layout, r.seq[i].format, r.seq[i].page[p]);
                cr_assert(memcmp(before + at, r.f.arena + at, r.f.layout.format[r.seq[i].format].page_bytes) == 0,
                          "%s: a page of bad sequence %d was written to", isa, i);
            }
        }
        free(before);
        free(table);
        fix_close(&r.f);
    }
}

/* NaN and infinity in a latent, latents of zeros, and values that reach +-448 exactly. */
Test(mla_write, extremes)
{
    FOR_EACH_ISA(isa)
    {
        struct run r;
        const struct shape *h = shapes + 4;
        uint32_t latent = h->m.latent;
        run_open(&r, isa, 1, h);
        float *x = r.kv + r.kv_stride; /* tokens of the second sequence, FP8; 6 of the third, BF16 */
        for (uint32_t i = 0; i < latent; i++) {
            r.norm[i] = 1.0f;
            x[i] = 0.0f;                                         /* token 1: zeros */
            x[3 * r.kv_stride + i] = i % 2 ? 1000.0f : -1000.0f; /* token 4: all of the largest size */
        }
        x[r.kv_stride + 7] = NAN;
        x[2 * r.kv_stride + 7] = INFINITY;
        r.f.ops->step_begin(r.f.d, 1);
        run_write(&r, h);
        for (uint32_t i = 0; i < latent; i++) {
            cr_assert_eq(mla_get(&r.f, r.seq + 1, 5, LAYER, i), 0.0);
            cr_assert(isnan(mla_get(&r.f, r.seq + 1, 6, LAYER, i)), "%s: a NaN makes the latent NaN", isa);
            cr_assert(isnan(mla_get(&r.f, r.seq + 1, 7, LAYER, i)), "%s: infinity times 1 / infinity", isa);
            const uint8_t *codes = kv_layer(&r.f, r.seq + 1, 8, LAYER);
            cr_assert_eq(codes[8 * latent + i], i % 2 ? 0x7e : 0xfe, "%s: +-448", isa);
            cr_assert(!isnan(mla_get(&r.f, r.seq + 1, 9, LAYER, i)));
        }
        fix_close(&r.f);
    }
}
