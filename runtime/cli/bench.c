#include "base/buf.h"
#include "base/clock.h"
#include "cli/args.h"
#include "cli/bench_steps.h"
#include "cli/bench_table.h"
#include "cli/cli.h"
#include "cli/local.h"
#include "cli/progress.h"
#include "pool/device.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char usage[] =
    "dunlin bench MODEL          tokens a second of prefill and decode, in this process\n"
    "dunlin bench decode ...     steps of a model, or of one made up after a config.json\n"
    "dunlin bench prefill ...\n"
    "dunlin bench kernels ...    single operations (--help behind each of them tells more)\n"
    "\n"
    "Lists are separated by commas; every combination is one row. Rows are measured in turn, round after round, so\n"
    "that a slow moment of the machine hits all of them; shown are the median and the lowest and highest round.\n";

enum { MAX_ROWS = 128, MAX_ROUNDS = 64, MAX_BATCH = 64 };

/* One loaded pool: weights x threads. */
struct engine {
    const char *weights;
    int format;
    unsigned threads;
    struct dn_local local;
};

struct row {
    struct engine *engine;
    enum dn_kv_format kv;
    bool check, prefill;
    uint32_t batch, prompt, output;
    double rate[MAX_ROUNDS]; /* tokens a second */
    size_t n_rounds;
};

/* ---- One measurement
 * ---------------------------------------------------------------------------------------------------- */

struct watch {
    uint32_t n_started, n_tokens, n_wanted;
    uint64_t all_started_ns, last_ns;
    uint32_t tokens_before;
    int code;
};

static void on_event(void *ctx, const struct dn_event *e, const struct dn_sampled *detail, uint64_t step_ns)
{
    struct watch *w = ctx;
    (void)detail;
    if (e->kind == DN_EVENT_ERROR)
        w->code = e->code;
    if (e->kind != DN_EVENT_TOKEN)
        return;
    w->n_tokens++;
    w->last_ns = step_ns;
    if (e->n == 0 && ++w->n_started == w->n_wanted) { /* from now on all decode together */
        w->all_started_ns = step_ns;
        w->tokens_before = w->n_tokens;
    }
}

static struct dn_request *bench_request(const struct row *r, uint32_t i, uint32_t n_prompt, uint32_t n_output)
{
    int32_t *prompt = dn_alloc(n_prompt * sizeof *prompt);
    unsigned seed = 1 + i;
    int32_t n_vocab = (int32_t)r->engine->local.loaded.model->hyper.n_vocab;
    for (uint32_t k = 0; k < n_prompt; k++) {
        seed = seed * 1103515245 + 12345;
        prompt[k] = (int32_t)(seed >> 8) % (n_vocab / 2) + n_vocab / 4; /* ordinary tokens */
    }
    struct dn_request *q = dn_local_request(prompt, n_prompt, n_output);
    free(prompt);
    q->id.generation = i;
    q->ignore_eos = true;
    q->kv = r->kv;
    q->check = r->check;
    q->cache_read = q->cache_write = false;
    return q;
}

static int measure(struct row *r, struct dn_err *err)
{
    struct dn_local *l = &r->engine->local;
    struct watch w = {.n_wanted = r->batch};
    l->on_event = on_event;
    l->ctx = &w;
    uint64_t start_ns = dn_now_ns();
    for (uint32_t i = 0; i < r->batch; i++) {
        int rc = dn_local_submit(l, bench_request(r, i, r->prompt, r->prefill ? 1 : r->output + 1), err);
        if (rc != 0)
            return rc;
    }
    dn_local_run(l);
    if (w.code)
        return dn_err_set(err, (enum dn_code)w.code, "%s", dn_code_info(w.code)->help);
    double seconds, tokens;
    if (r->prefill) {
        seconds = (double)(w.last_ns - start_ns) * 1e-9;
        tokens = (double)r->batch * r->prompt;
    } else {
        seconds = (double)(w.last_ns - w.all_started_ns) * 1e-9;
        tokens = (double)(w.n_tokens - w.tokens_before);
    }
    r->rate[r->n_rounds++] = tokens / seconds;
    return 0;
}

/* ---- The table --------------------------------------------------------------------------------------------------- */

