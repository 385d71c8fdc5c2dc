/* Grouped-query attention of a decode step: one query token of each sequence over its pages.
 *
 * Maths: S = scale * Q K^T for the (up to 16) query heads of a KV head, P = exp(S - max), O = P V / sum(P).
 *
 * Work: an item is (sequence, KV head, split). The length of a split follows from the sequence's own length alone
 * (about 128 items for one sequence, 12 pages at least, no splits for 16 pages or fewer), so the bits of a row do too.
 * Blocks stay and take items by ticket (64 x 8k, BF16: 505 us, 546 with fixed shares). The last block to finish a split
 * of a (sequence, KV head) merges them all, in order, when it has no more items: done at once, a merge held up the
 * block's next items.
 *
 * Warps: 0..7 compute, 8 loads, 9 finds items and prepares their queries, 10 and 11 finish. A stage of the ring holds a
 * page's block of one KV head in BF16, two pages in FP8. A computing warp takes 32 tokens of a stage with a softmax of
 * its own: in BF16 warps 2i and 2i + 1 the stages i, i + 4, ... of the item, in FP8 warps 0..3 the even stages and 4..7
 * the odd ones. At the item's end each drops its state in shared memory and goes on; the finishing warps put the eight
 * together, write them and merge, beside the next item: waiting for memory fences and counters there took 4 us an item.
 *
 * Barriers: full[group][stage] <- the loader's copies, one for each group of warps that may use the stage, so that the
 * others need not look; empty[stage] <- 4, of the group's two warps two each, or one of four. q_full[slot] <- warp 9:
 * the item and its queries are there; q_empty[slot] <- 8 computing warps and the loader. dropped <- 8 computing warps,
 * taken
 * <- the finishing ones.
 *
 * Shared memory: queries [3][16][D + 8] 16-bit, states, items, barriers | stages | dropped O [8][heads][D + 8] f32 |
 * first items of the sequences.
 *
 * Floor: bytes of K and V (and scales) of all tokens at 4.65 TB/s. What was reached: README.md.
 */
#include "kernels/cuda/gqa.cuh"

enum { FINISH_WARPS = 2, FINISH_THREADS = 32 * FINISH_WARPS, THREADS = 32 * (GQA_WARPS + 2 + FINISH_WARPS) };
enum { PENDING = 64 /* merges that are left to the end of a block */ };
enum { SLOTS = 3 /* items between the warps */, GROUPS = 6 /* of computing warps: 4 in BF16, 2 in FP8 */ };
enum { SPLIT_PAGES = 12 /* fewest in a split, heads of 64: 16 */, WHOLE_PAGES = 16 /* not split, heads of 64: 32 */ };
enum { MAX_SPLITS = 64, SPLIT_ITEMS = 128 };

struct item {
    int32_t seq, kv_head, head, n_heads; /* seq < 0: no more */
    int32_t split, n_splits, first_page, n_pages, len, fp8;
    uint32_t slot;    /* of partial results */
    uint32_t counter; /* of finished splits */
};

/* Splits that are all there, for someone to merge. */
struct merge {
    int32_t seq, head, n_heads, n_splits;
    uint32_t slot; /* of the first */
};

template <int D> struct alignas(1024) shared {
    static constexpr uint32_t stage_bytes = gqa_tile_bytes<D>(false) > 2 * gqa_tile_bytes<D>(true)
                                                ? gqa_tile_bytes<D>(false)
                                                : 2 * gqa_tile_bytes<D>(true);
    static constexpr uint32_t row = D + 8;                /* values: padded against bank conflicts */
    uint16_t q[SLOTS][GQA_ROWS][row];                     /* bf16, or f16 with permuted columns for FP8 */
    float factor[SLOTS][GQA_ROWS];                        /* of scores, to the base 2 */
    float m[GQA_WARPS][GQA_ROWS], l[GQA_WARPS][GQA_ROWS]; /* dropped with O */
    struct item item[SLOTS], done;
    float weight[GQA_ROWS][GQA_WARPS], total_l[GQA_ROWS];
    struct merge pending[PENDING];
    uint32_t n_pending;
    uint64_t full[GROUPS][GQA_MAX_STAGES], empty[GQA_MAX_STAGES], q_full[SLOTS], q_empty[SLOTS], dropped, taken;
};

