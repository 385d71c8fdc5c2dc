/* Operations on rows: embedding, RMSNorm of the residual and of activations, SiLU.
 *
 * rmsnorm: x += add; out = bf16(x / sqrt(mean(x^2) + eps) * weight). One block a token; a thread has 8 neighbouring
 * values (32 bytes of x, 16 of add and out) of every blockDim * 8, in registers from the sum to the product. The sum is
 * of threads, then warps, then the block: an order that depends on dim alone. With rows_only a token that no row wants
 * is updated and no more. Floor: 12 bytes a value of x and add, 2 of out; for few tokens the latency of one trip to
 * memory. The weight is fetched before the previous kernel's end.
 * On an H200, rows of 7,168 that are not in the L2 cache: 2.8 us for 1 to 16, 3.2 us for 64 (1.7 TB/s); half or a
 * quarter of the threads with more values each: 2.6 and 2.8 us for 1, 3.5 and 4.4 us for 64. norm_act of 1,536: 1.4 to
 * 1.6 us. SiLU of 18,432: 1.2 us for 1, 3.4 us for 64 (2.1 TB/s).
 *
 * Dimensions that are no multiple of 8, rows that are not 16-byte aligned, and dimensions above 32,768 take a plain
 * loop over memory (no model here has any).
 */
#include "kernels/cuda/device.cuh"
#include "kernels/cuda/weights.cuh"

enum { THREADS = 256, MAX_THREADS = 1024, WIDTH = 8, EMBED_VALUES = 4 };

static __device__ __forceinline__ float bf16_low(uint32_t w)
{
    return __uint_as_float(w << 16);
}
static __device__ __forceinline__ float bf16_high(uint32_t w)
{
    return __uint_as_float(w & 0xffff0000);
}
static __device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
    __nv_bfloat162 r = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&r;
}
static __device__ __forceinline__ void unpack8(uint4 v, float out[WIDTH])
{
    const uint32_t w[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = bf16_low(w[i]);
        out[2 * i + 1] = bf16_high(w[i]);
    }
}
static __device__ __forceinline__ uint4 pack8(const float v[WIDTH])
{
    return make_uint4(bf16_pair(v[0], v[1]), bf16_pair(v[2], v[3]), bf16_pair(v[4], v[5]), bf16_pair(v[6], v[7]));
}
static __device__ __forceinline__ void load8(const float *p, float out[WIDTH])
{
    float4 a = ((const float4 *)p)[0], b = ((const float4 *)p)[1];
    out[0] = a.x, out[1] = a.y, out[2] = a.z, out[3] = a.w;
    out[4] = b.x, out[5] = b.y, out[6] = b.z, out[7] = b.w;
}

/* The block's sum, in every thread. */
static __device__ float block_sum(float v)
{
    __shared__ float part[32];
    for (int i = 16; i > 0; i /= 2)
        v += __shfl_xor_sync(0xffffffff, v, i);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = v;
    __syncthreads();
    v = threadIdx.x % 32 < (blockDim.x + 31) / 32 ? part[threadIdx.x % 32] : 0;
    for (int i = 16; i > 0; i /= 2)
        v += __shfl_xor_sync(0xffffffff, v, i);
    return v;
}

/* ---- Embedding ---- */

static __global__ void __launch_bounds__(THREADS)
    embed(struct dn_cuda_step s, struct dn_weights table, uint32_t n_ids, float *out)
{
    dn_wait_previous();
    dn_start_next();
    uint32_t t = blockIdx.x;
    if (t >= s.count[DN_COUNT_TOKENS])
        return;
    uint32_t id = (uint32_t)s.token_id[t], first = blockIdx.y * THREADS * EMBED_VALUES + threadIdx.x;
#pragma unroll
    for (int i = 0; i < EMBED_VALUES; i++) {
        uint32_t k = first + i * THREADS; /* an id without a row: not a number, which ends its sequence */
        if (k < table.n_in)
            out[(size_t)t * table.n_in + k] = id < n_ids ? dn_weight(table, id, k) : __int_as_float(0x7fc00000);
    }
}

void dn_cuda_embed(struct dn_device *d, const struct dn_embed *p)
{
    struct dn_cuda *c = dn_cuda(d);
    uint32_t per_block = THREADS * EMBED_VALUES;
    dn_launch(c, "embed", embed, dim3(c->n_tokens, (p->table->n_in + per_block - 1) / per_block), dim3(THREADS), 0,
              c->step, dn_weights_of(p->table), p->table->n_out, p->out);
}

/* ---- RMSNorm ---- */

