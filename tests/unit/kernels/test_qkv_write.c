/* Per-head norm, rope and the paged KV write, against float64; the encoders bit by bit. */
#include "unit/kernels/oracle.h"

#include "kernels/cpu/rows.h"

struct shape {
    uint32_t n_heads, n_kv_heads, head_dim, page_tokens, rotary_dim;
    bool interleaved, norm;
};

static const struct shape shapes[] = {{3, 1, 64, 16, 64, false, false}, {8, 2, 128, 64, 128, true, true},
                                      {4, 4, 48, 16, 32, false, true},  {2, 1, 64, 16, 16, true, false},
                                      {6, 2, 20, 48, 20, false, true},  {2, 2, 64, 16, 0, false, true}};

enum { MAX_POSITION = 3000 };

static void make_rope(float *table, uint32_t rotary_dim)
{
    for (uint32_t p = 0; p < MAX_POSITION; p++) {
        for (uint32_t i = 0; i < rotary_dim / 2; i++) {
            double angle = p * pow(10000.0, -2.0 * i / rotary_dim);
            table[((size_t)p * rotary_dim / 2 + i) * 2] = (float)cos(angle);
            table[((size_t)p * rotary_dim / 2 + i) * 2 + 1] = (float)sin(angle);
        }
    }
}

/* One head; *size is the length of the largest pair, to which errors are relative. */
static void oracle_head(const struct shape *h, const float *x, const float *norm, const float *rope, double *out,
                        double *size)
{
    double sum = 0, scale = 1;
    uint32_t half = h->rotary_dim / 2;
    for (uint32_t i = 0; i < h->head_dim; i++)
        sum += (double)x[i] * (double)x[i];
    if (norm)
        scale = 1 / sqrt(sum / h->head_dim + (double)1e-6f);
    *size = 0;
    for (uint32_t i = 0; i < h->head_dim; i++) {
        out[i] = (double)x[i] * scale * (norm ? (double)norm[i] : 1.0);
        *size = fmax(*size, fabs(out[i]));
    }
    *size *= 1.5;
    for (uint32_t i = 0; i < half; i++) {
        uint32_t a = h->interleaved ? 2 * i : i, b = h->interleaved ? 2 * i + 1 : i + half;
        double p = out[a], q = out[b], c = (double)rope[2 * i], s = (double)rope[2 * i + 1];
        out[a] = p * c - q * s;
        out[b] = q * c + p * s;
    }
}

