#include "script/literal.h"

#include "base/buf.h"
#include "base/utf8.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 16, MAX_KEYS = 4096 /* of one table: each key is compared with the others */ };

struct reader {
    struct dn_arena *arena;
    const char *at, *end;
    int line;
    struct dn_err *err;
};

static int fail(struct reader *r, const char *text)
{
    return dn_err_set(r->err, DN_CONFIG, "%s", text);
}

static bool is_word(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_';
}

static char peek(const struct reader *r)
{
    return r->at < r->end ? *r->at : '\0';
}

/* If a long bracket ("[[", "[==[") begins here, its level; else -1. */
static int long_bracket(const struct reader *r)
{
    const char *p = r->at;
    if (p >= r->end || *p != '[')
        return -1;
    int level = 0;
    for (p++; p < r->end && *p == '='; p++)
        level++;
    return p < r->end && *p == '[' ? level : -1;
}

/* Skips a long bracket and gives its inside; a newline right behind the opening is not part of it. */
static int skip_long(struct reader *r, int level, const char **inside, size_t *len)
{
    r->at += level + 2;
    if (peek(r) == '\r')
        r->at++;
    if (peek(r) == '\n') {
        r->at++;
        r->line++;
    }
    *inside = r->at;
    for (; r->at < r->end; r->at++) {
        if (*r->at == '\n')
            r->line++;
        if (*r->at != ']' || r->end - r->at < level + 2 || r->at[level + 1] != ']')
            continue;
        int n = 0;
        while (n < level && r->at[n + 1] == '=')
            n++;
        if (n == level) {
            *len = (size_t)(r->at - *inside);
            r->at += level + 2;
            return 0;
        }
    }
    return fail(r, "a long string or comment does not end");
}

static int skip_space(struct reader *r)
{
    while (r->at < r->end) {
        char c = *r->at;
        if (c == '\n')
            r->line++;
        if (c == ' ' || c == '\t' || c == '\r' || c == '\n') {
            r->at++;
            continue;
        }
        if (c != '-' || r->end - r->at < 2 || r->at[1] != '-')
            return 0;
        r->at += 2;
        int level = long_bracket(r);
        if (level >= 0) {
            const char *inside;
            size_t len;
            int rc = skip_long(r, level, &inside, &len);
            if (rc)
                return rc;
            continue;
        }
        while (r->at < r->end && *r->at != '\n')
            r->at++;
    }
    return 0;
}

/* The escape behind a backslash. */
static int parse_escape(struct reader *r, struct dn_buf *out)
{
    static const char from[] = "abfnrtv\\\"'", to[] = "\a\b\f\n\r\t\v\\\"'";
    char c = peek(r);
    const char *known = c ? strchr(from, c) : NULL;
    if (known) {
        dn_buf_putc(out, to[known - from]);
        r->at++;
        return 0;
    }
    if (c == '\n') {
        dn_buf_putc(out, '\n');
        r->line++;
        r->at++;
        return 0;
    }
    if (c >= '0' && c <= '9') {
        unsigned value = 0;
        for (int i = 0; i < 3 && peek(r) >= '0' && peek(r) <= '9'; i++)
            value = value * 10 + (unsigned)(*r->at++ - '0');
        if (value > 255)
            return fail(r, "a decimal escape is above \\255");
        dn_buf_putc(out, (char)value);
        return 0;
    }
    return fail(r, "an escape in a string that Lua does not know");
}

static int parse_string(struct reader *r, struct dn_literal *v)
{
    v->type = DN_LITERAL_STRING;
    int level = long_bracket(r);
    if (level >= 0) {
        const char *inside;
        int rc = skip_long(r, level, &inside, &v->len);
        if (rc == 0)
            v->string = dn_arena_strndup(r->arena, inside, v->len);
        return rc;
    }
    char quote = *r->at++;
    struct dn_buf text = {0};
    int rc = 0;
    while (rc == 0 && r->at < r->end && *r->at != quote && *r->at != '\n') {
        if (*r->at == '\\') {
            r->at++;
            rc = parse_escape(r, &text);
        } else {
            dn_buf_putc(&text, *r->at++);
        }
    }
    if (rc == 0 && peek(r) != quote)
        rc = fail(r, "a string does not end on its line");
    if (rc == 0) {
        r->at++;
        v->len = text.len;
        v->string = dn_arena_strndup(r->arena, dn_buf_str(&text), text.len);
    }
    dn_buf_release(&text);
    return rc;
}

