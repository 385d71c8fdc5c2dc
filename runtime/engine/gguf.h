/* GGUF files (versions 2 and 3, little-endian): metadata and the list of tensors, read in place.
 *
 * For: model.c and the tokenizers. Ownership: dn_gguf_open() maps the file and allocates, dn_gguf_close() frees both;
 * strings and arrays that accessors return point into the mapping and live as long. Immutable after opening: any thread
 * may read.
 *
 * Everything is bounded by the file's size before it is used or allocated for: counts, lengths, dimensions, offsets.
 * Duplicate keys and tensors, overlapping tensors, unknown types and wrong alignment are errors that name the place.
 */
#ifndef DN_ENGINE_GGUF_H
#define DN_ENGINE_GGUF_H

#include "base/err.h"
#include "engine/tensor.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum dn_gguf_type {
    DN_GGUF_U8,
    DN_GGUF_I8,
    DN_GGUF_U16,
    DN_GGUF_I16,
    DN_GGUF_U32,
    DN_GGUF_I32,
    DN_GGUF_F32,
    DN_GGUF_BOOL,
    DN_GGUF_STRING,
    DN_GGUF_ARRAY,
    DN_GGUF_U64,
    DN_GGUF_I64,
    DN_GGUF_F64,
    DN_GGUF_TYPES
};

/* A string in the mapping: not terminated, may contain any byte. */
struct dn_gguf_str {
    const char *data;
    size_t len;
};

struct dn_gguf_value {
    struct dn_gguf_str key;
    enum dn_gguf_type type, elem_type; /* elem_type: of an array; arrays of arrays are refused */
    uint64_t n;                        /* elements of an array, else 1 */
    const uint8_t *data;               /* first element, not aligned */
    uint64_t bytes;
};

struct dn_gguf {
    char *path;
    uint32_t version, alignment;
    struct dn_gguf_value *value; /* [n_values], in file order */
    size_t n_values;
    struct dn_tensor *tensor; /* [n_tensors], in file order */
    size_t n_tensors;
    uint64_t tensor_bytes; /* sum of the tensors' */
    struct dn_gguf_index *index;
};

/* Errors: DN_IO, DN_MODEL_FILE; the text begins with the path. */
int dn_gguf_open(const char *path, struct dn_gguf **out, struct dn_err *err);
/* As dn_gguf_open() for bytes that the caller keeps (tests, fuzzing). */
int dn_gguf_open_memory(const uint8_t *data, uint64_t bytes, struct dn_gguf **out, struct dn_err *err);
void dn_gguf_close(struct dn_gguf *g);

const struct dn_gguf_value *dn_gguf_find(const struct dn_gguf *g, const char *key);
const struct dn_tensor *dn_gguf_find_tensor(const struct dn_gguf *g, const char *name);
uint32_t dn_gguf_tensor_type_number(enum dn_tensor_type t); /* ggml's number; a type that GGUF has none for is a bug */
const char *dn_gguf_type_name(enum dn_gguf_type t);         /* "u32", "string" */

/* Typed reads. An absent key gives *found = false (if `found` is given; the output is left alone) or an error (if it is
 * NULL). A value of another type or outside [min, max] is an error naming the key. Any integer type is accepted for
 * u64, any float type for f64. */
int dn_gguf_u64(const struct dn_gguf *g, const char *key, uint64_t min, uint64_t max, uint64_t *out, bool *found,
                struct dn_err *err);
int dn_gguf_f64(const struct dn_gguf *g, const char *key, double min, double max, double *out, bool *found,
                struct dn_err *err);
int dn_gguf_bool(const struct dn_gguf *g, const char *key, bool *out, bool *found, struct dn_err *err);
int dn_gguf_string(const struct dn_gguf *g, const char *key, struct dn_gguf_str *out, bool *found, struct dn_err *err);
/* An array of this element type; n_expected 0 = any length. */
int dn_gguf_array(const struct dn_gguf *g, const char *key, enum dn_gguf_type elem_type, uint64_t n_expected,
                  const struct dn_gguf_value **out, bool *found, struct dn_err *err);

/* Elements of numeric arrays; i < v->n. */
int64_t dn_gguf_int_at(const struct dn_gguf_value *v,
                       uint64_t i); /* any integer type or bool; u64 above INT64_MAX is clamped */
float dn_gguf_f32_at(const struct dn_gguf_value *v, uint64_t i); /* f32 arrays */

/* Walks a string array without copying: set `cursor` to v->data, call n times. */
struct dn_gguf_str dn_gguf_next_string(const uint8_t **cursor);

#endif
