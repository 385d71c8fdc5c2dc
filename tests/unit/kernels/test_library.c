#include "kernels/kernels.h"

#include <criterion/criterion.h>
#include <string.h>

static const struct dn_device_conf conf = {
    .n_threads = 1, .limits = {.tokens = 4, .seqs = 2, .rows = 2, .pages = 8}, .n_slots = 1, .n_vocab = 16};

/* tests/fixtures/backend.c: the CPU's operations behind the interface of a loaded backend. */
Test(library, a_loaded_backend_works_like_a_built_in_one)
{
    struct dn_device *d;
    struct dn_err err = {0};
    cr_assert_eq(dn_kernels_open_library(DN_BUILD_DIR "/tests/libbackend_good.so", &conf, &d, &err), 0, "%s", err.text);
    float in = 3, back = 0;
    void *p = d->ops->alloc(d, sizeof in);
    d->ops->upload(d, p, &in, sizeof in);
    d->ops->download(d, &back, p, sizeof back);
    cr_assert_float_eq(back, 3, 0);
    d->ops->free(d, p);
    d->ops->close(d);
}

Test(library, refuses_what_is_no_backend_of_this_program)
{
    struct dn_device *d;
    struct dn_err err;
    cr_assert_eq(dn_kernels_open_library("/nonexistent/libdunlin-cuda.so", &conf, &d, &err), -DN_NOT_FOUND);
    cr_assert_eq(dn_kernels_open_library(DN_SOURCE_DIR "/README.md", &conf, &d, &err), -DN_CONFIG);
    cr_assert_eq(dn_kernels_open_library(DN_BUILD_DIR "/tests/libbackend_old.so", &conf, &d, &err), -DN_CONFIG);
    cr_assert(strstr(err.text, "interface 999"), "%s", err.text);
    cr_assert_eq(dn_kernels_open_library(DN_BUILD_DIR "/tests/libbackend_none.so", &conf, &d, &err), -DN_CONFIG);
    cr_assert(strstr(err.text, "dn_backend"), "%s", err.text);
}
