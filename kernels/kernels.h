/* The boundary between the C runtime and the machines it runs on: one table of operations, one parameter struct each.
 *
 * For: the forward pass (runtime/engine/forward_*.c) is written once against this table. kernels/cpu is always built
 * in; kernels/cuda is a shared library that dn_kernels_open_library() loads; tests/ hold a naive float64 oracle for
 * both. No CUDA type crosses this header and nothing outside kernels/ knows which backend runs.
 *
 * Memory: "device" pointers belong to the backend's address space and are opaque to the runtime (the CPU's happen to be
 * readable: only tests use that). All of it is taken when the node starts: what operations need for themselves is
 * measured and taken by prepare(). Strides are dense, row-major, where none is given. Activations
 * ("act") have the backend's own type (f32 on the CPU, bf16 on CUDA): the runtime only hands buffers of
 * dn_kernels.act_bytes a value from one operation to the next. The residual stream and logits are f32 everywhere.
 *
 * Order: operations of a device run in the order of the calls and may be asynchronous; step_wait() waits. An operation
 * reads everything that changes from step to step through `struct dn_step` (uploaded by step_begin() in one copy), so
 * that a backend can record the calls of a step once and replay them (CUDA graphs): step_begin() says whether the calls
 * are wanted.
 *
 * Determinism: the result for a row depends on that row's inputs and on the kind of its step (prefill or decode) alone,
 * bit for bit: not on the batch around it, the chunking of its prefill, the number of threads, or whether its prefix
 * was cached. On the CPU it does not depend on the kind either, except for MLA. Tests hold every backend to it.
 *
 * Threads: a device is used by its pool's thread alone. Errors: 0 or -DN_CODE; parameters are the runtime's own, so a
 * violated precondition is a bug (DN_BUG_ON), not an error.
 */
#ifndef DN_KERNELS_H
#define DN_KERNELS_H

#include "base/err.h"
#include "kernels/formats.h"
#include "kernels/step.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* ---- Operations -------------------------------------------------------------------------------------------------- */

/* Embedding lookup: out f32 [n_tokens][n_in] = rows of `table`. Ids must be < table->n_out. */
struct dn_embed {
    const struct dn_matrix *table;
    float *out;
};

/* x += add (if any), then out = x * rsqrt(mean(x^2) + eps) * weight, per row. fp32 inside. */
struct dn_rmsnorm {
    float *x;            /* [n_tokens][dim] residual, updated if add */
    const void *add;     /* act [n_tokens][dim] or NULL */
    const float *weight; /* [dim] device */
    float eps;
    uint32_t dim;
    bool rows_only; /* normalise only the step's row_token rows: out is [n_rows][dim]. x is still updated everywhere */
    void *out;      /* act */
};

/* out = a * W^T (+ bias). n = step->n_tokens, or n_rows if rows_only. */
struct dn_matmul {
    const void *a; /* act [n][w->n_in] */
    const struct dn_matrix *w;
    const float *bias; /* [w->n_out] device or NULL */
    bool rows_only;
    bool out_f32; /* logits: out is f32, else act */
    void *out;    /* [n][w->n_out] */
};

/* After the fused q|k|v projection: optional per-head RMSNorm of q and k, rotary embedding of both, then K and V
 * are encoded in the sequence's KV format and written to their pages (skipped for sequences with bad != 0). q stays in
 * place. Rotation of pair (a, b) by angle pos * inv_freq[i]: (a cos - b sin, b cos + a sin). */
struct dn_qkv_write {
    void *qkv; /* act [n_tokens][(n_heads + 2 * n_kv_heads) * head_dim] */
    uint32_t n_heads, n_kv_heads, head_dim;
    const float *q_norm, *k_norm; /* [head_dim] or NULL */
    float norm_eps;
    const float *rope; /* device f32 [max_positions][rotary_dim / 2][2] cos, sin */
    uint32_t rotary_dim;
    bool interleaved; /* pairs (2i, 2i+1), else (i, i + rotary_dim/2) */
    const struct dn_kv_layout *layout;
    void *arena; /* KV arena, device */
    uint32_t layer;
};

/* Causal paged attention, prefill chunks and single tokens alike, formats mixed over sequences:
 * out[t][h] = softmax(scale * q[t][h] . K[0..position[t]]) V over the sequence's pages; GQA: q head h reads kv head
 * h / (n_heads / n_kv_heads). Softmax and accumulation in fp32. Sequences with bad != 0 give zeros. */
