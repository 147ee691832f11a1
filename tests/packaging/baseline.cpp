// The baseline kernels without torch: write, decode and prefill against a plain loop in double, for machines that are
// only emulated (test_baseline.py). Prints one line per case; the exit status is the number of cases that failed.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <tuple>
#include <vector>

#include "cpu/kernels.h"

using namespace pagedkv;

namespace {

const Kernels& table = kKernelsBaseline;

struct Case {
  DType dtype;  // of queries, keys, values and the cache
  int64_t heads, kv_heads, head_size, value_head_size, block_size, seq_len, query_length;
  int64_t window_left = -1;
  float softcap = 0;
  bool alibi = false, sinks = false, causal = true;
};

// A sequence whose blocks lie in falling order, and the arguments that name it.
struct Sequence {
  Case c;
  std::mt19937 random{7};
  int64_t num_blocks = ceil_div(c.seq_len, c.block_size);
  std::vector<float> query = values(c.query_length * c.heads * c.head_size);
  std::vector<float> key = values(c.seq_len * c.kv_heads * c.head_size);
  std::vector<float> value = values(c.seq_len * c.kv_heads * c.value_head_size);
  std::vector<float> slopes = values(c.heads), sinks = values(c.heads);
  std::vector<char> stored_query = stored(query), stored_key = stored(key), stored_value = stored(value);
  std::vector<char> key_cache = std::vector<char>(slots() * c.kv_heads * c.head_size * size(), '\xff');  // NaN
  std::vector<char> value_cache = std::vector<char>(slots() * c.kv_heads * c.value_head_size * size(), '\xff');
  std::vector<char> out = std::vector<char>(c.query_length * c.heads * c.value_head_size * size());
  std::vector<float> lse = std::vector<float>(c.query_length * c.heads);
  std::vector<int64_t> blocks, bounds = {0, c.query_length}, slot_mapping;

  explicit Sequence(const Case& of) : c(of) {
    for (int64_t i = 0; i < num_blocks; ++i) blocks.push_back(num_blocks - i);
    for (int64_t t = 0; t < c.seq_len; ++t)
      slot_mapping.push_back(blocks[t / c.block_size] * c.block_size + t % c.block_size);
  }
  int64_t size() const { return element_size(c.dtype); }
  int64_t slots() const { return (num_blocks + 1) * c.block_size; }

  // Eighths up to 2 are exact in every type.
  std::vector<float> values(int64_t n) {
    std::vector<float> result;
    for (int64_t i = 0; i < n; ++i) result.push_back(static_cast<float>(static_cast<int>(random() % 33) - 16) / 8);
    return result;
  }
  // Through write_tokens itself: one token whose slot is 0.
  std::vector<char> stored(const std::vector<float>& from) const {
    std::vector<char> to(from.size() * size());
    const int64_t slot = 0, n = static_cast<int64_t>(from.size());
    const WriteSource source{reinterpret_cast<const char*>(from.data()), DType::kFloat32, n, n, n};
    const CacheView cache{to.data(), n, n, n, c.dtype};
    table.write_tokens({source, source, cache, cache, false, false, &slot, 1, 1, false}, 0, 1);
    return to;
  }
  CacheView view(const std::vector<char>& cache, int64_t row) const {
    return {cache.data(), c.block_size * c.kv_heads * row, c.kv_heads * row, row, c.dtype};
  }
  void write() {
    const auto source = [&](const std::vector<char>& from, int64_t row) {
      return WriteSource{from.data(), c.dtype, c.kv_heads * row, row, row};
    };
    table.write_tokens(
        {source(stored_key, c.head_size), source(stored_value, c.value_head_size), view(key_cache, c.head_size),
         view(value_cache, c.value_head_size), false, false, slot_mapping.data(), c.block_size, c.kv_heads, false},
        0, c.seq_len);
  }
  AttentionArgs args() {
    AttentionArgs a;
    a.query = stored_query.data();
    a.query_token_stride = c.heads * c.head_size;
    a.query_head_stride = c.head_size;
    a.out = out.data();
    a.lse = lse.data();
    a.key = view(key_cache, c.head_size);
    a.value = view(value_cache, c.value_head_size);
    a.query_dtype = c.dtype;
    a.blocks = blocks.data();
    a.row_starts = bounds.data();
    a.seq_lens = &c.seq_len;
    a.cu_seqlens_q = bounds.data();
    a.num_tokens = c.query_length;
    a.num_seqs = 1;
    a.num_heads = c.heads;
    a.num_kv_heads = c.kv_heads;
    a.head_size = c.head_size;
    a.value_head_size = c.value_head_size;
    a.block_size = c.block_size;
    a.scale = 0.25f;
    a.softcap = c.softcap;
    a.causal = c.causal;
    a.window_left = c.window_left;
    a.alibi_slopes = c.alibi ? slopes.data() : nullptr;
    a.sinks = c.sinks ? sinks.data() : nullptr;
    return a;
  }

