#include "script/vm.h"

#include "base/clock.h"

#include <criterion/criterion.h>
#include <lauxlib.h>
#include <lua.h>
#include <string.h>

static struct dn_err err;

static struct dn_vm *open_vm(size_t memory, uint64_t instructions, uint64_t wall_ns)
{
    struct dn_vm *vm = NULL;
    struct dn_vm_options o = {
        .name = "test", .code = DN_POLICY, .memory_bytes = memory, .instructions = instructions, .wall_ns = wall_ns};
    cr_assert_eq(dn_vm_open(&vm, &o, &err), 0, "%s", err.text);
    return vm;
}

static int run(struct dn_vm *vm, const char *source, bool sandboxed)
{
    if (sandboxed)
        dn_vm_push_sandbox(vm);
    int rc = dn_vm_load(vm, source, strlen(source), "policies/x.lua", sandboxed, &err);
    return rc ? rc : dn_vm_call(vm, 0, 1, &err);
}

/* Runs sandboxed code, demands this failure soon and a VM that works afterwards. */
static void must_fail(const char *source, enum dn_vm_failure failure, const char *part)
{
    struct dn_vm *vm = open_vm(4 << 20, 10000000, 20 * DN_NS_PER_S);
    int top = lua_gettop(dn_vm_lua(vm));
    uint64_t t = dn_now_ns();
    cr_assert_eq(run(vm, source, true), -DN_POLICY, "%s", source);
    cr_assert_lt(dn_now_ns() - t, 10 * DN_NS_PER_S);
    cr_assert_eq(dn_vm_failure(vm), failure, "%s: %s (%s)", source, dn_vm_failure_name(dn_vm_failure(vm)), err.text);
    cr_assert(strstr(err.text, part), "%s: %s", source, err.text);
    cr_assert_eq(lua_gettop(dn_vm_lua(vm)), top, "%s leaves values on the stack", source);
    cr_assert_eq(run(vm, "return 41 + 1", true), 0, "%s", err.text);
    cr_assert_eq(lua_tointeger(dn_vm_lua(vm), -1), 42);
    dn_vm_close(vm);
}

Test(vm, stops_an_endless_loop)
{
    must_fail("while true do end", DN_VM_INSTRUCTIONS, "10000000 instructions");
    must_fail("local function f() return f() end f()", DN_VM_INSTRUCTIONS, "instructions");
    must_fail("local t = {} for i = 1, 100 do t[i] = i % 7 end"
              " while true do table.sort(t, function(a, b) return a > b end) end",
              DN_VM_INSTRUCTIONS, "instructions");
}

Test(vm, stops_at_the_deadline)
{
    struct dn_vm *vm = open_vm(0, UINT64_MAX / 2, 30 * DN_NS_PER_MS);
    uint64_t t = dn_now_ns();
    cr_assert_eq(run(vm, "while true do end", true), -DN_POLICY);
    cr_assert_eq(dn_vm_failure(vm), DN_VM_TIME);
    cr_assert_lt(dn_now_ns() - t, DN_NS_PER_S);
    cr_assert_str_eq(err.text, "test: ran longer than 30 ms");
    dn_vm_close(vm);
}

