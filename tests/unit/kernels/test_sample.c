/* The sampler against a naive float64 reference that sorts everything. */
#include "unit/kernels/oracle.h"

#include "kernels/cpu/device.h"

/* ---- Running rows ---- */

static struct dn_sample plain(void)
{
    return (struct dn_sample){
        .temperature = 1.0f, .top_p = 1.0f, .repetition = 1.0f, .slot = -1, .target = -1, .n_top = -1};
}

/* A step of n rows, one token each, of one sequence. */
static void rows_begin(struct fix *f, uint32_t n)
{
    static struct seq q; /* its pages are never touched */
    q.n_pages = 0;
    f->layout.page_tokens = 2048;
    step_clear(f);
    step_add(f, &q, 0, n);
    f->s->n_rows = n;
    for (uint32_t i = 0; i < n; i++) {
        f->s->row_token[i] = (int32_t)i;
        f->s->sample[i] = plain();
    }
}

static void rows_run(struct fix *f, const float *logits, uint32_t n_vocab, uint32_t n_valid)
{
    f->ops->step_begin(f->d, 1);
    f->ops->sample_rows(f->d, &(struct dn_sample_rows){logits, n_vocab, n_valid});
    f->ops->step_end(f->d);
    cr_assert_eq(f->ops->step_wait(f->d, NULL), 0);
}

static struct dn_sampled one(struct fix *f, const float *logits, uint32_t n, const struct dn_sample *s)
{
    rows_begin(f, 1);
    f->s->sample[0] = *s;
    rows_run(f, logits, n, n);
    return f->s->result[0];
}

/* ---- The reference ---- */

struct ref {
    double value, weight;
    uint32_t id;
    bool kept;
};

static int by_value(const void *a, const void *b)
{
    const struct ref *x = a, *y = b;
    if (x->value != y->value)
        return x->value > y->value ? -1 : 1;
    return x->id < y->id ? -1 : 1;
}

static int by_id(const void *a, const void *b)
{
    const struct ref *x = a, *y = b;
    return x->id < y->id ? -1 : 1;
}

/* r [n] with values set: marks what is kept. Returns false when rounding could decide: a cut closer than 1e-6. */
static bool ref_keep(struct ref *r, uint32_t n, const struct dn_sample *s)
{
    bool clear = true;
    qsort(r, n, sizeof *r, by_value);
    uint32_t left = n;
    if (s->top_k > 0 && (uint32_t)s->top_k < n) {
        left = (uint32_t)s->top_k;
        while (left < n && r[left].value == r[s->top_k - 1].value)
            left++;
    }
    double sum = 0, at = 0;
    for (uint32_t i = 0; i < n; i++) {
        r[i].weight = exp((r[i].value - r[0].value) / (double)s->temperature);
        r[i].kept = false;
        sum += i < left ? r[i].weight : 0;
    }
    for (uint32_t i = 0; i < left; i++) {
        r[i].kept = i == 0 || s->top_p >= 1.0f || at < (double)s->top_p * sum;
        if (i && s->top_p < 1.0f && fabs(at - (double)s->top_p * sum) < 1e-6 * sum)
            clear = false;
        at += r[i].weight;
        if (fabs(r[i].weight - (double)s->min_p) < 1e-6)
            clear = false;
        if (r[i].weight < (double)s->min_p || r[i].weight < 1e-36)
            r[i].kept = false;
    }
    qsort(r, n, sizeof *r, by_id);
    return clear;
}

static double ref_uniform(const struct dn_sample *s)
{
    uint32_t counter[4] = {(uint32_t)s->counter, (uint32_t)(s->counter >> 32)}, x[4];
    dn_philox(counter, (uint32_t[2]){(uint32_t)s->seed, (uint32_t)(s->seed >> 32)}, x);
    return (double)(((uint64_t)x[0] << 32 | x[1]) >> 11) / 9007199254740992.0;
}

