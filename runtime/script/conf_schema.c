#include "script/conf_schema.h"

#include <string.h>

#define N(field) DN_CONF_NODE, offsetof(struct dn_conf, field)
#define M(field) DN_CONF_MODEL, offsetof(struct dn_conf_model, field)
#define P(field) DN_CONF_POLICY, offsetof(struct dn_conf_policy, field)
#define NONE     0, 0, NULL
#define KIB      1024.0
#define MIB      (1024.0 * 1024)
#define GIB      (1024.0 * 1024 * 1024)
#define WEEK_MS  604800000.0

#define T_STRING  DN_CONF_T_STRING
#define T_CHOICE  DN_CONF_T_CHOICE
#define T_BOOL    DN_CONF_T_BOOL
#define T_INT     DN_CONF_T_INT
#define T_NUMBER  DN_CONF_T_NUMBER
#define T_SIZE    DN_CONF_T_SIZE
#define T_ADDRESS DN_CONF_T_ADDRESS

const struct dn_conf_section dn_conf_sections[] = {
    {"", "where the node listens"},
    {"tls", "the certificate"},
    {"limits", "what clients may do; each limit is counted in the metrics when it bites"},
    {"models", "what is served: models = { [\"name\"] = { ... } }"},
    {"engine", "how it is computed"},
    {"cache", "prefixes of earlier prompts"},
    {"queue", "requests that wait"},
    {"policy", "Lua files that decide for each request (policies/README.md)"},
    {"policy.list", "the policies in the order in which they run: list = { { ... }, { ... } }"},
    {"api", "the OpenAI dialect"},
    {"metrics", "GET /metrics"},
    {"log", "standard error"},
};
const size_t dn_conf_n_sections = sizeof dn_conf_sections / sizeof dn_conf_sections[0];