static int parse_number(struct reader *r, struct dn_literal *v)
{
    char text[64];
    size_t n = 0;
    if (peek(r) == '-') {
        text[n++] = '-';
        r->at++;
    }
    if (!((peek(r) >= '0' && peek(r) <= '9') || peek(r) == '.'))
        return fail(r, "a minus sign needs a number behind it; nothing is computed here");
    while (r->at < r->end && n < sizeof text - 1) {
        char c = *r->at;
        bool sign = (c == '+' || c == '-') && n > 0 && (text[n - 1] == 'e' || text[n - 1] == 'E') &&
                    !(n > 2 && (text[1] == 'x' || text[1] == 'X' || text[2] == 'x' || text[2] == 'X'));
        if (!is_word(c) && c != '.' && !sign)
            break;
        text[n++] = c;
        r->at++;
    }
    text[n] = '\0';
    const char *digits = text + (text[0] == '-');
    bool hex = digits[0] == '0' && (digits[1] == 'x' || digits[1] == 'X');
    size_t known = strspn(digits, hex ? "0123456789abcdefABCDEFxX" : "0123456789.eE+-");
    char *end;
    v->number = strtod(text, &end);
    if (*end != '\0' || end == text || digits[known] != '\0')
        return fail(r, "not a number");
    if (!isfinite(v->number))
        return fail(r, "a number that is too large");
    v->type = DN_LITERAL_NUMBER;
    return 0;
}

static int parse_word(struct reader *r, struct dn_literal *v)
{
    const char *start = r->at;
    while (r->at < r->end && is_word(*r->at))
        r->at++;
    size_t n = (size_t)(r->at - start);
    v->type = DN_LITERAL_BOOLEAN;
    v->boolean = n == 4 && memcmp(start, "true", 4) == 0;
    if (v->boolean || (n == 5 && memcmp(start, "false", 5) == 0))
        return 0;
    if (n == 3 && memcmp(start, "nil", 3) == 0)
        return fail(r, "nil: leave the key out instead");
    if (n == 8 && memcmp(start, "function", 8) == 0)
        return fail(r, "a function: a configuration is data");
    return dn_err_set(r->err, DN_CONFIG,
                      "\"%.*s\" is not a value: strings need quotes, and a configuration has no variables",
                      n > 40 ? 40 : (int)n, start);
}

static int parse_value(struct reader *r, struct dn_literal *v, int depth);

static bool is_keyword(const char *s, size_t n)
{
    static const char *const word[] = {"and",      "break",  "do",   "else", "elseif", "end",  "false", "for",
                                       "function", "goto",   "if",   "in",   "local",  "nil",  "not",   "or",
                                       "repeat",   "return", "then", "true", "until",  "while"};
    for (size_t i = 0; i < sizeof word / sizeof word[0]; i++) {
        if (strlen(word[i]) == n && memcmp(word[i], s, n) == 0)
            return true;
    }
    return false;
}

/* The key of an entry, if it has one: `name =` or `["name"] =`. */
static int parse_key(struct reader *r, struct dn_literal *v)
{
    struct reader ahead = *r;
    char c = peek(r);
    if (c == '[' && long_bracket(r) < 0) {
        r->at++;
        int rc = skip_space(r);
        if (rc)
            return rc;
        if (peek(r) != '"' && peek(r) != '\'' && long_bracket(r) < 0)
            return fail(r, "a key in brackets must be a string; entries of a list have no key");
        struct dn_literal key = {0};
        rc = parse_string(r, &key);
        if (rc == 0)
            rc = skip_space(r);
        if (rc)
            return rc;
        if (memchr(key.string, '\0', key.len) || !dn_utf8_is_valid(key.string, key.len))
            return fail(r, "a key must be UTF-8 without NUL");
        if (peek(r) != ']')
            return fail(r, "expected ] behind the key");
        r->at++;
        v->key = key.string;
    } else if (is_word(c) && !(c >= '0' && c <= '9')) {
        const char *start = r->at;
        while (r->at < r->end && is_word(*r->at))
            r->at++;
        const char *stop = r->at;
        int rc = skip_space(r);
        if (rc)
            return rc;
        if (peek(r) != '=') {
            *r = ahead; /* a value after all */
            return 0;
        }
        if (is_keyword(start, (size_t)(stop - start)))
            return fail(r, "a word of the language as key: write [\"key\"]");
        v->key = dn_arena_strndup(r->arena, start, (size_t)(stop - start));
    } else {
        return 0;
    }
    int rc = skip_space(r);
    if (rc)
        return rc;
    if (peek(r) != '=')
        return fail(r, "expected = behind the key");
    r->at++;
    return skip_space(r);
}

