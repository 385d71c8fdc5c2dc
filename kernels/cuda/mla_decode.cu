/* Absorbed MLA: out[t][h] = softmax(scale * q[t][h] . [c | k_rope][0..position[t]]) c, one latent head for all query
 * heads.
 *
 * Work: an item is (row, 64 heads, split of the row's tiles of 64 tokens); items are numbered rows first, item i is of
 * block i % gridDim.x, one block an SM. A row is one token: with several tokens of a sequence each has its own items.
 * Splits follow from the row's length (dn_mla_splits()). A row with several splits leaves bf16 partial results
 * (normalised; their rounding is averaged down) and log2 of their sums in the workspace; each split's block later
 * merges its share of the row's heads, as soon as it sees all splits counted, at the latest when it has no items left.
 * All blocks are resident, so that waiting ends.
 *
 * Warps 0-3, 4-7 (w = 0, 1): per tile S = Q K^T (64 heads x 64 tokens), each over half of k (18 steps of m64n64k16);
 * the halves are exchanged, so that w has S of tokens 32w..32w+31; row maxima are exchanged; P goes to shared memory in
 * 16 bits; O[64][256w..] += P V (4 steps of m64n256k16). Tensor pipe 1152 + 1024 clocks, shared memory about 2700.
 * Warps 8-11: BF16: one thread copies a tile (one bulk copy), FP8: 128 threads turn e4m3 into f16 times the token's
 * scale, one tile ahead in registers: 2^-10 relative with the rounding of the scale, a fourth of what bf16 would add to
 * the 2^-4 of e4m3. Q, rope keys (clamped to +-65504) and P are f16 then, and all else is as in BF16.
 *
 * Shared memory: Q 72 KB, two tiles 144 KB, P 8 KB, then struct tail. The exchange uses P (by w = 0) and the tile's
 * block of rope keys (by w = 1), which nobody reads any more.
 *
 * Floor: 1152 or 644 bytes a token of context. Reached at 64 x 8192: BF16 221 us, 59 % of it; FP8 276 us, 26 %: four
 * warps convert more slowly than eight consume (README.md).
 */
#include "kernels/cuda/mla_decode.cuh"

#if DN_HOPPER

/* ---- Consumers: `t` = 0..255 ---- */

/* Q is copied while the tensor pipe finishes the item before. Heads beyond the last are zeros. A thread has chunks sub
 * + 4i of its row's 72: addresses are constants apart, and eight lanes store to eight rows. */
static __device__ __forceinline__ void copy_q(const struct args &a, const struct item &it, uint32_t shared, uint32_t t)
{
    uint32_t heads = min(a.n_heads - it.head_block * HEADS, (uint32_t)HEADS);
    uint32_t row = t / 32 * 8 + t % 8, sub = t / 8 % 4, bytes = row < heads ? 16 : 0;
    const uint4 *q =
        (const uint4 *)(a.q + ((size_t)(a.row0 + it.row) * a.n_heads + it.head_block * HEADS + min(row, heads - 1)) *
                                  BLOCKS * 64) +
        sub;
    uint32_t even = shared + Q_AT + dn_mla_swizzled(row, sub), odd = shared + Q_AT + dn_mla_swizzled(row, sub + 4);
#pragma unroll
    for (int i = 0; i < 2 * BLOCKS; i++)
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((i % 2 ? odd : even) + i / 2 * DN_MLA_BLOCK),
                     "l"(q + 4 * i), "r"(bytes)
                     : "memory");
}
/* Waits for one's own copies; f16 for FP8. */
static __device__ __forceinline__ void finish_q(const struct item &it, uint32_t shared, uint32_t t)
{
    uint32_t row = t / 32 * 8 + t % 8, sub = t / 8 % 4;
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (it.format == DN_KV_FP8) {
#pragma unroll 6
        for (int i = 0; i < 2 * BLOCKS; i++) {
            uint32_t at = shared + Q_AT + i / 2 * DN_MLA_BLOCK + dn_mla_swizzled(row, sub + i % 2 * 4);
            uint4 v = load_shared(at);
            store_shared(
                at, make_uint4(bf16_to_f16(v.x), bf16_to_f16(v.y), bf16_to_f16(v.z), bf16_to_f16(v.w)));
        }
    }
}

