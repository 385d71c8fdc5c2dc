/* The HTTP server as the rest of the program sees it: requests in, response pieces out.
 *
 * For: accepting HTTPS (HTTP/2 and HTTP/1.1 by ALPN) on several event loops, cleartext on loopback behind a flag;
 * limits; back-pressure; telling the owner of a request that its client is gone; draining. No h2o or TLS type crosses
 * this header.
 *
 * Threads: dn_http_open/run/drain/stop/close from main. Each event loop is a thread of its own; handlers run on the
 * loop that accepted the connection and every `struct dn_http_req` belongs to that loop: touch it nowhere else. The
 * only call for other threads is dn_loop_post(). A request is named across threads by {loop, slot, generation}, never
 * by pointer.
 *
 * Life of a request: on_request is called once headers and body are complete. The handler answers with
 * dn_http_reply() (whole), or dn_http_start() + dn_http_write()* + dn_http_finish() or dn_http_abort() (stream), at
 * once or later. on_gone is called exactly once for every request, on its loop, when it is over for whatever reason
 * (answered completely, reset, connection lost, slow reader cut, drain deadline); `req` is invalid after that call
 * returns.
 *
 * A client that leaves is noticed within milliseconds on HTTP/1 and 2: RST_STREAM, RST, FIN, TLS close_notify. Shutting
 * down only the write side counts as leaving too, except when dn_http_reply() or dn_http_finish() has been called
 * already: then the rest of the answer is still delivered.
 */
#ifndef DN_HTTP_HTTP_H
#define DN_HTTP_HTTP_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct dn_http;     /* the server, owned by main */
struct dn_loop;     /* one event loop */
struct dn_http_req; /* one request, owned by its loop */

struct dn_http_limits {            /* 0 in any field = the default in the comment */
    uint32_t connections;          /* per loop; 4096 */
    uint32_t connections_per_ip;   /* per loop; 256 (loopback is exempt); IPv6 counts by /64 */
    uint32_t header_bytes;         /* 16384: more is 431; an HTTP/2 block of twice as much ends the connection */
    uint32_t header_fields;        /* 100: more is 431 */
    uint32_t path_bytes;           /* 2048, with the query: more is 414 */
    uint64_t body_bytes;           /* 8 MiB: more is 413; above twice as much HTTP/2 resets the stream */
    uint64_t body_bytes_inflight;  /* per loop, incomplete bodies together; 256 MiB: reading pauses, but for one */
    uint32_t handshake_timeout_ms; /* 10000 */
    uint32_t header_timeout_ms;    /* 10000; also the first byte of the first request. HTTP/1 gets 408 */
    uint32_t body_timeout_ms;      /* 60000, from the end of the headers on HTTP/2, from their start on HTTP/1 */
    uint32_t idle_timeout_ms;      /* 60000, keep-alive */
    uint32_t stall_timeout_ms;     /* 30000: a reader that takes nothing for so long is cut */
    uint32_t stream_pause_bytes;   /* 64 KiB unsent: dn_http_paused() becomes true */
    uint32_t stream_cut_bytes;     /* 1 MiB unsent: the client is cut */
    uint32_t drain_timeout_ms;     /* 30000 */
};

struct dn_http_conf {
    const char *listen;               /* "127.0.0.1:8443", "[::1]:8443"; port 0 = any free one */
    const char *listen_cleartext;     /* NULL, or a loopback address for plain HTTP (refused elsewhere) */
    const char *cert_file, *key_file; /* PEM */
    const char *server_name;          /* "Server" header */
    unsigned n_loops;                 /* 1..64 */
    struct dn_http_limits limits;
};

/* What happens where. All run on the loop's thread. `user` is dn_http_open()'s; loop_user is what on_loop_start
 * returned. */
struct dn_http_handler {
    void *(*on_loop_start)(struct dn_loop *loop, unsigned loop_idx, void *user); /* e.g. opens the loop's policy VM */
    void (*on_loop_stop)(struct dn_loop *loop, void *loop_user);
    void (*on_request)(struct dn_loop *loop, struct dn_http_req *req, void *loop_user);
    void (*on_gone)(struct dn_loop *loop, struct dn_http_req *req, void *loop_user);
    void (*on_resume)(struct dn_loop *loop, struct dn_http_req *req,
                      void *loop_user); /* unsent fell under pause/2; may be NULL */
    void (*on_tick)(struct dn_loop *loop, uint64_t now_ns, void *loop_user); /* about 10 times a second; may be NULL */
};

