/* Multi-head latent attention on CUDA against float64.
 *
 * Tokens go into pages through mla_write() and the oracle reads them back from there (the layout of mla.cuh, written
 * down here a second time), so that attention is compared on exact contents. Bounds, A = sum of p |c|:
 *   write: bf16 2^-8, e4m3 2^-4 relative and 2^-10 of the scale absolute, f32 sums 1e-5.
 *   attention: 2^-8 each for the output, P and partial results, a score's error d changes p by 2d: d = scale * sum
 * |q||k| * 64 * 2^-24 for sums in f32. FP8: P in f16, 2^-11, and 2^-24 of the largest p * s for a token's codes;
 * queries 2^-18; sums of e4m3 products lose more (e4m3_sum_error()), independently for each token: six sigma.
 */
#include "gpu/mla_world.h"

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
        for (uint32_t t = 0; t < w->seq[i].n; t++) {
            const uint8_t *page = host + page_at(w, &w->seq[i], t / PAGE);
            for (uint32_t k = 0; k < WIDTH; k++)
                w->seq[i].content[(size_t)t * WIDTH + k] = stored(&w->l, page, w->seq[i].format, t % PAGE, k);
            if (w->seq[i].format == DN_KV_FP8)
                memcpy(&w->seq[i].scale[t], page + w->l.format[DN_KV_FP8].k_scale_offset + t % PAGE * 4, 4);
        }
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

/* The standard deviation of a score whose latent part e4m3 products sum: each of the 33 addends of a step of 32 loses
 * up to 2^-13 of the largest of them and of the sum so far. */
static double e4m3_sum_error(const float *q, const float *k)
{
    double sum = 0, variance = 0;
    for (int i = 0; i < LATENT; i += 32) {
        double top = fabs(sum);
        for (int j = i; j < i + 32; j++) {
            top = fmax(top, fabs((double)q[j] * k[j]));
            sum += (double)q[j] * k[j];
        }
        top = fmax(top, fabs(sum));
        variance += 33.0 / 3 * 0x1p-26 * top * top;
    }
    return sqrt(variance);
}

/* One head's attention over the first n tokens. */
static void oracle(const struct seq *s, uint32_t n, const float *q, double scale, double *out, double *bound)
{
    double *p = malloc(n * sizeof *p), *sigma = calloc(n, sizeof *sigma), top = -INFINITY, sum = 0, worst = 0;
    bool fp8 = s->format == DN_KV_FP8;
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
        worst = fmax(worst, scale * size * (64 * 0x1p-24 + (fp8 ? 0x1p-18 : 0)));
        if (fp8)
            sigma[t] = scale * e4m3_sum_error(q, k);
    }
    for (uint32_t t = 0; t < n; t++)
        sum += p[t] = exp(p[t] - top);
    double *abs_sum = calloc(LATENT, sizeof *abs_sum), *square = calloc(LATENT, sizeof *square);
    double *codes = calloc(LATENT, sizeof *codes), most = 0;
    memset(out, 0, LATENT * sizeof *out);
    for (uint32_t t = 0; t < n; t++) {
        const float *k = s->content + (size_t)t * WIDTH;
        for (int i = 0; i < LATENT; i++) {
            out[i] += p[t] / sum * k[i];
            abs_sum[i] += p[t] / sum * fabs((double)k[i]);
        }
    }
    for (uint32_t t = 0; t < n && fp8; t++) {
        const float *k = s->content + (size_t)t * WIDTH;
        double x = p[t] / sum * sigma[t];
        most = fmax(most, p[t] / sum * s->scale[t]);
        for (int i = 0; i < LATENT; i++) {
            square[i] += x * x * (k[i] - out[i]) * (k[i] - out[i]);
            codes[i] += s->scale[t] > 0 ? fabs((double)k[i]) / s->scale[t] : 0;
        }
    }
    for (int i = 0; i < LATENT; i++)
        bound[i] = abs_sum[i] * (0x1.01p-8 + (fp8 ? 0x1.01p-11 : 0x1.01p-8) + 2 * worst) + fabs(out[i]) * 0x1.01p-8 +
                   1e-6 + 6 * sqrt(square[i]) + codes[i] * most * 0x1p-24;
    free(p);
    free(sigma);
    free(abs_sum);
    free(square);
    free(codes);
}

