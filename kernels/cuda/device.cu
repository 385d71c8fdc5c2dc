/* The CUDA device: opening it, its memory, ways to it, errors, the table of operations. step.cu has the steps.
 *
 * Memory: large allocations are cudaMalloc()s of their own, small ones share regions, so that a model's many vectors
 * don't take 2 MiB each. All of it is zero when it is given out. Given back, a region's part is not used again before
 * all of the region is free: nothing is freed but at the end.
 *
 * Copies from pageable memory go through pinned buffers of 4 MiB, two for each thread that copies, and four threads for
 * large ones: the driver's own way for them is one at a time and slower than the bus.
 */
#include "kernels/cuda/own.cuh"
extern "C" {
#include "kernels/cuda/supports.h"
}

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    REGION_BYTES = 32 << 20,
    MAX_SHARED_BYTES = 2 << 20,
    ALIGNMENT = 256,
    DIRECT_BYTES = 64 << 10,
    UPLOAD_THREADS = 4,
    LARGE_BYTES = 64 << 20,
    MAX_TOKENS = 65535 /* of a step: blocks of a grid in y */
};

struct dn_cuda_region {
    uint8_t *data;
    size_t bytes, used_bytes, n_blocks;
};

struct dn_cuda_block {
    struct dn_cuda_block *next;
    void *data;
    struct dn_cuda_region *region;
};

/* ---- Errors ---- */

void dn_cuda_failed(struct dn_cuda *c, cudaError_t e, const char *what)
{
    pthread_mutex_lock(&c->own->lock);
    if (c->own->error == cudaSuccess) {
        c->own->error = e;
        c->own->error_what = what;
        c->failed = true;
    }
    pthread_mutex_unlock(&c->own->lock);
}

int dn_cuda_error(struct dn_cuda *c, struct dn_err *err)
{
    pthread_mutex_lock(&c->own->lock);
    cudaError_t e = c->own->error;
    const char *what = c->own->error_what;
    pthread_mutex_unlock(&c->own->lock);
    if (e == cudaSuccess)
        return 0;
    return dn_err_set(err, DN_INTERNAL, "CUDA: %s: %s (device %d, %s)", what, cudaGetErrorString(e), c->conf.index,
                      c->own->name);
}

/* The attribute is the kernel's in the whole process, so that it only ever grows: another device may have asked for
 * more than this one, whose launches it would take away. */
static cudaError_t raise_shared(const void *kernel, size_t bytes)
{
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    cudaFuncAttributes now;
    pthread_mutex_lock(&lock);
    cudaError_t e = cudaFuncGetAttributes(&now, kernel);
    if (e == cudaSuccess && now.maxDynamicSharedSizeBytes < (int)bytes)
        e = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)bytes);
    pthread_mutex_unlock(&lock);
    return e;
}

cudaError_t dn_cuda_allow_shared(struct dn_cuda *c, const void *kernel, size_t bytes)
{
    size_t at = ((uintptr_t)kernel >> 4) % DN_CUDA_KERNELS;
    for (size_t i = 0; i < DN_CUDA_KERNELS; i++, at = (at + 1) % DN_CUDA_KERNELS) {
        if (c->own->shared[at].kernel && c->own->shared[at].kernel != kernel)
            continue;
        if (c->own->shared[at].bytes >= bytes)
            return cudaSuccess;
        cudaError_t e = raise_shared(kernel, bytes);
        if (e == cudaSuccess) {
            c->own->shared[at].kernel = kernel;
            c->own->shared[at].bytes = bytes;
        }
        return e;
    }
    return raise_shared(kernel, bytes);
}

/* ---- Memory ---- */

/* Zeroed, or NULL; being out of memory is no error of the device. */
static void *take(size_t bytes)
{
    void *p = NULL;
    if (cudaMalloc(&p, bytes) != cudaSuccess) {
        cudaGetLastError();
        return NULL;
    }
    if (cudaMemset(p, 0, bytes) != cudaSuccess || cudaStreamSynchronize(cudaStreamLegacy) != cudaSuccess) {
        cudaGetLastError();
        cudaFree(p);
        return NULL;
    }
    return p;
}

