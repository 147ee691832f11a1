// copy_blocks, swap_blocks, gather_kv: bytes move, without arithmetic but for the scales of what gather_kv reads.
#include <algorithm>
#include <cstring>

#include "block_layout.h"
#include "ops.h"
#include "parallel.h"

namespace pagedkv {

namespace {

constexpr int64_t kStreamBytes = 256 * 1024;
constexpr int64_t kLongestResult = int64_t{1} << 48;  // tokens of gather_kv

struct BlockCopy {
  TensorView src, dst;
  BlockLayout layout;

  BlockCopy(const TensorView& s, const TensorView& d) : src(s), dst(d), layout(s, d, 1) {}
  const char* src_block(int64_t id) const { return src.data + id * src.stride(0) * src.itemsize(); }
  char* dst_block(int64_t id) const { return dst.data + id * dst.stride(0) * dst.itemsize(); }
};

// What to do about memory that is both read and written.
enum class Order {
  kAny,
  kReadFirst,        // sources are set aside before anything is written
  kReadFirstByEntry  // and tensors are written one after the other, because they share memory
};

// Whether a block is read that another pair writes.
bool chained(const List<BlockPair>& pairs) {
  List<int64_t> written;
  written.reserve(pairs.size());
  for (const BlockPair& pair : pairs) written.push_back(pair.dst);
  std::sort(written.begin(), written.end());
  return std::any_of(pairs.begin(), pairs.end(), [&](const BlockPair& pair) {
    return pair.src != pair.dst && std::binary_search(written.begin(), written.end(), pair.src);
  });
}

// Whether two tensors of a list may have elements in common: a tensor twice, or views of one storage.
bool any_shared(const List<TensorView>& views) {
  List<const TensorView*> by_address;
  for (const TensorView& view : views) {
    if (!view.empty()) by_address.push_back(&view);
  }
  std::sort(by_address.begin(), by_address.end(), [](auto* a, auto* b) { return a->data < b->data; });
  for (size_t i = 0; i < by_address.size(); ++i) {
    const char* end = by_address[i]->end();
    for (size_t j = i + 1; j < by_address.size() && by_address[j]->data < end; ++j) {
      if (sharing(*by_address[i], *by_address[j]) != Sharing::kNo) return true;
    }
  }
  return false;
}

void copy_pairs(const List<BlockCopy>& copies, const List<BlockPair>& pairs, Order order) {
  const int64_t n = pairs.size(), num_copies = copies.size();
  List<int64_t> offsets(num_copies + 1);  // of each tensor's blocks in the staging memory
  for (int64_t c = 0; c < num_copies; ++c) offsets[c + 1] = offsets[c] + n * copies[c].layout.bytes();
  const int64_t bytes = offsets.back();
  const auto copy_run = kernels().copy;
  // f(copy, pair, place of its block in the staging memory) for tensors [first, last)
  const auto for_each = [&](int64_t first, int64_t last, const auto& f) {
    parallel_ranges(n * (last - first), bytes, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const int64_t c = first + t / n, i = t % n;
        f(copies[c], pairs[i], offsets[c] + i * copies[c].layout.bytes());
      }
    });
  };
  if (order == Order::kAny) {
    const bool stream = bytes >= kStreamBytes;
    for_each(0, num_copies, [&](const BlockCopy& copy, const BlockPair& pair, int64_t) {
      const char* src = copy.src_block(pair.src);
      char* dst = copy.dst_block(pair.dst);
      if (src == dst) return;
      copy.layout.for_each_run(dst, src, [&](char* d, const char* s, int64_t b) { copy_run(d, s, b, stream); });
    });
    return;
  }
  Buffer buffer;
  char* const staged = buffer.reserve(bytes);
  for_each(0, num_copies, [&](const BlockCopy& copy, const BlockPair& pair, int64_t place) {
    char* aside = staged + place;
    copy.layout.for_each_run(copy.dst_block(pair.dst), copy.src_block(pair.src), [&](char*, const char* s, int64_t b) {
      copy_run(aside, s, b, false);
      aside += b;
    });
  });
  const int64_t step = order == Order::kReadFirstByEntry ? 1 : num_copies;
  for (int64_t first = 0; first < num_copies; first += step) {
    for_each(first, first + step, [&](const BlockCopy& copy, const BlockPair& pair, int64_t place) {
      const char* aside = staged + place;
      copy.layout.for_each_run(copy.dst_block(pair.dst), copy.src_block(pair.src),
                               [&](char* d, const char*, int64_t b) {
                                 copy_run(d, aside, b, false);
                                 aside += b;
                               });
    });
  }
}

}  // namespace

