#include "engine/weights.h"

#include "base/buf.h"
#include "base/memory.h"
#include "engine/runner.h"
#include "engine/weights_impl.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

/* How a matrix's format is chosen. */
enum kind { KIND_LINEAR, KIND_VOCAB, KIND_BF16 };

struct list {
    struct dn_weights *w;
    const struct dn_kernels *ops;
    struct dn_weights_jobs jobs;
    /* Pairs of file type and format that lose precision, counted for the notes. */
    uint32_t n_lossy[DN_TT_COUNT][DN_W_FORMATS];
    uint32_t n_odd;     /* matrices whose width no integer format takes */
    uint32_t n_apart;   /* FP8 matrices whose blocks do not line up */
    uint32_t n_group;   /* grouped matrices whose rows the fp8 format does not take */
    uint32_t n_derived; /* projections from the latent that are bf16, whatever was asked for */
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
    case DN_TT_I32: /* words of nibbles */
        return DN_W_INT4;
    case DN_TT_Q8_0:
    case DN_TT_Q6_K:
        return DN_W_INT8;
    case DN_TT_F8_E4M3:
        return DN_W_FP8;
    default:
        return DN_W_BF16;
    }
}

static bool is_exact(const struct dn_matrix *m, enum dn_tensor_type t, bool lined_up)
{
    switch (m->format) {
    case DN_W_INT4:
        return t == DN_TT_Q4_1 || t == DN_TT_Q4_0 || (t == DN_TT_I32 && m->scale_is_bf16);
    case DN_W_INT8:
        return t == DN_TT_Q8_0;
    case DN_W_FP8:
        return t == DN_TT_F8_E4M3 && lined_up;
    default:
        return t == DN_TT_BF16;
    }
}

/* The format of a matrix whose parts have the files' own types: the narrowest that holds all of them. */
static enum dn_weight_format widest(const struct dn_weights_job *job)
{
    enum dn_weight_format f = nearest(job->part[0].from.values->type);
    for (uint32_t i = 1; i < job->n_parts; i++) {
        enum dn_weight_format g = nearest(job->part[i].from.values->type);
        bool integers = (f == DN_W_INT4 || f == DN_W_INT8) && (g == DN_W_INT4 || g == DN_W_INT8);
        if (f != g)
            f = integers ? DN_W_INT8 : DN_W_BF16;
    }
    return f;
}

/* Whether every part begins with a block of its own and of the matrix. */
static bool lines_up(const struct dn_weights_job *job)
{
    for (uint32_t i = 0; i < job->n_parts; i++)
        if (job->part[i].at_row % DN_CHUNK_ROWS != 0 || job->part[i].from_row % DN_CHUNK_ROWS != 0)
            return false;
    return true;
}

static bool all_of(const struct dn_weights_job *job, enum dn_tensor_type t)
{
    for (uint32_t i = 0; i < job->n_parts; i++)
        if (job->part[i].from.values->type != t)
            return false;
    return true;
}

