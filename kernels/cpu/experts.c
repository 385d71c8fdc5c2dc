#include "kernels/cpu/device.h"

#include <string.h>

/* Pairs of a token and one of its experts, sorted by expert; then for each expert one product with its rows, gathered,
 * for gate and up, and one for down; then each token adds up what its experts gave, in their order. A row of a product
 * does not depend on the rows beside it, so a token's sum depends on nothing but the token. Large steps go in passes,
 * so that what lies between the products has a bound; of Kimi K2 a pass has 630 tokens, 13 rows for each of 384
 * experts, which keeps it bound by arithmetic. */
enum { PASS_BYTES = 256 << 20 };

struct call {
    const struct dn_cpu_device *d;
    const struct dn_experts *p;
    uint32_t dim, ff;
    size_t first, n; /* tokens of this pass */
    const int32_t *expert;
    uint32_t *start; /* [n_experts + 1] pairs of each expert */
    uint32_t *token; /* [pairs] in that order */
    uint32_t *place; /* [n_tokens][top_k] of a pair in it */
    float *gate_up;  /* [pairs][2 * ff] */
    float *mid;      /* [pairs][ff] */
    float *down;     /* [pairs][dim] */
};

static void sort_pairs(const struct call *c)
{
    const struct dn_experts *p = c->p;
    uint32_t n_experts = p->down->n_groups > 1 ? p->down->n_groups : 1;
    size_t pairs = c->n * p->top_k;
    memset(c->start, 0, (n_experts + 1) * sizeof *c->start);
    for (size_t i = 0; i < pairs; i++) {
        DN_BUG_ON(c->expert[i] < 0 || (uint32_t)c->expert[i] >= n_experts);
        c->start[c->expert[i] + 1]++;
    }
    for (uint32_t e = 0; e < n_experts; e++)
        c->start[e + 1] += c->start[e];
    for (size_t i = 0; i < pairs; i++) {
        uint32_t at = c->start[c->expert[i]]++;
        c->token[at] = (uint32_t)(i / p->top_k);
        c->place[i] = at;
    }
    /* start[e] is now the end of e, which is the start of e + 1. */
    memmove(c->start + 1, c->start, n_experts * sizeof *c->start);
    c->start[0] = 0;
}

static void activate(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    for (size_t i = begin; i < end; i++) {
        const float *gate = c->gate_up + i * 2 * c->ff;
        c->d->row->silu_mul(gate, gate + c->ff, c->ff, c->mid + i * c->ff);
    }
}

static void add_up(void *arg, size_t begin, size_t end, unsigned part)
{
    const struct call *c = arg;
    const struct dn_experts *p = c->p;
    size_t dim = c->dim, bytes = dim * sizeof(float);
    for (size_t t = begin; t < end; t++) {
        size_t at = (c->first + t) * dim;
        float *out = (float *)p->out + at;
        if (!p->add)
            memset(out, 0, bytes);
        else if (p->add != p->out)
            memcpy(out, (const float *)p->add + at, bytes);
        for (uint32_t k = 0; k < p->top_k; k++) {
            size_t pair = t * p->top_k + k;
            c->d->row->add_scaled(out, c->down + c->place[pair] * dim, p->weight[c->first * p->top_k + pair], dim);
        }
    }
}

/* Tokens of a pass. */
static size_t pass_tokens(const struct call *c, size_t n_tokens)
{
    size_t most = PASS_BYTES / (c->p->top_k * (3 * (size_t)c->ff + c->dim) * sizeof(float));
    most = most ? most : 1;
    return n_tokens < most ? n_tokens : most;
}

static void take(struct call *c, struct dn_cpu_device *d, void **grouped)
{
    const struct dn_experts *p = c->p;
    size_t n_experts = p->down->n_groups > 1 ? p->down->n_groups : 1;
    size_t pairs = pass_tokens(c, d->measuring ? d->limits.tokens : d->step.n_tokens) * p->top_k;
    size_t a = dn_cpu_grouped_scratch(&d->exec, p->gate_up), b = dn_cpu_grouped_scratch(&d->exec, p->down);
    size_t bytes = a > b ? a : b;
    *grouped = dn_cpu_take(d, DN_SCRATCH_THREAD, bytes, bytes);
    bytes = (n_experts + 1 + 2 * pairs) * sizeof *c->start;
    c->start = dn_cpu_take(d, DN_SCRATCH_ITEMS, bytes, bytes);
    bytes = pairs * 3 * c->ff * sizeof *c->mid;
    c->gate_up = dn_cpu_take(d, DN_SCRATCH_EXPANDED, bytes, bytes);
    bytes = pairs * c->dim * sizeof *c->down;
    c->down = dn_cpu_take(d, DN_SCRATCH_PARTS, bytes, bytes);
    if (d->measuring)
        return;
    c->token = c->start + n_experts + 1;
    c->place = c->token + pairs;
    c->mid = c->gate_up + pairs * 2 * c->ff;
}

static void run_pass(const struct call *c, const struct dn_cpu_exec *x, void *grouped)
{
    const struct dn_experts *p = c->p;
    sort_pairs(c);
    dn_cpu_matmul_grouped(x,
                          &(struct dn_cpu_grouped){.w = p->gate_up,
                                                   .a = (const float *)p->a + c->first * c->dim,
                                                   .a_stride = c->dim,
                                                   .out = c->gate_up,
                                                   .out_stride = 2 * (size_t)c->ff,
                                                   .start = c->start,
                                                   .index = c->token},
                          grouped);
    dn_threads_for(x->threads, c->n * p->top_k, c->ff < 4096 ? 4 : 1, activate, (void *)c);
    dn_cpu_matmul_grouped(
        x,
        &(struct dn_cpu_grouped){
            .w = p->down, .a = c->mid, .a_stride = c->ff, .out = c->down, .out_stride = c->dim, .start = c->start},
        grouped);
    dn_threads_for(x->threads, c->n, 1, add_up, (void *)c);
}

void dn_cpu_experts(struct dn_device *device, const struct dn_experts *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    const struct dn_matrix *g = p->gate_up, *down = p->down;
    struct call c = {.d = d, .p = p, .dim = g->n_in, .ff = down->n_in};
    DN_BUG_ON(p->top_k == 0 || p->top_k > DN_MAX_TOP_EXPERTS || g->n_out != 2 * (uint64_t)c.ff ||
              down->n_out != c.dim || g->n_groups != down->n_groups || g->n_groups > DN_MAX_EXPERTS);
    void *grouped;
    take(&c, d, &grouped);
    if (d->measuring)
        return;
    size_t n_tokens = d->step.n_tokens, n = pass_tokens(&c, n_tokens);
    for (; c.first < n_tokens; c.first += n) {
        c.n = n_tokens - c.first < n ? n_tokens - c.first : n;
        c.expert = p->expert + c.first * p->top_k;
        run_pass(&c, &d->exec, grouped);
    }
}
