/* Matrix products on the GPU against float64, and that a row's bits do not depend on how many there are.
 *
 * Bounds: products of codes and bf16 activations are exact in f32; sums are f32, one rounding for every 16 products and
 * scale: (n_in / 16 + 32) * 2^-23 of the sum of magnitudes. A bf16 result must be the f32 one, rounded.
 * Prefill may round dequantised weights to bf16 first: 2^-9 of the sum of magnitudes' root of squares is not derived,
 * so there the weights of the oracle are rounded too.
 */
#include "gpu.h"

enum { MAX_N = 80, ROWS_AT_ONCE = 128 };

static float half_to_f32(uint16_t h)
{
    int e = h >> 10 & 31, m = h & 1023;
    double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return (float)(h & 0x8000 ? -v : v);
}
static float scale16(const struct dn_matrix *m, uint16_t s)
{
    return m->scale_is_bf16 ? bf16_to_f32(s) : half_to_f32(s);
}

/* A matrix with random codes on the device, and its values: w, and bound[i] >= |w| as it enters sums. */
struct weights {
    struct dn_matrix m;
    double *w, *bound;
    char name[96];
};

static void random_rows(const struct dn_matrix *m, uint32_t n, uint8_t *bytes, uint16_t *half, uint16_t *scale,
                        uint16_t *offset, float *block)
{
    size_t all = (size_t)n * m->n_in;
    for (size_t i = 0; i < all; i++) {
        uint64_t r = gpu_rng();
        bytes[i] = (uint8_t)r;
        if ((bytes[i] & 0x7f) == 0x7f)
            bytes[i] ^= 1;
        if (half)
            half[i] = f32_to_bf16(gpu_normal() * ldexpf(1, (int)(r >> 40 & 3) - 6));
    }
    /* Exponents -9..-2 and any fraction: f16 and bf16 differ in where both begin. */
    for (size_t i = 0; i < all / 32 + 1; i++) {
        uint64_t r = gpu_rng(), s = gpu_rng();
        scale[i] =
            (uint16_t)(m->scale_is_bf16 ? (118 + r % 8) << 7 | (r >> 8 & 127) : (6 + r % 8) << 10 | (r >> 8 & 1023));
        offset[i] =
            (uint16_t)((m->scale_is_bf16 ? (118 + s % 8) << 7 | (s >> 8 & 127) : (6 + s % 8) << 10 | (s >> 8 & 1023)) |
                       (s >> 40 & 1) << 15);
    }
    for (size_t i = 0; i < (n / 128 + 1) * (size_t)((m->n_in + 127) / 128); i++)
        block[i] = ldexpf(1 + (float)gpu_unit(), (int)(gpu_rng() % 8) - 8);
}

static struct dn_rows rows_of(const struct dn_matrix *m, uint8_t *bytes, uint16_t *half, uint16_t *scale,
                              uint16_t *offset, float *block)
{
    struct dn_rows r = {0};
    switch (m->format) {
    case DN_W_BF16:
        r.bf16 = half;
        break;
    case DN_W_FP8:
        r.fp8 = bytes;
        r.block_scale = block;
        break;
    case DN_W_INT8:
        r.q8 = (const int8_t *)bytes;
        r.scale16 = scale;
        break;
    default:
        r.q4 = bytes;
        r.scale16 = scale;
        r.offset16 = m->symmetric ? NULL : offset;
    }
    return r;
}

static void value_of(const struct dn_matrix *m, const struct dn_rows *r, size_t i, double *w, double *bound)
{
    size_t row = i / m->n_in, k = i % m->n_in;
    if (m->format == DN_W_BF16) {
        *w = bf16_to_f32(r->bf16[i]);
    } else if (m->format == DN_W_FP8) {
        *w = e4m3_to_f64(r->fp8[i]) * r->block_scale[row / 128 * ((m->n_in + 127) / 128) + k / 128];
    } else if (m->format == DN_W_INT8) {
        *w = (double)r->q8[i] * scale16(m, r->scale16[i / 32]);
    } else {
        int q = r->q4[i / 2] >> (i % 2 * 4) & 15;
        double s = scale16(m, r->scale16[i / 32]), o = m->symmetric ? -8 * s : scale16(m, r->offset16[i / 32]);
        *w = q * s + o;
        if (!m->symmetric) {
            *bound = q * fabs(s) + fabs(o);
            return;
        }
    }
    *bound = fabs(*w);
}

