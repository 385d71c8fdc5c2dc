/* A reload replaces the policies whole or leaves them as they are, whatever is wrong with the new ones. */
#include "policy_util.h"

#include <unistd.h>

static char path[64];

static void write_file(const char *source)
{
    FILE *out = fopen(path, "w");
    cr_assert_not_null(out);
    fputs(source, out);
    fclose(out);
}

static struct fixture open_file(const char *source)
{
    snprintf(path, sizeof path, "/tmp/dn_policy_%d.lua", (int)getpid());
    write_file(source);
    struct dn_policy_item item = {.file = path};
    return open_items(&item, 1);
}

#define GOOD(n) "return { api = 1, name = 'p', admit = function() return { priority = " #n " } end }"

Test(reload, takes_a_changed_file)
{
    struct fixture f = open_file(GOOD(1));
    char before[9], after[9];
    dn_policy_revision(f.p, before);
    admit(&f);
    cr_assert_eq(decision.priority, 1);
    write_file(GOOD(2));
    admit(&f);
    cr_assert_eq(decision.priority, 1, "a file counts when it is reloaded");
    cr_assert_eq(dn_policy_reload(f.p, NULL, &err), 0, "%s", err.text);
    cr_assert_eq(dn_policy_generation(f.p), 2);
    dn_policy_revision(f.p, after);
    cr_assert_str_neq(before, after);
    admit(&f);
    cr_assert_eq(decision.priority, 2);
    cr_assert_str_eq(trace.revision, after);
    char line[64];
    snprintf(line, sizeof line, "dunlin_policy_revision_info{revision=\"%s\"} ", after);
    cr_assert_eq(metric(&f, line), 1);
    snprintf(line, sizeof line, "dunlin_policy_revision_info{revision=\"%s\"} ", before);
    cr_assert_eq(metric(&f, line), 0);
    unlink(path);
    close_fixture(&f);
}

Test(reload, keeps_the_old_policies_whatever_is_wrong_with_the_new_ones)
{
    static const struct {
        const char *source, *text;
    } row[] = {
        {NULL, "No such file"},
        {"\n\nreturn {", ":3: "},
        {"\x1bLJ\x02", "wrong mode"},
        {"local x = 1\nfoo(x)\n" GOOD(2), ":2: unknown global \"foo\""},
        {"\nerror('at load')", ":2: at load"},
        {"while true do end", "ran longer than"},
        {"return { api = 7, name = 'p', admit = function() end }", ":1: api = 7"},
        {"return { api = 1, name = 'p', parms = {}, admit = function() end }", "did you mean \"params\"?"},
        {"return { api = 1, name = 'p', admit = function() end, init = function() return false, 'not today' end }",
         "init refused: not today"},
        {"return { api = 1, name = 'p', admit = function() end, init = function() while true do end end }",
         "ran longer than"},
        {"return { api = 1, name = 'p', admit = function(req, node)\n return { priority = node.kv.free } end }",
         ":2: node.kv.free: no such field"},
        {"return { api = 1, name = 'p', route = function(req) if req.tools > 9 then while true do end end end }",
         ":1: route: policy: ran longer than 2000000 instructions"},
        {"return { api = 1, name = 'p', route = function(req) local t = {} for i = 1, 1e5 do t[i] = ('x'):rep(999) .. "
         "i "
         "end end }",
         "needs more than 8192 KiB"},
        {"return { api = 1, name = 'p', finish = function(req, result) return result.tokens end }",
         ":1: result.tokens: no such field"},
        {"return { api = 1, name = 'p', route = function() return { kv_dtype = 'fp4' } end }", "kv_dtype = \"fp4\""},
    };
    struct fixture f = open_file(GOOD(1));
    for (size_t i = 0; i < sizeof row / sizeof *row; i++) {
        if (row[i].source)
            write_file(row[i].source);
        else
            unlink(path);
        memset(&err, 0, sizeof err);
        cr_assert_eq(dn_policy_reload(f.p, NULL, &err), -DN_POLICY, "accepted: %s", row[i].source);
        cr_assert(strstr(err.text, row[i].text), "%s\n gives: %s", row[i].source, err.text);
        cr_assert_eq(strncmp(err.text, path, strlen(path)), 0, "does not begin with the file: %s", err.text);
        cr_assert_eq(dn_policy_generation(f.p), 1);
        cr_assert(admit(&f));
        cr_assert_eq(decision.priority, 1);
        cr_assert_eq(metric(&f, "dunlin_policy_last_reload_success "), 0);
    }
    write_file(GOOD(3));
    cr_assert_eq(dn_policy_reload(f.p, NULL, &err), 0, "%s", err.text);
    admit(&f);
    cr_assert_eq(decision.priority, 3);
    cr_assert_eq(metric(&f, "dunlin_policy_last_reload_success "), 1);
    unlink(path);
    close_fixture(&f);
}

Test(reload, takes_another_list)
{
    struct fixture f = open_file(GOOD(1));
    struct dn_policy_item items[] = {
        {.file = "a.lua", .source = GOOD(7)},
        {.file = "b.lua", .is_shadow = true, .source = "return { api = 1, name = 'b', route = function() end }"}};
    struct dn_policy_config c = {.item = items, .n_items = 2};
    cr_assert_eq(dn_policy_reload(f.p, &c, &err), 0, "%s", err.text);
    admit(&f);
    cr_assert_eq(decision.priority, 7);
    struct dn_buf text = {0};
    dn_policy_summary(f.p, &text);
    cr_assert(strstr(dn_buf_str(&text), "2 files, revision "));
    cr_assert(strstr(dn_buf_str(&text), "  p b(shadow)"), "%s", dn_buf_str(&text));
    dn_buf_release(&text);
    cr_assert_eq(dn_policy_reload(f.p, NULL, &err), 0, "the same list again, sources and all");
    admit(&f);
    cr_assert_eq(decision.priority, 7);
    c.n_items = 0;
    cr_assert_eq(dn_policy_reload(f.p, &c, &err), 0);
    admit(&f);
    cr_assert_eq(decision.set, 0);
    unlink(path);
    close_fixture(&f);
}

Test(reload, the_revision_is_of_contents_and_parameters)
{
    struct dn_policy_param param = {.name = "a", .kind = DN_PARAM_NUMBER, .number = 1};
    struct dn_policy_item item = {
        .file = "p.lua",
        .source = "return { api = 1, name = 'p', params = { a = { default = 0 } }, route = function() end }",
        .param = &param,
        .n_params = 1};
    struct fixture f = open_items(&item, 1);
    struct dn_policy_config c = {.item = &item, .n_items = 1};
    char before[9], again[9], after[9];
    dn_policy_revision(f.p, before);
    cr_assert_eq(dn_policy_reload(f.p, &c, &err), 0);
    dn_policy_revision(f.p, again);
    param.number = 2;
    cr_assert_eq(dn_policy_reload(f.p, &c, &err), 0);
    dn_policy_revision(f.p, after);
    cr_assert_str_eq(before, again);
    cr_assert_str_neq(before, after);
    close_fixture(&f);
}
