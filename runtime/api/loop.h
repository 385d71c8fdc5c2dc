/* What one event loop has of the API: its policy VM and its calls by slot. Its thread alone touches it. */
#ifndef DN_API_LOOP_H
#define DN_API_LOOP_H

#include "api/node.h"

struct dn_call;

/* What stands behind an HTTP request that is not answered at once: its dn_http_user(). */
struct dn_exchange {
    void (*gone)(struct dn_exchange *x);   /* the request is over, whatever ended it; exactly once */
    void (*resume)(struct dn_exchange *x); /* the client reads again; may be NULL */
};

struct dn_api_loop {
    struct dn_node *node;
    struct dn_loop *loop;
    uint32_t idx;
    struct dn_policy_vm *policy;
    struct dn_call **call; /* by slot; NULL = free */
    uint32_t n_slots, first_free_hint, n_calls;
    uint64_t next_generation;
    struct dn_node_view view; /* what policies see of the node, refreshed from the scheduler's snapshot */
    struct dn_pool_view pool_view;
    struct dn_model_view model_view;
};

/* Refreshes and returns the view of the node. */
const struct dn_node_view *dn_api_loop_view(struct dn_api_loop *l);

/* What every POST must have: a known key (*key; NULL where none are asked for), a JSON content type, a node that is
 * ready. */
int dn_api_check_request(const struct dn_node *node, const struct dn_http_req *req, const struct dn_key **key,
                         struct dn_err *err);

#endif