static int parse_entry(struct reader *r, struct dn_literal *table, struct dn_literal ***last, int depth)
{
    struct dn_literal *v = dn_arena_alloc0(r->arena, 1, sizeof *v);
    v->line = r->line;
    int rc = parse_key(r, v);
    if (rc == 0 && v->key) {
        if (table->n_entries >= MAX_KEYS)
            return fail(r, "a table has more than 4096 keys");
        const struct dn_literal *same = dn_literal_find(table, v->key);
        if (same)
            return dn_err_set(r->err, DN_CONFIG, "\"%.60s\" is given twice; first in line %d", v->key, same->line);
    }
    if (rc == 0)
        rc = parse_value(r, v, depth);
    if (rc)
        return rc;
    **last = v;
    *last = &v->next;
    table->n_entries++;
    return 0;
}

static int parse_table(struct reader *r, struct dn_literal *table, int depth)
{
    if (depth > MAX_DEPTH)
        return fail(r, "tables are nested too deeply");
    int opened = r->line;
    table->type = DN_LITERAL_TABLE;
    struct dn_literal **last = &table->first;
    r->at++;
    for (;;) {
        int rc = skip_space(r);
        if (rc)
            return rc;
        if (peek(r) == '}') {
            r->at++;
            return 0;
        }
        if (r->at == r->end)
            return dn_err_set(r->err, DN_CONFIG, "the table of line %d does not end", opened);
        rc = parse_entry(r, table, &last, depth);
        if (rc == 0)
            rc = skip_space(r);
        if (rc)
            return rc;
        if (peek(r) == ',' || peek(r) == ';')
            r->at++;
        else if (peek(r) != '}')
            return r->at == r->end ? dn_err_set(r->err, DN_CONFIG, "the table of line %d does not end", opened)
                                   : fail(r, "expected , or } behind the value; nothing is computed here");
    }
}

static int parse_value(struct reader *r, struct dn_literal *v, int depth)
{
    char c = peek(r);
    if (c == '{')
        return parse_table(r, v, depth + 1);
    if (c == '"' || c == '\'' || long_bracket(r) >= 0)
        return parse_string(r, v);
    if ((c >= '0' && c <= '9') || c == '-' || c == '.')
        return parse_number(r, v);
    if (is_word(c))
        return parse_word(r, v);
    return fail(r, "expected a string, a number, true, false or a table");
}

static int parse_file(struct reader *r, struct dn_literal *v)
{
    if (r->end - r->at >= 3 && memcmp(r->at, "\xEF\xBB\xBF", 3) == 0)
        r->at += 3; /* byte order mark */
    int rc = skip_space(r);
    if (rc)
        return rc;
    if (r->end - r->at < 6 || memcmp(r->at, "return", 6) != 0 || (r->end - r->at > 6 && is_word(r->at[6])))
        return fail(r, "expected: return { ... }");
    r->at += 6;
    rc = skip_space(r);
    if (rc)
        return rc;
    v->line = r->line;
    if (peek(r) != '{')
        return fail(r, "expected { behind return");
    rc = parse_value(r, v, 0);
    if (rc == 0)
        rc = skip_space(r);
    if (rc == 0 && peek(r) == ';') {
        r->at++;
        rc = skip_space(r);
    }
    if (rc)
        return rc;
    return r->at == r->end ? 0 : fail(r, "something follows the table");
}

int dn_literal_parse(struct dn_arena *arena, const char *text, size_t n, struct dn_literal **out, int *line,
                     struct dn_err *err)
{
    struct dn_err own;
    struct reader r = {.arena = arena, .at = text, .end = text + n, .line = 1, .err = &own};
    *line = 0;
    if (n > DN_LITERAL_BYTES)
        return dn_err_set(err, DN_CONFIG, "%zu bytes long, at most %u", n, DN_LITERAL_BYTES);
    struct dn_literal *v = dn_arena_alloc0(arena, 1, sizeof *v);
    int rc = parse_file(&r, v);
    if (rc) {
        *line = r.line;
        return dn_err_set(err, DN_CONFIG, "%s", own.text);
    }
    *out = v;
    return 0;
}

int dn_literal_read(struct dn_arena *arena, const char *path, struct dn_literal **out, int *line, struct dn_err *err)
{
    *line = 0;
    FILE *f = fopen(path, "rbe");
    if (!f)
        return dn_err_set(err, DN_CONFIG, "%s", strerror(errno));
    char *text = dn_arena_alloc(arena, DN_LITERAL_BYTES + 1);
    size_t n = fread(text, 1, DN_LITERAL_BYTES + 1, f);
    int failed = ferror(f) ? errno : 0;
    fclose(f);
    if (failed)
        return dn_err_set(err, DN_CONFIG, "%s", strerror(failed));
    return dn_literal_parse(arena, text, n, out, line, err);
}

const struct dn_literal *dn_literal_find(const struct dn_literal *table, const char *key)
{
    for (const struct dn_literal *v = table->first; v; v = v->next) {
        if (v->key && strcmp(v->key, key) == 0)
            return v;
    }
    return NULL;
}
