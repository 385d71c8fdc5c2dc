/* Multi-head latent attention against float64, absorbed against un-absorbed, and the determinism rule of kernels.h for
 * both. */
#include "unit/kernels/mla_fixture.h"

#include "kernels/cpu/matmul.h"

/* heads, nope, rope, v, latent, page: Kimi's sizes with few heads, more heads than a register tile, odd sizes (several
 * groups must have multiples of 64) */
static const struct mla_shape shapes[] = {
    {2, 128, 64, 128, 512, 64}, {13, 64, 8, 64, 32, 16}, {1, 20, 10, 36, 52, 16},
    {4, 64, 64, 128, 64, 32},   {7, 64, 20, 64, 80, 16}, {1, 64, 2, 64, 32, 48},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes, LAYER = 1 };

/* first position, tokens: one token, odd chunks, edges of pages, tiles and splits, several splits */
static const struct part {
    uint32_t position, n;
    enum dn_kv_format format;
} part[] = {{0, 1, DN_KV_BF16},   {15, 1, DN_KV_FP8},  {0, 17, DN_KV_FP8},  {63, 2, DN_KV_BF16}, {250, 12, DN_KV_FP8},
            {257, 1, DN_KV_BF16}, {0, 1, DN_KV_FP8},   {16, 1, DN_KV_BF16}, {3, 130, DN_KV_FP8}, {0, 65, DN_KV_BF16},
            {511, 2, DN_KV_BF16}, {600, 1, DN_KV_FP8}, {778, 1, DN_KV_BF16}};
enum { N_PARTS = sizeof part / sizeof *part };

/* The first ones suffice for large latents, whose oracle takes long. */
static uint32_t n_parts(const struct mla_shape *h)
{
    return h->latent >= 512 ? 6 : N_PARTS;
}

static void open_parts(struct fix *f, const char *isa, unsigned n_threads, const struct mla_shape *h, struct seq *q)
{
    fix_open(f, isa, n_threads, 16);
    mla_arena(f, 2, h, 256);
    step_clear(f);
    for (uint32_t i = 0; i < n_parts(h); i++) {
        mla_seq(f, q + i, part[i].format, part[i].position + part[i].n);
        mla_fill_all(f, q + i, part[i].position + part[i].n);
        step_add(f, q + i, part[i].position, part[i].n);
    }
}

/* Compares the rows of a head of a sequence, queries [n_tokens][n_heads][key_dim]. */
static void check_head(const struct fix *f, uint32_t seq, uint32_t head, uint32_t n_heads, const struct mla_head *m,
                       const float *query, double scale, const float *out, const char *what)
{
    double *q = malloc(m->key_dim * sizeof *q), *want = malloc(m->value_dim * sizeof *want),
           *bound = malloc(m->value_dim * sizeof *bound);
    for (int32_t t = f->s->token_start[seq]; t < f->s->token_start[seq + 1]; t++) {
        size_t row = (size_t)t * n_heads + head;
        for (uint32_t i = 0; i < m->key_dim; i++)
            q[i] = (double)query[row * m->key_dim + i];
        mla_row(m, q, NULL, (uint32_t)f->s->position[t], scale, want, bound);
        for (uint32_t i = 0; i < m->value_dim; i++) {
            double got = (double)out[row * m->value_dim + i];
            cr_assert(fabs(got - want[i]) <= bound[i],
                      "%s: sequence %u position %d head %u value %u: %.9g, not %.9g +- %.2g", what, seq,
                      f->s->position[t], head, i, got, want[i], bound[i]);
        }
    }
    free(q);
    free(want);
    free(bound);
}

