#include "api/call.h"

#include "api/call_view.h"
#include "api/encode.h"
#include "api/reply.h"
#include "api/stats.h"
#include "base/clock.h"
#include "base/log.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum { PARSE_ON_LOOP_BYTES = 64 * 1024, WRITE_BYTES = 16 * 1024 };
static const uint64_t quiet_first_ns =
    1000 * DN_NS_PER_MS; /* a stream that has nothing to say yet is opened after this */
static const uint64_t quiet_ping_ns = 15000 * DN_NS_PER_MS;

static void encode(struct dn_call *c);
static void resume(struct dn_exchange *x);
static void submit(struct dn_call *c);

/* ---- Slots ------------------------------------------------------------------------------------------------
 */

static void take_slot(struct dn_api_loop *l, struct dn_call *c)
{
    uint32_t slot = l->first_free_hint;
    while (slot < l->n_slots && l->call[slot])
        slot++;
    if (slot == l->n_slots) {
        uint32_t n = l->n_slots ? 2 * l->n_slots : 64;
        l->call = dn_realloc(l->call, n, sizeof *l->call);
        memset(l->call + l->n_slots, 0, (n - l->n_slots) * sizeof *l->call);
        l->n_slots = n;
    }
    l->call[slot] = c;
    l->first_free_hint = slot + 1;
    l->n_calls++;
    c->id = (struct dn_request_id){.loop = l->idx, .slot = slot, .generation = ++l->next_generation};
}

static void release_call(struct dn_call *c)
{
    if (c->has_output)
        dn_output_release(&c->output);
    if (c->has_params)
        dn_params_release(&c->params);
    dn_tokens_release(&c->prompt);
    dn_buf_release(&c->body);
    dn_buf_release(&c->unsent);
    free(c);
}

static void free_call(struct dn_call *c)
{
    struct dn_api_loop *l = c->loop;
    l->call[c->id.slot] = NULL;
    l->n_calls--;
    if (c->id.slot < l->first_free_hint)
        l->first_free_hint = c->id.slot;
    release_call(c);
}

static struct dn_call *call_of(struct dn_loop_msg *msg)
{
    return (struct dn_call *)((char *)msg - offsetof(struct dn_call, job.back));
}

/* The loop has ended, its slots with it. */
static void drop(struct dn_job *job)
{
    release_call((struct dn_call *)job);
}

static void release_work(struct dn_job *job, struct dn_template_vm *vm)
{
    (void)vm;
    struct dn_call *c = (struct dn_call *)job;
    dn_params_release(&c->params);
    c->has_params = false;
}

static void release_back(struct dn_loop *loop, struct dn_loop_msg *msg, void *loop_user)
{
    free_call(call_of(msg));
}

/* Nobody needs the call any more. To free what 8 MiB of JSON were takes 150 ms: not on the loop either. */
static void retire(struct dn_call *c)
{
    if (c->is_large && c->has_params) {
        c->job.work = release_work;
        c->job.back.fn = release_back;
        c->on_worker = true;
        if (dn_workers_submit(c->loop->node->workers, &c->job))
            return;
    }
    free_call(c);
}

/* ---- Ends
 * ------------------------------------------------------------------------------------------------------------ */

static void log_done(const struct dn_call *c, uint64_t now_ns)
{
    struct dn_log_line l;
    struct dn_buf policy = {0};
    dn_log_begin(&l, DN_LOG_INFO, "request.done");
    dn_log_str(&l, "id", c->name);
    if (c->key) {
        dn_log_str(&l, "tenant", c->key->tenant);
        dn_log_str(&l, "key", c->key->id);
    }
    dn_log_str(&l, "model", c->loop->node->model_name);
    dn_log_int(&l, "status", c->status);
    if (c->error_code)
        dn_log_str(&l, "code", c->error_code);
    if (c->has_output) {
        dn_log_str(&l, "finish", c->output.finish_reason ? c->output.finish_reason : "abort");
        dn_log_uint(&l, "prompt", c->prompt.len);
        dn_log_uint(&l, "cached", c->output.n_cached);
        dn_log_uint(&l, "out", c->output.n_output);
        dn_log_str(&l, "kv", dn_kv_format_name(c->kv));
        dn_log_str(&l, "weights", dn_weights_main_format(c->loop->node->pool->weights));
        dn_log_str(&l, "integrity", c->check ? "tag" : "off");
        dn_log_str(&l, "pool", c->loop->node->pool->conf.name);
    }
    if (c->started_ns)
        dn_log_ms(&l, "queue_ms", c->started_ns - c->arrival_ns);
    if (c->first_token_ns)
        dn_log_ms(&l, "ttft_ms", c->first_token_ns - c->arrival_ns);
    dn_log_ms(&l, "total_ms", now_ns - c->arrival_ns);
    dn_policy_trace_print(&c->trace, &c->decision, &policy);
    if (policy.len)
        dn_log_strn(&l, "policy", policy.data, policy.len);
    if (dn_decision_has(&c->decision, DN_DECIDE_REASON))
        dn_log_str(&l, "why", c->decision.reason);
    dn_log_end(&l);
    dn_buf_release(&policy);
}

