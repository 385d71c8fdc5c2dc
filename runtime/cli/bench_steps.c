/* dunlin bench decode, dunlin bench prefill: steps of a runner on contexts that are not computed but made up: page
 * tables and positions as if each sequence had `context` tokens, random finite values in the cache. */
#include "cli/bench_steps.h"

#include "base/buf.h"
#include "base/clock.h"
#include "cli/args.h"
#include "cli/bench_table.h"
#include "cli/cli.h"
#include "cli/progress.h"
#include "engine/runner.h"
#include "engine/synthetic.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const char usage[] =
    "dunlin bench decode|prefill MODEL             steps of a model, without scheduler and server\n"
    "dunlin bench decode|prefill --synthetic CONFIG.json --layers N\n"
    "\n"
    "Lists are separated by commas; every combination is a row. For each weight format the model is loaded once and "
    "its\n"
    "rows are measured in turn, round after round, so that a slow moment hits all of them. decode: one token of each\n"
    "sequence, behind `context` tokens whose keys and values are made up. prefill: a prompt of `context` tokens in\n"
    "chunks. --synthetic makes random weights after a config.json (int4: experts alone, as Kimi K2).\n"
    "\n"
    "STEP: microseconds of a step (prefill: of a prompt), median and the 10th and 90th of 100; EXPERTS: how many the "
    "last\n"
    "layer chose; GB: what a decode step must read (weights, of experts this part, keys and values); FLOOR: how long "
    "that\n"
    "takes at the rate at which memory can be read; FILL, START: the host's part, filling arrays and starting the "
    "step.\n";

enum { MAX_ROWS = 512, MAX_ROUNDS = 50, MAX_STEPS = 64, MAX_BATCH = 512 };

enum kv_mode { KV_BF16, KV_FP8, KV_MIXED, KV_MODES };
static const char *const kv_name[KV_MODES] = {"bf16", "fp8", "mixed"};

struct options {
    const char *synthetic, *layers, *weights, *kv, *integrity, *batch, *context, *chunk, *rounds, *ms, *device,
        *threads, *csv;
};

struct row {
    enum kv_mode kv;
    bool check;
    uint32_t batch, context;
    uint32_t *page; /* [batch][pages of a sequence] */
    uint64_t *tag;
    struct sample {
        double us, fill_us, start_us;
    } * sample;
    size_t n;
    bool warm;
    double experts; /* that the last layer chose in a step */
};

struct plan {
    bool prefill;
    const char *model_path, *synthetic;
    uint64_t n_layers, chunk, rounds, ms, threads;
    bool own_context; /* asked for, not the defaults */
    struct dn_bench_list weights;
    enum kv_mode kv[KV_MODES];
    bool check[2];
    uint32_t batch[DN_BENCH_MAX_LIST], context[DN_BENCH_MAX_LIST];
    size_t n_kv, n_check, n_batch, n_context;
    struct row row[MAX_ROWS];
    size_t n_rows;

    struct dn_model *model;
    struct dn_device *device;
    int gpu;
    double read_rate;
    struct dn_weights *w;
    struct dn_runner *r;
    struct dn_kv_layout layout;
    uint32_t first_slab[DN_KV_FORMATS];
    struct dn_step_limits limits;
    uint64_t arena_bytes;
    uint64_t random;
    const struct row *in_arrays; /* whose page tables the step's arrays hold */
};

/* ---- Rows ---- */

static int parse_modes(struct plan *p, const struct options *o, struct dn_err *err)
{
    struct dn_bench_list l;
    int code = dn_bench_split("kv", o->kv, &l, err);
    for (size_t i = 0; i < l.n && code == 0; i++) {
        int mode = 0;
        while (mode < KV_MODES && strcmp(l.text[i], kv_name[mode]) != 0)
            mode++;
        if (strcmp(l.text[i], "fp8_e4m3") == 0)
            mode = KV_FP8;
        if (mode == KV_MODES || p->n_kv == KV_MODES)
            code = dn_err_set(err, DN_CONFIG, "--kv %s: expected bf16, fp8 and mixed", l.text[i]);
        else
            p->kv[p->n_kv++] = (enum kv_mode)mode;
    }
    free(l.copy);
    l = (struct dn_bench_list){0};
    if (code == 0)
        code = dn_bench_split("integrity", o->integrity, &l, err);
    for (size_t i = 0; i < l.n && code == 0; i++) {
        if ((strcmp(l.text[i], "off") != 0 && strcmp(l.text[i], "tag") != 0) || p->n_check == 2)
            code = dn_err_set(err, DN_CONFIG, "--integrity %s: expected off and tag", l.text[i]);
        else
            p->check[p->n_check++] = strcmp(l.text[i], "tag") == 0;
    }
    free(l.copy);
    return code;
}

