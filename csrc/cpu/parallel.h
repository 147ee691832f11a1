// Threads: those of torch (torch.get_num_threads), through the stable ABI.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>

namespace pagedkv {

// A parallel region costs more than this many bytes of memory traffic in one thread (about 2 us).
constexpr int64_t kSerialBytes = 64 * 1024;

inline int64_t num_threads() { return static_cast<int64_t>(torch::stable::get_num_threads()); }

// Calls f(begin, end) on ranges that cover [0, n); serial when the work as a whole moves few bytes.
template <typename F>
void parallel_ranges(int64_t n, int64_t total_bytes, const F& f) {
  if (n <= 1 || total_bytes < kSerialBytes || num_threads() == 1) {
    if (n > 0) f(int64_t{0}, n);
    return;
  }
  torch::stable::parallel_for(0, n, 1, f);
}

// Calls f(i) for each of n uneven tasks; whichever thread is free takes the next.
template <typename F>
void parallel_tasks(int64_t n, int64_t total_bytes, const F& f) {
  if (n <= 1 || total_bytes < kSerialBytes || num_threads() == 1) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  std::atomic<int64_t> next{0};
  torch::stable::parallel_for(0, num_threads(), 1, [&](int64_t, int64_t) {
    for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) f(i);
  });
}

}  // namespace pagedkv