static void check_absorbed(const char *isa, unsigned n_threads, const struct mla_shape *h)
{
    struct fix f;
    struct seq *q = calloc(N_PARTS, sizeof *q);
    char what[96];
    snprintf(what, sizeof what, "%s, %u threads, %u heads of %u + %u", isa, n_threads, h->n_heads, h->latent, h->rope);
    open_parts(&f, isa, n_threads, h, q);
    uint32_t dim = h->latent + h->rope;
    float scale = 1.0f / sqrtf((float)dim);
    float *query = fix_floats(&f, (size_t)f.s->n_tokens * h->n_heads * dim),
          *out = fix_floats(&f, (size_t)f.s->n_tokens * h->n_heads * h->latent);
    fill_normal(query, (size_t)f.s->n_tokens * h->n_heads * dim, 1.0f);
    memset(out, 0xff, (size_t)f.s->n_tokens * h->n_heads * h->latent * sizeof *out);
    f.ops->step_begin(f.d, 1);
    run_absorbed(&f, h, LAYER, scale, query, out);
    mla_step(&f);
    for (uint32_t s = 0; s < n_parts(h); s++) {
        struct mla_head m;
        mla_latents(&f, q + s, LAYER, part[s].position + part[s].n, &m);
        for (uint32_t head = 0; head < h->n_heads; head++)
            check_head(&f, s, head, h->n_heads, &m, query, (double)scale, out, what);
        mla_head_free(&m);
    }
    free(q);
    fix_close(&f);
}

Test(mla, absorbed_is_within_rounding_of_float64)
{
    FOR_EACH_ISA(isa)
    {
        for (size_t i = 0; i < N_SHAPES; i++)
            check_absorbed(isa, 1 + i % 3, shapes + i);
    }
}

static void check_prefill(const char *isa, unsigned n_threads, const struct mla_shape *h, enum dn_weight_format format)
{
    struct fix f;
    struct mla_weights w;
    struct seq *q = calloc(N_PARTS, sizeof *q);
    char what[128];
    snprintf(what, sizeof what, "%s, %s, %u threads, %u heads of %u + %u, %u, latent %u", isa,
             dn_weight_format_name(format), n_threads, h->n_heads, h->nope, h->rope, h->v, h->latent);
    open_parts(&f, isa, n_threads, h, q);
    mla_weights(&f, &w, h, format, dn_cpu_matrix_row);
    uint32_t dim = h->nope + h->rope;
    float scale = 1.0f / sqrtf((float)dim);
    float *query = fix_floats(&f, (size_t)f.s->n_tokens * h->n_heads * dim),
          *out = fix_floats(&f, (size_t)f.s->n_tokens * h->n_heads * h->v);
    fill_normal(query, (size_t)f.s->n_tokens * h->n_heads * dim, 1.0f);
    memset(out, 0xff, (size_t)f.s->n_tokens * h->n_heads * h->v * sizeof *out);
    f.ops->step_begin(f.d, 1);
    run_prefill(&f, h, LAYER, scale, &w, query, out);
    mla_step(&f);
    for (uint32_t s = 0; s < n_parts(h); s++) {
        for (uint32_t head = 0; head < h->n_heads; head++) {
            struct mla_head m;
            mla_expand(&f, q + s, LAYER, h, &w, head, part[s].position + part[s].n, &m);
            check_head(&f, s, head, h->n_heads, &m, query, (double)scale, out, what);
            mla_head_free(&m);
        }
    }
    free(q);
    mla_weights_free(&w);
    fix_close(&f);
}

Test(mla, unabsorbed_is_within_rounding_of_float64)
{
    FOR_EACH_ISA(isa)
    {
        for (size_t i = 0; i < N_SHAPES; i++)
            check_prefill(isa, 1 + i % 3, shapes + i, DN_W_BF16);
        check_prefill(isa, 2, &(struct mla_shape){2, 128, 8, 128, 128, 16}, DN_W_FP8);
        check_prefill(isa, 2, &(struct mla_shape){3, 64, 8, 64, 96, 16}, DN_W_INT8);
        check_prefill(isa, 2, &(struct mla_shape){3, 64, 8, 64, 96, 16}, DN_W_INT4);
    }
}

/* ---- Absorbed against un-absorbed ---- */

/* The absorbed path of a layer: queries through W_k, attention in the latent space, outputs through W_v. Scratch is
 * kept, since a test wants the queries as well. */
