/* The packed form of a weight matrix on the GPU, and how a thread gets at it.
 *
 * A matrix is cut into tiles of 64 rows (outputs) x 128 k (inputs), rows padded to 64 and k to 128 with zeros. The
 * tiles of 64 rows follow one another along k, then come the next 64 rows; groups are just more rows:
 *
 *            k 0..127   128..255  ...                address of tile (row block b, k tile j)
 *   rows 0   | tile 0 | tile 1 | ... | tile T-1 |      = data + (b * T + j) * tile_bytes,   T = ceil(n_in / 128)
 *   rows 64  | tile T | ...                            so any run of k tiles of 64 rows is one contiguous piece
 *
 * A tile is 4 strips of 16 rows, each in the order of the A fragments of mma.sync.m16n8k16 (mma.cuh; also those of
 * wgmma's m64k16, warp = strip), so that a thread's 16-byte load brings whole fragments and a warp's load is 512
 * contiguous bytes. g = lane / 4, t = lane % 4; "pair j" is register a_j of k16 step s: row g + 8 (j & 1),
 * k = 16 s + 2 t + 8 (j >> 1) and the next.
 *
 *   BF16 16,384 B  [strip][k16 step 8][lane][pair 4] of 2 bf16
 *
 *   INT8 8,704 B   [strip][k32 4][lane][step 2][word 2] of 4 codes: pair 2 word in bytes 0, 2; pair 2 word + 1 in 1, 3;
 *                  then scales
 *
 *   FP8 8,208 B    codes as INT8, then {f32 scale, 0, u64 mask of the rows that have a NaN code in this tile}
 *
 *   INT4 4,608 B   [strip][k64 2][lane][step 4] of 8 codes: pair j in bits 4j.. (even k) and 16 + 4j.. (odd k);
 *   or 5,120 B     then scales, then (unless symmetric) offsets
 *
 *   scales, offsets: 512 B, [strip][g 8][group of 32 k 4][2: row g, row g + 8], f16 or bf16
 *
 * Conversion to bf16 is exact in all of them: INT4 (w >> 4j & 0x000f000f) | 0x43004300 is 128 + q, minus 136
 * (symmetric) or 128; INT8 low 7 bits over 128, minus 128 or 256 by the sign bit; e4m3 shifted into bf16's place times
 * 2^120. Scales and offsets are for the accumulators: sum_k w x = scale * sum_k q x + offset * sum_k x.
 *
 * No state. Host functions may be called from any thread.
 */
#ifndef DN_KERNELS_CUDA_WEIGHTS_CUH
#define DN_KERNELS_CUDA_WEIGHTS_CUH

#include "kernels/cuda/device.cuh"

enum {
    DN_TILE_ROWS = 64,
    DN_TILE_K = 128,
    DN_TILE_STRIPS = DN_TILE_ROWS / 16,
    DN_TILE_SCALES = 512, /* bytes of a tile's 16-bit scales, and of its offsets */
};

/* A matrix as kernels see it, by value. */
struct dn_weights {
    const uint8_t *data;
    uint32_t tile_bytes;
    uint32_t n_tiles;      /* along k */
    uint32_t n_rows, n_in; /* rows of all groups */
    uint8_t format;
    bool symmetric, scale_is_bf16;
};