/* Pages of a split for a sequence of n pages: few pages are not worth a merge. */
template <int D> static __device__ __forceinline__ uint32_t split_pages(uint32_t n, uint32_t items_per_split)
{
    if (n <= WHOLE_PAGES * (128 / D))
        return WHOLE_PAGES * (128 / D);
    uint32_t pages = (n * items_per_split + SPLIT_ITEMS - 1) / SPLIT_ITEMS;
    pages = max(max(pages, (n + MAX_SPLITS - 1) / MAX_SPLITS), D == 64 ? 16u : (uint32_t)SPLIT_PAGES);
    return (pages + 1) & ~1u;
}

static __device__ __forceinline__ uint32_t sequence_pages(const gqa_args &a, uint32_t seq)
{
    int32_t len = a.step.bad[seq] ? 0 : a.step.position[seq] + 1;
    return len > 0 ? ((uint32_t)len + GQA_PAGE - 1) / GQA_PAGE : 0;
}

/* first[s] = number of items before sequence s. All threads call. */
template <int D> static __device__ void count_items(const gqa_args &a, uint32_t n_seqs, uint32_t *first)
{
    uint32_t per_split = a.n_kv_heads * a.head_blocks;
    for (uint32_t s = threadIdx.x; s < n_seqs; s += THREADS) {
        uint32_t n = sequence_pages(a, s), pages = split_pages<D>(n, per_split);
        first[s + 1] = (n ? (n + pages - 1) / pages : 1) * per_split;
    }
    if (threadIdx.x == 0)
        first[0] = 0;
    __syncthreads();
    if (threadIdx.x < 32) {
        uint32_t lane = threadIdx.x, before = 0;
        for (uint32_t s = 0; s < n_seqs; s += 32) {
            uint32_t x = s + lane < n_seqs ? first[s + lane + 1] : 0;
            for (uint32_t d = 1; d < 32; d *= 2) {
                uint32_t y = __shfl_up_sync(0xffffffff, x, d);
                x += lane >= d ? y : 0;
            }
            x += before;
            if (s + lane < n_seqs)
                first[s + lane + 1] = x;
            before = __shfl_sync(0xffffffff, x, 31);
        }
    }
    __syncthreads();
}

template <int D>
static __device__ struct item find_item(const gqa_args &a, uint32_t n_seqs, const uint32_t *first, uint32_t index)
{
    uint32_t lo = 0, hi = n_seqs; /* first[lo] <= index < first[hi] */
    while (hi - lo > 1) {
        uint32_t mid = (lo + hi) / 2;
        if (first[mid] <= index)
            lo = mid;
        else
            hi = mid;
    }
    uint32_t per_split = a.n_kv_heads * a.head_blocks, local = index - first[lo];
    uint32_t n = sequence_pages(a, lo), pages = split_pages<D>(n, per_split), part = local % per_split;
    uint32_t block = part % a.head_blocks;
    struct item it;
    it.seq = (int32_t)lo;
    it.kv_head = (int32_t)(part / a.head_blocks);
    it.head = (int32_t)((uint32_t)it.kv_head * a.group + block * GQA_ROWS);
    it.n_heads = (int32_t)min((uint32_t)GQA_ROWS, a.group - block * GQA_ROWS);
    it.split = (int32_t)(local / per_split);
    it.n_splits = (int32_t)(n ? (n + pages - 1) / pages : 1);
    it.first_page = it.split * (int32_t)pages;
    it.n_pages = min((int32_t)pages, (int32_t)n - it.first_page);
    it.len = a.step.position[lo] + 1;
    it.fp8 = a.step.kv_format[lo] == DN_KV_FP8;
    it.slot = index;
    it.counter = 1 + lo * per_split + part; /* 0: tickets */
    return it;
}

/* ---- Warp 9 ---- */