static struct dn_cuda_region *region_for(struct dn_cuda *c, size_t bytes)
{
    bool is_shared = bytes <= MAX_SHARED_BYTES;
    struct dn_cuda_region *r = c->own->region;
    if (is_shared && r && r->bytes - r->used_bytes >= bytes)
        return r;
    size_t n = is_shared ? (size_t)REGION_BYTES : bytes;
    void *p = take(n);
    r = p ? (struct dn_cuda_region *)calloc(1, sizeof *r) : NULL;
    if (!r) {
        cudaFree(p);
        return NULL;
    }
    r->data = (uint8_t *)p;
    r->bytes = n;
    if (is_shared)
        c->own->region = r;
    return r;
}

void *dn_cuda_alloc(struct dn_device *d, size_t bytes)
{
    struct dn_cuda *c = dn_cuda(d);
    if (bytes > SIZE_MAX / 2)
        return NULL;
    bytes = bytes ? (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT : (size_t)ALIGNMENT;
    struct dn_cuda_block *b = (struct dn_cuda_block *)calloc(1, sizeof *b);
    if (!b)
        return NULL;
    cudaSetDevice(c->conf.index);
    pthread_mutex_lock(&c->own->lock);
    struct dn_cuda_region *r = region_for(c, bytes);
    if (r) {
        b->data = r->data + r->used_bytes;
        b->region = r;
        b->next = c->own->block;
        c->own->block = b;
        r->used_bytes += bytes;
        r->n_blocks++;
    }
    pthread_mutex_unlock(&c->own->lock);
    void *p = b->data;
    if (!p)
        free(b);
    return p;
}

void dn_cuda_free(struct dn_device *d, void *p)
{
    struct dn_cuda *c = dn_cuda(d);
    if (!p)
        return;
    cudaSetDevice(c->conf.index);
    pthread_mutex_lock(&c->own->lock);
    struct dn_cuda_block **at = &c->own->block;
    while (*at && (*at)->data != p)
        at = &(*at)->next;
    DN_BUG_ON(!*at);
    struct dn_cuda_block *b = *at;
    struct dn_cuda_region *r = b->region;
    *at = b->next;
    if (--r->n_blocks == 0) {
        cudaFree(r->data); /* waits for the device */
        c->own->region = c->own->region == r ? NULL : c->own->region;
        free(r);
    }
    pthread_mutex_unlock(&c->own->lock);
    free(b);
}

static void memory(struct dn_device *d, uint64_t *free_bytes, uint64_t *total_bytes)
{
    size_t available = 0, total = 0;
    cudaSetDevice(dn_cuda(d)->conf.index);
    cudaError_t e = cudaMemGetInfo(&available, &total);
    if (e != cudaSuccess)
        dn_cuda_failed(dn_cuda(d), e, "memory");
    *free_bytes = available;
    *total_bytes = total;
}

/* ---- Lanes ---- */

struct dn_cuda_lane {
    struct dn_cuda *c;
    struct dn_cuda_lane *next;
    cudaStream_t stream;
    uint8_t *pinned[2];
    cudaEvent_t copied[2];
    unsigned turn; /* of the buffer given last */
};

static void lane_close(struct dn_cuda_lane *l)
{
    for (int i = 0; i < 2; i++) {
        if (l->copied[i])
            cudaEventDestroy(l->copied[i]);
        cudaFreeHost(l->pinned[i]);
    }
    if (l->stream)
        cudaStreamDestroy(l->stream);
    free(l);
}

static void lane_check(struct dn_cuda_lane *l, cudaError_t e, const char *what)
{
    if (e != cudaSuccess)
        dn_cuda_failed(l->c, e, what);
}

struct dn_cuda_lane *dn_cuda_lane_take(struct dn_cuda *c)
{
    cudaSetDevice(c->conf.index);
    pthread_mutex_lock(&c->own->lock);
    struct dn_cuda_lane *l = c->own->lane;
    if (l)
        c->own->lane = l->next;
    pthread_mutex_unlock(&c->own->lock);
    if (l)
        return l;
    l = (struct dn_cuda_lane *)calloc(1, sizeof *l);
    if (!l) {
        dn_cuda_failed(c, cudaErrorMemoryAllocation, "pinned buffers");
        return NULL;
    }
    l->c = c;
    cudaError_t e = cudaStreamCreateWithFlags(&l->stream, cudaStreamNonBlocking);
    for (int i = 0; i < 2 && e == cudaSuccess; i++) {
        e = cudaHostAlloc((void **)&l->pinned[i], DN_CUDA_LANE_BYTES, cudaHostAllocPortable);
        if (e == cudaSuccess)
            e = cudaEventCreateWithFlags(&l->copied[i], cudaEventDisableTiming);
    }
    if (e != cudaSuccess) {
        dn_cuda_failed(c, e, "pinned buffers");
        lane_close(l);
        return NULL;
    }
    return l;
}

uint8_t *dn_cuda_lane_buffer(struct dn_cuda_lane *l)
{
    l->turn ^= 1;
    lane_check(l, cudaEventSynchronize(l->copied[l->turn]), "upload");
    return l->pinned[l->turn];
}

void dn_cuda_lane_send(struct dn_cuda_lane *l, void *dst, size_t bytes)
{
    DN_BUG_ON(bytes > DN_CUDA_LANE_BYTES);
    lane_check(l, cudaMemcpyAsync(dst, l->pinned[l->turn], bytes, cudaMemcpyHostToDevice, l->stream), "upload");
    lane_check(l, cudaEventRecord(l->copied[l->turn], l->stream), "upload");
}

cudaStream_t dn_cuda_lane_stream(struct dn_cuda_lane *l)
{
    return l->stream;
}

void dn_cuda_lane_put(struct dn_cuda_lane *l)
{
    lane_check(l, cudaStreamSynchronize(l->stream), "upload");
    pthread_mutex_lock(&l->c->own->lock);
    l->next = l->c->own->lane;
    l->c->own->lane = l;
    pthread_mutex_unlock(&l->c->own->lock);
}

struct piece {
    struct dn_cuda *c;
    uint8_t *dst;
    const uint8_t *src;
    size_t bytes;
};

static void *upload_piece(void *arg)
{
    const struct piece *p = (const struct piece *)arg;
    struct dn_cuda_lane *l = dn_cuda_lane_take(p->c);
    for (size_t at = 0; l && at < p->bytes; at += DN_CUDA_LANE_BYTES) {
        size_t n = p->bytes - at < DN_CUDA_LANE_BYTES ? p->bytes - at : (size_t)DN_CUDA_LANE_BYTES;
        memcpy(dn_cuda_lane_buffer(l), p->src + at, n);
        dn_cuda_lane_send(l, p->dst + at, n);
    }
    if (l)
        dn_cuda_lane_put(l);
    return NULL;
}

/* One thread fills buffers at 8 GB/s, the bus takes several times that. */
static void upload_large(struct dn_cuda *c, uint8_t *dst, const uint8_t *src, size_t bytes)
{
    struct piece piece[UPLOAD_THREADS];
    pthread_t thread[UPLOAD_THREADS];
    size_t each = (bytes / UPLOAD_THREADS + DN_CUDA_LANE_BYTES - 1) / DN_CUDA_LANE_BYTES * DN_CUDA_LANE_BYTES, n = 0;
    for (size_t at = 0; at < bytes; at += each, n++) {
        piece[n] = {c, dst + at, src + at, bytes - at < each ? bytes - at : each};
        if (at + each >= bytes || pthread_create(&thread[n], NULL, upload_piece, &piece[n]) != 0) {
            piece[n].bytes = bytes - at; /* the rest, by this thread */
            upload_piece(&piece[n]);
            break;
        }
    }
    for (size_t i = 0; i < n; i++)
        pthread_join(thread[i], NULL);
}

static void upload(struct dn_device *d, void *dst, const void *src, size_t bytes)
{
    struct dn_cuda *c = dn_cuda(d);
    if (!bytes || c->failed)
        return;
    if (bytes > DIRECT_BYTES) {
        if (bytes > LARGE_BYTES) {
            upload_large(c, (uint8_t *)dst, (const uint8_t *)src, bytes);
        } else {
            struct piece p = {c, (uint8_t *)dst, (const uint8_t *)src, bytes};
            upload_piece(&p);
        }
        return;
    }
    struct dn_cuda_lane *l = dn_cuda_lane_take(c); /* the driver's own staging is as good */
    if (!l)
        return;
    lane_check(l, cudaMemcpyAsync(dst, src, bytes, cudaMemcpyHostToDevice, l->stream), "upload");
    dn_cuda_lane_put(l);
}

/* Waits for the step that may write what is read. */
static void download(struct dn_device *d, void *dst, const void *src, size_t bytes)
{
    struct dn_cuda *c = dn_cuda(d);
    if (!bytes || c->failed)
        return;
    cudaSetDevice(c->conf.index);
    cudaError_t e = cudaStreamSynchronize(c->own->main);
    if (e == cudaSuccess)
        e = cudaMemcpyAsync(dst, src, bytes, cudaMemcpyDeviceToHost, c->own->main);
    if (e == cudaSuccess)
        e = cudaStreamSynchronize(c->own->main);
    if (e != cudaSuccess)
        dn_cuda_failed(c, e, "download");
}

/* ---- Operations that have to do with the tag check ---- */

/* Runs beside the first operations of the step; whatever reads or writes pages, samples or ends the step waits. */
static void check_tags(struct dn_device *d, const struct dn_check_tags *p)
{
    struct dn_cuda *c = dn_cuda(d);
    if (c->measuring)
        c->own->n_pages = p->n_pages;
    dn_cuda_fork(c);
    dn_cuda_check_tags(d, p);
    dn_cuda_join_later(c);
}

static void qkv_write(struct dn_device *d, const struct dn_qkv_write *p)
{
    dn_cuda_uses_pages(dn_cuda(d));
    dn_cuda_qkv_write(d, p);
}

static void attention(struct dn_device *d, const struct dn_attention *p)
{
    dn_cuda_uses_pages(dn_cuda(d));
    dn_cuda_attention(d, p);
}

static void mla_write(struct dn_device *d, const struct dn_mla_write *p)
{
    dn_cuda_uses_pages(dn_cuda(d));
    dn_cuda_mla_write(d, p);
}

static void mla_attention(struct dn_device *d, const struct dn_mla_attention *p)
{
    dn_cuda_uses_pages(dn_cuda(d));
    dn_cuda_mla_attention(d, p);
}

static void mla_prefill(struct dn_device *d, const struct dn_mla_prefill *p)
{
    dn_cuda_uses_pages(dn_cuda(d));
    dn_cuda_mla_prefill(d, p);
}

static void sample_rows(struct dn_device *d, const struct dn_sample_rows *p)
{
    dn_cuda_join_check(dn_cuda(d));
    dn_cuda_sample_rows(d, p);
}

static void slot_fill(struct dn_device *d, int32_t slot, const int32_t *prompt_id, size_t n)
{
    struct dn_cuda *c = dn_cuda(d);
    DN_BUG_ON(slot < 0 || (uint32_t)slot >= c->conf.n_slots);
    for (size_t i = 0; i < n; i++)
        DN_BUG_ON(prompt_id[i] < 0 || (uint32_t)prompt_id[i] >= c->conf.n_vocab);
    cudaSetDevice(c->conf.index);
    c->plain = true;
    dn_cuda_slot_fill(d, slot, prompt_id, n);
}

/* ---- The device ---- */

/* "580.95.05", of the kernel's module; "" if it does not say. */
static void driver_release(char *text, size_t n)
{
    char line[256];
    FILE *f = fopen("/proc/driver/nvidia/version", "re");
    text[0] = 0;
    while (f && fgets(line, sizeof line, f)) {
        for (char *p = line; *p; p++) {
            int a, b, end = 0;
            if (p > line && p[-1] == ' ' && *p >= '0' && *p <= '9' && sscanf(p, "%3d.%3d%n", &a, &b, &end) == 2 &&
                end > 0) {
                size_t len = strspn(p, "0123456789.");
                snprintf(text, n, "%.*s", (int)(len < 31 ? len : 31), p);
                fclose(f);
                return;
            }
        }
    }
    if (f)
        fclose(f);
}

/* "" or what is missing in the library's code for a device. */
static void slow_code(int capability, int arch, char *text, size_t n)
{
    text[0] = 0;
    if (arch / 10 < capability / 10)
        snprintf(text, n, "; built without sm_%d%s: slow kernels", capability, capability == 90 ? "a" : "");
}

static void describe(const struct dn_device *d, char *text, size_t n)
{
    const struct dn_cuda *c = (const struct dn_cuda *)d;
    char release[32], slow[64];
    driver_release(release, sizeof release);
    slow_code(c->own->capability, c->arch, slow, sizeof slow);
    snprintf(text, n, "%s, sm_%d, %.0f GiB, driver %s, CUDA %d.%d%s", c->own->name, c->own->capability,
             (double)c->own->total_bytes / (1 << 30), release[0] ? release : "unknown", c->own->driver / 1000,
             c->own->driver % 1000 / 10, slow);
}

static void close_device(struct dn_device *d)
{
    struct dn_cuda *c = dn_cuda(d);
    if (!c)
        return;
    if (c->own) {
        cudaSetDevice(c->conf.index);
        cudaDeviceSynchronize();
        dn_cuda_step_close(c);
        while (c->own->lane) {
            struct dn_cuda_lane *l = c->own->lane;
            c->own->lane = l->next;
            lane_close(l);
        }
        while (c->own->block)
            dn_cuda_free(d, c->own->block->data);
        pthread_mutex_destroy(&c->own->lock);
        free(c->own);
    }
    free(c);
}

static const struct dn_kernels *table(void)
{
    static struct dn_kernels t;
    t.name = "cuda";
    t.act_bytes = 2;
    t.page_tokens = DN_CUDA_PAGE_TOKENS;
    t.splits_steps = t.asynchronous = true;
    t.close = close_device;
    t.describe = describe;
    t.memory = memory;
    t.alloc = dn_cuda_alloc;
    t.free = dn_cuda_free;
    t.upload = upload;
    t.download = download;
    t.matrix_bytes = dn_cuda_matrix_bytes;
    t.matrix_pack = dn_cuda_matrix_pack;
    t.slot_fill = slot_fill;
    t.prepare = dn_cuda_prepare;
    t.step_arrays = dn_cuda_step_arrays;
    t.step_begin = dn_cuda_step_begin;
    t.embed = dn_cuda_embed;
    t.rmsnorm = dn_cuda_rmsnorm;
    t.matmul = dn_cuda_matmul;
    t.qkv_write = qkv_write;
    t.attention = attention;
    t.silu_mul = dn_cuda_silu_mul;
    t.norm_act = dn_cuda_norm_act;
    t.group_matmul = dn_cuda_group_matmul;
    t.mla_write = mla_write;
    t.mla_attention = mla_attention;
    t.mla_prefill = mla_prefill;
    t.route = dn_cuda_route;
    t.experts = dn_cuda_experts;
    t.check_tags = check_tags;
    t.sample_rows = sample_rows;
    t.step_end = dn_cuda_step_end;
    t.step_wait = dn_cuda_step_wait;
    t.read_rate = dn_cuda_read_rate;
    return &t;
}

/* Why there is no device to use, as a sentence that says what to do. */
static int explain(cudaError_t e, int index, const char *name, int arch, struct dn_err *err)
{
    int driver = 0;
    cudaDriverGetVersion(&driver);
    switch (e) {
    case cudaErrorInsufficientDriver:
        if (driver == 0)
            return dn_err_set(err, DN_CONFIG, "no NVIDIA driver (libcuda.so.1 is not installed)");
        return dn_err_set(err, DN_CONFIG,
                          "the NVIDIA driver knows CUDA %d.%d, expected at least %d.%d: update the driver",
                          driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000, CUDART_VERSION % 1000 / 10);
    case cudaErrorNoDevice:
        return dn_err_set(err, DN_CONFIG, "no GPU that CUDA can see%s",
                          getenv("CUDA_VISIBLE_DEVICES") ? " (CUDA_VISIBLE_DEVICES is set)" : "");
    case cudaErrorNoKernelImageForDevice:
    case cudaErrorInvalidDeviceFunction:
        return dn_err_set(err, DN_CONFIG, "device %d, %s: this library has no code for sm_%d", index, name, arch);
    case cudaErrorMemoryAllocation:
        return dn_err_set(err, DN_NO_MEMORY, "device %d, %s: out of memory", index, name);
    default:
        return dn_err_set(err, DN_CONFIG, "device %d%s%s: %s", index, *name ? ", " : "", name, cudaGetErrorString(e));
    }
}

static int open_parts(struct dn_cuda *c, struct dn_err *err)
{
    struct dn_cuda_private *own = c->own;
    int n = 0, index = c->conf.index;
    if (c->conf.limits.tokens > MAX_TOKENS)
        return dn_err_set(err, DN_CONFIG, "engine.step_tokens %u: the CUDA backend takes at most %d",
                          c->conf.limits.tokens, MAX_TOKENS);
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess)
        return explain(e, index, "", 0, err);
    if (index < 0 || index >= n)
        return dn_err_set(err, DN_CONFIG, "device %d: this machine has %d GPU%s", index, n, n == 1 ? "" : "s");
    cudaDeviceProp prop;
    if ((e = cudaGetDeviceProperties(&prop, index)) != cudaSuccess)
        return explain(e, index, "", 0, err);
    snprintf(own->name, sizeof own->name, "%s", prop.name);
    own->total_bytes = prop.totalGlobalMem;
    own->capability = prop.major * 10 + prop.minor;
    c->n_sms = prop.multiProcessorCount;
    c->shared_bytes = prop.sharedMemPerBlockOptin;
    cudaDriverGetVersion(&own->driver);
    if ((e = cudaSetDevice(index)) != cudaSuccess || (e = dn_cuda_compiled(&c->code, &c->arch)) != cudaSuccess ||
        (e = dn_cuda_load()) != cudaSuccess)
        return explain(e, index, own->name, own->capability, err);
    int rc = dn_cuda_step_open(c, err);
    if (rc)
        return rc;
    size_t count_bytes;
    if (__builtin_mul_overflow((size_t)c->conf.n_slots, (size_t)c->conf.n_vocab * sizeof *c->token_counts,
                               &count_bytes))
        count_bytes = SIZE_MAX;
    c->token_counts = (uint16_t *)dn_cuda_alloc(&c->base, count_bytes);
    c->counters = (uint32_t *)dn_cuda_alloc(&c->base, DN_CUDA_COUNTERS * sizeof *c->counters);
    if (!c->token_counts || !c->counters)
        return dn_err_set(err, DN_NO_MEMORY, "device %d, %s: no memory for %u slots of %u token counts", index,
                          own->name, c->conf.n_slots, c->conf.n_vocab);
    return 0;
}

