// Cuts an attention call into tasks: query tiles, ranges of keys, groups of heads.
#include "ops.h"
#include "parallel.h"
#include "scratch.h"

namespace pagedkv {

namespace {

constexpr int64_t kQueryTile = 8;        // query tokens that share one pass of the decode kernel over the keys
constexpr int64_t kPrefillTokens = 8;    // from here on packing the keys for the prefill kernel pays
constexpr int64_t kMinPrefillTile = 16;  // query tokens of a prefill task, at least
constexpr int64_t kMinSplitKeys = 64;    // shorter parts cost more in set-up and merging than they gain
constexpr int64_t kTasksPerThread = 4;   // uneven tasks even out

// The tasks of one sequence, numbered from first_task on: query tile, then split, then head group (prefill: KV head).
struct SequencePlan {
  int64_t seq;
  int64_t first_task;
  int64_t query_tile;  // tokens
  int64_t query_tiles;
  bool prefill;
  int64_t splits;
  int64_t chunk;      // keys per split, a multiple of kDecodeTile
  int64_t key_begin;  // of the first split, a multiple of kDecodeTile
  float* partials;    // [query token, split, Hq] rows; null when splits == 1
};

struct Plan {
  SequencePlan* sequences = nullptr;
  int64_t num_sequences = 0;
  int64_t num_tasks = 0;
  int64_t head_groups = 1;
  int64_t bytes = 0;  // of cache read
  bool split = false;

