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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from .arguments import Attention

FLOAT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
QUANTISED_MAX = {
    torch.int8: 127.0,
    torch.float8_e4m3fn: 448.0,
    torch.float8_e5m2: 57344.0,
}  # the largest that is written
INDEX_DTYPES = (torch.int32, torch.int64)
MAX_BLOCK_SIZE = 2**31 - 1
MAX_RESULT_LENGTH = 2**48  # of gather_kv, so that a compiler can work with its sizes

_FLOATS = "float32, float16 or bfloat16"
_QUANTISED = "int8, float8_e4m3fn or float8_e5m2"
_TYPES = {  # by what a tensor is
    "float": (FLOAT_DTYPES, _FLOATS),
    "cache": ((*FLOAT_DTYPES, *QUANTISED_MAX), f"float32, float16, bfloat16, {_QUANTISED}"),
    "quantised": (tuple(QUANTISED_MAX), _QUANTISED),
    "index": (INDEX_DTYPES, "int32 or int64"),
    "float32": ((torch.float32,), "float32"),
}


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _sizes(values: Sequence[Any]) -> str:
    return "[" + ", ".join(str(v) for v in values) + "]"


def _expect(op: str, condition: Any, argument: str, expectation: str, actual: Any) -> None:
    # torch._check turns a condition on an unbacked size into a run-time assertion instead of a graph break
    torch._check(condition, lambda: f"{op}: {argument} must {expectation}, got {actual}")  # type: ignore[no-untyped-call]


def _given(op: str, argument: str, tensor: Tensor | None) -> None:
    """An argument that is not optional; the dispatcher lets None through."""
    if tensor is None:
        _expect(op, False, argument, "be a tensor", None)


def _device(op: str, argument: str, tensor: Tensor, like: Tensor, like_name: str) -> None:
    _expect(op, tensor.device == like.device, argument, f"be on {like.device} like {like_name}", tensor.device)


def _dtype_like(op: str, argument: str, tensor: Tensor, like: Tensor, like_name: str) -> None:
    _expect(op, tensor.dtype == like.dtype, argument, f"be {_name(like.dtype)} like {like_name}", _name(tensor.dtype))


def _tensor(
    op: str, argument: str, tensor: Tensor, shape: str, kind: str, like: Tensor | None = None, like_name: str = ""
) -> None:
    """Rank, type (of ``_TYPES``, or that of ``like``), the device of ``like``, and contiguous rows of heads."""
    _given(op, argument, tensor)
    _expect(op, tensor.dim() == shape.count(",") + 1, argument, f"be {shape}", _sizes(tensor.shape))
    if kind in _TYPES:
        dtypes, names = _TYPES[kind]
        _expect(op, tensor.dtype in dtypes, argument, f"be {names}", _name(tensor.dtype))
    elif like is not None:
        _dtype_like(op, argument, tensor, like, like_name)
    if like is not None:
        _device(op, argument, tensor, like, like_name)
    if tensor.dim() > 2 and tensor.stride(-1) != 1:
        strides = f"strides {_sizes(tensor.stride())}"
        _expect(op, tensor.size(-1) <= 1, argument, "have a contiguous last dimension", strides)


def _size(op: str, argument: str, tensor: Tensor, dim: int, like: Tensor, like_name: str, like_dim: int) -> None:
    size, expected = tensor.size(dim), like.size(like_dim)
    _expect(op, size == expected, f"{argument}.size({dim})", f"be {expected} like {like_name}.size({like_dim})", size)


def _block_size(op: str, argument: str, cache: Tensor) -> None:
    """Views by expand may be longer than 64-bit arithmetic on positions can bear."""
    for fits in (cache.size(1) >= 1, cache.size(1) <= MAX_BLOCK_SIZE):
        _expect(op, fits, f"{argument}.size(1)", f"be in 1..{MAX_BLOCK_SIZE} (block_size)", cache.size(1))


def _check_caches(op: str, key_cache: Tensor, value_cache: Tensor) -> None:
    _tensor(op, "key_cache", key_cache, "[num_blocks, block_size, num_kv_heads, head_size]", "cache")
    shape = "[num_blocks, block_size, num_kv_heads, v_head_size]"
    kind = "quantised" if key_cache.dtype in QUANTISED_MAX else "like"  # the two may be quantised differently
    _tensor(op, "value_cache", value_cache, shape, kind, key_cache, "key_cache")
    for dim in range(3):
        _size(op, "value_cache", value_cache, dim, key_cache, "key_cache", dim)
    _block_size(op, "key_cache", key_cache)


def _check_new_tokens(
    op: str, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor
) -> None:
    _tensor(op, "key", key, "[num_tokens, num_kv_heads, head_size]", "float", key_cache, "key_cache")
    _tensor(op, "value", value, "[num_tokens, num_kv_heads, v_head_size]", "float", key_cache, "key_cache")
    _tensor(op, "slot_mapping", slot_mapping, "[num_slots]", "index", key_cache, "key_cache")
    _size(op, "value", value, 0, key, "key", 0)
    for dim in (1, 2):
        _size(op, "key", key, dim, key_cache, "key_cache", dim + 1)
        _size(op, "value", value, dim, value_cache, "value_cache", dim + 1)
    expectation = f"be at most {key.size(0)} (key.size(0))"
    _expect(op, slot_mapping.size(0) <= key.size(0), "slot_mapping.size(0)", expectation, slot_mapping.size(0))


