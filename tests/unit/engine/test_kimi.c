#include "base/json.h"
#include "engine/mapfile.h"
#include "unit/engine/engine_fixture.h"
#include "unit/engine/kimi_mini.h"

/* The trained miniatures against transformers: tests/oracle/make_kimi.py says what the reference holds. The oracle
 * computes in float32 on the published weights; what we differ by is what a cache in bf16 or FP8 rounds, what a format
 * of the weights rounds, and the order of sums. */
enum { MAX_IDS = 4096, DECODE_FROM = 1000, CHUNK = 512 };

static json_t *read_file(const char *path)
{
    char *text;
    size_t len;
    struct dn_err err = {0};
    json_t *json;
    cr_assert_eq(dn_mapfile_read_text(path, 1 << 20, &text, &len, &err), 0, "%s", err.text);
    cr_assert_eq(dn_json_parse(text, len, &json, &err), 0, "%s", err.text);
    free(text);
    return json;
}

static json_t *read_reference(void)
{
    char path[4200];
    const char *folder = getenv("DN_TEST_FIXTURES"); /* of a program that runs away from its sources */
    snprintf(path, sizeof path, "%s/kimi_reference.json", folder ? folder : DN_SOURCE_DIR "/tests/fixtures");
    return read_file(path);
}

static uint32_t read_ids(const json_t *array, int32_t *id, uint32_t max)
{
    uint32_t n = (uint32_t)json_array_size(array);
    cr_assert_leq(n, max);
    for (uint32_t i = 0; i < n; i++)
        id[i] = (int32_t)json_integer_value(json_array_get(array, i));
    return n;
}

static int32_t best_of(const float *row, size_t n)
{
    size_t best = 0;
    for (size_t v = 1; v < n; v++)
        best = row[v] > row[best] ? v : best;
    return (int32_t)best;
}

struct errors {
    double max, sum;
    size_t n;
    uint32_t experts_right, experts;
};

static void compare(struct errors *e, float is, double want)
{
    double d = fabs((double)is - want);
    cr_assert(isfinite(is));
    e->max = d > e->max ? d : e->max;
    e->sum += d;
    e->n++;
}

/* How many of a token's experts are among the reference's. */
static void compare_experts(struct errors *e, const int32_t *is, const json_t *want)
{
    for (size_t i = 0; i < json_array_size(want); i++, e->experts++)
        for (size_t k = 0; k < json_array_size(want); k++)
            e->experts_right += json_integer_value(json_array_get(want, k)) == is[i];
}

static void compare_row(struct errors *e, const float *logits, const int32_t *experts, const json_t *row, size_t stride)
{
    const json_t *top = json_object_get(row, "top_id"), *logit = json_object_get(row, "top_logit");
    for (size_t i = 0; i < json_array_size(top); i++)
        compare(e, logits[json_integer_value(json_array_get(top, i))], json_number_value(json_array_get(logit, i)));
    const json_t *every = json_object_get(row, "every");
    for (size_t i = 0; i < json_array_size(every); i++)
        compare(e, logits[i * stride], json_number_value(json_array_get(every, i)));
    compare_experts(e, experts, json_object_get(row, "experts"));
}

/* One token of one sequence, as schedulers make decode steps: absorbed. */
static void decode(struct fixture *f, struct sequence *q, int32_t id)
{
    step_clear(f);
    dn_runner_arrays(f->runner)->kind = DN_STEP_DECODE;
    step_add(f, q, &id, 1, ROWS_LAST);
    step_run(f);
}

/* Logits and the last layer's experts of the tokens of the last step from token t on. */
static void take_row(struct fixture *f, uint32_t t, float *logits, int32_t *experts)
{
    uint32_t k = f->model->hyper.top_experts;
    dn_runner_logits(f->runner, t, 1, logits);
    f->device->ops->download(f->device, experts, f->runner->expert + (size_t)t * k, k * sizeof *experts);
}