static void absorbed_path(struct fix *f, const struct mla_shape *h, const struct mla_weights *w, float scale,
                          const float *query, float *q, float *latent, float *out)
{
    uint32_t dim = h->latent + h->rope, from = h->nope + h->rope;
    f->ops->group_matmul(f->d, &(struct dn_group_matmul){.a = query,
                                                         .a_stride = h->n_heads * from,
                                                         .a_group_stride = from,
                                                         .w = &w->k_t,
                                                         .out = q,
                                                         .out_stride = h->n_heads * dim,
                                                         .out_group_stride = dim});
    for (size_t r = 0; r < (size_t)f->s->n_tokens * h->n_heads; r++)
        memcpy(q + r * dim + h->latent, query + r * from + h->nope, h->rope * sizeof *q);
    run_absorbed(f, h, LAYER, scale, q, latent);
    f->ops->group_matmul(f->d, &(struct dn_group_matmul){.a = latent,
                                                         .a_stride = h->n_heads * h->latent,
                                                         .a_group_stride = h->latent,
                                                         .w = &w->v,
                                                         .out = out,
                                                         .out_stride = h->n_heads * h->v,
                                                         .out_group_stride = h->v});
}

/* What f32 may add to the absorbed path: the error of q~ goes into mla_row(), whose result and error go through W_v. */
static void absorbed_bound(const struct mla_shape *h, const struct mla_weights *w, uint32_t head,
                           const struct mla_head *latents, const float *query, uint32_t position, double scale,
                           double *out, double *bound)
{
    uint32_t dim = h->latent + h->rope;
    double *x = malloc(h->nope * sizeof *x), *q = calloc(dim, sizeof *q), *q_err = calloc(dim, sizeof *q_err);
    double *o = malloc(h->latent * sizeof *o), *o_err = malloc(h->latent * sizeof *o_err);
    double *t = malloc((size_t)h->latent * h->nope * sizeof *t);
    for (uint32_t i = 0; i < h->latent * h->nope; i++)
        t[i] = w->k_value[((size_t)head * h->nope + i % h->nope) * h->latent + i / h->nope];
    for (uint32_t i = 0; i < h->nope; i++)
        x[i] = (double)query[i];
    mla_product(t, h->latent, h->nope, x, NULL, false, q, q_err);
    for (uint32_t i = 0; i < h->rope; i++)
        q[h->latent + i] = (double)query[h->nope + i];
    mla_row(latents, q, q_err, position, scale, o, o_err);
    mla_product(w->v_value + (size_t)head * h->v * h->latent, h->v, h->latent, o, o_err, false, out, bound);
    free(x);
    free(q);
    free(q_err);
    free(o);
    free(o_err);
    free(t);
}

/* Both forms on the same cache. Both compute the same real number: they differ by the sum of their bounds at most. */
static void check_forms(const char *isa, const struct mla_shape *h)
{
    struct fix f;
    struct mla_weights w;
    struct seq *q = calloc(N_PARTS, sizeof *q);
    open_parts(&f, isa, 2, h, q);
    mla_weights(&f, &w, h, DN_W_BF16, dn_cpu_matrix_row);
    uint32_t from = h->nope + h->rope, dim = h->latent + h->rope;
    float scale = 1.0f / sqrtf((float)from);
    size_t rows = (size_t)f.s->n_tokens * h->n_heads;
    float *query = fix_floats(&f, rows * from), *q_latent = fix_floats(&f, rows * dim),
          *o_latent = fix_floats(&f, rows * h->latent), *a = fix_floats(&f, rows * h->v),
          *u = fix_floats(&f, rows * h->v);
    fill_normal(query, rows * from, 1.0f);
    f.ops->step_begin(f.d, 1);
    run_prefill(&f, h, LAYER, scale, &w, query, u);
    absorbed_path(&f, h, &w, scale, query, q_latent, o_latent, a);
    mla_step(&f);
    double *x = malloc(from * sizeof *x), *out = malloc(h->v * sizeof *out), *bound = malloc(h->v * sizeof *bound),
           *bound2 = malloc(h->v * sizeof *bound2), worst = 0, largest = 0;
    for (uint32_t head = 0; head < h->n_heads; head++) {
        for (uint32_t s = 0; s < n_parts(h); s++) {
            struct mla_head expanded, latents;
            mla_expand(&f, q + s, LAYER, h, &w, head, part[s].position + part[s].n, &expanded);
            mla_latents(&f, q + s, LAYER, part[s].position + part[s].n, &latents);
            for (int32_t t = f.s->token_start[s]; t < f.s->token_start[s + 1]; t += 5) {
                size_t row = (size_t)t * h->n_heads + head;
                for (uint32_t i = 0; i < from; i++)
                    x[i] = (double)query[row * from + i];
                mla_row(&expanded, x, NULL, (uint32_t)f.s->position[t], (double)scale, out, bound);
                absorbed_bound(h, &w, head, &latents, query + row * from, (uint32_t)f.s->position[t], (double)scale,
                               out, bound2);
                for (uint32_t i = 0; i < h->v; i++) {
                    double d = fabs((double)a[row * h->v + i] - (double)u[row * h->v + i]);
                    cr_assert(d <= bound[i] + bound2[i],
                              "%s: position %d head %u value %u: absorbed %.9g, un-absorbed %.9g, bound %.2g", isa,
                              f.s->position[t], head, i, (double)a[row * h->v + i], (double)u[row * h->v + i],
                              bound[i] + bound2[i]);
                    worst = fmax(worst, d);
                    largest = fmax(largest, fabs(out[i]));
                }
            }
            mla_head_free(&expanded);
            mla_head_free(&latents);
        }
    }
    printf("%s, %u heads: absorbed and un-absorbed differ by %.2g at most, outputs up to %.2g\n", isa, h->n_heads,
           worst, largest);
    free(x);
    free(out);
    free(bound);
    free(bound2);
    free(q);
    mla_weights_free(&w);
    fix_close(&f);
}

