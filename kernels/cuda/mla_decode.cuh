/* The decode kernel's work: how items are found and told to all warps, how their tiles and queries come into shared
 * memory. mla_decode.cu says how it fits together; nobody else includes this.
 */
#ifndef DN_KERNELS_CUDA_MLA_DECODE_CUH
#define DN_KERNELS_CUDA_MLA_DECODE_CUH

#include "kernels/cuda/mla.cuh"
#include "kernels/cuda/wgmma.cuh"

enum {
    HEADS = 64,
    BLOCKS = DN_MLA_LATENT / 64 + 1, /* of 64 columns, in a tile and in Q */
    TILE_BYTES = BLOCKS * DN_MLA_BLOCK,
    Q_AT = 0,

    /* BF16: two tiles, one P. */
    TILE_AT = TILE_BYTES,
    P_AT = 3 * TILE_BYTES,
    TAIL_AT = P_AT + DN_MLA_BLOCK, /* struct tail */

    /* FP8: Q in two terms and its factors; three stages, two P. */
    LO_AT = 4 * DN_MLA_BLOCK,
    Q_ROPE_AT = 8 * DN_MLA_BLOCK,
    FACTOR_AT = 9 * DN_MLA_BLOCK,
    STAGE_AT = FACTOR_AT + 1024,
    STAGE_BYTES = 41 * 1024,
    STAGE_ROPE = 4 * DN_MLA_BLOCK, /* in a stage */
    STAGE_SCALES = 5 * DN_MLA_BLOCK,
    RAW_BYTES = STAGE_SCALES + DN_MLA_TOKENS * 4,
    W_AT = STAGE_AT + 3 * STAGE_BYTES,
    SCALES_AT = W_AT + 2 * DN_MLA_BLOCK, /* struct scales */

    VALUE_WARPS = 8,
    SCORE_WARPS = 8,
    VALUE_THREADS = 32 * VALUE_WARPS,
    THREADS = 32 * (VALUE_WARPS + SCORE_WARPS),
    VALUE_REGISTERS = 176,
    SCORE_REGISTERS = 80,
    RING = 8,                        /* items */
    PARTIAL = HEADS * DN_MLA_LATENT, /* values */
    PREFILL_ITEMS = 4096,            /* of a launch in a prefill step: 256 MB of partial results */
};
enum { BAR_ALL = 1, BAR_FORMAT, BAR_SCORES, BAR_TILE /* two */, BAR_VALUES = 6 /* two */ };

struct item {
    uint32_t id, row, head_block, split, n_splits; /* n_splits 0: no more items */
    uint32_t tile0, tile1, n_tokens;               /* n_tokens: of the row's whole context */
    uint32_t first_page;                           /* in page[] */
    int format;
    uint32_t bad;
};

/* A score warpgroup's next tile; tokens 0: not known. */
struct next_copy {
    const uint8_t *page;
    uint32_t tokens;
};

struct tail {
    float2 ends[2][HEADS];                        /* sum and reference of a warpgroup's last tile of an item */
    float inverse[HEADS];                         /* 1 / sum of an item */
    float reference[2][HEADS];                    /* by the tile's parity */
    float alpha[2][HEADS];                        /* by P's buffer, as is the next */
    uint32_t changed[2][4];                       /* a warp's alphas are not all 1 */
    uint64_t reference_full[2][4];                /* of warps with the same heads */
    uint64_t stage_full[2][3], stage_empty[2][3]; /* by format, as are the next */
    uint64_t p_full[2][2], p_empty[2][2];
    uint64_t item_full[RING], item_empty[RING];
    struct item item[RING];
    struct next_copy next[2];
};
/* Of FP8 tokens: [warpgroup][its tile's parity]. */
struct scales {
    float scale[2][2][HEADS], log_scale[2][2][HEADS], inverse[2][2][HEADS];
};
enum { SHARED_BYTES = TAIL_AT + sizeof(struct tail) };
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory of a block");
static_assert(SCALES_AT + sizeof(struct scales) <= TAIL_AT, "shared memory of FP8");

/* What differs between the formats. */
template <bool fp8> struct plan {
    static constexpr int format = fp8 ? DN_KV_FP8 : DN_KV_BF16;
    static constexpr uint32_t stages = fp8 ? 3 : 2, stage_at = fp8 ? STAGE_AT : TILE_AT,
                              stage_bytes = fp8 ? STAGE_BYTES : TILE_BYTES, tile_bytes = fp8 ? RAW_BYTES : TILE_BYTES,
                              blocks = fp8 ? STAGE_SCALES / DN_MLA_BLOCK : BLOCKS;
    static constexpr uint32_t buffers = fp8 ? 2 : 1, p_at = fp8 ? W_AT : P_AT;
    static __device__ __forceinline__ uint32_t stage(uint32_t shared, uint32_t n)
    {
        return shared + stage_at + n % stages * stage_bytes;
    }
    static __device__ __forceinline__ uint32_t p(uint32_t shared, uint32_t n)
    {
        return shared + p_at + n % buffers * DN_MLA_BLOCK;
    }
};