/* The reference's rows at positions [first, end), out of a step whose token 0 is at `first`. */
static void compare_rows(struct fixture *f, const json_t *text, size_t stride, uint32_t first, uint32_t end,
                         struct errors *e)
{
    static float logits[8192];
    int32_t experts[DN_MAX_TOP_EXPERTS];
    size_t i;
    json_t *row;
    json_array_foreach(json_object_get(text, "rows"), i, row)
    {
        uint32_t p = (uint32_t)json_integer_value(json_object_get(row, "position"));
        if (p < first || p >= end)
            continue;
        take_row(f, p - first, logits, experts);
        compare_row(e, logits, experts, row, stride);
    }
}

/* The text, prefilled in chunks up to `decode_from` and then a token a step. */
static void compare_text(struct fixture *f, const json_t *text, size_t stride, enum dn_kv_format kv,
                         uint32_t decode_from, struct errors *e)
{
    static struct sequence q;
    int32_t id[MAX_IDS];
    uint32_t n = read_ids(json_object_get(text, "ids"), id, MAX_IDS), at = 0;
    q = (struct sequence){.format = kv};
    f->next_slab = 0;
    while (at < n) {
        uint32_t step = at >= decode_from ? 1 : n - at < CHUNK ? n - at : CHUNK;
        step = at < decode_from && decode_from - at < step ? decode_from - at : step;
        if (at >= decode_from) {
            decode(f, &q, id[at]);
            compare_rows(f, text, stride, at, at + 1, e);
        } else {
            step_clear(f);
            step_add(f, &q, id + at, step, ROWS_ALL);
            step_run(f);
            if (decode_from >= n)
                compare_rows(f, text, stride, at, at + step, e);
        }
        at += step;
    }
}

/* Bounds on the mean and the largest error, [KV format]: twice what was measured. Logits have a spread of about 4; the
 * largest errors are where a near tie of two experts falls the other way. A GPU's activations are bf16, which adds a
 * hundredth: seen where cache and weights are not rounded, else lost in that (an H200's of prefill, and of decode at
 * other positions: tests/bench/logits.c). */
static const struct bound {
    const char *model;
    int format;
    struct {
        double mean[DN_KV_FORMATS], max[DN_KV_FORMATS];
    } cpu, gpu;
} BOUND[] = {
    {"mini-kimi", DN_WEIGHTS_AUTO, {{0.015, 0.24}, {0.11, 4.5}}, {{0.05, 0.24}, {0.75, 4.7}}},
    {"mini-kimi", DN_W_BF16, {{0.015, 0.24}, {0.11, 4.5}}, {{0.05, 0.24}, {0.75, 4.7}}},
    {"mini-kimi", DN_W_FP8, {{0.62, 0.64}, {4.7, 8.2}}, {{0.62, 0.64}, {7.8, 8.2}}},
    {"mini-kimi", DN_W_INT8, {{0.07, 0.27}, {0.44, 4.1}}, {{0.09, 0.27}, {0.85, 5}}},
    {"mini-kimi", DN_W_INT4, {{0.93, 0.96}, {8.7, 10}}, {{0.94, 0.97}, {8.8, 10.6}}},
    {"mini-kimi-int4", DN_WEIGHTS_AUTO, {{0.031, 0.16}, {0.58, 0.79}}, {{0.06, 0.17}, {0.6, 0.87}}},
    {"mini-kimi-int4", DN_W_BF16, {{0.033, 0.17}, {0.59, 0.79}}, {{0.06, 0.17}, {0.6, 0.87}}},
    {"mini-kimi-int4", DN_W_FP8, {{0.48, 0.49}, {3, 3.1}}, {{0.48, 0.49}, {3.2, 3.3}}},
    {"mini-kimi-int4", DN_W_INT8, {{0.16, 0.26}, {2.7, 2.6}}, {{0.16, 0.26}, {2.7, 2.9}}},
    {"mini-kimi-int4", DN_W_INT4, {{0.75, 0.76}, {4.5, 4.3}}, {{0.75, 0.76}, {4.6, 4.6}}},
};

