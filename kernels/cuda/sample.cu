/* Sampling, as kernels/cpu/sample.c defines it.
 *
 * Maths. y = logits after penalties and bans, m = max y, w[i] = e^((y[i] - m) / T) as a fixed-point number of 2^-36.
 *   top_k keeps y >= the k-th largest; top_p the shortest run of (y falling, id rising) with sum w >= top_p * sum of
 * what top_k left; min_p keeps w >= min_p. Drawn is the first kept id, ids rising, whose running sum exceeds u * sum.
 * Sums of integers do not depend on their order: histograms are filled by atomics and yet give the same every time. The
 * distance to exact arithmetic: w is off by (2 + 1.2 |a|) 2^-23 relative, a = its exponent (ex2.approx), on average
 * over the drawn distribution |a| <= ln n = 12, hence the running sum by <= 2 * 17 * 2^-23 = 4.1e-6 of the whole, and
 * by 2^-37 an id (at most 1.2e-6 for 163,840, where all round to one side). The CPU's own error is <= 1.5e-6. So ids
 * agree unless u lies within 7e-6 of an edge.
 *
 * Work. A cluster of 8 blocks per row holds the row in its shared memory (20,480 values each for 163,840) and goes over
 * it as often as the row's parameters ask: the host need not know. Passes, each with an exchange between the blocks:
 *   - always: max, min, NaN
 *   - log-probabilities: sum of e^(x - m)
 *   - alternatives: rank select of the n_top-th (see select_rank()) in 2 to 6 passes, gather
 *   - penalties, bans: in place, then max again
 *   - top_k, top_p: rank select by count, by weight, 2 to 6 passes each
 *   - draw: sum of w a warp; the warp that u falls into walks
 * A select counts into 512 intervals of value between the extremes, then into 512 intervals of the chosen interval's
 * float codes, and so on until an interval is one code: 3 levels nearly always, 5 at most.
 *
 * Layout. Block b, warp w of 16 has the ids [(b * 16 + w) * 32 J, + 32 J), J = values a lane; ids that do not exist are
 * -inf. Shared memory: struct shared, then the values (or they lie in the workspace, where they do not fit: `in_shared`
 * false; also before sm_90, where a row has one block).
 *
 * Floor: the logits once, 64 x 163,840 x 4 B = 42 MB = 9 us from memory (they come from the L2 cache mostly).
 * Reached on an H200, logits cold, in us for 1 / 8 / 64 rows of 163,840: greedy 4.9 / 6.8 / 26, with log-probability
 * 7.5 / 10 / 34, temperature 12 / 16 / 50, top-p 0.9 34 / 43 / 119, top-p 0.9 with 20 alternatives 56 / 69 / 191. What
 * limits it: two waves of blocks for 64 rows, and the instructions of a pass.
 */
#include "kernels/cuda/device.cuh"
#include "kernels/sampling.h"

#include <math.h>
#include <stddef.h>
#include <stdlib.h>

enum {
    THREADS = 512,
    WARPS = THREADS / 32,
    BLOCKS = 8, /* of a cluster */
    BINS = THREADS,
    FIELD_BITS = 16, /* of weights in the histograms' three fields: a sum of 2^16 of them fits 32 bits */
    MAX_IN_SHARED = 1 << 16,
    WEIGHT_BITS = 36,
    HIGH_BITS = 13, /* weights are made in two parts: multiples of 2^-13, and what is left */
};
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define CLUSTER __cluster_dims__(BLOCKS, 1, 1)
#else
#define CLUSTER
#endif

struct pair {
    uint64_t a, b;
};

struct alignas(16) shared {
    struct pair post[2][WARPS]; /* what this block's warps tell the others; the halves in turn */
    struct pair all[BLOCKS * WARPS];
    uint64_t total[2][BINS]; /* this block's histogram, for the others; the halves in turn */
    uint32_t field[3][BINS];
    uint64_t scan[WARPS];
    struct pair crossing; /* bin and what lies above it */
    uint64_t own;         /* of the crossing bin */
    uint64_t top[DN_MAX_TOP];
    uint32_t n_top;
    struct dn_sample row;
};

