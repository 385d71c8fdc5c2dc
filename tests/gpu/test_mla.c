/* Multi-head latent attention on CUDA against float64.
 *
 * Tokens go into pages through mla_write() and the oracle reads them back from there (the layout of mla.cuh, written
 * down here a second time), so that attention is compared on exact contents. Bounds, A = sum of p |c|:
 *   write: bf16 2^-8, e4m3 2^-4 relative and 2^-10 of the scale absolute, f32 sums 1e-5.
 *   attention: 2^-8 each for the output, P and partial results, a score's error d changes p by 2d: d = scale * sum
 * |q||k| * 64 * 2^-24 for sums in f32. FP8: contents times scale in f16, 2^-11 for each of the two, in scores and
 * values.
 */
#include "gpu/gpu.h"

enum {
    LATENT = 512,
    ROPE = 64,
    WIDTH = LATENT + ROPE,
    PAGE = 64,
    MAX_SEQS = 64,
    TOKENS = 4096,
    MAX_POSITION = 1 << 15
};

struct seq {
    uint32_t n; /* tokens */
    enum dn_kv_format format;
    uint32_t *page;
    uint16_t *kv;   /* [n][WIDTH] as projected, bf16 */
    float *content; /* [n][WIDTH] as stored */
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

static size_t swizzled(uint32_t token, uint32_t column)
{
    return token * 128 + ((column / 8) ^ (token & 7)) * 16 + column % 8 * 2;
}
static float stored(const struct dn_kv_layout *l, const uint8_t *page, enum dn_kv_format f, uint32_t token, uint32_t i)
{
    uint16_t u;
    if (f == DN_KV_BF16 || i >= LATENT) {
        const uint8_t *block = f == DN_KV_BF16 ? page + i / 64 * 8192 : page + l->format[f].v_offset;
        memcpy(&u, block + swizzled(token, i % 64), 2);
        return bf16_to_f32(u);
    }
    float s;
    memcpy(&s, page + l->format[f].k_scale_offset + token * 4, 4);
    return (float)(e4m3_to_f64(page[i / 16 * 1024 + token * 16 + i % 16]) * s);
}
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
static struct ops write_ops(struct world *w, bool interleaved)
{
    return (struct ops){.w = w,
                        .repeat = 1,
                        .write = {.kv = w->d_kv,
                                  .kv_stride = WIDTH,
                                  .q = w->d_q,
                                  .q_rope = w->d_q_rope,
                                  .q_rope_stride = 256,
                                  .q_rope_head_stride = 128,
                                  .n_heads = 2,
                                  .nope_dim = 64,
                                  .rope_dim = ROPE,
                                  .latent_dim = LATENT,
                                  .kv_norm = w->d_norm,
                                  .norm_eps = 1e-5f,
                                  .rope = w->d_rope,
                                  .interleaved = interleaved,
                                  .layout = &w->l,
                                  .arena = w->arena,
                                  .layer = w->layer}};
}

/* What mla_write() should have stored for a token, before encoding. */
static void normed(const struct world *w, const struct seq *s, uint32_t token, bool interleaved, double *out)
{
    const uint16_t *x = s->kv + (size_t)token * WIDTH;
    double sum = 0;
    for (int i = 0; i < LATENT; i++)
        sum += (double)bf16_to_f32(x[i]) * bf16_to_f32(x[i]);
    double inv = 1 / sqrt(sum / LATENT + 1e-5f);
    for (int i = 0; i < LATENT; i++)
        out[i] = bf16_to_f32(x[i]) * inv * w->norm[i];
    for (int i = 0; i < ROPE / 2; i++) {
        int a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + ROPE / 2;
        double c = w->rope[((size_t)token * ROPE / 2 + (size_t)i) * 2],
               n = w->rope[((size_t)token * ROPE / 2 + (size_t)i) * 2 + 1];
        double u = bf16_to_f32(x[LATENT + a]), v = bf16_to_f32(x[LATENT + b]);
        out[LATENT + a] = u * c - v * n;
        out[LATENT + b] = v * c + u * n;
    }
}

/* Writes all sequences in chunks; even ones interleaved. */
static void write_all(struct world *w, struct ops *o)
{
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        struct seq *s = &w->seq[i];
        o->write.interleaved = i % 2 == 0;
        for (uint32_t k = 0; k < s->n; k += TOKENS) {
            uint32_t end = s->n - k < TOKENS ? s->n : k + TOKENS;
            w->g.ops->upload(w->g.d, w->d_kv, s->kv + (size_t)k * WIDTH, (size_t)(end - k) * WIDTH * 2);
            set_step(w, DN_STEP_PREFILL, 1, &i, &k, &end);
            gpu_step(&w->g, 1, run_ops, o);
        }
    }
}
static void read_back(struct world *w, uint8_t *host)
{
    w->g.ops->download(w->g.d, host, w->arena, w->arena_bytes);
    for (uint32_t i = 0; i < w->n_seqs; i++)
        for (uint32_t t = 0; t < w->seq[i].n; t++)
            for (uint32_t k = 0; k < WIDTH; k++)
                w->seq[i].content[(size_t)t * WIDTH + k] =
                    stored(&w->l, host + page_at(w, &w->seq[i], t / PAGE), w->seq[i].format, t % PAGE, k);
}
static void check_content(const struct world *w, uint32_t i)
{
    const struct seq *s = &w->seq[i];
    uint32_t step = s->n > 600 ? 37 : 1, n = 0;
    float *got = malloc((size_t)s->n * WIDTH * sizeof *got);
    double *want = malloc((size_t)s->n * WIDTH * sizeof *want), *bound = malloc((size_t)s->n * WIDTH * sizeof *bound);
    for (uint32_t t = 0; t < s->n; t += step, n++) {
        double *x = want + (size_t)n * WIDTH, top = 0;
        memcpy(got + (size_t)n * WIDTH, s->content + (size_t)t * WIDTH, WIDTH * sizeof *got);
        normed(w, s, t, i % 2 == 0, x);
        for (int k = 0; k < LATENT; k++)
            top = fmax(top, fabs(x[k]));
        for (int k = 0; k < WIDTH; k++)
            bound[(size_t)n * WIDTH + (size_t)k] = s->format == DN_KV_FP8 && k < LATENT
                                                       ? fabs(x[k]) * (0x1p-4 + 1e-5) + top / 448 * 0x1.01p-10
                                                       : fabs(x[k]) * 0x1.01p-8 + 1e-5;
    }
    char what[64];
    snprintf(what, sizeof what, "write %s %u", dn_kv_format_name(s->format), s->n);
    gpu_expect(what, got, want, bound, (size_t)n * WIDTH, WIDTH);
    free(got);
    free(want);
    free(bound);
}