/* One call of a C function must not take what a policy's whole budget can't. */
Test(vm, functions_of_tables_and_strings_look_at_the_budget)
{
    must_fail("local t = {} for i = 1, 100 do t[i] = i * 7919 % 101 end while true do table.sort(t) end",
              DN_VM_INSTRUCTIONS, "instructions");
    static const char *const slow[] = {
        /* strings that differ only at their end, compared half a million times */
        "local s, t = {}, {} local x = ('x'):rep(60000) for i = 1, 9 do s[i] = x .. i end"
        " for i = 1, 30000 do t[i] = s[i * 7919 % 9 + 1] end return function() table.sort(t) end",
        "local t = {} for i = 1, 200000 do t[i] = '' end return function() while true do table.concat(t) end end",
        "local t = {} for i = 1, 200000 do t[i] = i end return function() while true do table.insert(t, 1, 1) end end",
        "local t = {} for i = 1, 200000 do t[i] = i end return function() while true do table.maxn(t) end end",
        "local s = ('x'):rep(65536) for i = 1, 4 do s = s .. s end return function() while true do s:upper() end end",
        "local s = ('x'):rep(65536) for i = 1, 4 do s = s .. s end return function() while true do s:find('y') end "
        "end"};
    for (size_t i = 0; i < sizeof slow / sizeof *slow; i++) {
        struct dn_vm *vm = open_vm(8 << 20, UINT64_MAX / 2, DN_NS_PER_S);
        cr_assert_eq(run(vm, slow[i], true), 0, "%s", err.text);
        dn_vm_set_budget(vm, 0, 10 * DN_NS_PER_MS);
        uint64_t t = dn_now_ns();
        cr_assert_eq(dn_vm_call(vm, 0, 0, &err), -DN_POLICY);
        cr_assert_eq(dn_vm_failure(vm), DN_VM_TIME, "%s: %s", slow[i], err.text);
        cr_assert_lt(dn_now_ns() - t, DN_NS_PER_S, "%s", slow[i]);
        dn_vm_close(vm);
    }
    /* They do what they did, and their errors name the caller's line. */
    struct dn_vm *vm = open_vm(0, 0, 0);
    cr_assert_eq(run(vm,
                     "local t = { 3, 1, 2 } table.sort(t) table.insert(t, 4) table.insert(t, 1, 0) "
                     "table.sort(t, function(a, b) return a > b end) return table.concat(t, ',') .. table.maxn(t)",
                     true),
                 0, "%s", err.text);
    cr_assert_str_eq(lua_tostring(dn_vm_lua(vm), -1), "4,3,2,1,05");
    dn_vm_close(vm);
    must_fail("local u = ('x').upper({})", DN_VM_ERROR, "policies/x.lua:1: bad argument #1 to 'upper'");
    must_fail("table.sort({ 1, 'a' })", DN_VM_ERROR, "attempt to compare");
    must_fail("table.insert(1, 2)", DN_VM_ERROR, "policies/x.lua:1: bad argument #1 to 'insert'");
    must_fail("table.concat({ {} })", DN_VM_ERROR, "policies/x.lua:1: invalid value (table) at index 1");
}

static int sleep_a_while(lua_State *L)
{
    nanosleep(&(struct timespec){.tv_nsec = 60 * 1000000}, NULL);
    return 0;
}

Test(vm, time_in_which_the_thread_did_not_run_does_not_count)
{
    struct dn_vm *vm = open_vm(0, 10000000, 20 * DN_NS_PER_MS);
    lua_pushcfunction(dn_vm_lua(vm), sleep_a_while);
    lua_setglobal(dn_vm_lua(vm), "sleep");
    cr_assert_eq(run(vm, "for i = 1, 3000 do end sleep() for i = 1, 3000 do end return 1", false), 0, "%s", err.text);
    dn_vm_close(vm);
}

Test(vm, pcall_does_not_swallow_a_spent_budget)
{
    struct dn_vm *vm = open_vm(0, 100000, 0);
    cr_assert_eq(run(vm, "while true do pcall(function() while true do end end) end", false), -DN_POLICY);
    cr_assert_eq(dn_vm_failure(vm), DN_VM_INSTRUCTIONS);
    cr_assert_eq(run(vm, "pcall(function() while true do end end) return 1", false), -DN_POLICY);
    cr_assert_eq(dn_vm_failure(vm), DN_VM_INSTRUCTIONS);
    cr_assert_eq(run(vm, "return select('#', pcall(error, 'x'))", false), 0, "%s", err.text);
    cr_assert_eq(lua_tointeger(dn_vm_lua(vm), -1), 2);
    dn_vm_close(vm);
}

Test(vm, every_call_has_a_fresh_budget)
{
    struct dn_vm *vm = open_vm(0, 50000, 0);
    for (int i = 0; i < 20; i++) {
        cr_assert_eq(run(vm, "for i = 1, 10000 do end return 1", true), 0, "%s", err.text);
        lua_settop(dn_vm_lua(vm), 0);
    }
    dn_vm_set_budget(vm, 5000, 0);
    cr_assert_eq(run(vm, "for i = 1, 10000 do end return 1", true), -DN_POLICY);
    dn_vm_close(vm);
}

Test(vm, stops_memory_bombs)
{
    must_fail("local t = {} for i = 1, 1e9 do t[i] = {i} end", DN_VM_MEMORY, "4096 KiB");
    must_fail("local s = 'x' while true do s = s .. s end", DN_VM_MEMORY, "4096 KiB");
    must_fail("local s = ('x'):rep(65536) local t = {} for i = 1, 1000 do t[i] = s end return table.concat(t)",
              DN_VM_MEMORY, "4096 KiB");
}

