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
 * Shared memory: barriers | stages. Floor: tensor pipe, 4 * D FLOP a (row, token); mma.sync reaches 66 % of it.
 *
 * gqa_simple: other head sizes; a block for each (token, head), a warp for every fourth token. Correct, not fast.
 */
#include "kernels/cuda/gqa.cuh"

enum {
    THREADS = 32 * (GQA_WARPS + 4) /* registers move by groups of four warps */,
    BLOCK_ROWS = GQA_WARPS * GQA_ROWS,
    SIMPLE_WARPS = 4
};

/* FP8: pages arrive in a ring of their own (bytes_*), and warps 9..11 turn them to f16 in the stages that BF16 uses. */
struct alignas(1024) bars {
    uint64_t full[GQA_MAX_STAGES], empty[GQA_MAX_STAGES];
    uint64_t bytes_full[GQA_MAX_STAGES], bytes_empty[GQA_MAX_STAGES];
};
enum { WIDE_WARPS = 3, WIDE_STAGES = 3, SCALES = 2 * GQA_PAGE * 4 /* bytes, after a wide stage's V */ };

/* Stages: in BF16 n_stages of a page, in FP8 WIDE_STAGES in f16 with the scales, then n_stages of bytes. */
template <int D> static __host__ __device__ constexpr uint32_t wide_bytes()
{
    return gqa_tile_bytes<D>(false) + SCALES;
}

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

template <int D, bool FP8>
static __device__ void load(const gqa_args &a, const struct share &w, struct bars &bars, const uint8_t *stages,
                            uint32_t kv_head, uint32_t lane)
{
    struct gqa_ring ring = {0, 0};
    const uint64_t *full = FP8 ? bars.bytes_full : bars.full, *empty = FP8 ? bars.bytes_empty : bars.empty;
    const uint32_t *page = a.step.page + a.step.page_start[w.seq];
    uint32_t n_pages = (w.end + GQA_PAGE - 1) / GQA_PAGE, ids = 0;
    for (uint32_t t = 0; t < n_pages; t++) {
        if (t % 32 == 0)
            ids = t + lane < n_pages ? page[t + lane] : 0;
        uint32_t bar = gqa_smem(&full[ring.stage]);
        gqa_wait(gqa_smem(&empty[ring.stage]), ring.phase ^ 1);
        gqa_copy_begin(bar, gqa_tile_bytes<D>(FP8), lane);
        gqa_copy_tile<D>(a, FP8, __shfl_sync(0xffffffff, ids, t % 32), kv_head,
                         gqa_smem(stages + ring.stage * gqa_tile_bytes<D>(FP8)), bar, lane, 0);
        gqa_copy_end(bar);
        gqa_next(ring, a.n_stages);
    }
}

