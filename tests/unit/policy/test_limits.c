/* Scripts that loop, grow, recurse, fail and answer nonsense: each ends in time, by its hook's rule. */
#include "policy_util.h"

#include "base/clock.h"

/* Runs a body in admit: closed within `ms`, the kind counted, and the VM works for the next request. */
static void must_stop(const char *body, const char *kind)
{
    struct dn_buf source = {0};
    dn_buf_puts(&source, "local dunlin = require('dunlin') local function f(req, node, so_far) " UNLESS_SMOKE
                         "if req.user == 'good' then return { priority = 3 } end ");
    dn_buf_puts(&source, body);
    dn_buf_puts(&source, " end\nreturn { api = 1, name = 'p', admit = f, route = f, finish = f }");
    struct fixture f = open_source(dn_buf_str(&source));
    uint64_t t0 = dn_now_ns();
    cr_assert(!admit(&f), "%s", body);
    uint64_t took_ns = dn_now_ns() - t0;
    cr_assert_lt(took_ns, 5 * DN_NS_PER_S, "%s took %llu us", body, (unsigned long long)took_ns / 1000);
    cr_assert_eq(reject.status, 503);
    cr_assert_str_eq(reject.code, "policy_error");
    cr_assert(reject.is_failure);
    cr_assert(!strstr(reject.message, "lua") && !strstr(reject.message, "p.lua"), "%s", reject.message);
    cr_assert(strstr(f.vm->last_error.text, "p.lua"), "%s", f.vm->last_error.text);
    char line[128];
    snprintf(line, sizeof line, "dunlin_policy_errors_total{policy=\"p\",hook=\"admit\",kind=\"%s\"} ", kind);
    cr_assert_eq(metric(&f, line), 1, "%s: %s: %s", body, line, f.vm->last_error.text);
    cr_assert_eq(trace.step[0].outcome, DN_POLICY_FAILED);
    cr_assert_eq(decision.set, 0);
    /* route goes on with what there was. */
    decision.set = 1u << DN_DECIDE_PRIORITY;
    decision.priority = 77;
    cr_assert(route(&f));
    cr_assert_eq(decision.set, 1u << DN_DECIDE_PRIORITY);
    cr_assert_eq(decision.priority, 77);
    dn_policy_finish(f.vm, &test_request, &test_result);
    struct dn_request_view good = test_request;
    good.user = "good";
    memset(&decision, 0, sizeof decision);
    cr_assert(dn_policy_admit(f.vm, &good, &test_node, &decision, &reject, &trace), "not usable after: %s", body);
    cr_assert_eq(decision.priority, 3);
    close_fixture(&f);
    dn_buf_release(&source);
}

Test(limits, loops)
{
    must_stop("while true do end", "timeout");
    must_stop("local function g() return g() end return g()", "timeout");
    must_stop("for i = 1, 1e18 do end", "timeout");
    must_stop("repeat until false", "timeout");
    must_stop("::a:: goto a", "timeout");
    must_stop("for _ in function() return 1 end do end", "timeout");
}

Test(limits, loops_inside_callbacks)
{
    must_stop("local t = {} for i = 1, 50 do t[i] = i % 7 end while true do "
              "table.sort(t, function(a, b) return a > b end) end",
              "timeout");
    must_stop("local t = { 1, 2, 3 } table.sort(t, function() while true do end end)", "timeout");
    must_stop("local t = {} for i = 1, 100 do t[i] = i end table.sort(t, function() return true end)", "error");
}

Test(limits, what_could_swallow_the_end_does_not_exist)
{
    must_refuse(HOOK("admit", "while true do pcall(error) end"), "pcall");
    must_refuse(HOOK("admit", "xpcall(error, error)"), "xpcall");
    must_refuse(HOOK("admit", "coroutine.wrap(error)()"), "coroutine");
    must_refuse(HOOK("admit", "return ('x'):gsub('x', function() while true do end end)"), "gsub");
    must_refuse(HOOK("admit", "return string.gsub('x', 'x', 'y')"), "gsub");
}

Test(limits, pattern_bombs_by_both_syntaxes)
{
    must_refuse(HOOK("admit", "local s = ('a'):rep(60) return s:match('.-.-.-.-.-b')"), "match");
    must_refuse(HOOK("admit", "return string.match(('a'):rep(60), '.-.-.-.-.-b')"), "match");
    must_refuse(HOOK("admit", "for w in ('a'):gmatch('.-.-.-b') do end"), "gmatch");
    /* find exists and takes the bomb as plain text: nothing is found, at once. */
    struct fixture f = open_source(HOOK("admit", "local s = ('a'):rep(60000) "
                                                 "assert(not s:find('.-.-.-.-.-b') and not string.find(s, '.-.-.-b')) "
                                                 "return { priority = 1 }"));
    uint64_t t0 = dn_now_ns();
    cr_assert(admit(&f));
    cr_assert_lt(dn_now_ns() - t0, 50 * DN_NS_PER_MS);
    close_fixture(&f);
    must_stop("local s = ('a'):rep(60000) return { reason = tostring(dunlin.glob(s, '*a*a*a*a*a*a*b')) }", "timeout");
}

