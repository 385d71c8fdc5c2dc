/* Un-absorbed MLA for prefill: K[h] = [c W_k[h]^T | k_rope], V[h] = c W_v[h]^T of the sequence's whole cache, then
 * out[t][h] = softmax(scale * q[t][h] . K[h][0..position[t]]) V[h].
 *
 * Kernels, for some sequences at a time and then for some heads at a time, as the workspace has room:
 * - unpack: W_k, W_v of all heads to bf16 blocks [64 outputs][64 k] (swizzled, wgmma.cuh), a head's K outputs, then its
 *   V's.
 * - gather: the cache, latents and rope keys as 9 blocks [64 tokens][64] a page, FP8 times its scale in bf16. Tokens
 *   beyond the sequence's length are zeros (stale pages may hold NaN, and 0 * NaN is NaN).
 * - expand: blocks [64 tokens][64] of K and V for each (head, page): 128 tokens x 128 outputs, k = 512. Two warpgroups,
 *   one a page; a producer thread copies blocks of 64 k, four stages of 32 KB.
 * - flash: 128 rows of one sequence and head against tiles of 128 tokens. Two warpgroups of 64 rows; S = Q K^T
 *   (m64n128k16), online softmax in registers, O += P V with P from registers; Q K^T of the next tile is issued before
 *   P V of this.
 * Pages are numbered as in the step's page[]: the page index is where a block lies, whatever sequence it is of.
 *
 * A row's bits depend on its own inputs alone: tiles count from position 0, and a tile beyond a row's position changes
 * nothing (P = 0, factor 1). Work: 2 (nope + rope + v) FLOP a row, position and head; expanding 2 * 512 (nope + v) a
 * token of context and head.
 * Reached with 64 heads, 4096 of 8192 tokens: 485 TFLOP/s of attention, 550 with the expansion.
 */
#include "kernels/cuda/mla.cuh"
#include "kernels/cuda/weights.cuh"
#include "kernels/cuda/wgmma.cuh"

enum {
    LATENT_BLOCKS = DN_MLA_LATENT / 64,
    GATHERED = (LATENT_BLOCKS + 1) * DN_MLA_BLOCK, /* bytes of a page */
    TILE = 128,                                    /* rows and tokens of flash, tokens and outputs of expand */
    TILE_BLOCK = 2 * DN_MLA_BLOCK,                 /* 128 rows of 64 values */
    THREADS = 384,
    CONSUMERS = 256,
    EXPAND_STAGES = 4,
    EXPAND_STAGE = 2 * TILE_BLOCK,
    EXPAND_BYTES = EXPAND_STAGES * EXPAND_STAGE + 2 * TILE_BLOCK + 128, /* shared memory */
    FLASH_128_BYTES = (3 + 2 * (3 + 2)) * TILE_BLOCK + 128,
    FLASH_256_BYTES = (4 + 2 * (4 + 4) / 2) * TILE_BLOCK + 128,
    GROUP_PAGES = 2048, /* of sequences taken together */
    EXPANDED_BYTES = 256 << 20,
};

struct args {
    struct dn_kv_layout l;
    struct dn_cuda_step s;
    struct dn_weights w_k, w_v;
    const void *arena;
    const __nv_bfloat16 *q;
    __nv_bfloat16 *out;
    uint8_t *weights;                                   /* [heads][blocks][8 k][64][64] */
    uint8_t *gathered;                                  /* [page][9][64][64] */
    uint8_t *expanded;                                  /* [heads of the pass][page][blocks][64][64] */
    uint32_t layer, n_heads, nope_dim, v_dim, n_blocks; /* blocks: (nope + v) / 64 */
    uint32_t seq0, seq1, n_pages;                       /* pages of these sequences, one table behind the other */
    uint32_t head0, n_pass_heads, n_tiles;              /* tiles of rows, for all of these sequences */
    float scale_log2;
};

static __device__ __forceinline__ uint32_t bf16_pair(float a, float b)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *(uint32_t *)&v;
}

