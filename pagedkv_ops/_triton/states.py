"""``merge_states``: one program per token and a few of its heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import checks
from .attention_tile import LN2, LOG2E
from .launch import empty, head_blocks, launch, width
from .replay import replayed


@triton.jit
def _part(out, weight, lse, other_lse):
    """A part's share; one of weight 0 has none, even where it is NaN."""
    weight = tl.where(other_lse == float("-inf"), 1.0, weight)  # also of +inf
    weight = tl.where(lse == float("-inf"), 0.0, weight)[:, None]
    return tl.where(weight == 0.0, 0.0, weight * out)


@triton.jit
def merge_kernel(
    out_a_ptr,  # [T, Hq, Dv]
    lse_a_ptr,  # [T, Hq]
    out_b_ptr,
    lse_b_ptr,
    out_ptr,
    lse_ptr,
    out_a_stride_token,
    out_a_stride_head,
    lse_a_stride_token,
    lse_a_stride_head,
    out_b_stride_token,
    out_b_stride_head,
    lse_b_stride_token,
    lse_b_stride_head,
    NUM_HEADS: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)).to(tl.int64)
    head_mask = head < NUM_HEADS
    lse_a = tl.load(lse_a_ptr + token * lse_a_stride_token + head * lse_a_stride_head, head_mask, other=float("-inf"))
    lse_b = tl.load(lse_b_ptr + token * lse_b_stride_token + head * lse_b_stride_head, head_mask, other=float("-inf"))
    highest = tl.maximum(lse_a, lse_b)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weight_a = tl.exp2((lse_a - highest) * LOG2E)
    weight_b = tl.exp2((lse_b - highest) * LOG2E)
    total = weight_a + weight_b
    seen = total != 0.0  # true for NaN
    total = tl.where(seen, total, 1.0)
    lse = tl.where(seen, highest + tl.log2(total) * LN2, float("-inf"))
    lse = tl.where(highest == float("inf"), highest, lse)  # not inf - inf
    tl.store(lse_ptr + token * NUM_HEADS + head, lse, head_mask)

    dv_range = tl.arange(0, BLOCK_DV)
    mask = head_mask[:, None] & (dv_range < DV)[None, :]
    out_a_ptr += token * out_a_stride_token
    out_b_ptr += token * out_b_stride_token
    out_a = tl.load(out_a_ptr + head[:, None] * out_a_stride_head + dv_range[None, :], mask, other=0.0).to(tl.float32)
    out_b = tl.load(out_b_ptr + head[:, None] * out_b_stride_head + dv_range[None, :], mask, other=0.0).to(tl.float32)
    out = _part(out_a, weight_a / total, lse_a, lse_b) + _part(out_b, weight_b / total, lse_b, lse_a)
    out_ptr += token * NUM_HEADS * DV
    tl.store(out_ptr + head[:, None] * DV + dv_range[None, :], out.to(out_ptr.dtype.element_ty), mask)


@replayed
def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    checks.check_merge_states(out_a, lse_a, out_b, lse_b)
    num_tokens, num_heads, v_head_size = out_a.shape
    out = empty(out_a, out_a.shape)
    lse = empty(out_a, lse_a.shape, torch.float32)
    heads, grid_heads = head_blocks(num_heads, v_head_size)
    launch(
        merge_kernel,
        (num_tokens, grid_heads),
        out_a,
        out_a,
        lse_a,
        out_b,
        lse_b,
        out,
        lse,
        *out_a.stride()[:2],
        *lse_a.stride(),
        *out_b.stride()[:2],
        *lse_b.stride(),
        NUM_HEADS=num_heads,
        DV=v_head_size,
        BLOCK_H=heads,
        BLOCK_DV=width(v_head_size),
        num_warps=4,
    )
    return out, lse
