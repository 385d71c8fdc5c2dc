#include "base/buf.h"
#include "base/memory.h"
#include "cli/args.h"
#include "cli/cli.h"
#include "cli/commit.h"
#include "cli/progress.h"
#include "pool/device.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

struct report {
    unsigned n_bad, n_warn;
};

static void line(struct report *r, int state, const char *what, const char *text)
{
    static const char *const mark[] = {"ok  ", "warn", "bad "};
    printf("%s  %-10s %s\n", mark[state], what, text);
    r->n_warn += state == 1;
    r->n_bad += state == 2;
}

static void check_cpu(struct report *r)
{
    struct dn_device *d;
    struct dn_err err;
    char text[256];
    const struct dn_device_conf dc = {
        .n_threads = 0, .limits = {.tokens = 1, .seqs = 1, .rows = 1, .pages = 1}, .n_slots = 1, .n_vocab = 1};
    if (dn_kernels_open_cpu(&dc, &d, &err) != 0) {
        line(r, 2, "cpu", err.text);
        return;
    }
    d->ops->describe(d, text, sizeof text);
    line(r, strstr(text, "portable") ? 1 : 0, "cpu", text);
    d->ops->close(d);
}

static void check_memory(struct report *r)
{
    char text[128], a[16], b[16];
    struct dn_memory m;
    dn_memory_read(&m);
    snprintf(text, sizeof text, "%s free of %s%s", dn_bytes_text(m.free_bytes, a), dn_bytes_text(m.total_bytes, b),
             m.is_limited ? ", a container's limit" : "");
    line(r, m.free_bytes < (1ull << 30), "memory", text);
}

static void check_files(struct report *r)
{
    struct rlimit l;
    char text[128];
    getrlimit(RLIMIT_NOFILE, &l);
    bool few = l.rlim_cur < 4096;
    snprintf(text, sizeof text, "%llu open files allowed%s", (unsigned long long)l.rlim_cur,
             few ? "; a connection takes two: raise it with ulimit -n 16384 or LimitNOFILE=" : "");
    line(r, few, "files", text);
}

struct survey {
    struct report *r;
    bool driver; /* there is an NVIDIA driver: then a GPU is expected to work */
    unsigned n_devices, n_lines;
};

/* The backend's first line is of the driver: a GPU needs it and one more. */
static void survey_line(void *ctx, bool usable, const char *text)
{
    struct survey *s = ctx;
    line(s->r, !usable && s->driver, "gpu", text);
    s->n_devices += usable && s->n_lines++ > 0;
}

static void check_gpu(struct report *r)
{
    char path[4096], text[DN_ERR_TEXT + 256];
    struct dn_err err;
    const struct dn_backend *b;
    bool driver = access("/dev/nvidiactl", F_OK) == 0;
    struct survey s = {.r = r, .driver = driver};
    int rc = dn_device_library(path, sizeof path, &err);
    if (rc == 0)
        rc = dn_kernels_load_library(path, &b, &err);
    if (rc == -DN_NOT_FOUND && !driver) {
        line(r, 0, "gpu", "no NVIDIA driver and no CUDA backend: it serves on the CPU");
    } else if (rc != 0) {
        snprintf(text, sizeof text, "%sthe CUDA backend can't be used: %s%s",
                 driver ? "an NVIDIA driver is there, but " : "", err.text,
                 strstr(err.text, "libcublasLt") ? " (of the CUDA 13 runtime: put its folder on LD_LIBRARY_PATH)" : "");
        line(r, 1, "gpu", text);
    } else {
        const char *commit = dn_commit_of(b);
        snprintf(text, sizeof text, "%.500s, commit %s", path, commit ? commit : "unknown");
        line(r, 0, "library", text);
        if (dn_commit_differs(b, text))
            line(r, 1, "library", text);
        if (b->survey)
            b->survey(survey_line, &s);
    }
    if (s.n_devices == 0 && (rc != -DN_NOT_FOUND || driver))
        line(r, driver, "gpu", "none to use: it serves on the CPU");
}

static void check_port(struct report *r, uint16_t port)
{
    char text[128];
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), on = 1;
    struct sockaddr_in a = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    bool free_port = bind(fd, (struct sockaddr *)&a, sizeof a) == 0;
    snprintf(text, sizeof text, "127.0.0.1:%u %s", port,
             free_port ? "is free" : "is taken; serve with --listen 127.0.0.1:OTHER");
    line(r, !free_port, "port", text);
    close(fd);
}

static void check_clock(struct report *r)
{
    char source[64] = "unknown";
    int fd = open("/sys/devices/system/clocksource/clocksource0/current_clocksource", O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        ssize_t n = read(fd, source, sizeof source - 1);
        source[n > 0 ? n - 1 : 0] = '\0';
        close(fd);
    }
    bool slow = strcmp(source, "hpet") == 0 || strcmp(source, "acpi_pm") == 0;
    char text[128];
    snprintf(text, sizeof text, "%s%s", source, slow ? ": reading the time is slow; latencies suffer" : "");
    line(r, slow, "clock", text);
}

int dn_cmd_doctor(int argc, char **argv)
{
    static const char usage[] =
        "dunlin doctor   what this machine has for serving, and what to do where something is missing\n";
    const struct dn_flag flag[] = {{NULL, NULL, NULL, NULL, NULL}};
    struct dn_args args;
    struct dn_err err = {0};
    bool help;
    if (dn_args_parse(argc, argv, usage, flag, &args, &help, &err) != 0) {
        fprintf(stderr, "dunlin: %s\n", err.text);
        return DN_EXIT_USAGE;
    }
    if (help)
        return DN_EXIT_OK;
    struct report r = {0};
    char version[96];
    snprintf(version, sizeof version, "dunlin %s, commit %s", DN_VERSION, dn_commit());
    line(&r, 0, "version", version);
    check_cpu(&r);
    check_gpu(&r);
    check_memory(&r);
    check_files(&r);
    check_clock(&r);
    check_port(&r, 8443);
    if (r.n_bad)
        printf("%u of these must be mended first\n", r.n_bad);
    else
        printf("ready: dunlin serve MODEL\n");
    return r.n_bad ? DN_EXIT_FAILED : DN_EXIT_OK;
}
