/* Kimi K2 and DeepSeek-V3: multi-head latent attention (arXiv 2405.04434), experts chosen by sigmoid scores and a bias
 * that balances their load (arXiv 2412.19437).
 *
 * Attention has two forms. A prefill expands the cached latents to keys and values of every head, so that its many
 * queries share that work. A decode step has one query a sequence and reads the latents as they are ("absorbed"): the
 * key projection goes to the query's side, the value projection to the result's. */
#include "engine/runner.h"

/* Queries into r->q, and what the cache keeps of each token into the last latent_dim + rope_dim values of r->kv_a's
 * rows.
 *
 * The norms inside MLA have config.json's epsilon. transformers gives them its class's default, 1e-6, whatever the file
 * says; the families' own code and the other servers don't, and their weights were trained so (1e-5 from K2-Thinking
 * on). */
static void project(struct dn_runner *r, const struct dn_layer_weights *w)
{
    struct dn_device *d = r->device;
    const struct dn_kernels *ops = d->ops;
    const struct dn_hyper *h = &r->weights->model->hyper;
    const void *compressed = r->normed;

    ops->matmul(d, &(struct dn_matmul){.a = r->normed, .w = &w->kv_a, .out = r->kv_a});
    if (h->q_lora_dim > 0) {
        ops->norm_act(d, &(struct dn_norm_act){.a = r->kv_a,
                                               .a_stride = h->q_lora_dim + h->latent_dim + h->rope_dim,
                                               .weight = w->q_a_norm,
                                               .eps = h->norm_eps,
                                               .dim = h->q_lora_dim,
                                               .out = r->q_a});
        compressed = r->q_a;
    }
    ops->matmul(d, &(struct dn_matmul){.a = compressed, .w = &w->q_b, .out = r->q});
}

static char *values_behind(const struct dn_runner *r, void *act, uint32_t n)
{
    return (char *)act + n * r->device->ops->act_bytes;
}

/* Latent and rope key to the cache. The rotated part of the queries goes behind `q_rope`, a head every `head` values.
 */
static void write_cache(struct dn_runner *r, uint32_t l, void *q_rope, uint32_t head)
{
    const struct dn_hyper *h = &r->weights->model->hyper;
    r->device->ops->mla_write(r->device,
                              &(struct dn_mla_write){.kv = values_behind(r, r->kv_a, h->q_lora_dim),
                                                     .kv_stride = h->q_lora_dim + h->latent_dim + h->rope_dim,
                                                     .q = r->q,
                                                     .q_rope = q_rope,
                                                     .q_rope_stride = h->n_heads * head,
                                                     .q_rope_head_stride = head,
                                                     .n_heads = h->n_heads,
                                                     .nope_dim = h->nope_dim,
                                                     .rope_dim = h->rope_dim,
                                                     .latent_dim = h->latent_dim,
                                                     .kv_norm = r->weights->layer[l].kv_norm,
                                                     .norm_eps = h->norm_eps,
                                                     .rope = r->rope,
                                                     .interleaved = h->rope_interleaved,
                                                     .layout = &r->layout,
                                                     .arena = r->arena,
                                                     .layer = l});
}

static void attend_expanded(struct dn_runner *r, uint32_t l)
{
    const struct dn_hyper *h = &r->weights->model->hyper;
    const struct dn_layer_weights *w = &r->weights->layer[l];
    write_cache(r, l, values_behind(r, r->q, h->nope_dim), h->head_dim);
    r->device->ops->mla_prefill(r->device, &(struct dn_mla_prefill){.q = r->q,
                                                                    .w_k = &w->w_k,
                                                                    .w_v = &w->w_v,
                                                                    .n_heads = h->n_heads,
                                                                    .nope_dim = h->nope_dim,
                                                                    .rope_dim = h->rope_dim,
                                                                    .v_dim = h->v_dim,
                                                                    .latent_dim = h->latent_dim,
                                                                    .scale = (float)dn_hyper_attention_scale(h),
                                                                    .layout = &r->layout,
                                                                    .arena = r->arena,
                                                                    .layer = l,
                                                                    .out = r->heads});
}

static void attend_absorbed(struct dn_runner *r, uint32_t l)
{
    struct dn_device *d = r->device;
    const struct dn_kernels *ops = d->ops;
    const struct dn_hyper *h = &r->weights->model->hyper;
    const struct dn_layer_weights *w = &r->weights->layer[l];
    uint32_t row = h->latent_dim + h->rope_dim;
    ops->group_matmul(d, &(struct dn_group_matmul){.a = r->q,
                                                   .a_stride = h->n_heads * h->head_dim,
                                                   .a_group_stride = h->head_dim,
                                                   .w = &w->w_kt,
                                                   .out = r->q_latent,
                                                   .out_stride = h->n_heads * row,
                                                   .out_group_stride = row});
    write_cache(r, l, values_behind(r, r->q_latent, h->latent_dim), row);
    ops->mla_attention(d, &(struct dn_mla_attention){.q = r->q_latent,
                                                     .n_heads = h->n_heads,
                                                     .latent_dim = h->latent_dim,
                                                     .rope_dim = h->rope_dim,
                                                     .scale = (float)dn_hyper_attention_scale(h),
                                                     .layout = &r->layout,
                                                     .arena = r->arena,
                                                     .layer = l,
                                                     .out = r->latents});
    ops->group_matmul(d, &(struct dn_group_matmul){.a = r->latents,
                                                   .a_stride = h->n_heads * h->latent_dim,
                                                   .a_group_stride = h->latent_dim,
                                                   .w = &w->w_v,
                                                   .out = r->heads,
                                                   .out_stride = h->n_heads * h->v_dim,
                                                   .out_group_stride = h->v_dim});
}

