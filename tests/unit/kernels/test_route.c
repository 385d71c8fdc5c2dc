/* The router against its definition: which experts, in which order, with which weights; ties, groups and NaN. */
#include "unit/kernels/oracle.h"

struct shape {
    uint32_t n_experts, top_k, n_groups, top_groups;
    bool bias, normalise;
    float scale;
};

/* Kimi K2, DeepSeek-V3, mini-kimi, the largest, the smallest, odd ones; as many as there are */
static const struct shape shapes[] = {
    {384, 8, 1, 1, true, true, 2.827f}, {256, 8, 8, 4, true, true, 2.5f},  {32, 4, 1, 1, true, true, 2.0f},
    {1024, 16, 1, 1, true, true, 1},    {1024, 16, 64, 3, true, false, 1}, {1, 1, 1, 1, false, true, 3},
    {7, 3, 1, 1, true, false, 1.5f},    {15, 4, 5, 2, false, true, 1},     {12, 12, 1, 1, true, true, 1},
    {6, 2, 6, 2, true, true, 1},        {33, 5, 0, 0, true, false, 0.5f},
};
enum { N_SHAPES = sizeof shapes / sizeof *shapes, TOKENS = 57 };

static void run_route(struct fix *f, const struct shape *h, const float *logits, const float *bias, int32_t *expert,
                      float *weight)
{
    f->ops->step_begin(f->d, 1);
    f->ops->route(f->d, &(struct dn_route){.logits = logits,
                                           .bias = bias,
                                           .n_experts = h->n_experts,
                                           .top_k = h->top_k,
                                           .n_groups = h->n_groups,
                                           .top_groups = h->top_groups,
                                           .normalise = h->normalise,
                                           .scale = h->scale,
                                           .expert = expert,
                                           .weight = weight});
    f->ops->step_end(f->d);
    cr_assert_eq(f->ops->step_wait(f->d, NULL), 0);
}

static void open_tokens(struct fix *f, struct seq *q, const char *isa, unsigned n_threads, uint32_t n)
{
    fix_open(f, isa, n_threads, 16);
    fix_arena(f, 1, 1, 16, 16, 64);
    seq_init(f, q, DN_KV_BF16, n);
    step_clear(f);
    step_add(f, q, 0, n);
}

/* The choices as f32, as the header asks; sigmoid may be off by its last bits, so ranks are only asked for where the
 * choices differ by more: 3 units in the last place of 1 for each of sigmoid and sum. */
static const double slack = 6 * 0x1p-24;

static double sigmoid(double x)
{
    return 1 / (1 + exp(-x));
}

/* By ranks in float64: how many experts certainly come before i, and how many may. */
struct rank {
    uint32_t surely, maybe;
};
static struct rank rank_of(const double *choice, const bool *out, uint32_t n, uint32_t i)
{
    struct rank r = {0, 0};
    for (uint32_t j = 0; j < n; j++) {
        bool is_out = out && out[j];
        if (j == i || is_out)
            continue;
        r.surely += choice[j] > choice[i] + slack;
        r.maybe += choice[j] > choice[i] - slack;
    }
    return r;
}

/* Sets out[i] for experts of groups that are not chosen. Returns false if float64 can't tell which are. */
static bool drop_groups(const struct shape *h, const double *choice, bool *out)
{
    if (h->n_groups <= 1)
        return true;
    uint32_t size = h->n_experts / h->n_groups;
    double value[DN_MAX_EXPERTS];
    for (uint32_t g = 0; g < h->n_groups; g++) {
        double first = -INFINITY, second = -INFINITY;
        for (uint32_t i = g * size; i < (g + 1) * size; i++) {
            if (choice[i] > first) {
                second = first;
                first = choice[i];
            } else if (choice[i] > second) {
                second = choice[i];
            }
        }
        value[g] = size > 1 ? first + second : first;
    }
    for (uint32_t g = 0; g < h->n_groups; g++) {
        struct rank r = rank_of(value, NULL, h->n_groups, g);
        if (r.surely < h->top_groups && r.maybe >= h->top_groups)
            return false;
        for (uint32_t i = g * size; i < (g + 1) * size; i++)
            out[i] = r.surely >= h->top_groups;
    }
    return true;
}

