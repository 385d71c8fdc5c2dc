#include "kernels/cpu/device.h"

#include <math.h>

struct call {
    const struct dn_route *p;
};

/* The best of what was offered, largest first; of equals the one that came first. */
struct best {
    uint32_t n, most;
    float value[DN_MAX_EXPERTS];
    uint32_t id[DN_MAX_EXPERTS];
};

static void offer(struct best *b, float value, uint32_t id)
{
    DN_BUG_ON(b->most == 0);
    if (b->n == b->most && !(value > b->value[b->n - 1]))
        return;
    uint32_t at = b->n < b->most ? b->n++ : b->n - 1;
    for (; at > 0 && value > b->value[at - 1]; at--) {
        b->value[at] = b->value[at - 1];
        b->id[at] = b->id[at - 1];
    }
    b->value[at] = value;
    b->id[at] = id;
}

/* Sum of the two best choices of a group. */
static float group_value(const float *choice, uint32_t n)
{
    float first = -INFINITY, second = -INFINITY;
    for (uint32_t i = 0; i < n; i++) {
        if (choice[i] > first) {
            second = first;
            first = choice[i];
        } else if (choice[i] > second) {
            second = choice[i];
        }
    }
    return n > 1 ? first + second : first;
}

/* Which groups stay: keep [n_groups] */
static void choose_groups(const struct dn_route *p, const float *choice, bool *keep)
{
    uint32_t size = p->n_experts / p->n_groups;
    struct best groups;
    groups.n = 0;
    groups.most = p->top_groups;
    for (uint32_t g = 0; g < p->n_groups; g++) {
        keep[g] = false;
        offer(&groups, group_value(choice + (size_t)g * size, size), g);
    }
    for (uint32_t i = 0; i < groups.n; i++)
        keep[groups.id[i]] = true;
}

static void token(const struct dn_route *p, const float *logit, int32_t *expert, float *weight)
{
    float score[DN_MAX_EXPERTS] = {0}, choice[DN_MAX_EXPERTS] = {0};
    bool keep[DN_MAX_EXPERTS] = {true}, nan = false;
    const uint32_t n_experts = p->n_experts, top_k = p->top_k,
                   size = p->n_groups > 1 ? n_experts / p->n_groups : n_experts;
    DN_BUG_ON(size == 0 || n_experts == 0 || n_experts > DN_MAX_EXPERTS || top_k == 0 || top_k > n_experts);
    for (uint32_t i = 0; i < n_experts; i++) {
        score[i] = 1.0f / (1.0f + expf(-logit[i]));
        choice[i] = p->bias ? score[i] + p->bias[i] : score[i];
        nan = nan || isnan(logit[i]);
        choice[i] = isnan(choice[i]) ? -INFINITY : choice[i]; /* has an order, so that ids stay distinct */
    }
    if (p->n_groups > 1)
        choose_groups(p, choice, keep);
    struct best top = {.most = top_k};
    for (uint32_t i = 0; i < n_experts; i++) {
        if (keep[i / size])
            offer(&top, choice[i], i);
    }
    float sum = 0.0f;
    for (uint32_t k = 0; k < top_k; k++)
        sum += score[top.id[k]];
    for (uint32_t k = 0; k < top_k; k++) {
        float w = score[top.id[k]];
        expert[k] = (int32_t)top.id[k];
        weight[k] = nan ? NAN : (p->normalise ? w / (sum + 1e-20f) : w) * p->scale;
    }
}

static void tokens(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct dn_route *p = ((const struct call *)arg)->p;
    for (size_t t = begin; t < end; t++)
        token(p, p->logits + t * p->n_experts, p->expert + t * p->top_k, p->weight + t * p->top_k);
}

void dn_cpu_route(struct dn_device *device, const struct dn_route *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    uint32_t groups = p->n_groups > 1 ? p->n_groups : 1, kept = p->n_groups > 1 ? p->top_groups : 1;
    DN_BUG_ON(p->n_experts == 0 || p->n_experts > DN_MAX_EXPERTS || p->top_k == 0 || p->top_k > DN_MAX_TOP_EXPERTS ||
              p->n_experts % groups || kept == 0 || kept > groups || p->n_experts / groups * kept < p->top_k);
    if (d->measuring)
        return;
    struct call c = {p};
    dn_threads_for(d->exec.threads, d->step.n_tokens, 4, tokens, &c);
}
