/* A unit of a matrix product: 128 rows x 128 k of packed weights times N tokens, both in shared memory.
 *
 * Up to 16 tokens, and for affine INT4 (whose sums of activations need registers): mma.sync m16n8k16, a warp 16 rows.
 * From 32 tokens, where a GPU has it: wgmma m64n32k16, weights in registers, a warpgroup 64 rows, a warp a strip of 16.
 * Either way every 32 k in codes are a product of their own, scaled into the sum; BF16 adds up in the tensor core. On
 * an H200 both give the same bits (test_matmul.c compares them for every format and number of tokens).
 *
 * Measured, 163840 x 7168 FP8, 64 tokens: mma.sync 775 us (0.53 instructions a clock and scheduler: LDSM, two chained
 * products and the scaling follow one another whatever the order in the source), wgmma 518-568. At 8 tokens mma.sync
 * is 10-20 % faster in INT4 and up to 15 % in FP8.
 *
 * For: matmul.cu. No state; all computing threads of a block.
 */
#ifndef DN_KERNELS_CUDA_MATMUL_TILE_CUH
#define DN_KERNELS_CUDA_MATMUL_TILE_CUH

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/weights.cuh"

enum {
    ROWS = 2 * DN_TILE_ROWS, /* of a unit */
    WARPS = 8,
    THREADS = 32 * (WARPS + 1),
    SUM_TOKENS = 16,
    SUM_STRIDE = ROWS + 4, /* lanes of a fragment fall into different banks */
    BLOCKS_PER_SM = 2,
    MAX_TOKENS = 64,
};

/* What a kernel's shared memory holds, for N tokens. */
/* wgmma where a GPU has it and the weights are no affine INT4, whose sums of activations would need more registers. */
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define HAS_WGMMA 1
#else
#define HAS_WGMMA 0
#endif

template <int format, bool symmetric, int N> struct plan {
    static constexpr bool wide = HAS_WGMMA && symmetric && N >= 32;
    static constexpr int tiles = format == DN_W_INT4 && N < 32 ? 2 : 1; /* k tiles a stage */
    /* Of a computing warp: strips of 16 rows and columns of 8 tokens. 64 tokens: two warps convert the same weights,
     * which is less than reading all tokens for one strip. */
    static constexpr int strips = wide || N < 64 ? 1 : 2, columns = wide || N < 64 ? N / 8 : 4;
    static constexpr uint32_t tile_bytes = dn_tile_bytes(format, symmetric);
    static constexpr uint32_t box_bytes = N * 128;
    static constexpr uint32_t x_bytes = tiles * 2 * box_bytes;
    static constexpr uint32_t stage_bytes = (x_bytes + tiles * 2 * tile_bytes + 1023) / 1024 * 1024;
    static constexpr uint32_t budget = (N == 16 && format == DN_W_INT4 ? 70 : 104) * 1024;
    static constexpr int stages = budget / stage_bytes < 6 ? budget / stage_bytes : 6;
    static constexpr uint32_t sum_bytes = (N < SUM_TOKENS ? N : SUM_TOKENS) * SUM_STRIDE * 4;
    static constexpr uint32_t bytes = 1024 + stages * stage_bytes + sum_bytes + 2 * stages * 8;
};

/* sum[strip][column] += 16 rows x 128 k of some strips times columns of 8 tokens; `box`: the first column's first 64 k.
 */
