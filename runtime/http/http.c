#include "http/internal.h"

#include "base/log.h"

#include <errno.h>
#include <fcntl.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

#define LOOPS_MAX          64
#define ACCEPTS_A_ROUND    16
#define HANDSHAKES_A_ROUND 2 /* each is a millisecond or two of public-key work that everyone else waits for */
#define TICK_NS            (100 * DN_NS_PER_MS)
#define BACKLOG            1024

/* --- messages to a loop --------------------------------------------------------------------------------------------
 */

static struct dn_loop_msg closed_inbox; /* the address says: nothing more is accepted */

bool dn_loop_post(struct dn_loop *loop, struct dn_loop_msg *msg)
{
    /* acquire: who is refused sees all that the loop did before it closed, and may free what they shared */
    struct dn_loop_msg *head = atomic_load_explicit(&loop->inbox, memory_order_acquire);
    do {
        if (head == &closed_inbox)
            return false;
        msg->next = head;
        /* release: pairs with the acquire in take_inbox(), so that the loop sees what the message points to */
    } while (
        !atomic_compare_exchange_weak_explicit(&loop->inbox, &head, msg, memory_order_release, memory_order_acquire));
    if (head == NULL) { /* the first one wakes the loop for all that follow */
        uint64_t one = 1;
        ssize_t n;
        do
            n = write(loop->event_fd, &one, sizeof one);
        while (n < 0 && errno == EINTR);
    }
    return true;
}

/* Runs what has been posted, oldest first; `next` is what the inbox holds from then on. */
static void take_inbox(struct dn_loop *loop, struct dn_loop_msg *next)
{
    struct dn_loop_msg *msg = atomic_exchange_explicit(&loop->inbox, next, memory_order_acq_rel), *first = NULL;
    while (msg && msg != &closed_inbox) {
        struct dn_loop_msg *older = msg->next;
        msg->next = first;
        first = msg;
        msg = older;
    }
    while (first) {
        msg = first;
        first = first->next;
        msg->fn(loop, msg, loop->user);
    }
}

static void on_inbox(void *arg)
{
    struct dn_loop *loop = arg;
    uint64_t n;
    while (read(loop->event_fd, &n, sizeof n) < 0 && errno == EINTR)
        ;
    loop->now_ns = dn_now_ns();
    take_inbox(loop, NULL);
    dn_loop_flush(loop); /* all pieces of one wake-up leave together */
}

static void never_writable(void *arg)
{
    (void)arg;
}

/* --- listeners -----------------------------------------------------------------------------------------------------
 */

static void refresh_tls(struct dn_loop *loop)
{
    struct dn_http *http = loop->http;
    unsigned generation = atomic_load_explicit(&http->tls_generation, memory_order_acquire);
    if (loop->tls && loop->tls_generation == generation)
        return;
    pthread_mutex_lock(&http->tls_lock);
    struct dn_tls_identity *id = http->identity ? dn_tls_identity_get(http->identity) : NULL;
    pthread_mutex_unlock(&http->tls_lock);
    struct dn_tls_conf *conf;
    struct dn_err err = {0};
    if (id && dn_tls_conf_open(id, http->tickets, &conf, &err) == 0) {
        dn_tls_conf_put(loop->tls);
        loop->tls = conf;
    } else if (id) {
        struct dn_log_line l;
        dn_log_begin_limited(&l, DN_LOG_ERROR, "http.tls_failed", "", loop->now_ns);
        dn_log_uint(&l, "loop", loop->idx);
        dn_log_err(&l, &err);
        dn_log_end(&l);
    }
    loop->tls_generation = generation;
    dn_tls_identity_put(id);
}

/* Accepts up to `max` connections; returns how many there were. */
static int accept_some(struct dn_listener *l, int max)
{
    int n = 0;
    if (!l->is_cleartext)
        refresh_tls(l->loop);
    while (n < max) {
        struct sockaddr_storage peer;
        socklen_t len = sizeof peer;
        int fd = accept4(l->fd, (struct sockaddr *)&peer, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) {
            if (errno == EINTR || errno == ECONNABORTED)
                continue;
            if (errno != EAGAIN && l->watch) { /* EMFILE and the like would wake us without end */
                l->is_resting = true;
                dn_watch_read(l->watch, false);
            }
            break;
        }
        n++;
        dn_conn_accept(l->loop, fd, l->is_cleartext, (struct sockaddr *)&peer, len);
    }
    return n;
}

