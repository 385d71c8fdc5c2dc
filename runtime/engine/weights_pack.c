/* Rows of checkpoints into the backend's layout, on all threads, straight from the mapped files: a thread has the
 * memory of one chunk and no more. */
#include "engine/weights_impl.h"

#include "base/buf.h"

#include <inttypes.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { MAX_THREADS = 256, FP8_BLOCK = 128 };
/* How far ahead of the packing the files are read: some chunks' worth for each thread, more than a disk's latency. */
enum { AHEAD_BYTES = 64 << 20 };

struct task {
    uint32_t job, row0, n;
};

struct load {
    struct dn_device *device;
    const struct dn_weights_jobs *jobs;
    struct task *task;
    size_t n_tasks;
    size_t scratch_bytes;
    atomic_size_t next, ahead; /* tasks taken; tasks whose bytes the system was told to read */
    atomic_uint_fast64_t done_bytes, ahead_bytes;
    atomic_int code;        /* the first failure's */
    atomic_size_t bad_task; /* the first whose rows are no numbers: those before it were begun, and end as well */
    const struct dn_weights_conf *conf;
    uint64_t total_bytes;
    bool no_files; /* a synthetic model's few pages stay where they are */
    float e4m3[256];
};

/* ---- Values ------------------------------------------------------------------------------------------------------ */

static float e4m3_value(uint8_t q)
{
    int exponent = q >> 3 & 15, fraction = q & 7;
    float v = (q & 0x7f) == 0x7f ? NAN
              : exponent == 0    ? ldexpf((float)fraction, -9)
                                 : ldexpf((float)(8 + fraction), exponent - 10);
    return q & 0x80 ? -v : v;
}

static float load_f32(const uint8_t *p)
{
    float f;
    memcpy(&f, p, sizeof f);
    return f;
}

static float load_bf16(const uint8_t *p)
{
    uint16_t h;
    memcpy(&h, p, sizeof h);
    return dn_bf16_to_f32(h);
}

static void fp8_row(const struct load *load, const struct dn_linear *l, uint64_t row, float *out)
{
    uint64_t n_blocks = (l->n_in + FP8_BLOCK - 1) / FP8_BLOCK;
    const uint8_t *q = l->values->data + row * l->n_in, *scale = l->scale->data + 4 * (row / FP8_BLOCK) * n_blocks;
    for (uint64_t k = 0; k < l->n_in; k++)
        out[k] = load->e4m3[q[k]] * load_f32(scale + 4 * (k / FP8_BLOCK));
}

static void int4_row(const struct dn_linear *l, uint64_t row, float *out)
{
    const uint8_t *q = l->values->data + row * l->n_in / 2;
    const uint8_t *scale = l->scale->data + 2 * row * (l->n_in / DN_INT_GROUP);
    for (uint64_t k = 0; k < l->n_in; k++) {
        int v = k % 2 ? q[k / 2] >> 4 : q[k / 2] & 15;
        out[k] = (float)(v - 8) * load_bf16(scale + 2 * (k / DN_INT_GROUP));
    }
}

/* Rows [row, row + n) of a matrix in f32, whatever it is stored as. */
static void decode_f32(const struct load *load, const struct dn_linear *l, uint64_t row, uint32_t n, float *out)
{
    enum dn_tensor_type type = l->values->type;
    for (uint32_t i = 0; i < n; i++, row++, out += l->n_in) {
        if (type == DN_TT_F8_E4M3)
            fp8_row(load, l, row, out);
        else if (type == DN_TT_I32)
            int4_row(l, row, out);
        else
            dn_tensor_row_f32(type, l->values->data + row * dn_tensor_row_bytes(type, l->n_in), (size_t)l->n_in, out);
    }
}

/* ---- Chunks ------------------------------------------------------------------------------------------------------ */

/* Rows of one part that a chunk takes. */
struct piece {
    const struct dn_linear *from;
    uint64_t from_row;
    uint32_t n, at; /* rows; from the chunk's first */
};

/* The part that holds a row. */
static uint32_t part_of(const struct dn_weights_job *job, uint32_t row)
{
    uint32_t low = 0, high = job->n_parts - 1;
    while (low < high) {
        uint32_t middle = low + (high - low + 1) / 2;
        if (job->part[middle].at_row <= row)
            low = middle;
        else
            high = middle - 1;
    }
    return low;
}

