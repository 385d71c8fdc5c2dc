#include "engine/template.h"

#include "base/clock.h"
#include "engine/template_messages.h"
#include "script/vm.h"

#include <lauxlib.h>
#include <lua.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define MEMORY_BYTES ((size_t)512 << 20) /* LuaJIT's heap grows to twice what is live before it collects */
/* Of the request's values in Lua, which are pushed outside of a call, where no cap holds: an empty object of JSON,
 * three bytes with its comma, takes about 300. */
#define CONTEXT_BYTES ((size_t)256 << 20)
#define INSTRUCTIONS  300000000ull
#define WALL_NS       (10 * DN_NS_PER_S)
#define COLLECT_OVER  ((size_t)32 << 20) /* a VM gives its garbage back when a rendering leaves it larger than this */
#define JSON_DEPTH    64
#define CACHED        32 /* compiled templates a VM keeps */

struct dn_template {
    uint64_t id; /* unique in the process: what VMs cache by */
    char *source;
    size_t len;
    size_t n_vars;
    struct var {
        char *name, *text;
    } * var;
    struct dn_template_traits traits;
};

struct dn_template_vm {
    struct dn_vm *vm;
    int compile, render; /* registry references */
    int none, cache;
    size_t n_cached;
    int64_t now_s; /* 0: the clock */
};

/* ---- Values of the request as Lua values (lua/dunlin/jinja/value.lua says how they look) ---------------------------
 */

static void push_kind(lua_State *L, const char *kind, int n_array, int n_fields)
{
    lua_createtable(L, n_array, n_fields);
    lua_pushstring(L, kind);
    lua_setfield(L, -2, "k");
}

static void push_text(lua_State *L, const char *s, size_t n, bool trusted)
{
    if (trusted) {
        lua_pushlstring(L, s, n);
        return;
    }
    push_kind(L, "str", 0, 2);
    lua_pushlstring(L, s, n);
    lua_setfield(L, -2, "s");
}

static void push_number(lua_State *L, const json_t *v)
{
    char digits[24];
    if (json_is_real(v)) {
        push_kind(L, "float", 0, 2);
        lua_pushnumber(L, json_real_value(v));
        lua_setfield(L, -2, "x");
        return;
    }
    json_int_t i = json_integer_value(v);
    if (i >= -(1ll << 53) && i <= 1ll << 53) {
        lua_pushnumber(L, (lua_Number)i);
        return;
    }
    push_kind(L, "big", 0, 2);
    lua_pushlstring(L, digits, (size_t)snprintf(digits, sizeof digits, "%lld", (long long)i));
    lua_setfield(L, -2, "s");
}

/* An empty dict with room for n; dict_set() fills it. */
static void push_dict(lua_State *L, size_t n)
{
    int room = n < 1024 ? (int)n : 1024;
    push_kind(L, "dict", 0, 4);
    lua_pushinteger(L, 0);
    lua_setfield(L, -2, "n");
    lua_createtable(L, room, 0);
    lua_setfield(L, -2, "keys");
    lua_createtable(L, 0, room);
    lua_setfield(L, -2, "map");
}

/* Pops the value on top into the dict below it; the key must be new. */
static void dict_set(lua_State *L, const char *key, bool trusted)
{
    lua_getfield(L, -2, "map");
    lua_pushvalue(L, -2);
    lua_setfield(L, -2, key);
    lua_pop(L, 2);
    lua_getfield(L, -1, "n");
    lua_Integer n = lua_tointeger(L, -1) + 1;
    lua_pop(L, 1);
    lua_pushinteger(L, n);
    lua_setfield(L, -2, "n");
    lua_getfield(L, -1, "keys");
    push_text(L, key, strlen(key), trusted);
    lua_rawseti(L, -2, (int)n);
    lua_pop(L, 1);
}

static bool push_value(struct dn_template_vm *vm, const json_t *v, int depth);

static bool push_list(struct dn_template_vm *vm, const json_t *v, int depth)
{
    lua_State *L = dn_vm_lua(vm->vm);
    size_t n = json_array_size(v);
    push_kind(L, "list", n < 1024 ? (int)n : 1024, 2);
    lua_pushinteger(L, (lua_Integer)n);
    lua_setfield(L, -2, "n");
    for (size_t i = 0; i < n; i++) {
        if (!push_value(vm, json_array_get(v, i), depth + 1))
            return false;
        lua_rawseti(L, -2, (int)i + 1);
    }
    return true;
}

