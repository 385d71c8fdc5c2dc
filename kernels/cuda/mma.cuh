/* Thin wrappers over the instructions that matrix kernels are made of: one function, one PTX instruction.
 *
 * Fragments of mma.sync.m16n8k16 (PTX ISA, "Matrix Fragments for mma.m16n8k16"), g = lane / 4, t = lane % 4:
 *   A 16 x 16, 4 registers of two bf16: a0 (row g, k 2t 2t+1)  a1 (row g+8, same k)  a2 (row g, k 2t+8 2t+9)  a3 (g+8)
 *   B 16 x 8,  2 registers of two bf16: b0 (k 2t 2t+1, column g)  b1 (k 2t+8 2t+9, column g)
 *   C 16 x 8,  4 floats:                c0 c1 (row g, columns 2t 2t+1)  c2 c3 (row g+8)
 * A column of the result depends on that column of B alone, bit for bit, whatever the others hold (NaN as well).
 *
 * Hazards, each noted at its function: who must fence, what is asynchronous, what counts bytes. Any thread of a kernel;
 * "warp" = all 32 lanes together. Needs sm_80; bulk copies and their barriers sm_90 (nothing happens below).
 */
#ifndef DN_KERNELS_CUDA_MMA_CUH
#define DN_KERNELS_CUDA_MMA_CUH

#include <cuda.h>
#include <stdint.h>

/* The 32-bit address of shared memory that PTX wants. */
static __device__ __forceinline__ uint32_t dn_shared(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

/* c += A * B (warp). */
static __device__ __forceinline__ void dn_mma(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

/* c = A * B (warp). */
static __device__ __forceinline__ void dn_mma_first(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
        : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

/* Four 8x8 matrices of 16-bit values (warp): lane i gives the address of row i % 8 (16 bytes) of matrix i / 8 and gets
 * values 2 (lane % 4) and the next of row lane / 4 of each. Eight rows in different 16-byte bank groups: no conflict.
 */
static __device__ __forceinline__ void dn_ldmatrix(uint32_t r[4], uint32_t shared)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(shared)
                 : "memory");
}

/* 16 bytes to shared memory, `bytes` (0..16) of them from global memory and the rest zero. Asynchronous: visible to the
 * thread that asked after dn_cp_async_wait(), to others after a barrier as well. */
static __device__ __forceinline__ void dn_cp_async16(uint32_t shared, const void *global, int bytes)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(global), "r"(bytes) : "memory");
}
/* Until at most `pending` groups of this thread are under way. */
template <int pending> static __device__ __forceinline__ void dn_cp_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

/* ---- mbarrier: a 64-bit word in shared memory, 8-byte aligned. A phase ends when `count` arrivals and all announced
 * bytes are there; waiters name the parity (0, 1, 0, ...) of the phase that they wait for. A barrier that nobody has
 * completed counts as having completed parity 1, so that producers start with wait(parity 1). */

/* By one thread, then dn_barrier_init_fence(), then __syncthreads(). */
static __device__ __forceinline__ void dn_barrier_init(uint64_t *b, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(dn_shared(b)), "r"(count) : "memory");
}
static __device__ __forceinline__ void dn_barrier_init_fence() /* makes it visible to bulk copies */
{
#if __CUDA_ARCH__ >= 900
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
static __device__ __forceinline__ void dn_barrier_arrive(uint64_t *b) /* releases this thread's reads and writes */
{
    asm volatile("{ .reg .b64 s; mbarrier.arrive.shared::cta.b64 s, [%0]; }" ::"r"(dn_shared(b)) : "memory");
}
/* Arrives and announces `bytes` that bulk copies will bring: before or after they are issued, but in the same phase. */
static __device__ __forceinline__ void dn_barrier_expect(uint64_t *b, uint32_t bytes)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1; }" ::"r"(dn_shared(b)),
                 "r"(bytes)
                 : "memory");
#endif
}
/* Acquires: what bulk copies brought is visible afterwards, without another fence. */
static __device__ __forceinline__ void dn_barrier_wait(uint64_t *b, uint32_t parity)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("{\n.reg .pred p;\n"
                 "wait:\nmbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n"
                 "@p bra done;\nbra wait;\ndone:\n}" ::"r"(dn_shared(b)),
                 "r"(parity)
                 : "memory");
#endif
}

/* Contiguous bytes, global to shared, both 16-byte aligned, size a multiple of 16; one thread issues. Completes on the
 * barrier by bytes. Writing where generic loads have read before: those must have arrived on a barrier that the issuer
 * waited for. Where generic *stores* wrote before: fence.proxy.async between. One instruction costs its warp ~70 clk.
 */
static __device__ __forceinline__ void dn_bulk(void *shared, const void *global, uint32_t bytes, uint64_t *b)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     dn_shared(shared)),
                 "l"(global), "r"(bytes), "r"(dn_shared(b))
                 : "memory");
#endif
}
/* The same for what nobody reads again soon, weights: first to leave the L2 cache. `policy` is dn_policy_once()'s. */
static __device__ __forceinline__ uint64_t dn_policy_once()
{
    uint64_t policy = 0;
#if __CUDA_ARCH__ >= 900
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
#endif
    return policy;
}
static __device__ __forceinline__ void dn_bulk_once(void *shared, const void *global, uint32_t bytes, uint64_t *b,
                                                    uint64_t policy)
{
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::
            "r"(dn_shared(shared)),
        "l"(global), "r"(bytes), "r"(dn_shared(b)), "l"(policy)
        : "memory");
#endif
}
/* Fetches a tensor map ahead of its first use. */
static __device__ __forceinline__ void dn_prefetch_map(const CUtensorMap *map)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
#endif
}
/* A box of a 3-D tensor map at coordinates x (innermost), y, z; out of bounds is zero and counts as bytes all the same.
 * A 128-byte-swizzled box begins at a multiple of 1024 and has 16-byte chunk c of row r at r * 128 + (c ^ r % 8) * 16.
 */
static __device__ __forceinline__ void dn_bulk_box(void *shared, const CUtensorMap *map, int x, int y, int z,
                                                   uint64_t *b)
{
#if __CUDA_ARCH__ >= 900
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];" ::
            "r"(dn_shared(shared)),
        "l"(map), "r"(x), "r"(y), "r"(z), "r"(dn_shared(b))
        : "memory");
#endif
}

#endif