/* Rows of a tile from `tokens` on, which a copy left as they were: zero, since 0 * NaN is NaN. */
static __device__ __forceinline__ void zero_rows(uint32_t tile, uint32_t tokens, uint32_t t)
{
    for (uint32_t i = t; i < (DN_MLA_TOKENS - tokens) * 64; i += CONSUMERS)
        store_shared(tile + i % 8 * DN_MLA_BLOCK + (tokens + i / 64) * 128 + i / 8 % 8 * 16, make_uint4(0, 0, 0, 0));
}

/* S of all tokens over half of k, then of the warpgroup's 32 tokens over all. */
template <bool fp8>
static __device__ __forceinline__ void scores(uint32_t shared, uint32_t tile, uint32_t tokens, bool first, uint32_t w,
                                              uint32_t t, float (&s)[16])
{
    float d[32];
    /* Blocks 0-3 and half of 4, or 5-8 and the other half; operand() counts 16 bytes in its low bits. */
    uint64_t qa = dn_wgmma_operand(shared + Q_AT + w * 5 * DN_MLA_BLOCK, 16, 1024);
    uint64_t kb = dn_wgmma_operand(tile + w * 5 * DN_MLA_BLOCK, 16, 1024);
    uint64_t q4 = dn_wgmma_operand(shared + Q_AT + 4 * DN_MLA_BLOCK + w * 64, 16, 1024);
    uint64_t k4 = dn_wgmma_operand(tile + 4 * DN_MLA_BLOCK + w * 64, 16, 1024);
    dn_wgmma_fence();
#pragma unroll
    for (uint32_t i = 0; i < 2 * BLOCKS; i++) {
        uint32_t at = i < 16 ? (i / 4 * DN_MLA_BLOCK + i % 4 * 32) / 16 : (i - 16) * 2;
        if (fp8)
            dn_wgmma_n64_f16(d, (i < 16 ? qa : q4) + at, (i < 16 ? kb : k4) + at, i != 0);
        else
            dn_wgmma_n64_bf16(d, (i < 16 ? qa : q4) + at, (i < 16 ? kb : k4) + at, i != 0);
    }
    dn_wgmma_commit();
    dn_wgmma_wait<0>();
    if (!fp8 && tokens < DN_MLA_TOKENS)
        zero_rows(tile, tokens, t);
    uint32_t own = shared + P_AT, other = tile + (BLOCKS - 1) * DN_MLA_BLOCK, lane = (t & 127) * 16;
    if (w == 0) {
        if (!first)
            dn_sync(BAR_FREE, CONSUMERS); /* P has been read by w = 1 */
        for (int i = 0; i < 4; i++)
            store_shared(own + i * 2048 + lane,
                         make_uint4(__float_as_uint(d[16 + 4 * i]), __float_as_uint(d[17 + 4 * i]),
                                    __float_as_uint(d[18 + 4 * i]), __float_as_uint(d[19 + 4 * i])));
    } else {
        for (int i = 0; i < 4; i++)
            store_shared(other + i * 2048 + lane,
                         make_uint4(__float_as_uint(d[4 * i]), __float_as_uint(d[1 + 4 * i]),
                                    __float_as_uint(d[2 + 4 * i]), __float_as_uint(d[3 + 4 * i])));
    }
    dn_sync(BAR_SUMS, CONSUMERS);
    uint32_t from = w == 0 ? other : own;
    for (int i = 0; i < 4; i++) {
        uint4 v = load_shared(from + i * 2048 + lane);
        s[4 * i] = (w == 0 ? d[4 * i] : d[16 + 4 * i]) + __uint_as_float(v.x);
        s[4 * i + 1] = (w == 0 ? d[4 * i + 1] : d[17 + 4 * i]) + __uint_as_float(v.y);
        s[4 * i + 2] = (w == 0 ? d[4 * i + 2] : d[18 + 4 * i]) + __uint_as_float(v.z);
        s[4 * i + 3] = (w == 0 ? d[4 * i + 3] : d[19 + 4 * i]) + __uint_as_float(v.w);
    }
}

/* State of a thread's two rows. */
struct rows {
    float max[2], sum[2]; /* sum: of the thread's own columns */
};

