/* A token's latent and rope key into its page, and the rotated rope parts of its query heads.
 *
 *   c = kv[0..latent) * rsqrt(mean(kv^2) + eps) * kv_norm; pairs (a, b) -> (a cos - b sin, b cos + a sin).
 *
 * One block a token. Warp 0: lane i has latent values 16i..16i+15 (one FP8 unit, two BF16 chunks) and rope pair i. The
 * other warps rotate query heads, lane i pair i. Floor: 1152 bytes read and 1152 or 644 written a token, 256 bytes a
 * head.
 */
#include "kernels/cuda/mla.cuh"

enum { THREADS = 256 };

struct args {
    struct dn_mla_write p;
    struct dn_kv_layout l;
    struct dn_cuda_step s;
};

/* Rotates pair i of 32 at x[], to y[]. */
static __device__ __forceinline__ void rotate(const __nv_bfloat16 *x, __nv_bfloat16 *y, float2 cs, bool interleaved,
                                              uint32_t i)
{
    uint32_t ia = interleaved ? 2 * i : i, ib = interleaved ? 2 * i + 1 : i + DN_MLA_ROPE / 2;
    float a = __bfloat162float(x[ia]), b = __bfloat162float(x[ib]);
    y[ia] = __float2bfloat16_rn(a * cs.x - b * cs.y);
    y[ib] = __float2bfloat16_rn(b * cs.x + a * cs.y);
}

static __device__ __forceinline__ uint32_t bf16_pair(float a, float b)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(a, b);
    return *(uint32_t *)&v;
}

/* The rule of kernels/cpu's encode_fp8(): scale = amax / 448, 0 if amax is (nearly) 0, NaN if any is NaN; an infinity
 * counts as the largest finite number. */
static __device__ __forceinline__ float encode_fp8(const float *x, uint8_t *unit, bool active)
{
    uint32_t top = 0;
    for (int i = 0; i < 16; i++)
        top = max(top, __float_as_uint(x[i]) & 0x7fffffffu);
    top = __reduce_max_sync(0xffffffffu, top);
    bool nan = top > 0x7f800000u;
    float amax = top >= 0x7f800000u ? 0x1.fffffep127f : __uint_as_float(top);
    bool zero = amax < 1e-30f;
    float inv = zero ? 0.0f : 448.0f / amax;
    uint32_t code[4];
    for (int i = 0; i < 4; i++) {
        uint32_t lo =
            __nv_cvt_float2_to_fp8x2(make_float2(x[4 * i] * inv, x[4 * i + 1] * inv), __NV_SATFINITE, __NV_E4M3);
        uint32_t hi =
            __nv_cvt_float2_to_fp8x2(make_float2(x[4 * i + 2] * inv, x[4 * i + 3] * inv), __NV_SATFINITE, __NV_E4M3);
        code[i] = lo | hi << 16;
    }
    if (active)
        *(uint4 *)unit = make_uint4(code[0], code[1], code[2], code[3]);
    return nan ? __uint_as_float(0x7fc00000u) : zero ? 0.0f : amax / 448.0f;
}