static void weights_init(struct gpu *g, struct weights *t, struct dn_matrix m)
{
    uint32_t n = m.n_out * (m.n_groups ? m.n_groups : 1);
    size_t all = (size_t)n * m.n_in;
    snprintf(t->name, sizeof t->name, "%s%s%s %ux%u%s", dn_weight_format_name(m.format),
             m.format == DN_W_INT4 && !m.symmetric ? " affine" : "", m.scale_is_bf16 ? " bf16 scales" : "", m.n_out,
             m.n_in, m.n_groups ? " grouped" : "");
    m.bytes = g->ops->matrix_bytes(&m);
    cr_assert(m.bytes > 0, "%s", t->name);
    m.data = gpu_alloc(g, m.bytes);
    uint8_t *bytes = malloc(all);
    uint16_t *half = malloc(all * 2), *scale = malloc((all / 32 + 1) * 2), *offset = malloc((all / 32 + 1) * 2);
    float *block = malloc((n / 128 + 1) * (size_t)((m.n_in + 127) / 128) * sizeof *block);
    random_rows(&m, n, bytes, half, scale, offset, block);
    struct dn_rows r = rows_of(&m, bytes, half, scale, offset, block);
    cr_assert_eq(g->ops->matrix_pack(g->d, &m, 0, n, &r), 0, "%s", t->name);
    t->w = malloc(all * sizeof *t->w);
    t->bound = malloc(all * sizeof *t->bound);
    for (size_t i = 0; i < all; i++)
        value_of(&m, &r, i, t->w + i, t->bound + i);
    t->m = m;
    free(bytes);
    free(half);
    free(scale);
    free(offset);
    free(block);
}
static void weights_release(struct gpu *g, struct weights *t)
{
    g->ops->free(g->d, t->m.data);
    free(t->w);
    free(t->bound);
}

/* n tokens of one sequence in prefill, of as many sequences in decode. */
static void step_of(struct gpu *g, enum dn_step_kind kind, uint32_t n)
{
    struct dn_step *s = g->s;
    gpu_rows_step(g, kind, kind == DN_STEP_DECODE ? n : 1);
    if (kind == DN_STEP_DECODE)
        return;
    s->n_tokens = n;
    s->n_seqs = 1;
    s->token_start[1] = s->kv_len[0] = (int32_t)n;
    for (uint32_t i = 0; i < n; i++) {
        s->token_id[i] = s->token_seq[i] = 0;
        s->token_count[i] = 0;
        s->position[i] = (int32_t)i;
    }
}

static void call_matmul(struct gpu *g, void *p)
{
    g->ops->matmul(g->d, p);
}
static void call_group_matmul(struct gpu *g, void *p)
{
    g->ops->group_matmul(g->d, p);
}

