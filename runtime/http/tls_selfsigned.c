#include "http/tls_selfsigned.h"

#include "base/clock.h"

#include <mbedtls/version.h>
#if MBEDTLS_VERSION_NUMBER < 0x03000000
#include <mbedtls/config.h>
#endif
#include <mbedtls/ctr_drbg.h>
#include <mbedtls/ecp.h>
#include <mbedtls/entropy.h>
#include <mbedtls/oid.h>
#include <mbedtls/pk.h>
#include <mbedtls/platform_util.h>
#include <mbedtls/x509_crt.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PEM_BYTES 4096

/* subjectAltName, GeneralNames: [2] dNSName, [7] iPAddress. mbedTLS 2.28 has no writer for it. */
static const unsigned char alt_names[] = {
    0x30, 0x23,                                                                   /* SEQUENCE, 35 bytes */
    0x82, 9,    'l', 'o', 'c', 'a', 'l', 'h', 'o', 's', 't',                      /* localhost */
    0x87, 4,    127, 0,   0,   1,                                                 /* 127.0.0.1 */
    0x87, 16,   0,   0,   0,   0,   0,   0,   0,   0,   0,   0, 0, 0, 0, 0, 0, 1, /* ::1 */
};
_Static_assert(sizeof alt_names == 2 + 0x23, "length of the sequence");
static const unsigned char server_auth[] = {0x30, 0x0a, 0x06, 0x08, 0x2b, 0x06, 0x01, 0x05, 0x05, 0x07, 0x03, 0x01};

struct maker {
    mbedtls_entropy_context entropy;
    mbedtls_ctr_drbg_context drbg;
    mbedtls_pk_context key;
    mbedtls_x509write_cert cert;
    mbedtls_mpi serial;
    unsigned char cert_pem[PEM_BYTES], key_pem[PEM_BYTES];
};

static int make_key(struct maker *m)
{
    int rc = mbedtls_ctr_drbg_seed(&m->drbg, mbedtls_entropy_func, &m->entropy, NULL, 0);
    if (!rc)
        rc = mbedtls_pk_setup(&m->key, mbedtls_pk_info_from_type(MBEDTLS_PK_ECKEY));
    if (!rc)
        rc = mbedtls_ecp_gen_key(MBEDTLS_ECP_DP_SECP256R1, mbedtls_pk_ec(m->key), mbedtls_ctr_drbg_random, &m->drbg);
    if (!rc)
        rc = mbedtls_pk_write_key_pem(&m->key, m->key_pem, sizeof m->key_pem);
    return rc;
}

static int set_serial(struct maker *m)
{
    unsigned char serial[16];
    int rc = mbedtls_ctr_drbg_random(&m->drbg, serial, sizeof serial);
    serial[0] = (unsigned char)((serial[0] & 0x3f) | 0x40); /* positive, and as long in DER as here */
#if MBEDTLS_VERSION_NUMBER >= 0x03040000
    if (!rc)
        rc = mbedtls_x509write_crt_set_serial_raw(&m->cert, serial, sizeof serial);
#else
    if (!rc)
        rc = mbedtls_mpi_read_binary(&m->serial, serial, sizeof serial);
    if (!rc)
        rc = mbedtls_x509write_crt_set_serial(&m->cert, &m->serial);
#endif
    return rc;
}

static int set_validity(struct maker *m, unsigned days)
{
    char from[16], to[16];
    time_t now = (time_t)(dn_wall_ns() / DN_NS_PER_S), start = now - 3600, end = now + (time_t)days * 86400;
    struct tm t;
    strftime(from, sizeof from, "%Y%m%d%H%M%S", gmtime_r(&start, &t));
    strftime(to, sizeof to, "%Y%m%d%H%M%S", gmtime_r(&end, &t));
    return mbedtls_x509write_crt_set_validity(&m->cert, from, to);
}

