// Attention of many query tokens over paged keys and values. The rows of a task are its query tokens times the heads
// that share its KV head. Pages are packed once per task, a tile of keys at a time; strips of rows then take the tile
// from scores over softmax to output while the scores are in the first-level cache.
//
// A row's result does not depend, bit for bit, on the rows and tasks around it: tiles of keys start at multiples of
// kKeyTile in the sequence, and keys that a row does not see add exact zeros.
#pragma once

#include "output.h"
#include "prefill_amx.h"
#include "prefill_pack.h"
#include "prefill_softmax.h"

namespace pagedkv::PAGEDKV_ISA {

// Measured at D 64 .. 576 in float32 and bfloat16: half the key tile costs 4%, because each tile rescales the output.
// The scores of a strip are 48 or 64 KB.
constexpr int64_t kKeyTile = 256;
constexpr int64_t kScoreStride = kKeyTile + kLanes;  // a power of two would put all rows into the same cache sets

template <class Units>
class Prefill {
 public:
  Prefill(const AttentionArgs& args, const PrefillTask& task) : args_(args), task_(task) {
    carve_scratch(thread_scratch(carve_scratch(nullptr)));
    __builtin_memset(zeros_, 0, zeros_size());
  }

  void run() {
    [[maybe_unused]] const typename Units::Setup setup;
    find_seen_keys();
    load_queries();
    const int64_t first_tile = seen_by_task_.begin / kKeyTile * kKeyTile;
    find_rows(first_tile);
    for (int64_t tile = first_tile; tile < seen_by_task_.end; tile += kKeyTile) {
      pack_rows(tile);
      load_scales(tile);
      find_rows(tile + kKeyTile);
      for (int64_t row = 0; row < padded_rows_; row += kStripRows) {
        attend(tile, row, min_of(row + kStripRows, padded_rows_));
      }
    }
    const int64_t first_token = args_.query_start(task_.seq);
    for (int64_t row = 0; row < num_rows_; ++row) {
      write_output_row(args_, first_token + token_of(row), head_of(row), out_ + row * out_width_, softmax_.maximum[row],
                       softmax_.sum[row]);
    }
  }

 private:
  const AttentionArgs& args_;
  const PrefillTask task_;
  const int64_t group_ = args_.group_size();
  const int64_t num_units_ = ceil_div(args_.head_size, Units::kElements);
  const int64_t depth_ = round_up(num_units_, kLanes);
  const int64_t out_width_ = round_up(args_.value_head_size, kLanes);
  const int64_t num_rows_ = (task_.end - task_.begin) * group_;
  const int64_t padded_rows_ = round_up(num_rows_, Units::kRowStep);
  KeyRange seen_by_task_{0, 0};

  float* queries_;           // [padded_rows, depth]
  float* keys_;              // [key tile][depth][kTileColumns]
  float* values_;            // [column tile][units of kKeyTile][columns of the tile]
  float* scores_;            // [kStripRows, kScoreStride]
  float* out_;               // [padded_rows, out_width]
  SoftmaxState softmax_;     // [state_rows()]
  KeyRange* seen_;           // [padded_rows]
  KeyRange* seen_by_group_;  // [padded_rows / kTileRows]
  const char** key_rows_;    // [kKeyTile], of the tile to be packed next
  const char** value_rows_;
  float* key_scales_ = nullptr;  // [kKeyTile] of a quantised cache, 0 for keys that the task does not see
  float* value_scales_ = nullptr;
  char* zeros_;  // stands for rows that must not be read

  static constexpr int64_t kTileUnits = kKeyTile / Units::kElements;
  static constexpr int64_t kTileRows = Units::kTileRows, kTileColumns = Units::kTileVecs * kLanes;
  static constexpr int64_t kStripRows = Units::kStripRows;

  size_t zeros_size() const { return sizeof(float) * max_of(args_.head_size, args_.value_head_size); }
  int64_t state_rows() const { return round_up(padded_rows_, kLanes); }
  int64_t num_groups() const { return ceil_div(padded_rows_, kTileRows); }
  int64_t token_of(int64_t row) const { return task_.begin + row / group_; }
  int64_t head_of(int64_t row) const { return task_.kv_head * group_ + row % group_; }
  KeyRange in_tile(KeyRange keys, int64_t tile) const {
    return {max_of<int64_t>(keys.begin - tile, 0), min_of(keys.end - tile, kKeyTile)};
  }
  // f(first key, last key, block, offset of the first key in it) for each block of which the task sees keys of the
  // tile.
  template <class F>
  PAGEDKV_INLINE void for_blocks(int64_t tile, const F& f) const {
    const KeyRange seen = in_tile(seen_by_task_, tile);
    for (int64_t key = seen.begin; key < seen.end;) {
      const int64_t column = (tile + key) / args_.block_size, offset = (tile + key) % args_.block_size;
      const int64_t end = min_of(seen.end, key + args_.block_size - offset);
      f(key, end, args_.block_id(task_.seq, column), offset);
      key = end;
    }
  }

