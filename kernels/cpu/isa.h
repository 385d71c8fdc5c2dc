/* Which instruction set the CPU kernels use: found once when a device is opened, by name in tests.
 *
 * Files named *_avx2.c and *_avx512.c are compiled for that set and must only be entered after this check. Functions
 * are chosen through tables, and nothing inline is shared between those files unless it is static. No state; any
 * thread.
 */
#ifndef DN_KERNELS_CPU_ISA_H
#define DN_KERNELS_CPU_ISA_H

#include "base/err.h"

enum dn_isa {
    DN_ISA_PORTABLE, /* plain C for the baseline of the build */
    DN_ISA_AVX2,     /* AVX2, FMA, F16C: Haswell, Zen and later */
    DN_ISA_AVX512,   /* F, BW, VL, DQ, VNNI, VBMI: Ice Lake, Zen 4 and later */
    DN_ISA_COUNT
};

/* The best set that both processor and operating system (xgetbv) support. */
enum dn_isa dn_isa_detect(void);
const char *dn_isa_name(enum dn_isa isa); /* "portable" "avx2" "avx512" */

/* "auto" (or NULL), or a name above. -DN_CONFIG if the name is unknown or this machine lacks it. */
int dn_isa_parse(const char *name, enum dn_isa *out, struct dn_err *err);

#endif