static __global__ void __launch_bounds__(256) unpack_kernel(const __grid_constant__ struct args a)
{
    uint32_t chunk = blockIdx.x * 256 + threadIdx.x, per_head = a.n_blocks * 64 * LATENT_BLOCKS * 8;
    dn_start_next();
    dn_wait_previous();
    if (chunk >= a.n_heads * per_head)
        return;
    uint32_t h = chunk / per_head, row = chunk % per_head / (LATENT_BLOCKS * 8), c = chunk % (LATENT_BLOCKS * 8);
    float x[8];
    for (uint32_t i = 0; i < 8; i++)
        x[i] = row < a.nope_dim ? dn_weight(a.w_k, h * a.nope_dim + row, c * 8 + i)
                                : dn_weight(a.w_v, h * a.v_dim + row - a.nope_dim, c * 8 + i);
    size_t block = ((size_t)h * a.n_blocks + row / 64) * LATENT_BLOCKS + c / 8;
    *(uint4 *)(a.weights + block * DN_MLA_BLOCK + dn_mla_swizzled(row % 64, c % 8)) =
        make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]), bf16_pair(x[6], x[7]));
}

static __host__ __device__ __forceinline__ uint32_t pages_of(int32_t kv_len)
{
    return ((uint32_t)kv_len + DN_MLA_TOKENS - 1) / DN_MLA_TOKENS;
}

/* The sequence of seq0 .. seq1 - 1 that page *i of the group is of; *i becomes the page's index in its table. */
static __device__ __forceinline__ uint32_t seq_of_page(const struct args &a, uint32_t *i)
{
    uint32_t seq = a.seq0;
    for (; seq + 1 < a.seq1; seq++) {
        uint32_t n = pages_of(a.s.kv_len[seq]);
        if (*i < n)
            break;
        *i -= n;
    }
    return seq;
}

static __device__ __forceinline__ bool has_odd(uint32_t w) /* two bf16, one of them no number */
{
    return (w & 0x7f80) == 0x7f80 || (w & 0x7f800000) == 0x7f800000;
}

/* A token whose latent has values that are no numbers gets zeros instead and a rope key of NaN: rows that see it become
 * NaN through their scores, and rows that don't are not touched by 0 * NaN. */
static __global__ void __launch_bounds__(256) gather_kernel(const __grid_constant__ struct args a)
{
    __shared__ uint32_t odd[DN_MLA_TOKENS / 32];
    uint32_t index = blockIdx.x, t = threadIdx.x;
    if (t < DN_MLA_TOKENS / 32)
        odd[t] = 0;
    dn_start_next();
    dn_wait_previous();
    uint32_t seq = seq_of_page(a, &index), first = index * DN_MLA_TOKENS;
    uint32_t n = (uint32_t)a.s.kv_len[seq], tokens = n > first ? min(n - first, (uint32_t)DN_MLA_TOKENS) : 0;
    if (a.s.bad[seq])
        tokens = 0; /* what a wrong page holds is another's */
    int f = a.s.kv_format[seq];
    const uint8_t *page =
        tokens ? dn_mla_page(a.l, a.arena, f, a.s.page[(uint32_t)a.s.page_start[seq] + index], a.layer) : NULL;
    uint8_t *to = a.gathered + (size_t)blockIdx.x * GATHERED;
    __syncthreads();
    for (uint32_t i = t; i < GATHERED / 16; i += 256) {
        uint32_t block = i / 512, token = i % 512 / 8,
                 chunk = i % 8; /* where it lies: chunk ^ (token & 7) of the row */
        uint4 v = make_uint4(0, 0, 0, 0);
        if (token < tokens) {
            if (f == DN_KV_BF16) {
                v = *(const uint4 *)(page + i * 16);
            } else {
                uint32_t column = block * 64 + (chunk ^ (token & 7)) * 8;
                float x[8];
                for (uint32_t k = 0; k < 8; k++)
                    x[k] = dn_mla_value(a.l, page, f, token, column + k);
                v = make_uint4(bf16_pair(x[0], x[1]), bf16_pair(x[2], x[3]), bf16_pair(x[4], x[5]),
                               bf16_pair(x[6], x[7]));
            }
        }
        *(uint4 *)(to + i * 16) = v;
        if (block < LATENT_BLOCKS && (has_odd(v.x) || has_odd(v.y) || has_odd(v.z) || has_odd(v.w)))
            atomicOr(&odd[token / 32], 1u << token % 32);
    }
    __syncthreads();
    if (!(odd[0] | odd[1]))
        return;
    for (uint32_t i = t; i < GATHERED / 16; i += 256) { /* a thread's own chunks again */
        uint32_t token = i % 512 / 8, x = i / 512 == LATENT_BLOCKS ? 0x7fc07fc0 : 0;
        if (odd[token / 32] >> token % 32 & 1)
            *(uint4 *)(to + i * 16) = make_uint4(x, x, x, x);
    }
}

