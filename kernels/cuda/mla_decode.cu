/* Absorbed MLA: out[t][h] = softmax(scale * q[t][h] . [c | k_rope][0..position[t]]) c, one latent head for all query
 * heads.
 *
 * Work: an item is (row, 64 heads, split of the row's tiles of 64 tokens); items are numbered rows first, a block (one
 * an SM) has consecutive ones, so that a row's queries serve several. A row is one token: with several tokens of a
 * sequence each has its own items. Splits follow from the row's length (dn_mla_splits()). A row with several splits
 * leaves bf16 partial results (normalised; their rounding is averaged down) and log2 of their sums in the workspace; a
 * second kernel merges.
 *
 * Four warpgroups, none of which converts anything for another (mla_decode.cuh: items and copies):
 *   8-15  scores (mla_decode_scores.cuh): warpgroups take tiles in turn, S = Q K^T, softmax, P in 16 bits to shared
 *         memory. Each has its own next tile copied. The last warp finds the items.
 *   0-7   values (mla_decode_values.cuh): O += P V, 256 of the 512 dimensions each, and an item's result.
 * So the scores of two tiles and the product of a third are on their way at a time. A tile's FP8 codes are operands as
 * they lie in the page: e4m3 products with queries of two terms, and as values in f16 through registers.
 *
 * Shared memory (plan, struct tail): BF16: Q 72 KB, two tiles of 72 KB, P 8 KB; FP8: Q 72 KB, three tiles of 40 KB, two
 * P. A block whose next item has the other format waits for all its warps.
 *
 * Clocks of a tile: BF16: tensor pipe 1152 + 1024, memory 3600 at 1.7 GHz. FP8: tensor pipe 1152 + 1024, shared memory
 * 1150 (scores) + 512 + 256 (values) + 330 (copy) + 130 (P), memory 2000.
 *
 * Floor: 1152 or 644 bytes a token of context. Reached at 64 x 8192: BF16 202 us, 64 % of it, FP8 202 us, 36 %; in a
 * long run, with lower clocks, 225 and 210. What limits: a tile's chain (copy, scores, softmax, P V) over three stages,
 * two in BF16, in which no unit is more than half busy: README.md.
 */
#include "kernels/cuda/mla_decode_values.cuh"

enum { MERGE_THREADS = 256, MERGE_HEADS = MERGE_THREADS / 64, AT_ONCE = 16 }; /* the merging kernel's */

#if DN_HOPPER

static __device__ __forceinline__ void zero_item(const struct args &a, const struct item &it, uint32_t heads,
                                                 uint32_t t)
{
    uint4 *out = (uint4 *)(a.out + ((size_t)(a.row0 + it.row) * a.n_heads + it.head_block * HEADS) * DN_MLA_LATENT);
    for (uint32_t i = t; i < heads * DN_MLA_LATENT / 8; i += VALUE_THREADS)
        out[i] = make_uint4(0, 0, 0, 0);
}

/* All value warps: t = 0..255. */
static __device__ __forceinline__ void value_items(const struct args &a, uint32_t shared, struct tail *tail, uint32_t t)
{
    uint32_t v = __shfl_sync(0xffffffffu, t / 128, 0); /* in a uniform register */
    uint32_t n[2] = {0, 0};
    int format = -1;
    for (uint32_t index = 0;; index++) {
        const struct item *it = wait_item(tail, index);
        if (!it->n_splits)
            break;
        if (it->bad) {
            zero_item(a, *it, min(a.n_heads - it->head_block * HEADS, (uint32_t)HEADS), thread_anew());
        } else {
            change_format(&format, it->format);
            if (format == DN_KV_FP8)
                value_item<true>(a, *it, tail, shared, n[1], v);
            if (format == DN_KV_BF16)
                value_item<false>(a, *it, tail, shared, n[0], v);
            n[0] += format == DN_KV_BF16 ? it->tile1 - it->tile0 : 0;
            n[1] += format == DN_KV_FP8 ? it->tile1 - it->tile0 : 0;
            dn_sync(BAR_ALL, VALUE_THREADS); /* both have read the sums' inverses */
        }
        drop_item(tail, index);
    }
}

