#include "api/node.h"
#include "base/buf.h"
#include "base/json.h"
#include "cli/args.h"
#include "cli/cli.h"
#include "cli/commit.h"
#include "cli/load.h"
#include "cli/progress.h"
#include "pool/device.h"
#include "script/conf.h"

#include <stdio.h>
#include <string.h>

static const char usage[] =
    "dunlin show MODEL                what a model file holds, and what would fit on the device now\n"
    "dunlin show config [--conf F]    every setting: value and where it comes from\n"
    "dunlin show template MODEL       the model's chat template\n";

/* What is shown: the model, and the device that it would be served on. */
struct shown {
    struct dn_loaded loaded;
    char device[32]; /* "cpu", "cuda:0" */
};

/* The device that serve would take with the same flag. */
static int open_device(struct shown *s, const char *name, struct dn_err *err)
{
    struct dn_device_choice choice;
    const struct dn_pool_conf conf = {.backend = name, .weights = DN_WEIGHTS_AUTO};
    int rc = dn_device_parse(name, &choice, err);
    if (rc == 0)
        rc = dn_pool_open_device(&conf, s->loaded.model, &s->loaded.pool, err);
    if (rc != 0)
        return rc;
    const struct dn_pool *p = s->loaded.pool;
    bool gpu = strcmp(p->device->ops->name, "cpu") != 0;
    snprintf(s->device, sizeof s->device, gpu ? "%s:%d" : "%s", p->device->ops->name, choice.index);
    return 0;
}

static int plan_of(const struct shown *s, int format, struct dn_plan *plan, struct dn_err *err)
{
    const struct dn_pool *p = s->loaded.pool;
    return dn_weights_plan(p->device->ops, s->loaded.model, format, &p->limits, p->conf.context_tokens, plan, err);
}

static const char *const shown_formats[] = {"auto", "bf16", "fp8", "int8", "int4"};
enum { N_SHOWN = sizeof shown_formats / sizeof *shown_formats };

static uint32_t layers_with_experts(const struct dn_hyper *h)
{
    uint32_t n = 0;
    for (uint32_t l = 0; l < h->n_layers; l++)
        n += dn_hyper_has_experts(h, l);
    return n;
}

/* Of all parameters those that a token meets: without the experts that are not its own. */
static uint64_t active_params(const struct dn_model *m)
{
    const struct dn_hyper *h = &m->hyper;
    uint64_t idle = (uint64_t)(h->n_experts - h->top_experts) * 3 * h->expert_ff * h->dim;
    return m->n_params - layers_with_experts(h) * idle;
}

static void print_shape(const struct dn_model *m)
{
    const struct dn_hyper *h = &m->hyper;
    printf("shape      %s: %u layers, width %u, ", dn_arch_name(h->arch), h->n_layers, h->dim);
    if (h->latent_dim > 0)
        printf("%u heads of %u + %u, values of %u, latent %u, ", h->n_heads, h->nope_dim, h->rope_dim, h->v_dim,
               h->latent_dim);
    else
        printf("%u heads, %u KV heads of %u, ", h->n_heads, h->n_kv_heads, h->head_dim);
    printf("feed-forward %u, %.1f M parameters\n", h->ff_dim, (double)m->n_params * 1e-6);
    if (h->n_experts > 0) {
        printf("experts    %u of %u a token, width %u, in %u of %u layers", h->top_experts, h->n_experts, h->expert_ff,
               layers_with_experts(h), h->n_layers);
        if (h->shared_ff > 0)
            printf("; shared: width %u", h->shared_ff);
        if (h->expert_groups > 1)
            printf("; from %u of %u groups", h->top_groups, h->expert_groups);
        printf("; %.1f M parameters a token\n", (double)active_params(m) * 1e-6);
    }
    printf("rope       theta %g, %u of %u dimensions, %s pairs", h->rope_theta, h->rotary_dim, h->head_dim,
           h->rope_interleaved ? "neighbouring" : "half-apart");
    if (h->rope_yarn)
        printf(", YaRN x %g of %g (betas %g and %g)", h->rope_factor, h->rope_original, h->rope_beta_fast,
               h->rope_beta_slow);
    printf("%s\n", h->rope_llama3 ? ", Llama 3.1 scaling" : "");
    if (m->note != NULL)
        printf("note       %s\n", m->note);
}

static void print_device(const struct shown *s)
{
    const struct dn_pool *p = s->loaded.pool;
    struct dn_pool_room room;
    char a[16], b[16], stale[200];
    dn_pool_room(p, &(struct dn_plan){0}, &room);
    printf("device     %s  %s, %s free of %s%s\n", s->device, p->device_text, dn_bytes_text(room.free_bytes, a),
           dn_bytes_text(room.total_bytes, b), room.is_limited ? ", a container's limit" : "");
    if (p->no_gpu[0])
        printf("           no GPU: %s\n", p->no_gpu);
    if (dn_commit_differs(p->device->ops, stale))
        printf("           %s\n", stale);
}

