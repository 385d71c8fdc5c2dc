#include "base/arena.h"

#include "base/buf.h"
#include "base/err.h"

#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK_BYTES = 8192, ALIGN = 16 };

struct dn_arena_block {
    struct dn_arena_block *next;
    size_t used, cap;
    _Alignas(ALIGN) char data[];
};

void *dn_arena_alloc(struct dn_arena *a, size_t size)
{
    DN_BUG_ON(size > SIZE_MAX / 2);
    size = (size + ALIGN - 1) & ~(size_t)(ALIGN - 1);
    struct dn_arena_block *b = a->first;
    if (!b || b->cap - b->used < size) {
        size_t cap = size > BLOCK_BYTES ? size : BLOCK_BYTES;
        b = dn_alloc(sizeof *b + cap);
        *b = (struct dn_arena_block){.next = a->first, .cap = cap};
        a->first = b;
    }
    void *p = b->data + b->used;
    b->used += size;
    a->used_bytes += size;
    return p;
}

void *dn_arena_alloc0(struct dn_arena *a, size_t n, size_t size)
{
    size_t bytes;
    DN_BUG_ON(__builtin_mul_overflow(n, size, &bytes));
    return memset(dn_arena_alloc(a, bytes), 0, bytes);
}

char *dn_arena_strndup(struct dn_arena *a, const char *s, size_t n)
{
    char *p = dn_arena_alloc(a, n + 1);
    memcpy(p, s, n);
    p[n] = '\0';
    return p;
}

char *dn_arena_printf(struct dn_arena *a, const char *format, ...)
{
    va_list ap;
    va_start(ap, format);
    int n = vsnprintf(NULL, 0, format, ap);
    va_end(ap);
    DN_BUG_ON(n < 0);
    char *p = dn_arena_alloc(a, (size_t)n + 1);
    va_start(ap, format);
    vsnprintf(p, (size_t)n + 1, format, ap);
    va_end(ap);
    return p;
}

void dn_arena_release(struct dn_arena *a)
{
    while (a->first) {
        struct dn_arena_block *b = a->first;
        a->first = b->next;
        free(b);
    }
    a->used_bytes = 0;
}
