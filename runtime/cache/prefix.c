#include "cache/prefix.h"

#include "base/buf.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { NONE = UINT32_MAX };

/* Entry i describes page i. */
struct entry {
    struct dn_hash128 hash, parent;
    uint64_t tag;  /* the page's tag when it was entered: a page that changed hands is never a hit */
    uint32_t next; /* in its bucket */
    bool used;
};

struct dn_prefix {
    struct dn_pages *pages;
    struct dn_hash_key key;
    uint32_t page_tokens, n_entries, n_used, bucket_mask;
    struct entry *entry;
    int32_t *token;            /* [n_entries][page_tokens] */
    uint32_t *bucket;          /* heads, NONE = empty */
    _Atomic uint64_t *present; /* [bucket_mask + 1] hash.lo of some entry in that bucket, or 0: what peek reads */
    struct dn_prefix_stats stats;
};

static void on_evict(void *user, uint32_t page)
{
    dn_prefix_forget(user, page);
}

struct dn_prefix *dn_prefix_open(struct dn_pages *pages, uint32_t page_tokens, struct dn_hash_key key)
{
    struct dn_prefix *x = dn_alloc0(1, sizeof *x);
    *x = (struct dn_prefix){.pages = pages, .key = key, .page_tokens = page_tokens, .n_entries = dn_pages_count(pages)};
    uint32_t n_buckets = 16;
    while (n_buckets < 2 * x->n_entries && n_buckets < 1u << 30)
        n_buckets *= 2;
    x->bucket_mask = n_buckets - 1;
    x->entry = dn_alloc0(x->n_entries, sizeof *x->entry);
    x->token = dn_alloc0((size_t)x->n_entries * page_tokens, sizeof *x->token);
    x->bucket = dn_alloc0(n_buckets, sizeof *x->bucket);
    x->present = dn_alloc0(n_buckets, sizeof *x->present);
    for (uint32_t i = 0; i < n_buckets; i++)
        x->bucket[i] = NONE;
    dn_pages_on_evict(pages, on_evict, x);
    return x;
}

void dn_prefix_close(struct dn_prefix *x)
{
    if (!x)
        return;
    dn_pages_on_evict(x->pages, NULL, NULL);
    free(x->entry);
    free(x->token);
    free(x->bucket);
    free((void *)x->present);
    free(x);
}

static void put_field(struct dn_buf *b, const void *data, size_t n)
{
    uint64_t len = n;
    dn_buf_put(b, &len, sizeof len);
    dn_buf_put(b, data, n);
}

struct dn_hash128 dn_prefix_root(const struct dn_prefix *x, const char *model, const char *weights, enum dn_kv_format f,
                                 const void *salt, size_t n_salt)
{
    struct dn_buf b = {0};
    uint8_t format = (uint8_t)f;
    put_field(&b, model, strlen(model));
    put_field(&b, weights, strlen(weights));
    put_field(&b, &format, 1);
    put_field(&b, salt, n_salt);
    struct dn_hash128 h = dn_siphash128(x->key, b.data, b.len);
    dn_buf_release(&b);
    return h;
}

struct dn_hash128 dn_prefix_next(const struct dn_prefix *x, struct dn_hash128 parent, const int32_t *token)
{
    /* The parent keys the link instead of being copied in front of the tokens; both depend on the process's secret. */
    struct dn_hash_key key = {x->key.k0 ^ parent.lo, x->key.k1 ^ parent.hi};
    struct dn_hash128 h = dn_siphash128(key, token, x->page_tokens * sizeof *token);
    h.lo += h.lo == 0; /* 0 means "empty" in present[] */
    return h;
}

static bool same(struct dn_hash128 a, struct dn_hash128 b)
{
    return a.lo == b.lo && a.hi == b.hi;
}

