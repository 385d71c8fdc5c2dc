/* Matrix products of few tokens: decode steps, and projections by group (the heads of MLA).
 *
 * Maths: out[t][r] = sum_k w[r][k] x[t][k] (+ bias[r]), f32 sums. Weights are the M side of mma.sync.m16n8k16, tokens
 * the N side, up to 64 a launch. Codes enter exactly as bf16; of every 32 k a product of its own, times the scale, is
 * added to the sum (affine INT4: plus offset times the sum of the 32 activations, a product with a matrix of ones).
 *
 * Work: a row tile is 128 rows. K is cut into 1, 2, 4 or 8 runs, one a block of a cluster, so that some 130 to 260
 * blocks read at once, two an SM; the blocks add their sums through distributed shared memory in the order of the runs.
 * The cut depends on the matrix alone and sums run in one order whatever the number of tokens, so a row's bits do too.
 * Without a cut a block takes several row tiles.
 *
 * Roles: warps 0..7 compute: warp w has rows 32 (w % 4).. and 64 of every 128 k, half w / 4. One lane of warp 8 (of
 * warp 0 if there are 32 tokens or more) copies: per stage up to `tiles` k tiles of two row blocks (bulk, contiguous)
 * and the activations as boxes of 64 k x N tokens (swizzled tensor map, zeros beyond both ends). The first stages'
 * weights are asked for before the previous kernel ends.
 *
 * Shared: [stages][boxes of activations][weights of two row blocks], [16 tokens][132] f32 to join the halves, barriers.
 * In a cluster the stages become [tokens][132] f32 at the end.
 *
 * Floor: bytes of the packed matrix at 4.65 TB/s; for 64 tokens mma.sync's 19.8 weights/clk/SM (INT4: 57 % of that).
 */
#include "kernels/cuda/matmul.cuh"
#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/weights.cuh"

enum {
    ROWS = 2 * DN_TILE_ROWS, /* of a unit */
    WARPS = 8,
    JOIN_TOKENS = 16,
    JOIN_STRIDE = ROWS + 4, /* lanes of a fragment fall into different banks */
    BLOCKS_PER_SM = 2,
    MAX_TOKENS = 64,
};

struct args {
    CUtensorMap x; /* k, token, group */
    struct dn_weights w;
    const float *bias;
    void *out;
    uint32_t token0, n_tokens;
    uint32_t n_tiles, n_runs; /* row tiles of all groups; blocks a cluster */
    uint32_t group_tiles, group_blocks, group_rows;
    uint64_t out_stride, out_group_stride; /* in values */
    bool out_f32, wide;                    /* wide: four values may be stored at once */
};

/* What a kernel's shared memory holds, for N tokens. */
template <int format, bool symmetric, int N> struct plan {
    static constexpr int tiles = format == DN_W_INT4 && N < 64 ? 2 : 1; /* k tiles a stage */
    /* With many tokens the sums need the registers that a ninth warp would take. */
    static constexpr bool has_copier = N < 32;
    static constexpr int threads = 32 * (WARPS + has_copier);
    static constexpr uint32_t tile_bytes = dn_tile_bytes(format, symmetric);
    static constexpr uint32_t box_bytes = N * 128;
    static constexpr uint32_t x_bytes = tiles * 2 * box_bytes;
    static constexpr uint32_t stage_bytes = (x_bytes + tiles * 2 * tile_bytes + 1023) / 1024 * 1024;
    static constexpr int stages = 104 * 1024 / stage_bytes < 6 ? 104 * 1024 / stage_bytes : 6;
    static constexpr uint32_t join_bytes = (N < JOIN_TOKENS ? N : JOIN_TOKENS) * JOIN_STRIDE * 4;
    static constexpr uint32_t bytes = 1024 + stages * stage_bytes + join_bytes + 2 * stages * 8;
};

