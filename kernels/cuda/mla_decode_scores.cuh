/* The score warps of MLA decode: S = Q K^T, softmax, P. mla_decode.cu says how it fits together; nobody else includes
 * this.
 *
 * Warpgroups g = 0, 1 take a block's tiles in turn: S[64 heads][64 tokens] in registers, a thread has rows 16 * warp +
 * lane / 4 and + 8. With sc a token's scale (BF16: 1; 2^-64 for a vector of zeros) and head h: y = S log2(e) scale +
 * log2(sc), r = a reference near the largest y so far, w = 2^(y - r), l = sum w / sc and the result is sum w v / l with
 * v as it is stored: the scale of V comes with w. r stays until a tile's largest y is more than 8 above it, so that w
 * <= 256, and accumulators seldom need a factor; it goes from tile to tile, from a warp to the other warpgroup's warp
 * with the same heads. What FP8's w loses below 2^-24 in f16 is less than a code's step in the token that has the
 * largest. Scales of one row may differ by 2^100, no more.
 *
 * BF16: 36 wgmma of 16 values. FP8: 16 of 32 with lo, 16 with hi (K straight from the page), times the tokens' scales,
 * 4 of 16 with the rope keys.
 */
#ifndef DN_KERNELS_CUDA_MLA_DECODE_SCORES_CUH
#define DN_KERNELS_CUDA_MLA_DECODE_SCORES_CUH

#include "kernels/cuda/mla_decode.cuh"

#if DN_HOPPER

static __device__ __forceinline__ float2 load_pair(const float *p)
{
    return *(const float2 *)p;
}

/* A value that is the same in all lanes, in a uniform register: descriptors of wgmma are made there. */
static __device__ __forceinline__ uint32_t uniform(uint32_t x)
{
    return __shfl_sync(0xffffffffu, x, 0);
}

/* ---- Q: every warp has eight heads ---- */

/* Heads beyond the last are zeros. A lane has chunks sub + 4 i of its head's 72: addresses are constants apart, and
 * eight lanes store to eight rows. */
static __device__ __forceinline__ void copy_query(const struct args &a, const struct item &it, uint32_t shared,
                                                  uint32_t t)
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

static __device__ __forceinline__ void split_pair(float a, float b, uint32_t *hi, uint32_t *lo)
{
    __nv_fp8x2_storage_t h = __nv_cvt_float2_to_fp8x2(make_float2(a, b), __NV_SATFINITE, __NV_E4M3);
    __half2_raw r = __nv_cvt_fp8x2_to_halfraw2(h, __NV_E4M3);
    float2 back = __half22float2(*(__half2 *)&r);
    *hi = h;
    *lo = __nv_cvt_float2_to_fp8x2(make_float2(a - back.x, b - back.y), __NV_SATFINITE, __NV_E4M3);
}

/* For e4m3 products: q = 2^e (hi + lo), hi = e4m3(q 2^-e), lo = e4m3(q 2^-e - hi), in place of the eight blocks: 4
 * blocks [64 heads][128 e4m3] of hi, 4 of lo; the rope part bf16, times 2^-e; factors 2^e. e of a head is the least
 * power that brings its largest latent value to 448 or below. A bf16 has 8 significant bits, hi takes 4 and the rest
 * fits lo's 4: exact for values within 2^10 of the largest, an error of 2^-18 of the largest below. A head with a value
 * that is no (finite) number has zeros and a factor of NaN.
 *
 * Lane i has latent values 16i..16i+15 and rope values 2i, 2i+1 of a head, which lie in the rows of that head. */