void copy_blocks(const std::vector<Tensor>& caches, const Tensor& block_mapping) {
  const List<TensorView> views = check_copy_blocks(caches, block_mapping);
  for (size_t i = 0; i < views.size(); ++i) check_places("copy_blocks", "caches", views[i], i);
  int64_t fewest = views[0].size(0);
  for (const TensorView& view : views) fewest = min_of(fewest, view.size(0));
  const auto pairs = read_block_mapping("copy_blocks", TensorView(block_mapping), fewest, fewest);
  bool counted = false;
  for (const TensorView& view : views) counted = count_write(view, counted);
  if (pairs.empty()) return;
  List<BlockCopy> copies;
  copies.reserve(views.size());
  for (const TensorView& view : views) {
    if (!view.empty()) copies.emplace_back(view, view);
  }
  copy_pairs(copies, pairs,
             any_shared(views) ? Order::kReadFirstByEntry
             : chained(pairs)  ? Order::kReadFirst
                               : Order::kAny);
}

void swap_blocks(const Tensor& src, const Tensor& dst, const Tensor& block_mapping) {
  const TensorView from = given("swap_blocks", "src", src), to = given("swap_blocks", "dst", dst);
  check_swap_blocks(from, to, block_mapping);
  check_places("swap_blocks", "dst", to);
  const auto pairs = read_block_mapping("swap_blocks", TensorView(block_mapping), from.size(0), to.size(0));
  count_write(to);
  if (pairs.empty() || to.empty()) return;
  copy_pairs({BlockCopy(from, to)}, pairs, from.touches(to) ? Order::kReadFirst : Order::kAny);
}

Tensor gather_kv(const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens, int64_t max_len,
                 const MaybeTensor& scale, std::optional<torch::headeronly::ScalarType> dtype) {
  const char* op = "gather_kv";
  const TensorView view = check_gather_cache(cache);
  const TableViews table = check_table(op, block_table, seq_lens, "cache");
  PAGEDKV_EXPECT(op, 0 <= max_len && max_len <= kLongestResult, "max_len", "be in 0..281474976710656",
                 std::to_string(max_len));
  const MaybeView scales = check_read_scale(op, "scale", scale, view, "cache");
  const int32_t out_dtype = check_gather_dtype(view, dtype);
  const int64_t block_size = view.size(1), num_seqs = table.seq_lens.size(0);
  int64_t* lengths = call_scratch().lengths.reserve_for<int64_t>(times(2, num_seqs));
  int64_t* row_starts = lengths + num_seqs;
  read_seq_lens(op, table, block_size, lengths);
  const auto columns = [&](int64_t b) { return ceil_div(min_of(lengths[b], max_len), block_size); };
  int64_t used = 0;
  for (int64_t b = 0; b < num_seqs; ++b) {
    row_starts[b] = used;
    if (__builtin_add_overflow(used, columns(b), &used)) throw OutOfMemory{INT64_MAX};
  }
  int64_t* ids = call_scratch().blocks.reserve_for<int64_t>(used);
  for (int64_t b = 0; b < num_seqs; ++b) {
    read_block_ids(op, table.block_table, b, 0, columns(b), view.size(0), ids + row_starts[b]);
  }
  const int64_t sizes[] = {num_seqs, max_len, view.size(2), view.size(3)};
  Tensor result = empty_cpu(sizes, 4, out_dtype, " for max_len tokens");
  const TensorView out(result);
  if (out.empty()) return result;
  const int64_t itemsize = view.itemsize(), num_heads = view.size(2), head_size = view.size(3);
  const int64_t head_bytes = head_size * out.itemsize(), row_bytes = num_heads * head_bytes;
  std::optional<BlockLayout> row;
  if (!scales) row.emplace(view, out, 2);
  const ScaleView scale_of = scale_view(scales);
  const auto copy_run = kernels().copy;
  const auto dequantise = kernels().dequantise;
  parallel_ranges(num_seqs * max_len, out.bytes(), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / max_len, position = i % max_len;
      char* dst = out.data + i * row_bytes;
      if (position >= lengths[b]) {
        std::memset(dst, 0, row_bytes);
        continue;
      }
      const int64_t id = ids[row_starts[b] + position / block_size], offset = position % block_size;
      const char* src = view.data + (id * view.stride(0) + offset * view.stride(1)) * itemsize;
      if (row) {
        row->for_each_run(dst, src, [&](char* d, const char* s, int64_t bytes) { copy_run(d, s, bytes, false); });
        continue;
      }
      const float* factor = scale_of.data + id * scale_of.block_stride + offset * scale_of.token_stride;
      for (int64_t head = 0; head < num_heads; ++head) {
        dequantise(dst + head * head_bytes, out.element_type(), src + head * view.stride(2) * itemsize,
                   view.element_type(), factor[head * scale_of.head_stride], head_size);
      }
    }
  });
  return result;
}

}  // namespace pagedkv
