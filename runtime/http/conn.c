#include "http/internal.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define SNDBUF_BYTES 262144 /* autotuning would let megabytes of tokens sit in the kernel */
#define KEEP_BYTES   16384  /* buffers above this are given back when empty */

void dn_conn_queue(struct dn_conn *c)
{
    if (c->is_queued)
        return;
    c->is_queued = true;
    c->next_work = NULL;
    *c->loop->work_tail = c;
    c->loop->work_tail = &c->next_work;
}

void dn_conn_doom(struct dn_conn *c)
{
    c->is_doomed = true;
    dn_conn_queue(c);
}

/* --- what a connection may do, checked between TLS and h2o ----------------------------------------------------------
 * The one place where every plain byte of every connection passes, TLS or not: the frame guard sits here. */

static bool guard_input(struct dn_conn *c, const void *data, size_t n)
{
    if (c->is_h2)
        return dn_h2_track_input(&c->track, data, n, c->loop->http->limits.header_bytes * 2, c->loop->now_ns);
    return true;
}

static void guard_output(struct dn_conn *c, const void *data, size_t n)
{
    if (c->is_h2)
        dn_h2_track_output(&c->track, data, n);
}

/* --- output ------------------------------------------------------------------------------------------------------- */

static void release_if_large(struct dn_buf *b)
{
    if (b->cap > KEEP_BYTES)
        dn_buf_release(b);
}

/* Sends what can be sent; asks for a wake-up for the rest. */
static void flush_out(struct dn_conn *c)
{
    if (c->is_dead)
        return;
    while (c->out_at < c->out.len) {
        ssize_t n = send(dn_watch_fd(c->watch), c->out.data + c->out_at, c->out.len - c->out_at, MSG_NOSIGNAL);
        if (n > 0) {
            c->out_at += (size_t)n;
            dn_stat_add(&c->loop->stats.tls_bytes_out, (uint64_t)n);
        } else if (n < 0 && errno == EINTR) {
            continue;
        } else if (n < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) {
            dn_watch_write(c->watch);
            return;
        } else {
            dn_conn_doom(c);
            return;
        }
    }
    c->out.len = c->out_at = 0;
    c->stall_since_ns = 0;
    release_if_large(&c->out);
    if (c->owes_written || c->is_aborting || c->state == DN_CONN_LINGER)
        dn_conn_queue(c);
}

static void put_plain(struct dn_conn *c, const void *data, size_t n)
{
    if (!c->tls)
        dn_buf_put(&c->out, data, n);
    else if (dn_tls_write(c->tls, data, n))
        dn_conn_doom(c);
}

/* h2o writes. Small pieces are joined first: each would become a TLS record of its own. */
static void on_output(void *conn, const struct iovec *iov, size_t n_iov)
{
    struct dn_conn *c = conn;
    c->owes_written = true;
    dn_conn_queue(c); /* the write is confirmed from the work list, never from here */
    if (c->is_dead || c->is_doomed)
        return;
    char *join = c->loop->scratch;
    size_t n = 0;
    for (size_t i = 0; i < n_iov; i++) {
        const char *at = iov[i].iov_base;
        size_t left = iov[i].iov_len;
        guard_output(c, at, left);
        while (left) {
            if (n == 0 && left >= DN_RECORD_BYTES) {
                put_plain(c, at, DN_RECORD_BYTES);
                at += DN_RECORD_BYTES;
                left -= DN_RECORD_BYTES;
                continue;
            }
            size_t take = DN_RECORD_BYTES - n < left ? DN_RECORD_BYTES - n : left;
            memcpy(join + n, at, take);
            n += take;
            at += take;
            left -= take;
            if (n == DN_RECORD_BYTES) {
                put_plain(c, join, n);
                n = 0;
            }
        }
    }
    if (n)
        put_plain(c, join, n);
    flush_out(c);
}

static void enter(struct dn_conn *c, enum dn_conn_state state)
{
    c->state = state;
    c->state_since_ns = c->loop->now_ns;
    c->stall_since_ns = 0;
}

static void count_bodies(struct dn_conn *c, uint64_t bytes)
{
    struct dn_loop *loop = c->loop;
    if (c->body_bytes == 0 && bytes)
        c->body_since_ns = loop->now_ns;
    loop->body_bytes += bytes - c->body_bytes;
    c->body_bytes = bytes;
    if (bytes == 0 && loop->body_owner == c)
        loop->body_owner = NULL;
}

static void on_vsock_closed(void *conn)
{
    struct dn_conn *c = conn;
    c->vs = NULL;
    c->owes_written = false;
    count_bodies(c, 0);
    enter(c, DN_CONN_LINGER);
    dn_conn_queue(c);
}