static void choose_format(struct list *l, struct dn_weights_job *job, enum kind kind)
{
    struct dn_matrix *m = job->m;
    int asked = l->w->format;
    m->format = asked == DN_WEIGHTS_AUTO ? widest(job) : (enum dn_weight_format)asked;
    if (kind == KIND_VOCAB && asked == DN_W_INT4)
        m->format = DN_W_INT8;
    bool lined_up = m->format == DN_W_FP8 && lines_up(job);
    if (kind == KIND_BF16) {
        l->n_derived += m->format != DN_W_BF16;
        m->format = DN_W_BF16;
    }
    if (asked == DN_WEIGHTS_AUTO && m->format == DN_W_FP8 && !lined_up) {
        m->format = DN_W_BF16;
        l->n_apart++;
    }
    if ((m->format == DN_W_INT4 || m->format == DN_W_INT8) && m->n_in % DN_INT_GROUP != 0) {
        m->format = DN_W_BF16;
        l->n_odd++;
    }
    if (m->format == DN_W_FP8 && m->n_groups > 1 && m->n_out % DN_CHUNK_ROWS != 0) {
        m->format = DN_W_BF16;
        l->n_group++;
    }
    bool packed = all_of(job, DN_TT_I32);
    m->symmetric = m->format == DN_W_INT4 && (packed || all_of(job, DN_TT_Q4_0));
    m->scale_is_bf16 = m->format == DN_W_INT4 && packed;
    m->bytes = l->ops->matrix_bytes(m);
    if (m->bytes == 0 && m->format == DN_W_INT4 && !packed) {
        /* A backend may know experts only as checkpoints have them: our own rounding then goes without offsets, too. */
        m->symmetric = m->scale_is_bf16 = true;
        m->bytes = l->ops->matrix_bytes(m);
    }
    for (uint32_t i = 0; i < job->n_parts; i++) {
        const struct dn_weights_part *p = &job->part[i];
        enum dn_tensor_type t = p->from.values->type;
        /* What is bf16 always counts once a tensor, though it may be read for three matrices, and only where it is not
         * the rule that rounds. */
        bool counts = kind != KIND_BF16 || (nearest(t) == DN_W_BF16 && !job->transposed && p->from_row == 0);
        if (counts && !is_exact(m, t, lined_up))
            l->n_lossy[t][m->format]++;
    }
}

/* ---- The list of matrices ---------------------------------------------------------------------------------------- */

/* Takes the next job; its parts are the caller's to fill. */
static struct dn_weights_job *new_job(struct list *l, struct dn_matrix *m, size_t n_parts)
{
    struct dn_weights_jobs *jobs = &l->jobs;
    if (jobs->n % 64 == 0)
        jobs->job = dn_realloc(jobs->job, jobs->n + 64, sizeof *jobs->job);
    struct dn_weights_job *job = &jobs->job[jobs->n++];
    *job = (struct dn_weights_job){.m = m, .part = dn_alloc0(n_parts, sizeof *job->part)};
    return job;
}

static void add_part(struct dn_weights_job *job, struct dn_linear from, uint64_t from_row, uint64_t n_rows)
{
    const struct dn_weights_part *last = job->n_parts ? &job->part[job->n_parts - 1] : NULL;
    job->part[job->n_parts++] = (struct dn_weights_part){.from = from,
                                                         .from_row = from_row,
                                                         .at_row = last ? last->at_row + last->n_rows : 0,
                                                         .n_rows = (uint32_t)n_rows};
}

/* Sizes, format and bytes of the last job's matrix; n_out of one group. */
static int finish_job(struct list *l, uint64_t n_out, uint64_t n_in, uint64_t n_groups, enum kind kind,
                      struct dn_err *err)
{
    struct dn_weights_job *job = &l->jobs.job[l->jobs.n - 1];
    struct dn_matrix *m = job->m;
    const char *name = job->part[0].from.values->name;
    if (n_out * n_groups > UINT32_MAX || n_in > UINT32_MAX)
        return dn_err_set(err, DN_MODEL_FILE, "tensor \"%s\": %" PRIu64 " rows in its fused matrix are too many", name,
                          n_out * n_groups);
    *m = (struct dn_matrix){.n_out = (uint32_t)n_out, .n_in = (uint32_t)n_in, .n_groups = (uint32_t)n_groups};
    choose_format(l, job, kind);
    if (m->bytes == 0 && n_groups > 1)
        return dn_err_set(err, DN_MODEL_FILE,
                          "tensor \"%s\": %" PRIu32 " matrices of %" PRIu32 " x %" PRIu32
                          " do not fit backend \"%s\" as %s",
                          name, m->n_groups, m->n_out, m->n_in, l->ops->name, dn_weight_format_name(m->format));
    if (m->bytes == 0)
        return dn_err_set(err, DN_MODEL_FILE,
                          "tensor \"%s\": a matrix of %" PRIu32 " x %" PRIu32 " does not fit backend \"%s\" as %s",
                          name, m->n_out, m->n_in, l->ops->name, dn_weight_format_name(m->format));
    l->w->bytes += m->bytes;
    l->w->format_bytes[m->format] += m->bytes;
    for (uint32_t i = 0; i < job->n_parts; i++) {
        const struct dn_linear *from = &job->part[i].from;
        uint64_t rows = job->transposed ? n_in : job->part[i].n_rows;
        l->jobs.file_bytes += rows * (from->values->bytes / from->n_out);
    }
    return 0;
}

