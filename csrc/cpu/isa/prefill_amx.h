// Products of packed bfloat16 pairs in the tile registers of AMX. Pairs along the reduced dimension with the columns
// side by side are what TDPBF16PS takes as its right operand, so packing and softmax are those of the other units.
#pragma once

#include "prefill_multiply.h"

#if defined(PAGEDKV_ISA_AMX)
#include <immintrin.h>

namespace pagedkv::PAGEDKV_ISA {

constexpr int64_t kAmxRows = 16;  // of a tile register, which holds 16 rows of 16 units
constexpr int64_t kAmxUnits = 16;

// Shapes of all eight tile registers for one thread. Released early, so that the kernel has less to save.
class TileShapes {
 public:
  TileShapes() {
    for (int i = 0; i < 8; ++i) {
      config_.row_bytes[i] = kAmxUnits * sizeof(float);
      config_.rows[i] = kAmxRows;
    }
    _tile_loadconfig(&config_);
  }
  ~TileShapes() { _tile_release(); }
  TileShapes(const TileShapes&) = delete;

 private:
  struct alignas(64) {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
  } config_;
};

// GCC's loads of tiles do not say that they read memory.
#define PAGEDKV_TILE_BARRIER() __asm__ volatile("" ::: "memory")

// c [kRowTiles * 16, kVecs * 16] = (kAccumulate: c +) a [kRowTiles * 16, depth] x b [depth, kVecs * 16]; depth is a
// multiple of 16. With two by two tiles a product needs one load: loads take 8 cycles, products 16.
template <int kRowTiles, int kVecs, bool kAccumulate>
__attribute__((noinline)) void multiply_amx(int64_t depth, const float* a, int64_t a_stride, const float* b,
                                            int64_t b_stride, float* c, int64_t c_stride) {
  PAGEDKV_TILE_BARRIER();
  const float* a_below = a + kAmxRows * a_stride;
  float* c_below = c + kAmxRows * c_stride;
  const int64_t a_bytes = a_stride * sizeof(float), b_bytes = b_stride * sizeof(float);
  const int64_t c_bytes = c_stride * sizeof(float);
  if constexpr (kAccumulate) {
    _tile_loadd(0, c, c_bytes);
    if constexpr (kVecs > 1) _tile_loadd(1, c + kLanes, c_bytes);
    if constexpr (kRowTiles > 1) _tile_loadd(2, c_below, c_bytes);
    if constexpr (kRowTiles > 1 && kVecs > 1) _tile_loadd(3, c_below + kLanes, c_bytes);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t k = 0; k < depth; k += kAmxUnits) {
    _tile_loadd(4, a + k, a_bytes);
    _tile_loadd(6, b + k * b_stride, b_bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kVecs > 1) {
      _tile_loadd(7, b + k * b_stride + kLanes, b_bytes);
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kRowTiles > 1) {
      _tile_loadd(5, a_below + k, a_bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kVecs > 1) _tile_dpbf16ps(3, 5, 7);
    }
  }
  _tile_stored(0, c, c_bytes);
  if constexpr (kVecs > 1) _tile_stored(1, c + kLanes, c_bytes);
  if constexpr (kRowTiles > 1) _tile_stored(2, c_below, c_bytes);
  if constexpr (kRowTiles > 1 && kVecs > 1) _tile_stored(3, c_below + kLanes, c_bytes);
  PAGEDKV_TILE_BARRIER();
}

struct BFloat16Tiles {
  static constexpr int kElements = 2;
  static constexpr int kTileRows = 2 * kAmxRows, kTileVecs = 2;
  static constexpr int64_t kRowStep = kAmxRows;
  static constexpr int64_t kDepthStep = kAmxUnits;
  static constexpr int64_t kLongestSum = INT64_MAX;
  static constexpr int64_t kStripRows = 2 * kTileRows;
  using Setup = TileShapes;

  template <class F>
  static PAGEDKV_INLINE void with_source(DType dtype, const F& f) {
    with_bfloat16_source(dtype, f);
  }

  // num_rows is kAmxRows or kTileRows, num_vecs 1 or 2.
  template <bool kAccumulate>
  static void multiply(int64_t num_rows, int64_t num_vecs, int64_t depth, const float* a, int64_t a_stride,
                       const float* b, int64_t b_stride, float* c, int64_t c_stride, const float* rescale) {
    if constexpr (kAccumulate) {
      for (int64_t row = 0; row < num_rows; ++row) {
        if (rescale[row] == 1) continue;
        for (int64_t v = 0; v < num_vecs; ++v) {
          float* target = c + row * c_stride + v * kLanes;
          store(target, load(target) * broadcast(rescale[row]));
        }
      }
    }
    const auto product = num_rows > kAmxRows
                             ? (num_vecs > 1 ? multiply_amx<2, 2, kAccumulate> : multiply_amx<2, 1, kAccumulate>)
                             : (num_vecs > 1 ? multiply_amx<1, 2, kAccumulate> : multiply_amx<1, 1, kAccumulate>);
    product(depth, a, a_stride, b, b_stride, c, c_stride);
  }
};

}  // namespace pagedkv::PAGEDKV_ISA
#endif
