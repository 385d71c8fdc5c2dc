#include "http/ip_table.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <string.h>

static struct sockaddr_storage addr(const char *text)
{
    struct sockaddr_storage s = {0};
    if (strchr(text, ':')) {
        s.ss_family = AF_INET6;
        cr_assert_eq(inet_pton(AF_INET6, text, &((struct sockaddr_in6 *)&s)->sin6_addr), 1);
    } else {
        s.ss_family = AF_INET;
        cr_assert_eq(inet_pton(AF_INET, text, &((struct sockaddr_in *)&s)->sin_addr), 1);
    }
    return s;
}

static struct dn_ip_key key(const char *text)
{
    struct sockaddr_storage s = addr(text);
    return dn_ip_key((struct sockaddr *)&s);
}

static bool is_loopback(const char *text)
{
    struct sockaddr_storage s = addr(text);
    return dn_ip_is_loopback((struct sockaddr *)&s);
}

Test(ip_table, counts_up_to_the_limit_and_down_again)
{
    struct dn_ip_table t = {0};
    struct dn_ip_key a = key("192.0.2.1"), b = key("192.0.2.2");
    for (int i = 0; i < 3; i++)
        cr_assert(dn_ip_take(&t, &a, 3));
    cr_assert(!dn_ip_take(&t, &a, 3));
    cr_assert(dn_ip_take(&t, &b, 3));
    dn_ip_give(&t, &a);
    cr_assert(dn_ip_take(&t, &a, 3));
    cr_assert_eq(t.n, 2);
    for (int i = 0; i < 3; i++)
        dn_ip_give(&t, &a);
    dn_ip_give(&t, &b);
    cr_assert_eq(t.n, 0);
    dn_ip_table_release(&t);
}

Test(ip_table, ipv6_counts_by_64_and_mapped_as_ipv4)
{
    struct dn_ip_key a = key("2001:db8:1:2::1"), b = key("2001:db8:1:2:ffff::9"), c = key("2001:db8:1:3::1");
    struct dn_ip_key v4 = key("192.0.2.1"), mapped = key("::ffff:192.0.2.1");
    cr_assert_eq(memcmp(&a, &b, sizeof a), 0);
    cr_assert_neq(memcmp(&a, &c, sizeof a), 0);
    cr_assert_eq(memcmp(&v4, &mapped, sizeof v4), 0);
}

Test(ip_table, holds_many_addresses)
{
    struct dn_ip_table t = {0};
    struct sockaddr_in s = {.sin_family = AF_INET};
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < 5000; i++) {
            s.sin_addr.s_addr = htonl(0x0a000000 + i * 7);
            struct dn_ip_key k = dn_ip_key((struct sockaddr *)&s);
            if (round == 0)
                cr_assert(dn_ip_take(&t, &k, 1));
            else
                dn_ip_give(&t, &k);
        }
        cr_assert_eq(t.n, round == 0 ? 5000 : 0);
    }
    dn_ip_table_release(&t);
}

Test(ip_table, knows_loopback)
{
    cr_assert(is_loopback("127.0.0.1") && is_loopback("127.9.9.9") && is_loopback("::1") &&
              is_loopback("::ffff:127.0.0.1"));
    cr_assert(!is_loopback("128.0.0.1") && !is_loopback("0.0.0.0") && !is_loopback("::") &&
              !is_loopback("2001:db8::1"));
    cr_assert(!is_loopback("::ffff:10.0.0.1"));
}

Test(ip_table, prints_addresses)
{
    char text[46];
    struct sockaddr_storage s = addr("::ffff:192.0.2.7");
    dn_ip_print((struct sockaddr *)&s, text, sizeof text);
    cr_assert_str_eq(text, "192.0.2.7");
    s = addr("2001:db8::1");
    dn_ip_print((struct sockaddr *)&s, text, sizeof text);
    cr_assert_str_eq(text, "2001:db8::1");
    s.ss_family = AF_UNIX;
    dn_ip_print((struct sockaddr *)&s, text, sizeof text);
    cr_assert_str_eq(text, "unknown");
}
