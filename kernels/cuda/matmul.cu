/* Matrix products of few tokens: decode steps, and projections by group (the heads of MLA).
 *
 * Maths: out[t][r] = sum_k w[r][k] x[t][k] (+ bias[r]), f32 sums. Weights are the M side of tensor instructions, tokens
 * the N side, up to 64 a launch (matmul_tile.cuh). Codes enter exactly as bf16; of every 32 k (FP8: 128, what has one
 * scale) a product of its own, times the scale, is added to the sum (affine INT4: plus offset times the sum of the 32
 * activations, a product with a matrix of ones).
 *
 * Work: a row tile is 128 rows (64 if there are few). K is cut into 1, 2, 4, 8 or 16 runs, one a block of a cluster, so
 * that some 130 to 260 blocks read at once, two an SM; the blocks add their sums through distributed shared memory in
 * the order of the runs. Of somewhat more row tiles than SMs, one an SM is whole and only the rest is cut, in the same
 * launch: its first clusters have a row tile a block. The cut depends on the matrix alone and sums run in one order
 * whatever the number of tokens, so a row's bits do too. Without a cut a block takes several row tiles.
 *
 * Roles: 8 warps compute: 16 rows each and all tokens (mma.sync with 64 tokens: 32 rows and half of them); wgmma on
 * codes: 4 warps, each two strips of 16 rows in turns. The next warp copies weights: per stage up to `tiles` k tiles of
 * two row blocks (bulk, contiguous), the first stages' before the previous kernel ends. The one after it copies
 * activations as boxes of 64 k x N tokens (swizzled tensor map, zeros beyond both ends), if n_in is a multiple of 64
 * all of a stage's at once. Copying warps are in step and elect the lane that asks.
 *
 * The next kernel may start when all weights have been asked for (BF16, which memory limits: its first copies take
 * turns with this one's last products) or at once (codes).
 *
 * Shared: [stages][boxes of activations][weights of two row blocks], [16 tokens][132] f32 to turn sums into rows,
 * barriers. In a cluster the stages become [tokens][132] f32 at the end.
 *
 * Floor: bytes of the packed matrix at 4.65 TB/s. Reached (README.md has the table and what is in the way): of large
 * matrices BF16 78-98 % up to 64 tokens, FP8 64-87 % up to 8 and 45-67 % with 64, INT4 50-90 % and 25-43 %.
 */
#include "kernels/cuda/matmul.cuh"
#include "kernels/cuda/matmul_tile.cuh"

struct args {
    CUtensorMap x;  /* k, token, group */
    CUtensorMap x4; /* k, token, pieces of 64 k, group; if whole_pieces */
    struct dn_weights w;
    const float *bias;
    void *out;
    uint32_t token0, n_tokens;
    uint32_t n_tiles, n_runs; /* row tiles of all groups; blocks a cluster */
    uint32_t n_whole;         /* of a grid of clusters: the first blocks have a row tile each and all of K */
    uint32_t tile_blocks;     /* blocks of 64 rows a row tile: 2, or 1 for matrices of few rows */
    uint32_t group_tiles, group_blocks, group_rows;
    uint64_t out_stride, out_group_stride; /* in values */
    bool out_f32, wide;                    /* wide: four values may be stored at once */
    bool whole_pieces;
    bool early; /* the next kernel may start as soon as this one, else when all weights have been asked for */
};

[[maybe_unused]] static __device__ __forceinline__ uint32_t first_block(const struct args &a,
                                                                        uint32_t tile) /* of 64 rows */
{
    return tile / a.group_tiles * a.group_blocks + tile % a.group_tiles * a.tile_blocks;
}
[[maybe_unused]] static __device__ __forceinline__ uint32_t blocks_of(const struct args &a, uint32_t tile)
{
    return min(a.tile_blocks, a.group_blocks - tile % a.group_tiles * a.tile_blocks);
}

template <typename P> static __device__ __forceinline__ void compute_barrier() /* the computing warps */
{
    asm volatile("bar.sync 1, %0;" ::"n"(32 * P::warps) : "memory");
}

