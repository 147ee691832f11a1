"""Compiles all that the steps of a serving loop can launch: kernels depend on few of the many shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import config, launch
from .attention import paged_attention, paged_attention_append
from .writing import write_kv


def _sizes(most: int) -> list[int]:
    return [*(size for i in range(most.bit_length()) if (size := 2**i) < most), most]


def _shapes(max_batch: int, max_tokens: int) -> Iterator[tuple[int, int, bool]]:
    """(tokens, sequences, packed) of steps that among them take every configuration, split and unsplit."""
    for batch in _sizes(max_batch):
        yield batch, batch, False
        for tokens in _sizes(max_tokens):
            yield tokens, batch, True


def warm_up(
    key_cache: Tensor,
    value_cache: Tensor,
    num_heads: int,
    max_batch: int,
    max_tokens: int,
    max_blocks: int,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> int:
    _, block_size, num_kv_heads, head_size = key_cache.shape
    index = {"dtype": torch.int32}
    short = min(max_blocks, max(1, config.MIN_SPLIT_KEYS // block_size))  # whose keys are never shared out
    with launch.compiling() as kernels:
        for tokens, batch, packed in _shapes(max_batch, max_tokens):
            query = key_cache.new_empty((tokens, num_heads, head_size), dtype=dtype)
            new = (query[:, :num_kv_heads].contiguous(), query.new_empty(tokens, num_kv_heads, value_cache.size(3)))
            caches = (key_cache, value_cache)
            slots = key_cache.new_full((tokens,), -1, dtype=torch.int64)
            write_kv(*new, *caches, slots)
            for columns in {short, max_blocks}:
                tables = (key_cache.new_zeros((batch, columns), **index), key_cache.new_zeros(batch, **index))
                starts = key_cache.new_zeros(batch + 1, **index) if packed else None
                paged_attention(query, *caches, *tables, starts, **options)
                paged_attention_append(query, *new, *caches, slots, *tables, starts, **options)
    return len(kernels)
