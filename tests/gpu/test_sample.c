/* The CUDA sampler against the CPU's on the same logits, in one program.
 *
 * Both have the same values, the same f32 exponents and the same u. Ids may differ only where u (or a cut of top_p or
 * min_p) lies within rounding of an edge: exponentials are off by (2 + 1.2 |a|) 2^-23 (CUDA) and 2^-22 (CPU) relative,
 * which moves a running sum by 4.1e-6 + 0.3e-6 of the whole on average over |a| <= ln n = 12; 2^-37 an id adds 1.2e-6,
 * f32 sums of 256 values on the CPU 1.2e-6. EDGE is their sum, and ref_accepts() decides in float64. */
#include "gpu/gpu.h"

#include "kernels/sampling.h"

#define EDGE 7e-6

enum { ROWS = 64, SLOTS = 4, BIG = 163840, HUGE_VOCAB = 600001 };

static void both_open(struct gpu *g, struct gpu *c, uint32_t n_vocab)
{
    const struct dn_step_limits limits = {.tokens = 4 * ROWS, .seqs = ROWS, .rows = ROWS, .pages = ROWS, .tags = ROWS};
    const struct dn_device_conf conf = {.limits = limits, .n_slots = SLOTS, .n_vocab = n_vocab, .n_threads = 4};
    struct dn_err err = {0};
    gpu_open(g, &limits, SLOTS, n_vocab);
    cr_assert_eq(dn_kernels_open_cpu(&conf, &c->d, &err), 0, "%s", err.text);
    c->ops = c->d->ops;
    c->s = c->ops->step_arrays(c->d);
}

struct call {
    struct dn_sample_rows p;
    uint64_t *tags;
    uint32_t n_times, n_buffers;
    size_t stride;
};

static void sample_ops(struct gpu *g, void *ctx)
{
    const struct call *c = ctx;
    if (c->tags)
        g->ops->check_tags(g->d, &(struct dn_check_tags){.table = c->tags, .n_pages = ROWS});
    for (uint32_t i = 0; i < (c->n_times ? c->n_times : 1); i++) {
        struct dn_sample_rows p = c->p;
        if (c->n_buffers)
            p.logits += i % c->n_buffers * c->stride;
        g->ops->sample_rows(g->d, &p);
    }
}

/* ---- Logits and parameters ---- */

static uint32_t below(uint32_t n)
{
    return (uint32_t)(gpu_rng() % n);
}

static void make_logits(float *x, uint32_t n_vocab, uint32_t n, unsigned kind)
{
    static const float sigma[] = {1.0f, 3.0f, 9.0f, 0.01f};
    for (uint32_t i = 0; i < n; i++) {
        float z = gpu_normal();
        switch (kind) {
        case 4:
            x[i] = rintf(z * 6) / 2;
            break; /* ties */
        case 5:
            x[i] = (float)below(4);
            break; /* few values */
        case 6:
            x[i] = -7.25f;
            break; /* one value */
        case 7:
            x[i] = below(3) ? -INFINITY : 2 * z;
            break; /* ruled out */
        case 8:
            x[i] = 1e30f * z;
            break; /* far apart */
        case 9:
            x[i] = 1e-30f * z;
            break; /* nearly zero */
        case 10:
            x[i] = 20000.0f + z;
            break; /* far from zero */
        case 11:
            x[i] = below(2) ? -0.0f : below(50) ? 0.0f : z;
            break; /* both zeros */
        default:
            x[i] = sigma[kind % 4] * z;
        }
    }
    if (kind == 12)
        x[below(n)] = 30; /* a peak */
    if (kind == 13)
        x[below(n)] = NAN;
    if (kind == 14)
        x[below(n)] = INFINITY;
    if (kind == 15)
        for (uint32_t i = 0; i < n; i++)
            x[i] = -INFINITY;
    if (kind == 15 && below(2))
        x[below(n)] = -3; /* the only possible one */
    if (kind == 16)
        x[below(n)] = -NAN;
    for (uint32_t i = n; i < n_vocab; i++)
        x[i] = i % 2 ? NAN : 1e9f; /* ids without a token */
}
enum { KINDS = 17 };