static void on_connection(void *arg)
{
    struct dn_listener *l = arg;
    l->loop->now_ns = dn_now_ns();
    accept_some(l, ACCEPTS_A_ROUND);
}

static void close_listeners(struct dn_loop *loop)
{
    for (int i = 0; i < 2; i++) {
        struct dn_listener *l = &loop->listener[i];
        if (!l->watch)
            continue;
        accept_some(l, BACKLOG); /* those the kernel has accepted already would be reset */
        dn_watch_close(l->watch);
        l->watch = NULL;
        l->fd = -1;
    }
}

/* --- the loop ------------------------------------------------------------------------------------------------------
 */

static void run_work(struct dn_loop *loop)
{
    int n_handshakes = 0;
    for (int round = 0; round < 8 && loop->work; round++) {
        struct dn_conn *c = loop->work;
        loop->work = NULL;
        loop->work_tail = &loop->work;
        while (c) {
            struct dn_conn *next = c->next_work;
            c->is_queued = false;
            if (c->state == DN_CONN_HANDSHAKE && c->tls && !c->is_doomed && ++n_handshakes > HANDSHAKES_A_ROUND)
                dn_conn_queue(c); /* after the next look at everyone's events */
            else
                dn_conn_work(c);
            c = next;
        }
        dn_loop_flush(loop);
        dn_conn_resume_bodies(loop);
        if (n_handshakes > HANDSHAKES_A_ROUND)
            break;
    }
}

static void tick(struct dn_loop *loop)
{
    if (loop->now_ns < loop->next_tick_ns)
        return;
    loop->next_tick_ns = loop->now_ns + TICK_NS;
    for (int i = 0; i < 2; i++) {
        struct dn_listener *l = &loop->listener[i];
        if (l->is_resting && l->watch)
            dn_watch_read(l->watch, true);
        l->is_resting = false;
    }
    for (struct dn_conn *c = loop->first_conn, *next; c; c = next) {
        next = c->next;
        if (loop->is_draining && loop->now_ns > loop->drain_deadline_ns)
            dn_conn_doom(c);
        else
            dn_conn_tick(c);
    }
    if (loop->http->handler.on_tick)
        loop->http->handler.on_tick(loop, loop->now_ns, loop->user);
    dn_loop_flush(loop);
}

static void run_once(struct dn_loop *loop)
{
    int wait_ms = 0;
    if (!loop->work && !loop->dirty && loop->next_tick_ns > loop->now_ns)
        wait_ms = (int)((loop->next_tick_ns - loop->now_ns) / DN_NS_PER_MS) + 1;
    dn_h2o_run(loop->h, wait_ms);
    loop->now_ns = dn_now_ns();
    dn_loop_flush(loop);
    run_work(loop);
    tick(loop);
}

static void on_drain(struct dn_loop *loop, struct dn_loop_msg *msg, void *user)
{
    (void)msg;
    (void)user;
    if (loop->is_draining)
        return;
    close_listeners(loop);
    loop->is_draining = true;
    loop->drain_deadline_ns = loop->now_ns + (uint64_t)loop->http->limits.drain_timeout_ms * DN_NS_PER_MS;
    loop->next_tick_ns = 0; /* idle connections end with the tick */
    dn_h2o_request_shutdown(loop->h);
    /* release: who sees the count sees the connections that were accepted last */
    atomic_fetch_sub_explicit(&loop->http->n_listening, 1, memory_order_release);
}

static void on_stop(struct dn_loop *loop, struct dn_loop_msg *msg, void *user)
{
    (void)msg;
    (void)user;
    loop->is_stopping = true;
}

