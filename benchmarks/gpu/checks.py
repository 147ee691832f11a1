"""Every op on the device against ``pagedkv_ops.reference`` on the CPU, at small shapes: what figures rest on.

A row of a result is right where its distance from the reference, in the norm over the row, is a few roundings; what an
op writes must have the same bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .device import DEVICE, REHEARSAL

LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 2e-2}
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_S, _N = 16, 96  # block size, blocks
_LENS = {
    "decode": ((1, 1), (1, 16), (1, 17), (1, 300)),
    "packed": ((7, 7), (1, 90), (0, 4), (33, 160)),
    "mixed": ((1, 300), (40, 40), (1, 33), (9, 64)),
}
_SIZES = ((8, 2, 128), (6, 6, 80))  # query heads, KV heads, head size
_LAYOUTS = ("HND", "NHD")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
if REHEARSAL:  # an interpreter is slow, and multiplies the bit patterns of bfloat16
    _LENS = {"decode": ((1, 1), (1, 17)), "packed": ((3, 3), (5, 20)), "mixed": ((1, 33), (3, 3))}
    _SIZES, _LAYOUTS, _DTYPES = ((4, 2, 16),), ("HND",), (torch.float16,)
_WRITTEN = 9 if REHEARSAL else 77
_OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one split": {"num_splits": 1},
    "splits": {"num_splits": 4},
    "window": {"window_left": 30},
    "not causal": {"causal": False, "window_right": 20},
    "softcap, ALiBi, sinks": {"softcap": 3.0, "alibi_slopes": True, "sinks": True},
}
Arguments = tuple[list[Any], dict[str, Any]]


def _caches(dtype: torch.dtype, layout: str, heads: int, head_size: int) -> list[Tensor]:
    sizes = (_N, _S, heads, head_size) if layout == "NHD" else (_N, heads, _S, head_size)
    caches = [torch.randn(sizes).to(dtype) for _ in range(2)]
    return caches if layout == "NHD" else [cache.transpose(1, 2) for cache in caches]


def attention_arguments(
    lens: tuple[tuple[int, int], ...], dtype: torch.dtype, layout: str, sizes: tuple[int, int, int], options: Any
) -> Arguments:
    """Of ``paged_attention``; ``sizes``: query heads, KV heads, head size. What no row may read is NaN."""
    torch.manual_seed(len(lens) + sizes[2])
    num_heads, num_kv_heads, head_size = sizes
    caches = _caches(dtype, layout, num_kv_heads, head_size)
    width = max(-(-n // _S) for _, n in lens)
    blocks = iter(torch.randperm(_N).tolist())
    table = torch.tensor([[next(blocks) for _ in range(width)] for _ in lens], dtype=torch.int32)
    for row, (_, length) in enumerate(lens):
        for column in range(width):
            used = min(max(length - column * _S, 0), _S)
            for cache in caches:
                cache[table[row, column], used:] = torch.nan
    offsets = torch.tensor([0, *(q for q, _ in lens)]).cumsum(0).to(torch.int32)
    query = torch.randn(int(offsets[-1]), num_heads, head_size).to(dtype)
    decode = all(q == 1 for q, _ in lens)
    seq_lens = torch.tensor([n for _, n in lens], dtype=torch.int32)
    values = {"alibi_slopes": 2.0 ** -torch.arange(1.0, num_heads + 1), "sinks": torch.randn(num_heads)}
    options = {key: values.get(key, value) for key, value in options.items()}
    return [query, *caches, table, seq_lens, None if decode else offsets], options


def append_arguments(
    lens: tuple[tuple[int, int], ...], dtype: torch.dtype, layout: str, sizes: tuple[int, int, int], options: Any
) -> Arguments:
    """The tokens that the query rows belong to are new: their slots are still NaN in the cache."""
    (query, *caches, table, seq_lens, offsets), options = attention_arguments(lens, dtype, layout, sizes, options)
    slots = []
    for row, (query_len, length) in enumerate(lens):
        slots += [int(table[row, i // _S]) * _S + i % _S for i in range(length - query_len, length)]
    for cache in caches:
        for slot in slots:
            cache[slot // _S, slot % _S] = torch.nan
    key, value = (torch.randn(len(slots), *caches[0].shape[2:]).to(dtype) for _ in range(2))
    return [query, key, value, *caches, torch.tensor(slots), table, seq_lens, offsets], options


def write_arguments(dtype: torch.dtype, cache_dtype: torch.dtype, layout: str) -> Arguments:
    torch.manual_seed(1)
    slots = torch.randperm(_N * _S)[:_WRITTEN]
    slots[::9] = -1
    key, value = (torch.randn(_WRITTEN, 3, 40).to(dtype) for _ in range(2))
    return [key, value, *_caches(cache_dtype, layout, 3, 40), slots], {}


def merge_arguments() -> Arguments:
    torch.manual_seed(2)
    outs, lses = torch.randn(2, 9, 8, 64), torch.randn(2, 9, 8)
    lses[0, 0], lses[:, 1] = -torch.inf, -torch.inf
    return [outs[0], lses[0], outs[1], lses[1]], {}


def copy_arguments() -> Arguments:
    """A chain: every source is read before any write."""
    torch.manual_seed(3)
    mapping = torch.tensor([[0, 1], [1, 2], [2, 0], [5, 9]])
    return [_caches(torch.float16, "HND", 2, 64), mapping], {}


def gather_arguments(layout: str) -> Arguments:
    (_, key_cache, _, table, seq_lens, _), _ = attention_arguments(_LENS["mixed"], torch.float16, layout, _SIZES[0], {})
    return [key_cache, table, seq_lens, 200], {}


def cases() -> dict[str, tuple[str, Callable[..., Arguments], tuple[Any, ...]]]:
    """Name, which begins with a family's -> op, function that makes its arguments, and what that takes."""
    found: dict[str, tuple[str, Callable[..., Arguments], tuple[Any, ...]]] = {}
    grid = itertools.product(_LENS, _DTYPES, _LAYOUTS, _SIZES)
    for i, (family, dtype, layout, sizes) in enumerate(grid):
        is_first = i % (len(_DTYPES) * len(_LAYOUTS) * len(_SIZES)) == 0  # of its family: with every option
        for title, options in _OPTIONS.items():
            if title == "plain" or is_first:
                name = f"{family} {str(dtype)[6:]} {layout} {'x'.join(map(str, sizes))} {title}"
                of = (_LENS[family], dtype, layout, sizes, options)
                found[name] = ("paged_attention_with_lse", attention_arguments, of)
                if title in ("plain", "one split"):
                    found[f"append {name}"] = ("paged_attention_append", append_arguments, of)
    for dtype, layout in itertools.product({_DTYPES[0], torch.float32}, _LAYOUTS):
        name = f"write {str(dtype)[6:]} to {str(_DTYPES[0])[6:]} {layout}"
        found[name] = ("write_kv", write_arguments, (dtype, _DTYPES[0], layout))
    found["merge"] = ("merge_states", merge_arguments, ())
    found["copy"] = ("copy_blocks", copy_arguments, ())
    return found | {f"gather {layout}": ("gather_kv", gather_arguments, (layout,)) for layout in _LAYOUTS}


