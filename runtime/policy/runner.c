#include "policy/host.h"

#include "base/clock.h"
#include "base/log.h"

#include <lauxlib.h>
#include <lua.h>
#include <stdlib.h>
#include <string.h>

#define LOG_LINES_PER_S 10
/* Loading compiles, runs chunks and init: far more than a hook, and not while a request waits, but for a rebuild. */
#define LOAD_INSTRUCTIONS 20000000
#define LOAD_NS           (1000 * DN_NS_PER_MS)

/* The primitives that dispatch.lua asks for. Each has the struct dn_policy_vm as its upvalue; dispatch.lua has checked
 * types and ranges. */
static struct dn_policy_vm *self(lua_State *L)
{
    return lua_touserdata(L, lua_upvalueindex(1));
}

static int l_bucket_open(lua_State *L)
{
    unsigned id = 0;
    struct dn_err err;
    if (dn_bucket_open(self(L)->buckets, luaL_checkstring(L, 1), luaL_checknumber(L, 2), luaL_checknumber(L, 3), &id,
                       &err))
        return luaL_error(L, "%s", err.text);
    lua_pushinteger(L, (lua_Integer)id);
    return 1;
}

static int l_bucket_take(lua_State *L)
{
    size_t len;
    const char *key = luaL_checklstring(L, 2, &len);
    double wait_ms = 0;
    bool ok = dn_bucket_take(self(L)->buckets, (unsigned)luaL_checkinteger(L, 1), key, len, luaL_checknumber(L, 3),
                             dn_now_ns(), &wait_ms);
    lua_pushboolean(L, ok);
    lua_pushnumber(L, wait_ms);
    return 2;
}

static int l_bucket_give(lua_State *L)
{
    size_t len;
    const char *key = luaL_checklstring(L, 2, &len);
    dn_bucket_give(self(L)->buckets, (unsigned)luaL_checkinteger(L, 1), key, len, luaL_checknumber(L, 3), dn_now_ns());
    return 0;
}

static int l_bucket_level(lua_State *L)
{
    size_t len;
    const char *key = luaL_checklstring(L, 2, &len);
    lua_pushnumber(L, dn_bucket_level(self(L)->buckets, (unsigned)luaL_checkinteger(L, 1), key, len, dn_now_ns()));
    return 1;
}

static int l_hash(lua_State *L)
{
    size_t len;
    const char *key = luaL_checklstring(L, 1, &len);
    lua_pushnumber(L, dn_policy_hash(key, len, (uint64_t)luaL_checknumber(L, 2)));
    return 1;
}

static int l_counter_add(lua_State *L)
{
    struct dn_policy_vm *pv = self(L);
    const char *const label[] = {luaL_checkstring(L, 1), luaL_checkstring(L, 2), luaL_checkstring(L, 3)};
    if (pv->policy && pv->policy->metrics.user)
        dn_counter_add(dn_series(pv->policy->metrics.user, label), (uint64_t)luaL_checknumber(L, 4));
    return 0;
}

static int l_log(lua_State *L)
{
    struct dn_policy_vm *pv = self(L);
    const char *name = luaL_checkstring(L, 1), *level = luaL_checkstring(L, 2), *text = luaL_checkstring(L, 3);
    int at = dn_log_level_parse(level);
    if (!pv->policy || at < 0 || !dn_log_is_on((enum dn_log_level)at))
        return 0;
    uint64_t second = dn_now_ns() / DN_NS_PER_S;
    for (size_t i = 0; i < pv->set->n_files; i++) {
        if (strcmp(pv->set->file[i].name, name) != 0)
            continue;
        if (pv->log[i].second != second) {
            pv->log[i].second = second;
            pv->log[i].n_lines = 0;
        }
        if (pv->log[i].n_lines++ >= LOG_LINES_PER_S)
            return 0;
        break;
    }
    struct dn_log_line l;
    dn_log_begin(&l, (enum dn_log_level)at, "policy.log");
    dn_log_str(&l, "policy", name);
    dn_log_str(&l, "text", text);
    dn_log_end(&l);
    return 0;
}

static int l_line_of(lua_State *L)
{
    lua_Debug d;
    luaL_checktype(L, 1, LUA_TFUNCTION);
    lua_settop(L, 1);
    lua_getinfo(L, ">S", &d);
    lua_pushinteger(L, d.linedefined > 0 ? d.linedefined : 0);
    return 1;
}

static void push_host(lua_State *L, struct dn_policy_vm *pv)
{
    static const luaL_Reg functions[] = {{"bucket_open", l_bucket_open},
                                         {"bucket_take", l_bucket_take},
                                         {"bucket_give", l_bucket_give},
                                         {"bucket_level", l_bucket_level},
                                         {"counter_add", l_counter_add},
                                         {"hash", l_hash},
                                         {"log", l_log},
                                         {"line_of", l_line_of},
                                         {NULL, NULL}};
    lua_newtable(L);
    for (const luaL_Reg *f = functions; f->name; f++) {
        lua_pushlightuserdata(L, pv);
        lua_pushcclosure(L, f->func, 1);
        lua_setfield(L, -2, f->name);
    }
}

