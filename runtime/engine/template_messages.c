#include "engine/template_messages.h"

#include <string.h>

/* Where a value stands, for errors. */
struct place {
    size_t message;
    struct dn_err *err;
};

static int wrong(const struct place *p, enum dn_code code, const char *field, const char *why)
{
    char param[128];
    snprintf(param, sizeof param, "messages[%zu]%s", p->message, field);
    return dn_err_param(p->err, code, param, "%s: %s", param, why);
}

/* The text of content part i, or NULL with the error set. */
static json_t *part_text(json_t *part, size_t i, const struct place *p)
{
    char field[64];
    const char *type = json_string_value(json_object_get(part, "type"));
    if (!type || strcmp(type, "text") != 0) {
        snprintf(field, sizeof field, ".content[%zu].type", i);
        if (!type)
            wrong(p, DN_INVALID_VALUE, field, "must be \"text\"");
        else
            wrong(p, DN_UNSUPPORTED_PARAM, field, "only parts of type \"text\" are supported");
        return NULL;
    }
    json_t *text = json_object_get(part, "text");
    if (!json_is_string(text)) {
        snprintf(field, sizeof field, ".content[%zu].text", i);
        wrong(p, DN_INVALID_VALUE, field, "must be a string");
        return NULL;
    }
    return text;
}

/* Checks the parts, and joins them if the template takes only strings. Sets *out to a new reference or leaves it. */
static int parts(json_t *list, const struct dn_template_traits *traits, const struct place *p, json_t **out)
{
    struct dn_buf joined = {0};
    size_t i;
    json_t *part;
    json_array_foreach(list, i, part)
    {
        json_t *text = part_text(part, i, p);
        if (!text) {
            dn_buf_release(&joined);
            return -(int)p->err->code;
        }
        if (!traits->takes_content_parts)
            dn_buf_put(&joined, json_string_value(text), json_string_length(text));
    }
    if (!traits->takes_content_parts)
        *out = json_stringn(joined.len ? joined.data : "", joined.len);
    dn_buf_release(&joined);
    return 0;
}

/* What to put instead of a message's content: *out is a new reference, or NULL to leave it. */
static int content(json_t *message, const struct dn_template_traits *traits, const struct place *p, json_t **out)
{
    json_t *v = json_object_get(message, "content");
    *out = NULL;
    if (json_is_array(v))
        return parts(v, traits, p, out);
    if (v && !json_is_null(v) && !json_is_string(v))
        return wrong(p, DN_INVALID_VALUE, ".content", "must be a string or an array of parts");
    const char *role = json_string_value(json_object_get(message, "role"));
    if (!v && !(role && strcmp(role, "assistant") == 0))
        return 0;
    if (traits->wants_content_parts && json_is_string(v))
        *out = json_pack("[{s:s, s:O}]", "type", "text", "text", v);
    else if (!json_is_string(v))
        *out = json_string("");
    return 0;
}

/* Replaces arguments text by the object that it stands for, in a copy of the call. *out: a new reference. */
static int tool_call(json_t *call, size_t i, const struct dn_template_traits *traits, const struct place *p,
                     json_t **out)
{
    char field[64];
    json_t *function = json_object_get(call, "function");
    json_t *arguments = json_object_get(function, "arguments");
    if (!json_is_object(call) || (function && !json_is_object(function))) {
        snprintf(field, sizeof field, ".tool_calls[%zu]", i);
        return wrong(p, DN_INVALID_VALUE, field, "must be an object with an object \"function\"");
    }
    *out = NULL;
    if (!json_is_string(arguments)) {
        if (!arguments || json_is_object(arguments))
            return 0;
        snprintf(field, sizeof field, ".tool_calls[%zu].function.arguments", i);
        return wrong(p, DN_INVALID_VALUE, field, "must be the JSON text of an object");
    }
    json_t *object = NULL;
    if (json_string_length(arguments) == 0)
        object = json_object();
    else
        dn_json_parse(json_string_value(arguments), json_string_length(arguments), &object, NULL);
    if (!json_is_object(object)) {
        json_decref(object);
        snprintf(field, sizeof field, ".tool_calls[%zu].function.arguments", i);
        return wrong(p, DN_INVALID_VALUE, field, "must be the JSON text of an object");
    }
    if (!traits->wants_argument_objects) {
        json_decref(object);
        return 0;
    }
    *out = json_copy(call);
    function = json_copy(function);
    json_object_set_new(function, "arguments", object);
    json_object_set_new(*out, "function", function);
    return 0;
}

static int tool_calls(json_t *message, const struct dn_template_traits *traits, const struct place *p, json_t **out)
{
    json_t *list = json_object_get(message, "tool_calls");
    *out = NULL;
    if (!list || json_is_null(list))
        return 0;
    if (!json_is_array(list))
        return wrong(p, DN_INVALID_VALUE, ".tool_calls", "must be an array");
    size_t i;
    json_t *call;
    json_array_foreach(list, i, call)
    {
        json_t *changed = NULL;
        int rc = tool_call(call, i, traits, p, &changed);
        if (rc != 0) {
            json_decref(*out);
            *out = NULL;
            return rc;
        }
        if (changed && !*out)
            *out = json_copy(list);
        if (changed)
            json_array_set_new(*out, i, changed);
    }
    return 0;
}

int dn_template_messages(const json_t *messages, const struct dn_template_traits *traits, json_t **out,
                         struct dn_err *err)
{
    struct dn_err unread = {0};
    struct place p = {0, err ? err : &unread};
    if (!json_is_array(messages))
        return dn_err_param(err, DN_INVALID_VALUE, "messages", "messages: must be an array");
    json_t *result = json_array(), *message;
    json_array_foreach((json_t *)messages, p.message, message)
    {
        json_t *new_content = NULL, *new_calls = NULL;
        int rc = json_is_object(message) ? content(message, traits, &p, &new_content)
                                         : wrong(&p, DN_INVALID_VALUE, "", "must be an object");
        if (rc == 0)
            rc = tool_calls(message, traits, &p, &new_calls);
        if (rc != 0) {
            json_decref(new_content);
            json_decref(result);
            return rc;
        }
        if (!new_content && !new_calls) {
            json_array_append(result, message);
            continue;
        }
        json_t *copy = json_copy(message);
        if (new_content)
            json_object_set_new(copy, "content", new_content);
        if (new_calls)
            json_object_set_new(copy, "tool_calls", new_calls);
        json_array_append_new(result, copy);
    }
    *out = result;
    return 0;
}
