/* Growing bytes: what JSON, SSE events, log lines and detokenized text are written into.
 *
 * The holder of the struct owns `data`; dn_buf_release() frees it. Zero-initialised is an empty buffer. Not shared
 * between threads. Running out of memory aborts, since every size that a client controls is bounded before it gets
 * here.
 */
#ifndef DN_BASE_BUF_H
#define DN_BASE_BUF_H

#include <stddef.h>
#include <stdint.h>

struct dn_buf {
    char *data; /* NULL while cap is 0; terminated by dn_buf_str() only */
    size_t len, cap;
};

void dn_buf_release(struct dn_buf *b);
void dn_buf_reserve(struct dn_buf *b, size_t n_more); /* room for n_more bytes behind len */
void dn_buf_put(struct dn_buf *b, const void *data, size_t n);
void dn_buf_puts(struct dn_buf *b, const char *text);
void dn_buf_putc(struct dn_buf *b, char c);
void dn_buf_printf(struct dn_buf *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
const char *dn_buf_str(struct dn_buf *b); /* terminated; valid until the next change */
static inline void dn_buf_clear(struct dn_buf *b)
{
    b->len = 0;
}
void dn_buf_drop(struct dn_buf *b, size_t n); /* removes the first n bytes */

/* Memory that can't be had aborts; these never return NULL (a size of 0 gives 1 byte). Multiplication is checked. */
void *dn_alloc(size_t size);
void *dn_alloc0(size_t n, size_t size);
void *dn_realloc(void *p, size_t n, size_t size);
char *dn_strndup(const char *s, size_t n);
char *dn_strdup(const char *s);

#endif
