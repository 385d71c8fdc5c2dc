/* Embedding, norms and SiLU on the GPU against float64.
 *
 * Bounds. bf16 output: half a unit in the last place of 8 bits, at most 2^-8 of the value; a value near 0 may be a
 * subnormal of bf16, far below all bounds here. Sums of squares in f32 in any order are off by n * 2^-24 at most, the
 * root by half of that, and rsqrtf and the products by some 2^-22: together a relative 2^-8 + n * 2^-25 + 2^-21. SiLU:
 * __expf(x) is off by (2
 * + |x|) * 2^-23 or so, the division by 2^-22. Embedding: one rounding, or two with an offset.
 */
#include "gpu/gpu.h"

enum { MAX_N = 130 };

/* Rows from `n` on must still be poison. */
static void expect_poison(struct gpu *g, const char *what, const void *device, size_t from, size_t to)
{
    uint8_t *h = malloc(to);
    g->ops->download(g->d, h, device, to);
    size_t i = from;
    while (i < to && h[i] == 0xff)
        i++;
    cr_expect_eq(i, to, "%s: byte %zu beyond the step's rows was written", what, i);
    free(h);
}

/* ---- RMSNorm ---- */

struct norm {
    struct dn_rmsnorm p;
    struct dn_norm_act a;
};
static void norm_ops(struct gpu *g, void *ctx)
{
    g->ops->rmsnorm(g->d, &((struct norm *)ctx)->p);
}
static void norm_act_ops(struct gpu *g, void *ctx)
{
    g->ops->norm_act(g->d, &((struct norm *)ctx)->a);
}

/* Magnitudes differ from row to row by factors of up to 2^20; some rows have an outlier, one is all zero but one value.
 */
static void fill_rows(float *x, uint32_t n, uint32_t dim)
{
    for (uint32_t t = 0; t < n; t++) {
        float scale = ldexpf(1, (int)(gpu_rng() % 21) - 10);
        for (uint32_t k = 0; k < dim; k++)
            x[(size_t)t * dim + k] = gpu_normal() * scale;
        if (t % 3 == 1)
            x[(size_t)t * dim + gpu_rng() % dim] *= 100;
    }
}

static void norm_case(struct gpu *g, uint32_t list, enum dn_step_kind kind, uint32_t n, uint32_t dim, bool add,
                      bool rows_only)
{
    size_t values = (size_t)n * dim, all = (size_t)MAX_N * dim;
    float *x = malloc(values * sizeof *x), *a = malloc(values * sizeof *a), *w = malloc(dim * sizeof *w);
    fill_rows(x, n, dim);
    fill_rows(a, n, dim);
    for (uint32_t k = 0; k < dim; k++)
        w[k] = 1 + 0.3f * gpu_normal();
    if (n > 2)
        x[2 * (size_t)dim + dim / 2] = NAN;
    if (n > 4)
        x[4 * (size_t)dim + dim - 1] = INFINITY;
    struct norm c = {
        .p = {.weight = gpu_copy(g, w, dim * sizeof *w), .eps = 1e-5f, .dim = dim, .rows_only = rows_only}};
    c.p.x = gpu_alloc(g, all * sizeof *x);
    gpu_poison(g, c.p.x, all * sizeof *x);
    g->ops->upload(g->d, c.p.x, x, values * sizeof *x);
    c.p.add = add ? gpu_act(g, a, values) : NULL;
    c.p.out = gpu_alloc(g, all * 2);
    gpu_poison(g, c.p.out, all * 2);
    gpu_rows_step(g, kind, n);
    if (rows_only) { /* some tokens twice, some not at all, in no order */
        g->s->n_rows = kind == DN_STEP_DECODE ? (n + 1) / 2 : n;
        for (uint32_t r = 0; r < g->s->n_rows; r++)
            g->s->row_token[r] = (int32_t)((n - 1 - r * 7 % n) / (r % 5 == 0 ? 2 : 1));
    }
    uint32_t n_out = rows_only ? g->s->n_rows : n;
    gpu_step(g, list, norm_ops, &c);
    double *want = calloc(values, sizeof *want), *tol = calloc(values, sizeof *tol);
    for (size_t i = 0; i < values; i++)
        x[i] += add ? a[i] : 0; /* one f32 addition: the same everywhere */
    for (uint32_t r = 0; r < n_out; r++) {
        const float *row = x + (size_t)(rows_only ? g->s->row_token[r] : (int32_t)r) * dim;
        double sum = 0;
        for (uint32_t k = 0; k < dim; k++)
            sum += (double)row[k] * row[k];
        double scale = 1 / sqrt(sum / dim + (double)c.p.eps);
        for (uint32_t k = 0; k < dim; k++) {
            double v = row[k] * scale * w[k];
            want[(size_t)r * dim + k] = v;
            tol[(size_t)r * dim + k] = fabs(v) * (0x1p-8 + dim * 0x1p-25 + 0x1p-21) + 1e-37;
        }
    }
    char what[128];
    snprintf(what, sizeof what, "rmsnorm list %u kind %d n %u dim %u add %d rows %d", list, kind, n, dim, add,
             rows_only);
    float *got = gpu_read_act(g, c.p.out, (size_t)n_out * dim);
    gpu_expect(what, got, want, tol, (size_t)n_out * dim, dim);
    expect_poison(g, what, c.p.out, (size_t)n_out * dim * 2, all * 2);
    float *x_now = malloc(values * sizeof *x_now);
    g->ops->download(g->d, x_now, c.p.x, values * sizeof *x);
    size_t differ = 0;
    for (size_t i = 0; i < values; i++)
        differ += !(x_now[i] == x[i] || (isnan(x_now[i]) && isnan(x[i])));
    cr_expect_eq(differ, 0, "%s: %zu values of the residual", what, differ);
    expect_poison(g, what, c.p.x, values * sizeof *x, all * sizeof *x);
    g->ops->free(g->d, c.p.x);
    g->ops->free(g->d, c.p.out);
    free(x), free(a), free(w), free(want), free(tol), free(got), free(x_now);
}

