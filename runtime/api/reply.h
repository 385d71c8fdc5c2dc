/* Small answers: JSON bodies and errors in OpenAI's form. On the request's loop. */
#ifndef DN_API_REPLY_H
#define DN_API_REPLY_H

#include "base/buf.h"
#include "base/err.h"
#include "http/http.h"
#include "sched/request.h"

struct dn_reject;

/* The request's name, into `name` and into the answer's x-request-id: the client's own if it is harmless, so that it
 * can be found in our log, else one that is drawn. */
void dn_reply_name(struct dn_http_req *req, char name[DN_REQUEST_NAME]);

/* {"error":{"message","type","param","code"}}, without anything around it. */
void dn_reply_error_json(struct dn_buf *b, const char *message, const char *type, const char *param, const char *code);
void dn_reply_err_json(struct dn_buf *b, const struct dn_err *err);

/* Answers with the error's own status; Retry-After where it is 429 or 503. */
void dn_reply_err(struct dn_http_req *req, const struct dn_err *err);
void dn_reply_reject(struct dn_http_req *req, const struct dn_reject *reject);
void dn_reply_json(struct dn_http_req *req, int status, const struct dn_buf *body);

/* Whether two strings are equal. */
bool dn_str_is(struct dn_str s, const char *text);

#endif