/* One head's attention over the first n tokens. */
static void oracle(const struct seq *s, uint32_t n, const float *q, double scale, double *out, double *bound)
{
    double *p = malloc(n * sizeof *p), top = -INFINITY, sum = 0, worst = 0;
    for (uint32_t t = 0; t < n; t++) {
        double dot = 0, size = 0;
        const float *k = s->content + (size_t)t * WIDTH;
        for (int i = 0; i < WIDTH; i++) {
            double x = (double)q[i] * k[i];
            dot += x;
            size += fabs(x);
        }
        p[t] = dot * scale;
        top = fmax(top, p[t]);
        worst = fmax(worst, scale * size * (64 * 0x1p-24 + (s->format == DN_KV_FP8 ? 0x1.01p-10 : 0)));
    }
    for (uint32_t t = 0; t < n; t++)
        sum += p[t] = exp(p[t] - top);
    double *abs_sum = calloc(LATENT, sizeof *abs_sum);
    memset(out, 0, LATENT * sizeof *out);
    for (uint32_t t = 0; t < n; t++) {
        const float *k = s->content + (size_t)t * WIDTH;
        for (int i = 0; i < LATENT; i++) {
            out[i] += p[t] / sum * k[i];
            abs_sum[i] += p[t] / sum * fabs((double)k[i]);
        }
    }
    for (int i = 0; i < LATENT; i++)
        bound[i] = abs_sum[i] * (2 * 0x1.01p-8 + 2 * worst + (s->format == DN_KV_FP8 ? 0x1.01p-10 : 0)) +
                   fabs(out[i]) * 0x1.01p-8 + 1e-6;
    free(p);
    free(abs_sum);
}

/* Checks output row `row` of the step against sequence s over n tokens, for some of its heads. */
static void check_row(const struct seq *s, uint32_t n, const float *q, const float *got, uint32_t heads, double scale,
                      const char *name)
{
    uint32_t step = 1 + heads * n / 16000;
    step = step > heads ? heads : step;
    float *g = malloc(heads * LATENT * sizeof *g);
    double *want = malloc(heads * LATENT * sizeof *want), *bound = malloc(heads * LATENT * sizeof *bound);
    uint32_t k = 0;
    for (uint32_t h = n % step; h < heads; h += step, k++) {
        memcpy(g + k * LATENT, got + h * LATENT, LATENT * sizeof *g);
        oracle(s, n, q + h * WIDTH, scale, want + k * LATENT, bound + k * LATENT);
    }
    char what[96];
    snprintf(what, sizeof what, "%s %s heads %u ctx %u", name, dn_kv_format_name(s->format), heads, n);
    gpu_expect(what, g, want, bound, k * LATENT, LATENT);
    free(g);
    free(want);
    free(bound);
}

static float *random_acts(struct world *w, size_t n, float size, void **device)
{
    float *x = malloc(n * sizeof *x);
    for (size_t i = 0; i < n; i++)
        x[i] = size * gpu_normal();
    *device = gpu_act(&w->g, x, n);
    return x;
}

