/* Metrics of the API: requests by endpoint, status and what they were given. Any thread. */
#ifndef DN_API_STATS_H
#define DN_API_STATS_H

#include "sched/request.h" /* enum dn_kv_format */

struct dn_metrics;
struct dn_http;
struct dn_api_stats;

struct dn_api_stats *dn_api_stats_open(struct dn_metrics *m, struct dn_http *const *http);
void dn_api_stats_close(struct dn_api_stats *s);

/* One finished call; `served`: it reached the scheduler, so kv and check say what it got. NULL stats: nothing. */
void dn_api_stats_call(struct dn_api_stats *s, const char *endpoint, int status, enum dn_kv_format kv, bool check,
                       bool served);

#endif
