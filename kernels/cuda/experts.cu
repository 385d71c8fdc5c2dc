/* Experts: the sort by expert, the sum over a token's experts, and the decode kernels. experts.cuh has the design.
 *
 * Three launches: list (6 us together with sum for one token, measured alone), the persistent kernel, sum.
 */
#include "kernels/cuda/experts.cuh"

enum { LIST_THREADS = 1024, LIST_WARPS = LIST_THREADS / 32, SUM_THREADS = 128 };
static_assert((int)LIST_THREADS >= (int)DN_MAX_EXPERTS, "a thread an expert");

/* Sums of both halves over lower threads, and in total. Packs pairs (low) and tiles (high). */
static __device__ uint64_t list_scan(uint64_t v, uint64_t *warp_sum, uint64_t *total)
{
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    uint64_t sum = v;
    for (int d = 1; d < 32; d *= 2) {
        uint64_t o = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= d)
            sum += o;
    }
    if (lane == 31)
        warp_sum[warp] = sum;
    __syncthreads();
    uint64_t below = 0, all = 0;
    for (int i = 0; i < LIST_WARPS; i++) {
        if (i < warp)
            below += warp_sum[i];
        all += warp_sum[i];
    }
    *total = all;
    return below + sum - v;
}

/* One block. Pairs keep their order within an expert: a chunk of 1024 pairs at a time, ranks within a warp by match,
 * then a sum over the chunk's warps. Experts out of range (there are none) count as the last. */
static __global__ void __launch_bounds__(LIST_THREADS)
    experts_list_kernel(struct experts_list l, const int32_t *expert, uint32_t n_experts, uint32_t top_k, uint32_t rows,
                        uint32_t n_blocks, uint32_t most, const uint32_t *count)
{
    extern __shared__ __align__(16) uint16_t in_warp[]; /* [LIST_WARPS][DN_MAX_EXPERTS] */
    __shared__ uint32_t pairs[DN_MAX_EXPERTS], cursor[DN_MAX_EXPERTS];
    __shared__ uint64_t warp_sum[LIST_WARPS];
    uint32_t id = threadIdx.x, lane = id % 32, warp = id / 32;
    pairs[id] = 0;
    dn_wait_previous();
    dn_start_next();
    uint32_t n = count[DN_COUNT_TOKENS] * top_k;
    uint32_t e0 = id < most ? min((uint32_t)expert[id], n_experts - 1) : 0; /* on its way together with n */
    __syncthreads();
    if (id < n)
        atomicAdd(&pairs[e0], 1);
    for (uint32_t i = id + LIST_THREADS; i < n; i += LIST_THREADS)
        atomicAdd(&pairs[min((uint32_t)expert[i], n_experts - 1)], 1);
    __syncthreads();
    uint32_t mine = pairs[id], tiles = (mine + rows - 1) / rows;
    uint64_t total, at = list_scan((uint64_t)tiles << 32 | mine, warp_sum, &total);
    uint32_t first = (uint32_t)at, tile = (uint32_t)(at >> 32);
    cursor[id] = first;
    for (uint32_t i = 0; i < tiles; i++) {
        l.tile[tile + i] = {id, first + i * rows, min(rows, mine - i * rows), tiles};
        l.done[tile + i] = 0;
    }
    if (id == 0) {
        *l.n_tiles = (uint32_t)(total >> 32);
        l.claim[0] = l.claim[1] = n_blocks; /* a block's first item has its own number */
    }
    for (uint32_t from = 0; from < n; from += LIST_THREADS) {
        uint32_t in_chunk = min(n - from, (uint32_t)LIST_THREADS), warps = (in_chunk + 31) / 32;
        for (uint32_t w = 0; w < warps; w++)
            in_warp[w * DN_MAX_EXPERTS + id] = 0;
        __syncthreads();
        uint32_t i = from + id, e = ~0u, rank = 0;
        if (id < in_chunk)
            e = from ? min((uint32_t)expert[i], n_experts - 1) : e0;
        uint32_t same = __match_any_sync(0xffffffffu, e);
        rank = __popc(same & ((1u << lane) - 1));
        if (id < in_chunk && rank == 0)
            in_warp[warp * DN_MAX_EXPERTS + e] = (uint16_t)__popc(same);
        __syncthreads();
        uint32_t sum = 0;
        for (uint32_t w = 0; w < warps; w++) {
            uint32_t v = in_warp[w * DN_MAX_EXPERTS + id];
            in_warp[w * DN_MAX_EXPERTS + id] = (uint16_t)sum;
            sum += v;
        }
        __syncthreads();
        if (id < in_chunk) {
            uint32_t to = cursor[e] + in_warp[warp * DN_MAX_EXPERTS + e] + rank;
            l.token[to] = i / top_k;
            l.where[i] = to;
        }
        __syncthreads();
        cursor[id] += sum;
    }
}

