/* Experts and head-wise products against float64 in every weight format, and the determinism rule of kernels.h. */
#include "unit/kernels/matmul_fixture.h"

#include "unit/kernels/oracle.h"

/* A matrix of n_groups groups with its float64 values; the same random numbers give a plain matrix of all rows, which
 * packs to the same bytes: test_pack.c. */
static void groups_make(struct weights *w, const struct kind *k, uint32_t n_groups, uint32_t n_out, uint32_t n_in,
                        uint64_t seed)
{
    weights_make(w, k, n_groups * n_out, n_in, seed);
    w->m.n_groups = n_groups;
    w->m.n_out = n_out;
    cr_assert_eq(dn_cpu_matrix_bytes(&w->m), w->m.bytes);
}

/* y [n_out] = W[g] x, and the error that the kernels may make: matmul.h's arithmetic, derived in test_matmul.c: sums of
 * n_in products in f32, (n_in + 3) 2^-24 of their sizes, and for INT8 and INT4 activations off by half a unit of 16
 * bits of the largest of their 32 (the group's products are summed exactly). x_err is what x itself is off by. */
static void product(const struct weights *w, uint32_t g, const struct kind *k, const double *x, const double *x_err,
                    double *y, double *y_err)
{
    uint32_t n_in = w->m.n_in, n_out = w->m.n_out;
    for (uint32_t r = 0; r < n_out; r++) {
        size_t row = ((size_t)g * n_out + r) * n_in;
        double dot = 0, err = 0;
        for (uint32_t b = 0; b < n_in; b += 32) {
            double top = 0, size = 0;
            for (uint32_t i = b; i < n_in && i < b + 32; i++) {
                dot += w->value[row + i] * x[i];
                err += (n_in + 3) * 0x1p-24 * w->magnitude[row + i] * fabs(x[i]) +
                       (x_err ? fabs(w->value[row + i]) * x_err[i] : 0);
                top = fmax(top, fabs(x[i]));
                size += w->magnitude[row + i];
            }
            err += is_int(k) ? 0x1p-15 * top * size : 0;
        }
        y[r] = dot;
        y_err[r] = err;
    }
}

static void open_tokens(struct fix *f, struct seq *q, const char *isa, unsigned n_threads, uint32_t n)
{
    fix_open(f, isa, n_threads, 16);
    fix_arena(f, 1, 1, 16, 16, 64);
    seq_init(f, q, DN_KV_BF16, n);
    step_clear(f);
    step_add(f, q, 0, n);
}

/* ---- Experts ---- */

struct shape {
    uint32_t n_experts, top_k, dim, ff, n_tokens;
    bool add;
};

static const struct shape shapes[] = {
    {32, 4, 128, 128, 1, true}, {8, 2, 256, 128, 37, true}, {4, 4, 128, 256, 9, false},
    {1, 1, 128, 128, 5, true},  {6, 16, 128, 128, 3, true}, {3, 2, 128, 384, 90, false},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes };

static void run_experts(struct fix *f, const struct shape *h, const struct weights *gate_up, const struct weights *down,
                        const float *a, const int32_t *expert, const float *weight, const float *add, float *out)
{
    f->ops->step_begin(f->d, 1);
    f->ops->experts(f->d, &(struct dn_experts){.a = a,
                                               .expert = expert,
                                               .weight = weight,
                                               .top_k = h->top_k,
                                               .gate_up = &gate_up->m,
                                               .down = &down->m,
                                               .add = add,
                                               .out = out});
    f->ops->step_end(f->d);
    cr_assert_eq(f->ops->step_wait(f->d, NULL), 0);
}

/* One token. silu(g) u: g and u carry the errors of their products; silu's slope is below 1.1, |silu(g)| <= |g|, its
 * own error and the product's are 8 roundings. The sum over k in f32: top_k + 1 roundings of its size. */
