"""Joins the splits that attention left: one program per query token and head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from . import config
from .attention_tile import LN2, LOG2E
from .launch import launch
from .shares import query_rows

_TILE_ELEMENTS = 4096  # of splits that are read at once


@triton.jit(do_not_specialize=["num_tokens", "num_splits"])
def combine_kernel(
    partial_out_ptr,  # [T * Hq, num_splits, Dv] float32, or of the shares [number of shares, Hq, Dv]
    partial_lse_ptr,  # [T * Hq, num_splits], or [number of shares, Hq]
    out_ptr,  # [T * Hq, Dv]
    lse_ptr,  # [T * Hq], or None
    shares_ptr,  # [B, 2], first share and number of shares of each sequence, or None
    cu_seqlens_ptr,  # [B+1], or None
    num_tokens,
    num_splits,
    NUM_HEADS: tl.constexpr,
    DV: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    if DEPENDENT:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    first, step = row * num_splits, 1
    if shares_ptr is not None:
        b, head = row // NUM_HEADS, row % NUM_HEADS
        if cu_seqlens_ptr is not None:
            first_row, query_len = query_rows(cu_seqlens_ptr, b, True, num_tokens)
            if query_len != 1:
                return
            row = first_row.to(tl.int64) * NUM_HEADS + head
        first, step = tl.load(shares_ptr + 2 * b).to(tl.int64) * NUM_HEADS + head, NUM_HEADS
        num_splits = tl.load(shares_ptr + 2 * b + 1)
    dv_range = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    for start in range(0, num_splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        mask = split < num_splits
        lse = tl.load(partial_lse_ptr + (first + split * step), mask, other=float("-inf"))
        rows = partial_out_ptr + (first + split * step) * DV
        part = tl.load(rows[:, None] + dv_range[None, :], mask[:, None] & (dv_range < DV)[None, :], other=0.0)
        new_highest = tl.maximum(highest, tl.max(lse, 0))
        base = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        weight = tl.exp2((lse - base) * LOG2E)
        decay = tl.exp2((highest - base) * LOG2E)
        total = total * decay + tl.sum(weight, 0)
        acc = acc * decay + tl.sum(part * weight[:, None], 0)
        highest = new_highest
    seen = total != 0.0  # true for NaN
    total = tl.where(seen, total, 1.0)
    acc = tl.where(seen, acc / total, 0.0)
    tl.store(out_ptr + row * DV + dv_range, acc.to(out_ptr.dtype.element_ty), mask=dv_range < DV)
    if lse_ptr is not None:
        lse = tl.where(seen, highest + tl.log2(total) * LN2, float("-inf"))
        tl.store(lse_ptr + row, tl.where(highest == float("inf"), highest, lse))  # not inf - inf


def combine(
    plan: config.Plan,
    parts: tuple[Tensor, Tensor, Tensor | None],  # as the kernel's first two, and shares_ptr
    out: Tensor,
    lse: Tensor | None,
    cu_seqlens_q: Tensor | None,
) -> None:
    num_tokens, num_heads, v_head_size = out.shape
    part, part_lse, shares = parts
    block_dv = config.padded(v_head_size)
    dependent = {"launch_pdl": True} if plan.sizes["DEPENDENT"] else {}
    launch(
        combine_kernel,
        (num_heads * (num_tokens if shares is None else shares.size(0)),),
        out,
        part,
        part_lse,
        out,
        lse,
        shares,
        None if shares is None else cu_seqlens_q,
        num_tokens,
        plan.num_splits,
        NUM_HEADS=num_heads,
        DV=v_head_size,
        CHUNK=min(config.MAX_SPLITS, max(1, _TILE_ELEMENTS // block_dv)),
        BLOCK_DV=block_dv,
        DEPENDENT=plan.sizes["DEPENDENT"],
        num_warps=4,
        **dependent,
    )