#if DN_HOPPER

static __device__ __forceinline__ void store_shared(uint32_t at, uint4 v)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
static __device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* Two pages (the second may not exist: the first again, not stored), two blocks of 64 outputs (likewise). */
static __device__ __forceinline__ void expand(const struct args &a)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    uint32_t shared = dn_shared(memory), t = threadIdx.x;
    uint32_t stage_out = shared + EXPAND_STAGES * EXPAND_STAGE, full = stage_out + 2 * TILE_BLOCK, empty = full + 64;
    uint32_t n_rows = a.n_pass_heads * a.n_blocks; /* blocks of 64 outputs */
    uint32_t page = blockIdx.y * 2, row = blockIdx.x * 2;
    if (t == 0) {
        for (int i = 0; i < EXPAND_STAGES; i++) {
            dn_barrier_init(full + 8 * i, 1);
            dn_barrier_init(empty + 8 * i, CONSUMERS / 32);
        }
        dn_fence_async();
    }
    __syncthreads();
    dn_start_next();
    dn_wait_previous();
    if (t >= CONSUMERS) {
        if (t > CONSUMERS)
            return;
        const uint8_t *a0 = a.gathered + (size_t)page * GATHERED;
        const uint8_t *a1 = page + 1 < a.n_pages ? a0 + GATHERED : a0;
        const uint8_t *b0 = a.weights + ((size_t)a.head0 * a.n_blocks + row) * LATENT_BLOCKS * DN_MLA_BLOCK;
        const uint8_t *b1 = row + 1 < n_rows ? b0 + LATENT_BLOCKS * DN_MLA_BLOCK : b0;
        for (uint32_t k = 0; k < LATENT_BLOCKS; k++) {
            uint32_t b = k % EXPAND_STAGES, to = shared + b * EXPAND_STAGE, bar = full + 8 * b;
            dn_barrier_wait(empty + 8 * b, (k / EXPAND_STAGES & 1) ^ 1);
            dn_barrier_expect(bar, EXPAND_STAGE);
            dn_bulk_copy(to, a0 + k * DN_MLA_BLOCK, DN_MLA_BLOCK, bar);
            dn_bulk_copy(to + DN_MLA_BLOCK, a1 + k * DN_MLA_BLOCK, DN_MLA_BLOCK, bar);
            dn_bulk_copy(to + TILE_BLOCK, b0 + k * DN_MLA_BLOCK, DN_MLA_BLOCK, bar);
            dn_bulk_copy(to + TILE_BLOCK + DN_MLA_BLOCK, b1 + k * DN_MLA_BLOCK, DN_MLA_BLOCK, bar);
        }
        return;
    }
    uint32_t w = t / 128, lane = t & 31, r = (t & 127) / 32 * 16 + lane / 4;
    float d[64];
    for (uint32_t k = 0; k < LATENT_BLOCKS; k++) {
        uint32_t b = k % EXPAND_STAGES, from = shared + b * EXPAND_STAGE;
        dn_barrier_wait(full + 8 * b, k / EXPAND_STAGES & 1);
        dn_wgmma_fence();
        for (uint32_t i = 0; i < 4; i++)
            dn_wgmma_n128_bf16(d, dn_wgmma_operand(from + w * DN_MLA_BLOCK + i * 32, 16, 1024),
                               dn_wgmma_operand(from + TILE_BLOCK + i * 32, 16, 1024), k != 0 || i != 0);
        dn_wgmma_commit();
        dn_wgmma_wait<0>();
        if (lane == 0)
            dn_barrier_arrive(empty + 8 * b);
    }
    /* Block j / 8 of the two, row r: chunk j % 8. */
    uint32_t out = stage_out + w * TILE_BLOCK;
    for (int j = 0; j < 16; j++)
        for (int i = 0; i < 2; i++)
            asm volatile("st.shared.b32 [%0], %1;" ::"r"(out + j / 8 * DN_MLA_BLOCK +
                                                         dn_mla_swizzled(r + 8 * i, j % 8) + lane % 4 * 4),
                         "r"(bf16_pair(d[4 * j + 2 * i], d[4 * j + 2 * i + 1]))
                         : "memory");
    dn_fence_async();
    dn_sync(1 + w, 128);
    uint32_t i = t & 127;
    if (i < 2 && row + i < n_rows && page + w < a.n_pages) {
        uint32_t h = (row + i) / a.n_blocks, block = (row + i) % a.n_blocks;
        dn_bulk_store(a.expanded + (((size_t)h * a.n_pages + page + w) * a.n_blocks + block) * DN_MLA_BLOCK,
                      out + i * DN_MLA_BLOCK, DN_MLA_BLOCK);
        dn_bulk_commit();
        dn_bulk_wait();
    }
}

