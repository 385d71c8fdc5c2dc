#include "base/memory.h"

#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { FILE_BYTES = 16 << 10, MAX_DEPTH = 64 };

/* The begin of a small file as text; false if it can't be read. */
static bool read_text(const char *path, char text[FILE_BYTES])
{
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t n = 0;
    ssize_t got = 0;
    if (fd < 0)
        return false;
    while (n < FILE_BYTES - 1 && (got = read(fd, text + n, FILE_BYTES - 1 - n)) > 0)
        n += (size_t)got;
    text[n] = '\0';
    close(fd);
    return n > 0 || got == 0;
}

/* The number behind a name at the begin of a line, "MemTotal:  123 kB"; false: no such line. */
static bool find_number(const char *text, const char *name, uint64_t *out)
{
    size_t n = strlen(name);
    for (const char *line = text; line != NULL; line = strchr(line, '\n')) {
        line += *line == '\n';
        if (strncmp(line, name, n) != 0 || (line[n] != ' ' && line[n] != '\t'))
            continue;
        const char *digit = line + n + strspn(line + n, " \t");
        char *end;
        unsigned long long v = strtoull(digit, &end, 10);
        if (end == digit)
            return false;
        *out = v;
        return true;
    }
    return false;
}

/* A file of one number; "max", what is not there and what can't be read are no limit. */
static uint64_t read_number(const char *folder, const char *file)
{
    char path[PATH_MAX], text[FILE_BYTES], *end;
    int n = snprintf(path, sizeof path, "%s/%s", folder, file);
    if (n < 0 || (size_t)n >= sizeof path || !read_text(path, text))
        return UINT64_MAX;
    unsigned long long v = strtoull(text, &end, 10);
    return end == text ? UINT64_MAX : v;
}

static uint64_t less(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* One control group's files, in the names of one version. */
struct version {
    const char *limit, *usage, *cached[2], *swap_limit, *swap_usage;
};
static const struct version version[2] = {
    {"memory.limit_in_bytes", "memory.usage_in_bytes", {"total_active_file", "total_inactive_file"}, NULL, NULL},
    {"memory.max", "memory.current", {"active_file", "inactive_file"}, "memory.swap.max", "memory.swap.current"}};

/* What a group's limit leaves. Files that it has read count as used, but give way. */
static void apply_group(const char *folder, const struct version *v, uint64_t machine_bytes, struct dn_memory *m)
{
    char path[PATH_MAX], text[FILE_BYTES];
    uint64_t limit = read_number(folder, v->limit), usage = read_number(folder, v->usage), cached = 0, n;
    if (limit >= machine_bytes)
        return;
    int len = snprintf(path, sizeof path, "%s/memory.stat", folder);
    if (len > 0 && (size_t)len < sizeof path && read_text(path, text))
        for (int i = 0; i < 2; i++)
            cached += find_number(text, v->cached[i], &n) ? n : 0;
    usage = usage == UINT64_MAX ? 0 : usage > cached ? usage - cached : 0;
    uint64_t swap = v->swap_limit ? read_number(folder, v->swap_limit) : 0;
    uint64_t swapped = v->swap_usage ? read_number(folder, v->swap_usage) : 0;
    m->is_limited = true;
    m->total_bytes = less(m->total_bytes, limit);
    m->free_bytes = less(m->free_bytes, limit > usage ? limit - usage : 0);
    if (swap != UINT64_MAX)
        m->swap_bytes = less(m->swap_bytes, swap > swapped ? swap - swapped : 0);
}

/* The group and all above it: each may have a limit, and the tightest counts. In a container the path is often that of
 * the host, of which only the end is mounted, as the root: what is not there is passed over. */
static void apply_groups(const char *mount, const char *path, const struct version *v, struct dn_memory *m)
{
    char folder[PATH_MAX];
    const uint64_t machine_bytes = m->total_bytes;
    size_t root = strlen(mount);
    int n = snprintf(folder, sizeof folder, "%s%s", mount, path);
    if (n < 0 || (size_t)n >= sizeof folder)
        return;
    for (int depth = 0; depth < MAX_DEPTH; depth++) {
        size_t len = strlen(folder);
        while (len > root && folder[len - 1] == '/')
            folder[--len] = '\0';
        apply_group(folder, v, machine_bytes, m);
        if (len <= root)
            return;
        *strrchr(folder, '/') = '\0';
    }
}

/* Whether a list like "cpu,memory" has it. */
static bool has_memory(const char *list, size_t n)
{
    for (size_t at = 0; at < n;) {
        size_t len = strcspn(list + at, ",:");
        if (len == 6 && memcmp(list + at, "memory", 6) == 0)
            return true;
        at += len + 1;
    }
    return false;
}

/* Lines "0::/path" of version 2 and "7:memory:/path" of version 1. */
static void read_groups(const char *root, struct dn_memory *m)
{
    char path[PATH_MAX], text[FILE_BYTES], mount[PATH_MAX];
    snprintf(path, sizeof path, "%s/proc/self/cgroup", root);
    if (!read_text(path, text))
        return;
    char *save;
    for (char *line = strtok_r(text, "\n", &save); line != NULL; line = strtok_r(NULL, "\n", &save)) {
        char *list = strchr(line, ':'), *group = list ? strchr(list + 1, ':') : NULL;
        if (group == NULL || group[1] != '/')
            continue;
        bool unified = group == list + 1;
        if (!unified && !has_memory(list + 1, (size_t)(group - list - 1)))
            continue;
        int n = snprintf(mount, sizeof mount, "%s/sys/fs/cgroup%s", root, unified ? "" : "/memory");
        if (n > 0 && (size_t)n < sizeof mount)
            apply_groups(mount, group + 1, &version[unified], m);
    }
}

void dn_memory_read_at(const char *root, struct dn_memory *out)
{
    char path[PATH_MAX], text[FILE_BYTES];
    struct dn_memory m = {0};
    uint64_t total = 0, available = 0, swap = 0;
    int n = snprintf(path, sizeof path, "%s/proc/meminfo", root);
    if (n > 0 && (size_t)n < sizeof path && read_text(path, text) && find_number(text, "MemTotal:", &total)) {
        m.total_bytes = less(total, UINT64_MAX >> 10) << 10;
        /* Kernels before 3.14 do not say what is available. */
        m.free_bytes = find_number(text, "MemAvailable:", &available) ? less(available, total) << 10 : m.total_bytes;
        m.swap_bytes = find_number(text, "SwapFree:", &swap) ? less(swap, UINT64_MAX >> 10) << 10 : 0;
        read_groups(root, &m);
    }
    *out = m;
}

void dn_memory_read(struct dn_memory *out)
{
    dn_memory_read_at("", out);
}
