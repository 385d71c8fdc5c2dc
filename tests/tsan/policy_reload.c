/* Reloads while other threads decide: no request is lost, each sees one generation whole, buckets stay right. Run under
 * ThreadSanitizer by the tsan preset, and as it is by the others. */
#include "policy/policy.h"

#include "base/clock.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LOOPS   3
#define RELOADS 60

#define CHECK(condition, ...)                                                                                          \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);                                            \
            fprintf(stderr, __VA_ARGS__);                                                                              \
            fputc('\n', stderr);                                                                                       \
            exit(1);                                                                                                   \
        }                                                                                                              \
    } while (0)

/* admit and route answer with the same letter of one generation; the bucket is shared by all. */
#define SOURCE(letter)                                                                                                 \
    "local dunlin = require('dunlin') "                                                                                \
    "local b = dunlin.bucket('b', { rate = 0.001, burst = 5000 }) local c = dunlin.counter('taken') "                  \
    "local function admit(req) if b:take('k', 1) then c:add(1, '') return { reason = '" letter "' } end "              \
    "return { reason = '" letter "', priority = 1 } end "                                                              \
    "local function route(req, node, so_far) return { cache_salt = so_far.reason .. '" letter "' } end "               \
    "return { api = 1, name = 'p', admit = admit, route = route, finish = function() end }"

static struct dn_policy *policy;
static _Atomic int is_over;
static _Atomic long n_taken, n_decided;

static void *loop(void *arg)
{
    struct dn_policy_vm *vm = NULL;
    struct dn_err err;
    CHECK(dn_policy_vm_open(&vm, policy, arg, &err) == 0, "%s", err.text);
    struct dn_pool_view pool = {.name = "main", .role = "both", .is_healthy = true};
    struct dn_model_view model = {.name = "m", .has_kv = {true}, .has_weights = {true}};
    struct dn_node_view node = {.version = 1, .pool = &pool, .n_pools = 1, .model = &model, .n_models = 1};
    struct dn_request_view req = {.id = "r", .model = "m", .max_tokens = 1, .prompt_tokens = -1};
    struct dn_result_view result = {.status = 200};
    while (!is_over) {
        struct dn_decision d = {0};
        struct dn_reject reject;
        struct dn_policy_trace t = {0};
        CHECK(dn_policy_admit(vm, &req, &node, &d, &reject, &t), "%s", reject.message);
        uint64_t generation = t.generation;
        n_taken += !dn_decision_has(&d, DN_DECIDE_PRIORITY);
        CHECK(dn_policy_route(vm, &req, &node, &d, &reject, &t), "%s", reject.message);
        if (t.generation == generation)
            CHECK(d.cache_salt[0] == d.cache_salt[1], "one generation answers %s", d.cache_salt);
        CHECK(d.reason[0] == (generation % 2 ? 'a' : 'b'), "generation %d answers %s", (int)generation, d.reason);
        dn_policy_finish(vm, &req, &result);
        node.version++;
        n_decided++;
    }
    dn_policy_vm_close(vm);
    return NULL;
}

int main(void)
{
    struct dn_err err;
    struct dn_metrics *metrics = dn_metrics_open();
    struct dn_policy_item a = {.file = "p.lua", .source = SOURCE("a")}, b = {.file = "p.lua", .source = SOURCE("b")},
                          broken = {.file = "p.lua", .source = "return {"};
    struct dn_policy_config config = {.item = &a, .n_items = 1};
    CHECK(dn_policy_open(&policy, &config, metrics, &err) == 0, "%s", err.text);
    pthread_t thread[LOOPS];
    static char name[LOOPS][8] = {"loop0", "loop1", "loop2"};
    for (int i = 0; i < LOOPS; i++)
        CHECK(pthread_create(&thread[i], NULL, loop, name[i]) == 0, "pthread_create");
    for (int i = 0; i < RELOADS; i++) {
        uint64_t before = dn_policy_generation(policy);
        config.item = &broken;
        CHECK(dn_policy_reload(policy, &config, &err) == -DN_POLICY, "a broken file was accepted");
        CHECK(dn_policy_generation(policy) == before, "a broken file became current");
        config.item = i % 2 ? &a : &b;
        CHECK(dn_policy_reload(policy, &config, &err) == 0, "%s", err.text);
        struct timespec pause = {.tv_nsec = 5 * (long)DN_NS_PER_MS};
        nanosleep(&pause, NULL);
    }
    is_over = 1;
    for (int i = 0; i < LOOPS; i++)
        pthread_join(thread[i], NULL);
    CHECK(n_taken <= 5000, "%ld taken from a bucket of 5000", n_taken);
    CHECK(n_decided < 5000 || n_taken == 5000, "%ld taken by %ld requests", n_taken, n_decided);
    printf("%ld requests, %d reloads, %ld tokens taken\n", n_decided, RELOADS, n_taken);
    dn_policy_close(policy);
    dn_metrics_close(metrics);
    return 0;
}
