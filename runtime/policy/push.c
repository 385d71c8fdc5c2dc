#include "policy/host.h"

#include <lauxlib.h>
#include <lua.h>
#include <math.h>
#include <string.h>

#define HEADER_MAX_BYTES 1024

/* Names of fields are interned once a VM: looking one up by its reference is half the price of hashing it again. */
enum key {
    K_ID,
    K_ENDPOINT,
    K_MODEL,
    K_REQUESTED_MODEL,
    K_TENANT,
    K_KEY_ID,
    K_CLIENT_IP,
    K_USER,
    K_PROMPT_CACHE_KEY,
    K_RESPONSE_FORMAT,
    K_STREAM,
    K_N,
    K_TOOLS,
    K_MAX_TOKENS,
    K_TEMPERATURE,
    K_PROMPT_BYTES,
    K_PROMPT_TOKENS,
    K_KV,
    K_INTEGRITY,
    K_STATUS,
    K_CODE,
    K_FINISH_REASON,
    K_CACHED_TOKENS,
    K_COMPLETION_TOKENS,
    K_QUEUE_MS,
    K_TTFT_MS,
    K_TOTAL_MS,
    K_POOL,
    K_WEIGHTS,
    K_KV_DTYPE,
    K_HOUR,
    K_MINUTE,
    K_WDAY,
    K_PAGES_TOTAL,
    K_PAGES_FREE,
    K_FREE_RATIO,
    K_WAITING,
    K_OLDEST_MS,
    K_RUNNING,
    K_KV_FREE_RATIO,
    K_HEALTHY,
    K_COUNT
};

static const char *const key_names[K_COUNT] = {"id",
                                               "endpoint",
                                               "model",
                                               "requested_model",
                                               "tenant",
                                               "key_id",
                                               "client_ip",
                                               "user",
                                               "prompt_cache_key",
                                               "response_format",
                                               "stream",
                                               "n",
                                               "tools",
                                               "max_tokens",
                                               "temperature",
                                               "prompt_bytes",
                                               "prompt_tokens",
                                               "kv",
                                               "integrity",
                                               "status",
                                               "code",
                                               "finish_reason",
                                               "cached_tokens",
                                               "completion_tokens",
                                               "queue_ms",
                                               "ttft_ms",
                                               "total_ms",
                                               "pool",
                                               "weights",
                                               "kv_dtype",
                                               "hour",
                                               "minute",
                                               "wday",
                                               "pages_total",
                                               "pages_free",
                                               "free_ratio",
                                               "waiting",
                                               "oldest_ms",
                                               "running",
                                               "kv_free_ratio",
                                               "healthy"};

void dn_policy_keys_init(struct dn_policy_vm *pv)
{
    _Static_assert(K_COUNT <= sizeof pv->ref_key / sizeof *pv->ref_key, "room for all keys");
    lua_State *L = dn_vm_lua(pv->vm);
    for (int i = 0; i < K_COUNT; i++) {
        lua_pushstring(L, key_names[i]);
        pv->ref_key[i] = luaL_ref(L, LUA_REGISTRYINDEX);
    }
    pv->n_keys = K_COUNT;
}

static void push_ref(lua_State *L, int ref)
{
    lua_rawgeti(L, LUA_REGISTRYINDEX, ref);
}

/* The put functions set a field of the table on top of the stack. */
static void put_string(struct dn_policy_vm *pv, lua_State *L, enum key k, const char *s)
{
    push_ref(L, pv->ref_key[k]);
    if (s)
        lua_pushstring(L, s);
    else
        lua_pushnil(L);
    lua_rawset(L, -3);
}

static void put_number(struct dn_policy_vm *pv, lua_State *L, enum key k, double v, bool is_given)
{
    push_ref(L, pv->ref_key[k]);
    if (is_given)
        lua_pushnumber(L, v);
    else
        lua_pushnil(L);
    lua_rawset(L, -3);
}

