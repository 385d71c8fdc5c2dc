/* What the JSON readers of the tokenizer share. Inside of the tokenizer; see tokenizer_impl.h. */
#ifndef DN_ENGINE_TOKENIZER_CONFIG_H
#define DN_ENGINE_TOKENIZER_CONFIG_H

#include "base/json.h"
#include "engine/tokenizer_impl.h"

/* NULL with err set when the text is not JSON with an object at the top. The caller owns the reference. Not
 * dn_json_parse(): a tokenizer_config.json often has a model_max_length of 1e30 written out as an integer, which only
 * fits when integers are read as reals (is_config). */
json_t *dn_tok_json_load(const char *text, size_t n, bool is_config, struct dn_err *err);

/* One entry of added_tokens (JSON object with content, special, lstrip, ...). */
int dn_tok_config_added(struct dn_tokenizer *t, int64_t id, const json_t *entry, struct dn_err *err);

/* Applies a tokenizer_config.json: bos_token, eos_token, pad_token, unk_token, add_bos_token, and with `with_added`
 * the added_tokens_decoder, which must be there; without, that must agree with the tokens that are there. */
int dn_tok_config_apply(struct dn_tokenizer *t, const char *text, size_t n, bool with_added, struct dn_err *err);

#endif
