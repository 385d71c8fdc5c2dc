/* The value warps of MLA decode: O += P V, what becomes of an item. mla_decode.cu says how it fits together; nobody
 * else includes this.
 *
 * Warpgroups v = 0, 1 have 256 dimensions each, 128 accumulators a thread.
 * BF16: O[64 heads][256], both operands from shared memory; d[4 j + 2 i + e] of a thread is head 16 warp + lane / 4 + 8
 * i, dimension 256 v + 8 j + 2 (lane % 4) + e. FP8: O^T[256][64 heads], four m64n64. A comes from registers: an
 * ldmatrix.x4.trans is 32 tokens x 16 dimensions of codes, pairs of dimensions of two tokens in a register; PRMT makes
 * them pairs of tokens, cvt f16. Even dimensions are a fragment's rows 0-7, odd ones rows 8-15: d[32 m + 4 j + 2 i + e]
 * is dimension 256 v + 64 m + 16 warp + 2 (lane / 4) + i, head 8 j + 2 (lane % 4) + e.
 */
#ifndef DN_KERNELS_CUDA_MLA_DECODE_VALUES_CUH
#define DN_KERNELS_CUDA_MLA_DECODE_VALUES_CUH

#include "kernels/cuda/mla_decode_scores.cuh"

#if DN_HOPPER

/* A fragments of 32 tokens x 16 dimensions a warp: [step of 16 tokens][register]. */
static __device__ __forceinline__ void load_codes(uint32_t (&x)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"(at)
                 : "memory");
}
static __device__ __forceinline__ void codes_to_f16(uint32_t (&f)[2][4], const uint32_t (&x)[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) { /* (t d, t d+1, t+1 d, t+1 d+1) to (t d, t+1 d), (t d+1, t+1 d+1) */
        uint32_t pairs = __byte_perm(x[i], 0, 0x3120);
        asm volatile("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\n"
                     "cvt.rn.f16x2.e4m3x2 %1, b;\n}"
                     : "=r"(f[i / 2][i % 2 * 2]), "=r"(f[i / 2][i % 2 * 2 + 1])
                     : "r"(pairs));
    }
}

/* Unit u of 8: 64 dimensions and 32 tokens. The next one's fragments are made while the tensor pipe has this one's. */
template <int u>
static __device__ __forceinline__ void multiply_unit(float (&o)[128], uint32_t (&f)[2][2][4], uint32_t codes,
                                                     uint64_t p, bool first)
{
    uint32_t x[4];
    dn_wgmma_fence();
    dn_wgmma_n64_f16_rs<u / 2>(o, f[0][0], p + u % 2 * 4, 1);
    dn_wgmma_n64_f16_rs<u / 2>(o, f[0][1], p + u % 2 * 4 + 2, 1);
    dn_wgmma_commit();
    if constexpr (u < 7) {
        constexpr uint32_t m = (u + 1) / 2;
        load_codes(x, (m & 1 ? codes ^ 64 : codes) + m / 2 * DN_MLA_BLOCK + (u + 1) % 2 * 32 * 128);
        if (true)
            dn_wgmma_wait<0>();
        codes_to_f16(f[0], x);
        multiply_unit<u + 1>(o, f, codes, p, first);
    }
}

template <bool fp8>
static __device__ __forceinline__ void multiply_values(float (&o)[128], uint32_t stage, uint32_t p, uint32_t v,
                                                       uint32_t t, bool first)
{
    uint64_t pd = dn_wgmma_operand(p, 16, 1024);
    if constexpr (fp8) {
        uint32_t lane = t % 32, f[2][2][4], x[4];
        uint32_t codes = stage + v * 2 * DN_MLA_BLOCK + lane * 128 + ((t / 32 ^ (lane & 7)) << 4);
        load_codes(x, codes);
        codes_to_f16(f[0], x);
        multiply_unit<0>(o, f, codes, pd, first);
    } else {
        uint64_t vd = dn_wgmma_operand(stage + v * 4 * DN_MLA_BLOCK, DN_MLA_BLOCK, 1024);
        dn_wgmma_fence();
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            dn_wgmma_half_bf16<0>(o, pd + k * 2, vd + k * 128, 1);
            dn_wgmma_half_bf16<1>(o, pd + k * 2, vd + k * 128 + 2 * DN_MLA_BLOCK / 16, 1);
        }
        dn_wgmma_commit();
    }
    dn_wgmma_wait<0>();
}