Test(mla, absorbed_and_unabsorbed_agree_on_one_cache)
{
    FOR_EACH_ISA(isa)
    {
        check_forms(isa, shapes);
        check_forms(isa, shapes + 3);
        check_forms(isa, shapes + 2);
    }
}

/* ---- The same bits in all ways ---- */

struct bits {
    const char *isa;
    const struct mla_shape *h;
    enum dn_kv_format format;
    bool absorbed;
};

enum { BITS_N = 600 };

static void run_bits(struct fix *f, const struct bits *b, const struct mla_weights *w, const float *q, float *out)
{
    f->ops->step_begin(f->d, 1);
    if (b->absorbed)
        run_absorbed(f, b->h, 0, 0.1f, q, out);
    else
        run_prefill(f, b->h, 0, 0.1f, w, q, out);
    mla_step(f);
}

/* Rows of one sequence: chunks behind rows of another one of the other format, single tokens with NaN in all later
 * positions, on 1 and 3 threads. */
static void check_bits(const struct bits *b)
{
    const struct mla_shape *h = b->h;
    uint32_t from = h->n_heads * (b->absorbed ? h->latent + h->rope : h->nope + h->rope),
             to = h->n_heads * (b->absorbed ? h->latent : h->v);
    float *all = malloc((size_t)BITS_N * to * sizeof *all), *kept = malloc((size_t)BITS_N * from * sizeof *kept);
    for (unsigned k = 1; k <= 3; k += 2) {
        struct fix f;
        struct seq q, other;
        struct mla_weights w;
        rng_state = 7;
        fix_open(&f, b->isa, k, 16);
        mla_arena(&f, 1, h, 128);
        mla_seq(&f, &q, b->format, BITS_N);
        mla_fill_all(&f, &q, BITS_N);
        mla_seq(&f, &other, b->format == DN_KV_FP8 ? DN_KV_BF16 : DN_KV_FP8, 200);
        mla_fill_all(&f, &other, 200);
        mla_weights(&f, &w, h, DN_W_BF16, dn_cpu_matrix_row);
        float *rows = fix_floats(&f, (size_t)FIX_TOKENS * from), *out = fix_floats(&f, (size_t)FIX_TOKENS * to);
        fill_normal(rows, (size_t)BITS_N * from, 1.0f);
        step_clear(&f);
        step_add(&f, &q, 0, BITS_N);
        run_bits(&f, b, &w, rows, out);
        if (k == 1) {
            memcpy(all, out, (size_t)BITS_N * to * sizeof *all);
            memcpy(kept, rows, (size_t)BITS_N * from * sizeof *kept);
        }
        cr_assert(memcmp(all, out, (size_t)BITS_N * to * sizeof *all) == 0, "%s: %u threads change bits", b->isa, k);
        static const uint32_t chunk[] = {1, 2, 3, 16, 33, 64, 100, 257};
        for (uint32_t at = 0, c = 0; at < BITS_N; c++) {
            uint32_t n = chunk[c % 8] < BITS_N - at ? chunk[c % 8] : BITS_N - at, m = rng_below(3) * 20;
            step_clear(&f);
            if (m)
                step_add(&f, &other, 100, m);
            step_add(&f, &q, at, n);
            fill_normal(rows, (size_t)m * from, 1.0f);
            memcpy(rows + (size_t)m * from, kept + (size_t)at * from, (size_t)n * from * sizeof *rows);
            run_bits(&f, b, &w, rows, out);
            cr_assert(memcmp(all + (size_t)at * to, out + (size_t)m * to, (size_t)n * to * sizeof *all) == 0,
                      "%s, %s, %u threads: chunk [%u, %u) behind %u rows of another sequence differs", b->isa,
                      b->absorbed ? "absorbed" : "un-absorbed", k, at, at + n, m);
            at += n;
        }
        for (uint32_t p = BITS_N; p-- > 0; mla_forget(&f, &q, p)) {
            if (p % 61 != 0 && p % 256 < 254)
                continue;
            step_clear(&f);
            step_add(&f, &q, p, 1);
            run_bits(&f, b, &w, kept + (size_t)p * from, out);
            cr_assert(memcmp(all + (size_t)p * to, out, to * sizeof *all) == 0, "%s, %s, %u threads: token %u alone",
                      b->isa, b->absorbed ? "absorbed" : "un-absorbed", k, p);
        }
        mla_weights_free(&w);
        fix_close(&f);
    }
    free(all);
    free(kept);
}