static __device__ __forceinline__ void split_query(uint8_t *memory, uint32_t t)
{
    enum { LEAST = -60, AT_A_TIME = 4 }; /* of e: rope parts must not overflow; heads */
    uint32_t lane = t % 32;
    __syncwarp();
#pragma unroll 1
    for (uint32_t row = t / 32 * 8; row < t / 32 * 8 + 8; row += AT_A_TIME) {
        uint8_t *from = memory + Q_AT + lane / 4 * DN_MLA_BLOCK, *to = memory + Q_AT + lane / 8 * DN_MLA_BLOCK;
        uint32_t u[AT_A_TIME][8], r[AT_A_TIME], top[AT_A_TIME], odd[AT_A_TIME];
#pragma unroll
        for (uint32_t k = 0; k < AT_A_TIME; k++) {
            uint4 v = *(uint4 *)(from + dn_mla_swizzled(row + k, lane % 4 * 2));
            uint4 w = *(uint4 *)(from + dn_mla_swizzled(row + k, lane % 4 * 2 + 1));
            u[k][0] = v.x, u[k][1] = v.y, u[k][2] = v.z, u[k][3] = v.w;
            u[k][4] = w.x, u[k][5] = w.y, u[k][6] = w.z, u[k][7] = w.w;
            r[k] = *(uint32_t *)(memory + Q_ROPE_AT + dn_mla_swizzled(row + k, lane / 4) + lane % 4 * 4);
        }
#pragma unroll
        for (uint32_t k = 0; k < AT_A_TIME; k++) {
            top[k] = 0;
#pragma unroll
            for (int i = 0; i < 8; i++)
                top[k] = max(top[k], max(u[k][i] & 0x7fff, u[k][i] >> 16 & 0x7fff));
            top[k] = __reduce_max_sync(0xffffffffu, top[k]);
            odd[k] = __reduce_max_sync(0xffffffffu, max(max(r[k] & 0x7fff, r[k] >> 16 & 0x7fff), top[k]));
        }
#pragma unroll
        for (uint32_t k = 0; k < AT_A_TIME; k++) {
            bool finite = odd[k] < 0x7f80;
            /* 448 = 1.75 * 2^8; bf16 1.75 ends in 0x60. */
            int e = max((int)(top[k] >> 7) - 127 - ((top[k] & 0x7f) <= 0x60 ? 8 : 7), (int)LEAST);
            float inv = __uint_as_float((uint32_t)(127 - e) << 23);
            uint32_t hi[4] = {0, 0, 0, 0}, lo[4] = {0, 0, 0, 0};
#pragma unroll
            for (int i = 0; i < 8; i++) {
                uint32_t h, l, x = u[k][i];
                split_pair(__uint_as_float(x << 16) * inv, __uint_as_float(x & 0xffff0000u) * inv, &h, &l);
                hi[i / 2] |= finite ? h << i % 2 * 16 : 0;
                lo[i / 2] |= finite ? l << i % 2 * 16 : 0;
            }
            uint32_t pair = pack_bf16(__uint_as_float(r[k] << 16) * inv, __uint_as_float(r[k] & 0xffff0000u) * inv);
            *(uint4 *)(to + dn_mla_swizzled(row + k, lane % 8)) = make_uint4(hi[0], hi[1], hi[2], hi[3]);
            *(uint4 *)(to + LO_AT + dn_mla_swizzled(row + k, lane % 8)) = make_uint4(lo[0], lo[1], lo[2], lo[3]);
            *(uint32_t *)(memory + Q_ROPE_AT + dn_mla_swizzled(row + k, lane / 4) + lane % 4 * 4) = finite ? pair : 0;
            if (lane == 0)
                *(float *)(memory + FACTOR_AT + (row + k) * 4) =
                    finite ? __uint_as_float((uint32_t)(127 + e) << 23) : __uint_as_float(0x7fc00000u);
        }
    }
}

/* What a thread keeps from tile to tile of an item. */
struct score_rows {
    float factor[2];            /* log2(e) scale, FP8: times 2^e */
    float sum[2], reference[2]; /* of this thread's columns of this warpgroup's tiles */
};

/* 16 steps of 32 bytes of 4 blocks. */
static __device__ __forceinline__ void multiply_codes(float (&s)[32], uint64_t q, uint64_t k)
{
#pragma unroll
    for (uint32_t i = 0; i < 16; i++)
        dn_wgmma_n64_e4m3(s, q + (i / 4 * DN_MLA_BLOCK + i % 4 * 32) / 16, k + (i / 4 * DN_MLA_BLOCK + i % 4 * 32) / 16,
                          1);
}
template <int blocks> static __device__ __forceinline__ void multiply_bf16(float (&s)[32], uint64_t q, uint64_t k)
{
#pragma unroll
    for (uint32_t i = 0; i < 4 * blocks; i++)
        dn_wgmma_n64_bf16(s, q + (i / 4 * DN_MLA_BLOCK + i % 4 * 32) / 16, k + (i / 4 * DN_MLA_BLOCK + i % 4 * 32) / 16,
                          1);
}

