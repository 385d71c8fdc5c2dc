/* The rules of the sampler that every backend shares word for word: generator, uniform number, penalties, token counts.
 *
 * For: kernels/cpu/sample.c and kernels/cuda/sample.cu, so that equal logits give equal ids. Pure functions, any
 * thread.
 */
#ifndef DN_KERNELS_SAMPLING_H
#define DN_KERNELS_SAMPLING_H

#include <stdint.h>

#ifdef __CUDACC__
#define DN_SAMPLING static __host__ __device__ __forceinline__
#else
#define DN_SAMPLING static inline
#endif

/* Token counts for penalties: bit 15 marks an id of the prompt, the rest counts it in the output, up to the maximum. */
enum { DN_COUNT_PROMPT = 0x8000, DN_COUNT_MAX = 0x7fff };

/* As vLLM: a lower temperature is greedy. Dividing by it would leave nothing but the maximum anyway. */
#define DN_GREEDY_BELOW 1e-5f

/* The generator: Philox4x32-10 (Salmon et al., SC 2011) of a 128-bit counter and a 64-bit key. */
DN_SAMPLING void dn_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4])
{
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3], k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)0xd2511f53u * c0, b = (uint64_t)0xcd9e8d57u * c2;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)b;
        c3 = (uint32_t)a;
        k0 += 0x9e3779b9u;
        k1 += 0xbb67ae85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* The number that a draw uses, u = result * 2^-53, of [0, 1) */
DN_SAMPLING uint64_t dn_sample_bits(uint64_t seed, uint64_t counter)
{
    const uint32_t c[4] = {(uint32_t)counter, (uint32_t)(counter >> 32), 0, 0};
    const uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)};
    uint32_t x[4];
    dn_philox(c, key, x);
    return ((uint64_t)x[0] << 32 | x[1]) >> 11;
}

/* The logit of an id whose count is not 0. Rounded after every operation, so that all machines agree. */
DN_SAMPLING float dn_penalised(float logit, uint32_t count, float repetition, float frequency, float presence)
{
    uint32_t output = count & DN_COUNT_MAX;
    float v = logit > 0.0f ? logit / repetition : logit * repetition;
    if (!output)
        return v;
#ifdef __CUDA_ARCH__
    return __fsub_rn(v, __fadd_rn(__fmul_rn(frequency, (float)output), presence));
#else
    return v - (frequency * (float)output + presence);
#endif
}

#endif
