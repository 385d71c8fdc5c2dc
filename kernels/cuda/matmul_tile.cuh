/* A unit of a matrix product: 128 rows x 128 k of packed weights times N tokens, both in shared memory.
 *
 * Up to 16 tokens, and for affine INT4 (whose sums of activations need registers): mma.sync m16n8k16, a warp 16 rows.
 * From 32 tokens, where a GPU has it: wgmma m64nNk16, weights in registers. BF16: a warpgroup 64 rows, a warp a strip
 * of 16. Codes: a warpgroup both blocks of 64 rows in turns, so that one's products run while the other's last ones are
 * scaled and its next ones converted. Either way what has one scale (32 k, FP8 128) is a product of its own, scaled
 * into the sum; BF16 adds up in the tensor core. On an H200 all give the same bits (test_matmul.c compares them for
 * every format and number of tokens).
 *
 * Measured, 163840 x 7168 FP8, 64 tokens: mma.sync 775 us; wgmma with all of a warpgroup's rows at once, a product for
 * every 32 k: 545; one for 128 k, in turns: README.md. At 8 tokens mma.sync is 10-20 % faster in INT4 and up to 15 % in
 * FP8.
 *
 * For: matmul.cu. No state; all computing threads of a block.
 */
#ifndef DN_KERNELS_CUDA_MATMUL_TILE_CUH
#define DN_KERNELS_CUDA_MATMUL_TILE_CUH

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/weights.cuh"

enum {
    ROWS = 2 * DN_TILE_ROWS, /* of a unit */
    SUM_TOKENS = 16,
    SUM_STRIDE = ROWS + 4, /* lanes of a fragment fall into different banks */
    BLOCKS_PER_SM = 2,
    MAX_TOKENS = 64,
};

/* wgmma where a GPU has it and the weights are no affine INT4, whose sums of activations would need more registers. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

/* A kernel: weights, tokens, and whether a computing warp takes two strips in turns (multiply_turns()), which needs
 * wgmma; else it takes them one after the other. scale_is_bf16: of INT4 and INT8. */
template <int format_, bool symmetric_, bool scale_is_bf16_, int tokens, bool turns_> struct plan {
    static constexpr int format = format_, N = tokens;
    static constexpr bool symmetric = symmetric_, scale_is_bf16 = scale_is_bf16_, turns = turns_;
    static constexpr bool in_groups = format == DN_W_INT4 || format == DN_W_INT8;
    static constexpr bool affine = format == DN_W_INT4 && !symmetric;
    static constexpr bool wide = HAS_WGMMA && format == DN_W_BF16 && N >= 32;
    static constexpr int warps = turns ? 4 : 8;                    /* computing ones */
    static constexpr int threads = 32 * (warps + (turns ? 4 : 2)); /* two copy; a warpgroup can give registers away */
    static constexpr int tiles = format == DN_W_INT4 && N < 32 ? 2 : 1; /* k tiles a stage */
    /* Of a computing warp: strips of 16 rows and columns of 8 tokens. mma.sync, 64 tokens: two warps convert the same
     * weights, which is less than reading all tokens for one strip. */
    static constexpr int strips = turns || (N == 64 && !wide) ? 2 : 1, columns = N == 64 && !wide && !turns ? 4 : N / 8;
    static constexpr int strip_rows = turns ? DN_TILE_ROWS : 16; /* from a warp's first strip to its second */
    static constexpr uint32_t tile_bytes = dn_tile_bytes(format, symmetric);
    static constexpr uint32_t box_bytes = N * 128;
    static constexpr uint32_t x_bytes = tiles * 2 * box_bytes;
    static constexpr uint32_t stage_bytes = (x_bytes + tiles * 2 * tile_bytes + 1023) / 1024 * 1024;
    static constexpr int stages = 102 * 1024 / stage_bytes < 6 ? 102 * 1024 / stage_bytes : 6;
    static constexpr uint32_t sum_bytes = (N < SUM_TOKENS ? N : SUM_TOKENS) * SUM_STRIDE * 4;
    static constexpr uint32_t bytes = 1024 + stages * stage_bytes + sum_bytes + 2 * stages * 8;
    static_assert(bytes <= 113 * 1024, "two blocks an SM");
    static constexpr float unscale = format == DN_W_INT4 ? 64 : 1; /* of sums, in the end */
};

