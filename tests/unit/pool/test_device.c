/* Which device a pool takes, what it says when there is none, and what happens when one is lost. */
#include "base/buf.h"
#include "engine/tiny.h"
#include "pool/device.h"
#include "pool/pool.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static const char lost_library[] = DN_BUILD_DIR "/tests/libbackend_lost.so";

static struct dn_model *tiny(void)
{
    struct dn_model *m;
    struct dn_err err = {0};
    char path[] = "/tmp/dunlin-tiny-XXXXXX";
    close(mkstemp(path));
    cr_assert_eq(dn_tiny_write(path, &err), 0, "%s", err.text);
    cr_assert_eq(dn_model_open(path, &m, &err), 0, "%s", err.text);
    unlink(path);
    return m;
}

static int open_pool(const char *device, const struct dn_model *m, struct dn_pool **out, struct dn_err *err)
{
    return dn_pool_open(&(struct dn_pool_conf){.backend = device, .n_threads = 1, .weights = DN_WEIGHTS_AUTO}, m, out,
                        err);
}

Test(device, names)
{
    struct dn_device_choice c;
    struct dn_err err;
    cr_assert_eq(dn_device_parse(NULL, &c, &err), 0);
    cr_assert_eq(c.kind, DN_DEVICE_AUTO);
    cr_assert_eq(dn_device_parse("auto", &c, &err), 0);
    cr_assert_eq(c.kind, DN_DEVICE_AUTO);
    cr_assert_eq(dn_device_parse("cpu", &c, &err), 0);
    cr_assert_eq(c.kind, DN_DEVICE_CPU);
    cr_assert_eq(dn_device_parse("cuda", &c, &err), 0);
    cr_assert(c.kind == DN_DEVICE_CUDA && c.index == 0 && !c.path);
    cr_assert_eq(dn_device_parse("cuda:17", &c, &err), 0);
    cr_assert(c.kind == DN_DEVICE_CUDA && c.index == 17);
    cr_assert_eq(dn_device_parse("./x.so", &c, &err), 0);
    cr_assert(c.kind == DN_DEVICE_CUDA && strcmp(c.path, "./x.so") == 0);
    static const char *const wrong[] = {"",        "gpu",     "CPU",     "cuda:",     "cuda:x",
                                        "cuda:-1", "cuda: 1", "cuda:1x", "cuda:99999"};
    for (size_t i = 0; i < sizeof wrong / sizeof *wrong; i++)
        cr_assert_eq(dn_device_parse(wrong[i], &c, &err), -DN_CONFIG, "%s", wrong[i]);
    cr_assert(strstr(err.text, "\"cuda:99999\""), "%s", err.text);
}

Test(device, auto_without_a_gpu_is_the_cpu_and_says_why)
{
    struct dn_model *m = tiny();
    struct dn_pool *p;
    struct dn_err err = {0};
    setenv("DN_CUDA_LIBRARY", "/nonexistent/libdunlin-cuda.so", 1);
    cr_assert_eq(open_pool(NULL, m, &p, &err), 0, "%s", err.text);
    cr_assert_str_eq(p->device->ops->name, "cpu");
    cr_assert(strstr(p->no_gpu, "/nonexistent/libdunlin-cuda.so"), "%s", p->no_gpu);
    cr_assert(p->conf.page_tokens == 16 && p->conf.max_sequences == 32 && p->conf.step_tokens == 512);
    cr_assert(p->device_total_bytes == 0 && p->workspace_bytes == 0 && p->conf.kv_bytes > 0);
    dn_pool_close(p);
    cr_assert_eq(open_pool("cuda", m, &p, &err), -DN_NOT_FOUND);
    cr_assert(strstr(err.text, "/nonexistent/libdunlin-cuda.so"), "%s", err.text);
    cr_assert_eq(open_pool("cpu", m, &p, &err), 0, "%s", err.text);
    cr_assert_str_eq(p->no_gpu, "");
    dn_pool_close(p);
    unsetenv("DN_CUDA_LIBRARY"); /* none lies beside a test */
    cr_assert_eq(open_pool("cuda", m, &p, &err), -DN_NOT_FOUND);
    cr_assert(strstr(err.text, "libdunlin-cuda.so"), "%s", err.text);
    dn_model_close(m);
}

Test(device, a_library_is_taken_by_auto_and_by_path)
{
    struct dn_model *m = tiny();
    struct dn_pool *p;
    struct dn_err err = {0};
    setenv("DN_CUDA_LIBRARY", lost_library, 1);
    cr_assert_eq(open_pool(NULL, m, &p, &err), 0, "%s", err.text);
    cr_assert_str_eq(p->no_gpu, "");
    cr_assert(p->conf.max_sequences == 64 && p->conf.step_tokens == 2048, "a backend's defaults");
    dn_pool_close(p);
    cr_assert_eq(open_pool("cuda:3", m, &p, &err), 0, "%s", err.text);
    dn_pool_close(p);
    cr_assert_eq(open_pool(lost_library, m, &p, &err), 0, "%s", err.text);
    dn_pool_close(p);
    cr_assert_eq(open_pool(DN_SOURCE_DIR "/README.md", m, &p, &err), -DN_CONFIG);
    dn_model_close(m);
}

/* Weights are large: what a backend does not compute is said before they are read. */
Test(device, a_model_that_a_backend_does_not_support)
{
    struct dn_model *m = tiny();
    struct dn_pool *p;
    struct dn_err err = {0};
    char sizes[96], same[16];
    snprintf(sizes, sizeof sizes, "heads of %u values, steps of 2048 tokens: expected heads of 7", m->hyper.head_dim);
    snprintf(same, sizeof same, "%u", m->hyper.head_dim);
    setenv("DN_CUDA_LIBRARY", lost_library, 1);
    setenv("DN_TEST_HEAD_DIM", "7", 1);
    cr_assert_eq(open_pool("cuda", m, &p, &err), -DN_CONFIG);
    cr_assert_str_eq(err.text, sizes);
    cr_assert_eq(open_pool("auto", m, &p, &err), 0, "%s", err.text);
    cr_assert_str_eq(p->device->ops->name, "cpu");
    cr_assert_str_eq(p->no_gpu, sizes);
    cr_assert_eq(p->conf.page_tokens, 16, "the CPU's defaults");
    dn_pool_close(p);
    setenv("DN_TEST_HEAD_DIM", same, 1);
    cr_assert_eq(open_pool("cuda", m, &p, &err), 0, "%s", err.text);
    dn_pool_close(p);
    dn_model_close(m);
}
