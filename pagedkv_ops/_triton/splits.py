"""Joins the splits that attention left: one program per query token and head."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from . import config
from .attention_tile import LN2, LOG2E
from .launch import launch

_CHUNK = 16


@triton.jit(do_not_specialize=["num_splits"])
def combine_kernel(
    partial_out_ptr,  # [T * Hq, num_splits, Dv] float32
    partial_lse_ptr,  # [T * Hq, num_splits]
    out_ptr,  # [T * Hq, Dv]
    lse_ptr,  # [T * Hq]
    num_splits,
    DV: tl.constexpr,
    STORE_LSE: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    partial_lse_ptr += row * num_splits
    all_splits = tl.arange(0, MAX_SPLITS)
    all_lse = tl.load(partial_lse_ptr + all_splits, mask=all_splits < num_splits, other=float("-inf"))
    highest = tl.max(all_lse, 0)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    total = tl.sum(tl.exp2((all_lse - highest) * LOG2E), 0)
    dv_range = tl.arange(0, BLOCK_DV)
    acc = tl.zeros([BLOCK_DV], tl.float32)
    for start in range(0, num_splits, CHUNK):
        split = start + tl.arange(0, CHUNK)
        lse = tl.load(partial_lse_ptr + split, mask=split < num_splits, other=float("-inf"))
        mask = (lse != float("-inf"))[:, None] & (dv_range < DV)[None, :]
        offsets = (row * num_splits + split)[:, None] * DV + dv_range[None, :]
        part = tl.load(partial_out_ptr + offsets, mask, other=0.0)
        acc += tl.sum(part * tl.exp2((lse - highest) * LOG2E)[:, None], 0)
    seen = total != 0.0  # true for NaN
    total = tl.where(seen, total, 1.0)
    acc = tl.where(seen, acc / total, 0.0)
    tl.store(out_ptr + row * DV + dv_range, acc.to(out_ptr.dtype.element_ty), mask=dv_range < DV)
    if STORE_LSE:
        lse = tl.where(seen, highest + tl.log2(total) * LN2, float("-inf"))
        tl.store(lse_ptr + row, tl.where(highest == float("inf"), highest, lse))  # not inf - inf


def combine(part: Tensor, part_lse: Tensor, out: Tensor, lse: Tensor | None) -> None:
    """``part`` [T, Hq, num_splits, Dv] float32 and ``part_lse`` [T, Hq, num_splits] into ``out`` and ``lse``."""
    num_tokens, num_heads, num_splits, v_head_size = part.shape
    launch(
        combine_kernel,
        (num_tokens * num_heads,),
        out,
        part,
        part_lse,
        out,
        lse,
        num_splits,
        DV=v_head_size,
        STORE_LSE=lse is not None,
        MAX_SPLITS=config.MAX_SPLITS,
        CHUNK=_CHUNK,
        BLOCK_DV=config.padded(v_head_size),
        num_warps=2,
    )