template <typename P>
static __device__ __forceinline__ void fragment(const struct dn_a_raw<P::format> &raw, int step, uint32_t a[4])
{
    if constexpr (P::format == DN_W_INT4)
        dn_int4_fragment_64th<P::symmetric>((&raw.v[0].x)[step], a);
    else
        dn_a_fragment<P::format, P::symmetric>(raw, step, a);
}

/* sum[column] += 16 rows x 128 k times up to 16 tokens: all is loaded first, for which more tokens lack registers. */
template <typename P>
static __device__ __forceinline__ void multiply_few(float (&sum)[P::columns][4], const uint8_t *tile, uint32_t box,
                                                    int strip, int lane)
{
    struct dn_a_raw<P::format> raw[2];
    uint2 scales[2] = {};
    float2 scale = {};
    uint32_t b[4][P::columns][4];
    float c[P::columns][4];
#pragma unroll
    for (int h = 0; h < 2; h++) {
        dn_a_load<P::format>(raw[h], tile, strip, h, lane);
        if (P::in_groups)
            scales[h] = dn_a_scales<P::format>(tile, false, strip, h, lane);
    }
#pragma unroll
    for (int q = 0; q < 4; q++)
#pragma unroll
        for (int n = 0; n < P::columns; n++)
            dn_ldmatrix(b[q][n], box + q / 2 * P::box_bytes + n * 1024 + lane % 8 * 128 +
                                     (((q % 2 * 4 + lane / 8) ^ (lane % 8)) << 4));
    if (P::format == DN_W_FP8)
        scale = dn_a_fp8_scale(tile, strip, lane);
#pragma unroll
    for (int q = 0; q < 4; q++) {
        uint32_t a[2][4];
        fragment<P>(raw[q / 2], q % 2 * 2, a[0]);
        fragment<P>(raw[q / 2], q % 2 * 2 + 1, a[1]);
        if (P::in_groups)
            scale = dn_scale_pair(q % 2 ? scales[q / 2].y : scales[q / 2].x, P::scale_is_bf16);
#pragma unroll
        for (int n = 0; n < P::columns; n++)
            if (P::in_groups || q == 0)
                dn_mma_first(c[n], a[0], b[q][n][0], b[q][n][1]);
            else
                dn_mma(c[n], a[0], b[q][n][0], b[q][n][1]);
#pragma unroll
        for (int n = 0; n < P::columns; n++)
            dn_mma(c[n], a[1], b[q][n][2], b[q][n][3]);
        if (P::in_groups || q == 3)
#pragma unroll
            for (int i = 0; i < 4 * P::columns; i++)
                sum[i / 4][i % 4] = fmaf(c[i / 4][i % 4], i % 4 < 2 ? scale.x : scale.y, sum[i / 4][i % 4]);
    }
}

/* sum[strip][column] += 16 rows x 128 k of some strips times columns of 8 tokens; `box`: the first column's first 64 k.
 */
