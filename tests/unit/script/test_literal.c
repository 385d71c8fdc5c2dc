#include "script/literal.h"

#include "base/buf.h"

#include <criterion/criterion.h>
#include <lauxlib.h>
#include <lua.h>
#include <stdlib.h>
#include <string.h>

static struct dn_literal *parse(struct dn_arena *arena, const char *text)
{
    struct dn_literal *v = NULL;
    struct dn_err err = {0};
    int line;
    cr_assert_eq(dn_literal_parse(arena, text, strlen(text), &v, &line, &err), 0, "line %d: %s in %s", line, err.text,
                 text);
    return v;
}

/* Whether Lua's value on top of the stack is the same as ours; pops it. */
static void check_same(lua_State *L, const struct dn_literal *v, const char *text)
{
    switch (v->type) {
    case DN_LITERAL_NUMBER:
        cr_assert(lua_type(L, -1) == LUA_TNUMBER && lua_tonumber(L, -1) == v->number, "%s", text);
        break;
    case DN_LITERAL_BOOLEAN:
        cr_assert(lua_type(L, -1) == LUA_TBOOLEAN && lua_toboolean(L, -1) == v->boolean, "%s", text);
        break;
    case DN_LITERAL_STRING: {
        size_t n;
        const char *s = lua_tolstring(L, -1, &n);
        cr_assert(lua_type(L, -1) == LUA_TSTRING && n == v->len && memcmp(s, v->string, n) == 0, "%s", text);
        break;
    }
    case DN_LITERAL_TABLE: {
        cr_assert_eq(lua_type(L, -1), LUA_TTABLE, "%s", text);
        int position = 0;
        size_t n = 0, n_lua = 0;
        for (const struct dn_literal *e = v->first; e; e = e->next, n++) {
            if (e->key)
                lua_getfield(L, -1, e->key);
            else
                lua_rawgeti(L, -1, ++position);
            check_same(L, e, text);
        }
        for (lua_pushnil(L); lua_next(L, -2); lua_pop(L, 1))
            n_lua++;
        cr_assert(n == n_lua && n == v->n_entries, "%s", text);
        break;
    }
    }
    lua_pop(L, 1);
}

/* What is accepted means the same to Lua. */
Test(literal, agrees_with_lua)
{
    static const char *const text[] = {
        "return {}",
        "return { 1, 2.5, -3, .5, 5., 1e3, 1E-2, 0x1F, -0x10, 1e+2 }",
        "return { a = 1, ['b c'] = 2; [\"d\"] = { e = { f = true, g = false } }, }",
        ("return { 'a\\nb\\t\\\\\\'\\\"\\065\\0z', \"it's\", [[long]], [==[a]]b]==], [[\nfirst newline is dropped\n]], "
         "'\\\nx' }"),
        "-- comment\nreturn --[[ long\ncomment ]] { -- x\n 1, --[==[ ]] ]==] 2 --[not long\n}",
        "return { a = 1, 2, b = 3, 4 };",
        "return{a=1}",
        "return { nested = { { { { 1 } } } }, [ 'k' ] = 'v' }",
        "return { x1_y = 1, _z = 2, ['return'] = 3 }",
        "\n\n\treturn\r\n{\r\n1,\r\n}\r\n",
    };
    for (size_t i = 0; i < sizeof text / sizeof text[0]; i++) {
        struct dn_arena arena = {0};
        struct dn_literal *v = parse(&arena, text[i]);
        lua_State *L = luaL_newstate();
        cr_assert_eq(luaL_loadstring(L, text[i]), 0, "%s", text[i]);
        cr_assert_eq(lua_pcall(L, 0, 1, 0), 0);
        check_same(L, v, text[i]);
        lua_close(L);
        dn_arena_release(&arena);
    }
}

static void refuse(const char *text, int want_line, const char *want)
{
    struct dn_arena arena = {0};
    struct dn_literal *v = NULL;
    struct dn_err err = {0};
    int line = -1;
    cr_assert_eq(dn_literal_parse(&arena, text, strlen(text), &v, &line, &err), -DN_CONFIG, "%s", text);
    cr_assert(strstr(err.text, want), "%s: %s", text, err.text);
    cr_assert_eq(line, want_line, "%s: line %d", text, line);
    cr_assert_null(v);
    dn_arena_release(&arena);
}

