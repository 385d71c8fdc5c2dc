/* Metrics of the scheduler: our own names, and vLLM's as aliases, which routers and dashboards know
 * (serving.md 3.1, 3.3). */
#include "base/buf.h"
#include "sched/sched_impl.h"

#include <stdio.h>
#include <stdlib.h>

struct dn_sched_stats {
    struct dn_sched *sched;
    const char *model;
    struct dn_series *running, *waiting, *kv_usage, *kv_quarantined, *healthy;
    struct dn_series *preemptions, *prompt_tokens, *cached_tokens, *output_tokens, *steps, *mixed_steps;
    struct dn_series *prefix_queries, *prefix_hits, *evictions;
    struct dn_series *checks, *refused;
    struct dn_series *ttft, *itl, *e2e, *queue;
    struct dn_family *finished, *violations;
};

static struct dn_series *one(struct dn_sched_stats *t, struct dn_metrics *m, struct dn_family *f, const char *alias)
{
    if (alias)
        dn_metrics_alias(m, f, alias, "model_name");
    return dn_series(f, (const char *const[]){t->model});
}

static struct dn_series *counter(struct dn_sched_stats *t, struct dn_metrics *m, const char *name, const char *help,
                                 const char *alias)
{
    return one(t, m, dn_metrics_counter(m, name, help, "model"), alias);
}

static struct dn_series *gauge(struct dn_sched_stats *t, struct dn_metrics *m, const char *name, const char *help,
                               const char *alias)
{
    return one(t, m, dn_metrics_gauge(m, name, help, "model"), alias);
}

static struct dn_series *seconds(struct dn_sched_stats *t, struct dn_metrics *m, const char *name, const char *help,
                                 const char *alias)
{
    return one(t, m, dn_metrics_histogram(m, name, help, "model", dn_buckets_seconds, 16), alias);
}

/* Totals that the scheduler counts anyway are copied when somebody looks. */
static void on_print(void *user)
{
    struct dn_sched_stats *t = user;
    struct dn_snapshot n;
    dn_sched_snapshot(t->sched, &n);
    dn_gauge_set(t->running, (double)n.running);
    dn_gauge_set(t->waiting, dn_sched_waiting(t->sched));
    dn_gauge_set(t->healthy, (double)n.healthy);
    dn_gauge_set(t->kv_usage, n.kv_bytes_total ? (double)n.kv_bytes_held / (double)n.kv_bytes_total : 0);
    dn_gauge_set(t->kv_quarantined, (double)n.quarantined_pages);
    dn_counter_set(t->preemptions, n.preemptions);
    dn_counter_set(t->prompt_tokens, n.prompt_tokens);
    dn_counter_set(t->cached_tokens, n.cached_tokens);
    dn_counter_set(t->output_tokens, n.output_tokens);
    dn_counter_set(t->steps, n.steps);
    dn_counter_set(t->mixed_steps, n.mixed_steps);
    dn_counter_set(t->prefix_queries, n.prefix_query_tokens);
    dn_counter_set(t->prefix_hits, n.prefix_hit_tokens);
    dn_counter_set(t->evictions, n.evictions);
    dn_counter_set(t->checks, n.integrity_checks);
    dn_counter_set(t->refused, n.integrity_refused);
}

static void cache_info(struct dn_metrics *m, const struct dn_sched *s)
{
    char page_tokens[16], n_pages[16];
    const struct dn_kv_layout *l = &s->pool->runner->layout;
    snprintf(page_tokens, sizeof page_tokens, "%u", l->page_tokens);
    snprintf(n_pages, sizeof n_pages, "%u", s->pool->runner->n_slabs * l->format[DN_KV_BF16].pages_per_slab);
    struct dn_family *f = dn_metrics_gauge(
        m, "dunlin_cache_config_info", "page size in tokens and number of bf16 pages; always 1", "page_tokens,pages");
    dn_metrics_alias(m, f, "vllm:cache_config_info", "block_size,num_gpu_blocks");
    dn_gauge_set(dn_series(f, (const char *const[]){page_tokens, n_pages}), 1);
}

