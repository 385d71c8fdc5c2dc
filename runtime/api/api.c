#include "api/api.h"

#include "api/call.h"
#include "api/reply.h"
#include "api/stats.h"
#include "api/tokenize.h"
#include "base/clock.h"
#include "base/json.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <time.h>

/* ---- Small endpoints
 * -------------------------------------------------------------------------------------------------- */

static void livez(struct dn_api_loop *l, struct dn_http_req *req)
{
    dn_http_reply(req, 200, "application/json", "{\"status\":\"live\"}", 17);
}

static void readyz(struct dn_api_loop *l, struct dn_http_req *req)
{
    struct dn_node *node = l->node;
    struct dn_buf b = {0};
    struct dn_json_writer w = dn_json_writer(&b);
    int state = atomic_load(&node->state);
    const char *status = state == DN_NODE_READY ? "ready" : state == DN_NODE_LOADING ? "loading" : "draining";
    struct dn_snapshot s;
    if (state == DN_NODE_READY) {
        dn_sched_snapshot(node->sched, &s);
        if (!s.healthy)
            status = "device_lost";
    }
    dn_json_begin_object(&w);
    dn_json_key(&w, "status");
    dn_json_string(&w, status);
    if (state == DN_NODE_LOADING) {
        uint64_t done = atomic_load(&node->load_done), total = atomic_load(&node->load_total);
        dn_json_key(&w, "stage");
        dn_json_string(&w, "weights");
        dn_json_key(&w, "progress");
        dn_json_write_double(&w, total ? (double)done / (double)total : 0);
    }
    dn_json_end_object(&w);
    bool ready = strcmp(status, "ready") == 0;
    if (!ready)
        dn_http_add_header(req, "retry-after", "1");
    dn_reply_json(req, ready ? 200 : 503, &b);
    dn_buf_release(&b);
}

static void version(struct dn_api_loop *l, struct dn_http_req *req)
{
    static const char body[] = "{\"version\":\"" DN_VERSION "\"}";
    dn_http_reply(req, 200, "application/json", body, sizeof body - 1);
}

/* /metrics shows what the node does, not what it is asked: open to this machine, with a key from elsewhere. */
static void metrics(struct dn_api_loop *l, struct dn_http_req *req)
{
    const struct dn_node *node = l->node;
    const struct dn_key *key;
    struct dn_err err;
    if (!node->api.public_metrics && !dn_http_peer_is_loopback(req) &&
        dn_auth_check(node->keys, req, &key, &err) != 0) {
        dn_reply_err(req, &err);
        return;
    }
    struct dn_buf b = {0};
    dn_metrics_print(node->metrics, &b);
    dn_http_reply(req, 200, DN_METRICS_CONTENT_TYPE, b.data, b.len);
    dn_buf_release(&b);
}

static void put_model(struct dn_json_writer *w, const struct dn_node *node)
{
    dn_json_begin_object(w);
    dn_json_key(w, "id");
    dn_json_string(w, node->model_name);
    dn_json_key(w, "object");
    dn_json_string(w, "model");
    dn_json_key(w, "created");
    dn_json_write_uint(w, node->start_wall_s);
    dn_json_key(w, "owned_by");
    dn_json_string(w, "dunlin");
    dn_json_key(w, "max_model_len");
    dn_json_write_uint(w, node->pool->conf.context_tokens);
    dn_json_key(w, "dunlin");
    dn_json_begin_object(w);
    dn_json_key(w, "architecture");
    dn_json_string(w, dn_arch_name(node->model->hyper.arch));
    dn_json_key(w, "weights");
    dn_json_string(w, dn_weights_main_format(node->pool->weights));
    dn_json_key(w, "kv_dtypes");
    dn_json_begin_array(w);
    for (int f = 0; f < DN_KV_FORMATS; f++)
        dn_json_string(w, dn_kv_format_name((enum dn_kv_format)f));
    dn_json_end_array(w);
    dn_json_end_object(w);
    dn_json_end_object(w);
}