static const struct dn_step_limits limits = {.tokens = MAX_N, .seqs = 64, .rows = MAX_N, .pages = 64, .tags = 1};

/* limits.seqs is less than MAX_N: prefill steps have one sequence of n tokens then. */
static void one_sequence(struct gpu *g, uint32_t n)
{
    struct dn_step *s = g->s;
    s->n_seqs = 1;
    s->token_start[1] = s->kv_len[0] = (int32_t)n;
    s->page_start[1] = 0;
    for (uint32_t t = 0; t < n; t++) {
        s->token_seq[t] = 0;
        s->position[t] = (int32_t)t;
    }
}

Test(rows, rmsnorm)
{
    struct gpu g;
    gpu_open(&g, &limits, 0, 0);
    static const uint32_t dim[] = {1, 8, 63, 64, 576, 1536, 2048, 2056, 4100, 7168, 8192, 8200, 16384, 24576, 33000};
    static const uint32_t count[] = {1, 3, 5, 64};
    for (size_t i = 0; i < sizeof dim / sizeof *dim; i++) {
        for (size_t j = 0; j < sizeof count / sizeof *count; j++) {
            bool large = dim[i] > 8192 && count[j] > 5;
            if (large || (getenv("DN_GPU_SMALL") && count[j] > 5))
                continue;
            bool add = (i + j) % 2, rows_only = (i / 2 + j) % 2;
            norm_case(&g, 7, DN_STEP_DECODE, count[j], dim[i], add, rows_only);
            norm_case(&g, 7, DN_STEP_PREFILL, count[j], dim[i], true, !rows_only);
        }
    }
    gpu_close(&g);
}

