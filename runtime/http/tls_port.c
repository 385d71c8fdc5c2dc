#include "http/tls_port.h"

#include <mbedtls/version.h>
#if MBEDTLS_VERSION_NUMBER < 0x03000000
#include <mbedtls/config.h>
#endif
#include <mbedtls/ctr_drbg.h>
#include <mbedtls/ecp.h>
#include <mbedtls/entropy.h>
#include <mbedtls/error.h>
#include <mbedtls/pk.h>
#include <mbedtls/platform_util.h>
#include <mbedtls/ssl.h>
#include <mbedtls/ssl_ticket.h>
#include <mbedtls/x509_crt.h>

#if MBEDTLS_VERSION_NUMBER >= 0x03000000
#include <psa/crypto.h>
#endif

#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define PEM_BYTES_MAX  (1u << 20)
#define TICKET_SECONDS 3600

struct random { /* a generator and its source */
    mbedtls_entropy_context entropy;
    mbedtls_ctr_drbg_context drbg;
};

struct dn_tls_identity {
    atomic_uint refs;
    struct dn_buf cert_pem, key_pem; /* terminated: mbedTLS counts the NUL */
};

struct dn_tls_tickets {
    struct random random;
    mbedtls_ssl_ticket_context context;
};

struct dn_tls_conf {
    unsigned refs;
    struct random random;
    mbedtls_x509_crt cert;
    mbedtls_pk_context key;
    mbedtls_ssl_config ssl;
};

struct dn_tls {
    mbedtls_ssl_context ssl;
    struct dn_tls_conf *conf;
    struct dn_tls_in *in;
    struct dn_buf *out;
};

static const char *alpn[] = {"h2", "http/1.1", NULL};

static const int suites[] = {
#if MBEDTLS_VERSION_NUMBER >= 0x03000000
    MBEDTLS_TLS1_3_AES_128_GCM_SHA256,
    MBEDTLS_TLS1_3_CHACHA20_POLY1305_SHA256,
    MBEDTLS_TLS1_3_AES_256_GCM_SHA384,
#endif
    MBEDTLS_TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256,
    MBEDTLS_TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256,
    MBEDTLS_TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256,
    MBEDTLS_TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256,
    MBEDTLS_TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384,
    MBEDTLS_TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384,
    0,
};

#if MBEDTLS_VERSION_NUMBER >= 0x03000000
static const uint16_t groups[] = {MBEDTLS_SSL_IANA_TLS_GROUP_X25519, MBEDTLS_SSL_IANA_TLS_GROUP_SECP256R1,
                                  MBEDTLS_SSL_IANA_TLS_GROUP_SECP384R1, MBEDTLS_SSL_IANA_TLS_GROUP_NONE};
#else
static const mbedtls_ecp_group_id curves[] = {MBEDTLS_ECP_DP_CURVE25519, MBEDTLS_ECP_DP_SECP256R1,
                                              MBEDTLS_ECP_DP_SECP384R1, MBEDTLS_ECP_DP_NONE};
#endif

static const char *reason(int rc, char *text, size_t n)
{
    mbedtls_strerror(rc, text, n);
    return text;
}

static int random_init(struct random *r)
{
    static const unsigned char name[] = "dunlin";
    mbedtls_entropy_init(&r->entropy);
    mbedtls_ctr_drbg_init(&r->drbg);
    return mbedtls_ctr_drbg_seed(&r->drbg, mbedtls_entropy_func, &r->entropy, name, sizeof name - 1);
}

static void random_release(struct random *r)
{
    mbedtls_ctr_drbg_free(&r->drbg);
    mbedtls_entropy_free(&r->entropy);
}

const char *dn_tls_version(void)
{
    return MBEDTLS_VERSION_STRING_FULL;
}

