#include "policy/host.h"

#include <stdio.h>
#include <string.h>

#define N(array) (sizeof(array) / sizeof *(array))

/* States of a node that policies must be able to look at: quiet, full, one pool down, and a model with little. */
enum { STATES = 4 };

static const struct dn_pool_view pools[STATES][2] = {
    {{.name = "main",
      .role = "both",
      .kv_free_ratio = 0.9,
      .is_healthy = true,
      .has_weights = {true, true, true, true}}},
    {{.name = "main",
      .role = "both",
      .running = 64,
      .waiting = 200,
      .kv_free_ratio = 0,
      .is_healthy = true,
      .has_weights = {true, true, true, true}}},
    {{.name = "main", .role = "prefill", .is_healthy = false, .has_weights = {true}},
     {.name = "decode0", .role = "decode", .kv_free_ratio = 0.2, .is_healthy = true, .has_weights = {true}}},
    {{.name = "main", .role = "both", .kv_free_ratio = 0.5, .is_healthy = true, .has_weights = {true}}},
};
static const struct dn_model_view rich = {
    .name = "smoke", .context_tokens = 131072, .has_weights = {true, true, true, true}, .has_kv = {true, true}};
static const struct dn_model_view poor = {
    .name = "smoke", .context_tokens = 2048, .has_weights = {true}, .has_kv = {true, true}};
static const struct dn_node_view states[STATES] = {
    {.hour = 12,
     .wday = 3,
     .kv_pages_total = 10000,
     .kv_pages_free = 9000,
     .kv_free_ratio = 0.9,
     .pool = pools[0],
     .n_pools = 1,
     .model = &rich,
     .n_models = 1},
    {.hour = 23,
     .minute = 59,
     .wday = 7,
     .kv_pages_total = 10000,
     .queue_waiting = 200,
     .queue_oldest_ms = 60000,
     .running = 64,
     .pool = pools[1],
     .n_pools = 1,
     .model = &rich,
     .n_models = 1},
    {.hour = 0,
     .wday = 1,
     .kv_pages_total = 10000,
     .kv_pages_free = 2000,
     .kv_free_ratio = 0.2,
     .queue_waiting = 5,
     .queue_oldest_ms = 100,
     .running = 8,
     .pool = pools[2],
     .n_pools = 2,
     .model = &rich,
     .n_models = 1},
    {.hour = 6,
     .minute = 30,
     .wday = 2,
     .kv_pages_total = 16,
     .kv_pages_free = 8,
     .kv_free_ratio = 0.5,
     .pool = pools[3],
     .n_pools = 1,
     .model = &poor,
     .n_models = 1},
};

const struct dn_node_view dn_policy_quiet_node = {.version = 0,
                                                  .hour = 12,
                                                  .wday = 3,
                                                  .kv_pages_total = 10000,
                                                  .kv_pages_free = 9000,
                                                  .kv_free_ratio = 0.9,
                                                  .pool = pools[0],
                                                  .n_pools = 1,
                                                  .model = &rich,
                                                  .n_models = 1};

static const struct dn_view_pair labels[] = {{"tier", "free"}, {"tier", "pro"},     {"tier", "gold"},
                                             {"tier", "?"},    {"regulated", NULL}, {"batch", NULL}};
static const struct dn_view_pair metadata[] = {{"session", "s-1"}, {"project", "p"}};
static const struct dn_view_pair headers[] = {{"user-agent", "smoke/1"}};

#define BASE                                                                                                           \
    .id = "req_smoke", .endpoint = "chat.completions", .requested_model = "smoke", .model = "smoke", .n = 1,           \
    .client_ip = "192.0.2.1", .response_format = "text"

