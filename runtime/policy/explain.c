#include "policy/check.h"

#include "policy/host.h"

#include "base/json.h"

#include <stdlib.h>
#include <string.h>

struct scenario { /* a request and a node out of JSON; strings live in the tree */
    json_t *tree;
    struct dn_request_view req;
    struct dn_node_view node;
    struct dn_view_pair pair[3][DN_VIEW_PAIRS_MAX]; /* labels, headers, metadata */
};

static int get_text(const json_t *o, const char *key, const char **out, struct dn_err *err)
{
    const char *s = NULL;
    size_t n = 0;
    int rc = dn_json_get_string(o, key, &s, &n, err);
    if (rc == 0 && s)
        *out = s;
    return rc;
}

static int get_int(const json_t *o, const char *key, int64_t max, int64_t *out, struct dn_err *err)
{
    return dn_json_get_int(o, key, 0, max, *out, out, err);
}

/* An object of strings; true is a bare label, false none. */
static int get_pairs(const json_t *o, const char *key, struct dn_view_pair *pair, const struct dn_view_pair **out,
                     size_t *n, struct dn_err *err)
{
    json_t *map = NULL, *value;
    const char *name;
    int rc = dn_json_get_object(o, key, &map, err);
    if (rc || !map)
        return rc;
    *out = pair;
    json_object_foreach(map, name, value)
    {
        if (json_is_false(value))
            continue;
        if (!json_is_string(value) && !json_is_true(value))
            return dn_err_set(err, DN_INVALID_VALUE, "%s.%s: expected a string or a boolean", key, name);
        if (*n == DN_VIEW_PAIRS_MAX)
            return dn_err_set(err, DN_INVALID_VALUE, "%s: expected at most %d", key, DN_VIEW_PAIRS_MAX);
        pair[(*n)++] = (struct dn_view_pair){name, json_string_value(value)};
    }
    return 0;
}

static int check_keys(const json_t *o, const char *what, const char *const *known, struct dn_err *err)
{
    const char *name;
    json_t *value;
    json_object_foreach((json_t *)o, name, value)
    {
        const char *const *k = known;
        while (*k && strcmp(*k, name) != 0)
            k++;
        if (!*k)
            return dn_err_set(err, DN_INVALID_VALUE, "%s%s: no such field", what, name);
    }
    return 0;
}

static int parse_node(const json_t *root, struct dn_node_view *node, struct dn_err *err)
{
    static const char *const known[] = {
        "kv_free_ratio", "kv_pages_total", "kv_pages_free", "queue_waiting", "queue_oldest_ms",
        "running",       "hour",           "minute",        "wday",          NULL};
    json_t *o = NULL;
    int64_t hour = node->hour, minute = node->minute, wday = node->wday;
    int rc = dn_json_get_object(root, "node", &o, err);
    if (rc || !o)
        return rc;
    if ((rc = check_keys(o, "node.", known, err)) ||
        (rc = dn_json_get_number(o, "kv_free_ratio", 0, 1, node->kv_free_ratio, &node->kv_free_ratio, err)) ||
        (rc = get_int(o, "kv_pages_total", INT32_MAX, &node->kv_pages_total, err)) ||
        (rc = get_int(o, "kv_pages_free", INT32_MAX, &node->kv_pages_free, err)) ||
        (rc = get_int(o, "queue_waiting", INT32_MAX, &node->queue_waiting, err)) ||
        (rc = get_int(o, "queue_oldest_ms", INT32_MAX, &node->queue_oldest_ms, err)) ||
        (rc = get_int(o, "running", INT32_MAX, &node->running, err)) || (rc = get_int(o, "hour", 23, &hour, err)) ||
        (rc = get_int(o, "minute", 59, &minute, err)) || (rc = get_int(o, "wday", 7, &wday, err)))
        return rc;
    node->hour = (int)hour;
    node->minute = (int)minute;
    node->wday = (int)wday;
    return 0;
}

static int parse_texts(const json_t *o, struct dn_request_view *r, struct dn_err *err)
{
    const struct {
        const char *key;
        const char **out;
    } text[] = {{"id", &r->id},
                {"endpoint", &r->endpoint},
                {"model", &r->model},
                {"tenant", &r->tenant},
                {"key_id", &r->key_id},
                {"client_ip", &r->client_ip},
                {"user", &r->user},
                {"prompt_cache_key", &r->prompt_cache_key},
                {"response_format", &r->response_format}};
    for (size_t i = 0; i < sizeof text / sizeof *text; i++) {
        int rc = get_text(o, text[i].key, text[i].out, err);
        if (rc)
            return rc;
    }
    r->requested_model = r->model;
    json_t *wish = NULL;
    int rc = dn_json_get_object(o, "wish", &wish, err);
    if (rc || !wish)
        return rc;
    static const char *const known[] = {"kv", "integrity", NULL};
    if ((rc = check_keys(wish, "wish.", known, err)) || (rc = get_text(wish, "kv", &r->wish_kv, err)))
        return rc;
    return get_text(wish, "integrity", &r->wish_integrity, err);
}

