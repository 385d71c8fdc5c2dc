#include "kernels/kernels.h"

#include <dlfcn.h>
#include <unistd.h>

int dn_kernels_load_library(const char *path, const struct dn_backend **out, struct dn_err *err)
{
    if (access(path, F_OK) != 0)
        return dn_err_set(err, DN_NOT_FOUND, "%s: no such file", path);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return dn_err_set(err, DN_CONFIG, "%s", dlerror());
    const struct dn_backend *b = dlsym(library, "dn_backend");
    int rc;
    if (!b) {
        rc = dn_err_set(err, DN_CONFIG, "%s: exports no dn_backend: not a backend of dunlin", path);
    } else if (b->abi != DN_KERNELS_ABI) {
        rc = dn_err_set(err, DN_CONFIG, "%s: backend of interface %u, this program has %d: build both together", path,
                        b->abi, DN_KERNELS_ABI);
    } else {
        *out = b;
        return 0;
    }
    dlclose(library);
    return rc;
}

int dn_kernels_open_library(const char *path, const struct dn_device_conf *conf, struct dn_device **out,
                            struct dn_err *err)
{
    const struct dn_backend *b;
    int rc = dn_kernels_load_library(path, &b, err);
    return rc ? rc : b->open(conf, out, err);
}
