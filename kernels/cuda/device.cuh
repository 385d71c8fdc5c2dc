/* The CUDA backend's device: what every operation of it knows. kernels.h says what the operations do.
 *
 * For: the .cu files of this folder. device.cu opens the device and has the table, step.cu uploads the step's arrays,
 * records and replays graphs, load.cu loads kernels. An operation is one function dn_cuda_<op>(), in the file that the
 * list at the end says: it chooses a kernel and launches it on dn_cuda.stream with dn_launch(). It never allocates,
 * synchronises or reads device memory.
 *
 * Sizes: kernels take the numbers of tokens, sequences and rows from device memory (dn_cuda_step.count), since a
 * recorded launch serves every step of its bucket. Grids are made for dn_cuda.n_tokens etc.: in a decode step the
 * bucket, in prefill the step's own. Rows beyond the count may be computed on garbage within the buffers, but must not
 * write pages, token counts, tags or results.
 *
 * Activations are bf16. Errors: the first one sticks (dn_cuda_failed()), later launches of the step are harmless, and
 * step_wait() reports it: the device is lost then.
 */
#ifndef DN_KERNELS_CUDA_DEVICE_CUH
#define DN_KERNELS_CUDA_DEVICE_CUH

#define _Noreturn __attribute__((noreturn)) /* kernels.h is C11 */
extern "C" {
#include "kernels/kernels.h"
}
#undef _Noreturn

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

/* Device pointers to the arrays of struct dn_step, passed to kernels by value. */
struct dn_cuda_step {
    const uint32_t *count; /* [DN_COUNTS] */
    const int32_t *token_id, *position, *token_seq;
    const uint8_t *token_count;
    const int32_t *token_start, *kv_len, *slot;
    const uint8_t *kv_format, *check;
    const int32_t *page_start;
    const uint32_t *page;
    const uint64_t *tag, *tag_new; /* in the host's memory: read once, by check_tags() */
    const int32_t *row_token;
    const struct dn_sample *sample;
    int32_t *bad, *bad_host; /* the host's copy lies in its memory; check_tags() writes both */
    struct dn_sampled *result;
};
enum { DN_COUNT_TOKENS, DN_COUNT_SEQS, DN_COUNT_ROWS, DN_COUNT_TAG_FIRST, DN_COUNT_TAGS, DN_COUNTS = 8 };

enum { DN_CUDA_COUNTERS = 1 << 16 };

struct dn_cuda {
    struct dn_device base;
    struct dn_device_conf conf;
    int n_sms;
    int code;            /* what the kernels that run on it were compiled for: 90 = sm_90 or sm_90a */
    int arch;            /* which of them to choose: as code, but 80 where that is sm_90 without wgmma (no "a") */
    size_t shared_bytes; /* most that a block may opt in to */
    cudaStream_t stream; /* all operations; while check_tags() is called, the stream of its branch */

    /* The step that operations are being called for. */
    enum dn_step_kind kind;
    uint32_t n_tokens, n_seqs, n_rows; /* what grids are made for; >= the counts in device memory */
    uint32_t max_pages;                /* of one sequence: a bound, in decode steps the limit's */
    struct dn_cuda_step step;
    bool measuring; /* prepare() wants sizes: dn_cuda_workspace() notes, dn_launch() does nothing; kernels were loaded
                     * by open, and who calls others' (cuBLASLt) loads them now */
    bool failed;    /* dn_cuda_failed() was called: dn_launch() does nothing */
    bool plain;     /* the next launch follows more than its stream's last kernel: no programmatic launch */

    uint16_t *token_counts;      /* [conf.n_slots][conf.n_vocab], as sampling.h says */
    uint32_t *counters;          /* [DN_CUDA_COUNTERS] zero between operations: whoever counts up sets back to 0 */
    struct dn_cuda_private *own; /* device.cu, step.cu */
};

static inline struct dn_cuda *dn_cuda(struct dn_device *d)
{
    return (struct dn_cuda *)d;
}

/* One for each file that includes this: load.cu finds and loads all of a file's kernels by this one. */
struct dn_cuda_file {
    struct dn_cuda_file *next;
    const void *kernel;
};
extern struct dn_cuda_file *dn_cuda_files;
static __global__ void dn_cuda_of_file() {}
static __attribute__((constructor)) void dn_cuda_note_file()
{
    static struct dn_cuda_file file;
    file.kernel = (const void *)dn_cuda_of_file;
    file.next = dn_cuda_files;
    dn_cuda_files = &file;
}

/* Scratch for the operation being called, 1024-byte aligned, contents undefined. The next operation gets the same
 * memory, so nothing may stay in it. Ask for the most that this step's sizes can need: prepare() measures with the
 * largest prefill step and the largest decode step. NULL while measuring. */
void *dn_cuda_workspace(struct dn_cuda *c, size_t bytes);

/* Notes the first error; `what` is the operation's name, a constant. Any thread. */
void dn_cuda_failed(struct dn_cuda *c, cudaError_t e, const char *what);

/* Lets a kernel's blocks have more than 48 KiB of dynamic shared memory; asks the driver once. */
cudaError_t dn_cuda_allow_shared(struct dn_cuda *c, const void *kernel, size_t bytes);

