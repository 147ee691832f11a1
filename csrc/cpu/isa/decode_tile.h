// One tile of 16 tokens of decode attention: scores, running softmax, weighted values.
//
// The query heads of a group are taken in packs of up to 4 rows, so that a K or V row is loaded into registers once per
// pack. Scores of a pack live in vectors whose lane r * kTokens + t is row r, token t.
#pragma once

#include <cfloat>
#include <type_traits>

#include "../kernels.h"
#include "vec.h"

namespace pagedkv::PAGEDKV_ISA {

constexpr int kTile = static_cast<int>(kDecodeTile);
constexpr int64_t kLine = 64;           // bytes
constexpr float kNoMaximum = -FLT_MAX;  // finite: (-inf) - (-inf) would be NaN where nothing was seen yet

// The processors with AMX. Their prefetchers follow lines in rising order, fetched evenly beside the arithmetic a few
// KB ahead of it; in bursts or out of order the same fetches cost up to half the bandwidth. And two float32
// multiply-adds take half the time of a dot product of as many bfloat16.
#if defined(PAGEDKV_ISA_AMX)
constexpr bool kFetchInOrder = true, kDotPays = false;
#else
constexpr bool kFetchInOrder = false, kDotPays = true;
#endif
constexpr int64_t kHeadsAhead = 2;  // of the head that is computed, unless blocks are larger than a tile

// Cached rows of the 16 tokens of a tile, head 0, as byte addresses, and their scales.
struct TileRows {
  const char* key[kTile];
  const char* value[kTile];
  const float* key_scale[kTile];
  const float* value_scale[kTile];
};

// Addresses of the lines of those rows in rising order, head 0.
struct TileLines {
  const char** key;
  const char** value;
};

// What a tile needs to know beside its rows; offsets select the KV head.
struct TileContext {
  const TileRows* rows;
  const TileRows* ahead;         // rows of the head that is fetched meanwhile, the same line beside each load, or
  const TileLines* ahead_lines;  // its lines where kFetchInOrder
  int64_t ahead_key_offset, ahead_value_offset;
  int64_t key_offset, value_offset;
  int64_t head_size, value_head_size;
  int first, last;  // visible tokens of this tile: [first, last)
  float distance;   // key position of token 0 minus query position, for ALiBi
  float scale, softcap, softcap_inverse;
  const float* key_scales;  // [kTile] of the KV head, or null
  const float* value_scales;
};

// Running softmax of a pack of rows. `query` is padded with zeros to whole groups of columns and, unless it is bfloat16
// for dot_bf16, stored in the element order of load_group. `acc` is in the order of load_group (of zip_bits) too.
struct Pack {
  float* maximum;       // [kLanes]
  float* sum;           // [kLanes]
  float* acc;           // [kRows, acc_stride]
  const char* query;    // [kRows, query_stride]
  const float* slopes;  // [kLanes] ALiBi slopes in base 2, or null
  int64_t query_stride, acc_stride;
};

template <bool kDot>
using QueryElement = std::conditional_t<kDot, BFloat16, float>;

// kBytes of the row at `place`, or as many of the lines ahead.
template <int64_t kBytes>
PAGEDKV_INLINE void fetch(const char* place, const char* const*& line, int64_t line_offset) {
  static_assert(!kFetchInOrder || kBytes % kLine == 0);
#pragma GCC unroll 2
  for (int64_t i = 0; i < kBytes; i += kLine) prefetch(kFetchInOrder ? *line++ + line_offset : place + i);
}

// scores[v], lane r * kTokens + t: query row r times key v * kTokens + t.
template <typename T, int kRows, bool kDot>
PAGEDKV_INLINE void tile_scores(const TileContext& c, const Pack& pack, Vec* scores) {
  constexpr int kTokens = kLanes / kRows;
  constexpr int kVectors = kTile / kTokens;
  constexpr int kStep = kGroup<T> * kLanes;
  const auto* query = reinterpret_cast<const QueryElement<kDot>*>(pack.query);
  // The prefetchers like whole rows, two-byte elements for 4 query rows like queries that stay in registers.
  constexpr bool kRowByRow = !kFetchInOrder && (kRows < 4 || sizeof(T) == sizeof(float));
  const int64_t whole = c.head_size / kStep * kStep;
  const char* const* line = c.ahead_lines->key;
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    Vec acc[kLanes];
#pragma GCC unroll 16
    for (int i = 0; i < kLanes; ++i) acc[i] = zero();
    const auto step = [&](int first, int last, int64_t d, int64_t n) PAGEDKV_LAMBDA {
#pragma GCC unroll 16
      for (int t = first; t < last; ++t) {
        const T* key = reinterpret_cast<const T*>(c.rows->key[v * kTokens + t] + c.key_offset) + d;
        fetch<kStep * sizeof(T)>(c.ahead->key[v * kTokens + t] + c.ahead_key_offset + d * sizeof(T), line,
                                 c.ahead_key_offset);
        if constexpr (kDot) {
          const PairBits k = n == kStep ? load_bits(key) : load_bits_first(key, n);
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            acc[r * kTokens + t] = dot_bf16(acc[r * kTokens + t], k, load_bits(query + r * pack.query_stride + d));
          }
        } else {
          Vec k[kGroup<T>];
          if (n == kStep) {
            load_group(key, k);
          } else {
            load_group_first(key, n, k);
          }
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const float* q = query + r * pack.query_stride + d;
#pragma GCC unroll 4
            for (int i = 0; i < kGroup<T>; ++i) {
              if (is_used<T>(i, n)) acc[r * kTokens + t] = fma(k[i], load(q + i * kLanes), acc[r * kTokens + t]);
            }
          }
        }
      }
    };
    const auto tokens = [&](int first, int last) PAGEDKV_LAMBDA {
#pragma GCC unroll 1
      for (int64_t d = 0; d < whole; d += kStep) step(first, last, d, kStep);
      if (whole < c.head_size) step(first, last, whole, c.head_size - whole);
    };
    if constexpr (kRowByRow) {
#pragma GCC unroll 16
      for (int t = 0; t < kTokens; ++t) tokens(t, t + 1);
    } else {
      tokens(0, kTokens);
    }
    scores[v] = reduce_lanes(acc) * broadcast(kGroupFactor<T>);
  }
}

