#include "script/conf.h"

#include "base/json.h"

#include <criterion/criterion.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A scratch file with that text; the name is short, so that messages can be compared. */
static const char *file_with(const char *text)
{
    static char dir[] = "/tmp/dn-conf-XXXXXX";
    if (strstr(dir, "XXXXXX")) {
        cr_assert(mkdtemp(dir));
        cr_assert_eq(chdir(dir), 0);
    }
    FILE *f = fopen("node.lua", "w");
    cr_assert(f);
    fputs(text, f);
    fclose(f);
    return "node.lua";
}

static struct dn_conf *read_ok(const char *text)
{
    struct dn_conf *c = dn_conf_open();
    struct dn_conf_errors errors = {0};
    struct dn_buf out = {0};
    int rc = dn_conf_read(c, file_with(text), &errors);
    dn_conf_check(c, &errors);
    dn_conf_errors_print(&errors, &out);
    cr_assert_eq(rc, 0, "%s", dn_buf_str(&out));
    cr_assert_eq(errors.n, 0u, "%s", dn_buf_str(&out));
    dn_conf_errors_release(&errors);
    dn_buf_release(&out);
    return c;
}

static void refuse(const char *text, const char *want)
{
    struct dn_conf *c = dn_conf_open();
    struct dn_conf_errors errors = {0};
    struct dn_buf out = {0};
    if (dn_conf_read(c, file_with(text), &errors) == 0)
        dn_conf_check(c, &errors);
    dn_conf_errors_print(&errors, &out);
    cr_assert_str_eq(dn_buf_str(&out), want);
    dn_conf_errors_release(&errors);
    dn_buf_release(&out);
    dn_conf_close(c);
}

Test(conf, an_empty_file_is_all_defaults)
{
    struct dn_conf *c = read_ok("return {}");
    cr_assert_str_eq(c->listen, "127.0.0.1:8443");
    cr_assert_str_eq(c->cleartext, "");
    cr_assert_eq(c->loops, 0u);
    cr_assert_eq(c->limits.body_bytes, 8u << 20);
    cr_assert_eq(c->limits.header_bytes, 16384u);
    cr_assert(c->page_tokens == 0 && c->max_sequences == 0 && c->step_tokens == 0); /* the device decides */
    cr_assert_str_eq(c->device, "auto");
    cr_assert_eq(c->kv_memory, 0u);
    cr_assert_eq(c->policy_budget_ms, 1.0);
    cr_assert_eq(c->policy_memory, 8u << 20);
    cr_assert(c->metrics_public && !c->api_strict && !c->policy_expose);
    cr_assert_str_eq(c->integrity, "tag");
    cr_assert_str_eq(c->cache_share, "tenant");
    cr_assert(c->n_models == 0 && c->n_policies == 0);
    dn_conf_close(c);
}

Test(conf, every_kind_of_value_is_read)
{
    struct dn_conf *c =
        read_ok("return { listen = '[::1]:1234', cleartext = true, loops = 3, integrity = 'off',\n"
                " limits = { body_bytes = '64 MiB', header_bytes = 20000, drain_timeout_ms = 5 },\n"
                " engine = { kv_memory = '1.5 GiB', threads = 'auto', page_tokens = 32 },\n"
                " models = { a = { path = '/x' }, ['b c'] = { path = '/y', weights = 'int4', kv_dtype = 'fp8_e4m3', "
                "context = 4096,\n"
                "   template = 't.jinja' } },\n"
                " policy = { expose = true, budget_ms = 0.5, list = { { file = 'p.lua' },\n"
                "   { file = 'q.lua', mode = 'shadow', params = { x = 0.25, y = 'z', w = true } } } },\n"
                " api = { strict = true }, metrics = { public = false }, log = { level = 'debug', format = 'json' } }");
    cr_assert_str_eq(c->cleartext, "127.0.0.1:8080");
    cr_assert_eq(c->loops, 3u);
    cr_assert_eq(c->limits.body_bytes, 64u << 20);
    cr_assert_eq(c->limits.header_bytes, 20000u);
    cr_assert_eq(c->kv_memory, 3ull << 29);
    cr_assert_eq(c->n_models, 2u);
    cr_assert_str_eq(c->model[0].name, "a");
    cr_assert_str_eq(c->model[0].weights, "auto");
    cr_assert_str_eq(c->model[1].name, "b c");
    cr_assert_str_eq(c->model[1].weights, "int4");
    cr_assert_eq(c->model[1].context, 4096u);
    cr_assert_str_eq(c->model[1].template, "t.jinja");
    cr_assert_eq(c->n_policies, 2u);
    cr_assert_str_eq(c->policy[0].mode, "active");
    cr_assert_str_eq(c->policy[1].mode, "shadow");
    cr_assert_eq(c->policy[1].n_params, 3u);
    cr_assert(c->policy[1].param[0].kind == DN_CONF_NUMBER && c->policy[1].param[0].number == 0.25);
    cr_assert(c->policy[1].param[1].kind == DN_CONF_STRING && strcmp(c->policy[1].param[1].string, "z") == 0);
    cr_assert(c->policy[1].param[2].kind == DN_CONF_BOOLEAN && c->policy[1].param[2].boolean);
    cr_assert(c->api_strict && !c->metrics_public && c->policy_expose);
    dn_conf_close(c);
}

