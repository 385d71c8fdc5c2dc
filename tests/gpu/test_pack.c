/* Packed weights on the GPU: every value is where weights.cuh says, whatever pieces the rows came in.
 *
 * The packed bytes are downloaded and read by a second statement of the layout, unpack() below. Lossless families must
 * come back as they were; what goes through f32 must equal the CPU backend's numbers (both hold q * scale exactly in
 * f32, or q * scale + offset with one rounding more or less).
 */
#include "gpu.h"
#include "kernels/cpu/matmul.h"

#include <pthread.h>

static float half_to_f32(uint16_t h)
{
    int e = h >> 10 & 31, m = h & 1023;
    double v = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return (float)(h & 0x8000 ? -v : v);
}
static float scale16(const struct dn_matrix *m, uint16_t s)
{
    return m->scale_is_bf16 ? bf16_to_f32(s) : half_to_f32(s);
}

static size_t tile_bytes(const struct dn_matrix *m)
{
    return m->format == DN_W_BF16   ? 16384
           : m->format == DN_W_FP8  ? 8192 + 16
           : m->format == DN_W_INT8 ? 8192 + 512
                                    : 4096 + (m->symmetric ? 512 : 1024);
}

/* Value [row][k] of a packed matrix. */
static double unpack(const struct dn_matrix *m, const uint8_t *packed, uint32_t row, uint32_t k)
{
    size_t tiles = (m->n_in + 127) / 128;
    const uint8_t *tile = packed + ((row / 64) * tiles + k / 128) * tile_bytes(m);
    uint32_t strip = row % 64 / 16, g = row % 8, upper = row % 16 / 8, c = k % 128, step = c / 16;
    uint32_t lane = g * 4 + c % 8 / 2, pair = upper + 2 * (c % 16 / 8), odd = c % 2;
    if (m->format == DN_W_BF16)
        return bf16_to_f32(((const uint16_t *)tile)[(((strip * 8 + step) * 32 + lane) * 4 + pair) * 2 + odd]);
    if (m->format == DN_W_INT4) {
        const uint32_t *words = (const uint32_t *)tile;
        uint32_t q = words[((strip * 2 + step / 4) * 32 + lane) * 4 + step % 4] >> (4 * pair + 16 * odd) & 15;
        const uint16_t *s = (const uint16_t *)(tile + 4096) + ((strip * 8 + g) * 4 + c / 32) * 2 + upper;
        return m->symmetric ? ((double)q - 8) * scale16(m, *s) : (double)q * scale16(m, *s) + scale16(m, s[256]);
    }
    uint8_t code = tile[(((strip * 4 + step / 2) * 32 + lane) * 2 + step % 2) * 8 + pair / 2 * 4 + pair % 2 + 2 * odd];
    if (m->format == DN_W_INT8)
        return (double)(int8_t)code *
               scale16(m, ((const uint16_t *)(tile + 8192))[((strip * 8 + g) * 4 + c / 32) * 2 + upper]);
    float scale;
    uint64_t nan_rows;
    memcpy(&scale, tile + 8192, sizeof scale);
    memcpy(&nan_rows, tile + 8200, sizeof nan_rows);
    if ((code & 0x7f) == 0x7f && !(nan_rows >> row % 64 & 1))
        return -12345; /* not marked */
    return e4m3_to_f64(code) * scale;
}

/* Random rows of the matrix's own family, and what they stand for. */
struct source {
    uint16_t *bf16, *scale, *offset;
    uint8_t *bytes;
    float *block, *f32;
    double *value;
};

