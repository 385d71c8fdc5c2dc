#include "base/hash.h"

#include "base/err.h"

#include <errno.h>
#include <string.h>
#include <sys/random.h>

static uint64_t load64(const uint8_t *p)
{
    uint64_t v = 0;
    for (int i = 7; i >= 0; i--)
        v = v << 8 | p[i];
    return v;
}

static inline uint64_t rotl64(uint64_t x, int n)
{
    return x << n | x >> (64 - n);
}

static inline void sip_round(uint64_t v[4])
{
    v[0] += v[1];
    v[2] += v[3];
    v[1] = rotl64(v[1], 13) ^ v[0];
    v[3] = rotl64(v[3], 16) ^ v[2];
    v[0] = rotl64(v[0], 32);
    v[2] += v[1];
    v[0] += v[3];
    v[1] = rotl64(v[1], 17) ^ v[2];
    v[3] = rotl64(v[3], 21) ^ v[0];
    v[2] = rotl64(v[2], 32);
}

/* State after all of the message; `wide` is the variant with a digest of 128 bits. */
static void sip_absorb(uint64_t v[4], struct dn_hash_key key, const uint8_t *p, size_t n, bool wide)
{
    v[0] = key.k0 ^ 0x736f6d6570736575ull;
    v[1] = key.k1 ^ 0x646f72616e646f6dull ^ (wide ? 0xee : 0);
    v[2] = key.k0 ^ 0x6c7967656e657261ull;
    v[3] = key.k1 ^ 0x7465646279746573ull;
    uint64_t last = (uint64_t)n << 56;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t m = load64(p);
        v[3] ^= m;
        sip_round(v);
        sip_round(v);
        v[0] ^= m;
    }
    for (size_t i = 0; i < n; i++)
        last |= (uint64_t)p[i] << (8 * i);
    v[3] ^= last;
    sip_round(v);
    sip_round(v);
    v[0] ^= last;
    v[2] ^= wide ? 0xee : 0xff;
}

static uint64_t sip_squeeze(uint64_t v[4])
{
    for (int i = 0; i < 4; i++)
        sip_round(v);
    return v[0] ^ v[1] ^ v[2] ^ v[3];
}

uint64_t dn_siphash64(struct dn_hash_key key, const void *data, size_t n)
{
    uint64_t v[4];
    sip_absorb(v, key, data, n, false);
    return sip_squeeze(v);
}

struct dn_hash128 dn_siphash128(struct dn_hash_key key, const void *data, size_t n)
{
    uint64_t v[4];
    struct dn_hash128 out;
    sip_absorb(v, key, data, n, true);
    out.lo = sip_squeeze(v);
    v[1] ^= 0xdd;
    out.hi = sip_squeeze(v);
    return out;
}

struct dn_hash_key dn_hash_key_from(const uint8_t bytes[16])
{
    return (struct dn_hash_key){load64(bytes), load64(bytes + 8)};
}

struct dn_hash_key dn_hash_key_random(void)
{
    uint8_t bytes[16];
    dn_random_bytes(bytes, sizeof bytes);
    return dn_hash_key_from(bytes);
}

static const uint32_t sha_k[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static inline uint32_t rotr32(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static void sha_block(uint32_t h[8], const uint8_t *p)
{
    uint32_t w[64], s[8];
    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)p[4 * i] << 24 | (uint32_t)p[4 * i + 1] << 16 | (uint32_t)p[4 * i + 2] << 8 | p[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];
        w[i] =
            w[i - 16] + (rotr32(a, 7) ^ rotr32(a, 18) ^ a >> 3) + w[i - 7] + (rotr32(b, 17) ^ rotr32(b, 19) ^ b >> 10);
    }
    memcpy(s, h, sizeof s);
    for (int i = 0; i < 64; i++) {
        uint32_t e = s[4], a = s[0];
        uint32_t t1 =
            s[7] + (rotr32(e, 6) ^ rotr32(e, 11) ^ rotr32(e, 25)) + ((e & s[5]) ^ (~e & s[6])) + sha_k[i] + w[i];
        uint32_t t2 = (rotr32(a, 2) ^ rotr32(a, 13) ^ rotr32(a, 22)) + ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
        memmove(s + 1, s, 7 * sizeof *s);
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
        h[i] += s[i];
}

void dn_sha256_init(struct dn_sha256 *s)
{
    *s = (struct dn_sha256){
        .h = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19}};
}

void dn_sha256_put(struct dn_sha256 *s, const void *data, size_t n)
{
    const uint8_t *p = data;
    while (n > 0) {
        size_t at = s->n_bytes % sizeof s->block;
        size_t take = sizeof s->block - at < n ? sizeof s->block - at : n;
        memcpy(s->block + at, p, take);
        s->n_bytes += take;
        p += take;
        n -= take;
        if (at + take == sizeof s->block)
            sha_block(s->h, s->block);
    }
}

void dn_sha256_finish(struct dn_sha256 *s, uint8_t out[DN_SHA256_BYTES])
{
    static const uint8_t pad[64] = {0x80};
    uint64_t n_bits = s->n_bytes * 8;
    uint8_t length[8];
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)(n_bits >> (56 - 8 * i));
    size_t at = s->n_bytes % sizeof s->block;
    dn_sha256_put(s, pad, at < 56 ? 56 - at : 120 - at);
    dn_sha256_put(s, length, sizeof length);
    for (int i = 0; i < 8; i++) {
        for (int j = 0; j < 4; j++)
            out[4 * i + j] = (uint8_t)(s->h[i] >> (24 - 8 * j));
    }
}

void dn_sha256(const void *data, size_t n, uint8_t out[DN_SHA256_BYTES])
{
    struct dn_sha256 s;
    dn_sha256_init(&s);
    dn_sha256_put(&s, data, n);
    dn_sha256_finish(&s, out);
}

void dn_hex_print(const uint8_t *bytes, size_t n, char *out)
{
    static const char digit[] = "0123456789abcdef";
    for (size_t i = 0; i < n; i++) {
        out[2 * i] = digit[bytes[i] >> 4];
        out[2 * i + 1] = digit[bytes[i] & 15];
    }
    out[2 * n] = '\0';
}

static unsigned hex_value(char c)
{
    return c <= '9' ? (unsigned)(c - '0') : (unsigned)((c | 0x20) - 'a' + 10);
}

bool dn_hex_parse(const char *text, uint8_t *bytes, size_t n)
{
    if (strspn(text, "0123456789abcdefABCDEF") != 2 * n || text[2 * n] != '\0')
        return false;
    for (size_t i = 0; i < n; i++)
        bytes[i] = (uint8_t)(hex_value(text[2 * i]) << 4 | hex_value(text[2 * i + 1]));
    return true;
}

bool dn_ct_equal(const void *a, const void *b, size_t n)
{
    const volatile uint8_t *x = a, *y = b; /* volatile: the compiler may not leave the loop early */
    uint8_t diff = 0;
    for (size_t i = 0; i < n; i++)
        diff |= x[i] ^ y[i];
    return diff == 0;
}

void dn_random_bytes(void *out, size_t n)
{
    uint8_t *p = out;
    while (n > 0) {
        ssize_t got = getrandom(p, n, 0);
        DN_BUG_ON(got < 0 && errno != EINTR);
        if (got > 0) {
            p += got;
            n -= (size_t)got;
        }
    }
}
