/* API keys: conf/keys.lua as data -> a table of hashes.
 *
 * The file never holds a key, only its SHA-256 (keys are random and long, so that a slow hash would buy nothing). A key
 * that a client presents is hashed and compared with every entry in constant time: how long the search takes tells
 * neither whether nor where it matched.
 *
 * The opener owns struct dn_keys; nothing in it changes after dn_keys_read(), so that any thread may search. A reload
 * opens a new one.
 */
#ifndef DN_SCRIPT_KEYS_H
#define DN_SCRIPT_KEYS_H

#include "base/arena.h"
#include "base/hash.h"
#include "script/conf.h"

struct dn_key_label {
    const char *name, *value;
};

struct dn_key {
    uint8_t hash[DN_SHA256_BYTES];
    const char *id; /* for logs and metrics; not secret */
    const char *tenant;
    const struct dn_key_label *label;
    size_t n_labels; /* at most 16 */
    int line;
};

struct dn_keys {
    const struct dn_key *item;
    size_t n;
    struct dn_arena arena;
};

/* Reads the file into *keys (zeroed before). Adds to errors and returns -DN_CONFIG if something is wrong; hashes are
 * never printed. */
int dn_keys_read(struct dn_keys *keys, const char *path, struct dn_conf_errors *errors);
void dn_keys_release(struct dn_keys *keys);

/* The entry of a presented key, or NULL. */
const struct dn_key *dn_keys_find(const struct dn_keys *keys, const char *key, size_t n);

/* A new key ("dn-" and 43 characters of 62, 256 bits) into key, and its entry for the file, as text. */
void dn_keys_new(const char *tenant, const char *id, char key[48], struct dn_buf *entry);

#endif
