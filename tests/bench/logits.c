/* How far a backend is from transformers in float32: a line for each model, weight format, KV format and way of
 * computing.
 *
 *   logits [--device D] [--weights LIST] [--kv LIST] [--threads N] [--csv FILE] [mini-kimi] [mini-kimi-int4] [smollm2]
 *
 * MEAN, MAX: of the differences of logits, at the positions and ids that tests/fixtures/{kimi,smollm2}_reference.json
 * have. BEST: how often the best token is the reference's, along its own text (tests/fixtures/greedy.json: 512 greedy
 * tokens behind each of four prompts); PASSED: the reference's largest margin between its two best tokens where it is
 * not. prefill: a prompt at once, in chunks; decode: a token a step. GREEDY: what the scheduler generates from the
 * prompts alone, all four at once: for each how many leading tokens are the reference's, of 512; MARGIN: where the
 * texts part, the reference's margin there, in logits: rounding decides where it is as small as the errors are.
 */
#include "base/buf.h"
#include "base/json.h"
#include "cli/args.h"
#include "cli/bench_table.h"
#include "cli/local.h"
#include "engine/mapfile.h"
#include "pool/device.h"
#include "unit/engine/kimi_mini.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 256, CONTEXT = 2048, GREEDY = 512, TEXTS = 4, SEQ_PAGES = CONTEXT / 16, VOCAB = 1 << 16 };

/* Tokens whose logits are known at some positions, and a prompt with its continuation. */
struct text {
    int32_t id[CONTEXT];
    uint32_t n;
    const json_t *rows;
};
struct prompt {
    int32_t id[CONTEXT]; /* n of the prompt, then GREEDY */
    uint32_t n;
    const json_t *margin;
};

struct reference {
    json_t *file, *greedy, *published; /* read files */
    size_t stride;
    struct text text[TEXTS];
    struct prompt prompt[TEXTS];
    size_t n_texts, n_prompts;
};

struct sequence {
    enum dn_kv_format format;
    uint32_t page[SEQ_PAGES], n_pages, n_tokens; /* tokens in the cache */
};

struct run {
    const char *model, *weights;
    uint64_t n_threads;
    bool gpu;
    struct dn_local local;
    struct dn_runner *runner;
    struct reference reference;
    uint32_t next_slab;
    struct sequence seq[TEXTS];
    float logits[VOCAB];
    int32_t free_id[TEXTS][GREEDY]; /* what the scheduler generated */
    uint32_t n_free[TEXTS];
    int code; /* of a request that failed */
};

struct result {
    double sum, max, passed;
    size_t n;
    uint32_t right, of;
};

static _Noreturn void die(const struct dn_err *err)
{
    fprintf(stderr, "logits: %s\n", err->text);
    exit(1);
}

/* ---- The reference ------------------------------------------------------------------------------------------------*/

static json_t *read_json(const char *folder, const char *file)
{
    char path[4352], *text;
    size_t n;
    struct dn_err err = {0};
    json_t *json;
    snprintf(path, sizeof path, "%s/%s", folder, file);
    if (dn_mapfile_read_text(path, 4 << 20, &text, &n, &err) != 0 || dn_json_parse(text, n, &json, &err) != 0)
        die(&err);
    free(text);
    return json;
}

static void append(const json_t *ids, size_t begin, size_t end, int32_t *id, uint32_t *n)
{
    for (size_t i = begin; i < end && i < json_array_size(ids); i++) {
        if (*n == CONTEXT)
            die(&(struct dn_err){.text = "a text of the reference is too long"});
        id[(*n)++] = (int32_t)json_integer_value(json_array_get(ids, i));
    }
}

static const json_t *named(const json_t *array, const char *key, const char *name)
{
    for (size_t i = 0; i < json_array_size(array); i++) {
        const json_t *o = json_array_get(array, i);
        if (strcmp(json_string_value(json_object_get(o, key)), name) == 0)
            return o;
    }
    return NULL;
}

