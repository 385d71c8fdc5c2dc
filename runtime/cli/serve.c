#include "api/api.h"
#include "base/clock.h"
#include "base/log.h"
#include "cli/args.h"
#include "cli/cli.h"
#include "cli/load.h"
#include "cli/progress.h"
#include "cli/receipt.h"
#include "http/tls_selfsigned.h"
#include "pool/device.h"
#include "script/conf.h"

#include <ctype.h>
#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static const char usage[] =
    "dunlin serve [MODEL] [flags]   serve a model over HTTPS (OpenAI API)\n"
    "\n"
    "MODEL is a GGUF file or a folder with config.json and safetensors. Flag > file > default;\n"
    "everything else is in the configuration file: dunlin help conf\n";

enum { DN_POLICY_HEADERS_MAX = 16 };

/* Everything that serve owns, in the order in which it is built. */
struct server {
    struct dn_conf *conf;
    struct dn_conf_model model; /* the one that is served: from the file, the command line over it */
    struct dn_keys keys;
    struct dn_loaded loaded;
    struct dn_node node;
    struct dn_progress progress;
    char cert[512], key[512], cert_origin[600];
    char host[64];
    char *header_names; /* lower case, cut into header[] */
    const char *header[DN_POLICY_HEADERS_MAX];
    sigset_t signals;
    uint64_t start_ns;
    bool check_only;
};

/* ---- Configuration
 * ---------------------------------------------------------------------------------------------------- */

static int print_conf_errors(struct dn_conf_errors *errors)
{
    struct dn_buf b = {0};
    dn_conf_errors_print(errors, &b);
    fputs(dn_buf_str(&b), stderr);
    dn_buf_release(&b);
    dn_conf_errors_release(errors);
    return DN_EXIT_USAGE;
}

static int print_err(const struct dn_err *err, int exit_code)
{
    fprintf(stderr, "dunlin: %s\n", err->text);
    return exit_code;
}

/* Flags that stand for keys of the configuration. */
struct conf_flag {
    const char *flag, *key;
    const char *text;
};

static int set_flags(struct dn_conf *c, const struct conf_flag *f, size_t n, struct dn_conf_errors *errors)
{
    for (size_t i = 0; i < n; i++) {
        struct dn_err err;
        if (f[i].text && dn_conf_set(c, f[i].key, f[i].text, f[i].flag, &err) != 0)
            dn_conf_error_add(errors, "command line", 0, "%s", err.text);
    }
    return errors->n ? -DN_CONFIG : 0;
}

/* What the command line says of the model. */
struct model_flags {
    const char *model, *name, *weights, *kv_dtype, *ctx;
};

/* MODEL is the name of a configured model or a path; without it there must be exactly one in the file. */
static void choose_model(struct server *s, const char *file, const struct model_flags *f, struct dn_conf_errors *errors)
{
    const struct dn_conf *c = s->conf;
    const char *where = file ? file : "command line";
    const struct dn_conf_model *chosen = c->n_models == 1 && !f->model ? &c->model[0] : NULL;
    for (size_t i = 0; f->model && i < c->n_models; i++)
        if (strcmp(c->model[i].name, f->model) == 0)
            chosen = &c->model[i];
    if (chosen) {
        s->model = *chosen;
    } else if (f->model) {
        s->model =
            (struct dn_conf_model){.name = "", .path = f->model, .weights = "auto", .kv_dtype = "bf16", .template = ""};
    } else if (c->n_models == 0) {
        dn_conf_error_add(errors, where, 0,
                          "no model: name a file (dunlin serve MODEL), or one in models of the configuration");
        return;
    } else {
        dn_conf_error_add(errors, where, c->model ? c->model->line : 0,
                          "models: this version serves one model a process; name one of the %zu: dunlin serve NAME",
                          c->n_models);
        return;
    }
    struct dn_err err;
    int weights;
    enum dn_kv_format kv;
    if (f->name)
        s->model.name = f->name;
    if (f->weights)
        s->model.weights = f->weights;
    if (f->kv_dtype)
        s->model.kv_dtype = f->kv_dtype;
    if (f->ctx && dn_args_uint(f->ctx, "ctx", 16, 1 << 24, true, &s->model.context, &err) != 0)
        dn_conf_error_add(errors, "command line", 0, "%s", err.text);
    if (dn_weights_format_parse(s->model.weights, &weights) != 0)
        dn_conf_error_add(errors, f->weights ? "command line" : where, 0,
                          "weights \"%s\": expected auto, bf16, fp8, int8 or int4", s->model.weights);
    if (dn_kv_format_parse(s->model.kv_dtype, &kv) != 0)
        dn_conf_error_add(errors, f->kv_dtype ? "command line" : where, 0, "kv_dtype \"%s\": expected bf16 or fp8_e4m3",
                          s->model.kv_dtype);
}

