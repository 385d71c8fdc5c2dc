#include "http/internal.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <string.h>

/* glibc's struct tcp_info ends before tcpi_bytes_acked; the kernel's layout is fixed. */
#define TCPI_BYTES_ACKED 120
/* A client that connected just before the drain gets its answer; one that says nothing does not hold it up. */
#define DRAIN_FIRST_MS 1000

uint64_t dn_conn_acked_bytes(int fd, int *tcp_state)
{
    uint8_t info[256] = {0};
    socklen_t n = sizeof info;
    uint64_t acked = 0;
    *tcp_state = 0;
    if (getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &n) == 0 && n >= TCPI_BYTES_ACKED + sizeof acked) {
        memcpy(&acked, info + TCPI_BYTES_ACKED, sizeof acked);
        *tcp_state = info[0];
    }
    return acked;
}

static bool is_past(uint64_t since_ns, uint64_t limit_ms, uint64_t now_ns)
{
    return since_ns && now_ns - since_ns > limit_ms * DN_NS_PER_MS;
}

static void cut_by_time(struct dn_conn *c)
{
    dn_stat_add(&c->loop->stats.cut_timeout, 1);
    dn_conn_doom(c);
}

/* Output waits for TCP: cut when the client's TCP has confirmed nothing for too long. A slow reader that makes progress
 * stays. */
static bool check_stall(struct dn_conn *c, uint64_t now_ns)
{
    if (c->out.len == 0 || !c->watch)
        return false;
    int tcp_state;
    uint64_t acked = dn_conn_acked_bytes(dn_watch_fd(c->watch), &tcp_state);
    if (c->stall_since_ns == 0 || acked != c->stall_acked) {
        c->stall_since_ns = now_ns;
        c->stall_acked = acked;
        return false;
    }
    if (!is_past(c->stall_since_ns, c->loop->http->limits.stall_timeout_ms, now_ns))
        return false;
    dn_stat_add(&c->loop->stats.cut_slow, 1);
    dn_conn_doom(c);
    return true;
}

/* While TCP is not read (64 KiB wait already, or the body budget is used) the end of the client has to be asked for. A
 * client that fills the kernel's buffer too and then leaves can't be seen: its FIN waits behind its data. */
static bool check_peer_closed(struct dn_conn *c)
{
    if (c->is_eof || !c->watch || (!c->is_paused && dn_tls_in_left(&c->in) < DN_CONN_IN_BYTES))
        return false;
    int tcp_state;
    dn_conn_acked_bytes(dn_watch_fd(c->watch), &tcp_state);
    if (tcp_state != TCP_CLOSE_WAIT && tcp_state != TCP_CLOSE)
        return false;
    dn_conn_doom(c);
    return true;
}

static void check_h2(struct dn_conn *c, uint64_t now_ns)
{
    const struct dn_http_limits *limits = &c->loop->http->limits;
    if (is_past(dn_h2_track_stuck_since(&c->track), limits->header_timeout_ms, now_ns)) {
        cut_by_time(c);
        return;
    }
    for (uint32_t i = 0; i < c->track.n_bodies; i++) {
        if (is_past(c->track.body[i].since_ns, limits->body_timeout_ms, now_ns)) {
            cut_by_time(c);
            return;
        }
    }
    if (c->out.len)
        return; /* TCP itself stalls: the streams are not to blame */
    for (struct dn_http_req *r = c->first_req; r; r = r->next) {
        if (!r->is_over && is_past(r->sending_since_ns, limits->stall_timeout_ms, now_ns)) {
            dn_stat_add(&c->loop->stats.cut_slow, 1);
            dn_req_reset(r); /* the client's window for this stream stays closed; others go on */
        }
    }
}

static void check_h1(struct dn_conn *c, uint64_t now_ns)
{
    const struct dn_http_limits *limits = &c->loop->http->limits;
    if (c->first_req || !dn_vsock_wants_input(c->vs))
        return;
    if (c->h1_since_ns) {
        bool in_body = c->h1_head_bytes != 0;
        if (!is_past(c->h1_since_ns, in_body ? limits->body_timeout_ms : limits->header_timeout_ms, now_ns))
            return;
        dn_stat_add(&c->loop->stats.cut_timeout, 1);
        dn_conn_answer_and_close(c, DN_TIMEOUT, in_body ? "the body took too long" : "the headers took too long");
        return;
    }
    bool is_fresh = c->n_requests == 0 && !is_past(c->idle_since_ns, DRAIN_FIRST_MS, now_ns);
    if ((c->loop->is_draining && !is_fresh) ||
        is_past(c->idle_since_ns, c->n_requests ? limits->idle_timeout_ms : limits->header_timeout_ms, now_ns))
        dn_conn_close_idle(c);
}

void dn_conn_tick(struct dn_conn *c)
{
    const struct dn_http_limits *limits = &c->loop->http->limits;
    uint64_t now_ns = c->loop->now_ns;
    if (dn_tls_in_left(&c->in) == 0) /* an idle connection keeps no buffers of ours */
        dn_buf_release(&c->in.buf);
    if (c->out.len == 0)
        dn_buf_release(&c->out);
    if (c->is_doomed || c->is_dead || check_peer_closed(c) || check_stall(c, now_ns))
        return;
    switch (c->state) {
    case DN_CONN_HANDSHAKE:
        if (is_past(c->state_since_ns, limits->handshake_timeout_ms, now_ns) ||
            (c->loop->is_draining && is_past(c->state_since_ns, DRAIN_FIRST_MS, now_ns))) {
            if (c->tls)
                dn_stat_add(&c->loop->stats.handshakes_failed, 1);
            cut_by_time(c);
        }
        break;
    case DN_CONN_OPEN:
        if (c->vs && c->is_h2)
            check_h2(c, now_ns);
        else if (c->vs)
            check_h1(c, now_ns);
        break;
    case DN_CONN_LINGER:
        if (c->is_shut && now_ns - c->state_since_ns > DN_LINGER_NS) {
            c->is_eof = true;
            dn_conn_queue(c);
        }
        break;
    }
}