Test(mla, gives_the_same_bits_in_any_chunk_batch_and_number_of_threads)
{
    FOR_EACH_ISA(isa)
    {
        for (int absorbed = 0; absorbed < 2; absorbed++) {
            check_bits(&(struct bits){isa, shapes + 3, DN_KV_BF16, absorbed});
            check_bits(&(struct bits){isa, shapes + 3, DN_KV_FP8, absorbed});
            check_bits(&(struct bits){isa, shapes + 1, DN_KV_FP8, absorbed});
            check_bits(&(struct bits){isa, shapes + 2, DN_KV_BF16, absorbed});
        }
    }
}

/* ---- Bad sequences, NaN ---- */

Test(mla, of_a_bad_sequence_is_zero_and_leaves_the_others_alone)
{
    FOR_EACH_ISA(isa)
    {
        const struct mla_shape *h = shapes + 3;
        struct fix f;
        struct seq a, b;
        struct mla_weights w;
        fix_open(&f, isa, 2, 16);
        mla_arena(&f, 1, h, 64);
        mla_seq(&f, &a, DN_KV_BF16, 40);
        mla_seq(&f, &b, DN_KV_FP8, 40);
        mla_fill_all(&f, &a, 40);
        mla_fill_all(&f, &b, 40);
        mla_weights(&f, &w, h, DN_W_BF16, dn_cpu_matrix_row);
        step_clear(&f);
        step_add(&f, &a, 0, 40);
        step_add(&f, &b, 0, 40);
        uint64_t *table = calloc(4096, sizeof *table);
        for (int32_t i = 0; i < f.s->page_start[2]; i++)
            f.s->tag[i] = table[f.s->page[i]] = 1000u + (unsigned)i;
        for (int absorbed = 0; absorbed < 2; absorbed++) {
            struct bits how = {isa, h, DN_KV_BF16, absorbed};
            uint32_t from = h->n_heads * (absorbed ? h->latent + h->rope : h->nope + h->rope),
                     to = h->n_heads * (absorbed ? h->latent : h->v);
            float *q = fix_floats(&f, (size_t)80 * from), *good = fix_floats(&f, (size_t)80 * to),
                  *out = fix_floats(&f, (size_t)80 * to);
            fill_normal(q, (size_t)80 * from, 1.0f);
            run_bits(&f, &how, &w, q, good);
            memset(out, 0xff, (size_t)80 * to * sizeof *out);
            f.s->check[0] = f.s->check[1] = 1;
            f.s->tag[1]++;
            uint32_t page = f.s->page[1];
            f.s->page[1] = UINT32_MAX; /* never to be followed */
            f.ops->step_begin(f.d, 1);
            f.ops->check_tags(f.d, &(struct dn_check_tags){table, 4096, f.layout.page_tokens});
            if (absorbed)
                run_absorbed(&f, h, 0, 0.1f, q, out);
            else
                run_prefill(&f, h, 0, 0.1f, &w, q, out);
            mla_step(&f);
            f.s->page[1] = page;
            f.s->tag[1]--;
            f.s->check[0] = f.s->check[1] = 0;
            cr_assert_eq(f.s->bad[0], 2);
            cr_assert_eq(f.s->bad[1], 0);
            for (uint32_t i = 0; i < 40 * to; i++)
                cr_assert_eq(out[i], 0.0f);
            cr_assert(memcmp(out + (size_t)40 * to, good + (size_t)40 * to, (size_t)40 * to * sizeof *out) == 0);
        }
        free(table);
        mla_weights_free(&w);
        fix_close(&f);
    }
}