/* Compares rows of f32 results with the oracle. row r of `got` is token `token[r]`; group = 0 for plain matrices. */
static void expect(const struct weights *t, const char *what, const float *got, const uint32_t *token, uint32_t n,
                   const float *x, size_t x_stride, uint32_t group, const float *bias, bool rounds_weights)
{
    uint32_t n_out = t->m.n_out, n_in = t->m.n_in;
    double *want = malloc((size_t)n * n_out * sizeof *want), *tolerance = malloc((size_t)n * n_out * sizeof *tolerance);
    for (uint32_t r = 0; r < n; r++)
        for (uint32_t o = 0; o < n_out; o++) {
            const double *w = t->w + ((size_t)group * n_out + o) * n_in,
                         *b = t->bound + ((size_t)group * n_out + o) * n_in;
            const float *a = x + token[r] * x_stride;
            double sum = bias ? bias[o] : 0, all = fabs(sum);
            for (uint32_t k = 0; k < n_in; k++) {
                sum += (rounds_weights ? bf16_to_f32(f32_to_bf16((float)w[k])) : w[k]) * a[k];
                all += b[k] * fabs(a[k]);
            }
            want[(size_t)r * n_out + o] = sum;
            tolerance[(size_t)r * n_out + o] = all * (n_in / 16 + 32) * 0x1p-23;
        }
    char name[160];
    snprintf(name, sizeof name, "%s, %s", t->name, what);
    gpu_expect(name, got, want, tolerance, (size_t)n * n_out, n_out);
    free(want);
    free(tolerance);
}

static void open_device(struct gpu *g, uint32_t tokens, uint32_t seqs)
{
    struct dn_step_limits limits = {.tokens = tokens, .seqs = seqs, .rows = seqs, .pages = 64, .tags = 8};
    gpu_open(g, &limits, 4, 256);
}

/* All numbers of tokens: float64 for the largest, bits for the others. */
static void check_matmul(struct gpu *g, struct dn_matrix shape, enum dn_step_kind kind, const uint32_t *counts,
                         size_t n_counts, uint32_t max_n, bool rounds_weights)
{
    struct weights t;
    weights_init(g, &t, shape);
    uint32_t n_out = shape.n_out, n_in = shape.n_in;
    rounds_weights = rounds_weights && n_out % 8 == 0; /* cuBLASLt takes no others */
    float *x = malloc((size_t)max_n * n_in * sizeof *x), *bias = malloc(n_out * sizeof *bias);
    for (size_t i = 0; i < (size_t)max_n * n_in; i++)
        x[i] = gpu_normal() * ldexpf(1, (int)(i / n_in % 5) - 2);
    x[5 * n_in + n_in / 2] = NAN;
    x[6 * n_in + n_in - 1] = INFINITY;
    for (uint32_t i = 0; i < n_out; i++)
        bias[i] = gpu_normal();
    void *a = gpu_act(g, x, (size_t)max_n * n_in), *b = gpu_copy(g, bias, n_out * sizeof *bias);
    size_t bytes = (size_t)max_n * n_out * sizeof(float);
    void *out = gpu_alloc(g, bytes), *out16 = gpu_alloc(g, bytes);
    float *all = malloc(bytes), *got = malloc(bytes);
    struct dn_matmul p = {.a = a, .w = &t.m, .bias = n_out % 3 ? b : NULL, .out_f32 = true, .out = out}, p16 = p;
    p16.out_f32 = false;
    p16.out = out16;

    gpu_poison(g, out, bytes);
    step_of(g, kind, max_n);
    gpu_step(g, 7, call_matmul, &p);
    g->ops->download(g->d, all, out, bytes);
    uint32_t some[] = {0, 1, 2, 5, 7, 8, 15, 31, 33, max_n - 2, max_n - 1}, token[MAX_N], n_token = 0;
    if ((uint64_t)n_out * n_in < 300000 && max_n <= MAX_N) {
        for (uint32_t i = 0; i < max_n; i++)
            if (i != 6)
                token[n_token++] = i;
    } else {
        for (size_t i = 0; i < sizeof some / sizeof *some; i++)
            token[n_token++] = some[i];
    }
    for (uint32_t r = 0; r < n_token; r++)
        memcpy(got + (size_t)r * n_out, all + (size_t)token[r] * n_out, n_out * sizeof *got);
    expect(&t, kind == DN_STEP_DECODE ? "decode" : "prefill", got, token, n_token, x, n_in, 0, p.bias ? bias : NULL,
           rounds_weights);
    size_t finite = 0;
    for (uint32_t o = 0; o < n_out; o++)
        finite += !!isfinite(all[6 * (size_t)n_out + o]);
    cr_expect_eq(finite, 0, "%s: %zu outputs of an infinity are finite", t.name, finite);

    for (size_t i = 0; i < n_counts; i++) {
        uint32_t n = counts[i];
        size_t wrong = 0, wrong16 = 0;
        gpu_poison(g, out, bytes);
        gpu_poison(g, out16, bytes);
        step_of(g, kind, n);
        gpu_step(g, 7, call_matmul, &p);
        gpu_step(g, 7, call_matmul, &p16);
        g->ops->download(g->d, got, out, (size_t)n * n_out * sizeof *got);
        float *got16 = gpu_read_act(g, out16, (size_t)n * n_out);
        for (size_t v = 0; v < (size_t)n * n_out; v++) {
            bool same = !memcmp(got + v, all + v, sizeof *got) || (isnan(got[v]) && isnan(all[v]));
            float rounded = bf16_to_f32(f32_to_bf16(all[v]));
            bool same16 = got16[v] == rounded || (isnan(got16[v]) && isnan(rounded));
            if (!same && wrong++ < 3)
                printf("%s: of %u tokens [%zu][%zu] is %.9g, of %u it is %.9g\n", t.name, n, v / n_out, v % n_out,
                       got[v], max_n, all[v]);
            if (!same16 && wrong16++ < 3)
                printf("%s: of %u tokens [%zu][%zu] is %.9g in bf16, %.9g in f32\n", t.name, n, v / n_out, v % n_out,
                       got16[v], all[v]);
        }
        cr_expect(wrong + wrong16 == 0, "%s: %u tokens give other bits: %zu f32, %zu bf16", t.name, n, wrong, wrong16);
        free(got16);
    }
    fflush(stdout);
    g->ops->free(g->d, a);
    g->ops->free(g->d, b);
    g->ops->free(g->d, out);
    g->ops->free(g->d, out16);
    free(x);
    free(bias);
    free(all);
    free(got);
    weights_release(g, &t);
}