def _is_given(op: str, argument: str, scale: Tensor | None, cache: Tensor, cache_name: str) -> bool:
    """Whether there is a scale: a quantised cache needs one, another takes none."""
    is_quantised = cache.dtype in QUANTISED_MAX
    expectation = f"be {'given' if is_quantised else 'None'} for a {cache_name} in {_name(cache.dtype)}"
    _expect(op, (scale is not None) == is_quantised, argument, expectation, "None" if scale is None else "a tensor")
    return is_quantised


def _check_fixed_scale(op: str, argument: str, scale: Tensor, cache: Tensor, cache_name: str) -> None:
    _tensor(op, argument, scale, "[1 or num_kv_heads]", "float32", cache, cache_name)
    fits = scale.size(0) == 1 or scale.size(0) == cache.size(2)
    expectation = f"be 1 or {cache.size(2)} ({cache_name}.size(2))"
    _expect(op, fits, f"{argument}.size(0)", expectation, scale.size(0))


def _check_scale_cache(op: str, argument: str, scale: Tensor, cache: Tensor, cache_name: str) -> None:
    _expect(op, scale.dim() == 3, argument, "be [num_blocks, block_size, num_kv_heads]", _sizes(scale.shape))
    _expect(op, scale.dtype == torch.float32, argument, "be float32", _name(scale.dtype))
    _device(op, argument, scale, cache, cache_name)
    for dim in range(3):
        _size(op, argument, scale, dim, cache, cache_name, dim)


def _check_read_scale(op: str, argument: str, scale: Tensor | None, cache: Tensor, cache_name: str) -> None:
    """Of a tensor or a head, or of each token and head."""
    if _is_given(op, argument, scale, cache, cache_name):
        assert scale is not None
        check = _check_scale_cache if scale.dim() == 3 else _check_fixed_scale
        check(op, argument, scale, cache, cache_name)


def _check_written_scale(
    op: str, argument: str, scale: Tensor | None, scale_cache: Tensor | None, cache: Tensor, cache_name: str
) -> None:
    """Either fixed, or a cache of scales that the write fills."""
    if scale_cache is None:
        if _is_given(op, argument, scale, cache, cache_name):
            assert scale is not None
            _check_fixed_scale(op, argument, scale, cache, cache_name)
        return
    _expect(op, scale is None, argument, f"be None beside {argument}_cache", "a tensor")
    if _is_given(op, f"{argument}_cache", scale_cache, cache, cache_name):
        _check_scale_cache(op, f"{argument}_cache", scale_cache, cache, cache_name)


def check_write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None:
    op = "write_kv"
    _check_caches(op, key_cache, value_cache)
    _check_new_tokens(op, key, value, key_cache, value_cache, slot_mapping)
    _check_written_scale(op, "k_scale", k_scale, k_scale_cache, key_cache, "key_cache")
    _check_written_scale(op, "v_scale", v_scale, v_scale_cache, value_cache, "value_cache")


def _check_head_vector(op: str, argument: str, tensor: Tensor | None, query: Tensor) -> None:
    if tensor is not None:
        _tensor(op, argument, tensor, "[num_heads]", "float", query, "query")
        _size(op, argument, tensor, 0, query, "query", 1)


def _check_query(op: str, query: Tensor, key_cache: Tensor) -> None:
    _tensor(op, "query", query, "[num_tokens, num_heads, head_size]", "float", key_cache, "key_cache")
    _size(op, "query", query, 2, key_cache, "key_cache", 3)
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
    _tensor(op, "cu_seqlens_q", a.cu_seqlens_q, "[batch+1]", "index", a.key_cache, "key_cache")
    size, expected = a.cu_seqlens_q.size(0), a.seq_lens.size(0) + 1
    _expect(op, size == expected, "cu_seqlens_q.size(0)", f"be {expected} like seq_lens.size(0) + 1", size)


def _check_options(op: str, a: Attention) -> None:
    if a.scale is not None:
        _expect(op, -math.inf < a.scale < math.inf, "scale", "be finite", a.scale)
    _expect(op, a.window_left >= -1, "window_left", "be -1 (unlimited) or more", a.window_left)
    _expect(op, a.window_right >= -1, "window_right", "be -1 (unlimited) or more", a.window_right)
    _expect(op, 0 <= a.softcap < math.inf, "softcap", "be 0 (off) or more, and finite", a.softcap)
    _expect(op, a.num_splits >= 0, "num_splits", "be 0 (automatic) or more", a.num_splits)
    _check_head_vector(op, "alibi_slopes", a.alibi_slopes, a.query)
    _check_head_vector(op, "sinks", a.sinks, a.query)


