/* The server inside this process: opening, the inbox, stopping. What clients see is tested by tests/clients/http_*.py.
 */
#include "http/http.h"

#include "http/h2o_port.h"

#include <arpa/inet.h>
#include <criterion/criterion.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static struct dn_loop *the_loop;
static atomic_int n_started, n_stopped, n_ran, n_gone, n_ticks;
static int order[3000];

static void *on_loop_start(struct dn_loop *loop, unsigned idx, void *user)
{
    (void)idx;
    the_loop = loop;
    atomic_fetch_add(&n_started, 1);
    return user;
}

static void on_loop_stop(struct dn_loop *loop, void *user)
{
    (void)loop;
    (void)user;
    atomic_fetch_add(&n_stopped, 1);
}

static void on_request(struct dn_loop *loop, struct dn_http_req *req, void *user)
{
    (void)loop;
    (void)user;
    (void)req; /* never answered */
}

static void on_gone(struct dn_loop *loop, struct dn_http_req *req, void *user)
{
    (void)loop;
    (void)user;
    cr_assert_null(dn_http_body(req).at);
    atomic_fetch_add(&n_gone, 1);
}

static void on_tick(struct dn_loop *loop, uint64_t now_ns, void *user)
{
    (void)loop;
    (void)now_ns;
    (void)user;
    atomic_fetch_add(&n_ticks, 1);
}

static const struct dn_http_handler handler = {.on_loop_start = on_loop_start,
                                               .on_loop_stop = on_loop_stop,
                                               .on_request = on_request,
                                               .on_gone = on_gone,
                                               .on_tick = on_tick};

struct numbered {
    struct dn_loop_msg msg;
    int i;
};

static void on_msg(struct dn_loop *loop, struct dn_loop_msg *msg, void *user)
{
    (void)loop;
    (void)user;
    order[atomic_fetch_add(&n_ran, 1)] = ((struct numbered *)msg)->i;
    free(msg);
}

static bool post(int i)
{
    struct numbered *m = calloc(1, sizeof *m);
    m->msg.fn = on_msg;
    m->i = i;
    bool ok = dn_loop_post(the_loop, &m->msg);
    if (!ok)
        free(m);
    return ok;
}

static void wait_for(atomic_int *counter, int value)
{
    for (int i = 0; i < 2000 && atomic_load(counter) != value; i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    cr_assert_eq(atomic_load(counter), value);
}

static struct dn_http *started(unsigned n_loops)
{
    struct dn_err err = {0};
    struct dn_http *http;
    struct dn_http_conf conf = {.listen_cleartext = "127.0.0.1:0", .n_loops = n_loops};
    cr_assert_eq(dn_http_open(&conf, &handler, NULL, &http, &err), 0, "%s", err.text);
    cr_assert_neq(dn_http_port(http, true), 0);
    cr_assert_eq(dn_http_port(http, false), 0);
    cr_assert_eq(dn_http_run(http, &err), 0);
    wait_for(&n_started, (int)n_loops);
    return http;
}

static int connected(struct dn_http *http)
{
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons(dn_http_port(http, true))};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    int fd = socket(AF_INET, SOCK_STREAM, 0);
    cr_assert_eq(connect(fd, (struct sockaddr *)&to, sizeof to), 0);
    return fd;
}

Test(http, the_self_test_passes_here)
{
    struct dn_err err = {0};
    cr_assert_eq(dn_h2o_init(&err), 0, "%s", err.text);
    cr_assert_eq(dn_h2o_self_test(&err), 0, "%s", err.text);
}

Test(http, messages_run_in_order_and_none_is_lost)
{
    struct dn_http *http = started(1);
    for (int i = 0; i < 1000; i++)
        cr_assert(post(i));
    wait_for(&n_ran, 1000);
    for (int i = 0; i < 1000; i++)
        cr_assert_eq(order[i], i);
    dn_http_stop(http);
    int n_taken = 0;
    while (n_taken < 1000 && post(n_taken)) /* until the loop refuses; what it took it runs */
        n_taken++;
    wait_for(&n_stopped, 1);
    cr_assert(!post(0));
    cr_assert_eq(atomic_load(&n_ran), 1000 + n_taken);
    dn_http_close(http);
}

static void *poster(void *arg)
{
    for (int i = 0; i < 500; i++)
        post(*(int *)arg);
    return NULL;
}

Test(http, several_threads_may_post)
{
    struct dn_http *http = started(1);
    pthread_t thread[4];
    int id[4] = {0, 1, 2, 3};
    for (int i = 0; i < 4; i++)
        pthread_create(&thread[i], NULL, poster, &id[i]);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    wait_for(&n_ran, 2000);
    dn_http_close(http);
}

Test(http, stop_ends_requests_and_loops)
{
    struct dn_http *http = started(3);
    int fd[30];
    for (int i = 0; i < 30; i++) {
        static const char get[] = "GET /x HTTP/1.1\r\nhost: t\r\n\r\n";
        fd[i] = connected(http);
        cr_assert_eq(write(fd[i], get, sizeof get - 1), (ssize_t)(sizeof get - 1));
    }
    struct dn_http_stats s;
    for (int i = 0; i < 2000; i++) {
        dn_http_stats(http, &s);
        if (s.streams == 30)
            break;
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    cr_assert_eq(s.streams, 30);
    cr_assert_eq(s.requests, 30);
    cr_assert(!dn_http_is_drained(http));
    dn_http_close(http);
    cr_assert_eq(atomic_load(&n_gone), 30);
    cr_assert_eq(atomic_load(&n_stopped), 3);
    for (int i = 0; i < 30; i++)
        close(fd[i]);
}

Test(http, an_idle_server_ticks_and_drains)
{
    struct dn_http *http = started(2);
    struct timespec t = {.tv_nsec = 550000000};
    nanosleep(&t, NULL);
    int n = atomic_load(&n_ticks);
    cr_assert(n >= 6 && n <= 14, "%d ticks of two loops in 550 ms", n);
    cr_assert(!dn_http_is_drained(http));
    dn_http_drain(http);
    for (int i = 0; i < 2000 && !dn_http_is_drained(http); i++)
        nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    cr_assert(dn_http_is_drained(http));
    dn_http_close(http);
}

static int open_with(const char *listen, const char *cleartext, unsigned n_loops, struct dn_err *err)
{
    struct dn_http *http = NULL;
    struct dn_http_conf conf = {.listen = listen, .listen_cleartext = cleartext, .n_loops = n_loops};
    int rc = dn_http_open(&conf, &handler, NULL, &http, err);
    if (rc == 0)
        dn_http_close(http);
    else
        cr_assert_null(http);
    return rc;
}

Test(http, wrong_configurations_are_errors)
{
    struct dn_err err = {0};
    cr_assert_eq(open_with(NULL, NULL, 1, &err), -DN_CONFIG);
    cr_assert_eq(open_with(NULL, "127.0.0.1:0", 0, &err), -DN_CONFIG);
    cr_assert_eq(open_with("127.0.0.1:0", NULL, 1, &err), -DN_CONFIG); /* no certificate */
    static const char *bad[] = {"0.0.0.0:0", "[::]:0",         ":0", "*:0", "192.0.2.1:0", "127.0.0.1", "127.0.0.1:x",
                                "::1:0",     "127.0.0.1:65536"};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        cr_assert_eq(open_with(NULL, bad[i], 1, &err), -DN_CONFIG, "%s: %s", bad[i], err.text);
    cr_assert_eq(open_with(NULL, "127.0.0.1:0", 1, &err), 0);
    dn_http_close(NULL);
}
