#include "cli/progress.h"

#include "base/clock.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum { BAR = 30 };

const char *dn_bytes_text(uint64_t bytes, char text[16])
{
    static const char *const unit[] = {"B", "KiB", "MiB", "GiB", "TiB"};
    double v = (double)bytes;
    int u = 0;
    for (; v >= 1024 && u < 4; u++)
        v /= 1024;
    snprintf(text, 16, u == 0 || v >= 100 ? "%.0f %s" : "%.1f %s", v, unit[u]);
    return text;
}

void dn_progress_begin(struct dn_progress *p, const char *stage, bool quiet)
{
    *p = (struct dn_progress){.stage = stage, .quiet = quiet, .is_terminal = isatty(2), .start_ns = dn_now_ns()};
}

void dn_progress_update(struct dn_progress *p, uint64_t done, uint64_t total)
{
    uint64_t now = dn_now_ns(), tenth = total ? 10 * done / total : 10;
    bool last = done == total;
    if (p->quiet || total == 0)
        return;
    if (p->is_terminal ? !last && now - p->last_ns < DN_NS_PER_S / 10
                       : !last && tenth == p->last_tenth && now - p->last_ns < 10 * DN_NS_PER_S)
        return;
    if (!p->is_terminal && now - p->start_ns < DN_NS_PER_S) { /* quick work needs no lines */
        p->last_ns = now;
        p->last_tenth = tenth;
        return;
    }
    p->last_ns = now;
    p->last_tenth = tenth;
    double seconds = (double)(now - p->start_ns) * 1e-9, rate = seconds > 0 ? (double)done / seconds : 0;
    double left = rate > 0 ? (double)(total - done) / rate : 0;
    char a[16], b[16], r[16], bar[3 * BAR + 1];
    size_t n = 0;
    for (int i = 0; i < BAR; i++) {
        const char *cell = (uint64_t)i * total < (uint64_t)BAR * done ? "█" : "░";
        memcpy(bar + n, cell, 3);
        n += 3;
    }
    bar[n] = '\0';
    fprintf(stderr, "%s%-9s%s %3.0f%%  %s/%s  %s/s", p->is_terminal ? "\r\033[K" : "", p->stage,
            p->is_terminal ? bar : "", 100.0 * (double)done / (double)total, dn_bytes_text(done, a),
            dn_bytes_text(total, b), dn_bytes_text((uint64_t)rate, r));
    if (!last)
        fprintf(stderr, "  %.0f s left", left);
    fputs(p->is_terminal ? "" : "\n", stderr);
    fflush(stderr);
}

void dn_progress_end(struct dn_progress *p)
{
    if (p->is_terminal && !p->quiet && p->last_ns)
        fputs("\r\033[K", stderr);
}
