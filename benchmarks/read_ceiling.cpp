// Sequential read and memcpy by all threads, for the ceilings that benchmarks compare with. Built on demand by machine.py.
#include <omp.h>

#include <cstring>

typedef float Line __attribute__((vector_size(64), aligned(64)));

static Line read_range(const char* p, long bytes) {
  Line a{}, b{}, c{}, d{};
  for (long i = 0; i + 256 <= bytes; i += 256) {
#pragma GCC unroll 4
    for (int j = 0; j < 4; ++j) __builtin_prefetch(p + i + 4096 + 64 * j, 0, 3);
    a += *reinterpret_cast<const Line*>(p + i);
    b += *reinterpret_cast<const Line*>(p + i + 64);
    c += *reinterpret_cast<const Line*>(p + i + 128);
    d += *reinterpret_cast<const Line*>(p + i + 192);
  }
  return (a + b) + (c + d);
}

// `data` is 64-byte aligned; the sum only keeps the reads from being removed.
extern "C" float read_all(const char* data, long bytes, int threads) {
  float sum = 0;
#pragma omp parallel num_threads(threads) reduction(+ : sum)
  {
    const long part = bytes / threads / 4096 * 4096;
    const Line line = read_range(data + omp_get_thread_num() * part, part);
    for (int i = 0; i < 16; ++i) sum += line[i];
  }
  return sum;
}

// Two copies of equal size (keys and values) in one parallel region, each thread its share of both.
extern "C" void copy_two(char* dst_a, const char* src_a, char* dst_b, const char* src_b, long bytes, int threads) {
#pragma omp parallel num_threads(threads)
  {
    const long part = bytes / threads / 64 * 64;
    const long begin = omp_get_thread_num() * part;
    const long size = omp_get_thread_num() + 1 == threads ? bytes - begin : part;
    std::memcpy(dst_a + begin, src_a + begin, size);
    std::memcpy(dst_b + begin, src_b + begin, size);
  }
}