struct dn_attention {
    const void *q;     /* act, rows of q_stride values */
    uint32_t q_stride; /* values from token to token (the fused q|k|v row) */
    uint32_t n_heads, n_kv_heads, head_dim;
    float scale;
    const struct dn_kv_layout *layout;
    const void *arena;
    uint32_t layer;
    void *out; /* act [n_tokens][n_heads * head_dim] */
};

/* out[i] = silu(gate[i]) * up[i] for rows [gate | up]. */
struct dn_silu_mul {
    const void *gate_up; /* act [n_tokens][2 * dim] */
    uint32_t dim;
    void *out; /* act [n_tokens][dim] */
};

/* out = rms-norm of rows of activations, without a residual: the compressed queries of MLA. */
struct dn_norm_act {
    const void *a;     /* act, rows of a_stride values */
    uint32_t a_stride; /* >= dim */
    const float *weight;
    float eps;
    uint32_t dim;
    void *out; /* act [n_tokens][dim] */
};

/* ---- Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434 2.1) ----
 * The cache holds a token's latent c and one rope key for all heads. Prefill expands c to each head's keys and values
 * (un-absorbed); decode takes the key projection to the query's side instead, q~ = q_nope * W_k, attends in the latent
 * space and projects the result with W_v (absorbed): MQA with one KV head of latent_dim + rope_dim values, whose values
 * are the first latent_dim of its keys. */

/* out[t][g] = a[t][g] * W[g]^T for every group g of w, e.g. a head. Strides are in values. */
struct dn_group_matmul {
    const void *a; /* act */
    uint32_t a_stride, a_group_stride;
    const struct dn_matrix *w;
    void *out; /* act */
    uint32_t out_stride, out_group_stride;
};

/* Norms the latent, rotates the rope key and the rope part of each query head, and writes latent and key to the pages
 * (skipped for sequences with bad != 0), encoded in the sequence's format. FP8: one scale a token for the latent, as
 * for DN_KV_FP8; the rope key stays bf16. */
struct dn_mla_write {
    const void *kv; /* act, rows of kv_stride values: latent | rope key, as projected */
    uint32_t kv_stride;
    const void *q; /* act [n_tokens][n_heads][nope_dim + rope_dim] */
    void *q_rope;  /* act: the rotated part of head h of token t goes to q_rope + t * q_rope_stride + h * _head_stride;
                    * may be where it came from */
    uint32_t q_rope_stride, q_rope_head_stride;
    uint32_t n_heads, nope_dim, rope_dim, latent_dim;
    const float *kv_norm; /* [latent_dim] */
    float norm_eps;
    const float *rope; /* device f32 [max_positions][rope_dim / 2][2] cos, sin */
    bool interleaved;  /* as in dn_qkv_write */
    const struct dn_kv_layout *layout;
    void *arena;
    uint32_t layer;
};

/* Absorbed: out[t][h] = softmax(scale * q[t][h] . [c | k_rope][0..position[t]]) c. Otherwise as dn_attention. */
struct dn_mla_attention {
    const void *q; /* act [n_tokens][n_heads][latent_dim + rope_dim] */
    uint32_t n_heads, latent_dim, rope_dim;
    float scale;
    const struct dn_kv_layout *layout;
    const void *arena;
    uint32_t layer;
    void *out; /* act [n_tokens][n_heads][latent_dim] */
};

/* Un-absorbed: K[h] = [c * w_k[h]^T | k_rope], V[h] = c * w_v[h]^T of the sequence's whole cache, then
 * out[t][h] = softmax(scale * q[t][h] . K[h][0..position[t]]) V[h]. Otherwise as dn_attention. */
struct dn_mla_prefill {
    const void *q;               /* act [n_tokens][n_heads][nope_dim + rope_dim], rotated */
    const struct dn_matrix *w_k; /* n_heads groups of [nope_dim][latent_dim] */
    const struct dn_matrix *w_v; /* n_heads groups of [v_dim][latent_dim] */
    uint32_t n_heads, nope_dim, rope_dim, v_dim, latent_dim;
    float scale;
    const struct dn_kv_layout *layout;
    const void *arena;
    uint32_t layer;
    void *out; /* act [n_tokens][n_heads][v_dim] */
};

/* ---- Mixture of experts (DeepSeek-V3, arXiv 2412.19437 2.1.2) ---- */

enum { DN_MAX_EXPERTS = 1024, DN_MAX_TOP_EXPERTS = 16 };