template <int format, bool symmetric, int N>
static __device__ __forceinline__ void
multiply(float (&sum)[plan<format, symmetric, N>::strips][plan<format, symmetric, N>::columns][4], const uint8_t *tile,
         uint32_t box, int strip, int lane, bool scale_is_bf16)
{
    using P = plan<format, symmetric, N>;
    constexpr bool in_groups = format == DN_W_INT4 || format == DN_W_INT8, affine = format == DN_W_INT4 && !symmetric;
    struct dn_a_raw<format> raw[P::strips];
    uint2 scales[P::strips], offsets[P::strips];
    float2 fp8[P::strips];
    if (format == DN_W_FP8)
#pragma unroll
        for (int j = 0; j < P::strips; j++)
            fp8[j] = dn_a_fp8_scale(tile, strip + j, lane);
#pragma unroll
    for (int q = 0; q < 4; q++) { /* 32 k */
        uint32_t a[P::strips][2][4];
        float2 scale[P::strips], offset[P::strips];
#pragma unroll
        for (int j = 0; j < P::strips; j++) {
            if (in_groups && q % 2 == 0)
                scales[j] = dn_a_scales<format>(tile, false, strip + j, q / 2, lane);
            if (affine && q % 2 == 0)
                offsets[j] = dn_a_scales<format>(tile, true, strip + j, q / 2, lane);
            dn_a_load_part<format>(raw[j], tile, strip + j, q / 2, q % 2, lane);
            dn_a_fragment<format, symmetric>(raw[j], q % 2 * 2, a[j][0]);
            dn_a_fragment<format, symmetric>(raw[j], q % 2 * 2 + 1, a[j][1]);
            if (in_groups)
                scale[j] = dn_scale_pair(q % 2 ? scales[j].y : scales[j].x, scale_is_bf16);
            else if (format == DN_W_FP8)
                scale[j] = fp8[j];
            if (affine)
                offset[j] = dn_scale_pair(q % 2 ? offsets[j].y : offsets[j].x, scale_is_bf16);
        }
        const uint32_t at = box + q / 2 * P::box_bytes + lane % 8 * 128 + (((q % 2 * 4 + lane / 8) ^ (lane % 8)) << 4);
        constexpr int together = P::columns < 2 ? 1 : 2; /* columns at once: more chains of products */
#pragma unroll
        for (int n = 0; n < P::columns; n += together) {
            uint32_t b[together][4];
            float c[together][P::strips][4], ones[together][4];
#pragma unroll
            for (int m = 0; m < together; m++)
                dn_ldmatrix(b[m], at + (n + m) * 1024);
#pragma unroll
            for (int step = 0; step < 2; step++)
#pragma unroll
                for (int m = 0; m < together; m++) {
#pragma unroll
                    for (int j = 0; j < P::strips; j++)
                        if (format == DN_W_BF16)
                            dn_mma(sum[j][n + m], a[j][step], b[m][2 * step], b[m][2 * step + 1]);
                        else if (step == 0)
                            dn_mma_first(c[m][j], a[j][0], b[m][0], b[m][1]);
                        else
                            dn_mma(c[m][j], a[j][1], b[m][2], b[m][3]);
                    const uint32_t one[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
                    if (affine && step == 0)
                        dn_mma_first(ones[m], one, b[m][0], b[m][1]);
                    else if (affine)
                        dn_mma(ones[m], one, b[m][2], b[m][3]);
                }
            constexpr int scaled = format == DN_W_BF16 ? 0 : together;
#pragma unroll
            for (int m = 0; m < scaled; m++)
#pragma unroll
                for (int j = 0; j < P::strips; j++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        float &s = sum[j][n + m][i];
                        s = fmaf(c[m][j][i], i < 2 ? scale[j].x : scale[j].y, s);
                        if (affine)
                            s = fmaf(ones[m][i], i < 2 ? offset[j].x : offset[j].y, s);
                    }
        }
    }
}

#if HAS_WGMMA
/* d (+)= 64 rows x 16 k (a: as for mma.sync, warp = strip) times n tokens from shared memory; asynchronous: d and a are
 * not to be touched before wgmma_wait(), and what is written to them before needs wgmma_fence(). */
template <int n, bool add> static __device__ __forceinline__ void wgmma(float (*d)[4], const uint32_t a[4], uint64_t b)
{
    if constexpr (n == 8) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %9, 0;\n"
            "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, p, 1, 1, 0; }"
            : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
    } else if constexpr (n == 16) {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %13, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, "
                     "%10, %11}, %12, p, 1, 1, 0; }"
                     : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
                       "+f"(d[1][2]), "+f"(d[1][3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
    } else {
        asm volatile("{ .reg .pred p; setp.ne.b32 p, %21, 0;\n"
                     "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, "
                     "%10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
                     : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]),
                       "+f"(d[1][2]), "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]),
                       "+f"(d[3][0]), "+f"(d[3][1]), "+f"(d[3][2]), "+f"(d[3][3])
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(add));
    }
}
static __device__ __forceinline__ void wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