/* The next piece of a chunk from row `at` on; parts follow each other, so the caller passes the part from call to call.
 */
static struct piece next_piece(const struct dn_weights_job *job, uint32_t *part, uint32_t row0, uint32_t at, uint32_t n)
{
    const struct dn_weights_part *p = &job->part[*part];
    uint32_t row = row0 + at, inside = row - p->at_row;
    uint32_t left = p->n_rows - inside;
    struct piece piece = {&p->from, p->from_row + inside, left < n - at ? left : n - at, at};
    ++*part;
    return piece;
}

enum form { FORM_F32, FORM_BF16, FORM_FP8, FORM_INT4, FORM_Q4, FORM_Q8 };

/* The form in which a matrix's format takes a checkpoint's values without loss. */
static enum form form_of(const struct dn_matrix *m, const struct piece *p)
{
    enum dn_tensor_type t = p->from->values->type;
    if (m->format == DN_W_BF16 && t == DN_TT_BF16)
        return FORM_BF16;
    if (m->format == DN_W_FP8 && t == DN_TT_F8_E4M3 && p->at == 0 && p->from_row % FP8_BLOCK == 0)
        return FORM_FP8;
    if (m->format == DN_W_INT4 && t == DN_TT_I32 && m->symmetric && m->scale_is_bf16)
        return FORM_INT4;
    if (m->format == DN_W_INT4 && (t == DN_TT_Q4_0 || t == DN_TT_Q4_1 || t == DN_TT_Q4_K) && !m->scale_is_bf16 &&
        (!m->symmetric || t == DN_TT_Q4_0))
        return FORM_Q4;
    if (m->format == DN_W_INT8 && t == DN_TT_Q8_0 && !m->scale_is_bf16)
        return FORM_Q8;
    return FORM_F32;
}

/* Where the gathered rows of a chunk lie in a thread's scratch: values, then scales, then offsets. */
struct gather {
    uint8_t *values, *scale, *offset;
};

static struct gather gather_at(const struct dn_matrix *m, uint8_t *scratch, enum form form)
{
    size_t n_in = m->n_in, value_bytes = form == FORM_Q8 ? DN_CHUNK_ROWS * n_in : DN_CHUNK_ROWS * n_in / 2;
    uint8_t *scale = scratch + value_bytes;
    return (struct gather){scratch, scale, scale + 2 * DN_CHUNK_ROWS * (n_in / DN_INT_GROUP)};
}

static bool gather_ggml(const struct dn_matrix *m, enum form form, const struct piece *p, const struct gather *g)
{
    size_t n_in = m->n_in, groups = n_in / DN_INT_GROUP;
    const struct dn_tensor *t = p->from->values;
    uint64_t stride = dn_tensor_row_bytes(t->type, n_in);
    for (uint32_t i = 0; i < p->n; i++) {
        const uint8_t *row = t->data + (p->from_row + i) * stride;
        size_t at = p->at + i;
        uint16_t *scale = (uint16_t *)(void *)g->scale + at * groups;
        uint16_t *offset = (uint16_t *)(void *)g->offset + at * groups;
        if (form == FORM_Q8)
            dn_tensor_row_q8(row, n_in, (int8_t *)g->values + at * n_in, scale);
        else if (!dn_tensor_row_q4(t->type, row, n_in, g->values + at * n_in / 2, scale, offset))
            return false; /* a scale that does not fit f16 */
    }
    return true;
}

