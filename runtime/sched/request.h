/* What the API hands to the scheduler, and what comes back.
 *
 * A request crosses threads by value: the API fills a struct dn_request, dn_sched_submit() takes it over. Afterwards it
 * is named by {loop, slot, generation} only; the slot belongs to the event loop that made it, and a generation is never
 * used twice, so an event for a request that is gone finds nobody and is dropped.
 */
#ifndef DN_SCHED_REQUEST_H
#define DN_SCHED_REQUEST_H

#include "kernels/kernels.h"

enum { DN_MAX_STOP_IDS = 8, DN_SALT_BYTES = 32, DN_REQUEST_NAME = 48 };

struct dn_request_id {
    uint32_t loop, slot;
    uint64_t generation;
};

struct dn_request {
    struct dn_request_id id;
    char name[DN_REQUEST_NAME]; /* x-request-id, for logs */
    int32_t *prompt;            /* owned by the request, malloc */
    uint32_t n_prompt;          /* >= 1, ids checked against the vocabulary */
    uint32_t max_tokens;        /* prompt + max_tokens <= context; 0 only with prompt_logprobs */
    uint32_t min_tokens;
    bool ignore_eos;
    bool prompt_logprobs; /* an event for each prompt token; no cached prefix is used then */
    uint32_t n_stop;
    int32_t stop[DN_MAX_STOP_IDS]; /* besides the model's own; model's + these <= DN_MAX_BAN */
    struct dn_sample sample;       /* temperature .. n_top and seed; the rest is the scheduler's */
    enum dn_kv_format kv;
    bool check;   /* integrity "tag" */
    int priority; /* 0..100, higher first */
    uint8_t salt[DN_SALT_BYTES];
    uint32_t n_salt;
    bool cache_read, cache_write;
    uint64_t arrival_ns, queue_deadline_ns; /* of dn_now_ns() */
};
void dn_request_free(struct dn_request *r);

enum dn_event_kind {
    DN_EVENT_STARTED, /* left the queue: n = cached tokens */
    DN_EVENT_PROMPT,  /* prompt token n (from 1 on): token, logprob, detail */
    DN_EVENT_TOKEN,   /* output token n: token, logprob, detail; hidden if it is a stop id */
    DN_EVENT_DONE,    /* finish; the last event of a request */
    DN_EVENT_ERROR    /* code; the last event of a request */
};

enum dn_finish { DN_FINISH_STOP, DN_FINISH_LENGTH };

struct dn_event {
    struct dn_request_id id;
    uint8_t kind, finish;
    bool hidden;
    int code; /* enum dn_code */
    int32_t token;
    float logprob;  /* NaN when none was asked for */
    int32_t detail; /* index into the batch's detail[], -1 = none */
    uint32_t n;
    uint64_t at_ns; /* STARTED: when it left the queue */
};

/* All events of one step for one event loop, oldest first. The receiver frees it. */
struct dn_event_batch {
    uint32_t n_events, cap_events, n_details, cap_details;
    struct dn_event *event;
    struct dn_sampled *detail;
    uint64_t step_ns; /* when the step's results were there */
};
void dn_event_batch_free(struct dn_event_batch *b);

/* Where batches go: called on the scheduler's thread, about once a step and loop; must not block. */
struct dn_sink {
    void (*deliver)(void *user, uint32_t loop, struct dn_event_batch *batch);
    void *user;
    uint32_t n_loops;
};

#endif