struct args {
    const __nv_bfloat16 *q;
    __nv_bfloat16 *out;
    const void *arena;
    __nv_bfloat16 *partial; /* [items][64][512] */
    float *sums;            /* [items][64] log2 of the sum of exponentials */
    uint32_t *firsts;       /* [rows * head blocks] their first items */
    uint32_t n_heads, n_head_blocks, layer;
    uint32_t row0, n_rows; /* rows of this launch; count may end them earlier */
    float scale_log2;
    struct dn_kv_layout l;
    struct dn_cuda_step s;
};

#if DN_HOPPER

struct cursor {
    uint32_t row, before; /* items of rows < row */
};

/* All lanes of a warp; ids of a cursor only grow. False if there is no such item. */
static __device__ __forceinline__ bool find_item(const struct args &a, uint32_t n_rows, struct cursor *c, uint32_t id,
                                                 struct item *it)
{
    uint32_t lane = threadIdx.x % 32;
    while (c->row < n_rows) {
        uint32_t row = c->row + lane, n = 0, tokens = 0, first_page = 0, format = 0, bad = 0;
        if (row < n_rows) {
            uint32_t seq = (uint32_t)a.s.token_seq[a.row0 + row];
            tokens = (uint32_t)a.s.position[a.row0 + row] + 1;
            first_page = (uint32_t)a.s.page_start[seq];
            format = a.s.kv_format[seq];
            bad = a.s.bad[seq] != 0;
            n = bad ? 1 : dn_mla_splits((tokens + DN_MLA_TOKENS - 1) / DN_MLA_TOKENS);
        }
        uint32_t end = n * a.n_head_blocks;
        for (int i = 1; i < 32; i *= 2) {
            uint32_t v = __shfl_up_sync(0xffffffffu, end, i);
            if (lane >= i)
                end += v;
        }
        uint32_t found = __ballot_sync(0xffffffffu, id < c->before + end);
        if (found) {
            int l = __ffs((int)found) - 1;
            it->n_splits = __shfl_sync(0xffffffffu, n, l);
            uint32_t begin = __shfl_sync(0xffffffffu, end, l) - it->n_splits * a.n_head_blocks;
            uint32_t rest = id - c->before - begin;
            it->id = id;
            it->row = c->row + (uint32_t)l;
            it->head_block = rest / it->n_splits;
            it->split = rest % it->n_splits;
            it->n_tokens = __shfl_sync(0xffffffffu, tokens, l);
            it->first_page = __shfl_sync(0xffffffffu, first_page, l);
            it->format = (int)__shfl_sync(0xffffffffu, format, l);
            it->bad = __shfl_sync(0xffffffffu, bad, l) != 0;
            uint32_t tiles = (it->n_tokens + DN_MLA_TOKENS - 1) / DN_MLA_TOKENS;
            it->tile0 = it->split * tiles / it->n_splits;
            it->tile1 = (it->split + 1) * tiles / it->n_splits;
            return true;
        }
        c->before += __shfl_sync(0xffffffffu, end, 31);
        c->row += 32;
    }
    return false;
}

static __device__ __forceinline__ uint32_t pack_bf16(float lo, float hi)
{
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return *(uint32_t *)&v;
}
static __device__ __forceinline__ uint32_t pack_f16(float lo, float hi)
{
    __half2 v = __floats2half2_rn(lo, hi);
    return *(uint32_t *)&v;
}
static __device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ void store_shared(uint32_t at, uint4 v)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

/* threadIdx.x, read anew: what follows from it is computed again instead of being kept in registers all the time. */
static __device__ __forceinline__ uint32_t thread_anew()
{
    uint32_t t;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(t));
    return t;
}

static __device__ __forceinline__ uint32_t tile_tokens(uint32_t n_tokens, uint32_t tile)
{
    return min(n_tokens - tile * DN_MLA_TOKENS, (uint32_t)DN_MLA_TOKENS);
}

/* One lane of a warp, after the warp's other lanes have done their part. */
static __device__ __forceinline__ void warp_arrive(uint64_t *barrier)
{
    __syncwarp();
    if (threadIdx.x % 32 == 0)
        dn_barrier_arrive(dn_shared(barrier));
}

/* ---- Items: one warp finds them, all follow ---- */

/* Item `index` of this block; it stays until this warp has called drop_item(). */
static __device__ __forceinline__ const struct item *wait_item(struct tail *tail, uint32_t index)
{
    dn_barrier_wait(dn_shared(&tail->item_full[index % RING]), index / RING & 1);
    return &tail->item[index % RING];
}
static __device__ __forceinline__ void drop_item(struct tail *tail, uint32_t index)
{
    warp_arrive(&tail->item_empty[index % RING]);
}
/* Whether an item has tiles of this format. */
static __device__ __forceinline__ bool has_tiles(const struct item &it, int format)
{
    return it.n_splits && !it.bad && it.format == format;
}
/* Between items of different formats shared memory changes its use. Called by all warps for every item that has tiles,
 * with a format of their own to remember, -1 at first. True if it changed. */
