/* A small server on runtime/http for its integration tests and measurements: echo, event streams fed by a second
 * thread, requests that never end, floods. Its only output is "ready TLS_PORT CLEARTEXT_PORT H2O_VERSION"; /stats tells
 * what happened.
 *
 * GET /            74 bytes of JSON         POST /echo       the body
 * GET /sse?n=&ms=&size=  n events           GET /hold        never answers
 * GET /flood?n=&heed=    n bytes as fast as the client takes them; heed=0 ignores dn_http_paused()
 * GET /abort?n=    n bytes, then abort      GET /info        what the handler sees of the request
 * GET /stats       counters                 anything else    404
 * SIGTERM drains, a second one stops at once; SIGHUP loads the certificate again.
 */
#include "base/buf.h"
#include "base/clock.h"
#include "http/h2o_port.h"
#include "http/http.h"
#include "http/tls_selfsigned.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum kind { KIND_OTHER, KIND_SSE, KIND_HOLD, KIND_FLOOD };

struct job {                 /* a request as the handler knows it; named by its generation outside the loop */
    struct job *next;        /* engine's list */
    struct dn_http_req *req; /* loop only; NULL when gone */
    struct dn_loop *loop;
    enum kind kind;
    uint64_t left, size, every_ns, due_ns;
    bool heed;
    atomic_bool is_gone;
    atomic_uint refs;
    uint64_t sum_paused;
};

struct batch { /* all events of one step for one loop */
    struct dn_loop_msg msg;
    struct job **job;
    size_t n, cap;
};

static struct {
    struct dn_http *http;
    pthread_mutex_t lock;
    struct job *jobs;
    atomic_bool stop;
    atomic_ulong n_requests, n_gone, n_holding, n_streaming, n_paused, n_resumed, n_posts_refused, n_events;
    struct dn_loop *loop[64];
} g = {.lock = PTHREAD_MUTEX_INITIALIZER};

static const char hello[] = "{\"object\":\"chat.completion\",\"choices\":[{\"message\":{\"content\":\"hello!\"}}]}\n";
_Static_assert(sizeof hello - 1 == 74, "the body that the measurements speak of");

static void job_put(struct job *j)
{
    if (atomic_fetch_sub(&j->refs, 1) == 1)
        free(j);
}

static bool is_path(struct dn_http_req *req, const char *path)
{
    struct dn_str p = dn_http_path(req);
    return p.len == strlen(path) && memcmp(p.at, path, p.len) == 0;
}

static uint64_t query(struct dn_http_req *req, const char *name, uint64_t value)
{
    struct dn_str q = dn_http_query(req);
    size_t n = strlen(name);
    for (size_t i = 0; i + n < q.len; i++)
        if ((i == 0 || q.at[i - 1] == '&') && memcmp(q.at + i, name, n) == 0 && q.at[i + n] == '=')
            return strtoull(q.at + i + n + 1, NULL, 10);
    return value;
}

static struct job *job_open(struct dn_loop *loop, struct dn_http_req *req, enum kind kind)
{
    struct job *j = dn_alloc0(1, sizeof *j);
    j->loop = loop;
    j->req = req;
    j->kind = kind;
    atomic_init(&j->refs, 1);
    dn_http_set_user(req, j);
    return j;
}

static void flood(struct job *j)
{
    static const char block[8192] = "0123456789abcdef";
    while (j->left && !(j->heed && dn_http_paused(j->req))) {
        size_t n = j->left < sizeof block ? j->left : sizeof block;
        dn_http_write(j->req, block, n);
        j->left -= n;
    }
    if (j->left == 0)
        dn_http_finish(j->req);
    else
        atomic_fetch_add(&g.n_paused, 1);
}

