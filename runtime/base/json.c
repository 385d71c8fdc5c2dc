#include "base/json.h"

#include "base/utf8.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* jansson's own texts quote the input; these do not. */
static const char *reason(enum json_error_code code)
{
    switch (code) {
    case json_error_invalid_utf8:
        return "not valid UTF-8";
    case json_error_premature_end_of_input:
        return "the text ends too early";
    case json_error_end_of_input_expected:
        return "something follows the end of the value";
    case json_error_duplicate_key:
        return "an object has the same key twice";
    case json_error_numeric_overflow:
        return "a number is too large";
    case json_error_stack_overflow:
        return "nested too deeply";
    case json_error_null_byte_in_key:
    case json_error_null_character:
        return "a NUL character where none may be";
    case json_error_out_of_memory:
        return "not enough memory";
    default:
        return "syntax error";
    }
}

int dn_json_parse(const char *bytes, size_t n, json_t **out, struct dn_err *err)
{
    if (n == 0)
        return dn_err_set(err, DN_INVALID_JSON, "not valid JSON: the text is empty");
    json_error_t e;
    json_t *value = json_loadb(bytes, n, JSON_REJECT_DUPLICATES | JSON_ALLOW_NUL, &e);
    if (!value) {
        enum json_error_code code = json_error_code(&e);
        if (code == json_error_out_of_memory)
            return dn_err_set(err, DN_NO_MEMORY, "not enough memory to read the JSON body");
        return dn_err_set(err, DN_INVALID_JSON, "not valid JSON: line %d, column %d: %s", e.line, e.column,
                          reason(code));
    }
    *out = value;
    return 0;
}

const char *dn_json_type_name(const json_t *value)
{
    switch (value ? json_typeof(value) : JSON_NULL) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    default:
        return "null";
    }
}

static json_t *find(const json_t *obj, const char *key)
{
    json_t *value = json_object_get(obj, key);
    return value && !json_is_null(value) ? value : NULL;
}

bool dn_json_has(const json_t *obj, const char *key)
{
    return find(obj, key) != NULL;
}

static int wrong_type(const json_t *value, const char *name, const char *expected, struct dn_err *err)
{
    return dn_err_param(err, DN_INVALID_VALUE, name, "%s: expected %s, got %s", name, expected,
                        dn_json_type_name(value));
}

int dn_json_int(const json_t *value, const char *name, int64_t min, int64_t max, int64_t *out, struct dn_err *err)
{
    int64_t v;
    if (json_is_integer(value)) {
        v = json_integer_value(value);
    } else if (json_is_real(value)) {
        double d = json_real_value(value);
        if (d != floor(d))
            return wrong_type(value, name, "an integer", err);
        /* Above 2^53 a real does not say which integer was meant. */
        if (fabs(d) > 9007199254740992.0)
            return dn_err_param(err, DN_INVALID_VALUE, name, "%s: expected an integer, got a real above 2^53", name);
        v = (int64_t)d;
    } else {
        return wrong_type(value, name, "an integer", err);
    }
    if (v < min || v > max) {
        if (max == INT64_MAX)
            return dn_err_param(err, DN_INVALID_VALUE, name, "%s: expected at least %lld, got %lld", name,
                                (long long)min, (long long)v);
        return dn_err_param(err, DN_INVALID_VALUE, name, "%s: expected an integer from %lld to %lld, got %lld", name,
                            (long long)min, (long long)max, (long long)v);
    }
    *out = v;
    return 0;
}

int dn_json_number(const json_t *value, const char *name, double min, double max, double *out, struct dn_err *err)
{
    if (!json_is_number(value))
        return wrong_type(value, name, "a number", err);
    double v = json_number_value(value);
    if (!(v >= min && v <= max) || !isfinite(v))
        return dn_err_param(err, DN_INVALID_VALUE, name, "%s: expected a number from %g to %g, got %g", name, min, max,
                            v);
    *out = v;
    return 0;
}