static int read_conf(struct server *s, const char *file, const struct conf_flag *f, size_t n_flags,
                     const struct model_flags *m)
{
    struct dn_conf_errors errors = {0};
    s->conf = dn_conf_open();
    if (file)
        dn_conf_read(s->conf, file, &errors);
    set_flags(s->conf, f, n_flags, &errors);
    choose_model(s, file, m, &errors);
    dn_conf_check(s->conf, &errors);
    struct dn_device_choice device;
    struct dn_err err;
    if (dn_device_parse(s->conf->device, &device, &err) != 0)
        dn_conf_error_add(&errors, file ? file : "command line", 0, "engine.device: %s", err.text);
    if (s->conf->keys[0])
        dn_keys_read(&s->keys, s->conf->keys, &errors);
    if (errors.n == 0 && s->keys.n == 0 && !dn_conf_is_loopback(s->conf->listen))
        dn_conf_error_add(&errors, file ? file : "command line", 0,
                          "listen %s: beyond this machine keys are needed; make one with: dunlin key add NAME",
                          s->conf->listen);
    return errors.n ? print_conf_errors(&errors) : 0;
}

/* ---- Certificate
 * ------------------------------------------------------------------------------------------------------ */

static int make_folders(const char *path, struct dn_err *err)
{
    char part[512];
    for (const char *slash = strchr(path + 1, '/');; slash = strchr(slash + 1, '/')) {
        snprintf(part, sizeof part, "%.*s", slash ? (int)(slash - path) : (int)strlen(path), path);
        if (mkdir(part, 0700) != 0 && errno != EEXIST)
            return dn_err_set(err, DN_IO, "%s: %s", part, strerror(errno));
        if (!slash)
            return 0;
    }
}

/* The configured certificate, or one of our own for this machine's names, made once. */
static int choose_certificate(struct server *s, struct dn_err *err)
{
    if (s->conf->cert[0]) {
        snprintf(s->cert, sizeof s->cert, "%s", s->conf->cert);
        snprintf(s->key, sizeof s->key, "%s", s->conf->key);
        snprintf(s->cert_origin, sizeof s->cert_origin, "certificate %s", s->cert);
        return 0;
    }
    char folder[400];
    const char *data = getenv("XDG_DATA_HOME"), *home = getenv("HOME");
    if (data && data[0])
        snprintf(folder, sizeof folder, "%s/dunlin/tls", data);
    else
        snprintf(folder, sizeof folder, "%s/.local/share/dunlin/tls", home && home[0] ? home : "/tmp");
    snprintf(s->cert, sizeof s->cert, "%s/cert.pem", folder);
    snprintf(s->key, sizeof s->key, "%s/key.pem", folder);
    snprintf(s->cert_origin, sizeof s->cert_origin, "self-signed certificate %s", s->cert);
    if (access(s->cert, R_OK) == 0 && access(s->key, R_OK) == 0)
        return 0;
    int rc = make_folders(folder, err);
    return rc != 0 ? rc : dn_tls_selfsigned(s->cert, s->key, 825, err);
}

/* ---- Parts of the node
 * ------------------------------------------------------------------------------------------------ */

static enum dn_policy_on_error on_error(const char *name)
{
    return strcmp(name, "reject") == 0   ? DN_ON_ERROR_REJECT
           : strcmp(name, "ignore") == 0 ? DN_ON_ERROR_IGNORE
                                         : DN_ON_ERROR_RULE;
}

