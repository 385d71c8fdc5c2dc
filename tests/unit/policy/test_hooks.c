#include "policy_util.h"

#include "base/clock.h"

#include <stdlib.h>

Test(hooks, no_files_decide_nothing)
{
    struct fixture f = open_items(NULL, 0);
    cr_assert(admit(&f) && route(&f));
    cr_assert_eq(decision.set, 0);
    dn_policy_finish(f.vm, &test_request, &test_result);
    close_fixture(&f);
}

Test(hooks, a_decision_arrives_field_by_field)
{
    struct fixture f = open_source(
        HOOK("admit", "return { model = node.models.small and 'small', priority = 7, max_tokens = 99, "
                      "queue_timeout_ms = 0, prefill_pool = node.pools.main and 'main', decode_pool = 'main', "
                      "prefill_weights = 'bf16', decode_weights = 'bf16', kv_dtype = 'bf16', integrity = 'off', "
                      "cache_salt = 's', cache_write = false, headers = { ['x-b'] = '2', ['x-a'] = '1' }, "
                      "reason = 'why' }"));
    cr_assert(admit(&f));
    cr_assert_eq(decision.set, (1u << DN_DECIDE_COUNT) - 1, "%x", decision.set);
    cr_assert_str_eq(decision.model, "small");
    cr_assert_eq(decision.priority, 7);
    cr_assert_eq(decision.max_tokens, 99);
    cr_assert_eq(decision.queue_timeout_ms, 0);
    cr_assert_str_eq(decision.decode_pool, "main");
    cr_assert_eq(decision.prefill_weights, DN_DECIDE_W_BF16);
    cr_assert_eq(decision.kv_dtype, DN_DECIDE_KV_BF16);
    cr_assert_eq(decision.integrity, DN_DECIDE_INTEGRITY_OFF);
    cr_assert(!decision.cache_write);
    cr_assert_eq(decision.n_headers, 2);
    cr_assert_str_eq(decision.header[0].name, "x-a");
    cr_assert_str_eq(decision.header[1].value, "2");
    cr_assert_str_eq(decision.reason, "why");
    cr_assert_str_eq(trace.by[DN_DECIDE_KV], "p");
    cr_assert_eq(trace.n_steps, 1);
    cr_assert_eq(trace.step[0].outcome, DN_POLICY_DECIDED);
    close_fixture(&f);
}

Test(hooks, later_policies_see_and_override_but_caps_only_shrink_and_integrity_only_rises)
{
    struct dn_policy_item items[] = {
        {.file = "a.lua",
         .source = "return { api = 1, name = 'a', route = function() return { kv_dtype = 'bf16', max_tokens = 50, "
                   "integrity = 'tag', priority = 1, headers = { ['x-a'] = '1' }, reason = 'a' } end }"},
        {.file = "b.lua",
         .source = "return { api = 1, name = 'b', route = function(req, node, so_far) assert(so_far.kv_dtype == 'bf16')"
                   " return { kv_dtype = node.models[req.model].kv_dtypes.fp8_e4m3 and 'fp8_e4m3' or nil, "
                   "max_tokens = 80, integrity = 'off', priority = 2, headers = { ['x-b'] = so_far.headers['x-a'] } }"
                   " end }"}};
    struct fixture f = open_items(items, 2);
    cr_assert(admit(&f));
    cr_assert(route(&f));
    cr_assert_eq(decision.kv_dtype, DN_DECIDE_KV_FP8);
    cr_assert_eq(decision.max_tokens, 50);
    cr_assert_eq(decision.integrity, DN_DECIDE_INTEGRITY_TAG);
    cr_assert_eq(decision.priority, 2);
    cr_assert_eq(decision.n_headers, 2);
    cr_assert_str_eq(decision.header[1].value, "1");
    cr_assert_str_eq(trace.by[DN_DECIDE_KV], "b");
    cr_assert_str_eq(trace.by[DN_DECIDE_MAX_TOKENS], "a");
    cr_assert_str_eq(trace.by[DN_DECIDE_INTEGRITY], "a");
    struct dn_buf text = {0};
    dn_policy_trace_print(&trace, &decision, &text);
    cr_assert_str_eq(dn_buf_str(&text), "priority=2(b) max_tokens=50(a) kv_dtype=fp8_e4m3(b) integrity=tag(a) "
                                        "reason=\"a\"(a)");
    dn_buf_release(&text);
    cr_assert_eq(metric(&f, "dunlin_policy_decisions_total{field=\"kv_dtype\",value=\"fp8_e4m3\"} "), 1);
    close_fixture(&f);
}