static const struct dn_vsock_ops vsock_ops = {on_output, on_vsock_closed};

/* --- input -------------------------------------------------------------------------------------------------------- */

/* Length of an HTTP/1 head including the blank line, 0 if it is not complete. As lenient about line ends as h2o is,
 * which also skips one empty line in front. */
static size_t head_length(const char *s, size_t n)
{
    size_t i = 0;
    if (n >= 2 && s[0] == '\r' && s[1] == '\n')
        i = 2;
    else if (n >= 1 && s[0] == '\n')
        i = 1;
    for (; i < n; i++) {
        const char *lf = memchr(s + i, '\n', n - i);
        if (!lf)
            return 0;
        i = (size_t)(lf - s);
        if (i + 1 < n && s[i + 1] == '\n')
            return i + 2;
        if (i + 2 < n && s[i + 1] == '\r' && s[i + 2] == '\n')
            return i + 3;
    }
    return 0;
}

/* After h2o has looked at new input of an HTTP/1 connection. */
static void check_h1(struct dn_conn *c)
{
    size_t n;
    const char *s = dn_vsock_pending(c->vs, &n);
    if (c->first_req || !dn_vsock_wants_input(c->vs) || n == 0) {
        c->h1_since_ns = 0;
        c->h1_head_bytes = 0;
        count_bodies(c, 0);
        return;
    }
    if (c->h1_since_ns == 0)
        c->h1_since_ns = c->loop->now_ns;
    uint32_t max = c->loop->http->limits.header_bytes;
    if (c->h1_head_bytes == 0)
        c->h1_head_bytes = head_length(s, n < max ? n : max);
    if (c->h1_head_bytes == 0 && n >= max) {
        char text[96];
        snprintf(text, sizeof text, "the headers are longer than %u bytes", max);
        dn_conn_answer_and_close(c, DN_HEADERS_TOO_LARGE, text);
        return;
    }
    count_bodies(c, c->h1_head_bytes ? n : 0);
}

/* Over the budget one connection goes on, the one whose body began first, so that bodies that block each other still
 * end; it may use as much as one body can. */
static bool may_read_bodies(struct dn_conn *c)
{
    struct dn_loop *loop = c->loop;
    const struct dn_http_limits *limits = &loop->http->limits;
    if (c->body_bytes == 0 || loop->body_bytes <= limits->body_bytes_inflight)
        return true;
    if (!loop->body_owner)
        for (struct dn_conn *o = loop->first_conn; o; o = o->next)
            if (o->body_bytes && (!loop->body_owner || o->body_since_ns < loop->body_owner->body_since_ns))
                loop->body_owner = o;
    return loop->body_owner == c &&
           (c->body_bytes <= limits->body_bytes_inflight || c->body_bytes <= 2 * limits->body_bytes);
}

void dn_conn_resume_bodies(struct dn_loop *loop)
{
    bool is_over = loop->body_bytes > loop->http->limits.body_bytes_inflight;
    if (!loop->has_paused || (is_over && loop->body_owner && !loop->body_owner->is_paused))
        return;
    loop->has_paused = false;
    for (struct dn_conn *c = loop->first_conn; c; c = c->next)
        if (c->is_paused)
            dn_conn_queue(c);
}

/* One record's worth of plain bytes into loop->scratch: > 0, 0 (needs more), or < 0 (DN_TLS_EOF, DN_TLS_ERROR). */
static long read_plain(struct dn_conn *c)
{
    size_t n = dn_tls_in_left(&c->in);
    if (n == 0)
        return 0;
    if (c->tls)
        return dn_tls_read(c->tls, c->loop->scratch, DN_RECORD_BYTES);
    if (n > DN_RECORD_BYTES)
        n = DN_RECORD_BYTES;
    memcpy(c->loop->scratch, c->in.buf.data + c->in.at, n);
    c->in.at += n;
    if (c->in.at == c->in.buf.len)
        c->in.at = c->in.buf.len = 0;
    return (long)n;
}

/* The client sends no more. HTTP/2 ends; HTTP/1 ends unless its whole answer is on its way already. */
static void on_eof(struct dn_conn *c)
{
    if (!c->vs)
        return;
    if (c->is_h2 || dn_vsock_wants_input(c->vs))
        dn_vsock_read_error(c->vs);
    else if (c->first_req && !c->first_req->is_finished)
        dn_conn_doom(c);
}

