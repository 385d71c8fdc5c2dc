#include "api/params.h"

#include <stdio.h>
#include <string.h>

/* ---- Fields that are known but not supported yet --------------------------------------------------------------------
 */

/* Values that ask for nothing special are fine: clients send them by default. */
enum neutral {
    N_NONE,       /* only null */
    N_FALSE,      /* null or false */
    N_TRUE,       /* null or true */
    N_ANY,        /* whatever: it has no meaning without a feature that is refused elsewhere */
    N_ONE,        /* null or 1 */
    N_EMPTY,      /* null or an empty list */
    N_EMPTY_MAP,  /* null or an empty object */
    N_EMPTY_TEXT, /* null or an empty string */
    N_NO_TOOL,    /* null, "none" or "auto" */
    N_TEXT_TYPE,  /* null or {"type": "text"} */
    N_TEXT_LIST,  /* null or ["text"] */
    N_SERVICE     /* null, "auto" or "default" */
};

static const struct {
    const char *name;
    enum neutral neutral;
} unsupported[] = {
    {"n", N_ONE},
    {"best_of", N_ONE},
    {"logit_bias", N_EMPTY_MAP},
    {"tools", N_EMPTY},
    {"tool_choice", N_NO_TOOL},
    {"functions", N_EMPTY},
    {"function_call", N_NO_TOOL},
    {"parallel_tool_calls", N_ANY},
    {"response_format", N_TEXT_TYPE},
    {"suffix", N_EMPTY_TEXT},
    {"audio", N_NONE},
    {"modalities", N_TEXT_LIST},
    {"prediction", N_NONE},
    {"web_search_options", N_NONE},
    {"reasoning_effort", N_NONE},
    {"verbosity", N_NONE},
    {"store", N_FALSE},
    {"service_tier", N_SERVICE},
    {"structured_outputs", N_NONE},
    {"guided_json", N_NONE},
    {"guided_regex", N_NONE},
    {"guided_choice", N_NONE},
    {"guided_grammar", N_NONE},
    {"regex", N_NONE},
    {"ebnf", N_NONE},
    {"grammar", N_NONE},
    {"json_schema", N_NONE},
    {"bad_words", N_EMPTY},
    {"allowed_token_ids", N_EMPTY},
    {"prompt_logprobs", N_NONE},
    {"use_beam_search", N_FALSE},
    {"length_penalty", N_ONE},
    {"skip_special_tokens", N_TRUE},
    {"include_stop_str_in_output", N_FALSE},
    {"no_stop_trim", N_FALSE},
    {"stop_regex", N_EMPTY},
    {"truncate_prompt_tokens", N_NONE},
    {"cache_salt", N_NONE},
    {"lora_path", N_NONE},
    {"documents", N_EMPTY},
    {"chat_template", N_NONE},
    {"continue_final_message", N_FALSE},
    {"return_tokens_as_token_ids", N_FALSE},
    {"return_token_ids", N_FALSE},
    {"kv_transfer_params", N_NONE},
};

static bool is_string(const json_t *v, const char *text)
{
    return json_is_string(v) && strcmp(json_string_value(v), text) == 0;
}

static bool is_neutral(const json_t *v, enum neutral n)
{
    if (json_is_null(v))
        return true;
    switch (n) {
    case N_NONE:
        return false;
    case N_FALSE:
        return json_is_false(v);
    case N_TRUE:
        return json_is_true(v);
    case N_ANY:
        return true;
    case N_ONE:
        return json_is_number(v) && json_number_value(v) == 1.0;
    case N_EMPTY:
        return json_is_array(v) && json_array_size(v) == 0;
    case N_EMPTY_MAP:
        return json_is_object(v) && json_object_size(v) == 0;
    case N_EMPTY_TEXT:
        return is_string(v, "");
    case N_NO_TOOL:
        return is_string(v, "none") || is_string(v, "auto");
    case N_TEXT_TYPE:
        return json_is_object(v) && json_object_size(v) == 1 && is_string(json_object_get(v, "type"), "text");
    case N_TEXT_LIST:
        return json_is_array(v) && json_array_size(v) == 1 && is_string(json_array_get(v, 0), "text");
    case N_SERVICE:
        return is_string(v, "auto") || is_string(v, "default");
    }
    return false;
}

