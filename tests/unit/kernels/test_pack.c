#include "kernels/cpu/pack_quantise.h"
#include "unit/kernels/matmul_fixture.h"

/* ---- Numbers ---- */

static uint32_t bits(float f)
{
    return dn_f32_bits(f);
}

Test(pack_numbers, every_code_survives_the_way_through_f32)
{
    for (uint32_t h = 0; h < 65536; h++) {
        float f = dn_f16_to_f32((uint16_t)h), b = dn_bf16_to_f32((uint16_t)h);
        cr_assert(isnan(f) ? isnan(dn_f16_to_f32(dn_f32_to_f16(f))) : dn_f32_to_f16(f) == h, "f16 %04x", h);
        cr_assert(isnan(b) ? isnan(dn_bf16_to_f32(dn_f32_to_bf16(b))) : dn_f32_to_bf16(b) == h, "bf16 %04x", h);
        cr_assert_eq(isnan(f), (h & 0x7fff) > 0x7c00);
    }
    for (uint32_t q = 0; q < 256; q++)
        cr_assert_eq(dn_f32_to_e4m3(dn_e4m3_to_f32((uint8_t)q)), q, "e4m3 %02x", q);
}

Test(pack_numbers, known_values)
{
    cr_assert_eq(dn_f16_to_f32(0x3c00), 1);
    cr_assert_eq(dn_f16_to_f32(0x0001), 0x1p-24f);
    cr_assert_eq(dn_f16_to_f32(0xfbff), -65504);
    cr_assert_eq(dn_f16_to_f32(0x7c00), INFINITY);
    cr_assert_eq(dn_f32_to_f16(65519.996F), 0x7bff);
    cr_assert_eq(dn_f32_to_f16(65520), 0x7c00);
    cr_assert_eq(dn_f32_to_f16(0x1p-25f), 0, "a tie goes to even");
    cr_assert_eq(dn_f32_to_f16(0x1.000002p-25f), 1);
    cr_assert_eq(dn_e4m3_to_f32(0x01), 0x1p-9f);
    cr_assert_eq(dn_e4m3_to_f32(0x08), 0x1p-6f);
    cr_assert_eq(dn_e4m3_to_f32(0x7e), 448);
    cr_assert(isnan(dn_e4m3_to_f32(0x7f)) && isnan(dn_e4m3_to_f32(0xff)));
    cr_assert_eq(dn_f32_to_e4m3(464), 0x7e, "saturates");
    cr_assert_eq(dn_f32_to_e4m3(-1e30F), 0xfe);
    cr_assert_eq(dn_f32_to_e4m3(INFINITY), 0x7e);
    cr_assert_eq(dn_f32_to_e4m3(NAN) & 0x7f, 0x7f);
    cr_assert_eq(dn_f32_to_e4m3(0x1p-10f), 0, "a tie goes to even");
    cr_assert_eq(dn_f32_to_e4m3(0x1.8p-9f), 2, "a tie goes to even");
}

/* No neighbouring code is nearer, and of two equally near the even one is taken. */
static void check_nearest(float x, uint32_t code, uint32_t top, float (*decode)(uint32_t), const char *what)
{
    uint32_t sign = code > top ? code - code % (top + 1) : 0, c = code - sign;
    double d = fabs((double)decode(code) - x);
    if (c > 0) {
        double below = fabs((double)decode(code - 1) - x);
        cr_assert(d < below || (d == below && c % 2 == 0), "%s of %a: %x", what, x, code);
    }
    if (c < top && isfinite(decode(code + 1))) {
        double above = fabs((double)decode(code + 1) - x);
        cr_assert(d < above || (d == above && c % 2 == 0), "%s of %a: %x", what, x, code);
    }
}

static float decode_f16(uint32_t h)
{
    return dn_f16_to_f32((uint16_t)h);
}

static float decode_bf16(uint32_t h)
{
    return dn_bf16_to_f32((uint16_t)h);
}

static float decode_e4m3(uint32_t q)
{
    return dn_e4m3_to_f32((uint8_t)q);
}

