// Checks of the values of index tensors (pagedkv_ops/value_checks.py).
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <utility>

#include "checks.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace pagedkv {

namespace {

struct Dimension {
  int64_t stride, size_a, size_b;
  bool operator<(const Dimension& other) const { return stride < other.stride; }
};

int64_t floor_div(int64_t a, int64_t b) { return a / b - (a % b != 0 && (a < 0) != (b < 0)); }

// Whether distance = sum(i_a * stride - i_b * stride) has a solution with every index inside its size.
bool reachable(int64_t distance, const Dimension* dims, int64_t n) {
  if (n == 0) return distance == 0;
  const int64_t below = floor_div(distance, dims->stride);
  // smaller strides together reach less than one step of this one, so only the two nearest multiples can work
  for (int64_t step = below; step <= below + 1; ++step) {
    if (-dims->size_b < step && step < dims->size_a && reachable(distance - step * dims->stride, dims + 1, n - 1)) {
      return true;
    }
  }
  return false;
}

std::string in_blocks(int64_t num_blocks, const char* note) {
  return num_blocks ? "be in 0.." + std::to_string(num_blocks - 1) + note : "be absent (there are no blocks)";
}

std::string at(const char* name, int64_t i) { return std::string(name) + "[" + std::to_string(i) + "]"; }

}  // namespace

void check_places(const char* op, const char* argument, const TensorView& cache, int64_t index) {
  if (cache.empty()) return;
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

Sharing sharing(const TensorView& a, const TensorView& b) {
  if (!a.touches(b)) return Sharing::kNo;
  if (a.data == b.data) return Sharing::kYes;
  const int64_t bytes = b.data - a.data, itemsize = a.itemsize();
  if (a.dim != b.dim || b.itemsize() != itemsize || bytes % itemsize != 0) return Sharing::kUndecided;
  List<Dimension> dims;
  for (int64_t d = 0; d < a.dim; ++d) {
    if (a.size(d) == 1 && b.size(d) == 1) continue;  // its stride means nothing
    const int64_t stride = a.size(d) == 1 ? b.stride(d) : a.stride(d);
    if (b.size(d) > 1 && b.stride(d) != stride) return Sharing::kUndecided;
    dims.push_back({stride, a.size(d), b.size(d)});
  }
  std::sort(dims.begin(), dims.end());
  int64_t reach = 0;  // of the smaller strides
  for (const Dimension& dim : dims) {
    if (dim.stride <= reach) return Sharing::kUndecided;
    reach += (max_of(dim.size_a, dim.size_b) - 1) * dim.stride;
  }
  std::reverse(dims.begin(), dims.end());
  return reachable(bytes / itemsize, dims.data(), dims.size()) ? Sharing::kYes : Sharing::kNo;
}

void check_distinct_caches(const char* op, const CacheViews& caches, const MaybeView& k_scale_cache,
                           const MaybeView& v_scale_cache) {
  check_places(op, "key_cache", caches.key);
  check_places(op, "value_cache", caches.value);
  if (sharing(caches.key, caches.value) == Sharing::kYes) {
    throw std::runtime_error(std::string(op) + ": key_cache and value_cache must not share elements");
  }
  if (k_scale_cache) check_places(op, "k_scale_cache", *k_scale_cache);
  if (v_scale_cache) check_places(op, "v_scale_cache", *v_scale_cache);
  if (k_scale_cache && v_scale_cache && sharing(*k_scale_cache, *v_scale_cache) == Sharing::kYes) {
    throw std::runtime_error(std::string(op) + ": k_scale_cache and v_scale_cache must not share elements");
  }
}

void check_fixed_scale(const char* op, const char* argument, const MaybeView& scale) {
  for (int64_t i = 0; scale && i < scale->size(0); ++i) {
    const float value = reinterpret_cast<const float*>(scale->data)[i * scale->stride(0)];
    PAGEDKV_EXPECT(op, value > 0 && std::isfinite(value), at(argument, i), "be positive and finite", float_text(value));
  }
}

void check_numbers(const char* op, const char* argument, const TensorView& rows, const int64_t* slots,
                   int64_t num_slots, const TensorView& cache) {
  if (!cache.is_int8()) return;
  const auto has_nan = [&, find = kernels().has_nan](int64_t token, int64_t head, int64_t first, int64_t n) {
    const int64_t element = token * rows.stride(0) + head * rows.stride(1) + first;
    return find(rows.data + element * rows.itemsize(), rows.element_type(), n);
  };
  const auto named = [&](int64_t token) {
    for (int64_t head = 0; head < rows.size(1); ++head) {
      for (int64_t i = 0; i < rows.size(2); ++i) {
        if (!has_nan(token, head, i, 1)) continue;
        fail(op, std::string(argument) + sizes_text(std::array<int64_t, 3>{token, head, i}.data(), 3),
             "be a number, which int8 can hold", "nan");
      }
    }
  };
  // Heads that lie next to each other are one row.
  const bool joined = rows.stride(1) == rows.size(2);
  const int64_t count = joined ? 1 : rows.size(1), size = joined ? rows.size(1) * rows.size(2) : rows.size(2);
  std::atomic<int64_t> first{num_slots};
  parallel_ranges(num_slots, num_slots * count * size * rows.itemsize(), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      if (slots[token] < 0) continue;
      bool found = false;
      for (int64_t head = 0; head < count; ++head) found |= has_nan(token, head, 0, size);
      if (!found) continue;
      for (int64_t other = first; token < other && !first.compare_exchange_weak(other, token);) {
      }
      return;
    }
  });
  if (first < num_slots) named(first);
}

