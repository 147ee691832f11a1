"""Every bad input of every op: the text of its error, without the op's name, and the change that has to give it.

A change is a new value, or a function of the good one, for the argument that begins the text, or a dict of such for
other arguments. ``SHAPES`` can be seen without reading a tensor, so that fake kernels report them too; ``VALUES`` are
in index tensors.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .builders import APPEND_ARGUMENTS, ATTENTION_ARGUMENTS, OUT_OF_RANGE, WRITE_ARGUMENTS, make_case

Bad = list[tuple[str, Any]]


def good_call(op: str) -> dict[str, Any]:
    """Arguments by name; two sequences, T=4, Hq=4, Hkv=2, D=16, Dv=8, N=5, S=4, W=3."""
    case = make_case(query_lens=(3, 1), seq_lens=(7, 4), v_head_size=8)
    append = dict(zip(APPEND_ARGUMENTS, case.append_args(), strict=True))
    if op == "write_kv":
        return {name: append[name] for name in WRITE_ARGUMENTS}
    if op in ("paged_attention", "paged_attention_with_lse"):
        return dict(zip(ATTENTION_ARGUMENTS, case.args, strict=True))
    if op == "paged_attention_append":
        return append
    if op == "merge_states":
        out, lse = torch.randn(2, 3, 4, 8), torch.randn(2, 3, 4)
        return {"out_a": out[0], "lse_a": lse[0], "out_b": out[1], "lse_b": lse[1]}
    mapping = torch.tensor([[0, 1], [1, 2]])
    if op == "copy_blocks":
        return {"caches": [case.key_cache, case.value_cache], "block_mapping": mapping}
    if op == "swap_blocks":
        return {"src": case.key_cache, "dst": torch.zeros(3, *case.key_cache.shape[1:]), "block_mapping": mapping}
    if op == "gather_kv":
        table, seq_lens = case.block_table.clone(), case.seq_lens
        return {"cache": case.key_cache, "block_table": table, "seq_lens": seq_lens, "max_len": 8}
    raise ValueError(op)


def changes(text: str, change: Any) -> dict[str, Any]:
    """By argument."""
    return change if isinstance(change, dict) else {re.match(r"\w+", text)[0]: change}  # type: ignore[index]


def bad_call(op: str, text: str, change: Any) -> dict[str, Any]:
    call = good_call(op)
    for name, value in changes(text, change).items():
        call[name] = value(call.get(name)) if callable(value) else value
    return call


def float_tensors(op: str) -> Iterator[tuple[str, int | None]]:
    """Argument, and index in its list or None, of every float tensor of a call."""
    for name, value in good_call(op).items():
        for index, tensor in enumerate(value) if isinstance(value, list) else [(None, value)]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():
                yield name, index


def replaced(op: str, name: str, index: int | None, change: Callable[[Tensor], Tensor]) -> dict[str, Any]:
    """A good call but for one tensor."""
    call = good_call(op)
    if index is None:
        call[name] = change(call[name])
    else:
        call[name][index] = change(call[name][index])
    return call


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype)


def _shape(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def _every_other(tensor: Tensor) -> Tensor:
    """The last dimension strided by two."""
    return torch.zeros(*tensor.shape[:-1], 2 * tensor.size(-1), dtype=tensor.dtype)[..., ::2]


def _meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def _set(index: Any, value: int) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.index_put([torch.tensor(i) for i in index], torch.tensor(value).to(tensor.dtype))


def _drop(dim: int) -> Callable[[Tensor], Tensor]:
    """One element less along ``dim``."""
    return lambda tensor: tensor.narrow(dim, 0, tensor.size(dim) - 1)


def _outer(tensor: Tensor) -> Tensor:
    return tensor[None]


def _first(tensor: Tensor) -> Tensor:
    return tensor[0]


def _no_blocks(tensor: Tensor) -> Tensor:
    return tensor[:0]


def _expanded(dim: int) -> Callable[[Tensor], Tensor]:
    """One element along ``dim`` for all."""
    return lambda tensor: tensor.narrow(dim, 0, 1).clone().expand(tensor.shape)


def _overlapping_rows(tensor: Tensor) -> Tensor:
    """Each block starts at the last row of the one before it."""
    strides = (tensor.stride(0) - tensor.stride(1), *tensor.stride()[1:])
    return torch.zeros_like(tensor).as_strided(tensor.shape, strides)


def _both(key_cache: Tensor, value_cache: Tensor) -> dict[str, Any]:
    return {"key_cache": key_cache, "value_cache": value_cache, "value": torch.zeros(4, 2, value_cache.size(3))}


def _none(*arguments: str) -> Bad:
    return [(f"{argument} must be a tensor, got None", None) for argument in arguments]


def _meta_like(like: str, *arguments: str) -> Bad:
    return [(f"{argument} must be on cpu like {like}, got meta", _meta) for argument in arguments]


def _quantised(**changes: Any) -> dict[str, Any]:
    """Changes that make the caches int8 and give each a scale; ``changes`` may undo that."""
    to_int8 = _to(torch.int8)
    return {"key_cache": to_int8, "value_cache": to_int8, "k_scale": torch.ones(1), "v_scale": torch.ones(2)} | changes


_FLOATS = "must be float32, float16 or bfloat16"
_CACHE_TYPES = "must be float32, float16, bfloat16, int8, float8_e4m3fn or float8_e5m2"
_INDEX = "must be int32 or int64"
_CONTIGUOUS = "must have a contiguous last dimension, got strides"
_OWN_PLACE = "must have a place of its own in memory for each element, got strides"
_SHARED = "key_cache and value_cache must not share elements"
_SOFTCAP = "softcap must be 0 (off) or more, and finite"

_CACHES: Bad = [
    *_none("key_cache", "value_cache"),
    *_meta_like("key_cache", "value_cache"),
    ("key_cache must be [num_blocks, block_size, num_kv_heads, head_size], got [4, 2, 16]", _first),
    ("value_cache must be [num_blocks, block_size, num_kv_heads, v_head_size], got [1, 5, 4, 2, 8]", _outer),
    (f"key_cache {_CACHE_TYPES}, got float64", _to(torch.float64)),
    (f"key_cache {_CACHE_TYPES}, got uint8", _to(torch.uint8)),
    ("value_cache must be float32 like key_cache, got int8", _to(torch.int8)),
    ("value_cache must be int8, float8_e4m3fn or float8_e5m2, got float32", {"key_cache": _to(torch.float8_e5m2)}),
    ("value_cache must be float32 like key_cache, got bfloat16", _to(torch.bfloat16)),
    (f"key_cache {_CONTIGUOUS} [256, 64, 32, 2]", _every_other),
    (f"value_cache {_CONTIGUOUS} [128, 32, 16, 2]", _every_other),
    ("value_cache.size(0) must be 5 like key_cache.size(0), got 4", _drop(0)),
    ("value_cache.size(1) must be 4 like key_cache.size(1), got 3", _drop(1)),
    ("value_cache.size(2) must be 2 like key_cache.size(2), got 1", _drop(2)),
    (
        "key_cache.size(1) must be in 1..2147483647 (block_size), got 0",
        {"key_cache": lambda t: t[:, :0], "value_cache": lambda t: t[:, :0]},
    ),
]
_NEW_TOKENS: Bad = [
    *_none("key", "value", "slot_mapping"),
    *_meta_like("key_cache", "key", "value", "slot_mapping"),
    ("key must be [num_tokens, num_kv_heads, head_size], got [2, 16]", _first),
    ("value must be [num_tokens, num_kv_heads, v_head_size], got [1, 4, 2, 8]", _outer),
    ("slot_mapping must be [num_slots], got [1, 4]", _outer),
    (f"key {_FLOATS}, got float64", _to(torch.float64)),
    (f"value {_FLOATS}, got int32", _to(torch.int32)),
    (f"slot_mapping {_INDEX}, got float32", _to(torch.float32)),
    (f"key {_CONTIGUOUS} [64, 32, 2]", _every_other),
    (f"value {_CONTIGUOUS} [32, 16, 2]", _every_other),
    ("value.size(0) must be 4 like key.size(0), got 3", _drop(0)),
    ("key.size(1) must be 2 like key_cache.size(2), got 1", _drop(1)),
    ("value.size(1) must be 2 like value_cache.size(2), got 1", _drop(1)),
    ("key.size(2) must be 16 like key_cache.size(3), got 15", _drop(2)),
    ("value.size(2) must be 8 like value_cache.size(3), got 7", _drop(2)),
    ("slot_mapping.size(0) must be at most 4 (key.size(0)), got 5", lambda t: torch.cat([t, t[:1]])),
]
_FIXED_SCALES: Bad = [
    ("k_scale must be None for a key_cache in float32, got a tensor", _shape(1)),
    ("v_scale must be None for a value_cache in float32, got a tensor", _shape(5, 4, 2)),
    ("k_scale must be given for a key_cache in int8, got None", _quantised(k_scale=None)),
    (
        "v_scale must be given for a value_cache in float8_e4m3fn, got None",
        _quantised(value_cache=_to(torch.float8_e4m3fn), v_scale=None),
    ),
    ("k_scale must be [1 or num_kv_heads], got [1, 2]", _quantised(k_scale=_shape(1, 2))),
    ("k_scale must be float32, got bfloat16", _quantised(k_scale=_shape(2, dtype=torch.bfloat16))),
    ("v_scale must be on cpu like value_cache, got meta", _quantised(v_scale=_shape(1).to("meta"))),
    ("v_scale.size(0) must be 1 or 2 (value_cache.size(2)), got 4", _quantised(v_scale=_shape(4))),
]
_READ_SCALES: Bad = [  # of each token and head
    ("v_scale must be float32, got float16", _quantised(v_scale=_shape(5, 4, 2, dtype=torch.float16))),
    ("k_scale must be on cpu like key_cache, got meta", _quantised(k_scale=_shape(5, 4, 2).to("meta"))),
    ("k_scale.size(0) must be 5 like key_cache.size(0), got 4", _quantised(k_scale=_shape(4, 4, 2))),
    ("v_scale.size(1) must be 4 like value_cache.size(1), got 5", _quantised(v_scale=_shape(5, 5, 2))),
    ("v_scale.size(2) must be 2 like value_cache.size(2), got 1", _quantised(v_scale=_shape(5, 4, 1))),
]
_WRITTEN_SCALES: Bad = [
    ("k_scale must be [1 or num_kv_heads], got [5, 4, 2]", _quantised(k_scale=_shape(5, 4, 2))),
    ("k_scale must be None beside k_scale_cache, got a tensor", _quantised(k_scale_cache=_shape(5, 4, 2))),
    ("v_scale_cache must be None for a value_cache in float32, got a tensor", _shape(5, 4, 2)),
    (
        "k_scale_cache must be [num_blocks, block_size, num_kv_heads], got [2]",
        _quantised(k_scale=None, k_scale_cache=_shape(2)),
    ),
    (
        "v_scale_cache must be float32, got float64",
        _quantised(v_scale=None, v_scale_cache=_shape(5, 4, 2, dtype=torch.float64)),
    ),
    (
        "v_scale_cache must be on cpu like value_cache, got meta",
        _quantised(v_scale=None, v_scale_cache=_shape(5, 4, 2).to("meta")),
    ),
    (
        "k_scale_cache.size(0) must be 5 like key_cache.size(0), got 6",
        _quantised(k_scale=None, k_scale_cache=_shape(6, 4, 2)),
    ),
]
_QUERY: Bad = [
    *_none("query"),
    *_meta_like("key_cache", "query", "cu_seqlens_q"),
    ("query must be [num_tokens, num_heads, head_size], got [4, 16]", _first),
    (f"query {_FLOATS}, got float64", _to(torch.float64)),
    (f"query {_CONTIGUOUS} [128, 32, 2]", _every_other),
    ("query.size(2) must be 16 like key_cache.size(3), got 15", _drop(2)),
    (
        "key_cache.size(2) must be at least 1 (num_kv_heads), got 0",
        {"key_cache": lambda t: t[:, :, :0], "value_cache": lambda t: t[:, :, :0]},
    ),
    (
        "key_cache.size(3) must be at least 1 (head_size), got 0",
        {"query": lambda t: t[..., :0], "key_cache": lambda t: t[..., :0]},
    ),
    ("query.size(1) must be a multiple of 2 (key_cache.size(2)), got 3", _drop(1)),
    (
        "query.size(0) must be 2 like seq_lens.size(0) when cu_seqlens_q is not given, got 4",
        {"cu_seqlens_q": None},
    ),
    ("cu_seqlens_q must be [batch+1], got [1, 3]", _outer),
    (f"cu_seqlens_q {_INDEX}, got uint8", _to(torch.uint8)),
    ("cu_seqlens_q.size(0) must be 3 like seq_lens.size(0) + 1, got 2", _drop(0)),
    ("window_left must be -1 (unlimited) or more, got -2", -2),
    ("window_right must be -1 (unlimited) or more, got -5", -5),
    ("scale must be finite, got nan", math.nan),
    ("scale must be finite, got -inf", -math.inf),
    (f"{_SOFTCAP}, got -1.0", -1.0),
    (f"{_SOFTCAP}, got nan", math.nan),
    (f"{_SOFTCAP}, got inf", math.inf),
    ("num_splits must be 0 (automatic) or more, got -1", -1),
    ("alibi_slopes must be [num_heads], got [1, 4]", _shape(1, 4)),
    ("sinks must be [num_heads], got []", _shape()),
    (f"alibi_slopes {_FLOATS}, got int32", _shape(4, dtype=torch.int32)),
    (f"sinks {_FLOATS}, got float64", _shape(4, dtype=torch.float64)),
    ("alibi_slopes must be on cpu like query, got meta", _shape(4).to("meta")),
    ("sinks must be on cpu like query, got meta", _shape(4).to("meta")),
    ("alibi_slopes.size(0) must be 4 like query.size(1), got 5", _shape(5)),
    ("sinks.size(0) must be 4 like query.size(1), got 5", _shape(5)),
    *_FIXED_SCALES,
]
_TABLE: Bad = [
    *_none("block_table", "seq_lens"),
    ("block_table must be [batch, max_blocks], got [3]", _first),
    ("seq_lens must be [batch], got [1, 2]", _outer),
    (f"block_table {_INDEX}, got int16", _to(torch.int16)),
    (f"seq_lens {_INDEX}, got float32", _to(torch.float32)),
    ("block_table.size(0) must be 2 like seq_lens.size(0), got 1", _drop(0)),
]
_ATTENTION: Bad = [*_CACHES, *_QUERY, *_TABLE, *_meta_like("key_cache", "block_table", "seq_lens")]
_MAPPING: Bad = [
    *_none("block_mapping"),
    ("block_mapping must be [num_pairs, 2], got [2]", _first),
    ("block_mapping must be [num_pairs, 2], got [2, 3]", _shape(2, 3, dtype=torch.int64)),
    (f"block_mapping {_INDEX}, got float32", _to(torch.float32)),
]

SHAPES: dict[str, Bad] = {
    "write_kv": [*_CACHES, *_NEW_TOKENS, *_FIXED_SCALES, *_WRITTEN_SCALES],
    "paged_attention": [*_ATTENTION, *_READ_SCALES],
    "paged_attention_with_lse": [*_ATTENTION, *_READ_SCALES],
    "paged_attention_append": [
        *_ATTENTION,
        *_NEW_TOKENS,
        (
            "key.size(0) must be 4 like query.size(0), got 3",
            {"key": _drop(0), "value": _drop(0), "slot_mapping": _drop(0)},
        ),
        *_WRITTEN_SCALES,
    ],
    "merge_states": [
        *_none("out_a", "lse_a", "out_b", "lse_b"),
        *_meta_like("out_a", "out_b", "lse_a", "lse_b"),
        ("out_a must be [num_tokens, num_heads, v_head_size], got [4, 8]", _first),
        ("out_b must be [num_tokens, num_heads, v_head_size], got [4, 8]", _first),
        ("lse_a must be [num_tokens, num_heads], got [1, 3, 4]", _outer),
        ("lse_b must be [num_tokens, num_heads], got [4]", _first),
        (f"out_a {_FLOATS}, got float64", _to(torch.float64)),
        ("out_b must be float32 like out_a, got float16", _to(torch.float16)),
        ("lse_a must be float32, got float16", _to(torch.float16)),
        ("lse_b must be float32, got float64", _to(torch.float64)),
        ("out_b.size(0) must be 3 like out_a.size(0), got 2", _drop(0)),
        ("lse_a.size(0) must be 3 like out_a.size(0), got 2", _drop(0)),
        ("lse_b.size(0) must be 3 like out_a.size(0), got 2", _drop(0)),
        ("out_b.size(1) must be 4 like out_a.size(1), got 3", _drop(1)),
        ("lse_a.size(1) must be 4 like out_a.size(1), got 3", _drop(1)),
        ("lse_b.size(1) must be 4 like out_a.size(1), got 3", _drop(1)),
        ("out_b.size(2) must be 8 like out_a.size(2), got 7", _drop(2)),
        (f"out_a {_CONTIGUOUS} [64, 16, 2]", _every_other),
        (f"out_b {_CONTIGUOUS} [64, 16, 2]", _every_other),
    ],
    "copy_blocks": [
        *_MAPPING,
        ("caches must hold at least one tensor, got an empty list", []),
        ("caches[2] must have blocks as its first dimension, got a scalar", lambda t: [*t, torch.tensor(1.0)]),
        ("caches[1] must be on cpu like block_mapping, got meta", lambda t: [t[0], _meta(t[1])]),
    ],
    "swap_blocks": [
        *_MAPPING,
        *_none("src", "dst"),
        ("block_mapping must be on cpu, got meta", _meta),
        ("src must have blocks as its first dimension, got a scalar", torch.tensor(1.0)),
        ("dst must have 4 dimensions like src, got 3", _first),
        ("dst must be float32 like src, got float16", _to(torch.float16)),
        ("dst.size(1) must be 4 like src.size(1), got 3", _drop(1)),
        ("dst.size(2) must be 2 like src.size(2), got 1", _drop(2)),
        ("dst.size(3) must be 16 like src.size(3), got 15", _drop(3)),
    ],
    "gather_kv": [
        *_TABLE,
        *_none("cache"),
        *_meta_like("cache", "block_table", "seq_lens"),
        ("cache must be [num_blocks, block_size, num_kv_heads, head_size], got [4, 2, 16]", _first),
        (f"cache {_CACHE_TYPES}, got uint8", _to(torch.uint8)),
        (f"cache {_CONTIGUOUS} [256, 64, 32, 2]", _every_other),
        ("cache.size(1) must be in 1..2147483647 (block_size), got 0", lambda t: t[:, :0]),
        ("max_len must be in 0..281474976710656, got -1", -1),
        ("max_len must be in 0..281474976710656, got 4611686018427387904", 2**62),
        ("scale must be None for a cache in float32, got a tensor", _shape(1)),
        ("scale must be given for a cache in float8_e5m2, got None", {"cache": _to(torch.float8_e5m2)}),
        ("scale must be [1 or num_kv_heads], got []", {"cache": _to(torch.int8), "scale": _shape()}),
        ("scale.size(1) must be 4 like cache.size(1), got 3", {"cache": _to(torch.int8), "scale": _shape(5, 3, 2)}),
        ("dtype must be float32 like cache, got float16", torch.float16),
        (
            "dtype must be float32, float16 or bfloat16, got int8",
            {"cache": _to(torch.int8), "scale": torch.ones(1), "dtype": torch.int8},
        ),
    ],
}

_ZEROS, _COLUMNS, _SCALES = torch.zeros(6, 4, 2, 16), torch.zeros(5, 4, 2, 23), torch.zeros(6, 4, 2)
_LENGTHS: Bad = [
    ("seq_lens[1] must be in 0..12 (block_table.size(1) * block_size), got -1", _set([1], -1)),
    ("seq_lens[0] must be in 0..12 (block_table.size(1) * block_size), got 13", _set([0], 13)),
]
_IDS: Bad = [
    ("block_table[0, 1] must be in 0..4 (num_blocks - 1), got 5", _set([0, 1], 5)),
    ("block_table[1, 0] must be in 0..4 (num_blocks - 1), got -1", _set([1, 0], -1)),
    ("block_table[0, 0] must be in 0..4 (num_blocks - 1), got 8589934592", _set([0, 0], 2**33)),
]
_BOUNDS: Bad = [
    ("cu_seqlens_q[0] must be 0, got 1", _set([0], 1)),
    ("cu_seqlens_q[0] must be 0, got -1", _set([0], -1)),
    ("cu_seqlens_q[2] must be at least cu_seqlens_q[1] = 9, got 4", _set([1], 9)),
    ("cu_seqlens_q[2] must be at most 4 (query.size(0)), got 5", _set([2], 5)),
]
_EMPTY_POOL: Bad = [
    (
        "block_table[0, 0] must be absent (there are no blocks), got 2",
        {"key_cache": _no_blocks, "value_cache": _no_blocks},
    )
]
_SLOTS: Bad = [
    ("slot_mapping[2] must be below 20 (num_blocks * block_size), got 20", _set([2], 20)),
    ("slot_mapping[0] must be below 20 (num_blocks * block_size), got 1099511627776", _set([0], 2**40)),
    (_SHARED, _both(_ZEROS[:5], _ZEROS[:5])),
    (_SHARED, _both(_ZEROS[:5], _ZEROS[1:])),  # by one block
    (_SHARED, _both(_COLUMNS[..., :16], _COLUMNS[..., 15:])),  # by one element of the head
    (f"key_cache {_OWN_PLACE} [0, 32, 16, 1]", _expanded(0)),
    (f"value_cache {_OWN_PLACE} [32, 8, 0, 1]", _expanded(2)),
    (f"key_cache {_OWN_PLACE} [96, 32, 16, 1]", _overlapping_rows),
]

_NAN = "must be a number, which int8 can hold, got nan"
_STORED: Bad = [
    ("k_scale[0] must be positive and finite, got 0.0", _quantised(k_scale=torch.zeros(1))),
    ("v_scale[1] must be positive and finite, got nan", _quantised(v_scale=torch.tensor([0.5, math.nan]))),
    ("v_scale[0] must be positive and finite, got -2.5", _quantised(v_scale=torch.tensor([-2.5, 1.0]))),
    ("k_scale[0] must be positive and finite, got inf", _quantised(k_scale=torch.tensor([math.inf]))),
    (f"key[1, 1, 15] {_NAN}", _quantised(key=_set([1, 1, 15], math.nan))),
    (f"value[3, 0, 2] {_NAN}", _quantised(value=_set([3, 0, 2], math.nan))),
    (
        f"value[0, 1, 7] {_NAN}",
        _quantised(
            value=lambda t: _set([0, 1, 7], -math.nan)(t.bfloat16()), v_scale=None, v_scale_cache=_shape(5, 4, 2)
        ),
    ),
    (f"key[0, 0, 0] {_NAN}", _quantised(key=lambda t: _set([0, 0, 0], math.nan)(t.half()))),
    (
        f"k_scale_cache {_OWN_PLACE} [8, 0, 1]",
        _quantised(k_scale=None, k_scale_cache=_shape(5, 4, 2)[:, :1].expand(5, 4, 2)),
    ),
    (
        f"v_scale_cache {_OWN_PLACE} [0, 2, 1]",
        _quantised(v_scale=None, v_scale_cache=_shape(1, 4, 2).expand(5, 4, 2)),
    ),
    (
        "k_scale_cache and v_scale_cache must not share elements",
        _quantised(k_scale=None, v_scale=None, k_scale_cache=_SCALES[:5], v_scale_cache=_SCALES[1:]),
    ),
]


def _pairs(last_destination: int) -> Bad:
    return [
        ("block_mapping[1, 0] must be in 0..4, got 5", _set([1, 0], 5)),
        ("block_mapping[1, 0] must be in 0..4, got 1099511627776", _set([1, 0], 2**40)),
        ("block_mapping[1, 0] must be in 0..4, got -1", _set([1, 0], -1)),
        (f"block_mapping[1, 1] must be in 0..{last_destination}, got 2147483647", _set([1, 1], OUT_OF_RANGE)),
        (f"block_mapping[0, 1] must be in 0..{last_destination}, got -3", _set([0, 1], -3)),
        ("block_mapping[1, 1] must name each destination block once, got 1", _set([1, 1], 1)),
    ]


VALUES: dict[str, Bad] = {
    "write_kv": [*_SLOTS, *_STORED],
    "paged_attention": [*_LENGTHS, *_IDS, *_BOUNDS, *_EMPTY_POOL],
    "paged_attention_with_lse": [*_LENGTHS, *_IDS, *_BOUNDS, *_EMPTY_POOL],
    "paged_attention_append": [*_SLOTS, *_STORED, *_LENGTHS, *_IDS, *_BOUNDS],
    "merge_states": [],
    "copy_blocks": [*_pairs(4), (f"caches[1] {_OWN_PLACE} [16, 0, 8, 1]", lambda t: [t[0], _expanded(1)(t[1])])],
    "swap_blocks": [
        *_pairs(2),
        (f"dst {_OWN_PLACE} [0, 32, 16, 1]", _expanded(0)),
        ("block_mapping[0, 0] must be absent (there are no blocks), got 0", {"src": _no_blocks}),
        ("block_mapping[0, 1] must be absent (there are no blocks), got 1", {"dst": _no_blocks}),
    ],
    "gather_kv": [*_LENGTHS, *_IDS],
}