/* One row, as a block sees it. Everything but the lane's place is the same in all threads of the cluster. */
struct row {
    struct shared *s;
    float *value; /* [J * THREADS] of this block */
    uint32_t n;   /* n_valid */
    uint32_t first_id, per_lane;
    uint32_t turn; /* of post and total */
    unsigned n_blocks, block, warp, lane;
};

/* ---- The cluster ---- */

static __device__ __forceinline__ void cluster_sync()
{
    __syncwarp();
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    __syncthreads();
#endif
}

/* Where block `rank` of the cluster has what lies at p here. */
template <typename T> static __device__ __forceinline__ T *of_block(T *p, unsigned rank)
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    T *q;
    asm("mapa.u64 %0, %1, %2;" : "=l"(q) : "l"(p), "r"(rank));
    return q;
#else
    return p;
#endif
}

/* Every warp's pair (given by lane 0) to everybody: s->all, in the order of ids. */
static __device__ void exchange(struct row &r, uint64_t a, uint64_t b)
{
    struct shared *s = r.s;
    if (r.lane == 0)
        s->post[r.turn & 1][r.warp] = {a, b};
    cluster_sync();
    for (unsigned i = threadIdx.x; i < r.n_blocks * WARPS; i += THREADS)
        s->all[i] = *of_block(&s->post[r.turn & 1][i % WARPS], i / WARPS);
    r.turn++;
    __syncthreads();
}

static __device__ __forceinline__ uint64_t warp_sum(uint64_t x)
{
#pragma unroll
    for (int d = 16; d; d /= 2)
        x += __shfl_xor_sync(~0u, x, d);
    return x;
}

static __device__ __forceinline__ uint64_t warp_max(uint64_t x)
{
#pragma unroll
    for (int d = 16; d; d /= 2) {
        uint64_t y = __shfl_xor_sync(~0u, x, d);
        x = y > x ? y : x;
    }
    return x;
}

static __device__ __forceinline__ uint64_t warp_scan(uint64_t x, unsigned lane) /* inclusive */
{
#pragma unroll
    for (unsigned d = 1; d < 32; d *= 2) {
        uint64_t y = __shfl_up_sync(~0u, x, d);
        x += lane >= d ? y : 0;
    }
    return x;
}

/* ---- Values ---- */

/* Order of values as order of integers; -0 is 0. NaN is above +inf. */
static __device__ __forceinline__ uint32_t key_of(float v)
{
    if (v != v)
        return ~0u;
    uint32_t u = __float_as_uint(__fadd_rn(v, 0.0f));
    return u & 0x80000000u ? ~u : u | 0x80000000u;
}
static __device__ __forceinline__ float value_of(uint32_t key)
{
    return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}
static const uint32_t KEY_INF = 0xff800000u, KEY_MINUS_INF = 0x007fffffu;

/* e^((v - max) * inv_t); as the CPU up to the product, so that both have the same exponent */
static __device__ __forceinline__ float weight_of(float v, float max, float inv_t)
{
    float w, a = __fmul_rn(__fmul_rn(__fsub_rn(v, max), inv_t), 1.4426950408889634f);
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(w) : "f"(a));
    return w;
}

/* Weights of [0, 1] as integers and their sums, without conversions (which are slow): adding 2^10 leaves a multiple of
 * 2^-13 in the low bits, adding 1.5 * 2^-13 to the rest one of 2^-36. Both constants' own bits are taken off the sums.
 */
struct sum {
    uint32_t high, low;
};
#define HIGH_MAGIC 0x1p10f
#define LOW_MAGIC  0x1.8p-13f
static __device__ __forceinline__ void add_weight(struct sum &s, float w)
{
    float high = __fadd_rn(w, HIGH_MAGIC), rest = __fsub_rn(w, __fsub_rn(high, HIGH_MAGIC));
    s.high += __float_as_uint(high);
    s.low += __float_as_uint(__fadd_rn(rest, LOW_MAGIC));
}
static __device__ __forceinline__ uint64_t sum_of(const struct sum &s, uint32_t n) /* n added, at most 500 */
{
    int32_t high = (int32_t)(s.high - n * __float_as_uint(HIGH_MAGIC));
    int32_t low = (int32_t)(s.low - n * __float_as_uint(LOW_MAGIC));
    return (uint64_t)(((int64_t)high << (WEIGHT_BITS - HIGH_BITS)) + low);
}
static __device__ __forceinline__ uint64_t fixed(float w)
{
    struct sum s = {0, 0};
    add_weight(s, w);
    return sum_of(s, 1);
}

