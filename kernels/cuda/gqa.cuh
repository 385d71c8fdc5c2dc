/* What the kernels of grouped-query attention share: the bytes of a page, pipelines of pages, the product of a tile.
 *
 * Page (of one layer, sizes by dn_kv_layout): K [kv_head][64 tokens][row], V the same, in FP8 then the scales of K
 * [kv_head][64] and of V. A row is head_dim values in chunks of 16 bytes; chunk c of token t lies at place
 * c ^ gqa_swizzle(t). So the block of a (page, KV head) is one contiguous copy, and eight tokens' chunks of one column
 * lie in eight different groups of banks when ldmatrix reads them from the copy.
 *
 * Tile: for 16 rows (queries) and N16 * 16 tokens a warp computes S = Q K^T by mma.m16n8k16 (queries are M), the
 * running softmax, and O += P V. With g = lane / 4 and q = lane % 4:
 *
 * - BF16: K through ldmatrix, V through ldmatrix.trans give the fragments as m16n8k16 wants them; P in bf16.
 * - FP8: a matrix of ldmatrix is 8 tokens x 16 dims. Of K a thread gets dims 4q..4q+3 of token g: as f16 they are the B
 *   fragment of a k-step with permuted columns (2q, 2q+1, 2q+8, 2q+9 <- 4q..4q+3); Q takes the same order. Of V
 * (.trans) it gets tokens 2q, 2q+1 of dims 2g, 2g+1; a PRMT sorts them into the fragment of the even dims and that of
 * the odd ones, so a thread's results are dims 4q..4q+3 of each 16.
 * - FP8's scales: of K on the columns of S; of V on P before it is rounded to f16, times a power of two f for each row
 * that brings the largest scale seen so far near 2^15: O is in units of 1/f. Q is brought near 1 the same way.
 *
 * Masked tokens are left out, not multiplied by zero: their scores become -inf and their V zero bits.
 *
 * Threads: device code; a warp calls these together.
 */
#ifndef DN_KERNELS_CUDA_GQA_CUH
#define DN_KERNELS_CUDA_GQA_CUH

#include "kernels/cuda/device.cuh"

enum {
    GQA_PAGE = 64, /* tokens */
    GQA_ROWS = 16, /* queries of a tile */
    GQA_WARPS = 8, /* that compute; one more loads */
    GQA_MAX_STAGES = 16,
    GQA_FI_START = 250, /* biased exponent of the first f */
    GQA_MAX_DIM = 256,  /* of the simple kernel */
};

/* What kernels of both kinds get. */
struct gqa_args {
    const __nv_bfloat16 *q;
    __nv_bfloat16 *out;
    uint32_t q_stride, n_heads, n_kv_heads, group;
    uint32_t head_blocks; /* of 16 query heads in a group */
    float scale_log2;     /* scale * log2(e) */
    uint32_t layer;
    struct dn_kv_layout layout;
    const uint8_t *arena;
    struct dn_cuda_step step;
    uint32_t n_stages;
    /* Decode: */
    uint32_t *counters;
    float *partial;
};

/* The operation for decode steps, head_dim 64 or 128 (gqa_decode.cu). false: the step needs more shared memory or
 * counters than there are, and nothing was launched. */
bool dn_gqa_decode(struct dn_cuda *c, const struct dn_attention *p, struct gqa_args a);

static __host__ __device__ __forceinline__ uint32_t gqa_swizzle(uint32_t row_chunks, uint32_t token)
{
    return row_chunks % 8 == 0 ? token & 7 : row_chunks == 4 ? (token >> 1) & 3 : 0;
}

/* ---- Instructions ---- */

static __device__ __forceinline__ uint32_t gqa_smem(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void gqa_bar_init(uint32_t bar, uint32_t count)
{
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(bar), "r"(count) : "memory");
}

/* After the inits, before the block's barrier. */
static __device__ __forceinline__ void gqa_bar_init_done()
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

