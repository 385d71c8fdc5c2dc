/* The device as a whole: memory, a step's consistency, rows, embedding, token counts. */
#include "unit/kernels/mla_fixture.h"

#include "kernels/cpu/matmul.h"

#include <signal.h>

Test(step, device_memory_is_aligned_and_zeroed)
{
    struct fix f;
    fix_open(&f, NULL, 1, 16);
    static const size_t size[] = {0, 1, 255, 4096, 100000, (2 << 20) - 1, 2 << 20, 5000000};
    void *p[8];
    for (int i = 0; i < 8; i++) {
        p[i] = f.ops->alloc(f.d, size[i]);
        cr_assert_not_null(p[i]);
        cr_assert_eq((uintptr_t)p[i] % 256, 0);
        for (size_t b = 0; b < size[i]; b++)
            cr_assert_eq(((uint8_t *)p[i])[b], 0);
        memset(p[i], 0x5a, size[i]);
    }
    cr_assert_null(f.ops->alloc(f.d, SIZE_MAX), "an impossible size");
    cr_assert_null(f.ops->alloc(f.d, SIZE_MAX - (3 << 20)));
    uint8_t back[100];
    f.ops->upload(f.d, p[4], "all of it", 10);
    f.ops->download(f.d, back, p[4], 11);
    cr_assert(memcmp(back, "all of it\0\x5a", 11) == 0);
    for (int i = 0; i < 8; i += 2) /* the rest is freed by close */
        f.ops->free(f.d, p[i]);
    f.ops->free(f.d, NULL);
    fix_close(&f);
}

Test(step, device_says_what_it_is)
{
    struct fix f;
    char text[200];
    fix_open(&f, "portable", 2, 16);
    f.ops->describe(f.d, text, sizeof text);
    cr_assert_not_null(strstr(text, ", portable, 2 threads"), "%s", text);
    cr_assert_str_eq(f.ops->name, "cpu");
    fix_close(&f);
}

Test(step, an_unknown_instruction_set_is_refused_by_name)
{
    struct dn_device_conf conf = {.isa = "avx9", .limits = {.tokens = 1, .seqs = 1, .rows = 1, .pages = 1}};
    struct dn_device *d = NULL;
    struct dn_err err = {0};
    cr_assert_eq(dn_kernels_open_cpu(&conf, &d, &err), -DN_CONFIG);
    cr_assert_not_null(strstr(err.text, "avx9"));
    cr_assert_null(d);
}

Test(step, embedding_gives_the_rows_of_the_table)
{
    FOR_EACH_ISA(isa)
    {
        enum { N = 300, DIM = 96 };
        struct fix f;
        struct seq q;
        fix_open(&f, isa, 2, N);
        fix_arena(&f, 1, 1, 16, 16, 8);
        float *rows = malloc(N * DIM * sizeof *rows), *out = fix_floats(&f, 70 * DIM);
        for (int i = 0; i < N * DIM; i++)
            rows[i] = (float)(int)rng_below(256) - 128.0f; /* exact in bf16 */
        struct dn_matrix m = {.format = DN_W_BF16, .n_out = N, .n_in = DIM};
        m.bytes = f.ops->matrix_bytes(&m);
        m.data = f.ops->alloc(f.d, m.bytes);
        cr_assert_eq(f.ops->matrix_pack(f.d, &m, 0, N, &(struct dn_rows){.f32 = rows}), 0);
        seq_init(&f, &q, DN_KV_BF16, 70);
        step_clear(&f);
        step_add(&f, &q, 0, 70);
        for (int t = 0; t < 70; t++)
            f.s->token_id[t] = t == 69 ? N - 1 : (int32_t)rng_below(N);
        f.ops->step_begin(f.d, 1);
        f.ops->embed(f.d, &(struct dn_embed){&m, out});
        for (int t = 0; t < 70; t++)
            cr_assert(memcmp(out + t * DIM, rows + f.s->token_id[t] * DIM, DIM * sizeof *out) == 0);
        free(rows);
        fix_close(&f);
    }
}

/* ---- prepare() ---- */

/* Every operation that has scratch, and one that would follow the step's arrays. */
static void list(struct fix *f, const struct mla_shape *h, const struct mla_weights *w, float *x, int32_t *expert,
                 const struct dn_matrix *gate_up, const struct dn_matrix *down)
{
    f->ops->norm_act(f->d, &(struct dn_norm_act){x, 64, x, 1e-5f, 64, x});
    run_absorbed(f, h, 0, 0.1f, x, x);
    run_prefill(f, h, 0, 0.1f, w, x, x);
    f->ops->route(f->d, &(struct dn_route){x, NULL, 2, 1, 1, 1, true, 1, expert, x});
    f->ops->experts(f->d, &(struct dn_experts){x, expert, x, 1, gate_up, down, NULL, x});
    f->ops->sample_rows(f->d, &(struct dn_sample_rows){x, 16, 16});
    f->ops->step_end(f->d);
}

/* It runs the list as prefill and as decode with the counts of the limits and computes nothing; afterwards a step is as
 * without it. */
