#include "cache/pages.h"

#include "base/buf.h"

#include <stdlib.h>
#include <string.h>

enum { NONE = UINT32_MAX };

enum page_state { PAGE_UNUSED, PAGE_FREE, PAGE_HELD, PAGE_CACHED, PAGE_QUARANTINED };

struct page {
    uint32_t refs;
    uint8_t state;
    bool suspect;        /* quarantine it at its last put */
    uint32_t prev, next; /* free list of the slab, or LRU list */
};

/* A slab without format has no usable page; one with a format has pages_per_slab[f] of them. */
struct slab {
    int8_t format; /* -1: none */
    uint32_t first_free;
    uint32_t n_free, n_held, n_cached, n_quarantined;
};

struct list {
    uint32_t first, last; /* oldest first */
};

struct dn_pages {
    struct dn_kv_layout layout;
    uint32_t n_slabs, n_pages;
    struct page *page;
    struct slab *slab;
    uint64_t *tag;
    uint64_t epoch, seed;
    struct list lru[DN_KV_FORMATS];
    uint32_t promised[DN_KV_FORMATS];
    uint32_t dirty_first, dirty_end;
    void (*evict)(void *user, uint32_t page);
    void *evict_user;
    uint64_t evictions, refused_refs;
};

/* A bijection of the epoch (splitmix64's finaliser), so tags never repeat and say nothing about each other. */
static uint64_t next_tag(struct dn_pages *p)
{
    uint64_t z = ++p->epoch + p->seed;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return z ^ (z >> 31);
}

static void retag(struct dn_pages *p, uint32_t page)
{
    p->tag[page] = next_tag(p);
    if (page < p->dirty_first)
        p->dirty_first = page;
    if (page + 1 > p->dirty_end)
        p->dirty_end = page + 1;
}

static struct slab *slab_of(const struct dn_pages *p, uint32_t page)
{
    return &p->slab[page / p->layout.slab_pages];
}

static void list_push(struct dn_pages *p, struct list *l, uint32_t page)
{
    struct page *g = &p->page[page];
    g->next = NONE;
    g->prev = l->last;
    if (l->last != NONE)
        p->page[l->last].next = page;
    else
        l->first = page;
    l->last = page;
}

static void list_remove(struct dn_pages *p, struct list *l, uint32_t page)
{
    struct page *g = &p->page[page];
    if (g->prev != NONE)
        p->page[g->prev].next = g->next;
    else
        l->first = g->next;
    if (g->next != NONE)
        p->page[g->next].prev = g->prev;
    else
        l->last = g->prev;
}

struct dn_pages *dn_pages_open(const struct dn_kv_layout *layout, uint32_t n_slabs, uint64_t seed)
{
    struct dn_pages *p = dn_alloc0(1, sizeof *p);
    DN_BUG_ON(n_slabs == 0 || n_slabs > UINT32_MAX / 2 / layout->slab_pages);
    p->layout = *layout;
    p->n_slabs = n_slabs;
    p->n_pages = n_slabs * layout->slab_pages;
    p->page = dn_alloc0(p->n_pages, sizeof *p->page);
    p->slab = dn_alloc0(n_slabs, sizeof *p->slab);
    p->tag = dn_alloc0(p->n_pages, sizeof *p->tag);
    p->seed = seed;
    for (uint32_t s = 0; s < n_slabs; s++)
        p->slab[s] = (struct slab){.format = -1, .first_free = NONE};
    for (int f = 0; f < DN_KV_FORMATS; f++)
        p->lru[f] = (struct list){NONE, NONE};
    p->dirty_first = NONE;
    for (uint32_t i = 0; i < p->n_pages; i++)
        retag(p, i);
    return p;
}

void dn_pages_close(struct dn_pages *p)
{
    if (!p)
        return;
    free(p->page);
    free(p->slab);
    free(p->tag);
    free(p);
}

void dn_pages_on_evict(struct dn_pages *p, void (*evict)(void *user, uint32_t page), void *user)
{
    p->evict = evict;
    p->evict_user = user;
}

