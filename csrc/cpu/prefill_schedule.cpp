#include "prefill_schedule.h"

#include "parallel.h"
#include "scratch.h"

namespace pagedkv {

namespace {

constexpr int64_t kMinPrefillTokens = 4;
constexpr int64_t kMinTaskRows = 96;
constexpr int64_t kTasksPerThread = 4;  // causal tasks are uneven
constexpr int64_t kFlopsPerByte = 6;    // 100 GFLOP/s beside 16 GB/s for one thread

// Query tokens of a task: as many as pay off, but fewer where threads would stay idle.
int64_t tokens_per_task(const AttentionArgs& args, int64_t total_tokens) {
  const int64_t even = ceil_div(total_tokens * args.num_kv_heads, kTasksPerThread * num_threads());
  const int64_t rows = max_of(kMinTaskRows, min_of(kPrefillRows, even * args.group_size()));
  return max_of<int64_t>(1, rows / args.group_size());
}

}  // namespace

bool takes_prefill(const AttentionArgs& args, int64_t query_length) {
  return query_length >= kMinPrefillTokens && args.num_splits != 1;
}

PrefillPlan::PrefillPlan(const AttentionArgs& args) : num_kv_heads_(args.num_kv_heads) {
  int64_t total_tokens = 0;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t query_length = args.query_length(seq);
    if (!takes_prefill(args, query_length)) continue;
    if (!sequences_) {
      sequences_ = reinterpret_cast<Sequence*>(prefill_scratch().reserve(args.num_seqs * sizeof(Sequence)));
    }
    sequences_[num_sequences_++] = {seq, 0, query_length, 0};
    total_tokens += query_length;
    const int64_t flops_per_pair = 2 * args.num_heads * (args.head_size + args.value_head_size);
    work_bytes_ += query_length * args.seq_lens[seq] * flops_per_pair / kFlopsPerByte;
  }
  if (num_sequences_ == 0) return;
  const int64_t tokens = tokens_per_task(args, total_tokens);
  for (Sequence* s = sequences_; s < sequences_ + num_sequences_; ++s) {
    s->first_task = num_tasks_;
    s->tiles = ceil_div(s->query_length, tokens);
    num_tasks_ += s->tiles * num_kv_heads_;
  }
}

PrefillTask PrefillPlan::task(int64_t index) const {
  const Sequence* s = sequences_;
  for (int64_t count = num_sequences_; count > 1;) {  // the last sequence that starts at or before index
    const int64_t half = count / 2;
    if (s[half].first_task <= index) s += half;
    count -= half;
  }
  const int64_t local = index - s->first_task;
  // Late tokens see the most keys under a causal mask: start with them.
  const int64_t tile = s->tiles - 1 - local / num_kv_heads_;
  return {s->seq, local % num_kv_heads_, s->query_length * tile / s->tiles, s->query_length * (tile + 1) / s->tiles};
}

}  // namespace pagedkv
