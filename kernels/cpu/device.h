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

/* Token counts for penalties: bit 15 marks an id of the prompt, the rest counts it in the output, up to the maximum. */
enum { DN_COUNT_PROMPT = 0x8000, DN_COUNT_MAX = 0x7fff };

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

    /* Scratch that grows when a larger shape is first seen; sizes follow from the limits and the model. */
    struct dn_cpu_scratch {
        void *data;
        size_t bytes;
    } thread_scratch,   /* attention: tiles and states of each thread */
        attn_items,     /* attention: units of work of a call */
        attn_parts,     /* attention: states of splits that are merged afterwards */
        sample_scratch; /* sampler: candidates of each thread */
};

static inline struct dn_cpu_device *dn_cpu(struct dn_device *d)
{
    return (struct dn_cpu_device *)d;
}

/* At least `bytes` of s, 64-byte aligned, old contents lost. Only while no operation runs. */
void *dn_cpu_scratch(struct dn_cpu_scratch *s, size_t bytes);

void dn_cpu_embed(struct dn_device *d, const struct dn_embed *p);
void dn_cpu_rmsnorm(struct dn_device *d, const struct dn_rmsnorm *p);
void dn_cpu_qkv_write(struct dn_device *d, const struct dn_qkv_write *p);
void dn_cpu_attention(struct dn_device *d, const struct dn_attention *p);
void dn_cpu_silu_mul(struct dn_device *d, const struct dn_silu_mul *p);
void dn_cpu_check_tags(struct dn_device *d, const struct dn_check_tags *p);
void dn_cpu_sample_rows(struct dn_device *d, const struct dn_sample_rows *p);

/* The generator of the sampler: Philox4x32-10 (Salmon et al., SC 2011) of a 128-bit counter and a 64-bit key. */
void dn_philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]);

#endif