static __device__ __forceinline__ void gqa_arrive(uint32_t bar)
{
    asm volatile("{\n\t.reg .b64 state;\n\tmbarrier.arrive.shared.b64 state, [%0];\n\t}" ::"r"(bar) : "memory");
}

static __device__ __forceinline__ void gqa_wait(uint32_t bar, uint32_t phase)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n\t.reg .pred p;\n"
                 "again:\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n\t@p bra done;\n\tbra again;\n"
                 "done:\n\t}" ::"r"(bar),
                 "r"(phase)
                 : "memory");
#else
    asm volatile("{\n\t.reg .pred p;\n"
                 "again:\n\tmbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n\t@p bra done;\n\tbra again;\n"
                 "done:\n\t}" ::"r"(bar),
                 "r"(phase)
                 : "memory");
#endif
}

/* Barriers that count copies: bulk copies count bytes and one arrival; cp.async counts an arrival of each lane. */
#if __CUDA_ARCH__ >= 900
#define GQA_COPY_ARRIVALS 1
#else
#define GQA_COPY_ARRIVALS 32
#endif

/* The warp calls, before its copies to `bar`. */
static __device__ __forceinline__ void gqa_copy_begin(uint32_t bar, uint32_t bytes, uint32_t lane)
{
#if __CUDA_ARCH__ >= 900
    if (lane == 0)
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(bar), "r"(bytes) : "memory");
    __syncwarp();
#endif
}

/* The warp calls with the same values but for `by`, the lane that starts a bulk copy: each lane may have its own copy
 * if they all are of the same length. bytes is a multiple of 16. */
static __device__ __forceinline__ void gqa_copy(uint32_t dst, const void *src, uint32_t bytes, uint32_t bar,
                                                uint32_t lane, uint32_t by)
{
#if __CUDA_ARCH__ >= 900
    if (lane == by)
        asm volatile(
            "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
            "l"(src), "r"(bytes), "r"(bar)
            : "memory");
#else
    for (uint32_t i = lane * 16; i < bytes; i += 512)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(dst + i), "l"((const uint8_t *)src + i)
                     : "memory");
#endif
}

/* The warp calls, after its copies to `bar`. */
static __device__ __forceinline__ void gqa_copy_end(uint32_t bar)
{
#if __CUDA_ARCH__ < 900
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(bar) : "memory");
#endif
}

static __device__ __forceinline__ void gqa_ldmatrix(uint32_t (&r)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

static __device__ __forceinline__ void gqa_ldmatrix_trans(uint32_t (&r)[4], uint32_t at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(at)
                 : "memory");
}

template <bool F16>
static __device__ __forceinline__ void gqa_mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1)
{
    if (F16)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
            "{%0,%1,%2,%3};"
            : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ float gqa_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

static __device__ __forceinline__ uint32_t gqa_bits(__half2 x)
{
    return *(uint32_t *)&x;
}
static __device__ __forceinline__ uint32_t gqa_bits(__nv_bfloat162 x)
{
    return *(uint32_t *)&x;
}

/* Four e4m3 as f16: the first two, the other two. */
static __device__ __forceinline__ void gqa_f16(uint32_t x, uint32_t &lo, uint32_t &hi)
{
#if __CUDA_ARCH__ >= 890
    asm("{\n\t.reg .b16 l, h;\n\tmov.b32 {l, h}, %2;\n\tcvt.rn.f16x2.e4m3x2 %0, l;\n\tcvt.rn.f16x2.e4m3x2 %1, h;\n\t}"
        : "=r"(lo), "=r"(hi)
        : "r"(x));
#else
    __half2_raw l = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(x & 0xffff), __NV_E4M3);
    __half2_raw h = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(x >> 16), __NV_E4M3);
    lo = (uint32_t)l.x | (uint32_t)l.y << 16;
    hi = (uint32_t)h.x | (uint32_t)h.y << 16;
#endif
}