static int parse_weights(struct plan *p, const struct options *o, struct dn_err *err)
{
    const char *text = o->weights ? o->weights : o->synthetic ? "int4" : "auto";
    int code = dn_bench_split("weights", text, &p->weights, err);
    for (size_t i = 0; i < p->weights.n && code == 0; i++) {
        enum dn_weight_format f;
        int format;
        if (p->synthetic && (dn_weight_format_parse(p->weights.text[i], &f) != 0 || f == DN_W_INT8))
            code = dn_err_set(err, DN_CONFIG, "--weights %s: expected int4, fp8 and bf16", p->weights.text[i]);
        if (!p->synthetic && dn_weights_format_parse(p->weights.text[i], &format) != 0)
            code =
                dn_err_set(err, DN_CONFIG, "--weights %s: expected auto, bf16, fp8, int8 or int4", p->weights.text[i]);
    }
    return code;
}

/* Every combination, but for "mixed" where there is no other sequence to mix with. */
static int make_rows(struct plan *p, struct dn_err *err)
{
    uint32_t n_left_out = 0;
    for (size_t c = 0; c < p->n_context; c++)
        for (size_t b = 0; b < p->n_batch; b++)
            for (size_t k = 0; k < p->n_kv; k++)
                for (size_t i = 0; i < p->n_check; i++) {
                    uint32_t batch = p->prefill ? 1 : p->batch[b];
                    if (p->kv[k] == KV_MIXED && batch == 1) {
                        n_left_out++;
                        continue;
                    }
                    if (p->n_rows == MAX_ROWS)
                        return dn_err_set(err, DN_CONFIG, "more than %d rows", MAX_ROWS);
                    p->row[p->n_rows++] =
                        (struct row){.kv = p->kv[k], .check = p->check[i], .batch = batch, .context = p->context[c]};
                }
    if (p->n_rows == 0)
        return dn_err_set(err, DN_CONFIG, "--kv mixed: one sequence%s has one format: expected %s",
                          p->prefill ? " of a prefill" : "", p->prefill ? "bf16 or fp8" : "a --batch of 2 or more");
    if (n_left_out)
        printf("# mixed with a batch of 1 is bf16: %u rows left out\n", n_left_out);
    return 0;
}

static int parse(struct plan *p, const struct options *o, const struct dn_args *args, struct dn_err *err)
{
    int code;
    p->synthetic = o->synthetic;
    p->model_path = args->n_positional ? args->positional[0] : NULL;
    p->own_context = o->context != NULL;
    if (args->n_positional + (o->synthetic != NULL) != 1)
        return dn_err_set(err, DN_CONFIG, "expected MODEL or --synthetic CONFIG.json");
    if (o->layers && !o->synthetic)
        return dn_err_set(err, DN_CONFIG, "--layers: only with --synthetic");
    if ((o->layers && (code = dn_args_uint(o->layers, "layers", 1, DN_MODEL_MAX_LAYERS, false, &p->n_layers, err))) ||
        (code = dn_args_uint(o->chunk, "chunk", 1, 1 << 16, true, &p->chunk, err)) ||
        (code = dn_args_uint(o->rounds, "rounds", 1, MAX_ROUNDS, false, &p->rounds, err)) ||
        (code = dn_args_uint(o->ms, "ms", 1, 60000, false, &p->ms, err)) ||
        (code = dn_args_uint(o->threads, "threads", 0, 1024, false, &p->threads, err)) ||
        (code = dn_bench_numbers("batch", o->batch, MAX_BATCH, p->batch, &p->n_batch, err)) ||
        (code = dn_bench_numbers("context",
                                 p->own_context ? o->context
                                 : p->prefill   ? "1k,8k"
                                                : "1k,8k,32k",
                                 1 << 24, p->context, &p->n_context, err)) ||
        (code = parse_modes(p, o, err)) || (code = parse_weights(p, o, err)))
        return code;
    if (p->prefill)
        p->n_batch = 1; /* one prompt at a time */
    return make_rows(p, err);
}

