/* How MLA's tokens lie in a page of 64, and how a decode step cuts its contexts: what mla_write.cu, mla_decode.cu and
 * mla_prefill.cu share.
 *
 * A layer's part of a page, with b = latent_dim / 64 blocks (8 for Kimi):
 *   BF16: b + 1 blocks [64 tokens][64 values], the last one the rope keys, rows of 128 bytes in the 128-byte swizzle of
 *         wgmma.cuh. A bulk copy of the whole is what wgmma reads, as K of the scores and as V.
 *   FP8:  b / 2 blocks [64 tokens][128 e4m3] in the same swizzle (half a block for an odd b: rows of 64 bytes, as they
 *         come), rope keys divided by the token's scale (by 1 if that is 0) one bf16 block as above, f32 scales [64
 *         tokens]: one bulk copy, which wgmma reads as K, all of it to be multiplied by the scale.
 */
#ifndef DN_KERNELS_CUDA_MLA_CUH
#define DN_KERNELS_CUDA_MLA_CUH

#include "kernels/cuda/device.cuh"
#include "kernels/cuda/weights.cuh"

enum { DN_MLA_TOKENS = 64, DN_MLA_BLOCK = 8192, DN_MLA_LATENT = 512, DN_MLA_ROPE = 64 };

/* Byte of (token, 16-byte chunk 0..7) in a block. */
static __device__ __forceinline__ uint32_t dn_mla_swizzled(uint32_t token, uint32_t chunk)
{
    return token * 128 + ((chunk ^ (token & 7)) << 4);
}

static __device__ __forceinline__ const uint8_t *dn_mla_page(const struct dn_kv_layout &l, const void *arena,
                                                             int format, uint32_t page, uint32_t layer)
{
    return (const uint8_t *)arena + dn_page_offset(l, format, page) + (uint64_t)layer * l.format[format].layer_bytes;
}

/* Byte of latent value i of a token in an FP8 page; 16 values from a multiple of 16 on lie together. */
static __device__ __forceinline__ uint32_t dn_mla_fp8_at(uint32_t latent_dim, uint32_t token, uint32_t i)
{
    if (i / 128 * 128 + 128 > latent_dim)
        return i / 128 * DN_MLA_BLOCK + token * 64 + i % 128;
    return i / 128 * DN_MLA_BLOCK + dn_mla_swizzled(token, i % 128 / 16) + i % 16;
}

/* Value i of a token in a page, as f32; i >= latent_dim: of its rope key. For the simple kernels. */
static __device__ __forceinline__ float dn_mla_value(const struct dn_kv_layout &l, const uint8_t *page, int format,
                                                     uint32_t token, uint32_t i)
{
    uint32_t latent = l.latent_dim;
    if (format == DN_KV_BF16)
        return __bfloat162float(
            *(const __nv_bfloat16 *)(page + i / 64 * DN_MLA_BLOCK + dn_mla_swizzled(token, i % 64 / 8) + i % 8 * 2));
    float scale = *(const float *)(page + l.format[DN_KV_FP8].k_scale_offset + token * 4);
    if (i >= latent) {
        i -= latent;
        return (scale == 0 ? 1 : scale) *
               __bfloat162float(*(const __nv_bfloat16 *)(page + l.format[DN_KV_FP8].v_offset +
                                                         dn_mla_swizzled(token, i / 8) + i % 8 * 2));
    }
    __half_raw h = __nv_cvt_fp8_to_halfraw(page[dn_mla_fp8_at(latent, token, i)], __NV_E4M3);
    return __half2float(h) * scale;
}

/* A row (token) of a step reads ceil((position + 1) / 64) tiles in this many splits: of its own length alone, so that
 * its bits don't depend on its company. Split j is tiles [j * tiles / n, (j + 1) * tiles / n). A split costs a partial
 * result of 64 KB, written and read; a lone sequence wants many. */
enum { DN_MLA_MAX_SPLITS = 128 };
static __host__ __device__ __forceinline__ uint32_t dn_mla_splits(uint32_t tiles)
{
    uint32_t n = tiles <= 32     ? 4
                 : tiles <= 256  ? 8
                 : tiles <= 2048 ? 16
                                 : (tiles + DN_MLA_MAX_SPLITS - 1) / DN_MLA_MAX_SPLITS;
    return (tiles + n - 1) / n;
}
/* The most splits that rows with so many tiles in all can have: see the lines of dn_mla_splits(). */
static inline uint64_t dn_mla_splits_bound(uint64_t rows, uint64_t tiles)
{
    uint64_t bound[] = {rows + tiles / 4, rows * 9 + tiles / 8, rows * 33 + tiles / 16, rows * DN_MLA_MAX_SPLITS};
    uint64_t least = bound[0];
    for (int i = 1; i < 4; i++)
        least = bound[i] < least ? bound[i] : least;
    return least;
}

/* For GPUs and sizes that the tuned kernels aren't for (mla_simple.cu): a block a row and head. */
struct dn_mla_simple {
    const void *q, *arena;
    void *out;
    uint32_t n_heads, latent_dim, layer;
    uint32_t nope_dim, v_dim; /* 0: absorbed, q and out are in the latent space */
    struct dn_weights w_k, w_v;
    float scale_log2;
    struct dn_kv_layout l;
};
void dn_cuda_mla_simple(struct dn_cuda *c, const struct dn_mla_simple *p, const char *what);

#endif