/* Fields that are read below or by nobody on purpose; per endpoint where they differ. */
static const char *const taken[] = {
    "model",
    "stream",
    "stream_options",
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "seed",
    "stop",
    "presence_penalty",
    "repetition_penalty",
    "stop_token_ids",
    "ignore_eos",
    "logprobs",
    "user",
    "metadata",
    "dunlin",
    "prompt_cache_key",
    "safety_identifier",
};
static const char *const taken_chat[] = {"messages", "max_completion_tokens", "top_logprobs", "chat_template_kwargs",
                                         "add_generation_prompt"};
static const char *const taken_completions[] = {"prompt", "echo"};

static bool is_in(const char *name, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(name, list[i]) == 0)
            return true;
    return false;
}
#define IS_IN(name, list) is_in(name, list, sizeof(list) / sizeof *(list))

static bool is_taken(const char *name, enum dn_endpoint endpoint)
{
    return IS_IN(name, taken) ||
           (endpoint == DN_ENDPOINT_CHAT ? IS_IN(name, taken_chat) : IS_IN(name, taken_completions));
}

/* Adds a field's name to the header value; bytes that a header should not have become '?'. */
static void note_ignored(struct dn_params *p, const char *name)
{
    size_t used = strlen(p->ignored), room = sizeof p->ignored - used;
    char safe[48];
    size_t n = 0;
    for (; name[n] && n < sizeof safe - 1; n++)
        safe[n] = name[n] > ' ' && name[n] < 0x7f && name[n] != ',' ? name[n] : '?';
    safe[n] = '\0';
    if (n + 6 < room)
        snprintf(p->ignored + used, room, "%s%s", used ? "," : "", safe);
    else if (room > 4 && (used < 4 || strcmp(p->ignored + used - 3, "...") != 0))
        snprintf(p->ignored + used, room, ",...");
}

static int check_fields(struct dn_params *p, bool strict, struct dn_err *err)
{
    const char *name;
    json_t *value;
    json_object_foreach(p->root, name, value)
    {
        if (is_taken(name, p->endpoint))
            continue;
        size_t i = 0, n = sizeof unsupported / sizeof *unsupported;
        while (i < n && strcmp(name, unsupported[i].name) != 0)
            i++;
        if (i < n) {
            if (!is_neutral(value, unsupported[i].neutral))
                return dn_err_param(err, DN_UNSUPPORTED_PARAM, name, "%s: this node does not support it yet", name);
            continue;
        }
        note_ignored(p, name);
    }
    if (strict && p->ignored[0])
        return dn_err_param(err, DN_UNKNOWN_PARAM, p->ignored, "unknown parameter: %s", p->ignored);
    return 0;
}

/* ---- Values
 * ---------------------------------------------------------------------------------------------------------- */

static int get_limits(struct dn_params *p, struct dn_err *err)
{
    const json_t *o = p->root;
    int rc = 0;
    const char *key = "max_tokens";
    if (p->endpoint == DN_ENDPOINT_CHAT && dn_json_has(o, "max_completion_tokens"))
        key = "max_completion_tokens";
    int64_t min = p->endpoint == DN_ENDPOINT_CHAT ? 1 : 0;
    if ((rc = dn_json_get_int(o, key, min, INT32_MAX, -1, &p->max_tokens, err)) != 0 ||
        (rc = dn_json_get_int(o, "min_tokens", 0, INT32_MAX, 0, &p->min_tokens, err)) != 0 ||
        (rc = dn_json_get_bool(o, "ignore_eos", false, &p->ignore_eos, err)) != 0)
        return rc;
    if (p->endpoint == DN_ENDPOINT_COMPLETIONS && p->max_tokens < 0)
        p->max_tokens = 16; /* OpenAI's default of this endpoint */
    if (p->max_tokens >= 0 && p->min_tokens > p->max_tokens)
        return dn_err_param(err, DN_INVALID_VALUE, "min_tokens", "min_tokens: %lld is more than %s (%lld)",
                            (long long)p->min_tokens, key, (long long)p->max_tokens);
    return 0;
}

