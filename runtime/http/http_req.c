#include "http/internal.h"

#include <h2o.h>

#include <string.h>

/* h2o's side of a request; allocated from the request's pool, so that it ends with it, however that happens. */
struct h2o_side {
    h2o_generator_t generator;
    h2o_req_t *req;
    h2o_iovec_t whole; /* body of a whole answer, in the request's pool: no buffers to allocate for it */
    struct dn_http_req r;
};

static struct h2o_side *side_of(const struct dn_http_req *r)
{
    return (struct h2o_side *)((char *)r - offsetof(struct h2o_side, r));
}

static const char *reason_of(int status)
{
    switch (status) {
    case 200:
        return "OK";
    case 400:
        return "Bad Request";
    case 401:
        return "Unauthorized";
    case 403:
        return "Forbidden";
    case 404:
        return "Not Found";
    case 405:
        return "Method Not Allowed";
    case 408:
        return "Request Timeout";
    case 413:
        return "Content Too Large";
    case 414:
        return "URI Too Long";
    case 415:
        return "Unsupported Media Type";
    case 429:
        return "Too Many Requests";
    case 431:
        return "Request Header Fields Too Large";
    case 500:
        return "Internal Server Error";
    case 503:
        return "Service Unavailable";
    default:
        return status < 400 ? "OK" : "Error";
    }
}

void dn_error_body(struct dn_buf *out, enum dn_code code, const char *message)
{
    const struct dn_code_info *info = dn_code_info(code);
    dn_buf_printf(out, "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"param\":null,\"code\":\"%s\"}}\n", message,
                  info->type, info->code);
}

/* --- dirty list: requests with something to hand to h2o ------------------------------------------------------------
 */

static void mark_dirty(struct dn_http_req *r)
{
    struct dn_loop *loop = r->conn->loop;
    if (r->is_dirty)
        return;
    r->is_dirty = true;
    r->prev_dirty = NULL;
    r->next_dirty = loop->dirty;
    if (loop->dirty)
        loop->dirty->prev_dirty = r;
    loop->dirty = r;
}

static void unmark_dirty(struct dn_http_req *r)
{
    if (!r->is_dirty)
        return;
    r->is_dirty = false;
    if (r->prev_dirty)
        r->prev_dirty->next_dirty = r->next_dirty;
    else
        r->conn->loop->dirty = r->next_dirty;
    if (r->next_dirty)
        r->next_dirty->prev_dirty = r->prev_dirty;
}

void dn_loop_flush(struct dn_loop *loop)
{
    while (loop->dirty) {
        struct dn_http_req *r = loop->dirty;
        unmark_dirty(r);
        if (r->owes_resume) {
            r->owes_resume = false;
            if (loop->http->handler.on_resume && !r->is_over && !r->is_refused)
                loop->http->handler.on_resume(loop, r, loop->user);
        }
        dn_req_flush(r); /* the request may be gone behind this line */
    }
}

/* --- h2o's callbacks -----------------------------------------------------------------------------------------------
 */

static size_t unsent(const struct dn_http_req *r)
{
    return r->cur.len + r->sending.len;
}

static void on_proceed(h2o_generator_t *generator, h2o_req_t *req)
{
    struct h2o_side *side = (struct h2o_side *)generator;
    struct dn_http_req *r = &side->r;
    r->sending.len = 0;
    r->sending_since_ns = 0;
    if (r->is_paused && unsent(r) <= r->conn->loop->http->limits.stream_pause_bytes / 2) {
        r->is_paused = false;
        r->owes_resume = true;
        mark_dirty(r);
    }
    dn_req_flush(r);
}

static void on_dispose(void *p)
{
    struct h2o_side *side = p;
    struct dn_http_req *r = &side->r;
    struct dn_conn *c = r->conn;
    struct dn_loop *loop = c->loop;
    unmark_dirty(r);
    if (r->prev)
        r->prev->next = r->next;
    else
        c->first_req = r->next;
    if (r->next)
        r->next->prev = r->prev;
    atomic_fetch_sub_explicit(&loop->stats.streams, 1, memory_order_relaxed);
    c->idle_since_ns = loop->now_ns;
    side->req = NULL;
    r->is_over = true;
    if (!r->is_refused)
        loop->http->handler.on_gone(loop, r, loop->user);
    unmark_dirty(r);
    dn_buf_release(&r->cur);
    dn_buf_release(&r->sending);
    dn_conn_queue(c); /* HTTP/1: there may be a next request */
}

/* --- from the handler to h2o ---------------------------------------------------------------------------------------
 */

static void start_response(struct dn_http_req *r)
{
    struct h2o_side *side = side_of(r);
    side->req->res.status = r->status;
    side->req->res.reason = reason_of(r->status);
    side->generator.proceed = on_proceed;
    side->generator.stop = NULL;
    r->has_response = true;
    h2o_start_response(side->req, &side->generator);
}

