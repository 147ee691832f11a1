"""Moving whole blocks: copies within the caches, swaps between devices, gathers into a dense tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks
from .registration import op, register_fake

_copy_blocks = op("copy_blocks")
_swap_blocks = op("swap_blocks")
_gather_kv = op("gather_kv")


def copy_blocks(caches: list[Tensor], block_mapping: Tensor) -> None:
    """Copy blocks inside every cache of the list, in place; every source is read before any destination is written.

    Args:
        caches: tensors whose first dimension is blocks: each layer's keys, values and scales. Those that share memory
            are written in the order of the list.
        block_mapping: [M, 2] int32 or int64 (source, destination) on the caches' device; no destination twice.

    Raises:
        RuntimeError: a shape or device does not fit; on CPU also an id out of range or a repeated destination.

    >>> import torch
    >>> cache = torch.tensor([1.0, 2.0, 3.0])
    >>> copy_blocks([cache], torch.tensor([[0, 1], [1, 2]]))
    >>> cache.tolist()
    [1.0, 1.0, 2.0]
    """
    _copy_blocks(caches, block_mapping)


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    """Copy blocks of ``src`` into blocks of ``dst``, across devices too; every source is read before any write.

    Args:
        src: its first dimension is blocks. Pinned memory is read until the device's stream has come so far.
        dst: same type and shape but for the number of blocks; the two may alias.
        block_mapping: [M, 2] int32 or int64 (block of src, block of dst) on the CPU; no destination twice.

    Raises:
        RuntimeError: a shape or type does not fit, an id is out of range, or a destination is repeated.

    >>> import torch
    >>> device, host = torch.tensor([1.0, 2.0, 3.0]), torch.zeros(2)
    >>> swap_blocks(device, host, torch.tensor([[2, 0], [0, 1]]))
    >>> host.tolist()
    [3.0, 1.0]
    """
    _swap_blocks(src, dst, block_mapping)


def gather_kv(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_len: int,
    *,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Copy sequences out of their blocks into a dense tensor, multiplied by their scales if they are quantised.

    Args:
        cache: [num_blocks, block_size, num_kv_heads, head_size], float, int8, float8_e4m3fn or float8_e5m2.
        block_table: [B, W] int32 or int64.
        seq_lens: [B] int32 or int64.
        max_len: length of the result; longer sequences are cut, shorter ones followed by zeros.
        scale: of a quantised cache, as ``k_scale`` in :func:`paged_attention`.
        dtype: of the result of a quantised cache: float32 (the default), float16 or bfloat16.

    Returns:
        [B, max_len, num_kv_heads, head_size], contiguous, in the cache's type or, of a quantised one, in ``dtype``.

    Raises:
        RuntimeError: a shape, type or device does not fit; on CPU also a length or block id out of range.

    >>> import torch
    >>> cache = torch.arange(8.0).view(2, 4, 1, 1)
    >>> gather_kv(cache, torch.tensor([[1, 0]]), torch.tensor([5]), 6).flatten().tolist()
    [4.0, 5.0, 6.0, 7.0, 0.0, 0.0]
    """
    return _gather_kv(cache, block_table, seq_lens, max_len, scale=scale, dtype=dtype)  # type: ignore[no-any-return]


@register_fake("copy_blocks")
def _fake_copy(caches: list[Tensor], block_mapping: Tensor) -> None:
    checks.check_copy_blocks(caches, block_mapping)


@register_fake("swap_blocks")
def _fake_swap(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    checks.check_swap_blocks(src, dst, block_mapping)


@register_fake("gather_kv")
def _fake_gather(cache: Tensor, block_table: Tensor, seq_lens: Tensor, max_len: int, **options: Any) -> Tensor:
    dtype = checks.check_gather_kv(cache, block_table, seq_lens, max_len, **options)
    return cache.new_empty(seq_lens.size(0), max_len, cache.size(2), cache.size(3), dtype=dtype)
