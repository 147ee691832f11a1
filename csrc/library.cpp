// Registers the CPU implementations. Schemas and tags are defined in Python (pagedkv_ops/schema.py), because tags in a
// C++ definition need a later stable ABI than the one this library targets.
#include <torch/csrc/stable/library.h>

#include "cpu/ops.h"

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CPU, m) {
  m.impl("write_kv", TORCH_BOX(&pagedkv::write_kv));
  m.impl("paged_attention", TORCH_BOX(&pagedkv::paged_attention));
  m.impl("paged_attention_with_lse", TORCH_BOX(&pagedkv::paged_attention_with_lse));
  m.impl("paged_attention_append", TORCH_BOX(&pagedkv::paged_attention_append));
  m.impl("merge_states", TORCH_BOX(&pagedkv::merge_states));
  m.impl("copy_blocks", TORCH_BOX(&pagedkv::copy_blocks));
  m.impl("swap_blocks", TORCH_BOX(&pagedkv::swap_blocks));
  m.impl("gather_kv", TORCH_BOX(&pagedkv::gather_kv));
}