/* For every value of the thread: `i` its place in r.value, `v` itself. */
#define FOR_MY_VALUES(r)                                                                                               \
    for (uint32_t i = (r).warp * 32 * (r).per_lane + (r).lane, end_ = i + 32 * (r).per_lane; i < end_; i += 32)

struct extremes {
    uint64_t best;  /* key of the largest value, then ~id: the lowest id on ties */
    float max, min; /* min of those that are not -inf */
    uint32_t id;
    bool finite;
};

static __device__ struct extremes share_extremes(struct row &r, uint64_t best, uint32_t lowest)
{
    best = warp_max(best);
    lowest = __reduce_min_sync(~0u, lowest);
    exchange(r, best, lowest);
    best = 0;
    lowest = ~0u;
    for (unsigned i = r.lane; i < r.n_blocks * WARPS; i += 32) {
        struct pair p = r.s->all[i];
        best = p.a > best ? p.a : best;
        lowest = (uint32_t)p.b < lowest ? (uint32_t)p.b : lowest;
    }
    struct extremes e;
    e.best = warp_max(best);
    lowest = __reduce_min_sync(~0u, lowest);
    uint32_t key = (uint32_t)(e.best >> 32);
    e.id = ~(uint32_t)e.best;
    e.finite = key > KEY_MINUS_INF && key < KEY_INF;
    e.max = value_of(key);
    e.min = value_of(lowest);
    return e;
}

/* What a thread has seen, ids rising. */
struct seen {
    float max, min;
    uint32_t id;
    bool bad; /* NaN or +inf */
};
static __device__ __forceinline__ void see(struct seen &s, float v, uint32_t id)
{
    bool more = v > s.max;
    s.max = more ? v : s.max;
    s.id = more ? id : s.id;
    s.min = v > -INFINITY ? fminf(s.min, v) : s.min;
    s.bad |= !(v < INFINITY);
}
static __device__ struct extremes share_seen(struct row &r, const struct seen &s)
{
    uint64_t best = (uint64_t)(s.bad ? ~0u : key_of(s.max)) << 32 | ~s.id;
    return share_extremes(r, best, s.min < INFINITY ? key_of(s.min) : ~0u);
}

static __device__ struct extremes load(struct row &r, const float *logits)
{
    struct seen seen = {-INFINITY, INFINITY, 0, false};
    uint32_t base = r.warp * 32 * r.per_lane;
    bool whole = r.first_id + base + 32 * r.per_lane <= r.n && ((uintptr_t)(logits + r.first_id) & 15) == 0;
    seen.id = r.first_id + base;
    if (whole) { /* per_lane is a multiple of 4 */
#pragma unroll 5
        for (uint32_t i = base + 4 * r.lane; i < base + 32 * r.per_lane; i += 128) {
            float4 x = __ldcg((const float4 *)(logits + r.first_id + i));
            *(float4 *)(r.value + i) = x;
            see(seen, x.x, r.first_id + i);
            see(seen, x.y, r.first_id + i + 1);
            see(seen, x.z, r.first_id + i + 2);
            see(seen, x.w, r.first_id + i + 3);
        }
    } else {
        FOR_MY_VALUES(r)
        {
            uint32_t id = r.first_id + i;
            float x = id < r.n ? __ldcg(logits + id) : -INFINITY;
            r.value[i] = x;
            see(seen, x, id);
        }
    }
    __syncwarp();
    return share_seen(r, seen);
}

/* Penalties and bans in place. */
static __device__ struct extremes adjust(struct row &r, const struct dn_sample &p, const uint16_t *count)
{
    __syncthreads();
    if (count) {
        FOR_MY_VALUES(r)
        {
            uint32_t id = r.first_id + i;
            uint32_t c = id < r.n ? count[id] : 0;
            if (c)
                r.value[i] = dn_penalised(r.value[i], c, p.repetition, p.frequency, p.presence);
        }
        __syncthreads();
    }
    if (threadIdx.x < (unsigned)p.n_ban) {
        uint32_t at = (uint32_t)p.ban[threadIdx.x] - r.first_id; /* a negative id is beyond the end */
        if (p.ban[threadIdx.x] >= 0 && (uint32_t)p.ban[threadIdx.x] < r.n && at < r.per_lane * THREADS)
            r.value[at] = -INFINITY;
    }
    __syncthreads();
    struct seen seen = {-INFINITY, INFINITY, 0, false};
    FOR_MY_VALUES(r) see(seen, r.value[i], r.first_id + i);
    return share_seen(r, seen);
}

