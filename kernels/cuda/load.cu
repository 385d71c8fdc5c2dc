/* What this library has for a device, and loading it.
 *
 * Which code: the driver takes, for each kernel, the newest that the library has and the device can run. A library for
 * sm_90 has none of wgmma's kernels, one with PTX for sm_80 alone none of sm_90's, and both run on an H200: a kernel
 * that says what it was compiled for decides which kernels operations choose.
 *
 * Loading: CUDA loads a kernel when it is launched first, and takes memory for it then. All memory is to be taken when
 * the device is opened, and no request is to wait: so all kernels of all files are loaded here, 10 MB of code. Each
 * file has a kernel by which its others are found (dn_cuda_of_file in device.cuh).
 */
#include "kernels/cuda/gqa.cuh"
#include "kernels/cuda/mla.cuh"
#include "kernels/cuda/own.cuh"
extern "C" {
#include "kernels/cuda/supports.h"
}

#include <cuda.h>
#include <stdlib.h>

static_assert((int)DN_CUDA_PAGE_TOKENS == DN_MLA_TOKENS && (int)DN_CUDA_PAGE_TOKENS == GQA_PAGE, "supports.h");
static_assert((int)DN_CUDA_MLA_ROPE == DN_MLA_ROPE && (int)DN_CUDA_MLA_LATENT == DN_MLA_LATENT, "supports.h");
static_assert((int)DN_CUDA_MAX_HEAD == GQA_MAX_DIM, "supports.h");
static_assert((int)DN_CUDA_MLA_ITEMS == DN_CUDA_COUNTERS, "supports.h");

struct dn_cuda_file *dn_cuda_files;

/* ---- Which code ---- */

static __global__ void compiled_kernel(int *out)
{
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    *out = __CUDA_ARCH__ + 1;
#elif defined(__CUDA_ARCH__)
    *out = __CUDA_ARCH__;
#endif
}

cudaError_t dn_cuda_compiled(int *code, int *arch)
{
    int *device = NULL, host = 0;
    cudaError_t e = cudaMalloc((void **)&device, sizeof *device);
    if (e != cudaSuccess)
        return e;
    compiled_kernel<<<1, 1>>>(device);
    e = cudaGetLastError();
    if (e == cudaSuccess)
        e = cudaMemcpy(&host, device, sizeof host, cudaMemcpyDeviceToHost);
    cudaFree(device);
    *code = host / 10;
    *arch = host == 900 ? 80 : *code; /* without wgmma the simple kernels serve, and some need nothing newer */
    return e;
}

/* ---- Loading ---- */

/* The driver's functions by name: the library is not linked with the driver. */
static void *driver_function(const char *name, unsigned version)
{
    void *p = NULL;
    cudaDriverEntryPointQueryResult result;
    if (cudaGetDriverEntryPointByVersion(name, &p, version, cudaEnableDefault, &result) != cudaSuccess ||
        result != cudaDriverEntryPointSuccess)
        return NULL;
    return p;
}

struct driver {
    CUresult (*library_of)(CUlibrary *, CUkernel);
    CUresult (*count)(unsigned *, CUlibrary);
    CUresult (*kernels_of)(CUkernel *, unsigned, CUlibrary);
    CUresult (*function_of)(CUfunction *, CUkernel);
    CUresult (*load)(CUfunction);
};

static cudaError_t load_file(const struct driver *d, const void *kernel)
{
    cudaKernel_t of_file;
    CUlibrary library;
    unsigned n = 0;
    cudaError_t e = cudaGetKernel(&of_file, kernel);
    if (e != cudaSuccess)
        return e;
    CUresult r = d->library_of(&library, (CUkernel)of_file);
    if (r == CUDA_SUCCESS)
        r = d->count(&n, library);
    CUkernel *list = (CUkernel *)calloc(n ? n : 1, sizeof *list);
    if (!list)
        return cudaErrorMemoryAllocation;
    if (r == CUDA_SUCCESS)
        r = d->kernels_of(list, n, library);
    for (unsigned i = 0; i < n && r == CUDA_SUCCESS; i++) {
        CUfunction f;
        r = d->function_of(&f, list[i]);
        if (r == CUDA_SUCCESS)
            r = d->load(f);
    }
    free(list);
    return (cudaError_t)r; /* one numbering, but for errors of the runtime's own */
}

cudaError_t dn_cuda_load()
{
    struct driver d;
    d.library_of = (CUresult(*)(CUlibrary *, CUkernel))driver_function("cuKernelGetLibrary", 12050);
    d.count = (CUresult(*)(unsigned *, CUlibrary))driver_function("cuLibraryGetKernelCount", 12040);
    d.kernels_of = (CUresult(*)(CUkernel *, unsigned, CUlibrary))driver_function("cuLibraryEnumerateKernels", 12040);
    d.function_of = (CUresult(*)(CUfunction *, CUkernel))driver_function("cuKernelGetFunction", 12000);
    d.load = (CUresult(*)(CUfunction))driver_function("cuFuncLoad", 12040);
    if (!d.library_of || !d.count || !d.kernels_of || !d.function_of || !d.load)
        return cudaErrorInsufficientDriver;
    for (const struct dn_cuda_file *f = dn_cuda_files; f; f = f->next) {
        cudaError_t e = load_file(&d, f->kernel);
        if (e != cudaSuccess)
            return e;
    }
    return cudaSuccess;
}
