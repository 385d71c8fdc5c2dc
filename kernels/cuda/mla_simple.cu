/* MLA without assumptions: any GPU, any latent of a multiple of 64 up to 512, any head sizes. Slow: what is asked of it
 * is to be right where the tuned kernels don't exist, for small models and other GPUs.
 *
 * A block has one row and head. Un-absorbed queries are first taken to the latent space, q~ = q_nope W_k, and the
 * result is taken back by W_v: the same numbers in another order. Thread t scores token t of each 128 and sums columns
 * t, t + 128, ...
 */
#include "kernels/cuda/mla.cuh"

enum { THREADS = 128, COLUMNS = DN_MLA_LATENT / THREADS };

static __global__ void __launch_bounds__(THREADS)
    simple_kernel(const __grid_constant__ struct dn_mla_simple a, const __grid_constant__ struct dn_cuda_step s)
{
    __shared__ float q[DN_MLA_LATENT + DN_MLA_ROPE], p[THREADS], red[THREADS / 32];
    uint32_t t = threadIdx.x, row = blockIdx.x, head = blockIdx.y;
    dn_start_next();
    dn_wait_previous();
    if (row >= s.count[DN_COUNT_TOKENS])
        return;
    uint32_t seq = (uint32_t)s.token_seq[row], n = (uint32_t)s.position[row] + 1;
    int format = s.kv_format[seq];
    bool bad = s.bad[seq] != 0;
    uint32_t width = (a.v_dim ? a.nope_dim : a.latent_dim) + DN_MLA_ROPE, out_width = a.v_dim ? a.v_dim : a.latent_dim;
    size_t at = (size_t)row * a.n_heads + head;
    const __nv_bfloat16 *from = (const __nv_bfloat16 *)a.q + at * width;
    __nv_bfloat16 *out = (__nv_bfloat16 *)a.out + at * out_width;
    for (uint32_t i = t; i < a.latent_dim + DN_MLA_ROPE; i += THREADS) {
        if (i >= a.latent_dim || !a.v_dim) {
            q[i] = __bfloat162float(from[i >= a.latent_dim ? i - a.latent_dim + width - DN_MLA_ROPE : i]);
        } else {
            float sum = 0;
            for (uint32_t k = 0; k < a.nope_dim; k++)
                sum += __bfloat162float(from[k]) * dn_weight(a.w_k, head * a.nope_dim + k, i);
            q[i] = sum;
        }
    }
    float acc[COLUMNS] = {0}, top = -INFINITY, sum = 0;
    for (uint32_t base = 0; base < n && !bad; base += THREADS) {
        float x = -INFINITY;
        __syncthreads();
        if (base + t < n) {
            uint32_t id = s.page[(uint32_t)s.page_start[seq] + (base + t) / DN_MLA_TOKENS];
            const uint8_t *page = dn_mla_page(a.l, a.arena, format, id, a.layer);
            x = 0;
            for (uint32_t i = 0; i < a.latent_dim + DN_MLA_ROPE; i++)
                x += q[i] * dn_mla_value(a.l, page, format, t % DN_MLA_TOKENS, i);
            x *= a.scale_log2;
        }
        float m = x;
        for (int i = 16; i; i /= 2)
            m = fmaxf(m, __shfl_xor_sync(0xffffffffu, m, i));
        if (t % 32 == 0)
            red[t / 32] = m;
        __syncthreads();
        m = fmaxf(top, fmaxf(fmaxf(red[0], red[1]), fmaxf(red[2], red[3])));
        float alpha = m == -INFINITY ? 1 : exp2f(top - m);
        top = m;
        p[t] = base + t < n ? exp2f(x - (m == -INFINITY ? 0 : m)) : 0;
        __syncthreads();
        sum *= alpha;
        for (int k = 0; k < COLUMNS; k++)
            acc[k] *= alpha;
        for (uint32_t j = 0; j < THREADS && base + j < n; j++) {
            uint32_t id = s.page[(uint32_t)s.page_start[seq] + (base + j) / DN_MLA_TOKENS];
            const uint8_t *page = dn_mla_page(a.l, a.arena, format, id, a.layer);
            sum += p[j];
            for (uint32_t k = 0; k < COLUMNS; k++)
                if (k * THREADS + t < a.latent_dim)
                    acc[k] += p[j] * dn_mla_value(a.l, page, format, j % DN_MLA_TOKENS, k * THREADS + t);
        }
    }
    __syncthreads();
    for (uint32_t k = 0; k < COLUMNS; k++)
        if (k * THREADS + t < a.latent_dim)
            q[k * THREADS + t] = bad ? 0 : acc[k] / sum;
    __syncthreads();
    for (uint32_t i = t; i < out_width; i += THREADS) {
        float x = 0;
        if (!a.v_dim)
            x = q[i];
        for (uint32_t k = 0; a.v_dim && k < a.latent_dim; k++)
            x += q[k] * dn_weight(a.w_v, head * a.v_dim + i, k);
        out[i] = __float2bfloat16_rn(bad ? 0 : x);
    }
}

void dn_cuda_mla_simple(struct dn_cuda *c, const struct dn_mla_simple *p, const char *what)
{
    dn_launch(c, what, simple_kernel, dim3(c->n_tokens, p->n_heads), dim3(THREADS), 0, *p, c->step);
}