static struct dn_matrix variant(int f, uint32_t n_out, uint32_t n_in) /* 0..6 */
{
    return (struct dn_matrix){.format = f < 4    ? (enum dn_weight_format)f
                                        : f == 6 ? DN_W_INT8
                                                 : DN_W_INT4,
                              .n_out = n_out,
                              .n_in = n_in,
                              .symmetric = f == 3 || f == 4,
                              .scale_is_bf16 = f == 4 || f == 6};
}

static const uint32_t counts[] = {1, 2, 3, 7, 8, 9, 16, 17, 33, 64, 79};

Test(matmul, decode)
{
    struct gpu g;
    open_device(&g, MAX_N, MAX_N);
    const uint32_t shapes[][2] = {{64, 128},   {576, 576},  {192, 1536}, {100, 64},  {1, 352},
                                  {2112, 256}, {320, 7168}, {1000, 96},  {34000, 64}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int f = 0; f < 7; f++)
            check_matmul(&g, variant(f, shapes[i][0], shapes[i][1]), DN_STEP_DECODE, counts,
                         sizeof counts / sizeof *counts, MAX_N, false);
    const uint32_t odd[] = {8, 24, 200, 1544};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        for (int f = 0; f < 2; f++)
            check_matmul(&g, variant(f, 130, odd[i]), DN_STEP_DECODE, counts, sizeof counts / sizeof *counts, MAX_N,
                         false);
    gpu_close(&g);
}

/* Rows and inputs that fill no tile. */
Test(matmul, every_count)
{
    struct gpu g;
    open_device(&g, MAX_N, MAX_N);
    uint32_t n[64];
    for (uint32_t i = 0; i < 64; i++)
        n[i] = i + 1;
    for (int f = 0; f < 7; f++)
        check_matmul(&g, variant(f, 203, 544), DN_STEP_DECODE, n, 64, MAX_N, false);
    gpu_close(&g);
}

/* So many rows that K is cut in two, or for the last rows alone, or that a block has several tiles; the last tile is
 * not full. */
