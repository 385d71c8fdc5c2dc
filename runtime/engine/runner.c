#include "engine/runner.h"

#include "base/buf.h"

#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum {
    DEFAULT_PAGE_TOKENS = 16,
    MIN_SLAB_BYTES = 1 << 20,
    MAX_SLAB_BYTES = 16 << 20,
    MAX_PAGE_TOKENS = 4096,
    ROPE_CHUNK = 1024
};

/* Rows times values times bytes; returns false on overflow. Adds to *sum. */
static bool add_bytes(uint64_t rows, uint64_t values, uint64_t bytes, uint64_t *sum)
{
    uint64_t n;
    return !__builtin_mul_overflow(rows, values, &n) && !__builtin_mul_overflow(n, bytes, &n) && n <= SIZE_MAX &&
           !__builtin_add_overflow(*sum, n, sum);
}

/* The buffers of a step, one line each, for the sum, the allocation and the release. Those of a family have no values
 * in the others. Rows: of each token; of each token or row of logits, whichever are more; of each row of logits; of
 * each sequence (absorbed steps have one token of each). */
enum rows { BY_TOKEN, BY_TOKEN_OR_ROW, BY_ROW, BY_SEQUENCE };
#define BUFFER(member, is_act, rows)                                                                                   \
    {                                                                                                                  \
        offsetof(struct dn_runner, member), is_act, rows                                                               \
    }
static const struct {
    size_t member;
    bool is_act; /* else of 4 bytes a value */
    enum rows rows;
} BUFFERS[] = {
    BUFFER(x, false, BY_TOKEN),         BUFFER(normed, true, BY_TOKEN_OR_ROW),
    BUFFER(qkv, true, BY_TOKEN),        BUFFER(heads, true, BY_TOKEN),
    BUFFER(gate_up, true, BY_TOKEN),    BUFFER(ff, true, BY_TOKEN),
    BUFFER(delta, true, BY_TOKEN),      BUFFER(logits, false, BY_ROW),
    BUFFER(kv_a, true, BY_TOKEN),       BUFFER(q_a, true, BY_TOKEN),
    BUFFER(q, true, BY_TOKEN),          BUFFER(q_latent, true, BY_SEQUENCE),
    BUFFER(latents, true, BY_SEQUENCE), BUFFER(router, false, BY_TOKEN),
    BUFFER(expert, false, BY_TOKEN),    BUFFER(expert_weight, false, BY_TOKEN),
};
enum { N_BUFFERS = sizeof BUFFERS / sizeof *BUFFERS };

/* Values a row of each buffer, in the order above. */
static void buffer_values(const struct dn_hyper *h, uint64_t values[N_BUFFERS])
{
    bool mla = h->latent_dim > 0;
    uint64_t q = (uint64_t)h->n_heads * h->head_dim, kv = (uint64_t)h->n_kv_heads * h->head_dim;
    uint64_t ff = h->n_experts > 0 && h->shared_ff > h->ff_dim ? h->shared_ff : h->ff_dim;
    uint64_t latent = (uint64_t)h->latent_dim + h->rope_dim;
    const uint64_t all[N_BUFFERS] = {h->dim,
                                     h->dim,
                                     mla ? 0 : q + 2 * kv,
                                     mla ? (uint64_t)h->n_heads * h->v_dim : q,
                                     2 * ff,
                                     ff,
                                     h->dim,
                                     h->n_vocab,
                                     mla ? h->q_lora_dim + latent : 0,
                                     h->q_lora_dim,
                                     mla ? q : 0,
                                     mla ? h->n_heads * latent : 0,
                                     (uint64_t)h->n_heads * h->latent_dim,
                                     h->n_experts,
                                     h->top_experts,
                                     h->top_experts};
    memcpy(values, all, sizeof all);
}

static uint64_t buffer_rows(const struct dn_step_limits *l, int i)
{
    switch (BUFFERS[i].rows) {
    case BY_ROW:
        return l->rows;
    case BY_SEQUENCE:
        return l->seqs < l->tokens ? l->seqs : l->tokens;
    case BY_TOKEN_OR_ROW:
        return l->tokens > l->rows ? l->tokens : l->rows;
    default:
        return l->tokens;
    }
}

