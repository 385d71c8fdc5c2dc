/* Between model.c, model_gguf.c and model_hf.c only: what each kind of file has to fill in. */
#ifndef DN_ENGINE_MODEL_IMPL_H
#define DN_ENGINE_MODEL_IMPL_H

#include "engine/gguf.h"
#include "engine/model.h"

/* Fill hyper, special ids, template and tokenizer source; model.c then finds and checks the tensors. */
int dn_model_read_gguf(struct dn_model *m, struct dn_err *err);
int dn_model_read_hf(struct dn_model *m, struct dn_err *err);

/* Finds the architecture by GGUF's or config.json's name for it, or fails with the list. */
int dn_model_parse_arch(const char *name, size_t len, enum dn_arch *out, struct dn_err *err);

/* What both sources check once the numbers are read: divisibility, head sizes, bounds that depend on each other. */
int dn_model_check_hyper(const struct dn_hyper *h, struct dn_err *err);

void dn_model_add_eos(struct dn_model *m, int64_t id);

/* Takes text (dn_alloc'ed) as the template; a template with a NUL in it is refused and freed. */
int dn_model_take_template(struct dn_model *m, char *text, size_t len, const char *from, struct dn_err *err);

#endif