static bool allow_get(struct dn_api_loop *l, struct dn_http_req *req)
{
    const struct dn_node *node = l->node;
    const struct dn_key *key;
    struct dn_err err;
    int rc = dn_auth_check(node->keys, req, &key, &err);
    if (rc == 0 && atomic_load(&node->state) == DN_NODE_LOADING)
        rc = dn_err_set(&err, DN_NOT_READY, "the model is still loading; GET /readyz shows how far it is");
    if (rc != 0)
        dn_reply_err(req, &err);
    return rc == 0;
}

static void models(struct dn_api_loop *l, struct dn_http_req *req)
{
    if (!allow_get(l, req))
        return;
    struct dn_buf b = {0};
    struct dn_json_writer w = dn_json_writer(&b);
    dn_json_begin_object(&w);
    dn_json_key(&w, "object");
    dn_json_string(&w, "list");
    dn_json_key(&w, "data");
    dn_json_begin_array(&w);
    put_model(&w, l->node);
    dn_json_end_array(&w);
    dn_json_end_object(&w);
    dn_reply_json(req, 200, &b);
    dn_buf_release(&b);
}

static void model(struct dn_api_loop *l, struct dn_http_req *req)
{
    if (!allow_get(l, req))
        return;
    struct dn_str path = dn_http_path(req);
    const size_t n_prefix = strlen("/v1/models/");
    struct dn_str name = {path.at + n_prefix, path.len - n_prefix};
    if (!dn_str_is(name, l->node->model_name)) {
        struct dn_err err;
        dn_err_param(&err, DN_MODEL_NOT_FOUND, "model", "no such model here; this node serves: %s",
                     l->node->model_name);
        dn_reply_err(req, &err);
        return;
    }
    struct dn_buf b = {0};
    struct dn_json_writer w = dn_json_writer(&b);
    put_model(&w, l->node);
    dn_reply_json(req, 200, &b);
    dn_buf_release(&b);
}

static void chat(struct dn_api_loop *l, struct dn_http_req *req)
{
    dn_call_begin(l, req, DN_ENDPOINT_CHAT);
}

static void completions(struct dn_api_loop *l, struct dn_http_req *req)
{
    dn_call_begin(l, req, DN_ENDPOINT_COMPLETIONS);
}

/* ---- Routes
 * ------------------------------------------------------------------------------------------------------------ */

static const struct route {
    const char *method, *path;
    bool prefix;  /* the path goes on */
    bool is_call; /* a generation: api/call.h */
    void (*handle)(struct dn_api_loop *l, struct dn_http_req *req);
} route[] = {
    {"POST", "/v1/chat/completions", false, true, chat},
    {"POST", "/v1/completions", false, true, completions},
    {"GET", "/v1/models", false, false, models},
    {"GET", "/v1/models/", true, false, model},
    {"POST", "/tokenize", false, false, dn_tokenize_begin},
    {"POST", "/detokenize", false, false, dn_detokenize_begin},
    {"GET", "/livez", false, false, livez},
    {"GET", "/readyz", false, false, readyz},
    {"GET", "/health", false, false, readyz},
    {"GET", "/version", false, false, version},
    {"GET", "/metrics", false, false, metrics},
};
enum { N_ROUTES = sizeof route / sizeof *route };

/* The known path with the longest common beginning: what a typo probably meant. */
static const char *nearest_path(struct dn_str path)
{
    const char *best = route[0].path;
    size_t best_n = 0;
    for (size_t i = 0; i < N_ROUTES; i++) {
        size_t n = 0, len = strlen(route[i].path);
        while (n < path.len && n < len && path.at[n] == route[i].path[n])
            n++;
        /* a common end counts as well: /chat/completions for /v1/chat/completions */
        size_t tail = 0;
        while (tail < path.len && tail < len && path.at[path.len - 1 - tail] == route[i].path[len - 1 - tail])
            tail++;
        if (n + tail > best_n) {
            best_n = n + tail;
            best = route[i].path;
        }
    }
    return best;
}