/* ---- Rank select ---- */

/* What a pass counts: every id once, or its weight. Only values of at least `cut` count. */
struct measure {
    bool by_weight;
    float max, inv_t, cut;
};

/* The chosen interval: keys [low, high] within interval `bin` of value (if linear), what measures above it, and its
 * own. */
struct interval {
    bool linear;
    uint32_t bin, low, high;
    float scale;
    uint64_t above, own;
};

static __device__ __forceinline__ uint32_t linear_bin(float v, float max, float scale) /* rounds to nearest */
{
    float at = fminf(__fmul_rn(__fsub_rn(max, v), scale), BINS - 1); /* +inf for -inf */
    return __float_as_uint(__fadd_rn(at, 0x1p23f)) & (2 * BINS - 1);
}

template <bool IN_SHARED>
static __device__ __forceinline__ void count_into(struct shared *s, unsigned turn, uint32_t bin, uint64_t q)
{
    if (!IN_SHARED) {
        atomicAdd((unsigned long long *)&s->total[turn][bin], (unsigned long long)q);
        return;
    }
    enum { MASK = (1 << FIELD_BITS) - 1 };
    uint32_t low = (uint32_t)q & MASK, mid = (uint32_t)(q >> FIELD_BITS) & MASK, high = (uint32_t)(q >> 2 * FIELD_BITS);
    if (low)
        atomicAdd(&s->field[0][bin], low);
    if (mid)
        atomicAdd(&s->field[1][bin], mid);
    if (high)
        atomicAdd(&s->field[2][bin], high);
}

/* One level: counts the interval's members into BINS intervals of `shift` (or of value), merges the blocks' histograms
 * and finds the bin at which `need` is reached. need = 0: fraction * all of it. Returns the need, of all of it. */
template <bool IN_SHARED>
static __device__ uint64_t level(struct row &r, const struct measure &m, struct interval &k, bool first, uint32_t shift,
                                 uint64_t need, float fraction, uint32_t *bin)
{
    struct shared *s = r.s;
    unsigned t = threadIdx.x, turn = r.turn & 1;
    s->field[0][t] = s->field[1][t] = s->field[2][t] = 0;
    s->total[turn][t] = 0; /* the others have read it an exchange ago */
    __syncthreads();
    if (first) {
        FOR_MY_VALUES(r)
        {
            float v = r.value[i];
            uint64_t q = m.by_weight ? fixed(weight_of(v, m.max, m.inv_t)) : 1;
            if (q && v >= m.cut)
                count_into<IN_SHARED>(s, turn, linear_bin(v, m.max, k.scale), q);
        }
    } else {
        float low = value_of(k.low), high = value_of(k.high);
        FOR_MY_VALUES(r)
        {
            float v = r.value[i];
            if (!(v >= low && v <= high))
                continue;
            uint32_t key = key_of(v); /* decides: -0 and 0 are equal, but have a code of their own each */
            if (key < k.low || key > k.high || (k.linear && linear_bin(v, m.max, k.scale) != k.bin))
                continue;
            uint64_t q = m.by_weight ? fixed(weight_of(v, m.max, m.inv_t)) : 1;
            if (q)
                count_into<IN_SHARED>(s, turn, (k.high - key) >> shift, q);
        }
    }
    __syncthreads();
    if (IN_SHARED)
        s->total[turn][t] =
            s->field[0][t] + ((uint64_t)s->field[1][t] << FIELD_BITS) + ((uint64_t)s->field[2][t] << 2 * FIELD_BITS);
    cluster_sync();
    r.turn++;
    uint64_t own = 0;
    for (unsigned b = 0; b < r.n_blocks; b++)
        own += *of_block(&s->total[turn][t], b);
    uint64_t upto = warp_scan(own, r.lane);
    if (r.lane == 31)
        s->scan[r.warp] = upto;
    __syncthreads();
    uint64_t below = 0, all = 0;
    for (unsigned w = 0; w < WARPS; w++) {
        below += w < r.warp ? s->scan[w] : 0;
        all += s->scan[w];
    }
    upto += below;
    if (need == 0) {
        need = (uint64_t)ceil((double)fraction * (double)all);
        need = need < 1 ? 1 : need > all ? all : need;
    }
    uint64_t left = need - k.above;
    if (upto >= left && upto - own < left) {
        s->crossing = {t, upto - own};
        s->own = own;
    }
    __syncthreads();
    *bin = (uint32_t)s->crossing.a;
    k.above += s->crossing.b;
    k.own = s->own;
    return need;
}