/* Removes every field of the table on top of the stack. */
static void clear(lua_State *L)
{
    lua_pushnil(L);
    while (lua_next(L, -2)) {
        lua_pop(L, 1);
        lua_pushvalue(L, -1);
        lua_pushnil(L);
        lua_rawset(L, -4);
    }
}

static void fill_pairs(lua_State *L, int ref, const struct dn_view_pair *pair, size_t n, size_t cut)
{
    push_ref(L, ref);
    clear(L);
    for (size_t i = 0; i < n && i < DN_VIEW_PAIRS_MAX; i++) {
        lua_pushstring(L, pair[i].name);
        if (pair[i].value)
            lua_pushlstring(L, pair[i].value, strnlen(pair[i].value, cut));
        else
            lua_pushboolean(L, 1);
        lua_rawset(L, -3);
    }
    lua_pop(L, 1);
}

void dn_policy_push_request(struct dn_policy_vm *pv, const struct dn_request_view *r)
{
    lua_State *L = dn_vm_lua(pv->vm);
    fill_pairs(L, pv->ref_labels, r->label, r->n_labels, SIZE_MAX);
    fill_pairs(L, pv->ref_headers, r->header, r->n_headers, HEADER_MAX_BYTES);
    fill_pairs(L, pv->ref_metadata, r->metadata, r->n_metadata, SIZE_MAX);
    push_ref(L, pv->ref_cached);
    for (int k = 0; k < DN_DECIDE_KV_COUNT; k++) {
        lua_pushnumber(L, (double)r->cached_tokens[k]);
        lua_setfield(L, -2, dn_decide_kv_name((enum dn_decide_kv)k));
    }
    push_ref(L, pv->ref_wish);
    put_string(pv, L, K_KV, r->wish_kv);
    put_string(pv, L, K_INTEGRITY, r->wish_integrity);
    push_ref(L, pv->ref_req);
    put_string(pv, L, K_ID, r->id ? r->id : "");
    put_string(pv, L, K_ENDPOINT, r->endpoint);
    put_string(pv, L, K_MODEL, r->model);
    put_string(pv, L, K_REQUESTED_MODEL, r->requested_model);
    put_string(pv, L, K_TENANT, r->tenant);
    put_string(pv, L, K_KEY_ID, r->key_id);
    put_string(pv, L, K_CLIENT_IP, r->client_ip);
    put_string(pv, L, K_USER, r->user);
    put_string(pv, L, K_PROMPT_CACHE_KEY, r->prompt_cache_key);
    put_string(pv, L, K_RESPONSE_FORMAT, r->response_format);
    push_ref(L, pv->ref_key[K_STREAM]);
    lua_pushboolean(L, r->stream);
    lua_rawset(L, -3);
    put_number(pv, L, K_N, r->n ? r->n : 1, true);
    put_number(pv, L, K_TOOLS, r->n_tools, true);
    put_number(pv, L, K_MAX_TOKENS, (double)r->max_tokens, r->max_tokens >= 0);
    put_number(pv, L, K_TEMPERATURE, r->temperature, r->temperature >= 0);
    put_number(pv, L, K_PROMPT_BYTES, (double)r->prompt_bytes, true);
    put_number(pv, L, K_PROMPT_TOKENS, (double)r->prompt_tokens, r->prompt_tokens >= 0);
    lua_pop(L, 3);
}

static void set_number(lua_State *L, const char *name, double v)
{
    lua_pushnumber(L, v);
    lua_setfield(L, -2, name);
}

static void push_weights(lua_State *L, const bool has[DN_DECIDE_W_COUNT])
{
    lua_newtable(L);
    for (int w = 0; w < DN_DECIDE_W_COUNT; w++)
        if (has[w]) {
            lua_pushboolean(L, 1);
            lua_setfield(L, -2, dn_decide_weights_name((enum dn_decide_weights)w));
        }
}

