#include "script/vm.h"

#include "base/buf.h"
#include "base/clock.h"

#include <lauxlib.h>
#include <lua.h>
#include <luajit.h>
#include <lualib.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define REP_MAX       65536
#define TRACEBACK_MAX 4096

struct dn_vm {
    lua_State *L;
    struct dn_vm_options options;
    char name[32];
    size_t used_bytes;
    bool capped;     /* inside a call: the allocator enforces the cap */
    int depth;       /* of dn_vm_call */
    uint64_t n_left; /* instructions */
    uint64_t deadline_ns;
    uint64_t cpu_deadline_ns; /* of the thread's own clock; 0 until the first count of a call */
    enum dn_vm_failure spent; /* DN_VM_OK until a budget is spent; then the hook fires at every instruction */
    enum dn_vm_failure failure;
    char traceback[TRACEBACK_MAX];
};

/* Registry keys. */
static const char key_vm, key_strings, key_loaded;

static void *vm_alloc(void *context, void *p, size_t old_size, size_t size)
{
    struct dn_vm *vm = context;
    if (size == 0) {
        free(p);
        vm->used_bytes -= p ? old_size : 0;
        return NULL;
    }
    size_t before = p ? old_size : 0;
    if (vm->capped && size > before &&
        (size > vm->options.memory_bytes || vm->used_bytes - before > vm->options.memory_bytes - size))
        return NULL;
    void *q = realloc(p, size);
    if (q)
        vm->used_bytes += size - before;
    return q;
}

static struct dn_vm *vm_of(lua_State *L)
{
    lua_pushlightuserdata(L, (void *)&key_vm);
    lua_rawget(L, LUA_REGISTRYINDEX);
    struct dn_vm *vm = lua_touserdata(L, -1);
    lua_pop(L, 1);
    return vm;
}

static uint64_t cpu_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * DN_NS_PER_S + (uint64_t)t.tv_nsec;
}

static void on_count(lua_State *L, lua_Debug *record);

/* Whether the deadline has passed. Time in which the thread did not run is the system's, not the code's: on a busy
 * machine a slice of some ms would otherwise spend the 1 ms of a policy that needs 20 us. */
static bool is_late(struct dn_vm *vm)
{
    uint64_t now = dn_now_ns();
    if (!vm->cpu_deadline_ns)
        vm->cpu_deadline_ns = cpu_now_ns() + vm->options.wall_ns;
    if (now < vm->deadline_ns)
        return false;
    uint64_t cpu = cpu_now_ns();
    if (cpu >= vm->cpu_deadline_ns)
        return true;
    vm->deadline_ns = now + (vm->cpu_deadline_ns - cpu);
    return false;
}

/* Takes n instructions off the budget of the running call; raises when it or the time is spent. */
static void spend(lua_State *L, uint64_t n)
{
    void *context;
    lua_getallocf(L, &context);
    struct dn_vm *vm = context;
    if (!vm->spent) {
        if (vm->n_left <= n)
            vm->spent = DN_VM_INSTRUCTIONS;
        else if (is_late(vm))
            vm->spent = DN_VM_TIME;
        else {
            vm->n_left -= n;
            return;
        }
        lua_sethook(L, on_count, LUA_MASKCOUNT, 1);
    }
    luaL_error(L, "%s budget spent", dn_vm_failure_name(vm->spent));
}

static void on_count(lua_State *L, lua_Debug *record)
{
    spend(L, DN_VM_STEP);
}

/* A function of the table library with a look at the budget behind it: a table that a policy made while it was loaded
 * keeps table.concat busy for a millisecond, and hooks would count that as one instruction. */
static int guarded(lua_State *L)
{
    int n = lua_tocfunction(L, lua_upvalueindex(1))(L); /* in this frame, so that errors name the caller's line */
    spend(L, 1);
    return n;
}

/* `<` for table.sort, which otherwise compares without end and without a look at the budget. */
static int less(lua_State *L)
{
    spend(L, 1);
    lua_pushboolean(L, lua_lessthan(L, 1, 2));
    return 1;
}

static int safe_sort(lua_State *L)
{
    lua_settop(L, 2);
    if (lua_isnil(L, 2)) {
        lua_pushcfunction(L, less);
        lua_replace(L, 2);
    }
    return lua_tocfunction(L, lua_upvalueindex(1))(L);
}