Test(step, prepare_measures_and_computes_nothing)
{
    const struct mla_shape h = {2, 64, 16, 64, 64, 16};
    struct fix f;
    struct seq q;
    struct mla_weights w;
    struct dn_matrix gate_up, down;
    fix_open(&f, NULL, 2, 16);
    mla_arena(&f, 1, &h, 16);
    mla_seq(&f, &q, DN_KV_BF16, 100);
    mla_fill_all(&f, &q, 100);
    mla_weights(&f, &w, &h, DN_W_BF16, dn_cpu_matrix_row);
    float *x = fix_floats(&f, FIX_TOKENS * 256), *out = fix_floats(&f, 100 * 128), *again = fix_floats(&f, 100 * 128);
    float *rows = malloc(256 * 64 * sizeof *rows);
    int32_t *expert = (int32_t *)fix_floats(&f, FIX_TOKENS);
    fill_normal(rows, 256 * 64, 1.0f);
    mla_matrix(&f, &gate_up, DN_W_BF16, 2, 128, 64, rows);
    mla_matrix(&f, &down, DN_W_BF16, 2, 64, 64, rows);
    float *query = fix_floats(&f, 100 * 256);
    fill_normal(query, 100 * 256, 1.0f);
    step_clear(&f);
    step_add(&f, &q, 0, 100);
    f.ops->step_begin(f.d, 1);
    run_prefill(&f, &h, 0, 0.1f, &w, query, out);
    mla_step(&f);
    unsigned n[2] = {0, 0};
    memset(x, 0xff, FIX_TOKENS * 256 * sizeof *x);
    memset(expert, 0xff, FIX_TOKENS * sizeof *expert);
    struct dn_err err = {0};
    for (uint32_t l = 1; l <= 2; l++) {
        int more;
        while ((more = f.ops->prepare(f.d, l, &err)) > 0) {
            cr_assert(f.s->n_tokens > 0 && f.s->n_tokens <= FIX_TOKENS && f.s->n_rows > 0);
            n[f.s->kind == DN_STEP_DECODE]++;
            list(&f, &h, &w, x, expert, &gate_up, &down);
        }
        cr_assert_eq(more, 0, "%s", err.text);
    }
    cr_assert(n[0] == 2 && n[1] == 2, "%u as prefill, %u as decode", n[0], n[1]);
    for (size_t i = 0; i < FIX_TOKENS * 256; i++)
        cr_assert(isnan(x[i]), "something was computed");
    for (size_t i = 0; i < FIX_TOKENS; i++)
        cr_assert_eq(expert[i], -1);
    step_clear(&f);
    step_add(&f, &q, 0, 100);
    f.ops->step_begin(f.d, 1);
    run_prefill(&f, &h, 0, 0.1f, &w, query, again);
    mla_step(&f);
    cr_assert(memcmp(out, again, 100 * 128 * sizeof *out) == 0);
    cr_assert(!isnan(out[0]) && out[0] != 0.0f);
    free(rows);
    mla_weights_free(&w);
    fix_close(&f);
}

/* ---- A step that contradicts itself aborts ---- */

static struct fix bad;
static struct seq bad_seq;

static void bad_setup(void)
{
    fix_open(&bad, NULL, 1, 16);
    fix_arena(&bad, 1, 1, 16, 16, 8);
    seq_init(&bad, &bad_seq, DN_KV_BF16, 40);
    step_clear(&bad);
    step_add(&bad, &bad_seq, 30, 10);
    bad.s->n_rows = 1;
    bad.s->row_token[0] = 9;
    bad.s->sample[0] = (struct dn_sample){.slot = -1, .target = -1, .n_top = -1};
    bad.ops->step_begin(bad.d, 1); /* fine so far */
}

#define ABORTS(name, change)                                                                                           \
    Test(step, aborts_on_##name, .init = bad_setup, .signal = SIGABRT)                                                 \
    {                                                                                                                  \
        struct dn_step *s = bad.s;                                                                                     \
        change;                                                                                                        \
        bad.ops->step_begin(bad.d, 1);                                                                                 \
    }
ABORTS(too_many_tokens, s->n_tokens = FIX_TOKENS + 1)
ABORTS(too_many_sequences, s->n_seqs = FIX_SEQS + 1)
ABORTS(too_many_rows, s->n_rows = FIX_ROWS + 1)
ABORTS(a_table_behind_the_pages, s->page_start[0] = FIX_PAGES + 1)
ABORTS(a_table_before_the_pages, s->page_start[0] = -1)
ABORTS(tokens_of_no_sequence, s->n_tokens = 11)
ABORTS(a_sequence_without_tokens, s->token_start[1] = 0)
ABORTS(a_token_of_another_sequence, s->token_seq[3] = 1)
ABORTS(a_gap_in_positions, s->position[9]++)
ABORTS(a_negative_position, s->kv_len[0] = 5)
ABORTS(a_negative_id, s->token_id[0] = -1)
ABORTS(an_unknown_format, s->kv_format[0] = DN_KV_FORMATS)
ABORTS(a_slot_that_does_not_exist, s->slot[0] = FIX_SLOTS)
ABORTS(a_row_behind_the_tokens, s->row_token[0] = 10)
ABORTS(too_many_bans, s->sample[0].n_ban = DN_MAX_BAN + 1)
ABORTS(too_many_alternatives, s->sample[0].n_top = DN_MAX_TOP + 1)

Test(step, aborts_when_positions_have_no_page, .init = bad_setup, .signal = SIGABRT)
{
    float q[10 * 16] = {0}, out[10 * 16];
    bad.s->page_start[0] = FIX_PAGES - 2; /* 32 tokens, 40 needed */
    bad.ops->step_begin(bad.d, 1);
    bad.ops->attention(bad.d, &(struct dn_attention){q, 16, 1, 1, 16, 1.0f, &bad.layout, bad.arena, 0, out});
}

Test(step, aborts_when_an_unchecked_page_id_reaches_into_another_slab, .init = bad_setup, .signal = SIGABRT)
{
    float q[10 * 16] = {0}, out[10 * 16];
    bad.s->page[2] = bad.layout.format[DN_KV_BF16].pages_per_slab; /* an id that BF16 slabs leave unused */
    bad.ops->step_begin(bad.d, 1);
    bad.ops->attention(bad.d, &(struct dn_attention){q, 16, 1, 1, 16, 1.0f, &bad.layout, bad.arena, 0, out});
}