static double here(double cpu, double gpu)
{
    return fixture_is_gpu() ? gpu : cpu;
}

static const struct bound *bound_of(const char *model, int format)
{
    for (size_t i = 0; i < sizeof BOUND / sizeof *BOUND; i++)
        if (strcmp(BOUND[i].model, model) == 0 && BOUND[i].format == format)
            return &BOUND[i];
    cr_assert(false);
    return NULL;
}

static void compare_format(const char *name, int format)
{
    const char *path = mini_path(name);
    if (path == NULL)
        return;
    json_t *reference = read_reference();
    const json_t *text = json_object_get(reference, name);
    size_t stride = (size_t)json_integer_value(json_object_get(reference, "stride"));
    const struct bound *bound = bound_of(name, format);
    struct fixture f;
    fixture_open(&f, path, format, 0, CHUNK);
    for (int kv = 0; kv < DN_KV_FORMATS; kv++) {
        for (int absorbed = 0; absorbed < 2; absorbed++) {
            struct errors e = {0};
            compare_text(&f, text, stride, (enum dn_kv_format)kv, absorbed ? DECODE_FROM : MAX_IDS, &e);
            double mean = e.sum / (double)e.n;
            printf("%-14s weights %-4s kv %-8s %-7s: mean logit error %.5f, max %.4f, experts %u of %u\n", name,
                   dn_weights_format_name(format), dn_kv_format_name((enum dn_kv_format)kv),
                   absorbed ? "decode" : "prefill", mean, e.max, e.experts_right, e.experts);
            cr_expect_lt(mean, here(bound->cpu.mean[kv], bound->gpu.mean[kv]));
            cr_expect_lt(e.max, here(bound->cpu.max[kv], bound->gpu.max[kv]));
        }
    }
    fixture_close(&f);
    json_decref(reference);
}

Test(kimi, logits_are_those_of_transformers)
{
    compare_format("mini-kimi", DN_WEIGHTS_AUTO);
    compare_format("mini-kimi", DN_W_BF16);
}

Test(kimi, logits_with_rounded_weights_stay_near)
{
    compare_format("mini-kimi", DN_W_FP8);
    compare_format("mini-kimi", DN_W_INT8);
    compare_format("mini-kimi", DN_W_INT4);
}

Test(kimi, logits_of_int4_experts_are_those_of_transformers)
{
    compare_format("mini-kimi-int4", DN_WEIGHTS_AUTO);
    compare_format("mini-kimi-int4", DN_W_BF16);
}

Test(kimi, logits_of_int4_experts_with_other_formats_stay_near)
{
    compare_format("mini-kimi-int4", DN_W_FP8);
    compare_format("mini-kimi-int4", DN_W_INT8);
    compare_format("mini-kimi-int4", DN_W_INT4);
}

/* ---- Greedy text ------------------------------------------------------------------------------------------------- */

/* The best token at every position of a continuation that is fed as the reference has it, by decode steps. Where it is
 * another, the reference's own margin tells whether rounding may decide: the largest one passed over. */
static void follow_greedy(struct fixture *f, const int32_t *prompt, uint32_t n_prompt, const json_t *greedy,
                          enum dn_kv_format kv, uint32_t *right, uint32_t *n, double *passed)
{
    static struct sequence q;
    static float logits[8192];
    int32_t want[128];
    uint32_t n_want = read_ids(json_object_get(greedy, "ids"), want, 128);
    q = (struct sequence){.format = kv};
    f->next_slab = 0;
    run_tokens(f, &q, prompt, n_prompt, CHUNK, NULL);
    for (uint32_t i = 0; i < n_want; i++) {
        dn_runner_logits(f->runner, 0, 1, logits);
        bool same = best_of(logits, f->model->hyper.n_vocab) == want[i];
        double margin = json_number_value(json_array_get(json_object_get(greedy, "margin"), i));
        ++*n;
        *right += same;
        *passed = !same && margin > *passed ? margin : *passed;
        decode(f, &q, want[i]);
    }
}