/* The same of up to 32 pairs, by one warp: nothing to wait for. Experts come in the order of their first pairs. */
static __global__ void __launch_bounds__(32)
    experts_list_small_kernel(struct experts_list l, const int32_t *expert, uint32_t n_experts, uint32_t top_k,
                              uint32_t rows, uint32_t n_blocks, uint32_t most, const uint32_t *count)
{
    uint32_t lane = threadIdx.x;
    dn_wait_previous();
    dn_start_next();
    uint32_t n = count[DN_COUNT_TOKENS] * top_k;
    uint32_t e = lane < most ? min((uint32_t)expert[lane], n_experts - 1) : ~0u;
    if (lane >= n)
        e = ~0u;
    uint32_t same = __match_any_sync(0xffffffffu, e), rank = __popc(same & ((1u << lane) - 1)), mine = __popc(same);
    bool leader = lane < n && rank == 0;
    uint32_t tiles = (mine + rows - 1) / rows, v = leader ? tiles << 16 | mine : 0, sum = v;
    for (int d = 1; d < 32; d *= 2) {
        uint32_t o = __shfl_up_sync(0xffffffffu, sum, d);
        if (lane >= (uint32_t)d)
            sum += o;
    }
    uint32_t at = sum - v, first = __shfl_sync(0xffffffffu, at & 0xffff, __ffs(same) - 1);
    for (uint32_t i = 0; leader && i < tiles; i++) {
        l.tile[(at >> 16) + i] = {e, first + i * rows, min(rows, mine - i * rows), tiles};
        l.done[(at >> 16) + i] = 0;
    }
    if (lane < n) {
        l.token[first + rank] = lane / top_k;
        l.where[lane] = first + rank;
    }
    if (lane == 31) {
        *l.n_tiles = sum >> 16;
        l.claim[0] = l.claim[1] = n_blocks;
    }
}

/* out = add + sum over k of weight * part, 4 values a thread. */
template <bool BF16_PART>
static __global__ void __launch_bounds__(SUM_THREADS)
    experts_sum_kernel(const void *part, const uint32_t *where, const float *weight, uint32_t top_k, uint32_t dim,
                       const __nv_bfloat16 *add, __nv_bfloat16 *out, const uint32_t *count)
{
    dn_wait_previous();
    dn_start_next();
    uint32_t t = blockIdx.y, d = (blockIdx.x * SUM_THREADS + threadIdx.x) * 4;
    if (t >= count[DN_COUNT_TOKENS] || d >= dim)
        return;
    float sum[4] = {0, 0, 0, 0};
#pragma unroll 8
    for (uint32_t k = 0; k < top_k; k++) {
        size_t at = (size_t)where[t * top_k + k] * dim + d;
        float w = weight[t * top_k + k], v[4];
        if constexpr (BF16_PART) {
            uint2 u = *(const uint2 *)((const __nv_bfloat16 *)part + at);
            v[0] = __uint_as_float(u.x << 16), v[1] = __uint_as_float(u.x & 0xffff0000);
            v[2] = __uint_as_float(u.y << 16), v[3] = __uint_as_float(u.y & 0xffff0000);
        } else {
            float4 u = *(const float4 *)((const float *)part + at);
            v[0] = u.x, v[1] = u.y, v[2] = u.z, v[3] = u.w;
        }
#pragma unroll
        for (int i = 0; i < 4; i++)
            sum[i] = __fmaf_rn(w, v[i], sum[i]);
    }
    uint2 r;
    __nv_bfloat16 *b = (__nv_bfloat16 *)&r;
    if (add)
        r = *(const uint2 *)(add + (size_t)t * dim + d);
#pragma unroll
    for (int i = 0; i < 4; i++)
        b[i] = __float2bfloat16_rn(add ? __fadd_rn(__bfloat162float(b[i]), sum[i]) : sum[i]);
    *(uint2 *)(out + (size_t)t * dim + d) = r;
}

