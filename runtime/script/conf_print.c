/* What people read of the configuration: help, conf/README.md, `show config`. */
#include "base/json.h"
#include "script/conf_schema.h"

#include <ctype.h>
#include <string.h>

/* The rows of a section, in the order of the schema. */
static bool in_section(const struct dn_conf_row *row, const struct dn_conf_section *section)
{
    size_t n = strlen(section->path);
    const char *rest = row->path;
    if (n > 0) {
        if (strncmp(rest, section->path, n) != 0)
            return false;
        rest += n;
        rest += strspn(rest, "[]");
        if (*rest != '.')
            return false;
        rest++;
        if (strncmp(rest, "*.", 2) == 0)
            rest += 2;
    }
    return strchr(rest, '.') == NULL;
}

static const char *short_name(const struct dn_conf_row *row)
{
    const char *dot = strrchr(row->path, '.');
    return dot ? dot + 1 : row->path;
}

static void print_fallback(const struct dn_conf_row *row, struct dn_buf *out)
{
    if (!row->fallback)
        dn_buf_puts(out, "must be given");
    else if (*row->fallback == '\0')
        dn_buf_puts(out, row->type == DN_CONF_T_PARAMS ? "{}" : "\"\"");
    else if (row->type == DN_CONF_T_INT && strcmp(row->fallback, "auto") != 0)
        dn_buf_puts(out, row->fallback);
    else if (row->type == DN_CONF_T_BOOL || row->type == DN_CONF_T_NUMBER || row->type == DN_CONF_T_ADDRESS_OR_FALSE)
        dn_buf_puts(out, row->fallback);
    else
        dn_buf_printf(out, "\"%s\"", row->fallback);
}

void dn_conf_print_help(struct dn_buf *out)
{
    dn_buf_puts(out, "conf/node.lua: return { key = value, section = { key = value } }\n"
                     "Data in Lua's syntax, nothing is computed. Command line > file > default.\n");
    for (size_t i = 0; i < dn_conf_n_sections; i++) {
        const struct dn_conf_section *section = &dn_conf_sections[i];
        dn_buf_printf(out, "\n%s%s%s\n", section->path, *section->path ? ": " : "", section->help);
        for (size_t k = 0; k < dn_conf_n_rows; k++) {
            const struct dn_conf_row *row = &dn_conf_rows[k];
            if (!in_section(row, section))
                continue;
            size_t start = out->len;
            dn_buf_printf(out, "  %s = ", short_name(row));
            print_fallback(row, out);
            dn_buf_printf(out, "%*s", out->len - start < 42 ? (int)(42 - (out->len - start)) : 1, "");
            dn_buf_printf(out, "%s (", row->help);
            dn_conf_print_expected(row, out);
            dn_buf_puts(out, ")\n");
        }
    }
}

void dn_conf_print_readme(struct dn_buf *out)
{
    dn_buf_puts(out, "# Configuration\n\n"
                     "Generated from the schema in `runtime/script/conf_schema.c` (`dunlin help conf` prints the "
                     "same); a test compares.\n\n"
                     "`node.lua` is a table in Lua's syntax: strings, numbers, `true`, `false`, nested tables, "
                     "comments, trailing commas.\n"
                     "It is data: nothing in it is computed or run. What is given on the command line wins over the "
                     "file, the file over\n"
                     "the default; `dunlin show config` prints each value with where it comes from. All errors are "
                     "reported at once, with\n"
                     "file and line, and exit status 2; a reload with errors changes nothing. Sizes are numbers of "
                     "bytes or strings such\n"
                     "as `\"64 MiB\"`. Relative paths start at the folder in which `dunlin` is started.\n\n"
                     "```\n"
                     "dunlin serve --conf conf/node.lua\n"
                     "conf/node.lua:9: models[\"smollm2\"].kv_dtpye: unknown key (did you mean \"kv_dtype\"?)\n"
                     "conf/node.lua:12: limits.header_fields = 5: expected an integer from 8 to 1000\n"
                     "2 errors in 1 file.\n"
                     "```\n");
    for (size_t i = 0; i < dn_conf_n_sections; i++) {
        const struct dn_conf_section *section = &dn_conf_sections[i];
        dn_buf_printf(out, "\n## %s\n\n%c%s.\n\n| key | default | value | meaning |\n|--|--|--|--|\n",
                      *section->path ? section->path : "Top level", toupper(*section->help), section->help + 1);
        for (size_t k = 0; k < dn_conf_n_rows; k++) {
            const struct dn_conf_row *row = &dn_conf_rows[k];
            if (!in_section(row, section))
                continue;
            dn_buf_printf(out, "| `%s` | ", short_name(row));
            if (row->fallback) {
                dn_buf_putc(out, '`');
                print_fallback(row, out);
                dn_buf_putc(out, '`');
            } else {
                print_fallback(row, out);
            }
            dn_buf_puts(out, " | ");
            dn_conf_print_expected(row, out);
            dn_buf_printf(out, " | %s |\n", row->help);
        }
    }
    dn_buf_puts(out,
                "\n## keys.lua\n\n"
                "API keys, one entry a key. The file holds only the SHA-256 of each: `dunlin key add NAME` makes a "
                "key, shows it once\n"
                "and prints the entry; by hand: `printf %s \"$KEY\" | sha256sum`.\n\n"
                "| key | value | meaning |\n|--|--|--|\n"
                "| `hash` | `\"sha256:\"` and 64 hex digits | of the key; must be given |\n"
                "| `tenant` | a string | who pays and whose prefixes are shared; must be given |\n"
                "| `id` | a string | what logs and metrics call the key; default: the first 8 digits of the hash |\n"
                "| `labels` | `{ tier = \"gold\", ... }` | what policies see: strings, at most 16 |\n");
}

