/* Time. Code that depends on time takes `now_ns` as an argument; only loops and main() call these. Any thread. */
#ifndef DN_BASE_CLOCK_H
#define DN_BASE_CLOCK_H

#include <stdint.h>
#include <time.h>

#define DN_NS_PER_MS 1000000ull
#define DN_NS_PER_S  1000000000ull

/* Monotonic, for durations and deadlines. */
static inline uint64_t dn_now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * DN_NS_PER_S + (uint64_t)t.tv_nsec;
}

/* Wall clock, for logs and `created` fields. */
static inline uint64_t dn_wall_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * DN_NS_PER_S + (uint64_t)t.tv_nsec;
}

#endif