static uint32_t find(const struct dn_prefix *x, struct dn_hash128 parent, struct dn_hash128 hash, const int32_t *token)
{
    size_t bytes = x->page_tokens * sizeof *token;
    for (uint32_t i = x->bucket[hash.lo & x->bucket_mask]; i != NONE; i = x->entry[i].next) {
        const struct entry *e = &x->entry[i];
        if (same(e->hash, hash) && same(e->parent, parent) &&
            memcmp(&x->token[(size_t)i * x->page_tokens], token, bytes) == 0)
            return i;
    }
    return NONE;
}

uint32_t dn_prefix_find(struct dn_prefix *x, struct dn_hash128 root, const int32_t *token, uint32_t n_tokens,
                        uint32_t max_pages, struct dn_page_ref *out, struct dn_hash128 *chain)
{
    uint32_t n = 0;
    *chain = root;
    for (; n < max_pages && (uint64_t)(n + 1) * x->page_tokens <= n_tokens; n++) {
        const int32_t *t = token + (size_t)n * x->page_tokens;
        struct dn_hash128 hash = dn_prefix_next(x, *chain, t);
        uint32_t page = find(x, *chain, hash, t);
        if (page == NONE)
            break;
        struct dn_page_ref ref = {page, x->entry[page].tag};
        if (dn_pages_get(x->pages, ref) != 0) { /* the page changed hands under the index: a fault, never a hit */
            dn_prefix_forget(x, page);
            break;
        }
        out[n] = ref;
        *chain = hash;
    }
    x->stats.queries_tokens += n_tokens;
    x->stats.hit_tokens += (uint64_t)n * x->page_tokens;
    return n;
}

void dn_prefix_enter(struct dn_prefix *x, struct dn_hash128 parent, struct dn_hash128 hash, const int32_t *token,
                     struct dn_page_ref ref)
{
    if (find(x, parent, hash, token) != NONE)
        return;
    struct entry *e = &x->entry[ref.page];
    if (e->used)
        dn_prefix_forget(x, ref.page);
    uint32_t b = hash.lo & x->bucket_mask;
    *e = (struct entry){.hash = hash, .parent = parent, .tag = ref.tag, .next = x->bucket[b], .used = true};
    memcpy(&x->token[(size_t)ref.page * x->page_tokens], token, x->page_tokens * sizeof *token);
    x->bucket[b] = ref.page;
    atomic_store_explicit(&x->present[b], hash.lo, memory_order_relaxed);
    x->n_used++;
}

bool dn_prefix_has(const struct dn_prefix *x, uint32_t page)
{
    return x->entry[page].used;
}

void dn_prefix_forget(struct dn_prefix *x, uint32_t page)
{
    struct entry *e = &x->entry[page];
    if (!e->used)
        return;
    uint32_t b = e->hash.lo & x->bucket_mask;
    uint32_t *link = &x->bucket[b];
    while (*link != page)
        link = &x->entry[*link].next;
    *link = e->next;
    e->used = false;
    x->n_used--;
    uint64_t left = x->bucket[b] == NONE ? 0 : x->entry[x->bucket[b]].hash.lo;
    atomic_store_explicit(&x->present[b], left, memory_order_relaxed);
}

void dn_prefix_clear(struct dn_prefix *x)
{
    for (uint32_t i = 0; i < x->n_entries; i++) {
        if (x->entry[i].used) {
            dn_prefix_forget(x, i);
            dn_pages_forget(x->pages, i);
        }
    }
}

uint32_t dn_prefix_peek(const struct dn_prefix *x, struct dn_hash128 root, const int32_t *token, uint32_t n_tokens)
{
    uint32_t n = 0;
    for (struct dn_hash128 h = root; n_tokens - n >= x->page_tokens; n += x->page_tokens) {
        h = dn_prefix_next(x, h, token + n);
        if (atomic_load_explicit(&x->present[h.lo & x->bucket_mask], memory_order_relaxed) != h.lo)
            break;
    }
    return n;
}

void dn_prefix_stats(const struct dn_prefix *x, struct dn_prefix_stats *out)
{
    *out = x->stats;
    out->entries = x->n_used;
}