/* The call is decided: log, metrics and the finish hook, once. */
static void finish(struct dn_call *c)
{
    if (c->finished)
        return;
    c->finished = true;
    uint64_t now_ns = dn_now_ns();
    if (c->admitted) {
        struct dn_call_view v;
        struct dn_result_view result;
        dn_call_view(c, &v);
        dn_call_result_view(c, now_ns, &result);
        dn_policy_finish(c->loop->policy, &v.request, &result);
    }
    dn_api_stats_call(c->loop->node->stats, c->endpoint == DN_ENDPOINT_CHAT ? "chat" : "completions", c->status, c->kv,
                      c->check, c->has_output);
    log_done(c, now_ns);
}

/* Writes as much as the client has room for, the rest in resume(): an echoed prompt with its log-probabilities is more
 * than a slow reader may leave unread. Ends the stream with the last byte of a call that is finished. */
static void write_unsent(struct dn_call *c)
{
    size_t at = 0;
    while (at < c->unsent.len && !dn_http_paused(c->http)) {
        size_t left = c->unsent.len - at, n = left < WRITE_BYTES ? left : WRITE_BYTES;
        dn_http_write(c->http, c->unsent.data + at, n);
        at += n;
    }
    dn_buf_drop(&c->unsent, at);
    if (c->finished && c->unsent.len == 0)
        dn_http_finish(c->http);
}

static void fail(struct dn_call *c, const struct dn_err *err)
{
    const struct dn_code_info *info = dn_code_info(err->code);
    c->status = info->status;
    c->error_code = info->code;
    finish(c);
    if (!c->http)
        return;
    if (!c->streaming) {
        dn_reply_err(c->http, err);
        return;
    }
    /* The status has left: say it as an event, and end without [DONE]. */
    dn_buf_puts(&c->unsent, "data: ");
    dn_reply_err_json(&c->unsent, err);
    dn_buf_puts(&c->unsent, "\n\n");
    write_unsent(c);
}

static void fail_code(struct dn_call *c, enum dn_code code)
{
    struct dn_err err = {.code = code};
    fail(c, &err);
}

static void refuse(struct dn_call *c, const struct dn_reject *reject)
{
    c->status = reject->status;
    memcpy(c->reject_code, reject->code, sizeof c->reject_code);
    c->error_code = c->reject_code;
    finish(c);
    if (c->http)
        dn_reply_reject(c->http, reject);
}

static struct dn_call *call_of_exchange(struct dn_exchange *x)
{
    return (struct dn_call *)((char *)x - offsetof(struct dn_call, exchange));
}

static void gone(struct dn_exchange *x)
{
    struct dn_call *c = call_of_exchange(x);
    c->http = NULL;
    if (!c->finished) { /* before its answer was complete: the client went away */
        c->status = dn_code_info(DN_CANCELLED)->status;
        c->error_code = dn_code_info(DN_CANCELLED)->code;
        if (c->submitted)
            dn_sched_cancel(c->loop->node->sched, c->id);
        finish(c);
    }
    if (!c->on_worker)
        retire(c);
}

/* ---- Work on a worker
 * ------------------------------------------------------------------------------------------------ */

/* True: go on. False: the client has gone meanwhile and the call is freed. */
static bool came_back(struct dn_call *c)
{
    c->on_worker = false;
    if (c->http)
        return true;
    retire(c);
    return false;
}

static void hand_over(struct dn_call *c, void (*work)(struct dn_job *, struct dn_template_vm *),
                      void (*back)(struct dn_loop *, struct dn_loop_msg *, void *))
{
    c->err = (struct dn_err){0};
    c->job.loop = c->loop->loop;
    c->job.work = work;
    c->job.back.fn = back;
    c->job.drop = drop;
    c->on_worker = true;
    if (!dn_workers_submit(c->loop->node->workers, &c->job)) {
        c->on_worker = false;
        fail_code(c, DN_DRAINING);
    }
}