static void make_sample(struct dn_sample *s, uint32_t n)
{
    *s = (struct dn_sample){.top_p = 1, .repetition = 1, .slot = -1, .target = -1, .n_top = -1};
    s->temperature = below(6) ? 0.05f + 2 * (float)gpu_unit() : 0;
    s->seed = gpu_rng();
    s->counter = below(2) ? below(1000) : gpu_rng();
    if (below(2))
        s->top_p = below(4) ? (float)gpu_unit() : below(2) ? 0.9999f : 0.0f;
    if (below(3) == 0)
        s->top_k = below(3) ? 1 + (int32_t)below(100) : 1 + (int32_t)below(n);
    if (below(4) == 0)
        s->min_p = (float)(gpu_unit() * gpu_unit());
    if (below(3) == 0) {
        s->slot = (int32_t)below(SLOTS);
        s->repetition = below(2) ? 0.5f + 2 * (float)gpu_unit() : 1;
        s->frequency = below(2) ? (float)gpu_unit() : 0;
        s->presence = below(2) ? (float)gpu_unit() - 0.3f : 0;
    }
    if (below(4) == 0) {
        s->n_ban = (int32_t)below(DN_MAX_BAN + 1);
        for (int32_t i = 0; i < s->n_ban; i++)
            s->ban[i] = (int32_t)below(n + 5) - 2;
    }
    if (below(8) == 0)
        s->target = (int32_t)below(n + 2);
    if (below(2))
        s->n_top = (int32_t)below(DN_MAX_TOP + 1);
}

/* ---- The reference in float64, for ids that differ ---- */

struct ref {
    float value;
    uint32_t id;
    double weight;
    int kept; /* 1 yes, -1 rounding decides */
};

static int ref_by_rank(const void *a, const void *b)
{
    const struct ref *x = a, *y = b;
    return x->value != y->value ? (x->value > y->value ? -1 : 1) : x->id < y->id ? -1 : 1;
}
static int ref_by_id(const void *a, const void *b)
{
    const struct ref *x = a, *y = b;
    return x->id < y->id ? -1 : x->id > y->id;
}

/* Is `id` what u falls on, within EDGE (and the weight of ids that rounding may keep or not)? */
static bool ref_accepts(const float *x, uint32_t n, const uint16_t *count, const struct dn_sample *s, int32_t id)
{
    struct ref *r = malloc(n * sizeof *r);
    for (uint32_t i = 0; i < n; i++)
        r[i] = (struct ref){.value = x[i], .id = i};
    for (uint32_t i = 0; s->slot >= 0 && i < n; i++)
        if (count[i])
            r[i].value = dn_penalised(x[i], count[i], s->repetition, s->frequency, s->presence);
    for (int32_t i = 0; i < s->n_ban; i++)
        if (s->ban[i] >= 0 && (uint32_t)s->ban[i] < n)
            r[s->ban[i]].value = -INFINITY;
    qsort(r, n, sizeof *r, ref_by_rank);
    uint32_t left = n;
    if (s->top_k > 0 && (uint32_t)s->top_k < n)
        for (left = (uint32_t)s->top_k; left < n && r[left].value == r[s->top_k - 1].value; left++)
            ;
    float inv_t = 1.0f / s->temperature;
    double mass = 0, at = 0, sum = 0, unsure = 0;
    for (uint32_t i = 0; i < left; i++)
        mass += r[i].weight = exp((double)((r[i].value - r[0].value) * inv_t));
    for (uint32_t i = 0; i < left; i++) {
        double need = (double)s->top_p * mass, near_min = fabs(r[i].weight - (double)s->min_p) / (double)s->min_p;
        r[i].kept = i == 0 || s->top_p >= 1 || at < need;
        if (i && s->top_p < 1 && fabs(at - need) < EDGE * mass)
            r[i].kept = -1;
        if (s->min_p > 0 && r[i].weight < (double)s->min_p && near_min > EDGE)
            r[i].kept = 0;
        else if (s->min_p > 0 && near_min <= EDGE && r[i].kept)
            r[i].kept = -1;
        at += r[i].weight;
        sum += r[i].kept ? r[i].weight : 0;
        unsure += r[i].kept < 0 ? r[i].weight : 0;
    }
    double u = (double)dn_sample_bits(s->seed, s->counter) * 0x1p-53, before = 0, own = -1;
    qsort(r, n, sizeof *r, ref_by_id);
    for (uint32_t i = 0; i < (uint32_t)id; i++)
        before += r[i].kept ? r[i].weight / sum : 0;
    if (r[id].kept)
        own = r[id].weight / sum;
    double slack = EDGE + unsure / sum;
    bool ok = own >= 0 && u > before - slack && u < before + own + slack;
    if (!ok)
        printf("  u %.12g, id %d covers %.12g..%.12g, slack %g, value %g\n", u, id, before, before + own, slack,
               (double)r[id].value);
    free(r);
    return ok;
}

