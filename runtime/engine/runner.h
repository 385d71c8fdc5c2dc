/* Runs a model on a device, step by step: the activation buffers, the KV arena, the table of page tags and the calls of
 * kernels.h that make one step.
 *
 * For: the scheduler fills the step's arrays (dn_runner_arrays()), calls dn_runner_step(), reads step->result and
 * step->bad. The cache keeps pages and tags on the host; changed tags travel with the next step that checks some, or,
 * if they are too many for that, through dn_runner_set_tags() before it. Ownership: dn_runner_open() takes all memory
 * that a step will ever need; nothing is allocated later. Device and weights are borrowed and must outlive it.
 * Everything here belongs to the device's thread.
 *
 * Knows no backend: the forward pass is a list of operations of dn_kernels.
 */
#ifndef DN_ENGINE_RUNNER_H
#define DN_ENGINE_RUNNER_H

#include "engine/weights.h"

struct dn_runner_conf {
    struct dn_step_limits limits; /* the device's */
    uint32_t context_tokens;      /* longest sequence: positions are < this; 0 = the model's own */
    uint32_t page_tokens;         /* 0 = the backend's, or 16 */
    uint64_t slab_bytes;          /* target size; 0 = a 64th of the arena, 1 to 16 MiB */
    uint64_t arena_bytes;         /* KV memory; whole slabs of it are used. At least one slab */
    uint32_t n_valid;             /* ids below it have a token; 0 = n_vocab of the model */
};

struct dn_runner {
    struct dn_device *device;
    const struct dn_weights *weights;
    struct dn_runner_conf conf; /* zeros replaced by what was chosen */
    struct dn_kv_layout layout; /* how pages lie in the arena */
    uint32_t n_slabs;
    uint32_t n_pages; /* page ids are < n_slabs * layout.slab_pages; format f uses the first
                       * layout.format[f].pages_per_slab ids of each slab of slab_pages ids */
    void *arena;      /* device [n_slabs][layout.slab_bytes] */
    uint64_t *tags;   /* device [n_pages], 0 at start */
    uint64_t activation_bytes, rope_bytes;

    /* Device buffers of a step; forward_*.c alone uses them. */
    float *x;      /* [tokens][dim] residual */
    void *normed;  /* act [max(tokens, rows)][dim] */
    void *qkv;     /* act [tokens][(n_heads + 2 n_kv_heads) * head_dim] */
    void *heads;   /* act [tokens][n_heads * head_dim, or v_dim with MLA] */
    void *gate_up; /* act [tokens][2 * the widest of ff_dim and shared_ff] */
    void *ff;      /* act [tokens][that] */
    void *delta;   /* act [tokens][dim]: what the next norm adds to x */
    float *logits; /* f32 [rows][n_vocab] */
    float *rope;   /* f32 [context_tokens][rotary_dim / 2][2] */
    /* MLA alone */
    void *kv_a;     /* act [tokens][q_lora_dim + latent_dim + rope_dim]: compressed queries | latent | rope key */
    void *q_a;      /* act [tokens][q_lora_dim], normed */
    void *q;        /* act [tokens][n_heads][nope_dim + rope_dim] */
    void *q_latent; /* act [seqs][n_heads][latent_dim + rope_dim]: queries of absorbed steps */
    void *latents;  /* act [seqs][n_heads][latent_dim]: what their attention gives */
    /* Experts alone */
    float *router;                        /* f32 [tokens][n_experts] */
    int32_t *expert;                      /* [tokens][top_experts] */
    float *expert_weight;                 /* [tokens][top_experts] */
    void (*forward)(struct dn_runner *r); /* the model family's list of operations */
};

int dn_runner_open(struct dn_device *device, const struct dn_weights *weights, const struct dn_runner_conf *conf,
                   struct dn_runner **out, struct dn_err *err);
void dn_runner_close(struct dn_runner *r);

/* The arrays to fill before a step; results in them are valid after it. Fill kind, the counts and everything up to
 * sample[]. A step of n_rows == 0 computes no logits (prefill chunks that are not the last). */
struct dn_step *dn_runner_arrays(struct dn_runner *r);

/* Whether the step checks tags at all: if not, changed tags wait for one that does. */
bool dn_runner_checks(const struct dn_step *s);

/* One step: starts it, and waits for it. dn_runner_step() is both. The tag check is an operation of the step only if a
 * sequence has check set. Errors: the device is lost (DN_INTERNAL). */
void dn_runner_start(struct dn_runner *r);
int dn_runner_wait(struct dn_runner *r, struct dn_err *err);
int dn_runner_step(struct dn_runner *r, struct dn_err *err);

/* Writes tags [first, first + n) of the device's table. Between steps only. */
void dn_runner_set_tags(struct dn_runner *r, uint32_t first, uint32_t n, const uint64_t *tag);

/* Logits of rows [first, first + n) of the last step, f32 [n][n_vocab]. Tests and tools: it copies. */
void dn_runner_logits(struct dn_runner *r, uint32_t first, uint32_t n, float *out);

/* Bytes of the activation buffers and of the rope table for these limits. Fails on overflow (DN_NO_MEMORY). */
int dn_runner_sizes(const struct dn_model *m, size_t act_bytes, const struct dn_step_limits *limits,
                    uint32_t context_tokens, uint64_t *activation_bytes, uint64_t *rope_bytes, struct dn_err *err);

/* forward_llama.c: Llama, Qwen2, Qwen3. */
void dn_forward_llama(struct dn_runner *r);
/* forward_kimi.c: the graph of DeepSeek-V3 and Kimi K2. */
void dn_forward_kimi(struct dn_runner *r);

#endif
