// The vector unit of the instruction set this translation unit is compiled for, as a handful of functions in the
// namespace pagedkv::PAGEDKV_ISA (a macro that each translation unit defines): nothing built for one set can be linked
// into another. Kernels are written once against this interface.
//
// clang-format off
//   kLanes, kRegisters               floats per Vec; vector registers of the machine
//   Vec, Mask                        arithmetic operators work on Vec
//   zero() broadcast(x) iota()       iota: 0, 1, 2, ...
//   load(const T*) store(T*, Vec)    T: float, Half, BFloat16, Int8, Float8E4M3, Float8E5M2; stores round to nearest
//                                    even; unaligned; quantised types take at most T::kMost, Int8 no NaN
//   load_first(const T*, n)          the first n <= kLanes elements, the rest 0, nothing past them is touched
//   store_first(T*, Vec, n)
//   load_pair(const T*, Vec&, Vec&)  2 * kLanes elements in the cheapest order of T (bfloat16: even, odd); see pair_index
//   load_pair_first(p, n, a, b)      the same with n <= 2 * kLanes elements, the rest 0
//   pair_index<T>(i)                 which of the 2 * kLanes elements lane i of (a, b) holds
//   store_pair<T>(float*, a, b)      writes the 2 * kLanes floats of such a pair in natural order
//   kGroup<T>                        vectors that are loaded at once: a pair, or four of bytes, which are a line
//   load_group(const T*, Vec*)       load_group_first, group_index, store_group: as for pairs; n: elements of the group
//   kGroupFactor<T>                  what load_group has divided the elements by
//   interleave(a, b)                 a0 b0 a1 b1 ...
//   fma(a, b, c)                     a * b + c, rounded once where kFusesMultiplyAdd
//   max(a, b) min(a, b)              NaN in b is kept
//   less(a, b) select(m, a, b) any(m)
//   exp2(x)                          2^x, relative error < 3e-7, exactly 1 at 0 and exactly 0 from -150 down (-inf too)
//   join_lanes(const Vec[kLanes], f) lane i joins the lanes of vector i by f(Vec, Vec), in the same order for every i
//   reduce_lanes(v) max_lanes(v)     join_lanes with the sum and the maximum
//   group_max<n>(v)                  over each run of n lanes, the result in every lane of the run
//   repeat<n>(const float*)          n floats over and over
//   prefetch(p)                      into the second-level cache
//   kHasDotBF16, dot_bf16(acc, a, b) acc + pairwise products of 2 * kLanes bfloat16 (PairBits); only where kHasDotBF16
//   load_bits(const BFloat16*)       2 * kLanes bfloat16 as they are; load_bits_first(p, n)
//   pack_bf16(lo, hi)                2 * kLanes floats, rounded, in natural order, as PairBits
//   zip_bits(x, y, low, high)        pairs (x[i], y[i]) of 2 * kLanes bfloat16 each, in an order that store_zipped undoes
//   store_zipped(float*, low, high)  writes 2 * kLanes floats that were accumulated over such pairs in natural order
//   store_rounded(BFloat16*, v)      kLanes bfloat16 rounded like pack_bf16
//   broadcast_two(p)                 p[0], p[1] everywhere
// clang-format on
#pragma once

#include "../types.h"

#if defined(PAGEDKV_ISA_AVX512)
#include "vec_avx512.h"
#elif defined(PAGEDKV_ISA_AVX2)
#include "vec_avx2.h"
#else
#include "vec_generic.h"
#endif