Test(matmul, many_rows)
{
    struct gpu g;
    open_device(&g, MAX_N, MAX_N);
    const uint32_t shapes[][2] = {{6370, 1024}, {17100, 544}};
    const uint32_t n[] = {1, 9, 17, 40, 64};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int f = 0; f < 7; f++)
            check_matmul(&g, variant(f, shapes[i][0], shapes[i][1]), DN_STEP_DECODE, n, sizeof n / sizeof *n, MAX_N,
                         false);
    for (int f = 1; f < 4; f += 2)
        check_matmul(&g, variant(f, 33900, 512), DN_STEP_DECODE, n, sizeof n / sizeof *n, MAX_N, false);
    gpu_close(&g);
}

Test(matmul, prefill)
{
    struct gpu g;
    open_device(&g, 512, 4);
    const uint32_t shapes[][2] = {{64, 128}, {576, 576}, {100, 64}, {1, 352}, {2112, 256}, {320, 7168}, {130, 96}};
    const uint32_t n[] = {1, 2, 7, 9, 64, 65, 129, 256, 299};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int f = 0; f < 7; f++)
            check_matmul(&g, variant(f, shapes[i][0], shapes[i][1]), DN_STEP_PREFILL, n, sizeof n / sizeof *n, 300,
                         true);
    const uint32_t odd[] = {8, 200, 1544};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        for (int f = 0; f < 2; f++)
            check_matmul(&g, variant(f, 136, odd[i]), DN_STEP_PREFILL, n, sizeof n / sizeof *n, 300, true);
    gpu_close(&g);
}

Test(matmul, groups)
{
    struct gpu g;
    open_device(&g, MAX_N, MAX_N);
    const uint32_t shapes[][3] = {{64, 512, 128}, {64, 128, 512}, {5, 64, 96}, {3, 192, 576}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int f = 0; f < 7; f++) {
            uint32_t groups = shapes[i][0], n_out = shapes[i][1], n_in = shapes[i][2], n_max = 20;
            struct dn_matrix m = variant(f, n_out, n_in);
            if (m.format == DN_W_FP8 && n_out % 128)
                continue;
            m.n_groups = groups;
            struct weights t;
            weights_init(&g, &t, m);
            uint32_t group_stride = n_in + 8, stride = groups * group_stride + 16, out_group = n_out + 4,
                     out_stride = groups * out_group + 8;
            float *x = malloc((size_t)n_max * stride * sizeof *x), *part = malloc((size_t)n_max * n_out * sizeof *part),
                  *first = NULL;
            for (size_t v = 0; v < (size_t)n_max * stride; v++)
                x[v] = gpu_normal();
            void *a = gpu_act(&g, x, (size_t)n_max * stride), *out = gpu_alloc(&g, (size_t)n_max * out_stride * 2);
            struct dn_group_matmul p = {a, stride, group_stride, &t.m, out, out_stride, out_group};
            const uint32_t ns[] = {20, 1, 8, 9};
            for (size_t c = 0; c < sizeof ns / sizeof *ns; c++) {
                gpu_poison(&g, out, (size_t)n_max * out_stride * 2);
                step_of(&g, DN_STEP_DECODE, ns[c]);
                gpu_step(&g, 7, call_group_matmul, &p);
                float *got = gpu_read_act(&g, out, (size_t)ns[c] * out_stride);
                if (!first) {
                    first = got;
                } else {
                    size_t wrong = 0;
                    for (size_t v = 0; v < (size_t)ns[c] * out_stride; v++)
                        wrong += memcmp(got + v, first + v, sizeof *got) != 0;
                    cr_expect_eq(wrong, 0, "%s: %zu of %u tokens' values differ", t.name, wrong, ns[c]);
                    free(got);
                }
            }
            size_t wrong = 0, written = 0;
            for (uint32_t token = 0; token < n_max; token++)
                for (uint32_t c = 0; c < out_stride; c++)
                    if (c >= groups * out_group || c % out_group >= n_out)
                        written += !isnan(first[(size_t)token * out_stride + c]);
            cr_expect_eq(written, 0, "%s: %zu values between groups were written", t.name, written);
            for (uint32_t token = 0; token < n_max; token += 3)
                for (uint32_t q = 0; q<groups; q += groups> 8 ? 21 : 1)
                    for (uint32_t o = 0; o < n_out; o++) {
                        double want = 0, bound = 0;
                        for (uint32_t k = 0; k < n_in; k++) {
                            size_t at = ((size_t)q * n_out + o) * n_in + k;
                            want += t.w[at] * x[(size_t)token * stride + q * group_stride + k];
                            bound += t.bound[at] * fabs(x[(size_t)token * stride + q * group_stride + k]);
                        }
                        double got = first[(size_t)token * out_stride + q * out_group + o];
                        if (!(fabs(got - want) <= fabs(want) * 0x1p-8 + bound * (n_in / 16 + 32) * 0x1p-23) &&
                            wrong++ < 4)
                            printf("%s: token %u group %u [%u] is %.9g, expected %.9g\n", t.name, token, q, o, got,
                                   want);
                    }
            printf("%s: %s\n", t.name, wrong ? "wrong" : "ok");
            fflush(stdout);
            cr_expect_eq(wrong, 0, "%s: %zu wrong", t.name, wrong);
            free(first);
            free(part);
            free(x);
            g.ops->free(g.d, a);
            g.ops->free(g.d, out);
            weights_release(&g, &t);
        }
    gpu_close(&g);
}

