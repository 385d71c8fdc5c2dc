/* One vector of f32 for the instruction set that the including file is compiled for: VW lanes, type vf (floats), vi
 * (their bits). Included only by *_portable.c, *_avx2.c and *_avx512.c, which put a kernel body behind it, so that a
 * kernel is written once. Everything is static: a shared inline function could be picked by the linker from the wrong
 * file.
 *
 * MR x NV is the register tile of the matrix-like kernels: MR rows times NV vectors of accumulators. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline, unused))

#if defined(__AVX512F__) && defined(__AVX512BW__)
#include <immintrin.h>
enum { VW = 16, NV = 4, MR = 6 };
typedef __m512 vf;
typedef uint32_t vi __attribute__((vector_size(64), may_alias));
INLINE vf v_load(const float *p)
{
    return _mm512_loadu_ps(p);
}
INLINE void v_store(float *p, vf x)
{
    _mm512_storeu_ps(p, x);
}
INLINE vf v_set(float x)
{
    return _mm512_set1_ps(x);
}
INLINE vf v_fma(vf a, vf b, vf c)
{
    return _mm512_fmadd_ps(a, b, c);
}
/* A NaN in b is kept. */
INLINE vf v_max(vf a, vf b)
{
    return _mm512_max_ps(a, b);
}
INLINE vf v_min(vf a, vf b)
{
    return _mm512_min_ps(a, b);
}
/* Lanes where a < b are x, the others y; a NaN gives y. */
INLINE vf v_if_less(vf a, vf b, vf x, vf y)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
}
/* Lanes below n (0..VW) are x, the others y. */
INLINE vf v_first(int n, vf x, vf y)
{
    return _mm512_mask_blend_ps((__mmask16)((1u << n) - 1), y, x);
}
INLINE uint32_t v_mask_less(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ);
}
INLINE uint32_t v_mask_equal(vf a, vf b)
{
    return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ);
}
INLINE uint32_t v_mask_nan(vf a)
{
    return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q);
}
INLINE vf v_load_bf16(const uint16_t *p)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
}
INLINE vi v_load_u8(const uint8_t *p)
{
    return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
#elif defined(__AVX2__) && defined(__FMA__)
#include <immintrin.h>
enum { VW = 8, NV = 2, MR = 6 };
typedef __m256 vf;
typedef uint32_t vi __attribute__((vector_size(32), may_alias));
INLINE vf v_load(const float *p)
{
    return _mm256_loadu_ps(p);
}
INLINE void v_store(float *p, vf x)
{
    _mm256_storeu_ps(p, x);
}
INLINE vf v_set(float x)
{
    return _mm256_set1_ps(x);
}
INLINE vf v_fma(vf a, vf b, vf c)
{
    return _mm256_fmadd_ps(a, b, c);
}
INLINE vf v_max(vf a, vf b)
{
    return _mm256_max_ps(a, b);
}
INLINE vf v_min(vf a, vf b)
{
    return _mm256_min_ps(a, b);
}
INLINE vf v_if_less(vf a, vf b, vf x, vf y)
{
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
INLINE vf v_first(int n, vf x, vf y)
{
    __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_blendv_ps(y, x, _mm256_castsi256_ps(_mm256_cmpgt_epi32(_mm256_set1_epi32(n), lane)));
}
INLINE uint32_t v_mask_less(vf a, vf b)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_LT_OQ));
}
INLINE uint32_t v_mask_equal(vf a, vf b)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_EQ_OQ));
}
INLINE uint32_t v_mask_nan(vf a)
{
    return (uint32_t)_mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q));
}
INLINE vf v_load_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE vi v_load_u8(const uint8_t *p)
{
    return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
#else
enum { VW = 4, NV = 2, MR = 4 };
typedef float vf __attribute__((vector_size(16), may_alias));
typedef uint32_t vi __attribute__((vector_size(16), may_alias));
INLINE vf v_load(const float *p)
{
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
INLINE void v_store(float *p, vf x)
{
    memcpy(p, &x, sizeof x);
}
INLINE vf v_set(float x)
{
    return (vf){x, x, x, x};
}
INLINE vf v_fma(vf a, vf b, vf c)
{
    return a * b + c;
}
INLINE vf v_if(vi mask, vf x, vf y)
{
    return (vf)((mask & (vi)x) | (~mask & (vi)y));
}
INLINE vf v_max(vf a, vf b)
{
    return v_if((vi)(a > b), a, b);
}
INLINE vf v_min(vf a, vf b)
{
    return v_if((vi)(a < b), a, b);
}
INLINE vf v_if_less(vf a, vf b, vf x, vf y)
{
    return v_if((vi)(a < b), x, y);
}
INLINE vf v_first(int n, vf x, vf y)
{
    uint32_t m = (uint32_t)n;
    return v_if((vi)((vi){0, 1, 2, 3} < (vi){m, m, m, m}), x, y);
}
INLINE uint32_t v_mask(vi m)
{
    return (m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8);
}
INLINE uint32_t v_mask_less(vf a, vf b)
{
    return v_mask((vi)(a < b));
}
INLINE uint32_t v_mask_equal(vf a, vf b)
{
    return v_mask((vi)(a == b));
}
INLINE uint32_t v_mask_nan(vf a)
{
    return v_mask((vi)(a != a));
}
INLINE vf v_load_bf16(const uint16_t *p)
{
    return (vf)((vi){p[0], p[1], p[2], p[3]} << 16);
}
INLINE vi v_load_u8(const uint8_t *p)
{
    return (vi){p[0], p[1], p[2], p[3]};
}
#endif

INLINE vf v_zero(void)
{
    return v_set(0.0f);
}
INLINE vf v_abs(vf x)
{
    return (vf)((vi)x & 0x7fffffffu);
}

#if defined(__AVX512VBMI__)
/* 64 codes of e4m3 at once: tables give both bytes of the bf16 value of the 7 low bits, the sign is put on top. Byte
 * 16L + 2k (+1, +8, +9) becomes lane 4L + k of out[0] (out[1], out[2], out[3]), hence the two orders below. 11
 * instructions for 4 vectors, where shifting and masking takes 28. The NaN codes come out as 480, as below. */
#define ROW_HIGH(e) (e + 120) >> 1
#define ROW_LOW(e)  ((e + 120) & 1) << 7
#define HIGHS(e)    ROW_HIGH(e), ROW_HIGH(e), ROW_HIGH(e), ROW_HIGH(e), ROW_HIGH(e), ROW_HIGH(e), ROW_HIGH(e), ROW_HIGH(e)
#define LOWS(e)                                                                                                        \
    ROW_LOW(e), ROW_LOW(e) | 0x10, ROW_LOW(e) | 0x20, ROW_LOW(e) | 0x30, ROW_LOW(e) | 0x40, ROW_LOW(e) | 0x50,         \
        ROW_LOW(e) | 0x60, ROW_LOW(e) | 0x70
#define ALL_ROWS(f) f(1), f(2), f(3), f(4), f(5), f(6), f(7), f(8), f(9), f(10), f(11), f(12), f(13), f(14), f(15)
/* Row 0 is the subnormals, multiples of 2^-9. */
static const uint8_t fp8_high[128] = {0, 0x3b, 0x3b, 0x3b, 0x3c, 0x3c, 0x3c, 0x3c, ALL_ROWS(HIGHS)};
static const uint8_t fp8_low[128] = {0, 0, 0x80, 0xc0, 0, 0x20, 0x40, 0x60, ALL_ROWS(LOWS)};
#undef ROW_HIGH
#undef ROW_LOW
#undef HIGHS
#undef LOWS
#undef ALL_ROWS
/* Order for 64 codes whose values follow each other in out[0..3] */
#define ORDER(i) i, i + 16, i + 1, i + 17, i + 2, i + 18, i + 3, i + 19
static const uint8_t fp8_in_turn[64] = {ORDER(0), ORDER(32), ORDER(4),  ORDER(36),
                                        ORDER(8), ORDER(40), ORDER(12), ORDER(44)};
#undef ORDER

struct fp8_table {
    __m512i high[2], low[2], in_turn;
};
INLINE struct fp8_table fp8_table(void)
{
    return (struct fp8_table){{_mm512_loadu_si512(fp8_high), _mm512_loadu_si512(fp8_high + 64)},
                              {_mm512_loadu_si512(fp8_low), _mm512_loadu_si512(fp8_low + 64)},
                              _mm512_loadu_si512(fp8_in_turn)};
}
INLINE void fp8_decode(const struct fp8_table *t, __m512i codes, vf *out)
{
    __m512i high = _mm512_permutex2var_epi8(t->high[0], codes, t->high[1]);
    __m512i low = _mm512_permutex2var_epi8(t->low[0], codes, t->low[1]);
    high = _mm512_ternarylogic_epi32(high, codes, _mm512_set1_epi8((char)0x80), 0xf8); /* high | (codes & 0x80) */
    __m512i a = _mm512_unpacklo_epi8(low, high), b = _mm512_unpackhi_epi8(low, high);
    __m512i odd = _mm512_set1_epi32((int)0xffff0000);
    out[0] = _mm512_castsi512_ps(_mm512_slli_epi32(a, 16));
    out[1] = _mm512_castsi512_ps(_mm512_and_si512(a, odd));
    out[2] = _mm512_castsi512_ps(_mm512_slli_epi32(b, 16));
    out[3] = _mm512_castsi512_ps(_mm512_and_si512(b, odd));
}
/* n <= 64 values from p on, zeros behind them */
INLINE void fp8_decode_in_turn(const struct fp8_table *t, const uint8_t *p, uint32_t n, vf *out)
{
    __m512i codes = _mm512_maskz_loadu_epi8((__mmask64)(~0ull >> (64 - n)), p);
    fp8_decode(t, _mm512_permutexvar_epi8(t->in_turn, codes), out);
}
#endif

/* e4m3 as f32, exact, subnormals included: exponent and fraction shifted into place, then times 2^(127-7). The two NaN
 * codes come out as 480: a vector with a NaN has a NaN scale instead (dn_vec_ops.encode_fp8). */
INLINE vf v_load_fp8(const uint8_t *p)
{
    vi x = v_load_u8(p);
    return (vf)(((x & 0x7f) << 20) | ((x & 0x80) << 24)) * v_set(0x1p120f);
}

/* Sum and maximum of the lanes, always in the same order. */
#if defined(__AVX512F__) && defined(__AVX512BW__)
INLINE float v_sum(vf x)
{
    return _mm512_reduce_add_ps(x);
}
INLINE float v_top(vf x)
{
    return _mm512_reduce_max_ps(x);
}
#elif defined(__AVX2__) && defined(__FMA__)
INLINE float v_sum(vf x)
{
    __m128 a = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_add_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_add_ss(a, _mm_movehdup_ps(a)));
}
INLINE float v_top(vf x)
{
    __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    a = _mm_max_ps(a, _mm_movehl_ps(a, a));
    return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
}
#else
INLINE float v_sum(vf x)
{
    return (x[0] + x[2]) + (x[1] + x[3]);
}
INLINE float v_top(vf x)
{
    float a = x[0] > x[1] ? x[0] : x[1], b = x[2] > x[3] ? x[2] : x[3];
    return a > b ? a : b;
}
#endif

/* e^x for x up to 88 (more is taken as 88). Below -87.3 it is exactly 0; NaN stays NaN. x = n ln2 + r with |r| <=
 * ln2/2; the polynomial was fitted for the least relative error (4e-9). The error of the whole is below 1.2 units in
 * the last place (test_norm measures it). */
INLINE vf v_exp(vf x)
{
    const vf round = v_set(0x1.8p23f); /* adding it leaves the nearest integer in the low bits */
    vf y = v_min(v_set(88.0f), x);
    vf t = v_fma(y, v_set(0x1.715476p0f), round);
    vf n = t - round;
    vf r = v_fma(n, v_set(-0x1.62e4p-1f), y); /* ln2 in two parts, the first exact times n */
    r = v_fma(n, v_set(-0x1.7f7d1cp-20f), r);
    vf p = v_set(0x1.6a244cp-10f);
    p = v_fma(p, r, v_set(0x1.1239d4p-7f));
    p = v_fma(p, r, v_set(0x1.5558f2p-5f));
    p = v_fma(p, r, v_set(0x1.555492p-3f));
    p = v_fma(p, r, v_set(0x1.fffffcp-2f));
    p = v_fma(p * r, r, r) + v_set(1.0f);
    vf scale = (vf)(((vi)t - 0x4b400000u + 127u) << 23);
    return v_if_less(x, v_set(-87.3f), v_zero(), p * scale);
}
