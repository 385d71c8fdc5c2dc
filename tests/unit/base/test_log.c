#include "base/log.h"

#include "base/clock.h"
#include "base/json.h"

#include <criterion/criterion.h>
#include <regex.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int pipe_read = -1;

static void capture(enum dn_log_level level, enum dn_log_format format)
{
    int end[2];
    cr_assert_eq(pipe(end), 0);
    pipe_read = end[0];
    dn_log_setup(level, format, end[1]);
}

/* What one write() left in the pipe. */
static const char *line(void)
{
    static char text[4096];
    ssize_t n = read(pipe_read, text, sizeof text - 1);
    cr_assert_gt(n, 0);
    text[n] = '\0';
    cr_assert_eq(text[n - 1], '\n');
    text[n - 1] = '\0';
    cr_assert_null(strchr(text, '\n'), "one line an event: %s", text);
    return text;
}

static void check_match(const char *text, const char *pattern)
{
    regex_t re;
    cr_assert_eq(regcomp(&re, pattern, REG_EXTENDED | REG_NOSUB), 0);
    cr_assert_eq(regexec(&re, text, 0, NULL, 0), 0, "%s", text);
    regfree(&re);
}

static void write_all_kinds(void)
{
    struct dn_log_line l;
    dn_log_begin(&l, DN_LOG_INFO, "request.done");
    dn_log_str(&l, "id", "req_7f3a");
    dn_log_str(&l, "none", NULL);
    dn_log_str(&l, "empty", "");
    dn_log_str(&l, "quoted", "two words \"x\" \\ \n\x1b[31m\xFF");
    dn_log_int(&l, "status", -200);
    dn_log_uint(&l, "big", INT64_MAX);
    dn_log_double(&l, "ratio", 0.25);
    dn_log_bool(&l, "ok", true);
    dn_log_ms(&l, "ttft_ms", 84250000);
    dn_log_length(&l, "prompt", 812);
    dn_log_end(&l);
}

Test(log, a_line_has_time_level_event_and_fields)
{
    capture(DN_LOG_INFO, DN_LOG_TEXT);
    write_all_kinds();
    const char *text = line();
    check_match(text, "^20[0-9]{2}-[0-9]{2}-[0-9]{2}T[0-9:]{8}\\.[0-9]{3}Z info request\\.done id=req_7f3a ");
    cr_assert(strstr(text,
                     " none=- empty=\"\" quoted=\"two words \\\"x\\\" \\\\ \\n\\u001b[31m\xEF\xBF\xBD\" status=-200 "
                     "big=9223372036854775807 ratio=0.250 ok=true ttft_ms=84.3 prompt_bytes=812"),
              "%s", text);
}

Test(log, json_has_the_same_fields)
{
    capture(DN_LOG_INFO, DN_LOG_JSON);
    write_all_kinds();
    const char *text = line();
    json_t *j;
    struct dn_err err = {0};
    cr_assert_eq(dn_json_parse(text, strlen(text), &j, &err), 0, "%s in %s", err.text, text);
    cr_assert_str_eq(json_string_value(json_object_get(j, "event")), "request.done");
    cr_assert_str_eq(json_string_value(json_object_get(j, "level")), "info");
    cr_assert_str_eq(json_string_value(json_object_get(j, "quoted")), "two words \"x\" \\ \n\x1b[31m\xEF\xBF\xBD");
    cr_assert_eq(json_integer_value(json_object_get(j, "status")), -200);
    cr_assert(json_is_true(json_object_get(j, "ok")));
    json_decref(j);
}

Test(log, a_terminal_gets_colour_and_no_date)
{
    unsetenv("NO_COLOR");
    capture(DN_LOG_INFO, DN_LOG_TERMINAL);
    dn_log_event(DN_LOG_WARN, "node.slow");
    check_match(line(), "^[0-9:]{8}\\.[0-9]{3} \033\\[33mwarn\033\\[0m node.slow$");
    setenv("NO_COLOR", "1", 1);
    capture(DN_LOG_INFO, DN_LOG_TERMINAL);
    dn_log_event(DN_LOG_WARN, "node.slow");
    check_match(line(), "^[0-9:]{8}\\.[0-9]{3} warn node.slow$");
}

Test(log, below_the_level_nothing_is_written)
{
    capture(DN_LOG_WARN, DN_LOG_TEXT);
    write_all_kinds();
    dn_log_event(DN_LOG_ERROR, "node.failed");
    check_match(line(), " error node.failed$");
    dn_log_set_level(DN_LOG_DEBUG);
    dn_log_event(DN_LOG_DEBUG, "node.detail");
    check_match(line(), " debug node.detail$");
}

static void check_cut(enum dn_log_format format)
{
    capture(DN_LOG_INFO, format);
    char big[1000];
    memset(big, '"', sizeof big);
    struct dn_log_line l;
    dn_log_begin(&l, DN_LOG_INFO, "x.y");
    for (int i = 0; i < 40; i++)
        dn_log_strn(&l, "field", big, sizeof big);
    dn_log_int(&l, "last", 1);
    dn_log_end(&l);
    const char *text = line();
    cr_assert_lt(strlen(text), (size_t)DN_LOG_LINE_BYTES);
    cr_assert(strstr(text, format == DN_LOG_JSON ? ",\"cut\":" : " cut="), "%s", text);
    if (format == DN_LOG_JSON) {
        json_t *j = json_loads(text, 0, NULL);
        cr_assert(j, "valid JSON although cut");
        json_decref(j);
    }
}

Test(log, what_does_not_fit_is_left_out_and_counted)
{
    check_cut(DN_LOG_TEXT);
    check_cut(DN_LOG_JSON);
}

Test(log, repeated_warnings_are_limited_and_counted)
{
    capture(DN_LOG_INFO, DN_LOG_TEXT);
    struct dn_log_line l;
    uint64_t now = 1000 * DN_NS_PER_S;
    int n_written = 0;
    for (int i = 0; i < 100; i++) {
        if (dn_log_begin_limited(&l, DN_LOG_WARN, "policy.failed", "tiers", now + (uint64_t)i * DN_NS_PER_MS))
            n_written++;
        dn_log_int(&l, "i", i);
        dn_log_end(&l);
    }
    cr_assert_eq(n_written, 1);
    check_match(line(), "warn policy.failed i=0$");
    cr_assert(dn_log_begin_limited(&l, DN_LOG_WARN, "policy.failed", "other", now), "another source has its own limit");
    cr_assert(dn_log_begin_limited(&l, DN_LOG_WARN, "policy.failed", "tiers", now + 11 * DN_NS_PER_S));
    dn_log_end(&l);
    check_match(line(), "warn policy.failed dropped=99$");
}

Test(log, an_error_is_two_fields)
{
    capture(DN_LOG_INFO, DN_LOG_TEXT);
    struct dn_err err;
    dn_err_set(&err, DN_CONFIG, "conf/node.lua:3: what = \"x\"");
    struct dn_log_line l;
    dn_log_begin(&l, DN_LOG_ERROR, "node.reload");
    dn_log_err(&l, &err);
    dn_log_end(&l);
    check_match(line(), " code=config_error error=\"conf/node.lua:3: what = \\\\\"x\\\\\"\"$");
}

Test(log, names_of_levels_and_formats)
{
    cr_assert_eq(dn_log_level_parse("debug"), DN_LOG_DEBUG);
    cr_assert_eq(dn_log_level_parse("loud"), -1);
    cr_assert_eq(dn_log_format_parse("json"), DN_LOG_JSON);
    cr_assert_eq(dn_log_format_parse("xml"), -1);
}