/* Turns scores into P; alpha is what the accumulators must be multiplied by. */
template <bool fp8>
static __device__ __forceinline__ void softmax(const struct args &a, uint32_t shared, struct tail *tail, uint32_t tokens,
                                               uint32_t w, uint32_t t, float (&s)[16], struct rows *r,
                                               float (&alpha)[2])
{
    uint32_t lane = t & 31, row = (t & 127) / 32 * 16 + lane / 4, column = 32 * w + lane % 4 * 2;
    float top[2] = {-INFINITY, -INFINITY};
    for (int i = 0; i < 16; i++) {
        uint32_t c = column + i / 4 * 8 + i % 2;
        s[i] *= a.scale_log2;
        if (tokens < DN_MLA_TOKENS && c >= tokens)
            s[i] = -INFINITY;
        top[i / 2 % 2] = fmaxf(top[i / 2 % 2], s[i]);
    }
    for (int i = 0; i < 2; i++) {
        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 1));
        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 2));
        if (lane % 4 == 0)
            tail->max[w][row + 8 * i] = top[i];
    }
    dn_sync(BAR_MAX, CONSUMERS);
    float base[2];
    for (int i = 0; i < 2; i++) {
        float m = fmaxf(fmaxf(top[i], tail->max[1 - w][row + 8 * i]), r->max[i]);
        base[i] = m == -INFINITY ? 0 : m;
        alpha[i] = exp2_fast(r->max[i] - m);
        if (m == -INFINITY)
            alpha[i] = 1;
        r->max[i] = m;
        r->sum[i] *= alpha[i];
    }
    uint32_t p = shared + P_AT + row * 128 + lane % 4 * 4;
    for (int i = 0; i < 16; i += 2) {
        int which = i / 2 % 2;
        float x = exp2_fast(s[i] - base[which]), y = exp2_fast(s[i + 1] - base[which]);
        r->sum[which] += x + y;
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(p + which * 1024 + (((4 * w + i / 4) ^ (row & 7)) << 4)),
                     "r"(fp8 ? pack_f16(x, y) : pack_bf16(x, y))
                     : "memory");
    }
}

/* An item's tiles: the accumulators and the rows' state. */
template <bool fp8>
static __device__ __forceinline__ void tiles(const struct args &a, const struct item &it, uint32_t shared,
                                             struct tail *tail, uint32_t n, uint32_t w, uint32_t t, float (&o)[128],
                                             struct rows *r, const struct item &next, bool more)
{
    for (uint32_t i = it.tile0; i < it.tile1; i++, n++) {
        uint32_t b = n & 1, tile = shared + TILE_AT + b * TILE_BYTES, tokens = tile_tokens(it, i);
        bool first = i == it.tile0;
        float s[16], alpha[2];
        dn_barrier_wait(dn_shared(&tail->full[b]), (n >> 1) & 1);
        scores<fp8>(shared, tile, tokens, first, w, t, s);
        softmax<fp8>(a, shared, tail, tokens, w, t, s, r, alpha);
        dn_fence_async();
        if (!first && __any_sync(0xffffffffu, alpha[0] != 1 || alpha[1] != 1))
            for (int k = 0; k < 128; k++)
                o[k] *= alpha[k / 2 % 2];
        dn_sync(BAR_P, CONSUMERS);
        dn_wgmma_fence();
        uint64_t pa = dn_wgmma_operand(shared + P_AT, 16, 1024);
        uint64_t vb = dn_wgmma_operand(tile + w * 4 * DN_MLA_BLOCK, DN_MLA_BLOCK, 1024);
#pragma unroll
        for (uint32_t k = 0; k < 4; k++) {
            if (fp8)
                dn_wgmma_n256_f16(o, pa + k * 2, vb + k * 128, !first || k != 0);
            else
                dn_wgmma_n256_bf16(o, pa + k * 2, vb + k * 128, !first || k != 0);
        }
        dn_wgmma_commit();
        if (more && i + 1 == it.tile1)
            copy_q(a, next, shared, t); /* nobody reads this item's any more */
        dn_wgmma_wait<0>();
        if (w == 1)
            dn_arrive(BAR_FREE, CONSUMERS);
        __syncwarp();
        if (t % 32 == 0)
            dn_barrier_arrive(dn_shared(&tail->empty[b]));
    }
    if (w == 0)
        dn_sync(BAR_FREE, CONSUMERS);
}

