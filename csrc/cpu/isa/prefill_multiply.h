// Register-blocked products of packed operands. Operands consist of 32-bit units along the reduced dimension, a float
// or two adjacent bfloat16, so that one kernel serves both and only the multiply-add differs.
#pragma once

#include "vec.h"

namespace pagedkv::PAGEDKV_ISA {

// c [kTileRows, kVecs * kLanes] = a [kTileRows, depth] x b [depth, kVecs * kLanes], or with kAccumulate
// c * rescale [kTileRows] + a x b.
template <class Units, int kVecs, bool kAccumulate>
__attribute__((noinline)) void multiply_tile(int64_t depth, const float* a, int64_t a_stride, const float* b,
                                             int64_t b_stride, float* c, int64_t c_stride, const float* rescale) {
  constexpr int kRows = Units::kTileRows;
  Vec sums[kRows][kVecs];
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      sums[row][v] = zero();
    }
  }
#pragma GCC unroll 1
  for (int64_t k = 0; k < depth; ++k) {
    Vec b_row[kVecs];
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) b_row[v] = load(b + k * b_stride + v * kLanes);
#pragma GCC unroll 6
    for (int row = 0; row < kRows; ++row) {
      const float unit = a[row * a_stride + k];
#pragma GCC unroll 4
      for (int v = 0; v < kVecs; ++v) sums[row][v] = Units::multiply_add(sums[row][v], unit, b_row[v]);
    }
  }
#pragma GCC unroll 6
  for (int row = 0; row < kRows; ++row) {
#pragma GCC unroll 4
    for (int v = 0; v < kVecs; ++v) {
      float* target = c + row * c_stride + v * kLanes;
      store(target, kAccumulate ? fma(load(target), broadcast(rescale[row]), sums[row][v]) : sums[row][v]);
    }
  }
}

// What the kernel asks of its units; these multiply in vector registers.
template <class Units>
struct VectorUnits {
  // A tile of 6 rows fills the registers: 24 sums of 32 registers (6x64 on AVX-512), 12 of 16 (6x16 on AVX2).
  static constexpr int kTileRows = 6;
  static constexpr int kTileVecs = kRegisters == 32 ? 4 : 2;
  static constexpr int64_t kRowStep = kTileRows;  // rows are padded to a multiple of it
  static constexpr int64_t kDepthStep = 1;        // units of the reduced dimension, too
  static constexpr int64_t kLongestSum = 128;     // a chain of 256 products would round twice as much as torch.mm
  static constexpr int64_t kStripRows = 8 * kTileRows;
  struct Setup {};  // lives as long as a task

  // multiply_tile with num_rows == kTileRows and 1 <= num_vecs <= kTileVecs.
  template <bool kAccumulate, int kVecs = kTileVecs>
  static void multiply(int64_t num_rows, int64_t num_vecs, int64_t depth, const float* a, int64_t a_stride,
                       const float* b, int64_t b_stride, float* c, int64_t c_stride, const float* rescale) {
    if constexpr (kVecs > 1) {
      if (num_vecs < kVecs) {
        return multiply<kAccumulate, kVecs - 1>(num_rows, num_vecs, depth, a, a_stride, b, b_stride, c, c_stride,
                                                rescale);
      }
    }
    multiply_tile<Units, kVecs, kAccumulate>(depth, a, a_stride, b, b_stride, c, c_stride, rescale);
  }
};

struct FloatUnits : VectorUnits<FloatUnits> {
  static constexpr int kElements = 1;
  template <class F>
  static PAGEDKV_INLINE void with_source(DType dtype, const F& f) {  // any type, by conversion
    with_cache_dtype(dtype, f);
  }
  static PAGEDKV_INLINE Vec multiply_add(Vec sum, float a, Vec b) { return fma(broadcast(a), b, sum); }
};

// A bfloat16 holds each quantised element, too.
template <class F>
PAGEDKV_INLINE void with_bfloat16_source(DType dtype, const F& f) {
  if (is_quantised(dtype)) return with_quantised_dtype(dtype, f);
  f.template operator()<BFloat16>();
}

struct BFloat16Pairs : VectorUnits<BFloat16Pairs> {  // needs kHasDotBF16
  static constexpr int kElements = 2;
  template <class F>
  static PAGEDKV_INLINE void with_source(DType dtype, const F& f) {
    with_bfloat16_source(dtype, f);
  }
  static PAGEDKV_INLINE Vec multiply_add(Vec sum, float a, Vec b) {
    return dot_bf16(sum, reinterpret_cast<PairBits>(broadcast(a)), reinterpret_cast<PairBits>(b));
  }
};

// Splits the vectors of a row into tiles of at most max_vecs, evenly: 5 are 3 + 2, because a tile of one vector spends
// its time on loads.
struct ColumnTiles {
  int64_t num_vecs;
  int64_t max_vecs;
  PAGEDKV_INLINE int64_t count() const { return ceil_div(num_vecs, max_vecs); }
  PAGEDKV_INLINE int64_t first_vec(int64_t tile) const { return num_vecs * tile / count(); }
};

}  // namespace pagedkv::PAGEDKV_ISA