void dn_cuda_experts_decode(struct dn_cuda *c, struct experts_args *p, const struct dn_weights *w)
{
    EXPERTS_BY_FORMAT(experts_launch, w, 2, c, p, w);
}

static size_t take(size_t *at, size_t bytes)
{
    size_t here = *at;
    *at += (bytes + 255) / 256 * 256;
    return here;
}

void dn_cuda_experts(struct dn_device *d, const struct dn_experts *q)
{
    struct dn_cuda *c = dn_cuda(d);
    bool decode = c->kind == DN_STEP_DECODE;
    struct experts_args p = {};
    p.gate_up = dn_weights_of(q->gate_up);
    p.down = dn_weights_of(q->down);
    p.dim = q->gate_up->n_in;
    p.ff = q->down->n_in;
    uint32_t n = c->n_tokens, most = decode ? 16 : 32, n_experts = dn_weights_groups(q->gate_up);
    size_t pairs = (size_t)n * q->top_k;
    for (p.rows = decode ? 8 : 16; p.rows < most && p.rows < n;) /* no less than the kernel's tokens at a time */
        p.rows *= 2;
    p.parts = p.ff % DN_TILE_ROWS ? 3 : 2;
    p.blocks1 = (p.ff + DN_TILE_ROWS - 1) / DN_TILE_ROWS;
    p.blocks2 = (p.dim / DN_TILE_ROWS + 1) / 2;
    p.a = (const __nv_bfloat16 *)q->a;

    size_t tiles = pairs / p.rows + (pairs < n_experts ? pairs : n_experts), bytes = 0;
    size_t head = take(&bytes, 16), done = take(&bytes, tiles * 4),
           tile = take(&bytes, tiles * sizeof(struct experts_tile)), token = take(&bytes, pairs * 4),
           where = take(&bytes, pairs * 4), h = take(&bytes, pairs * p.ff * 2),
           part = take(&bytes, pairs * p.dim * (decode ? 4 : 2));
    p.max_tiles = (uint32_t)tiles;
    uint8_t *work = (uint8_t *)dn_cuda_workspace(c, bytes);
    p.list.n_tiles = (uint32_t *)(work + head);
    p.list.claim = p.list.n_tiles + 1;
    p.list.done = (uint32_t *)(work + done);
    p.list.tile = (struct experts_tile *)(work + tile);
    p.list.token = (uint32_t *)(work + token);
    p.list.where = (uint32_t *)(work + where);
    p.h = (__nv_bfloat16 *)(work + h);
    p.part = work + part;

    bool small = pairs <= 32;
    dn_launch(c, "experts", small ? experts_list_small_kernel : experts_list_kernel, dim3(1),
              dim3(small ? 32 : LIST_THREADS), small ? 0 : LIST_WARPS * DN_MAX_EXPERTS * 2, p.list, q->expert,
              n_experts, q->top_k, p.rows, (uint32_t)c->n_sms, (uint32_t)pairs, c->step.count);
    bool plain = c->arch < 90 || c->shared_bytes < EXPERTS_SHARED_LEAST;
    bool same = p.gate_up.format == p.down.format && p.gate_up.symmetric == p.down.symmetric &&
                p.gate_up.scale_is_bf16 == p.down.scale_is_bf16;
    for (p.phases = plain || !same ? 1 : 3; p.phases < 4; p.phases++) {
        const struct dn_weights *w = p.phases == 2 ? &p.down : &p.gate_up;
        if (plain)
            dn_cuda_experts_plain(c, &p, w, !decode);
        else if (decode)
            dn_cuda_experts_decode(c, &p, w);
        else
            dn_cuda_experts_prefill(c, &p, w);
        if (p.phases == 2)
            break;
    }
    dim3 grid((p.dim / 4 + SUM_THREADS - 1) / SUM_THREADS, n);
    dn_launch(c, "experts", decode ? experts_sum_kernel<false> : experts_sum_kernel<true>, grid, dim3(SUM_THREADS), 0,
              p.part, p.list.where, q->weight, q->top_k, p.dim, (const __nv_bfloat16 *)q->add, (__nv_bfloat16 *)q->out,
              c->step.count);
}