/* Contexts that the model does not have: an error if a person asked for them, else left out. */
static int fit_contexts(struct plan *p, struct dn_err *err)
{
    uint32_t has = p->model->hyper.context_tokens, smallest = UINT32_MAX;
    size_t n = 0;
    for (size_t c = 0; c < p->n_context; c++) {
        uint32_t context = p->context[c];
        smallest = context < smallest ? context : smallest;
        if (context <= has)
            continue;
        if (p->own_context)
            return dn_err_set(err, DN_CONFIG, "--context %u: the model has a context of %u tokens", context, has);
        printf("# context %u left out: the model has %u tokens\n", context, has);
    }
    for (size_t i = 0; i < p->n_rows; i++) {
        struct row row = p->row[i];
        p->row[i] = (struct row){0};
        if (smallest > has && row.context == smallest)
            row.context = has; /* better than nothing */
        if (row.context <= has)
            p->row[n++] = row;
    }
    p->n_rows = n;
    return 0;
}

static enum dn_kv_format format_of(const struct row *row, uint32_t seq)
{
    return row->kv == KV_FP8 || (row->kv == KV_MIXED && seq % 2) ? DN_KV_FP8 : DN_KV_BF16;
}

static uint32_t seq_pages(const struct plan *p, const struct row *row)
{
    return (row->context + p->layout.page_tokens - 1) / p->layout.page_tokens;
}

static uint64_t slabs_of(const struct plan *p, const struct row *row, int f)
{
    uint64_t pages = 0;
    for (uint32_t s = 0; s < row->batch; s++)
        pages += (int)format_of(row, s) == f ? seq_pages(p, row) : 0;
    return (pages + p->layout.format[f].pages_per_slab - 1) / p->layout.format[f].pages_per_slab;
}

/* Pages of a row in no order, as a cache that has been in use has them. */
static void make_pages(struct plan *p, struct row *row)
{
    uint32_t n_each = seq_pages(p, row), slab;
    row->page = dn_alloc0((size_t)n_each * row->batch, sizeof *row->page);
    for (int f = 0; f < DN_KV_FORMATS; f++) {
        uint32_t *id = dn_alloc0((size_t)n_each * row->batch + 1, sizeof *id), n = 0, k = 0;
        for (uint32_t s = 0; s < row->batch; s++)
            n += (int)format_of(row, s) == f ? n_each : 0;
        slab = p->first_slab[f];
        for (uint32_t i = 0; i < n; i++, k++) {
            if (k == p->layout.format[f].pages_per_slab) {
                k = 0;
                slab++;
            }
            id[i] = slab * p->layout.slab_pages + k;
        }
        for (uint32_t i = n; i > 1; i--) {
            uint32_t j = (uint32_t)(dn_bench_random(&p->random) % i), swap = id[i - 1];
            id[i - 1] = id[j];
            id[j] = swap;
        }
        n = 0;
        for (uint32_t s = 0; s < row->batch; s++)
            if ((int)format_of(row, s) == f) {
                memcpy(row->page + (size_t)s * n_each, id + n, n_each * sizeof *id);
                n += n_each;
            }
        free(id);
    }
}

/* ---- Opening ---- */

static void on_progress(void *ctx, uint64_t done, uint64_t total)
{
    dn_progress_update(ctx, done, total);
}

static int open_model(struct plan *p, const char *weights, struct dn_err *err)
{
    enum dn_weight_format f = DN_W_INT4;
    int code = 0;
    if (!p->synthetic)
        code = dn_model_open(p->model_path, &p->model, err);
    else if ((code = dn_weight_format_parse(weights, &f)) == 0)
        code = dn_synthetic_open(p->synthetic, (uint32_t)p->n_layers, f, &p->model, err);
    return code;
}

static uint32_t page_tokens_of(const struct plan *p)
{
    return p->device->ops->page_tokens ? p->device->ops->page_tokens : 16;
}

/* The arena that the largest rows need. Formats have slabs of their own: steps write, and what one format has written
 * may be no number in the other. */
