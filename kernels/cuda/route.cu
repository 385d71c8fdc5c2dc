/* The router of a mixture of experts: which experts a token takes, and with what weight.
 *
 * s = 1 / (1 + exp(-logit)), choice = s + bias; of n_groups equal groups the top_groups with the largest sum of their
 * two best choices stay; of their experts the top_k best choices, lowest id on ties; weight = s / (sum of s + 1e-20) *
 * scale.
 *
 * One warp a token. Lane l holds the choices of experts l, l + 32, ..., as keys that order as the floats do when
 * compared as unsigned integers (0 = not to be chosen, 1 = NaN). Each of the top_k rounds takes the lane's best key
 * (the lowest expert on ties, since a lane's experts ascend), then the warp's by redux.sync, then the lowest expert
 * that has it. Lane k keeps the k-th. expf() and the division are the accurate ones: 2 ulp from exact, so that choices
 * are those of the CPU unless two are that close.
 *
 * Floor: n_tokens * n_experts * 4 bytes, nothing beside the launch. No shared memory.
 */
#include "kernels/cuda/device.cuh"

enum { ROUTE_WARPS = 4 };

/* -0 counts as 0. */
static __device__ __forceinline__ uint32_t route_key(float choice)
{
    uint32_t u = __float_as_uint(choice + 0.0f);
    if ((u & 0x7fffffffu) > 0x7f800000u)
        return 1;
    return u & 0x80000000u ? ~u : u | 0x80000000u; /* -inf is 0x007fffff: above the two special keys */
}
static __device__ __forceinline__ float route_choice(uint32_t key)
{
    return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key);
}
static __device__ __forceinline__ float route_sigmoid(float x)
{
    return __fdiv_rn(1.0f, __fadd_rn(1.0f, expf(-x)));
}

/* The largest, and the lowest expert that has `value` (~0: none). Trees, since a chain of N comparisons is latency. */
template <int N> static __device__ __forceinline__ uint32_t route_max(const uint32_t (&key)[N])
{
    uint32_t m[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        m[i] = key[i];
#pragma unroll
    for (int d = 1; d < N; d *= 2)
#pragma unroll
        for (int i = 0; i + d < N; i += 2 * d)
            m[i] = max(m[i], m[i + d]);
    return m[0];
}
template <int N>
static __device__ __forceinline__ uint32_t route_find(const uint32_t (&key)[N], uint32_t value, int lane)
{
    uint32_t m[N];
#pragma unroll
    for (int i = 0; i < N; i++)
        m[i] = key[i] == value ? (uint32_t)(i * 32 + lane) : ~0u;
#pragma unroll
    for (int d = 1; d < N; d *= 2)
#pragma unroll
        for (int i = 0; i + d < N; i += 2 * d)
            m[i] = min(m[i], m[i + d]);
    return m[0];
}
/* The best of the warp's keys and who has it. All 0: any. */
template <int N> static __device__ __forceinline__ uint32_t route_best(const uint32_t (&key)[N], int lane)
{
    uint32_t first = __reduce_max_sync(0xffffffffu, route_max<N>(key));
    return __reduce_min_sync(0xffffffffu, route_find<N>(key, first, lane));
}

/* The key of the sum of a group's two best choices: those of the lanes' keys whose experts lie in [from, to). */
template <int N>
static __device__ uint32_t route_group_key(const uint32_t (&key)[N], int lane, uint32_t from, uint32_t to)
{
    uint32_t best = 0, second = 0;
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint32_t e = (uint32_t)(i * 32 + lane);
        uint32_t k = e >= from && e < to ? key[i] : 0;
        second = max(second, min(best, k));
        best = max(best, k);
    }
    uint32_t first = __reduce_max_sync(0xffffffffu, best);
    int owner = __ffs(__ballot_sync(0xffffffffu, best == first)) - 1;
    uint32_t next = __reduce_max_sync(0xffffffffu, lane == owner ? second : best);
    if (first <= 1)
        return 1;
    return route_key(next <= 1 ? route_choice(first) : __fadd_rn(route_choice(first), route_choice(next)));
}

/* Leaves only the experts of the top_groups best groups. Lane l keeps the keys of groups l, l + 32, ...: n_groups <=
 * 1024. */