Test(hooks, what_admit_decided_is_seen_in_route)
{
    struct fixture f = open_source(
        "local function admit(req) return { priority = 33, cache_salt = req.tenant ~= '' and req.tenant or nil } end "
        "local function route(req, node, so_far) assert(so_far.priority == 33) "
        "return { reason = (so_far.cache_salt or '') .. req.prompt_tokens } end "
        "return { api = 1, name = 'p', admit = admit, route = route }");
    cr_assert(admit(&f) && route(&f));
    cr_assert_str_eq(decision.reason, "acme100");
    close_fixture(&f);
}

/* What dunlin.reject() has checked stays in the policy's hands until admit returns it. */
Test(hooks, a_rejection_that_was_changed_is_an_error)
{
    static const char *const change[] = {
        "r.message = ('x'):rep(1000)", "r.code = ('x'):rep(100)", "r.code = nil",           "r.message = {}",
        "r.param = ('x'):rep(100)",    "r.status = 200",          "r.retry_after = 'soon'",
    };
    for (size_t i = 0; i < sizeof change / sizeof *change; i++) {
        char source[512];
        snprintf(source, sizeof source,
                 HOOK("admit", UNLESS_SMOKE "local r = dunlin.reject(429, 'slow_down', 'too fast') %s return r"),
                 change[i]);
        struct fixture f = open_source(source);
        cr_assert(!admit(&f));
        cr_assert(reject.is_failure, "%s", change[i]);
        cr_assert(strstr(f.vm->last_error.text, "reject: "), "%s: %s", change[i], f.vm->last_error.text);
        close_fixture(&f);
    }
}

Test(hooks, a_rejection_arrives_and_ends_the_list)
{
    struct dn_policy_item items[] = {
        {.file = "a.lua",
         .source =
             HOOK("admit", "return dunlin.reject(429, 'slow_down', 'too fast', { retry_after = 1.2, param = 'n' })")},
        {.file = "b.lua", .source = "return { api = 1, name = 'b', admit = function() return { priority = 1 } end }"}};
    struct fixture f = open_items(items, 2);
    cr_assert(!admit(&f));
    cr_assert_eq(reject.status, 429);
    cr_assert_str_eq(reject.code, "slow_down");
    cr_assert_str_eq(reject.message, "too fast");
    cr_assert_str_eq(reject.param, "n");
    cr_assert_str_eq(reject.policy, "p");
    cr_assert_eq(reject.retry_after_s, 2);
    cr_assert(!reject.is_failure);
    cr_assert_eq(trace.n_steps, 1);
    cr_assert_eq(decision.set, 0);
    cr_assert_eq(metric(&f, "dunlin_policy_rejects_total{policy=\"p\",code=\"slow_down\"} "), 1);
    close_fixture(&f);
}

