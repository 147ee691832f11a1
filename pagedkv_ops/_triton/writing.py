"""``write_kv``: one program per token and a few of its heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import checks
from . import debug
from .launch import apart, dense, head_blocks, launch, width
from .replay import replayed


@triton.jit
def _store_heads(
    source_ptr, cache_ptr, head, num_heads, source_stride_head, cache_stride_head, D, BLOCK_D: tl.constexpr
):
    d_range = tl.arange(0, BLOCK_D)
    mask = (head < num_heads)[:, None] & (d_range < D)[None, :]
    new = tl.load(source_ptr + head[:, None] * source_stride_head + d_range[None, :], mask)
    if source_ptr.dtype.element_ty != cache_ptr.dtype.element_ty:
        new = new.to(tl.float32).to(cache_ptr.dtype.element_ty)
    tl.store(cache_ptr + head[:, None] * cache_stride_head + d_range[None, :], new, mask)


@triton.jit(do_not_specialize=["num_blocks"])
def write_kernel(
    key_ptr,  # [T, Hkv, D]
    value_ptr,  # [T, Hkv, Dv]
    key_cache_ptr,  # [N, S, Hkv, D]
    value_cache_ptr,  # [N, S, Hkv, Dv]
    slot_mapping_ptr,  # [<= T]
    key_stride_token,
    key_stride_head,
    value_stride_token,
    value_stride_head,
    key_cache_stride_block,
    key_cache_stride_slot,
    key_cache_stride_head,
    value_cache_stride_block,
    value_cache_stride_slot,
    value_cache_stride_head,
    num_blocks,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_mapping_ptr + token).to(tl.int64)
    block = slot // BLOCK_SIZE
    if (slot < 0) | (block >= num_blocks):
        return
    offset = slot % BLOCK_SIZE
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    key_ptr += token * key_stride_token
    key_cache_ptr += block * key_cache_stride_block + offset * key_cache_stride_slot
    _store_heads(key_ptr, key_cache_ptr, head, NUM_HEADS, key_stride_head, key_cache_stride_head, D, BLOCK_D)
    value_ptr += token * value_stride_token
    value_cache_ptr += block * value_cache_stride_block + offset * value_cache_stride_slot
    _store_heads(value_ptr, value_cache_ptr, head, NUM_HEADS, value_stride_head, value_cache_stride_head, DV, BLOCK_DV)


def store(key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor) -> None:
    """The write itself, for arguments that were checked."""
    key, value = (apart(new, key_cache, value_cache) for new in (key, value))
    num_blocks, block_size, num_heads, head_size = key_cache.shape
    v_head_size = value_cache.size(3)
    heads, grid_heads = head_blocks(num_heads, head_size, v_head_size)
    launch(
        write_kernel,
        (slot_mapping.size(0), grid_heads),
        key_cache,
        key,
        value,
        key_cache,
        value_cache,
        dense(slot_mapping),
        *key.stride()[:2],
        *value.stride()[:2],
        *key_cache.stride()[:3],
        *value_cache.stride()[:3],
        num_blocks,
        NUM_HEADS=num_heads,
        BLOCK_SIZE=block_size,
        D=head_size,
        DV=v_head_size,
        BLOCK_H=heads,
        BLOCK_D=width(head_size),
        BLOCK_DV=width(v_head_size),
        num_warps=4,
    )


@replayed
def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    **scales: Tensor | None,
) -> None:
    checks.check_write_kv(key, value, key_cache, value_cache, slot_mapping, **scales)
    debug.check_write("write_kv", key_cache, value_cache, slot_mapping)
    store(key, value, key_cache, value_cache, slot_mapping)