/* The ids that a prompt's name stands for: see tests/oracle/make_greedy.py. */
static void find_prompt(const struct reference *r, const char *model, const char *name, struct prompt *out)
{
    const json_t *prompts = json_object_get(r->published ? r->published : r->file, "prompts"), *p;
    unsigned begin, end;
    if (sscanf(name, "%u-%u", &begin, &end) == 2)
        append(json_object_get(json_object_get(r->file, model), "ids"), begin, end, out->id, &out->n);
    else if ((p = named(prompts, "name", name)) != NULL)
        append(json_object_get(p, r->published ? "token_ids" : "ids"), 0, CONTEXT, out->id, &out->n);
    if (out->n == 0)
        die(&(struct dn_err){.text = "a prompt of greedy.json is not in the reference that it belongs to"});
}

static void open_reference(struct reference *r, const char *model)
{
    const char *folder = getenv("DN_TEST_FIXTURES"); /* of a program that runs away from its sources */
    bool mini = strcmp(model, "smollm2") != 0;
    folder = folder ? folder : DN_SOURCE_DIR "/tests/fixtures";
    memset(r, 0, sizeof *r);
    r->greedy = read_json(folder, "greedy.json");
    r->file = read_json(folder, mini ? "kimi_reference.json" : "smollm2_reference.json");
    r->stride = (size_t)json_integer_value(json_object_get(r->file, "stride"));
    if (mini) {
        char path[4352];
        snprintf(path, sizeof path, "%s/mini/%s", mini_data(), model);
        r->published = read_json(path, "reference.json");
        const json_t *o = json_object_get(r->file, model);
        r->text[0].rows = json_object_get(o, "rows");
        append(json_object_get(o, "ids"), 0, CONTEXT, r->text[0].id, &r->text[0].n);
        r->n_texts = 1;
    }
    const json_t *prompts = json_object_get(r->file, "prompts"), *greedy = json_object_get(r->greedy, model);
    for (; !mini && r->n_texts < TEXTS && r->n_texts < json_array_size(prompts); r->n_texts++) {
        const json_t *o = json_array_get(prompts, r->n_texts);
        struct text *t = &r->text[r->n_texts];
        t->rows = json_object_get(o, "rows");
        append(json_object_get(o, "ids"), 0, CONTEXT, t->id, &t->n);
        append(json_object_get(o, "greedy"), 0, CONTEXT, t->id, &t->n);
    }
    for (; r->n_prompts < TEXTS && r->n_prompts < json_array_size(greedy); r->n_prompts++) {
        const json_t *o = json_array_get(greedy, r->n_prompts);
        struct prompt *p = &r->prompt[r->n_prompts];
        find_prompt(r, model, json_string_value(json_object_get(o, "prompt")), p);
        uint32_t end = p->n;
        append(json_object_get(o, "ids"), 0, GREEDY, p->id, &end);
        p->margin = json_object_get(o, "margin");
        if (end != p->n + GREEDY)
            die(&(struct dn_err){.text = "greedy.json has not 512 ids for each prompt"});
    }
}

static void close_reference(struct reference *r)
{
    json_decref(r->file);
    json_decref(r->greedy);
    json_decref(r->published);
}

static double margin_at(const struct prompt *p, uint32_t i)
{
    return json_number_value(json_array_get(p->margin, i));
}

/* ---- Steps, while the scheduler has nothing to do: all pages are ours ---------------------------------------------*/

static void restart(struct run *r, enum dn_kv_format kv)
{
    r->next_slab = 0;
    for (int i = 0; i < TEXTS; i++)
        r->seq[i] = (struct sequence){.format = kv};
}

static struct dn_step *begin(struct run *r, enum dn_step_kind kind)
{
    struct dn_step *s = dn_runner_arrays(r->runner);
    s->kind = kind;
    s->n_tokens = s->n_seqs = s->n_rows = s->n_tags = s->tag_first = 0;
    s->token_start[0] = s->page_start[0] = 0;
    return s;
}

