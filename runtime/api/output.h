/* The answer of one request: tokens in, OpenAI's JSON or server-sent events out.
 *
 * Detokenizes step by step (a UTF-8 character is never split), holds text back while it might become a stop string,
 * keeps log-probabilities beside the text they belong to. Streamed and whole answers are made of the same pieces, so
 * they agree to the byte.
 *
 * Belongs to its call; one thread at a time.
 */
#ifndef DN_API_OUTPUT_H
#define DN_API_OUTPUT_H

#include "api/node.h"
#include "api/params.h"
#include "engine/detokenizer.h"
#include "engine/stop.h"

struct dn_output {
    const struct dn_node *node;
    const struct dn_params *params;
    const struct dn_tokens *prompt;
    char id[64]; /* "chatcmpl-..." or "cmpl-..." */
    uint64_t created;
    struct dn_detok detok;
    struct dn_stop *stop;
    struct dn_buf text; /* all that the client gets, an echoed prompt included */
    size_t sent;        /* bytes of it that left in chunks */
    size_t chars;       /* code points of the tokens so far, for text_offset */
    /* Log-probabilities not sent yet, as JSON list items without brackets: of chat the entries of `content`, of
     * completions four lists side by side. */
    struct dn_buf lp_content, lp_values, lp_top, lp_offsets;
    uint32_t n_output, n_cached;
    bool role_sent, done;
    const char *finish_reason; /* NULL until done */
};

void dn_output_init(struct dn_output *o, const struct dn_node *node, const struct dn_params *params,
                    const struct dn_tokens *prompt, const char *request_id, uint64_t created);
void dn_output_release(struct dn_output *o);

/* Takes an event (STARTED, PROMPT, TOKEN or DONE); detail may be NULL. Returns true when a stop string has ended the
 * answer: the scheduler must be told to cancel. Nothing more may be fed once o->done. */
bool dn_output_event(struct dn_output *o, const struct dn_event *e, const struct dn_sampled *detail);

/* Streams: appends the SSE events for what is new; after o->done also the last chunk, usage if wanted, and [DONE]. */
void dn_output_stream(struct dn_output *o, struct dn_buf *sse);
/* Whole answers: the JSON body; only when done. */
void dn_output_body(struct dn_output *o, struct dn_buf *body);

#endif
