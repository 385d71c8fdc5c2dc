/* Causal attention over paged KV, the part that depends on the instruction set (attention_body.inc.h), and its pieces.
 *
 * Unit of work: some consecutive tokens of one sequence with the `group` query heads that share one KV head: rows of
 * queries, row = token * group + head. Positions are cut into splits of DN_ATTN_SPLIT, these into tiles of
 * DN_ATTN_TILE, both counted from position 0, never from where a chunk begins. A row's softmax runs over the tiles of
 * a split in order (running maximum, sum and output), and its splits are merged in order. So a row gets the same
 * operations in the same order, hence the same bits, alone or in any chunk, batch or number of threads; a decode step
 * may compute the splits of one row on several threads. Positions behind the row's own never enter, not even times 0.
 *
 * Multi-head latent attention is the same twice over: absorbed, one KV head whose keys are [latent | rope key] and
 * whose values are the latents; un-absorbed, keys and values of one head that the caller has expanded from the latents.
 *
 * Scratch belongs to the caller; no state; any thread.
 */
#ifndef DN_KERNELS_CPU_ATTENTION_H
#define DN_KERNELS_CPU_ATTENTION_H

#include "kernels/cpu/isa.h"
#include "kernels/kernels.h"

enum {
    DN_ATTN_TILE = 64,
    DN_ATTN_SPLIT = 256,
    DN_ATTN_PAD = 16,
    DN_ATTN_KEYS = 128, /* values of keys at a time; of longer ones half as many, which leave room in the L1 cache */
    DN_ATTN_ROWS = 96   /* of a unit: enough that loading a tile costs little against using it */
};

/* Running softmax of some rows: out = o / sum once all positions are in. */
struct dn_attn_state {
    float *max, *sum; /* [rows] */
    float *o;         /* [rows][padded_dim] */
};

/* Where keys and values come from. */
enum dn_attn_source {
    DN_ATTN_GQA,      /* both from the pages */
    DN_ATTN_MLA,      /* latents and rope keys from the pages; the latents are the values as well */
    DN_ATTN_EXPANDED, /* f32 keys and values of the caller, rope keys from the pages */
};

struct dn_attn_work {
    enum dn_attn_source source;
    const float *q;                 /* [n_tokens * group][key_dim] */
    uint32_t n_tokens;              /* >= 1 */
    uint32_t group;                 /* query heads that share the KV head */
    uint32_t key_dim;               /* the rope key included */
    uint32_t rope_dim;              /* last values of a key that are a rope key of the pages (MLA, EXPANDED), else 0 */
    uint32_t value_dim, padded_dim; /* padded to a multiple of DN_ATTN_PAD */
    uint32_t position;              /* of the first token */
    float scale;
    const struct dn_kv_layout *layout;
    enum dn_kv_format format;
    uint32_t layer, kv_head;
    const uint8_t *arena;
    const uint32_t *page; /* the sequence's pages, those up to the last token's position valid */
    /* EXPANDED: of position `begin` of the split on, [k_stride], [v_stride]. What lies behind the last position up to a
     * multiple of DN_PAGE_TOKENS_STEP may be read, but is not used. */
    const float *k_row, *v_row;
    size_t k_stride, v_stride;
    /* Scratch */
    float *kt;    /* [DN_ATTN_KEYS][DN_ATTN_TILE] keys of a tile, transposed */
    float *v;     /* [DN_ATTN_TILE][dn_attn_v_stride()] values of a tile */
    float *s;     /* [n_tokens * group][DN_ATTN_TILE] scores, then weights */
    float *alpha; /* [n_tokens * group] */
};

/* Floats from value to value of a tile: a power of two would put all of them on the same few lines of the L1 cache. */
static inline uint32_t dn_attn_v_stride(uint32_t padded_dim)
{
    return padded_dim >= 256 ? padded_dim + 16 : padded_dim;
}

/* Floats of a state of so many rows, and that state in such memory. */
static inline size_t dn_attn_state_floats(uint32_t rows, uint32_t padded_dim)
{
    return (size_t)rows * (padded_dim + 2);
}
static inline struct dn_attn_state dn_attn_state_at(float *at, uint32_t rows, uint32_t padded_dim)
{
    return (struct dn_attn_state){
        .o = at, .max = at + (size_t)rows * padded_dim, .sum = at + (size_t)rows * (padded_dim + 1)};
}

/* Floats of the scratch of a work of so many rows, its queries included, and handing it out to w (whose q is not const
 * here, and whose dimensions are set). Returns the queries' place. */
size_t dn_attn_scratch_floats(const struct dn_attn_work *w, uint32_t rows);
float *dn_attn_scratch(struct dn_attn_work *w, uint32_t rows, float *scratch);

struct dn_attn_ops {
    /* The state over positions [begin, begin + DN_ATTN_SPLIT), begin a multiple of it and <= the last token's position.
     * Rows of tokens before `begin` see none of it: their state is not written. */
    void (*split)(const struct dn_attn_work *w, uint32_t begin, struct dn_attn_state *out);

    /* total = total and the later split `part`, rows [row0, n_rows) */
    void (*merge)(struct dn_attn_state *total, const struct dn_attn_state *part, uint32_t row0, uint32_t n_rows,
                  uint32_t padded_dim);

    /* out[value_dim] = o / sum of row `row` */
    void (*finish)(const struct dn_attn_state *total, uint32_t row, uint32_t value_dim, uint32_t padded_dim,
                   float *out);
};

extern const struct dn_attn_ops dn_attn_ops_portable;
extern const struct dn_attn_ops dn_attn_ops_avx2, dn_attn_ops_avx512;

const struct dn_attn_ops *dn_attn_ops(enum dn_isa isa);

#endif