/* Message handler: keeps the message, puts the traceback aside. Values that are not strings are described, never
 * called. */
static int on_error(lua_State *L)
{
    struct dn_vm *vm = vm_of(L);
    if (lua_type(L, 1) == LUA_TNUMBER)
        lua_tostring(L, 1);
    if (lua_type(L, 1) != LUA_TSTRING) {
        lua_pushfstring(L, "error with a value of type %s instead of a message", luaL_typename(L, 1));
        lua_replace(L, 1);
    }
    luaL_traceback(L, L, NULL, 1);
    size_t n;
    const char *text = lua_tolstring(L, -1, &n);
    n = n < TRACEBACK_MAX - 1 ? n : TRACEBACK_MAX - 1;
    memcpy(vm->traceback, text, n);
    vm->traceback[n] = '\0';
    lua_settop(L, 1);
    return 1;
}

/* What going over n bytes of a string costs. Only long strings matter: hooks count the call itself. */
static void spend_bytes(lua_State *L, size_t n)
{
    if (n >= 4096)
        spend(L, n / 64);
}

static int safe_rep(lua_State *L)
{
    size_t len;
    const char *s = luaL_checklstring(L, 1, &len);
    lua_Number n = luaL_checknumber(L, 2);
    if (!(n >= 1) || len == 0) {
        lua_pushlstring(L, "", 0);
        return 1;
    }
    if (n > REP_MAX || (double)len * n > REP_MAX)
        return luaL_error(L, "string.rep: more than %d bytes", REP_MAX);
    /* Short strings go in by blocks: byte by byte 64 KiB take 0.3 ms, in which no budget is looked at. */
    char block[512];
    size_t n_left = (size_t)n, n_block = len <= sizeof block / 2 ? sizeof block / len : 0;
    for (size_t i = 0; i < n_block && i < n_left; i++)
        memcpy(block + i * len, s, len);
    luaL_Buffer b;
    luaL_buffinit(L, &b);
    for (; n_block && n_left >= n_block; n_left -= n_block)
        luaL_addlstring(&b, block, n_block * len);
    for (; n_left > 0; n_left--)
        luaL_addlstring(&b, s, len);
    luaL_pushresult(&b);
    return 1;
}

static int safe_find(lua_State *L)
{
    size_t len, n;
    const char *s = luaL_checklstring(L, 1, &len);
    const char *what = luaL_checklstring(L, 2, &n);
    lua_Number from = luaL_optnumber(L, 3, 1);
    double start = from < 0 ? (double)len + from : from - 1;
    if (!(start > 0))
        start = 0;
    if (start > (double)len) {
        lua_pushnil(L);
        return 1;
    }
    const char *at = n ? memmem(s + (size_t)start, len - (size_t)start, what, n) : s + (size_t)start;
    spend_bytes(L, at ? (size_t)(at - s) - (size_t)start : len - (size_t)start);
    if (!at) {
        lua_pushnil(L);
        return 1;
    }
    lua_pushinteger(L, at - s + 1);
    lua_pushinteger(L, at - s + (lua_Integer)n);
    return 2;
}

/* lower, upper and reverse: LuaJIT's own, which is the upvalue, with the price of a long string. */
static int safe_map(lua_State *L)
{
    size_t len;
    luaL_checklstring(L, 1, &len);
    spend_bytes(L, len);
    lua_settop(L, 1);
    lua_pushvalue(L, lua_upvalueindex(1));
    lua_insert(L, 1);
    lua_call(L, 1, 1);
    return 1;
}

/* load(text [, name [, mode ignored [, env]]]) for host code: strings only, never bytecode. */
static int host_load(lua_State *L)
{
    size_t len;
    const char *source = luaL_checklstring(L, 1, &len);
    const char *name = luaL_optstring(L, 2, "=load");
    lua_settop(L, 4);
    if (luaL_loadbufferx(L, source, len, name, "t")) {
        lua_pushnil(L);
        lua_insert(L, -2);
        return 2;
    }
    if (!lua_isnil(L, 4)) {
        lua_pushvalue(L, 4);
        lua_setfenv(L, -2);
    }
    return 1;
}

static const struct dn_vm_module *find_module(const char *name)
{
    for (const struct dn_vm_module *m = dn_vm_modules; m->name; m++)
        if (strcmp(m->name, name) == 0)
            return m;
    return NULL;
}