static void push_pools(lua_State *L, const struct dn_node_view *node)
{
    lua_newtable(L);
    for (size_t i = 0; i < node->n_pools && i < DN_VIEW_POOLS_MAX; i++) {
        const struct dn_pool_view *p = &node->pool[i];
        lua_newtable(L);
        lua_pushstring(L, p->role ? p->role : "both");
        lua_setfield(L, -2, "role");
        push_weights(L, p->has_weights);
        lua_setfield(L, -2, "weights");
        lua_setfield(L, -2, p->name);
    }
}

static void push_models(lua_State *L, const struct dn_node_view *node)
{
    lua_newtable(L);
    for (size_t i = 0; i < node->n_models && i < DN_VIEW_MODELS_MAX; i++) {
        const struct dn_model_view *m = &node->model[i];
        lua_newtable(L);
        push_weights(L, m->has_weights);
        lua_setfield(L, -2, "weights");
        lua_newtable(L);
        for (int k = 0; k < DN_DECIDE_KV_COUNT; k++)
            if (m->has_kv[k]) {
                lua_pushboolean(L, 1);
                lua_setfield(L, -2, dn_decide_kv_name((enum dn_decide_kv)k));
            }
        lua_setfield(L, -2, "kv_dtypes");
        set_number(L, "context", (double)m->context_tokens);
        lua_setfield(L, -2, m->name);
    }
}

/* FNV-1a over what decides which tables there are. */
static uint64_t mix(uint64_t h, const void *data, size_t n)
{
    for (size_t i = 0; i < n; i++)
        h = (h ^ ((const unsigned char *)data)[i]) * 0x100000001b3u;
    return h;
}

static uint64_t shape_of(const struct dn_node_view *node)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < node->n_pools; i++) {
        const struct dn_pool_view *p = &node->pool[i];
        h = mix(h, p->name, strlen(p->name) + 1);
        h = mix(h, p->role ? p->role : "both", p->role ? strlen(p->role) + 1 : 5);
        h = mix(h, p->has_weights, sizeof p->has_weights);
    }
    for (size_t i = 0; i < node->n_models; i++) {
        const struct dn_model_view *m = &node->model[i];
        h = mix(h, m->name, strlen(m->name) + 1);
        h = mix(h, &m->context_tokens, sizeof m->context_tokens);
        h = mix(h, m->has_weights, sizeof m->has_weights);
        h = mix(h, m->has_kv, sizeof m->has_kv);
    }
    return h ? h : 1;
}

/* Keeps the tables of the pools at hand for put_numbers(). */
static void ref_pools(struct dn_policy_vm *pv, const struct dn_node_view *node)
{
    lua_State *L = dn_vm_lua(pv->vm);
    int top = lua_gettop(L);
    for (unsigned i = 0; i < pv->n_ref_pools; i++)
        luaL_unref(L, LUA_REGISTRYINDEX, pv->ref_pool[i]);
    pv->n_ref_pools = 0;
    push_ref(L, pv->ref_rows);
    lua_getfield(L, -1, "pools");
    lua_getfield(L, -1, "rows");
    for (size_t i = 0; i < node->n_pools && i < DN_VIEW_POOLS_MAX; i++) {
        lua_getfield(L, top + 3, node->pool[i].name);
        lua_getfield(L, -1, "data");
        pv->ref_pool[pv->n_ref_pools++] = luaL_ref(L, LUA_REGISTRYINDEX);
        lua_pop(L, 1);
    }
    lua_settop(L, top);
}