/* ---- Comparison ---- */

struct tally {
    uint32_t n_rows, n_other, n_wrong;
    double worst;
};

static void fail_row(struct tally *t, const char *what, uint32_t n, unsigned kind, const struct dn_sample *s,
                     const struct dn_sampled *got, const struct dn_sampled *want)
{
    if (t->n_wrong++ < 12)
        printf(
            "WRONG %s: n %u kind %u T %g k %d p %g min %g slot %d (%g %g %g) bans %d target %d top %d: id %d, not %d; "
            "logprob %g, not %g\n",
            what, n, kind, (double)s->temperature, s->top_k, (double)s->top_p, (double)s->min_p, s->slot,
            (double)s->repetition, (double)s->frequency, (double)s->presence, s->n_ban, s->target, s->n_top, got->id,
            want->id, (double)got->logprob, (double)want->logprob);
}

static bool near(struct tally *t, float got, double want)
{
    if (isinf(want) || isnan(want))
        return (double)got == want || (isnan(want) && isnan(got));
    double error = fabs((double)got - want) / (1e-5 + 2.4e-7 * fabs(want)); /* the second term: rounded to f32 */
    t->worst = error > t->worst ? error : t->worst;
    return error <= 1;
}

static void compare_row(struct tally *t, const float *x, uint32_t n, const uint16_t *count, unsigned kind,
                        const struct dn_sample *s, const struct dn_sampled *got, const struct dn_sampled *want)
{
    t->n_rows++;
    if (got->id != want->id) {
        t->n_other++;
        if (got->id < 0 || want->id < 0 || (uint32_t)got->id >= n || s->target >= 0 ||
            s->temperature < DN_GREEDY_BELOW || !ref_accepts(x, n, count, s, got->id)) {
            fail_row(t, "id", n, kind, s, got, want);
            return;
        }
    }
    double lp = got->id == want->id ? want->logprob : (double)want->logprob + (double)x[got->id] - (double)x[want->id];
    bool ok = s->n_top < 0 || got->id < 0 ? got->logprob == 0 : near(t, got->logprob, lp);
    ok = ok && got->n_top == want->n_top;
    for (int32_t i = 0; i < DN_MAX_TOP; i++)
        ok = ok && got->top_id[i] == want->top_id[i] && near(t, got->top_logprob[i], (double)want->top_logprob[i]);
    if (!ok)
        fail_row(t, "log-probabilities", n, kind, s, got, want);
}

/* Slots' counts as both devices should have them. */
static uint16_t *counts_make(struct gpu *g, struct gpu *c, uint32_t n_vocab, uint32_t n)
{
    uint16_t *count = calloc((size_t)SLOTS * n_vocab, sizeof *count);
    int32_t *prompt = malloc(3000 * sizeof *prompt);
    for (int32_t slot = 0; slot < SLOTS; slot++) {
        size_t n_prompt = slot ? below(3000) : 0;
        for (size_t i = 0; i < n_prompt; i++)
            count[(size_t)slot * n_vocab + (uint32_t)(prompt[i] = (int32_t)below(n))] = DN_COUNT_PROMPT;
        g->ops->slot_fill(g->d, slot, prompt, n_prompt);
        c->ops->slot_fill(c->d, slot, prompt, n_prompt);
    }
    free(prompt);
    return count;
}