/* Feeds h2o while it wants input and there is some. */
static void pump(struct dn_conn *c)
{
    long n = 0;
    c->is_paused = false;
    while (c->vs && !c->is_doomed && dn_vsock_wants_input(c->vs)) {
        if (!may_read_bodies(c)) {
            c->is_paused = true;
            c->loop->has_paused = true;
            break;
        }
        const char *plain = c->loop->scratch;
        n = (long)c->ahead.len;
        if (n)
            plain = c->ahead.data;
        else if ((n = read_plain(c)) <= 0)
            break;
        /* h2o answers from inside dn_vsock_input() and uses the scratch for it: dn_vsock_input() copies first */
        if (!guard_input(c, plain, (size_t)n)) {
            dn_conn_doom(c);
            return;
        }
        c->idle_since_ns = c->loop->now_ns; /* upstream h2o takes HTTP/1 bodies out of sight: an upload is not idle */
        dn_vsock_input(c->vs, plain, (size_t)n);
        dn_buf_release(&c->ahead);
        if (!c->vs)
            break;
        if (c->is_h2)
            count_bodies(c, c->track.n_body_bytes);
        else
            check_h1(c);
    }
    /* While HTTP/1 answers, h2o reads nothing; one record is read ahead, since it may be the client's goodbye. */
    if (c->tls && c->vs && !c->is_doomed && c->ahead.len == 0 && !dn_vsock_wants_input(c->vs)) {
        n = read_plain(c);
        if (n > 0)
            dn_buf_put(&c->ahead, c->loop->scratch, (size_t)n);
    }
    if (n == DN_TLS_ERROR) {
        dn_conn_doom(c);
        return;
    }
    if (n == DN_TLS_EOF)
        c->is_eof = true;
    if (c->is_eof && !c->is_paused)
        on_eof(c);
    if (dn_tls_in_left(&c->in) == 0)
        release_if_large(&c->in.buf);
    bool is_full = dn_tls_in_left(&c->in) >= DN_CONN_IN_BYTES;
    /* HTTP/1: so many bytes of further requests behind a running answer. Its FIN could hide behind them for ever, and
     * no client is known that pipelines like this. */
    if (is_full && c->vs && !c->is_h2 && !dn_vsock_wants_input(c->vs))
        dn_conn_doom(c);
    if (c->watch)
        dn_watch_read(c->watch, !c->is_eof && !c->is_paused && !is_full);
}

static void start_h2o(struct dn_conn *c, bool is_h2)
{
    struct sockaddr_storage peer;
    socklen_t len = sizeof peer;
    if (getpeername(dn_watch_fd(c->watch), (struct sockaddr *)&peer, &len)) {
        dn_conn_doom(c);
        return;
    }
    c->is_h2 = is_h2;
    c->vs = dn_vsock_open(c->loop->h, is_h2, (struct sockaddr *)&peer, len, &vsock_ops, c);
    if (!c->vs) {
        dn_conn_doom(c);
        return;
    }
    enter(c, DN_CONN_OPEN);
    c->idle_since_ns = c->loop->now_ns;
    if (is_h2)
        dn_h2_track_init(&c->track, c->loop->now_ns);
    dn_vsock_start(c->vs);
    pump(c);
}

/* Cleartext: HTTP/2 if it begins like its preface, HTTP/1 otherwise. */
static void sniff(struct dn_conn *c)
{
    static const char preface[] = "PRI * HTTP/2.0\r\n";
    size_t n = dn_tls_in_left(&c->in), max = sizeof preface - 1;
    bool same = memcmp(c->in.buf.data + c->in.at, preface, n < max ? n : max) == 0;
    if (same && n < max) {
        if (c->is_eof)
            dn_conn_doom(c);
        return;
    }
    start_h2o(c, same);
}

static void handshake(struct dn_conn *c)
{
    if (!c->tls) {
        if (dn_tls_in_left(&c->in))
            sniff(c);
        else if (c->is_eof)
            dn_conn_doom(c);
        return;
    }
    enum dn_tls_result result = dn_tls_handshake(c->tls);
    flush_out(c);
    if (result == DN_TLS_DONE) {
        dn_stat_add(&c->loop->stats.handshakes_ok, 1);
        start_h2o(c, dn_tls_is_h2(c->tls));
    } else if (result != DN_TLS_AGAIN || c->is_eof) {
        dn_stat_add(&c->loop->stats.handshakes_failed, 1);
        c->no_goodbye = true;
        enter(c, DN_CONN_LINGER); /* the alert has to arrive */
        dn_conn_queue(c);
    }
}

