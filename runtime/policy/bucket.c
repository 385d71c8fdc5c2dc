#include "policy/bucket.h"

#include "base/buf.h"
#include "base/clock.h"
#include "base/hash.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#define STRIPES        64
#define NAME_MAX_BYTES 191

struct entry {
    uint64_t hi; /* of the key's hash; the low half chose the set. 0 and at_ns 0: free */
    uint64_t lo;
    uint64_t at_ns;
    double level;
    uint32_t id;
};

struct definition {
    char name[NAME_MAX_BYTES + 1];
    _Atomic double rate, burst; /* changed by a reload while other threads take */
};

struct dn_buckets {
    struct dn_hash_key key;
    size_t n_sets;                   /* power of two, at least STRIPES */
    struct entry *entry;             /* [n_sets][DN_BUCKET_WAYS] */
    pthread_mutex_t stripe[STRIPES]; /* guards the sets s with s % STRIPES */
    pthread_mutex_t names;           /* guards the names and their growth */
    _Atomic unsigned n_definitions;
    struct definition definition[DN_BUCKET_NAMES];
    _Atomic uint64_t n_forgotten;
};

struct dn_buckets *dn_buckets_open(size_t n_keys)
{
    struct dn_buckets *b = dn_alloc0(1, sizeof *b);
    size_t want = (n_keys ? n_keys : DN_BUCKET_KEYS) / DN_BUCKET_WAYS;
    b->n_sets = STRIPES;
    while (b->n_sets < want && b->n_sets < (1u << 24))
        b->n_sets *= 2;
    b->entry = dn_alloc0(b->n_sets * DN_BUCKET_WAYS, sizeof *b->entry);
    b->key = dn_hash_key_random();
    for (int i = 0; i < STRIPES; i++)
        pthread_mutex_init(&b->stripe[i], NULL);
    pthread_mutex_init(&b->names, NULL);
    return b;
}

void dn_buckets_close(struct dn_buckets *b)
{
    if (!b)
        return;
    for (int i = 0; i < STRIPES; i++)
        pthread_mutex_destroy(&b->stripe[i]);
    pthread_mutex_destroy(&b->names);
    free(b->entry);
    free(b);
}

int dn_bucket_open(struct dn_buckets *b, const char *name, double rate, double burst, unsigned *id, struct dn_err *err)
{
    if (strlen(name) > NAME_MAX_BYTES)
        return dn_err_set(err, DN_POLICY, "bucket \"%.40s...\": name over %d bytes", name, NAME_MAX_BYTES);
    int rc = 0;
    pthread_mutex_lock(&b->names);
    unsigned n = atomic_load(&b->n_definitions), i = 0;
    while (i < n && strcmp(b->definition[i].name, name) != 0)
        i++;
    if (i == DN_BUCKET_NAMES) {
        rc = dn_err_set(err, DN_POLICY, "bucket \"%s\": there are %d buckets already: expected a few, with many keys",
                        name, DN_BUCKET_NAMES);
    } else {
        struct definition *d = &b->definition[i];
        atomic_store(&d->rate, rate);
        atomic_store(&d->burst, burst);
        if (i == n) {
            memcpy(d->name, name, strlen(name) + 1);
            atomic_store(&b->n_definitions, n + 1);
        }
        *id = i;
    }
    pthread_mutex_unlock(&b->names);
    return rc;
}

/* The place of a key, filled up to now. The caller holds its stripe's mutex. */
static struct entry *find(struct dn_buckets *b, unsigned id, struct dn_hash128 h, double rate, double burst,
                          uint64_t now_ns)
{
    struct entry *set = &b->entry[(h.lo & (b->n_sets - 1)) * DN_BUCKET_WAYS], *victim = NULL;
    double fullest = -INFINITY;
    for (int i = 0; i < DN_BUCKET_WAYS; i++) {
        struct entry *e = &set[i];
        if (e->at_ns && e->hi == h.hi && e->lo == h.lo && e->id == id) {
            if (now_ns > e->at_ns) {
                e->level += (double)(now_ns - e->at_ns) / 1e9 * rate;
                e->at_ns = now_ns;
            }
            e->level = e->level < burst ? e->level : burst;
            return e;
        }
        double full = INFINITY;
        if (e->at_ns) {
            const struct definition *d = &b->definition[e->id];
            double r = atomic_load(&d->rate), age_s = now_ns > e->at_ns ? (double)(now_ns - e->at_ns) / 1e9 : 0;
            double lacks = atomic_load(&d->burst) - e->level - age_s * r;
            full = lacks <= 0 ? INFINITY : -lacks / r; /* minus the seconds until it is full */
        }
        if (!victim || full > fullest) {
            victim = e;
            fullest = full;
        }
    }
    if (victim->at_ns && fullest < INFINITY)
        atomic_fetch_add(&b->n_forgotten, 1);
    *victim = (struct entry){.hi = h.hi, .lo = h.lo, .at_ns = now_ns ? now_ns : 1, .level = burst, .id = id};
    return victim;
}

enum action { TAKE, GIVE, LOOK };

static double act(struct dn_buckets *b, unsigned id, const char *key, size_t key_len, enum action action, double n,
                  uint64_t now_ns, double *wait_ms)
{
    if (id >= atomic_load(&b->n_definitions)) {
        *wait_ms = 1000;
        return 0;
    }
    struct definition *d = &b->definition[id];
    double rate = atomic_load(&d->rate), burst = atomic_load(&d->burst);
    struct dn_hash_key k = {b->key.k0 ^ id, b->key.k1};
    struct dn_hash128 h = dn_siphash128(k, key, key_len);
    pthread_mutex_t *stripe = &b->stripe[h.lo & (b->n_sets - 1) & (STRIPES - 1)];
    pthread_mutex_lock(stripe);
    struct entry *e = find(b, id, h, rate, burst, now_ns);
    *wait_ms = 0;
    if (action == TAKE) {
        double need = n < burst ? n : burst;
        if (e->level >= need)
            e->level -= n;
        else
            *wait_ms = ceil((need - e->level) / rate * 1000);
    } else if (action == GIVE) {
        e->level = e->level + n < burst ? e->level + n : burst;
    }
    double level = e->level;
    pthread_mutex_unlock(stripe);
    return level;
}

bool dn_bucket_take(struct dn_buckets *b, unsigned id, const char *key, size_t key_len, double n, uint64_t now_ns,
                    double *wait_ms)
{
    act(b, id, key, key_len, TAKE, n, now_ns, wait_ms);
    return *wait_ms == 0;
}

void dn_bucket_give(struct dn_buckets *b, unsigned id, const char *key, size_t key_len, double n, uint64_t now_ns)
{
    double unused;
    act(b, id, key, key_len, GIVE, n, now_ns, &unused);
}

double dn_bucket_level(struct dn_buckets *b, unsigned id, const char *key, size_t key_len, uint64_t now_ns)
{
    double unused;
    return act(b, id, key, key_len, LOOK, 0, now_ns, &unused);
}

uint64_t dn_buckets_forgotten(const struct dn_buckets *b)
{
    return atomic_load(&((struct dn_buckets *)b)->n_forgotten);
}

uint32_t dn_policy_hash(const char *key, size_t len, uint64_t n)
{
    uint64_t h = 0xcbf29ce484222325u;
    for (size_t i = 0; i < len; i++)
        h = (h ^ (unsigned char)key[i]) * 0x100000001b3u;
    h = (h ^ h >> 33) * 0xff51afd7ed558ccdu;
    h = (h ^ h >> 33) * 0xc4ceb9fe1a85ec53u;
    h ^= h >> 33;
    return (uint32_t)(h % n);
}