/* What a block works on: k tiles [begin, end) of row tiles first, first + step, ... */
struct share {
    uint32_t begin, end, first, step;
    bool alone; /* has all of K */
};
[[maybe_unused]] static __device__ __forceinline__ struct share share_of(const struct args &a)
{
    struct share s = {0, a.w.n_tiles, blockIdx.x, gridDim.x, true};
    if (a.n_runs > 1) {
        s.step = a.n_tiles;
        if (blockIdx.x >= a.n_whole) {
            const uint32_t i = blockIdx.x - a.n_whole, run = i % a.n_runs;
            s = {run * a.w.n_tiles / a.n_runs, (run + 1) * a.w.n_tiles / a.n_runs, a.n_whole + i / a.n_runs, a.n_tiles,
                 false};
        }
    }
    return s;
}

/* A ring of stages as a copying warp goes round it: the next one; a bit a stage: it has been used, an odd number of
 * times. */
struct ring {
    uint32_t stage, used, odd;
};
/* Until the next stage is free. */
[[maybe_unused]] static __device__ __forceinline__ void ring_wait(const struct ring &r, uint64_t *empty)
{
    if (r.used >> r.stage & 1)
        dn_barrier_wait(empty + r.stage, (r.odd >> r.stage & 1) ^ 1);
}
template <typename P> static __device__ __forceinline__ void ring_next(struct ring &r)
{
    r.used |= 1u << r.stage;
    r.odd ^= 1u << r.stage;
    r.stage = r.stage + 1 == P::stages ? 0 : r.stage + 1;
}

/* One lane of a warp that is in step, which lets the compiler keep addresses in uniform registers: otherwise a copy
 * takes some 20 instructions, and the time for a stage is what limits small matrices. */
[[maybe_unused]] static __device__ __forceinline__ bool elected()
{
    uint32_t one = 0;
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .pred p;\nelect.sync _|p, 0xffffffff;\nselp.u32 %0, 1, 0, p; }" : "=r"(one));
#endif
    return one;
}

/* A warp that copies weights, from before the previous kernel has ended. */
template <typename P>
static __device__ __forceinline__ void copy_weights(const struct args &a, const struct share &share, uint8_t *stages,
                                                    uint64_t *full, uint64_t *empty)
{
    const uint64_t policy = dn_policy_once();
    struct ring r = {};
    for (uint32_t tile = share.first; tile < a.n_tiles; tile += share.step) {
        const uint32_t blocks = blocks_of(a, tile);
        const uint8_t *from = dn_tile(a.w, first_block(a, tile), share.begin);
        for (uint32_t k = share.begin; k < share.end; k += P::tiles) {
            const uint32_t n = min((uint32_t)P::tiles, share.end - k), bytes = n * P::tile_bytes;
            uint8_t *stage = stages + r.stage * P::stage_bytes;
            ring_wait(r, empty);
            if (elected()) {
                dn_barrier_expect(full + r.stage, blocks * bytes + n * 2 * P::box_bytes);
#pragma unroll
                for (uint32_t b = 0; b < 2; b++)
                    if (b < blocks)
                        dn_bulk_once(stage + P::x_bytes + b * (P::tiles * P::tile_bytes),
                                     from + (size_t)(b * a.w.n_tiles) * P::tile_bytes, bytes, full + r.stage, policy);
            }
            __syncwarp();
            from += bytes;
            ring_next<P>(r);
        }
        if (P::turns)
            r.stage = 0;
    }
    dn_start_next(); /* whose copies take turns with this block's last products */
}

/* All of a stage's activations as one box of 64 k x tokens x pieces of 64 k. */
[[maybe_unused]] static __device__ __forceinline__ void copy_box(void *to, const CUtensorMap *map, uint32_t token,
                                                                 uint32_t piece, uint32_t group, uint64_t *full)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, "
                 "%5}], [%6];" ::"r"(dn_shared(to)),
                 "l"(map), "r"(0), "r"(token), "r"(piece), "r"(group), "r"(dn_shared(full))
                 : "memory");
#endif
}

/* A warp that copies activations. */
template <typename P>
static __device__ __forceinline__ void copy_activations(const struct args &a, const struct share &share,
                                                        uint8_t *stages, uint64_t *full, uint64_t *empty)
{
    struct ring r = {};
    for (uint32_t tile = share.first; tile < a.n_tiles; tile += share.step) {
        const uint32_t group = tile / a.group_tiles;
        for (uint32_t k = share.begin; k < share.end; k += P::tiles) {
            const uint32_t n = min((uint32_t)P::tiles, share.end - k);
            uint8_t *stage = stages + r.stage * P::stage_bytes;
            ring_wait(r, empty);
            if (elected()) {
                if (a.whole_pieces && n == P::tiles) {
                    copy_box(stage, &a.x4, a.token0, k * 2, group, full + r.stage);
                } else {
#pragma unroll
                    for (uint32_t i = 0; i < 2 * P::tiles; i++)
                        if (i < 2 * n)
                            dn_bulk_box(stage + i * P::box_bytes, &a.x, k * DN_TILE_K + i * 64, a.token0, group,
                                        full + r.stage);
                }
            }
            __syncwarp();
            ring_next<P>(r);
        }
        if (P::turns)
            r.stage = 0;
    }
}

