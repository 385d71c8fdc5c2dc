#include "policy/host.h"

#include "base/clock.h"
#include "base/log.h"

#include <lua.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define BREAKER_WINDOW_NS (10 * DN_NS_PER_S)
#define BREAKER_FAILURES  20
#define BREAKER_OPEN_NS   (60 * DN_NS_PER_S)

static bool breaker_is_open(struct dn_policy_breaker *b, uint64_t now_ns)
{
    uint64_t until = atomic_load_explicit(&b->open_until_ns, memory_order_relaxed);
    if (!until)
        return false;
    if (now_ns < until)
        return true;
    atomic_store(&b->n_failures, 0);
    atomic_store(&b->open_until_ns, 0);
    return false;
}

/* True if this failure opened it. */
static bool breaker_count(struct dn_policy_breaker *b, uint64_t now_ns)
{
    uint64_t began = atomic_load(&b->window_ns);
    if (now_ns - began > BREAKER_WINDOW_NS) {
        atomic_store(&b->window_ns, now_ns);
        atomic_store(&b->n_failures, 0);
    }
    if (atomic_fetch_add(&b->n_failures, 1) + 1 != BREAKER_FAILURES)
        return false;
    atomic_store(&b->open_until_ns, now_ns + BREAKER_OPEN_NS);
    return true;
}

/* ---- The VM of a thread ---- */

int dn_policy_vm_open(struct dn_policy_vm **out, struct dn_policy *p, const char *name, struct dn_err *err)
{
    struct dn_policy_vm *pv = dn_alloc0(1, sizeof *pv);
    pv->policy = p;
    pv->buckets = p->buckets;
    snprintf(pv->thread, sizeof pv->thread, "%s", name);
    pv->set = dn_policy_current(p, &pv->generation);
    if (p->metrics.vm_bytes)
        pv->vm_bytes = dn_series(p->metrics.vm_bytes, (const char *[]){pv->thread});
    int rc = dn_policy_build(pv, err);
    if (rc) {
        dn_policy_vm_close(pv);
        return rc;
    }
    *out = pv;
    return 0;
}

void dn_policy_vm_close(struct dn_policy_vm *pv)
{
    if (!pv)
        return;
    dn_policy_unbuild(pv);
    dn_policy_set_put(pv->set);
    if (!pv->policy)
        dn_buckets_close(pv->buckets);
    free(pv);
}

size_t dn_policy_vm_memory(const struct dn_policy_vm *pv)
{
    return pv->vm ? dn_vm_memory(pv->vm) : 0;
}

/* Builds the state of the VM's set anew. */
static bool rebuild(struct dn_policy_vm *pv)
{
    dn_policy_unbuild(pv);
    memset(pv->log, 0, sizeof pv->log);
    if (dn_policy_build(pv, &pv->last_error) == 0) {
        if (pv->vm_bytes)
            dn_gauge_set(pv->vm_bytes, (double)dn_vm_memory(pv->vm));
        return true;
    }
    /* It loaded on the control thread: only a lack of memory or of time leads here. The next hook tries again. */
    struct dn_log_line l;
    dn_log_begin_limited(&l, DN_LOG_ERROR, "policy.vm_failed", pv->thread, dn_now_ns());
    dn_log_str(&l, "thread", pv->thread);
    dn_log_err(&l, &pv->last_error);
    dn_log_end(&l);
    return false;
}

static void count_recycled(const struct dn_policy_vm *pv)
{
    if (pv->policy && pv->policy->metrics.recycled)
        dn_counter_add(dn_series(pv->policy->metrics.recycled, (const char *[]){dn_vm_failure_name(pv->stale_why)}), 1);
}

/* Takes a new generation or replaces a broken state. True if the VM can run. */
static bool ready(struct dn_policy_vm *pv)
{
    if (pv->policy && atomic_load_explicit(&pv->policy->generation, memory_order_acquire) != pv->generation) {
        dn_policy_set_put(pv->set);
        pv->set = dn_policy_current(pv->policy, &pv->generation);
        return rebuild(pv);
    }
    if (pv->vm && !pv->is_stale)
        return true;
    count_recycled(pv);
    return rebuild(pv);
}

bool dn_policy_vm_idle(struct dn_policy_vm *pv)
{
    uint64_t before = pv->generation;
    bool was_stale = pv->is_stale;
    if (!ready(pv))
        return false;
    if (pv->generation != before || was_stale)
        return true;
    if (pv->vm_bytes)
        dn_gauge_set(pv->vm_bytes, (double)dn_vm_memory(pv->vm));
    return lua_gc(dn_vm_lua(pv->vm), LUA_GCSTEP, 20) == 0;
}