static void expert_token(const struct shape *h, const struct kind *k, const struct weights *gate_up,
                         const struct weights *down, const float *a, const int32_t *expert, const float *weight,
                         const float *add, double *out, double *bound)
{
    uint32_t ff = h->ff, dim = h->dim;
    double *x = malloc(dim * 8), *y = malloc(2 * ff * 8), *y_err = malloc(2 * ff * 8), *m = malloc(ff * 8),
           *m_err = malloc(ff * 8), *o = malloc(dim * 8), *o_err = malloc(dim * 8), *size = calloc(dim, 8);
    for (uint32_t i = 0; i < dim; i++) {
        x[i] = (double)a[i];
        out[i] = add ? (double)add[i] : 0;
        size[i] = fabs(out[i]);
        bound[i] = 0;
    }
    for (uint32_t e = 0; e < h->top_k; e++) {
        product(gate_up, (uint32_t)expert[e], k, x, NULL, y, y_err);
        for (uint32_t i = 0; i < ff; i++) {
            double s = y[i] / (1 + exp(-y[i]));
            m[i] = s * y[ff + i];
            m_err[i] =
                8 * 0x1p-24 * fabs(m[i]) + 1.1 * y_err[i] * (fabs(y[ff + i]) + y_err[ff + i]) + fabs(s) * y_err[ff + i];
        }
        product(down, (uint32_t)expert[e], k, m, m_err, o, o_err);
        for (uint32_t i = 0; i < dim; i++) {
            out[i] += (double)weight[e] * o[i];
            size[i] += fabs((double)weight[e] * o[i]);
            bound[i] += fabs((double)weight[e]) * o_err[i];
        }
    }
    for (uint32_t i = 0; i < dim; i++)
        bound[i] += (h->top_k + 2) * 0x1p-24 * size[i];
    free(x);
    free(y);
    free(y_err);
    free(m);
    free(m_err);
    free(o);
    free(o_err);
    free(size);
}

/* Experts of a token: distinct ones if there are enough; every fourth token takes the same, so that some have many rows
 * and some none. */
static void random_experts(const struct shape *h, uint32_t n, int32_t *expert, float *weight)
{
    for (uint32_t t = 0; t < n; t++) {
        uint32_t first = t % 4 ? rng_below(h->n_experts) : 0;
        for (uint32_t k = 0; k < h->top_k; k++) {
            expert[t * h->top_k + k] = (int32_t)((first + k) % h->n_experts);
            weight[t * h->top_k + k] = (float)(0.1 + rng_unit()) * (k % 2 ? -1.0f : 1.0f);
        }
    }
}

static void check_experts(const char *isa, unsigned n_threads, const struct kind *k, const struct shape *h)
{
    struct fix f;
    struct seq q;
    struct weights gate_up, down;
    open_tokens(&f, &q, isa, n_threads, h->n_tokens);
    groups_make(&gate_up, k, h->n_experts, 2 * h->ff, h->dim, 3);
    groups_make(&down, k, h->n_experts, h->dim, h->ff, 4);
    size_t n = h->n_tokens, pairs = n * h->top_k;
    float *a = fix_floats(&f, n * h->dim), *add = fix_floats(&f, n * h->dim), *out = fix_floats(&f, n * h->dim),
          *weight = fix_floats(&f, pairs);
    int32_t *expert = (int32_t *)fix_floats(&f, pairs);
    for (size_t t = 0; t < n; t++)
        fill_normal(a + t * h->dim, h->dim, 0.1f + (float)(t % 5));
    fill_normal(add, n * h->dim, 1.0f);
    random_experts(h, h->n_tokens, expert, weight);
    memset(out, 0xff, n * h->dim * sizeof *out);
    run_experts(&f, h, &gate_up, &down, a, expert, weight, h->add ? add : NULL, out);
    double *want = malloc(h->dim * 8), *bound = malloc(h->dim * 8);
    for (size_t t = 0; t<n; t += n> 20 ? 3 : 1) {
        expert_token(h, k, &gate_up, &down, a + t * h->dim, expert + t * h->top_k, weight + t * h->top_k,
                     h->add ? add + t * h->dim : NULL, want, bound);
        for (uint32_t i = 0; i < h->dim; i++)
            cr_assert(fabs((double)out[t * h->dim + i] - want[i]) <= bound[i],
                      "%s, %s, %u experts of %u, %u: token %zu value %u: %.9g, not %.9g +- %.2g", isa, k->name,
                      h->n_experts, h->dim, h->ff, t, i, (double)out[t * h->dim + i], want[i], bound[i]);
    }
    if (h->add) { /* in place */
        run_experts(&f, h, &gate_up, &down, a, expert, weight, add, add);
        cr_assert(memcmp(add, out, n * h->dim * sizeof *out) == 0);
    }
    free(want);
    free(bound);
    weights_free(&gate_up);
    weights_free(&down);
    fix_close(&f);
}