void dn_req_flush(struct dn_http_req *r)
{
    struct h2o_side *side = side_of(r);
    if (r->is_over || r->is_final || !r->is_started || r->sending.len)
        return;
    if (r->cur.len == 0 && !r->is_finished)
        return;
    if (!r->has_response)
        start_response(r);
    if (side->whole.len) {
        r->is_final = true;
        r->sending_since_ns = r->conn->loop->now_ns;
        h2o_send(side->req, &side->whole, 1, H2O_SEND_STATE_FINAL);
        return;
    }
    struct dn_buf swap = r->sending;
    r->sending = r->cur;
    r->cur = swap;
    r->cur.len = 0;
    r->is_final = r->is_finished;
    h2o_iovec_t vec = {r->sending.data, r->sending.len};
    r->sending_since_ns = r->sending.len ? r->conn->loop->now_ns : 0;
    h2o_send(side->req, &vec, vec.len ? 1 : 0, r->is_final ? H2O_SEND_STATE_FINAL : H2O_SEND_STATE_IN_PROGRESS);
    /* With the end sent, h2o may have disposed of the request already. */
}

void dn_req_fail(struct dn_http_req *r)
{
    struct h2o_side *side = side_of(r);
    if (r->is_final || r->sending.len)
        return; /* h2o has something in flight: its write callback gets the error */
    r->is_over = true;
    r->is_final = true;
    side->req->http1_is_persistent = 0;
    if (!r->has_response) {
        r->status = 500;
        start_response(r);
    }
    h2o_send(side->req, NULL, 0, H2O_SEND_STATE_ERROR);
}

uint32_t dn_req_stream_id(const struct dn_http_req *r)
{
    return dn_h2o_stream_id(side_of(r)->req);
}

void dn_req_reset(struct dn_http_req *r)
{
    struct dn_conn *c = r->conn;
    r->is_over = true;
    if (c->is_h2) {
        r->wants_reset = true;
        c->has_reset = true;
        dn_conn_queue(c);
    } else {
        dn_conn_doom(c);
    }
}

/* --- requests ------------------------------------------------------------------------------------------------------
 */

/* Answered by us; the handler never hears of it. */
static void refuse(struct dn_http_req *r, enum dn_code code, const char *message)
{
    struct dn_buf body = {0};
    dn_error_body(&body, code, message);
    r->is_refused = true;
    dn_http_reply(r, dn_code_info(code)->status, "application/json", body.data, body.len);
    dn_buf_release(&body);
}

/* Limits that can only be checked on the parsed request. Returns whether it was refused. */
static bool check_limits(struct dn_http_req *r, const struct dn_http_limits *limits)
{
    h2o_req_t *req = side_of(r)->req;
    char text[128];
    size_t bytes = req->path.len + req->authority.len;
    for (size_t i = 0; i < req->headers.size; i++)
        bytes += req->headers.entries[i].name->len + req->headers.entries[i].value.len;
    if (req->path.len > limits->path_bytes) {
        snprintf(text, sizeof text, "the path has %zu bytes, at most %u are accepted", req->path.len,
                 limits->path_bytes);
        refuse(r, DN_URI_TOO_LONG, text);
    } else if (req->headers.size > limits->header_fields) {
        snprintf(text, sizeof text, "%zu header fields, at most %u are accepted", req->headers.size,
                 limits->header_fields);
        refuse(r, DN_HEADERS_TOO_LARGE, text);
    } else if (bytes > limits->header_bytes) {
        snprintf(text, sizeof text, "%zu bytes of headers, at most %u are accepted", bytes, limits->header_bytes);
        refuse(r, DN_HEADERS_TOO_LARGE, text);
    } else if (req->entity.len > limits->body_bytes) {
        snprintf(text, sizeof text, "the body has %zu bytes, at most %llu are accepted", req->entity.len,
                 (unsigned long long)limits->body_bytes);
        refuse(r, DN_BODY_TOO_LARGE, text);
    } else {
        return false;
    }
    return true;
}

void dn_req_on_request(struct st_h2o_req_t *req, void *conn)
{
    struct dn_conn *c = conn;
    struct dn_loop *loop = c->loop;
    c->n_requests++;
    dn_stat_add(&loop->stats.requests, 1);
    if (c->is_h2)
        dn_stat_add(&loop->stats.requests_h2, 1);
    struct h2o_side *side = h2o_mem_alloc_shared(&req->pool, sizeof *side, on_dispose);
    *side = (struct h2o_side){.req = req};
    struct dn_http_req *r = &side->r;
    r->conn = c;
    r->next = c->first_req;
    if (r->next)
        r->next->prev = r;
    c->first_req = r;
    atomic_fetch_add_explicit(&loop->stats.streams, 1, memory_order_relaxed);
    if (!check_limits(r, &loop->http->limits))
        loop->http->handler.on_request(loop, r, loop->user);
    /* An answer given at once leaves with what h2o writes after this call. */
    unmark_dirty(r);
    dn_req_flush(r);
}

static struct dn_str str(h2o_iovec_t v)
{
    return (struct dn_str){v.base, v.len};
}

struct dn_str dn_http_method(const struct dn_http_req *r)
{
    h2o_req_t *req = side_of(r)->req;
    return req ? str(req->method) : (struct dn_str){0};
}

