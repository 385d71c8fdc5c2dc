#include "kernels/cpu/simd.inc.h"

#define ATTN_OPS dn_attn_ops_portable
#include "kernels/cpu/attention_body.inc.h"