/* s = sigmoid(logits), choice = s + bias. Of n_groups equal groups the top_groups with the largest sum of their two
 * best choices stay; of their experts the top_k best choices are taken (lowest id on ties). weight = s of those, /
 * (their sum
 * + 1e-20) if normalise, * scale. All in f32. Order of a token's experts: best choice first. NaN logits: any experts,
 * NaN weights. */
struct dn_route {
    const float *logits; /* device f32 [n_tokens][n_experts] */
    const float *bias;   /* device f32 [n_experts] or NULL */
    uint32_t n_experts, top_k, n_groups, top_groups;
    bool normalise;
    float scale;
    int32_t *expert; /* device [n_tokens][top_k] */
    float *weight;   /* device [n_tokens][top_k] */
};

/* out[t] = add[t] + sum over k of weight[t][k] * down[e](silu(gate[e] a[t]) * up[e] a[t]), e = expert[t][k]; the sum in
 * f32 and in the order of k, whatever else is in the batch. */
struct dn_experts {
    const void *a;         /* act [n_tokens][gate_up->n_in] */
    const int32_t *expert; /* as dn_route left them */
    const float *weight;
    uint32_t top_k;
    const struct dn_matrix *gate_up; /* n_experts groups of rows gate | up, [2 * ff][dim] */
    const struct dn_matrix *down;    /* n_experts groups of [dim][ff] */
    const void *add;                 /* act [n_tokens][dim] (shared experts) or NULL; may be out */
    void *out;                       /* act [n_tokens][dim] */
};

/* Applies the step's tag changes, then compares each sequence's (page, tag) pairs with the tag table and writes bad[];
 * every page that the step reads or writes is covered. Sequences with check == 0 get bad = 0. A page id outside the
 * table is a mismatch. First operation of a step, if it is one at all; a step without it has bad = 0 everywhere. */
struct dn_check_tags {
    uint64_t *table; /* device [n_pages] current tags */
    uint32_t n_pages;
    uint32_t page_tokens; /* of a page; 0: dn_kernels.page_tokens */
};

/* Samples the step's rows from logits into result[]; rows of bad sequences get id -1. */
struct dn_sample_rows {
    const float *logits; /* f32 [n_rows][n_vocab] */
    uint32_t n_vocab;
    uint32_t n_valid; /* ids >= n_valid have no token (padded head) and are never drawn */
};

/* ---- The table -------------------------------------------------------------------------------------------------- */

struct dn_device_conf {
    unsigned n_threads; /* CPU: threads of a step, the caller's included; 0 = all cores */
    const char *isa;    /* CPU: "auto", "portable", "avx2", "avx512" (tests); NULL = auto */
    int index;          /* CUDA: device number */
    struct dn_step_limits limits;
    uint32_t n_slots, n_vocab; /* token counts for penalties: [n_slots][n_vocab] */
};

/* The sizes of a model that operations may be particular about. 0: it has no such thing. */
struct dn_model_sizes {
    uint32_t n_heads, n_kv_heads, head_dim, rotary_dim;
    uint32_t latent_dim, nope_dim, rope_dim, v_dim; /* MLA */
};

struct dn_device {
    const struct dn_kernels *ops; /* first member of every backend's own struct */
};

struct dn_kernels {
    const char *name;     /* "cpu", "cuda" */
    size_t act_bytes;     /* bytes of one activation value */
    uint32_t page_tokens; /* the only page size it knows; 0 = any (kernels.h's multiples) */
    bool splits_steps;    /* wants decode and prefill in steps of their own (dn_step.kind) */
    bool asynchronous;    /* decode steps of prepared lists run on when step_begin() has returned */

    void (*close)(struct dn_device *d);
    void (*describe)(const struct dn_device *d, char *text, size_t n); /* "Xeon ... avx512-vnni, 2 threads" */

    void (*memory)(struct dn_device *d, uint64_t *free_bytes, uint64_t *total_bytes); /* of a GPU; 0, 0: the host's */

    /* Memory. alloc gives 256-byte aligned, zeroed memory or NULL. upload/download are synchronous. */
    void *(*alloc)(struct dn_device *d, size_t bytes);
    void (*free)(struct dn_device *d, void *p);
    void (*upload)(struct dn_device *d, void *dst, const void *src, size_t bytes);
    void (*download)(struct dn_device *d, void *dst, const void *src, size_t bytes);

    /* Weights. matrix_bytes from format, sizes and flags; pack rows [row0, row0+n) of an allocated matrix. Packing of
     * disjoint rows may run on several threads at once if row0 and n are multiples of 128 (or n reaches the end). */
    size_t (*matrix_bytes)(const struct dn_matrix *m);
    int (*matrix_pack)(struct dn_device *d, struct dn_matrix *m, uint32_t row0, uint32_t n, const struct dn_rows *rows);