static int host_require(lua_State *L)
{
    const char *name = luaL_checkstring(L, 1);
    lua_settop(L, 1);
    lua_pushlightuserdata(L, (void *)&key_loaded);
    lua_rawget(L, LUA_REGISTRYINDEX);
    lua_getfield(L, 2, name);
    if (lua_type(L, 3) == LUA_TBOOLEAN && !lua_toboolean(L, 3))
        return luaL_error(L, "module \"%s\" requires itself", name);
    if (!lua_isnil(L, 3))
        return 1;
    lua_pop(L, 1);
    const struct dn_vm_module *m = find_module(name);
    if (!m)
        return luaL_error(L, "no module \"%s\" in the program", name);
    lua_pushfstring(L, "@%s", m->path);
    if (luaL_loadbufferx(L, m->source, m->len, lua_tostring(L, -1), "t"))
        return lua_error(L);
    lua_pushboolean(L, 0);
    lua_setfield(L, 2, name);
    lua_pushvalue(L, 1);
    lua_call(L, 1, 1);
    if (lua_isnil(L, -1)) {
        lua_pop(L, 1);
        lua_pushboolean(L, 1);
    }
    lua_pushvalue(L, -1);
    lua_setfield(L, 2, name);
    return 1;
}

static void open_library(lua_State *L, lua_CFunction open, const char *name)
{
    lua_pushcfunction(L, open);
    lua_pushstring(L, name);
    lua_call(L, 1, 0);
}

/* Copies the fields `names` of the table at `from` into a new table. */
static void push_copy(lua_State *L, int from, const char *const *names)
{
    lua_newtable(L);
    for (; *names; names++) {
        lua_getfield(L, from, *names);
        lua_setfield(L, -2, *names);
    }
}

/* Puts f around the C function `name` of the table on top. What LuaJIT wrote in Lua (table.remove) is counted anyway.
 */
static void guard(lua_State *L, const char *name, lua_CFunction f)
{
    lua_getfield(L, -1, name);
    if (!lua_tocfunction(L, -1)) {
        lua_pop(L, 1);
        return;
    }
    lua_pushcclosure(L, f, 1);
    lua_setfield(L, -2, name);
}

static void make_strings(lua_State *L)
{
    static const char *const keep[] = {"byte", "char", "format", "len", "lower", "reverse", "sub", "upper", NULL};
    lua_getglobal(L, "string");
    push_copy(L, lua_gettop(L), keep);
    static const char *const map[] = {"lower", "upper", "reverse"};
    for (size_t i = 0; i < sizeof map / sizeof *map; i++) {
        lua_getfield(L, -1, map[i]);
        lua_pushcclosure(L, safe_map, 1);
        lua_setfield(L, -2, map[i]);
    }
    lua_pushcfunction(L, safe_rep);
    lua_setfield(L, -2, "rep");
    lua_pushcfunction(L, safe_find);
    lua_setfield(L, -2, "find");
    lua_pushlightuserdata(L, (void *)&key_strings);
    lua_pushvalue(L, -2);
    lua_rawset(L, LUA_REGISTRYINDEX);
    lua_pushliteral(L, "");
    lua_newtable(L);
    lua_pushvalue(L, -3);
    lua_setfield(L, -2, "__index");
    lua_pushboolean(L, 0);
    lua_setfield(L, -2, "__metatable");
    lua_setmetatable(L, -2);
    lua_settop(L, 0);
}

static int init_state(lua_State *L)
{
    static const char *const drop[] = {"loadstring", "loadfile",       "dofile", "setfenv",   "getfenv",
                                       "newproxy",   "collectgarbage", "gcinfo", "coroutine", "module",
                                       "print",      "_VERSION",       NULL};
    struct dn_vm *vm = lua_touserdata(L, 1);
    lua_settop(L, 0);
    open_library(L, luaopen_base, "");
    open_library(L, luaopen_table, LUA_TABLIBNAME);
    open_library(L, luaopen_string, LUA_STRLIBNAME);
    open_library(L, luaopen_math, LUA_MATHLIBNAME);
    lua_settop(L, 0);
    lua_pushlightuserdata(L, (void *)&key_vm);
    lua_pushlightuserdata(L, vm);
    lua_rawset(L, LUA_REGISTRYINDEX);
    lua_pushlightuserdata(L, (void *)&key_loaded);
    lua_newtable(L);
    lua_rawset(L, LUA_REGISTRYINDEX);
    for (const char *const *name = drop; *name; name++) {
        lua_pushnil(L);
        lua_setglobal(L, *name);
    }
    lua_getglobal(L, "string");
    lua_pushnil(L);
    lua_setfield(L, -2, "dump");
    lua_pushcfunction(L, host_load);
    lua_setglobal(L, "load");
    lua_pushcfunction(L, host_require);
    lua_setglobal(L, "require");
    make_strings(L);
    return 0;
}