Test(hooks, request_node_and_result_are_seen_as_they_are)
{
    struct fixture f = open_source(
        "local dunlin = require('dunlin') local seen = dunlin.counter('seen')\n"
        "local function route(req, node)\n" UNLESS_SMOKE "\n"
        "  assert(req.id == 'req_9' and req.endpoint == 'completions' and req.stream and req.n == 2 and req.tools == "
        "3)\n"
        "  assert(req.tenant == 'acme' and req.key_id == nil and req.user == nil and req.client_ip == '192.0.2.7')\n"
        "  assert(req.labels.tier == 'gold' and req.labels.regulated == true and req.labels.other == nil)\n"
        "  assert(#req.headers['user-agent'] == 1024 and req.metadata.session == 's')\n"
        "  assert(req.max_tokens == nil and req.temperature == 0.5 and req.prompt_bytes == 12 and req.prompt_tokens == "
        "4)\n"
        "  assert(req.cached.bf16 == 64 and req.cached.fp8_e4m3 == 0)\n"
        "  assert(req.wish.kv == 'fp8_e4m3' and req.wish.integrity == nil)\n"
        "  assert(node.time.hour == 12 and node.kv.free_ratio == 0.9 and node.kv.pages_free == 900)\n"
        "  assert(node.queue.waiting == 0 and node.running == 0 and node.pools.main.healthy)\n"
        "  assert(node.models.small.kv_dtypes.fp8_e4m3 == nil and node.models.smollm2.weights.int4)\n"
        "  local n = 0 for name, m in pairs(node.models) do n = n + m.context end assert(n == 4096)\n"
        "  for k, v in pairs(req.labels) do n = n + 1 end assert(n == 4098)\n"
        "  return { reason = 'all seen' }\n"
        "end\n"
        "local function finish(req, result)\n"
        "  if req.id == 'req_smoke' then return end\n"
        "  assert(result.status == 200 and result.finish_reason == 'stop' and result.prompt_tokens == 100)\n"
        "  assert(result.code == nil and result.completion_tokens == 20)\n"
        "  seen:add(3, 'x')\n"
        "end\n"
        "return { api = 1, name = 'p', route = route, finish = finish }");
    char agent[2000];
    memset(agent, 'a', sizeof agent);
    agent[sizeof agent - 1] = '\0';
    struct dn_view_pair label[] = {{"tier", "gold"}, {"regulated", NULL}}, header[] = {{"user-agent", agent}},
                        metadata[] = {{"session", "s"}};
    struct dn_request_view r = {.id = "req_9",
                                .endpoint = "completions",
                                .model = "smollm2",
                                .tenant = "acme",
                                .client_ip = "192.0.2.7",
                                .label = label,
                                .n_labels = 2,
                                .header = header,
                                .n_headers = 1,
                                .metadata = metadata,
                                .n_metadata = 1,
                                .stream = true,
                                .n = 2,
                                .n_tools = 3,
                                .max_tokens = -1,
                                .temperature = 0.5,
                                .prompt_bytes = 12,
                                .prompt_tokens = 4,
                                .cached_tokens = {64, 0},
                                .wish_kv = "fp8_e4m3"};
    memset(&decision, 0, sizeof decision);
    cr_assert(dn_policy_route(f.vm, &r, &test_node, &decision, &reject, NULL));
    cr_assert_str_eq(decision.reason, "all seen", "%s", f.vm->last_error.text);
    dn_policy_finish(f.vm, &r, &test_result);
    cr_assert_eq(metric(&f, "dunlin_policy_user_total{policy=\"p\",name=\"seen\",label=\"x\"} "), 3);
    /* Nothing of a request is left for the next one. */
    r = (struct dn_request_view){.id = "req_smoke", .model = "smollm2", .max_tokens = -1, .prompt_tokens = -1};
    close_fixture(&f);
    f = open_source(HOOK("admit", "local n = 0 for _ in pairs(req.labels) do n = n + 1 end "
                                  "for _ in pairs(req.metadata) do n = n + 1 end "
                                  "return { reason = n .. tostring(req.tenant) .. tostring(req.wish.kv) }"));
    struct dn_request_view full = {.id = "a",
                                   .tenant = "acme",
                                   .label = label,
                                   .n_labels = 2,
                                   .metadata = metadata,
                                   .n_metadata = 1,
                                   .wish_kv = "k"};
    dn_policy_admit(f.vm, &full, &test_node, &decision, &reject, NULL);
    cr_assert_str_eq(decision.reason, "3acmek");
    dn_policy_admit(f.vm, &r, &test_node, &decision, &reject, NULL);
    cr_assert_str_eq(decision.reason, "0nilnil");
    close_fixture(&f);
}

Test(hooks, a_changed_snapshot_is_seen_and_an_unchanged_one_is_kept)
{
    struct fixture f = open_source(HOOK("admit", "return { reason = tostring(node.running) }"));
    struct dn_node_view n = test_node;
    for (int i = 0; i < 3; i++) {
        n.version++;
        n.running = i * 7;
        memset(&decision, 0, sizeof decision);
        cr_assert(dn_policy_admit(f.vm, &test_request, &n, &decision, &reject, NULL));
        cr_assert_eq(atoi(decision.reason), i * 7);
    }
    n.running = 1000; /* same version: not looked at */
    cr_assert(dn_policy_admit(f.vm, &test_request, &n, &decision, &reject, NULL));
    cr_assert_eq(atoi(decision.reason), 14);
    close_fixture(&f);
}

Test(hooks, a_shadow_runs_and_changes_nothing)
{
    struct dn_policy_item items[] = {
        {.file = "a.lua", .is_shadow = true, .source = HOOK("admit", "return { priority = 1 }")},
        {.file = "b.lua",
         .is_shadow = true,
         .source =
             "return { api = 1, name = 'b', admit = function() return require('dunlin').reject(403, 'no', '') end }"},
        {.file = "c.lua",
         .is_shadow = true,
         .source = "return { api = 1, name = 'c', admit = function(req) " UNLESS_SMOKE "error('x') end }"},
        {.file = "d.lua", .source = "return { api = 1, name = 'd', admit = function() return { priority = 9 } end }"}};
    struct fixture f = open_items(items, 4);
    cr_assert(admit(&f));
    cr_assert_eq(decision.priority, 9);
    cr_assert_eq(trace.n_steps, 4);
    cr_assert(trace.step[0].is_shadow);
    cr_assert_eq(trace.step[0].fields, 1u << DN_DECIDE_PRIORITY);
    cr_assert_eq(trace.step[1].outcome, DN_POLICY_REJECTED);
    cr_assert_eq(trace.step[2].outcome, DN_POLICY_FAILED);
    cr_assert_str_eq(trace.by[DN_DECIDE_PRIORITY], "d");
    close_fixture(&f);
}

