// Which sequences the prefill kernel takes, and how they are cut into tasks.
#pragma once

#include "kernels.h"

namespace pagedkv {

bool takes_prefill(const AttentionArgs& args, int64_t query_length);

// Borrows scratch of the calling thread: one plan at a time.
class PrefillPlan {
 public:
  explicit PrefillPlan(const AttentionArgs& args);
  int64_t num_tasks() const { return num_tasks_; }
  int64_t work_bytes() const { return work_bytes_; }  // memory traffic that would take as long
  PrefillTask task(int64_t index) const;

 private:
  struct Sequence {
    int64_t seq;
    int64_t first_task;
    int64_t query_length;
    int64_t tiles;  // of query tokens, as even as possible
  };

  Sequence* sequences_ = nullptr;
  int64_t num_sequences_ = 0;
  int64_t num_kv_heads_;
  int64_t num_tasks_ = 0;
  int64_t work_bytes_ = 0;
};

}  // namespace pagedkv
