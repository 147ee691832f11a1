// Packing of cached rows, wherever their pages lie, into the operands of multiply(): keys transposed, values by tiles
// of columns. Rows are given by address; a row that must not be read is given as the address of zeros.
#pragma once

#include <utility>

#include "prefill_multiply.h"

namespace pagedkv::PAGEDKV_ISA {

// kLanes units of a row of num_elements, zero past its end.
template <class Units, class T>
PAGEDKV_INLINE Vec load_units(const T* row, int64_t first_unit, int64_t num_elements) {
  constexpr int64_t kElements = kLanes * Units::kElements;
  const T* p = row + first_unit * Units::kElements;
  const int64_t rest = num_elements - first_unit * Units::kElements;
  if constexpr (Units::kElements == 1) {
    return rest >= kElements ? load(p) : load_first(p, max_of<int64_t>(rest, 0));
  } else {
    return reinterpret_cast<Vec>(rest >= kElements ? load_bits(p) : load_bits_first(p, max_of<int64_t>(rest, 0)));
  }
}

template <int kDistance, size_t... kLane>
PAGEDKV_INLINE void exchange(Vec& a, Vec& b, std::index_sequence<kLane...>) {
  const Vec low = __builtin_shufflevector(a, b, int(kLane & kDistance ? kLanes + kLane - kDistance : kLane)...);
  b = __builtin_shufflevector(a, b, int(kLane & kDistance ? kLanes + kLane : kLane + kDistance)...);
  a = low;
}

// Transposes a square of registers: at each power of two the off-diagonal halves change places.
template <int kDistance = kLanes / 2>
PAGEDKV_INLINE void transpose(Vec (&rows)[kLanes]) {
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) {
    if (!(i & kDistance)) exchange<kDistance>(rows[i], rows[i + kDistance], std::make_index_sequence<kLanes>{});
  }
  if constexpr (kDistance > 1) transpose<kDistance / 2>(rows);
}

// keys[first, last), multiples of kLanes -> packed [key / kColumns][depth][kColumns], kColumns those of a tile. depth
// is a multiple of kLanes; units behind the head size are 0.
template <class Units, class T>
void pack_keys(const char* const* keys, int64_t first, int64_t last, int64_t head_size, int64_t depth, float* packed) {
  constexpr int64_t kColumns = Units::kTileVecs * kLanes;
  for (int64_t key = first; key < last; key += kLanes) {
    float* target = packed + key / kColumns * kColumns * depth + key % kColumns;
    for (int64_t unit = 0; unit < depth; unit += kLanes) {
      Vec rows[kLanes];
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) {
        rows[i] = load_units<Units>(reinterpret_cast<const T*>(keys[key + i]), unit, head_size);
      }
      transpose(rows);
#pragma GCC unroll 16
      for (int i = 0; i < kLanes; ++i) store(target + (unit + i) * kColumns, rows[i]);
    }
  }
}

// Unit `unit` of kLanes columns: a value, or those of two keys in one.
template <class Units, class T>
PAGEDKV_INLINE Vec load_value_units(const char* const* values, int64_t unit, int64_t column, int64_t value_size) {
  const auto row = [&](int64_t key) PAGEDKV_LAMBDA {
    return load_units<FloatUnits>(reinterpret_cast<const T*>(values[key]), column, value_size);
  };
  if constexpr (Units::kElements == 1) {
    return row(unit);
  } else {  // a bfloat16 is the upper half of its float
    typedef uint32_t Words __attribute__((vector_size(sizeof(Vec))));
    return reinterpret_cast<Vec>(reinterpret_cast<Words>(row(2 * unit)) >> 16 |
                                 reinterpret_cast<Words>(row(2 * unit + 1)));
  }
}

// The same of 2 * kLanes columns, stored.
template <class T>
PAGEDKV_INLINE void pack_value_pairs(const char* const* values, int64_t unit, int64_t column, int64_t value_size,
                                     float* target) {
  const auto row = [&](int64_t key) PAGEDKV_LAMBDA {
    const T* p = reinterpret_cast<const T*>(values[key]) + column;
    const int64_t rest = value_size - column;
    return rest >= 2 * kLanes ? load_bits(p) : load_bits_first(p, rest);
  };
  PairBits low, high;
  zip_bits(row(2 * unit), row(2 * unit + 1), low, high);
  store_zipped(target, reinterpret_cast<Vec>(low), reinterpret_cast<Vec>(high));
}

// values[first, last), even -> packed [column tile][max_units][columns of the tile].
template <class Units, class T>
void pack_values(const char* const* values, int64_t first, int64_t last, int64_t value_size, int64_t max_units,
                 float* packed) {
  const ColumnTiles tiles{ceil_div(value_size, kLanes), Units::kTileVecs};
  for (int64_t unit = first / Units::kElements; unit < last / Units::kElements; ++unit) {
    for (int64_t tile = 0; tile < tiles.count(); ++tile) {
      const int64_t first_vec = tiles.first_vec(tile), num_vecs = tiles.first_vec(tile + 1) - first_vec;
      float* target = packed + (first_vec * max_units + unit * num_vecs) * kLanes;
      int64_t v = 0;
      if constexpr (Units::kElements == 2) {
        for (; v + 2 <= num_vecs; v += 2) {
          pack_value_pairs<T>(values, unit, (first_vec + v) * kLanes, value_size, target + v * kLanes);
        }
      }
      for (; v < num_vecs; ++v) {
        store(target + v * kLanes, load_value_units<Units, T>(values, unit, (first_vec + v) * kLanes, value_size));
      }
    }
  }
}

}  // namespace pagedkv::PAGEDKV_ISA