Test(hooks, shipped_policies_load_and_work_together)
{
    static const char *const file[] = {DN_SOURCE_DIR "/policies/wishes.lua", DN_SOURCE_DIR "/policies/tiers.lua",
                                       DN_SOURCE_DIR "/policies/pressure.lua"};
    struct dn_policy_item items[3] = {{.file = file[0]}, {.file = file[1]}, {.file = file[2]}};
    struct fixture f = open_items(items, 3);
    struct dn_view_pair gold = {"tier", "gold"};
    struct dn_request_view r = test_request;
    r.label = &gold;
    r.n_labels = 1;
    memset(&decision, 0, sizeof decision);
    memset(&trace, 0, sizeof trace);
    cr_assert(dn_policy_admit(f.vm, &r, &test_node, &decision, &reject, &trace), "%s", reject.message);
    cr_assert_eq(decision.max_tokens, 32768);
    cr_assert_eq(decision.priority, 90);
    cr_assert_str_eq(decision.header[0].value, "gold");
    r.prompt_tokens = 100;
    cr_assert(dn_policy_route(f.vm, &r, &test_node, &decision, &reject, &trace));
    cr_assert_eq(decision.kv_dtype, DN_DECIDE_KV_BF16);
    struct dn_node_view low = test_node;
    low.version = 2;
    low.kv_free_ratio = 0.1;
    cr_assert(dn_policy_route(f.vm, &r, &low, &decision, &reject, &trace));
    cr_assert_eq(decision.kv_dtype, DN_DECIDE_KV_FP8);
    cr_assert_str_eq(trace.by[DN_DECIDE_KV], "pressure");
    cr_assert_str_eq(decision.reason, "kv free 10%");
    dn_policy_finish(f.vm, &r, &test_result);
    cr_assert_eq(metric(&f, "dunlin_policy_calls_total{policy=\"tiers\",hook=\"finish\"} "), 1);
    close_fixture(&f);
}

Test(hooks, a_node_of_many_models_and_pools_costs_a_policy_nothing_of_its_budget)
{
    static char name[DN_VIEW_MODELS_MAX][16];
    static struct dn_model_view model[DN_VIEW_MODELS_MAX];
    static struct dn_pool_view pool[DN_VIEW_POOLS_MAX];
    for (int i = 0; i < DN_VIEW_MODELS_MAX; i++) {
        snprintf(name[i], sizeof name[i], "m%d", i);
        model[i] =
            (struct dn_model_view){.name = name[i], .context_tokens = i, .has_weights = {1, 1, 1, 1}, .has_kv = {1, 1}};
    }
    for (int i = 0; i < DN_VIEW_POOLS_MAX; i++)
        pool[i] = (struct dn_pool_view){.name = name[i], .running = i, .is_healthy = true, .has_weights = {1, 1, 1, 1}};
    struct dn_policy_item item = {
        .file = "p.lua", .source = HOOK("admit", "local p = node.pools.m31 return { priority = p and p.running }")};
    struct dn_policy_config c = {.item = &item, .n_items = 1, .instructions = 1000, .wall_ns = TEST_WALL_NS};
    struct fixture f = {.metrics = dn_metrics_open()};
    cr_assert_eq(dn_policy_open(&f.p, &c, f.metrics, &err), 0, "%s", err.text);
    cr_assert_eq(dn_policy_vm_open(&f.vm, f.p, "loop0", &err), 0);
    struct dn_node_view node = {
        .version = 1, .pool = pool, .n_pools = DN_VIEW_POOLS_MAX, .model = model, .n_models = DN_VIEW_MODELS_MAX};
    for (int i = 0; i < 3; i++) {
        node.version++;
        pool[31].running = 31 + i;
        memset(&decision, 0, sizeof decision);
        cr_assert(dn_policy_admit(f.vm, &test_request, &node, &decision, &reject, NULL), "%s", f.vm->last_error.text);
        cr_assert_eq(decision.priority, 31 + i);
    }
    close_fixture(&f);
}
