/* The CPU backend's device and its operations; kernels.h says what each of them does. device.c has the table.
 *
 * A device owns its threads, the step arrays, the token counts and all scratch. One thread uses a device at a time
 * (kernels.h); the operations spread over the device's own threads.
 */
#ifndef DN_KERNELS_CPU_DEVICE_H
#define DN_KERNELS_CPU_DEVICE_H

#include "kernels/cpu/attention.h"
#include "kernels/cpu/matmul.h"
#include "kernels/cpu/rows.h"
#include "kernels/kernels.h"
#include "kernels/sampling.h"

/* Scratch memory by what it holds. An operation that needs more than one kind at a time finds it here. */
enum dn_scratch {
    DN_SCRATCH_THREAD,   /* of each thread: tiles and states of attention, activations of grouped products, ... */
    DN_SCRATCH_ITEMS,    /* units of work of a call */
    DN_SCRATCH_PARTS,    /* states of softmax that are not finished; what the experts give */
    DN_SCRATCH_EXPANDED, /* latents, keys and values of a pass of MLA; what is between an expert's matrices */
    DN_SCRATCHES
};

struct dn_cpu_block;  /* one allocation of the device */
struct dn_cpu_region; /* a mapping that some of them share */

struct dn_cpu_device {
    struct dn_device base;
    struct dn_cpu_exec exec; /* threads, isa, scratch of matmuls */
    const struct dn_row_ops *row;
    const struct dn_attn_ops *attn;
    struct dn_step_limits limits;
    struct dn_step step;
    uint32_t n_slots, n_vocab;
    uint16_t *count;              /* [n_slots][n_vocab] */
    struct dn_cpu_block *block;   /* list */
    struct dn_cpu_region *region; /* that small allocations come from, or NULL */

    /* Scratch that grows when a larger shape is first seen, or is taken at once by prepare(). */
    bool measuring; /* prepare(): operations compute nothing but say what they need at the limits */
    uint32_t prepared;
    struct dn_cpu_scratch {
        void *data;
        size_t bytes, wanted;
    } scratch[DN_SCRATCHES];
};

static inline struct dn_cpu_device *dn_cpu(struct dn_device *d)
{
    return (struct dn_cpu_device *)d;
}

/* At least `bytes` of a scratch, 64-byte aligned, old contents lost. While prepare() measures: NULL, and at_limits
 * bytes are taken at its end. Only while no operation runs. */
void *dn_cpu_take(struct dn_cpu_device *d, enum dn_scratch which, size_t bytes, size_t at_limits);

/* Pages of sequence q of the step. A table that ends outside the arrays is a bug; check_pages looks at all. */
uint32_t dn_cpu_pages_of(const struct dn_cpu_device *d, uint32_t q, uint32_t page_tokens);
void dn_cpu_check_pages(const struct dn_cpu_device *d, const struct dn_kv_layout *l);

/* Zeroes the rows of out [n_tokens][width] of bad sequences. */
void dn_cpu_zero_bad(const struct dn_step *s, float *out, size_t width);

void dn_cpu_embed(struct dn_device *d, const struct dn_embed *p);
void dn_cpu_rmsnorm(struct dn_device *d, const struct dn_rmsnorm *p);
void dn_cpu_qkv_write(struct dn_device *d, const struct dn_qkv_write *p);
void dn_cpu_attention(struct dn_device *d, const struct dn_attention *p);
void dn_cpu_silu_mul(struct dn_device *d, const struct dn_silu_mul *p);
void dn_cpu_norm_act(struct dn_device *d, const struct dn_norm_act *p);
void dn_cpu_group_matmul(struct dn_device *d, const struct dn_group_matmul *p);
void dn_cpu_mla_write(struct dn_device *d, const struct dn_mla_write *p);
void dn_cpu_mla_attention(struct dn_device *d, const struct dn_mla_attention *p);
void dn_cpu_mla_prefill(struct dn_device *d, const struct dn_mla_prefill *p);
void dn_cpu_route(struct dn_device *d, const struct dn_route *p);
void dn_cpu_experts(struct dn_device *d, const struct dn_experts *p);
void dn_cpu_check_tags(struct dn_device *d, const struct dn_check_tags *p);
void dn_cpu_sample_rows(struct dn_device *d, const struct dn_sample_rows *p);
double dn_cpu_read_rate(struct dn_device *d, size_t bytes);
/* Bytes a second at which the threads read `bytes` at p, 64-byte aligned, once. */
double dn_cpu_read_piece(struct dn_threads *t, const void *p, size_t bytes);

#endif