/* The next n tokens of a sequence, a row of logits for each. */
static void add(struct run *r, struct dn_step *s, struct sequence *q, const int32_t *id, uint32_t n)
{
    const struct dn_kv_layout *l = &r->runner->layout;
    uint32_t seq = s->n_seqs++, n_pages = (q->n_tokens + n + l->page_tokens - 1) / l->page_tokens;
    while (q->n_pages < n_pages) {
        if (r->next_slab == r->runner->n_slabs)
            die(&(struct dn_err){.text = "the arena is too small for the reference's texts"});
        for (uint32_t i = 0; i < l->format[q->format].pages_per_slab && q->n_pages < SEQ_PAGES; i++)
            q->page[q->n_pages++] = r->next_slab * l->slab_pages + i;
        r->next_slab++;
    }
    for (uint32_t i = 0; i < n; i++) {
        uint32_t t = s->n_tokens++;
        s->token_id[t] = id[i];
        s->position[t] = (int32_t)q->n_tokens++;
        s->token_seq[t] = (int32_t)seq;
        s->token_count[t] = 0;
        s->row_token[s->n_rows] = (int32_t)t;
        s->sample[s->n_rows++] = (struct dn_sample){.top_p = 1, .repetition = 1, .slot = -1, .target = -1, .n_top = -1};
    }
    s->token_start[seq + 1] = (int32_t)s->n_tokens;
    s->kv_len[seq] = (int32_t)q->n_tokens;
    s->slot[seq] = -1;
    s->kv_format[seq] = (uint8_t)q->format;
    s->check[seq] = 0;
    s->page_start[seq + 1] = s->page_start[seq] + (int32_t)n_pages;
    for (uint32_t i = 0; i < n_pages; i++) {
        s->page[(uint32_t)s->page_start[seq] + i] = q->page[i];
        s->tag[(uint32_t)s->page_start[seq] + i] = 0;
    }
}

static void step(struct run *r)
{
    struct dn_err err;
    if (dn_runner_step(r->runner, &err) != 0)
        die(&err);
}

/* ---- Logits -------------------------------------------------------------------------------------------------------*/

static void compare(struct result *e, float is, double want)
{
    double d = fabs((double)is - want);
    e->max = d > e->max || isnan(d) ? d : e->max;
    e->sum += d;
    e->n++;
}

static void compare_row(struct run *r, struct result *e, const json_t *row)
{
    const json_t *top = json_object_get(row, "top_id"), *logit = json_object_get(row, "top_logit"),
                 *every = json_object_get(row, "every");
    for (size_t i = 0; i < json_array_size(top); i++)
        compare(e, r->logits[json_integer_value(json_array_get(top, i))], json_number_value(json_array_get(logit, i)));
    for (size_t i = 0; i < json_array_size(every); i++)
        compare(e, r->logits[i * r->reference.stride], json_number_value(json_array_get(every, i)));
}

static void compare_text(struct run *r, const struct text *t, enum dn_step_kind kind, struct result *e)
{
    const uint32_t chunk = kind == DN_STEP_DECODE ? 1 : CHUNK;
    for (uint32_t at = 0, n; at < t->n; at += n) {
        n = t->n - at < chunk ? t->n - at : chunk;
        add(r, begin(r, kind), &r->seq[0], t->id + at, n);
        step(r);
        for (size_t i = 0; i < json_array_size(t->rows); i++) {
            const json_t *row = json_array_get(t->rows, i);
            uint32_t p = (uint32_t)json_integer_value(json_object_get(row, "position"));
            if (p < at || p >= at + n)
                continue;
            dn_runner_logits(r->runner, p - at, 1, r->logits);
            compare_row(r, e, row);
        }
    }
}

/* ---- Best tokens along the reference's text -----------------------------------------------------------------------*/

