"""Compiling ahead of serving and of captures: kernels depend on few of the many shapes that steps have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .checks import QUANTISED_MAX, check_paged_attention


def warm_up(
    key_cache: Tensor,
    value_cache: Tensor,
    *,
    num_heads: int,
    max_batch: int,
    max_tokens: int,
    max_blocks: int,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> int:
    """Compile what write_kv, paged_attention and paged_attention_append will launch, so that no later call has to.

    Nothing is launched, and the caches are left as they are. Tokens are taken to be contiguous or as well aligned,
    tables and lengths int32, slots int64. A call that needs a kernel of another kind compiles it, which within the
    capture of a CUDA graph is refused.

    Args:
        key_cache: as in :func:`write_kv`; on CPU arguments are checked, and there is nothing to compile.
        value_cache: likewise.
        num_heads: of the queries.
        max_batch: sequences of a step.
        max_tokens: query tokens of a step.
        max_blocks: columns of the block table.
        dtype: of queries and new tokens; default that of the caches, unless they are quantised.
        **options: keyword arguments of :func:`paged_attention_append` that the calls will have.

    Returns:
        The number of kernels that are ready.

    Raises:
        RuntimeError: a shape, type, device or option does not fit, or a size is below 1.
        TypeError: attention has no such option.

    >>> import torch
    >>> caches = torch.zeros(2, 8, 16, 2, 64).unbind(0)
    >>> warm_up(*caches, num_heads=4, max_batch=8, max_tokens=512, max_blocks=8)
    0
    """
    for name, size in (("max_batch", max_batch), ("max_tokens", max_tokens), ("max_blocks", max_blocks)):
        if size < 1:
            raise RuntimeError(f"warm_up: {name} must be at least 1, got {size}")
    if dtype is None and key_cache.dtype in QUANTISED_MAX:
        found = str(key_cache.dtype).removeprefix("torch.")
        raise RuntimeError(f"warm_up: dtype must be given for caches in {found}, got None")
    query = key_cache.new_empty((1, num_heads, key_cache.size(-1)), dtype=dtype or key_cache.dtype)
    table, lengths = (key_cache.new_empty(shape, dtype=torch.int32) for shape in ((1, 1), (1,)))
    check_paged_attention(query, key_cache, value_cache, table, lengths, op="warm_up", **_read(options))
    if not key_cache.is_cuda:
        return 0
    sizes = (num_heads, max_batch, max_tokens, max_blocks)
    return _compile_steps((key_cache, value_cache), *sizes, dtype or key_cache.dtype, options)


def _read(options: dict[str, Any]) -> dict[str, Any]:
    """As attention alone takes them: it reads the scales that an append fills."""
    return {name.removesuffix("_cache"): value for name, value in options.items()}


def _sizes(most: int) -> list[int]:
    return [*(size for i in range(most.bit_length()) if (size := 2**i) < most), most]


def _shapes(max_batch: int, max_tokens: int) -> Iterator[tuple[int, int, bool]]:
    """(tokens, sequences, packed) of steps that among them take every configuration, split and unsplit."""
    for batch in _sizes(max_batch):
        yield batch, batch, False
        for tokens in _sizes(max_tokens):
            yield tokens, batch, True


def _compile_steps(
    caches: tuple[Tensor, Tensor],
    num_heads: int,
    max_batch: int,
    max_tokens: int,
    max_blocks: int,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> int:
    from ._triton import paged_attention, paged_attention_append, write_kv
    from ._triton.config import MIN_SPLIT_KEYS
    from ._triton.launch import compiling

    key_cache, value_cache = caches
    _, block_size, num_kv_heads, head_size = key_cache.shape
    index: dict[str, Any] = {"dtype": torch.int32}
    written = {name: value for name, value in options.items() if name.startswith(("k_scale", "v_scale"))}
    short = min(max_blocks, max(1, MIN_SPLIT_KEYS // block_size))  # whose keys are never shared out
    with compiling() as kernels:
        for tokens, batch, packed in _shapes(max_batch, max_tokens):
            query = key_cache.new_empty((tokens, num_heads, head_size), dtype=dtype)
            new = (query[:, :num_kv_heads].contiguous(), query.new_empty(tokens, num_kv_heads, value_cache.size(3)))
            slots = key_cache.new_full((tokens,), -1, dtype=torch.int64)
            write_kv(*new, *caches, slots, **written)
            for columns in {short, max_blocks}:
                tables = (key_cache.new_zeros((batch, columns), **index), key_cache.new_zeros(batch, **index))
                starts = key_cache.new_zeros(batch + 1, **index) if packed else None
                paged_attention(query, *caches, *tables, starts, **_read(options))
                paged_attention_append(query, *new, *caches, slots, *tables, starts, **options)
    return len(kernels)