/* ---- Times ---- */

enum { BENCH_COPIES = 64 };
struct bench {
    struct dn_matrix m[BENCH_COPIES];
    uint32_t n_copies, n_calls;
    void *a, *out;
    bool f32;
};

/* MLA's absorbed projections: 64 heads. */
static void bench_group_ops(struct gpu *g, void *p)
{
    struct bench *b = p;
    for (uint32_t i = 0; i < b->n_calls; i++) {
        const struct dn_matrix *m = &b->m[i % b->n_copies];
        struct dn_group_matmul call = {b->a,   m->n_groups * m->n_in,  m->n_in, m,
                                       b->out, m->n_groups * m->n_out, m->n_out};
        g->ops->group_matmul(g->d, &call);
    }
}

static void bench_ops(struct gpu *g, void *p)
{
    struct bench *b = p;
    for (uint32_t i = 0; i < b->n_calls; i++) {
        struct dn_matmul call = {.a = b->a, .w = &b->m[i % b->n_copies], .out_f32 = b->f32, .out = b->out};
        g->ops->matmul(g->d, &call);
    }
}
static void no_ops(struct gpu *g, void *p) {}
/* The shortest of some steps, in microseconds: other work on the host's cores must not count. */
static double bench_time(struct gpu *g, uint32_t list, void (*ops)(struct gpu *, void *), void *ctx)
{
    double best = INFINITY;
    for (int i = 0; i < 20; i++) {
        uint64_t t = dn_now_ns();
        gpu_step(g, list, ops, ctx);
        double us = (double)(dn_now_ns() - t) / 1000;
        best = us < best ? us : best;
    }
    return best;
}

