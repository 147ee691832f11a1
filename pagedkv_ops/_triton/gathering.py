"""``gather_kv``: one program per sequence, a run of its positions and one head."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import checks
from . import debug
from .launch import dense, empty, launch, width
from .quantised import FORMATS, as_stored, decode, scale_of
from .replay import replayed

_TILE_ELEMENTS = 4096


@triton.jit(do_not_specialize=["table_stride_row", "max_len", "num_blocks", "grid_positions"])
def gather_kernel(
    cache_ptr,  # [N, S, Hkv, D]
    table_ptr,  # [B, W]
    seq_lens_ptr,  # [B]
    out_ptr,  # [B, max_len, Hkv, D], contiguous
    scale,  # of a quantised cache, else None
    cache_stride_block,
    cache_stride_slot,
    cache_stride_head,
    table_stride_row,
    table_stride_column,
    max_len,
    num_blocks,
    capacity,  # W * S
    grid_positions,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    FORMAT: tl.constexpr,
):
    b = (tl.program_id(0) // grid_positions).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    position = tl.program_id(0) % grid_positions * BLOCK_N + tl.arange(0, BLOCK_N)
    seq_len = tl.minimum(tl.load(seq_lens_ptr + b), capacity)
    filled = (position < seq_len) & (position < max_len)
    column = (position // BLOCK_SIZE).to(tl.int64)
    slot = (position % BLOCK_SIZE).to(tl.int64)
    block = tl.load(table_ptr + b * table_stride_row + column * table_stride_column, mask=filled, other=-1).to(tl.int64)
    d_range = tl.arange(0, BLOCK_D)
    d_mask = (d_range < D)[None, :]
    readable = ((block >= 0) & (block < num_blocks))[:, None] & d_mask
    source = block * cache_stride_block + slot * cache_stride_slot + head * cache_stride_head
    tokens = tl.load(cache_ptr + source[:, None] + d_range[None, :], readable, other=0)
    if scale is not None:
        scale_ptr = scale.ptr + (block * scale.stride_block + slot * scale.stride_slot + head * scale.stride_head)
        factor = tl.load(scale_ptr, (block >= 0) & (block < num_blocks), other=0.0)
        tokens = (decode(tokens, FORMAT) * factor[:, None]).to(out_ptr.dtype.element_ty)
    target = ((b * max_len + position) * NUM_HEADS + head) * D
    tl.store(out_ptr + target[:, None] + d_range[None, :], tokens, (position < max_len)[:, None] & d_mask)


@replayed
def gather_kv(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_len: int,
    *,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dtype = checks.check_gather_kv(cache, block_table, seq_lens, max_len, scale=scale, dtype=dtype)
    debug.check_gather(cache, block_table, seq_lens, max_len)
    num_blocks, block_size, num_heads, head_size = cache.shape
    batch, table_width = block_table.shape
    out = empty(cache, (batch, max_len, num_heads, head_size), dtype)
    block_d = width(head_size)
    block_n = max(1, _TILE_ELEMENTS // block_d)
    grid_positions = triton.cdiv(max_len, block_n)
    launch(
        gather_kernel,
        (batch * grid_positions, num_heads),
        cache,
        as_stored(cache),
        block_table,
        dense(seq_lens),
        out,
        scale_of(scale),
        *cache.stride()[:3],
        *block_table.stride(),
        max_len,
        num_blocks,
        table_width * block_size,
        grid_positions,
        NUM_HEADS=num_heads,
        BLOCK_SIZE=block_size,
        D=head_size,
        BLOCK_N=block_n,
        BLOCK_D=block_d,
        FORMAT=FORMATS.get(cache.dtype, ""),
        num_warps=4,
    )
    return out