struct norm_args {
    float *x; /* NULL: rows come from `add` alone and are not stored */
    const uint16_t *add;
    uint32_t add_stride;
    const float *weight;
    float eps;
    uint32_t dim;
    bool rows_only;
    uint16_t *out;
};

/* The first and last of the step's rows that want token t; first > last: none does. All threads get both. */
static __device__ void rows_of(const struct dn_cuda_step &s, int32_t t, int *first, int *last)
{
    __shared__ int lowest, highest;
    if (threadIdx.x == 0) {
        lowest = INT32_MAX;
        highest = -1;
    }
    __syncthreads();
    for (uint32_t r = threadIdx.x; r < s.count[DN_COUNT_ROWS]; r += blockDim.x) {
        if (s.row_token[r] == t) {
            atomicMin(&lowest, (int)r);
            atomicMax(&highest, (int)r);
        }
    }
    __syncthreads();
    *first = lowest;
    *last = highest;
}

template <int CHUNKS>
static __global__ void __launch_bounds__(MAX_THREADS) norm(struct dn_cuda_step s, struct norm_args p)
{
    constexpr bool AHEAD = CHUNKS <= 2; /* more do not fit the registers of 1,024 threads */
    uint32_t t = blockIdx.x;
    float w[AHEAD ? CHUNKS : 1][WIDTH], v[CHUNKS][WIDTH];
#pragma unroll
    for (int i = 0; AHEAD && i < CHUNKS; i++) {
        uint32_t k = (i * blockDim.x + threadIdx.x) * WIDTH;
        if (k < p.dim)
            load8(p.weight + k, w[i]);
    }
    dn_wait_previous();
    dn_start_next();
    if (t >= s.count[DN_COUNT_TOKENS])
        return;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        uint32_t k = (i * blockDim.x + threadIdx.x) * WIDTH;
        if (k >= p.dim)
            continue;
        float a[WIDTH];
        float *x = p.x ? p.x + (size_t)t * p.dim + k : NULL;
        if (p.add)
            unpack8(*(const uint4 *)(p.add + (size_t)t * p.add_stride + k), a);
        if (x) {
            load8(x, v[i]);
            if (p.add) {
                for (int j = 0; j < WIDTH; j++)
                    v[i][j] += a[j];
                ((float4 *)x)[0] = make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
                ((float4 *)x)[1] = make_float4(v[i][4], v[i][5], v[i][6], v[i][7]);
            }
        } else {
            for (int j = 0; j < WIDTH; j++)
                v[i][j] = a[j];
        }
        for (int j = 0; j < WIDTH; j++)
            sum = fmaf(v[i][j], v[i][j], sum);
    }
    int first = (int)t, last = (int)t;
    if (p.rows_only) {
        rows_of(s, (int32_t)t, &first, &last);
        if (first > last)
            return;
    }
    float scale = rsqrtf(block_sum(sum) / (float)p.dim + p.eps);
#pragma unroll
    for (int i = 0; i < CHUNKS; i++) {
        uint32_t k = (i * blockDim.x + threadIdx.x) * WIDTH;
        if (k >= p.dim)
            continue;
        if (!AHEAD)
            load8(p.weight + k, w[0]);
        for (int j = 0; j < WIDTH; j++)
            v[i][j] = v[i][j] * scale * w[AHEAD ? i : 0][j];
        uint4 packed = pack8(v[i]);
        for (int r = first; r <= last; r++)
            if (!p.rows_only || s.row_token[r] == (int32_t)t)
                *(uint4 *)(p.out + (size_t)r * p.dim + k) = packed;
    }
}

/* Any dimension and alignment: the row is read twice. */
static __global__ void __launch_bounds__(MAX_THREADS) norm_plain(struct dn_cuda_step s, struct norm_args p)
{
    uint32_t t = blockIdx.x;
    dn_wait_previous();
    dn_start_next();
    if (t >= s.count[DN_COUNT_TOKENS])
        return;
    const uint16_t *add = p.add ? p.add + (size_t)t * p.add_stride : NULL;
    float *x = p.x ? p.x + (size_t)t * p.dim : NULL, sum = 0;
    for (uint32_t k = threadIdx.x; k < p.dim; k += blockDim.x) {
        float v = (x ? x[k] : 0) + (add ? bf16_low(add[k]) : 0);
        if (x && add)
            x[k] = v;
        sum = fmaf(v, v, sum);
    }
    int first = (int)t, last = (int)t;
    if (p.rows_only) {
        rows_of(s, (int32_t)t, &first, &last);
        if (first > last)
            return;
    }
    float scale = rsqrtf(block_sum(sum) / (float)p.dim + p.eps);
    for (uint32_t k = threadIdx.x; k < p.dim; k += blockDim.x) {
        float v = (x ? x[k] : bf16_low(add[k])) * scale * p.weight[k]; /* x[k] is what this thread wrote */
        for (int r = first; r <= last; r++)
            if (!p.rows_only || s.row_token[r] == (int32_t)t)
                ((__nv_bfloat16 *)p.out)[(size_t)r * p.dim + k] = __float2bfloat16_rn(v);
    }
}