namespace pagedkv::PAGEDKV_ISA {

template <typename T>
PAGEDKV_INLINE void load_pair(const T* p, Vec& a, Vec& b) {
  a = load(p);
  b = load(p + kLanes);
}
template <typename T>
PAGEDKV_INLINE void load_pair_first(const T* p, int64_t n, Vec& a, Vec& b) {
  a = load_first(p, n < kLanes ? n : kLanes);
  b = n > kLanes ? load_first(p + kLanes, n - kLanes) : zero();
}
template <typename T>
PAGEDKV_INLINE int pair_index(int lane) {
  if constexpr (DTypeOf<T>::value == DType::kBFloat16) return lane < kLanes ? 2 * lane : 2 * (lane - kLanes) + 1;
  return lane;
}
template <typename T>
PAGEDKV_INLINE void store_pair(float* p, Vec a, Vec b) {
  if constexpr (DTypeOf<T>::value == DType::kBFloat16) interleave(a, b);
  store(p, a);
  store(p + kLanes, b);
}

template <typename T>
constexpr int kGroup = sizeof(T) == 1 && kRegisters == 32 ? 4 : 2;
// load_group gives the elements over this, a power of two that scores and results take back.
#if defined(PAGEDKV_ISA_AVX2)
template <typename T>
constexpr float kGroupFactor = DTypeOf<T>::value == DType::kFloat8E4M3 ? 0x1p8f : 1.0f;
#else
template <typename T>
constexpr float kGroupFactor = 1.0f;
#endif
template <typename T>
PAGEDKV_INLINE void load_group(const T* p, Vec* v) {
  if constexpr (kGroup<T> == 2) {
    load_pair(p, v[0], v[1]);
  } else {
    for (int i = 0; i < kGroup<T>; ++i) v[i] = load(p + i * kLanes);
  }
}
// In natural order, unless the group is a pair.
template <typename T>
PAGEDKV_INLINE void load_group_first(const T* p, int64_t n, Vec* v) {
  if constexpr (kGroup<T> == 2) {
    load_pair_first(p, n, v[0], v[1]);
  } else {
    for (int i = 0; i < kGroup<T>; ++i) {
      const int64_t rest = n - i * kLanes;
      v[i] = rest >= kLanes ? load(p + i * kLanes) : rest > 0 ? load_first(p + i * kLanes, rest) : zero();
    }
  }
}
// n: elements of the group.
template <typename T>
PAGEDKV_INLINE int group_index(int lane, [[maybe_unused]] int64_t n) {
#if defined(PAGEDKV_ISA_VBMI)
  if constexpr (kGroup<T> == 4 && DTypeOf<T>::value != DType::kInt8) {
    return n < kGroup<T> * kLanes ? lane : float8_index(lane);
  }
#endif
  return kGroup<T> == 2 ? pair_index<T>(lane) : lane;
}
// From kGroup<T> vectors that follow one another.
template <typename T>
PAGEDKV_INLINE void store_group(float* p, const float* group, int64_t n) {
  if constexpr (kGroup<T> == 2) {
    const Vec factor = broadcast(kGroupFactor<T>);
    store_pair<T>(p, load(group) * factor, load(group + kLanes) * factor);
  } else {
    for (int i = 0; i < kGroup<T> * kLanes; ++i) p[group_index<T>(i, n)] = group[i];
  }
}
// Whether vector i of a group of n elements holds any: a pair is always taken whole.
template <typename T>
PAGEDKV_INLINE bool is_used(int i, int64_t n) {
  return kGroup<T> == 2 || i * kLanes < n;
}

#if !defined(PAGEDKV_ISA_AVX512_BF16)
// Never called: templates name them.
constexpr bool kHasDotBF16 = false;
typedef int32_t PairBits __attribute__((vector_size(sizeof(Vec))));
PAGEDKV_INLINE Vec dot_bf16(Vec acc, PairBits, PairBits) { return acc; }
PAGEDKV_INLINE PairBits load_bits(const BFloat16*) { return PairBits{}; }
PAGEDKV_INLINE PairBits load_bits_first(const BFloat16*, int64_t) { return PairBits{}; }
PAGEDKV_INLINE PairBits pack_bf16(Vec, Vec) { return PairBits{}; }
PAGEDKV_INLINE void zip_bits(PairBits, PairBits, PairBits&, PairBits&) {}
PAGEDKV_INLINE void store_zipped(float*, Vec, Vec) {}
PAGEDKV_INLINE void store_rounded(BFloat16*, Vec) {}
PAGEDKV_INLINE PairBits broadcast_two(const BFloat16*) { return PairBits{}; }
#endif

// Of quantised types, from float32 in one rounding: in two, by way of float16, some would come out wrong.
typedef uint32_t Words __attribute__((vector_size(sizeof(Vec))));
typedef int32_t Integers __attribute__((vector_size(sizeof(Vec))));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
template <typename T>
PAGEDKV_INLINE Words narrow_quantised(Vec v) {
  if constexpr (DTypeOf<T>::value == DType::kInt8) {
    return reinterpret_cast<Words>(v + broadcast(0x1.8p23f));  // the integer lands in the low bits
  } else {
    constexpr int kDropped = 23 - T::kMantissa;
    constexpr uint32_t kRebias = static_cast<uint32_t>(127 - T::kBias) << 23, kFirstNormal = kRebias + (1u << 23);
    // adding it rounds at the smallest denormal
    constexpr uint32_t kMagic = static_cast<uint32_t>(127 + 24 - T::kBias - T::kMantissa) << 23;
    const Words bits = reinterpret_cast<Words>(v), magnitude = bits & 0x7fffffff, magic = Words{} + kMagic;
    const auto is_less = [](Words a, Words b) PAGEDKV_LAMBDA {  // of magnitudes: AVX2 compares only signed numbers
      return reinterpret_cast<Integers>(a) < reinterpret_cast<Integers>(b);
    };
    const Words normal =
        (magnitude - kRebias + ((1u << (kDropped - 1)) - 1) + ((magnitude >> kDropped) & 1)) >> kDropped;
    const Words tiny = reinterpret_cast<Words>(reinterpret_cast<Vec>(magnitude) + reinterpret_cast<Vec>(magic)) - magic;
    Words result = is_less(magnitude, Words{} + kFirstNormal) ? tiny : normal;
    result = is_less(Words{} + 0x7f800000, magnitude) ? Words{} + 0x7f : result;
    return result | ((bits >> 24) & 0x80);
  }
}
template <typename T>
  requires(sizeof(T) == 1)
PAGEDKV_INLINE void store(T* p, Vec v) {
  const Words words = narrow_quantised<T>(v) & 0xff;  // without the mask GCC 12 takes int8 apart element by element
#if defined(PAGEDKV_ISA_AVX2)
  const Bytes bytes = low_bytes(reinterpret_cast<__m256i>(words));
#else
  const Bytes bytes = __builtin_convertvector(words, Bytes);
#endif
  __builtin_memcpy(p, &bytes, sizeof(bytes));
}
template <typename T>
  requires(sizeof(T) == 1)
PAGEDKV_INLINE void store_first(T* p, Vec v, int64_t n) {
  T copy[kLanes];
  store(copy, v);
  for (int64_t i = 0; i < n; ++i) p[i] = copy[i];
}

// 2 * kLanes quantised elements as bfloat16, which holds each of them.
template <typename T>
  requires(sizeof(T) == 1)
PAGEDKV_INLINE PairBits load_bits(const T* p) {
  return pack_bf16(load(p), load(p + kLanes));
}
template <typename T>
  requires(sizeof(T) == 1)
PAGEDKV_INLINE PairBits load_bits_first(const T* p, int64_t n) {
  return pack_bf16(load_first(p, n < kLanes ? n : kLanes), n > kLanes ? load_first(p + kLanes, n - kLanes) : zero());
}

constexpr float kLog2E = 1.44269504088896340736f;
constexpr float kLn2 = 0.69314718055994530942f;

PAGEDKV_INLINE Vec reduce_lanes(const Vec v[kLanes]) {
  return join_lanes(v, [](Vec a, Vec b) PAGEDKV_LAMBDA { return a + b; });
}
PAGEDKV_INLINE Vec max_lanes(const Vec v[kLanes]) {
  return join_lanes(v, [](Vec a, Vec b) PAGEDKV_LAMBDA { return max(a, b); });
}

// Relative error about 2e-7: a polynomial near 0, where (e - 1) / (e + 1) would lose digits (coefficients: Cephes
// tanhf).
PAGEDKV_INLINE Vec tanh(Vec x) {
  const Vec limited = max(broadcast(-10.0f), min(broadcast(10.0f), x));
  const Vec e = exp2(limited * broadcast(2.0f * kLog2E));
  const Vec square = limited * limited;
  Vec p = broadcast(-5.70498872745e-3f);
  p = fma(p, square, broadcast(2.06390887954e-2f));
  p = fma(p, square, broadcast(-5.37397155531e-2f));
  p = fma(p, square, broadcast(1.33314422036e-1f));
  p = fma(p, square, broadcast(-3.33332819422e-1f));
  const Vec small = fma(p * square, limited, limited);
  return select(less(square, broadcast(0.390625f)), small, (e - broadcast(1.0f)) / (e + broadcast(1.0f)));
}

// cap * tanh(x / cap), given also 1 / cap. Below 2^-13 of the cap the two differ by less than float32 tells apart, and
// x / cap may be too small for it.
PAGEDKV_INLINE Vec soft_capped(Vec x, float cap, float inverse) {
  const Vec magnitude = max(x, zero() - x);
  return select(less(magnitude, broadcast(cap * 0x1p-13f)), x, tanh(x * broadcast(inverse)) * broadcast(cap));
}

}  // namespace pagedkv::PAGEDKV_ISA
