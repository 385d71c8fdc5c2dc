/* What the tests of multi-head latent attention share: a cache of latents as the layout says, weights, and the
 * definition in float64 with the error that f32 may add. */
#ifndef DN_TESTS_KERNELS_MLA_FIXTURE_H
#define DN_TESTS_KERNELS_MLA_FIXTURE_H

#include "unit/kernels/oracle.h"

struct mla_shape {
    uint32_t n_heads, nope, rope, v, latent, page_tokens;
};

static UNUSED void mla_arena(struct fix *f, uint32_t n_layers, const struct mla_shape *h, uint32_t n_slabs)
{
    uint64_t bytes = (uint64_t)n_layers * (h->latent + h->rope) * h->page_tokens * 2 * 5;
    cr_assert_eq(dn_kv_layout_init_mla(&f->layout, n_layers, h->latent, h->rope, h->page_tokens, bytes), 0);
    f->n_slabs = n_slabs;
    f->arena = f->ops->alloc(f->d, f->layout.slab_bytes * n_slabs);
    cr_assert_not_null(f->arena);
    memset(f->arena, 0xff, f->layout.slab_bytes * n_slabs);
}

/* A sequence whose pages lie in the arena in no order. */
static UNUSED void mla_seq(struct fix *f, struct seq *q, enum dn_kv_format format, uint32_t n_tokens)
{
    seq_init(f, q, format, n_tokens);
    for (uint32_t i = q->n_pages; i > 1; i--) {
        uint32_t j = rng_below(i), page = q->page[i - 1];
        q->page[i - 1] = q->page[j];
        q->page[j] = page;
    }
}

/* Value i of a position's latent (i < latent) or rope key. */
static UNUSED double mla_get(const struct fix *f, const struct seq *q, uint32_t position, uint32_t layer, uint32_t i)
{
    const struct dn_kv_layout *l = &f->layout;
    const uint8_t *at = kv_layer(f, q, position, layer);
    size_t token = position % l->page_tokens, n = (size_t)l->page_tokens * l->latent_dim;
    size_t bytes = q->format == DN_KV_BF16 ? 2 : 1;
    if (i >= l->latent_dim)
        return bf16_value(((const uint16_t *)(at + n * bytes))[token * l->rope_dim + i - l->latent_dim]);
    if (q->format == DN_KV_BF16)
        return bf16_value(((const uint16_t *)at)[token * l->latent_dim + i]);
    const float *scale = (const float *)(at + n + (size_t)l->page_tokens * l->rope_dim * 2);
    return e4m3_value(at[token * l->latent_dim + i]) * (double)scale[token];
}

static UNUSED uint16_t bf16_of(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return (uint16_t)(u >> 16);
}

/* A random latent and rope key; in FP8 any code but NaN, +-448 among them, and scales over two decades. */
static UNUSED void mla_fill(struct fix *f, const struct seq *q, uint32_t position, uint32_t layer)
{
    const struct dn_kv_layout *l = &f->layout;
    uint8_t *at = kv_layer(f, q, position, layer);
    size_t token = position % l->page_tokens, n = (size_t)l->page_tokens * l->latent_dim;
    uint16_t *rope = (uint16_t *)(at + n * (q->format == DN_KV_BF16 ? 2 : 1));
    for (uint32_t i = 0; i < l->rope_dim; i++)
        rope[token * l->rope_dim + i] = bf16_of(rng_normal());
    for (uint32_t i = 0; i < l->latent_dim; i++) {
        uint8_t code = (uint8_t)rng();
        if (q->format == DN_KV_BF16)
            ((uint16_t *)at)[token * l->latent_dim + i] = bf16_of(rng_normal());
        else
            at[token * l->latent_dim + i] = (code & 0x7f) == 0x7f ? code ^ 1 : code;
    }
    float *scale = (float *)(at + n + (size_t)l->page_tokens * l->rope_dim * 2);
    if (q->format == DN_KV_FP8)
        scale[token] = 0.02f * expf(-4.0f * (float)rng_unit());
}

