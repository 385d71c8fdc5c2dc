#include "http/h2o_port.h"

#include "base/buf.h"

#include <h2o.h>
#include <h2o/http1.h>
#include <h2o/http2.h>
#include <h2o/version.h>

#include <dlfcn.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if H2O_LIBRARY_VERSION_MAJOR == 0 && H2O_LIBRARY_VERSION_MINOR < 14
#define OLD_H2O 1 /* 2.2.x */
#else
#define OLD_H2O 0
#endif

#ifndef DN_H2O_STATIC
#define DN_H2O_STATIC 0
#endif
#ifdef DN_H2O_TEST_HIDDEN /* the test that a build without interposition is refused */
#define HOOK_VISIBILITY "hidden"
#else
#define HOOK_VISIBILITY "default"
#endif
#if DN_H2O_STATIC
#define HOOK(name) __wrap_##name
#define REAL(name) __real_##name
#else
#define HOOK(name) name
#define REAL(name) real.name
#endif

/* One day: h2o's own HTTP/1 timers are out of the way, ours tell header, body and idle apart. */
#define FAR_MS (24u * 3600 * 1000)
/* Streams that 2.2.5 announces. With fewer running at once the rest is queued inside h2o, and a write error on such a
 * connection starts queued requests while it is being torn down: an assertion ends the process. */
#define H2_STREAMS               100
#define H2_STREAMS_WITHOUT_CURES 32

bool dn_h2o_test_without_cures;

#ifdef __SANITIZE_ADDRESS__
/* 2.2.5 keeps free lists per thread and never empties them; its message queue is not freed either. */
const char *__lsan_default_suppressions(void);
const char *__lsan_default_suppressions(void)
{
    return "leak:h2o_mem_alloc_recycle\nleak:h2o_multithread_create_queue\n";
}
#endif

struct dn_h2o_conf {
    h2o_globalconf_t global;
    dn_h2o_on_req on_req;
    char *server_name;
};

struct dn_h2o {
    h2o_context_t context;
    h2o_accept_ctx_t accept;
    h2o_loop_t *loop;
    struct dn_h2o_conf *conf;
    int silent_fd, silent_peer; /* a pipe that never has data; each virtual socket holds a copy of its read end */
};

struct dn_watch {
    h2o_socket_t *sock;
    void (*on_readable)(void *);
    void (*on_writable)(void *);
    void *arg;
};

struct dn_vsock {
    h2o_socket_t *sock;
    h2o_socket_cb read_cb; /* the one set at accept; HTTP/2 never changes it */
    struct dn_h2o *h;
    const struct dn_vsock_ops *ops;
    void *conn;
    bool is_h2;
};

struct handler {
    h2o_handler_t super;
    struct dn_h2o_conf *conf;
};

const char *dn_h2o_version(void)
{
    return H2O_VERSION;
}

/* --- interposition ------------------------------------------------------------------------------------------------ */

static atomic_ulong n_hooked; /* writes of virtual sockets; read by the self-test */

#if DN_H2O_STATIC
void __real_h2o_socket_write(h2o_socket_t *, h2o_iovec_t *, size_t, h2o_socket_cb);
void __real_h2o_socket_notify_write(h2o_socket_t *, h2o_socket_cb);
void __wrap_h2o_socket_write(h2o_socket_t *, h2o_iovec_t *, size_t, h2o_socket_cb);
void __wrap_h2o_socket_notify_write(h2o_socket_t *, h2o_socket_cb);
#else
static struct {
    void (*h2o_socket_write)(h2o_socket_t *, h2o_iovec_t *, size_t, h2o_socket_cb);
    void (*h2o_socket_notify_write)(h2o_socket_t *, h2o_socket_cb);
#if !OLD_H2O
    void (*h2o_socket_sendvec)(h2o_socket_t *, h2o_sendvec_t *, size_t, unsigned, h2o_socket_cb);
#endif
} real;

