#include "base/metrics.h"

#include <criterion/criterion.h>
#include <math.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>

static const char *print(struct dn_metrics *m, struct dn_buf *b)
{
    dn_buf_clear(b);
    dn_metrics_print(m, b);
    return dn_buf_str(b);
}

Test(metrics, families_without_labels_are_shown_at_zero)
{
    struct dn_metrics *m = dn_metrics_open();
    struct dn_buf b = {0};
    dn_metrics_counter(m, "dn_a_total", "what \\ a\nis", NULL);
    dn_metrics_gauge(m, "dn_b", "b", NULL);
    cr_assert_str_eq(print(m, &b), "# HELP dn_a_total what \\\\ a\\nis\n# TYPE dn_a_total counter\ndn_a_total 0\n"
                                   "# HELP dn_b b\n# TYPE dn_b gauge\ndn_b 0\n");
    dn_buf_release(&b);
    dn_metrics_close(m);
}

Test(metrics, labels_are_escaped_and_series_found_again)
{
    struct dn_metrics *m = dn_metrics_open();
    struct dn_buf b = {0};
    struct dn_family *f = dn_metrics_counter(m, "dn_r_total", "r", "model,code");
    struct dn_series *s = dn_series(f, (const char *[]){"a\"b\\\n", "200"});
    cr_assert_eq(dn_series(f, (const char *[]){"a\"b\\\n", "200"}), s);
    cr_assert_neq(dn_series(f, (const char *[]){"a\"b\\\n", "400"}), s);
    dn_counter_add(s, 3);
    cr_assert(strstr(print(m, &b), "\ndn_r_total{model=\"a\\\"b\\\\\\n\",code=\"200\"} 3\n"), "%s", b.data);
    dn_buf_release(&b);
    dn_metrics_close(m);
}

Test(metrics, histograms_count_at_the_bound_and_beyond_the_last)
{
    struct dn_metrics *m = dn_metrics_open();
    struct dn_buf b = {0};
    struct dn_family *f = dn_metrics_histogram(m, "dn_h_seconds", "h", "pool", (const double[]){0.1, 1}, 2);
    struct dn_series *s = dn_series(f, (const char *[]){"main"});
    dn_histogram_observe(s, 0.1);
    dn_histogram_observe(s, 0.5);
    dn_histogram_observe(s, 7);
    dn_histogram_observe(s, NAN);
    cr_assert(strstr(print(m, &b), "dn_h_seconds_bucket{pool=\"main\",le=\"0.1\"} 1\n"
                                   "dn_h_seconds_bucket{pool=\"main\",le=\"1\"} 2\n"
                                   "dn_h_seconds_bucket{pool=\"main\",le=\"+Inf\"} 3\n"
                                   "dn_h_seconds_sum{pool=\"main\"} 7.6\n"
                                   "dn_h_seconds_count{pool=\"main\"} 3\n"),
              "%s", b.data);
    cr_assert_eq(dn_histogram_count(s), 3u);
    dn_buf_release(&b);
    dn_metrics_close(m);
}

Test(metrics, too_many_label_values_fall_together)
{
    struct dn_metrics *m = dn_metrics_open();
    struct dn_buf b = {0};
    struct dn_family *f = dn_metrics_counter(m, "dn_t_total", "t", "tenant");
    for (int i = 0; i < DN_SERIES_MAX + 50; i++) {
        char name[16];
        snprintf(name, sizeof name, "t%d", i);
        dn_counter_add(dn_series(f, (const char *[]){name}), 1);
    }
    cr_assert(strstr(print(m, &b), "dn_t_total{tenant=\"other\"} 50\n"));
    cr_assert(strstr(b.data, "dn_t_total{tenant=\"t255\"} 1\n"));
    cr_assert_null(strstr(b.data, "t256"));
    dn_buf_release(&b);
    dn_metrics_close(m);
}

Test(metrics, an_alias_shows_the_same_series)
{
    struct dn_metrics *m = dn_metrics_open();
    struct dn_buf b = {0};
    struct dn_family *f = dn_metrics_gauge(m, "dn_running", "running requests", "model");
    dn_metrics_alias(m, f, "vllm:num_requests_running", "model_name");
    dn_gauge_set(dn_series(f, (const char *[]){"x"}), 4);
    dn_gauge_add(dn_series(f, (const char *[]){"x"}), -1.5);
    cr_assert(strstr(print(m, &b),
                     "# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{model_name=\"x\"} 2.5\n"));
    cr_assert(strstr(b.data, "dn_running{model=\"x\"} 2.5\n"));
    dn_buf_clear(&b);
    dn_metrics_print_help(m, &b);
    cr_assert_str_eq(dn_buf_str(&b), "dn_running (gauge; labels model)\n    running requests\n"
                                     "    also as vllm:num_requests_running\n");
    dn_buf_release(&b);
    dn_metrics_close(m);
}

Test(metrics, a_name_registered_twice_is_a_bug, .signal = SIGABRT)
{
    struct dn_metrics *m = dn_metrics_open();
    dn_metrics_counter(m, "dn_a_total", "a", NULL);
    dn_metrics_gauge(m, "dn_a_total", "a", NULL);
}

static void fill_gauge(void *user)
{
    dn_gauge_set(user, 42);
}

Test(metrics, hooks_run_before_a_print)
{
    struct dn_metrics *m = dn_metrics_open();
    struct dn_buf b = {0};
    dn_metrics_on_print(m, fill_gauge, dn_series(dn_metrics_gauge(m, "dn_g", "g", NULL), NULL));
    cr_assert(strstr(print(m, &b), "\ndn_g 42\n"));
    dn_buf_release(&b);
    dn_metrics_close(m);
}

static void *hammer(void *arg)
{
    struct dn_family **f = arg;
    for (int i = 0; i < 20000; i++) {
        dn_counter_add(dn_series(f[0], (const char *[]){i % 2 ? "a" : "b"}), 1);
        dn_histogram_observe(dn_series(f[1], NULL), 0.5);
        dn_gauge_add(dn_series(f[2], NULL), 1);
    }
    return NULL;
}

Test(metrics, no_change_is_lost_between_threads)
{
    struct dn_metrics *m = dn_metrics_open();
    struct dn_family *f[3] = {
        dn_metrics_counter(m, "dn_c_total", "c", "x"),
        dn_metrics_histogram(m, "dn_h", "h", NULL, dn_buckets_seconds, 16),
        dn_metrics_gauge(m, "dn_g", "g", NULL),
    };
    pthread_t thread[4];
    for (int i = 0; i < 4; i++)
        pthread_create(&thread[i], NULL, hammer, f);
    struct dn_buf b = {0};
    for (int i = 0; i < 20; i++)
        print(m, &b);
    for (int i = 0; i < 4; i++)
        pthread_join(thread[i], NULL);
    cr_assert_eq(dn_counter_value(dn_series(f[0], (const char *[]){"a"})), 40000u);
    cr_assert_eq(dn_histogram_count(dn_series(f[1], NULL)), 80000u);
    cr_assert_eq(dn_histogram_sum(dn_series(f[1], NULL)), 40000.0);
    cr_assert_eq(dn_gauge_value(dn_series(f[2], NULL)), 80000.0);
    dn_buf_release(&b);
    dn_metrics_close(m);
}