static int get_sampling(struct dn_params *p, struct dn_err *err)
{
    const json_t *o = p->root;
    int rc;
    int64_t seed;
    p->has_temperature = dn_json_has(o, "temperature");
    p->has_top_p = dn_json_has(o, "top_p");
    p->has_top_k = dn_json_has(o, "top_k");
    p->has_min_p = dn_json_has(o, "min_p");
    p->has_seed = dn_json_has(o, "seed");
    if ((rc = dn_json_get_number(o, "temperature", 0, 2, 1, &p->temperature, err)) != 0 ||
        (rc = dn_json_get_number(o, "top_p", 0, 1, 1, &p->top_p, err)) != 0 ||
        (rc = dn_json_get_number(o, "min_p", 0, 1, 0, &p->min_p, err)) != 0 ||
        (rc = dn_json_get_int(o, "top_k", -1, INT32_MAX, -1, &p->top_k, err)) != 0 ||
        (rc = dn_json_get_number(o, "frequency_penalty", -2, 2, 0, &p->frequency, err)) != 0 ||
        (rc = dn_json_get_number(o, "presence_penalty", -2, 2, 0, &p->presence, err)) != 0 ||
        (rc = dn_json_get_number(o, "repetition_penalty", 0, 2, 1, &p->repetition, err)) != 0 ||
        (rc = dn_json_get_int(o, "seed", INT64_MIN, INT64_MAX, 0, &seed, err)) != 0)
        return rc;
    p->seed = (uint64_t)seed;
    if (p->top_p == 0)
        return dn_err_param(err, DN_INVALID_VALUE, "top_p", "top_p: 0 keeps no token; expected a number in (0, 1]");
    if (p->repetition < 0.01) /* dividing by less can leave what a float holds */
        return dn_err_param(err, DN_INVALID_VALUE, "repetition_penalty",
                            "repetition_penalty: expected a number from 0.01 to 2");
    return 0;
}

static int one_stop(struct dn_params *p, const json_t *v, const char *name, struct dn_err *err)
{
    if (!json_is_string(v))
        return dn_err_param(err, DN_INVALID_VALUE, "stop", "%s: expected a string, not %s", name, dn_json_type_name(v));
    size_t n = json_string_length(v);
    if (n == 0 || n > DN_STOP_STRING_BYTES)
        return dn_err_param(err, DN_INVALID_VALUE, "stop", "%s: expected 1 to %d bytes, not %zu", name,
                            DN_STOP_STRING_BYTES, n);
    p->stop[p->n_stop++] = (struct dn_text){json_string_value(v), n};
    return 0;
}

static int get_stop(struct dn_params *p, struct dn_err *err)
{
    const json_t *v = json_object_get(p->root, "stop");
    char name[32];
    int rc = 0;
    if (json_is_string(v)) {
        rc = one_stop(p, v, "stop", err);
    } else if (json_is_array(v)) {
        size_t n = json_array_size(v);
        if (n > DN_STOP_STRINGS_MAX)
            return dn_err_param(err, DN_INVALID_VALUE, "stop", "stop: at most %d strings, not %zu", DN_STOP_STRINGS_MAX,
                                n);
        for (size_t i = 0; i < n && rc == 0; i++) {
            snprintf(name, sizeof name, "stop[%zu]", i);
            rc = one_stop(p, json_array_get(v, i), name, err);
        }
    } else if (v && !json_is_null(v)) {
        rc = dn_err_param(err, DN_INVALID_VALUE, "stop", "stop: expected a string or a list of strings");
    }
    if (rc != 0)
        return rc;
    json_t *ids;
    if ((rc = dn_json_get_array(p->root, "stop_token_ids", &ids, err)) != 0)
        return rc;
    size_t n = ids ? json_array_size(ids) : 0;
    if (n > DN_STOP_IDS_MAX)
        return dn_err_param(err, DN_INVALID_VALUE, "stop_token_ids", "stop_token_ids: at most %d ids, not %zu",
                            DN_STOP_IDS_MAX, n);
    for (size_t i = 0; i < n; i++) {
        snprintf(name, sizeof name, "stop_token_ids[%zu]", i);
        if ((rc = dn_json_int(json_array_get(ids, i), name, 0, INT32_MAX, &p->stop_id[p->n_stop_ids++], err)) != 0)
            return rc;
    }
    return 0;
}

