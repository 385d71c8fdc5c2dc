#include "api/encode.h"
#include "base/buf.h"
#include "base/clock.h"
#include "cli/args.h"
#include "cli/cli.h"
#include "cli/local.h"
#include "engine/detokenizer.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { INPUT_MAX = 8 << 20 };
static const float default_temperature = 0.7f;

struct options {
    struct dn_local_options local;
    const char *prompt, *system;
    bool verbose;
};

struct chat {
    const struct options *o;
    struct dn_local local;
    struct dn_template_vm *vm;
    struct dn_node node; /* only what the encoder reads: tokenizer and template */
    json_t *messages;
    struct dn_detok detok;
    struct dn_buf answer; /* the one being written */
    bool done;
    int code; /* of an error event */
    uint32_t n_prompt, n_cached, n_output;
    uint64_t begin_ns, first_ns, last_ns, turns;
};

/* Ctrl-C stops the answer, not the program. The pipe makes it wake a poll, whichever thread gets the signal. */
static volatile sig_atomic_t interrupted;
static int interrupt_pipe[2] = {-1, -1};

static void on_interrupt(int sig)
{
    (void)sig;
    int saved = errno;
    interrupted = 1;
    ssize_t n = write(interrupt_pipe[1], "", 1); /* full: it is known already */
    (void)n;
    errno = saved;
}

static void forget_interrupt(void)
{
    char bytes[64];
    while (read(interrupt_pipe[0], bytes, sizeof bytes) > 0)
        ;
    interrupted = 0;
}

/* False: Ctrl-C came instead of a line. */
static bool wait_for_line(void)
{
    struct pollfd p[2] = {{.fd = STDIN_FILENO, .events = POLLIN}, {.fd = interrupt_pipe[0], .events = POLLIN}};
    while (poll(p, 2, -1) < 0 && errno == EINTR)
        ;
    return !p[1].revents;
}

static void on_event(void *ctx, const struct dn_event *e, const struct dn_sampled *detail, uint64_t step_ns)
{
    struct chat *c = ctx;
    (void)detail;
    if (e->kind == DN_EVENT_STARTED)
        c->n_cached = e->n;
    if (e->kind == DN_EVENT_ERROR)
        c->code = e->code;
    if (e->kind == DN_EVENT_ERROR || e->kind == DN_EVENT_DONE)
        c->done = true;
    if (e->kind != DN_EVENT_TOKEN)
        return;
    c->first_ns = c->n_output++ == 0 ? step_ns : c->first_ns;
    c->last_ns = step_ns;
    if (e->hidden)
        return;
    size_t before = c->answer.len;
    dn_detok_feed(&c->detok, e->token, &c->answer);
    fwrite(c->answer.data + before, 1, c->answer.len - before, stdout);
    fflush(stdout);
}

/* ---- Messages
 * -------------------------------------------------------------------------------------------------------- */

static int add_message(struct chat *c, const char *role, const char *text, size_t n, struct dn_err *err)
{
    json_t *content = json_stringn(text, n);
    if (!content)
        return dn_err_set(err, DN_INVALID_VALUE, "the text is not UTF-8");
    json_t *m = json_object();
    json_object_set_new(m, "role", json_string(role));
    json_object_set_new(m, "content", content);
    json_array_append_new(c->messages, m);
    return 0;
}

static void drop_last(struct chat *c)
{
    json_array_remove(c->messages, json_array_size(c->messages) - 1);
}

static int reset(struct chat *c, struct dn_err *err)
{
    json_array_clear(c->messages);
    return c->o->system ? add_message(c, "system", c->o->system, strlen(c->o->system), err) : 0;
}

/* ---- An answer
 * ------------------------------------------------------------------------------------------------------- */

static int make_request(struct chat *c, struct dn_request **out, struct dn_err *err)
{
    struct dn_tokens tokens = {0};
    int rc = dn_encode_messages(&c->node, c->vm, c->messages, NULL, true, &tokens, err);
    uint32_t context = c->local.loaded.pool->conf.context_tokens;
    if (rc == 0 && tokens.len + 1 > context)
        rc = dn_err_set(err, DN_CONTEXT_LENGTH, "the conversation has %zu tokens, the context %u", tokens.len, context);
    if (rc == 0) {
        struct dn_request *r = dn_local_request(tokens.data, tokens.len, 1);
        uint32_t room = context - (uint32_t)tokens.len;
        rc = dn_local_max_tokens(&c->o->local, room, room, &r->max_tokens, err);
        if (rc == 0)
            rc = dn_local_sampling(&c->o->local, default_temperature, r, err);
        r->id.generation = ++c->turns;
        if (rc == 0)
            *out = r;
        else
            dn_request_free(r);
    }
    c->n_prompt = (uint32_t)tokens.len;
    dn_tokens_release(&tokens);
    return rc;
}