/* sum[column] += 64 rows x 128 k, a strip a warp, times all tokens. */
template <int format, int N>
static __device__ __forceinline__ void multiply_wide(float (&sum)[1][N / 8][4], const uint8_t *tile, uint32_t box,
                                                     int strip, int lane, bool scale_is_bf16)
{
    constexpr bool in_groups = format == DN_W_INT4 || format == DN_W_INT8, adds = format == DN_W_BF16;
    constexpr int wide = N < 32 ? N : 32;                           /* tokens of an instruction */
    constexpr int together = adds || N <= 16 ? 4 : N == 32 ? 2 : 1; /* groups of 32 k at once, as registers allow */
    struct dn_a_raw<format> raw;
    uint2 scales[2] = {};
    float2 fp8 = {};
    float c[adds ? 1 : together][N / 8][4] = {};
    uint32_t a[4][2][4];
    auto convert = [&](int q0) {
#pragma unroll
        for (int q = q0; q < q0 + together; q++) {
            dn_a_load_part<format>(raw, tile, strip, q / 2, q % 2, lane);
            dn_a_fragment<format, true>(raw, q % 2 * 2, a[q][0]);
            dn_a_fragment<format, true>(raw, q % 2 * 2 + 1, a[q][1]);
        }
    };
    if (format == DN_W_FP8)
        fp8 = dn_a_fp8_scale(tile, strip, lane);
    if (in_groups) {
        scales[0] = dn_a_scales<format>(tile, false, strip, 0, lane);
        scales[1] = dn_a_scales<format>(tile, false, strip, 1, lane);
    }
    convert(0);
#pragma unroll
    for (int q0 = 0; q0 < 4; q0 += together) {
        wgmma_fence();
#pragma unroll
        for (int q = q0; q < q0 + together; q++) {
            /* 128-byte swizzle, 1024 bytes from 8 tokens to the next. */
            const uint32_t at = box + q / 2 * (N * 128) + q % 2 * 64;
            const uint64_t b = (uint64_t)((at & 0x3ffff) >> 4) | (uint64_t)(1024 >> 4) << 32 | (uint64_t)1 << 62;
#pragma unroll
            for (int n = 0; n < N; n += wide) {
                float(*d)[4] = (adds ? sum[0] : c[adds ? 0 : q - q0]) + n / 8;
                wgmma<wide, adds>(d, a[q][0], b + n * 128 / 16);
                wgmma<wide, true>(d, a[q][1], b + n * 128 / 16 + 2);
            }
        }
        wgmma_commit();
        if (q0 + together < 4)
            convert(q0 + together);
        wgmma_wait();
        constexpr int scaled = adds ? 0 : together;
#pragma unroll
        for (int g = 0; g < scaled; g++) {
            const int q = q0 + g;
            const float2 scale =
                format == DN_W_FP8 ? fp8 : dn_scale_pair(q % 2 ? scales[q / 2].y : scales[q / 2].x, scale_is_bf16);
#pragma unroll
            for (int i = 0; i < N / 2; i++)
                sum[0][i / 4][i % 4] = fmaf(c[g][i / 4][i % 4], i % 4 < 2 ? scale.x : scale.y, sum[0][i / 4][i % 4]);
        }
    }
}
#endif

template <int format, bool symmetric, int N, typename Sums>
static __device__ __forceinline__ void multiply_unit(Sums &sum, const uint8_t *tile, uint32_t box, int strip, int lane,
                                                     bool scale_is_bf16)
{
#if HAS_WGMMA
    if constexpr (plan<format, symmetric, N>::wide) {
        multiply_wide<format, N>(sum, tile, box, strip, lane, scale_is_bf16);
        return;
    }
#endif
    if constexpr (!plan<format, symmetric, N>::wide)
        multiply<format, symmetric, N>(sum, tile, box, strip, lane, scale_is_bf16);
}

#endif
