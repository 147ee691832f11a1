#include "block_layout.h"
#include "ops.h"
#include "parallel.h"

namespace pagedkv {

namespace {

// From here on the written rows would push the working set out of the cache, and a plain store would read each line
// before it overwrites it.
constexpr int64_t kStreamBytes = 128 * 1024;

WriteSource source_of(const TensorView& t) { return {t.data, t.element_type(), t.stride(0), t.stride(1), t.size(2)}; }

}  // namespace

WrittenScales check_written_scales(const char* op, const MaybeTensor& k_scale, const MaybeTensor& v_scale,
                                   const MaybeTensor& k_scale_cache, const MaybeTensor& v_scale_cache,
                                   const CacheViews& caches) {
  return {check_written_scale(op, "k_scale", k_scale, k_scale_cache, caches.key, "key_cache"),
          check_written_scale(op, "v_scale", v_scale, v_scale_cache, caches.value, "value_cache")};
}

const int64_t* checked_slots(const char* op, const NewTokens& tokens, const CacheViews& caches,
                             const WrittenScales& scales) {
  check_distinct_caches(op, caches, scales.key.cache, scales.value.cache);
  const int64_t num_slots = tokens.slot_mapping.size(0);
  int64_t* slots = call_scratch().slots.reserve_for<int64_t>(num_slots);
  read_slots(op, tokens.slot_mapping, caches.key, slots);
  check_fixed_scale(op, "k_scale", scales.key.fixed);
  check_fixed_scale(op, "v_scale", scales.value.fixed);
  check_numbers(op, "key", tokens.key, slots, num_slots, caches.key);
  check_numbers(op, "value", tokens.value, slots, num_slots, caches.value);
  return slots;
}

void write_checked(NewTokens tokens, const int64_t* slots, const CacheViews& caches, const WrittenScales& scales) {
  bool counted = count_write(caches.key);
  counted = count_write(caches.value, counted);
  if (scales.key.cache) counted = count_write(*scales.key.cache, counted);
  if (scales.value.cache) count_write(*scales.value.cache, counted);
  ReadFirst key, value;
  for (const TensorView& cache : {caches.key, caches.value}) {
    key.apply(tokens.key, cache);
    value.apply(tokens.value, cache);
  }
  WriteArgs args;
  args.key = source_of(tokens.key);
  args.value = source_of(tokens.value);
  args.key_cache = cache_view(caches.key, scales.key.cache ? scales.key.cache : scales.key.fixed);
  args.value_cache = cache_view(caches.value, scales.value.cache ? scales.value.cache : scales.value.fixed);
  args.key_scale_is_fixed = scales.key.fixed.has_value();
  args.value_scale_is_fixed = scales.value.fixed.has_value();
  args.slots = slots;
  args.block_size = caches.key.size(1);
  args.num_kv_heads = caches.key.size(2);
  const int64_t num_slots = tokens.slot_mapping.size(0);
  const int64_t row_bytes =
      args.key.head_size * args.key_cache.itemsize() + args.value.head_size * args.value_cache.itemsize();
  const int64_t bytes = num_slots * args.num_kv_heads * row_bytes;
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
  const WrittenScales scales = check_written_scales(op, k_scale, v_scale, k_scale_cache, v_scale_cache, caches);
  const int64_t* slots = checked_slots(op, tokens, caches, scales);
  write_checked(tokens, slots, caches, scales);
}

}  // namespace pagedkv