/* Four rows of a token to `out`, with the bias. */
[[maybe_unused]] static __device__ __forceinline__ void store(const struct args &a, uint32_t tile, uint32_t token,
                                                              uint32_t r, float4 v)
{
    uint32_t group = tile / a.group_tiles, rows = a.tile_blocks * DN_TILE_ROWS;
    uint32_t row = tile % a.group_tiles * rows + r;
    if (a.token0 + token >= a.n_tokens || r >= rows || row >= a.group_rows)
        return;
    size_t at = (a.token0 + token) * a.out_stride + group * a.out_group_stride + row;
    float x[4] = {v.x, v.y, v.z, v.w};
    uint32_t n = min(4u, a.group_rows - row);
    if (a.bias)
        for (uint32_t i = 0; i < n; i++)
            x[i] += a.bias[row + i];
    if (a.wide && n == 4) {
        if (a.out_f32) {
            *(float4 *)((float *)a.out + at) = make_float4(x[0], x[1], x[2], x[3]);
        } else {
            __nv_bfloat162 h[2] = {__floats2bfloat162_rn(x[0], x[1]), __floats2bfloat162_rn(x[2], x[3])};
            *(uint2 *)((__nv_bfloat16 *)a.out + at) = *(uint2 *)h;
        }
        return;
    }
    for (uint32_t i = 0; i < n; i++)
        if (a.out_f32)
            ((float *)a.out)[at + i] = x[i];
        else
            ((__nv_bfloat16 *)a.out)[at + i] = __float2bfloat16_rn(x[i]);
}

/* A warp's sums of tokens [t0, t0 + n) to sums[token - t0][row]. row0, token0: where the warp's begin. */
template <typename P>
static __device__ __forceinline__ void put_sums(const float (&sum)[P::strips][P::columns][4], int row0, int token0,
                                                int t0, int n, float *sums, int lane)
{
#pragma unroll
    for (int c = 0; c < P::columns; c++) {
        const int token = token0 + c * 8 - t0;
        if (token < 0 || token >= n)
            continue;
#pragma unroll
        for (int i = 0; i < 4 * P::strips; i++)
            sums[(token + lane % 4 * 2 + i % 2) * SUM_STRIDE + row0 + i / 4 * P::strip_rows + i % 4 / 2 * 8 +
                 lane / 4] = sum[i / 4][c][i % 4] * P::unscale;
    }
}

/* A block that has all of K. */
template <typename P>
static __device__ void finish_alone(const struct args &a, uint32_t tile, const float (&sum)[P::strips][P::columns][4],
                                    int row0, int token0, float *sums, uint32_t thread)
{
    constexpr int tokens = P::N < SUM_TOKENS ? P::N : SUM_TOKENS;
    for (int t0 = 0; t0 < P::N; t0 += tokens) {
        put_sums<P>(sum, row0, token0, t0, tokens, sums, thread % 32);
        compute_barrier<P>();
        for (uint32_t i = thread; i < tokens * (ROWS / 4); i += 32 * P::warps) {
            uint32_t token = i / (ROWS / 4), r = i % (ROWS / 4) * 4;
            store(a, tile, t0 + token, r, *(const float4 *)(sums + token * SUM_STRIDE + r));
        }
        compute_barrier<P>();
    }
}

/* Of all threads of all blocks of the cluster; releases and acquires. */
[[maybe_unused]] static __device__ __forceinline__ void cluster_barrier()
{
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/* From another block of the cluster: this block's address there. */
[[maybe_unused]] static __device__ __forceinline__ float4 load_from(uint32_t rank, const float *p)
{
    float4 v = {};
#if __CUDA_ARCH__ >= 900
    uint32_t there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(dn_shared(p)), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(there)
                 : "memory");
#endif
    return v;
}

