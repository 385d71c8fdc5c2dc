/* Configuration: conf/node.lua as data -> struct dn_conf, flat and checked.
 *
 *     struct dn_conf_errors errors = {0};
 *     struct dn_conf *c = dn_conf_open();                          every value at its default
 *     dn_conf_read(c, "conf/node.lua", &errors);                   then the file
 *     dn_conf_set(c, "listen", "[::1]:8443", "--listen", &err);    then the command line
 *     dn_conf_check(c, &errors);                                   then what concerns several values
 *     if (errors.n) print dn_conf_errors_print() and exit 2
 *
 * The schema (conf_schema.c) is one table: key, type, range, default, help. From it come the checks, `dunlin help
 * conf`, conf/README.md and `dunlin show config`. Nothing here opens a socket or a model; who uses a value may refuse
 * it later.
 *
 * The opener owns struct dn_conf; all strings in it live as long as it does. A reload opens a new one. Any one thread.
 */
#ifndef DN_SCRIPT_CONF_H
#define DN_SCRIPT_CONF_H

#include "base/arena.h"
#include "base/buf.h"
#include "base/err.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct dn_conf_model {
    const char *name; /* what clients call it */
    int line;
    uint32_t given;       /* private: which keys are not at their default */
    const char *path;     /* GGUF file, or folder with config.json and safetensors */
    const char *weights;  /* "auto" "bf16" "fp8" "int8" "int4" */
    const char *kv_dtype; /* "bf16" "fp8_e4m3": where no policy says otherwise */
    uint64_t context;     /* 0: the model's own */
    const char *template; /* file of a chat template; "": the model's own */
};

struct dn_conf_param {
    const char *name;
    enum { DN_CONF_NUMBER, DN_CONF_BOOLEAN, DN_CONF_STRING } kind;
    double number;
    bool boolean;
    const char *string;
};

struct dn_conf_policy {
    int line;
    uint32_t given; /* private, as above */
    const char *file;
    const char *mode;                            /* "active" "shadow" */
    const char *on_admit_error, *on_route_error; /* "rule" "reject" "ignore" */
    const struct dn_conf_param *param;
    size_t n_params;
};

struct dn_conf_limits { /* 0 = the default of http/http.h; names and units are the same there */
    uint64_t connections, connections_per_ip, header_bytes, header_fields, path_bytes, body_bytes, body_bytes_inflight;
    uint64_t handshake_timeout_ms, header_timeout_ms, body_timeout_ms, idle_timeout_ms, stall_timeout_ms;
    uint64_t stream_pause_bytes, stream_cut_bytes, drain_timeout_ms;
};

struct dn_conf {
    const char *file; /* NULL until read */
    const char *listen;
    const char *cleartext;  /* "": none */
    uint64_t loops;         /* 0: choose by cores */
    const char *cert, *key; /* "": made at the first start */
    const char *server_name;
    const char *keys; /* file; "": none */
    struct dn_conf_limits limits;
    const struct dn_conf_model *model;
    size_t n_models;
    const char *device;                  /* "auto" "cpu" "cuda" "cuda:N" */
    uint64_t threads;                    /* 0: all cores */
    uint64_t kv_memory;                  /* bytes; 0: auto */
    uint64_t page_tokens, max_sequences; /* 0: auto */
    uint64_t step_tokens;                /* most tokens of one step; 0: auto */
    uint64_t prefill_chunk_tokens; /* prefill tokens of a step in which others decode; 0: a quarter of step_tokens */
    uint64_t queue_limit, queue_timeout_ms;
    const struct dn_conf_policy *policy;
    size_t n_policies;
    const char *policy_headers; /* names, separated by commas, of request headers that policies see */
    bool policy_expose;         /* x-dunlin-* headers say what a request got and why */
    double policy_budget_ms;
    uint64_t policy_instructions, policy_memory; /* bytes */
    const char *log_level, *log_format;
    bool metrics_public, api_strict;
    const char *cache_share; /* "tenant" "all" "none" */
    const char *integrity;   /* "off" "tag" */

    struct dn_arena arena;         /* private from here */
    struct dn_conf_origin *origin; /* of each key of the schema */
};

struct dn_conf_errors {
    struct dn_conf_error {
        const char *file;
        int line;
        char text[DN_ERR_TEXT];
    } * item;
    size_t n;
};

struct dn_conf *dn_conf_open(void);
void dn_conf_close(struct dn_conf *c); /* NULL is fine */

/* Each adds to errors what is wrong (file names are borrowed until the errors are released) and returns 0, or
 * -DN_CONFIG if it added something. */
int dn_conf_read(struct dn_conf *c, const char *path, struct dn_conf_errors *errors);
int dn_conf_check(const struct dn_conf *c, struct dn_conf_errors *errors);

/* One value as text, e.g. from the command line; origin is what `show config` prints ("--listen"). */
int dn_conf_set(struct dn_conf *c, const char *key, const char *text, const char *origin, struct dn_err *err);

void dn_conf_error_add(struct dn_conf_errors *errors, const char *file, int line, const char *format, ...)
    __attribute__((format(printf, 4, 5)));
/* "file:line: text" by file and line, and "3 errors in 2 files." */
void dn_conf_errors_print(struct dn_conf_errors *errors, struct dn_buf *out);
void dn_conf_errors_release(struct dn_conf_errors *errors);

/* "HOST:PORT", "[V6]:PORT" or ":PORT" taken apart; false if it is none of them. host[0] is 0 for ":PORT". */
bool dn_conf_address(const char *text, char host[64], uint16_t *port);
bool dn_conf_is_loopback(const char *address); /* 127.0.0.0/8, ::1 or localhost */

void dn_conf_print_help(struct dn_buf *out);                          /* `dunlin help conf` */
void dn_conf_print_readme(struct dn_buf *out);                        /* conf/README.md */
void dn_conf_print(const struct dn_conf *c, struct dn_buf *out);      /* `dunlin show config`: key, value, origin */
void dn_conf_print_json(const struct dn_conf *c, struct dn_buf *out); /* the same for --json */

#endif
