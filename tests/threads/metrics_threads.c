/* Threads change the same series while another prints: no change is lost, and the thread sanitizer has nothing to say.
 */
#include "base/metrics.h"

#include <pthread.h>
#include <stdio.h>

enum { N_THREADS = 4, N_CHANGES = 20000 };

struct families {
    struct dn_family *counter, *histogram, *gauge;
};

static void *change(void *arg)
{
    const struct families *f = arg;
    for (int i = 0; i < N_CHANGES; i++) {
        dn_counter_add(dn_series(f->counter, (const char *[]){i % 2 ? "odd" : "even"}), 1);
        dn_histogram_observe(dn_series(f->histogram, NULL), 0.5);
        dn_gauge_add(dn_series(f->gauge, NULL), 1);
    }
    return NULL;
}

int main(void)
{
    struct dn_metrics *m = dn_metrics_open();
    struct families f = {
        dn_metrics_counter(m, "dn_c_total", "c", "parity"),
        dn_metrics_histogram(m, "dn_h", "h", NULL, dn_buckets_seconds, 16),
        dn_metrics_gauge(m, "dn_g", "g", NULL),
    };
    pthread_t thread[N_THREADS];
    for (int i = 0; i < N_THREADS; i++) {
        if (pthread_create(&thread[i], NULL, change, &f) != 0)
            return 1;
    }
    struct dn_buf out = {0};
    for (int i = 0; i < 20; i++) {
        dn_buf_clear(&out);
        dn_metrics_print(m, &out);
    }
    for (int i = 0; i < N_THREADS; i++)
        pthread_join(thread[i], NULL);
    dn_buf_release(&out);
    uint64_t odd = dn_counter_value(dn_series(f.counter, (const char *[]){"odd"}));
    uint64_t observed = dn_histogram_count(dn_series(f.histogram, NULL));
    double level = dn_gauge_value(dn_series(f.gauge, NULL));
    dn_metrics_close(m);
    printf("%d of %d odd, %d of %d observed, level %.0f\n", (int)odd, N_THREADS * N_CHANGES / 2, (int)observed,
           N_THREADS * N_CHANGES, level);
    return odd == N_THREADS * N_CHANGES / 2 && observed == N_THREADS * N_CHANGES && level == N_THREADS * N_CHANGES ? 0
                                                                                                                   : 1;
}