Test(pack_numbers, round_to_the_nearest)
{
    uint64_t seed = 9;
    for (int i = 0; i < 300000; i++) {
        /* Exponents around all three ranges, and few mantissa bits now and then, which makes ties. */
        uint64_t r = rnd(&seed);
        float x =
            ldexpf(1 + (float)((r >> 8) & 0x7fffff & (r & 1 ? ~0u : 0x7c0000u)) * 0x1p-23f, (int)(r >> 40) % 48 - 28);
        x = r & 2 ? -x : x;
        if (fabsf(x) < 65504)
            check_nearest(x, dn_f32_to_f16(x), 0x7fff, decode_f16, "f16");
        check_nearest(x, dn_f32_to_bf16(x), 0x7fff, decode_bf16, "bf16");
        if (fabsf(x) <= 448)
            check_nearest(x, dn_f32_to_e4m3(x), 0x7f, decode_e4m3, "e4m3");
    }
}

/* ---- Lossless ---- */

Test(pack, a_repacked_row_has_the_bits_of_its_source)
{
    static const uint32_t outs[] = {1, 16, 17, 130, 300}, int_ins[] = {32, 576}, float_ins[] = {1, 31, 130, 576};
    for (int k = 0; k < N_KINDS; k++)
        for (int o = 0; o < 5; o++)
            for (int i = 0; i < (is_int(&kinds[k]) ? 2 : 4); i++) {
                struct weights w;
                uint32_t n_in = is_int(&kinds[k]) ? int_ins[i] : float_ins[i];
                weights_make(&w, &kinds[k], outs[o], n_in, 5);
                float *row = dn_alloc0(n_in, sizeof *row);
                for (uint32_t r = 0; r < outs[o]; r++) {
                    dn_cpu_matrix_row(&w.m, r, row);
                    for (uint32_t c = 0; c < n_in; c++) /* the product is exact in double, so that this rounds once */
                        cr_assert_eq(bits(row[c]), bits((float)w.value[(size_t)r * n_in + c]), "%s %u,%u of %u x %u",
                                     kinds[k].name, r, c, outs[o], n_in);
                }
                free(row);
                weights_free(&w);
            }
}

Test(pack, every_code_and_every_scale_survives)
{
    enum { OUT = 128, IN = 1024 }; /* OUT * IN / 32 = 4096 scales a round */
    for (int k = 0; k < N_KINDS; k++) {
        if (!is_int(&kinds[k]))
            continue;
        struct weights w;
        weights_make(&w, &kinds[k], OUT, IN, 5);
        float row[IN];
        for (uint32_t round = 0; round < 16; round++) {
            uint16_t *s = w.buf[1], *off = w.buf[2];
            for (uint32_t i = 0; i < OUT * IN / 32; i++)
                s[i] = (uint16_t)(round * 4096 + i), off[i] = 0;
            cr_assert_eq(dn_cpu_matrix_pack(&w.m, 0, OUT, &w.rows), 0);
            weights_values(&w);
            for (uint32_t r = 0; r < OUT; r++) {
                dn_cpu_matrix_row(&w.m, r, row);
                for (uint32_t c = 0; c < IN; c++) {
                    float want = (float)w.value[(size_t)r * IN + c];
                    cr_assert(row[c] == want || (isnan(row[c]) && isnan(want)), "%s: %a, expected %a", kinds[k].name,
                              row[c], want);
                }
            }
        }
        weights_free(&w);
    }
}

/* As the loader does it: slices of 128 rows, in any order, over what was there before. */
Test(pack, slices_give_the_same_bytes_as_the_whole)
{
    enum { OUT = 300, IN = 96 };
    for (int k = 0; k < N_KINDS; k++) {
        struct weights w;
        weights_make(&w, &kinds[k], OUT, IN, 5);
        uint8_t *whole = dn_alloc(w.m.bytes);
        memcpy(whole, w.m.data, w.m.bytes);
        memset(w.m.data, 0x5a, w.m.bytes);
        for (int at = 256; at >= 0; at -= 128) {
            struct dn_rows r = w.rows;
            size_t off = (size_t)at * IN, group = off / 32;
            r.bf16 = r.bf16 ? r.bf16 + off : NULL;
            r.fp8 = r.fp8 ? r.fp8 + off : NULL;
            r.q8 = r.q8 ? r.q8 + off : NULL;
            r.q4 = r.q4 ? r.q4 + off / 2 : NULL;
            r.scale16 = r.scale16 ? r.scale16 + group : NULL;
            r.offset16 = r.offset16 ? r.offset16 + group : NULL;
            r.block_scale = r.block_scale ? r.block_scale + at / 128 : NULL;
            cr_assert_eq(dn_cpu_matrix_pack(&w.m, (uint32_t)at, at == 256 ? OUT - 256 : 128, &r), 0);
        }
        float *one = dn_alloc0(IN, 4), *two = dn_alloc0(IN, 4);
        struct dn_matrix m = w.m;
        for (uint32_t r = 0; r < OUT; r++) {
            m.data = whole;
            dn_cpu_matrix_row(&m, r, one);
            dn_cpu_matrix_row(&w.m, r, two);
            cr_assert(memcmp(one, two, IN * 4) == 0, "%s row %u", kinds[k].name, r);
        }
        free(one);
        free(two);
        free(whole);
        weights_free(&w);
    }
}

