/* Attention against float64, and the determinism rule of kernels.h: the same bits alone, in any chunk, batch or number
 * of threads. */
#include "unit/kernels/oracle.h"

struct shape {
    uint32_t n_heads, n_kv_heads, head_dim, page_tokens;
};

static const struct shape shapes[] = {
    {3, 3, 64, 16}, {9, 3, 64, 16}, {8, 1, 128, 64}, {4, 4, 48, 16}, {6, 2, 48, 64}, {2, 1, 20, 16}, {16, 2, 80, 32},
};

/* out [n_heads][head_dim] of a token at `position`, and the largest error that f32 may add: scores are sums of head_dim
 * products, each rounded once, so an error of d = (head_dim + 3) 2^-24 scale sum|q k| at most; a weight e^s is off by
 * d + 2^-22 relatively (exp: 1 unit in the last place, rescaling: a product each tile); sum and quotient repeat
 * that. */
static void oracle_row(const struct fix *f, const struct seq *q, const struct shape *h, uint32_t layer,
                       const float *query, uint32_t position, float scale, double *out, double *bound)
{
    uint32_t dim = h->head_dim;
    double *s = malloc((position + 1) * sizeof *s);
    double *k = malloc((position + 1) * dim * sizeof *k), *v = malloc((position + 1) * dim * sizeof *v);
    for (uint32_t head = 0; head < h->n_heads; head++) {
        uint32_t kv = head / (h->n_heads / h->n_kv_heads);
        for (uint32_t i = 0; i < (position + 1) * dim && head % (h->n_heads / h->n_kv_heads) == 0; i++) {
            k[i] = kv_get(f, q, i / dim, layer, kv, 0, i % dim);
            v[i] = kv_get(f, q, i / dim, layer, kv, 1, i % dim);
        }
        double max = -INFINITY, sum = 0, delta = 0;
        for (uint32_t t = 0; t <= position; t++) {
            double dot = 0, size = 0;
            for (uint32_t i = 0; i < dim; i++) {
                double p = (double)query[head * dim + i] * k[t * dim + i];
                dot += p;
                size += fabs(p);
            }
            s[t] = dot * (double)scale;
            max = fmax(max, s[t]);
            delta = fmax(delta, (dim + 3) * 0x1p-24 * size * (double)scale);
        }
        for (uint32_t t = 0; t <= position; t++)
            sum += s[t] = exp(s[t] - max);
        double tiles = position / 64 + 2;
        for (uint32_t i = 0; i < dim; i++) {
            double o = 0, size = 0;
            for (uint32_t t = 0; t <= position; t++) {
                o += s[t] * v[t * dim + i];
                size += s[t] * fabs(v[t * dim + i]);
            }
            out[head * dim + i] = o / sum;
            bound[head * dim + i] = size / sum * (2 * delta + (tiles + 64 + 8) * 0x1p-23);
        }
    }
    free(s);
    free(k);
    free(v);
}

static void run_attention(struct fix *f, const struct shape *h, uint32_t layer, const float *q, uint32_t stride,
                          float *out)
{
    f->ops->step_begin(f->d, 1);
    f->ops->attention(f->d, &(struct dn_attention){.q = q,
                                                   .q_stride = stride,
                                                   .n_heads = h->n_heads,
                                                   .n_kv_heads = h->n_kv_heads,
                                                   .head_dim = h->head_dim,
                                                   .scale = 1.0f / sqrtf((float)h->head_dim),
                                                   .layout = &f->layout,
                                                   .arena = f->arena,
                                                   .layer = layer,
                                                   .out = out});
    f->ops->step_end(f->d);
    cr_assert_eq(f->ops->step_wait(f->d, NULL), 0);
}

static void fill_all(struct fix *f, const struct seq *q, uint32_t n)
{
    for (uint32_t layer = 0; layer < f->layout.n_layers; layer++) {
        for (uint32_t t = 0; t < n; t++)
            kv_fill(f, q, t, layer);
    }
}

