/* The prefix index: which full pages hold which tokens, so that a later request can go on from them.
 *
 * A page is found by the hash of everything that makes its bytes what they are: a root (model, weights that wrote it,
 * KV format, tenant's salt; each length-prefixed) and the whole chain of tokens up to its end. The hash is keyed with a
 * secret of this process, and a hit still compares the tokens and the page before it, so that neither an accident nor
 * an attacker can make one prompt read another's cache. Only full pages whose step succeeded are entered.
 *
 * Owned by the pool and used by its thread, except dn_prefix_peek(), which any thread may call: it reads an advisory
 * table and may be a moment old. Memory is fixed at open.
 */
#ifndef DN_CACHE_PREFIX_H
#define DN_CACHE_PREFIX_H

#include "base/hash.h"
#include "cache/pages.h"

struct dn_prefix;

/* Indexes the pages of `pages` (one entry a page at most) and becomes its evict listener. */
struct dn_prefix *dn_prefix_open(struct dn_pages *pages, uint32_t page_tokens, struct dn_hash_key key);
void dn_prefix_close(struct dn_prefix *x);

/* Where the chain of a request starts. Strings may be ""; two different tuples never give one root. */
struct dn_hash128 dn_prefix_root(const struct dn_prefix *x, const char *model, const char *weights, enum dn_kv_format f,
                                 const void *salt, size_t n_salt);
/* The chain's next link: the page of `token`[page_tokens] behind `parent`. */
struct dn_hash128 dn_prefix_next(const struct dn_prefix *x, struct dn_hash128 parent, const int32_t *token);

/* The longest run of known pages at the start of token[0..n), at most max_pages. Takes a reference to each page; *chain
 * is the last page's hash (the root if none). Returns the number of pages. */
uint32_t dn_prefix_find(struct dn_prefix *x, struct dn_hash128 root, const int32_t *token, uint32_t n_tokens,
                        uint32_t max_pages, struct dn_page_ref *out, struct dn_hash128 *chain);
/* Enters a full page that the caller holds. If an equal page is known already, the older entry stays. */
void dn_prefix_enter(struct dn_prefix *x, struct dn_hash128 parent, struct dn_hash128 hash, const int32_t *token,
                     struct dn_page_ref ref);
bool dn_prefix_has(const struct dn_prefix *x, uint32_t page); /* whether the page is entered: dn_pages_put()'s `keep` */
void dn_prefix_forget(struct dn_prefix *x, uint32_t page);    /* a page that failed a check must not be found again */
void dn_prefix_clear(struct dn_prefix *x);

/* How many tokens of token[0..n) are probably cached. Any thread. */
uint32_t dn_prefix_peek(const struct dn_prefix *x, struct dn_hash128 root, const int32_t *token, uint32_t n_tokens);

struct dn_prefix_stats {
    uint64_t queries_tokens, hit_tokens; /* counters: asked for, found */
    uint32_t entries;
};
void dn_prefix_stats(const struct dn_prefix *x, struct dn_prefix_stats *out);

#endif