/* ---- Rounding ---- */

static double rms(const float x[32], const float y[32])
{
    double s = 0;
    for (int i = 0; i < 32; i++)
        s += ((double)x[i] - y[i]) * ((double)x[i] - y[i]);
    return sqrt(s / 32);
}

static void random_group(float x[32], uint64_t *seed, float centre)
{
    for (int i = 0; i < 32; i++)
        x[i] = 0.05F * (rnd_normal(seed) + centre);
}

Test(pack_quantise, int8_errs_by_at_most_half_a_step)
{
    uint64_t seed = 4;
    for (int round = 0; round < 2000; round++) {
        float x[32];
        int8_t q[32];
        uint16_t s16;
        random_group(x, &seed, 0);
        dn_quantise_int8(x, round & 1, q, &s16);
        float s = dn_scale16_to_f32(s16, round & 1);
        /* The scale was rounded to 11 or 8 bits: the largest may lie 127 * 2^-12 or 2^-9 steps beyond code 127. */
        double most = 0.5 + 127 * (round & 1 ? 0x1p-9 : 0x1p-12) + 1e-4;
        for (int i = 0; i < 32; i++)
            cr_assert(fabs(x[i] - (double)q[i] * s) <= most * s, "%g as %d * %g", x[i], q[i], s);
    }
}

/* What the search must beat: the range of the group cut in 15 steps, nothing more. */
static double naive_int4_rms(const float x[32])
{
    float low = x[0], high = x[0], y[32];
    for (int i = 1; i < 32; i++) {
        low = fminf(low, x[i]);
        high = fmaxf(high, x[i]);
    }
    float s = dn_f16_to_f32(dn_f32_to_f16((high - low) / 15)), o = dn_f16_to_f32(dn_f32_to_f16(low));
    for (int i = 0; i < 32; i++)
        y[i] = fmaxf(0, fminf(15, rintf((x[i] - o) / s))) * s + o;
    return rms(x, y);
}

static double naive_int4_sym_rms(const float x[32])
{
    float top = 0, y[32];
    for (int i = 0; i < 32; i++)
        top = fabsf(x[i]) > fabsf(top) ? x[i] : top;
    float s = dn_f16_to_f32(dn_f32_to_f16(top / -8));
    for (int i = 0; i < 32; i++)
        y[i] = fmaxf(-8, fminf(7, rintf(x[i] / s))) * s;
    return rms(x, y);
}

Test(pack_quantise, int4_is_never_worse_than_the_plain_range_and_better_on_average)
{
    uint64_t seed = 4;
    double sum[4] = {0};
    for (int round = 0; round < 4000; round++) {
        float x[32], y[32];
        uint8_t q[32];
        uint16_t s, o;
        random_group(x, &seed, (float)(round % 3 - 1) * 2);
        dn_quantise_int4(x, false, q, &s, &o);
        for (int i = 0; i < 32; i++)
            y[i] = (float)q[i] * dn_f16_to_f32(s) + dn_f16_to_f32(o);
        double got = rms(x, y), naive = naive_int4_rms(x);
        cr_assert(got <= naive * (1 + 1e-5), "%g, plain %g", got, naive);
        sum[0] += got, sum[1] += naive;
        dn_quantise_int4_sym(x, false, q, &s);
        for (int i = 0; i < 32; i++) {
            cr_assert(q[i] <= 15);
            y[i] = (float)(q[i] - 8) * dn_f16_to_f32(s);
        }
        got = rms(x, y), naive = naive_int4_sym_rms(x);
        cr_assert(got <= naive * (1 + 1e-5), "%g, plain %g", got, naive);
        sum[2] += got, sum[3] += naive;
    }
    printf("int4: RMS %.3f of the plain range; symmetric %.3f\n", sum[0] / sum[1], sum[2] / sum[3]);
    cr_assert(sum[0] < 0.95 * sum[1] && sum[2] < 0.95 * sum[3]);
}

