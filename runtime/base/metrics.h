/* Metrics: counters, gauges and histograms, printed in Prometheus' text format.
 *
 *     struct dn_family *f = dn_metrics_counter(m, "dn_requests_total", "finished requests", "model,code");
 *     struct dn_series *ok = dn_series(f, (const char *[]){"smollm2", "200"});
 *     dn_counter_add(ok, 1);
 *
 * The registry (struct dn_metrics) belongs to main and outlives all users; families and series live as long as it does.
 * Families are registered at the start, so that each is shown at zero from then on; a scrape may run meanwhile (a node
 * that loads serves /metrics), but registers nothing itself. dn_series()
 * finds or makes a series under a lock: keep what it returns where the values are bounded and known (look up once, not
 * in a step). At most DN_SERIES_MAX series a family; beyond it values fall together into one with every label "other".
 * Changing a series is one atomic operation, any thread. Names are this header's users' own; units and `_total` in the
 * name.
 */
#ifndef DN_BASE_METRICS_H
#define DN_BASE_METRICS_H

#include "base/buf.h"

#include <stddef.h>
#include <stdint.h>

#define DN_SERIES_MAX  256
#define DN_BUCKETS_MAX 24
#define DN_LABELS_MAX  6

struct dn_metrics;
struct dn_family;
struct dn_series;

struct dn_metrics *dn_metrics_open(void);
void dn_metrics_close(struct dn_metrics *m); /* NULL is fine */

/* labels: comma-separated names, or NULL for a family of one series (which exists at once). Strings are copied. A name
 * registered twice is a bug and aborts. Buckets are upper bounds in ascending order, without +Inf. */
struct dn_family *dn_metrics_counter(struct dn_metrics *m, const char *name, const char *help, const char *labels);
struct dn_family *dn_metrics_gauge(struct dn_metrics *m, const char *name, const char *help, const char *labels);
struct dn_family *dn_metrics_histogram(struct dn_metrics *m, const char *name, const char *help, const char *labels,
                                       const double *bucket, size_t n_buckets);

/* The same series under a second name (and second names of the labels, as many): what other servers' dashboards ask
 * for. */
void dn_metrics_alias(struct dn_metrics *m, struct dn_family *f, const char *name, const char *labels);

/* The series with these label values, in the order of the names; value is ignored for a family without labels. Values
 * are copied. Never NULL. Any thread. */
struct dn_series *dn_series(struct dn_family *f, const char *const *value);

void dn_counter_add(struct dn_series *s, uint64_t n);
void dn_counter_set(struct dn_series *s, uint64_t total); /* for totals that are counted elsewhere; must not fall */
uint64_t dn_counter_value(const struct dn_series *s);
void dn_gauge_set(struct dn_series *s, double v);
void dn_gauge_add(struct dn_series *s, double v);
double dn_gauge_value(const struct dn_series *s);
void dn_histogram_observe(struct dn_series *s, double v); /* NaN is ignored */
uint64_t dn_histogram_count(const struct dn_series *s);
double dn_histogram_sum(const struct dn_series *s);

/* fn runs before each print, on the printing thread: the place to fill gauges that someone else holds. At most 16. */
void dn_metrics_on_print(struct dn_metrics *m, void (*fn)(void *user), void *user);

/* The exposition (text/plain; version=0.0.4). Any thread, one at a time (a lock sees to it). */
void dn_metrics_print(struct dn_metrics *m, struct dn_buf *out);
#define DN_METRICS_CONTENT_TYPE "text/plain; version=0.0.4; charset=utf-8"

/* Name, type, labels and help of every family, as text: `dunlin help metrics`. */
void dn_metrics_print_help(struct dn_metrics *m, struct dn_buf *out);

/* 1 ms to 100 s in steps of about 2: latencies. */
extern const double dn_buckets_seconds[16];

#endif
