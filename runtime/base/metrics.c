#include "base/metrics.h"

#include "base/err.h"
#include "base/json.h"
#include "base/utf8.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

enum { N_HOOKS = 16 };
enum kind { COUNTER, GAUGE, HISTOGRAM };
static const char *const kind_name[] = {"counter", "gauge", "histogram"};

const double dn_buckets_seconds[16] = {0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100};

struct dn_series {
    struct dn_series *next; /* in the order of creation */
    const struct dn_family *family;
    char *value[DN_LABELS_MAX];
    _Atomic uint64_t number; /* counter: the count; gauge and histogram: bits of a double (value, sum) */
    _Atomic uint64_t bucket[];
};

struct alias {
    struct alias *next;
    char *name;
    char *label[DN_LABELS_MAX];
};

struct dn_family {
    struct dn_family *next;
    enum kind kind;
    struct alias own; /* its name and labels; aliases behind it */
    char *help;
    size_t n_labels, n_buckets, n_series;
    double bucket[DN_BUCKETS_MAX];
    pthread_mutex_t lock; /* the list of series */
    struct dn_series *first, **last, *other;
};

struct dn_metrics {
    pthread_mutex_t lock;
    struct dn_family *first, **last;
    struct {
        void (*fn)(void *user);
        void *user;
    } hook[N_HOOKS];
    size_t n_hooks;
};

struct dn_metrics *dn_metrics_open(void)
{
    struct dn_metrics *m = dn_alloc0(1, sizeof *m);
    m->last = &m->first;
    pthread_mutex_init(&m->lock, NULL);
    return m;
}

static void free_names(struct alias *a)
{
    free(a->name);
    for (size_t i = 0; i < DN_LABELS_MAX; i++)
        free(a->label[i]);
}

static void free_series(struct dn_series *s)
{
    for (size_t i = 0; s && i < DN_LABELS_MAX; i++)
        free(s->value[i]);
    free(s);
}

static void free_family(struct dn_family *f)
{
    while (f->first) {
        struct dn_series *s = f->first;
        f->first = s->next;
        free_series(s);
    }
    free_names(&f->own);
    while (f->own.next) {
        struct alias *a = f->own.next;
        f->own.next = a->next;
        free_names(a);
        free(a);
    }
    free(f->help);
    pthread_mutex_destroy(&f->lock);
    free(f);
}

void dn_metrics_close(struct dn_metrics *m)
{
    if (!m)
        return;
    while (m->first) {
        struct dn_family *f = m->first;
        m->first = f->next;
        free_family(f);
    }
    pthread_mutex_destroy(&m->lock);
    free(m);
}

static bool is_name(const char *s, size_t n, bool colon)
{
    for (size_t i = 0; i < n; i++) {
        bool letter =
            (s[i] >= 'a' && s[i] <= 'z') || (s[i] >= 'A' && s[i] <= 'Z') || s[i] == '_' || (colon && s[i] == ':');
        if (!letter && (i == 0 || s[i] < '0' || s[i] > '9'))
            return false;
    }
    return n > 0;
}

/* Splits "a,b" into a->label and returns how many. */
static size_t set_names(struct alias *a, const char *name, const char *labels)
{
    DN_BUG_ON(!is_name(name, strlen(name), true));
    a->name = dn_strdup(name);
    size_t n = 0;
    while (labels && *labels) {
        size_t len = strcspn(labels, ",");
        DN_BUG_ON(n == DN_LABELS_MAX || !is_name(labels, len, false));
        a->label[n++] = dn_strndup(labels, len);
        labels += len + (labels[len] == ',');
    }
    return n;
}

static void refuse_duplicate(const struct dn_metrics *m, const char *name)
{
    for (const struct dn_family *f = m->first; f; f = f->next) {
        for (const struct alias *a = &f->own; a; a = a->next)
            DN_BUG_ON(strcmp(a->name, name) == 0);
    }
}

static struct dn_series *new_series(struct dn_family *f, const char *const *value)
{
    struct dn_series *s = dn_alloc0(1, sizeof *s + (f->kind == HISTOGRAM ? f->n_buckets + 1 : 0) * sizeof s->bucket[0]);
    s->family = f;
    for (size_t i = 0; i < f->n_labels; i++)
        s->value[i] = dn_strdup(value ? value[i] : "other");
    *f->last = s;
    f->last = &s->next;
    f->n_series++;
    return s;
}

static struct dn_family *new_family(struct dn_metrics *m, enum kind kind, const char *name, const char *help,
                                    const char *labels, const double *bucket, size_t n_buckets)
{
    DN_BUG_ON(n_buckets > DN_BUCKETS_MAX);
    struct dn_family *f = dn_alloc0(1, sizeof *f);
    f->kind = kind;
    f->help = dn_strdup(help);
    f->last = &f->first;
    f->n_labels = set_names(&f->own, name, labels);
    f->n_buckets = n_buckets;
    for (size_t i = 0; i < n_buckets; i++) {
        DN_BUG_ON(i > 0 && !(bucket[i] > bucket[i - 1]));
        f->bucket[i] = bucket[i];
    }
    pthread_mutex_init(&f->lock, NULL);
    if (f->n_labels == 0)
        new_series(f, NULL);
    pthread_mutex_lock(&m->lock);
    refuse_duplicate(m, name);
    *m->last = f;
    m->last = &f->next;
    pthread_mutex_unlock(&m->lock);
    return f;
}