static void send_stats(struct dn_http_req *req)
{
    struct dn_http_stats s;
    struct dn_buf b = {0};
    dn_http_stats(g.http, &s);
    dn_buf_printf(
        &b,
        "{\"requests\":%lu,\"gone\":%lu,\"holding\":%lu,\"streaming\":%lu,\"paused\":%lu,\"resumed\":%lu,"
        "\"refused_posts\":%lu,\"events\":%lu,\"accepted\":%llu,\"refused\":%llu,\"handshakes_ok\":%llu,"
        "\"handshakes_failed\":%llu,\"cut_slow\":%llu,\"cut_timeout\":%llu,\"connections\":%u,\"streams\":%u}\n",
        atomic_load(&g.n_requests), atomic_load(&g.n_gone), atomic_load(&g.n_holding), atomic_load(&g.n_streaming),
        atomic_load(&g.n_paused), atomic_load(&g.n_resumed), atomic_load(&g.n_posts_refused), atomic_load(&g.n_events),
        (unsigned long long)s.accepted, (unsigned long long)s.refused, (unsigned long long)s.handshakes_ok,
        (unsigned long long)s.handshakes_failed, (unsigned long long)s.cut_slow, (unsigned long long)s.cut_timeout,
        s.connections, s.streams);
    dn_http_reply(req, 200, "application/json", b.data, b.len);
    dn_buf_release(&b);
}

static void send_info(struct dn_http_req *req)
{
    struct dn_buf b = {0};
    struct dn_str m = dn_http_method(req), p = dn_http_path(req), q = dn_http_query(req),
                  x = dn_http_header(req, "x-test"), host = dn_http_header(req, "host");
    dn_buf_printf(&b, "%.*s|%.*s|%.*s|%.*s|%.*s|%s|%d|%d\n", (int)m.len, m.at ? m.at : "", (int)p.len, p.at, (int)q.len,
                  q.at ? q.at : "", (int)x.len, x.at ? x.at : "", (int)host.len, host.at ? host.at : "",
                  dn_http_peer(req), dn_http_peer_is_loopback(req), dn_http_version(req));
    dn_http_add_header(req, "x-request-id", "r\r\nevil: 1");
    dn_http_reply(req, 200, "text/plain", b.data, b.len);
    dn_buf_release(&b);
}

static void start_sse(struct dn_loop *loop, struct dn_http_req *req)
{
    struct job *j = job_open(loop, req, KIND_SSE);
    j->left = query(req, "n", 10);
    j->size = query(req, "size", 32);
    j->every_ns = query(req, "ms", 10) * DN_NS_PER_MS;
    j->due_ns = dn_now_ns() + j->every_ns;
    atomic_fetch_add(&g.n_streaming, 1);
    dn_http_start(req, 200, "text/event-stream");
    dn_http_write(req, ": ok\n\n", 6);
    atomic_fetch_add(&j->refs, 1);
    pthread_mutex_lock(&g.lock);
    j->next = g.jobs;
    g.jobs = j;
    pthread_mutex_unlock(&g.lock);
}

static void on_request(struct dn_loop *loop, struct dn_http_req *req, void *user)
{
    (void)user;
    atomic_fetch_add(&g.n_requests, 1);
    if (is_path(req, "/")) {
        dn_http_reply(req, 200, "application/json", hello, sizeof hello - 1);
    } else if (is_path(req, "/echo")) {
        struct dn_str body = dn_http_body(req);
        dn_http_reply(req, 200, "application/octet-stream", body.at, body.len);
    } else if (is_path(req, "/sse")) {
        start_sse(loop, req);
    } else if (is_path(req, "/hold")) {
        job_open(loop, req, KIND_HOLD);
        atomic_fetch_add(&g.n_holding, 1);
    } else if (is_path(req, "/flood")) {
        struct job *j = job_open(loop, req, KIND_FLOOD);
        j->left = query(req, "n", 1 << 20);
        j->heed = query(req, "heed", 1) != 0;
        atomic_fetch_add(&g.n_streaming, 1);
        dn_http_start(req, 200, "application/octet-stream");
        flood(j);
    } else if (is_path(req, "/abort")) {
        uint64_t n = query(req, "n", 0);
        dn_http_start(req, 200, "text/plain");
        for (; n; n--)
            dn_http_write(req, "x", 1);
        dn_http_abort(req);
    } else if (is_path(req, "/stats")) {
        send_stats(req);
    } else if (is_path(req, "/info")) {
        send_info(req);
    } else {
        static const char none[] = "{\"error\":{\"message\":\"no such path\",\"code\":\"not_found\"}}\n";
        dn_http_reply(req, 404, "application/json", none, sizeof none - 1);
    }
}

