"""The argument contract of every op, written once for the fake kernels, the reference and the Triton launchers.

The C++ kernels test the same conditions in the same order with the same words (``csrc/checks.h``), because a call from
C++ or a 2 us eager call can not come through Python; a test compares the two for every bad input.

``check_<op>`` looks at ranks, shapes, dtypes, strides and options only, so that it runs on fake tensors and symbolic
sizes. ``check_<op>_values`` reads index tensors and therefore synchronises: CPU kernels and debug mode only.
Every error is a ``RuntimeError`` of the form ``op: argument must <expectation>, got <what came>``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .arguments import Attention

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)
MAX_BLOCK_SIZE = 2**31 - 1
MAX_RESULT_LENGTH = 2**48  # of gather_kv, so that a compiler can work with its sizes


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(values: Sequence[Any]) -> str:
    return "[" + ", ".join(str(v) for v in values) + "]"


def _expect(op: str, condition: Any, argument: str, expectation: str, actual: Any) -> None:
    # torch._check turns a condition on an unbacked size into a run-time assertion instead of a graph break
    torch._check(condition, lambda: f"{op}: {argument} must {expectation}, got {actual}")  # type: ignore[no-untyped-call]


def _given(op: str, **tensors: Tensor | None) -> None:
    """Of arguments that are not optional; the dispatcher lets None through."""
    for argument, tensor in tensors.items():
        if tensor is None:
            _expect(op, False, argument, "be a tensor", None)


def _rank(op: str, argument: str, tensor: Tensor, shape: str) -> None:
    rank = shape.count(",") + 1
    _expect(op, tensor.dim() == rank, argument, f"be {shape}", _sizes(tensor.shape))


def _float(op: str, argument: str, tensor: Tensor) -> None:
    _expect(op, tensor.dtype in FLOAT_DTYPES, argument, "be float32, float16 or bfloat16", _name(tensor.dtype))


def _cache_dtype(op: str, argument: str, tensor: Tensor) -> None:
    expectation = "be float32, float16 or bfloat16 (int8 and float8 caches are not supported yet)"
    _expect(op, tensor.dtype in FLOAT_DTYPES, argument, expectation, _name(tensor.dtype))


def _index(op: str, argument: str, tensor: Tensor) -> None:
    _expect(op, tensor.dtype in INDEX_DTYPES, argument, "be int32 or int64", _name(tensor.dtype))


def _device(op: str, argument: str, tensor: Tensor, like: Tensor, like_name: str) -> None:
    _expect(op, tensor.device == like.device, argument, f"be on {like.device} like {like_name}", tensor.device)


def _last_contiguous(op: str, argument: str, tensor: Tensor) -> None:
    if tensor.stride(-1) != 1:
        _expect(
            op, tensor.size(-1) <= 1, argument, "have a contiguous last dimension", f"strides {_sizes(tensor.stride())}"
        )


def _size(op: str, argument: str, tensor: Tensor, dim: int, size: Any, like: str) -> None:
    _expect(op, tensor.size(dim) == size, f"{argument}.size({dim})", f"be {size} like {like}", tensor.size(dim))


def _block_size(op: str, argument: str, cache: Tensor) -> None:
    """Views by expand may be longer than 64-bit arithmetic on positions can bear."""
    for fits in (cache.size(1) >= 1, cache.size(1) <= MAX_BLOCK_SIZE):
        _expect(op, fits, f"{argument}.size(1)", f"be in 1..{MAX_BLOCK_SIZE} (block_size)", cache.size(1))


def _unsupported_scales(op: str, **scales: Tensor | None) -> None:
    for argument, scale in scales.items():
        expectation = "be None (quantised caches are not supported yet)"
        _expect(op, scale is None, argument, expectation, "a tensor")


def _check_caches(op: str, key_cache: Tensor, value_cache: Tensor) -> None:
    _given(op, key_cache=key_cache, value_cache=value_cache)
    _rank(op, "key_cache", key_cache, "[num_blocks, block_size, num_kv_heads, head_size]")
    _rank(op, "value_cache", value_cache, "[num_blocks, block_size, num_kv_heads, v_head_size]")
    _cache_dtype(op, "key_cache", key_cache)
    expectation = f"be {_name(key_cache.dtype)} like key_cache"
    _expect(op, value_cache.dtype == key_cache.dtype, "value_cache", expectation, _name(value_cache.dtype))
    _device(op, "value_cache", value_cache, key_cache, "key_cache")
    _last_contiguous(op, "key_cache", key_cache)
    _last_contiguous(op, "value_cache", value_cache)
    for dim in range(3):
        _size(op, "value_cache", value_cache, dim, key_cache.size(dim), f"key_cache.size({dim})")
    _block_size(op, "key_cache", key_cache)


def _check_new_tokens(
    op: str, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    _given(op, key=key, value=value, slot_mapping=slot_mapping)
    _rank(op, "key", key, "[num_tokens, num_kv_heads, head_size]")
    _rank(op, "value", value, "[num_tokens, num_kv_heads, v_head_size]")
    _rank(op, "slot_mapping", slot_mapping, "[num_slots]")
    _float(op, "key", key)
    _float(op, "value", value)
    _index(op, "slot_mapping", slot_mapping)
    for argument, tensor in (("key", key), ("value", value), ("slot_mapping", slot_mapping)):
        _device(op, argument, tensor, key_cache, "key_cache")
    _last_contiguous(op, "key", key)
    _last_contiguous(op, "value", value)
    _size(op, "value", value, 0, key.size(0), "key.size(0)")
    _size(op, "key", key, 1, key_cache.size(2), "key_cache.size(2)")
    _size(op, "key", key, 2, key_cache.size(3), "key_cache.size(3)")
    _size(op, "value", value, 1, value_cache.size(2), "value_cache.size(2)")
    _size(op, "value", value, 2, value_cache.size(3), "value_cache.size(3)")
    expectation = f"be at most {key.size(0)} (key.size(0))"
    _expect(op, slot_mapping.size(0) <= key.size(0), "slot_mapping.size(0)", expectation, slot_mapping.size(0))


def check_write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    op: str = "write_kv",
) -> None:
    _check_caches(op, key_cache, value_cache)
    _check_new_tokens(op, key, value, key_cache, value_cache, slot_mapping)
    _unsupported_scales(op, k_scale=k_scale, v_scale=v_scale, k_scale_cache=k_scale_cache, v_scale_cache=v_scale_cache)


def _check_head_vector(op: str, argument: str, tensor: Tensor | None, query: Tensor) -> None:
    if tensor is None:
        return
    _rank(op, argument, tensor, "[num_heads]")
    _float(op, argument, tensor)
    _device(op, argument, tensor, query, "query")
    _size(op, argument, tensor, 0, query.size(1), "query.size(1)")


def _check_query(op: str, query: Tensor, key_cache: Tensor) -> None:
    _given(op, query=query)
    _rank(op, "query", query, "[num_tokens, num_heads, head_size]")
    _float(op, "query", query)
    _device(op, "query", query, key_cache, "key_cache")
    _last_contiguous(op, "query", query)
    _size(op, "query", query, 2, key_cache.size(3), "key_cache.size(3)")
    num_kv_heads = key_cache.size(2)
    _expect(op, num_kv_heads >= 1, "key_cache.size(2)", "be at least 1 (num_kv_heads)", num_kv_heads)
    _expect(op, key_cache.size(3) >= 1, "key_cache.size(3)", "be at least 1 (head_size)", key_cache.size(3))
    multiple = f"be a multiple of {num_kv_heads} (key_cache.size(2))"
    _expect(op, query.size(1) % num_kv_heads == 0, "query.size(1)", multiple, query.size(1))


def _check_query_starts(op: str, a: Attention) -> None:
    if a.cu_seqlens_q is None:
        expectation = f"be {a.seq_lens.size(0)} like seq_lens.size(0) when cu_seqlens_q is not given"
        _expect(op, a.query.size(0) == a.seq_lens.size(0), "query.size(0)", expectation, a.query.size(0))
        return
    _rank(op, "cu_seqlens_q", a.cu_seqlens_q, "[batch+1]")
    _index(op, "cu_seqlens_q", a.cu_seqlens_q)
    _device(op, "cu_seqlens_q", a.cu_seqlens_q, a.key_cache, "key_cache")
    _size(op, "cu_seqlens_q", a.cu_seqlens_q, 0, a.seq_lens.size(0) + 1, "seq_lens.size(0) + 1")


def _check_options(op: str, a: Attention) -> None:
    if a.scale is not None:
        _expect(op, -math.inf < a.scale < math.inf, "scale", "be finite", a.scale)
    _expect(op, a.window_left >= -1, "window_left", "be -1 (unlimited) or more", a.window_left)
    _expect(op, a.window_right >= -1, "window_right", "be -1 (unlimited) or more", a.window_right)
    _expect(op, 0 <= a.softcap < math.inf, "softcap", "be 0 (off) or more, and finite", a.softcap)
    _expect(op, a.num_splits >= 0, "num_splits", "be 0 (automatic) or more", a.num_splits)
    _check_head_vector(op, "alibi_slopes", a.alibi_slopes, a.query)
    _check_head_vector(op, "sinks", a.sinks, a.query)
    _unsupported_scales(op, k_scale=a.k_scale, v_scale=a.v_scale)


def check_paged_attention(*args: Any, op: str = "paged_attention", **options: Any) -> Attention:
    """Takes what the op takes."""
    attention = Attention(*args, **options)
    _check_caches(op, attention.key_cache, attention.value_cache)
    _check_query(op, attention.query, attention.key_cache)
    check_table(op, attention.block_table, attention.seq_lens, attention.key_cache, "key_cache")
    _check_query_starts(op, attention)
    _check_options(op, attention)
    return attention


def check_table(op: str, block_table: Tensor, seq_lens: Tensor, cache: Tensor, cache_name: str) -> None:
    _given(op, block_table=block_table, seq_lens=seq_lens)
    _rank(op, "block_table", block_table, "[batch, max_blocks]")
    _rank(op, "seq_lens", seq_lens, "[batch]")
    _index(op, "block_table", block_table)
    _index(op, "seq_lens", seq_lens)
    _device(op, "block_table", block_table, cache, cache_name)
    _device(op, "seq_lens", seq_lens, cache, cache_name)
    _size(op, "block_table", block_table, 0, seq_lens.size(0), "seq_lens.size(0)")


def check_paged_attention_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    **options: Any,
) -> Attention:
    op = "paged_attention_append"
    attention = check_paged_attention(
        query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, op=op, **options
    )
    _check_new_tokens(op, key, value, key_cache, value_cache, slot_mapping)
    _size(op, "key", key, 0, query.size(0), "query.size(0)")
    _unsupported_scales(op, k_scale_cache=k_scale_cache, v_scale_cache=v_scale_cache)
    return attention


def check_merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    op = "merge_states"
    _given(op, out_a=out_a, lse_a=lse_a, out_b=out_b, lse_b=lse_b)
    _rank(op, "out_a", out_a, "[num_tokens, num_heads, v_head_size]")
    _rank(op, "out_b", out_b, "[num_tokens, num_heads, v_head_size]")
    _float(op, "out_a", out_a)
    _expect(op, out_b.dtype == out_a.dtype, "out_b", f"be {_name(out_a.dtype)} like out_a", _name(out_b.dtype))
    _device(op, "out_b", out_b, out_a, "out_a")
    for dim in range(3):
        _size(op, "out_b", out_b, dim, out_a.size(dim), f"out_a.size({dim})")
    _last_contiguous(op, "out_a", out_a)
    _last_contiguous(op, "out_b", out_b)
    for argument, lse in (("lse_a", lse_a), ("lse_b", lse_b)):
        _rank(op, argument, lse, "[num_tokens, num_heads]")
        _expect(op, lse.dtype == torch.float32, argument, "be float32", _name(lse.dtype))
        _device(op, argument, lse, out_a, "out_a")
        for dim in range(2):
            _size(op, argument, lse, dim, out_a.size(dim), f"out_a.size({dim})")


def _check_mapping(op: str, block_mapping: Tensor) -> None:
    _given(op, block_mapping=block_mapping)
    _expect(op, block_mapping.dim() == 2, "block_mapping", "be [num_pairs, 2]", _sizes(block_mapping.shape))
    _expect(op, block_mapping.size(1) == 2, "block_mapping", "be [num_pairs, 2]", _sizes(block_mapping.shape))
    _index(op, "block_mapping", block_mapping)


def check_copy_blocks(caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    op = "copy_blocks"
    _expect(op, len(caches) >= 1, "caches", "hold at least one tensor", "an empty list")
    _check_mapping(op, block_mapping)
    for i, cache in enumerate(caches):
        _expect(op, cache.dim() >= 1, f"caches[{i}]", "have blocks as its first dimension", "a scalar")
        _device(op, f"caches[{i}]", cache, block_mapping, "block_mapping")


def check_swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    op = "swap_blocks"
    _given(op, src=src, dst=dst)
    _check_mapping(op, block_mapping)
    _expect(op, block_mapping.device.type == "cpu", "block_mapping", "be on cpu", block_mapping.device)
    _expect(op, src.dim() >= 1, "src", "have blocks as its first dimension", "a scalar")
    _expect(op, dst.dim() == src.dim(), "dst", f"have {src.dim()} dimensions like src", dst.dim())
    _expect(op, dst.dtype == src.dtype, "dst", f"be {_name(src.dtype)} like src", _name(dst.dtype))
    for dim in range(1, src.dim()):
        _size(op, "dst", dst, dim, src.size(dim), f"src.size({dim})")


def check_gather_kv(cache: Tensor, block_table: Tensor, seq_lens: Tensor, max_len: int) -> None:
    op = "gather_kv"
    _given(op, cache=cache)
    _rank(op, "cache", cache, "[num_blocks, block_size, num_kv_heads, head_size]")
    _cache_dtype(op, "cache", cache)
    _last_contiguous(op, "cache", cache)
    _block_size(op, "cache", cache)
    check_table(op, block_table, seq_lens, cache, "cache")
    for fits in (max_len >= 0, max_len <= MAX_RESULT_LENGTH):
        _expect(op, fits, "max_len", f"be in 0..{MAX_RESULT_LENGTH}", max_len)