Test(rows, norm_act)
{
    struct gpu g;
    gpu_open(&g, &limits, 0, 0);
    static const struct {
        uint32_t n, dim, stride;
    } shape[] = {{1, 1536, 2112}, {64, 1536, 2112}, {7, 512, 576},    {3, 1537, 1540},
                 {2, 64, 64},     {5, 100, 104},    {130, 1536, 1536}};
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        uint32_t n = shape[i].n, dim = shape[i].dim, stride = shape[i].stride;
        float *a = malloc((size_t)n * stride * sizeof *a), *w = malloc(dim * sizeof *w);
        fill_rows(a, n, stride);
        for (uint32_t k = 0; k < dim; k++)
            w[k] = gpu_normal();
        struct norm c = {.a = {.a_stride = stride, .eps = 1e-6f, .dim = dim}};
        c.a.a = gpu_act(&g, a, (size_t)n * stride);
        c.a.weight = gpu_copy(&g, w, dim * sizeof *w);
        size_t all = (size_t)(n + 2) * dim;
        c.a.out = gpu_alloc(&g, all * 2);
        gpu_poison(&g, c.a.out, all * 2);
        gpu_rows_step(&g, DN_STEP_PREFILL, n < 64 ? n : 1);
        g.s->n_tokens = n;
        if (n >= 64)
            one_sequence(&g, n);
        for (uint32_t t = 0; t < n; t++)
            g.s->token_id[t] = g.s->token_count[t] = 0;
        gpu_step(&g, 7, norm_act_ops, &c);
        double *want = calloc(all, sizeof *want), *tol = calloc(all, sizeof *tol);
        for (uint32_t t = 0; t < n; t++) {
            double sum = 0;
            for (uint32_t k = 0; k < dim; k++)
                sum += (double)a[(size_t)t * stride + k] * a[(size_t)t * stride + k];
            double scale = 1 / sqrt(sum / dim + (double)c.a.eps);
            for (uint32_t k = 0; k < dim; k++) {
                double v = a[(size_t)t * stride + k] * scale * w[k];
                want[(size_t)t * dim + k] = v;
                tol[(size_t)t * dim + k] = fabs(v) * (0x1p-8 + dim * 0x1p-25 + 0x1p-21) + 1e-37;
            }
        }
        char what[96];
        snprintf(what, sizeof what, "norm_act n %u dim %u stride %u", n, dim, stride);
        float *got = gpu_read_act(&g, c.a.out, (size_t)n * dim);
        gpu_expect(what, got, want, tol, (size_t)n * dim, dim);
        expect_poison(&g, what, c.a.out, (size_t)n * dim * 2, all * 2);
        free(a), free(w), free(want), free(tol), free(got);
    }
    gpu_close(&g);
}

/* ---- SiLU ---- */

static void silu_ops(struct gpu *g, void *ctx)
{
    g->ops->silu_mul(g->d, ctx);
}

Test(rows, silu_mul)
{
    struct gpu g;
    gpu_open(&g, &limits, 0, 0);
    static const uint32_t dim[] = {1, 7, 8, 1536, 2047, 2048, 2056, 18432};
    static const uint32_t count[] = {1, 3, 64};
    static const float special[] = {0, -0.0f, 88, -88, 200, -200, 1e30f, -1e30f, NAN, INFINITY, 1e-30f, -90.5f};
    for (size_t i = 0; i < sizeof dim / sizeof *dim; i++) {
        for (size_t j = 0; j < sizeof count / sizeof *count; j++) {
            uint32_t n = count[j], m = dim[i];
            float *gu = malloc((size_t)n * 2 * m * sizeof *gu);
            for (size_t k = 0; k < (size_t)n * 2 * m; k++)
                gu[k] = gpu_normal() * 4;
            for (uint32_t k = 0; k < 12 && k < m; k++)
                gu[k] = special[k];
            struct dn_silu_mul p = {.dim = m, .gate_up = gpu_act(&g, gu, (size_t)n * 2 * m)};
            size_t all = (size_t)(n + 2) * m;
            p.out = gpu_alloc(&g, all * 2);
            gpu_poison(&g, p.out, all * 2);
            gpu_rows_step(&g, DN_STEP_DECODE, n);
            gpu_step(&g, 7, silu_ops, &p);
            double *want = calloc(all, sizeof *want), *tol = calloc(all, sizeof *tol);
            for (uint32_t t = 0; t < n; t++) {
                for (uint32_t k = 0; k < m; k++) {
                    double a = gu[(size_t)t * 2 * m + k], b = gu[(size_t)t * 2 * m + m + k], v = a / (1 + exp(-a)) * b;
                    want[(size_t)t * m + k] = v;
                    tol[(size_t)t * m + k] = fabs(v) * (0x1p-8 + (4 + fabs(a)) * 0x1p-22) + 1e-35 * (1 + fabs(b));
                    if (isinf(v)) /* or the largest finite value */
                        tol[(size_t)t * m + k] = INFINITY;
                }
            }
            char what[96];
            snprintf(what, sizeof what, "silu_mul n %u dim %u", n, m);
            float *got = gpu_read_act(&g, p.out, (size_t)n * m);
            gpu_expect(what, got, want, tol, (size_t)n * m, m);
            expect_poison(&g, what, p.out, (size_t)n * m * 2, all * 2);
            free(gu), free(want), free(tol), free(got);
        }
    }
    gpu_close(&g);
}

/* ---- Embedding ---- */

static void embed_ops(struct gpu *g, void *ctx)
{
    g->ops->embed(g->d, ctx);
}