/* A block's rows: 128 consecutive tokens of a sequence. Tile `index` of the group, sequences in order. */
struct rows {
    uint32_t seq, token0, n;            /* first token in the step; how many */
    uint32_t position0, page0, n_pages; /* page0: in the group */
};
static __device__ __forceinline__ bool find_rows(const struct args &a, uint32_t index, struct rows *r)
{
    uint32_t page0 = 0;
    for (uint32_t s = a.seq0; s < a.seq1; s++) {
        uint32_t begin = (uint32_t)a.s.token_start[s], n = (uint32_t)a.s.token_start[s + 1] - begin;
        uint32_t tiles = (n + TILE - 1) / TILE;
        if (index < tiles) {
            index = tiles - 1 - index; /* the longest first */
            r->seq = s;
            r->token0 = begin + index * TILE;
            r->n = min(n - index * TILE, (uint32_t)TILE);
            r->position0 = (uint32_t)a.s.position[r->token0];
            r->page0 = page0;
            r->n_pages = pages_of(a.s.kv_len[s]);
            return true;
        }
        index -= tiles;
        page0 += pages_of(a.s.kv_len[s]);
    }
    return false;
}

template <int NOPE, int V, int N, int STAGES> struct plan {
    static constexpr int KB = NOPE / 64 + 1, VB = V / 64;
    static constexpr uint32_t block = N * 128, q = KB * TILE_BLOCK, k = KB * block, v = VB * block;
};

template <int NOPE, int V, int N, int STAGES>
static __device__ __forceinline__ void produce(const struct args &a, const struct rows &r, uint32_t head,
                                               uint32_t n_tiles, uint32_t k_at, uint32_t v_at, uint32_t bars)
{
    using P = plan<NOPE, V, N, STAGES>;
    const uint8_t *expanded = a.expanded + ((size_t)head * a.n_pages + r.page0) * a.n_blocks * DN_MLA_BLOCK;
    const uint8_t *gathered = a.gathered + (size_t)r.page0 * GATHERED + LATENT_BLOCKS * DN_MLA_BLOCK;
    for (uint32_t j = 0; j < n_tiles; j++) {
        uint32_t b = j % STAGES, parity = (j / STAGES & 1) ^ 1;
        uint32_t k = k_at + b * P::k, v = v_at + b * P::v, k_full = bars + 8 * b, v_full = k_full + 16;
        dn_barrier_wait(k_full + 32, parity);
        dn_barrier_expect(k_full, P::k);
        for (uint32_t half = 0; half < N / 64; half++) {
            uint32_t page =
                min(N / 64 * j + half, r.n_pages - 1); /* one that isn't there: another, finite; it is masked */
            for (uint32_t i = 0; i + 1 < P::KB; i++)
                dn_bulk_copy(k + i * P::block + half * DN_MLA_BLOCK,
                             expanded + ((size_t)page * a.n_blocks + i) * DN_MLA_BLOCK, DN_MLA_BLOCK, k_full);
            dn_bulk_copy(k + (P::KB - 1) * P::block + half * DN_MLA_BLOCK, gathered + (size_t)page * GATHERED,
                         DN_MLA_BLOCK, k_full);
        }
        dn_barrier_wait(v_full + 32, parity);
        dn_barrier_expect(v_full, P::v);
        for (uint32_t half = 0; half < N / 64; half++) {
            uint32_t page = min(N / 64 * j + half, r.n_pages - 1);
            for (uint32_t i = 0; i < P::VB; i++)
                dn_bulk_copy(v + i * P::block + half * DN_MLA_BLOCK,
                             expanded + ((size_t)page * a.n_blocks + NOPE / 64 + i) * DN_MLA_BLOCK, DN_MLA_BLOCK,
                             v_full);
        }
    }
}

