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
    MAX_SPLITS: tl.constexpr,
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
    all_splits = tl.arange(0, MAX_SPLITS)
    all_lse = tl.load(partial_lse_ptr + (first + all_splits * step), mask=all_splits < num_splits, other=float("-inf"))
    highest = tl.max(all_lse, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp2((all_lse - highest) * LOG2E), 0)
    dv_range = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, num_splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        lse = tl.load(partial_lse_ptr + (first + split * step), mask=split < num_splits, other=float("-inf"))
        mask = (lse != float("-inf"))[:, None] & (dv_range < DV)[None, :]  # empty splits wrote nothing else
        part = tl.load(partial_out_ptr + (first + split * step)[:, None] * DV + dv_range[None, :], mask, other=0.0)
        acc += tl.sum(part * tl.exp2((lse - highest) * LOG2E)[:, None], 0)
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
        MAX_SPLITS=config.MAX_SPLITS,
        CHUNK=min(config.MAX_SPLITS, max(1, _TILE_ELEMENTS // block_dv)),
        BLOCK_DV=block_dv,
        DEPENDENT=plan.sizes["DEPENDENT"],
        num_warps=4,
        **dependent,
    )
