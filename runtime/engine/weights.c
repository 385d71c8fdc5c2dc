#include "engine/weights.h"

#include "base/buf.h"
#include "engine/runner.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A chunk is what one pack call takes: whole blocks of every format, so that threads never share one. */
enum { CHUNK_ROWS = 128, MAX_PARTS = 3, MAX_THREADS = 256, INT_GROUP = 32 };

/* A matrix and the tensors whose rows follow each other in it. */
struct job {
    struct dn_matrix *m;
    const struct dn_tensor *part[MAX_PARTS];
    int n_parts;
};

struct jobs {
    struct job *job;
    size_t n;
    uint64_t file_bytes;
    /* Pairs of file type and format that lose precision, counted for the notes. */
    uint32_t n_lossy[DN_TT_COUNT][DN_W_FORMATS];
    uint32_t n_odd; /* matrices whose width no integer format takes */
};

/* ---- Formats ----------------------------------------------------------------------------------------------------- */

const char *dn_weights_main_format(const struct dn_weights *w)
{
    int main_format = 0;
    for (int f = 1; f < DN_W_FORMATS; f++)
        if (w->format_bytes[f] > w->format_bytes[main_format])
            main_format = f;
    return dn_weight_format_name((enum dn_weight_format)main_format);
}

const char *dn_weights_format_name(int format)
{
    return format == DN_WEIGHTS_AUTO ? "auto" : dn_weight_format_name((enum dn_weight_format)format);
}

int dn_weights_format_parse(const char *name, int *out)
{
    enum dn_weight_format f;
    if (strcmp(name, "auto") == 0) {
        *out = DN_WEIGHTS_AUTO;
        return 0;
    }
    int code = dn_weight_format_parse(name, &f);
    if (code == 0)
        *out = (int)f;
    return code;
}

static enum dn_weight_format nearest(enum dn_tensor_type t)
{
    switch (t) {
    case DN_TT_Q4_0:
    case DN_TT_Q4_1:
    case DN_TT_Q4_K:
        return DN_W_INT4;
    case DN_TT_Q8_0:
    case DN_TT_Q6_K:
        return DN_W_INT8;
    default:
        return DN_W_BF16;
    }
}

static bool is_q4(enum dn_tensor_type t)
{
    return nearest(t) == DN_W_INT4;
}

static bool is_exact(enum dn_tensor_type t, enum dn_weight_format f)
{
    return (f == DN_W_INT4 && (t == DN_TT_Q4_0 || t == DN_TT_Q4_1)) || (f == DN_W_INT8 && t == DN_TT_Q8_0) ||
           (f == DN_W_BF16 && t == DN_TT_BF16);
}

static void choose_format(struct jobs *jobs, struct job *job, int asked, bool is_vocab)
{
    struct dn_matrix *m = job->m;
    m->format = asked == DN_WEIGHTS_AUTO ? DN_W_INT4 : (enum dn_weight_format)asked;
    if (asked == DN_W_INT4 && is_vocab)
        m->format = DN_W_INT8;
    m->symmetric = true;
    for (int i = 0; i < job->n_parts; i++) {
        enum dn_weight_format f = nearest(job->part[i]->type);
        bool wider = f == DN_W_BF16 || (f == DN_W_INT8 && m->format == DN_W_INT4);
        if (asked == DN_WEIGHTS_AUTO && wider)
            m->format = f;
        m->symmetric = m->symmetric && job->part[i]->type == DN_TT_Q4_0;
    }
    if ((m->format == DN_W_INT4 || m->format == DN_W_INT8) && m->n_in % INT_GROUP != 0) {
        m->format = DN_W_BF16;
        jobs->n_odd++;
    }
    m->symmetric = m->symmetric && m->format == DN_W_INT4;
    for (int i = 0; i < job->n_parts; i++)
        if (!is_exact(job->part[i]->type, m->format))
            jobs->n_lossy[job->part[i]->type][m->format]++;
}

/* ---- The list of matrices ---------------------------------------------------------------------------------------- */

