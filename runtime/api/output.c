#include "api/output.h"

#include "base/utf8.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

void dn_output_release(struct dn_output *o)
{
    dn_stop_close(o->stop);
    dn_buf_release(&o->text);
    dn_buf_release(&o->lp_content);
    dn_buf_release(&o->lp_values);
    dn_buf_release(&o->lp_top);
    dn_buf_release(&o->lp_offsets);
}

/* ---- Log-probabilities ----------------------------------------------------------------------------------------------
 */

/* JSON has no infinity; -9999 is what OpenAI's API says for "impossible". */
static double json_logprob(float logprob)
{
    return isfinite(logprob) ? (double)logprob : -9999.0;
}

static void put_comma(struct dn_buf *b)
{
    if (b->len > 0)
        dn_buf_putc(b, ',');
}

static void put_token(struct dn_buf *b, const struct dn_output *o, int32_t id)
{
    struct dn_tok_str piece = dn_tokenizer_piece(o->node->tokenizer, id);
    dn_json_put_string(b, piece.data, piece.len);
}

/* "token":...,"logprob":...,"bytes":[...] */
static void put_chat_fields(struct dn_buf *b, const struct dn_output *o, int32_t id, float logprob)
{
    struct dn_tok_str piece = dn_tokenizer_piece(o->node->tokenizer, id);
    dn_buf_puts(b, "\"token\":");
    dn_json_put_string(b, piece.data, piece.len);
    dn_buf_puts(b, ",\"logprob\":");
    dn_json_put_double(b, json_logprob(logprob));
    dn_buf_puts(b, ",\"bytes\":[");
    for (size_t i = 0; i < piece.len; i++)
        dn_buf_printf(b, "%s%u", i ? "," : "", (unsigned char)piece.data[i]);
    dn_buf_putc(b, ']');
}

static void put_chat_entry(struct dn_output *o, int32_t id, float logprob, const struct dn_sampled *top)
{
    struct dn_buf *b = &o->lp_content;
    put_comma(b);
    dn_buf_putc(b, '{');
    put_chat_fields(b, o, id, logprob);
    dn_buf_puts(b, ",\"top_logprobs\":[");
    for (int i = 0; top && i < top->n_top; i++) {
        dn_buf_puts(b, i ? ",{" : "{");
        put_chat_fields(b, o, top->top_id[i], top->top_logprob[i]);
        dn_buf_putc(b, '}');
    }
    dn_buf_puts(b, "]}");
}

/* Whether an earlier alternative has the same text: an object must not have a key twice. */
static bool is_repeated(const struct dn_output *o, const struct dn_sampled *top, int n, int32_t id)
{
    struct dn_tok_str piece = dn_tokenizer_piece(o->node->tokenizer, id);
    for (int i = 0; i < n; i++) {
        struct dn_tok_str other = dn_tokenizer_piece(o->node->tokenizer, top->top_id[i]);
        if (other.len == piece.len && memcmp(other.data, piece.data, piece.len) == 0)
            return true;
    }
    return false;
}

/* The four lists of a completion; logprob NaN: the first token of an echoed prompt, of which nothing is known. */
static void put_completion_entry(struct dn_output *o, int32_t id, float logprob, const struct dn_sampled *top)
{
    put_comma(&o->lp_content);
    put_token(&o->lp_content, o, id);
    put_comma(&o->lp_offsets);
    dn_json_put_uint(&o->lp_offsets, o->chars);
    put_comma(&o->lp_values);
    put_comma(&o->lp_top);
    if (isnan(logprob)) {
        dn_buf_puts(&o->lp_values, "null");
        dn_buf_puts(&o->lp_top, "null");
        return;
    }
    dn_json_put_double(&o->lp_values, json_logprob(logprob));
    dn_buf_putc(&o->lp_top, '{');
    int n_top = top ? top->n_top : 0;
    bool first = true;
    for (int i = 0; i < n_top; i++) {
        if (is_repeated(o, top, i, top->top_id[i]))
            continue;
        if (!first)
            dn_buf_putc(&o->lp_top, ',');
        first = false;
        put_token(&o->lp_top, o, top->top_id[i]);
        dn_buf_putc(&o->lp_top, ':');
        dn_json_put_double(&o->lp_top, json_logprob(top->top_logprob[i]));
    }
    if (n_top > 0 && !is_repeated(o, top, n_top, id)) { /* the token itself is always among them */
        dn_buf_putc(&o->lp_top, ',');
        put_token(&o->lp_top, o, id);
        dn_buf_putc(&o->lp_top, ':');
        dn_json_put_double(&o->lp_top, json_logprob(logprob));
    }
    dn_buf_putc(&o->lp_top, '}');
}

static void put_entry(struct dn_output *o, int32_t id, float logprob, const struct dn_sampled *top)
{
    if (o->params->logprobs < 0)
        return;
    if (o->params->endpoint == DN_ENDPOINT_CHAT)
        put_chat_entry(o, id, logprob, top);
    else
        put_completion_entry(o, id, logprob, top);
}