Test(experts, are_within_rounding_of_float64)
{
    FOR_EACH_ISA(isa)
    {
        for (size_t k = 0; k < N_KINDS; k++)
            for (size_t i = 0; i < N_SHAPES; i++)
                check_experts(isa, 1 + (i + k) % 3, kinds + k, shapes + i);
    }
}

Test(experts, give_the_same_bits_in_any_batch_and_number_of_threads)
{
    const struct shape h = {5, 3, 256, 128, 61, true};
    FOR_EACH_ISA(isa)
    {
        for (size_t k = 0; k < N_KINDS; k++) {
            struct weights gate_up, down;
            groups_make(&gate_up, kinds + k, h.n_experts, 2 * h.ff, h.dim, 3);
            groups_make(&down, kinds + k, h.n_experts, h.dim, h.ff, 4);
            float *all = malloc(61 * 256 * sizeof *all);
            for (unsigned n_threads = 1; n_threads <= 3; n_threads++) {
                struct fix f;
                struct seq q;
                rng_state = 11;
                open_tokens(&f, &q, isa, n_threads, 61);
                float *a = fix_floats(&f, 61 * 256), *add = fix_floats(&f, 61 * 256), *out = fix_floats(&f, 61 * 256);
                float weight[61 * 3];
                int32_t expert[61 * 3];
                fill_normal(a, 61 * 256, 1.0f);
                fill_normal(add, 61 * 256, 1.0f);
                random_experts(&h, 61, expert, weight);
                run_experts(&f, &h, &gate_up, &down, a, expert, weight, add, out);
                if (n_threads == 1)
                    memcpy(all, out, 61 * 256 * sizeof *all);
                cr_assert(memcmp(all, out, 61 * 256 * sizeof *all) == 0, "%s, %s: %u threads", isa, kinds[k].name,
                          n_threads);
                static const uint32_t chunk[] = {1, 2, 5, 13, 1, 39};
                for (uint32_t at = 0, c = 0; at < 61; at += chunk[c++]) {
                    step_clear(&f);
                    step_add(&f, &q, at, chunk[c]);
                    run_experts(&f, &h, &gate_up, &down, a + at * 256, expert + at * 3, weight + at * 3, add + at * 256,
                                out);
                    cr_assert(memcmp(all + at * 256, out, chunk[c] * 256 * sizeof *all) == 0,
                              "%s, %s: tokens %u and the next %u", isa, kinds[k].name, at, chunk[c]);
                }
                fix_close(&f);
            }
            free(all);
            weights_free(&gate_up);
            weights_free(&down);
        }
    }
}

