#include "kernels/cpu/device.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* How a set is cut down, in this order, as Hugging Face transformers and vLLM do:
 *   top_k  keeps all ids whose value is at least the k-th largest (so ties with it stay);
 *   top_p  keeps the shortest run of (value falling, id rising) whose probability reaches top_p, at least one id;
 *          probabilities are over what top_k left;
 *   min_p  keeps ids with at least min_p times the probability of the likeliest.
 * What is left is drawn from by inverse CDF in the order of ids. Sorting 50,000 to 160,000 values would take
 * milliseconds: instead the ids near the maximum are gathered (further and further down until there are enough), and a
 * quickselect finds the last id that stays. */

struct candidate {
    float value, weight; /* adjusted logit, e^((value - max) / temperature) */
    uint32_t id;
};

/* Scratch of a thread, n_vocab entries each */
struct scratch {
    float *value;  /* adjusted logits */
    float *weight; /* of gathered ids; also partial sums */
    uint32_t *id;  /* gathered, ascending */
    struct candidate *candidate;
};

struct call {
    struct dn_cpu_device *d;
    const struct dn_sample_rows *p;
    uint8_t *memory; /* [threads][scratch_bytes] */
    size_t scratch_bytes;
};

/* ---- Penalties and bans ---- */

static void penalise(const struct dn_sample *s, const uint16_t *count, float *value, uint32_t n)
{
    uint32_t i = 0;
    while (i < n) {
        uint64_t four = 0;
        if (n - i >= 4) {
            memcpy(&four, count + i, sizeof four);
            if (four == 0) { /* nearly all */
                i += 4;
                continue;
            }
        }
        uint32_t end = n - i >= 4 ? i + 4 : n;
        for (; i < end; i++) {
            if (count[i] == 0)
                continue;
            value[i] = dn_penalised(value[i], count[i], s->repetition, s->frequency, s->presence);
        }
    }
}

/* The values to sample from: the logits themselves where nothing changes them. */
static const float *adjust(const struct call *c, const struct dn_sample *s, const float *logits, uint32_t n,
                           float *copy)
{
    bool penalties = s->slot >= 0 && (s->repetition != 1.0f || s->frequency != 0.0f || s->presence != 0.0f);
    if (!penalties && s->n_ban == 0)
        return logits;
    memcpy(copy, logits, n * sizeof *copy);
    if (penalties)
        penalise(s, c->d->count + (size_t)s->slot * c->d->n_vocab, copy, n);
    for (int32_t i = 0; i < s->n_ban; i++) {
        if (s->ban[i] >= 0 && (uint32_t)s->ban[i] < n)
            copy[s->ban[i]] = -INFINITY;
    }
    return copy;
}

/* ---- Selection ---- */

static int by_rank(const void *a, const void *b)
{
    const struct candidate *x = a, *y = b;
    if (x->value != y->value)
        return x->value > y->value ? -1 : 1;
    return x->id < y->id ? -1 : x->id > y->id;
}

static bool before(const struct candidate *x, const struct candidate *y)
{
    return x->value != y->value ? x->value > y->value : x->id < y->id;
}

static void swap(struct candidate *x, struct candidate *y)
{
    struct candidate t = *x;
    *x = *y;
    *y = t;
}

/* The first candidate in rank order at which `need` is reached, counting one each or summing weights. Reorders c. */
static struct candidate select_rank(struct candidate *c, size_t n, double need, bool by_weight)
{
    size_t lo = 0, hi = n;
    for (int round = 0; hi - lo > 24 && round < 64; round++) {
        struct candidate *mid = c + lo + (hi - lo) / 2, *last = c + hi - 1;
        if (before(mid, c + lo))
            swap(mid, c + lo);
        if (before(last, mid))
            swap(last, mid);
        if (before(mid, c + lo))
            swap(mid, c + lo);
        struct candidate pivot = *mid;
        swap(mid, c + hi - 2);
        double sum = by_weight ? (double)c[lo].weight : 1.0;
        size_t at = lo + 1;
        for (size_t i = lo + 1; i < hi - 2; i++) {
            if (before(c + i, &pivot)) {
                sum += by_weight ? (double)c[i].weight : 1.0;
                swap(c + i, c + at++);
            }
        }
        swap(c + hi - 2, c + at);
        double own = by_weight ? (double)pivot.weight : 1.0;
        if (sum >= need) {
            hi = at;
        } else if (sum + own >= need) {
            return pivot;
        } else {
            need -= sum + own;
            lo = at + 1;
        }
    }
    qsort(c + lo, hi - lo, sizeof *c, by_rank);
    for (; lo + 1 < hi; lo++) {
        need -= by_weight ? (double)c[lo].weight : 1.0;
        if (need <= 0.0)
            break;
    }
    return c[lo < n ? lo : n - 1];
}

