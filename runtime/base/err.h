/* Errors: one code for the program, one sentence for the person.
 *
 * A function that can fail returns 0 or -DN_CODE and leaves its out-parameters untouched. Where a person will read the
 * reason it also takes a `struct dn_err *err` as its last argument: the lowest layer writes the fact with dn_err_set(),
 * callers put the place in front with dn_err_prefix(), so that the result reads as a path:
 *     model "smollm2": /models/s.gguf: tensor "blk.0.attn_q.weight": offset 9123 lies past the end of the file (9000)
 * Say what is wrong, where, and what would be right; lower case, no full stop, values quoted, no blame.
 *
 * Plain values, no ownership; any thread. Codes, HTTP statuses and OpenAI types live in errors.def alone.
 */
#ifndef DN_BASE_ERR_H
#define DN_BASE_ERR_H

#include <stdarg.h>
#include <stddef.h>

enum dn_code {
    DN_OK = 0,
#define DN_ERROR(name, status, type, code, help) DN_##name,
#include "base/errors.def"
#undef DN_ERROR
    DN_CODE_COUNT
};

#define DN_ERR_TEXT 512

struct dn_err {
    enum dn_code code;
    char text[DN_ERR_TEXT]; /* always terminated, UTF-8, may be cut with "..." */
    char param[64];         /* the request parameter or configuration key at fault, or "" */
};

/* What a code looks like from outside (errors.def). Never NULL; an unknown code is DN_INTERNAL's row. */
struct dn_code_info {
    const char *name; /* "CONTEXT_LENGTH" */
    int status;       /* HTTP status */
    const char *type; /* OpenAI's error.type */
    const char *code; /* OpenAI's error.code; stable, clients switch on it */
    const char *help; /* one sentence for `dunlin help errors` */
};
const struct dn_code_info *dn_code_info(int code); /* takes DN_X or -DN_X */

/* Sets code and text (err may be NULL) and returns -code, so that `return dn_err_set(...)` is the whole failure path.
 */
int dn_err_set(struct dn_err *err, enum dn_code code, const char *format, ...) __attribute__((format(printf, 3, 4)));

/* As dn_err_set, and names the parameter at fault. */
int dn_err_param(struct dn_err *err, enum dn_code code, const char *param, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

#ifdef __clang_analyzer__ /* tells it what it can't see from here: the result is never 0 */
#define dn_err_set(err, code, ...)          (dn_err_set(err, code, __VA_ARGS__), -(int)(code))
#define dn_err_param(err, code, param, ...) (dn_err_param(err, code, param, __VA_ARGS__), -(int)(code))
#endif

/* Puts "<text>: " in front of what is there. Returns -err->code. */
int dn_err_prefix(struct dn_err *err, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* A bug of ours where memory safety or another tenant's data is at stake: prints and aborts, in every build. */
#define DN_BUG_ON(cond)                                                                                                \
    do {                                                                                                               \
        if (__builtin_expect(!!(cond), 0))                                                                             \
            dn_bug(__FILE__, __LINE__, #cond);                                                                         \
    } while (0)
_Noreturn void dn_bug(const char *file, int line, const char *condition);

#endif
