/* What a format costs in quality: perplexity of a text and accuracy of multiple choice, for each KV format in the same
 * run, so that the differences are paired.
 *
 *   quality MODEL [--weights F] [--window N] [--text FILE [--bytes N]] [--choices FILE.jsonl [--questions N]]
 *
 * Text: one string without special tokens, consecutive windows of N ids that do not overlap; the first id of each is
 * not scored, the short last window counts. Choices: lines of {"query", "choices": [...], "gold"}; the answer with the
 * highest log-probability a byte of "query\nAnswer: choice" behind the query wins.
 */
#include "base/json.h"
#include "cli/args.h"
#include "cli/local.h"
#include "engine/mapfile.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 16, MAX_CHOICES = 8 };

struct score {
    double sum; /* of log-probabilities, natural */
    uint64_t n;
    uint32_t from; /* prompt positions below it are not counted */
    int code;
};

struct run {
    struct dn_local local;
    struct score score[2 * BATCH * MAX_CHOICES];
};

static void on_event(void *ctx, const struct dn_event *e, const struct dn_sampled *detail, uint64_t step_ns)
{
    struct run *r = ctx;
    (void)detail;
    (void)step_ns;
    struct score *s = &r->score[e->id.slot];
    if (e->kind == DN_EVENT_ERROR)
        s->code = e->code;
    if (e->kind == DN_EVENT_PROMPT && e->n >= s->from) {
        s->sum += (double)e->logprob;
        s->n++;
    }
}

static void submit(struct run *r, uint32_t slot, const int32_t *id, size_t n, enum dn_kv_format kv, uint32_t from)
{
    struct dn_err err;
    struct dn_request *q = dn_local_request(id, n, 0);
    q->id.slot = slot;
    q->prompt_logprobs = true;
    q->kv = kv;
    q->sample.n_top = 0;
    q->cache_read = q->cache_write = false;
    r->score[slot] = (struct score){.from = from};
    if (dn_local_submit(&r->local, q, &err) != 0) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
}

static void finish(struct run *r, uint32_t n_slots)
{
    dn_local_run(&r->local);
    for (uint32_t i = 0; i < n_slots; i++)
        if (r->score[i].code) {
            fprintf(stderr, "request %u: %s\n", i, dn_code_info(r->score[i].code)->help);
            exit(1);
        }
}

static void text_quality(struct run *r, const char *path, size_t max_bytes, size_t window)
{
    struct dn_mapfile f;
    struct dn_err err;
    struct dn_tokens t = {0};
    if (dn_mapfile_init(&f, path, &err) != 0 ||
        dn_tokenizer_encode(r->local.loaded.tokenizer, (const char *)f.data, f.bytes < max_bytes ? f.bytes : max_bytes,
                            0, &t, &err) != 0) {
        fprintf(stderr, "%s\n", err.text);
        exit(1);
    }
    double sum[DN_KV_FORMATS] = {0}, difference = 0, square = 0;
    uint64_t n[DN_KV_FORMATS] = {0}, windows = 0;
    for (size_t at = 0; at + 1 < t.len;) {
        uint32_t slots = 0;
        for (; slots < 2 * BATCH && at + 1 < t.len; slots += 2, at += window)
            for (uint32_t kv = 0; kv < DN_KV_FORMATS; kv++)
                submit(r, slots + kv, t.data + at, t.len - at < window ? t.len - at : window, (enum dn_kv_format)kv, 1);
        finish(r, slots);
        for (uint32_t i = 0; i < slots; i++) {
            sum[i % 2] += r->score[i].sum;
            n[i % 2] += r->score[i].n;
        }
        for (uint32_t i = 0; i < slots; i += 2, windows++) {
            double d = (r->score[i].sum - r->score[i + 1].sum) / (double)r->score[i].n;
            difference += d;
            square += d * d;
        }
        fprintf(stderr, "\r%zu of %zu tokens", at < t.len ? at : t.len, t.len);
    }
    double mean = difference / (double)windows,
           spread = sqrt((square / (double)windows - mean * mean) / (double)windows);
    fprintf(stderr, "\n");
    for (int kv = 0; kv < DN_KV_FORMATS; kv++)
        printf("perplexity  window %zu  kv %-9s %.4f  (%llu tokens)\n", window,
               dn_kv_format_name((enum dn_kv_format)kv), exp(-sum[kv] / (double)n[kv]), (unsigned long long)n[kv]);
    printf("paired difference of log-likelihood a token, bf16 - fp8: %.5f +- %.5f (95 %%, %llu windows)\n", mean,
           1.96 * spread, (unsigned long long)windows);
    dn_tokens_release(&t);
    dn_mapfile_release(&f);
}

static size_t encode_choice(struct run *r, const char *query, const char *choice, struct dn_tokens *t)
{
    struct dn_err err;
    struct dn_buf b = {0};
    dn_buf_printf(&b, "%s\nAnswer:", query);
    t->len = 0;
    if (dn_tokenizer_encode(r->local.loaded.tokenizer, b.data, b.len, 0, t, &err) != 0)
        exit(1);
    size_t n_query = t->len;
    t->len = 0;
    dn_buf_printf(&b, " %s", choice);
    if (dn_tokenizer_encode(r->local.loaded.tokenizer, b.data, b.len, 0, t, &err) != 0)
        exit(1);
    dn_buf_release(&b);
    return n_query;
}