static void on_gone(struct dn_loop *loop, struct dn_http_req *req, void *user)
{
    (void)loop;
    (void)user;
    struct job *j = dn_http_user(req);
    atomic_fetch_add(&g.n_gone, 1);
    if (!j)
        return;
    if (j->kind == KIND_HOLD)
        atomic_fetch_sub(&g.n_holding, 1);
    else
        atomic_fetch_sub(&g.n_streaming, 1);
    j->req = NULL;
    atomic_store(&j->is_gone, true);
    job_put(j);
}

static void on_resume(struct dn_loop *loop, struct dn_http_req *req, void *user)
{
    (void)loop;
    (void)user;
    struct job *j = dn_http_user(req);
    atomic_fetch_add(&g.n_resumed, 1);
    if (j && j->kind == KIND_FLOOD)
        flood(j);
}

static void *on_loop_start(struct dn_loop *loop, unsigned idx, void *user)
{
    (void)user;
    g.loop[idx] = loop;
    return loop;
}

/* --- the engine: a thread that produces events for all streams, one message a step and loop ------------------------
 */

static void on_batch(struct dn_loop *loop, struct dn_loop_msg *msg, void *user)
{
    (void)loop;
    (void)user;
    struct batch *b = (struct batch *)msg;
    char text[4096];
    for (size_t i = 0; i < b->n; i++) {
        struct job *j = b->job[i];
        if (j->req && j->left) {
            size_t size = j->size < sizeof text - 16 ? j->size : sizeof text - 16;
            int n = snprintf(text, sizeof text, "data: %0*llu\n\n", (int)size, (unsigned long long)j->left);
            dn_http_write(j->req, text, (size_t)n);
            atomic_fetch_add(&g.n_events, 1);
            if (--j->left == 0)
                dn_http_finish(j->req);
        }
        job_put(j);
    }
    free(b->job);
    free(b);
}

static void post_batch(struct dn_loop *loop, struct job **job, size_t n)
{
    struct batch *b = dn_alloc0(1, sizeof *b);
    b->msg.fn = on_batch;
    b->job = dn_alloc(n * sizeof *job);
    memcpy(b->job, job, n * sizeof *job);
    b->n = n;
    if (dn_loop_post(loop, &b->msg))
        return;
    atomic_fetch_add(&g.n_posts_refused, 1);
    for (size_t i = 0; i < n; i++)
        job_put(b->job[i]);
    free(b->job);
    free(b);
}

static void step(void)
{
    static struct job *due[64][4096];
    static size_t n_due[64];
    static unsigned n_loops;
    memset(n_due, 0, sizeof n_due);
    uint64_t now = dn_now_ns();
    pthread_mutex_lock(&g.lock);
    for (struct job **at = &g.jobs, *j; (j = *at);) {
        if (atomic_load(&j->is_gone)) {
            *at = j->next;
            job_put(j);
            continue;
        }
        at = &j->next;
        if (j->due_ns > now)
            continue;
        j->due_ns += j->every_ns;
        unsigned l = 0;
        while (g.loop[l] != j->loop)
            l++;
        if (l >= n_loops)
            n_loops = l + 1;
        if (n_due[l] < 4096) {
            atomic_fetch_add(&j->refs, 1);
            due[l][n_due[l]++] = j;
        }
    }
    pthread_mutex_unlock(&g.lock);
    for (unsigned l = 0; l < n_loops; l++)
        if (n_due[l])
            post_batch(g.loop[l], due[l], n_due[l]);
}

static void *engine(void *arg)
{
    (void)arg;
    while (!atomic_load(&g.stop)) {
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
        step();
    }
    for (struct job *j = g.jobs, *next; j; j = next) {
        next = j->next;
        job_put(j);
    }
    g.jobs = NULL;
    return NULL;
}

/* --- main -----------------------------------------------------------------------------------------------------------
 */

static volatile sig_atomic_t n_term, n_hup;

static void on_signal(int sig)
{
    if (sig == SIGHUP)
        n_hup = 1;
    else
        n_term++;
}

