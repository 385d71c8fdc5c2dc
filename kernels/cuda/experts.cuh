/* A layer's experts: what experts.cu (decode) and experts_prefill.cu share, and the kernel of both.
 *
 *   h[i]    = silu(gate[e] a[t]) * up[e] a[t]     phase 1     i: a (token, expert) pair, in the order of experts
 *   part[i] = down[e] h[i]                        phase 2
 *   out[t]  = add[t] + sum over k of weight[t][k] * part[where[t][k]]      experts_sum_kernel
 *
 * experts_list_kernel (one block) sorts the pairs by expert and cuts each expert's into tiles of up to `rows` tokens.
 * Then one persistent kernel, a block an SM, takes items from a counter: first all of phase 1, (tile, 64 rows of gate
 * and the 64 of up that belong to them), then all of phase 2, (tile, 128 rows of down). So weights come from memory
 * once a touched expert (again from the L2 cache where an expert has several tiles), and phase 2 begins where phase 1
 * ends, without a wait for all: an item of phase 2 waits for its own tile's h (done[tile]) while its weights already
 * arrive. No deadlock: what an item waits for was taken before it, by blocks that run.
 *
 * Roles, 18 warps: 16 consumers, warp = 4 * strip + quarter: 16 rows of gate and the 16 of up (down: of both halves), a
 * quarter of the stage's k. Warp 16 (one lane) takes items and copies weights (bulk); warp 17 copies the tokens' rows
 * (cp.async), so that weights run ahead while h is waited for. The product is mma.sync m16n8k16 with the weights as A,
 * 8 tokens as B; scales are applied to the sums of each 32 k. The four quarters are added through shared memory in the
 * order of k: a result's bits depend on its own token, expert and shapes alone.
 *
 * An item of phase 2 is of 64 rows (HALF) where items of 128 would be few.
 *
 * A stage of the ring: `parts` x KT weight tiles (64 rows x 128 k), then rows x (KT * 256 + 16) bytes of activations
 * (the 16 keep ldmatrix free of bank conflicts). Its barriers: empty (16 warps arrive; the weights' warp waits), taken
 * (the weights' warp arrives, having written info[]; the tokens' warp waits), full (the weights' warp, with bytes, and
 * 32 lanes of the tokens' warp; consumers wait). Shared memory: info | barriers | red | stages.
 *
 * ff is a multiple of 32: where it is none of 64, the rows of up that belong to 64 of gate lie in two tiles, which
 * makes three parts.
 *
 * What limits INT4 is the ALU pipe (64 lanes a clock): 1.85 instructions a weight at HBM speed. A warp's stage of 128
 * weights a thread takes 260 instructions, 105 of them on that pipe; with stages of half the size the waits between
 * cost 12 % of the speed. Without arithmetic the copies alone reach 96 % of 4.65 TB/s, without copies the arithmetic
 * 108 %.
 *
 * Floor: bytes of the touched experts at 4.65 TB/s. Reached (README.md has the table): INT4, 384 experts of
 * 7168 x 2048, 8 a token: 71 % for one token, 80 to 86 % for 2 to 32, 72 to 81 % for 64; FP8 77 to 89 %; prefill of
 * 2,048 tokens 165 TFLOP/s.
 */
#ifndef DN_KERNELS_CUDA_EXPERTS_CUH
#define DN_KERNELS_CUDA_EXPERTS_CUH

#include "kernels/cuda/mma.cuh"
#include "kernels/cuda/weights.cuh"

enum {
    EXPERTS_CONSUMERS = 16,
    EXPERTS_THREADS = (EXPERTS_CONSUMERS + 4) * 32, /* the last two warps only make a warpgroup full */
    EXPERTS_MAX_STAGES = 12,
    EXPERTS_RED = 4 * 4 * 2 * 4 * 32 * 4, /* bytes for 8 tokens: [strip][quarter][part][register][lane] */
    EXPERTS_DONE = 4,                     /* arrivals on done[tile] for each of its items: one a strip */
    EXPERTS_DOWN = 0x80000000u,
    EXPERTS_HALF = 0x40000000u, /* an item of 64 rows of down: where few of 128 would leave blocks without work */
    EXPERTS_END = 0xffffffffu,
};