Test(vm, stops_deep_recursion)
{
    must_fail("local function f() return 1 + f() end f()", DN_VM_ERROR, "stack overflow");
    must_fail("return unpack({}, 1, 1e7)", DN_VM_ERROR, "too many results");
}

Test(vm, reports_errors_with_place_and_traceback)
{
    struct dn_vm *vm = open_vm(0, 0, 0);
    cr_assert_eq(run(vm, "local function deep()\n  error('no')\nend\ndeep()", true), -DN_POLICY);
    cr_assert_eq(err.code, DN_POLICY);
    cr_assert_str_eq(err.text, "policies/x.lua:2: no");
    cr_assert(strstr(dn_vm_traceback(vm), "policies/x.lua:4:"), "%s", dn_vm_traceback(vm));
    cr_assert_eq(run(vm, "local = 3", true), -DN_POLICY);
    cr_assert_eq(dn_vm_failure(vm), DN_VM_SYNTAX);
    cr_assert(strstr(err.text, "policies/x.lua:1:"), "%s", err.text);
    dn_vm_close(vm);
}

Test(vm, describes_errors_that_are_not_strings)
{
    must_fail("error({})", DN_VM_ERROR, "type table");
    must_fail("error(nil)", DN_VM_ERROR, "type nil");
    must_fail("error(print)", DN_VM_ERROR, "type nil");
    must_fail("error(17)", DN_VM_ERROR, "17");
}

Test(vm, refuses_bytecode)
{
    struct dn_vm *vm = open_vm(0, 0, 0);
    cr_assert_eq(dn_vm_load(vm, "\x1bLJ\x02\x08\x00", 6, "b", false, &err), -DN_POLICY);
    cr_assert_eq(dn_vm_failure(vm), DN_VM_SYNTAX);
    cr_assert_eq(run(vm, "local f, why = load('\\27LJ\\2', 'b', 'b') assert(not f, 'loaded') return why", false), 0,
                 "%s", err.text);
    cr_assert(strstr(lua_tostring(dn_vm_lua(vm), -1), "wrong mode"));
    dn_vm_close(vm);
}

Test(vm, a_sandbox_has_exactly_these_names)
{
    struct dn_vm *vm = open_vm(0, 0, 0);
    const char *list = "local names = {} "
                       "for name, v in pairs(env) do if type(v) ~= 'table' then names[#names + 1] = name "
                       "else for k in pairs(v) do names[#names + 1] = name .. '.' .. k end end end "
                       "table.sort(names) return table.concat(names, ' ')";
    dn_vm_push_sandbox(vm);
    lua_State *L = dn_vm_lua(vm);
    lua_pushvalue(L, -1);
    lua_setfield(L, -2, "env");
    cr_assert_eq(dn_vm_load(vm, list, strlen(list), "l", true, &err), 0);
    cr_assert_eq(dn_vm_call(vm, 0, 1, &err), 0, "%s", err.text);
    const char *names = lua_tostring(L, -1);
    const char *expect =
        "assert env.assert env.env env.error env.ipairs env.math env.next env.pairs env.select env.string env.table "
        "env.tonumber env.tostring env.type env.unpack error ipairs math.abs math.acos math.asin math.atan math.atan2 "
        "math.ceil math.cos math.cosh math.deg math.exp math.floor math.fmod math.frexp math.huge math.ldexp math.log "
        "math.log10 math.max math.min math.modf math.pi math.pow math.rad math.random math.sin math.sinh "
        "math.sqrt math.tan math.tanh next pairs select string.byte string.char string.find string.format string.len "
        "string.lower string.rep string.reverse string.sub string.upper table.concat table.insert table.maxn "
        "table.remove table.sort tonumber tostring type unpack";
    cr_assert_str_eq(names, expect, "%s", names);
    dn_vm_close(vm);
}

Test(vm, host_code_has_no_way_out_either)
{
    struct dn_vm *vm = open_vm(0, 0, 0);
    const char *source =
        "for _, n in ipairs{'io','os','debug','ffi','jit','package','dofile','loadfile','loadstring','setfenv',"
        "'getfenv','newproxy','collectgarbage','coroutine'} do if _G[n] ~= nil then return n end end "
        "return string.dump and 'dump' or 'none'";
    cr_assert_eq(run(vm, source, false), 0, "%s", err.text);
    cr_assert_str_eq(lua_tostring(dn_vm_lua(vm), -1), "none");
    dn_vm_close(vm);
}