// Scale, softcap, ALiBi (all in base 2) and the mask.
template <int kRows>
PAGEDKV_INLINE void tile_logits(const TileContext& c, const Pack& pack, Vec* scores) {
  constexpr int kTokens = kLanes / kRows;
  constexpr int kVectors = kTile / kTokens;
  float token_of_lane[kLanes];
  const bool masked = c.first > 0 || c.last < kTile;
  if (masked || pack.slopes) {
    for (int i = 0; i < kLanes; ++i) token_of_lane[i] = static_cast<float>(i % kTokens);
  }
#pragma GCC unroll 4
  for (int v = 0; v < kVectors; ++v) {
    Vec x = scores[v];
    if (c.key_scales) x = x * repeat<kTokens>(c.key_scales + v * kTokens);
    if (c.softcap > 0.0f) {
      x = soft_capped(x * broadcast(c.scale), c.softcap, c.softcap_inverse) * broadcast(kLog2E);
    } else {
      x = x * broadcast(c.scale * kLog2E);
    }
    if (masked || pack.slopes) {
      const Vec token = load(token_of_lane) + broadcast(static_cast<float>(v * kTokens));
      if (pack.slopes) x = fma(load(pack.slopes), token + broadcast(c.distance), x);
      if (masked) {
        const Vec hidden = broadcast(-__builtin_inff());
        x = select(less(token, broadcast(static_cast<float>(c.first))), hidden, x);
        x = select(less(token, broadcast(static_cast<float>(c.last))), x, hidden);
      }
    }
    scores[v] = x;
  }
}