struct experts_tile {
    uint32_t expert, first, n, of_expert; /* pairs first .. first + n - 1; how many tiles the expert has */
};
/* In the workspace, made anew by experts_list_kernel. */
struct experts_list {
    uint32_t *n_tiles; /* 1 */
    uint32_t *claim;   /* [2] */
    uint32_t *done;    /* [n_tiles] */
    struct experts_tile *tile;
    uint32_t *token; /* [pairs] by order of experts */
    uint32_t *where; /* [tokens][top_k]: the pair's place in that order */
};
struct experts_args {
    struct dn_weights gate_up, down;
    struct experts_list list;
    const __nv_bfloat16 *a;
    __nv_bfloat16 *h;
    void *part; /* f32, of prefill bf16 */
    uint32_t dim, ff;
    uint32_t blocks1, blocks2; /* items of a tile */
    uint32_t rows, stages, parts, stage_bytes;
    uint32_t phases; /* bits: 1, 2 */
    uint32_t max_tiles;
};

/* Tiles of 128 k a stage has, and k that a warp converts in one go. */
static __host__ __device__ constexpr int experts_kt(int format, bool prefill)
{
    return format == DN_W_BF16 ? 1 : (format == DN_W_INT4 ? 2 : 1) * (prefill ? 1 : 2);
}
static __host__ __device__ constexpr int experts_unit(int format)
{
    return format == DN_W_INT4 ? 64 : 32;
}

/* Bytes from token to token in a stage. */
static __host__ __device__ constexpr int experts_stride(int kt)
{
    return kt * DN_TILE_K * 2 + 16;
}

/* Launch the persistent kernel for w's format and p->phases. */
void dn_cuda_experts_decode(struct dn_cuda *c, struct experts_args *p, const struct dn_weights *w);
void dn_cuda_experts_prefill(struct dn_cuda *c, struct experts_args *p, const struct dn_weights *w);
/* For GPUs without bulk copies or with little shared memory: p->phases is 1 or 2. `bf16_part`: the type of part. */
void dn_cuda_experts_plain(struct dn_cuda *c, const struct experts_args *p, const struct dn_weights *w, bool bf16_part);

/* Chooses the ring's stages; the bytes of shared memory that a block needs. Least: 2 stages of three BF16 parts. */
enum { EXPERTS_SHARED_LEAST = 200 << 10 };
static inline size_t experts_shared(struct dn_cuda *c, struct experts_args *p, const struct dn_weights *w, bool prefill)
{
    uint32_t kt = (uint32_t)experts_kt(w->format, prefill);
    p->stage_bytes = (p->parts * kt * w->tile_bytes + p->rows * (uint32_t)experts_stride((int)kt) + 127) / 128 * 128;
    size_t fixed = 1024 + EXPERTS_RED;
    p->stages = (uint32_t)((c->shared_bytes - fixed) / p->stage_bytes);
    if (p->stages > EXPERTS_MAX_STAGES)
        p->stages = EXPERTS_MAX_STAGES;
    return fixed + (size_t)p->stages * p->stage_bytes;
}

struct experts_shared {
    uint4 info[EXPERTS_MAX_STAGES]; /* DOWN, HALF | block, or END; first; n; tile */
    uint64_t full[EXPERTS_MAX_STAGES], empty[EXPERTS_MAX_STAGES], taken[EXPERTS_MAX_STAGES];
};
static_assert(sizeof(struct experts_shared) <= 1024, "");