static const struct dn_bench_column columns[] = {{"WHAT", "what", -8},
                                                 {"WEIGHTS", "weights", -7},
                                                 {"KV", "kv", -8},
                                                 {"CHECK", "integrity", -5},
                                                 {"THREADS", "threads", 7},
                                                 {"BATCH", "batch", 5},
                                                 {"PROMPT", "prompt", 6},
                                                 {"OUTPUT", "output", 6},
                                                 {"TOK/S", "tokens_per_s", 9},
                                                 {"LOW", "low", 9},
                                                 {"HIGH", "high", 9},
                                                 {"GB/S", "weight_gb_per_s", 7},
                                                 {NULL, NULL, 0}};

static void print_row(struct row *r, struct dn_bench_table *t)
{
    double median = dn_bench_quantile(r->rate, r->n_rounds, 0.5), low = r->rate[0], high = r->rate[r->n_rounds - 1];
    const struct dn_weights *w = r->engine->local.loaded.pool->weights;
    dn_bench_text(t, r->prefill ? "prefill" : "decode");
    dn_bench_text(t, r->engine->weights);
    dn_bench_text(t, dn_kv_format_name(r->kv));
    dn_bench_text(t, r->check ? "tag" : "off");
    dn_bench_number(t, 0, r->engine->threads);
    dn_bench_number(t, 0, r->batch);
    dn_bench_number(t, 0, r->prompt);
    dn_bench_number(t, 0, r->prefill ? 0 : r->output);
    dn_bench_number(t, 1, median);
    dn_bench_number(t, 1, low);
    dn_bench_number(t, 1, high);
    /* What decode must read a step: every weight once. */
    dn_bench_number(t, 3, r->prefill ? 0 : median / r->batch * (double)w->bytes * 1e-9);
}

struct options {
    const char *weights, *kv, *threads, *batch, *prompt, *output, *integrity, *rounds, *what, *device, *csv;
};

struct plan {
    struct dn_bench_list weights, kv, threads, integrity;
    uint32_t batch[DN_BENCH_MAX_LIST];
    size_t n_batch;
    const char *device;
    uint64_t prompt, output, rounds;
    struct engine *engine;
    size_t n_engines;
    struct row *row;
    size_t n_rows;
};

static int make_engines(struct plan *p, struct dn_err *err)
{
    p->engine = dn_alloc0(p->weights.n * p->threads.n, sizeof *p->engine);
    for (size_t i = 0; i < p->weights.n; i++) {
        for (size_t k = 0; k < p->threads.n; k++) {
            struct engine *e = &p->engine[p->n_engines++];
            uint64_t threads;
            int rc = dn_args_uint(p->threads.text[k], "threads", 1, 1024, false, &threads, err);
            if (rc != 0)
                return rc;
            *e = (struct engine){.weights = p->weights.text[i], .threads = (unsigned)threads};
            if (dn_weights_format_parse(e->weights, &e->format) != 0)
                return dn_err_set(err, DN_CONFIG, "--weights %s: expected auto, bf16, fp8, int8 or int4", e->weights);
        }
    }
    return 0;
}

static int add_row(struct plan *p, struct row row, struct dn_err *err)
{
    if (p->n_rows == MAX_ROWS)
        return dn_err_set(err, DN_CONFIG, "more than %d rows", MAX_ROWS);
    p->row[p->n_rows++] = row;
    return 0;
}

/* The rows of one engine, KV format and check. */
static int add_rows(struct plan *p, const char *what, struct row r, struct dn_err *err)
{
    int rc = 0;
    r.batch = 1;
    r.prefill = true;
    if (strcmp(what, "decode") != 0)
        rc = add_row(p, r, err);
    r.prefill = false;
    r.prompt = 2; /* decode from a nearly empty context, as llama-bench does */
    for (size_t b = 0; b < p->n_batch && rc == 0 && strcmp(what, "prefill") != 0; b++) {
        r.batch = p->batch[b];
        rc = add_row(p, r, err);
    }
    return rc;
}

