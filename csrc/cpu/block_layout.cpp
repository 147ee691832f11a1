#include "block_layout.h"

#include <algorithm>
#include <array>
#include <stdexcept>

namespace pagedkv {

BlockLayout::BlockLayout(const TensorView& src, const TensorView& dst, int64_t first_dim) {
  if (src.dim - first_dim > kMaxDims) throw std::runtime_error("pagedkv: tensors of more than 16 dimensions");
  std::array<int64_t, kMaxDims> order;
  int64_t n = 0;
  for (int64_t d = first_dim; d < src.dim; ++d) {
    if (src.size(d) != 1) order[n++] = d;
  }
  // Outermost first, so that neighbours can be joined: an HND view then is as contiguous as its storage.
  std::sort(order.begin(), order.begin() + n, [&](int64_t a, int64_t b) { return src.stride(a) > src.stride(b); });
  const int64_t itemsize = src.itemsize();
  run_bytes = itemsize;
  while (n > 0 && src.stride(order[n - 1]) * itemsize == run_bytes &&
         dst.stride(order[n - 1]) * itemsize == run_bytes) {
    run_bytes *= src.size(order[--n]);
  }
  for (; dims < n; ++dims) {
    sizes[dims] = src.size(order[dims]);
    src_strides[dims] = src.stride(order[dims]) * itemsize;
    dst_strides[dims] = dst.stride(order[dims]) * itemsize;
  }
}

int64_t BlockLayout::bytes() const {
  int64_t total = run_bytes;
  for (int64_t d = 0; d < dims; ++d) total *= sizes[d];
  return total;
}

}  // namespace pagedkv