static void on_request(struct dn_loop *loop, struct dn_http_req *req, void *loop_user)
{
    struct dn_str method = dn_http_method(req), path = dn_http_path(req);
    const struct route *other = NULL;
    char name[DN_REQUEST_NAME];
    bool head = dn_str_is(method, "HEAD");
    for (size_t i = 0; i < N_ROUTES; i++) {
        const struct route *r = &route[i];
        size_t n = strlen(r->path);
        bool match = r->prefix ? path.len > n && memcmp(path.at, r->path, n) == 0 : dn_str_is(path, r->path);
        if (!match)
            continue;
        if (dn_str_is(method, r->method) || (head && strcmp(r->method, "GET") == 0)) {
            if (!r->is_call) /* a call names itself, since it keeps its name */
                dn_reply_name(req, name);
            r->handle(loop_user, req);
            return;
        }
        other = r;
    }
    struct dn_err err;
    dn_reply_name(req, name);
    if (other) {
        dn_http_add_header(req, "allow", other->method);
        dn_err_set(&err, DN_METHOD, "%s takes %s", other->path, other->method);
    } else {
        dn_err_set(&err, DN_NOT_FOUND, "no such path; the nearest is %s", nearest_path(path));
    }
    dn_reply_err(req, &err);
}

/* ---- Loops
 * ------------------------------------------------------------------------------------------------------------- */

int dn_api_check_request(const struct dn_node *node, const struct dn_http_req *req, const struct dn_key **key,
                         struct dn_err *err)
{
    struct dn_str type = dn_http_header(req, "content-type");
    static const char json[] = "application/json";
    int rc = dn_auth_check(node->keys, req, key, err);
    if (rc != 0)
        return rc;
    if (type.at && (type.len < sizeof json - 1 || strncasecmp(type.at, json, sizeof json - 1) != 0))
        return dn_err_set(err, DN_MEDIA_TYPE, "content-type: expected application/json");
    int state = atomic_load(&node->state);
    if (state == DN_NODE_LOADING)
        return dn_err_set(err, DN_NOT_READY, "the model is still loading; GET /readyz shows how far it is");
    if (state == DN_NODE_DRAINING)
        return dn_err_set(err, DN_DRAINING, "the node is shutting down and takes no new requests");
    return 0;
}

const struct dn_node_view *dn_api_loop_view(struct dn_api_loop *l)
{
    const struct dn_node *node = l->node;
    struct dn_snapshot s;
    dn_sched_snapshot(node->sched, &s);
    time_t now = time(NULL);
    struct tm tm;
    localtime_r(&now, &tm);
    double free_ratio = s.pages_total ? (double)s.pages_free / (double)s.pages_total : 0;
    l->pool_view = (struct dn_pool_view){
        .name = node->pool->conf.name,
        .role = "both",
        .running = (int64_t)s.running,
        .waiting = (int64_t)dn_sched_waiting(node->sched),
        .kv_free_ratio = free_ratio,
        .is_healthy = s.healthy != 0,
    };
    l->model_view = (struct dn_model_view){
        .name = node->model_name,
        .context_tokens = node->pool->conf.context_tokens,
        .has_kv = {true, true},
    };
    for (int w = 0; w < DN_W_FORMATS; w++)
        l->pool_view.has_weights[w] = l->model_view.has_weights[w] = node->pool->weights->format_bytes[w] > 0;
    l->view = (struct dn_node_view){
        .version = s.at_ns ^ (uint64_t)now << 32 ^ (uint64_t)l->pool_view.waiting,
        .hour = tm.tm_hour,
        .minute = tm.tm_min,
        .wday = tm.tm_wday + 1,
        .kv_pages_total = (int64_t)s.pages_total,
        .kv_pages_free = (int64_t)s.pages_free,
        .kv_free_ratio = free_ratio,
        .queue_waiting = l->pool_view.waiting,
        .queue_oldest_ms = (int64_t)(s.oldest_wait_ns / DN_NS_PER_MS),
        .running = (int64_t)s.running,
        .pool = &l->pool_view,
        .n_pools = 1,
        .model = &l->model_view,
        .n_models = 1,
    };
    return &l->view;
}

static void *on_loop_start(struct dn_loop *loop, unsigned loop_idx, void *user)
{
    struct dn_node *node = user;
    struct dn_api_loop *l = dn_alloc0(1, sizeof *l);
    struct dn_err err = {0};
    char name[24];
    *l = (struct dn_api_loop){.node = node, .loop = loop, .idx = loop_idx};
    snprintf(name, sizeof name, "loop%u", loop_idx);
    if (dn_policy_vm_open(&l->policy, node->policy, name, &err) != 0) {
        /* The same files were proved a moment ago; what fails now is memory, and without policies nothing may be
         * served. */
        struct dn_log_line line;
        dn_log_begin(&line, DN_LOG_ERROR, "policy.vm_failed");
        dn_log_err(&line, &err);
        dn_log_end(&line);
        abort();
    }
    node->loop[loop_idx] = l;
    return l;
}