/* A role that the API knows is a word of ours: "<|" + role + "|>" must stay a control token. */
static bool is_known_role(const char *key, const json_t *v)
{
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool", "function"};
    if (strcmp(key, "role") != 0 || !json_is_string(v))
        return false;
    for (size_t i = 0; i < sizeof roles / sizeof *roles; i++)
        if (strcmp(json_string_value(v), roles[i]) == 0)
            return true;
    return false;
}

static bool push_object(struct dn_template_vm *vm, const json_t *v, int depth)
{
    lua_State *L = dn_vm_lua(vm->vm);
    const char *key;
    json_t *item;
    push_dict(L, json_object_size(v));
    json_object_foreach((json_t *)v, key, item)
    {
        if (is_known_role(key, item))
            lua_pushstring(L, json_string_value(item));
        else if (!push_value(vm, item, depth + 1))
            return false;
        dict_set(L, key, false);
    }
    return true;
}

/* Pushes v; false if it is nested too deep or takes too much memory (the stack is then the caller's to reset). */
static bool push_value(struct dn_template_vm *vm, const json_t *v, int depth)
{
    lua_State *L = dn_vm_lua(vm->vm);
    if (depth > JSON_DEPTH || dn_vm_memory(vm->vm) > CONTEXT_BYTES || !lua_checkstack(L, 16))
        return false;
    switch (v ? json_typeof(v) : JSON_NULL) {
    case JSON_OBJECT:
        return push_object(vm, v, depth);
    case JSON_ARRAY:
        return push_list(vm, v, depth);
    case JSON_STRING:
        push_text(L, json_string_value(v), json_string_length(v), false);
        return true;
    case JSON_INTEGER:
    case JSON_REAL:
        push_number(L, v);
        return true;
    case JSON_TRUE:
    case JSON_FALSE:
        lua_pushboolean(L, json_is_true(v));
        return true;
    case JSON_NULL:
        break;
    }
    lua_rawgeti(L, LUA_REGISTRYINDEX, vm->none);
    return true;
}

/* Why push_value() gave up. */
static int push_failed(const struct dn_template_vm *vm, struct dn_err *err, const char *param)
{
    if (dn_vm_memory(vm->vm) > CONTEXT_BYTES)
        return dn_err_param(err, DN_INVALID_VALUE, param, "%s: too many values: they take more than %zu MiB", param,
                            CONTEXT_BYTES >> 20);
    return dn_err_param(err, DN_INVALID_VALUE, param, "%s: nested deeper than %d levels", param, JSON_DEPTH);
}

/* Pushes the variables of one rendering as a dict. */
static int push_context(struct dn_template_vm *vm, const struct dn_template *t, const json_t *messages,
                        const json_t *tools, bool add_generation_prompt, const json_t *kwargs, struct dn_err *err)
{
    static const char *const taken[] = {"messages", "tools", "documents", "add_generation_prompt"};
    lua_State *L = dn_vm_lua(vm->vm);
    push_dict(L, 16);
    if (!push_value(vm, messages, 0))
        return push_failed(vm, err, "messages");
    dict_set(L, "messages", true);
    if (!push_value(vm, json_array_size(tools) ? tools : NULL, 0))
        return push_failed(vm, err, "tools");
    dict_set(L, "tools", true);
    lua_rawgeti(L, LUA_REGISTRYINDEX, vm->none);
    dict_set(L, "documents", true);
    lua_pushboolean(L, add_generation_prompt);
    dict_set(L, "add_generation_prompt", true);
    for (size_t i = 0; i < t->n_vars; i++) {
        lua_pushstring(L, t->var[i].text);
        dict_set(L, t->var[i].name, true);
    }
    const char *key;
    json_t *v;
    json_object_foreach((json_t *)kwargs, key, v)
    {
        bool refused = false;
        for (size_t i = 0; i < sizeof taken / sizeof *taken; i++)
            refused |= strcmp(key, taken[i]) == 0;
        for (size_t i = 0; i < t->n_vars; i++)
            refused |= strcmp(key, t->var[i].name) == 0;
        if (refused)
            return dn_err_param(err, DN_INVALID_VALUE, "chat_template_kwargs",
                                "chat_template_kwargs: a variable of the node's own can't be replaced");
        if (!push_value(vm, v, 0))
            return push_failed(vm, err, "chat_template_kwargs");
        dict_set(L, key, true);
    }
    return 0;
}

/* ---- Rendering ----------------------------------------------------------------------------------------------------
 */

