/* From a path to a model that can answer: model file, tokenizer, chat template, pool. What serve, generate, chat and
 * bench begin with. Owned by the command, on its main thread.
 */
#ifndef DN_CLI_LOAD_H
#define DN_CLI_LOAD_H

#include "engine/template.h"
#include "engine/tokenizer.h"
#include "pool/pool.h"

struct dn_loaded {
    struct dn_model *model;
    struct dn_tokenizer *tokenizer;
    struct dn_template *chat_template; /* NULL: the model has none */
    struct dn_pool *pool;
};

/* Opens model, tokenizer and template: quick, reads no weights. template_file: "" or NULL = the model's own. */
int dn_load_model(const char *path, const char *template_file, struct dn_loaded *out, struct dn_err *err);
/* Then the pool: takes memory and loads the weights. */
int dn_load_pool(struct dn_loaded *l, const struct dn_pool_conf *conf, struct dn_err *err);
void dn_load_release(struct dn_loaded *l);

#endif
