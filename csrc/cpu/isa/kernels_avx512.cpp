#define PAGEDKV_ISA avx512
#define PAGEDKV_ISA_AVX512

#include "kernel_table.h"

namespace pagedkv {
const Kernels kKernelsAvx512 = PAGEDKV_KERNEL_TABLE(avx512);
}
