/* JSON: reading through jansson, writing straight into a buffer.
 *
 * Reading: dn_json_parse() gives a tree that the caller owns (json_decref). Getters look up one key of an object, check
 * type and range, and name the parameter in the error (err->param). A key that is absent or null counts as not given.
 * Strings and objects that a getter returns live as long as the tree. Error texts never contain bytes of the input.
 *
 * Writing: the put functions append one value; struct dn_json_writer also places commas and colons. No tree is built.
 * Nobody else in the program prints a brace. A tree or writer belongs to one thread at a time; else any thread.
 */
#ifndef DN_BASE_JSON_H
#define DN_BASE_JSON_H

#include "base/buf.h"
#include "base/err.h"

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The whole of bytes must be one JSON object or array in UTF-8, without duplicate keys, at most 2048 levels deep.
 * Fails with DN_INVALID_JSON and line and column. */
int dn_json_parse(const char *bytes, size_t n, json_t **out, struct dn_err *err);

/* Getters: fallback when absent or null; DN_INVALID_VALUE for a wrong type or a value out of [min, max]. An integer may
 * also be written as a real without fraction (16.0). obj must be an object. */
int dn_json_get_int(const json_t *obj, const char *key, int64_t min, int64_t max, int64_t fallback, int64_t *out,
                    struct dn_err *err);
int dn_json_get_number(const json_t *obj, const char *key, double min, double max, double fallback, double *out,
                       struct dn_err *err);
int dn_json_get_bool(const json_t *obj, const char *key, bool fallback, bool *out, struct dn_err *err);
/* *out is NULL and *n 0 when absent; terminated, but may contain NUL bytes. */
int dn_json_get_string(const json_t *obj, const char *key, const char **out, size_t *n, struct dn_err *err);
int dn_json_get_object(const json_t *obj, const char *key, json_t **out, struct dn_err *err); /* NULL when absent */
int dn_json_get_array(const json_t *obj, const char *key, json_t **out, struct dn_err *err);  /* NULL when absent */
bool dn_json_has(const json_t *obj, const char *key);                                         /* present and not null */

/* The same checks for one value (an element of an array); name is what the error calls it, e.g. "stop[2]". */
int dn_json_int(const json_t *value, const char *name, int64_t min, int64_t max, int64_t *out, struct dn_err *err);
int dn_json_number(const json_t *value, const char *name, double min, double max, double *out, struct dn_err *err);

/* Puts a path in front of the parameter that a getter named: dn_json_err_at(err, "messages[%zu].", i). Returns
 * -err->code. */
int dn_json_err_at(struct dn_err *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

const char *dn_json_type_name(const json_t *value); /* "a string", "an object", ..., for messages */

/* One value each. Bytes that are not UTF-8 are written as U+FFFD, so that what is written is always valid JSON. */
void dn_json_put_string(struct dn_buf *b, const char *s, size_t n);
void dn_json_put_int(struct dn_buf *b, int64_t v);
void dn_json_put_uint(struct dn_buf *b, uint64_t v);
void dn_json_put_double(struct dn_buf *b, double v); /* shortest that reads back equal; NaN and infinities are null */
/* The inside of a string, without the quotes: for text that is written in pieces (each of whole characters). */
void dn_json_put_escaped(struct dn_buf *b, const char *s, size_t n);

/* Writer: dn_json_key() inside objects, values anywhere. Mismatched begin and end is a bug and aborts. At most 64
 * levels. */
struct dn_json_writer {
    struct dn_buf *buf; /* borrowed */
    uint64_t has_value; /* bit d: something was written at depth d, a comma is due */
    uint64_t is_object; /* bit d: depth d is an object */
    unsigned depth;
    bool after_key;
};

static inline struct dn_json_writer dn_json_writer(struct dn_buf *b)
{
    return (struct dn_json_writer){.buf = b};
}
void dn_json_begin_object(struct dn_json_writer *w);
void dn_json_end_object(struct dn_json_writer *w);
void dn_json_begin_array(struct dn_json_writer *w);
void dn_json_end_array(struct dn_json_writer *w);
void dn_json_key(struct dn_json_writer *w, const char *key);
void dn_json_string(struct dn_json_writer *w, const char *s); /* NULL is null */
void dn_json_stringn(struct dn_json_writer *w, const char *s, size_t n);
void dn_json_write_int(struct dn_json_writer *w, int64_t v);
void dn_json_write_uint(struct dn_json_writer *w, uint64_t v);
void dn_json_write_double(struct dn_json_writer *w, double v);
void dn_json_write_bool(struct dn_json_writer *w, bool v);
void dn_json_write_null(struct dn_json_writer *w);
void dn_json_write_raw(struct dn_json_writer *w, const char *json, size_t n); /* one value that is JSON already */

#endif
