/* Experts on CUDA against float64.
 *
 * Bounds: the sums are of bf16 products in f32. Each quarter of k has K / 128 additions one after the other, with a few
 * more within an instruction and at the end, each off by at most 2^-23 of the terms' magnitudes (the matrix unit
 * truncates): (K / 128 + 12) * 2^-23 * sum |w| |x|. h is rounded to bf16 (2^-8 of it), silu's slope is at most 1.1;
 * prefill rounds a pair's result to bf16 too; the sum over k adds top_k * 2^-24 and the result's rounding 2^-8.
 */
#include "gpu/gpu.h"

enum { SEQS = 96, TOKENS = 700 };
static const struct dn_step_limits limits = {.tokens = TOKENS, .seqs = SEQS, .rows = SEQS, .pages = 1, .tags = 1};

static float half_to_f32(uint16_t h)
{
    int e = h >> 10 & 31, m = h & 1023;
    double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return (float)(h & 0x8000 ? -v : v);
}
/* A random f16 or bf16 of magnitude `size`, within a factor of 4, of either sign. */
static uint16_t random16(bool bf16, float size)
{
    float v = size * (float)exp2(gpu_unit() * 4 - 2) * (gpu_rng() % 2 ? 1 : -1);
    uint32_t u;
    if (bf16)
        return f32_to_bf16(v);
    memcpy(&u, &v, 4); /* to f16, truncated: sizes here are normal numbers */
    return (uint16_t)((u >> 16 & 0x8000) | (((u >> 23 & 255) - 112) << 10) | (u >> 13 & 1023));
}

struct form {
    enum dn_weight_format format;
    bool symmetric, bf16;
};
/* A packed matrix and its values: w = what is multiplied in f32 beyond scale, here whole; mag = |q scale| + |offset|.
 */
struct weights {
    struct dn_matrix m;
    float *w, *mag;
};

