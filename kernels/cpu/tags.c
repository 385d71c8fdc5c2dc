#include "kernels/cpu/device.h"

#include <string.h>

/* Pages have tags of 8 bytes each, so that even 64 sequences of 4,096 tokens (16,384 pages of 16) take some 50 µs: not
 * worth waking threads. */
void dn_cpu_check_tags(struct dn_device *device, const struct dn_check_tags *p)
{
    struct dn_step *s = &dn_cpu(device)->step;
    if (dn_cpu(device)->measuring)
        return;
    DN_BUG_ON(s->tag_first > p->n_pages || s->n_tags > p->n_pages - s->tag_first);
    memcpy(p->table + s->tag_first, s->tag_new, s->n_tags * sizeof *s->tag_new);
    for (uint32_t q = 0; q < s->n_seqs; q++) {
        s->bad[q] = 0;
        if (!s->check[q])
            continue;
        for (int32_t i = s->page_start[q]; i < s->page_start[q + 1]; i++) {
            if (s->page[i] >= p->n_pages || p->table[s->page[i]] != s->tag[i]) {
                s->bad[q] = 1 + i - s->page_start[q];
                break;
            }
        }
    }
}
