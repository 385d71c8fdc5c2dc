/* Inside of the policy layer: what its files share. Nobody else includes this.
 *
 * set.c reads files into a generation (struct dn_policy_set, immutable but for its breakers, counted references).
 * policy.c holds the current one. runner.c builds a Lua state from it, push.c moves views in and decisions out, hooks.c
 * runs hooks and applies the error rules, smoke.c tries a generation before it becomes current.
 */
#ifndef DN_POLICY_HOST_H
#define DN_POLICY_HOST_H

#include "policy/bucket.h"
#include "policy/policy.h"

#include "base/arena.h"
#include "script/vm.h"

#include <pthread.h>
#include <stdatomic.h>

enum dn_policy_error { DN_PE_ERROR, DN_PE_TIMEOUT, DN_PE_MEMORY, DN_PE_TYPE, DN_PE_FIELD, DN_PE_RANGE, DN_PE_COUNT };

/* Failures of one hook of one policy, over all threads. Approximate under contention, which is fine for a breaker. */
struct dn_policy_breaker {
    _Atomic uint64_t window_ns;     /* when the window of ten seconds began */
    _Atomic uint64_t open_until_ns; /* 0: closed */
    _Atomic unsigned n_failures;
};

struct dn_policy_hook_state {
    bool exists;
    int line; /* where it begins in the file */
    struct dn_policy_breaker breaker;
    struct dn_series *calls, *seconds; /* NULL without metrics */
};

struct dn_policy_file { /* one policy of a generation */
    const char *file, *source;
    size_t len;
    bool is_shadow;
    enum dn_policy_on_error on_error[DN_HOOK_COUNT];
    const struct dn_policy_param *param;
    size_t n_params;
    char name[32]; /* as the file says; known once it was loaded */
    struct dn_policy_hook_state hook[DN_HOOK_COUNT];
};

struct dn_policy_set {
    _Atomic unsigned n_refs;
    struct dn_arena arena;                     /* holds all strings */
    struct dn_policy_config config;            /* item is NULL: see file[] */
    struct dn_policy_item item[DN_POLICY_MAX]; /* for a reload of the same list */
    size_t n_files;
    struct dn_policy_file file[DN_POLICY_MAX];
    char revision[9];
};

int dn_policy_set_read(struct dn_policy_set **out, const struct dn_policy_config *config, struct dn_err *err);
struct dn_policy_set *dn_policy_set_get(struct dn_policy_set *s);
void dn_policy_set_put(struct dn_policy_set *s); /* NULL is fine */

struct dn_policy_metrics { /* families; all NULL without metrics */
    struct dn_family *calls, *seconds, *errors, *fallback, *rejects, *decisions, *revision, *vm_bytes, *recycled, *user;
    struct dn_series *reload_ok, *reload_time;
    struct dn_series *decided[DN_DECIDE_COUNT][DN_DECIDE_W_COUNT]; /* by field and value, for formats and integrity */
};

struct dn_policy {
    pthread_mutex_t lock;   /* guards current */
    pthread_mutex_t reload; /* one reload at a time */
    struct dn_policy_set *current;
    _Atomic uint64_t generation;
    struct dn_buckets *buckets;
    struct dn_policy_metrics metrics;
};

struct dn_policy_set *dn_policy_current(struct dn_policy *p, uint64_t *generation); /* a reference */

/* A set in one Lua state. */
struct dn_policy_vm {
    struct dn_policy *policy; /* NULL: a trial (check, smoke): buckets are its own, nothing is logged or counted */
    struct dn_buckets *buckets;
    struct dn_policy_set *set;
    uint64_t generation;
    struct dn_vm *vm;
    char thread[32];
    bool is_stale; /* ran out of time or memory: its data may be half changed */
    enum dn_vm_failure stale_why;
    uint64_t node_shape;                     /* of names and formats in them: while it stays, only numbers change */
    uint64_t node_version;                   /* that the node's tables were built from */
    int ref_run, ref_set_node, ref_describe; /* functions of lua/dunlin/dispatch.lua in the registry */
    int ref_req, ref_labels, ref_headers, ref_metadata, ref_cached, ref_wish, ref_so_far, ref_result;
    int ref_node, ref_rows, ref_time, ref_kv, ref_queue; /* the node's tables */
    int ref_pool[DN_VIEW_POOLS_MAX];                     /* the first n_ref_pools, in the snapshot's order */
    unsigned n_ref_pools;
    int ref_hook[DN_HOOK_COUNT];
    int ref_key[64]; /* interned names of fields: see push.c */
    unsigned n_keys;
    struct dn_series *vm_bytes;
    struct {
        uint64_t second;
        unsigned n_lines;
    } log[DN_POLICY_MAX];
    struct dn_err last_error; /* of the last hook that failed, for check and tests */
};

/* Fills pv->vm from pv->set: library, environments, load, init. On failure pv->vm is NULL and err says file:line. */
int dn_policy_build(struct dn_policy_vm *pv, struct dn_err *err);
/* The budgets of the next calls: a hook's, or those of our own Lua. */
void dn_policy_set_budget(struct dn_policy_vm *pv, bool is_host);
void dn_policy_unbuild(struct dn_policy_vm *pv);

/* Puts "file:line: hook: " in front of an error that does not begin with the file (INIT: "file: "). */
void dn_policy_locate(const struct dn_policy_file *f, enum dn_policy_hook hook, struct dn_err *err);

/* Opens a trial VM of a set, with buckets of its own. dn_policy_vm_close() closes it. */
int dn_policy_trial_open(struct dn_policy_vm **out, struct dn_policy_set *set, struct dn_err *err);

/* Runs every hook over made-up requests and states of the node. The first failure: DN_POLICY with file:line. With `all`
 * it goes on and puts every different message there, a line each. */
int dn_policy_smoke(struct dn_policy_vm *trial, const struct dn_node_view *node, struct dn_buf *all,
                    struct dn_err *err);
extern const struct dn_node_view dn_policy_quiet_node; /* one pool "main", one model "smoke" */

/* All unknown globals of a source in the environment of policies, a line each. Fails on its syntax. */
int dn_policy_unknown(const char *file, const char *source, size_t len, struct dn_buf *out, struct dn_err *err);

/* Views into the tables of dispatch.lua; a decision to and from them. */
void dn_policy_keys_init(struct dn_policy_vm *pv);
void dn_policy_push_request(struct dn_policy_vm *pv, const struct dn_request_view *req);
int dn_policy_push_node(struct dn_policy_vm *pv, const struct dn_node_view *node, struct dn_err *err);
void dn_policy_push_result(struct dn_policy_vm *pv, const struct dn_result_view *r);
void dn_policy_push_decision(struct dn_policy_vm *pv, const struct dn_decision *d);
void dn_policy_pull_decision(struct dn_policy_vm *pv, uint32_t fields, struct dn_decision *d); /* those fields */
void dn_policy_pull_reject(struct dn_policy_vm *pv, int table_idx, struct dn_reject *r);

void dn_policy_metrics_init(struct dn_policy_metrics *m, struct dn_metrics *registry);
void dn_policy_metrics_files(struct dn_policy_metrics *m, struct dn_policy_set *set);
void dn_policy_count_error(struct dn_policy_vm *pv, const struct dn_policy_file *f, enum dn_policy_hook h,
                           enum dn_policy_error kind);
const char *dn_policy_error_name(enum dn_policy_error e);

#endif
