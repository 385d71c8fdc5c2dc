/* What the files of runtime/http share: loop, connection, request. Nothing outside this folder includes it.
 *
 * http.c: server, listeners, loops. conn.c: TCP, TLS, the virtual socket, closing. conn_time.c: timers and stalls.
 * http_req.c: requests and responses (the only one besides h2o_port.c that sees h2o.h).
 *
 * Everything here belongs to one loop and its thread, except where "any thread" is said.
 *
 * The rule that keeps this safe: h2o is never entered from inside h2o. Handlers, generators and vsock ops run inside
 * it; they only change our own state and put the connection on the loop's work list or the request on its dirty list.
 * The loop empties both between two rounds of events.
 */
#ifndef DN_HTTP_INTERNAL_H
#define DN_HTTP_INTERNAL_H

#include "base/buf.h"
#include "base/clock.h"
#include "http/h2_track.h"
#include "http/h2o_port.h"
#include "http/http.h"
#include "http/ip_table.h"
#include "http/tls_port.h"

#include <pthread.h>
#include <stdatomic.h>

#define DN_RECORD_BYTES  16384             /* one TLS record; most that h2o gets at once */
#define DN_CONN_IN_BYTES 65536             /* received but not yet read; then TCP has to wait */
#define DN_LINGER_NS     (2 * DN_NS_PER_S) /* how long a closed connection still reads, so that the last answer arrives */

enum dn_conn_state {
    DN_CONN_HANDSHAKE, /* TLS, or the first bytes of a cleartext connection */
    DN_CONN_OPEN,      /* h2o has it */
    DN_CONN_LINGER,    /* h2o is done: flush, say goodbye, wait for the client's */
};

struct dn_conn {
    struct dn_loop *loop;
    struct dn_conn *prev, *next; /* all connections of the loop */
    struct dn_conn *next_work;   /* work list */
    struct dn_watch *watch;      /* TCP; NULL once closed */
    struct dn_vsock *vs;         /* NULL before the handshake and after h2o closed it */
    struct dn_tls *tls;          /* NULL: cleartext */
    struct dn_tls_in in;         /* received: records, or plain bytes */
    struct dn_buf ahead;         /* HTTP/1 over TLS: one decrypted record that h2o does not want yet */
    struct dn_buf out;           /* to be sent, from out_at on */
    size_t out_at;
    struct dn_http_req *first_req; /* requests that the handler knows */
    struct dn_h2_track track;      /* HTTP/2 */
    size_t h1_head_bytes;          /* HTTP/1: length of the current request's head, 0 while incomplete */
    uint64_t h1_since_ns;          /* HTTP/1: first byte of the current request; 0 between requests */
    uint64_t state_since_ns;
    uint64_t idle_since_ns;               /* HTTP/1: last response, or start */
    uint64_t stall_since_ns, stall_acked; /* TCP has not taken anything since */
    uint64_t body_bytes;                  /* this connection's share of loop->body_bytes */
    uint64_t body_since_ns;
    struct dn_ip_key ip;
    enum dn_conn_state state;
    uint32_t n_requests;
    bool is_h2, is_loopback, is_counted; /* counted in the address table */
    bool is_queued;                      /* on the work list */
    bool is_eof;                         /* the client sends no more */
    bool is_doomed;                      /* to be cut at the next chance */
    bool is_dead;                        /* TCP is gone, h2o has to notice */
    bool is_paused;                      /* waits for body budget */
    bool owes_written;                   /* h2o waits for dn_vsock_written() */
    bool has_reset;                      /* a request of it wants its stream reset */
    bool is_aborting;                    /* HTTP/1: close without an end once `out` is empty */
    bool no_goodbye;                     /* the answer was cut: no close_notify */
    bool is_shut;                        /* SHUT_WR done */
    char peer[46];
};

struct dn_http_req {
    struct dn_conn *conn;
    struct dn_http_req *prev, *next; /* conn->first_req */
    struct dn_http_req *prev_dirty, *next_dirty;
    void *user;
    struct dn_buf cur;         /* written by the handler */
    struct dn_buf sending;     /* with h2o until proceed() */
    uint64_t sending_since_ns; /* 0: nothing is with h2o */
    int status;
    bool is_dirty;
    bool is_started;   /* the handler has called start or reply */
    bool has_response; /* h2o_start_response() was called */
    bool is_finished;  /* the handler has nothing more to say */
    bool is_final;     /* h2o has the end */
    bool is_over;      /* aborted or cut: further writes are ignored */
    bool wants_reset;  /* HTTP/2: reset the stream from the work list */
    bool is_refused;   /* by a limit: the handler does not know it */
    bool is_paused, owes_resume;
};