static void push_params(lua_State *L, const struct dn_policy_file *f)
{
    lua_createtable(L, 0, (int)f->n_params);
    for (size_t i = 0; i < f->n_params; i++) {
        const struct dn_policy_param *p = &f->param[i];
        if (p->kind == DN_PARAM_NUMBER)
            lua_pushnumber(L, p->number);
        else if (p->kind == DN_PARAM_BOOLEAN)
            lua_pushboolean(L, p->boolean);
        else
            lua_pushstring(L, p->string);
        lua_setfield(L, -2, p->name);
    }
}

static int ref_field(lua_State *L, int table, const char *name)
{
    lua_pushstring(L, name);
    lua_rawget(L, table);
    return luaL_ref(L, LUA_REGISTRYINDEX);
}

void dn_policy_locate(const struct dn_policy_file *f, enum dn_policy_hook hook, struct dn_err *err)
{
    size_t n = strlen(f->file);
    if (strncmp(err->text, f->file, n) == 0 && err->text[n] == ':')
        return;
    /* A place in our own Lua says nothing to the author: "lua/dunlin/dispatch.lua:12: reason". */
    const char *own = "lua/dunlin/", *reason = strstr(err->text, ": ");
    if (strncmp(err->text, own, strlen(own)) == 0 && reason)
        memmove(err->text, reason + 2, strlen(reason + 2) + 1);
    if (hook == DN_HOOK_INIT)
        dn_err_prefix(err, "%s", f->file);
    else
        dn_err_prefix(err, "%s:%d: %s", f->file, f->hook[hook].line, dn_policy_hook_name(hook));
}

/* Loads file i into the runner at stack index `runner`. */
static int load_one(struct dn_policy_vm *pv, int runner, size_t i, struct dn_err *err)
{
    struct dn_policy_file *f = &pv->set->file[i];
    lua_State *L = dn_vm_lua(pv->vm);
    dn_vm_push_sandbox(pv->vm);
    int env = lua_gettop(L);
    lua_getfield(L, runner, "env");
    lua_pushinteger(L, (lua_Integer)i + 1);
    lua_pushstring(L, f->file);
    lua_pushboolean(L, f->is_shadow);
    lua_pushvalue(L, env);
    int rc = dn_vm_call(pv->vm, 4, 0, err);
    if (rc)
        return rc;
    rc = dn_vm_load(pv->vm, f->source, f->len, f->file, true, err); /* takes env off the stack */
    if (rc)
        return rc;
    int chunk = lua_gettop(L);
    lua_getfield(L, runner, "load");
    lua_pushinteger(L, (lua_Integer)i + 1);
    lua_pushvalue(L, chunk);
    lua_pushlstring(L, f->source, f->len);
    push_params(L, f);
    lua_pushboolean(L, f->name[0] != '\0');
    rc = dn_vm_call(pv->vm, 5, 4, err);
    if (rc)
        return rc;
    if (pv->policy == NULL) { /* a trial names the set's policies, before any other thread sees it */
        strncpy(f->name, lua_tostring(L, -4), sizeof f->name - 1);
        for (int h = DN_HOOK_ADMIT; h <= DN_HOOK_FINISH; h++) {
            int at = chunk + h;
            f->hook[h].exists = lua_toboolean(L, at + 1);
            f->hook[h].line = (int)lua_tonumber(L, at + 1);
        }
    }
    lua_getfield(L, runner, "init");
    lua_pushinteger(L, (lua_Integer)i + 1);
    return dn_vm_call(pv->vm, 1, 0, err);
}