/* More tokens than fit into what lies between the products at a time: those of both passes are as if alone. */
Test(experts, of_a_large_step_are_those_of_small_ones)
{
    const struct shape h = {6, 16, 4096, 64, 1000, false}; /* 16 * (3 * 64 + 4096) * 4 bytes a token: 978 to a pass */
    struct fix f;
    struct seq q;
    struct weights gate_up, down;
    open_tokens(&f, &q, NULL, 2, h.n_tokens);
    groups_make(&gate_up, kinds, h.n_experts, 2 * h.ff, h.dim, 3);
    groups_make(&down, kinds, h.n_experts, h.dim, h.ff, 4);
    size_t n = h.n_tokens, pairs = n * h.top_k;
    float *a = fix_floats(&f, n * h.dim), *out = fix_floats(&f, n * h.dim), *one = fix_floats(&f, h.dim),
          *weight = fix_floats(&f, pairs);
    int32_t *expert = (int32_t *)fix_floats(&f, pairs);
    fill_normal(a, n * h.dim, 1.0f);
    random_experts(&h, h.n_tokens, expert, weight);
    run_experts(&f, &h, &gate_up, &down, a, expert, weight, NULL, out);
    static const uint32_t some[] = {0, 1, 500, 976, 977, 978, 979, 999};
    for (size_t i = 0; i < sizeof some / sizeof *some; i++) {
        size_t t = some[i];
        step_clear(&f);
        step_add(&f, &q, some[i], 1);
        run_experts(&f, &h, &gate_up, &down, a + t * h.dim, expert + t * h.top_k, weight + t * h.top_k, NULL, one);
        cr_assert(memcmp(one, out + t * h.dim, h.dim * sizeof *one) == 0, "token %zu", t);
    }
    weights_free(&gate_up);
    weights_free(&down);
    fix_close(&f);
}

/* A NaN activation or weight makes its own token NaN, and no other. */
Test(experts, nan_stays_with_its_token)
{
    const struct shape h = {4, 2, 128, 128, 8, false};
    FOR_EACH_ISA(isa)
    {
        for (size_t k = 0; k < N_KINDS; k++) {
            struct fix f;
            struct seq q;
            struct weights gate_up, down;
            open_tokens(&f, &q, isa, 2, 8);
            groups_make(&gate_up, kinds + k, 4, 256, 128, 3);
            groups_make(&down, kinds + k, 4, 128, 128, 4);
            float *a = fix_floats(&f, 8 * 128), *out = fix_floats(&f, 8 * 128), weight[16];
            int32_t expert[16];
            fill_normal(a, 8 * 128, 1.0f);
            random_experts(&h, 8, expert, weight);
            a[3 * 128 + 17] = NAN;
            weight[5 * 2 + 1] = NAN;
            run_experts(&f, &h, &gate_up, &down, a, expert, weight, NULL, out);
            for (uint32_t i = 0; i < 8 * 128; i++)
                cr_assert_eq(!!isnan(out[i]), i / 128 == 3 || i / 128 == 5, "%s, %s: token %u", isa, kinds[k].name,
                             i / 128);
            weights_free(&gate_up);
            weights_free(&down);
            fix_close(&f);
        }
    }
}

/* ---- Head-wise products ---- */

