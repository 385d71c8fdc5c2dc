/* Arena: the memory of one request. Everything in it dies together with dn_arena_release().
 *
 * Not shared between threads; a request's arena moves with the request. dn_arena_alloc() returns 16-byte aligned,
 * uninitialised memory and aborts when there is none: callers bound what a client can make them ask for.
 */
#ifndef DN_BASE_ARENA_H
#define DN_BASE_ARENA_H

#include <stddef.h>

struct dn_arena {
    struct dn_arena_block *first; /* newest block; older ones behind it */
    size_t used_bytes;            /* handed out, for limits and metrics */
};

void *dn_arena_alloc(struct dn_arena *a, size_t size);
void *dn_arena_alloc0(struct dn_arena *a, size_t n, size_t size);
char *dn_arena_strndup(struct dn_arena *a, const char *s, size_t n); /* terminated copy; NUL inside is kept */
char *dn_arena_printf(struct dn_arena *a, const char *format, ...) __attribute__((format(printf, 2, 3)));
void dn_arena_release(struct dn_arena *a);

#endif