/* Decode of all sequences at once, twice, then alone. */
static void check_decode(struct world *w, uint32_t heads, uint32_t list)
{
    uint32_t n = w->n_seqs, which[MAX_SEQS], first[MAX_SEQS], end[MAX_SEQS];
    size_t row = (size_t)heads * LATENT;
    void *dq, *out = gpu_alloc(&w->g, MAX_SEQS * row * 2);
    float *q = random_acts(w, (size_t)n * heads * WIDTH, 1, &dq);
    struct ops o = {.w = w,
                    .which = 1,
                    .repeat = 1,
                    .attention = {.q = dq,
                                  .n_heads = heads,
                                  .latent_dim = LATENT,
                                  .rope_dim = ROPE,
                                  .scale = 0.1f,
                                  .layout = &w->l,
                                  .arena = w->arena,
                                  .layer = w->layer,
                                  .out = out}};
    gpu_prepare(&w->g, list, run_ops, &o);
    for (uint32_t i = 0; i < n; i++) {
        which[i] = i;
        first[i] = w->seq[i].n - 1;
        end[i] = w->seq[i].n;
    }
    uint16_t *got = malloc(n * row * 2), *again = malloc(n * row * 2);
    for (int i = 0; i < 3; i++) {
        gpu_poison(&w->g, out, n * row * 2);
        set_step(w, DN_STEP_DECODE, n, which, first, end);
        gpu_step(&w->g, list, run_ops, &o);
        w->g.ops->download(w->g.d, i ? again : got, out, n * row * 2);
        cr_expect(i == 0 || memcmp(got, again, n * row * 2) == 0, "heads %u: run %d differs", heads, i);
    }
    float *x = malloc(row * sizeof *x);
    for (uint32_t i = 0; i < n; i++) {
        for (size_t k = 0; k < row; k++)
            x[k] = bf16_to_f32(got[i * row + k]);
        if (w->seq[i].bad) {
            for (size_t k = 0; k < row; k++)
                cr_assert(got[i * row + k] == 0, "bad sequence %u: [%zu] is %g", i, k, x[k]);
            continue;
        }
        check_row(&w->seq[i], w->seq[i].n, q + (size_t)i * heads * WIDTH, x, heads, 0.1f, "decode");
    }
    /* Alone: its q must be row 0. */
    for (uint32_t i = 0; i < n; i++) {
        uint16_t *h = malloc((size_t)heads * WIDTH * 2);
        for (size_t k = 0; k < (size_t)heads * WIDTH; k++)
            h[k] = f32_to_bf16(q[(size_t)i * heads * WIDTH + k]);
        w->g.ops->upload(w->g.d, dq, h, (size_t)heads * WIDTH * 2);
        set_step(w, DN_STEP_DECODE, 1, &i, first + i, end + i);
        gpu_step(&w->g, list, run_ops, &o);
        w->g.ops->download(w->g.d, again, out, row * 2);
        size_t k = 0;
        while (k < row && again[k] == got[i * row + k])
            k++;
        cr_expect(k == row, "heads %u: sequence %u (%u tokens) alone differs at %zu: %g, was %g", heads, i, w->seq[i].n,
                  k, k < row ? bf16_to_f32(again[k]) : 0, k < row ? bf16_to_f32(got[i * row + k]) : 0);
        free(h);
    }
    w->g.ops->free(w->g.d, dq);
    w->g.ops->free(w->g.d, out);
    free(q);
    free(x);
    free(got);
    free(again);
}

/* Several tokens a sequence, in a prefill step. */
static void check_chunks(struct world *w, uint32_t heads, uint32_t list)
{
    uint32_t n = 0, which[MAX_SEQS], first[MAX_SEQS], end[MAX_SEQS], tokens = 0;
    for (uint32_t i = 0; i < w->n_seqs; i++)
        if (w->seq[i].n < 1100 && !w->seq[i].bad) {
            which[n] = i;
            end[n] = w->seq[i].n;
            first[n] = end[n] > 9 ? end[n] - 9 : 0;
            tokens += end[n] - first[n];
            n++;
        }
    size_t row = (size_t)heads * LATENT;
    void *dq, *out = gpu_alloc(&w->g, tokens * row * 2);
    float *q = random_acts(w, (size_t)tokens * heads * WIDTH, 1, &dq);
    struct ops o = {.w = w,
                    .which = 1,
                    .repeat = 1,
                    .attention = {.q = dq,
                                  .n_heads = heads,
                                  .latent_dim = LATENT,
                                  .rope_dim = ROPE,
                                  .scale = 0.1f,
                                  .layout = &w->l,
                                  .arena = w->arena,
                                  .layer = w->layer,
                                  .out = out}};
    gpu_poison(&w->g, out, tokens * row * 2);
    set_step(w, DN_STEP_PREFILL, n, which, first, end);
    gpu_step(&w->g, list, run_ops, &o);
    float *x = gpu_read_act(&w->g, out, tokens * row);
    for (uint32_t i = 0, t = 0; i < n; i++)
        for (uint32_t k = first[i]; k < end[i]; k++, t++)
            if (k % 4 == 0 || k + 1 == end[i])
                check_row(&w->seq[which[i]], k + 1, q + (size_t)t * heads * WIDTH, x + t * row, heads, 0.1f, "chunk");
    w->g.ops->free(w->g.d, dq);
    w->g.ops->free(w->g.d, out);
    free(q);
    free(x);
}