static void bench_init(struct gpu *g, struct bench *b, struct dn_matrix m)
{
    m.bytes = g->ops->matrix_bytes(&m);
    b->n_copies = (uint32_t)(m.bytes < 200000000 ? 200000000 / m.bytes + 1 : 1);
    b->n_copies = b->n_copies > BENCH_COPIES ? BENCH_COPIES : b->n_copies;
    b->n_calls = (b->n_copies + 7) / 8 * 8;
    if ((double)m.bytes * b->n_calls > 4e9)
        b->n_calls = 2;
    size_t all = (size_t)ROWS_AT_ONCE * m.n_in;
    uint8_t *bytes = malloc(all);
    uint16_t *half = malloc(all * 2), *scale = malloc((all / 32 + 1) * 2), *offset = malloc((all / 32 + 1) * 2);
    float *block = malloc(2 * ((m.n_in + 127) / 128) * sizeof *block);
    random_rows(&m, ROWS_AT_ONCE, bytes, half, scale, offset, block);
    struct dn_rows r = rows_of(&m, bytes, half, scale, offset, block);
    for (uint32_t c = 0; c < b->n_copies; c++) {
        b->m[c] = m;
        b->m[c].data = gpu_alloc(g, m.bytes);
        for (uint32_t row = 0, rows = m.n_out * (m.n_groups ? m.n_groups : 1); row < rows; row += ROWS_AT_ONCE) {
            uint32_t n = rows - row < ROWS_AT_ONCE ? rows - row : ROWS_AT_ONCE;
            cr_assert_eq(g->ops->matrix_pack(g->d, &b->m[c], row, n, &r), 0);
        }
    }
    free(bytes);
    free(half);
    free(scale);
    free(offset);
    free(block);
}
static void bench_release(struct gpu *g, struct bench *b)
{
    for (uint32_t c = 0; c < b->n_copies; c++)
        g->ops->free(g->d, b->m[c].data);
}

static const uint32_t bench_shapes[][2] = {{7168, 7168}, {18432, 7168}, {7168, 18432}, {12288, 1536}, {2112, 7168},
                                           {7168, 8192}, {4096, 7168},  {384, 7168},   {163840, 7168}};

Test(matmul, bench_decode)
{
    struct gpu g;
    open_device(&g, 64, 64);
    double empty[65];
    gpu_prepare(&g, 2, no_ops, NULL);
    const uint32_t ns[] = {1, 8, 16, 32, 64};
    for (size_t i = 0; i < sizeof ns / sizeof *ns; i++) {
        step_of(&g, DN_STEP_DECODE, ns[i]);
        empty[ns[i]] = bench_time(&g, 2, no_ops, NULL);
    }
    float *x = malloc(64 * 18432 * sizeof *x);
    for (size_t i = 0; i < 64 * 18432; i++)
        x[i] = gpu_normal();
    struct bench b = {.a = gpu_act(&g, x, 64 * 18432), .out = gpu_alloc(&g, 64 * 163840 * sizeof(float))};
    free(x);
    for (size_t s = 0; s < sizeof bench_shapes / sizeof *bench_shapes; s++)
        for (int f = 0; f < 5; f++) {
            struct dn_matrix m = variant(f, bench_shapes[s][0], bench_shapes[s][1]);
            if (f == 4 || (f == 2 && s))
                continue;
            bench_init(&g, &b, m);
            gpu_prepare(&g, 1, bench_ops, &b);
            for (size_t i = 0; i < sizeof ns / sizeof *ns; i++) {
                step_of(&g, DN_STEP_DECODE, ns[i]);
                double us = (bench_time(&g, 1, bench_ops, &b) - empty[ns[i]]) / b.n_calls,
                       rate = (double)b.m[0].bytes / us / 1e6;
                printf("BENCH matmul %s %ux%u M=%u %.2f us %.2f TB/s %.0f %%\n", dn_weight_format_name(m.format),
                       m.n_out, m.n_in, ns[i], us, rate, rate / 4.65 * 100);
            }
            fflush(stdout);
            bench_release(&g, &b);
        }
    for (int k = 0; k < 2; k++) {
        struct dn_matrix m = {.format = DN_W_BF16, .n_out = k ? 128 : 512, .n_in = k ? 512 : 128, .n_groups = 64};
        bench_init(&g, &b, m);
        gpu_prepare(&g, 1, bench_group_ops, &b);
        for (size_t i = 0; i < sizeof ns / sizeof *ns; i++) {
            step_of(&g, DN_STEP_DECODE, ns[i]);
            double us = (bench_time(&g, 1, bench_group_ops, &b) - empty[ns[i]]) / b.n_calls,
                   rate = (double)b.m[0].bytes / us / 1e6;
            printf("BENCH matmul %s 64x%ux%u M=%u %.2f us %.2f TB/s %.0f %%\n", dn_weight_format_name(m.format),
                   m.n_out, m.n_in, ns[i], us, rate, rate / 4.65 * 100);
        }
        bench_release(&g, &b);
    }
    gpu_close(&g);
}