struct dn_sched_stats *dn_sched_stats_open(struct dn_metrics *m, struct dn_sched *s)
{
    if (!m)
        return NULL;
    struct dn_sched_stats *t = dn_alloc0(1, sizeof *t);
    t->sched = s;
    t->model = s->pool->model->name;
    t->running = gauge(t, m, "dunlin_requests_running", "sequences in the batch", "vllm:num_requests_running");
    t->waiting = gauge(t, m, "dunlin_requests_waiting", "requests in the queue", "vllm:num_requests_waiting");
    t->kv_usage = gauge(t, m, "dunlin_kv_usage_ratio", "share of KV memory held by running sequences, 0 to 1",
                        "vllm:kv_cache_usage_perc");
    t->kv_quarantined = gauge(t, m, "dunlin_kv_quarantined_pages", "pages taken out of use after a mismatch", NULL);
    t->healthy = gauge(t, m, "dunlin_pool_healthy", "1 while the pool's device works", NULL);
    t->preemptions = counter(t, m, "dunlin_preemptions_total", "sequences that had to be computed again",
                             "vllm:num_preemptions_total");
    t->prompt_tokens = counter(t, m, "dunlin_prompt_tokens_total",
                               "prompt tokens of started requests, cached ones included", "vllm:prompt_tokens_total");
    t->cached_tokens = counter(t, m, "dunlin_cached_tokens_total", "prompt tokens that came out of the prefix cache",
                               "vllm:prompt_tokens_cached_total");
    t->output_tokens = counter(t, m, "dunlin_output_tokens_total", "tokens generated", "vllm:generation_tokens_total");
    t->steps = counter(t, m, "dunlin_steps_total", "steps of the engine", NULL);
    t->mixed_steps =
        counter(t, m, "dunlin_mixed_kv_steps_total", "steps with sequences of more than one KV format", NULL);
    t->prefix_queries = counter(t, m, "dunlin_prefix_query_tokens_total", "tokens looked up in the prefix cache",
                                "vllm:prefix_cache_queries_total");
    t->prefix_hits = counter(t, m, "dunlin_prefix_hit_tokens_total", "tokens found in the prefix cache",
                             "vllm:prefix_cache_hits_total");
    t->evictions = counter(t, m, "dunlin_prefix_evictions_total", "cached pages given up for new ones", NULL);
    t->checks = counter(t, m, "dunlin_integrity_checks_total", "page tables checked, one a sequence and step", NULL);
    t->refused = counter(t, m, "dunlin_integrity_refused_total",
                         "double frees and outdated references that the page allocator refused", NULL);
    t->ttft =
        seconds(t, m, "dunlin_ttft_seconds", "from arrival to the first token", "vllm:time_to_first_token_seconds");
    t->itl = seconds(t, m, "dunlin_itl_seconds", "between two tokens of a request", "vllm:inter_token_latency_seconds");
    t->e2e = seconds(t, m, "dunlin_e2e_seconds", "from arrival to the last token", "vllm:e2e_request_latency_seconds");
    t->queue =
        seconds(t, m, "dunlin_queue_seconds", "from arrival to the first step", "vllm:request_queue_time_seconds");
    t->finished = dn_metrics_counter(m, "dunlin_requests_finished_total", "requests that left the scheduler, by reason",
                                     "model,reason");
    dn_metrics_alias(m, t->finished, "vllm:request_success_total", "model_name,finished_reason");
    static const char *const reason[] = {"stop", "length", "cancelled"};
    for (size_t i = 0; i < sizeof reason / sizeof *reason; i++)
        dn_series(t->finished, (const char *const[]){t->model, reason[i]});
    t->violations =
        dn_metrics_counter(m, "dunlin_integrity_violations_total", "requests ended by a failed check", "model,kind");
    dn_series(t->violations, (const char *const[]){t->model, "tag"});
    dn_series(t->violations, (const char *const[]){t->model, "range"});
    cache_info(m, s);
    dn_metrics_on_print(m, on_print, t);
    return t;
}

void dn_sched_stats_close(struct dn_sched_stats *t)
{
    free(t);
}

static void observe(struct dn_series *series, uint64_t ns)
{
    dn_histogram_observe(series, (double)ns * 1e-9);
}

void dn_sched_stats_queue(struct dn_sched_stats *t, uint64_t wait_ns)
{
    if (t)
        observe(t->queue, wait_ns);
}

void dn_sched_stats_first_token(struct dn_sched_stats *t, uint64_t ttft_ns)
{
    if (t)
        observe(t->ttft, ttft_ns);
}

void dn_sched_stats_gap(struct dn_sched_stats *t, uint64_t gap_ns)
{
    if (t)
        observe(t->itl, gap_ns);
}

void dn_sched_stats_done(struct dn_sched_stats *t, const char *reason, uint64_t e2e_ns)
{
    if (!t)
        return;
    observe(t->e2e, e2e_ns);
    dn_counter_add(dn_series(t->finished, (const char *const[]){t->model, reason}), 1);
}

void dn_sched_stats_violation(struct dn_sched_stats *t, const char *kind)
{
    if (t)
        dn_counter_add(dn_series(t->violations, (const char *const[]){t->model, kind}), 1);
}
