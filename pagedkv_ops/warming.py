"""Compiling ahead of serving and of captures."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


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
        key_cache: as in :func:`write_kv`; on CPU there is nothing to compile.
        value_cache: likewise.
        num_heads: of the queries.
        max_batch: sequences of a step.
        max_tokens: query tokens of a step.
        max_blocks: columns of the block table.
        dtype: of queries and new tokens; default that of the caches.
        **options: keyword arguments of :func:`paged_attention` that the calls will have.

    Returns:
        The number of kernels that are ready.

    Raises:
        RuntimeError: a shape, type, device or option does not fit, or a size is below 1.

    >>> import torch
    >>> caches = torch.zeros(2, 8, 16, 2, 64).unbind(0)
    >>> warm_up(*caches, num_heads=4, max_batch=8, max_tokens=512, max_blocks=8)
    0
    """
    for name, size in (("max_batch", max_batch), ("max_tokens", max_tokens), ("max_blocks", max_blocks)):
        if size < 1:
            raise RuntimeError(f"warm_up: {name} must be at least 1, got {size}")
    if not key_cache.is_cuda:
        return 0
    from ._triton.warming import warm_up as compile_all

    sizes = (num_heads, max_batch, max_tokens, max_blocks)
    return compile_all(key_cache, value_cache, *sizes, dtype or key_cache.dtype, options)
