// Decode attention: a few query tokens per sequence, every cached byte read once. The keys of a task are walked tile by
// tile (decode_tile.h); a tile visits all KV heads of the task.
#pragma once

#include "../kernels.h"
#include "decode_tile.h"
#include "output.h"
#include "vec.h"

namespace pagedkv::PAGEDKV_ISA {

// Rows of a pack for a group of query heads: the smallest of 1, 2, 4 that holds them; larger groups take several packs.
PAGEDKV_INLINE int rows_per_pack(int64_t group_size) { return group_size >= 3 ? 4 : static_cast<int>(group_size); }

// A row's elements, filled up to whole groups.
PAGEDKV_INLINE int64_t whole_groups(int64_t size, DType dtype) {
  int64_t columns = 0;
  with_cache_dtype(dtype, [&]<typename T>() PAGEDKV_LAMBDA { columns = round_up(size, kGroup<T> * kLanes); });
  return columns;
}

// State of one task in the thread's scratch.
template <bool kDot>
struct DecodeState {
  const AttentionArgs& args;
  const DecodeTask& task;
  int rows;                        // per pack
  int64_t packs;                   // per KV head
  int64_t num_packs;               // of the task
  int64_t key_bytes, value_bytes;  // of a row, whole vectors
  Pack first;                      // pointers of pack 0; strides
  float* output_row;               // [Dv] rounded up
  TileLines lines[2];

  PAGEDKV_INLINE DecodeState(const AttentionArgs& a, const DecodeTask& t) : args(a), task(t) {
    rows = rows_per_pack(args.group_size());
    packs = ceil_div(args.group_size(), rows);
    num_packs = (task.query_end - task.query_begin) * (task.head_end - task.head_begin) * packs;
    first.query_stride = whole_groups(args.head_size, args.key.dtype);
    first.acc_stride = whole_groups(args.value_head_size, args.value.dtype);
    const int64_t query_bytes =
        round_up(num_packs * rows * first.query_stride * static_cast<int64_t>(sizeof(QueryElement<kDot>)), 64);
    const int64_t slopes = args.alibi_slopes ? num_packs * kLanes : 0;
    key_bytes = first.query_stride * args.key.itemsize();
    value_bytes = first.acc_stride * args.value.itemsize();
    const int64_t num_lines = kFetchInOrder ? kTile * (ceil_div(key_bytes, kLine) + ceil_div(value_bytes, kLine)) : 0;
    const int64_t line_bytes = 2 * num_lines * static_cast<int64_t>(sizeof(const char*));
    const int64_t floats = num_packs * (2 * kLanes + rows * first.acc_stride) + slopes + first.acc_stride;
    char* scratch = thread_scratch(line_bytes + query_bytes + floats * sizeof(float));
    for (TileLines& tile : lines) {
      tile.key = reinterpret_cast<const char**>(scratch);
      tile.value = tile.key + kTile * ceil_div(key_bytes, kLine);
      scratch += num_lines * sizeof(const char*);
    }
    first.query = scratch;
    first.maximum = reinterpret_cast<float*>(scratch + query_bytes);
    first.sum = first.maximum + num_packs * kLanes;
    first.acc = first.sum + num_packs * kLanes;
    output_row = first.acc + num_packs * rows * first.acc_stride;
    first.slopes = args.alibi_slopes ? output_row + first.acc_stride : nullptr;
  }