/* The table in a format, packed from rows of that format; want: its values. */
static void make_table(struct gpu *g, struct dn_matrix *m, double *want)
{
    uint32_t n = m->n_out, k = m->n_in;
    m->bytes = g->ops->matrix_bytes(m);
    m->data = gpu_alloc(g, m->bytes);
    size_t values = (size_t)n * k, groups = values / 32, blocks = (size_t)((n + 127) / 128) * ((k + 127) / 128);
    uint16_t *bf16 = malloc(values * 2), *scale = malloc(groups * 2), *offset = malloc(groups * 2);
    uint8_t *code = malloc(values);
    float *block = malloc(blocks * sizeof *block);
    for (size_t i = 0; i < values; i++) {
        bf16[i] = f32_to_bf16(gpu_normal());
        code[i] = (uint8_t)gpu_rng();
    }
    for (size_t i = 0; i < groups; i++) { /* scales as bf16, powers of two apart */
        scale[i] = f32_to_bf16(ldexpf(1 + (float)gpu_unit(), (int)(gpu_rng() % 12) - 8));
        offset[i] = f32_to_bf16(gpu_normal());
    }
    for (size_t i = 0; i < blocks; i++)
        block[i] = ldexpf(1 + (float)gpu_unit(), (int)(gpu_rng() % 12) - 8);
    struct dn_rows r = {0};
    for (size_t i = 0; i < values; i++) {
        uint32_t row = (uint32_t)(i / k), col = (uint32_t)(i % k);
        float s = bf16_to_f32(scale[i / 32]), o = bf16_to_f32(offset[i / 32]);
        if (m->format == DN_W_BF16)
            want[i] = bf16_to_f32(bf16[i]);
        else if (m->format == DN_W_FP8)
            want[i] = e4m3_to_f64(code[i]) * block[(size_t)(row / 128) * ((k + 127) / 128) + col / 128];
        else if (m->format == DN_W_INT8)
            want[i] = (double)(int8_t)code[i] * s;
        else {
            int q = code[i / 2] >> (i % 2 * 4) & 15;
            want[i] = m->symmetric ? (double)(q - 8) * s : (double)q * s + o;
        }
    }
    if (m->format == DN_W_BF16)
        r.bf16 = bf16;
    else if (m->format == DN_W_FP8)
        r.fp8 = code, r.block_scale = block;
    else if (m->format == DN_W_INT8)
        r.q8 = (int8_t *)code, r.scale16 = scale;
    else
        r.q4 = code, r.scale16 = scale, r.offset16 = m->symmetric ? NULL : offset;
    cr_assert_eq(g->ops->matrix_pack(g->d, m, 0, n, &r), 0);
    free(bf16), free(scale), free(offset), free(code), free(block);
}

Test(rows, embed)
{
    struct gpu g;
    gpu_open(&g, &limits, 0, 0);
    static const struct {
        enum dn_weight_format format;
        bool symmetric;
        uint32_t n_out, n_in;
    } shape[] = {{DN_W_BF16, false, 300, 576}, {DN_W_BF16, false, 129, 7168}, {DN_W_FP8, false, 300, 576},
                 {DN_W_INT8, false, 200, 576}, {DN_W_INT4, false, 200, 576},  {DN_W_INT4, true, 130, 2048}};
    for (size_t i = 0; i < sizeof shape / sizeof *shape; i++) {
        struct dn_matrix m = {.format = shape[i].format,
                              .n_out = shape[i].n_out,
                              .n_in = shape[i].n_in,
                              .symmetric = shape[i].symmetric,
                              .scale_is_bf16 = true};
        double *table = malloc((size_t)m.n_out * m.n_in * sizeof *table);
        make_table(&g, &m, table);
        for (uint32_t n = 1; n <= 64; n = n == 1 ? 3 : n == 3 ? 64 : 65) {
            size_t all = (size_t)(n + 2) * m.n_in;
            struct dn_embed p = {.table = &m, .out = gpu_alloc(&g, all * sizeof(float))};
            gpu_poison(&g, p.out, all * sizeof(float));
            gpu_rows_step(&g, DN_STEP_DECODE, n);
            for (uint32_t t = 0; t < n; t++)
                g.s->token_id[t] = t == 0 ? (int32_t)m.n_out - 1 : t == 1 ? 0 : (int32_t)(gpu_rng() % m.n_out);
            gpu_step(&g, 7, embed_ops, &p);
            float *got = malloc(all * sizeof *got);
            double *want = calloc(all, sizeof *want), *tol = calloc(all, sizeof *tol);
            g.ops->download(g.d, got, p.out, all * sizeof *got);
            for (size_t k = 0; k < (size_t)n * m.n_in; k++) {
                want[k] = table[(size_t)g.s->token_id[k / m.n_in] * m.n_in + k % m.n_in];
                tol[k] = fabs(want[k]) * 0x1p-22;
                if (m.format == DN_W_INT4 && !m.symmetric)
                    tol[k] = (fabs(want[k]) + 8 * 16) * 0x1p-23; /* q * scale may be larger than the sum */
            }
            char what[96];
            snprintf(what, sizeof what, "embed %s%s n %u dim %u", dn_weight_format_name(m.format),
                     m.symmetric ? " symmetric" : "", n, m.n_in);
            gpu_expect(what, got, want, tol, (size_t)n * m.n_in, m.n_in);
            expect_poison(&g, what, p.out, (size_t)n * m.n_in * sizeof(float), all * sizeof(float));
            free(got), free(want), free(tol);
        }
        free(table);
    }
    gpu_close(&g);
}