/* Where codes end and scales (FP8: the header) begin. */
static __host__ __device__ constexpr uint32_t dn_tile_codes(int format)
{
    return format == DN_W_BF16 ? 16384 : format == DN_W_INT4 ? 4096 : 8192;
}
static __host__ __device__ constexpr uint32_t dn_tile_bytes(int format, bool symmetric)
{
    return format == DN_W_BF16   ? 16384
           : format == DN_W_FP8  ? 8208
           : format == DN_W_INT8 ? 8192 + DN_TILE_SCALES
           : symmetric           ? 4096 + DN_TILE_SCALES
                                 : 4096 + 2 * DN_TILE_SCALES;
}
static inline uint32_t dn_weights_groups(const struct dn_matrix *m)
{
    return m->n_groups > 1 ? m->n_groups : 1;
}
static inline struct dn_weights dn_weights_of(const struct dn_matrix *m)
{
    struct dn_weights w = {};
    w.data = (const uint8_t *)m->data;
    w.tile_bytes = dn_tile_bytes(m->format, m->symmetric);
    w.n_tiles = (m->n_in + DN_TILE_K - 1) / DN_TILE_K;
    w.n_rows = dn_weights_groups(m) * m->n_out;
    w.n_in = m->n_in;
    w.format = (uint8_t)m->format;
    w.symmetric = m->symmetric;
    w.scale_is_bf16 = m->scale_is_bf16;
    return w;
}
static __host__ __device__ __forceinline__ const uint8_t *dn_tile(const struct dn_weights &w, uint32_t row_block,
                                                                  uint32_t k_tile)
{
    return w.data + ((size_t)row_block * w.n_tiles + k_tile) * w.tile_bytes;
}

/* ---- Where an element lies within its tile; row 0..63, k 0..127 ---- */

static __host__ __device__ __forceinline__ uint32_t dn_at_lane(uint32_t row, uint32_t k)
{
    return row % 8 * 4 + k % 8 / 2;
}
static __host__ __device__ __forceinline__ uint32_t dn_at_pair(uint32_t row, uint32_t k)
{
    return row % 16 / 8 + k % 16 / 8 * 2;
}
static __host__ __device__ __forceinline__ uint32_t dn_at_bf16(uint32_t row, uint32_t k) /* in bytes, as all of these */
{
    return ((row / 16 * 8 + k / 16) * 32 + dn_at_lane(row, k)) * 16 + dn_at_pair(row, k) * 4 + k % 2 * 2;
}
static __host__ __device__ __forceinline__ uint32_t dn_at_byte(uint32_t row, uint32_t k) /* INT8, FP8 */
{
    uint32_t pair = dn_at_pair(row, k);
    return ((row / 16 * 4 + k / 32) * 32 + dn_at_lane(row, k)) * 16 + k % 32 / 16 * 8 + pair / 2 * 4 + k % 2 * 2 +
           pair % 2;
}
/* INT4: the 32-bit word, and the code's first bit in it. */
static __host__ __device__ __forceinline__ uint32_t dn_at_int4(uint32_t row, uint32_t k)
{
    return ((row / 16 * 2 + k / 64) * 32 + dn_at_lane(row, k)) * 16 + k % 64 / 16 * 4;
}
static __host__ __device__ __forceinline__ uint32_t dn_at_int4_bit(uint32_t row, uint32_t k)
{
    return dn_at_pair(row, k) * 4 + k % 2 * 16;
}
/* From the beginning of the scales or offsets. */
static __host__ __device__ __forceinline__ uint32_t dn_at_scale(uint32_t row, uint32_t k)
{
    return ((row / 16 * 8 + row % 8) * 4 + k / 32) * 4 + row % 16 / 8 * 2;
}

/* ---- Conversions ---- */

/* Two bf16 a register; only bits matter, so that no type of the CUDA headers gets in the way. */
static __device__ __forceinline__ uint32_t dn_sub_bf16x2(uint32_t a, uint32_t b)
{
    __nv_bfloat162 r = __hsub2(*(__nv_bfloat162 *)&a, *(__nv_bfloat162 *)&b);
    return *(uint32_t *)&r;
}
/* 8 codes, one k16 step, to 4 registers: q - 8 (zero = 136) or q (zero = 128). */
template <bool symmetric> static __device__ __forceinline__ void dn_int4_fragment(uint32_t w, uint32_t a[4])
{
    const uint32_t zero = symmetric ? 0x43084308 : 0x43004300;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        /* (w >> 4j & mask) | 128: as one instruction. Left to itself the compiler makes two, of a pipe that is the
         * limit. */
        uint32_t v;
        asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(v) : "r"(w >> (4 * j)), "n"(0x000f000f), "r"(0x43004300));
        a[j] = dn_sub_bf16x2(v, zero);
    }
}
/* 8 INT4 codes, one k16 step, to 4 registers: (q - 8) / 64, or q / 64. As bf16 bits, 0..255 are the integer
 * times 2^-133, subnormal numbers included; one fma makes that 2^-6 and subtracts. That saves a third of the ALU
 * instructions of dn_int4_fragment(): there is no | to do, and codes need not be shifted to the lowest bits. */