int dn_json_get_int(const json_t *obj, const char *key, int64_t min, int64_t max, int64_t fallback, int64_t *out,
                    struct dn_err *err)
{
    const json_t *value = find(obj, key);
    if (value)
        return dn_json_int(value, key, min, max, out, err);
    *out = fallback;
    return 0;
}

int dn_json_get_number(const json_t *obj, const char *key, double min, double max, double fallback, double *out,
                       struct dn_err *err)
{
    const json_t *value = find(obj, key);
    if (value)
        return dn_json_number(value, key, min, max, out, err);
    *out = fallback;
    return 0;
}

int dn_json_get_bool(const json_t *obj, const char *key, bool fallback, bool *out, struct dn_err *err)
{
    const json_t *value = find(obj, key);
    if (value && !json_is_boolean(value))
        return wrong_type(value, key, "a boolean", err);
    *out = value ? json_is_true(value) : fallback;
    return 0;
}

int dn_json_get_string(const json_t *obj, const char *key, const char **out, size_t *n, struct dn_err *err)
{
    const json_t *value = find(obj, key);
    if (value && !json_is_string(value))
        return wrong_type(value, key, "a string", err);
    *out = value ? json_string_value(value) : NULL;
    *n = value ? json_string_length(value) : 0;
    return 0;
}

int dn_json_get_object(const json_t *obj, const char *key, json_t **out, struct dn_err *err)
{
    json_t *value = find(obj, key);
    if (value && !json_is_object(value))
        return wrong_type(value, key, "an object", err);
    *out = value;
    return 0;
}

int dn_json_get_array(const json_t *obj, const char *key, json_t **out, struct dn_err *err)
{
    json_t *value = find(obj, key);
    if (value && !json_is_array(value))
        return wrong_type(value, key, "an array", err);
    *out = value;
    return 0;
}

int dn_json_err_at(struct dn_err *err, const char *format, ...)
{
    if (!err)
        return -DN_INVALID_VALUE;
    char place[sizeof err->param], param[sizeof err->param], text[sizeof err->text];
    va_list ap;
    va_start(ap, format);
    vsnprintf(place, sizeof place, format, ap);
    va_end(ap);
    memcpy(param, err->param, sizeof param);
    memcpy(text, err->text, sizeof text);
    dn_err_set(err, err->code, "%s%s", place, text);
    size_t n_place = strlen(place), n_param = strnlen(param, sizeof param);
    if (n_param > sizeof err->param - 1 - n_place)
        n_param = sizeof err->param - 1 - n_place;
    memcpy(err->param, place, n_place);
    memcpy(err->param + n_place, param, n_param);
    err->param[n_place + n_param] = '\0';
    return -(int)err->code;
}

void dn_json_put_escaped(struct dn_buf *b, const char *s, size_t n)
{
    size_t plain = 0; /* bytes before i that can be copied as they are */
    for (size_t i = 0; i < n;) {
        unsigned char c = (unsigned char)s[i];
        if (c >= 0x20 && c < 0x7F && c != '"' && c != '\\') {
            i++;
            continue;
        }
        if (c >= 0x80) {
            uint32_t cp;
            bool valid;
            size_t took = dn_utf8_next_valid(s + i, n - i, &cp, &valid);
            if (!valid) {
                dn_buf_put(b, s + plain, i - plain);
                dn_buf_puts(b, "\xEF\xBF\xBD");
                plain = i + took;
            }
            i += took;
            continue;
        }
        dn_buf_put(b, s + plain, i - plain);
        plain = ++i;
        static const char letter[256] = {
            ['"'] = '"', ['\\'] = '\\', ['\n'] = 'n', ['\r'] = 'r', ['\t'] = 't', ['\b'] = 'b', ['\f'] = 'f'};
        if (letter[c])
            dn_buf_put(b, (char[]){'\\', letter[c]}, 2);
        else
            dn_buf_printf(b, "\\u%04x", c);
    }
    dn_buf_put(b, s + plain, n - plain);
}

void dn_json_put_string(struct dn_buf *b, const char *s, size_t n)
{
    dn_buf_putc(b, '"');
    dn_json_put_escaped(b, s, n);
    dn_buf_putc(b, '"');
}

