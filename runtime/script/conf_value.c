/* One value of the configuration: from text, from a literal, to text. */
#include "base/json.h"
#include "script/conf_schema.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static bool has_auto(const struct dn_conf_row *row)
{
    return row->fallback && strcmp(row->fallback, "auto") == 0;
}

static void print_size(double bytes, struct dn_buf *out)
{
    static const char *const unit[] = {"", " KiB", " MiB", " GiB"};
    int i = 0;
    while (i < 3 && bytes >= 1024 && fmod(bytes, 1024) == 0) {
        bytes /= 1024;
        i++;
    }
    dn_buf_printf(out, "%.0f%s", bytes, unit[i]);
}

void dn_conf_print_expected(const struct dn_conf_row *row, struct dn_buf *out)
{
    switch (row->type) {
    case DN_CONF_T_STRING:
        dn_buf_puts(out, "a string");
        break;
    case DN_CONF_T_CHOICE:
        dn_buf_puts(out, "one of ");
        for (const char *c = row->choices; *c; c++) {
            if (*c == ' ')
                dn_buf_putc(out, ',');
            dn_buf_putc(out, *c);
        }
        break;
    case DN_CONF_T_ADDRESS:
        dn_buf_puts(out, "HOST:PORT");
        break;
    case DN_CONF_T_ADDRESS_OR_FALSE:
        dn_buf_puts(out, "HOST:PORT, true (127.0.0.1:8080) or false");
        break;
    case DN_CONF_T_BOOL:
        dn_buf_puts(out, "true or false");
        break;
    case DN_CONF_T_INT:
        dn_buf_printf(out, "an integer from %.0f to %.0f%s", has_auto(row) ? 1 : row->min, row->max,
                      has_auto(row) ? ", or \"auto\"" : "");
        break;
    case DN_CONF_T_NUMBER:
        dn_buf_printf(out, "a number from %g to %g", row->min, row->max);
        break;
    case DN_CONF_T_SIZE:
        dn_buf_puts(out, "a size from ");
        print_size(has_auto(row) ? 1024 * 1024 : row->min, out);
        dn_buf_puts(out, " to ");
        print_size(row->max, out);
        if (has_auto(row))
            dn_buf_puts(out, ", or \"auto\"");
        break;
    case DN_CONF_T_PARAMS:
        dn_buf_puts(out, "a table of numbers, strings and booleans");
        break;
    }
}

static int refuse(const struct dn_conf_row *row, const char *place, const char *shown, struct dn_err *err)
{
    struct dn_buf expected = {0};
    dn_conf_print_expected(row, &expected);
    int rc = dn_err_param(err, DN_CONFIG, row->path, "%s = %.80s: expected %s", place, shown, dn_buf_str(&expected));
    dn_buf_release(&expected);
    return rc;
}

/* "64 MiB", "16KiB", "4096"; false if it is none. */
static bool parse_size(const char *text, double *out)
{
    static const struct {
        const char *name;
        double factor;
    } unit[] = {{"", 1},
                {"B", 1},
                {"KiB", 1024},
                {"MiB", 1024.0 * 1024},
                {"GiB", 1024.0 * 1024 * 1024},
                {"TiB", 1024.0 * 1024 * 1024 * 1024}};
    if (*text < '0' || *text > '9' || text[1] == 'x' || text[1] == 'X')
        return false;
    char *end;
    double v = strtod(text, &end);
    while (*end == ' ')
        end++;
    for (size_t i = 0; i < sizeof unit / sizeof unit[0]; i++) {
        if (strcmp(end, unit[i].name) == 0) {
            *out = v * unit[i].factor;
            return *out == floor(*out);
        }
    }
    return false;
}

static bool is_choice(const char *choices, const char *text)
{
    size_t n = strlen(text);
    for (const char *c = choices; n > 0 && *c; c += strcspn(c, " "), c += *c == ' ') {
        if (strcspn(c, " ") == n && strncmp(c, text, n) == 0)
            return true;
    }
    return false;
}

