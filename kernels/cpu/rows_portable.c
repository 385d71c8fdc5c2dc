#include "kernels/cpu/simd.inc.h"

#define ROW_OPS dn_row_ops_portable
#include "kernels/cpu/rows_body.inc.h"