static int add_job(struct jobs *jobs, const struct dn_kernels *ops, struct dn_weights *w, struct dn_matrix *m,
                   const struct dn_tensor *const *part, int n_parts, bool is_vocab, struct dn_err *err)
{
    struct job job = {.m = m, .n_parts = n_parts};
    uint64_t n_out = 0;
    for (int i = 0; i < n_parts; i++) {
        job.part[i] = part[i];
        n_out += part[i]->dim[0];
        jobs->file_bytes += part[i]->bytes;
    }
    if (n_out > UINT32_MAX || part[0]->dim[1] > UINT32_MAX)
        return dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\": %" PRIu64 " rows in its fused matrix are too many",
                          part[0]->name, n_out);
    *m = (struct dn_matrix){.n_out = (uint32_t)n_out, .n_in = (uint32_t)part[0]->dim[1]};
    choose_format(jobs, &job, w->format, is_vocab);
    m->bytes = ops->matrix_bytes(m);
    if (m->bytes == 0)
        return dn_err_set(err, DN_MODEL_FILE,
                          "tensor \"%s\": a matrix of %" PRIu32 " x %" PRIu32 " does not fit backend \"%s\" as %s",
                          part[0]->name, m->n_out, m->n_in, ops->name, dn_weight_format_name(m->format));
    w->bytes += m->bytes;
    w->format_bytes[m->format] += m->bytes;
    jobs->job[jobs->n++] = job;
    return 0;
}

static int add_layer(struct jobs *jobs, const struct dn_kernels *ops, struct dn_weights *w, uint32_t l,
                     struct dn_err *err)
{
    const struct dn_model *m = w->model;
    struct dn_layer_weights *lw = &w->layer[l];
    const struct dn_tensor *qkv[] = {dn_model_tensor(m, DN_T_Q, l), dn_model_tensor(m, DN_T_K, l),
                                     dn_model_tensor(m, DN_T_V, l)};
    const struct dn_tensor *o = dn_model_tensor(m, DN_T_O, l), *down = dn_model_tensor(m, DN_T_DOWN, l);
    const struct dn_tensor *gate_up[] = {dn_model_tensor(m, DN_T_GATE, l), dn_model_tensor(m, DN_T_UP, l)};
    int code = add_job(jobs, ops, w, &lw->qkv, qkv, 3, false, err);
    if (code == 0)
        code = add_job(jobs, ops, w, &lw->o, &o, 1, false, err);
    if (code == 0)
        code = add_job(jobs, ops, w, &lw->gate_up, gate_up, 2, false, err);
    if (code == 0)
        code = add_job(jobs, ops, w, &lw->down, &down, 1, false, err);
    return code;
}

static void add_note(struct dn_weights *w, const char *text)
{
    if (w->n_notes < DN_WEIGHTS_MAX_NOTES)
        w->note[w->n_notes++] = dn_strdup(text);
}

static void write_notes(struct dn_weights *w, const struct jobs *jobs)
{
    struct dn_buf b = {0};
    for (int t = 0; t < DN_TT_COUNT; t++) {
        for (int f = 0; f < DN_W_FORMATS; f++) {
            uint32_t n = jobs->n_lossy[t][f];
            if (n == 0)
                continue;
            dn_buf_clear(&b);
            bool rescaled = t == DN_TT_Q4_K && f == DN_W_INT4;
            dn_buf_printf(&b, "%" PRIu32 " tensor%s of type %s: %s %s%s", n, n == 1 ? "" : "s",
                          dn_tensor_type_info((enum dn_tensor_type)t)->name,
                          rescaled ? "scales rounded to f16 for" : "rounded to",
                          dn_weight_format_name((enum dn_weight_format)f), rescaled ? ", values exact" : "");
            add_note(w, dn_buf_str(&b));
        }
    }
    if (jobs->n_odd > 0) {
        dn_buf_clear(&b);
        dn_buf_printf(&b,
                      "%" PRIu32 " matri%s kept in bf16: a width that is not a multiple of 32 has no integer format",
                      jobs->n_odd, jobs->n_odd == 1 ? "x" : "ces");
        add_note(w, dn_buf_str(&b));
    }
    dn_buf_release(&b);
}