template <int KB, int N> static __device__ __forceinline__ void scores(float (&s)[N / 2], uint32_t q, uint32_t k)
{
    dn_wgmma_fence();
    for (uint32_t i = 0; i < KB * 4; i++) {
        uint64_t a = dn_wgmma_operand(q + i / 4 * TILE_BLOCK + i % 4 * 32, 16, 1024);
        uint64_t b = dn_wgmma_operand(k + i / 4 * N * 128 + i % 4 * 32, 16, 1024);
        if constexpr (N == 128)
            dn_wgmma_n128_bf16(s, a, b, i != 0);
        else
            dn_wgmma_n64_bf16(s, a, b, i != 0);
    }
    dn_wgmma_commit();
}

/* Scores to exponentials, in place; alpha for the accumulators. limit: the positions of the thread's rows. */
template <int N>
static __device__ __forceinline__ void softmax(float (&s)[N / 2], float (&top)[2], float (&sum)[2], float (&alpha)[2],
                                               float scale_log2, uint32_t first, const uint32_t (&limit)[2])
{
    float m[2] = {-INFINITY, -INFINITY};
    bool mask = first + N - 1 > limit[0]; /* the lower of both */
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        if (mask && first + i / 4 * 8 + threadIdx.x % 4 * 2 + i % 2 > limit[i / 2 % 2])
            s[i] = -INFINITY;
        m[i / 2 % 2] = fmaxf(m[i / 2 % 2], s[i]);
    }
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        m[i] = fmaxf(m[i], __shfl_xor_sync(0xffffffffu, m[i], 1));
        m[i] = fmaxf(m[i], __shfl_xor_sync(0xffffffffu, m[i], 2));
        m[i] = fmaxf(m[i] * scale_log2, top[i]);
        alpha[i] = m[i] == -INFINITY ? 1 : exp2_fast(top[i] - m[i]);
        base[i] = m[i] == -INFINITY ? 0 : m[i];
        top[i] = m[i];
        sum[i] *= alpha[i];
    }
#pragma unroll
    for (int i = 0; i < N / 2; i++) {
        s[i] = exp2_fast(fmaf(s[i], scale_log2, -base[i / 2 % 2]));
        sum[i / 2 % 2] += s[i];
    }
}

template <int V, int N>
static __device__ __forceinline__ void values(float (&o)[V / 2], const uint32_t (&p)[N / 16][4], uint32_t v)
{
    dn_wgmma_fence();
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
        uint64_t b = dn_wgmma_operand(v + (uint32_t)i * 2048, N * 128, 1024);
        if constexpr (V == 128)
            dn_wgmma_n128_rs(o, p[i], b);
        else
            dn_wgmma_n256_rs(o, p[i], b);
    }
    dn_wgmma_commit();
}

template <int N> static __device__ __forceinline__ void pack(uint32_t (&p)[N / 16][4], const float (&s)[N / 2])
{
#pragma unroll
    for (int i = 0; i < N / 16; i++)
#pragma unroll
        for (int k = 0; k < 4; k++)
            p[i][k] = bf16_pair(s[8 * i + 2 * k], s[8 * i + 2 * k + 1]);
}