/* A place in the ring and how often it went round. */
struct experts_ring {
    uint32_t stage, parity;
    __device__ __forceinline__ void next(uint32_t stages)
    {
        if (++stage == stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

static __device__ __forceinline__ uint32_t experts_load_acquire(const uint32_t *p)
{
    uint32_t v;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
    return v;
}
static __device__ __forceinline__ void experts_add_release(uint32_t *p, uint32_t n)
{
    asm volatile("red.release.gpu.global.add.u32 [%0], %1;" ::"l"(p), "r"(n) : "memory");
}
/* Arrives once this thread's cp.async so far are there. */
static __device__ __forceinline__ void experts_arrive_copied(uint64_t *b)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(dn_shared(b)) : "memory");
#endif
}
static __device__ __forceinline__ float experts_silu(float x)
{
    return x / (1.0f + __expf(-x));
}

/* The weight tiles of an item at k 0: rows of gate, then of up (one or two tiles); or two of down. Beyond the expert's
 * last: the last again, whose results nobody writes. */
static __device__ __forceinline__ void experts_parts(const struct experts_args &p, bool down, uint32_t expert,
                                                     uint32_t block, const uint8_t *at[3], bool half = false)
{
    if (down) {
        uint32_t blocks = p.dim / DN_TILE_ROWS, first = half ? block : block * 2;
        at[0] = dn_tile(p.down, expert * blocks + first, 0);
        at[1] = at[2] = dn_tile(p.down, expert * blocks + min(first + 1, blocks - 1), 0);
    } else {
        uint32_t blocks = p.ff / (DN_TILE_ROWS / 2), up = p.ff / DN_TILE_ROWS + block;
        at[0] = dn_tile(p.gate_up, expert * blocks + block, 0);
        at[1] = dn_tile(p.gate_up, expert * blocks + up, 0);
        at[2] = dn_tile(p.gate_up, expert * blocks + min(up + 1, blocks - 1), 0);
    }
}

/* ---- Warp 16, one lane: takes items, copies weights ---- */

struct experts_item {
    uint32_t id, phase, tile, block;
    struct experts_tile t;
};
/* Items of phase 1 and of both, of all tiles. */
struct experts_work {
    uint32_t n1, total, blocks2;
    bool half;
};
static __device__ __forceinline__ void experts_item_at(const struct experts_args &p, struct experts_item &it,
                                                       uint32_t id, const struct experts_work &work)
{
    it.id = id;
    if (id >= work.total)
        return;
    it.phase = id >= work.n1;
    uint32_t i = it.phase ? id - work.n1 : id, blocks = it.phase ? work.blocks2 : p.blocks1;
    it.tile = i / blocks;
    it.block = i % blocks;
    it.t = p.list.tile[it.tile];
}

template <int KT>
static __device__ void experts_weights_warp(const struct experts_args &p, struct experts_shared *sh, uint8_t *ring)
{
    /* The first item's tile is loaded along with what says whether there is one. */
    uint32_t guess = min(blockIdx.x / (p.phases & 1 ? p.blocks1 : p.blocks2), p.max_tiles - 1);
    struct experts_tile t = p.list.tile[guess];
    uint32_t n_tiles = *p.list.n_tiles;
    struct experts_work work;
    work.n1 = p.phases & 1 ? n_tiles * p.blocks1 : 0;
    /* INT4 is slower so: there is half the arithmetic between two waits. */
    work.half = p.phases == 3 && p.rows == 8 && p.down.format != DN_W_INT4 && n_tiles * p.blocks2 < 8 * gridDim.x;
    work.blocks2 = work.half ? p.dim / DN_TILE_ROWS : p.blocks2;
    work.total = work.n1 + (p.phases & 2 ? n_tiles * work.blocks2 : 0);
    uint32_t *claim = p.list.claim + (p.phases == 2);
    struct experts_ring r = {0, 0};
    uint64_t policy = dn_policy_once();
    struct experts_item it, next;
    it.id = it.block = blockIdx.x; /* the first; claim begins after the blocks' own */
    it.phase = !(p.phases & 1);
    it.tile = guess;
    it.block -= guess * (it.phase ? p.blocks2 : p.blocks1);
    it.t = t;
    if (!it.phase && it.id >= work.n1)
        experts_item_at(p, it, blockIdx.x, work);
    while (it.id < work.total) {
        uint32_t next_id = atomicAdd(claim, 1); /* is there long before it is needed */
        const struct dn_weights &w = it.phase ? p.down : p.gate_up;
        bool half = it.phase && work.half;
        uint32_t parts = half ? 1 : it.phase ? 2 : p.parts, steps = (w.n_tiles + KT - 1) / KT;
        const uint8_t *at[3];
        experts_parts(p, it.phase, it.t.expert, it.block, at, half);
        bool once = it.t.of_expert == 1;
        uint4 info = make_uint4((it.phase ? EXPERTS_DOWN : 0) | (half ? EXPERTS_HALF : 0) | it.block, it.t.first,
                                it.t.n, it.tile);
        for (uint32_t k = 0; k < steps; k++) {
            uint32_t bytes = min((uint32_t)KT, w.n_tiles - k * KT) * w.tile_bytes;
            if (k + 1 == steps)
                experts_item_at(p, next, next_id, work);
            dn_barrier_wait(&sh->empty[r.stage], r.parity ^ 1);
            sh->info[r.stage] = info;
            uint8_t *to = ring + r.stage * p.stage_bytes;
            dn_barrier_expect(&sh->full[r.stage], parts * bytes);
#pragma unroll
            for (int i = 0; i < 3; i++)
                if (i < (int)parts) {
                    const uint8_t *from = at[i] + (size_t)k * KT * w.tile_bytes;
                    if (once)
                        dn_bulk_once(to + i * KT * w.tile_bytes, from, bytes, &sh->full[r.stage], policy);
                    else
                        dn_bulk(to + i * KT * w.tile_bytes, from, bytes, &sh->full[r.stage]);
                }
            dn_barrier_arrive(&sh->taken[r.stage]);
            r.next(p.stages);
        }
        it = next;
    }
    dn_barrier_wait(&sh->empty[r.stage], r.parity ^ 1);
    sh->info[r.stage] = make_uint4(EXPERTS_END, 0, 0, 0);
    dn_barrier_arrive(&sh->full[r.stage]);
    dn_barrier_arrive(&sh->taken[r.stage]);
}

/* ---- Warp 17: copies the tokens' rows ---- */

/* Lane: rows lane / 4 + 8 j, 16-byte chunks lane % 4 + 4 c of the stage's KT * 128 values. */
template <int KT, int MAX_NT>
static __device__ void experts_tokens_warp(const struct experts_args &p, struct experts_shared *sh, uint8_t *ring,
                                           int lane)
{
    struct experts_ring r = {0, 0};
    for (;;) {
        dn_barrier_wait(&sh->taken[r.stage], r.parity);
        uint4 info = sh->info[r.stage];
        if (info.x == EXPERTS_END) {
            dn_barrier_arrive(&sh->full[r.stage]);
            return;
        }
        bool down = info.x & EXPERTS_DOWN;
        const struct dn_weights &w = down ? p.down : p.gate_up;
        uint32_t steps = (w.n_tiles + KT - 1) / KT, n_in = w.n_in;
        const __nv_bfloat16 *row[MAX_NT];
        if (down) {
            if (lane == 0 && p.phases & 1)
                while (experts_load_acquire(&p.list.done[info.w]) < p.blocks1 * EXPERTS_DONE)
                    __nanosleep(40);
            __syncwarp();
        }
#pragma unroll
        for (int j = 0; j < MAX_NT; j++) {
            uint32_t i = lane / 4 + 8 * j;
            row[j] = NULL;
            if (i < info.z)
                row[j] = down ? p.h + (size_t)(info.y + i) * n_in : p.a + (size_t)p.list.token[info.y + i] * n_in;
        }
        uint32_t weights = (info.x & EXPERTS_HALF ? 1 : down ? 2 : p.parts) * KT * w.tile_bytes;
        for (uint32_t k = 0; k < steps; k++) {
            if (k > 0)
                dn_barrier_wait(&sh->taken[r.stage], r.parity);
            uint32_t to =
                dn_shared(ring + r.stage * p.stage_bytes + weights) + lane / 4 * experts_stride(KT) + lane % 4 * 16;
            uint32_t at = k * KT * DN_TILE_K + lane % 4 * 8;
#pragma unroll
            for (int j = 0; j < MAX_NT; j++)
                if (row[j]) {
                    uint32_t row_to = to + 8 * j * experts_stride(KT);
#pragma unroll
                    for (int c = 0; c < KT * 4; c++)
                        dn_cp_async16(row_to + c * 64, at + c * 32 < n_in ? row[j] + at + c * 32 : row[j],
                                      at + c * 32 < n_in ? 16 : 0);
                }
            experts_arrive_copied(&sh->full[r.stage]);
            r.next(p.stages);
        }
    }
}

/* 20 warps begin with 96 registers a thread; a block can only share out what it began with: 16 * 104 + 4 * 64. */
template <int n> static __device__ __forceinline__ void experts_registers_more()
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
#endif
}
template <int n> static __device__ __forceinline__ void experts_registers_fewer()
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
#endif
}