/* A number that was understood; false if it is out of range. */
static bool put_number(const struct dn_conf_row *row, void *at, double v)
{
    double min = has_auto(row) ? 1 : row->min;
    if (!(v >= min && v <= row->max))
        return false;
    if (row->type == DN_CONF_T_NUMBER)
        *(double *)at = v;
    else if (v == floor(v))
        *(uint64_t *)at = (uint64_t)v;
    else
        return false;
    return true;
}

static bool put_text(struct dn_conf *c, const struct dn_conf_row *row, void *at, const char *text)
{
    char host[64], *end;
    uint16_t port;
    double v;
    switch (row->type) {
    case DN_CONF_T_CHOICE:
        if (!is_choice(row->choices, text))
            return false;
        break;
    case DN_CONF_T_ADDRESS_OR_FALSE:
        if (strcmp(text, "false") == 0 || strcmp(text, "") == 0) {
            *(const char **)at = "";
            return true;
        }
        if (strcmp(text, "true") == 0)
            text = "127.0.0.1:8080";
        if (!dn_conf_address(text, host, &port))
            return false;
        break;
    case DN_CONF_T_ADDRESS:
        if (!dn_conf_address(text, host, &port))
            return false;
        break;
    case DN_CONF_T_BOOL:
        if (strcmp(text, "true") != 0 && strcmp(text, "false") != 0)
            return false;
        *(bool *)at = *text == 't';
        return true;
    case DN_CONF_T_INT:
    case DN_CONF_T_SIZE:
        if (has_auto(row) && strcmp(text, "auto") == 0) {
            *(uint64_t *)at = 0;
            return true;
        }
        if (row->type == DN_CONF_T_SIZE)
            return parse_size(text, &v) && put_number(row, at, v);
        return *text >= '0' && *text <= '9' && (v = strtod(text, &end), *end == '\0') && put_number(row, at, v);
    case DN_CONF_T_NUMBER:
        return *text >= '0' && *text <= '9' && (v = strtod(text, &end), *end == '\0') && put_number(row, at, v);
    case DN_CONF_T_PARAMS:
        return *text == '\0';
    case DN_CONF_T_STRING:
        break;
    }
    *(const char **)at = dn_arena_strndup(&c->arena, text, strlen(text));
    return true;
}

int dn_conf_put_text(struct dn_conf *c, const struct dn_conf_row *row, void *base, const char *place, const char *text,
                     struct dn_err *err)
{
    if (put_text(c, row, (char *)base + row->offset, text))
        return 0;
    return refuse(row, place, text, err);
}

static int put_params(struct dn_conf *c, struct dn_conf_policy *policy, const char *place,
                      const struct dn_literal *table, struct dn_err *err)
{
    struct dn_conf_param *param = dn_arena_alloc0(&c->arena, table->n_entries, sizeof *param);
    size_t n = 0;
    for (const struct dn_literal *v = table->first; v; v = v->next) {
        if (!v->key)
            return dn_err_set(err, DN_CONFIG, "%s: expected name = value, not a list", place);
        param[n] =
            (struct dn_conf_param){.name = v->key, .number = v->number, .boolean = v->boolean, .string = v->string};
        if (v->type == DN_LITERAL_NUMBER)
            param[n].kind = DN_CONF_NUMBER;
        else if (v->type == DN_LITERAL_BOOLEAN)
            param[n].kind = DN_CONF_BOOLEAN;
        else if (v->type == DN_LITERAL_STRING && !memchr(v->string, '\0', v->len))
            param[n].kind = DN_CONF_STRING;
        else
            return dn_err_set(err, DN_CONFIG, "%s.%s: expected a number, a string or a boolean", place, v->key);
        n++;
    }
    policy->param = param;
    policy->n_params = n;
    return 0;
}

