// AVX2 with FMA and F16C. See vec.h.
#pragma once

#include <immintrin.h>

#include "../types.h"

namespace pagedkv::PAGEDKV_ISA {

constexpr bool kFusesMultiplyAdd = true;
constexpr int kLanes = 8;
constexpr int kRegisters = 16;
using Vec = __m256;
using Mask = __m256;

PAGEDKV_INLINE Vec zero() { return _mm256_setzero_ps(); }
PAGEDKV_INLINE Vec broadcast(float x) { return _mm256_set1_ps(x); }
PAGEDKV_INLINE Vec iota() { return _mm256_setr_ps(0, 1, 2, 3, 4, 5, 6, 7); }
PAGEDKV_INLINE __m256i first_lanes(int64_t n) {
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(n)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}

PAGEDKV_INLINE Vec widen(const Half*, __m128i bits) { return _mm256_cvtph_ps(bits); }
PAGEDKV_INLINE Vec widen(const BFloat16*, __m128i bits) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}
PAGEDKV_INLINE Vec widen(const Int8*, __m128i bits) { return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bits)); }
PAGEDKV_INLINE Vec widen(const Float8E5M2*, __m128i bits) {  // the upper half of a float16
  return _mm256_cvtph_ps(_mm_slli_epi16(_mm_cvtepu8_epi16(bits), 8));
}
PAGEDKV_INLINE Vec widen(const Float8E4M3*, __m128i bits) {  // 2^8 times a float16 but for NaN
  const __m128i moved = _mm_slli_epi16(_mm_cvtepi8_epi16(bits), 7);
  const Vec half = _mm256_cvtph_ps(_mm_and_si128(moved, _mm_set1_epi16(static_cast<int16_t>(0xbf80))));
  const __m256i largest = _mm256_set1_epi32(0x7f);
  const __m256i nan = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_cvtepu8_epi32(bits), largest), largest);
  return _mm256_blendv_ps(half * broadcast(0x1p8f), broadcast(__builtin_nanf("")), _mm256_castsi256_ps(nan));
}
PAGEDKV_INLINE Vec load(const float* p) { return _mm256_loadu_ps(p); }
template <typename T>
  requires(sizeof(T) == 1)
PAGEDKV_INLINE Vec load(const T* p) {
  return widen(p, _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
template <int n>
PAGEDKV_INLINE Vec repeat(const float* p) {
  static_assert(n == 8 || n == 4 || n == 2);
  if constexpr (n == 8) return _mm256_loadu_ps(p);
  if constexpr (n == 4) return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(p));
  return _mm256_castpd_ps(_mm256_broadcast_sd(reinterpret_cast<const double*>(p)));
}
template <typename T>
PAGEDKV_INLINE Vec load(const T* p) {
  return widen(p, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
PAGEDKV_INLINE Vec load_first(const float* p, int64_t n) { return _mm256_maskload_ps(p, first_lanes(n)); }
template <typename T>
PAGEDKV_INLINE Vec load_first(const T* p, int64_t n) {
  alignas(16) T copy[kLanes] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  return load(copy);
}

PAGEDKV_INLINE __m128i narrow(const Half*, Vec v) {
  return _mm256_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
PAGEDKV_INLINE __m128i narrow(const BFloat16*, Vec v) {
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
  rounded = _mm256_srli_epi32(rounded, 16);
  const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xd8);
  return _mm256_castsi256_si128(packed);
}
// Of words below 256; GCC 12 makes 40 instructions of __builtin_convertvector.
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));
PAGEDKV_INLINE Bytes low_bytes(__m256i words) {
  const __m128i halves = _mm_packus_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  return reinterpret_cast<Bytes>(_mm_cvtsi128_si64(_mm_packus_epi16(halves, halves)));
}
PAGEDKV_INLINE __m256i low_bytes(const __m256i (&words)[4]) {
  const __m256i a = _mm256_packus_epi32(words[0], words[1]), b = _mm256_packus_epi32(words[2], words[3]);
  return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(a, b), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}
PAGEDKV_INLINE void store(float* p, Vec v) { _mm256_storeu_ps(p, v); }
template <typename T>
PAGEDKV_INLINE void store(T* p, Vec v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), narrow(p, v));
}
PAGEDKV_INLINE void store_first(float* p, Vec v, int64_t n) { _mm256_maskstore_ps(p, first_lanes(n), v); }
template <typename T>
PAGEDKV_INLINE void store_first(T* p, Vec v, int64_t n) {
  alignas(16) T copy[kLanes];
  store(copy, v);
  for (int64_t i = 0; i < n; ++i) p[i] = copy[i];
}