  size_t carve_scratch(char* base);
  void find_seen_keys();
  void load_queries();
  void find_rows(int64_t tile);
  void pack_rows(int64_t tile);
  void load_scales(int64_t tile);
  PAGEDKV_INLINE void prefetch_rows(int64_t tile, int64_t share, int64_t num_shares) const;
  void multiply_keys(int64_t row, int64_t column, int64_t num_vecs, float* scores) const;
  void attend(int64_t tile, int64_t first_row, int64_t last_row);
  void softmax(int64_t tile, int64_t first_row, float* scores);
};

// Sets the pointers into `base` and returns the bytes needed.
template <class Units>
size_t Prefill<Units>::carve_scratch(char* base) {
  size_t used = 0;
  const auto take = [&]<class T>(T*& target, int64_t count) PAGEDKV_LAMBDA {
    target = reinterpret_cast<T*>(reinterpret_cast<uintptr_t>(base) + used);
    used += round_up(count * sizeof(T), 64);
  };
  take(queries_, padded_rows_ * depth_);
  take(keys_, kKeyTile * depth_);
  take(values_, kTileUnits * out_width_);
  take(scores_, kStripRows * kScoreStride);
  take(out_, padded_rows_ * out_width_);
  take(softmax_.maximum, state_rows());
  take(softmax_.sum, state_rows());
  take(softmax_.rescale, state_rows());
  take(seen_, padded_rows_);
  take(seen_by_group_, num_groups());
  take(key_rows_, kKeyTile);
  take(value_rows_, kKeyTile);
  if (args_.key.scale.data) {
    take(key_scales_, kKeyTile);
    take(value_scales_, kKeyTile);
  }
  take(zeros_, zeros_size());
  return used;
}

template <class Units>
void Prefill<Units>::find_seen_keys() {
  const int64_t seq_len = args_.seq_lens[task_.seq], query_length = args_.query_length(task_.seq);
  const auto add = [](KeyRange& all, KeyRange keys) PAGEDKV_LAMBDA {
    if (keys.begin >= keys.end) return;
    all.begin = all.begin < all.end ? min_of(all.begin, keys.begin) : keys.begin;
    all.end = max_of(all.end, keys.end);
  };
  for (int64_t group = 0; group < num_groups(); ++group) {
    seen_by_group_[group] = {0, 0};
    for (int64_t row = group * kTileRows; row < min_of((group + 1) * kTileRows, padded_rows_); ++row) {
      seen_[row] = row < num_rows_ ? visible_keys(args_, seq_len, query_length, token_of(row)) : KeyRange{0, 0};
      add(seen_by_group_[group], seen_[row]);
    }
    add(seen_by_task_, seen_by_group_[group]);
  }
}

// Queries as units, zero in the rows of the padding.
template <class Units>
void Prefill<Units>::load_queries() {
  __builtin_memset(out_, 0, padded_rows_ * out_width_ * sizeof(float));
  __builtin_memset(queries_ + num_rows_ * depth_, 0, (padded_rows_ - num_rows_) * depth_ * sizeof(float));
  const int64_t first_token = args_.query_start(task_.seq);
  for (int64_t row = 0; row < state_rows(); ++row) {
    softmax_.maximum[row] = kMinusInfinity;
    softmax_.sum[row] = 0;
    softmax_.rescale[row] = 1;
  }
  Units::with_source(args_.query_dtype, [&]<class T>() PAGEDKV_LAMBDA {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const T* query = reinterpret_cast<const T*>(args_.query) +
                       (first_token + token_of(row)) * args_.query_token_stride +
                       head_of(row) * args_.query_head_stride;
      float* target = queries_ + row * depth_;
      for (int64_t unit = 0; unit < depth_; unit += kLanes) {
        store(target + unit, load_units<Units>(query, unit, args_.head_size));
      }
    }
  });
}