static UNUSED void mla_fill_all(struct fix *f, const struct seq *q, uint32_t n)
{
    for (uint32_t layer = 0; layer < f->layout.n_layers; layer++)
        for (uint32_t t = 0; t < n; t++)
            mla_fill(f, q, t, layer);
}

/* Overwrites a position in all layers with NaN, as a stale page may hold. */
static UNUSED void mla_forget(struct fix *f, const struct seq *q, uint32_t position)
{
    const struct dn_kv_layout *l = &f->layout;
    size_t token = position % l->page_tokens, bytes = q->format == DN_KV_BF16 ? 2 : 1;
    for (uint32_t layer = 0; layer < l->n_layers; layer++) {
        uint8_t *at = kv_layer(f, q, position, layer);
        memset(at + token * l->latent_dim * bytes, 0xff, l->latent_dim * bytes);
        memset(at + l->format[q->format].v_offset + token * l->rope_dim * 2, 0xff, l->rope_dim * 2);
        if (q->format == DN_KV_FP8)
            memset(at + l->format[q->format].k_scale_offset + token * 4, 0xff, 4);
    }
}

/* ---- Weights ---- */

/* W_k and W_v, [head][nope or v][latent], and W_k transposed, [head][latent][nope], as float64 and as matrices. */
struct mla_weights {
    struct dn_matrix k, k_t, v;
    double *k_value, *v_value;
    bool rounds_activations; /* INT4 and INT8: to 16 bits, matmul.h */
};

static UNUSED void mla_matrix(struct fix *f, struct dn_matrix *m, enum dn_weight_format format, uint32_t n_groups,
                              uint32_t n_out, uint32_t n_in, const float *x)
{
    *m = (struct dn_matrix){.format = format, .n_out = n_out, .n_in = n_in, .n_groups = n_groups, .symmetric = true};
    m->bytes = f->ops->matrix_bytes(m);
    cr_assert_gt(m->bytes, 0);
    m->data = f->ops->alloc(f->d, m->bytes);
    cr_assert_eq(f->ops->matrix_pack(f->d, m, 0, n_groups * n_out, &(struct dn_rows){.f32 = x}), 0);
}

/* bf16: the transposed one has the same values. Other formats: the values of what was packed, and no transposed one.
 * None either where its groups would have no multiple of 64 rows. */
static UNUSED void mla_weights(struct fix *f, struct mla_weights *w, const struct mla_shape *h,
                               enum dn_weight_format format, void (*row)(const struct dn_matrix *, uint32_t, float *))
{
    size_t n_k = (size_t)h->n_heads * h->nope * h->latent, n_v = (size_t)h->n_heads * h->v * h->latent;
    float *k = malloc(n_k * sizeof *k), *t = malloc(n_k * sizeof *t), *v = malloc(n_v * sizeof *v);
    float *one = malloc(h->latent * sizeof *one), sigma = 1.0f / sqrtf((float)h->latent);
    fill_normal(k, n_k, sigma);
    fill_normal(v, n_v, sigma);
    mla_matrix(f, &w->k, format, h->n_heads, h->nope, h->latent, k);
    mla_matrix(f, &w->v, format, h->n_heads, h->v, h->latent, v);
    w->k_value = malloc(n_k * sizeof *w->k_value);
    w->v_value = malloc(n_v * sizeof *w->v_value);
    w->rounds_activations = format == DN_W_INT4 || format == DN_W_INT8;
    for (uint32_t r = 0; r < h->n_heads * h->nope; r++) {
        row(&w->k, r, one);
        for (uint32_t i = 0; i < h->latent; i++) {
            w->k_value[(size_t)r * h->latent + i] = (double)one[i];
            t[((size_t)(r / h->nope) * h->latent + i) * h->nope + r % h->nope] = one[i];
        }
    }
    for (uint32_t r = 0; r < h->n_heads * h->v; r++) {
        row(&w->v, r, one);
        for (uint32_t i = 0; i < h->latent; i++)
            w->v_value[(size_t)r * h->latent + i] = (double)one[i];
    }
    if (format == DN_W_BF16 && (h->latent % 64 == 0 || h->n_heads == 1))
        mla_matrix(f, &w->k_t, format, h->n_heads, h->latent, h->nope, t);
    free(k);
    free(t);
    free(v);
    free(one);
}

