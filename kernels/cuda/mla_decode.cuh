/* The decode kernel's work and its producers: how items are found, how their tiles come into shared memory.
 * mla_decode.cu says how it fits together; nobody else includes this.
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
    TILE_AT = TILE_BYTES, /* two */
    P_AT = 3 * TILE_BYTES,
    TAIL_AT = P_AT + DN_MLA_BLOCK,
    THREADS = 384,
    CONSUMERS = 256,
    PARTIAL = HEADS * DN_MLA_LATENT, /* values */
    PREFILL_ITEMS = 4096,            /* of a launch in a prefill step: 256 MB of partial results */
};
enum { BAR_SUMS = 1, BAR_MAX, BAR_P, BAR_FREE, BAR_ALL, BAR_PRODUCERS };

struct tail {
    float max[2][HEADS];
    uint64_t full[2], empty[2];
    int32_t ready;
};
enum { SHARED_BYTES = TAIL_AT + sizeof(struct tail) };
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory of a block");

struct args {
    const __nv_bfloat16 *q;
    __nv_bfloat16 *out;
    const void *arena;
    __nv_bfloat16 *partial; /* [items][64][512] */
    float *sums;            /* [items][64] log2 of the sum of exponentials */
    uint32_t *counters;     /* [rows * head blocks] */
    uint32_t n_heads, n_head_blocks, layer;
    uint32_t row0, n_rows; /* rows of this launch; count may end them earlier */
    float scale_log2;
    struct dn_kv_layout l;
    struct dn_cuda_step s;
};

#if DN_HOPPER

struct item {
    uint32_t id, row, head_block, split, n_splits;
    uint32_t tile0, tile1, n_tokens; /* n_tokens: of the row's whole context */
    uint32_t first_page;             /* in page[] */
    int format;
    bool bad;
};
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
/* Into f16's range; NaN stays. */
static __device__ __forceinline__ float clamp_f16(float x)
{
    asm("min.NaN.f32 %0, %0, 0f477fe000;\nmax.NaN.f32 %0, %0, 0fc77fe000;" : "+f"(x));
    return x;
}
static __device__ __forceinline__ uint32_t bf16_to_f16(uint32_t v)
{
    return pack_f16(clamp_f16(__uint_as_float(v << 16)), clamp_f16(__uint_as_float(v & 0xffff0000u)));
}
static __device__ __forceinline__ uint32_t mul_f16(uint32_t v, __half2 x)
{
    __half2 r = __hmul2(*(__half2 *)&v, x);
    return *(uint32_t *)&r;
}
/* A token's scale in f16. One below f16's normal numbers goes in two steps: times `by`, then times `then`. */
struct scale_f16 {
    __half2 by, then;
    bool is_tiny; /* of any lane's: `then` is 1 elsewhere */
};
static __device__ __forceinline__ struct scale_f16 split_scale(float s)
{
    bool tiny = s < 0x1p-13f;
    struct scale_f16 f;
    f.by = __float2half2_rn(tiny ? s * 0x1p12f : s);
    f.then = __float2half2_rn(tiny ? 0x1p-12f : 1.0f);
    f.is_tiny = __any_sync(0xffffffffu, tiny);
    return f;
}
template <bool tiny> static __device__ __forceinline__ uint4 scaled(uint4 v, const struct scale_f16 &f)
{
    v = make_uint4(mul_f16(v.x, f.by), mul_f16(v.y, f.by), mul_f16(v.z, f.by), mul_f16(v.w, f.by));
    if (tiny)
        v = make_uint4(mul_f16(v.x, f.then), mul_f16(v.y, f.then), mul_f16(v.z, f.then), mul_f16(v.w, f.then));
    return v;
}
static __device__ __forceinline__ void e4m3_to_f16(uint32_t v, uint32_t *lo, uint32_t *hi)
{
    asm("{\n.reg .b16 a, b;\nmov.b32 {a, b}, %2;\ncvt.rn.f16x2.e4m3x2 %0, a;\ncvt.rn.f16x2.e4m3x2 %1, b;\n}"
        : "=r"(*lo), "=r"(*hi)
        : "r"(v));
}
static __device__ __forceinline__ float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
static __device__ __forceinline__ uint4 load_stream(const void *p) /* pages: read once */
{
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(p));
    return v;
}
static __device__ __forceinline__ void store_shared(uint32_t at, uint4 v)
{
    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}