static int make_rows(struct plan *p, const char *what, struct dn_err *err)
{
    p->row = dn_alloc0(MAX_ROWS, sizeof *p->row);
    for (size_t e = 0; e < p->n_engines; e++)
        for (size_t k = 0; k < p->kv.n; k++)
            for (size_t c = 0; c < p->integrity.n; c++) {
                const char *check = p->integrity.text[c];
                struct row r = {.engine = &p->engine[e],
                                .check = strcmp(check, "off") != 0,
                                .prompt = (uint32_t)p->prompt,
                                .output = (uint32_t)p->output};
                if (dn_kv_format_parse(p->kv.text[k], &r.kv) != 0)
                    return dn_err_set(err, DN_CONFIG, "--kv %s: expected bf16 or fp8_e4m3", p->kv.text[k]);
                if (r.check && strcmp(check, "tag") != 0)
                    return dn_err_set(err, DN_CONFIG, "--integrity %s: expected off and tag", check);
                int rc = add_rows(p, what, r, err);
                if (rc != 0)
                    return rc;
            }
    return 0;
}

/* Everything that can be wrong about the command line. */
static int parse(const struct options *o, struct plan *p, struct dn_err *err)
{
    int rc;
    if ((rc = dn_bench_split("weights", o->weights, &p->weights, err)) != 0 ||
        (rc = dn_bench_split("kv", o->kv, &p->kv, err)) != 0 ||
        (rc = dn_bench_split("threads", o->threads, &p->threads, err)) != 0 ||
        (rc = dn_bench_numbers("batch", o->batch, MAX_BATCH, p->batch, &p->n_batch, err)) != 0 ||
        (rc = dn_bench_split("integrity", o->integrity, &p->integrity, err)) != 0 ||
        (rc = dn_args_uint(o->prompt, "prompt", 1, 1 << 20, false, &p->prompt, err)) != 0 ||
        (rc = dn_args_uint(o->output, "output", 2, 1 << 20, false, &p->output, err)) != 0 ||
        (rc = dn_args_uint(o->rounds, "rounds", 1, MAX_ROUNDS, false, &p->rounds, err)) != 0)
        return rc;
    struct dn_device_choice device;
    if ((rc = dn_device_parse(p->device = o->device, &device, err)) != 0)
        return rc;
    if (strcmp(o->what, "all") != 0 && strcmp(o->what, "prefill") != 0 && strcmp(o->what, "decode") != 0)
        return dn_err_set(err, DN_CONFIG, "--what %s: expected all, prefill or decode", o->what);
    rc = make_engines(p, err);
    return rc ? rc : make_rows(p, o->what, err);
}

/* What the longest row has, before weights are loaded. */
static int check_context(const struct plan *p, const char *path, struct dn_err *err)
{
    struct dn_model *m;
    int rc = dn_model_open(path, &m, err);
    if (rc != 0)
        return rc;
    for (size_t i = 0; i < p->n_rows && rc == 0; i++) {
        const struct row *r = &p->row[i];
        uint32_t need = r->prompt + (r->prefill ? 1 : r->output + 1);
        if (need > m->hyper.context_tokens)
            rc = dn_err_set(err, DN_CONTEXT_LENGTH, "--%s %u: %u tokens in all, the context is %u",
                            r->prefill ? "prompt" : "output", r->prefill ? r->prompt : r->output, need,
                            m->hyper.context_tokens);
    }
    dn_model_close(m);
    return rc;
}

static int open_engines(struct plan *p, const char *model, struct dn_err *err)
{
    int rc = check_context(p, model, err);
    for (size_t i = 0; i < p->n_engines && rc == 0; i++) {
        struct engine *e = &p->engine[i];
        const struct dn_pool_conf conf = {.backend = p->device,
                                          .n_threads = e->threads,
                                          .weights = e->format,
                                          .context_tokens = (uint32_t)(p->prompt + p->output + 64),
                                          .max_sequences = MAX_BATCH};
        rc = dn_local_open(&e->local, model, &conf, false, err);
    }
    return rc;
}

static void plan_release(struct plan *p)
{
    for (size_t i = 0; i < p->n_engines; i++)
        dn_local_close(&p->engine[i].local);
    free(p->engine);
    free(p->row);
    free(p->weights.copy);
    free(p->kv.copy);
    free(p->threads.copy);
    free(p->integrity.copy);
}

static void print_head(const struct plan *p)
{
    char text[256];
    struct dn_device *d = p->engine[0].local.loaded.pool->device;
    d->ops->describe(d, text, sizeof text);
    fprintf(stderr, "dunlin " DN_VERSION "  %s\nmodel %s\n", text, p->engine[0].local.loaded.model->path);
}

