/* Log: one line an event on standard error, the event's name first.
 *
 *     struct dn_log_line l;
 *     dn_log_begin(&l, DN_LOG_INFO, "request.done");
 *     dn_log_str(&l, "id", id);
 *     dn_log_int(&l, "status", 200);
 *     dn_log_ms(&l, "ttft_ms", ttft_ns);
 *     dn_log_end(&l);
 *  -> 2026-11-30T03:14:15.123Z info request.done id=req_7f3a status=200 ttft_ms=84.2
 *
 * Names: event = noun.verb, the unit of a number in its key, the same key = the same meaning in log, metric and JSON.
 * NEVER log prompts, answers, keys or header values; of such text only its length: dn_log_length().
 *
 * A line is built on the caller's stack (2 KB: what does not fit is left out and counted in `cut`) and leaves with one
 * write(2). Any thread. A full pipe or terminal can hold that write up, and with it an event loop; dn_log_setup() makes
 * no descriptor non-blocking, since it may be shared: send the log to a file or a journal that takes it.
 * The settings are the process's (the one global besides signals); set them before threads start, the level at any
 * time.
 */
#ifndef DN_BASE_LOG_H
#define DN_BASE_LOG_H

#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum dn_log_level {
    DN_LOG_ERROR, /* someone must act */
    DN_LOG_WARN,  /* degraded, and how */
    DN_LOG_INFO,  /* one line a request, start, reload, drain */
    DN_LOG_DEBUG,
};

enum dn_log_format {
    DN_LOG_AUTO, /* TERMINAL if the descriptor is a terminal (colour unless NO_COLOR is set), else TEXT */
    DN_LOG_TEXT,
    DN_LOG_JSON,     /* {"time":...,"level":...,"event":...,fields} */
    DN_LOG_TERMINAL, /* colour, no date */
};

void dn_log_setup(enum dn_log_level level, enum dn_log_format format, int fd); /* until called: INFO, TEXT, 2 */
void dn_log_set_level(enum dn_log_level level);                                /* any time, any thread */
bool dn_log_is_on(enum dn_log_level level);

/* Names as in the configuration: "error" "warn" "info" "debug"; "auto" "text" "json". -1 for any other. */
int dn_log_level_parse(const char *name);
int dn_log_format_parse(const char *name);

#define DN_LOG_LINE_BYTES 2048

struct dn_log_line {
    char text[DN_LOG_LINE_BYTES];
    size_t len;
    unsigned n_cut; /* fields that did not fit */
    bool on, json;
};

/* Starts a line; below the level in force every further call on it does nothing. */
void dn_log_begin(struct dn_log_line *l, enum dn_log_level level, const char *event);

/* For what may repeat without end: one line in ten seconds for each (event, key). Returns false when this one is left
 * out (the line is off); the next that is written carries dropped=N. key distinguishes the sources, e.g. a policy's
 * name. */
bool dn_log_begin_limited(struct dn_log_line *l, enum dn_log_level level, const char *event, const char *key,
                          uint64_t now_ns);

/* Fields; keys are [a-z0-9_]+. Strings are escaped, cut at 256 bytes, NULL is "-". */
void dn_log_str(struct dn_log_line *l, const char *key, const char *value);
void dn_log_strn(struct dn_log_line *l, const char *key, const char *value, size_t n);
void dn_log_int(struct dn_log_line *l, const char *key, int64_t value);
void dn_log_uint(struct dn_log_line *l, const char *key, uint64_t value);
void dn_log_double(struct dn_log_line *l, const char *key, double value); /* three decimals */
void dn_log_bool(struct dn_log_line *l, const char *key, bool value);
void dn_log_ms(struct dn_log_line *l, const char *key, uint64_t ns); /* in milliseconds with one decimal */
void dn_log_length(struct dn_log_line *l, const char *key,
                   size_t n);                                     /* all that may be said of a secret: key_bytes=n */
void dn_log_err(struct dn_log_line *l, const struct dn_err *err); /* code=... error="..." */
void dn_log_end(struct dn_log_line *l);

/* A line with no fields. */
void dn_log_event(enum dn_log_level level, const char *event);

#endif