/* This warpgroup's 64 rows of Q; rows that don't exist are zeros. */
template <int KB>
static __device__ __forceinline__ void load_q(const struct args &a, const struct rows &r, uint32_t head, uint32_t w,
                                              uint32_t q, uint32_t t)
{
    for (uint32_t i = t; i < 64 * KB * 8; i += 128) {
        uint32_t row = w * 64 + i / (KB * 8), c = i % (KB * 8);
        uint4 v = make_uint4(0, 0, 0, 0);
        if (row < r.n)
            v = __ldg((const uint4 *)(a.q + ((size_t)(r.token0 + row) * a.n_heads + a.head0 + head) * (KB * 64)) + c);
        store_shared(q + c / 8 * TILE_BLOCK + dn_mla_swizzled(row, c % 8), v);
    }
    dn_fence_async();
    dn_sync(1 + (int)w, 128);
}

template <int NOPE, int V, int N, int STAGES>
static __device__ __forceinline__ void consume(const struct args &a, const struct rows &r, uint32_t head,
                                               uint32_t n_tiles, uint32_t q, uint32_t k_at, uint32_t v_at,
                                               uint32_t bars)
{
    using P = plan<NOPE, V, N, STAGES>;
    uint32_t w = threadIdx.x / 128, t = threadIdx.x % 128, lane = t % 32, row = w * 64 + t / 32 * 16 + lane / 4;
    load_q<P::KB>(a, r, head, w, q, t);
    q += w * DN_MLA_BLOCK;
    float o[V / 2], s[N / 2], top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0}, alpha[2];
    uint32_t p[N / 16][4], limit[2];
    for (int i = 0; i < V / 2; i++)
        o[i] = 0;
    for (uint32_t i = 0; i < 2; i++)
        limit[i] = r.position0 + min(row + 8 * i, r.n - 1);
    dn_barrier_wait(bars, 0);
    scores<P::KB, N>(s, q, k_at);
    dn_wgmma_wait<0>();
    if (lane == 0)
        dn_barrier_arrive(bars + 32);
    softmax<N>(s, top, sum, alpha, a.scale_log2, 0, limit);
    pack<N>(p, s);
    for (uint32_t j = 0; j + 1 < n_tiles; j++) {
        uint32_t b = j % STAGES, next = (j + 1) % STAGES;
        dn_barrier_wait(bars + 8 * next, (j + 1) / STAGES & 1);
        scores<P::KB, N>(s, q, k_at + next * P::k);
        dn_barrier_wait(bars + 16 + 8 * b, j / STAGES & 1);
        values<V, N>(o, p, v_at + b * P::v);
        dn_wgmma_wait<1>();
        if (lane == 0)
            dn_barrier_arrive(bars + 32 + 8 * next);
        softmax<N>(s, top, sum, alpha, a.scale_log2, (j + 1) * N, limit);
        dn_wgmma_wait<0>();
        if (lane == 0)
            dn_barrier_arrive(bars + 48 + 8 * b);
        if (__any_sync(0xffffffffu, alpha[0] != 1 || alpha[1] != 1))
#pragma unroll
            for (int i = 0; i < V / 2; i++)
                o[i] *= alpha[i / 2 % 2];
        pack<N>(p, s);
    }
    uint32_t b = (n_tiles - 1) % STAGES;
    dn_barrier_wait(bars + 16 + 8 * b, (n_tiles - 1) / STAGES & 1);
    values<V, N>(o, p, v_at + b * P::v);
    dn_wgmma_wait<0>();
    for (uint32_t i = 0; i < 2; i++) {
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 1);
        sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], 2);
        float inv = 1.0f / sum[i];
        if (row + 8 * i >= r.n)
            continue;
        __nv_bfloat16 *out = a.out + ((size_t)(r.token0 + row + 8 * i) * a.n_heads + a.head0 + head) * V + lane % 4 * 2;
#pragma unroll
        for (int j = 0; j < V / 8; j++)
            *(uint32_t *)(out + 8 * j) = i == 0 ? bf16_pair(o[4 * j] * inv, o[4 * j + 1] * inv)
                                                : bf16_pair(o[4 * j + 2] * inv, o[4 * j + 3] * inv);
    }
}

