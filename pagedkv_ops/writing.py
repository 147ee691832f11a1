"""``write_kv``: store new keys and values in the paged cache."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from . import checks
from .registration import op, register_fake

_write_kv = op("write_kv")


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None:
    """Write the keys and values of T new tokens into their slots of the cache, in place.

    Args:
        key: [T, num_kv_heads, head_size], float32, float16 or bfloat16; may be a strided slice of a projection, or rows
            of the caches: every row is read before any is written.
        value: [T, num_kv_heads, v_head_size], likewise.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], a float type (the new values are rounded to it,
            nearest even); last dimension contiguous, outer strides free.
        value_cache: [num_blocks, block_size, num_kv_heads, v_head_size], same type and device as ``key_cache``. The two
            may interleave in one storage but must not share an element.
        slot_mapping: [<= T] int32 or int64; slot = block * block_size + offset. Negative slots are skipped; tokens past
            its end are padding.
        k_scale: for quantised caches, which are refused so far.
        v_scale: likewise.
        k_scale_cache: likewise.
        v_scale_cache: likewise.

    Raises:
        RuntimeError: a shape, type or device does not fit; on CPU also a slot that is not below
            num_blocks * block_size. Nothing has been written then.

    >>> import torch
    >>> key_cache, value_cache = torch.zeros(2, 3, 4, 1, 1)  # 3 blocks of 4 slots each
    >>> tokens = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    >>> write_kv(tokens, tokens, key_cache, value_cache, torch.tensor([5, -1, 11]))
    >>> key_cache.flatten().tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0]
    """
    _write_kv(
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        k_scale=k_scale,
        v_scale=v_scale,
        k_scale_cache=k_scale_cache,
        v_scale_cache=v_scale_cache,
    )


@register_fake("write_kv")
def _fake(*args: Any, **options: Any) -> None:
    checks.check_write_kv(*args, **options)