static void print_figures(const struct chat *c)
{
    double first_s = c->n_output ? (double)(c->first_ns - c->begin_ns) * 1e-9 : 0;
    double rest_s = (double)(c->last_ns - c->first_ns) * 1e-9;
    fprintf(stderr, "prompt %u tokens (%u cached), first token after %.3f s; %u tokens", c->n_prompt, c->n_cached,
            first_s, c->n_output);
    if (c->n_output > 1 && rest_s > 0)
        fprintf(stderr, ", %.1f tok/s", (c->n_output - 1) / rest_s);
    fputc('\n', stderr);
}

/* Answers the messages so far, to stdout and into the history. A conversation that fails is as it was before. */
static int answer(struct chat *c, struct dn_err *err)
{
    struct dn_request *r = NULL;
    c->begin_ns = dn_now_ns();
    c->done = false;
    c->code = 0;
    c->n_output = c->n_cached = 0;
    dn_buf_clear(&c->answer);
    dn_detok_init(&c->detok, c->local.loaded.tokenizer, DN_DETOK_SKIP_SPECIAL);
    int rc = make_request(c, &r, err);
    struct dn_request_id id = r ? r->id : (struct dn_request_id){0};
    if (rc == 0)
        rc = dn_local_submit(&c->local, r, err);
    while (rc == 0 && !c->done) {
        if (interrupted)
            dn_sched_cancel(c->local.sched, id);
        if (!dn_sched_turn(c->local.sched) || interrupted)
            break;
    }
    dn_local_run(&c->local); /* what a cancelled request leaves */
    if (rc == 0 && c->code)
        rc = dn_err_set(err, (enum dn_code)c->code, "%s", dn_code_info((enum dn_code)c->code)->help);
    if (c->n_output > 0)
        putchar('\n');
    fflush(stdout);
    if (rc == 0)
        rc = add_message(c, "assistant", c->answer.data ? c->answer.data : "", c->answer.len, err);
    if (rc == 0 && c->o->verbose)
        print_figures(c);
    return rc;
}

static int say(struct chat *c, const char *text, size_t n, struct dn_err *err)
{
    int rc = add_message(c, "user", text, n, err);
    if (rc == 0 && (rc = answer(c, err)) != 0)
        drop_last(c);
    return rc;
}

/* ---- Where the messages come from
 * ------------------------------------------------------------------------------------ */

/* All of stdin is one message; the newline that ends it is not part of it. */
static int say_stdin(struct chat *c, struct dn_err *err)
{
    struct dn_buf text = {0};
    char part[65536];
    int rc = 0;
    for (size_t n; rc == 0 && (n = fread(part, 1, sizeof part, stdin)) > 0;) {
        dn_buf_put(&text, part, n);
        if (text.len > INPUT_MAX)
            rc = dn_err_set(err, DN_CONTEXT_LENGTH, "the text is longer than 8 MiB");
    }
    while (text.len > 0 && (text.data[text.len - 1] == '\n' || text.data[text.len - 1] == '\r'))
        text.len--;
    if (rc == 0 && text.len == 0)
        rc = dn_err_set(err, DN_CONFIG, "nothing on stdin: give a text with -p TEXT or through a pipe");
    if (rc == 0)
        rc = say(c, text.data, text.len, err);
    dn_buf_release(&text);
    return rc;
}

/* False at /quit. */
static bool command(struct chat *c, const char *line)
{
    struct dn_err err;
    if (strcmp(line, "/quit") == 0 || strcmp(line, "/exit") == 0)
        return false;
    if (strcmp(line, "/reset") == 0) {
        reset(c, &err); /* worked before */
        fputs("the conversation starts anew\n", stderr);
    } else {
        fputs("/reset starts anew, /quit ends, Ctrl-C stops an answer\n", stderr);
    }
    return true;
}

