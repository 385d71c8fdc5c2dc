/* Formats of weights and of the KV cache, and how matrices and pages are described across the boundary (kernels.h,
 * which includes this).
 *
 * Plain data: a matrix's memory belongs to whoever allocated it on the device, a layout to whoever made it. No state;
 * any thread.
 */
#ifndef DN_KERNELS_FORMATS_H
#define DN_KERNELS_FORMATS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum dn_weight_format {
    DN_W_BF16, /* bf16 values */
    DN_W_FP8,  /* e4m3, one f32 scale a 128x128 block: w = q * scale (DeepSeek-V3, arXiv 2412.19437) */
    DN_W_INT8, /* int8, groups of 32 along the input: w = q * scale (GGUF Q8_0) */
    DN_W_INT4, /* nibbles 0..15, groups of 32 along the input: w = q * scale + offset, or (q - 8) * scale if symmetric
                */
    DN_W_FORMATS
};

enum dn_kv_format {
    DN_KV_BF16,
    /* e4m3, saturating, one f32 scale a token and KV head: largest |x| / 448, 0 if all are (nearly) 0, NaN if any is
     * NaN. Finer scales don't pay: on SmolLM2-135M with wikitext the attention output is off by 4.6 % (RMS), with a
     * scale for every 32 values by 4.4 %, at 6 % more bytes; what limits it is the 3 bits of fraction. BF16: 0.35 %. */
    DN_KV_FP8,
    DN_KV_FORMATS
};
const char *dn_weight_format_name(enum dn_weight_format f); /* "bf16" "fp8" "int8" "int4": policies, config, metrics */
const char *dn_kv_format_name(enum dn_kv_format f);         /* "bf16" "fp8_e4m3" */
int dn_weight_format_parse(const char *name, enum dn_weight_format *out);
int dn_kv_format_parse(const char *name, enum dn_kv_format *out); /* also "fp8" */

/* ---- Weights ---------------------------------------------------------------------------------------------------- */

/* A weight matrix [n_out][n_in] in the backend's own packed layout; y = x * W^T. Or n_groups of them one after the
 * other (the experts of a layer, the heads of a projection): then n_out is that of one, all rows count as n_groups *
 * n_out for matrix_pack(), and n_out is a multiple of 64 (of 128 in FP8). */
struct dn_matrix {
    enum dn_weight_format format;
    uint32_t n_out, n_in;
    uint32_t n_groups;  /* 0 and 1: a single matrix */
    bool symmetric;     /* INT4 only: no offsets stored */
    bool scale_is_bf16; /* INT4, INT8: type of the 16-bit scales and offsets, else f16 */
    void *data;         /* device, dn_kernels.matrix_bytes() long */
    size_t bytes;
};

/* Some rows of a matrix as the engine read them from a checkpoint. Exactly one group of pointers is set. Packing into
 * the same family (INT4 <- q4, INT8 <- q8, FP8 <- fp8, BF16 <- bf16) is lossless; anything else goes through f32. */
struct dn_rows {
    const float *f32;         /* [n][n_in] */
    const uint16_t *bf16;     /* [n][n_in] */
    const uint8_t *q4;        /* [n][n_in/2]: column 2b in the low nibble of byte b, 2b+1 in the high one */
    const int8_t *q8;         /* [n][n_in] */
    const uint16_t *scale16;  /* [n][n_in/32], f16 or bf16 as the matrix says; q4 and q8 */
    const uint16_t *offset16; /* [n][n_in/32]; q4 without `symmetric` */
    const uint8_t *fp8;       /* [n][n_in] e4m3 */
    const float *block_scale; /* [ceil(n/128)][ceil(n_in/128)]; fp8; row0 must be a multiple of 128 */
};

/* ---- KV pages --------------------------------------------------------------------------------------------------- */

/* A page holds page_tokens tokens of all layers of one sequence. Page ids are dense over slabs:
 *   address = arena + (id / slab_pages) * slab_bytes + (id % slab_pages) * format[f].page_bytes
 * A slab is of one format at a time; slab_pages is the number of pages of the smallest format, so larger formats leave
 * ids unused. Within a page: [layer]. Within a layer the bytes are the backend's own affair, of the sizes given here:
 *   GQA: K then V, each n_kv_heads * page_tokens * head_dim values, then (FP8) the f32 scales of K, then those of V,
 * one a token and head. The CPU: each [kv_head][token][dim], scales [kv_head][token]. MLA (DeepSeek-V2, arXiv
 * 2405.04434): the latent vectors, page_tokens * latent_dim values, then the rotated rope keys, page_tokens * rope_dim
 * values, always bf16, then (FP8) the f32 scales of the latents, one a token. BF16: both in bf16. The CPU: [token][dim]
 * each. A backend may keep a BF16 token's latent and rope key together. */
struct dn_kv_layout {
    uint32_t n_layers, n_kv_heads, head_dim, page_tokens;
    uint32_t latent_dim, rope_dim; /* MLA, else 0; then n_kv_heads is 1 and head_dim the sum of both */
    uint32_t slab_pages;
    uint64_t slab_bytes;
    struct {
        uint32_t page_bytes, layer_bytes;
        uint32_t v_offset, k_scale_offset,
            v_scale_offset; /* within a layer; MLA: rope keys, scales of latents, unused */
        uint32_t pages_per_slab;
    } format[DN_KV_FORMATS];
};
enum { DN_PAGE_TOKENS_STEP = 16 }; /* page_tokens is a multiple: kernels read 16 tokens of a page at a time */
/* Fills the derived fields from the first four; slab_pages is chosen near `slab_target_bytes`. -DN_INVALID_VALUE if a
 * size is 0, page_tokens is no multiple of the step, or a page would have 4 GiB or more. */
int dn_kv_layout_init(struct dn_kv_layout *l, uint32_t n_layers, uint32_t n_kv_heads, uint32_t head_dim,
                      uint32_t page_tokens, uint64_t slab_target_bytes);
int dn_kv_layout_init_mla(struct dn_kv_layout *l, uint32_t n_layers, uint32_t latent_dim, uint32_t rope_dim,
                          uint32_t page_tokens, uint64_t slab_target_bytes);
/* From the arena's start. An id that the format leaves unused is a bug. */
uint64_t dn_kv_page_offset(const struct dn_kv_layout *l, enum dn_kv_format f, uint32_t page);

#endif
