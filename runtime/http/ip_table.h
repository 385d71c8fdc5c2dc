/* Connections per client address: a small hash table from address to count. One per loop, used on its thread.
 * IPv4 counts by address, IPv6 by /64 (a client has at least that many addresses), IPv4-mapped as IPv4. */
#ifndef DN_HTTP_IP_TABLE_H
#define DN_HTTP_IP_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

struct dn_ip_key {
    uint8_t byte[8];
    uint8_t is_v6;
};

struct dn_ip_table {
    struct dn_ip_entry **bucket; /* [n_buckets], chained */
    size_t n_buckets, n;
};

void dn_ip_table_release(struct dn_ip_table *t);
struct dn_ip_key dn_ip_key(const struct sockaddr *peer);                           /* unknown families share one key */
bool dn_ip_take(struct dn_ip_table *t, const struct dn_ip_key *key, uint32_t max); /* false: `max` are taken already */
void dn_ip_give(struct dn_ip_table *t, const struct dn_ip_key *key);
bool dn_ip_is_loopback(const struct sockaddr *addr); /* 127.0.0.0/8, ::1, and the former as IPv4-mapped */
void dn_ip_print(const struct sockaddr *addr, char *text, size_t n); /* "192.0.2.7"; n >= 46 */

#endif