static void check_shape(const char *isa, unsigned n_threads, const struct shape *h)
{
    /* first position, tokens: one token, odd chunks, edges of pages, tiles and splits, several splits */
    static const struct {
        uint32_t position, n;
        enum dn_kv_format format;
    } part[] = {{0, 1, DN_KV_BF16},   {0, 1, DN_KV_FP8},   {15, 1, DN_KV_FP8},    {16, 1, DN_KV_BF16},
                {0, 17, DN_KV_FP8},   {63, 2, DN_KV_BF16}, {3, 130, DN_KV_FP8},   {0, 65, DN_KV_BF16},
                {511, 2, DN_KV_BF16}, {600, 1, DN_KV_FP8}, {1030, 1, DN_KV_BF16}, {500, 40, DN_KV_FP8}};
    enum { N = sizeof part / sizeof *part, LAYER = 1 };
    struct fix f;
    struct seq *q = calloc(N, sizeof *q);
    fix_open(&f, isa, n_threads, 16);
    fix_arena(&f, 2, h->n_kv_heads, h->head_dim, h->page_tokens, 256);
    step_clear(&f);
    for (uint32_t i = 0; i < N; i++) {
        seq_init(&f, q + i, part[i].format, part[i].position + part[i].n);
        fill_all(&f, q + i, part[i].position + part[i].n);
        step_add(&f, q + i, part[i].position, part[i].n);
    }
    uint32_t width = h->n_heads * h->head_dim, stride = width + 7;
    float *query = fix_floats(&f, (size_t)f.s->n_tokens * stride), *out = fix_floats(&f, (size_t)f.s->n_tokens * width);
    fill_normal(query, (size_t)f.s->n_tokens * stride, 1.0f);
    run_attention(&f, h, LAYER, query, stride, out);
    double *want = calloc(width, sizeof *want), *bound = calloc(width, sizeof *bound);
    for (uint32_t t = 0; t < f.s->n_tokens; t++) {
        const struct seq *s = q + f.s->token_seq[t];
        oracle_row(&f, s, h, LAYER, query + (size_t)t * stride, (uint32_t)f.s->position[t],
                   1.0f / sqrtf((float)h->head_dim), want, bound);
        for (uint32_t i = 0; i < width; i++) {
            double got = (double)out[(size_t)t * width + i];
            cr_assert(
                fabs(got - want[i]) <= bound[i],
                "%s, %u threads, %u/%u heads of %u, page %u: sequence %d position %d value %u: %.9g, not %.9g +- %.2g",
                isa, n_threads, h->n_heads, h->n_kv_heads, h->head_dim, h->page_tokens, f.s->token_seq[t],
                f.s->position[t], i, got, want[i], bound[i]);
        }
    }
    free(want);
    free(bound);
    free(q);
    fix_close(&f);
}

Test(attention, is_within_rounding_of_float64)
{
    FOR_EACH_ISA(isa)
    {
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            check_shape(isa, 1 + i % 3, shapes + i);
    }
}

/* Rows of one sequence computed in all ways must be the same bits. */
static void check_bits(const char *isa, const struct shape *h, enum dn_kv_format format)
{
    enum { N = 1100 };
    struct fix f[3];
    struct seq q, other;
    uint32_t width = h->n_heads * h->head_dim;
    float *query[3], *out[3], *all = malloc((size_t)N * width * sizeof *all);
    float *kept = malloc((size_t)N * width * sizeof *kept); /* the queries, outside any device */
    for (unsigned k = 0; k < 3; k++) {
        rng_state = 7;
        fix_open(f + k, isa, k + 1, 16);
        fix_arena(f + k, 1, h->n_kv_heads, h->head_dim, h->page_tokens, 128);
        seq_init(f + k, &q, format, N);
        fill_all(f + k, &q, N);
        seq_init(f + k, &other, format == DN_KV_FP8 ? DN_KV_BF16 : DN_KV_FP8, 300);
        fill_all(f + k, &other, 300);
        query[k] = fix_floats(f + k, (size_t)FIX_TOKENS * width);
        out[k] = fix_floats(f + k, (size_t)FIX_TOKENS * width);
        fill_normal(query[k], (size_t)N * width, 1.0f);
        step_clear(f + k);
        step_add(f + k, &q, 0, N);
        run_attention(f + k, h, 0, query[k], width, out[k]);
        if (k == 0) {
            memcpy(all, out[0], (size_t)N * width * sizeof *all);
            memcpy(kept, query[0], (size_t)N * width * sizeof *kept);
        }
        cr_assert(memcmp(all, out[k], (size_t)N * width * sizeof *all) == 0, "%s: %u threads change bits", isa, k + 1);
    }
    float *rows = malloc((size_t)FIX_TOKENS * width * sizeof *rows);
    for (unsigned k = 0; k < 3; k++) {
        static const uint32_t chunk[] = {1, 2, 3, 16, 33, 64, 100, 257};
        for (uint32_t at = 0, c = 0; at < N; c++) {
            uint32_t n = chunk[c % 8] < N - at ? chunk[c % 8] : N - at, m = rng_below(3) * 50;
            /* [some of the other sequence] [the chunk]: its own queries, in front */
            step_clear(f + k);
            if (m)
                step_add(f + k, &other, 100, m);
            step_add(f + k, &q, at, n);
            fill_normal(rows, (size_t)m * width, 1.0f);
            memcpy(rows + (size_t)m * width, kept + (size_t)at * width, (size_t)n * width * sizeof *rows);
            run_attention(f + k, h, 0, rows, width, out[k]);
            cr_assert(
                memcmp(all + (size_t)at * width, out[k] + (size_t)m * width, (size_t)n * width * sizeof *all) == 0,
                "%s, %u threads: chunk [%u, %u) behind %u rows of another sequence differs", isa, k + 1, at, at + n, m);
            at += n;
        }
        /* Decode: later positions hold NaN, as a stale page may. Backwards, so that rows see what they should. */
        for (uint32_t p = N; p-- > 0;) {
            if (p % 37 == 0 || p % 64 >= 62 || p < 20) {
                step_clear(f + k);
                step_add(f + k, &q, p, 1);
                run_attention(f + k, h, 0, kept + (size_t)p * width, width, out[k]);
                cr_assert(memcmp(all + (size_t)p * width, out[k], width * sizeof *all) == 0,
                          "%s, %u threads: token %u alone differs", isa, k + 1, p);
            }
            for (uint32_t head = 0; head < h->n_kv_heads; head++) { /* forget position p */
                size_t token = (size_t)head * h->page_tokens + p % h->page_tokens;
                uint8_t *layer = kv_layer(f + k, &q, p, 0);
                size_t bytes = h->head_dim * (format == DN_KV_BF16 ? 2 : 1);
                memset(layer + token * bytes, 0xff, bytes);
                memset(layer + f[k].layout.format[format].v_offset + token * bytes, 0xff, bytes);
                if (format == DN_KV_FP8) {
                    memset(layer + f[k].layout.format[format].k_scale_offset + token * 4, 0xff, 4);
                    memset(layer + f[k].layout.format[format].v_scale_offset + token * 4, 0xff, 4);
                }
            }
        }
        fix_close(f + k);
    }
    free(rows);
    free(kept);
    free(all);
}