/* What a token's scores are multiplied by, log2(sc) and 1 / sc; a token that isn't there has w = 0. */
static __device__ __forceinline__ void token_scales(float *scale, float *log_scale, float *inverse, float raw,
                                                    bool there)
{
    float sc = raw == 0 ? 0x1p-64f : raw, inv;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inv) : "f"(sc)); /* 2^-23 */
    *scale = raw == 0 ? 1 : raw;
    *log_scale = there ? __log2f(sc) : -INFINITY;
    *inverse = there ? inv : 0;
}

/* Pairs of a row of numbers of tokens, four at a time: that many loads are on their way together. */
static __device__ __forceinline__ void load_pairs(float2 (&x)[4], const float *p)
{
#pragma unroll
    for (int j = 0; j < 4; j++)
        x[j] = load_pair(p + 8 * j);
}

/* S to y. Tokens that aren't there: -infinity. */
template <bool fp8>
static __device__ __forceinline__ void exponents(float (&s)[32], const float *scales, const float *log_scale,
                                                 const float (&factor)[2], uint32_t tokens, uint32_t column,
                                                 float (&top)[2])
{
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float2 x[4], y[4];
        if (fp8) {
            load_pairs(x, log_scale + 32 * h + column);
            load_pairs(y, scales + 32 * h + column);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int k = 16 * h + 4 * j + 2 * i;
                s[k] = fp8 ? fmaf(s[k] * y[j].x, factor[i], x[j].x) : s[k] * factor[i];
                s[k + 1] = fp8 ? fmaf(s[k + 1] * y[j].y, factor[i], x[j].y) : s[k + 1] * factor[i];
            }
    }
    if (tokens < DN_MLA_TOKENS) {
#pragma unroll
        for (uint32_t i = 0; i < 32; i++)
            if (i / 4 * 8 + column + i % 2 >= tokens)
                s[i] = -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < 32; i += 2)
        top[i / 2 % 2] = fmaxf(top[i / 2 % 2], fmaxf(s[i], s[i + 1]));
#pragma unroll
    for (int i = 0; i < 2; i++) {
        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 1));
        top[i] = fmaxf(top[i], __shfl_xor_sync(0xffffffffu, top[i], 2));
    }
}

/* The reference of this tile from the last one's; `first` of an item: nothing comes before. alpha: from that to this.
 */
static __device__ __forceinline__ void move_reference(struct tail *tail, uint32_t n, bool first, uint32_t warp,
                                                      uint32_t lane, const float (&top)[2], float (&reference)[2],
                                                      float (&alpha)[2])
{
    uint32_t row = warp * 16 + lane / 4;
    if (n) /* also before an item's first tile: nobody may be two tiles ahead of the other warpgroup */
        dn_barrier_wait(dn_shared(&tail->reference_full[(n - 1) & 1][warp]), (n - 1) >> 1 & 1);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float before = first ? -INFINITY : tail->reference[(n - 1) & 1][row + 8 * i];
        reference[i] = top[i] > before + 8 ? top[i] : before;
        alpha[i] = reference[i] == before ? 1 : exp2_fast(before - reference[i]);
        if (lane % 4 == 0)
            tail->reference[n & 1][row + 8 * i] = reference[i];
    }
    warp_arrive(&tail->reference_full[n & 1][warp]);
}

/* Where a warpgroup's next tile of the same format is, if it is known: in this item or at the beginning of the next. */
struct next_tile {
    uint32_t page, tokens, n; /* page: in page[]; n: of the format */
    bool known;
};
static __device__ __forceinline__ struct next_tile find_next(struct tail *tail, uint32_t index, uint32_t tile,
                                                             uint32_t n)
{
    const struct item *it = &tail->item[index % RING];
    if (tile + 2 < it->tile1)
        return {it->first_page + tile + 2, tile_tokens(it->n_tokens, tile + 2), n + 2, true};
    const struct item *next = wait_item(tail, index + 1);
    uint32_t skip = tile + 2 - it->tile1; /* of the next item's tiles */
    if (!has_tiles(*next, it->format) || next->tile0 + skip >= next->tile1)
        return {0, 0, 0, false};
    return {next->first_page + next->tile0 + skip, tile_tokens(next->n_tokens, next->tile0 + skip), n + 2, true};
}

