/* libh2o-evloop as the rest of runtime/http sees it. The only files that know h2o's version: 2.2.5 (Debian 12) and
 * upstream 0.16 differ in timers, writes and the connection behind a request, and all of that ends here (h2o_port.c).
 *
 * Two things live here. An *event loop* with file descriptor watches. And the *virtual socket*: h2o believes that it
 * owns a socket, but its input is what dn_vsock_input() puts there and its output goes to a callback, so that TLS,
 * limits and frame checks sit between h2o and TCP in the same thread, without another copy through the kernel. Input
 * needs public fields only. Output is caught by our own h2o_socket_write() and h2o_socket_notify_write(), which the
 * dynamic linker (or --wrap with a static h2o) puts in place of the library's; dn_h2o_self_test() proves that this
 * worked.
 *
 * Threads: everything of one dn_h2o must be created, used and closed on one thread (h2o's buffers remember their
 * thread). struct dn_h2o_conf is shared by all of them and read only once built.
 */
#ifndef DN_HTTP_H2O_PORT_H
#define DN_HTTP_H2O_PORT_H

#include "base/err.h"
#include "http/http.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>

struct dn_h2o_conf; /* h2o_globalconf_t: one host, one handler for every path */
struct dn_h2o;      /* evloop + context of one thread */
struct dn_watch;    /* a watched file descriptor */
struct dn_vsock;    /* a connection as h2o sees it */
struct st_h2o_req_t;

/* Called for every complete request, inside h2o: answer with h2o_start_response() at once or later (http_req.c). */
typedef void (*dn_h2o_on_req)(struct st_h2o_req_t *req, void *conn);

const char *dn_h2o_version(void); /* "2.2.5" */

/* Finds the library's own functions behind ours; before anything else, any number of times. */
int dn_h2o_init(struct dn_err *err);
/* Runs one HTTP/2 and one HTTP/1 request through virtual sockets on a thread of its own; an error says which way is
 * broken and where the symbol went. */
int dn_h2o_self_test(struct dn_err *err);

int dn_h2o_conf_open(const char *server_name, const struct dn_http_limits *limits, dn_h2o_on_req on_req,
                     struct dn_h2o_conf **out, struct dn_err *err);
void dn_h2o_conf_close(struct dn_h2o_conf *conf);

struct dn_h2o *dn_h2o_open(struct dn_h2o_conf *conf);
void dn_h2o_close(struct dn_h2o *h);                /* all watches and virtual sockets must be closed before */
void dn_h2o_run(struct dn_h2o *h, int max_wait_ms); /* waits for events, calls back */
void dn_h2o_request_shutdown(struct dn_h2o *h);     /* GOAWAY on all HTTP/2 connections; works once */

/* Watches. Callbacks run from dn_h2o_run(). The descriptor is closed with the watch. */
struct dn_watch *dn_watch_open(struct dn_h2o *h, int fd, void (*on_readable)(void *), void (*on_writable)(void *),
                               void *arg);
void dn_watch_read(struct dn_watch *w, bool on);
void dn_watch_write(struct dn_watch *w); /* one on_writable call, as soon as the descriptor is writable */
int dn_watch_fd(const struct dn_watch *w);
void dn_watch_close(struct dn_watch *w);

/* What a virtual socket needs from its owner. Both run inside h2o: no call back into the virtual socket from there. */
struct dn_vsock_ops {
    /* Bytes for the client, to be copied; answer later with exactly one dn_vsock_written(). n_iov = 0: h2o only wants
     * to know when it may write again. */
    void (*output)(void *conn, const struct iovec *iov, size_t n_iov);
    void (*closed)(void *conn); /* h2o is done with the connection; the dn_vsock is gone */
};
/* NULL when no descriptor is left. May call back (output) before it returns. */
struct dn_vsock *dn_vsock_open(struct dn_h2o *h, bool is_h2, const struct sockaddr *peer, socklen_t peer_len,
                               const struct dn_vsock_ops *ops, void *conn);
/* The following call into h2o, which may close the virtual socket (ops->closed) before they return. Never call them
 * from inside h2o, i.e. from a handler, a generator or one of the ops. */
void dn_vsock_start(struct dn_vsock *vs);                             /* hands the socket to HTTP/2 or HTTP/1 */
void dn_vsock_input(struct dn_vsock *vs, const void *data, size_t n); /* only while dn_vsock_wants_input() */
void dn_vsock_written(struct dn_vsock *vs, bool ok);                  /* only while dn_vsock_is_writing() */
void dn_vsock_read_error(struct dn_vsock *vs); /* the client is gone (HTTP/2: also while not reading) */

bool dn_vsock_wants_input(const struct dn_vsock *vs);
bool dn_vsock_is_writing(const struct dn_vsock *vs);
const char *dn_vsock_pending(const struct dn_vsock *vs, size_t *n); /* input that h2o keeps until it is complete */

void *dn_vsock_conn_of(struct st_h2o_req_t *req);    /* the `conn` behind a request */
uint32_t dn_h2o_stream_id(struct st_h2o_req_t *req); /* HTTP/2 only */

extern bool dn_h2o_test_without_cures; /* tests only: brings the abort of 2.2.5 back; set before dn_http_open() */

#endif
