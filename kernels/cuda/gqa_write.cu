/* What happens between the fused q|k|v projection and attention: norms, rotation, and the new K and V go to their
 * pages.
 *
 * Maths, for each head's vector x of a token: x *= rsqrt(mean(x^2) + eps) * weight (q and k, if there are weights),
 * pairs turned by the token's angles (q and k), all in f32; q goes back as bf16; k and v become bf16, or e4m3 with
 * scale = max|x| / 448 (kernels.h).
 *
 * A warp takes one vector, a block eight of one token. The vector passes through shared memory, since pairs and chunks
 * of a page lie across lanes. Layout of pages: gqa.cuh.
 *
 * Floor: q|k|v read, q and pages written once.
 */
#include "kernels/cuda/gqa.cuh"

enum { WARPS = 8 };

struct write_args {
    __nv_bfloat16 *qkv;
    uint32_t n_heads, n_kv_heads, dim;
    const float *q_norm, *k_norm;
    float eps;
    const float *rope;
    uint32_t pairs;
    bool interleaved;
    struct dn_kv_layout layout;
    uint8_t *arena;
    uint32_t layer;
    struct dn_cuda_step step;
};

/* x as stored in place of a row of the page, by the warp. */
static __device__ void store_bf16(const float *x, uint8_t *row, uint32_t dim, uint32_t swizzle, uint32_t lane)
{
    for (uint32_t chunk = lane; chunk < dim / 8; chunk += 32) {
        const float *from = x + chunk * 8;
        uint4 y;
        y.x = gqa_pack<false>(from[0], from[1]);
        y.y = gqa_pack<false>(from[2], from[3]);
        y.z = gqa_pack<false>(from[4], from[5]);
        y.w = gqa_pack<false>(from[6], from[7]);
        *(uint4 *)(row + ((chunk ^ swizzle) << 4)) = y;
    }
}

static __device__ void store_fp8(const float *x, uint8_t *row, float *scale, uint32_t dim, uint32_t swizzle,
                                 uint32_t lane)
{
    uint32_t top = 0; /* |x| ordered as integers: a NaN is above every number */
    for (uint32_t i = lane; i < dim; i += 32)
        top = max(top, __float_as_uint(x[i]) & 0x7fffffffu);
    top = __reduce_max_sync(0xffffffff, top);
    const bool nan = top > 0x7f800000u;
    const float largest = top >= 0x7f800000u ? 3.402823466e38f : __uint_as_float(top);
    const bool zero = largest < 1e-30f;
    const float inverse = zero ? 0.0f : 448.0f / largest;
    if (lane == 0)
        *scale = nan ? NAN : zero ? 0.0f : largest / 448.0f;
    for (uint32_t chunk = lane; chunk < dim / 16; chunk += 32) {
        const float *from = x + chunk * 16;
        uint32_t y[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t lo = __nv_cvt_float2_to_fp8x2(make_float2(from[4 * i] * inverse, from[4 * i + 1] * inverse),
                                                   __NV_SATFINITE, __NV_E4M3);
            uint32_t hi = __nv_cvt_float2_to_fp8x2(make_float2(from[4 * i + 2] * inverse, from[4 * i + 3] * inverse),
                                                   __NV_SATFINITE, __NV_E4M3);
            y[i] = nan ? 0 : lo | hi << 16; /* the scale says it; codes are always numbers */
        }
        *(uint4 *)(row + ((chunk ^ swizzle) << 4)) = make_uint4(y[0], y[1], y[2], y[3]);
    }
}