Test(limits, memory)
{
    must_stop("local s = 'x' while true do s = s .. s end", "memory");
    must_stop("while true do local s = ('x'):rep(65536) end", "timeout");
    must_stop("local t = {} for i = 1, 1e9 do t[i] = ('x'):rep(65536) .. i end", "memory");
    must_stop("local s = ('x'):rep(65536) local t = {} for i = 1, 5000 do t[i] = s end return table.concat(t)",
              "memory");
    must_stop("return ('x'):rep(1e9)", "error");
    must_stop("return string.rep('x', 1e15)", "error");
    must_stop("return ('%99999999d'):format(1)", "error");
}

Test(limits, a_table_bomb_ends_by_memory_or_by_instructions)
{
    struct fixture f = open_source(HOOK("admit", UNLESS_SMOKE "local t = {} while true do t[#t + 1] = { t } end"));
    cr_assert(!admit(&f));
    cr_assert(f.vm->is_stale);
    close_fixture(&f);
}

Test(limits, recursion)
{
    must_stop("local function g() return 1 + g() end return g()", "error");
    must_stop("return unpack({}, 1, 1e7)", "error");
    must_stop("local t = {} t[1] = t return { reason = t }", "type");
}

Test(limits, errors_of_every_kind)
{
    must_stop("error('text')", "error");
    must_stop("error({ 1 })", "error");
    must_stop("error(nil)", "error");
    must_stop("error(error)", "error");
    must_stop("error(('x'):rep(60000))", "error");
    must_stop("local x = nil; return x.y", "error");
    must_stop("return {} .. {}", "error");
}

Test(limits, answers_against_the_contract)
{
    must_stop("return 1", "type");
    must_stop("return 'x'", "type");
    must_stop("return true", "type");
    must_stop("return error", "type");
    must_stop("return { 1 }", "field");
    must_stop("return { kv_dtpye = 'bf16' }", "field");
    must_stop("return { [true] = 1 }", "field");
    must_stop("return { [node] = 1 }", "field");
    must_stop("return { priority = '1' }", "type");
    must_stop("return { priority = 1.5 }", "type");
    must_stop("return { priority = 0 / 0 }", "type");
    must_stop("return { priority = 1 / 0 }", "type");
    must_stop("return { priority = 101 }", "range");
    must_stop("return { priority = -1 }", "range");
    must_stop("return { max_tokens = 0 }", "range");
    must_stop("return { max_tokens = 2 ^ 31 }", "range");
    must_stop("return { kv_dtype = 'fp9' }", "range");
    must_stop("return { kv_dtype = 8 }", "type");
    must_stop("return { kv_dtype = 'int8' }", "range");
    must_stop("return { decode_weights = 'fp8' }", "range");
    must_stop("return { decode_pool = 'elsewhere' }", "range");
    must_stop("return { cache_write = 1 }", "type");
    must_stop("return { cache_salt = '' }", "range");
    must_stop("return { cache_salt = ('x'):rep(200) }", "range");
    must_stop("return { cache_salt = 'a\\0b' }", "range");
    must_stop("return { headers = { ['server'] = 'x' } }", "range");
    must_stop("return { headers = { ['x-a'] = 'b\\r\\nset-cookie: c' } }", "range");
    must_stop("return { headers = { ['x-a\\n'] = 'b' } }", "range");
    must_stop("return { headers = { ['x-request-id'] = 'b' } }", "range");
    must_stop("return { headers = 'x' }", "type");
    must_stop("return { priority = 5, kv_dtype = 'fp9' }", "range");
    must_stop("return dunlin.reject(200, 'ok', 'fine')", "error");
    must_stop("return dunlin.reject(429, 'no', 'x', { retry = 1 })", "error");
    must_stop("return dunlin.reject(429, 'no', 'x', { retry_after = -1 })", "error");
    must_stop("return { integrity = 'full' }", "range");
}