static int choose_arena(struct plan *p, struct dn_err *err)
{
    const struct dn_hyper *h = &p->model->hyper;
    const uint64_t slab_target = 16 << 20;
    uint32_t page_tokens = page_tokens_of(p);
    int code =
        h->latent_dim > 0
            ? dn_kv_layout_init_mla(&p->layout, h->n_layers, h->latent_dim, h->rope_dim, page_tokens, slab_target)
            : dn_kv_layout_init(&p->layout, h->n_layers, h->n_kv_heads, h->head_dim, page_tokens, slab_target);
    if (code != 0)
        return dn_err_set(err, DN_CONFIG, "pages of %u tokens do not fit this model", page_tokens);
    uint64_t n_slabs = 0;
    for (int f = 0; f < DN_KV_FORMATS; f++) {
        uint64_t most = 0;
        for (size_t i = 0; i < p->n_rows; i++) {
            uint64_t n = slabs_of(p, &p->row[i], f);
            most = n > most ? n : most;
        }
        p->first_slab[f] = (uint32_t)n_slabs;
        n_slabs += most;
    }
    p->arena_bytes = n_slabs * p->layout.slab_bytes;
    return 0;
}

/* A slab of one format: words of which each half is a finite bf16 of order 1 and each byte a finite e4m3; where a layer
 * of FP8 has scales, the whole is a positive f32. */
static void make_slab(struct plan *p, int f, uint32_t *slab)
{
    const struct dn_kv_layout *l = &p->layout;
    for (size_t i = 0; i < l->slab_bytes / sizeof *slab; i++)
        slab[i] = ((uint32_t)dn_bench_random(&p->random) & 0x83bf83bfu) | 0x3c003c00u;
    if (f != DN_KV_FP8)
        return;
    for (uint32_t page = 0; page < l->format[f].pages_per_slab; page++)
        for (uint32_t layer = 0; layer < l->n_layers; layer++) {
            uint32_t *at =
                slab + ((size_t)page * l->format[f].page_bytes + (size_t)layer * l->format[f].layer_bytes) / 4;
            for (uint32_t i = l->format[f].k_scale_offset / 4; i < l->format[f].layer_bytes / 4; i++)
                at[i] &= 0x7fffffffu;
        }
}

/* Signs matter: values that are positive on average would make all sequences alike, and their experts the same. */
static void fill_arena(struct plan *p)
{
    uint32_t *slab = dn_alloc0(p->layout.slab_bytes / sizeof *slab, sizeof *slab);
    for (int f = 0; f < DN_KV_FORMATS; f++) {
        uint32_t end = f + 1 < DN_KV_FORMATS ? p->first_slab[f + 1] : p->r->n_slabs;
        if (p->first_slab[f] < end)
            make_slab(p, f, slab);
        for (uint32_t i = p->first_slab[f]; i < end; i++)
            p->device->ops->upload(p->device, (char *)p->r->arena + i * p->layout.slab_bytes, slab,
                                   (size_t)p->layout.slab_bytes);
    }
    free(slab);
    uint64_t *tag = dn_alloc0(p->r->n_pages, sizeof *tag);
    for (uint32_t i = 0; i < p->r->n_pages; i++)
        tag[i] = dn_bench_random(&p->random);
    dn_runner_set_tags(p->r, 0, p->r->n_pages, tag);
    for (size_t i = 0; i < p->n_rows; i++) {
        struct row *row = &p->row[i];
        size_t n = (size_t)seq_pages(p, row) * row->batch;
        make_pages(p, row);
        row->tag = dn_alloc0(n, sizeof *row->tag);
        for (size_t k = 0; k < n; k++)
            row->tag[k] = tag[row->page[k]];
    }
    free(tag);
}

/* Twice: how long a page is, only an open device tells. */
static int open_device(struct plan *p, const struct options *o, struct dn_err *err)
{
    const struct dn_model_sizes sizes = dn_hyper_sizes(&p->model->hyper);
    struct dn_step_limits limits = {.tokens = 1, .seqs = 1, .rows = 1, .pages = 1, .tags = 1};
    for (size_t i = 0; i < p->n_rows; i++)
        limits.seqs = p->row[i].batch > limits.seqs ? p->row[i].batch : limits.seqs;
    limits.tokens = limits.rows = limits.pages = limits.seqs;
    struct dn_device_conf dc = {.n_threads = 1, .limits = limits, .n_vocab = 1};
    int code = dn_bench_open_device(o->device, &dc, &sizes, 1, &p->device, &p->gpu, err);
    if (code != 0)
        return code;
    uint32_t page_tokens = page_tokens_of(p);
    p->device->ops->close(p->device);
    p->device = NULL;
    uint64_t pages = 0;
    for (size_t i = 0; i < p->n_rows; i++) {
        const struct row *row = &p->row[i];
        uint32_t each = (row->context + page_tokens - 1) / page_tokens;
        uint64_t n = (uint64_t)row->batch * each;
        pages = n > pages ? n : pages;
        limits.seq_pages = each > limits.seq_pages ? each : limits.seq_pages;
    }
    if (pages > 1 << 24)
        return dn_err_set(err, DN_CONFIG, "%llu pages, expected at most %d", (unsigned long long)pages, 1 << 24);
    limits.pages = (uint32_t)pages;
    limits.tokens = p->prefill && p->chunk > limits.seqs ? (uint32_t)p->chunk : limits.seqs;
    p->limits = limits;
    dc = (struct dn_device_conf){
        .n_threads = (unsigned)p->threads, .limits = limits, .n_vocab = p->model->hyper.n_vocab};
    return dn_bench_open_device(o->device, &dc, &sizes, 1, &p->device, &p->gpu, err);
}

