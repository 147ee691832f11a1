#include "checks.h"

#include <charconv>
#include <cmath>
#include <stdexcept>

namespace pagedkv {

namespace {

// As Python prints a float.
std::string float_text(double x) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof(digits), x).ptr;
  std::string text(digits, end);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

void rank(const char* op, const char* argument, const TensorView& t, int64_t dim, const char* shape) {
  PAGEDKV_EXPECT(op, t.dim == dim, argument, std::string("be ") + shape, sizes_text(t.sizes, t.dim));
}

void is_float(const char* op, const char* argument, const TensorView& t) {
  PAGEDKV_EXPECT(op, t.is_float(), argument, "be float32, float16 or bfloat16", dtype_name(t.dtype));
}

void is_cache(const char* op, const char* argument, const TensorView& t) {
  PAGEDKV_EXPECT(op, t.is_float(), argument,
                 "be float32, float16 or bfloat16 (int8 and float8 caches are not supported yet)", dtype_name(t.dtype));
}

void is_index(const char* op, const char* argument, const TensorView& t) {
  PAGEDKV_EXPECT(op, t.is_index(), argument, "be int32 or int64", dtype_name(t.dtype));
}

void same_dtype(const char* op, const char* argument, const TensorView& t, const TensorView& like,
                const char* like_name) {
  PAGEDKV_EXPECT(op, t.dtype == like.dtype, argument, "be " + dtype_name(like.dtype) + " like " + like_name,
                 dtype_name(t.dtype));
}

// These kernels run when the dispatcher found a CPU tensor and none of a device with a higher priority.
void on_cpu(const char* op, const char* argument, const TensorView& t, const char* like_name) {
  PAGEDKV_EXPECT(op, is_cpu(*t.tensor), argument, std::string("be on cpu like ") + like_name, device_name(*t.tensor));
}

void last_contiguous(const char* op, const char* argument, const TensorView& t) {
  PAGEDKV_EXPECT(op, t.stride(t.dim - 1) == 1 || t.size(t.dim - 1) <= 1, argument, "have a contiguous last dimension",
                 "strides " + sizes_text(t.strides, t.dim));
}

void like_sizes(const char* op, const char* argument, const TensorView& t, const TensorView& like,
                const char* like_name, int64_t begin, int64_t end) {
  for (int64_t d = begin; d < end; ++d) {
    if (t.size(d) != like.size(d)) {
      check_size(op, argument, t, d, like.size(d),
                 (std::string(like_name) + ".size(" + std::to_string(d) + ")").c_str());
    }
  }
}

// Views by expand may be longer than 64-bit arithmetic on positions can bear.
void block_size(const char* op, const char* argument, const TensorView& cache) {
  PAGEDKV_EXPECT(op, 1 <= cache.size(1) && cache.size(1) <= INT32_MAX, std::string(argument) + ".size(1)",
                 "be in 1..2147483647 (block_size)", std::to_string(cache.size(1)));
}

void check_query(const char* op, const TensorView& q, const TensorView& k) {
  rank(op, "query", q, 3, "[num_tokens, num_heads, head_size]");
  is_float(op, "query", q);
  on_cpu(op, "query", q, "key_cache");
  last_contiguous(op, "query", q);
  check_size(op, "query", q, 2, k.size(3), "key_cache.size(3)");
  PAGEDKV_EXPECT(op, k.size(2) >= 1, "key_cache.size(2)", "be at least 1 (num_kv_heads)", std::to_string(k.size(2)));
  PAGEDKV_EXPECT(op, k.size(3) >= 1, "key_cache.size(3)", "be at least 1 (head_size)", std::to_string(k.size(3)));
  PAGEDKV_EXPECT(op, q.size(1) % k.size(2) == 0, "query.size(1)",
                 "be a multiple of " + std::to_string(k.size(2)) + " (key_cache.size(2))", std::to_string(q.size(1)));
}

void check_options(const char* op, const AttentionCall& call) {
  PAGEDKV_EXPECT(op, !call.scale || std::isfinite(*call.scale), "scale", "be finite", float_text(*call.scale));
  const char* unlimited = "be -1 (unlimited) or more";
  PAGEDKV_EXPECT(op, call.window_left >= -1, "window_left", unlimited, std::to_string(call.window_left));
  PAGEDKV_EXPECT(op, call.window_right >= -1, "window_right", unlimited, std::to_string(call.window_right));
  PAGEDKV_EXPECT(op, call.softcap >= 0 && std::isfinite(call.softcap), "softcap", "be 0 (off) or more, and finite",
                 float_text(call.softcap));
  PAGEDKV_EXPECT(op, call.num_splits >= 0, "num_splits", "be 0 (automatic) or more", std::to_string(call.num_splits));
}

std::optional<TensorView> head_vector(const char* op, const char* argument, const MaybeTensor& tensor,
                                      const TensorView& query) {
  if (!tensor) return std::nullopt;
  const TensorView view(*tensor);
  rank(op, argument, view, 1, "[num_heads]");
  is_float(op, argument, view);
  on_cpu(op, argument, view, "query");
  check_size(op, argument, view, 0, query.size(1), "query.size(1)");
  return view;
}

}  // namespace