static int find_real(const char *name, void *out, void *ours, struct dn_err *err)
{
    void *p = dlsym(RTLD_NEXT, name);
    if (!p || p == ours)
        return dn_err_set(err, DN_INTERNAL, "%s() of libh2o can't be found behind ours", name);
    memcpy(out, &p, sizeof p);
    return 0;
}
#endif

int dn_h2o_init(struct dn_err *err)
{
    /* Prompts must not be spilled to a file in the temporary folder (2.2.5 does so above 32 MiB). */
    h2o_socket_buffer_mmap_settings.threshold = SIZE_MAX;
#if DN_H2O_STATIC
    (void)err;
    return 0;
#else
    int rc = find_real("h2o_socket_write", &real.h2o_socket_write, (void *)h2o_socket_write, err);
    if (!rc)
        rc = find_real("h2o_socket_notify_write", &real.h2o_socket_notify_write, (void *)h2o_socket_notify_write, err);
#if !OLD_H2O
    if (!rc)
        rc = find_real("h2o_socket_sendvec", &real.h2o_socket_sendvec, (void *)h2o_socket_sendvec, err);
#endif
    return rc;
#endif
}

static void vsock_on_close(void *data);

static struct dn_vsock *vsock_of(h2o_socket_t *sock)
{
    return sock->on_close.cb == vsock_on_close ? sock->on_close.data : NULL;
}

/* HTTP/1 answers what it can't parse with a fixed text; clients of this server expect JSON everywhere. */
static const char plain_400[] = "HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain";
#define JSON_400_BODY                                                                                                  \
    "{\"error\":{\"message\":\"the request is not valid HTTP\",\"type\":\"invalid_request_error\","                    \
    "\"param\":null,\"code\":\"invalid_request\"}}\n"
_Static_assert(sizeof JSON_400_BODY - 1 == 123, "Content-Length of json_400");
static const char json_400[] = "HTTP/1.1 400 Bad Request\r\nContent-Type: application/json\r\nConnection: close\r\n"
                               "Content-Length: 123\r\n\r\n" JSON_400_BODY;

static void vsock_output(struct dn_vsock *vs, const struct iovec *iov, size_t n, h2o_socket_cb cb)
{
    DN_BUG_ON(vs->sock->_cb.write != NULL);
    vs->sock->_cb.write = cb;
    for (size_t i = 0; i < n; i++)
        vs->sock->bytes_written += iov[i].iov_len;
    atomic_fetch_add_explicit(&n_hooked, 1, memory_order_relaxed);
    vs->ops->output(vs->conn, iov, n);
}

__attribute__((visibility(HOOK_VISIBILITY), used)) void HOOK(h2o_socket_write)(h2o_socket_t *sock, h2o_iovec_t *bufs,
                                                                               size_t n, h2o_socket_cb cb)
{
    struct dn_vsock *vs = vsock_of(sock);
    if (!vs) {
        REAL(h2o_socket_write)(sock, bufs, n, cb);
        return;
    }
    _Static_assert(sizeof(h2o_iovec_t) == sizeof(struct iovec), "h2o_iovec_t is an iovec");
    if (!vs->is_h2 && n == 1 && bufs->len >= sizeof plain_400 - 1 &&
        memcmp(bufs->base, plain_400, sizeof plain_400 - 1) == 0) {
        struct iovec json = {(void *)json_400, sizeof json_400 - 1};
        vsock_output(vs, &json, 1, cb);
        return;
    }
    vsock_output(vs, (const struct iovec *)bufs, n, cb);
}

__attribute__((visibility(HOOK_VISIBILITY), used)) void HOOK(h2o_socket_notify_write)(h2o_socket_t *sock,
                                                                                      h2o_socket_cb cb)
{
    struct dn_vsock *vs = vsock_of(sock);
    if (vs)
        vsock_output(vs, NULL, 0, cb);
    else
        REAL(h2o_socket_notify_write)(sock, cb);
}