template <typename P>
static __device__ __forceinline__ void multiply(float (&sum)[P::strips][P::columns][4], const uint8_t *tile,
                                                uint32_t box, int strip, int lane)
{
    struct dn_a_raw<P::format> raw[P::strips];
    uint2 scales[P::strips], offsets[P::strips];
    float2 fp8[P::strips];
    float c[P::columns][P::strips][4];
    if (P::format == DN_W_FP8)
#pragma unroll
        for (int j = 0; j < P::strips; j++)
            fp8[j] = dn_a_fp8_scale(tile, strip + j, lane);
#pragma unroll
    for (int q = 0; q < 4; q++) { /* 32 k */
        uint32_t a[P::strips][2][4];
        float2 scale[P::strips], offset[P::strips];
#pragma unroll
        for (int j = 0; j < P::strips; j++) {
            if (P::in_groups && q % 2 == 0)
                scales[j] = dn_a_scales<P::format>(tile, false, strip + j, q / 2, lane);
            if (P::affine && q % 2 == 0)
                offsets[j] = dn_a_scales<P::format>(tile, true, strip + j, q / 2, lane);
            dn_a_load_part<P::format>(raw[j], tile, strip + j, q / 2, q % 2, lane);
            fragment<P>(raw[j], q % 2 * 2, a[j][0]);
            fragment<P>(raw[j], q % 2 * 2 + 1, a[j][1]);
            if (P::in_groups)
                scale[j] = dn_scale_pair(q % 2 ? scales[j].y : scales[j].x, P::scale_is_bf16);
            else if (P::format == DN_W_FP8)
                scale[j] = fp8[j];
            if (P::affine)
                offset[j] = dn_scale_pair(q % 2 ? offsets[j].y : offsets[j].x, P::scale_is_bf16);
        }
        const uint32_t at = box + q / 2 * P::box_bytes + lane % 8 * 128 + (((q % 2 * 4 + lane / 8) ^ (lane % 8)) << 4);
        constexpr int together = P::columns < 2 ? 1 : 2; /* columns at once: more chains of products */
        const bool first = P::in_groups || q == 0, last = P::format != DN_W_BF16 && (P::in_groups || q == 3);
#pragma unroll
        for (int n = 0; n < P::columns; n += together) {
            uint32_t b[together][4];
            float ones[together][4];
#pragma unroll
            for (int m = 0; m < together; m++)
                dn_ldmatrix(b[m], at + (n + m) * 1024);
#pragma unroll
            for (int step = 0; step < 2; step++)
#pragma unroll
                for (int m = 0; m < together; m++) {
#pragma unroll
                    for (int j = 0; j < P::strips; j++)
                        if (P::format == DN_W_BF16)
                            dn_mma(sum[j][n + m], a[j][step], b[m][2 * step], b[m][2 * step + 1]);
                        else if (step == 0 && first)
                            dn_mma_first(c[n + m][j], a[j][0], b[m][0], b[m][1]);
                        else
                            dn_mma(c[n + m][j], a[j][step], b[m][2 * step], b[m][2 * step + 1]);
                    const uint32_t one[4] = {0x3c803c80, 0x3c803c80, 0x3c803c80, 0x3c803c80}; /* 1/64 */
                    if (P::affine && step == 0)
                        dn_mma_first(ones[m], one, b[m][0], b[m][1]);
                    else if (P::affine)
                        dn_mma(ones[m], one, b[m][2], b[m][3]);
                }
#pragma unroll
            for (int m = 0; m < together; m++)
#pragma unroll
                for (int j = 0; j < P::strips; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float &s = sum[j][n + m][i];
                        if (last)
                            s = fmaf(c[n + m][j][i], i < 2 ? scale[j].x : scale[j].y, s);
                        if (P::affine)
                            s = fmaf(ones[m][i], i < 2 ? offset[j].x : offset[j].y, s);
                    }
        }
    }
}

#if HAS_WGMMA
#define ACC_8(r)                                                                                                       \
    "+f"(d[r][0]), "+f"(d[r][1]), "+f"(d[r][2]), "+f"(d[r][3]), "+f"(d[r + 1][0]), "+f"(d[r + 1][1]),                  \
        "+f"(d[r + 1][2]), "+f"(d[r + 1][3])
/* d (+)= 64 rows x 16 k (a: as for mma.sync, warp = strip) times N tokens from shared memory; asynchronous: d and a are
 * not to be touched before wgmma_wait(), and what is written to them before needs wgmma_fence(). */
