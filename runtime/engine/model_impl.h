/* Between model*.c only: what each kind of file has to fill in. */
#ifndef DN_ENGINE_MODEL_IMPL_H
#define DN_ENGINE_MODEL_IMPL_H

#include "base/json.h"
#include "engine/gguf.h"
#include "engine/model.h"

/* Fill hyper, special ids, template and tokenizer source; dn_model_find_tensors() then finds and checks the tensors. */
int dn_model_read_gguf(struct dn_model *m, struct dn_err *err);
int dn_model_read_hf(struct dn_model *m, struct dn_err *err);
/* The hyper-parameters alone, of a config.json that may be called anything. */
int dn_model_read_config(struct dn_model *m, const char *path, struct dn_err *err);

/* model_tensors.c: every tensor of the model is found, of the right shape and type, and every tensor of the files is
 * used or known to be of no use. Fills global, layer, expert, n_params, file_bytes, type_text, n_ignored, note. */
int dn_model_find_tensors(struct dn_model *m, struct dn_err *err);

/* What that rests on. The shape that a role must have, and the number of dimensions; whether a model must have it;
 * whether its matrix may come quantised in safetensors: all linear ones but the router, the embedding and the head,
 * which no checkpoint of the family quantises. describe(): n_params, file_bytes and type_text of what was found. */
uint32_t dn_model_expected_shape(const struct dn_hyper *h, enum dn_tensor_role role, uint64_t dim[2]);
bool dn_model_needs(const struct dn_hyper *h, enum dn_tensor_role role, uint32_t layer);
bool dn_model_may_be_quantised(const struct dn_model *m, enum dn_tensor_role role);
void dn_model_describe(struct dn_model *m, const char *source);

/* Finds the architecture by GGUF's or config.json's name for it, or fails with the list. */
int dn_model_parse_arch(const char *name, size_t len, enum dn_model_source source, enum dn_arch *out,
                        struct dn_err *err);

/* Members of config.json: 1 to max, or the fallback (0: the key must be there); numbers and switches. Errors name the
 * key. blame() turns the error of a getter of base/json.h into that of a file. */
int dn_config_u32(const json_t *c, const char *key, int64_t max, int64_t fallback, uint32_t *out, struct dn_err *err);
int dn_config_f64(const json_t *c, const char *key, double min, double max, double fallback, double *out,
                  struct dn_err *err);
int dn_config_bool(const json_t *c, const char *key, bool fallback, bool *out, struct dn_err *err);
int dn_config_blame(int code, const char *key, struct dn_err *err);
/* A string that must be `expected` if it is there at all. */
int dn_config_expect(const json_t *c, const char *key, const char *expected, struct dn_err *err);

/* model_hf_kimi.c: what only this family has, after the fields that all have; and how the weights may be quantised. */
int dn_model_read_kimi(struct dn_hyper *h, uint32_t *n_extra_layers, const json_t *c, struct dn_err *err);
int dn_model_check_quantisation(const json_t *c, struct dn_err *err);

/* What both sources check once the numbers are read: divisibility, head sizes, bounds that depend on each other. */
int dn_model_check_hyper(const struct dn_hyper *h, struct dn_err *err);

/* An id (0 to DN_MODEL_MAX_VOCAB) that ends a text, unless it is known already; too many of them is an error. */
int dn_model_add_eos(struct dn_model *m, int64_t id, struct dn_err *err);

/* One more sentence about what the files have and we do not use. */
void dn_model_add_note(struct dn_model *m, const char *text);

/* Takes text (dn_alloc'ed) as the template; a template with a NUL in it is refused and freed. */
int dn_model_take_template(struct dn_model *m, char *text, size_t len, const char *from, struct dn_err *err);

#endif
