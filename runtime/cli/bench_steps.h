/* The kinds of `dunlin bench` beside the one that runs whole requests (bench.c). argv[0] is the kind's name. Exit codes
 * as cli.h has them. */
#ifndef DN_CLI_BENCH_STEPS_H
#define DN_CLI_BENCH_STEPS_H

#include <stdbool.h>

/* Steps of a runner, without scheduler and server: decode or prefill. */
int dn_bench_steps(int argc, char **argv, bool prefill);
/* Single operations. */
int dn_bench_kernels(int argc, char **argv);

#endif