/* Row `row` of the step is behind token p of the prompt's text. */
static void judge(struct run *r, const struct prompt *p, uint32_t row, uint32_t at, struct result *e)
{
    if (at + 1 < p->n || at + 1 >= p->n + GREEDY)
        return;
    double margin = margin_at(p, at + 1 - p->n);
    bool same = dn_runner_arrays(r->runner)->result[row].id == p->id[at + 1];
    e->of++;
    e->right += same;
    e->passed = !same && margin > e->passed ? margin : e->passed;
}

/* The first `to` tokens of a prompt's text, in chunks. */
static void prefill(struct run *r, struct sequence *q, const struct prompt *p, uint32_t to, struct result *e)
{
    for (uint32_t at = 0, n; at < to; at += n) {
        n = to - at < CHUNK ? to - at : CHUNK;
        add(r, begin(r, DN_STEP_PREFILL), q, p->id + at, n);
        step(r);
        for (uint32_t i = 0; i < n; i++)
            judge(r, p, i, at + i, e);
    }
}

static void follow(struct run *r, enum dn_step_kind kind, struct result *e)
{
    const struct reference *f = &r->reference;
    const uint32_t n_prompts = (uint32_t)f->n_prompts;
    for (uint32_t i = 0; i < n_prompts; i++)
        prefill(r, &r->seq[i], &f->prompt[i], f->prompt[i].n + (kind == DN_STEP_DECODE ? -1u : GREEDY - 1u), e);
    for (uint32_t t = 0; kind == DN_STEP_DECODE && t < GREEDY; t++) {
        struct dn_step *s = begin(r, kind);
        for (uint32_t i = 0; i < n_prompts; i++)
            add(r, s, &r->seq[i], f->prompt[i].id + f->prompt[i].n - 1 + t, 1);
        step(r);
        for (uint32_t i = 0; i < n_prompts; i++)
            judge(r, &f->prompt[i], i, f->prompt[i].n - 1 + t, e);
    }
}

/* ---- Greedy text of the scheduler ---------------------------------------------------------------------------------*/

static void on_event(void *ctx, const struct dn_event *e, const struct dn_sampled *detail, uint64_t step_ns)
{
    struct run *r = ctx;
    (void)detail;
    (void)step_ns;
    if (e->kind == DN_EVENT_ERROR)
        r->code = e->code;
    if (e->kind == DN_EVENT_TOKEN && e->id.slot < TEXTS && r->n_free[e->id.slot] < GREEDY)
        r->free_id[e->id.slot][r->n_free[e->id.slot]++] = e->token;
}

/* "512/40/..." and "-/0.013/..." */
static void generate(struct run *r, enum dn_kv_format kv, char *leading, char *margins, size_t size)
{
    const struct reference *f = &r->reference;
    struct dn_err err;
    size_t n_leading = 0, n_margins = 0;
    r->code = 0;
    r->local.on_event = on_event;
    r->local.ctx = r;
    memset(r->n_free, 0, sizeof r->n_free);
    for (uint32_t i = 0; i < f->n_prompts; i++) {
        struct dn_request *q = dn_local_request(f->prompt[i].id, f->prompt[i].n, GREEDY);
        q->id.slot = i;
        q->kv = kv;
        q->ignore_eos = true;
        q->cache_read = q->cache_write = false;
        if (dn_local_submit(&r->local, q, &err) != 0)
            die(&err);
    }
    dn_local_run(&r->local);
    if (r->code)
        die(&(struct dn_err){.text = "a request of the scheduler failed"});
    for (uint32_t i = 0; i < f->n_prompts; i++) {
        const struct prompt *p = &f->prompt[i];
        const char *slash = i ? "/" : "";
        uint32_t same = 0;
        while (same < r->n_free[i] && r->free_id[i][same] == p->id[p->n + same])
            same++;
        n_leading += (size_t)snprintf(leading + n_leading, size - n_leading, "%s%u", slash, same);
        n_margins += same == GREEDY
                         ? (size_t)snprintf(margins + n_margins, size - n_margins, "%s-", slash)
                         : (size_t)snprintf(margins + n_margins, size - n_margins, "%s%.2g", slash, margin_at(p, same));
    }
}