/* ---- Drawing ---- */

static double block_sums(const struct call *c, const float *x, uint32_t n, float max, float inv_t, float *block)
{
    c->d->row->exp_blocks(x, n, max, inv_t, block);
    double total = 0.0;
    for (uint32_t b = 0; b * DN_EXP_BLOCK < n; b++)
        total += (double)block[b];
    return total;
}

static int32_t draw_all(const struct call *c, const float *x, uint32_t n, float max, float inv_t, double u,
                        float *block)
{
    double at = u * block_sums(c, x, n, max, inv_t, block), sum = 0.0;
    uint32_t b = 0, last = (n - 1) / DN_EXP_BLOCK;
    while (b < last && at >= sum + (double)block[b])
        sum += (double)block[b++];
    /* Sums differ in the last bits from what follows, so that the walk may run out: then the last possible id it is. */
    for (;; b--) {
        float weight[DN_EXP_BLOCK];
        uint32_t first = b * DN_EXP_BLOCK, m = n - first < DN_EXP_BLOCK ? n - first : DN_EXP_BLOCK;
        int32_t id = -1;
        c->d->row->exps(x + first, m, max, inv_t, weight);
        for (uint32_t i = 0; i < m; i++) {
            if (weight[i] > 0.0f) {
                sum += (double)weight[i];
                id = (int32_t)(first + i);
                if (at < sum)
                    break;
            }
        }
        if (id >= 0 || b == 0)
            return id;
    }
}

static double sum_of(const float *weight, uint32_t m)
{
    double lane[8] = {0}; /* one chain of additions would take 4 clocks each */
    uint32_t j = 0;
    for (; j + 8 <= m; j += 8) {
        for (uint32_t i = 0; i < 8; i++)
            lane[i] += (double)weight[j + i];
    }
    for (uint32_t i = 0; j < m; i++, j++)
        lane[i] += (double)weight[j];
    return ((lane[0] + lane[1]) + (lane[2] + lane[3])) + ((lane[4] + lane[5]) + (lane[6] + lane[7]));
}

/* Weights of the m gathered ids, and their sum. */
static double weigh(const struct call *c, const float *x, uint32_t m, float max, float inv_t, struct scratch *t)
{
    for (uint32_t j = 0; j < m; j++)
        t->weight[j] = x[t->id[j]];
    c->d->row->exps(t->weight, m, max, inv_t, t->weight);
    return sum_of(t->weight, m);
}

/* The last of the m gathered ids, by rank, that is needed to reach `need` (select_rank()). Selection reorders what it
 * works on: a copy. Many ids are first counted into intervals of value, so that only one interval is copied. */
static struct candidate last_kept(const float *x, uint32_t m, float max, double need, bool by_weight, struct scratch *t)
{
    enum { INTERVALS = 512, MANY = 1024 };
    float lowest = max, scale = 0.0f;
    uint32_t wanted = 0;
    if (m > MANY) {
        double sum[INTERVALS] = {0};
        for (uint32_t j = 0; j < m; j++) {
            float v = x[t->id[j]];
            lowest = v < lowest && v > -INFINITY ? v : lowest;
        }
        scale = max > lowest ? (INTERVALS - 1) / (max - lowest) : 0.0f;
        for (uint32_t j = 0; j < m; j++) {
            float at = (max - x[t->id[j]]) * scale; /* infinite for an impossible id: the last interval */
            sum[at < INTERVALS - 1 ? (uint32_t)at : INTERVALS - 1] += by_weight ? (double)t->weight[j] : 1.0;
        }
        while (wanted < INTERVALS - 1 && sum[wanted] < need)
            need -= sum[wanted++];
    }
    uint32_t n = 0;
    for (uint32_t j = 0; j < m; j++) {
        float v = x[t->id[j]], at = (max - v) * scale;
        if (m <= MANY || (at < INTERVALS - 1 ? (uint32_t)at : INTERVALS - 1) == wanted)
            t->candidate[n++] = (struct candidate){.value = v, .weight = t->weight[j], .id = t->id[j]};
    }
    /* Only rounding can leave the last interval empty: nothing is to be cut then. */
    return n ? select_rank(t->candidate, n, need, by_weight) : (struct candidate){.value = -INFINITY, .id = UINT32_MAX};
}