void dn_json_put_uint(struct dn_buf *b, uint64_t v)
{
    char digit[20];
    size_t at = sizeof digit;
    do
        digit[--at] = (char)('0' + v % 10);
    while (v /= 10);
    dn_buf_put(b, digit + at, sizeof digit - at);
}

void dn_json_put_int(struct dn_buf *b, int64_t v)
{
    if (v < 0)
        dn_buf_putc(b, '-');
    dn_json_put_uint(b, v < 0 ? 0 - (uint64_t)v : (uint64_t)v);
}

void dn_json_put_double(struct dn_buf *b, double v)
{
    if (!isfinite(v)) {
        dn_buf_puts(b, "null");
        return;
    }
    char text[32];
    for (int digits = 15; digits <= 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, v);
        if (strtod(text, NULL) == v)
            break;
    }
    dn_buf_puts(b, text);
}

/* Comma and bookkeeping in front of a value. */
static void before_value(struct dn_json_writer *w)
{
    uint64_t bit = 1ull << w->depth;
    DN_BUG_ON((w->is_object & bit) && !w->after_key);
    if (!w->after_key && (w->has_value & bit))
        dn_buf_putc(w->buf, ',');
    w->has_value |= bit;
    w->after_key = false;
}

static void begin(struct dn_json_writer *w, char brace)
{
    before_value(w);
    DN_BUG_ON(w->depth >= 63);
    w->depth++;
    uint64_t bit = 1ull << w->depth;
    w->has_value &= ~bit;
    w->is_object = brace == '{' ? w->is_object | bit : w->is_object & ~bit;
    dn_buf_putc(w->buf, brace);
}

static void end(struct dn_json_writer *w, char brace)
{
    uint64_t bit = 1ull << w->depth;
    DN_BUG_ON(w->depth == 0 || w->after_key || !(w->is_object & bit) != (brace == ']'));
    w->is_object &= ~bit;
    w->depth--;
    dn_buf_putc(w->buf, brace);
}

void dn_json_begin_object(struct dn_json_writer *w)
{
    begin(w, '{');
}

void dn_json_end_object(struct dn_json_writer *w)
{
    end(w, '}');
}

void dn_json_begin_array(struct dn_json_writer *w)
{
    begin(w, '[');
}

void dn_json_end_array(struct dn_json_writer *w)
{
    end(w, ']');
}

void dn_json_key(struct dn_json_writer *w, const char *key)
{
    uint64_t bit = 1ull << w->depth;
    DN_BUG_ON(!(w->is_object & bit) || w->after_key);
    if (w->has_value & bit)
        dn_buf_putc(w->buf, ',');
    dn_json_put_string(w->buf, key, strlen(key));
    dn_buf_putc(w->buf, ':');
    w->after_key = true;
}

void dn_json_stringn(struct dn_json_writer *w, const char *s, size_t n)
{
    before_value(w);
    dn_json_put_string(w->buf, s, n);
}

void dn_json_string(struct dn_json_writer *w, const char *s)
{
    if (s)
        dn_json_stringn(w, s, strlen(s));
    else
        dn_json_write_null(w);
}

void dn_json_write_int(struct dn_json_writer *w, int64_t v)
{
    before_value(w);
    dn_json_put_int(w->buf, v);
}

void dn_json_write_uint(struct dn_json_writer *w, uint64_t v)
{
    before_value(w);
    dn_json_put_uint(w->buf, v);
}

void dn_json_write_double(struct dn_json_writer *w, double v)
{
    before_value(w);
    dn_json_put_double(w->buf, v);
}

void dn_json_write_bool(struct dn_json_writer *w, bool v)
{
    dn_json_write_raw(w, v ? "true" : "false", v ? 4 : 5);
}

void dn_json_write_null(struct dn_json_writer *w)
{
    dn_json_write_raw(w, "null", 4);
}

void dn_json_write_raw(struct dn_json_writer *w, const char *json, size_t n)
{
    before_value(w);
    dn_buf_put(w->buf, json, n);
}