static int open_policies(struct server *s, struct dn_err *err)
{
    const struct dn_conf *c = s->conf;
    struct dn_policy_item *item = dn_alloc0(c->n_policies, sizeof *item);
    struct dn_policy_param **param = dn_alloc0(c->n_policies, sizeof *param);
    for (size_t i = 0; i < c->n_policies; i++) {
        const struct dn_conf_policy *p = &c->policy[i];
        param[i] = dn_alloc0(p->n_params, sizeof **param);
        for (size_t k = 0; k < p->n_params; k++) {
            const struct dn_conf_param *from = &p->param[k];
            param[i][k] = (struct dn_policy_param){.name = from->name,
                                                   .kind = from->kind == DN_CONF_NUMBER    ? DN_PARAM_NUMBER
                                                           : from->kind == DN_CONF_BOOLEAN ? DN_PARAM_BOOLEAN
                                                                                           : DN_PARAM_STRING,
                                                   .number = from->number,
                                                   .boolean = from->boolean,
                                                   .string = from->string};
        }
        item[i] = (struct dn_policy_item){.file = p->file,
                                          .is_shadow = strcmp(p->mode, "shadow") == 0,
                                          .param = param[i],
                                          .n_params = p->n_params,
                                          .on_admit_error = on_error(p->on_admit_error),
                                          .on_route_error = on_error(p->on_route_error)};
    }
    struct dn_policy_config pc = {.item = item,
                                  .n_items = c->n_policies,
                                  .wall_ns = (uint64_t)(c->policy_budget_ms * 1e6),
                                  .instructions = c->policy_instructions,
                                  .memory_bytes = c->policy_memory};
    int rc = dn_policy_open(&s->node.policy, &pc, s->node.metrics, err);
    for (size_t i = 0; i < c->n_policies; i++)
        free(param[i]);
    free(param);
    free(item);
    return rc;
}

static uint32_t u32(uint64_t v)
{
    return v > UINT32_MAX ? UINT32_MAX : (uint32_t)v;
}

static int open_http(struct server *s, struct dn_err *err)
{
    const struct dn_conf *c = s->conf;
    const struct dn_conf_limits *l = &c->limits;
    struct dn_http_conf hc = {
        .listen = c->listen,
        .listen_cleartext = c->cleartext[0] ? c->cleartext : NULL,
        .cert_file = s->cert,
        .key_file = s->key,
        .server_name = c->server_name,
        .n_loops = s->node.n_loops,
        .limits = {.connections = u32(l->connections),
                   .connections_per_ip = u32(l->connections_per_ip),
                   .header_bytes = u32(l->header_bytes),
                   .header_fields = u32(l->header_fields),
                   .path_bytes = u32(l->path_bytes),
                   .body_bytes = l->body_bytes,
                   .body_bytes_inflight = l->body_bytes_inflight,
                   .handshake_timeout_ms = u32(l->handshake_timeout_ms),
                   .header_timeout_ms = u32(l->header_timeout_ms),
                   .body_timeout_ms = u32(l->body_timeout_ms),
                   .idle_timeout_ms = u32(l->idle_timeout_ms),
                   .stall_timeout_ms = u32(l->stall_timeout_ms),
                   .stream_pause_bytes = u32(l->stream_pause_bytes),
                   .stream_cut_bytes = u32(l->stream_cut_bytes),
                   .drain_timeout_ms = u32(l->drain_timeout_ms)},
    };
    int rc = dn_http_open(&hc, dn_api_handler(), &s->node, &s->node.http, err);
    return rc != 0 ? rc : dn_http_run(s->node.http, err);
}

/* Told to end while it loads: nothing has been served that would have to end well. Signals are blocked, so that they
 * wait for run(), which may be minutes away. */
static void end_if_told(struct server *s)
{
    sigset_t pending;
    if (sigpending(&pending) != 0 || !(sigismember(&pending, SIGTERM) || sigismember(&pending, SIGINT)))
        return;
    dn_progress_end(&s->progress);
    dn_log_event(DN_LOG_INFO, "node.stopped_loading");
    _exit(DN_EXIT_OK);
}