static __device__ __forceinline__ bool change_format(int *format, int now)
{
    if (*format == now)
        return false;
    if (*format >= 0) {
        dn_fence_async();
        dn_sync(BAR_FORMAT, THREADS);
    }
    *format = now;
    return true;
}

/* The warp that finds items: those of a block follow one another, so that a row's queries serve several. */
struct finder {
    struct cursor cursor;
    uint32_t n, id, end; /* found, where the end counts as one; the next item's id, the last one's + 1 */
    bool more;
};
static __device__ __forceinline__ struct finder begin_finding(const struct args &a, uint32_t n_rows)
{
    uint32_t n = 0;
    for (uint32_t row = threadIdx.x % 32; row < n_rows; row += 32) {
        uint32_t tiles = (uint32_t)a.s.position[a.row0 + row] / DN_MLA_TOKENS + 1;
        n += a.s.bad[a.s.token_seq[a.row0 + row]] ? 1 : dn_mla_splits(tiles);
    }
    n = __reduce_add_sync(0xffffffffu, n) * a.n_head_blocks;
    return {{0, 0},
            0,
            (uint32_t)((uint64_t)blockIdx.x * n / gridDim.x),
            (uint32_t)((uint64_t)(blockIdx.x + 1) * n / gridDim.x),
            true};
}
static __device__ __forceinline__ void set_tiles(struct item *it)
{
    uint32_t tiles = (it->n_tokens + DN_MLA_TOKENS - 1) / DN_MLA_TOKENS;
    it->tile0 = it->split * tiles / it->n_splits;
    it->tile1 = (it->split + 1) * tiles / it->n_splits;
}

/* Goes on until `want` items are found. Waits for places in the ring: those of items whose tiles all came long ago. */
static __device__ __forceinline__ void find_items(const struct args &a, uint32_t n_rows, struct tail *tail,
                                                  struct finder *f, uint32_t want)
{
    while (f->more && f->n < want) {
        struct item it = {};
        uint32_t k = f->n % RING;
        if (f->n)
            it = tail->item[(f->n - 1) % RING];
        f->more = f->id < f->end;
        if (f->more && f->n && it.split + 1 < it.n_splits) {
            it.id++, it.split++;
            set_tiles(&it);
        } else if (f->more) {
            f->more = find_item(a, n_rows, &f->cursor, f->id, &it);
        }
        f->id++;
        if (!f->more)
            it.n_splits = 0;
        if (threadIdx.x % 32 == 0) {
            dn_barrier_wait(dn_shared(&tail->item_empty[k]), (f->n / RING & 1) ^ 1);
            tail->item[k] = it;
            dn_barrier_arrive(dn_shared(&tail->item_full[k]));
        }
        __syncwarp();
        f->n++;
    }
}

/* ---- Copies ---- */

/* One thread: whether tile n - stages has been used, if the one before is known to; until it has. */
template <bool fp8> static __device__ __forceinline__ bool is_free(struct tail *tail, uint32_t n)
{
    constexpr uint32_t stages = plan<fp8>::stages;
    return dn_barrier_test(dn_shared(&tail->stage_empty[fp8][n % stages]), (n / stages & 1) ^ 1);
}
template <bool fp8> static __device__ __forceinline__ void wait_free(struct tail *tail, uint32_t n)
{
    constexpr uint32_t stages = plan<fp8>::stages;
    dn_barrier_wait(dn_shared(&tail->stage_empty[fp8][n % stages]), (n / stages & 1) ^ 1);
}
/* One thread: tile n to its stage, which is free. */
template <bool fp8>
static __device__ __forceinline__ void copy_tile(struct tail *tail, uint32_t shared, const uint8_t *page,
                                                 uint32_t tokens, uint32_t n)
{
    uint64_t policy = dn_policy_evict_first();
    using P = plan<fp8>;
    uint32_t b = n % P::stages, to = P::stage(shared, n), full = dn_shared(&tail->stage_full[fp8][b]);
    if (tokens == DN_MLA_TOKENS) {
        dn_barrier_expect(full, P::tile_bytes);
        dn_bulk_load(to, page, P::tile_bytes, full, policy);
        return;
    }
    uint32_t scales = fp8 ? (tokens + 3) / 4 * 16 : 0;
    dn_barrier_expect(full, tokens * P::blocks * 128 + scales);
#pragma unroll 1
    for (uint32_t i = 0; i < P::blocks; i++)
        dn_bulk_load(to + i * DN_MLA_BLOCK, page + i * DN_MLA_BLOCK, tokens * 128, full, policy);
    if (fp8)
        dn_bulk_load(to + STAGE_SCALES, page + STAGE_SCALES, scales, full, policy);
}

#endif

#endif
