#define PAGEDKV_ISA avx512_amx
#define PAGEDKV_ISA_AVX512
#define PAGEDKV_ISA_AVX512_BF16
#define PAGEDKV_ISA_AMX
#define PAGEDKV_ISA_VBMI

#include "kernel_table.h"

namespace pagedkv {
const Kernels kKernelsAvx512Amx = PAGEDKV_KERNEL_TABLE(avx512_amx);
}