/* ---- One hook of one policy ---- */

struct call { /* what a hook of the whole list works on */
    struct dn_policy_vm *pv;
    enum dn_policy_hook hook;
    struct dn_decision *decision;
    struct dn_reject *reject;
    struct dn_policy_trace *trace;
};

static struct dn_policy_step *add_step(const struct call *c, size_t i, enum dn_policy_outcome outcome, uint64_t ns)
{
    struct dn_policy_trace *t = c->trace;
    if (!t || t->n_steps == DN_POLICY_TRACE_STEPS)
        return NULL;
    const struct dn_policy_file *f = &c->pv->set->file[i];
    struct dn_policy_step *s = &t->step[t->n_steps++];
    *s = (struct dn_policy_step){.hook = (uint8_t)c->hook, .outcome = (uint8_t)outcome, .is_shadow = f->is_shadow};
    s->ns = ns < UINT32_MAX ? (uint32_t)ns : UINT32_MAX;
    memcpy(s->policy, f->name, sizeof s->policy);
    return s;
}

static void log_failure(const struct call *c, const struct dn_policy_file *f, const char *kind, bool opened,
                        uint64_t now_ns)
{
    if (!c->pv->policy)
        return;
    struct dn_log_line l;
    char key[48];
    snprintf(key, sizeof key, "%s.%s", f->name, dn_policy_hook_name(c->hook));
    if (opened)
        dn_log_begin(&l, DN_LOG_ERROR, "policy.broken");
    else
        dn_log_begin_limited(&l, DN_LOG_ERROR, "policy.failed", key, now_ns);
    dn_log_str(&l, "policy", f->name);
    dn_log_str(&l, "hook", dn_policy_hook_name(c->hook));
    dn_log_str(&l, "kind", kind);
    dn_log_bool(&l, "shadow", f->is_shadow);
    dn_log_str(&l, "error", c->pv->last_error.text);
    dn_log_end(&l);
}

static void refuse(const struct call *c, const char *policy)
{
    struct dn_reject *r = c->reject;
    const struct dn_code_info *info = dn_code_info(DN_POLICY);
    memset(r, 0, sizeof *r);
    r->status = info->status;
    r->retry_after_s = 1;
    r->is_failure = true;
    snprintf(r->policy, sizeof r->policy, "%s", policy);
    snprintf(r->code, sizeof r->code, "%s", info->code);
    snprintf(r->message, sizeof r->message,
             "a policy of this node failed and the request was refused; the log of the node has the reason");
}

/* The error rule of a policy that failed or is not run. False: the request is refused. */
static bool apply_rule(const struct call *c, const struct dn_policy_file *f)
{
    if (f->is_shadow || c->hook == DN_HOOK_FINISH)
        return true;
    enum dn_policy_on_error rule = f->on_error[c->hook];
    if (rule == DN_ON_ERROR_RULE)
        rule = c->hook == DN_HOOK_ADMIT ? DN_ON_ERROR_REJECT : DN_ON_ERROR_IGNORE;
    if (c->pv->policy && c->pv->policy->metrics.fallback)
        dn_counter_add(dn_series(c->pv->policy->metrics.fallback, (const char *[]){dn_policy_hook_name(c->hook)}), 1);
    if (rule == DN_ON_ERROR_IGNORE)
        return true;
    refuse(c, f->name);
    return false;
}

static bool failed(const struct call *c, size_t i, enum dn_policy_error kind, uint64_t t0, uint64_t now_ns)
{
    struct dn_policy_vm *pv = c->pv;
    struct dn_policy_file *f = &pv->set->file[i];
    bool opened = pv->policy && breaker_count(&f->hook[c->hook].breaker, now_ns);
    dn_policy_count_error(pv, f, c->hook, kind);
    log_failure(c, f, dn_policy_error_name(kind), opened, now_ns);
    add_step(c, i, DN_POLICY_FAILED, now_ns - t0);
    return apply_rule(c, f);
}

static enum dn_policy_error kind_of(enum dn_vm_failure failure)
{
    if (failure == DN_VM_MEMORY)
        return DN_PE_MEMORY;
    return failure == DN_VM_INSTRUCTIONS || failure == DN_VM_TIME ? DN_PE_TIMEOUT : DN_PE_ERROR;
}

