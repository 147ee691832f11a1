// Memory that is kept between calls, so that a call allocates nothing but its output.
#pragma once

#include <cstddef>

namespace pagedkv {

// 64-byte aligned storage that only ever grows. Contents are lost when it does.
class Buffer {
 public:
  Buffer() = default;
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  ~Buffer();
  char* reserve(size_t bytes);

 private:
  char* data_ = nullptr;
  size_t size_ = 0;
};

// Of the calling thread, apart from thread_scratch(): what one op call plans for all its workers.
Buffer& call_scratch();     // the plan
Buffer& partial_scratch();  // results of split sequences
Buffer& head_scratch();     // per-head options in float32

}  // namespace pagedkv
