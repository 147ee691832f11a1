// All memory of the ops but their results. Most is kept between calls, so that a call allocates nothing but its output.
#pragma once

#include <vector>

#include "types.h"

namespace pagedkv {

// 64-byte aligned, or an OutOfMemory that says how many bytes.
char* allocate(int64_t bytes);
void deallocate(char* data);

template <typename T>
struct Allocator {
  using value_type = T;
  Allocator() = default;
  template <typename U>
  Allocator(const Allocator<U>&) {}
  T* allocate(size_t count) { return reinterpret_cast<T*>(pagedkv::allocate(times(count, sizeof(T)))); }
  void deallocate(T* data, size_t) { pagedkv::deallocate(reinterpret_cast<char*>(data)); }
  bool operator==(const Allocator&) const = default;
};
template <typename T>
using List = std::vector<T, Allocator<T>>;

// 64-byte aligned storage that grows as it is asked to. Contents are lost when it does.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer() { deallocate(data_); }
  char* reserve(int64_t bytes);
  template <typename T>
  T* reserve_for(int64_t count) {
    return reinterpret_cast<T*>(reserve(times(count, sizeof(T))));
  }
  // Gives back what an exceptionally large call has left; contents are lost.
  void trim();

 private:
  char* data_ = nullptr;
  int64_t size_ = 0;
};

// Of the calling thread, apart from thread_scratch(): what one op call plans for all its workers.
struct CallScratch {
  Buffer slots, lengths, blocks;  // indices, read once
  Buffer heads;                   // per-head options in float32
  Buffer plan;
  Buffer partials;  // results of split sequences
  void trim();
};
CallScratch& call_scratch();

void trim_thread_scratch();

}  // namespace pagedkv