/* ---- Parse, authenticate, admit
 * -------------------------------------------------------------------------------------- */

static void add_headers(struct dn_call *c)
{
    if (c->params.ignored[0])
        dn_http_add_header(c->http, "x-dunlin-ignored", c->params.ignored);
    for (unsigned i = 0; i < c->decision.n_headers; i++)
        dn_http_add_header(c->http, c->decision.header[i].name, c->decision.header[i].value);
    if (!c->loop->node->api.expose)
        return;
    dn_http_add_header(c->http, "x-dunlin-kv", dn_kv_format_name(c->kv));
    dn_http_add_header(c->http, "x-dunlin-integrity", c->check ? "tag" : "off");
    dn_http_add_header(c->http, "x-dunlin-weights", dn_weights_main_format(c->loop->node->pool->weights));
    struct dn_buf policy = {0};
    dn_policy_trace_print(&c->trace, &c->decision, &policy);
    if (policy.len)
        dn_http_add_header(c->http, "x-dunlin-policy", dn_buf_str(&policy));
    dn_buf_release(&policy);
}

/* Whose cached prefixes a request may use: a policy's salt, else its tenant's. A digest, so that any length will do.
 * Returns its length, 0 = shared by all. */
static uint32_t choose_salt(const struct dn_call *c, uint8_t salt[DN_SALT_BYTES])
{
    const char *text = "";
    if (dn_decision_has(&c->decision, DN_DECIDE_CACHE_SALT))
        text = c->decision.cache_salt;
    else if (c->loop->node->api.share == DN_SHARE_TENANT && c->key)
        text = c->key->tenant;
    if (!text[0])
        return 0;
    dn_sha256(text, strlen(text), salt);
    return DN_SHA256_BYTES;
}

static bool ask_policies(struct dn_call *c, bool admit)
{
    struct dn_call_view v;
    struct dn_reject reject;
    dn_call_view(c, &v);
    const struct dn_node_view *n = dn_api_loop_view(c->loop);
    bool go = admit ? dn_policy_admit(c->loop->policy, &v.request, n, &c->decision, &reject, &c->trace)
                    : dn_policy_route(c->loop->policy, &v.request, n, &c->decision, &reject, &c->trace);
    if (!go)
        refuse(c, &reject);
    return go;
}

/* Parsed; on the loop. */
static void admit(struct dn_call *c)
{
    const struct dn_node *node = c->loop->node;
    struct dn_err err;
    if (strcmp(c->params.model, node->model_name) != 0) {
        dn_err_param(&err, DN_MODEL_NOT_FOUND, "model", "no model \"%.100s\" here; this node serves: %s",
                     c->params.model, node->model_name);
        fail(c, &err);
        return;
    }
    if (c->endpoint == DN_ENDPOINT_CHAT && !node->chat_template) {
        dn_err_param(&err, DN_TEMPLATE, "messages",
                     "model \"%s\" has no chat template; use /v1/completions, or give it one in the configuration",
                     node->model_name);
        fail(c, &err);
        return;
    }
    if (!ask_policies(c, true))
        return;
    c->admitted = true;
    if (dn_decision_has(&c->decision, DN_DECIDE_MODEL) && strcmp(c->decision.model, node->model_name) != 0) {
        dn_err_set(&err, DN_POLICY, "a policy chose a model that this node does not serve");
        fail(c, &err);
        return;
    }
    encode(c);
}

static void parse_work(struct dn_job *job, struct dn_template_vm *vm)
{
    (void)vm;
    struct dn_call *c = (struct dn_call *)job;
    c->has_params =
        dn_params_parse(c->body.data, c->body.len, c->endpoint, c->loop->node->api.strict, &c->params, &c->err) == 0;
    dn_buf_release(&c->body); /* the parameters have their own copy */
}

static void parsed(struct dn_call *c)
{
    if (c->has_params)
        admit(c);
    else
        fail(c, &c->err);
}

static void parse_back(struct dn_loop *loop, struct dn_loop_msg *msg, void *loop_user)
{
    struct dn_call *c = call_of(msg);
    if (came_back(c))
        parsed(c);
}

