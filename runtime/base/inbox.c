#include "base/inbox.h"

#include "base/clock.h"
#include "base/err.h"

#include <errno.h>

void dn_inbox_init(struct dn_inbox *inbox)
{
    *inbox = (struct dn_inbox){0};
    inbox->last = &inbox->first;
    pthread_condattr_t attr;
    DN_BUG_ON(pthread_mutex_init(&inbox->lock, NULL) != 0);
    DN_BUG_ON(pthread_condattr_init(&attr) != 0);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    DN_BUG_ON(pthread_cond_init(&inbox->filled, &attr) != 0);
    pthread_condattr_destroy(&attr);
}

void dn_inbox_release(struct dn_inbox *inbox)
{
    DN_BUG_ON(inbox->first != NULL);
    pthread_cond_destroy(&inbox->filled);
    pthread_mutex_destroy(&inbox->lock);
}

bool dn_inbox_push(struct dn_inbox *inbox, struct dn_inbox_node *node)
{
    pthread_mutex_lock(&inbox->lock);
    bool open = !inbox->closed;
    if (open) {
        node->next = NULL;
        *inbox->last = node;
        inbox->last = &node->next;
        if (inbox->n++ == 0)
            pthread_cond_signal(&inbox->filled);
    }
    pthread_mutex_unlock(&inbox->lock);
    return open;
}

static struct dn_inbox_node *take_locked(struct dn_inbox *inbox)
{
    struct dn_inbox_node *all = inbox->first;
    inbox->first = NULL;
    inbox->last = &inbox->first;
    inbox->n = 0;
    inbox->woken = false;
    return all;
}

struct dn_inbox_node *dn_inbox_take(struct dn_inbox *inbox)
{
    pthread_mutex_lock(&inbox->lock);
    struct dn_inbox_node *all = take_locked(inbox);
    pthread_mutex_unlock(&inbox->lock);
    return all;
}

struct dn_inbox_node *dn_inbox_wait(struct dn_inbox *inbox, uint64_t deadline_ns)
{
    struct timespec until = {.tv_sec = (time_t)(deadline_ns / DN_NS_PER_S),
                             .tv_nsec = (long)(deadline_ns % DN_NS_PER_S)};
    pthread_mutex_lock(&inbox->lock);
    int failed = 0;
    while (!inbox->first && !inbox->closed && !inbox->woken && failed != ETIMEDOUT) {
        if (deadline_ns == UINT64_MAX)
            failed = pthread_cond_wait(&inbox->filled, &inbox->lock);
        else
            failed = pthread_cond_timedwait(&inbox->filled, &inbox->lock, &until);
    }
    struct dn_inbox_node *all = take_locked(inbox);
    pthread_mutex_unlock(&inbox->lock);
    return all;
}

void dn_inbox_wake(struct dn_inbox *inbox)
{
    pthread_mutex_lock(&inbox->lock);
    inbox->woken = true;
    pthread_cond_signal(&inbox->filled);
    pthread_mutex_unlock(&inbox->lock);
}

void dn_inbox_close(struct dn_inbox *inbox)
{
    pthread_mutex_lock(&inbox->lock);
    inbox->closed = true;
    pthread_cond_broadcast(&inbox->filled);
    pthread_mutex_unlock(&inbox->lock);
}

bool dn_inbox_is_closed(struct dn_inbox *inbox)
{
    pthread_mutex_lock(&inbox->lock);
    bool closed = inbox->closed;
    pthread_mutex_unlock(&inbox->lock);
    return closed;
}

size_t dn_inbox_length(struct dn_inbox *inbox)
{
    pthread_mutex_lock(&inbox->lock);
    size_t n = inbox->n;
    pthread_mutex_unlock(&inbox->lock);
    return n;
}