/* Copies the pieces of a chunk together in a form that all of them have; false: they have none. */
static bool gather_chunk(const struct dn_matrix *m, enum form form, const struct piece *piece, uint32_t n_pieces,
                         uint8_t *scratch, struct dn_rows *rows)
{
    size_t n_in = m->n_in, groups = n_in / DN_INT_GROUP;
    struct gather g = gather_at(m, scratch, form);
    for (uint32_t i = 0; i < n_pieces; i++) {
        const struct piece *p = &piece[i];
        const struct dn_linear *l = p->from;
        if (form == FORM_BF16) {
            memcpy(g.values + 2 * p->at * n_in, l->values->data + 2 * p->from_row * n_in, 2 * p->n * n_in);
        } else if (form == FORM_INT4) {
            memcpy(g.values + p->at * n_in / 2, l->values->data + p->from_row * n_in / 2, p->n * n_in / 2);
            memcpy(g.scale + 2 * p->at * groups, l->scale->data + 2 * p->from_row * groups, 2 * p->n * groups);
        } else if (!gather_ggml(m, form, p, &g)) {
            return false;
        }
    }
    const uint16_t *scale = (const uint16_t *)(const void *)g.scale, *offset = (const uint16_t *)(const void *)g.offset;
    if (form == FORM_BF16)
        *rows = (struct dn_rows){.bf16 = (const uint16_t *)(const void *)g.values};
    else if (form == FORM_Q8)
        *rows = (struct dn_rows){.q8 = (const int8_t *)g.values, .scale16 = scale};
    else
        *rows = (struct dn_rows){.q4 = g.values, .scale16 = scale, .offset16 = m->symmetric ? NULL : offset};
    return true;
}

static bool is_aligned(const void *p, size_t to)
{
    return (uintptr_t)p % to == 0;
}

/* One piece that a backend can take where it lies in the file. */
static bool in_place(const struct dn_matrix *m, enum form form, const struct piece *p, uint8_t *scratch,
                     struct dn_rows *rows)
{
    const struct dn_linear *l = p->from;
    const uint8_t *values = l->values->data, *scale = l->scale ? l->scale->data : NULL;
    if (form == FORM_BF16 && is_aligned(values, 2)) {
        rows->bf16 = (const uint16_t *)(const void *)(values + 2 * p->from_row * m->n_in);
        return true;
    }
    if (form == FORM_INT4 && is_aligned(scale, 2)) {
        rows->q4 = values + p->from_row * m->n_in / 2;
        rows->scale16 = (const uint16_t *)(const void *)(scale + 2 * p->from_row * (m->n_in / DN_INT_GROUP));
        return true;
    }
    if (form == FORM_FP8) {
        DN_BUG_ON(scale == NULL);
        size_t n_blocks = (m->n_in + FP8_BLOCK - 1) / FP8_BLOCK;
        rows->fp8 = values + p->from_row * m->n_in;
        memcpy(scratch, scale + 4 * (p->from_row / FP8_BLOCK) * n_blocks, 4 * n_blocks);
        rows->block_scale = (const float *)(const void *)scratch;
        return true;
    }
    return false;
}

static void decode_pieces(const struct load *load, const struct dn_matrix *m, const struct piece *piece,
                          uint32_t n_pieces, float *out)
{
    for (uint32_t i = 0; i < n_pieces; i++)
        decode_f32(load, piece[i].from, piece[i].from_row, piece[i].n, out + (size_t)piece[i].at * m->n_in);
}

/* Column c of part i is row i * n_columns + c: each part that the chunk touches is decoded whole, [n_in][n_columns]. */
static void decode_transposed(const struct load *load, const struct dn_weights_job *job, const struct task *task,
                              float *out)
{
    const struct dn_matrix *m = job->m;
    float *part = out + (size_t)DN_CHUNK_ROWS * m->n_in;
    for (uint32_t row = task->row0; row < task->row0 + task->n;) {
        const struct dn_weights_part *p = &job->part[part_of(job, row)];
        decode_f32(load, &p->from, p->from_row, m->n_in, part);
        for (; row < task->row0 + task->n && row - p->at_row < p->n_rows; row++, out += m->n_in)
            for (uint32_t k = 0; k < m->n_in; k++)
                out[k] = part[(size_t)k * p->from.n_in + (row - p->at_row)];
    }
}

/* All of a chunk in one call, without loss if the format can have it so, else through f32. */
static int pack_chunk(struct load *load, const struct task *task, uint8_t *scratch)
{
    const struct dn_weights_job *job = &load->jobs->job[task->job];
    struct dn_matrix *m = job->m;
    struct piece piece[DN_CHUNK_ROWS];
    struct dn_rows rows = {0};
    uint32_t n_pieces = 0, part = part_of(job, task->row0);
    if (!job->transposed)
        for (uint32_t at = 0; at < task->n; at += piece[n_pieces++].n)
            piece[n_pieces] = next_piece(job, &part, task->row0, at, task->n);
    enum form form = n_pieces > 0 ? form_of(m, &piece[0]) : FORM_F32;
    for (uint32_t i = 1; i < n_pieces; i++)
        form = form_of(m, &piece[i]) == form ? form : FORM_F32;
    bool done = n_pieces == 1 && in_place(m, form, &piece[0], scratch, &rows);
    if (!done && form != FORM_F32 && form != FORM_FP8)
        done = gather_chunk(m, form, piece, n_pieces, scratch, &rows);
    if (!done) {
        if (job->transposed)
            decode_transposed(load, job, task, (float *)(void *)scratch);
        else
            decode_pieces(load, m, piece, n_pieces, (float *)(void *)scratch);
        rows = (struct dn_rows){.f32 = (const float *)(const void *)scratch};
    }
    return load->device->ops->matrix_pack(load->device, m, task->row0, task->n, &rows);
}