/* One format of the weights: what it takes, and what is left for the KV cache. */
static void print_format(const struct shown *s, const char *name)
{
    struct dn_plan plan;
    struct dn_pool_room room;
    struct dn_err err;
    int format;
    char a[16], b[16], c[16];
    dn_weights_format_parse(name, &format);
    if (plan_of(s, format, &plan, &err) != 0) {
        printf("weights    %-5s %9s  not on %s: %s\n", name, "-", s->device, err.text);
        return;
    }
    dn_pool_room(s->loaded.pool, &plan, &room);
    printf("weights    %-5s %9s  ", name, dn_bytes_text(plan.weight_bytes, a));
    if (room.missing_bytes > 0)
        printf("too much for %s: %s more than the %s that are free\n", s->device, dn_bytes_text(room.missing_bytes, b),
               dn_bytes_text(room.free_bytes, c));
    else
        printf("leaves %s of the %s free on %s: %llu k tokens of bf16 KV or %llu k of fp8\n",
               dn_bytes_text(room.kv_bytes, b), dn_bytes_text(room.free_bytes, c), s->device,
               (unsigned long long)(room.kv_bytes / plan.kv_token_bytes[DN_KV_BF16] / 1000),
               (unsigned long long)(room.kv_bytes / plan.kv_token_bytes[DN_KV_FP8] / 1000));
}

static void print_text(const struct shown *s)
{
    const struct dn_loaded *l = &s->loaded;
    const struct dn_model *m = l->model;
    const struct dn_hyper *h = &m->hyper;
    char a[16], b[16];
    printf("model      %s\n", m->name);
    printf("file       %s  (%s, %s of tensors)\n", m->path, m->type_text, dn_bytes_text(m->file_bytes, a));
    print_shape(m);
    printf("context    %u tokens\n", h->context_tokens);
    printf("vocabulary %u ids, %d with a token; ends with", h->n_vocab, dn_tokenizer_n_vocab(l->tokenizer));
    for (size_t i = 0; i < m->n_eos; i++) {
        struct dn_tok_str t = dn_tokenizer_piece(l->tokenizer, m->eos_id[i]);
        printf(" %d %.*s", m->eos_id[i], (int)t.len, t.data);
    }
    printf("\ntemplate   %s\n", m->chat_template ? m->chat_template_from : "none: completions only");
    printf("kv         bf16 %s a token, fp8_e4m3 %s a token\n", dn_bytes_text(dn_model_kv_bytes(m, false), a),
           dn_bytes_text(dn_model_kv_bytes(m, true), b));
    print_device(s);
    for (int i = 0; i < N_SHOWN; i++)
        print_format(s, shown_formats[i]);
}

static void json_device(struct dn_json_writer *w, const struct shown *s)
{
    const struct dn_pool *p = s->loaded.pool;
    struct dn_pool_room room;
    dn_pool_room(p, &(struct dn_plan){0}, &room);
    dn_json_key(w, "device");
    dn_json_begin_object(w);
    dn_json_key(w, "name");
    dn_json_string(w, s->device);
    dn_json_key(w, "text");
    dn_json_string(w, p->device_text);
    dn_json_key(w, "free_bytes");
    dn_json_write_uint(w, room.free_bytes);
    dn_json_key(w, "total_bytes");
    dn_json_write_uint(w, room.total_bytes);
    dn_json_key(w, "no_gpu");
    dn_json_string(w, p->no_gpu[0] ? p->no_gpu : NULL);
    dn_json_end_object(w);
}

/* null: the device does not take the weights so. */
static void json_format(struct dn_json_writer *w, const struct shown *s, const char *name)
{
    struct dn_plan plan;
    struct dn_pool_room room;
    struct dn_err err;
    int format;
    dn_weights_format_parse(name, &format);
    dn_json_key(w, name);
    if (plan_of(s, format, &plan, &err) != 0) {
        dn_json_string(w, NULL);
        return;
    }
    dn_pool_room(s->loaded.pool, &plan, &room);
    const struct {
        const char *key;
        uint64_t value;
    } number[] = {{"weights", plan.weight_bytes},
                  {"kv_token_bf16", plan.kv_token_bytes[DN_KV_BF16]},
                  {"kv_token_fp8_e4m3", plan.kv_token_bytes[DN_KV_FP8]},
                  {"left", room.kv_bytes},
                  {"missing", room.missing_bytes}};
    dn_json_begin_object(w);
    for (size_t i = 0; i < sizeof number / sizeof *number; i++) {
        dn_json_key(w, number[i].key);
        dn_json_write_uint(w, number[i].value);
    }
    dn_json_end_object(w);
}