static enum dn_policy_error kind_parse(const char *word)
{
    return strcmp(word, "type") == 0 ? DN_PE_TYPE : strcmp(word, "field") == 0 ? DN_PE_FIELD : DN_PE_RANGE;
}

static void decided(const struct call *c, size_t i, uint32_t fields, uint64_t ns)
{
    const struct dn_policy_file *f = &c->pv->set->file[i];
    struct dn_policy_step *s = add_step(c, i, fields ? DN_POLICY_DECIDED : DN_POLICY_NO_OPINION, ns);
    if (s)
        s->fields = fields;
    if (f->is_shadow || !fields)
        return;
    dn_policy_pull_decision(c->pv, fields, c->decision);
    for (uint32_t left = fields; c->trace && left; left &= left - 1)
        memcpy(c->trace->by[__builtin_ctz(left)], f->name, sizeof f->name);
}

/* A rejection is on top of the stack. */
static bool rejected(const struct call *c, size_t i, uint64_t ns)
{
    struct dn_policy_vm *pv = c->pv;
    const struct dn_policy_file *f = &pv->set->file[i];
    add_step(c, i, DN_POLICY_REJECTED, ns);
    if (f->is_shadow || !c->reject) /* finish has none and dispatch.lua takes none from it */
        return true;
    dn_policy_pull_reject(pv, lua_gettop(dn_vm_lua(pv->vm)), c->reject);
    memcpy(c->reject->policy, f->name, sizeof c->reject->policy);
    if (pv->policy && pv->policy->metrics.rejects)
        dn_counter_add(dn_series(pv->policy->metrics.rejects, (const char *[]){f->name, c->reject->code}), 1);
    return false;
}

/* Runs policy i. False: the request is refused, c->reject says how. */
static bool run_one(const struct call *c, size_t i)
{
    struct dn_policy_vm *pv = c->pv;
    struct dn_policy_file *f = &pv->set->file[i];
    struct dn_policy_hook_state *h = &f->hook[c->hook];
    uint64_t t0 = dn_now_ns();
    if (pv->policy && breaker_is_open(&h->breaker, t0)) {
        add_step(c, i, DN_POLICY_SKIPPED, 0);
        return apply_rule(c, f);
    }
    lua_State *L = dn_vm_lua(pv->vm);
    int top = lua_gettop(L);
    lua_rawgeti(L, LUA_REGISTRYINDEX, pv->ref_run);
    lua_pushinteger(L, (lua_Integer)i + 1);
    lua_rawgeti(L, LUA_REGISTRYINDEX, pv->ref_hook[c->hook]);
    int rc = dn_vm_call(pv->vm, 2, 3, &pv->last_error);
    uint64_t now = dn_now_ns();
    if (h->calls) {
        dn_counter_add(h->calls, 1);
        dn_histogram_observe(h->seconds, (double)(now - t0) / 1e9);
    }
    if (rc) {
        enum dn_vm_failure failure = dn_vm_failure(pv->vm);
        if (failure != DN_VM_ERROR) {
            pv->is_stale = true;
            pv->stale_why = failure;
        }
        dn_policy_locate(f, c->hook, &pv->last_error);
        if (c->decision) /* a merge may have been cut in two: back to what was decided */
            dn_policy_push_decision(pv, c->decision);
        return failed(c, i, kind_of(failure), t0, now);
    }
    bool go_on = true;
    if (lua_istable(L, top + 1)) {
        lua_settop(L, top + 1);
        go_on = rejected(c, i, now - t0);
    } else if (lua_type(L, top + 1) == LUA_TSTRING) {
        dn_err_set(&pv->last_error, DN_POLICY, "%s", lua_tostring(L, top + 3));
        enum dn_policy_error kind = kind_parse(lua_tostring(L, top + 2));
        go_on = failed(c, i, kind, t0, now);
    } else {
        decided(c, i, (uint32_t)lua_tonumber(L, top + 1), now - t0);
    }
    lua_settop(L, top);
    return go_on;
}

/* ---- A hook of all policies ---- */

/* No VM: every policy from `from` on that has the hook counts as failed. */
static bool no_vm(const struct call *c, size_t from)
{
    for (size_t i = from; i < c->pv->set->n_files; i++) {
        struct dn_policy_file *f = &c->pv->set->file[i];
        if (f->hook[c->hook].exists && !f->is_shadow && !apply_rule(c, f))
            return false;
    }
    return true;
}

