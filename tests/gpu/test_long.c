/* Attention over long contexts on CUDA against float64: decode steps up to 140,003 tokens, on both sides of the lengths
 * at which their kernels cut contexts otherwise, and chunks of a prefill that end at 33,001.
 *
 * A context's pages repeat: 4 quiet ones in turn, and every eleventh is of its own (up to 199). The oracle computes
 * each token of a page once and multiplies by how often it is there. A page of its own has one loud token, which the
 * queries favour by exp(8): together these have most of the weight, about as much each, so that a split that is lost or
 * counted twice moves the result by 1 / sqrt(199) of its size at least. The root mean square of the errors must be
 * below a 32nd.
 *
 * What pages hold is read back and decoded (MLA) or known (GQA); bounds are those of test_mla.c and test_gqa.c.
 */
#include "gpu/mla_page.h"

enum {
    QUIET = 4,
    PERIOD = 11,
    DISTINCT = QUIET + 200,
    TOKENS = DISTINCT * PAGE,
    STEP_TOKENS = 2048,
    MAX_PAGES = 8192,
    CHUNK = 150
};
static const uint32_t lengths[] = {16384, 16385, 33001, 131072, 131073, 140003};
enum { N_LENGTHS = sizeof lengths / sizeof *lengths };

struct world {
    struct gpu g;
    struct dn_kv_layout l;
    uint8_t *arena;
    size_t arena_bytes;
    uint32_t half; /* slabs of a format */
    enum dn_kv_format format;
    uint32_t heads;
    const void *q;
    void *out;
    /* MLA */
    struct dn_matrix w_k, w_v;
    uint32_t nope, v;
    /* GQA */
    uint32_t n_kv, dim;
};

static bool is_loud(uint32_t token)
{
    return token / PAGE >= QUIET && token % PAGE == token / PAGE % PAGE;
}
static uint32_t place(uint32_t i) /* which of the pages a context has at its page i */
{
    return i % PERIOD == 5 ? QUIET + i / PERIOD : i % QUIET;
}
static uint32_t page_id(const struct world *w, enum dn_kv_format f, uint32_t k)
{
    uint32_t per_slab = w->l.format[f].pages_per_slab;
    return (f * w->half + k / per_slab) * w->l.slab_pages + k % per_slab;
}
/* How often each token is there in a context of n. */
static void count(uint32_t n, uint32_t *times)
{
    memset(times, 0, TOKENS * sizeof *times);
    for (uint32_t t = 0; t < n; t += PAGE)
        for (uint32_t i = 0; i < PAGE && t + i < n; i++)
            times[place(t / PAGE) * PAGE + i]++;
}

static void world_open(struct world *w)
{
    struct dn_step_limits limits = {
        .tokens = STEP_TOKENS, .seqs = N_LENGTHS, .rows = N_LENGTHS, .pages = MAX_PAGES, .tags = 1};
    memset(w, 0, sizeof *w);
    gpu_open(&w->g, &limits, 1, 1);
}
static void take_arena(struct world *w)
{
    uint32_t per_slab = w->l.format[DN_KV_BF16].pages_per_slab;
    w->half = (DISTINCT + per_slab - 1) / per_slab;
    w->arena_bytes = 2 * w->half * w->l.slab_bytes;
    w->arena = gpu_alloc(&w->g, w->arena_bytes);
    gpu_poison(&w->g, w->arena, w->arena_bytes);
}

/* A step of n sequences; tokens first[i] .. end[i] - 1 of contexts whose pages repeat, or do not (`all`: to fill them).
 */
static void set_step(struct world *w, enum dn_step_kind kind, uint32_t n, const uint32_t *first, const uint32_t *end,
                     bool all)
{
    struct dn_step *s = w->g.s;
    uint32_t t = 0, p = 0;
    gpu_rows_step(&w->g, kind, n);
    for (uint32_t i = 0; i < n; i++) {
        for (uint32_t k = first[i]; k < end[i]; k++, t++) {
            s->token_id[t] = s->token_count[t] = 0;
            s->position[t] = (int32_t)k;
            s->token_seq[t] = (int32_t)i;
        }
        s->token_start[i + 1] = (int32_t)t;
        s->kv_len[i] = (int32_t)end[i];
        s->kv_format[i] = (uint8_t)w->format;
        for (uint32_t k = 0; k < (end[i] + PAGE - 1) / PAGE; k++)
            s->page[p++] = page_id(w, w->format, all ? k : place(k));
        s->page_start[i + 1] = (int32_t)p;
    }
    s->n_tokens = t;
    s->n_rows = 0;
}

