/* The router on CUDA against float64.
 *
 * A choice is right if no other expert that may be taken is better by more than 1e-6 of max(1, |choice|) (f32: sigmoid
 * 3 ulp, one addition), and none with the same logit and bias has a lower number. Rows in which two groups are that
 * close are left out, unless they are equal bit for bit. Weights: 1e-5 relative (k + 4 roundings of 2^-24 and expf's 2
 * ulp).
 */
#include "gpu/gpu.h"

enum { TOKENS = 512, SEQS = 96 };
static const struct dn_step_limits limits = {.tokens = TOKENS, .seqs = SEQS, .rows = SEQS, .pages = 1, .tags = 1};

struct shape {
    uint32_t n, experts, top_k, groups, top_groups;
    bool bias, normalise, ties;
    float scale;
    enum dn_step_kind kind;
};
struct route_op {
    struct dn_route p;
    int repeat;
};
static void route_ops(struct gpu *g, void *ctx)
{
    struct route_op *o = ctx;
    for (int i = 0; i < o->repeat; i++)
        g->ops->route(g->d, &o->p);
}

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}
static bool clearly_less(double a, double b)
{
    return a < b - 1e-6 * fmax(1, fabs(b));
}

/* Which groups may be taken; false if that is too close to tell. */
static bool groups_kept(const struct shape *s, const float *logits, const float *bias, bool *kept)
{
    uint32_t size = s->experts / s->groups;
    double sum[DN_MAX_EXPERTS];
    for (uint32_t g = 0; g < s->groups; g++) {
        double a = -INFINITY, b = -INFINITY;
        for (uint32_t e = g * size; e < (g + 1) * size; e++) {
            double c = sigmoid(logits[e]) + (bias ? bias[e] : 0);
            if (c > a) {
                b = a;
                a = c;
            } else if (c > b)
                b = c;
        }
        sum[g] = size > 1 ? a + b : a;
        kept[g] = false;
    }
    double last = 0;
    for (uint32_t n = 0; n < s->top_groups; n++) {
        uint32_t best = ~0u;
        for (uint32_t g = 0; g < s->groups; g++)
            if (!kept[g] && (best == ~0u || sum[g] > sum[best]))
                best = g;
        kept[best] = true;
        last = sum[best];
    }
    for (uint32_t g = 0; g < s->groups; g++)
        if (!kept[g] && sum[g] != last && !clearly_less(sum[g], last))
            return false;
    return true;
}

static int check_row(const struct shape *s, const float *logits, const float *bias, const int32_t *expert,
                     const float *weight, uint32_t t)
{
    bool kept[DN_MAX_EXPERTS], taken[DN_MAX_EXPERTS] = {false};
    if (!groups_kept(s, logits, bias, kept))
        return 1;
    double sum = 0;
    for (uint32_t k = 0; k < s->top_k; k++) {
        int32_t e = expert[k];
        cr_assert(e >= 0 && e < (int32_t)s->experts, "token %u: expert %d", t, e);
        cr_assert_not(taken[e], "token %u: expert %d twice", t, e);
        taken[e] = true;
        cr_assert(kept[(uint32_t)e / (s->experts / s->groups)], "token %u: expert %d is of a group that was left out",
                  t, e);
        double choice = sigmoid(logits[e]) + (bias ? bias[e] : 0);
        for (uint32_t o = 0; o < s->experts; o++) {
            if (taken[o] || !kept[o / (s->experts / s->groups)])
                continue;
            double other = sigmoid(logits[o]) + (bias ? bias[o] : 0);
            cr_assert_not(clearly_less(choice, other), "token %u, choice %u: %d (%.9g), but %u has %.9g", t, k, e,
                          choice, o, other);
            cr_assert_not((int32_t)o < e && logits[o] == logits[e] && (!bias || bias[o] == bias[e]),
                          "token %u, choice %u: %d, but %u is as good", t, k, e, o);
        }
        sum += sigmoid(logits[e]);
    }
    for (uint32_t k = 0; k < s->top_k; k++) {
        double want = sigmoid(logits[expert[k]]) / (s->normalise ? sum + 1e-20 : 1) * s->scale;
        cr_assert(fabs(weight[k] - want) <= 1e-5 * fabs(want) + 1e-37, "token %u: weight %u is %.9g, expected %.9g", t,
                  k, weight[k], want);
    }
    return 0;
}