def _check_attention(op: str, a: Attention) -> None:
    _check_caches(op, a.key_cache, a.value_cache)
    _check_query(op, a.query, a.key_cache)
    check_table(op, a.block_table, a.seq_lens, a.key_cache, "key_cache")
    _check_query_starts(op, a)
    _check_options(op, a)


def check_paged_attention(*args: Any, op: str = "paged_attention", **options: Any) -> Attention:
    """Takes what the op takes."""
    a = Attention(*args, **options)
    _check_attention(op, a)
    _check_read_scale(op, "k_scale", a.k_scale, a.key_cache, "key_cache")
    _check_read_scale(op, "v_scale", a.v_scale, a.value_cache, "value_cache")
    return a


def check_table(op: str, block_table: Tensor, seq_lens: Tensor, cache: Tensor, cache_name: str) -> None:
    _tensor(op, "block_table", block_table, "[batch, max_blocks]", "index", cache, cache_name)
    _tensor(op, "seq_lens", seq_lens, "[batch]", "index", cache, cache_name)
    _size(op, "block_table", block_table, 0, seq_lens, "seq_lens", 0)


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
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    **options: Any,
) -> Attention:
    """Returns the attention that follows the write: it reads the scales that the write fills."""
    op = "paged_attention_append"
    a = Attention(query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, **options)
    _check_attention(op, a)
    _check_new_tokens(op, key, value, key_cache, value_cache, slot_mapping)
    _size(op, "key", key, 0, query, "query", 0)
    _check_written_scale(op, "k_scale", a.k_scale, k_scale_cache, key_cache, "key_cache")
    _check_written_scale(op, "v_scale", a.v_scale, v_scale_cache, value_cache, "value_cache")
    if k_scale_cache is None and v_scale_cache is None:
        return a
    return replace(
        a,
        k_scale=a.k_scale if k_scale_cache is None else k_scale_cache,
        v_scale=a.v_scale if v_scale_cache is None else v_scale_cache,
    )


def check_merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> None:
    op, shape = "merge_states", "[num_tokens, num_heads, v_head_size]"
    _tensor(op, "out_a", out_a, shape, "float")
    _tensor(op, "out_b", out_b, shape, "like", out_a, "out_a")
    _tensor(op, "lse_a", lse_a, "[num_tokens, num_heads]", "float32", out_a, "out_a")
    _tensor(op, "lse_b", lse_b, "[num_tokens, num_heads]", "float32", out_a, "out_a")
    for argument, tensor in (("out_b", out_b), ("lse_a", lse_a), ("lse_b", lse_b)):
        for dim in range(tensor.dim()):
            _size(op, argument, tensor, dim, out_a, "out_a", dim)


def _check_mapping(op: str, block_mapping: Tensor) -> None:
    _tensor(op, "block_mapping", block_mapping, "[num_pairs, 2]", "index")
    _expect(op, block_mapping.size(1) == 2, "block_mapping", "be [num_pairs, 2]", _sizes(block_mapping.shape))


def check_copy_blocks(caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    op = "copy_blocks"
    _expect(op, len(caches) >= 1, "caches", "hold at least one tensor", "an empty list")
    _check_mapping(op, block_mapping)
    for i, cache in enumerate(caches):
        _expect(op, cache.dim() >= 1, f"caches[{i}]", "have blocks as its first dimension", "a scalar")
        _device(op, f"caches[{i}]", cache, block_mapping, "block_mapping")


def check_swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    op = "swap_blocks"
    _given(op, "src", src)
    _given(op, "dst", dst)
    _check_mapping(op, block_mapping)
    _expect(op, block_mapping.device.type == "cpu", "block_mapping", "be on cpu", block_mapping.device)
    _expect(op, src.dim() >= 1, "src", "have blocks as its first dimension", "a scalar")
    _expect(op, dst.dim() == src.dim(), "dst", f"have {src.dim()} dimensions like src", dst.dim())
    _dtype_like(op, "dst", dst, src, "src")
    for dim in range(1, src.dim()):
        _size(op, "dst", dst, dim, src, "src", dim)


def check_gather_kv(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_len: int,
    *,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.dtype:
    """Returns the type of the result."""
    op = "gather_kv"
    _tensor(op, "cache", cache, "[num_blocks, block_size, num_kv_heads, head_size]", "cache")
    _block_size(op, "cache", cache)
    check_table(op, block_table, seq_lens, cache, "cache")
    for fits in (max_len >= 0, max_len <= MAX_RESULT_LENGTH):
        _expect(op, fits, "max_len", f"be in 0..{MAX_RESULT_LENGTH}", max_len)
    _check_read_scale(op, "scale", scale, cache, "cache")
    is_quantised = cache.dtype in QUANTISED_MAX
    dtypes = FLOAT_DTYPES if is_quantised else (cache.dtype,)
    if dtype is not None:
        expectation = f"be {_FLOATS if is_quantised else _name(cache.dtype) + ' like cache'}"
        _expect(op, dtype in dtypes, "dtype", expectation, _name(dtype))
    return dtype or dtypes[0]