/* An item's queries, a row at a time by the warp. For FP8 a row is brought to 1..2 by a power of two. */
template <int D>
static __device__ __forceinline__ void put_queries(const gqa_args &a, shared<D> &sh, const struct item &it,
                                                   uint32_t slot, uint32_t lane)
{
    constexpr int pairs = D / 64; /* of a lane: columns 2 * pairs * lane.. */
    const uint32_t *q = (const uint32_t *)(a.q + (size_t)it.seq * a.q_stride + (size_t)it.head * D) + pairs * lane;
    uint32_t x[GQA_ROWS][pairs];
#pragma unroll
    for (int h = 0; h < GQA_ROWS; h++) {
#pragma unroll
        for (int i = 0; i < pairs; i++)
            x[h][i] = h < it.n_heads ? q[h * D / 2 + i] : 0;
    }
#pragma unroll
    for (int h = 0; h < GQA_ROWS; h++) {
        if (h >= it.n_heads)
            break;
        float factor = a.scale_log2;
        uint32_t *to = (uint32_t *)sh.q[slot][h], top = 0;
        if (!it.fp8) {
#pragma unroll
            for (int i = 0; i < pairs; i++)
                to[pairs * lane + i] = x[h][i];
        } else {
#pragma unroll
            for (int i = 0; i < pairs; i++)
                top = max(top, max(x[h][i] << 16 & 0x7fff0000, x[h][i] & 0x7fff0000));
            uint32_t e = __reduce_max_sync(0xffffffff, top) >> 23;
            e = e < 1 ? 1 : e > 253 ? 253 : e;
            const float f = __uint_as_float((254 - e) << 23);
            factor *= __uint_as_float(e << 23);
#pragma unroll
            for (int i = 0; i < pairs; i++) {
                float2 y = __bfloat1622float2(*(__nv_bfloat162 *)&x[h][i]);
                uint32_t column = 2 * (pairs * lane + i), chunk = column / 16,
                         d = column % 16; /* 2q.. <- 4q.., +8 <- +2 */
                to[(chunk * 16 + d / 4 * 2 + (d % 4 ? 8 : 0)) / 2] = gqa_pack<true>(y.x * f, y.y * f);
            }
        }
        if (lane == 0)
            sh.factor[slot][h] = factor;
    }
}

template <int D>
static __device__ __forceinline__ void find(const gqa_args &a, shared<D> &sh, const uint32_t *first, uint32_t n_seqs,
                                            uint32_t lane)
{
    struct gqa_ring slot = {0, 0};
    const uint32_t n_items = first[n_seqs];
    dn_wait_previous();
    for (uint32_t index = blockIdx.x;; gqa_next(slot, SLOTS)) {
        const bool none = index >= n_items;
        gqa_wait(gqa_smem(&sh.q_empty[slot.stage]), slot.phase ^ 1);
        uint32_t ticket = 0;
        if (!none && lane == 0)
            ticket = atomicAdd(a.counters, 1);
        if (none) {
            if (lane == 0)
                sh.item[slot.stage].seq = -1;
        } else {
            struct item it = find_item<D>(a, n_seqs, first, index);
            put_queries<D>(a, sh, it, slot.stage, lane);
            if (lane == 0)
                sh.item[slot.stage] = it;
        }
        __syncwarp();
        if (lane == 0)
            gqa_arrive(gqa_smem(&sh.q_full[slot.stage]));
        if (none)
            return;
        if (lane == 0 && ticket == n_items - 1) /* blocks with an item fetch until they get none: n_items in all */
            *a.counters = 0;
        index = gridDim.x + __shfl_sync(0xffffffff, ticket, 0);
    }
}

/* ---- The loading warp ---- */

/* An item's page ids, those of its pages `from`.. in the lanes. */
static __device__ __forceinline__ uint32_t page_ids(const gqa_args &a, const struct item &it, int from, uint32_t lane)
{
    const uint32_t *page = a.step.page + a.step.page_start[it.seq] + it.first_page;
    return from + (int)lane < it.n_pages ? page[from + (int)lane] : 0;
}

/* Waits for the next item and asks for its page ids. */
template <int D>
static __device__ __forceinline__ struct item next_item(const gqa_args &a, shared<D> &sh, struct gqa_ring &slot,
                                                        uint32_t *ids, uint32_t lane)
{
    gqa_wait(gqa_smem(&sh.q_full[slot.stage]), slot.phase);
    struct item it = sh.item[slot.stage];
    __syncwarp();
    if (lane == 0 && it.seq >= 0)
        gqa_arrive(gqa_smem(&sh.q_empty[slot.stage]));
    gqa_next(slot, SLOTS);
    *ids = it.seq >= 0 ? page_ids(a, it, 0, lane) : 0;
    return it;
}

/* The first item's pages are asked for before the previous kernel has ended, but for the page that it writes: the last.
 */
