/* Experts: the prefill kernels (tiles of up to 32 tokens; experts.cuh has the design), and plain ones for GPUs without
 * bulk copies or with little shared memory. Those read weights and rows straight from global memory: correct, not fast.
 */
#include "kernels/cuda/experts.cuh"

void dn_cuda_experts_prefill(struct dn_cuda *c, struct experts_args *p, const struct dn_weights *w)
{
    EXPERTS_BY_FORMAT(experts_launch, w, 4, c, p, w);
}

enum { PLAIN_THREADS = DN_TILE_STRIPS * 32 };

/* 16 rows of two parts x 8 tokens over all k; b: this lane's token's row, NULL if there is none. */
template <int F, bool SYM, bool SBF16>
static __device__ void plain_product(float (&acc)[2][4], const struct dn_weights &w, const uint8_t *const at[2],
                                     const int strip[2], const __nv_bfloat16 *b_row, int lane)
{
    for (uint32_t half = 0; half < w.n_tiles * 2; half++) {
        struct experts_raw<F> raw[2];
        for (int part = 0; part < 2; part++) {
            const uint8_t *tile = at[part] + (size_t)(half / 2) * w.tile_bytes;
            dn_a_load<F>(raw[part].a, tile, strip[part], half % 2, lane);
            if constexpr (F == DN_W_FP8)
                raw[part].fp8 = dn_a_fp8_scale(tile, strip[part], lane);
            else if constexpr (F != DN_W_BF16)
                raw[part].scale = dn_a_scales<F>(tile, false, strip[part], half % 2, lane);
            if constexpr (F == DN_W_INT4 && !SYM)
                raw[part].offset = dn_a_scales<F>(tile, true, strip[part], half % 2, lane);
        }
#pragma unroll
        for (int g = 0; g < 2; g++) {
            uint32_t b[4];
            float sum[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t k = half * 64 + g * 32 + i * 8 + lane % 4 * 2;
                b[i] = b_row && k < w.n_in ? *(const uint32_t *)(b_row + k) : 0;
            }
            experts_sum<F, SYM>(sum, b);
#pragma unroll
            for (int part = 0; part < 2; part++) {
                struct experts_group group;
                experts_convert<F, SYM, SBF16>(group, raw[part], g);
                experts_add<F, SYM>(acc[part], group, b, sum);
            }
        }
    }
}

template <int F, bool SYM, bool SBF16, int UNUSED>
static __global__ void __launch_bounds__(PLAIN_THREADS)
    plain_kernel(const __grid_constant__ struct experts_args p, bool bf16_part)
{
    dn_wait_previous();
    dn_start_next();
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    bool down = p.phases == 2;
    const struct dn_weights &w = down ? p.down : p.gate_up;
    uint32_t blocks = down ? p.blocks2 : p.blocks1, n_items = *p.list.n_tiles * blocks;
    bool three = !down && p.parts == 3;
    for (uint32_t item = blockIdx.x; item < n_items; item += gridDim.x) {
        struct experts_tile t = p.list.tile[item / blocks];
        uint32_t block = item % blocks;
        const uint8_t *parts[3];
        experts_parts(p, down, t.expert, block, parts);
        const uint8_t *at[2] = {parts[0], parts[three && warp >= 2 ? 2 : 1]};
        int strip[2] = {warp, three ? warp ^ 2 : warp};
        for (uint32_t n0 = 0; n0 < t.n; n0 += 8) {
            uint32_t col = n0 + lane / 4;
            const __nv_bfloat16 *b = NULL;
            if (col < t.n)
                b = down ? p.h + (size_t)(t.first + col) * w.n_in : p.a + (size_t)p.list.token[t.first + col] * w.n_in;
            float acc[2][4] = {};
            plain_product<F, SYM, SBF16>(acc, w, at, strip, b, lane);
            for (int i = 0; i < 8; i++)
                acc[i / 4][i % 4] = experts_unscaled<F>(acc[i / 4][i % 4]);
            for (int i = 0; i < 4; i++) {
                uint32_t row = warp * 16 + lane / 4 + i / 2 * 8, c = n0 + lane % 4 * 2 + i % 2;
                if (c >= t.n)
                    continue;
                size_t to = t.first + c;
                if (!down && block * DN_TILE_ROWS + row < p.ff)
                    p.h[to * p.ff + block * DN_TILE_ROWS + row] =
                        __float2bfloat16_rn(__fmul_rn(experts_silu(acc[0][i]), acc[1][i]));
                for (int part = 0; part < 2 && down; part++) {
                    uint32_t r = (block * 2 + part) * DN_TILE_ROWS + row;
                    if (r >= p.dim)
                        continue;
                    if (bf16_part)
                        ((__nv_bfloat16 *)p.part)[to * p.dim + r] = __float2bfloat16_rn(acc[part][i]);
                    else
                        ((float *)p.part)[to * p.dim + r] = acc[part][i];
                }
            }
        }
    }
}
template <int F, bool SYM, bool SBF16, int UNUSED>
static void plain_launch(struct dn_cuda *c, const struct experts_args *p, bool bf16_part)
{
    dn_launch(c, "experts", plain_kernel<F, SYM, SBF16, UNUSED>, dim3((unsigned)c->n_sms * 8), dim3(PLAIN_THREADS), 0,
              *p, bf16_part);
}
void dn_cuda_experts_plain(struct dn_cuda *c, const struct experts_args *p, const struct dn_weights *w, bool bf16_part)
{
    EXPERTS_BY_FORMAT(plain_launch, w, 0, c, p, bf16_part);
}
