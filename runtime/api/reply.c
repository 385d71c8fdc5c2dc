#include "api/reply.h"

#include "base/hash.h"
#include "base/json.h"
#include "policy/decision.h"

#include <stdio.h>
#include <string.h>

void dn_reply_name(struct dn_http_req *req, char name[DN_REQUEST_NAME])
{
    struct dn_str given = dn_http_header(req, "x-request-id");
    bool ok = given.len > 0 && given.len < DN_REQUEST_NAME;
    for (size_t i = 0; ok && i < given.len; i++) {
        char ch = given.at[i];
        ok = (ch >= 'a' && ch <= 'z') || (ch >= 'A' && ch <= 'Z') || (ch >= '0' && ch <= '9') || ch == '-' ||
             ch == '_' || ch == '.';
    }
    if (ok) {
        memcpy(name, given.at, given.len);
        name[given.len] = '\0';
    } else {
        uint8_t random[12];
        dn_random_bytes(random, sizeof random);
        memcpy(name, "req_", 4);
        dn_hex_print(random, sizeof random, name + 4);
    }
    dn_http_add_header(req, "x-request-id", name);
}

void dn_reply_error_json(struct dn_buf *b, const char *message, const char *type, const char *param, const char *code)
{
    struct dn_json_writer w = dn_json_writer(b);
    dn_json_begin_object(&w);
    dn_json_key(&w, "error");
    dn_json_begin_object(&w);
    dn_json_key(&w, "message");
    dn_json_string(&w, message);
    dn_json_key(&w, "type");
    dn_json_string(&w, type);
    dn_json_key(&w, "param");
    dn_json_string(&w, param && param[0] ? param : NULL);
    dn_json_key(&w, "code");
    dn_json_string(&w, code);
    dn_json_end_object(&w);
    dn_json_end_object(&w);
}

void dn_reply_err_json(struct dn_buf *b, const struct dn_err *err)
{
    const struct dn_code_info *info = dn_code_info(err->code);
    dn_reply_error_json(b, err->text[0] ? err->text : info->help, info->type, err->param, info->code);
}

void dn_reply_json(struct dn_http_req *req, int status, const struct dn_buf *body)
{
    dn_http_reply(req, status, "application/json", body->data, body->len);
}

void dn_reply_err(struct dn_http_req *req, const struct dn_err *err)
{
    struct dn_buf b = {0};
    int status = dn_code_info(err->code)->status;
    dn_reply_err_json(&b, err);
    if (status == 429 || status == 503)
        dn_http_add_header(req, "retry-after", "1");
    if (status == 401)
        dn_http_add_header(req, "www-authenticate", "Bearer");
    dn_reply_json(req, status, &b);
    dn_buf_release(&b);
}

void dn_reply_reject(struct dn_http_req *req, const struct dn_reject *reject)
{
    struct dn_buf b = {0};
    char seconds[16];
    dn_reply_error_json(&b, reject->message, dn_reject_type(reject), reject->param, reject->code);
    if (reject->retry_after_s >= 0) {
        snprintf(seconds, sizeof seconds, "%d", reject->retry_after_s);
        dn_http_add_header(req, "retry-after", seconds);
    }
    dn_reply_json(req, reject->status, &b);
    dn_buf_release(&b);
}

bool dn_str_is(struct dn_str s, const char *text)
{
    return s.len == strlen(text) && memcmp(s.at, text, s.len) == 0;
}