/* The id that u falls on, or -1 if it falls within 1e-5 of an edge. */
static int32_t ref_draw(const struct ref *r, uint32_t n, double u)
{
    double sum = 0, at = 0;
    for (uint32_t i = 0; i < n; i++)
        sum += r[i].kept ? r[i].weight : 0;
    for (uint32_t i = 0; i < n; i++) {
        if (!r[i].kept)
            continue;
        at += r[i].weight / sum;
        if (fabs(at - u) < 1e-5)
            return -1;
        if (u < at)
            return (int32_t)r[i].id;
    }
    return -1;
}

/* ---- Tests ---- */

Test(sample, philox_gives_the_published_answers)
{
    static const uint32_t kat[3][10] = {
        {0, 0, 0, 0, 0, 0, 0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8},
        {0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff, 0x408f276d, 0x41c83b0e, 0xa20bc7c6,
         0x6d5451fd},
        {0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344, 0xa4093822, 0x299f31d0, 0xd16cfe09, 0x94fdcceb, 0x5001e420,
         0x24126ea1},
    };
    for (int i = 0; i < 3; i++) {
        uint32_t out[4];
        dn_philox(kat[i], kat[i] + 4, out);
        for (int j = 0; j < 4; j++)
            cr_assert_eq(out[j], kat[i][6 + j]);
    }
}

/* Random cases: the same draw as the reference, hence the same set, order and probabilities. */
static void check_random(const char *isa, uint64_t seed)
{
    enum { MAX = 3000, DRAWS = 64 };
    struct fix f;
    rng_state = seed;
    uint32_t n = 1 + rng_below(rng_below(4) ? 200 : MAX), decided = 0;
    fix_open(&f, isa, 1 + seed % 3, MAX);
    float *x = calloc(DRAWS * MAX, sizeof *x), sigma = 0.3f + 4.0f * (float)rng_unit();
    bool ties = rng_below(2);
    struct dn_sample s = plain();
    s.temperature = rng_below(3) ? 0.1f + 2.0f * (float)rng_unit() : 1.0f;
    s.top_k = rng_below(2) ? 1 + (int32_t)rng_below(n + 2) : rng_below(2) ? 0 : -1;
    s.top_p = rng_below(3) ? (float)rng_unit() : 1.0f;
    s.min_p = rng_below(3) ? 0.0f : (float)(rng_unit() * rng_unit());
    s.seed = rng();
    s.n_ban = rng_below(2) ? (int32_t)rng_below(DN_MAX_BAN + 1) : 0;
    for (int32_t i = 0; i < s.n_ban; i++)
        s.ban[i] = (int32_t)rng_below(n + 5);
    struct ref *r = calloc(n, sizeof *r);
    for (uint32_t i = 0; i < n; i++) {
        x[i] = sigma * rng_normal();
        x[i] = ties ? rintf(x[i] * 2) / 2 : x[i];
        r[i] = (struct ref){.value = (double)x[i], .id = i};
    }
    uint32_t allowed = n;
    for (int32_t i = 0; i < s.n_ban; i++) {
        if ((uint32_t)s.ban[i] < n && r[s.ban[i]].value > -INFINITY) {
            r[s.ban[i]].value = -INFINITY;
            allowed--;
        }
    }
    for (uint32_t i = 1; i < DRAWS; i++)
        memcpy(x + (size_t)i * n, x, n * sizeof *x);
    rows_begin(&f, DRAWS);
    for (uint32_t i = 0; i < DRAWS; i++) {
        f.s->sample[i] = s;
        f.s->sample[i].counter = i * 0x100000001ull;
    }
    rows_run(&f, x, n, n);
    bool clear = allowed && ref_keep(r, n, &s);
    for (uint32_t i = 0; i < DRAWS; i++) {
        int32_t got = f.s->result[i].id, want = clear ? ref_draw(r, n, ref_uniform(f.s->sample + i)) : -1;
        cr_assert(allowed ? got >= 0 && (uint32_t)got < n : got == -1, "%s, seed %lu: id %d", isa, seed, got);
        if (want >= 0) {
            decided++;
            cr_assert_eq(got, want, "%s, seed %lu, n %u, T %g, k %d, p %g, min %g, draw %u: id %d, not %d", isa, seed,
                         n, (double)s.temperature, s.top_k, (double)s.top_p, (double)s.min_p, i, got, want);
        }
    }
    cr_assert(!clear || n > 1000 || decided > DRAWS / 2, "%s, seed %lu: only %u draws decided", isa, seed, decided);
    free(x);
    free(r);
    fix_close(&f);
}

