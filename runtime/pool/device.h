/* Which device a pool computes on: the CPU, or a backend in a library that lies with the program.
 *
 * "auto" takes the first GPU if there is one that works, else the CPU, and keeps the reason for the receipt. Asked for
 * by name it is there or it is an error. No state; any thread.
 */
#ifndef DN_POOL_DEVICE_H
#define DN_POOL_DEVICE_H

#include "kernels/kernels.h"

struct dn_device_choice {
    enum { DN_DEVICE_AUTO, DN_DEVICE_CPU, DN_DEVICE_CUDA } kind;
    int index;        /* of the GPU */
    const char *path; /* of the library, or NULL: where dn_device_library() finds it */
};

/* NULL, "auto", "cpu", "cuda", "cuda:N", or the path of a backend's library (with a '/'), which is borrowed.
 * -DN_CONFIG: it is none of them. */
int dn_device_parse(const char *text, struct dn_device_choice *out, struct dn_err *err);

/* Where the CUDA backend's library is: DN_CUDA_LIBRARY, beside the program, or in ../lib/dunlin from there. The first
 * that exists, or -DN_NOT_FOUND with the places. */
int dn_device_library(char *path, size_t n, struct dn_err *err);

#endif