/* A block of a cluster: each sums its share of the outputs over all. `sums` has room for all tokens. */
template <typename P>
static __device__ void finish_cluster(const struct args &a, uint32_t tile, const float (&sum)[P::strips][P::columns][4],
                                      int row0, int token0, float *sums, uint32_t thread)
{
    compute_barrier<P>(); /* nobody reads the stages any more */
    put_sums<P>(sum, row0, token0, 0, P::N, sums, thread % 32);
    cluster_barrier();
    const uint32_t share = P::N * (ROWS / 4) / a.n_runs, first = blockIdx.x % a.n_runs * share;
#pragma unroll 1
    for (uint32_t i = first + thread; i < first + share; i += 32 * P::warps) {
        const uint32_t token = i / (ROWS / 4), r = i % (ROWS / 4) * 4;
        const float *at = sums + token * SUM_STRIDE + r;
        /* All are asked for before any is needed: each takes some 200 ns. */
        float4 v = {};
#pragma unroll 1
        for (uint32_t run = 0; run < a.n_runs; run += 8) {
            float4 part[8];
#pragma unroll
            for (uint32_t j = 0; j < 8; j++)
                part[j] = run + j < a.n_runs ? load_from(run + j, at) : make_float4(0, 0, 0, 0);
#pragma unroll
            for (uint32_t j = 0; j < 8; j++)
                if (run + j < a.n_runs)
                    v.x += part[j].x, v.y += part[j].y, v.z += part[j].z, v.w += part[j].w;
        }
        store(a, tile, token, r, v);
    }
    cluster_barrier(); /* this block's sums are read until here */
}

/* What the copying warpgroup has too many of. */
template <typename P> static __device__ __forceinline__ void registers_more()
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (P::turns)
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
#endif
}
template <typename P> static __device__ __forceinline__ void registers_fewer()
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    if constexpr (P::turns)
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
}

template <typename P>
static __global__ void __launch_bounds__(P::threads, BLOCKS_PER_SM) few(const __grid_constant__ struct args a)
{
#if __CUDA_ARCH__ >= 900
    extern __shared__ uint8_t raw_shared[];
    uint8_t *stages = raw_shared + (1024 - dn_shared(raw_shared) % 1024) % 1024;
    float *sums = (float *)(stages + P::stages * P::stage_bytes);
    uint64_t *full = (uint64_t *)((uint8_t *)sums + P::sum_bytes), *empty = full + P::stages;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const struct share share = share_of(a);
    if (warp == P::warps) {
        if (lane == 0) {
            for (int s = 0; s < P::stages; s++) {
                dn_barrier_init(full + s, 1);
                dn_barrier_init(empty + s, P::warps);
            }
            dn_barrier_init_fence();
        }
        __syncwarp();
    } else if (warp == P::warps + 1 && lane == 0) {
        dn_prefetch_map(a.whole_pieces ? &a.x4 : &a.x);
    }
    __syncthreads();
    if (a.early)
        dn_start_next();
    if (warp >= P::warps) {
        registers_fewer<P>();
        if (warp == P::warps) {
            copy_weights<P>(a, share, stages, full, empty);
        } else if (warp == P::warps + 1) {
            dn_wait_previous();
            copy_activations<P>(a, share, stages, full, empty);
        }
        return;
    }
    registers_more<P>();
    dn_wait_previous();
    constexpr bool all_tokens = P::turns || P::strips == 1;
    const int strip = all_tokens ? warp : warp % 4 * 2, token0 = all_tokens ? 0 : warp / 4 * 32; /* of the unit's 8 */
    [[maybe_unused]] uint32_t s = 0, phase = 0, parity = 0;
    for (uint32_t row_tile = share.first; row_tile < a.n_tiles; row_tile += share.step) {
        float sum[P::strips][P::columns][4] = {};
        [[maybe_unused]] const bool has_rows = strip / DN_TILE_STRIPS < blocks_of(a, row_tile);
        if constexpr (P::turns) {
#if HAS_WGMMA
            multiply_turns<P>(sum, stages, full, empty, parity, share.end - share.begin, warp, lane);
#endif
        } else {
            for (uint32_t k = share.begin; k < share.end; k += P::tiles) {
                const uint8_t *stage = stages + s * P::stage_bytes;
                const uint8_t *tile = stage + P::x_bytes + strip / DN_TILE_STRIPS * (P::tiles * P::tile_bytes);
                uint32_t box = dn_shared(stage) + token0 * 128;
                dn_barrier_wait(full + s, phase);
                if (has_rows) {
                    multiply_unit<P>(sum, tile, box, strip % DN_TILE_STRIPS, lane);
                    if (P::tiles > 1 && k + 1 < share.end)
                        multiply_unit<P>(sum, tile + P::tile_bytes, box + 2 * P::box_bytes, strip % DN_TILE_STRIPS,
                                         lane);
                }
                __syncwarp();
                if (lane == 0)
                    dn_barrier_arrive(empty + s);
                if (++s == P::stages) {
                    s = 0;
                    phase ^= 1;
                }
            }
        }
        if (share.alone)
            finish_alone<P>(a, row_tile, sum, strip * 16, token0, sums, threadIdx.x);
        else
            finish_cluster<P>(a, row_tile, sum, strip * 16, token0, (float *)stages, threadIdx.x);
    }
#endif
}

