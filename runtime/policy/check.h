/* `dunlin policy check | show | explain`: the policies without a node.
 *
 * Each function reads files, runs them in a VM of its own and writes what the command prints; nothing is shared with a
 * running node. Exit codes as the command line's: 0 fine, 1 the policies are wrong, 2 the arguments are. Any thread.
 */
#ifndef DN_POLICY_CHECK_H
#define DN_POLICY_CHECK_H

#include "policy/policy.h"

/* Proves every file as the node would at start: syntax, contract, parameters, unknown globals (all of them, not the
 * first alone), init, made-up requests; then all files together, as a list. One line a problem into out, "file:line:
 * reason", or "file: ok (name: hooks)"; with as_json an array of {file, ok, name, hooks, errors}. 0 or 1. */
int dn_policy_check(const struct dn_policy_config *config, bool as_json, struct dn_buf *out);

/* The list in the order in which it runs: name, mode, hooks, file, then each parameter with its value, default, range
 * and explanation. as_json: the same as a document. 0, or 1 if the policies do not load (out has the reason). */
int dn_policy_show(const struct dn_policy_config *config, bool as_json, struct dn_buf *out);

/* What the policies would do with one request, step by step. request_json: an object with any of the fields that
 * policies see, as in a spec ({"tenant": "acme", "labels": {"tier": "gold"}, "max_tokens": 256, "prompt_bytes": 400,
 * "wish": {"kv": "bf16"}}), and "node": {"kv_free_ratio", "queue_waiting", "running", "hour", "minute"}; models and
 * pools are config->node's or made-up ones. 0, 1 or 2 (the JSON is wrong; out has the reason). */
int dn_policy_explain(const struct dn_policy_config *config, const char *request_json, size_t len, struct dn_buf *out);

#endif