/* The value at which `need` is reached, values falling, as an interval of one code. need = 0: `fraction` of all. */
template <bool IN_SHARED>
static __device__ struct interval select_rank(struct row &r, const struct measure &m, float lowest, uint64_t *need,
                                              float fraction)
{
    struct interval k = {};
    float range = m.max - lowest;
    if (m.by_weight) /* less than 2^-37 weighs nothing */
        range = fminf(range, 26.0f / m.inv_t);
    uint32_t bin;
    k.low = key_of(m.cut);
    k.high = key_of(m.max);
    if (range > 1e-30f && range < 1e30f) {
        k.linear = true;
        k.scale = (BINS - 1) / range;
        *need = level<IN_SHARED>(r, m, k, true, 0, *need, fraction, &bin);
        k.bin = bin;
        /* Rounding of the interval's ends is less than this; who is a member, linear_bin() says. */
        float slack = 4e-6f * (fabsf(m.max) + range), width = range / (BINS - 1);
        if (bin > 0)
            k.high = min(k.high, key_of(m.max - ((float)bin - 0.5f) * width + slack));
        if (bin < BINS - 1)
            k.low = max(k.low, key_of(m.max - ((float)bin + 0.5f) * width - slack));
    }
    while (k.low < k.high || *need == 0) {
        int bits = 32 - __clz((int)(k.high - k.low));
        uint32_t shift = bits > 9 ? bits - 9 : 0;
        *need = level<IN_SHARED>(r, m, k, false, shift, *need, fraction, &bin);
        uint32_t top = k.high - (bin << shift), room = top - k.low, width = (1u << shift) - 1;
        k.high = top;
        k.low = room > width ? top - width : k.low;
        if (shift == 0)
            break;
    }
    k.low = k.high;
    return k;
}

/* Of the ids of this value the first n stay, ids rising: the id of this warp's first that goes. */
static __device__ uint32_t tie_end(struct row &r, float value, uint64_t n)
{
    uint32_t mine = 0;
    FOR_MY_VALUES(r) mine += r.value[i] == value;
    mine = __reduce_add_sync(~0u, mine);
    exchange(r, mine, 0);
    uint64_t before = 0;
    unsigned me = r.block * WARPS + r.warp;
    for (unsigned i = r.lane; i < me; i += 32)
        before += r.s->all[i].a;
    before = warp_sum(before);
    if (before + mine <= n)
        return ~0u;
    uint32_t left = before < n ? (uint32_t)(n - before) : 0;
    FOR_MY_VALUES(r)
    {
        uint32_t mask = __ballot_sync(~0u, r.value[i] == value), found = __popc(mask);
        if (left < found) {
            for (; left; left--)
                mask &= mask - 1;
            return r.first_id + i - r.lane + (uint32_t)(__ffs((int)mask) - 1);
        }
        left -= found;
    }
    return ~0u;
}

/* ---- Drawing ---- */

struct kept {
    float cut; /* values above it, and of those equal to it the ids below tie_end */
    uint32_t tie_end;
    float max, inv_t, min_p;
};

/* Of what is not kept: 0. */
static __device__ __forceinline__ float kept_weight(const struct kept &k, float v, uint32_t id)
{
    float w = weight_of(v, k.max, k.inv_t);
    bool kept = (v > k.cut || (v == k.cut && id < k.tie_end)) && w >= k.min_p;
    return kept ? w : 0.0f;
}

