// One step of the online softmax over rows of scores, in float32 and base 2.
#pragma once

#include "output.h"
#include "prefill_multiply.h"

namespace pagedkv::PAGEDKV_ISA {

constexpr float kMinusInfinity = -__builtin_inff();

// A positive factor alone is left to softmax_step, which multiplies for free; all else transform_scores does
// beforehand.
PAGEDKV_INLINE bool scale_is_all(const AttentionArgs& args) {
  return args.softcap == 0 && !args.alibi_slopes && args.scale > 0 && !args.key.scale.data;
}
PAGEDKV_INLINE float softmax_factor(const AttentionArgs& args) {
  return kLog2E * (scale_is_all(args) ? args.scale : 1.0f);
}

// Scores of a row in columns [first, last), multiples of 2 * kLanes, of which the row sees the keys `seen`.
struct ScoreRow {
  float* scores;
  int64_t first, last;
  KeyRange seen;
};

// Scores become logits; distance is key position - query position in column 0. key_scales: of the columns, or null.
inline void transform_scores(const ScoreRow& row, const AttentionArgs& args, int64_t head, int64_t distance,
                             const float* key_scales) {
  const Vec slope = broadcast(args.alibi_slopes ? args.alibi_slopes[head] : 0);
  for (int64_t i = row.first; i < row.last; i += kLanes) {
    Vec logits = load(row.scores + i) * broadcast(args.scale);
    if (key_scales) logits = logits * load(key_scales + i);
    if (args.softcap != 0) logits = soft_capped(logits, args.softcap, 1.0f / args.softcap);
    const Vec distances = iota() + broadcast(static_cast<float>(distance + i));
    store(row.scores + i, fma(distances, slope, logits));
  }
}

struct SoftmaxState {  // one entry per row
  float* maximum;      // of the logits so far, in base 2; -inf before the first
  float* sum;          // of 2^(logit - maximum)
  float* rescale;      // the factor that this step puts on the row's output so far
};

// What the row does not see becomes -inf.
PAGEDKV_INLINE void hide_unseen(const ScoreRow& row) {
  for (int64_t i = row.first; i < min_of(row.seen.begin, row.last); ++i) row.scores[i] = kMinusInfinity;
  for (int64_t i = max_of(row.seen.end, row.first); i < row.last; ++i) row.scores[i] = kMinusInfinity;
}

PAGEDKV_INLINE Vec maximum_by_lane(const ScoreRow& row) {
  Vec even = broadcast(kMinusInfinity), odd = even;
  for (int64_t i = row.first; i < row.last; i += 2 * kLanes) {
    even = max(even, load(row.scores + i));
    odd = max(odd, load(row.scores + i + kLanes));
  }
  return max(even, odd);
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

// Scores become weights 2^(score * factor - shift), in place and as units (pairs move forward, onto floats that have
// been read), exactly 0 at -inf. The result is their sum by lane. What is stored is times the scales of the columns'
// values, unless these are null.
template <class Units>
PAGEDKV_INLINE Vec weigh(const ScoreRow& row, float factor, float shift, const float* value_scales) {
  Vec even_sum = zero(), odd_sum = zero();
  for (int64_t i = row.first; i < row.last; i += 2 * kLanes) {
    Vec low = exp2(fma(load(row.scores + i), broadcast(factor), broadcast(-shift)));
    Vec high = exp2(fma(load(row.scores + i + kLanes), broadcast(factor), broadcast(-shift)));
    even_sum += low;
    odd_sum += high;
    if (value_scales) {
      low = low * load(value_scales + i);
      high = high * load(value_scales + i + kLanes);
    }
    store_units<Units>(row.scores, i, low, high);
  }
  return even_sum + odd_sum;
}

// A step of kLanes rows, whose state begins at `first_state`: lanes are joined for all of them at once, because a row
// alone would wait for its own maximum.
template <class Units>
void softmax_step(const ScoreRow (&rows)[kLanes], float factor, const SoftmaxState& state, int64_t first_state,
                  const float* value_scales) {
  Vec by_row[kLanes];
  for (int i = 0; i < kLanes; ++i) {
    hide_unseen(rows[i]);
    by_row[i] = maximum_by_lane(rows[i]);
  }
  const Vec before = load(state.maximum + first_state);
  const Vec maximum = max(before, max_lanes(by_row) * broadcast(factor));
  store(state.maximum + first_state, maximum);
  float shift[kLanes];  // 0 where nothing was seen: keeps -inf - -inf = NaN out
  store(shift, select(less(maximum, broadcast(-__FLT_MAX__)), zero(), maximum));
  for (int i = 0; i < kLanes; ++i) by_row[i] = weigh<Units>(rows[i], factor, shift[i], value_scales);
  const Vec rescale = exp2(before - load(shift));
  store(state.rescale + first_state, rescale);
  store(state.sum + first_state, fma(load(state.sum + first_state), rescale, reduce_lanes(by_row)));
}

}  // namespace pagedkv::PAGEDKV_ISA
