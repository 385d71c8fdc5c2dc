/* Hopper's asynchronous instructions as inline functions: wgmma, mbarriers, bulk copies, named barriers.
 *
 * For: the MLA kernels. Everything here exists only when compiled for sm_90a (DN_HOPPER is 1 then).
 *
 * Shared-memory operands are blocks of rows of 128 bytes in the 128-byte swizzle: the 16-byte chunk c of row r lies at
 * chunk c ^ (r & 7). Blocks begin on 1024 bytes. "K-major": a row is one row of A or one column of B, 64 values of k in
 * it. "MN-major": a row is one k with 64 values of n.
 */
#ifndef DN_KERNELS_CUDA_WGMMA_CUH
#define DN_KERNELS_CUDA_WGMMA_CUH

#include <stdint.h>

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define DN_HOPPER 1
#else
#define DN_HOPPER 0
#endif

static __device__ __forceinline__ uint32_t dn_shared(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

#if DN_HOPPER

/* lead: from 64 values of n to the next 64 (MN-major; ignored for K-major). stride: from 8 rows to the next 8. In
 * bytes. */
static __device__ __forceinline__ uint64_t dn_wgmma_operand(uint32_t address, uint32_t lead, uint32_t stride)
{
    return (uint64_t)((address & 0x3ffff) >> 4) | (uint64_t)(lead >> 4) << 16 | (uint64_t)(stride >> 4) << 32 |
           (uint64_t)1 << 62;
}

static __device__ __forceinline__ void dn_wgmma_fence()
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
static __device__ __forceinline__ void dn_wgmma_commit()
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
template <int pending> static __device__ __forceinline__ void dn_wgmma_wait()
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

/* Generic accesses to shared memory before, asynchronous ones after. Named: without shared::cta it is a fence of the
 * whole GPU, about a microsecond. */
static __device__ __forceinline__ void dn_fence_async()
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

template <int n> static __device__ __forceinline__ void dn_registers_up()
{
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(n));
}
template <int n> static __device__ __forceinline__ void dn_registers_down()
{
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(n));
}

static __device__ __forceinline__ void dn_barrier_init(uint32_t barrier, uint32_t count)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
static __device__ __forceinline__ void dn_barrier_arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
static __device__ __forceinline__ void dn_barrier_expect(uint32_t barrier, uint32_t bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
/* Until the phase with this parity has ended. */
static __device__ __forceinline__ void dn_barrier_wait(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
    do {
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(barrier), "r"(parity)
                     : "memory");
    } while (!done);
}

static __device__ __forceinline__ bool dn_barrier_test(uint32_t barrier, uint32_t parity)
{
    uint32_t done;
    asm volatile("{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
    return done;
}

static __device__ __forceinline__ uint64_t dn_policy_evict_first()
{
    uint64_t policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
static __device__ __forceinline__ void dn_bulk_load(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier,
                                                    uint64_t policy)
{
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
        "%4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}
static __device__ __forceinline__ void dn_bulk_copy(uint32_t to, const void *from, uint32_t bytes, uint32_t barrier)
{
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "l"(from), "r"(bytes), "r"(barrier)
                 : "memory");
}
static __device__ __forceinline__ void dn_bulk_store(void *to, uint32_t from, uint32_t bytes)
{
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes)
                 : "memory");
}
static __device__ __forceinline__ void dn_bulk_commit()
{
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
static __device__ __forceinline__ void dn_bulk_wait()
{
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

static __device__ __forceinline__ void dn_sync(int barrier, int threads)
{
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

/* d[64][n] (+)= A[64][16] B[16][n], by the 128 threads of a warpgroup. A is K-major; B is K-major for n64 and n128,
 * MN-major for n256. d[4j + 2i + e] of a thread: row 16 * warp + lane / 4 + 8i, column 8j + 2 * (lane % 4) + e. */
// clang-format off
#define DN_ACC_16(i) "+f"(d[i + 0]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), "+f"(d[i + 7]), "+f"(d[i + 8]), "+f"(d[i + 9]), "+f"(d[i + 10]), "+f"(d[i + 11]), "+f"(d[i + 12]), "+f"(d[i + 13]), "+f"(d[i + 14]), "+f"(d[i + 15])
#define DN_ACC32 DN_ACC_16(0), DN_ACC_16(16)
#define DN_ACC128 DN_ACC_16(0), DN_ACC_16(16), DN_ACC_16(32), DN_ACC_16(48), DN_ACC_16(64), DN_ACC_16(80), DN_ACC_16(96), DN_ACC_16(112)
static __device__ __forceinline__ void dn_wgmma_n64_bf16(float (&d)[32], uint64_t a, uint64_t b, int accumulate)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, %32, %33, p, 1, 1, 0, 0;\n}\n"
                 : DN_ACC32
                 : "l"(a), "l"(b), "r"(accumulate));
}

/* Steps of 32 in k; sums in some 14 bits, as this instruction has them. */
static __device__ __forceinline__ void dn_wgmma_n64_e4m3(float (&d)[32], uint64_t a, uint64_t b, int accumulate)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, %32, %33, p, 1, 1;\n}\n"
                 : DN_ACC32
                 : "l"(a), "l"(b), "r"(accumulate));
}

/* A from registers, as mma.sync's: rows 16 * warp + lane / 4 and + 8. B is K-major. d[32 m ..] is the result. */
template <int m>
static __device__ __forceinline__ void dn_wgmma_n64_f16_rs(float (&d)[128], const uint32_t (&a)[4], uint64_t b,
                                                           int accumulate)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
                 "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}\n"
                 : DN_ACC_16(32 * m), DN_ACC_16(32 * m + 16)
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));
}

/* Columns 128 * half .. of d[64][256], B MN-major. A kernel of 512 threads can't have m64n256: ptxas wants its registers
 * before it looks at setmaxnreg. */
template <int half>
static __device__ __forceinline__ void dn_wgmma_half_bf16(float (&d)[128], uint64_t a, uint64_t b, int accumulate)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, p, 1, 1, 0, 1;\n}\n"
                 : DN_ACC_16(64 * half), DN_ACC_16(64 * half + 16), DN_ACC_16(64 * half + 32),
                   DN_ACC_16(64 * half + 48)
                 : "l"(a), "l"(b), "r"(accumulate));
}

#define DN_ACC64 DN_ACC_16(0), DN_ACC_16(16), DN_ACC_16(32), DN_ACC_16(48)
static __device__ __forceinline__ void dn_wgmma_n128_bf16(float (&d)[64], uint64_t a, uint64_t b, int accumulate)
{
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %66, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, %64, %65, p, 1, 1, 0, 0;\n}\n"
                 : DN_ACC64
                 : "l"(a), "l"(b), "r"(accumulate));
}

/* A from registers, as mma.sync's: rows 16 * warp + lane / 4 and + 8; always accumulates. B is MN-major. */
static __device__ __forceinline__ void dn_wgmma_n128_rs(float (&d)[64], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
                 "}, {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}\n"
                 : DN_ACC64
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

static __device__ __forceinline__ void dn_wgmma_n256_rs(float (&d)[128], const uint32_t (&a)[4], uint64_t b)
{
    asm volatile("{\n.reg .pred p;\nsetp.eq.b32 p, 0, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 {"
                 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
                 "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
                 "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
                 "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "
                 "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "
                 "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "
                 "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, "
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
                 "}, {%128, %129, %130, %131}, %132, p, 1, 1, 1;\n}\n"
                 : DN_ACC128
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// clang-format on
#endif
#endif