static int parse(struct scenario *s, const struct dn_policy_config *config, const char *json, size_t len,
                 struct dn_err *err)
{
    static const char *const known[] = {
        "id",     "endpoint",    "model",        "tenant",        "key_id", "client_ip", "user", "prompt_cache_key",
        "labels", "headers",     "metadata",     "max_tokens",    "n",      "tools",     "wish", "response_format",
        "stream", "temperature", "prompt_bytes", "prompt_tokens", "cached", "node",      NULL};
    struct dn_request_view *r = &s->req;
    s->node = dn_policy_quiet_node;
    if (config->node) {
        s->node.pool = config->node->pool;
        s->node.n_pools = config->node->n_pools;
        s->node.model = config->node->model;
        s->node.n_models = config->node->n_models;
    }
    *r = (struct dn_request_view){.id = "req_explain",
                                  .endpoint = "chat.completions",
                                  .model = s->node.n_models ? s->node.model[0].name : "",
                                  .max_tokens = -1,
                                  .temperature = -1,
                                  .prompt_bytes = 400,
                                  .prompt_tokens = 100,
                                  .n = 1};
    int rc = dn_json_parse(json, len, &s->tree, err);
    if (rc)
        return rc;
    const json_t *o = s->tree;
    if (!json_is_object(o))
        return dn_err_set(err, DN_INVALID_VALUE, "expected an object");
    int64_t n = 1, tools = 0, bytes = 400;
    if ((rc = check_keys(o, "", known, err)) || (rc = parse_texts(o, r, err)) ||
        (rc = get_pairs(o, "labels", s->pair[0], &r->label, &r->n_labels, err)) ||
        (rc = get_pairs(o, "headers", s->pair[1], &r->header, &r->n_headers, err)) ||
        (rc = get_pairs(o, "metadata", s->pair[2], &r->metadata, &r->n_metadata, err)) ||
        (rc = get_int(o, "max_tokens", INT32_MAX, &r->max_tokens, err)) || (rc = get_int(o, "n", 128, &n, err)) ||
        (rc = get_int(o, "tools", 1024, &tools, err)) || (rc = get_int(o, "prompt_bytes", INT32_MAX, &bytes, err)) ||
        (rc = get_int(o, "prompt_tokens", INT32_MAX, &r->prompt_tokens, err)) ||
        (rc = dn_json_get_number(o, "temperature", 0, 100, -1, &r->temperature, err)) ||
        (rc = dn_json_get_bool(o, "stream", false, &r->stream, err)))
        return rc;
    r->n = (int)n;
    r->n_tools = (int)tools;
    r->prompt_bytes = (uint64_t)bytes;
    json_t *cached = NULL;
    if ((rc = dn_json_get_object(o, "cached", &cached, err)))
        return rc;
    for (int k = 0; cached && k < DN_DECIDE_KV_COUNT; k++)
        if ((rc = get_int(cached, dn_decide_kv_name((enum dn_decide_kv)k), INT32_MAX, &r->cached_tokens[k], err)))
            return rc;
    return parse_node(o, &s->node, err);
}

static void print_reject(const struct dn_reject *r, struct dn_buf *out)
{
    dn_buf_printf(out, "=      %d %s by %s: %s", r->status, r->code, r->policy, r->message);
    if (r->retry_after_s >= 0)
        dn_buf_printf(out, " (Retry-After: %d)", r->retry_after_s);
    dn_buf_putc(out, '\n');
}

int dn_policy_explain(const struct dn_policy_config *config, const char *request_json, size_t len, struct dn_buf *out)
{
    struct scenario *s = dn_alloc0(1, sizeof *s);
    struct dn_policy_set *set = NULL;
    struct dn_policy_vm *trial = NULL;
    struct dn_err err = {0};
    int code = parse(s, config, request_json, len, &err) ? 2 : 0;
    if (!code && (dn_policy_set_read(&set, config, &err) || dn_policy_trial_open(&trial, set, &err)))
        code = 1;
    if (code) {
        dn_buf_printf(out, "%s\n", err.text);
    } else {
        struct dn_decision d = {0};
        struct dn_reject reject;
        struct dn_policy_trace trace = {0};
        struct dn_request_view early = s->req;
        early.prompt_tokens = -1;
        memset(early.cached_tokens, 0, sizeof early.cached_tokens);
        if (dn_policy_admit(trial, &early, &s->node, &d, &reject, &trace))
            dn_policy_route(trial, &s->req, &s->node, &d, &reject, &trace);
        size_t start = out->len;
        dn_policy_trace_table(&trace, &d, out);
        if (reject.status) {
            /* The last line says what the client gets. */
            while (out->len > start && (out->data[out->len - 1] == '\n'))
                out->len--;
            while (out->len > start && out->data[out->len - 1] != '\n')
                out->len--;
            print_reject(&reject, out);
        }
        if (trial->last_error.text[0]) {
            dn_buf_printf(out, "error  %s\n", trial->last_error.text);
            code = 1;
        }
    }
    dn_policy_vm_close(trial);
    dn_policy_set_put(set);
    json_decref(s->tree);
    free(s);
    return code;
}
