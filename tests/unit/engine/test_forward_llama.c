#include "unit/engine/engine_fixture.h"
#include "unit/engine/tiny_checkpoint.h"

enum { N_LOGITS = TINY_TOKENS * TINY_VOCAB };
static int32_t ID[TINY_TOKENS];
static float REFERENCE[N_LOGITS], LOGITS[N_LOGITS];

/* The bf16 checkpoint of a kind with bf16 weights: no rounding but that of f32 sums, and of K and V in the cache. */
static void open_kind(struct fixture *f, int kind, unsigned n_threads)
{
    const char *folder = tiny_checkpoint(&TINY_KIND[kind], 1, DN_TT_BF16, "");
    fixture_open(f, folder, DN_WEIGHTS_AUTO, n_threads, 64);
    cr_assert_eq(f->weights->n_notes, 0, "%s", f->weights->note[0]);
    tiny_remove(folder);
    tiny_reference(&TINY_KIND[kind], REFERENCE);
    for (int i = 0; i < TINY_TOKENS; i++)
        ID[i] = tiny_id(i);
}

static double largest_error(const float *is, const float *want, size_t n, double *mean)
{
    double max = 0, sum = 0;
    for (size_t i = 0; i < n; i++) {
        double d = fabs((double)is[i] - (double)want[i]);
        cr_assert(isfinite(is[i]));
        max = d > max ? d : max;
        sum += d;
    }
    *mean = sum / (double)n;
    return max;
}

/* Logits have a spread of 1.4. The reference rounds K and V to bf16, so with that format only the order of sums is
 * left, and a value that lay at the edge of two bf16 numbers now and then; e4m3 keeps 4 bits of K and V. */
static const struct {
    double mean, max;
} KV_BOUND[DN_KV_FORMATS] = {{0.0003, 0.01}, {0.12, 1.4}};

Test(forward, logits_are_those_of_transformers)
{
    for (int kind = 0; kind < TINY_KINDS; kind++) {
        struct fixture f;
        open_kind(&f, kind, 1);
        for (int kv = 0; kv < DN_KV_FORMATS; kv++) {
            struct sequence q = {.format = (enum dn_kv_format)kv};
            double mean, max;
            run_tokens(&f, &q, ID, TINY_TOKENS, 64, LOGITS);
            max = largest_error(LOGITS, REFERENCE, N_LOGITS, &mean);
            printf("%-6s kv %-8s: mean logit error %.5f, max %.4f\n", TINY_KIND[kind].name,
                   dn_kv_format_name((enum dn_kv_format)kv), mean, max);
            cr_expect_lt(mean, KV_BOUND[kv].mean);
            cr_expect_lt(max, KV_BOUND[kv].max);
        }
        fixture_close(&f);
    }
}

/* Bit for bit: however a prompt is cut, down to one token a step. */
Test(forward, chunks_and_single_steps_give_the_same_bits)
{
    static float once[N_LOGITS];
    static const uint32_t chunk[] = {1, 3, 16, 17};
    for (int kind = 0; kind < TINY_KINDS; kind++) {
        for (int kv = 0; kv < DN_KV_FORMATS; kv++) {
            struct fixture f;
            open_kind(&f, kind, 2);
            struct sequence whole = {.format = (enum dn_kv_format)kv};
            run_tokens(&f, &whole, ID, TINY_TOKENS, 64, once);
            for (size_t c = 0; c < sizeof chunk / sizeof *chunk; c++) {
                struct sequence q = {.format = (enum dn_kv_format)kv};
                run_tokens(&f, &q, ID, TINY_TOKENS, chunk[c], LOGITS);
                cr_expect_eq(memcmp(once, LOGITS, sizeof once), 0, "%s, kv %d, chunks of %u", TINY_KIND[kind].name, kv,
                             chunk[c]);
            }
            fixture_close(&f);
        }
    }
}

/* Three sequences of two KV formats at different places, a prefill chunk among single tokens: each has the bits it has
 * alone. */
Test(forward, a_mixed_batch_gives_each_sequence_its_own_bits)
{
    static float alone[DN_KV_FORMATS][N_LOGITS], row[3 * TINY_TOKENS * TINY_VOCAB];
    for (int kind = 0; kind < TINY_KINDS; kind++) {
        struct fixture f;
        open_kind(&f, kind, 2);
        for (int kv = 0; kv < DN_KV_FORMATS; kv++) {
            struct sequence q = {.format = (enum dn_kv_format)kv};
            run_tokens(&f, &q, ID, TINY_TOKENS, 64, alone[kv]);
        }
        struct sequence a = {.format = DN_KV_BF16}, b = {.format = DN_KV_FP8}, c = {.format = DN_KV_FP8};
        run_tokens(&f, &a, ID, 20, 64, NULL);
        run_tokens(&f, &b, ID, 7, 64, NULL);
        for (uint32_t step = 0; step < 4; step++) {
            uint32_t a_at = a.n_tokens, b_at = b.n_tokens, c_at = c.n_tokens;
            step_clear(&f);
            step_add(&f, &a, ID + a_at, 1, ROWS_ALL);
            step_add(&f, &c, ID + c_at, 5, ROWS_ALL);
            step_add(&f, &b, ID + b_at, 1, ROWS_ALL);
            step_run(&f);
            dn_runner_logits(f.runner, 0, 7, row);
            const size_t line = TINY_VOCAB * sizeof(float);
            cr_expect_eq(memcmp(row, alone[DN_KV_BF16] + a_at * TINY_VOCAB, line), 0, "%s a step %u",
                         TINY_KIND[kind].name, step);
            cr_expect_eq(memcmp(row + TINY_VOCAB, alone[DN_KV_FP8] + c_at * TINY_VOCAB, 5 * line), 0, "%s c step %u",
                         TINY_KIND[kind].name, step);
            cr_expect_eq(memcmp(row + 6 * TINY_VOCAB, alone[DN_KV_FP8] + b_at * TINY_VOCAB, line), 0, "%s b step %u",
                         TINY_KIND[kind].name, step);
        }
        fixture_close(&f);
    }
}