/* Query heads, and a sequence with a wrong tag: nothing may change in the arena. */
static void check_queries(struct world *w, struct ops *o, uint8_t *host)
{
    uint32_t n = 2, which[2] = {5, 6}, first[2] = {100, 3}, end[2] = {127, 20}, tokens = 44;
    float *q = malloc(tokens * 256 * sizeof *q);
    for (uint32_t i = 0; i < tokens * 256; i++)
        q[i] = gpu_normal();
    void *dq = gpu_act(&w->g, q, tokens * 256);
    w->seq[5].bad = w->seq[6].bad = true;
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        o->write.q = dq;
        o->write.interleaved = interleaved;
        gpu_poison(&w->g, w->d_q_rope, tokens * 256 * 2);
        set_step(w, DN_STEP_PREFILL, n, which, first, end);
        gpu_step(&w->g, 1, run_ops, o);
        float *x = gpu_read_act(&w->g, w->d_q_rope, tokens * 256);
        double *want = malloc(tokens * 256 * sizeof *want), *bound = calloc(tokens * 256, sizeof *bound);
        for (uint32_t t = 0; t < tokens; t++) {
            uint32_t position = (uint32_t)w->g.s->position[t];
            for (uint32_t h = 0; h < 2; h++) {
                for (uint32_t i = 0; i < 128; i++)
                    want[t * 256 + h * 128 + i] = NAN; /* beyond the rope part: not written */
                for (uint32_t i = 0; i < ROPE / 2; i++) {
                    uint32_t a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + ROPE / 2;
                    double c = w->rope[(position * ROPE / 2 + i) * 2], s = w->rope[(position * ROPE / 2 + i) * 2 + 1];
                    double u = q[t * 256 + h * 128 + 64 + a], v = q[t * 256 + h * 128 + 64 + b];
                    want[t * 256 + h * 128 + a] = u * c - v * s;
                    want[t * 256 + h * 128 + b] = v * c + u * s;
                    bound[t * 256 + h * 128 + a] = fabs(u * c - v * s) * 0x1.01p-8 + 1e-6;
                    bound[t * 256 + h * 128 + b] = fabs(v * c + u * s) * 0x1.01p-8 + 1e-6;
                }
            }
        }
        gpu_expect(interleaved ? "q rope interleaved" : "q rope halves", x, want, bound, tokens * 256, 256);
        free(x);
        free(want);
        free(bound);
    }
    uint8_t *after = malloc(w->arena_bytes);
    w->g.ops->download(w->g.d, after, w->arena, w->arena_bytes);
    cr_expect(memcmp(host, after, w->arena_bytes) == 0, "a sequence with a wrong tag was written");
    free(after);
    free(q);
    w->seq[6].bad = false; /* 5 stays */
}

/* ---- Un-absorbed ---- */

struct projection {
    uint32_t heads, nope, v;
    struct dn_matrix w_k, w_v;
    float *k, *values; /* [heads][nope or v][LATENT], bf16 values */
};
static float *pack_random(struct world *w, struct dn_matrix *m)
{
    size_t rows = (size_t)m->n_groups * m->n_out, n = rows * m->n_in;
    float *x = malloc(n * sizeof *x);
    uint16_t *h = malloc(n * sizeof *h);
    for (size_t i = 0; i < n; i++)
        x[i] = bf16_to_f32(h[i] = f32_to_bf16(gpu_normal() / 22));
    m->bytes = w->g.ops->matrix_bytes(m);
    m->data = gpu_alloc(&w->g, m->bytes);
    cr_assert_eq(w->g.ops->matrix_pack(w->g.d, m, 0, (uint32_t)rows, &(struct dn_rows){.bf16 = h}), 0);
    free(h);
    return x;
}
static void projection_open(struct world *w, struct projection *p, uint32_t heads, uint32_t nope, uint32_t v)
{
    *p = (struct projection){.heads = heads, .nope = nope, .v = v};
    p->w_k = (struct dn_matrix){.format = DN_W_BF16, .n_out = nope, .n_in = LATENT, .n_groups = heads};
    p->w_v = (struct dn_matrix){.format = DN_W_BF16, .n_out = v, .n_in = LATENT, .n_groups = heads};
    p->k = pack_random(w, &p->w_k);
    p->values = pack_random(w, &p->w_v);
}

/* One row and head in float64, in the latent space, which is the same in exact numbers. Bounds: K and V are rounded to
 * bf16 (2^-8 of each score's terms and of each value), so are FP8's contents; P and the output too. */