struct dn_family *dn_metrics_counter(struct dn_metrics *m, const char *name, const char *help, const char *labels)
{
    return new_family(m, COUNTER, name, help, labels, NULL, 0);
}

struct dn_family *dn_metrics_gauge(struct dn_metrics *m, const char *name, const char *help, const char *labels)
{
    return new_family(m, GAUGE, name, help, labels, NULL, 0);
}

struct dn_family *dn_metrics_histogram(struct dn_metrics *m, const char *name, const char *help, const char *labels,
                                       const double *bucket, size_t n_buckets)
{
    return new_family(m, HISTOGRAM, name, help, labels, bucket, n_buckets);
}

void dn_metrics_alias(struct dn_metrics *m, struct dn_family *f, const char *name, const char *labels)
{
    struct alias *a = dn_alloc0(1, sizeof *a);
    DN_BUG_ON(set_names(a, name, labels) != f->n_labels);
    pthread_mutex_lock(&m->lock);
    refuse_duplicate(m, name);
    struct alias *at = &f->own;
    while (at->next)
        at = at->next;
    at->next = a;
    pthread_mutex_unlock(&m->lock);
}

struct dn_series *dn_series(struct dn_family *f, const char *const *value)
{
    if (f->n_labels == 0)
        return f->first;
    pthread_mutex_lock(&f->lock);
    struct dn_series *s = f->first;
    for (; s; s = s->next) {
        size_t i = 0;
        while (i < f->n_labels && strcmp(s->value[i], value[i]) == 0)
            i++;
        if (i == f->n_labels)
            break;
    }
    if (!s && f->n_series < DN_SERIES_MAX)
        s = new_series(f, value);
    if (!s) {
        if (!f->other)
            f->other = new_series(f, NULL);
        s = f->other;
    }
    pthread_mutex_unlock(&f->lock);
    return s;
}

static double as_double(uint64_t bits)
{
    double v;
    memcpy(&v, &bits, sizeof v);
    return v;
}

static uint64_t as_bits(double v)
{
    uint64_t bits;
    memcpy(&bits, &v, sizeof bits);
    return bits;
}

/* Relaxed everywhere: a metric orders nothing, it only must not lose a change. */
static void add_double(_Atomic uint64_t *at, double v)
{
    uint64_t old = atomic_load_explicit(at, memory_order_relaxed);
    while (!atomic_compare_exchange_weak_explicit(at, &old, as_bits(as_double(old) + v), memory_order_relaxed,
                                                  memory_order_relaxed))
        continue;
}

void dn_counter_add(struct dn_series *s, uint64_t n)
{
    DN_BUG_ON(s->family->kind != COUNTER);
    atomic_fetch_add_explicit(&s->number, n, memory_order_relaxed);
}

void dn_counter_set(struct dn_series *s, uint64_t total)
{
    DN_BUG_ON(s->family->kind != COUNTER);
    atomic_store_explicit(&s->number, total, memory_order_relaxed);
}

uint64_t dn_counter_value(const struct dn_series *s)
{
    return atomic_load_explicit(&s->number, memory_order_relaxed);
}

void dn_gauge_set(struct dn_series *s, double v)
{
    DN_BUG_ON(s->family->kind != GAUGE);
    atomic_store_explicit(&s->number, as_bits(v), memory_order_relaxed);
}

void dn_gauge_add(struct dn_series *s, double v)
{
    DN_BUG_ON(s->family->kind != GAUGE);
    add_double(&s->number, v);
}

double dn_gauge_value(const struct dn_series *s)
{
    return as_double(atomic_load_explicit(&s->number, memory_order_relaxed));
}

void dn_histogram_observe(struct dn_series *s, double v)
{
    const struct dn_family *f = s->family;
    DN_BUG_ON(f->kind != HISTOGRAM);
    if (isnan(v))
        return;
    size_t i = 0;
    while (i < f->n_buckets && v > f->bucket[i])
        i++;
    atomic_fetch_add_explicit(&s->bucket[i], 1, memory_order_relaxed);
    add_double(&s->number, v);
}

uint64_t dn_histogram_count(const struct dn_series *s)
{
    uint64_t n = 0;
    for (size_t i = 0; i <= s->family->n_buckets; i++)
        n += atomic_load_explicit(&s->bucket[i], memory_order_relaxed);
    return n;
}

double dn_histogram_sum(const struct dn_series *s)
{
    return as_double(atomic_load_explicit(&s->number, memory_order_relaxed));
}