static void on_readable(void *arg)
{
    struct dn_conn *c = arg;
    struct dn_buf *in = &c->in.buf;
    if (c->state == DN_CONN_LINGER) { /* discard, so that our last bytes are not lost to a reset */
        ssize_t n = recv(dn_watch_fd(c->watch), c->loop->scratch, sizeof c->loop->scratch, 0);
        if (n == 0 || (n < 0 && errno != EAGAIN && errno != EINTR)) {
            c->is_eof = true;
            dn_watch_read(c->watch, false);
            dn_conn_queue(c);
        }
        return;
    }
    if (c->in.at) {
        dn_buf_drop(in, c->in.at);
        c->in.at = 0;
    }
    if (in->len < DN_CONN_IN_BYTES) {
        size_t room = in->len == 0 && in->cap < KEEP_BYTES ? KEEP_BYTES : DN_CONN_IN_BYTES - in->len;
        dn_buf_reserve(in, room);
        ssize_t n = recv(dn_watch_fd(c->watch), in->data + in->len, in->cap - in->len, 0);
        if (n > 0) {
            in->len += (size_t)n;
            dn_stat_add(&c->loop->stats.tls_bytes_in, (uint64_t)n);
        } else if (n == 0) {
            c->is_eof = true;
            dn_watch_read(c->watch, false);
        } else if (errno != EAGAIN && errno != EINTR) {
            dn_conn_doom(c);
            return;
        }
    }
    if (c->state == DN_CONN_HANDSHAKE)
        dn_conn_queue(c); /* the loop does few handshakes a round */
    else
        pump(c);
    if (c->has_reset)
        dn_conn_queue(c); /* the frame that was in the way may be complete now */
}

static void on_writable(void *arg)
{
    flush_out(arg);
}

/* --- ends --------------------------------------------------------------------------------------------------------- */

static void close_tcp(struct dn_conn *c, bool reset)
{
    if (!c->watch)
        return;
    if (reset) {
        struct linger now = {.l_onoff = 1};
        setsockopt(dn_watch_fd(c->watch), SOL_SOCKET, SO_LINGER, &now, sizeof now);
    }
    dn_watch_close(c->watch);
    c->watch = NULL;
    c->is_dead = true;
}

static void free_conn(struct dn_conn *c)
{
    struct dn_loop *loop = c->loop;
    DN_BUG_ON(c->first_req || c->vs || c->watch || c->is_queued);
    if (c->prev)
        c->prev->next = c->next;
    else
        loop->first_conn = c->next;
    if (c->next)
        c->next->prev = c->prev;
    count_bodies(c, 0);
    if (c->is_counted)
        dn_ip_give(&loop->ips, &c->ip);
    atomic_fetch_sub_explicit(&loop->stats.connections, 1, memory_order_relaxed);
    dn_tls_close(c->tls);
    dn_buf_release(&c->in.buf);
    dn_buf_release(&c->ahead);
    dn_buf_release(&c->out);
    dn_h2_track_release(&c->track);
    free(c);
}

/* TCP is gone; h2o has to let go of the connection. HTTP/2: the read error comes first, so that h2o 2.2.5 marks the
 * connection as closing before a write error makes it close the streams (else that starts queued requests and an
 * assertion fails). HTTP/1 goes on to the next request after a write error: repeat until it closes. */
static void make_h2o_close(struct dn_conn *c)
{
    for (int round = 0; round < 8 && c->vs; round++) {
        bool write_first = dn_h2o_test_without_cures && c->is_h2 && dn_vsock_is_writing(c->vs);
        if (!write_first)
            dn_vsock_read_error(c->vs);
        if (!c->vs)
            return;
        if (dn_vsock_is_writing(c->vs)) {
            c->owes_written = false;
            dn_vsock_written(c->vs, false);
        } else if (!c->is_h2 && c->first_req) {
            dn_req_fail(c->first_req);
        } else {
            break; /* HTTP/2 closes from its own write timer */
        }
    }
    if (c->vs)
        dn_conn_queue(c);
}

static void linger(struct dn_conn *c)
{
    if (!c->is_shut && !c->is_dead) {
        if (c->tls && !c->no_goodbye) {
            dn_tls_close_notify(c->tls);
            c->no_goodbye = true;
        }
        if (c->out.len)
            flush_out(c);
        if (c->out.len || c->is_doomed)
            return;
        shutdown(dn_watch_fd(c->watch), SHUT_WR);
        c->is_shut = true;
        c->state_since_ns = c->loop->now_ns;
        dn_watch_read(c->watch, !c->is_eof);
    }
    if (c->is_eof)
        close_tcp(c, false);
}

/* HTTP/2 streams that the handler or a timer gave up. h2o is made to reset them itself, so that the frame comes behind
 * what it has written already: a WINDOW_UPDATE of 0 is a stream error to it. */