static void oracle_prefill(const struct projection *p, const struct seq *s, uint32_t n, const float *q, uint32_t head,
                           double scale, double *out, double *bound)
{
    double absorbed[WIDTH], size[WIDTH], *weight = malloc(n * sizeof *weight), top = -INFINITY, sum = 0, worst = 0;
    const float *wk = p->k + (size_t)head * p->nope * LATENT, *wv = p->values + (size_t)head * p->v * LATENT;
    for (uint32_t i = 0; i < WIDTH; i++) {
        absorbed[i] = size[i] = 0;
        for (uint32_t k = 0; i < LATENT && k < p->nope; k++)
            absorbed[i] += (double)q[k] * wk[(size_t)k * LATENT + i];
        if (i >= LATENT)
            absorbed[i] = q[p->nope + i - LATENT];
    }
    double q_size = 0;
    for (uint32_t k = 0; k < p->nope; k++)
        q_size += (double)q[k] * q[k];
    for (uint32_t t = 0; t < n; t++) {
        double dot = 0, c = 0;
        for (uint32_t i = 0; i < WIDTH; i++) {
            dot += absorbed[i] * s->content[(size_t)t * WIDTH + i];
            c += i < LATENT ? (double)s->content[(size_t)t * WIDTH + i] * s->content[(size_t)t * WIDTH + i] : 0;
        }
        /* K's values have about |c| / 22 each; their roundings add up as independent ones, six sigma. */
        worst = fmax(worst, 6 * scale * 0x1p-8 * sqrt(q_size * c) / 22 * (s->format == DN_KV_FP8 ? 1.5 : 1));
        weight[t] = dot * scale;
        top = fmax(top, weight[t]);
    }
    double u[LATENT] = {0}, norm = 0;
    for (uint32_t t = 0; t < n; t++)
        sum += weight[t] = exp(weight[t] - top);
    for (uint32_t t = 0; t < n; t++) {
        double c = 0;
        for (uint32_t i = 0; i < LATENT; i++) {
            u[i] += weight[t] / sum * s->content[(size_t)t * WIDTH + i];
            c += (double)s->content[(size_t)t * WIDTH + i] * s->content[(size_t)t * WIDTH + i];
        }
        norm += weight[t] / sum * sqrt(c);
    }
    for (uint32_t k = 0; k < p->v; k++) {
        out[k] = 0;
        for (uint32_t i = 0; i < LATENT; i++)
            out[k] += u[i] * wv[(size_t)k * LATENT + i];
        /* Values are about norm / 22, at most some four times that. */
        bound[k] = norm / 22 * 4 * (2 * worst / 3 + 3 * 0x1p-8) + fabs(out[k]) * 0x1.01p-8 + 1e-6;
    }
    free(weight);
}

