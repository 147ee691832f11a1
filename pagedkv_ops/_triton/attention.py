"""Launchers of paged attention, alone and fused with the write of the new tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from .. import checks
from . import config, debug, writing
from .arguments import Cache, New, Spec, Table, Tokens
from .attention_kernel import attention_kernel
from .launch import TL_DTYPES, apart, launch
from .splits import combine

_LOG2E = 1.4426950408889634
_LARGEST = 3e38  # of float32
_MOST_FUSED = 128  # tokens whose slots every program compares with those of its keys
_WIDEST_FUSED = 512  # wider heads would spill registers


def _attend(
    query: Tensor,  # [T, Hq, D]
    key_cache: Tensor,  # [N, S, Hkv, D]
    value_cache: Tensor,  # [N, S, Hkv, Dv]
    block_table: Tensor,  # [B, W]
    seq_lens: Tensor,  # [B]
    cu_seqlens_q: Tensor | None = None,  # [B+1]
    *,
    with_lse: bool,
    num_splits: int = 0,
    new: tuple[Tensor, Tensor, Tensor] | None = None,  # key, value, slot_mapping to write in the same launch
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    num_tokens, num_heads, _ = query.shape
    out = query.new_empty(num_tokens, num_heads, value_cache.size(3))
    lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32) if with_lse else None
    if query.numel() == 0:
        return out, lse
    plan = config.plan(query, key_cache, value_cache, block_table, cu_seqlens_q is not None, num_splits)
    part, part_lse = out, lse
    if plan.num_splits > 1:
        part = query.new_empty(num_tokens, num_heads, plan.num_splits, value_cache.size(3), dtype=torch.float32)
        part_lse = query.new_empty(num_tokens, num_heads, plan.num_splits, dtype=torch.float32)
    indices = (block_table, seq_lens.contiguous(), None if cu_seqlens_q is None else cu_seqlens_q.contiguous())
    _launch(plan, query, key_cache, value_cache, indices, part, part_lse, new, **options)
    if plan.num_splits > 1:
        combine(part, part_lse, out, lse)
    return out, lse


def _launch(
    plan: config.Plan,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    indices: tuple[Tensor, Tensor, Tensor | None],
    part: Tensor,
    part_lse: Tensor | None,
    new: tuple[Tensor, Tensor, Tensor] | None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    **_: Tensor | None,  # scales of quantised caches, which the checks refuse
) -> None:
    block_table, seq_lens, cu_seqlens_q = indices
    of_heads = (None if tensor is None else tensor.contiguous() for tensor in (alibi_slopes, sinks))
    sizes = (query.size(0), block_table.size(0), key_cache.size(0), plan.capacity, plan.num_splits)
    # what is wider than the table or the batch is unlimited, as -1: positions plus windows stay below 2**31
    windows = (min(window_left, plan.capacity), min(window_right, query.size(0)))
    spec = Spec(
        **plan.sizes,
        CAUSAL=causal,
        WINDOW_LEFT=window_left >= 0,
        WINDOW_RIGHT=window_right >= 0,
        SOFTCAP=softcap > 0,
        SERIES=softcap > 100,
        ALIBI=alibi_slopes is not None,
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
        *(block_table.stride(0), seq_lens, cu_seqlens_q, *of_heads, None if new is None else _with_strides(*new)),
        *(part, part_lse, *sizes, 0 if new is None else new[2].size(0), *windows),
        *_scales(query.size(2) ** -0.5 if scale is None else scale, softcap),
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
    return New(key, value, slot_mapping.contiguous(), *key.stride()[:2], *value.stride()[:2])


def _checked(
    op: str,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor | None]:
    tensors = (query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q)
    checks.check_paged_attention(*tensors, op=op, **options)
    config.check_head_size(op, query, key_cache, value_cache)
    debug.check_attention(op, *tensors, **options)
    return _attend(*tensors, with_lse=op == "paged_attention_with_lse", **options)


def paged_attention(*args: Any, **options: Any) -> Tensor:
    return _checked("paged_attention", *args, **options)[0]


def paged_attention_with_lse(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    return _checked("paged_attention_with_lse", *args, **options)


def paged_attention_append(
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
) -> Tensor:
    """One launch for a decode step (see ``append_kernel``), else a write and an attention launch of one stream.

    ``num_splits=1`` takes two: it promises the same bits in any chunking, hence the same loop as for longer chunks.
    """
    op = "paged_attention_append"
    attention = (query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q)
    checks.check_paged_attention_append(
        query,
        key,
        value,
        *attention[1:3],
        slot_mapping,
        *attention[3:],
        k_scale_cache=k_scale_cache,
        v_scale_cache=v_scale_cache,
        **options,
    )
    config.check_head_size(op, query, key_cache, value_cache)
    debug.check_write(op, key_cache, value_cache, slot_mapping)
    debug.check_attention(op, *attention, **options)
    query, key, value = (apart(tensor, key_cache, value_cache) for tensor in (query, key, value))
    new = (key, value, slot_mapping)
    if cu_seqlens_q is not None or options.get("num_splits") == 1 or not _is_fused(*new, key_cache, value_cache):
        writing.store(key, value, key_cache, value_cache, slot_mapping)
        new = None
    return _attend(query, *attention[1:], with_lse=False, new=new, **options)[0]


def _is_fused(key: Tensor, value: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether the attention kernel can write the new tokens of a decode step too."""
    same_types = key.dtype == key_cache.dtype and value.dtype == value_cache.dtype
    fits = max(key.size(2), value.size(2)) <= _WIDEST_FUSED
    return same_types and fits and 0 < slot_mapping.size(0) <= _MOST_FUSED