static void reset_streams(struct dn_conn *c)
{
    if (!c->vs || !dn_vsock_wants_input(c->vs) || !dn_h2_track_at_boundary(&c->track))
        return; /* later; the header timer bounds it */
    c->has_reset = false;
    for (struct dn_http_req *r = c->first_req; r && c->vs;) {
        if (!r->wants_reset) {
            r = r->next;
            continue;
        }
        r->wants_reset = false;
        uint32_t id = dn_req_stream_id(r);
        unsigned char frame[13] = {0,
                                   0,
                                   4,
                                   8,
                                   0,
                                   (unsigned char)(id >> 24),
                                   (unsigned char)(id >> 16),
                                   (unsigned char)(id >> 8),
                                   (unsigned char)id};
        dn_vsock_input(c->vs, frame, sizeof frame);
        r = c->vs ? c->first_req : NULL;
    }
}

void dn_conn_work(struct dn_conn *c)
{
    if (c->is_doomed || (c->is_dead && c->vs)) {
        c->no_goodbye = true;
        close_tcp(c, true);
        make_h2o_close(c);
    } else if (c->is_aborting && c->out.len == 0) {
        close_tcp(c, false);
        make_h2o_close(c);
    } else {
        if (c->state == DN_CONN_HANDSHAKE)
            handshake(c);
        if (c->has_reset)
            reset_streams(c);
        if (c->owes_written && c->vs && c->out.len == 0) {
            c->owes_written = false;
            dn_vsock_written(c->vs, true);
        }
        if (c->state == DN_CONN_OPEN && c->vs) {
            if (!c->is_h2)
                check_h1(c);
            if (c->vs && !c->is_doomed)
                pump(c);
        }
        if (c->state == DN_CONN_LINGER && !c->is_doomed)
            linger(c);
    }
    if (!c->vs && !c->watch && !c->is_queued)
        free_conn(c);
}

void dn_conn_close_idle(struct dn_conn *c)
{
    if (c->vs && dn_vsock_wants_input(c->vs))
        dn_vsock_read_error(c->vs);
}

void dn_conn_answer_and_close(struct dn_conn *c, enum dn_code code, const char *message)
{
    struct dn_buf body = {0}, head = {0};
    const struct dn_code_info *info = dn_code_info(code);
    dn_error_body(&body, code, message);
    dn_buf_printf(
        &head, "HTTP/1.1 %d %s\r\nContent-Type: application/json\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n",
        info->status, info->code, body.len);
    dn_buf_put(&head, body.data, body.len);
    put_plain(c, head.data, head.len);
    dn_buf_release(&head);
    dn_buf_release(&body);
    flush_out(c);
    if (!c->is_doomed)
        dn_vsock_read_error(c->vs);
}

void dn_conn_accept(struct dn_loop *loop, int fd, bool is_cleartext, const struct sockaddr *peer, socklen_t peer_len)
{
    const struct dn_http_limits *limits = &loop->http->limits;
    struct dn_ip_key key = dn_ip_key(peer);
    bool is_loopback = dn_ip_is_loopback(peer), refuse = false;
    (void)peer_len;
    if (atomic_load_explicit(&loop->stats.connections, memory_order_relaxed) >= limits->connections)
        refuse = true;
    else if (!is_loopback && !dn_ip_take(&loop->ips, &key, limits->connections_per_ip))
        refuse = true;
    if (refuse) {
        dn_stat_add(&loop->stats.refused, 1);
        close(fd);
        return;
    }
    int on = 1, sndbuf = SNDBUF_BYTES;
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &sndbuf, sizeof sndbuf);
    struct dn_conn *c = dn_alloc0(1, sizeof *c);
    c->loop = loop;
    c->ip = key;
    c->is_loopback = is_loopback;
    c->is_counted = !is_loopback;
    dn_ip_print(peer, c->peer, sizeof c->peer);
    c->next = loop->first_conn;
    if (c->next)
        c->next->prev = c;
    loop->first_conn = c;
    atomic_fetch_add_explicit(&loop->stats.connections, 1, memory_order_relaxed);
    dn_stat_add(&loop->stats.accepted, 1);
    c->watch = dn_watch_open(loop->h, fd, on_readable, on_writable, c);
    enter(c, DN_CONN_HANDSHAKE);
    if (!is_cleartext) {
        /* There is no configuration if the loop could not make its first one: see refresh_tls(). */
        c->tls = loop->tls ? dn_tls_open(loop->tls, &c->in, &c->out) : NULL;
        if (!c->tls) {
            dn_conn_doom(c);
            return;
        }
    }
    dn_watch_read(c->watch, true);
}
