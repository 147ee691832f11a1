// paged_attention, paged_attention_with_lse, paged_attention_append: checks, arguments, the call of the scheduler.
#include <cmath>
#include <cstring>
#include <limits>

#include "ops.h"
#include "scratch.h"

namespace pagedkv {

namespace {

// float32 copies of alibi_slopes and sinks, which may be any float type.
const float* head_values(const std::optional<TensorView>& view, float* dst) {
  if (!view) return nullptr;
  kernels().to_float(dst, view->data, view->float_type(), view->stride(0), view->size(0));
  return dst;
}

CacheView cache_view(const TensorView& t) { return {t.data, t.stride(0), t.stride(1), t.stride(2)}; }

void check_values(const char* op, const AttentionViews& views, const AttentionArgs& args) {
  check_seq_lens(op, views.table, args.block_size);
  if (views.cu_seqlens_q) check_cu_seqlens_q(op, *views.cu_seqlens_q, args.num_tokens);
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t seq_len = args.seq_lens[seq], query_length = args.query_length(seq);
    if (seq_len == 0 || query_length == 0) continue;
    const int64_t begin = visible_keys(args, seq_len, query_length, 0).begin;
    const int64_t end = visible_keys(args, seq_len, query_length, query_length - 1).end;
    check_block_ids(op, views.table.block_table, seq, begin / args.block_size, ceil_div(end, args.block_size),
                    args.num_blocks);
  }
}

AttentionArgs make_args(const AttentionViews& views, const AttentionOptions& options, float* head_buffer) {
  const TensorView &query = views.query, &key = views.caches.key, &value = views.caches.value;
  AttentionArgs args;
  args.query = query.data;
  args.query_token_stride = query.stride(0);
  args.query_head_stride = query.stride(1);
  args.query_dtype = query.float_type();
  args.key = cache_view(key);
  args.value = cache_view(value);
  args.cache_dtype = key.float_type();
  args.block_table = views.table.block_table.indices();
  args.block_table.stride = 1;
  args.table_row_stride = views.table.block_table.stride(0);
  args.table_column_stride = views.table.block_table.stride(1);
  args.seq_lens = views.table.seq_lens.indices();
  if (views.cu_seqlens_q) args.cu_seqlens_q = views.cu_seqlens_q->indices();
  args.num_tokens = query.size(0);
  args.num_seqs = views.table.seq_lens.size(0);
  args.num_heads = query.size(1);
  args.num_kv_heads = key.size(2);
  args.head_size = key.size(3);
  args.value_head_size = value.size(3);
  args.block_size = key.size(1);
  args.table_width = views.table.block_table.size(1);
  args.num_blocks = key.size(0);
  args.scale =
      options.scale ? static_cast<float>(*options.scale) : 1.0f / std::sqrt(static_cast<float>(args.head_size));
  args.softcap = static_cast<float>(options.softcap);
  args.causal = options.causal;
  args.window_left = options.window_left;
  args.window_right = options.window_right;
  args.num_splits = options.num_splits;
  args.alibi_slopes = head_values(views.alibi_slopes, head_buffer);
  args.sinks = head_values(views.sinks, head_buffer + args.num_heads);
  return args;
}

// Rows past the last sequence: padding of a static batch.
void clear_padding(const AttentionArgs& args) {
  const int64_t used = args.query_start(args.num_seqs);
  const int64_t row = args.num_heads * args.value_head_size * element_size(args.query_dtype);
  std::memset(args.out + used * row, 0, (args.num_tokens - used) * row);
  if (!args.lse) return;
  for (int64_t i = used * args.num_heads; i < args.num_tokens * args.num_heads; ++i) {
    args.lse[i] = -std::numeric_limits<float>::infinity();
  }
}

struct Output {
  Tensor out;
  std::optional<Tensor> lse;
};

Output attend(const AttentionViews& views, AttentionArgs& args, bool with_lse) {
  const int64_t sizes[] = {args.num_tokens, args.num_heads, args.value_head_size};
  Output output{empty_cpu(sizes, 3, views.query.dtype), std::nullopt};
  args.out = data_of(output.out);
  if (with_lse) {
    output.lse = empty_cpu(sizes, 2, float32_dtype());
    args.lse = reinterpret_cast<float*>(data_of(*output.lse));
  }
  if (args.num_tokens == 0 || args.num_heads == 0) return output;
  run_attention(args);
  clear_padding(args);
  return output;
}

Output check_and_attend(const char* op, bool with_lse, const Tensor& query, const Tensor& key_cache,
                        const Tensor& value_cache, const Tensor& block_table, const Tensor& seq_lens,
                        const MaybeTensor& cu_seqlens_q, const AttentionOptions& options) {
  const AttentionViews views =
      check_paged_attention(op, query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, options);
  AttentionArgs args = make_args(
      views, options, reinterpret_cast<float*>(head_scratch().reserve(2 * views.query.size(1) * sizeof(float))));
  check_values(op, views, args);
  return attend(views, args, with_lse);
}

}  // namespace

