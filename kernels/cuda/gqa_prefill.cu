/* Grouped-query attention of chunks of prompts over pages, and the operation itself: it chooses a kernel.
 *
 * Maths: as gqa_decode.cu, for every token of the step: row t attends to positions 0..position[t].
 *
 * Work: a block takes some tokens of one sequence x the query heads of one KV head: up to 128 rows (token, head), 16
 * for each of its eight computing warps; warp 8 loads pages, one a stage. Pages are taken in order from position 0,
 * each row has its own bound, and nothing that a warp does for a row depends on the other rows (a factor of exactly 1
 * at most), so a row's bits depend neither on the chunk nor on the batch. Blocks with the longest contexts start first.
 *
 * A NaN in V of a token that some row of a warp may see and another may not: the token's V is dropped for the warp and
 * the rows that see it become NaN through their sum.
 *
 * Shared memory: stages | barriers. Floor: tensor pipe, 4 * D FLOP a (row, token); mma.sync reaches 66 % of it.
 *
 * attend_simple: other head sizes; a block for each (token, head), a warp for every fourth token. Correct, not fast.
 */
#include "kernels/cuda/gqa.cuh"

enum {
    THREADS = 32 * (GQA_WARPS + 4) /* registers move by groups of four warps */,
    BLOCK_ROWS = GQA_WARPS * GQA_ROWS,
    SIMPLE_WARPS = 4
};

struct bars {
    uint64_t full[GQA_MAX_STAGES], empty[GQA_MAX_STAGES];
};

/* A block's share: tokens of a sequence. */
struct share {
    uint32_t seq, token, n_tokens, end; /* end: positions that any of them attends to */
};

static __device__ bool find_share(const gqa_args &a, uint32_t block, uint32_t block_tokens, struct share *out)
{
    /* Sequence s has the blocks from start[s] / block_tokens + s on: at least as many as it needs. */
    uint32_t lo = 0, hi = a.step.count[DN_COUNT_SEQS];
    if (hi == 0)
        return false;
    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;
        if ((uint32_t)a.step.token_start[mid] / block_tokens + mid <= block)
            lo = mid;
        else
            hi = mid;
    }
    uint32_t begin = (uint32_t)a.step.token_start[lo], end = (uint32_t)a.step.token_start[lo + 1];
    uint32_t token = begin + (block - (begin / block_tokens + lo)) * block_tokens;
    if (token >= end)
        return false;
    out->seq = lo;
    out->token = token;
    out->n_tokens = min(block_tokens, end - token);
    out->end = (uint32_t)a.step.position[token + out->n_tokens - 1] + 1;
    return true;
}

template <int D>
static __device__ void load(const gqa_args &a, const struct share &w, struct bars &bars, const uint8_t *stages,
                            uint32_t kv_head, bool fp8, uint32_t lane)
{
    struct gqa_ring ring = {0, 0};
    const uint32_t *page = a.step.page + a.step.page_start[w.seq];
    uint32_t n_pages = (w.end + GQA_PAGE - 1) / GQA_PAGE, ids = 0;
    for (uint32_t t = 0; t < n_pages; t++) {
        if (t % 32 == 0)
            ids = t + lane < n_pages ? page[t + lane] : 0;
        uint32_t bar = gqa_smem(&bars.full[ring.stage]);
        gqa_wait(gqa_smem(&bars.empty[ring.stage]), ring.phase ^ 1);
        gqa_copy_begin(bar, gqa_tile_bytes<D>(fp8), lane);
        gqa_copy_tile<D>(a, fp8, __shfl_sync(0xffffffff, ids, t % 32), kv_head,
                         gqa_smem(stages + ring.stage * gqa_tile_bytes<D>(false)), bar, lane, 0);
        gqa_copy_end(bar);
        gqa_next(ring, a.n_stages);
    }
}

/* Tokens from `from` to `to` (within a page, at most 15) whose V in the page has values that are no numbers. */
template <int D> static __device__ uint64_t odd_tokens(const uint8_t *v, int from, int to, uint32_t lane)
{
    uint64_t odd = 0;
    for (int t = from; t < to; t++) {
        bool found = false;
        for (uint32_t i = lane; i < D / 2; i += 32) {
            uint32_t x = *(const uint32_t *)(v + t * 2 * D + i * 4);
            found |= (x & 0x7f80) == 0x7f80 || (x & 0x7f800000) == 0x7f800000;
        }
        if (__any_sync(0xffffffff, found))
            odd |= (uint64_t)1 << t;
    }
    return odd;
}

