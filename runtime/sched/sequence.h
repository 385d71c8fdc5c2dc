/* A sequence: one request while the scheduler has it. Its tokens, its page table, how far it has been computed.
 *
 * Owned by the scheduler and touched by its thread alone. tokens = prompt + output; of these the first n_computed are
 * in the cache; token i lies in page[i / page_tokens]. Pages [0, n_sealed) are full and entered in (or taken from) the
 * prefix index.
 */
#ifndef DN_SCHED_SEQUENCE_H
#define DN_SCHED_SEQUENCE_H

#include "pool/pool.h"
#include "sched/request.h"

struct dn_seq {
    struct dn_seq *next;    /* in the waiting queue */
    struct dn_request *req; /* owned */
    int32_t *token;         /* [n_prompt + max_tokens] */
    uint32_t n_tokens, n_computed;
    uint32_t n_cached; /* tokens that came out of the prefix index at the first start */
    struct dn_page_ref *page;
    uint32_t n_pages, cap_pages, n_sealed;
    struct dn_hash128 root, chain; /* chain: hash of page n_sealed - 1 */
    int32_t slot;                  /* index among the running, and row of the token counts; -1 while waiting */
    bool started, paused, counts;  /* counts: penalties are in use */
    uint32_t n_prompt_reported;    /* prompt log-probabilities sent so far */
    uint64_t order;                /* arrival; smaller first */
    uint64_t start_ns, last_token_ns;
    /* The present step. */
    uint32_t step_tokens, step_rows, first_row;
    int32_t step_idx; /* index in the batch, -1 = not in it */
};

struct dn_seq *dn_seq_open(struct dn_request *req, const struct dn_pool *pool, uint64_t order);
void dn_seq_close(struct dn_seq *s); /* its pages must have been given back */

static inline uint32_t dn_seq_n_output(const struct dn_seq *s)
{
    return s->n_tokens - s->req->n_prompt;
}

/* Takes what the prefix index knows of its tokens, unless it has pages already. */
void dn_seq_attach_prefix(struct dn_seq *s, struct dn_pool *pool);
/* Pages for the first n tokens. -DN_NO_MEMORY: nothing more to be had; what was taken stays. */
int dn_seq_take_pages(struct dn_seq *s, struct dn_pool *pool, uint32_t n_tokens);
/* Enters the pages that are full by now. Only after a step that succeeded. */
void dn_seq_seal(struct dn_seq *s, struct dn_pool *pool);
/* Gives every page back, the last first, so that the front of a prefix outlives its end. Returns how many were refused.
 */
uint32_t dn_seq_give_pages(struct dn_seq *s, struct dn_pool *pool);
/* Forgets what was computed; the tokens stay: it will be computed again. */
void dn_seq_rewind(struct dn_seq *s, struct dn_pool *pool);

/* Whether `a` goes before `b`: priority, then arrival. */
bool dn_seq_before(const struct dn_seq *a, const struct dn_seq *b);

#endif