/* Turns FP8 pages to f16, each chunk of 16 values to two of 8, in rows as of BF16. thread: of the WIDE_WARPS. */
template <int D>
static __device__ void widen(const gqa_args &a, const struct share &w, struct bars &bars, uint8_t *wide,
                             const uint8_t *bytes, uint32_t thread)
{
    struct gqa_ring from = {0, 0}, to = {0, 0};
    for (uint32_t begin = 0; begin < w.end; begin += GQA_PAGE) {
        gqa_wait(gqa_smem(&bars.bytes_full[from.stage]), from.phase);
        gqa_wait(gqa_smem(&bars.empty[to.stage]), to.phase ^ 1);
        const uint4 *x = (const uint4 *)(bytes + from.stage * gqa_tile_bytes<D>(true));
        uint8_t *y = wide + to.stage * wide_bytes<D>();
        constexpr uint32_t chunks = D / 16, n = 2 * GQA_PAGE * chunks; /* K and V lie one after the other in both */
#pragma unroll 4
        for (uint32_t i = thread; i < n; i += 32 * WIDE_WARPS) {
            uint4 v = x[i];
            uint32_t token = i / chunks, chunk = (i % chunks) ^ gqa_swizzle(chunks, token);
            uint32_t place = (2 * chunk) ^ gqa_swizzle(2 * chunks, token);
            uint4 *row = (uint4 *)(y + token * 2 * D);
            uint4 lo, hi;
            gqa_f16(v.x, lo.x, lo.y);
            gqa_f16(v.y, lo.z, lo.w);
            gqa_f16(v.z, hi.x, hi.y);
            gqa_f16(v.w, hi.z, hi.w);
            row[place] = lo;
            row[place ^ 1] = hi;
        }
        for (uint32_t i = thread; i < SCALES / 16; i += 32 * WIDE_WARPS)
            ((uint4 *)(y + gqa_tile_bytes<D>(false)))[i] = x[n + i];
        __syncwarp();
        if (thread % 32 == 0) {
            gqa_arrive(gqa_smem(&bars.full[to.stage]));
            gqa_arrive(gqa_smem(&bars.bytes_empty[from.stage]));
        }
        gqa_next(from, a.n_stages);
        gqa_next(to, WIDE_STAGES);
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
    constexpr uint32_t v_at = GQA_PAGE * 2 * D, stage_bytes = FP8 ? wide_bytes<D>() : gqa_tile_bytes<D>(false);
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
        gqa_load_q_fp8<D, false>(q, c, lane, load_q);
    else
        gqa_load_q_bf16<D>(q, lane, load_q);
    int least = __reduce_min_sync(0xffffffff, min(bound[0], bound[1]));
    int most = __reduce_max_sync(0xffffffff, max(bound[0], bound[1]));

    gqa_state<D> st;
    gqa_start(st);
    struct gqa_ring ring = {0, 0};
    for (int begin = 0; begin < (int)w.end; begin += GQA_PAGE) {
        gqa_wait(gqa_smem(&bars.full[ring.stage]), ring.phase);
        const uint8_t *at = stages + ring.stage * stage_bytes;
        uint32_t k = gqa_k_at<D, false>(gqa_smem(at), lane), v = gqa_v_at<D, false>(gqa_smem(at) + v_at, lane);
        const float *ks = (const float *)(at + 2 * v_at), *vs = ks + GQA_PAGE;
        int here[2] = {bound[0] - begin, bound[1] - begin};
        if (least - begin >= GQA_PAGE) {
            gqa_tile<D, FP8, 4, false, FP8>(st, q, k, v, ks, vs, c, here, ~(uint64_t)0, lane);
        } else if (most > begin) {
            int last = min(most - begin, GQA_PAGE);
            uint64_t keep = last == GQA_PAGE ? ~(uint64_t)0 : ((uint64_t)1 << last) - 1, odd = 0;
            if (!FP8)
                odd = odd_tokens<D>(at + v_at, max(least - begin, 0), last, lane);
            gqa_tile<D, FP8, 4, true, FP8>(st, q, k, v, ks, vs, c, here, keep & ~odd, lane);
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
        gqa_next(ring, FP8 ? (uint32_t)WIDE_STAGES : a.n_stages);
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
        for (int i = 0; i < D / 8; i++)
            *(uint32_t *)(to + 8 * i + 2 * quad) = gqa_pack<false>(st.o[i][2 * r] * f, st.o[i][2 * r + 1] * f);
    }
}

template <int D> static __global__ void __launch_bounds__(THREADS, 1) gqa_prefill(const __grid_constant__ gqa_args a)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    struct bars &bars = *(struct bars *)raw;
    uint8_t *stages = raw + sizeof bars;
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
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
    const bool fp8 = a.step.kv_format[w.seq] == DN_KV_FP8;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < GQA_MAX_STAGES; i++) {
            gqa_bar_init(gqa_smem(&bars.full[i]), fp8 ? (uint32_t)WIDE_WARPS : GQA_COPY_ARRIVALS);
            gqa_bar_init(gqa_smem(&bars.empty[i]), GQA_WARPS);
            gqa_bar_init(gqa_smem(&bars.bytes_full[i]), GQA_COPY_ARRIVALS);
            gqa_bar_init(gqa_smem(&bars.bytes_empty[i]), WIDE_WARPS);
        }
        gqa_bar_init_done();
    }
    __syncthreads();
    uint8_t *bytes = stages + WIDE_STAGES * wide_bytes<D>();
    if (warp >= GQA_WARPS) {
        gqa_registers_down<56>();
        if (warp > GQA_WARPS) {
            if (fp8)
                widen<D>(a, w, bars, stages, bytes, threadIdx.x - 32 * (GQA_WARPS + 1));
        } else if (fp8) {
            load<D, true>(a, w, bars, bytes, kv_head, lane);
        } else {
            load<D, false>(a, w, bars, stages, kv_head, lane);
        }
        return;
    }
    gqa_registers_up<224>();
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

static __global__ void __launch_bounds__(32 * SIMPLE_WARPS) gqa_simple(const __grid_constant__ gqa_args a, uint32_t dim)
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

/* false: not enough shared memory. */
template <int D> static bool launch(struct dn_cuda *c, struct gqa_args a)
{
    const size_t fixed = sizeof(struct bars), wide = WIDE_STAGES * wide_bytes<D>();
    if (fixed + wide + 2 * gqa_tile_bytes<D>(true) > c->shared_bytes)
        return false;
    size_t n_stages = (c->shared_bytes - fixed - wide) / gqa_tile_bytes<D>(true);
    a.n_stages = (uint32_t)(n_stages > 5 ? 5 : n_stages); /* of either format */
    size_t bytes = wide + a.n_stages * gqa_tile_bytes<D>(true), bf16 = a.n_stages * gqa_tile_bytes<D>(false);
    uint32_t tokens = BLOCK_ROWS / (a.group < GQA_ROWS ? a.group : (uint32_t)GQA_ROWS);
    dim3 grid(c->n_tokens / tokens + c->n_seqs, a.n_kv_heads * a.head_blocks);
    dn_launch(c, "attention", gqa_prefill<D>, grid, dim3(THREADS), fixed + (bytes > bf16 ? bytes : bf16), a);
    return true;
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
    bool done = false;
    if (p->head_dim == 64 || p->head_dim == 128)
        done = c->kind == DN_STEP_DECODE ? dn_gqa_decode(c, p, a)
               : p->head_dim == 64       ? launch<64>(c, a)
                                         : launch<128>(c, a);
    if (!done)
        dn_launch(c, "attention", gqa_simple, dim3(c->n_tokens, p->n_heads), dim3(32 * SIMPLE_WARPS), 0, a,
                  p->head_dim);
}