template <int D>
static __device__ __forceinline__ void load(const gqa_args &a, shared<D> &sh, const uint8_t *stages,
                                            const uint32_t *first, uint32_t n_seqs, uint32_t lane)
{
    struct gqa_ring ring = {0, 0}, slot = {0, 0};
    bool early = blockIdx.x < first[n_seqs];
    uint32_t next_ids = 0;
    struct item next;
    if (early) {
        next = find_item<D>(a, n_seqs, first, blockIdx.x);
        next_ids = page_ids(a, next, 0, lane);
    } else {
        next = next_item(a, sh, slot, &next_ids, lane);
    }
    while (next.seq >= 0) {
        const struct item it = next;
        uint32_t ids = next_ids;
        const int step = it.fp8 ? 2 : 1, last = (it.len - 1) / GQA_PAGE - it.first_page;
        bool waited = !early;
        for (int t = 0, i = 0; t < it.n_pages; t += step, i++) {
            if (t && t % 32 == 0)
                ids = page_ids(a, it, t, lane);
            const uint32_t bar = gqa_smem(&sh.full[it.fp8 ? 4 + (i & 1) : i & 3][ring.stage]);
            const uint32_t dst = gqa_smem(stages + ring.stage * shared<D>::stage_bytes);
            const bool two = it.fp8 && t + 1 < it.n_pages;
            const uint32_t one = __shfl_sync(0xffffffff, ids, t % 32),
                           other = __shfl_sync(0xffffffff, ids, (t + 1) % 32);
            if (!waited && t + step > last) {
                dn_wait_previous();
                waited = true;
            }
            gqa_wait(gqa_smem(&sh.empty[ring.stage]), ring.phase ^ 1);
            gqa_copy_begin(bar, gqa_tile_bytes<D>(it.fp8) * (two ? 2 : 1), lane);
            gqa_copy_tile<D>(a, it.fp8, one, (uint32_t)it.kv_head, dst, bar, lane, 0);
            if (two)
                gqa_copy_tile<D>(a, true, other, (uint32_t)it.kv_head, dst + gqa_tile_bytes<D>(true), bar, lane, 4);
            gqa_copy_end(bar);
            gqa_next(ring, a.n_stages);
            if (t == 0 && !early)
                next = next_item(a, sh, slot, &next_ids, lane);
        }
        if (early) {
            dn_wait_previous();
            next_item(a, sh, slot, &next_ids, lane); /* this one */
        }
        if (early || it.n_pages <= 0)
            next = next_item(a, sh, slot, &next_ids, lane);
        early = false;
    }
}

/* ---- Merging ---- */

/* Where the partial result of an item lies: O [heads][D], then maxima [heads] and sums [heads]. */
template <int D> static __device__ __forceinline__ float *partial_at(const gqa_args &a, uint32_t slot)
{
    uint32_t heads = min((uint32_t)GQA_ROWS, a.group);
    return a.partial + (size_t)slot * heads * (D + 4); /* whole 16 bytes */
}

static __device__ __forceinline__ void put_out(__nv_bfloat16 *to, float4 x, float f)
{
    *(uint2 *)to = make_uint2(gqa_pack<false>(x.x * f, x.y * f), gqa_pack<false>(x.z * f, x.w * f));
}

