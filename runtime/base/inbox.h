/* Inbox: a queue from many threads to one.
 *
 * Any thread pushes; the owner takes everything at once, in the order of the pushes, without waiting or until a
 * deadline. Nodes are members of the messages (intrusive), so that a push allocates nothing; a pushed message belongs
 * to the owner of the inbox until the owner gives it back by its own means. The lock is held for a few instructions
 * only: an event loop may push, it will not be blocked by a reader that waits.
 */
#ifndef DN_BASE_INBOX_H
#define DN_BASE_INBOX_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct dn_inbox_node {
    struct dn_inbox_node *next;
};

struct dn_inbox {
    pthread_mutex_t lock;
    pthread_cond_t filled;
    struct dn_inbox_node *first, **last; /* last: where the next node is linked in */
    size_t n;
    bool closed, woken;
};

void dn_inbox_init(struct dn_inbox *inbox);
void dn_inbox_release(struct dn_inbox *inbox); /* must be empty and unused by others */

/* False when the inbox is closed: the message still belongs to the caller. Any thread. */
bool dn_inbox_push(struct dn_inbox *inbox, struct dn_inbox_node *node);

/* All that is there, oldest first, linked by next; NULL when empty. Owner only. */
struct dn_inbox_node *dn_inbox_take(struct dn_inbox *inbox);

/* As take, but waits for a message, a wake or close until deadline_ns of dn_now_ns() (UINT64_MAX: for ever). */
struct dn_inbox_node *dn_inbox_wait(struct dn_inbox *inbox, uint64_t deadline_ns);

void dn_inbox_wake(struct dn_inbox *inbox);  /* ends the present wait, or the next one, once; any thread */
void dn_inbox_close(struct dn_inbox *inbox); /* later pushes fail, waits return at once; any thread */
bool dn_inbox_is_closed(struct dn_inbox *inbox);
size_t dn_inbox_length(struct dn_inbox *inbox); /* a moment old; any thread */

#endif