template <int D, bool FP8>
static __device__ void attend(const gqa_args &a, const struct share &w, struct bars &bars, const uint8_t *stages,
                              uint32_t head, uint32_t n_heads, uint32_t warp, uint32_t lane)
{
    constexpr uint32_t row_bytes = FP8 ? D : 2 * D;
    const __nv_bfloat16 *from[2];
    bool used[2];
    int bound[2];
    uint32_t place[2]; /* (token, head) in the output */
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t row = warp * GQA_ROWS + (lane >> 2) + 8 * r, token = row / n_heads;
        used[r] = token < w.n_tokens;
        token = w.token + (used[r] ? token : w.n_tokens - 1);
        bound[r] = a.step.position[token] + 1; /* rows beyond the share follow its last token */
        from[r] = a.q + (size_t)token * a.q_stride + (size_t)(head + row % n_heads) * D;
        place[r] = token * a.n_heads + head + row % n_heads;
    }
    uint32_t q[D / 16][4];
    float c[2] = {a.scale_log2, a.scale_log2};
    auto load_q = [&](int r, int column) -> uint32_t { return used[r] ? *(const uint32_t *)(from[r] + column) : 0; };
    if (FP8)
        gqa_load_q_fp8<D>(q, c, lane, load_q);
    else
        gqa_load_q_bf16<D>(q, lane, load_q);
    int least = __reduce_min_sync(0xffffffff, min(bound[0], bound[1]));
    int most = __reduce_max_sync(0xffffffff, max(bound[0], bound[1]));

    gqa_state<D> st;
    gqa_start(st);
    struct gqa_ring ring = {0, 0};
    for (int begin = 0; begin < (int)w.end; begin += GQA_PAGE) {
        gqa_wait(gqa_smem(&bars.full[ring.stage]), ring.phase);
        const uint8_t *at = stages + ring.stage * gqa_tile_bytes<D>(false);
        uint32_t k = gqa_k_at<D, FP8>(gqa_smem(at), lane),
                 v = gqa_v_at<D, FP8>(gqa_smem(at) + GQA_PAGE * row_bytes, lane);
        const float *ks = (const float *)(at + 2 * GQA_PAGE * row_bytes), *vs = ks + GQA_PAGE;
        int here[2] = {bound[0] - begin, bound[1] - begin};
        if (least - begin >= GQA_PAGE) {
            gqa_tile<D, FP8, 4, false>(st, q, k, v, ks, vs, c, here, ~(uint64_t)0, lane);
        } else if (most > begin) {
            int last = min(most - begin, GQA_PAGE);
            uint64_t keep = last == GQA_PAGE ? ~(uint64_t)0 : ((uint64_t)1 << last) - 1, odd = 0;
            if (!FP8)
                odd = odd_tokens<D>(at + GQA_PAGE * row_bytes, max(least - begin, 0), last, lane);
            gqa_tile<D, FP8, 4, true>(st, q, k, v, ks, vs, c, here, keep & ~odd, lane);
            if (odd) {
#pragma unroll
                for (int r = 0; r < 2; r++) {
                    if (here[r] > 0 && (here[r] >= GQA_PAGE ? odd : odd & (((uint64_t)1 << here[r]) - 1)))
                        st.l[r] = NAN;
                }
            }
        }
        __syncwarp();
        if (lane == 0)
            gqa_arrive(gqa_smem(&bars.empty[ring.stage]));
        gqa_next(ring, a.n_stages);
    }

#pragma unroll
    for (int r = 0; r < 2; r++) {
        float sum = gqa_quad_sum(st.l[r]);
        float f = (FP8 ? gqa_inverse(st.fi[r]) : 1) / sum;
        if (!used[r])
            continue;
        __nv_bfloat16 *to = a.out + (size_t)place[r] * D;
        uint32_t quad = lane & 3;
#pragma unroll
        for (int i = 0; i < (FP8 ? D / 16 : D / 8); i++) {
            if (FP8) {
                uint2 x;
                x.x = gqa_pack<false>(st.o[2 * i][2 * r] * f, st.o[2 * i + 1][2 * r] * f);
                x.y = gqa_pack<false>(st.o[2 * i][2 * r + 1] * f, st.o[2 * i + 1][2 * r + 1] * f);
                *(uint2 *)(to + 16 * i + 4 * quad) = x;
            } else {
                *(uint32_t *)(to + 8 * i + 2 * quad) = gqa_pack<false>(st.o[i][2 * r] * f, st.o[i][2 * r + 1] * f);
            }
        }
    }
}

