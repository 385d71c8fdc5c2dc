#include "kernels/cpu/device.h"

#include <string.h>

struct call {
    const struct dn_cpu_device *d;
    const struct dn_mla_write *p;
    float *scratch; /* [threads][latent_dim + rope_dim] */
};

/* Rotates the rope part of all heads' queries of token t. */
static void rotate_queries(const struct call *c, size_t t, const float *table)
{
    const struct dn_mla_write *p = c->p;
    size_t head_dim = (size_t)p->nope_dim + p->rope_dim;
    const float *q = (const float *)p->q + t * p->n_heads * head_dim + p->nope_dim;
    float *out = (float *)p->q_rope + t * p->q_rope_stride;
    for (uint32_t h = 0; h < p->n_heads; h++, q += head_dim, out += p->q_rope_head_stride) {
        memmove(out, q, p->rope_dim * sizeof *out);
        c->d->row->rope(out, table, p->rope_dim / 2, p->interleaved);
    }
}

static void tokens(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    const struct dn_mla_write *p = c->p;
    const struct dn_row_ops *row = c->d->row;
    const struct dn_step *s = &c->d->step;
    const struct dn_kv_layout *l = p->layout;
    size_t dim = p->latent_dim, rope_dim = p->rope_dim;
    float *latent = c->scratch + part * (dim + rope_dim), *key = latent + dim;
    for (size_t t = begin; t < end; t++) {
        uint32_t position = (uint32_t)s->position[t], seq = (uint32_t)s->token_seq[t];
        const float *table = p->rope + (size_t)position * rope_dim, *kv = (const float *)p->kv + t * p->kv_stride;
        rotate_queries(c, t, table);
        if (s->bad[seq])
            continue;
        row->rmsnorm(kv, p->kv_norm, p->norm_eps, dim, latent);
        memcpy(key, kv + dim, rope_dim * sizeof *key);
        row->rope(key, table, rope_dim / 2, p->interleaved);
        enum dn_kv_format f = (enum dn_kv_format)s->kv_format[seq];
        uint32_t page = s->page[(uint32_t)s->page_start[seq] + position / l->page_tokens];
        uint8_t *layer =
            (uint8_t *)p->arena + dn_kv_page_offset(l, f, page) + (uint64_t)p->layer * l->format[f].layer_bytes;
        size_t token = position % l->page_tokens;
        if (f == DN_KV_FP8)
            row->encode_fp8(latent, dim, layer + token * dim, (float *)(layer + l->format[f].k_scale_offset) + token);
        else
            row->encode_bf16(latent, dim, (uint16_t *)layer + token * dim);
        row->encode_bf16(key, rope_dim, (uint16_t *)(layer + l->format[f].v_offset) + token * rope_dim);
    }
}

void dn_cpu_mla_write(struct dn_device *device, const struct dn_mla_write *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    DN_BUG_ON(p->layer >= p->layout->n_layers || p->latent_dim != p->layout->latent_dim ||
              p->rope_dim != p->layout->rope_dim || p->rope_dim % 2 || p->kv_stride < p->latent_dim + p->rope_dim);
    size_t bytes = dn_threads_count(d->exec.threads) * ((size_t)p->latent_dim + p->rope_dim) * sizeof(float);
    struct call c = {d, p, dn_cpu_take(d, DN_SCRATCH_THREAD, bytes, bytes)};
    if (d->measuring)
        return;
    dn_cpu_check_pages(d, p->layout);
    dn_threads_for(d->exec.threads, d->step.n_tokens, 4, tokens, &c);
}