template <int N, bool add>
static __device__ __forceinline__ void wgmma(float (&d)[N / 8][4], const uint32_t a[4], uint64_t b)
{
    if constexpr (N == 32)
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
                     "%10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
                     : ACC_8(0), ACC_8(2)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
    else
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %37, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
                     "%10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, "
                     "%29, %30, %31}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
                     : ACC_8(0), ACC_8(2), ACC_8(4), ACC_8(6)
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
}
static __device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending> static __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/* Where in shared memory a stage's activations lie, as operand() wants it: the same for all threads, and known to be
 * so, which leaves one instruction between two products where it would be several that wait for one another. */
static __device__ __forceinline__ uint32_t operand_base(uint32_t box)
{
    return __shfl_sync(~0u, (box & 0x3ffff) >> 4, 0);
}
/* All tokens' 16 k, step 0..7 of a stage: 128-byte swizzle, 1024 bytes from 8 tokens to the next. */
template <typename P> static __device__ __forceinline__ uint64_t operand(uint32_t base, int step)
{
    return (uint64_t)(base + (step / 4 * P::box_bytes + step % 4 * 32) / 16) | (uint64_t)(1024 >> 4) << 32 |
           (uint64_t)1 << 62;
}

/* BF16: sum[column] += 64 rows x 128 k, a strip a warp, times all tokens. */
template <typename P>
static __device__ __forceinline__ void multiply_wide(float (&sum)[1][P::N / 8][4], const uint8_t *tile, uint32_t box,
                                                     int strip, int lane)
{
    struct dn_a_raw<P::format> raw;
    uint32_t a[4][2][4];
    auto load = [&](int q) {
        dn_a_load_part<P::format>(raw, tile, strip, q / 2, q % 2, lane);
        fragment<P>(raw, q % 2 * 2, a[q][0]);
        fragment<P>(raw, q % 2 * 2 + 1, a[q][1]);
    };
    const uint32_t base = operand_base(box);
    load(0);
#pragma unroll
    for (int q = 0; q < 4; q++) { /* 32 k */
        wgmma_fence();
        wgmma<P::N, true>(sum[0], a[q][0], operand<P>(base, 2 * q));
        wgmma<P::N, true>(sum[0], a[q][1], operand<P>(base, 2 * q + 1));
        wgmma_commit();
        if (q < 3)
            load(q + 1);
        if (q == 1 || q == 2)
            wgmma_wait<1>(); /* a[q - 1] is free */
    }
    wgmma_wait<0>();
}

/* ---- The same for two strips, one in each of two blocks of rows, in turns: while one's products are under way, the
 * other's last ones are scaled and its next ones converted. ---- */