/* ---- The oracle ---- */

struct rows { /* of tokens; f32 values, as stored */
    const float *data;
    size_t stride;
    uint32_t n;
};
/* out = the mean of values, mass that of their sizes; rough: the largest sum of |terms| of a score. */
static void attend(struct rows key, struct rows value, const uint32_t *times, const double *q, double scale,
                   double *out, double *mass, double *rough)
{
    double *p = malloc(TOKENS * sizeof *p), top = -INFINITY, sum = 0;
    *rough = 0;
    for (uint32_t t = 0; t < TOKENS; t++) {
        const float *k = key.data + t * key.stride;
        double dot = 0, size = 0;
        if (!times[t])
            continue;
        for (uint32_t i = 0; i < key.n; i++) {
            dot += q[i] * k[i];
            size += fabs(q[i] * k[i]);
        }
        p[t] = dot * scale;
        top = fmax(top, p[t]);
        *rough = fmax(*rough, size * scale);
    }
    for (uint32_t t = 0; t < TOKENS; t++)
        if (times[t])
            sum += p[t] = times[t] * exp(p[t] - top);
    for (uint32_t i = 0; i < value.n; i++)
        out[i] = mass[i] = 0;
    for (uint32_t t = 0; t < TOKENS; t++) {
        const float *v = value.data + t * value.stride;
        for (uint32_t i = 0; i < value.n && times[t]; i++) {
            out[i] += p[t] / sum * v[i];
            mass[i] += p[t] / sum * fabs((double)v[i]);
        }
    }
    free(p);
}

/* gpu_expect(), and the root mean square. */
static void expect(const char *what, const float *got, const double *want, const double *bound, uint32_t n,
                   uint32_t columns)
{
    double errors = 0, squares = 0;
    for (uint32_t i = 0; i < n; i++) {
        errors += (got[i] - want[i]) * (got[i] - want[i]);
        squares += want[i] * want[i];
    }
    double rms = sqrt(errors / squares);
    gpu_expect(what, got, want, bound, n, columns);
    printf("%s: rms error %.2e of the results' size\n", what, rms);
    fflush(stdout);
    cr_expect(rms < 0x1p-5, "%s: rms error %g", what, rms);
}

static void acts_to_f64(const float *x, uint32_t n, double *out)
{
    for (uint32_t i = 0; i < n; i++)
        out[i] = x[i];
}

/* All rows of a decode step at once, twice; then each alone, whose query must be row 0. Bits of [rows][row] values. */
static uint16_t *decode(struct world *w, uint32_t list, void (*op)(struct gpu *, void *), const float *q,
                        uint32_t q_row, uint32_t row)
{
    uint32_t first[N_LENGTHS];
    uint16_t *got = malloc((size_t)N_LENGTHS * row * 2), *again = malloc((size_t)N_LENGTHS * row * 2);
    uint16_t *h = malloc((size_t)q_row * 2);
    for (uint32_t i = 0; i < N_LENGTHS; i++)
        first[i] = lengths[i] - 1;
    gpu_prepare(&w->g, list, op, w);
    for (int k = 0; k < 2; k++) {
        gpu_poison(&w->g, w->out, (size_t)N_LENGTHS * row * 2);
        set_step(w, DN_STEP_DECODE, N_LENGTHS, first, lengths, false);
        gpu_step(&w->g, list, op, w);
        w->g.ops->download(w->g.d, k ? again : got, w->out, (size_t)N_LENGTHS * row * 2);
    }
    cr_expect(memcmp(got, again, (size_t)N_LENGTHS * row * 2) == 0, "the same step twice differs");
    for (uint32_t i = 0; i < N_LENGTHS; i++) {
        for (uint32_t k = 0; k < q_row; k++)
            h[k] = f32_to_bf16(q[(size_t)i * q_row + k]);
        w->g.ops->upload(w->g.d, (void *)(uintptr_t)w->q, h, (size_t)q_row * 2);
        set_step(w, DN_STEP_DECODE, 1, first + i, lengths + i, false);
        gpu_step(&w->g, list, op, w);
        w->g.ops->download(w->g.d, again, w->out, (size_t)row * 2);
        cr_expect(memcmp(again, got + (size_t)i * row, (size_t)row * 2) == 0, "context %u alone differs", lengths[i]);
    }
    free(again);
    free(h);
    return got;
}