/* A way of its own to the device for a thread that loads weights: a stream and two pinned buffers, so that one is
 * filled while the other is copied. Any thread; one thread a lane. lane = take(); for each piece: p = buffer(lane);
 * fill p; send(lane, dst, n); put(lane); Kernels may be launched on stream(lane) to work on what was sent. put() waits
 * for all of it. */
enum { DN_CUDA_LANE_BYTES = 4 << 20 };
struct dn_cuda_lane;
struct dn_cuda_lane *dn_cuda_lane_take(struct dn_cuda *c); /* NULL: no memory, noted by dn_cuda_failed() */
uint8_t *dn_cuda_lane_buffer(struct dn_cuda_lane *lane);   /* pinned, DN_CUDA_LANE_BYTES, free to be filled */
void dn_cuda_lane_send(struct dn_cuda_lane *lane, void *dst, size_t bytes); /* of the buffer given last */
cudaStream_t dn_cuda_lane_stream(struct dn_cuda_lane *lane);
void dn_cuda_lane_put(struct dn_cuda_lane *lane);

/* Launches with programmatic dependent launch: the kernel may start while its predecessor still runs. Every kernel of
 * this folder therefore calls dn_wait_previous() in all its threads before it reads or writes anything that another
 * kernel writes (weights and constant tables may be fetched before), and dn_start_next() early. */
template <typename... Params, typename... Args>
static inline void dn_launch(struct dn_cuda *c, const char *what, void (*kernel)(Params...), dim3 grid, dim3 block,
                             size_t shared, Args... args)
{
    if (c->measuring || c->failed)
        return;
    cudaLaunchAttribute attr = {};
    attr.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attr.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t conf = {};
    conf.gridDim = grid;
    conf.blockDim = block;
    conf.dynamicSmemBytes = shared;
    conf.stream = c->stream;
    conf.attrs = &attr;
    conf.numAttrs = c->arch >= 90 && !c->plain ? 1 : 0;
    c->plain = false;
    cudaError_t e = cudaSuccess;
    if (shared > 48 * 1024)
        e = dn_cuda_allow_shared(c, (const void *)kernel, shared);
    if (e == cudaSuccess)
        e = cudaLaunchKernelEx(&conf, kernel, static_cast<Params>(args)...);
    if (e != cudaSuccess)
        dn_cuda_failed(c, e, what);
}

static __device__ __forceinline__ void dn_wait_previous()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
}

static __device__ __forceinline__ void dn_start_next()
{
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

/* Where page `page` of format f begins; as dn_kv_page_offset(), without its check. */
static __device__ __forceinline__ uint64_t dn_page_offset(const struct dn_kv_layout &l, int f, uint32_t page)
{
    return (uint64_t)(page / l.slab_pages) * l.slab_bytes + (uint64_t)(page % l.slab_pages) * l.format[f].page_bytes;
}

/* The operations, by file. */
void dn_cuda_embed(struct dn_device *d, const struct dn_embed *p);                             /* rows.cu */
void dn_cuda_rmsnorm(struct dn_device *d, const struct dn_rmsnorm *p);                         /* rows.cu */
void dn_cuda_norm_act(struct dn_device *d, const struct dn_norm_act *p);                       /* rows.cu */
void dn_cuda_silu_mul(struct dn_device *d, const struct dn_silu_mul *p);                       /* rows.cu */
void dn_cuda_check_tags(struct dn_device *d, const struct dn_check_tags *p);                   /* tags.cu */
void dn_cuda_route(struct dn_device *d, const struct dn_route *p);                             /* route.cu */
void dn_cuda_qkv_write(struct dn_device *d, const struct dn_qkv_write *p);                     /* gqa_write.cu */
void dn_cuda_attention(struct dn_device *d, const struct dn_attention *p);                     /* gqa_prefill.cu */
void dn_cuda_mla_write(struct dn_device *d, const struct dn_mla_write *p);                     /* mla_write.cu */
void dn_cuda_mla_attention(struct dn_device *d, const struct dn_mla_attention *p);             /* mla_decode.cu */
void dn_cuda_mla_prefill(struct dn_device *d, const struct dn_mla_prefill *p);                 /* mla_prefill.cu */
void dn_cuda_sample_rows(struct dn_device *d, const struct dn_sample_rows *p);                 /* sample.cu */
void dn_cuda_slot_fill(struct dn_device *d, int32_t slot, const int32_t *prompt_id, size_t n); /* sample.cu */
size_t dn_cuda_matrix_bytes(const struct dn_matrix *m);                                        /* pack.cu */
int dn_cuda_matrix_pack(struct dn_device *d, struct dn_matrix *m, uint32_t row0, uint32_t n,
                        const struct dn_rows *rows);                             /* pack.cu */
void dn_cuda_matmul(struct dn_device *d, const struct dn_matmul *p);             /* matmul.cu */
void dn_cuda_group_matmul(struct dn_device *d, const struct dn_group_matmul *p); /* matmul.cu */
void dn_cuda_experts(struct dn_device *d, const struct dn_experts *p);           /* experts.cu */
double dn_cuda_read_rate(struct dn_device *d, size_t bytes);                     /* ceiling.cu */

#endif