  // The largest difference of an output and of its log-sum-exp from the definition.
  double error() const {
    std::vector<float> result(out.size() / size());
    table.to_float(result.data(), out.data(), c.dtype, 1, static_cast<int64_t>(result.size()));
    double worst = 0;
    const auto compare = [&](double got, double wanted) {
      const double difference = std::fabs(got - wanted) / (1 + std::fabs(wanted));
      worst = difference <= worst ? worst : difference;  // NaN stays
    };
    for (int64_t row = 0; row < c.query_length * c.heads; ++row) {
      const int64_t position = c.seq_len - c.query_length + row / c.heads, head = row % c.heads;
      const int64_t kv_head = head / (c.heads / c.kv_heads);
      double sum = c.sinks ? std::exp(sinks[head]) : 0;
      std::vector<double> wanted(c.value_head_size);
      for (int64_t t = 0; t < c.seq_len; ++t) {
        if ((c.causal && t > position) || (c.window_left >= 0 && t < position - c.window_left)) continue;
        double logit = 0;
        for (int64_t d = 0; d < c.head_size; ++d)
          logit += query[row * c.head_size + d] * key[(t * c.kv_heads + kv_head) * c.head_size + d] * 0.25;
        if (c.softcap > 0) logit = c.softcap * std::tanh(logit / c.softcap);
        if (c.alibi) logit += slopes[head] * static_cast<double>(t - position);
        sum += std::exp(logit);
        for (int64_t d = 0; d < c.value_head_size; ++d)
          wanted[d] += std::exp(logit) * value[(t * c.kv_heads + kv_head) * c.value_head_size + d];
      }
      compare(lse[row], std::log(sum));
      for (int64_t d = 0; d < c.value_head_size; ++d) compare(result[row * c.value_head_size + d], wanted[d] / sum);
    }
    return worst;
  }
};

void decode(Sequence& s, int64_t splits) {
  const AttentionArgs args = s.args();
  const int64_t row = partial_row_size(args), step = splits * args.num_heads * row;
  const int64_t keys = round_up(ceil_div(s.c.seq_len, splits), kDecodeTile);
  std::vector<float> partials(args.num_tokens * step);
  for (int64_t i = 0; i < splits; ++i)
    table.decode(args, {0, 0, args.num_tokens, i * keys, (i + 1) * keys, 0, args.num_kv_heads,
                        splits == 1 ? nullptr : partials.data() + i * args.num_heads * row, step});
  for (int64_t token = 0; splits > 1 && token < args.num_tokens; ++token)
    for (int64_t head = 0; head < args.num_heads; ++head)
      table.merge_partials(args,
                           {partials.data() + token * step + head * row, args.num_heads * row, splits, token, head});
}

void prefill(Sequence& s) {
  const AttentionArgs args = s.args();
  const int64_t tokens = table.prefill_tokens_per_task(args);
  for (int64_t head = 0; head < args.num_kv_heads; ++head)
    for (int64_t begin = 0; begin < args.num_tokens; begin += tokens)
      table.prefill(args, {0, head, begin, min_of(begin + tokens, args.num_tokens)});
}

int failures = 0;

void report(const char* what, const Case& c, double error, double bound) {
  const bool good = error <= bound;
  failures += !good;
  std::printf("%s %s dtype %d heads %d/%d size %d/%d block %d keys %d queries %d: error %.1e\n", good ? "ok  " : "FAIL",
              what, static_cast<int>(c.dtype), static_cast<int>(c.heads), static_cast<int>(c.kv_heads),
              static_cast<int>(c.head_size), static_cast<int>(c.value_head_size), static_cast<int>(c.block_size),
              static_cast<int>(c.seq_len), static_cast<int>(c.query_length), error);
}

void run(const Case& c) {
  const double bound = c.dtype == DType::kFloat32 ? 2e-5 : c.dtype == DType::kFloat16 ? 2e-3 : 2e-2;
  Sequence s(c);
  s.write();
  std::vector<float> back(s.key.size());
  for (int64_t t = 0; t < c.seq_len; ++t)
    table.to_float(back.data() + t * c.kv_heads * c.head_size,
                   s.key_cache.data() + s.slot_mapping[t] * c.kv_heads * c.head_size * s.size(), c.dtype, 1,
                   c.kv_heads * c.head_size);
  report("write ", c, back == s.key ? 0 : 1, 0);
  for (const int64_t splits : {1, 3}) {
    std::memset(s.out.data(), 0xff, s.out.size());
    decode(s, splits);
    report(splits == 1 ? "decode" : "splits", c, s.error(), bound);
  }
  std::memset(s.out.data(), 0xff, s.out.size());
  prefill(s);
  report("prefill", c, s.error(), bound);
}

// What write_tokens and to_float could both get wrong, as one another's inverse.
void check_bits() {
  const Case c{DType::kFloat32, 1, 1, 1, 1, 1, 1, 1};
  for (const auto& [dtype, wanted] : {std::pair{DType::kFloat16, 0xbe00}, std::pair{DType::kBFloat16, 0xbfc0}}) {
    Case narrow = c;
    narrow.dtype = dtype;
    uint16_t bits;
    std::memcpy(&bits, Sequence(narrow).stored({-1.5f}).data(), 2);
    report("bits  ", narrow, bits == wanted ? 0 : 1, 0);
  }
}

// One row with a scale of its own: written, read back, and attended to, where a lone key's value is the output.
void check_quantised() {
  const int64_t n = 21, slot = 0, block = 0, length = 1;  // past a vector
  const Case named{DType::kInt8, 1, 1, n, n, 1, 1, 1};
  std::vector<float> row(n);
  for (int64_t i = 0; i < n; ++i) row[i] = static_cast<float>(i - 10) / 8;
  for (const auto& [dtype, most, bound] :
       {std::tuple{DType::kInt8, 127.f, 0.5 / 127}, std::tuple{DType::kFloat8E4M3, 448.f, 1.0 / 16},
        std::tuple{DType::kFloat8E5M2, 57344.f, 1.0 / 8}}) {
    Case c = named;
    c.dtype = dtype;
    std::vector<char> stored(n, '\x7f');
    float scale = NAN;
    const CacheView cache{stored.data(), n, n, n, dtype, {&scale, 1, 1, 1}};
    const WriteSource source{reinterpret_cast<const char*>(row.data()), DType::kFloat32, n, n, n};
    table.write_tokens({source, source, cache, cache, false, false, &slot, 1, 1, false}, 0, 1);
    report("scale ", c, std::fabs(scale * most / 1.25 - 1), 1e-6);
    std::vector<float> back(n), out(n), lse(1);
    table.dequantise(reinterpret_cast<char*>(back.data()), DType::kFloat32, stored.data(), dtype, scale, n);
    double worst = 0, apart = 0;
    for (int64_t i = 0; i < n; ++i) worst = std::fmax(worst, std::fabs(back[i] - row[i]) / 1.25);
    report("quant ", c, std::isfinite(back[0]) ? worst : 1, bound);
    const std::vector<int64_t> bounds = {0, 1};
    AttentionArgs a = Sequence({DType::kFloat32, 1, 1, n, n, 1, 1, 1}).args();
    a.query = reinterpret_cast<const char*>(row.data());
    a.out = reinterpret_cast<char*>(out.data());
    a.lse = lse.data();
    a.key = a.value = cache;
    a.blocks = &block;
    a.seq_lens = &length;
    a.row_starts = a.cu_seqlens_q = bounds.data();
    for (const bool decodes : {true, false}) {
      std::fill(out.begin(), out.end(), NAN);
      if (decodes)
        table.decode(a, {0, 0, 1, 0, kDecodeTile, 0, 1, nullptr, 0});
      else
        table.prefill(a, {0, 0, 0, 1});
      for (int64_t i = 0; i < n; ++i) apart = out[i] == out[i] ? std::fmax(apart, std::fabs(out[i] - back[i])) : 1;
    }
    report("attend", c, apart, 1e-6);
  }
}

}  // namespace

int main() {
  check_bits();
  check_quantised();
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    run({dtype, 4, 4, 16, 16, 16, 37, 1});
    run({dtype, 8, 2, 64, 64, 16, 300, 3});
    run({dtype, 3, 1, 80, 48, 5, 67, 67, -1, 0, true, true});
    run({dtype, 10, 2, 33, 33, 32, 290, 40, 20, 30, false, true});
    run({dtype, 2, 2, 24, 24, 1, 19, 8, -1, 0, false, false, false});
  }
  return failures;
}