static void weights_open(struct gpu *g, struct weights *o, struct form f, uint32_t groups, uint32_t n_out,
                         uint32_t n_in, bool nan_code)
{
    uint32_t rows = groups * n_out;
    size_t n = (size_t)rows * n_in, n_scales = n / 32 + 1;
    float size = 1 / sqrtf((float)n_in);
    double e4m3[256];
    for (int i = 0; i < 256; i++)
        e4m3[i] = e4m3_to_f64((uint8_t)i);
    uint16_t *w16 = calloc(n, 2), *scale = calloc(n_scales, 2), *offset = calloc(n_scales, 2);
    uint8_t *q = calloc(n, 1), *q4 = calloc(n / 2 + 1, 1);
    uint32_t k_blocks = (n_in + 127) / 128;
    float *block = calloc((size_t)(rows + 127) / 128 * k_blocks, 4);
    o->w = malloc(n * 4);
    o->mag = malloc(n * 4);
    o->m = (struct dn_matrix){.format = f.format,
                              .n_out = n_out,
                              .n_in = n_in,
                              .n_groups = groups,
                              .symmetric = f.symmetric,
                              .scale_is_bf16 = f.bf16};
    for (size_t i = 0; i < n_scales; i++) {
        scale[i] = random16(f.bf16, size / (f.format == DN_W_INT8 ? 70 : 5));
        offset[i] = random16(f.bf16, size);
    }
    for (size_t i = 0; i < (size_t)(rows + 127) / 128 * k_blocks; i++)
        block[i] = size / 30 * (float)exp2(gpu_unit() * 4 - 2);
    for (size_t i = 0; i < n; i++) {
        size_t row = i / n_in, k = i % n_in;
        uint64_t r = gpu_rng();
        float s = f.bf16 ? bf16_to_f32(scale[i / 32]) : half_to_f32(scale[i / 32]);
        float z = f.bf16 ? bf16_to_f32(offset[i / 32]) : half_to_f32(offset[i / 32]);
        if (f.format == DN_W_BF16) {
            w16[i] = f32_to_bf16(gpu_normal() * size);
            o->w[i] = bf16_to_f32(w16[i]);
            o->mag[i] = fabsf(o->w[i]);
        } else if (f.format == DN_W_INT4) {
            uint32_t c = r & 15;
            q4[i / 2] |= (uint8_t)(c << (4 * (i % 2)));
            o->w[i] = f.symmetric ? ((float)c - 8) * s : (float)((double)c * s + z);
            o->mag[i] = f.symmetric ? fabsf(o->w[i]) : (float)c * fabsf(s) + fabsf(z);
        } else if (f.format == DN_W_INT8) {
            q[i] = (uint8_t)r;
            o->w[i] = (float)(int8_t)q[i] * s;
            o->mag[i] = fabsf(o->w[i]);
        } else {
            q[i] = (uint8_t)r;
            if (r >> 8 & 63)
                q[i] &= 0xbf; /* most are below 2: else the few large ones are all that counts */
            if ((q[i] & 0x7f) == 0x7f)
                q[i] = 0x7e; /* 448 */
            o->w[i] = (float)(e4m3[q[i]] * block[row / 128 * k_blocks + k / 128]);
            o->mag[i] = fabsf(o->w[i]);
        }
    }
    if (nan_code) {
        size_t i = (size_t)(rows - n_out + 5) * n_in + 7; /* row 5 of the last group */
        q[i] = 0xff;
        w16[i] = 0x7fc0;
        o->w[i] = o->mag[i] = NAN;
    }
    struct dn_rows in = {0};
    if (f.format == DN_W_BF16)
        in.bf16 = w16;
    else if (f.format == DN_W_FP8) {
        in.fp8 = q;
        in.block_scale = block;
    } else {
        if (f.format == DN_W_INT4)
            in.q4 = q4;
        else
            in.q8 = (const int8_t *)q;
        in.scale16 = scale;
        in.offset16 = f.format == DN_W_INT4 && !f.symmetric ? offset : NULL;
    }
    o->m.bytes = g->ops->matrix_bytes(&o->m);
    o->m.data = gpu_alloc(g, o->m.bytes);
    cr_assert_eq(g->ops->matrix_pack(g->d, &o->m, 0, rows, &in), 0);
    free(w16);
    free(scale);
    free(offset);
    free(q);
    free(q4);
    free(block);
}
static void weights_close(struct gpu *g, struct weights *o)
{
    g->ops->free(g->d, o->m.data);
    free(o->w);
    free(o->mag);
}

/* A decode step of n sequences, or a prefill step of one of n tokens. */
static void step_of(struct gpu *g, enum dn_step_kind kind, uint32_t n)
{
    gpu_rows_step(g, kind, kind == DN_STEP_DECODE ? n : 1);
    struct dn_step *s = g->s;
    s->n_tokens = n;
    if (kind == DN_STEP_DECODE)
        return;
    s->token_start[1] = s->kv_len[0] = (int32_t)n;
    for (uint32_t i = 0; i < n; i++) {
        s->token_id[i] = s->token_seq[i] = s->token_count[i] = 0;
        s->position[i] = (int32_t)i;
    }
}

struct op {
    struct dn_experts p;
    const int32_t *expert[16]; /* of each repetition; [0] is p's if repeat is 1 */
    const struct dn_matrix *gate_up[16], *down[16];
    int repeat;
};
static void experts_ops(struct gpu *g, void *ctx)
{
    struct op *o = ctx;
    for (int i = 0; i < o->repeat; i++) {
        if (o->expert[i])
            o->p.expert = o->expert[i];
        g->ops->experts(g->d, &o->p);
    }
}