/* A NaN in a latent or a rope key reaches the tokens from its own on, in all heads, and no other sequence. */
Test(mla, nan_stays_with_its_sequence)
{
    FOR_EACH_ISA(isa)
    {
        for (int what = 0; what < 6; what++) {
            const struct mla_shape *h = shapes + 3;
            bool absorbed = what & 1, fp8 = what < 2, rope = what >= 4;
            struct fix f;
            struct seq a, b;
            struct mla_weights w;
            fix_open(&f, isa, 1, 16);
            mla_arena(&f, 1, h, 64);
            mla_seq(&f, &a, fp8 ? DN_KV_FP8 : DN_KV_BF16, 20);
            mla_seq(&f, &b, DN_KV_BF16, 20);
            mla_fill_all(&f, &a, 20);
            mla_fill_all(&f, &b, 20);
            mla_weights(&f, &w, h, DN_W_BF16, dn_cpu_matrix_row);
            uint8_t *at = kv_layer(&f, &a, 10, 0);
            if (fp8)
                ((float *)(at + f.layout.format[DN_KV_FP8].k_scale_offset))[10] = NAN;
            else if (rope)
                ((uint16_t *)(at + f.layout.format[DN_KV_BF16].v_offset))[10 * h->rope + 3] = 0x7fc0;
            else
                ((uint16_t *)at)[10 * h->latent + 5] = 0x7fc0;
            uint32_t from = h->n_heads * (absorbed ? h->latent + h->rope : h->nope + h->rope),
                     to = h->n_heads * (absorbed ? h->latent : h->v);
            float *q = fix_floats(&f, (size_t)40 * from), *out = fix_floats(&f, (size_t)40 * to);
            fill_normal(q, (size_t)40 * from, 1.0f);
            step_clear(&f);
            step_add(&f, &a, 0, 20);
            step_add(&f, &b, 0, 20);
            run_bits(&f, &(struct bits){isa, h, DN_KV_BF16, absorbed}, &w, q, out);
            for (uint32_t i = 0; i < 40 * to; i++)
                cr_assert_eq(!isnan(out[i]), i / to < 10 || i / to >= 20, "%s: %d: token %u", isa, what, i / to);
            mla_weights_free(&w);
            fix_close(&f);
        }
    }
}

/* ---- Long contexts ----------------------------------------------------------------------------------------------- */

/* Kimi K2's heads and context: what a step of 128 sequences might hold would be terabytes of softmax states. */
Test(mla, scratch_at_the_limits_has_a_bound)
{
    const struct dn_device_conf conf = {
        .n_threads = 16, .limits = {512, 128, 192, 128 * 16384, 0, 16384}, .n_slots = 1, .n_vocab = 16};
    struct dn_err err = {0};
    struct dn_device *d;
    struct dn_kv_layout l;
    int code;
    cr_assert_eq(dn_kernels_open_cpu(&conf, &d, &err), 0, "%s", err.text);
    cr_assert_eq(dn_kv_layout_init_mla(&l, 1, 512, 64, 16, 1 << 20), 0);
    while ((code = d->ops->prepare(d, 1, &err)) > 0) {
        d->ops->mla_attention(d, &(struct dn_mla_attention){.n_heads = 64,
                                                            .latent_dim = 512,
                                                            .rope_dim = 64,
                                                            .scale = 1,
                                                            .layout = &l,
                                                            .arena = (void *)&l,
                                                            .out = &l});
        d->ops->step_end(d);
    }
    cr_expect_eq(code, 0, "%s", err.text);
    d->ops->close(d);
}

