/* Steps on the device: the arrays' upload, the recorded graphs, the branch of the tag check, results.
 *
 * Arrays. The host's arrays lie in one pinned block and the device's in one of the same layout:
 *     token arrays | results | counts, bad, arrays of sequences, rows, samples | token arrays of decode | page ids
 * so that one copy uploads a step: a decode step from its counts to its last page id (a step's tokens are copied to the
 * small arrays for it), a prefill step from the token arrays on. Device addresses never change, as recorded graphs
 * need. Tags are not uploaded: the check reads each once, straight from the pinned memory and beside the first
 * operations. bad[] is zero in what is uploaded. The check writes it on both sides; results come back in one copy.
 *
 * Decode steps of a prepared list are one graph: sizes of the bucket in the grids, counts from memory. Prefill steps
 * are launched one by one, on the same streams.
 *
 * The branch: token counting and the tag check run on a side stream from the step's start; the first operation that
 * touches pages, the sampler or the end of the step joins it. The launch after a join, and the first of a stream, is no
 * programmatic one: such an edge knows one predecessor.
 *
 * On an H200 at batch 64 with 8k tokens each the host hands a step over in 8 to 13 us: checks 0.6, copy 2, graph 5,
 * event 1.3; after 64 MiB of other reads 20 to 63 us, most of it the driver's, after 30 ms of sleep 95 to 121. It has
 * an empty step's results after 17 us. A chain of 2,400 small kernels takes 1.4 us a kernel as a graph, 3.2 us eagerly.
 * With what the scheduler does since the end of the step before (bench_host 64 40 cuda, median of each run): 17 to 24
 * us, 39 to 56 after other reads; other machines of that kind took up to 84 and 145.
 */
#include "kernels/cuda/own.cuh"

#include <string.h>
#include <time.h>

enum { SPIN_NS = 20000000 };

static void check(struct dn_cuda *c, cudaError_t e, const char *what)
{
    if (e != cudaSuccess)
        dn_cuda_failed(c, e, what);
}