/* One step on both devices: n_rows rows of `kind_of`, sampled with random parameters. */
static void compare_step(struct gpu *g, struct gpu *c, struct call *gc, uint32_t list, uint32_t n_rows, unsigned first,
                         float *x, uint16_t *count, uint32_t stride, struct tally *t)
{
    uint32_t n_vocab = gc->p.n_vocab, n = gc->p.n_valid;
    struct call cc = *gc;
    cc.p.logits = x;
    gpu_rows_step(g, DN_STEP_DECODE, n_rows);
    gpu_rows_step(c, DN_STEP_DECODE, n_rows);
    for (uint32_t i = 0; i < n_rows; i++) {
        make_logits(x + (size_t)i * n_vocab, n_vocab, n, (first + i) % KINDS);
        make_sample(g->s->sample + i, n);
        g->s->slot[i] = c->s->slot[i] = g->s->sample[i].slot;
        g->s->token_id[i] = c->s->token_id[i] = (int32_t)below(n);
        if (below(3) == 0) { /* often the same id twice */
            uint32_t j = below(i + 1);
            g->s->token_id[i] = c->s->token_id[i] = g->s->token_id[j];
        }
        g->s->token_count[i] = c->s->token_count[i] = below(2);
        if (g->s->token_count[i] && g->s->slot[i] >= 0)
            count[(size_t)g->s->slot[i] * stride + (uint32_t)g->s->token_id[i]]++;
    }
    memcpy(c->s->sample, g->s->sample, n_rows * sizeof *c->s->sample);
    memset(g->s->result, 0x55, ROWS * sizeof *g->s->result);
    g->ops->upload(g->d, (void *)gc->p.logits, x, (size_t)n_rows * n_vocab * sizeof *x);
    gpu_step(g, list, sample_ops, gc);
    gpu_step(c, list, sample_ops, &cc);
    for (uint32_t i = 0; i < n_rows; i++) {
        const struct dn_sample *s = g->s->sample + i;
        compare_row(t, x + (size_t)i * n_vocab, n, count + (size_t)(s->slot < 0 ? 0 : s->slot) * stride,
                    (first + i) % KINDS, s, g->s->result + i, c->s->result + i);
    }
}

Test(sample, same_as_the_cpu)
{
    static const struct {
        uint32_t n_vocab, n_valid, n_rows, list;
    } shape[] = {{1, 1, 64, 7},
                 {7, 7, 64, 7},
                 {1000, 1000, 64, 7},
                 {1001, 937, 17, 7},
                 {49152, 49152, 33, 7},
                 {BIG, BIG, 64, 1},
                 {BIG, BIG, 1, 1},
                 {BIG, BIG, 9, 1},
                 {BIG + 1, BIG - 300, 8, 7},
                 {HUGE_VOCAB, HUGE_VOCAB, 3, 7}};
    struct gpu g, c = {0};
    both_open(&g, &c, HUGE_VOCAB);
    float *x = malloc((size_t)ROWS * (BIG + 1) * sizeof *x);
    void *logits = gpu_alloc(&g, (size_t)ROWS * (BIG + 1) * sizeof *x);
    struct call recorded = {.p = {logits, BIG, BIG}}, huge = {.p = {logits, HUGE_VOCAB, HUGE_VOCAB}};
    gpu_prepare(&g, 1, sample_ops, &recorded);
    gpu_prepare(&g, 2, sample_ops, &huge);
    for (size_t k = 0; k < sizeof shape / sizeof *shape; k++) {
        struct call call = {.p = {logits, shape[k].n_vocab, shape[k].n_valid}};
        struct tally t = {0};
        gpu_rng_state = 100 + k;
        uint16_t *count = counts_make(&g, &c, HUGE_VOCAB, shape[k].n_valid);
        uint32_t rounds = shape[k].n_vocab <= 1001 ? 40 : shape[k].n_rows > 32 ? 4 : 12;
        for (uint32_t round = 0; round < rounds; round++)
            compare_step(&g, &c, &call, shape[k].list, shape[k].n_rows, round * shape[k].n_rows, x, count, HUGE_VOCAB,
                         &t);
        printf("vocabulary %u of %u, %u rows a step: %u rows, %u other ids, log-probabilities within %.2f of their "
               "bound, %u wrong\n",
               shape[k].n_valid, shape[k].n_vocab, shape[k].n_rows, t.n_rows, t.n_other, t.worst, t.n_wrong);
        fflush(stdout);
        cr_expect_eq(t.n_wrong, 0);
        /* Edges are EDGE of all draws' room for every id: rare, where there are few ids. */
        cr_expect(shape[k].n_vocab > 1001 || t.n_other * 100 <= t.n_rows, "%u of %u ids differ", t.n_other, t.n_rows);
        free(count);
    }
    free(x);
    c.ops->close(c.d);
    gpu_close(&g);
}

