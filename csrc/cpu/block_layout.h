// How the elements of one block lie in memory, for copies between blocks of equal shape.
#pragma once

#include "../tensor_view.h"
#include "scratch.h"

namespace pagedkv {

// Nested loops over runs of `run_bytes` bytes that are contiguous on both sides.
struct BlockLayout {
  struct Loop {
    int64_t size;
    int64_t src_stride, dst_stride;  // bytes
  };
  List<Loop> loops;  // outermost first
  int64_t run_bytes = 0;

  // Dimensions from `first_dim` on of two tensors of equal shape there.
  BlockLayout(const TensorView& src, const TensorView& dst, int64_t first_dim);
  int64_t bytes() const;

  // Calls f(dst, src, run_bytes) for every run.
  template <typename F>
  void for_each_run(char* dst, const char* src, const F& f, size_t level = 0) const {
    if (level == loops.size()) return f(dst, src, run_bytes);
    const Loop& loop = loops[level];
    for (int64_t i = 0; i < loop.size; ++i) {
      for_each_run(dst + i * loop.dst_stride, src + i * loop.src_stride, f, level + 1);
    }
  }
};

// Holds a copy of an input that reaches into a tensor which is written: every row is read before any is written.
class ReadFirst {
 public:
  void apply(TensorView& input, const TensorView& written);

 private:
  Buffer copy_;
  List<int64_t> strides_;
};

}  // namespace pagedkv
