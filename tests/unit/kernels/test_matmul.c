#include "unit/kernels/matmul_fixture.h"

/* Tolerances, with u = 2^-24 (half an ulp of f32, relative) and S = sum over k of magnitude(w[k]) * |a[k]|:
 *
 * BF16, FP8: weights are exact in f32. A sum of n terms in f32, in any order, errs by at most (n - 1) u S; here two
 * interleaved chains of K / 2 (BF16) or of 64 in each of K / 128 blocks (FP8), each product rounded once more without
 * FMA, a few roundings at the end (joining the chains, the scale, the bias): (K / 2 + 8) u S.
 *
 * INT8, INT4: the test rounds the activations by the documented rule (scale = amax / 32512, q = rint(a * (32512 /
 * amax)) in f32). Products within a group are exact in 32-bit integers, so that each of G = K / 32 groups adds the
 * rounding of its sum to f32, of two scales' product, of the product with it, of the sum, and as much for the offset:
 * (3 G + 8) u S, S with the rounded activations. Against the true activations: each errs by at most amax / 65024 (1 +
 * 2^-22), so that the output errs by at most the sum over groups of amax / 65024 * sum of |w| more.
 */
static const double u = 0x1p-24;

struct expected {
    double value, tolerance;           /* with the activations that the kernel is to use */
    double true_value, true_tolerance; /* with the activations as given */
};

/* One row of activations as the kernel is to use them. */
struct used {
    double *x;     /* [n_in] */
    double *error; /* [n_in] bound of what rounding changes */
};

static struct used round_activations(const struct weights *w, const float *a)
{
    uint32_t n_in = w->m.n_in;
    bool ints = w->m.format == DN_W_INT8 || w->m.format == DN_W_INT4;
    struct used r = {dn_alloc0(n_in, sizeof *r.x), dn_alloc0(n_in, sizeof *r.error)};
    float amax = 0;
    for (uint32_t k = 0; k < n_in; k++) {
        r.x[k] = a[k];
        if (!ints)
            continue;
        if (k % 32 == 0) {
            amax = 0;
            for (uint32_t i = k; i < k + 32; i++)
                amax = fmaxf(amax, fabsf(a[i]));
        }
        float scale = amax / 32512, inverse = 32512 / amax;
        r.x[k] = amax > 0x1p-100f ? (double)rintf(a[k] * inverse) * scale : 0;
        r.error[k] = amax / 65024 * (1 + 0x1p-22);
    }
    return r;
}

static struct expected expect_used(const struct weights *w, const float *a, const struct used *r, uint32_t row,
                                   float bias)
{
    uint32_t n_in = w->m.n_in;
    bool ints = w->m.format == DN_W_INT8 || w->m.format == DN_W_INT4;
    const double *v = w->value + (size_t)row * n_in, *mag = w->magnitude + (size_t)row * n_in;
    double sum = bias, s = fabs(bias), true_sum = bias, rounding = 0;
    for (uint32_t k = 0; k < n_in; k++) {
        sum += v[k] * r->x[k];
        s += mag[k] * fabs(r->x[k]);
        true_sum += v[k] * a[k];
        rounding += r->error[k] * fabs(v[k]);
    }
    double n = ints ? 3.0 * n_in / 32 + 8 : n_in / 2.0 + 8;
    return (struct expected){sum, n * u * s, true_sum, n * u * s + rounding};
}

static struct expected expect(const struct weights *w, const float *a, uint32_t row, float bias)
{
    struct used r = round_activations(w, a);
    struct expected e = expect_used(w, a, &r, row, bias);
    free(r.x);
    free(r.error);
    return e;
}

static float *random_activations(size_t n, uint64_t seed)
{
    float *a = dn_alloc0(n ? n : 1, sizeof *a);
    for (size_t i = 0; i < n; i++)
        a[i] = rnd_normal(&seed) * (rnd(&seed) % 64 ? 1 : 20); /* outliers, as real activations have */
    return a;
}

static void check(const struct weights *w, const char *what, enum dn_isa isa, const float *a, size_t n,
                  const float *bias, const float *out)
{
    size_t step = n * w->m.n_out * w->m.n_in > 1000000 ? 7 : 1; /* of large cases, every seventh output */
    for (size_t m = 0; m < n; m++) {
        const float *x = a + m * w->m.n_in;
        struct used r = round_activations(w, x);
        for (size_t row = m % step; row < w->m.n_out; row += step) {
            struct expected e = expect_used(w, x, &r, (uint32_t)row, bias ? bias[row] : 0);
            float got = out[m * w->m.n_out + row];
            cr_assert(fabs(got - e.value) <= e.tolerance && fabs(got - e.true_value) <= e.true_tolerance,
                      "%s %s: n %zu, %u x %u, row %zu of %zu: %.9g, expected %.9g +- %.3g, true %.9g +- %.3g", what,
                      dn_isa_name(isa), n, w->m.n_out, w->m.n_in, row, m, got, e.value, e.tolerance, e.true_value,
                      e.true_tolerance);
        }
        free(r.x);
        free(r.error);
    }
}