/* ---- MLA ---- */

static void op_mla_attention(struct gpu *g, void *ctx)
{
    struct world *w = ctx;
    g->ops->mla_attention(g->d, &(struct dn_mla_attention){.q = w->q,
                                                           .n_heads = w->heads,
                                                           .latent_dim = LATENT,
                                                           .rope_dim = ROPE,
                                                           .scale = 0.03f,
                                                           .layout = &w->l,
                                                           .arena = w->arena,
                                                           .out = w->out});
}
static void op_mla_prefill(struct gpu *g, void *ctx)
{
    struct world *w = ctx;
    g->ops->mla_prefill(g->d, &(struct dn_mla_prefill){.q = w->q,
                                                       .w_k = &w->w_k,
                                                       .w_v = &w->w_v,
                                                       .n_heads = w->heads,
                                                       .nope_dim = w->nope,
                                                       .rope_dim = ROPE,
                                                       .v_dim = w->v,
                                                       .latent_dim = LATENT,
                                                       .scale = 0.03f,
                                                       .layout = &w->l,
                                                       .arena = w->arena,
                                                       .out = w->out});
}

struct mla_fill {
    struct world *w;
    void *kv, *q;
    const float *norm, *rope; /* rope: no rotation at all */
};
static void op_mla_write(struct gpu *g, void *ctx)
{
    struct mla_fill *f = ctx;
    g->ops->mla_write(g->d, &(struct dn_mla_write){.kv = f->kv,
                                                   .kv_stride = WIDTH,
                                                   .q = f->q,
                                                   .q_rope = f->q,
                                                   .q_rope_stride = ROPE,
                                                   .q_rope_head_stride = ROPE,
                                                   .n_heads = 1,
                                                   .rope_dim = ROPE,
                                                   .latent_dim = LATENT,
                                                   .kv_norm = f->norm,
                                                   .norm_eps = 1e-5f,
                                                   .rope = f->rope,
                                                   .layout = &f->w->l,
                                                   .arena = f->w->arena});
}

/* Pages of both formats with the same tokens; content[f] is [TOKENS][WIDTH] as stored. */
static void mla_fill(struct world *w, float *content[DN_KV_FORMATS])
{
    struct mla_fill f = {.w = w};
    float *x = malloc((size_t)TOKENS * WIDTH * sizeof *x), *rope = malloc((size_t)TOKENS * ROPE * sizeof *rope);
    float norm[LATENT];
    for (uint32_t t = 0; t < TOKENS; t++)
        for (uint32_t i = 0; i < WIDTH; i++)
            x[(size_t)t * WIDTH + i] = i == LATENT  ? (is_loud(t) ? 16 : 0)
                                       : i < LATENT ? 4 * gpu_normal()
                                                    : 0.5f * gpu_normal();
    for (uint32_t i = 0; i < TOKENS * ROPE; i++)
        rope[i] = i % 2 ? 0 : 1; /* cos, sin */
    for (uint32_t i = 0; i < LATENT; i++)
        norm[i] = (float)(0.5 + gpu_unit());
    f.rope = gpu_copy(&w->g, rope, (size_t)TOKENS * ROPE * sizeof *rope);
    f.norm = gpu_copy(&w->g, norm, sizeof norm);
    f.q = gpu_alloc(&w->g, (size_t)STEP_TOKENS * ROPE * 2);
    uint8_t *kv = gpu_act(&w->g, x, (size_t)TOKENS * WIDTH), *host = malloc(w->arena_bytes);
    for (w->format = 0; w->format < DN_KV_FORMATS; w->format++)
        for (uint32_t t = 0; t < TOKENS; t += STEP_TOKENS) {
            uint32_t end = TOKENS - t < STEP_TOKENS ? TOKENS : t + STEP_TOKENS;
            f.kv = kv + (size_t)t * WIDTH * 2;
            set_step(w, DN_STEP_PREFILL, 1, &t, &end, true);
            gpu_step(&w->g, 7, op_mla_write, &f);
        }
    w->g.ops->download(w->g.d, host, w->arena, w->arena_bytes);
    for (unsigned k = 0; k < DN_KV_FORMATS; k++) {
        content[k] = malloc((size_t)TOKENS * WIDTH * sizeof **content);
        for (uint32_t t = 0; t < TOKENS; t++)
            for (uint32_t i = 0; i < WIDTH; i++)
                content[k][(size_t)t * WIDTH + i] =
                    stored(&w->l, host + dn_kv_page_offset(&w->l, k, page_id(w, k, t / PAGE)), k, t % PAGE, i);
    }
    cr_assert_float_eq(content[DN_KV_FP8][(size_t)(QUIET * PAGE + QUIET) * WIDTH + LATENT], 16, 16 * 0x1.01p-8,
                       "no loud token");
    free(x);
    free(rope);
    free(host);
}