template <bool F16> static __device__ __forceinline__ uint32_t gqa_pack(float lo, float hi)
{
    return F16 ? gqa_bits(__floats2half2_rn(lo, hi)) : gqa_bits(__floats2bfloat162_rn(lo, hi));
}

/* A block of 3 groups of 4 warps starts with 168 registers a thread: the loading group gives most of its away. */
template <int N> static __device__ __forceinline__ void gqa_registers_down()
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
#endif
}
template <int N> static __device__ __forceinline__ void gqa_registers_up()
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
#endif
}

/* ---- Stages ---- */

/* A place in a ring of stages. */
struct gqa_ring {
    uint32_t stage, phase;
};
static __device__ __forceinline__ void gqa_next(struct gqa_ring &r, uint32_t n_stages)
{
    if (++r.stage == n_stages) {
        r.stage = 0;
        r.phase ^= 1;
    }
}

/* Bytes of a (page, KV head) in shared memory: K | V | scales of K | scales of V. */
template <int D> static __host__ __device__ constexpr uint32_t gqa_tile_bytes(bool fp8)
{
    return fp8 ? 2 * GQA_PAGE * D + 2 * GQA_PAGE * 4 : 2 * GQA_PAGE * D * 2;
}

/* Copies a page's block of one KV head; the warp calls between copy_begin() and copy_end(). `by` is the first of up to
 * four lanes that start the copies. */
template <int D>
static __device__ __forceinline__ void gqa_copy_tile(const struct gqa_args &a, bool fp8, uint32_t page,
                                                     uint32_t kv_head, uint32_t dst, uint32_t bar, uint32_t lane,
                                                     uint32_t by)
{
    const struct dn_kv_layout &l = a.layout;
    const uint8_t *layer =
        a.arena + dn_page_offset(l, fp8, page) + (uint64_t)a.layer * (fp8 ? l.format[1] : l.format[0]).layer_bytes;
    if (!fp8) {
        constexpr uint32_t half = GQA_PAGE * D * 2;
        gqa_copy(dst, layer + kv_head * half, half, bar, lane, by);
        gqa_copy(dst + half, layer + l.format[0].v_offset + kv_head * half, half, bar, lane, by + 1);
    } else {
        constexpr uint32_t half = GQA_PAGE * D;
        const uint32_t scales = GQA_PAGE * 4;
        gqa_copy(dst, layer + kv_head * half, half, bar, lane, by);
        gqa_copy(dst + half, layer + l.format[1].v_offset + kv_head * half, half, bar, lane, by + 1);
        gqa_copy(dst + 2 * half, layer + l.format[1].k_scale_offset + kv_head * scales, scales, bar, lane, by + 2);
        gqa_copy(dst + 2 * half + scales, layer + l.format[1].v_scale_offset + kv_head * scales, scales, bar, lane,
                 by + 3);
    }
}

/* ---- A tile ---- */

/* Running state of 16 queries: rows g (index 0) and g + 8 (index 1) of a thread. l is the thread's own part of the sum.
 */
template <int D> struct gqa_state {
    float o[D / 8][4];
    float m[2], l[2];
    float fi[2]; /* FP8: o is in units of 1 / fi, a power of two */
};

template <int D> static __device__ __forceinline__ void gqa_start(gqa_state<D> &s)
{
#pragma unroll
    for (int i = 0; i < D / 8; i++)
        s.o[i][0] = s.o[i][1] = s.o[i][2] = s.o[i][3] = 0;
    s.m[0] = s.m[1] = -INFINITY;
    s.l[0] = s.l[1] = 0;
    s.fi[0] = s.fi[1] = __uint_as_float((uint32_t)GQA_FI_START << 23);
}