Test(sample, a_row_does_not_depend_on_its_batch)
{
    struct gpu g;
    const struct dn_step_limits limits = {.tokens = ROWS, .seqs = ROWS, .rows = ROWS, .pages = ROWS, .tags = 1};
    gpu_open(&g, &limits, 0, BIG);
    float *x = malloc((size_t)ROWS * BIG * sizeof *x);
    gpu_rng_state = 7;
    for (unsigned i = 0; i < ROWS; i++)
        make_logits(x + (size_t)i * BIG, BIG, BIG, i % 13);
    float *logits = gpu_copy(&g, x, (size_t)ROWS * BIG * sizeof *x);
    struct call call = {.p = {logits, BIG, BIG}}, one = call;
    gpu_prepare(&g, 1, sample_ops, &call);
    gpu_rows_step(&g, DN_STEP_DECODE, ROWS);
    struct dn_sample s[ROWS];
    for (uint32_t i = 0; i < ROWS; i++) {
        do
            make_sample(s + i, BIG);
        while (s[i].slot >= 0);
        g.s->sample[i] = s[i];
    }
    gpu_step(&g, 1, sample_ops, &call);
    struct dn_sampled first[ROWS];
    memcpy(first, g.s->result, sizeof first);
    gpu_step(&g, 1, sample_ops, &call);
    cr_expect_arr_eq(first, g.s->result, sizeof first, "a second time");
    for (uint32_t i = 0; i < ROWS; i++) {
        one.p.logits = logits + (size_t)i * BIG;
        gpu_rows_step(&g, i % 2 ? DN_STEP_DECODE : DN_STEP_PREFILL, 1);
        g.s->sample[0] = s[i];
        gpu_step(&g, 7, sample_ops, &one);
        cr_expect_arr_eq(first + i, g.s->result, sizeof *first, "row %u alone", i);
    }
    free(x);
    gpu_close(&g);
}