/* Queries [n][width]; element `loud` is 16. */
static float *queries(struct world *w, uint32_t n, uint32_t width, uint32_t loud, float loudness)
{
    float *q = malloc((size_t)n * width * sizeof *q);
    for (size_t i = 0; i < (size_t)n * width; i++)
        q[i] = i % width == loud ? loudness : gpu_normal();
    w->q = gpu_act(&w->g, q, (size_t)n * width);
    return q;
}

static void mla_decode(struct world *w, const float *content, uint32_t list)
{
    static const uint32_t head[] = {0, 21, 63};
    enum { HEADS = sizeof head / sizeof *head };
    bool fp8 = w->format == DN_KV_FP8;
    struct rows key = {content, WIDTH, WIDTH}, value = {content, WIDTH, LATENT};
    uint32_t *times = malloc(TOKENS * sizeof *times), row = 64 * LATENT;
    float x[HEADS * LATENT];
    double want[HEADS * LATENT], bound[HEADS * LATENT], q64[WIDTH], rough;
    w->heads = 64;
    w->out = gpu_alloc(&w->g, (size_t)N_LENGTHS * row * 2);
    float *q = queries(w, N_LENGTHS * 64, WIDTH, LATENT, 16);
    uint16_t *got = decode(w, list, op_mla_attention, q, 64 * WIDTH, row);
    for (uint32_t i = 0; i < N_LENGTHS; i++) {
        char what[64];
        count(lengths[i], times);
        for (uint32_t h = 0; h < HEADS; h++) {
            double *o = want + h * LATENT, *b = bound + h * LATENT;
            acts_to_f64(q + ((size_t)i * 64 + head[h]) * WIDTH, WIDTH, q64);
            attend(key, value, times, q64, 0.03f, o, b, &rough);
            double worst = rough * (64 * 0x1p-24 + (fp8 ? 0x1.01p-10 : 0));
            for (uint32_t k = 0; k < LATENT; k++) {
                x[h * LATENT + k] = bf16_to_f32(got[(size_t)i * row + head[h] * LATENT + k]);
                b[k] = b[k] * (2 * 0x1.01p-8 + 2 * worst + (fp8 ? 0x1.01p-10 : 0)) + fabs(o[k]) * 0x1.01p-8 + 1e-6;
            }
        }
        snprintf(what, sizeof what, "mla decode %s ctx %u", dn_kv_format_name(w->format), lengths[i]);
        expect(what, x, want, bound, HEADS * LATENT, LATENT);
    }
    free(times);
    free(q);
    free(got);
}

static float *pack_random(struct world *w, struct dn_matrix *m, uint32_t heads, uint32_t n_out)
{
    *m = (struct dn_matrix){.format = DN_W_BF16, .n_out = n_out, .n_in = LATENT, .n_groups = heads};
    return gpu_pack_random(&w->g, m);
}

/* A row and head: absorbed, which is the same in exact numbers. Bounds as in test_mla.c's oracle_prefill(). */
static void mla_prefill_oracle(const struct world *w, const float *content, const uint32_t *times, const float *q,
                               const float *wk, const float *wv, double *out, double *bound)
{
    double q64[WIDTH], latent[LATENT], mass[LATENT], rough, q_size = 0, most = 0;
    struct rows key = {content, WIDTH, WIDTH}, value = {content, WIDTH, LATENT};
    for (uint32_t i = 0; i < WIDTH; i++) {
        q64[i] = i < LATENT ? 0 : q[w->nope + i - LATENT];
        for (uint32_t k = 0; i < LATENT && k < w->nope; k++)
            q64[i] += (double)q[k] * wk[(size_t)k * LATENT + i];
    }
    attend(key, value, times, q64, 0.03f, latent, mass, &rough);
    for (uint32_t k = 0; k < w->nope; k++)
        q_size += (double)q[k] * q[k];
    for (uint32_t t = 0; t < TOKENS; t++) {
        double c = 0;
        for (uint32_t i = 0; i < LATENT && times[t]; i++)
            c += (double)content[(size_t)t * WIDTH + i] * content[(size_t)t * WIDTH + i];
        most = fmax(most, c);
    }
    double worst = 6 * 0.03 * 0x1p-8 * sqrt(q_size * most) / 22 * (w->format == DN_KV_FP8 ? 1.5 : 1);
    worst += w->format == DN_KV_FP8 ? 1.5 * 0.03 * 0x1.01p-9 * 16 * 16 : 0; /* the rope key, times its scale in bf16 */
    for (uint32_t k = 0; k < w->v; k++) {
        out[k] = 0;
        for (uint32_t i = 0; i < LATENT; i++)
            out[k] += latent[i] * wv[(size_t)k * LATENT + i];
        bound[k] = sqrt(most) / 22 * 4 * (2 * worst / 3 + 3 * 0x1p-8) + fabs(out[k]) * 0x1.01p-8 + 1e-6;
    }
}