/* The numbers of a snapshot whose names are those of the one before: fifteen stores in place of twenty tables. */
static void put_numbers(struct dn_policy_vm *pv, const struct dn_node_view *node)
{
    lua_State *L = dn_vm_lua(pv->vm);
    int top = lua_gettop(L);
    push_ref(L, pv->ref_time);
    put_number(pv, L, K_HOUR, node->hour, true);
    put_number(pv, L, K_MINUTE, node->minute, true);
    put_number(pv, L, K_WDAY, node->wday, true);
    push_ref(L, pv->ref_kv);
    put_number(pv, L, K_PAGES_TOTAL, (double)node->kv_pages_total, true);
    put_number(pv, L, K_PAGES_FREE, (double)node->kv_pages_free, true);
    put_number(pv, L, K_FREE_RATIO, node->kv_free_ratio, true);
    push_ref(L, pv->ref_queue);
    put_number(pv, L, K_WAITING, (double)node->queue_waiting, true);
    put_number(pv, L, K_OLDEST_MS, (double)node->queue_oldest_ms, true);
    push_ref(L, pv->ref_node);
    put_number(pv, L, K_RUNNING, (double)node->running, true);
    lua_settop(L, top);
    for (unsigned i = 0; i < pv->n_ref_pools; i++) {
        const struct dn_pool_view *p = &node->pool[i];
        push_ref(L, pv->ref_pool[i]);
        put_number(pv, L, K_RUNNING, (double)p->running, true);
        put_number(pv, L, K_WAITING, (double)p->waiting, true);
        put_number(pv, L, K_KV_FREE_RATIO, p->kv_free_ratio, true);
        push_ref(L, pv->ref_key[K_HEALTHY]);
        lua_pushboolean(L, p->is_healthy);
        lua_rawset(L, -3);
        lua_settop(L, top);
    }
}

int dn_policy_push_node(struct dn_policy_vm *pv, const struct dn_node_view *node, struct dn_err *err)
{
    if (node->version && node->version == pv->node_version)
        return 0;
    uint64_t shape = shape_of(node);
    if (shape == pv->node_shape) {
        put_numbers(pv, node);
        pv->node_version = node->version;
        return 0;
    }
    lua_State *L = dn_vm_lua(pv->vm);
    push_ref(L, pv->ref_set_node);
    lua_newtable(L);
    for (int i = 0; i < 3; i++) { /* filled by put_numbers */
        static const char *const name[] = {"time", "kv", "queue"};
        lua_newtable(L);
        lua_setfield(L, -2, name[i]);
    }
    push_pools(L, node);
    lua_setfield(L, -2, "pools");
    push_models(L, node);
    lua_setfield(L, -2, "models");
    pv->node_version = pv->node_shape = 0;
    dn_policy_set_budget(pv, true); /* many models take longer than a policy may */
    int rc = dn_vm_call(pv->vm, 1, 0, err);
    dn_policy_set_budget(pv, false);
    if (rc)
        return rc;
    ref_pools(pv, node);
    put_numbers(pv, node);
    pv->node_shape = shape;
    pv->node_version = node->version;
    return 0;
}

void dn_policy_push_result(struct dn_policy_vm *pv, const struct dn_result_view *r)
{
    lua_State *L = dn_vm_lua(pv->vm);
    push_ref(L, pv->ref_result);
    put_number(pv, L, K_STATUS, r->status, true);
    put_string(pv, L, K_CODE, r->code);
    put_string(pv, L, K_FINISH_REASON, r->finish_reason);
    put_number(pv, L, K_PROMPT_TOKENS, (double)r->prompt_tokens, true);
    put_number(pv, L, K_CACHED_TOKENS, (double)r->cached_tokens, true);
    put_number(pv, L, K_COMPLETION_TOKENS, (double)r->completion_tokens, true);
    put_number(pv, L, K_QUEUE_MS, r->queue_ms, true);
    put_number(pv, L, K_TTFT_MS, r->ttft_ms, true);
    put_number(pv, L, K_TOTAL_MS, r->total_ms, true);
    put_string(pv, L, K_MODEL, r->model);
    put_string(pv, L, K_POOL, r->pool);
    put_string(pv, L, K_WEIGHTS, r->weights);
    put_string(pv, L, K_KV_DTYPE, r->kv_dtype);
    put_string(pv, L, K_INTEGRITY, r->integrity);
    lua_pop(L, 1);
}