Tensor paged_attention(const Tensor& query, const Tensor& key_cache, const Tensor& value_cache,
                       const Tensor& block_table, const Tensor& seq_lens, const MaybeTensor& cu_seqlens_q,
                       std::optional<double> scale, bool causal, int64_t window_left, int64_t window_right,
                       double softcap, const MaybeTensor& alibi_slopes, const MaybeTensor& sinks,
                       const MaybeTensor& k_scale, const MaybeTensor& v_scale, int64_t num_splits) {
  const AttentionOptions options{scale,        causal, window_left, window_right, softcap,
                                 alibi_slopes, sinks,  k_scale,     v_scale,      num_splits};
  return check_and_attend("paged_attention", false, query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q,
                          options)
      .out;
}

std::tuple<Tensor, Tensor> paged_attention_with_lse(
    const Tensor& query, const Tensor& key_cache, const Tensor& value_cache, const Tensor& block_table,
    const Tensor& seq_lens, const MaybeTensor& cu_seqlens_q, std::optional<double> scale, bool causal,
    int64_t window_left, int64_t window_right, double softcap, const MaybeTensor& alibi_slopes,
    const MaybeTensor& sinks, const MaybeTensor& k_scale, const MaybeTensor& v_scale, int64_t num_splits) {
  const AttentionOptions options{scale,        causal, window_left, window_right, softcap,
                                 alibi_slopes, sinks,  k_scale,     v_scale,      num_splits};
  Output output = check_and_attend("paged_attention_with_lse", true, query, key_cache, value_cache, block_table,
                                   seq_lens, cu_seqlens_q, options);
  return {std::move(output.out), std::move(*output.lse)};
}

Tensor paged_attention_append(const Tensor& query, const Tensor& key, const Tensor& value, const Tensor& key_cache,
                              const Tensor& value_cache, const Tensor& slot_mapping, const Tensor& block_table,
                              const Tensor& seq_lens, const MaybeTensor& cu_seqlens_q, std::optional<double> scale,
                              bool causal, int64_t window_left, int64_t window_right, double softcap,
                              const MaybeTensor& alibi_slopes, const MaybeTensor& sinks, const MaybeTensor& k_scale,
                              const MaybeTensor& v_scale, int64_t num_splits, const MaybeTensor& k_scale_cache,
                              const MaybeTensor& v_scale_cache) {
  const char* op = "paged_attention_append";
  const AttentionOptions options{scale,        causal, window_left, window_right, softcap,
                                 alibi_slopes, sinks,  k_scale,     v_scale,      num_splits};
  const AttentionViews views =
      check_paged_attention(op, query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, options);
  const NewTokens tokens = check_new_tokens(op, key, value, views.caches, slot_mapping);
  check_size(op, "key", tokens.key, 0, views.query.size(0), "query.size(0)");
  check_no_scale(op, "k_scale_cache", k_scale_cache);
  check_no_scale(op, "v_scale_cache", v_scale_cache);
  check_distinct_caches(op, views.caches);
  check_slots(op, tokens.slot_mapping, views.caches.key);
  AttentionArgs args = make_args(
      views, options, reinterpret_cast<float*>(head_scratch().reserve(2 * views.query.size(1) * sizeof(float))));
  check_values(op, views, args);
  write_checked(tokens, views.caches);
  return attend(views, args, false).out;
}

}  // namespace pagedkv
