// What one attention call is about, as raw pointers: shared by the router and by the kernels of every instruction set.
// Shapes: T query tokens, B sequences, Hq / Hkv query and KV heads, D / Dv head sizes, N blocks of S tokens, W = table
// width.
#pragma once

#include "types.h"

namespace pagedkv {

// Scales of a quantised cache: [N, S, Hkv], or fixed ones with strides of 0. Null: the cache has none.
struct ScaleView {
  const float* data = nullptr;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
};

// key_cache or value_cache, logically [N, S, Hkv, D]; strides count elements, the last dimension is contiguous.
struct CacheView {
  const char* data = nullptr;
  int64_t block_stride = 0;
  int64_t token_stride = 0;
  int64_t head_stride = 0;
  DType dtype = DType::kFloat32;
  ScaleView scale = {};
  PAGEDKV_INLINE int64_t itemsize() const { return element_size(dtype); }
};

struct AttentionArgs {
  const char* query = nullptr;  // [T, Hq, D], last dimension contiguous
  int64_t query_token_stride = 0;
  int64_t query_head_stride = 0;
  char* out = nullptr;   // [T, Hq, Dv], contiguous, the query's dtype
  float* lse = nullptr;  // [T, Hq], contiguous, or null
  CacheView key;
  CacheView value;
  DType query_dtype = DType::kFloat32;

  // Copies that were read once and checked: another thread may write to the tensors meanwhile.
  const int64_t* blocks = nullptr;        // the visible entries of block_table, row after row
  const int64_t* row_starts = nullptr;    // [B]: entry (b, i) of the table is blocks[row_starts[b] + i]
  const int64_t* seq_lens = nullptr;      // [B]
  const int64_t* cu_seqlens_q = nullptr;  // [B + 1], or null: one query token per sequence

  int64_t num_tokens = 0;       // T
  int64_t num_seqs = 0;         // B
  int64_t num_heads = 0;        // Hq
  int64_t num_kv_heads = 0;     // Hkv
  int64_t head_size = 0;        // D
  int64_t value_head_size = 0;  // Dv
  int64_t block_size = 0;       // S

  float scale = 1.0f;
  float softcap = 0.0f;  // 0: none
  bool causal = true;
  int64_t window_left = -1;             // -1: unlimited; below kLongestWindow
  int64_t window_right = -1;            // likewise
  const float* alibi_slopes = nullptr;  // [Hq] or null
  const float* sinks = nullptr;         // [Hq] or null
  int64_t num_splits = 0;               // 0: automatic, 1: never split the keys of a row

  PAGEDKV_INLINE int64_t group_size() const { return num_heads / num_kv_heads; }
  PAGEDKV_INLINE int64_t block_id(int64_t seq, int64_t index) const { return blocks[row_starts[seq] + index]; }
  PAGEDKV_INLINE int64_t query_start(int64_t seq) const { return cu_seqlens_q ? cu_seqlens_q[seq] : seq; }
  PAGEDKV_INLINE int64_t query_length(int64_t seq) const {
    return cu_seqlens_q ? cu_seqlens_q[seq + 1] - cu_seqlens_q[seq] : 1;
  }
};

// Sums of positions and windows stay inside 64 bits: lengths are at most twice this, longer windows count as unlimited.
constexpr int64_t kLongestWindow = int64_t{1} << 61;

// Keys [begin, end) are visible to a query token; empty when end <= begin.
struct KeyRange {
  int64_t begin;
  int64_t end;
};

// Query token `index` (0 .. query_length - 1) of a sequence stands at position seq_len - query_length + index, which is
// negative for rows that see nothing.
PAGEDKV_INLINE KeyRange visible_keys(const AttentionArgs& args, int64_t seq_len, int64_t query_length, int64_t index) {
  const int64_t position = seq_len - query_length + index;
  KeyRange range{0, args.causal ? min_of(seq_len, position + 1) : seq_len};
  if (args.window_right >= 0) range.end = min_of(range.end, position + args.window_right + 1);
  if (args.window_left >= 0) range.begin = max_of<int64_t>(0, position - args.window_left);
  return range;
}

// Query tokens [begin, end) (local to the sequence) of one sequence against one KV head: what a prefill tile computes,
// out and lse included. Rows that see nothing are written as 0 and -inf (or the sink) too.
struct PrefillTask {
  int64_t seq;
  int64_t kv_head;
  int64_t begin;
  int64_t end;
};

// Scratch of the calling thread, 64-byte aligned, kept between calls (scratch.h); contents are undefined.
// One owner at a time: a kernel asks once per task and cuts it up itself.
char* thread_scratch(int64_t bytes);

}  // namespace pagedkv