/* ---- Warps 0..15 ---- */

/* What sums of INT4 must be multiplied by in the end. */
template <int F> static __device__ __forceinline__ float experts_unscaled(float v)
{
    return F == DN_W_INT4 ? v * 64.0f : v;
}

/* This thread's share of a unit, 16 rows x (64 k of INT4, 32 k of the others), of a part. */
template <int F> struct experts_raw {
    struct dn_a_raw<F> a;
    uint2 scale, offset;
    float2 fp8;
};
/* Where in a tile its codes and scales begin; unit: 0, 1 of INT4, else 0..3. The next unit's follow. */
template <int F> static __device__ __forceinline__ uint32_t experts_codes_at(int strip, int unit, int lane)
{
    return F == DN_W_INT4   ? ((strip * 2 + unit) * 32 + lane) * 16
           : F == DN_W_BF16 ? ((strip * 8 + unit * 2) * 32 + lane) * 16
                            : ((strip * 4 + unit) * 32 + lane) * 16;
}
template <int F> static __device__ __forceinline__ uint32_t experts_scales_at(int strip, int unit, int lane)
{
    if (F == DN_W_FP8)
        return 0; /* the tile: dn_a_fp8_scale() */
    return dn_tile_codes(F) + (strip * 8 + lane / 4) * 16 + unit * (F == DN_W_INT4 ? 8 : 4);
}
template <int F, bool SYM>
static __device__ __forceinline__ void experts_load(struct experts_raw<F> &raw, const uint8_t *codes,
                                                    const uint8_t *scales, int strip, int lane)
{
    raw.a.v[0] = *(const uint4 *)codes;
    if constexpr (F == DN_W_INT4) {
        raw.scale = *(const uint2 *)scales;
        if constexpr (!SYM)
            raw.offset = *(const uint2 *)(scales + DN_TILE_SCALES);
    } else if constexpr (F == DN_W_BF16)
        raw.a.v[1] = *(const uint4 *)(codes + 512);
    else if constexpr (F == DN_W_INT8)
        raw.scale.x = *(const uint32_t *)scales;
    else
        raw.fp8 = dn_a_fp8_scale(scales, strip, lane);
}