Test(conf, all_errors_come_at_once_sorted_by_line)
{
    refuse("return {\n"
           "  lisen = '127.0.0.1:1',\n"
           "  loops = 65,\n"
           "  models = {\n"
           "    ['smollm2'] = {\n"
           "      kv_dtpye = 'bf16' },\n"
           "    other = { path = '/m', weights = 'int5' },\n"
           "  },\n"
           "  limits = { header_feilds = 9, body_bytes = '8 MB' },\n"
           "  policy = { list = { { params = { a = {} } } } },\n"
           "  zzz = 1,\n"
           "}",
           "node.lua:2: lisen: unknown key (did you mean \"listen\"?)\n"
           "node.lua:3: loops = 65: expected an integer from 1 to 64, or \"auto\"\n"
           "node.lua:5: models[\"smollm2\"].path: missing\n"
           "node.lua:6: models[\"smollm2\"].kv_dtpye: unknown key (did you mean \"kv_dtype\"?)\n"
           "node.lua:7: models[\"other\"].weights = \"int5\": expected one of auto, bf16, fp8, int8, int4\n"
           "node.lua:9: limits.body_bytes = \"8 MB\": expected a size from 1 KiB to 1 GiB\n"
           "node.lua:9: limits.header_feilds: unknown key (did you mean \"header_fields\"?)\n"
           "node.lua:10: policy.list[1].file: missing\n"
           "node.lua:10: policy.list[1].params.a: expected a number, a string or a boolean\n"
           "node.lua:11: zzz: unknown key\n"
           "10 errors in 1 file.\n");
}

Test(conf, wrong_types_are_named)
{
    refuse("return { loops = '3' }",
           "node.lua:1: loops = \"3\": expected an integer from 1 to 64, or \"auto\"\n1 error in 1 file.\n");
    refuse("return { loops = 1.5 }",
           "node.lua:1: loops = 1.5: expected an integer from 1 to 64, or \"auto\"\n1 error in 1 file.\n");
    refuse("return { listen = 8443 }", "node.lua:1: listen = 8443: expected HOST:PORT\n1 error in 1 file.\n");
    refuse("return { listen = 'localhost' }",
           "node.lua:1: listen = \"localhost\": expected HOST:PORT\n1 error in 1 file.\n");
    refuse("return { log = 'x' }", "node.lua:1: log: expected a table\n1 error in 1 file.\n");
    refuse("return { log = { level = {} } }",
           "node.lua:1: log.level = {...}: expected one of error, warn, info, debug\n1 error in 1 file.\n");
    refuse("return { api = { strict = 'yes' } }",
           "node.lua:1: api.strict = \"yes\": expected true or false\n1 error in 1 file.\n");
    refuse("return { models = { { path = 'x' } } }",
           "node.lua:1: models: expected [\"name\"] = { path = ... }\n1 error in 1 file.\n");
    refuse("return { 5 }", "node.lua:1: expected key = value\n1 error in 1 file.\n");
    refuse("return {\n f = function() end }", "node.lua:2: a function: a configuration is data\n1 error in 1 file.\n");
    refuse("return { integrity = 'tag\\0' }",
           "node.lua:1: integrity = \"tag\\u0000\": expected one of off, tag\n1 error in 1 file.\n");
}

