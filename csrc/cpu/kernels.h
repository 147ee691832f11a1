// The table of kernels that every instruction set fills, and the plain arguments they take.
#pragma once

#include "attention_args.h"

namespace pagedkv {

// Query tokens [query_begin, query_end) (local to the sequence) against keys [key_begin, key_end) and the query heads
// of KV heads [head_begin, head_end). key_begin is a multiple of kDecodeTile: the order of summation of a row then
// depends on nothing but its own position.
struct DecodeTask {
  int64_t seq;
  int64_t query_begin, query_end;
  int64_t key_begin, key_end;
  int64_t head_begin, head_end;
  float* partial;              // partial row of the first (token, query head) of the task; null: write the output
  int64_t partial_token_step;  // floats from one query token to the next; heads follow one another
};

constexpr int64_t kDecodeTile = 16;

// A partial row: its accumulator [Dv], then the maximum logit (base 2) and the sum of weights relative to it.
PAGEDKV_INLINE int64_t partial_row_size(const AttentionArgs& args) { return round_up(args.value_head_size + 2, 16); }

// Joins the partial rows `first + i * step`, i < count, of one (token, query head) into the output row.
struct MergeTask {
  const float* first;
  int64_t step;
  int64_t count;
  int64_t token;  // in the batch
  int64_t head;
};

struct WriteSource {
  const char* data;
  DType dtype;
  int64_t token_stride, head_stride;  // elements
  int64_t head_size;
};

struct WriteArgs {
  WriteSource key, value;
  CacheView key_cache, value_cache;  // their scales are read if they are fixed, otherwise written
  bool key_scale_is_fixed, value_scale_is_fixed;
  const int64_t* slots;
  int64_t block_size, num_kv_heads;
  bool stream;  // bypass the caches of the processor
};

struct MergeStatesArgs {
  const char* out_a;
  const char* out_b;
  char* out;  // contiguous
  const float* lse_a;
  const float* lse_b;
  float* lse;  // contiguous
  DType dtype;
  int64_t a_token_stride, a_head_stride, b_token_stride, b_head_stride;
  int64_t lse_a_token_stride, lse_a_head_stride, lse_b_token_stride, lse_b_head_stride;
  int64_t num_heads, head_size;
};

struct Kernels {
  const char* name;
  void (*decode)(const AttentionArgs&, const DecodeTask&);
  void (*merge_partials)(const AttentionArgs&, const MergeTask&);
  void (*prefill)(const AttentionArgs&, const PrefillTask&);
  int64_t (*prefill_tokens_per_task)(const AttentionArgs&);
  void (*write_tokens)(const WriteArgs&, int64_t begin, int64_t end);
  void (*merge_states)(const MergeStatesArgs&, int64_t token_begin, int64_t token_end);
  void (*copy)(char* dst, const char* src, int64_t bytes, bool stream);
  bool (*has_nan)(const char* row, DType dtype, int64_t n);
  void (*to_float)(float* dst, const char* src, DType dtype, int64_t stride, int64_t n);
  // n quantised elements times their scale, as dst_dtype
  void (*dequantise)(char* dst, DType dst_dtype, const char* src, DType src_dtype, float scale, int64_t n);
};

// The fastest table this processor can run, or the one that PAGEDKV_ISA names (an error if it can not run here).
const Kernels& kernels();

extern const Kernels kKernelsBaseline;
#if defined(__x86_64__)
extern const Kernels kKernelsAvx2;
extern const Kernels kKernelsAvx512;
extern const Kernels kKernelsAvx512Bf16;
extern const Kernels kKernelsAvx512Amx;  // only where the compiler knows AMX (PAGEDKV_HAS_AMX)
#endif

}  // namespace pagedkv
