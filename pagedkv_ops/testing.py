"""Helpers for tests of code that uses the ops: poisoned caches, an exact oracle, derived tolerances, clone-free graphs.

A kernel's result is compared like this::

    exact, _ = dense_attention(query, key, value)
    rounded, _ = dense_attention(query, key, value, dtype=torch.bfloat16)
    assert_within_rounding(paged_out, exact, rounded)
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["assert_no_cache_clone", "assert_within_rounding", "dense_attention", "poison", "tolerance"]


def poison(*shape: int, dtype: torch.dtype = torch.float32, value: float = math.nan) -> Tensor:
    """A CPU tensor [*shape] of NaN (or ``value``): a kernel that reads what was never written shows it."""
    return torch.full(shape, value, dtype=dtype)


def dense_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor]:
    """Attention of one sequence without pages, with the options of :func:`pagedkv_ops.paged_attention`.

    float64 gives the exact result. Another ``dtype`` gives that of the same arithmetic as tensor units do it: products
    summed in float32, softmax weights and result rounded to ``dtype``.

    Args:
        query: [query_len, num_heads, head_size], the last query_len positions of the sequence.
        key: [seq_len, num_kv_heads, head_size]; value: [seq_len, num_kv_heads, v_head_size].

    Returns:
        out [query_len, num_heads, v_head_size] in ``dtype`` and lse [query_len, num_heads] in float64 or float32.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    query_len, num_heads, head_size = query.shape
    seq_len, num_kv_heads = key.shape[:2]
    group_size = num_heads // num_kv_heads
    queries = query.to(wide).transpose(0, 1)  # [Hq, Lq, D]
    keys = key.to(wide).permute(1, 2, 0).repeat_interleave(group_size, 0)  # [Hq, D, Lk]
    values = value.to(wide).transpose(0, 1).repeat_interleave(group_size, 0)  # [Hq, Lk, Dv]
    logits = torch.bmm(queries, keys) * (head_size**-0.5 if scale is None else scale)  # [Hq, Lq, Lk]
    if softcap > 0:
        logits = softcap * torch.tanh(logits / softcap)
    distance = torch.arange(seq_len) - torch.arange(seq_len - query_len, seq_len)[:, None]  # [Lq, Lk], key - query
    if alibi_slopes is not None:
        logits = logits + alibi_slopes.to(wide)[:, None, None] * distance
    masked = torch.zeros_like(distance, dtype=torch.bool)
    if causal:
        masked |= distance > 0
    if window_left >= 0:
        masked |= distance < -window_left
    if window_right >= 0:
        masked |= distance > window_right
    logits = logits.masked_fill(masked, -math.inf)
    if sinks is not None:
        sink = sinks.to(wide)[:, None, None].expand(-1, query_len, 1)
        logits = torch.cat([logits, sink], dim=2)
    weights = torch.softmax(logits, dim=2)[:, :, :seq_len].masked_fill(masked, 0.0)  # a row of -inf gives NaN
    out = torch.bmm(weights.to(dtype).to(wide), values)
    return out.transpose(0, 1).to(dtype), torch.logsumexp(logits, dim=2).transpose(0, 1)


def tolerance(exact: Tensor, *rounded: Tensor) -> float:
    """Largest error that a correct kernel may show: twice that of the same arithmetic in the kernel's precision.

    Args:
        exact: the result in float64.
        rounded: the same computed in lower precision, of the type that the kernel returns. Several runs, in other
            orders of summation, tell the error of small tensors better: the largest counts.

    Returns:
        Absolute tolerance. Not below twice half a unit of the result and of the float32 number it was rounded from.
    """
    finite = torch.isfinite(exact)
    if not bool(finite.any()):
        return 0.0
    error = max(float((run.double() - exact)[finite].abs().max()) for run in rounded)
    unit = torch.finfo(rounded[0].dtype).eps + torch.finfo(torch.float32).eps
    return max(2 * error, unit * float(exact[finite].abs().max()))


def assert_within_rounding(actual: Tensor, exact: Tensor, *rounded: Tensor) -> None:
    """Assert that ``actual`` equals ``exact`` (float64) within :func:`tolerance`; infinities must match, NaN fails."""
    assert actual.dtype == rounded[0].dtype, f"expected {rounded[0].dtype}, got {actual.dtype}"
    torch.testing.assert_close(actual.double(), exact, rtol=0.0, atol=tolerance(exact, *rounded))


# In generated code: buffers that Inductor allocates for its own kernels, and results of ops that allocate themselves
# (clones among them), whose sizes it asserts.
_ALLOCATION = re.compile(r"^ *(?:\w+ = empty_strided\w*\(|assert_size_stride\(buf\d+, )\(([\d, ]*)\).*$", re.MULTILINE)


def _numel(sizes: str) -> int:
    return math.prod(int(size) for size in sizes.split(",") if size.strip())


def _cache_numel(cache: Tensor) -> int:
    """Elements of one layer's keys or values: of the last four dimensions of a pool that stacks them."""
    return math.prod(cache.shape[-4:])


def assert_no_cache_clone(fn: Callable[..., Any], *args: Any, caches: Sequence[Tensor] | None = None) -> None:
    """Assert that Inductor compiles ``fn(*args)`` to one graph that neither clones a cache nor allocates as much.

    ``fn`` runs once, compiled with ``fullgraph=True``, without Inductor's caches and with static shapes, on copies of
    the arguments (shared storage stays shared). Dynamo is reset. Give the caches more elements than any other buffer
    of the step has.

    Args:
        caches: the tensors that must not be copied; by default every tensor with four or more dimensions in ``args``.
            Of more than four dimensions the last four count as one cache.

    Raises:
        AssertionError: names the offending line of the generated code.
        ValueError: there is no cache to look for.
    """
    if caches is None:
        caches = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor) and leaf.dim() >= 4]
    if not caches:
        raise ValueError("assert_no_cache_clone: no argument has four dimensions; name the caches with caches=[...]")
    smallest = min(_cache_numel(cache) for cache in caches)
    for code in _generated_code(fn, args):
        for allocation in _ALLOCATION.finditer(code):
            if _numel(allocation[1]) >= smallest:
                raise AssertionError(f"a buffer of at least a cache's {smallest} elements: {allocation[0].strip()}")


def _generated_code(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[str]:
    import torch._inductor.config as inductor_config
    from torch._inductor.utils import run_and_get_code

    with inductor_config.patch(force_disable_caches=True, size_asserts=True):
        compiled = torch.compile(fn, fullgraph=True, dynamic=False)
        _, codes = run_and_get_code(compiled, *copy.deepcopy(args))
    torch._dynamo.reset()
    if not codes:
        raise AssertionError("Inductor generated no code: fn calls no op")
    return list(codes)