/* Prefill steps may count many output ids of a slot at once, the same one too, up to the maximum. */
Test(sample, counts_of_a_long_step_saturate)
{
    enum { N = 1000, TOKENS = 4 * ROWS };
    struct gpu g, c = {0};
    both_open(&g, &c, N);
    float x[N];
    gpu_rng_state = 3;
    make_logits(x, N, N, 0);
    struct call call = {.p = {gpu_copy(&g, x, sizeof x), N, N}}, cpu = {.p = {x, N, N}};
    gpu_prepare(&g, 1, sample_ops, &call);
    const int32_t prompt[] = {5, 6, 5};
    struct gpu *both[] = {&g, &c};
    for (int k = 0; k < 2; k++) {
        struct dn_step *s = both[k]->s;
        both[k]->ops->slot_fill(both[k]->d, 1, prompt, 3);
        for (int round = 0; round < 140; round++) { /* 140 * 256 > 0x7fff */
            gpu_rows_step(both[k], DN_STEP_PREFILL, 1);
            s->n_tokens = TOKENS;
            s->token_start[1] = s->kv_len[0] = TOKENS;
            s->slot[0] = 1;
            for (int i = 0; i < TOKENS; i++) {
                s->token_id[i] = i < TOKENS - 2 ? 5 : 990 + i % 2;
                s->position[i] = i;
                s->token_seq[i] = 0;
                s->token_count[i] = 1;
            }
            s->row_token[0] = TOKENS - 1;
            s->sample[0] = (struct dn_sample){.temperature = 0, .top_p = 1, .repetition = 1, .slot = 1, .target = -1};
            gpu_step(both[k], 7, sample_ops, k ? &cpu : &call);
        }
        s->sample[0].frequency = 1e-3f; /* now that id's value tells its count */
        for (int i = 0; i < TOKENS; i++)
            s->token_count[i] = 0;
    }
    /* A bias towards id 5 that only a count of exactly 0x7fff meets: it wins by 1e-3 less, loses by 1e-3 more. */
    for (int more = 0; more < 2; more++) {
        for (int i = 0; i < N; i++)
            x[i] = -100;
        x[5] = 32.767f + (more ? 1e-3f : -1e-3f);
        x[7] = 0;
        g.ops->upload(g.d, (void *)call.p.logits, x, sizeof x);
        for (int k = 0; k < 2; k++) {
            gpu_step(both[k], 7, sample_ops, k ? &cpu : &call);
            cr_expect_eq(both[k]->s->result[0].id, more ? 5 : 7, "%s, %d: id %d", k ? "cpu" : "cuda", more,
                         both[k]->s->result[0].id);
        }
    }
    c.ops->close(c.d);
    gpu_close(&g);
}

Test(sample, bad_sequences_get_no_id)
{
    enum { N = 5000 };
    struct gpu g;
    const struct dn_step_limits limits = {.tokens = ROWS, .seqs = ROWS, .rows = ROWS, .pages = ROWS, .tags = ROWS};
    gpu_open(&g, &limits, 1, N);
    float *x = malloc((size_t)ROWS * N * sizeof *x);
    uint64_t tag[ROWS];
    gpu_rng_state = 4;
    for (unsigned i = 0; i < ROWS; i++) {
        make_logits(x + (size_t)i * N, N, N, 1);
        tag[i] = gpu_rng();
    }
    struct call call = {.p = {gpu_copy(&g, x, (size_t)ROWS * N * sizeof *x), N, N},
                        .tags = gpu_copy(&g, tag, sizeof tag)};
    gpu_prepare(&g, 1, sample_ops, &call);
    for (int round = 0; round < 20; round++) {
        uint32_t n = 1 + below(ROWS);
        bool bad[ROWS];
        gpu_rows_step(&g, DN_STEP_DECODE, n);
        for (uint32_t i = 0; i < n; i++) {
            bad[i] = below(4) == 0;
            g.s->check[i] = 1;
            g.s->page_start[i + 1] = (int32_t)i + 1;
            g.s->page[i] = i;
            g.s->tag[i] = tag[i] ^ bad[i];
            g.s->sample[i].temperature = 1;
            g.s->sample[i].n_top = 3;
        }
        gpu_step(&g, 1, sample_ops, &call);
        for (uint32_t i = 0; i < n; i++) {
            const struct dn_sampled *r = g.s->result + i;
            cr_expect(bad[i] ? r->id == -1 && r->logprob == 0 && r->n_top == 0 : r->id >= 0 && r->n_top == 3,
                      "row %u of %u is %s: id %d", i, n, bad[i] ? "bad" : "fine", r->id);
        }
    }
    free(x);
    gpu_close(&g);
}

