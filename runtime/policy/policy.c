#include "policy/host.h"

#include "base/clock.h"
#include "base/log.h"

#include <stdlib.h>
#include <string.h>

/* ---- Metrics ---- */

static const char *const error_name[DN_PE_COUNT] = {"error", "timeout", "memory", "type", "field", "range"};

const char *dn_policy_error_name(enum dn_policy_error e)
{
    return (unsigned)e < DN_PE_COUNT ? error_name[e] : "error";
}

void dn_policy_metrics_init(struct dn_policy_metrics *m, struct dn_metrics *registry)
{
    static const double seconds[] = {1e-6, 2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3};
    memset(m, 0, sizeof *m);
    if (!registry)
        return;
    m->calls = dn_metrics_counter(registry, "dunlin_policy_calls_total", "calls of a policy's hook", "policy,hook");
    m->seconds = dn_metrics_histogram(registry, "dunlin_policy_duration_seconds", "time of a policy's hook",
                                      "policy,hook", seconds, sizeof seconds / sizeof *seconds);
    m->errors = dn_metrics_counter(registry, "dunlin_policy_errors_total",
                                   "failed calls: the script, its budgets, or an answer against the contract",
                                   "policy,hook,kind");
    m->fallback = dn_metrics_counter(registry, "dunlin_policy_fallback_total",
                                     "times that the error rule of a hook was applied", "hook");
    m->rejects =
        dn_metrics_counter(registry, "dunlin_policy_rejects_total", "requests refused by a policy", "policy,code");
    m->decisions = dn_metrics_counter(registry, "dunlin_policy_decisions_total",
                                      "requests by what policies decided for them", "field,value");
    m->revision = dn_metrics_gauge(registry, "dunlin_policy_revision_info", "1 for the revision in force", "revision");
    m->vm_bytes = dn_metrics_gauge(registry, "dunlin_policy_vm_bytes", "memory of a thread's Lua state", "thread");
    m->recycled = dn_metrics_counter(registry, "dunlin_policy_vm_recycled_total",
                                     "Lua states thrown away because a budget was spent", "reason");
    m->user =
        dn_metrics_counter(registry, "dunlin_policy_user_total", "counters of the policies' own", "policy,name,label");
    m->reload_ok =
        dn_series(dn_metrics_gauge(registry, "dunlin_policy_last_reload_success",
                                   "0 if the last reload failed and the policies before it are in force", NULL),
                  NULL);
    m->reload_time = dn_series(dn_metrics_gauge(registry, "dunlin_policy_last_reload_timestamp_seconds",
                                                "when the policies in force were loaded", NULL),
                               NULL);
    for (int w = 0; w < DN_DECIDE_W_COUNT; w++) {
        const char *name = dn_decide_weights_name((enum dn_decide_weights)w);
        m->decided[DN_DECIDE_PREFILL_WEIGHTS][w] = dn_series(m->decisions, (const char *[]){"prefill_weights", name});
        m->decided[DN_DECIDE_DECODE_WEIGHTS][w] = dn_series(m->decisions, (const char *[]){"decode_weights", name});
    }
    for (int k = 0; k < DN_DECIDE_KV_COUNT; k++)
        m->decided[DN_DECIDE_KV][k] =
            dn_series(m->decisions, (const char *[]){"kv_dtype", dn_decide_kv_name((enum dn_decide_kv)k)});
    for (int i = 0; i < DN_DECIDE_INTEGRITY_COUNT; i++)
        m->decided[DN_DECIDE_INTEGRITY][i] = dn_series(
            m->decisions, (const char *[]){"integrity", dn_decide_integrity_name((enum dn_decide_integrity)i)});
    for (int h = DN_HOOK_ADMIT; h < DN_HOOK_COUNT; h++)
        dn_series(m->fallback, (const char *[]){dn_policy_hook_name((enum dn_policy_hook)h)});
    static const char *const reason[] = {"memory", "instructions", "time"};
    for (size_t i = 0; i < sizeof reason / sizeof *reason; i++)
        dn_series(m->recycled, &reason[i]);
}

/* All series of a generation's policies, at zero before the first request. */
void dn_policy_metrics_files(struct dn_policy_metrics *m, struct dn_policy_set *set)
{
    if (!m->calls)
        return;
    for (size_t i = 0; i < set->n_files; i++) {
        struct dn_policy_file *f = &set->file[i];
        for (int h = DN_HOOK_ADMIT; h < DN_HOOK_COUNT; h++) {
            if (!f->hook[h].exists)
                continue;
            const char *label[] = {f->name, dn_policy_hook_name((enum dn_policy_hook)h), NULL};
            f->hook[h].calls = dn_series(m->calls, label);
            f->hook[h].seconds = dn_series(m->seconds, label);
            for (int e = 0; e < DN_PE_COUNT; e++) {
                label[2] = error_name[e];
                dn_series(m->errors, label);
            }
        }
    }
}

void dn_policy_count_error(struct dn_policy_vm *pv, const struct dn_policy_file *f, enum dn_policy_hook h,
                           enum dn_policy_error kind)
{
    if (pv->policy && pv->policy->metrics.errors)
        dn_counter_add(dn_series(pv->policy->metrics.errors,
                                 (const char *[]){f->name, dn_policy_hook_name(h), dn_policy_error_name(kind)}),
                       1);
}