enum { LONG_SEQS = 3, LONG_TOKENS = 27000, LONG_HEADS = 1024, LONG_LATENT = 64, LONG_ROPE = 2, LONG_PAGES = 8 };

/* A token each of long sequences, whose pages are few that come again and again. */
static void long_step(unsigned n_threads, const float *query, const uint8_t *bytes, float *out)
{
    uint32_t n_pages = LONG_TOKENS / 16 + 1;
    const struct dn_device_conf conf = {.n_threads = n_threads,
                                        .limits = {LONG_SEQS, LONG_SEQS, 1, LONG_SEQS * n_pages, 0, n_pages},
                                        .n_slots = 1,
                                        .n_vocab = 16};
    struct dn_err err = {0};
    struct dn_device *d;
    struct dn_kv_layout l;
    cr_assert_eq(dn_kernels_open_cpu(&conf, &d, &err), 0, "%s", err.text);
    cr_assert_eq(dn_kv_layout_init_mla(&l, 1, LONG_LATENT, LONG_ROPE, 16, 1 << 16), 0);
    uint8_t *arena = d->ops->alloc(d, l.slab_bytes);
    for (uint64_t i = 0; i < l.slab_bytes; i += 2) /* bf16 of 2^-8 to 2 */
        memcpy(arena + i, (uint8_t[]){bytes[i % 4096], 0x3c | (bytes[i % 4093] & 0x83)}, 2);
    struct dn_step *s = d->ops->step_arrays(d);
    s->kind = DN_STEP_DECODE;
    s->n_tokens = s->n_seqs = LONG_SEQS;
    for (uint32_t q = 0; q < LONG_SEQS; q++) {
        uint32_t len = LONG_TOKENS - 700 * q, n = (len + 15) / 16;
        s->token_seq[q] = (int32_t)q;
        s->position[q] = (int32_t)len - 1;
        s->kv_len[q] = (int32_t)len;
        s->token_start[q + 1] = (int32_t)q + 1;
        s->page_start[q + 1] = s->page_start[q] + (int32_t)n;
        s->slot[q] = -1;
        for (uint32_t i = 0; i < n; i++)
            s->page[(uint32_t)s->page_start[q] + i] = bytes[(i + 100 * q) % 4096] % LONG_PAGES;
    }
    cr_assert(d->ops->step_begin(d, 1));
    d->ops->mla_attention(d, &(struct dn_mla_attention){.q = query,
                                                        .n_heads = LONG_HEADS,
                                                        .latent_dim = LONG_LATENT,
                                                        .rope_dim = LONG_ROPE,
                                                        .scale = 0.1f,
                                                        .layout = &l,
                                                        .arena = arena,
                                                        .out = out});
    d->ops->close(d);
}

/* Splits of 1024 heads take 270 KB each: three sequences of 100 splits go in two passes, on one thread in none. */
Test(mla, passes_over_long_contexts_give_the_same_bits)
{
    size_t n_query = (size_t)LONG_SEQS * LONG_HEADS * (LONG_LATENT + LONG_ROPE),
           n_out = (size_t)LONG_SEQS * LONG_HEADS * LONG_LATENT;
    float *query = malloc(n_query * sizeof *query), *one = malloc(n_out * sizeof *one),
          *three = malloc(n_out * sizeof *three);
    uint8_t bytes[4096];
    for (size_t i = 0; i < sizeof bytes; i++)
        bytes[i] = (uint8_t)rng();
    fill_normal(query, n_query, 1.0f);
    memset(one, 0xff, n_out * sizeof *one);
    memset(three, 0xfe, n_out * sizeof *three);
    long_step(1, query, bytes, one);
    long_step(3, query, bytes, three);
    cr_expect_arr_eq(one, three, n_out * sizeof *one);
    for (size_t i = 0; i < n_out; i++)
        cr_assert(isfinite(one[i]));
    free(query);
    free(one);
    free(three);
}
