// Any machine, by the compiler's vector types: SSE2 on x86-64, NEON on Arm. See vec.h.
#pragma once

#include "../types.h"

namespace pagedkv::PAGEDKV_ISA {

constexpr bool kFusesMultiplyAdd = false;
constexpr int kLanes = 4;
#if defined(__x86_64__)
constexpr int kRegisters = 16;
#else
constexpr int kRegisters = 32;
#endif
typedef float Vec __attribute__((vector_size(16)));
typedef int32_t Mask __attribute__((vector_size(16)));
typedef uint32_t Bits __attribute__((vector_size(16)));
typedef uint16_t Bits16 __attribute__((vector_size(8)));

PAGEDKV_INLINE Vec zero() { return Vec{}; }
PAGEDKV_INLINE Vec broadcast(float x) { return Vec{x, x, x, x}; }
PAGEDKV_INLINE Bits broadcast_bits(uint32_t x) { return Bits{x, x, x, x}; }
PAGEDKV_INLINE Vec iota() { return Vec{0, 1, 2, 3}; }
PAGEDKV_INLINE Vec select(Mask m, Vec a, Vec b) { return m ? a : b; }
PAGEDKV_INLINE Bits select_bits(Mask m, Bits a, Bits b) { return m ? a : b; }
PAGEDKV_INLINE Mask less(Vec a, Vec b) { return a < b; }
PAGEDKV_INLINE bool any(Mask m) { return (m[0] | m[1] | m[2] | m[3]) != 0; }

PAGEDKV_INLINE Vec widen(const BFloat16*, Bits bits) { return reinterpret_cast<Vec>(bits << 16); }
// Half: shift exponent and mantissa into place and rescale; denormals come out right because the product is exact.
PAGEDKV_INLINE Vec widen(const Half*, Bits bits) {
  const Bits magnitude = (bits & 0x7fff) << 13;
  const Bits sign = (bits & 0x8000) << 16;
  const Bits scaled = reinterpret_cast<Bits>(reinterpret_cast<Vec>(magnitude) * 0x1p112f);
  const Bits special = (magnitude & 0x7fffff) | 0x7f800000;
  return reinterpret_cast<Vec>(select_bits(magnitude >= 0x0f800000, special, scaled) | sign);
}
PAGEDKV_INLINE Bits narrow(const BFloat16*, Vec v) {
  const Bits bits = reinterpret_cast<Bits>(v);
  const Bits rounded = bits + 0x7fff + ((bits >> 16) & 1);
  return select_bits(v == v, rounded, broadcast_bits(0x7fc00000)) >> 16;
}
// Half, to nearest even: normal results by integer rounding, denormal ones by an addition that rounds at 2^-24.
PAGEDKV_INLINE Bits narrow(const Half*, Vec v) {
  const Bits bits = reinterpret_cast<Bits>(v);
  const Bits sign = (bits >> 16) & 0x8000;
  const Bits magnitude = bits & 0x7fffffff;
  const Bits normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
  const Bits shifted = reinterpret_cast<Bits>(reinterpret_cast<Vec>(magnitude) + broadcast(0.5f)) - 0x3f000000;
  Bits result = select_bits(magnitude < 0x38800000, shifted, normal);
  result = select_bits(magnitude >= 0x477ff000, broadcast_bits(0x7c00), result);
  result = select_bits(magnitude > 0x7f800000, broadcast_bits(0x7e00), result);
  return result | sign;
}

PAGEDKV_INLINE Vec widen(const Int8*, Bits bits) { return __builtin_convertvector(reinterpret_cast<Mask>(bits), Vec); }
PAGEDKV_INLINE Vec widen(const Float8E5M2*, Bits bits) {  // the upper half of a float16
  return widen(static_cast<const Half*>(nullptr), bits << 8);
}
PAGEDKV_INLINE Vec widen(const Float8E4M3*, Bits bits) {  // 2^8 times a float16 but for NaN
  const Vec half = widen(static_cast<const Half*>(nullptr), (bits & 0x80) << 8 | (bits & 0x7f) << 7);
  return select((bits & 0x7f) == 0x7f, broadcast(__builtin_nanf("")), half * broadcast(0x1p8f));
}
template <int n>
PAGEDKV_INLINE Vec repeat(const float* p) {
  return Vec{p[0], p[1 % n], p[2 % n], p[3 % n]};
}

PAGEDKV_INLINE Vec load(const float* p) {
  Vec v;
  __builtin_memcpy(&v, p, sizeof(v));
  return v;
}
template <typename T>
PAGEDKV_INLINE Vec load(const T* p) {
  const auto bits = [&](int i) PAGEDKV_LAMBDA { return static_cast<uint32_t>(p[i].bits); };
  return widen(p, Bits{bits(0), bits(1), bits(2), bits(3)});
}
PAGEDKV_INLINE void store(float* p, Vec v) { __builtin_memcpy(p, &v, sizeof(v)); }
template <typename T>
PAGEDKV_INLINE void store(T* p, Vec v) {
  const Bits16 bits = __builtin_convertvector(narrow(p, v), Bits16);
  __builtin_memcpy(p, &bits, sizeof(bits));
}
template <typename T>
PAGEDKV_INLINE Vec load_first(const T* p, int64_t n) {
  T copy[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return load(copy);
}
template <typename T>
PAGEDKV_INLINE void store_first(T* p, Vec v, int64_t n) {
  T copy[kLanes];
  store(copy, v);
  for (int64_t i = 0; i < n; ++i) p[i] = copy[i];
}

// Two bfloat16 share a 32-bit lane: a shift and a mask widen 8 of them without a shuffle.
PAGEDKV_INLINE void load_pair(const BFloat16* p, Vec& even, Vec& odd) {
  static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "pair_index assumes that the even element is the low half");
  Bits bits;
  __builtin_memcpy(&bits, p, sizeof(bits));
  even = reinterpret_cast<Vec>(bits << 16);
  odd = reinterpret_cast<Vec>(bits & 0xffff0000);
}
PAGEDKV_INLINE void load_pair_first(const BFloat16* p, int64_t n, Vec& even, Vec& odd) {
  BFloat16 copy[2 * kLanes] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  load_pair(copy, even, odd);
}
PAGEDKV_INLINE void interleave(Vec& a, Vec& b) {
  const Vec first{a[0], b[0], a[1], b[1]};
  b = Vec{a[2], b[2], a[3], b[3]};
  a = first;
}

PAGEDKV_INLINE Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
PAGEDKV_INLINE Vec max(Vec a, Vec b) { return a > b ? a : b; }
PAGEDKV_INLINE Vec min(Vec a, Vec b) { return a < b ? a : b; }

PAGEDKV_INLINE Vec exp2(Vec x) {
  const Vec limited = max(broadcast(-126.0f), x);
  const Vec shifted = limited + 12582912.0f;  // 1.5 * 2^23: the integer part lands in the low bits
  const Vec f = limited - (shifted - 12582912.0f);
  Vec p = broadcast(1.535336188319500e-4f);
  p = fma(p, f, broadcast(1.339887440266574e-3f));
  p = fma(p, f, broadcast(9.618437357674640e-3f));
  p = fma(p, f, broadcast(5.550332471162809e-2f));
  p = fma(p, f, broadcast(2.402264791363012e-1f));
  p = fma(p, f, broadcast(6.931472028550421e-1f));
  p = fma(p, f, broadcast(1.0f));
  const Vec scaled = reinterpret_cast<Vec>(reinterpret_cast<Bits>(p) + (reinterpret_cast<Bits>(shifted) << 23));
  const Vec flushed = select(less(x, broadcast(-126.0f)), zero(), scaled);
  return select(x == x, flushed, x);
}

template <typename F>
PAGEDKV_INLINE Vec join_lanes(const Vec v[kLanes], const F& f) {
  const Vec ab = f(__builtin_shufflevector(v[0], v[1], 0, 4, 1, 5), __builtin_shufflevector(v[0], v[1], 2, 6, 3, 7));
  const Vec cd = f(__builtin_shufflevector(v[2], v[3], 0, 4, 1, 5), __builtin_shufflevector(v[2], v[3], 2, 6, 3, 7));
  return f(__builtin_shufflevector(ab, cd, 0, 1, 4, 5), __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
}
template <int n>
PAGEDKV_INLINE Vec group_max(Vec v) {
  if constexpr (n >= 2) v = max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2));
  if constexpr (n >= 4) v = max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1));
  return v;
}
PAGEDKV_INLINE void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

}  // namespace pagedkv::PAGEDKV_ISA