Test(limits, messages_say_where_what_and_what_would_be_right)
{
    static const struct {
        const char *body, *text;
    } row[] = {
        {"return { integrity = 'full' }",
         "p.lua:1: admit: integrity = \"full\": not supported by this build: expected one of off, tag"},
        {"return { kv_dtpye = 1 }",
         "p.lua:1: admit: returned an unknown field \"kv_dtpye\", did you mean \"kv_dtype\"?"},
        {"return { kv_dtype = 'fp8' }", "p.lua:1: admit: kv_dtype = \"fp8\": expected one of bf16, fp8_e4m3"},
        {"\n return req.tennant", "p.lua:2: req.tennant: no such field, did you mean \"tenant\"?"},
        {"req.tenant = 'x'", "p.lua:1: req.tenant: read-only"},
        {"node.kv.free_ratio = 1", "p.lua:1: node.kv.free_ratio: read-only"},
        {"req.labels.tier = 'gold'", "p.lua:1: req.labels.tier: read-only"},
        {"dunlin.bucket = nil", "p.lua:1: dunlin.bucket: read-only"},
        {"return dunlin.bukcet('x')", "p.lua:1: dunlin.bukcet: no such field, did you mean \"bucket\"?"},
        {"return dunlin.params.x", "p.lua:1: params.x: no such field"},
        {"return dunlin.bucket('x', { rate = 0, burst = 1 })",
         "p.lua:1: admit: bucket \"x\": expected a positive rate"},
        {"return { decode_weights = 'fp8' }",
         "p.lua:1: admit: decode_weights = \"fp8\": model \"smollm2\" has no such weights: expected one of bf16, int4"},
        {"return { model = 'gpt' }", "p.lua:1: admit: model = \"gpt\": no such model: expected one of small, smollm2"},
    };
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        struct dn_buf source = {0};
        dn_buf_puts(&source, "local dunlin = require('dunlin') local function f(req, node, so_far) ");
        dn_buf_puts(&source, row[i].body);
        dn_buf_puts(&source, " end return { api = 1, name = 'p', admit = f }");
        must_refuse(dn_buf_str(&source), row[i].text);
        dn_buf_release(&source);
    }
}

Test(limits, the_default_budget_is_a_millisecond)
{
    struct dn_policy_item item = {.file = "p.lua", .source = HOOK("route", UNLESS_SMOKE "while true do end")};
    struct dn_policy_config c = {.item = &item, .n_items = 1, .instructions = UINT64_MAX / 2};
    struct fixture f = {.metrics = dn_metrics_open()};
    cr_assert_eq(dn_policy_open(&f.p, &c, f.metrics, &err), 0, "%s", err.text);
    cr_assert_eq(dn_policy_vm_open(&f.vm, f.p, "loop0", &err), 0);
    uint64_t t0 = dn_now_ns();
    cr_assert(route(&f));
    cr_assert_lt(dn_now_ns() - t0, 2 * DN_NS_PER_S);
    cr_assert_str_eq(f.vm->last_error.text, "p.lua:1: route: policy: ran longer than 1 ms");
    close_fixture(&f);
}

Test(limits, rejecting_in_route_is_an_error_of_the_policy)
{
    struct fixture f = open_source(HOOK("route", UNLESS_SMOKE "return dunlin.reject(403, 'no', '')"));
    cr_assert(admit(&f) && route(&f));
    cr_assert_eq(trace.step[0].outcome, DN_POLICY_FAILED);
    close_fixture(&f);
}

Test(limits, the_configuration_can_change_the_error_rules)
{
    struct dn_policy_item item = {.file = "p.lua",
                                  .source = "local function f(req) " UNLESS_SMOKE "error('x') end "
                                            "return { api = 1, name = 'p', admit = f, route = f }",
                                  .on_admit_error = DN_ON_ERROR_IGNORE,
                                  .on_route_error = DN_ON_ERROR_REJECT};
    struct fixture f = open_items(&item, 1);
    cr_assert(admit(&f));
    cr_assert(!route(&f));
    cr_assert_str_eq(reject.code, "policy_error");
    cr_assert_str_eq(reject.policy, "p");
    cr_assert_eq(metric(&f, "dunlin_policy_fallback_total{hook=\"route\"} "), 1);
    close_fixture(&f);
}

Test(limits, a_policy_behind_one_that_ran_out_still_runs)
{
    struct dn_policy_item items[] = {
        {.file = "a.lua", .source = "return { api = 1, name = 'a', route = function() return { priority = 4 } end }"},
        {.file = "b.lua",
         .source = "return { api = 1, name = 'b', route = function(req) " UNLESS_SMOKE "while true do end end }"},
        {.file = "c.lua",
         .source = "return { api = 1, name = 'c', route = function(req, node, so_far) "
                   "return { reason = req.id .. so_far.priority .. node.kv.pages_free } end }"}};
    struct fixture f = open_items(items, 3);
    admit(&f);
    cr_assert(route(&f));
    cr_assert_str_eq(decision.reason, "req_14900");
    cr_assert_eq(trace.n_steps, 3);
    cr_assert_eq(metric(&f, "dunlin_policy_vm_recycled_total{reason=\"instructions\"} "), 1);
    close_fixture(&f);
}