/* Merges the splits of one query head, in order; a lane has D / 32 values of it. */
template <int D>
static __device__ __forceinline__ void merge_head(const gqa_args &a, const struct merge &u, uint32_t h, uint32_t lane)
{
    constexpr int v = D / 32;
    const uint32_t heads = min((uint32_t)GQA_ROWS, a.group), per_split = a.n_kv_heads * a.head_blocks;
    const size_t stride = (size_t)per_split * heads * (D + 4);
    const float *part = partial_at<D>(a, u.slot), *at = part + h * D + lane * v;
    const int n = u.n_splits;
    float m[2], l[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int s = (int)lane + 32 * i;
        m[i] = s < n ? __ldcg(part + s * stride + heads * D + h) : -INFINITY;
        l[i] = s < n ? __ldcg(part + s * stride + heads * (D + 1) + h) : 0;
    }
    float top = fmaxf(m[0], m[1]), sum[v] = {};
    for (int d = 16; d; d /= 2)
        top = fmaxf(top, __shfl_xor_sync(0xffffffff, top, d));
    float w[2] = {gqa_exp2(m[0] - top), gqa_exp2(m[1] - top)}, all = l[0] * w[0] + l[1] * w[1];
    for (int d = 16; d; d /= 2)
        all += __shfl_xor_sync(0xffffffff, all, d);
    for (int begin = 0; begin < n; begin += 8) {
        float x[8][v];
#pragma unroll
        for (int s = 0; s < 8; s++) {
            const float *from = at + min(begin + s, n - 1) * stride;
            if (v == 4) {
                float4 y = __ldcg((const float4 *)from);
                x[s][0] = y.x;
                x[s][1] = y.y;
                x[s][2 % v] = y.z;
                x[s][3 % v] = y.w;
            } else {
                float2 y = __ldcg((const float2 *)from);
                x[s][0] = y.x;
                x[s][1] = y.y;
            }
        }
#pragma unroll
        for (int s = 0; s < 8; s++) {
            const float f = __shfl_sync(0xffffffff, begin >= 32 ? w[1] : w[0], (begin + s) % 32);
#pragma unroll
            for (int i = 0; i < v; i++)
                sum[i] += begin + s < n ? x[s][i] * f : 0;
        }
    }
    uint32_t *to = (uint32_t *)(a.out + ((size_t)u.seq * a.n_heads + (uint32_t)u.head + h) * D + lane * v);
#pragma unroll
    for (int i = 0; i < v / 2; i++)
        to[i] = gqa_pack<false>(sum[2 * i] / all, sum[2 * i + 1] / all);
}

/* What is pending, by n_warps warps. */
template <int D>
static __device__ __forceinline__ void merge_pending(const gqa_args &a, const shared<D> &sh, uint32_t warp,
                                                     uint32_t n_warps, uint32_t lane)
{
    for (uint32_t p = 0, unit = 0; p < sh.n_pending; p++) {
        for (uint32_t h = 0; h < (uint32_t)sh.pending[p].n_heads; h++, unit++)
            if (unit % n_warps == warp)
                merge_head<D>(a, sh.pending[p], h, lane);
    }
}

/* ---- The computing warps ---- */

/* Where a warp is in the ring: the stage of the item's first page, and for each stage the phase of its group's barrier.
 */
struct place {
    uint32_t base, phases[2]; /* of a warp's group in BF16, in FP8 */
};

/* A warp's part of an item's stages. */
template <int D, bool FP8>
static __device__ __forceinline__ void attend(const gqa_args &a, shared<D> &sh, const uint8_t *stages,
                                              const struct item &it, uint32_t slot, struct place &ring,
                                              gqa_state<D> &st, uint32_t warp, uint32_t lane)
{
    constexpr uint32_t row = FP8 ? D : 2 * D;
    uint32_t q[D / 16][4];
    const float c[2] = {sh.factor[slot][lane >> 2], sh.factor[slot][(lane >> 2) + 8]};
#pragma unroll
    for (int ks = 0; ks < D / 16; ks++)
        gqa_ldmatrix(q[ks], gqa_smem(&sh.q[slot][(lane >> 3 & 1) * 8 + (lane & 7)][16 * ks + (lane >> 4) * 8]));
    __syncwarp();
    if (lane == 0)
        gqa_arrive(gqa_smem(&sh.q_empty[slot]));

    constexpr uint32_t n_groups = FP8 ? 2 : 4;
    const uint32_t group = FP8 ? warp >> 2 : warp >> 1, n_stages = FP8 ? (it.n_pages + 1) / 2 : it.n_pages;
    const uint32_t token = (warp & 1) * 32, tile = FP8 ? (warp >> 1 & 1) * gqa_tile_bytes<D>(true) : 0;
    for (uint32_t i = group, stage = ring.base + group; i < n_stages; i += n_groups, stage += n_groups) {
        while (stage >= a.n_stages)
            stage -= a.n_stages;
        gqa_wait(gqa_smem(&sh.full[(FP8 ? 4 : 0) + group][stage]), ring.phases[FP8] >> stage & 1);
        ring.phases[FP8] ^= 1u << stage;
        const int page = FP8 ? 2 * (int)i + (int)(warp >> 1 & 1) : (int)i;
        const int n = it.len - (it.first_page + page) * GQA_PAGE - (int)token;
        const uint8_t *at = stages + stage * shared<D>::stage_bytes + tile;
        uint32_t k = gqa_k_at<D, FP8>(gqa_smem(at) + token * row, lane);
        uint32_t v = gqa_v_at<D, FP8>(gqa_smem(at) + (GQA_PAGE + token) * row, lane);
        const float *ks = (const float *)(at + 2 * GQA_PAGE * row) + token, *vs = ks + GQA_PAGE;
        int bound[2] = {n, n};
        if (n >= 32 && page < it.n_pages)
            gqa_tile<D, FP8, 2, false>(st, q, k, v, ks, vs, c, bound, 0xffffffff, lane);
        else if (n > 0 && page < it.n_pages)
            gqa_tile<D, FP8, 2, true>(st, q, k, v, ks, vs, c, bound, (1u << n) - 1, lane);
        __syncwarp();
        if (lane < (FP8 ? 1 : 2))
            gqa_arrive(gqa_smem(&sh.empty[stage]));
    }
    ring.base = (ring.base + n_stages) % a.n_stages;
}

