// All kernels of one instruction set. Included by the translation units kernels_<set>.cpp only; each is compiled with
// its own machine flags (setup.py).
#pragma once

#include "decode.h"
#include "prefill.h"
#include "rows.h"

#define PAGEDKV_KERNEL_TABLE(isa)         \
  {#isa,                                  \
   pagedkv::isa::decode,                  \
   pagedkv::isa::merge_partials,          \
   pagedkv::isa::prefill_task,            \
   pagedkv::isa::prefill_tokens_per_task, \
   pagedkv::isa::write_tokens,            \
   pagedkv::isa::merge_states,            \
   pagedkv::isa::copy,                    \
   pagedkv::isa::has_nan,                 \
   pagedkv::isa::to_float,                \
   pagedkv::isa::dequantise}