/* Rows of a tile that a copy left as they were: zero, since 0 * NaN is NaN. Of this warpgroup's blocks. */
template <bool fp8>
static __device__ __forceinline__ void zero_rows(uint32_t stage, uint32_t tokens, uint32_t v, uint32_t t)
{
    constexpr uint32_t n = fp8 ? 2 : 4;
    for (uint32_t i = t; i < (DN_MLA_TOKENS - tokens) * n * 8; i += 128)
        store_shared(stage + (v * n + i % n) * DN_MLA_BLOCK + (tokens + i / (8 * n)) * 128 + i / n % 8 * 16,
                     make_uint4(0, 0, 0, 0));
    dn_fence_async(); /* products and the stage's next copy come after */
    dn_sync(BAR_VALUES + (int)v, 128);
}

template <bool fp8> static __device__ __forceinline__ void rescale(float (&o)[128], const float *alpha, uint32_t t)
{
    uint32_t lane = t % 32;
    if (fp8) {
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float2 x = load_pair(alpha + 8 * j + lane % 4 * 2);
#pragma unroll
            for (int m = 0; m < 4; m++) {
                o[32 * m + 4 * j] *= x.x;
                o[32 * m + 4 * j + 1] *= x.y;
                o[32 * m + 4 * j + 2] *= x.x;
                o[32 * m + 4 * j + 3] *= x.y;
            }
        }
    } else {
        float x = alpha[t / 32 * 16 + lane / 4], y = alpha[t / 32 * 16 + lane / 4 + 8];
#pragma unroll
        for (int k = 0; k < 128; k++)
            o[k] *= k / 2 % 2 ? y : x;
    }
}

/* Divides by the sums. A row's only split goes to its place. Partial results, 4096 times 16 bytes:
 * BF16: [i 2][c 8][v 2][thread 128]: row half i, columns 256 v + 32 c + 8 j + 2 (lane % 4) + e for values 2 j + e.
 * FP8: [2 (h / 8) + h % 2][h / 2 % 4][v 2][warp 4][lane / 4] for head h: dimensions 256 v + 64 m + 16 warp + 2 (lane /
 * 4) + e for values 2 m + e. */
template <bool fp8>
static __device__ __forceinline__ void store_item(const struct args &a, const struct item &it, const struct tail *tail,
                                                  uint32_t v, uint32_t t, const float (&o)[128])
{
    uint32_t heads = min(a.n_heads - it.head_block * HEADS, (uint32_t)HEADS);
    uint32_t lane = t % 32, q = lane % 4, warp = t / 32;
    bool only = it.n_splits == 1;
    uint4 *to =
        (uint4 *)(a.partial + (size_t)it.id * PARTIAL) + (fp8 ? q * 64 + v * 32 + warp * 8 + lane / 4 : v * 128 + t);
    __nv_bfloat16 *out = a.out + ((size_t)(a.row0 + it.row) * a.n_heads + it.head_block * HEADS) * DN_MLA_LATENT +
                         256 * v + (fp8 ? 16 * warp + lane / 4 * 2 : 2 * q);
    if (v == 0 && t == 0 && it.split == 0)
        a.firsts[it.row * a.n_head_blocks + it.head_block] = it.id;
#pragma unroll
    for (uint32_t k = 0; k < 16; k++) {
        uint32_t head = fp8 ? k / 2 * 8 + 2 * q + k % 2 : warp * 16 + lane / 4 + k / 8 * 8, x[4];
        float inv = tail->inverse[head];
#pragma unroll
        for (uint32_t m = 0; m < 4; m++) {
            uint32_t at = fp8 ? 32 * m + k / 2 * 4 + k % 2 : 16 * (k % 8) + 4 * m + k / 8 * 2;
            x[m] = pack_bf16(o[at] * inv, o[at + (fp8 ? 2 : 1)] * inv);
        }
        if (head >= heads)
            continue;
        if (!only) {
            __stcg(to + k * 256, make_uint4(x[0], x[1], x[2], x[3]));
            continue;
        }
#pragma unroll
        for (uint32_t m = 0; m < 4; m++)
            *(uint32_t *)(out + head * DN_MLA_LATENT + (fp8 ? 64 * m : 32 * (k % 8) + 8 * m)) = x[m];
    }
}