/* Weights: sigmoid within 2 units, the sum of top_k and the quotient (top_k + 3 roundings), the scale one more. */
static void check_token(const struct shape *h, const char *isa, const float *logit, const float *bias,
                        const int32_t *expert, const float *weight)
{
    double choice[DN_MAX_EXPERTS], sum = 0;
    bool out[DN_MAX_EXPERTS] = {false};
    for (uint32_t i = 0; i < h->n_experts; i++)
        choice[i] = sigmoid((double)logit[i]) + (bias ? (double)bias[i] : 0);
    bool certain = drop_groups(h, choice, out);
    for (uint32_t k = 0; k < h->top_k; k++) {
        cr_assert(expert[k] >= 0 && (uint32_t)expert[k] < h->n_experts);
        for (uint32_t j = 0; j < k; j++)
            cr_assert_neq(expert[j], expert[k], "expert %d twice", expert[k]);
        sum += sigmoid((double)logit[expert[k]]);
        if (!certain)
            continue;
        struct rank r = rank_of(choice, out, h->n_experts, (uint32_t)expert[k]);
        cr_assert(!out[expert[k]], "%s: expert %d of a group that is not chosen", isa, expert[k]);
        cr_assert(r.surely <= k && k <= r.maybe, "%s: %u experts: number %u is %d, which is of rank %u to %u", isa,
                  h->n_experts, k, expert[k], r.surely, r.maybe);
    }
    for (uint32_t k = 0; k < h->top_k; k++) {
        double s = sigmoid((double)logit[expert[k]]), want = (h->normalise ? s / (sum + 1e-20) : s) * (double)h->scale;
        cr_assert(fabs((double)weight[k] - want) <= (h->top_k + 8) * 0x1p-24 * want + 1e-37,
                  "%s: weight of %d is %.9g, not %.9g", isa, expert[k], (double)weight[k], want);
    }
}

Test(route, gives_the_best_experts_in_order)
{
    FOR_EACH_ISA(isa)
    {
        for (size_t i = 0; i < N_SHAPES; i++) {
            const struct shape *h = shapes + i;
            struct fix f;
            struct seq q;
            open_tokens(&f, &q, isa, 1 + i % 3, TOKENS);
            float *logits = fix_floats(&f, (size_t)TOKENS * h->n_experts), *bias = fix_floats(&f, h->n_experts),
                  *weight = fix_floats(&f, (size_t)TOKENS * h->top_k);
            int32_t *expert = (int32_t *)fix_floats(&f, (size_t)TOKENS * h->top_k);
            for (uint32_t t = 0; t < TOKENS; t++) /* from nearly equal to saturated */
                fill_normal(logits + (size_t)t * h->n_experts, h->n_experts, 0.1f + 0.3f * (float)t);
            fill_normal(bias, h->n_experts, 0.1f);
            memset(expert, 0xff, (size_t)TOKENS * h->top_k * sizeof *expert);
            memset(weight, 0xff, (size_t)TOKENS * h->top_k * sizeof *weight);
            run_route(&f, h, logits, h->bias ? bias : NULL, expert, weight);
            for (uint32_t t = 0; t < TOKENS; t++)
                check_token(h, isa, logits + (size_t)t * h->n_experts, h->bias ? bias : NULL, expert + t * h->top_k,
                            weight + t * h->top_k);
            fix_close(&f);
        }
    }
}

Test(route, takes_the_lowest_id_of_equals)
{
    FOR_EACH_ISA(isa)
    {
        struct fix f;
        struct seq q;
        struct shape h = {16, 4, 4, 2, true, true, 1};
        open_tokens(&f, &q, isa, 1, 2);
        float *logits = fix_floats(&f, 2 * 16), *bias = fix_floats(&f, 16), weight[8];
        int32_t expert[8];
        /* Token 0: all the same: groups 0 and 1, experts 0 to 3. Token 1: group 3 and, of the rest, group 0 by its id;
         * in them 13 first, then 0, 1, 2. */
        for (uint32_t i = 0; i < 32; i++)
            logits[i] = 0.25f;
        logits[16 + 13] = 1.0f;
        run_route(&f, &h, logits, bias, expert, weight);
        static const int32_t want[8] = {0, 1, 2, 3, 13, 0, 1, 2};
        for (int i = 0; i < 8; i++)
            cr_assert_eq(expert[i], want[i], "%s: %d is %d, not %d", isa, i, expert[i], want[i]);
        cr_assert(fabsf(weight[0] - 0.25f) < 1e-6f && fabsf(weight[3] - 0.25f) < 1e-6f);
        fix_close(&f);
    }
}