static int open_runner(struct plan *p, const struct options *o, const char *weights, struct dn_err *err)
{
    int format = DN_WEIGHTS_AUTO;
    int code = p->synthetic ? 0 : dn_weights_format_parse(weights, &format);
    if (code != 0 || (code = open_device(p, o, err)) != 0)
        return code;
    if (p->read_rate == 0)
        p->read_rate = p->device->ops->read_rate(p->device, p->gpu >= 0 ? (size_t)4 << 30 : (size_t)256 << 20);
    struct dn_progress progress;
    dn_progress_begin(&progress, weights, false);
    const struct dn_weights_conf wc = {
        .format = format, .n_threads = (unsigned)p->threads, .progress = on_progress, .progress_ctx = &progress};
    uint64_t start = dn_now_ns();
    code = dn_weights_open(p->device, p->model, &wc, &p->w, err);
    dn_progress_end(&progress);
    if (code != 0 || (code = choose_arena(p, err)) != 0)
        return code;
    printf("# %s, %u layers, weights %s: %.2f GB loaded in %.1f s; KV arena %.2f GB\n",
           p->synthetic ? p->synthetic : p->model_path, p->model->hyper.n_layers, weights, (double)p->w->bytes * 1e-9,
           (double)(dn_now_ns() - start) * 1e-9, (double)p->arena_bytes * 1e-9);
    struct dn_runner_conf rc = {
        .page_tokens = p->layout.page_tokens, .slab_bytes = 16 << 20, .arena_bytes = p->arena_bytes};
    rc.limits = p->limits;
    for (size_t i = 0; i < p->n_rows; i++)
        rc.context_tokens = p->row[i].context > rc.context_tokens ? p->row[i].context : rc.context_tokens;
    if ((code = dn_runner_open(p->device, p->w, &rc, &p->r, err)) != 0)
        return code;
    fill_arena(p);
    return 0;
}

static void close_runner(struct plan *p)
{
    for (size_t i = 0; i < p->n_rows; i++) {
        struct row *row = &p->row[i];
        free(row->page);
        free(row->tag);
        row->page = NULL;
        row->tag = NULL;
        row->n = 0;
        row->warm = false;
        if (row->sample)
            memset(row->sample, 0, p->rounds * MAX_STEPS * sizeof *row->sample);
    }
    p->in_arrays = NULL;
    dn_runner_close(p->r);
    dn_weights_close(p->w);
    if (p->device)
        p->device->ops->close(p->device);
    dn_model_close(p->model);
    p->r = NULL;
    p->w = NULL;
    p->device = NULL;
    p->model = NULL;
}

/* ---- Steps ---- */

/* As the scheduler does: page tables that are in the arrays stay there. */
static void add_seq(struct plan *p, const struct row *row, uint32_t q, uint32_t first, uint32_t n, uint32_t kv_len)
{
    struct dn_step *s = dn_runner_arrays(p->r);
    uint32_t pages = seq_pages(p, row), at = q * pages;
    for (uint32_t i = 0; i < n; i++) {
        s->token_id[first + i] = (int32_t)(dn_bench_random(&p->random) % p->model->hyper.n_vocab);
        s->position[first + i] = (int32_t)(kv_len - n + i);
        s->token_seq[first + i] = (int32_t)q;
        s->token_count[first + i] = 0;
    }
    if (p->in_arrays != row) {
        memcpy(s->page + at, row->page + at, pages * sizeof *row->page);
        memcpy(s->tag + at, row->tag + at, pages * sizeof *row->tag);
    }
    s->page_start[q] = (int32_t)at;
    s->token_start[q + 1] = (int32_t)(first + n);
    s->kv_len[q] = (int32_t)kv_len;
    s->slot[q] = -1;
    s->kv_format[q] = (uint8_t)format_of(row, q);
    s->check[q] = row->check;
}