/* An item, from tile n of the format on. */
template <bool fp8>
static __device__ __forceinline__ void value_item(const struct args &a, const struct item &it, struct tail *tail,
                                                  uint32_t shared, uint32_t n, uint32_t v)
{
    using P = plan<fp8>;
    uint32_t left = it.tile1 - it.tile0, tokens = tile_tokens(it.n_tokens, it.tile1 - 1); /* of the last one */
    float2 before = make_float2(0, 0);
    float o[128];
#pragma unroll
    for (int k = 0; k < 128; k++)
        o[k] = 0;
    for (bool first = true; left; left--, n++, first = false) {
        uint32_t t = thread_anew() & 127;
        uint32_t b = n % P::stages, buffer = n % P::buffers, stage = uniform(P::stage(shared, n));
        dn_barrier_wait(dn_shared(&tail->p_full[fp8][buffer]), n / P::buffers & 1);
        dn_barrier_wait(dn_shared(&tail->stage_full[fp8][b]), n / P::stages & 1);
        if (left == 1 && tokens < DN_MLA_TOKENS)
            zero_rows<fp8>(stage, tokens, v, t);
        uint4 changed = *(const uint4 *)tail->changed[buffer];
        if (!first && (changed.x | changed.y | changed.z | changed.w))
            rescale<fp8>(o, tail->alpha[buffer], t);
        multiply_values<fp8>(o, stage, uniform(P::p(shared, n)), v, t, first);
        if (left == 2)
            before = tail->ends[buffer][t % 64];
        if (left == 1) {
            float2 end = tail->ends[buffer][t % 64];
            float sum = end.x + before.x * exp2_fast(before.y - end.y);
            if (t < HEADS)
                tail->inverse[t] = 1.0f / sum; /* both warpgroups the same */
            if (v == 0 && t < HEADS && it.n_splits > 1)
                a.sums[(size_t)it.id * HEADS + t] = end.y + __log2f(sum);
        }
        __syncwarp();
        if (t % 32 == 0) {
            dn_barrier_arrive(dn_shared(&tail->stage_empty[fp8][b])); /* before P's: see score_tile() */
            dn_barrier_arrive(dn_shared(&tail->p_empty[fp8][buffer]));
        }
    }
    dn_sync(BAR_VALUES + (int)v, 128);
    store_item<fp8>(a, it, tail, v, thread_anew() & 127, o);
}

/* From a partial result's begin to a head's 16 bytes `unit` of 64, and their pairs of columns: `column` + 0, 1, 2, 3
 * times `step`. */
struct unit {
    uint32_t at, column, step;
};
static __device__ __forceinline__ struct unit find_unit(int format, uint32_t head, uint32_t unit)
{
    uint32_t v = unit / 32, c = unit / 4 % 8;
    if (format == DN_KV_FP8)
        return {((head / 8 * 2 + head % 2) * 4 + head / 2 % 4) * 64 + unit, 256 * v + unit % 32 * 2, 64};
    return {(head / 8 % 2 * 8 + c) * 256 + v * 128 + head / 16 * 32 + head % 8 * 4 + unit % 4,
            256 * v + 32 * c + unit % 4 * 2, 8};
}

#endif

#endif