#if !OLD_H2O
#if DN_H2O_STATIC
void __real_h2o_socket_sendvec(h2o_socket_t *, h2o_sendvec_t *, size_t, unsigned, h2o_socket_cb);
void __wrap_h2o_socket_sendvec(h2o_socket_t *, h2o_sendvec_t *, size_t, unsigned, h2o_socket_cb);
#endif
#define SENDVECS_MAX 64

__attribute__((visibility(HOOK_VISIBILITY), used)) void
HOOK(h2o_socket_sendvec)(h2o_socket_t *sock, h2o_sendvec_t *vecs, size_t n, unsigned flags, h2o_socket_cb cb)
{
    struct dn_vsock *vs = vsock_of(sock);
    if (!vs) {
        REAL(h2o_socket_sendvec)(sock, vecs, n, flags, cb);
        return;
    }
    struct dn_buf flat = {0};
    struct iovec iov[SENDVECS_MAX];
    size_t n_iov = 0;
    bool all_raw = n <= SENDVECS_MAX;
    for (size_t i = 0; all_raw && i < n; i++) {
        all_raw = vecs[i].callbacks->read_ == h2o_sendvec_read_raw;
        if (all_raw && vecs[i].len)
            iov[n_iov++] = (struct iovec){vecs[i].raw, vecs[i].len};
    }
    if (!all_raw) { /* vectors that have to be asked for their bytes: one flat copy */
        for (size_t i = 0; i < n; i++) {
            size_t len = vecs[i].len;
            if (len == 0)
                continue;
            dn_buf_reserve(&flat, len);
            DN_BUG_ON(!vecs[i].callbacks->read_(vecs + i, flat.data + flat.len, len));
            flat.len += len;
        }
        iov[0] = (struct iovec){flat.data, flat.len};
        n_iov = 1;
    }
    sock->_cb.write_flags = 0;
    vsock_output(vs, iov, n_iov, cb);
    dn_buf_release(&flat);
}
#endif

/* --- configuration and loops -------------------------------------------------------------------------------------- */

static int on_req(h2o_handler_t *self, h2o_req_t *req)
{
    ((struct handler *)self)->conf->on_req(req, dn_vsock_conn_of(req));
    return 0;
}

/* Errors of the library itself (413, 417, a path that is no path) become JSON on their way out. */
struct json_stream {
    h2o_ostream_t super;
    h2o_iovec_t body;
};

#if OLD_H2O
static void json_send(h2o_ostream_t *self, h2o_req_t *req, h2o_iovec_t *bufs, size_t n, h2o_send_state_t state)
{
    struct json_stream *js = (struct json_stream *)self;
    h2o_ostream_send_next(self, req, &js->body, n ? 1 : 0, state);
}

static struct json_stream *add_json_stream(h2o_req_t *req, h2o_ostream_t **slot)
{
    return (struct json_stream *)h2o_add_ostream(req, sizeof(struct json_stream), slot);
}
#else
static void json_send(h2o_ostream_t *self, h2o_req_t *req, h2o_sendvec_t *vecs, size_t n, h2o_send_state_t state)
{
    struct json_stream *js = (struct json_stream *)self;
    h2o_sendvec_t vec;
    h2o_sendvec_init_raw(&vec, js->body.base, js->body.len);
    h2o_ostream_send_next(self, req, &vec, n ? 1 : 0, state);
}

static struct json_stream *add_json_stream(h2o_req_t *req, h2o_ostream_t **slot)
{
    return (struct json_stream *)h2o_add_ostream(req, _Alignof(struct json_stream), sizeof(struct json_stream), slot);
}
#endif

static enum dn_code code_of_status(int status)
{
    switch (status) {
    case 404:
        return DN_NOT_FOUND;
    case 405:
        return DN_METHOD;
    case 413:
        return DN_BODY_TOO_LARGE;
    default:
        return status >= 500 ? DN_INTERNAL : DN_INVALID;
    }
}