/* One thread; id: of the page. */
template <bool fp8>
static __device__ __forceinline__ void prepare_next(const struct args &a, struct tail *tail, uint32_t g, uint32_t index,
                                                    uint32_t tile, uint32_t n, uint32_t id)
{
    struct next_tile next = find_next(tail, index, tile, n);
    tail->next[g] = {dn_mla_page(a.l, a.arena, plan<fp8>::format, id, a.layer), next.known ? next.tokens : 0};
}
template <bool fp8>
static __device__ __forceinline__ void copy_next(struct tail *tail, uint32_t shared, uint32_t g, uint32_t n)
{
    struct next_copy next = tail->next[g];
    if (next.tokens)
        copy_tile<fp8>(tail, shared, next.page, next.tokens, n + 2);
}

/* What the value warps need with P: factors of their sums, at an item's end the sums' divisors. */
static __device__ __forceinline__ void tell_values(struct tail *tail, uint32_t buffer, uint32_t warp, uint32_t lane,
                                                   bool mine_last, const float (&alpha)[2], const float (&base)[2],
                                                   const struct score_rows &r)
{
    uint32_t row = warp * 16 + lane / 4;
    bool changed = __any_sync(0xffffffffu, alpha[0] != 1 || alpha[1] != 1);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        if (lane % 4 == 0)
            tail->alpha[buffer][row + 8 * i] = alpha[i];
        if (!mine_last)
            continue;
        float sum = r.sum[i] + __shfl_xor_sync(0xffffffffu, r.sum[i], 1);
        sum += __shfl_xor_sync(0xffffffffu, sum, 2);
        if (lane % 4 == 0)
            tail->ends[buffer][row + 8 * i] = make_float2(sum, base[i]);
    }
    if (lane == 0)
        tail->changed[buffer][warp] = changed;
}