static void feed_forward(struct dn_runner *r, const struct dn_matrix *gate_up, const struct dn_matrix *down)
{
    struct dn_device *d = r->device;
    const struct dn_kernels *ops = d->ops;
    ops->matmul(d, &(struct dn_matmul){.a = r->normed, .w = gate_up, .out = r->gate_up});
    ops->silu_mul(d, &(struct dn_silu_mul){.gate_up = r->gate_up, .dim = down->n_in, .out = r->ff});
    ops->matmul(d, &(struct dn_matmul){.a = r->ff, .w = down, .out = r->delta});
}

/* The shared experts are one network that sees every token, neither weighted nor scaled. */
static void run_experts(struct dn_runner *r, const struct dn_layer_weights *w)
{
    struct dn_device *d = r->device;
    const struct dn_kernels *ops = d->ops;
    const struct dn_hyper *h = &r->weights->model->hyper;
    ops->matmul(d, &(struct dn_matmul){.a = r->normed, .w = &w->router, .out_f32 = true, .out = r->router});
    ops->route(d, &(struct dn_route){.logits = r->router,
                                     .bias = w->router_bias,
                                     .n_experts = h->n_experts,
                                     .top_k = h->top_experts,
                                     .n_groups = h->expert_groups,
                                     .top_groups = h->top_groups,
                                     .normalise = h->normalise_experts,
                                     .scale = h->expert_scale,
                                     .expert = r->expert,
                                     .weight = r->expert_weight});
    if (h->shared_ff > 0)
        feed_forward(r, &w->shared_gate_up, &w->shared_down);
    ops->experts(d, &(struct dn_experts){.a = r->normed,
                                         .expert = r->expert,
                                         .weight = r->expert_weight,
                                         .top_k = h->top_experts,
                                         .gate_up = &w->expert_gate_up,
                                         .down = &w->expert_down,
                                         .add = h->shared_ff > 0 ? r->delta : NULL,
                                         .out = r->delta});
}

static void norm(struct dn_runner *r, const void *add, const float *weight, bool rows_only)
{
    const struct dn_hyper *h = &r->weights->model->hyper;
    r->device->ops->rmsnorm(r->device, &(struct dn_rmsnorm){.x = r->x,
                                                            .add = add,
                                                            .weight = weight,
                                                            .eps = h->norm_eps,
                                                            .dim = h->dim,
                                                            .rows_only = rows_only,
                                                            .out = r->normed});
}

/* On entry and on exit r->delta is what is still to be added to the residual: each addition rides on the norm that
 * follows it. The first layer has none. */
static void run_layer(struct dn_runner *r, uint32_t l, bool absorbed)
{
    const struct dn_layer_weights *w = &r->weights->layer[l];
    norm(r, l == 0 ? NULL : r->delta, w->attn_norm, false);
    project(r, w);
    if (absorbed)
        attend_absorbed(r, l);
    else
        attend_expanded(r, l);
    r->device->ops->matmul(r->device, &(struct dn_matmul){.a = r->heads, .w = &w->o, .out = r->delta});
    norm(r, r->delta, w->ffn_norm, false);
    if (dn_hyper_has_experts(&r->weights->model->hyper, l))
        run_experts(r, w);
    else
        feed_forward(r, &w->gate_up, &w->down);
}

void dn_forward_kimi(struct dn_runner *r)
{
    struct dn_device *d = r->device;
    const struct dn_kernels *ops = d->ops;
    const struct dn_weights *w = r->weights;
    const struct dn_hyper *h = &w->model->hyper;
    const struct dn_step *s = ops->step_arrays(d);

    ops->embed(d, &(struct dn_embed){.table = &w->embed, .out = r->x});
    for (uint32_t l = 0; l < h->n_layers; l++)
        run_layer(r, l, s->kind == DN_STEP_DECODE);
    if (s->n_rows == 0)
        return;
    norm(r, r->delta, w->final_norm, true);
    ops->matmul(
        d, &(struct dn_matmul){.a = r->normed, .w = w->head, .rows_only = true, .out_f32 = true, .out = r->logits});
    ops->sample_rows(d,
                     &(struct dn_sample_rows){.logits = r->logits, .n_vocab = h->n_vocab, .n_valid = r->conf.n_valid});
}
