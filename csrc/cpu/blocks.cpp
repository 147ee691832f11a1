// copy_blocks, swap_blocks, gather_kv: bytes move, no arithmetic.
#include <cstring>
#include <vector>

#include "block_layout.h"
#include "ops.h"
#include "parallel.h"

namespace pagedkv {

namespace {

constexpr int64_t kStreamBytes = 256 * 1024;

struct Pairs {
  TensorView mapping;
  IndexArray entries;

  explicit Pairs(const TensorView& m) : mapping(m), entries{m.data, 1, m.itemsize() == 8} {}
  int64_t size() const { return mapping.size(0); }
  int64_t src(int64_t i) const { return entries[i * mapping.stride(0)]; }
  int64_t dst(int64_t i) const { return entries[i * mapping.stride(0) + mapping.stride(1)]; }

  // Whether a block is read that is also written: then every source must be set aside first.
  bool overlap(int64_t num_blocks) const {
    std::vector<bool> written(num_blocks);
    for (int64_t i = 0; i < size(); ++i) written[dst(i)] = true;
    for (int64_t i = 0; i < size(); ++i) {
      if (written[src(i)] && src(i) != dst(i)) return true;
    }
    return false;
  }
};

struct BlockCopy {
  TensorView src, dst;
  BlockLayout layout;
  char* staging = nullptr;

  BlockCopy(const TensorView& s, const TensorView& d) : src(s), dst(d), layout(s, d, 1) {}
  const char* src_block(int64_t id) const { return src.data + id * src.stride(0) * src.itemsize(); }
  char* dst_block(int64_t id) const { return dst.data + id * dst.stride(0) * dst.itemsize(); }
};

void copy_pairs(std::vector<BlockCopy>& copies, const Pairs& pairs, bool stage) {
  int64_t bytes_per_pair = 0;
  for (const BlockCopy& copy : copies) bytes_per_pair += copy.layout.bytes();
  const int64_t n = pairs.size(), bytes = n * bytes_per_pair;
  const auto copy_run = kernels().copy;
  const bool stream = bytes >= kStreamBytes;
  const int64_t tasks = n * static_cast<int64_t>(copies.size());
  if (!stage) {
    parallel_ranges(tasks, bytes, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const BlockCopy& copy = copies[t / n];
        const int64_t i = t % n;
        if (copy.src_block(pairs.src(i)) == copy.dst_block(pairs.dst(i))) continue;
        copy.layout.for_each_run(copy.dst_block(pairs.dst(i)), copy.src_block(pairs.src(i)),
                                 [&](char* d, const char* s, int64_t b) { copy_run(d, s, b, stream); });
      }
    });
    return;
  }
  std::vector<char> staged(bytes);
  char* next = staged.data();
  for (BlockCopy& copy : copies) {
    copy.staging = next;
    next += n * copy.layout.bytes();
  }
  const auto move = [&](bool out) {
    parallel_ranges(tasks, bytes, [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const BlockCopy& copy = copies[t / n];
        const int64_t i = t % n;
        char* aside = copy.staging + i * copy.layout.bytes();
        copy.layout.for_each_run(copy.dst_block(pairs.dst(i)), copy.src_block(pairs.src(i)),
                                 [&](char* d, const char* s, int64_t b) {
                                   copy_run(out ? d : aside, out ? aside : s, b, false);
                                   aside += b;
                                 });
      }
    });
  };
  move(false);
  move(true);
}

}  // namespace

void copy_blocks(const std::vector<Tensor>& caches, const Tensor& block_mapping) {
  const std::vector<TensorView> views = check_copy_blocks(caches, block_mapping);
  const Pairs pairs{TensorView(block_mapping)};
  for (size_t i = 0; i < views.size(); ++i) check_places("copy_blocks", "caches", views[i], i);
  int64_t fewest = views[0].size(0);
  for (const TensorView& view : views) fewest = min_of(fewest, view.size(0));
  check_block_mapping("copy_blocks", pairs.mapping, fewest, fewest);
  std::vector<BlockCopy> copies;
  copies.reserve(views.size());
  for (const TensorView& view : views) copies.emplace_back(view, view);
  copy_pairs(copies, pairs, pairs.overlap(fewest));
}

void swap_blocks(const Tensor& src, const Tensor& dst, const Tensor& block_mapping) {
  const TensorView from = given("swap_blocks", "src", src), to = given("swap_blocks", "dst", dst);
  check_swap_blocks(from, to, block_mapping);
  const Pairs pairs{TensorView(block_mapping)};
  check_places("swap_blocks", "dst", to);
  check_block_mapping("swap_blocks", pairs.mapping, from.size(0), to.size(0));
  std::vector<BlockCopy> copies;
  copies.emplace_back(from, to);
  const char* from_end = from.data + from.size(0) * from.stride(0) * from.itemsize();
  const char* to_end = to.data + to.size(0) * to.stride(0) * to.itemsize();
  const bool apart = from_end <= to.data || to_end <= from.data;
  copy_pairs(copies, pairs, !apart);
}

Tensor gather_kv(const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens, int64_t max_len) {
  const char* op = "gather_kv";
  const TensorView view = check_gather_cache(cache);
  const TableViews table = check_table(op, block_table, seq_lens, "cache");
  PAGEDKV_EXPECT(op, max_len >= 0, "max_len", "be 0 or more", std::to_string(max_len));
  const int64_t block_size = view.size(1), num_seqs = table.seq_lens.size(0);
  const IndexArray lengths = table.seq_lens.indices();
  check_seq_lens(op, table, block_size);
  for (int64_t b = 0; b < num_seqs; ++b) {
    check_block_ids(op, table.block_table, b, 0, ceil_div(min_of(lengths[b], max_len), block_size), view.size(0));
  }
  const int64_t sizes[] = {num_seqs, max_len, view.size(2), view.size(3)};
  Tensor result = empty_cpu(sizes, 4, view.dtype);
  const TensorView out(result);
  const BlockLayout row(view, out, 2);
  const int64_t itemsize = view.itemsize(), row_bytes = view.size(2) * view.size(3) * itemsize;
  IndexArray ids = table.block_table.indices();
  ids.stride = 1;
  const auto copy_run = kernels().copy;
  parallel_ranges(num_seqs * max_len, out.numel() * itemsize, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t b = i / max_len, position = i % max_len;
      char* dst = out.data + i * row_bytes;
      if (position >= lengths[b]) {
        std::memset(dst, 0, row_bytes);
        continue;
      }
      const int64_t id = ids[b * table.block_table.stride(0) + position / block_size * table.block_table.stride(1)];
      const char* src = view.data + (id * view.stride(0) + position % block_size * view.stride(1)) * itemsize;
      row.for_each_run(dst, src, [&](char* d, const char* s, int64_t bytes) { copy_run(d, s, bytes, false); });
    }
  });
  return result;
}

}  // namespace pagedkv