/* Tile n of the format, the item's tile `tile`; `total` counts the block's tiles of both. */
template <bool fp8>
static __device__ __forceinline__ void
score_tile(const struct args &a, struct tail *tail, uint8_t *memory, uint32_t shared, uint32_t index, uint32_t n,
           uint32_t total, uint32_t tile, uint32_t tokens, bool first, bool mine_last, uint32_t g, struct score_rows *r)
{
    using P = plan<fp8>;
    uint32_t t = thread_anew() & 127;
    uint32_t b = n % P::stages, stage = uniform(P::stage(shared, n)), buffer = n % P::buffers;
    uint32_t warp = t / 32, lane = t % 32, row = warp * 16 + lane / 4, column = lane % 4 * 2;
    const float *raw = (const float *)(memory + (stage - shared) + STAGE_SCALES), *scale = NULL, *log_scale = NULL,
                *inverse = NULL;
    float s[32], top[2] = {-INFINITY, -INFINITY}, reference[2], alpha[2];
    uint32_t id = 0;
    if (t == 0) {
        struct next_tile next = find_next(tail, index, tile, n);
        if (next.known)
            id = __ldg(a.s.page + next.page); /* needed later */
    }
    uint64_t q = dn_wgmma_operand(shared + Q_AT, 16, 1024), k = dn_wgmma_operand(stage, 16, 1024);
    dn_barrier_wait(dn_shared(&tail->stage_full[fp8][b]), n / P::stages & 1);
#pragma unroll
    for (int i = 0; i < 32; i++)
        s[i] = 0; /* not left to the first product: ptxas would take s for alive before */
    dn_wgmma_fence();
    if (fp8) {
        struct scales *scales = (struct scales *)(memory + SCALES_AT);
        multiply_codes(s, q + LO_AT / 16, k);
        multiply_codes(s, q, k);
        multiply_bf16<1>(s, q + Q_ROPE_AT / 16, k + STAGE_ROPE / 16);
        dn_wgmma_commit();
        if (t < DN_MLA_TOKENS)
            token_scales(&scales->scale[g][total >> 1 & 1][t], &scales->log_scale[g][total >> 1 & 1][t],
                         &scales->inverse[g][total >> 1 & 1][t], raw[t], t < tokens);
        scale = scales->scale[g][total >> 1 & 1];
        log_scale = scales->log_scale[g][total >> 1 & 1];
        inverse = scales->inverse[g][total >> 1 & 1];
        dn_sync(BAR_TILE + (int)g, 128);
    } else {
        multiply_bf16<BLOCKS>(s, q, k);
        dn_wgmma_commit();
        dn_sync(BAR_TILE + (int)g, 128); /* all of this warpgroup have left P of its last tile: see the wait below */
    }
    bool copied = false;
    if (t == 0) {
        prepare_next<fp8>(a, tail, g, index, tile, n, id);
        if (fp8 && is_free<fp8>(tail, n + 2)) { /* the place of the tile before: at an item's first ones */
            copy_next<fp8>(tail, shared, g, n);
            copied = true;
        }
    }
    __syncwarp();
    dn_wgmma_wait<0>();
    exponents<fp8>(s, scale, log_scale, r->factor, tokens, column, top);
    move_reference(tail, total, first, warp, lane, top, reference, alpha);
    float base[2];
    uint32_t p[16];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        base[i] = reference[i] == -INFINITY ? 0 : reference[i]; /* a row of NaN */
        r->sum[i] *= r->reference[i] == reference[i] ? 1 : exp2_fast(r->reference[i] - reference[i]);
        r->reference[i] = reference[i];
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        float2 inv[4];
        if (fp8)
            load_pairs(inv, inverse + 32 * h + column);
#pragma unroll
        for (int j = 0; j < 4; j++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const int k = 16 * h + 4 * j + 2 * i;
                float x = exp2_fast(s[k] - base[i]), y = exp2_fast(s[k + 1] - base[i]);
                r->sum[i] = fp8 ? fmaf(x, inv[j].x, fmaf(y, inv[j].y, r->sum[i])) : r->sum[i] + (x + y);
                p[k / 2] = fp8 ? pack_f16(x, y) : pack_bf16(x, y);
            }
    }
    if (!fp8 &&
        n) /* one buffer: the other warpgroup's turn comes first, and a barrier tells but one phase from the next */
        dn_barrier_wait(dn_shared(&tail->p_full[0][0]), (n - 1) & 1);
    dn_barrier_wait(dn_shared(&tail->p_empty[fp8][buffer]), (n / P::buffers & 1) ^ 1);
    if (fp8 && t == 0 && !copied && is_free<fp8>(tail, n + 2)) { /* mostly, by now */
        copy_next<fp8>(tail, shared, g, n);
        copied = true;
    }
    __syncwarp();
    uint32_t to = P::p(shared, n) + row * 128 + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < 16; i++)
        asm volatile("st.shared.b32 [%0], %1;" ::"r"(to + i % 2 * 1024 + ((i / 2 ^ (row & 7)) << 4)), "r"(p[i])
                     : "memory");
    tell_values(tail, buffer, warp, lane, mine_last, alpha, base, *r);
    dn_fence_async();
    warp_arrive(&tail->p_full[fp8][buffer]);
    if (t == 0 && !copied && tail->next[g].tokens) {
        wait_free<fp8>(tail, n + 2);
        copy_next<fp8>(tail, shared, g, n);
    }
    __syncwarp();
}

/* An item's tiles, those of this warpgroup. n, total: of its first tile. *copied: this warpgroup's first one is on its
 * way already, then: that of the next item. */