Test(attention, gives_the_same_bits_in_any_chunk_batch_and_number_of_threads)
{
    FOR_EACH_ISA(isa)
    {
        check_bits(isa, &(struct shape){3, 1, 64, 16}, DN_KV_BF16);
        check_bits(isa, &(struct shape){3, 1, 64, 16}, DN_KV_FP8);
        check_bits(isa, &(struct shape){8, 1, 128, 64}, DN_KV_FP8);
        check_bits(isa, &(struct shape){2, 2, 48, 16}, DN_KV_BF16);
    }
}

Test(attention, of_a_bad_sequence_is_zero_and_leaves_the_others_alone)
{
    struct fix f;
    struct seq a, b;
    struct shape h = {6, 2, 64, 16};
    fix_open(&f, NULL, 2, 16);
    fix_arena(&f, 1, 2, 64, 16, 32);
    seq_init(&f, &a, DN_KV_BF16, 40);
    seq_init(&f, &b, DN_KV_FP8, 40);
    fill_all(&f, &a, 40);
    fill_all(&f, &b, 40);
    enum { WIDTH = 6 * 64 };
    float *query = fix_floats(&f, 80 * WIDTH), *good = fix_floats(&f, 80 * WIDTH), *out = fix_floats(&f, 80 * WIDTH);
    fill_normal(query, 80 * WIDTH, 1.0f);
    step_clear(&f);
    step_add(&f, &a, 0, 40);
    step_add(&f, &b, 0, 40);
    run_attention(&f, &h, 0, query, WIDTH, good);
    /* The first sequence expects a tag that its second page does not have, and a page number that does not exist. */
    uint64_t table[512] = {0};
    for (int32_t i = 0; i < f.s->page_start[2]; i++)
        f.s->tag[i] = table[f.s->page[i]] = 1000u + (unsigned)i;
    f.s->tag[1]++;
    f.s->check[0] = f.s->check[1] = 1;
    f.s->page[2] = UINT32_MAX;
    memset(out, 0xff, 80 * WIDTH * sizeof *out);
    f.ops->step_begin(f.d, 1);
    f.ops->check_tags(f.d, &(struct dn_check_tags){table, 512, f.layout.page_tokens});
    f.ops->attention(f.d, &(struct dn_attention){query, WIDTH, 6, 2, 64, 1.0f / 8.0f, &f.layout, f.arena, 0, out});
    cr_assert_eq(f.s->bad[0], 2);
    cr_assert_eq(f.s->bad[1], 0);
    for (uint32_t i = 0; i < 40 * WIDTH; i++)
        cr_assert_eq(out[i], 0.0f);
    cr_assert(memcmp(out + 40 * WIDTH, good + 40 * WIDTH, 40 * WIDTH * sizeof *out) == 0);
    fix_close(&f);
}

Test(attention, nan_in_one_sequence_stays_there)
{
    struct fix f;
    struct seq a, b;
    struct shape h = {3, 1, 64, 16};
    fix_open(&f, NULL, 1, 16);
    fix_arena(&f, 1, 1, 64, 16, 32);
    seq_init(&f, &a, DN_KV_BF16, 20);
    seq_init(&f, &b, DN_KV_BF16, 20);
    fill_all(&f, &a, 20);
    fill_all(&f, &b, 20);
    ((uint16_t *)kv_layer(&f, &a, 10, 0))[10 * 64 + 5] = 0x7fc0; /* one key of token 10 */
    float *query = fix_floats(&f, 40 * 192), *out = fix_floats(&f, 40 * 192);
    fill_normal(query, 40 * 192, 1.0f);
    step_clear(&f);
    step_add(&f, &a, 0, 20);
    step_add(&f, &b, 0, 20);
    run_attention(&f, &h, 0, query, 192, out);
    for (uint32_t t = 0; t < 40; t++)
        cr_assert_eq(!isnan(out[t * 192]), t < 10 || t >= 20, "token %u", t);
    fix_close(&f);
}
