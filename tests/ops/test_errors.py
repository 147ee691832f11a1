# ruff: noqa: E501  (the expected texts are one error a line)
"""Every bad input: one clear error, the same from the op, its fake kernel and the reference, and nothing changed."""

from __future__ import annotations

import pytest
import torch
from expecttest import assert_expected_inline
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map_only

import pagedkv_ops
from pagedkv_ops import reference
from pagedkv_ops.schema import SCHEMAS

from .bad_inputs import SHAPES, VALUES, bad_call, good_call

BAD = [(op, rule) for op in SCHEMAS for rule in (*SHAPES[op], *VALUES[op])]


def changes(op, rule):
    return SHAPES[op].get(rule) or VALUES[op][rule]


def error(function, call) -> str:
    """The first line of the RuntimeError that the call raises; a C++ stack may follow it."""
    with pytest.raises(RuntimeError) as caught:
        function(**call)
    return str(caught.value).splitlines()[0]


def snapshot(call):
    return [leaf.clone() for leaf in tree_leaves(call) if isinstance(leaf, torch.Tensor)]


@pytest.mark.parametrize("op", SCHEMAS)
def test_good_call_works(op):
    getattr(pagedkv_ops, op)(**good_call(op))
    getattr(reference, op)(**good_call(op))


@pytest.mark.parametrize(("op", "rule"), BAD)
def test_op_and_reference_say_the_same_and_change_nothing(op, rule):
    for function in (getattr(pagedkv_ops, op), getattr(reference, op)):
        call = bad_call(op, changes(op, rule))
        before = snapshot(call)
        text = error(function, call)
        assert text.startswith(f"{op}: ")
        for now, then in zip(snapshot(call), before, strict=True):
            if now.device.type != "meta":
                torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
        assert text == error(getattr(reference, op), bad_call(op, changes(op, rule)))


@pytest.mark.parametrize(("op", "rule"), [(op, rule) for op in SCHEMAS for rule in SHAPES[op]])
def test_fake_kernel_says_the_same(op, rule):
    call = bad_call(op, changes(op, rule))
    expected = error(getattr(reference, op), call)
    with FakeTensorMode() as mode:
        fake = tree_map_only(torch.Tensor, mode.from_tensor, call)
        assert error(getattr(pagedkv_ops, op), fake) == expected


@pytest.mark.parametrize("op", SCHEMAS)
def test_every_argument_has_a_bad_input(op):
    """The lists above name each argument at least once, save those that no value can make wrong."""
    arguments = {argument.name for argument in getattr(torch.ops.pagedkv, op).default._schema.arguments}
    changed = {name for rule in (SHAPES[op], VALUES[op]) for change in rule.values() for name in change}
    assert arguments - changed <= {"causal"}


@pytest.mark.parametrize("op", SCHEMAS)
def test_input_that_requires_grad(op):
    """The paged path has no autograd; without an error a written cache would require grad from then on."""
    for name, value in good_call(op).items():
        for tensor in [value] if isinstance(value, torch.Tensor) else value if isinstance(value, list) else []:
            if not tensor.is_floating_point():
                continue
            call = good_call(op)
            leaf = tensor.clone().requires_grad_()
            call[name] = leaf if not isinstance(value, list) else [leaf, *value[1:]]
            before = snapshot(call)
            text = error(getattr(pagedkv_ops, op), call)
            assert text.startswith(f"{op}: the paged path has no autograd, but an input requires grad")
            assert "torch.no_grad()" in text
            for now, then in zip(snapshot(call), before, strict=True):
                torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
            for context in (torch.no_grad, torch.inference_mode):
                with context():
                    getattr(pagedkv_ops, op)(**call)


def test_requires_grad_error_inside_a_compiled_function():
    call = good_call("paged_attention")
    call["query"] = call["query"].requires_grad_()
    compiled = torch.compile(lambda **kwargs: pagedkv_ops.paged_attention(**kwargs), fullgraph=True)
    with pytest.raises(Exception, match="the paged path has no autograd"):
        compiled(**call)
    with torch.no_grad():
        expected = pagedkv_ops.paged_attention(**call)
        torch.testing.assert_close(compiled(**call), expected)


LAZY = {"negated": torch._neg_view, "conjugated": lambda tensor: torch.complex(tensor, tensor).conj()}