/* One matrix of up to three tensors of a layer. */
static int add_roles(struct list *l, struct dn_matrix *m, uint32_t layer, const enum dn_tensor_role *role, int n,
                     enum kind kind, struct dn_err *err)
{
    struct dn_weights_job *job = new_job(l, m, (size_t)n);
    uint64_t n_out = 0;
    for (int i = 0; i < n; i++) {
        struct dn_linear from = dn_model_linear(l->w->model, role[i], layer);
        add_part(job, from, 0, from.n_out);
        n_out += from.n_out;
    }
    return finish_job(l, n_out, job->part[0].from.n_in, 1, kind, err);
}

#define ROLES(...) (const enum dn_tensor_role[]){__VA_ARGS__}, sizeof((int[]){__VA_ARGS__}) / sizeof(int)

static int add_dense_ffn(struct list *l, uint32_t layer, struct dn_err *err)
{
    struct dn_layer_weights *lw = &l->w->layer[layer];
    int code = add_roles(l, &lw->gate_up, layer, ROLES(DN_T_GATE, DN_T_UP), KIND_LINEAR, err);
    return code == 0 ? add_roles(l, &lw->down, layer, ROLES(DN_T_DOWN), KIND_LINEAR, err) : code;
}

/* Rows of kv_b are head by head, in a head keys | values; each of the three matrices takes its own. */
static int add_latent(struct list *l, struct dn_matrix *m, uint32_t layer, bool values, bool transposed,
                      struct dn_err *err)
{
    const struct dn_hyper *h = &l->w->model->hyper;
    struct dn_linear from = dn_model_linear(l->w->model, DN_T_KV_B, layer);
    uint32_t first = values ? h->nope_dim : 0, n = values ? h->v_dim : h->nope_dim, n_head = h->nope_dim + h->v_dim;
    struct dn_weights_job *job = new_job(l, m, h->n_heads);
    job->transposed = transposed;
    for (uint32_t i = 0; i < h->n_heads; i++)
        add_part(job, from, (uint64_t)i * n_head + first, transposed ? h->latent_dim : n);
    return finish_job(l, transposed ? h->latent_dim : n, transposed ? n : h->latent_dim, h->n_heads, KIND_BF16, err);
}

static int add_mla(struct list *l, uint32_t layer, struct dn_err *err)
{
    struct dn_layer_weights *lw = &l->w->layer[layer];
    int code = l->w->model->hyper.q_lora_dim > 0
                   ? add_roles(l, &lw->kv_a, layer, ROLES(DN_T_Q_A, DN_T_KV_A), KIND_LINEAR, err)
                   : add_roles(l, &lw->kv_a, layer, ROLES(DN_T_KV_A), KIND_LINEAR, err);
    if (code == 0)
        code = l->w->model->hyper.q_lora_dim > 0 ? add_roles(l, &lw->q_b, layer, ROLES(DN_T_Q_B), KIND_LINEAR, err)
                                                 : add_roles(l, &lw->q_b, layer, ROLES(DN_T_Q), KIND_LINEAR, err);
    if (code == 0)
        code = add_latent(l, &lw->w_kt, layer, false, true, err);
    if (code == 0)
        code = add_latent(l, &lw->w_k, layer, false, false, err);
    if (code == 0)
        code = add_latent(l, &lw->w_v, layer, true, false, err);
    return code;
}