/* What messages show of a value. */
static void show(const struct dn_literal *v, struct dn_buf *out)
{
    if (v->type == DN_LITERAL_STRING)
        dn_json_put_string(out, v->string, v->len);
    else if (v->type == DN_LITERAL_NUMBER)
        dn_json_put_double(out, v->number);
    else
        dn_buf_puts(out, v->type == DN_LITERAL_TABLE ? "{...}" : v->boolean ? "true" : "false");
}

int dn_conf_put_literal(struct dn_conf *c, const struct dn_conf_row *row, void *base, const char *place,
                        const struct dn_literal *v, struct dn_err *err)
{
    void *at = (char *)base + row->offset;
    bool numeric = row->type == DN_CONF_T_INT || row->type == DN_CONF_T_NUMBER || row->type == DN_CONF_T_SIZE;
    bool ok = false;
    if (row->type == DN_CONF_T_PARAMS && v->type == DN_LITERAL_TABLE)
        return put_params(c, base, place, v, err);
    if (v->type == DN_LITERAL_NUMBER)
        ok = numeric && put_number(row, at, v->number);
    else if (v->type == DN_LITERAL_BOOLEAN)
        ok = (row->type == DN_CONF_T_BOOL || row->type == DN_CONF_T_ADDRESS_OR_FALSE) &&
             put_text(c, row, at, v->boolean ? "true" : "false");
    else if (v->type == DN_LITERAL_STRING && !memchr(v->string, '\0', v->len)) /* numbers are not written in quotes */
        ok = row->type != DN_CONF_T_BOOL && row->type != DN_CONF_T_NUMBER && row->type != DN_CONF_T_PARAMS &&
             (row->type != DN_CONF_T_INT || strcmp(v->string, "auto") == 0) && put_text(c, row, at, v->string);
    if (ok)
        return 0;
    struct dn_buf shown = {0};
    show(v, &shown);
    int rc = refuse(row, place, dn_buf_str(&shown), err);
    dn_buf_release(&shown);
    return rc;
}

void dn_conf_print_value(const struct dn_conf_row *row, const void *base, struct dn_buf *out)
{
    const void *at = (const char *)base + row->offset;
    switch (row->type) {
    case DN_CONF_T_BOOL:
        dn_buf_puts(out, *(const bool *)at ? "true" : "false");
        break;
    case DN_CONF_T_NUMBER:
        dn_json_put_double(out, *(const double *)at);
        break;
    case DN_CONF_T_INT:
    case DN_CONF_T_SIZE: {
        uint64_t v = *(const uint64_t *)at;
        if (v == 0 && has_auto(row)) {
            dn_buf_puts(out, "\"auto\"");
        } else if (row->type == DN_CONF_T_SIZE && v >= 1024) {
            dn_buf_putc(out, '"');
            print_size((double)v, out);
            dn_buf_putc(out, '"');
        } else {
            dn_json_put_uint(out, v);
        }
        break;
    }
    case DN_CONF_T_PARAMS: {
        const struct dn_conf_policy *policy = base;
        for (size_t i = 0; i < policy->n_params; i++) {
            const struct dn_conf_param *p = &policy->param[i];
            dn_buf_printf(out, "%s%s = ", i ? ", " : "{ ", p->name);
            if (p->kind == DN_CONF_STRING)
                dn_json_put_string(out, p->string, strlen(p->string));
            else if (p->kind == DN_CONF_NUMBER)
                dn_json_put_double(out, p->number);
            else
                dn_buf_puts(out, p->boolean ? "true" : "false");
        }
        dn_buf_puts(out, policy->n_params ? " }" : "{}");
        break;
    }
    case DN_CONF_T_ADDRESS_OR_FALSE:
        if (**(const char *const *)at == '\0') {
            dn_buf_puts(out, "false");
            break;
        }
        /* fall through */
    default: {
        const char *s = *(const char *const *)at;
        dn_json_put_string(out, s ? s : "", s ? strlen(s) : 0);
    }
    }
}