int dn_vm_open(struct dn_vm **out, const struct dn_vm_options *options, struct dn_err *err)
{
    struct dn_vm *vm = dn_alloc0(1, sizeof *vm);
    vm->options = *options;
    snprintf(vm->name, sizeof vm->name, "%s", options->name ? options->name : "lua");
    vm->options.name = vm->name;
    if (!vm->options.code)
        vm->options.code = DN_INTERNAL;
    if (!vm->options.memory_bytes)
        vm->options.memory_bytes = 8u << 20;
    if (!vm->options.instructions)
        vm->options.instructions = 1000000;
    if (!vm->options.wall_ns)
        vm->options.wall_ns = 100 * DN_NS_PER_MS;
    /* Not under the cap: this LuaJIT crashes when memory ends within lua_newstate (about 12 KB). */
    vm->L = lua_newstate(vm_alloc, vm);
    vm->capped = true;
    int status = vm->L ? lua_cpcall(vm->L, init_state, vm) : LUA_ERRMEM;
    vm->capped = false;
    if (status) {
        dn_err_set(err, DN_NO_MEMORY, "%s: a Lua state needs more than %zu bytes", vm->name, vm->options.memory_bytes);
        dn_vm_close(vm);
        return -DN_NO_MEMORY;
    }
    luaJIT_setmode(vm->L, 0, LUAJIT_MODE_ENGINE | LUAJIT_MODE_OFF);
    *out = vm;
    return 0;
}

void dn_vm_close(struct dn_vm *vm)
{
    if (!vm)
        return;
    if (vm->L)
        lua_close(vm->L);
    free(vm);
}

struct lua_State *dn_vm_lua(struct dn_vm *vm)
{
    return vm->L;
}

void dn_vm_set_budget(struct dn_vm *vm, uint64_t instructions, uint64_t wall_ns)
{
    if (instructions)
        vm->options.instructions = instructions;
    if (wall_ns)
        vm->options.wall_ns = wall_ns;
}

/* Pops the message of a failed load or call. */
static int fail(struct dn_vm *vm, enum dn_vm_failure failure, struct dn_err *err)
{
    const char *text = lua_type(vm->L, -1) == LUA_TSTRING ? lua_tostring(vm->L, -1) : "error without a message";
    vm->failure = failure;
    switch (failure) {
    case DN_VM_MEMORY:
        dn_err_set(err, vm->options.code, "%s: needs more than %zu KiB of memory", vm->name,
                   vm->options.memory_bytes >> 10);
        break;
    case DN_VM_INSTRUCTIONS:
        dn_err_set(err, vm->options.code, "%s: ran longer than %llu instructions", vm->name,
                   (unsigned long long)vm->options.instructions);
        break;
    case DN_VM_TIME:
        dn_err_set(err, vm->options.code, "%s: ran longer than %llu ms", vm->name,
                   (unsigned long long)(vm->options.wall_ns / DN_NS_PER_MS));
        break;
    default:
        dn_err_set(err, vm->options.code, "%s", text);
    }
    lua_pop(vm->L, 1);
    if (failure != DN_VM_ERROR && vm->depth == 0)
        lua_gc(vm->L, LUA_GCCOLLECT, 0);
    return -(int)vm->options.code;
}

int dn_vm_load(struct dn_vm *vm, const char *source, size_t len, const char *chunk_name, bool sandboxed,
               struct dn_err *err)
{
    lua_State *L = vm->L;
    vm->failure = DN_VM_OK;
    vm->traceback[0] = '\0';
    char at_name[256];
    snprintf(at_name, sizeof at_name, "@%s", chunk_name);
    bool outer = vm->capped;
    vm->capped = true;
    int status = luaL_loadbufferx(L, source, len, at_name, "t");
    vm->capped = outer;
    if (sandboxed) {
        if (status == 0) {
            lua_pushvalue(L, -2);
            lua_setfenv(L, -2);
        }
        lua_remove(L, -2);
    }
    if (status)
        return fail(vm, status == LUA_ERRMEM ? DN_VM_MEMORY : DN_VM_SYNTAX, err);
    return 0;
}

