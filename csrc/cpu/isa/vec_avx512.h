// AVX-512 (F, BW, VL, DQ), with BF16 dot products when PAGEDKV_ISA_AVX512_BF16 is defined. See vec.h.
#pragma once

#include <immintrin.h>

#include "../types.h"

namespace pagedkv::PAGEDKV_ISA {

constexpr bool kFusesMultiplyAdd = true;
constexpr int kLanes = 16;
constexpr int kRegisters = 32;
using Vec = __m512;
using Mask = __mmask16;

PAGEDKV_INLINE Vec zero() { return _mm512_setzero_ps(); }
PAGEDKV_INLINE Vec broadcast(float x) { return _mm512_set1_ps(x); }
PAGEDKV_INLINE Vec iota() { return _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15); }
PAGEDKV_INLINE Mask first_lanes(int64_t n) { return static_cast<Mask>((1u << n) - 1); }
PAGEDKV_INLINE __mmask32 first_halves(int64_t n) { return static_cast<__mmask32>((uint64_t{1} << n) - 1); }

PAGEDKV_INLINE Vec widen(const Half*, __m256i bits) { return _mm512_cvtph_ps(bits); }
PAGEDKV_INLINE Vec widen(const BFloat16*, __m256i bits) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}
PAGEDKV_INLINE Vec widen(const Int8*, __m128i bits) { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(bits)); }
PAGEDKV_INLINE Vec widen(const Float8E5M2*, __m128i bits) {  // the upper half of a float16
  return _mm512_cvtph_ps(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bits), 8));
}
PAGEDKV_INLINE Vec widen(const Float8E4M3*, __m128i bits) {  // 2^8 times a float16 but for NaN
  const __m128i largest = _mm_set1_epi8(0x7f);
  const __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bits), 7);
  const Vec half = _mm512_cvtph_ps(_mm256_and_si256(moved, _mm256_set1_epi16(static_cast<int16_t>(0xbf80))));
  const Mask nan = _mm_cmpeq_epi8_mask(_mm_and_si128(bits, largest), largest);
  return _mm512_mask_mov_ps(half * broadcast(0x1p8f), nan, broadcast(__builtin_nanf("")));
}
PAGEDKV_INLINE Vec load(const float* p) { return _mm512_loadu_ps(p); }
template <typename T>
  requires(sizeof(T) == 1)
PAGEDKV_INLINE Vec load(const T* p) {
  return widen(p, _mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
template <typename T>
  requires(sizeof(T) == 1)
PAGEDKV_INLINE Vec load_first(const T* p, int64_t n) {
  return widen(p, _mm_maskz_loadu_epi8(first_lanes(n), p));
}
template <int n>
PAGEDKV_INLINE Vec repeat(const float* p) {
  static_assert(n == 16 || n == 8 || n == 4);
  if constexpr (n == 16) return _mm512_loadu_ps(p);
  if constexpr (n == 8) return _mm512_broadcast_f32x8(_mm256_loadu_ps(p));
  return _mm512_broadcast_f32x4(_mm_loadu_ps(p));
}
template <typename T>
PAGEDKV_INLINE Vec load(const T* p) {
  return widen(p, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
PAGEDKV_INLINE Vec load_first(const float* p, int64_t n) { return _mm512_maskz_loadu_ps(first_lanes(n), p); }
template <typename T>
PAGEDKV_INLINE Vec load_first(const T* p, int64_t n) {
  return widen(p, _mm256_maskz_loadu_epi16(first_lanes(n), p));
}

PAGEDKV_INLINE __m256i narrow(const Half*, Vec v) {
  return _mm512_cvtps_ph(v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
PAGEDKV_INLINE __m256i narrow(const BFloat16*, Vec v) {
  // Not _mm512_cvtneps_pbh: it flushes denormals.
  const __m512i bits = _mm512_castps_si512(v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  const __m512i quiet = _mm512_set1_epi32(0x7fc00000);
  const Mask nan = _mm512_cmp_ps_mask(v, v, _CMP_UNORD_Q);
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_mov_epi32(rounded, nan, quiet), 16));
}
PAGEDKV_INLINE void store(float* p, Vec v) { _mm512_storeu_ps(p, v); }
template <typename T>
PAGEDKV_INLINE void store(T* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), narrow(p, v));
}
PAGEDKV_INLINE void store_first(float* p, Vec v, int64_t n) { _mm512_mask_storeu_ps(p, first_lanes(n), v); }
template <typename T>
PAGEDKV_INLINE void store_first(T* p, Vec v, int64_t n) {
  _mm256_mask_storeu_epi16(p, first_lanes(n), narrow(p, v));
}

// Two bfloat16 share a 32-bit lane: a shift and a mask widen 32 of them without a shuffle.
PAGEDKV_INLINE void split_pair(__m512i bits, Vec& even, Vec& odd) {
  even = _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
  odd = _mm512_castsi512_ps(_mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xffff0000))));
}
PAGEDKV_INLINE void load_pair(const BFloat16* p, Vec& even, Vec& odd) { split_pair(_mm512_loadu_si512(p), even, odd); }
PAGEDKV_INLINE void load_pair_first(const BFloat16* p, int64_t n, Vec& even, Vec& odd) {
  split_pair(_mm512_maskz_loadu_epi16(first_halves(n), p), even, odd);
}
PAGEDKV_INLINE void interleave(Vec& a, Vec& b) {
  const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  const __m512i high = _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
  const Vec first = _mm512_permutex2var_ps(a, low, b);
  b = _mm512_permutex2var_ps(a, high, b);
  a = first;
}

