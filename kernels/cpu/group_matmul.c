#include "kernels/cpu/device.h"

void dn_cpu_group_matmul(struct dn_device *device, const struct dn_group_matmul *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    size_t bytes = dn_cpu_grouped_scratch(&d->exec, p->w);
    void *scratch = dn_cpu_take(d, DN_SCRATCH_THREAD, bytes, bytes);
    if (d->measuring)
        return;
    dn_cpu_matmul_grouped(&d->exec,
                          &(struct dn_cpu_grouped){.w = p->w,
                                                   .a = p->a,
                                                   .a_stride = p->a_stride,
                                                   .a_group_stride = p->a_group_stride,
                                                   .out = p->out,
                                                   .out_stride = p->out_stride,
                                                   .out_group_stride = p->out_group_stride,
                                                   .n = d->step.n_tokens},
                          scratch);
}
