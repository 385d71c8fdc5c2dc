#include "kernels/cpu/device.h"

#include <string.h>

/* Un-absorbed attention. The cache is worked through in passes of up to PASS_ROWS latents of one or more sequences:
 * they are decoded, expanded to the keys and values of all heads by two matmuls, then each unit of work (some tokens of
 * a sequence and a head) takes them into its softmax. What is expanded at a time is a split of a sequence, counted from
 * position 0, and a matmul's row does not depend on the rows beside it: so a row's bits depend on nothing but the
 * sequence before it. */
enum { PASS_ROWS = DN_ATTN_SPLIT };

/* Some tokens of a sequence and a head, and where their softmax stands. */
struct item {
    uint32_t seq, token, n_tokens, head;
    size_t state; /* in floats */
};

/* A sequence's part of a pass: positions [begin, end) are rows [row, ...) of it. A pass never has two splits of one. */
struct piece {
    uint32_t seq, begin, end, row;
};

struct call {
    struct dn_cpu_device *d;
    const struct dn_mla_prefill *p;
    struct dn_attn_work work;
    size_t thread_floats, key_width, value_width;
    float *scratch;
    struct item *item; /* of a sequence: [item_start[seq], item_start[seq + 1]) */
    uint32_t *item_start;
    struct piece *piece;
    uint32_t n_pieces, n_rows;
    size_t *unit; /* [n_pieces + 1]: items of the pieces before */
    float *states, *latent, *key, *value;
};

static uint32_t tokens_of(const struct dn_step *s, uint32_t seq)
{
    return (uint32_t)(s->token_start[seq + 1] - s->token_start[seq]);
}

/* Latents of the pass as f32. */
static void decode(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    const struct dn_step *s = &c->d->step;
    const struct dn_kv_layout *l = c->p->layout;
    size_t dim = c->p->latent_dim;
    uint32_t i = 0;
    for (size_t row = begin; row < end; row++) {
        while (i + 1 < c->n_pieces && c->piece[i + 1].row <= row)
            i++;
        const struct piece *piece = c->piece + i;
        uint32_t position = piece->begin + (uint32_t)(row - piece->row);
        enum dn_kv_format f = (enum dn_kv_format)s->kv_format[piece->seq];
        uint32_t page = s->page[(uint32_t)s->page_start[piece->seq] + position / l->page_tokens];
        const uint8_t *layer = (const uint8_t *)c->p->arena + dn_kv_page_offset(l, f, page) +
                               (uint64_t)c->p->layer * l->format[f].layer_bytes;
        size_t token = position % l->page_tokens;
        float *out = c->latent + row * dim;
        if (f == DN_KV_FP8)
            c->d->row->decode_fp8(layer + token * dim, dim,
                                  ((const float *)(layer + l->format[f].k_scale_offset))[token], out);
        else
            c->d->row->decode_bf16((const uint16_t *)layer + token * dim, dim, out);
    }
}

/* One item takes in the pass's split of its sequence. */
static void attend(const struct call *c, const struct item *it, const struct piece *piece, float *scratch)
{
    const struct dn_step *s = &c->d->step;
    const struct dn_mla_prefill *p = c->p;
    struct dn_attn_work w = c->work;
    uint32_t padded = w.padded_dim, n = it->n_tokens;
    float *q = dn_attn_scratch(&w, DN_ATTN_ROWS, scratch);
    struct dn_attn_state total = dn_attn_state_at(c->states + it->state, n, padded);
    struct dn_attn_state next =
        dn_attn_state_at(scratch + c->thread_floats - dn_attn_state_floats(DN_ATTN_ROWS, padded), DN_ATTN_ROWS, padded);
    w.n_tokens = n;
    w.position = (uint32_t)s->position[it->token];
    w.format = (enum dn_kv_format)s->kv_format[it->seq];
    w.page = s->page + s->page_start[it->seq];
    w.k_row = c->key + piece->row * c->key_width + (size_t)it->head * p->nope_dim;
    w.v_row = c->value + piece->row * c->value_width + (size_t)it->head * p->v_dim;
    for (uint32_t t = 0; t < n; t++)
        memcpy(q + (size_t)t * w.key_dim,
               (const float *)p->q + ((size_t)(it->token + t) * p->n_heads + it->head) * w.key_dim,
               w.key_dim * sizeof *q);
    if (piece->begin == 0) {
        c->d->attn->split(&w, 0, &total);
    } else {
        uint32_t first = piece->begin > w.position ? piece->begin - w.position : 0;
        c->d->attn->split(&w, piece->begin, &next);
        c->d->attn->merge(&total, &next, first, n, padded);
    }
    if (w.position + n > piece->end)
        return;
    for (uint32_t t = 0; t < n; t++)
        c->d->attn->finish(&total, t, p->v_dim, padded,
                           (float *)p->out + ((size_t)(it->token + t) * p->n_heads + it->head) * p->v_dim);
}