/* Rounds over all rows; a row is printed as soon as its last round is over, and when stopped what was measured. */
static int run_rows(struct plan *p, struct dn_bench_table *t, struct dn_err *err)
{
    int rc = 0;
    size_t n_printed = 0;
    for (uint64_t round = 0; round < p->rounds && rc == 0 && !dn_bench_stopped(); round++)
        for (size_t i = 0; i < p->n_rows && rc == 0 && !dn_bench_stopped(); i++) {
            rc = measure(&p->row[i], err);
            if (rc == 0 && round + 1 == p->rounds)
                print_row(&p->row[n_printed++], t);
        }
    for (; rc == 0 && n_printed < p->n_rows; n_printed++)
        if (p->row[n_printed].n_rounds)
            print_row(&p->row[n_printed], t);
    if (rc == 0 && dn_bench_stopped())
        rc = dn_err_set(err, DN_CANCELLED, "stopped by a signal: not all rounds, or not all rows");
    return rc;
}

static int bench(const struct options *o, const char *model, struct dn_err *err)
{
    struct plan p = {0};
    struct dn_bench_table t = {0};
    struct dn_err close_err;
    int rc = parse(o, &p, err);
    if (rc == 0)
        rc = dn_bench_table_open(&t, columns, o->csv, err);
    if (rc == 0)
        rc = open_engines(&p, model, err);
    if (rc == 0) {
        print_head(&p);
        dn_bench_table_head(&t);
        dn_bench_catch_stop(true);
        rc = run_rows(&p, &t, err);
        dn_bench_catch_stop(false);
    }
    if (dn_bench_table_close(&t, &close_err) != 0 && rc == 0) {
        *err = close_err;
        rc = -DN_IO;
    }
    plan_release(&p);
    return rc;
}

int dn_cmd_bench(int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "kernels") == 0)
        return dn_bench_kernels(argc - 1, argv + 1);
    if (argc > 1 && (strcmp(argv[1], "decode") == 0 || strcmp(argv[1], "prefill") == 0))
        return dn_bench_steps(argc - 1, argv + 1, argv[1][0] == 'p');
    char cores[16];
    snprintf(cores, sizeof cores, "%ld", sysconf(_SC_NPROCESSORS_ONLN));
    struct options o = {.weights = "auto",
                        .kv = "bf16",
                        .threads = cores,
                        .batch = "1,16",
                        .prompt = "512",
                        .output = "128",
                        .integrity = "tag",
                        .rounds = "3",
                        .what = "all"};
    const struct dn_flag flag[] = {
        {"what", "WHAT", "all, prefill or decode [all]", &o.what, NULL},
        {"weights", "LIST", "auto, bf16, fp8, int8, int4 [auto]", &o.weights, NULL},
        {"kv", "LIST", "bf16, fp8_e4m3 [bf16]", &o.kv, NULL},
        {"device", "NAME", "auto, cpu, cuda or cuda:N [auto]", &o.device, NULL},
        {"threads", "LIST", "of the CPU, from 1 on [all cores]", &o.threads, NULL},
        {"batch", "LIST", "sequences that decode together, up to 64 [1,16]", &o.batch, NULL},
        {"integrity", "LIST", "off, tag [tag]", &o.integrity, NULL},
        {"prompt", "TOKENS", "of prefill [512]", &o.prompt, NULL},
        {"output", "TOKENS", "of decode [128]", &o.output, NULL},
        {"rounds", "N", "[3]", &o.rounds, NULL},
        {"csv", "FILE", "the table as comma-separated values, too", &o.csv, NULL},
        {NULL, NULL, NULL, NULL, NULL},
    };
    struct dn_args args;
    struct dn_err err = {0};
    bool help;
    if (dn_args_parse(argc, argv, usage, flag, &args, &help, &err) != 0 || (!help && args.n_positional != 1)) {
        fprintf(stderr, "dunlin: %s\n",
                err.code ? err.text
                : o.csv  ? "expected MODEL (--csv takes a FILE); dunlin bench --help"
                         : "expected MODEL; dunlin bench --help");
        return DN_EXIT_USAGE;
    }
    if (help)
        return DN_EXIT_OK;
    if (bench(&o, args.positional[0], &err) == 0)
        return DN_EXIT_OK;
    fprintf(stderr, "dunlin: %s\n", err.text);
    return err.code == DN_CONFIG ? DN_EXIT_USAGE : DN_EXIT_FAILED;
}
