/* A certificate for the first start: self-signed ECDSA P-256 for localhost, 127.0.0.1 and ::1, in PEM files.
 * Any thread; nothing is kept. Clients have to be told to trust the file (curl --cacert). */
#ifndef DN_HTTP_TLS_SELFSIGNED_H
#define DN_HTTP_TLS_SELFSIGNED_H

#include "base/err.h"

/* Writes both files; neither may exist. The key file is readable by its owner only. `days` from now, 1..3650. */
int dn_tls_selfsigned(const char *cert_file, const char *key_file, unsigned days, struct dn_err *err);

#endif
