// Checks of the values of index tensors (pagedkv_ops/value_checks.py).
#include <algorithm>
#include <array>
#include <stdexcept>

#include "checks.h"

namespace pagedkv {

namespace {

struct Dimension {
  int64_t stride, size_a, size_b;
  auto operator<=>(const Dimension&) const = default;
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// Whether distance = sum(i_a * stride - i_b * stride) has a solution with every index inside its size.
bool reachable(int64_t distance, const Dimension* dims, int64_t n) {
  if (n == 0) return distance == 0;
  if (dims->stride == 0) return reachable(distance, dims + 1, n - 1);
  const int64_t below = floor_div(distance, dims->stride);
  // smaller strides together reach less than one step of this one, so only the two nearest multiples can work
  for (int64_t step = below; step <= below + 1; ++step) {
    if (-dims->size_b < step && step < dims->size_a && reachable(distance - step * dims->stride, dims + 1, n - 1)) {
      return true;
    }
  }
  return false;
}

// One past the last byte that a view with no negative strides touches.
const char* end_of(const TensorView& t) {
  int64_t last = 0;
  for (int64_t d = 0; d < t.dim; ++d) last += (t.size(d) - 1) * t.stride(d);
  return t.data + (last + 1) * t.itemsize();
}

bool share_elements(const TensorView& a, const TensorView& b) {
  if (a.numel() == 0 || b.numel() == 0) return false;
  if (end_of(a) <= b.data || end_of(b) <= a.data) return false;
  const int64_t bytes = b.data - a.data, itemsize = a.itemsize();
  if (bytes == 0) return true;
  if (bytes % itemsize != 0 || !std::equal(a.strides, a.strides + a.dim, b.strides)) return false;
  std::array<Dimension, 4> dims;
  for (int64_t d = 0; d < 4; ++d) dims[d] = {a.stride(d), a.size(d), b.size(d)};
  std::sort(dims.begin(), dims.end(), std::greater<>());
  return reachable(bytes / itemsize, dims.data(), 4);
}

std::string in_blocks(int64_t num_blocks, const char* note) {
  return num_blocks ? "be in 0.." + std::to_string(num_blocks - 1) + note : "be absent (there are no blocks)";
}

std::string at(const char* name, int64_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; }

}  // namespace

void check_places(const char* op, const char* argument, const TensorView& cache, int64_t index) {
  if (cache.numel() == 0) return;
  for (int64_t i = 0; i < cache.dim; ++i) {
    if (cache.size(i) <= 1) continue;
    int64_t reach = 0;  // of the dimensions with smaller strides
    for (int64_t j = 0; j < cache.dim; ++j) {
      const bool smaller = cache.stride(j) < cache.stride(i) || (cache.stride(j) == cache.stride(i) && j > i);
      if (smaller) reach += (cache.size(j) - 1) * cache.stride(j);
    }
    PAGEDKV_EXPECT(op, cache.stride(i) > reach, index < 0 ? argument : at(argument, index),
                   "have a place of its own in memory for each element",
                   "strides " + sizes_text(cache.strides, cache.dim));
  }
}

void check_distinct_caches(const char* op, const CacheViews& caches) {
  check_places(op, "key_cache", caches.key);
  check_places(op, "value_cache", caches.value);
  if (share_elements(caches.key, caches.value)) {
    throw std::runtime_error(std::string(op) + ": key_cache and value_cache must not share elements");
  }
}

void check_slots(const char* op, const TensorView& slot_mapping, const TensorView& cache) {
  const int64_t num_slots = cache.size(0) * cache.size(1);
  const IndexArray slots = slot_mapping.indices();
  for (int64_t i = 0; i < slot_mapping.size(0); ++i) {
    PAGEDKV_EXPECT(op, slots[i] < num_slots, at("slot_mapping", i),
                   "be below " + std::to_string(num_slots) + " (num_blocks * block_size)", std::to_string(slots[i]));
  }
}

void check_seq_lens(const char* op, const TableViews& table, int64_t block_size) {
  const int64_t capacity = table.block_table.size(1) * block_size;
  const IndexArray lengths = table.seq_lens.indices();
  for (int64_t b = 0; b < table.seq_lens.size(0); ++b) {
    PAGEDKV_EXPECT(op, 0 <= lengths[b] && lengths[b] <= capacity, at("seq_lens", b),
                   "be in 0.." + std::to_string(capacity) + " (block_table.size(1) * block_size)",
                   std::to_string(lengths[b]));
  }
}

void check_cu_seqlens_q(const char* op, const TensorView& cu_seqlens_q, int64_t num_tokens) {
  const IndexArray values = cu_seqlens_q.indices();
  const int64_t last = cu_seqlens_q.size(0) - 1;
  PAGEDKV_EXPECT(op, values[0] == 0, "cu_seqlens_q[0]", "be 0", std::to_string(values[0]));
  for (int64_t b = 1; b <= last; ++b) {
    PAGEDKV_EXPECT(op, values[b] >= values[b - 1], at("cu_seqlens_q", b),
                   "be at least " + at("cu_seqlens_q", b - 1) + " = " + std::to_string(values[b - 1]),
                   std::to_string(values[b]));
  }
  PAGEDKV_EXPECT(op, values[last] <= num_tokens, at("cu_seqlens_q", last),
                 "be at most " + std::to_string(num_tokens) + " (query.size(0))", std::to_string(values[last]));
}

void check_block_ids(const char* op, const TensorView& block_table, int64_t seq, int64_t begin, int64_t end,
                     int64_t num_blocks) {
  IndexArray row = block_table.indices();
  row.data = static_cast<const char*>(row.data) + seq * block_table.stride(0) * block_table.itemsize();
  row.stride = block_table.stride(1);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t id = row[i];
    PAGEDKV_EXPECT(op, 0 <= id && id < num_blocks,
                   "block_table[" + std::to_string(seq) + ", " + std::to_string(i) + "]",
                   in_blocks(num_blocks, " (num_blocks - 1)"), std::to_string(id));
  }
}

void check_block_mapping(const char* op, const TensorView& block_mapping, int64_t num_src, int64_t num_dst) {
  const auto entry = [&](int64_t i, int64_t column) {
    return block_mapping.indices().data == nullptr
               ? 0
               : IndexArray{
                     block_mapping.data, 1,
                     block_mapping.itemsize() == 8}[i * block_mapping.stride(0) + column * block_mapping.stride(1)];
  };
  const auto name = [](int64_t i, const char* column) {
    return "block_mapping[" + std::to_string(i) + ", " + column + "]";
  };
  std::vector<bool> written(num_dst);
  for (int64_t i = 0; i < block_mapping.size(0); ++i) {
    const int64_t src = entry(i, 0), dst = entry(i, 1);
    PAGEDKV_EXPECT(op, 0 <= src && src < num_src, name(i, "0"), in_blocks(num_src, ""), std::to_string(src));
    PAGEDKV_EXPECT(op, 0 <= dst && dst < num_dst, name(i, "1"), in_blocks(num_dst, ""), std::to_string(dst));
    PAGEDKV_EXPECT(op, !written[dst], name(i, "1"), "name each destination block once", std::to_string(dst));
    written[dst] = true;
  }
}

}  // namespace pagedkv