/* A matrix of several slabs: prefill and decode agree but for the order of sums. */
Test(matmul, slabs)
{
    struct gpu g;
    open_device(&g, 64, 64);
    enum { N = 3, OUT = 18432, IN = 7168 };
    struct bench b = {.n_copies = 0};
    bench_init(&g, &b, (struct dn_matrix){.format = DN_W_BF16, .n_out = OUT, .n_in = IN});
    float *x = malloc(N * IN * sizeof *x), *few = malloc(N * OUT * sizeof *few),
          *large = malloc(N * OUT * sizeof *large);
    for (size_t i = 0; i < N * IN; i++)
        x[i] = gpu_normal();
    struct dn_matmul p = {
        .a = gpu_act(&g, x, N * IN), .w = &b.m[0], .out_f32 = true, .out = gpu_alloc(&g, N * OUT * sizeof(float))};
    step_of(&g, DN_STEP_DECODE, N);
    gpu_step(&g, 7, call_matmul, &p);
    g.ops->download(g.d, few, p.out, N * OUT * sizeof *few);
    gpu_poison(&g, p.out, N * OUT * sizeof *few);
    step_of(&g, DN_STEP_PREFILL, N);
    gpu_step(&g, 7, call_matmul, &p);
    g.ops->download(g.d, large, p.out, N * OUT * sizeof *large);
    size_t wrong = 0;
    double squares = 0;
    for (size_t i = 0; i < N * OUT; i++)
        squares += (double)few[i] * few[i] / (N * OUT);
    for (size_t i = 0; i < N * OUT; i++)
        if (!(fabs((double)few[i] - large[i]) <= 1e-4 * sqrt(squares)) && wrong++ < 5)
            printf("slabs: [%zu][%zu] is %.9g in decode, %.9g in prefill\n", i / OUT, i % OUT, few[i], large[i]);
    cr_expect_eq(wrong, 0, "%zu wrong", wrong);
    free(x);
    free(few);
    free(large);
    bench_release(&g, &b);
    gpu_close(&g);
}

Test(matmul, bench_prefill)
{
    struct gpu g;
    enum { N = 2048 };
    open_device(&g, N, 4);
    gpu_prepare(&g, 2, no_ops, NULL);
    step_of(&g, DN_STEP_PREFILL, N);
    double empty = bench_time(&g, 2, no_ops, NULL);
    size_t n = (size_t)N * 18432;
    uint16_t *x = malloc(n * 2);
    for (size_t i = 0; i < n; i++)
        x[i] = i < 65536 ? f32_to_bf16(gpu_normal()) : x[i & 65535];
    struct bench b = {.a = gpu_copy(&g, x, n * 2), .out = gpu_alloc(&g, n * 2)};
    free(x);
    for (size_t s = 0; s + 1 < sizeof bench_shapes / sizeof *bench_shapes; s++)
        for (int f = 0; f < 4; f++) {
            struct dn_matrix m = variant(f, bench_shapes[s][0], bench_shapes[s][1]);
            if (f == 2)
                continue;
            bench_init(&g, &b, m);
            b.n_calls = 4;
            step_of(&g, DN_STEP_PREFILL, N);
            double us = (bench_time(&g, 7, bench_ops, &b) - empty) / b.n_calls;
            printf("BENCH matmul prefill %s %ux%u M=%u %.1f us %.0f TFLOP/s\n", dn_weight_format_name(m.format),
                   m.n_out, m.n_in, N, us, 2e-6 * m.n_out * m.n_in * N / us);
            fflush(stdout);
            bench_release(&g, &b);
        }
    gpu_close(&g);
}