static __device__ __forceinline__ uint32_t first_block(const struct args &a, uint32_t tile) /* of 64 rows */
{
    return tile / a.group_tiles * a.group_blocks + tile % a.group_tiles * 2;
}
static __device__ __forceinline__ bool has_second_block(const struct args &a, uint32_t tile)
{
    return tile % a.group_tiles * 2 + 1 < a.group_blocks;
}

static __device__ __forceinline__ void join_barrier() /* the computing warps */
{
    asm volatile("bar.sync 1, %0;" ::"n"(32 * WARPS) : "memory");
}

/* What a block works on: k tiles [begin, end) of row tiles first, first + step, ... */
struct share {
    uint32_t begin, end, first, step;
};
static __device__ __forceinline__ struct share share_of(const struct args &a)
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

static __device__ __forceinline__ void copier_tile(struct copier &c, const struct args &a)
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

/* sum[strip][8 tokens] += 16 rows x 64 k of two strips times the tokens of a box. */
template <int format, bool symmetric, int N>
static __device__ __forceinline__ void multiply(float (&sum)[2][N / 8][4], const uint8_t *tile, uint32_t box, int strip,
                                                int half, int lane, bool scale_is_bf16)
{
    struct dn_a_raw<format> raw[2];
    uint2 scales[2], offsets[2];
    float2 fp8[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
        if (format == DN_W_INT4 || format == DN_W_INT8)
            scales[j] = dn_a_scales<format>(tile, false, strip + j, half, lane);
        if (format == DN_W_INT4 && !symmetric)
            offsets[j] = dn_a_scales<format>(tile, true, strip + j, half, lane);
        if (format == DN_W_FP8)
            fp8[j] = dn_a_fp8_scale(tile, strip + j, lane);
    }
#pragma unroll
    for (int q = 0; q < 2; q++) {
        uint32_t a[2][2][4];
        float2 scale[2], offset[2];
#pragma unroll
        for (int j = 0; j < 2; j++) {
            dn_a_load_part<format>(raw[j], tile, strip + j, half, q, lane);
            dn_a_fragment<format, symmetric>(raw[j], 2 * q, a[j][0]);
            dn_a_fragment<format, symmetric>(raw[j], 2 * q + 1, a[j][1]);
            scale[j] = format == DN_W_FP8 ? fp8[j] : dn_scale_pair(q ? scales[j].y : scales[j].x, scale_is_bf16);
            offset[j] = dn_scale_pair(q ? offsets[j].y : offsets[j].x, scale_is_bf16);
        }
        constexpr int together = N < 16 ? 1 : 2; /* columns of 8 tokens: four chains of products */
#pragma unroll
        for (int n = 0; n < N / 8; n += together) {
            uint32_t b[together][4];
            float c[together][2][4], ones[together][4];
#pragma unroll
            for (int m = 0; m < together; m++)
                dn_ldmatrix(b[m], box + (n + m) * 1024 + lane % 8 * 128 + (((q * 4 + lane / 8) ^ (lane % 8)) << 4));
#pragma unroll
            for (int m = 0; m < together; m++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    if (format == DN_W_BF16)
                        dn_mma(sum[j][n + m], a[j][0], b[m][0], b[m][1]);
                    else
                        dn_mma_first(c[m][j], a[j][0], b[m][0], b[m][1]);
#pragma unroll
            for (int m = 0; m < together; m++)
#pragma unroll
                for (int j = 0; j < 2; j++)
                    dn_mma(format == DN_W_BF16 ? sum[j][n + m] : c[m][j], a[j][1], b[m][2], b[m][3]);
            if (format == DN_W_INT4 && !symmetric) {
                const uint32_t one[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
#pragma unroll
                for (int m = 0; m < together; m++) {
                    dn_mma_first(ones[m], one, b[m][0], b[m][1]);
                    dn_mma(ones[m], one, b[m][2], b[m][3]);
                }
            }
            constexpr int scaled = format == DN_W_BF16 ? 0 : together;
#pragma unroll
            for (int m = 0; m < scaled; m++)
#pragma unroll
                for (int j = 0; j < 2; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float &s = sum[j][n + m][i];
                        s = fmaf(c[m][j][i], i < 2 ? scale[j].x : scale[j].y, s);
                        if (format == DN_W_INT4 && !symmetric)
                            s = fmaf(ones[m][i], i < 2 ? offset[j].x : offset[j].y, s);
                    }
        }
    }
}

/* Four rows of a token to `out`, with the bias. */
static __device__ __forceinline__ void store(const struct args &a, uint32_t tile, uint32_t token, uint32_t r, float4 v)
{
    uint32_t group = tile / a.group_tiles, row = tile % a.group_tiles * ROWS + r;
    if (a.token0 + token >= a.n_tokens || row >= a.group_rows)
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

/* Joins the halves' sums of tokens [t0, t0 + tokens) into join[token][row]. */
template <int N, int tokens>
static __device__ __forceinline__ void join_halves(float (&sum)[2][N / 8][4], int t0, float *join, int warp, int lane)
{
    for (int half = 1; half >= 0; half--) {
        if (warp / 4 == half)
#pragma unroll
            for (int n = 0; n < N / 8; n++)
                if (n * 8 >= t0 && n * 8 < t0 + tokens)
#pragma unroll
                    for (int i = 0; i < 8; i++) {
                        float *at = join + (n * 8 - t0 + lane % 4 * 2 + i % 2) * JOIN_STRIDE + warp % 4 * 32 +
                                    i / 2 * 8 + lane / 4;
                        *at = half ? sum[i / 4][n][i % 4] : sum[i / 4][n][i % 4] + *at;
                    }
        join_barrier();
    }
}

/* A block that has all of K. */
template <int N>
static __device__ void finish_alone(const struct args &a, uint32_t tile, float (&sum)[2][N / 8][4], float *join,
                                    int warp, int lane)
{
    constexpr int tokens = N < JOIN_TOKENS ? N : JOIN_TOKENS;
    for (int t0 = 0; t0 < N; t0 += tokens) {
        join_halves<N, tokens>(sum, t0, join, warp, lane);
        for (uint32_t i = warp * 32 + lane; i < tokens * (ROWS / 4); i += 32 * WARPS) {
            uint32_t token = i / (ROWS / 4), r = i % (ROWS / 4) * 4;
            store(a, tile, t0 + token, r, *(const float4 *)(join + token * JOIN_STRIDE + r));
        }
        join_barrier();
    }
}

/* Of all threads of all blocks of the cluster; releases and acquires. */
static __device__ __forceinline__ void cluster_barrier()
{
#if __CUDA_ARCH__ >= 900
    __syncwarp();
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#endif
}
/* From another block of the cluster: this block's address there. */
static __device__ __forceinline__ float4 load_from(uint32_t rank, const float *p)
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

/* A block of a cluster: each sums its share of the outputs over all. `join` has room for all tokens. */
template <int N>
static __device__ void finish_cluster(const struct args &a, uint32_t tile, float (&sum)[2][N / 8][4], float *join,
                                      int warp, int lane)
{
    join_barrier(); /* nobody reads the stages any more */
    join_halves<N, N>(sum, 0, join, warp, lane);
    cluster_barrier();
    const uint32_t share = N * (ROWS / 4) / a.n_runs, first = blockIdx.x % a.n_runs * share;
    for (uint32_t i = first + warp * 32 + lane; i < first + share; i += 32 * WARPS) {
        const uint32_t token = i / (ROWS / 4), r = i % (ROWS / 4) * 4;
        const float *at = join + token * JOIN_STRIDE + r;
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
static __global__ void __launch_bounds__(plan<format, symmetric, N>::threads, BLOCKS_PER_SM)
    few(const __grid_constant__ struct args a)
{
#if __CUDA_ARCH__ >= 900
    using P = plan<format, symmetric, N>;
    extern __shared__ uint8_t raw_shared[];
    uint8_t *stages = raw_shared + (1024 - dn_shared(raw_shared) % 1024) % 1024;
    float *join = (float *)(stages + P::stages * P::stage_bytes);
    uint64_t *full = (uint64_t *)((uint8_t *)join + P::join_bytes), *empty = full + P::stages;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const bool copies = threadIdx.x == (P::has_copier ? 32 * WARPS : 0);
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
    if (P::has_copier && warp == WARPS) {
        while (copies && copy_next<format, symmetric, N>(copier, a, stages, full, empty))
            ;
        if (a.n_runs > 1) { /* finish_cluster()'s */
            cluster_barrier();
            cluster_barrier();
        }
        return;
    }
    if (!P::has_copier && copies)
        for (int s = 0; s < P::stages; s++)
            copy_next<format, symmetric, N>(copier, a, stages, full, empty);
    __syncwarp();
    const int pair = warp % 4, half = warp / 4;
    const struct share share = share_of(a);
    uint32_t s = 0, phase = 0;
    bool refill = false;
    for (uint32_t row_tile = share.first; row_tile < a.n_tiles; row_tile += share.step) {
        float sum[2][N / 8][4] = {};
        const bool has_rows = pair < 2 || has_second_block(a, row_tile);
        for (uint32_t k = share.begin; k < share.end; k += P::tiles) {
            if (!P::has_copier && copies && refill)
                copy_next<format, symmetric, N>(copier, a, stages, full, empty); /* into the stage of the last turn */
            refill = true;
            __syncwarp();
            const uint8_t *stage = stages + s * P::stage_bytes;
            dn_barrier_wait(full + s, phase);
            if (has_rows) {
                const uint8_t *tile = stage + P::x_bytes + pair / 2 * (P::tiles * P::tile_bytes);
                uint32_t box = dn_shared(stage) + half * P::box_bytes;
                multiply<format, symmetric, N>(sum, tile, box, pair % 2 * 2, half, lane, a.w.scale_is_bf16);
                if (P::tiles > 1 && k + 1 < share.end)
                    multiply<format, symmetric, N>(sum, tile + P::tile_bytes, box + 2 * P::box_bytes, pair % 2 * 2,
                                                   half, lane, a.w.scale_is_bf16);
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
            finish_cluster<N>(a, row_tile, sum, (float *)stages, warp, lane);
        else
            finish_alone<N>(a, row_tile, sum, join, warp, lane);
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
        launch_cluster(c, few<format, symmetric, N>, grid, P::threads, P::bytes, a);
    else
        dn_launch(c, "matmul", few<format, symmetric, N>, dim3(grid), dim3(P::threads), P::bytes, a);
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

/* Blocks a row tile: as many as are sure to run at once, two an SM, with a little left for how clusters fit. */
static uint32_t runs_of(const struct dn_cuda *c, uint32_t row_tiles, uint32_t k_tiles)
{
    const uint32_t slots = BLOCKS_PER_SM * c->n_sms;
    for (uint32_t n = 8; n > 1; n /= 2)
        if (row_tiles * n <= (n == 8 ? slots * 6 / 7 : slots * 31 / 32) && k_tiles >= 2 * n)
            return n;
    return 1;
}

/* Tokens [token0, token0 + box) of n. */
static void launch_box(struct dn_cuda *c, const struct dn_cuda_few *f, uint32_t n, uint32_t token0, uint32_t box)
{
    struct args a = {};
    a.w = dn_weights_of(f->w);
    a.group_rows = f->w->n_out;
    a.group_blocks = (f->w->n_out + DN_TILE_ROWS - 1) / DN_TILE_ROWS;
    a.group_tiles = (a.group_blocks + 1) / 2;
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
