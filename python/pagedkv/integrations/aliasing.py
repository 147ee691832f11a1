"""Whether two tensors of a graph, which may be fake, are views of common memory."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def _one_storage(a: Tensor, b: Tensor) -> bool:
    return bool(a.untyped_storage()._cdata == b.untyped_storage()._cdata)


def ranges_meet(a: Tensor, b: Tensor) -> bool:
    """Whether two views of one storage lie between each other's ends."""
    if not _one_storage(a, b) or a.numel() == 0 or b.numel() == 0:
        return False
    return bool(a.storage_offset() <= _last_element(b) and b.storage_offset() <= _last_element(a))


def _last_element(t: Tensor) -> Any:  # symbolic where a size is
    return t.storage_offset() + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))


def share_elements(a: Tensor, b: Any) -> bool:
    """Exact for views of equal shape and strides; others of one storage count as overlapping."""
    if not isinstance(b, Tensor) or not _one_storage(a, b):
        return False
    if a.shape != b.shape or a.stride() != b.stride():
        return True
    distances = {a.storage_offset() - b.storage_offset()}
    for stride, size in sorted(zip(a.stride(), a.shape, strict=True), reverse=True):
        # the smaller strides together reach less than one step of this one: only its two nearest multiples can work
        steps = {(d, step) for d in distances for step in (d // stride, d // stride + 1)}
        distances = {d - step * stride for d, step in steps if abs(step) < size}
    return 0 in distances