static uint64_t vector_bytes(const struct dn_hyper *h)
{
    uint64_t layer = 2 * (uint64_t)h->dim + (h->qk_norm ? 2 * (uint64_t)h->head_dim : 0) +
                     (h->qkv_bias ? (h->n_heads + 2 * (uint64_t)h->n_kv_heads) * h->head_dim : 0);
    return sizeof(float) * (layer * h->n_layers + h->dim);
}

/* Sizes and formats of everything; nothing is allocated on the device yet. */
static int list_jobs(struct dn_weights *w, struct jobs *jobs, const struct dn_kernels *ops, struct dn_err *err)
{
    const struct dn_model *m = w->model;
    w->layer = dn_alloc0(m->hyper.n_layers, sizeof *w->layer);
    jobs->job = dn_alloc0(4 * (size_t)m->hyper.n_layers + 2, sizeof *jobs->job);
    const struct dn_tensor *embed = dn_model_tensor(m, DN_T_EMBED, 0), *head = dn_model_tensor(m, DN_T_HEAD, 0);
    int code = add_job(jobs, ops, w, &w->embed, &embed, 1, true, err);
    w->head = &w->embed;
    if (code == 0 && head != NULL) {
        code = add_job(jobs, ops, w, &w->head_matrix, &head, 1, true, err);
        w->head = &w->head_matrix;
    }
    for (uint32_t l = 0; l < m->hyper.n_layers && code == 0; l++)
        code = add_layer(jobs, ops, w, l, err);
    w->bytes += vector_bytes(&m->hyper);
    if (code == 0)
        write_notes(w, jobs);
    return code;
}

/* ---- Packing ----------------------------------------------------------------------------------------------------- */

struct task {
    uint32_t job, row0;
};

struct load {
    struct dn_device *device;
    const struct jobs *jobs;
    struct task *task;
    size_t n_tasks;
    size_t scratch_bytes;
    atomic_size_t next;
    atomic_uint_fast64_t done_bytes;
    atomic_int code; /* the first failure's */
    const struct dn_weights_conf *conf;
    uint64_t total_bytes;
};

/* Rows [row, row + n) of one tensor into f32 at out. */
static void decode_f32(const struct dn_tensor *t, uint64_t row, uint32_t n, float *out)
{
    uint64_t n_in = t->dim[1], stride = dn_tensor_row_bytes(t->type, n_in);
    for (uint32_t i = 0; i < n; i++)
        dn_tensor_row_f32(t->type, t->data + (row + i) * stride, (size_t)n_in, out + (size_t)i * n_in);
}

/* Rows of a 4-bit tensor; false if a scale does not fit f16. */
static bool decode_q4(const struct dn_tensor *t, uint64_t row, uint32_t n, bool symmetric, uint8_t *scratch,
                      struct dn_rows *rows)
{
    size_t n_in = (size_t)t->dim[1], groups = n_in / INT_GROUP;
    uint64_t stride = dn_tensor_row_bytes(t->type, n_in);
    uint16_t *scale = (uint16_t *)(void *)(scratch + CHUNK_ROWS * n_in / 2), *offset = scale + CHUNK_ROWS * groups;
    for (uint32_t i = 0; i < n; i++)
        if (!dn_tensor_row_q4(t->type, t->data + (row + i) * stride, n_in, scratch + i * n_in / 2, scale + i * groups,
                              offset + i * groups))
            return false;
    *rows = (struct dn_rows){.q4 = scratch, .scale16 = scale, .offset16 = symmetric ? NULL : offset};
    return true;
}

static void decode_q8(const struct dn_tensor *t, uint64_t row, uint32_t n, uint8_t *scratch, struct dn_rows *rows)
{
    size_t n_in = (size_t)t->dim[1], groups = n_in / INT_GROUP;
    uint64_t stride = dn_tensor_row_bytes(t->type, n_in);
    int8_t *q8 = (int8_t *)scratch;
    uint16_t *scale = (uint16_t *)(void *)(scratch + CHUNK_ROWS * n_in);
    for (uint32_t i = 0; i < n; i++)
        dn_tensor_row_q8(t->data + (row + i) * stride, n_in, q8 + i * n_in, scale + i * groups);
    *rows = (struct dn_rows){.q8 = q8, .scale16 = scale};
}

