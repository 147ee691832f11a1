// Rows in and out of the cache: conversion, copies, and the union of two attention states.
#pragma once

#include <cstring>
#include <type_traits>

#include "../kernels.h"
#include "output.h"
#include "vec.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace pagedkv::PAGEDKV_ISA {

// Streaming stores write whole lines without reading them first; they need aligned destinations.
PAGEDKV_INLINE void copy_bytes(char* dst, const char* src, int64_t bytes, [[maybe_unused]] bool stream) {
#if defined(__x86_64__)
#if defined(PAGEDKV_ISA_AVX512)
  using Line = __m512i;
  const auto store_line = [](char* p, Line x) PAGEDKV_LAMBDA { _mm512_stream_si512(reinterpret_cast<Line*>(p), x); };
#elif defined(PAGEDKV_ISA_AVX2)
  using Line = __m256i;
  const auto store_line = [](char* p, Line x) PAGEDKV_LAMBDA { _mm256_stream_si256(reinterpret_cast<Line*>(p), x); };
#else
  using Line = __m128i;
  const auto store_line = [](char* p, Line x) PAGEDKV_LAMBDA { _mm_stream_si128(reinterpret_cast<Line*>(p), x); };
#endif
  if (stream && reinterpret_cast<uintptr_t>(dst) % 64 == 0 && bytes % 64 == 0) {
    for (int64_t i = 0; i < bytes; i += 64) {
      for (int64_t j = 0; j < 64; j += static_cast<int64_t>(sizeof(Line))) {
        Line line;
        __builtin_memcpy(&line, src + i + j, sizeof(line));
        store_line(dst + i + j, line);
      }
    }
    return;
  }
#endif
  std::memcpy(dst, src, bytes);
}

PAGEDKV_INLINE void finish_streaming() {
#if defined(__x86_64__)
  _mm_sfence();
#endif
}

void copy(char* dst, const char* src, int64_t bytes, bool stream) {
  copy_bytes(dst, src, bytes, stream);
  if (stream) finish_streaming();
}

bool has_nan(const char* row, DType dtype, int64_t n) {
  const auto search = [&]<typename T>(T infinity) PAGEDKV_LAMBDA {  // twice its bits, without the sign
    const T* bits = reinterpret_cast<const T*>(row);
    T most = 0;
    for (int64_t i = 0; i < n; ++i) most = max_of(most, static_cast<T>(bits[i] * 2));
    return most > infinity;
  };
  if (dtype == DType::kFloat32) return search(uint32_t{0xff000000u});
  return search(static_cast<uint16_t>(dtype == DType::kFloat16 ? 0xf800u : 0xff00u));
}

void to_float(float* dst, const char* src, DType dtype, int64_t stride, int64_t n) {
  with_dtype(dtype, [&]<typename T>() PAGEDKV_LAMBDA {
    for (int64_t i = 0; i < n; ++i) {
      store_first(dst + i, load_first(reinterpret_cast<const T*>(src) + i * stride, 1), 1);
    }
  });
}

void dequantise(char* dst, DType dst_dtype, const char* src, DType src_dtype, float scale, int64_t n) {
  with_quantised_dtype(src_dtype, [&]<typename Src>() PAGEDKV_LAMBDA {
    with_dtype(dst_dtype, [&]<typename Dst>() PAGEDKV_LAMBDA {
      const auto* from = reinterpret_cast<const Src*>(src);
      auto* to = reinterpret_cast<Dst*>(dst);
      int64_t i = 0;
      for (; i + kLanes <= n; i += kLanes) store(to + i, load(from + i) * broadcast(scale));
      if (i < n) store_first(to + i, load_first(from + i, n - i) * broadcast(scale), n - i);
    });
  });
}

// f(first element, number of elements) of each vector of a row.
template <typename F>
PAGEDKV_INLINE void for_vectors(int64_t n, const F& f) {
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) f(i, kLanes);
  if (i < n) f(i, n - i);
}

template <typename T>
PAGEDKV_INLINE Vec load_up_to(const T* p, int64_t n) {
  return n == kLanes ? load(p) : load_first(p, n);
}

// The scale with which a row's largest finite magnitude is the largest number of the type; an infinity saturates.
template <typename Dst, typename Src>
PAGEDKV_INLINE float scale_of_row(const Src* src, int64_t n) {
  if constexpr (kLanes == 8) {  // magnitudes are in the order of their bits: half the instructions while all are finite
    using Bits = std::conditional_t<sizeof(Src) == 2, uint16_t, uint32_t>;
    const Bits* bits = reinterpret_cast<const Bits*>(src);
    Bits most = 0;
    for (int64_t i = 0; i < n; ++i) most = max_of(most, static_cast<Bits>(bits[i] & (static_cast<Bits>(-1) >> 1)));
    const float largest = load_first(reinterpret_cast<const Src*>(&most), 1)[0];
    if (largest < __builtin_inff()) return largest / Dst::kMost;
  }
  Vec most = zero();
  for_vectors(n, [&](int64_t i, int64_t count) PAGEDKV_LAMBDA {
    const Vec x = load_up_to(src + i, count), magnitude = max(x, zero() - x);
    most = max(most, select(less(magnitude, broadcast(__builtin_inff())), magnitude, zero()));
  });
  return group_max<kLanes>(most)[0] / Dst::kMost;
}

