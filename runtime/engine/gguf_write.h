/* Writes small GGUF v3 files: the tiny model that the program makes itself, and the tests' files.
 *
 * The holder of the struct owns its buffers; zero-initialised is an empty file. Keys, then tensors, in any order;
 * dn_gguf_write_finish() writes all to a path (through a temporary name, so that a reader never sees half a file), and
 * dn_gguf_write_release() frees. Little-endian hosts only, as all of the program. Not shared between threads.
 */
#ifndef DN_ENGINE_GGUF_WRITE_H
#define DN_ENGINE_GGUF_WRITE_H

#include "base/buf.h"
#include "base/err.h"
#include "engine/tensor.h"

#include <stdbool.h>
#include <stdint.h>

struct dn_gguf_writer {
    struct dn_buf value, info, data;
    uint64_t n_values, n_tensors;
};

void dn_gguf_write_u32(struct dn_gguf_writer *w, const char *key, uint32_t v);
void dn_gguf_write_f32(struct dn_gguf_writer *w, const char *key, float v);
void dn_gguf_write_bool(struct dn_gguf_writer *w, const char *key, bool v);
void dn_gguf_write_string(struct dn_gguf_writer *w, const char *key, const char *v);
void dn_gguf_write_strings(struct dn_gguf_writer *w, const char *key, const char *const *v, uint64_t n);
void dn_gguf_write_i32s(struct dn_gguf_writer *w, const char *key, const int32_t *v, uint64_t n);

/* A vector (n_out = 0) or a matrix [n_out][n_in] of a type that GGUF has a number for; `data` is in that type's form.
 */
void dn_gguf_write_tensor(struct dn_gguf_writer *w, const char *name, enum dn_tensor_type type, uint64_t n_out,
                          uint64_t n_in, const void *data);

/* The whole file as bytes, appended to out. */
void dn_gguf_write_bytes(const struct dn_gguf_writer *w, struct dn_buf *out);
int dn_gguf_write_finish(const struct dn_gguf_writer *w, const char *path, struct dn_err *err);
void dn_gguf_write_release(struct dn_gguf_writer *w);

#endif