static __device__ void write_token(const struct args &a, uint32_t t, uint32_t position, uint32_t seq, float2 cs,
                                   uint32_t lane)
{
    const struct dn_mla_write &p = a.p;
    const __nv_bfloat16 *kv = (const __nv_bfloat16 *)p.kv + (size_t)t * p.kv_stride;
    bool active = lane < p.latent_dim / 16;
    float x[16], sum = 0;
    for (int i = 0; i < 16; i++)
        x[i] = active ? __bfloat162float(kv[lane * 16 + i]) : 0.0f;
    for (int i = 0; i < 16; i++)
        sum += x[i] * x[i];
    for (int i = 16; i; i >>= 1)
        sum += __shfl_xor_sync(0xffffffffu, sum, i);
    float inv = rsqrtf(sum / (float)p.latent_dim + p.norm_eps);
    for (int i = 0; i < 16; i++)
        x[i] = active ? x[i] * inv * p.kv_norm[lane * 16 + i] : 0.0f;

    int f = a.s.kv_format[seq];
    uint32_t token = position % DN_MLA_TOKENS;
    uint32_t id = a.s.page[(uint32_t)a.s.page_start[seq] + position / DN_MLA_TOKENS];
    uint8_t *page = (uint8_t *)dn_mla_page(a.l, p.arena, f, id, p.layer);
    uint8_t *key = page + (f == DN_KV_FP8 ? a.l.format[f].v_offset : p.latent_dim / 64 * DN_MLA_BLOCK);
    float scale = 1; /* of the rope key */
    if (f == DN_KV_FP8) {
        scale = encode_fp8(x, page + dn_mla_fp8_at(p.latent_dim, token, lane * 16), active);
        if (lane == 0)
            ((float *)(page + a.l.format[f].k_scale_offset))[token] = scale;
        scale = scale == 0 ? 1 : scale;
    } else if (active) {
        for (uint32_t half = 0; half < 2; half++) {
            const float *y = x + 8 * half;
            *(uint4 *)(page + lane / 4 * DN_MLA_BLOCK + dn_mla_swizzled(token, lane % 4 * 2 + half)) =
                make_uint4(bf16_pair(y[0], y[1]), bf16_pair(y[2], y[3]), bf16_pair(y[4], y[5]), bf16_pair(y[6], y[7]));
        }
    }
    const __nv_bfloat16 *k = kv + p.latent_dim;
    uint32_t ia = p.interleaved ? 2 * lane : lane, ib = p.interleaved ? 2 * lane + 1 : lane + DN_MLA_ROPE / 2;
    float u = __bfloat162float(k[ia]), v = __bfloat162float(k[ib]);
    *(__nv_bfloat16 *)(key + dn_mla_swizzled(token, ia / 8) + ia % 8 * 2) =
        __float2bfloat16_rn((u * cs.x - v * cs.y) / scale);
    *(__nv_bfloat16 *)(key + dn_mla_swizzled(token, ib / 8) + ib % 8 * 2) =
        __float2bfloat16_rn((v * cs.x + u * cs.y) / scale);
}

static __global__ void __launch_bounds__(THREADS) write_kernel(const __grid_constant__ struct args a)
{
    uint32_t t = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    dn_start_next();
    dn_wait_previous();
    if (t >= a.s.count[DN_COUNT_TOKENS])
        return;
    uint32_t position = (uint32_t)a.s.position[t], seq = (uint32_t)a.s.token_seq[t];
    float2 cs = ((const float2 *)a.p.rope)[(size_t)position * (DN_MLA_ROPE / 2) + lane];
    if (warp == 0) {
        if (!a.s.bad[seq])
            write_token(a, t, position, seq, cs, lane);
        return;
    }
    uint32_t head_dim = a.p.nope_dim + DN_MLA_ROPE;
    for (uint32_t h = warp - 1; h < a.p.n_heads; h += THREADS / 32 - 1)
        rotate((const __nv_bfloat16 *)a.p.q + ((size_t)t * a.p.n_heads + h) * head_dim + a.p.nope_dim,
               (__nv_bfloat16 *)a.p.q_rope + (size_t)t * a.p.q_rope_stride + (size_t)h * a.p.q_rope_head_stride, cs,
               a.p.interleaved, lane);
}

void dn_cuda_mla_write(struct dn_device *d, const struct dn_mla_write *p)
{
    struct dn_cuda *c = dn_cuda(d);
    if (p->rope_dim != DN_MLA_ROPE || p->latent_dim % 64 || p->latent_dim > DN_MLA_LATENT ||
        p->layout->page_tokens != DN_MLA_TOKENS) {
        dn_cuda_failed(c, cudaErrorNotSupported, "mla_write: sizes");
        return;
    }
    struct args a = {*p, *p->layout, c->step};
    dn_launch(c, "mla_write", write_kernel, dim3(c->n_tokens), dim3(THREADS), 0, a);
}