void dn_metrics_on_print(struct dn_metrics *m, void (*fn)(void *user), void *user)
{
    pthread_mutex_lock(&m->lock);
    DN_BUG_ON(m->n_hooks == N_HOOKS);
    m->hook[m->n_hooks].fn = fn;
    m->hook[m->n_hooks++].user = user;
    pthread_mutex_unlock(&m->lock);
}

/* Label values and help: the format knows only \\, \n and (in values) \". */
static void put_escaped(struct dn_buf *out, const char *s, bool quote)
{
    size_t n = strlen(s);
    for (size_t i = 0; i < n;) {
        uint32_t cp;
        char utf8[4];
        i += dn_utf8_next(s + i, n - i, &cp);
        if (cp == '\n')
            dn_buf_puts(out, "\\n");
        else if (cp == '\\')
            dn_buf_puts(out, "\\\\");
        else if (cp == '"' && quote)
            dn_buf_puts(out, "\\\"");
        else
            dn_buf_put(out, utf8, dn_utf8_put(cp, utf8));
    }
}

static void put_number(struct dn_buf *out, double v)
{
    if (isnan(v))
        dn_buf_puts(out, "NaN");
    else if (isinf(v))
        dn_buf_puts(out, v > 0 ? "+Inf" : "-Inf");
    else
        dn_json_put_double(out, v);
}

/* name<suffix>{labels,le="..."} and a space. */
static void put_head(struct dn_buf *out, const struct alias *a, const char *suffix, const struct dn_series *s,
                     const double *le)
{
    dn_buf_puts(out, a->name);
    dn_buf_puts(out, suffix);
    char open = '{';
    for (size_t i = 0; i < s->family->n_labels; i++) {
        dn_buf_putc(out, open);
        dn_buf_puts(out, a->label[i]);
        dn_buf_puts(out, "=\"");
        put_escaped(out, s->value[i], true);
        dn_buf_putc(out, '"');
        open = ',';
    }
    if (le) {
        dn_buf_putc(out, open);
        dn_buf_puts(out, "le=\"");
        put_number(out, *le);
        dn_buf_putc(out, '"');
        open = ',';
    }
    dn_buf_puts(out, open == ',' ? "} " : " ");
}

static void put_histogram(struct dn_buf *out, const struct alias *a, const struct dn_series *s)
{
    const struct dn_family *f = s->family;
    uint64_t n = 0;
    for (size_t i = 0; i <= f->n_buckets; i++) {
        double le = i < f->n_buckets ? f->bucket[i] : INFINITY;
        n += atomic_load_explicit(&s->bucket[i], memory_order_relaxed);
        put_head(out, a, "_bucket", s, &le);
        dn_json_put_uint(out, n);
        dn_buf_putc(out, '\n');
    }
    put_head(out, a, "_sum", s, NULL);
    put_number(out, dn_histogram_sum(s));
    dn_buf_putc(out, '\n');
    put_head(out, a, "_count", s, NULL);
    dn_json_put_uint(out, n);
    dn_buf_putc(out, '\n');
}

static void put_family(struct dn_buf *out, struct dn_family *f, const struct alias *a)
{
    dn_buf_printf(out, "# HELP %s ", a->name);
    put_escaped(out, f->help, false);
    dn_buf_printf(out, "\n# TYPE %s %s\n", a->name, kind_name[f->kind]);
    for (const struct dn_series *s = f->first; s; s = s->next) {
        if (f->kind == HISTOGRAM) {
            put_histogram(out, a, s);
            continue;
        }
        put_head(out, a, "", s, NULL);
        if (f->kind == COUNTER)
            dn_json_put_uint(out, dn_counter_value(s));
        else
            put_number(out, dn_gauge_value(s));
        dn_buf_putc(out, '\n');
    }
}

void dn_metrics_print(struct dn_metrics *m, struct dn_buf *out)
{
    pthread_mutex_lock(&m->lock);
    for (size_t i = 0; i < m->n_hooks; i++)
        m->hook[i].fn(m->hook[i].user);
    for (struct dn_family *f = m->first; f; f = f->next) {
        pthread_mutex_lock(&f->lock);
        for (const struct alias *a = &f->own; a; a = a->next)
            put_family(out, f, a);
        pthread_mutex_unlock(&f->lock);
    }
    pthread_mutex_unlock(&m->lock);
}

void dn_metrics_print_help(struct dn_metrics *m, struct dn_buf *out)
{
    for (const struct dn_family *f = m->first; f; f = f->next) {
        dn_buf_printf(out, "%s (%s", f->own.name, kind_name[f->kind]);
        for (size_t i = 0; i < f->n_labels; i++)
            dn_buf_printf(out, "%s%s", i ? ", " : "; labels ", f->own.label[i]);
        dn_buf_printf(out, ")\n    %s\n", f->help);
        for (const struct alias *a = f->own.next; a; a = a->next)
            dn_buf_printf(out, "    also as %s\n", a->name);
    }
}
