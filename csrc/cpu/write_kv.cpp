#include "block_layout.h"
#include "ops.h"
#include "parallel.h"

namespace pagedkv {

namespace {

// From here on the written rows would push the working set out of the cache, and a plain store would read each line
// before it overwrites it.
constexpr int64_t kStreamBytes = 128 * 1024;

WriteSource source_of(const TensorView& t) { return {t.data, t.float_type(), t.stride(0), t.stride(1), t.size(2)}; }

}  // namespace

const int64_t* slots_of(const char* op, const NewTokens& tokens, const CacheViews& caches) {
  int64_t* slots = call_scratch().slots.reserve_for<int64_t>(tokens.slot_mapping.size(0));
  read_slots(op, tokens.slot_mapping, caches.key, slots);
  return slots;
}

void write_checked(NewTokens tokens, const int64_t* slots, const CacheViews& caches) {
  count_write(caches.value, count_write(caches.key));
  ReadFirst key, value;
  for (const TensorView& cache : {caches.key, caches.value}) {
    key.apply(tokens.key, cache);
    value.apply(tokens.value, cache);
  }
  WriteArgs args;
  args.key = source_of(tokens.key);
  args.value = source_of(tokens.value);
  args.key_cache = cache_view(caches.key);
  args.value_cache = cache_view(caches.value);
  args.cache_dtype = caches.key.float_type();
  args.slots = slots;
  args.block_size = caches.key.size(1);
  args.num_kv_heads = caches.key.size(2);
  const int64_t num_slots = tokens.slot_mapping.size(0);
  const int64_t bytes =
      num_slots * args.num_kv_heads * (args.key.head_size + args.value.head_size) * element_size(args.cache_dtype);
  args.stream = bytes >= kStreamBytes;
  const auto write = kernels().write_tokens;
  parallel_ranges(num_slots, bytes, [&](int64_t begin, int64_t end) { write(args, begin, end); });
}

void write_kv(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
              const Tensor& slot_mapping, const MaybeTensor& k_scale, const MaybeTensor& v_scale,
              const MaybeTensor& k_scale_cache, const MaybeTensor& v_scale_cache) {
  const char* op = "write_kv";
  const CacheViews caches = check_caches(op, key_cache, value_cache);
  const NewTokens tokens = check_new_tokens(op, key, value, caches, slot_mapping);
  check_no_scale(op, "k_scale", k_scale);
  check_no_scale(op, "v_scale", v_scale);
  check_no_scale(op, "k_scale_cache", k_scale_cache);
  check_no_scale(op, "v_scale_cache", v_scale_cache);
  check_distinct_caches(op, caches);
  write_checked(tokens, slots_of(op, tokens, caches), caches);
}

}  // namespace pagedkv