struct dn_listener {
    struct dn_loop *loop;
    struct dn_watch *watch;
    int fd; /* -1: none */
    bool is_cleartext;
    bool is_resting; /* no descriptors were left: accepting goes on with the next tick */
};

/* Written by the loop alone, read by any thread. */
struct dn_loop_stats {
    atomic_uint_fast64_t accepted, refused, handshakes_ok, handshakes_failed, requests, requests_h2, cut_slow,
        cut_timeout, tls_bytes_in, tls_bytes_out;
    atomic_uint connections, streams;
};

struct dn_loop {
    struct dn_http *http;
    unsigned idx;
    pthread_t thread;
    bool has_thread;
    void *user;
    struct dn_h2o *h;
    struct dn_tls_conf *tls;
    unsigned tls_generation;
    struct dn_listener listener[2];      /* TLS, cleartext */
    _Atomic(struct dn_loop_msg *) inbox; /* newest first; any thread */
    int event_fd;                        /* any thread */
    struct dn_watch *inbox_watch;
    struct dn_conn *first_conn;
    struct dn_conn *work, **work_tail;
    struct dn_http_req *dirty;
    struct dn_ip_table ips;
    struct dn_conn *body_owner; /* may go on reading a body although the budget is used */
    uint64_t body_bytes;        /* incomplete bodies of all connections */
    bool has_paused;
    uint64_t now_ns, next_tick_ns, drain_deadline_ns;
    bool is_draining;
    bool is_stopping;
    struct dn_loop_msg drain_msg, stop_msg;
    struct dn_loop_stats stats;
    char scratch[DN_RECORD_BYTES];
};

struct dn_http {
    struct dn_http_limits limits; /* defaults filled in */
    struct dn_http_handler handler;
    void *user;
    struct dn_h2o_conf *h2o_conf;
    struct dn_tls_tickets *tickets;
    pthread_mutex_t tls_lock; /* guards identity */
    struct dn_tls_identity *identity;
    atomic_uint tls_generation; /* release after identity is set; a loop that sees a new one rebuilds */
    unsigned n_loops;
    struct dn_loop **loop;
    uint16_t port[2]; /* TLS, cleartext */
    atomic_bool is_draining, is_stopping;
    atomic_uint n_listening; /* loops that still have open listeners */
};

static inline void dn_stat_add(atomic_uint_fast64_t *counter, uint64_t n)
{
    /* one writer: no read-modify-write needed */
    atomic_store_explicit(counter, atomic_load_explicit(counter, memory_order_relaxed) + n, memory_order_relaxed);
}

/* conn.c */
void dn_conn_accept(struct dn_loop *loop, int fd, bool is_cleartext, const struct sockaddr *peer, socklen_t peer_len);
void dn_conn_queue(struct dn_conn *c);      /* dn_conn_work() soon; callable from inside h2o */
void dn_conn_doom(struct dn_conn *c);       /* cut it soon: RST; callable from inside h2o */
void dn_conn_work(struct dn_conn *c);       /* never from inside h2o; may free it */
void dn_conn_close_idle(struct dn_conn *c); /* HTTP/1 between requests: a clean end */
void dn_conn_answer_and_close(struct dn_conn *c, enum dn_code code, const char *message); /* HTTP/1, while reading */
void dn_conn_resume_bodies(struct dn_loop *loop);

/* conn_time.c */
void dn_conn_tick(struct dn_conn *c);                 /* about 10 times a second; never frees it */
uint64_t dn_conn_acked_bytes(int fd, int *tcp_state); /* bytes that the peer's TCP has confirmed */

/* http_req.c */
void dn_req_on_request(struct st_h2o_req_t *req, void *conn);
void dn_req_flush(struct dn_http_req *r); /* hands pending bytes to h2o; may free it */
void dn_req_fail(struct dn_http_req *r);  /* HTTP/1: ends the response as broken; may free it */
uint32_t dn_req_stream_id(const struct dn_http_req *r);
void dn_req_reset(struct dn_http_req *r); /* HTTP/2 stream or HTTP/1 connection: cut soon */
void dn_loop_flush(struct dn_loop *loop); /* every dirty request once */
/* {"error":{...}} of one code, as every error of the node looks. */
void dn_error_body(struct dn_buf *out, enum dn_code code, const char *message);

#endif