static int add_experts(struct list *l, uint32_t layer, struct dn_err *err)
{
    const struct dn_model *m = l->w->model;
    const struct dn_hyper *h = &m->hyper;
    struct dn_layer_weights *lw = &l->w->layer[layer];
    int code = add_roles(l, &lw->router, layer, ROLES(DN_T_ROUTER), KIND_BF16, err);
    if (code != 0)
        return code;
    struct dn_weights_job *job = new_job(l, &lw->expert_gate_up, 2 * (size_t)h->n_experts);
    for (uint32_t e = 0; e < h->n_experts; e++) {
        add_part(job, dn_model_expert(m, layer, e, DN_EXPERT_GATE), 0, h->expert_ff);
        add_part(job, dn_model_expert(m, layer, e, DN_EXPERT_UP), 0, h->expert_ff);
    }
    code = finish_job(l, 2 * (uint64_t)h->expert_ff, h->dim, h->n_experts, KIND_LINEAR, err);
    if (code != 0)
        return code;
    job = new_job(l, &lw->expert_down, h->n_experts);
    for (uint32_t e = 0; e < h->n_experts; e++)
        add_part(job, dn_model_expert(m, layer, e, DN_EXPERT_DOWN), 0, h->dim);
    code = finish_job(l, h->dim, h->expert_ff, h->n_experts, KIND_LINEAR, err);
    if (code == 0 && h->shared_ff > 0)
        code = add_roles(l, &lw->shared_gate_up, layer, ROLES(DN_T_SHARED_GATE, DN_T_SHARED_UP), KIND_LINEAR, err);
    if (code == 0 && h->shared_ff > 0)
        code = add_roles(l, &lw->shared_down, layer, ROLES(DN_T_SHARED_DOWN), KIND_LINEAR, err);
    return code;
}

static int add_layer(struct list *l, uint32_t layer, struct dn_err *err)
{
    const struct dn_hyper *h = &l->w->model->hyper;
    struct dn_layer_weights *lw = &l->w->layer[layer];
    int code = h->latent_dim > 0 ? add_mla(l, layer, err)
                                 : add_roles(l, &lw->qkv, layer, ROLES(DN_T_Q, DN_T_K, DN_T_V), KIND_LINEAR, err);
    if (code == 0)
        code = add_roles(l, &lw->o, layer, ROLES(DN_T_O), KIND_LINEAR, err);
    if (code == 0)
        code = dn_hyper_has_experts(h, layer) ? add_experts(l, layer, err) : add_dense_ffn(l, layer, err);
    return code;
}

static void add_note(struct dn_weights *w, const char *text)
{
    if (w->n_notes < DN_WEIGHTS_MAX_NOTES)
        w->note[w->n_notes++] = dn_strdup(text);
}

static const char *file_type_name(int t)
{
    return t == DN_TT_I32 ? "INT4" : dn_tensor_type_info((enum dn_tensor_type)t)->name;
}

static void note_lossy(struct list *l, int t, int f, struct dn_buf *b)
{
    uint32_t n = l->n_lossy[t][f];
    bool rescaled = t == DN_TT_Q4_K && f == DN_W_INT4;
    dn_buf_printf(b, "%" PRIu32 " tensor%s of type %s: %s %s%s", n, n == 1 ? "" : "s", file_type_name(t),
                  rescaled ? "scales rounded to f16 for" : "rounded to",
                  dn_weight_format_name((enum dn_weight_format)f), rescaled ? ", values exact" : "");
}

