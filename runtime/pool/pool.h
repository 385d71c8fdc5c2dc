/* A pool: a device, the weights of one model in one format on it, the KV arena, and the pages and prefixes in that
 * arena.
 *
 * For: sched/ decides what a step computes, the pool is what it computes on. All memory is taken by dn_pool_open();
 * after it a pool can run out of pages, never of memory. Later pools with other roles (prefill, decode) and devices
 * differ in their conf alone.
 *
 * Owned by the node; the model is borrowed and must outlive it. Open and close on any one thread, everything between on
 * the scheduler's thread, except `prefix` through dn_prefix_peek() and what is constant after open (conf, layout,
 * plan).
 */
#ifndef DN_POOL_POOL_H
#define DN_POOL_POOL_H

#include "cache/prefix.h"
#include "engine/runner.h"

struct dn_pool_conf {
    const char *name;        /* what policies call it; "main" */
    const char *backend;     /* what dn_device_parse() takes; NULL = auto: a GPU if there is one, else the CPU */
    const char *isa;         /* see dn_device_conf */
    unsigned n_threads;      /* 0 = all cores */
    int weights;             /* enum dn_weight_format or DN_WEIGHTS_AUTO */
    uint32_t max_sequences;  /* running at once; 0 = 32, on a GPU 64 */
    uint32_t step_tokens;    /* most tokens of one step; 0 = 512, on a GPU 2048 */
    uint32_t echo_rows;      /* prompt log-probabilities of one step; 0 = 64 */
    uint32_t context_tokens; /* longest sequence; 0 = the model's, or what the arena holds */
    bool context_is_asked;   /* by a person: more than the model has is an error then, else it is the model's */
    uint32_t page_tokens;    /* 0 = the backend's, or 16 */
    uint64_t kv_bytes;       /* arena; 0 = room for 4 full contexts in bf16, at most 1 GiB. On a GPU: for max_sequences
                              * of them, at most 9 tenths of what is free beside weights and activations */
    uint32_t n_valid;        /* ids that have a token; 0 = all */
    void (*progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
    void *progress_ctx;
};

struct dn_pool {
    struct dn_pool_conf conf; /* zeros replaced by what was chosen; strings copied */
    const struct dn_model *model;
    struct dn_device *device;
    struct dn_step_limits limits; /* of a step on it */
    struct dn_weights *weights;
    struct dn_runner *runner;
    struct dn_pages *pages;
    struct dn_prefix *prefix;
    char device_text[256];                   /* "NVIDIA H200, sm_90, ..." */
    char no_gpu[DN_ERR_TEXT];                /* auto took the CPU: why; else "" */
    uint64_t device_total_bytes;             /* of a GPU, else 0: then the next two are 0 */
    uint64_t device_free_bytes;              /* when all was taken */
    uint64_t workspace_bytes;                /* what operations and recorded steps took */
    uint32_t capacity_tokens[DN_KV_FORMATS]; /* what the whole arena holds in one format */
};

int dn_pool_open(const struct dn_pool_conf *conf, const struct dn_model *model, struct dn_pool **out,
                 struct dn_err *err);
void dn_pool_close(struct dn_pool *p);

/* Whether the model has a context that was asked for: DN_CONFIG names both. */
int dn_pool_check_context(uint32_t context_tokens, const struct dn_model *model, struct dn_err *err);

/* A pool that has its device and nothing else: for `dunlin show`, which asks what would fit. Closed as any other. */
int dn_pool_open_device(const struct dn_pool_conf *conf, const struct dn_model *model, struct dn_pool **out,
                        struct dn_err *err);

/* What such a device has now, and what a model's plan would leave of it for a KV arena: of a GPU what dn_pool_open()
 * would take at most; on the CPU all that is free, and beyond the default of kv_bytes one has to ask for it. */
struct dn_pool_room {
    uint64_t free_bytes, total_bytes;
    uint64_t kv_bytes, missing_bytes; /* one of the two is 0: room, or what is needed and not free */
    bool is_limited;                  /* total is a container's limit */
};
void dn_pool_room(const struct dn_pool *p, const struct dn_plan *plan, struct dn_pool_room *out);

/* Whether decode and prefill are computed in different ways, which differ in their last bits: the backend wants them in
 * steps of their own, or MLA attends in another space. Then steps hold one kind, and pages that decode has filled are
 * found by nobody: a prompt's pages are those of prefill, for whoever asks. Any thread. */
bool dn_pool_splits_steps(const struct dn_pool *p);

/* Where the prefix chain of a request on this pool starts: its model, weights, KV format and salt. Any thread. */
struct dn_hash128 dn_pool_prefix_root(const struct dn_pool *p, enum dn_kv_format f, const void *salt, size_t n_salt);

/* Starts the step that the arrays describe, the device's tag table brought up to date; waits for its results. */
void dn_pool_start(struct dn_pool *p);
int dn_pool_wait(struct dn_pool *p, struct dn_err *err);

#endif
