#include "pool/device.h"

#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char library_name[] = "libdunlin-cuda.so";

int dn_device_parse(const char *text, struct dn_device_choice *out, struct dn_err *err)
{
    struct dn_device_choice c = {.kind = DN_DEVICE_CUDA};
    if (!text || strcmp(text, "auto") == 0) {
        c.kind = DN_DEVICE_AUTO;
    } else if (strcmp(text, "cpu") == 0) {
        c.kind = DN_DEVICE_CPU;
    } else if (strncmp(text, "cuda:", 5) == 0) {
        char *end;
        unsigned long n = strtoul(text + 5, &end, 10);
        if (text[5] < '0' || text[5] > '9' || *end || n > 1023)
            return dn_err_set(err, DN_CONFIG, "device \"%s\": expected the number of a GPU after \"cuda:\"", text);
        c.index = (int)n;
    } else if (strchr(text, '/')) {
        c.path = text;
    } else if (strcmp(text, "cuda") != 0) {
        return dn_err_set(err, DN_CONFIG, "device \"%s\": expected auto, cpu, cuda or cuda:N", text);
    }
    *out = c;
    return 0;
}

int dn_device_library(char *path, size_t n, struct dn_err *err)
{
    const char *given = getenv("DN_CUDA_LIBRARY");
    if (given && *given) {
        snprintf(path, n, "%s", given);
        if (access(path, F_OK) == 0)
            return 0;
        return dn_err_set(err, DN_NOT_FOUND, "DN_CUDA_LIBRARY: %s: no such file", given);
    }
    char folder[PATH_MAX];
    ssize_t len = readlink("/proc/self/exe", folder, sizeof folder - 1);
    folder[len > 0 ? len : 0] = '\0';
    char *slash = strrchr(folder, '/');
    if (slash)
        *slash = '\0';
    static const char *const place[] = {"", "/../lib/dunlin"};
    for (size_t i = 0; i < sizeof place / sizeof *place; i++) {
        int wanted = snprintf(path, n, "%s%s/%s", folder, place[i], library_name);
        if (wanted > 0 && (size_t)wanted < n && access(path, F_OK) == 0)
            return 0;
    }
    return dn_err_set(err, DN_NOT_FOUND,
                      "%s is neither in %s nor in %s/../lib/dunlin: build it where nvcc is (./dev build) and put it "
                      "beside the program, or "
                      "name it in DN_CUDA_LIBRARY",
                      library_name, folder, folder);
}