int dn_runner_sizes(const struct dn_model *m, size_t act_bytes, const struct dn_step_limits *limits,
                    uint32_t context_tokens, uint64_t *activation_bytes, uint64_t *rope_bytes, struct dn_err *err)
{
    uint64_t sum = 0, rope = 0;
    uint64_t values[N_BUFFERS];
    bool ok = add_bytes(context_tokens, m->hyper.rotary_dim, sizeof(float), &rope);
    buffer_values(&m->hyper, values);
    for (int i = 0; i < N_BUFFERS; i++)
        ok = ok && add_bytes(buffer_rows(limits, i), values[i], BUFFERS[i].is_act ? act_bytes : sizeof(float), &sum);
    if (!ok)
        return dn_err_set(err, DN_NO_MEMORY,
                          "a step of %" PRIu32 " tokens and %" PRIu32 " rows of logits overflows memory",
                          limits->tokens, limits->rows);
    *activation_bytes = sum;
    *rope_bytes = rope;
    return 0;
}

static int take(struct dn_runner *r, uint64_t bytes, void *out, const char *what, struct dn_err *err)
{
    void *p = bytes <= SIZE_MAX ? r->device->ops->alloc(r->device, (size_t)bytes) : NULL;
    if (p == NULL)
        return dn_err_set(err, DN_NO_MEMORY, "%s: %" PRIu64 " bytes, which the device does not have", what, bytes);
    memcpy(out, &p, sizeof p);
    return 0;
}

/* cos and sin of every position and frequency. The angle is a product of floats, as in the references. Some positions
 * at a time: a context of a million tokens makes a large table, of which the host need not hold all. */
static int fill_rope(struct dn_runner *r, struct dn_err *err)
{
    const struct dn_model *m = r->weights->model;
    size_t half = m->hyper.rotary_dim / 2, row = 2 * half;
    int code = take(r, r->rope_bytes, &r->rope, "the table of rotary angles", err);
    if (code != 0)
        return code;
    double *inv_freq = dn_alloc0(half, sizeof *inv_freq), magnitude = dn_hyper_rope_magnitude(&m->hyper);
    dn_model_rope_freqs(m, inv_freq);
    float *host = dn_alloc0(ROPE_CHUNK, row * sizeof *host);
    for (uint32_t first = 0; first < r->conf.context_tokens; first += ROPE_CHUNK) {
        uint32_t n = r->conf.context_tokens - first < ROPE_CHUNK ? r->conf.context_tokens - first : ROPE_CHUNK;
        for (uint32_t k = 0; k < n; k++) {
            for (size_t i = 0; i < half; i++) {
                float angle = (float)(first + k) * (float)inv_freq[i];
                host[k * row + 2 * i] = (float)(magnitude * cos((double)angle));
                host[k * row + 2 * i + 1] = (float)(magnitude * sin((double)angle));
            }
        }
        r->device->ops->upload(r->device, r->rope + first * row, host, n * row * sizeof *host);
    }
    free(host);
    free(inv_freq);
    return 0;
}

/* Large slabs leave little of the smaller pages' rest, small ones let memory move between formats in small steps. */
static uint64_t choose_slab(uint64_t arena_bytes)
{
    uint64_t part = arena_bytes / 64;
    return part < MIN_SLAB_BYTES ? MIN_SLAB_BYTES : part > MAX_SLAB_BYTES ? MAX_SLAB_BYTES : part;
}

