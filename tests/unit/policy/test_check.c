#include "policy_util.h"

#include "policy/check.h"

#include "base/json.h"

static struct dn_buf out;

static int check(const struct dn_policy_item *item, size_t n, bool as_json)
{
    struct dn_policy_config c = {.item = item, .n_items = n, .wall_ns = TEST_WALL_NS};
    dn_buf_clear(&out);
    return dn_policy_check(&c, as_json, &out);
}

Test(check, all_problems_of_a_file_are_listed)
{
    struct dn_policy_item items[] = {
        {.file = "a.lua",
         .source = "local function f()\n  return os.time() + foo\nend\nreturn { api = 1, name = 'a', route = f }"},
        {.file = "b.lua", .source = "return {"},
        {.file = "c.lua",
         .source =
             "return { api = 1, name = 'c', admit = function(req)\n return { priority = req.tenant and 500 or 1 } end,"
             "\n route = function(req, node) return req.tennant end, finish = function() end }"},
        {.file = "d.lua", .source = "return { api = 1, name = 'd', admit = function() end, finish = function() end }"}};
    cr_assert_eq(check(items, 4, false), 1);
    cr_assert_str_eq(dn_buf_str(&out),
                     "a.lua:2: unknown global \"os\"\n"
                     "a.lua:2: unknown global \"foo\"\n"
                     "b.lua:1: unexpected symbol near '<eof>'\n"
                     "c.lua:3: req.tennant: no such field, did you mean \"tenant\"?\n"
                     "c.lua:1: admit: priority = 500: expected 0 to 100\n"
                     "d.lua: ok (d: admit finish)\n",
                     "%s", dn_buf_str(&out));
    dn_buf_release(&out);
}

Test(check, json_says_the_same)
{
    struct dn_policy_item items[] = {
        {.file = "a.lua", .source = "foo()\nbar()"},
        {.file = "d.lua", .source = "return { api = 1, name = 'd', admit = function() end }"}};
    cr_assert_eq(check(items, 2, true), 1);
    cr_assert_str_eq(dn_buf_str(&out),
                     "[{\"file\":\"a.lua\",\"ok\":false,\"errors\":[\"a.lua:1: unknown global \\\"foo\\\"\","
                     "\"a.lua:2: unknown global \\\"bar\\\"\"]},"
                     "{\"file\":\"d.lua\",\"ok\":true,\"name\":\"d\",\"hooks\":[\"admit\"],\"errors\":[]}]\n");
    dn_buf_release(&out);
}

Test(check, files_are_also_tried_together)
{
    const char *source = "return { api = 1, name = 'd', admit = function() end }";
    struct dn_policy_item items[] = {{.file = "a.lua", .source = source}, {.file = "b.lua", .source = source}};
    cr_assert_eq(check(items, 2, false), 1);
    cr_assert(strstr(dn_buf_str(&out), "\nb.lua:1: name = \"d\": a.lua has it already\n"), "%s", dn_buf_str(&out));
    dn_buf_release(&out);
}

static const struct dn_policy_item shipped[] = {{.file = DN_SOURCE_DIR "/policies/wishes.lua"},
                                                {.file = DN_SOURCE_DIR "/policies/tiers.lua"},
                                                {.file = DN_SOURCE_DIR "/policies/pressure.lua"}};

Test(check, shipped_policies_pass)
{
    cr_assert_eq(check(shipped, 3, false), 0, "%s", dn_buf_str(&out));
    cr_assert(strstr(dn_buf_str(&out), "tiers.lua: ok (tiers: admit route finish)\n"));
    dn_buf_release(&out);
}

Test(check, show_lists_policies_and_parameters)
{
    struct dn_policy_param param = {.name = "degrade_below", .kind = DN_PARAM_NUMBER, .number = 0.5};
    struct dn_policy_item items[] = {shipped[1], shipped[2]};
    items[0].is_shadow = true;
    items[1].param = &param;
    items[1].n_params = 1;
    struct dn_policy_config c = {.item = items, .n_items = 2, .wall_ns = TEST_WALL_NS};
    cr_assert_eq(dn_policy_show(&c, false, &out), 0, "%s", dn_buf_str(&out));
    const char *text = dn_buf_str(&out);
    cr_assert(strstr(text, "\ntiers          shadow  admit,route,finish"), "%s", text);
    cr_assert(strstr(text, "    Quality tiers. A key's label"), "%s", text);
    cr_assert(strstr(text, "pressure.degrade_below = 0.5 (default 0.3)  0 to 1  free-page ratio under"), "%s", text);
    cr_assert(strstr(text, "tiers.default_tier = free  free | pro | gold  tier of"), "%s", text);
    dn_buf_clear(&out);
    cr_assert_eq(dn_policy_show(&c, true, &out), 0);
    json_t *tree = NULL;
    cr_assert_eq(dn_json_parse(out.data, out.len, &tree, &err), 0, "%s", err.text);
    json_t *second = json_array_get(json_object_get(tree, "policies"), 1);
    cr_assert_str_eq(json_string_value(json_object_get(second, "name")), "pressure");
    cr_assert_eq(json_array_size(json_object_get(second, "params")), 5);
    json_decref(tree);
    dn_buf_release(&out);
}

Test(check, explain_goes_through_one_request)
{
    struct dn_policy_config c = {.item = shipped, .n_items = 3, .wall_ns = TEST_WALL_NS};
    const char *json =
        "{\"tenant\": \"acme\", \"labels\": {\"tier\": \"gold\", \"regulated\": true}, \"max_tokens\": 10,"
        " \"wish\": {\"kv\": \"bf16\"}, \"node\": {\"kv_free_ratio\": 0.1}}";
    cr_assert_eq(dn_policy_explain(&c, json, strlen(json), &out), 0, "%s", dn_buf_str(&out));
    const char *text = dn_buf_str(&out);
    cr_assert(strstr(text, "admit  tiers          priority 90  max_tokens 32768  headers x-tier: gold"), "%s", text);
    cr_assert(strstr(text, "route  wishes         kv_dtype  reason "), "overruled: names only: %s", text);
    cr_assert(strstr(text, "route  pressure       kv_dtype fp8_e4m3  reason kv free 10%"), "%s", text);
    cr_assert(strstr(text, "=      priority=90(tiers) max_tokens=32768(tiers) kv_dtype=fp8_e4m3(pressure) "
                           "integrity=tag(tiers) reason=\"kv free 10%\"(pressure)\n"),
              "%s", text);
    dn_buf_clear(&out);
    json = "{\"labels\": {\"tier\": \"free\"}, \"node\": {\"kv_free_ratio\": 0.01}}";
    cr_assert_eq(dn_policy_explain(&c, json, strlen(json), &out), 0);
    cr_assert(
        strstr(dn_buf_str(&out), "=      503 overloaded by pressure: the node is short of memory (Retry-After: 2)\n"),
        "%s", dn_buf_str(&out));
    dn_buf_clear(&out);
    json = "{\"tennant\": 1}";
    cr_assert_eq(dn_policy_explain(&c, json, strlen(json), &out), 2);
    cr_assert_str_eq(dn_buf_str(&out), "tennant: no such field\n");
    dn_buf_release(&out);
}