static void stamp(const struct dn_policy_vm *pv, struct dn_policy_trace *t)
{
    if (!t)
        return;
    t->generation = pv->generation;
    memcpy(t->revision, pv->set->revision, sizeof t->revision);
}

static void push_views(struct dn_policy_vm *pv, const struct dn_request_view *req, const struct dn_decision *decision)
{
    dn_policy_push_request(pv, req);
    if (decision)
        dn_policy_push_decision(pv, decision);
}

/* The next file from `from` on that has the hook, or n_files. */
static size_t next_with(const struct dn_policy_set *s, size_t from, enum dn_policy_hook h)
{
    while (from < s->n_files && !s->file[from].hook[h].exists)
        from++;
    return from;
}

static void count_decisions(const struct dn_policy_vm *pv, const struct dn_decision *d)
{
    if (!pv->policy || !pv->policy->metrics.decisions)
        return;
    const struct {
        enum dn_decision_field field;
        unsigned value;
    } row[] = {{DN_DECIDE_PREFILL_WEIGHTS, d->prefill_weights},
               {DN_DECIDE_DECODE_WEIGHTS, d->decode_weights},
               {DN_DECIDE_KV, d->kv_dtype},
               {DN_DECIDE_INTEGRITY, d->integrity}};
    for (size_t i = 0; i < sizeof row / sizeof *row; i++)
        if (dn_decision_has(d, row[i].field))
            dn_counter_add(pv->policy->metrics.decided[row[i].field][row[i].value], 1);
}

/* admit and route. */
static bool decide(const struct call *c, const struct dn_request_view *req, const struct dn_node_view *node)
{
    struct dn_policy_vm *pv = c->pv;
    memset(c->reject, 0, sizeof *c->reject);
    bool can_run = ready(pv), is_filled = false;
    stamp(pv, c->trace);
    if (!can_run)
        return no_vm(c, 0);
    size_t i = next_with(pv->set, 0, c->hook);
    while (i < pv->set->n_files) {
        if (!is_filled) {
            push_views(pv, req, c->decision);
            int rc = dn_policy_push_node(pv, node, &pv->last_error);
            if (rc) { /* no budget is near what this takes: memory was filled by what policies keep */
                pv->is_stale = true;
                pv->stale_why = dn_vm_failure(pv->vm);
                uint64_t now = dn_now_ns();
                if (!failed(c, i, kind_of(pv->stale_why), now, now))
                    return false;
                return no_vm(c, i + 1);
            }
            is_filled = true;
        }
        if (!run_one(c, i))
            return false;
        i = next_with(pv->set, i + 1, c->hook);
        /* The same generation goes on behind one that ran out of time or memory. */
        if (pv->is_stale && i < pv->set->n_files) {
            count_recycled(pv);
            if (!rebuild(pv))
                return no_vm(c, i);
            is_filled = false;
        }
    }
    return true;
}

bool dn_policy_admit(struct dn_policy_vm *pv, const struct dn_request_view *req, const struct dn_node_view *node,
                     struct dn_decision *decision, struct dn_reject *reject, struct dn_policy_trace *trace)
{
    const struct call c = {pv, DN_HOOK_ADMIT, decision, reject, trace};
    return decide(&c, req, node);
}

bool dn_policy_route(struct dn_policy_vm *pv, const struct dn_request_view *req, const struct dn_node_view *node,
                     struct dn_decision *decision, struct dn_reject *reject, struct dn_policy_trace *trace)
{
    const struct call c = {pv, DN_HOOK_ROUTE, decision, reject, trace};
    if (!decide(&c, req, node))
        return false;
    count_decisions(pv, decision);
    return true;
}

void dn_policy_finish(struct dn_policy_vm *pv, const struct dn_request_view *req, const struct dn_result_view *result)
{
    const struct call c = {.pv = pv, .hook = DN_HOOK_FINISH};
    if (!ready(pv))
        return;
    bool is_filled = false;
    for (size_t i = next_with(pv->set, 0, c.hook); i < pv->set->n_files; i = next_with(pv->set, i + 1, c.hook)) {
        if (pv->is_stale) {
            count_recycled(pv);
            if (!rebuild(pv))
                return;
            is_filled = false;
        }
        if (!is_filled) {
            push_views(pv, req, NULL);
            dn_policy_push_result(pv, result);
            is_filled = true;
        }
        run_one(&c, i);
    }
}