static int take_arena(struct dn_runner *r, struct dn_err *err)
{
    const struct dn_hyper *h = &r->weights->model->hyper;
    if (r->conf.page_tokens > MAX_PAGE_TOKENS)
        return dn_err_set(err, DN_CONFIG, "pages of %" PRIu32 " tokens, expected at most %d", r->conf.page_tokens,
                          MAX_PAGE_TOKENS);
    uint32_t only = r->device->ops->page_tokens;
    if (only != 0 && r->conf.page_tokens != only)
        return dn_err_set(err, DN_CONFIG, "pages of %" PRIu32 " tokens, but backend \"%s\" has pages of %" PRIu32,
                          r->conf.page_tokens, r->device->ops->name, only);
    int code = h->latent_dim > 0 ? dn_kv_layout_init_mla(&r->layout, h->n_layers, h->latent_dim, h->rope_dim,
                                                         r->conf.page_tokens, r->conf.slab_bytes)
                                 : dn_kv_layout_init(&r->layout, h->n_layers, h->n_kv_heads, h->head_dim,
                                                     r->conf.page_tokens, r->conf.slab_bytes);
    if (code != 0)
        return dn_err_set(err, DN_CONFIG,
                          "pages of %" PRIu32 " tokens and slabs of %" PRIu64 " bytes do not fit this model",
                          r->conf.page_tokens, r->conf.slab_bytes);
    uint64_t n_slabs = r->conf.arena_bytes / r->layout.slab_bytes, n_pages;
    if (n_slabs == 0)
        return dn_err_set(err, DN_CONFIG, "%" PRIu64 " bytes for the KV cache, expected at least one slab of %" PRIu64,
                          r->conf.arena_bytes, r->layout.slab_bytes);
    if (__builtin_mul_overflow(n_slabs, (uint64_t)r->layout.slab_pages, &n_pages) || n_pages > INT32_MAX)
        return dn_err_set(err, DN_CONFIG,
                          "%" PRIu64 " bytes for the KV cache make more than 2147483647 pages: raise page_tokens",
                          r->conf.arena_bytes);
    r->n_slabs = (uint32_t)n_slabs;
    r->n_pages = (uint32_t)n_pages;
    code = take(r, n_slabs * r->layout.slab_bytes, &r->arena, "the KV cache", err);
    return code == 0 ? take(r, n_pages * sizeof *r->tags, &r->tags, "the table of page tags", err) : code;
}

static int take_buffers(struct dn_runner *r, struct dn_err *err)
{
    uint64_t values[N_BUFFERS];
    buffer_values(&r->weights->model->hyper, values);
    for (int i = 0; i < N_BUFFERS; i++) {
        uint64_t bytes = buffer_rows(&r->conf.limits, i) * values[i] *
                         (BUFFERS[i].is_act ? r->device->ops->act_bytes : sizeof(float));
        int code = bytes == 0 ? 0 : take(r, bytes, (char *)r + BUFFERS[i].member, "the activations of a step", err);
        if (code != 0)
            return code;
    }
    return 0;
}

/* The operations of a step. The integrity setting alone makes lists differ: without a check there is no operation. */
enum { LIST_PLAIN = 1, LIST_CHECKED };

static void call_list(struct dn_runner *r, uint32_t list)
{
    const struct dn_kernels *ops = r->device->ops;
    if (list == LIST_CHECKED)
        ops->check_tags(r->device, &(struct dn_check_tags){
                                       .table = r->tags, .n_pages = r->n_pages, .page_tokens = r->layout.page_tokens});
    r->forward(r);
    ops->step_end(r->device);
}

static int prepare(struct dn_runner *r, struct dn_err *err)
{
    int code = 0;
    for (uint32_t list = LIST_PLAIN; list <= LIST_CHECKED && code == 0; list++)
        while ((code = r->device->ops->prepare(r->device, list, err)) > 0)
            call_list(r, list);
    return code;
}

static int open_parts(struct dn_runner *r, struct dn_err *err)
{
    const struct dn_model *m = r->weights->model;
    const struct dn_step_limits *l = &r->conf.limits;
    if (l->tokens == 0 || l->seqs == 0 || l->rows == 0)
        return dn_err_set(err, DN_CONFIG,
                          "a step of %" PRIu32 " tokens, %" PRIu32 " sequences and %" PRIu32
                          " rows, expected at least 1",
                          l->tokens, l->seqs, l->rows);
    int code = dn_runner_sizes(m, r->device->ops->act_bytes, l, r->conf.context_tokens, &r->activation_bytes,
                               &r->rope_bytes, err);
    if (code == 0)
        code = take_buffers(r, err);
    if (code == 0)
        code = fill_rope(r, err);
    if (code == 0)
        code = take_arena(r, err);
    if (code == 0)
        code = prepare(r, err);
    return code;
}