/* ---- The files' pages -------------------------------------------------------------------------------------------- */

/* Advice on the whole pages within (or around) some bytes of a mapped file. Advice that fails changes nothing. */
static void advise(const struct load *load, const uint8_t *data, uint64_t bytes, int advice, bool around)
{
    if (load->no_files)
        return;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), begin = (uintptr_t)data, end = begin + bytes;
    begin = around ? begin / page * page : (begin + page - 1) / page * page;
    end = around ? (end + page - 1) / page * page : end / page * page;
    if (begin < end)
        madvise((void *)begin, end - begin, advice);
}

/* Rows of a tensor; returns their bytes. */
static uint64_t advise_rows(const struct load *load, const struct dn_tensor *t, uint64_t n_rows, uint64_t row,
                            uint64_t n, int advice)
{
    uint64_t stride = t->bytes / n_rows;
    advise(load, t->data + row * stride, n * stride, advice, advice == MADV_WILLNEED);
    return n * stride;
}

/* Advises on all that a task reads; returns the bytes. */
static uint64_t advise_task(const struct load *load, const struct task *task, int advice)
{
    const struct dn_weights_job *job = &load->jobs->job[task->job];
    uint32_t part = part_of(job, task->row0);
    uint64_t sum = 0;
    if (job->transposed) { /* small, and read by others */
        const struct dn_linear *l = &job->part[part].from;
        return task->n * (l->values->bytes / l->n_out / l->n_in) * job->m->n_in;
    }
    for (uint32_t at = 0; at < task->n;) {
        struct piece p = next_piece(job, &part, task->row0, at, task->n);
        sum += advise_rows(load, p.from->values, p.from->n_out, p.from_row, p.n, advice);
        if (p.from->values->type == DN_TT_I32) /* a scale for every 16 bytes; blocks of FP8 have next to none */
            advise_rows(load, p.from->scale, p.from->n_out, p.from_row, p.n, advice);
        at += p.n;
    }
    return sum;
}

/* Whether all that a task reads are numbers. What is transposed is packed once more as it lies. */
static bool are_numbers(const struct load *load, const struct task *task)
{
    const struct dn_weights_job *job = &load->jobs->job[task->job];
    uint32_t part = part_of(job, task->row0);
    for (uint32_t at = 0; !load->no_files && !job->transposed && at < task->n;) {
        struct piece p = next_piece(job, &part, task->row0, at, task->n);
        if (!dn_weights_are_numbers(p.from, p.from_row, p.n))
            return false;
        at += p.n;
    }
    return true;
}

/* Names what a task found. */
static int name_bad(const struct load *load, const struct task *task, const struct dn_model *m, struct dn_err *err)
{
    const struct dn_weights_job *job = &load->jobs->job[task->job];
    uint32_t part = part_of(job, task->row0);
    int code = 0;
    for (uint32_t at = 0; code == 0 && at < task->n;) {
        struct piece p = next_piece(job, &part, task->row0, at, task->n);
        code = dn_weights_name_bad(m, p.from, err);
        at += p.n;
    }
    return code;
}

/* Has the system read what the tasks behind those at work will need. */
static void read_ahead(struct load *load)
{
    while (atomic_load(&load->ahead_bytes) < atomic_load(&load->done_bytes) + AHEAD_BYTES) {
        size_t i = atomic_fetch_add(&load->ahead, 1);
        if (i >= load->n_tasks)
            return;
        atomic_fetch_add(&load->ahead_bytes, advise_task(load, &load->task[i], MADV_WILLNEED));
    }
}