@pytest.mark.parametrize("kind", LAZY)
@pytest.mark.parametrize("op", SCHEMAS)
def test_lazy_views_are_not_written_and_are_read_as_they_show(op, kind):
    """torch would run the op on a copy: it failed when it copied back, with one of two caches written."""
    writes = {a.name for a in getattr(torch.ops.pagedkv, op).default._schema.arguments if a.is_write}
    for name, value in good_call(op).items():
        tensor = value[-1] if isinstance(value, list) else value
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            continue
        view = LAZY[kind](tensor)
        call = {**good_call(op), name: [*value[:-1], view] if isinstance(value, list) else view}
        if name in writes:
            before = snapshot(call)
            label = f"{name}[{len(value) - 1}]" if isinstance(value, list) else name
            text = error(getattr(pagedkv_ops, op), call)
            assert text == f"{op}: {label} must hold the values that it shows, got a lazily {kind} view"
            for now, then in zip(snapshot(call), before, strict=True):
                torch.testing.assert_close(now, then, rtol=0, atol=0, equal_nan=True)
        elif kind == "negated":
            out = getattr(pagedkv_ops, op)(**call)
            call[name] = view.resolve_neg()
            torch.testing.assert_close(out, getattr(pagedkv_ops, op)(**call), rtol=0, atol=0, equal_nan=True)