static void run_case(const struct kind *k, struct dn_cpu_exec *x, size_t n, uint32_t n_out, uint32_t n_in,
                     bool with_bias)
{
    uint64_t seed = n * 1000003 + n_out * 1009 + n_in;
    struct weights w;
    weights_make(&w, k, n_out, n_in, seed);
    float *a = random_activations(n * n_in, seed + 1), *bias = random_activations(n_out, seed + 2);
    float *out = dn_alloc0(n * n_out + 1, sizeof *out);
    out[n * n_out] = 12345; /* a guard */
    dn_cpu_matmul(x, a, n, &w.m, with_bias ? bias : NULL, out);
    cr_assert_eq(out[n * n_out], 12345, "wrote past the end");
    check(&w, k->name, x->isa, a, n, with_bias ? bias : NULL, out);
    free(a);
    free(bias);
    free(out);
    weights_free(&w);
}

static void run_grid(enum dn_isa isa)
{
    static const size_t rows[] = {1, 2, 3, 7, 16, 33, 64};
    static const uint32_t outs[] = {1, 15, 16, 33, 129}, int_ins[] = {32, 96, 288},
                          float_ins[] = {1, 3, 4, 31, 130, 300};
    if (isa > dn_isa_detect()) {
        printf("SKIPPED: this machine has no %s\n", dn_isa_name(isa));
        return;
    }
    struct dn_cpu_exec x;
    exec_open(&x, isa, 2);
    for (int k = 0; k < N_KINDS; k++) {
        const uint32_t *in = is_int(&kinds[k]) ? int_ins : float_ins;
        size_t n_in = is_int(&kinds[k]) ? sizeof int_ins / 4 : sizeof float_ins / 4;
        for (size_t r = 0; r < sizeof rows / sizeof *rows; r++)
            for (size_t o = 0; o < sizeof outs / sizeof *outs; o++)
                for (size_t i = 0; i < n_in; i++)
                    run_case(&kinds[k], &x, rows[r], outs[o], in[i], (r + o + i) % 2);
        run_case(&kinds[k], &x, 512, 37, 576, true);
        run_case(&kinds[k], &x, 1, 576, 1536, false);
        run_case(&kinds[k], &x, 5, 3, 8192, true);
    }
    exec_close(&x);
}

Test(matmul, portable_agrees_with_float64)
{
    run_grid(DN_ISA_PORTABLE);
}

Test(matmul, avx2_agrees_with_float64)
{
    run_grid(DN_ISA_AVX2);
}

Test(matmul, avx512_agrees_with_float64)
{
    run_grid(DN_ISA_AVX512);
}

Test(matmul, zero_rows_of_activations_do_nothing)
{
    struct dn_cpu_exec x;
    struct weights w;
    exec_open(&x, dn_isa_detect(), 2);
    weights_make(&w, &kinds[0], 16, 32, 1);
    float out = 7;
    dn_cpu_matmul(&x, NULL, 0, &w.m, NULL, &out);
    cr_assert_eq(out, 7);
    weights_free(&w);
    exec_close(&x);
}

/* The contract of kernels.h: a row's result has the same bits alone, in any batch, with any number of threads. */
static void same_bits(enum dn_isa isa, const struct kind *k, uint32_t n_out, uint32_t n_in, size_t n)
{
    struct weights w;
    weights_make(&w, k, n_out, n_in, 77);
    float *a = random_activations(n * n_in, 78), *bias = random_activations(n_out, 79);
    float *want = dn_alloc0(n * n_out, sizeof *want), *got = dn_alloc0(n * n_out, sizeof *got);
    struct dn_cpu_exec x;
    exec_open(&x, isa, 1);
    for (size_t i = 0; i < n; i++)
        dn_cpu_matmul(&x, a + i * n_in, 1, &w.m, bias, want + i * n_out);
    exec_close(&x);
    for (unsigned threads = 1; threads <= 5; threads += 2) {
        exec_open(&x, isa, threads);
        for (size_t batch = 2; batch <= n; batch = batch == n ? n + 1 : batch * 3 + 1 > n ? n : batch * 3 + 1) {
            memset(got, 0xff, n * n_out * sizeof *got);
            for (size_t i = 0; i < n; i += batch)
                dn_cpu_matmul(&x, a + i * n_in, n - i < batch ? n - i : batch, &w.m, bias, got + i * n_out);
            cr_assert(memcmp(want, got, n * n_out * sizeof *got) == 0,
                      "%s %s %u x %u: %u threads, batches of %zu of %zu", k->name, dn_isa_name(isa), n_out, n_in,
                      threads, batch, n);
        }
        exec_close(&x);
    }
    free(a);
    free(bias);
    free(want);
    free(got);
    weights_free(&w);
}

