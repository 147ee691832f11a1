"""Launchers of paged attention, alone and fused with the write of the new tokens."""

from __future__ import annotations

import dataclasses
import itertools
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
from .launch import TL_DTYPES, apart, compiled_for, dense, empty, launch, part_of
from .quantised import FORMATS, as_stored, compute_dtype, is_per_token, scale_of
from .replay import replayed
from .splits import combine

_LOG2E = 1.4426950408889634
_LARGEST = 3e38  # of float32
_MOST_FUSED = 128  # tokens whose slots every program compares with those of its keys
_WIDEST_FUSED = 512  # wider heads would spill registers


def attend(a: Attention, with_lse: bool = False, new: tuple[Tensor, Tensor, Tensor] | None = None) -> tuple[Any, Any]:
    """(out, lse or None) of checked arguments; ``new``: key, value and slot_mapping that the launch writes too."""
    num_tokens, num_heads, _ = a.query.shape
    out = empty(a.query, (num_tokens, num_heads, a.value_cache.size(3)))
    lse = empty(a.query, (num_tokens, num_heads), torch.float32) if with_lse else None
    if a.query.numel() == 0:
        return out, lse
    vectors = ("seq_lens", "cu_seqlens_q", "alibi_slopes", "sinks")
    a = dataclasses.replace(a, **{name: None if (v := getattr(a, name)) is None else dense(v) for name in vectors})
    for plan in config.plans(a):
        plan = config.with_programs(plan, _resident(plan, a, out, lse, new))
        parts = (out, lse, None)
        if plan.sizes["SPLIT"]:
            parts = _scratch(plan, a.query, out.size(2), a.seq_lens.size(0))
        args, meta = _arguments(plan, a, parts, new)
        launch(attention_kernel, plan.grid, a.query, *args, **meta)
        if plan.sizes["SPLIT"]:
            combine(plan, parts, out, lse, a.cu_seqlens_q)
    return out, lse


def _resident(plan: config.Plan, a: Attention, out: Tensor, lse: Tensor | None, new: Any) -> int:
    """Programs that the device runs at once, by the registers and shared memory of the compiled kernel."""
    arch, num_sms = config.device(a.query)
    parts = (out, lse, None)
    if plan.sizes["SHARES"]:  # of the types that the launch will have
        parts = (out.new_empty(4, dtype=torch.float32),) * 2 + (out.new_empty(4, dtype=torch.int32),)
    args, meta = _arguments(plan, a, parts, new)
    compiled = None if plan.num_splits == 1 else compiled_for(attention_kernel, a.query, *args, **meta)
    if compiled is None:
        return num_sms * plan.blocks_per_sm
    return config.resident(arch, num_sms, compiled.n_regs, compiled.metadata.shared, plan.options["num_warps"])


