/* Generation in this process, without a server: one scheduler driven on the caller's thread. For generate, chat and
 * bench. */
#ifndef DN_CLI_LOCAL_H
#define DN_CLI_LOCAL_H

#include "cli/load.h"
#include "sched/sched.h"

struct dn_local {
    struct dn_loaded loaded;
    struct dn_sched *sched;
    void (*on_event)(void *ctx, const struct dn_event *e, const struct dn_sampled *detail, uint64_t step_ns);
    void *ctx;
};

/* What a user may choose, as the texts of flags; NULL: not given. */
struct dn_local_options {
    const char *max_tokens, *temperature, *top_p, *seed, *weights, *kv_dtype, *device, *threads, *ctx;
    bool quiet;
};
/* One sequence at a time, with the weights, threads and context of o. Checks all of o. Error: names the flag. */
int dn_local_pool_conf(const struct dn_local_options *o, struct dn_pool_conf *conf, struct dn_err *err);
/* Sampling and KV format of o into a request; `temperature` is what holds where o has none. Error: names the flag. */
int dn_local_sampling(const struct dn_local_options *o, float temperature, struct dn_request *r, struct dn_err *err);
/* The most tokens to answer with: --max-tokens or `fallback`, at most `room`. Error: names the flag. */
int dn_local_max_tokens(const struct dn_local_options *o, uint64_t fallback, uint32_t room, uint32_t *out,
                        struct dn_err *err);

/* Loads the model with a progress bar. */
int dn_local_open(struct dn_local *l, const char *path, const struct dn_pool_conf *conf, bool quiet,
                  struct dn_err *err);
void dn_local_close(struct dn_local *l);

/* A request with defaults (greedy, no penalties, integrity tag); the prompt is copied. */
struct dn_request *dn_local_request(const int32_t *prompt, size_t n_prompt, uint32_t max_tokens);
/* Takes the request over, also when it fails: -DN_CONTEXT_LENGTH if it is longer than the context. */
int dn_local_submit(struct dn_local *l, struct dn_request *r, struct dn_err *err);
/* Runs until nothing is left to do; events arrive at on_event. */
void dn_local_run(struct dn_local *l);

#endif