template <bool symmetric> static __device__ __forceinline__ void dn_int4_fragment_64th(uint32_t w, uint32_t a[4])
{
    uint32_t zero = symmetric ? 0xbe00be00 : 0x80008000, high = w >> 8; /* -8/64, -0 */
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a[0]) : "r"(w & 0x000f000f), "r"(0x7f007f00), "r"(zero));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a[1]) : "r"(w & 0x00f000f0), "r"(0x7d007d00), "r"(zero));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a[2]) : "r"(high & 0x000f000f), "r"(0x7f007f00), "r"(zero));
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(a[3]) : "r"(high & 0x00f000f0), "r"(0x7d007d00), "r"(zero));
}
static __device__ __forceinline__ uint32_t dn_int8_pair(uint32_t w) /* bytes 0 and 2 */
{
    return dn_sub_bf16x2((w & 0x007f007f) | 0x43004300, (w & 0x00800080) | 0x43004300);
}
static __device__ __forceinline__ uint32_t dn_fp8_pair(uint32_t shifted4, uint32_t signs) /* NaN codes give 480 */
{
    uint32_t m = (shifted4 & 0x07f007f0) | (signs & 0x80008000), two120 = 0x7b807b80; /* bf16 2^120 */
    __nv_bfloat162 r = __hmul2(*(__nv_bfloat162 *)&m, *(__nv_bfloat162 *)&two120);
    return *(uint32_t *)&r;
}
static __device__ __forceinline__ float dn_scale16(uint16_t s, bool is_bf16)
{
    return is_bf16 ? __uint_as_float((uint32_t)s << 16) : __half2float(__ushort_as_half(s));
}
/* The scales of rows g and g + 8 out of a 32-bit word. */
static __device__ __forceinline__ float2 dn_scale_pair(uint32_t word, bool is_bf16)
{
    if (is_bf16)
        return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000));
    return __half22float2(*(const __half2 *)&word);
}

/* ---- A thread's share of 16 rows x 64 k: loaded as packed, converted step by step ---- */

template <int format> struct dn_a_raw {
    uint4 v[format == DN_W_BF16 ? 4 : format == DN_W_INT4 ? 1 : 2];
};
/* tile: in shared or global memory, 16-byte aligned; strip 0..3, half 0..1 (k 0..63, 64..127). No bank conflicts. */
template <int format>
static __device__ __forceinline__ void dn_a_load(struct dn_a_raw<format> &raw, const uint8_t *tile, int strip, int half,
                                                 int lane)
{
    constexpr int n = sizeof raw / sizeof *raw.v;
#pragma unroll
    for (int i = 0; i < n; i++)
        raw.v[i] = ((const uint4 *)tile)[((strip * 2 + half) * n + i) * 32 + lane];
}
/* Only what steps 2 q and 2 q + 1 need (INT4: for q = 0 both, for q = 1 nothing), to have fewer registers in use. */
template <int format>
static __device__ __forceinline__ void dn_a_load_part(struct dn_a_raw<format> &raw, const uint8_t *tile, int strip,
                                                      int half, int q, int lane)
{
    constexpr int n = sizeof raw / sizeof *raw.v, part = n > 1 ? n / 2 : 1;
    if (n == 1 && q)
        return;
#pragma unroll
    for (int i = q * part; i < (q + 1) * part; i++)
        raw.v[i] = ((const uint4 *)tile)[((strip * 2 + half) * n + i) * 32 + lane];
}
/* Registers a0..a3 of k16 step 0..3 (a constant after unrolling). symmetric matters for INT4 alone. */
template <int format, bool symmetric>
static __device__ __forceinline__ void dn_a_fragment(const struct dn_a_raw<format> &raw, int step, uint32_t a[4])
{
    if constexpr (format == DN_W_BF16) {
        const uint4 &v = raw.v[step];
        a[0] = v.x, a[1] = v.y, a[2] = v.z, a[3] = v.w;
    } else if constexpr (format == DN_W_INT4) {
        const uint4 &v = raw.v[0];
        dn_int4_fragment<symmetric>(step == 0 ? v.x : step == 1 ? v.y : step == 2 ? v.z : v.w, a);
    } else {
        const uint4 &v = raw.v[step / 2];
        uint32_t w[2] = {step % 2 ? v.z : v.x, step % 2 ? v.w : v.y};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            if constexpr (format == DN_W_INT8) {
                a[2 * i] = dn_int8_pair(w[i]);
                a[2 * i + 1] = dn_int8_pair(w[i] >> 8);
            } else {
                a[2 * i] = dn_fp8_pair(w[i] << 4, w[i] << 8);
                a[2 * i + 1] = dn_fp8_pair(w[i] >> 4, w[i]);
            }
        }
    }
}
/* INT4, INT8: the scales (offset: the offsets) of rows g and g + 8 for the two groups of 32 of a half: .x and .y are
 * for dn_scale_pair(). */