Test(sample, draws_what_the_reference_draws)
{
    FOR_EACH_ISA(isa)
    {
        for (uint64_t seed = 1; seed <= 1500; seed++)
            check_random(isa, seed);
    }
}

Test(sample, large_vocabularies_take_the_deep_paths)
{
    enum { N = 70001 };
    struct fix f;
    fix_open(&f, NULL, 2, N);
    float *x = malloc(N * sizeof *x);
    struct ref *r = calloc(N, sizeof *r);
    for (int kind = 0; kind < 4; kind++) {
        rng_state = 50 + (unsigned)kind;
        for (uint32_t i = 0; i < N; i++) /* flat, all equal, spread, few values */
            x[i] = kind == 0   ? 0.01f * rng_normal()
                   : kind == 1 ? 3.0f
                   : kind == 2 ? 9.0f * rng_normal()
                               : (float)rng_below(4);
        static const struct {
            int32_t k;
            float p, min;
        } cut[] = {{0, 0.9f, 0}, {0, 0.999f, 0}, {50, 1, 0}, {60000, 0.5f, 0},
                   {1, 1, 0},    {0, 1, 0.05f},  {0, 1, 0},  {40000, 1, 0}};
        for (size_t c = 0; c < sizeof cut / sizeof *cut; c++) {
            struct dn_sample s = plain();
            s.top_k = cut[c].k;
            s.top_p = cut[c].p;
            s.min_p = cut[c].min;
            s.seed = 99;
            for (uint32_t i = 0; i < N; i++)
                r[i] = (struct ref){.value = (double)x[i], .id = i};
            bool clear = ref_keep(r, N, &s);
            double sum = 0, at = 0;
            for (uint32_t i = 0; i < N; i++)
                sum += r[i].kept ? r[i].weight : 0;
            for (s.counter = 0; s.counter < 8; s.counter++) {
                int32_t got = one(&f, x, N, &s).id;
                cr_assert(got >= 0 && got < N);
                /* A cut within 1e-6 may go either way: by one id here. Its mass is 1e-5, so u must still fit. */
                cr_assert(r[got].kept || !clear, "kind %d, cut %zu: id %d was cut away", kind, c, got);
                at = 0;
                for (int32_t i = 0; i <= got; i++)
                    at += r[i].kept ? r[i].weight / sum : 0;
                double u = ref_uniform(&s), own = r[got].kept ? r[got].weight / sum : 0;
                cr_assert(u < at + 2e-5 && u > at - own - 2e-5, "kind %d, cut %zu: u %g, id %d covers %g..%g", kind, c,
                          u, got, at - own, at);
            }
        }
    }
    free(r);
    free(x);
    fix_close(&f);
}

Test(sample, frequencies_follow_the_probabilities)
{
    enum { N = 20, ROUNDS = 800, ROWS = 250 };
    struct fix f;
    float x[N], *all = malloc(sizeof x * ROWS);
    double p[N], sum = 0, chi = 0;
    uint32_t count[N] = {0};
    fix_open(&f, NULL, 2, N);
    rng_state = 5;
    fill_normal(x, N, 1.0f);
    for (int i = 0; i < N; i++)
        sum += p[i] = exp((double)x[i] / 0.8);
    for (int i = 0; i < ROWS; i++)
        memcpy(all + i * N, x, sizeof x);
    for (uint32_t round = 0; round < ROUNDS; round++) {
        rows_begin(&f, ROWS);
        for (uint32_t i = 0; i < ROWS; i++) {
            f.s->sample[i].temperature = 0.8f;
            f.s->sample[i].seed = 1234 + round;
            f.s->sample[i].counter = i;
        }
        rows_run(&f, all, N, N);
        for (int i = 0; i < ROWS; i++)
            count[f.s->result[i].id]++;
    }
    for (int i = 0; i < N; i++) {
        double want = p[i] / sum * ROUNDS * ROWS;
        chi += (count[i] - want) * (count[i] - want) / want;
    }
    /* 19 degrees of freedom: above 50 has a chance of 1 in 8,000 (and the seed is fixed) */
    cr_assert_lt(chi, 50.0, "chi square %g", chi);
    free(all);
    fix_close(&f);
}