/* A warp leaves its state for the finishing warps. dropped_o: [8][n_heads][row]. */
template <int D, bool FP8>
static __device__ __forceinline__ void drop(shared<D> &sh, float *dropped_o, const struct item &it, gqa_state<D> &st,
                                            uint32_t warp, uint32_t lane)
{
    const int g = (int)(lane >> 2), quad = (int)(lane & 3);
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int h = g + 8 * r;
        float l = gqa_quad_sum(st.l[r]);
        if (h >= it.n_heads)
            continue;
        if (quad == 0) {
            sh.m[warp][h] = st.m[r];
            sh.l[warp][h] = l;
        }
        float *to = dropped_o + ((size_t)warp * it.n_heads + h) * shared<D>::row;
        const float f = FP8 ? gqa_inverse(st.fi[r]) : 1;
#pragma unroll
        for (int i = 0; i < (FP8 ? D / 16 : D / 8); i++) {
            if (FP8)
                *(float4 *)(to + 16 * i + 4 * quad) =
                    make_float4(st.o[2 * i][2 * r] * f, st.o[2 * i + 1][2 * r] * f, st.o[2 * i][2 * r + 1] * f,
                                st.o[2 * i + 1][2 * r + 1] * f);
            else
                *(float2 *)(to + 8 * i + 2 * quad) = make_float2(st.o[i][2 * r], st.o[i][2 * r + 1]);
        }
    }
}

/* Computing and finishing warps. */
static __device__ __forceinline__ void all_barrier()
{
    asm volatile("bar.sync 2, %0;" ::"r"((int)(32 * GQA_WARPS + FINISH_THREADS)) : "memory");
}

template <int D>
static __device__ __forceinline__ void compute(const gqa_args &a, shared<D> &sh, const uint8_t *stages,
                                               float *dropped_o, uint32_t warp, uint32_t lane)
{
    struct place ring = {0, {0, 0}};
    struct gqa_ring slot = {0, 0};
    uint32_t phase = 1; /* of `taken` */
    gqa_state<D> st;
    for (;; phase ^= 1) {
        gqa_wait(gqa_smem(&sh.q_full[slot.stage]), slot.phase);
        const struct item it = sh.item[slot.stage];
        if (it.seq >= 0) {
            gqa_start(st);
            if (it.fp8)
                attend<D, true>(a, sh, stages, it, slot.stage, ring, st, warp, lane);
            else
                attend<D, false>(a, sh, stages, it, slot.stage, ring, st, warp, lane);
        }
        gqa_next(slot, SLOTS);
        gqa_wait(gqa_smem(&sh.taken), phase);
        if (it.seq >= 0) {
            if (it.fp8)
                drop<D, true>(sh, dropped_o, it, st, warp, lane);
            else
                drop<D, false>(sh, dropped_o, it, st, warp, lane);
        }
        if (warp == 0 && lane == 0)
            sh.done = it;
        __syncwarp();
        if (lane == 0)
            gqa_arrive(gqa_smem(&sh.dropped));
        if (it.seq < 0)
            break;
    }
    all_barrier(); /* the finishing warps have counted the last item */
    merge_pending(a, sh, warp, GQA_WARPS, lane);
}

/* ---- The finishing warps ---- */

