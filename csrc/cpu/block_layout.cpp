#include "block_layout.h"

#include <algorithm>
#include <cstring>

namespace pagedkv {

BlockLayout::BlockLayout(const TensorView& src, const TensorView& dst, int64_t first_dim) {
  const int64_t itemsize = src.itemsize();
  for (int64_t d = first_dim; d < src.dim; ++d) {
    if (src.size(d) != 1) loops.push_back({src.size(d), src.stride(d) * itemsize, dst.stride(d) * itemsize});
  }
  // Outermost first, so that neighbours can be joined: an HND view then is as contiguous as its storage.
  std::stable_sort(loops.begin(), loops.end(),
                   [](const Loop& a, const Loop& b) { return a.src_stride > b.src_stride; });
  run_bytes = itemsize;
  while (!loops.empty() && loops.back().src_stride == run_bytes && loops.back().dst_stride == run_bytes) {
    run_bytes *= loops.back().size;
    loops.pop_back();
  }
}

int64_t BlockLayout::bytes() const {
  int64_t total = run_bytes;
  for (const Loop& loop : loops) total *= loop.size;
  return total;
}

void ReadFirst::apply(TensorView& input, const TensorView& written) {
  if (!strides_.empty() || !input.touches(written)) return;
  strides_.assign(input.dim, 1);
  for (int64_t d = input.dim - 2; d >= 0; --d) strides_[d] = strides_[d + 1] * input.size(d + 1);
  TensorView copy = input;
  copy.data = copy_.reserve(input.bytes());
  copy.strides = strides_.data();
  BlockLayout(input, copy, 0).for_each_run(copy.data, input.data, [](char* dst, const char* src, int64_t n) {
    std::memcpy(dst, src, n);
  });
  input = copy;
}

}  // namespace pagedkv
