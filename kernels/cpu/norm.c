#include "kernels/cpu/device.h"

struct call {
    const struct dn_cpu_device *d;
    const struct dn_rmsnorm *p;
};

/* Values to a piece of work: some 4 µs. */
static size_t chunk(uint32_t dim)
{
    return dim >= 16384 ? 1 : 16384 / dim;
}

static void tokens(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    const struct dn_rmsnorm *p = c->p;
    for (size_t t = begin; t < end; t++) {
        float *x = p->x + t * p->dim;
        if (p->add)
            c->d->row->add(x, (const float *)p->add + t * p->dim, p->dim);
        if (!p->rows_only)
            c->d->row->rmsnorm(x, p->weight, p->eps, p->dim, (float *)p->out + t * p->dim);
    }
}

static void rows(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    const struct dn_rmsnorm *p = c->p;
    for (size_t r = begin; r < end; r++) {
        const float *x = p->x + (size_t)c->d->step.row_token[r] * p->dim;
        c->d->row->rmsnorm(x, p->weight, p->eps, p->dim, (float *)p->out + r * p->dim);
    }
}

void dn_cpu_rmsnorm(struct dn_device *device, const struct dn_rmsnorm *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    struct call c = {d, p};
    DN_BUG_ON(p->dim == 0);
    if (d->measuring)
        return;
    if (p->add || !p->rows_only)
        dn_threads_for(d->exec.threads, d->step.n_tokens, chunk(p->dim), tokens, &c);
    if (p->rows_only)
        dn_threads_for(d->exec.threads, d->step.n_rows, chunk(p->dim), rows, &c);
}

struct act_call {
    const struct dn_row_ops *row;
    const struct dn_norm_act *p;
};

static void act_rows(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct act_call *c = arg;
    const struct dn_norm_act *p = c->p;
    for (size_t t = begin; t < end; t++)
        c->row->rmsnorm((const float *)p->a + t * p->a_stride, p->weight, p->eps, p->dim, (float *)p->out + t * p->dim);
}

void dn_cpu_norm_act(struct dn_device *device, const struct dn_norm_act *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    struct act_call c = {d->row, p};
    DN_BUG_ON(p->dim == 0 || p->a_stride < p->dim);
    if (d->measuring)
        return;
    dn_threads_for(d->exec.threads, d->step.n_tokens, chunk(p->dim), act_rows, &c);
}
