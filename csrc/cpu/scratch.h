// Memory that is kept between calls, so that a call allocates nothing but its output.
#pragma once

#include "types.h"

namespace pagedkv {

// 64-byte aligned storage that grows as it is asked to. Contents are lost when it does.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();
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