Test(literal, refuses_what_computes)
{
    refuse("return { a = 1 + 1 }", 1, "nothing is computed");
    refuse("return {\n a = os.time() }", 2, "\"os\" is not a value");
    refuse("return {\n\n f = function() end }", 3, "a function: a configuration is data");
    refuse("local x = 1 return { x }", 1, "expected: return { ... }");
    refuse("return { a = 'x' .. 'y' }", 1, "nothing is computed");
    refuse("return { [1] = 2 }", 1, "a key in brackets must be a string");
    refuse("return { a = - b }", 1, "a minus sign needs a number");
    refuse("return { a = nil }", 1, "leave the key out");
    refuse("return 5", 1, "expected { behind return");
    refuse("return { 1 } + 2", 1, "something follows");
    refuse("return { 1 } return { 2 }", 1, "something follows");
    refuse("return { f{} }", 1, "is not a value");
    refuse("return { end = 1 }", 1, "a word of the language");
}

Test(literal, says_where_the_syntax_is_broken)
{
    refuse("", 1, "expected: return");
    refuse("return {\n  a = 1\n  b = 2\n}", 3, "expected , or }");
    refuse("return {\n  a = 'x\n}", 2, "does not end on its line");
    refuse("return {\n  a = {\n", 3, "the table of line 2 does not end");
    refuse("return { a = [[x\n\n", 3, "does not end");
    refuse("return { --[[ x", 1, "does not end");
    refuse("return { a = 1,\n b = 2,\n a = 3 }", 3, "\"a\" is given twice; first in line 1");
    refuse("return { '\\q' }", 1, "an escape");
    refuse("return { '\\300' }", 1, "above \\255");
    refuse("return { 1..2 }", 1, "not a number");
    refuse("return { 0x }", 1, "not a number");
    refuse("return { 1e999 }", 1, "too large");
    refuse("return { 3x }", 1, "not a number");
    refuse("return { 0x1p4 }", 1, "not a number");
    refuse("return { a = }", 1, "expected a string, a number");
    refuse("return { , }", 1, "expected a string, a number");
    refuse("return { ['a\\0b'] = 1 }", 1, "without NUL");
}

Test(literal, depth_and_size_are_bounded)
{
    char deep[64] = "return ";
    memset(deep + 7, '{', 30);
    refuse(deep, 1, "nested too deeply");
    size_t n = DN_LITERAL_BYTES + 1;
    char *big = malloc(n);
    memset(big, ' ', n);
    struct dn_arena arena = {0};
    struct dn_literal *v;
    struct dn_err err;
    int line;
    cr_assert_eq(dn_literal_parse(&arena, big, n, &v, &line, &err), -DN_CONFIG);
    cr_assert_eq(line, 0);
    free(big);
    struct dn_buf many = {0};
    dn_buf_puts(&many, "return {");
    for (int i = 0; i < 5000; i++)
        dn_buf_printf(&many, "k%d=1,", i);
    dn_buf_puts(&many, "}");
    cr_assert_eq(dn_literal_parse(&arena, many.data, many.len, &v, &line, &err), -DN_CONFIG);
    cr_assert(strstr(err.text, "more than 4096 keys"));
    dn_buf_release(&many);
    dn_arena_release(&arena);
}

Test(literal, every_prefix_of_a_file_is_an_error_and_no_crash)
{
    static const char text[] = "-- c\nreturn { a = { 1, 'x\\065', [==[ l ]==] }, [\"b\"] = -0x1F, --[[ c ]] d = true }";
    for (size_t n = 0; n < sizeof text - 1; n++) {
        char *copy = malloc(n + 1); /* of exactly that size, so that a sanitizer sees a step too far */
        memcpy(copy, text, n);
        char *exact = realloc(copy, n ? n : 1);
        struct dn_arena arena = {0};
        struct dn_literal *v;
        struct dn_err err;
        int line;
        cr_assert_eq(dn_literal_parse(&arena, exact, n, &v, &line, &err), -DN_CONFIG, "%zu", n);
        dn_arena_release(&arena);
        free(exact);
    }
}

Test(literal, random_bytes_never_crash)
{
    static const char piece[][8] = {"return ", "{",  "}", "[", "]", "=",  ",",  "'", "\"", "--",
                                    "[[",      "]]", "a", "1", "-", "\n", "\\", ".", "e",  "\0"};
    unsigned seed = 7;
    for (int round = 0; round < 20000; round++) {
        struct dn_buf b = {0};
        dn_buf_puts(&b, "return {");
        for (int i = 0; i < 30; i++) {
            seed = seed * 1664525 + 1013904223;
            const char *p = piece[(seed >> 16) % (sizeof piece / sizeof piece[0])];
            dn_buf_put(&b, p, *p ? strlen(p) : 1);
        }
        struct dn_arena arena = {0};
        struct dn_literal *v;
        struct dn_err err;
        int line;
        int rc = dn_literal_parse(&arena, b.data, b.len, &v, &line, &err);
        cr_assert(rc == 0 || rc == -DN_CONFIG);
        dn_arena_release(&arena);
        dn_buf_release(&b);
    }
}
