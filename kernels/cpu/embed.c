#include "kernels/cpu/device.h"

struct call {
    const struct dn_step *s;
    const struct dn_embed *p;
};

static void rows(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    for (size_t t = begin; t < end; t++) {
        uint32_t id = (uint32_t)c->s->token_id[t];
        DN_BUG_ON(id >= c->p->table->n_out);
        dn_cpu_matrix_row(c->p->table, id, c->p->out + t * c->p->table->n_in);
    }
}

void dn_cpu_embed(struct dn_device *device, const struct dn_embed *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    if (d->measuring)
        return;
    struct call c = {&d->step, p};
    dn_threads_for(d->exec.threads, d->step.n_tokens, 16, rows, &c);
}