/* Barriers of 8 bytes: K full [2], V full [2], K empty [2], V empty [2]. */
template <int NOPE, int V, int N, int STAGES> static __device__ __forceinline__ void flash(const struct args &a)
{
    using P = plan<NOPE, V, N, STAGES>;
    extern __shared__ __align__(1024) uint8_t memory[];
    uint32_t q = dn_shared(memory), k_at = q + P::q, v_at = k_at + STAGES * P::k, bars = v_at + STAGES * P::v;
    uint32_t t = threadIdx.x, head = blockIdx.y;
    static_assert(P::q + STAGES * (P::k + P::v) + 128 == (V == 128 ? FLASH_128_BYTES : FLASH_256_BYTES),
                  "shared memory");
    if (t == 0) {
        for (uint32_t i = 0; i < 8; i++)
            dn_barrier_init(bars + 8 * i, i < 4 ? 1 : CONSUMERS / 32);
        dn_fence_async();
    }
    __syncthreads();
    dn_start_next();
    dn_wait_previous();
    struct rows r;
    if (!find_rows(a, blockIdx.x, &r))
        return;
    if (a.s.bad[r.seq]) {
        for (uint32_t i = t; i < r.n * (V / 8); i += THREADS)
            *(uint4 *)(a.out + ((size_t)(r.token0 + i / (V / 8)) * a.n_heads + a.head0 + head) * V + i % (V / 8) * 8) =
                make_uint4(0, 0, 0, 0);
        return;
    }
    uint32_t n_tiles = (r.position0 + r.n + N - 1) / N;
    if (t >= CONSUMERS) {
        dn_registers_down<24>();
        if (t == CONSUMERS)
            produce<NOPE, V, N, STAGES>(a, r, head, n_tiles, k_at, v_at, bars);
    } else {
        dn_registers_up<240>();
        consume<NOPE, V, N, STAGES>(a, r, head, n_tiles, q, k_at, v_at, bars);
    }
}

#endif

static __global__ void __launch_bounds__(THREADS, 1) expand_kernel(const __grid_constant__ struct args a)
{
#if DN_HOPPER
    expand(a);
#endif
}
static __global__ void __launch_bounds__(THREADS, 1) flash_128(const __grid_constant__ struct args a)
{
#if DN_HOPPER
    flash<128, 128, 128, 2>(a);
#endif
}
static __global__ void __launch_bounds__(THREADS, 1) flash_256(const __grid_constant__ struct args a)
{
#if DN_HOPPER
    flash<192, 256, 64, 2>(a);
#endif
}

/* The sequences from *seq on that fit together; page and token numbers are the host's own, in a step that runs. */
static uint32_t group_end(const struct dn_step *s, uint32_t seq, uint32_t most)
{
    uint64_t pages = pages_of(s->kv_len[seq]);
    uint32_t end = seq + 1;
    while (end < s->n_seqs && (pages += pages_of(s->kv_len[end])) <= most)
        end++;
    return end;
}

static void launch_group(struct dn_cuda *c, struct args *a, const struct dn_step *s)
{
    a->n_pages = a->n_tiles = 0;
    for (uint32_t i = a->seq0; i < a->seq1; i++) {
        a->n_pages += pages_of(s->kv_len[i]);
        a->n_tiles += (uint32_t)(s->token_start[i + 1] - s->token_start[i] + TILE - 1) / TILE;
    }
    if (!a->n_tiles)
        return;
    dn_launch(c, "mla_prefill", gather_kernel, dim3(a->n_pages), dim3(256), 0, *a);
    uint64_t per_head = (uint64_t)a->n_pages * a->n_blocks * DN_MLA_BLOCK, most = EXPANDED_BYTES / per_head;
    most = most < 1 ? 1 : most;
    for (uint32_t h = 0; h < a->n_heads; h += (uint32_t)most) {
        a->head0 = h;
        a->n_pass_heads = (uint32_t)(a->n_heads - h < most ? a->n_heads - h : most);
        dn_launch(c, "mla_prefill", expand_kernel, dim3((a->n_pass_heads * a->n_blocks + 1) / 2, (a->n_pages + 1) / 2),
                  dim3(THREADS), EXPAND_BYTES, *a);
        if (a->v_dim == 128)
            dn_launch(c, "mla_prefill", flash_128, dim3(a->n_tiles, a->n_pass_heads), dim3(THREADS), FLASH_128_BYTES,
                      *a);
        else
            dn_launch(c, "mla_prefill", flash_256, dim3(a->n_tiles, a->n_pass_heads), dim3(THREADS), FLASH_256_BYTES,
                      *a);
    }
}