/* For GPUs that lack bulk copies or their shared memory: a warp an output. */
static __global__ void __launch_bounds__(256) plain(struct dn_weights w, const __nv_bfloat16 *x, uint64_t x_stride,
                                                    uint64_t x_group_stride, struct dn_cuda_few_out o)
{
    dn_wait_previous();
    dn_start_next();
    uint32_t row = blockIdx.x * 8 + threadIdx.x / 32, token = blockIdx.y, lane = threadIdx.x % 32;
    if (row >= w.n_rows)
        return;
    uint32_t group = row / o.group_rows, r = row % o.group_rows;
    float sum = 0;
    for (uint32_t k = lane; k < w.n_in; k += 32)
        sum = fmaf(dn_weight(w, row, k), __bfloat162float(x[token * x_stride + group * x_group_stride + k]), sum);
    for (int i = 16; i; i /= 2)
        sum += __shfl_xor_sync(~0u, sum, i);
    if (lane)
        return;
    sum += o.bias ? o.bias[r] : 0;
    size_t at = token * o.stride + group * o.group_stride + r;
    if (o.f32)
        ((float *)o.data)[at] = sum;
    else
        ((__nv_bfloat16 *)o.data)[at] = __float2bfloat16_rn(sum);
}

/* ---- Launching ---- */

typedef CUresult (*encode_fn)(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                              const cuuint64_t *, const cuuint32_t *, const cuuint32_t *, CUtensorMapInterleave,
                              CUtensorMapSwizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill);

/* The driver's function by name: the library is not linked with the driver. */
static encode_fn encoder()
{
    static encode_fn fn;
    void *p = NULL;
    cudaDriverEntryPointQueryResult result;
    if (!fn &&
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &result) ==
            cudaSuccess &&
        result == cudaDriverEntryPointSuccess)
        fn = (encode_fn)p;
    return fn;
}

/* Boxes of 64 k; `pieces` of them behind one another, or 0: k is one dimension. Tokens are always second: with them
 * third, behind a dimension of 1, a box took 20 clk for each of its rows. */
static cudaError_t encode_x(CUtensorMap *map, const struct dn_cuda_few *f, uint32_t n, uint32_t box_tokens,
                            uint32_t pieces)
{
    encode_fn encode = encoder();
    const cuuint64_t of_group = (f->x_group_stride ? f->x_group_stride : f->x_stride) * 2;
    const cuuint64_t dim3[3] = {f->w->n_in, n, dn_weights_groups(f->w)}, stride3[2] = {f->x_stride * 2, of_group},
                     dim4[4] = {64, n, f->w->n_in / 64, dn_weights_groups(f->w)},
                     stride4[3] = {f->x_stride * 2, 128, of_group};
    const cuuint32_t box[4] = {64, box_tokens, pieces ? pieces : 1, 1}, one[4] = {1, 1, 1, 1};
    if (!encode)
        return cudaErrorNotSupported;
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, pieces ? 4 : 3, (void *)f->x, pieces ? dim4 : dim3,
                  pieces ? stride4 : stride3, box, one, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
               ? cudaSuccess
               : cudaErrorInvalidValue;
}