template <int D> static __global__ void __launch_bounds__(THREADS, 1) prefill(const __grid_constant__ gqa_args a)
{
    extern __shared__ uint8_t raw[];
    uint8_t *stages = (uint8_t *)(((uintptr_t)raw + 1023) & ~(uintptr_t)1023);
    struct bars &bars = *(struct bars *)(stages + a.n_stages * gqa_tile_bytes<D>(false));
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < a.n_stages; i++) {
            gqa_bar_init(gqa_smem(&bars.full[i]), GQA_COPY_ARRIVALS);
            gqa_bar_init(gqa_smem(&bars.empty[i]), GQA_WARPS);
        }
        gqa_bar_init_done();
    }
    __syncthreads();
    dn_wait_previous();
    dn_start_next();
    const uint32_t kv_head = blockIdx.y / a.head_blocks, part = blockIdx.y % a.head_blocks * GQA_ROWS;
    const uint32_t head = kv_head * a.group + part, n_heads = min((uint32_t)GQA_ROWS, a.group - part);
    struct share w;
    if (!find_share(a, gridDim.x - 1 - blockIdx.x, BLOCK_ROWS / min((uint32_t)GQA_ROWS, a.group), &w))
        return;
    if (a.step.bad[w.seq]) {
        for (uint32_t i = threadIdx.x; i < w.n_tokens * n_heads * D; i += THREADS) {
            uint32_t token = w.token + i / (n_heads * D);
            a.out[((size_t)token * a.n_heads + head) * D + i % (n_heads * D)] = __float2bfloat16(0);
        }
        return;
    }
    bool fp8 = a.step.kv_format[w.seq] == DN_KV_FP8;
    if (warp >= GQA_WARPS) {
        gqa_registers_down();
        if (warp == GQA_WARPS)
            load<D>(a, w, bars, stages, kv_head, fp8, lane);
        return;
    }
    gqa_registers_up();
    if (fp8)
        attend<D, true>(a, w, bars, stages, head, n_heads, warp, lane);
    else
        attend<D, false>(a, w, bars, stages, head, n_heads, warp, lane);
}

/* ---- Any head size ---- */

/* Value d of a row. */
static __device__ __forceinline__ float simple_value(const uint8_t *row, bool fp8, uint32_t row_chunks, uint32_t token,
                                                     uint32_t d)
{
    uint32_t swizzle = gqa_swizzle(row_chunks, token);
    if (fp8) {
        uint32_t x = row[((d / 16 ^ swizzle) * 16) + d % 16];
        return __half2float(__half(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)x, __NV_E4M3)));
    }
    return __bfloat162float(*(const __nv_bfloat16 *)(row + (d / 8 ^ swizzle) * 16 + d % 8 * 2));
}