/* The id that u * sum falls on: the lanes of one warp return it, all others -1. */
template <bool IN_SHARED> static __device__ int32_t draw(struct row &r, const struct kept &k, uint64_t bits)
{
    uint64_t mine = 0;
    struct sum sum = {0, 0};
    FOR_MY_VALUES(r)
    {
        float w = kept_weight(k, r.value[i], r.first_id + i);
        if (IN_SHARED)
            add_weight(sum, w);
        else
            mine += fixed(w);
    }
    mine += IN_SHARED ? sum_of(sum, r.per_lane) : 0;
    mine = warp_sum(mine);
    exchange(r, mine, 0);
    enum { EACH = BLOCKS * WARPS / 32 };
    uint64_t four = 0;
    for (unsigned i = 0; i < EACH; i++)
        four += r.lane * EACH + i < r.n_blocks * WARPS ? r.s->all[r.lane * EACH + i].a : 0;
    uint64_t upto = warp_scan(four, r.lane), total = __shfl_sync(~0u, upto, 31);
    uint64_t at = __umul64hi(bits << 11, total), before = 0;
    unsigned me = r.block * WARPS + r.warp;
    before = __shfl_sync(~0u, upto - four, me / EACH);
    for (unsigned i = me / EACH * EACH; i < me; i++)
        before += r.s->all[i].a;
    if (at < before || at - before >= mine)
        return -1;
    at -= before;
    /* The lane's stretch, then the stretch that at falls into, 32 ids at a time. */
    uint32_t base = r.warp * 32 * r.per_lane;
    uint64_t stretch = 0;
    for (uint32_t j = 0, i = base + r.lane * r.per_lane; j < r.per_lane; j++, i++)
        stretch += fixed(kept_weight(k, r.value[i], r.first_id + i));
    upto = warp_scan(stretch, r.lane);
    int owner = __ffs((int)__ballot_sync(~0u, upto > at)) - 1;
    at -= __shfl_sync(~0u, upto - stretch, owner);
    base += owner * r.per_lane;
    for (uint32_t j = 0; j < r.per_lane; j += 32) {
        uint32_t i = base + j + r.lane;
        uint64_t w = j + r.lane < r.per_lane ? fixed(kept_weight(k, r.value[i], r.first_id + i)) : 0;
        upto = warp_scan(w, r.lane);
        uint32_t mask = __ballot_sync(~0u, upto > at);
        if (mask)
            return (int32_t)(r.first_id + base + j + (uint32_t)(__ffs((int)mask) - 1));
        at -= __shfl_sync(~0u, upto, 31);
    }
    return -1;
}

template <bool IN_SHARED>
static __device__ int32_t pick(struct row &r, const struct dn_sample &p, const struct extremes &e)
{
    struct kept k = {-INFINITY, ~0u, e.max, 1.0f / p.temperature, p.min_p};
    struct measure m = {false, e.max, k.inv_t, -INFINITY};
    if (p.top_k > 0 && (uint32_t)p.top_k < r.n) {
        uint64_t need = (uint64_t)p.top_k;
        k.cut = value_of(select_rank<IN_SHARED>(r, m, e.min, &need, 0).high);
    }
    if (p.top_p < 1.0f) {
        m = {true, e.max, k.inv_t, k.cut};
        uint64_t need = 0;
        struct interval at = select_rank<IN_SHARED>(r, m, e.min, &need, p.top_p);
        k.cut = value_of(at.high);
        uint64_t each = fixed(weight_of(k.cut, e.max, k.inv_t)), left = need - at.above;
        if (left + each <= at.own) /* not all ties are needed */
            k.tie_end = tie_end(r, k.cut, (left + each - 1) / each);
    }
    return draw<IN_SHARED>(r, k, dn_sample_bits(p.seed, p.counter));
}

/* ---- Log-probabilities ---- */

/* Sum of e^(x - max), as an integer: its logarithm is taken by the few threads that write. */
template <bool IN_SHARED> static __device__ uint64_t exp_sum(struct row &r, float max)
{
    uint64_t mine = 0;
    struct sum sum = {0, 0};
    FOR_MY_VALUES(r)
    {
        float w = weight_of(r.value[i], max, 1.0f);
        if (IN_SHARED)
            add_weight(sum, w);
        else
            mine += fixed(w);
    }
    mine += IN_SHARED ? sum_of(sum, r.per_lane) : 0;
    exchange(r, warp_sum(mine), 0);
    mine = 0;
    for (unsigned i = r.lane; i < r.n_blocks * WARPS; i += 32)
        mine += r.s->all[i].a;
    return warp_sum(mine);
}
static __device__ __forceinline__ float log_probability(float x, float max, uint64_t sum)
{
    return (float)((double)x - (double)max - log((double)sum * (1.0 / ((uint64_t)1 << WEIGHT_BITS))));
}

