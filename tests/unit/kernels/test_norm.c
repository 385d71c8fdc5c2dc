/* RMSNorm with the residual, SiLU, and the exponential under it, against float64. */
#include "unit/kernels/oracle.h"

#include "kernels/cpu/rows.h"

static void one_token_seqs(struct fix *f, uint32_t n)
{
    static struct seq q;
    f->layout.page_tokens = 2048;
    step_clear(f);
    step_add(f, &q, 0, n);
}

/* A sum of n squares in f32 is off by n 2^-24 relatively at most; its root by half; three more roundings. */
static double norm_bound(uint32_t dim)
{
    return (dim / 2 + 4) * 0x1p-24;
}

Test(norm, is_within_rounding_of_float64)
{
    static const uint32_t dims[] = {1, 2, 7, 16, 33, 64, 127, 576, 1000, 4096};
    FOR_EACH_ISA(isa)
    {
        struct fix f;
        fix_open(&f, isa, 3, 16);
        for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
            enum { N = 37 };
            uint32_t dim = dims[i];
            float *x = fix_floats(&f, N * dim), *add = fix_floats(&f, N * dim), *w = fix_floats(&f, dim);
            float *out = fix_floats(&f, N * dim), *before = fix_floats(&f, N * dim);
            for (int mode = 0; mode < 4; mode++) { /* bit 0: add, bit 1: rows only */
                fill_normal(x, N * dim, 3.0f);
                fill_normal(add, N * dim, 1.0f);
                fill_normal(w, dim, 1.0f);
                memcpy(before, x, N * dim * sizeof *x);
                one_token_seqs(&f, N);
                f.s->n_rows = 5;
                for (int r = 0; r < 5; r++) {
                    f.s->row_token[r] = (int32_t)(r < 4 ? rng_below(N) : N - 1);
                    f.s->sample[r] = (struct dn_sample){.slot = -1, .n_top = -1};
                }
                f.ops->step_begin(f.d, 1);
                f.ops->rmsnorm(f.d, &(struct dn_rmsnorm){x, mode & 1 ? add : NULL, w, 1e-5f, dim, mode & 2, out});
                for (uint32_t j = 0; j < N * dim; j++) {
                    float want = mode & 1 ? before[j] + add[j] : before[j];
                    cr_assert_eq(x[j], want, "the residual");
                }
                for (uint32_t r = 0; r < (mode & 2 ? 5 : N); r++) {
                    const float *row = x + (mode & 2 ? (uint32_t)f.s->row_token[r] : r) * dim;
                    double sum = 0;
                    for (uint32_t j = 0; j < dim; j++)
                        sum += (double)row[j] * (double)row[j];
                    for (uint32_t j = 0; j < dim; j++) {
                        double want = (double)row[j] / sqrt(sum / dim + (double)1e-5f) * (double)w[j];
                        cr_assert(fabs((double)out[r * dim + j] - want) <= norm_bound(dim) * fabs(want), "%s, dim %u",
                                  isa, dim);
                    }
                }
            }
        }
        fix_close(&f);
    }
}

Test(norm, of_a_row_is_the_same_bits_in_any_batch)
{
    FOR_EACH_ISA(isa)
    {
        enum { N = 50, DIM = 579 };
        struct fix f[2];
        float *out[2];
        for (unsigned k = 0; k < 2; k++) {
            rng_state = 3;
            fix_open(f + k, isa, k + 1, 16);
            float *x = fix_floats(f + k, N * DIM), *w = fix_floats(f + k, DIM);
            out[k] = fix_floats(f + k, (N + 1) * DIM);
            fill_normal(x, N * DIM, 1.0f);
            fill_normal(w, DIM, 1.0f);
            one_token_seqs(f + k, N);
            f[k].ops->step_begin(f[k].d, 1);
            f[k].ops->rmsnorm(f[k].d, &(struct dn_rmsnorm){x, NULL, w, 1e-5f, DIM, false, out[k]});
            one_token_seqs(f + k, 1);
            f[k].ops->step_begin(f[k].d, 1);
            f[k].ops->rmsnorm(f[k].d, &(struct dn_rmsnorm){x + 41 * DIM, NULL, w, 1e-5f, DIM, false, out[k] + N * DIM});
            cr_assert(memcmp(out[k] + 41 * DIM, out[k] + N * DIM, DIM * sizeof(float)) == 0);
        }
        cr_assert(memcmp(out[0], out[1], N * DIM * sizeof(float)) == 0);
        fix_close(f);
        fix_close(f + 1);
    }
}

