#include "engine/stop.h"

#include <stdlib.h>
#include <string.h>

struct pattern {
    char *text;
    uint32_t *back; /* [len] length of the longest proper border of text[0..i] */
    size_t len;
    size_t have; /* bytes of text that the end of the fed text agrees with */
};

struct dn_stop {
    struct pattern pattern[DN_STOP_MAX_STRINGS];
    size_t n;
    int found;
};

static void find_borders(struct pattern *p)
{
    p->back[0] = 0;
    for (size_t i = 1, k = 0; i < p->len; i++) {
        while (k && p->text[i] != p->text[k])
            k = p->back[k - 1];
        k += p->text[i] == p->text[k];
        p->back[i] = (uint32_t)k;
    }
}

int dn_stop_open(struct dn_stop **out, const char *const *string, const size_t *len, size_t n, struct dn_err *err)
{
    if (n > DN_STOP_MAX_STRINGS)
        return dn_err_param(err, DN_INVALID_VALUE, "stop", "%zu stop strings, expected at most %d", n,
                            DN_STOP_MAX_STRINGS);
    for (size_t i = 0; i < n; i++) {
        if (len[i] == 0)
            return dn_err_param(err, DN_INVALID_VALUE, "stop", "stop string %zu is empty", i);
        if (len[i] > DN_STOP_MAX_BYTES)
            return dn_err_param(err, DN_INVALID_VALUE, "stop", "stop string %zu has %zu bytes, expected at most %d", i,
                                len[i], DN_STOP_MAX_BYTES);
    }
    struct dn_stop *s = dn_alloc0(1, sizeof *s);
    s->n = n;
    s->found = -1;
    for (size_t i = 0; i < n; i++) {
        struct pattern *p = &s->pattern[i];
        p->text = dn_strndup(string[i], len[i]);
        p->len = len[i];
        p->back = dn_alloc0(len[i], sizeof *p->back);
        find_borders(p);
    }
    *out = s;
    return 0;
}

void dn_stop_close(struct dn_stop *s)
{
    if (s == NULL)
        return;
    for (size_t i = 0; i < s->n; i++) {
        free(s->pattern[i].text);
        free(s->pattern[i].back);
    }
    free(s);
}

/* The pattern with the most agreement: its beginning is the text that is held back. */
static const struct pattern *held(const struct dn_stop *s)
{
    const struct pattern *best = &s->pattern[0];
    for (size_t i = 1; i < s->n; i++)
        if (s->pattern[i].have > best->have)
            best = &s->pattern[i];
    return best;
}

static void step(struct pattern *p, char c)
{
    if (p->have == p->len)
        p->have = p->back[p->len - 1];
    while (p->have && p->text[p->have] != c)
        p->have = p->back[p->have - 1];
    p->have += p->text[p->have] == c;
}

bool dn_stop_feed(struct dn_stop *s, const char *text, size_t n, struct dn_buf *out)
{
    if (s->found >= 0)
        return true;
    if (s->n == 0) {
        dn_buf_put(out, text, n);
        return false;
    }
    for (size_t i = 0; i < n; i++) {
        const struct pattern *old = held(s);
        size_t n_old = old->have; /* below old->len, since nothing was found so far */
        for (size_t j = 0; j < s->n; j++) {
            step(&s->pattern[j], text[i]);
            if (s->pattern[j].have == s->pattern[j].len &&
                (s->found < 0 || s->pattern[j].len > s->pattern[s->found].len))
                s->found = (int)j;
        }
        /* Held text and the new byte, without the end that is now held (or is the stop string). */
        size_t n_keep = s->found >= 0 ? s->pattern[s->found].len : held(s)->have;
        size_t n_free = n_old + 1 - n_keep;
        dn_buf_put(out, old->text, n_free < n_old ? n_free : n_old);
        if (n_free > n_old)
            dn_buf_putc(out, text[i]);
        if (s->found >= 0)
            return true;
    }
    return false;
}

void dn_stop_finish(struct dn_stop *s, struct dn_buf *out)
{
    if (s->found >= 0 || s->n == 0)
        return;
    const struct pattern *p = held(s);
    dn_buf_put(out, p->text, p->have);
    for (size_t i = 0; i < s->n; i++)
        s->pattern[i].have = 0;
}

int dn_stop_found(const struct dn_stop *s)
{
    return s->found;
}