/* Packs rows [row, row + n) of one tensor at row `at` of the matrix, in the form that loses least. */
static int pack_rows(struct dn_device *d, struct dn_matrix *m, uint32_t at, const struct dn_tensor *t, uint64_t row,
                     uint32_t n, uint8_t *scratch)
{
    struct dn_rows rows = {0};
    bool done = false;
    if (m->format == DN_W_INT4 && is_q4(t->type)) {
        done = decode_q4(t, row, n, m->symmetric, scratch, &rows);
    } else if (m->format == DN_W_INT8 && t->type == DN_TT_Q8_0) {
        decode_q8(t, row, n, scratch, &rows);
        done = true;
    } else if (t->type == DN_TT_BF16 && m->format == DN_W_BF16) {
        uint64_t stride = 2 * t->dim[1];
        memcpy(scratch, t->data + row * stride, n * stride); /* aligns it, too */
        rows.bf16 = (const uint16_t *)(const void *)scratch;
        done = true;
    }
    if (!done) {
        decode_f32(t, row, n, (float *)(void *)scratch);
        rows = (struct dn_rows){.f32 = (const float *)(const void *)scratch};
    }
    return d->ops->matrix_pack(d, m, at, n, &rows);
}

/* One chunk of a matrix. FP8 shares a scale over 128 rows, whatever tensors they come from: those go through f32
 * together. */
static int pack_chunk(struct load *load, const struct task *task, uint8_t *scratch, uint64_t *bytes)
{
    const struct job *job = &load->jobs->job[task->job];
    struct dn_matrix *m = job->m;
    uint32_t end = m->n_out - task->row0 < CHUNK_ROWS ? m->n_out : task->row0 + CHUNK_ROWS;
    uint64_t begin = 0; /* of the part, in rows of the matrix */
    float *gathered = (float *)(void *)scratch;
    for (int i = 0; i < job->n_parts; i++) {
        const struct dn_tensor *t = job->part[i];
        uint64_t from = begin > task->row0 ? begin : task->row0, to = begin + t->dim[0] < end ? begin + t->dim[0] : end;
        if (from < to) {
            uint32_t n = (uint32_t)(to - from);
            *bytes += n * dn_tensor_row_bytes(t->type, t->dim[1]);
            if (m->format == DN_W_FP8) {
                decode_f32(t, from - begin, n, gathered);
                gathered += (size_t)n * m->n_in;
            } else {
                int code = pack_rows(load->device, m, (uint32_t)from, t, from - begin, n, scratch);
                if (code != 0)
                    return code;
            }
        }
        begin += t->dim[0];
    }
    if (m->format != DN_W_FP8)
        return 0;
    struct dn_rows rows = {.f32 = (const float *)(const void *)scratch};
    return load->device->ops->matrix_pack(load->device, m, task->row0, end - task->row0, &rows);
}

static void work(struct load *load, bool is_caller)
{
    uint8_t *scratch = dn_alloc(load->scratch_bytes);
    size_t i;
    while (atomic_load(&load->code) == 0 && (i = atomic_fetch_add(&load->next, 1)) < load->n_tasks) {
        uint64_t bytes = 0;
        int expected = 0, code = pack_chunk(load, &load->task[i], scratch, &bytes);
        if (code != 0)
            atomic_compare_exchange_strong(&load->code, &expected, code);
        uint64_t done = atomic_fetch_add(&load->done_bytes, bytes) + bytes;
        if (is_caller && load->conf->progress != NULL)
            load->conf->progress(load->conf->progress_ctx, done, load->total_bytes);
    }
    free(scratch);
}

static void *work_thread(void *arg)
{
    work(arg, false);
    return NULL;
}