static void on_progress(void *ctx, uint64_t done, uint64_t total)
{
    struct server *s = ctx;
    end_if_told(s);
    atomic_store(&s->node.load_total, total);
    atomic_store(&s->node.load_done, done);
    dn_progress_update(&s->progress, done, total);
}

static int load(struct server *s, struct dn_err *err)
{
    const struct dn_conf *c = s->conf;
    const struct dn_conf_model *m = &s->model;
    struct dn_pool_conf pc = {
        .backend = c->device,
        .n_threads = (unsigned)c->threads,
        .max_sequences = u32(c->max_sequences),
        .step_tokens = u32(c->step_tokens),
        .context_tokens = u32(m->context),
        .context_is_asked = true,
        .page_tokens = u32(c->page_tokens),
        .kv_bytes = c->kv_memory,
        .progress = on_progress,
        .progress_ctx = s,
    };
    int rc = dn_weights_format_parse(m->weights, &pc.weights);
    if (rc != 0)
        return dn_err_set(err, DN_CONFIG, "weights \"%s\": expected auto, bf16, fp8, int8 or int4", m->weights);
    dn_progress_begin(&s->progress, "weights", false);
    rc = dn_load_pool(&s->loaded, &pc, err);
    dn_progress_end(&s->progress);
    if (rc != 0)
        return rc;
    struct dn_node *n = &s->node;
    n->pool = s->loaded.pool;
    struct dn_sched_conf sc = {.queue_max = u32(c->queue_limit), .decode_chunk_tokens = u32(c->prefill_chunk_tokens)};
    struct dn_sink sink = dn_api_sink(n);
    rc = dn_sched_open(&sc, n->pool, &sink, n->metrics, &n->sched, err);
    return rc != 0 ? rc : dn_sched_start(n->sched, err);
}

/* ---- Life
 * ------------------------------------------------------------------------------------------------------------- */

static void reload(struct server *s)
{
    struct dn_err err;
    dn_policy_reload(s->node.policy, NULL, &err); /* logs what became of it */
    if (dn_http_reload_tls(s->node.http, s->cert, s->key, &err) != 0) {
        struct dn_log_line l;
        dn_log_begin(&l, DN_LOG_ERROR, "tls.reload_failed");
        dn_log_err(&l, &err);
        dn_log_end(&l);
    } else {
        dn_log_event(DN_LOG_INFO, "tls.reloaded");
    }
}

/* Serves until a signal; SIGHUP reloads, the first SIGTERM or SIGINT drains, the second stops at once. */
static void run(struct server *s)
{
    int sig;
    while (sigwait(&s->signals, &sig) == 0 && sig == SIGHUP)
        reload(s);
    uint64_t timeout_ms = s->conf->limits.drain_timeout_ms ? s->conf->limits.drain_timeout_ms : 30000;
    struct dn_log_line l;
    dn_log_begin(&l, DN_LOG_INFO, "node.draining");
    dn_log_uint(&l, "timeout_ms", timeout_ms);
    dn_log_end(&l);
    atomic_store(&s->node.state, DN_NODE_DRAINING);
    dn_http_drain(s->node.http);
    uint64_t deadline = dn_now_ns() + timeout_ms * DN_NS_PER_MS;
    const struct timespec tick = {.tv_nsec = 50 * 1000 * 1000};
    while (!dn_http_is_drained(s->node.http) && dn_now_ns() < deadline) {
        sig = sigtimedwait(&s->signals, NULL, &tick);
        if (sig == SIGTERM || sig == SIGINT)
            break;
    }
    bool in_time = dn_now_ns() < deadline; /* later the HTTP layer has cut what was left */
    dn_log_begin(&l, DN_LOG_INFO, "node.stopped");
    dn_log_bool(&l, "drained", in_time && dn_http_is_drained(s->node.http));
    dn_log_end(&l);
}