/* Pushes the value of a field that is set. */
static void push_field(lua_State *L, const struct dn_decision *d, enum dn_decision_field f)
{
    switch (f) {
    case DN_DECIDE_MODEL:
        lua_pushstring(L, d->model);
        break;
    case DN_DECIDE_PRIORITY:
        lua_pushnumber(L, d->priority);
        break;
    case DN_DECIDE_MAX_TOKENS:
        lua_pushnumber(L, (double)d->max_tokens);
        break;
    case DN_DECIDE_QUEUE_TIMEOUT:
        lua_pushnumber(L, (double)d->queue_timeout_ms);
        break;
    case DN_DECIDE_PREFILL_POOL:
        lua_pushstring(L, d->prefill_pool);
        break;
    case DN_DECIDE_DECODE_POOL:
        lua_pushstring(L, d->decode_pool);
        break;
    case DN_DECIDE_PREFILL_WEIGHTS:
        lua_pushstring(L, dn_decide_weights_name(d->prefill_weights));
        break;
    case DN_DECIDE_DECODE_WEIGHTS:
        lua_pushstring(L, dn_decide_weights_name(d->decode_weights));
        break;
    case DN_DECIDE_KV:
        lua_pushstring(L, dn_decide_kv_name(d->kv_dtype));
        break;
    case DN_DECIDE_INTEGRITY:
        lua_pushstring(L, dn_decide_integrity_name(d->integrity));
        break;
    case DN_DECIDE_CACHE_SALT:
        lua_pushstring(L, d->cache_salt);
        break;
    case DN_DECIDE_CACHE_WRITE:
        lua_pushboolean(L, d->cache_write);
        break;
    case DN_DECIDE_REASON:
        lua_pushstring(L, d->reason);
        break;
    case DN_DECIDE_HEADERS:
        lua_newtable(L);
        for (unsigned i = 0; i < d->n_headers; i++) {
            lua_pushstring(L, d->header[i].value);
            lua_setfield(L, -2, d->header[i].name);
        }
        break;
    case DN_DECIDE_COUNT:
        lua_pushnil(L);
        break;
    }
}

void dn_policy_push_decision(struct dn_policy_vm *pv, const struct dn_decision *d)
{
    lua_State *L = dn_vm_lua(pv->vm);
    push_ref(L, pv->ref_so_far);
    clear(L);
    for (uint32_t left = d->set; left; left &= left - 1) {
        enum dn_decision_field f = (enum dn_decision_field)__builtin_ctz(left);
        lua_pushstring(L, dn_decision_field_name(f));
        push_field(L, d, f);
        lua_rawset(L, -3);
    }
    lua_pop(L, 1);
}

/* contract.lua has checked types and lengths; what does not fit all the same is a bug of ours. */
static void take_text(lua_State *L, char *out, size_t cap)
{
    size_t len = 0;
    const char *s = lua_tolstring(L, -1, &len);
    DN_BUG_ON(!s || len >= cap);
    memcpy(out, s, len + 1);
}

static unsigned word(lua_State *L, const char *(*name)(unsigned), unsigned count)
{
    const char *s = lua_tostring(L, -1);
    for (unsigned i = 0; i < count; i++)
        if (s && strcmp(s, name(i)) == 0)
            return i;
    dn_bug(__FILE__, __LINE__, "a word that contract.lua has and decision.h has not");
}

static const char *weights_name(unsigned i)
{
    return dn_decide_weights_name((enum dn_decide_weights)i);
}

static const char *kv_name(unsigned i)
{
    return dn_decide_kv_name((enum dn_decide_kv)i);
}

static const char *integrity_name(unsigned i)
{
    return dn_decide_integrity_name((enum dn_decide_integrity)i);
}

/* From the table of headers on top of the stack, kept sorted so that what clients see does not depend on hashing. */
static void take_headers(lua_State *L, struct dn_decision *d)
{
    d->n_headers = 0;
    lua_pushnil(L);
    while (lua_next(L, -2)) {
        const char *name = lua_tostring(L, -2);
        unsigned at = d->n_headers;
        DN_BUG_ON(at == DN_DECIDE_HEADERS_MAX);
        for (; at > 0 && strcmp(d->header[at - 1].name, name) > 0; at--)
            d->header[at] = d->header[at - 1];
        take_text(L, d->header[at].value, sizeof d->header[at].value);
        lua_pop(L, 1);
        take_text(L, d->header[at].name, sizeof d->header[at].name);
        d->n_headers++;
    }
}