static void slab_set_format(struct dn_pages *p, uint32_t s, enum dn_kv_format f)
{
    struct slab *slab = &p->slab[s];
    uint32_t n = p->layout.format[f].pages_per_slab;
    *slab = (struct slab){.format = (int8_t)f, .first_free = NONE, .n_free = n};
    for (uint32_t i = n; i-- > 0;) {
        uint32_t page = s * p->layout.slab_pages + i;
        p->page[page] = (struct page){.state = PAGE_FREE, .prev = NONE, .next = slab->first_free};
        slab->first_free = page;
    }
    for (uint32_t i = n; i < p->layout.slab_pages; i++)
        p->page[s * p->layout.slab_pages + i].state = PAGE_UNUSED;
}

/* The page becomes free under a new tag; an empty slab loses its format. */
static void free_page(struct dn_pages *p, uint32_t page)
{
    struct slab *slab = slab_of(p, page);
    struct page *g = &p->page[page];
    retag(p, page);
    if (g->suspect) {
        g->state = PAGE_QUARANTINED;
        slab->n_quarantined++;
        return;
    }
    g->state = PAGE_FREE;
    g->next = slab->first_free;
    slab->first_free = page;
    slab->n_free++;
    if (slab->n_held + slab->n_cached + slab->n_quarantined == 0) {
        uint32_t first = (uint32_t)(slab - p->slab) * p->layout.slab_pages;
        for (uint32_t i = 0; i < p->layout.slab_pages; i++)
            p->page[first + i].state = PAGE_UNUSED;
        *slab = (struct slab){.format = -1, .first_free = NONE};
    }
}

static void evict_page(struct dn_pages *p, uint32_t page)
{
    struct slab *slab = slab_of(p, page);
    list_remove(p, &p->lru[slab->format], page);
    slab->n_cached--;
    p->evictions++;
    if (p->evict)
        p->evict(p->evict_user, page);
    free_page(p, page);
}

/* A slab whose pages are all free or cached can be emptied for another format; the one with the fewest cached pages
 * loses least. */
static uint32_t find_emptiable_slab(const struct dn_pages *p)
{
    uint32_t best = NONE;
    for (uint32_t s = 0; s < p->n_slabs; s++) {
        const struct slab *slab = &p->slab[s];
        if (slab->format < 0 || slab->n_held + slab->n_quarantined > 0)
            continue;
        if (best == NONE || slab->n_cached < p->slab[best].n_cached)
            best = s;
    }
    return best;
}

/* No page of it is held: its memory can still become any format's. */
static bool is_whole(const struct slab *slab)
{
    return slab->format < 0 || slab->n_held + slab->n_quarantined == 0;
}

/* Whole slabs that a format needs for `want` pages when slabs in use have `have` left for it. */
static uint64_t slabs_needed(const struct dn_pages *p, int f, uint64_t want, uint64_t have)
{
    uint32_t per_slab = p->layout.format[f].pages_per_slab;
    return want > have ? (want - have + per_slab - 1) / per_slab : 0;
}

/* The longest unused page of a slab in use. */
static uint32_t oldest_in_use(const struct dn_pages *p, enum dn_kv_format f)
{
    uint32_t page = p->lru[f].first;
    while (page != NONE && is_whole(slab_of(p, page)))
        page = p->page[page].next;
    return page;
}

static uint32_t take_oldest(struct dn_pages *p, enum dn_kv_format f, uint32_t page)
{
    struct slab *slab = slab_of(p, page);
    evict_page(p, page);
    if (slab->format < 0)
        slab_set_format(p, (uint32_t)(slab - p->slab), f);
    return slab->first_free;
}

static uint32_t empty_slab(struct dn_pages *p, enum dn_kv_format f)
{
    uint32_t s = find_emptiable_slab(p);
    if (s == NONE)
        return NONE;
    uint32_t first = s * p->layout.slab_pages;
    for (uint32_t i = 0; i < p->layout.slab_pages && p->slab[s].format >= 0; i++)
        if (p->page[first + i].state == PAGE_CACHED)
            evict_page(p, first + i);
    slab_set_format(p, s, f);
    return p->slab[s].first_free;
}

