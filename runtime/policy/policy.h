/* Policies: the operator's Lua files decide how each request is served; C enforces it.
 *
 *     dn_policy_open(&p, &config, metrics, &err);     main: load, check, init, smoke test, or refuse to start
 *     dn_policy_vm_open(&vm, p, "loop0", &err);       each event loop, on its thread
 *     dn_policy_admit(vm, &req, &node, &decision, &reject, &trace)      before the prompt is tokenized
 *     dn_policy_route(vm, &req, &node, &decision, &reject, &trace)      before queueing
 *     dn_policy_finish(vm, &req, &result)                               once for every admitted request
 *     dn_policy_reload(p, NULL, &err)                 SIGHUP, any thread
 *
 * Ownership: main owns struct dn_policy, which holds the current generation (the files as read once, never changed),
 * the token buckets and counters, which survive reloads. A VM belongs to its thread, holds a reference to its
 * generation and notices a newer one at its next hook (one atomic load), so a reload never waits for a loop and no Lua
 * runs under a lock. finish runs in the generation that is current when the request ends.
 *
 * What fails, fails by the hook's rule: admit closed (503 policy_error), route goes on with the decision so far, finish
 * is counted and forgotten; the configuration, not the script, can change the first two. Twenty failures of a hook in
 * ten seconds open its breaker for a minute: the rule applies without running the script.
 */
#ifndef DN_POLICY_POLICY_H
#define DN_POLICY_POLICY_H

#include "policy/trace.h"
#include "policy/view.h"

#include "base/err.h"
#include "base/metrics.h"

struct dn_policy;
struct dn_policy_vm;

enum dn_policy_on_error { DN_ON_ERROR_RULE, DN_ON_ERROR_REJECT, DN_ON_ERROR_IGNORE };

struct dn_policy_param { /* a value for a knob of the file; exactly one kind */
    const char *name;
    enum { DN_PARAM_NUMBER, DN_PARAM_BOOLEAN, DN_PARAM_STRING } kind;
    double number;
    bool boolean;
    const char *string;
};

struct dn_policy_item {
    const char *file;   /* read at open and at each reload; in messages as written here */
    const char *source; /* instead of the file's text (tests, `check -`); NULL: read the file */
    bool is_shadow;     /* runs, is timed and recorded, changes nothing, has buckets of its own */
    const struct dn_policy_param *param;
    size_t n_params;
    enum dn_policy_on_error on_admit_error, on_route_error;
};

struct dn_policy_config {
    const struct dn_policy_item *item; /* in the order in which they run; at most DN_POLICY_MAX */
    size_t n_items;                    /* 0: every request is served as the configuration says */
    uint64_t wall_ns;                  /* a hook's time; 0: 1 ms */
    uint64_t instructions;             /* a hook's instructions; 0: 200,000 */
    size_t memory_bytes;               /* a VM's cap; 0: 8 MiB */
    const struct dn_node_view *node; /* models and pools for the smoke test; NULL: made-up ones. Borrowed in the call */
};

/* Copies the configuration, reads the files and proves them: syntax, contract, parameters, unknown globals, init, and
 * each hook on made-up requests and node states. Error: "file:line: reason". metrics may be NULL. */
int dn_policy_open(struct dn_policy **out, const struct dn_policy_config *config, struct dn_metrics *metrics,
                   struct dn_err *err);
void dn_policy_close(struct dn_policy *p); /* after all its VMs are closed; NULL is fine */

/* Reads everything again (config NULL: the same list) and replaces the policies at once, or fails and leaves the old
 * ones as they are. Any thread; concurrent reloads wait for each other. Logs policy.reloaded or policy.reload_failed.
 */
int dn_policy_reload(struct dn_policy *p, const struct dn_policy_config *config, struct dn_err *err);

uint64_t dn_policy_generation(const struct dn_policy *p);        /* 1 at start, + 1 for each reload */
void dn_policy_revision(const struct dn_policy *p, char out[9]); /* of the files' contents: 8 hex digits */

/* One line for the start receipt: "2 files, revision 3f9c2a10  tiers pressure(shadow)". */
void dn_policy_summary(const struct dn_policy *p, struct dn_buf *out);

/* The VM of one event loop; name labels metrics. Call on the thread that will use it. */
int dn_policy_vm_open(struct dn_policy_vm **out, struct dn_policy *p, const char *name, struct dn_err *err);
void dn_policy_vm_close(struct dn_policy_vm *vm); /* NULL is fine */

/* Runs a hook of all policies. decision is read (so far) and updated; trace may be NULL. True: go on. False: answer
 * with *reject (route: only where the configuration says on_error reject). */
bool dn_policy_admit(struct dn_policy_vm *vm, const struct dn_request_view *req, const struct dn_node_view *node,
                     struct dn_decision *decision, struct dn_reject *reject, struct dn_policy_trace *trace);
bool dn_policy_route(struct dn_policy_vm *vm, const struct dn_request_view *req, const struct dn_node_view *node,
                     struct dn_decision *decision, struct dn_reject *reject, struct dn_policy_trace *trace);
void dn_policy_finish(struct dn_policy_vm *vm, const struct dn_request_view *req, const struct dn_result_view *result);

/* Optional, when the loop has nothing to do: takes a new generation or replaces a broken VM now rather than within the
 * next request, and collects some garbage. True if it did something worth calling again for. */
bool dn_policy_vm_idle(struct dn_policy_vm *vm);
size_t dn_policy_vm_memory(const struct dn_policy_vm *vm); /* bytes */

#endif
