// Chooses the kernel table once, by what the processor reports or by PAGEDKV_ISA.
#include <cstdlib>
#include <stdexcept>
#include <string>

#include "kernels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(PAGEDKV_HAS_AMX) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace pagedkv {
namespace {

struct Candidate {
  const Kernels* table;
  bool supported;
};

#if defined(PAGEDKV_HAS_AMX) && defined(__linux__)
// The processor's word is not enough: Linux keeps the tile registers from a process until it asks for them.
bool may_use_amx() {
  constexpr unsigned kBf16 = 1u << 22, kTile = 1u << 24;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  unsigned a, b, c, d = 0;
  return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d & kBf16) && (d & kTile) &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}
#endif

#if defined(__x86_64__)
// Clang knows no __builtin_cpu_supports("f16c") before version 17.
bool has_f16c() {
  unsigned a, b, c = 0, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}

// Fastest last.
const Candidate* candidates() {
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  const bool avx512_bf16 = avx512 && __builtin_cpu_supports("avx512bf16");
  static const Candidate list[] = {
      {&kKernelsBaseline, true},
      {&kKernelsAvx2, avx2},
      {&kKernelsAvx512, avx512},
      {&kKernelsAvx512Bf16, avx512_bf16},
#if defined(PAGEDKV_HAS_AMX) && defined(__linux__)
      {&kKernelsAvx512Amx, avx512_bf16 && __builtin_cpu_supports("avx512vbmi") && may_use_amx()},
#endif
      {nullptr, false}};
  return list;
}
#else
const Candidate* candidates() {
  static const Candidate list[] = {{&kKernelsBaseline, true}, {nullptr, false}};
  return list;
}
#endif

const Kernels& choose() {
  const char* wanted = std::getenv("PAGEDKV_ISA");
  const Kernels* best = nullptr;
  std::string names;
  for (const Candidate* c = candidates(); c->table; ++c) {
    if (!c->supported) continue;
    best = c->table;
    if (wanted && std::string(wanted) == best->name) return *best;
    names += (names.empty() ? "" : ", ") + std::string(best->name);
  }
  if (wanted && *wanted) {
    throw std::runtime_error("pagedkv: PAGEDKV_ISA must be one of " + names + " on this processor, got " + wanted);
  }
  return *best;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& table = choose();
  return table;
}

}  // namespace pagedkv

// For Python (ctypes): the name of the chosen instruction set, or 1 and the text of the error.
extern "C" __attribute__((visibility("default"))) int pagedkv_cpu_isa(const char** text) {
  static std::string error;
  try {
    *text = pagedkv::kernels().name;
    return 0;
  } catch (const std::exception& e) {
    error = e.what();
    *text = error.c_str();
    return 1;
  }
}
