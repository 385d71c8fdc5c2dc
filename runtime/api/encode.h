/* From what a client sent to token ids: chat template and tokenizer. On a worker's thread. */
#ifndef DN_API_ENCODE_H
#define DN_API_ENCODE_H

#include "api/node.h"

#include "base/json.h"

/* Messages through the model's template; special tokens are recognised in the template's own text alone. */
int dn_encode_messages(const struct dn_node *node, struct dn_template_vm *vm, const json_t *messages,
                       const json_t *kwargs, bool add_generation_prompt, struct dn_tokens *out, struct dn_err *err);
/* A list of ids, each checked against the vocabulary. */
int dn_encode_ids(const struct dn_node *node, const json_t *ids, const char *param, struct dn_tokens *out,
                  struct dn_err *err);

#endif
