#include "base/log.h"

#include "base/clock.h"
#include "base/hash.h"
#include "base/utf8.h"

#include <errno.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum {
    TAIL_BYTES = 64,   /* kept free for the end of the line */
    VALUE_BYTES = 256, /* of one string */
    N_LIMITS = 256,
};
#define LIMIT_NS (10 * DN_NS_PER_S)

static const char *const level_name[] = {"error", "warn", "info", "debug"};
static const char *const level_colour[] = {"\033[31m", "\033[33m", "\033[32m", "\033[2m"};

static struct {
    atomic_int level;
    enum dn_log_format format;
    bool colour;
    int fd;
} log_state = {.level = DN_LOG_INFO, .format = DN_LOG_TEXT, .fd = 2};

/* Recent limited lines, direct mapped by hash: two sources that fall into one slot only limit each other less. */
static struct {
    pthread_mutex_t lock;
    struct {
        uint64_t id, last_ns, n_dropped;
    } slot[N_LIMITS];
} limit_state = {.lock = PTHREAD_MUTEX_INITIALIZER};

void dn_log_setup(enum dn_log_level level, enum dn_log_format format, int fd)
{
    if (format == DN_LOG_AUTO)
        format = isatty(fd) ? DN_LOG_TERMINAL : DN_LOG_TEXT;
    const char *no_color = getenv("NO_COLOR");
    log_state.colour = format == DN_LOG_TERMINAL && !(no_color && *no_color);
    log_state.format = format;
    log_state.fd = fd;
    dn_log_set_level(level);
}

void dn_log_set_level(enum dn_log_level level)
{
    atomic_store_explicit(&log_state.level, (int)level, memory_order_relaxed);
}

bool dn_log_is_on(enum dn_log_level level)
{
    return (int)level <= atomic_load_explicit(&log_state.level, memory_order_relaxed);
}

int dn_log_level_parse(const char *name)
{
    for (int i = 0; i < 4; i++) {
        if (strcmp(name, level_name[i]) == 0)
            return i;
    }
    return -1;
}

int dn_log_format_parse(const char *name)
{
    static const char *const format_name[] = {"auto", "text", "json"};
    for (int i = 0; i < 3; i++) {
        if (strcmp(name, format_name[i]) == 0)
            return i;
    }
    return -1;
}

static size_t room(const struct dn_log_line *l)
{
    return sizeof l->text - TAIL_BYTES - l->len;
}

static bool append(struct dn_log_line *l, const char *s, size_t n)
{
    if (n > room(l))
        return false;
    memcpy(l->text + l->len, s, n);
    l->len += n;
    return true;
}

/* Appends text with what would break the line or the JSON escaped; cut at VALUE_BYTES of input. */
static bool append_escaped(struct dn_log_line *l, const char *s, size_t n)
{
    size_t end = n > VALUE_BYTES ? VALUE_BYTES : n;
    for (size_t i = 0; i < end;) {
        uint32_t cp;
        size_t took = dn_utf8_next(s + i, n - i, &cp);
        char piece[8];
        size_t len;
        if (cp == '"' || cp == '\\')
            len = (size_t)snprintf(piece, sizeof piece, "\\%c", (char)cp);
        else if (cp == '\n')
            len = (size_t)snprintf(piece, sizeof piece, "\\n");
        else if (cp < 0x20 || (cp >= 0x7F && cp < 0xA0)) /* C1 controls too: a terminal may obey them */
            len = (size_t)snprintf(piece, sizeof piece, "\\u%04x", (unsigned)cp);
        else
            len = dn_utf8_put(cp, piece);
        if (!append(l, piece, len))
            return false;
        i += took;
    }
    return n <= end || append(l, "...", 3);
}

static bool append_key(struct dn_log_line *l, const char *key)
{
    if (l->json)
        return append(l, ",\"", 2) && append(l, key, strlen(key)) && append(l, "\":", 2);
    return append(l, " ", 1) && append(l, key, strlen(key)) && append(l, "=", 1);
}

/* A field that does not fit leaves no trace but the count. */
static void field_raw(struct dn_log_line *l, const char *key, const char *value)
{
    if (!l->on)
        return;
    size_t before = l->len;
    if (append_key(l, key) && append(l, value, strlen(value)))
        return;
    l->len = before;
    l->n_cut++;
}

static bool is_bare(const char *s, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        unsigned char c = (unsigned char)s[i];
        if (c <= ' ' || c >= 0x7F || c == '"' || c == '\\' || c == '=')
            return false;
    }
    return n > 0;
}

void dn_log_strn(struct dn_log_line *l, const char *key, const char *value, size_t n)
{
    if (!l->on)
        return;
    size_t before = l->len;
    bool quote = l->json || !is_bare(value, n);
    if (append_key(l, key) && (!quote || append(l, "\"", 1)) && append_escaped(l, value, n) &&
        (!quote || append(l, "\"", 1)))
        return;
    l->len = before;
    l->n_cut++;
}

void dn_log_str(struct dn_log_line *l, const char *key, const char *value)
{
    dn_log_strn(l, key, value ? value : "-", value ? strlen(value) : 1);
}