Test(norm, silu_mul_is_within_rounding_of_float64)
{
    static const uint32_t dims[] = {1, 5, 16, 1000, 1536, 2049};
    FOR_EACH_ISA(isa)
    {
        struct fix f;
        fix_open(&f, isa, 2, 16);
        for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
            enum { N = 9 };
            uint32_t dim = dims[i];
            float *x = fix_floats(&f, N * 2 * dim), *out = fix_floats(&f, N * dim);
            fill_normal(x, N * 2 * dim, 5.0f);
            if (dim > 5) { /* gates where e^x leaves the range of f32 */
                x[0] = 200.0f;
                x[1] = -200.0f;
                x[2] = -0.0f;
                x[3] = -87.5f;
                x[4] = 88.5f;
            }
            one_token_seqs(&f, N);
            f.ops->step_begin(f.d, 1);
            f.ops->silu_mul(f.d, &(struct dn_silu_mul){x, dim, out});
            for (uint32_t t = 0; t < N; t++) {
                for (uint32_t j = 0; j < dim; j++) {
                    double g = (double)x[t * 2 * dim + j], u = (double)x[t * 2 * dim + dim + j];
                    double want = g / (1 + exp(-g)) * u;
                    /* e^x: 2 units in the last place; four roundings. Below e^-88 silu is held at 2e-36. */
                    cr_assert(fabs((double)out[t * dim + j] - want) <= 6 * 0x1p-23 * fabs(want) + 2e-36 * fabs(u),
                              "%s: silu(%g) %g", isa, g, (double)out[t * dim + j] / u);
                }
            }
        }
        fix_close(&f);
    }
}

Test(norm, exponential_is_within_the_stated_error)
{
    enum { N = 1 << 16 };
    float *x = malloc(N * sizeof *x), *y = malloc(N * sizeof *y);
    FOR_EACH_ISA(isa)
    {
        const struct dn_row_ops *ops;
        enum dn_isa id;
        double worst = 0;
        cr_assert_eq(dn_isa_parse(isa, &id, NULL), 0);
        ops = dn_row_ops(id);
        for (int round = 0; round < 30; round++) {
            for (int i = 0; i < N; i++)
                x[i] = (float)(-rng_unit() * (round < 10 ? 87.3 : round < 20 ? 1.0 : 1e-3));
            ops->exps(x, N, 0.0f, 1.0f, y);
            for (int i = 0; i < N; i++) {
                double want = exp((double)x[i]);
                worst = fmax(worst, fabs((double)y[i] - want) / ldexp(1, ilogb(want) - 23));
            }
        }
        printf("%s: exp is off by %.3f units in the last place at most\n", isa, worst);
        cr_assert_lt(worst, 1.0, "%s: %g", isa, worst);
        float edge[] = {0.0f, -87.4f, -1e30f, -INFINITY, NAN, -0.0f, -87.29f}, got[7];
        ops->exps(edge, 7, 0.0f, 1.0f, got);
        cr_assert(got[0] == 1.0f && got[5] == 1.0f, "e^0 is exact");
        cr_assert(got[1] == 0.0f && got[2] == 0.0f && got[3] == 0.0f);
        cr_assert(isnan(got[4]));
        cr_assert_gt(got[6], 0.0f);
    }
    free(x);
    free(y);
}

/* The form without a residual: rows may have gaps behind them, the input stays as it is. */
Test(norm, of_activations_is_within_rounding_of_float64)
{
    static const uint32_t dims[] = {1, 7, 16, 192, 1536};
    FOR_EACH_ISA(isa)
    {
        struct fix f;
        fix_open(&f, isa, 3, 16);
        for (size_t i = 0; i < sizeof dims / sizeof *dims; i++) {
            enum { N = 29 };
            uint32_t dim = dims[i], stride = dim + 5;
            float *a = fix_floats(&f, N * stride), *w = fix_floats(&f, dim), *out = fix_floats(&f, N * dim + 1);
            fill_normal(a, N * stride, 3.0f);
            fill_normal(w, dim, 1.0f);
            out[N * dim] = 7.0f;
            one_token_seqs(&f, N);
            f.ops->step_begin(f.d, 1);
            f.ops->norm_act(f.d, &(struct dn_norm_act){a, stride, w, 1e-6f, dim, out});
            for (uint32_t r = 0; r < N; r++) {
                double sum = 0;
                for (uint32_t j = 0; j < dim; j++)
                    sum += (double)a[r * stride + j] * (double)a[r * stride + j];
                for (uint32_t j = 0; j < dim; j++) {
                    double want = (double)a[r * stride + j] / sqrt(sum / dim + (double)1e-6f) * (double)w[j];
                    cr_assert(fabs((double)out[r * dim + j] - want) <= norm_bound(dim) * fabs(want), "%s, dim %u", isa,
                              dim);
                }
            }
            cr_assert_eq(out[N * dim], 7.0f);
        }
        fix_close(&f);
    }
}