static void json_setup(h2o_filter_t *self, h2o_req_t *req, h2o_ostream_t **slot)
{
    (void)self;
    ssize_t type = h2o_find_header(&req->res.headers, H2O_TOKEN_CONTENT_TYPE, -1);
    h2o_iovec_t *value = type >= 0 ? &req->res.headers.entries[type].value : NULL;
    if (req->res.status >= 400 && value && value->len >= 10 && memcmp(value->base, "text/plain", 10) == 0) {
        const struct dn_code_info *info = dn_code_info(code_of_status(req->res.status));
        struct json_stream *js = add_json_stream(req, slot);
        char text[256];
        int n = snprintf(text, sizeof text,
                         "{\"error\":{\"message\":\"%s\",\"type\":\"%s\",\"param\":null,\"code\":\"%s\"}}\n",
                         req->res.reason, info->type, info->code);
        js->body = h2o_strdup(&req->pool, text, (size_t)n);
        js->super.do_send = json_send;
        req->res.content_length = js->body.len;
        *value = h2o_iovec_init(H2O_STRLIT("application/json"));
        slot = &js->super.next;
    }
    h2o_setup_next_ostream(req, slot);
}

int dn_h2o_conf_open(const char *server_name, const struct dn_http_limits *limits, dn_h2o_on_req on_request,
                     struct dn_h2o_conf **out, struct dn_err *err)
{
    struct dn_h2o_conf *conf = dn_alloc0(1, sizeof *conf);
    h2o_globalconf_t *g = &conf->global;
    h2o_config_init(g);
    conf->on_req = on_request;
    conf->server_name = dn_strdup(server_name && *server_name ? server_name : "dunlin");
    g->server_name = h2o_iovec_init(conf->server_name, strlen(conf->server_name));
    /* Twice our limit: between the two our own handler answers 413, on HTTP/2 too, where h2o would reset the stream. */
    g->max_request_entity_size = (size_t)limits->body_bytes * 2;
    g->http1.req_timeout = FAR_MS;
    g->http1.upgrade_to_http2 = 0; /* HTTP/2 begins where ALPN or the first bytes say so, under our eyes */
    g->http2.idle_timeout = limits->idle_timeout_ms;
    g->http2.graceful_shutdown_timeout = limits->drain_timeout_ms;
    g->http2.max_concurrent_requests_per_connection = dn_h2o_test_without_cures ? H2_STREAMS_WITHOUT_CURES : H2_STREAMS;
#if !OLD_H2O
    g->http1.req_io_timeout = FAR_MS; /* else an event stream ends after 5 s without output */
    g->http2.max_streams = H2_STREAMS;
#endif
    h2o_hostconf_t *host = h2o_config_register_host(g, h2o_iovec_init(H2O_STRLIT("default")), 65535);
    host->http2.push_preload = 0;
    h2o_pathconf_t *path = h2o_config_register_path(host, "/", 0);
    struct handler *handler = (struct handler *)h2o_create_handler(path, sizeof *handler);
    handler->super.on_req = on_req;
    handler->conf = conf;
    handler = (struct handler *)h2o_create_handler(&host->fallback_path, sizeof *handler);
    handler->super.on_req = on_req;
    handler->conf = conf;
    h2o_filter_t *filter = h2o_create_filter(&host->fallback_path, sizeof *filter);
    filter->on_setup_ostream = json_setup;
    (void)err;
    *out = conf;
    return 0;
}

void dn_h2o_conf_close(struct dn_h2o_conf *conf)
{
    if (!conf)
        return;
    h2o_config_dispose(&conf->global);
    free(conf->server_name);
    free(conf);
}