def check(name: str) -> None:
    """Run one case, or raise what is wrong with it."""
    import pagedkv_ops
    from pagedkv_ops import reference

    op, arguments, of = cases()[name]
    args, options = arguments(*of)
    wanted = getattr(reference, op)(*args, **options)
    fresh, _ = arguments(*of)
    given = [_to(DEVICE, value) for value in fresh]
    got = getattr(pagedkv_ops, op)(*given, **{key: _to(DEVICE, value) for key, value in options.items()})
    limit = max(LIMITS[tensor.dtype] for tensor in _tensors(args) if tensor.is_floating_point())
    for one, other in zip(_tensors([got]), _tensors([wanted]), strict=True):
        assert_rows_close(one.cpu(), other, limit)
    for i, (one, other) in enumerate(zip(_tensors(given), _tensors(args), strict=True)):
        bits = _BITS[other.itemsize]
        assert torch.equal(one.cpu().view(bits), other.view(bits)), f"tensor argument {i} has other content afterwards"


def assert_rows_close(got: Tensor, wanted: Tensor, limit: float) -> None:
    assert got.shape == wanted.shape, f"expected shape {tuple(wanted.shape)}, got {tuple(got.shape)}"
    assert got.dtype == wanted.dtype, f"expected {wanted.dtype}, got {got.dtype}"
    got, wanted = got.double(), wanted.double()
    infinite = torch.isinf(wanted)
    assert torch.equal(infinite, torch.isinf(got)), "infinite in other places"
    assert not bool(got.isnan().any()), f"NaN in {int(got.isnan().any(-1).sum())} rows"
    difference = (got - wanted).masked_fill(infinite, 0.0).norm(dim=-1)
    error = difference / wanted.masked_fill(infinite, 0.0).norm(dim=-1).clamp(min=1e-3)
    worst = float(error.max()) if error.numel() else 0.0
    assert worst <= limit, f"{int((error > limit).sum())} of {error.numel()} rows differ, by up to {worst:.1e} (norm)"


def _to(device: str, value: Any) -> Any:
    """Tensors keep their strides, so that a layout stays what it is."""
    if isinstance(value, Tensor):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device).copy_(value)
    return [_to(device, part) for part in value] if isinstance(value, list) else value


def _tensors(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [t for value in values for t in _tensors(value)] if isinstance(values, list | tuple) else []
