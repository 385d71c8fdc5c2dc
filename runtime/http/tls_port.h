/* TLS as the connection code sees it: mbedTLS 2.28 (TLS 1.2 only) or 3.6 (1.2 and 1.3) behind one interface.
 *
 * For: turning records into plain bytes and back, in memory; sockets belong to the caller. No mbedTLS type crosses this
 * header and no other file tests its version. Suites are ECDHE with AEAD only, no renegotiation, tickets on.
 *
 * Ownership: an identity is immutable and counted, so that a reload can replace it while sessions of the old one live
 * on. A configuration is counted too and belongs to one loop: its key, its random generator and its sessions are used
 * on that loop's thread alone. Ticket keys are shared by all loops, so that a session resumes wherever it lands.
 */
#ifndef DN_HTTP_TLS_PORT_H
#define DN_HTTP_TLS_PORT_H

#include "base/buf.h"
#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>

struct dn_tls_identity; /* certificate chain + key, checked */
struct dn_tls_tickets;  /* ticket keys */
struct dn_tls_conf;     /* what the sessions of one loop share */
struct dn_tls;          /* one session */

/* Once, from main, before any thread: initialises what the library would initialise lazily and without locks. */
int dn_tls_warm_up(struct dn_err *err);
const char *dn_tls_version(void); /* "mbed TLS 2.28.3" */

/* Reads two PEM files and proves that the key belongs to the certificate. Any thread. */
int dn_tls_identity_open(const char *cert_file, const char *key_file, struct dn_tls_identity **out, struct dn_err *err);
struct dn_tls_identity *dn_tls_identity_get(struct dn_tls_identity *id);
void dn_tls_identity_put(struct dn_tls_identity *id); /* NULL is fine; the key is wiped with the last reference */

int dn_tls_tickets_open(struct dn_tls_tickets **out, struct dn_err *err);
void dn_tls_tickets_close(struct dn_tls_tickets *tickets);

/* On the loop's thread. `tickets` must outlive it. */
int dn_tls_conf_open(struct dn_tls_identity *id, struct dn_tls_tickets *tickets, struct dn_tls_conf **out,
                     struct dn_err *err);
struct dn_tls_conf *dn_tls_conf_get(struct dn_tls_conf *conf);
void dn_tls_conf_put(struct dn_tls_conf *conf);

/* Records on their way in: bytes before `at` are used up. A cursor, since moving the rest of 64 KiB for every small
 * record costs more than decrypting it. */
struct dn_tls_in {
    struct dn_buf buf;
    size_t at;
};
static inline size_t dn_tls_in_left(const struct dn_tls_in *in)
{
    return in->buf.len - in->at;
}

/* A server session. It takes records from *in and appends records to *out; both belong to the caller and must stay
 * where they are. NULL when memory is short. */
struct dn_tls *dn_tls_open(struct dn_tls_conf *conf, struct dn_tls_in *in, struct dn_buf *out);
void dn_tls_close(struct dn_tls *tls);

enum dn_tls_result {
    DN_TLS_AGAIN = 0,  /* needs more input */
    DN_TLS_DONE = 1,   /* handshake over */
    DN_TLS_EOF = -1,   /* close_notify */
    DN_TLS_ERROR = -2, /* fatal; an alert may have been appended to *out */
};
enum dn_tls_result dn_tls_handshake(struct dn_tls *tls);
bool dn_tls_is_h2(const struct dn_tls *tls); /* ALPN result, after the handshake */
/* > 0: plain bytes in `data` (at most one record); otherwise AGAIN, EOF or ERROR. */
long dn_tls_read(struct dn_tls *tls, void *data, size_t n);
int dn_tls_write(struct dn_tls *tls, const void *data, size_t n); /* all of it; 0 or -1 */
void dn_tls_close_notify(struct dn_tls *tls);

#endif
