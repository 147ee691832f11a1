#include "ops.h"
#include "parallel.h"

namespace pagedkv {

std::tuple<Tensor, Tensor> merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b,
                                        const Tensor& lse_b) {
  const MergeViews views = check_merge_states(out_a, lse_a, out_b, lse_b);
  const TensorView& a = views.out_a;
  Tensor out = empty_cpu(a.sizes, 3, a.dtype);
  Tensor lse = empty_cpu(a.sizes, 2, float32_dtype());
  MergeStatesArgs args;
  args.out_a = a.data;
  args.out_b = views.out_b.data;
  args.out = data_of(out);
  args.lse_a = reinterpret_cast<const float*>(views.lse_a.data);
  args.lse_b = reinterpret_cast<const float*>(views.lse_b.data);
  args.lse = reinterpret_cast<float*>(data_of(lse));
  args.dtype = a.element_type();
  args.a_token_stride = a.stride(0);
  args.a_head_stride = a.stride(1);
  args.b_token_stride = views.out_b.stride(0);
  args.b_head_stride = views.out_b.stride(1);
  args.lse_a_token_stride = views.lse_a.stride(0);
  args.lse_a_head_stride = views.lse_a.stride(1);
  args.lse_b_token_stride = views.lse_b.stride(0);
  args.lse_b_head_stride = views.lse_b.stride(1);
  args.num_heads = a.size(1);
  args.head_size = a.size(2);
  const auto merge = kernels().merge_states;
  parallel_ranges(a.size(0), times(3, a.bytes()), [&](int64_t begin, int64_t end) { merge(args, begin, end); });
  return {std::move(out), std::move(lse)};
}

}  // namespace pagedkv
