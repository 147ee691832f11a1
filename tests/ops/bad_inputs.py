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

from .bad_scales import FIXED_SCALES, READ_SCALES, STORED, WRITTEN_SCALES
from .builders import APPEND_ARGUMENTS, ATTENTION_ARGUMENTS, OUT_OF_RANGE, WRITE_ARGUMENTS, make_case
from .changes import (
    OWN_PLACE,
    Bad,
    drop,
    every_other,
    expanded,
    first,
    no_blocks,
    on_meta,
    outer,
    overlapping_rows,
    put,
    to,
    zeros,
)


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


def _both(key_cache: Tensor, value_cache: Tensor) -> dict[str, Any]:
    return {"key_cache": key_cache, "value_cache": value_cache, "value": torch.zeros(4, 2, value_cache.size(3))}


def _none(*arguments: str) -> Bad:
    return [(f"{argument} must be a tensor, got None", None) for argument in arguments]


def _meta_like(like: str, *arguments: str) -> Bad:
    return [(f"{argument} must be on cpu like {like}, got meta", on_meta) for argument in arguments]


_FLOATS = "must be float32, float16 or bfloat16"
_CACHE_TYPES = "must be float32, float16, bfloat16, int8, float8_e4m3fn or float8_e5m2"
_INDEX = "must be int32 or int64"
_CONTIGUOUS = "must have a contiguous last dimension, got strides"
_SHARED = "key_cache and value_cache must not share elements"
_SOFTCAP = "softcap must be 0 (off) or more, and finite"

