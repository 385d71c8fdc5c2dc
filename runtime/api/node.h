/* The node: everything that main() has built and that the API's handlers use. One value, handed down; no globals.
 *
 * Built and torn down by cli/serve.c on the main thread. Handlers read it from every loop: what changes while the node
 * serves is atomic (state, progress), or has its own rules (policy, sched, metrics, http).
 */
#ifndef DN_API_NODE_H
#define DN_API_NODE_H

#include "api/auth.h"
#include "api/worker.h"
#include "base/metrics.h"
#include "engine/tokenizer.h"
#include "http/http.h"
#include "policy/policy.h"
#include "sched/sched.h"

#include <stdatomic.h>

enum dn_node_state { DN_NODE_LOADING, DN_NODE_READY, DN_NODE_DRAINING };
enum dn_cache_share { DN_SHARE_TENANT, DN_SHARE_ALL, DN_SHARE_NONE };

struct dn_api_conf {
    bool strict;         /* unknown parameters are a 400 */
    bool expose;         /* x-dunlin-* headers tell what a request got and by which policy */
    bool public_metrics; /* /metrics needs no key */
    enum dn_cache_share share;
    enum dn_kv_format kv; /* when no policy says otherwise */
    bool check;           /* integrity "tag", likewise */
    uint32_t queue_timeout_ms;
    const char *const *policy_header; /* lower-case names of headers that policies see */
    size_t n_policy_headers;
};

struct dn_node {
    struct dn_api_conf api;
    const char *model_name; /* what clients call it */
    uint64_t start_wall_s;
    const struct dn_model *model;
    struct dn_tokenizer *tokenizer;
    struct dn_template *chat_template; /* NULL: the model has none; chat is a 400 */
    struct dn_pool *pool;
    struct dn_sched *sched;
    struct dn_workers *workers;
    struct dn_policy *policy;
    const struct dn_keys *keys; /* n = 0: no key is asked for */
    struct dn_metrics *metrics;
    struct dn_api_stats *stats;
    struct dn_http *http;
    struct dn_api_loop **loop; /* [n_loops], each set by its own thread before it serves */
    uint32_t n_loops;
    atomic_int state;                       /* enum dn_node_state */
    _Atomic uint64_t load_done, load_total; /* bytes, while loading */
};

#endif