struct dn_h2o *dn_h2o_open(struct dn_h2o_conf *conf)
{
    int fds[2];
    if (pipe2(fds, O_CLOEXEC | O_NONBLOCK))
        return NULL;
    struct dn_h2o *h = dn_alloc0(1, sizeof *h);
    h->conf = conf;
    h->silent_fd = fds[0];
    h->silent_peer = fds[1];
    h->loop = h2o_evloop_create();
    h2o_context_init(&h->context, h->loop, &conf->global);
    h->accept.ctx = &h->context;
    h->accept.hosts = conf->global.hosts;
    return h;
}

void dn_h2o_run(struct dn_h2o *h, int max_wait_ms)
{
    h2o_evloop_run(h->loop, max_wait_ms); /* -1 is EINTR: the caller comes again anyway */
#if !OLD_H2O
    h2o_cleanup_thread(h2o_now(h->loop), &h->context);
#endif
}

void dn_h2o_request_shutdown(struct dn_h2o *h)
{
    h2o_context_request_shutdown(&h->context);
}

void dn_h2o_close(struct dn_h2o *h)
{
    if (!h)
        return;
    dn_h2o_run(h, 0); /* frees closed sockets */
#if OLD_H2O
    h2o_timeout_unlink(&h->context.http2._graceful_shutdown_timeout);
#endif
    h2o_context_dispose(&h->context);
    h2o_evloop_run(h->loop, 0);
    h2o_evloop_destroy(h->loop);
    close(h->silent_fd);
    close(h->silent_peer);
    free(h);
}

/* --- watches ------------------------------------------------------------------------------------------------------ */

static void watch_readable(h2o_socket_t *sock, const char *err)
{
    (void)err;
    struct dn_watch *w = sock->data;
    w->on_readable(w->arg);
}

static void watch_writable(h2o_socket_t *sock, const char *err)
{
    (void)err;
    struct dn_watch *w = sock->data;
    w->on_writable(w->arg);
}

struct dn_watch *dn_watch_open(struct dn_h2o *h, int fd, void (*on_readable)(void *), void (*on_writable)(void *),
                               void *arg)
{
    struct dn_watch *w = dn_alloc0(1, sizeof *w);
    w->on_readable = on_readable;
    w->on_writable = on_writable;
    w->arg = arg;
    w->sock = h2o_evloop_socket_create(h->loop, fd, H2O_SOCKET_FLAG_DONT_READ);
    w->sock->data = w;
    return w;
}

void dn_watch_read(struct dn_watch *w, bool on)
{
    if (on == (w->sock->_cb.read != NULL))
        return;
    if (on)
        h2o_socket_read_start(w->sock, watch_readable);
    else
        h2o_socket_read_stop(w->sock);
}

void dn_watch_write(struct dn_watch *w)
{
    if (!w->sock->_cb.write)
        REAL(h2o_socket_notify_write)(w->sock, watch_writable);
}

int dn_watch_fd(const struct dn_watch *w)
{
    return h2o_socket_get_fd(w->sock);
}

void dn_watch_close(struct dn_watch *w)
{
    if (!w)
        return;
    h2o_socket_close(w->sock);
    free(w);
}

/* --- virtual sockets ---------------------------------------------------------------------------------------------- */

static void vsock_on_close(void *data)
{
    struct dn_vsock *vs = data;
    vs->ops->closed(vs->conn);
    free(vs);
}

struct dn_vsock *dn_vsock_open(struct dn_h2o *h, bool is_h2, const struct sockaddr *peer, socklen_t peer_len,
                               const struct dn_vsock_ops *ops, void *conn)
{
    int fd = fcntl(h->silent_fd, F_DUPFD_CLOEXEC, 0);
    if (fd < 0)
        return NULL;
    struct dn_vsock *vs = dn_alloc0(1, sizeof *vs);
    vs->h = h;
    vs->ops = ops;
    vs->conn = conn;
    vs->is_h2 = is_h2;
    vs->sock = h2o_evloop_socket_create(h->loop, fd, H2O_SOCKET_FLAG_IS_ACCEPTED_CONNECTION);
    vs->sock->on_close.cb = vsock_on_close;
    vs->sock->on_close.data = vs;
    h2o_socket_setpeername(vs->sock, (struct sockaddr *)peer, peer_len);
    return vs;
}