static void count_chars(struct dn_output *o, const char *text, size_t n)
{
    for (size_t i = 0; i < n; i++)
        o->chars += ((unsigned char)text[i] & 0xC0) != 0x80;
}

static void prompt_entry(struct dn_output *o, int32_t id, float logprob, const struct dn_sampled *top)
{
    put_entry(o, id, logprob, top);
    struct dn_tok_str piece = dn_tokenizer_piece(o->node->tokenizer, id);
    count_chars(o, piece.data, piece.len);
}

void dn_output_init(struct dn_output *o, const struct dn_node *node, const struct dn_params *params,
                    const struct dn_tokens *prompt, const char *request_id, uint64_t created)
{
    *o = (struct dn_output){.node = node, .params = params, .prompt = prompt, .created = created};
    snprintf(o->id, sizeof o->id, "%s-%s", params->endpoint == DN_ENDPOINT_CHAT ? "chatcmpl" : "cmpl", request_id);
    dn_detok_init(&o->detok, node->tokenizer, DN_DETOK_SKIP_SPECIAL);
    const char *string[DN_STOP_STRINGS_MAX];
    size_t len[DN_STOP_STRINGS_MAX];
    for (size_t i = 0; i < params->n_stop; i++) {
        string[i] = params->stop[i].at;
        len[i] = params->stop[i].len;
    }
    if (params->n_stop > 0)
        DN_BUG_ON(dn_stop_open(&o->stop, string, len, params->n_stop, NULL) != 0); /* params.c bounds them */
    if (!params->echo)
        return;
    if (params->prompt.at)
        dn_buf_put(&o->text, params->prompt.at, params->prompt.len);
    else
        dn_tokenizer_decode(node->tokenizer, prompt->data, prompt->len, true, &o->text);
    prompt_entry(o, prompt->data[0], NAN, NULL); /* of the others the scheduler tells */
}

/* ---- Events
 * ----------------------------------------------------------------------------------------------------------- */

static void finish(struct dn_output *o, const char *reason)
{
    dn_detok_finish(&o->detok);
    if (o->stop)
        dn_stop_finish(o->stop, &o->text);
    o->done = true;
    o->finish_reason = reason;
}

/* Returns true if a stop string is complete now. */
static bool add_token(struct dn_output *o, const struct dn_event *e, const struct dn_sampled *detail)
{
    o->n_output++;
    if (e->hidden)
        return false;
    put_entry(o, e->token, e->logprob, detail);
    if (!o->stop) {
        size_t before = o->text.len;
        dn_detok_feed(&o->detok, e->token, &o->text);
        count_chars(o, o->text.data + before, o->text.len - before);
        return false;
    }
    struct dn_buf piece = {0};
    dn_detok_feed(&o->detok, e->token, &piece);
    count_chars(o, piece.data, piece.len);
    bool found = dn_stop_feed(o->stop, piece.data, piece.len, &o->text);
    dn_buf_release(&piece);
    return found;
}

bool dn_output_event(struct dn_output *o, const struct dn_event *e, const struct dn_sampled *detail)
{
    if (o->done)
        return false;
    switch ((enum dn_event_kind)e->kind) {
    case DN_EVENT_STARTED:
        o->n_cached = e->n;
        return false;
    case DN_EVENT_PROMPT:
        prompt_entry(o, e->token, e->logprob, detail);
        return false;
    case DN_EVENT_TOKEN:
        if (!add_token(o, e, detail))
            return false;
        finish(o, "stop");
        return true;
    case DN_EVENT_DONE:
        finish(o, e->finish == DN_FINISH_STOP ? "stop" : "length");
        return false;
    case DN_EVENT_ERROR:
        return false;
    }
    return false;
}

/* ---- JSON
 * ------------------------------------------------------------------------------------------------------------- */

static void put_head(struct dn_buf *b, const struct dn_output *o, const char *object)
{
    dn_buf_puts(b, "{\"id\":");
    dn_json_put_string(b, o->id, strlen(o->id));
    dn_buf_printf(b, ",\"object\":\"%s\",\"created\":%llu,\"model\":", object, (unsigned long long)o->created);
    dn_json_put_string(b, o->node->model_name, strlen(o->node->model_name));
}

static void put_usage(struct dn_buf *b, const struct dn_output *o)
{
    unsigned long long prompt = o->prompt->len, output = o->n_output;
    dn_buf_printf(b,
                  ",\"usage\":{\"prompt_tokens\":%llu,\"completion_tokens\":%llu,\"total_tokens\":%llu,"
                  "\"prompt_tokens_details\":{\"cached_tokens\":%u}}",
                  prompt, output, prompt + output, o->n_cached);
}

static void put_list(struct dn_buf *b, const char *key, const struct dn_buf *items)
{
    dn_buf_printf(b, "\"%s\":[", key);
    dn_buf_put(b, items->data, items->len);
    dn_buf_putc(b, ']');
}

