"""Attention cases over quantised caches: what their tables stand for is what is stored times its scale."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from pagedkv_ops import reference

from .builders import Case, make_caches, make_case, sliced

TYPES = (torch.int8, torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
KINDS = ("tensor", "head", "token")  # what has a scale of its own


def poison_of(dtype: torch.dtype) -> float:
    """What no result may show; int8, which has no NaN, is hidden by a NaN of its scale."""
    return 127.0 if dtype == torch.int8 else math.nan


def new_scales(kind: str, dtype: torch.dtype, rows: Tensor, cache: Tensor) -> Tensor:
    """Fixed scales that some of ``rows`` [tokens, Hkv, D] exceed, or a head-major cache of scales full of NaN."""
    if kind == "token":
        return torch.full((cache.size(0), cache.size(2), cache.size(1)), math.nan).transpose(1, 2)
    most = rows.float().abs().amax() if rows.numel() else torch.tensor(1.0)
    scale = 0.9 * most / LARGEST[dtype]
    return scale[None] if kind == "tensor" else scale * torch.linspace(1.0, 1.5, cache.size(2))


def write_options(kinds: tuple[str, str], scales: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    names = (f"{letter}_scale" + "_cache" * (kind == "token") for letter, kind in zip("kv", kinds, strict=True))
    return dict(zip(names, scales, strict=True))


def make_quantised(types: tuple[torch.dtype, torch.dtype], kinds: tuple[str, str], **shape: Any) -> tuple[Case, Any]:
    """A case whose options hold its scales for reading, and the options of a write into its caches."""
    case = make_case(**shape)
    spec, size = case.spec, case.key_cache.shape
    tokens = [torch.cat(rows) for rows in (case.keys, case.values)]
    head_sizes = (size[3], case.value_cache.size(3))
    caches = tuple(
        make_caches(*size[:3], *head_sizes, dtype, spec.layout, poison_of(dtype))[i] for i, dtype in enumerate(types)
    )
    scales = tuple(map(new_scales, kinds, types, tokens, caches))
    written = write_options(kinds, scales)
    case.options.update(k_scale=scales[0], v_scale=scales[1])
    case = replace(case, key_cache=caches[0], value_cache=caches[1])
    for b, seq_len in enumerate(spec.seq_lens):
        visible = [p for p in range(seq_len) if int(case.block_table[b, p // spec.block_size]) < size[0]]
        slots = torch.tensor([case.slots(b, range(p, p + 1))[0] for p in visible], dtype=torch.int64)
        reference.write_kv(case.keys[b][visible], case.values[b][visible], *caches, slots, **written)
        blocks, offsets = slots // spec.block_size, slots % spec.block_size
        for rows, cache, scale in zip((case.keys, case.values), caches, scales, strict=True):
            used = scale[blocks, offsets] if scale.dim() == 3 else scale
            exact = torch.zeros(rows[b].shape, dtype=torch.float64)
            exact[visible] = cache[blocks, offsets].double() * used.double()[..., None]
            rows[b] = exact
    return case, written


def append_args(case: Case) -> tuple[Any, ...]:
    """The last query token of each sequence is written anew: what is stored comes out as it is."""
    key, value = (torch.zeros(case.query.size(0), *cache.shape[2:]) for cache in (case.key_cache, case.value_cache))
    slots = torch.full((case.query.size(0),), -1, dtype=case.seq_lens.dtype)
    row = -1
    for b, (query_len, seq_len) in enumerate(zip(case.spec.query_lens, case.spec.seq_lens, strict=True)):
        row += query_len
        if query_len and seq_len:
            key[row], value[row] = case.keys[b][-1], case.values[b][-1]
            slots[row] = case.slots(b, range(seq_len - 1, seq_len))[0]
    if case.spec.strided:
        key, value = sliced(key), sliced(value)
    query, *caches = case.args[:3]
    return (query, key, value, *caches, slots, *case.args[3:])