_CACHES: Bad = [
    *_none("key_cache", "value_cache"),
    *_meta_like("key_cache", "value_cache"),
    ("key_cache must be [num_blocks, block_size, num_kv_heads, head_size], got [4, 2, 16]", first),
    ("value_cache must be [num_blocks, block_size, num_kv_heads, v_head_size], got [1, 5, 4, 2, 8]", outer),
    (f"key_cache {_CACHE_TYPES}, got float64", to(torch.float64)),
    (f"key_cache {_CACHE_TYPES}, got uint8", to(torch.uint8)),
    ("value_cache must be float32 like key_cache, got int8", to(torch.int8)),
    ("value_cache must be int8, float8_e4m3fn or float8_e5m2, got float32", {"key_cache": to(torch.float8_e5m2)}),
    ("value_cache must be float32 like key_cache, got bfloat16", to(torch.bfloat16)),
    (f"key_cache {_CONTIGUOUS} [256, 64, 32, 2]", every_other),
    (f"value_cache {_CONTIGUOUS} [128, 32, 16, 2]", every_other),
    ("value_cache.size(0) must be 5 like key_cache.size(0), got 4", drop(0)),
    ("value_cache.size(1) must be 4 like key_cache.size(1), got 3", drop(1)),
    ("value_cache.size(2) must be 2 like key_cache.size(2), got 1", drop(2)),
    (
        "key_cache.size(1) must be in 1..2147483647 (block_size), got 0",
        {"key_cache": lambda t: t[:, :0], "value_cache": lambda t: t[:, :0]},
    ),
]
_NEW_TOKENS: Bad = [
    *_none("key", "value", "slot_mapping"),
    *_meta_like("key_cache", "key", "value", "slot_mapping"),
    ("key must be [num_tokens, num_kv_heads, head_size], got [2, 16]", first),
    ("value must be [num_tokens, num_kv_heads, v_head_size], got [1, 4, 2, 8]", outer),
    ("slot_mapping must be [num_slots], got [1, 4]", outer),
    (f"key {_FLOATS}, got float64", to(torch.float64)),
    (f"value {_FLOATS}, got int32", to(torch.int32)),
    (f"slot_mapping {_INDEX}, got float32", to(torch.float32)),
    (f"key {_CONTIGUOUS} [64, 32, 2]", every_other),
    (f"value {_CONTIGUOUS} [32, 16, 2]", every_other),
    ("value.size(0) must be 4 like key.size(0), got 3", drop(0)),
    ("key.size(1) must be 2 like key_cache.size(2), got 1", drop(1)),
    ("value.size(1) must be 2 like value_cache.size(2), got 1", drop(1)),
    ("key.size(2) must be 16 like key_cache.size(3), got 15", drop(2)),
    ("value.size(2) must be 8 like value_cache.size(3), got 7", drop(2)),
    ("slot_mapping.size(0) must be at most 4 (key.size(0)), got 5", lambda t: torch.cat([t, t[:1]])),
]
_QUERY: Bad = [
    *_none("query"),
    *_meta_like("key_cache", "query", "cu_seqlens_q"),
    ("query must be [num_tokens, num_heads, head_size], got [4, 16]", first),
    (f"query {_FLOATS}, got float64", to(torch.float64)),
    (f"query {_CONTIGUOUS} [128, 32, 2]", every_other),
    ("query.size(2) must be 16 like key_cache.size(3), got 15", drop(2)),
    (
        "key_cache.size(2) must be at least 1 (num_kv_heads), got 0",
        {"key_cache": lambda t: t[:, :, :0], "value_cache": lambda t: t[:, :, :0]},
    ),
    (
        "key_cache.size(3) must be at least 1 (head_size), got 0",
        {"query": lambda t: t[..., :0], "key_cache": lambda t: t[..., :0]},
    ),
    ("query.size(1) must be a multiple of 2 (key_cache.size(2)), got 3", drop(1)),
    (
        "query.size(0) must be 2 like seq_lens.size(0) when cu_seqlens_q is not given, got 4",
        {"cu_seqlens_q": None},
    ),
    ("cu_seqlens_q must be [batch+1], got [1, 3]", outer),
    (f"cu_seqlens_q {_INDEX}, got uint8", to(torch.uint8)),
    ("cu_seqlens_q.size(0) must be 3 like seq_lens.size(0) + 1, got 2", drop(0)),
    ("window_left must be -1 (unlimited) or more, got -2", -2),
    ("window_right must be -1 (unlimited) or more, got -5", -5),
    ("scale must be finite, got nan", math.nan),
    ("scale must be finite, got -inf", -math.inf),
    (f"{_SOFTCAP}, got -1.0", -1.0),
    (f"{_SOFTCAP}, got nan", math.nan),
    (f"{_SOFTCAP}, got inf", math.inf),
    ("num_splits must be 0 (automatic) or more, got -1", -1),
    ("alibi_slopes must be [num_heads], got [1, 4]", zeros(1, 4)),
    ("sinks must be [num_heads], got []", zeros()),
    (f"alibi_slopes {_FLOATS}, got int32", zeros(4, dtype=torch.int32)),
    (f"sinks {_FLOATS}, got float64", zeros(4, dtype=torch.float64)),
    ("alibi_slopes must be on cpu like query, got meta", zeros(4).to("meta")),
    ("sinks must be on cpu like query, got meta", zeros(4).to("meta")),
    ("alibi_slopes.size(0) must be 4 like query.size(1), got 5", zeros(5)),
    ("sinks.size(0) must be 4 like query.size(1), got 5", zeros(5)),
    *FIXED_SCALES,
]
_TABLE: Bad = [
    *_none("block_table", "seq_lens"),
    ("block_table must be [batch, max_blocks], got [3]", first),
    ("seq_lens must be [batch], got [1, 2]", outer),
    (f"block_table {_INDEX}, got int16", to(torch.int16)),
    (f"seq_lens {_INDEX}, got float32", to(torch.float32)),
    ("block_table.size(0) must be 2 like seq_lens.size(0), got 1", drop(0)),
]
_ATTENTION: Bad = [*_CACHES, *_QUERY, *_TABLE, *_meta_like("key_cache", "block_table", "seq_lens")]
_MAPPING: Bad = [
    *_none("block_mapping"),
    ("block_mapping must be [num_pairs, 2], got [2]", first),
    ("block_mapping must be [num_pairs, 2], got [2, 3]", zeros(2, 3, dtype=torch.int64)),
    (f"block_mapping {_INDEX}, got float32", to(torch.float32)),
]

