"""``copy_blocks`` through a staging buffer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from .. import checks, value_checks
from . import debug
from .launch import dense, empty, launch, part_of
from .replay import replayed

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_POINTERS = 8  # caches per launch
_TILE = 2048


@triton.jit(do_not_specialize=["num_pairs", "num_blocks"])
def copy_kernel(
    caches,  # tuple of pointers to caches of one layout
    staged_ptr,  # [caches, num_pairs, SIZE]
    mapping_ptr,  # [num_pairs, 2]
    stride_block,
    stride_0,
    stride_1,
    stride_2,
    num_pairs,
    num_blocks,
    SIZE: tl.constexpr,  # elements of a block: SIZE_0 * SIZE_1 * SIZE_2
    SIZE_1: tl.constexpr,
    SIZE_2: tl.constexpr,
    GATHER: tl.constexpr,  # cache to staging buffer, else back
    BLOCK: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    which = tl.program_id(2)
    src = tl.load(mapping_ptr + pair * 2).to(tl.int64)
    dst = tl.load(mapping_ptr + pair * 2 + 1).to(tl.int64)
    if (src < 0) | (src >= num_blocks) | (dst < 0) | (dst >= num_blocks):
        return
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = element < SIZE
    within = (element // (SIZE_1 * SIZE_2)).to(tl.int64) * stride_0
    within += (element // SIZE_2 % SIZE_1).to(tl.int64) * stride_1
    within += (element % SIZE_2).to(tl.int64) * stride_2
    staged_ptr += (which * num_pairs + pair) * SIZE
    for i in tl.static_range(len(caches)):
        if which == i:
            if GATHER:
                tl.store(staged_ptr + element, tl.load(caches[i] + src * stride_block + within, mask), mask)
            else:
                tl.store(caches[i] + dst * stride_block + within, tl.load(staged_ptr + element, mask), mask)


def _block_layout(cache: Tensor) -> tuple[tuple[int, int], ...]:
    """(size, stride) of the dimensions of one block, outermost first, joined where they are dense."""
    dims = sorted(((s, n) for n, s in zip(cache.shape[1:], cache.stride()[1:], strict=True) if n != 1), reverse=True)
    joined: list[tuple[int, int]] = []
    for stride, size in dims:
        if joined and joined[-1][1] == size * stride:
            joined[-1] = (joined[-1][0] * size, stride)
        else:
            joined.append((size, stride))
    return tuple(joined)


def _of_three_dimensions(caches: Sequence[Tensor]) -> list[Tensor]:
    """The caches as integers (bits are moved, never converted); blocks of more than three strides are cut up."""
    result: list[Tensor] = []
    for cache in caches:
        if cache.numel() == 0:
            continue
        cache = part_of(cache, cache.view(INTEGER[cache.element_size()]))
        if len(_block_layout(cache)) > 3:
            result += _of_three_dimensions([part_of(cache, part) for part in cache.unbind(1)])
        else:
            result.append(cache)
    return result


@replayed
def copy_blocks(caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    checks.check_copy_blocks(caches, block_mapping)
    for i, cache in enumerate(caches):
        value_checks.check_places("copy_blocks", f"caches[{i}]", cache)
    num_blocks = min(cache.size(0) for cache in caches)
    debug.check_block_mapping("copy_blocks", block_mapping, num_blocks, num_blocks)
    block_mapping = dense(block_mapping)
    groups: dict[object, list[Tensor]] = defaultdict(list)
    for cache in _of_three_dimensions(caches):
        groups[cache.dtype, cache.stride(0), _block_layout(cache)].append(cache)
    batches = [group[i : i + _POINTERS] for group in groups.values() for i in range(0, len(group), _POINTERS)]
    staged = [
        empty(batch[0], (len(batch), block_mapping.size(0), batch[0].numel() // batch[0].size(0))) for batch in batches
    ]
    for gather in (True, False):  # every source is read before any destination is written, aliases included
        for batch, buffer in zip(batches, staged, strict=True):
            _copy(batch, buffer, block_mapping, num_blocks, gather)


def _copy(caches: list[Tensor], staged: Tensor, block_mapping: Tensor, num_blocks: int, gather: bool) -> None:
    layout = _block_layout(caches[0])
    dims = ((1, 0),) * (3 - len(layout)) + layout
    num_pairs, size = staged.shape[1:]
    launch(
        copy_kernel,
        (num_pairs, triton.cdiv(size, _TILE), len(caches)),
        staged,
        tuple(caches),
        staged,
        block_mapping,
        caches[0].stride(0),
        *(stride for _, stride in dims),
        num_pairs,
        num_blocks,
        SIZE=size,
        SIZE_1=dims[1][0],
        SIZE_2=dims[2][0],
        GATHER=gather,
        BLOCK=_TILE,
        num_warps=4,
    )
