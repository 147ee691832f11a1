// Threads: those of torch (torch.get_num_threads), through the stable ABI.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <exception>

#include "scratch.h"

namespace pagedkv {

// A parallel region costs more than this many bytes of memory traffic in one thread (about 2 us).
constexpr int64_t kSerialBytes = 64 * 1024;

inline int64_t num_threads() { return static_cast<int64_t>(torch::stable::get_num_threads()); }

// Calls f(begin, end) on ranges that cover [0, n) in torch's threads. The first exception of a worker is thrown again
// here: it would lose its type and text on the way through torch's C interface.
template <typename F>
void run_workers(int64_t n, const F& f) {
  std::atomic_flag failed;
  std::exception_ptr error;
  torch::stable::parallel_for(0, n, 1, [&](int64_t begin, int64_t end) {
    try {
      f(begin, end);
    } catch (...) {
      if (!failed.test_and_set()) error = std::current_exception();
    }
    trim_thread_scratch();
  });
  if (error) std::rethrow_exception(error);
}

// Calls f(begin, end) on ranges that cover [0, n); serial when the work as a whole moves few bytes.
template <typename F>
void parallel_ranges(int64_t n, int64_t total_bytes, const F& f) {
  if (n <= 1 || total_bytes < kSerialBytes || num_threads() == 1) {
    if (n > 0) f(int64_t{0}, n);
    return;
  }
  run_workers(n, f);
}

// Calls f(i) for each of n uneven tasks; whichever thread is free takes the next.
template <typename F>
void parallel_tasks(int64_t n, int64_t total_bytes, const F& f) {
  if (n <= 1 || total_bytes < kSerialBytes || num_threads() == 1) {
    for (int64_t i = 0; i < n; ++i) f(i);
    return;
  }
  std::atomic<int64_t> next{0};
  run_workers(num_threads(), [&](int64_t, int64_t) {
    for (int64_t i = next.fetch_add(1); i < n; i = next.fetch_add(1)) f(i);
  });
}

}  // namespace pagedkv