// Moves the running maximum, then turns logits into weights. Weights of hidden tokens are exactly 0.
template <int kRows>
PAGEDKV_INLINE void tile_softmax(const Pack& pack, Vec* scores) {
  constexpr int kTokens = kLanes / kRows;
  constexpr int kVectors = kTile / kTokens;
  Vec highest = scores[0];
#pragma GCC unroll 16
  for (int v = 1; v < kVectors; ++v) highest = max(highest, scores[v]);
  highest = group_max<kTokens>(highest);
  Vec maximum = load(pack.maximum);
  Vec sum = load(pack.sum);
  if (any(less(maximum, highest))) {
    highest = max(highest, maximum);
    const Vec factor = exp2(maximum - highest);  // exactly 1 for rows whose maximum stays
    sum = sum * factor;
    maximum = highest;
    store(pack.maximum, maximum);
    float factors[kLanes];
    store(factors, factor);
    for (int r = 0; r < kRows; ++r) {
      float* acc = pack.acc + r * pack.acc_stride;
      for (int64_t i = 0; i < pack.acc_stride; i += kLanes) {
        store(acc + i, load(acc + i) * broadcast(factors[r * kTokens]));
      }
    }
  }
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    scores[v] = exp2(scores[v] - maximum);
    sum = sum + scores[v];
  }
  store(pack.sum, sum);
}

// f(row, vector, its place in pack.acc) for kVecs vectors of columns from `column` on.
template <int kRows, int kVecs, typename F>
PAGEDKV_INLINE void for_columns(const Pack& pack, int64_t column, const F& f) {
#pragma GCC unroll 4
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int i = 0; i < kVecs; ++i) f(r, i, pack.acc + r * pack.acc_stride + column + i * kLanes);
  }
}

// acc += weights * values for kGroups groups of columns from `column` on; kWhole: all 16 tokens are visible.
template <typename T, int kRows, int kGroups, bool kWhole>
PAGEDKV_INLINE void accumulate_columns(const TileContext& c, const Pack& pack, const float* weights, int64_t column,
                                       int64_t columns) {
  constexpr int kTokens = kLanes / kRows;
  constexpr int kStep = kGroup<T> * kLanes;
  constexpr int kVecs = kGroup<T> * kGroups;
  Vec acc[kRows][kVecs];
  for_columns<kRows, kVecs>(pack, column, [&](int r, int i, float* p) PAGEDKV_LAMBDA { acc[r][i] = load(p); });
  const char* const* line = c.ahead_lines->value + kTile * column * static_cast<int64_t>(sizeof(T)) / kLine;
  const auto token = [&](int t) PAGEDKV_LAMBDA {
    const T* value = reinterpret_cast<const T*>(c.rows->value[t] + c.value_offset) + column;
    const char* ahead = c.ahead->value[t] + c.ahead_value_offset + column * sizeof(T);
#pragma GCC unroll 4
    for (int i = 0; i < kGroups; ++i) {
      fetch<kStep * sizeof(T)>(ahead + i * kStep * sizeof(T), line, c.ahead_value_offset);
      Vec v[kGroup<T>];
      if (columns == kGroups * kStep) {
        load_group(value + i * kStep, v);
      } else {
        load_group_first(value + i * kStep, columns, v);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const Vec weight = broadcast(weights[t / kTokens * kLanes + r * kTokens + t % kTokens]);
#pragma GCC unroll 4
        for (int j = 0; j < kGroup<T>; ++j) {
          Vec& sum = acc[r][kGroup<T> * i + j];
          if (is_used<T>(j, columns)) sum = fma(v[j], weight, sum);
        }
      }
    }
  };
  if constexpr (kWhole) {
#pragma GCC unroll 16
    for (int t = 0; t < kTile; ++t) token(t);
  } else {
    for (int t = c.first; t < c.last; ++t) token(t);
  }
  for_columns<kRows, kVecs>(pack, column, [&](int r, int i, float* p) PAGEDKV_LAMBDA { store(p, acc[r][i]); });
}

