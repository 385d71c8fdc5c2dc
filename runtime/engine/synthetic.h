/* A model without a checkpoint: the sizes of a config.json, any number of its layers, random weights.
 *
 * For: `dunlin bench decode --synthetic`, which measures models that are not on this machine. The result is like one of
 * dn_model_open() but has no tokenizer and says nothing; weights.h loads it as it loads files. It takes no memory to
 * speak of: every tensor of a type looks at the same few MiB of noise, which are mapped again and again. Values are
 * such that activations stay finite and of order 1: matrices about 1 / sqrt(hidden size), norms 1, biases of routers 0.
 *
 * Ownership: dn_model_close(). Plain functions, any thread.
 */
#ifndef DN_ENGINE_SYNTHETIC_H
#define DN_ENGINE_SYNTHETIC_H

#include "engine/model.h"
#include "kernels/kernels.h"

/* n_layers: 0 = all; else the first ones (dense layers come first). `format`: of what checkpoints quantise: INT4 as
 * Kimi K2 has it (experts alone), FP8 as DeepSeek-V3 (all linear layers of blocks of 128), or BF16. Other families are
 * BF16 always. Errors: as dn_model_open(); DN_CONFIG: a format or more layers than there are; DN_NO_MEMORY. */
int dn_synthetic_open(const char *config_path, uint32_t n_layers, enum dn_weight_format format, struct dn_model **out,
                      struct dn_err *err);

/* Internal to model.c. NULL is fine. */
struct dn_synthetic;
void dn_synthetic_release(struct dn_synthetic *s);

#endif
