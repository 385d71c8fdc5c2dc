#include "kernels/cpu/rows.h"

const struct dn_row_ops *dn_row_ops(enum dn_isa isa)
{
#ifdef __x86_64__
    if (isa == DN_ISA_AVX512)
        return &dn_row_ops_avx512;
    if (isa == DN_ISA_AVX2)
        return &dn_row_ops_avx2;
#endif
    return &dn_row_ops_portable;
}