#if defined(PAGEDKV_ISA_VBMI)
// The bytes of each non-negative float8 as bfloat16, which has as many bits of exponent as it takes.
template <typename T>
struct Float8Table {
  alignas(64) uint8_t low[128], high[128];
  constexpr Float8Table() : low(), high() {
    for (uint32_t code = 0; code < 128; ++code) {
      uint32_t exponent = code >> T::kMantissa, mantissa = code & ((1u << T::kMantissa) - 1);
      uint32_t bits = 0;
      if (exponent == 0 && mantissa != 0) {  // a denormal number
        exponent = 1;
        while (!(mantissa >> T::kMantissa)) {
          mantissa <<= 1;
          --exponent;
        }
        mantissa &= (1u << T::kMantissa) - 1;
        bits = ((exponent + 127 - T::kBias) << 7) | (mantissa << (7 - T::kMantissa));
      } else if (exponent != 0) {
        bits = ((exponent + 127 - T::kBias) << 7) | (mantissa << (7 - T::kMantissa));
      }
      if (T::kMantissa == 2 && code >= 0x7c) bits = code == 0x7c ? 0x7f80 : 0x7fc0;
      if (T::kMantissa == 3 && code == 0x7f) bits = 0x7fc0;
      low[code] = static_cast<uint8_t>(bits);
      high[code] = static_cast<uint8_t>(bits >> 8);
    }
  }
};

// 64 elements by two look-ups of 7 bits; what they give is split like bfloat16.
template <typename T>
  requires(DTypeOf<T>::value == DType::kFloat8E4M3 || DTypeOf<T>::value == DType::kFloat8E5M2)
PAGEDKV_INLINE void load_group(const T* p, Vec* v) {
  static constexpr Float8Table<T> table;
  const __m512i codes = _mm512_loadu_si512(p);
  const auto look_up = [&](const uint8_t* bytes) PAGEDKV_LAMBDA {
    return _mm512_permutex2var_epi8(_mm512_load_si512(bytes), codes, _mm512_load_si512(bytes + 64));
  };
  const __m512i low = look_up(table.low);
  constexpr int kOrAnd = 0xf8;  // a | b & c
  const __m512i high =
      _mm512_ternarylogic_epi32(look_up(table.high), codes, _mm512_set1_epi8(static_cast<char>(0x80)), kOrAnd);
  split_pair(_mm512_unpacklo_epi8(low, high), v[0], v[1]);
  split_pair(_mm512_unpackhi_epi8(low, high), v[2], v[3]);
}
// Which element lane `lane` of the four vectors holds.
PAGEDKV_INLINE int float8_index(int lane) {
  const int vector = lane / kLanes, quarter = lane % kLanes / 4, place = lane % 4;
  return quarter * 16 + vector / 2 * 8 + place * 2 + vector % 2;
}
#endif

