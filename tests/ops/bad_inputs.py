"""Every bad input of every op, as a change of one argument of a call that works.

``SHAPES`` can be seen without reading a tensor, so that fake kernels report them too; ``VALUES`` are in index tensors.
A change is the new value or a function of the good one; ids name the rule that is broken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .builders import APPEND_ARGUMENTS, ATTENTION_ARGUMENTS, OUT_OF_RANGE, WRITE_ARGUMENTS, make_case

Changes = dict[str, Any]


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


def bad_call(op: str, changes: Changes) -> dict[str, Any]:
    call = good_call(op)
    for name, change in changes.items():
        call[name] = change(call.get(name)) if callable(change) else change
    return call


def _to(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    return lambda tensor: tensor.to(dtype)


def _shape(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def _every_other(tensor: Tensor) -> Tensor:
    """The last dimension strided by two."""
    wide = torch.zeros(*tensor.shape[:-1], 2 * tensor.size(-1), dtype=tensor.dtype)
    return wide[..., ::2]


def _meta(tensor: Tensor) -> Tensor:
    return tensor.to("meta")


def _set(index: Any, value: int) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor = tensor.clone()
        tensor[index] = value
        return tensor

    return change


def _drop(dim: int) -> Callable[[Tensor], Tensor]:
    """One element less along ``dim``."""
    return lambda tensor: tensor.narrow(dim, 0, tensor.size(dim) - 1)


def _each(rule: str, change: Any, *arguments: str) -> dict[str, Changes]:
    """The same change of one argument after the other."""
    return {f"{argument} {rule}": {argument: change} for argument in arguments}


def _none(*arguments: str) -> dict[str, Changes]:
    return _each("None", None, *arguments)


def _outer(tensor: Tensor) -> Tensor:
    return tensor[None]


def _first(tensor: Tensor) -> Tensor:
    return tensor[0]


_CACHES: dict[str, Changes] = {
    **_none("key_cache", "value_cache"),
    **_each("rank", _first, "key_cache"),
    **_each("rank", _outer, "value_cache"),
    "key_cache dtype": {"key_cache": _to(torch.float64)},
    "key_cache int8": {"key_cache": _to(torch.int8)},
    "value_cache dtype": {"value_cache": _to(torch.bfloat16)},
    "value_cache device": {"value_cache": _meta},
    **_each("stride", _every_other, "key_cache", "value_cache"),
    "value_cache blocks": {"value_cache": _drop(0)},
    "value_cache block_size": {"value_cache": _drop(1)},
    "value_cache heads": {"value_cache": _drop(2)},
    "block_size zero": {"key_cache": lambda t: t[:, :0], "value_cache": lambda t: t[:, :0]},
}
_NEW_TOKENS: dict[str, Changes] = {
    **_none("key", "value", "slot_mapping"),
    **_each("rank", _first, "key"),
    **_each("rank", _outer, "value", "slot_mapping"),
    "key dtype": {"key": _to(torch.float64)},
    "value dtype": {"value": _to(torch.int32)},
    "slot_mapping dtype": {"slot_mapping": _to(torch.float32)},
    **_each("device", _meta, "key", "value", "slot_mapping"),
    **_each("stride", _every_other, "key", "value"),
    **_each("tokens", _drop(0), "value"),
    **_each("heads", _drop(1), "key", "value"),
    **_each("head_size", _drop(2), "key", "value"),
    "slot_mapping longer": {"slot_mapping": lambda t: torch.cat([t, t[:1]])},
}
_TABLE: dict[str, Changes] = {
    **_none("block_table", "seq_lens"),
    **_each("rank", _first, "block_table"),
    **_each("rank", _outer, "seq_lens"),
    "block_table dtype": {"block_table": _to(torch.int16)},
    "seq_lens dtype": {"seq_lens": _to(torch.float32)},
    **_each("device", _meta, "block_table", "seq_lens"),
    "block_table rows": {"block_table": _drop(0)},
}
_QUERY: dict[str, Changes] = {
    **_none("query"),
    "query rank": {"query": lambda t: t[0]},
    "query dtype": {"query": _to(torch.float64)},
    "query device": {"query": _meta},
    "query stride": {"query": _every_other},
    "query head_size": {"query": _drop(2)},
    "no KV heads": {"key_cache": lambda t: t[:, :, :0], "value_cache": lambda t: t[:, :, :0]},
    "head_size zero": {"query": lambda t: t[..., :0], "key_cache": lambda t: t[..., :0]},
    "head ratio": {"query": _drop(1)},
    "tokens without cu_seqlens_q": {"cu_seqlens_q": None},
    "cu_seqlens_q rank": {"cu_seqlens_q": lambda t: t[None]},
    "cu_seqlens_q dtype": {"cu_seqlens_q": _to(torch.uint8)},
    "cu_seqlens_q device": {"cu_seqlens_q": _meta},
    "cu_seqlens_q size": {"cu_seqlens_q": _drop(0)},
    "window_left": {"window_left": -2},
    "window_right": {"window_right": -5},
    "softcap": {"softcap": -1.0},
    **_each("nan", math.nan, "scale", "softcap"),
    **_each("inf", -math.inf, "scale"),
    **_each("inf", math.inf, "softcap"),
    "num_splits": {"num_splits": -1},
    **_each("rank", _shape(1, 4), "alibi_slopes"),
    **_each("rank", _shape(), "sinks"),
    **_each("dtype", _shape(4, dtype=torch.int32), "alibi_slopes"),
    **_each("dtype", _shape(4, dtype=torch.float64), "sinks"),
    **_each("device", _meta(_shape(4)), "alibi_slopes", "sinks"),
    **_each("size", _shape(5), "alibi_slopes", "sinks"),
    **_each("given", _shape(1), "k_scale", "v_scale"),
}
_SCALE_CACHES = _each("given", _shape(5, 4, 2), "k_scale_cache", "v_scale_cache")
_MAPPING: dict[str, Changes] = {
    **_none("block_mapping"),
    "block_mapping rank": {"block_mapping": lambda t: t[0]},
    "block_mapping columns": {"block_mapping": _shape(2, 3, dtype=torch.int64)},
    "block_mapping dtype": {"block_mapping": _to(torch.float32)},
}

SHAPES: dict[str, dict[str, Changes]] = {
    "write_kv": {
        **_CACHES,
        **_NEW_TOKENS,
        **_each("given", _shape(1), "k_scale", "v_scale"),
        **_SCALE_CACHES,
    },
    "paged_attention": {**_CACHES, **_QUERY, **_TABLE},
    "paged_attention_with_lse": {**_CACHES, **_QUERY, **_TABLE},
    "paged_attention_append": {
        **_CACHES,
        **_QUERY,
        **_TABLE,
        **_NEW_TOKENS,
        "key tokens": {"key": _drop(0), "value": _drop(0), "slot_mapping": _drop(0)},
        **_SCALE_CACHES,
    },
    "merge_states": {
        **_none("out_a", "lse_a", "out_b", "lse_b"),
        **_each("rank", _first, "out_a", "out_b", "lse_b"),
        **_each("rank", _outer, "lse_a"),
        "out_a dtype": {"out_a": _to(torch.float64)},
        "out_b dtype": {"out_b": _to(torch.float16)},
        **_each("device", _meta, "out_b", "lse_a", "lse_b"),
        **_each("tokens", _drop(0), "out_b", "lse_a", "lse_b"),
        **_each("heads", _drop(1), "out_b", "lse_a", "lse_b"),
        **_each("head_size", _drop(2), "out_b"),
        **_each("stride", _every_other, "out_a", "out_b"),
        "lse_a dtype": {"lse_a": _to(torch.float16)},
        "lse_b dtype": {"lse_b": _to(torch.float64)},
    },
    "copy_blocks": {
        **_MAPPING,
        "no caches": {"caches": []},
        "scalar cache": {"caches": lambda t: [*t, torch.tensor(1.0)]},
        "cache device": {"caches": lambda t: [t[0], _meta(t[1])]},
    },
    "swap_blocks": {
        **_MAPPING,
        **_none("src", "dst"),
        "block_mapping device": {"block_mapping": _meta},
        "scalar src": {"src": torch.tensor(1.0)},
        "dst rank": {"dst": lambda t: t[0]},
        "dst dtype": {"dst": _to(torch.float16)},
        "dst block_size": {"dst": _drop(1)},
        "dst heads": {"dst": _drop(2)},
        "dst head_size": {"dst": _drop(3)},
    },
    "gather_kv": {
        **_TABLE,
        **_none("cache"),
        "cache rank": {"cache": lambda t: t[0]},
        "cache dtype": {"cache": _to(torch.int8)},
        "cache stride": {"cache": _every_other},
        "block_size zero": {"cache": lambda t: t[:, :0]},
        "max_len": {"max_len": -1},
        "max_len beyond any memory": {"max_len": 2**62},
    },
}

_LENGTHS: dict[str, Changes] = {
    "seq_len negative": {"seq_lens": _set(1, -1)},
    "seq_len past the table": {"seq_lens": _set(0, 13)},
}
_IDS: dict[str, Changes] = {
    "block id too large": {"block_table": _set((0, 1), 5)},
    "block id negative": {"block_table": _set((1, 0), -1)},
    "block id beyond 32 bits": {"block_table": _set((0, 0), 2**33)},
}
_BOUNDS: dict[str, Changes] = {
    "cu_seqlens_q starts above 0": {"cu_seqlens_q": _set(0, 1)},
    "cu_seqlens_q starts below 0": {"cu_seqlens_q": _set(0, -1)},
    "cu_seqlens_q decreases": {"cu_seqlens_q": _set(1, 9)},
    "cu_seqlens_q ends above T": {"cu_seqlens_q": _set(2, 5)},
}
_PAIRS: dict[str, Changes] = {
    "source too large": {"block_mapping": _set((1, 0), 5)},
    "source beyond 32 bits": {"block_mapping": _set((1, 0), 2**40)},
    "source negative": {"block_mapping": _set((1, 0), -1)},
    "destination too large": {"block_mapping": _set((1, 1), OUT_OF_RANGE)},
    "destination negative": {"block_mapping": _set((0, 1), -3)},
    "destination twice": {"block_mapping": _set((1, 1), 1)},
}


def _same_cache() -> Changes:
    cache = torch.zeros(5, 4, 2, 16)
    return {"key_cache": cache, "value_cache": cache, "value": lambda t: torch.zeros(4, 2, 16)}


def _half_shared_caches() -> Changes:
    """Value block i is key block i+1."""
    pool = torch.zeros(6, 4, 2, 16)
    return {"key_cache": pool[:5], "value_cache": pool[1:], "value": lambda t: torch.zeros(4, 2, 16)}


def _overlapping_columns() -> Changes:
    """Interleaved views that overlap by one element of the head."""
    pool = torch.zeros(5, 4, 2, 23)
    return {"key_cache": pool[..., :16], "value_cache": pool[..., 15:]}


def _expanded(dim: int) -> Callable[[Tensor], Tensor]:
    """One element along ``dim`` for all."""
    return lambda tensor: tensor.narrow(dim, 0, 1).clone().expand(tensor.shape)


def _overlapping_rows(tensor: Tensor) -> Tensor:
    """Each block starts at the last row of the one before it."""
    strides = (tensor.stride(0) - tensor.stride(1), *tensor.stride()[1:])
    return torch.zeros_like(tensor).as_strided(tensor.shape, strides)


def _no_blocks(tensor: Tensor) -> Tensor:
    return tensor[:0]


_SLOTS: dict[str, Changes] = {
    "slot too large": {"slot_mapping": _set(2, 20)},
    "slot beyond 32 bits": {"slot_mapping": _set(0, 2**40)},
    "same cache twice": _same_cache(),
    "caches share blocks": _half_shared_caches(),
    "caches share a column": _overlapping_columns(),
    "key_cache blocks expanded": {"key_cache": _expanded(0)},
    "value_cache heads expanded": {"value_cache": _expanded(2)},
    "key_cache rows overlap": {"key_cache": _overlapping_rows},
}
_EMPTY_POOL: dict[str, Changes] = {"block id without blocks": {"key_cache": _no_blocks, "value_cache": _no_blocks}}

VALUES: dict[str, dict[str, Changes]] = {
    "write_kv": _SLOTS,
    "paged_attention": {**_LENGTHS, **_IDS, **_BOUNDS, **_EMPTY_POOL},
    "paged_attention_with_lse": {**_LENGTHS, **_IDS, **_BOUNDS, **_EMPTY_POOL},
    "paged_attention_append": {**_SLOTS, **_LENGTHS, **_IDS, **_BOUNDS},
    "merge_states": {},
    "copy_blocks": {**_PAIRS, "expanded": {"caches": lambda t: [t[0], _expanded(1)(t[1])]}},
    "swap_blocks": {
        **_PAIRS,
        "dst expanded": {"dst": _expanded(0)},
        "source without blocks": {"src": _no_blocks},
        "destination without blocks": {"dst": _no_blocks},
    },
    "gather_kv": {**_LENGTHS, **_IDS},
}