static int get_logprobs(struct dn_params *p, struct dn_err *err)
{
    p->logprobs = -1;
    int64_t n;
    int rc;
    if (p->endpoint == DN_ENDPOINT_COMPLETIONS) {
        rc = dn_json_get_int(p->root, "logprobs", 0, DN_TOP_LOGPROBS_MAX, -1, &n, err);
        p->logprobs = rc == 0 ? (int)n : -1;
        return rc;
    }
    bool on;
    if ((rc = dn_json_get_bool(p->root, "logprobs", false, &on, err)) != 0 ||
        (rc = dn_json_get_int(p->root, "top_logprobs", 0, DN_TOP_LOGPROBS_MAX, 0, &n, err)) != 0)
        return rc;
    if (!on && n > 0)
        return dn_err_param(err, DN_INVALID_VALUE, "top_logprobs", "top_logprobs: needs logprobs: true");
    p->logprobs = on ? (int)n : -1;
    return 0;
}

static int get_stream(struct dn_params *p, struct dn_err *err)
{
    json_t *options;
    int rc;
    if ((rc = dn_json_get_bool(p->root, "stream", false, &p->stream, err)) != 0 ||
        (rc = dn_json_get_object(p->root, "stream_options", &options, err)) != 0 || !options)
        return rc;
    if (!p->stream)
        return dn_err_param(err, DN_INVALID_VALUE, "stream_options", "stream_options: needs stream: true");
    const char *name;
    json_t *value;
    json_object_foreach(options, name, value)
    {
        if (strcmp(name, "include_usage") == 0 || is_neutral(value, N_FALSE))
            continue;
        return dn_err_param(err, DN_UNSUPPORTED_PARAM, "stream_options",
                            "stream_options: only include_usage is supported yet");
    }
    if ((rc = dn_json_get_bool(options, "include_usage", false, &p->include_usage, err)) != 0)
        return dn_json_err_at(err, "stream_options.");
    return 0;
}

/* A name that a client made up; policies get a copy of it on the event loop. */
static int get_name(const struct dn_params *p, const char *key, const char **out, struct dn_err *err)
{
    size_t n;
    int rc = dn_json_get_string(p->root, key, out, &n, err);
    if (rc == 0 && n > DN_NAME_BYTES)
        rc = dn_err_param(err, DN_INVALID_VALUE, key, "%s: expected at most %d bytes, not %zu", key, DN_NAME_BYTES, n);
    return rc;
}

static int get_names(struct dn_params *p, struct dn_err *err)
{
    size_t n;
    int rc;
    json_t *wish;
    const char *unused;
    if ((rc = dn_json_get_string(p->root, "model", &p->model, &n, err)) != 0 ||
        (rc = get_name(p, "user", &p->user, err)) != 0 ||
        (rc = get_name(p, "prompt_cache_key", &p->prompt_cache_key, err)) != 0 ||
        (rc = get_name(p, "safety_identifier", &unused, err)) != 0 ||
        (rc = dn_json_get_object(p->root, "metadata", &p->metadata, err)) != 0 ||
        (rc = dn_json_get_object(p->root, "dunlin", &wish, err)) != 0)
        return rc;
    if (!p->model)
        return dn_err_param(err, DN_INVALID_VALUE, "model", "model: missing; GET /v1/models lists what is served");
    const char *name;
    json_t *value;
    json_object_foreach(p->metadata, name, value)
    {
        if (!json_is_string(value) || json_string_length(value) > 512 || json_object_size(p->metadata) > 16)
            return dn_err_param(err, DN_INVALID_VALUE, "metadata",
                                "metadata: expected at most 16 strings of at most 512 bytes");
    }
    json_object_foreach(wish, name, value)
    {
        if (strcmp(name, "kv") != 0 && strcmp(name, "integrity") != 0)
            return dn_err_param(err, DN_INVALID_VALUE, "dunlin", "dunlin: has the fields kv and integrity alone");
    }
    if (wish && ((rc = dn_json_get_string(wish, "kv", &p->wish_kv, &n, err)) != 0 ||
                 (rc = dn_json_get_string(wish, "integrity", &p->wish_integrity, &n, err)) != 0))
        return dn_json_err_at(err, "dunlin.");
    static const char *const kv[] = {"bf16", "fp8_e4m3"}, *const integrity[] = {"off", "tag"};
    if (p->wish_kv && !IS_IN(p->wish_kv, kv))
        return dn_err_param(err, DN_INVALID_VALUE, "dunlin.kv", "dunlin.kv: expected one of bf16, fp8_e4m3");
    if (p->wish_integrity && !IS_IN(p->wish_integrity, integrity))
        return dn_err_param(err, DN_INVALID_VALUE, "dunlin.integrity", "dunlin.integrity: expected one of off, tag");
    return 0;
}

