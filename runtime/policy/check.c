#include "policy/check.h"

#include "policy/host.h"

#include "base/json.h"

#include <lua.h>
#include <stdlib.h>
#include <string.h>

/* ---- check ---- */

static struct dn_policy_config only(const struct dn_policy_config *config, size_t i)
{
    struct dn_policy_config c = *config;
    c.item = &config->item[i];
    c.n_items = 1;
    return c;
}

/* All problems of one list (a file, or the files together) into out, a line each. *set is kept on success. */
static int problems(const struct dn_policy_config *config, struct dn_policy_set **set, struct dn_buf *out)
{
    struct dn_err err = {0};
    struct dn_policy_vm *trial = NULL;
    *set = NULL;
    int rc = dn_policy_set_read(set, config, &err);
    if (rc == 0 && config->n_items == 1) {
        const struct dn_policy_file *f = &(*set)->file[0];
        rc = dn_policy_unknown(f->file, f->source, f->len, out, &err);
        if (rc == 0 && out->len)
            return -DN_POLICY;
        if (rc)
            dn_policy_locate(f, DN_HOOK_INIT, &err);
    }
    if (rc == 0)
        rc = dn_policy_trial_open(&trial, *set, &err);
    if (rc)
        dn_buf_puts(out, err.text);
    else
        rc = dn_policy_smoke(trial, config->node, out, &err);
    dn_policy_vm_close(trial);
    return rc;
}

static void print_hooks(const struct dn_policy_file *f, const char *between, struct dn_buf *out)
{
    const char *sep = "";
    for (int h = DN_HOOK_ADMIT; h < DN_HOOK_COUNT; h++)
        if (f->hook[h].exists) {
            dn_buf_printf(out, "%s%s", sep, dn_policy_hook_name((enum dn_policy_hook)h));
            sep = between;
        }
}

static void write_lines(struct dn_json_writer *w, struct dn_buf *lines)
{
    dn_json_begin_array(w);
    const char *at = dn_buf_str(lines);
    while (*at) {
        const char *end = strchrnul(at, '\n');
        dn_json_stringn(w, at, (size_t)(end - at));
        at = *end ? end + 1 : end;
    }
    dn_json_end_array(w);
}

static void write_hooks(struct dn_json_writer *w, const struct dn_policy_file *f)
{
    dn_json_begin_array(w);
    for (int h = DN_HOOK_ADMIT; h < DN_HOOK_COUNT; h++)
        if (f->hook[h].exists)
            dn_json_string(w, dn_policy_hook_name((enum dn_policy_hook)h));
    dn_json_end_array(w);
}

static void report(const char *file, const struct dn_policy_set *set, struct dn_buf *lines, struct dn_json_writer *w,
                   struct dn_buf *out)
{
    const struct dn_policy_file *f = lines->len == 0 && set ? &set->file[0] : NULL;
    if (!w) {
        if (f) {
            dn_buf_printf(out, "%s: ok (%s: ", file, f->name);
            print_hooks(f, " ", out);
            dn_buf_puts(out, ")\n");
        } else {
            dn_buf_printf(out, "%s\n", dn_buf_str(lines));
        }
        return;
    }
    dn_json_begin_object(w);
    dn_json_key(w, "file");
    dn_json_string(w, file);
    dn_json_key(w, "ok");
    dn_json_write_bool(w, f != NULL);
    if (f) {
        dn_json_key(w, "name");
        dn_json_string(w, f->name);
        dn_json_key(w, "hooks");
        write_hooks(w, f);
    }
    dn_json_key(w, "errors");
    write_lines(w, lines);
    dn_json_end_object(w);
}

int dn_policy_check(const struct dn_policy_config *config, bool as_json, struct dn_buf *out)
{
    struct dn_json_writer writer = dn_json_writer(out), *w = as_json ? &writer : NULL;
    struct dn_policy_set *set = NULL;
    struct dn_buf lines = {0};
    int bad = 0;
    if (w)
        dn_json_begin_array(w);
    for (size_t i = 0; i < config->n_items; i++) {
        struct dn_policy_config one = only(config, i);
        dn_buf_clear(&lines);
        bad += problems(&one, &set, &lines) != 0;
        report(config->item[i].file, set, &lines, w, out);
        dn_policy_set_put(set);
    }
    if (!bad && config->n_items > 1) { /* what only shows together: two of a name, or an answer to another's */
        dn_buf_clear(&lines);
        bad += problems(config, &set, &lines) != 0;
        if (bad)
            report("(all files together)", NULL, &lines, w, out);
        dn_policy_set_put(set);
    }
    if (w) {
        dn_json_end_array(w);
        dn_buf_putc(out, '\n');
    }
    dn_buf_release(&lines);
    return bad ? 1 : 0;
}

/* ---- show ---- */

static const char *mode_name(const struct dn_policy_file *f)
{
    return f->is_shadow ? "shadow" : "active";
}