static void check_shape(const char *isa, unsigned n_threads, const struct shape *h)
{
    struct fix f;
    struct seq q[4];
    static const uint32_t part[4][2] = {{0, 1}, {5, 50}, {63, 2}, {2047, 18}}; /* position, tokens */
    fix_open(&f, isa, n_threads, 16);
    fix_arena(&f, 2, h->n_kv_heads, h->head_dim, h->page_tokens, 256);
    step_clear(&f);
    for (int i = 0; i < 4; i++) {
        seq_init(&f, q + i, i % 2 ? DN_KV_FP8 : DN_KV_BF16, part[i][0] + part[i][1]);
        step_add(&f, q + i, part[i][0], part[i][1]);
    }
    uint32_t n = f.s->n_tokens, dim = h->head_dim, width = (h->n_heads + 2 * h->n_kv_heads) * dim;
    float *x = fix_floats(&f, n * width), *before = fix_floats(&f, n * width), *rope = NULL;
    float *q_norm = fix_floats(&f, dim), *k_norm = fix_floats(&f, dim);
    if (h->rotary_dim) {
        rope = fix_floats(&f, (size_t)MAX_POSITION * h->rotary_dim);
        make_rope(rope, h->rotary_dim);
    }
    fill_normal(x, n * width, 2.0f);
    fill_normal(q_norm, dim, 1.0f);
    fill_normal(k_norm, dim, 1.0f);
    memcpy(before, x, n * width * sizeof *x);
    f.ops->step_begin(f.d, 1);
    f.ops->qkv_write(f.d, &(struct dn_qkv_write){x, h->n_heads, h->n_kv_heads, dim, h->norm ? q_norm : NULL,
                                                 h->norm ? k_norm : NULL, 1e-6f, rope, h->rotary_dim, h->interleaved,
                                                 &f.layout, f.arena, 1});
    double want[128], size, f32 = (dim / 2 + 8) * 0x1p-24; /* as test_norm; two products and a sum */
    for (uint32_t t = 0; t < n; t++) {
        const struct seq *s = q + f.s->token_seq[t];
        uint32_t position = (uint32_t)f.s->position[t];
        const float *table = rope ? rope + (size_t)position * h->rotary_dim : NULL;
        for (uint32_t head = 0; head < h->n_heads + h->n_kv_heads; head++) {
            const float *from = before + t * width + head * dim;
            bool is_k = head >= h->n_heads;
            oracle_head(h, from, !h->norm ? NULL : is_k ? k_norm : q_norm, table, want, &size);
            double amax = 0;
            for (uint32_t i = 0; i < dim; i++)
                amax = fmax(amax, fabs(want[i]));
            for (uint32_t i = 0; i < dim; i++) {
                double got =
                    is_k ? kv_get(&f, s, position, 1, head - h->n_heads, 0, i) : (double)x[t * width + head * dim + i];
                /* half a unit of bf16 (8 bits); of e4m3 (4 bits) or of its smallest step, amax / 448 / 2^9 */
                double format = !is_k                     ? 0
                                : s->format == DN_KV_BF16 ? fabs(want[i]) * 0x1p-8 * 1.01
                                                          : fmax(fabs(want[i]) * 0x1p-4, amax / 448 * 0x1p-10) * 1.01;
                cr_assert(fabs(got - want[i]) <= format + f32 * size,
                          "%s: head %u of %u, position %u, value %u: %g, not %g", isa, head, h->n_heads, position, i,
                          got, want[i]);
            }
        }
        for (uint32_t head = 0; head < h->n_kv_heads; head++) {
            const float *from = before + t * width + (h->n_heads + h->n_kv_heads + head) * dim;
            double amax = 0;
            for (uint32_t i = 0; i < dim; i++)
                amax = fmax(amax, fabs((double)from[i]));
            for (uint32_t i = 0; i < dim; i++) {
                double got = kv_get(&f, s, position, 1, head, 1, i), v = (double)from[i];
                double format = s->format == DN_KV_BF16 ? fabs(v) * 0x1p-8 * 1.01
                                                        : fmax(fabs(v) * 0x1p-4, amax / 448 * 0x1p-10) * 1.01;
                cr_assert(fabs(got - v) <= format, "%s: V head %u, position %u, value %u: %g, not %g", isa, head,
                          position, i, got, v);
                cr_assert_eq(x[t * width + (h->n_heads + h->n_kv_heads + head) * dim + i], from[i], "v was changed");
            }
        }
    }
    /* Nothing else was written: all bytes that no token of the step owns are still 0xff. */
    uint64_t written = 0, want_bytes = 0;
    for (uint64_t b = 0; b < f.layout.slab_bytes * f.n_slabs; b++)
        written += f.arena[b] != 0xff;
    for (int i = 0; i < 4; i++)
        want_bytes += (uint64_t)part[i][1] * h->n_kv_heads * (q[i].format == DN_KV_BF16 ? 4 * dim : 2 * dim + 8);
    cr_assert(written <= want_bytes && written > want_bytes * 95 / 100, "%lu bytes changed, of %lu", written,
              want_bytes);
    fix_close(&f);
}

Test(qkv_write, is_within_rounding_of_float64_and_writes_nothing_else)
{
    FOR_EACH_ISA(isa)
    {
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
            check_shape(isa, 1 + i % 2, shapes + i);
    }
}

Test(qkv_write, of_a_bad_sequence_leaves_its_pages_alone)
{
    struct fix f;
    struct seq a, b;
    uint64_t table[512] = {0};
    fix_open(&f, NULL, 2, 16);
    fix_arena(&f, 1, 1, 64, 16, 32);
    seq_init(&f, &a, DN_KV_BF16, 30);
    seq_init(&f, &b, DN_KV_FP8, 30);
    step_clear(&f);
    step_add(&f, &a, 0, 30);
    step_add(&f, &b, 0, 30);
    f.s->check[0] = 1;
    f.s->page[0] = UINT32_MAX; /* would crash if it was used */
    float *x = fix_floats(&f, 60 * 192);
    fill_normal(x, 60 * 192, 1.0f);
    f.ops->step_begin(f.d, 1);
    f.ops->check_tags(f.d, &(struct dn_check_tags){table, 512, f.layout.page_tokens});
    f.ops->qkv_write(
        f.d, &(struct dn_qkv_write){
                 .qkv = x, .n_heads = 1, .n_kv_heads = 1, .head_dim = 64, .layout = &f.layout, .arena = f.arena});
    for (uint32_t t = 0; t < 30; t++) {
        for (uint32_t i = 0; i < 64; i++) {
            cr_assert(isnan(kv_get(&f, &a, t, 0, 0, 0, i)), "a bad sequence was written to");
            cr_assert(!isnan(kv_get(&f, &b, t, 0, 0, 0, i)));
        }
    }
    fix_close(&f);
}

/* ---- Encoders ---- */

static const struct dn_row_ops *row_ops(const char *isa)
{
    enum dn_isa id;
    cr_assert_eq(dn_isa_parse(isa, &id, NULL), 0);
    return dn_row_ops(id);
}