/* Slabs in use are filled first, from the front, so that others stay whole. A whole one is opened before cached pages
 * are evicted, unless the other format's promises need it. */
static uint32_t find_free(struct dn_pages *p, enum dn_kv_format f)
{
    uint32_t own = NONE, empty = NONE;
    uint64_t have[DN_KV_FORMATS] = {0}, n_whole = 0, n_needed = 0;
    for (uint32_t s = 0; s < p->n_slabs; s++) {
        const struct slab *slab = &p->slab[s];
        if (!is_whole(slab) && slab->format == (int8_t)f && slab->n_free > 0)
            return slab->first_free;
        if (!is_whole(slab)) {
            have[slab->format] += slab->n_free + slab->n_cached;
            continue;
        }
        n_whole++;
        if (slab->format < 0 && empty == NONE)
            empty = s;
        else if (slab->format == (int8_t)f && slab->n_free > 0 && own == NONE)
            own = s;
    }
    for (int other = 0; other < DN_KV_FORMATS; other++)
        if (other != (int)f)
            n_needed += slabs_needed(p, other, p->promised[other], have[other]);
    uint32_t oldest = n_whole > n_needed ? NONE : oldest_in_use(p, f);
    if (oldest != NONE)
        return take_oldest(p, f, oldest);
    if (own != NONE)
        return p->slab[own].first_free;
    if (empty != NONE) {
        slab_set_format(p, empty, f);
        return p->slab[empty].first_free;
    }
    return p->lru[f].first != NONE ? take_oldest(p, f, p->lru[f].first) : empty_slab(p, f);
}

int dn_pages_take(struct dn_pages *p, enum dn_kv_format f, struct dn_page_ref *out)
{
    uint32_t page = find_free(p, f);
    if (page == NONE)
        return -DN_NO_MEMORY;
    struct slab *slab = slab_of(p, page);
    struct page *g = &p->page[page];
    DN_BUG_ON(g->state != PAGE_FREE || slab->first_free != page);
    slab->first_free = g->next;
    slab->n_free--;
    slab->n_held++;
    p->promised[f] -= p->promised[f] > 0;
    *g = (struct page){.refs = 1, .state = PAGE_HELD};
    retag(p, page);
    *out = (struct dn_page_ref){page, p->tag[page]};
    return 0;
}

static bool is_current(struct dn_pages *p, struct dn_page_ref ref)
{
    if (ref.page < p->n_pages && p->tag[ref.page] == ref.tag)
        return true;
    p->refused_refs++;
    return false;
}

int dn_pages_get(struct dn_pages *p, struct dn_page_ref ref)
{
    if (!is_current(p, ref))
        return -DN_KV_INTEGRITY;
    struct page *g = &p->page[ref.page];
    struct slab *slab = slab_of(p, ref.page);
    if (g->state == PAGE_CACHED && !g->suspect) {
        list_remove(p, &p->lru[slab->format], ref.page);
        slab->n_cached--;
        slab->n_held++;
        g->state = PAGE_HELD;
    } else if (g->state != PAGE_HELD || g->suspect) {
        p->refused_refs++;
        return -DN_KV_INTEGRITY;
    }
    g->refs++;
    return 0;
}

int dn_pages_put(struct dn_pages *p, struct dn_page_ref ref, bool keep)
{
    if (!is_current(p, ref))
        return -DN_KV_INTEGRITY;
    struct page *g = &p->page[ref.page];
    if (g->state != PAGE_HELD) {
        p->refused_refs++;
        return -DN_KV_INTEGRITY;
    }
    if (--g->refs > 0)
        return 0;
    struct slab *slab = slab_of(p, ref.page);
    slab->n_held--;
    if (keep && !g->suspect) {
        g->state = PAGE_CACHED;
        slab->n_cached++;
        list_push(p, &p->lru[slab->format], ref.page);
    } else {
        free_page(p, ref.page);
    }
    return 0;
}

void dn_pages_forget(struct dn_pages *p, uint32_t page)
{
    if (p->page[page].state != PAGE_CACHED)
        return;
    struct slab *slab = slab_of(p, page);
    list_remove(p, &p->lru[slab->format], page);
    slab->n_cached--;
    free_page(p, page);
}

