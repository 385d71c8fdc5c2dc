/* Who calls: the bearer key of a request, looked up among the node's keys (script/keys.h: hashes, constant time). */
#ifndef DN_API_AUTH_H
#define DN_API_AUTH_H

#include "http/http.h"
#include "script/keys.h"

/* The key of the request's Authorization header ("Bearer ..."), or NULL. */
const struct dn_key *dn_auth_find(const struct dn_keys *keys, const struct dn_http_req *req);

/* As dn_auth_find, where a key is needed: none where the node has no keys. Error: DN_UNAUTHORIZED. */
int dn_auth_check(const struct dn_keys *keys, const struct dn_http_req *req, const struct dn_key **key,
                  struct dn_err *err);

#endif
