/* Four threads push, one takes: nothing is lost, each sender's order is kept. A plain program so that it can run under
 * the thread sanitizer, which a forking test runner hides. */
#include "base/inbox.h"

#include "base/clock.h"

#include <stdio.h>
#include <stdlib.h>

enum { N_SENDERS = 4, N_MESSAGES = 50000 };

struct msg {
    struct dn_inbox_node node;
    int sender, number;
};

struct sender {
    struct dn_inbox *inbox;
    struct msg *msg;
    int id;
};

static void *send_all(void *arg)
{
    struct sender *s = arg;
    for (int i = 0; i < N_MESSAGES; i++) {
        s->msg[i] = (struct msg){.sender = s->id, .number = i};
        if (!dn_inbox_push(s->inbox, &s->msg[i].node))
            return (void *)1;
    }
    return NULL;
}

int main(void)
{
    struct dn_inbox inbox;
    struct sender sender[N_SENDERS];
    pthread_t thread[N_SENDERS];
    int next[N_SENDERS] = {0}, n_got = 0, n_takes = 0;
    dn_inbox_init(&inbox);
    for (int i = 0; i < N_SENDERS; i++) {
        sender[i] = (struct sender){&inbox, calloc(N_MESSAGES, sizeof(struct msg)), i};
        if (!sender[i].msg || pthread_create(&thread[i], NULL, send_all, &sender[i]) != 0)
            return 1;
    }
    uint64_t deadline = dn_now_ns() + 60 * DN_NS_PER_S;
    while (n_got < N_SENDERS * N_MESSAGES && dn_now_ns() < deadline) {
        n_takes++;
        for (struct dn_inbox_node *n = dn_inbox_wait(&inbox, deadline), *after; n; n = after) {
            after = n->next;
            struct msg *m = (struct msg *)n;
            if (m->number != next[m->sender]++) {
                printf("sender %d: message %d came when %d was due\n", m->sender, m->number, next[m->sender] - 1);
                return 1;
            }
            n_got++;
        }
    }
    for (int i = 0; i < N_SENDERS; i++) {
        void *failed;
        pthread_join(thread[i], &failed);
        if (failed)
            return 1;
        free(sender[i].msg);
    }
    dn_inbox_release(&inbox);
    printf("%d of %d messages in %d takes\n", n_got, N_SENDERS * N_MESSAGES, n_takes);
    return n_got == N_SENDERS * N_MESSAGES ? 0 : 1;
}