/* ---- The table ----------------------------------------------------------------------------------------------------*/

static const struct dn_bench_column columns[] = {{"MODEL", "model", -14},
                                                 {"BACKEND", "backend", -7},
                                                 {"WEIGHTS", "weights", -7},
                                                 {"KV", "kv", -8},
                                                 {"STEPS", "steps", -7},
                                                 {"LOGITS", "logits", 6},
                                                 {"MEAN", "mean_error", 8},
                                                 {"MAX", "max_error", 8},
                                                 {"BEST", "best_equal", 5},
                                                 {"OF", "best_of", 5},
                                                 {"PASSED", "largest_margin_passed", 8},
                                                 {"GREEDY", "greedy_leading", -15},
                                                 {"MARGIN", "margin_at_parting", -1},
                                                 {NULL, NULL, 0}};

/* false: some logit is not a number. */
static bool measure(struct run *r, enum dn_kv_format kv, enum dn_step_kind kind, struct dn_bench_table *t)
{
    struct result e = {0};
    char leading[64] = "-", margins[64] = "-";
    for (size_t i = 0; i < r->reference.n_texts; i++) {
        restart(r, kv);
        compare_text(r, &r->reference.text[i], kind, &e);
    }
    restart(r, kv);
    follow(r, kind, &e);
    if (kind == DN_STEP_DECODE)
        generate(r, kv, leading, margins, sizeof leading);
    dn_bench_text(t, r->model);
    dn_bench_text(t, r->gpu ? "cuda" : "cpu");
    dn_bench_text(t, r->weights);
    dn_bench_text(t, dn_kv_format_name(kv));
    dn_bench_text(t, kind == DN_STEP_DECODE ? "decode" : "prefill");
    dn_bench_number(t, 0, (double)e.n);
    dn_bench_number(t, 5, e.sum / (double)e.n);
    dn_bench_number(t, 4, e.max);
    dn_bench_number(t, 0, e.right);
    dn_bench_number(t, 0, e.of);
    dn_bench_number(t, 3, e.passed);
    dn_bench_text(t, leading);
    dn_bench_text(t, margins);
    return isfinite(e.sum);
}

/* One model with one format of its weights; false: it can't be had, or a logit is not a number. */
static bool run_weights(struct run *r, const char *path, const char *device, const struct dn_bench_list *kv,
                        struct dn_bench_table *t, const char *csv)
{
    struct dn_err err;
    struct dn_device_choice choice;
    struct dn_pool_conf conf = {.backend = device,
                                .n_threads = (unsigned)r->n_threads,
                                .max_sequences = TEXTS,
                                .step_tokens = CHUNK,
                                .echo_rows = CHUNK,
                                .context_tokens = CONTEXT,
                                .kv_bytes = 256 << 20};
    bool fine = true;
    if (dn_weights_format_parse(r->weights, &conf.weights) != 0)
        die(&(struct dn_err){.text = "--weights: expected auto, bf16, fp8, int8, int4"});
    if (dn_device_parse(device, &choice, &err) != 0)
        die(&err);
    if (dn_local_open(&r->local, path, &conf, true, &err) != 0) {
        printf("# %s, weights %s: %s\n", r->model, r->weights, err.text);
        return false;
    }
    const struct dn_pool *p = r->local.loaded.pool;
    r->runner = p->runner;
    r->gpu = p->device_total_bytes > 0;
    if (p->model->hyper.n_vocab > VOCAB)
        die(&(struct dn_err){.text = "the model's vocabulary is too large"});
    if (!t->column) {
        dn_bench_print_head(p->device, 0, r->gpu ? choice.index : -1);
        if (dn_bench_table_open(t, columns, csv, &err) != 0)
            die(&err);
    }
    for (size_t k = 0; k < kv->n; k++) {
        enum dn_kv_format f;
        if (dn_kv_format_parse(kv->text[k], &f) != 0)
            die(&(struct dn_err){.text = "--kv: expected bf16, fp8_e4m3"});
        fine = measure(r, f, DN_STEP_PREFILL, t) && measure(r, f, DN_STEP_DECODE, t) && fine;
    }
    dn_local_close(&r->local);
    return fine;
}