static uint32_t min_u32(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* ---- Arrays ---- */

static size_t place(size_t *at, size_t n, size_t bytes)
{
    size_t here = *at;
    *at = here + (n * bytes + 15) / 16 * 16;
    return here;
}

/* Sets a host array and the device's, at the same place of their blocks. */
#define ARRAY(host_pointer, device_pointer, type, n)                                                                   \
    do {                                                                                                               \
        size_t here = place(&at, (n), sizeof(type));                                                                   \
        (host_pointer) = (type *)(own->host + here);                                                                   \
        (device_pointer) = (type *)(own->device + here);                                                               \
    } while (0)

/* With host NULL it only measures: the pointers mean nothing then. */
static void place_arrays(struct dn_cuda *c)
{
    struct dn_cuda_private *own = c->own;
    const struct dn_step_limits *l = &c->conf.limits;
    struct dn_step *s = &own->step;
    struct dn_cuda_step *p = &own->prefill, *d = &own->decode;
    size_t at = 0, n_decode = min_u32(l->tokens, l->seqs);
    struct dn_sampled *result;
    own->begin_prefill = at;
    ARRAY(s->token_id, p->token_id, int32_t, l->tokens);
    ARRAY(s->position, p->position, int32_t, l->tokens);
    ARRAY(s->token_seq, p->token_seq, int32_t, l->tokens);
    ARRAY(s->token_count, p->token_count, uint8_t, l->tokens);
    ARRAY(s->result, result, struct dn_sampled, l->rows);
    own->begin_decode = at;
    ARRAY(own->count_host, p->count, uint32_t, DN_COUNTS);
    p->bad = (int32_t *)(own->device + place(&at, l->seqs, sizeof *p->bad)); /* the host's part stays zero */
    ARRAY(s->token_start, p->token_start, int32_t, (size_t)l->seqs + 1);
    ARRAY(s->kv_len, p->kv_len, int32_t, l->seqs);
    ARRAY(s->slot, p->slot, int32_t, l->seqs);
    ARRAY(s->kv_format, p->kv_format, uint8_t, l->seqs);
    ARRAY(s->check, p->check, uint8_t, l->seqs);
    ARRAY(s->page_start, p->page_start, int32_t, (size_t)l->seqs + 1);
    ARRAY(s->row_token, p->row_token, int32_t, l->rows);
    ARRAY(s->sample, p->sample, struct dn_sample, l->rows);
    *d = *p;
    ARRAY(own->decode_host.token_id, d->token_id, int32_t, n_decode);
    ARRAY(own->decode_host.position, d->position, int32_t, n_decode);
    ARRAY(own->decode_host.token_seq, d->token_seq, int32_t, n_decode);
    ARRAY(own->decode_host.token_count, d->token_count, uint8_t, n_decode);
    own->page_at = at;
    ARRAY(s->page, p->page, uint32_t, l->pages);
    own->block_bytes = at;
    /* The host's alone. */
    at = (at + 255) / 256 * 256;
    s->tag = (uint64_t *)(own->host + place(&at, l->pages, sizeof *s->tag));
    s->tag_new = (uint64_t *)(own->host + place(&at, (size_t)l->tags + 1, sizeof *s->tag_new));
    s->bad = (int32_t *)(own->host + place(&at, l->seqs, sizeof *s->bad));
    p->tag = s->tag; /* one address space: pinned memory has the same address on both sides */
    p->tag_new = s->tag_new;
    p->bad_host = s->bad;
    p->result = result;
    d->page = p->page;
    d->tag = p->tag;
    d->tag_new = p->tag_new;
    d->bad_host = p->bad_host;
    d->result = p->result;
    own->result_device = p->result;
    own->host_bytes = at;
}

static void choose_buckets(struct dn_cuda_private *own, uint32_t max)
{
    static const uint32_t small[] = {1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128};
    uint32_t n = 0;
    for (size_t i = 0; i < sizeof small / sizeof *small && small[i] < max; i++)
        own->bucket[n++] = small[i];
    for (uint32_t b = 192; b < max && n < DN_CUDA_MAX_BUCKETS - 1; b += b < 512 ? 64 : b / 4)
        own->bucket[n++] = b;
    own->bucket[n++] = max;
    own->n_buckets = n;
}

int dn_cuda_step_open(struct dn_cuda *c, struct dn_err *err)
{
    struct dn_cuda_private *own = c->own;
    const struct dn_step_limits *l = &c->conf.limits;
    DN_BUG_ON(!l->tokens || !l->seqs || !l->rows);
    choose_buckets(own, min_u32(l->tokens, l->seqs));
    place_arrays(c);
    cudaError_t e = cudaHostAlloc((void **)&own->host, own->host_bytes, cudaHostAllocPortable | cudaHostAllocMapped);
    if (e == cudaSuccess) {
        memset(own->host, 0, own->host_bytes);
        own->device = (uint8_t *)dn_cuda_alloc(&c->base, own->block_bytes);
        e = own->device ? cudaSuccess : cudaErrorMemoryAllocation;
    }
    if (e == cudaSuccess) {
        place_arrays(c);
        e = cudaStreamCreateWithFlags(&own->main, cudaStreamNonBlocking);
    }
    if (e == cudaSuccess)
        e = cudaStreamCreateWithFlags(&own->side, cudaStreamNonBlocking);
    cudaEvent_t *event[] = {&own->fork, &own->joined};
    for (size_t i = 0; i < 2 && e == cudaSuccess; i++)
        e = cudaEventCreateWithFlags(event[i], cudaEventDisableTiming);
    if (e == cudaSuccess)
        e = cudaEventCreateWithFlags(&own->done, cudaEventDisableTiming | cudaEventBlockingSync);
    if (e != cudaSuccess)
        return dn_err_set(err, e == cudaErrorMemoryAllocation ? DN_NO_MEMORY : DN_CONFIG,
                          "device %d, %s: the arrays of a step: %s", c->conf.index, own->name, cudaGetErrorString(e));
    c->stream = own->main;
    c->step = own->prefill;
    return 0;
}

static void drop_graphs(struct dn_cuda_list *list)
{
    for (uint32_t i = 0; i < DN_CUDA_MAX_BUCKETS; i++) {
        if (list->graph[i])
            cudaGraphExecDestroy(list->graph[i]);
        list->graph[i] = NULL;
    }
}

void dn_cuda_step_close(struct dn_cuda *c)
{
    struct dn_cuda_private *own = c->own;
    for (uint32_t i = 0; i < DN_CUDA_LISTS; i++)
        drop_graphs(&own->list[i]);
    cudaEvent_t event[] = {own->fork, own->joined, own->done};
    for (size_t i = 0; i < 3; i++)
        if (event[i])
            cudaEventDestroy(event[i]);
    if (own->side)
        cudaStreamDestroy(own->side);
    if (own->main)
        cudaStreamDestroy(own->main);
    cudaFreeHost(own->host);
}

struct dn_step *dn_cuda_step_arrays(struct dn_device *d)
{
    return &dn_cuda(d)->own->step;
}

/* ---- Workspace ---- */

static int take_workspace(struct dn_cuda *c, size_t bytes, struct dn_err *err)
{
    struct dn_cuda_private *own = c->own;
    if (bytes <= own->workspace_bytes)
        return 0;
    size_t rounded = (bytes + 1023) / 1024 * 1024;
    uint8_t *p = (uint8_t *)dn_cuda_alloc(&c->base, rounded + 1024);
    if (!p)
        return dn_err_set(err, DN_NO_MEMORY, "device %d, %s: no memory for %zu bytes of workspace", c->conf.index,
                          own->name, rounded);
    own->workspace = (void *)(((uintptr_t)p + 1023) / 1024 * 1024);
    own->workspace_bytes = rounded;
    return 0;
}

void *dn_cuda_workspace(struct dn_cuda *c, size_t bytes)
{
    struct dn_cuda_private *own = c->own;
    if (c->measuring) {
        own->measured_bytes = bytes > own->measured_bytes ? bytes : own->measured_bytes;
        return NULL;
    }
    if (bytes > own->workspace_bytes) {
        /* A list that was never prepared (tests) may take more; a prepared one asked for less when it was measured. */
        if (own->mode != DN_CUDA_EAGER || own->current->ready || take_workspace(c, bytes, NULL))
            dn_cuda_failed(c, cudaErrorMemoryAllocation, "workspace larger than measured");
    }
    return own->workspace;
}

/* ---- The branch of the tag check ---- */

void dn_cuda_fork(struct dn_cuda *c)
{
    struct dn_cuda_private *own = c->own;
    if (c->measuring || c->failed)
        return;
    if (!own->forked) { /* else the branch goes on */
        check(c, cudaEventRecord(own->fork, own->main), "fork");
        check(c, cudaStreamWaitEvent(own->side, own->fork, 0), "fork");
        c->plain = true;
        own->forked = true;
    }
    c->stream = own->side;
}

void dn_cuda_join_later(struct dn_cuda *c)
{
    c->stream = c->own->main;
    c->plain = true; /* of the main stream: what follows waited for the fork's event at most */
}

void dn_cuda_join_check(struct dn_cuda *c)
{
    struct dn_cuda_private *own = c->own;
    if (!own->forked || c->measuring || c->failed)
        return;
    check(c, cudaEventRecord(own->joined, own->side), "join");
    check(c, cudaStreamWaitEvent(own->main, own->joined, 0), "join");
    own->forked = false;
    c->plain = true;
}

/* Most pages of one sequence. */
static uint32_t seq_pages(const struct dn_cuda *c)
{
    const struct dn_step_limits *l = &c->conf.limits;
    return l->seq_pages ? min_u32(l->seq_pages, l->pages) : l->pages;
}

static uint32_t pages_of(const struct dn_cuda *c, uint32_t q)
{
    return ((uint32_t)c->own->step.kv_len[q] + c->base.ops->page_tokens - 1) / c->base.ops->page_tokens;
}

/* Every token has a page: kernels read page ids without asking. The device finds wild ids of the sequences whose tags
 * it checks; nobody else would those of the others. */
static void check_pages(const struct dn_cuda *c)
{
    const struct dn_step *s = &c->own->step;
    uint64_t sum = 0;
    for (uint32_t q = 0; q < s->n_seqs; q++) {
        uint32_t begin = (uint32_t)s->page_start[q], n = pages_of(c, q);
        DN_BUG_ON(n > seq_pages(c) || n > c->conf.limits.pages - begin);
        sum += n;
        if (s->check[q] || c->own->n_pages == 0)
            continue;
        DN_BUG_ON(c->own->n_pages > INT32_MAX);
        /* The highest bit is that of an id above `last`; several at once, 2 us for 64 x 8k tokens. */
        uint32_t last = c->own->n_pages - 1, wrong = 0;
        for (uint32_t i = begin; i < begin + n; i++)
            wrong |= s->page[i] | (last - s->page[i]);
        DN_BUG_ON(wrong >> 31);
    }
    DN_BUG_ON(sum > c->conf.limits.pages);
}

void dn_cuda_uses_pages(struct dn_cuda *c)
{
    struct dn_cuda_private *own = c->own;
    if (own->mode == DN_CUDA_EAGER && !own->pages_checked)
        check_pages(c);
    own->pages_checked = own->current->uses_pages = true;
    dn_cuda_join_check(c);
}

/* ---- Recording ---- */

static void set_sizes(struct dn_cuda *c, enum dn_step_kind kind, uint32_t tokens, uint32_t seqs, uint32_t rows,
                      uint32_t pages)
{
    c->kind = kind;
    c->n_tokens = tokens ? tokens : 1; /* no grid is empty */
    c->n_seqs = seqs ? seqs : 1;
    c->n_rows = rows;
    c->max_pages = pages ? pages : 1;
    c->step = kind == DN_STEP_DECODE ? c->own->decode : c->own->prefill;
}

static void decode_sizes(struct dn_cuda *c, uint32_t bucket)
{
    set_sizes(c, DN_STEP_DECODE, bucket, bucket, min_u32(bucket, c->conf.limits.rows), seq_pages(c));
}

/* While it prepares, the caller sees the pass's kind and counts, and calls the operations of such a step. */
static int show_sizes(struct dn_cuda *c)
{
    struct dn_step *s = &c->own->step;
    s->kind = c->kind;
    s->n_tokens = c->n_tokens;
    s->n_seqs = c->n_seqs;
    s->n_rows = c->n_rows;
    s->n_tags = s->tag_first = 0;
    return 1;
}

static void begin_recording(struct dn_cuda *c, uint32_t bucket)
{
    struct dn_cuda_private *own = c->own;
    own->mode = DN_CUDA_RECORDING;
    own->current_bucket = bucket;
    decode_sizes(c, own->bucket[bucket]);
    check(c, cudaStreamBeginCapture(own->main, cudaStreamCaptureModeThreadLocal), "record");
    c->plain = true;
    dn_cuda_count_tokens(c);
}

static void finish_recording(struct dn_cuda *c)
{
    struct dn_cuda_private *own = c->own;
    cudaGraph_t graph = NULL;
    check(c, cudaStreamEndCapture(own->main, &graph), "record");
    cudaGraphExec_t *exec = &own->current->graph[own->current_bucket];
    if (!c->failed)
        check(c, cudaGraphInstantiate(exec, graph, 0), "record");
    if (!c->failed)
        check(c, cudaGraphUpload(*exec, own->main), "record");
    if (graph)
        cudaGraphDestroy(graph);
}

int dn_cuda_prepare(struct dn_device *d, uint32_t list, struct dn_err *err)
{
    struct dn_cuda *c = dn_cuda(d);
    struct dn_cuda_private *own = c->own;
    const struct dn_step_limits *l = &c->conf.limits;
    DN_BUG_ON(list == 0 || list >= DN_CUDA_LISTS);
    cudaSetDevice(c->conf.index);
    struct dn_cuda_list *current = own->current = &own->list[list];
    int rc = dn_cuda_error(c, err);
    if (rc)
        return rc;
    uint32_t pass = current->next++;
    c->measuring = pass < 2;
    own->mode = DN_CUDA_MEASURING;
    if (pass == 0) {
        drop_graphs(current);
        current->ready = current->uses_pages = false;
        own->measured_bytes = 0;
        set_sizes(c, DN_STEP_PREFILL, l->tokens, min_u32(l->seqs, l->tokens), l->rows, seq_pages(c));
        return show_sizes(c);
    }
    if (pass == 1) {
        decode_sizes(c, own->bucket[own->n_buckets - 1]);
        return show_sizes(c);
    }
    if (pass == 2) {
        rc = take_workspace(c, own->measured_bytes, err);
        if (rc) {
            current->next = 0; /* the caller may give memory back and try again */
            own->mode = DN_CUDA_IDLE;
            return rc;
        }
    }
    if (pass - 2 < own->n_buckets) {
        begin_recording(c, pass - 2);
        return show_sizes(c);
    }
    current->next = 0; /* asked again it starts anew: tests do */
    current->ready = true;
    own->mode = DN_CUDA_IDLE;
    check(c, cudaStreamSynchronize(own->main), "prepare");
    return dn_cuda_error(c, err);
}

/* ---- A step ---- */

/* A step that contradicts itself would read or write another sequence's memory: better no process than that. */
static void check_seq(const struct dn_cuda *c, uint32_t q)
{
    const struct dn_step *s = &c->own->step;
    int32_t begin = s->token_start[q], end = s->token_start[q + 1];
    DN_BUG_ON(begin < 0 || end <= begin || (uint32_t)end > s->n_tokens);
    DN_BUG_ON(s->page_start[q] < 0 || (uint32_t)s->page_start[q] > c->conf.limits.pages);
    DN_BUG_ON(s->check[q] && pages_of(c, q) > c->conf.limits.pages - (uint32_t)s->page_start[q]);
    DN_BUG_ON(s->kv_format[q] >= DN_KV_FORMATS);
    DN_BUG_ON(s->slot[q] >= 0 && (uint32_t)s->slot[q] >= c->conf.n_slots);
    DN_BUG_ON(s->kv_len[q] < end - begin);
    for (int32_t t = begin; t < end; t++) {
        DN_BUG_ON(s->token_seq[t] != (int32_t)q || s->position[t] != s->kv_len[q] - (end - t));
        DN_BUG_ON(s->token_id[t] < 0);
        DN_BUG_ON(s->token_count[t] && s->slot[q] >= 0 && (uint32_t)s->token_id[t] >= c->conf.n_vocab);
    }
}

static void check_row(const struct dn_cuda *c, uint32_t row)
{
    const struct dn_step *s = &c->own->step;
    const struct dn_sample *p = s->sample + row;
    DN_BUG_ON(s->row_token[row] < 0 || (uint32_t)s->row_token[row] >= s->n_tokens);
    DN_BUG_ON(p->n_ban < 0 || p->n_ban > DN_MAX_BAN || p->n_top > DN_MAX_TOP);
    DN_BUG_ON(p->slot >= 0 && (uint32_t)p->slot >= c->conf.n_slots);
}

static void check_step(const struct dn_cuda *c)
{
    const struct dn_step *s = &c->own->step;
    const struct dn_step_limits *l = &c->conf.limits;
    DN_BUG_ON(s->n_tokens > l->tokens || s->n_seqs > l->seqs || s->n_rows > l->rows || s->n_tags > l->tags);
    DN_BUG_ON(s->n_seqs && s->token_start[0] != 0);
    DN_BUG_ON(s->n_seqs ? (uint32_t)s->token_start[s->n_seqs] != s->n_tokens : s->n_tokens != 0);
    DN_BUG_ON(s->kind == DN_STEP_DECODE && s->n_tokens != s->n_seqs);
    for (uint32_t q = 0; q < s->n_seqs; q++)
        check_seq(c, q);
    for (uint32_t row = 0; row < s->n_rows; row++)
        check_row(c, row);
    if (c->own->current->ready && c->own->current->uses_pages)
        check_pages(c);
}

/* Where the last table of the step ends. */
static uint32_t end_of_pages(const struct dn_cuda *c)
{
    const struct dn_step *s = &c->own->step;
    uint32_t end = 0;
    for (uint32_t q = 0; q < s->n_seqs; q++) {
        uint32_t e = (uint32_t)s->page_start[q] + pages_of(c, q);
        end = e > end ? e : end;
    }
    return min_u32(end, c->conf.limits.pages); /* operations on rows alone have no pages */
}

static void upload_step(struct dn_cuda *c)
{
    struct dn_cuda_private *own = c->own;
    struct dn_step *s = &own->step;
    bool decode = s->kind == DN_STEP_DECODE;
    own->count_host[DN_COUNT_TOKENS] = s->n_tokens;
    own->count_host[DN_COUNT_SEQS] = s->n_seqs;
    own->count_host[DN_COUNT_ROWS] = s->n_rows;
    own->count_host[DN_COUNT_TAG_FIRST] = s->tag_first;
    own->count_host[DN_COUNT_TAGS] = s->n_tags;
    memset(s->bad, 0, s->n_seqs * sizeof *s->bad);
    if (decode) {
        memcpy(own->decode_host.token_id, s->token_id, s->n_tokens * sizeof *s->token_id);
        memcpy(own->decode_host.position, s->position, s->n_tokens * sizeof *s->position);
        memcpy(own->decode_host.token_seq, s->token_seq, s->n_tokens * sizeof *s->token_seq);
        memcpy(own->decode_host.token_count, s->token_count, s->n_tokens * sizeof *s->token_count);
    }
    size_t from = decode ? own->begin_decode : own->begin_prefill;
    size_t to = own->page_at + end_of_pages(c) * sizeof *s->page;
    check(c, cudaMemcpyAsync(own->device + from, own->host + from, to - from, cudaMemcpyHostToDevice, own->main),
          "upload of a step");
}

/* The bucket of a step, or n_buckets. */
static uint32_t bucket_of(const struct dn_cuda_private *own, uint32_t n_seqs)
{
    uint32_t b = 0;
    while (b < own->n_buckets && own->bucket[b] < n_seqs)
        b++;
    return b;
}

static uint32_t most_pages(const struct dn_cuda *c)
{
    uint32_t most = 0;
    for (uint32_t q = 0; q < c->own->step.n_seqs; q++) {
        uint32_t n = pages_of(c, q);
        most = n > most ? n : most;
    }
    return most;
}

bool dn_cuda_step_begin(struct dn_device *d, uint32_t list)
{
    struct dn_cuda *c = dn_cuda(d);
    struct dn_cuda_private *own = c->own;
    struct dn_step *s = &own->step;
    DN_BUG_ON(list == 0 || list >= DN_CUDA_LISTS);
    own->current = &own->list[list];
    own->mode = DN_CUDA_REPLAYED;
    c->measuring = false;
    check_step(c);
    if (c->failed) /* the device is lost: step_wait() says so */
        return false;
    cudaSetDevice(c->conf.index);
    upload_step(c);
    uint32_t b = s->kind == DN_STEP_DECODE ? bucket_of(own, s->n_seqs) : own->n_buckets;
    if (b < own->n_buckets && s->n_rows <= own->bucket[b] && own->current->ready) {
        check(c, cudaGraphLaunch(own->current->graph[b], own->main), "launch of a step");
        check(c, cudaEventRecord(own->done, own->main), "launch of a step");
        return false;
    }
    own->mode = DN_CUDA_EAGER;
    own->pages_checked = own->current->ready && own->current->uses_pages;
    if (b < own->n_buckets && s->n_rows <= own->bucket[b])
        decode_sizes(c, own->bucket[b]);
    else
        set_sizes(c, s->kind, s->n_tokens, s->n_seqs, s->n_rows, most_pages(c));
    c->plain = true;
    dn_cuda_count_tokens(c);
    return true;
}

void dn_cuda_step_end(struct dn_device *d)
{
    struct dn_cuda *c = dn_cuda(d);
    struct dn_cuda_private *own = c->own;
    if (own->mode == DN_CUDA_MEASURING || own->mode == DN_CUDA_REPLAYED) {
        c->measuring = false;
        return;
    }
    dn_cuda_join_check(c);
    size_t bytes = c->n_rows * sizeof *own->step.result;
    if (bytes && !c->failed)
        check(c, cudaMemcpyAsync(own->step.result, own->result_device, bytes, cudaMemcpyDeviceToHost, own->main),
              "results");
    if (own->mode == DN_CUDA_RECORDING)
        finish_recording(c);
    else
        check(c, cudaEventRecord(own->done, own->main), "end of a step");
    own->forked = false;
}

/* Spins at first: a thread that sleeps through a step of 3 ms wakes 140 us late, and hands the next one over in 43 us
 * instead of 18 (H200's host: its core has gone to sleep too). */
static cudaError_t wait_done(const struct dn_cuda_private *own)
{
    struct timespec start, now;
    clock_gettime(CLOCK_MONOTONIC, &start);
    for (;;) {
        for (int i = 0; i < 16; i++) {
            cudaError_t e = cudaEventQuery(own->done);
            if (e != cudaErrorNotReady)
                return e;
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
        if ((now.tv_sec - start.tv_sec) * 1000000000ll + (now.tv_nsec - start.tv_nsec) > SPIN_NS)
            return cudaEventSynchronize(own->done);
    }
}

int dn_cuda_step_wait(struct dn_device *d, struct dn_err *err)
{
    struct dn_cuda *c = dn_cuda(d);
    if (!c->failed)
        check(c, wait_done(c->own), "step");
    return dn_cuda_error(c, err);
}
