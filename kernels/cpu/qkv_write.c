#include "kernels/cpu/device.h"

struct call {
    const struct dn_cpu_device *d;
    const struct dn_qkv_write *p;
};

/* Encodes one head's vector into its place in the page. plane: 0 for K, 1 for V. */
static void encode(const struct call *c, uint8_t *layer, enum dn_kv_format f, int plane, size_t token, const float *x)
{
    const struct dn_kv_layout *l = c->p->layout;
    size_t dim = c->p->head_dim;
    uint8_t *values = layer + (plane ? l->format[f].v_offset : 0);
    if (f == DN_KV_FP8) {
        uint8_t *scales = layer + (plane ? l->format[f].v_scale_offset : l->format[f].k_scale_offset);
        c->d->row->encode_fp8(x, dim, values + token * dim, (float *)scales + token);
    } else {
        c->d->row->encode_bf16(x, dim, (uint16_t *)values + token * dim);
    }
}

static void tokens(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    const struct dn_qkv_write *p = c->p;
    const struct dn_row_ops *row = c->d->row;
    const struct dn_step *s = &c->d->step;
    const struct dn_kv_layout *l = p->layout;
    size_t dim = p->head_dim, width = ((size_t)p->n_heads + 2 * p->n_kv_heads) * dim;
    for (size_t t = begin; t < end; t++) {
        uint32_t position = (uint32_t)s->position[t], seq = (uint32_t)s->token_seq[t];
        float *q = (float *)p->qkv + t * width, *k = q + p->n_heads * dim, *v = k + p->n_kv_heads * dim;
        const float *table = p->rope ? p->rope + (size_t)position * p->rotary_dim : NULL;
        for (uint32_t h = 0; h < p->n_heads + p->n_kv_heads; h++) {
            float *x = q + h * dim;
            const float *norm = h < p->n_heads ? p->q_norm : p->k_norm;
            if (norm)
                row->rmsnorm(x, norm, p->norm_eps, dim, x);
            if (table)
                row->rope(x, table, p->rotary_dim / 2, p->interleaved);
        }
        if (s->bad[seq])
            continue;
        enum dn_kv_format f = (enum dn_kv_format)s->kv_format[seq];
        uint32_t page = s->page[(uint32_t)s->page_start[seq] + position / l->page_tokens];
        uint8_t *layer =
            (uint8_t *)p->arena + dn_kv_page_offset(l, f, page) + (uint64_t)p->layer * l->format[f].layer_bytes;
        for (uint32_t h = 0; h < p->n_kv_heads; h++) {
            size_t token = (size_t)h * l->page_tokens + position % l->page_tokens;
            encode(c, layer, f, 0, token, k + h * dim);
            encode(c, layer, f, 1, token, v + h * dim);
        }
    }
}

void dn_cpu_qkv_write(struct dn_device *device, const struct dn_qkv_write *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    const struct dn_step *s = &d->step;
    DN_BUG_ON(p->layer >= p->layout->n_layers || p->n_kv_heads != p->layout->n_kv_heads ||
              p->head_dim != p->layout->head_dim || p->rotary_dim > p->head_dim || p->rotary_dim % 2);
    if (d->measuring)
        return;
    dn_cpu_check_pages(d, p->layout);
    struct call c = {d, p};
    dn_threads_for(d->exec.threads, s->n_tokens, 4, tokens, &c);
}
