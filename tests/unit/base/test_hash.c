#include "base/hash.h"

#include <criterion/criterion.h>
#include <string.h>

static void fill(uint8_t *data, size_t n)
{
    for (size_t i = 0; i < n; i++)
        data[i] = (uint8_t)(i % 251);
}

static void print_le(uint64_t v, char *out)
{
    uint8_t bytes[8];
    for (int i = 0; i < 8; i++)
        bytes[i] = (uint8_t)(v >> (8 * i));
    dn_hex_print(bytes, 8, out);
}

/* Made with: openssl mac -macopt hexkey:000102...0f -macopt size:{8,16} SIPHASH. The first row is also in the paper. */
static const struct {
    size_t n;
    const char *want64, *want128;
} sip[] = {
    {0, "310e0edd47db6f72", "a3817f04ba25a8e66df67214c7550293"},
    {1, "fd67dc93c539f874", "da87c1d86b99af44347659119b22fc45"},
    {7, "37d1018bf50002ab", "a1f1ebbed8dbc153c0b84aa61ff08239"},
    {8, "6224939a79f5f593", "3b62a9ba6258f5610f83e264f31497b4"},
    {15, "e545be4961ca29a1", "5493e99933b0a8117e08ec0f97cfc3d9"},
    {63, "724506eb4c328a95", "5150d1772f50834a503e069a973fbd7c"},
    {1000, "52949957e4b35828", "79fe0b0c91f03f2e6e1131dd194381f2"},
};

Test(hash, siphash_agrees_with_openssl)
{
    uint8_t key[16], data[1000];
    fill(key, sizeof key);
    fill(data, sizeof data);
    for (size_t i = 0; i < sizeof sip / sizeof sip[0]; i++) {
        char got[33];
        print_le(dn_siphash64(dn_hash_key_from(key), data, sip[i].n), got);
        cr_assert_str_eq(got, sip[i].want64);
        struct dn_hash128 h = dn_siphash128(dn_hash_key_from(key), data, sip[i].n);
        print_le(h.lo, got);
        print_le(h.hi, got + 16);
        cr_assert_str_eq(got, sip[i].want128);
    }
}

/* Made with sha256sum; around the edges of a block and of the padding. */
static const struct {
    size_t n;
    const char *want;
} sha[] = {
    {0, "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"},
    {3, "ae4b3280e56e2faf83f414a6e3dabe9d5fbe18976544c05fed121accb85b53fc"},
    {55, "463eb28e72f82e0a96c0a4cc53690c571281131f672aa229e0d45ae59b598b59"},
    {56, "da2ae4d6b36748f2a318f23e7ab1dfdf45acdc9d049bd80e59de82a60895f562"},
    {63, "29af2686fd53374a36b0846694cc342177e428d1647515f078784d69cdb9e488"},
    {64, "fdeab9acf3710362bd2658cdc9a29e8f9c757fcf9811603a8c447cd1d9151108"},
    {65, "4bfd2c8b6f1eec7a2afeb48b934ee4b2694182027e6d0fc075074f2fabb31781"},
    {119, "da18797ed7c3a777f0847f429724a2d8cd5138e6ed2895c3fa1a6d39d18f7ec6"},
    {120, "f52b23db1fbb6ded89ef42a23ce0c8922c45f25c50b568a93bf1c075420bbb7c"},
    {1000, "4e4c294b331f7a2099a379bec34b9f9fc03dc46ab465d998f4d683da53487e6d"},
};

static void check_sha(const uint8_t *data, size_t n, size_t piece, const char *want)
{
    struct dn_sha256 s;
    uint8_t digest[DN_SHA256_BYTES];
    char got[DN_SHA256_HEX];
    dn_sha256_init(&s);
    for (size_t at = 0; at < n; at += piece)
        dn_sha256_put(&s, data + at, n - at < piece ? n - at : piece);
    dn_sha256_finish(&s, digest);
    dn_hex_print(digest, sizeof digest, got);
    cr_assert_str_eq(got, want, "%zu bytes in pieces of %zu", n, piece);
}

Test(hash, sha256_agrees_with_sha256sum_in_pieces_of_any_size)
{
    uint8_t data[1000];
    fill(data, sizeof data);
    for (size_t i = 0; i < sizeof sha / sizeof sha[0]; i++) {
        check_sha(data, sha[i].n, 1000, sha[i].want);
        check_sha(data, sha[i].n, 1, sha[i].want);
        check_sha(data, sha[i].n, 64, sha[i].want);
        check_sha(data, sha[i].n, 63, sha[i].want);
    }
}

/* FIPS 180-4's own examples. */
Test(hash, sha256_of_the_standard)
{
    uint8_t digest[DN_SHA256_BYTES];
    char got[DN_SHA256_HEX];
    dn_sha256("abc", 3, digest);
    dn_hex_print(digest, sizeof digest, got);
    cr_assert_str_eq(got, "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
    struct dn_sha256 s;
    dn_sha256_init(&s);
    for (int i = 0; i < 1000000; i++)
        dn_sha256_put(&s, "a", 1);
    dn_sha256_finish(&s, digest);
    dn_hex_print(digest, sizeof digest, got);
    cr_assert_str_eq(got, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

Test(hash, hex_refuses_what_is_not_hex)
{
    uint8_t b[2] = {1, 2};
    cr_assert(dn_hex_parse("aBc9", b, 2));
    cr_assert(b[0] == 0xAB && b[1] == 0xC9);
    cr_assert_not(dn_hex_parse("abc", b, 2));
    cr_assert_not(dn_hex_parse("abcde", b, 2));
    cr_assert_not(dn_hex_parse("ab g", b, 2));
    cr_assert(b[0] == 0xAB && b[1] == 0xC9, "untouched on failure");
}

Test(hash, equal_looks_at_every_byte)
{
    uint8_t a[32], b[32];
    fill(a, sizeof a);
    fill(b, sizeof b);
    cr_assert(dn_ct_equal(a, b, sizeof a));
    for (size_t i = 0; i < sizeof a; i++) {
        b[i] ^= 0x80;
        cr_assert_not(dn_ct_equal(a, b, sizeof a));
        b[i] ^= 0x80;
    }
    cr_assert(dn_ct_equal(a, b, 0));
}

Test(hash, random_bytes_differ)
{
    uint8_t a[512] = {0}, b[512] = {0};
    dn_random_bytes(a, sizeof a);
    dn_random_bytes(b, sizeof b);
    cr_assert_neq(memcmp(a, b, sizeof a), 0);
    cr_assert_neq(memcmp(a + 480, (uint8_t[32]){0}, 32), 0, "filled to the end");
}
