/* Causal attention over paged KV, the part that depends on the instruction set (attention_body.inc.h), and its pieces.
 *
 * Unit of work: some consecutive tokens of one sequence with the `group` query heads that share one KV head: rows of
 * queries, row = token * group + head. Positions are cut into splits of DN_ATTN_SPLIT, these into tiles of
 * DN_ATTN_TILE, both counted from position 0, never from where a chunk begins. A row's softmax runs over the tiles of
 * a split in order (running maximum, sum and output), and its splits are merged in order. So a row gets the same
 * operations in the same order, hence the same bits, alone or in any chunk, batch or number of threads; a decode step
 * may compute the splits of one row on several threads. Positions behind the row's own never enter, not even times 0.
 *
 * Scratch belongs to the caller; no state; any thread.
 */
#ifndef DN_KERNELS_CPU_ATTENTION_H
#define DN_KERNELS_CPU_ATTENTION_H

#include "kernels/cpu/isa.h"
#include "kernels/kernels.h"

enum { DN_ATTN_TILE = 64, DN_ATTN_SPLIT = 256, DN_ATTN_PAD = 16 };

/* Running softmax of some rows: out = o / sum once all positions are in. */
struct dn_attn_state {
    float *max, *sum; /* [rows] */
    float *o;         /* [rows][padded head_dim] */
};

struct dn_attn_work {
    const float *q;                /* [n_tokens * group][head_dim] */
    uint32_t n_tokens;             /* >= 1 */
    uint32_t group;                /* query heads that share the KV head */
    uint32_t head_dim, padded_dim; /* padded to a multiple of DN_ATTN_PAD */
    uint32_t position;             /* of the first token */
    float scale;
    const struct dn_kv_layout *layout;
    enum dn_kv_format format;
    uint32_t layer, kv_head;
    const uint8_t *arena;
    const uint32_t *page; /* the sequence's pages, those up to the last token's position valid */
    /* Scratch */
    float *kt;    /* [head_dim][DN_ATTN_TILE] keys of a tile, transposed */
    float *v;     /* [DN_ATTN_TILE][padded_dim] values of a tile */
    float *s;     /* [n_tokens * group][DN_ATTN_TILE] scores, then weights */
    float *alpha; /* [n_tokens * group] */
};

struct dn_attn_ops {
    /* The state over positions [begin, begin + DN_ATTN_SPLIT), begin a multiple of it and <= the last token's position.
     * Rows of tokens before `begin` see none of it: their state is not written. */
    void (*split)(const struct dn_attn_work *w, uint32_t begin, struct dn_attn_state *out);

    /* total = total and the later split `part`, rows [row0, n_rows) */
    void (*merge)(struct dn_attn_state *total, const struct dn_attn_state *part, uint32_t row0, uint32_t n_rows,
                  uint32_t padded_dim);

    /* out[row][head_dim] = o / sum of row `row` */
    void (*finish)(const struct dn_attn_state *total, uint32_t row, uint32_t head_dim, uint32_t padded_dim, float *out);
};

extern const struct dn_attn_ops dn_attn_ops_portable;
extern const struct dn_attn_ops dn_attn_ops_avx2, dn_attn_ops_avx512;

const struct dn_attn_ops *dn_attn_ops(enum dn_isa isa);

#endif