// Addresses of the tile's rows; a row that nothing in the task sees is not looked up.
template <class Units>
void Prefill<Units>::find_rows(int64_t tile) {
  for (int64_t key = 0; key < kKeyTile; ++key) key_rows_[key] = value_rows_[key] = zeros_;
  for_blocks(tile, [&](int64_t first, int64_t last, int64_t block, int64_t offset) PAGEDKV_LAMBDA {
    const auto list = [&](const CacheView& cache, const char** rows) PAGEDKV_LAMBDA {
      const int64_t step = cache.itemsize() * cache.token_stride;
      const char* row = cache.data + offset * step +
                        cache.itemsize() * (block * cache.block_stride + task_.kv_head * cache.head_stride);
      for (int64_t key = first; key < last; ++key, row += step) rows[key] = row;
    };
    list(args_.key, key_rows_);
    list(args_.value, value_rows_);
  });
}

template <class Units>
void Prefill<Units>::load_scales(int64_t tile) {
  if (!key_scales_) return;
  for (int64_t key = 0; key < kKeyTile; ++key) key_scales_[key] = value_scales_[key] = 0.0f;
  for_blocks(tile, [&](int64_t first, int64_t last, int64_t block, int64_t offset) PAGEDKV_LAMBDA {
    const auto list = [&](const ScaleView& scale, float* scales) PAGEDKV_LAMBDA {
      const float* p =
          scale.data + block * scale.block_stride + offset * scale.token_stride + task_.kv_head * scale.head_stride;
      for (int64_t key = first; key < last; ++key, p += scale.token_stride) scales[key] = *p;
    };
    list(args_.key.scale, key_scales_);
    list(args_.value.scale, value_scales_);
  });
}

template <class Units>
void Prefill<Units>::pack_rows(int64_t tile) {
  const KeyRange seen = in_tile(seen_by_task_, tile);
  const int64_t first = seen.begin / (2 * kLanes) * (2 * kLanes), last = round_up(seen.end, 2 * kLanes);
  Units::with_source(args_.key.dtype, [&]<class T>() PAGEDKV_LAMBDA {
    pack_keys<Units, T>(key_rows_, first, last, args_.head_size, depth_, keys_);
  });
  Units::with_source(args_.value.dtype, [&]<class T>() PAGEDKV_LAMBDA {
    pack_values<Units, T>(value_rows_, first, last, args_.value_head_size, kTileUnits, values_);
  });
}

// Prefetches a share of the rows of the tile: about one row between two products, because bursts wait for each other.
// Always inline: GCC takes a function that only prefetches for one without effect and drops its calls.
template <class Units>
void Prefill<Units>::prefetch_rows(int64_t tile, int64_t share, int64_t num_shares) const {
  const KeyRange seen = in_tile(seen_by_task_, tile);
  const int64_t count = max_of<int64_t>(seen.end - seen.begin, 0);
  const int64_t key_bytes = args_.key.itemsize() * args_.head_size;
  const int64_t value_bytes = args_.value.itemsize() * args_.value_head_size;
  const int64_t last = seen.begin + count * (share + 1) / num_shares;
  for (int64_t key = seen.begin + count * share / num_shares; key < last; ++key) {
    for (int64_t i = 0; i < key_bytes; i += 64) prefetch(key_rows_[key] + i);
    for (int64_t i = 0; i < value_bytes; i += 64) prefetch(value_rows_[key] + i);
  }
}

// Scores of kTileRows rows and num_vecs vectors of keys. A long head is summed in parts, each from zero: a chain of 256
// products would round twice as much as the product of torch.
template <class Units>
void Prefill<Units>::multiply_keys(int64_t row, int64_t column, int64_t num_vecs, float* scores) const {
  constexpr float kOnes[6] = {1, 1, 1, 1, 1, 1};
  const int64_t num_rows = min_of(kTileRows, padded_rows_ - row);
  const int64_t parts = num_units_ <= Units::kLongestSum ? 1 : ceil_div(num_units_, Units::kLongestSum);
  for (int64_t part = 0; part < parts; ++part) {
    const int64_t first = num_units_ * part / parts;
    const int64_t depth = round_up(num_units_ * (part + 1) / parts - first, Units::kDepthStep);
    const float* queries = queries_ + row * depth_ + first;
    const float* keys = keys_ + column * depth_ + first * kTileColumns;
    if (part == 0) {
      Units::template multiply<false>(num_rows, num_vecs, depth, queries, depth_, keys, kTileColumns, scores,
                                      kScoreStride, nullptr);
    } else {
      Units::template multiply<true>(num_rows, num_vecs, depth, queries, depth_, keys, kTileColumns, scores,
                                     kScoreStride, kOnes);
    }
  }
}

