#include "engine/runner.h"

#include <math.h>

/* One layer. On entry `delta` is what is still to be added to the residual (NULL in the first layer); the same on exit.
 * Each addition rides on the norm that follows it. */
static const void *run_layer(struct dn_runner *r, uint32_t l, const void *delta)
{
    struct dn_device *d = r->device;
    const struct dn_kernels *ops = d->ops;
    const struct dn_hyper *h = &r->weights->model->hyper;
    const struct dn_layer_weights *w = &r->weights->layer[l];

    ops->rmsnorm(
        d, &(struct dn_rmsnorm){
               .x = r->x, .add = delta, .weight = w->attn_norm, .eps = h->norm_eps, .dim = h->dim, .out = r->normed});
    ops->matmul(d, &(struct dn_matmul){.a = r->normed, .w = &w->qkv, .bias = w->qkv_bias, .out = r->qkv});
    ops->qkv_write(d, &(struct dn_qkv_write){.qkv = r->qkv,
                                             .n_heads = h->n_heads,
                                             .n_kv_heads = h->n_kv_heads,
                                             .head_dim = h->head_dim,
                                             .q_norm = w->q_norm,
                                             .k_norm = w->k_norm,
                                             .norm_eps = h->norm_eps,
                                             .rope = r->rope,
                                             .rotary_dim = h->rotary_dim,
                                             .interleaved = h->rope_interleaved,
                                             .layout = &r->layout,
                                             .arena = r->arena,
                                             .layer = l});
    ops->attention(d, &(struct dn_attention){.q = r->qkv,
                                             .q_stride = (h->n_heads + 2 * h->n_kv_heads) * h->head_dim,
                                             .n_heads = h->n_heads,
                                             .n_kv_heads = h->n_kv_heads,
                                             .head_dim = h->head_dim,
                                             .scale = 1 / sqrtf((float)h->head_dim),
                                             .layout = &r->layout,
                                             .arena = r->arena,
                                             .layer = l,
                                             .out = r->heads});
    ops->matmul(d, &(struct dn_matmul){.a = r->heads, .w = &w->o, .out = r->delta});

    ops->rmsnorm(
        d, &(struct dn_rmsnorm){
               .x = r->x, .add = r->delta, .weight = w->ffn_norm, .eps = h->norm_eps, .dim = h->dim, .out = r->normed});
    ops->matmul(d, &(struct dn_matmul){.a = r->normed, .w = &w->gate_up, .out = r->gate_up});
    ops->silu_mul(d, &(struct dn_silu_mul){.gate_up = r->gate_up, .dim = h->ff_dim, .out = r->ff});
    ops->matmul(d, &(struct dn_matmul){.a = r->ff, .w = &w->down, .out = r->delta});
    return r->delta;
}

void dn_forward_llama(struct dn_runner *r)
{
    struct dn_device *d = r->device;
    const struct dn_kernels *ops = d->ops;
    const struct dn_weights *w = r->weights;
    const struct dn_hyper *h = &w->model->hyper;
    const void *delta = NULL;

    ops->embed(d, &(struct dn_embed){.table = &w->embed, .out = r->x});
    for (uint32_t l = 0; l < h->n_layers; l++)
        delta = run_layer(r, l, delta);
    if (ops->step_arrays(d)->n_rows == 0)
        return;
    ops->rmsnorm(d, &(struct dn_rmsnorm){.x = r->x,
                                         .add = delta,
                                         .weight = w->final_norm,
                                         .eps = h->norm_eps,
                                         .dim = h->dim,
                                         .rows_only = true,
                                         .out = r->normed});
    ops->matmul(
        d, &(struct dn_matmul){.a = r->normed, .w = w->head, .rows_only = true, .out_f32 = true, .out = r->logits});
    ops->sample_rows(d,
                     &(struct dn_sample_rows){.logits = r->logits, .n_vocab = h->n_vocab, .n_valid = r->conf.n_valid});
}