static int parse_identity(const struct dn_tls_identity *id, struct random *r, mbedtls_x509_crt *cert,
                          mbedtls_pk_context *key, struct dn_err *err)
{
    char text[160];
    int rc = mbedtls_x509_crt_parse(cert, (const unsigned char *)id->cert_pem.data, id->cert_pem.len);
    if (rc != 0)
        return dn_err_set(err, DN_CONFIG, "the certificate is not valid PEM: %s",
                          rc > 0 ? "one of the chain can't be read" : reason(rc, text, sizeof text));
    const unsigned char *pem = (const unsigned char *)id->key_pem.data;
#if MBEDTLS_VERSION_NUMBER >= 0x03000000
    rc = mbedtls_pk_parse_key(key, pem, id->key_pem.len, NULL, 0, mbedtls_ctr_drbg_random, &r->drbg);
#else
    rc = mbedtls_pk_parse_key(key, pem, id->key_pem.len, NULL, 0);
#endif
    if (rc != 0)
        return dn_err_set(err, DN_CONFIG, "the key is not valid PEM: %s", reason(rc, text, sizeof text));
#if MBEDTLS_VERSION_NUMBER >= 0x03000000
    rc = mbedtls_pk_check_pair(&cert->pk, key, mbedtls_ctr_drbg_random, &r->drbg);
#else
    rc = mbedtls_pk_check_pair(&cert->pk, key);
    (void)r;
#endif
    if (rc != 0)
        return dn_err_set(err, DN_CONFIG, "the key does not belong to the certificate");
    return 0;
}

int dn_tls_warm_up(struct dn_err *err)
{
    struct random r;
    char text[160];
#if MBEDTLS_VERSION_NUMBER >= 0x03000000
    if (psa_crypto_init() != PSA_SUCCESS)
        return dn_err_set(err, DN_INTERNAL, "the cryptography library can't be initialised");
#endif
    int rc = random_init(&r);
    /* One ephemeral key on each curve and one AES key fill the tables that are otherwise filled on first use. */
    static const mbedtls_ecp_group_id ids[] = {MBEDTLS_ECP_DP_SECP256R1, MBEDTLS_ECP_DP_SECP384R1,
                                               MBEDTLS_ECP_DP_CURVE25519};
    for (size_t i = 0; rc == 0 && i < sizeof ids / sizeof *ids; i++) {
        mbedtls_ecp_keypair pair;
        mbedtls_ecp_keypair_init(&pair);
        rc = mbedtls_ecp_gen_key(ids[i], &pair, mbedtls_ctr_drbg_random, &r.drbg);
        mbedtls_ecp_keypair_free(&pair);
    }
    random_release(&r);
    return rc == 0 ? 0 : dn_err_set(err, DN_INTERNAL, "no random numbers to be had: %s", reason(rc, text, sizeof text));
}

static int read_pem(const char *file, const char *what, struct dn_buf *out, struct dn_err *err)
{
    if (!file || !*file)
        return dn_err_set(err, DN_CONFIG, "no %s file given", what);
    FILE *f = fopen(file, "rbe");
    if (!f)
        return dn_err_set(err, DN_IO, "%s \"%s\": %s", what, file, strerror(errno));
    char chunk[4096];
    size_t n;
    while ((n = fread(chunk, 1, sizeof chunk, f)) > 0 && out->len <= PEM_BYTES_MAX)
        dn_buf_put(out, chunk, n);
    bool bad = ferror(f);
    fclose(f);
    mbedtls_platform_zeroize(chunk, sizeof chunk);
    if (bad)
        return dn_err_set(err, DN_IO, "%s \"%s\": can't be read", what, file);
    if (out->len > PEM_BYTES_MAX)
        return dn_err_set(err, DN_CONFIG, "%s \"%s\": longer than 1 MiB, not a PEM file", what, file);
    dn_buf_putc(out, '\0');
    return 0;
}

struct dn_tls_identity *dn_tls_identity_get(struct dn_tls_identity *id)
{
    atomic_fetch_add_explicit(&id->refs, 1, memory_order_relaxed);
    return id;
}

void dn_tls_identity_put(struct dn_tls_identity *id)
{
    /* acq_rel: the last holder sees all uses of the others before it wipes the key */
    if (!id || atomic_fetch_sub_explicit(&id->refs, 1, memory_order_acq_rel) != 1)
        return;
    if (id->key_pem.data)
        mbedtls_platform_zeroize(id->key_pem.data, id->key_pem.cap);
    dn_buf_release(&id->key_pem);
    dn_buf_release(&id->cert_pem);
    free(id);
}