static __global__ void __launch_bounds__(32 * WARPS) gqa_write(const __grid_constant__ write_args a)
{
    __shared__ __align__(16) float rows[WARPS][GQA_MAX_DIM];
    dn_wait_previous(); /* first: gqa_decode, which may start now, reads bad[] and pages without a wait of its own */
    dn_start_next();
    const uint32_t token = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32, dim = a.dim;
    const uint32_t n = a.n_heads + 2 * a.n_kv_heads, head = blockIdx.y * WARPS + warp;
    if (token >= a.step.count[DN_COUNT_TOKENS] || head >= n)
        return;
    const uint32_t position = (uint32_t)a.step.position[token], seq = (uint32_t)a.step.token_seq[token];
    __nv_bfloat162 *vector = (__nv_bfloat162 *)(a.qkv + ((size_t)token * n + head) * dim);
    float *x = rows[warp];
    float squares = 0;
    for (uint32_t i = lane; i < dim / 2; i += 32) {
        float2 y = __bfloat1622float2(vector[i]);
        squares += y.x * y.x + y.y * y.y;
        *(float2 *)(x + 2 * i) = y;
    }
    const bool is_q = head < a.n_heads, is_v = head >= a.n_heads + a.n_kv_heads;
    const float *norm = is_q ? a.q_norm : a.k_norm;
    if (!is_v && norm) {
        for (int d = 16; d; d /= 2)
            squares += __shfl_xor_sync(0xffffffff, squares, d);
        const float factor = rsqrtf(squares / (float)dim + a.eps);
        for (uint32_t i = lane; i < dim / 2; i += 32) {
            float2 w = *(const float2 *)(norm + 2 * i), y = *(float2 *)(x + 2 * i);
            *(float2 *)(x + 2 * i) = make_float2(y.x * factor * w.x, y.y * factor * w.y);
        }
    }
    __syncwarp();
    if (!is_v && a.rope) {
        const float2 *turn = (const float2 *)a.rope + (size_t)position * a.pairs;
        for (uint32_t i = lane; i < a.pairs; i += 32) {
            uint32_t first = a.interleaved ? 2 * i : i, second = a.interleaved ? 2 * i + 1 : i + a.pairs;
            float2 cs = turn[i];
            float y = x[first], z = x[second];
            x[first] = y * cs.x - z * cs.y;
            x[second] = z * cs.x + y * cs.y;
        }
        __syncwarp();
    }
    if (is_q) {
        for (uint32_t i = lane; i < dim / 2; i += 32)
            vector[i] = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
        return;
    }
    if (a.step.bad[seq])
        return;
    const bool fp8 = a.step.kv_format[seq] == DN_KV_FP8;
    const struct dn_kv_layout &l = a.layout;
    const uint32_t page = a.step.page[(uint32_t)a.step.page_start[seq] + position / GQA_PAGE];
    const uint32_t kv_head = head - a.n_heads - (is_v ? a.n_kv_heads : 0),
                   at = kv_head * GQA_PAGE + position % GQA_PAGE;
    const uint32_t row_bytes = fp8 ? dim : 2 * dim, swizzle = gqa_swizzle(row_bytes / 16, position);
    uint8_t *layer =
        a.arena + dn_page_offset(l, fp8, page) + (uint64_t)a.layer * (fp8 ? l.format[1] : l.format[0]).layer_bytes;
    uint8_t *row = layer + (is_v ? (fp8 ? l.format[1] : l.format[0]).v_offset : 0) + (size_t)at * row_bytes;
    if (fp8)
        store_fp8(x, row, (float *)(layer + (is_v ? l.format[1].v_scale_offset : l.format[1].k_scale_offset)) + at, dim,
                  swizzle, lane);
    else
        store_bf16(x, row, dim, swizzle, lane);
}

void dn_cuda_qkv_write(struct dn_device *d, const struct dn_qkv_write *p)
{
    struct dn_cuda *c = dn_cuda(d);
    if (p->layout->page_tokens != GQA_PAGE || p->head_dim % 16 != 0 || p->head_dim > GQA_MAX_DIM ||
        p->rotary_dim > p->head_dim) {
        dn_cuda_failed(c, cudaErrorInvalidValue,
                       "qkv_write: pages of 64 tokens and heads of 16, 32, ... 256 values only");
        return;
    }
    struct write_args a = {};
    a.qkv = (__nv_bfloat16 *)p->qkv;
    a.n_heads = p->n_heads;
    a.n_kv_heads = p->n_kv_heads;
    a.dim = p->head_dim;
    a.q_norm = p->q_norm;
    a.k_norm = p->k_norm;
    a.eps = p->norm_eps;
    a.rope = p->rope;
    a.pairs = p->rotary_dim / 2;
    a.interleaved = p->interleaved;
    a.layout = *p->layout;
    a.arena = (uint8_t *)p->arena;
    a.layer = p->layer;
    a.step = c->step;
    dim3 grid(c->n_tokens, (p->n_heads + 2 * p->n_kv_heads + WARPS - 1) / WARPS);
    dn_launch(c, "qkv_write", gqa_write, grid, dim3(32 * WARPS), 0, a);
}