void read_slots(const char* op, const TensorView& slot_mapping, const TensorView& cache, int64_t* out) {
  const int64_t num_slots = times(cache.size(0), cache.size(1));
  slot_mapping.read_indices(out, 0, slot_mapping.size(0));
  for (int64_t i = 0; i < slot_mapping.size(0); ++i) {
    PAGEDKV_EXPECT(op, out[i] < num_slots, at("slot_mapping", i),
                   "be below " + std::to_string(num_slots) + " (num_blocks * block_size)", std::to_string(out[i]));
  }
}

void read_seq_lens(const char* op, const TableViews& table, int64_t block_size, int64_t* out) {
  const int64_t capacity = min_of(times(table.block_table.size(1), block_size), 2 * kLongestWindow);
  table.seq_lens.read_indices(out, 0, table.seq_lens.size(0));
  for (int64_t b = 0; b < table.seq_lens.size(0); ++b) {
    PAGEDKV_EXPECT(op, 0 <= out[b] && out[b] <= capacity, at("seq_lens", b),
                   "be in 0.." + std::to_string(capacity) + " (block_table.size(1) * block_size)",
                   std::to_string(out[b]));
  }
}

void read_cu_seqlens_q(const char* op, const TensorView& cu_seqlens_q, int64_t num_tokens, int64_t* out) {
  const int64_t last = cu_seqlens_q.size(0) - 1;
  cu_seqlens_q.read_indices(out, 0, last + 1);
  PAGEDKV_EXPECT(op, out[0] == 0, "cu_seqlens_q[0]", "be 0", std::to_string(out[0]));
  for (int64_t b = 1; b <= last; ++b) {
    PAGEDKV_EXPECT(op, out[b] >= out[b - 1], at("cu_seqlens_q", b),
                   "be at least " + at("cu_seqlens_q", b - 1) + " = " + std::to_string(out[b - 1]),
                   std::to_string(out[b]));
  }
  PAGEDKV_EXPECT(op, out[last] <= num_tokens, at("cu_seqlens_q", last),
                 "be at most " + std::to_string(num_tokens) + " (query.size(0))", std::to_string(out[last]));
}

void read_block_ids(const char* op, const TensorView& block_table, int64_t seq, int64_t begin, int64_t end,
                    int64_t num_blocks, int64_t* out) {
  block_table.read_indices(out, begin, end, seq);
  for (int64_t i = begin; i < end; ++i) {
    const int64_t id = out[i - begin];
    PAGEDKV_EXPECT(op, 0 <= id && id < num_blocks,
                   "block_table[" + std::to_string(seq) + ", " + std::to_string(i) + "]",
                   in_blocks(num_blocks, " (num_blocks - 1)"), std::to_string(id));
  }
}

List<BlockPair> read_block_mapping(const char* op, const TensorView& block_mapping, int64_t num_src, int64_t num_dst) {
  const auto name = [](int64_t i, const char* column) {
    return "block_mapping[" + std::to_string(i) + ", " + column + "]";
  };
  List<BlockPair> pairs(block_mapping.size(0));
  List<std::pair<int64_t, int64_t>> written;  // (destination, its pair)
  written.reserve(pairs.size());
  for (int64_t i = 0; i < block_mapping.size(0); ++i) {
    int64_t entry[2];
    block_mapping.read_indices(entry, 0, 2, i);
    const auto [src, dst] = pairs[i] = {entry[0], entry[1]};
    PAGEDKV_EXPECT(op, 0 <= src && src < num_src, name(i, "0"), in_blocks(num_src, ""), std::to_string(src));
    PAGEDKV_EXPECT(op, 0 <= dst && dst < num_dst, name(i, "1"), in_blocks(num_dst, ""), std::to_string(dst));
    written.emplace_back(dst, i);
  }
  std::sort(written.begin(), written.end());
  const auto same = [](const auto& a, const auto& b) { return a.first == b.first; };
  const auto twice = std::adjacent_find(written.begin(), written.end(), same);
  PAGEDKV_EXPECT(op, twice == written.end(), name(twice[1].second, "1"), "name each destination block once",
                 std::to_string(twice->first));
  return pairs;
}

}  // namespace pagedkv