static void *loop_thread(void *arg)
{
    struct dn_loop *loop = arg;
    struct dn_http *http = loop->http;
    loop->h = dn_h2o_open(http->h2o_conf);
    DN_BUG_ON(!loop->h && "no descriptors for an event loop");
    loop->now_ns = dn_now_ns();
    loop->work_tail = &loop->work;
    refresh_tls(loop);
    if (http->handler.on_loop_start)
        loop->user = http->handler.on_loop_start(loop, loop->idx, http->user);
    /* A copy: a thread that has just posted may still write to event_fd when the loop is gone. */
    int wake_fd = fcntl(loop->event_fd, F_DUPFD_CLOEXEC, 0);
    DN_BUG_ON(wake_fd < 0 && "no descriptors for an event loop");
    loop->inbox_watch = dn_watch_open(loop->h, wake_fd, on_inbox, never_writable, loop);
    dn_watch_read(loop->inbox_watch, true);
    for (int i = 0; i < 2; i++) {
        struct dn_listener *l = &loop->listener[i];
        if (l->fd < 0)
            continue;
        l->watch = dn_watch_open(loop->h, l->fd, on_connection, never_writable, l);
        dn_watch_read(l->watch, true);
    }
    while (!loop->is_stopping)
        run_once(loop);

    if (!loop->is_draining) {
        for (int i = 0; i < 2; i++)
            dn_watch_close(loop->listener[i].watch);
        atomic_fetch_sub_explicit(&http->n_listening, 1, memory_order_release);
    }
    for (int round = 0; round < 1000 && loop->first_conn; round++) {
        for (struct dn_conn *c = loop->first_conn; c; c = c->next)
            dn_conn_doom(c);
        run_once(loop);
    }
    DN_BUG_ON(loop->first_conn && "a connection can't be closed");
    take_inbox(loop, &closed_inbox);
    dn_watch_close(loop->inbox_watch);
    if (http->handler.on_loop_stop)
        http->handler.on_loop_stop(loop, loop->user);
    dn_h2o_close(loop->h);
    dn_tls_conf_put(loop->tls);
    dn_ip_table_release(&loop->ips);
    return NULL;
}

/* --- opening -------------------------------------------------------------------------------------------------------
 */

static void set_defaults(struct dn_http_limits *l)
{
#define DEFAULT(field, value)                                                                                          \
    do {                                                                                                               \
        if (l->field == 0)                                                                                             \
            l->field = (value);                                                                                        \
    } while (0)
    DEFAULT(connections, 4096);
    DEFAULT(connections_per_ip, 256);
    DEFAULT(header_bytes, 16384);
    DEFAULT(header_fields, 100);
    DEFAULT(path_bytes, 2048);
    DEFAULT(body_bytes, 8u << 20);
    DEFAULT(body_bytes_inflight, 256u << 20);
    DEFAULT(handshake_timeout_ms, 10000);
    DEFAULT(header_timeout_ms, 10000);
    DEFAULT(body_timeout_ms, 60000);
    DEFAULT(idle_timeout_ms, 60000);
    DEFAULT(stall_timeout_ms, 30000);
    DEFAULT(stream_pause_bytes, 64u << 10);
    DEFAULT(stream_cut_bytes, 1u << 20);
    DEFAULT(drain_timeout_ms, 30000);
#undef DEFAULT
}

/* "host:port", "[v6]:port" -> first address of it. */
static int resolve(const char *listen_at, struct sockaddr_storage *addr, socklen_t *len, struct dn_err *err)
{
    char host[256];
    const char *colon = strrchr(listen_at, ':'), *port = colon ? colon + 1 : NULL;
    size_t n = colon ? (size_t)(colon - listen_at) : 0;
    if (!colon || n >= sizeof host || !*port || strspn(port, "0123456789") != strlen(port) ||
        strtoul(port, NULL, 10) > 65535)
        return dn_err_set(err, DN_CONFIG,
                          "listen address \"%s\": expected HOST:PORT, e.g. \"127.0.0.1:8443\" or \"[::1]:8443\"",
                          listen_at);
    bool has_brackets = n >= 2 && listen_at[0] == '[' && listen_at[n - 1] == ']';
    if (!has_brackets && memchr(listen_at, ':', n))
        return dn_err_set(err, DN_CONFIG, "listen address \"%s\": an IPv6 address needs brackets, e.g. \"[::1]:8443\"",
                          listen_at);
    snprintf(host, sizeof host, "%.*s", (int)(has_brackets ? n - 2 : n), listen_at + has_brackets);
    struct addrinfo hints = {
        .ai_family = AF_UNSPEC, .ai_socktype = SOCK_STREAM, .ai_flags = AI_NUMERICSERV | AI_PASSIVE};
    struct addrinfo *list = NULL;
    int rc = getaddrinfo(host[0] && strcmp(host, "*") != 0 ? host : NULL, port, &hints, &list);
    if (rc)
        return dn_err_set(err, DN_CONFIG, "listen address \"%s\": %s", listen_at, gai_strerror(rc));
    memcpy(addr, list->ai_addr, list->ai_addrlen);
    *len = list->ai_addrlen;
    freeaddrinfo(list);
    return 0;
}

