#include "base/json.h"

#include <criterion/criterion.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

static json_t *parse(const char *text)
{
    json_t *j = NULL;
    struct dn_err err = {0};
    cr_assert_eq(dn_json_parse(text, strlen(text), &j, &err), 0, "%s", err.text);
    return j;
}

static void refuse(const char *bytes, size_t n, const char *want)
{
    json_t *j = (json_t *)&j;
    struct dn_err err = {0};
    cr_assert_eq(dn_json_parse(bytes, n, &j, &err), -DN_INVALID_JSON, "%.*s", (int)n, bytes);
    cr_assert_eq(j, (json_t *)&j, "untouched on failure");
    cr_assert(strstr(err.text, want), "%s", err.text);
    cr_assert_null(strstr(err.text, "canary"), "%s", err.text);
}

Test(json, refuses_what_is_not_one_json_object)
{
    refuse("", 0, "empty");
    refuse("{\"a\": canary}", 13, "line 1, column 12: syntax error");
    refuse("{\"a\":\n\n \"canary", 16, "line 3");
    refuse("{} canary", 9, "follows the end");
    refuse("{\"a\":1,\"a\":2}", 13, "same key twice");
    refuse("[1e999]", 7, "too large");
    refuse("[99999999999999999999]", 22, "too large");
    refuse("[\"\xC0\x80\"]", 6, "UTF-8");
    refuse("[\"\xED\xA0\x80\"]", 7, "UTF-8");
    refuse("{\"a\\u0000\":1}", 13, "NUL");
    refuse("[1]\0", 4, "follows the end");
    refuse("\"canary\"", 8, "syntax");
    refuse("[NaN]", 5, "syntax");
    refuse("[01]", 4, "syntax");
}

Test(json, a_million_brackets_are_an_error_and_no_crash)
{
    size_t n = 1000000;
    char *deep = malloc(n);
    memset(deep, '[', n);
    refuse(deep, n, "nested too deeply");
    for (size_t i = 0; i + 5 <= n; i += 5)
        memcpy(deep + i, "{\"a\":", 5);
    refuse(deep, n, "nested too deeply");
    free(deep);
}

Test(json, the_deepest_tree_it_takes_can_be_freed)
{
    char text[4097];
    size_t depth = 2047;
    memset(text, '[', depth);
    memset(text + depth, ']', depth);
    text[2 * depth] = '\0';
    json_decref(parse(text));
}

Test(json, strings_keep_nul)
{
    json_t *j = parse("{\"s\":\"a\\u0000b\"}");
    const char *s;
    size_t n;
    cr_assert_eq(dn_json_get_string(j, "s", &s, &n, NULL), 0);
    cr_assert(n == 3 && memcmp(s, "a\0b", 4) == 0);
    json_decref(j);
}

Test(json, integers_are_checked_and_named)
{
    json_t *j = parse(
        "{\"a\":5,\"b\":16.0,\"c\":1.5,\"d\":null,\"e\":\"5\",\"f\":1e300,\"g\":-9223372036854775808,\"h\":true}");
    struct dn_err err = {0};
    int64_t v = 77;
    cr_assert(dn_json_get_int(j, "a", 0, 10, 1, &v, &err) == 0 && v == 5);
    cr_assert(dn_json_get_int(j, "b", 0, 20, 1, &v, &err) == 0 && v == 16);
    cr_assert(dn_json_get_int(j, "d", 0, 10, 1, &v, &err) == 0 && v == 1, "null is absent");
    cr_assert(dn_json_get_int(j, "none", 0, 10, 2, &v, &err) == 0 && v == 2);
    cr_assert(dn_json_get_int(j, "g", INT64_MIN, 0, 2, &v, &err) == 0 && v == INT64_MIN);
    static const char *const bad[] = {"c", "e", "f", "h"};
    for (size_t i = 0; i < 4; i++) {
        v = 77;
        cr_assert_eq(dn_json_get_int(j, bad[i], 0, 10, 1, &v, &err), -DN_INVALID_VALUE, "%s", bad[i]);
        cr_assert_str_eq(err.param, bad[i]);
        cr_assert_eq(v, 77, "untouched on failure");
    }
    cr_assert_eq(dn_json_get_int(j, "a", 0, 4, 1, &v, &err), -DN_INVALID_VALUE);
    cr_assert_str_eq(err.text, "a: expected an integer from 0 to 4, got 5");
    cr_assert_eq(dn_json_get_int(j, "a", 6, 10, 1, &v, &err), -DN_INVALID_VALUE);
    json_decref(j);
}

