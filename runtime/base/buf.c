#include "base/buf.h"

#include "base/err.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *dn_alloc(size_t size)
{
    void *p = malloc(size ? size : 1);
    DN_BUG_ON(p == NULL && "out of memory");
    return p;
}

void *dn_alloc0(size_t n, size_t size)
{
    void *p = calloc(n ? n : 1, size ? size : 1);
    DN_BUG_ON(p == NULL && "out of memory");
    return p;
}

void *dn_realloc(void *p, size_t n, size_t size)
{
    size_t bytes;
    DN_BUG_ON(__builtin_mul_overflow(n, size, &bytes));
    void *q = realloc(p, bytes ? bytes : 1);
    DN_BUG_ON(q == NULL && "out of memory");
    return q;
}

char *dn_strndup(const char *s, size_t n)
{
    char *p = dn_alloc(n + 1);
    memcpy(p, s, n);
    p[n] = '\0';
    return p;
}

char *dn_strdup(const char *s)
{
    return dn_strndup(s, strlen(s));
}

void dn_buf_release(struct dn_buf *b)
{
    free(b->data);
    *b = (struct dn_buf){0};
}

void dn_buf_reserve(struct dn_buf *b, size_t n_more)
{
    size_t need;
    DN_BUG_ON(__builtin_add_overflow(b->len, n_more, &need));
    if (need <= b->cap)
        return;
    size_t cap = b->cap ? b->cap : 64;
    while (cap < need) {
        DN_BUG_ON(cap > SIZE_MAX / 2);
        cap *= 2;
    }
    b->data = dn_realloc(b->data, cap, 1);
    b->cap = cap;
}

void dn_buf_put(struct dn_buf *b, const void *data, size_t n)
{
    if (n == 0)
        return;
    dn_buf_reserve(b, n);
    memcpy(b->data + b->len, data, n);
    b->len += n;
}

void dn_buf_puts(struct dn_buf *b, const char *text)
{
    dn_buf_put(b, text, strlen(text));
}

void dn_buf_putc(struct dn_buf *b, char c)
{
    dn_buf_put(b, &c, 1);
}

void dn_buf_printf(struct dn_buf *b, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    int n = vsnprintf(NULL, 0, format, ap);
    va_end(ap);
    DN_BUG_ON(n < 0);
    dn_buf_reserve(b, (size_t)n + 1);
    va_start(ap, format);
    vsnprintf(b->data + b->len, (size_t)n + 1, format, ap);
    va_end(ap);
    b->len += (size_t)n;
}

const char *dn_buf_str(struct dn_buf *b)
{
    dn_buf_reserve(b, 1);
    b->data[b->len] = '\0';
    return b->data;
}

void dn_buf_drop(struct dn_buf *b, size_t n)
{
    DN_BUG_ON(n > b->len);
    if (n == 0)
        return;
    memmove(b->data, b->data + n, b->len - n);
    b->len -= n;
}