Test(limits, a_state_that_ran_out_is_replaced)
{
    struct fixture f = open_source("local n = 0 local function f(req) " UNLESS_SMOKE
                                   " n = n + 1 if req.user == 'bad' then while true do end end "
                                   "return { priority = n } end return { api = 1, name = 'p', admit = f }");
    admit(&f);
    admit(&f);
    cr_assert_eq(decision.priority, 2);
    struct dn_request_view bad = test_request;
    bad.user = "bad";
    cr_assert(!dn_policy_admit(f.vm, &bad, &test_node, &decision, &reject, NULL));
    cr_assert(dn_policy_vm_idle(f.vm));
    admit(&f);
    cr_assert_eq(decision.priority, 1);
    close_fixture(&f);
}

Test(limits, the_breaker_opens_after_twenty_failures)
{
    struct fixture f =
        open_source("local n = 0 local function f(req) " UNLESS_SMOKE "n = n + 1 error('failure ' .. n) end "
                    "return { api = 1, name = 'p', admit = f, route = f }");
    for (int i = 0; i < 25; i++) {
        cr_assert(!admit(&f), "open: still closed to requests");
        cr_assert_eq(reject.status, 503);
        cr_assert_eq(trace.step[0].outcome, i < 20 ? DN_POLICY_FAILED : DN_POLICY_SKIPPED, "%d", i);
        cr_assert(route(&f));
    }
    cr_assert_eq(metric(&f, "dunlin_policy_calls_total{policy=\"p\",hook=\"admit\"} "), 20);
    cr_assert_eq(dn_policy_reload(f.p, NULL, &err), 0, "%s", err.text);
    admit(&f);
    cr_assert_eq(trace.step[0].outcome, DN_POLICY_FAILED, "a reload closes the breaker");
    close_fixture(&f);
}

Test(limits, memory_stays_where_it_is_over_many_requests)
{
    struct fixture f = open_source(
        "local dunlin = require('dunlin') local function f(req, node, so_far) "
        "local b = dunlin.bucket('b', { rate = 1, burst = 1 }) b:take(req.id, 1) local t = { req.labels, node } "
        "return { priority = 1, reason = 'r' .. req.id, headers = { ['x-id'] = req.id } } end "
        "return { api = 1, name = 'p', admit = f, route = f, finish = f }");
    struct dn_node_view node = test_node;
    struct dn_request_view r = test_request;
    for (int i = 0; i < 20000; i++) {
        char id[32];
        snprintf(id, sizeof id, "req_%d", i);
        r.id = id;
        node.version++;
        node.running = i;
        memset(&decision, 0, sizeof decision);
        cr_assert(dn_policy_admit(f.vm, &r, &node, &decision, &reject, NULL), "%s", f.vm->last_error.text);
        cr_assert(dn_policy_route(f.vm, &r, &node, &decision, &reject, NULL));
        dn_policy_finish(f.vm, &r, &test_result);
        cr_assert_lt(dn_policy_vm_memory(f.vm), 2u << 20, "%d", i);
    }
    cr_assert_eq(metric(&f, "dunlin_policy_vm_recycled_total{reason=\"memory\"} "), 0);
    close_fixture(&f);
}

Test(limits, models_and_pools_come_and_go)
{
    struct fixture f = open_source(HOOK("admit", "local n = {} for name in pairs(node.models) do n[#n + 1] = name end "
                                                 "table.sort(n) local m = node.models.small "
                                                 "return { reason = table.concat(n, ' ') .. "
                                                 "tostring(m and m.kv_dtypes.fp8_e4m3) }"));
    struct dn_model_view model[] = {test_model[0], test_model[1]};
    struct dn_node_view node = test_node;
    static const char *const want[] = {"small smollm2nil", "smollm2nil", "small smollm2true", "nil"};
    for (int i = 0; i < 4; i++) {
        node.version++;
        node.model = model;
        node.n_models = i == 1 ? 1 : i == 3 ? 0 : 2;
        model[1].has_kv[DN_DECIDE_KV_FP8] = i == 2;
        memset(&decision, 0, sizeof decision);
        cr_assert(dn_policy_admit(f.vm, &test_request, &node, &decision, &reject, NULL));
        cr_assert_str_eq(decision.reason, want[i]);
    }
    close_fixture(&f);
}