static void run_units(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    uint32_t i = 0;
    for (size_t unit = begin; unit < end; unit++) {
        while (c->unit[i + 1] <= unit)
            i++;
        const struct piece *piece = c->piece + i;
        const struct item *it = c->item + c->item_start[piece->seq] + (unit - c->unit[i]);
        uint32_t last = (uint32_t)c->d->step.position[it->token] + it->n_tokens - 1;
        if (last >= piece->begin)
            attend(c, it, piece, c->scratch + part * c->thread_floats);
    }
}

static void run_pass(struct call *c)
{
    const struct dn_mla_prefill *p = c->p;
    const struct dn_cpu_exec *x = &c->d->exec;
    if (c->n_rows == 0)
        return;
    dn_threads_for(x->threads, c->n_rows, 16, decode, c);
    struct dn_matrix w_k = dn_cpu_flat(p->w_k), w_v = dn_cpu_flat(p->w_v);
    dn_cpu_matmul(x, c->latent, c->n_rows, &w_k, NULL, c->key);
    dn_cpu_matmul(x, c->latent, c->n_rows, &w_v, NULL, c->value);
    c->unit[0] = 0;
    for (uint32_t i = 0; i < c->n_pieces; i++) {
        uint32_t seq = c->piece[i].seq;
        c->unit[i + 1] = c->unit[i] + (c->item_start[seq + 1] - c->item_start[seq]);
    }
    dn_threads_for(x->threads, c->unit[c->n_pieces], 1, run_units, c);
    c->n_pieces = c->n_rows = 0;
}

/* Items of all sequences, later tokens first because they take longest; returns the floats of their states. */
static size_t cut(struct call *c)
{
    const struct dn_step *s = &c->d->step;
    size_t floats = 0;
    uint32_t n = 0;
    for (uint32_t q = 0; q < s->n_seqs; q++) {
        uint32_t begin = (uint32_t)s->token_start[q], end = (uint32_t)s->token_start[q + 1];
        c->item_start[q] = n;
        while (end > begin && !s->bad[q]) {
            uint32_t m = end - begin < DN_ATTN_ROWS ? end - begin : DN_ATTN_ROWS;
            end -= m;
            for (uint32_t h = 0; h < c->p->n_heads; h++) {
                c->item[n++] = (struct item){q, end, m, h, floats};
                floats += dn_attn_state_floats(m, c->work.padded_dim);
            }
        }
    }
    c->item_start[s->n_seqs] = n;
    return floats;
}