static void add_row(struct dn_step *s, uint32_t token, uint64_t seed)
{
    uint32_t i = s->n_rows++;
    s->row_token[i] = (int32_t)token;
    s->sample[i] = (struct dn_sample){
        .temperature = 1, .top_p = 0.95f, .repetition = 1, .slot = -1, .target = -1, .n_top = -1, .seed = seed};
}

/* Fills the arrays for [done, done + n) of every sequence, runs the step; adds to *t.
 */
static int run_step(struct plan *p, const struct row *row, uint32_t done, uint32_t n, struct sample *t,
                    struct dn_err *err)
{
    uint64_t start = dn_now_ns();
    struct dn_step *s = dn_runner_arrays(p->r);
    s->kind = p->prefill ? DN_STEP_PREFILL : DN_STEP_DECODE;
    s->n_tokens = row->batch * n;
    s->n_seqs = row->batch;
    s->n_rows = s->n_tags = s->tag_first = 0;
    s->token_start[0] = 0;
    for (uint32_t q = 0; q < row->batch; q++) {
        add_seq(p, row, q, q * n, n, done + n);
        if (done + n == row->context)
            add_row(s, q * n + n - 1, q);
    }
    p->in_arrays = row;
    uint64_t filled = dn_now_ns();
    dn_runner_start(p->r);
    uint64_t started = dn_now_ns();
    int code = dn_runner_wait(p->r, err);
    t->us += (double)(dn_now_ns() - start) * 1e-3;
    t->fill_us += (double)(filled - start) * 1e-3;
    t->start_us += (double)(started - filled) * 1e-3;
    for (uint32_t q = 0; q < row->batch && code == 0; q++)
        if (s->bad[q] || (q < s->n_rows && s->result[q].id < 0))
            code = dn_err_set(err, DN_INTERNAL, "sequence %u of %u: %s", q, row->batch,
                              s->bad[q] ? "the tag check failed" : "the logits are not finite");
    return code;
}

/* A decode step, or the prefill of a prompt. */
static int run_once(struct plan *p, const struct row *row, struct sample *t, struct dn_err *err)
{
    if (!p->prefill)
        return run_step(p, row, row->context - 1, 1, t, err);
    int code = 0;
    for (uint32_t done = 0; done < row->context && code == 0;) {
        uint32_t left = row->context - done, n = left < p->chunk ? left : (uint32_t)p->chunk;
        code = run_step(p, row, done, n, t, err);
        done += n;
    }
    return code;
}

/* How many experts the last layer has chosen. */
static double count_experts(struct plan *p, const struct row *row)
{
    const struct dn_hyper *h = &p->model->hyper;
    size_t n = (size_t)row->batch * h->top_experts;
    bool used[DN_MODEL_MAX_EXPERTS] = {false};
    double sum = 0;
    if (h->n_experts == 0)
        return NAN;
    int32_t *expert = dn_alloc0(n, sizeof *expert);
    p->device->ops->download(p->device, expert, p->r->expert, n * sizeof *expert);
    for (size_t i = 0; i < n; i++)
        used[expert[i] >= 0 && (uint32_t)expert[i] < h->n_experts ? expert[i] : 0] = true;
    for (uint32_t e = 0; e < h->n_experts; e++)
        sum += used[e];
    free(expert);
    return sum;
}

static int measure(struct plan *p, struct row *row, struct dn_err *err)
{
    int code = 0, n_warm = p->prefill ? !row->warm : row->warm ? 1 : 3;
    struct sample ignored = {0, 0, 0};
    for (int i = 0; i < n_warm && code == 0; i++)
        code = run_once(p, row, &ignored, err);
    row->warm = true;
    uint64_t begin = dn_now_ns();
    for (int i = 0; i < MAX_STEPS && code == 0 && (i == 0 || dn_now_ns() - begin < p->ms * 1000000); i++)
        code = run_once(p, row, &row->sample[row->n++], err);
    if (code == 0 && !p->prefill)
        row->experts = count_experts(p, row);
    return code;
}

/* ---- What a decode step must read ---- */