// The same with bfloat16 weights, two tokens per dot product: half the multiply-adds, for an error below that of
// rounding the output to bfloat16.
template <int kRows, int kPairs, bool kWhole>
PAGEDKV_INLINE void dot_columns(const TileContext& c, const Pack& pack, const BFloat16* weights, int64_t column,
                                int64_t columns) {
  constexpr int kTokens = kLanes / kRows;
  constexpr int kStep = 2 * kLanes;
  Vec acc[kRows][2 * kPairs];
  for_columns<kRows, 2 * kPairs>(pack, column, [&](int r, int i, float* p) PAGEDKV_LAMBDA { acc[r][i] = load(p); });
  const auto bits = [&](int t, int i) PAGEDKV_LAMBDA {
    prefetch(c.ahead->value[t] + c.ahead_value_offset + (column + i * kStep) * sizeof(BFloat16));
    const auto* value = reinterpret_cast<const BFloat16*>(c.rows->value[t] + c.value_offset) + column + i * kStep;
    if (!kWhole && (t < c.first || t >= c.last)) return load_bits_first(value, 0);
    return columns == kPairs * kStep ? load_bits(value) : load_bits_first(value, columns);
  };
  const auto tokens = [&](int t) PAGEDKV_LAMBDA {
#pragma GCC unroll 4
    for (int i = 0; i < kPairs; ++i) {
      PairBits low, high;
      zip_bits(bits(t, i), bits(t + 1, i), low, high);
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const PairBits weight = broadcast_two(weights + t / kTokens * kLanes + r * kTokens + t % kTokens);
        acc[r][2 * i] = dot_bf16(acc[r][2 * i], low, weight);
        acc[r][2 * i + 1] = dot_bf16(acc[r][2 * i + 1], high, weight);
      }
    }
  };
  if constexpr (kWhole) {
#pragma GCC unroll 8
    for (int t = 0; t < kTile; t += 2) tokens(t);
  } else {
    for (int t = c.first / 2 * 2; t < c.last; t += 2) tokens(t);
  }
  for_columns<kRows, 2 * kPairs>(pack, column, [&](int r, int i, float* p) PAGEDKV_LAMBDA { store(p, acc[r][i]); });
}

// All columns of the values, in steps of kGroups groups, then one, then what remains.
template <typename T, int kRows, bool kDot, bool kWhole, typename Weight>
PAGEDKV_INLINE void accumulate(const TileContext& c, const Pack& pack, const Weight* weights) {
  constexpr int kStep = kGroup<T> * kLanes;
  constexpr int kGroups = min_of(8 / kGroup<T>, max_of(1, kRegisters / (2 * kGroup<T> * kRows)));
  const auto columns = [&]<int groups, bool whole>(int64_t column, int64_t n) PAGEDKV_LAMBDA {
    if constexpr (kDot) {
      dot_columns<kRows, groups, whole>(c, pack, weights, column, n);
    } else {
      accumulate_columns<T, kRows, groups, whole>(c, pack, weights, column, n);
    }
  };
  int64_t column = 0;
  for (; column + kGroups * kStep <= c.value_head_size; column += kGroups * kStep) {
    columns.template operator()<kGroups, kWhole>(column, kGroups * kStep);
  }
  if constexpr (kGroups > 1) {
    for (; column + kStep <= c.value_head_size; column += kStep) {
      columns.template operator()<1, kWhole>(column, kStep);
    }
  }
  if (column < c.value_head_size) columns.template operator()<1, false>(column, c.value_head_size - column);
}

// Weights of a tile's tokens, [kTile * kRows] like scores, already times the scales of their values. They are read as
// broadcasts from memory, which the load ports do; kept in registers they would be shuffled there.
template <typename T, int kRows, bool kDot>
__attribute__((noinline)) void weigh_tile(const TileContext& c, const Pack& pack, QueryElement<kDot>* weights) {
  constexpr int kTokens = kLanes / kRows;
  constexpr int kVectors = kTile / kTokens;
  Vec scores[kVectors];
  tile_scores<T, kRows, kDot>(c, pack, scores);
  tile_logits<kRows>(c, pack, scores);
  tile_softmax<kRows>(pack, scores);
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    if constexpr (kDot) {
      store_rounded(weights + v * kLanes, scores[v]);
    } else {
      if (c.value_scales) scores[v] = scores[v] * repeat<kTokens>(c.value_scales + v * kTokens);
      store(weights + v * kLanes, scores[v]);
    }
  }
}

template <typename T, int kRows, bool kDot>
__attribute__((noinline)) void add_tile(const TileContext& c, const Pack& pack, const QueryElement<kDot>* weights) {
  if (c.first == 0 && c.last == kTile) {
    accumulate<T, kRows, kDot, true>(c, pack, weights);
  } else {
    accumulate<T, kRows, kDot, false>(c, pack, weights);
  }
}

}  // namespace pagedkv::PAGEDKV_ISA
