#include "api/params.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <string.h>

static int parse(const char *fields, enum dn_endpoint e, bool strict, struct dn_params *p, struct dn_err *err)
{
    char body[4096];
    snprintf(body, sizeof body, "{\"model\":\"m\",%s%s}",
             e == DN_ENDPOINT_CHAT ? "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}]" : "\"prompt\":\"hi\"",
             fields);
    *err = (struct dn_err){0};
    return dn_params_parse(body, strlen(body), e, strict, p, err);
}

static void ok(const char *fields, enum dn_endpoint e)
{
    struct dn_params p;
    struct dn_err err;
    cr_assert_eq(parse(fields, e, false, &p, &err), 0, "%s: %s", fields, err.text);
    dn_params_release(&p);
}

static void refused(const char *fields, enum dn_endpoint e, enum dn_code code, const char *param)
{
    struct dn_params p;
    struct dn_err err;
    cr_assert_eq(parse(fields, e, false, &p, &err), -(int)code, "%s: code %d %s", fields, err.code, err.text);
    cr_assert_str_eq(err.param, param, "%s", fields);
    cr_assert(strstr(err.text, param) || param[0] == '\0', "%s: \"%s\" does not name it", fields, err.text);
}

#define CHAT        DN_ENDPOINT_CHAT
#define COMPLETIONS DN_ENDPOINT_COMPLETIONS

Test(params, defaults_are_openais)
{
    struct dn_params p;
    struct dn_err err;
    cr_assert_eq(parse("", CHAT, false, &p, &err), 0);
    cr_assert_eq(p.max_tokens, -1);
    cr_assert_float_eq(p.temperature, 1, 0);
    cr_assert_float_eq(p.top_p, 1, 0);
    cr_assert_eq(p.logprobs, -1);
    cr_assert(!p.stream && !p.has_seed && !p.has_temperature);
    dn_params_release(&p);
    cr_assert_eq(parse("", COMPLETIONS, false, &p, &err), 0);
    cr_assert_eq(p.max_tokens, 16);
    dn_params_release(&p);
}

Test(params, null_counts_as_not_given)
{
    ok(",\"stop\":null,\"temperature\":null,\"n\":null,\"tools\":null,\"user\":null,\"stream\":null,\"max_tokens\":"
       "null",
       CHAT);
}

Test(params, values_out_of_range_are_named)
{
    refused(",\"temperature\":2.5", CHAT, DN_INVALID_VALUE, "temperature");
    refused(",\"temperature\":-1", CHAT, DN_INVALID_VALUE, "temperature");
    refused(",\"temperature\":\"hot\"", CHAT, DN_INVALID_VALUE, "temperature");
    refused(",\"top_p\":0", CHAT, DN_INVALID_VALUE, "top_p");
    refused(",\"top_p\":1.5", CHAT, DN_INVALID_VALUE, "top_p");
    refused(",\"top_k\":-2", CHAT, DN_INVALID_VALUE, "top_k");
    refused(",\"max_tokens\":0", CHAT, DN_INVALID_VALUE, "max_tokens");
    refused(",\"max_tokens\":-5", CHAT, DN_INVALID_VALUE, "max_tokens");
    refused(",\"max_tokens\":1.5", CHAT, DN_INVALID_VALUE, "max_tokens");
    refused(",\"max_tokens\":99999999999", CHAT, DN_INVALID_VALUE, "max_tokens");
    refused(",\"repetition_penalty\":0", CHAT, DN_INVALID_VALUE, "repetition_penalty");
    refused(",\"repetition_penalty\":1e-45", CHAT, DN_INVALID_VALUE, "repetition_penalty");
    refused(",\"frequency_penalty\":3", CHAT, DN_INVALID_VALUE, "frequency_penalty");
    refused(",\"top_logprobs\":21,\"logprobs\":true", CHAT, DN_INVALID_VALUE, "top_logprobs");
    refused(",\"top_logprobs\":2", CHAT, DN_INVALID_VALUE, "top_logprobs");
    refused(",\"logprobs\":21", COMPLETIONS, DN_INVALID_VALUE, "logprobs");
    refused(",\"stream\":1", CHAT, DN_INVALID_VALUE, "stream");
    refused(",\"stop\":7", CHAT, DN_INVALID_VALUE, "stop");
    refused(",\"stop\":[\"\"]", CHAT, DN_INVALID_VALUE, "stop");
    refused(",\"stop\":[1]", CHAT, DN_INVALID_VALUE, "stop");
    refused(",\"stop_token_ids\":[-1]", CHAT, DN_INVALID_VALUE, "stop_token_ids[0]");
    refused(",\"seed\":1.5", CHAT, DN_INVALID_VALUE, "seed");
    refused(",\"metadata\":{\"a\":1}", CHAT, DN_INVALID_VALUE, "metadata");
    refused(",\"stream_options\":{\"include_usage\":true}", CHAT, DN_INVALID_VALUE, "stream_options");
    refused(",\"min_tokens\":9,\"max_tokens\":3", CHAT, DN_INVALID_VALUE, "min_tokens");
    refused(",\"dunlin\":{\"kv\":\"int2\"}", CHAT, DN_INVALID_VALUE, "dunlin.kv");
    refused(",\"dunlin\":{\"kvv\":\"bf16\"}", CHAT, DN_INVALID_VALUE, "dunlin");
}

