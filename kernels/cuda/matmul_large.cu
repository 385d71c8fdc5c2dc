/* Matrix products of prefill steps: weights unpacked to bf16, then cuBLASLt.
 *
 * Maths: out[t][r] = sum_k bf16(w[r][k]) x[t][k] + bias[r], f32 sums. The dequantised weight is rounded to bf16 once.
 *
 * Rows of the matrix are unpacked in slabs of at most SLAB_BYTES into the workspace, [row][k] dense, and multiplied.
 * One algorithm for a shape, asked for once for 2,048 tokens and without split-K, serves every number of tokens: each
 * result then has its sum over k in one order. Bias: products go to f32 scratch (or the f32 output) and a kernel adds
 * it. While prepare() measures, each shape's product runs once on memory that is given back: cuBLASLt loads its kernels
 * when they run first, and takes memory for them then.
 *
 * Workspace: slab | cuBLASLt's | f32 products if there is a bias and the output is bf16.
 *
 * unpack: a block of 8 warps a tile of 64 rows x 128 k; warp = (strip, half): a thread converts its fragments, shared
 * memory [16 rows][64 k] a warp turns them into rows, stores are 128 bytes a row. Floor: packed bytes + 2 a weight,
 * both ways, which is 45 us of 7168 x 7168's 260 us with 2,048 tokens in BF16.
 */
#include "kernels/cuda/matmul.cuh"
#include "kernels/cuda/weights.cuh"

#include <cublasLt.h>
#include <pthread.h>

enum {
    SLAB_BYTES = 144 << 20,
    LT_BYTES = 4 << 20,
    ASKED_TOKENS = 2048,
    UNPACK_THREADS = 256,
    SHARED_STRIDE = 72, /* bf16 values: 144 bytes, rows begin in different banks */
    MAX_DEVICES = 64,
    MAX_SHAPES = 256,
};

/* ---- Unpacking ---- */

/* Two bf16 of one row, scaled and rounded. */
static __device__ __forceinline__ uint32_t scaled(uint32_t pair, float scale, float offset)
{
    float x = fmaf(__uint_as_float(pair << 16), scale, offset),
          y = fmaf(__uint_as_float(pair & 0xffff0000), scale, offset);
    __nv_bfloat162 r = __floats2bfloat162_rn(x, y);
    return *(uint32_t *)&r;
}

/* Tiles of rows [row0, row0 + 64 * gridDim.y), k tile blockIdx.x, to out [row - row0][n_in]. */
template <int format, bool symmetric>
static __global__ void __launch_bounds__(UNPACK_THREADS) unpack(struct dn_weights w, uint32_t row0, __nv_bfloat16 *out)
{
    __shared__ __align__(16) __nv_bfloat16 shared[8][16 * SHARED_STRIDE];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, strip = warp / 2, half = warp % 2;
    const uint8_t *tile = dn_tile(w, row0 / DN_TILE_ROWS + blockIdx.y, blockIdx.x);
    struct dn_a_raw<format> raw;
    dn_a_load<format>(raw, tile, strip, half, lane);
    uint2 scales = {}, offsets = {};
    float2 fp8 = {};
    if (format == DN_W_INT4 || format == DN_W_INT8)
        scales = dn_a_scales<format>(tile, false, strip, half, lane);
    if (format == DN_W_INT4 && !symmetric)
        offsets = dn_a_scales<format>(tile, true, strip, half, lane);
    if (format == DN_W_FP8)
        fp8 = dn_a_fp8_scale(tile, strip, lane);
    __nv_bfloat16 *mine = shared[warp];
#pragma unroll
    for (int step = 0; step < 4; step++) {
        uint32_t a[4];
        dn_a_fragment<format, symmetric>(raw, step, a);
        if (format != DN_W_BF16) {
            float2 s = format == DN_W_FP8 ? fp8 : dn_scale_pair(step < 2 ? scales.x : scales.y, w.scale_is_bf16);
            float2 o = {0, 0};
            if (format == DN_W_INT4 && !symmetric)
                o = dn_scale_pair(step < 2 ? offsets.x : offsets.y, w.scale_is_bf16);
#pragma unroll
            for (int j = 0; j < 4; j++)
                a[j] = scaled(a[j], j % 2 ? s.y : s.x, j % 2 ? o.y : o.x);
        }
#pragma unroll
        for (int j = 0; j < 4; j++)
            *(uint32_t *)(mine + (lane / 4 + j % 2 * 8) * SHARED_STRIDE + step * 16 + j / 2 * 8 + lane % 4 * 2) = a[j];
    }
    __syncwarp();
    dn_wait_previous(); /* the last product may still read the slab */
    dn_start_next();
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t r = i * 4 + lane / 8, row = blockIdx.y * DN_TILE_ROWS + strip * 16 + r;
        uint32_t k = blockIdx.x * DN_TILE_K + half * 64 + lane % 8 * 8;
        if (row0 + row < w.n_rows && k < w.n_in)
            *(uint4 *)(out + (size_t)row * w.n_in + k) = *(const uint4 *)(mine + r * SHARED_STRIDE + lane % 8 * 8);
    }
}