static int bind_one(const struct sockaddr_storage *addr, socklen_t len, bool reuse_port)
{
    int on = 1, fd = socket(addr->ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if ((reuse_port && setsockopt(fd, SOL_SOCKET, SO_REUSEPORT, &on, sizeof on)) ||
        bind(fd, (const struct sockaddr *)addr, len) || listen(fd, BACKLOG)) {
        int saved = errno;
        close(fd);
        errno = saved;
        return -1;
    }
    return fd;
}

static void set_port(struct sockaddr_storage *addr, uint16_t port)
{
    if (addr->ss_family == AF_INET6)
        ((struct sockaddr_in6 *)addr)->sin6_port = htons(port);
    else
        ((struct sockaddr_in *)addr)->sin_port = htons(port);
}

static uint16_t port_of(int fd)
{
    struct sockaddr_storage addr = {0};
    socklen_t len = sizeof addr;
    if (getsockname(fd, (struct sockaddr *)&addr, &len))
        return 0;
    /* NOLINTNEXTLINE(clang-analyzer-core.CallAndMessage): the analyzer does not see what getsockname() fills in */
    return ntohs(addr.ss_family == AF_INET6 ? ((struct sockaddr_in6 *)&addr)->sin6_port
                                            : ((struct sockaddr_in *)&addr)->sin_port);
}

static int bind_all(struct dn_http *http, const char *listen_at, bool is_cleartext, struct dn_err *err)
{
    struct sockaddr_storage addr;
    socklen_t len = 0;
    int rc = resolve(listen_at, &addr, &len, err);
    if (rc)
        return rc;
    if (is_cleartext && !dn_ip_is_loopback((struct sockaddr *)&addr))
        return dn_err_set(err, DN_CONFIG, "cleartext listen address \"%s\": only loopback addresses may go without TLS",
                          listen_at);
    /* Without SO_REUSEPORT first: with it, a second server on the same port would share its connections silently. */
    int probe = bind_one(&addr, len, false);
    if (probe < 0)
        return dn_err_set(err, DN_IO, "listen address \"%s\": %s", listen_at, strerror(errno));
    http->port[is_cleartext] = port_of(probe);
    if (http->n_loops == 1) {
        http->loop[0]->listener[is_cleartext].fd = probe;
        return 0;
    }
    close(probe);
    set_port(&addr, http->port[is_cleartext]);
    for (unsigned i = 0; i < http->n_loops; i++) {
        int fd = bind_one(&addr, len, true);
        if (fd < 0)
            return dn_err_set(err, DN_IO, "listen address \"%s\": %s", listen_at, strerror(errno));
        http->loop[i]->listener[is_cleartext].fd = fd;
    }
    return 0;
}

static int open_loops(struct dn_http *http, struct dn_err *err)
{
    http->loop = dn_alloc0(http->n_loops, sizeof *http->loop);
    for (unsigned i = 0; i < http->n_loops; i++) {
        struct dn_loop *loop = http->loop[i] = dn_alloc0(1, sizeof *loop);
        loop->http = http;
        loop->idx = i;
        for (int k = 0; k < 2; k++)
            loop->listener[k] = (struct dn_listener){.loop = loop, .fd = -1, .is_cleartext = k == 1};
        loop->drain_msg.fn = on_drain;
        loop->stop_msg.fn = on_stop;
        loop->event_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
        if (loop->event_fd < 0)
            return dn_err_set(err, DN_IO, "no descriptor for an event loop: %s", strerror(errno));
    }
    return 0;
}

static int open_tls(struct dn_http *http, const struct dn_http_conf *conf, struct dn_err *err)
{
    int rc = dn_tls_warm_up(err);
    if (!rc)
        rc = dn_tls_identity_open(conf->cert_file, conf->key_file, &http->identity, err);
    if (!rc)
        rc = dn_tls_tickets_open(&http->tickets, err);
    return rc;
}

int dn_http_open(const struct dn_http_conf *conf, const struct dn_http_handler *handler, void *user,
                 struct dn_http **out, struct dn_err *err)
{
    if (!conf->listen && !conf->listen_cleartext)
        return dn_err_set(err, DN_CONFIG, "no listen address given");
    if (conf->n_loops < 1 || conf->n_loops > LOOPS_MAX)
        return dn_err_set(err, DN_CONFIG, "%u event loops: expected 1..%d", conf->n_loops, LOOPS_MAX);
    signal(SIGPIPE, SIG_IGN);
    struct dn_http *http = dn_alloc0(1, sizeof *http);
    http->limits = conf->limits;
    set_defaults(&http->limits);
    http->handler = *handler;
    http->user = user;
    http->n_loops = conf->n_loops;
    pthread_mutex_init(&http->tls_lock, NULL);
    int rc = dn_h2o_init(err);
    if (!rc)
        rc = dn_h2o_self_test(err);
    if (!rc)
        rc = dn_h2o_conf_open(conf->server_name, &http->limits, dn_req_on_request, &http->h2o_conf, err);
    if (!rc)
        rc = open_loops(http, err);
    if (!rc && conf->listen)
        rc = open_tls(http, conf, err);
    if (!rc && conf->listen)
        rc = bind_all(http, conf->listen, false, err);
    if (!rc && conf->listen_cleartext)
        rc = bind_all(http, conf->listen_cleartext, true, err);
    if (rc) {
        dn_http_close(http);
        return rc;
    }
    *out = http;
    return 0;
}

int dn_http_run(struct dn_http *http, struct dn_err *err)
{
    atomic_store(&http->n_listening, http->n_loops);
    for (unsigned i = 0; i < http->n_loops; i++) {
        struct dn_loop *loop = http->loop[i];
        int rc = pthread_create(&loop->thread, NULL, loop_thread, loop);
        if (rc)
            return dn_err_set(err, DN_INTERNAL, "event loop %u can't start: %s", i, strerror(rc));
        loop->has_thread = true;
    }
    return 0;
}

void dn_http_drain(struct dn_http *http)
{
    if (atomic_exchange(&http->is_draining, true))
        return;
    for (unsigned i = 0; i < http->n_loops; i++)
        dn_loop_post(http->loop[i], &http->loop[i]->drain_msg);
}

bool dn_http_is_drained(const struct dn_http *http)
{
    if (atomic_load_explicit(&http->n_listening, memory_order_acquire) != 0)
        return false;
    for (unsigned i = 0; i < http->n_loops; i++)
        if (atomic_load_explicit(&http->loop[i]->stats.connections, memory_order_acquire) != 0)
            return false;
    return true;
}

void dn_http_stop(struct dn_http *http)
{
    if (atomic_exchange(&http->is_stopping, true))
        return;
    for (unsigned i = 0; i < http->n_loops; i++)
        if (http->loop[i] && http->loop[i]->has_thread)
            dn_loop_post(http->loop[i], &http->loop[i]->stop_msg);
}

void dn_http_close(struct dn_http *http)
{
    if (!http)
        return;
    if (http->loop) {
        dn_http_stop(http);
        for (unsigned i = 0; i < http->n_loops && http->loop[i]; i++) {
            struct dn_loop *loop = http->loop[i];
            if (loop->has_thread) {
                pthread_join(loop->thread, NULL);
            } else {
                for (int k = 0; k < 2; k++)
                    if (loop->listener[k].fd >= 0)
                        close(loop->listener[k].fd);
            }
            if (loop->event_fd >= 0)
                close(loop->event_fd);
            free(loop);
        }
        free(http->loop);
    }
    dn_h2o_conf_close(http->h2o_conf);
    dn_tls_identity_put(http->identity);
    dn_tls_tickets_close(http->tickets);
    pthread_mutex_destroy(&http->tls_lock);
    free(http);
}

uint16_t dn_http_port(const struct dn_http *http, bool cleartext)
{
    return http->port[cleartext];
}

int dn_http_reload_tls(struct dn_http *http, const char *cert_file, const char *key_file, struct dn_err *err)
{
    struct dn_tls_identity *id;
    int rc = dn_tls_identity_open(cert_file, key_file, &id, err);
    if (rc)
        return rc;
    pthread_mutex_lock(&http->tls_lock);
    struct dn_tls_identity *old = http->identity;
    http->identity = id;
    pthread_mutex_unlock(&http->tls_lock);
    atomic_fetch_add_explicit(&http->tls_generation, 1, memory_order_release);
    dn_tls_identity_put(old);
    return 0;
}

void dn_http_stats(const struct dn_http *http, struct dn_http_stats *out)
{
    *out = (struct dn_http_stats){0};
    for (unsigned i = 0; i < http->n_loops; i++) {
        const struct dn_loop_stats *s = &http->loop[i]->stats;
#define SUM(field) out->field += atomic_load_explicit(&s->field, memory_order_relaxed)
        SUM(accepted);
        SUM(refused);
        SUM(handshakes_ok);
        SUM(handshakes_failed);
        SUM(requests);
        SUM(requests_h2);
        SUM(cut_slow);
        SUM(cut_timeout);
        SUM(tls_bytes_in);
        SUM(tls_bytes_out);
        SUM(connections);
        SUM(streams);
#undef SUM
    }
}
