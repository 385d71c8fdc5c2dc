#include "base/buf.h"
#include "cli/args.h"
#include "cli/cli.h"
#include "cli/local.h"
#include "engine/detokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

struct printer {
    struct dn_detok detok;
    int code; /* of an error event */
};

static void on_event(void *ctx, const struct dn_event *e, const struct dn_sampled *detail, uint64_t step_ns)
{
    struct printer *p = ctx;
    (void)detail;
    (void)step_ns;
    if (e->kind == DN_EVENT_ERROR)
        p->code = e->code;
    if (e->kind != DN_EVENT_TOKEN || e->hidden)
        return;
    struct dn_buf text = {0};
    dn_detok_feed(&p->detok, e->token, &text);
    fwrite(text.data, 1, text.len, stdout);
    fflush(stdout);
    dn_buf_release(&text);
}

/* The prompt: the argument, or all of stdin if it is "-" or absent. */
static int read_prompt(const char *arg, struct dn_buf *out, struct dn_err *err)
{
    if (arg && strcmp(arg, "-") != 0) {
        dn_buf_puts(out, arg);
        return 0;
    }
    char part[65536];
    for (size_t n; (n = fread(part, 1, sizeof part, stdin)) > 0;) {
        dn_buf_put(out, part, n);
        if (out->len > (8 << 20))
            return dn_err_set(err, DN_CONTEXT_LENGTH, "the prompt is longer than 8 MiB");
    }
    return 0;
}

static int generate(const struct dn_local_options *o, const char *model, const char *prompt, struct dn_err *err)
{
    struct dn_local l;
    struct dn_pool_conf conf;
    int rc = dn_local_pool_conf(o, &conf, err);
    if (rc != 0)
        return rc;
    if ((rc = dn_local_open(&l, model, &conf, o->quiet, err)) != 0)
        return rc;
    struct dn_buf text = {0};
    struct dn_tokens tokens = {0};
    struct printer p = {0};
    dn_detok_init(&p.detok, l.loaded.tokenizer, DN_DETOK_SKIP_SPECIAL);
    l.on_event = on_event;
    l.ctx = &p;
    rc = read_prompt(prompt, &text, err);
    if (rc == 0)
        rc = dn_tokenizer_encode(l.loaded.tokenizer, text.data ? text.data : "", text.len, DN_TOK_ADD_AFFIX, &tokens,
                                 err);
    uint32_t context = l.loaded.pool->conf.context_tokens;
    if (rc == 0 && tokens.len == 0)
        rc = dn_err_set(err, DN_INVALID_VALUE, "the prompt is empty");
    if (rc == 0 && tokens.len + 1 > context)
        rc = dn_err_set(err, DN_CONTEXT_LENGTH, "the prompt has %zu tokens, the context %u", tokens.len, context);
    if (rc == 0) {
        uint32_t max_tokens = 0;
        struct dn_request *r = dn_local_request(tokens.data, tokens.len, 1);
        rc = dn_local_max_tokens(o, 256, context - (uint32_t)tokens.len, &max_tokens, err);
        r->max_tokens = max_tokens;
        if (rc == 0)
            rc = dn_local_sampling(o, 0, r, err);
        if (rc == 0)
            rc = dn_local_submit(&l, r, err);
        else
            dn_request_free(r);
    }
    if (rc == 0) {
        dn_local_run(&l);
        putchar('\n');
        if (p.code)
            rc = dn_err_set(err, (enum dn_code)p.code, "%s", dn_code_info(p.code)->help);
    }
    dn_tokens_release(&tokens);
    dn_buf_release(&text);
    dn_local_close(&l);
    return rc;
}

int dn_cmd_generate(int argc, char **argv)
{
    static const char usage[] =
        "dunlin generate MODEL [PROMPT]   continue a text in this process; without PROMPT it is read\n"
        "                                 from stdin. The continuation goes to stdout\n";
    struct dn_local_options o = {0};
    const struct dn_flag flag[] = {
        {"max-tokens", "N", "longest continuation [256]", &o.max_tokens, NULL},
        {"temperature", "T", "0 takes the likeliest token [0]", &o.temperature, NULL},
        {"top-p", "P", "smallest set of tokens with this probability [1]", &o.top_p, NULL},
        {"seed", "N", "same seed, same text [random]", &o.seed, NULL},
        {"weights", "FORMAT", "auto, bf16, fp8, int8 or int4 [auto]", &o.weights, NULL},
        {"kv-dtype", "FORMAT", "bf16 or fp8_e4m3 [bf16]", &o.kv_dtype, NULL},
        {"ctx", "TOKENS", "context [the model's]", &o.ctx, NULL},
        {"device", "NAME", "auto, cpu, cuda or cuda:N [auto]", &o.device, NULL},
        {"threads", "N", "threads [all cores]", &o.threads, NULL},
        {"quiet", NULL, "no progress", NULL, &o.quiet},
        {NULL, NULL, NULL, NULL, NULL},
    };
    struct dn_args args;
    struct dn_err err = {0};
    bool help;
    if (dn_args_parse(argc, argv, usage, flag, &args, &help, &err) != 0 ||
        (!help && (args.n_positional == 0 || args.n_positional > 2))) {
        fprintf(stderr, "dunlin: %s\n", err.code ? err.text : "expected MODEL and one PROMPT; dunlin generate --help");
        return DN_EXIT_USAGE;
    }
    if (help)
        return DN_EXIT_OK;
    if (generate(&o, args.positional[0], args.n_positional > 1 ? args.positional[1] : NULL, &err) == 0)
        return DN_EXIT_OK;
    fprintf(stderr, "dunlin: %s\n", err.text);
    return err.code == DN_CONFIG ? DN_EXIT_USAGE : DN_EXIT_FAILED;
}