static __device__ __forceinline__ uint4 load_shared(uint32_t at)
{
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

/* ---- Producers: `t` = 0..127, n counts the block's tiles ---- */

static __device__ __forceinline__ const uint8_t *tile_page(const struct args &a, const struct item &it, uint32_t tile)
{
    uint32_t id = a.s.page[it.first_page + tile];
    return dn_mla_page(a.l, a.arena, it.format, id, a.layer);
}
static __device__ __forceinline__ uint32_t tile_tokens(const struct item &it, uint32_t tile)
{
    return min(it.n_tokens - tile * DN_MLA_TOKENS, (uint32_t)DN_MLA_TOKENS);
}

/* One thread. */
static __device__ __forceinline__ void copy_item(const struct args &a, const struct item &it, uint32_t shared,
                                                 struct tail *tail, uint32_t n, uint64_t policy)
{
    const uint8_t *page = tile_page(a, it, it.tile0);
    for (uint32_t tile = it.tile0; tile < it.tile1; tile++, n++) {
        uint32_t b = n & 1, to = shared + TILE_AT + b * TILE_BYTES, full = dn_shared(&tail->full[b]);
        const uint8_t *next = tile + 1 < it.tile1 ? tile_page(a, it, tile + 1) : NULL;
        uint32_t tokens = tile_tokens(it, tile);
        dn_barrier_wait(dn_shared(&tail->empty[b]), ((n >> 1) & 1) ^ 1);
        dn_barrier_expect(full, tokens * BLOCKS * 128);
        if (tokens == DN_MLA_TOKENS) {
            dn_bulk_load(to, page, TILE_BYTES, full, policy);
        } else {
            for (uint32_t i = 0; i < BLOCKS; i++)
                dn_bulk_load(to + i * DN_MLA_BLOCK, page + i * DN_MLA_BLOCK, tokens * 128, full, policy);
        }
        page = next;
    }
}

/* A tile in FP8 is 20 units of 16 bytes a thread, all of token t % 64: 0..15 are columns 32 i + 16 h ..+15 of its latent,
 * h = t / 64, which become two chunks of f16; 16..19 are chunk 4 h + i - 16 of its rope key. Units are on their way to
 * registers AHEAD before their turn, over the ends of tiles too: enough bytes in flight, and registers left for the
 * conversions of several units to overlap. */
enum { UNITS = 20, LATENT_UNITS = 16, AHEAD = 10 };
static_assert(UNITS % AHEAD == 0, "a unit's registers are the same in every tile");

struct raw_tile {
    const uint8_t *latents, *ropes; /* of this thread's units */
    bool valid;
};
static __device__ __forceinline__ struct raw_tile raw_tile(const struct args &a, const uint8_t *page, uint32_t t,
                                                           bool valid)
{
    return {page + t * 16, page + a.l.format[DN_KV_FP8].v_offset + (t & 63) * 128, valid};
}
static __device__ __forceinline__ uint4 load_unit(const struct raw_tile &x, uint32_t t, int i)
{
    uint4 v = make_uint4(0, 0, 0, 0);
    if (x.valid)
        v = load_stream(i < LATENT_UNITS ? x.latents + i * 2048
                                         : x.ropes + (((t / 64 * 4 + i - LATENT_UNITS) ^ (t & 7)) << 4));
    return v;
}

/* at: where the token's row has chunks 2 h, 2 h + 1 (units of even i) and 2 h + 4, 2 h + 5 (odd) in the first block. */
template <bool tiny>
static __device__ __forceinline__ void convert_tile(const struct raw_tile &x, const struct raw_tile &next,
                                                    uint4 (&v)[AHEAD], const uint32_t (&at)[4], uint32_t rope,
                                                    uint32_t t, const struct scale_f16 &scale)
{
#pragma unroll
    for (int i = 0; i < UNITS; i++) {
        uint4 u = v[i % AHEAD];
        v[i % AHEAD] = i + AHEAD < UNITS ? load_unit(x, t, i + AHEAD) : load_unit(next, t, i + AHEAD - UNITS);
        if (i < LATENT_UNITS) {
            uint4 lo, hi;
            e4m3_to_f16(u.x, &lo.x, &lo.y);
            e4m3_to_f16(u.y, &lo.z, &lo.w);
            e4m3_to_f16(u.z, &hi.x, &hi.y);
            e4m3_to_f16(u.w, &hi.z, &hi.w);
            store_shared(at[i % 2 * 2] + i / 2 * DN_MLA_BLOCK, scaled<tiny>(lo, scale));
            store_shared(at[i % 2 * 2 + 1] + i / 2 * DN_MLA_BLOCK, scaled<tiny>(hi, scale));
        } else {
            store_shared(rope + dn_mla_swizzled(t & 63, 4 * (t / 64) + i - LATENT_UNITS),
                         make_uint4(bf16_to_f16(u.x), bf16_to_f16(u.y), bf16_to_f16(u.z), bf16_to_f16(u.w)));
        }
    }
}

static __device__ __forceinline__ void convert_item(const struct args &a, const struct item &it, uint32_t shared,
                                                    struct tail *tail, uint32_t n, uint32_t t)
{
    uint32_t scale_at = a.l.format[DN_KV_FP8].k_scale_offset + (t & 63) * 4, h = t / 64;
    const uint8_t *page = tile_page(a, it, it.tile0);
    uint32_t next_id = it.tile0 + 1 < it.tile1 ? a.s.page[it.first_page + it.tile0 + 1] : 0;
    struct raw_tile x = raw_tile(a, page, t, (t & 63) < tile_tokens(it, it.tile0));
    float s = x.valid ? __ldg((const float *)(page + scale_at)) : 1.0f;
    uint4 v[AHEAD];
#pragma unroll
    for (int i = 0; i < AHEAD; i++)
        v[i] = load_unit(x, t, i);
    for (uint32_t tile = it.tile0; tile < it.tile1; tile++, n++) {
        uint32_t b = n & 1, to = shared + TILE_AT + b * TILE_BYTES;
        page = dn_mla_page(a.l, a.arena, DN_KV_FP8, next_id, a.layer);
        struct raw_tile next =
            raw_tile(a, page, t, tile + 1 < it.tile1 && (t & 63) < tile_tokens(it, tile + 1));
        if (tile + 2 < it.tile1)
            next_id = a.s.page[it.first_page + tile + 2];
        struct scale_f16 scale = split_scale(s);
        s = next.valid ? __ldg((const float *)(page + scale_at)) : 1.0f;
        uint32_t at[4];
#pragma unroll
        for (int k = 0; k < 4; k++)
            at[k] = to + dn_mla_swizzled(t & 63, 2 * h + k / 2 * 4 + k % 2);
        uint32_t rope = to + (BLOCKS - 1) * DN_MLA_BLOCK;
        dn_barrier_wait(dn_shared(&tail->empty[b]), ((n >> 1) & 1) ^ 1);
        if (scale.is_tiny)
            convert_tile<true>(x, next, v, at, rope, t, scale);
        else
            convert_tile<false>(x, next, v, at, rope, t, scale);
        x = next;
        dn_fence_async();
        dn_sync(BAR_PRODUCERS, THREADS - CONSUMERS);
        if (t == 0)
            dn_barrier_arrive(dn_shared(&tail->full[b]));
    }
}

static __device__ __forceinline__ void produce(const struct args &a, uint32_t n_rows, uint32_t shared,
                                               struct tail *tail, uint32_t t)
{
    struct cursor c = {0, 0};
    struct item it;
    uint32_t n = 0;
    uint64_t policy = dn_policy_evict_first();
    for (uint32_t id = blockIdx.x; find_item(a, n_rows, &c, id, &it); id += gridDim.x) {
        if (it.bad)
            continue;
        if (it.format == DN_KV_FP8) {
            dn_sync(BAR_PRODUCERS, THREADS - CONSUMERS); /* parities: nobody may be a phase ahead of thread 0 */
            convert_item(a, it, shared, tail, n, t);
        } else if (t == 0) {
            copy_item(a, it, shared, tail, n, policy);
        }
        __syncwarp();
        n += it.tile1 - it.tile0;
    }
}

#endif

#endif