enum routing { UNIFORM, ZIPF, ONE, LAST };
static void route(int32_t *expert, uint32_t n, uint32_t experts, uint32_t top_k, enum routing how)
{
    for (uint32_t t = 0; t < n; t++)
        for (uint32_t k = 0; k < top_k; k++) {
            int32_t e;
            bool again;
            do {
                e = how == ONE    ? (int32_t)k
                    : how == LAST ? (int32_t)(experts - 1 - k)
                    : how == ZIPF ? (int32_t)(pow(gpu_unit(), 5) * experts) /* density e^-0.8 */
                                  : (int32_t)(gpu_rng() % experts);
                again = false;
                for (uint32_t j = 0; j < k; j++)
                    again |= expert[t * top_k + j] == e;
            } while (again);
            expert[t * top_k + k] = e;
        }
}

struct shape {
    struct form f;
    uint32_t n, experts, top_k, dim, ff;
    enum routing how;
    enum dn_step_kind kind;
    bool add, nan;
    struct form f_down; /* if `mixed` */
    bool mixed;
};
static const char *shape_name(const struct shape *s)
{
    static char text[160];
    snprintf(text, sizeof text, "experts %s%s%s%s %s n=%u E=%u top=%u dim=%u ff=%u routing=%d",
             dn_weight_format_name(s->f.format), s->f.format == DN_W_INT4 && !s->f.symmetric ? " affine" : "",
             s->f.bf16 ? " bf16" : "", s->mixed ? " mixed" : "", s->kind == DN_STEP_DECODE ? "decode" : "prefill", s->n,
             s->experts, s->top_k, s->dim, s->ff, s->how);
    return text;
}

/* One pair: adds weight * result to out, and what it may be off by to tol. */
static void oracle_pair(const struct shape *s, const struct weights *gu, const struct weights *dn, const float *a,
                        uint32_t e, double weight, double *out, double *tol)
{
    double *h = malloc(s->ff * sizeof *h), *h_tol = malloc(s->ff * sizeof *h_tol);
    double eps1 = (s->dim / 128.0 + 12) * 0x1p-23, eps2 = (s->ff / 128.0 + 12) * 0x1p-23;
    for (uint32_t i = 0; i < s->ff; i++) {
        double v[2] = {0, 0}, m[2] = {0, 0};
        for (int part = 0; part < 2; part++) {
            size_t at = ((size_t)e * 2 * s->ff + (size_t)part * s->ff + i) * s->dim;
            for (uint32_t k = 0; k < s->dim; k++) {
                v[part] += (double)gu->w[at + k] * a[k];
                m[part] += (double)gu->mag[at + k] * fabs(a[k]);
            }
        }
        double silu = v[0] / (1 + exp(-v[0]));
        h[i] = silu * v[1];
        h_tol[i] = 1.1 * eps1 * m[0] * fabs(v[1]) + eps1 * m[1] * fabs(silu) + fabs(h[i]) * (0x1p-8 + 0x1p-19);
    }
    for (uint32_t r = 0; r < s->dim; r++) {
        double v = 0, m = 0, t = 0;
        size_t at = ((size_t)e * s->dim + r) * s->ff;
        for (uint32_t i = 0; i < s->ff; i++) {
            v += dn->w[at + i] * h[i];
            m += dn->mag[at + i] * fabs(h[i]);
            t += dn->mag[at + i] * h_tol[i];
        }
        t += eps2 * m + (s->kind == DN_STEP_PREFILL ? fabs(v) * 0x1p-8 : 0);
        out[r] += weight * v;
        tol[r] += fabs(weight) * (t + fabs(v) * 16 * 0x1p-24);
    }
    free(h);
    free(h_tol);
}

