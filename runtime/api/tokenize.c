#include "api/tokenize.h"

#include "api/encode.h"
#include "api/reply.h"
#include "base/json.h"

#include <stdlib.h>
#include <string.h>

struct side {
    struct dn_job job; /* first */
    struct dn_exchange exchange;
    const struct dn_node *node;
    struct dn_http_req *http; /* NULL: gone */
    bool on_worker;
    struct dn_buf body, answer;
    struct dn_err err;
};

static void side_free(struct side *s)
{
    dn_buf_release(&s->body);
    dn_buf_release(&s->answer);
    free(s);
}

static void drop(struct dn_job *job)
{
    side_free((struct side *)job);
}

static void gone(struct dn_exchange *x)
{
    struct side *s = (struct side *)((char *)x - offsetof(struct side, exchange));
    s->http = NULL;
    if (!s->on_worker)
        side_free(s);
}

static void back(struct dn_loop *loop, struct dn_loop_msg *msg, void *loop_user)
{
    struct side *s = (struct side *)((char *)msg - offsetof(struct side, job.back));
    s->on_worker = false;
    if (!s->http)
        side_free(s);
    else if (s->err.code != DN_OK)
        dn_reply_err(s->http, &s->err);
    else
        dn_reply_json(s->http, 200, &s->answer);
}

static void begin(struct dn_api_loop *loop, struct dn_http_req *req,
                  void (*work)(struct dn_job *, struct dn_template_vm *))
{
    struct dn_err err = {0};
    const struct dn_key *key = NULL;
    if (dn_api_check_request(loop->node, req, &key, &err) != 0) {
        dn_reply_err(req, &err);
        return;
    }
    if (dn_workers_are_full(loop->node->workers)) {
        dn_err_set(&err, DN_OVERLOADED, "too many requests wait to be read");
        dn_reply_err(req, &err);
        return;
    }
    struct side *s = dn_alloc0(1, sizeof *s);
    struct dn_str body = dn_http_body(req);
    s->node = loop->node;
    s->http = req;
    s->exchange.gone = gone;
    dn_http_set_user(req, &s->exchange);
    dn_buf_put(&s->body, body.at, body.len);
    s->job.loop = loop->loop;
    s->job.work = work;
    s->job.drop = drop;
    s->job.back.fn = back;
    s->on_worker = dn_workers_submit(loop->node->workers, &s->job);
    if (!s->on_worker) {
        dn_err_set(&err, DN_DRAINING, "the node is shutting down");
        dn_reply_err(req, &err);
    }
}

static int encode(struct side *s, const json_t *root, struct dn_template_vm *vm, struct dn_tokens *out,
                  struct dn_err *err)
{
    json_t *messages, *template_kwargs;
    const char *prompt;
    size_t n;
    bool special, add_generation;
    int rc;
    if ((rc = dn_json_get_array(root, "messages", &messages, err)) != 0 ||
        (rc = dn_json_get_object(root, "chat_template_kwargs", &template_kwargs, err)) != 0 ||
        (rc = dn_json_get_string(root, "prompt", &prompt, &n, err)) != 0 ||
        (rc = dn_json_get_bool(root, "add_special_tokens", true, &special, err)) != 0 ||
        (rc = dn_json_get_bool(root, "add_generation_prompt", true, &add_generation, err)) != 0)
        return rc;
    if (!messages == !prompt)
        return dn_err_param(err, DN_INVALID_VALUE, "prompt", "expected either prompt or messages");
    if (prompt)
        return dn_tokenizer_encode(s->node->tokenizer, prompt, n, special ? DN_TOK_ADD_AFFIX : 0, out, err);
    if (!s->node->chat_template)
        return dn_err_param(err, DN_TEMPLATE, "messages", "this model has no chat template");
    return dn_encode_messages(s->node, vm, messages, template_kwargs, add_generation, out, err);
}

static void tokenize_work(struct dn_job *job, struct dn_template_vm *vm)
{
    struct side *s = (struct side *)job;
    json_t *root;
    struct dn_tokens tokens = {0};
    if (dn_json_parse(s->body.data ? s->body.data : "", s->body.len, &root, &s->err) != 0)
        return;
    if (!json_is_object(root))
        dn_err_set(&s->err, DN_INVALID_JSON, "the body must be a JSON object");
    else if (encode(s, root, vm, &tokens, &s->err) == 0) {
        dn_buf_printf(&s->answer, "{\"count\":%zu,\"max_model_len\":%u,\"tokens\":[", tokens.len,
                      s->node->pool->conf.context_tokens);
        for (size_t i = 0; i < tokens.len; i++)
            dn_buf_printf(&s->answer, "%s%d", i ? "," : "", tokens.data[i]);
        dn_buf_puts(&s->answer, "]}");
    }
    dn_tokens_release(&tokens);
    json_decref(root);
}

static void detokenize_work(struct dn_job *job, struct dn_template_vm *vm)
{
    (void)vm;
    struct side *s = (struct side *)job;
    json_t *root, *ids;
    struct dn_tokens tokens = {0};
    struct dn_buf text = {0};
    if (dn_json_parse(s->body.data ? s->body.data : "", s->body.len, &root, &s->err) != 0)
        return;
    if (!json_is_object(root))
        dn_err_set(&s->err, DN_INVALID_JSON, "the body must be a JSON object");
    else if (dn_json_get_array(root, "tokens", &ids, &s->err) == 0) {
        if (!ids)
            dn_err_param(&s->err, DN_INVALID_VALUE, "tokens", "tokens: missing");
        else if (dn_encode_ids(s->node, ids, "tokens", &tokens, &s->err) == 0) {
            dn_tokenizer_decode(s->node->tokenizer, tokens.data, tokens.len, false, &text);
            dn_buf_puts(&s->answer, "{\"prompt\":");
            dn_json_put_string(&s->answer, text.data ? text.data : "", text.len);
            dn_buf_putc(&s->answer, '}');
        }
    }
    dn_buf_release(&text);
    dn_tokens_release(&tokens);
    json_decref(root);
}

void dn_tokenize_begin(struct dn_api_loop *loop, struct dn_http_req *req)
{
    begin(loop, req, tokenize_work);
}

void dn_detokenize_begin(struct dn_api_loop *loop, struct dn_http_req *req)
{
    begin(loop, req, detokenize_work);
}
