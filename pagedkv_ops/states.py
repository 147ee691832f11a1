"""``merge_states``: join attention over two disjoint sets of keys."""

from __future__ import annotations

from torch import Tensor

from . import checks
from .registration import op, register_fake

_merge_states = op("merge_states")


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Combine two partial attention results into that over all their keys (arXiv:2501.01005, section 3.2).

    Args:
        out_a: [T, num_heads, v_head_size], a float type.
        lse_a: [T, num_heads] float32, natural log of the denominators; -inf where the part saw nothing: its values are
            not taken then, whatever they are.
        out_b: as ``out_a``, in the same type.
        lse_b: as ``lse_a``.

    Returns:
        out [T, num_heads, v_head_size] and lse [T, num_heads] float32, contiguous.

    Raises:
        RuntimeError: a shape, type or device does not fit.

    >>> import torch
    >>> three, one = torch.tensor([[3.0]]).log(), torch.tensor([[1.0]]).log()  # denominators of three keys and of one
    >>> out, lse = merge_states(torch.full((1, 1, 2), 4.0), three, torch.full((1, 1, 2), 8.0), one)
    >>> [round(x, 4) for x in (*out.flatten().tolist(), lse.exp().item())]
    [5.0, 5.0, 4.0]
    """
    return _merge_states(out_a, lse_a, out_b, lse_b)  # type: ignore[no-any-return]


@register_fake("merge_states")
def _fake(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    checks.check_merge_states(out_a, lse_a, out_b, lse_b)
    return out_a.new_empty(out_a.shape), lse_a.new_empty(lse_a.shape)