Test(sample, does_not_depend_on_the_batch_or_the_threads)
{
    enum { N = 5000, ROWS = 40 };
    struct fix f[3];
    float *x = malloc(sizeof *x * N * ROWS);
    struct dn_sample s[ROWS];
    struct dn_sampled alone[ROWS];
    rng_state = 11;
    fill_normal(x, N * ROWS, 3.0f);
    for (int i = 0; i < ROWS; i++) {
        s[i] = plain();
        s[i].temperature = i % 5 ? 0.9f : 0.0f;
        s[i].top_p = i % 2 ? 0.9f : 1.0f;
        s[i].top_k = i % 3 ? 0 : 40;
        s[i].n_top = i % 7;
        s[i].seed = rng();
        s[i].counter = (uint64_t)i;
    }
    for (unsigned k = 0; k < 3; k++) {
        fix_open(f + k, NULL, k + 1, N);
        for (int i = 0; i < ROWS; i++) {
            struct dn_sampled r = one(f + k, x + i * N, N, s + i);
            cr_assert(k == 0 || memcmp(alone + i, &r, sizeof r) == 0);
            alone[i] = r;
        }
        rows_begin(f + k, ROWS);
        memcpy(f[k].s->sample, s, sizeof s);
        rows_run(f + k, x, N, N);
        for (int i = 0; i < ROWS; i++)
            cr_assert(memcmp(alone + i, f[k].s->result + i, sizeof *alone) == 0, "row %d, %u threads", i, k + 1);
        fix_close(f + k);
    }
    free(x);
}

Test(sample, greedy_takes_the_lowest_id_on_ties)
{
    FOR_EACH_ISA(isa)
    {
        struct fix f;
        fix_open(&f, isa, 1, 5000);
        float *x = malloc(5000 * sizeof *x);
        struct dn_sample s = plain();
        s.temperature = 0.0f;
        for (uint32_t n = 1; n <= 5000; n += 1 + n / 3) {
            for (int round = 0; round < 30; round++) {
                uint32_t a = rng_below(n), b = a + rng_below(n - a);
                fill_normal(x, n, 1.0f);
                x[a] = x[b] = 9.0f;
                cr_assert_eq(one(&f, x, n, &s).id, (int32_t)a);
                for (uint32_t i = 0; i < n; i++)
                    x[i] = -1e30f;
                x[a] = x[b] = -1e29f;
                cr_assert_eq(one(&f, x, n, &s).id, (int32_t)a);
            }
        }
        free(x);
        fix_close(&f);
    }
}

Test(sample, ids_without_a_token_are_never_drawn)
{
    /* bugcases.md 18: the head is wider than the vocabulary and the padding has large values, or garbage. */
    enum { N = 1000, VALID = 937 };
    struct fix f;
    float *x = malloc(2 * N * sizeof *x);
    fix_open(&f, NULL, 1, N);
    fill_normal(x, 2 * N, 1.0f);
    for (int i = VALID; i < N; i++) {
        x[i] = 100.0f;
        x[N + i] = NAN;
    }
    for (int t = 0; t < 300; t++) {
        rows_begin(&f, 2);
        for (int row = 0; row < 2; row++) {
            f.s->sample[row].temperature = (float)(t % 3);
            f.s->sample[row].top_p = t % 2 ? 0.8f : 1.0f;
            f.s->sample[row].n_top = 20;
            f.s->sample[row].counter = (uint64_t)t;
        }
        rows_run(&f, x, N, VALID);
        for (int row = 0; row < 2; row++) {
            const struct dn_sampled *r = f.s->result + row;
            cr_assert(r->id >= 0 && r->id < VALID);
            for (int i = 0; i < 20; i++)
                cr_assert(r->top_id[i] < VALID && r->top_logprob[i] < 0.0f);
        }
    }
    free(x);
    fix_close(&f);
}