PAGEDKV_INLINE Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
PAGEDKV_INLINE Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }
PAGEDKV_INLINE Vec min(Vec a, Vec b) { return _mm512_min_ps(a, b); }
PAGEDKV_INLINE Mask less(Vec a, Vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
PAGEDKV_INLINE Vec select(Mask m, Vec a, Vec b) { return _mm512_mask_blend_ps(m, b, a); }
PAGEDKV_INLINE bool any(Mask m) { return m != 0; }

PAGEDKV_INLINE Vec exp2(Vec x) {
  const Vec f = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // x - floor(x), 0 at -inf
  Vec p = broadcast(1.867130214e-3f);
  p = fma(p, f, broadcast(9.017030018e-3f));
  p = fma(p, f, broadcast(5.579991332e-2f));
  p = fma(p, f, broadcast(2.401644501e-1f));
  p = fma(p, f, broadcast(6.931513118e-1f));
  p = fma(p, f, broadcast(1.0f));
  return _mm512_scalef_ps(p, x);  // p * 2^floor(x)
}

// 4 vectors -> one whose 128-bit lane i joins the lanes i of each.
template <typename F>
PAGEDKV_INLINE Vec join_within_quarters(Vec a, Vec b, Vec c, Vec d, const F& f) {
  const Vec ab = f(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  const Vec cd = f(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  const __m512d x = _mm512_castps_pd(ab), y = _mm512_castps_pd(cd);
  return f(_mm512_castpd_ps(_mm512_unpacklo_pd(x, y)), _mm512_castpd_ps(_mm512_unpackhi_pd(x, y)));
}
template <typename F>
PAGEDKV_INLINE Vec join_lanes(const Vec v[kLanes], const F& f) {
  const Vec a = join_within_quarters(v[0], v[1], v[2], v[3], f);
  const Vec b = join_within_quarters(v[4], v[5], v[6], v[7], f);
  const Vec c = join_within_quarters(v[8], v[9], v[10], v[11], f);
  const Vec d = join_within_quarters(v[12], v[13], v[14], v[15], f);
  const Vec ab = f(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  const Vec cd = f(_mm512_shuffle_f32x4(c, d, 0x88), _mm512_shuffle_f32x4(c, d, 0xdd));
  return f(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
}

template <int n>
PAGEDKV_INLINE Vec group_max(Vec v) {
  if constexpr (n >= 2) v = max(v, _mm512_permute_ps(v, 0xb1));
  if constexpr (n >= 4) v = max(v, _mm512_permute_ps(v, 0x4e));
  if constexpr (n >= 8) v = max(v, _mm512_shuffle_f32x4(v, v, 0xb1));
  if constexpr (n >= 16) v = max(v, _mm512_shuffle_f32x4(v, v, 0x4e));
  return v;
}

PAGEDKV_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

#ifdef PAGEDKV_ISA_AVX512_BF16
constexpr bool kHasDotBF16 = true;
using PairBits = __m512i;
PAGEDKV_INLINE Vec dot_bf16(Vec acc, PairBits a, PairBits b) {
#if defined(__clang__) && __clang_major__ == 16  // recurses without end (VectorCombine) where it sees a shuffle cast
  __asm__("" : "+v"(a), "+v"(b));
#endif
  return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
}
PAGEDKV_INLINE PairBits load_bits(const BFloat16* p) { return _mm512_loadu_si512(p); }
PAGEDKV_INLINE PairBits load_bits_first(const BFloat16* p, int64_t n) {
  return _mm512_maskz_loadu_epi16(first_halves(n), p);
}
PAGEDKV_INLINE PairBits pack_bf16(Vec lo, Vec hi) { return reinterpret_cast<PairBits>(_mm512_cvtne2ps_pbh(hi, lo)); }
PAGEDKV_INLINE void zip_bits(PairBits x, PairBits y, PairBits& low, PairBits& high) {
  low = _mm512_unpacklo_epi16(x, y);
  high = _mm512_unpackhi_epi16(x, y);
}
PAGEDKV_INLINE void store_zipped(float* p, Vec low, Vec high) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  store(p, _mm512_permutex2var_ps(low, first, high));
  store(p + kLanes, _mm512_permutex2var_ps(low, second, high));
}
PAGEDKV_INLINE void store_rounded(BFloat16* p, Vec v) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(v)));
}
PAGEDKV_INLINE PairBits broadcast_two(const BFloat16* p) {
  int32_t word;
  __builtin_memcpy(&word, p, sizeof(word));
  return _mm512_set1_epi32(word);
}
#endif

}  // namespace pagedkv::PAGEDKV_ISA