// Two bfloat16 share a 32-bit lane: a shift and a mask widen 16 of them without a shuffle.
PAGEDKV_INLINE void load_pair(const BFloat16* p, Vec& even, Vec& odd) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  even = _mm256_castsi256_ps(_mm256_slli_epi32(bits, 16));
  odd = _mm256_castsi256_ps(_mm256_and_si256(bits, _mm256_set1_epi32(static_cast<int>(0xffff0000))));
}
// 16 elements converted at once; without the factor 2^8 of their group (kGroupFactor).
PAGEDKV_INLINE void load_pair(const Float8E4M3* p, Vec& a, Vec& b) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7), largest = _mm256_set1_epi16(0x3f80);
  const __m256i nan = _mm256_cmpeq_epi16(_mm256_and_si256(moved, largest), largest);
  const __m256i sign_and_value = _mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
  const __m256i halves = _mm256_or_si256(sign_and_value, nan);
  a = _mm256_cvtph_ps(_mm256_castsi256_si128(halves));
  b = _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1));
}
PAGEDKV_INLINE void load_pair(const Float8E5M2* p, Vec& a, Vec& b) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)), none = _mm_setzero_si128();
  a = _mm256_cvtph_ps(_mm_unpacklo_epi8(none, bytes));
  b = _mm256_cvtph_ps(_mm_unpackhi_epi8(none, bytes));
}
template <typename T>
  requires(DTypeOf<T>::value == DType::kBFloat16 || DTypeOf<T>::value >= DType::kFloat8E4M3)
PAGEDKV_INLINE void load_pair_first(const T* p, int64_t n, Vec& a, Vec& b) {
  alignas(32) T copy[2 * kLanes] = {};
  for (int64_t i = 0; i < n; ++i) copy[i] = p[i];
  load_pair(copy, a, b);
}
PAGEDKV_INLINE void interleave(Vec& a, Vec& b) {
  const Vec low = _mm256_unpacklo_ps(a, b), high = _mm256_unpackhi_ps(a, b);
  a = _mm256_permute2f128_ps(low, high, 0x20);
  b = _mm256_permute2f128_ps(low, high, 0x31);
}

PAGEDKV_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
PAGEDKV_INLINE Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }
PAGEDKV_INLINE Vec min(Vec a, Vec b) { return _mm256_min_ps(a, b); }
PAGEDKV_INLINE Mask less(Vec a, Vec b) { return _mm256_cmp_ps(a, b, _CMP_LT_OQ); }
PAGEDKV_INLINE Vec select(Mask m, Vec a, Vec b) { return _mm256_blendv_ps(b, a, m); }
PAGEDKV_INLINE bool any(Mask m) { return _mm256_movemask_ps(m) != 0; }

PAGEDKV_INLINE Vec exp2(Vec x) {
  const Vec limited = _mm256_max_ps(broadcast(-126.0f), x);
  const Vec whole = _mm256_round_ps(limited, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  const Vec f = limited - whole;
  Vec p = broadcast(1.535336188319500e-4f);
  p = fma(p, f, broadcast(1.339887440266574e-3f));
  p = fma(p, f, broadcast(9.618437357674640e-3f));
  p = fma(p, f, broadcast(5.550332471162809e-2f));
  p = fma(p, f, broadcast(2.402264791363012e-1f));
  p = fma(p, f, broadcast(6.931472028550421e-1f));
  p = fma(p, f, broadcast(1.0f));
  const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(whole), 23);
  const Vec result = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
  const Vec scaled = _mm256_andnot_ps(_mm256_cmp_ps(x, broadcast(-126.0f), _CMP_LT_OQ), result);
  return _mm256_blendv_ps(scaled, x, _mm256_cmp_ps(x, x, _CMP_UNORD_Q));
}

template <typename F>
PAGEDKV_INLINE Vec join_within_halves(Vec a, Vec b, Vec c, Vec d, const F& f) {
  const Vec ab = f(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  const Vec cd = f(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
  const __m256d x = _mm256_castps_pd(ab), y = _mm256_castps_pd(cd);
  return f(_mm256_castpd_ps(_mm256_unpacklo_pd(x, y)), _mm256_castpd_ps(_mm256_unpackhi_pd(x, y)));
}
template <typename F>
PAGEDKV_INLINE Vec join_lanes(const Vec v[kLanes], const F& f) {
  const Vec low = join_within_halves(v[0], v[1], v[2], v[3], f);
  const Vec high = join_within_halves(v[4], v[5], v[6], v[7], f);
  return f(_mm256_permute2f128_ps(low, high, 0x20), _mm256_permute2f128_ps(low, high, 0x31));
}

template <int n>
PAGEDKV_INLINE Vec group_max(Vec v) {
  if constexpr (n >= 2) v = max(v, _mm256_permute_ps(v, 0xb1));
  if constexpr (n >= 4) v = max(v, _mm256_permute_ps(v, 0x4e));
  if constexpr (n >= 8) v = max(v, _mm256_permute2f128_ps(v, v, 0x01));
  return v;
}

PAGEDKV_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

}  // namespace pagedkv::PAGEDKV_ISA