Test(params, names_are_bounded)
{
    static const char *const name[] = {"user", "prompt_cache_key", "safety_identifier"};
    for (size_t i = 0; i < 3; i++) {
        char fields[DN_NAME_BYTES + 64];
        snprintf(fields, sizeof fields, ",\"%s\":\"%0*d\"", name[i], DN_NAME_BYTES, 0);
        ok(fields, CHAT);
        snprintf(fields, sizeof fields, ",\"%s\":\"%0*d\"", name[i], DN_NAME_BYTES + 1, 0);
        refused(fields, COMPLETIONS, DN_INVALID_VALUE, name[i]);
    }
}

Test(params, known_but_unsupported_is_named_unless_it_asks_for_nothing)
{
    refused(",\"n\":2", CHAT, DN_UNSUPPORTED_PARAM, "n");
    refused(",\"tools\":[{\"type\":\"function\"}]", CHAT, DN_UNSUPPORTED_PARAM, "tools");
    refused(",\"response_format\":{\"type\":\"json_object\"}", CHAT, DN_UNSUPPORTED_PARAM, "response_format");
    refused(",\"logit_bias\":{\"5\":1}", CHAT, DN_UNSUPPORTED_PARAM, "logit_bias");
    refused(",\"best_of\":2", COMPLETIONS, DN_UNSUPPORTED_PARAM, "best_of");
    refused(",\"suffix\":\"x\"", COMPLETIONS, DN_UNSUPPORTED_PARAM, "suffix");
    ok(",\"n\":1,\"tools\":[],\"tool_choice\":\"auto\",\"response_format\":{\"type\":\"text\"},\"logit_bias\":{}",
       CHAT);
    ok(",\"best_of\":1,\"suffix\":\"\"", COMPLETIONS);
}

Test(params, unknown_fields_are_listed_or_refused_when_strict)
{
    struct dn_params p;
    struct dn_err err;
    cr_assert_eq(parse(",\"foo\":1,\"ba\\nr\":2", CHAT, false, &p, &err), 0);
    cr_assert_str_eq(p.ignored, "foo,ba?r");
    dn_params_release(&p);
    cr_assert_eq(parse(",\"foo\":1", CHAT, true, &p, &err), -DN_UNKNOWN_PARAM);
}

Test(params, a_flood_of_unknown_fields_stays_a_short_header)
{
    char body[16384] = "{\"model\":\"m\",\"prompt\":\"x\"";
    for (int i = 0; i < 500; i++)
        snprintf(body + strlen(body), sizeof body - strlen(body), ",\"unknown_%d\":1", i);
    snprintf(body + strlen(body), sizeof body - strlen(body), "}");
    struct dn_params p;
    struct dn_err err;
    cr_assert_eq(dn_params_parse(body, strlen(body), COMPLETIONS, false, &p, &err), 0);
    cr_assert_lt(strlen(p.ignored), DN_IGNORED_BYTES);
    cr_assert_str_eq(p.ignored + strlen(p.ignored) - 3, "...");
    dn_params_release(&p);
}

