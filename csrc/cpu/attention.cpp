// paged_attention, paged_attention_with_lse, paged_attention_append: checks, arguments, the call of the scheduler.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "block_layout.h"
#include "ops.h"
#include "scratch.h"

namespace pagedkv {

namespace {

// float32 copies of alibi_slopes and sinks, which may be any float type.
const float* head_values(const std::optional<TensorView>& view, float* dst) {
  if (!view) return nullptr;
  kernels().to_float(dst, view->data, view->element_type(), view->stride(0), view->size(0));
  return dst;
}

// 0 is off. A number that float32 can not hold acts as the nearest one that it can: the logits are then all about 0, or
// as good as not capped.
float softcap(double value) {
  constexpr double kSmallest = std::numeric_limits<float>::min(), kLargest = std::numeric_limits<float>::max();
  return value == 0 ? 0.0f : static_cast<float>(std::clamp(value, kSmallest, kLargest));
}

int64_t window(int64_t tokens) { return tokens > kLongestWindow ? -1 : tokens; }

KeyRange visible_columns(const AttentionArgs& args, int64_t seq) {
  const int64_t seq_len = args.seq_lens[seq], query_length = args.query_length(seq);
  if (seq_len == 0 || query_length == 0) return {0, 0};
  const int64_t begin = visible_keys(args, seq_len, query_length, 0).begin / args.block_size;
  const int64_t end = ceil_div(visible_keys(args, seq_len, query_length, query_length - 1).end, args.block_size);
  return {begin, max_of(begin, end)};
}

// Reads and checks lengths, bounds and the visible part of the table.
void read_indices(const char* op, const AttentionViews& views, AttentionArgs& args) {
  const int64_t num_seqs = args.num_seqs;
  int64_t* seq_lens = call_scratch().lengths.reserve_for<int64_t>(times(3, num_seqs + 1));
  int64_t *bounds = seq_lens + num_seqs, *row_starts = bounds + num_seqs + 1;
  read_seq_lens(op, views.table, args.block_size, seq_lens);
  args.seq_lens = seq_lens;
  if (views.cu_seqlens_q) {
    read_cu_seqlens_q(op, *views.cu_seqlens_q, args.num_tokens, bounds);
    args.cu_seqlens_q = bounds;
  }
  int64_t used = 0;
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const KeyRange columns = visible_columns(args, seq);
    row_starts[seq] = used - columns.begin;
    if (__builtin_add_overflow(used, columns.end - columns.begin, &used)) throw OutOfMemory{INT64_MAX};
  }
  int64_t* blocks = call_scratch().blocks.reserve_for<int64_t>(used);
  for (int64_t seq = 0; seq < num_seqs; ++seq) {
    const KeyRange columns = visible_columns(args, seq);
    read_block_ids(op, views.table.block_table, seq, columns.begin, columns.end, views.caches.key.size(0),
                   blocks + row_starts[seq] + columns.begin);
  }
  args.row_starts = row_starts;
  args.blocks = blocks;
}

AttentionArgs make_args(const char* op, const AttentionViews& views, const AttentionCall& call) {
  const TensorView &query = views.query, &key = views.caches.key, &value = views.caches.value;
  AttentionArgs args;
  args.query = query.data;
  args.query_token_stride = query.stride(0);
  args.query_head_stride = query.stride(1);
  args.query_dtype = query.element_type();
  args.key = cache_view(key, views.k_scale);
  args.value = cache_view(value, views.v_scale);
  args.num_tokens = query.size(0);
  args.num_seqs = views.table.seq_lens.size(0);
  args.num_heads = query.size(1);
  args.num_kv_heads = key.size(2);
  args.head_size = key.size(3);
  args.value_head_size = value.size(3);
  args.block_size = key.size(1);
  args.scale = call.scale ? static_cast<float>(*call.scale) : 1.0f / std::sqrt(static_cast<float>(args.head_size));
  args.softcap = softcap(call.softcap);
  args.causal = call.causal;
  args.window_left = window(call.window_left);
  args.window_right = window(call.window_right);
  args.num_splits = call.num_splits;
  float* head_buffer = call_scratch().heads.reserve_for<float>(times(2, args.num_heads));
  args.alibi_slopes = head_values(views.alibi_slopes, head_buffer);
  args.sinks = head_values(views.sinks, head_buffer + args.num_heads);
  read_indices(op, views, args);
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
  if (args.num_tokens == 0 || args.num_heads == 0 || (args.value_head_size == 0 && !with_lse)) return output;
  run_attention(args);
  clear_padding(args);
  return output;
}

Output check_and_attend(const char* op, bool with_lse, const AttentionCall& call) {
  AttentionViews views = check_paged_attention(op, call);
  views.k_scale = check_read_scale(op, "k_scale", call.k_scale, views.caches.key, "key_cache");
  views.v_scale = check_read_scale(op, "v_scale", call.v_scale, views.caches.value, "value_cache");
  AttentionArgs args = make_args(op, views, call);
  return attend(views, args, with_lse);
}

}  // namespace

Tensor paged_attention(const AttentionCall& call) { return check_and_attend("paged_attention", false, call).out; }

std::tuple<Tensor, Tensor> paged_attention_with_lse(const AttentionCall& call) {
  Output output = check_and_attend("paged_attention_with_lse", true, call);
  return {std::move(output.out), std::move(*output.lse)};
}

Tensor paged_attention_append(const NewTokensCall& new_tokens, const AttentionCall& call) {
  const char* op = "paged_attention_append";
  AttentionViews views = check_paged_attention(op, call);
  const NewTokens tokens =
      check_new_tokens(op, new_tokens.key, new_tokens.value, views.caches, new_tokens.slot_mapping);
  check_size(op, "key", tokens.key, 0, views.query, "query", 0);
  const WrittenScales scales = check_written_scales(op, call.k_scale, call.v_scale, new_tokens.k_scale_cache,
                                                    new_tokens.v_scale_cache, views.caches);
  views.k_scale = scales.key.cache ? scales.key.cache : scales.key.fixed;
  views.v_scale = scales.value.cache ? scales.value.cache : scales.value.fixed;
  const int64_t* slots = checked_slots(op, tokens, views.caches, scales);
  ReadFirst query_copy;
  query_copy.apply(views.query, views.caches.key);
  query_copy.apply(views.query, views.caches.value);
  AttentionArgs args = make_args(op, views, call);
  write_checked(tokens, slots, views.caches, scales);
  return attend(views, args, false).out;
}

}  // namespace pagedkv
