/* Pages of the KV arena: who may use which, and the tag that proves it.
 *
 * For: giving pages of several formats out of one arena, in slabs, so that memory moves between formats; counting
 * references; keeping finished prefixes until the memory is wanted; and giving every page a 64-bit tag that changes at
 * each allocation and each free, so that a reader or writer with an old (page, tag) pair is found out before it touches
 * bytes that are no longer its own (bugreports.md rows 1-38).
 *
 * A page is in one of four states:
 *   free         refs = 0, on its slab's free list; its slab may change format when all its pages are free
 *   held         refs >= 1: sequences read it; exactly one writes it, until it is full
 *   cached       refs = 0 but the prefix index still knows it; in the LRU list; evicted when memory is wanted
 *   quarantined  taken out of use after a mismatch; never given out again in this process
 *
 * Owned by the pool; touched by the pool's thread alone. Sizes are fixed at open; nothing allocates afterwards.
 */
#ifndef DN_CACHE_PAGES_H
#define DN_CACHE_PAGES_H

#include "kernels/kernels.h"

/* What a page table holds: the page, and the tag it had when it was given to us. */
struct dn_page_ref {
    uint32_t page;
    uint64_t tag;
};

struct dn_pages;

/* n_slabs slabs as `layout` describes them. `seed` makes tags unguessable; pass random bytes (tests: any constant). */
struct dn_pages *dn_pages_open(const struct dn_kv_layout *layout, uint32_t n_slabs, uint64_t seed);
void dn_pages_close(struct dn_pages *p);

/* Called with each cached page that is evicted, so that the prefix index forgets it. */
void dn_pages_on_evict(struct dn_pages *p, void (*evict)(void *user, uint32_t page), void *user);

/* A fresh page, refs = 1, new tag. Evicts cached pages if it must. -DN_NO_MEMORY when every page is held. */
int dn_pages_take(struct dn_pages *p, enum dn_kv_format f, struct dn_page_ref *out);
/* One more reference to a held or cached page. -DN_KV_INTEGRITY if the page no longer has that tag. */
int dn_pages_get(struct dn_pages *p, struct dn_page_ref ref);
/* One reference less. The last one frees the page (new tag), or caches it if the prefix index knows it (`keep`).
 * A double free, a foreign or an outdated reference changes nothing and returns -DN_KV_INTEGRITY. */
int dn_pages_put(struct dn_pages *p, struct dn_page_ref ref, bool keep);
/* The prefix index no longer knows the page: a cached page becomes free. */
void dn_pages_forget(struct dn_pages *p, uint32_t page);

/* Takes a page that failed a check out of use. A page that others hold rightly stays theirs and is retired at its last
 * put. */
void dn_pages_quarantine(struct dn_pages *p, uint32_t page);
/* After a violation: `refs[page]` = references that sequences really have. A held page that nobody refers to any more
 * has been lost with the damaged table and is quarantined. Returns how many. */
uint32_t dn_pages_audit(struct dn_pages *p, const uint32_t *refs);

/* Whether `want[f]` further pages of each format can be had together, cached pages evicted if need be. Never changes
 * anything. */
bool dn_pages_can_take(const struct dn_pages *p, const uint32_t want[DN_KV_FORMATS]);
/* Those pages are promised now, in the place of all earlier promises: what dn_pages_can_take() says of them stays true
 * while they are taken, in any order of the formats. Each take counts as one kept. */
void dn_pages_promise(struct dn_pages *p, const uint32_t want[DN_KV_FORMATS]);

/* The truth about tags, [dn_pages_count()] long, and the range that changed since the last call (n = 0: none). */
const uint64_t *dn_pages_tags(const struct dn_pages *p);
void dn_pages_take_dirty(struct dn_pages *p, uint32_t *first, uint32_t *n);
uint32_t dn_pages_count(const struct dn_pages *p); /* page ids, the unused ones of large formats included */

struct dn_pages_stats {
    uint64_t bytes_total, bytes_held, bytes_cached, bytes_quarantined; /* bytes of whole pages */
    uint32_t held[DN_KV_FORMATS], cached[DN_KV_FORMATS];
    uint32_t slabs_free, slabs[DN_KV_FORMATS];
    uint32_t quarantined;
    uint64_t evictions, refused_refs; /* counters */
};
void dn_pages_stats(const struct dn_pages *p, struct dn_pages_stats *out);

#endif
