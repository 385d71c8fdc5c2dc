#include "base/json.h"
#include "engine/mapfile.h"
#include "engine/tokenizer.h"
#include "unit/engine/engine_fixture.h"

/* tests/oracle/make_smollm2.py says what the reference holds. */
static json_t *read_reference(void)
{
    char *text;
    size_t len;
    struct dn_err err = {0};
    json_t *json;
    cr_assert_eq(
        dn_mapfile_read_text(DN_SOURCE_DIR "/tests/fixtures/smollm2_reference.json", 1 << 20, &text, &len, &err), 0,
        "%s", err.text);
    cr_assert_eq(dn_json_parse(text, len, &json, &err), 0, "%s", err.text);
    free(text);
    return json;
}

static uint32_t read_ids(const json_t *array, int32_t *id, uint32_t max)
{
    uint32_t n = (uint32_t)json_array_size(array);
    cr_assert_leq(n, max);
    for (uint32_t i = 0; i < n; i++)
        id[i] = (int32_t)json_integer_value(json_array_get(array, i));
    return n;
}

struct errors {
    double max, sum;
    size_t n;
    uint32_t greedy_right, greedy_n;
};

static void compare(struct errors *e, float is, double want)
{
    double d = fabs((double)is - want);
    cr_assert(isfinite(is));
    e->max = d > e->max ? d : e->max;
    e->sum += d;
    e->n++;
}

/* Teacher-forced over prompt and reference text: logit errors at the stored rows, and how often the best token is the
 * reference's. */
static void compare_prompt(struct fixture *f, const json_t *prompt, size_t stride, enum dn_kv_format kv,
                           struct errors *e)
{
    static struct sequence q;
    int32_t id[512];
    size_t n_vocab = f->model->hyper.n_vocab;
    uint32_t n = read_ids(json_object_get(prompt, "ids"), id, 400);
    uint32_t n_greedy = read_ids(json_object_get(prompt, "greedy"), id + n, 112);
    float *logits = dn_alloc0((size_t)(n + n_greedy) * n_vocab, sizeof *logits);
    q = (struct sequence){.format = kv};
    f->next_slab = 0;
    run_tokens(f, &q, id, n + n_greedy, 512, logits);
    for (uint32_t i = 0; i < n_greedy; i++) {
        const float *row = logits + (n - 1 + i) * n_vocab;
        size_t best = 0;
        for (size_t v = 1; v < n_vocab; v++)
            best = row[v] > row[best] ? v : best;
        e->greedy_n++;
        e->greedy_right += (int32_t)best == id[n + i];
    }
    size_t r;
    json_t *row;
    json_array_foreach(json_object_get(prompt, "rows"), r, row)
    {
        const float *is = logits + (size_t)json_integer_value(json_object_get(row, "position")) * n_vocab;
        const json_t *top = json_object_get(row, "top_id"), *logit = json_object_get(row, "top_logit");
        for (size_t i = 0; i < json_array_size(top); i++)
            compare(e, is[json_integer_value(json_array_get(top, i))], json_number_value(json_array_get(logit, i)));
        const json_t *every = json_object_get(row, "every");
        for (size_t i = 0; i < json_array_size(every); i++)
            compare(e, is[i * stride], json_number_value(json_array_get(every, i)));
    }
    free(logits);
}

/* Bounds on the mean and the largest error: twice what was measured. Logits have a spread of about 5. */
static const struct {
    int format;
    double mean[DN_KV_FORMATS], max[DN_KV_FORMATS];
} BOUND[] = {
    {DN_WEIGHTS_AUTO, {0.04, 0.55}, {0.3, 3.0}},
    {DN_W_BF16, {0.06, 0.55}, {0.4, 2.4}},
    {DN_W_FP8, {1.1, 1.1}, {6.5, 6.5}},
    {DN_W_INT8, {0.3, 0.6}, {1.4, 3.0}},
};

static void compare_format(int format)
{
    const char *path = smollm2_path();
    if (path == NULL) {
        printf("SKIPPED: SmolLM2 is neither named by DN_TEST_MODEL nor in ~/.cache/dunlin (./dev fetches it)\n");
        return;
    }
    json_t *reference = read_reference(), *prompt;
    size_t stride = (size_t)json_integer_value(json_object_get(reference, "stride")), p, i = 0;
    struct fixture f;
    fixture_open(&f, path, format, 0, 512);
    while (BOUND[i].format != format)
        i++;
    for (int kv = 0; kv < DN_KV_FORMATS; kv++) {
        struct errors e = {0};
        json_array_foreach(json_object_get(reference, "prompts"), p, prompt)
        {
            compare_prompt(&f, prompt, stride, (enum dn_kv_format)kv, &e);
        }
        double mean = e.sum / (double)e.n;
        printf("weights %-4s kv %-8s: mean logit error %.4f, max %.4f, best token %u of %u\n",
               dn_weights_format_name(format), dn_kv_format_name((enum dn_kv_format)kv), mean, e.max, e.greedy_right,
               e.greedy_n);
        cr_expect_lt(mean, BOUND[i].mean[kv]);
        cr_expect_lt(e.max, BOUND[i].max[kv]);
    }
    fixture_close(&f);
    json_decref(reference);
}