static void write_notes(struct list *l)
{
    const struct {
        uint32_t n;
        const char *why;
    } kept[] = {{l->n_odd, "a width that is not a multiple of 32 has no integer format"},
                {l->n_apart, "the FP8 blocks of their parts do not line up"},
                {l->n_group, "experts whose rows are not a multiple of 128 have no fp8 format"},
                {l->n_derived, "routers and projections from the latent are bf16 always"}};
    struct dn_buf b = {0};
    for (int t = 0; t < DN_TT_COUNT; t++) {
        for (int f = 0; f < DN_W_FORMATS; f++) {
            dn_buf_clear(&b);
            if (l->n_lossy[t][f] > 0) {
                note_lossy(l, t, f, &b);
                add_note(l->w, dn_buf_str(&b));
            }
        }
    }
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++) {
        dn_buf_clear(&b);
        dn_buf_printf(&b, "%" PRIu32 " matri%s kept in bf16: %s", kept[i].n, kept[i].n == 1 ? "x" : "ces", kept[i].why);
        if (kept[i].n > 0)
            add_note(l->w, dn_buf_str(&b));
    }
    dn_buf_release(&b);
}

static uint64_t vector_bytes(const struct dn_hyper *h)
{
    uint64_t layer = 2 * (uint64_t)h->dim + (h->qk_norm ? 2 * (uint64_t)h->head_dim : 0) +
                     (h->qkv_bias ? (h->n_heads + 2 * (uint64_t)h->n_kv_heads) * h->head_dim : 0) + h->q_lora_dim +
                     h->latent_dim;
    uint64_t n = layer * h->n_layers + h->dim;
    for (uint32_t l = 0; l < h->n_layers; l++)
        n += dn_hyper_has_experts(h, l) ? h->n_experts : 0;
    return sizeof(float) * n;
}

/* Sizes and formats of everything; nothing is allocated on the device yet. */
static int list_jobs(struct list *l, struct dn_err *err)
{
    struct dn_weights *w = l->w;
    const struct dn_hyper *h = &w->model->hyper;
    w->layer = dn_alloc0(h->n_layers, sizeof *w->layer);
    int code = add_roles(l, &w->embed, 0, ROLES(DN_T_EMBED), KIND_VOCAB, err);
    w->head = &w->embed;
    if (code == 0 && !h->tied_head) {
        code = add_roles(l, &w->head_matrix, 0, ROLES(DN_T_HEAD), KIND_VOCAB, err);
        w->head = &w->head_matrix;
    }
    for (uint32_t layer = 0; layer < h->n_layers && code == 0; layer++)
        code = add_layer(l, layer, err);
    w->bytes += vector_bytes(h);
    if (code == 0)
        write_notes(l);
    return code;
}

static void release_list(struct list *l)
{
    for (size_t i = 0; i < l->jobs.n; i++)
        free(l->jobs.job[i].part);
    free(l->jobs.job);
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
    for (int i = 0; i < n_parts; at += (size_t)part[i]->dim[0], i++) {
        dn_tensor_row_f32(part[i]->type, part[i]->data, (size_t)part[i]->dim[0], host + at);
        int code = dn_weights_check_vector(w->model, part[i], host + at, err);
        if (code != 0) {
            free(host);
            return code;
        }
    }
    *out = w->device->ops->alloc(w->device, n * sizeof *host);
    if (*out != NULL)
        w->device->ops->upload(w->device, *out, host, n * sizeof *host);
    free(host);
    return *out != NULL ? 0 : dn_err_set(err, DN_NO_MEMORY, "no memory for \"%s\" on the device", part[0]->name);
}