static const uint32_t checked[] = {0, 63, 64, 101, CHUNK - 1}; /* rows of a chunk */
enum { CHECKED = sizeof checked / sizeof *checked };

static void mla_prefill(struct world *w, const float *content, uint32_t list)
{
    enum { HEADS = 8, NOPE = 128, V = 128, Q = NOPE + ROPE };
    uint32_t end = 33001, first = end - CHUNK, *times = malloc(TOKENS * sizeof *times);
    float got[CHECKED * V];
    double want[CHECKED * V], bound[CHECKED * V];
    w->heads = HEADS;
    w->nope = NOPE;
    w->v = V;
    float *wk = pack_random(w, &w->w_k, HEADS, NOPE), *wv = pack_random(w, &w->w_v, HEADS, V);
    float *q = queries(w, CHUNK * HEADS, Q, NOPE, 16);
    w->out = gpu_alloc(&w->g, (size_t)CHUNK * HEADS * V * 2);
    gpu_prepare(&w->g, list, op_mla_prefill, w);
    gpu_poison(&w->g, w->out, (size_t)CHUNK * HEADS * V * 2);
    set_step(w, DN_STEP_PREFILL, 1, &first, &end, false);
    gpu_step(&w->g, list, op_mla_prefill, w);
    float *x = gpu_read_act(&w->g, w->out, (size_t)CHUNK * HEADS * V);
    for (uint32_t i = 0; i < CHECKED; i++) {
        uint32_t h = checked[i] * 5 % HEADS;
        size_t at = (size_t)checked[i] * HEADS + h;
        count(first + checked[i] + 1, times);
        mla_prefill_oracle(w, content, times, q + at * Q, wk + (size_t)h * NOPE * LATENT, wv + (size_t)h * V * LATENT,
                           want + i * V, bound + i * V);
        memcpy(got + i * V, x + at * V, V * sizeof *x);
    }
    char what[64];
    snprintf(what, sizeof what, "mla prefill %s, last %d of %u", dn_kv_format_name(w->format), CHUNK, end);
    expect(what, got, want, bound, CHECKED * V, V);
    free(times);
    free(wk);
    free(wv);
    free(q);
    free(x);
}

Test(long, mla)
{
    struct world *w = malloc(sizeof *w);
    float *content[DN_KV_FORMATS];
    world_open(w);
    gpu_rng_state = 41;
    cr_assert_eq(dn_kv_layout_init_mla(&w->l, 1, LATENT, ROPE, PAGE, 4 << 20), 0);
    take_arena(w);
    mla_fill(w, content);
    for (w->format = 0; w->format < DN_KV_FORMATS; w->format++) {
        mla_decode(w, content[w->format], 1 + 2 * w->format);
        mla_prefill(w, content[w->format], 2 + 2 * w->format);
        free(content[w->format]);
    }
    gpu_close(&w->g);
    free(w);
}

/* ---- GQA ---- */