static void source_init(struct source *s, const struct dn_matrix *m, uint32_t n)
{
    size_t n_in = m->n_in, all = (size_t)n * n_in, across = (n_in + 127) / 128, groups = all / 32 + 1;
    s->bf16 = malloc(all * 2);
    s->bytes = malloc(all);
    s->f32 = malloc(all * sizeof(float));
    s->value = malloc(all * sizeof(double));
    s->scale = malloc(groups * 2);
    s->offset = malloc(groups * 2);
    s->block = malloc((n / 128 + 1) * across * sizeof(float));
    for (size_t i = 0; i < groups; i++) {
        uint64_t r = gpu_rng();
        s->scale[i] = (uint16_t)(m->scale_is_bf16 ? 0x3a00 + r % 0x400 : 0x1000 + r % 0x2000);
        s->offset[i] = (uint16_t)((m->scale_is_bf16 ? 0x3a00 + (r >> 20) % 0x400 : 0x1000 + (r >> 20) % 0x2000) |
                                  (r >> 40 & 1) << 15);
    }
    for (size_t i = 0; i < (n / 128 + 1) * across; i++)
        s->block[i] = ldexpf(1 + (float)gpu_unit(), (int)(gpu_rng() % 20) - 16);
    for (size_t i = 0; i < all; i++) {
        uint64_t r = gpu_rng();
        size_t row = i / n_in, k = i % n_in;
        s->f32[i] = gpu_normal() * 0.05F;
        s->bf16[i] = (uint16_t)r;
        s->bytes[i] = (uint8_t)(r >> 20);
        if ((s->bytes[i] & 0x7f) == 0x7f && r >> 40 & 63)
            s->bytes[i] ^= 1;
        float scale = scale16(m, s->scale[i / 32]);
        switch (m->format) {
        case DN_W_BF16:
            s->value[i] = bf16_to_f32(s->bf16[i]);
            break;
        case DN_W_FP8:
            s->value[i] = e4m3_to_f64(s->bytes[i]) * s->block[row / 128 * across + k / 128];
            break;
        case DN_W_INT8:
            s->value[i] = (double)(int8_t)s->bytes[i] * scale;
            break;
        default:
            break;
        }
    }
    if (m->format == DN_W_INT4)
        for (size_t i = 0; i < all; i++) {
            int q = s->bytes[i / 2] >> (i % 2 * 4) & 15;
            float scale = scale16(m, s->scale[i / 32]);
            s->value[i] = m->symmetric ? (q - 8.0) * scale : (double)q * scale + scale16(m, s->offset[i / 32]);
        }
}
static void source_release(struct source *s)
{
    free(s->bf16);
    free(s->bytes);
    free(s->f32);
    free(s->value);
    free(s->scale);
    free(s->offset);
    free(s->block);
}

static struct dn_rows rows_from(const struct dn_matrix *m, const struct source *s, uint32_t row, bool f32)
{
    struct dn_rows r = {0};
    size_t at = (size_t)row * m->n_in;
    if (f32) {
        r.f32 = s->f32 + at;
    } else if (m->format == DN_W_BF16) {
        r.bf16 = s->bf16 + at;
    } else if (m->format == DN_W_FP8) {
        r.fp8 = s->bytes + at;
        r.block_scale = s->block + row / 128 * ((m->n_in + 127) / 128);
    } else {
        r.q8 = m->format == DN_W_INT8 ? (const int8_t *)s->bytes + at : NULL;
        r.q4 = m->format == DN_W_INT4 ? s->bytes + at / 2 : NULL;
        r.scale16 = s->scale + at / 32;
        r.offset16 = m->format == DN_W_INT4 && !m->symmetric ? s->offset + at / 32 : NULL;
    }
    return r;
}

static uint8_t *read_packed(struct gpu *g, const struct dn_matrix *m)
{
    uint8_t *p = malloc(m->bytes);
    g->ops->download(g->d, p, m->data, m->bytes);
    return p;
}

static void matrix_init(struct gpu *g, struct dn_matrix *m)
{
    m->bytes = g->ops->matrix_bytes(m);
    size_t rows = (size_t)m->n_out * (m->n_groups ? m->n_groups : 1);
    cr_assert_eq(m->bytes, (rows + 63) / 64 * ((m->n_in + 127) / 128) * tile_bytes(m));
    m->data = gpu_alloc(g, m->bytes);
}

static void describe(const struct dn_matrix *m, char *text, size_t n)
{
    snprintf(text, n, "%s%s%s %ux%u x%u", dn_weight_format_name(m->format),
             m->format == DN_W_INT4 && !m->symmetric ? " affine" : "", m->scale_is_bf16 ? " bf16" : "", m->n_out,
             m->n_in, m->n_groups);
}