template <class Units>
void Prefill<Units>::attend(int64_t tile, int64_t first_row, int64_t last_row) {
  const auto strip_scores = [&](int64_t row) PAGEDKV_LAMBDA { return scores_ + (row - first_row) * kScoreStride; };
  for (int64_t column = 0; column < kKeyTile; column += kTileColumns) {
    for (int64_t row = first_row; row < last_row; row += kTileRows) {
      prefetch_rows(tile + kKeyTile, (row * kKeyTile / kTileRows + column) / kTileColumns,
                    num_groups() * (kKeyTile / kTileColumns));
      const KeyRange seen = in_tile(seen_by_group_[row / kTileRows], tile);
      if (column >= seen.end || column + kTileColumns <= seen.begin) continue;
      multiply_keys(row, column, ceil_div(min_of(seen.end - column, kTileColumns), kLanes), strip_scores(row) + column);
    }
  }
  for (int64_t row = first_row; row < min_of(last_row, num_rows_); row += kLanes) {
    softmax(tile, row, strip_scores(row));
  }
  const ColumnTiles tiles{out_width_ / kLanes, Units::kTileVecs};
  for (int64_t i = 0; i < tiles.count(); ++i) {
    const int64_t first_vec = tiles.first_vec(i), num_vecs = tiles.first_vec(i + 1) - first_vec;
    for (int64_t row = first_row; row < last_row; row += kTileRows) {
      const KeyRange seen = in_tile(seen_by_group_[row / kTileRows], tile);
      if (seen.begin >= seen.end) continue;
      const int64_t first = seen.begin / (2 * kLanes) * (2 * kLanes) / Units::kElements;
      const int64_t depth = round_up(ceil_div(seen.end, Units::kElements) - first, Units::kDepthStep);
      Units::template multiply<true>(min_of(kTileRows, padded_rows_ - row), num_vecs, depth, strip_scores(row) + first,
                                     kScoreStride, values_ + (first_vec * kTileUnits + first * num_vecs) * kLanes,
                                     num_vecs * kLanes, out_ + row * out_width_ + first_vec * kLanes, out_width_,
                                     softmax_.rescale + row);
    }
  }
}

// kLanes rows from first_row on; those of the padding keep their scores, 0.
template <class Units>
void Prefill<Units>::softmax(int64_t tile, int64_t first_row, float* scores) {
  const int64_t first_position = args_.seq_lens[task_.seq] - args_.query_length(task_.seq);
  ScoreRow rows[kLanes];
  for (int64_t i = 0; i < kLanes; ++i) {
    const int64_t row = first_row + i;
    rows[i] = {scores + i * kScoreStride, 0, 0, {0, 0}};
    if (row >= num_rows_) continue;
    const KeyRange columns = in_tile(seen_by_group_[row / kTileRows], tile);
    if (columns.begin >= columns.end) continue;
    rows[i].first = columns.begin / (2 * kLanes) * (2 * kLanes);
    rows[i].last = round_up(columns.end, 2 * kLanes);
    rows[i].seen = {seen_[row].begin - tile, seen_[row].end - tile};
    if (scale_is_all(args_)) continue;
    transform_scores(rows[i], args_, head_of(row), tile - first_position - token_of(row), key_scales_);
  }
  softmax_step<Units>(rows, softmax_factor(args_), softmax_, first_row, value_scales_);
}

// Query tokens of the largest task that pays: half of it costs 2%, because each task packs the keys it sees.
inline int64_t prefill_tokens_per_task(const AttentionArgs& args) {
  constexpr int64_t kTaskRows = 768;
  return max_of<int64_t>(1, kTaskRows / args.group_size());
}

inline void prefill_task(const AttentionArgs& args, const PrefillTask& task) {
  if constexpr (kHasDotBF16) {
    if (args.query_dtype == DType::kBFloat16 && (args.key.dtype == DType::kBFloat16 || is_quantised(args.key.dtype))) {
#if defined(PAGEDKV_ISA_AMX)
      return Prefill<BFloat16Tiles>(args, task).run();
#else
      return Prefill<BFloat16Pairs>(args, task).run();
#endif
    }
  }
  Prefill<FloatUnits>(args, task).run();
}

}  // namespace pagedkv::PAGEDKV_ISA