Test(smollm2, logits_with_the_files_own_weights_are_those_of_transformers)
{
    compare_format(DN_WEIGHTS_AUTO);
}

Test(smollm2, logits_with_bf16_weights_are_those_of_transformers)
{
    compare_format(DN_W_BF16);
}

Test(smollm2, logits_with_fp8_weights_are_those_of_transformers)
{
    compare_format(DN_W_FP8);
}

Test(smollm2, logits_with_int8_weights_are_those_of_transformers)
{
    compare_format(DN_W_INT8);
}

/* Greedy text from the prompt on, a token a step. It must be the reference's up to the first place where the reference
 * itself had two tokens nearly level (its margin in logits is below `level`): there rounding decides, and the texts
 * part for good. */
static void follow_prompt(struct fixture *f, const json_t *prompt, double level)
{
    static struct sequence q;
    int32_t id[512], want[128];
    const char *name = json_string_value(json_object_get(prompt, "name"));
    uint32_t n = read_ids(json_object_get(prompt, "ids"), id, 400);
    uint32_t n_greedy = read_ids(json_object_get(prompt, "greedy"), want, 128), right = 0;
    q = (struct sequence){.format = DN_KV_BF16};
    f->next_slab = 0;
    run_tokens(f, &q, id, n, 512, NULL);
    while (right < n_greedy) {
        int32_t next = dn_runner_arrays(f->runner)->result[0].id;
        if (next != want[right])
            break;
        right++;
        run_tokens(f, &q, &next, 1, 1, NULL);
    }
    double margin = right < n_greedy ? json_number_value(json_array_get(json_object_get(prompt, "margin"), right)) : 0;
    printf("weights %-4s: %-8s %u of %u greedy tokens", dn_weights_format_name(f->weights->format), name, right,
           n_greedy);
    printf(right < n_greedy ? ", then a margin of %.3f\n" : "\n", margin);
    cr_expect(right == n_greedy || margin < level, "%s", name);
}

static void follow_all(int format, double level)
{
    const char *path = smollm2_path();
    if (path == NULL) {
        printf("SKIPPED: SmolLM2 is neither named by DN_TEST_MODEL nor in ~/.cache/dunlin (./dev fetches it)\n");
        return;
    }
    struct fixture f;
    json_t *reference = read_reference(), *prompt;
    size_t p;
    fixture_open(&f, path, format, 0, 512);
    json_array_foreach(json_object_get(reference, "prompts"), p, prompt)
    {
        follow_prompt(&f, prompt, level);
    }
    fixture_close(&f);
    json_decref(reference);
}

Test(smollm2, greedy_text_with_bf16_weights_is_that_of_transformers)
{
    follow_all(DN_W_BF16, 0.1);
}

Test(smollm2, greedy_text_with_the_files_own_weights_is_that_of_transformers)
{
    follow_all(DN_WEIGHTS_AUTO, 0.1);
}

/* The model's own description, and its tokenizer through dn_model_open_tokenizer(): ids and text of the reference
 * agree. */
Test(smollm2, is_described_and_its_tokenizer_reads_the_reference_text)
{
    const char *path = smollm2_path();
    if (path == NULL) {
        printf("SKIPPED: SmolLM2 is neither named by DN_TEST_MODEL nor in ~/.cache/dunlin (./dev fetches it)\n");
        return;
    }
    struct dn_model *m;
    struct dn_tokenizer *t;
    struct dn_err err = {0};
    cr_assert_eq(dn_model_open(path, &m, &err), 0, "%s", err.text);
    cr_assert_eq(dn_model_open_tokenizer(m, &t, &err), 0, "%s", err.text);
    const struct dn_hyper *h = &m->hyper;
    cr_expect(h->arch == DN_ARCH_LLAMA && h->n_layers == 30 && h->dim == 576 && h->n_heads == 9 && h->n_kv_heads == 3);
    cr_expect(h->head_dim == 64 && h->ff_dim == 1536 && h->n_vocab == 49152 && h->context_tokens == 8192 &&
              h->tied_head);
    cr_expect(m->n_eos == 1 && m->eos_id[0] == 2 && m->bos_id == 1 && !m->add_bos);
    cr_expect_eq(m->n_params, 134515008);
    cr_expect_str_eq(m->type_text, "GGUF Q4_1");
    cr_expect_eq(dn_model_kv_bytes(m, false), 23040);
    json_t *reference = read_reference(), *prompt;
    size_t p;
    json_array_foreach(json_object_get(reference, "prompts"), p, prompt)
    {
        int32_t id[128];
        uint32_t n = read_ids(json_object_get(prompt, "greedy"), id, 128);
        struct dn_buf text = {0};
        dn_tokenizer_decode(t, id, n, false, &text);
        cr_expect_str_eq(dn_buf_str(&text), json_string_value(json_object_get(prompt, "text")));
        dn_buf_release(&text);
    }
    json_decref(reference);
    dn_tokenizer_close(t);
    dn_model_close(m);
}