int dn_runner_open(struct dn_device *device, const struct dn_weights *weights, const struct dn_runner_conf *conf,
                   struct dn_runner **out, struct dn_err *err)
{
    const struct dn_hyper *h = &weights->model->hyper;
    struct dn_runner *r = dn_alloc0(1, sizeof *r);
    *r = (struct dn_runner){.device = device, .weights = weights, .conf = *conf};
    r->forward = h->arch == DN_ARCH_KIMI ? dn_forward_kimi : dn_forward_llama;
    if (r->conf.context_tokens == 0 || r->conf.context_tokens > h->context_tokens)
        r->conf.context_tokens = h->context_tokens;
    if (r->conf.page_tokens == 0)
        r->conf.page_tokens = device->ops->page_tokens ? device->ops->page_tokens : DEFAULT_PAGE_TOKENS;
    if (r->conf.slab_bytes == 0)
        r->conf.slab_bytes = choose_slab(r->conf.arena_bytes);
    if (r->conf.n_valid == 0 || r->conf.n_valid > h->n_vocab)
        r->conf.n_valid = h->n_vocab;
    int code = open_parts(r, err);
    if (code != 0) {
        dn_runner_close(r);
        return code;
    }
    *out = r;
    return 0;
}

void dn_runner_close(struct dn_runner *r)
{
    if (r == NULL)
        return;
    struct dn_device *d = r->device;
    void *extra[] = {r->rope, r->arena, r->tags};
    for (int i = 0; i < N_BUFFERS + 3; i++) {
        void *p;
        if (i < N_BUFFERS)
            memcpy(&p, (char *)r + BUFFERS[i].member, sizeof p);
        else
            p = extra[i - N_BUFFERS];
        if (p != NULL)
            d->ops->free(d, p);
    }
    free(r);
}

struct dn_step *dn_runner_arrays(struct dn_runner *r)
{
    return r->device->ops->step_arrays(r->device);
}

bool dn_runner_checks(const struct dn_step *s)
{
    for (uint32_t i = 0; i < s->n_seqs; i++)
        if (s->check[i])
            return true;
    return false;
}

void dn_runner_start(struct dn_runner *r)
{
    const struct dn_kernels *ops = r->device->ops;
    const struct dn_step *s = ops->step_arrays(r->device);
    DN_BUG_ON(s->n_tokens == 0 || s->n_tokens > r->conf.limits.tokens || s->n_seqs > r->conf.limits.seqs ||
              s->n_rows > r->conf.limits.rows);
    uint32_t list = dn_runner_checks(s) ? LIST_CHECKED : LIST_PLAIN;
    if (ops->step_begin(r->device, list))
        call_list(r, list);
    else
        ops->step_end(r->device);
}

int dn_runner_wait(struct dn_runner *r, struct dn_err *err)
{
    return r->device->ops->step_wait(r->device, err);
}

int dn_runner_step(struct dn_runner *r, struct dn_err *err)
{
    dn_runner_start(r);
    return dn_runner_wait(r, err);
}

void dn_runner_set_tags(struct dn_runner *r, uint32_t first, uint32_t n, const uint64_t *tag)
{
    DN_BUG_ON(first > r->n_pages || n > r->n_pages - first);
    if (n > 0)
        r->device->ops->upload(r->device, r->tags + first, tag, n * sizeof *tag);
}

void dn_runner_logits(struct dn_runner *r, uint32_t first, uint32_t n, float *out)
{
    size_t row = r->weights->model->hyper.n_vocab;
    DN_BUG_ON(first > r->conf.limits.rows || n > r->conf.limits.rows - first);
    r->device->ops->download(r->device, out, r->logits + first * row, n * row * sizeof(float));
}