Test(matmul, a_row_has_the_same_bits_in_every_batch_and_with_any_threads)
{
    for (int isa = 0; isa <= (int)dn_isa_detect(); isa++)
        for (int k = 0; k < N_KINDS; k++) {
            same_bits((enum dn_isa)isa, &kinds[k], 41, 608, 75);
            same_bits((enum dn_isa)isa, &kinds[k], 200, 96, 19);
            /* A single row: several streams of several blocks each, blocks left over, rows short of the last block. */
            same_bits((enum dn_isa)isa, &kinds[k], 327, 64, 9);
            /* More activations than one pass takes. */
            same_bits((enum dn_isa)isa, &kinds[k], 17, 4096, 200);
        }
}

Test(matmul, avx2_and_avx512_give_the_same_bits)
{
    if (dn_isa_detect() < DN_ISA_AVX512) {
        printf("SKIPPED: this machine has no avx512\n");
        return;
    }
    enum { N = 21, OUT = 75, IN = 320 };
    struct dn_cpu_exec x2, x5;
    exec_open(&x2, DN_ISA_AVX2, 2);
    exec_open(&x5, DN_ISA_AVX512, 2);
    float *a = random_activations((size_t)N * IN, 5), *o2 = dn_alloc0(N * OUT, 4), *o5 = dn_alloc0(N * OUT, 4);
    for (int k = 0; k < N_KINDS; k++) {
        struct weights w;
        weights_make(&w, &kinds[k], OUT, IN, 6);
        dn_cpu_matmul(&x2, a, N, &w.m, NULL, o2);
        dn_cpu_matmul(&x5, a, N, &w.m, NULL, o5);
        cr_assert(memcmp(o2, o5, sizeof(float) * N * OUT) == 0, "%s", kinds[k].name);
        weights_free(&w);
    }
    free(a);
    free(o2);
    free(o5);
    exec_close(&x2);
    exec_close(&x5);
}

static void poison(enum dn_isa isa, const struct kind *k, float bad)
{
    enum { N = 13, OUT = 50, IN = 128, ROW = 9 };
    struct dn_cpu_exec x;
    struct weights w;
    exec_open(&x, isa, 2);
    weights_make(&w, k, OUT, IN, 3);
    float *a = random_activations((size_t)N * IN, 4), *want = dn_alloc0(N * OUT, 4), *got = dn_alloc0(N * OUT, 4);
    dn_cpu_matmul(&x, a, N, &w.m, NULL, want);
    a[ROW * IN + 67] = bad;
    dn_cpu_matmul(&x, a, N, &w.m, NULL, got);
    for (int i = 0; i < N * OUT; i++) {
        if (i / OUT != ROW)
            cr_assert(memcmp(&want[i], &got[i], 4) == 0, "%s: row %d poisoned", k->name, i / OUT);
        else if (is_int(k) || isnan(bad))
            cr_assert(isnan(got[i]), "%s: output %d is %g", k->name, i % OUT, got[i]);
        else
            cr_assert(!isfinite(got[i]), "%s: output %d is %g", k->name, i % OUT, got[i]);
    }
    free(a);
    free(want);
    free(got);
    weights_free(&w);
    exec_close(&x);
}

Test(matmul, a_bad_activation_stays_in_its_row)
{
    for (int isa = 0; isa <= (int)dn_isa_detect(); isa++)
        for (int k = 0; k < N_KINDS; k++) {
            poison((enum dn_isa)isa, &kinds[k], NAN);
            poison((enum dn_isa)isa, &kinds[k], INFINITY);
            poison((enum dn_isa)isa, &kinds[k], -INFINITY);
        }
}

