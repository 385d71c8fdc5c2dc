/* The batch of one step: fills the device's step arrays from the sequences that take part.
 *
 * Used by the scheduler on its thread: begin, add each sequence once, then dn_pool_start(). A sequence that is added
 * has its pages for n_computed + n_tokens already.
 *
 * Page tables stay in the arrays from step to step, each at a place of its slot's, whatever steps the sequence takes
 * part in: while a sequence has a slot its table only grows, and what was added is all that is written. Who changes
 * anything else of a table, or gives the slot to another sequence, says so by dn_batch_leave() first.
 */
#ifndef DN_SCHED_BATCH_H
#define DN_SCHED_BATCH_H

#include "sched/sequence.h"

/* The first n pages of a sequence's table are at `start` of the step's page[] and tag[], where cap of them have room.
 */
struct dn_batch_pages {
    const struct dn_seq *seq;
    uint32_t start, cap, n;
};

struct dn_batch {
    struct dn_pool *pool;
    struct dn_step *step;
    uint32_t n_seqs;
    struct dn_seq **seq;            /* [max_sequences]; index = the step's sequence index */
    struct dn_batch_pages *pages;   /* [max_sequences], by slot */
    uint32_t pages_end, pages_live; /* where the last table's place ends; how long all places are together */
};

void dn_batch_init(struct dn_batch *b, struct dn_pool *pool);
void dn_batch_release(struct dn_batch *b);
/* The slot's sequence has left it, or its table has changed: none of it counts as written. Between steps. */
void dn_batch_leave(struct dn_batch *b, int32_t slot);
void dn_batch_begin(struct dn_batch *b);
uint32_t dn_batch_tokens_left(const struct dn_batch *b);
uint32_t dn_batch_rows_left(const struct dn_batch *b);
/* The next n_tokens of the sequence; rows as needed: one to sample if these are its last tokens, one for each prompt
 * token whose log-probability is wanted and not sent yet. */
void dn_batch_add(struct dn_batch *b, struct dn_seq *s, uint32_t n_tokens);

#endif
