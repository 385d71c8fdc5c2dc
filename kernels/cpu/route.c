#include "kernels/cpu/device.h"

#include <math.h>

struct call {
    const struct dn_route *p;
};

/* The best of what was offered, largest first; of equals the one that came first. */
struct best {
    uint32_t n, most;
    float *value; /* [most] */
    int32_t *id;  /* [most] */
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
    b->id[at] = (int32_t)id;
}

static float score_of(float logit)
{
    return 1.0f / (1.0f + expf(-logit));
}

/* A NaN has an order, so that ids stay distinct. */
static float choice_of(const struct dn_route *p, const float *logit, uint32_t i)
{
    float choice = p->bias ? score_of(logit[i]) + p->bias[i] : score_of(logit[i]);
    return isnan(choice) ? -INFINITY : choice;
}

/* Sum of the two best choices of the group of n experts from `from` on. */
static float group_value(const struct dn_route *p, const float *logit, uint32_t from, uint32_t n)
{
    float first = -INFINITY, second = -INFINITY;
    for (uint32_t i = 0; i < n; i++) {
        float choice = choice_of(p, logit, from + i);
        if (choice > first) {
            second = first;
            first = choice;
        } else if (choice > second) {
            second = choice;
        }
    }
    return n > 1 ? first + second : first;
}

/* Which groups stay: a bit of keep each. */
static void choose_groups(const struct dn_route *p, const float *logit, uint64_t *keep)
{
    float value[DN_MAX_EXPERTS];
    int32_t id[DN_MAX_EXPERTS];
    struct best groups = {.most = p->top_groups, .value = value, .id = id};
    uint32_t size = p->n_experts / p->n_groups;
    for (uint32_t g = 0; g < p->n_groups; g++)
        offer(&groups, group_value(p, logit, g * size, size), g);
    for (uint32_t i = 0; i < groups.n; i++)
        keep[id[i] / 64] |= 1ull << (id[i] % 64);
}

static void token(const struct dn_route *p, const float *logit, int32_t *expert, float *weight)
{
    uint64_t keep[DN_MAX_EXPERTS / 64] = {0};
    bool grouped = p->n_groups > 1, nan = false;
    uint32_t size = grouped ? p->n_experts / p->n_groups : p->n_experts;
    DN_BUG_ON(size == 0);
    if (grouped)
        choose_groups(p, logit, keep);
    struct best top = {.most = p->top_k, .value = weight, .id = expert};
    for (uint32_t i = 0; i < p->n_experts; i++) {
        uint32_t g = i / size;
        nan = nan || isnan(logit[i]);
        if (!grouped || (keep[g / 64] >> g % 64 & 1))
            offer(&top, choice_of(p, logit, i), i);
    }
    float sum = 0.0f;
    for (uint32_t k = 0; k < p->top_k; k++) {
        weight[k] = score_of(logit[expert[k]]);
        sum += weight[k];
    }
    for (uint32_t k = 0; k < p->top_k; k++)
        weight[k] = nan ? NAN : (p->normalise ? weight[k] / (sum + 1e-20f) : weight[k]) * p->scale;
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