static int build(struct dn_policy_vm *pv, struct dn_err *err)
{
    lua_State *L = dn_vm_lua(pv->vm);
    int rc = dn_vm_require(pv->vm, "dunlin.dispatch", err);
    if (rc)
        return rc;
    lua_getfield(L, -1, "new");
    push_host(L, pv);
    rc = dn_vm_call(pv->vm, 1, 1, err);
    if (rc)
        return rc;
    int runner = lua_gettop(L);
    for (size_t i = 0; i < pv->set->n_files; i++) {
        rc = load_one(pv, runner, i, err);
        if (rc) {
            dn_policy_locate(&pv->set->file[i], DN_HOOK_INIT, err);
            return rc;
        }
        lua_settop(L, runner);
    }
    pv->ref_run = ref_field(L, runner, "run");
    pv->ref_describe = ref_field(L, runner, "describe");
    pv->ref_set_node = ref_field(L, runner, "set_node");
    lua_getfield(L, runner, "data");
    int data = lua_gettop(L);
    pv->ref_req = ref_field(L, data, "req");
    pv->ref_labels = ref_field(L, data, "labels");
    pv->ref_headers = ref_field(L, data, "headers");
    pv->ref_metadata = ref_field(L, data, "metadata");
    pv->ref_cached = ref_field(L, data, "cached");
    pv->ref_wish = ref_field(L, data, "wish");
    pv->ref_so_far = ref_field(L, data, "so_far");
    pv->ref_result = ref_field(L, data, "result");
    pv->ref_node = ref_field(L, data, "node");
    lua_getfield(L, data, "rows");
    int rows = lua_gettop(L);
    pv->ref_time = ref_field(L, rows, "time");
    pv->ref_kv = ref_field(L, rows, "kv");
    pv->ref_queue = ref_field(L, rows, "queue");
    pv->ref_rows = luaL_ref(L, LUA_REGISTRYINDEX);
    for (int h = 0; h < DN_HOOK_COUNT; h++) {
        lua_pushstring(L, dn_policy_hook_name((enum dn_policy_hook)h));
        pv->ref_hook[h] = luaL_ref(L, LUA_REGISTRYINDEX);
    }
    dn_policy_keys_init(pv);
    return 0;
}

void dn_policy_set_budget(struct dn_policy_vm *pv, bool is_host)
{
    /* A trial allows ten times as much: what a first call costs, and finding the name that a typo was meant to be. */
    uint64_t times = pv->policy ? 1 : 10;
    if (is_host)
        dn_vm_set_budget(pv->vm, LOAD_INSTRUCTIONS, LOAD_NS);
    else
        dn_vm_set_budget(pv->vm, times * pv->set->config.instructions, times * pv->set->config.wall_ns);
}

int dn_policy_build(struct dn_policy_vm *pv, struct dn_err *err)
{
    struct dn_vm_options o = {.name = "policy",
                              .code = DN_POLICY,
                              .memory_bytes = pv->set->config.memory_bytes,
                              .instructions = LOAD_INSTRUCTIONS,
                              .wall_ns = LOAD_NS};
    int rc = dn_vm_open(&pv->vm, &o, err);
    if (rc)
        return rc;
    pv->node_version = pv->node_shape = 0;
    pv->n_ref_pools = 0;
    pv->is_stale = false;
    rc = build(pv, err);
    if (rc) {
        dn_policy_unbuild(pv);
        return rc;
    }
    lua_settop(dn_vm_lua(pv->vm), 0);
    lua_gc(dn_vm_lua(pv->vm), LUA_GCCOLLECT, 0);
    dn_policy_set_budget(pv, false);
    return 0;
}

void dn_policy_unbuild(struct dn_policy_vm *pv)
{
    dn_vm_close(pv->vm);
    pv->vm = NULL;
}

int dn_policy_trial_open(struct dn_policy_vm **out, struct dn_policy_set *set, struct dn_err *err)
{
    struct dn_policy_vm *pv = dn_alloc0(1, sizeof *pv);
    pv->set = dn_policy_set_get(set);
    pv->buckets = dn_buckets_open(1024);
    int rc = dn_policy_build(pv, err);
    if (rc) {
        dn_policy_vm_close(pv);
        return rc;
    }
    *out = pv;
    return 0;
}

int dn_policy_unknown(const char *file, const char *source, size_t len, struct dn_buf *out, struct dn_err *err)
{
    struct dn_vm_options o = {
        .name = "policy", .code = DN_POLICY, .instructions = LOAD_INSTRUCTIONS, .wall_ns = LOAD_NS};
    struct dn_vm *vm = NULL;
    int rc = dn_vm_open(&vm, &o, err);
    if (rc)
        return rc;
    lua_State *L = dn_vm_lua(vm);
    rc = dn_vm_load(vm, source, len, file, false, err);
    if (rc == 0)
        rc = dn_vm_require(vm, "dunlin.dispatch", err);
    if (rc == 0) {
        lua_getfield(L, -1, "new");
        lua_newtable(L); /* no primitive is called before the file runs */
        rc = dn_vm_call(vm, 1, 1, err);
    }
    int runner = lua_gettop(L);
    if (rc == 0) {
        lua_getfield(L, runner, "env");
        lua_pushinteger(L, 1);
        lua_pushstring(L, file);
        lua_pushboolean(L, 0);
        dn_vm_push_sandbox(vm);
        rc = dn_vm_call(vm, 4, 0, err);
    }
    if (rc == 0) {
        lua_getfield(L, runner, "unknown");
        lua_pushinteger(L, 1);
        lua_pushlstring(L, source, len);
        rc = dn_vm_call(vm, 2, 1, err);
    }
    if (rc == 0)
        dn_buf_puts(out, lua_tostring(L, -1));
    dn_vm_close(vm);
    return rc;
}
