/* One step: what changes from step to step, how its rows are sampled, and its results (kernels.h, which includes this,
 * says how a step runs).
 *
 * The arrays belong to the device. Between steps the pool's thread fills them; between step_begin() and step_wait()
 * they are the device's.
 */
#ifndef DN_KERNELS_STEP_H
#define DN_KERNELS_STEP_H

#include <stdint.h>

/* ---- Sampling --------------------------------------------------------------------------------------------------- */

enum { DN_MAX_TOP = 20, DN_MAX_BAN = 16 };

/* One row to sample. Reported log-probabilities are of the raw logits (before penalties and temperature). Order:
 * penalties, bans, temperature, top_k, top_p, min_p; drawn by inverse CDF with a counter-based generator of (seed,
 * counter). */
struct dn_sample {
    float temperature; /* 0 = greedy (lowest id on ties) */
    float top_p, min_p;
    int32_t top_k;                         /* <= 0: all */
    float repetition, frequency, presence; /* 1, 0, 0 = off; need `slot` */
    int32_t slot;                          /* row of the token counts, -1 = none */
    int32_t target; /* >= 0: do not sample, report the log-probability of this id (prompt log-probabilities) */
    int32_t n_top;  /* alternatives to report, 0..DN_MAX_TOP; -1 = no log-probability at all */
    int32_t n_ban;  /* ids that must not be drawn (min_tokens) */
    int32_t ban[DN_MAX_BAN];
    uint64_t seed, counter; /* counter = index of the output token in its sequence */
};

struct dn_sampled {
    int32_t id; /* -1: the row's logits were not finite, or its sequence failed the tag check */
    float logprob;
    int32_t n_top;
    int32_t top_id[DN_MAX_TOP];
    float top_logprob[DN_MAX_TOP];
};

/* ---- One step --------------------------------------------------------------------------------------------------- */

/* Capacities of a step, fixed when the device is opened. */
struct dn_step_limits {
    uint32_t tokens, seqs, rows, pages; /* pages: of all sequences of a step together */
    uint32_t tags;                      /* changed tags that travel with a step */
    uint32_t seq_pages;                 /* of one sequence; 0: as many as all together */
};

enum dn_step_kind {
    DN_STEP_PREFILL, /* chunks of prompts, or anything at all if the backend does not split steps */
    DN_STEP_DECODE,  /* one generated token of each sequence: n_tokens == n_seqs, token i is of sequence i */
};

/* Everything that changes from step to step. Host arrays, owned by the device (step_arrays()), filled by the
 * scheduler's batch builder, uploaded by step_begin(). Sequences occupy consecutive tokens. */
struct dn_step {
    enum dn_step_kind kind;
    uint32_t n_tokens, n_seqs, n_rows;
    uint32_t tag_first, n_tags; /* check_tags() first sets table[tag_first + i] = tag_new[i], i < n_tags */
    uint64_t *tag_new;          /* [limits.tags] */
    int32_t *token_id;          /* [n_tokens] */
    int32_t *position;          /* [n_tokens] */
    int32_t *token_seq;         /* [n_tokens] index of the sequence */
    uint8_t *token_count; /* [n_tokens] 1: count this id as output in the sequence's slot before sampling (penalties) */
    int32_t *token_start; /* [n_seqs + 1] */
    int32_t *kv_len;      /* [n_seqs] tokens in the cache after this step's writes */
    int32_t *slot;        /* [n_seqs] row of the token counts, -1 = none */
    uint8_t *kv_format;   /* [n_seqs] enum dn_kv_format */
    uint8_t *check;       /* [n_seqs] 1: compare tags */
    int32_t *page_start;  /* [n_seqs] where a sequence's table begins in page[] and tag[]; they lie in any order, and
                           * limits.seqs + 1 numbers have room, for those who put one behind the other */
    uint32_t *page;       /* page ids in token order: token t lies in page[page_start[s] + t / page_tokens]; pages
                           * behind that of token kv_len - 1 are not looked at. Kept from step to step, as is tag[] */
    uint64_t *tag;        /* the tag that each page must have */
    int32_t *row_token;   /* [n_rows] token index whose hidden state gives the logits */
    struct dn_sample *sample; /* [n_rows] */
    /* Results, valid after step_wait(). */
    int32_t *bad;              /* [n_seqs] 0 = fine, else 1 + index of the first wrong page within the sequence */
    struct dn_sampled *result; /* [n_rows] */
};

#endif
