"""Launchers of paged attention, alone and fused with the write of the new tokens."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from .. import checks
from . import config, debug, writing
from .attention_kernel import attention_kernel, combine_kernel
from .launch import TL_DTYPES, launch

_LOG2E = 1.4426950408889634
_MAX_POSITION = 2**31 - 1024  # positions are int32 in the kernel, up to one tile past the end
_COMBINE_CHUNK = 16


def _attend(
    query: Tensor,  # [T, Hq, D]
    key_cache: Tensor,  # [N, S, Hkv, D]
    value_cache: Tensor,  # [N, S, Hkv, Dv]
    block_table: Tensor,  # [B, W]
    seq_lens: Tensor,  # [B]
    cu_seqlens_q: Tensor | None = None,  # [B+1]
    *,
    with_lse: bool,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor | None]:
    num_tokens, num_heads, head_size = query.shape
    num_blocks, block_size, num_kv_heads, v_head_size = value_cache.shape
    batch, table_width = block_table.shape
    out = query.new_empty(num_tokens, num_heads, v_head_size)
    lse = query.new_empty(num_tokens, num_heads, dtype=torch.float32) if with_lse else None
    if query.numel() == 0:
        return out, lse
    group = num_heads // num_kv_heads
    compute = torch.promote_types(query.dtype, key_cache.dtype)
    arch, num_sms = config.device(query)
    invariant = num_splits == 1
    tiles = config.attention_config(
        arch, num_tokens, batch, group, max(head_size, v_head_size), compute.itemsize, invariant
    )
    packed = cu_seqlens_q is not None
    tile_heads = min(group, tiles.block_m)
    tile_tokens = tiles.block_m // tile_heads if packed else 1
    num_tiles = num_tokens // tile_tokens + batch + 1 if packed else num_tokens
    grid_heads = num_kv_heads * triton.cdiv(group, tile_heads)
    capacity = min(table_width * block_size, _MAX_POSITION)
    if num_splits == 0:
        num_splits = config.num_splits(num_tiles * grid_heads, capacity, num_sms * tiles.blocks_per_sm)
    num_splits = min(num_splits, config.MAX_SPLITS)
    split = num_splits > 1
    part, part_lse = out, lse
    if split:
        part = query.new_empty(num_tokens, num_heads, num_splits, v_head_size, dtype=torch.float32)
        part_lse = query.new_empty(num_tokens, num_heads, num_splits, dtype=torch.float32)
    scale = head_size**-0.5 if scale is None else scale
    launch(
        attention_kernel,
        (num_tiles, grid_heads, num_splits),
        query,
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens.contiguous(),
        cu_seqlens_q.contiguous() if packed else None,
        None if alibi_slopes is None else alibi_slopes.contiguous(),
        None if sinks is None else sinks.contiguous(),
        part,
        part_lse,
        query.stride(0),
        query.stride(1),
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        *block_table.stride(),
        num_tokens,
        batch,
        num_blocks,
        capacity,
        num_splits,
        min(window_left, _MAX_POSITION),
        min(window_right, _MAX_POSITION),
        scale / softcap if softcap else scale * _LOG2E,
        softcap * _LOG2E,
        NUM_HEADS=num_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        D=head_size,
        DV=v_head_size,
        PACKED=packed,
        CAUSAL=causal,
        WINDOW_LEFT=window_left >= 0,
        WINDOW_RIGHT=window_right >= 0,
        SOFTCAP=softcap > 0,
        ALIBI=alibi_slopes is not None,
        SINKS=sinks is not None,
        SPLIT=split,
        STORE_LSE=part_lse is not None,
        ONE_LOOP=invariant,
        COMPUTE=TL_DTYPES[compute],
        TILE_HEADS=tile_heads,
        TILE_TOKENS=tile_tokens,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=config.padded(head_size),
        BLOCK_DV=config.padded(v_head_size),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )
    if split:
        launch(
            combine_kernel,
            (num_tokens * num_heads,),
            query,
            part,
            part_lse,
            out,
            lse,
            num_splits,
            DV=v_head_size,
            STORE_LSE=with_lse,
            MAX_SPLITS=config.MAX_SPLITS,
            CHUNK=_COMBINE_CHUNK,
            BLOCK_DV=config.padded(v_head_size),
            num_warps=2,
        )
    return out, lse


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
    """Two launches of one stream: within one, a tile could read a slot before another program has written it."""
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
    writing.store(key, value, key_cache, value_cache, slot_mapping)
    return _attend(*attention, with_lse=False, **options)[0]