Test(conf, values_that_do_not_fit_together_are_refused)
{
    refuse("return {\n listen = '0.0.0.0:8443' }",
           "node.lua:2: listen = \"0.0.0.0:8443\": not loopback, and there are "
           "no keys: anyone could use this node (set keys; dunlin key add NAME makes one)\n"
           "1 error in 1 file.\n");
    refuse("return {\n cleartext = '10.0.0.1:80' }",
           "node.lua:2: cleartext = \"10.0.0.1:80\": plain HTTP is served on loopback only\n1 error in 1 file.\n");
    refuse("return {\n tls = {\n cert = 'a.pem' } }",
           "node.lua:3: tls: cert and key must be given together\n1 error in 1 file.\n");
    refuse("return { limits = {\n stream_cut_bytes = '32 KiB' } }",
           "node.lua:2: limits.stream_cut_bytes must be above limits.stream_pause_bytes\n1 error in 1 file.\n");
    refuse("return { engine = { page_tokens = 24 } }",
           "node.lua:1: engine.page_tokens: expected a power of two\n1 error in 1 file.\n");
}

Test(conf, a_file_that_is_not_there_is_an_error)
{
    struct dn_conf *c = dn_conf_open();
    struct dn_conf_errors errors = {0};
    struct dn_buf out = {0};
    cr_assert_eq(dn_conf_read(c, "/nowhere/node.lua", &errors), -DN_CONFIG);
    dn_conf_errors_print(&errors, &out);
    cr_assert_str_eq(dn_buf_str(&out), "/nowhere/node.lua: No such file or directory\n1 error in 1 file.\n");
    dn_conf_errors_release(&errors);
    dn_buf_release(&out);
    dn_conf_close(c);
}

/* A line of `show config`, whatever the number of spaces. */
static void check_line(const char *text, const char *value, const char *origin)
{
    const char *at = strstr(text, value);
    cr_assert(at, "%s in %s", value, text);
    at += strlen(value);
    at += strspn(at, " ");
    cr_assert(strncmp(at, "-- ", 3) == 0 && strncmp(at + 3, origin, strlen(origin)) == 0 &&
                  at[3 + strlen(origin)] == '\n',
              "%s: %.30s", value, at);
}

Test(conf, the_command_line_wins_and_origins_are_kept)
{
    struct dn_conf *c = read_ok("return {\n loops = 2,\n models = { m = { path = '/x' } } }");
    struct dn_err err;
    cr_assert_eq(dn_conf_set(c, "listen", "127.0.0.1:9", "--listen", &err), 0);
    cr_assert_eq(dn_conf_set(c, "listen", "9", "--listen", &err), -DN_CONFIG);
    cr_assert_str_eq(err.text, "--listen = 9: expected HOST:PORT");
    cr_assert_str_eq(c->listen, "127.0.0.1:9", "untouched on failure");
    cr_assert_eq(dn_conf_set(c, "nothing", "9", "--nothing", &err), -DN_CONFIG);
    cr_assert_eq(dn_conf_set(c, "models.*.path", "9", "--nothing", &err), -DN_CONFIG);
    struct dn_buf out = {0};
    dn_conf_print(c, &out);
    dn_buf_str(&out);
    check_line(out.data, "listen = \"127.0.0.1:9\"", "--listen");
    check_line(out.data, "loops = 2", "node.lua:2");
    check_line(out.data, "cleartext = false", "default");
    check_line(out.data, "limits.body_bytes = \"8 MiB\"", "default");
    check_line(out.data, "models[\"m\"].path = \"/x\"", "node.lua:3");
    check_line(out.data, "models[\"m\"].weights = \"auto\"", "default");
    dn_buf_clear(&out);
    dn_conf_print_json(c, &out);
    json_t *j = NULL;
    cr_assert_eq(dn_json_parse(out.data, out.len, &j, &err), 0, "%s", err.text);
    cr_assert_str_eq(json_string_value(json_object_get(json_array_get(j, 0), "origin")), "--listen");
    json_decref(j);
    dn_buf_release(&out);
    dn_conf_close(c);
}