/* Packs in pieces of `step` rows and compares; f32: with the CPU backend. */
static void check(struct gpu *g, struct dn_matrix m, uint32_t step, bool f32)
{
    uint32_t n = m.n_out * (m.n_groups ? m.n_groups : 1);
    char name[96];
    describe(&m, name, sizeof name);
    struct source s;
    source_init(&s, &m, n);
    matrix_init(g, &m);
    gpu_poison(g, m.data, m.bytes);
    struct dn_matrix cpu = m;
    cpu.n_out = n;
    cpu.n_groups = 1;
    cpu.bytes = dn_cpu_matrix_bytes(&cpu);
    cpu.data = aligned_alloc(64, (cpu.bytes + 63) / 64 * 64);
    float *want = malloc(m.n_in * sizeof *want);
    for (uint32_t row = 0; row < n; row += step) {
        uint32_t now = n - row < step ? n - row : step;
        struct dn_rows r = rows_from(&m, &s, row, f32);
        int ret = g->ops->matrix_pack(g->d, &m, row, now, &r);
        cr_assert_eq(ret, 0, "%s: rows %u.. give %d", name, row, ret);
        if (f32)
            cr_assert_eq(dn_cpu_matrix_pack(&cpu, row, now, &r), 0);
    }
    uint8_t *packed = read_packed(g, &m);
    size_t wrong = 0;
    for (uint32_t row = 0; row < n; row++) {
        if (f32)
            dn_cpu_matrix_row(&cpu, row, want);
        for (uint32_t k = 0; k < m.n_in; k++) {
            double got = unpack(&m, packed, row, k), w = f32 ? want[k] : s.value[(size_t)row * m.n_in + k];
            bool ok = isnan(w) ? isnan(got) : got == w || (f32 && fabs(got - w) <= 0x1p-22 * fabs(w) + 0x1p-24);
            if (!ok && wrong++ < 5)
                printf("%s, %u at once%s: [%u][%u] is %.9g, expected %.9g\n", name, step, f32 ? ", f32" : "", row, k,
                       got, w);
        }
    }
    /* Padding is zero: a NaN there would spread. */
    if (m.n_in % 128)
        for (uint32_t row = 0; row < n; row++) {
            double got = unpack(&m, packed, row, m.n_in | 127);
            if (got != 0 && wrong++ < 5)
                printf("%s: padding of row %u is %g\n", name, row, got);
        }
    if (!wrong)
        printf("%s, %u at once%s: ok\n", name, step, f32 ? ", f32" : "");
    fflush(stdout);
    cr_expect_eq(wrong, 0, "%s: %zu wrong", name, wrong);
    free(want);
    free(packed);
    free(cpu.data);
    g->ops->free(g->d, m.data);
    source_release(&s);
}

static void open_device(struct gpu *g)
{
    struct dn_step_limits limits = {.tokens = 64, .seqs = 64, .rows = 64, .pages = 64, .tags = 8};
    gpu_open(g, &limits, 4, 256);
}

Test(pack, correct)
{
    struct gpu g;
    open_device(&g);
    const struct {
        uint32_t n_out, n_in, n_groups, step;
    } shapes[] = {{64, 128, 0, 128},  {1, 64, 1, 128},      {576, 576, 0, 128}, {192, 576, 0, 192},
                  {130, 352, 0, 128}, {1000, 1536, 0, 256}, {128, 256, 5, 256}, {300, 96, 0, 256},
                  {64, 21504, 0, 64}, {320, 4096, 0, 320}};
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        for (int f = 0; f < 6; f++) {
            struct dn_matrix m = {.format = f < 4    ? (enum dn_weight_format)f
                                            : f == 4 ? DN_W_INT4
                                                     : DN_W_INT8,
                                  .n_out = shapes[i].n_out,
                                  .n_in = shapes[i].n_in,
                                  .n_groups = shapes[i].n_groups,
                                  .symmetric = f == 3,
                                  .scale_is_bf16 = f >= 4};
            uint32_t step = m.format == DN_W_FP8 ? (shapes[i].step + 127) / 128 * 128 : shapes[i].step;
            check(&g, m, step, false);
            if (m.format != DN_W_FP8)
                check(&g, m, 37, false);
            if ((size_t)m.n_out * m.n_in < 400000)
                check(&g, m, 128, true);
        }
    /* Any multiple of 8 where there are no groups of 32. */
    const uint32_t odd[] = {8, 24, 136, 200, 1544};
    for (size_t i = 0; i < sizeof odd / sizeof *odd; i++)
        for (int f = DN_W_BF16; f <= DN_W_FP8; f++) {
            struct dn_matrix m = {.format = (enum dn_weight_format)f, .n_out = 200, .n_in = odd[i]};
            check(&g, m, 128, false);
            check(&g, m, 128, true);
        }
    gpu_close(&g);
}