static void check_groups(const char *isa, unsigned n_threads, const struct kind *k, uint32_t n_groups, uint32_t n_out,
                         uint32_t n_in, uint32_t n)
{
    struct fix f;
    struct seq q;
    struct weights w;
    open_tokens(&f, &q, isa, n_threads, n);
    groups_make(&w, k, n_groups, n_out, n_in, 9);
    /* Each with gaps behind groups and rows, which stay as they are. */
    uint32_t a_group = n_in + 3, a_row = n_groups * a_group + 5, o_group = n_out + 2, o_row = n_groups * o_group + 1;
    float *a = fix_floats(&f, (size_t)n * a_row), *out = fix_floats(&f, (size_t)n * o_row);
    fill_normal(a, (size_t)n * a_row, 1.0f);
    memset(out, 0xff, (size_t)n * o_row * sizeof *out);
    f.ops->step_begin(f.d, 1);
    f.ops->group_matmul(f.d, &(struct dn_group_matmul){a, a_row, a_group, &w.m, out, o_row, o_group});
    f.ops->step_end(f.d);
    double *x = malloc(n_in * 8), *y = malloc(n_out * 8), *err = malloc(n_out * 8);
    for (uint32_t t = 0; t < n; t++) {
        for (uint32_t g = 0; g < n_groups; g++) {
            const float *row = out + (size_t)t * o_row + g * o_group;
            for (uint32_t i = 0; i < n_in; i++)
                x[i] = (double)a[(size_t)t * a_row + g * a_group + i];
            product(&w, g, k, x, NULL, y, err);
            for (uint32_t i = 0; i < n_out; i++)
                cr_assert(fabs((double)row[i] - y[i]) <= err[i],
                          "%s, %s, %u groups of %ux%u, %u rows: row %u group %u value %u: %.9g, not %.9g", isa, k->name,
                          n_groups, n_out, n_in, n, t, g, i, (double)row[i], y[i]);
            cr_assert(isnan(row[n_out]) && isnan(row[n_out + 1]), "written behind a group");
        }
        cr_assert(isnan(out[(size_t)t * o_row + n_groups * o_group]), "written behind a row");
    }
    free(x);
    free(y);
    free(err);
    weights_free(&w);
    fix_close(&f);
}

Test(group_matmul, is_within_rounding_of_float64)
{
    static const uint32_t shape[][4] = {{4, 512, 128, 1}, {3, 128, 512, 7}, {5, 128, 64, 33},
                                        {64, 128, 32, 2}, {1, 48, 96, 4},   {2, 896, 32, 3}};
    FOR_EACH_ISA(isa)
    {
        for (size_t k = 0; k < N_KINDS; k++)
            for (size_t i = 0; i < sizeof shape / sizeof *shape; i++)
                check_groups(isa, 1 + (i + k) % 3, kinds + k, shape[i][0], shape[i][1], shape[i][2], shape[i][3]);
    }
}

/* What a group gives is what a matrix of its own gives, bit for bit. */
Test(group_matmul, equals_a_matmul_of_each_group)
{
    enum { GROUPS = 3, OUT = 256, IN = 96, MOST = 50 };
    FOR_EACH_ISA(isa)
    {
        for (size_t k = 0; k < N_KINDS; k++) {
            struct fix f;
            struct seq q;
            struct weights w;
            open_tokens(&f, &q, isa, 2, MOST);
            groups_make(&w, kinds + k, GROUPS, OUT, IN, 21);
            float *a = fix_floats(&f, MOST * IN), *out = fix_floats(&f, MOST * GROUPS * OUT),
                  *one = fix_floats(&f, MOST * OUT);
            fill_normal(a, MOST * IN, 1.0f);
            for (uint32_t n = 1; n <= MOST; n = n * 2 + 1) {
                step_clear(&f);
                step_add(&f, &q, 0, n);
                f.ops->step_begin(f.d, 1);
                f.ops->group_matmul(f.d, &(struct dn_group_matmul){a, IN, 0, &w.m, out, GROUPS * OUT, OUT});
                for (uint32_t g = 0; g < GROUPS; g++) {
                    struct dn_matrix m = w.m;
                    m.n_groups = 0;
                    m.bytes /= GROUPS;
                    m.data = (uint8_t *)m.data + g * m.bytes;
                    f.ops->matmul(f.d, &(struct dn_matmul){.a = a, .w = &m, .out = one});
                    for (uint32_t t = 0; t < n; t++)
                        cr_assert(
                            memcmp(out + ((size_t)t * GROUPS + g) * OUT, one + (size_t)t * OUT, OUT * sizeof *one) == 0,
                            "%s, %s: row %u of %u, group %u", isa, kinds[k].name, t, n, g);
                }
                f.ops->step_end(f.d);
            }
            weights_free(&w);
            fix_close(&f);
        }
    }
}