void dn_call_begin(struct dn_api_loop *loop, struct dn_http_req *req, enum dn_endpoint endpoint)
{
    struct dn_call *c = dn_alloc0(1, sizeof *c);
    c->loop = loop;
    c->http = req;
    c->endpoint = endpoint;
    c->arrival_ns = dn_now_ns();
    c->kv = loop->node->api.kv;
    c->check = loop->node->api.check;
    take_slot(loop, c);
    c->exchange = (struct dn_exchange){.gone = gone, .resume = resume};
    dn_http_set_user(req, &c->exchange);
    dn_reply_name(req, c->name);
    struct dn_err err = {0};
    if (dn_api_check_request(loop->node, req, &c->key, &err) != 0) {
        fail(c, &err);
        return;
    }
    if (dn_workers_are_full(loop->node->workers)) {
        dn_err_set(&err, DN_OVERLOADED, "too many requests wait to be read");
        fail(c, &err);
        return;
    }
    struct dn_str body = dn_http_body(req);
    if (body.len > PARSE_ON_LOOP_BYTES) {
        c->is_large = true;
        dn_buf_put(&c->body, body.at, body.len);
        hand_over(c, parse_work, parse_back);
        return;
    }
    c->has_params = dn_params_parse(body.at, body.len, endpoint, loop->node->api.strict, &c->params, &c->err) == 0;
    parsed(c);
}

/* ---- Encode
 * ---------------------------------------------------------------------------------------------------------- */

/* What the route hook is told of cached prefixes. Here and not on the loop: it hashes the whole prompt. */
static void peek_prefix(struct dn_call *c)
{
    const struct dn_pool *pool = c->loop->node->pool;
    uint8_t salt[DN_SALT_BYTES];
    uint32_t n_salt = choose_salt(c, salt);
    for (int f = 0; f < DN_KV_FORMATS; f++) {
        struct dn_hash128 root = dn_pool_prefix_root(pool, (enum dn_kv_format)f, salt, n_salt);
        c->cached_tokens[f] = dn_prefix_peek(pool->prefix, root, c->prompt.data, (uint32_t)c->prompt.len);
    }
}

static void encode_work(struct dn_job *job, struct dn_template_vm *vm)
{
    struct dn_call *c = (struct dn_call *)job;
    int rc;
    const struct dn_node *node = c->loop->node;
    if (c->endpoint == DN_ENDPOINT_CHAT)
        rc = dn_encode_messages(node, vm, c->params.messages, c->params.template_kwargs,
                                c->params.add_generation_prompt, &c->prompt, &c->err);
    else if (c->params.prompt_ids)
        rc = dn_encode_ids(node, c->params.prompt_ids, "prompt", &c->prompt, &c->err);
    else
        rc = dn_tokenizer_encode(node->tokenizer, c->params.prompt.at, c->params.prompt.len, DN_TOK_ADD_AFFIX,
                                 &c->prompt, &c->err);
    if (rc == 0 && c->prompt.len > 0)
        peek_prefix(c);
    else if (rc == 0)
        dn_err_param(&c->err, DN_INVALID_VALUE, c->endpoint == DN_ENDPOINT_CHAT ? "messages" : "prompt",
                     "the prompt is empty");
}

static void encode_back(struct dn_loop *loop, struct dn_loop_msg *msg, void *loop_user)
{
    struct dn_call *c = call_of(msg);
    if (!came_back(c))
        return;
    if (c->err.code != DN_OK)
        fail(c, &c->err);
    else
        submit(c);
}

static void encode(struct dn_call *c)
{
    hand_over(c, encode_work, encode_back);
}

/* ---- Route and submit
 * ------------------------------------------------------------------------------------------------ */

/* How many tokens the answer may have: what the client asks, what a policy allows, what the context leaves. */
static int choose_max_tokens(struct dn_call *c, struct dn_err *err)
{
    const struct dn_pool *pool = c->loop->node->pool;
    uint64_t context = pool->conf.context_tokens, n = c->prompt.len;
    if (pool->capacity_tokens[c->kv] < context)
        context = pool->capacity_tokens[c->kv];
    const char *param = c->endpoint == DN_ENDPOINT_CHAT ? "messages" : "prompt";
    int64_t wanted = c->params.max_tokens;
    if (n + (wanted != 0) > context)
        return dn_err_param(err, DN_CONTEXT_LENGTH, param,
                            "the prompt has %llu tokens; this model's context is %llu tokens, answer included",
                            (unsigned long long)n, (unsigned long long)context);
    if (wanted > 0 && n + (uint64_t)wanted > context)
        return dn_err_param(err, DN_CONTEXT_LENGTH, "max_tokens",
                            "%llu prompt tokens + max_tokens %lld = %llu; this model's context is %llu tokens",
                            (unsigned long long)n, (long long)wanted, (unsigned long long)(n + (uint64_t)wanted),
                            (unsigned long long)context);
    uint64_t max = wanted < 0 ? context - n : (uint64_t)wanted;
    if (dn_decision_has(&c->decision, DN_DECIDE_MAX_TOKENS) && (uint64_t)c->decision.max_tokens < max)
        max = (uint64_t)c->decision.max_tokens;
    c->max_tokens = (uint32_t)max;
    return 0;
}

