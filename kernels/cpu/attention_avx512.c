#ifdef __AVX512F__ /* empty on other processors */
#include "kernels/cpu/simd.inc.h"

#define ATTN_OPS dn_attn_ops_avx512
#include "kernels/cpu/attention_body.inc.h"
#endif