Test(conf, a_command_line_that_opens_the_node_is_refused_too)
{
    struct dn_conf *c = read_ok("return {}");
    struct dn_conf_errors errors = {0};
    struct dn_buf out = {0};
    cr_assert_eq(dn_conf_set(c, "listen", ":8443", "--listen", NULL), 0);
    cr_assert_eq(dn_conf_check(c, &errors), -DN_CONFIG);
    dn_conf_errors_print(&errors, &out);
    cr_assert(strstr(dn_buf_str(&out), "command line: listen = \":8443\": not loopback"), "%s", out.data);
    dn_conf_errors_release(&errors);
    dn_buf_release(&out);
    dn_conf_close(c);
}

Test(conf, addresses)
{
    char host[64];
    uint16_t port;
    cr_assert(dn_conf_address("127.0.0.1:8443", host, &port) && strcmp(host, "127.0.0.1") == 0 && port == 8443);
    cr_assert(dn_conf_address("[::1]:0", host, &port) && strcmp(host, "::1") == 0 && port == 0);
    cr_assert(dn_conf_address(":80", host, &port) && *host == '\0');
    static const char *const bad[] = {"",   "80",    "::1:80", "[::1]", "[]:80",      "[x]:80", "a:70000",
                                      "a:", "a b:1", "a:+1",   "a:1x",  "http://a:1", "[::1:80"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        cr_assert_not(dn_conf_address(bad[i], host, &port), "%s", bad[i]);
    cr_assert(dn_conf_is_loopback("127.0.0.1:1") && dn_conf_is_loopback("127.9.9.9:1") &&
              dn_conf_is_loopback("[::1]:1"));
    cr_assert(dn_conf_is_loopback("localhost:1"));
    cr_assert_not(dn_conf_is_loopback("128.0.0.1:1"));
    cr_assert_not(dn_conf_is_loopback("127.0.0.1.example.org:1"));
    cr_assert_not(dn_conf_is_loopback("127.evil.example:1"));
    cr_assert_not(dn_conf_is_loopback(":1"));
    cr_assert_not(dn_conf_is_loopback("[::]:1"));
}

static void read_whole(const char *path, struct dn_buf *out)
{
    FILE *f = fopen(path, "r");
    cr_assert(f, "%s", path);
    char block[4096];
    size_t n;
    while ((n = fread(block, 1, sizeof block, f)) > 0)
        dn_buf_put(out, block, n);
    fclose(f);
}

/* DN_WRITE_README=1 writes the file instead. */
Test(conf, the_readme_is_what_the_schema_prints)
{
    static const char path[] = DN_SOURCE_DIR "/conf/README.md";
    struct dn_buf want = {0}, have = {0};
    dn_conf_print_readme(&want);
    if (getenv("DN_WRITE_README")) {
        FILE *f = fopen(path, "w");
        cr_assert(f);
        fwrite(want.data, 1, want.len, f);
        fclose(f);
    }
    read_whole(path, &have);
    cr_assert_str_eq(dn_buf_str(&have), dn_buf_str(&want),
                     "conf/README.md is old: run this test with DN_WRITE_README=1");
    dn_buf_release(&want);
    dn_buf_release(&have);
}

Test(conf, the_help_names_every_key_once)
{
    struct dn_buf help = {0};
    dn_conf_print_help(&help);
    cr_assert(strstr(dn_buf_str(&help), "  kv_dtype = \"bf16\""));
    cr_assert(strstr(help.data, "  path = must be given"));
    const char *first = strstr(help.data, "  body_bytes = ");
    cr_assert(first && !strstr(first + 1, "  body_bytes = "));
    dn_buf_release(&help);
}

Test(conf, the_example_that_ships_is_valid)
{
    struct dn_buf text = {0};
    read_whole(DN_SOURCE_DIR "/conf/node.lua", &text);
    struct dn_conf *c = read_ok(dn_buf_str(&text));
    cr_assert_geq(c->n_policies, 2u);
    dn_conf_close(c);
    dn_buf_release(&text);
}