static const char *origin_of(const struct dn_conf *c, size_t row)
{
    return c->origin[row].what ? c->origin[row].what : "default";
}

static void print_line(struct dn_buf *out, const char *key, const struct dn_conf_row *row, const void *base,
                       const char *origin)
{
    size_t start = out->len;
    dn_buf_printf(out, "%s = ", key);
    dn_conf_print_value(row, base, out);
    dn_buf_printf(out, "%*s-- %s\n", out->len - start < 48 ? (int)(48 - (out->len - start)) : 1, "", origin);
}

/* Calls fn for every value in force: key as one would write it, row, base, origin. */
static void each_value(const struct dn_conf *c,
                       void (*fn)(void *user, const char *key, const struct dn_conf_row *row, const void *base,
                                  const char *origin),
                       void *user)
{
    struct dn_buf key = {0}, origin = {0};
    for (size_t i = 0; i < dn_conf_n_rows; i++) {
        if (dn_conf_rows[i].scope == DN_CONF_NODE)
            fn(user, dn_conf_rows[i].path, &dn_conf_rows[i], c, origin_of(c, i));
    }
    for (size_t k = 0; k < c->n_models + c->n_policies; k++) {
        bool is_model = k < c->n_models;
        const void *base = is_model ? (const void *)&c->model[k] : &c->policy[k - c->n_models];
        for (size_t i = 0; i < dn_conf_n_rows; i++) {
            const struct dn_conf_row *row = &dn_conf_rows[i];
            if (row->scope != (is_model ? DN_CONF_MODEL : DN_CONF_POLICY))
                continue;
            dn_buf_clear(&key);
            dn_buf_clear(&origin);
            if (is_model)
                dn_buf_printf(&key, "models[\"%s\"].%s", c->model[k].name, short_name(row));
            else
                dn_buf_printf(&key, "policy.list[%zu].%s", k - c->n_models + 1, short_name(row));
            uint32_t given = is_model ? c->model[k].given : c->policy[k - c->n_models].given;
            int line = is_model ? c->model[k].line : c->policy[k - c->n_models].line;
            if (given & dn_conf_row_bit(row))
                dn_buf_printf(&origin, "%s:%d", c->file ? c->file : "command line", line);
            else
                dn_buf_puts(&origin, "default");
            fn(user, dn_buf_str(&key), row, base, dn_buf_str(&origin));
        }
    }
    dn_buf_release(&key);
    dn_buf_release(&origin);
}

static void text_line(void *user, const char *key, const struct dn_conf_row *row, const void *base, const char *origin)
{
    print_line(user, key, row, base, origin);
}

void dn_conf_print(const struct dn_conf *c, struct dn_buf *out)
{
    each_value(c, text_line, out);
}

static void json_line(void *user, const char *key, const struct dn_conf_row *row, const void *base, const char *origin)
{
    struct dn_json_writer *w = user;
    struct dn_buf value = {0};
    dn_json_begin_object(w);
    dn_json_key(w, "key");
    dn_json_string(w, key);
    dn_json_key(w, "value");
    dn_conf_print_value(row, base, &value);
    if (row->type == DN_CONF_T_PARAMS)
        dn_json_stringn(w, value.data, value.len);
    else
        dn_json_write_raw(w, value.data, value.len);
    dn_json_key(w, "origin");
    dn_json_string(w, origin);
    dn_json_end_object(w);
    dn_buf_release(&value);
}

void dn_conf_print_json(const struct dn_conf *c, struct dn_buf *out)
{
    struct dn_json_writer w = dn_json_writer(out);
    dn_json_begin_array(&w);
    each_value(c, json_line, &w);
    dn_json_end_array(&w);
}