Test(sample, logits_that_are_not_finite_give_no_id)
{
    FOR_EACH_ISA(isa)
    {
        enum { N = 2500 };
        struct fix f;
        float *x = malloc(N * sizeof *x);
        fix_open(&f, isa, 1, N);
        for (int mode = 0; mode < 3; mode++) {
            struct dn_sample s = plain();
            s.temperature = mode == 0 ? 0.0f : 1.0f;
            s.top_p = mode == 2 ? 0.9f : 1.0f;
            s.n_top = 3;
            for (uint32_t at = 0; at < N; at = at < 70 || at > N - 40 ? at + 1 : at + 37) {
                fill_normal(x, N, 1.0f);
                float keep = x[at];
                x[at] = NAN;
                cr_assert_eq(one(&f, x, N, &s).id, -1, "%s: NaN at %u", isa, at);
                x[at] = INFINITY;
                cr_assert_eq(one(&f, x, N, &s).id, -1);
                x[at] = -INFINITY; /* an id that the model rules out is fine */
                int32_t id = one(&f, x, N, &s).id;
                cr_assert(id >= 0 && id != (int32_t)at);
                x[at] = keep;
            }
            for (int i = 0; i < N; i++)
                x[i] = -INFINITY;
            cr_assert_eq(one(&f, x, N, &s).id, -1);
            x[77] = -3.0f; /* the only possible one */
            struct dn_sampled r = one(&f, x, N, &s);
            cr_assert(r.id == 77 && r.logprob == 0.0f);
        }
        free(x);
        fix_close(&f);
    }
}

Test(sample, log_probabilities_are_of_the_raw_logits)
{
    FOR_EACH_ISA(isa)
    {
        struct fix f;
        fix_open(&f, isa, 1, 4000);
        float *x = malloc(4000 * sizeof *x);
        struct ref *r = malloc(4000 * sizeof *r);
        for (uint32_t n = 1; n <= 4000; n = n * 3 + 1) {
            fill_normal(x, n, 3.0f);
            for (uint32_t i = 0; i < n; i += 5)
                x[i] = rintf(x[i]);
            double sum = 0;
            for (uint32_t i = 0; i < n; i++) {
                sum += exp((double)x[i]);
                r[i] = (struct ref){.value = (double)x[i], .id = i};
            }
            qsort(r, n, sizeof *r, by_value);
            struct dn_sample s = plain();
            s.temperature = 0.7f;
            s.n_top = DN_MAX_TOP;
            s.n_ban = 1; /* bans and temperature do not show in what is reported */
            s.ban[0] = n > 1 ? (int32_t)r[0].id : -1;
            for (int mode = 0; mode < 2; mode++) {
                s.target = mode ? (int32_t)rng_below(n) : -1;
                struct dn_sampled got = one(&f, x, n, &s);
                if (mode)
                    cr_assert_eq(got.id, s.target);
                else
                    cr_assert_neq(got.id, s.ban[0]);
                cr_assert_float_eq((double)got.logprob, (double)x[got.id] - log(sum), 1e-5);
                cr_assert_eq(got.n_top, (int32_t)(n < DN_MAX_TOP ? n : DN_MAX_TOP));
                for (int32_t i = 0; i < got.n_top; i++) {
                    cr_assert_eq(got.top_id[i], (int32_t)r[i].id, "%s: alternative %d of %u", isa, i, n);
                    cr_assert_float_eq((double)got.top_logprob[i], r[i].value - log(sum), 1e-5);
                }
            }
        }
        free(x);
        free(r);
        fix_close(&f);
    }
}

