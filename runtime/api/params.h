/* The body of a generation request, checked: POST /v1/chat/completions and /v1/completions.
 *
 * Every field that OpenAI, vLLM or SGLang clients send is in one of three groups: taken (below), known but not
 * supported yet (a 400 that names it, unless its value asks for nothing), or unknown (accepted, and named in
 * x-dunlin-ignored; a 400 if strict). Nothing is clamped or dropped silently.
 *
 * The struct owns its JSON tree; views (pointers, json_t *) live as long. One thread at a time.
 */
#ifndef DN_API_PARAMS_H
#define DN_API_PARAMS_H

#include "base/json.h"

enum dn_endpoint { DN_ENDPOINT_CHAT, DN_ENDPOINT_COMPLETIONS };

enum {
    DN_STOP_STRINGS_MAX = 16,
    DN_STOP_STRING_BYTES = 256,
    DN_STOP_IDS_MAX = 8,
    DN_TOP_LOGPROBS_MAX = 20,
    DN_MESSAGES_MAX = 4096,
    DN_NAME_BYTES = 1024, /* of user, prompt_cache_key, safety_identifier */
    DN_IGNORED_BYTES = 256
};

struct dn_text {
    const char *at; /* may contain NUL; not terminated as far as the user of it is concerned */
    size_t len;
};

struct dn_params {
    enum dn_endpoint endpoint;
    json_t *root; /* owned */
    const char *model;
    /* Prompt: messages (chat), or exactly one of text and ids (completions). */
    json_t *messages;
    json_t *template_kwargs; /* chat_template_kwargs or NULL */
    bool add_generation_prompt;
    struct dn_text prompt;
    json_t *prompt_ids;    /* array of integers >= 0 */
    uint64_t prompt_bytes; /* of text in messages or prompt, for policies */

    bool stream, include_usage, echo, ignore_eos;
    int64_t max_tokens; /* -1: not given */
    int64_t min_tokens;
    double temperature, top_p, min_p, repetition, frequency, presence;
    bool has_temperature, has_top_p, has_top_k, has_min_p;
    int64_t top_k;
    bool has_seed;
    uint64_t seed;
    struct dn_text stop[DN_STOP_STRINGS_MAX];
    size_t n_stop;
    int64_t stop_id[DN_STOP_IDS_MAX];
    size_t n_stop_ids;
    int logprobs; /* -1: none, else alternatives a token, 0..DN_TOP_LOGPROBS_MAX */

    const char *wish_kv, *wish_integrity; /* dunlin: {kv, integrity}; NULL: none */
    const char *user, *prompt_cache_key;
    json_t *metadata;               /* object of strings or NULL */
    char ignored[DN_IGNORED_BYTES]; /* unknown fields, comma-separated, safe for a header */
};

/* Parses and checks a body. On failure nothing needs releasing. Errors: DN_INVALID_JSON, DN_INVALID_VALUE,
 * DN_UNSUPPORTED_PARAM, DN_UNKNOWN_PARAM (strict), all with err->param where one is at fault. */
int dn_params_parse(const char *body, size_t n, enum dn_endpoint endpoint, bool strict, struct dn_params *out,
                    struct dn_err *err);
void dn_params_release(struct dn_params *p);

#endif