/* Relative output error over all that was checked, by format: root mean squares. */
static double error_square[2], want_square[2], error_largest[2];
static void report_errors(const char *what)
{
    for (int f = 0; f < 2; f++)
        if (want_square[f] > 0)
            printf("ERROR %s %s rms %.3e of the output, largest %.2f of the bound\n", what, dn_kv_format_name(f),
                   sqrt(error_square[f] / want_square[f]), error_largest[f]);
    fflush(stdout);
    memset(error_square, 0, sizeof error_square);
    memset(want_square, 0, sizeof want_square);
    memset(error_largest, 0, sizeof error_largest);
}

/* Heads times tokens of a row that are compared, about. */
static uint32_t heads_budget = 16000;

/* Checks output row `row` of the step against sequence s over n tokens, for some of its heads. */
static void check_row(const struct seq *s, uint32_t n, const float *q, const float *got, uint32_t heads, double scale,
                      const char *name)
{
    uint32_t step = 1 + heads * n / heads_budget;
    step = step > heads ? heads : step;
    float *g = malloc(heads * LATENT * sizeof *g);
    double *want = malloc(heads * LATENT * sizeof *want), *bound = malloc(heads * LATENT * sizeof *bound);
    uint32_t k = 0;
    for (uint32_t h = n % step; h < heads; h += step, k++) {
        memcpy(g + k * LATENT, got + h * LATENT, LATENT * sizeof *g);
        oracle(s, n, q + h * WIDTH, scale, want + k * LATENT, bound + k * LATENT);
        for (uint32_t i = k * LATENT; i < (k + 1) * LATENT; i++) {
            error_square[s->format] += (g[i] - want[i]) * (g[i] - want[i]);
            want_square[s->format] += want[i] * want[i];
            error_largest[s->format] = fmax(error_largest[s->format], fabs(g[i] - want[i]) / bound[i]);
        }
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
static void projection_open(struct world *w, struct projection *p, uint32_t heads, uint32_t nope, uint32_t v)
{
    *p = (struct projection){.heads = heads, .nope = nope, .v = v};
    p->w_k = (struct dn_matrix){.format = DN_W_BF16, .n_out = nope, .n_in = LATENT, .n_groups = heads};
    p->w_v = (struct dn_matrix){.format = DN_W_BF16, .n_out = v, .n_in = LATENT, .n_groups = heads};
    p->k = gpu_pack_random(&w->g, &p->w_k);
    p->values = gpu_pack_random(&w->g, &p->w_v);
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
        char what[32];
        snprintf(what, sizeof what, "%u heads", heads[i]);
        report_errors(what);
    }
    gpu_close(&w.g);
}

/* Contexts that end at every place of a tile, formats that change from item to item, 96 heads; then FP8 scales that
 * differ by 10^6 within a row, and latents of zeros. */
Test(mla, correct_edges, .timeout = 120)
{
    struct world w;
    heads_budget = 3000;
    world_open(&w, 1400, 2, 1200);
    gpu_poison(&w.g, w.arena, w.arena_bytes);
    for (uint32_t i = 0; i < MAX_SEQS; i++)
        add_seq(&w, 1 + i + i * 5 % 9 * PAGE, i % 3 == 1 ? DN_KV_BF16 : DN_KV_FP8);
    struct ops o = write_ops(&w, false);
    gpu_prepare(&w.g, 1, run_ops, &o);
    write_all(&w, &o);
    uint8_t *host = malloc(w.arena_bytes);
    read_back(&w, host);
    w.seq[9].bad = w.seq[30].bad = w.seq[31].bad = true;
    check_decode(&w, 64, 2);
    check_decode(&w, 96, 3);
    report_errors("edges");
    for (uint32_t i = 0; i < w.n_seqs; i++)
        for (uint32_t t = 0; t < w.seq[i].n && w.seq[i].format == DN_KV_FP8; t++) {
            uint8_t *page = host + page_at(&w, &w.seq[i], t / PAGE);
            float *s = (float *)(page + w.l.format[DN_KV_FP8].k_scale_offset) + t % PAGE;
            float by = ldexpf(1, (int)(gpu_rng() % 20) - 16);
            bool zero = gpu_rng() % 16 == 0;
            for (uint32_t k = 0; k < ROPE; k++) { /* the same rope key, by a power of two */
                uint16_t *u = (uint16_t *)(page + w.l.format[DN_KV_FP8].v_offset + swizzled(t % PAGE, k));
                *u = f32_to_bf16(zero ? bf16_to_f32(*u) * *s : bf16_to_f32(*u) / by);
            }
            for (uint32_t k = 0; zero && k < LATENT; k++)
                page[code_at(t % PAGE, k)] = 0;
            *s = zero ? 0 : *s * by;
        }
    w.g.ops->upload(w.g.d, w.arena, host, w.arena_bytes);
    read_back(&w, host);
    check_decode(&w, 64, 4);
    report_errors("scales");
    gpu_close(&w.g);
}

/* A query or a token that is no number makes its own row no number, and no other. */
Test(mla, correct_odd, .timeout = 60)
{
    struct world w;
    world_open(&w, 200, 2, 200);
    gpu_poison(&w.g, w.arena, w.arena_bytes);
    for (uint32_t i = 0; i < 8; i++)
        add_seq(&w, 700, i % 2 ? DN_KV_FP8 : DN_KV_BF16);
    for (uint32_t i = 4; i < 6; i++)
        w.seq[i].kv[300 * WIDTH + 17] = 0x7fc0;
    struct ops o = write_ops(&w, false);
    gpu_prepare(&w.g, 1, run_ops, &o);
    write_all(&w, &o);
    uint32_t heads = 64, n = 8, which[8], first[8], end[8];
    size_t row = (size_t)heads * LATENT;
    void *dq, *out = gpu_alloc(&w.g, n * row * 2);
    float *q = malloc(n * heads * WIDTH * sizeof *q);
    for (size_t i = 0; i < n * heads * WIDTH; i++)
        q[i] = gpu_normal();
    for (uint32_t i = 0; i < 2; i++) {
        q[((size_t)i * heads + 5) * WIDTH + 100] = NAN;
        q[((size_t)i * heads + 6) * WIDTH + 560] = NAN;
        q[((size_t)i * heads + 7) * WIDTH + 3] = INFINITY;
    }
    dq = gpu_act(&w.g, q, n * heads * WIDTH);
    struct ops a = {.w = &w,
                    .which = 1,
                    .repeat = 1,
                    .attention = {.q = dq,
                                  .n_heads = heads,
                                  .latent_dim = LATENT,
                                  .rope_dim = ROPE,
                                  .scale = 0.1f,
                                  .layout = &w.l,
                                  .arena = w.arena,
                                  .layer = w.layer,
                                  .out = out}};
    for (uint32_t i = 0; i < n; i++)
        which[i] = i, first[i] = w.seq[i].n - 1, end[i] = w.seq[i].n;
    gpu_prepare(&w.g, 2, run_ops, &a);
    set_step(&w, DN_STEP_DECODE, n, which, first, end);
    gpu_step(&w.g, 2, run_ops, &a);
    float *x = gpu_read_act(&w.g, out, n * row);
    for (uint32_t i = 0; i < n; i++)
        for (uint32_t h = 0; h < heads; h++) {
            uint32_t odd = 0;
            for (uint32_t k = 0; k < LATENT; k++)
                odd += !isfinite(x[(i * heads + h) * LATENT + k]);
            bool all = i == 4 || i == 5 || (i < 2 && h >= 5 && h < 7), any = i < 2 && h == 7;
            if (!any)
                cr_expect_eq(odd, all ? LATENT : 0, "sequence %u head %u: %u of %u are no numbers", i, h, odd, LATENT);
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
