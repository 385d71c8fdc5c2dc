#include "policy/decision.h"

#define N(array) (sizeof(array) / sizeof *(array))

const char *dn_decision_field_name(enum dn_decision_field f)
{
    static const char *const names[DN_DECIDE_COUNT] = {
        "model",           "priority",       "max_tokens", "queue_timeout_ms", "prefill_pool", "decode_pool",
        "prefill_weights", "decode_weights", "kv_dtype",   "integrity",        "cache_salt",   "cache_write",
        "headers",         "reason"};
    return (unsigned)f < N(names) ? names[f] : "unknown";
}

const char *dn_decide_weights_name(enum dn_decide_weights w)
{
    static const char *const names[DN_DECIDE_W_COUNT] = {"bf16", "fp8", "int8", "int4"};
    return (unsigned)w < N(names) ? names[w] : "unknown";
}

const char *dn_decide_kv_name(enum dn_decide_kv k)
{
    static const char *const names[DN_DECIDE_KV_COUNT] = {"bf16", "fp8_e4m3"};
    return (unsigned)k < N(names) ? names[k] : "unknown";
}

const char *dn_decide_integrity_name(enum dn_decide_integrity i)
{
    static const char *const names[DN_DECIDE_INTEGRITY_COUNT] = {"off", "tag"};
    return (unsigned)i < N(names) ? names[i] : "unknown";
}

void dn_decision_print_field(const struct dn_decision *d, enum dn_decision_field f, struct dn_buf *out)
{
    if (!dn_decision_has(d, f))
        return;
    switch (f) {
    case DN_DECIDE_MODEL:
        dn_buf_puts(out, d->model);
        break;
    case DN_DECIDE_PRIORITY:
        dn_buf_printf(out, "%d", d->priority);
        break;
    case DN_DECIDE_MAX_TOKENS:
        dn_buf_printf(out, "%lld", (long long)d->max_tokens);
        break;
    case DN_DECIDE_QUEUE_TIMEOUT:
        dn_buf_printf(out, "%lld", (long long)d->queue_timeout_ms);
        break;
    case DN_DECIDE_PREFILL_POOL:
        dn_buf_puts(out, d->prefill_pool);
        break;
    case DN_DECIDE_DECODE_POOL:
        dn_buf_puts(out, d->decode_pool);
        break;
    case DN_DECIDE_PREFILL_WEIGHTS:
        dn_buf_puts(out, dn_decide_weights_name(d->prefill_weights));
        break;
    case DN_DECIDE_DECODE_WEIGHTS:
        dn_buf_puts(out, dn_decide_weights_name(d->decode_weights));
        break;
    case DN_DECIDE_KV:
        dn_buf_puts(out, dn_decide_kv_name(d->kv_dtype));
        break;
    case DN_DECIDE_INTEGRITY:
        dn_buf_puts(out, dn_decide_integrity_name(d->integrity));
        break;
    case DN_DECIDE_CACHE_SALT:
        dn_buf_puts(out, d->cache_salt);
        break;
    case DN_DECIDE_CACHE_WRITE:
        dn_buf_puts(out, d->cache_write ? "true" : "false");
        break;
    case DN_DECIDE_HEADERS:
        for (unsigned i = 0; i < d->n_headers; i++)
            dn_buf_printf(out, "%s%s: %s", i ? ", " : "", d->header[i].name, d->header[i].value);
        break;
    case DN_DECIDE_REASON:
        dn_buf_puts(out, d->reason);
        break;
    case DN_DECIDE_COUNT:
        break;
    }
}

const char *dn_reject_type(const struct dn_reject *r)
{
    if (r->status == 429)
        return "rate_limit_error";
    return r->status >= 500 ? "server_error" : "invalid_request_error";
}