Test(pack_quantise, groups_of_one_value_and_of_zeros)
{
    float x[32];
    uint8_t q[32];
    int8_t q8[32];
    uint16_t s, o;
    for (int k = 0; k < 4; k++) {
        float v = (float[]){0, 0.75F, -3, 60000}[k];
        for (int i = 0; i < 32; i++)
            x[i] = v;
        dn_quantise_int4(x, false, q, &s, &o);
        cr_assert(fabsf((float)q[5] * dn_f16_to_f32(s) + dn_f16_to_f32(o) - v) <= 0x1p-11f * fabsf(v), "%g", v);
        dn_quantise_int4_sym(x, false, q, &s);
        cr_assert(fabsf((float)(q[5] - 8) * dn_f16_to_f32(s) - v) <= 0x1p-11f * fabsf(v), "%g", v);
        dn_quantise_int8(x, false, q8, &s);
        cr_assert(fabsf((float)q8[5] * dn_f16_to_f32(s) - v) <= 0x1p-8f * fabsf(v), "%g", v);
    }
}

/* Values beyond the range of an f16 scale are clamped, never turned into infinities. */
Test(pack_quantise, huge_values_stay_finite)
{
    float x[32];
    uint8_t q[32];
    int8_t q8[32];
    uint16_t s, o;
    for (int i = 0; i < 32; i++)
        x[i] = (float)(i - 16) * 1e37F;
    dn_quantise_int4(x, false, q, &s, &o);
    cr_assert(isfinite(dn_f16_to_f32(s)) && isfinite(dn_f16_to_f32(o)));
    dn_quantise_int4_sym(x, false, q, &s);
    cr_assert(isfinite(dn_f16_to_f32(s)));
    dn_quantise_int8(x, false, q8, &s);
    cr_assert(isfinite(dn_f16_to_f32(s)));
}

Test(pack_quantise, a_group_with_a_nan_or_an_infinity_is_nan)
{
    float x[32];
    uint8_t q[32];
    int8_t q8[32];
    uint16_t s, o;
    for (int k = 0; k < 6; k++) {
        memset(x, 0, sizeof x);
        x[17] = k % 3 == 0 ? NAN : k % 3 == 1 ? INFINITY : -INFINITY;
        bool is_bf16 = k > 2;
        dn_quantise_int4(x, is_bf16, q, &s, &o);
        cr_assert(isnan(dn_scale16_to_f32(s, is_bf16)) && isnan(dn_scale16_to_f32(o, is_bf16)));
        dn_quantise_int4_sym(x, is_bf16, q, &s);
        cr_assert(isnan(dn_scale16_to_f32(s, is_bf16)));
        dn_quantise_int8(x, is_bf16, q8, &s);
        cr_assert(isnan(dn_scale16_to_f32(s, is_bf16)));
        cr_assert(isnan(dn_e4m3_to_f32(dn_quantise_fp8(x[17], 1))));
    }
}

/* ---- From floats and from other formats ---- */

/* The largest error of one value, by format, relative to the largest value of its group or block. */
static double step_of(const struct kind *k)
{
    switch (k->format) {
    case DN_W_BF16:
        return 0x1p-8;
    case DN_W_FP8:
        return 0x1p-4 / 1.75; /* half an ulp at 448 = 1.75 * 2^8 is 16 */
    case DN_W_INT8:
        return 0.5 / 127 + 0x1p-9;
    default:
        return 1.0 / 7; /* a whole step: the search may clip */
    }
}

static void check_from_f32(const struct kind *k, bool as_bf16)
{
    enum { OUT = 200, IN = 160 };
    struct weights w;
    weights_alloc(&w, k, OUT, IN);
    float *x = dn_alloc0((size_t)OUT * IN, sizeof *x), row[IN];
    uint16_t *h = dn_alloc0((size_t)OUT * IN, sizeof *h);
    uint64_t seed = 12;
    float top = 0;
    for (size_t i = 0; i < (size_t)OUT * IN; i++) {
        h[i] = dn_f32_to_bf16(0.1F * rnd_normal(&seed));
        x[i] = dn_bf16_to_f32(h[i]);
        top = fmaxf(top, fabsf(x[i]));
    }
    struct dn_rows rows = {.f32 = as_bf16 ? NULL : x, .bf16 = as_bf16 ? h : NULL};
    cr_assert_eq(dn_cpu_matrix_pack(&w.m, 0, OUT, &rows), 0);
    double most = 0;
    for (uint32_t r = 0; r < OUT; r++) {
        dn_cpu_matrix_row(&w.m, r, row);
        for (uint32_t c = 0; c < IN; c++)
            most = fmax(most, fabs((double)row[c] - x[r * IN + c]));
    }
    cr_assert(most <= step_of(k) * top, "%s: error %g, largest value %g", k->name, most, top);
    cr_assert(k->format != DN_W_BF16 || most == 0);
    free(x);
    free(h);
    weights_free(&w);
}

