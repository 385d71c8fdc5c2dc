/* A call: one generation request from its HTTP request to its last byte. Lives in a slot of its loop.
 *
 *   parse (worker if large) -> authenticate, model -> admit (policy) -> encode (worker) -> route (policy) -> submitted
 *     -> events -> done
 *
 * The call outlives whichever goes first, the HTTP request or the worker's job; it is freed when both are over. Once it
 * was admitted, the policies' finish hook, the log line and the metrics come exactly once, whatever ended it.
 */
#ifndef DN_API_CALL_H
#define DN_API_CALL_H

#include "api/loop.h"
#include "api/output.h"

struct dn_call {
    struct dn_job job; /* first; one at a time */
    struct dn_exchange exchange;
    struct dn_api_loop *loop;
    struct dn_http_req *http; /* NULL: the client is gone or has its answer */
    struct dn_request_id id;
    char name[DN_REQUEST_NAME]; /* x-request-id */
    enum dn_endpoint endpoint;
    const struct dn_key *key; /* NULL without keys */
    bool is_large;            /* the body: what is made of it is worked on by a worker */
    bool on_worker, has_params, admitted, submitted, finished, streaming, paused;
    int status;                                            /* of the answer, for the log */
    const char *error_code;                                /* NULL: none */
    char reject_code[sizeof((struct dn_reject *)0)->code]; /* a policy's own */

    struct dn_buf body; /* copy of the request's body while a worker has it */
    struct dn_params params;
    struct dn_tokens prompt;
    uint32_t cached_tokens[DN_KV_FORMATS]; /* of the prompt, probably; for the route hook */
    struct dn_err err;                     /* of the worker's job */
    struct dn_decision decision;
    struct dn_policy_trace trace;
    struct dn_output output;
    bool has_output;
    struct dn_buf unsent; /* of a stream: what the client has no room for yet */
    enum dn_kv_format kv;
    bool check;
    uint32_t max_tokens;
    uint64_t arrival_ns, started_ns, first_token_ns, last_write_ns;
};

/* Begins a call for a POST to a generation endpoint. Answers by itself from then on. */
void dn_call_begin(struct dn_api_loop *loop, struct dn_http_req *req, enum dn_endpoint endpoint);
void dn_call_tick(struct dn_call *c, uint64_t now_ns); /* keeps quiet streams alive */
/* An event of the scheduler. Text goes out with dn_call_flush(), once a batch. */
void dn_call_event(struct dn_call *c, const struct dn_event *e, const struct dn_sampled *detail, uint64_t step_ns);
void dn_call_flush(struct dn_call *c);

#endif