static double weight_bytes(const struct plan *p, const struct row *row)
{
    const struct dn_hyper *h = &p->model->hyper;
    double sum = (double)p->w->head->bytes;
    double share = h->n_experts ? row->experts / h->n_experts : 0;
    for (uint32_t i = 0; i < h->n_layers; i++) {
        const struct dn_layer_weights *l = &p->w->layer[i];
        const struct dn_matrix *all[] = {&l->qkv,  &l->o,   &l->gate_up, &l->down,           &l->kv_a,       &l->q_b,
                                         &l->w_kt, &l->w_v, &l->router,  &l->shared_gate_up, &l->shared_down};
        for (size_t k = 0; k < sizeof all / sizeof *all; k++)
            sum += (double)all[k]->bytes;
        sum += share * (double)(l->expert_gate_up.bytes + l->expert_down.bytes);
    }
    return sum;
}

static double step_bytes(const struct plan *p, const struct row *row)
{
    double sum = weight_bytes(p, row);
    for (uint32_t q = 0; q < row->batch; q++)
        sum += (double)row->context * p->layout.n_layers *
               ((double)p->layout.format[format_of(row, q)].layer_bytes / p->layout.page_tokens);
    return sum;
}

/* ---- The table ---- */

static const struct dn_bench_column columns[] = {{"WHAT", "what", -7},
                                                 {"WEIGHTS", "weights", -7},
                                                 {"KV", "kv", -5},
                                                 {"CHECK", "integrity", -5},
                                                 {"BATCH", "batch", 5},
                                                 {"CONTEXT", "context", 7},
                                                 {"TOK/S", "tokens_per_s", 10},
                                                 {"STEP", "step_us", 10},
                                                 {"P10", "p10_us", 10},
                                                 {"P90", "p90_us", 10},
                                                 {"EXPERTS", "experts", 7},
                                                 {"GB", "gb_to_read", 8},
                                                 {"FLOOR", "floor_us", 10},
                                                 {"OF FLOOR %", "of_floor_percent", 10},
                                                 {"FILL", "fill_us", 7},
                                                 {"START", "start_us", 7},
                                                 {NULL, NULL, 0}};

/* A quantile of one member of the samples. */
static double quantile(const struct row *row, size_t member, double part)
{
    double *x = dn_alloc0(row->n, sizeof *x);
    for (size_t i = 0; i < row->n; i++)
        memcpy(&x[i], (const char *)&row->sample[i] + member, sizeof *x);
    double q = dn_bench_quantile(x, row->n, part);
    free(x);
    return q;
}

static void print_row(struct plan *p, struct row *row, const char *weights, struct dn_bench_table *t)
{
    const size_t us = offsetof(struct sample, us);
    double step = quantile(row, us, 0.5), bytes = p->prefill ? NAN : step_bytes(p, row);
    double floor_us = p->read_rate > 0 ? bytes / p->read_rate * 1e6 : NAN;
    double tokens = p->prefill ? row->context : row->batch;
    dn_bench_text(t, p->prefill ? "prefill" : "decode");
    dn_bench_text(t, weights);
    dn_bench_text(t, kv_name[row->kv]);
    dn_bench_text(t, row->check ? "tag" : "off");
    dn_bench_number(t, 0, row->batch);
    dn_bench_number(t, 0, row->context);
    dn_bench_number(t, 1, tokens / step * 1e6);
    dn_bench_number(t, 1, step);
    dn_bench_number(t, 1, quantile(row, us, 0.1));
    dn_bench_number(t, 1, quantile(row, us, 0.9));
    dn_bench_number(t, 0, p->prefill ? NAN : row->experts);
    dn_bench_number(t, 3, bytes * 1e-9);
    dn_bench_number(t, 1, floor_us);
    dn_bench_number(t, 1, floor_us / step * 100);
    /* The CPU computes while the step is started. */
    dn_bench_number(t, 1, quantile(row, offsetof(struct sample, fill_us), 0.5));
    dn_bench_number(t, 1, p->gpu >= 0 ? quantile(row, offsetof(struct sample, start_us), 0.5) : NAN);
}

/* Rounds over all rows; a row is printed as soon as its last round is over, and when stopped what was measured. */
static int run_rows(struct plan *p, const char *weights, struct dn_bench_table *t, struct dn_err *err)
{
    int code = 0;
    size_t n_printed = 0;
    for (uint64_t round = 0; round < p->rounds && code == 0 && !dn_bench_stopped(); round++)
        for (size_t i = 0; i < p->n_rows && code == 0 && !dn_bench_stopped(); i++) {
            code = measure(p, &p->row[i], err);
            if (code == 0 && round + 1 == p->rounds)
                print_row(p, &p->row[n_printed++], weights, t);
        }
    for (; code == 0 && n_printed < p->n_rows; n_printed++)
        if (p->row[n_printed].n)
            print_row(p, &p->row[n_printed], weights, t);
    if (code == 0 && dn_bench_stopped())
        code = dn_err_set(err, DN_CANCELLED, "stopped by a signal: not all rounds, or not all rows");
    return code;
}