static void list_tasks(struct load *load, const struct jobs *jobs)
{
    size_t n = 0;
    for (size_t j = 0; j < jobs->n; j++)
        n += ((size_t)jobs->job[j].m->n_out + CHUNK_ROWS - 1) / CHUNK_ROWS;
    load->task = dn_alloc0(n, sizeof *load->task);
    for (size_t j = 0; j < jobs->n; j++) {
        const struct dn_matrix *m = jobs->job[j].m;
        size_t bytes = (size_t)CHUNK_ROWS * m->n_in * sizeof(float);
        load->scratch_bytes = bytes > load->scratch_bytes ? bytes : load->scratch_bytes;
        for (uint64_t row = 0; row < m->n_out; row += CHUNK_ROWS)
            load->task[load->n_tasks++] = (struct task){(uint32_t)j, (uint32_t)row};
    }
}

static int pack_all(struct dn_weights *w, const struct jobs *jobs, const struct dn_weights_conf *conf,
                    struct dn_err *err)
{
    struct load load = {.device = w->device, .jobs = jobs, .conf = conf, .total_bytes = jobs->file_bytes};
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned n_threads = conf->n_threads ? conf->n_threads : cores > 0 ? (unsigned)cores : 1;
    pthread_t thread[MAX_THREADS];
    unsigned n_started = 0;
    list_tasks(&load, jobs);
    /* A thread that can't be had is no failure: the caller works through whatever is left. */
    while (n_started + 1 < n_threads && n_started < MAX_THREADS &&
           pthread_create(&thread[n_started], NULL, work_thread, &load) == 0)
        n_started++;
    work(&load, true);
    for (unsigned i = 0; i < n_started; i++)
        pthread_join(thread[i], NULL);
    free(load.task);
    int code = atomic_load(&load.code);
    if (code != 0)
        return dn_err_set(err, (enum dn_code) - code, "%s: packing the weights failed", w->model->path);
    if (conf->progress != NULL)
        conf->progress(conf->progress_ctx, load.total_bytes, load.total_bytes);
    return 0;
}

/* ---- Vectors ----------------------------------------------------------------------------------------------------- */

/* Concatenates up to three vectors as f32 on the device. */
static int upload_vectors(struct dn_weights *w, const struct dn_tensor *const *part, int n_parts, float **out,
                          struct dn_err *err)
{
    size_t n = 0, at = 0;
    for (int i = 0; i < n_parts; i++)
        n += (size_t)part[i]->dim[0];
    float *host = dn_alloc0(n, sizeof *host);
    for (int i = 0; i < n_parts; at += (size_t)part[i]->dim[0], i++)
        dn_tensor_row_f32(part[i]->type, part[i]->data, (size_t)part[i]->dim[0], host + at);
    *out = w->device->ops->alloc(w->device, n * sizeof *host);
    if (*out != NULL)
        w->device->ops->upload(w->device, *out, host, n * sizeof *host);
    free(host);
    return *out != NULL ? 0 : dn_err_set(err, DN_NO_MEMORY, "no memory for \"%s\" on the device", part[0]->name);
}

static int upload_vector(struct dn_weights *w, enum dn_tensor_role role, uint32_t layer, float **out,
                         struct dn_err *err)
{
    const struct dn_tensor *t = dn_model_tensor(w->model, role, layer);
    return t == NULL ? 0 : upload_vectors(w, &t, 1, out, err);
}

static int upload_layer(struct dn_weights *w, uint32_t l, struct dn_err *err)
{
    struct dn_layer_weights *lw = &w->layer[l];
    const struct dn_model *m = w->model;
    int code = upload_vector(w, DN_T_ATTN_NORM, l, &lw->attn_norm, err);
    if (code == 0)
        code = upload_vector(w, DN_T_FFN_NORM, l, &lw->ffn_norm, err);
    if (code == 0)
        code = upload_vector(w, DN_T_Q_NORM, l, &lw->q_norm, err);
    if (code == 0)
        code = upload_vector(w, DN_T_K_NORM, l, &lw->k_norm, err);
    const struct dn_tensor *bias[] = {dn_model_tensor(m, DN_T_Q_BIAS, l), dn_model_tensor(m, DN_T_K_BIAS, l),
                                      dn_model_tensor(m, DN_T_V_BIAS, l)};
    if (code == 0 && bias[0] != NULL)
        code = upload_vectors(w, bias, 3, &lw->qkv_bias, err);
    return code;
}