/* Divides by the sums. A row's only split goes to its place; partial results stay in the order of the accumulators,
 * [i 2][c 8][thread 256][8]: row half i, columns 256 w + 32 c + 8 j + 2 (lane % 4) + e for values 2 j + e. */
static __device__ __forceinline__ void store_item(const struct args &a, const struct item &it, struct tail *tail,
                                                  uint32_t w, uint32_t t, uint32_t heads, float (&o)[128],
                                                  struct rows *r)
{
    uint32_t lane = t & 31, row = (t & 127) / 32 * 16 + lane / 4;
    for (int i = 0; i < 2; i++) {
        r->sum[i] += __shfl_xor_sync(0xffffffffu, r->sum[i], 1);
        r->sum[i] += __shfl_xor_sync(0xffffffffu, r->sum[i], 2);
        if (lane % 4 == 0)
            tail->max[w][row + 8 * i] = r->sum[i];
    }
    dn_sync(BAR_ALL, CONSUMERS);
#pragma unroll
    for (uint32_t i = 0; i < 2; i++) {
        float sum = tail->max[0][row + 8 * i] + tail->max[1][row + 8 * i], inv = 1.0f / sum;
        if (row + 8 * i >= heads)
            continue;
        if (it.n_splits == 1) {
            __nv_bfloat16 *to =
                a.out + ((size_t)(a.row0 + it.row) * a.n_heads + it.head_block * HEADS + row + 8 * i) * DN_MLA_LATENT +
                256 * w + lane % 4 * 2;
#pragma unroll
            for (int j = 0; j < 32; j++)
                *(uint32_t *)(to + 8 * j) = pack_bf16(o[4 * j + 2 * i] * inv, o[4 * j + 2 * i + 1] * inv);
            continue;
        }
        if (w == 0 && lane % 4 == 0)
            a.sums[(size_t)it.id * HEADS + row + 8 * i] =
                r->max[i] + __log2f(sum);
        uint4 *to = (uint4 *)(a.partial + (size_t)it.id * PARTIAL) + i * 8 * CONSUMERS + t;
#pragma unroll
        for (int c = 0; c < 8; c++) {
            uint32_t v[4];
#pragma unroll
            for (int j = 0; j < 4; j++)
                v[j] = pack_bf16(o[16 * c + 4 * j + 2 * i] * inv, o[16 * c + 4 * j + 2 * i + 1] * inv);
            __stcg(to + c * CONSUMERS, make_uint4(v[0], v[1], v[2], v[3]));
        }
    }
}

static __device__ __forceinline__ uint32_t *item_counter(const struct args &a, const struct item &it)
{
    return a.counters + it.row * a.n_head_blocks + it.head_block;
}