Test(pack, floats_are_rounded_to_each_format)
{
    for (int k = 0; k < N_KINDS; k++) {
        check_from_f32(&kinds[k], false);
        check_from_f32(&kinds[k], true);
    }
}

Test(pack, each_format_may_be_made_of_each_other)
{
    enum { OUT = 130, IN = 288 };
    for (int from = 0; from < N_KINDS; from++)
        for (int to = 0; to < N_KINDS; to++) {
            struct weights w, v;
            weights_make(&w, &kinds[from], OUT, IN, 3);
            struct kind k = kinds[to];
            k.scale_is_bf16 = kinds[from].scale_is_bf16; /* rows carry scales of the matrix's type */
            weights_alloc(&v, &k, OUT, IN);
            cr_assert_eq(dn_cpu_matrix_pack(&v.m, 0, OUT, &w.rows), 0, "%s to %s", kinds[from].name, k.name);
            float row[IN];
            double most = 0, top = 0;
            for (uint32_t r = 0; r < OUT; r++) {
                dn_cpu_matrix_row(&v.m, r, row);
                for (uint32_t c = 0; c < IN; c++) {
                    top = fmax(top, fabs(w.value[r * IN + c]));
                    most = fmax(most, fabs(row[c] - w.value[r * IN + c]));
                }
            }
            cr_assert(most <= step_of(&k) * top * 1.01, "%s to %s: error %g, largest value %g", kinds[from].name,
                      k.name, most, top);
            weights_free(&w);
            weights_free(&v);
        }
}

Test(pack, fp8_puts_the_largest_value_of_a_block_on_448)
{
    enum { OUT = 140, IN = 200 };
    struct weights w;
    weights_alloc(&w, &kinds[1], OUT, IN);
    float *x = dn_alloc0(OUT * IN, sizeof *x), row[IN];
    for (int i = 0; i < OUT * IN; i++)
        x[i] = 0.25F;
    x[130 * IN + 150] = -7; /* in the last, incomplete block */
    struct dn_rows rows = {.f32 = x};
    cr_assert_eq(dn_cpu_matrix_pack(&w.m, 0, OUT, &rows), 0);
    dn_cpu_matrix_row(&w.m, 130, row);
    cr_assert_eq(row[150], -7);
    cr_assert_eq(row[0], 0.25F);
    dn_cpu_matrix_row(&w.m, 3, row);
    cr_assert_eq(row[0], 0.25F);
    free(x);
    weights_free(&w);
}

/* ---- Errors ---- */

Test(pack, says_no_to_what_it_cannot_pack)
{
    struct dn_matrix m = {.format = DN_W_INT4, .n_out = 8, .n_in = 48};
    cr_assert_eq(dn_cpu_matrix_bytes(&m), 0, "groups of 32");
    m.format = DN_W_FP8;
    cr_assert_neq(dn_cpu_matrix_bytes(&m), 0);
    m.n_in = 0;
    cr_assert_eq(dn_cpu_matrix_bytes(&m), 0);
    m.n_in = DN_CPU_MAX_N_IN + 1;
    cr_assert_eq(dn_cpu_matrix_bytes(&m), 0);
    m = (struct dn_matrix){.format = DN_W_FORMATS, .n_out = 8, .n_in = 48};
    cr_assert_eq(dn_cpu_matrix_bytes(&m), 0);

    struct weights w;
    weights_make(&w, &kinds[1], 300, 64, 3);
    float x[64] = {0};
    struct dn_rows f32 = {.f32 = x}, two = w.rows, none = {0}, half = {.fp8 = w.rows.fp8}, extra = w.rows;
    two.f32 = x;
    extra.offset16 = (const uint16_t *)x;
    cr_assert_eq(dn_cpu_matrix_pack(&w.m, 0, 300, &none), -DN_INVALID_VALUE);
    cr_assert_eq(dn_cpu_matrix_pack(&w.m, 0, 300, &two), -DN_INVALID_VALUE);
    cr_assert_eq(dn_cpu_matrix_pack(&w.m, 0, 300, &half), -DN_INVALID_VALUE);
    cr_assert_eq(dn_cpu_matrix_pack(&w.m, 0, 300, &extra), -DN_INVALID_VALUE);
    cr_assert_eq(dn_cpu_matrix_pack(&w.m, 0, 301, &w.rows), -DN_INVALID_VALUE);
    cr_assert_eq(dn_cpu_matrix_pack(&w.m, 1, 299, &f32), -DN_INVALID_VALUE, "a block of 128 rows cut");
    cr_assert_eq(dn_cpu_matrix_pack(&w.m, 128, 100, &f32), -DN_INVALID_VALUE);
    cr_assert_eq(dn_cpu_matrix_pack(&w.m, 0xffffffff, 2, &f32), -DN_INVALID_VALUE);
    weights_free(&w);
}

