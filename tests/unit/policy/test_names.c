/* One list of names in five places: contract.lua, decision.h, kernels.h. */
#include "policy_util.h"

#include "kernels/kernels.h"

#include <lua.h>

static void ask(struct dn_vm *vm, const char *source)
{
    cr_assert_eq(dn_vm_load(vm, source, strlen(source), "ask", false, &err), 0, "%s", err.text);
    cr_assert_eq(dn_vm_call(vm, 0, 1, &err), 0, "%s", err.text);
}

Test(names, contract_and_header_list_the_same_fields_and_words)
{
    struct dn_vm *vm = NULL;
    struct dn_vm_options o = {.name = "t", .code = DN_POLICY};
    cr_assert_eq(dn_vm_open(&vm, &o, &err), 0);
    ask(vm,
        "local c, t = require('dunlin.contract'), {} for i, f in ipairs(c.fields) do t[i] = f.name end "
        "return table.concat(t, ' ') .. '|' .. table.concat(c.WEIGHTS, ' ') .. '|' .. table.concat(c.KV, ' ') .. '|' "
        ".. table.concat(c.field.integrity.values, ' ') .. '|' .. c.HEADERS_MAX");
    struct dn_buf want = {0};
    for (int f = 0; f < DN_DECIDE_COUNT; f++)
        dn_buf_printf(&want, "%s%s", f ? " " : "", dn_decision_field_name((enum dn_decision_field)f));
    for (int w = 0; w < DN_DECIDE_W_COUNT; w++)
        dn_buf_printf(&want, "%s%s", w ? " " : "|", dn_decide_weights_name((enum dn_decide_weights)w));
    for (int k = 0; k < DN_DECIDE_KV_COUNT; k++)
        dn_buf_printf(&want, "%s%s", k ? " " : "|", dn_decide_kv_name((enum dn_decide_kv)k));
    for (int i = 0; i < DN_DECIDE_INTEGRITY_COUNT; i++)
        dn_buf_printf(&want, "%s%s", i ? " " : "|", dn_decide_integrity_name((enum dn_decide_integrity)i));
    dn_buf_printf(&want, "|%d", DN_DECIDE_HEADERS_MAX);
    cr_assert_str_eq(lua_tostring(dn_vm_lua(vm), -1), dn_buf_str(&want));
    dn_buf_release(&want);
    dn_vm_close(vm);
}

Test(names, formats_are_those_of_the_kernels)
{
    cr_assert_eq((int)DN_DECIDE_W_COUNT, (int)DN_W_FORMATS);
    for (int w = 0; w < DN_DECIDE_W_COUNT; w++)
        cr_assert_str_eq(dn_decide_weights_name((enum dn_decide_weights)w),
                         dn_weight_format_name((enum dn_weight_format)w));
    cr_assert_eq((int)DN_DECIDE_KV_COUNT, (int)DN_KV_FORMATS);
    for (int k = 0; k < DN_DECIDE_KV_COUNT; k++)
        cr_assert_str_eq(dn_decide_kv_name((enum dn_decide_kv)k), dn_kv_format_name((enum dn_kv_format)k));
}

Test(names, the_guarded_functions_of_the_bench_do_what_those_of_the_node_do)
{
    struct dn_vm *vm = NULL;
    struct dn_vm_options o = {.name = "t", .code = DN_POLICY};
    cr_assert_eq(dn_vm_open(&vm, &o, &err), 0);
    dn_vm_push_strings(vm);
    lua_setglobal(dn_vm_lua(vm), "guarded");
    /* The bench's list of names is the node's, and find and rep agree on the corners. Host code may call pcall. */
    ask(vm,
        "local p = require('dunlin.patterns') local lib = p.library() "
        "for name in pairs(guarded) do assert(lib[name], name .. ' is missing in the bench') end "
        "for name in pairs(lib) do assert(guarded[name], name .. ' is missing in the node') end "
        "local function same(name, ...) "
        "  local a, b = { pcall(guarded[name], ...) }, { pcall(lib[name], ...) } "
        "  assert(a[1] == b[1], name) "
        "  if a[1] then for i = 2, 4 do assert(a[i] == b[i], name .. tostring((...)) .. tostring(a[i])) end end end "
        "for _, s in ipairs({ '', 'a', 'abc', 'a.c', 'aaab' }) do for _, w in ipairs({ '', 'a', '.', 'ab', 'b' }) do "
        "for _, i in ipairs({ -10, -2, -1, 0, 1, 2, 3, 4, 5, 6 }) do same('find', s, w, i) end same('find', s, w) end "
        "for _, n in ipairs({ -1, 0, 1, 2, 2.5, 65536, 65537, 1e15 }) do same('rep', s, n) end end return 'same'");
    cr_assert_str_eq(lua_tostring(dn_vm_lua(vm), -1), "same");
    dn_vm_close(vm);
}
