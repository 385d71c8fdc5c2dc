/* How fast this machine's memory can be read with the device's threads: the yardstick of `dunlin bench`. */
#include "base/clock.h"
#include "kernels/cpu/device.h"

#include <string.h>

struct reading {
    const uint8_t *p;
    size_t bytes;
    uint64_t sum[64];
};

static void read_part(void *arg, unsigned part, unsigned n_parts)
{
    struct reading *r = arg;
    typedef uint64_t vec __attribute__((vector_size(64)));
    const vec *v = (const vec *)(const void *)r->p;
    size_t n = r->bytes / sizeof *v, begin = n * part / n_parts, end = n * (part + 1) / n_parts;
    vec a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = begin; i + 4 <= end; i += 4) {
        for (int l = 0; l < 4; l++)
            __builtin_prefetch((const char *)(v + i + l) + 4096);
        a += v[i];
        b += v[i + 1];
        c += v[i + 2];
        d += v[i + 3];
    }
    a += b + c + d;
    r->sum[part % 64] = a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

double dn_cpu_read_piece(struct dn_threads *t, const void *p, size_t bytes)
{
    struct reading r = {.p = p, .bytes = bytes};
    uint64_t start = dn_now_ns();
    dn_threads_run(t, read_part, &r);
    return (double)bytes / ((double)(dn_now_ns() - start) * 1e-9);
}

/* The best piece of 16 MiB: others at work on the machine slow down whole passes. */
double dn_cpu_read_rate(struct dn_device *device, size_t bytes)
{
    enum { PIECE = 16 << 20, PASSES = 4 };
    struct dn_cpu_device *d = dn_cpu(device);
    uint8_t *p = device->ops->alloc(device, bytes);
    double best = 0;
    if (!p)
        return 0;
    memset(p, 1, bytes); /* pages that were never written are one page of zeros */
    for (int pass = 0; pass < PASSES; pass++)
        for (size_t at = 0; at + PIECE <= bytes; at += PIECE) {
            double rate = dn_cpu_read_piece(d->exec.threads, p + at, PIECE);
            best = rate > best ? rate : best;
        }
    device->ops->free(device, p);
    return best;
}