template <bool fp8>
static __device__ __forceinline__ void score_item(const struct args &a, const struct item &it, struct tail *tail,
                                                  uint8_t *memory, uint32_t shared, uint32_t index, uint32_t n,
                                                  uint32_t total, uint32_t g, uint32_t t, bool *copied)
{
    const float *factor = (const float *)(memory + FACTOR_AT) + t / 32 * 16 + t % 32 / 4;
    uint32_t tile0 = it.tile0, tile1 = it.tile1, n_tokens = it.n_tokens;
    struct score_rows r = {{a.scale_log2, a.scale_log2}, {0, 0}, {-INFINITY, -INFINITY}};
    if (fp8) {
        r.factor[0] *= factor[0];
        r.factor[1] *= factor[8];
    }
    uint32_t skip = (total ^ g) & 1;
    for (uint32_t i = skip; tile0 + i < tile1; i += 2)
        score_tile<fp8>(a, tail, memory, shared, index, n + i, total + i, tile0 + i, tile_tokens(n_tokens, tile0 + i),
                        i == 0, tile0 + i + 2 >= tile1, g, &r);
    *copied =
        tile0 + skip < tile1 && find_next(tail, index, tile0 + (tile1 - tile0 - skip - 1) / 2 * 2 + skip, 0).known;
}

/* A warpgroup's first tile of an item, when it did not follow one of the same format. */
static __device__ __forceinline__ void copy_first(const struct args &a, const struct item &it, struct tail *tail,
                                                  uint32_t shared, uint32_t n, uint32_t skip)
{
    uint32_t tile = it.tile0 + skip;
    if (tile >= it.tile1)
        return;
    const uint8_t *page = dn_mla_page(a.l, a.arena, it.format, __ldg(a.s.page + it.first_page + tile), a.layer);
    if (it.format == DN_KV_FP8) {
        wait_free<true>(tail, n + skip);
        copy_tile<true>(tail, shared, page, tile_tokens(it.n_tokens, tile), n + skip);
    } else {
        wait_free<false>(tail, n + skip);
        copy_tile<false>(tail, shared, page, tile_tokens(it.n_tokens, tile), n + skip);
    }
}

/* t = 0..255. The last warp finds the items. */
static __device__ __forceinline__ void score_items(const struct args &a, uint32_t n_rows, uint8_t *memory,
                                                   uint32_t shared, struct tail *tail, uint32_t t)
{
    uint32_t g = __shfl_sync(0xffffffffu, t / 128, 0), n[2] = {0, 0}, row = UINT32_MAX, head_block = 0;
    bool finds = t / 32 == SCORE_WARPS - 1, copied = false;
    int format = -1;
    struct finder finder = {};
    if (finds) {
        finder = begin_finding(a, n_rows);
        find_items(a, n_rows, tail, &finder, 1);
    }
    for (uint32_t index = 0;; index++) {
        const struct item *it = wait_item(tail, index);
        if (!it->n_splits)
            break;
        if (!it->bad) {
            uint32_t tiles = it->tile1 - it->tile0;
            if (change_format(&format, it->format))
                copied = false;
            if (!copied && t % 128 == 0)
                copy_first(a, *it, tail, shared, n[format], (n[0] + n[1] + g) & 1);
            __syncwarp();
            copied = false;                                             /* the last tile here says more */
            bool same = it->row == row && it->head_block == head_block; /* of one format, then */
            if (!same) {
                if (row != UINT32_MAX)
                    dn_sync(BAR_SCORES, 32 * SCORE_WARPS); /* nobody reads Q */
                row = it->row, head_block = it->head_block;
                copy_query(a, *it, shared, t);
            }
            if (finds)
                find_items(a, n_rows, tail, &finder, index + 2);
            if (!same) {
                asm volatile("cp.async.wait_all;" ::: "memory");
                if (format == DN_KV_FP8)
                    split_query(memory, t);
                dn_fence_async();
                dn_sync(BAR_SCORES, 32 * SCORE_WARPS);
            }
            if (format == DN_KV_FP8)
                score_item<true>(a, *it, tail, memory, shared, index, n[1], n[0] + n[1], g, t & 127, &copied);
            else
                score_item<false>(a, *it, tail, memory, shared, index, n[0], n[0] + n[1], g, t & 127, &copied);
            if (format == DN_KV_FP8)
                n[1] += tiles;
            else
                n[0] += tiles;
        } else if (finds) {
            find_items(a, n_rows, tail, &finder, index + 2);
        }
        drop_item(tail, index);
    }
}

#endif

#endif