/* Where a lane's ldmatrix reads in a block whose first token is at `base`. */
template <int D, bool BYTES> static __device__ __forceinline__ uint32_t gqa_k_at(uint32_t base, uint32_t lane)
{
    constexpr uint32_t row = BYTES ? D : 2 * D;
    uint32_t r = lane & 7, mi = lane >> 3;
    return base + ((mi >> 1) * 8 + r) * row + (((mi & 1) ^ gqa_swizzle(row / 16, r)) << 4);
}
template <int D, bool BYTES> static __device__ __forceinline__ uint32_t gqa_v_at(uint32_t base, uint32_t lane)
{
    constexpr uint32_t row = BYTES ? D : 2 * D;
    uint32_t r = lane & 7, mi = lane >> 3;
    return base + ((mi & 1) * 8 + r) * row + (((mi >> 1) ^ gqa_swizzle(row / 16, r)) << 4);
}

/* Scores of N16 * 16 tokens, 8 tokens each: the products that depend on each other lie 2 * N16 apart. */
template <int D, bool BYTES, bool F16, int N16>
static __device__ __forceinline__ void gqa_scores(float (&s)[2 * N16][4], const uint32_t (&q)[D / 16][4], uint32_t k)
{
    constexpr uint32_t step = 16 * (BYTES ? D : 2 * D);
#pragma unroll
    for (int n = 0; n < 2 * N16; n++)
        s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
#pragma unroll
    for (int j = 0; j < (BYTES ? D / 32 : D / 16); j++) {
        uint32_t b[N16][4];
#pragma unroll
        for (int n = 0; n < N16; n++)
            gqa_ldmatrix(b[n], (k + (uint32_t)n * step) ^ (uint32_t)(j << 5));
#pragma unroll
        for (int n = 0; n < N16; n++) {
            if (!BYTES) {
                gqa_mma<F16>(s[2 * n], q[j], b[n][0], b[n][1]);
                gqa_mma<F16>(s[2 * n + 1], q[j], b[n][2], b[n][3]);
            } else {
                uint32_t lo[2], hi[2];
                gqa_f16(b[n][0], lo[0], hi[0]);
                gqa_f16(b[n][2], lo[1], hi[1]);
                gqa_mma<F16>(s[2 * n], q[2 * j], lo[0], hi[0]);
                gqa_mma<F16>(s[2 * n + 1], q[2 * j], lo[1], hi[1]);
            }
        }
#pragma unroll
        for (int n = 0; n < N16 && BYTES; n++) {
            uint32_t lo[2], hi[2];
            gqa_f16(b[n][1], lo[0], hi[0]);
            gqa_f16(b[n][3], lo[1], hi[1]);
            gqa_mma<F16>(s[2 * n], q[(2 * j + 1) % (D / 16)], lo[0], hi[0]);
            gqa_mma<F16>(s[2 * n + 1], q[(2 * j + 1) % (D / 16)], lo[1], hi[1]);
        }
    }
}

/* o += P V for 16 tokens. mask: bits of the tokens 2q, 2q+1 (first) and 2q+8, 2q+9 whose V counts. */
template <int D, bool BYTES, bool F16, bool MASKED>
static __device__ __forceinline__ void gqa_values(gqa_state<D> &st, const uint32_t (&p)[4], uint32_t v, uint32_t mask0,
                                                  uint32_t mask1)
{
#pragma unroll
    for (int j = 0; j < (BYTES ? D / 32 : D / 16); j++) {
        uint32_t b[4];
        gqa_ldmatrix_trans(b, v ^ (uint32_t)(j << 5));
        if (MASKED) {
            b[0] &= mask0;
            b[1] &= mask1;
            b[2] &= mask0;
            b[3] &= mask1;
        }
        if (!BYTES) {
            gqa_mma<F16>(st.o[2 * j], p, b[0], b[1]);
            gqa_mma<F16>(st.o[2 * j + 1], p, b[2], b[3]);
        } else {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                uint32_t even[2], odd[2];
                gqa_f16(__byte_perm(b[2 * i], 0, 0x3120), even[0], odd[0]);
                gqa_f16(__byte_perm(b[2 * i + 1], 0, 0x3120), even[1], odd[1]);
                gqa_mma<true>(st.o[4 * j + 2 * i], p, even[0], even[1]);
                gqa_mma<true>(st.o[4 * j + 2 * i + 1], p, odd[0], odd[1]);
            }
        }
    }
}

