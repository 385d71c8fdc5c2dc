/* Command line: flags and positional arguments of one subcommand, from a table.
 *
 * "--name value", "--name=value", "-h"; "--" ends the flags. An unknown flag is an error with the nearest known one.
 * Views into argv.
 */
#ifndef DN_CLI_ARGS_H
#define DN_CLI_ARGS_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { DN_EXIT_OK = 0, DN_EXIT_FAILED = 1, DN_EXIT_USAGE = 2, DN_EXIT_UNREACHABLE = 3 };

struct dn_flag {
    const char *name;  /* without dashes */
    const char *value; /* what help calls its value; NULL: a switch */
    const char *help;
    const char **text; /* where the value goes; or */
    bool *on;          /* where a switch goes */
};

struct dn_args {
    const char *const *positional;
    size_t n_positional;
};

/* Parses argv[1..]. -h and --help print `usage` and the table to stdout and set *help. Flags must be a table that ends
 * with a NULL name. Positional arguments are moved to the front of argv. */
int dn_args_parse(int argc, char **argv, const char *usage, const struct dn_flag *flag, struct dn_args *out, bool *help,
                  struct dn_err *err);
void dn_args_print_help(const char *usage, const struct dn_flag *flag);

/* A whole number, with k, M, G (KiB, MiB, GiB when `bytes`) behind it. Error names the flag. */
int dn_args_uint(const char *text, const char *flag, uint64_t min, uint64_t max, bool bytes, uint64_t *out,
                 struct dn_err *err);

/* The closest of n names to `name`, or NULL if none is near: "did you mean". */
const char *dn_nearest(const char *name, const char *const *known, size_t n);

#endif