int dn_tls_identity_open(const char *cert_file, const char *key_file, struct dn_tls_identity **out, struct dn_err *err)
{
    struct dn_tls_identity *id = dn_alloc0(1, sizeof *id);
    atomic_init(&id->refs, 1);
    int rc = read_pem(cert_file, "certificate", &id->cert_pem, err);
    if (!rc)
        rc = read_pem(key_file, "key", &id->key_pem, err);
    if (!rc) {
        struct random r;
        mbedtls_x509_crt cert;
        mbedtls_pk_context key;
        mbedtls_x509_crt_init(&cert);
        mbedtls_pk_init(&key);
        if (random_init(&r))
            rc = dn_err_set(err, DN_INTERNAL, "no random numbers to be had");
        else if ((rc = parse_identity(id, &r, &cert, &key, err)) != 0)
            dn_err_prefix(err, "certificate \"%s\", key \"%s\"", cert_file, key_file);
        mbedtls_pk_free(&key);
        mbedtls_x509_crt_free(&cert);
        random_release(&r);
    }
    if (rc) {
        dn_tls_identity_put(id);
        return rc;
    }
    *out = id;
    return 0;
}

int dn_tls_tickets_open(struct dn_tls_tickets **out, struct dn_err *err)
{
    struct dn_tls_tickets *t = dn_alloc0(1, sizeof *t);
    mbedtls_ssl_ticket_init(&t->context);
    int rc = random_init(&t->random);
    if (!rc)
        rc = mbedtls_ssl_ticket_setup(&t->context, mbedtls_ctr_drbg_random, &t->random.drbg, MBEDTLS_CIPHER_AES_256_GCM,
                                      TICKET_SECONDS);
    if (rc) {
        dn_tls_tickets_close(t);
        return dn_err_set(err, DN_INTERNAL, "session tickets can't be set up (mbedTLS %d)", rc);
    }
    *out = t;
    return 0;
}

void dn_tls_tickets_close(struct dn_tls_tickets *t)
{
    if (!t)
        return;
    mbedtls_ssl_ticket_free(&t->context);
    random_release(&t->random);
    free(t);
}

static int setup_conf(struct dn_tls_conf *c, struct dn_tls_tickets *tickets)
{
    int rc = mbedtls_ssl_config_defaults(&c->ssl, MBEDTLS_SSL_IS_SERVER, MBEDTLS_SSL_TRANSPORT_STREAM,
                                         MBEDTLS_SSL_PRESET_DEFAULT);
    if (!rc)
        rc = mbedtls_ssl_conf_own_cert(&c->ssl, &c->cert, &c->key);
    if (!rc)
        rc = mbedtls_ssl_conf_alpn_protocols(&c->ssl, alpn);
    if (rc)
        return rc;
    mbedtls_ssl_conf_rng(&c->ssl, mbedtls_ctr_drbg_random, &c->random.drbg);
    mbedtls_ssl_conf_authmode(&c->ssl, MBEDTLS_SSL_VERIFY_NONE);
    mbedtls_ssl_conf_ciphersuites(&c->ssl, suites);
#if MBEDTLS_VERSION_NUMBER >= 0x03000000
    mbedtls_ssl_conf_min_tls_version(&c->ssl, MBEDTLS_SSL_VERSION_TLS1_2);
    mbedtls_ssl_conf_groups(&c->ssl, groups);
#else
    mbedtls_ssl_conf_min_version(&c->ssl, MBEDTLS_SSL_MAJOR_VERSION_3, MBEDTLS_SSL_MINOR_VERSION_3);
    mbedtls_ssl_conf_curves(&c->ssl, curves);
#endif
#if defined(MBEDTLS_SSL_RENEGOTIATION)
    mbedtls_ssl_conf_renegotiation(&c->ssl, MBEDTLS_SSL_RENEGOTIATION_DISABLED);
#endif
    mbedtls_ssl_conf_legacy_renegotiation(&c->ssl, MBEDTLS_SSL_LEGACY_BREAK_HANDSHAKE);
    mbedtls_ssl_conf_session_tickets_cb(&c->ssl, mbedtls_ssl_ticket_write, mbedtls_ssl_ticket_parse, &tickets->context);
    return 0;
}