std::string sizes_text(const int64_t* values, int64_t n) {
  std::string text = "[";
  for (int64_t i = 0; i < n; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

void fail(const char* op, const std::string& argument, const std::string& expectation, const std::string& actual) {
  throw std::runtime_error(std::string(op) + ": " + argument + " must " + expectation + ", got " + actual);
}

TensorView given(const char* op, const char* argument, const Tensor& tensor) {
  PAGEDKV_EXPECT(op, tensor.defined(), argument, "be a tensor", "None");
  return TensorView(tensor);
}

void check_size(const char* op, const char* argument, const TensorView& tensor, int64_t dim, int64_t size,
                const char* like) {
  PAGEDKV_EXPECT(op, tensor.size(dim) == size, std::string(argument) + ".size(" + std::to_string(dim) + ")",
                 "be " + std::to_string(size) + " like " + like, std::to_string(tensor.size(dim)));
}

void check_no_scale(const char* op, const char* argument, const MaybeTensor& scale) {
  PAGEDKV_EXPECT(op, !scale, argument, "be None (quantised caches are not supported yet)", "a tensor");
}

CacheViews check_caches(const char* op, const Tensor& key_cache, const Tensor& value_cache) {
  const CacheViews caches{given(op, "key_cache", key_cache), given(op, "value_cache", value_cache)};
  const auto& [key, value] = caches;
  rank(op, "key_cache", key, 4, "[num_blocks, block_size, num_kv_heads, head_size]");
  rank(op, "value_cache", value, 4, "[num_blocks, block_size, num_kv_heads, v_head_size]");
  is_cache(op, "key_cache", key);
  same_dtype(op, "value_cache", value, key, "key_cache");
  on_cpu(op, "value_cache", value, "key_cache");
  last_contiguous(op, "key_cache", key);
  last_contiguous(op, "value_cache", value);
  like_sizes(op, "value_cache", value, key, "key_cache", 0, 3);
  block_size(op, "key_cache", key);
  return caches;
}

NewTokens check_new_tokens(const char* op, const Tensor& key, const Tensor& value, const CacheViews& caches,
                           const Tensor& slot_mapping) {
  const NewTokens views{given(op, "key", key), given(op, "value", value), given(op, "slot_mapping", slot_mapping)};
  const auto& [k, v, slots] = views;
  rank(op, "key", k, 3, "[num_tokens, num_kv_heads, head_size]");
  rank(op, "value", v, 3, "[num_tokens, num_kv_heads, v_head_size]");
  rank(op, "slot_mapping", slots, 1, "[num_slots]");
  is_float(op, "key", k);
  is_float(op, "value", v);
  is_index(op, "slot_mapping", slots);
  on_cpu(op, "key", k, "key_cache");
  on_cpu(op, "value", v, "key_cache");
  on_cpu(op, "slot_mapping", slots, "key_cache");
  last_contiguous(op, "key", k);
  last_contiguous(op, "value", v);
  check_size(op, "value", v, 0, k.size(0), "key.size(0)");
  check_size(op, "key", k, 1, caches.key.size(2), "key_cache.size(2)");
  check_size(op, "key", k, 2, caches.key.size(3), "key_cache.size(3)");
  check_size(op, "value", v, 1, caches.value.size(2), "value_cache.size(2)");
  check_size(op, "value", v, 2, caches.value.size(3), "value_cache.size(3)");
  PAGEDKV_EXPECT(op, slots.size(0) <= k.size(0), "slot_mapping.size(0)",
                 "be at most " + std::to_string(k.size(0)) + " (key.size(0))", std::to_string(slots.size(0)));
  return views;
}

TableViews check_table(const char* op, const Tensor& block_table, const Tensor& seq_lens, const char* cache_name) {
  const TableViews views{given(op, "block_table", block_table), given(op, "seq_lens", seq_lens)};
  rank(op, "block_table", views.block_table, 2, "[batch, max_blocks]");
  rank(op, "seq_lens", views.seq_lens, 1, "[batch]");
  is_index(op, "block_table", views.block_table);
  is_index(op, "seq_lens", views.seq_lens);
  on_cpu(op, "block_table", views.block_table, cache_name);
  on_cpu(op, "seq_lens", views.seq_lens, cache_name);
  check_size(op, "block_table", views.block_table, 0, views.seq_lens.size(0), "seq_lens.size(0)");
  return views;
}

AttentionViews check_paged_attention(const char* op, const AttentionCall& call) {
  AttentionViews views;
  views.caches = check_caches(op, call.key_cache, call.value_cache);
  views.query = given(op, "query", call.query);
  check_query(op, views.query, views.caches.key);
  views.table = check_table(op, call.block_table, call.seq_lens, "key_cache");
  const int64_t num_tokens = views.query.size(0), num_seqs = views.table.seq_lens.size(0);
  if (call.cu_seqlens_q) {
    views.cu_seqlens_q = TensorView(*call.cu_seqlens_q);
    rank(op, "cu_seqlens_q", *views.cu_seqlens_q, 1, "[batch+1]");
    is_index(op, "cu_seqlens_q", *views.cu_seqlens_q);
    on_cpu(op, "cu_seqlens_q", *views.cu_seqlens_q, "key_cache");
    check_size(op, "cu_seqlens_q", *views.cu_seqlens_q, 0, num_seqs + 1, "seq_lens.size(0) + 1");
  } else {
    PAGEDKV_EXPECT(op, num_tokens == num_seqs, "query.size(0)",
                   "be " + std::to_string(num_seqs) + " like seq_lens.size(0) when cu_seqlens_q is not given",
                   std::to_string(num_tokens));
  }
  check_options(op, call);
  views.alibi_slopes = head_vector(op, "alibi_slopes", call.alibi_slopes, views.query);
  views.sinks = head_vector(op, "sinks", call.sinks, views.query);
  check_no_scale(op, "k_scale", call.k_scale);
  check_no_scale(op, "v_scale", call.v_scale);
  return views;
}

MergeViews check_merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  const char* op = "merge_states";
  const MergeViews views{given(op, "out_a", out_a), given(op, "lse_a", lse_a), given(op, "out_b", out_b),
                         given(op, "lse_b", lse_b)};
  rank(op, "out_a", views.out_a, 3, "[num_tokens, num_heads, v_head_size]");
  rank(op, "out_b", views.out_b, 3, "[num_tokens, num_heads, v_head_size]");
  is_float(op, "out_a", views.out_a);
  same_dtype(op, "out_b", views.out_b, views.out_a, "out_a");
  on_cpu(op, "out_b", views.out_b, "out_a");
  like_sizes(op, "out_b", views.out_b, views.out_a, "out_a", 0, 3);
  last_contiguous(op, "out_a", views.out_a);
  last_contiguous(op, "out_b", views.out_b);
  const auto lse = [&](const char* argument, const TensorView& t) {
    rank(op, argument, t, 2, "[num_tokens, num_heads]");
    PAGEDKV_EXPECT(op, t.dtype == float32_dtype(), argument, "be float32", dtype_name(t.dtype));
    on_cpu(op, argument, t, "out_a");
    like_sizes(op, argument, t, views.out_a, "out_a", 0, 2);
  };
  lse("lse_a", views.lse_a);
  lse("lse_b", views.lse_b);
  return views;
}

TensorView check_mapping(const char* op, const Tensor& block_mapping) {
  const TensorView view = given(op, "block_mapping", block_mapping);
  PAGEDKV_EXPECT(op, view.dim == 2 && view.size(1) == 2, "block_mapping", "be [num_pairs, 2]",
                 sizes_text(view.sizes, view.dim));
  is_index(op, "block_mapping", view);
  return view;
}

List<TensorView> check_copy_blocks(const std::vector<Tensor>& caches, const Tensor& block_mapping) {
  const char* op = "copy_blocks";
  PAGEDKV_EXPECT(op, !caches.empty(), "caches", "hold at least one tensor", "an empty list");
  check_mapping(op, block_mapping);
  List<TensorView> views;
  views.reserve(caches.size());
  for (const Tensor& cache : caches) {
    const TensorView view(cache);
    const std::string name = "caches[" + std::to_string(views.size()) + "]";
    PAGEDKV_EXPECT(op, view.dim >= 1, name, "have blocks as its first dimension", "a scalar");
    on_cpu(op, name.c_str(), view, "block_mapping");
    views.push_back(view);
  }
  return views;
}

void check_swap_blocks(const TensorView& src, const TensorView& dst, const Tensor& block_mapping) {
  const char* op = "swap_blocks";
  check_mapping(op, block_mapping);
  PAGEDKV_EXPECT(op, is_cpu(block_mapping), "block_mapping", "be on cpu", device_name(block_mapping));
  PAGEDKV_EXPECT(op, src.dim >= 1, "src", "have blocks as its first dimension", "a scalar");
  PAGEDKV_EXPECT(op, dst.dim == src.dim, "dst", "have " + std::to_string(src.dim) + " dimensions like src",
                 std::to_string(dst.dim));
  same_dtype(op, "dst", dst, src, "src");
  like_sizes(op, "dst", dst, src, "src", 1, src.dim);
}

TensorView check_gather_cache(const Tensor& cache) {
  const char* op = "gather_kv";
  const TensorView view = given(op, "cache", cache);
  rank(op, "cache", view, 4, "[num_blocks, block_size, num_kv_heads, head_size]");
  is_cache(op, "cache", view);
  last_contiguous(op, "cache", view);
  block_size(op, "cache", view);
  return view;
}

}  // namespace pagedkv
