#include "cli/bench_table.h"

#include "base/buf.h"
#include "cli/args.h"
#include "cli/cli.h"
#include "pool/device.h"

#include <dlfcn.h>
#include <errno.h>
#include <math.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#ifndef DN_COMMIT
#define DN_COMMIT "unknown"
#endif

int dn_bench_split(const char *flag, const char *text, struct dn_bench_list *out, struct dn_err *err)
{
    *out = (struct dn_bench_list){.copy = dn_strdup(text)};
    char *save;
    for (char *part = strtok_r(out->copy, ",", &save); part; part = strtok_r(NULL, ",", &save)) {
        if (out->n == DN_BENCH_MAX_LIST)
            return dn_err_set(err, DN_CONFIG, "--%s: at most %d values", flag, DN_BENCH_MAX_LIST);
        out->text[out->n++] = part;
    }
    return out->n ? 0 : dn_err_set(err, DN_CONFIG, "--%s: empty", flag);
}

int dn_bench_numbers(const char *flag, const char *text, uint64_t max, uint32_t *out, size_t *n, struct dn_err *err)
{
    struct dn_bench_list l;
    int code = dn_bench_split(flag, text, &l, err);
    for (size_t i = 0; i < l.n && code == 0; i++) {
        uint64_t value;
        code = dn_args_uint(l.text[i], flag, 1, max, true, &value, err);
        out[i] = (uint32_t)value;
    }
    *n = l.n;
    free(l.copy);
    return code;
}

static int open_library(const char *path, const struct dn_device_conf *conf, const struct dn_model_sizes *sizes,
                        size_t n_sizes, struct dn_device **out, struct dn_err *err)
{
    const struct dn_backend *b;
    int code = dn_kernels_load_library(path, &b, err);
    for (size_t i = 0; i < n_sizes && code == 0 && b->supports; i++)
        code = b->supports(&conf->limits, &sizes[i], err);
    return code ? code : b->open(conf, out, err);
}

int dn_bench_open_device(const char *name, const struct dn_device_conf *conf, const struct dn_model_sizes *sizes,
                         size_t n_sizes, struct dn_device **out, int *index, struct dn_err *err)
{
    struct dn_device_choice choice;
    struct dn_device_conf dc = *conf;
    char path[4096];
    int code = dn_device_parse(name, &choice, err);
    if (code != 0)
        return code;
    *index = -1;
    if (choice.kind == DN_DEVICE_CPU)
        return dn_kernels_open_cpu(&dc, out, err);
    dc.index = choice.index;
    code = choice.path ? 0 : dn_device_library(path, sizeof path, err);
    if (code == 0)
        code = open_library(choice.path ? choice.path : path, &dc, sizes, n_sizes, out, err);
    if (code == 0) {
        *index = choice.index;
        return 0;
    }
    if (choice.kind != DN_DEVICE_AUTO)
        return code;
    static bool is_said; /* who opens twice need not hear it twice */
    if (!is_said)
        fprintf(stderr, "# on the CPU: %s\n", err->text);
    is_said = true;
    *err = (struct dn_err){0};
    return dn_kernels_open_cpu(&dc, out, err);
}

/* ---- The table ---- */

int dn_bench_table_open(struct dn_bench_table *t, const struct dn_bench_column *column, const char *csv_path,
                        struct dn_err *err)
{
    *t = (struct dn_bench_table){.column = column, .csv_path = csv_path};
    if (csv_path && !(t->csv = fopen(csv_path, "ae")))
        return dn_err_set(err, DN_IO, "--csv %s: %s", csv_path, strerror(errno));
    return 0;
}

void dn_bench_table_head(struct dn_bench_table *t)
{
    const struct dn_bench_column *column = t->column;
    if (t->has_head)
        return;
    t->has_head = true;
    if (t->csv && ftruncate(fileno(t->csv), 0) != 0 && errno != EINVAL) /* EINVAL: a pipe, a terminal */
        fprintf(stderr, "# --csv %s: appended to what it holds: %s\n", t->csv_path, strerror(errno));
    for (size_t i = 0; column[i].name; i++) {
        bool is_last = !column[i + 1].name;
        printf("%*s%s", column[i].width, column[i].name, is_last ? "\n" : "  ");
        if (t->csv)
            fprintf(t->csv, "%s%s", column[i].csv, is_last ? "\n" : ",");
    }
    fflush(stdout);
    if (t->csv)
        fflush(t->csv);
}

int dn_bench_table_close(struct dn_bench_table *t, struct dn_err *err)
{
    FILE *csv = t->csv;
    t->csv = NULL;
    if (!csv)
        return 0;
    bool failed = ferror(csv) != 0;
    if (fclose(csv) == 0 && !failed)
        return 0;
    return dn_err_set(err, DN_IO, "--csv %s: not all of it could be written", t->csv_path);
}

