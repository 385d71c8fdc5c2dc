/* What policies see: a request, the node, a result, as flat borrowed views.
 *
 * The api layer fills them; the policy layer copies what it needs into Lua before the hook runs and keeps no pointer.
 * Strings are terminated UTF-8, NULL where absent (nil in Lua). Nothing here is prompt text, and tenant, key_id and
 * labels come from the credential alone, never from the body.
 */
#ifndef DN_POLICY_VIEW_H
#define DN_POLICY_VIEW_H

#include "policy/decision.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DN_VIEW_PAIRS_MAX  64 /* of labels, headers, metadata each; more are not shown */
#define DN_VIEW_MODELS_MAX 64
#define DN_VIEW_POOLS_MAX  32

struct dn_view_pair {
    const char *name;
    const char *value; /* NULL: the boolean true (a bare label); headers are cut at 1 KiB */
};

struct dn_request_view {
    const char *id, *endpoint; /* "chat.completions", "completions" */
    const char *model, *requested_model;
    const char *tenant, *key_id; /* NULL without keys */
    const char *client_ip, *user, *prompt_cache_key, *response_format;
    const struct dn_view_pair *label, *header, *metadata; /* header: only those that the configuration lists */
    size_t n_labels, n_headers, n_metadata;
    bool stream;
    int n; /* choices */
    int n_tools;
    int64_t max_tokens; /* -1: not given */
    double temperature; /* negative: not given */
    uint64_t prompt_bytes;
    int64_t prompt_tokens;                     /* -1: not known yet (admit) */
    int64_t cached_tokens[DN_DECIDE_KV_COUNT]; /* longest reusable prefix by KV format; 0 in admit */
    const char *wish_kv, *wish_integrity;      /* `dunlin: {kv, integrity}` of the body, as the client wrote it */
};

struct dn_pool_view {
    const char *name, *role; /* role: "prefill" "decode" "both" */
    int64_t running, waiting;
    double kv_free_ratio;
    bool is_healthy;
    bool has_weights[DN_DECIDE_W_COUNT];
};

struct dn_model_view {
    const char *name;
    int64_t context_tokens;
    bool has_weights[DN_DECIDE_W_COUNT]; /* loaded */
    bool has_kv[DN_DECIDE_KV_COUNT];     /* supported by its kernels */
};

/* A snapshot, at most one step old. `version` changes whenever anything in it does: a VM builds its tables again only
 * then, so an unchanged snapshot costs nothing. 0: always build. */
struct dn_node_view {
    uint64_t version;
    int hour, minute, wday; /* local time; wday 1 is Sunday */
    int64_t kv_pages_total, kv_pages_free;
    double kv_free_ratio; /* 0..1 */
    int64_t queue_waiting, queue_oldest_ms, running;
    const struct dn_pool_view *pool;
    size_t n_pools;
    const struct dn_model_view *model;
    size_t n_models;
};

/* For finish: what became of an admitted request. */
struct dn_result_view {
    int status;       /* HTTP status; 499: the client went away */
    const char *code; /* error code, NULL if there was none */
    const char *finish_reason;
    int64_t prompt_tokens, cached_tokens, completion_tokens;
    double queue_ms, ttft_ms, total_ms;
    const char *model, *pool, *weights, *kv_dtype, *integrity; /* in effect */
};

#endif