static void launch_unpack(struct dn_cuda *c, const struct dn_weights &w, uint32_t row0, uint32_t n, __nv_bfloat16 *out)
{
    dim3 grid(w.n_tiles, (n + DN_TILE_ROWS - 1) / DN_TILE_ROWS), block(UNPACK_THREADS);
    if (w.format == DN_W_BF16)
        dn_launch(c, "unpack", unpack<DN_W_BF16, true>, grid, block, 0, w, row0, out);
    else if (w.format == DN_W_FP8)
        dn_launch(c, "unpack", unpack<DN_W_FP8, true>, grid, block, 0, w, row0, out);
    else if (w.format == DN_W_INT8)
        dn_launch(c, "unpack", unpack<DN_W_INT8, true>, grid, block, 0, w, row0, out);
    else if (w.symmetric)
        dn_launch(c, "unpack", unpack<DN_W_INT4, true>, grid, block, 0, w, row0, out);
    else
        dn_launch(c, "unpack", unpack<DN_W_INT4, false>, grid, block, 0, w, row0, out);
}

/* out = products + bias; rows of n_out values each. */
static __global__ void __launch_bounds__(256)
    add_bias(const float *products, const float *bias, uint32_t n_out, bool f32, void *out)
{
    dn_wait_previous();
    dn_start_next();
    uint32_t r = blockIdx.x * 256 + threadIdx.x;
    if (r >= n_out)
        return;
    size_t at = (size_t)blockIdx.y * n_out + r;
    float v = products[at] + bias[r];
    if (f32)
        ((float *)out)[at] = v;
    else
        ((__nv_bfloat16 *)out)[at] = __float2bfloat16_rn(v);
}

/* ---- cuBLASLt ---- */