/* GGUF's divisors of the rotary frequencies, which the runner makes its table with. */
static int check_rope_divisors(const struct dn_model *m, struct dn_err *err)
{
    const struct dn_tensor *t = dn_model_tensor(m, DN_T_ROPE_FREQS, 0);
    if (t == NULL)
        return 0;
    float *value = dn_alloc0((size_t)t->dim[0], sizeof *value);
    dn_tensor_row_f32(t->type, t->data, (size_t)t->dim[0], value);
    int code = dn_weights_check_vector(m, t, value, err);
    for (uint64_t i = 0; i < t->dim[0] && code == 0; i++)
        if (value[i] <= 0)
            code =
                dn_err_set(err, DN_MODEL_FILE, "%s: tensor \"%.200s\": value [%" PRIu64 "] is %g, expected more than 0",
                           m->path, t->name, i, (double)value[i]);
    free(value);
    return code;
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
    if (code == 0)
        code = upload_vector(w, DN_T_Q_A_NORM, l, &lw->q_a_norm, err);
    if (code == 0)
        code = upload_vector(w, DN_T_KV_A_NORM, l, &lw->kv_norm, err);
    if (code == 0)
        code = upload_vector(w, DN_T_ROUTER_BIAS, l, &lw->router_bias, err);
    const struct dn_tensor *bias[] = {dn_model_tensor(m, DN_T_Q_BIAS, l), dn_model_tensor(m, DN_T_K_BIAS, l),
                                      dn_model_tensor(m, DN_T_V_BIAS, l)};
    if (code == 0 && bias[0] != NULL)
        code = upload_vectors(w, bias, 3, &lw->qkv_bias, err);
    return code;
}

/* ---- Open and close ---------------------------------------------------------------------------------------------- */

/* Of the device that the weights go to. */
struct memory {
    uint64_t free_bytes, total_bytes; /* 0 total: unknown */
    uint64_t usable;                  /* free, and on the host the free swap space */
    bool is_gpu, is_limited;
    const char *whose;
};

static void free_host(struct dn_weights *w)
{
    for (size_t i = 0; i < w->n_notes; i++)
        free(w->note[i]);
    free(w->layer);
}

/* What the weights would take in another format; 0: the device does not take them so. */
static uint64_t bytes_as(const struct dn_weights *w, int format)
{
    struct dn_weights other = {.model = w->model, .format = format};
    struct list l = {.w = &other, .ops = w->device->ops};
    int code = list_jobs(&l, NULL);
    release_list(&l);
    free_host(&other);
    return code == 0 ? other.bytes : 0;
}

/* Says how much is missing and what would fit: the format of the most bits that does, another device. */
static int too_large(const struct dn_weights *w, const struct memory *have, struct dn_err *err)
{
    static const int format[] = {DN_W_FP8, DN_W_INT8, DN_W_INT4};
    const double gib = 1 << 30;
    uint64_t least = w->bytes, best = 0;
    const char *now = dn_weights_main_format(w), *best_name = "", *least_name = "";
    for (size_t i = 0; i < sizeof format / sizeof *format; i++) {
        const char *name = dn_weights_format_name(format[i]);
        uint64_t bytes = strcmp(name, now) == 0 ? 0 : bytes_as(w, format[i]);
        if (bytes > best && bytes <= have->usable) {
            best = bytes;
            best_name = name;
        }
        if (bytes > 0 && bytes < least) {
            least = bytes;
            least_name = name;
        }
    }
    struct dn_buf b = {0};
    dn_buf_printf(&b, "the weights need %.1f GiB as %s, and %s has %.1f of %.1f GiB free", (double)w->bytes / gib, now,
                  have->whose, (double)have->free_bytes / gib, (double)have->total_bytes / gib);
    if (best > 0)
        dn_buf_printf(&b, ": --weights %s would need %.1f GiB", best_name, (double)best / gib);
    else if (least < w->bytes)
        dn_buf_printf(&b, ", too little even for %s (%.1f GiB)", least_name, (double)least / gib);
    if (have->is_gpu)
        dn_buf_puts(&b, "; or take another GPU (--device cuda:N) or --device cpu");
    else if (have->is_limited)
        dn_buf_puts(&b, "; or raise the limit");
    int code = dn_err_set(err, DN_NO_MEMORY, "%s: %s", w->model->path, dn_buf_str(&b));
    dn_buf_release(&b);
    return code;
}