static void check(struct gpu *g, const struct shape *s)
{
    size_t n_logits = (size_t)s->n * s->experts, n_out = (size_t)TOKENS * s->top_k;
    float *logits = malloc(n_logits * sizeof *logits), *bias = malloc(s->experts * sizeof *bias);
    for (size_t i = 0; i < n_logits; i++)
        logits[i] = s->ties ? (float)(gpu_rng() % 5) / 2 - 1 : gpu_normal() * 2;
    for (uint32_t e = 0; e < s->experts; e++)
        bias[e] = s->ties ? (float)(gpu_rng() % 3) / 4 - 0.25f : gpu_normal() * 0.2f;
    if (s->n > 2) {
        logits[2 * s->experts - 1] = NAN; /* token 1 */
        logits[2 * s->experts + 1] = INFINITY;
        logits[2 * s->experts + 2] = -INFINITY;
    }
    struct route_op o = {.p = {.n_experts = s->experts,
                               .top_k = s->top_k,
                               .n_groups = s->groups,
                               .top_groups = s->top_groups,
                               .normalise = s->normalise,
                               .scale = s->scale},
                         .repeat = 1};
    void *d_logits = gpu_alloc(g, (size_t)TOKENS * s->experts * 4);
    g->ops->upload(g->d, d_logits, logits, n_logits * 4);
    void *d_bias = s->bias ? gpu_copy(g, bias, s->experts * 4) : NULL;
    o.p.logits = d_logits;
    o.p.bias = d_bias;
    o.p.expert = gpu_alloc(g, n_out * 4);
    o.p.weight = gpu_alloc(g, n_out * 4);
    gpu_poison(g, o.p.expert, n_out * 4);
    gpu_poison(g, o.p.weight, n_out * 4);
    if (s->kind == DN_STEP_DECODE)
        gpu_rows_step(g, s->kind, s->n);
    else { /* one sequence of n tokens */
        gpu_rows_step(g, s->kind, 1);
        g->s->n_tokens = s->n;
        g->s->token_start[1] = g->s->kv_len[0] = (int32_t)s->n;
        for (uint32_t i = 0; i < s->n; i++) {
            g->s->token_id[i] = g->s->token_seq[i] = g->s->token_count[i] = 0;
            g->s->position[i] = (int32_t)i;
        }
    }
    gpu_step(g, 7, route_ops, &o);
    int32_t *expert = malloc(n_out * 4);
    float *weight = malloc(n_out * 4);
    g->ops->download(g->d, expert, o.p.expert, n_out * 4);
    g->ops->download(g->d, weight, o.p.weight, n_out * 4);
    int unclear = 0;
    for (uint32_t t = 0; t < s->n; t++) {
        if (t == 1 && s->n > 2) {
            for (uint32_t k = 0; k < s->top_k; k++) {
                cr_assert(isnan(weight[s->top_k + k]), "a NaN logit gives NaN weights");
                int32_t e = expert[s->top_k + k];
                cr_assert(e >= 0 && e < (int32_t)s->experts, "a NaN logit gives expert %d", e);
            }
            continue;
        }
        unclear += check_row(s, logits + (size_t)t * s->experts, s->bias ? bias : NULL, expert + (size_t)t * s->top_k,
                             weight + (size_t)t * s->top_k, t);
    }
    for (size_t i = (size_t)s->n * s->top_k; i < n_out; i++)
        cr_assert_eq(expert[i], -1, "a row after the last was written");
    cr_assert_leq(unclear, 1 + (int)s->n / 20);
    printf("route n=%u experts=%u top=%u groups=%u/%u%s: ok, %d rows unclear\n", s->n, s->experts, s->top_k, s->groups,
           s->top_groups, s->ties ? " ties" : "", unclear);
    g->ops->free(g->d, d_logits);
    if (d_bias)
        g->ops->free(g->d, d_bias);
    g->ops->free(g->d, o.p.expert);
    g->ops->free(g->d, o.p.weight);
    free(logits);
    free(bias);
    free(expert);
    free(weight);
}