template <int N>
static __device__ void route_keep_groups(uint32_t (&key)[N], int lane, uint32_t n_experts, uint32_t n_groups,
                                         uint32_t top_groups)
{
    uint32_t size = n_experts / n_groups;
    uint32_t group[N], keep[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        group[i] = 0;
        keep[i] = 0;
    }
    for (uint32_t g = 0; g < n_groups; g++) {
        uint32_t k = route_group_key<N>(key, lane, g * size, (g + 1) * size);
#pragma unroll
        for (int i = 0; i < N; i++)
            if (g == (uint32_t)(i * 32 + lane))
                group[i] = k;
    }
    for (uint32_t n = 0; n < top_groups; n++) {
        uint32_t g = route_best<N>(group, lane);
#pragma unroll
        for (int i = 0; i < N; i++) {
            uint32_t e = (uint32_t)(i * 32 + lane);
            if (e == g)
                group[i] = 0;
            if (e >= g * size && e < (g + 1) * size)
                keep[i] = 1;
        }
    }
#pragma unroll
    for (int i = 0; i < N; i++)
        if (!keep[i])
            key[i] = 0;
}

template <int N>
static __global__ void __launch_bounds__(ROUTE_WARPS * 32)
    route_kernel(struct dn_route p, uint32_t n_rows, const uint32_t *count)
{
    uint32_t t = blockIdx.x * ROUTE_WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    float x[N], bias[N];
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint32_t e = (uint32_t)(i * 32 + lane);
        bias[i] = p.bias && e < p.n_experts ? p.bias[e] : 0.0f; /* a constant of the model */
    }
    dn_wait_previous();
    dn_start_next();
    const float *logits = p.logits + (size_t)t * p.n_experts;
    bool there = t < n_rows; /* the grid's rows have memory, so that what counts may be loaded along with them */
#pragma unroll
    for (int i = 0; i < N; i++)
        x[i] = there && i * 32 + lane < (int)p.n_experts ? logits[i * 32 + lane] : 0;
    if (t >= count[DN_COUNT_TOKENS])
        return;
    uint32_t key[N];
    bool nan = false;
#pragma unroll
    for (int i = 0; i < N; i++) {
        uint32_t e = (uint32_t)(i * 32 + lane);
        nan |= isnan(x[i]);
        key[i] = e < p.n_experts ? route_key(__fadd_rn(route_sigmoid(x[i]), bias[i])) : 0;
    }
    nan = __any_sync(0xffffffffu, nan);
    if (p.n_groups > 1 && p.top_groups < p.n_groups)
        route_keep_groups<N>(key, lane, p.n_experts, p.n_groups, p.top_groups);

    uint32_t mine = 0;
    for (uint32_t k = 0; k < p.top_k; k++) {
        uint32_t e = route_best<N>(key, lane);
        if (lane == (int)k)
            mine = e;
#pragma unroll
        for (int i = 0; i < N; i++)
            if (e == (uint32_t)(i * 32 + lane))
                key[i] = 0;
    }
    mine = min(mine, p.n_experts - 1); /* top_k is no more than there are, so this is for the compiler's peace */
    float s = lane < (int)p.top_k ? route_sigmoid(logits[mine]) : 0;
    float sum = 0;
    for (uint32_t k = 0; k < p.top_k; k++)
        sum = __fadd_rn(sum, __shfl_sync(0xffffffffu, s, (int)k));
    if (p.normalise)
        s = __fdiv_rn(s, __fadd_rn(sum, 1e-20f));
    s = __fmul_rn(s, p.scale);
    if (lane < (int)p.top_k) {
        p.expert[(size_t)t * p.top_k + lane] = (int32_t)mine;
        p.weight[(size_t)t * p.top_k + lane] = nan ? __int_as_float(0x7fffffff) : s;
    }
}

void dn_cuda_route(struct dn_device *d, const struct dn_route *p)
{
    struct dn_cuda *c = dn_cuda(d);
    dim3 grid((c->n_tokens + ROUTE_WARPS - 1) / ROUTE_WARPS);
#define ROUTE(n) dn_launch(c, "route", route_kernel<n>, grid, dim3(ROUTE_WARPS * 32), 0, *p, c->n_tokens, c->step.count)
    if (p->n_experts <= 64)
        ROUTE(2);
    else if (p->n_experts <= 128)
        ROUTE(4);
    else if (p->n_experts <= 256)
        ROUTE(8);
    else if (p->n_experts <= 384)
        ROUTE(12);
    else if (p->n_experts <= 512)
        ROUTE(16);
    else
        ROUTE(32);
#undef ROUTE
}
