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
            nearest even), or a quantised one: int8, float8_e4m3fn or float8_e5m2 hold value / scale, rounded to nearest
            even and saturated (int8 at -127 and 127); last dimension contiguous, outer strides free.
        value_cache: [num_blocks, block_size, num_kv_heads, v_head_size], on the device of ``key_cache``, of its type or
            of another quantised one. The two may interleave in one storage but must not share an element.
        slot_mapping: [<= T] int32 or int64; slot = block * block_size + offset. Negative slots are skipped; tokens past
            its end are padding.
        k_scale: [1] or [num_kv_heads] float32, fixed scales of a quantised key_cache.
        v_scale: likewise of value_cache.
        k_scale_cache: instead of k_scale: [num_blocks, block_size, num_kv_heads] float32 with free strides, takes the
            scale of each token and head: its largest finite magnitude / 127 (float8: 448, 57344), 0 for a row of zeros.
        v_scale_cache: likewise of value_cache.

    Raises:
        RuntimeError: a shape, type or device does not fit; on CPU also a slot that is not below
            num_blocks * block_size, a fixed scale that is not positive, or a NaN for int8 (float8 keeps it). Nothing
            has been written then.

    >>> import torch
    >>> key_cache, value_cache = torch.zeros(2, 3, 4, 1, 1)  # 3 blocks of 4 slots each
    >>> tokens = torch.tensor([1.0, 2.0, 3.0]).view(3, 1, 1)
    >>> write_kv(tokens, tokens, key_cache, value_cache, torch.tensor([5, -1, 11]))
    >>> key_cache.flatten().tolist()
    [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0]
    >>> caches = torch.zeros(2, 3, 4, 1, 1, dtype=torch.int8).unbind()
    >>> scales = torch.zeros(2, 3, 4, 1).unbind()
    >>> slots = torch.tensor([0, 1, 2])
    >>> write_kv(tokens, tokens, *caches, slots, k_scale_cache=scales[0], v_scale_cache=scales[1])
    >>> (caches[0][0].flatten() * scales[0][0].flatten()).tolist()
    [1.0, 2.0, 3.0, 0.0]
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