void dn_log_int(struct dn_log_line *l, const char *key, int64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%lld", (long long)value);
    field_raw(l, key, text);
}

void dn_log_uint(struct dn_log_line *l, const char *key, uint64_t value)
{
    char text[24];
    snprintf(text, sizeof text, "%llu", (unsigned long long)value);
    field_raw(l, key, text);
}

void dn_log_double(struct dn_log_line *l, const char *key, double value)
{
    char text[40];
    if (!isfinite(value))
        snprintf(text, sizeof text, "null");
    else if (fabs(value) >= 1e15 || (value != 0 && fabs(value) < 1e-3))
        snprintf(text, sizeof text, "%.3e", value);
    else
        snprintf(text, sizeof text, "%.3f", value);
    field_raw(l, key, text);
}

void dn_log_bool(struct dn_log_line *l, const char *key, bool value)
{
    field_raw(l, key, value ? "true" : "false");
}

void dn_log_ms(struct dn_log_line *l, const char *key, uint64_t ns)
{
    char text[32];
    uint64_t tenth = ns / 100000 + (ns % 100000 >= 50000);
    snprintf(text, sizeof text, "%llu.%u", (unsigned long long)(tenth / 10), (unsigned)(tenth % 10));
    field_raw(l, key, text);
}

void dn_log_length(struct dn_log_line *l, const char *key, size_t n)
{
    char name[64];
    snprintf(name, sizeof name, "%s_bytes", key);
    dn_log_uint(l, name, n);
}

void dn_log_err(struct dn_log_line *l, const struct dn_err *err)
{
    dn_log_str(l, "code", dn_code_info((int)err->code)->code);
    dn_log_str(l, "error", err->text);
}

static void stamp(char *out, size_t cap, bool with_date)
{
    uint64_t now = dn_wall_ns();
    time_t seconds = (time_t)(now / DN_NS_PER_S);
    unsigned ms = (unsigned)(now % DN_NS_PER_S / DN_NS_PER_MS);
    struct tm t;
    gmtime_r(&seconds, &t);
    size_t n = strftime(out, cap, with_date ? "%Y-%m-%dT%H:%M:%S" : "%H:%M:%S", &t);
    snprintf(out + n, cap - n, ".%03u%s", ms, with_date ? "Z" : "");
}

void dn_log_begin(struct dn_log_line *l, enum dn_log_level level, const char *event)
{
    l->len = 0;
    l->n_cut = 0;
    l->on = dn_log_is_on(level);
    if (!l->on)
        return;
    char time[40];
    l->json = log_state.format == DN_LOG_JSON;
    stamp(time, sizeof time, log_state.format != DN_LOG_TERMINAL);
    const char *format = l->json ? "{\"time\":\"%s\",\"level\":\"%s%s%s\",\"event\":\"%.80s\"" : "%s %s%s%s %.80s";
    int n = snprintf(l->text, sizeof l->text, format, time, log_state.colour ? level_colour[level] : "",
                     level_name[level], log_state.colour ? "\033[0m" : "", event);
    l->len = (size_t)n;
}

bool dn_log_begin_limited(struct dn_log_line *l, enum dn_log_level level, const char *event, const char *key,
                          uint64_t now_ns)
{
    l->on = false;
    if (!dn_log_is_on(level))
        return false;
    uint64_t id = dn_siphash64((struct dn_hash_key){1, 2}, event, strlen(event));
    id = dn_siphash64((struct dn_hash_key){id, 3}, key, strlen(key)) | 1; /* 0 is an empty slot */
    pthread_mutex_lock(&limit_state.lock);
    __typeof__(&limit_state.slot[0]) slot = &limit_state.slot[id / 2 % N_LIMITS];
    uint64_t n_dropped = 0;
    bool write_it = slot->id != id || now_ns - slot->last_ns >= LIMIT_NS;
    if (write_it) {
        n_dropped = slot->id == id ? slot->n_dropped : 0;
        slot->id = id;
        slot->last_ns = now_ns;
        slot->n_dropped = 0;
    } else {
        slot->n_dropped++;
    }
    pthread_mutex_unlock(&limit_state.lock);
    if (!write_it)
        return false;
    dn_log_begin(l, level, event);
    if (n_dropped)
        dn_log_uint(l, "dropped", n_dropped);
    return l->on;
}

void dn_log_end(struct dn_log_line *l)
{
    if (!l->on)
        return;
    l->on = false;
    char *tail = l->text + l->len; /* TAIL_BYTES are free */
    int n = 0;
    if (l->n_cut)
        n = snprintf(tail, TAIL_BYTES, l->json ? ",\"cut\":%u" : " cut=%u", l->n_cut);
    l->len += (size_t)n;
    if (l->json)
        l->text[l->len++] = '}';
    l->text[l->len++] = '\n';
    /* A short or failed write can't be logged anywhere; an interrupted one is repeated. */
    while (write(log_state.fd, l->text, l->len) < 0 && errno == EINTR)
        continue;
}

void dn_log_event(enum dn_log_level level, const char *event)
{
    struct dn_log_line l;
    dn_log_begin(&l, level, event);
    dn_log_end(&l);
}