/* From a partial result's begin to the units of a row, as store_item() left them. */
static __device__ __forceinline__ uint32_t row_unit(uint32_t row)
{
    return row / 8 % 2 * 8 * CONSUMERS + row / 16 * 32 + row % 8 * 4;
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

/* The split's share of the row's heads, from all splits' partial results. Shared memory: P's, [heads][splits] weights,
 * then from 2 KB on sums of quarters. */
static __device__ __forceinline__ void merge(const struct args &a, const struct item &it, uint32_t heads, uint8_t *p,
                                             uint32_t t)
{
    uint32_t h0 = it.split * heads / it.n_splits, h1 = (it.split + 1) * heads / it.n_splits, n = h1 - h0;
    uint32_t first = it.id - it.split, lane = t % 32;
    float *weight = (float *)p, *part = (float *)(p + 2048);
    for (uint32_t h = t / 32; h < n; h += CONSUMERS / 32) {
        const float *sums = a.sums + (size_t)first * HEADS + h0 + h;
        float x[DN_MLA_MAX_SPLITS / 32], top = -INFINITY, sum = 0;
        for (uint32_t i = 0; i < DN_MLA_MAX_SPLITS / 32; i++) {
            x[i] = i * 32 + lane < it.n_splits ? __ldcg(sums + (size_t)(i * 32 + lane) * HEADS) : -INFINITY;
            top = fmaxf(top, x[i]);
        }
        for (int i = 16; i; i /= 2)
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, i));
        for (uint32_t i = 0; i < DN_MLA_MAX_SPLITS / 32; i++)
            sum += x[i] = exp2_fast(x[i] - top);
        for (int i = 16; i; i /= 2)
            sum += __shfl_xor_sync(0xffffffffu, sum, i);
        for (uint32_t i = 0; i < DN_MLA_MAX_SPLITS / 32; i++)
            if (i * 32 + lane < it.n_splits)
                weight[h * it.n_splits + i * 32 + lane] = x[i] / sum;
    }
    dn_sync(BAR_ALL, CONSUMERS);
    /* 64 threads a head, a unit of store_item() each; with few heads several groups share one's splits. */
    uint32_t parts = n == 1 ? 4 : n == 2 ? 2 : 1, group = t / 64, k = group % parts, unit = t % 64;
    uint32_t w = unit / 32, c = unit / 4 % 8, column = 256 * w + 32 * c + unit % 4 * 2;
    for (uint32_t h = group / parts; h < n; h += 4 / parts) {
        float acc[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        const uint4 *from = (const uint4 *)(a.partial + (size_t)first * PARTIAL) + row_unit(h0 + h) + c * CONSUMERS +
                            w * 128 + unit % 4;
#pragma unroll 8
        for (uint32_t j = k * it.n_splits / parts; j < (k + 1) * it.n_splits / parts; j++)
            add_unit(acc, __ldcg(from + (size_t)j * (PARTIAL / 8)), weight[h * it.n_splits + j]);
        if (parts > 1) { /* each group has one round here */
            float *mine = part + (h * (parts - 1) + k - 1) * DN_MLA_LATENT + unit;
            for (int i = 0; k && i < 8; i++)
                mine[i * 64] = acc[i];
            dn_sync(BAR_ALL, CONSUMERS);
            for (uint32_t q = 1; k == 0 && q < parts; q++)
                for (int i = 0; i < 8; i++)
                    acc[i] += part[(h * (parts - 1) + q - 1) * DN_MLA_LATENT + unit + i * 64];
            if (k)
                break;
        }
        __nv_bfloat16 *to =
            a.out + ((size_t)(a.row0 + it.row) * a.n_heads + it.head_block * HEADS + h0 + h) * DN_MLA_LATENT + column;
        for (int i = 0; i < 4; i++)
            *(uint32_t *)(to + 8 * i) = pack_bf16(acc[2 * i], acc[2 * i + 1]);
    }
    dn_sync(BAR_ALL, CONSUMERS);
    if (t == 0) /* what was read has arrived; the last one makes it zero */
        asm volatile("red.relaxed.gpu.global.inc.u32 [%0], %1;" ::"l"(item_counter(a, it)), "r"(2 * it.n_splits - 1)
                     : "memory");
}

/* Merges items before `done` in their order, while their rows are complete; waits for them if `wait`. */
static __device__ __forceinline__ void merge_items(const struct args &a, uint32_t n_rows, struct cursor *c,
                                                   uint32_t *id, uint32_t done, bool wait, uint8_t *p,
                                                   struct tail *tail, uint32_t t)
{
    struct item it;
    while (*id < done && find_item(a, n_rows, c, *id, &it)) {
        if (!it.bad && it.n_splits > 1) {
            if (t == 0) {
                uint32_t count;
                do
                    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];"
                                 : "=r"(count)
                                 : "l"(item_counter(a, it))
                                 : "memory");
                while (wait && count < it.n_splits);
                tail->ready = count >= it.n_splits;
            }
            dn_sync(BAR_ALL, CONSUMERS);
            bool ready = tail->ready;
            if (!ready)
                return;
            merge(a, it, min(a.n_heads - it.head_block * HEADS, (uint32_t)HEADS), p, t);
        }
        *id += gridDim.x;
    }
}

static __device__ __forceinline__ void zero_item(const struct args &a, const struct item &it, uint32_t heads,
                                                 uint32_t t)
{
    uint4 *out = (uint4 *)(a.out + ((size_t)(a.row0 + it.row) * a.n_heads + it.head_block * HEADS) * DN_MLA_LATENT);
    for (uint32_t i = t; i < heads * DN_MLA_LATENT / 8; i += CONSUMERS)
        out[i] = make_uint4(0, 0, 0, 0);
}

