#include "http/tls_port.h"
#include "http/tls_selfsigned.h"

#include <criterion/criterion.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static char dir[64], cert[96], key[96];

static void setup(void)
{
    snprintf(dir, sizeof dir, "/tmp/dn_tls_XXXXXX");
    cr_assert(mkdtemp(dir));
    snprintf(cert, sizeof cert, "%s/cert.pem", dir);
    snprintf(key, sizeof key, "%s/key.pem", dir);
}

static void teardown(void)
{
    unlink(cert);
    unlink(key);
    rmdir(dir);
}

static void write_text(const char *file, const char *text)
{
    FILE *f = fopen(file, "w");
    cr_assert(f);
    fputs(text, f);
    fclose(f);
}

TestSuite(tls_port, .init = setup, .fini = teardown);

Test(tls_port, a_selfsigned_certificate_can_be_used)
{
    struct dn_err err = {0};
    struct dn_tls_identity *id;
    struct dn_tls_tickets *tickets;
    struct dn_tls_conf *conf;
    struct stat st;
    cr_assert_eq(dn_tls_warm_up(&err), 0);
    cr_assert_eq(dn_tls_selfsigned(cert, key, 30, &err), 0, "%s", err.text);
    cr_assert_eq(stat(key, &st), 0);
    cr_assert_eq(st.st_mode & 0777, 0600);
    cr_assert_eq(dn_tls_identity_open(cert, key, &id, &err), 0, "%s", err.text);
    cr_assert_eq(dn_tls_tickets_open(&tickets, &err), 0);
    cr_assert_eq(dn_tls_conf_open(id, tickets, &conf, &err), 0, "%s", err.text);
    dn_tls_identity_put(id);

    struct dn_tls_in in = {0};
    struct dn_buf out = {0};
    struct dn_tls *tls = dn_tls_open(conf, &in, &out);
    dn_tls_conf_put(conf); /* the session holds it */
    cr_assert_eq(dn_tls_handshake(tls), DN_TLS_AGAIN);
    dn_buf_puts(&in.buf, "GET / HTTP/1.1\r\n\r\n");
    cr_assert_eq(dn_tls_handshake(tls), DN_TLS_ERROR);
    dn_tls_close(tls);
    dn_buf_release(&in.buf);
    dn_buf_release(&out);
    dn_tls_tickets_close(tickets);
}

Test(tls_port, an_existing_file_is_never_overwritten)
{
    struct dn_err err = {0};
    write_text(cert, "mine");
    cr_assert_eq(dn_tls_selfsigned(cert, key, 30, &err), -DN_IO);
    cr_assert_neq(access(key, F_OK), 0, "a key without its certificate stays behind");
    cr_assert_eq(dn_tls_selfsigned(cert, key, 0, &err), -DN_CONFIG);
}

Test(tls_port, errors_name_the_file_and_the_reason)
{
    struct dn_err err = {0};
    struct dn_tls_identity *id = NULL;
    cr_assert_eq(dn_tls_identity_open(NULL, key, &id, &err), -DN_CONFIG);
    cr_assert_eq(dn_tls_identity_open(cert, key, &id, &err), -DN_IO);
    cr_assert(strstr(err.text, cert) && strstr(err.text, "No such file"));
    write_text(cert, "no certificate");
    write_text(key, "no key");
    cr_assert_eq(dn_tls_identity_open(cert, key, &id, &err), -DN_CONFIG);
    cr_assert(strstr(err.text, "not valid PEM"), "%s", err.text);
    unlink(cert);
    unlink(key);
    cr_assert_eq(dn_tls_selfsigned(cert, key, 30, &err), 0);
    unlink(key);
    char cert2[128];
    snprintf(cert2, sizeof cert2, "%s/2.pem", dir);
    cr_assert_eq(dn_tls_selfsigned(cert2, key, 30, &err), 0);
    unlink(cert2);
    cr_assert_eq(dn_tls_identity_open(cert, key, &id, &err), -DN_CONFIG);
    cr_assert(strstr(err.text, "does not belong"), "%s", err.text);
    cr_assert_null(id);
}