static __device__ __forceinline__ void finish_barrier()
{
    asm volatile("bar.sync 1, %0;" ::"r"((int)FINISH_THREADS) : "memory");
}

/* Makes what the finishing warps wrote visible (they met at a barrier before) and sees what others made visible. */
static __device__ __forceinline__ uint32_t count_up(uint32_t *counter)
{
    uint32_t before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
    return before;
}

/* Adds up what the eight warps dropped and writes it: the result, or a split's part of it. */
template <int D>
static __device__ void put(const gqa_args &a, shared<D> &sh, const float *dropped_o, const struct item &it,
                           uint32_t thread)
{
    const uint32_t heads = min((uint32_t)GQA_ROWS, a.group), n_heads = (uint32_t)it.n_heads;
    const bool whole = it.n_splits == 1, none = it.n_pages <= 0;
    float *part = partial_at<D>(a, it.slot);
    if (thread < n_heads) {
        float top = -INFINITY, sum = 0;
        for (int w = 0; w < GQA_WARPS; w++)
            top = fmaxf(top, sh.m[w][thread]);
        top = top == -INFINITY ? 0 : top;
        for (int w = 0; w < GQA_WARPS; w++) {
            float f = gqa_exp2(sh.m[w][thread] - top);
            sum += sh.l[w][thread] * f;
            sh.weight[thread][w] = f;
        }
        sh.total_l[thread] = sum;
        if (!whole) {
            __stcg(part + heads * D + thread, top);
            __stcg(part + heads * (D + 1) + thread, sum);
        }
    }
    finish_barrier();
    for (uint32_t e = thread; e < n_heads * D / 4; e += FINISH_THREADS) {
        uint32_t h = e / (D / 4), d = e % (D / 4) * 4;
        float4 x = {0, 0, 0, 0};
#pragma unroll
        for (uint32_t w = 0; w < GQA_WARPS; w++) {
            float4 y = *(const float4 *)(dropped_o + ((size_t)w * n_heads + h) * shared<D>::row + d);
            float f = sh.weight[h][w];
            x.x += y.x * f;
            x.y += y.y * f;
            x.z += y.z * f;
            x.w += y.w * f;
        }
        if (whole)
            put_out(a.out + ((size_t)it.seq * a.n_heads + (uint32_t)it.head + h) * D + d,
                    none ? make_float4(0, 0, 0, 0) : x, none ? 0 : 1 / sh.total_l[h]);
        else
            __stcg((float4 *)(part + h * D + d), x);
    }
}

template <int D>
static __device__ __forceinline__ void finish(const gqa_args &a, shared<D> &sh, const float *dropped_o, uint32_t thread)
{
    dn_wait_previous();
    for (uint32_t phase = 0;; phase ^= 1) {
        gqa_wait(gqa_smem(&sh.dropped), phase);
        const struct item it = sh.done;
        if (it.seq < 0)
            break;
        put<D>(a, sh, dropped_o, it, thread);
        __syncwarp();
        if (thread % 32 == 0)
            gqa_arrive(gqa_smem(&sh.taken));
        finish_barrier(); /* all is written, and the weights may be those of the next item */
        if (it.n_splits == 1)
            continue;
        if (thread == 0 && count_up(a.counters + it.counter) == (uint32_t)it.n_splits - 1) {
            const uint32_t per_split = a.n_kv_heads * a.head_blocks;
            a.counters[it.counter] = 0;
            sh.pending[sh.n_pending++] = {it.seq, it.head, it.n_heads, it.n_splits,
                                          it.slot - (uint32_t)it.split * per_split};
        }
        finish_barrier();
        if (sh.n_pending == PENDING) {
            merge_pending(a, sh, thread / 32, FINISH_WARPS, thread % 32);
            finish_barrier();
            if (thread == 0)
                sh.n_pending = 0;
            finish_barrier();
        }
    }
    all_barrier();
}