int dn_tls_conf_open(struct dn_tls_identity *id, struct dn_tls_tickets *tickets, struct dn_tls_conf **out,
                     struct dn_err *err)
{
    struct dn_tls_conf *c = dn_alloc0(1, sizeof *c);
    c->refs = 1;
    mbedtls_x509_crt_init(&c->cert);
    mbedtls_pk_init(&c->key);
    mbedtls_ssl_config_init(&c->ssl);
    int rc = random_init(&c->random);
    if (rc) {
        rc = dn_err_set(err, DN_INTERNAL, "no random numbers to be had");
    } else if ((rc = parse_identity(id, &c->random, &c->cert, &c->key, err)) == 0) {
        int code = setup_conf(c, tickets);
        if (code)
            rc = dn_err_set(err, DN_INTERNAL, "TLS can't be set up (mbedTLS %d)", code);
    }
    if (rc) {
        dn_tls_conf_put(c);
        return rc;
    }
    *out = c;
    return 0;
}

struct dn_tls_conf *dn_tls_conf_get(struct dn_tls_conf *c)
{
    c->refs++;
    return c;
}

void dn_tls_conf_put(struct dn_tls_conf *c)
{
    if (!c || --c->refs)
        return;
    mbedtls_ssl_config_free(&c->ssl);
    mbedtls_pk_free(&c->key);
    mbedtls_x509_crt_free(&c->cert);
    random_release(&c->random);
    free(c);
}

/* The session's socket: two buffers. Output always fits, so that no write is ever left half done. */
static int bio_send(void *arg, const unsigned char *data, size_t n)
{
    struct dn_tls *tls = arg;
    dn_buf_put(tls->out, data, n);
    return (int)n;
}

static int bio_recv(void *arg, unsigned char *data, size_t n)
{
    struct dn_tls *tls = arg;
    size_t left = dn_tls_in_left(tls->in);
    if (left == 0)
        return MBEDTLS_ERR_SSL_WANT_READ;
    if (n > left)
        n = left;
    memcpy(data, tls->in->buf.data + tls->in->at, n);
    tls->in->at += n;
    if (tls->in->at == tls->in->buf.len)
        tls->in->at = tls->in->buf.len = 0;
    return (int)n;
}

struct dn_tls *dn_tls_open(struct dn_tls_conf *conf, struct dn_tls_in *in, struct dn_buf *out)
{
    struct dn_tls *tls = dn_alloc0(1, sizeof *tls);
    mbedtls_ssl_init(&tls->ssl);
    tls->conf = dn_tls_conf_get(conf);
    tls->in = in;
    tls->out = out;
    if (mbedtls_ssl_setup(&tls->ssl, &conf->ssl)) {
        dn_tls_close(tls);
        return NULL;
    }
    mbedtls_ssl_set_bio(&tls->ssl, tls, bio_send, bio_recv, NULL);
    return tls;
}

void dn_tls_close(struct dn_tls *tls)
{
    if (!tls)
        return;
    mbedtls_ssl_free(&tls->ssl);
    dn_tls_conf_put(tls->conf);
    free(tls);
}

enum dn_tls_result dn_tls_handshake(struct dn_tls *tls)
{
    int rc = mbedtls_ssl_handshake(&tls->ssl);
    if (rc == 0)
        return DN_TLS_DONE;
    return rc == MBEDTLS_ERR_SSL_WANT_READ || rc == MBEDTLS_ERR_SSL_WANT_WRITE ? DN_TLS_AGAIN : DN_TLS_ERROR;
}

bool dn_tls_is_h2(const struct dn_tls *tls)
{
    const char *name = mbedtls_ssl_get_alpn_protocol(&tls->ssl);
    return name && strcmp(name, "h2") == 0;
}

long dn_tls_read(struct dn_tls *tls, void *data, size_t n)
{
    int rc = mbedtls_ssl_read(&tls->ssl, data, n);
    if (rc > 0)
        return rc;
    switch (rc) {
    case MBEDTLS_ERR_SSL_WANT_READ:
    case MBEDTLS_ERR_SSL_WANT_WRITE:
        return DN_TLS_AGAIN;
    case MBEDTLS_ERR_SSL_PEER_CLOSE_NOTIFY:
        return DN_TLS_EOF;
    default:
        return DN_TLS_ERROR;
    }
}

int dn_tls_write(struct dn_tls *tls, const void *data, size_t n)
{
    const unsigned char *at = data;
    while (n > 0) {
        int rc = mbedtls_ssl_write(&tls->ssl, at, n);
        if (rc <= 0)
            return -1;
        at += rc;
        n -= (size_t)rc;
    }
    return 0;
}

void dn_tls_close_notify(struct dn_tls *tls)
{
    mbedtls_ssl_close_notify(&tls->ssl);
}
