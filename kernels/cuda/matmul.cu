/* Matrix products of few tokens: decode steps, and projections by group (the heads of MLA).
 *
 * Maths: out[t][r] = sum_k w[r][k] x[t][k] (+ bias[r]), f32 sums. Weights are the M side of tensor instructions, tokens
 * the N side, up to 64 a launch (matmul_tile.cuh). Codes enter exactly as bf16; of every 32 k a product of its own,
 * times the scale, is added to the sum (affine INT4: plus offset times the sum of the 32 activations, a product with a
 * matrix of ones).
 *
 * Work: a row tile is 128 rows (64 if there are few). K is cut into 1, 2, 4, 8 or 16 runs, one a block of a cluster, so
 * that some 130 to 260 blocks read at once, two an SM; the blocks add their sums through distributed shared memory in
 * the order of the runs. The cut depends on the matrix alone and sums run in one order whatever the number of tokens,
 * so a row's bits do too. Without a cut a block takes several row tiles.
 *
 * Roles: warps 0..7 compute: 16 rows each and all tokens (mma.sync with 64 tokens: 32 rows and half of them). One lane
 * of warp 8 copies: per stage up to `tiles` k tiles of two row blocks (bulk, contiguous) and the activations as boxes
 * of 64 k x N tokens (swizzled tensor map, zeros beyond both ends). The first stages' weights are asked for before the
 * previous kernel ends.
 *
 * Shared: [stages][boxes of activations][weights of two row blocks], [16 tokens][132] f32 to turn sums into rows,
 * barriers. In a cluster the stages become [tokens][132] f32 at the end.
 *
 * Floor: bytes of the packed matrix at 4.65 TB/s. Reached (kernels/README.md has the table): BF16 70-98 % of it for
 * large matrices up to 64 tokens, FP8 59-87 % up to 16 and 29-48 % with 64, INT4 46-81 % up to 8. What is in the way:
 * work in codes is one dependent chain a warp, four warps a scheduler; fixed 4-5 us a launch in small matrices.
 */
#include "kernels/cuda/matmul.cuh"
#include "kernels/cuda/matmul_tile.cuh"

struct args {
    CUtensorMap x; /* k, token, group */
    struct dn_weights w;
    const float *bias;
    void *out;
    uint32_t token0, n_tokens;
    uint32_t n_tiles, n_runs; /* row tiles of all groups; blocks a cluster */
    uint32_t tile_blocks;     /* blocks of 64 rows a row tile: 2, or 1 for matrices of few rows */
    uint32_t group_tiles, group_blocks, group_rows;
    uint64_t out_stride, out_group_stride; /* in values */
    bool out_f32, wide;                    /* wide: four values may be stored at once */
};

[[maybe_unused]] static __device__ __forceinline__ uint32_t first_block(const struct args &a,
                                                                        uint32_t tile) /* of 64 rows */
{
    return tile / a.group_tiles * a.group_blocks + tile % a.group_tiles * a.tile_blocks;
}
[[maybe_unused]] static __device__ __forceinline__ bool has_second_block(const struct args &a, uint32_t tile)
{
    return a.tile_blocks == 2 && tile % a.group_tiles * 2 + 1 < a.group_blocks;
}

[[maybe_unused]] static __device__ __forceinline__ void compute_barrier() /* the computing warps */
{
    asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
}

/* What a block works on: k tiles [begin, end) of row tiles first, first + step, ... */
struct share {
    uint32_t begin, end, first, step;
};
[[maybe_unused]] static __device__ __forceinline__ struct share share_of(const struct args &a)
{
    uint32_t run = blockIdx.x % a.n_runs;
    struct share s = {run * a.w.n_tiles / a.n_runs, (run + 1) * a.w.n_tiles / a.n_runs, blockIdx.x / a.n_runs,
                      gridDim.x / a.n_runs};
    return s;
}

/* One lane copies; weights may be ahead of activations. Divisions only where a row tile begins: this lane's time for a
 * stage is what limits small matrices. */
struct copier {
    struct share share;
    struct {
        const uint8_t *from;
        uint32_t k, tile;
        bool second;
    } w;
    struct {
        uint32_t k, tile, group;
    } x;
    uint64_t policy;
    uint32_t stage, phase; /* the next one, and the parity of its barrier `empty` to wait for */
    bool waits;            /* stages have been used before */
};