/* Gathers every id that top_k, else top_p, can leave, ascending, with weights. Returns their number. *mass is the
 * weight of what top_p chooses from: all ids, or those that top_k leaves. */
static uint32_t gather(const struct call *c, const struct dn_sample *s, const float *x, uint32_t n, float max,
                       float inv_t, struct scratch *t, double *mass)
{
    /* Down to e^-2, ... times the likeliest. A large mass tells that many ids share it, so that the first depths would
     * be in vain. */
    static const float depth[] = {2.0f, 4.0f, 6.0f, 8.0f, 11.0f, 14.0f, 18.0f, 24.0f, INFINITY};
    bool by_k = s->top_k > 0 && (uint32_t)s->top_k < n;
    float first = 0.0f;
    if (!by_k) {
        *mass = block_sums(c, x, n, max, inv_t, t->weight);
        first = 0.8f * logf((float)*mass);
    }
    uint32_t m;
    for (size_t i = 0;; i++) {
        if (depth[i] < first)
            continue;
        m = c->d->row->gather(x, n, max - depth[i] / inv_t, t->id, n);
        if (by_k ? m >= (uint32_t)s->top_k || depth[i] == INFINITY
                 : weigh(c, x, m, max, inv_t, t) >= (double)s->top_p * *mass || depth[i] == INFINITY)
            break;
    }
    if (!by_k)
        return m;
    weigh(c, x, m, max, inv_t, t);
    float cut = last_kept(x, m, max, s->top_k, false, t).value;
    uint32_t kept = 0;
    for (uint32_t j = 0; j < m; j++) {
        if (x[t->id[j]] >= cut)
            t->id[kept++] = t->id[j];
    }
    *mass = weigh(c, x, kept, max, inv_t, t);
    return kept;
}

static int32_t draw_cut(const struct call *c, const struct dn_sample *s, const float *x, uint32_t n, float max,
                        float inv_t, double u, struct scratch *t)
{
    bool by_k = s->top_k > 0 && (uint32_t)s->top_k < n, by_p = s->top_p < 1.0f;
    struct candidate last = {.value = -INFINITY, .id = UINT32_MAX};
    double mass;
    uint32_t m, kept = 0;
    if (by_k || by_p) {
        m = gather(c, s, x, n, max, inv_t, t, &mass);
        if (by_p)
            last = last_kept(x, m, max, (double)s->top_p * mass, true, t);
    } else { /* min_p alone: from a little below its cut, the weight decides */
        m = c->d->row->gather(x, n, max + (logf(s->min_p) - 1e-3f) / inv_t, t->id, n);
        weigh(c, x, m, max, inv_t, t);
    }
    for (uint32_t j = 0; j < m; j++) {
        float value = x[t->id[j]], weight = t->weight[j];
        bool ranked = value > last.value || (value == last.value && t->id[j] <= last.id);
        t->id[kept] = t->id[j];
        t->weight[kept] = weight;
        kept += ranked && weight >= s->min_p && weight > 0.0f;
    }
    double at = u * sum_of(t->weight, kept), sum = 0.0;
    for (uint32_t j = 0; j < kept; j++) {
        sum += (double)t->weight[j];
        if (at < sum)
            return (int32_t)t->id[j];
    }
    return kept ? (int32_t)t->id[kept - 1] : -1;
}

/* ---- Log-probabilities ---- */