static uint32_t qkv_width(const struct world *w)
{
    return (w->heads + 2 * w->n_kv) * w->dim;
}
static void op_attention(struct gpu *g, void *ctx)
{
    struct world *w = ctx;
    g->ops->attention(g->d, &(struct dn_attention){.q = w->q,
                                                   .q_stride = w->heads * w->dim,
                                                   .n_heads = w->heads,
                                                   .n_kv_heads = w->n_kv,
                                                   .head_dim = w->dim,
                                                   .scale = 1 / sqrtf((float)w->dim),
                                                   .layout = &w->l,
                                                   .arena = w->arena,
                                                   .out = w->out});
}
struct gqa_fill {
    struct world *w;
    void *qkv;
};
static void op_qkv_write(struct gpu *g, void *ctx)
{
    struct gqa_fill *f = ctx;
    struct world *w = f->w;
    g->ops->qkv_write(g->d, &(struct dn_qkv_write){.qkv = f->qkv,
                                                   .n_heads = w->heads,
                                                   .n_kv_heads = w->n_kv,
                                                   .head_dim = w->dim,
                                                   .layout = &w->l,
                                                   .arena = w->arena});
}

static double round_e4m3(double x)
{
    int e;
    double a = fabs(x);
    if (!(a > 0))
        return x;
    frexp(a, &e);
    e = e - 1 < -6 ? -6 : e - 1;
    a = ldexp(nearbyint(ldexp(a, 3 - e)), e - 3);
    return copysign(a > 448 ? 448 : a, x);
}
/* As kernels.h says a vector is stored. */
static void store(const float *x, uint32_t dim, enum dn_kv_format f, float *out)
{
    float top = 0;
    for (uint32_t i = 0; i < dim; i++)
        top = fmaxf(top, fabsf(x[i]));
    for (uint32_t i = 0; i < dim; i++)
        out[i] = f == DN_KV_BF16 ? x[i] : (float)(round_e4m3(x[i] * (448.0f / top)) * (top / 448.0f));
}

static float loud_key(const struct world *w) /* times a query's 8 and the scale it is 8 */
{
    return bf16_to_f32(f32_to_bf16(sqrtf((float)w->dim)));
}

/* kv[f]: [TOKENS][2][n_kv][dim] as stored. */
static void gqa_fill(struct world *w, float *kv[DN_KV_FORMATS])
{
    uint32_t cols = w->n_kv * w->dim, width = qkv_width(w);
    uint16_t *host = calloc((size_t)STEP_TOKENS * width, sizeof *host);
    float *x = malloc((size_t)TOKENS * 2 * cols * sizeof *x);
    struct gqa_fill f = {w, gpu_alloc(&w->g, (size_t)STEP_TOKENS * width * 2)};
    for (size_t i = 0; i < (size_t)TOKENS * 2 * cols; i++) {
        uint32_t t = (uint32_t)(i / (2 * cols));
        bool loud = i % (2 * cols) < cols && i % w->dim == 0;
        x[i] = bf16_to_f32(f32_to_bf16(loud ? (is_loud(t) ? loud_key(w) : 0) : gpu_normal()));
    }
    for (w->format = 0; w->format < DN_KV_FORMATS; w->format++) {
        kv[w->format] = malloc((size_t)TOKENS * 2 * cols * sizeof **kv);
        for (size_t i = 0; i < (size_t)TOKENS * 2 * w->n_kv; i++)
            store(x + i * w->dim, w->dim, w->format, kv[w->format] + i * w->dim);
        for (uint32_t t = 0; t < TOKENS; t += STEP_TOKENS) {
            uint32_t end = TOKENS - t < STEP_TOKENS ? TOKENS : t + STEP_TOKENS;
            for (uint32_t j = 0; j < end - t; j++)
                for (uint32_t k = 0; k < 2 * cols; k++)
                    host[(size_t)j * width + w->heads * w->dim + k] = f32_to_bf16(x[(size_t)(t + j) * 2 * cols + k]);
            w->g.ops->upload(w->g.d, f.qkv, host, (size_t)(end - t) * width * 2);
            set_step(w, DN_STEP_PREFILL, 1, &t, &end, true);
            gpu_step(&w->g, 7, op_qkv_write, &f);
        }
    }
    w->g.ops->free(w->g.d, f.qkv);
    free(host);
    free(x);
}

static void gqa_oracle(const struct world *w, const float *kv, const uint32_t *times, const float *q, uint32_t head,
                       double *out, double *bound)
{
    uint32_t cols = w->n_kv * w->dim, group = head / (w->heads / w->n_kv);
    struct rows key = {kv + group * w->dim, 2 * cols, w->dim}, value = {kv + cols + group * w->dim, 2 * cols, w->dim};
    double q64[256], rough;
    acts_to_f64(q, w->dim, q64);
    attend(key, value, times, q64, 1 / sqrt(w->dim), out, bound, &rough);
    for (uint32_t d = 0; d < w->dim; d++)
        bound[d] = bound[d] * ((w->format == DN_KV_BF16 ? 0x1p-8 : 0x1p-11) + 2 * w->dim * 0x1p-23 * rough + 0x1p-18) +
                   0x1p-8 * fabs(out[d]) + 1e-30;
}