void dn_vsock_start(struct dn_vsock *vs)
{
    struct timeval now;
    gettimeofday(&now, NULL);
    h2o_socket_t *sock = vs->sock;
    if (vs->is_h2)
        h2o_http2_accept(&vs->h->accept, sock, now);
    else
        h2o_http1_accept(&vs->h->accept, sock, now);
    vs->read_cb = sock->_cb.read; /* neither accept closes: there is no input yet */
}

void dn_vsock_input(struct dn_vsock *vs, const void *data, size_t n)
{
    h2o_socket_t *sock = vs->sock;
    h2o_iovec_t room = h2o_buffer_reserve(&sock->input, n);
    DN_BUG_ON(room.base == NULL && "out of memory");
    memcpy(room.base, data, n);
    sock->input->size += n;
    sock->bytes_read = n;
    sock->_cb.read(sock, NULL);
}

void dn_vsock_written(struct dn_vsock *vs, bool ok)
{
    h2o_socket_t *sock = vs->sock;
    h2o_socket_cb cb = sock->_cb.write;
    sock->_cb.write = NULL;
    cb(sock, ok ? NULL : h2o_socket_error_io);
}

void dn_vsock_read_error(struct dn_vsock *vs)
{
    h2o_socket_t *sock = vs->sock;
    h2o_socket_cb cb = sock->_cb.read;
    if (!cb && vs->is_h2 && !dn_h2o_test_without_cures)
        cb = vs->read_cb;
    if (cb)
        cb(sock, h2o_socket_error_closed);
}

bool dn_vsock_wants_input(const struct dn_vsock *vs)
{
    return vs->sock->_cb.read != NULL;
}

bool dn_vsock_is_writing(const struct dn_vsock *vs)
{
    return vs->sock->_cb.write != NULL;
}

const char *dn_vsock_pending(const struct dn_vsock *vs, size_t *n)
{
    *n = vs->sock->input->size;
    return vs->sock->input->bytes;
}

static h2o_socket_t *socket_of(h2o_req_t *req)
{
#if OLD_H2O
    return req->conn->callbacks->get_socket(req->conn);
#else
    return H2O_STRUCT_FROM_MEMBER(h2o_socket_t, _log_state, req->conn->callbacks->log_state(req->conn));
#endif
}

void *dn_vsock_conn_of(struct st_h2o_req_t *req)
{
    struct dn_vsock *vs = vsock_of(socket_of(req));
    return vs ? vs->conn : NULL;
}

uint32_t dn_h2o_stream_id(struct st_h2o_req_t *req)
{
    h2o_iovec_t text = req->conn->callbacks->log_.http2.stream_id(req);
    size_t id = text.base ? h2o_strtosize(text.base, text.len) : SIZE_MAX;
    return id == SIZE_MAX ? 0 : (uint32_t)id;
}

/* --- self-test ---------------------------------------------------------------------------------------------------- */

struct probe {
    struct dn_buf out;
    bool is_closed;
};

static void probe_output(void *conn, const struct iovec *iov, size_t n)
{
    struct probe *p = conn;
    for (size_t i = 0; i < n; i++)
        dn_buf_put(&p->out, iov[i].iov_base, iov[i].iov_len);
}

static void probe_closed(void *conn)
{
    ((struct probe *)conn)->is_closed = true;
}

static void probe_answer(struct st_h2o_req_t *req, void *conn)
{
    (void)conn;
    req->res.status = 200;
    req->res.content_length = 5;
    h2o_send_inline(req, H2O_STRLIT("probe"));
}

static bool contains(const struct dn_buf *b, const char *what, size_t n)
{
    return b->len >= n && memmem(b->data, b->len, what, n) != NULL;
}

