#include "unit/engine/engine_fixture.h"
#include "unit/engine/kimi_tiny.h"

/* Tiny models of the family in every form that its checkpoints have, against transformers. The reference rounds what
 * the cache keeps to bf16, as ours does: the rest is the order of sums. */
enum { N_LOGITS = TINY_TOKENS * KIMI_VOCAB };
static int32_t ID[TINY_TOKENS];
static float REFERENCE[N_LOGITS], LOGITS[N_LOGITS], EXPERTS[TINY_TOKENS * DN_MAX_TOP_EXPERTS];

static void open_kind(struct fixture *f, int kind, int format, unsigned n_threads)
{
    const char *folder = kimi_checkpoint(&KIMI_KIND[kind], (struct kimi_fault){0});
    fixture_open(f, folder, format, n_threads, 64);
    tiny_remove(folder);
    kimi_reference(&KIMI_KIND[kind], REFERENCE, EXPERTS);
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

static int by_value(const void *a, const void *b)
{
    return *(const int32_t *)a - *(const int32_t *)b;
}

/* The experts of a token of the last step are those of the reference, as a set. */
static void check_experts(struct fixture *f, uint32_t t, uint32_t position)
{
    uint32_t k = f->model->hyper.top_experts;
    int32_t is[DN_MAX_TOP_EXPERTS];
    f->device->ops->download(f->device, is, f->runner->expert + (size_t)t * k, k * sizeof *is);
    qsort(is, k, sizeof *is, by_value);
    for (uint32_t i = 0; i < k; i++)
        cr_expect_eq(is[i], (int32_t)EXPERTS[position * k + i], "position %u, expert %u", position, i);
}

/* Prefill up to `decode_from`, then a token a step, absorbed. */
static void run_text(struct fixture *f, enum dn_kv_format kv, uint32_t decode_from, bool experts)
{
    static struct sequence q;
    q = (struct sequence){.format = kv};
    f->next_slab = 0;
    for (uint32_t at = 0; at < TINY_TOKENS;) {
        uint32_t n = at < decode_from ? decode_from : 1;
        step_clear(f);
        dn_runner_arrays(f->runner)->kind = at < decode_from ? DN_STEP_PREFILL : DN_STEP_DECODE;
        step_add(f, &q, ID + at, n, ROWS_ALL);
        step_run(f);
        dn_runner_logits(f->runner, 0, n, LOGITS + (size_t)at * KIMI_VOCAB);
        for (uint32_t t = 0; t < n && experts; t++)
            check_experts(f, t, at + t);
        at += n;
    }
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The median over the rows of their mean errors. Where activations are bf16, one or the other near tie of two experts
 * falls the other way, and the row is another from there on; most rows stay. */
static double median_row(void)
{
    double row[TINY_TOKENS];
    for (size_t t = 0; t < TINY_TOKENS; t++)
        largest_error(LOGITS + t * KIMI_VOCAB, REFERENCE + t * KIMI_VOCAB, KIMI_VOCAB, &row[t]);
    qsort(row, TINY_TOKENS, sizeof *row, by_size);
    return row[TINY_TOKENS / 2];
}

/* Of kinds that run on a GPU, whose activations are bf16: twice what was measured on an H200, of absorbed and expanded.
 * The mean holds rows where an expert is another, the median has none of them. Means of weights in other formats are
 * [format][KV format]. */
static const struct gpu_bound {
    int kind;
    double median, mean, format_mean[DN_W_FORMATS][DN_KV_FORMATS];
} GPU_BOUND[] = {
    {6, 0.12, 0.28, {{0.28, 0.68}, {1.36, 1.43}, {0.38, 0.77}, {1.96, 1.96}}},
    {7, 0.057, 0.1, {{0.1, 0.42}, {0.49, 0.61}, {0.24, 0.54}, {1.67, 1.65}}},
    {8, 0.117, 0.19, {{0.19, 0.5}, {1.09, 1.17}, {0.27, 0.58}, {1.68, 1.67}}},
};

static const struct gpu_bound *gpu_bound_of(int kind)
{
    for (size_t i = 0; i < sizeof GPU_BOUND / sizeof *GPU_BOUND; i++)
        if (GPU_BOUND[i].kind == kind)
            return &GPU_BOUND[i];
    cr_assert_fail("no bound for kind %d", kind);
    return NULL;
}

static void compare_kind(int kind)
{
    struct fixture f;
    const struct kimi_kind *d = &KIMI_KIND[kind];
    open_kind(&f, kind, DN_WEIGHTS_AUTO, 2);
    for (int absorbed = 0; absorbed < 2; absorbed++) {
        double mean;
        run_text(&f, DN_KV_BF16, absorbed ? 0 : TINY_TOKENS, !fixture_is_gpu());
        double max = largest_error(LOGITS, REFERENCE, N_LOGITS, &mean);
        printf("%-14s %-8s: mean logit error %.6f, median of rows %.6f, max %.5f\n", d->name,
               absorbed ? "absorbed" : "expanded", mean, median_row(), max);
        if (fixture_is_gpu()) {
            cr_expect_lt(median_row(), gpu_bound_of(kind)->median, "%s", d->name);
            cr_expect_lt(mean, gpu_bound_of(kind)->mean, "%s", d->name);
            continue;
        }
        /* A latent whose value lies between two of bf16 falls to either side: 1e-3 of an error. */
        cr_expect_lt(mean, 1e-3, "%s", d->name);
        cr_expect_lt(max, 0.012, "%s", d->name);
    }
    fixture_close(&f);
}

Test(forward_kimi, bf16_checkpoints)
{
    compare_kind(0);
    compare_kind(3);
}

Test(forward_kimi, fp8_checkpoints)
{
    compare_kind(1);
}

Test(forward_kimi, int4_checkpoints)
{
    compare_kind(2);
    compare_kind(4);
}

/* What every backend knows. */
Test(forward_kimi, head_sizes_of_kimi)
{
    compare_kind(6);
    compare_kind(7);
    compare_kind(8);
}

Test(forward_kimi, a_thousand_experts)
{
    compare_kind(5);
}

/* ---- What a result may not depend on ----------------------------------------------------------------------------- */

/* Absorbed steps of several sequences at once, in both formats of the cache, are bit for bit those of one alone; so are
 * prefills, however they are chunked and on however many threads. */
Test(forward_kimi, batch_chunks_and_threads_change_nothing)
{
    enum { N = 3 };
    static float alone[2][N_LOGITS], row[KIMI_VOCAB];
    struct sequence q[N];
    struct fixture f, g;
    int kind = fixture_is_gpu() ? 6 : 0;
    open_kind(&f, kind, DN_WEIGHTS_AUTO, 1);
    open_kind(&g, kind, DN_WEIGHTS_AUTO, 2);
    for (int kv = 0; kv < DN_KV_FORMATS; kv++) {
        run_text(&f, (enum dn_kv_format)kv, 0, false);
        memcpy(alone[kv], LOGITS, sizeof LOGITS);
        run_text(&g, (enum dn_kv_format)kv, 0, false);
        cr_expect_arr_eq(LOGITS, alone[kv], sizeof LOGITS, "two threads");
    }
    g.next_slab = 0;
    for (int i = 0; i < N; i++)
        q[i] = (struct sequence){.format = (enum dn_kv_format)(i % 2)};
    for (uint32_t t = 0; t < TINY_TOKENS; t++) {
        step_clear(&g);
        dn_runner_arrays(g.runner)->kind = DN_STEP_DECODE;
        for (int i = 0; i < N; i++)
            step_add(&g, &q[i], ID + t, 1, ROWS_LAST);
        step_run(&g);
        for (uint32_t i = 0; i < N; i++) {
            dn_runner_logits(g.runner, i, 1, row);
            cr_expect_arr_eq(row, alone[i % 2] + (size_t)t * KIMI_VOCAB, sizeof row, "token %u of sequence %u", t, i);
        }
    }
    run_text(&f, DN_KV_BF16, TINY_TOKENS, false);
    memcpy(alone[0], LOGITS, sizeof LOGITS);
    for (uint32_t chunk = 1; chunk < TINY_TOKENS; chunk += 6) {
        q[0] = (struct sequence){.format = DN_KV_BF16};
        g.next_slab = 0;
        run_tokens(&g, &q[0], ID, TINY_TOKENS, chunk, LOGITS);
        cr_expect_arr_eq(LOGITS, alone[0], sizeof LOGITS, "chunks of %u", chunk);
    }
    fixture_close(&f);
    fixture_close(&g);
}

/* The formats that weights can be asked for, on a checkpoint of each kind: errors of their rounding, and what is noted.
 */
Test(forward_kimi, weights_in_every_format)
{
    static const double bound[DN_W_FORMATS] = {[DN_W_BF16] = 0.2, [DN_W_FP8] = 1, [DN_W_INT8] = 0.5, [DN_W_INT4] = 2};
    int first = fixture_is_gpu() ? 6 : 0, end = fixture_is_gpu() ? KIMI_KINDS : 4;
    for (int kind = first; kind < end; kind++) {
        for (int format = 0; format < DN_W_FORMATS; format++) {
            struct fixture f;
            double mean[2];
            open_kind(&f, kind, format, 2);
            for (int kv = 0; kv < DN_KV_FORMATS; kv++) {
                run_text(&f, (enum dn_kv_format)kv, TINY_TOKENS, false);
                largest_error(LOGITS, REFERENCE, N_LOGITS, &mean[kv]);
            }
            printf("%-10s weights %-4s: mean logit error %.5f, with fp8 KV %.5f\n", KIMI_KIND[kind].name,
                   dn_weight_format_name((enum dn_weight_format)format), mean[0], mean[1]);
            for (int kv = 0; kv < DN_KV_FORMATS && fixture_is_gpu(); kv++)
                cr_expect_lt(mean[kv], gpu_bound_of(kind)->format_mean[format][kv], "%s", KIMI_KIND[kind].name);
            if (!fixture_is_gpu())
                cr_expect_lt(mean[0], bound[format], "%s", KIMI_KIND[kind].name);
            fixture_close(&f);
        }
    }
}

/* ---- Formats ----------------------------------------------------------------------------------------------------- */

static bool has_note(const struct dn_weights *w, const char *text)
{
    for (size_t i = 0; i < w->n_notes; i++)
        if (strcmp(w->note[i], text) == 0)
            return true;
    return false;
}

/* "auto" keeps what the files have, exactly; what it cannot keep is noted. */
Test(forward_kimi, auto_keeps_the_formats_of_the_files)
{
    struct fixture f;
    open_kind(&f, 0, DN_WEIGHTS_AUTO, 2);
    cr_expect_eq(f.weights->n_notes, 0);
    cr_expect_eq(f.weights->layer[1].expert_down.format, DN_W_BF16);
    fixture_close(&f);

    open_kind(&f, 2, DN_WEIGHTS_AUTO, 2);
    const struct dn_layer_weights *w = &f.weights->layer[1];
    const struct dn_matrix *expert[] = {&w->expert_gate_up, &w->expert_down};
    cr_expect_eq(f.weights->n_notes, 0);
    for (int i = 0; i < 2; i++)
        cr_expect(expert[i]->format == DN_W_INT4 && expert[i]->symmetric && expert[i]->scale_is_bf16 &&
                  expert[i]->n_groups == 16);
    cr_expect(w->o.format == DN_W_BF16 && w->shared_down.format == DN_W_BF16 && w->router.format == DN_W_BF16);
    cr_expect_str_eq(dn_weights_main_format(f.weights), "bf16");
    fixture_close(&f);

    open_kind(&f, 1, DN_WEIGHTS_AUTO, 2);
    w = &f.weights->layer[1];
    cr_expect(w->expert_gate_up.format == DN_W_FP8 && w->expert_down.format == DN_W_FP8 && w->kv_a.format == DN_W_FP8);
    cr_expect(w->q_b.format == DN_W_FP8 && w->o.format == DN_W_FP8 && w->shared_gate_up.format == DN_W_FP8);
    cr_expect(w->w_kt.format == DN_W_BF16 && w->w_k.format == DN_W_BF16 && w->w_v.format == DN_W_BF16);
    cr_expect(f.weights->layer[0].gate_up.format == DN_W_BF16 && f.weights->layer[0].down.format == DN_W_FP8);
    cr_expect_eq(f.weights->n_notes, 3);
    cr_expect(has_note(f.weights, "2 tensors of type F8_E4M3: rounded to bf16"));
    cr_expect(has_note(f.weights, "1 matrix kept in bf16: the FP8 blocks of their parts do not line up"));
    cr_expect(has_note(f.weights, "9 matrices kept in bf16: routers and projections from the latent are bf16 always"));
    fixture_close(&f);

    open_kind(&f, 5, DN_W_FP8, 2);
    cr_expect(f.weights->layer[2].expert_down.format == DN_W_BF16 && f.weights->layer[2].o.format == DN_W_FP8);
    cr_expect(has_note(f.weights,
                       "2 matrices kept in bf16: experts whose rows are not a multiple of 128 have no fp8 format"));
    fixture_close(&f);
}

/* What `dunlin show` and admission count on is what there is. */
Test(forward_kimi, the_plan_is_what_is_taken)
{
    for (int kind = 0; kind < KIMI_KINDS; kind++) {
        struct fixture f;
        struct dn_plan plan;
        struct dn_err err = {0};
        open_kind(&f, kind, DN_WEIGHTS_AUTO, 1);
        const struct dn_runner *r = f.runner;
        cr_assert_eq(dn_weights_plan(f.device->ops, f.model, DN_WEIGHTS_AUTO, &r->conf.limits, r->conf.context_tokens,
                                     &plan, &err),
                     0, "%s", err.text);
        cr_expect_eq(plan.weight_bytes, f.weights->bytes);
        cr_expect_eq(plan.activation_bytes, r->activation_bytes);
        cr_expect_eq(plan.rope_bytes, r->rope_bytes);
        for (int kv = 0; kv < DN_KV_FORMATS; kv++)
            cr_expect_eq(plan.kv_token_bytes[kv], r->layout.format[kv].page_bytes / r->layout.page_tokens);
        fixture_close(&f);
    }
}

static void count_progress(void *ctx, uint64_t done, uint64_t total)
{
    uint64_t *last = ctx;
    cr_expect(done >= last[0] && done <= total && total > 0);
    last[0] = done;
    last[1] = total;
}

/* Bytes of the tensors that are packed; the keys' rows of kv_b are read for two matrices. */
Test(forward_kimi, progress_counts_the_bytes_of_the_files)
{
    struct fixture f;
    struct dn_weights *w;
    struct dn_err err = {0};
    uint64_t seen[2] = {0}, keys = 3 * 2 * KIMI_HEADS * KIMI_NOPE * KIMI_LATENT;
    uint64_t vectors = 3 * 2 * (2 * 128 + 128 + 64) + 2 * 128 + 2 * 4 * 16;
    open_kind(&f, 0, DN_WEIGHTS_AUTO, 1);
    struct dn_weights_conf conf = {
        .format = DN_WEIGHTS_AUTO, .n_threads = 3, .progress = count_progress, .progress_ctx = seen};
    cr_assert_eq(dn_weights_open(f.device, f.model, &conf, &w, &err), 0, "%s", err.text);
    cr_expect_eq(seen[0], seen[1]);
    cr_expect_eq(seen[1], f.model->file_bytes + keys - vectors, "%llu", (unsigned long long)seen[1]);
    dn_weights_close(w);
    fixture_close(&f);
}

/* Before anything is allocated: `dunlin show` says the same. */
Test(forward_kimi, what_does_not_fit_a_backend_is_named)
{
    struct kimi_kind k = KIMI_KIND[0];
    struct fixture f;
    struct dn_model *m;
    struct dn_weights *w;
    struct dn_plan plan;
    struct dn_err err = {0};
    struct dn_weights_conf conf = {.format = DN_WEIGHTS_AUTO};
    k.ff = 40;
    open_kind(&f, 0, DN_WEIGHTS_AUTO, 1);
    const char *folder = kimi_checkpoint(&k, (struct kimi_fault){0});
    cr_assert_eq(dn_model_open(folder, &m, &err), 0, "%s", err.text);
    tiny_remove(folder);
    const char *text = "tensor \"model.layers.1.mlp.experts.0.gate_proj.weight\": 16 matrices of 80 x 128 do not fit "
                       "backend \"cpu\" as bf16";
    cr_expect_eq(dn_weights_open(f.device, m, &conf, &w, &err), -DN_MODEL_FILE);
    cr_expect_str_eq(err.text, text);
    err = (struct dn_err){0};
    cr_expect_eq(dn_weights_plan(f.device->ops, m, DN_WEIGHTS_AUTO, &f.runner->conf.limits, 512, &plan, &err),
                 -DN_MODEL_FILE);
    cr_expect_str_eq(err.text, text);
    dn_model_close(m);
    fixture_close(&f);
}