/* The last `chunk` tokens of some sequences together; bits of a row against those of another cut. */
static void check_prefill(struct world *w, uint32_t heads, uint32_t nope, uint32_t v, uint32_t list)
{
    struct projection p;
    projection_open(w, &p, heads, nope, v);
    uint32_t n = 0, which[MAX_SEQS], first[MAX_SEQS], end[MAX_SEQS], tokens = 0, width = nope + ROPE;
    for (uint32_t i = 0; i < w->n_seqs; i++) {
        which[n] = i;
        end[n] = w->seq[i].n;
        first[n] = end[n] > 260 ? end[n] - 260 : 0;
        tokens += end[n] - first[n];
        n++;
    }
    size_t row = (size_t)heads * v;
    void *dq, *out = gpu_alloc(&w->g, tokens * row * 2);
    float *q = random_acts(w, (size_t)tokens * heads * width, 1, &dq);
    struct ops o = {.w = w,
                    .which = 2,
                    .repeat = 1,
                    .prefill = {.q = dq,
                                .w_k = &p.w_k,
                                .w_v = &p.w_v,
                                .n_heads = heads,
                                .nope_dim = nope,
                                .rope_dim = ROPE,
                                .v_dim = v,
                                .latent_dim = LATENT,
                                .scale = 0.15f,
                                .layout = &w->l,
                                .arena = w->arena,
                                .layer = w->layer,
                                .out = out}};
    gpu_prepare(&w->g, list, run_ops, &o);
    gpu_poison(&w->g, out, tokens * row * 2);
    set_step(w, DN_STEP_PREFILL, n, which, first, end);
    gpu_step(&w->g, list, run_ops, &o);
    float *x = gpu_read_act(&w->g, out, tokens * row);
    float *got = malloc((size_t)tokens * v * sizeof *got);
    double *want = malloc((size_t)tokens * v * sizeof *want), *bound = malloc((size_t)tokens * v * sizeof *bound);
    char what[96];
    for (uint32_t i = 0, t = 0; i < n; i++) {
        const struct seq *s = &w->seq[which[i]];
        uint32_t k = 0, step = 1 + (end[i] - first[i]) * end[i] / 60000;
        for (uint32_t pos = first[i]; pos < end[i]; pos++, t++) {
            if (s->bad)
                for (size_t c = 0; c < row; c++)
                    cr_assert(x[t * row + c] == 0, "bad sequence, row %u: [%zu] is %g", pos, c, x[t * row + c]);
            if (s->bad || (pos % step && pos + 1 != end[i]))
                continue;
            uint32_t head = (pos * 7 + i) % heads;
            memcpy(got + (size_t)k * v, x + t * row + head * v, v * sizeof *got);
            oracle_prefill(&p, s, pos + 1, q + ((size_t)t * heads + head) * width, head, 0.15, want + (size_t)k * v,
                           bound + (size_t)k * v);
            k++;
        }
        snprintf(what, sizeof what, "prefill %s %u heads %u+%u ctx %u", dn_kv_format_name(s->format), heads, nope, v,
                 end[i]);
        if (k)
            gpu_expect(what, got, want, bound, (size_t)k * v, v);
    }
    /* Sequence by sequence, the last 37 rows of each. */
    for (uint32_t i = 0, t = 0; i < n; i++) {
        uint32_t rows = end[i] - first[i], last = rows < 37 ? rows : 37, from = end[i] - last;
        uint16_t *h = malloc((size_t)last * heads * width * 2);
        for (size_t k = 0; k < (size_t)last * heads * width; k++)
            h[k] = f32_to_bf16(q[(size_t)(t + rows - last) * heads * width + k]);
        w->g.ops->upload(w->g.d, dq, h, (size_t)last * heads * width * 2);
        set_step(w, DN_STEP_PREFILL, 1, which + i, &from, end + i);
        gpu_step(&w->g, list, run_ops, &o);
        float *again = gpu_read_act(&w->g, out, last * row);
        size_t wrong = 0;
        for (size_t k = 0; k < last * row; k++)
            wrong += memcmp(again + k, x + (t + rows - last) * row + k, sizeof *x) != 0; /* NaN is NaN */
        cr_expect(wrong == 0, "prefill heads %u: sequence %u (%u tokens) alone: %zu of %zu values differ", heads, i,
                  end[i], wrong, last * row);
        free(again);
        free(h);
        t += rows;
    }
    w->g.ops->free(w->g.d, dq);
    w->g.ops->free(w->g.d, out);
    w->g.ops->free(w->g.d, p.w_k.data);
    w->g.ops->free(w->g.d, p.w_v.data);
    free(p.k);
    free(p.values);
    free(q);
    free(x);
    free(got);
    free(want);
    free(bound);
}

static void open_filled(struct world *w)
{
    static const uint32_t contexts[] = {1, 63, 64, 65, 500, 127, 1024, 257, 2500, 4097, 8192 + 37};
    world_open(w, 1400, 2, 1200);
    gpu_poison(&w->g, w->arena, w->arena_bytes);
    for (size_t i = 0; i < sizeof contexts / sizeof *contexts; i++)
        for (int f = 0; f < 2; f++)
            add_seq(w, contexts[i], (enum dn_kv_format)f);
}

Test(mla, correct, .timeout = 120)
{
    struct world w;
    open_filled(&w);
    struct ops o = write_ops(&w, false);
    gpu_prepare(&w.g, 1, run_ops, &o);
    write_all(&w, &o);
    uint8_t *host = malloc(w.arena_bytes);
    read_back(&w, host);
    for (uint32_t i = 0; i < w.n_seqs; i++)
        check_content(&w, i);
    check_queries(&w, &o, host);
    static const uint32_t heads[] = {64, 4, 128, 1, 16};
    for (uint32_t i = 0; i < 5; i++) {
        check_decode(&w, heads[i], 2 + i);
        if (heads[i] == 64 || heads[i] == 4)
            check_chunks(&w, heads[i], 2 + i);
    }
    gpu_close(&w.g);
}

Test(mla, correct_prefill, .timeout = 120)
{
    struct world w;
    open_filled(&w);
    struct ops o = write_ops(&w, false);
    gpu_prepare(&w.g, 1, run_ops, &o);
    for (uint32_t i = 8; i < 10; i++) /* a token that is no number: rows before it do not see it */
        w.seq[i].kv[(size_t)(w.seq[i].n - 70) * WIDTH + 3] = 0x7fc0;
    write_all(&w, &o);
    uint8_t *host = malloc(w.arena_bytes);
    read_back(&w, host);
    w.seq[5].bad = true;
    check_prefill(&w, 4, 128, 128, 2);
    check_prefill(&w, 3, 192, 256, 3);
    check_prefill(&w, 1, 64, 64, 4);
    gpu_close(&w.g);
}

/* ---- Times ---- */

enum { BENCH_LAYERS = 16 };