Test(pack, refuses)
{
    struct gpu g;
    open_device(&g);
    const struct dn_matrix bad[] = {{.format = DN_W_INT4, .n_out = 64, .n_in = 48},
                                    {.format = DN_W_INT8, .n_out = 64, .n_in = 8},
                                    {.format = DN_W_BF16, .n_out = 64, .n_in = 12},
                                    {.format = DN_W_BF16, .n_out = 0, .n_in = 64},
                                    {.format = DN_W_BF16, .n_out = 96, .n_in = 64, .n_groups = 2},
                                    {.format = DN_W_FP8, .n_out = 64, .n_in = 64, .n_groups = 2}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_expect_eq(g.ops->matrix_bytes(&bad[i]), 0, "number %zu", i);
    struct dn_matrix m = {.format = DN_W_FP8, .n_out = 256, .n_in = 256};
    m.bytes = g.ops->matrix_bytes(&m);
    m.data = gpu_alloc(&g, m.bytes);
    uint8_t *codes = calloc(256, 256);
    float scale[4] = {1, 1, 1, 1};
    struct dn_rows rows = {.fp8 = codes, .block_scale = scale}, none = {0}, half = {.fp8 = codes};
    cr_expect_eq(g.ops->matrix_pack(g.d, &m, 64, 128, &rows), -DN_INVALID_VALUE);
    cr_expect_eq(g.ops->matrix_pack(g.d, &m, 0, 64, &rows), -DN_INVALID_VALUE);
    cr_expect_eq(g.ops->matrix_pack(g.d, &m, 128, 129, &rows), -DN_INVALID_VALUE);
    cr_expect_eq(g.ops->matrix_pack(g.d, &m, 0, 256, &none), -DN_INVALID_VALUE);
    cr_expect_eq(g.ops->matrix_pack(g.d, &m, 0, 256, &half), -DN_INVALID_VALUE);
    cr_expect_eq(g.ops->matrix_pack(g.d, &m, 0, 256, &rows), 0);
    free(codes);
    gpu_close(&g);
}

/* Sixteen threads, pieces of 128 rows, as the engine loads a checkpoint. */
enum { THREADS = 16, PIECE = 128, PIECES = 64 };
struct loader {
    struct gpu *g;
    struct dn_matrix *m;
    const struct source *s;
    uint32_t first;
    int ret;
};
static void *load(void *p)
{
    struct loader *l = p;
    for (uint32_t i = l->first; i < PIECES && l->ret == 0; i += THREADS) {
        struct dn_rows r = rows_from(l->m, l->s, 0, false);
        l->ret = l->g->ops->matrix_pack(l->g->d, l->m, i * PIECE, PIECE, &r);
    }
    return NULL;
}

Test(pack, bench)
{
    struct gpu g;
    open_device(&g);
    for (int f = 0; f < DN_W_FORMATS; f++) {
        struct dn_matrix m = {.format = (enum dn_weight_format)f,
                              .n_out = PIECE * PIECES,
                              .n_in = 7168,
                              .symmetric = true,
                              .scale_is_bf16 = true};
        struct source s;
        source_init(&s, &m, PIECE);
        matrix_init(&g, &m);
        double best = 0;
        for (int turn = 0; turn < 6; turn++) {
            struct loader l[THREADS];
            pthread_t t[THREADS];
            uint64_t begin = dn_now_ns();
            for (uint32_t i = 0; i < THREADS; i++) {
                l[i] = (struct loader){&g, &m, &s, i, 0};
                pthread_create(&t[i], NULL, load, &l[i]);
            }
            for (int i = 0; i < THREADS; i++) {
                pthread_join(t[i], NULL);
                cr_assert_eq(l[i].ret, 0);
            }
            double rate = (double)m.bytes / (double)(dn_now_ns() - begin);
            best = rate > best ? rate : best;
        }
        printf("BENCH pack %s %ux%u, %d threads: %.1f GB/s\n", dn_weight_format_name(m.format), m.n_out, m.n_in,
               THREADS, best);
        fflush(stdout);
        uint8_t *packed = read_packed(&g, &m);
        size_t wrong = 0;
        for (uint32_t row = 5; row < m.n_out; row += 77)
            for (uint32_t k = 0; k < m.n_in; k++) {
                double got = unpack(&m, packed, row, k), want = s.value[(size_t)(row % PIECE) * m.n_in + k];
                wrong += isnan(want) ? !isnan(got) : got != want;
            }
        cr_expect_eq(wrong, 0, "%s: %zu wrong", dn_weight_format_name(m.format), wrong);
        free(packed);
        g.ops->free(g.d, m.data);
        source_release(&s);
    }
    gpu_close(&g);
}
