#define PAGEDKV_ISA baseline

#include "kernel_table.h"

namespace pagedkv {
const Kernels kKernelsBaseline = PAGEDKV_KERNEL_TABLE(baseline);
}