def _scratch(plan: config.Plan, query: Tensor, v_head_size: int, batch: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """What splits leave, in one allocation: outputs and lse in float32; with shares which ones each sequence has."""
    num_tokens, num_heads, _ = query.shape
    shape: tuple[int, ...] = (num_tokens, num_heads, plan.num_splits)
    if plan.sizes["SHARES"]:
        shape = (plan.grid[0], num_heads)
    rows = math.prod(shape)
    ends = list(itertools.accumulate(triton.cdiv(size, 4) * 4 for size in (rows * v_head_size, rows, 2 * batch)))
    scratch = empty(query, (ends[-1],), torch.float32)
    part = part_of(scratch, scratch.narrow(0, 0, rows * v_head_size).view(*shape, v_head_size))
    part_lse = part_of(scratch, scratch.narrow(0, ends[0], rows).view(shape))
    if not plan.sizes["SHARES"]:
        return part, part_lse, None
    return part, part_lse, part_of(scratch, scratch.narrow(0, ends[1], 2 * batch).view(torch.int32).view(batch, 2))


def _arguments(
    plan: config.Plan,
    a: Attention,
    parts: tuple[Tensor, Tensor | None, Tensor | None],
    new: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Of the kernel's launch."""
    query, key_cache, value_cache, block_table = a.query, a.key_cache, a.value_cache, a.block_table
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
        COMPUTE=TL_DTYPES[compute_dtype(query, key_cache)],
        K_FORMAT=FORMATS.get(key_cache.dtype, ""),
        V_FORMAT=FORMATS.get(value_cache.dtype, ""),
        K_TOKENS=is_per_token(a.k_scale),
        V_TOKENS=is_per_token(a.v_scale),
        OFFSETS=_offsets(a),
        SAME_STRIDES=key_cache.stride()[:2] == value_cache.stride()[:2],
    )
    args = (
        Tokens(query, *query.stride()[:2]),
        Cache(as_stored(key_cache), *key_cache.stride()[:3]),
        Cache(as_stored(value_cache), *value_cache.stride()[:3]),
        Table(block_table, block_table.stride(1)),
        *(block_table.stride(0), a.seq_lens, a.cu_seqlens_q, a.alibi_slopes, a.sinks),
        *(scale_of(a.k_scale), scale_of(a.v_scale)),
        None if new is None else _with_strides(*new),
        *(*parts, *sizes, 0 if new is None else new[2].size(0), *windows),
        *_scales(query.size(2) ** -0.5 if a.scale is None else a.scale, a.softcap),
    )
    return args, {"SPEC": spec, **plan.options}


def _scales(scale: float, softcap: float) -> tuple[float, float]:
    """The factors on q.k and on the cap, in base 2."""
    if softcap == 0:
        return scale * _LOG2E, 0.0
    softcap = min(max(softcap, 1e-30), 1e30)  # beyond these it changes no weight, but would overflow or vanish itself
    return min(max(scale / softcap, -_LARGEST), _LARGEST), softcap * _LOG2E


def _offsets(a: Attention) -> tl.dtype:
    """Slots and columns are many: 64 bits for their offsets take 20 registers and are for strides that need them."""
    scales = [scale for scale in (a.k_scale, a.v_scale) if is_per_token(scale)]
    stride = max(cache.stride(1) for cache in (a.key_cache, a.value_cache, *scales))
    columns = (a.block_table.size(1) - 1) * a.block_table.stride(1)
    return tl.int32 if max((a.key_cache.size(1) - 1) * stride, columns) < 2**31 else tl.int64


def _with_strides(key: Tensor, value: Tensor, slot_mapping: Tensor) -> New:
    return New(key, value, slot_mapping, *key.stride()[:2], *value.stride()[:2])


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
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """One launch for a decode step (see ``append_kernel``), else a write and an attention launch of one stream.

    ``num_splits=1`` takes two: it promises the same bits in any chunking, hence the same loop as for longer chunks. So
    do quantised caches, whose new tokens would have to be quantised by every program that reads them.
    """
    op = "paged_attention_append"
    caches, scale_caches = (key_cache, value_cache), (k_scale_cache, v_scale_cache)
    a = checks.check_paged_attention_append(
        query, key, value, *caches, slot_mapping, block_table, seq_lens, cu_seqlens_q, *scale_caches, **options
    )
    config.check_head_size(op, a)
    scales = (options.get("k_scale"), options.get("v_scale"), *scale_caches)
    debug.check_write(op, key, value, *caches, slot_mapping, *scales)
    debug.check_attention(op, a)
    written = [cache for cache in (*caches, *scale_caches) if cache is not None]
    query, key, value = (apart(tensor, *written) for tensor in (query, key, value))
    new = (key, value, dense(slot_mapping))
    if cu_seqlens_q is not None or a.num_splits == 1 or not _is_fused(*new, *caches):
        writing.store(key, value, *caches, slot_mapping, *scales)
        new = None
    return attend(dataclasses.replace(a, query=query), new=new)[0]


def _is_fused(key: Tensor, value: Tensor, slot_mapping: Tensor, key_cache: Tensor, value_cache: Tensor) -> bool:
    """Whether the attention kernel can write the new tokens of a decode step too."""
    same_types = key.dtype == key_cache.dtype and value.dtype == value_cache.dtype
    fits = max(key.size(2), value.size(2)) <= _WIDEST_FUSED
    return same_types and fits and 0 < slot_mapping.size(0) <= _MOST_FUSED
