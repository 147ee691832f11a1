// Registers the CPU implementations. Schemas and tags are defined in Python (pagedkv_ops/schema.py), because tags in a
// C++ definition need a later stable ABI than the one this library targets.
#include <torch/csrc/stable/library.h>

#include <stdexcept>
#include <string>

#include "cpu/ops.h"
#include "cpu/scratch.h"

namespace pagedkv {
namespace {

struct TrimAtEnd {
  ~TrimAtEnd() {
    call_scratch().trim();
    trim_thread_scratch();
  }
};

// Runs an op; names it when memory runs out, and gives back the scratch of an exceptionally large call.
template <typename F>
auto run(const char* op, const F& f) {
  const TrimAtEnd trim;
  try {
    return f();
  } catch (const OutOfMemory& error) {
    const std::string amount =
        error.bytes == INT64_MAX ? "2**63 bytes or more" : std::to_string(error.bytes) + " bytes";
    throw std::runtime_error(std::string(op) + ": cannot allocate " + amount + error.purpose);
  }
}

// What torch calls: the functions of cpu/ops.h, or those that take their arguments as one struct.
template <const char* kName, auto kFunction, typename = decltype(kFunction)>
struct Op;
template <const char* kName, auto kFunction, typename Result, typename... Args>
struct Op<kName, kFunction, Result (*)(Args...)> {
  static Result call(Args... args) {
    return run(kName, [&] { return kFunction(args...); });
  }
};
template <const char* kName, auto kFunction, typename Result>
struct Op<kName, kFunction, Result (*)(const AttentionCall&)> {
  static Result call(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
                     const Tensor& seq_lens, const MaybeTensor& cu_seqlens_q, std::optional<double> scale, bool causal,
                     int64_t window_left, int64_t window_right, double softcap, const MaybeTensor& alibi_slopes,
                     const MaybeTensor& sinks, const MaybeTensor& k_scale, const MaybeTensor& v_scale,
                     int64_t num_splits) {
    return run(kName, [&] {
      return kFunction({query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, scale, causal, window_left,
                        window_right, softcap, alibi_slopes, sinks, k_scale, v_scale, num_splits});
    });
  }
};
template <const char* kName, auto kFunction, typename Result>
struct Op<kName, kFunction, Result (*)(const NewTokensCall&, const AttentionCall&)> {
  static Result call(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                     const Tensor& value_cache, const Tensor& slot_mapping, const Tensor& block_table,
                     const Tensor& seq_lens, const MaybeTensor& cu_seqlens_q, const MaybeTensor& k_scale_cache,
                     const MaybeTensor& v_scale_cache, std::optional<double> scale, bool causal, int64_t window_left,
                     int64_t window_right, double softcap, const MaybeTensor& alibi_slopes, const MaybeTensor& sinks,
                     const MaybeTensor& k_scale, const MaybeTensor& v_scale, int64_t num_splits) {
    return run(kName, [&] {
      return kFunction({key, value, slot_mapping, k_scale_cache, v_scale_cache},
                       {query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, scale, causal, window_left,
                        window_right, softcap, alibi_slopes, sinks, k_scale, v_scale, num_splits});
    });
  }
};

}  // namespace
}  // namespace pagedkv

#define PAGEDKV_OP(name)                       \
  static constexpr char name##_text[] = #name; \
  m.impl(#name, TORCH_BOX((&pagedkv::Op<name##_text, &pagedkv::name>::call)))

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CPU, m) {
  PAGEDKV_OP(write_kv);
  PAGEDKV_OP(paged_attention);
  PAGEDKV_OP(paged_attention_with_lse);
  PAGEDKV_OP(paged_attention_append);
  PAGEDKV_OP(merge_states);
  PAGEDKV_OP(copy_blocks);
  PAGEDKV_OP(swap_blocks);
  PAGEDKV_OP(gather_kv);
}