static int open_device(const struct dn_device_conf *conf, struct dn_device **out, struct dn_err *err)
{
    struct dn_cuda *c = (struct dn_cuda *)calloc(1, sizeof *c);
    struct dn_cuda_private *own = (struct dn_cuda_private *)calloc(1, sizeof *own);
    if (!c || !own) {
        free(c);
        free(own);
        return dn_err_set(err, DN_NO_MEMORY, "no memory");
    }
    pthread_mutex_init(&own->lock, NULL);
    c->base.ops = table();
    c->conf = *conf;
    c->own = own;
    int rc = open_parts(c, err);
    if (rc) {
        close_device(&c->base);
        return rc;
    }
    *out = &c->base;
    return 0;
}

/* ---- What there is, for people ---- */

typedef void survey_line(void *ctx, bool usable, const char *text);

static void survey_device(int i, survey_line *line, void *ctx)
{
    char text[512], slow[64];
    struct dn_err err = {};
    cudaDeviceProp prop;
    int code, arch;
    size_t available = 0, total = 0;
    cudaError_t e = cudaGetDeviceProperties(&prop, i);
    if (e != cudaSuccess) {
        explain(e, i, "", 0, &err);
        line(ctx, false, err.text);
        return;
    }
    int capability = prop.major * 10 + prop.minor;
    if ((e = cudaSetDevice(i)) != cudaSuccess || (e = dn_cuda_compiled(&code, &arch)) != cudaSuccess ||
        (e = cudaMemGetInfo(&available, &total)) != cudaSuccess) {
        explain(e, i, prop.name, capability, &err);
        line(ctx, false, err.text);
        return;
    }
    bool little = available < total / 2;
    slow_code(capability, arch, slow, sizeof slow);
    snprintf(text, sizeof text, "device %d: %s, sm_%d, %.1f of %.1f GiB free%s%s", i, prop.name, capability,
             (double)available / (1 << 30), (double)total / (1 << 30), slow,
             little ? "; other programs hold the rest: end them, or set engine.kv_memory" : "");
    line(ctx, true, text);
    cudaDeviceReset(); /* nothing of it stays in use */
}

static void survey(survey_line *line, void *ctx)
{
    int n = 0, driver = 0;
    char text[128], release[32];
    struct dn_err err = {};
    cudaError_t e = cudaGetDeviceCount(&n);
    if (e != cudaSuccess) {
        explain(e, 0, "", 0, &err);
        line(ctx, false, err.text);
        return;
    }
    cudaDriverGetVersion(&driver);
    driver_release(release, sizeof release);
    snprintf(text, sizeof text, "driver %s, CUDA %d.%d; this library is built with CUDA %d.%d",
             *release ? release : "?", driver / 1000, driver % 1000 / 10, CUDART_VERSION / 1000,
             CUDART_VERSION % 1000 / 10);
    line(ctx, true, text);
    for (int i = 0; i < n; i++)
        survey_device(i, line, ctx);
}

extern "C" __attribute__((visibility("default"))) const struct dn_backend dn_backend = {
    DN_KERNELS_ABI, "cuda", DN_CUDA_PAGE_TOKENS, dn_cuda_supports, open_device, survey};
