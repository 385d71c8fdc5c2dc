#include "kernels/cpu/device.h"

struct call {
    const struct dn_row_ops *row;
    const struct dn_silu_mul *p;
};

enum { CHUNK = 1024 }; /* values of a row to a piece of work, some 1 µs: one long row is worth spreading too */

static size_t pieces(uint32_t dim)
{
    return (dim + CHUNK - 1) / CHUNK;
}

static void run(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    size_t dim = c->p->dim, per_row = pieces(c->p->dim);
    for (size_t i = begin; i < end; i++) {
        size_t t = i / per_row, at = i % per_row * CHUNK, n = dim - at < CHUNK ? dim - at : CHUNK;
        const float *gate = (const float *)c->p->gate_up + t * 2 * dim + at;
        c->row->silu_mul(gate, gate + dim, n, (float *)c->p->out + t * dim + at);
    }
}

void dn_cpu_silu_mul(struct dn_device *device, const struct dn_silu_mul *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    struct call c = {d->row, p};
    if (p->dim && !d->measuring)
        dn_threads_for(d->exec.threads, d->step.n_tokens * pieces(p->dim), 4, run, &c);
}
