#include "cli/args.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_NAME = 32, MAX_KNOWN = 64 };

/* Edit distance (insert, delete, replace), capped at names of MAX_NAME. */
static unsigned distance(const char *a, const char *b)
{
    size_t n = strnlen(a, MAX_NAME), m = strnlen(b, MAX_NAME);
    unsigned row[MAX_NAME + 1];
    for (size_t j = 0; j <= m; j++)
        row[j] = (unsigned)j;
    for (size_t i = 1; i <= n; i++) {
        unsigned diagonal = row[0];
        row[0] = (unsigned)i;
        for (size_t j = 1; j <= m; j++) {
            unsigned best = diagonal + (a[i - 1] != b[j - 1]);
            diagonal = row[j];
            if (row[j] + 1 < best)
                best = row[j] + 1;
            if (row[j - 1] + 1 < best)
                best = row[j - 1] + 1;
            row[j] = best;
        }
    }
    return row[m];
}

const char *dn_nearest(const char *name, const char *const *known, size_t n)
{
    const char *best = NULL;
    unsigned best_d = 3; /* more than two edits is another word */
    for (size_t i = 0; i < n; i++) {
        unsigned d = distance(name, known[i]);
        if (d < best_d) {
            best_d = d;
            best = known[i];
        }
    }
    return best;
}

void dn_args_print_help(const char *usage, const struct dn_flag *flag)
{
    printf("%s\n", usage);
    for (const struct dn_flag *f = flag; f->name; f++) {
        char left[40];
        snprintf(left, sizeof left, "--%s%s%s", f->name, f->value ? " " : "", f->value ? f->value : "");
        printf("  %-26s %s\n", left, f->help);
    }
}

static const struct dn_flag *find_flag(const struct dn_flag *flag, const char *name, size_t n)
{
    for (const struct dn_flag *f = flag; f->name; f++)
        if (strlen(f->name) == n && memcmp(f->name, name, n) == 0)
            return f;
    return NULL;
}

static int unknown_flag(const struct dn_flag *flag, const char *name, struct dn_err *err)
{
    const char *known[MAX_KNOWN];
    size_t n = 0;
    for (const struct dn_flag *f = flag; f->name && n < MAX_KNOWN; f++)
        known[n++] = f->name;
    const char *near = dn_nearest(name, known, n);
    if (near)
        return dn_err_set(err, DN_CONFIG, "unknown flag --%s (did you mean --%s?)", name, near);
    return dn_err_set(err, DN_CONFIG, "unknown flag --%s; --help lists them", name);
}

int dn_args_parse(int argc, char **argv, const char *usage, const struct dn_flag *flag, struct dn_args *out, bool *help,
                  struct dn_err *err)
{
    size_t n_positional = 0;
    bool flags_end = false;
    *help = false;
    for (int i = 1; i < argc; i++) {
        char *arg = argv[i];
        if (flags_end || arg[0] != '-' || arg[1] == '\0') {
            argv[n_positional++] = arg;
            continue;
        }
        if (strcmp(arg, "--") == 0) {
            flags_end = true;
            continue;
        }
        if (strcmp(arg, "-h") == 0 || strcmp(arg, "--help") == 0) {
            dn_args_print_help(usage, flag);
            *help = true;
            return 0;
        }
        const char *name = arg + (arg[1] == '-' ? 2 : 1);
        const char *equals = strchr(name, '=');
        const struct dn_flag *f = find_flag(flag, name, equals ? (size_t)(equals - name) : strlen(name));
        if (!f)
            return unknown_flag(flag, name, err);
        if (!f->value) {
            if (equals)
                return dn_err_set(err, DN_CONFIG, "--%s takes no value", f->name);
            *f->on = true;
        } else if (equals) {
            *f->text = equals + 1;
        } else {
            if (i + 1 == argc)
                return dn_err_set(err, DN_CONFIG, "--%s: expected %s", f->name, f->value);
            *f->text = argv[++i];
        }
    }
    *out = (struct dn_args){.positional = (const char *const *)argv, .n_positional = n_positional};
    return 0;
}

int dn_args_uint(const char *text, const char *flag, uint64_t min, uint64_t max, bool bytes, uint64_t *out,
                 struct dn_err *err)
{
    char *end;
    errno = 0;
    unsigned long long v = strtoull(text, &end, 10);
    uint64_t unit = bytes ? 1024 : 1000, factor = 1;
    if (*end == 'k' || *end == 'K')
        factor = unit;
    else if (*end == 'M')
        factor = unit * unit;
    else if (*end == 'G')
        factor = unit * unit * unit;
    if (factor > 1)
        end++;
    if (bytes && strcmp(end, "iB") == 0)
        end += 2;
    if (end == text || *end || text[0] == '-' || errno || __builtin_mul_overflow(v, factor, &v) || v < min || v > max)
        return dn_err_set(err, DN_CONFIG, "--%s %s: expected a whole number from %llu to %llu", flag, text,
                          (unsigned long long)min, (unsigned long long)max);
    *out = v;
    return 0;
}