static __global__ void __launch_bounds__(32 * SIMPLE_WARPS)
    attend_simple(const __grid_constant__ gqa_args a, uint32_t dim)
{
    enum { PER_LANE = GQA_MAX_DIM / 32 };
    __shared__ float sum[SIMPLE_WARPS][GQA_MAX_DIM], top[SIMPLE_WARPS], total[SIMPLE_WARPS];
    dn_wait_previous();
    dn_start_next();
    const uint32_t token = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (token >= a.step.count[DN_COUNT_TOKENS])
        return;
    const uint32_t seq = (uint32_t)a.step.token_seq[token], kv_head = head / a.group;
    __nv_bfloat16 *out = a.out + ((size_t)token * a.n_heads + head) * dim;
    if (a.step.bad[seq]) {
        for (uint32_t d = threadIdx.x; d < dim; d += 32 * SIMPLE_WARPS)
            out[d] = __float2bfloat16(0);
        return;
    }
    const bool fp8 = a.step.kv_format[seq] == DN_KV_FP8;
    const struct dn_kv_layout &l = a.layout;
    const uint32_t row_bytes = fp8 ? dim : 2 * dim, chunks = row_bytes / 16, n = (uint32_t)a.step.position[token] + 1;
    const uint32_t *page = a.step.page + a.step.page_start[seq];
    float q[PER_LANE], o[PER_LANE], m = -INFINITY, sum_p = 0;
    for (uint32_t i = 0; i < PER_LANE; i++) {
        uint32_t d = lane + 32 * i;
        q[i] = d < dim ? __bfloat162float(a.q[(size_t)token * a.q_stride + head * dim + d]) * a.scale_log2 : 0;
        o[i] = 0;
    }
    for (uint32_t t = warp; t < n; t += SIMPLE_WARPS) {
        const uint8_t *layer = a.arena + dn_page_offset(l, fp8, page[t / GQA_PAGE]) +
                               (uint64_t)a.layer * (fp8 ? l.format[1] : l.format[0]).layer_bytes;
        const uint32_t at = kv_head * GQA_PAGE + t % GQA_PAGE;
        const uint8_t *k = layer + (size_t)at * row_bytes, *v = k + (fp8 ? l.format[1] : l.format[0]).v_offset;
        float s = 0, vs = 1;
        for (uint32_t i = 0; i < PER_LANE && lane + 32 * i < dim; i++)
            s += q[i] * simple_value(k, fp8, chunks, t, lane + 32 * i);
        for (int d = 16; d; d /= 2)
            s += __shfl_xor_sync(0xffffffff, s, d);
        if (fp8) {
            s *= *(const float *)(layer + l.format[1].k_scale_offset + 4 * at);
            vs = *(const float *)(layer + l.format[1].v_scale_offset + 4 * at);
        }
        float next = fmaxf(m, s), base = next == -INFINITY ? 0 : next, alpha = gqa_exp2(m - base),
              p = gqa_exp2(s - base);
        if (m == next)
            alpha = 1;
        m = next;
        sum_p = sum_p * alpha + p;
        for (uint32_t i = 0; i < PER_LANE && lane + 32 * i < dim; i++)
            o[i] = o[i] * alpha + p * vs * simple_value(v, fp8, chunks, t, lane + 32 * i);
    }
    for (uint32_t i = 0; i < PER_LANE && lane + 32 * i < dim; i++)
        sum[warp][lane + 32 * i] = o[i];
    if (lane == 0) {
        top[warp] = m;
        total[warp] = sum_p;
    }
    __syncthreads();
    float best = -INFINITY, all = 0, weight[SIMPLE_WARPS];
    for (int i = 0; i < SIMPLE_WARPS; i++)
        best = fmaxf(best, top[i]);
    best = best == -INFINITY ? 0 : best;
    for (int i = 0; i < SIMPLE_WARPS; i++) {
        weight[i] = gqa_exp2(top[i] - best);
        all += weight[i] * total[i];
    }
    for (uint32_t d = threadIdx.x; d < dim; d += 32 * SIMPLE_WARPS) {
        float x = 0;
        for (int i = 0; i < SIMPLE_WARPS; i++)
            x += sum[i][d] * weight[i];
        out[d] = __float2bfloat16(x / all);
    }
}

/* ---- The operation ---- */

template <int D> static void launch(struct dn_cuda *c, struct gqa_args a)
{
    size_t fixed = 1024 + sizeof(struct bars), n_stages = (c->shared_bytes - fixed) / gqa_tile_bytes<D>(false);
    a.n_stages = (uint32_t)(n_stages > 6 ? 6 : n_stages);
    uint32_t tokens = BLOCK_ROWS / (a.group < GQA_ROWS ? a.group : (uint32_t)GQA_ROWS);
    dim3 grid(c->n_tokens / tokens + c->n_seqs, a.n_kv_heads * a.head_blocks);
    dn_launch(c, "attention", prefill<D>, grid, dim3(THREADS), fixed + a.n_stages * gqa_tile_bytes<D>(false), a);
}

void dn_cuda_attention(struct dn_device *d, const struct dn_attention *p)
{
    struct dn_cuda *c = dn_cuda(d);
    if (p->layout->page_tokens != GQA_PAGE || p->head_dim % 16 != 0 || p->head_dim > GQA_MAX_DIM) {
        dn_cuda_failed(c, cudaErrorInvalidValue,
                       "attention: pages of 64 tokens and heads of 16, 32, ... 256 values only");
        return;
    }
    struct gqa_args a = {};
    a.q = (const __nv_bfloat16 *)p->q;
    a.out = (__nv_bfloat16 *)p->out;
    a.q_stride = p->q_stride;
    a.n_heads = p->n_heads;
    a.n_kv_heads = p->n_kv_heads;
    a.group = p->n_heads / p->n_kv_heads;
    a.head_blocks = (a.group + GQA_ROWS - 1) / GQA_ROWS;
    a.scale_log2 = p->scale * 1.4426950408889634f;
    a.layer = p->layer;
    a.layout = *p->layout;
    a.arena = (const uint8_t *)p->arena;
    a.step = c->step;
    if (p->head_dim != 64 && p->head_dim != 128)
        dn_launch(c, "attention", attend_simple, dim3(c->n_tokens, p->n_heads), dim3(32 * SIMPLE_WARPS), 0, a,
                  p->head_dim);
    else if (c->kind == DN_STEP_DECODE)
        dn_gqa_decode(c, p, a);
    else if (p->head_dim == 128)
        launch<128>(c, a);
    else
        launch<64>(c, a);
}