/* From a unit's scales to the next one's. A unit's codes are 512 bytes (BF16: 1,024, but there a warp has one unit). */
static __device__ constexpr int experts_scales_step(int format)
{
    return format == DN_W_INT4 ? 8 : format == DN_W_INT8 ? 4 : 0;
}

/* 32 k of a part, converted: group 0, or of INT4 0 and 1. */
struct experts_group {
    uint32_t a[2][4];
    float2 scale, offset;
};
template <int F, bool SYM, bool SBF16>
static __device__ __forceinline__ void experts_convert(struct experts_group &v, const struct experts_raw<F> &raw,
                                                       int group)
{
    if constexpr (F == DN_W_INT4) {
        dn_int4_fragment_64th<SYM>(group ? raw.a.v[0].z : raw.a.v[0].x, v.a[0]);
        dn_int4_fragment_64th<SYM>(group ? raw.a.v[0].w : raw.a.v[0].y, v.a[1]);
    } else {
        dn_a_fragment<F, SYM>(raw.a, group * 2, v.a[0]);
        dn_a_fragment<F, SYM>(raw.a, group * 2 + 1, v.a[1]);
    }
    if constexpr (F == DN_W_FP8)
        v.scale = raw.fp8;
    else if constexpr (F != DN_W_BF16)
        v.scale = dn_scale_pair(group ? raw.scale.y : raw.scale.x, SBF16);
    if constexpr (F == DN_W_INT4 && !SYM)
        v.offset = dn_scale_pair(group ? raw.offset.y : raw.offset.x, SBF16);
}
/* acc += group * b, 8 tokens. sum: of b's 32 k, in the same places, for offsets. */
template <int F, bool SYM>
static __device__ __forceinline__ void experts_add(float (&acc)[4], const struct experts_group &v,
                                                   const uint32_t (&b)[4], const float (&sum)[4])
{
    if constexpr (F == DN_W_BF16) {
        dn_mma(acc, v.a[0], b[0], b[1]);
        dn_mma(acc, v.a[1], b[2], b[3]);
        return;
    }
    float part[4] = {0, 0, 0, 0};
    dn_mma(part, v.a[0], b[0], b[1]);
    dn_mma(part, v.a[1], b[2], b[3]);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        acc[i] = __fmaf_rn(i < 2 ? v.scale.x : v.scale.y, part[i], acc[i]);
        if constexpr (F == DN_W_INT4 && !SYM)
            acc[i] = __fmaf_rn(i < 2 ? v.offset.x : v.offset.y, sum[i], acc[i]);
    }
}
template <int F, bool SYM> static __device__ __forceinline__ void experts_sum(float (&sum)[4], const uint32_t (&b)[4])
{
    if constexpr (F == DN_W_INT4 && !SYM) {
        const uint32_t ones[4] = {0x3c803c80, 0x3c803c80, 0x3c803c80, 0x3c803c80}; /* 1/64 */
        sum[0] = sum[1] = sum[2] = sum[3] = 0;
        dn_mma(sum, ones, b[0], b[1]);
        dn_mma(sum, ones, b[2], b[3]);
    }
}