int dn_vm_call(struct dn_vm *vm, int n_args, int n_results, struct dn_err *err)
{
    lua_State *L = vm->L;
    bool outermost = vm->depth == 0;
    int function = lua_gettop(L) - n_args;
    vm->failure = DN_VM_OK;
    vm->traceback[0] = '\0';
    lua_pushcfunction(L, on_error);
    lua_insert(L, function);
    if (outermost) {
        vm->spent = DN_VM_OK;
        vm->n_left = vm->options.instructions + DN_VM_STEP;
        vm->deadline_ns = dn_now_ns() + vm->options.wall_ns;
        vm->cpu_deadline_ns = 0;
        lua_sethook(L, on_count, LUA_MASKCOUNT, DN_VM_STEP);
        vm->capped = true;
    }
    vm->depth++;
    int status = lua_pcall(L, n_args, n_results, function);
    vm->depth--;
    if (outermost) {
        vm->capped = false;
        lua_sethook(L, NULL, 0, 0);
    }
    if (status == 0 && !vm->spent) {
        lua_remove(L, function);
        return 0;
    }
    /* A spent budget is a failure even if the code came to its end on the last instructions. */
    if (status == 0) {
        lua_settop(L, function);
        lua_pushliteral(L, "");
    }
    lua_remove(L, function);
    return fail(vm, vm->spent ? vm->spent : status == LUA_ERRMEM ? DN_VM_MEMORY : DN_VM_ERROR, err);
}

int dn_vm_require(struct dn_vm *vm, const char *name, struct dn_err *err)
{
    lua_pushcfunction(vm->L, host_require);
    lua_pushstring(vm->L, name);
    int rc = dn_vm_call(vm, 1, 1, err);
    return rc ? dn_err_prefix(err, "%s", vm->name) : 0;
}

void dn_vm_push_strings(struct dn_vm *vm)
{
    lua_pushlightuserdata(vm->L, (void *)&key_strings);
    lua_rawget(vm->L, LUA_REGISTRYINDEX);
}

void dn_vm_push_sandbox(struct dn_vm *vm)
{
    static const char *const base[] = {"assert",   "error",    "ipairs", "next",   "pairs", "select",
                                       "tonumber", "tostring", "type",   "unpack", NULL};
    static const char *const table[] = {"concat", "insert", "maxn", "remove", "sort", NULL};
    lua_State *L = vm->L;
    push_copy(L, LUA_GLOBALSINDEX, base);
    int env = lua_gettop(L);
    lua_getglobal(L, "table");
    push_copy(L, env + 1, table);
    guard(L, "concat", guarded);
    guard(L, "insert", guarded);
    guard(L, "maxn", guarded);
    guard(L, "sort", safe_sort);
    lua_setfield(L, env, "table");
    dn_vm_push_strings(vm);
    lua_getglobal(L, "math");
    for (int from = env + 2; from <= env + 3; from++) {
        lua_newtable(L);
        lua_pushnil(L);
        while (lua_next(L, from)) {
            lua_pushvalue(L, -2);
            lua_insert(L, -2);
            lua_rawset(L, -4);
        }
        lua_setfield(L, env, from == env + 2 ? "string" : "math");
    }
    lua_getfield(L, env, "math");
    lua_pushnil(L);
    lua_setfield(L, -2, "randomseed");
    lua_settop(L, env);
}

enum dn_vm_failure dn_vm_failure(const struct dn_vm *vm)
{
    return vm->failure;
}

const char *dn_vm_failure_name(enum dn_vm_failure failure)
{
    static const char *const names[] = {"ok", "syntax", "error", "memory", "instructions", "time"};
    return (unsigned)failure < sizeof names / sizeof *names ? names[failure] : "unknown";
}

const char *dn_vm_traceback(const struct dn_vm *vm)
{
    return vm->traceback;
}

size_t dn_vm_memory(const struct dn_vm *vm)
{
    return vm->used_bytes;
}
