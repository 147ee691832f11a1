"""What every launcher shares."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

TL_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}

# Triton 3.10 changes its default; the compile report and the equal bits of num_splits=1 were looked at with fusion
OPTIONS = {"enable_fp_fusion": True}


class Launch(NamedTuple):
    kernel: Any
    grid: tuple[int, ...]
    args: tuple[Any, ...]
    meta: dict[str, Any]


_recorded: list[Launch] | None = None


@contextmanager
def recording() -> Iterator[list[Launch]]:
    """Collect launches instead of starting them: for compiling without a device, and for looking at arguments."""
    global _recorded
    _recorded = launches = []
    try:
        yield launches
    finally:
        _recorded = None


def launch(kernel: Any, grid: tuple[int, ...], like: Tensor, *args: Any, **meta: Any) -> None:
    """Start ``kernel`` on the device of ``like``; an empty grid is no work.

    Grid and arguments must come from shapes and strides: a captured CUDA graph replays them for other lengths.
    """
    if 0 in grid:
        return
    meta |= OPTIONS
    if _recorded is not None:
        _recorded.append(Launch(kernel, grid, args, meta))
        return
    with torch.cuda.device_of(like):
        kernel[grid](*args, **meta)


def apart(tensor: Tensor, *written: Tensor) -> Tensor:
    """The tensor, or a copy where it may lie in what a launch writes: its programs run in any order."""
    storage = tensor.untyped_storage()._cdata
    return tensor.clone() if any(cache.untyped_storage()._cdata == storage for cache in written) else tensor


def width(size: int) -> int:
    """Of a range that covers ``size``, which may be 0."""
    return max(1, triton.next_power_of_2(size))


def head_blocks(num_heads: int, *head_sizes: int) -> tuple[int, int]:
    """Heads per program, and programs per token, when a program moves about 4,096 elements of a token."""
    heads = min(width(num_heads), max(1, 4096 // max(map(width, head_sizes))))
    return heads, triton.cdiv(num_heads, heads)