/* The n_top largest logits, larger first, lower id first on ties. */
static void find_top(const float *x, uint32_t n, int32_t n_top, struct dn_sampled *r)
{
    enum { BLOCK = 64 };
    int32_t found = 0;
    float lowest = -INFINITY; /* of those found, once there are n_top */
    for (uint32_t i = 0; i < n; i += BLOCK) {
        uint32_t end = n - i < BLOCK ? n : i + BLOCK;
        uint32_t any = found < n_top;
        for (uint32_t j = i; j < end; j++)
            any |= x[j] > lowest;
        if (!any)
            continue;
        for (uint32_t j = i; j < end; j++) {
            if (found == n_top && x[j] <= lowest)
                continue;
            int32_t at = found < n_top ? found++ : n_top - 1;
            for (; at > 0 && r->top_logprob[at - 1] < x[j]; at--) {
                r->top_logprob[at] = r->top_logprob[at - 1];
                r->top_id[at] = r->top_id[at - 1];
            }
            r->top_logprob[at] = x[j];
            r->top_id[at] = (int32_t)j;
            if (found == n_top)
                lowest = r->top_logprob[n_top - 1];
        }
    }
    r->n_top = found;
}

static void log_probabilities(const struct call *c, const struct dn_sample *s, const float *x, uint32_t n, float max,
                              struct scratch *t, struct dn_sampled *r)
{
    double log_sum = log(block_sums(c, x, n, max, 1.0f, t->weight));
    r->logprob = (float)((double)x[r->id] - (double)max - log_sum);
    if (s->n_top > 0)
        find_top(x, n, s->n_top, r);
    for (int32_t i = 0; i < r->n_top; i++)
        r->top_logprob[i] = (float)((double)r->top_logprob[i] - (double)max - log_sum);
}

/* ---- Rows ---- */

static int32_t pick(const struct call *c, const struct dn_sample *s, const float *x, uint32_t n, uint32_t best,
                    struct scratch *t)
{
    const float *y = adjust(c, s, x, n, t->value);
    bool finite = true;
    if (y != x)
        best = c->d->row->argmax(y, n, &finite);
    if (!finite) /* every id is banned */
        return -1;
    if (s->temperature < DN_GREEDY_BELOW)
        return (int32_t)best;
    float inv_t = 1.0f / s->temperature;
    double u = (double)dn_sample_bits(s->seed, s->counter) * 0x1p-53;
    if ((s->top_k <= 0 || (uint32_t)s->top_k >= n) && s->top_p >= 1.0f && s->min_p <= 0.0f)
        return draw_all(c, y, n, y[best], inv_t, u, t->weight);
    return draw_cut(c, s, y, n, y[best], inv_t, u, t);
}

static void rows(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    const struct dn_step *step = &c->d->step;
    uint32_t n = c->p->n_valid, n_vocab = c->p->n_vocab;
    uint8_t *memory = c->memory + part * c->scratch_bytes;
    struct scratch t = {.value = (float *)memory};
    t.weight = t.value + n_vocab;
    t.id = (uint32_t *)(t.weight + n_vocab);
    t.candidate = (struct candidate *)(t.id + n_vocab);
    for (size_t row = begin; row < end; row++) {
        const struct dn_sample *s = step->sample + row;
        struct dn_sampled *r = step->result + row;
        const float *x = c->p->logits + row * n_vocab;
        memset(r, 0, sizeof *r);
        r->id = -1;
        if (step->bad[step->token_seq[step->row_token[row]]])
            continue;
        bool finite;
        uint32_t best = c->d->row->argmax(x, n, &finite);
        if (!finite)
            continue;
        if (s->target >= 0)
            r->id = (uint32_t)s->target < n ? s->target : -1;
        else
            r->id = pick(c, s, x, n, best, &t);
        if (r->id >= 0 && s->n_top >= 0)
            log_probabilities(c, s, x, n, x[best], &t, r);
    }
}

void dn_cpu_sample_rows(struct dn_device *device, const struct dn_sample_rows *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    DN_BUG_ON(p->n_valid == 0 || p->n_valid > p->n_vocab || p->n_vocab > d->n_vocab);
    struct call c = {.d = d, .p = p};
    c.scratch_bytes = ((size_t)p->n_vocab * (3 * sizeof(float) + sizeof(struct candidate)) + 63) & ~(size_t)63;
    size_t bytes = dn_threads_count(d->exec.threads) * c.scratch_bytes;
    c.memory = dn_cpu_take(d, DN_SCRATCH_THREAD, bytes, bytes);
    if (d->measuring)
        return;
    dn_threads_for(d->exec.threads, d->step.n_rows, 1, rows, &c);
}