/* ---- Open and close ---------------------------------------------------------------------------------------------- */

static int load_all(struct dn_weights *w, const struct jobs *jobs, const struct dn_weights_conf *conf,
                    struct dn_err *err)
{
    struct dn_device *d = w->device;
    for (size_t i = 0; i < jobs->n; i++) {
        struct dn_matrix *m = jobs->job[i].m;
        m->data = d->ops->alloc(d, m->bytes);
        if (m->data == NULL)
            return dn_err_set(err, DN_NO_MEMORY,
                              "%s: the weights need %" PRIu64 " bytes, which the device does not have", w->model->path,
                              w->bytes);
    }
    int code = upload_vector(w, DN_T_FINAL_NORM, 0, &w->final_norm, err);
    for (uint32_t l = 0; l < w->model->hyper.n_layers && code == 0; l++)
        code = upload_layer(w, l, err);
    return code == 0 ? pack_all(w, jobs, conf, err) : code;
}

int dn_weights_open(struct dn_device *device, const struct dn_model *model, const struct dn_weights_conf *conf,
                    struct dn_weights **out, struct dn_err *err)
{
    struct dn_weights *w = dn_alloc0(1, sizeof *w);
    struct jobs jobs = {0};
    *w = (struct dn_weights){.model = model, .device = device, .format = conf->format};
    int code = list_jobs(w, &jobs, device->ops, err);
    if (code == 0)
        code = load_all(w, &jobs, conf, err);
    free(jobs.job);
    if (code != 0) {
        dn_weights_close(w);
        return code;
    }
    *out = w;
    return 0;
}

/* What a failed or planned dn_weights has of its own; device memory only if there is a device. */
static void free_device(struct dn_weights *w)
{
    struct dn_device *d = w->device;
    for (uint32_t l = 0; w->layer != NULL && l < w->model->hyper.n_layers; l++) {
        struct dn_layer_weights *lw = &w->layer[l];
        void *p[] = {lw->attn_norm, lw->ffn_norm, lw->qkv_bias,     lw->q_norm,   lw->k_norm,
                     lw->qkv.data,  lw->o.data,   lw->gate_up.data, lw->down.data};
        for (size_t i = 0; i < sizeof p / sizeof *p; i++)
            if (p[i] != NULL)
                d->ops->free(d, p[i]);
    }
    void *p[] = {w->embed.data, w->head_matrix.data, w->final_norm};
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if (p[i] != NULL)
            d->ops->free(d, p[i]);
}

static void free_host(struct dn_weights *w)
{
    for (size_t i = 0; i < w->n_notes; i++)
        free(w->note[i]);
    free(w->layer);
}

void dn_weights_close(struct dn_weights *w)
{
    if (w == NULL)
        return;
    free_device(w);
    free_host(w);
    free(w);
}

int dn_weights_plan(const struct dn_kernels *ops, const struct dn_model *model, int format,
                    const struct dn_step_limits *limits, uint32_t context_tokens, struct dn_plan *out,
                    struct dn_err *err)
{
    struct dn_weights w = {.model = model, .format = format};
    struct jobs jobs = {0};
    struct dn_plan plan = {0};
    int code = list_jobs(&w, &jobs, ops, err);
    if (code == 0)
        code = dn_runner_sizes(model, ops->act_bytes, limits, context_tokens, &plan.activation_bytes, &plan.rope_bytes,
                               err);
    plan.weight_bytes = w.bytes;
    memcpy(plan.weight_format_bytes, w.format_bytes, sizeof plan.weight_format_bytes);
    plan.kv_token_bytes[DN_KV_BF16] = dn_model_kv_bytes(model, false);
    plan.kv_token_bytes[DN_KV_FP8] = dn_model_kv_bytes(model, true);
    free(jobs.job);
    free_host(&w);
    if (code == 0)
        *out = plan;
    return code;
}
