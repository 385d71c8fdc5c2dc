/* safetensors checkpoints: one file, or the shards that an index lists, mapped and read in place.
 *
 * For: model.c. Ownership: dn_safetensors_open*() maps and allocates, dn_safetensors_close() frees both; tensors live
 * as long. Immutable after opening: any thread may read.
 *
 * As strict as the format's reference and a little more: the data must be covered exactly, without overlap or hole,
 * every size must be the product of its shape, names are unique over all shards, and the index and the shards must
 * agree.
 */
#ifndef DN_ENGINE_SAFETENSORS_H
#define DN_ENGINE_SAFETENSORS_H

#include "base/err.h"
#include "engine/tensor.h"

#include <stddef.h>
#include <stdint.h>

struct dn_mapfile;

struct dn_safetensors {
    struct dn_tensor *tensor; /* [n_tensors] in the order of their names */
    size_t n_tensors;
    uint64_t tensor_bytes;
    struct dn_mapfile *map; /* [n_maps] one a shard */
    size_t n_maps;
};

/* One file. Errors: DN_IO, DN_MODEL_FILE; the text begins with the path. */
int dn_safetensors_open(const char *path, struct dn_safetensors **out, struct dn_err *err);
/* A model.safetensors.index.json and the shards beside it. */
int dn_safetensors_open_index(const char *path, struct dn_safetensors **out, struct dn_err *err);
/* As dn_safetensors_open() for bytes that the caller keeps (tests, fuzzing). */
int dn_safetensors_open_memory(const uint8_t *data, uint64_t bytes, struct dn_safetensors **out, struct dn_err *err);
void dn_safetensors_close(struct dn_safetensors *s);

const struct dn_tensor *dn_safetensors_find(const struct dn_safetensors *s, const char *name);

#endif