/* Where this warp's share of a stage lies, from the stage's beginning; opaque, or they are computed anew each time. */
struct experts_places {
    uint32_t codes0, codes1, scales0, scales1, act;
    int strip0, strip1;
    __device__ __forceinline__ void keep()
    {
        asm volatile("" : "+r"(codes0), "+r"(codes1), "+r"(scales0), "+r"(scales1), "+r"(act));
    }
};

/* The stage's share of this warp, U units. Up to 8 tokens: all is loaded first. More: b is loaded again for each part,
 * for want of registers. */
template <int F, bool SYM, bool SBF16, int U, int STRIDE, int PARTS>
static __device__ __forceinline__ void experts_stage_one(float (&acc)[2][1][4], const uint8_t *stage,
                                                         const struct experts_places &at, int lane)
{
    constexpr int groups = experts_unit(F) / 32;
    struct experts_raw<F> raw[U][2];
    uint32_t b[U * groups][4];
#pragma unroll
    for (int u = 0; u < U; u++) {
        experts_load<F, SYM>(raw[u][0], stage + at.codes0 + u * 512, stage + at.scales0 + u * experts_scales_step(F),
                             at.strip0, lane);
        if constexpr (PARTS == 2)
            experts_load<F, SYM>(raw[u][1], stage + at.codes1 + u * 512,
                                 stage + at.scales1 + u * experts_scales_step(F), at.strip1, lane);
    }
#pragma unroll
    for (int g = 0; g < U * groups; g++)
        dn_ldmatrix(b[g], dn_shared(stage) + at.act + g * 64);
#pragma unroll
    for (int g = 0; g < U * groups; g++) {
        float sum[4];
        experts_sum<F, SYM>(sum, b[g]);
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
            struct experts_group group;
            experts_convert<F, SYM, SBF16>(group, raw[g / groups][part], g % groups);
            experts_add<F, SYM>(acc[part][0], group, b[g], sum);
        }
    }
}
template <int F, bool SYM, bool SBF16, int U, int STRIDE, int NT>
static __device__ __forceinline__ void experts_stage(float (&acc)[2][NT][4], const uint8_t *stage,
                                                     const struct experts_places &at, int lane)
{
    constexpr int groups = experts_unit(F) / 32;
#pragma unroll
    for (int u = 0; u < U; u++) {
#pragma unroll
        for (int part = 0; part < 2; part++) {
            struct experts_raw<F> raw;
            experts_load<F, SYM>(raw, stage + (part ? at.codes1 : at.codes0) + u * 512,
                                 stage + (part ? at.scales1 : at.scales0) + u * experts_scales_step(F),
                                 part ? at.strip1 : at.strip0, lane);
#pragma unroll
            for (int g = 0; g < groups; g++) {
                struct experts_group group;
                experts_convert<F, SYM, SBF16>(group, raw, g);
#pragma unroll
                for (int n = 0; n < NT; n++) {
                    uint32_t b[4];
                    float sum[4];
                    dn_ldmatrix(b, dn_shared(stage) + at.act + n * 8 * STRIDE + (u * groups + g) * 64);
                    experts_sum<F, SYM>(sum, b);
                    experts_add<F, SYM>(acc[part][n], group, b, sum);
                }
            }
        }
    }
}

static __device__ __forceinline__ void experts_strip_sync(int strip)
{
    asm volatile("bar.sync %0, 128;" ::"r"(strip + 1) : "memory");
}