static void on_loop_stop(struct dn_loop *loop, void *loop_user)
{
    struct dn_api_loop *l = loop_user;
    dn_policy_vm_close(l->policy);
    free(l->call);
    l->call = NULL;
    l->n_slots = 0; /* l itself stays until dn_api_close: the scheduler may still be about to deliver to it */
}

static void on_gone(struct dn_loop *loop, struct dn_http_req *req, void *loop_user)
{
    struct dn_exchange *x = dn_http_user(req);
    if (x)
        x->gone(x);
}

static void on_resume(struct dn_loop *loop, struct dn_http_req *req, void *loop_user)
{
    struct dn_exchange *x = dn_http_user(req);
    if (x && x->resume)
        x->resume(x);
}

static void on_tick(struct dn_loop *loop, uint64_t now_ns, void *loop_user)
{
    struct dn_api_loop *l = loop_user;
    for (uint32_t i = 0; i < l->n_slots && l->n_calls > 0; i++)
        if (l->call[i])
            dn_call_tick(l->call[i], now_ns);
    dn_policy_vm_idle(l->policy);
}

const struct dn_http_handler *dn_api_handler(void)
{
    static const struct dn_http_handler handler = {
        .on_loop_start = on_loop_start,
        .on_loop_stop = on_loop_stop,
        .on_request = on_request,
        .on_gone = on_gone,
        .on_resume = on_resume,
        .on_tick = on_tick,
    };
    return &handler;
}

/* ---- Events of the scheduler
 * -------------------------------------------------------------------------------------------- */

struct delivery {
    struct dn_loop_msg msg; /* first */
    struct dn_event_batch *batch;
};

static struct dn_call *find_call(const struct dn_api_loop *l, struct dn_request_id id)
{
    struct dn_call *c = id.slot < l->n_slots ? l->call[id.slot] : NULL;
    return c && c->id.generation == id.generation ? c : NULL;
}

/* First all events, so that a call sends what a step gave it in one piece; then each call that was touched. */
static void on_delivery(struct dn_loop *loop, struct dn_loop_msg *msg, void *loop_user)
{
    struct dn_api_loop *l = loop_user;
    struct delivery *d = (struct delivery *)msg;
    struct dn_event_batch *b = d->batch;
    for (uint32_t i = 0; i < b->n_events; i++) {
        const struct dn_event *e = &b->event[i];
        struct dn_call *c = find_call(l, e->id);
        if (c)
            dn_call_event(c, e, e->detail >= 0 ? &b->detail[e->detail] : NULL, b->step_ns);
    }
    for (uint32_t i = 0; i < b->n_events; i++) {
        struct dn_call *c = find_call(l, b->event[i].id);
        if (c)
            dn_call_flush(c);
    }
    dn_event_batch_free(b);
    free(d);
}

static void deliver(void *user, uint32_t loop, struct dn_event_batch *batch)
{
    struct dn_node *node = user;
    struct delivery *d = dn_alloc0(1, sizeof *d);
    d->msg.fn = on_delivery;
    d->batch = batch;
    if (!dn_loop_post(node->loop[loop]->loop, &d->msg)) {
        dn_event_batch_free(batch);
        free(d);
    }
}

struct dn_sink dn_api_sink(struct dn_node *node)
{
    return (struct dn_sink){.deliver = deliver, .user = node, .n_loops = node->n_loops};
}

void dn_api_open(struct dn_node *node)
{
    node->stats = dn_api_stats_open(node->metrics, &node->http);
    node->loop = dn_alloc0(node->n_loops, sizeof *node->loop);
}

void dn_api_close(struct dn_node *node)
{
    dn_api_stats_close(node->stats);
    for (uint32_t i = 0; node->loop && i < node->n_loops; i++)
        free(node->loop[i]);
    free(node->loop);
    node->stats = NULL;
    node->loop = NULL;
}