static int messages(const char *list, struct dn_params *p, struct dn_err *err)
{
    char body[4096];
    snprintf(body, sizeof body, "{\"model\":\"m\",\"messages\":%s}", list);
    *err = (struct dn_err){0};
    return dn_params_parse(body, strlen(body), CHAT, false, p, err);
}

Test(params, messages_are_checked_one_by_one)
{
    struct dn_params p;
    struct dn_err err;
    static const char *const bad[] = {
        "[]",
        "null",
        "{}",
        "[1]",
        "[{\"role\":\"user\"}]",
        "[{\"role\":\"wizard\",\"content\":\"x\"}]",
        "[{\"role\":\"user\",\"content\":5}]",
        "[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\"}]}]",
        "[{\"role\":\"user\",\"content\":[\"x\"]}]",
        "[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":\"{\"}}]}]",
        "[{\"role\":\"assistant\",\"tool_calls\":[{\"function\":{\"arguments\":\"{}\"}}]}]",
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        cr_assert_neq(messages(bad[i], &p, &err), 0, "%s", bad[i]);
        cr_assert(err.param[0], "%s", bad[i]);
        cr_assert_eq(dn_code_info(err.code)->status, 400);
    }
    static const char *const good[] = {
        "[{\"role\":\"user\",\"content\":\"\"}]",
        "[{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"x\"}]}]",
        "[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"id\":\"1\","
        "\"type\":"
        "\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{}\"}}]},{\"role\":\"tool\",\"tool_call_id\":\"1\","
        "\"content\":\"r\"}]",
    };
    for (size_t i = 0; i < sizeof good / sizeof *good; i++) {
        cr_assert_eq(messages(good[i], &p, &err), 0, "%s: %s", good[i], err.text);
        dn_params_release(&p);
    }
}

static int prompt(const char *value, struct dn_params *p, struct dn_err *err)
{
    char body[1024];
    snprintf(body, sizeof body, "{\"model\":\"m\",\"prompt\":%s}", value);
    *err = (struct dn_err){0};
    return dn_params_parse(body, strlen(body), COMPLETIONS, false, p, err);
}

Test(params, prompts_are_text_or_ids)
{
    struct dn_params p;
    struct dn_err err;
    cr_assert_eq(prompt("[1,2,3]", &p, &err), 0);
    cr_assert_eq(json_array_size(p.prompt_ids), 3);
    dn_params_release(&p);
    cr_assert_eq(prompt("[\"one\"]", &p, &err), 0);
    cr_assert_eq(p.prompt.len, 3);
    dn_params_release(&p);
    cr_assert_eq(prompt("[[5]]", &p, &err), 0);
    dn_params_release(&p);
    cr_assert_eq(prompt("[\"one\",\"two\"]", &p, &err), -DN_UNSUPPORTED_PARAM);
    static const char *const bad[] = {"[-1]", "[1.5]", "[99999999999]", "[]", "null", "5", "{}", "[1,\"x\"]", "[[]]"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_assert_eq(prompt(bad[i], &p, &err), -DN_INVALID_VALUE, "%s", bad[i]);
}

Test(params, garbage_is_a_400)
{
    static const char *const bad[] = {"",
                                      "{",
                                      "[]",
                                      "null",
                                      "{:",
                                      "{\"model\":\"m\"} x",
                                      "{\"model\":\"m\",\"model\":\"n\"}",
                                      "{\"model\":\"\\ud800\"}",
                                      "{\"a\":1e999}",
                                      "\xff"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct dn_params p;
        struct dn_err err = {0};
        cr_assert_neq(dn_params_parse(bad[i], strlen(bad[i]), CHAT, false, &p, &err), 0, "%s", bad[i]);
        cr_assert_eq(dn_code_info(err.code)->status, 400, "%s", bad[i]);
    }
}