/* Adds the quarters and writes h or part. Warp `quarter` takes register `quarter` of each fragment. */
template <int F, int NT, bool BF16_PART>
static __device__ __forceinline__ void experts_finish(const struct experts_args &p, const float (&acc)[2][NT][4],
                                                      float *red, uint4 info, int strip, int quarter, int lane)
{
    bool down = info.x & EXPERTS_DOWN, half = info.x & EXPERTS_HALF;
    uint32_t block = info.x & ~(EXPERTS_DOWN | EXPERTS_HALF);
    float *mine = red + (strip * 4 + quarter) * (8 * 32) + lane;
    const float *read = red + strip * 4 * (8 * 32) + quarter * 32 + lane;
    uint32_t row = strip * 16 + lane / 4 + quarter / 2 * 8;
#pragma unroll
    for (int n = 0; n < NT; n++) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            mine[i * 32] = acc[i / 4][n][i % 4];
        experts_strip_sync(strip);
        float v[2];
#pragma unroll
        for (int part = 0; part < 2; part++) {
            v[part] = read[part * 4 * 32];
#pragma unroll
            for (int q = 1; q < 4; q++)
                v[part] = __fadd_rn(v[part], read[part * 4 * 32 + q * (8 * 32)]);
            v[part] = experts_unscaled<F>(v[part]);
        }
        uint32_t col = n * 8 + lane % 4 * 2 + quarter % 2;
        size_t i = info.y + col;
        if (col < info.z && !down) {
            uint32_t at = block * DN_TILE_ROWS + row;
            if (at < p.ff)
                p.h[i * p.ff + at] = __float2bfloat16_rn(__fmul_rn(experts_silu(v[0]), v[1]));
        } else if (col < info.z) {
#pragma unroll
            for (int part = 0; part < 2; part++) {
                uint32_t at = (half ? block : block * 2 + part) * DN_TILE_ROWS + row;
                if (at >= p.dim || (half && part))
                    continue;
                if constexpr (BF16_PART)
                    ((__nv_bfloat16 *)p.part)[i * p.dim + at] = __float2bfloat16_rn(v[part]);
                else
                    ((float *)p.part)[i * p.dim + at] = v[part];
            }
        }
        experts_strip_sync(strip); /* red has been read, h written */
    }
    if (!down && quarter == 0 && lane == 0)
        experts_add_release(&p.list.done[info.w], 1);
}

template <int F, bool SYM, bool SBF16, int NT, bool PREFILL>
static __device__ __forceinline__ void experts_consume(const struct experts_args &p, struct experts_shared *sh,
                                                       float *red, uint8_t *ring, struct experts_ring &r, uint4 info,
                                                       int strip, int quarter, int lane)
{
    constexpr int KT = experts_kt(F, PREFILL), U = KT * 32 / experts_unit(F), stride = experts_stride(KT);
    bool down = info.x & EXPERTS_DOWN, half = info.x & EXPERTS_HALF;
    const uint32_t tile_bytes = dn_tile_bytes(F, SYM), parts = half ? 1 : down ? 2 : p.parts;
    uint32_t tiles = down ? p.down.n_tiles : p.gate_up.n_tiles, steps = (tiles + KT - 1) / KT;
    uint32_t in_stage = quarter * KT / 4; /* which of the stage's tiles, and below which of its units */
    uint32_t tile0 = in_stage * tile_bytes, tile1 = ((parts == 3 && strip >= 2 ? 2 : 1) * KT + in_stage) * tile_bytes;
    int unit = quarter * U % (DN_TILE_K / experts_unit(F));
    struct experts_places at;
    at.strip0 = strip;
    at.strip1 = parts == 3 ? strip ^ 2 : strip;
    at.codes0 = tile0 + experts_codes_at<F>(at.strip0, unit, lane);
    at.codes1 = tile1 + experts_codes_at<F>(at.strip1, unit, lane);
    at.scales0 = tile0 + experts_scales_at<F>(at.strip0, unit, lane);
    at.scales1 = tile1 + experts_scales_at<F>(at.strip1, unit, lane);
    /* ldmatrix: lane i gives token i % 8, k 8 (i / 8) */
    at.act = parts * KT * tile_bytes + lane % 8 * stride + quarter * (KT * 64) + lane / 8 * 16;
    at.keep();
    float acc[2][NT][4];
#pragma unroll
    for (int i = 0; i < NT * 8; i++)
        acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0;
    for (uint32_t k = 0; k < steps; k++) {
        dn_barrier_wait(&sh->full[r.stage], r.parity);
        const uint8_t *stage = ring + r.stage * p.stage_bytes;
        if (k * KT + in_stage < tiles) {
            if constexpr (NT == 1) {
                if (half)
                    experts_stage_one<F, SYM, SBF16, U, stride, 1>(acc, stage, at, lane);
                else
                    experts_stage_one<F, SYM, SBF16, U, stride, 2>(acc, stage, at, lane);
            } else
                experts_stage<F, SYM, SBF16, U, stride, NT>(acc, stage, at, lane);
        }
        __syncwarp();
        if (lane == 0)
            dn_barrier_arrive(&sh->empty[r.stage]);
        r.next(p.stages);
    }
    experts_finish<F, NT, PREFILL>(p, acc, red, info, strip, quarter, lane);
}