/* ---- Prompts
 * --------------------------------------------------------------------------------------------------------- */

static int check_part(struct dn_params *p, const json_t *part, const char *at, struct dn_err *err)
{
    const json_t *type = json_object_get(part, "type");
    if (!json_is_object(part) || !json_is_string(type))
        return dn_err_param(err, DN_INVALID_VALUE, at, "%s: expected an object with a type", at);
    if (!is_string(type, "text"))
        return dn_err_param(err, DN_UNSUPPORTED_PARAM, at, "%s: only parts of type text are supported", at);
    const json_t *text = json_object_get(part, "text");
    if (!json_is_string(text))
        return dn_err_param(err, DN_INVALID_VALUE, at, "%s: text: expected a string", at);
    p->prompt_bytes += json_string_length(text);
    return 0;
}

static int check_content(struct dn_params *p, const json_t *m, size_t i, bool may_be_null, struct dn_err *err)
{
    const json_t *content = json_object_get(m, "content");
    char at[64];
    snprintf(at, sizeof at, "messages[%zu].content", i);
    if (json_is_string(content)) {
        p->prompt_bytes += json_string_length(content);
        return 0;
    }
    if (!content || json_is_null(content)) {
        if (may_be_null)
            return 0;
        return dn_err_param(err, DN_INVALID_VALUE, at, "%s: missing", at);
    }
    if (!json_is_array(content))
        return dn_err_param(err, DN_INVALID_VALUE, at, "%s: expected a string or a list of parts, not %s", at,
                            dn_json_type_name(content));
    for (size_t k = 0; k < json_array_size(content); k++) {
        snprintf(at, sizeof at, "messages[%zu].content[%zu]", i, k);
        int rc = check_part(p, json_array_get(content, k), at, err);
        if (rc != 0)
            return rc;
    }
    return 0;
}

/* Calls in the history go to the template as they are, so they must be whole: a name, and arguments that are JSON. */
static int check_tool_calls(const json_t *m, size_t i, struct dn_err *err)
{
    const json_t *calls = json_object_get(m, "tool_calls");
    char at[64];
    snprintf(at, sizeof at, "messages[%zu].tool_calls", i);
    if (!calls || json_is_null(calls))
        return 0;
    if (!json_is_array(calls))
        return dn_err_param(err, DN_INVALID_VALUE, at, "%s: expected a list", at);
    for (size_t k = 0; k < json_array_size(calls); k++) {
        const json_t *f = json_object_get(json_array_get(calls, k), "function");
        const json_t *arguments = json_object_get(f, "arguments");
        snprintf(at, sizeof at, "messages[%zu].tool_calls[%zu]", i, k);
        if (!json_is_object(f) || !json_is_string(json_object_get(f, "name")))
            return dn_err_param(err, DN_INVALID_VALUE, at, "%s: expected a function with a name", at);
        if (!json_is_string(arguments) && !json_is_object(arguments))
            return dn_err_param(err, DN_INVALID_VALUE, at, "%s: function.arguments: expected JSON in a string", at);
        if (json_is_string(arguments) && json_string_length(arguments) > 0) {
            json_t *parsed;
            if (dn_json_parse(json_string_value(arguments), json_string_length(arguments), &parsed, err) != 0)
                return dn_err_param(err, DN_INVALID_VALUE, at, "%s: function.arguments is not JSON", at);
            json_decref(parsed);
        }
    }
    return 0;
}