  const SequencePlan& find(int64_t task) const {
    int64_t low = 0, high = num_sequences - 1;
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (sequences[middle].first_task <= task) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    return sequences[low];
  }
};

// num_splits == 1 promises that a row's bits do not depend on how its prompt was cut: one kernel for every length.
bool use_prefill(const AttentionArgs& args, int64_t query_length) {
  return args.num_splits != 1 && query_length >= kPrefillTokens;
}

int64_t query_tile_of(const AttentionArgs& args, int64_t query_length) {
  if (!use_prefill(args, query_length)) return kQueryTile;
  const int64_t total = args.query_start(args.num_seqs) * args.num_kv_heads;
  const int64_t balanced = ceil_div(total, num_threads() * kTasksPerThread);
  const int64_t largest = min_of(kernels().prefill_tokens_per_task(args), max_of(balanced, kMinPrefillTile));
  return ceil_div(query_length, ceil_div(query_length, largest));  // 256 tokens in tiles of up to 192: 128 + 128
}

KeyRange keys_of_sequence(const AttentionArgs& args, int64_t seq, int64_t query_length) {
  const int64_t seq_len = args.seq_lens[seq];
  return {visible_keys(args, seq_len, query_length, 0).begin,
          visible_keys(args, seq_len, query_length, query_length - 1).end};
}

int64_t count_splits(const AttentionArgs& args, int64_t keys, int64_t auto_chunk) {
  const int64_t most = max_of<int64_t>(1, ceil_div(keys, kDecodeTile));
  if (args.num_splits > 0) return min_of(args.num_splits, most);
  return max_of<int64_t>(1, min_of(most, ceil_div(keys, auto_chunk)));
}

Plan make_plan(const AttentionArgs& args) {
  Plan plan;
  plan.sequences = call_scratch().plan.reserve_for<SequencePlan>(args.num_seqs);
  int64_t total_keys = 0;
  for (int64_t seq = 0; seq < args.num_seqs; ++seq) {
    const int64_t query_length = args.query_length(seq);
    if (query_length == 0) continue;
    const KeyRange keys = keys_of_sequence(args, seq, query_length);
    SequencePlan& s = plan.sequences[plan.num_sequences++];
    s.seq = seq;
    s.key_begin = keys.begin / kDecodeTile * kDecodeTile;
    s.chunk = max_of<int64_t>(0, keys.end - s.key_begin);
    s.prefill = use_prefill(args, query_length);
    s.query_tile = query_tile_of(args, query_length);
    s.query_tiles = ceil_div(query_length, s.query_tile);
    total_keys += s.chunk * ceil_div(query_length, kQueryTile);
  }
  const int64_t row_bytes = args.head_size * args.key.itemsize() + args.value_head_size * args.value.itemsize();
  plan.bytes = times(total_keys, args.num_kv_heads * row_bytes);
  const int64_t threads = plan.bytes < kSerialBytes ? 1 : num_threads();
  const int64_t auto_chunk =
      threads == 1 ? INT64_MAX : max_of(kMinSplitKeys, ceil_div(total_keys, threads * kTasksPerThread));
  // Without splits a few long sequences would leave threads idle.
  if (args.num_splits == 1 && plan.bytes >= kSerialBytes && plan.num_sequences < 2 * threads) {
    plan.head_groups = min_of(args.num_kv_heads, ceil_div(2 * threads, plan.num_sequences));
  }
  int64_t partial_rows = 0;
  for (int64_t i = 0; i < plan.num_sequences; ++i) {
    SequencePlan& s = plan.sequences[i];
    s.splits = s.prefill ? 1 : count_splits(args, s.chunk, auto_chunk);
    s.chunk = round_up(ceil_div(s.chunk, s.splits), kDecodeTile);
    s.first_task = plan.num_tasks;
    plan.num_tasks += s.query_tiles * (s.prefill ? args.num_kv_heads : s.splits * plan.head_groups);
    if (s.splits > 1) partial_rows += args.query_length(s.seq) * s.splits * args.num_heads;
  }
  plan.split = partial_rows > 0;
  float* partials =
      plan.split ? call_scratch().partials.reserve_for<float>(times(partial_rows, partial_row_size(args))) : nullptr;
  for (int64_t i = 0; i < plan.num_sequences; ++i) {
    SequencePlan& s = plan.sequences[i];
    s.partials = s.splits > 1 ? partials : nullptr;
    if (s.splits > 1) partials += args.query_length(s.seq) * s.splits * args.num_heads * partial_row_size(args);
  }
  return plan;
}

// Late query tiles see the most keys under a causal mask: start with them.
PrefillTask prefill_task_at(const AttentionArgs& args, const SequencePlan& s, int64_t local) {
  const int64_t tile = s.query_tiles - 1 - local / args.num_kv_heads;
  return {s.seq, local % args.num_kv_heads, tile * s.query_tile,
          min_of((tile + 1) * s.query_tile, args.query_length(s.seq))};
}

DecodeTask decode_task_at(const AttentionArgs& args, const Plan& plan, const SequencePlan& s, int64_t local) {
  const int64_t group = local % plan.head_groups, split = local / plan.head_groups % s.splits;
  const int64_t tile = s.query_tiles - 1 - local / plan.head_groups / s.splits;
  DecodeTask task;
  task.seq = s.seq;
  task.query_begin = tile * s.query_tile;
  task.query_end = min_of(task.query_begin + s.query_tile, args.query_length(s.seq));
  task.key_begin = s.key_begin + split * s.chunk;
  task.key_end = task.key_begin + s.chunk;
  task.head_begin = group * args.num_kv_heads / plan.head_groups;
  task.head_end = (group + 1) * args.num_kv_heads / plan.head_groups;
  task.partial = nullptr;
  task.partial_token_step = s.splits * args.num_heads * partial_row_size(args);
  if (s.partials) {
    task.partial = s.partials + task.query_begin * task.partial_token_step +
                   (split * args.num_heads + task.head_begin * args.group_size()) * partial_row_size(args);
  }
  return task;
}

void merge_splits(const AttentionArgs& args, const Plan& plan) {
  const int64_t row_size = partial_row_size(args);
  parallel_tasks(plan.num_sequences * args.num_kv_heads, plan.bytes, [&](int64_t i) {
    const SequencePlan& s = plan.sequences[i / args.num_kv_heads];
    if (!s.partials) return;
    const int64_t first_head = i % args.num_kv_heads * args.group_size();
    for (int64_t token = 0; token < args.query_length(s.seq); ++token) {
      for (int64_t head = first_head; head < first_head + args.group_size(); ++head) {
        MergeTask task;
        task.first = s.partials + (token * s.splits * args.num_heads + head) * row_size;
        task.step = args.num_heads * row_size;
        task.count = s.splits;
        task.token = args.query_start(s.seq) + token;
        task.head = head;
        kernels().merge_partials(args, task);
      }
    }
  });
}

}  // namespace

void run_attention(const AttentionArgs& args) {
  const Plan plan = make_plan(args);
  const Kernels& table = kernels();
  parallel_tasks(plan.num_tasks, plan.bytes, [&](int64_t i) {
    const SequencePlan& s = plan.find(i);
    if (s.prefill) {
      table.prefill(args, prefill_task_at(args, s, i - s.first_task));
    } else {
      table.decode(args, decode_task_at(args, plan, s, i - s.first_task));
    }
  });
  if (plan.split) merge_splits(args, plan);
}

}  // namespace pagedkv
