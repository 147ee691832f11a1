// Plain types shared by every translation unit. Everything here is always_inline: these headers are compiled once per
// instruction set, and an out-of-line copy built for AVX-512 must never be the one that the linker keeps for all.
#pragma once

#include <cstddef>
#include <cstdint>

#define PAGEDKV_INLINE __attribute__((always_inline)) inline
#define PAGEDKV_LAMBDA __attribute__((always_inline))

namespace pagedkv {

enum class DType : int8_t { kFloat32, kFloat16, kBFloat16 };

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

template <typename T>
struct DTypeOf;
template <>
struct DTypeOf<float> {
  static constexpr DType value = DType::kFloat32;
};
template <>
struct DTypeOf<Half> {
  static constexpr DType value = DType::kFloat16;
};
template <>
struct DTypeOf<BFloat16> {
  static constexpr DType value = DType::kBFloat16;
};

PAGEDKV_INLINE int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : 2; }

// Too little memory; the op's name is added where it is known (library.cpp).
struct OutOfMemory {
  int64_t bytes;
  const char* purpose = "";  // " for ..."
};

// Calls f.template operator()<T>() with the element type of dtype.
template <typename F>
PAGEDKV_INLINE void with_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<float>();
    case DType::kFloat16:
      return f.template operator()<Half>();
    case DType::kBFloat16:
      return f.template operator()<BFloat16>();
  }
}

template <typename T>
constexpr PAGEDKV_INLINE T min_of(T a, T b) {
  return a < b ? a : b;
}
template <typename T>
constexpr PAGEDKV_INLINE T max_of(T a, T b) {
  return a > b ? a : b;
}
// The product of two counts, or INT64_MAX: views by expand may name more elements than 64 bits count.
PAGEDKV_INLINE int64_t times(int64_t a, int64_t b) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? INT64_MAX : product;
}
PAGEDKV_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
PAGEDKV_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

}  // namespace pagedkv