static void cell(struct dn_bench_table *t, const char *shown, const char *stored)
{
    const struct dn_bench_column *c = &t->column[t->at];
    bool is_last = !c[1].name;
    printf("%*s%s", c->width, shown, is_last ? "\n" : "  ");
    if (t->csv)
        fprintf(t->csv, "%s%s", stored, is_last ? "\n" : ",");
    t->at = is_last ? 0 : t->at + 1;
    if (!is_last)
        return;
    fflush(stdout);
    if (t->csv)
        fflush(t->csv);
}

void dn_bench_text(struct dn_bench_table *t, const char *text)
{
    cell(t, text, text);
}

void dn_bench_number(struct dn_bench_table *t, int decimals, double x)
{
    char text[64];
    snprintf(text, sizeof text, "%.*f", decimals, x);
    if (isnan(x))
        cell(t, "-", "");
    else
        cell(t, text, text);
}

/* ---- Head ---- */

/* NVML comes with the driver. Its number of a GPU is CUDA's, unless CUDA_VISIBLE_DEVICES says otherwise. */
struct nvml {
    void *library;
    int (*init)(void);
    int (*handle)(unsigned index, void **device);
    int (*clock)(void *device, int which, unsigned *mhz); /* 1: SM, 2: memory */
    int (*max_clock)(void *device, int which, unsigned *mhz);
    int (*power)(void *device, unsigned *milliwatts);
    int (*temperature)(void *device, int sensor, unsigned *celsius);
};

static bool open_nvml(struct nvml *n)
{
    const struct {
        const char *name;
        void *to;
    } symbol[] = {{"nvmlInit_v2", &n->init},
                  {"nvmlDeviceGetHandleByIndex_v2", &n->handle},
                  {"nvmlDeviceGetClockInfo", &n->clock},
                  {"nvmlDeviceGetMaxClockInfo", &n->max_clock},
                  {"nvmlDeviceGetPowerUsage", &n->power},
                  {"nvmlDeviceGetTemperature", &n->temperature}};
    n->library = dlopen("libnvidia-ml.so.1", RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; n->library && i < sizeof symbol / sizeof *symbol; i++) {
        void *p = dlsym(n->library, symbol[i].name);
        if (!p)
            return false;
        memcpy(symbol[i].to, &p, sizeof p);
    }
    return n->library && n->init() == 0;
}

void dn_bench_print_clocks(int index)
{
    struct nvml n = {0};
    void *device;
    unsigned sm, memory, highest, milliwatts, celsius;
    if (index >= 0 && open_nvml(&n) && n.handle((unsigned)index, &device) == 0 && n.clock(device, 1, &sm) == 0 &&
        n.clock(device, 2, &memory) == 0 && n.max_clock(device, 1, &highest) == 0 &&
        n.power(device, &milliwatts) == 0 && n.temperature(device, 0, &celsius) == 0)
        printf("# now: SM %u MHz (highest %u), memory %u MHz, %.0f W, %u C\n", sm, highest, memory, milliwatts * 1e-3,
               celsius);
    if (n.library)
        dlclose(n.library);
}

void dn_bench_print_head(const struct dn_device *d, double read_rate, int index)
{
    char text[256];
    d->ops->describe(d, text, sizeof text);
    printf("# dunlin %s, commit %s\n# device: %s\n", DN_VERSION, DN_COMMIT, text);
    dn_bench_print_clocks(index);
    if (read_rate > 0)
        printf("# memory can be read at %.*f GB/s (measured now)\n", read_rate < 1e11 ? 1 : 0, read_rate * 1e-9);
    fflush(stdout);
}

/* ---- Stopping ---- */

static volatile sig_atomic_t stop_asked;

static void on_stop(int signal)
{
    static const char text[] = "# stopping behind this row; once more stops at once\n";
    (void)signal;
    stop_asked = 1;
    ssize_t n = write(STDERR_FILENO, text, sizeof text - 1);
    (void)n;
}

void dn_bench_catch_stop(bool on)
{
    const struct sigaction a = {.sa_handler = on ? on_stop : SIG_DFL, .sa_flags = (int)SA_RESETHAND | SA_RESTART};
    sigaction(SIGINT, &a, NULL);
    sigaction(SIGTERM, &a, NULL);
}

bool dn_bench_stopped(void)
{
    return stop_asked != 0;
}

/* ---- Numbers ---- */

static int by_value(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

double dn_bench_quantile(double *x, size_t n, double part)
{
    qsort(x, n, sizeof *x, by_value);
    size_t at = (size_t)(part * (double)n);
    return x[at < n ? at : n - 1];
}

uint64_t dn_bench_random(uint64_t *state)
{
    uint64_t z = (*state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}