/* NULL, said, if the model is not there. */
static const char *model_path(const char *name)
{
    static char path[4096];
    const char *file = getenv("DN_TEST_MODEL"), *home = getenv("HOME");
    if (strcmp(name, "smollm2") != 0)
        return mini_path(name);
    snprintf(path, sizeof path, "%s", file ? file : "");
    if (!file)
        snprintf(path, sizeof path, "%s/.cache/dunlin/SmolLM2-135M-Instruct.Q4_1.gguf", home ? home : "");
    if (access(path, R_OK) == 0)
        return path;
    printf("SKIPPED: SmolLM2 is neither named by DN_TEST_MODEL nor in ~/.cache/dunlin (./dev model fetches it)\n");
    return NULL;
}

int main(int argc, char **argv)
{
    static const char *const all[] = {"mini-kimi", "mini-kimi-int4", "smollm2"};
    const char *device = "auto", *weights = "auto,bf16,int8,fp8,int4", *kv = "bf16,fp8_e4m3", *csv = NULL,
               *threads = "0";
    const struct dn_flag flag[] = {{"device", "NAME", "auto, cpu, cuda or cuda:N", &device, NULL},
                                   {"weights", "LIST", "auto, bf16, int8, fp8, int4", &weights, NULL},
                                   {"kv", "LIST", "bf16, fp8_e4m3", &kv, NULL},
                                   {"threads", "N", "of the CPU [all cores]", &threads, NULL},
                                   {"csv", "FILE", "the table as comma-separated values, too", &csv, NULL},
                                   {NULL, NULL, NULL, NULL, NULL}};
    struct dn_args args;
    struct dn_err err = {0};
    struct dn_bench_list weights_list = {0}, kv_list = {0};
    struct dn_bench_table table = {0};
    bool help = false, fine = true;
    if (dn_args_parse(argc, argv, "logits [mini-kimi] [mini-kimi-int4] [smollm2]", flag, &args, &help, &err) != 0 ||
        dn_bench_split("weights", weights, &weights_list, &err) != 0 || dn_bench_split("kv", kv, &kv_list, &err) != 0)
        die(&err);
    const char *const *model = args.n_positional ? args.positional : all;
    size_t n_models = args.n_positional ? args.n_positional : sizeof all / sizeof *all;
    struct run *r = dn_alloc0(1, sizeof *r);
    if (dn_args_uint(threads, "threads", 0, 1024, false, &r->n_threads, &err) != 0)
        die(&err);
    for (size_t m = 0; m < n_models && !help; m++) {
        r->model = dn_nearest(model[m], all, sizeof all / sizeof *all);
        if (!r->model || strcmp(r->model, model[m]) != 0)
            die(&(struct dn_err){.text = "expected mini-kimi, mini-kimi-int4 or smollm2"});
        const char *path = model_path(r->model);
        if (!path)
            continue;
        open_reference(&r->reference, r->model);
        for (size_t i = 0; i < weights_list.n; i++) {
            r->weights = weights_list.text[i];
            fine = run_weights(r, path, device, &kv_list, &table, csv) && fine;
        }
        close_reference(&r->reference);
    }
    if (dn_bench_table_close(&table, &err) != 0)
        die(&err);
    free(weights_list.copy);
    free(kv_list.copy);
    free(r);
    return fine ? 0 : 1;
}
