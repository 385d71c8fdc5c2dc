/* What happened to one request in the policies: which ran, what each decided, who set which field, and why.
 *
 * A plain value in the request; the hooks append to it, log and response headers print it. Belongs to the request's
 * thread.
 */
#ifndef DN_POLICY_TRACE_H
#define DN_POLICY_TRACE_H

#include "policy/decision.h"

#include <stdint.h>

#define DN_POLICY_MAX         16 /* policies in the list */
#define DN_POLICY_TRACE_STEPS (2 * DN_POLICY_MAX)

enum dn_policy_hook { DN_HOOK_INIT, DN_HOOK_ADMIT, DN_HOOK_ROUTE, DN_HOOK_FINISH, DN_HOOK_COUNT };
const char *dn_policy_hook_name(enum dn_policy_hook h); /* "admit" */

enum dn_policy_outcome {
    DN_POLICY_NO_OPINION,
    DN_POLICY_DECIDED,
    DN_POLICY_REJECTED,
    DN_POLICY_FAILED,  /* an error, or an answer against the contract; nothing of it was applied */
    DN_POLICY_SKIPPED, /* its breaker is open */
};

struct dn_policy_step {
    char policy[32];
    uint8_t hook;    /* enum dn_policy_hook */
    uint8_t outcome; /* enum dn_policy_outcome */
    bool is_shadow;  /* recorded, not applied */
    uint32_t fields; /* bits of the fields that it changed (shadow: would give) */
    uint32_t ns;     /* how long it took */
};

struct dn_policy_trace {
    uint64_t generation; /* of the policies that decided */
    char revision[9];    /* first digits of their digest */
    unsigned n_steps;
    struct dn_policy_step step[DN_POLICY_TRACE_STEPS];
    char by[DN_DECIDE_COUNT][32]; /* the policy that a field's value comes from, "" if none */
};

/* "kv_dtype=fp8_e4m3(pressure) max_tokens=1024(tiers)": for a log line or a header; nothing for an empty decision.
 * Only printable ASCII: other bytes of names and reasons become '?'. cache_salt is left out: it may name a tenant. */
void dn_policy_trace_print(const struct dn_policy_trace *t, const struct dn_decision *d, struct dn_buf *out);

/* The steps as a table, a line each, as `dunlin policy explain` shows them. */
void dn_policy_trace_table(const struct dn_policy_trace *t, const struct dn_decision *d, struct dn_buf *out);

#endif