// dst = divide(x) of each x, first limited to +-limit.
template <typename Src, typename Dst, typename F>
PAGEDKV_INLINE void store_quotients(Dst* dst, const Src* src, int64_t n, float limit, [[maybe_unused]] bool stream,
                                    const F& divide) {
  const Vec highest = broadcast(limit), lowest = broadcast(-limit);
  const auto quotients = [&](int64_t i, int64_t count) PAGEDKV_LAMBDA {
    return divide(max(lowest, min(highest, load_up_to(src + i, count))));  // keeps NaN
  };
  int64_t done = 0;
#if defined(PAGEDKV_ISA_AVX2)
  stream = stream && reinterpret_cast<uintptr_t>(dst) % 64 == 0 && n % 64 == 0;
  for (; done + 4 * kLanes <= n; done += 4 * kLanes) {
    __m256i words[4];
    for (int i = 0; i < 4; ++i) {
      words[i] = reinterpret_cast<__m256i>(narrow_quantised<Dst>(quotients(done + i * kLanes, kLanes)) & 0xff);
    }
    auto* place = reinterpret_cast<__m256i*>(dst + done);
    const __m256i bytes = low_bytes(words);
    stream ? _mm256_stream_si256(place, bytes) : _mm256_storeu_si256(place, bytes);
  }
#endif
  for_vectors(n - done, [&](int64_t i, int64_t count) PAGEDKV_LAMBDA {
    const Vec quotient = quotients(done + i, count);
    count == kLanes ? store(dst + done + i, quotient) : store_first(dst + done + i, quotient, count);
  });
}

template <typename Src, typename Dst>
PAGEDKV_INLINE void quantise_row(Dst* dst, const Src* src, int64_t n, float scale, bool stream) {
  if (kFusesMultiplyAdd && scale >= 0x1p-60f && scale <= 0x1p60f) {
    // The product with the reciprocal, twice corrected by what it exceeds x by, has the bits of the quotient
    // (Markstein) for a fraction of a division's time; -0 stays -0. Numbers too small for that are stored as 0 either
    // way.
    const Vec divisor = broadcast(scale), inverse = broadcast(1.0f / scale), minus_inverse = zero() - inverse;
    store_quotients(dst, src, n, Dst::kMost * scale, stream, [&](Vec x) PAGEDKV_LAMBDA {
      const Vec q = x * inverse, better = fma(fma(q, divisor, -x), minus_inverse, q);
      return fma(fma(better, divisor, -x), minus_inverse, better);
    });
  } else {
    store_quotients(dst, src, n, __FLT_MAX__, stream, [&](Vec x) PAGEDKV_LAMBDA {
      const Vec q = scale == 0.0f ? x * zero() : x / broadcast(scale);
      return max(broadcast(-Dst::kMost), min(broadcast(Dst::kMost), q));
    });
  }
}

template <typename Src, typename Dst>
PAGEDKV_INLINE void convert_row(Dst* dst, const Src* src, int64_t n, bool stream) {
  if constexpr (DTypeOf<Src>::value == DTypeOf<Dst>::value) {
    copy_bytes(reinterpret_cast<char*>(dst), reinterpret_cast<const char*>(src), n * sizeof(Dst), stream);
  } else {
    int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) store(dst + i, load(src + i));
    if (i < n) store_first(dst + i, load_first(src + i, n - i), n - i);
  }
}

template <typename Src, typename Dst>
PAGEDKV_INLINE void write_tokens_typed(const WriteArgs& args, const WriteSource& source, const CacheView& cache,
                                       int64_t begin, int64_t end) {
  // Heads that lie next to each other on both sides are one row.
  const bool joined = source.head_stride == source.head_size && cache.head_stride == source.head_size;
  const int64_t rows = joined ? 1 : args.num_kv_heads;
  const int64_t row_size = joined ? args.num_kv_heads * source.head_size : source.head_size;
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = args.slots[token];
    if (slot < 0) continue;  // padding
    const int64_t block = slot / args.block_size;
    const Src* src = reinterpret_cast<const Src*>(source.data) + token * source.token_stride;
    Dst* dst = reinterpret_cast<Dst*>(const_cast<char*>(cache.data)) + block * cache.block_stride +
               (slot - block * args.block_size) * cache.token_stride;
    for (int64_t row = 0; row < rows; ++row) {
      convert_row(dst + row * cache.head_stride, src + row * source.head_stride, row_size, args.stream);
    }
  }
}

