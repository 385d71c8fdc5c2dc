/* The 74-byte answer through runtime/http (mbedTLS in front of h2o) and through h2o's own TLS (OpenSSL), in one process
 * on two ports, one loop thread each, same certificate. http_bench.py drives it. A line on stdin prints the CPU time
 * and the request count of both threads: "mbedtls CPU_NS REQUESTS openssl CPU_NS REQUESTS". Usage: http_bench CERT KEY
 * (made when absent). First output: "ready PORT_MBEDTLS PORT_OPENSSL".
 */
#include "http/http.h"
#include "http/tls_selfsigned.h"

#include <h2o.h>
#include <h2o/http1.h>
#include <h2o/http2.h>

#include <arpa/inet.h>
#include <openssl/ssl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

static const char hello[] = "{\"object\":\"chat.completion\",\"choices\":[{\"message\":{\"content\":\"hello!\"}}]}\n";
static clockid_t cpu_clock[2];
static atomic_ulong n_requests[2];

/* --- ours ----------------------------------------------------------------------------------------------------------
 */

static void *on_loop_start(struct dn_loop *loop, unsigned idx, void *user)
{
    (void)loop;
    (void)idx;
    pthread_getcpuclockid(pthread_self(), &cpu_clock[0]);
    return user;
}

static void on_request(struct dn_loop *loop, struct dn_http_req *req, void *user)
{
    (void)loop;
    (void)user;
    atomic_fetch_add_explicit(&n_requests[0], 1, memory_order_relaxed);
    dn_http_reply(req, 200, "application/json", hello, sizeof hello - 1);
}

static void on_gone(struct dn_loop *loop, struct dn_http_req *req, void *user)
{
    (void)loop;
    (void)req;
    (void)user;
}

/* --- h2o's ----------------------------------------------------------------------------------------------------------
 */

static h2o_globalconf_t config;
static h2o_context_t context;
static h2o_accept_ctx_t accept_ctx;
static int listen_fd;

static int on_req(h2o_handler_t *self, h2o_req_t *req)
{
    static h2o_generator_t generator;
    (void)self;
    atomic_fetch_add_explicit(&n_requests[1], 1, memory_order_relaxed);
    h2o_iovec_t body = {(char *)hello, sizeof hello - 1};
    req->res.status = 200;
    req->res.content_length = body.len;
    h2o_add_header(&req->pool, &req->res.headers, H2O_TOKEN_CONTENT_TYPE, NULL, H2O_STRLIT("application/json"));
    h2o_start_response(req, &generator);
    h2o_send(req, &body, 1, H2O_SEND_STATE_FINAL);
    return 0;
}

static void on_connection(h2o_socket_t *listener, const char *err)
{
    h2o_socket_t *sock;
    if (!err && (sock = h2o_evloop_socket_accept(listener)) != NULL)
        h2o_accept(&accept_ctx, sock);
}

static void *openssl_thread(void *arg)
{
    (void)arg;
    pthread_getcpuclockid(pthread_self(), &cpu_clock[1]);
    h2o_loop_t *loop = h2o_evloop_create();
    h2o_context_init(&context, loop, &config);
    accept_ctx.ctx = &context;
    accept_ctx.hosts = config.hosts;
    h2o_socket_t *sock = h2o_evloop_socket_create(loop, listen_fd, H2O_SOCKET_FLAG_DONT_READ);
    h2o_socket_read_start(sock, on_connection);
    for (;;)
        h2o_evloop_run(loop, 1000);
    return NULL;
}

static uint16_t start_openssl(const char *cert, const char *key)
{
    SSL_CTX *ssl = SSL_CTX_new(TLS_server_method());
    /* the same version and suite as mbedTLS 2.28 agrees on */
    SSL_CTX_set_max_proto_version(ssl, TLS1_2_VERSION);
    SSL_CTX_set_cipher_list(ssl, "ECDHE-ECDSA-AES128-GCM-SHA256");
    if (SSL_CTX_use_certificate_chain_file(ssl, cert) != 1 ||
        SSL_CTX_use_PrivateKey_file(ssl, key, SSL_FILETYPE_PEM) != 1)
        exit(1);
    h2o_ssl_register_alpn_protocols(ssl, h2o_http2_alpn_protocols);
    accept_ctx.ssl_ctx = ssl;
    h2o_config_init(&config);
    h2o_hostconf_t *host = h2o_config_register_host(&config, h2o_iovec_init(H2O_STRLIT("default")), 65535);
    h2o_create_handler(h2o_config_register_path(host, "/", 0), sizeof(h2o_handler_t))->on_req = on_req;
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t len = sizeof at;
    listen_fd = socket(AF_INET, SOCK_STREAM, 0);
    if (bind(listen_fd, (struct sockaddr *)&at, len) || listen(listen_fd, 1024) ||
        getsockname(listen_fd, (struct sockaddr *)&at, &len))
        exit(1);
    pthread_t thread;
    pthread_create(&thread, NULL, openssl_thread, NULL);
    return ntohs(at.sin_port);
}

static unsigned long cpu_ns(int i)
{
    struct timespec t;
    clock_gettime(cpu_clock[i], &t);
    return (unsigned long)t.tv_sec * 1000000000ul + (unsigned long)t.tv_nsec;
}

int main(int argc, char **argv)
{
    struct dn_err err = {0};
    struct dn_http *http;
    if (argc != 3 || (access(argv[1], R_OK) && dn_tls_selfsigned(argv[1], argv[2], 30, &err))) {
        fprintf(stderr, "http_bench: CERT KEY expected %s\n", err.text);
        return 1;
    }
    struct dn_http_conf conf = {
        .listen = "127.0.0.1:0", .cert_file = argv[1], .key_file = argv[2], .server_name = "h2o/2.2.5", .n_loops = 1};
    struct dn_http_handler handler = {.on_loop_start = on_loop_start, .on_request = on_request, .on_gone = on_gone};
    if (dn_http_open(&conf, &handler, NULL, &http, &err) || dn_http_run(http, &err)) {
        fprintf(stderr, "http_bench: %s\n", err.text);
        return 1;
    }
    uint16_t port = start_openssl(argv[1], argv[2]);
    usleep(200000);
    printf("ready %u %u\n", dn_http_port(http, false), port);
    fflush(stdout);
    char line[16];
    while (fgets(line, sizeof line, stdin)) {
        printf("mbedtls %lu %lu openssl %lu %lu\n", cpu_ns(0), atomic_load(&n_requests[0]), cpu_ns(1),
               atomic_load(&n_requests[1]));
        fflush(stdout);
    }
    dn_http_close(http);
    return 0;
}
