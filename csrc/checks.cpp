#include "checks.h"

#include <charconv>
#include <cmath>
#include <stdexcept>

namespace pagedkv {

namespace {

enum class Kind { kFloat, kCache, kQuantised, kIndex, kFloat32 };

bool is(Kind kind, const TensorView& t) {
  switch (kind) {
    case Kind::kFloat:
      return t.is_float();
    case Kind::kCache:
      return t.is_float() || t.is_quantised();
    case Kind::kQuantised:
      return t.is_quantised();
    case Kind::kIndex:
      return t.is_index();
    default:
      return t.dtype == float32_dtype();
  }
}

const char* types_text(Kind kind) {
  switch (kind) {
    case Kind::kFloat:
      return "be float32, float16 or bfloat16";
    case Kind::kCache:
      return "be float32, float16, bfloat16, int8, float8_e4m3fn or float8_e5m2";
    case Kind::kQuantised:
      return "be int8, float8_e4m3fn or float8_e5m2";
    case Kind::kIndex:
      return "be int32 or int64";
    default:
      return "be float32";
  }
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

TensorView of_rank(const char* op, const char* argument, const Tensor& tensor, int64_t dim, const char* shape) {
  const TensorView t = given(op, argument, tensor);
  PAGEDKV_EXPECT(op, t.dim == dim, argument, std::string("be ") + shape, sizes_text(t.sizes, t.dim));
  return t;
}

void last_contiguous(const char* op, const char* argument, const TensorView& t) {
  PAGEDKV_EXPECT(op, t.dim <= 2 || t.stride(t.dim - 1) == 1 || t.size(t.dim - 1) <= 1, argument,
                 "have a contiguous last dimension", "strides " + sizes_text(t.strides, t.dim));
}

// Rank, type, device (that of like_name, if there is one) and contiguous rows of heads.
TensorView checked(const char* op, const char* argument, const Tensor& tensor, int64_t dim, const char* shape,
                   Kind kind, const char* like_name = nullptr) {
  const TensorView t = of_rank(op, argument, tensor, dim, shape);
  PAGEDKV_EXPECT(op, is(kind, t), argument, types_text(kind), dtype_name(t.dtype));
  if (like_name) on_cpu(op, argument, t, like_name);
  last_contiguous(op, argument, t);
  return t;
}

// The same with the type of `like`.
TensorView checked_like(const char* op, const char* argument, const Tensor& tensor, const char* shape,
                        const TensorView& like, const char* like_name) {
  const TensorView t = of_rank(op, argument, tensor, like.dim, shape);
  same_dtype(op, argument, t, like, like_name);
  on_cpu(op, argument, t, like_name);
  last_contiguous(op, argument, t);
  return t;
}

void like_sizes(const char* op, const char* argument, const TensorView& t, const TensorView& like,
                const char* like_name, int64_t begin, int64_t end) {
  for (int64_t d = begin; d < end; ++d) check_size(op, argument, t, d, like, like_name, d);
}

// Views by expand may be longer than 64-bit arithmetic on positions can bear.
void block_size(const char* op, const char* argument, const TensorView& cache) {
  PAGEDKV_EXPECT(op, 1 <= cache.size(1) && cache.size(1) <= INT32_MAX, std::string(argument) + ".size(1)",
                 "be in 1..2147483647 (block_size)", std::to_string(cache.size(1)));
}

void check_query_sizes(const char* op, const TensorView& q, const TensorView& k) {
  check_size(op, "query", q, 2, k, "key_cache", 3);
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

// Whether there is a scale: a quantised cache needs one, another takes none.
bool is_given(const char* op, const std::string& argument, const MaybeTensor& scale, const TensorView& cache,
              const char* cache_name) {
  const bool is_quantised = cache.is_quantised();
  PAGEDKV_EXPECT(
      op, scale.has_value() == is_quantised, argument,
      std::string(is_quantised ? "be given for a " : "be None for a ") + cache_name + " in " + dtype_name(cache.dtype),
      scale ? "a tensor" : "None");
  return is_quantised;
}

TensorView fixed_scale(const char* op, const std::string& argument, const Tensor& scale, const TensorView& cache,
                       const char* cache_name) {
  const TensorView view = checked(op, argument.c_str(), scale, 1, "[1 or num_kv_heads]", Kind::kFloat32, cache_name);
  PAGEDKV_EXPECT(op, view.size(0) == 1 || view.size(0) == cache.size(2), argument + ".size(0)",
                 "be 1 or " + std::to_string(cache.size(2)) + " (" + cache_name + ".size(2))",
                 std::to_string(view.size(0)));
  return view;
}

TensorView scale_cache_of(const char* op, const std::string& argument, const Tensor& scale, const TensorView& cache,
                          const char* cache_name) {
  const TensorView view = of_rank(op, argument.c_str(), scale, 3, "[num_blocks, block_size, num_kv_heads]");
  PAGEDKV_EXPECT(op, view.dtype == float32_dtype(), argument, "be float32", dtype_name(view.dtype));
  on_cpu(op, argument.c_str(), view, cache_name);
  like_sizes(op, argument.c_str(), view, cache, cache_name, 0, 3);
  return view;
}

MaybeView head_vector(const char* op, const char* argument, const MaybeTensor& tensor, const TensorView& query) {
  if (!tensor) return std::nullopt;
  const TensorView view = checked(op, argument, *tensor, 1, "[num_heads]", Kind::kFloat, "query");
  check_size(op, argument, view, 0, query, "query", 1);
  return view;
}

}  // namespace

std::string sizes_text(const int64_t* values, int64_t n) {
  std::string text = "[";
  for (int64_t i = 0; i < n; ++i) text += (i ? ", " : "") + std::to_string(values[i]);
  return text + "]";
}

std::string float_text(double x) {
  if (std::isnan(x)) return "nan";
  if (std::isinf(x)) return x > 0 ? "inf" : "-inf";
  char digits[32];
  const auto end = std::to_chars(digits, digits + sizeof(digits), x).ptr;
  std::string text(digits, end);
  return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
}

void fail(const char* op, const std::string& argument, const std::string& expectation, const std::string& actual) {
  throw std::runtime_error(std::string(op) + ": " + argument + " must " + expectation + ", got " + actual);
}

TensorView given(const char* op, const char* argument, const Tensor& tensor) {
  PAGEDKV_EXPECT(op, tensor.defined(), argument, "be a tensor", "None");
  return TensorView(tensor);
}

void check_size(const char* op, const char* argument, const TensorView& t, int64_t dim, const TensorView& like,
                const char* like_name, int64_t like_dim) {
  const auto name = [](const char* tensor, int64_t d) {
    return std::string(tensor) + ".size(" + std::to_string(d) + ")";
  };
  PAGEDKV_EXPECT(op, t.size(dim) == like.size(like_dim), name(argument, dim),
                 "be " + std::to_string(like.size(like_dim)) + " like " + name(like_name, like_dim),
                 std::to_string(t.size(dim)));
}

MaybeView check_read_scale(const char* op, const char* argument, const MaybeTensor& scale, const TensorView& cache,
                           const char* cache_name) {
  if (!is_given(op, argument, scale, cache, cache_name)) return std::nullopt;
  return TensorView(*scale).dim == 3 ? scale_cache_of(op, argument, *scale, cache, cache_name)
                                     : fixed_scale(op, argument, *scale, cache, cache_name);
}

WrittenScale check_written_scale(const char* op, const std::string& argument, const MaybeTensor& scale,
                                 const MaybeTensor& scale_cache, const TensorView& cache, const char* cache_name) {
  if (!scale_cache) {
    if (!is_given(op, argument, scale, cache, cache_name)) return {};
    return {fixed_scale(op, argument, *scale, cache, cache_name), std::nullopt};
  }
  const std::string name = argument + "_cache";
  PAGEDKV_EXPECT(op, !scale, argument, "be None beside " + name, "a tensor");
  if (!is_given(op, name, scale_cache, cache, cache_name)) return {};
  return {std::nullopt, scale_cache_of(op, name, *scale_cache, cache, cache_name)};
}

CacheViews check_caches(const char* op, const Tensor& key_cache, const Tensor& value_cache) {
  const TensorView key =
      checked(op, "key_cache", key_cache, 4, "[num_blocks, block_size, num_kv_heads, head_size]", Kind::kCache);
  const char* shape = "[num_blocks, block_size, num_kv_heads, v_head_size]";  // quantised ones may differ in type
  const TensorView value = key.is_quantised()
                               ? checked(op, "value_cache", value_cache, 4, shape, Kind::kQuantised, "key_cache")
                               : checked_like(op, "value_cache", value_cache, shape, key, "key_cache");
  like_sizes(op, "value_cache", value, key, "key_cache", 0, 3);
  block_size(op, "key_cache", key);
  return {key, value};
}

NewTokens check_new_tokens(const char* op, const Tensor& key, const Tensor& value, const CacheViews& caches,
                           const Tensor& slot_mapping) {
  const char* like = "key_cache";
  const TensorView k = checked(op, "key", key, 3, "[num_tokens, num_kv_heads, head_size]", Kind::kFloat, like);
  const TensorView v = checked(op, "value", value, 3, "[num_tokens, num_kv_heads, v_head_size]", Kind::kFloat, like);
  const TensorView slots = checked(op, "slot_mapping", slot_mapping, 1, "[num_slots]", Kind::kIndex, like);
  check_size(op, "value", v, 0, k, "key", 0);
  for (int64_t d = 1; d < 3; ++d) {
    check_size(op, "key", k, d, caches.key, "key_cache", d + 1);
    check_size(op, "value", v, d, caches.value, "value_cache", d + 1);
  }
  PAGEDKV_EXPECT(op, slots.size(0) <= k.size(0), "slot_mapping.size(0)",
                 "be at most " + std::to_string(k.size(0)) + " (key.size(0))", std::to_string(slots.size(0)));
  return {k, v, slots};
}

TableViews check_table(const char* op, const Tensor& block_table, const Tensor& seq_lens, const char* cache_name) {
  const TableViews views{
      checked(op, "block_table", block_table, 2, "[batch, max_blocks]", Kind::kIndex, cache_name),
      checked(op, "seq_lens", seq_lens, 1, "[batch]", Kind::kIndex, cache_name),
  };
  check_size(op, "block_table", views.block_table, 0, views.seq_lens, "seq_lens", 0);
  return views;
}

AttentionViews check_paged_attention(const char* op, const AttentionCall& call) {
  AttentionViews views;
  views.caches = check_caches(op, call.key_cache, call.value_cache);
  views.query = checked(op, "query", call.query, 3, "[num_tokens, num_heads, head_size]", Kind::kFloat, "key_cache");
  check_query_sizes(op, views.query, views.caches.key);
  views.table = check_table(op, call.block_table, call.seq_lens, "key_cache");
  const int64_t num_tokens = views.query.size(0), num_seqs = views.table.seq_lens.size(0);
  if (call.cu_seqlens_q) {
    views.cu_seqlens_q = checked(op, "cu_seqlens_q", *call.cu_seqlens_q, 1, "[batch+1]", Kind::kIndex, "key_cache");
    const int64_t size = views.cu_seqlens_q->size(0);
    PAGEDKV_EXPECT(op, size == num_seqs + 1, "cu_seqlens_q.size(0)",
                   "be " + std::to_string(num_seqs + 1) + " like seq_lens.size(0) + 1", std::to_string(size));
  } else {
    PAGEDKV_EXPECT(op, num_tokens == num_seqs, "query.size(0)",
                   "be " + std::to_string(num_seqs) + " like seq_lens.size(0) when cu_seqlens_q is not given",
                   std::to_string(num_tokens));
  }
  check_options(op, call);
  views.alibi_slopes = head_vector(op, "alibi_slopes", call.alibi_slopes, views.query);
  views.sinks = head_vector(op, "sinks", call.sinks, views.query);
  return views;
}

MergeViews check_merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b) {
  const char *op = "merge_states", *like = "out_a";
  const char *shape = "[num_tokens, num_heads, v_head_size]", *lse_shape = "[num_tokens, num_heads]";
  MergeViews views;
  views.out_a = checked(op, "out_a", out_a, 3, shape, Kind::kFloat);
  views.out_b = checked_like(op, "out_b", out_b, shape, views.out_a, like);
  views.lse_a = checked(op, "lse_a", lse_a, 2, lse_shape, Kind::kFloat32, like);
  views.lse_b = checked(op, "lse_b", lse_b, 2, lse_shape, Kind::kFloat32, like);
  like_sizes(op, "out_b", views.out_b, views.out_a, like, 0, 3);
  like_sizes(op, "lse_a", views.lse_a, views.out_a, like, 0, 2);
  like_sizes(op, "lse_b", views.lse_b, views.out_a, like, 0, 2);
  return views;
}

TensorView check_mapping(const char* op, const Tensor& block_mapping) {
  const TensorView view = checked(op, "block_mapping", block_mapping, 2, "[num_pairs, 2]", Kind::kIndex);
  PAGEDKV_EXPECT(op, view.size(1) == 2, "block_mapping", "be [num_pairs, 2]", sizes_text(view.sizes, view.dim));
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
  const TensorView view =
      checked(op, "cache", cache, 4, "[num_blocks, block_size, num_kv_heads, head_size]", Kind::kCache);
  block_size(op, "cache", view);
  return view;
}

int32_t check_gather_dtype(const TensorView& cache, std::optional<torch::headeronly::ScalarType> dtype) {
  const bool is_quantised = cache.is_quantised();
  const int32_t usual = is_quantised ? float32_dtype() : cache.dtype, wanted = dtype ? dtype_of(*dtype) : usual;
  const bool is_float = wanted == float32_dtype() || dtype == torch::headeronly::ScalarType::Half ||
                        dtype == torch::headeronly::ScalarType::BFloat16;
  PAGEDKV_EXPECT("gather_kv", is_quantised ? is_float : wanted == usual, "dtype",
                 is_quantised ? "be float32, float16 or bfloat16" : "be " + dtype_name(cache.dtype) + " like cache",
                 dtype_name(wanted));
  return wanted;
}

}  // namespace pagedkv