/* The error table {kind, message, line} on top as an error of this program; pops it. */
static int template_error(lua_State *L, struct dn_err *err)
{
    if (!lua_istable(L, -1)) {
        lua_pop(L, 1);
        return dn_err_set(err, DN_TEMPLATE, "template: failed without a reason");
    }
    lua_getfield(L, -1, "line");
    lua_getfield(L, -2, "kind");
    lua_getfield(L, -3, "message");
    int line = (int)lua_tointeger(L, -3);
    const char *kind = lua_tostring(L, -2), *message = lua_tostring(L, -1);
    if (!kind || strcmp(kind, "TemplateError") == 0 || strcmp(kind, "TemplateSyntaxError") == 0)
        dn_err_set(err, DN_TEMPLATE, "template:%d: %s", line, message ? message : "");
    else
        dn_err_set(err, DN_TEMPLATE, "template:%d: %s: %s", line, kind, message ? message : "");
    lua_pop(L, 4);
    return -DN_TEMPLATE;
}

/* Pushes the compiled template. */
static int push_compiled(struct dn_template_vm *vm, const struct dn_template *t, struct dn_err *err)
{
    lua_State *L = dn_vm_lua(vm->vm);
    lua_rawgeti(L, LUA_REGISTRYINDEX, vm->cache);
    lua_pushnumber(L, (lua_Number)t->id);
    lua_rawget(L, -2);
    if (!lua_isnil(L, -1)) {
        lua_remove(L, -2);
        return 0;
    }
    lua_pop(L, 1);
    lua_rawgeti(L, LUA_REGISTRYINDEX, vm->compile);
    lua_pushlstring(L, t->source, t->len);
    int rc = dn_vm_call(vm->vm, 1, 2, err);
    if (rc != 0)
        return rc;
    if (!lua_toboolean(L, -2))
        return template_error(L, err);
    lua_pop(L, 1);
    if (vm->n_cached++ >= CACHED) {
        lua_newtable(L);
        lua_pushvalue(L, -1);
        lua_rawseti(L, LUA_REGISTRYINDEX, vm->cache);
        lua_replace(L, -3);
        vm->n_cached = 1;
    }
    lua_pushnumber(L, (lua_Number)t->id);
    lua_pushvalue(L, -2);
    lua_rawset(L, -4);
    lua_remove(L, -2);
    return 0;
}

/* Copies text (below) and segments (on top) out of Lua. */
static void take_output(lua_State *L, struct dn_template_output *out)
{
    size_t n;
    const char *text = lua_tolstring(L, -2, &n);
    dn_buf_put(&out->text, text, n);
    out->n_segments = lua_objlen(L, -1) / 2;
    out->segment = dn_alloc0(out->n_segments, sizeof *out->segment);
    for (size_t i = 0; i < out->n_segments; i++) {
        lua_rawgeti(L, -1, (int)(2 * i + 1));
        lua_rawgeti(L, -2, (int)(2 * i + 2));
        out->segment[i].len = (size_t)lua_tonumber(L, -2);
        out->segment[i].trusted = lua_toboolean(L, -1);
        lua_pop(L, 2);
    }
}

static int render(struct dn_template_vm *vm, const struct dn_template *t, const json_t *messages, const json_t *tools,
                  bool add_generation_prompt, const json_t *kwargs, struct dn_template_output *out, struct dn_err *err)
{
    lua_State *L = dn_vm_lua(vm->vm);
    lua_rawgeti(L, LUA_REGISTRYINDEX, vm->render);
    int rc = push_compiled(vm, t, err);
    if (rc == 0)
        rc = push_context(vm, t, messages, tools, add_generation_prompt, kwargs, err);
    if (rc == 0)
        rc = dn_vm_call(vm->vm, 2, 2, err);
    if (rc == 0 && lua_type(L, -2) != LUA_TSTRING)
        rc = template_error(L, err);
    else if (rc == 0)
        take_output(L, out);
    lua_settop(L, 0);
    if (dn_vm_memory(vm->vm) > COLLECT_OVER)
        lua_gc(L, LUA_GCCOLLECT, 0);
    return rc;
}

