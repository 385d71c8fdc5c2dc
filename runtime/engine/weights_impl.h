/* Between weights.c (which matrices there are, and in which format), weights_pack.c (their rows out of the files) and
 * weights_check.c (whether those are numbers) only. */
#ifndef DN_ENGINE_WEIGHTS_IMPL_H
#define DN_ENGINE_WEIGHTS_IMPL_H

#include "engine/weights.h"

/* A chunk is what one pack call takes: whole blocks of every format, so that threads never share one. */
enum { DN_CHUNK_ROWS = 128, DN_INT_GROUP = 32 };

/* Rows of a checkpoint's matrix that follow each other in a packed one. */
struct dn_weights_part {
    struct dn_linear from;
    uint64_t from_row;
    uint32_t at_row, n_rows; /* in the packed matrix; consecutive over the parts */
};

/* A matrix and where its rows come from. Transposed: part i is [n_in][columns], and its column c becomes row
 * i * columns + c. */
struct dn_weights_job {
    struct dn_matrix *m;
    struct dn_weights_part *part;
    uint32_t n_parts;
    bool transposed;
};

struct dn_weights_jobs {
    struct dn_weights_job *job;
    size_t n;
    uint64_t file_bytes; /* to be read, what is read more than once counted so often */
};

/* Rows of all groups together. */
static inline uint32_t dn_matrix_rows(const struct dn_matrix *m)
{
    return m->n_groups > 1 ? m->n_groups * m->n_out : m->n_out;
}

/* Packs all matrices, whose memory there is. */
int dn_weights_pack(struct dn_weights *w, const struct dn_weights_jobs *jobs, const struct dn_weights_conf *conf,
                    struct dn_err *err);

/* weights_check.c. Whether rows [row, row + n) of a matrix, scales included, hold numbers only: no NaN, no infinity. */
bool dn_weights_are_numbers(const struct dn_linear *l, uint64_t row, uint64_t n);
/* The error that names the tensor and the first that is none; 0: they all are. DN_MODEL_FILE. */
int dn_weights_name_bad(const struct dn_model *m, const struct dn_linear *l, struct dn_err *err);
/* The same for a vector, whose values are decoded: dim[0] of them. */
int dn_weights_check_vector(const struct dn_model *m, const struct dn_tensor *t, const float *value,
                            struct dn_err *err);

#endif
