/* What policies decide about a request, as a flat value.
 *
 * A decision starts empty; admit and route fill it, policy after policy (lua/dunlin/contract.lua has the ranges and how
 * two policies' answers combine). A field counts only if its bit is set; what is not set is left to the key, the model
 * and the configuration. Names of formats are those of kernels/kernels.h, which this layer may not include: a unit test
 * compares the tables, and the order of the fields with the contract.
 *
 * Plain values: copy freely, any thread.
 */
#ifndef DN_POLICY_DECISION_H
#define DN_POLICY_DECISION_H

#include "base/buf.h"

#include <stdbool.h>
#include <stdint.h>

enum dn_decision_field { /* the order of contract.lua's fields */
                         DN_DECIDE_MODEL,
                         DN_DECIDE_PRIORITY,
                         DN_DECIDE_MAX_TOKENS,
                         DN_DECIDE_QUEUE_TIMEOUT,
                         DN_DECIDE_PREFILL_POOL,
                         DN_DECIDE_DECODE_POOL,
                         DN_DECIDE_PREFILL_WEIGHTS,
                         DN_DECIDE_DECODE_WEIGHTS,
                         DN_DECIDE_KV,
                         DN_DECIDE_INTEGRITY,
                         DN_DECIDE_CACHE_SALT,
                         DN_DECIDE_CACHE_WRITE,
                         DN_DECIDE_HEADERS,
                         DN_DECIDE_REASON,
                         DN_DECIDE_COUNT
};

/* In the order of enum dn_weight_format and enum dn_kv_format. */
enum dn_decide_weights { DN_DECIDE_W_BF16, DN_DECIDE_W_FP8, DN_DECIDE_W_INT8, DN_DECIDE_W_INT4, DN_DECIDE_W_COUNT };
enum dn_decide_kv { DN_DECIDE_KV_BF16, DN_DECIDE_KV_FP8, DN_DECIDE_KV_COUNT };

/* Weakest first. */
enum dn_decide_integrity { DN_DECIDE_INTEGRITY_OFF, DN_DECIDE_INTEGRITY_TAG, DN_DECIDE_INTEGRITY_COUNT };

#define DN_DECIDE_HEADERS_MAX      8
#define DN_DECIDE_PRIORITY_DEFAULT 50

struct dn_decision {
    uint32_t set; /* bits 1 << enum dn_decision_field */
    int priority; /* 0..100, higher first */
    int64_t max_tokens;
    int64_t queue_timeout_ms;
    enum dn_decide_weights prefill_weights, decode_weights;
    enum dn_decide_kv kv_dtype;
    enum dn_decide_integrity integrity;
    bool cache_write;
    char model[128];
    char prefill_pool[32], decode_pool[32];
    char cache_salt[128];
    char reason[160];
    unsigned n_headers;
    struct {
        char name[48]; /* lower case, begins with "x-" */
        char value[128];
    } header[DN_DECIDE_HEADERS_MAX]; /* sorted by name */
};

static inline bool dn_decision_has(const struct dn_decision *d, enum dn_decision_field f)
{
    return d->set >> f & 1;
}

/* Names as in Lua, logs and metrics; "unknown" outside the range. */
const char *dn_decision_field_name(enum dn_decision_field f); /* "kv_dtype" */
const char *dn_decide_weights_name(enum dn_decide_weights w); /* "bf16" */
const char *dn_decide_kv_name(enum dn_decide_kv k);           /* "fp8_e4m3" */
const char *dn_decide_integrity_name(enum dn_decide_integrity i);

/* The value of a field as text ("fp8_e4m3", "1024", "x-tier: gold"), "" if it is not set. */
void dn_decision_print_field(const struct dn_decision *d, enum dn_decision_field f, struct dn_buf *out);

/* What admit answers when it refuses. `code` and `message` go to the client in OpenAI's form, retry_after_s as
 * Retry-After. A policy that failed gives 503 "policy_error" with a message that holds nothing of the script. */
struct dn_reject {
    int status;        /* 400 403 404 413 422 429 503; 0: not refused */
    int retry_after_s; /* -1: none */
    char policy[32];   /* who refused */
    char code[64];     /* error.code */
    char message[256]; /* error.message */
    char param[64];    /* error.param or "" */
    bool is_failure;   /* a policy failed closed, rather than decided */
};

/* OpenAI's error.type for a status. */
const char *dn_reject_type(const struct dn_reject *r);

#endif