Test(json, numbers_booleans_and_containers)
{
    json_t *j = parse("{\"t\":0.7,\"i\":2,\"b\":false,\"o\":{},\"l\":[],\"s\":\"x\"}"), *child = NULL;
    struct dn_err err = {0};
    double d;
    bool b = true;
    const char *s = "";
    size_t n = 9;
    cr_assert(dn_json_get_number(j, "t", 0, 2, 1, &d, &err) == 0 && d == 0.7);
    cr_assert(dn_json_get_number(j, "i", 0, 2, 1, &d, &err) == 0 && d == 2);
    cr_assert_eq(dn_json_get_number(j, "i", 0, 1, 1, &d, &err), -DN_INVALID_VALUE);
    cr_assert_str_eq(err.text, "i: expected a number from 0 to 1, got 2");
    cr_assert_eq(dn_json_get_number(j, "s", 0, 1, 1, &d, &err), -DN_INVALID_VALUE);
    cr_assert_str_eq(err.text, "s: expected a number, got a string");
    cr_assert(dn_json_get_bool(j, "b", true, &b, &err) == 0 && !b);
    cr_assert(dn_json_get_bool(j, "none", true, &b, &err) == 0 && b);
    cr_assert_eq(dn_json_get_bool(j, "i", true, &b, &err), -DN_INVALID_VALUE);
    cr_assert(dn_json_get_string(j, "none", &s, &n, &err) == 0 && s == NULL && n == 0);
    cr_assert_eq(dn_json_get_string(j, "l", &s, &n, &err), -DN_INVALID_VALUE);
    cr_assert(dn_json_get_object(j, "o", &child, &err) == 0 && json_is_object(child));
    cr_assert_eq(dn_json_get_object(j, "l", &child, &err), -DN_INVALID_VALUE);
    cr_assert(dn_json_get_array(j, "l", &child, &err) == 0 && json_is_array(child));
    cr_assert_eq(dn_json_get_array(j, "o", &child, &err), -DN_INVALID_VALUE);
    cr_assert(dn_json_get_array(j, "none", &child, &err) == 0 && child == NULL);
    json_decref(j);
}

Test(json, an_error_in_a_nested_object_names_the_path)
{
    struct dn_err err = {0};
    json_t *j = parse("{\"role\":3}");
    const char *s;
    size_t n;
    dn_json_get_string(j, "role", &s, &n, &err);
    cr_assert_eq(dn_json_err_at(&err, "messages[%d].", 2), -DN_INVALID_VALUE);
    cr_assert_str_eq(err.param, "messages[2].role");
    cr_assert_str_eq(err.text, "messages[2].role: expected a string, got an integer");
    for (int i = 0; i < 20; i++)
        dn_json_err_at(&err, "a_rather_long_name[%d].", i);
    cr_assert_eq(strlen(err.param), sizeof err.param - 1);
    json_decref(j);
}

static void check_string(const char *s, size_t n, const char *want)
{
    struct dn_buf b = {0};
    dn_json_put_string(&b, s, n);
    cr_assert_str_eq(dn_buf_str(&b), want);
    dn_buf_release(&b);
}

Test(json, strings_are_escaped)
{
    check_string("", 0, "\"\"");
    check_string("a\"\\/\n\r\t\b\f\x01\x1f\x7f", 12, "\"a\\\"\\\\/\\n\\r\\t\\b\\f\\u0001\\u001f\\u007f\"");
    check_string("\0", 1, "\"\\u0000\"");
    check_string("gr\xC3\xBC\xC3\x9F \xF0\x9F\x98\x80", 11, "\"gr\xC3\xBC\xC3\x9F \xF0\x9F\x98\x80\"");
    check_string("a\xFF\xE2\x82z\xED\xA0\x80", 8, "\"a\xEF\xBF\xBD\xEF\xBF\xBDz\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD\"");
}