/* clang-format off */
const struct dn_conf_row dn_conf_rows[] = {
    {"listen", T_ADDRESS, N(listen), NONE, "127.0.0.1:8443", "HTTPS address; other than loopback only with keys"},
    {"cleartext", DN_CONF_T_ADDRESS_OR_FALSE, N(cleartext), NONE, "false", "plain HTTP as well, on a loopback address only"},
    {"loops", T_INT, N(loops), 0, 64, NULL, "auto", "event loops (threads) for connections; auto: one for two cores, at most 4"},
    {"keys", T_STRING, N(keys), NONE, "", "file of API keys (conf/keys.lua); empty: no keys, loopback only"},
    {"server_name", T_STRING, N(server_name), NONE, "dunlin", "value of the Server header of responses"},
    {"integrity", T_CHOICE, N(integrity), 0, 0, "off tag", "tag", "check the tag of every cache page before it is read, where no policy says otherwise"},

    {"tls.cert", T_STRING, N(cert), NONE, "", "PEM file; empty: self-signed, made at the first start"},
    {"tls.key", T_STRING, N(key), NONE, "", "PEM file of its private key"},

    {"limits.connections", T_INT, N(limits.connections), 1, 1e6, NULL, "4096", "open connections of one event loop"},
    {"limits.connections_per_ip", T_INT, N(limits.connections_per_ip), 1, 1e6, NULL, "256", "of one address in one event loop; loopback is exempt"},
    {"limits.header_bytes", T_SIZE, N(limits.header_bytes), KIB, MIB, NULL, "16 KiB", "all headers of a request together"},
    {"limits.header_fields", T_INT, N(limits.header_fields), 8, 1000, NULL, "100", "headers of a request"},
    {"limits.path_bytes", T_SIZE, N(limits.path_bytes), 64, 64 * KIB, NULL, "2 KiB", "path with query"},
    {"limits.body_bytes", T_SIZE, N(limits.body_bytes), KIB, GIB, NULL, "8 MiB", "body of a request; more is 413"},
    {"limits.body_bytes_inflight", T_SIZE, N(limits.body_bytes_inflight), MIB, 64 * GIB, NULL, "256 MiB", "incomplete bodies of one event loop together; reading pauses"},
    {"limits.handshake_timeout_ms", T_INT, N(limits.handshake_timeout_ms), 100, WEEK_MS, NULL, "10000", "TLS handshake"},
    {"limits.header_timeout_ms", T_INT, N(limits.header_timeout_ms), 100, WEEK_MS, NULL, "10000", "from the first byte of a request to its last header"},
    {"limits.body_timeout_ms", T_INT, N(limits.body_timeout_ms), 100, WEEK_MS, NULL, "60000", "from there to the last byte of the body"},
    {"limits.idle_timeout_ms", T_INT, N(limits.idle_timeout_ms), 100, WEEK_MS, NULL, "60000", "a connection without a request"},
    {"limits.stall_timeout_ms", T_INT, N(limits.stall_timeout_ms), 100, WEEK_MS, NULL, "30000", "a client that takes nothing of its answer is cut"},
    {"limits.stream_pause_bytes", T_SIZE, N(limits.stream_pause_bytes), 4 * KIB, GIB, NULL, "64 KiB", "unsent bytes at which a generation pauses"},
    {"limits.stream_cut_bytes", T_SIZE, N(limits.stream_cut_bytes), 8 * KIB, GIB, NULL, "1 MiB", "unsent bytes at which the client is cut"},
    {"limits.drain_timeout_ms", T_INT, N(limits.drain_timeout_ms), 1, WEEK_MS, NULL, "30000", "running requests may go on for so long after SIGTERM"},

    {"models.*.path", T_STRING, M(path), NONE, NULL, "GGUF file, or folder with config.json and safetensors"},
    {"models.*.weights", T_CHOICE, M(weights), 0, 0, "auto bf16 fp8 int8 int4", "auto", "format in memory; auto: the nearest to the file's own"},
    {"models.*.kv_dtype", T_CHOICE, M(kv_dtype), 0, 0, "bf16 fp8_e4m3", "bf16", "format of the KV cache, where no policy says otherwise"},
    {"models.*.context", T_INT, M(context), 0, 1 << 24, NULL, "auto", "longest sequence in tokens; auto: the model's own, as far as memory holds it"},
    {"models.*.template", T_STRING, M(template), NONE, "", "file of a chat template; empty: the model's own"},

    {"engine.device", T_STRING, N(device), NONE, "auto", "auto, cpu, cuda or cuda:N; auto: the first GPU if there is one, else the CPU"},
    {"engine.threads", T_INT, N(threads), 0, 1024, NULL, "auto", "threads that compute; auto: all cores"},
    {"engine.kv_memory", T_SIZE, N(kv_memory), 0, 1024 * GIB, NULL, "auto", "memory of the KV cache, e.g. \"2 GiB\"; auto: room for four full contexts, at most 1 GiB; on a GPU for max_sequences of them, at most 90 % of what is free"},
    {"engine.page_tokens", T_INT, N(page_tokens), 0, 256, NULL, "auto", "tokens of one cache page; auto: 16, on a GPU 64"},
    {"engine.max_sequences", T_INT, N(max_sequences), 0, 1024, NULL, "auto", "requests that run at once; auto: 32, on a GPU 64"},
    {"engine.step_tokens", T_INT, N(step_tokens), 0, 65536, NULL, "auto", "most tokens of one step; auto: 512, on a GPU 2048"},
    {"engine.prefill_chunk_tokens", T_INT, N(prefill_chunk_tokens), 0, 65536, NULL, "auto", "prompt tokens of a step in which others decode; auto: a quarter of step_tokens"},

    {"cache.share", T_CHOICE, N(cache_share), 0, 0, "tenant all none", "tenant", "who may reuse a cached prefix: the same tenant, everyone, nobody"},

    {"queue.limit", T_INT, N(queue_limit), 1, 100000, NULL, "256", "waiting requests; more is 503 with Retry-After"},
    {"queue.timeout_ms", T_INT, N(queue_timeout_ms), 1, WEEK_MS, NULL, "30000", "longest wait, where no policy says otherwise"},

    {"policy.headers", T_STRING, N(policy_headers), NONE, "", "request headers that policies see, separated by commas, e.g. \"user-agent\""},
    {"policy.expose", T_BOOL, N(policy_expose), NONE, "false", "x-dunlin-... headers tell what a request got and by which policy"},
    {"policy.budget_ms", T_NUMBER, N(policy_budget_ms), 0.05, 1000, NULL, "1", "time of one hook"},
    {"policy.instructions", T_INT, N(policy_instructions), 1000, 1e9, NULL, "200000", "instructions of one hook"},
    {"policy.memory", T_SIZE, N(policy_memory), MIB, GIB, NULL, "8 MiB", "memory of the policies in one event loop"},
    {"policy.list[].file", T_STRING, P(file), NONE, NULL, "the Lua file"},
    {"policy.list[].params", DN_CONF_T_PARAMS, P(param), NONE, "", "values for the policy's knobs: { name = value }"},
    {"policy.list[].mode", T_CHOICE, P(mode), 0, 0, "active shadow", "active", "shadow: runs and is recorded, changes nothing"},
    {"policy.list[].on_admit_error", T_CHOICE, P(on_admit_error), 0, 0, "rule reject ignore", "rule", "when its admit fails; the rule is to reject"},
    {"policy.list[].on_route_error", T_CHOICE, P(on_route_error), 0, 0, "rule reject ignore", "rule", "when its route fails; the rule is to go on"},

    {"api.strict", T_BOOL, N(api_strict), NONE, "false", "unknown parameters are an error instead of being named in a header"},
    {"metrics.public", T_BOOL, N(metrics_public), NONE, "true", "without a key"},
    {"log.level", T_CHOICE, N(log_level), 0, 0, "error warn info debug", "info", "least important events that are written"},
    {"log.format", T_CHOICE, N(log_format), 0, 0, "auto text json", "auto", "auto: colours and no date on a terminal, else text"},
};
/* clang-format on */
const size_t dn_conf_n_rows = sizeof dn_conf_rows / sizeof dn_conf_rows[0];

