/* Hashes and randomness.
 *
 * SipHash-2-4 (Aumasson, Bernstein 2012) is a keyed hash: names of cached prefixes are made with a key that is drawn at
 * start, so that nobody outside can construct two prompts with one name. SHA-256 (FIPS 180-4) is for what is stored:
 * API keys are kept as their digest and compared with dn_ct_equal(). Random bytes come from the kernel.
 * Pure functions over borrowed bytes (a dn_sha256 belongs to its holder); any thread.
 */
#ifndef DN_BASE_HASH_H
#define DN_BASE_HASH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct dn_hash_key {
    uint64_t k0, k1;
};

struct dn_hash128 {
    uint64_t lo, hi; /* the first and the second 8 bytes of the digest, each little-endian */
};

struct dn_hash_key dn_hash_key_random(void);
struct dn_hash_key dn_hash_key_from(const uint8_t bytes[16]); /* in the byte order of the paper */

uint64_t dn_siphash64(struct dn_hash_key key, const void *data, size_t n);
struct dn_hash128 dn_siphash128(struct dn_hash_key key, const void *data, size_t n);

#define DN_SHA256_BYTES 32
#define DN_SHA256_HEX   (2 * DN_SHA256_BYTES + 1)

struct dn_sha256 {
    uint32_t h[8];
    uint64_t n_bytes;
    uint8_t block[64];
};

void dn_sha256_init(struct dn_sha256 *s);
void dn_sha256_put(struct dn_sha256 *s, const void *data, size_t n);
void dn_sha256_finish(struct dn_sha256 *s, uint8_t out[DN_SHA256_BYTES]); /* s must be initialised again after it */
void dn_sha256(const void *data, size_t n, uint8_t out[DN_SHA256_BYTES]);

/* Lower-case hex of n bytes into out[2 * n + 1], and back; parse returns false unless text is exactly 2 * n hex digits.
 */
void dn_hex_print(const uint8_t *bytes, size_t n, char *out);
bool dn_hex_parse(const char *text, uint8_t *bytes, size_t n);

/* Whether n bytes are equal, in a time that depends on n alone. */
bool dn_ct_equal(const void *a, const void *b, size_t n);

/* Fills out with n bytes from the kernel's generator; aborts if that fails, since no caller could go on safely. */
void dn_random_bytes(void *out, size_t n);

#endif