/* Leaves the description and the list of parameters on the stack; the caller takes them off. */
static int describe(struct dn_policy_vm *trial, size_t i, struct dn_err *err)
{
    lua_State *L = dn_vm_lua(trial->vm);
    lua_rawgeti(L, LUA_REGISTRYINDEX, trial->ref_describe);
    lua_pushinteger(L, (lua_Integer)i + 1);
    lua_pushlstring(L, trial->set->file[i].source, trial->set->file[i].len);
    return dn_vm_call(trial->vm, 2, 2, err);
}

enum { PARAM_NAME, PARAM_VALUE, PARAM_DEFAULT, PARAM_RANGE, PARAM_DOC, PARAM_STRINGS };

/* Parameter k's strings, valid while the list is on top of the stack. False behind the last. */
static bool param_at(lua_State *L, size_t k, const char *text[PARAM_STRINGS])
{
    for (int s = 0; s < PARAM_STRINGS; s++) {
        lua_rawgeti(L, -1, (int)k * PARAM_STRINGS + s + 1);
        text[s] = lua_tostring(L, -1);
        lua_pop(L, 1); /* the list keeps the string alive */
    }
    return text[0] != NULL;
}

static void show_text(const struct dn_policy_file *f, lua_State *L, struct dn_buf *out)
{
    const char *text[PARAM_STRINGS];
    struct dn_buf hooks = {0};
    print_hooks(f, ",", &hooks);
    dn_buf_printf(out, "%-14s %-7s %-20s %s\n", f->name, mode_name(f), dn_buf_str(&hooks), f->file);
    dn_buf_release(&hooks);
    if (lua_tostring(L, -2) && *lua_tostring(L, -2))
        dn_buf_printf(out, "    %s\n", lua_tostring(L, -2));
    for (size_t k = 0; param_at(L, k, text); k++) {
        dn_buf_printf(out, "    %s.%s = %s", f->name, text[PARAM_NAME], text[PARAM_VALUE]);
        if (strcmp(text[PARAM_VALUE], text[PARAM_DEFAULT]) != 0)
            dn_buf_printf(out, " (default %s)", text[PARAM_DEFAULT]);
        dn_buf_printf(out, "  %s  %s\n", text[PARAM_RANGE], text[PARAM_DOC]);
    }
}

static void show_json(const struct dn_policy_file *f, lua_State *L, struct dn_json_writer *w)
{
    static const char *const key[PARAM_STRINGS] = {"name", "value", "default", "range", "doc"};
    const char *text[PARAM_STRINGS];
    dn_json_begin_object(w);
    dn_json_key(w, "name");
    dn_json_string(w, f->name);
    dn_json_key(w, "mode");
    dn_json_string(w, mode_name(f));
    dn_json_key(w, "hooks");
    write_hooks(w, f);
    dn_json_key(w, "file");
    dn_json_string(w, f->file);
    dn_json_key(w, "doc");
    dn_json_string(w, lua_tostring(L, -2));
    dn_json_key(w, "params");
    dn_json_begin_array(w);
    for (size_t k = 0; param_at(L, k, text); k++) {
        dn_json_begin_object(w);
        for (int s = 0; s < PARAM_STRINGS; s++) {
            dn_json_key(w, key[s]);
            dn_json_string(w, text[s]);
        }
        dn_json_end_object(w);
    }
    dn_json_end_array(w);
    dn_json_end_object(w);
}

int dn_policy_show(const struct dn_policy_config *config, bool as_json, struct dn_buf *out)
{
    struct dn_policy_set *set = NULL;
    struct dn_policy_vm *trial = NULL;
    struct dn_err err = {0};
    struct dn_json_writer w = dn_json_writer(out);
    int rc = dn_policy_set_read(&set, config, &err);
    if (rc == 0)
        rc = dn_policy_trial_open(&trial, set, &err);
    if (rc == 0 && as_json) {
        dn_json_begin_object(&w);
        dn_json_key(&w, "revision");
        dn_json_string(&w, set->revision);
        dn_json_key(&w, "policies");
        dn_json_begin_array(&w);
    } else if (rc == 0) {
        dn_buf_printf(out, "%-14s %-7s %-20s FILE  (revision %s)\n", "NAME", "MODE", "HOOKS", set->revision);
    }
    for (size_t i = 0; rc == 0 && i < set->n_files; i++) {
        rc = describe(trial, i, &err);
        if (rc)
            break;
        if (as_json)
            show_json(&set->file[i], dn_vm_lua(trial->vm), &w);
        else
            show_text(&set->file[i], dn_vm_lua(trial->vm), out);
        lua_pop(dn_vm_lua(trial->vm), 2);
    }
    if (rc == 0 && as_json) {
        dn_json_end_array(&w);
        dn_json_end_object(&w);
        dn_buf_putc(out, '\n');
    }
    if (rc) {
        dn_buf_clear(out);
        dn_buf_printf(out, "%s\n", err.text);
    }
    dn_policy_vm_close(trial);
    dn_policy_set_put(set);
    return rc ? 1 : 0;
}
