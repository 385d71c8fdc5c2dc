/* Literals: the data part of Lua's syntax, without a Lua.
 *
 * Configuration files are `return { ... }` with strings, numbers, booleans, nested tables, comments and trailing
 * commas: what Lua would read, minus everything that computes. A parser of its own instead of a VM, because a VM
 * forgets the line of each key, lets the second of two equal keys win in silence, and has to be kept from running code;
 * here there is no code to run. Every file that this accepts means the same to Lua.
 *
 * Bounds: 1 MiB of text, 16 levels of tables. The tree lies in the caller's arena and dies with it. Any thread.
 */
#ifndef DN_SCRIPT_LITERAL_H
#define DN_SCRIPT_LITERAL_H

#include "base/arena.h"
#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>

enum dn_literal_type { DN_LITERAL_NUMBER, DN_LITERAL_STRING, DN_LITERAL_BOOLEAN, DN_LITERAL_TABLE };

struct dn_literal {
    enum dn_literal_type type;
    int line;           /* where the key (or the value, if it has none) stands */
    const char *key;    /* NULL for an entry of a list; no NUL inside */
    const char *string; /* terminated; may contain NUL: len counts */
    size_t len;
    double number; /* finite */
    bool boolean;
    struct dn_literal *first; /* entries of a table in the order of the file; no key occurs twice */
    size_t n_entries;
    struct dn_literal *next;
};

#define DN_LITERAL_BYTES (1u << 20)

/* Parses text; *out is the table behind `return`. Error: DN_CONFIG, and *line says where (0: the file as such). */
int dn_literal_parse(struct dn_arena *arena, const char *text, size_t n, struct dn_literal **out, int *line,
                     struct dn_err *err);

/* Reads a file and parses it. */
int dn_literal_read(struct dn_arena *arena, const char *path, struct dn_literal **out, int *line, struct dn_err *err);

/* The entry with that key, or NULL. */
const struct dn_literal *dn_literal_find(const struct dn_literal *table, const char *key);

#endif