/* n tokens from `first` on, into out; returns the activations' bits. */
static uint16_t *run(struct gpu *g, struct op *o, const struct shape *s, const uint16_t *a, const int32_t *expert,
                     const float *weight, const uint16_t *add, uint32_t first, uint32_t n)
{
    size_t row = (size_t)s->dim * 2, k = s->top_k * 4;
    g->ops->upload(g->d, (void *)o->p.a, a + (size_t)first * s->dim, n * row);
    g->ops->upload(g->d, (void *)o->p.expert, expert + first * s->top_k, n * k);
    g->ops->upload(g->d, (void *)o->p.weight, weight + first * s->top_k, n * k);
    gpu_poison(g, o->p.out, TOKENS * row);
    if (s->add)
        g->ops->upload(g->d, o->p.out, add + (size_t)first * s->dim, n * row);
    o->p.add = s->add ? o->p.out : NULL;
    o->repeat = 1;
    step_of(g, s->kind, n);
    gpu_step(g, 7, experts_ops, o);
    uint16_t *out = malloc(TOKENS * row);
    g->ops->download(g->d, out, o->p.out, TOKENS * row);
    for (size_t i = (size_t)n * s->dim; i < (size_t)TOKENS * s->dim; i++)
        cr_assert_eq(out[i], 0xffff, "%s: a row after the last was written", shape_name(s));
    return out;
}

static void check(struct gpu *g, const struct shape *s)
{
    struct weights gu, dn;
    weights_open(g, &gu, s->f, s->experts, 2 * s->ff, s->dim, s->nan && s->f.format != DN_W_INT4);
    weights_open(g, &dn, s->mixed ? s->f_down : s->f, s->experts, s->dim, s->ff, false);
    size_t n = (size_t)s->n * s->dim, pairs = (size_t)s->n * s->top_k;
    float *a = malloc(n * 4), *weight = malloc(pairs * 4), *got = malloc(n * 4);
    uint16_t *a16 = malloc(n * 2), *add16 = malloc(n * 2);
    int32_t *expert = malloc(pairs * 4);
    for (size_t i = 0; i < n; i++) {
        a[i] = bf16_to_f32(a16[i] = f32_to_bf16(gpu_normal()));
        add16[i] = f32_to_bf16(gpu_normal() / 4);
    }
    if (s->nan) { /* a token whose row has a NaN, one with a NaN weight */
        a16[(s->n - 1) * s->dim + 3] = 0x7fc0;
        a[(s->n - 1) * s->dim + 3] = NAN;
    }
    for (size_t i = 0; i < pairs; i++)
        weight[i] = (float)(gpu_unit() + 0.1);
    if (s->nan && s->n > 2)
        weight[s->top_k] = NAN;
    route(expert, s->n, s->experts, s->top_k, s->how);
    struct op o = {.p = {.top_k = s->top_k, .gate_up = &gu.m, .down = &dn.m}};
    o.p.a = gpu_alloc(g, TOKENS * (size_t)s->dim * 2);
    o.p.expert = gpu_alloc(g, TOKENS * (size_t)s->top_k * 4);
    o.p.weight = gpu_alloc(g, TOKENS * (size_t)s->top_k * 4);
    o.p.out = gpu_alloc(g, TOKENS * (size_t)s->dim * 2);
    uint16_t *out = run(g, &o, s, a16, expert, weight, add16, 0, s->n);

    /* Every token if that is cheap, else some. */
    uint32_t step = (uint32_t)((double)pairs * s->dim * s->ff * 3 / 4e7) + 1, m = 0;
    double *want = calloc(n, sizeof *want), *tol = calloc(n, sizeof *tol);
    for (uint32_t t = 0; t < s->n; t = t + step < s->n || t == s->n - 1 ? t + step : s->n - 1, m++) {
        double *w = want + (size_t)m * s->dim, *b = tol + (size_t)m * s->dim;
        for (uint32_t k = 0; k < s->top_k; k++)
            oracle_pair(s, &gu, &dn, a + (size_t)t * s->dim, (uint32_t)expert[t * s->top_k + k],
                        weight[t * s->top_k + k], w, b);
        for (uint32_t r = 0; r < s->dim; r++) {
            if (s->add)
                w[r] += bf16_to_f32(add16[(size_t)t * s->dim + r]);
            b[r] += fabs(w[r]) * (0x1p-8 + 0x1p-20);
            got[(size_t)m * s->dim + r] = bf16_to_f32(out[(size_t)t * s->dim + r]);
        }
    }
    gpu_expect(shape_name(s), got, want, tol, (size_t)m * s->dim, s->dim);

    /* Alone, or in another chunk: the same bits. */
    for (uint32_t t = 0, i = 0; t < s->n && s->n > 1 && i < 4; t += (s->n + 3) / 4, i++) {
        uint32_t len = s->kind == DN_STEP_DECODE ? 1 + i / 2 * 2 : 1 + i * 20;
        if (t + len > s->n)
            len = s->n - t;
        uint16_t *alone = run(g, &o, s, a16, expert, weight, add16, t, len);
        cr_expect(memcmp(alone, out + (size_t)t * s->dim, (size_t)len * s->dim * 2) == 0,
                  "%s: tokens %u..%u differ from those of the whole batch", shape_name(s), t, t + len - 1);
        free(alone);
    }
    g->ops->free(g->d, (void *)o.p.a);
    g->ops->free(g->d, (void *)o.p.expert);
    g->ops->free(g->d, (void *)o.p.weight);
    g->ops->free(g->d, o.p.out);
    weights_close(g, &gu);
    weights_close(g, &dn);
    free(a);
    free(weight);
    free(got);
    free(a16);
    free(add16);
    free(expert);
    free(out);
    free(want);
    free(tol);
}