/* ---- Times ---- */

enum { REPEAT = 100 };
struct many {
    struct dn_rmsnorm norm;
    struct dn_norm_act act;
    struct dn_silu_mul silu;
    struct dn_embed embed;
    size_t x_stride, n_buffers;
    char *x;
};

static void many_norms(struct gpu *g, void *ctx)
{
    struct many *m = ctx;
    for (int i = 0; i < REPEAT; i++) {
        struct dn_rmsnorm p = m->norm;
        p.x = (float *)(m->x + i % m->n_buffers * m->x_stride);
        g->ops->rmsnorm(g->d, &p);
    }
}
static void many_silus(struct gpu *g, void *ctx)
{
    struct many *m = ctx;
    for (int i = 0; i < REPEAT; i++) {
        struct dn_silu_mul p = m->silu;
        p.gate_up = m->x + i % m->n_buffers * m->x_stride;
        g->ops->silu_mul(g->d, &p);
    }
}
static void many_acts(struct gpu *g, void *ctx)
{
    struct many *m = ctx;
    for (int i = 0; i < REPEAT; i++) {
        struct dn_norm_act p = m->act;
        p.a = m->x + i % m->n_buffers * m->x_stride;
        g->ops->norm_act(g->d, &p);
    }
}

Test(rows, bench)
{
    struct gpu g;
    gpu_open(&g, &limits, 0, 0);
    struct many m = {.x_stride = 8 << 20, .n_buffers = 32};
    m.x = gpu_alloc(&g, m.x_stride * m.n_buffers);
    enum { DIM = 7168 };
    m.norm = (struct dn_rmsnorm){.dim = DIM,
                                 .eps = 1e-6f,
                                 .weight = gpu_alloc(&g, DIM * 4),
                                 .out = gpu_alloc(&g, 64 * DIM * 2),
                                 .add = gpu_alloc(&g, 64 * DIM * 2)};
    m.silu = (struct dn_silu_mul){.dim = 18432, .out = gpu_alloc(&g, 64 * 18432 * 2)};
    m.act =
        (struct dn_norm_act){.dim = 1536, .a_stride = 2112, .eps = 1e-6f, .weight = m.norm.weight, .out = m.silu.out};
    gpu_prepare(&g, 1, many_norms, &m);
    gpu_prepare(&g, 2, many_silus, &m);
    gpu_prepare(&g, 3, many_acts, &m);
    for (uint32_t n = 1; n <= 64; n = n == 1 ? 16 : n * 4) {
        gpu_rows_step(&g, DN_STEP_DECODE, n);
        double us = gpu_time(&g, 1, many_norms, &m) / REPEAT, bytes = n * DIM * 12.0;
        printf("BENCH rmsnorm %ux%d %.2f us %.2f TB/s\n", n, DIM, us, bytes / us / 1e6);
        us = gpu_time(&g, 2, many_silus, &m) / REPEAT, bytes = n * 18432 * 6.0;
        printf("BENCH silu_mul %ux18432 %.2f us %.2f TB/s\n", n, us, bytes / us / 1e6);
        us = gpu_time(&g, 3, many_acts, &m) / REPEAT;
        printf("BENCH norm_act %ux1536 %.2f us\n", n, us);
    }
    gpu_close(&g);
}