struct dn_str dn_http_path(const struct dn_http_req *r)
{
    h2o_req_t *req = side_of(r)->req;
    if (!req)
        return (struct dn_str){0};
    struct dn_str path = str(req->path);
    if (req->query_at < path.len)
        path.len = req->query_at;
    return path;
}

struct dn_str dn_http_query(const struct dn_http_req *r)
{
    h2o_req_t *req = side_of(r)->req;
    if (!req || req->query_at >= req->path.len)
        return (struct dn_str){0};
    return (struct dn_str){req->path.base + req->query_at + 1, req->path.len - req->query_at - 1};
}

struct dn_str dn_http_header(const struct dn_http_req *r, const char *lower_name)
{
    h2o_req_t *req = side_of(r)->req;
    if (!req)
        return (struct dn_str){0};
    if (strcmp(lower_name, "host") == 0)
        return str(req->authority);
    ssize_t at = h2o_find_header_by_str(&req->headers, lower_name, strlen(lower_name), -1);
    return at < 0 ? (struct dn_str){0} : str(req->headers.entries[at].value);
}

struct dn_str dn_http_body(const struct dn_http_req *r)
{
    h2o_req_t *req = side_of(r)->req;
    return req ? str(req->entity) : (struct dn_str){0};
}

const char *dn_http_peer(const struct dn_http_req *r)
{
    return r->conn->peer;
}

bool dn_http_peer_is_loopback(const struct dn_http_req *r)
{
    return r->conn->is_loopback;
}

int dn_http_version(const struct dn_http_req *r)
{
    h2o_req_t *req = side_of(r)->req;
    if (!req)
        return r->conn->is_h2 ? 20 : 11;
    return (req->version >> 8) * 10 + (req->version & 0xff);
}

void dn_http_set_user(struct dn_http_req *r, void *user)
{
    r->user = user;
}

void *dn_http_user(const struct dn_http_req *r)
{
    return r->user;
}

/* --- responses -----------------------------------------------------------------------------------------------------
 */

void dn_http_add_header(struct dn_http_req *r, const char *name, const char *value)
{
    h2o_req_t *req = side_of(r)->req;
    if (r->is_over || r->has_response)
        return;
    h2o_iovec_t n = h2o_strdup(&req->pool, name, SIZE_MAX), v = h2o_strdup(&req->pool, value, SIZE_MAX);
    for (size_t i = 0; i < v.len; i++) /* a value that came from a client must not add lines */
        if ((unsigned char)v.base[i] < ' ' && v.base[i] != '\t')
            v.base[i] = ' ';
    h2o_add_header_by_str(&req->pool, &req->res.headers, n.base, n.len, 1, NULL, v.base, v.len);
}

static void begin(struct dn_http_req *r, int status, const char *content_type)
{
    r->is_started = true;
    r->status = status;
    if (!content_type)
        return;
    h2o_req_t *req = side_of(r)->req;
    h2o_iovec_t v = h2o_strdup(&req->pool, content_type, SIZE_MAX);
    h2o_add_header(&req->pool, &req->res.headers, H2O_TOKEN_CONTENT_TYPE, NULL, v.base, v.len);
}

void dn_http_reply(struct dn_http_req *r, int status, const char *content_type, const void *body, size_t n)
{
    h2o_req_t *req = side_of(r)->req;
    if (r->is_over || r->is_started)
        return;
    begin(r, status, content_type);
    req->res.content_length = n;
    if (!(req->method.len == 4 && memcmp(req->method.base, "HEAD", 4) == 0))
        side_of(r)->whole = h2o_strdup(&req->pool, body ? body : "", n);
    r->is_finished = true;
    mark_dirty(r);
}

void dn_http_start(struct dn_http_req *r, int status, const char *content_type)
{
    if (r->is_over || r->is_started)
        return;
    begin(r, status, content_type);
}

void dn_http_write(struct dn_http_req *r, const void *data, size_t n)
{
    const struct dn_http_limits *limits = &r->conn->loop->http->limits;
    if (r->is_over || r->is_finished || !r->is_started || n == 0)
        return;
    if (unsent(r) + n > limits->stream_cut_bytes) {
        dn_stat_add(&r->conn->loop->stats.cut_slow, 1);
        dn_req_reset(r);
        return;
    }
    dn_buf_put(&r->cur, data, n);
    if (unsent(r) > limits->stream_pause_bytes)
        r->is_paused = true;
    mark_dirty(r);
}

void dn_http_finish(struct dn_http_req *r)
{
    if (r->is_over || r->is_finished || !r->is_started)
        return;
    r->is_finished = true;
    mark_dirty(r);
}

void dn_http_abort(struct dn_http_req *r)
{
    struct dn_conn *c = r->conn;
    if (r->is_over || r->is_finished)
        return;
    if (c->is_h2) {
        dn_req_reset(r);
        return;
    }
    r->is_over = true;
    c->is_aborting = true;
    dn_conn_queue(c);
}

bool dn_http_paused(const struct dn_http_req *r)
{
    return r->is_paused;
}