static bool aligned(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

static void launch_norm(struct dn_cuda *c, const char *what, const struct norm_args *p)
{
    uint32_t pieces = p->dim / WIDTH, threads = pieces < MAX_THREADS ? (pieces + 31) / 32 * 32 : (uint32_t)MAX_THREADS;
    uint32_t chunks = threads ? (pieces + threads - 1) / threads : 0;
    DN_BUG_ON(p->dim == 0);
    if (p->dim % WIDTH || p->add_stride % WIDTH || chunks > 4 || !aligned(p->x) || !aligned(p->add) ||
        !aligned(p->weight) || !aligned(p->out)) {
        dn_launch(c, what, norm_plain, dim3(c->n_tokens), dim3(THREADS), 0, c->step, *p);
        return;
    }
    void (*kernel)(struct dn_cuda_step, struct norm_args) = chunks == 1 ? norm<1> : chunks == 2 ? norm<2> : norm<4>;
    dn_launch(c, what, kernel, dim3(c->n_tokens), dim3(threads), 0, c->step, *p);
}

void dn_cuda_rmsnorm(struct dn_device *d, const struct dn_rmsnorm *p)
{
    struct norm_args a = {};
    a.x = p->x;
    a.add = (const uint16_t *)p->add;
    a.add_stride = p->dim;
    a.weight = p->weight;
    a.eps = p->eps;
    a.dim = p->dim;
    a.rows_only = p->rows_only;
    a.out = (uint16_t *)p->out;
    launch_norm(dn_cuda(d), "rmsnorm", &a);
}

void dn_cuda_norm_act(struct dn_device *d, const struct dn_norm_act *p)
{
    struct norm_args a = {};
    a.add = (const uint16_t *)p->a;
    a.add_stride = p->a_stride;
    a.weight = p->weight;
    a.eps = p->eps;
    a.dim = p->dim;
    a.out = (uint16_t *)p->out;
    launch_norm(dn_cuda(d), "norm_act", &a);
}

/* ---- SiLU ---- */

static __device__ __forceinline__ float silu_mul(float gate, float up)
{
    return __fdividef(gate, 1 + __expf(-gate)) * up;
}

/* Eight values a thread, or one if rows are not aligned. */
template <int VALUES>
static __global__ void __launch_bounds__(THREADS)
    silu(struct dn_cuda_step s, const uint16_t *gate_up, uint32_t dim, uint16_t *out)
{
    dn_wait_previous();
    dn_start_next();
    uint32_t t = blockIdx.y, k = (blockIdx.x * THREADS + threadIdx.x) * VALUES;
    if (t >= s.count[DN_COUNT_TOKENS] || k >= dim)
        return;
    const uint16_t *gate = gate_up + (size_t)t * 2 * dim + k, *up = gate + dim;
    if constexpr (VALUES == 1) {
        ((__nv_bfloat16 *)out)[(size_t)t * dim + k] = __float2bfloat16_rn(silu_mul(bf16_low(*gate), bf16_low(*up)));
    } else {
        float g[WIDTH], u[WIDTH];
        unpack8(*(const uint4 *)gate, g);
        unpack8(*(const uint4 *)up, u);
        for (int j = 0; j < WIDTH; j++)
            g[j] = silu_mul(g[j], u[j]);
        *(uint4 *)(out + (size_t)t * dim + k) = pack8(g);
    }
}

void dn_cuda_silu_mul(struct dn_device *d, const struct dn_silu_mul *p)
{
    struct dn_cuda *c = dn_cuda(d);
    bool wide = p->dim % WIDTH == 0 && aligned(p->gate_up) && aligned(p->out);
    uint32_t per_block = THREADS * (wide ? WIDTH : 1);
    if (!p->dim)
        return;
    void (*kernel)(struct dn_cuda_step, const uint16_t *, uint32_t, uint16_t *) = wide ? silu<WIDTH> : silu<1>;
    dn_launch(c, "silu_mul", kernel, dim3((p->dim + per_block - 1) / per_block, c->n_tokens), dim3(THREADS), 0, c->step,
              (const uint16_t *)p->gate_up, p->dim, (uint16_t *)p->out);
}