static void fill_sampling(const struct dn_call *c, struct dn_sample *s)
{
    const struct dn_params *p = &c->params;
    *s = (struct dn_sample){
        .temperature = (float)p->temperature,
        .top_p = (float)p->top_p,
        .min_p = (float)p->min_p,
        .top_k = p->top_k > 0 ? (int32_t)p->top_k : -1,
        .repetition = (float)p->repetition,
        .frequency = (float)p->frequency,
        .presence = (float)p->presence,
        .n_top = p->logprobs,
        .seed = p->seed,
    };
    if (!p->has_seed)
        dn_random_bytes(&s->seed, sizeof s->seed);
}

static struct dn_request *make_request(struct dn_call *c)
{
    const struct dn_params *p = &c->params;
    const struct dn_decision *d = &c->decision;
    struct dn_request *r = dn_alloc0(1, sizeof *r);
    *r = (struct dn_request){
        .id = c->id,
        .n_prompt = (uint32_t)c->prompt.len,
        .max_tokens = c->max_tokens,
        .min_tokens = (uint32_t)(p->min_tokens < c->max_tokens ? p->min_tokens : c->max_tokens),
        .ignore_eos = p->ignore_eos,
        .prompt_logprobs = p->echo && p->logprobs >= 0,
        .kv = c->kv,
        .check = c->check,
        .priority = dn_decision_has(d, DN_DECIDE_PRIORITY) ? d->priority : DN_DECIDE_PRIORITY_DEFAULT,
        .cache_read = c->loop->node->api.share != DN_SHARE_NONE,
        .cache_write =
            c->loop->node->api.share != DN_SHARE_NONE && (!dn_decision_has(d, DN_DECIDE_CACHE_WRITE) || d->cache_write),
        .arrival_ns = c->arrival_ns,
    };
    memcpy(r->name, c->name, sizeof r->name);
    r->prompt = dn_alloc(c->prompt.len * sizeof *r->prompt);
    memcpy(r->prompt, c->prompt.data, c->prompt.len * sizeof *r->prompt);
    for (size_t i = 0; i < p->n_stop_ids; i++)
        r->stop[r->n_stop++] = (int32_t)p->stop_id[i];
    uint64_t timeout_ms = c->loop->node->api.queue_timeout_ms;
    if (dn_decision_has(d, DN_DECIDE_QUEUE_TIMEOUT) && (uint64_t)d->queue_timeout_ms < timeout_ms)
        timeout_ms = (uint64_t)d->queue_timeout_ms;
    r->queue_deadline_ns = c->arrival_ns + timeout_ms * DN_NS_PER_MS;
    fill_sampling(c, &r->sample);
    r->n_salt = choose_salt(c, r->salt);
    return r;
}

static int check_stop_ids(const struct dn_call *c, struct dn_err *err)
{
    const struct dn_model *m = c->loop->node->model;
    for (size_t i = 0; i < c->params.n_stop_ids; i++)
        if (c->params.stop_id[i] >= m->hyper.n_vocab)
            return dn_err_param(err, DN_INVALID_VALUE, "stop_token_ids",
                                "stop_token_ids[%zu]: %lld; the vocabulary has %u", i, (long long)c->params.stop_id[i],
                                m->hyper.n_vocab);
    if (m->n_eos + c->params.n_stop_ids > DN_MAX_BAN)
        return dn_err_param(err, DN_INVALID_VALUE, "stop_token_ids", "stop_token_ids: at most %zu with this model",
                            DN_MAX_BAN - m->n_eos);
    return 0;
}

