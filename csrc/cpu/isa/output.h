// The last step of every attention kernel: sink, normalisation, conversion, log-sum-exp.
#pragma once

#include <cmath>

#include "../attention_args.h"
#include "vec.h"

namespace pagedkv::PAGEDKV_ISA {

PAGEDKV_INLINE float exp2_scalar(float x) {
  float lanes[kLanes];
  store(lanes, exp2(broadcast(x)));
  return lanes[0];
}

// `row` [Dv] holds the sum of weights * values and `sum` the sum of weights, both relative to 2^maximum (logits in base
// 2). sum == 0: the row saw no key. A logit of +inf gives NaN, and a log-sum-exp of +inf.
PAGEDKV_INLINE void write_output_row(const AttentionArgs& args, int64_t token, int64_t head, const float* row,
                                     float maximum, float sum) {
  const int64_t index = token * args.num_heads + head;
  const bool sees_nothing = sum == 0.0f;
  float rescale = 1.0f;
  if (args.sinks) {  // a logit that joins the denominator alone
    const float sink = args.sinks[head] * kLog2E;
    const float highest = sees_nothing || sink > maximum ? sink : maximum;
    rescale = sees_nothing ? 0.0f : exp2_scalar(maximum - highest);
    sum = sum * rescale + (sink == highest ? 1.0f : exp2_scalar(sink - highest));
    maximum = highest;
  }
  const bool overflows = maximum == __builtin_inff();
  if (overflows) sum = __builtin_nanf("");
  const Vec factor = broadcast(sees_nothing ? rescale : rescale / sum);
  with_dtype(args.query_dtype, [&]<typename Q>() PAGEDKV_LAMBDA {
    Q* out = reinterpret_cast<Q*>(args.out) + index * args.value_head_size;
    int64_t d = 0;
    for (; d + kLanes <= args.value_head_size; d += kLanes) store(out + d, load(row + d) * factor);
    const int64_t rest = args.value_head_size - d;
    if (rest > 0) store_first(out + d, load_first(row + d, rest) * factor, rest);
  });
  if (!args.lse) return;
  args.lse[index] = overflows ? maximum : sum == 0.0f ? -__builtin_inff() : maximum * kLn2 + logf(sum);
}

}  // namespace pagedkv::PAGEDKV_ISA