const struct dn_conf_row *dn_conf_row_find(const char *path)
{
    for (size_t i = 0; i < dn_conf_n_rows; i++) {
        if (strcmp(dn_conf_rows[i].path, path) == 0)
            return &dn_conf_rows[i];
    }
    return NULL;
}

uint32_t dn_conf_row_bit(const struct dn_conf_row *row)
{
    const struct dn_conf_row *first = row;
    while (first > dn_conf_rows && first[-1].scope == row->scope)
        first--;
    return 1u << (row - first);
}

enum { NEAR_BYTES = 40 };

/* Edits (insert, delete, replace, swap of neighbours) between two words of less than NEAR_BYTES bytes. */
static unsigned distance(const char *a, const char *b)
{
    unsigned row[3][NEAR_BYTES + 1];
    size_t n = strlen(a), m = strlen(b);
    for (size_t j = 0; j <= m; j++)
        row[0][j] = (unsigned)j;
    for (size_t i = 1; i <= n; i++) {
        unsigned *now = row[i % 3], *before = row[(i + 2) % 3], *earlier = row[(i + 1) % 3];
        now[0] = (unsigned)i;
        for (size_t j = 1; j <= m; j++) {
            unsigned best = before[j - 1] + (a[i - 1] != b[j - 1]);
            if (before[j] + 1 < best)
                best = before[j] + 1;
            if (now[j - 1] + 1 < best)
                best = now[j - 1] + 1;
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] && earlier[j - 2] + 1 < best)
                best = earlier[j - 2] + 1;
            now[j] = best;
        }
    }
    return row[n % 3][m];
}

const char *dn_conf_nearest(const char *wrong, const char *const *word, size_t n)
{
    size_t len = strlen(wrong);
    if (len >= NEAR_BYTES)
        return NULL;
    const char *best = NULL;
    unsigned best_distance = len < 4 ? 2 : (unsigned)(len / 3 + 2); /* must be below it */
    for (size_t i = 0; i < n; i++) {
        if (strlen(word[i]) >= NEAR_BYTES)
            continue;
        unsigned d = distance(wrong, word[i]);
        if (d < best_distance) {
            best_distance = d;
            best = word[i];
        }
    }
    return best;
}
