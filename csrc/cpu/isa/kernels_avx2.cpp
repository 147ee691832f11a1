#define PAGEDKV_ISA avx2
#define PAGEDKV_ISA_AVX2

#include "kernel_table.h"

namespace pagedkv {
const Kernels kKernelsAvx2 = PAGEDKV_KERNEL_TABLE(avx2);
}