/* A strip's groups of 32 k that are added up at once: FP8 all four of a tile, else one. */
template <typename P> struct turn {
    static constexpr int sets = P::in_groups ? 4 : 1, of_set = 4 / sets;
    struct dn_a_raw<P::format> raw;
    uint2 scales[2];
    float2 scale;
    uint32_t a[of_set][2][4];
    float c[P::N / 8][4];
};
template <typename P>
static __device__ __forceinline__ void turn_convert(struct turn<P> &t, const uint8_t *tile, int set, int strip,
                                                    int lane)
{
    if (set == 0 && P::in_groups) {
        t.scales[0] = dn_a_scales<P::format>(tile, false, strip, 0, lane);
        t.scales[1] = dn_a_scales<P::format>(tile, false, strip, 1, lane);
    }
#pragma unroll
    for (int i = 0; i < t.of_set; i++) {
        const int q = set * t.of_set + i;
        dn_a_load_part<P::format>(t.raw, tile, strip, q / 2, q % 2, lane);
        fragment<P>(t.raw, q % 2 * 2, t.a[i][0]);
        fragment<P>(t.raw, q % 2 * 2 + 1, t.a[i][1]);
    }
    t.scale = P::format == DN_W_FP8
                  ? dn_a_fp8_scale(tile, strip, lane)
                  : dn_scale_pair(set % 2 ? t.scales[set / 2].y : t.scales[set / 2].x, P::scale_is_bf16);
}
template <typename P> static __device__ __forceinline__ void turn_multiply(struct turn<P> &t, uint32_t base, int set)
{
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < t.of_set; i++) {
        const int q = set * t.of_set + i;
        if (i == 0)
            wgmma<P::N, false>(t.c, t.a[i][0], operand<P>(base, 2 * q));
        else
            wgmma<P::N, true>(t.c, t.a[i][0], operand<P>(base, 2 * q));
        wgmma<P::N, true>(t.c, t.a[i][1], operand<P>(base, 2 * q + 1));
    }
    wgmma_commit();
}
template <typename P>
static __device__ __forceinline__ void turn_add(float (&sum)[P::N / 8][4], const struct turn<P> &t, float2 scale)
{
#pragma unroll
    for (int i = 0; i < P::N / 2; i++)
        sum[i / 4][i % 4] = fmaf(t.c[i / 4][i % 4], i % 4 < 2 ? scale.x : scale.y, sum[i / 4][i % 4]);
}
/* n stages, from the first; bit i of parity: of the next phase that stage i's barrier `full` ends. The second strip
 * lies in the second row block, which may not exist: then its sums are of garbage and nobody writes them. */
template <typename P>
static __device__ __forceinline__ void multiply_turns(float (&sum)[2][P::N / 8][4], uint8_t *stages, uint64_t *full,
                                                      uint64_t *empty, uint32_t &parity, uint32_t n, int strip,
                                                      int lane)
{
    const uint8_t *tiles = stages + P::x_bytes;
    struct turn<P> t[2];
    dn_barrier_wait(full, parity & 1);
    turn_convert<P>(t[0], tiles, 0, strip, lane);
#pragma unroll 1
    for (uint32_t s = 0, next; n > 0; n--, s = next) {
        const uint8_t *tile = tiles + s * P::stage_bytes;
        const uint32_t base = (dn_shared(stages + s * P::stage_bytes) & 0x3ffff) >> 4;
        next = n == 1 ? s : s + 1 == P::stages ? 0 : s + 1; /* the last time once more the same, for nothing */
        const uint32_t next_parity = parity >> next & 1;
#pragma unroll
        for (int set = 0; set < t[0].sets; set++) {
            float2 scale = t[0].scale;
            turn_multiply<P>(t[0], base, set);
            if (set > 0) {
                wgmma_wait<1>();
                turn_add<P>(sum[1], t[1], t[1].scale);
            }
            turn_convert<P>(t[1], tile + P::tile_bytes, set, strip, lane);
            turn_multiply<P>(t[1], base, set);
            wgmma_wait<1>();
            turn_add<P>(sum[0], t[0], scale);
            if (set + 1 == t[0].sets)
                dn_barrier_wait(full + next, next_parity);
            turn_convert<P>(t[0], set + 1 < t[0].sets ? tile : tiles + next * P::stage_bytes, (set + 1) % t[0].sets,
                            strip, lane);
        }
        wgmma_wait<0>();
        turn_add<P>(sum[1], t[1], t[1].scale);
        __syncwarp();
        if (lane == 0)
            dn_barrier_arrive(empty + s);
        parity ^= 1u << s;
    }
}
#endif

template <typename P, typename Sums>
static __device__ __forceinline__ void multiply_unit(Sums &sum, const uint8_t *tile, uint32_t box, int strip, int lane)
{
#if HAS_WGMMA
    if constexpr (P::wide) {
        multiply_wide<P>(sum, tile, box, strip, lane);
        return;
    }
#endif
    if constexpr (P::N <= 16 && P::format != DN_W_BF16 && !P::affine)
        multiply_few<P>(sum[0], tile, box, strip, lane);
    else if constexpr (!P::wide)
        multiply<P>(sum, tile, box, strip, lane);
}

#endif