    /* Penalties: clears a slot's counts and marks the prompt's ids. Not part of a recorded step. */
    void (*slot_fill)(struct dn_device *d, int32_t slot, const int32_t *prompt_id, size_t n);

    /* Makes ready for steps of the list of operations named `list` (1..7; lists of one runner differ, say, by the tag
     * check): as long as it returns 1, the caller calls all operations of that list, then step_end(); 0 = done. Nothing
     * is computed: the backend measures and takes memory, compiles, records. kind and counts in step_arrays() are the
     * backend's while this goes on. Errors: DN_NO_MEMORY. */
    int (*prepare)(struct dn_device *d, uint32_t list, struct dn_err *err);

    /* A step: fill step_arrays(), step_begin(list), the operations if that returned true (else they are replayed as
     * recorded in prepare()), step_end(), step_wait(). */
    struct dn_step *(*step_arrays)(struct dn_device *d);
    bool (*step_begin)(struct dn_device *d, uint32_t list);
    void (*embed)(struct dn_device *d, const struct dn_embed *p);
    void (*rmsnorm)(struct dn_device *d, const struct dn_rmsnorm *p);
    void (*matmul)(struct dn_device *d, const struct dn_matmul *p);
    void (*qkv_write)(struct dn_device *d, const struct dn_qkv_write *p);
    void (*attention)(struct dn_device *d, const struct dn_attention *p);
    void (*silu_mul)(struct dn_device *d, const struct dn_silu_mul *p);
    void (*norm_act)(struct dn_device *d, const struct dn_norm_act *p);
    void (*group_matmul)(struct dn_device *d, const struct dn_group_matmul *p);
    void (*mla_write)(struct dn_device *d, const struct dn_mla_write *p);
    void (*mla_attention)(struct dn_device *d, const struct dn_mla_attention *p);
    void (*mla_prefill)(struct dn_device *d, const struct dn_mla_prefill *p);
    void (*route)(struct dn_device *d, const struct dn_route *p);
    void (*experts)(struct dn_device *d, const struct dn_experts *p);
    void (*check_tags)(struct dn_device *d, const struct dn_check_tags *p);
    void (*sample_rows)(struct dn_device *d, const struct dn_sample_rows *p);
    void (*step_end)(struct dn_device *d);
    int (*step_wait)(struct dn_device *d, struct dn_err *err); /* -DN_INTERNAL: the device is lost */

    /* Bytes a second at which memory can be read, the best of some passes over `bytes` of it, which are taken and given
     * back: what benchmarks compare with. 0: no memory. Between steps. */
    double (*read_rate)(struct dn_device *d, size_t bytes);
};

int dn_kernels_open_cpu(const struct dn_device_conf *conf, struct dn_device **out, struct dn_err *err);

/* Backends in shared libraries. The library exports this struct under the name "dn_backend"; the number must be the
 * program's own, since every struct above is shared by layout. A loaded library stays loaded: device code may have
 * threads of its own. */
enum { DN_KERNELS_ABI = 6 };
struct dn_backend {
    uint32_t abi;         /* DN_KERNELS_ABI */
    const char *name;     /* "cuda" */
    uint32_t page_tokens; /* dn_kernels.page_tokens of its devices: limits are chosen before one is open */
    /* Whether it computes models of these sizes at all; asked before a device is open and weights are loaded. Which
     * matrices it takes is matrix_bytes()' to say. -DN_CONFIG names the size and what would be right. NULL: all. */
    int (*supports)(const struct dn_step_limits *limits, const struct dn_model_sizes *m, struct dn_err *err);
    int (*open)(const struct dn_device_conf *conf, struct dn_device **out, struct dn_err *err);
    /* For people: what this backend sees on the machine, a line for the driver and one for each device, with what would
     * go wrong and its remedy. Opens nothing. May be NULL. */
    void (*survey)(void (*line)(void *ctx, bool usable, const char *text), void *ctx);
};
/* -DN_NOT_FOUND: there is no such file (the caller may go on with the CPU, and says so). DN_CONFIG: it is no backend,
 * or one for another version. */
int dn_kernels_load_library(const char *path, const struct dn_backend **out, struct dn_err *err);
/* Loads and opens: as above, or what the backend's open says: no device, an old driver, ... */
int dn_kernels_open_library(const char *path, const struct dn_device_conf *conf, struct dn_device **out,
                            struct dn_err *err);

#endif