int dn_template_render(struct dn_template_vm *vm, const struct dn_template *t, const json_t *messages,
                       const json_t *tools, bool add_generation_prompt, const json_t *kwargs,
                       struct dn_template_output *out, struct dn_err *err)
{
    json_t *list = NULL;
    dn_template_output_release(out);
    if (tools && !json_is_null(tools) && !json_is_array(tools))
        return dn_err_param(err, DN_INVALID_VALUE, "tools", "tools: must be an array");
    if (kwargs && !json_is_null(kwargs) && !json_is_object(kwargs))
        return dn_err_param(err, DN_INVALID_VALUE, "chat_template_kwargs", "chat_template_kwargs: must be an object");
    int rc = dn_template_messages(messages, &t->traits, &list, err);
    if (rc == 0)
        rc = render(vm, t, list, tools, add_generation_prompt, kwargs, out, err);
    json_decref(list);
    return rc;
}

void dn_template_output_release(struct dn_template_output *out)
{
    dn_buf_release(&out->text);
    free(out->segment);
    *out = (struct dn_template_output){0};
}

/* ---- VMs ----------------------------------------------------------------------------------------------------------
 */

/* strftime_now(format) for lua/dunlin/jinja. */
static int lua_strftime(lua_State *L)
{
    const struct dn_template_vm *vm = lua_touserdata(L, lua_upvalueindex(1));
    const char *format = luaL_checkstring(L, 1);
    time_t now = vm->now_s ? (time_t)vm->now_s : (time_t)(dn_wall_ns() / DN_NS_PER_S);
    struct tm tm;
    char text[256];
    gmtime_r(&now, &tm);
    size_t n = strlen(format) < sizeof text / 4 ? strftime(text, sizeof text, format, &tm) : 0;
    if (n == 0 && *format)
        return luaL_error(L, "strftime_now: the format is too long");
    lua_pushlstring(L, text, n);
    return 1;
}

int dn_template_vm_open(struct dn_template_vm **out, struct dn_err *err)
{
    struct dn_vm_options options = {.name = "template",
                                    .code = DN_TEMPLATE,
                                    .memory_bytes = MEMORY_BYTES,
                                    .instructions = INSTRUCTIONS,
                                    .wall_ns = WALL_NS};
    struct dn_template_vm *vm = dn_alloc0(1, sizeof *vm);
    int rc = dn_vm_open(&vm->vm, &options, err);
    if (rc == 0)
        rc = dn_vm_require(vm->vm, "dunlin.jinja", err);
    if (rc != 0) {
        dn_template_vm_close(vm);
        return rc;
    }
    lua_State *L = dn_vm_lua(vm->vm);
    lua_pushlightuserdata(L, vm);
    lua_pushcclosure(L, lua_strftime, 1);
    lua_setfield(L, -2, "strftime");
    lua_getfield(L, -1, "compile");
    vm->compile = luaL_ref(L, LUA_REGISTRYINDEX);
    lua_getfield(L, -1, "render");
    vm->render = luaL_ref(L, LUA_REGISTRYINDEX);
    lua_getfield(L, -1, "value");
    lua_getfield(L, -1, "None");
    vm->none = luaL_ref(L, LUA_REGISTRYINDEX);
    lua_newtable(L);
    vm->cache = luaL_ref(L, LUA_REGISTRYINDEX);
    lua_settop(L, 0);
    *out = vm;
    return 0;
}

void dn_template_vm_close(struct dn_template_vm *vm)
{
    if (!vm)
        return;
    dn_vm_close(vm->vm);
    free(vm);
}

void dn_template_vm_set_now(struct dn_template_vm *vm, int64_t unix_s)
{
    vm->now_s = unix_s;
}

/* ---- Templates ----------------------------------------------------------------------------------------------------
 */

/* Renders a list of messages as it is and says whether that went well; the text is in *out. */
static bool try(struct dn_template_vm *vm, const struct dn_template *t, json_t *messages,
                struct dn_template_output *out)
{
    static const char tool[] =
        "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":\"d\",\"parameters\":"
        "{\"type\":\"object\",\"properties\":{\"city\":{\"type\":\"string\",\"description\":\"d\"}},"
        "\"required\":[\"city\"]}}}]";
    struct dn_err err = {0};
    json_t *tools = json_loads(tool, 0, NULL);
    dn_template_output_release(out);
    int rc = render(vm, t, messages, tools, true, NULL, out, &err);
    json_decref(tools);
    json_decref(messages);
    return rc == 0;
}

static bool shows(struct dn_template_output *out, const char *text)
{
    return out->text.len && strstr(dn_buf_str(&out->text), text) != NULL;
}