static void print_json(const struct shown *s)
{
    const struct dn_model *m = s->loaded.model;
    const struct dn_hyper *h = &m->hyper;
    struct dn_buf b = {0};
    struct dn_json_writer w = dn_json_writer(&b);
    const struct {
        const char *key;
        uint64_t value;
    } number[] = {{"layers", h->n_layers},
                  {"width", h->dim},
                  {"heads", h->n_heads},
                  {"kv_heads", h->n_kv_heads},
                  {"head_dim", h->head_dim},
                  {"feed_forward", h->ff_dim},
                  {"vocabulary", h->n_vocab},
                  {"context_tokens", h->context_tokens},
                  {"parameters", m->n_params},
                  {"tensor_bytes", m->file_bytes},
                  {"latent", h->latent_dim},
                  {"experts", h->n_experts},
                  {"experts_a_token", h->top_experts},
                  {"expert_width", h->expert_ff}};
    dn_json_begin_object(&w);
    dn_json_key(&w, "name");
    dn_json_string(&w, m->name);
    dn_json_key(&w, "path");
    dn_json_string(&w, m->path);
    dn_json_key(&w, "type");
    dn_json_string(&w, m->type_text);
    dn_json_key(&w, "architecture");
    dn_json_string(&w, dn_arch_name(h->arch));
    for (size_t i = 0; i < sizeof number / sizeof *number; i++) {
        if (number[i].value == 0) /* a part that the model does not have */
            continue;
        dn_json_key(&w, number[i].key);
        dn_json_write_uint(&w, number[i].value);
    }
    if (m->note != NULL) {
        dn_json_key(&w, "note");
        dn_json_string(&w, m->note);
    }
    dn_json_key(&w, "chat_template");
    dn_json_string(&w, m->chat_template ? m->chat_template_from : NULL);
    json_device(&w, s);
    dn_json_key(&w, "memory_bytes");
    dn_json_begin_object(&w);
    for (int i = 0; i < N_SHOWN; i++)
        json_format(&w, s, shown_formats[i]);
    dn_json_end_object(&w);
    dn_json_end_object(&w);
    puts(dn_buf_str(&b));
    dn_buf_release(&b);
}

/* device: NULL shows the template alone. */
static int show_model(const char *path, bool json, const char *device, struct dn_err *err)
{
    struct shown s = {0};
    int rc = dn_load_model(path, NULL, &s.loaded, err);
    if (rc != 0)
        return rc;
    if (device)
        rc = open_device(&s, device, err);
    if (rc == 0 && device && json)
        print_json(&s);
    else if (rc == 0 && device)
        print_text(&s);
    else if (rc == 0 && s.loaded.model->chat_template)
        printf("%s\n", s.loaded.model->chat_template);
    else if (rc == 0)
        rc = dn_err_set(err, DN_TEMPLATE, "%s: has no chat template", path);
    dn_load_release(&s.loaded);
    return rc;
}

static int show_config(const char *file, bool json)
{
    struct dn_conf_errors errors = {0};
    struct dn_conf *c = dn_conf_open();
    struct dn_buf b = {0};
    if (file)
        dn_conf_read(c, file, &errors);
    dn_conf_check(c, &errors);
    if (errors.n > 0)
        dn_conf_errors_print(&errors, &b);
    else if (json)
        dn_conf_print_json(c, &b);
    else
        dn_conf_print(c, &b);
    int exit_code = errors.n ? DN_EXIT_USAGE : DN_EXIT_OK;
    fputs(dn_buf_str(&b), errors.n ? stderr : stdout);
    dn_buf_release(&b);
    dn_conf_errors_release(&errors);
    dn_conf_close(c);
    return exit_code;
}

int dn_cmd_show(int argc, char **argv)
{
    const char *conf = NULL, *device = "auto";
    bool json = false, help;
    const struct dn_flag flag[] = {
        {"conf", "FILE", "configuration file", &conf, NULL},
        {"device", "NAME", "auto, cpu, cuda or cuda:N [auto: a GPU if there is one]", &device, NULL},
        {"json", NULL, "one JSON document", NULL, &json},
        {NULL, NULL, NULL, NULL, NULL}};
    struct dn_args args;
    struct dn_err err = {0};
    if (dn_args_parse(argc, argv, usage, flag, &args, &help, &err) != 0) {
        fprintf(stderr, "dunlin: %s\n", err.text);
        return DN_EXIT_USAGE;
    }
    if (help)
        return DN_EXIT_OK;
    int rc = -DN_CONFIG;
    if (args.n_positional == 1 && strcmp(args.positional[0], "config") == 0)
        return show_config(conf, json);
    if (args.n_positional == 2 && strcmp(args.positional[0], "template") == 0)
        rc = show_model(args.positional[1], false, NULL, &err);
    else if (args.n_positional == 1)
        rc = show_model(args.positional[0], json, device, &err);
    else
        dn_err_set(&err, DN_CONFIG, "expected MODEL or config; dunlin show --help");
    if (rc == 0)
        return DN_EXIT_OK;
    fprintf(stderr, "dunlin: %s\n", err.text);
    return rc == -DN_CONFIG ? DN_EXIT_USAGE : DN_EXIT_FAILED;
}