Test(route, correct)
{
    struct gpu g;
    gpu_open(&g, &limits, 1, 1);
    static const struct shape shapes[] = {
        {1, 4, 1, 1, 1, false, true, false, 1, DN_STEP_DECODE},
        {7, 4, 4, 1, 1, true, true, true, 2.5f, DN_STEP_DECODE},
        {64, 32, 4, 1, 1, false, false, false, 1, DN_STEP_DECODE},
        {33, 60, 6, 1, 1, true, true, true, 1, DN_STEP_DECODE},
        {64, 128, 8, 1, 1, true, true, false, 1, DN_STEP_DECODE},
        {65, 160, 6, 8, 3, true, false, false, 16, DN_STEP_DECODE},
        {5, 256, 8, 8, 4, true, true, false, 2.5f, DN_STEP_DECODE},
        {300, 256, 8, 8, 4, true, true, true, 2.5f, DN_STEP_PREFILL},
        {1, 384, 8, 1, 1, true, true, false, 2.827f, DN_STEP_DECODE},
        {64, 384, 8, 1, 1, true, true, true, 2.827f, DN_STEP_DECODE},
        {512, 384, 8, 1, 1, true, true, false, 2.827f, DN_STEP_PREFILL},
        {96, 512, 10, 1, 1, false, true, false, 1, DN_STEP_DECODE},
        {64, 1024, 16, 1, 1, true, true, false, 1, DN_STEP_DECODE},
        {64, 1024, 16, 64, 7, true, true, true, 1, DN_STEP_DECODE},
        {64, 64, 8, 64, 9, true, true, false, 1, DN_STEP_DECODE}, /* groups of one */
    };
    for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++)
        check(&g, &shapes[i]);
    gpu_close(&g);
}

/* sigmoid(20 and more) is 1 in f32: equal choices, whatever the logits are. */
Test(route, saturated)
{
    struct gpu g;
    gpu_open(&g, &limits, 1, 1);
    float logits[2 * 384];
    for (int i = 0; i < 2 * 384; i++)
        logits[i] = 20 + (float)(gpu_unit() * 60);
    struct route_op o = {
        .p = {.n_experts = 384, .top_k = 8, .n_groups = 1, .top_groups = 1, .normalise = true, .scale = 1},
        .repeat = 1};
    o.p.logits = gpu_copy(&g, logits, sizeof logits);
    o.p.expert = gpu_alloc(&g, 2 * 8 * 4);
    o.p.weight = gpu_alloc(&g, 2 * 8 * 4);
    gpu_rows_step(&g, DN_STEP_DECODE, 2);
    gpu_step(&g, 7, route_ops, &o);
    int32_t expert[16];
    float weight[16];
    g.ops->download(g.d, expert, o.p.expert, sizeof expert);
    g.ops->download(g.d, weight, o.p.weight, sizeof weight);
    for (int i = 0; i < 16; i++) {
        cr_expect_eq(expert[i], i % 8);
        cr_expect_eq(weight[i], 0.125f);
    }
    gpu_close(&g);
}

Test(route, bench)
{
    struct gpu g;
    gpu_open(&g, &limits, 1, 1);
    static const uint32_t shapes[][4] = {{384, 8, 1, 1}, {256, 8, 8, 4}};
    for (size_t i = 0; i < 2; i++) {
        struct route_op o = {.p = {.n_experts = shapes[i][0],
                                   .top_k = shapes[i][1],
                                   .n_groups = shapes[i][2],
                                   .top_groups = shapes[i][3],
                                   .normalise = true,
                                   .scale = 1},
                             .repeat = 200};
        float *logits = malloc((size_t)SEQS * shapes[i][0] * 4);
        for (size_t k = 0; k < (size_t)SEQS * shapes[i][0]; k++)
            logits[k] = gpu_normal();
        o.p.logits = gpu_copy(&g, logits, (size_t)SEQS * shapes[i][0] * 4);
        o.p.expert = gpu_alloc(&g, (size_t)TOKENS * 8 * 4);
        o.p.weight = gpu_alloc(&g, (size_t)TOKENS * 8 * 4);
        gpu_prepare(&g, (uint32_t)i + 1, route_ops, &o);
        for (uint32_t n = 1; n <= 64; n *= 64) {
            gpu_rows_step(&g, DN_STEP_DECODE, n);
            double us = gpu_time(&g, (uint32_t)i + 1, route_ops, &o) / o.repeat;
            double tb = n * shapes[i][0] * 4 / us / 1e6;
            printf("BENCH route %u/%u groups %u n=%u %.2f us %.4f TB/s %.2f %%\n", shapes[i][0], shapes[i][1],
                   shapes[i][2], n, us, tb, tb / 4.65 * 100);
        }
        free(logits);
    }
    gpu_close(&g);
}
