// Plain types shared by every translation unit. Everything here is always_inline: these headers are compiled once per
// instruction set, and an out-of-line copy built for AVX-512 must never be the one that the linker keeps for all.
#pragma once

#include <cstddef>
#include <cstdint>

#define PAGEDKV_INLINE __attribute__((always_inline)) inline
#define PAGEDKV_LAMBDA __attribute__((always_inline))

namespace pagedkv {

enum class DType : int8_t { kFloat32, kFloat16, kBFloat16, kInt8, kFloat8E4M3, kFloat8E5M2 };

struct Half {
  uint16_t bits;
};

struct BFloat16 {
  uint16_t bits;
};

// Quantised: what is stored times a scale. kMost is the largest number that is written.
struct Int8 {
  int8_t bits;
  static constexpr float kMost = 127.0f;
};

struct Float8E4M3 {  // has no infinity
  uint8_t bits;
  static constexpr float kMost = 448.0f;
  static constexpr int kMantissa = 3, kBias = 7;
};

struct Float8E5M2 {
  uint8_t bits;
  static constexpr float kMost = 57344.0f;
  static constexpr int kMantissa = 2, kBias = 15;
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

template <>
struct DTypeOf<Int8> {
  static constexpr DType value = DType::kInt8;
};
template <>
struct DTypeOf<Float8E4M3> {
  static constexpr DType value = DType::kFloat8E4M3;
};
template <>
struct DTypeOf<Float8E5M2> {
  static constexpr DType value = DType::kFloat8E5M2;
};

constexpr PAGEDKV_INLINE bool is_quantised(DType dtype) { return dtype >= DType::kInt8; }
PAGEDKV_INLINE int64_t element_size(DType dtype) { return dtype == DType::kFloat32 ? 4 : is_quantised(dtype) ? 1 : 2; }

// Too little memory; the op's name is added where it is known (library.cpp).
struct OutOfMemory {
  int64_t bytes;
  const char* purpose = "";  // " for ..."
};

// Calls f.template operator()<T>() with the element type of dtype, which is not quantised.
template <typename F>
PAGEDKV_INLINE void with_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kFloat32:
      return f.template operator()<float>();
    case DType::kFloat16:
      return f.template operator()<Half>();
    default:
      return f.template operator()<BFloat16>();
  }
}

template <typename F>
PAGEDKV_INLINE void with_quantised_dtype(DType dtype, const F& f) {
  switch (dtype) {
    case DType::kInt8:
      return f.template operator()<Int8>();
    case DType::kFloat8E4M3:
      return f.template operator()<Float8E4M3>();
    default:
      return f.template operator()<Float8E5M2>();
  }
}

// The same with any type that a cache can have.
template <typename F>
PAGEDKV_INLINE void with_cache_dtype(DType dtype, const F& f) {
  if (is_quantised(dtype)) return with_quantised_dtype(dtype, f);
  with_dtype(dtype, f);
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