/* A shape's product: descriptors for `rows` outputs out of rows of n_out, and the algorithm. */
struct shape {
    uint32_t rows, n_in, n_out;
    bool f32;
    bool ran; /* its kernel is loaded */
    cublasLtMatmulDesc_t desc;
    cublasLtMatrixLayout_t weights;
    cublasLtMatmulAlgo_t algo;
};
/* For each GPU of the process, for good: the library that has them is never unloaded. */
static struct lt {
    cublasLtHandle_t handle;
    uint32_t n_shapes;
    struct shape shape[MAX_SHAPES];
} * devices[MAX_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static struct lt *lt_of(int index)
{
    if (index < 0 || index >= MAX_DEVICES)
        return NULL;
    if (!devices[index]) {
        struct lt *l = (struct lt *)calloc(1, sizeof *l);
        if (!l || cublasLtCreate(&l->handle) != CUBLAS_STATUS_SUCCESS) {
            free(l);
            return NULL;
        }
        devices[index] = l;
    }
    return devices[index];
}

static bool layout(cublasLtMatrixLayout_t *l, bool f32, uint64_t rows, uint64_t columns, int64_t stride)
{
    return cublasLtMatrixLayoutCreate(l, f32 ? CUDA_R_32F : CUDA_R_16BF, rows, columns, stride) ==
           CUBLAS_STATUS_SUCCESS;
}

/* cuBLASLt's matrices are column-major: weights [row][k] are k x rows, taken transposed. */
static bool ask(struct lt *l, struct shape *s)
{
    cublasLtMatrixLayout_t x = NULL, out = NULL;
    cublasLtMatmulPreference_t preference = NULL;
    cublasLtMatmulHeuristicResult_t found = {};
    const cublasOperation_t transposed = CUBLAS_OP_T;
    const size_t bytes = LT_BYTES;
    const uint32_t reduction = CUBLASLT_REDUCTION_SCHEME_NONE, aligned = 16;
    int n = 0;
    bool ok = cublasLtMatmulDescCreate(&s->desc, CUBLAS_COMPUTE_32F, CUDA_R_32F) == CUBLAS_STATUS_SUCCESS &&
              cublasLtMatmulDescSetAttribute(s->desc, CUBLASLT_MATMUL_DESC_TRANSA, &transposed, sizeof transposed) ==
                  CUBLAS_STATUS_SUCCESS &&
              layout(&s->weights, false, s->n_in, s->rows, s->n_in) &&
              layout(&x, false, s->n_in, ASKED_TOKENS, s->n_in) &&
              layout(&out, s->f32, s->rows, ASKED_TOKENS, s->n_out) &&
              cublasLtMatmulPreferenceCreate(&preference) == CUBLAS_STATUS_SUCCESS;
    const struct {
        cublasLtMatmulPreferenceAttributes_t name;
        const void *value;
        size_t bytes;
    } set[] = {{CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &bytes, sizeof bytes},
               {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &reduction, sizeof reduction},
               {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &aligned, sizeof aligned},
               {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &aligned, sizeof aligned},
               {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &aligned, sizeof aligned},
               {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &aligned, sizeof aligned}};
    for (size_t i = 0; ok && i < sizeof set / sizeof *set; i++)
        ok = cublasLtMatmulPreferenceSetAttribute(preference, set[i].name, set[i].value, set[i].bytes) ==
             CUBLAS_STATUS_SUCCESS;
    ok = ok &&
         cublasLtMatmulAlgoGetHeuristic(l->handle, s->desc, s->weights, x, out, out, preference, 1, &found, &n) ==
             CUBLAS_STATUS_SUCCESS &&
         n == 1;
    s->algo = found.algo;
    if (preference)
        cublasLtMatmulPreferenceDestroy(preference);
    if (x)
        cublasLtMatrixLayoutDestroy(x);
    if (out)
        cublasLtMatrixLayoutDestroy(out);
    if (!ok) {
        if (s->weights)
            cublasLtMatrixLayoutDestroy(s->weights);
        if (s->desc)
            cublasLtMatmulDescDestroy(s->desc);
    }
    return ok;
}

static struct shape *shape_of(struct lt *l, uint32_t rows, uint32_t n_in, uint32_t n_out, bool f32)
{
    for (uint32_t i = 0; i < l->n_shapes; i++) {
        struct shape *s = l->shape + i;
        if (s->rows == rows && s->n_in == n_in && s->n_out == n_out && s->f32 == f32)
            return s;
    }
    if (l->n_shapes == MAX_SHAPES)
        return NULL;
    struct shape s = {};
    s.rows = rows;
    s.n_in = n_in;
    s.n_out = n_out;
    s.f32 = f32;
    if (!ask(l, &s))
        return NULL;
    l->shape[l->n_shapes] = s;
    return l->shape + l->n_shapes++;
}

struct job {
    struct shape *shape;
    const void *x, *weights;
    void *out, *workspace;
    uint32_t n;
};
static bool multiply(struct dn_cuda *c, struct lt *l, const struct job *j)
{
    cublasLtMatrixLayout_t x = NULL, out = NULL;
    const struct shape *s = j->shape;
    const float one = 1, zero = 0;
    bool ok = layout(&x, false, s->n_in, j->n, s->n_in) && layout(&out, s->f32, s->rows, j->n, s->n_out) &&
              cublasLtMatmul(l->handle, s->desc, &one, j->weights, s->weights, j->x, x, &zero, j->out, out, j->out, out,
                             &s->algo, j->workspace, LT_BYTES, c->stream) == CUBLAS_STATUS_SUCCESS;
    if (x)
        cublasLtMatrixLayoutDestroy(x);
    if (out)
        cublasLtMatrixLayoutDestroy(out);
    return ok;
}

static size_t largest(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* Runs a shape's product for n tokens and for one, on garbage: weights, activations and products in the same memory. */
static bool rehearse(struct dn_cuda *c, struct lt *l, struct shape *s, uint32_t n)
{
    const size_t bytes =
        largest(largest((size_t)s->rows * s->n_in * 2, (size_t)n * s->n_in * 2), (size_t)n * s->n_out * sizeof(float));
    uint8_t *space = NULL;
    if (s->ran)
        return true;
    dn_cuda_workspace(c, bytes + LT_BYTES); /* where there is no memory now, prepare() says so when it takes that */
    if (cudaMalloc((void **)&space, bytes + LT_BYTES) != cudaSuccess) {
        cudaGetLastError();
        return true;
    }
    struct job j = {s, space, space, space, space + bytes, n};
    s->ran = multiply(c, l, &j);
    j.n = 1;
    s->ran = s->ran && multiply(c, l, &j) && cudaStreamSynchronize(c->stream) == cudaSuccess;
    cudaFree(space);
    return s->ran;
}

/* ---- The operation ---- */

/* Equal slabs, multiples of 128 rows, so that no GEMM is left with a few rows. */
static uint32_t slab_rows(const struct dn_matrix *m)
{
    uint64_t bytes = (uint64_t)m->n_out * m->n_in * 2, n = (bytes + SLAB_BYTES - 1) / SLAB_BYTES;
    return (uint32_t)((m->n_out + n - 1) / n + 127) / 128 * 128;
}

void dn_cuda_matmul_large(struct dn_cuda *c, const struct dn_matmul *p, uint32_t n)
{
    const struct dn_weights w = dn_weights_of(p->w);
    const uint32_t n_out = p->w->n_out, slab = slab_rows(p->w);
    const bool scratch = p->bias && !p->out_f32;
    const size_t slab_bytes = ((size_t)slab * w.n_in * 2 + 1023) / 1024 * 1024;
    const size_t products = scratch ? (size_t)n * n_out * sizeof(float) : 0;
    if (!n)
        return;
    uint8_t *space = (uint8_t *)dn_cuda_workspace(c, slab_bytes + LT_BYTES + products);
    pthread_mutex_lock(&lock);
    struct lt *l = lt_of(c->conf.index);
    const char *what = l ? NULL : "cuBLASLt does not start";
    for (uint32_t row0 = 0; row0 < n_out && !what; row0 += slab) {
        struct job j = {};
        uint32_t rows = n_out - row0 < slab ? n_out - row0 : slab;
        bool f32 = p->out_f32 || scratch;
        j.shape = shape_of(l, rows, w.n_in, n_out, f32);
        if (!j.shape)
            what = "cuBLASLt has no product for a matrix's shape";
        else if (c->measuring && !rehearse(c, l, j.shape, n))
            what = "cuBLASLt refuses its own product";
        if (what || c->measuring || c->failed)
            continue;
        launch_unpack(c, w, row0, rows, (__nv_bfloat16 *)space);
        j.x = p->a;
        j.weights = space;
        j.workspace = space + slab_bytes;
        j.out = (scratch ? space + slab_bytes + LT_BYTES : (uint8_t *)p->out) + (size_t)row0 * (f32 ? 4 : 2);
        j.n = n;
        if (!multiply(c, l, &j))
            what = "cuBLASLt refuses its own product";
    }
    pthread_mutex_unlock(&lock);
    if (what)
        dn_cuda_failed(c, cudaErrorNotSupported, what);
    if (!what && p->bias)
        for (uint32_t t = 0; t < n; t += 32768) {
            size_t at = (size_t)t * n_out;
            const float *from = (const float *)(scratch ? space + slab_bytes + LT_BYTES : p->out) + at;
            dn_launch(c, "matmul bias", add_bias, dim3((n_out + 255) / 256, n - t < 32768 ? n - t : 32768), dim3(256),
                      0, from, p->bias, n_out, p->out_f32, (void *)((uint8_t *)p->out + at * (p->out_f32 ? 4 : 2)));
        }
}