static void close_all(struct server *s)
{
    struct dn_node *n = &s->node;
    /* Loops first cut their requests, then the threads that send to loops end, then the loops themselves. */
    if (n->http)
        dn_http_stop(n->http);
    if (n->sched)
        dn_sched_stop(n->sched);
    if (n->workers)
        dn_workers_stop(n->workers);
    dn_http_close(n->http);
    dn_sched_close(n->sched);
    dn_workers_close(n->workers);
    dn_api_close(n);
    dn_policy_close(n->policy);
    dn_metrics_close(n->metrics);
    dn_load_release(&s->loaded);
    dn_keys_release(&s->keys);
    free(s->header_names);
    dn_conf_close(s->conf);
}

/* The headers that policies see, by their lower-case names. */
static void split_headers(struct server *s)
{
    s->header_names = dn_strdup(s->conf->policy_headers);
    size_t n = 0;
    char *at = s->header_names;
    while (*at && n < DN_POLICY_HEADERS_MAX) {
        size_t skip = strspn(at, ", "), len = strcspn(at + skip, ", ");
        if (len == 0)
            break;
        s->header[n++] = at += skip;
        for (size_t i = 0; i < len; i++)
            at[i] = (char)tolower((unsigned char)at[i]);
        at += len;
        if (*at)
            *at++ = '\0';
    }
    s->node.api.policy_header = s->header;
    s->node.api.n_policy_headers = n;
}

static void fill_node(struct server *s)
{
    const struct dn_conf *c = s->conf;
    struct dn_node *n = &s->node;
    long cores = sysconf(_SC_NPROCESSORS_ONLN);
    n->n_loops = c->loops ? u32(c->loops) : cores > 8 ? 4 : cores > 2 ? 2 : 1;
    n->model_name = s->model.name[0] ? s->model.name : s->loaded.model->name;
    n->start_wall_s = dn_wall_ns() / DN_NS_PER_S;
    n->keys = &s->keys;
    n->model = s->loaded.model;
    n->tokenizer = s->loaded.tokenizer;
    n->chat_template = s->loaded.chat_template;
    n->api = (struct dn_api_conf){
        .strict = c->api_strict,
        .expose = c->policy_expose,
        .public_metrics = c->metrics_public,
        .share = strcmp(c->cache_share, "all") == 0    ? DN_SHARE_ALL
                 : strcmp(c->cache_share, "none") == 0 ? DN_SHARE_NONE
                                                       : DN_SHARE_TENANT,
        .check = strcmp(c->integrity, "tag") == 0,
        .queue_timeout_ms = u32(c->queue_timeout_ms),
    };
    dn_kv_format_parse(s->model.kv_dtype, &n->api.kv);
    split_headers(s);
}

static int start(struct server *s, struct dn_err *err)
{
    struct dn_node *n = &s->node;
    int rc = choose_certificate(s, err);
    if (rc == 0)
        rc = dn_load_model(s->model.path, s->model.template, &s->loaded, err);
    if (rc == 0) /* now, and with --check too */
        rc = dn_pool_check_context(u32(s->model.context), s->loaded.model, err);
    if (rc != 0)
        return rc;
    fill_node(s);
    n->metrics = dn_metrics_open();
    dn_api_open(n);
    rc = open_policies(s, err);
    if (rc != 0 || s->check_only)
        return rc;
    dn_receipt_head(n->model, "");
    /* A worker needs a moment to take what comes at once: a short queue must not refuse a burst that is no load. */
    size_t n_waiting_max = s->conf->queue_limit > 64 ? s->conf->queue_limit : 64;
    if ((rc = dn_workers_open(n->n_loops > 1 ? 2 : 1, n_waiting_max, &n->workers, err)) != 0 ||
        (rc = open_http(s, err)) != 0 || (rc = load(s, err)) != 0)
        return rc;
    atomic_store(&n->state, DN_NODE_READY);
    uint16_t port;
    dn_conf_address(s->conf->listen, s->host, &port);
    bool everywhere = s->host[0] == '\0' || strcmp(s->host, "0.0.0.0") == 0 || strcmp(s->host, "::") == 0;
    char shown[70];
    snprintf(shown, sizeof shown, strchr(s->host, ':') && !everywhere ? "[%s]" : "%s",
             everywhere ? "127.0.0.1" : s->host);
    dn_receipt_tail(&(struct dn_receipt){.node = n,
                                         .listen_host = shown,
                                         .cert_origin = s->cert_origin,
                                         .cleartext = s->conf->cleartext,
                                         .port = dn_http_port(n->http, false),
                                         .start_ns = s->start_ns});
    return 0;
}