/* Reads certificates, proves the TLS plumbing (HTTP/2 and HTTP/1), binds; ignores SIGPIPE.
 * Nothing is accepted before dn_http_run(). */
int dn_http_open(const struct dn_http_conf *conf, const struct dn_http_handler *handler, void *user,
                 struct dn_http **out, struct dn_err *err);
int dn_http_run(struct dn_http *http, struct dn_err *err); /* starts the loop threads, returns at once */
void dn_http_drain(struct dn_http *http);                  /* stop accepting, GOAWAY, let requests finish (bounded) */
bool dn_http_is_drained(const struct dn_http *http);       /* no connection and no request left */
void dn_http_stop(struct dn_http *http);                   /* at once: cuts everything */
void dn_http_close(struct dn_http *http);                  /* joins the threads, frees */
uint16_t dn_http_port(const struct dn_http *http, bool cleartext); /* bound port; 0 if not bound */
/* New certificate for new connections; a broken file keeps the old one. Any thread. */
int dn_http_reload_tls(struct dn_http *http, const char *cert_file, const char *key_file, struct dn_err *err);

/* Request: views are valid until on_gone is called; in it they are empty ({NULL, 0}). The body is complete before
 * on_request, so a handler that keeps only a view need not copy it. "host" gives the authority on HTTP/2 as well. */
struct dn_str {
    const char *at; /* not terminated */
    size_t len;
};
struct dn_str dn_http_method(const struct dn_http_req *req);
struct dn_str dn_http_path(const struct dn_http_req *req); /* without the query */
struct dn_str dn_http_query(const struct dn_http_req *req);
struct dn_str dn_http_header(const struct dn_http_req *req, const char *lower_name); /* first one; {NULL,0} if absent */
struct dn_str dn_http_body(const struct dn_http_req *req);
const char *dn_http_peer(const struct dn_http_req *req); /* "192.0.2.7", terminated */
bool dn_http_peer_is_loopback(const struct dn_http_req *req);
int dn_http_version(const struct dn_http_req *req);         /* 10, 11 or 20 */
void dn_http_set_user(struct dn_http_req *req, void *user); /* the handler's own object */
void *dn_http_user(const struct dn_http_req *req);

/* Response. Header names lower case; values are copied. Content-Length is set by dn_http_reply(). */
void dn_http_add_header(struct dn_http_req *req, const char *name, const char *value);
void dn_http_reply(struct dn_http_req *req, int status, const char *content_type, const void *body, size_t n);
void dn_http_start(struct dn_http_req *req, int status,
                   const char *content_type); /* headers leave with the first write:
                                  an event stream writes a comment (": ok\n\n") at once */
void dn_http_write(struct dn_http_req *req, const void *data,
                   size_t n);                 /* copied; sent with the next flush of the loop */
void dn_http_finish(struct dn_http_req *req); /* all written pieces, then the end */
/* RST_STREAM, or HTTP/1's connection closed without an end: an honest broken end. Pieces written since the last flush
 * of the loop are dropped. on_gone follows, never from inside this call. */
void dn_http_abort(struct dn_http_req *req);
bool dn_http_paused(const struct dn_http_req *req); /* the client reads too slowly: produce no more for now */

/* Runs fn on the loop's thread soon, in the order of posting. Any thread, until dn_http_close() is called; wakes the
 * loop once however often it is called meanwhile, and what all messages of one wake-up write leaves in one flush a
 * stream. The message belongs to fn from then on. Returns false when the loop has stopped (fn will not run). */
struct dn_loop_msg {
    struct dn_loop_msg *next;
    void (*fn)(struct dn_loop *loop, struct dn_loop_msg *msg, void *loop_user);
};
bool dn_loop_post(struct dn_loop *loop, struct dn_loop_msg *msg);

/* Counters of all loops together, for metrics; any thread, values may be a moment old. */
struct dn_http_stats {
    uint64_t accepted, refused, handshakes_ok, handshakes_failed, requests, requests_h2, cut_slow, cut_timeout;
    uint64_t tls_bytes_in, tls_bytes_out;
    uint32_t connections, streams;
};
void dn_http_stats(const struct dn_http *http, struct dn_http_stats *out);

#endif