Test(forward, threads_do_not_change_a_bit)
{
    static float one[N_LOGITS];
    struct fixture f;
    for (unsigned n = 1; n <= 3; n++) {
        open_kind(&f, 3, n);
        struct sequence q = {.format = DN_KV_FP8};
        run_tokens(&f, &q, ID, TINY_TOKENS, 64, n == 1 ? one : LOGITS);
        fixture_close(&f);
        if (n > 1)
            cr_expect_eq(memcmp(one, LOGITS, sizeof one), 0, "%u threads", n);
    }
}

/* A step without rows (a chunk that is not the last) fills the cache and samples nothing. */
Test(forward, a_step_without_rows_only_fills_the_cache)
{
    struct fixture f;
    open_kind(&f, 0, 1);
    struct sequence q = {.format = DN_KV_BF16};
    step_clear(&f);
    step_add(&f, &q, ID, 30, ROWS_NONE);
    step_run(&f);
    run_tokens(&f, &q, ID + 30, 10, 64, LOGITS);
    double mean;
    cr_expect_lt(largest_error(LOGITS, REFERENCE + 30 * TINY_VOCAB, 10 * TINY_VOCAB, &mean), KV_BOUND[0].max);
    fixture_close(&f);
}

/* The runner's side of the tag check: wrong tags end their own sequence; without `check` nobody looks. */
Test(forward, a_wrong_tag_ends_one_sequence)
{
    struct fixture f;
    open_kind(&f, 0, 1);
    struct dn_step *s = dn_runner_arrays(f.runner);
    struct sequence a = {.format = DN_KV_BF16}, b = {.format = DN_KV_BF16};
    for (int checked = 1; checked >= 0; checked--) {
        a.n_tokens = b.n_tokens = 0;
        step_clear(&f);
        step_add(&f, &a, ID, 20, ROWS_LAST);
        step_add(&f, &b, ID, 20, ROWS_LAST);
        uint64_t tag[] = {111, 222};
        dn_runner_set_tags(f.runner, a.page[0], 2, tag);
        dn_runner_set_tags(f.runner, b.page[0], 2, tag);
        memcpy(s->tag, tag, sizeof tag);
        memcpy(s->tag + 2, tag, sizeof tag);
        s->tag[3] = 333;
        s->check[0] = s->check[1] = (uint8_t)checked;
        step_run(&f);
        cr_expect_eq(s->bad[0], 0);
        cr_expect_eq(s->bad[1], checked ? 2 : 0);
        cr_expect_geq(s->result[0].id, 0);
        if (checked)
            cr_expect_eq(s->result[1].id, -1);
        else
            cr_expect_eq(s->result[1].id, s->result[0].id);
    }
    fixture_close(&f);
}

/* Each weight format against the reference; the errors are those of 4 and 8 bits in a model without any redundancy. */
Test(forward, every_weight_format_computes_the_same_model)
{
    static const struct {
        int format;
        double mean;
    } bound[] = {{DN_W_BF16, 0.0003}, {DN_W_INT8, 0.05}, {DN_W_FP8, 0.2}, {DN_W_INT4, 0.5}};
    for (int kind = 0; kind < TINY_KINDS; kind++) {
        const char *folder = tiny_checkpoint(&TINY_KIND[kind], 1, DN_TT_BF16, "");
        tiny_reference(&TINY_KIND[kind], REFERENCE);
        for (int i = 0; i < TINY_TOKENS; i++)
            ID[i] = tiny_id(i);
        for (size_t b = 0; b < sizeof bound / sizeof *bound; b++) {
            struct fixture f;
            struct sequence q = {.format = DN_KV_BF16};
            double mean, max;
            fixture_open(&f, folder, bound[b].format, 1, 64);
            run_tokens(&f, &q, ID, TINY_TOKENS, 64, LOGITS);
            max = largest_error(LOGITS, REFERENCE, N_LOGITS, &mean);
            printf("%-6s weights %-4s: mean logit error %.4f, max %.3f\n", TINY_KIND[kind].name,
                   dn_weights_format_name(bound[b].format), mean, max);
            cr_expect_lt(mean, bound[b].mean, "%s %s", TINY_KIND[kind].name, dn_weights_format_name(bound[b].format));
            fixture_close(&f);
        }
        tiny_remove(folder);
    }
}
