// Registers the CPU implementations. Schemas and tags are defined in Python (pagedkv_ops/schema.py), because tags in a
// C++ definition need a later stable ABI than the one this library targets.
#include <torch/csrc/stable/library.h>

#include <new>
#include <stdexcept>
#include <string>

#include "cpu/ops.h"
#include "cpu/scratch.h"

namespace pagedkv {
namespace {

struct TrimAtEnd {
  ~TrimAtEnd() {
    call_scratch().trim();
    trim_thread_scratch();
  }
};

[[noreturn]] void fail_to_allocate(const char* op, const std::string& amount) {
  throw std::runtime_error(std::string(op) + ": cannot allocate " + amount);
}

// An op that names itself when memory runs out, and gives back the scratch of an exceptionally large call.
template <const char* kName, auto kFunction>
struct Op;
template <const char* kName, typename Result, typename... Args, Result (*kFunction)(Args...)>
struct Op<kName, kFunction> {
  static Result call(Args... args) {
    const TrimAtEnd trim;
    try {
      return kFunction(args...);
    } catch (const OutOfMemory& error) {
      fail_to_allocate(kName,
                       error.bytes == INT64_MAX ? "2**63 bytes or more" : std::to_string(error.bytes) + " bytes");
    } catch (const std::bad_alloc&) {
      fail_to_allocate(kName, "memory for its lists");
    }
  }
};

}  // namespace
}  // namespace pagedkv

#define PAGEDKV_OP(name)                       \
  static constexpr char name##_text[] = #name; \
  m.impl(#name, TORCH_BOX((&pagedkv::Op<name##_text, &pagedkv::name>::call)))

STABLE_TORCH_LIBRARY_IMPL(pagedkv, CPU, m) {
  PAGEDKV_OP(write_kv);
  PAGEDKV_OP(paged_attention);
  PAGEDKV_OP(paged_attention_with_lse);
  PAGEDKV_OP(paged_attention_append);
  PAGEDKV_OP(merge_states);
  PAGEDKV_OP(copy_blocks);
  PAGEDKV_OP(swap_blocks);
  PAGEDKV_OP(gather_kv);
}
