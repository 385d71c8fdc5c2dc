/* Kimi's vocabulary out of the unpacked test material. */
#ifndef TOK_KIMI_H
#define TOK_KIMI_H

#include "base/json.h"
#include "unit/engine/tok_data.h"

/* A tokenizer_config.json out of {"special": {text: id}}. */
static inline struct dn_buf tok_config_of(const char *path)
{
    static const char *const not_special[] = {"<think>",
                                              "</think>",
                                              "<|tool_calls_section_begin|>",
                                              "<|tool_calls_section_end|>",
                                              "<|tool_call_begin|>",
                                              "<|tool_call_argument_begin|>",
                                              "<|tool_call_end|>"};
    json_t *root = json_load_file(path, 0, NULL), *decoder = json_object();
    cr_assert_not_null(root, "%s", path);
    const char *key;
    json_t *id;
    json_object_foreach(json_object_get(root, "special"), key, id)
    {
        char number[32];
        bool special = true;
        for (size_t i = 0; i < sizeof not_special / sizeof *not_special; i++)
            special = special && strcmp(key, not_special[i]) != 0;
        snprintf(number, sizeof number, "%lld", (long long)json_integer_value(id));
        json_object_set_new(decoder, number, json_pack("{s:s, s:b}", "content", key, "special", special));
    }
    json_t *config =
        json_pack("{s:o, s:s, s:s}", "added_tokens_decoder", decoder, "bos_token", "[BOS]", "eos_token", "[EOS]");
    char *text = json_dumps(config, 0);
    struct dn_buf b = {0};
    dn_buf_puts(&b, text);
    free(text);
    json_decref(config);
    json_decref(root);
    return b;
}

static inline struct dn_tokenizer *tok_open_kimi(void)
{
    struct dn_buf config = tok_config_of(tok_path("tokenizers/kimi_k2/special_tokens.json"));
    struct dn_buf ranks = tok_read(tok_path("tokenizers/kimi_k2/tiktoken.model"));
    struct dn_tokenizer *t = NULL;
    struct dn_err err = {0};
    cr_assert_eq(dn_tokenizer_parse_tiktoken(&t, ranks.data, ranks.len, config.data, config.len, "kimi-k2", &err), 0,
                 "%s", err.text);
    dn_buf_release(&config);
    dn_buf_release(&ranks);
    return t;
}

#endif