SHAPES: dict[str, Bad] = {
    "write_kv": [*_CACHES, *_NEW_TOKENS, *FIXED_SCALES, *WRITTEN_SCALES],
    "paged_attention": [*_ATTENTION, *READ_SCALES],
    "paged_attention_with_lse": [*_ATTENTION, *READ_SCALES],
    "paged_attention_append": [
        *_ATTENTION,
        *_NEW_TOKENS,
        (
            "key.size(0) must be 4 like query.size(0), got 3",
            {"key": drop(0), "value": drop(0), "slot_mapping": drop(0)},
        ),
        *WRITTEN_SCALES,
    ],
    "merge_states": [
        *_none("out_a", "lse_a", "out_b", "lse_b"),
        *_meta_like("out_a", "out_b", "lse_a", "lse_b"),
        ("out_a must be [num_tokens, num_heads, v_head_size], got [4, 8]", first),
        ("out_b must be [num_tokens, num_heads, v_head_size], got [4, 8]", first),
        ("lse_a must be [num_tokens, num_heads], got [1, 3, 4]", outer),
        ("lse_b must be [num_tokens, num_heads], got [4]", first),
        (f"out_a {_FLOATS}, got float64", to(torch.float64)),
        ("out_b must be float32 like out_a, got float16", to(torch.float16)),
        ("lse_a must be float32, got float16", to(torch.float16)),
        ("lse_b must be float32, got float64", to(torch.float64)),
        ("out_b.size(0) must be 3 like out_a.size(0), got 2", drop(0)),
        ("lse_a.size(0) must be 3 like out_a.size(0), got 2", drop(0)),
        ("lse_b.size(0) must be 3 like out_a.size(0), got 2", drop(0)),
        ("out_b.size(1) must be 4 like out_a.size(1), got 3", drop(1)),
        ("lse_a.size(1) must be 4 like out_a.size(1), got 3", drop(1)),
        ("lse_b.size(1) must be 4 like out_a.size(1), got 3", drop(1)),
        ("out_b.size(2) must be 8 like out_a.size(2), got 7", drop(2)),
        (f"out_a {_CONTIGUOUS} [64, 16, 2]", every_other),
        (f"out_b {_CONTIGUOUS} [64, 16, 2]", every_other),
    ],
    "copy_blocks": [
        *_MAPPING,
        ("caches must hold at least one tensor, got an empty list", []),
        ("caches[2] must have blocks as its first dimension, got a scalar", lambda t: [*t, torch.tensor(1.0)]),
        ("caches[1] must be on cpu like block_mapping, got meta", lambda t: [t[0], on_meta(t[1])]),
    ],
    "swap_blocks": [
        *_MAPPING,
        *_none("src", "dst"),
        ("block_mapping must be on cpu, got meta", on_meta),
        ("src must have blocks as its first dimension, got a scalar", torch.tensor(1.0)),
        ("dst must have 4 dimensions like src, got 3", first),
        ("dst must be float32 like src, got float16", to(torch.float16)),
        ("dst.size(1) must be 4 like src.size(1), got 3", drop(1)),
        ("dst.size(2) must be 2 like src.size(2), got 1", drop(2)),
        ("dst.size(3) must be 16 like src.size(3), got 15", drop(3)),
    ],
    "gather_kv": [
        *_TABLE,
        *_none("cache"),
        *_meta_like("cache", "block_table", "seq_lens"),
        ("cache must be [num_blocks, block_size, num_kv_heads, head_size], got [4, 2, 16]", first),
        (f"cache {_CACHE_TYPES}, got uint8", to(torch.uint8)),
        (f"cache {_CONTIGUOUS} [256, 64, 32, 2]", every_other),
        ("cache.size(1) must be in 1..2147483647 (block_size), got 0", lambda t: t[:, :0]),
        ("max_len must be in 0..281474976710656, got -1", -1),
        ("max_len must be in 0..281474976710656, got 4611686018427387904", 2**62),
        ("scale must be None for a cache in float32, got a tensor", zeros(1)),
        ("scale must be given for a cache in float8_e5m2, got None", {"cache": to(torch.float8_e5m2)}),
        ("scale must be [1 or num_kv_heads], got []", {"cache": to(torch.int8), "scale": zeros()}),
        ("scale.size(1) must be 4 like cache.size(1), got 3", {"cache": to(torch.int8), "scale": zeros(5, 3, 2)}),
        ("dtype must be float32 like cache, got float16", torch.float16),
        (
            "dtype must be float32, float16 or bfloat16, got int8",
            {"cache": to(torch.int8), "scale": torch.ones(1), "dtype": torch.int8},
        ),
    ],
}

