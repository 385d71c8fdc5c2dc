#include "sched/snapshot.h"

#include <string.h>

void dn_snapshot_publish(struct dn_snapshot_cell *c, const struct dn_snapshot *s)
{
    uint64_t word[DN_SNAPSHOT_WORDS];
    memcpy(word, s, sizeof word);
    unsigned sequence = atomic_load_explicit(&c->sequence, memory_order_relaxed);
    atomic_store_explicit(&c->sequence, sequence + 1, memory_order_relaxed);
    atomic_thread_fence(memory_order_release); /* pairs with the acquire fence in dn_snapshot_read */
    for (int i = 0; i < DN_SNAPSHOT_WORDS; i++)
        atomic_store_explicit(&c->word[i], word[i], memory_order_relaxed);
    atomic_store_explicit(&c->sequence, sequence + 2, memory_order_release);
}

void dn_snapshot_read(struct dn_snapshot_cell *c, struct dn_snapshot *out)
{
    uint64_t word[DN_SNAPSHOT_WORDS];
    for (;;) {
        unsigned before = atomic_load_explicit(&c->sequence, memory_order_acquire);
        for (int i = 0; i < DN_SNAPSHOT_WORDS; i++)
            word[i] = atomic_load_explicit(&c->word[i], memory_order_relaxed);
        atomic_thread_fence(memory_order_acquire);
        if (before % 2 == 0 && atomic_load_explicit(&c->sequence, memory_order_relaxed) == before)
            break;
    }
    memcpy(out, word, sizeof *out);
}
