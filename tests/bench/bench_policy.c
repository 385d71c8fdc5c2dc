/* What policies cost: admit, route and finish of the shipped files, a VM, a reload. CPU time of this thread, so that
 * other work on the machine counts for little. Run in the source folder: build/release/tests/bench_policy. */
#include "policy/policy.h"

#include "base/clock.h"
#include "base/log.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { REQUESTS = 30000, VMS = 200, RELOADS = 30, ROWS = 4 };

static double sample[ROWS][REQUESTS];

static double cpu_us(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e6 + (double)t.tv_nsec / 1e3;
}

static int compare(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

static void report(const char *name, double *v, int n)
{
    qsort(v, (size_t)n, sizeof *v, compare);
    printf("%-26s best %8.2f us   p50 %8.2f us   p99 %8.2f us\n", name, v[0], v[n / 2], v[n * 99 / 100]);
}

static int one_request(struct dn_policy_vm *vm, const struct dn_node_view *node, int i)
{
    char id[32];
    snprintf(id, sizeof id, "req_%d", i);
    struct dn_view_pair label = {"tier", "gold"};
    struct dn_request_view r = {.id = id,
                                .endpoint = "chat.completions",
                                .model = "m",
                                .requested_model = "m",
                                .tenant = "acme",
                                .key_id = "k1",
                                .label = &label,
                                .n_labels = 1,
                                .client_ip = "192.0.2.1",
                                .max_tokens = 1,
                                .temperature = 1,
                                .prompt_bytes = 4,
                                .prompt_tokens = -1,
                                .n = 1,
                                .wish_kv = "bf16"};
    struct dn_result_view result = {
        .status = 200, .finish_reason = "stop", .prompt_tokens = 1, .completion_tokens = 1, .model = "m"};
    struct dn_decision d = {0};
    struct dn_reject reject;
    struct dn_policy_trace trace = {0};
    double t0 = cpu_us();
    bool go = dn_policy_admit(vm, &r, node, &d, &reject, &trace);
    double t1 = cpu_us();
    r.prompt_tokens = 1;
    dn_policy_route(vm, &r, node, &d, &reject, &trace);
    double t2 = cpu_us();
    dn_policy_finish(vm, &r, &result);
    double t3 = cpu_us();
    sample[0][i] = t1 - t0;
    sample[1][i] = t2 - t1;
    sample[2][i] = t3 - t2;
    sample[3][i] = t3 - t0;
    return go || !reject.is_failure ? 0 : 1;
}

int main(void)
{
    struct dn_err err;
    struct dn_policy_item items[] = {
        {.file = "policies/wishes.lua"}, {.file = "policies/tiers.lua"}, {.file = "policies/pressure.lua"}};
    struct dn_policy_config config = {.item = items, .n_items = 3};
    struct dn_metrics *metrics = dn_metrics_open();
    struct dn_policy *p = NULL;
    struct dn_policy_vm *vm = NULL;
    dn_log_set_level(DN_LOG_ERROR);
    if (dn_policy_open(&p, &config, metrics, &err)) {
        fprintf(stderr, "%s\n", err.text);
        return 1;
    }
    for (int i = 0; i < VMS; i++) {
        double t = cpu_us();
        dn_policy_vm_close(vm);
        if (dn_policy_vm_open(&vm, p, "bench", &err))
            return 1;
        sample[0][i] = cpu_us() - t;
    }
    report("VM closed and opened", sample[0], VMS);
    printf("%-26s %zu bytes\n", "memory of a VM", dn_policy_vm_memory(vm));
    for (int i = 0; i < RELOADS; i++) {
        double t = cpu_us();
        if (dn_policy_reload(p, NULL, &err))
            return 1;
        sample[0][i] = cpu_us() - t;
    }
    report("reload with its trial", sample[0], RELOADS);
    struct dn_pool_view pool = {.name = "main", .role = "both", .is_healthy = true, .has_weights = {true}};
    struct dn_model_view model = {.name = "m", .has_weights = {true}, .has_kv = {true, true}};
    struct dn_node_view node = {
        .version = 1, .kv_free_ratio = 0.2, .pool = &pool, .n_pools = 1, .model = &model, .n_models = 1};
    for (int is_new = 1; is_new >= 0; is_new--) {
        for (int i = 0; i < REQUESTS; i++) {
            node.version += (uint64_t)is_new;
            if (one_request(vm, &node, i))
                return 1;
        }
        printf("a new snapshot for each request: %s\n", is_new ? "yes" : "no");
        report("  admit, 2 policies", sample[0], REQUESTS);
        report("  route, 3 policies", sample[1], REQUESTS);
        report("  finish, 1 policy", sample[2], REQUESTS);
        report("  all of a request", sample[3], REQUESTS);
    }
    dn_policy_vm_close(vm);
    dn_policy_close(p);
    dn_metrics_close(metrics);
    return 0;
}