_ZEROS, _COLUMNS = torch.zeros(6, 4, 2, 16), torch.zeros(5, 4, 2, 23)
_LENGTHS: Bad = [
    ("seq_lens[1] must be in 0..12 (block_table.size(1) * block_size), got -1", put([1], -1)),
    ("seq_lens[0] must be in 0..12 (block_table.size(1) * block_size), got 13", put([0], 13)),
]
_IDS: Bad = [
    ("block_table[0, 1] must be in 0..4 (num_blocks - 1), got 5", put([0, 1], 5)),
    ("block_table[1, 0] must be in 0..4 (num_blocks - 1), got -1", put([1, 0], -1)),
    ("block_table[0, 0] must be in 0..4 (num_blocks - 1), got 8589934592", put([0, 0], 2**33)),
]
_BOUNDS: Bad = [
    ("cu_seqlens_q[0] must be 0, got 1", put([0], 1)),
    ("cu_seqlens_q[0] must be 0, got -1", put([0], -1)),
    ("cu_seqlens_q[2] must be at least cu_seqlens_q[1] = 9, got 4", put([1], 9)),
    ("cu_seqlens_q[2] must be at most 4 (query.size(0)), got 5", put([2], 5)),
]
_EMPTY_POOL: Bad = [
    (
        "block_table[0, 0] must be absent (there are no blocks), got 2",
        {"key_cache": no_blocks, "value_cache": no_blocks},
    )
]
_SLOTS: Bad = [
    ("slot_mapping[2] must be below 20 (num_blocks * block_size), got 20", put([2], 20)),
    ("slot_mapping[0] must be below 20 (num_blocks * block_size), got 1099511627776", put([0], 2**40)),
    (_SHARED, _both(_ZEROS[:5], _ZEROS[:5])),
    (_SHARED, _both(_ZEROS[:5], _ZEROS[1:])),  # by one block
    (_SHARED, _both(_COLUMNS[..., :16], _COLUMNS[..., 15:])),  # by one element of the head
    (f"key_cache {OWN_PLACE} [0, 32, 16, 1]", expanded(0)),
    (f"value_cache {OWN_PLACE} [32, 8, 0, 1]", expanded(2)),
    (f"key_cache {OWN_PLACE} [96, 32, 16, 1]", overlapping_rows),
]


def _pairs(last_destination: int) -> Bad:
    return [
        ("block_mapping[1, 0] must be in 0..4, got 5", put([1, 0], 5)),
        ("block_mapping[1, 0] must be in 0..4, got 1099511627776", put([1, 0], 2**40)),
        ("block_mapping[1, 0] must be in 0..4, got -1", put([1, 0], -1)),
        (f"block_mapping[1, 1] must be in 0..{last_destination}, got 2147483647", put([1, 1], OUT_OF_RANGE)),
        (f"block_mapping[0, 1] must be in 0..{last_destination}, got -3", put([0, 1], -3)),
        ("block_mapping[1, 1] must name each destination block once, got 1", put([1, 1], 1)),
    ]


VALUES: dict[str, Bad] = {
    "write_kv": [*_SLOTS, *STORED],
    "paged_attention": [*_LENGTHS, *_IDS, *_BOUNDS, *_EMPTY_POOL],
    "paged_attention_with_lse": [*_LENGTHS, *_IDS, *_BOUNDS, *_EMPTY_POOL],
    "paged_attention_append": [*_SLOTS, *STORED, *_LENGTHS, *_IDS, *_BOUNDS],
    "merge_states": [],
    "copy_blocks": [*_pairs(4), (f"caches[1] {OWN_PLACE} [16, 0, 8, 1]", lambda t: [t[0], expanded(1)(t[1])])],
    "swap_blocks": [
        *_pairs(2),
        (f"dst {OWN_PLACE} [0, 32, 16, 1]", expanded(0)),
        ("block_mapping[0, 0] must be absent (there are no blocks), got 0", {"src": no_blocks}),
        ("block_mapping[0, 1] must be absent (there are no blocks), got 1", {"dst": no_blocks}),
    ],
    "gather_kv": [*_LENGTHS, *_IDS],
}