static UNUSED void mla_weights_free(struct mla_weights *w)
{
    free(w->k_value);
    free(w->v_value);
}

/* ---- The definitions ---- */

/* Keys and values of a head as float64 with the largest error that computing them may have added. */
struct mla_head {
    uint32_t n, key_dim, value_dim;
    double *key, *value;       /* [n][dim] */
    double *key_err, *val_err; /* [n][dim] */
};

static UNUSED void mla_head_init(struct mla_head *m, uint32_t n, uint32_t key_dim, uint32_t value_dim)
{
    *m = (struct mla_head){n,
                           key_dim,
                           value_dim,
                           calloc((size_t)n * key_dim, 8),
                           calloc((size_t)n * value_dim, 8),
                           calloc((size_t)n * key_dim, 8),
                           calloc((size_t)n * value_dim, 8)};
}

static UNUSED void mla_head_free(struct mla_head *m)
{
    free(m->key);
    free(m->value);
    free(m->key_err);
    free(m->val_err);
}

/* One row of a head: out [value_dim] and the bound of its error.
 *
 * A score is a sum of key_dim products: in f32 off by (key_dim + 3) 2^-24 sum|q k| at most (Higham, each product and
 * sum rounded once; the FP8 scale and the softmax scale are two more), plus what q and k are off by: q_err, key_err. A
 * weight e^(s - max) is then off by 2 delta relatively (its own and the maximum's) + 2^-22 (exp); each tile of 64
 * positions and each split rescales by one more product, sums of 64 positions are 64 roundings: (tiles + 64 + 8) 2^-23
 * as in test_attention.c. The values' own errors come on top, weighted like the values. */
static UNUSED void mla_row(const struct mla_head *m, const double *q, const double *q_err, uint32_t position,
                           double scale, double *out, double *bound)
{
    uint32_t dim = m->key_dim;
    double *s = malloc((position + 1) * sizeof *s), max = -INFINITY, sum = 0, delta = 0;
    for (uint32_t t = 0; t <= position; t++) {
        double dot = 0, err = 0;
        const double *k = m->key + (size_t)t * dim, *k_err = m->key_err + (size_t)t * dim;
        for (uint32_t i = 0; i < dim; i++) {
            double p = q[i] * k[i];
            dot += p;
            err += (dim + 3) * 0x1p-24 * fabs(p) + fabs(q[i]) * k_err[i] + (q_err ? q_err[i] * fabs(k[i]) : 0);
        }
        s[t] = dot * scale;
        max = fmax(max, s[t]);
        delta = fmax(delta, err * scale);
    }
    for (uint32_t t = 0; t <= position; t++)
        sum += s[t] = exp(s[t] - max);
    double tiles = position / 64 + 2;
    for (uint32_t i = 0; i < m->value_dim; i++) {
        double o = 0, size = 0, err = 0;
        for (uint32_t t = 0; t <= position; t++) {
            o += s[t] * m->value[(size_t)t * m->value_dim + i];
            size += s[t] * fabs(m->value[(size_t)t * m->value_dim + i]);
            err += s[t] * m->val_err[(size_t)t * m->value_dim + i];
        }
        out[i] = o / sum;
        bound[i] = size / sum * (2 * delta + (tiles + 64 + 8) * 0x1p-23) + err / sum * (1 + 2 * delta);
    }
    free(s);
}

/* y = W x for rows of W, and the error of computing it: (n + 4) 2^-24 sum|w x|, of which one is for x itself; with
 * activations rounded to 16 bits, half of 2^-15 of the largest of each 32 (DN_ACT_MAX is 127 * 256) times sum|w|; plus
 * sum|w| x_err. */