template <int D> static __global__ void __launch_bounds__(THREADS, 1) gqa_decode(const __grid_constant__ gqa_args a)
{
    extern __shared__ __align__(1024) uint8_t raw[];
    shared<D> &sh = *(shared<D> *)raw;
    uint8_t *stages = raw + sizeof sh;
    float *dropped_o = (float *)(stages + a.n_stages * shared<D>::stage_bytes);
    uint32_t *first = (uint32_t *)(dropped_o + GQA_WARPS * min((uint32_t)GQA_ROWS, a.group) * shared<D>::row);
    const uint32_t warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < a.n_stages; i++) {
            for (uint32_t g = 0; g < GROUPS; g++)
                gqa_bar_init(gqa_smem(&sh.full[g][i]), GQA_COPY_ARRIVALS);
            gqa_bar_init(gqa_smem(&sh.empty[i]), 4);
        }
        for (uint32_t i = 0; i < SLOTS; i++) {
            gqa_bar_init(gqa_smem(&sh.q_full[i]), 1);
            gqa_bar_init(gqa_smem(&sh.q_empty[i]), GQA_WARPS + 1);
        }
        sh.n_pending = 0;
        gqa_bar_init(gqa_smem(&sh.dropped), GQA_WARPS);
        gqa_bar_init(gqa_smem(&sh.taken), FINISH_WARPS);
        gqa_bar_init_done();
    }
    /* Rows without a query: 0. */
    for (uint32_t i = threadIdx.x; i < sizeof sh.q / 4; i += THREADS)
        ((uint32_t *)sh.q)[i] = 0;
    for (uint32_t i = threadIdx.x; i < SLOTS * GQA_ROWS; i += THREADS)
        sh.factor[0][i] = 1;
    /* The step's arrays were there before its first kernel, and bad[] before the first that touches pages: both ended
     * before this kernel could start. */
    const uint32_t n_seqs = a.step.count[DN_COUNT_SEQS];
    count_items<D>(a, n_seqs, first); /* and makes the barriers visible */
    dn_start_next();
    if (warp < GQA_WARPS) {
        gqa_registers_up<208>();
        compute<D>(a, sh, stages, dropped_o, warp, lane);
    } else {
        gqa_registers_down<88>();
        if (warp == GQA_WARPS)
            load<D>(a, sh, stages, first, n_seqs, lane);
        else if (warp == GQA_WARPS + 1)
            find<D>(a, sh, first, n_seqs, lane);
        else
            finish<D>(a, sh, dropped_o, threadIdx.x - 32 * (GQA_WARPS + 2));
    }
}

template <int D> static bool launch(struct dn_cuda *c, struct gqa_args a, size_t bytes)
{
    uint32_t heads = a.group < GQA_ROWS ? a.group : (uint32_t)GQA_ROWS;
    size_t fixed = sizeof(shared<D>) + GQA_WARPS * heads * shared<D>::row * sizeof(float) +
                   ((size_t)c->n_seqs + 1) * sizeof(uint32_t);
    if (fixed + 2 * shared<D>::stage_bytes > c->shared_bytes)
        return false;
    size_t n_stages = (c->shared_bytes - fixed) / shared<D>::stage_bytes;
    a.n_stages = (uint32_t)(n_stages > 12 ? 12 : n_stages);
    a.partial = (float *)dn_cuda_workspace(c, bytes);
    dn_launch(c, "attention", gqa_decode<D>, dim3((unsigned)c->n_sms), dim3(THREADS),
              fixed + a.n_stages * shared<D>::stage_bytes, a);
    return true;
}

bool dn_gqa_decode(struct dn_cuda *c, const struct dn_attention *p, struct gqa_args a)
{
    uint32_t per_split = a.n_kv_heads * a.head_blocks;
    if ((uint64_t)c->n_seqs * per_split + 1 > DN_CUDA_COUNTERS)
        return false;
    /* A sequence of n pages has at most n / split_pages + 1 splits, 128 / per_split + 1, and 64. */
    uint64_t by_pages = (uint64_t)c->conf.limits.pages / SPLIT_PAGES + c->n_seqs;
    uint64_t most = SPLIT_ITEMS / per_split + 1;
    most = most < MAX_SPLITS ? most : (uint64_t)MAX_SPLITS;
    uint64_t splits = c->n_seqs * most;
    splits = splits < by_pages ? splits : by_pages;
    uint32_t heads = a.group < GQA_ROWS ? a.group : (uint32_t)GQA_ROWS;
    size_t bytes = (size_t)splits * per_split * heads * (p->head_dim + 4) * sizeof(float);
    a.counters = c->counters;
    return p->head_dim == 128 ? launch<128>(c, a, bytes) : launch<64>(c, a, bytes);
}