template <typename Src, typename Dst>
PAGEDKV_INLINE void quantise_tokens(const WriteArgs& args, const WriteSource& source, const CacheView& cache,
                                    bool is_fixed, int64_t begin, int64_t end) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = args.slots[token];
    if (slot < 0) continue;  // padding
    const int64_t block = slot / args.block_size, offset = slot - block * args.block_size;
    const Src* src = reinterpret_cast<const Src*>(source.data) + token * source.token_stride;
    Dst* dst = reinterpret_cast<Dst*>(const_cast<char*>(cache.data)) + block * cache.block_stride +
               offset * cache.token_stride;
    float* scale =
        const_cast<float*>(cache.scale.data) + block * cache.scale.block_stride + offset * cache.scale.token_stride;
    const auto for_heads = [&](const auto& f) PAGEDKV_LAMBDA {
      for (int64_t head = 0; head < args.num_kv_heads; ++head) {
        f(head, src + head * source.head_stride, scale[head * cache.scale.head_stride]);
      }
    };
    if (!is_fixed) {  // of all heads first: each waits long for its row's largest, and they wait together
      for_heads([&](int64_t, const Src* row, float& factor)
                    PAGEDKV_LAMBDA { factor = scale_of_row<Dst>(row, source.head_size); });
    }
    for_heads([&](int64_t head, const Src* row, float factor) PAGEDKV_LAMBDA {
      quantise_row(dst + head * cache.head_stride, row, source.head_size, factor, args.stream);
    });
  }
}

void write_tokens(const WriteArgs& args, int64_t begin, int64_t end) {
  const auto write = [&](const WriteSource& source, const CacheView& cache, bool is_fixed) PAGEDKV_LAMBDA {
    with_dtype(source.dtype, [&]<typename Src>() PAGEDKV_LAMBDA {
      with_cache_dtype(cache.dtype, [&]<typename Dst>() PAGEDKV_LAMBDA {
        if constexpr (is_quantised(DTypeOf<Dst>::value)) {
          quantise_tokens<Src, Dst>(args, source, cache, is_fixed, begin, end);
        } else {
          write_tokens_typed<Src, Dst>(args, source, cache, begin, end);
        }
      });
    });
  };
  write(args.key, args.key_cache, args.key_scale_is_fixed);
  write(args.value, args.value_cache, args.value_scale_is_fixed);
  if (args.stream) finish_streaming();
}

struct MergeWeights {
  float a, b;
  float lse;
};

// A part whose lse is -inf saw no key: it weighs nothing, and its values, which may be NaN, are not taken.
PAGEDKV_INLINE MergeWeights merge_weights(float lse_a, float lse_b) {
  constexpr float kInfinity = __builtin_inff();
  if (lse_a == -kInfinity) return {0.0f, lse_b == -kInfinity ? 0.0f : 1.0f, lse_b};
  if (lse_b == -kInfinity) return {1.0f, 0.0f, lse_a};
  const float highest = lse_a > lse_b ? lse_a : lse_b;
  const float exp_a = exp2_scalar((lse_a - highest) * kLog2E), exp_b = exp2_scalar((lse_b - highest) * kLog2E);
  const float total = exp_a + exp_b;
  const bool overflows = lse_a == kInfinity || lse_b == kInfinity;  // total is NaN
  return {exp_a / total, exp_b / total, overflows ? kInfinity : highest + logf(total)};
}

template <typename T>
PAGEDKV_INLINE void merge_rows(T* out, const T* a, const T* b, const MergeWeights& weights, int64_t n) {
  const auto join = [&](Vec x, Vec y) PAGEDKV_LAMBDA {
    if (weights.b == 0.0f) y = zero();
    if (weights.a == 0.0f) x = zero();
    return fma(x, broadcast(weights.a), y * broadcast(weights.b));
  };
  int64_t d = 0;
  for (; d + kLanes <= n; d += kLanes) store(out + d, join(load(a + d), load(b + d)));
  if (d < n) store_first(out + d, join(load_first(a + d, n - d), load_first(b + d, n - d)), n - d);
}

void merge_states(const MergeStatesArgs& args, int64_t token_begin, int64_t token_end) {
  for (int64_t token = token_begin; token < token_end; ++token) {
    for (int64_t head = 0; head < args.num_heads; ++head) {
      const int64_t row = token * args.num_heads + head;
      const MergeWeights weights =
          merge_weights(args.lse_a[token * args.lse_a_token_stride + head * args.lse_a_head_stride],
                        args.lse_b[token * args.lse_b_token_stride + head * args.lse_b_head_stride]);
      args.lse[row] = weights.lse;
      with_dtype(args.dtype, [&]<typename T>() PAGEDKV_LAMBDA {
        merge_rows(reinterpret_cast<T*>(args.out) + row * args.head_size,
                   reinterpret_cast<const T*>(args.out_a) + token * args.a_token_stride + head * args.a_head_stride,
                   reinterpret_cast<const T*>(args.out_b) + token * args.b_token_stride + head * args.b_head_stride,
                   weights, args.head_size);
      });
    }
  }
}

}  // namespace pagedkv::PAGEDKV_ISA