/* dn_launch() for clusters. */
static void launch_cluster(struct dn_cuda *c, void (*kernel)(struct args), uint32_t grid, uint32_t block, size_t shared,
                           const struct args &a)
{
    if (c->measuring || c->failed)
        return;
    cudaLaunchAttribute attr[2] = {};
    attr[0].id = cudaLaunchAttributeClusterDimension;
    attr[0].val.clusterDim.x = a.n_runs;
    attr[0].val.clusterDim.y = attr[0].val.clusterDim.z = 1;
    attr[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr[1].val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t conf = {};
    conf.gridDim = dim3(grid);
    conf.blockDim = dim3(block);
    conf.dynamicSmemBytes = shared;
    conf.stream = c->stream;
    conf.attrs = attr;
    conf.numAttrs = c->plain ? 1 : 2;
    c->plain = false;
    cudaError_t e = dn_cuda_allow_shared(c, (const void *)kernel, shared);
    if (e == cudaSuccess && a.n_runs > 8)
        e = cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    if (e == cudaSuccess)
        e = cudaLaunchKernelEx(&conf, kernel, a);
    if (e != cudaSuccess)
        dn_cuda_failed(c, e, "matmul");
}

template <typename P> static void launch(struct dn_cuda *c, const struct args &a)
{
    uint32_t grid = a.n_whole + (a.n_tiles - a.n_whole) * a.n_runs, most = (uint32_t)(BLOCKS_PER_SM * c->n_sms);
    if (a.n_runs == 1 && grid > most)
        grid = most;
    /* Or the driver leaves room for one block an SM. */
    cudaFuncSetAttribute((const void *)few<P>, cudaFuncAttributePreferredSharedMemoryCarveout,
                         cudaSharedmemCarveoutMaxShared);
    if (a.n_runs > 1)
        launch_cluster(c, few<P>, grid, P::threads, P::bytes, a);
    else
        dn_launch(c, "matmul", few<P>, dim3(grid), dim3(P::threads), P::bytes, a);
}
template <int format, bool symmetric, bool scale_is_bf16>
static void launch_for(struct dn_cuda *c, uint32_t n, const struct args &a)
{
    constexpr bool may = format != DN_W_BF16 && symmetric;
    const bool turns = may && c->arch == 90;
    if (n == 8)
        launch<plan<format, symmetric, scale_is_bf16, 8, false>>(c, a);
    else if (n == 16)
        launch<plan<format, symmetric, scale_is_bf16, 16, false>>(c, a);
    else if (n == 32 && turns)
        launch<plan<format, symmetric, scale_is_bf16, 32, may>>(c, a);
    else if (n == 32)
        launch<plan<format, symmetric, scale_is_bf16, 32, false>>(c, a);
    else if (turns)
        launch<plan<format, symmetric, scale_is_bf16, 64, may>>(c, a);
    else
        launch<plan<format, symmetric, scale_is_bf16, 64, false>>(c, a);
}
template <int format, bool symmetric>
static void launch_in_groups(struct dn_cuda *c, uint32_t n, const struct args &a, bool scale_is_bf16)
{
    if (scale_is_bf16)
        launch_for<format, symmetric, true>(c, n, a);
    else
        launch_for<format, symmetric, false>(c, n, a);
}

/* Blocks a row tile: as many as are sure to run at once, two an SM, with a little left for how clusters fit; 16, more
 * than every GPU must offer, only where they leave most of it free. */
static uint32_t runs_of(const struct dn_cuda *c, uint32_t row_tiles, uint32_t k_tiles)
{
    const uint32_t slots = BLOCKS_PER_SM * c->n_sms;
    const uint32_t most[] = {slots, slots * 31 / 32, slots * 31 / 32, slots * 6 / 7, slots / 2};
    for (uint32_t i = 4; i > 0; i--)
        if (row_tiles << i <= most[i] && k_tiles >= 2u << i)
            return 1u << i;
    return 1;
}

/* How rows and K are cut, from the matrix alone. */
static void cut(const struct dn_cuda *c, const struct dn_matrix *w, struct args *a)
{
    const uint32_t groups = dn_weights_groups(w), sms = (uint32_t)c->n_sms;
    a->w = dn_weights_of(w);
    a->group_rows = w->n_out;
    a->group_blocks = (w->n_out + DN_TILE_ROWS - 1) / DN_TILE_ROWS;
    a->tile_blocks = groups * a->group_blocks * 4 < sms ? 1 : 2;
    a->group_tiles = (a->group_blocks + a->tile_blocks - 1) / a->tile_blocks;
    a->n_tiles = groups * a->group_tiles;
    a->n_runs = runs_of(c, a->n_tiles, a->w.n_tiles);
    a->n_whole = 0;
    /* A tile an SM and some more: those are cut, so that no SM has two. */
    if (a->n_runs == 1 && a->n_tiles > sms)
        for (uint32_t runs = 8; runs > 1; runs /= 2) {
            const uint32_t whole = sms / runs * runs;
            if (a->w.n_tiles >= 2 * runs && a->n_tiles > whole &&
                whole + (a->n_tiles - whole) * runs <= BLOCKS_PER_SM * sms * 31 / 32) {
                a->n_runs = runs;
                a->n_whole = whole;
                return;
            }
        }
}

/* Tokens [token0, token0 + box) of n. */
static void launch_box(struct dn_cuda *c, const struct dn_cuda_few *f, uint32_t n, uint32_t token0, uint32_t box)
{
    struct args a = {};
    cut(c, f->w, &a);
    if (c->measuring)
        return;
    const uint32_t k_tiles = f->w->format == DN_W_INT4 && box < 32 ? 2 : 1; /* of a stage */
    cudaError_t e = encode_x(&a.x, f, n, box, 0);
    a.whole_pieces = f->w->n_in % 64 == 0;
    if (e == cudaSuccess && a.whole_pieces)
        e = encode_x(&a.x4, f, n, box, 2 * k_tiles);
    if (e != cudaSuccess) {
        dn_cuda_failed(c, e, "matmul");
        return;
    }
    a.bias = f->out.bias;
    a.out = f->out.data;
    a.out_f32 = f->out.f32;
    a.out_stride = f->out.stride;
    a.out_group_stride = f->out.group_stride;
    a.wide = f->out.stride % 4 == 0 && f->out.group_stride % 4 == 0 && (uintptr_t)f->out.data % 16 == 0;
    a.token0 = token0;
    a.n_tokens = n;
    a.early = f->w->format != DN_W_BF16;
    switch (f->w->format) {
    case DN_W_BF16:
        launch_for<DN_W_BF16, true, true>(c, box, a);
        break;
    case DN_W_FP8:
        launch_for<DN_W_FP8, true, true>(c, box, a);
        break;
    case DN_W_INT8:
        launch_in_groups<DN_W_INT8, true>(c, box, a, f->w->scale_is_bf16);
        break;
    default:
        f->w->symmetric ? launch_in_groups<DN_W_INT4, true>(c, box, a, f->w->scale_is_bf16)
                        : launch_in_groups<DN_W_INT4, false>(c, box, a, f->w->scale_is_bf16);
    }
}

void dn_cuda_few(struct dn_cuda *c, const struct dn_cuda_few *f, uint32_t n)
{
    if (!n)
        return;
    if (c->arch < 90 || c->shared_bytes < 112 * 1024) {
        struct dn_weights w = dn_weights_of(f->w);
        dn_launch(c, "matmul", plain, dim3((w.n_rows + 7) / 8, n), dim3(256), 0, w, (const __nv_bfloat16 *)f->x,
                  f->x_stride, f->x_group_stride, f->out);
        return;
    }
    DN_BUG_ON(f->x_stride % 8 || f->x_group_stride % 8);
    for (uint32_t token0 = 0; token0 < n; token0 += MAX_TOKENS) {
        uint32_t left = n - token0;
        launch_box(c, f, n, token0, left <= 8 ? 8 : left <= 16 ? 16 : left <= 32 ? 32 : 64);
    }
}

void dn_cuda_matmul(struct dn_device *d, const struct dn_matmul *p)
{
    struct dn_cuda *c = dn_cuda(d);
    struct dn_cuda_few f = {p->w, p->a, p->w->n_in, 0, {p->out, p->bias, p->w->n_out, p->w->n_out, 0, p->out_f32}};
    DN_BUG_ON(p->w->n_groups > 1);
    /* A step's rows are few even in prefill. cuBLASLt wants rows of 16 bytes. */
    if (p->rows_only || c->kind == DN_STEP_DECODE || p->w->n_out % 8)
        dn_cuda_few(c, &f, p->rows_only ? c->n_rows : c->n_tokens);
    else
        dn_cuda_matmul_large(c, p, c->n_tokens);
}

void dn_cuda_group_matmul(struct dn_device *d, const struct dn_group_matmul *p)
{
    struct dn_cuda *c = dn_cuda(d);
    struct dn_cuda_few f = {p->w,
                            p->a,
                            p->a_stride,
                            p->a_group_stride,
                            {p->out, NULL, p->w->n_out, p->out_stride, p->out_group_stride, false}};
    dn_cuda_few(c, &f, c->n_tokens);
}