/* A slab of each format with finite values: latents and keys about normal, scales about 0.01. */
static void fill(struct world *w)
{
    uint8_t *image[2];
    for (int f = 0; f < 2; f++) {
        image[f] = calloc(1, w->l.slab_bytes);
        uint32_t bytes = w->l.format[f].layer_bytes;
        uint8_t *layer = malloc(bytes);
        for (uint32_t i = 0; i + 1 < bytes; i += 2) {
            uint16_t u = f32_to_bf16(gpu_normal());
            if (f == DN_KV_FP8 && i < LATENT * PAGE)
                u = (uint16_t)((gpu_rng() & 0xbfbf));
            memcpy(layer + i, &u, 2);
        }
        for (uint32_t i = 0; f == DN_KV_FP8 && i < PAGE; i++) {
            float s = (float)(0.01 + 0.01 * gpu_unit());
            memcpy(layer + w->l.format[f].k_scale_offset + 4 * i, &s, 4);
        }
        for (uint32_t p = 0; p < w->l.format[f].pages_per_slab * w->l.n_layers; p++)
            memcpy(image[f] + (size_t)p * bytes, layer, bytes);
        free(layer);
    }
    for (uint32_t i = 0; i < w->n_pages / w->l.slab_pages; i++)
        w->g.ops->upload(w->g.d, w->arena + i * w->l.slab_bytes, image[i % 2], w->l.slab_bytes);
    free(image[0]);
    free(image[1]);
}

/* format 2: in turn. */
static void bench_step(struct world *w, uint32_t n, uint32_t ctx, uint32_t format, double *bytes)
{
    struct dn_step *s = w->g.s;
    uint32_t next[2] = {0, 0}, p = 0;
    gpu_rows_step(&w->g, DN_STEP_DECODE, n);
    *bytes = 0;
    for (uint32_t i = 0; i < n; i++) {
        uint32_t f = format == 2 ? i % 2 : format, per = w->l.format[f].pages_per_slab;
        s->position[i] = (int32_t)ctx - 1;
        s->kv_len[i] = (int32_t)ctx;
        s->kv_format[i] = (uint8_t)f;
        *bytes += (double)ctx * (f == DN_KV_FP8 ? 644 : 1152);
        for (uint32_t k = 0; k < ctx / PAGE; k++) {
            uint32_t pairs = w->n_pages / w->l.slab_pages / 2, total = pairs * per, u = next[f]++ % total;
            u = (uint32_t)((uint64_t)u * 977 % total); /* scattered: total is no multiple of 977 */
            s->page[p++] = (u / per * 2 + f) * w->l.slab_pages + u % per;
        }
        s->page_start[i + 1] = (int32_t)p;
    }
}

Test(mla, bench_decode, .timeout = 60)
{
    static const uint32_t ctx[] = {1024, 8192, 32768}, batch[] = {1, 8, 16, 32, 64};
    static const char *const format[] = {"bf16", "fp8", "mixed"};
    struct world w;
    bool brief = getenv("DN_BENCH_BRIEF") != NULL; /* 8192 tokens alone */
    world_open(&w, brief ? 2000 : 5000, BENCH_LAYERS, MAX_SEQS * 512);
    w.tags = NULL;
    fill(&w);
    void *dq, *out = gpu_alloc(&w.g, (size_t)MAX_SEQS * 64 * LATENT * 2);
    free(random_acts(&w, (size_t)MAX_SEQS * 64 * WIDTH, 1, &dq));
    struct ops o = {.w = &w,
                    .which = 1,
                    .repeat = 2 * BENCH_LAYERS,
                    .layers = BENCH_LAYERS,
                    .attention = {.q = dq,
                                  .n_heads = 64,
                                  .latent_dim = LATENT,
                                  .rope_dim = ROPE,
                                  .scale = 0.1f,
                                  .layout = &w.l,
                                  .arena = w.arena,
                                  .out = out}};
    struct ops empty = o, write = write_ops(&w, true);
    empty.repeat = 0;
    gpu_prepare(&w.g, 1, run_ops, &o);
    gpu_prepare(&w.g, 2, run_ops, &empty);
    write.write.n_heads = 64;
    write.write.nope_dim = 128;
    write.write.q = dq;
    write.write.q_rope = out;
    write.write.q_rope_stride = 64 * 64;
    write.write.q_rope_head_stride = 64;
    write.repeat = o.repeat;
    write.layers = BENCH_LAYERS;
    gpu_prepare(&w.g, 3, run_ops, &write);
    for (uint32_t c = brief; c < (brief ? 2 : 3); c++)
        for (uint32_t b = 0; b < 5; b += brief ? 4 : 1)
            for (uint32_t f = 0; f < (brief ? 2 : 3); f++) {
                double bytes;
                bench_step(&w, batch[b], ctx[c], f, &bytes);
                double none = gpu_time(&w.g, 2, run_ops, &empty);
                double us = (gpu_time(&w.g, 1, run_ops, &o) - none) / o.repeat;
                printf("BENCH mla_attention %s %u x %u %.1f us %.2f TB/s %.0f %%\n", format[f], batch[b], ctx[c], us,
                       bytes / us / 1e6, bytes / us / 4.65e4);
                fflush(stdout);
            }
    for (uint32_t b = 0; b < 5 && !brief; b += 2)
        for (uint32_t f = 0; f < 2; f++) {
            double bytes;
            bench_step(&w, batch[b], 1024, f, &bytes);
            double none = gpu_time(&w.g, 2, run_ops, &empty);
            double us = (gpu_time(&w.g, 3, run_ops, &write) - none) / o.repeat;
            printf("BENCH mla_write %s %u %.2f us\n", format[f], batch[b], us);
        }
    gpu_close(&w.g);
}