/* What is there and what is not, small and large: about the corners of each field. */
static const struct dn_request_view requests[] = {
    {BASE, .max_tokens = -1, .temperature = -1, .prompt_bytes = 1},
    {BASE, .tenant = "t", .key_id = "k", .label = &labels[0], .n_labels = 1, .max_tokens = 256, .temperature = 1,
     .prompt_bytes = 400},
    {BASE, .tenant = "t", .key_id = "k", .label = &labels[1], .n_labels = 1, .max_tokens = 1, .prompt_bytes = 0,
     .stream = true},
    {BASE, .tenant = "u", .key_id = "k2", .label = &labels[2], .n_labels = 1, .max_tokens = 2147483647,
     .temperature = 2, .prompt_bytes = 400000},
    {BASE, .tenant = "u", .key_id = "k2", .label = &labels[3], .n_labels = 3, .max_tokens = 100, .prompt_bytes = 64},
    {BASE, .tenant = "v", .key_id = "k3", .label = &labels[4], .n_labels = 1, .max_tokens = 100, .prompt_bytes = 64,
     .wish_kv = "bf16", .wish_integrity = "tag"},
    {BASE, .tenant = "v", .max_tokens = 100, .prompt_bytes = 64, .wish_kv = "fp8_e4m3", .wish_integrity = "off"},
    {BASE, .tenant = "v", .max_tokens = 100, .prompt_bytes = 64, .wish_kv = "fp4", .wish_integrity = "full"},
    {BASE, .user = "someone", .metadata = metadata, .n_metadata = 2, .header = headers, .n_headers = 1,
     .prompt_cache_key = "c", .max_tokens = 64, .prompt_bytes = 30000, .n_tools = 12},
    {BASE, .tenant = "", .key_id = "", .user = "", .max_tokens = 64, .prompt_bytes = 10},
};

static const struct dn_result_view results[] = {
    {.status = 200,
     .finish_reason = "stop",
     .prompt_tokens = 100,
     .cached_tokens = 64,
     .completion_tokens = 20,
     .queue_ms = 1,
     .ttft_ms = 20,
     .total_ms = 300,
     .model = "smoke",
     .pool = "main",
     .weights = "bf16",
     .kv_dtype = "bf16",
     .integrity = "tag"},
    {.status = 499, .code = "cancelled", .prompt_tokens = 0},
};

/* The name of the model of a node that was given, so that policies find it. */
static void use_node(struct dn_node_view *view, struct dn_request_view *r, const struct dn_node_view *node)
{
    view->pool = node->pool;
    view->n_pools = node->n_pools;
    view->model = node->model;
    view->n_models = node->n_models;
    if (node->n_models)
        r->model = r->requested_model = node->model[0].name;
}

/* Adds a line unless it is there. */
static void add_line(struct dn_buf *all, const char *text)
{
    const char *have = dn_buf_str(all), *at = strstr(have, text);
    size_t n = strlen(text);
    if (at && (at == have || at[-1] == '\n') && (at[n] == '\n' || at[n] == '\0'))
        return;
    dn_buf_printf(all, "%s%s", all->len ? "\n" : "", text);
}

struct findings {
    struct dn_buf *all; /* or NULL: the first is enough */
    struct dn_err first;
    bool any;
};

/* Notes what the last hook left behind. True: that is enough. */
static bool note(struct dn_policy_vm *trial, struct findings *f)
{
    if (trial->last_error.code == DN_OK)
        return false;
    if (!f->any)
        f->first = trial->last_error;
    f->any = true;
    if (f->all)
        add_line(f->all, trial->last_error.text);
    trial->last_error.code = DN_OK;
    return !f->all;
}

/* Every hook runs, also behind a rejection: what is tried is that none fails. */
static bool one(struct dn_policy_vm *trial, const struct dn_request_view *r, const struct dn_node_view *node,
                struct findings *f)
{
    struct dn_decision d = {0};
    struct dn_reject reject;
    dn_policy_admit(trial, r, node, &d, &reject, NULL);
    if (note(trial, f))
        return true;
    struct dn_request_view full = *r;
    full.prompt_tokens = (int64_t)(r->prompt_bytes / 4 + 1);
    full.cached_tokens[DN_DECIDE_KV_BF16] = full.prompt_tokens / 2;
    dn_policy_route(trial, &full, node, &d, &reject, NULL);
    if (note(trial, f))
        return true;
    for (size_t i = 0; i < N(results); i++) {
        dn_policy_finish(trial, &full, &results[i]);
        if (note(trial, f))
            return true;
    }
    return false;
}

int dn_policy_smoke(struct dn_policy_vm *trial, const struct dn_node_view *node, struct dn_buf *all, struct dn_err *err)
{
    struct findings f = {.all = all};
    trial->last_error.code = DN_OK;
    bool enough = false;
    for (size_t s = 0; s < N(states) && !enough; s++)
        for (size_t i = 0; i < N(requests) && !enough; i++) {
            struct dn_request_view r = requests[i];
            struct dn_node_view view = states[s];
            r.prompt_tokens = -1;
            if (node)
                use_node(&view, &r, node);
            enough = one(trial, &r, &view, &f);
        }
    if (!f.any)
        return 0;
    if (err)
        *err = f.first;
    return -DN_POLICY;
}
