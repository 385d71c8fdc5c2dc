#include "api/auth.h"

#include <strings.h>

const struct dn_key *dn_auth_find(const struct dn_keys *keys, const struct dn_http_req *req)
{
    static const char scheme[] = "Bearer ";
    const size_t n = sizeof scheme - 1;
    struct dn_str a = dn_http_header(req, "authorization");
    if (a.len <= n || strncasecmp(a.at, scheme, n) != 0)
        return NULL;
    return dn_keys_find(keys, a.at + n, a.len - n);
}

int dn_auth_check(const struct dn_keys *keys, const struct dn_http_req *req, const struct dn_key **key,
                  struct dn_err *err)
{
    *key = NULL;
    if (keys->n == 0)
        return 0;
    *key = dn_auth_find(keys, req);
    if (*key)
        return 0;
    if (dn_http_header(req, "authorization").at)
        return dn_err_set(err, DN_UNAUTHORIZED, "this key is not known here");
    return dn_err_set(err, DN_UNAUTHORIZED, "a key is needed: Authorization: Bearer ...");
}