/* level, [KV format]: the largest margin that may be passed over. On a GPU twice the largest that an H200 passed
 * over here or in tests/bench/logits.c. */
static void follow_all(const char *name, int format, const double level[DN_KV_FORMATS])
{
    const char *path = mini_path(name);
    if (path == NULL)
        return;
    json_t *reference = read_reference(), *greedy;
    const json_t *text = json_object_get(reference, name);
    int32_t id[MAX_IDS];
    size_t g;
    struct fixture f;
    read_ids(json_object_get(text, "ids"), id, MAX_IDS);
    fixture_open(&f, path, format, 0, CHUNK);
    for (int kv = 0; kv < DN_KV_FORMATS; kv++) {
        uint32_t right = 0, n = 0;
        double passed = 0;
        json_array_foreach(json_object_get(text, "greedy"), g, greedy)
        {
            uint32_t begin = (uint32_t)json_integer_value(json_object_get(greedy, "begin"));
            uint32_t end = (uint32_t)json_integer_value(json_object_get(greedy, "end"));
            follow_greedy(&f, id + begin, end - begin, greedy, (enum dn_kv_format)kv, &right, &n, &passed);
        }
        printf("%-14s weights %-4s kv %-8s: best token %u of %u; largest margin passed over %.4f\n", name,
               dn_weights_format_name(format), dn_kv_format_name((enum dn_kv_format)kv), right, n, passed);
        cr_expect_eq(n, 512);
        cr_expect_leq(passed, level[kv]);
    }
    fixture_close(&f);
    json_decref(reference);
}

Test(kimi, greedy_text_is_that_of_transformers)
{
    follow_all("mini-kimi", DN_WEIGHTS_AUTO, (double[]){here(0.02, 0.12), here(0.82, 0.55)});
    follow_all("mini-kimi-int4", DN_WEIGHTS_AUTO, (double[]){here(0.02, 0.21), here(0.82, 1.1)});
}

Test(kimi, greedy_text_with_rounded_weights_stays_near)
{
    follow_all("mini-kimi", DN_W_FP8, (double[]){here(1, 1.25), here(1.8, 2.1)});
    follow_all("mini-kimi", DN_W_INT8, (double[]){here(1, 0.3), here(1.8, 0.55)});
    follow_all("mini-kimi", DN_W_INT4, (double[]){here(2, 2.5), here(2.8, 3.3)});
}

/* ---- The reference that comes with the models -------------------------------------------------------------------- */

static void compare_top(struct fixture *f, uint32_t t, const json_t *row, struct errors *e)
{
    static float logits[8192];
    const json_t *top = json_object_get(row, "ids"), *logit = json_object_get(row, "logits");
    dn_runner_logits(f->runner, t, 1, logits);
    for (size_t i = 0; i < json_array_size(top); i++)
        compare(e, logits[json_integer_value(json_array_get(top, i))], json_number_value(json_array_get(logit, i)));
}

/* Prefills a prompt; logits and experts of its last token. */
static void prefill_published(struct fixture *f, struct sequence *q, const json_t *prompt, struct errors *e,
                              float *logits)
{
    int32_t id[MAX_IDS], experts[DN_MAX_TOP_EXPERTS];
    uint32_t n = read_ids(json_object_get(prompt, "token_ids"), id, MAX_IDS), last = 0;
    const char *key;
    json_t *row;
    f->next_slab = 0;
    for (uint32_t at = 0; at < n; at += CHUNK) {
        uint32_t now = n - at < CHUNK ? n - at : CHUNK;
        step_clear(f);
        step_add(f, q, id + at, now, ROWS_ALL);
        step_run(f);
        last = now - 1;
        json_object_foreach(json_object_get(prompt, "positions"), key, row)
        {
            uint32_t p = (uint32_t)strtoul(key, NULL, 10);
            if (p >= at && p < at + now)
                compare_top(f, p - at, row, e);
        }
    }
    take_row(f, last, logits, experts);
    compare_experts(e, experts, json_object_get(json_object_get(prompt, "experts_last_position"), "2"));
}

