/* What the benchmarks share: lists on the command line, the device, medians, and one table that goes to the terminal
 * and, if asked for, as CSV into a file.
 *
 * Owned by the command; one thread.
 */
#ifndef DN_CLI_BENCH_TABLE_H
#define DN_CLI_BENCH_TABLE_H

#include "kernels/kernels.h"

#include <stdio.h>

enum { DN_BENCH_MAX_LIST = 12, DN_BENCH_COLUMNS = 20 };

/* "1,8,16" */
struct dn_bench_list {
    const char *text[DN_BENCH_MAX_LIST];
    size_t n;
    char *copy; /* the caller frees */
};
int dn_bench_split(const char *flag, const char *text, struct dn_bench_list *out, struct dn_err *err);
/* As numbers, "8k" = 8,192. */
int dn_bench_numbers(const char *flag, const char *text, uint64_t max, uint32_t *out, size_t *n, struct dn_err *err);

/* Opens what dn_device_parse() takes, if it computes models of all of `sizes`; "auto": a GPU if one works and does.
 * *index: of the GPU, -1 on the CPU. */
int dn_bench_open_device(const char *name, const struct dn_device_conf *conf, const struct dn_model_sizes *sizes,
                         size_t n_sizes, struct dn_device **out, int *index, struct dn_err *err);

struct dn_bench_column {
    const char *name; /* in the table; NULL ends the list */
    const char *csv;  /* in the file */
    int width;        /* > 0: to the right, < 0: to the left */
};
struct dn_bench_table {
    const struct dn_bench_column *column;
    FILE *csv; /* or NULL */
    const char *csv_path;
    size_t at; /* column of the row being written */
    bool has_head;
};
/* Opens the file before anything is loaded or measured, and leaves what it holds until the head is written. csv_path:
 * NULL = none, borrowed. Errors: DN_IO. */
int dn_bench_table_open(struct dn_bench_table *t, const struct dn_bench_column *column, const char *csv_path,
                        struct dn_err *err);
/* The names of the columns, once. */
void dn_bench_table_head(struct dn_bench_table *t);
/* Also of a table that is all zeros or closed. -DN_IO: the file is not whole. */
int dn_bench_table_close(struct dn_bench_table *t, struct dn_err *err);
/* A cell after the other; the last one of a row ends the line, which is then on its way to terminal and file. NaN's
 * cell is "-", in the file empty. */
void dn_bench_text(struct dn_bench_table *t, const char *text);
void dn_bench_number(struct dn_bench_table *t, int decimals, double x);

/* Version and commit, device, its clocks (if NVML is there); "# ..." lines. index < 0: no GPU. */
void dn_bench_print_head(const struct dn_device *d, double read_rate, int index);
void dn_bench_print_clocks(int index);

/* Who measures rows in turn has whole ones only at the end. While this is on, SIGINT and SIGTERM (`timeout`) ask to
 * stop and write what there is; the second one ends the program at once. */
void dn_bench_catch_stop(bool on);
bool dn_bench_stopped(void);

/* Sorts; the value below which `part` of n >= 1 values are (0.5: the median). */
double dn_bench_quantile(double *x, size_t n, double part);

/* Deterministic numbers. */
uint64_t dn_bench_random(uint64_t *state);

#endif
