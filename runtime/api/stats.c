#include "api/stats.h"

#include "base/buf.h"
#include "base/metrics.h"
#include "http/http.h"

#include <stdio.h>
#include <stdlib.h>

struct dn_api_stats {
    struct dn_http *const *http; /* set once the server is open */
    struct dn_family *requests, *served;
    struct dn_series *connections, *streams, *accepted, *refused, *handshakes_ok, *handshakes_failed, *cut_slow,
        *cut_timeout;
};

static void on_print(void *user)
{
    struct dn_api_stats *s = user;
    if (!*s->http)
        return;
    struct dn_http_stats h;
    dn_http_stats(*s->http, &h);
    dn_gauge_set(s->connections, h.connections);
    dn_gauge_set(s->streams, h.streams);
    dn_counter_set(s->accepted, h.accepted);
    dn_counter_set(s->refused, h.refused);
    dn_counter_set(s->handshakes_ok, h.handshakes_ok);
    dn_counter_set(s->handshakes_failed, h.handshakes_failed);
    dn_counter_set(s->cut_slow, h.cut_slow);
    dn_counter_set(s->cut_timeout, h.cut_timeout);
}

static struct dn_series *counter(struct dn_metrics *m, const char *name, const char *help)
{
    return dn_series(dn_metrics_counter(m, name, help, NULL), NULL);
}

struct dn_api_stats *dn_api_stats_open(struct dn_metrics *m, struct dn_http *const *http)
{
    struct dn_api_stats *s = dn_alloc0(1, sizeof *s);
    s->http = http;
    s->requests = dn_metrics_counter(m, "dunlin_http_requests_total", "generation requests by endpoint and HTTP status",
                                     "endpoint,status");
    static const char *const endpoint[] = {"chat", "completions"};
    for (size_t i = 0; i < 2; i++)
        dn_series(s->requests, (const char *const[]){endpoint[i], "200"});
    s->served = dn_metrics_counter(m, "dunlin_requests_served_total",
                                   "requests given to the scheduler, by KV format and integrity level", "kv,integrity");
    for (int f = 0; f < DN_KV_FORMATS; f++)
        for (int check = 0; check < 2; check++)
            dn_series(s->served, (const char *const[]){dn_kv_format_name((enum dn_kv_format)f), check ? "tag" : "off"});
    s->connections = dn_series(dn_metrics_gauge(m, "dunlin_http_connections", "open connections", NULL), NULL);
    s->streams = dn_series(dn_metrics_gauge(m, "dunlin_http_streams", "requests being answered", NULL), NULL);
    s->accepted = counter(m, "dunlin_http_accepted_total", "connections accepted");
    s->refused = counter(m, "dunlin_http_refused_total", "connections refused by a limit");
    s->handshakes_ok = counter(m, "dunlin_tls_handshakes_total", "TLS handshakes completed");
    s->handshakes_failed =
        counter(m, "dunlin_tls_handshakes_failed_total", "TLS handshakes that failed or took too long");
    s->cut_slow = counter(m, "dunlin_http_cut_slow_total", "clients cut because they did not read");
    s->cut_timeout = counter(m, "dunlin_http_cut_timeout_total", "clients cut by a timeout while sending");
    dn_metrics_on_print(m, on_print, s);
    return s;
}

void dn_api_stats_close(struct dn_api_stats *s)
{
    free(s);
}

void dn_api_stats_call(struct dn_api_stats *s, const char *endpoint, int status, enum dn_kv_format kv, bool check,
                       bool served)
{
    char text[12];
    if (!s)
        return;
    snprintf(text, sizeof text, "%d", status);
    dn_counter_add(dn_series(s->requests, (const char *const[]){endpoint, text}), 1);
    if (served)
        dn_counter_add(dn_series(s->served, (const char *const[]){dn_kv_format_name(kv), check ? "tag" : "off"}), 1);
}
