/* What device.cu and step.cu share and operations need not know: memory, errors, the step's arrays, recorded lists.
 *
 * Owned by the device; the pool's thread alone, but for errors, memory and lanes, which have a lock.
 */
#ifndef DN_KERNELS_CUDA_OWN_CUH
#define DN_KERNELS_CUDA_OWN_CUH

#include "kernels/cuda/device.cuh"

#include <pthread.h>

enum { DN_CUDA_LISTS = 8, DN_CUDA_MAX_BUCKETS = 40, DN_CUDA_KERNELS = 1024 };

struct dn_cuda_block;  /* one allocation */
struct dn_cuda_region; /* what small ones share */

/* A list of operations as recorded: one graph a bucket of sequences. */
struct dn_cuda_list {
    uint32_t next; /* pass that prepare() is to ask for: prefill, decode, then the buckets */
    bool ready;
    bool uses_pages; /* has operations on the KV cache */
    cudaGraphExec_t graph[DN_CUDA_MAX_BUCKETS];
};

enum dn_cuda_mode { DN_CUDA_IDLE, DN_CUDA_MEASURING, DN_CUDA_RECORDING, DN_CUDA_EAGER, DN_CUDA_REPLAYED };

struct dn_cuda_private {
    char name[256]; /* of the device */
    uint64_t total_bytes;
    int driver;
    int capability; /* 90: 9.0; dn_cuda.code may be less */

    pthread_mutex_t lock;
    cudaError_t error;
    const char *error_what;
    struct dn_cuda_block *block;
    struct dn_cuda_region *region;
    struct dn_cuda_lane *lane; /* those that no thread has */

    struct {
        const void *kernel;
        size_t bytes;
    } shared[DN_CUDA_KERNELS]; /* what allow_shared() asked for: open addressing */

    /* Workspace: of what prepare() measured. An older, smaller one stays for the graphs that use it. */
    void *workspace;
    size_t workspace_bytes, measured_bytes;

    /* The step. */
    struct dn_step step;    /* host arrays */
    uint8_t *host, *device; /* one block on each side, of the same layout */
    size_t begin_prefill, begin_decode, page_at, block_bytes, host_bytes;
    uint32_t n_pages;                    /* of the tag table that was last recorded: page ids are below; 0: not known */
    struct dn_cuda_step prefill, decode; /* device pointers, by kind */
    struct {
        int32_t *token_id, *position, *token_seq;
        uint8_t *token_count;
    } decode_host;
    uint32_t *count_host;
    struct dn_sampled *result_device;

    cudaStream_t main, side;
    cudaEvent_t fork, joined, done;
    bool forked;        /* the side branch has work that the main stream has not waited for */
    bool pages_checked; /* of the step that runs eagerly */
    enum dn_cuda_mode mode;
    struct dn_cuda_list *current;
    uint32_t current_bucket;
    uint32_t n_buckets, bucket[DN_CUDA_MAX_BUCKETS];
    struct dn_cuda_list list[DN_CUDA_LISTS];
};

/* step.cu */
int dn_cuda_step_open(struct dn_cuda *c, struct dn_err *err);
void dn_cuda_step_close(struct dn_cuda *c);
struct dn_step *dn_cuda_step_arrays(struct dn_device *d);
int dn_cuda_prepare(struct dn_device *d, uint32_t list, struct dn_err *err);
bool dn_cuda_step_begin(struct dn_device *d, uint32_t list);
void dn_cuda_step_end(struct dn_device *d);
int dn_cuda_step_wait(struct dn_device *d, struct dn_err *err);
/* The branch of the tag check: operations between fork and join_later run beside the main stream. */
void dn_cuda_fork(struct dn_cuda *c);
void dn_cuda_join_later(struct dn_cuda *c);
void dn_cuda_join_check(struct dn_cuda *c); /* what follows waits for the branch, if there is one */
void dn_cuda_uses_pages(struct dn_cuda *c);
/* tags.cu: counts the step's tokens for penalties, as kernels.h says of token_count. */
void dn_cuda_count_tokens(struct dn_cuda *c);

/* load.cu: dn_cuda.code and arch of the current device; loads all kernels for it. */
cudaError_t dn_cuda_compiled(int *code, int *arch);
cudaError_t dn_cuda_load();

/* device.cu */
void *dn_cuda_alloc(struct dn_device *d, size_t bytes);
void dn_cuda_free(struct dn_device *d, void *p);
int dn_cuda_error(struct dn_cuda *c, struct dn_err *err); /* 0, or -DN_INTERNAL with the first error */

#endif
