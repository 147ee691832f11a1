// One step of the online softmax over a row of scores, in float32 and base 2.
#pragma once

#include "output.h"
#include "prefill_multiply.h"

namespace pagedkv::PAGEDKV_ISA {

constexpr float kMinusInfinity = -__builtin_inff();

// What makes a logit of query . key. A positive factor alone is left to the softmax, which multiplies for free;
// everything else is applied to the scores beforehand.
struct LogitTransform {
  float scale;
  float softcap;      // 0: none
  float alibi_slope;  // 0: none

  PAGEDKV_INLINE bool is_factor() const { return softcap == 0 && alibi_slope == 0 && scale > 0; }
  PAGEDKV_INLINE float factor() const { return kLog2E * (is_factor() ? scale : 1.0f); }
};

// scores[first, last), multiples of kLanes, become logits; distance is key position - query position of scores[0].
inline void transform_scores(const LogitTransform& transform, int64_t distance, int64_t first, int64_t last,
                             float* scores) {
  for (int64_t i = first; i < last; i += kLanes) {
    Vec logits = load(scores + i) * broadcast(transform.scale);
    if (transform.softcap != 0) {
      logits = tanh(logits * broadcast(1.0f / transform.softcap)) * broadcast(transform.softcap);
    }
    const Vec distances = iota() + broadcast(static_cast<float>(distance + i));
    store(scores + i, fma(distances, broadcast(transform.alibi_slope), logits));
  }
}

struct SoftmaxState {  // one entry per row
  float* maximum;      // of the logits so far, in base 2; -inf before the first
  float* sum;          // of 2^(logit - maximum)
  float* rescale;      // the factor that this step puts on the row's output so far
};

PAGEDKV_INLINE float row_maximum(const float* scores, int64_t first, int64_t last) {
  Vec even = broadcast(kMinusInfinity), odd = even;
  for (int64_t i = first; i < last; i += 2 * kLanes) {
    even = max(even, load(scores + i));
    odd = max(odd, load(scores + i + kLanes));
  }
  return reduce_max(max(even, odd));
}

template <class Units>
PAGEDKV_INLINE void store_units(float* scores, int64_t i, Vec low, Vec high) {
  if constexpr (Units::kElements == 1) {
    store(scores + i, low);
    store(scores + i + kLanes, high);
  } else {
    store(scores + i / 2, reinterpret_cast<Vec>(pack_bf16(low, high)));
  }
}

// scores[first, last), multiples of 2 * kLanes, become probabilities, in place and as units (pairs move forward, onto
// floats that have been read). Those outside of the keys that the row sees become exactly 0.
template <class Units>
void softmax_step(float* scores, int64_t first, int64_t last, KeyRange seen, float factor, const SoftmaxState& state,
                  int64_t row) {
  for (int64_t i = first; i < min_of(seen.begin, last); ++i) scores[i] = kMinusInfinity;
  for (int64_t i = max_of(seen.end, first); i < last; ++i) scores[i] = kMinusInfinity;
  const float before = state.maximum[row];
  const float maximum = max_of(before, row_maximum(scores, first, last) * factor);
  const float shift = maximum == kMinusInfinity ? 0 : maximum;  // keeps -inf - -inf = NaN out
  Vec even_sum = zero(), odd_sum = zero();
  for (int64_t i = first; i < last; i += 2 * kLanes) {
    const Vec low = exp2(fma(load(scores + i), broadcast(factor), broadcast(-shift)));
    const Vec high = exp2(fma(load(scores + i + kLanes), broadcast(factor), broadcast(-shift)));
    even_sum += low;
    odd_sum += high;
    store_units<Units>(scores, i, low, high);
  }
  const float rescale = maximum == before ? 1 : exp2_scalar(before - shift);
  state.sum[row] = state.sum[row] * rescale + reduce_add(even_sum + odd_sum);
  state.maximum[row] = maximum;
  state.rescale[row] = rescale;
}

}  // namespace pagedkv::PAGEDKV_ISA