/* The n largest values, ids rising on ties, into s->top of the first block, in any order. */
template <bool IN_SHARED> static __device__ void find_top(struct row &r, const struct extremes &e, uint32_t n)
{
    struct shared *s = r.s;
    uint64_t need = n;
    struct measure m = {false, e.max, 1.0f, -INFINITY};
    if (threadIdx.x == 0)
        s->n_top = 0; /* seen by the others after the first exchange */
    struct interval at = select_rank<IN_SHARED>(r, m, e.min, &need, 0);
    float cut = value_of(at.high);
    /* Ids that do not exist look like ids that are ruled out, but come after all of them. */
    uint32_t end = need - at.above < at.own ? tie_end(r, cut, need - at.above) : ~0u;
    FOR_MY_VALUES(r)
    {
        float v = r.value[i];
        uint32_t id = r.first_id + i;
        if (v > cut || (v == cut && id < end)) {
            uint32_t place = atomicAdd(of_block(&s->n_top, 0), 1u);
            if (place < DN_MAX_TOP)
                *of_block(&s->top[place], 0) = (uint64_t)key_of(v) << 32 | ~id;
        }
    }
    cluster_sync();
}

/* By the first block. */
static __device__ void write_top(const struct shared *s, uint32_t n, float max, uint64_t sum, struct dn_sampled *out)
{
    if (threadIdx.x >= n)
        return;
    uint64_t mine = s->top[threadIdx.x];
    uint32_t rank = 0;
    for (uint32_t i = 0; i < n; i++)
        rank += s->top[i] > mine;
    out->top_id[rank] = (int32_t) ~(uint32_t)mine;
    out->top_logprob[rank] = log_probability(value_of((uint32_t)(mine >> 32)), max, sum);
}

/* ---- The kernel ---- */

struct sample_args {
    struct dn_cuda_step step;
    const float *logits;
    const uint16_t *counts; /* [slots][count_stride] */
    float *values;          /* workspace, if they are not in shared memory */
    uint32_t n_vocab, n_valid, count_stride, per_lane;
};

/* out->id is -1. Whoever knows the id writes it: the first thread, or the warp that has drawn it. */
template <bool IN_SHARED>
static __device__ void sample_row(struct row &r, const struct sample_args &a, const float *logits,
                                  struct dn_sampled *out)
{
    const struct dn_sample &p = r.s->row;
    struct extremes e = load(r, logits);
    bool is_first = r.block == 0 && threadIdx.x == 0, is_target = p.target >= 0, draws = false;
    if (!e.finite || (is_target && (uint32_t)p.target >= r.n))
        return;
    float max = e.max;
    uint64_t sum = 0;
    uint32_t n_top = 0;
    int32_t id = p.target;
    if (p.n_top >= 0) {
        sum = exp_sum<IN_SHARED>(r, max);
        n_top = min((uint32_t)p.n_top, r.n);
        if (n_top)
            find_top<IN_SHARED>(r, e, n_top);
    }
    if (!is_target) {
        bool penalties = p.slot >= 0 && (p.repetition != 1.0f || p.frequency != 0.0f || p.presence != 0.0f);
        if (penalties || p.n_ban > 0)
            e = adjust(r, p, penalties ? a.counts + (size_t)p.slot * a.count_stride : NULL);
        if (!e.finite) /* every id is banned */
            return;
        draws = p.temperature >= DN_GREEDY_BELOW;
        id = draws ? pick<IN_SHARED>(r, p, e) : (int32_t)e.id;
    }
    if (id >= 0 && (draws ? r.lane == 0 : is_first)) {
        out->id = id;
        if (p.n_top >= 0)
            out->logprob = log_probability(__ldcg(logits + id), max, sum);
    }
    if (n_top && r.block == 0) {
        if (threadIdx.x == 0)
            out->n_top = (int32_t)n_top;
        write_top(r.s, n_top, max, sum, out);
    }
}