/* One sequence's chunk of `n` tokens at the end of `ctx`; FLOP of the causal attention, and of expanding the context.
 */
Test(mla, bench_prefill, .timeout = 60)
{
    static const uint32_t shape[][2] = {{2048, 2048}, {4096, 8192}};
    static const uint32_t dims[][2] = {{128, 128}, {192, 256}};
    struct world w;
    world_open(&w, 2000, 2, 1024);
    w.tags = NULL;
    fill(&w);
    for (uint32_t d = 0; d < 2; d++) {
        struct projection p;
        uint32_t nope = dims[d][0], v = dims[d][1];
        projection_open(&w, &p, 64, nope, v);
        void *dq, *out = gpu_alloc(&w.g, (size_t)TOKENS * 64 * v * 2);
        free(random_acts(&w, (size_t)TOKENS * 64 * (nope + ROPE), 1, &dq));
        struct ops o = {.w = &w,
                        .which = 2,
                        .repeat = 1,
                        .prefill = {.q = dq,
                                    .w_k = &p.w_k,
                                    .w_v = &p.w_v,
                                    .n_heads = 64,
                                    .nope_dim = nope,
                                    .rope_dim = ROPE,
                                    .v_dim = v,
                                    .latent_dim = LATENT,
                                    .scale = 0.15f,
                                    .layout = &w.l,
                                    .arena = w.arena,
                                    .out = out}};
        struct ops empty = o;
        empty.repeat = 0;
        gpu_prepare(&w.g, 1 + 2 * d, run_ops, &o);
        gpu_prepare(&w.g, 2 + 2 * d, run_ops, &empty);
        for (uint32_t i = 0; i < 2; i++)
            for (uint32_t f = 0; f < 2; f++) {
                uint32_t n = shape[i][0], ctx = shape[i][1];
                double bytes, flop = 0;
                bench_step(&w, 1, ctx, f, &bytes);
                struct dn_step *s = w.g.s;
                s->kind = DN_STEP_PREFILL;
                s->n_tokens = n;
                for (uint32_t t = 0; t < n; t++) {
                    s->token_id[t] = s->token_seq[t] = 0;
                    s->token_count[t] = 0;
                    s->position[t] = (int32_t)(ctx - n + t);
                    flop += 2.0 * 64 * (nope + ROPE + v) * (ctx - n + t + 1);
                }
                s->token_start[1] = (int32_t)n;
                s->row_token[0] = (int32_t)n - 1;
                double none = gpu_time(&w.g, 2 + 2 * d, run_ops, &empty);
                double us = gpu_time(&w.g, 1 + 2 * d, run_ops, &o) - none, more = 2.0 * 64 * LATENT * (nope + v) * ctx;
                printf("BENCH mla_prefill %s 64 heads %u+64/%u %u of %u %.0f us %.0f TFLOP/s, %.0f with K and V\n",
                       f ? "fp8" : "bf16", nope, v, n, ctx, us, flop / us / 1e6, (flop + more) / us / 1e6);
                fflush(stdout);
            }
    }
    gpu_close(&w.g);
}

/* One launch of each, eagerly, for a profiler. */
Test(mla, profile, .timeout = 60)
{
    static const uint32_t shape[][3] = {{64, 8192, 0}, {64, 8192, 1}, {1, 1024, 0}, {1, 1024, 1}};
    struct world w;
    world_open(&w, 700, 2, MAX_SEQS * 128);
    w.tags = NULL;
    fill(&w);
    void *dq, *out = gpu_alloc(&w.g, (size_t)MAX_SEQS * 64 * LATENT * 2);
    free(random_acts(&w, (size_t)MAX_SEQS * 64 * WIDTH, 1, &dq));
    struct ops o = {.w = &w,
                    .which = 1,
                    .repeat = 1,
                    .attention = {.q = dq,
                                  .n_heads = 64,
                                  .latent_dim = LATENT,
                                  .rope_dim = ROPE,
                                  .scale = 0.1f,
                                  .layout = &w.l,
                                  .arena = w.arena,
                                  .out = out}};
    for (uint32_t i = 0; i < 4; i++) {
        double bytes;
        bench_step(&w, shape[i][0], shape[i][1], shape[i][2], &bytes);
        gpu_step(&w.g, 7, run_ops, &o);
    }
    gpu_close(&w.g);
}
