#include "kernels/cpu/device.h"

#include <string.h>

/* Pages have tags of 8 bytes each, so that even 64 sequences of 4,096 tokens (16,384 pages of 16) take some 50 µs: not
 * worth waking threads. */
void dn_cpu_check_tags(struct dn_device *device, const struct dn_check_tags *p)
{
    struct dn_cpu_device *d = dn_cpu(device);
    struct dn_step *s = &d->step;
    if (d->measuring)
        return;
    DN_BUG_ON(s->tag_first > p->n_pages || s->n_tags > p->n_pages - s->tag_first || p->page_tokens == 0);
    memcpy(p->table + s->tag_first, s->tag_new, s->n_tags * sizeof *s->tag_new);
    for (uint32_t q = 0; q < s->n_seqs; q++) {
        s->bad[q] = 0;
        if (!s->check[q])
            continue;
        const uint32_t *page = s->page + s->page_start[q];
        const uint64_t *tag = s->tag + s->page_start[q];
        uint32_t n = dn_cpu_pages_of(d, q, p->page_tokens);
        for (uint32_t i = 0; i < n && s->bad[q] == 0; i++)
            if (page[i] >= p->n_pages || p->table[page[i]] != tag[i])
                s->bad[q] = 1 + (int32_t)i;
    }
}
