/* What the tests of the policy host share: a host over inline sources, a default request and node. */
#ifndef TEST_POLICY_UTIL_H
#define TEST_POLICY_UTIL_H

#include "policy/host.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Instructions end loops long before, also under sanitizers. */
#define TEST_WALL_NS 100000000

static struct dn_err err;
static struct dn_decision decision;
static struct dn_reject reject;
static struct dn_policy_trace trace;

static const struct dn_pool_view test_pool[] = {{.name = "main",
                                                 .role = "both",
                                                 .kv_free_ratio = 0.9,
                                                 .is_healthy = true,
                                                 .has_weights = {true, false, false, true}}};
static const struct dn_model_view test_model[] = {
    {.name = "smollm2", .context_tokens = 2048, .has_weights = {true, false, false, true}, .has_kv = {true, true}},
    {.name = "small", .context_tokens = 2048, .has_weights = {true}, .has_kv = {true}}};
static const struct dn_node_view test_node = {.version = 1,
                                              .hour = 12,
                                              .wday = 3,
                                              .kv_pages_total = 1000,
                                              .kv_pages_free = 900,
                                              .kv_free_ratio = 0.9,
                                              .pool = test_pool,
                                              .n_pools = 1,
                                              .model = test_model,
                                              .n_models = 2};
static const struct dn_request_view test_request = {.id = "req_1",
                                                    .endpoint = "chat.completions",
                                                    .model = "smollm2",
                                                    .requested_model = "smollm2",
                                                    .tenant = "acme",
                                                    .key_id = "k1",
                                                    .max_tokens = 256,
                                                    .temperature = 1,
                                                    .prompt_bytes = 400,
                                                    .prompt_tokens = -1,
                                                    .n = 1};
static const struct dn_result_view test_result = {
    .status = 200, .finish_reason = "stop", .prompt_tokens = 100, .completion_tokens = 20, .model = "smollm2"};

/* A hook as a whole file. */
#define HOOK(hook, body)                                                                                               \
    "local dunlin = require('dunlin') local function f(req, node, so_far) " body " end\n"                              \
    "return { api = 1, name = 'p', " hook " = f }"

struct fixture {
    struct dn_policy *p;
    struct dn_policy_vm *vm;
    struct dn_metrics *metrics;
};

/* A guard that smoke requests don't meet: their model is the node's first, their id is "req_smoke". */
#define UNLESS_SMOKE "if req.id == 'req_smoke' then return nil end "

static struct fixture open_items(const struct dn_policy_item *item, size_t n)
{
    struct fixture f = {.metrics = dn_metrics_open()};
    struct dn_policy_config c = {.item = item, .n_items = n, .node = &test_node, .wall_ns = TEST_WALL_NS};
    cr_assert_eq(dn_policy_open(&f.p, &c, f.metrics, &err), 0, "%s", err.text);
    cr_assert_eq(dn_policy_vm_open(&f.vm, f.p, "loop0", &err), 0, "%s", err.text);
    return f;
}

static inline struct fixture open_source(const char *source)
{
    struct dn_policy_item item = {.file = "p.lua", .source = source};
    return open_items(&item, 1);
}

static inline void close_fixture(struct fixture *f)
{
    dn_policy_vm_close(f->vm);
    dn_policy_close(f->p);
    dn_metrics_close(f->metrics);
}

/* Demands that the files are refused with this text in the message. */
static inline void must_refuse(const char *source, const char *text)
{
    struct dn_policy *p = NULL;
    struct dn_policy_item item = {.file = "p.lua", .source = source};
    struct dn_policy_config c = {.item = &item, .n_items = 1, .node = &test_node, .wall_ns = TEST_WALL_NS};
    cr_assert_eq(dn_policy_open(&p, &c, NULL, &err), -DN_POLICY, "accepted: %s", source);
    cr_assert(strstr(err.text, text), "%s\n  gives: %s\n  expected: %s", source, err.text, text);
    cr_assert_null(p);
}

static inline bool admit(struct fixture *f)
{
    memset(&decision, 0, sizeof decision);
    memset(&trace, 0, sizeof trace);
    return dn_policy_admit(f->vm, &test_request, &test_node, &decision, &reject, &trace);
}

static inline bool route(struct fixture *f)
{
    struct dn_request_view r = test_request;
    r.prompt_tokens = 100;
    return dn_policy_route(f->vm, &r, &test_node, &decision, &reject, &trace);
}

/* The value of one line of the exposition, or -1. */
static inline double metric(struct fixture *f, const char *line)
{
    struct dn_buf b = {0};
    double v = -1;
    dn_metrics_print(f->metrics, &b);
    for (const char *at = dn_buf_str(&b); (at = strstr(at, line)); at += strlen(line))
        if (at == b.data || at[-1] == '\n')
            v = strtod(at + strlen(line), NULL);
    dn_buf_release(&b);
    return v;
}

#endif
