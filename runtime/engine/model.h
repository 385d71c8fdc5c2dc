/* A model as its files describe it: hyper-parameters, where each tensor lies, special ids, and the sources that the
 * tokenizer and the chat template are made from. Reads a GGUF file, or a directory with config.json and safetensors.
 *
 * For: `dunlin serve`, `dunlin show`, weights.h (which packs the tensors for a device) and runner.h (which computes
 * with them). Ownership: dn_model_open() allocates, dn_model_close() frees; every pointer in here belongs to the model
 * or to its mapped files and lives as long. Immutable after dn_model_open(), so any thread may read it.
 *
 * Everything that a file says is checked here: a missing, unknown, wrongly shaped or wrongly typed tensor, an
 * architecture or a rope scaling that the forward pass does not know, is an error that names it. No fallbacks.
 */
#ifndef DN_ENGINE_MODEL_H
#define DN_ENGINE_MODEL_H

#include "base/err.h"
#include "engine/hyper.h"
#include "engine/tensor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum dn_model_source { DN_MODEL_GGUF, DN_MODEL_HF };

/* Places of the tensors of a model. Those before DN_T_ATTN_NORM exist once, the others in each layer. */
enum dn_tensor_role {
    DN_T_EMBED,      /* [n_vocab][dim] */
    DN_T_FINAL_NORM, /* [dim] */
    DN_T_HEAD,       /* [n_vocab][dim], absent when tied */
    DN_T_ROPE_FREQS, /* [rotary_dim / 2], optional: divides the frequencies (GGUF's form of Llama 3.1's scaling) */
    DN_T_ATTN_NORM,  /* [dim] */
    DN_T_Q,          /* [n_heads * head_dim][dim] */
    DN_T_K,          /* [n_kv_heads * head_dim][dim] */
    DN_T_V,
    DN_T_Q_BIAS,
    DN_T_K_BIAS,
    DN_T_V_BIAS,
    DN_T_Q_NORM, /* [head_dim] */
    DN_T_K_NORM,
    DN_T_O,        /* [dim][n_heads * head_dim] */
    DN_T_FFN_NORM, /* [dim] */
    DN_T_GATE,     /* [ff_dim][dim] */
    DN_T_UP,
    DN_T_DOWN,     /* [dim][ff_dim] */
    DN_T_Q_A,      /* [q_lora_dim][dim] */
    DN_T_Q_A_NORM, /* [q_lora_dim] */
    DN_T_Q_B,      /* [n_heads * (nope_dim + rope_dim)][q_lora_dim] */
    DN_T_KV_A,     /* [latent_dim + rope_dim][dim] */
    DN_T_KV_A_NORM,
    DN_T_KV_B,        /* [n_heads * (nope_dim + v_dim)][latent_dim] */
    DN_T_ROUTER,      /* [n_experts][dim] */
    DN_T_ROUTER_BIAS, /* [n_experts], F32 */
    DN_T_SHARED_GATE, /* [shared_ff][dim] */
    DN_T_SHARED_UP,
    DN_T_SHARED_DOWN, /* [dim][shared_ff] */
    DN_T_ROLES,
    DN_T_LAYER_ROLES = DN_T_ROLES - DN_T_ATTN_NORM
};

/* A matrix as a checkpoint has it. By the type of `values`: F8_E4M3 with F32 scales of blocks of 128 x 128; I32, words
 * of 8 nibbles (lowest first, value + 8) with BF16 scales of groups of 32; anything else has no `scale`. */
struct dn_linear {
    const struct dn_tensor *values, *scale;
    uint64_t n_out, n_in;
};
enum dn_expert_part { DN_EXPERT_GATE, DN_EXPERT_UP, DN_EXPERT_DOWN, DN_EXPERT_PARTS };

struct dn_model {
    char *path;
    char *name;      /* the last part of the path without .gguf: what clients call it unless configured */
    char *title;     /* general.name of a GGUF file, else the same */
    char *type_text; /* "GGUF Q4_1", "safetensors BF16": the type of most weights, for the receipt */
    enum dn_model_source source;
    struct dn_hyper hyper;
    uint64_t n_params;
    uint64_t file_bytes; /* of tensor data */
    size_t n_ignored; /* tensors that are known to be of no use here: rotary tables, the copy of a tied head, vision */
    char *note;       /* NULL, or a sentence about what the files have and we do not use: the receipt prints it */

    int32_t
        eos_id[DN_MODEL_MAX_EOS]; /* union of everything that the files call end of text or turn; ends a generation */
    size_t n_eos;
    int32_t bos_id; /* -1: none */
    bool add_bos;   /* the files ask for bos in front of a plain prompt */

    /* Tokenizer: of a GGUF file its metadata (gguf), else one of these paths is set. */
    struct dn_gguf *gguf;     /* NULL for a directory */
    char *tokenizer_json;     /* path or NULL */
    char *tokenizer_tiktoken; /* path of tiktoken.model or NULL */
    char *tokenizer_config;   /* path of tokenizer_config.json or NULL */

    char *chat_template; /* NUL-terminated Jinja text or NULL */
    size_t chat_template_len;
    const char *chat_template_from; /* "tokenizer.chat_template", "chat_template.jinja", ... or NULL; static */

    /* Internal to model*.c and weights.c: use dn_model_tensor(). */
    struct dn_safetensors *safetensors;
    struct dn_synthetic *synthetic; /* of a model without files (synthetic.h), which owns the tensors then */
    const char *prefix;             /* of the names of all tensors that are used: "" or "language_model." */
    uint32_t n_extra_layers;        /* multi-token prediction layers behind the last one, not used */
    struct dn_linear global[DN_T_ATTN_NORM];
    struct dn_linear (*layer)[DN_T_LAYER_ROLES];  /* [n_layers] */
    struct dn_linear (**expert)[DN_EXPERT_PARTS]; /* [n_layers][n_experts]; NULL in dense layers */
};

/* Opens a .gguf file or a directory. Errors: DN_MODEL_FILE, DN_IO; the text begins with the path. */
int dn_model_open(const char *path, struct dn_model **out, struct dn_err *err);
void dn_model_close(struct dn_model *m);

/* The tensor of a role, NULL if the model has none; layer is ignored for roles that exist once. */
const struct dn_tensor *dn_model_tensor(const struct dn_model *m, enum dn_tensor_role role, uint32_t layer);

/* The same with scales; a matrix of an expert. */
struct dn_linear dn_model_linear(const struct dn_model *m, enum dn_tensor_role role, uint32_t layer);
struct dn_linear dn_model_expert(const struct dn_model *m, uint32_t layer, uint32_t expert, enum dn_expert_part part);

/* Bytes that one token takes in the KV cache, without page rounding: bf16 and fp8 (with its scales). */
uint64_t dn_model_kv_bytes(const struct dn_model *m, bool fp8);

/* The model's tokenizer, which the caller closes; the model need not outlive it. None of its ids is n_vocab or above.
 * Errors begin with the path. */
struct dn_tokenizer;
int dn_model_open_tokenizer(const struct dn_model *m, struct dn_tokenizer **out, struct dn_err *err);

/* Inverse rope frequencies [rotary_dim / 2], scaling included. */
void dn_model_rope_freqs(const struct dn_model *m, double *inv_freq);

#endif
