/* The batch of one step: fills the device's step arrays from the sequences that take part.
 *
 * Used by the scheduler on its thread: begin, add each sequence once, then dn_pool_step(). A sequence that is added has
 * its pages for n_computed + n_tokens already.
 */
#ifndef DN_SCHED_BATCH_H
#define DN_SCHED_BATCH_H

#include "sched/sequence.h"

struct dn_batch {
    struct dn_pool *pool;
    struct dn_step *step;
    uint32_t n_seqs;
    struct dn_seq **seq; /* [max_sequences]; index = the step's sequence index */
};

void dn_batch_begin(struct dn_batch *b);
uint32_t dn_batch_tokens_left(const struct dn_batch *b);
uint32_t dn_batch_rows_left(const struct dn_batch *b);
/* The next n_tokens of the sequence; rows as needed: one to sample if these are its last tokens, one for each prompt
 * token whose log-probability is wanted and not sent yet. */
void dn_batch_add(struct dn_batch *b, struct dn_seq *s, uint32_t n_tokens);

#endif