/* Takes a free page out of its slab's free list. */
static void unlink_free(struct dn_pages *p, uint32_t page)
{
    struct slab *slab = slab_of(p, page);
    uint32_t *link = &slab->first_free;
    while (*link != page)
        link = &p->page[*link].next;
    *link = p->page[page].next;
    slab->n_free--;
}

void dn_pages_quarantine(struct dn_pages *p, uint32_t page)
{
    if (page >= p->n_pages)
        return;
    struct page *g = &p->page[page];
    struct slab *slab = slab_of(p, page);
    switch ((enum page_state)g->state) {
    case PAGE_UNUSED:
    case PAGE_QUARANTINED:
        return;
    case PAGE_HELD:
        g->suspect = true;
        return;
    case PAGE_CACHED:
        g->suspect = true;
        evict_page(p, page);
        return;
    case PAGE_FREE:
        unlink_free(p, page);
        g->state = PAGE_QUARANTINED;
        slab->n_quarantined++;
        retag(p, page);
        return;
    }
}

uint32_t dn_pages_audit(struct dn_pages *p, const uint32_t *refs)
{
    uint32_t n_lost = 0;
    for (uint32_t i = 0; i < p->n_pages; i++) {
        struct page *g = &p->page[i];
        if (g->state != PAGE_HELD)
            continue;
        if (refs[i] == 0) {
            g->suspect = true;
            g->refs = 0;
            slab_of(p, i)->n_held--;
            free_page(p, i);
            n_lost++;
        } else if (refs[i] < g->refs) {
            g->refs = refs[i];
        }
    }
    return n_lost;
}

bool dn_pages_can_take(const struct dn_pages *p, const uint32_t want[DN_KV_FORMATS])
{
    /* What slabs in use have left, and how many slabs could still change their format. */
    uint64_t have[DN_KV_FORMATS] = {0}, n_whole = 0, n_needed = 0;
    for (uint32_t s = 0; s < p->n_slabs; s++) {
        const struct slab *slab = &p->slab[s];
        if (is_whole(slab))
            n_whole++;
        else
            have[slab->format] += slab->n_free + slab->n_cached;
    }
    for (int f = 0; f < DN_KV_FORMATS; f++)
        n_needed += slabs_needed(p, f, want[f], have[f]);
    return n_needed <= n_whole;
}

void dn_pages_promise(struct dn_pages *p, const uint32_t want[DN_KV_FORMATS])
{
    memcpy(p->promised, want, sizeof p->promised);
}

const uint64_t *dn_pages_tags(const struct dn_pages *p)
{
    return p->tag;
}

void dn_pages_take_dirty(struct dn_pages *p, uint32_t *first, uint32_t *n)
{
    *first = p->dirty_first;
    *n = p->dirty_end > p->dirty_first ? p->dirty_end - p->dirty_first : 0;
    p->dirty_first = NONE;
    p->dirty_end = 0;
}

uint32_t dn_pages_count(const struct dn_pages *p)
{
    return p->n_pages;
}

void dn_pages_stats(const struct dn_pages *p, struct dn_pages_stats *out)
{
    *out = (struct dn_pages_stats){.evictions = p->evictions, .refused_refs = p->refused_refs};
    out->bytes_total = (uint64_t)p->n_slabs * p->layout.slab_bytes;
    for (uint32_t s = 0; s < p->n_slabs; s++) {
        const struct slab *slab = &p->slab[s];
        if (slab->format < 0) {
            out->slabs_free++;
            continue;
        }
        uint64_t page_bytes = p->layout.format[slab->format].page_bytes;
        out->slabs[slab->format]++;
        out->held[slab->format] += slab->n_held;
        out->cached[slab->format] += slab->n_cached;
        out->quarantined += slab->n_quarantined;
        out->bytes_held += slab->n_held * page_bytes;
        out->bytes_cached += slab->n_cached * page_bytes;
        out->bytes_quarantined += slab->n_quarantined * page_bytes;
    }
}