static __device__ __forceinline__ float gqa_quad_max(float x)
{
    x = fmaxf(x, __shfl_xor_sync(0xffffffff, x, 1));
    return fmaxf(x, __shfl_xor_sync(0xffffffff, x, 2));
}
static __device__ __forceinline__ float gqa_quad_sum(float x)
{
    x += __shfl_xor_sync(0xffffffff, x, 1);
    return x + __shfl_xor_sync(0xffffffff, x, 2);
}

/* 2^15 over the smallest power of two >= x, for scales x >= 0, at most the first f. */
static __device__ __forceinline__ float gqa_fi(float x)
{
    int e = 269 - (int)((__float_as_uint(x) + 0x7fffffu) >> 23);
    e = e > GQA_FI_START ? GQA_FI_START : e < 1 ? 1 : e;
    return __uint_as_float((uint32_t)e << 23);
}
static __device__ __forceinline__ float gqa_inverse(float power_of_two)
{
    return __uint_as_float((254u << 23) - __float_as_uint(power_of_two));
}

/* N16 * 16 tokens. WIDE: FP8 whose values are f16 in shared memory, in rows as of BF16. k, v: gqa_k_at(), gqa_v_at() of
 * the first token. ks, vs: the tokens' scales (FP8). c: by which scores are multiplied (to the base 2), of rows g and g
 * + 8. MASKED: tokens below bound[row] count; keep: bit set of the tokens whose V may be used, those of the largest
 * bound in the warp or fewer. */
template <int D, bool FP8, int N16, bool MASKED, bool WIDE = false>
static __device__ __forceinline__ void gqa_tile(gqa_state<D> &st, const uint32_t (&q)[D / 16][4], uint32_t k,
                                                uint32_t v, const float *ks, const float *vs, const float (&c)[2],
                                                const int (&bound)[2], uint64_t keep, uint32_t lane)
{
    constexpr bool bytes = FP8 && !WIDE;
    constexpr uint32_t step = 16 * (bytes ? D : 2 * D);
    const int first = (int)(lane & 3) * 2;
    float s[2 * N16][4];
    float2 sv[FP8 ? 2 * N16 : 1];
    float top[2] = {-INFINITY, -INFINITY}, vtop[2] = {0, 0};
    gqa_scores<D, bytes, FP8, N16>(s, q, k);
#pragma unroll
    for (int n = 0; n < 2 * N16; n++) {
        float2 sk = {1, 1};
        if (FP8) {
            sk = *(const float2 *)(ks + 8 * n + first);
            sv[n] = *(const float2 *)(vs + 8 * n + first);
        }
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = i >> 1, token = 8 * n + first + (i & 1);
            float x = FP8 ? s[n][i] * (i & 1 ? sk.y : sk.x) * c[row] : s[n][i] * c[row];
            bool valid = !MASKED || token < bound[row];
            s[n][i] = valid ? x : -INFINITY;
            top[row] = fmaxf(top[row], s[n][i]);
            if (FP8 && (MASKED || row == 0))
                vtop[row] = fmaxf(vtop[row], valid ? (i & 1 ? sv[n].y : sv[n].x) : 0);
        }
    }
    float alpha[2], beta[2], base[2], sum[2] = {0, 0};
    bool changed = false;
    if (FP8) {
        vtop[0] = gqa_quad_max(vtop[0]);
        vtop[1] = MASKED ? gqa_quad_max(vtop[1]) : vtop[0];
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float m = fmaxf(st.m[r], gqa_quad_max(top[r]));
        base[r] = m == -INFINITY ? 0 : m;
        alpha[r] = gqa_exp2(st.m[r] - base[r]);
        if (m == st.m[r])
            alpha[r] = 1;
        st.m[r] = m;
        beta[r] = alpha[r];
        if (FP8) {
            float fi = fminf(st.fi[r], gqa_fi(vtop[r]));
            if (fi != st.fi[r]) {
                beta[r] *= fi * gqa_inverse(st.fi[r]);
                st.fi[r] = fi;
                changed = true;
            }
        }
        changed |= alpha[r] != 1;
    }
    if (__any_sync(0xffffffff, changed)) {
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            st.o[i][0] *= beta[0];
            st.o[i][1] *= beta[0];
            st.o[i][2] *= beta[1];
            st.o[i][3] *= beta[1];
        }
        st.l[0] *= alpha[0];
        st.l[1] *= alpha[1];
    }
