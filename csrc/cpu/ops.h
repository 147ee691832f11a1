// The CPU implementations that library.cpp registers; schemas: pagedkv_ops/schema.py.
#pragma once

#include <tuple>
#include <vector>

#include "../checks.h"
#include "kernels.h"

namespace pagedkv {

void write_kv(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
              const Tensor& slot_mapping, const MaybeTensor& k_scale, const MaybeTensor& v_scale,
              const MaybeTensor& k_scale_cache, const MaybeTensor& v_scale_cache);
// The parts of write_kv: checks of shapes, checks of values, which read the slots into scratch, and the write alone.
struct WrittenScales {
  WrittenScale key, value;
};
WrittenScales check_written_scales(const char* op, const MaybeTensor& k_scale, const MaybeTensor& v_scale,
                                   const MaybeTensor& k_scale_cache, const MaybeTensor& v_scale_cache,
                                   const CacheViews& caches);
const int64_t* checked_slots(const char* op, const NewTokens& tokens, const CacheViews& caches,
                             const WrittenScales& scales);
void write_checked(NewTokens tokens, const int64_t* slots, const CacheViews& caches, const WrittenScales& scales);

Tensor paged_attention(const AttentionCall& call);
std::tuple<Tensor, Tensor> paged_attention_with_lse(const AttentionCall& call);
// What paged_attention_append takes beside the arguments of paged_attention.
struct NewTokensCall {
  const Tensor &key, &value, &slot_mapping;
  const MaybeTensor &k_scale_cache, &v_scale_cache;
};
Tensor paged_attention_append(const NewTokensCall& tokens, const AttentionCall& call);

std::tuple<Tensor, Tensor> merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                        const Tensor& lse_b);
void copy_blocks(const std::vector<Tensor>& caches, const Tensor& block_mapping);
void swap_blocks(const Tensor& src, const Tensor& dst, const Tensor& block_mapping);
Tensor gather_kv(const Tensor& cache, const Tensor& block_table, const Tensor& seq_lens, int64_t max_len,
                 const MaybeTensor& scale, std::optional<torch::headeronly::ScalarType> dtype);

inline ScaleView scale_view(const MaybeView& t) {
  if (!t) return {};
  const float* data = reinterpret_cast<const float*>(t->data);
  if (t->dim == 3) return {data, t->stride(0), t->stride(1), t->stride(2)};
  return {data, 0, 0, t->size(0) > 1 ? t->stride(0) : 0};
}
inline CacheView cache_view(const TensorView& t, const MaybeView& scale) {
  return {t.data, t.stride(0), t.stride(1), t.stride(2), t.element_type(), scale_view(scale)};
}

// Schedules and runs the kernels; everything was checked. parallel.h decides about threads.
void run_attention(const AttentionArgs& args);

}  // namespace pagedkv