static __device__ __forceinline__ void consume(const struct args &a, uint32_t n_rows, uint8_t *memory, uint32_t shared,
                                               struct tail *tail, uint32_t t)
{
    uint32_t w = __shfl_sync(0xffffffffu, t / 128, 0), n = 0, merged = blockIdx.x; /* w: in a uniform register */
    struct cursor c = {0, 0}, cm = {0, 0};
    struct item it, next;
    bool more = find_item(a, n_rows, &c, blockIdx.x, &it);
    if (more && !it.bad) {
        copy_q(a, it, shared, t);
        finish_q(it, shared, t);
    }
    dn_fence_async();
    dn_sync(BAR_ALL, CONSUMERS);
    while (more) {
        uint32_t heads = min(a.n_heads - it.head_block * HEADS, (uint32_t)HEADS);
        more = find_item(a, n_rows, &c, it.id + gridDim.x, &next);
        bool q = more && !next.bad;
        if (it.bad) {
            zero_item(a, it, heads, t);
            if (q)
                copy_q(a, next, shared, t);
        } else {
            float o[128];
            struct rows r = {{-INFINITY, -INFINITY}, {0, 0}};
            if (it.format == DN_KV_FP8)
                tiles<true>(a, it, shared, tail, n, w, t, o, &r, next, q);
            else
                tiles<false>(a, it, shared, tail, n, w, t, o, &r, next, q);
            n += it.tile1 - it.tile0;
            store_item(a, it, tail, w, t, heads, o, &r);
        }
        if (q)
            finish_q(next, shared, t);
        dn_fence_async();
        dn_sync(BAR_ALL, CONSUMERS); /* the partial result is written, Q is there */
        if (t == 0 && !it.bad && it.n_splits > 1)
            asm volatile("red.release.gpu.global.inc.u32 [%0], %1;" ::"l"(item_counter(a, it)), "r"(2 * it.n_splits - 1)
                         : "memory");
        merge_items(a, n_rows, &cm, &merged, it.id + 1, !more, memory + P_AT, tail, t);
        it = next;
    }
}

static __device__ __forceinline__ void decode(const struct args &a)
{
    extern __shared__ __align__(1024) uint8_t memory[];
    struct tail *tail = (struct tail *)(memory + TAIL_AT);
    uint32_t t = threadIdx.x;
    if (t == 0) {
        for (int i = 0; i < 2; i++) {
            dn_barrier_init(dn_shared(&tail->full[i]), 1);
            dn_barrier_init(dn_shared(&tail->empty[i]), CONSUMERS / 32);
        }
        dn_fence_async();
    }
    __syncthreads();
    dn_start_next();
    dn_wait_previous();
    uint32_t count = a.s.count[DN_COUNT_TOKENS], n_rows = count > a.row0 ? min(count - a.row0, a.n_rows) : 0;
    if (t >= CONSUMERS) {
        dn_registers_down<120>();
        produce(a, n_rows, dn_shared(memory), tail, t - CONSUMERS);
    } else {
        dn_registers_up<192>();
        consume(a, n_rows, memory, dn_shared(memory), tail, t);
    }
}

#endif

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
    a.counters = c->counters;
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
    if (per_launch < 1 || per_launch * a.n_head_blocks > DN_CUDA_COUNTERS) {
        dn_cuda_failed(c, cudaErrorNotSupported, "mla_attention: heads");
        return;
    }
    uint8_t *memory =
        (uint8_t *)dn_cuda_workspace(c, items * (PARTIAL * sizeof(__nv_bfloat16) + HEADS * sizeof(float)));
    a.partial = (__nv_bfloat16 *)memory;
    a.sums = (float *)(memory + items * PARTIAL * sizeof(__nv_bfloat16));
    for (uint32_t row = 0; row < c->n_tokens; row += (uint32_t)per_launch) {
        a.row0 = row;
        a.n_rows = (uint32_t)(c->n_tokens - row < per_launch ? c->n_tokens - row : per_launch);
        dn_launch(c, "mla_attention", decode_kernel, dim3(c->n_sms), dim3(THREADS), SHARED_BYTES, a);
    }
}