static __device__ __forceinline__ void init_barriers(struct tail *tail)
{
    for (int i = 0; i < RING; i++) {
        dn_barrier_init(dn_shared(&tail->item_full[i]), 1);
        dn_barrier_init(dn_shared(&tail->item_empty[i]), VALUE_WARPS + SCORE_WARPS);
    }
    for (int i = 0; i < 2; i++) {
        for (int k = 0; k < 3; k++) {
            dn_barrier_init(dn_shared(&tail->stage_full[i][k]), 1);
            dn_barrier_init(dn_shared(&tail->stage_empty[i][k]), VALUE_WARPS);
        }
        for (int k = 0; k < 2; k++) {
            dn_barrier_init(dn_shared(&tail->p_full[i][k]), SCORE_WARPS / 2);
            dn_barrier_init(dn_shared(&tail->p_empty[i][k]), VALUE_WARPS);
        }
        for (int k = 0; k < 4; k++)
            dn_barrier_init(dn_shared(&tail->reference_full[i][k]), 1);
    }
    dn_fence_async();
}

static __device__ __forceinline__ void decode(const struct args &a)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    struct tail *tail = (struct tail *)(memory + TAIL_AT);
    uint32_t t = threadIdx.x;
    if (t == 0)
        init_barriers(tail);
    __syncthreads();
    dn_start_next();
    dn_wait_previous();
    uint32_t count = a.s.count[DN_COUNT_TOKENS], n_rows = count > a.row0 ? min(count - a.row0, a.n_rows) : 0;
    if (t < VALUE_THREADS) {
        dn_registers_up<VALUE_REGISTERS>();
        value_items(a, dn_shared(memory), tail, t);
    } else {
        dn_registers_down<SCORE_REGISTERS>();
        score_items(a, n_rows, memory, dn_shared(memory), tail, t - VALUE_THREADS);
    }
}

static __device__ __forceinline__ void add_unit(float (&acc)[8], uint4 v, float x)
{
    const uint32_t u[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        acc[2 * i] += x * __uint_as_float(u[i] << 16);
        acc[2 * i + 1] += x * __uint_as_float(u[i] & 0xffff0000u);
    }
}

static __device__ __forceinline__ uint4 load_now(const uint4 *p)
{
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p));
    return v;
}

/* Rows with several splits: 64 threads a head, 16 bytes of a partial result each. */
static __device__ __forceinline__ void merge(const struct args &a)
{
    uint32_t row = blockIdx.x, lane = threadIdx.x % 32, unit = threadIdx.x % 64;
    uint32_t h = blockIdx.z * MERGE_HEADS + threadIdx.x / 64, head = blockIdx.y * HEADS + h;
    dn_start_next();
    dn_wait_previous();
    if (a.row0 + row >= a.s.count[DN_COUNT_TOKENS] || head >= a.n_heads)
        return;
    uint32_t seq = (uint32_t)a.s.token_seq[a.row0 + row], tokens = (uint32_t)a.s.position[a.row0 + row] + 1,
             first = a.firsts[row * a.n_head_blocks + blockIdx.y];
    uint32_t splits = dn_mla_splits((tokens + DN_MLA_TOKENS - 1) / DN_MLA_TOKENS);
    if (splits == 1 || a.s.bad[seq])
        return;
    const float *sums = a.sums + (size_t)first * HEADS + h;
    float x[DN_MLA_MAX_SPLITS / 32], top = -INFINITY, sum = 0, acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
#pragma unroll
    for (uint32_t i = 0; i < DN_MLA_MAX_SPLITS / 32; i++)
        x[i] = i * 32 + lane < splits ? __ldcg(sums + (size_t)(i * 32 + lane) * HEADS) : -INFINITY;
    struct unit u = find_unit(a.s.kv_format[seq], h, unit);
    const uint4 *from = (const uint4 *)(a.partial + (size_t)first * PARTIAL) + u.at;
    uint4 v[AT_ONCE];
#pragma unroll
    for (uint32_t j = 0; j < AT_ONCE; j++)
        v[j] = load_now(from + (size_t)min(j, splits - 1) * (PARTIAL / 8));
#pragma unroll
    for (uint32_t i = 0; i < DN_MLA_MAX_SPLITS / 32; i++)
        top = fmaxf(top, x[i]);
    for (int i = 16; i; i /= 2)
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
#pragma unroll
    for (uint32_t i = 0; i < DN_MLA_MAX_SPLITS / 32; i++)
        sum += x[i] = exp2_fast(x[i] - top);
    for (int i = 16; i; i /= 2)
        sum += __shfl_xor_sync(0xffffffffu, sum, i);
#pragma unroll
    for (uint32_t i = 0; i < DN_MLA_MAX_SPLITS / 32; i++)
#pragma unroll 1
        for (uint32_t j0 = 0; j0 < 32 && i * 32 + j0 < splits; j0 += AT_ONCE) {
#pragma unroll
            for (uint32_t j = 0; j < AT_ONCE; j++)
                add_unit(acc, v[j], __shfl_sync(0xffffffffu, x[i], j0 + j));
            if (i * 32 + j0 + AT_ONCE < splits)
#pragma unroll
                for (uint32_t j = 0; j < AT_ONCE; j++)
                    v[j] = load_now(from + (size_t)min(i * 32 + j0 + AT_ONCE + j, splits - 1) * (PARTIAL / 8));
        }
    __nv_bfloat16 *to = a.out + ((size_t)(a.row0 + row) * a.n_heads + head) * DN_MLA_LATENT + u.column;
#pragma unroll
    for (uint32_t i = 0; i < 4; i++)
        *(uint32_t *)(to + u.step * i) = pack_bf16(acc[2 * i] / sum, acc[2 * i + 1] / sum);
}