#pragma unroll
    for (int n = 0; n < N16; n++) {
        uint32_t p[4], mask0 = 0xffffffff, mask1 = 0xffffffff;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            float(&x)[4] = s[2 * n + h];
            int token = 16 * n + 8 * h + first;
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = i >> 1;
                x[i] = gqa_exp2(x[i] - base[row]);
                sum[row] += x[i];
                if (FP8) {
                    float f = (i & 1 ? sv[2 * n + h].y : sv[2 * n + h].x) * st.fi[row];
                    x[i] *= !MASKED || token + (i & 1) < bound[row] ? f : 0;
                }
            }
            p[2 * h] = gqa_pack<FP8>(x[0], x[1]);
            p[2 * h + 1] = gqa_pack<FP8>(x[2], x[3]);
            if (MASKED) {
                uint32_t two = (uint32_t)(keep >> token) & 3;
                uint32_t mask = (two & 1 ? 0xffffu : 0) | (two & 2 ? 0xffff0000u : 0);
                (h ? mask1 : mask0) = mask;
            }
        }
        gqa_values<D, bytes, FP8, MASKED>(st, p, v + (uint32_t)n * step, mask0, mask1);
    }
    st.l[0] += sum[0];
    st.l[1] += sum[1];
}

/* Queries for FP8: f16, columns permuted (if K is BYTES), rows g and g + 8 multiplied by a power of two that brings
 * their largest value to 1..2; c is divided by it. load(row, column) gives two bf16 values (row 0: g, 1: g + 8). */
template <int D, bool BYTES, typename Load>
static __device__ __forceinline__ void gqa_load_q_fp8(uint32_t (&q)[D / 16][4], float (&c)[2], uint32_t lane, Load load)
{
    float top[2] = {0, 0};
#pragma unroll
    for (int ks = 0; ks < D / 16; ks++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            q[ks][i] = load(
                i & 1, 16 * ks + (BYTES ? 4 * (int)(lane & 3) + (i >> 1) * 2 : 2 * (int)(lane & 3) + (i >> 1) * 8));
            float2 x = __bfloat1622float2(*(__nv_bfloat162 *)&q[ks][i]);
            top[i & 1] = fmaxf(top[i & 1], fmaxf(fabsf(x.x), fabsf(x.y)));
        }
    }
    float f[2];
#pragma unroll
    for (int r = 0; r < 2; r++) {
        uint32_t e = __float_as_uint(gqa_quad_max(top[r])) >> 23;
        e = e < 1 ? 1 : e > 253 ? 253 : e;
        f[r] = __uint_as_float((254 - e) << 23);
        c[r] *= __uint_as_float(e << 23);
    }
#pragma unroll
    for (int ks = 0; ks < D / 16; ks++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float2 x = __bfloat1622float2(*(__nv_bfloat162 *)&q[ks][i]);
            q[ks][i] = gqa_pack<true>(x.x * f[i & 1], x.y * f[i & 1]);
        }
    }
}

template <int D, typename Load>
static __device__ __forceinline__ void gqa_load_q_bf16(uint32_t (&q)[D / 16][4], uint32_t lane, Load load)
{
#pragma unroll
    for (int ks = 0; ks < D / 16; ks++) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            q[ks][i] = load(i & 1, 16 * ks + 2 * (int)(lane & 3) + (i >> 1) * 8);
    }
}

#endif
