#include "base/memory.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A system of files below a folder of the test. */
static char root[64];

static void begin(void)
{
    snprintf(root, sizeof root, "/tmp/dn_memory_XXXXXX");
    cr_assert_not_null(mkdtemp(root));
}

static void end(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf %s", root);
    cr_assert_eq(system(command), 0);
}

static void put(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s%s", root, name);
    for (char *slash = strchr(path + strlen(root) + 1, '/'); slash; slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        mkdir(path, 0700);
        *slash = '/';
    }
    FILE *f = fopen(path, "w");
    cr_assert_not_null(f, "%s", path);
    fputs(text, f);
    fclose(f);
}

static void expect(uint64_t total, uint64_t free_bytes, uint64_t swap, bool limited)
{
    struct dn_memory m;
    dn_memory_read_at(root, &m);
    cr_expect(m.total_bytes == total && m.free_bytes == free_bytes && m.swap_bytes == swap && m.is_limited == limited,
              "%llu total, %llu free, %llu swap, %d", (unsigned long long)m.total_bytes,
              (unsigned long long)m.free_bytes, (unsigned long long)m.swap_bytes, m.is_limited);
}

#define MIB(n) ((uint64_t)(n) << 20)
/* 16 GiB, of which 12 are available. */
#define MEMINFO                                                                                                        \
    "MemTotal:       16777216 kB\nMemFree:         1048576 kB\nMemAvailable:   12582912 kB\nSwapTotal: 4194304 kB\n"   \
    "SwapFree:        2097152 kB\n"

Test(memory, a_machine_without_limits, .init = begin, .fini = end)
{
    expect(0, 0, 0, false);
    put("/proc/meminfo", MEMINFO);
    expect(MIB(16384), MIB(12288), MIB(2048), false);
    put("/proc/self/cgroup", "0::/user.slice/me\n");
    put("/sys/fs/cgroup/user.slice/me/memory.max", "max\n");
    expect(MIB(16384), MIB(12288), MIB(2048), false);
    put("/proc/meminfo", "MemTotal: 16777216 kB\n"); /* an old kernel */
    expect(MIB(16384), MIB(16384), 0, false);
}

/* What was read from files gives way; what is left of the limit is what counts. */
Test(memory, a_container_of_version_2, .init = begin, .fini = end)
{
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/cgroup", "0::/\n");
    put("/sys/fs/cgroup/memory.max", "4294967296\n");
    put("/sys/fs/cgroup/memory.current", "3221225472\n");
    expect(MIB(4096), MIB(1024), MIB(2048), true);
    put("/sys/fs/cgroup/memory.stat", "anon 1073741824\nfile 9\ninactive_file 1073741824\nactive_file 536870912\n");
    expect(MIB(4096), MIB(2560), MIB(2048), true);
    put("/sys/fs/cgroup/memory.swap.max", "1073741824\n");
    put("/sys/fs/cgroup/memory.swap.current", "536870912\n");
    expect(MIB(4096), MIB(2560), MIB(512), true);
    put("/sys/fs/cgroup/memory.max", "17179869184\n"); /* as much as there is: no limit */
    expect(MIB(16384), MIB(12288), MIB(2048), false);
}

/* The tightest of a group and those above it, though another has the same limit and more in use. */
Test(memory, the_tightest_group_counts, .init = begin, .fini = end)
{
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/cgroup", "1:cpu:/elsewhere\n0::/a/b/c\n");
    put("/sys/fs/cgroup/a/memory.max", "8589934592\n");
    put("/sys/fs/cgroup/a/memory.current", "8053063680\n");
    put("/sys/fs/cgroup/a/b/c/memory.max", "8589934592\n");
    put("/sys/fs/cgroup/a/b/c/memory.current", "1073741824\n");
    expect(MIB(8192), MIB(512), MIB(2048), true);
}

/* Version 1: the path is often the host's, and what is mounted is the container's own group. */
Test(memory, a_container_of_version_1, .init = begin, .fini = end)
{
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/cgroup", "5:devices:/\n4:cpu,memory:/docker/0123\n0::/\n");
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
    expect(MIB(16384), MIB(12288), MIB(2048), false);
    put("/sys/fs/cgroup/memory/memory.limit_in_bytes", "2147483648\n");
    put("/sys/fs/cgroup/memory/memory.usage_in_bytes", "1610612736\n");
    put("/sys/fs/cgroup/memory/memory.stat", "cache 5\ntotal_inactive_file 1073741824\ntotal_active_file 0\n");
    expect(MIB(2048), MIB(1536), 0, true);
}

Test(memory, what_makes_no_sense_is_no_limit, .init = begin, .fini = end)
{
    put("/proc/meminfo", MEMINFO);
    put("/proc/self/cgroup", "nonsense\n:\n0:\n0::relative\n4:memorys:/x\n0::/../..\n0::/\n");
    put("/sys/fs/cgroup/memory.max", "many\n");
    expect(MIB(16384), MIB(12288), MIB(2048), false);
    put("/proc/meminfo", "MemTotal: lots\n");
    expect(0, 0, 0, false);
}

Test(memory, this_machine_says_something)
{
    struct dn_memory m;
    dn_memory_read(&m);
    cr_expect(m.total_bytes > MIB(64) && m.free_bytes <= m.total_bytes);
}
