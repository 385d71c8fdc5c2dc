#include "kernels/cpu/device.h"

/* Pages have tags of 8 bytes each, so that even 64 sequences of 4,096 tokens (16,384 pages of 16) take some 50 µs: not
 * worth waking threads. */
void dn_cpu_check_tags(struct dn_device *device, const struct dn_check_tags *p)
{
    struct dn_step *s = &dn_cpu(device)->step;
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