Test(sample, frequencies_follow_the_probabilities)
{
    enum { N = 20, ROUNDS = 3000 };
    struct gpu g;
    const struct dn_step_limits limits = {.tokens = ROWS, .seqs = ROWS, .rows = ROWS, .pages = ROWS, .tags = 1};
    gpu_open(&g, &limits, 0, N);
    float x[ROWS * N];
    double p[N], sum = 0, chi = 0;
    uint32_t count[N] = {0};
    gpu_rng_state = 5;
    make_logits(x, N, N, 0);
    for (int i = 0; i < N; i++)
        sum += p[i] = exp((double)x[i] / 0.8);
    for (int i = 1; i < ROWS; i++)
        memcpy(x + i * N, x, N * sizeof *x);
    struct call call = {.p = {gpu_copy(&g, x, sizeof x), N, N}};
    gpu_prepare(&g, 1, sample_ops, &call);
    gpu_rows_step(&g, DN_STEP_DECODE, ROWS);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        for (uint32_t i = 0; i < ROWS; i++) {
            g.s->sample[i].temperature = 0.8f;
            g.s->sample[i].seed = 1234 + round;
            g.s->sample[i].counter = i;
        }
        gpu_step(&g, 1, sample_ops, &call);
        for (int i = 0; i < ROWS; i++) {
            cr_assert(g.s->result[i].id >= 0 && g.s->result[i].id < N);
            count[g.s->result[i].id]++;
        }
    }
    for (int i = 0; i < N; i++) {
        double want = p[i] / sum * ROUNDS * ROWS;
        chi += (count[i] - want) * (count[i] - want) / want;
    }
    printf("chi square of %d draws: %.1f (19 degrees of freedom)\n", ROUNDS * ROWS, chi);
    cr_expect_lt(chi, 50.0); /* more has a chance of 1 in 8,000, and the seed is fixed */
    gpu_close(&g);
}

Test(sample_bench, times)
{
    enum { TIMES = 40 };
    struct gpu g;
    const struct dn_step_limits limits = {.tokens = ROWS, .seqs = ROWS, .rows = ROWS, .pages = ROWS, .tags = 1};
    gpu_open(&g, &limits, 0, BIG);
    size_t stride = (size_t)ROWS * BIG;
    enum { BUFFERS = 6 };
    float *x = malloc(stride * sizeof *x), *logits = gpu_alloc(&g, BUFFERS * stride * sizeof *x);
    gpu_rng_state = 9;
    for (uint32_t i = 0; i < ROWS; i++)
        make_logits(x + (size_t)i * BIG, BIG, BIG, 1 + i % 2);
    for (int b = 0; b < BUFFERS; b++)
        g.ops->upload(g.d, logits + (size_t)b * stride, x, stride * sizeof *x);
    struct call many = {.p = {logits, BIG, BIG}, .n_times = TIMES, .n_buffers = BUFFERS, .stride = stride}, few = many;
    few.n_times = TIMES / 4;
    gpu_prepare(&g, 1, sample_ops, &many);
    gpu_prepare(&g, 2, sample_ops, &few);
    static const char *const what[] = {"greedy",         "temperature",     "top-p 0.9", "top-k 50 top-p 0.9",
                                       "greedy logprob", "top-p 0.9 top-20"};
    for (size_t k = 0; k < sizeof what / sizeof *what; k++)
        for (uint32_t n = 1; n <= 64; n *= 8) {
            gpu_rows_step(&g, DN_STEP_DECODE, n);
            for (uint32_t i = 0; i < n; i++) {
                struct dn_sample *s = g.s->sample + i;
                s->temperature = k == 0 || k == 4 ? 0 : 1;
                s->top_p = k == 2 || k == 3 || k == 5 ? 0.9f : 1;
                s->top_k = k == 3 ? 50 : 0;
                s->n_top = k == 4 ? 0 : k == 5 ? 20 : -1;
                s->seed = i;
            }
            double us = (gpu_time(&g, 1, sample_ops, &many) - gpu_time(&g, 2, sample_ops, &few)) / (TIMES - TIMES / 4);
            double tbs = (double)n * BIG * 4 / us * 1e-6;
            printf("BENCH sample %s %ux%u %.2f us %.3f TB/s %.1f %%\n", what[k], n, BIG, us, tbs, tbs / 4.65 * 100);
        }
    fflush(stdout);
    free(x);
    gpu_close(&g);
}