static bool set_limit(struct dn_http_limits *l, const char *arg)
{
    const char *eq = strchr(arg, '=');
    if (!eq)
        return false;
    uint64_t value = strtoull(eq + 1, NULL, 10);
    size_t n = (size_t)(eq - arg);
#define LIMIT(field)                                                                                                   \
    if (n == strlen(#field) && memcmp(arg, #field, n) == 0) {                                                          \
        l->field = value;                                                                                              \
        return true;                                                                                                   \
    }
    LIMIT(connections)
    LIMIT(connections_per_ip)
    LIMIT(header_bytes)
    LIMIT(header_fields)
    LIMIT(path_bytes)
    LIMIT(body_bytes)
    LIMIT(body_bytes_inflight)
    LIMIT(handshake_timeout_ms)
    LIMIT(header_timeout_ms)
    LIMIT(body_timeout_ms)
    LIMIT(idle_timeout_ms)
    LIMIT(stall_timeout_ms)
    LIMIT(stream_pause_bytes)
    LIMIT(stream_cut_bytes)
    LIMIT(drain_timeout_ms)
#undef LIMIT
    return false;
}

static void wait_for_signals(struct dn_http *http, const struct dn_http_conf *conf)
{
    bool is_draining = false;
    while (n_term < 2 && !(is_draining && dn_http_is_drained(http))) {
        nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
        struct dn_err err = {0};
        if (n_hup) {
            n_hup = 0;
            int rc = dn_http_reload_tls(http, conf->cert_file, conf->key_file, &err);
            printf("reload %s\n", rc ? err.text : "ok");
            fflush(stdout);
        }
        if (n_term && !is_draining) {
            is_draining = true;
            dn_http_drain(http);
        }
    }
    printf("%s\n", n_term < 2 ? "drained" : "stopped");
}

int main(int argc, char **argv)
{
    struct dn_http_conf conf = {.server_name = "echo", .n_loops = 1};
    struct dn_err err = {0};
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (strcmp(name, "--listen") == 0)
            conf.listen = value;
        else if (strcmp(name, "--cleartext") == 0)
            conf.listen_cleartext = value;
        else if (strcmp(name, "--cert") == 0)
            conf.cert_file = value;
        else if (strcmp(name, "--key") == 0)
            conf.key_file = value;
        else if (strcmp(name, "--loops") == 0)
            conf.n_loops = (unsigned)atoi(value);
        else if (strcmp(name, "--without-cures") == 0)
            dn_h2o_test_without_cures = atoi(value) != 0;
        else if (strcmp(name, "--limit") != 0 || !set_limit(&conf.limits, value)) {
            fprintf(stderr, "http_echo: %s %s is not an option\n", name, value);
            return 2;
        }
    }
    if (conf.cert_file && access(conf.cert_file, R_OK) && dn_tls_selfsigned(conf.cert_file, conf.key_file, 30, &err)) {
        fprintf(stderr, "http_echo: %s\n", err.text);
        return 1;
    }
    struct dn_http_handler handler = {
        .on_loop_start = on_loop_start, .on_request = on_request, .on_gone = on_gone, .on_resume = on_resume};
    if (dn_http_open(&conf, &handler, NULL, &g.http, &err) || dn_http_run(g.http, &err)) {
        fprintf(stderr, "http_echo: %s\n", err.text);
        return 1;
    }
    signal(SIGTERM, on_signal);
    signal(SIGINT, on_signal);
    signal(SIGHUP, on_signal);
    pthread_t thread;
    pthread_create(&thread, NULL, engine, NULL);
    printf("ready %u %u %s\n", dn_http_port(g.http, false), dn_http_port(g.http, true), dn_h2o_version());
    fflush(stdout);
    wait_for_signals(g.http, &conf);
    dn_http_stop(g.http);
    atomic_store(&g.stop, true);
    pthread_join(thread, NULL);
    dn_http_close(g.http);
    printf("gone %lu of %lu\n", atomic_load(&g.n_gone), atomic_load(&g.n_requests));
    return atomic_load(&g.n_gone) == atomic_load(&g.n_requests) ? 0 : 3;
}