/* A wish or a policy's choice that this node can't fulfil is not silently something else. */
static int apply_decision(struct dn_call *c, struct dn_err *err)
{
    const struct dn_decision *d = &c->decision;
    const struct dn_node *node = c->loop->node;
    if (dn_decision_has(d, DN_DECIDE_KV))
        c->kv = d->kv_dtype == DN_DECIDE_KV_FP8 ? DN_KV_FP8 : DN_KV_BF16;
    if (dn_decision_has(d, DN_DECIDE_INTEGRITY) && d->integrity == DN_DECIDE_INTEGRITY_TAG)
        c->check = true;
    else if (dn_decision_has(d, DN_DECIDE_INTEGRITY))
        c->check = false;
    const char *pool = node->pool->conf.name;
    if ((dn_decision_has(d, DN_DECIDE_DECODE_POOL) && strcmp(d->decode_pool, pool) != 0) ||
        (dn_decision_has(d, DN_DECIDE_PREFILL_POOL) && strcmp(d->prefill_pool, pool) != 0))
        return dn_err_set(err, DN_POLICY, "a policy chose a pool that this node does not have");
    return 0;
}

static void submit(struct dn_call *c)
{
    struct dn_node *node = c->loop->node;
    struct dn_err err = {0};
    if (!ask_policies(c, false))
        return;
    if (apply_decision(c, &err) != 0 || choose_max_tokens(c, &err) != 0 || check_stop_ids(c, &err) != 0) {
        fail(c, &err);
        return;
    }
    add_headers(c);
    struct dn_request *r = make_request(c);
    if (dn_sched_submit(node->sched, r, &err) != 0) {
        dn_request_free(r);
        fail(c, &err);
        return;
    }
    c->submitted = true; /* events come through the loop's queue, so not before this returns */
    dn_output_init(&c->output, node, &c->params, &c->prompt, c->name, dn_wall_ns() / DN_NS_PER_S);
    c->has_output = true;
}

/* ---- The answer
 * ------------------------------------------------------------------------------------------------------ */

static void open_stream(struct dn_call *c)
{
    if (c->streaming)
        return;
    c->streaming = true;
    c->status = 200;
    dn_http_add_header(c->http, "cache-control", "no-store");
    dn_http_add_header(c->http, "x-accel-buffering", "no");
    dn_http_start(c->http, 200, "text/event-stream; charset=utf-8");
}

static void complete(struct dn_call *c)
{
    c->submitted = false; /* the scheduler has forgotten it, or was told to */
    c->status = 200;
    if (c->params.stream) {
        dn_call_flush(c);
        finish(c);
        write_unsent(c);
        return;
    }
    struct dn_buf b = {0};
    dn_output_body(&c->output, &b);
    finish(c);
    dn_reply_json(c->http, 200, &b);
    dn_buf_release(&b);
}

void dn_call_event(struct dn_call *c, const struct dn_event *e, const struct dn_sampled *detail, uint64_t step_ns)
{
    if (!c->http || !c->submitted)
        return;
    if (e->kind == DN_EVENT_ERROR) {
        c->submitted = false;
        fail_code(c, (enum dn_code)e->code);
        return;
    }
    if (e->kind == DN_EVENT_STARTED)
        c->started_ns = e->at_ns;
    if (e->kind == DN_EVENT_TOKEN && !c->first_token_ns)
        c->first_token_ns = step_ns;
    bool stopped = dn_output_event(&c->output, e, detail);
    if (stopped)
        dn_sched_stopped(c->loop->node->sched, c->id);
    if (c->output.done)
        complete(c);
}

void dn_call_flush(struct dn_call *c)
{
    if (!c->http || c->finished || !c->params.stream || !c->has_output)
        return;
    size_t before = c->unsent.len;
    dn_output_stream(&c->output, &c->unsent);
    if (c->unsent.len == before)
        return;
    open_stream(c);
    c->last_write_ns = dn_now_ns();
    write_unsent(c);
    if (c->submitted && !c->paused && dn_http_paused(c->http)) {
        c->paused = true;
        dn_sched_pause(c->loop->node->sched, c->id, true);
    }
}

static void resume(struct dn_exchange *x)
{
    struct dn_call *c = call_of_exchange(x);
    write_unsent(c);
    if (!c->paused || dn_http_paused(c->http))
        return;
    c->paused = false;
    if (c->submitted)
        dn_sched_pause(c->loop->node->sched, c->id, false);
}

void dn_call_tick(struct dn_call *c, uint64_t now_ns)
{
    if (!c->http || !c->submitted || !c->params.stream || c->paused)
        return;
    uint64_t since = c->last_write_ns ? c->last_write_ns : c->arrival_ns;
    if (now_ns - since < (c->streaming ? quiet_ping_ns : quiet_first_ns))
        return;
    const char *comment = c->started_ns ? ": prefill\n\n" : ": queued\n\n";
    if (c->first_token_ns)
        comment = ": ping\n\n";
    open_stream(c);
    c->last_write_ns = now_ns;
    dn_http_write(c->http, comment, strlen(comment));
}
