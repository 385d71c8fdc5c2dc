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
 * A stage of the ring: `parts` x KT weight tiles (64 rows x 128 k), then rows x (KT * 256 + 16) bytes of activations
 * (the 16 keep ldmatrix free of bank conflicts). Its barriers: empty (16 warps arrive; the weights' warp waits), taken
 * (the weights' warp arrives, having written info[]; the tokens' warp waits), full (the weights' warp, with bytes, and
 * 32 lanes of the tokens' warp; consumers wait). Shared memory: info | barriers | red | stages.
 *
 * ff is a multiple of 32: where it is none of 64, the rows of up that belong to 64 of gate lie in two tiles, which
 * makes three parts.
 *
 * Floor: bytes of the touched experts at 4.65 TB/s.
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
    EXPERTS_DONE = EXPERTS_CONSUMERS,     /* arrivals on done[tile] for each of its items */
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
    uint32_t rows, stages, parts, act_stride, stage_bytes, red_bytes;
    uint32_t phases; /* bits: 1, 2 */
};

/* Tiles of 128 k a stage has. */
static __host__ __device__ constexpr int experts_kt(int format)
{
    return format == DN_W_INT4 ? 2 : 1;
}

/* Launch the persistent kernel for w's format and p->phases. */
void dn_cuda_experts_decode(struct dn_cuda *c, struct experts_args *p, const struct dn_weights *w);
void dn_cuda_experts_prefill(struct dn_cuda *c, struct experts_args *p, const struct dn_weights *w);
/* For GPUs without bulk copies or with little shared memory: p->phases is 1 or 2. `bf16_part`: the type of part. */
void dn_cuda_experts_plain(struct dn_cuda *c, const struct experts_args *p, const struct dn_weights *w, bool bf16_part);

/* Chooses the ring's stages; the bytes of shared memory that a block needs. Least: 2 stages of three BF16 parts. */
enum { EXPERTS_SHARED_LEAST = 200 << 10 };
static inline size_t experts_shared(struct dn_cuda *c, struct experts_args *p, const struct dn_weights *w)
{
    uint32_t kt = (uint32_t)experts_kt(w->format);
    p->act_stride = kt * 256 + 16;
    p->stage_bytes = (p->parts * kt * w->tile_bytes + p->rows * p->act_stride + 127) / 128 * 128;
    p->red_bytes = EXPERTS_RED * (p->rows > 8 ? 2 : 1);
    size_t fixed = 1024 + p->red_bytes;
    p->stages = (uint32_t)((c->shared_bytes - fixed) / p->stage_bytes);
    if (p->stages > EXPERTS_MAX_STAGES)
        p->stages = EXPERTS_MAX_STAGES;
    return fixed + (size_t)p->stages * p->stage_bytes;
}

struct experts_shared {
    uint4 info[EXPERTS_MAX_STAGES]; /* phase << 31 | block, or END; first; n; tile */
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
                                                     uint32_t block, const uint8_t *at[3])
{
    if (down) {
        uint32_t blocks = p.dim / DN_TILE_ROWS;
        at[0] = dn_tile(p.down, expert * blocks + block * 2, 0);
        at[1] = at[2] = dn_tile(p.down, expert * blocks + min(block * 2 + 1, blocks - 1), 0);
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
static __device__ __forceinline__ void experts_item_at(const struct experts_args &p, struct experts_item &it,
                                                       uint32_t id, uint32_t n1, uint32_t total)
{
    it.id = id;
    if (id >= total)
        return;
    it.phase = id >= n1;
    uint32_t i = it.phase ? id - n1 : id, blocks = it.phase ? p.blocks2 : p.blocks1;
    it.tile = i / blocks;
    it.block = i % blocks;
    it.t = p.list.tile[it.tile];
}

template <int KT>
static __device__ void experts_weights_warp(const struct experts_args &p, struct experts_shared *sh, uint8_t *ring)
{
    uint32_t n_tiles = *p.list.n_tiles;
    uint32_t n1 = p.phases & 1 ? n_tiles * p.blocks1 : 0;
    uint32_t total = n1 + (p.phases & 2 ? n_tiles * p.blocks2 : 0);
    uint32_t *claim = p.list.claim + (p.phases == 2);
    struct experts_ring r = {0, 0};
    struct experts_item it, next;
    experts_item_at(p, it, atomicAdd(claim, 1), n1, total);
    while (it.id < total) {
        uint32_t next_id = atomicAdd(claim, 1); /* is there long before it is needed */
        const struct dn_weights &w = it.phase ? p.down : p.gate_up;
        uint32_t parts = it.phase ? 2 : p.parts, steps = (w.n_tiles + KT - 1) / KT;
        const uint8_t *at[3];
        experts_parts(p, it.phase, it.t.expert, it.block, at);
        bool once = it.t.of_expert == 1;
        uint4 info = make_uint4(it.phase << 31 | it.block, it.t.first, it.t.n, it.tile);
        for (uint32_t k = 0; k < steps; k++) {
            uint32_t bytes = min((uint32_t)KT, w.n_tiles - k * KT) * w.tile_bytes;
            if (k + 1 == steps)
                experts_item_at(p, next, next_id, n1, total);
            dn_barrier_wait(&sh->empty[r.stage], r.parity ^ 1);
            sh->info[r.stage] = info;
            uint8_t *to = ring + r.stage * p.stage_bytes;
            dn_barrier_expect(&sh->full[r.stage], parts * bytes);
#pragma unroll
            for (int i = 0; i < 3; i++)
                if (i < (int)parts) {
                    const uint8_t *from = at[i] + (size_t)k * KT * w.tile_bytes;
                    if (once)
                        dn_bulk_once(to + i * KT * w.tile_bytes, from, bytes, &sh->full[r.stage]);
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
        bool down = info.x >> 31;
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
        uint32_t weights = (down ? 2 : p.parts) * KT * w.tile_bytes;
        for (uint32_t k = 0; k < steps; k++) {
            if (k > 0)
                dn_barrier_wait(&sh->taken[r.stage], r.parity);
            uint32_t to = dn_shared(ring + r.stage * p.stage_bytes + weights) + lane / 4 * p.act_stride + lane % 4 * 16;
            uint32_t at = k * KT * DN_TILE_K + lane % 4 * 8;
#pragma unroll
            for (int j = 0; j < MAX_NT; j++)
                if (row[j]) {
                    uint32_t row_to = to + 8 * j * p.act_stride;
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

/* This warp's 16 rows x (64 k of INT4, 32 k of the others) of a part. */
template <int F> struct experts_raw {
    struct dn_a_raw<F> a;
    uint2 scale, offset;
    float2 fp8;
};
/* Where in a tile this thread's codes and scales begin. */
template <int F> static __device__ __forceinline__ uint32_t experts_codes_at(int strip, int quarter, int lane)
{
    if (F == DN_W_INT4)
        return ((strip * 2 + quarter % 2) * 32 + lane) * 16;
    if (F == DN_W_BF16)
        return ((strip * 8 + quarter * 2) * 32 + lane) * 16;
    return ((strip * 4 + quarter) * 32 + lane) * 16;
}
template <int F> static __device__ __forceinline__ uint32_t experts_scales_at(int strip, int quarter, int lane)
{
    if (F == DN_W_FP8)
        return 0; /* the tile: dn_a_fp8_scale() */
    return dn_tile_codes(F) + (strip * 8 + lane / 4) * 16 + (F == DN_W_INT4 ? quarter % 2 * 8 : quarter * 4);
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

/* acc += 32 k of a part: group 0, or of INT4 0 and 1. b: [nt][4]; sums of b in the same places, for offsets. */
template <int F, bool SYM, bool SBF16, int NT>
static __device__ __forceinline__ void experts_group(float (&acc)[NT][4], const struct experts_raw<F> &raw, int group,
                                                     const uint32_t (&b)[NT][4], const float (&sum)[NT][4])
{
    uint32_t a0[4], a1[4];
    dn_a_fragment<F, SYM>(raw.a, group * 2, a0);
    dn_a_fragment<F, SYM>(raw.a, group * 2 + 1, a1);
    if constexpr (F == DN_W_BF16) {
#pragma unroll
        for (int n = 0; n < NT; n++) {
            dn_mma(acc[n], a0, b[n][0], b[n][1]);
            dn_mma(acc[n], a1, b[n][2], b[n][3]);
        }
    } else {
        float2 scale = raw.fp8, offset = make_float2(0, 0);
        if constexpr (F != DN_W_FP8)
            scale = dn_scale_pair(group ? raw.scale.y : raw.scale.x, SBF16);
        if constexpr (F == DN_W_INT4 && !SYM)
            offset = dn_scale_pair(group ? raw.offset.y : raw.offset.x, SBF16);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            float part[4] = {0, 0, 0, 0};
            dn_mma(part, a0, b[n][0], b[n][1]);
            dn_mma(part, a1, b[n][2], b[n][3]);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                acc[n][i] = __fmaf_rn(i < 2 ? scale.x : scale.y, part[i], acc[n][i]);
                if constexpr (F == DN_W_INT4 && !SYM)
                    acc[n][i] = __fmaf_rn(i < 2 ? offset.x : offset.y, sum[n][i], acc[n][i]);
            }
        }
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

/* The stage's share of this warp. */
template <int F, bool SYM, bool SBF16, int NT>
static __device__ __forceinline__ void experts_stage(float (&acc)[2][NT][4], const uint8_t *stage,
                                                     const struct experts_places &at, uint32_t act_stride, int lane)
{
    constexpr int groups = F == DN_W_INT4 ? 2 : 1;
    struct experts_raw<F> raw[2];
    experts_load<F, SYM>(raw[0], stage + at.codes0, stage + at.scales0, at.strip0, lane);
    experts_load<F, SYM>(raw[1], stage + at.codes1, stage + at.scales1, at.strip1, lane);
    uint32_t act = dn_shared(stage) + at.act;
    constexpr int step = NT < 2 ? NT : 2; /* n tiles whose b is held at a time */
#pragma unroll
    for (int g = 0; g < groups; g++)
#pragma unroll
        for (int n = 0; n < NT; n += step) {
            uint32_t b[step][4];
            float sum[step][4];
#pragma unroll
            for (int i = 0; i < step; i++) {
                dn_ldmatrix(b[i], act + (n + i) * 8 * act_stride + g * 64);
                if constexpr (F == DN_W_INT4 && !SYM) {
                    const uint32_t ones[4] = {0x3f803f80, 0x3f803f80, 0x3f803f80, 0x3f803f80};
                    sum[i][0] = sum[i][1] = sum[i][2] = sum[i][3] = 0;
                    dn_mma(sum[i], ones, b[i][0], b[i][1]);
                    dn_mma(sum[i], ones, b[i][2], b[i][3]);
                }
            }
#pragma unroll
            for (int part = 0; part < 2; part++)
                experts_group<F, SYM, SBF16, step>(*(float(*)[step][4]) & acc[part][n], raw[part], g, b, sum);
        }
}

static __device__ __forceinline__ void experts_strip_sync(int strip)
{
    asm volatile("bar.sync %0, 128;" ::"r"(strip + 1) : "memory");
}

/* Adds the quarters and writes h or part. Warp `quarter` takes register `quarter` of each fragment. */
template <int NT, bool BF16_PART>
static __device__ __forceinline__ void experts_finish(const struct experts_args &p, const float (&acc)[2][NT][4],
                                                      float *red, uint4 info, int strip, int quarter, int lane)
{
    constexpr int round = NT < 2 ? NT : 2; /* n tiles at a time: what red has room for */
    bool down = info.x >> 31;
    uint32_t block = info.x & 0x7fffffff;
    float *mine = red + (strip * 4 + quarter) * (round * 8 * 32) + lane;
    const float *read = red + strip * 4 * (round * 8 * 32) + quarter * 32 + lane;
    uint32_t row = strip * 16 + lane / 4 + quarter / 2 * 8;
#pragma unroll
    for (int n0 = 0; n0 < NT; n0 += round) {
        experts_strip_sync(strip); /* the last round's reads are done */
#pragma unroll
        for (int n = 0; n < round; n++)
#pragma unroll
            for (int i = 0; i < 8; i++)
                mine[(n * 8 + i) * 32] = acc[i / 4][n0 + n][i % 4];
        experts_strip_sync(strip);
#pragma unroll
        for (int n = 0; n < round; n++) {
            float v[2];
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const float *from = read + (n * 8 + part * 4) * 32;
                v[part] = from[0];
#pragma unroll
                for (int q = 1; q < 4; q++)
                    v[part] = __fadd_rn(v[part], from[q * (round * 8 * 32)]);
            }
            uint32_t col = (n0 + n) * 8 + lane % 4 * 2 + quarter % 2;
            if (col >= info.z)
                continue;
            size_t i = info.y + col;
            if (!down) {
                uint32_t at = block * DN_TILE_ROWS + row;
                if (at < p.ff)
                    p.h[i * p.ff + at] = __float2bfloat16_rn(__fmul_rn(experts_silu(v[0]), v[1]));
            } else {
#pragma unroll
                for (int part = 0; part < 2; part++) {
                    uint32_t at = (block * 2 + part) * DN_TILE_ROWS + row;
                    if (at >= p.dim)
                        continue;
                    if constexpr (BF16_PART)
                        ((__nv_bfloat16 *)p.part)[i * p.dim + at] = __float2bfloat16_rn(v[part]);
                    else
                        ((float *)p.part)[i * p.dim + at] = v[part];
                }
            }
        }
    }
    if (!down) {
        __syncwarp();
        if (lane == 0)
            experts_add_release(&p.list.done[info.w], 1);
    }
}

template <int F, bool SYM, bool SBF16, int NT, bool BF16_PART>
static __device__ __forceinline__ void experts_consume(const struct experts_args &p, struct experts_shared *sh,
                                                       float *red, uint8_t *ring, struct experts_ring &r, uint4 info,
                                                       int strip, int quarter, int lane)
{
    constexpr int KT = experts_kt(F);
    bool down = info.x >> 31;
    const uint32_t tile_bytes = dn_tile_bytes(F, SYM), parts = down ? 2 : p.parts;
    uint32_t tiles = down ? p.down.n_tiles : p.gate_up.n_tiles, steps = (tiles + KT - 1) / KT;
    uint32_t in_stage = KT == 2 ? quarter / 2 : 0; /* which of the stage's tiles */
    uint32_t tile0 = in_stage * tile_bytes, tile1 = ((parts == 3 && strip >= 2 ? 2 : 1) * KT + in_stage) * tile_bytes;
    struct experts_places at;
    at.strip0 = strip;
    at.strip1 = parts == 3 ? strip ^ 2 : strip;
    at.codes0 = tile0 + experts_codes_at<F>(at.strip0, quarter, lane);
    at.codes1 = tile1 + experts_codes_at<F>(at.strip1, quarter, lane);
    at.scales0 = tile0 + experts_scales_at<F>(at.strip0, quarter, lane);
    at.scales1 = tile1 + experts_scales_at<F>(at.strip1, quarter, lane);
    /* ldmatrix: lane i gives token i % 8, k 8 (i / 8) */
    at.act = parts * KT * tile_bytes + lane % 8 * p.act_stride + quarter * (KT * 64) + lane / 8 * 16;
    at.keep();
    float acc[2][NT][4];
#pragma unroll
    for (int i = 0; i < NT * 8; i++)
        acc[i / (NT * 4)][i / 4 % NT][i % 4] = 0;
    for (uint32_t k = 0; k < steps; k++) {
        dn_barrier_wait(&sh->full[r.stage], r.parity);
        if (k * KT + in_stage < tiles)
            experts_stage<F, SYM, SBF16, NT>(acc, ring + r.stage * p.stage_bytes, at, p.act_stride, lane);
        __syncwarp();
        if (lane == 0)
            dn_barrier_arrive(&sh->empty[r.stage]);
        r.next(p.stages);
    }
    experts_finish<NT, BF16_PART>(p, acc, red, info, strip, quarter, lane);
}

/* MAX_NT: 4 for decode (rows <= 32), 8 for prefill (rows <= 64). */
template <int F, bool SYM, bool SBF16, int MAX_NT>
static __global__ void __launch_bounds__(EXPERTS_THREADS, 1)
    experts_kernel(const __grid_constant__ struct experts_args p)
{
#if __CUDA_ARCH__ >= 900
    constexpr bool prefill = MAX_NT > 4;
    extern __shared__ __align__(1024) uint8_t shared[];
    struct experts_shared *sh = (struct experts_shared *)shared;
    float *red = (float *)(shared + 1024);
    uint8_t *ring = shared + 1024 + p.red_bytes;
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
            experts_weights_warp<experts_kt(F)>(p, sh, ring);
        if (warp == EXPERTS_CONSUMERS + 1)
            experts_tokens_warp<experts_kt(F), MAX_NT>(p, sh, ring, lane);
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
            if (nt == 1)
                CONSUME(1);
            else if (nt == 2)
                CONSUME(2);
            else if (nt <= 4)
                CONSUME(4);
            else if constexpr (prefill)
                CONSUME(8);
#undef CONSUME
        }
    }
#endif
}

template <int F, bool SYM, bool SBF16, int MAX_NT>
static void experts_launch(struct dn_cuda *c, struct experts_args *p, const struct dn_weights *w)
{
    size_t shared = experts_shared(c, p, w);
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
