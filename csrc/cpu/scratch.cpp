#include "scratch.h"

#include <initializer_list>
#include <new>

#include "attention_args.h"

namespace pagedkv {

namespace {

constexpr std::align_val_t kAlignment{64};
// Kept per buffer and thread. The largest common task, 768 rows of a 576-wide head in float32, takes 5 MB.
constexpr int64_t kKeptBytes = int64_t{16} << 20;

Buffer& thread_buffer() {
  thread_local Buffer buffer;
  return buffer;
}

}  // namespace

char* allocate(int64_t bytes) {
  void* data = bytes == INT64_MAX ? nullptr : ::operator new(bytes, kAlignment, std::nothrow);
  if (!data) throw OutOfMemory{bytes};
  return static_cast<char*>(data);
}

void deallocate(char* data) { ::operator delete(data, kAlignment); }

char* Buffer::reserve(int64_t bytes) {
  if (bytes > size_) {
    // Half more, because lengths grow token by token; what is given back after the call need not last.
    const int64_t size = bytes > kKeptBytes ? bytes : bytes + bytes / 2;
    char* data = allocate(size);
    deallocate(data_);
    data_ = data;
    size_ = size;
  }
  return data_;
}

void Buffer::trim() {
  if (size_ <= kKeptBytes) return;
  deallocate(data_);
  data_ = nullptr;
  size_ = 0;
}

char* thread_scratch(int64_t bytes) { return thread_buffer().reserve(bytes); }

void trim_thread_scratch() { thread_buffer().trim(); }

CallScratch& call_scratch() {
  thread_local CallScratch scratch;
  return scratch;
}

void CallScratch::trim() {
  for (Buffer* buffer : {&slots, &lengths, &blocks, &heads, &plan, &partials}) buffer->trim();
}

}  // namespace pagedkv