/* The nearest e4m3 code to x, the even one when two are as near; by trying all. */
static uint8_t nearest_e4m3(double x)
{
    uint8_t best = 0;
    for (int c = 1; c < 0x7f; c++) {
        double d = fabs(fabs(x) - e4m3_value((uint8_t)c)), e = fabs(fabs(x) - e4m3_value(best));
        if (d < e || (d == e && c % 2 == 0))
            best = (uint8_t)c;
    }
    return signbit(x) ? best | 0x80 : best;
}

Test(qkv_write, fp8_codes_are_the_nearest)
{
    FOR_EACH_ISA(isa)
    {
        const struct dn_row_ops *ops = row_ops(isa);
        float x[64], scale;
        uint8_t out[64];
        for (int round = 0; round < 3000; round++) {
            /* The largest value is 448 times a power of two, so that scaling is exact and ties are ties. */
            float unit = ldexpf(1.0f, (int)rng_below(40) - 20);
            for (int i = 0; i < 64; i++) {
                float m = round % 3 == 0 ? ldexpf((float)rng_below(512), -10)
                                         : ldexpf((float)rng_below(64), (int)rng_below(12) - 9);
                x[i] = (rng_below(2) ? -1.0f : 1.0f) * (m < 448.0f ? m : 448.0f) * unit;
            }
            x[round % 64] = 448.0f * unit;
            ops->encode_fp8(x, 64, out, &scale);
            cr_assert_eq(scale, unit);
            for (int i = 0; i < 64; i++)
                cr_assert_eq(out[i], nearest_e4m3((double)x[i] / (double)unit), "%s: %g is %02x, not %02x", isa,
                             (double)(x[i] / unit), out[i], nearest_e4m3((double)x[i] / (double)unit));
        }
    }
}

Test(qkv_write, fp8_extremes)
{
    FOR_EACH_ISA(isa)
    {
        const struct dn_row_ops *ops = row_ops(isa);
        for (uint32_t n = 1; n < 70; n++) {
            float x[70], scale;
            uint8_t out[71];
            memset(x, 0, sizeof x);
            out[n] = 0xa5;
            ops->encode_fp8(x, n, out, &scale);
            cr_assert_eq(scale, 0.0f);
            for (uint32_t i = 0; i < n; i++)
                cr_assert_eq(out[i] & 0x7f, 0);
            fill_normal(x, n, 1.0f);
            x[n / 2] = NAN;
            ops->encode_fp8(x, n, out, &scale);
            cr_assert(isnan(scale), "readers see a NaN by the scale");
            cr_assert_eq(out[n / 2] & 0x7f, 0x7f);
            x[n / 2] = -INFINITY;
            ops->encode_fp8(x, n, out, &scale);
            cr_assert(scale > 0.0f && isfinite(scale));
            cr_assert_eq(out[n / 2], 0xfe, "saturates");
            x[n / 2] = 1e-40f; /* only denormals: zeros, and no infinity on the way */
            for (uint32_t i = 0; i < n; i++)
                x[i] = 1e-40f;
            ops->encode_fp8(x, n, out, &scale);
            cr_assert_eq(scale, 0.0f);
            for (uint32_t i = 0; i < n; i++)
                cr_assert_eq(out[i], 0);
            for (uint32_t i = 0; i < n; i++)
                x[i] = i % 2 ? 0x1.fffffep127f : -0x1.fffffep127f;
            ops->encode_fp8(x, n, out, &scale);
            cr_assert(isfinite(scale));
            for (uint32_t i = 0; i < n; i++)
                cr_assert_eq(out[i] & 0x7f, 0x7e);
            cr_assert_eq(out[n], 0xa5, "wrote past the end");
        }
    }
}

Test(qkv_write, bf16_rounds_to_nearest_even_and_keeps_nan)
{
    FOR_EACH_ISA(isa)
    {
        const struct dn_row_ops *ops = row_ops(isa);
        float x[37];
        uint16_t out[38];
        for (int round = 0; round < 20000; round++) {
            for (int i = 0; i < 37; i++) {
                uint32_t u = (uint32_t)rng();
                u = round % 2 ? (u & 0xffff8000u) : u; /* exact ties */
                memcpy(x + i, &u, sizeof u);
            }
            ops->encode_bf16(x, 37, out);
            for (int i = 0; i < 37; i++) {
                double v = (double)x[i], got = bf16_value(out[i]);
                if (isnan(v)) {
                    cr_assert(isnan(got));
                    continue;
                }
                uint32_t u;
                memcpy(&u, x + i, sizeof u);
                double low = bf16_value((uint16_t)(u >> 16)), high = bf16_value((uint16_t)((u >> 16) + 1));
                uint32_t rest = u & 0xffff;
                double want = rest < 0x8000 || (rest == 0x8000 && !(u & 0x10000)) ? low : high;
                cr_assert(got == want, "%s: %08x is %04x", isa, u, out[i]);
            }
        }
    }
}
