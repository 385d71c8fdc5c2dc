/* Token buckets: budgets that fill at a rate and hold at most a burst, one for each key of a named bucket.
 *
 * The table belongs to the policy host and outlives reloads: a bucket that is opened again by the same name keeps its
 * levels, under the new rate and burst. All calls from any thread; a stripe's mutex is held for a few additions only
 * and never while Lua runs.
 *
 * The number of keys is bounded (DN_BUCKET_KEYS): a key has DN_BUCKET_WAYS places by its keyed hash; when all are
 * taken, the fullest bucket among them is forgotten, which is the one that loses its holder the least (a full bucket is
 * the same as none). So many invented keys can't grow memory, and can wipe a debt only by filling its eight places with
 * emptier buckets.
 */
#ifndef DN_POLICY_BUCKET_H
#define DN_POLICY_BUCKET_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define DN_BUCKET_NAMES 256
#define DN_BUCKET_WAYS  8
#define DN_BUCKET_KEYS  65536

struct dn_buckets;

struct dn_buckets *dn_buckets_open(size_t n_keys); /* rounded up to a power of two; 0: DN_BUCKET_KEYS */
void dn_buckets_close(struct dn_buckets *b);       /* NULL is fine */

/* The id of the bucket `name`, made if need be (a key starts full). rate: units a second; both > 0. Errors (DN_POLICY):
 * more than DN_BUCKET_NAMES names, a name over 191 bytes. */
int dn_bucket_open(struct dn_buckets *b, const char *name, double rate, double burst, unsigned *id, struct dn_err *err);

/* Takes n (>= 0) from a key's bucket: true, or false and the milliseconds until it could. More than the burst waits for
 * a full bucket and leaves a debt, so that a large request is late and not impossible. An unknown id is a full bucket
 * that never gives. */
bool dn_bucket_take(struct dn_buckets *b, unsigned id, const char *key, size_t key_len, double n, uint64_t now_ns,
                    double *wait_ms);
void dn_bucket_give(struct dn_buckets *b, unsigned id, const char *key, size_t key_len, double n, uint64_t now_ns);
double dn_bucket_level(struct dn_buckets *b, unsigned id, const char *key, size_t key_len, uint64_t now_ns);

uint64_t dn_buckets_forgotten(const struct dn_buckets *b); /* keys that lost their place, ever */

/* dunlin.hash: 0 .. n - 1, the same on every node and after every start. FNV-1a, then MurmurHash3's finalizer. */
uint32_t dn_policy_hash(const char *key, size_t len, uint64_t n);

#endif