static void gqa_decode(struct world *w, const float *kv, uint32_t list)
{
    uint32_t *times = malloc(TOKENS * sizeof *times), row = w->heads * w->dim;
    const uint32_t head[] = {0, w->heads / 2 + 1, w->heads - 1};
    enum { HEADS = sizeof head / sizeof *head };
    float x[HEADS * 128];
    double want[HEADS * 128], bound[HEADS * 128];
    float *q = queries(w, N_LENGTHS * w->heads, w->dim, 0, 8);
    w->out = gpu_alloc(&w->g, (size_t)N_LENGTHS * row * 2);
    uint16_t *got = decode(w, list, op_attention, q, row, row);
    for (uint32_t i = 0; i < N_LENGTHS; i++) {
        char what[80];
        count(lengths[i], times);
        for (uint32_t h = 0; h < HEADS; h++) {
            size_t at = (size_t)i * row + head[h] * w->dim;
            gqa_oracle(w, kv, times, q + at, head[h], want + h * w->dim, bound + h * w->dim);
            for (uint32_t d = 0; d < w->dim; d++)
                x[h * w->dim + d] = bf16_to_f32(got[at + d]);
        }
        snprintf(what, sizeof what, "gqa decode %u/%u d%u %s ctx %u", w->heads, w->n_kv, w->dim,
                 dn_kv_format_name(w->format), lengths[i]);
        expect(what, x, want, bound, HEADS * w->dim, w->dim);
    }
    free(times);
    free(q);
    free(got);
}

static void gqa_prefill(struct world *w, const float *kv)
{
    uint32_t end = 33001, first = end - CHUNK, *times = malloc(TOKENS * sizeof *times), row = w->heads * w->dim;
    float got[CHECKED * 128];
    double want[CHECKED * 128], bound[CHECKED * 128];
    float *q = queries(w, CHUNK * w->heads, w->dim, 0, 8);
    w->out = gpu_alloc(&w->g, (size_t)CHUNK * row * 2);
    gpu_poison(&w->g, w->out, (size_t)CHUNK * row * 2);
    set_step(w, DN_STEP_PREFILL, 1, &first, &end, false);
    gpu_step(&w->g, 7, op_attention, w);
    float *x = gpu_read_act(&w->g, w->out, (size_t)CHUNK * row);
    for (uint32_t i = 0; i < CHECKED; i++) {
        uint32_t h = checked[i] * 5 % w->heads;
        size_t at = (size_t)checked[i] * row + h * w->dim;
        count(first + checked[i] + 1, times);
        gqa_oracle(w, kv, times, q + at, h, want + i * w->dim, bound + i * w->dim);
        memcpy(got + i * w->dim, x + at, w->dim * sizeof *x);
    }
    char what[80];
    snprintf(what, sizeof what, "gqa prefill %u/%u d%u %s, last %d of %u", w->heads, w->n_kv, w->dim,
             dn_kv_format_name(w->format), CHUNK, end);
    expect(what, got, want, bound, CHECKED * w->dim, w->dim);
    free(times);
    free(q);
    free(x);
}

Test(long, gqa)
{
    static const uint32_t shapes[][3] = {{32, 8, 128}, {16, 2, 64}, {16, 1, 128}};
    struct world *w = malloc(sizeof *w);
    float *kv[DN_KV_FORMATS];
    world_open(w);
    for (uint32_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
        gpu_rng_state = 43 + i;
        w->heads = shapes[i][0];
        w->n_kv = shapes[i][1];
        w->dim = shapes[i][2];
        cr_assert_eq(dn_kv_layout_init(&w->l, 1, w->n_kv, w->dim, PAGE, 4 << 20), 0);
        take_arena(w);
        gqa_fill(w, kv);
        for (w->format = 0; w->format < DN_KV_FORMATS; w->format++) {
            gqa_decode(w, kv[w->format], 1 + w->format);
            gqa_prefill(w, kv[w->format]);
            free(kv[w->format]);
        }
        w->g.ops->free(w->g.d, w->arena);
    }
    gpu_close(&w->g);
    free(w);
}