static int get_messages(struct dn_params *p, struct dn_err *err)
{
    int rc;
    if ((rc = dn_json_get_array(p->root, "messages", &p->messages, err)) != 0 ||
        (rc = dn_json_get_object(p->root, "chat_template_kwargs", &p->template_kwargs, err)) != 0 ||
        (rc = dn_json_get_bool(p->root, "add_generation_prompt", true, &p->add_generation_prompt, err)) != 0)
        return rc;
    size_t n = p->messages ? json_array_size(p->messages) : 0;
    if (n == 0)
        return dn_err_param(err, DN_INVALID_VALUE, "messages", "messages: expected a list with at least one message");
    if (n > DN_MESSAGES_MAX)
        return dn_err_param(err, DN_INVALID_VALUE, "messages", "messages: at most %d, not %zu", DN_MESSAGES_MAX, n);
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};
    for (size_t i = 0; i < n; i++) {
        const json_t *m = json_array_get(p->messages, i);
        const json_t *role = json_object_get(m, "role");
        char at[48];
        snprintf(at, sizeof at, "messages[%zu]", i);
        if (!json_is_object(m))
            return dn_err_param(err, DN_INVALID_VALUE, at, "%s: expected an object, not %s", at, dn_json_type_name(m));
        if (!json_is_string(role) || !IS_IN(json_string_value(role), roles))
            return dn_err_param(err, DN_INVALID_VALUE, at,
                                "%s: role: expected one of system, developer, user, assistant, tool", at);
        bool assistant = is_string(role, "assistant");
        if ((rc = check_content(p, m, i, assistant, err)) != 0 || (rc = check_tool_calls(m, i, err)) != 0)
            return rc;
    }
    return 0;
}

static int get_prompt_ids(struct dn_params *p, json_t *ids, struct dn_err *err)
{
    size_t n = json_array_size(ids);
    for (size_t i = 0; i < n; i++) {
        const json_t *v = json_array_get(ids, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) > INT32_MAX)
            return dn_err_param(err, DN_INVALID_VALUE, "prompt", "prompt[%zu]: expected a token id", i);
    }
    p->prompt_ids = ids;
    p->prompt_bytes = 4 * (uint64_t)n;
    return 0;
}

static int get_prompt(struct dn_params *p, struct dn_err *err)
{
    int rc = dn_json_get_bool(p->root, "echo", false, &p->echo, err);
    if (rc != 0)
        return rc;
    json_t *v = json_object_get(p->root, "prompt");
    if (json_is_array(v) && json_array_size(v) > 0 && !json_is_integer(json_array_get(v, 0))) {
        if (json_array_size(v) > 1)
            return dn_err_param(err, DN_UNSUPPORTED_PARAM, "prompt",
                                "prompt: lists of several prompts are not supported yet; send one request each");
        v = json_array_get(v, 0);
    }
    if (json_is_string(v)) {
        p->prompt = (struct dn_text){json_string_value(v), json_string_length(v)};
        p->prompt_bytes = p->prompt.len;
        return 0;
    }
    if (json_is_array(v) && json_array_size(v) > 0)
        return get_prompt_ids(p, v, err);
    return dn_err_param(err, DN_INVALID_VALUE, "prompt", "prompt: expected a string or a list of token ids, not %s",
                        v ? dn_json_type_name(v) : "nothing");
}

int dn_params_parse(const char *body, size_t n, enum dn_endpoint endpoint, bool strict, struct dn_params *out,
                    struct dn_err *err)
{
    struct dn_params p = {.endpoint = endpoint};
    int rc = dn_json_parse(body, n, &p.root, err);
    if (rc != 0)
        return rc;
    if (!json_is_object(p.root))
        rc = dn_err_set(err, DN_INVALID_JSON, "the body must be a JSON object");
    if (rc == 0)
        rc = check_fields(&p, strict, err);
    if (rc == 0)
        rc = get_names(&p, err);
    if (rc == 0)
        rc = endpoint == DN_ENDPOINT_CHAT ? get_messages(&p, err) : get_prompt(&p, err);
    if (rc == 0)
        rc = get_stream(&p, err);
    if (rc == 0)
        rc = get_limits(&p, err);
    if (rc == 0)
        rc = get_sampling(&p, err);
    if (rc == 0)
        rc = get_stop(&p, err);
    if (rc == 0)
        rc = get_logprobs(&p, err);
    if (rc == 0 && p.max_tokens == 0 && !(p.echo && p.logprobs >= 0))
        rc = dn_err_param(err, DN_INVALID_VALUE, "max_tokens", "max_tokens: 0 needs echo and logprobs");
    if (rc != 0) {
        dn_params_release(&p);
        return rc;
    }
    *out = p;
    return 0;
}

void dn_params_release(struct dn_params *p)
{
    json_decref(p->root);
    p->root = NULL;
}
