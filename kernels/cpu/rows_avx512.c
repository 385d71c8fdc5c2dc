#ifdef __AVX512F__ /* empty on other processors */
#include "kernels/cpu/simd.inc.h"

#define ROW_OPS dn_row_ops_avx512
#include "kernels/cpu/rows_body.inc.h"
#endif