#endif

static __global__ void __launch_bounds__(MERGE_THREADS) merge_kernel(const __grid_constant__ struct args a)
{
#if DN_HOPPER
    merge(a);
#endif
}

static __global__ void __launch_bounds__(THREADS, 1) decode_kernel(const __grid_constant__ struct args a)
{
#if DN_HOPPER
    decode(a);
#endif
}

void dn_cuda_mla_attention(struct dn_device *d, const struct dn_mla_attention *p)
{
    struct dn_cuda *c = dn_cuda(d);
    if (p->rope_dim != DN_MLA_ROPE || p->latent_dim % 64 || p->latent_dim > DN_MLA_LATENT ||
        p->layout->page_tokens != DN_MLA_TOKENS || p->n_heads > 65535) {
        dn_cuda_failed(c, cudaErrorNotSupported, "mla_attention: sizes");
        return;
    }
    struct args a = {};
    a.q = (const __nv_bfloat16 *)p->q;
    a.out = (__nv_bfloat16 *)p->out;
    a.arena = p->arena;
    a.n_heads = p->n_heads;
    a.n_head_blocks = (p->n_heads + HEADS - 1) / HEADS;
    a.layer = p->layer;
    a.scale_log2 = p->scale * 1.44269504088896341f;
    a.l = *p->layout;
    a.s = c->step;
    if (c->arch != 90 || p->latent_dim != DN_MLA_LATENT) {
        struct dn_mla_simple simple = {};
        simple.q = p->q, simple.out = p->out, simple.arena = p->arena;
        simple.n_heads = p->n_heads, simple.latent_dim = p->latent_dim, simple.layer = p->layer;
        simple.scale_log2 = a.scale_log2;
        simple.l = *p->layout;
        dn_cuda_mla_simple(c, &simple, "mla_attention");
        return;
    }
    /* In a prefill step every token reads a whole context: some rows at a time, in 256 MB of partial results. */
    uint64_t per_launch = c->n_tokens, items;
    if (c->kind == DN_STEP_PREFILL) {
        items = PREFILL_ITEMS;
        per_launch = items / (dn_mla_splits_bound(1, c->max_pages) * a.n_head_blocks);
    } else {
        items = dn_mla_splits_bound(per_launch, c->conf.limits.pages) * a.n_head_blocks;
    }
    if (per_launch < 1) {
        dn_cuda_failed(c, cudaErrorNotSupported, "mla_attention: heads");
        return;
    }
    uint8_t *memory =
        (uint8_t *)dn_cuda_workspace(c, items * (PARTIAL * sizeof(__nv_bfloat16) + (HEADS + 1) * sizeof(float)));
    a.partial = (__nv_bfloat16 *)memory;
    a.sums = (float *)(memory + items * PARTIAL * sizeof(__nv_bfloat16));
    a.firsts = (uint32_t *)(a.sums + items * HEADS); /* no more than there are items */
    for (uint32_t row = 0; row < c->n_tokens; row += (uint32_t)per_launch) {
        a.row0 = row;
        a.n_rows = (uint32_t)(c->n_tokens - row < per_launch ? c->n_tokens - row : per_launch);
        dn_launch(c, "mla_attention", decode_kernel, dim3(c->n_sms), dim3(THREADS), SHARED_BYTES, a);
        dn_launch(c, "mla_attention", merge_kernel, dim3(a.n_rows, a.n_head_blocks, HEADS / MERGE_HEADS),
                  dim3(MERGE_THREADS), 0, a);
    }
}