Test(vm, methods_of_strings_are_guarded)
{
    must_fail("return ('x'):gsub('x', 'y')", DN_VM_ERROR, "gsub");
    must_fail("return ('x'):match('.-.-.-b')", DN_VM_ERROR, "match");
    must_fail("return ('x'):dump()", DN_VM_ERROR, "dump");
    must_fail("return ('x'):rep(1e9)", DN_VM_ERROR, "65536");
    must_fail("return string.rep('abcdefgh', 1e4)", DN_VM_ERROR, "65536");
    struct dn_vm *vm = open_vm(0, 0, 0);
    /* A pattern is taken literally and so costs nothing. */
    cr_assert_eq(run(vm,
                     "local s = ('a'):rep(3000) assert(not s:find('.-.-.-.-b')) local a, b = ('a.b'):find('.', 1) "
                     "assert(a == 2 and b == 2) assert(('abc'):find('c', -1) == 3 and not ('abc'):find('a', 2)) "
                     "assert(('abc'):find('', 4) == 4 and not ('abc'):find('', 5)) return #('ab'):rep(3, 'x')",
                     true),
                 0, "%s", err.text);
    cr_assert_eq(lua_tointeger(dn_vm_lua(vm), -1), 6);
    dn_vm_close(vm);
}

Test(vm, rep_gives_what_the_library_gives)
{
    struct dn_vm *vm = open_vm(0, 10000000, DN_NS_PER_S);
    cr_assert_eq(
        run(vm,
            "for _, s in ipairs{'a', 'abc', ('x'):rep(255), ('y'):rep(256), ('z'):rep(257), ('w'):rep(600)} do "
            "for _, n in ipairs{-1, 0, 1, 2, 3, 99, 100, 1.9} do "
            "assert(s:rep(n) == string.rep(s, n), #s .. ' ' .. n) end end "
            "assert(#('a'):rep(65536) == 65536) return 1",
            false),
        0, "%s", err.text);
    dn_vm_close(vm);
}

Test(vm, sandboxes_share_nothing_that_can_be_changed)
{
    struct dn_vm *vm = open_vm(0, 0, 0);
    cr_assert_eq(run(vm, "string.len = nil math.abs = nil table.concat = nil leak = 1 return 1", true), 0);
    cr_assert_eq(
        run(vm, "return string.len('ab') + math.abs(-1) + #table.concat{'x'} + ('abc'):len() + (leak or 0)", true), 0,
        "%s", err.text);
    cr_assert_eq(lua_tointeger(dn_vm_lua(vm), -1), 7);
    dn_vm_close(vm);
}

Test(vm, names_a_missing_module)
{
    struct dn_vm *vm = open_vm(0, 0, 0);
    cr_assert_eq(dn_vm_require(vm, "dunlin.nothing", &err), -DN_POLICY);
    cr_assert(strstr(err.text, "no module \"dunlin.nothing\""), "%s", err.text);
    dn_vm_close(vm);
}

Test(vm, loads_every_embedded_module_once)
{
    struct dn_vm *vm = open_vm(16 << 20, 100000000, DN_NS_PER_S);
    int n = 0;
    for (const struct dn_vm_module *m = dn_vm_modules; m->name; m++, n++) {
        cr_assert_eq(strlen(m->source), m->len, "%s", m->name);
        cr_assert_eq(dn_vm_load(vm, m->source, m->len, m->path, false, &err), 0, "%s", err.text);
        lua_settop(dn_vm_lua(vm), 0);
    }
    cr_assert_gt(n, 0);
    dn_vm_close(vm);
}

Test(vm, gives_all_memory_back)
{
    struct dn_vm *vm = open_vm(0, 0, 0);
    cr_assert_eq(run(vm, "local t = {} while true do t[#t + 1] = ('x'):rep(100) .. #t end", true), -DN_POLICY);
    cr_assert_lt(dn_vm_memory(vm), 1 << 20, "%zu", dn_vm_memory(vm));
    dn_vm_close(vm);
    struct dn_vm_options tiny = {.name = "tiny", .memory_bytes = 10000};
    cr_assert_eq(dn_vm_open(&vm, &tiny, &err), -DN_NO_MEMORY);
}