/* ---- Threads ----------------------------------------------------------------------------------------------------- */

static void work(struct load *load, bool is_caller)
{
    uint8_t *scratch = dn_alloc(load->scratch_bytes);
    size_t i;
    while (atomic_load(&load->code) == 0 && (i = atomic_fetch_add(&load->next, 1)) < load->n_tasks) {
        read_ahead(load);
        bool fine = are_numbers(load, &load->task[i]);
        int expected = 0, code = fine ? pack_chunk(load, &load->task[i], scratch) : -DN_MODEL_FILE;
        size_t first = atomic_load(&load->bad_task);
        while (!fine && i < first && !atomic_compare_exchange_weak(&load->bad_task, &first, i))
            ;
        if (code != 0)
            atomic_compare_exchange_strong(&load->code, &expected, code);
        /* What was packed is not read again: without this a model's file would stay in our resident memory. */
        uint64_t bytes = advise_task(load, &load->task[i], MADV_DONTNEED);
        uint64_t done = atomic_fetch_add(&load->done_bytes, bytes) + bytes;
        if (is_caller && load->conf->progress != NULL)
            load->conf->progress(load->conf->progress_ctx, done < load->total_bytes ? done : load->total_bytes,
                                 load->total_bytes);
    }
    free(scratch);
}

static void *work_thread(void *arg)
{
    work(arg, false);
    return NULL;
}

static void list_tasks(struct load *load, const struct dn_weights_jobs *jobs)
{
    size_t n = 0;
    for (size_t j = 0; j < jobs->n; j++)
        n += ((size_t)dn_matrix_rows(jobs->job[j].m) + DN_CHUNK_ROWS - 1) / DN_CHUNK_ROWS;
    load->task = dn_alloc0(n, sizeof *load->task);
    for (size_t j = 0; j < jobs->n; j++) {
        const struct dn_weights_job *job = &jobs->job[j];
        uint32_t n_rows = dn_matrix_rows(job->m);
        size_t values = (size_t)DN_CHUNK_ROWS * job->m->n_in;
        if (job->transposed)
            values += (size_t)job->part[0].from.n_in * job->m->n_in;
        load->scratch_bytes =
            values * sizeof(float) > load->scratch_bytes ? values * sizeof(float) : load->scratch_bytes;
        for (uint32_t row = 0; row < n_rows; row += DN_CHUNK_ROWS) {
            uint32_t rows = n_rows - row < DN_CHUNK_ROWS ? n_rows - row : DN_CHUNK_ROWS;
            load->task[load->n_tasks++] = (struct task){(uint32_t)j, row, rows};
        }
    }
}

int dn_weights_pack(struct dn_weights *w, const struct dn_weights_jobs *jobs, const struct dn_weights_conf *conf,
                    struct dn_err *err)
{
    struct load load = {.device = w->device,
                        .jobs = jobs,
                        .conf = conf,
                        .total_bytes = jobs->file_bytes,
                        .bad_task = SIZE_MAX,
                        .no_files = w->model->synthetic != NULL};
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    unsigned n_threads = conf->n_threads ? conf->n_threads : cores > 0 ? (unsigned)cores : 1;
    pthread_t thread[MAX_THREADS];
    unsigned n_started = 0;
    for (int q = 0; q < 256; q++)
        load.e4m3[q] = e4m3_value((uint8_t)q);
    list_tasks(&load, jobs);
    /* A thread that can't be had is no failure: the caller works through whatever is left. */
    while (n_started + 1 < n_threads && n_started < MAX_THREADS &&
           pthread_create(&thread[n_started], NULL, work_thread, &load) == 0)
        n_started++;
    work(&load, true);
    for (unsigned i = 0; i < n_started; i++)
        pthread_join(thread[i], NULL);
    int code = atomic_load(&load.code), named = 0;
    size_t bad = atomic_load(&load.bad_task);
    if (bad != SIZE_MAX)
        named = name_bad(&load, &load.task[bad], w->model, err);
    free(load.task);
    if (named != 0)
        return named;
    if (code != 0)
        return dn_err_set(err, (enum dn_code) - code, "%s: packing the weights failed", w->model->path);
    if (conf->progress != NULL)
        conf->progress(conf->progress_ctx, load.total_bytes, load.total_bytes);
    return 0;
}