[[maybe_unused]] static __device__ __forceinline__ void copier_tile(struct copier &c, const struct args &a)
{
    c.w.from = dn_tile(a.w, first_block(a, c.w.tile), c.share.begin);
    c.w.second = has_second_block(a, c.w.tile);
    c.w.k = c.share.begin;
}

/* The next weights to a stage; false at the end. */
template <int format, bool symmetric, int N>
static __device__ __forceinline__ bool copy_weights(struct copier &c, const struct args &a, uint8_t *stage,
                                                    uint64_t *full)
{
    using P = plan<format, symmetric, N>;
    if (c.w.k == c.share.end) {
        c.w.tile += c.share.step;
        if (c.w.tile >= a.n_tiles)
            return false;
        copier_tile(c, a);
    }
    const uint32_t n = min((uint32_t)P::tiles, c.share.end - c.w.k), bytes = n * P::tile_bytes;
    dn_barrier_expect(full, (c.w.second ? 2 * bytes : bytes) + n * 2 * P::box_bytes);
    dn_bulk_once(stage + P::x_bytes, c.w.from, bytes, full, c.policy);
    if (c.w.second)
        dn_bulk_once(stage + P::x_bytes + P::tiles * P::tile_bytes, c.w.from + a.w.n_tiles * P::tile_bytes, bytes, full,
                     c.policy);
    c.w.from += bytes;
    c.w.k += n;
    return true;
}