Test(json, whatever_bytes_are_written_reads_back)
{
    unsigned seed = 12345;
    for (int round = 0; round < 20000; round++) {
        char s[24];
        size_t n = 0;
        for (; n < sizeof s && (seed = seed * 1664525 + 1013904223, seed >> 24) > 8; n++) {
            seed = seed * 1664525 + 1013904223;
            static const unsigned char common[] = {0x80, 0xBF, 0xC3, 0xE2, 0x82, 0xF0, 0x9F,
                                                   0xED, 0xA0, 0xF4, '"',  '\\', 0};
            s[n] = (char)(seed & 1 << 30 ? common[(seed >> 8) % sizeof common] : seed >> 16);
        }
        struct dn_buf b = {0};
        dn_buf_putc(&b, '[');
        dn_json_put_string(&b, s, n);
        dn_buf_putc(&b, ']');
        json_t *j = NULL;
        struct dn_err err = {0};
        cr_assert_eq(dn_json_parse(b.data, b.len, &j, &err), 0, "%s", err.text);
        json_decref(j);
        dn_buf_release(&b);
    }
}

static const char *as_double(struct dn_buf *b, double v)
{
    dn_buf_clear(b);
    dn_json_put_double(b, v);
    return dn_buf_str(b);
}

Test(json, doubles_are_short_and_exact)
{
    struct dn_buf b = {0};
    cr_assert_str_eq(as_double(&b, 0.1), "0.1");
    cr_assert_str_eq(as_double(&b, -2), "-2");
    cr_assert_str_eq(as_double(&b, 1.0 / 3), "0.3333333333333333");
    cr_assert_str_eq(as_double(&b, NAN), "null");
    cr_assert_str_eq(as_double(&b, -INFINITY), "null");
    uint64_t bits = 88172645463325252ull;
    for (int i = 0; i < 100000; i++) {
        double v;
        bits ^= bits << 13, bits ^= bits >> 7, bits ^= bits << 17;
        memcpy(&v, &bits, sizeof v);
        if (isfinite(v))
            cr_assert_eq(strtod(as_double(&b, v), NULL), v);
    }
    dn_buf_release(&b);
}

Test(json, integers_up_to_the_ends)
{
    struct dn_buf b = {0};
    dn_json_put_int(&b, INT64_MIN);
    dn_buf_putc(&b, ' ');
    dn_json_put_int(&b, 0);
    dn_buf_putc(&b, ' ');
    dn_json_put_uint(&b, UINT64_MAX);
    cr_assert_str_eq(dn_buf_str(&b), "-9223372036854775808 0 18446744073709551615");
    dn_buf_release(&b);
}

Test(json, the_writer_places_commas)
{
    struct dn_buf b = {0};
    struct dn_json_writer w = dn_json_writer(&b);
    dn_json_begin_object(&w);
    dn_json_key(&w, "a");
    dn_json_write_int(&w, 1);
    dn_json_key(&w, "b");
    dn_json_begin_array(&w);
    dn_json_string(&w, "x");
    dn_json_begin_object(&w);
    dn_json_end_object(&w);
    dn_json_begin_array(&w);
    dn_json_end_array(&w);
    dn_json_write_bool(&w, true);
    dn_json_write_null(&w);
    dn_json_write_raw(&w, "{\"z\":0}", 7);
    dn_json_end_array(&w);
    dn_json_key(&w, "c");
    dn_json_string(&w, NULL);
    dn_json_key(&w, "d");
    dn_json_write_double(&w, 0.5);
    dn_json_key(&w, "e");
    dn_json_write_uint(&w, 7);
    dn_json_end_object(&w);
    cr_assert_str_eq(dn_buf_str(&b), "{\"a\":1,\"b\":[\"x\",{},[],true,null,{\"z\":0}],\"c\":null,\"d\":0.5,\"e\":7}");
    dn_buf_release(&b);
}

Test(json, a_value_without_key_is_a_bug, .signal = SIGABRT)
{
    struct dn_buf b = {0};
    struct dn_json_writer w = dn_json_writer(&b);
    dn_json_begin_object(&w);
    dn_json_write_int(&w, 1);
}

Test(json, the_wrong_end_is_a_bug, .signal = SIGABRT)
{
    struct dn_buf b = {0};
    struct dn_json_writer w = dn_json_writer(&b);
    dn_json_begin_object(&w);
    dn_json_end_array(&w);
}
