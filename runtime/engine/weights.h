/* The weights of a model, packed for one device in one format. A node may hold several for one model: each pool has its
 * own.
 *
 * For: a pool loads them at start; forward_*.c reads the matrices. Ownership: dn_weights_open() allocates on the
 * device, dn_weights_close() frees; the model and the device must outlive it. Immutable after that. Open and close run
 * on the device's thread (open starts helper threads of its own and joins them).
 *
 * Rows are decoded and packed in chunks of 128, on all threads, straight from the mapped file: there is never a second
 * copy of the weights. Where the format that was asked for can't hold a matrix (a width that is not a multiple of 32),
 * or where precision is lost, a note says so: the start receipt prints notes.
 */
#ifndef DN_ENGINE_WEIGHTS_H
#define DN_ENGINE_WEIGHTS_H

#include "engine/model.h"
#include "kernels/kernels.h"

enum { DN_WEIGHTS_AUTO = -1, DN_WEIGHTS_MAX_NOTES = 16 };

/* AUTO takes for each matrix the nearest format that its file type fits:
 *   Q4_0, Q4_1 -> int4 and Q8_0 -> int8 exactly; BF16 -> bf16 exactly;
 *   Q4_K -> int4 with scales rounded to f16; Q6_K -> int8 (groups of 32); F16, F32 -> bf16, rounded: noted;
 *   safetensors' INT4 -> int4 exactly (symmetric, bf16 scales); F8_E4M3 -> fp8 exactly, or bf16 if the parts of a fused
 *   matrix do not begin at blocks of 128 rows: noted.
 * A fused matrix (q|k|v, gate|up) takes the widest format of its parts. A format that is asked for by name goes for all
 * matrices, except that int4 leaves the embedding table and the head in int8: their error goes straight into the
 * logits. The router and MLA's projections from the latent (w_kt, w_k, w_v) are bf16 always: a wrong expert costs more
 * than a coarse one, and the projections are small. */
struct dn_weights_conf {
    int format;         /* enum dn_weight_format or DN_WEIGHTS_AUTO */
    unsigned n_threads; /* 0 = all cores */
    /* Called on the caller's thread now and then, and at the end with done == total. May be NULL. */
    void (*progress)(void *ctx, uint64_t done_bytes, uint64_t total_bytes);
    void *progress_ctx;
};

struct dn_layer_weights {
    float *attn_norm, *ffn_norm; /* device f32 [dim] */
    float *qkv_bias;             /* device f32 [(n_heads + 2 n_kv_heads) * head_dim] or NULL */
    float *q_norm, *k_norm;      /* device f32 [head_dim] or NULL */
    struct dn_matrix qkv;        /* rows q | k | v */
    struct dn_matrix o;
    struct dn_matrix gate_up; /* rows gate | up; no data in a layer with experts */
    struct dn_matrix down;

    /* MLA; of the matrices above it has o, gate_up and down. */
    float *q_a_norm;       /* device f32 [q_lora_dim] or NULL */
    float *kv_norm;        /* device f32 [latent_dim] */
    struct dn_matrix kv_a; /* rows q_a | kv_a: q_lora_dim (perhaps 0) + latent_dim + rope_dim */
    struct dn_matrix q_b;  /* [n_heads * head_dim][q_lora_dim], or [..][dim] if q_lora_dim is 0 */
    struct dn_matrix w_kt; /* n_heads groups [latent_dim][nope_dim], for absorbed steps */
    struct dn_matrix w_k;  /* n_heads groups [nope_dim][latent_dim] */
    struct dn_matrix w_v;  /* n_heads groups [v_dim][latent_dim] */

    /* Experts: no data in dense layers. */
    float *router_bias; /* device f32 [n_experts] */
    struct dn_matrix router;
    struct dn_matrix expert_gate_up;              /* n_experts groups of rows gate | up */
    struct dn_matrix expert_down;                 /* n_experts groups */
    struct dn_matrix shared_gate_up, shared_down; /* no data without shared experts */
};

struct dn_weights {
    const struct dn_model *model;
    struct dn_device *device;
    int format; /* as asked for */
    struct dn_matrix embed;
    struct dn_matrix head_matrix; /* data == NULL when tied */
    const struct dn_matrix *head; /* &embed when tied, else &head_matrix */
    float *final_norm;
    struct dn_layer_weights *layer; /* [n_layers] */
    uint64_t bytes;                 /* on the device */
    uint64_t format_bytes[DN_W_FORMATS];
    char *note[DN_WEIGHTS_MAX_NOTES]; /* one sentence each */
    size_t n_notes;
};

int dn_weights_open(struct dn_device *device, const struct dn_model *model, const struct dn_weights_conf *conf,
                    struct dn_weights **out, struct dn_err *err);
void dn_weights_close(struct dn_weights *w);

/* "int4": the format that most of the weights are in, whatever was asked for. */
const char *dn_weights_main_format(const struct dn_weights *w);

/* "int4" or "auto": what /metrics and the receipt call the format; and its parse ("auto" included). */
const char *dn_weights_format_name(int format);
int dn_weights_format_parse(const char *name, int *out);

/* What a model would take on a backend, before anything is allocated: `dunlin show`, the receipt, admission. */
struct dn_plan {
    uint64_t weight_bytes;
    uint64_t weight_format_bytes[DN_W_FORMATS];
    uint64_t kv_token_bytes[DN_KV_FORMATS]; /* a token, of all layers */
    uint64_t activation_bytes;              /* runner's buffers for these limits */
    uint64_t rope_bytes;
};
int dn_weights_plan(const struct dn_kernels *ops, const struct dn_model *model, int format,
                    const struct dn_step_limits *limits, uint32_t context_tokens, struct dn_plan *out,
                    struct dn_err *err);

#endif
