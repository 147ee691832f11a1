"""``write_kv``: one program per token and a few of its heads."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .. import checks
from ..checks import QUANTISED_MAX
from . import debug
from .launch import apart, dense, head_blocks, launch, width
from .quantised import FORMATS, as_stored, encode, new_scale, scale_of
from .replay import replayed


@triton.jit
def _store_heads(
    source_ptr,
    cache_ptr,
    scale,  # a Scale, or None
    block,
    offset,
    head,
    num_heads,
    source_stride_head,
    cache_stride_head,
    D,
    BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
    LARGEST: tl.constexpr,
    DYNAMIC: tl.constexpr,  # the scale is written, not read
):
    d_range = tl.arange(0, BLOCK_D)
    mask = (head < num_heads)[:, None] & (d_range < D)[None, :]
    source = source_ptr + head[:, None] * source_stride_head + d_range[None, :]
    if scale is None:
        new = tl.load(source, mask)
        if source_ptr.dtype.element_ty != cache_ptr.dtype.element_ty:
            new = new.to(tl.float32).to(cache_ptr.dtype.element_ty)
    else:
        new = tl.load(source, mask, other=0.0).to(tl.float32)
        scale_ptr = scale.ptr + (block * scale.stride_block + offset * scale.stride_slot + head * scale.stride_head)
        if DYNAMIC:
            factor = new_scale(new, LARGEST)
            tl.store(scale_ptr, factor, head < num_heads)
        else:
            factor = tl.load(scale_ptr, head < num_heads, other=1.0)
        new = encode(new, factor, LARGEST, FORMAT)
    tl.store(cache_ptr + head[:, None] * cache_stride_head + d_range[None, :], new, mask)


@triton.jit(do_not_specialize=["num_blocks"])
def write_kernel(
    key_ptr,  # [T, Hkv, D]
    value_ptr,  # [T, Hkv, Dv]
    key_cache_ptr,  # [N, S, Hkv, D]
    value_cache_ptr,  # [N, S, Hkv, Dv]
    slot_mapping_ptr,  # [<= T]
    k_scale,  # of a quantised cache, else None
    v_scale,
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
    K_FORMAT: tl.constexpr,
    V_FORMAT: tl.constexpr,
    K_LARGEST: tl.constexpr,
    V_LARGEST: tl.constexpr,
    K_DYNAMIC: tl.constexpr,
    V_DYNAMIC: tl.constexpr,
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
    _store_heads(
        key_ptr,
        key_cache_ptr,
        k_scale,
        block,
        offset,
        head,
        NUM_HEADS,
        key_stride_head,
        key_cache_stride_head,
        D,
        BLOCK_D,
        K_FORMAT,
        K_LARGEST,
        K_DYNAMIC,
    )
    value_ptr += token * value_stride_token
    value_cache_ptr += block * value_cache_stride_block + offset * value_cache_stride_slot
    _store_heads(
        value_ptr,
        value_cache_ptr,
        v_scale,
        block,
        offset,
        head,
        NUM_HEADS,
        value_stride_head,
        value_cache_stride_head,
        DV,
        BLOCK_DV,
        V_FORMAT,
        V_LARGEST,
        V_DYNAMIC,
    )


def store(
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
    """The write itself, for arguments that were checked."""
    written = [cache for cache in (key_cache, value_cache, k_scale_cache, v_scale_cache) if cache is not None]
    key, value = (apart(new, *written) for new in (key, value))
    num_blocks, block_size, num_heads, head_size = key_cache.shape
    v_head_size = value_cache.size(3)
    heads, grid_heads = head_blocks(num_heads, head_size, v_head_size)
    launch(
        write_kernel,
        (slot_mapping.size(0), grid_heads),
        key_cache,
        key,
        value,
        as_stored(key_cache),
        as_stored(value_cache),
        dense(slot_mapping),
        scale_of(k_scale if k_scale_cache is None else k_scale_cache),
        scale_of(v_scale if v_scale_cache is None else v_scale_cache),
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
        K_FORMAT=FORMATS.get(key_cache.dtype, ""),
        V_FORMAT=FORMATS.get(value_cache.dtype, ""),
        K_LARGEST=QUANTISED_MAX.get(key_cache.dtype, 0.0),
        V_LARGEST=QUANTISED_MAX.get(value_cache.dtype, 0.0),
        K_DYNAMIC=k_scale_cache is not None,
        V_DYNAMIC=v_scale_cache is not None,
        num_warps=4,
    )


@replayed
def write_kv(*args: Tensor, **scales: Tensor | None) -> None:
    checks.check_write_kv(*args, **scales)
    debug.check_write("write_kv", *args, **scales)
    store(*args, **scales)
