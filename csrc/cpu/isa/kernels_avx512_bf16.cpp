#define PAGEDKV_ISA avx512_bf16
#define PAGEDKV_ISA_AVX512
#define PAGEDKV_ISA_AVX512_BF16

#include "kernel_table.h"

namespace pagedkv {
const Kernels kKernelsAvx512Bf16 = PAGEDKV_KERNEL_TABLE(avx512_bf16);
}
