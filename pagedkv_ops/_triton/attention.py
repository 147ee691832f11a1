"""Launchers of paged attention, alone and fused with the write of the new tokens."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import checks
from ..arguments import Attention
from . import config, debug, writing
from .arguments import Cache, New, Spec, Table, Tokens
from .attention_kernel import attention_kernel
from .launch import TL_DTYPES, apart, dense, empty, launch, part_of
from .replay import replayed
from .splits import combine

_LOG2E = 1.4426950408889634
_LARGEST = 3e38  # of float32
_MOST_FUSED = 128  # tokens whose slots every program compares with those of its keys
_WIDEST_FUSED = 512  # wider heads would spill registers


def attend(a: Attention, with_lse: bool = False, new: tuple[Tensor, Tensor, Tensor] | None = None) -> tuple[Any, Any]:
    """(out, lse or None) of checked arguments; ``new``: key, value and slot_mapping that the launch writes too."""
    num_tokens, num_heads, _ = a.query.shape
    v_head_size = a.value_cache.size(3)
    out = empty(a.query, (num_tokens, num_heads, v_head_size))
    lse = empty(a.query, (num_tokens, num_heads), torch.float32) if with_lse else None
    if a.query.numel() == 0:
        return out, lse
    plan = config.plan(a)
    part, part_lse = out, lse
    if plan.num_splits > 1:
        part, part_lse = _scratch(a.query, num_tokens, num_heads, plan.num_splits, v_head_size)
    _launch(plan, a, part, part_lse, new)
    if plan.num_splits > 1:
        combine(part, part_lse, out, lse)
    return out, lse


def _scratch(query: Tensor, *shape: int) -> tuple[Tensor, Tensor]:
    """float32 [*shape] and [*shape[:-1]] of one allocation, both at multiples of 16 bytes."""
    size = triton.cdiv(math.prod(shape), 4) * 4
    scratch = empty(query, (size + math.prod(shape[:-1]),), torch.float32)
    part = part_of(scratch, scratch.narrow(0, 0, math.prod(shape)).view(shape))
    return part, part_of(scratch, scratch.narrow(0, size, math.prod(shape[:-1])).view(shape[:-1]))


def _launch(
    plan: config.Plan,
    a: Attention,
    part: Tensor,
    part_lse: Tensor | None,
    new: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    query, key_cache, value_cache, block_table = a.query, a.key_cache, a.value_cache, a.block_table
    vectors = (None if v is None else dense(v) for v in (a.seq_lens, a.cu_seqlens_q, a.alibi_slopes, a.sinks))
    sizes = (query.size(0), block_table.size(0), key_cache.size(0), plan.capacity, plan.num_splits)
    # what is wider than the table or the batch is unlimited, as -1: positions plus windows stay below 2**31
    windows = (min(a.window_left, plan.capacity), min(a.window_right, query.size(0)))
    spec = Spec(
        **plan.sizes,
        CAUSAL=a.causal,
        WINDOW_LEFT=a.window_left >= 0,
        WINDOW_RIGHT=a.window_right >= 0,
        SOFTCAP=a.softcap > 0,
        SERIES=a.softcap > 100,
        ALIBI=a.alibi_slopes is not None,
        COMPUTE=TL_DTYPES[torch.promote_types(query.dtype, key_cache.dtype)],
        OFFSETS=_offsets(key_cache, value_cache, block_table),
    )
    launch(
        attention_kernel,
        plan.grid,
        query,
        Tokens(query, *query.stride()[:2]),
        Cache(key_cache, *key_cache.stride()[:3]),
        Cache(value_cache, *value_cache.stride()[:3]),
        Table(block_table, block_table.stride(1)),
        *(block_table.stride(0), *vectors, None if new is None else _with_strides(*new)),
        *(part, part_lse, *sizes, 0 if new is None else new[2].size(0), *windows),
        *_scales(query.size(2) ** -0.5 if a.scale is None else a.scale, a.softcap),
        SPEC=spec,
        **plan.options,
    )


def _scales(scale: float, softcap: float) -> tuple[float, float]:
    """The factors on q.k and on the cap, in base 2."""
    if softcap == 0:
        return scale * _LOG2E, 0.0
    softcap = min(max(softcap, 1e-30), 1e30)  # beyond these it changes no weight, but would overflow or vanish itself
    return min(max(scale / softcap, -_LARGEST), _LARGEST), softcap * _LOG2E


def _offsets(key_cache: Tensor, value_cache: Tensor, block_table: Tensor) -> tl.dtype:
    """Slots and columns are many: 64 bits for their offsets take 20 registers and are for strides that need them."""
    slots = (key_cache.size(1) - 1) * max(key_cache.stride(1), value_cache.stride(1))
    columns = (block_table.size(1) - 1) * block_table.stride(1)
    return tl.int32 if max(slots, columns) < 2**31 else tl.int64


def _with_strides(key: Tensor, value: Tensor, slot_mapping: Tensor) -> New:
    return New(key, value, dense(slot_mapping), *key.stride()[:2], *value.stride()[:2])


def _checked(op: str, *args: Any, **options: Any) -> Attention:
    attention = checks.check_paged_attention(*args, op=op, **options)
    config.check_head_size(op, attention)
    debug.check_attention(op, attention)
    return attention


@replayed
def paged_attention(*args: Any, **options: Any) -> Tensor:
    return attend(_checked("paged_attention", *args, **options))[0]


@replayed
def paged_attention_with_lse(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return attend(_checked("paged_attention_with_lse", *args, **options), with_lse=True)


@replayed
def paged_attention_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *args: Any,
    **options: Any,
) -> Tensor:
    """One launch for a decode step (see ``append_kernel``), else a write and an attention launch of one stream.

    ``num_splits=1`` takes two: it promises the same bits in any chunking, hence the same loop as for longer chunks.
    """
    op = "paged_attention_append"
    caches = (key_cache, value_cache)
    a = checks.check_paged_attention_append(query, key, value, *caches, slot_mapping, *args, **options)
    config.check_head_size(op, a)
    debug.check_write(op, *caches, slot_mapping)
    debug.check_attention(op, a)
    query, key, value = (apart(tensor, *caches) for tensor in (query, key, value))
    new = (key, value, slot_mapping)
    if a.cu_seqlens_q is not None or a.num_splits == 1 or not _is_fused(*new, *caches):
        writing.store(key, value, *caches, slot_mapping)
        new = None
    return attend(dataclasses.replace(a, query=query), new=new)[0]


def _is_fused(key: Tensor, value: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether the attention kernel can write the new tokens of a decode step too."""
    same_types = key.dtype == key_cache.dtype and value.dtype == value_cache.dtype
    fits = max(key.size(2), value.size(2)) <= _WIDEST_FUSED
    return same_types and fits and 0 < slot_mapping.size(0) <= _MOST_FUSED