/* One request through a virtual socket. Returns whether the answer came out of it. */
static bool probe_protocol(struct dn_h2o *h, bool is_h2)
{
    static const struct dn_vsock_ops ops = {probe_output, probe_closed};
    static const char h1[] = "GET / HTTP/1.1\r\nhost: probe\r\n\r\n";
    /* preface, empty SETTINGS, HEADERS of stream 1: :method GET, :scheme https, :path / from the static table */
    static const char h2[] = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0\0\0\3\1\5\0\0\0\1\x82\x87\x84";
    struct sockaddr_in peer = {.sin_family = AF_INET};
    struct probe p = {0};
    struct dn_vsock *vs = dn_vsock_open(h, is_h2, (struct sockaddr *)&peer, sizeof peer, &ops, &p);
    if (!vs)
        return false;
    dn_vsock_start(vs);
    dn_vsock_input(vs, is_h2 ? h2 : h1, is_h2 ? sizeof h2 - 1 : sizeof h1 - 1);
    bool ok = false;
    for (int round = 0; round < 20 && !p.is_closed; round++) {
        dn_h2o_run(h, 1);
        if (p.is_closed)
            break;
        if (dn_vsock_is_writing(vs))
            dn_vsock_written(vs, true);
        ok = is_h2 ? contains(&p.out, "\4\0\0\0\0\0", 6) && contains(&p.out, "probe", 5)
                   : contains(&p.out, "HTTP/1.1 200", 12) && contains(&p.out, "probe", 5);
        if (ok)
            break;
    }
    for (int round = 0; round < 20 && !p.is_closed; round++) {
        dn_vsock_read_error(vs);
        if (!p.is_closed && dn_vsock_is_writing(vs))
            dn_vsock_written(vs, false);
        dn_h2o_run(h, 1);
    }
    dn_buf_release(&p.out);
    return ok;
}

struct self_test {
    bool h1, h2;
    unsigned long n_hooked;
    struct dn_err err;
};

static void *self_test_thread(void *arg)
{
    struct self_test *t = arg;
    const struct dn_http_limits limits = {
        .body_bytes = 1 << 20, .idle_timeout_ms = 10000, .drain_timeout_ms = 1000, .header_bytes = 16384};
    struct dn_h2o_conf *conf;
    if (dn_h2o_conf_open("probe", &limits, probe_answer, &conf, &t->err))
        return NULL;
    struct dn_h2o *h = dn_h2o_open(conf);
    if (h) {
        unsigned long before = atomic_load(&n_hooked);
        t->h2 = probe_protocol(h, true);
        t->h1 = probe_protocol(h, false);
        t->n_hooked = atomic_load(&n_hooked) - before;
        dn_h2o_close(h);
    }
    dn_h2o_conf_close(conf);
    return NULL;
}

int dn_h2o_self_test(struct dn_err *err)
{
    struct self_test t = {0};
    pthread_t thread;
    if (pthread_create(&thread, NULL, self_test_thread, &t))
        return dn_err_set(err, DN_INTERNAL, "no thread for the self-test of the HTTP layer");
    pthread_join(thread, NULL);
    if (t.h1 && t.h2)
        return 0;
    Dl_info where = {0};
#if !DN_H2O_STATIC
    void *p = dlsym(RTLD_DEFAULT, "h2o_socket_write");
    if (p)
        dladdr(p, &where);
#endif
    return dn_err_set(err, DN_INTERNAL,
                      "libh2o %s does not write through this program (HTTP/2 %s, HTTP/1 %s, %lu writes caught, "
                      "h2o_socket_write is in \"%s\"): link it so that h2o_socket_write and h2o_socket_notify_write of "
                      "the executable come first",
                      H2O_VERSION, t.h2 ? "works" : "broken", t.h1 ? "works" : "broken", t.n_hooked,
                      where.dli_fname ? where.dli_fname : "unknown");
}