static void take_field(lua_State *L, struct dn_decision *d, enum dn_decision_field f)
{
    switch (f) {
    case DN_DECIDE_MODEL:
        take_text(L, d->model, sizeof d->model);
        break;
    case DN_DECIDE_PRIORITY:
        d->priority = (int)lua_tonumber(L, -1);
        break;
    case DN_DECIDE_MAX_TOKENS:
        d->max_tokens = (int64_t)lua_tonumber(L, -1);
        break;
    case DN_DECIDE_QUEUE_TIMEOUT:
        d->queue_timeout_ms = (int64_t)lua_tonumber(L, -1);
        break;
    case DN_DECIDE_PREFILL_POOL:
        take_text(L, d->prefill_pool, sizeof d->prefill_pool);
        break;
    case DN_DECIDE_DECODE_POOL:
        take_text(L, d->decode_pool, sizeof d->decode_pool);
        break;
    case DN_DECIDE_PREFILL_WEIGHTS:
        d->prefill_weights = (enum dn_decide_weights)word(L, weights_name, DN_DECIDE_W_COUNT);
        break;
    case DN_DECIDE_DECODE_WEIGHTS:
        d->decode_weights = (enum dn_decide_weights)word(L, weights_name, DN_DECIDE_W_COUNT);
        break;
    case DN_DECIDE_KV:
        d->kv_dtype = (enum dn_decide_kv)word(L, kv_name, DN_DECIDE_KV_COUNT);
        break;
    case DN_DECIDE_INTEGRITY:
        d->integrity = (enum dn_decide_integrity)word(L, integrity_name, DN_DECIDE_INTEGRITY_COUNT);
        break;
    case DN_DECIDE_CACHE_SALT:
        take_text(L, d->cache_salt, sizeof d->cache_salt);
        break;
    case DN_DECIDE_CACHE_WRITE:
        d->cache_write = lua_toboolean(L, -1);
        break;
    case DN_DECIDE_REASON:
        take_text(L, d->reason, sizeof d->reason);
        break;
    case DN_DECIDE_HEADERS:
        take_headers(L, d);
        break;
    case DN_DECIDE_COUNT:
        break;
    }
}

void dn_policy_pull_decision(struct dn_policy_vm *pv, uint32_t fields, struct dn_decision *d)
{
    lua_State *L = dn_vm_lua(pv->vm);
    push_ref(L, pv->ref_so_far);
    for (uint32_t left = fields; left; left &= left - 1) {
        enum dn_decision_field f = (enum dn_decision_field)__builtin_ctz(left);
        lua_pushstring(L, dn_decision_field_name(f));
        lua_rawget(L, -2);
        take_field(L, d, f);
        lua_pop(L, 1);
        d->set |= 1u << f;
    }
    lua_pop(L, 1);
}

void dn_policy_pull_reject(struct dn_policy_vm *pv, int table_idx, struct dn_reject *r)
{
    lua_State *L = dn_vm_lua(pv->vm);
    memset(r, 0, sizeof *r);
    lua_getfield(L, table_idx, "status");
    r->status = (int)lua_tonumber(L, -1);
    lua_getfield(L, table_idx, "code");
    take_text(L, r->code, sizeof r->code);
    lua_getfield(L, table_idx, "message");
    take_text(L, r->message, sizeof r->message);
    lua_getfield(L, table_idx, "retry_after");
    r->retry_after_s = lua_isnil(L, -1) ? -1 : (int)lua_tonumber(L, -1);
    lua_getfield(L, table_idx, "param");
    if (!lua_isnil(L, -1))
        take_text(L, r->param, sizeof r->param);
    lua_pop(L, 5);
}
