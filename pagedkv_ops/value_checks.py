"""Checks that read index tensors: every slot, block id and length an op will use, before the first byte is written.

They synchronise with the device, so they serve the reference, CPU tensors and ``PAGEDKV_CHECK=1``. The C++ kernels make
the same checks with the same words.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from .arguments import Attention

MAX_LENGTH = 2**62  # so that sums of positions and windows stay inside 64 bits


def _fail(op: str, argument: str, expectation: str, actual: object) -> None:
    raise RuntimeError(f"{op}: {argument} must {expectation}, got {actual}")


def visible_blocks(
    query_len: int, seq_len: int, block_size: int, causal: bool, window_left: int, window_right: int
) -> range:
    """Table columns that hold at least one key visible to one of the last ``query_len`` positions of a sequence."""
    if query_len == 0 or seq_len == 0:
        return range(0)
    first_query = seq_len - query_len
    right = 0 if causal else window_right
    first_key = max(0, first_query - window_left) if window_left >= 0 else 0
    last_key = seq_len - 1 if right < 0 else min(seq_len - 1, seq_len - 1 + right)
    return range(first_key // block_size, last_key // block_size + 1)


def check_slots(op: str, slot_mapping: Tensor, cache: Tensor) -> None:
    num_slots = cache.size(0) * cache.size(1)
    for i, slot in enumerate(slot_mapping.tolist()):
        if slot >= num_slots:
            _fail(op, f"slot_mapping[{i}]", f"be below {num_slots} (num_blocks * block_size)", slot)


def check_fixed_scale(op: str, argument: str, scale: Tensor | None) -> None:
    """Of a write, which divides by it."""
    for i, value in enumerate([] if scale is None else scale.tolist()):
        if not 0 < value < math.inf:
            _fail(op, f"{argument}[{i}]", "be positive and finite", value)


def check_numbers(op: str, argument: str, rows: Tensor, slot_mapping: Tensor, cache: Tensor) -> None:
    """int8 has no NaN."""
    if cache.dtype != torch.int8:
        return
    for token in (slot_mapping >= 0).nonzero().flatten().tolist():
        for head, element in rows[token].isnan().nonzero().tolist():
            _fail(op, f"{argument}[{token}, {head}, {element}]", "be a number, which int8 can hold", math.nan)


def check_seq_lens(op: str, seq_lens: Tensor, block_table: Tensor, block_size: int) -> None:
    capacity = min(block_table.size(1) * block_size, MAX_LENGTH)
    for b, length in enumerate(seq_lens.tolist()):
        if not 0 <= length <= capacity:
            _fail(op, f"seq_lens[{b}]", f"be in 0..{capacity} (block_table.size(1) * block_size)", length)


def check_cu_seqlens_q(op: str, cu_seqlens_q: Tensor, num_tokens: int) -> None:
    values = cu_seqlens_q.tolist()
    if values[0] != 0:
        _fail(op, "cu_seqlens_q[0]", "be 0", values[0])
    for b in range(1, len(values)):
        if values[b] < values[b - 1]:
            _fail(op, f"cu_seqlens_q[{b}]", f"be at least cu_seqlens_q[{b - 1}] = {values[b - 1]}", values[b])
    if values[-1] > num_tokens:
        last = len(values) - 1
        _fail(op, f"cu_seqlens_q[{last}]", f"be at most {num_tokens} (query.size(0))", values[-1])


def _in_blocks(num_blocks: int, note: str = "") -> str:
    return f"be in 0..{num_blocks - 1}{note}" if num_blocks else "be absent (there are no blocks)"


def check_block_ids(op: str, block_table: Tensor, b: int, columns: range, num_blocks: int) -> None:
    for column, block in zip(columns, block_table[b, columns.start : columns.stop].tolist(), strict=True):
        if not 0 <= block < num_blocks:
            _fail(op, f"block_table[{b}, {column}]", _in_blocks(num_blocks, " (num_blocks - 1)"), block)


def query_bounds(a: Attention) -> list[int]:
    """First query row of each sequence, and the end."""
    return list(range(a.query.size(0) + 1)) if a.cu_seqlens_q is None else a.cu_seqlens_q.tolist()


def check_attention_values(op: str, a: Attention) -> None:
    block_size = a.key_cache.size(1)
    check_seq_lens(op, a.seq_lens, a.block_table, block_size)
    if a.cu_seqlens_q is not None:
        check_cu_seqlens_q(op, a.cu_seqlens_q, a.query.size(0))
    bounds = query_bounds(a)
    for b, seq_len in enumerate(a.seq_lens.tolist()):
        query_len = bounds[b + 1] - bounds[b]
        columns = visible_blocks(query_len, seq_len, block_size, a.causal, a.window_left, a.window_right)
        check_block_ids(op, a.block_table, b, columns, a.key_cache.size(0))


def check_gather_values(cache: Tensor, block_table: Tensor, seq_lens: Tensor, max_len: int) -> None:
    check_seq_lens("gather_kv", seq_lens, block_table, cache.size(1))
    for b, seq_len in enumerate(seq_lens.tolist()):
        num_columns = -(-min(seq_len, max_len) // cache.size(1))
        check_block_ids("gather_kv", block_table, b, range(num_columns), cache.size(0))


def check_block_mapping(op: str, block_mapping: Tensor, num_src: int, num_dst: int) -> None:
    pairs = block_mapping.tolist()
    for i, (src, dst) in enumerate(pairs):
        if not 0 <= src < num_src:
            _fail(op, f"block_mapping[{i}, 0]", _in_blocks(num_src), src)
        if not 0 <= dst < num_dst:
            _fail(op, f"block_mapping[{i}, 1]", _in_blocks(num_dst), dst)
    by_destination = sorted((dst, i) for i, (_, dst) in enumerate(pairs))
    for (dst, _), (following, i) in itertools.pairwise(by_destination):
        if dst == following:
            _fail(op, f"block_mapping[{i}, 1]", "name each destination block once", dst)


def check_places(op: str, argument: str, cache: Tensor) -> None:
    """A cache that is written has a place in memory for each element: it is not expanded, nor do its rows overlap.

    As in every view of a tensor that has: each stride steps over all that the smaller ones reach.
    """
    dims = sorted((stride, size) for stride, size in zip(cache.stride(), cache.shape, strict=True) if size > 1)
    reach = 0
    for stride, size in dims if cache.numel() else []:
        if stride <= reach:
            strides = ", ".join(map(str, cache.stride()))
            _fail(op, argument, "have a place of its own in memory for each element", f"strides [{strides}]")
        reach += (size - 1) * stride


def check_distinct_caches(
    op: str,
    key_cache: Tensor,
    value_cache: Tensor,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None:
    """K and V may be interleaved views of one storage, but no element may belong to both, or twice to one."""
    check_places(op, "key_cache", key_cache)
    check_places(op, "value_cache", value_cache)
    if shares_elements(key_cache, value_cache):
        raise RuntimeError(f"{op}: key_cache and value_cache must not share elements")
    if k_scale_cache is not None:
        check_places(op, "k_scale_cache", k_scale_cache)
    if v_scale_cache is not None:
        check_places(op, "v_scale_cache", v_scale_cache)
    if k_scale_cache is not None and v_scale_cache is not None and shares_elements(k_scale_cache, v_scale_cache):
        raise RuntimeError(f"{op}: k_scale_cache and v_scale_cache must not share elements")


def shares_elements(a: Tensor, b: Tensor) -> bool:
    """Whether two equally strided views name a common address (views of unequal strides: whether both start there)."""
    if a.numel() == 0 or b.numel() == 0 or a.element_size() != b.element_size():
        return False
    distance = b.data_ptr() - a.data_ptr()
    if distance == 0 or distance % a.element_size() != 0:
        return distance == 0
    dims = []
    for stride_a, stride_b, size_a, size_b in zip(a.stride(), b.stride(), a.shape, b.shape, strict=True):
        if size_a == size_b == 1:
            continue  # its stride means nothing
        if size_a > 1 and size_b > 1 and stride_a != stride_b:
            return False
        dims.append((stride_a if size_a > 1 else stride_b, size_a, size_b))
    return _reachable(distance // a.element_size(), sorted(dims, reverse=True))


def _reachable(distance: int, dims: list[tuple[int, int, int]]) -> bool:
    """Whether distance = sum(i_a*stride - i_b*stride) has a solution with every index inside its size."""
    if not dims:
        return distance == 0
    (stride, size_a, size_b), rest = dims[0], dims[1:]
    steps = distance // stride
    # smaller strides together reach less than one step of this one, so only the two nearest multiples can work
    return any(-size_b < step < size_a and _reachable(distance - step * stride, rest) for step in (steps, steps + 1))