static UNUSED void mla_product(const double *w, uint32_t n_out, uint32_t n_in, const double *x, const double *x_err,
                               bool rounds, double *y, double *y_err)
{
    for (uint32_t r = 0; r < n_out; r++) {
        const double *row = w + (size_t)r * n_in;
        double dot = 0, size = 0, err = 0;
        for (uint32_t i = 0; i < n_in; i++) {
            double p = row[i] * x[i];
            dot += p;
            size += fabs(p);
        }
        for (uint32_t i = 0; x_err && i < n_in; i++)
            err += fabs(row[i]) * x_err[i];
        for (uint32_t g = 0; rounds && g < n_in; g += 32) {
            double top = 0, weights = 0;
            for (uint32_t i = g; i < n_in && i < g + 32; i++) {
                top = fmax(top, fabs(x[i]));
                weights += fabs(row[i]);
            }
            err += 0x1p-15 * top * weights;
        }
        y[r] = dot;
        y_err[r] = err + (n_in + 4) * 0x1p-24 * size;
    }
}

/* Head h of the first n positions as the un-absorbed form sees them; FP8 latents are rounded once more, to f32. */
static UNUSED void mla_expand(const struct fix *f, const struct seq *s, uint32_t layer, const struct mla_shape *h,
                              const struct mla_weights *w, uint32_t head, uint32_t n, struct mla_head *m)
{
    double *c = malloc(h->latent * sizeof *c);
    mla_head_init(m, n, h->nope + h->rope, h->v);
    for (uint32_t t = 0; t < n; t++) {
        for (uint32_t i = 0; i < h->latent; i++)
            c[i] = mla_get(f, s, t, layer, i);
        mla_product(w->k_value + (size_t)head * h->nope * h->latent, h->nope, h->latent, c, NULL, w->rounds_activations,
                    m->key + (size_t)t * m->key_dim, m->key_err + (size_t)t * m->key_dim);
        mla_product(w->v_value + (size_t)head * h->v * h->latent, h->v, h->latent, c, NULL, w->rounds_activations,
                    m->value + (size_t)t * h->v, m->val_err + (size_t)t * h->v);
        for (uint32_t i = 0; i < h->rope; i++)
            m->key[(size_t)t * m->key_dim + h->nope + i] = mla_get(f, s, t, layer, h->latent + i);
    }
    free(c);
}

/* All heads as the absorbed form sees them. */
static UNUSED void mla_latents(const struct fix *f, const struct seq *s, uint32_t layer, uint32_t n, struct mla_head *m)
{
    uint32_t latent = f->layout.latent_dim, dim = latent + f->layout.rope_dim;
    mla_head_init(m, n, dim, latent);
    for (uint32_t t = 0; t < n; t++) {
        for (uint32_t i = 0; i < dim; i++)
            m->key[(size_t)t * dim + i] = mla_get(f, s, t, layer, i);
        memcpy(m->value + (size_t)t * latent, m->key + (size_t)t * dim, latent * sizeof(double));
    }
}

/* ---- Runs ---- */

static UNUSED void mla_step(struct fix *f)
{
    f->ops->step_end(f->d);
    cr_assert_eq(f->ops->step_wait(f->d, NULL), 0);
}

static UNUSED void run_absorbed(struct fix *f, const struct mla_shape *h, uint32_t layer, float scale, const float *q,
                                float *out)
{
    f->ops->mla_attention(f->d, &(struct dn_mla_attention){.q = q,
                                                           .n_heads = h->n_heads,
                                                           .latent_dim = h->latent,
                                                           .rope_dim = h->rope,
                                                           .scale = scale,
                                                           .layout = &f->layout,
                                                           .arena = f->arena,
                                                           .layer = layer,
                                                           .out = out});
}

static UNUSED void run_prefill(struct fix *f, const struct mla_shape *h, uint32_t layer, float scale,
                               const struct mla_weights *w, const float *q, float *out)
{
    f->ops->mla_prefill(f->d, &(struct dn_mla_prefill){.q = q,
                                                       .w_k = &w->k,
                                                       .w_v = &w->v,
                                                       .n_heads = h->n_heads,
                                                       .nope_dim = h->nope,
                                                       .rope_dim = h->rope,
                                                       .v_dim = h->v,
                                                       .latent_dim = h->latent,
                                                       .scale = scale,
                                                       .layout = &f->layout,
                                                       .arena = f->arena,
                                                       .layer = layer,
                                                       .out = out});
}

#endif