static int make_cert(struct maker *m, unsigned days)
{
    mbedtls_x509write_crt_set_version(&m->cert, MBEDTLS_X509_CRT_VERSION_3);
    mbedtls_x509write_crt_set_md_alg(&m->cert, MBEDTLS_MD_SHA256);
    mbedtls_x509write_crt_set_subject_key(&m->cert, &m->key);
    mbedtls_x509write_crt_set_issuer_key(&m->cert, &m->key);
    int rc = set_serial(m);
    if (!rc)
        rc = set_validity(m, days);
    if (!rc)
        rc = mbedtls_x509write_crt_set_subject_name(&m->cert, "CN=localhost,O=dunlin self-signed");
    if (!rc)
        rc = mbedtls_x509write_crt_set_issuer_name(&m->cert, "CN=localhost,O=dunlin self-signed");
    /* A trust anchor for clients that are given the file, and a server certificate at once. */
    if (!rc)
        rc = mbedtls_x509write_crt_set_basic_constraints(&m->cert, 1, 0);
    if (!rc)
        rc = mbedtls_x509write_crt_set_key_usage(&m->cert,
                                                 MBEDTLS_X509_KU_DIGITAL_SIGNATURE | MBEDTLS_X509_KU_KEY_CERT_SIGN);
    if (!rc)
        rc = mbedtls_x509write_crt_set_extension(&m->cert, MBEDTLS_OID_EXTENDED_KEY_USAGE,
                                                 MBEDTLS_OID_SIZE(MBEDTLS_OID_EXTENDED_KEY_USAGE), 0, server_auth,
                                                 sizeof server_auth);
    if (!rc)
        rc = mbedtls_x509write_crt_set_extension(&m->cert, MBEDTLS_OID_SUBJECT_ALT_NAME,
                                                 MBEDTLS_OID_SIZE(MBEDTLS_OID_SUBJECT_ALT_NAME), 0, alt_names,
                                                 sizeof alt_names);
#if defined(MBEDTLS_SHA1_C)
    if (!rc)
        rc = mbedtls_x509write_crt_set_subject_key_identifier(&m->cert);
#endif
    if (!rc)
        rc = mbedtls_x509write_crt_pem(&m->cert, m->cert_pem, sizeof m->cert_pem, mbedtls_ctr_drbg_random, &m->drbg);
    return rc;
}

static int write_file(const char *file, const unsigned char *text, mode_t mode, struct dn_err *err)
{
    int fd = open(file, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, mode);
    if (fd < 0)
        return dn_err_set(err, DN_IO, "\"%s\": %s", file, strerror(errno));
    size_t n = strlen((const char *)text);
    ssize_t done = write(fd, text, n);
    int saved = errno;
    if (close(fd) || done != (ssize_t)n) {
        unlink(file);
        return dn_err_set(err, DN_IO, "\"%s\": %s", file, done < 0 ? strerror(saved) : "the disk is full");
    }
    return 0;
}

int dn_tls_selfsigned(const char *cert_file, const char *key_file, unsigned days, struct dn_err *err)
{
    static const unsigned days_max = 3650;
    if (days < 1 || days > days_max)
        return dn_err_set(err, DN_CONFIG, "a certificate for %u days: expected 1..%u", days, days_max);
    struct maker m = {0};
    mbedtls_entropy_init(&m.entropy);
    mbedtls_ctr_drbg_init(&m.drbg);
    mbedtls_pk_init(&m.key);
    mbedtls_x509write_crt_init(&m.cert);
    mbedtls_mpi_init(&m.serial);
    int code = make_key(&m);
    if (!code)
        code = make_cert(&m, days);
    int rc = code ? dn_err_set(err, DN_INTERNAL, "a certificate can't be made (mbedTLS -0x%04x)", (unsigned)-code) : 0;
    if (!rc)
        rc = write_file(key_file, m.key_pem, 0600, err);
    if (!rc && (rc = write_file(cert_file, m.cert_pem, 0644, err)) != 0)
        unlink(key_file);
    mbedtls_mpi_free(&m.serial);
    mbedtls_x509write_crt_free(&m.cert);
    mbedtls_pk_free(&m.key);
    mbedtls_ctr_drbg_free(&m.drbg);
    mbedtls_entropy_free(&m.entropy);
    mbedtls_platform_zeroize(&m, sizeof m);
    return rc;
}