void dn_cuda_mla_prefill(struct dn_device *d, const struct dn_mla_prefill *p)
{
    struct dn_cuda *c = dn_cuda(d);
    if (p->rope_dim != DN_MLA_ROPE || p->latent_dim % 64 || p->latent_dim > DN_MLA_LATENT ||
        p->layout->page_tokens != DN_MLA_TOKENS || p->n_heads > 65535) {
        dn_cuda_failed(c, cudaErrorNotSupported, "mla_prefill: sizes");
        return;
    }
    struct args a = {};
    a.l = *p->layout;
    a.s = c->step;
    a.w_k = dn_weights_of(p->w_k);
    a.w_v = dn_weights_of(p->w_v);
    a.arena = p->arena;
    a.q = (const __nv_bfloat16 *)p->q;
    a.out = (__nv_bfloat16 *)p->out;
    a.layer = p->layer;
    a.n_heads = p->n_heads;
    a.nope_dim = p->nope_dim;
    a.v_dim = p->v_dim;
    a.n_blocks = (p->nope_dim + p->v_dim) / 64;
    a.scale_log2 = p->scale * 1.44269504088896341f;
    bool tuned = (p->nope_dim == 128 && p->v_dim == 128) || (p->nope_dim == 192 && p->v_dim == 256);
    if (c->arch != 90 || p->latent_dim != DN_MLA_LATENT || !tuned || c->kind != DN_STEP_PREFILL) {
        struct dn_mla_simple simple = {};
        simple.q = p->q, simple.out = p->out, simple.arena = p->arena;
        simple.n_heads = p->n_heads, simple.latent_dim = p->latent_dim, simple.layer = p->layer;
        simple.nope_dim = p->nope_dim, simple.v_dim = p->v_dim;
        simple.w_k = a.w_k, simple.w_v = a.w_v;
        simple.scale_log2 = a.scale_log2;
        simple.l = *p->layout;
        dn_cuda_mla_simple(c, &simple, "mla_prefill");
        return;
    }
    /* Sequences together have GROUP_PAGES pages, a single one what it has; heads EXPANDED_BYTES, a single one likewise.
     */
    uint64_t pages = c->max_pages > GROUP_PAGES ? c->max_pages : (uint64_t)GROUP_PAGES;
    pages = pages < c->conf.limits.pages ? pages : c->conf.limits.pages;
    uint64_t weights = (uint64_t)p->n_heads * a.n_blocks * LATENT_BLOCKS * DN_MLA_BLOCK;
    uint64_t per_head = pages * a.n_blocks * DN_MLA_BLOCK,
             expanded = per_head > EXPANDED_BYTES ? per_head : (uint64_t)EXPANDED_BYTES;
    expanded = expanded < per_head * p->n_heads ? expanded : per_head * p->n_heads;
    a.weights = (uint8_t *)dn_cuda_workspace(c, weights + pages * GATHERED + expanded);
    a.gathered = a.weights + weights;
    a.expanded = a.gathered + pages * GATHERED;
    if (c->measuring)
        return;
    uint32_t chunks = p->n_heads * a.n_blocks * 64 * LATENT_BLOCKS * 8;
    dn_launch(c, "mla_prefill", unpack_kernel, dim3((chunks + 255) / 256), dim3(256), 0, a);
    const struct dn_step *s = d->ops->step_arrays(d);
    for (uint32_t seq = 0; seq < s->n_seqs; seq = a.seq1) {
        a.seq0 = seq;
        a.seq1 = group_end(s, seq, GROUP_PAGES);
        launch_group(c, &a, s);
    }
}