/* The bias decides who is chosen, not what it weighs. */
Test(route, bias_chooses_but_does_not_weigh)
{
    struct fix f;
    struct seq q;
    struct shape h = {8, 2, 1, 1, true, false, 2};
    open_tokens(&f, &q, NULL, 1, 1);
    float *logits = fix_floats(&f, 8), *bias = fix_floats(&f, 8), weight[2];
    int32_t expert[2];
    logits[3] = 2.0f;
    bias[6] = 5.0f;
    run_route(&f, &h, logits, bias, expert, weight);
    cr_assert_eq(expert[0], 6);
    cr_assert_eq(expert[1], 3);
    cr_assert(fabsf(weight[0] - 1.0f) < 1e-6f, "%g", (double)weight[0]);
    cr_assert(fabs((double)weight[1] - 2 * sigmoid(2)) < 1e-6);
    fix_close(&f);
}

Test(route, nan_and_infinity_stay_with_their_token)
{
    FOR_EACH_ISA(isa)
    {
        struct fix f;
        struct seq q;
        struct shape h = {64, 8, 8, 2, true, true, 1};
        open_tokens(&f, &q, isa, 2, 5);
        float *logits = fix_floats(&f, 5 * 64), *bias = fix_floats(&f, 64), weight[40];
        int32_t expert[40];
        fill_normal(logits, 5 * 64, 1.0f);
        fill_normal(bias, 64, 0.1f);
        bias[7] = 3.0f;
        logits[64 + 5] = NAN;
        for (int i = 0; i < 64; i++)
            logits[2 * 64 + i] = NAN;
        logits[3 * 64 + 7] = INFINITY;
        for (int i = 0; i < 64; i++)
            logits[4 * 64 + i] = -INFINITY;
        run_route(&f, &h, logits, bias, expert, weight);
        bool has_infinite = false;
        for (int i = 0; i < 40; i++) {
            int t = i / 8;
            cr_assert(expert[i] >= 0 && expert[i] < 64, "%s: token %d: expert %d", isa, t, expert[i]);
            for (int j = t * 8; j < i; j++)
                cr_assert_neq(expert[j], expert[i]);
            cr_assert_eq(!!isnan(weight[i]), t == 1 || t == 2, "%s: token %d: weight %g", isa, t, (double)weight[i]);
            has_infinite |= t == 3 && expert[i] == 7;
            if (t == 4)
                cr_assert_eq(weight[i], 0.0f); /* 0 / (0 + 1e-20) */
        }
        cr_assert(has_infinite);
        fix_close(&f);
    }
}

/* A token alone, in a batch, on any number of threads. */
Test(route, gives_the_same_bits_in_any_batch_and_number_of_threads)
{
    FOR_EACH_ISA(isa)
    {
        struct fix f[3];
        struct seq q;
        const struct shape *h = shapes + 1;
        int32_t all[TOKENS * 8], expert[TOKENS * 8];
        float weights[TOKENS * 8], weight[TOKENS * 8];
        for (unsigned k = 0; k < 3; k++) {
            rng_state = 5;
            open_tokens(f + k, &q, isa, k + 1, TOKENS);
            float *logits = fix_floats(f + k, TOKENS * 256), *bias = fix_floats(f + k, 256);
            fill_normal(logits, TOKENS * 256, 2.0f);
            fill_normal(bias, 256, 0.1f);
            run_route(f + k, h, logits, bias, k ? expert : all, k ? weight : weights);
            cr_assert(k == 0 || (memcmp(all, expert, sizeof all) == 0 && memcmp(weights, weight, sizeof weight) == 0));
            for (uint32_t t = 0; t < TOKENS; t += 7) {
                step_clear(f + k);
                step_add(f + k, &q, t, 1);
                run_route(f + k, h, logits + (size_t)t * 256, bias, expert, weight);
                cr_assert(memcmp(all + t * 8, expert, 32) == 0 && memcmp(weights + t * 8, weight, 32) == 0);
            }
            fix_close(f + k);
        }
    }
}