template <int format>
static __device__ __forceinline__ uint2 dn_a_scales(const uint8_t *tile, bool offset, int strip, int half, int lane)
{
    const uint8_t *at = tile + dn_tile_codes(format) + (offset ? DN_TILE_SCALES : 0);
    return ((const uint2 *)at)[(strip * 8 + lane / 4) * 2 + half];
}
/* FP8: the scale of rows g and g + 8 of a strip; NaN for a row with a NaN code in this tile. */
static __device__ __forceinline__ float2 dn_a_fp8_scale(const uint8_t *tile, int strip, int lane)
{
    uint4 head = *(const uint4 *)(tile + dn_tile_codes(DN_W_FP8));
    float scale = __uint_as_float(head.x);
    float2 s = make_float2(scale, scale);
    if (head.z | head.w) {
        uint32_t mask = (strip < 2 ? head.z : head.w) >> (strip % 2 * 16 + lane / 4);
        s.x = mask & 1 ? __int_as_float(0x7fc00000) : scale;
        s.y = mask & 0x100 ? __int_as_float(0x7fc00000) : scale;
    }
    return s;
}

/* ---- One value as f32: embedding rows, unpacking ---- */

static __device__ __forceinline__ float dn_weight(const struct dn_weights &w, uint32_t row, uint32_t k)
{
    const uint8_t *tile = dn_tile(w, row / DN_TILE_ROWS, k / DN_TILE_K);
    uint32_t r = row % DN_TILE_ROWS, c = k % DN_TILE_K;
    if (w.format == DN_W_BF16)
        return __uint_as_float((uint32_t) * (const uint16_t *)(tile + dn_at_bf16(r, c)) << 16);
    if (w.format == DN_W_FP8) {
        __half_raw h = __nv_cvt_fp8_to_halfraw(tile[dn_at_byte(r, c)], __NV_E4M3);
        return __half2float(h) * *(const float *)(tile + dn_tile_codes(DN_W_FP8));
    }
    const uint8_t *scales = tile + dn_tile_codes(w.format) + dn_at_scale(r, c);
    float scale = dn_scale16(*(const uint16_t *)scales, w.scale_is_bf16);
    if (w.format == DN_W_INT8)
        return (float)(int8_t)tile[dn_at_byte(r, c)] * scale;
    int q = *(const uint32_t *)(tile + dn_at_int4(r, c)) >> dn_at_int4_bit(r, c) & 15;
    if (w.symmetric)
        return (float)(q - 8) * scale;
    return fmaf((float)q, scale, dn_scale16(*(const uint16_t *)(scales + DN_TILE_SCALES), w.scale_is_bf16));
}

#endif