static void block_signals(struct server *s)
{
    sigemptyset(&s->signals);
    sigaddset(&s->signals, SIGTERM);
    sigaddset(&s->signals, SIGINT);
    sigaddset(&s->signals, SIGHUP);
    pthread_sigmask(SIG_BLOCK, &s->signals, NULL);
    signal(SIGPIPE, SIG_IGN);
}

int dn_cmd_serve(int argc, char **argv)
{
    struct server *s = dn_alloc0(1, sizeof *s);
    s->start_ns = dn_now_ns();
    const char *conf_file = getenv("DN_CONF");
    struct conf_flag set[] = {
        {"--listen", "listen", NULL},          {"--cleartext", "cleartext", NULL},        {"--keys", "keys", NULL},
        {"--threads", "engine.threads", NULL}, {"--kv-memory", "engine.kv_memory", NULL}, {"--log", "log.level", NULL},
        {"--device", "engine.device", NULL},
    };
    struct model_flags model = {0};
    const struct dn_flag flag[] = {
        {"conf", "FILE", "configuration file (conf/node.lua is an example)", &conf_file, NULL},
        {"listen", "HOST:PORT", "HTTPS address [127.0.0.1:8443]", &set[0].text, NULL},
        {"cleartext", "HOST:PORT", "plain HTTP as well, on loopback only [none]", &set[1].text, NULL},
        {"keys", "FILE", "API keys; needed beyond loopback", &set[2].text, NULL},
        {"name", "NAME", "what clients call the model [from the file]", &model.name, NULL},
        {"weights", "FORMAT", "auto, bf16, fp8, int8 or int4 [auto]", &model.weights, NULL},
        {"kv-dtype", "FORMAT", "bf16 or fp8_e4m3, where no policy decides [bf16]", &model.kv_dtype, NULL},
        {"ctx", "TOKENS", "longest prompt + answer [the model's]", &model.ctx, NULL},
        {"kv-memory", "BYTES", "KV arena, e.g. 2GiB [auto]", &set[4].text, NULL},
        {"device", "NAME", "auto, cpu, cuda or cuda:N [auto: a GPU if there is one]", &set[6].text, NULL},
        {"threads", "N", "threads of the CPU backend [all cores]", &set[3].text, NULL},
        {"log", "LEVEL", "error, warn, info or debug [info]", &set[5].text, NULL},
        {"check", NULL, "check configuration, model file and policies, then exit", NULL, &s->check_only},
        {NULL, NULL, NULL, NULL, NULL},
    };
    struct dn_args args;
    struct dn_err err = {0};
    bool help;
    int exit_code = DN_EXIT_OK;
    if (dn_args_parse(argc, argv, usage, flag, &args, &help, &err) != 0) {
        exit_code = print_err(&err, DN_EXIT_USAGE);
    } else if (!help && args.n_positional > 1) {
        dn_err_set(&err, DN_CONFIG, "expected one MODEL, not \"%s\" as well", args.positional[1]);
        exit_code = print_err(&err, DN_EXIT_USAGE);
    } else if (!help) {
        if (args.n_positional > 0)
            model.model = args.positional[0];
        block_signals(s);
        exit_code = read_conf(s, conf_file, set, sizeof set / sizeof *set, &model);
    }
    if (exit_code == DN_EXIT_OK && !help) {
        dn_log_setup((enum dn_log_level)dn_log_level_parse(s->conf->log_level),
                     (enum dn_log_format)dn_log_format_parse(s->conf->log_format), 2);
        if (start(s, &err) != 0)
            exit_code =
                print_err(&err, err.code == DN_CONFIG || err.code == DN_POLICY ? DN_EXIT_USAGE : DN_EXIT_FAILED);
        else if (s->check_only)
            fprintf(stderr, "dunlin: configuration, model file and policies are fine\n");
        else
            run(s);
    }
    close_all(s);
    free(s);
    return exit_code;
}
