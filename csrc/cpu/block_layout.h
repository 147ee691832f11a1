// How the elements of one block lie in memory, for copies between blocks of equal shape.
#pragma once

#include "../tensor_view.h"

namespace pagedkv {

// Nested loops over `dims` runs of `run_bytes` bytes that are contiguous on both sides.
struct BlockLayout {
  static constexpr int64_t kMaxDims = 16;
  int64_t dims = 0;
  int64_t sizes[kMaxDims];
  int64_t src_strides[kMaxDims];  // bytes
  int64_t dst_strides[kMaxDims];
  int64_t run_bytes = 0;

  // Dimensions from `first_dim` on of two tensors of equal shape there.
  BlockLayout(const TensorView& src, const TensorView& dst, int64_t first_dim);
  int64_t bytes() const;

  // Calls f(dst, src, run_bytes) for every run.
  template <typename F>
  void for_each_run(char* dst, const char* src, const F& f, int64_t d = 0) const {
    if (d == dims) return f(dst, src, run_bytes);
    for (int64_t i = 0; i < sizes[d]; ++i) for_each_run(dst + i * dst_strides[d], src + i * src_strides[d], f, d + 1);
  }
};

}  // namespace pagedkv