static void compare_published(struct fixture *f, const json_t *prompt)
{
    static float logits[8192];
    struct sequence q = {.format = DN_KV_BF16};
    int32_t greedy[64];
    struct errors e = {0};
    const char *name = json_string_value(json_object_get(prompt, "name"));
    const json_t *want = json_object_get(prompt, "greedy");
    uint32_t n_greedy = read_ids(json_object_get(want, "token_ids"), greedy, 64), right = 0;
    double margin = 0;
    prefill_published(f, &q, prompt, &e, logits);
    for (; right < n_greedy && best_of(logits, f->model->hyper.n_vocab) == greedy[right]; right++) {
        decode(f, &q, greedy[right]);
        dn_runner_logits(f->runner, 0, 1, logits);
    }
    if (right < n_greedy)
        margin = json_number_value(json_array_get(json_object_get(want, "margin_to_second"), right));
    printf("%-10s mean logit error %.5f, max %.4f, experts %u of %u, greedy %u of %u", name, e.sum / (double)e.n, e.max,
           e.experts_right, e.experts, right, n_greedy);
    printf(right < n_greedy ? ", then a margin of %.4f\n" : "\n", margin);
    cr_expect_eq(e.n, 4 * 20);
    cr_expect_lt(e.max, here(0.15, 0.75));
    cr_expect(right == n_greedy || margin < here(0.05, 0.21), "%s", name);
}

static void compare_published_model(const char *name)
{
    const char *path = mini_path(name);
    if (path == NULL)
        return;
    struct fixture f;
    json_t *prompt;
    char file[4200];
    size_t p;
    fixture_open(&f, path, DN_WEIGHTS_AUTO, 0, CHUNK);
    snprintf(file, sizeof file, "%s/mini/%s/reference.json", mini_data(), name);
    json_t *reference = read_file(file);
    printf("%s\n", name);
    json_array_foreach(json_object_get(reference, "prompts"), p, prompt)
    {
        compare_published(&f, prompt);
    }
    fixture_close(&f);
    json_decref(reference);
}

Test(kimi, the_references_that_come_with_the_models)
{
    compare_published_model("mini-kimi");
    compare_published_model("mini-kimi-int4");
}

/* ---- What the model says of itself ------------------------------------------------------------------------------- */

Test(kimi, is_described)
{
    const char *path = mini_path("mini-kimi-int4");
    struct dn_model *m;
    struct dn_err err = {0};
    if (path == NULL)
        return;
    cr_assert_eq(dn_model_open(path, &m, &err), 0, "%s", err.text);
    const struct dn_hyper *h = &m->hyper;
    cr_expect_str_eq(dn_arch_name(h->arch), "kimi_k2");
    cr_expect(h->n_layers == 3 && h->dim == 256 && h->n_heads == 4 && h->q_lora_dim == 192 && h->latent_dim == 512);
    cr_expect(h->nope_dim == 128 && h->rope_dim == 64 && h->v_dim == 128 && h->head_dim == 192 && h->rotary_dim == 64);
    cr_expect(h->n_experts == 32 && h->top_experts == 4 && h->expert_ff == 128 && h->shared_ff == 128);
    cr_expect(h->n_dense_layers == 1 && !dn_hyper_has_experts(h, 0) && dn_hyper_has_experts(h, 1));
    cr_expect(h->rope_interleaved && h->rope_yarn && h->tied_head && h->context_tokens == 4096);
    cr_expect_str_eq(m->type_text, "safetensors INT4");
    cr_expect_eq(m->n_params, 11997056);
    cr_expect_eq(dn_model_kv_bytes(m, false), 3 * 2 * 576);
    cr_expect_eq(dn_model_kv_bytes(m, true), 3 * (512 + 4 + 128));
    cr_expect(m->n_eos == 2 && m->bos_id == 8128 && m->note == NULL);
    dn_model_close(m);
}