/* Activations of 0, of one tiny and of one huge magnitude. */
Test(matmul, extreme_activations)
{
    enum { N = 4, OUT = 20, IN = 64 };
    static const float of_row[N] = {0, 1e-38F, 1e-30F, 1e30F};
    for (int isa = 0; isa <= (int)dn_isa_detect(); isa++) {
        struct dn_cpu_exec x;
        exec_open(&x, (enum dn_isa)isa, 1);
        for (int k = 0; k < N_KINDS; k++) {
            struct weights w;
            weights_make(&w, &kinds[k], OUT, IN, 3);
            float *a = random_activations((size_t)N * IN, 4), out[N * OUT];
            for (int i = 0; i < N * IN; i++)
                a[i] *= of_row[i / IN];
            dn_cpu_matmul(&x, a, N, &w.m, NULL, out);
            for (int i = 0; i < N * OUT; i++) {
                struct expected e = expect(&w, a + i / OUT * IN, (uint32_t)(i % OUT), 0);
                /* Below 2^-126 f32 has fewer bits; a group below 2^-100 counts as zero. */
                double absolute = IN * (of_row[i / OUT] < 1e-36 ? 0x1p-98 : 0x1p-149);
                cr_assert(fabs(out[i] - e.true_value) <= e.true_tolerance + absolute, "%s %s row %d: %g, expected %g",
                          kinds[k].name, dn_isa_name((enum dn_isa)isa), i / OUT, out[i], e.true_value);
            }
            free(a);
            weights_free(&w);
        }
        exec_close(&x);
    }
}

/* f16 scales: the smallest subnormal, the largest number, infinity, NaN, in one row each. */
Test(matmul, extreme_scales)
{
    enum { OUT = 18, IN = 96 };
    static const uint16_t of_row[] = {0x0001, 0x03ff, 0x7bff, 0x7c00, 0x7e00, 0x8001, 0x0000};
    for (int isa = 0; isa <= (int)dn_isa_detect(); isa++) {
        struct dn_cpu_exec x;
        exec_open(&x, (enum dn_isa)isa, 1);
        for (int k = 0; k < N_KINDS; k++) {
            if (!is_int(&kinds[k]) || kinds[k].scale_is_bf16)
                continue;
            struct weights w;
            weights_make(&w, &kinds[k], OUT, IN, 3);
            for (size_t r = 0; r < 7; r++)
                for (int g = 0; g < IN / 32; g++)
                    ((uint16_t *)w.buf[1])[r * (IN / 32) + (size_t)g] = of_row[r];
            weights_values(&w);
            cr_assert_eq(dn_cpu_matrix_pack(&w.m, 0, OUT, &w.rows), 0);
            float *a = random_activations(IN, 4), out[OUT];
            dn_cpu_matmul(&x, a, 1, &w.m, NULL, out);
            for (uint32_t r = 0; r < OUT; r++) {
                struct expected e = expect(&w, a, r, 0);
                if (r == 3 || r == 4)
                    cr_assert(!isfinite(out[r]), "%s row %u: %g", kinds[k].name, r, out[r]);
                else
                    cr_assert(fabs(out[r] - e.value) <= e.tolerance + 0x1p-140, "%s row %u: %g, expected %g",
                              kinds[k].name, r, out[r], e.value);
            }
            free(a);
            weights_free(&w);
        }
        exec_close(&x);
    }
}

/* Every code at column 5 of a row of its own; a NaN code makes NaN of its row alone. */
Test(matmul, all_256_codes_of_e4m3)
{
    enum { OUT = 256, IN = 130 };
    for (int isa = 0; isa <= (int)dn_isa_detect(); isa++) {
        struct dn_cpu_exec x;
        exec_open(&x, (enum dn_isa)isa, 2);
        for (uint32_t column = 5; column < IN; column += 124) { /* also in the second, shorter block */
            struct weights w;
            weights_make(&w, &kinds[1], OUT, IN, 3);
            memset(w.buf[0], 0, OUT * IN);
            for (size_t r = 0; r < OUT; r++)
                ((uint8_t *)w.buf[0])[r * IN + column] = (uint8_t)r;
            cr_assert_eq(dn_cpu_matrix_pack(&w.m, 0, OUT, &w.rows), 0);
            float a[2 * IN] = {0}, out[2 * OUT];
            a[column] = 1;
            a[IN + column] = -3;
            dn_cpu_matmul(&x, a, 2, &w.m, NULL, out);
            for (int i = 0; i < 2 * OUT; i++) {
                int code = i % OUT;
                float scale = w.rows.block_scale[code / 128 * 2 + (int)column / 128];
                double want = (double)dn_e4m3_to_f32((uint8_t)code) * (i < OUT ? 1 : -3) * scale;
                if ((code & 127) == 127)
                    cr_assert(isnan(out[i]), "code %d: %g", code, out[i]);
                else
                    cr_assert(fabs(out[i] - want) <= 2 * u * fabs(want), "code %d: %.9g, expected %.9g", code, out[i],
                              want);
            }
            weights_free(&w);
        }
        exec_close(&x);
    }
}