/* Weights for the first stages, before the previous kernel has ended. */
template <int format, bool symmetric, int N>
static __device__ __forceinline__ void copy_first(struct copier &c, const struct args &a, uint8_t *stages,
                                                  uint64_t *full)
{
    using P = plan<format, symmetric, N>;
    dn_prefetch_map(&a.x);
    c.share = share_of(a);
    c.policy = dn_policy_once();
    c.w.tile = c.x.tile = c.share.first;
    copier_tile(c, a);
    c.x.k = c.share.begin;
    c.x.group = c.x.tile / a.group_tiles;
    c.stage = c.phase = 0;
    c.waits = false;
    for (int s = 0; s < P::stages; s++)
        if (!copy_weights<format, symmetric, N>(c, a, stages + s * P::stage_bytes, full + s))
            break;
}
/* The next stage, once the computing warps have done with it; false at the end. */
template <int format, bool symmetric, int N>
static __device__ __forceinline__ bool copy_next(struct copier &c, const struct args &a, uint8_t *stages,
                                                 uint64_t *full, uint64_t *empty)
{
    using P = plan<format, symmetric, N>;
    uint8_t *stage = stages + c.stage * P::stage_bytes;
    if (c.x.k == c.share.end) {
        c.x.tile += c.share.step;
        if (c.x.tile >= a.n_tiles) {
            c.x.tile -= c.share.step; /* as often as it is asked */
            return false;
        }
        c.x.group = c.x.tile / a.group_tiles;
        c.x.k = c.share.begin;
    }
    if (c.waits) {
        dn_barrier_wait(empty + c.stage, c.phase);
        copy_weights<format, symmetric, N>(c, a, stage, full + c.stage);
    }
    const uint32_t n = min((uint32_t)P::tiles, c.share.end - c.x.k);
#pragma unroll
    for (uint32_t t = 0; t < P::tiles; t++)
        if (t < n)
#pragma unroll
            for (uint32_t half = 0; half < 2; half++)
                dn_bulk_box(stage + (2 * t + half) * P::box_bytes, &a.x, (c.x.k + t) * DN_TILE_K + half * 64, a.token0,
                            c.x.group, full + c.stage);
    c.x.k += n;
    if (++c.stage == P::stages) {
        c.stage = 0;
        c.phase ^= c.waits;
        c.waits = true;
    }
    return true;
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
template <int strips, int columns>
static __device__ __forceinline__ void put_sums(const float (&sum)[strips][columns][4], int row0, int token0, int t0,
                                                int n, float *sums, int lane)
{
#pragma unroll
    for (int c = 0; c < columns; c++) {
        const int token = token0 + c * 8 - t0;
        if (token < 0 || token >= n)
            continue;
#pragma unroll
        for (int i = 0; i < 4 * strips; i++)
            sums[(token + lane % 4 * 2 + i % 2) * SUM_STRIDE + row0 + i / 2 * 8 + lane / 4] = sum[i / 4][c][i % 4];
    }
}

/* A block that has all of K. */
template <int N, int strips, int columns>
static __device__ void finish_alone(const struct args &a, uint32_t tile, const float (&sum)[strips][columns][4],
                                    int row0, int token0, float *sums, uint32_t thread)
{
    constexpr int tokens = N < SUM_TOKENS ? N : SUM_TOKENS;
    for (int t0 = 0; t0 < N; t0 += tokens) {
        put_sums(sum, row0, token0, t0, tokens, sums, thread % 32);
        compute_barrier();
        for (uint32_t i = thread; i < tokens * (ROWS / 4); i += 32 * WARPS) {
            uint32_t token = i / (ROWS / 4), r = i % (ROWS / 4) * 4;
            store(a, tile, t0 + token, r, *(const float4 *)(sums + token * SUM_STRIDE + r));
        }
        compute_barrier();
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
template <int N, int strips, int columns>
static __device__ void finish_cluster(const struct args &a, uint32_t tile, const float (&sum)[strips][columns][4],
                                      int row0, int token0, float *sums, uint32_t thread)
{
    compute_barrier(); /* nobody reads the stages any more */
    put_sums(sum, row0, token0, 0, N, sums, thread % 32);
    cluster_barrier();
    const uint32_t share = N * (ROWS / 4) / a.n_runs, first = blockIdx.x % a.n_runs * share;
    for (uint32_t i = first + thread; i < first + share; i += 32 * WARPS) {
        const uint32_t token = i / (ROWS / 4), r = i % (ROWS / 4) * 4;
        const float *at = sums + token * SUM_STRIDE + r;
        float4 v = load_from(0, at);
#pragma unroll 4
        for (uint32_t run = 1; run < a.n_runs; run++) {
            float4 o = load_from(run, at);
            v.x += o.x, v.y += o.y, v.z += o.z, v.w += o.w;
        }
        store(a, tile, token, r, v);
    }
    cluster_barrier(); /* this block's sums are read until here */
}

template <int format, bool symmetric, int N>
static __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) few(const __grid_constant__ struct args a)
{
#if __CUDA_ARCH__ >= 900
    using P = plan<format, symmetric, N>;
    extern __shared__ uint8_t raw_shared[];
    uint8_t *stages = raw_shared + (1024 - dn_shared(raw_shared) % 1024) % 1024;
    float *sums = (float *)(stages + P::stages * P::stage_bytes);
    uint64_t *full = (uint64_t *)((uint8_t *)sums + P::sum_bytes), *empty = full + P::stages;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool copies = threadIdx.x == 32 * WARPS;
    struct copier copier;
    if (copies) {
        for (int s = 0; s < P::stages; s++) {
            dn_barrier_init(full + s, 1);
            dn_barrier_init(empty + s, WARPS);
        }
        dn_barrier_init_fence();
        copy_first<format, symmetric, N>(copier, a, stages, full);
    }
    __syncthreads();
    dn_start_next();
    dn_wait_previous();
    if (warp == WARPS) {
        while (copies && copy_next<format, symmetric, N>(copier, a, stages, full, empty))
            ;
        if (a.n_runs > 1) { /* finish_cluster()'s */
            cluster_barrier();
            cluster_barrier();
        }
        return;
    }
    const struct share share = share_of(a);
    const int strip = P::strips == 1 ? warp : warp % 4 * 2,
              token0 = P::strips == 1 ? 0 : warp / 4 * 32; /* of the unit's 8 strips */
    uint32_t s = 0, phase = 0;
    for (uint32_t row_tile = share.first; row_tile < a.n_tiles; row_tile += share.step) {
        float sum[P::strips][P::columns][4] = {};
        const bool has_rows = strip < DN_TILE_STRIPS || has_second_block(a, row_tile);
        for (uint32_t k = share.begin; k < share.end; k += P::tiles) {
            const uint8_t *stage = stages + s * P::stage_bytes;
            const uint8_t *tile = stage + P::x_bytes + strip / DN_TILE_STRIPS * (P::tiles * P::tile_bytes);
            uint32_t box = dn_shared(stage) + token0 * 128;
            dn_barrier_wait(full + s, phase);
            if (has_rows) {
                multiply_unit<format, symmetric, N>(sum, tile, box, strip % DN_TILE_STRIPS, lane, a.w.scale_is_bf16);
                if (P::tiles > 1 && k + 1 < share.end)
                    multiply_unit<format, symmetric, N>(sum, tile + P::tile_bytes, box + 2 * P::box_bytes,
                                                        strip % DN_TILE_STRIPS, lane, a.w.scale_is_bf16);
            }
            __syncwarp();
            if (lane == 0)
                dn_barrier_arrive(empty + s);
            if (++s == P::stages) {
                s = 0;
                phase ^= 1;
            }
        }
        if (a.n_runs > 1)
            finish_cluster<N>(a, row_tile, sum, strip * 16, token0, (float *)stages, threadIdx.x);
        else
            finish_alone<N>(a, row_tile, sum, strip * 16, token0, sums, threadIdx.x);
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

static cudaError_t encode_x(CUtensorMap *map, const struct dn_cuda_few *f, uint32_t n, uint32_t box_tokens)
{
    encode_fn encode = encoder();
    const cuuint64_t dim[3] = {f->w->n_in, n, dn_weights_groups(f->w)};
    const cuuint64_t stride[2] = {f->x_stride * 2, (f->x_group_stride ? f->x_group_stride : f->x_stride) * 2};
    /* Tokens second: with them third, behind a dimension of 1, a box took 20 clk for each of its rows. */
    const cuuint32_t box[3] = {64, box_tokens, 1}, one[3] = {1, 1, 1};
    if (!encode)
        return cudaErrorNotSupported;
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)f->x, dim, stride, box, one,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) == CUDA_SUCCESS
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

template <int format, bool symmetric, int N> static bool launch(struct dn_cuda *c, uint32_t grid, const struct args &a)
{
    using P = plan<format, symmetric, N>;
    /* Or the driver leaves room for one block an SM. */
    if (!c->measuring)
        cudaFuncSetAttribute((const void *)few<format, symmetric, N>, cudaFuncAttributePreferredSharedMemoryCarveout,
                             cudaSharedmemCarveoutMaxShared);
    if (a.n_runs > 1)
        launch_cluster(c, few<format, symmetric, N>, grid, THREADS, P::bytes, a);
    else
        dn_launch(c, "matmul", few<format, symmetric, N>, dim3(grid), dim3(THREADS), P::bytes, a);
    return true;
}
template <int format, bool symmetric>
static bool launch_for(struct dn_cuda *c, uint32_t n, uint32_t grid, const struct args &a)
{
    return n == 8    ? launch<format, symmetric, 8>(c, grid, a)
           : n == 16 ? launch<format, symmetric, 16>(c, grid, a)
           : n == 32 ? launch<format, symmetric, 32>(c, grid, a)
                     : launch<format, symmetric, 64>(c, grid, a);
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

/* Tokens [token0, token0 + box) of n. */
static void launch_box(struct dn_cuda *c, const struct dn_cuda_few *f, uint32_t n, uint32_t token0, uint32_t box)
{
    struct args a = {};
    a.w = dn_weights_of(f->w);
    a.group_rows = f->w->n_out;
    a.group_blocks = (f->w->n_out + DN_TILE_ROWS - 1) / DN_TILE_ROWS;
    a.tile_blocks = dn_weights_groups(f->w) * a.group_blocks * 4 < (uint32_t)c->n_sms ? 1 : 2;
    a.group_tiles = (a.group_blocks + a.tile_blocks - 1) / a.tile_blocks;
    a.n_tiles = dn_weights_groups(f->w) * a.group_tiles;
    a.n_runs = runs_of(c, a.n_tiles, a.w.n_tiles);
    uint32_t grid = a.n_tiles * a.n_runs, most = BLOCKS_PER_SM * c->n_sms;
    grid = a.n_runs > 1 || grid < most ? grid : most;
    if (c->measuring)
        return;
    cudaError_t e = encode_x(&a.x, f, n, box);
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
    switch (f->w->format) {
    case DN_W_BF16:
        launch_for<DN_W_BF16, true>(c, box, grid, a);
        break;
    case DN_W_FP8:
        launch_for<DN_W_FP8, true>(c, box, grid, a);
        break;
    case DN_W_INT8:
        launch_for<DN_W_INT8, true>(c, box, grid, a);
        break;
    default:
        f->w->symmetric ? launch_for<DN_W_INT4, true>(c, box, grid, a) : launch_for<DN_W_INT4, false>(c, box, grid, a);
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
