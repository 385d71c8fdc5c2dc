#include "http/ip_table.h"

#include "base/buf.h"
#include "base/err.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct dn_ip_entry {
    struct dn_ip_entry *next;
    struct dn_ip_key key;
    uint32_t n;
};

static const uint8_t *v4_of(const struct sockaddr *addr)
{
    if (addr->sa_family == AF_INET)
        return (const uint8_t *)&((const struct sockaddr_in *)addr)->sin_addr;
    if (addr->sa_family == AF_INET6) {
        const struct in6_addr *a = &((const struct sockaddr_in6 *)addr)->sin6_addr;
        if (IN6_IS_ADDR_V4MAPPED(a))
            return a->s6_addr + 12;
    }
    return NULL;
}

struct dn_ip_key dn_ip_key(const struct sockaddr *peer)
{
    struct dn_ip_key key = {0};
    const uint8_t *v4 = v4_of(peer);
    if (v4) {
        memcpy(key.byte, v4, 4);
    } else if (peer->sa_family == AF_INET6) {
        memcpy(key.byte, &((const struct sockaddr_in6 *)peer)->sin6_addr, 8);
        key.is_v6 = 1;
    }
    return key;
}

bool dn_ip_is_loopback(const struct sockaddr *addr)
{
    const uint8_t *v4 = v4_of(addr);
    if (v4)
        return v4[0] == 127;
    return addr->sa_family == AF_INET6 && IN6_IS_ADDR_LOOPBACK(&((const struct sockaddr_in6 *)addr)->sin6_addr);
}

void dn_ip_print(const struct sockaddr *addr, char *text, size_t n)
{
    const uint8_t *v4 = v4_of(addr);
    const char *ok = NULL;
    if (v4)
        ok = inet_ntop(AF_INET, v4, text, (socklen_t)n);
    else if (addr->sa_family == AF_INET6)
        ok = inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)addr)->sin6_addr, text, (socklen_t)n);
    if (!ok)
        snprintf(text, n, "unknown");
}

static size_t hash(const struct dn_ip_key *key)
{
    uint64_t h;
    memcpy(&h, key->byte, 8);
    h = (h ^ key->is_v6) * 0x9e3779b97f4a7c15ull;
    return (size_t)(h >> 32);
}

static bool same(const struct dn_ip_key *a, const struct dn_ip_key *b)
{
    return a->is_v6 == b->is_v6 && memcmp(a->byte, b->byte, sizeof a->byte) == 0;
}

static void grow(struct dn_ip_table *t)
{
    size_t n = t->n_buckets ? t->n_buckets * 2 : 64;
    struct dn_ip_entry **bucket = dn_alloc0(n, sizeof *bucket);
    for (size_t i = 0; i < t->n_buckets; i++) {
        for (struct dn_ip_entry *e = t->bucket[i], *next; e; e = next) {
            next = e->next;
            size_t at = hash(&e->key) & (n - 1);
            e->next = bucket[at];
            bucket[at] = e;
        }
    }
    free(t->bucket);
    t->bucket = bucket;
    t->n_buckets = n;
}

bool dn_ip_take(struct dn_ip_table *t, const struct dn_ip_key *key, uint32_t max)
{
    if (t->n >= t->n_buckets)
        grow(t);
    struct dn_ip_entry **slot = &t->bucket[hash(key) & (t->n_buckets - 1)], *e = *slot;
    while (e && !same(&e->key, key))
        e = e->next;
    if (e) {
        if (e->n >= max)
            return false;
        e->n++;
        return true;
    }
    if (max == 0)
        return false;
    e = dn_alloc0(1, sizeof *e);
    e->key = *key;
    e->n = 1;
    e->next = *slot;
    *slot = e;
    t->n++;
    return true;
}

void dn_ip_give(struct dn_ip_table *t, const struct dn_ip_key *key)
{
    DN_BUG_ON(t->n_buckets == 0);
    for (struct dn_ip_entry **slot = &t->bucket[hash(key) & (t->n_buckets - 1)]; *slot; slot = &(*slot)->next) {
        struct dn_ip_entry *e = *slot;
        if (!same(&e->key, key))
            continue;
        if (--e->n == 0) {
            *slot = e->next;
            free(e);
            t->n--;
        }
        return;
    }
    DN_BUG_ON("an address gives back what it has not taken");
}

void dn_ip_table_release(struct dn_ip_table *t)
{
    for (size_t i = 0; i < t->n_buckets; i++) {
        for (struct dn_ip_entry *e = t->bucket[i], *next; e; e = next) {
            next = e->next;
            free(e);
        }
    }
    free(t->bucket);
    *t = (struct dn_ip_table){0};
}
