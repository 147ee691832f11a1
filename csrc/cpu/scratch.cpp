#include "scratch.h"

#include <cstdint>
#include <new>

#include "attention_args.h"

namespace pagedkv {

namespace {
constexpr std::align_val_t kAlignment{64};
}

Buffer::~Buffer() { ::operator delete(data_, kAlignment); }

char* Buffer::reserve(size_t bytes) {
  if (bytes > size_) {
    const size_t size = bytes + bytes / 2;  // lengths grow token by token: do not allocate at every step
    char* data = static_cast<char*>(::operator new(size, kAlignment));
    ::operator delete(data_, kAlignment);
    data_ = data;
    size_ = size;
  }
  return data_;
}

char* thread_scratch(size_t bytes) {
  thread_local Buffer buffer;
  return buffer.reserve(bytes);
}

Buffer& call_scratch() {
  thread_local Buffer buffer;
  return buffer;
}

Buffer& partial_scratch() {
  thread_local Buffer buffer;
  return buffer;
}

Buffer& head_scratch() {
  thread_local Buffer buffer;
  return buffer;
}

}  // namespace pagedkv
