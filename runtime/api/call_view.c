#include "api/call_view.h"

#include <string.h>

static void copy_headers(const struct dn_call *c, struct dn_call_view *v)
{
    const struct dn_api_conf *api = &c->loop->node->api;
    for (size_t i = 0; c->http && i < api->n_policy_headers && i < DN_CALL_PAIRS; i++) {
        struct dn_str h = dn_http_header(c->http, api->policy_header[i]);
        if (!h.at)
            continue;
        char *text = v->header_text[v->request.n_headers];
        size_t n = h.len < DN_CALL_HEADER_BYTES ? h.len : DN_CALL_HEADER_BYTES;
        memcpy(text, h.at, n);
        text[n] = '\0';
        v->header[v->request.n_headers++] = (struct dn_view_pair){api->policy_header[i], text};
    }
}

/* 0: not known yet. The client may go away, and the call end, while a worker still counts. */
static int64_t prompt_tokens(const struct dn_call *c)
{
    return c->on_worker ? 0 : (int64_t)c->prompt.len;
}

void dn_call_view(const struct dn_call *c, struct dn_call_view *v)
{
    const struct dn_params *p = &c->params;
    v->request = (struct dn_request_view){
        .id = c->name,
        .endpoint = c->endpoint == DN_ENDPOINT_CHAT ? "chat.completions" : "completions",
        .model = c->loop->node->model_name,
        .requested_model = p->model,
        .client_ip = c->http ? dn_http_peer(c->http) : NULL,
        .user = p->user,
        .prompt_cache_key = p->prompt_cache_key,
        .label = v->label,
        .metadata = v->metadata,
        .header = v->header,
        .stream = p->stream,
        .n = 1,
        .max_tokens = p->max_tokens,
        .temperature = p->has_temperature ? p->temperature : -1,
        .prompt_bytes = p->prompt_bytes,
        .prompt_tokens = prompt_tokens(c) ? prompt_tokens(c) : -1,
        .wish_kv = p->wish_kv,
        .wish_integrity = p->wish_integrity,
    };
    for (int f = 0; f < DN_KV_FORMATS; f++)
        v->request.cached_tokens[f] = c->on_worker ? 0 : c->cached_tokens[f];
    if (c->key) {
        v->request.tenant = c->key->tenant;
        v->request.key_id = c->key->id;
        for (size_t i = 0; i < c->key->n_labels && i < DN_CALL_PAIRS; i++)
            v->label[v->request.n_labels++] = (struct dn_view_pair){c->key->label[i].name, c->key->label[i].value};
    }
    const char *name;
    json_t *value;
    json_object_foreach(p->metadata, name, value)
    {
        if (v->request.n_metadata < DN_CALL_PAIRS)
            v->metadata[v->request.n_metadata++] = (struct dn_view_pair){name, json_string_value(value)};
    }
    copy_headers(c, v);
}

static double ms(uint64_t from_ns, uint64_t to_ns)
{
    return from_ns && to_ns > from_ns ? (double)(to_ns - from_ns) * 1e-6 : 0;
}

void dn_call_result_view(const struct dn_call *c, uint64_t now_ns, struct dn_result_view *r)
{
    const struct dn_node *node = c->loop->node;
    *r = (struct dn_result_view){
        .status = c->status,
        .code = c->error_code,
        .finish_reason = c->has_output ? c->output.finish_reason : NULL,
        .prompt_tokens = prompt_tokens(c),
        .cached_tokens = c->has_output ? c->output.n_cached : 0,
        .completion_tokens = c->has_output ? c->output.n_output : 0,
        .queue_ms = ms(c->arrival_ns, c->started_ns),
        .ttft_ms = ms(c->arrival_ns, c->first_token_ns),
        .total_ms = ms(c->arrival_ns, now_ns),
        .model = node->model_name,
        .pool = node->pool->conf.name,
        .weights = dn_weights_main_format(node->pool->weights),
        .kv_dtype = dn_kv_format_name(c->kv),
        .integrity = c->check ? "tag" : "off",
    };
}