  PAGEDKV_INLINE Pack pack(int64_t i) const {
    Pack p = first;
    p.maximum += i * kLanes;
    p.sum += i * kLanes;
    p.acc += i * rows * p.acc_stride;
    p.query += i * rows * p.query_stride * sizeof(QueryElement<kDot>);
    if (p.slopes) p.slopes += i * kLanes;
    return p;
  }
  // Index of a pack: query token (from query_begin), KV head (from head_begin), pack within the group.
  PAGEDKV_INLINE int64_t index(int64_t token, int64_t head, int64_t group_pack) const {
    return (token * (task.head_end - task.head_begin) + head) * packs + group_pack;
  }
};

// One query row into the layout of a pack.
template <bool kDot>
PAGEDKV_INLINE void pack_query_row(const AttentionArgs& args, int64_t token, int64_t head, char* dst, int64_t padded) {
  const int64_t offset = token * args.query_token_stride + head * args.query_head_stride;
  if constexpr (kDot) {
    auto* row = reinterpret_cast<BFloat16*>(dst);
    __builtin_memcpy(row, reinterpret_cast<const BFloat16*>(args.query) + offset, args.head_size * sizeof(BFloat16));
    for (int64_t d = args.head_size; d < padded; ++d) row[d] = BFloat16{0};
  } else {
    auto* row = reinterpret_cast<float*>(dst);
    with_dtype(args.query_dtype, [&]<typename Q>() PAGEDKV_LAMBDA {
      const Q* query = reinterpret_cast<const Q*>(args.query) + offset;
      with_cache_dtype(args.key.dtype, [&]<typename T>() PAGEDKV_LAMBDA {
        constexpr int kStep = kGroup<T> * kLanes;
        for (int64_t d = 0; d < padded; d += kStep) {
          float natural[kStep];
          for (int64_t i = 0; i < kStep; i += kLanes) {
            const int64_t n = min_of<int64_t>(args.head_size - d - i, kLanes);
            store(natural + i, n > 0 ? load_first(query + d + i, n) : zero());
          }
          for (int i = 0; i < kStep; ++i) row[d + i] = natural[group_index<T>(i, args.head_size - d)];
        }
      });
    });
  }
}

template <bool kDot>
PAGEDKV_INLINE void init_state(const DecodeState<kDot>& state) {
  const AttentionArgs& args = state.args;
  const int64_t group = args.group_size();
  const int64_t query_start = args.query_start(state.task.seq);
  for (int64_t token = state.task.query_begin; token < state.task.query_end; ++token) {
    for (int64_t head = state.task.head_begin; head < state.task.head_end; ++head) {
      for (int64_t g = 0; g < state.packs; ++g) {
        const Pack p = state.pack(state.index(token - state.task.query_begin, head - state.task.head_begin, g));
        store(p.maximum, broadcast(kNoMaximum));
        store(p.sum, zero());
        __builtin_memset(p.acc, 0, state.rows * p.acc_stride * sizeof(float));
        const int64_t row_bytes = p.query_stride * static_cast<int64_t>(sizeof(QueryElement<kDot>));
        for (int r = 0; r < state.rows; ++r) {
          const int64_t in_group = g * state.rows + r;
          char* dst = const_cast<char*>(p.query) + r * row_bytes;
          if (in_group < group) {
            pack_query_row<kDot>(args, query_start + token, head * group + in_group, dst, p.query_stride);
          } else {
            __builtin_memset(dst, 0, row_bytes);  // a row that fills up the pack
          }
          if (p.slopes) {
            const float slope = in_group < group ? args.alibi_slopes[head * group + in_group] * kLog2E : 0.0f;
            const int tokens = kLanes / state.rows;
            for (int t = 0; t < tokens; ++t) const_cast<float*>(p.slopes)[r * tokens + t] = slope;
          }
        }
      }
    }
  }
}

// Addresses of the tile that starts at `position`. A tile of one block that holds keys of the range is addressed as it
// lies; elsewhere tokens outside [begin, end) repeat a row inside it.
PAGEDKV_INLINE void find_rows(const AttentionArgs& args, int64_t seq, int64_t position, KeyRange range,
                              TileRows& rows) {
  struct Place {  // of a token, and its distance from the next one
    const char* row;
    const float* scale;
    int64_t step, scale_step;
  };
  const auto place = [&](const CacheView& cache, int64_t block, int64_t offset) PAGEDKV_LAMBDA {
    const int64_t id = args.block_id(seq, block), size = cache.itemsize(), step = size * cache.token_stride;
    return Place{cache.data + size * id * cache.block_stride + offset * step,
                 cache.scale.data + id * cache.scale.block_stride + offset * cache.scale.token_stride, step,
                 cache.scale.token_stride};
  };
  const auto put = [&](int first, int count, const Place& key, const Place& value) PAGEDKV_LAMBDA {
    for (int t = 0; t < count; ++t) {
      rows.key[first + t] = key.row + t * key.step;
      rows.value[first + t] = value.row + t * value.step;
    }
    if (!args.key.scale.data) return;
    for (int t = 0; t < count; ++t) {
      rows.key_scale[first + t] = key.scale + t * key.scale_step;
      rows.value_scale[first + t] = value.scale + t * value.scale_step;
    }
  };
  const int64_t block = position / args.block_size, offset = position - block * args.block_size;
  if (offset + kTile <= args.block_size && position < range.end && position + kTile > range.begin) {
    return put(0, kTile, place(args.key, block, offset), place(args.value, block, offset));
  }
  for (int t = 0; t < kTile; ++t) {
    const int64_t p = min_of(max_of(position + t, range.begin), range.end - 1);
    const int64_t b = p / args.block_size, o = p - b * args.block_size;
    put(t, 1, place(args.key, b, o), place(args.value, b, o));
  }
}

// The scales of a tile's tokens for one KV head; hidden ones are read from where they lie, and used for nothing.
PAGEDKV_INLINE void load_scales(const float* const* row, int64_t head_offset, float* scales) {
  for (int t = 0; t < kTile; ++t) scales[t] = row[t][head_offset];
}

// Addresses of the lines of the tile's rows, in rising order.
PAGEDKV_INLINE void find_lines(const TileRows& rows, int64_t key_bytes, int64_t value_bytes, const TileLines& lines) {
  const auto list = [](const char* const* row, int64_t bytes, const char** line) PAGEDKV_LAMBDA {
    for (int t = 0; t < kTile; ++t) {
      for (int64_t i = 0; i < bytes; i += kLine) *line++ = row[t] + i;
    }
  };
  list(rows.key, key_bytes, lines.key);
  list(rows.value, value_bytes, lines.value);
}

// What to do with a tile: weigh its keys, which depends on their type, and add its values, likewise.
template <bool kDot>
struct TileSteps {
  void (*weigh)(const TileContext&, const Pack&, QueryElement<kDot>*);
  void (*add)(const TileContext&, const Pack&, const QueryElement<kDot>*);
};

template <int kRows, bool kDot>
PAGEDKV_INLINE void walk_keys(const DecodeState<kDot>& state, const TileSteps<kDot>& steps) {
  const AttentionArgs& args = state.args;
  const DecodeTask& task = state.task;
  const int64_t seq_len = args.seq_lens[task.seq];
  const int64_t query_length = args.query_length(task.seq);
  // Visible ranges only grow with the query position, so the first and the last token bound all of them.
  KeyRange keys{visible_keys(args, seq_len, query_length, task.query_begin).begin,
                visible_keys(args, seq_len, query_length, task.query_end - 1).end};
  keys.begin = max_of(keys.begin, task.key_begin);
  keys.end = min_of(keys.end, task.key_end);
  if (keys.begin >= keys.end) return;

  const int64_t heads = task.head_end - task.head_begin;
  // In a larger block each head's rows run on into the next tile: read as one stream, a whole tile ahead.
  const int64_t distance = kFetchInOrder || args.block_size <= kTile ? kHeadsAhead : heads;
  const int64_t key_step = args.key.head_stride * args.key.itemsize();
  const int64_t value_step = args.value.head_stride * args.value.itemsize();
  const bool has_scales = args.key.scale.data != nullptr;
  alignas(64) float key_scales[kTile], value_scales[kTile];
  alignas(64) QueryElement<kDot> weights[kTile * kRows];
  TileContext c;
  c.key_scales = has_scales ? key_scales : nullptr;
  c.value_scales = has_scales ? value_scales : nullptr;
  c.head_size = args.head_size;
  c.value_head_size = args.value_head_size;
  c.scale = args.scale;
  c.softcap = args.softcap;
  c.softcap_inverse = args.softcap > 0.0f ? 1.0f / args.softcap : 0.0f;
  TileRows buffers[2];
  const auto find_tile = [&](int64_t position, int64_t i) PAGEDKV_LAMBDA {
    find_rows(args, task.seq, position, keys, buffers[i]);
    if constexpr (kFetchInOrder) find_lines(buffers[i], state.key_bytes, state.value_bytes, state.lines[i]);
  };
  const int64_t start = keys.begin / kTile * kTile;
  find_tile(start, 0);
  for (int64_t position = start, i = 0; position < keys.end; position += kTile, i ^= 1) {
    const int64_t next = position + kTile < keys.end ? i ^ 1 : i;
    if (next != i) find_tile(position + kTile, next);
    c.rows = &buffers[i];
    for (int64_t head = task.head_begin; head < task.head_end; ++head) {
      c.key_offset = key_step * head;
      c.value_offset = value_step * head;
      const bool in_tile = head + distance < task.head_end;
      const int64_t ahead = in_tile ? head + distance : task.head_begin + (head + distance - task.head_end) % heads;
      c.ahead = &buffers[in_tile ? i : next];
      c.ahead_lines = &state.lines[in_tile ? i : next];
      c.ahead_key_offset = key_step * ahead;
      c.ahead_value_offset = value_step * ahead;
      if (has_scales) {
        load_scales(c.rows->key_scale, head * args.key.scale.head_stride, key_scales);
        load_scales(c.rows->value_scale, head * args.value.scale.head_stride, value_scales);
        prefetch(c.ahead->key_scale[0] + ahead * args.key.scale.head_stride);
        prefetch(c.ahead->value_scale[0] + ahead * args.value.scale.head_stride);
      }
      for (int64_t token = task.query_begin; token < task.query_end; ++token) {
        const KeyRange visible = visible_keys(args, seq_len, query_length, token);
        c.first = static_cast<int>(max_of<int64_t>(max_of(visible.begin, keys.begin) - position, 0));
        c.last = static_cast<int>(min_of<int64_t>(min_of(visible.end, keys.end) - position, kTile));
        if (c.first >= c.last) continue;
        c.distance = static_cast<float>(position - (seq_len - query_length + token));
        for (int64_t g = 0; g < state.packs; ++g) {
          const Pack pack = state.pack(state.index(token - task.query_begin, head - task.head_begin, g));
          steps.weigh(c, pack, weights);
          steps.add(c, pack, weights);
        }
      }
    }
  }
}

template <bool kDot>
PAGEDKV_INLINE void finish_rows(const DecodeState<kDot>& state) {
  const AttentionArgs& args = state.args;
  const DecodeTask& task = state.task;
  const int64_t group = args.group_size();
  const int tokens_per_vector = kLanes / state.rows;
  const int64_t query_start = args.query_start(task.seq);
  const int64_t num_heads = (task.head_end - task.head_begin) * group;
  for (int64_t i = 0; i < (task.query_end - task.query_begin) * num_heads; ++i) {
    const int64_t token = i / num_heads, head = i % num_heads;
    const int64_t in_group = head % group;
    const Pack p = state.pack(state.index(token, head / group, in_group / state.rows));
    const int r = static_cast<int>(in_group % state.rows);
    float sum = 0.0f;
    for (int t = 0; t < tokens_per_vector; ++t) sum += p.sum[r * tokens_per_vector + t];
    const float* acc = p.acc + r * p.acc_stride;
    if constexpr (kDot) {
      for (int64_t d = 0; d < p.acc_stride; d += 2 * kLanes) {
        store_zipped(state.output_row + d, load(acc + d), load(acc + d + kLanes));
      }
    } else {
      with_cache_dtype(args.value.dtype, [&]<typename T>() PAGEDKV_LAMBDA {
        for (int64_t d = 0; d < p.acc_stride; d += kGroup<T> * kLanes) {
          store_group<T>(state.output_row + d, acc + d, args.value_head_size - d);
        }
      });
    }
    const float maximum = p.maximum[r * tokens_per_vector];
    if (task.partial) {
      float* row = task.partial + token * task.partial_token_step + head * partial_row_size(args);
      __builtin_memcpy(row, state.output_row, args.value_head_size * sizeof(float));
      row[args.value_head_size] = maximum;
      row[args.value_head_size + 1] = sum;
    } else {
      write_output_row(args, query_start + task.query_begin + token, task.head_begin * group + head, state.output_row,
                       maximum, sum);
    }
  }
}

template <int kRows, bool kDot>
PAGEDKV_INLINE void walk_typed_keys(const DecodeState<kDot>& state) {
  TileSteps<kDot> steps;
  if constexpr (kDot) {
    steps = {weigh_tile<BFloat16, kRows, true>, add_tile<BFloat16, kRows, true>};
  } else {
    with_cache_dtype(state.args.key.dtype,
                     [&]<typename T>() PAGEDKV_LAMBDA { steps.weigh = weigh_tile<T, kRows, false>; });
    with_cache_dtype(state.args.value.dtype,
                     [&]<typename T>() PAGEDKV_LAMBDA { steps.add = add_tile<T, kRows, false>; });
  }
  walk_keys<kRows, kDot>(state, steps);
}

template <bool kDot>
PAGEDKV_INLINE void decode_task(const AttentionArgs& args, const DecodeTask& task) {
  const DecodeState<kDot> state(args, task);
  init_state(state);
  switch (state.rows) {
    case 1:
      walk_typed_keys<1, kDot>(state);
      break;
    case 2:
      walk_typed_keys<2, kDot>(state);
      break;
    default:
      walk_typed_keys<4, kDot>(state);
  }
  finish_rows(state);
}

void decode(const AttentionArgs& args, const DecodeTask& task) {
  if constexpr (kHasDotBF16 && kDotPays) {
    if (args.query_dtype == DType::kBFloat16 && args.key.dtype == DType::kBFloat16)
      return decode_task<true>(args, task);
  }
  decode_task<false>(args, task);
}

void merge_partials(const AttentionArgs& args, const MergeTask& task) {
  const int64_t columns = args.value_head_size;
  auto* row = reinterpret_cast<float*>(thread_scratch(round_up(columns, kLanes) * sizeof(float)));
  float maximum = kNoMaximum;
  for (int64_t i = 0; i < task.count; ++i) {
    const float* part = task.first + i * task.step;
    if (part[columns + 1] > 0.0f || part[columns + 1] != part[columns + 1]) {
      maximum = part[columns] < maximum ? maximum : part[columns];
    }
  }
  float sum = 0.0f;
  for (int64_t d = 0; d < columns; d += kLanes) store(row + d, zero());
  for (int64_t i = 0; i < task.count; ++i) {
    const float* part = task.first + i * task.step;
    if (part[columns + 1] == 0.0f) continue;
    const float weight = exp2_scalar(part[columns] - maximum);
    sum += weight * part[columns + 1];
    // A partial row is padded to 16 floats: whole vectors may be read, the last ones carry junk past `columns`.
    for (int64_t d = 0; d < columns; d += kLanes) store(row + d, fma(load(part + d), broadcast(weight), load(row + d)));
  }
  write_output_row(args, task.token, task.head, row, maximum, sum);
}

}  // namespace pagedkv::PAGEDKV_ISA
