#include "api/encode.h"

#include "base/buf.h"

#include <stdlib.h>

int dn_encode_messages(const struct dn_node *node, struct dn_template_vm *vm, const json_t *messages,
                       const json_t *kwargs, bool add_generation_prompt, struct dn_tokens *out, struct dn_err *err)
{
    struct dn_template_output rendered = {0};
    int rc = dn_template_render(vm, node->chat_template, messages, NULL, add_generation_prompt, kwargs, &rendered, err);
    if (rc == 0) {
        struct dn_tok_text *text = dn_alloc0(rendered.n_segments, sizeof *text);
        const char *at = rendered.text.data;
        for (size_t i = 0; i < rendered.n_segments; i++) {
            text[i] = (struct dn_tok_text){at, rendered.segment[i].len, rendered.segment[i].trusted};
            at += rendered.segment[i].len;
        }
        rc = dn_tokenizer_encode_texts(node->tokenizer, text, rendered.n_segments, 0, out, err);
        free(text);
    }
    dn_template_output_release(&rendered);
    return rc;
}

int dn_encode_ids(const struct dn_node *node, const json_t *ids, const char *param, struct dn_tokens *out,
                  struct dn_err *err)
{
    const json_int_t n_vocab = node->pool->conf.n_valid; /* a padded embedding table has ids without a token behind */
    for (size_t i = 0; i < json_array_size(ids); i++) {
        const json_t *v = json_array_get(ids, i);
        if (!json_is_integer(v) || json_integer_value(v) < 0 || json_integer_value(v) >= n_vocab)
            return dn_err_param(err, DN_INVALID_VALUE, param, "%s[%zu]: expected a token id below %lld", param, i,
                                (long long)n_vocab);
        dn_tokens_put(out, (int32_t)json_integer_value(v));
    }
    return 0;
}