template <bool IN_SHARED>
static __global__ void CLUSTER __launch_bounds__(THREADS, 2) sample_kernel(struct sample_args a)
{
    extern __shared__ __align__(16) unsigned char memory[];
    struct row r;
    r.s = (struct shared *)memory;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    r.n_blocks = BLOCKS;
#else
    r.n_blocks = 1;
#endif
    uint32_t at = blockIdx.x / r.n_blocks;
    r.block = blockIdx.x % r.n_blocks;
    r.warp = threadIdx.x / 32;
    r.lane = threadIdx.x % 32;
    r.turn = 0;
    r.n = a.n_valid;
    r.per_lane = a.per_lane;
    r.first_id = r.block * THREADS * a.per_lane;
    r.value = IN_SHARED ? (float *)(memory + sizeof(struct shared))
                        : a.values + ((size_t)at * r.n_blocks + r.block) * THREADS * a.per_lane;
    dn_start_next();
    dn_wait_previous();
    if (at >= a.step.count[DN_COUNT_ROWS])
        return;
    struct dn_sampled *out = a.step.result + at;
    if (r.block == 0) { /* seen by the other blocks after the first exchange */
        for (unsigned i = threadIdx.x; i < sizeof *out / 4; i += THREADS)
            ((uint32_t *)out)[i] = i == 0 ? ~0u : 0;
    }
    if (a.step.bad[a.step.token_seq[a.step.row_token[at]]])
        return;
    static_assert(sizeof(struct dn_sample) % 4 == 0 && offsetof(struct dn_sampled, id) == 0, "copied by words");
    for (unsigned i = threadIdx.x; i < sizeof(struct dn_sample) / 4; i += THREADS)
        ((uint32_t *)&r.s->row)[i] = ((const uint32_t *)(a.step.sample + at))[i];
    sample_row<IN_SHARED>(r, a, a.logits + (size_t)at * a.n_vocab, out);
    cluster_sync(); /* nobody's memory goes while others read it */
}

/* ---- The operations ---- */

void dn_cuda_sample_rows(struct dn_device *d, const struct dn_sample_rows *p)
{
    struct dn_cuda *c = dn_cuda(d);
    DN_BUG_ON(p->n_valid == 0 || p->n_valid > p->n_vocab || p->n_vocab > c->conf.n_vocab);
    if (c->n_rows == 0)
        return;
    uint32_t n_blocks = c->code >= 90 ? BLOCKS : 1, step = n_blocks * THREADS;
    uint32_t per_lane = ((p->n_valid + step - 1) / step + 3) & ~3u;
    size_t values = (size_t)per_lane * THREADS * sizeof(float), shared = sizeof(struct shared);
    bool in_shared = per_lane * THREADS <= MAX_IN_SHARED && shared + values <= c->shared_bytes;
    struct sample_args a = {c->step,    p->logits,  c->token_counts, NULL,
                            p->n_vocab, p->n_valid, c->conf.n_vocab, per_lane};
    if (!in_shared)
        a.values = (float *)dn_cuda_workspace(c, (size_t)c->n_rows * n_blocks * values);
    dn_launch(c, "sample_rows", in_shared ? sample_kernel<true> : sample_kernel<false>, dim3(c->n_rows * n_blocks),
              dim3(THREADS), in_shared ? shared + values : shared, a);
}

/* The row of counts is made on the host: there is no device memory for the prompt's ids, and requests with penalties
 * are few. The copy waits its turn behind the steps before it. */
void dn_cuda_slot_fill(struct dn_device *d, int32_t slot, const int32_t *prompt_id, size_t n)
{
    struct dn_cuda *c = dn_cuda(d);
    DN_BUG_ON(slot < 0 || (uint32_t)slot >= c->conf.n_slots);
    size_t n_vocab = c->conf.n_vocab;
    uint16_t *row = (uint16_t *)calloc(n_vocab, sizeof *row);
    DN_BUG_ON(!row);
    for (size_t i = 0; i < n; i++) {
        DN_BUG_ON(prompt_id[i] < 0 || (size_t)prompt_id[i] >= n_vocab);
        row[prompt_id[i]] = DN_COUNT_PROMPT;
    }
    cudaError_t e = cudaMemcpyAsync(c->token_counts + (size_t)slot * n_vocab, row, n_vocab * sizeof *row,
                                    cudaMemcpyHostToDevice, c->stream);
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(c->stream);
    if (e != cudaSuccess)
        dn_cuda_failed(c, e, "slot_fill");
    free(row);
}
