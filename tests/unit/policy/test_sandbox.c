#include "policy_util.h"

Test(sandbox, bytecode_is_refused)
{
    must_refuse("\x1bLJ\x02\x08", "p.lua");
}

Test(sandbox, there_is_no_way_out)
{
    static const char *const name[] = {
        "io",         "os",           "debug",        "ffi",      "jit",     "package",        "load",
        "loadstring", "dofile",       "loadfile",     "setfenv",  "getfenv", "rawget",         "rawset",
        "rawequal",   "getmetatable", "setmetatable", "newproxy", "module",  "collectgarbage", "print",
        "pcall",      "xpcall",       "coroutine",    "_G",       "bit"};
    for (size_t i = 0; i < sizeof name / sizeof *name; i++) {
        char source[256], text[64];
        snprintf(source, sizeof source, HOOK("admit", "return %s"), name[i]);
        snprintf(text, sizeof text, "unknown global \"%s\"", name[i]);
        must_refuse(source, text);
    }
    must_refuse(HOOK("admit", "require('os')"), "expected \"dunlin\"");
    must_refuse(HOOK("admit", "require('dunlin.contract')"), "expected \"dunlin\"");
    must_refuse(HOOK("admit", "return math.random()"), "random");
    must_refuse(HOOK("admit", "return string.dump(f)"), "dump");
    must_refuse(HOOK("admit", "return ('').dump(f)"), "dump");
    must_refuse(HOOK("admit", "answer = 42"), "p.lua:1: unknown global \"answer\"");
}

Test(sandbox, unknown_globals_are_found_where_no_run_goes)
{
    must_refuse("local function f(req)\n if req.user == 'x' then\n  return os.time()\n end\nend\n"
                "return { api = 1, name = 'p', admit = f }",
                "p.lua:3: unknown global \"os\"");
    must_refuse(
        "local function f(req)\n --[[ a\n ]] local t = { os = 1, 'io' }\n if t.os == 2 then strin.rep() end\nend\n"
        "return { api = 1, name = 'p', admit = f }",
        "p.lua:4: unknown global \"strin\", did you mean \"string\"?");
}

Test(sandbox, policies_share_nothing)
{
    struct dn_policy_item items[] = {
        {.file = "a.lua",
         .source = "string.len = nil math.abs = nil table.concat = nil "
                   "return { api = 1, name = 'a', route = function() end }"},
        {.file = "b.lua",
         .source = "return { api = 1, name = 'b', route = function() return { reason = table.concat({ "
                   "string.len('ab'), math.abs(-1), ('abc'):len() }) } end }"}};
    struct fixture f = open_items(items, 2);
    admit(&f);
    cr_assert(route(&f));
    cr_assert_str_eq(decision.reason, "213");
    close_fixture(&f);
}

Test(sandbox, files_are_checked_at_load)
{
    must_refuse("return {", "p.lua:1:");
    must_refuse("\n\nlocal x = = 1", "p.lua:3:");
    must_refuse("local x = 1", "p.lua:1: the file returned nil");
    must_refuse("\nreturn { api = 2, name = 'p', admit = function() end }",
                "p.lua:2: api = 2: this node speaks version 1");
    must_refuse("return { name = 'p', admit = function() end }", "api = nil");
    must_refuse("return { api = 1, name = 'P!', admit = function() end }", "expected only a-z");
    must_refuse("return { api = 1, admit = function() end }", "name = nil");
    must_refuse("return { api = 1, name = 'p' }", "no hook");
    must_refuse("return { api = 1, name = 'p', admti = function() end }", "did you mean \"admit\"?");
    must_refuse("return { api = 1, name = 'p', admit = 1 }", "admit = 1: expected a function");
    must_refuse("return { api = 1, name = 'p', tune = function() end }", "\"tune\" is not supported by this build");
    must_refuse("return { api = 1, name = 'p', route = function() end, init = function() return false, 'no' end }",
                "p.lua: init refused: no");
    must_refuse("return { api = 1, name = 'p', route = function() end, init = function() return 5 end }",
                "init returned 5");
    must_refuse("while true do end", "p.lua: policy: ran longer than");
    must_refuse("local s = 'x' while true do s = s .. s end", "p.lua: policy: needs more than 8192 KiB");
    must_refuse("return { api = 1, name = 'p', params = { a = {} }, route = function() end }", "params.a: default nil");
    must_refuse("return { api = 1, name = 'p', params = { a = { default = 5, max = 4 } }, route = function() end }",
                "params.a = 5: expected any to 4");
}

Test(sandbox, params_are_checked_against_the_file)
{
    const char *source =
        "local dunlin = require('dunlin') return { api = 1, name = 'p', params = { "
        "ratio = { default = 0.5, min = 0, max = 1 }, mode = { default = 'a', values = { 'a', 'b' } }, "
        "on = { default = true } }, "
        "route = function() local p = dunlin.params "
        "return { reason = p.ratio .. p.mode .. tostring(p.on) } end }";
    struct dn_policy_param param[] = {{.name = "ratio", .kind = DN_PARAM_NUMBER, .number = 0.25},
                                      {.name = "mode", .kind = DN_PARAM_STRING, .string = "b"},
                                      {.name = "on", .kind = DN_PARAM_BOOLEAN, .boolean = false}};
    struct dn_policy_item item = {.file = "p.lua", .source = source, .param = param, .n_params = 3};
    struct fixture f = open_items(&item, 1);
    admit(&f);
    cr_assert(route(&f));
    cr_assert_str_eq(decision.reason, "0.25bfalse");
    close_fixture(&f);
    struct dn_policy *p = NULL;
    struct dn_policy_config c = {.item = &item, .n_items = 1};
    param[0].number = 2;
    cr_assert_eq(dn_policy_open(&p, &c, NULL, &err), -DN_POLICY);
    cr_assert(strstr(err.text, "params.ratio = 2: expected 0 to 1"), "%s", err.text);
    param[0].number = 1;
    param[1].string = "c";
    cr_assert_eq(dn_policy_open(&p, &c, NULL, &err), -DN_POLICY);
    cr_assert(strstr(err.text, "params.mode = \"c\": expected one of a, b"), "%s", err.text);
    param[1].name = "rato";
    cr_assert_eq(dn_policy_open(&p, &c, NULL, &err), -DN_POLICY);
    cr_assert(strstr(err.text, "no such parameter, did you mean \"ratio\"?"), "%s", err.text);
}

Test(sandbox, names_are_unique)
{
    const char *source = "return { api = 1, name = 'p', route = function() end }";
    struct dn_policy_item items[] = {{.file = "a.lua", .source = source}, {.file = "b.lua", .source = source}};
    struct dn_policy *p = NULL;
    struct dn_policy_config c = {.item = items, .n_items = 2};
    cr_assert_eq(dn_policy_open(&p, &c, NULL, &err), -DN_POLICY);
    cr_assert(strstr(err.text, "b.lua:1: name = \"p\": a.lua has it already"), "%s", err.text);
}

Test(sandbox, a_missing_file_is_named)
{
    struct dn_policy *p = NULL;
    struct dn_policy_item item = {.file = "/nowhere/x.lua"};
    struct dn_policy_config c = {.item = &item, .n_items = 1};
    cr_assert_eq(dn_policy_open(&p, &c, NULL, &err), -DN_POLICY);
    cr_assert_str_eq(err.text, "/nowhere/x.lua: No such file or directory");
}