/* ,"logprobs":... of what is there, which is then forgotten. */
static void put_logprobs(struct dn_buf *b, struct dn_output *o)
{
    if (o->params->logprobs < 0 || o->lp_content.len == 0) {
        dn_buf_puts(b, ",\"logprobs\":null");
        return;
    }
    dn_buf_puts(b, ",\"logprobs\":{");
    if (o->params->endpoint == DN_ENDPOINT_CHAT) {
        put_list(b, "content", &o->lp_content);
        dn_buf_puts(b, ",\"refusal\":null}");
    } else {
        put_list(b, "tokens", &o->lp_content);
        dn_buf_putc(b, ',');
        put_list(b, "token_logprobs", &o->lp_values);
        dn_buf_putc(b, ',');
        if (o->params->logprobs > 0)
            put_list(b, "top_logprobs", &o->lp_top);
        else
            dn_buf_puts(b, "\"top_logprobs\":null");
        dn_buf_putc(b, ',');
        put_list(b, "text_offset", &o->lp_offsets);
        dn_buf_putc(b, '}');
    }
    dn_buf_clear(&o->lp_content);
    dn_buf_clear(&o->lp_values);
    dn_buf_clear(&o->lp_top);
    dn_buf_clear(&o->lp_offsets);
}

static void put_finish(struct dn_buf *b, const char *reason)
{
    if (reason)
        dn_buf_printf(b, ",\"finish_reason\":\"%s\"", reason);
    else
        dn_buf_puts(b, ",\"finish_reason\":null");
}

void dn_output_body(struct dn_output *o, struct dn_buf *b)
{
    bool chat = o->params->endpoint == DN_ENDPOINT_CHAT;
    put_head(b, o, chat ? "chat.completion" : "text_completion");
    dn_buf_puts(b, ",\"choices\":[{\"index\":0,");
    dn_buf_puts(b, chat ? "\"message\":{\"role\":\"assistant\",\"content\":" : "\"text\":");
    dn_json_put_string(b, o->text.data ? o->text.data : "", o->text.len);
    if (chat)
        dn_buf_puts(b, ",\"refusal\":null}");
    put_logprobs(b, o);
    put_finish(b, o->finish_reason);
    dn_buf_puts(b, "}]");
    put_usage(b, o);
    dn_buf_putc(b, '}');
}

static void begin_chunk(struct dn_buf *b, const struct dn_output *o)
{
    dn_buf_puts(b, "data: ");
    put_head(b, o, o->params->endpoint == DN_ENDPOINT_CHAT ? "chat.completion.chunk" : "text_completion");
    dn_buf_puts(b, ",\"choices\":[{\"index\":0,");
}

static void end_chunk(struct dn_buf *b, struct dn_output *o, const char *finish_reason)
{
    put_logprobs(b, o);
    put_finish(b, finish_reason);
    dn_buf_puts(b, o->params->include_usage ? "}],\"usage\":null}\n\n" : "}]}\n\n");
}

static void put_text_chunk(struct dn_buf *b, struct dn_output *o)
{
    begin_chunk(b, o);
    dn_buf_puts(b, o->params->endpoint == DN_ENDPOINT_CHAT ? "\"delta\":{\"content\":" : "\"text\":");
    dn_json_put_string(b, o->text.data ? o->text.data + o->sent : "", o->text.len - o->sent);
    if (o->params->endpoint == DN_ENDPOINT_CHAT)
        dn_buf_putc(b, '}');
    o->sent = o->text.len;
    end_chunk(b, o, NULL);
}

void dn_output_stream(struct dn_output *o, struct dn_buf *b)
{
    bool chat = o->params->endpoint == DN_ENDPOINT_CHAT;
    if (o->n_output == 0 && !o->done) /* an echoed prompt leaves with the first token */
        return;
    if (chat && !o->role_sent) {
        begin_chunk(b, o);
        dn_buf_puts(b, "\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"logprobs\":null,\"finish_reason\":null");
        dn_buf_puts(b, o->params->include_usage ? "}],\"usage\":null}\n\n" : "}]}\n\n");
        o->role_sent = true;
    }
    if (o->text.len > o->sent || (o->done && o->lp_content.len > 0))
        put_text_chunk(b, o);
    if (!o->done)
        return;
    begin_chunk(b, o);
    dn_buf_puts(b, chat ? "\"delta\":{}" : "\"text\":\"\"");
    end_chunk(b, o, o->finish_reason);
    if (o->params->include_usage) {
        dn_buf_puts(b, "data: ");
        put_head(b, o, chat ? "chat.completion.chunk" : "text_completion");
        dn_buf_puts(b, ",\"choices\":[]");
        put_usage(b, o);
        dn_buf_puts(b, "}\n\n");
    }
    dn_buf_puts(b, "data: [DONE]\n\n");
}