#define Q4S                                                                                                            \
    {                                                                                                                  \
        DN_W_INT4, true, true                                                                                          \
    }
#define Q4H                                                                                                            \
    {                                                                                                                  \
        DN_W_INT4, true, false                                                                                         \
    }
#define Q4A                                                                                                            \
    {                                                                                                                  \
        DN_W_INT4, false, true                                                                                         \
    }
#define Q4AH                                                                                                           \
    {                                                                                                                  \
        DN_W_INT4, false, false                                                                                        \
    }
#define Q8B                                                                                                            \
    {                                                                                                                  \
        DN_W_INT8, true, true                                                                                          \
    }
#define Q8H                                                                                                            \
    {                                                                                                                  \
        DN_W_INT8, true, false                                                                                         \
    }
#define F8                                                                                                             \
    {                                                                                                                  \
        DN_W_FP8, true, true                                                                                           \
    }
#define B16                                                                                                            \
    {                                                                                                                  \
        DN_W_BF16, true, true                                                                                          \
    }
#define D DN_STEP_DECODE
#define P DN_STEP_PREFILL

Test(experts, correct_decode)
{
    struct gpu g;
    gpu_open(&g, &limits, 1, 1);
    static const struct shape shapes[] = {
        {Q4S, 1, 4, 1, 64, 64, UNIFORM, .kind = D},
        {Q4S, 1, 4, 2, 256, 128, UNIFORM, D, .add = true},
        {Q4A, 1, 4, 2, 256, 128, UNIFORM, D, .add = true},
        {F8, 1, 4, 2, 256, 128, UNIFORM, D, .add = true},
        {Q8B, 1, 4, 2, 256, 128, UNIFORM, D, .add = true},
        {B16, 1, 4, 2, 256, 128, UNIFORM, D, .add = true},
        {Q4S, 3, 4, 2, 320, 32, UNIFORM, D, .add = true, .nan = true}, /* ff an odd multiple of 32 */
        {Q4S, 7, 32, 4, 448, 224, UNIFORM, .kind = D},
        {Q4H, 16, 32, 8, 704, 96, ZIPF, D, .add = true},
        {Q4A, 5, 4, 3, 192, 160, UNIFORM, D, .nan = true},
        {Q4AH, 33, 32, 4, 320, 256, ZIPF, .kind = D},
        {Q8B, 9, 32, 4, 448, 96, UNIFORM, D, .add = true},
        {Q8H, 64, 4, 4, 128, 64, ONE, .kind = D},
        {F8, 17, 32, 6, 384, 192, UNIFORM, D, .nan = true},
        {F8, 8, 4, 2, 640, 128, ONE, D, .add = true},
        {B16, 12, 32, 4, 320, 96, ZIPF, D, .nan = true},
        {B16, 40, 4, 1, 576, 160, ONE, .kind = D},
        {Q4S, 64, 384, 8, 256, 64, UNIFORM, D, .add = true},
        {Q4S, 64, 1024, 16, 64, 32, UNIFORM, .kind = D},
        {Q4S, 96, 32, 8, 128, 128, LAST, .kind = D},
        {Q4S, 20, 6, 2, 7168, 64, ZIPF, D, .add = true},
        {Q4S, 6, 3, 2, 128, 2048, ONE, .kind = D},
        {Q4S, 10, 8, 2, 256, 128, UNIFORM, D, .f_down = Q8B, .mixed = true},
        {F8, 10, 8, 2, 256, 128, UNIFORM, D, .f_down = B16, .mixed = true, .add = true},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check(&g, &shapes[i]);
    gpu_close(&g);
}

Test(experts, correct_prefill)
{
    struct gpu g;
    gpu_open(&g, &limits, 1, 1);
    static const struct shape shapes[] = {
        {Q4S, 1, 4, 2, 256, 128, UNIFORM, P, .add = true},
        {Q4S, 100, 4, 2, 320, 96, UNIFORM, P, .add = true, .nan = true},
        {Q4A, 200, 8, 2, 256, 128, ZIPF, .kind = P},
        {Q4AH, 64, 4, 4, 192, 32, ONE, P, .nan = true},
        {Q8H, 130, 32, 4, 448, 96, UNIFORM, P, .add = true},
        {F8, 300, 32, 6, 384, 192, ZIPF, P, .nan = true},
        {B16, 90, 4, 2, 320, 96, UNIFORM, P, .nan = true},
        {Q4S, 700, 384, 8, 256, 64, UNIFORM, P, .add = true},
        {Q4S, 700, 32, 2, 128, 256, ONE, .kind = P},
        {Q4H, 40, 4, 2, 7168, 64, UNIFORM, .kind = P},
        {F8, 70, 8, 2, 256, 128, UNIFORM, P, .f_down = Q4S, .mixed = true, .add = true},
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check(&g, &shapes[i]);
    gpu_close(&g);
}

/* ---- Timings ---- */

/* One group is packed from random rows, the others are copies of it. */
static void big(struct gpu *g, struct dn_matrix *m, struct form f, uint32_t groups, uint32_t n_out, uint32_t n_in)
{
    struct weights one;
    weights_open(g, &one, f, 2, n_out, n_in, false);
    *m = one.m;
    m->n_groups = groups;
    size_t each = one.m.bytes / 2;
    m->bytes = g->ops->matrix_bytes(m);
    cr_assert_eq(m->bytes, each * groups);
    m->data = gpu_alloc(g, m->bytes);
    uint8_t *host = malloc(each);
    g->ops->download(g->d, host, one.m.data, each);
    for (uint32_t e = 0; e < groups; e++)
        g->ops->upload(g->d, (uint8_t *)m->data + e * each, host, each);
    free(host);
    weights_close(g, &one);
}

static double bench_empty;
static void bench(struct gpu *g, struct form f, uint32_t experts, uint32_t top_k, uint32_t dim, uint32_t ff,
                  const uint32_t *ns, size_t n_ns, bool zipf, uint32_t prefill)
{
    struct dn_matrix gu, dn;
    big(g, &gu, f, experts, 2 * ff, dim);
    big(g, &dn, f, experts, dim, ff);
    double expert_mb = (double)(gu.bytes + dn.bytes) / experts / 1e6;
    uint32_t most = prefill > 64 ? prefill : 64;
    float *a = malloc((size_t)most * dim * 4), *weight = malloc((size_t)most * top_k * 4);
    for (size_t i = 0; i < (size_t)most * dim; i++)
        a[i] = gpu_normal();
    for (size_t i = 0; i < (size_t)most * top_k; i++)
        weight[i] = 0.125f;
    struct op o = {.p = {.top_k = top_k, .gate_up = &gu, .down = &dn}, .repeat = 6};
    o.p.a = gpu_act(g, a, (size_t)most * dim);
    o.p.add = gpu_act(g, a, (size_t)most * dim);
    o.p.weight = gpu_copy(g, weight, (size_t)most * top_k * 4);
    o.p.out = gpu_alloc(g, (size_t)most * dim * 2);
    int32_t *expert = malloc((size_t)most * top_k * 4);
    for (int i = 0; i < o.repeat; i++)
        o.expert[i] = gpu_alloc(g, (size_t)most * top_k * 4);
    if (n_ns)
        gpu_prepare(g, 1, experts_ops, &o);
    for (size_t j = 0; j < n_ns * (zipf ? 2 : 1) + (prefill ? 1 : 0); j++) {
        bool decode = j < n_ns * (zipf ? 2 : 1);
        uint32_t n = decode ? ns[j % n_ns] : prefill;
        double distinct = 0;
        if (!decode)
            o.repeat = 2;
        for (int i = 0; i < o.repeat; i++) {
            route(expert, n, experts, top_k, j >= n_ns && decode ? ZIPF : UNIFORM);
            bool seen[DN_MAX_EXPERTS] = {false};
            for (size_t k = 0; k < (size_t)n * top_k; k++) {
                distinct += !seen[expert[k]];
                seen[expert[k]] = true;
            }
            g->ops->upload(g->d, (void *)o.expert[i], expert, (size_t)n * top_k * 4);
        }
        distinct /= o.repeat;
        step_of(g, decode ? DN_STEP_DECODE : DN_STEP_PREFILL, n);
        double us = (gpu_time(g, decode ? 1 : 7, experts_ops, &o) - bench_empty) / o.repeat,
               tb = distinct * expert_mb / us;
        printf("BENCH experts %s %s E=%u top=%u dim=%u ff=%u n=%u %s distinct=%.1f %.1f us %.2f TB/s %.1f %%",
               dn_weight_format_name(f.format), decode ? "decode" : "prefill", experts, top_k, dim, ff, n,
               j >= n_ns && decode ? "zipf" : "uniform", distinct, us, tb, tb / 4.65 * 100);
        if (!decode)
            printf(" %.0f TFLOP/s", 6.0 * n * top_k * dim * ff / us / 1e6);
        printf("\n");
        fflush(stdout);
    }
    g->ops->free(g->d, gu.data);
    g->ops->free(g->d, dn.data);
    g->ops->free(g->d, (void *)o.p.a);
    g->ops->free(g->d, (void *)o.p.add);
    g->ops->free(g->d, o.p.out);
    for (int i = 0; i < 6; i++)
        g->ops->free(g->d, (void *)o.expert[i]);
    free(a);
    free(weight);
    free(expert);
}

Test(experts, bench)
{
    struct gpu g;
    struct dn_step_limits l = limits;
    l.tokens = 2048;
    l.seqs = 64;
    gpu_open(&g, &l, 1, 1);
    struct op none = {.repeat = 0};
    gpu_prepare(&g, 2, experts_ops, &none);
    gpu_rows_step(&g, D, 1);
    bench_empty = gpu_time(&g, 2, experts_ops, &none);
    printf("BENCH experts empty step %.1f us (subtracted)\n", bench_empty);
    static const uint32_t all[] = {1, 2, 4, 8, 16, 32, 64}, some[] = {1, 8, 64};
    static const struct form q4 = Q4S, f8 = F8, q8 = Q8B, b16 = B16;
    bench(&g, q4, 384, 8, 7168, 2048, all, 7, true, 2048);
    bench(&g, q4, 384, 8, 7168, 256, all, 7, false, 0);
    bench(&g, f8, 64, 8, 6144, 2048, some, 3, false, 2048);
    bench(&g, q8, 64, 8, 4096, 1536, some, 3, false, 0);
    bench(&g, b16, 128, 8, 2048, 768, some, 3, false, 2048);
    gpu_close(&g);
}
