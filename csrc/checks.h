// The argument contract of every op: the same conditions in the same order with the same words as pagedkv_ops/checks.py
// and pagedkv_ops/value_checks.py (a test compares the two). Errors are std::runtime_error, RuntimeError in Python.
#pragma once

#include <optional>
#include <string>

#include "cpu/scratch.h"
#include "tensor_view.h"

namespace pagedkv {

using MaybeTensor = std::optional<Tensor>;

// As Python prints a float.
std::string float_text(double x);

[[noreturn]] void fail(const char* op, const std::string& argument, const std::string& expectation,
                       const std::string& actual);

std::string sizes_text(const int64_t* values, int64_t n);

// The texts are built only when the condition does not hold.
#define PAGEDKV_EXPECT(op, condition, argument, expectation, actual) \
  do {                                                               \
    if (!(condition)) [[unlikely]]                                   \
      ::pagedkv::fail(op, argument, expectation, actual);            \
  } while (0)

// An argument that is not optional; None in Python arrives as an undefined tensor.
TensorView given(const char* op, const char* argument, const Tensor& tensor);

struct CacheViews {
  TensorView key, value;
};

struct NewTokens {
  TensorView key, value, slot_mapping;
};

struct TableViews {
  TensorView block_table, seq_lens;
};

using MaybeView = std::optional<TensorView>;

// The scales of a write into a quantised cache: fixed ones, or a cache of scales that it fills.
struct WrittenScale {
  MaybeView fixed, cache;
};

// The arguments of paged_attention, in the order of the schema.
struct AttentionCall {
  const Tensor &query, &key_cache, &value_cache, &block_table, &seq_lens;
  const MaybeTensor& cu_seqlens_q;
  std::optional<double> scale;
  bool causal;
  int64_t window_left, window_right;
  double softcap;
  const MaybeTensor &alibi_slopes, &sinks, &k_scale, &v_scale;
  int64_t num_splits;
};

CacheViews check_caches(const char* op, const Tensor& key_cache, const Tensor& value_cache);
NewTokens check_new_tokens(const char* op, const Tensor& key, const Tensor& value, const CacheViews& caches,
                           const Tensor& slot_mapping);
// [1], [Hkv] or [N, S, Hkv] of a quantised cache.
MaybeView check_read_scale(const char* op, const char* argument, const MaybeTensor& scale, const TensorView& cache,
                           const char* cache_name);
WrittenScale check_written_scale(const char* op, const std::string& argument, const MaybeTensor& scale,
                                 const MaybeTensor& scale_cache, const TensorView& cache, const char* cache_name);
void check_size(const char* op, const char* argument, const TensorView& t, int64_t dim, const TensorView& like,
                const char* like_name, int64_t like_dim);
TableViews check_table(const char* op, const Tensor& block_table, const Tensor& seq_lens, const char* cache_name);

struct AttentionViews {
  CacheViews caches;
  TensorView query;
  TableViews table;
  MaybeView cu_seqlens_q;
  MaybeView alibi_slopes, sinks;
  MaybeView k_scale, v_scale;
};
// All but the scales, which the caller checks: they differ with and without a write.
AttentionViews check_paged_attention(const char* op, const AttentionCall& call);

struct MergeViews {
  TensorView out_a, lse_a, out_b, lse_b;
};
MergeViews check_merge_states(const Tensor& out_a, const Tensor& lse_a, const Tensor& out_b, const Tensor& lse_b);

TensorView check_mapping(const char* op, const Tensor& block_mapping);
List<TensorView> check_copy_blocks(const std::vector<Tensor>& caches, const Tensor& block_mapping);
void check_swap_blocks(const TensorView& src, const TensorView& dst, const Tensor& block_mapping);
TensorView check_gather_cache(const Tensor& cache);
int32_t check_gather_dtype(const TensorView& cache, std::optional<torch::headeronly::ScalarType> dtype);

// Index tensors are read once, into `out`, and checked there before the first byte is written: what was checked is what
// is used, whatever another thread writes into the tensor meanwhile.
void read_slots(const char* op, const TensorView& slot_mapping, const TensorView& cache, int64_t* out);
void read_seq_lens(const char* op, const TableViews& table, int64_t block_size, int64_t* out);
void read_cu_seqlens_q(const char* op, const TensorView& cu_seqlens_q, int64_t num_tokens, int64_t* out);
// Columns [begin, end) of row `seq`.
void read_block_ids(const char* op, const TensorView& block_table, int64_t seq, int64_t begin, int64_t end,
                    int64_t num_blocks, int64_t* out);
struct BlockPair {
  int64_t src, dst;
};
List<BlockPair> read_block_mapping(const char* op, const TensorView& block_mapping, int64_t num_src, int64_t num_dst);

// `index` of a tensor in a list.
void check_places(const char* op, const char* argument, const TensorView& cache, int64_t index = -1);
void check_distinct_caches(const char* op, const CacheViews& caches, const MaybeView& k_scale_cache,
                           const MaybeView& v_scale_cache);
void check_fixed_scale(const char* op, const char* argument, const MaybeView& scale);
// int8 has no NaN: of the rows whose slot is not negative.
void check_numbers(const char* op, const char* argument, const TensorView& rows, const int64_t* slots,
                   int64_t num_slots, const TensorView& cache);
// Whether two tensors share elements. Views with unequal strides that reach into each other are not decided.
enum class Sharing { kNo, kUndecided, kYes };
Sharing sharing(const TensorView& a, const TensorView& b);

}  // namespace pagedkv