/* Lines of a terminal, which come one a read, so that none waits in stdin's buffer while poll waits for it. */
static int talk(struct chat *c, struct dn_err *err)
{
    if (pipe2(interrupt_pipe, O_CLOEXEC | O_NONBLOCK) != 0)
        return dn_err_set(err, DN_IO, "pipe: %s", strerror(errno));
    struct sigaction action = {.sa_handler = on_interrupt, .sa_flags = SA_RESTART};
    sigaction(SIGINT, &action, NULL);
    fputs("/reset starts anew, /quit or Ctrl-D ends, Ctrl-C stops an answer\n", stderr);
    char *line = NULL;
    size_t cap = 0;
    for (;;) {
        struct dn_err failed;
        forget_interrupt();
        fputs("> ", stderr);
        if (!wait_for_line()) {
            fputc('\n', stderr);
            continue;
        }
        ssize_t n = getline(&line, &cap, stdin);
        if (n < 0 || n > INPUT_MAX)
            break;
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r'))
            line[--n] = '\0';
        if (n == 0)
            continue;
        if (line[0] == '/') {
            if (!command(c, line))
                break;
        } else if (say(c, line, (size_t)n, &failed) != 0) {
            fprintf(stderr, "dunlin: %s%s\n", failed.text,
                    failed.code == DN_CONTEXT_LENGTH ? "; /reset starts anew" : "");
        }
    }
    free(line);
    return 0;
}

static int chat(const struct options *o, const char *model, struct dn_err *err)
{
    struct chat c = {.o = o, .messages = json_array()};
    struct dn_pool_conf conf;
    int rc = dn_local_pool_conf(&o->local, &conf, err);
    if (rc == 0)
        rc = dn_local_open(&c.local, model, &conf, o->local.quiet, err);
    if (rc != 0) {
        json_decref(c.messages);
        return rc;
    }
    c.local.on_event = on_event;
    c.local.ctx = &c;
    c.node.tokenizer = c.local.loaded.tokenizer;
    c.node.chat_template = c.local.loaded.chat_template;
    if (!c.node.chat_template)
        rc = dn_err_set(err, DN_TEMPLATE, "%s has no chat template; dunlin generate continues a text", model);
    if (rc == 0)
        rc = dn_template_vm_open(&c.vm, err);
    if (rc == 0)
        rc = reset(&c, err);
    if (rc == 0 && o->prompt)
        rc = say(&c, o->prompt, strlen(o->prompt), err);
    else if (rc == 0 && !isatty(STDIN_FILENO))
        rc = say_stdin(&c, err);
    else if (rc == 0)
        rc = talk(&c, err);
    dn_template_vm_close(c.vm);
    json_decref(c.messages);
    dn_buf_release(&c.answer);
    dn_local_close(&c.local);
    return rc;
}

int dn_cmd_chat(int argc, char **argv)
{
    static const char usage[] =
        "dunlin chat MODEL [-p TEXT]   talk to a model in this process\n"
        "\n"
        "With -p, or with text on stdin, there is one answer, which goes to stdout; else a conversation.\n";
    struct options o = {0};
    const struct dn_flag flag[] = {
        {"p", "TEXT", "answer this and end", &o.prompt, NULL},
        {"system", "TEXT", "system message [none]", &o.system, NULL},
        {"max-tokens", "N", "longest answer [what the context leaves]", &o.local.max_tokens, NULL},
        {"temperature", "T", "0 takes the likeliest token [0.7]", &o.local.temperature, NULL},
        {"top-p", "P", "smallest set of tokens with this probability [1]", &o.local.top_p, NULL},
        {"seed", "N", "same seed, same answer [random]", &o.local.seed, NULL},
        {"weights", "FORMAT", "auto, bf16, fp8, int8 or int4 [auto]", &o.local.weights, NULL},
        {"kv-dtype", "FORMAT", "bf16 or fp8_e4m3 [bf16]", &o.local.kv_dtype, NULL},
        {"ctx", "TOKENS", "context [the model's]", &o.local.ctx, NULL},
        {"device", "NAME", "auto, cpu, cuda or cuda:N [auto]", &o.local.device, NULL},
        {"threads", "N", "threads [all cores]", &o.local.threads, NULL},
        {"verbose", NULL, "tokens and tokens/s of each answer, to stderr", NULL, &o.verbose},
        {"quiet", NULL, "no progress", NULL, &o.local.quiet},
        {NULL, NULL, NULL, NULL, NULL},
    };
    struct dn_args args;
    struct dn_err err = {0};
    bool help;
    if (dn_args_parse(argc, argv, usage, flag, &args, &help, &err) != 0 || (!help && args.n_positional != 1)) {
        fprintf(stderr, "dunlin: %s\n", err.code ? err.text : "expected one MODEL; dunlin chat --help");
        return DN_EXIT_USAGE;
    }
    if (help)
        return DN_EXIT_OK;
    if (chat(&o, args.positional[0], &err) == 0)
        return DN_EXIT_OK;
    fprintf(stderr, "dunlin: %s\n", err.text);
    return err.code == DN_CONFIG ? DN_EXIT_USAGE : DN_EXIT_FAILED;
}
