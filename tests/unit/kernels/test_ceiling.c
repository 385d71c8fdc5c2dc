/* The yardstick of benchmarks: a rate that memory can have, and all of its memory given back. */
#include "kernels/kernels.h"

#include <criterion/criterion.h>
#include <stdint.h>

Test(ceiling, read_rate_is_one_that_memory_can_have)
{
    const struct dn_device_conf conf = {
        .n_threads = 2, .limits = {.tokens = 1, .seqs = 1, .rows = 1, .pages = 1, .tags = 1}, .n_vocab = 1};
    struct dn_device *d;
    struct dn_err err = {0};
    cr_assert_eq(dn_kernels_open_cpu(&conf, &d, &err), 0, "%s", err.text);
    for (int i = 0; i < 3; i++) {
        double rate = d->ops->read_rate(d, 64 << 20);
        cr_assert(rate > 1e8 && rate < 1e13, "%g bytes a second", rate);
    }
    cr_assert_eq(d->ops->read_rate(d, SIZE_MAX / 2), 0, "no machine has this much");
    d->ops->close(d);
}
