/* The start receipt: what was found, what was chosen and why, what fits, where to point a client. stderr, always the
 * same order. */
#ifndef DN_CLI_RECEIPT_H
#define DN_CLI_RECEIPT_H

#include "api/node.h"

struct dn_receipt {
    const struct dn_node *node;
    const char *listen_host; /* as bound, for URLs */
    const char *cert_origin; /* "self-signed, ~/.local/share/dunlin/tls/cert.pem" */
    const char *cleartext;   /* "" or the address of plain HTTP */
    uint16_t port;
    uint64_t start_ns; /* of dn_now_ns(), when the program began */
};
void dn_receipt_head(const struct dn_model *model, const char *device); /* before the weights load */
void dn_receipt_tail(const struct dn_receipt *r);                       /* when ready, with a curl line */

#endif
