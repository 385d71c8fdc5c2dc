/* The tag check, and token counts for penalties: what a step does beside its first operations.
 *
 * check_tags: one block a sequence compares the tag that each of its pages must have with the table. The step's new
 * tags reach the table in the same launch, by blocks of their own; no block reads an entry that changes: it takes the
 * new tag from the step. So there is no order between blocks. The first wrong page is a minimum over the block: the
 * same whatever the threads do. 16 bytes a page, of which 8 come over PCIe: at batch 64 and 8k tokens 128 KiB. On an
 * H200 an empty step takes 10 us longer with the check at 64 x 1k or 8k tokens, 17 us at 64 x 32k, branch and join
 * included; in a model it runs beside the first layer's products.
 */
#include "kernels/cuda/own.cuh"
#include "kernels/sampling.h"

enum { CHECK_THREADS = 256, TAG_BLOCKS = 2, COUNT_THREADS = 128 };

static __device__ __forceinline__ bool is_right(const struct dn_cuda_step &s, const uint64_t *table, uint32_t n_pages,
                                                uint32_t page, uint64_t want)
{
    uint32_t changed = page - s.count[DN_COUNT_TAG_FIRST];
    if (page >= n_pages)
        return false;
    return (changed < s.count[DN_COUNT_TAGS] ? s.tag_new[changed] : table[page]) == want;
}

static __global__ void __launch_bounds__(CHECK_THREADS)
    check_tags(struct dn_cuda_step s, uint64_t *table, uint32_t n_pages, uint32_t page_tokens)
{
    dn_wait_previous();
    dn_start_next();
    if (blockIdx.x < TAG_BLOCKS) {
        uint32_t first = s.count[DN_COUNT_TAG_FIRST];
        for (uint32_t i = blockIdx.x * CHECK_THREADS + threadIdx.x; i < s.count[DN_COUNT_TAGS];
             i += TAG_BLOCKS * CHECK_THREADS)
            if (first + i < n_pages)
                table[first + i] = s.tag_new[i];
        return;
    }
    uint32_t q = blockIdx.x - TAG_BLOCKS;
    if (q >= s.count[DN_COUNT_SEQS] || !s.check[q])
        return; /* bad is 0 since the upload */
    int32_t begin = s.page_start[q], n = (int32_t)(((uint32_t)s.kv_len[q] + page_tokens - 1) / page_tokens);
    uint32_t wrong = UINT32_MAX;
#pragma unroll 4
    for (int32_t i = (int32_t)threadIdx.x; i < n; i += CHECK_THREADS)
        if (!is_right(s, table, n_pages, s.page[begin + i], s.tag[begin + i]) && (uint32_t)i < wrong)
            wrong = (uint32_t)i;
    __shared__ uint32_t part[CHECK_THREADS / 32];
    wrong = __reduce_min_sync(0xffffffff, wrong);
    if (threadIdx.x % 32 == 0)
        part[threadIdx.x / 32] = wrong;
    __syncthreads();
    if (threadIdx.x != 0)
        return;
    for (int w = 1; w < CHECK_THREADS / 32; w++)
        wrong = part[w] < wrong ? part[w] : wrong;
    if (wrong != UINT32_MAX)
        s.bad[q] = s.bad_host[q] = 1 + (int32_t)wrong;
}

void dn_cuda_check_tags(struct dn_device *d, const struct dn_check_tags *p)
{
    struct dn_cuda *c = dn_cuda(d);
    dn_launch(c, "check_tags", check_tags, dim3(TAG_BLOCKS + c->n_seqs), dim3(CHECK_THREADS), 0, c->step, p->table,
              p->n_pages, d->ops->page_tokens);
}

/* Two counts share a word; they saturate, so adding must look first. The order of additions does not matter. */
static __device__ void add_one(uint16_t *count)
{
    uint32_t *word = (uint32_t *)((uintptr_t)count & ~(uintptr_t)3), shift = (uintptr_t)count & 2 ? 16 : 0;
    uint32_t old = *(volatile uint32_t *)word, seen;
    do {
        if ((old >> shift & DN_COUNT_MAX) == DN_COUNT_MAX)
            return;
        seen = old;
        old = atomicCAS(word, seen, seen + (1u << shift));
    } while (old != seen);
}

static __global__ void __launch_bounds__(COUNT_THREADS)
    count_tokens(struct dn_cuda_step s, uint16_t *counts, uint32_t n_slots, uint32_t n_vocab)
{
    dn_wait_previous();
    dn_start_next();
    uint32_t t = blockIdx.x * COUNT_THREADS + threadIdx.x;
    if (t >= s.count[DN_COUNT_TOKENS] || !s.token_count[t])
        return;
    int32_t slot = s.slot[s.token_seq[t]], id = s.token_id[t];
    if (slot >= 0 && (uint32_t)slot < n_slots && (uint32_t)id < n_vocab)
        add_one(counts + (size_t)slot * n_vocab + id);
}

void dn_cuda_count_tokens(struct dn_cuda *c)
{
    if (c->conf.n_slots == 0 || c->n_tokens == 0)
        return;
    if (c->own->mode == DN_CUDA_EAGER) { /* a recorded step finds out on the device */
        const struct dn_step *s = &c->own->step;
        bool any = false;
        for (uint32_t t = 0; t < s->n_tokens; t++)
            any = any || s->token_count[t];
        if (!any)
            return;
    }
    dn_cuda_fork(c);
    dn_launch(c, "count_tokens", count_tokens, dim3((c->n_tokens + COUNT_THREADS - 1) / COUNT_THREADS),
              dim3(COUNT_THREADS), 0, c->step, c->token_counts, c->conf.n_slots, c->conf.n_vocab);
    dn_cuda_join_later(c);
}