/* A conversation with one tool call, whose arguments are text or an object. */
static json_t *call_messages(json_t *arguments)
{
    return json_pack("[{s:s,s:s}, {s:s,s:s,s:[{s:s,s:s,s:{s:s,s:o}}]}, {s:s,s:s,s:s,s:s}]", "role", "user", "content",
                     "q", "role", "assistant", "content", "", "tool_calls", "id", "call00001", "type", "function",
                     "function", "name", "f", "arguments", arguments, "role", "tool", "tool_call_id", "call00001",
                     "name", "f", "content", "r");
}

/* Finds out how the template takes arguments and content, by what it makes of both forms. */
static void find_traits(struct dn_template_vm *vm, struct dn_template *t)
{
    struct dn_template_output out = {0};
    bool text_ok = try(vm, t, call_messages(json_string("{\"city\":\"Xyzzy\"}")), &out);
    bool text_quoted = text_ok && shows(&out, "\\\"Xyzzy\\\"");
    bool text_lost = text_ok && !shows(&out, "Xyzzy");
    bool text_in_braces = text_ok && shows(&out, "{{\"city\"");
    bool object_ok = try(vm, t, call_messages(json_pack("{s:s}", "city", "Xyzzy")), &out) && shows(&out, "Xyzzy");
    t->traits.wants_argument_objects = object_ok && (!text_ok || text_quoted || text_lost || text_in_braces);

    bool string_ok =
        try(vm, t, json_pack("[{s:s,s:s}]", "role", "user", "content", "Xyzzy"), &out) && shows(&out, "Xyzzy");
    bool list_ok =
        try(vm, t, json_pack("[{s:s,s:[{s:s,s:s}]}]", "role", "user", "content", "type", "text", "text", "Xyzzy"),
            &out) &&
        shows(&out, "Xyzzy") && !shows(&out, "'Xyzzy'") && !shows(&out, "\"Xyzzy\"");
    t->traits.takes_content_parts = list_ok;
    t->traits.wants_content_parts = list_ok && !string_ok;
    dn_template_output_release(&out);
}

/* Compiles the template, renders one message and finds its traits. Only what can't be the messages' fault is an error.
 */
static int try_template(struct dn_template *t, struct dn_err *err)
{
    struct dn_template_vm *vm = NULL;
    struct dn_template_output out = {0};
    struct dn_err why = {0};
    int rc = dn_template_vm_open(&vm, err);
    if (rc != 0)
        return rc;
    dn_vm_set_budget(vm->vm, INSTRUCTIONS / 10, DN_NS_PER_S);
    rc = push_compiled(vm, t, err);
    lua_settop(dn_vm_lua(vm->vm), 0);
    if (rc == 0) {
        json_t *hello = json_pack("[{s:s,s:s}]", "role", "user", "content", "Hi");
        int tried = render(vm, t, hello, NULL, true, NULL, &out, &why);
        json_decref(hello);
        enum dn_vm_failure failure = dn_vm_failure(vm->vm);
        if (tried != 0 && failure != DN_VM_OK)
            rc = dn_err_set(err, DN_TEMPLATE, "%s (with one user message)", why.text);
        snprintf(t->traits.trial, sizeof t->traits.trial, "%s", tried ? why.text : "");
    }
    if (rc == 0)
        find_traits(vm, t);
    dn_template_output_release(&out);
    dn_template_vm_close(vm);
    return rc;
}

int dn_template_open(struct dn_template **out, const char *source, size_t len, const struct dn_template_var *vars,
                     size_t n_vars, struct dn_err *err)
{
    static atomic_uint_fast64_t last_id;
    if (!source || len == 0)
        return dn_err_set(err, DN_TEMPLATE, "the model has no chat template");
    struct dn_template *t = dn_alloc0(1, sizeof *t);
    t->id = atomic_fetch_add(&last_id, 1) + 1;
    t->source = dn_strndup(source, len);
    t->len = len;
    t->var = dn_alloc0(n_vars, sizeof *t->var);
    for (size_t i = 0; i < n_vars; i++)
        if (vars[i].text)
            t->var[t->n_vars++] = (struct var){dn_strdup(vars[i].name), dn_strdup(vars[i].text)};
    int rc = try_template(t, err);
    if (rc != 0) {
        dn_template_close(t);
        return rc;
    }
    *out = t;
    return 0;
}

void dn_template_close(struct dn_template *t)
{
    if (!t)
        return;
    for (size_t i = 0; i < t->n_vars; i++) {
        free(t->var[i].name);
        free(t->var[i].text);
    }
    free(t->var);
    free(t->source);
    free(t);
}

const struct dn_template_traits *dn_template_traits(const struct dn_template *t)
{
    return &t->traits;
}