Test(sample, penalties_follow_their_formulas)
{
    enum { N = 100 };
    struct fix f;
    struct dn_sample s = plain();
    float x[N];
    int32_t output[7] = {3, 3, 3, 7, 50, 50, 99}, prompt[4] = {7, 8, 8, 99};
    fix_open(&f, NULL, 1, N);
    /* Values are dyadic, so that every formula is exact. */
    for (int trial = 0; trial < 300; trial++) {
        double y[N];
        for (int i = 0; i < N; i++)
            x[i] = (float)((int)rng_below(64) - 32) / 8.0f;
        s.repetition = trial % 3 == 0 ? 2.0f : trial % 3 == 1 ? 0.5f : 1.0f;
        s.frequency = trial % 4 ? 0.5f : -0.25f;
        s.presence = trial % 5 ? 0.75f : 0.0f;
        s.slot = trial % FIX_SLOTS;
        s.temperature = 0.0f;
        for (int i = 0; i < N; i++) {
            int n = 0, seen = 0;
            for (int j = 0; j < 7; j++)
                n += output[j] == i;
            for (int j = 0; j < 4; j++)
                seen |= prompt[j] == i;
            y[i] = (double)x[i];
            if (n || seen) /* Keskar et al. 2019, as Hugging Face: over prompt and output */
                y[i] = y[i] > 0 ? y[i] / (double)s.repetition : y[i] * (double)s.repetition;
            if (n) /* OpenAI: over the output */
                y[i] -= (double)s.frequency * n + (double)s.presence;
        }
        f.ops->slot_fill(f.d, s.slot, prompt, 4);
        static struct seq q;
        step_clear(&f);
        f.layout.page_tokens = 2048;
        step_add(&f, &q, 4, 7);
        f.s->slot[0] = s.slot;
        for (int i = 0; i < 7; i++) {
            f.s->token_id[i] = output[i];
            f.s->token_count[i] = 1;
        }
        f.s->n_rows = 1;
        f.s->row_token[0] = 6;
        f.s->sample[0] = s;
        rows_run(&f, x, N, N);
        int best = 0;
        for (int i = 1; i < N; i++)
            best = y[i] > y[best] ? i : best;
        cr_assert_eq(f.s->result[0].id, best, "trial %d", trial);
        /* The next step counts nothing twice; a new prompt forgets. */
        step_clear(&f);
        step_add(&f, &q, 11, 1);
        f.s->slot[0] = s.slot;
        f.s->n_rows = 1;
        f.s->row_token[0] = 0;
        f.s->sample[0] = s;
        rows_run(&f, x, N, N);
        cr_assert_eq(f.s->result[0].id, best);
        f.ops->slot_fill(f.d, s.slot, NULL, 0);
        rows_run(&f, x, N, N);
        best = 0;
        for (int i = 1; i < N; i++)
            best = x[i] > x[best] ? i : best;
        cr_assert_eq(f.s->result[0].id, best);
    }
    fix_close(&f);
}

Test(sample, banning_every_id_gives_none)
{
    struct fix f;
    float x[4] = {1, 2, 3, 4};
    struct dn_sample s = plain();
    fix_open(&f, NULL, 1, 4);
    s.n_ban = 4;
    for (int i = 0; i < 4; i++)
        s.ban[i] = i;
    cr_assert_eq(one(&f, x, 4, &s).id, -1);
    s.n_ban = 3;
    cr_assert_eq(one(&f, x, 4, &s).id, 3);
    s.temperature = 0.0f;
    s.ban[2] = 3;
    cr_assert_eq(one(&f, x, 4, &s).id, 2);
    fix_close(&f);
}

Test(sample, rows_of_a_bad_sequence_give_no_id)
{
    struct fix f;
    float x[8] = {1, 2, 3, 4, 1, 2, 3, 4};
    uint64_t table[4] = {5, 6, 7, 8};
    static struct seq q;
    fix_open(&f, NULL, 1, 4);
    f.layout.page_tokens = 2048;
    step_clear(&f);
    for (int i = 0; i < 2; i++) {
        q.page[0] = (uint32_t)i;
        step_add(&f, &q, 0, 1);
        f.s->check[i] = 1;
        f.s->tag[i] = 5;
        f.s->row_token[i] = i;
        f.s->sample[i] = plain();
    }
    f.s->n_rows = 2;
    f.ops->step_begin(f.d, 1);
    f.ops->check_tags(f.d, &(struct dn_check_tags){table, 4, f.layout.page_tokens});
    f.ops->sample_rows(f.d, &(struct dn_sample_rows){x, 4, 4});
    cr_assert(f.s->result[0].id >= 0);
    cr_assert_eq(f.s->result[1].id, -1);
    fix_close(&f);
}