/* ---- Generations ---- */

struct dn_policy_set *dn_policy_current(struct dn_policy *p, uint64_t *generation)
{
    pthread_mutex_lock(&p->lock);
    struct dn_policy_set *s = dn_policy_set_get(p->current);
    *generation = atomic_load(&p->generation);
    pthread_mutex_unlock(&p->lock);
    return s;
}

/* Reads, loads and tries a generation. */
static int prove(struct dn_policy_set **out, const struct dn_policy_config *config, struct dn_err *err)
{
    struct dn_policy_set *set = NULL;
    struct dn_policy_vm *trial = NULL;
    int rc = dn_policy_set_read(&set, config, err);
    if (rc)
        return rc;
    rc = dn_policy_trial_open(&trial, set, err);
    if (rc == 0)
        rc = dn_policy_smoke(trial, config->node, NULL, err);
    dn_policy_vm_close(trial);
    if (rc)
        dn_policy_set_put(set);
    else
        *out = set;
    return rc;
}

static void publish(struct dn_policy *p, struct dn_policy_set *set)
{
    dn_policy_metrics_files(&p->metrics, set);
    pthread_mutex_lock(&p->lock);
    struct dn_policy_set *old = p->current;
    p->current = set;
    atomic_fetch_add_explicit(&p->generation, 1, memory_order_release);
    pthread_mutex_unlock(&p->lock);
    if (p->metrics.revision) {
        if (old)
            dn_gauge_set(dn_series(p->metrics.revision, (const char *[]){old->revision}), 0);
        dn_gauge_set(dn_series(p->metrics.revision, (const char *[]){set->revision}), 1);
        dn_gauge_set(p->metrics.reload_ok, 1);
        dn_gauge_set(p->metrics.reload_time, (double)dn_wall_ns() / 1e9);
    }
    dn_policy_set_put(old);
}

int dn_policy_open(struct dn_policy **out, const struct dn_policy_config *config, struct dn_metrics *metrics,
                   struct dn_err *err)
{
    struct dn_policy_set *set = NULL;
    int rc = prove(&set, config, err);
    if (rc)
        return rc;
    struct dn_policy *p = dn_alloc0(1, sizeof *p);
    pthread_mutex_init(&p->lock, NULL);
    pthread_mutex_init(&p->reload, NULL);
    p->buckets = dn_buckets_open(0);
    dn_policy_metrics_init(&p->metrics, metrics);
    publish(p, set);
    *out = p;
    return 0;
}

void dn_policy_close(struct dn_policy *p)
{
    if (!p)
        return;
    dn_policy_set_put(p->current);
    dn_buckets_close(p->buckets);
    pthread_mutex_destroy(&p->lock);
    pthread_mutex_destroy(&p->reload);
    free(p);
}

int dn_policy_reload(struct dn_policy *p, const struct dn_policy_config *config, struct dn_err *err)
{
    struct dn_err local;
    if (!err)
        err = &local;
    pthread_mutex_lock(&p->reload);
    uint64_t generation, t0 = dn_now_ns();
    struct dn_policy_set *old = dn_policy_current(p, &generation), *set = NULL;
    struct dn_policy_config again = old->config;
    again.item = old->item;
    again.n_items = old->n_files;
    int rc = prove(&set, config ? config : &again, err);
    struct dn_log_line l;
    if (rc) {
        if (p->metrics.reload_ok)
            dn_gauge_set(p->metrics.reload_ok, 0);
        dn_log_begin(&l, DN_LOG_ERROR, "policy.reload_failed");
        dn_log_str(&l, "kept", old->revision);
        dn_log_err(&l, err);
    } else {
        dn_log_begin(&l, DN_LOG_INFO, "policy.reloaded");
        dn_log_str(&l, "from", old->revision);
        dn_log_str(&l, "revision", set->revision);
        dn_log_uint(&l, "files", set->n_files);
        dn_log_ms(&l, "took_ms", dn_now_ns() - t0);
        publish(p, set);
    }
    dn_log_end(&l);
    dn_policy_set_put(old);
    pthread_mutex_unlock(&p->reload);
    return rc;
}

uint64_t dn_policy_generation(const struct dn_policy *p)
{
    return atomic_load(&((struct dn_policy *)p)->generation);
}

void dn_policy_revision(const struct dn_policy *p, char out[9])
{
    uint64_t generation;
    struct dn_policy_set *s = dn_policy_current((struct dn_policy *)p, &generation);
    memcpy(out, s->revision, sizeof s->revision);
    dn_policy_set_put(s);
}

void dn_policy_summary(const struct dn_policy *p, struct dn_buf *out)
{
    uint64_t generation;
    struct dn_policy_set *s = dn_policy_current((struct dn_policy *)p, &generation);
    dn_buf_printf(out, "%zu file%s, revision %s ", s->n_files, s->n_files == 1 ? "" : "s", s->revision);
    for (size_t i = 0; i < s->n_files; i++)
        dn_buf_printf(out, " %s%s", s->file[i].name, s->file[i].is_shadow ? "(shadow)" : "");
    dn_policy_set_put(s);
}