struct tally {
    unsigned right[DN_KV_FORMATS], only[DN_KV_FORMATS], questions, same;
};

/* One line: every choice in both formats. */
static void question(struct run *r, const json_t *line, struct tally *tally)
{
    const char *query = json_string_value(json_object_get(line, "query"));
    const json_t *choices = json_object_get(line, "choices");
    size_t n = json_array_size(choices), gold = (size_t)json_integer_value(json_object_get(line, "gold"));
    struct dn_tokens t = {0};
    size_t bytes[MAX_CHOICES], best[DN_KV_FORMATS] = {0};
    if (!query || n == 0 || n > MAX_CHOICES)
        return;
    for (size_t i = 0; i < n; i++) {
        const char *choice = json_string_value(json_array_get(choices, i));
        uint32_t from = (uint32_t)encode_choice(r, query, choice, &t);
        bytes[i] = strlen(choice);
        for (uint32_t kv = 0; kv < DN_KV_FORMATS; kv++)
            submit(r, (uint32_t)(2 * i + kv), t.data, t.len, (enum dn_kv_format)kv, from);
    }
    finish(r, (uint32_t)(2 * n));
    for (uint32_t kv = 0; kv < DN_KV_FORMATS; kv++)
        for (size_t i = 1; i < n; i++)
            if (r->score[2 * i + kv].sum / (double)bytes[i] > r->score[2 * best[kv] + kv].sum / (double)bytes[best[kv]])
                best[kv] = i;
    bool right[DN_KV_FORMATS] = {best[0] == gold, best[1] == gold};
    tally->questions++;
    tally->same += best[0] == best[1];
    for (int kv = 0; kv < DN_KV_FORMATS; kv++) {
        tally->right[kv] += right[kv];
        tally->only[kv] += right[kv] && !right[1 - kv];
    }
    dn_tokens_release(&t);
}

static void choice_quality(struct run *r, const char *path, uint64_t max_questions)
{
    FILE *f = fopen(path, "r");
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    struct tally t = {0};
    if (!f) {
        perror(path);
        exit(1);
    }
    while (t.questions < max_questions && (n = getline(&line, &cap, f)) > 0) {
        json_t *json;
        if (dn_json_parse(line, (size_t)n, &json, NULL) != 0)
            continue;
        question(r, json, &t);
        json_decref(json);
        fprintf(stderr, "\r%u questions", t.questions);
    }
    fprintf(stderr, "\n");
    for (int kv = 0; kv < DN_KV_FORMATS; kv++)
        printf("choices  kv %-9s %.4f right (%u of %u; %u only so)\n", dn_kv_format_name((enum dn_kv_format)kv),
               t.right[kv] / (double)t.questions, t.right[kv], t.questions, t.only[kv]);
    printf("same answer: %.4f\n", t.same / (double)t.questions);
    free(line);
    fclose(f);
}

int main(int argc, char **argv)
{
    const char *weights = "auto", *window = "1024", *text = NULL, *bytes = "1000M", *choices = NULL,
               *questions = "100k";
    const struct dn_flag flag[] = {{"weights", "F", "weight format", &weights, NULL},
                                   {"window", "N", "tokens of a window", &window, NULL},
                                   {"text", "FILE", "text to score", &text, NULL},
                                   {"bytes", "N", "of the text", &bytes, NULL},
                                   {"choices", "FILE", "questions", &choices, NULL},
                                   {"questions", "N", "of them", &questions, NULL},
                                   {NULL, NULL, NULL, NULL, NULL}};
    struct dn_args args;
    struct dn_err err = {0};
    bool help;
    uint64_t n_window, n_bytes, n_questions;
    if (dn_args_parse(argc, argv, "quality MODEL", flag, &args, &help, &err) != 0 || help || args.n_positional != 1 ||
        dn_args_uint(window, "window", 16, 8192, false, &n_window, &err) != 0 ||
        dn_args_uint(bytes, "bytes", 1, UINT64_MAX, false, &n_bytes, &err) != 0 ||
        dn_args_uint(questions, "questions", 1, UINT64_MAX, false, &n_questions, &err) != 0) {
        fprintf(stderr, "%s\n", err.code ? err.text : "expected MODEL");
        return 2;
    }
    struct run *r = dn_alloc0(1, sizeof *r);
    struct dn_pool_conf conf = {
        .max_sequences = 2 * BATCH, .step_tokens = 1024, .echo_rows = 1024, .kv_bytes = 2ull << 30};
    if (dn_weights_format_parse(weights, &conf.weights) != 0 ||
        dn_local_open(&r->local, args.positional[0], &conf, false, &err) != 0) {
        fprintf(stderr, "%s\n", err.code ? err.text : "unknown weight format");
        return 1;
    }
    r->local.on_event = on_event;
    r->local.ctx = r;
    printf("model %s  weights %s\n", args.positional[0], weights);
    if (text)
        text_quality(r, text, n_bytes, n_window);
    if (choices)
        choice_quality(r, choices, n_questions);
    dn_local_close(&r->local);
    free(r);
    return 0;
}