static void take(struct call *c)
{
    struct dn_cpu_device *d = c->d;
    const struct dn_mla_prefill *p = c->p;
    const struct dn_step_limits *l = &d->limits;
    size_t seqs = d->measuring ? l->seqs : d->step.n_seqs, tokens = d->measuring ? l->tokens : d->step.n_tokens;
    size_t items = (tokens / DN_ATTN_ROWS + seqs) * p->n_heads;
    /* Blocks of positions are read whole: the last one may reach behind the rows. */
    size_t rows = PASS_ROWS + DN_PAGE_TOKENS_STEP, bytes;
    bytes = rows * (p->latent_dim + c->key_width + c->value_width) * sizeof(float);
    c->latent = dn_cpu_take(d, DN_SCRATCH_EXPANDED, bytes, bytes);
    bytes = dn_threads_count(d->exec.threads) * c->thread_floats * sizeof(float);
    c->scratch = dn_cpu_take(d, DN_SCRATCH_THREAD, bytes, bytes);
    size_t header = (seqs + 1) * (sizeof *c->unit + sizeof *c->piece + sizeof *c->item_start + 16);
    bytes = header + items * sizeof *c->item;
    c->unit = dn_cpu_take(d, DN_SCRATCH_ITEMS, bytes, bytes);
    bytes = tokens * p->n_heads * dn_attn_state_floats(1, c->work.padded_dim) * sizeof(float);
    c->states = dn_cpu_take(d, DN_SCRATCH_PARTS, bytes, bytes);
    if (d->measuring)
        return;
    c->key = c->latent + rows * p->latent_dim;
    c->value = c->key + rows * c->key_width;
    c->item = (struct item *)(c->unit + seqs + 1);
    c->piece = (struct piece *)(c->item + items);
    c->item_start = (uint32_t *)(c->piece + seqs + 1);
}

void dn_cpu_mla_prefill(struct dn_device *device, const struct dn_mla_prefill *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    const struct dn_step *s = &d->step;
    DN_BUG_ON(p->n_heads == 0 || p->layer >= p->layout->n_layers || p->latent_dim != p->layout->latent_dim ||
              p->rope_dim != p->layout->rope_dim || p->latent_dim == 0);
    DN_BUG_ON(p->w_k->n_in != p->latent_dim || p->w_v->n_in != p->latent_dim ||
              dn_cpu_rows(p->w_k) != (uint64_t)p->n_heads * p->nope_dim ||
              dn_cpu_rows(p->w_v) != (uint64_t)p->n_heads * p->v_dim);
    struct call c = {.d = d,
                     .p = p,
                     .work = {.source = DN_ATTN_EXPANDED,
                              .group = 1,
                              .key_dim = p->nope_dim + p->rope_dim,
                              .rope_dim = p->rope_dim,
                              .value_dim = p->v_dim,
                              .padded_dim = (p->v_dim + DN_ATTN_PAD - 1) / DN_ATTN_PAD * DN_ATTN_PAD,
                              .scale = p->scale,
                              .layout = p->layout,
                              .layer = p->layer,
                              .arena = p->arena,
                              .k_stride = (size_t)p->n_heads * p->nope_dim,
                              .v_stride = (size_t)p->n_heads * p->v_dim},
                     .key_width = (size_t)p->n_heads * p->nope_dim,
                     .value_width = (size_t)p->n_heads * p->v_dim};
    size_t floats =
        dn_attn_scratch_floats(&c.work, DN_ATTN_ROWS) + dn_attn_state_floats(DN_ATTN_ROWS, c.work.padded_dim);
    c.thread_floats = (floats + 15) & ~(size_t)15;
    take(&c);
    if (d->measuring || s->n_seqs == 0)
        return;
    dn_cpu_check_pages(d, p->layout);
    dn_cpu_zero_bad(s, p->out, c.value_width);
    cut(&c);
    /* Passes: a whole split of a long sequence, or the ends of several. */
    for (uint32_t q = 0; q < s->n_seqs; q++) {
        if (s->bad[q] || tokens_of(s, q) == 0)
            continue;
        uint32_t len = (uint32_t)s->kv_len[q];
        for (uint32_t at = 0; at < len; at += DN_ATTN_SPLIT) {
            uint32_t end = len - at < DN_ATTN_SPLIT ? len : at + DN_ATTN_SPLIT;
            if (at > 0 || c.n_rows + (end - at) > PASS_ROWS)
                run_pass(&c);
            c.piece[c.n_pieces++] = (struct piece){q, at, end, c.n_rows};
            c.n_rows += end - at;
        }
    }
    run_pass(&c);
}