static int run_weights(struct plan *p, const struct options *o, size_t index, struct dn_bench_table *t,
                       struct dn_err *err)
{
    const char *weights = p->weights.text[index];
    int code = open_model(p, weights, err);
    if (code == 0 && index == 0)
        code = fit_contexts(p, err);
    for (size_t i = 0; i < p->n_rows && code == 0 && index == 0; i++)
        p->row[i].sample = dn_alloc0(p->rounds * MAX_STEPS, sizeof *p->row[i].sample);
    if (code == 0)
        code = open_runner(p, o, weights, err);
    if (code == 0) {
        if (!t->has_head)
            dn_bench_print_head(p->device, p->read_rate, p->gpu);
        dn_bench_table_head(t);
        dn_bench_catch_stop(true);
        code = run_rows(p, weights, t, err);
        dn_bench_catch_stop(false);
    }
    if (code == 0)
        dn_bench_print_clocks(p->gpu);
    close_runner(p);
    return code;
}

static int run(const struct options *o, const struct dn_args *args, bool prefill)
{
    struct plan *p = dn_alloc0(1, sizeof *p);
    struct dn_bench_table t = {0};
    struct dn_err err = {0};
    p->prefill = prefill;
    int code = parse(p, o, args, &err);
    if (code == 0)
        code = dn_bench_table_open(&t, columns, o->csv, &err);
    for (size_t i = 0; i < p->weights.n && code == 0; i++)
        code = run_weights(p, o, i, &t, &err);
    close_runner(p);
    struct dn_err close_err;
    if (dn_bench_table_close(&t, &close_err) != 0 && code == 0) {
        err = close_err;
        code = -DN_IO;
    }
    for (size_t i = 0; i < p->n_rows; i++)
        free(p->row[i].sample);
    free(p->weights.copy);
    free(p);
    if (code == 0)
        return DN_EXIT_OK;
    fprintf(stderr, "dunlin: %s\n", err.text);
    return err.code == DN_CONFIG ? DN_EXIT_USAGE : DN_EXIT_FAILED;
}

int dn_bench_steps(int argc, char **argv, bool prefill)
{
    struct options o = {.kv = "bf16",
                        .integrity = "tag",
                        .batch = "1,8,16,32,64",
                        .chunk = "2k",
                        .rounds = "5",
                        .ms = "50",
                        .device = "auto",
                        .threads = "0"};
    const struct dn_flag flag[] = {
        {"synthetic", "CONFIG.json", "random weights of these sizes instead of a MODEL", &o.synthetic, NULL},
        {"layers", "N", "of a synthetic model, the first N [all]", &o.layers, NULL},
        {"weights", "LIST", "auto, bf16, fp8, int8, int4 [auto; synthetic: int4]", &o.weights, NULL},
        {"kv", "LIST", "bf16, fp8, mixed (half of the sequences each, from 2 on) [bf16]", &o.kv, NULL},
        {"integrity", "LIST", "off, tag [tag]", &o.integrity, NULL},
        {"batch", "LIST", "sequences of a decode step [1,8,16,32,64]", &o.batch, NULL},
        {"context", "LIST", "tokens [1k,8k,32k; prefill: 1k,8k; those that the model has]", &o.context, NULL},
        {"chunk", "TOKENS", "of a prefill step [2k]", &o.chunk, NULL},
        {"rounds", "N", "[5]", &o.rounds, NULL},
        {"ms", "N", "of a row in a round [50]", &o.ms, NULL},
        {"device", "NAME", "auto, cpu, cuda or cuda:N [auto]", &o.device, NULL},
        {"threads", "N", "of the CPU; 0: all cores [0]", &o.threads, NULL},
        {"csv", "FILE", "the table as comma-separated values, too", &o.csv, NULL},
        {NULL, NULL, NULL, NULL, NULL},
    };
    struct dn_args args;
    struct dn_err err = {0};
    bool help;
    if (dn_args_parse(argc, argv, usage, flag, &args, &help, &err) != 0) {
        fprintf(stderr, "dunlin: %s\n", err.text);
        return DN_EXIT_USAGE;
    }
    if (help)
        return DN_EXIT_OK;
    return run(&o, &args, prefill);
}