/* ---- Groups ---- */

/* The groups of a matrix lie one after the other: the bytes are those of a matrix with all their rows. */
Test(pack, groups_give_the_bytes_of_one_matrix)
{
    for (size_t k = 0; k < N_KINDS; k++) {
        struct weights one, parts;
        weights_make(&one, kinds + k, 3 * 128, 96, 5);
        weights_make(&parts, kinds + k, 3 * 128, 96, 5);
        parts.m.n_groups = 3;
        parts.m.n_out = 128;
        cr_assert_eq(dn_cpu_matrix_bytes(&parts.m), one.m.bytes);
        memset(parts.m.data, 0xa5, parts.m.bytes); /* as weights_make() does: padding is left alone */
        /* By group, the last one first. */
        for (uint32_t g = 3; g-- > 0;) {
            struct dn_rows r = parts.rows;
            size_t at = (size_t)g * 128 * 96;
            r.bf16 = r.bf16 ? r.bf16 + at : NULL;
            r.q4 = r.q4 ? r.q4 + at / 2 : NULL;
            r.q8 = r.q8 ? r.q8 + at : NULL;
            r.fp8 = r.fp8 ? r.fp8 + at : NULL;
            r.scale16 = r.scale16 ? r.scale16 + at / 32 : NULL;
            r.offset16 = r.offset16 ? r.offset16 + at / 32 : NULL;
            r.block_scale = r.block_scale ? r.block_scale + g : NULL;
            cr_assert_eq(dn_cpu_matrix_pack(&parts.m, g * 128, 128, &r), 0, "%s", kinds[k].name);
        }
        cr_assert(memcmp(one.m.data, parts.m.data, one.m.bytes) == 0, "%s", kinds[k].name);
        float a[96], b[96];
        for (uint32_t row = 0; row < 3 * 128; row += 37) {
            dn_cpu_matrix_row(&one.m, row, a);
            dn_cpu_matrix_row(&parts.m, row, b);
            cr_assert(memcmp(a, b, sizeof a) == 0);
        }
        cr_assert_lt(dn_cpu_matrix_pack(&parts.m, 2 * 128, 2 * 128, &parts.rows), 0, "behind the last group");
        weights_free(&one);
        weights_free(&parts);
    }
}

Test(pack, groups_are_whole_blocks)
{
    struct dn_matrix m = {.format = DN_W_BF16, .n_out = 64, .n_in = 32, .n_groups = 5};
    cr_assert_eq(dn_cpu_matrix_bytes(&m), 5 * 64 * 32 * 2);
    m.format = DN_W_FP8; /* a scale may not be of two groups */
    cr_assert_eq(dn_cpu_matrix_bytes(&m), 0);
    m.n_out = 128;
    cr_assert_neq(dn_cpu_matrix_bytes(&m), 0);
    m.format = DN_W_INT4;
    m.n_out = 80;
    cr_assert_eq(dn_cpu_matrix_bytes(&m), 0);
    m.n_groups = 1;
    cr_assert_neq(dn_cpu_matrix_bytes(&m), 0);
    m.n_groups = 1 << 20;
    m.n_out = 1 << 13; /* 2^33 rows */
    cr_assert_eq(dn_cpu_matrix_bytes(&m), 0);
}