/* MAX_NT: 2 for decode (rows <= 16), 4 for prefill (rows <= 32). */
template <int F, bool SYM, bool SBF16, int MAX_NT>
static __global__ void __launch_bounds__(EXPERTS_THREADS, 1)
    experts_kernel(const __grid_constant__ struct experts_args p)
{
#if __CUDA_ARCH__ >= 900
    constexpr bool prefill = MAX_NT > 2;
    extern __shared__ __align__(1024) uint8_t shared[];
    struct experts_shared *sh = (struct experts_shared *)shared;
    float *red = (float *)(shared + 1024);
    uint8_t *ring = shared + 1024 + EXPERTS_RED;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < p.stages; i++) {
            dn_barrier_init(&sh->full[i], 1 + 32);
            dn_barrier_init(&sh->empty[i], EXPERTS_CONSUMERS);
            dn_barrier_init(&sh->taken[i], 1);
        }
        dn_barrier_init_fence();
    }
    __syncthreads();
    dn_wait_previous();
    dn_start_next();
    if (warp >= EXPERTS_CONSUMERS) {
        experts_registers_fewer<64>();
        if (warp == EXPERTS_CONSUMERS && lane == 0)
            experts_weights_warp<experts_kt(F, prefill)>(p, sh, ring);
        if (warp == EXPERTS_CONSUMERS + 1)
            experts_tokens_warp<experts_kt(F, prefill), MAX_NT>(p, sh, ring, lane);
    } else {
        experts_registers_more<104>();
        int strip = warp / 4, quarter = warp % 4;
        struct experts_ring r = {0, 0};
        for (;;) {
            dn_barrier_wait(&sh->full[r.stage], r.parity);
            uint4 info = sh->info[r.stage];
            if (info.x == EXPERTS_END)
                break;
            uint32_t nt = (info.z + 7) / 8;
#define CONSUME(n) experts_consume<F, SYM, SBF16, n, prefill>(p, sh, red, ring, r, info, strip, quarter, lane)
            if constexpr (prefill) {
                if (nt <= 2)
                    CONSUME(2);
                else
                    CONSUME(4);
            } else if (nt == 1)
                CONSUME(1);
            else
                CONSUME(2);
#undef CONSUME
        }
    }
#endif
}

template <int F, bool SYM, bool SBF16, int MAX_NT>
static void experts_launch(struct dn_cuda *c, struct experts_args *p, const struct dn_weights *w)
{
    size_t shared = experts_shared(c, p, w, MAX_NT > 2);
    dn_launch(c, "experts", experts_kernel<F, SYM, SBF16, MAX_NT>, dim3((unsigned)c->n_sms), dim3(EXPERTS_THREADS),
              shared, *p);
}

/* f<format, symmetric, scale_is_bf16>(...) for the format of w. */
#define EXPERTS_BY_FORMAT(f, w, extra, ...)                                                                            \
    do {                                                                                                               \
        bool sbf16_ = (w)->scale_is_bf16;                                                                              \
        if ((w)->format == DN_W_BF16)                                                                                  \
            f<DN_W_BF16, true, true, extra>(__VA_ARGS__);                                                              \
        else if ((w)->format == DN_W_FP8)                                                                              \
            f<DN_W_FP8, true, true, extra>(__VA_ARGS__);                                                               \
        else if ((w)->format == DN_W_INT8 && sbf16_)                                                                   \
            f<DN_W_INT8, true, true, extra>(__VA_ARGS__);                                                              \
        else if ((w)->format == DN_W_INT8)                                                                             \
            f<DN_W_INT8, true, false, extra>(__VA_ARGS__);                                                             \
        else if ((w)->symmetric && sbf16_)                                                                             \
            f<DN_W_INT4, true, true, extra>(__VA_ARGS__);                                                              \
        else if ((w)->symmetric)                                                                                       \
            f<DN_W_INT4, true, false, extra>(__VA_ARGS__);                                                             \
        else if (sbf16_)                                                                                               \
            f<DN_W_INT4, false, true, extra>(__VA_ARGS__);                                                             \
        else                                                                                                           \
            f<DN_W_INT4, false, false, extra>(__VA_ARGS__);                                                            \
    } while (0)

#endif