static struct memory memory_of(const struct dn_device *d)
{
    struct memory m = {.is_gpu = true, .whose = "the GPU"};
    d->ops->memory((struct dn_device *)d, &m.free_bytes, &m.total_bytes);
    m.usable = m.free_bytes;
    if (m.total_bytes > 0)
        return m;
    struct dn_memory host;
    dn_memory_read(&host);
    return (struct memory){.free_bytes = host.free_bytes,
                           .total_bytes = host.total_bytes,
                           .usable = host.free_bytes + host.swap_bytes,
                           .is_limited = host.is_limited,
                           .whose = host.is_limited ? "this container" : "this machine"};
}

static int load_all(struct dn_weights *w, const struct dn_weights_jobs *jobs, const struct dn_weights_conf *conf,
                    struct dn_err *err)
{
    struct dn_device *d = w->device;
    struct memory have = memory_of(d);
    /* Systems promise memory that they do not have, and end the process when it is used: minutes later, without a word.
     */
    if (have.total_bytes > 0 && w->bytes > have.usable)
        return too_large(w, &have, err);
    for (size_t i = 0; i < jobs->n; i++) {
        struct dn_matrix *m = jobs->job[i].m;
        m->data = d->ops->alloc(d, m->bytes);
        if (m->data == NULL)
            return too_large(w, &have, err);
    }
    int code = check_rope_divisors(w->model, err);
    if (code == 0)
        code = upload_vector(w, DN_T_FINAL_NORM, 0, &w->final_norm, err);
    for (uint32_t l = 0; l < w->model->hyper.n_layers && code == 0; l++)
        code = upload_layer(w, l, err);
    return code == 0 ? dn_weights_pack(w, jobs, conf, err) : code;
}

int dn_weights_open(struct dn_device *device, const struct dn_model *model, const struct dn_weights_conf *conf,
                    struct dn_weights **out, struct dn_err *err)
{
    struct dn_weights *w = dn_alloc0(1, sizeof *w);
    struct list list = {.w = w, .ops = device->ops};
    *w = (struct dn_weights){.model = model, .device = device, .format = conf->format};
    int code = list_jobs(&list, err);
    if (code == 0)
        code = load_all(w, &list.jobs, conf, err);
    release_list(&list);
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
        void *p[] = {lw->attn_norm,
                     lw->ffn_norm,
                     lw->qkv_bias,
                     lw->q_norm,
                     lw->k_norm,
                     lw->q_a_norm,
                     lw->kv_norm,
                     lw->router_bias,
                     lw->qkv.data,
                     lw->o.data,
                     lw->gate_up.data,
                     lw->down.data,
                     lw->kv_a.data,
                     lw->q_b.data,
                     lw->w_kt.data,
                     lw->w_k.data,
                     lw->w_v.data,
                     lw->router.data,
                     lw->expert_gate_up.data,
                     lw->expert_down.data,
                     lw->shared_gate_up.data,
                     lw->shared_down.data};
        for (size_t i = 0; i < sizeof p / sizeof *p; i++)
            if (p[i] != NULL)
                d->ops->free(d, p[i]);
    }
    void *p[] = {w->embed.data, w->head_matrix.data, w->final_norm};
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if (p[i] != NULL)
            d->ops->free(d, p[i]);
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
    struct list list = {.w = &w, .ops = ops};
    struct dn_plan plan = {0};
    int code = list_jobs(&list, err);
    if (code == 0)
        code = dn_runner_sizes(model, ops->act_bytes, limits, context_tokens, &plan.activation_bytes, &plan.rope_bytes,
                               err);
    plan.weight_bytes = w.bytes;
    memcpy(plan.weight_format_bytes, w.format_bytes, sizeof plan.weight_format_bytes);
    plan.kv_token_bytes[DN_KV_BF16] = dn_model_kv_bytes(model, false);
    plan.kv_token_bytes[DN_KV_FP8] = dn_model_kv_bytes(model, true);
    release_list(&list);
    free_host(&w);
    if (code == 0)
        *out = plan;
    return code;
}