def test_texts():
    """Each text once: under an op stand the rules whose text no op before it has."""
    lines = []
    for op in SCHEMAS:
        lines.append(op)
        for rule in (rule for name, rule in BAD if name == op):
            line = f"  {rule} -> {error(getattr(pagedkv_ops, op), bad_call(op, changes(op, rule))).removeprefix(f'{op}: ')}"
            if line not in lines:
                lines.append(line)
    assert_expected_inline(
        "\n".join(lines),
        """\
write_kv
  key_cache None -> key_cache must be a tensor, got None
  value_cache None -> value_cache must be a tensor, got None
  key_cache rank -> key_cache must be [num_blocks, block_size, num_kv_heads, head_size], got [4, 2, 16]
  value_cache rank -> value_cache must be [num_blocks, block_size, num_kv_heads, v_head_size], got [1, 5, 4, 2, 8]
  key_cache dtype -> key_cache must be float32, float16 or bfloat16 (int8 and float8 caches are not supported yet), got float64
  key_cache int8 -> key_cache must be float32, float16 or bfloat16 (int8 and float8 caches are not supported yet), got int8
  value_cache dtype -> value_cache must be float32 like key_cache, got bfloat16
  value_cache device -> value_cache must be on cpu like key_cache, got meta
  key_cache stride -> key_cache must have a contiguous last dimension, got strides [256, 64, 32, 2]
  value_cache stride -> value_cache must have a contiguous last dimension, got strides [128, 32, 16, 2]
  value_cache blocks -> value_cache.size(0) must be 5 like key_cache.size(0), got 4
  value_cache block_size -> value_cache.size(1) must be 4 like key_cache.size(1), got 3
  value_cache heads -> value_cache.size(2) must be 2 like key_cache.size(2), got 1
  block_size zero -> key_cache.size(1) must be in 1..2147483647 (block_size), got 0
  key None -> key must be a tensor, got None
  value None -> value must be a tensor, got None
  slot_mapping None -> slot_mapping must be a tensor, got None
  key rank -> key must be [num_tokens, num_kv_heads, head_size], got [2, 16]
  value rank -> value must be [num_tokens, num_kv_heads, v_head_size], got [1, 4, 2, 8]
  slot_mapping rank -> slot_mapping must be [num_slots], got [1, 4]
  key dtype -> key must be float32, float16 or bfloat16, got float64
  value dtype -> value must be float32, float16 or bfloat16, got int32
  slot_mapping dtype -> slot_mapping must be int32 or int64, got float32
  key device -> key must be on cpu like key_cache, got meta
  value device -> value must be on cpu like key_cache, got meta
  slot_mapping device -> slot_mapping must be on cpu like key_cache, got meta
  key stride -> key must have a contiguous last dimension, got strides [64, 32, 2]
  value stride -> value must have a contiguous last dimension, got strides [32, 16, 2]
  value tokens -> value.size(0) must be 4 like key.size(0), got 3
  key heads -> key.size(1) must be 2 like key_cache.size(2), got 1
  value heads -> value.size(1) must be 2 like value_cache.size(2), got 1
  key head_size -> key.size(2) must be 16 like key_cache.size(3), got 15
  value head_size -> value.size(2) must be 8 like value_cache.size(3), got 7
  slot_mapping longer -> slot_mapping.size(0) must be at most 4 (key.size(0)), got 5
  k_scale given -> k_scale must be None (quantised caches are not supported yet), got a tensor
  v_scale given -> v_scale must be None (quantised caches are not supported yet), got a tensor
  k_scale_cache given -> k_scale_cache must be None (quantised caches are not supported yet), got a tensor
  v_scale_cache given -> v_scale_cache must be None (quantised caches are not supported yet), got a tensor
  slot too large -> slot_mapping[2] must be below 20 (num_blocks * block_size), got 20
  slot beyond 32 bits -> slot_mapping[0] must be below 20 (num_blocks * block_size), got 1099511627776
  same cache twice -> key_cache and value_cache must not share elements
  caches share blocks -> key_cache and value_cache must not share elements
  caches share a column -> key_cache and value_cache must not share elements
  key_cache blocks expanded -> key_cache must have a place of its own in memory for each element, got strides [0, 32, 16, 1]
  value_cache heads expanded -> value_cache must have a place of its own in memory for each element, got strides [32, 8, 0, 1]
  key_cache rows overlap -> key_cache must have a place of its own in memory for each element, got strides [96, 32, 16, 1]
paged_attention
  query None -> query must be a tensor, got None
  query rank -> query must be [num_tokens, num_heads, head_size], got [4, 16]
  query dtype -> query must be float32, float16 or bfloat16, got float64
  query device -> query must be on cpu like key_cache, got meta
  query stride -> query must have a contiguous last dimension, got strides [128, 32, 2]
  query head_size -> query.size(2) must be 16 like key_cache.size(3), got 15
  no KV heads -> key_cache.size(2) must be at least 1 (num_kv_heads), got 0
  head_size zero -> key_cache.size(3) must be at least 1 (head_size), got 0
  head ratio -> query.size(1) must be a multiple of 2 (key_cache.size(2)), got 3
  tokens without cu_seqlens_q -> query.size(0) must be 2 like seq_lens.size(0) when cu_seqlens_q is not given, got 4
  cu_seqlens_q rank -> cu_seqlens_q must be [batch+1], got [1, 3]
  cu_seqlens_q dtype -> cu_seqlens_q must be int32 or int64, got uint8
  cu_seqlens_q device -> cu_seqlens_q must be on cpu like key_cache, got meta
  cu_seqlens_q size -> cu_seqlens_q.size(0) must be 3 like seq_lens.size(0) + 1, got 2
  window_left -> window_left must be -1 (unlimited) or more, got -2
  window_right -> window_right must be -1 (unlimited) or more, got -5
  softcap -> softcap must be 0 (off) or more, and finite, got -1.0
  scale nan -> scale must be finite, got nan
  softcap nan -> softcap must be 0 (off) or more, and finite, got nan
  scale inf -> scale must be finite, got -inf
  softcap inf -> softcap must be 0 (off) or more, and finite, got inf
  num_splits -> num_splits must be 0 (automatic) or more, got -1
  alibi_slopes rank -> alibi_slopes must be [num_heads], got [1, 4]
  sinks rank -> sinks must be [num_heads], got []
  alibi_slopes dtype -> alibi_slopes must be float32, float16 or bfloat16, got int32
  sinks dtype -> sinks must be float32, float16 or bfloat16, got float64
  alibi_slopes device -> alibi_slopes must be on cpu like query, got meta
  sinks device -> sinks must be on cpu like query, got meta
  alibi_slopes size -> alibi_slopes.size(0) must be 4 like query.size(1), got 5
  sinks size -> sinks.size(0) must be 4 like query.size(1), got 5
  block_table None -> block_table must be a tensor, got None
  seq_lens None -> seq_lens must be a tensor, got None
  block_table rank -> block_table must be [batch, max_blocks], got [3]
  seq_lens rank -> seq_lens must be [batch], got [1, 2]
  block_table dtype -> block_table must be int32 or int64, got int16
  seq_lens dtype -> seq_lens must be int32 or int64, got float32
  block_table device -> block_table must be on cpu like key_cache, got meta
  seq_lens device -> seq_lens must be on cpu like key_cache, got meta
  block_table rows -> block_table.size(0) must be 2 like seq_lens.size(0), got 1
  seq_len negative -> seq_lens[1] must be in 0..12 (block_table.size(1) * block_size), got -1
  seq_len past the table -> seq_lens[0] must be in 0..12 (block_table.size(1) * block_size), got 13
  block id too large -> block_table[0, 1] must be in 0..4 (num_blocks - 1), got 5
  block id negative -> block_table[1, 0] must be in 0..4 (num_blocks - 1), got -1
  block id beyond 32 bits -> block_table[0, 0] must be in 0..4 (num_blocks - 1), got 8589934592
  cu_seqlens_q starts above 0 -> cu_seqlens_q[0] must be 0, got 1
  cu_seqlens_q starts below 0 -> cu_seqlens_q[0] must be 0, got -1
  cu_seqlens_q decreases -> cu_seqlens_q[2] must be at least cu_seqlens_q[1] = 9, got 4
  cu_seqlens_q ends above T -> cu_seqlens_q[2] must be at most 4 (query.size(0)), got 5
  block id without blocks -> block_table[0, 0] must be absent (there are no blocks), got 2
paged_attention_with_lse
paged_attention_append
  key tokens -> key.size(0) must be 4 like query.size(0), got 3
merge_states
  out_a None -> out_a must be a tensor, got None
  lse_a None -> lse_a must be a tensor, got None
  out_b None -> out_b must be a tensor, got None
  lse_b None -> lse_b must be a tensor, got None
  out_a rank -> out_a must be [num_tokens, num_heads, v_head_size], got [4, 8]
  out_b rank -> out_b must be [num_tokens, num_heads, v_head_size], got [4, 8]
  lse_b rank -> lse_b must be [num_tokens, num_heads], got [4]
  lse_a rank -> lse_a must be [num_tokens, num_heads], got [1, 3, 4]
  out_a dtype -> out_a must be float32, float16 or bfloat16, got float64
  out_b dtype -> out_b must be float32 like out_a, got float16
  out_b device -> out_b must be on cpu like out_a, got meta
  lse_a device -> lse_a must be on cpu like out_a, got meta
  lse_b device -> lse_b must be on cpu like out_a, got meta
  out_b tokens -> out_b.size(0) must be 3 like out_a.size(0), got 2
  lse_a tokens -> lse_a.size(0) must be 3 like out_a.size(0), got 2
  lse_b tokens -> lse_b.size(0) must be 3 like out_a.size(0), got 2
  out_b heads -> out_b.size(1) must be 4 like out_a.size(1), got 3
  lse_a heads -> lse_a.size(1) must be 4 like out_a.size(1), got 3
  lse_b heads -> lse_b.size(1) must be 4 like out_a.size(1), got 3
  out_b head_size -> out_b.size(2) must be 8 like out_a.size(2), got 7
  out_a stride -> out_a must have a contiguous last dimension, got strides [64, 16, 2]
  out_b stride -> out_b must have a contiguous last dimension, got strides [64, 16, 2]
  lse_a dtype -> lse_a must be float32, got float16
  lse_b dtype -> lse_b must be float32, got float64
copy_blocks
  block_mapping None -> block_mapping must be a tensor, got None
  block_mapping rank -> block_mapping must be [num_pairs, 2], got [2]
  block_mapping columns -> block_mapping must be [num_pairs, 2], got [2, 3]
  block_mapping dtype -> block_mapping must be int32 or int64, got float32
  no caches -> caches must hold at least one tensor, got an empty list
  scalar cache -> caches[2] must have blocks as its first dimension, got a scalar
  cache device -> caches[1] must be on cpu like block_mapping, got meta
  source too large -> block_mapping[1, 0] must be in 0..4, got 5
  source beyond 32 bits -> block_mapping[1, 0] must be in 0..4, got 1099511627776
  source negative -> block_mapping[1, 0] must be in 0..4, got -1
  destination too large -> block_mapping[1, 1] must be in 0..4, got 2147483647
  destination negative -> block_mapping[0, 1] must be in 0..4, got -3
  destination twice -> block_mapping[1, 1] must name each destination block once, got 1
  expanded -> caches[1] must have a place of its own in memory for each element, got strides [16, 0, 8, 1]
swap_blocks
  src None -> src must be a tensor, got None
  dst None -> dst must be a tensor, got None
  block_mapping device -> block_mapping must be on cpu, got meta
  scalar src -> src must have blocks as its first dimension, got a scalar
  dst rank -> dst must have 4 dimensions like src, got 3
  dst dtype -> dst must be float32 like src, got float16
  dst block_size -> dst.size(1) must be 4 like src.size(1), got 3
  dst heads -> dst.size(2) must be 2 like src.size(2), got 1
  dst head_size -> dst.size(3) must be 16 like src.size(3), got 15
  destination too large -> block_mapping[1, 1] must be in 0..2, got 2147483647
  destination negative -> block_mapping[0, 1] must be in 0..2, got -3
  dst expanded -> dst must have a place of its own in memory for each element, got strides [0, 32, 16, 1]
  source without blocks -> block_mapping[0, 0] must be absent (there are no blocks), got 0
  destination without blocks -> block_mapping[0, 1] must be absent (there are no blocks), got 1
gather_kv
  block_table device -> block_table must be on cpu like cache, got meta
  seq_lens device -> seq_lens must be on cpu like cache, got meta
  cache None -> cache must be a tensor, got None
  cache rank -> cache must be [num_blocks, block_size, num_kv_heads, head_size], got [4, 2, 16]
  cache dtype -> cache must be float32, float16 or bfloat16 (int8 and float8 caches are not supported yet), got int8
  cache stride -> cache must have a contiguous last dimension, got strides [256, 64, 32, 2]
  block_size zero -> cache.size(1) must be in 1..2147483647 (block_size), got 0
  max_len -> max_len must be in 0..281474976710656, got -1
  max_len beyond any memory -> max_len must be in 0..281474976710656, got 4611686018427387904""",
    )
