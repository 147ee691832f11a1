"""Quantised caches in the Triton kernels, interpreted: writes and gathers bit for bit, attention within rounding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from pagedkv_ops import reference
from tests.ops.builders import INDEX_DTYPES, attention_options, make_caches, pairwise, row_id
from tests.ops.quantised import KINDS, LARGEST, TYPES, make_quantised, new_scales, poison_of, write_options
from tests.ops.test_attention import MASKS
from tests.ops.test_quantised import append_args, assert_close_outputs

from .test_edges import far
from .worker import Kernels

EVERY_TYPE = pytest.mark.parametrize("dtype", TYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
EVERY_KIND = pytest.mark.parametrize("kind", KINDS)
LENGTHS = {"decode": ((1, 1, 1), (1, 7, 65)), "chunk": ((5,), (70,)), "mixed": ((1, 9, 0), (30, 40, 9))}
# bfloat16 results are truncated by the interpreter
GRID = pairwise(
    7,
    k_type=TYPES,
    v_type=TYPES,
    k_kind=KINDS,
    v_kind=KINDS,
    head_size=(13, 64, 80),
    block_size=(3, 16),
    heads=((2, 2), (5, 1), (4, 2)),
    lengths=("decode", "chunk", "mixed"),
    mask=("causal", "full", "window"),
    dtype=(torch.float32, torch.float16),
    v_head_size=(None, 24),
    extras=({}, {"softcap": 2.0}, {"alibi": True, "sinks": True}),
    layout=("nhd", "hnd"),
    strided=(False, True),
    index_dtype=INDEX_DTYPES,
    padding_rows=(0, 3),
    num_splits=(0, 1, 5),
)


@pytest.mark.parametrize("row", GRID, ids=row_id)
def test_attention_and_append(kernels: Kernels, row: dict[str, Any]) -> None:
    shape = dict(row)
    query_lens, seq_lens = LENGTHS[shape.pop("lengths")]
    options = {**MASKS[shape.pop("mask")], **shape.pop("extras"), "num_splits": shape.pop("num_splits")}
    types, kinds = ((shape.pop(f"k_{name}"), shape.pop(f"v_{name}")) for name in ("type", "kind"))
    options = attention_options(row["heads"][0], **options)
    case, written = make_quantised(types, kinds, query_lens=query_lens, seq_lens=seq_lens, options=options, **shape)
    assert_close_outputs(case, *kernels.op("paged_attention_with_lse", *case.args, **case.options))
    fixed = {name: value for name, value in case.options.items() if not name.endswith("_scale")} | written
    assert_close_outputs(case, kernels.op("paged_attention_append", *append_args(case), **fixed))


def _write(*args: Any) -> Any:
    """The caches and scales as the Triton op leaves them."""
    from pagedkv_ops import _triton

    *args, options = args
    _triton.write_kv(*args, **options)
    return [*args[2:4], *options.values()]


def _assert_same_write(kernels: Kernels, new: Any, caches: Any, slots: Tensor, options: dict[str, Tensor]) -> None:
    written = kernels.run(_write, *new, *caches, slots, options)
    reference.write_kv(*new, *caches, slots, **options)
    for actual, expected in zip(written, [*caches, *options.values()], strict=True):
        if expected.element_size() == 1:
            actual, expected = actual.view(torch.uint8), expected.view(torch.uint8)
        torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@EVERY_TYPE
@EVERY_KIND
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES, ids=str)
def test_write(kernels: Kernels, dtype: torch.dtype, kind: str, index_dtype: torch.dtype) -> None:
    caches = make_caches(4, 3, 5, 13, 80, dtype, "hnd", poison_of(dtype))
    new = [torch.randn(6, 5, size) * 3 for size in (13, 80)]
    new[0][0], new[0][1, 1, 3] = 0.0, math.inf
    if dtype != torch.int8:
        new[0][2, 0, 1] = math.nan
    scales = (new_scales(kind, dtype, new[0][3:], caches[0]), new_scales(kind, dtype, new[1], caches[1]))
    slots = torch.tensor([11, -1, 0, 4, 7], dtype=index_dtype)  # fewer than the tokens
    _assert_same_write(kernels, new, caches, slots, write_options((kind, kind), scales))


@EVERY_TYPE
@pytest.mark.parametrize("exponent", [-130, -7, 0, 60])
def test_ties_are_rounded_to_even(kernels: Kernels, dtype: torch.dtype, exponent: int) -> None:
    """Of every two stored numbers the middle and its neighbours, and what saturates."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    numbers = numbers[numbers.abs() <= LARGEST[dtype]].sort().values
    scale = torch.tensor([1.5]).ldexp(torch.tensor(exponent))
    row = torch.cat([numbers, (numbers[1:] + numbers[:-1]) / 2]) * scale
    rows = torch.cat([row, *(row.nextafter(torch.tensor(end)) for end in (math.inf, -math.inf))])
    rows = torch.cat([rows, torch.tensor([-0.0, 1e-45, 3e38, -math.inf])])[None, None]
    caches = torch.zeros(2, 1, 1, 1, rows.size(2), dtype=dtype).unbind()
    options = {"k_scale": scale, "v_scale": scale}
    _assert_same_write(kernels, (rows, rows), caches, torch.tensor([0]), options)


def test_nan_is_zero_in_int8(kernels: Kernels) -> None:
    row = torch.tensor([2.0, math.nan, -2.0]).view(1, 1, 3)
    caches, scales = torch.ones(2, 1, 1, 1, 3, dtype=torch.int8).unbind(), torch.zeros(2, 1, 1, 1).unbind()
    options = {"k_scale_cache": scales[0], "v_scale_cache": scales[1]}
    key_cache, *_ = kernels.run(_write, row, row, *caches, torch.tensor([0]), options)
    assert key_cache.flatten().tolist() == [127, 0, -127]


@EVERY_TYPE
@EVERY_KIND
def test_gather(kernels: Kernels, dtype: torch.dtype, kind: str) -> None:
    case, _ = make_quantised((dtype, dtype), (kind, kind), query_lens=(1, 1), seq_lens=(5, 9), layout="hnd")
    for out in (torch.float32, torch.float16):
        args = (case.key_cache, case.block_table, case.seq_lens, 7)
        dense = kernels.op("gather_kv", *args, scale=case.options["k_scale"], dtype=out)
        expected = reference.gather_kv(*args, scale=case.options["k_scale"], dtype=out)
        torch.testing.assert_close(dense, expected, rtol=0, atol=0)


@EVERY_TYPE
def test_every_stored_byte_is_read_as_torch_reads_it(kernels: Kernels, dtype: torch.dtype) -> None:
    cache = torch.arange(256, dtype=torch.uint8).view(dtype).view(1, 1, 1, 256)
    table, length, scale = torch.tensor([[0]]), torch.tensor([1]), torch.tensor([0.5])
    gathered = kernels.op("gather_kv", cache, table, length, 1, scale=scale)
    expected = cache.float().view(256) * 0.5
    torch.testing.assert_close(gathered[0, 0, 0], expected, rtol=0, atol=0, equal_nan=True)
    query, options = torch.zeros(1, 1, 256), {"k_scale": scale, "v_scale": scale}
    keys = torch.zeros_like(cache.view(torch.uint8)).view(dtype)
    out = kernels.op("paged_attention", query, keys, cache, table, length, **options)
    torch.testing.assert_close(out[0, 0], expected, rtol=1e-6, atol=0, equal_nan=True)


@EVERY_TYPE
def test_small_scales_keep_their_digits_in_float16(kernels: Kernels, dtype: torch.dtype) -> None:
    """Weights times scales of 1e-7 are no normal numbers of float16."""
    keys, values = torch.randn(2, 1, 16, 1, 64).unbind()
    values = values * 1e-5 * LARGEST[torch.int8] / LARGEST[dtype]
    caches = torch.zeros(2, 1, 16, 1, 64, dtype=dtype).unbind()
    options = {"k_scale_cache": torch.zeros(1, 16, 1), "v_scale_cache": torch.zeros(1, 16, 1)}
    reference.write_kv(keys[0], values[0], *caches, torch.arange(16), **options)
    scales = {"k_scale": options["k_scale_cache"], "v_scale": options["v_scale_cache"] * 1e4}
    small = {**scales, "v_scale": options["v_scale_cache"]}
    args = (torch.randn(1, 2, 64).half(), *caches, torch.tensor([[0]]), torch.tensor([16]))
    large = reference.paged_attention(args[0].float(), *args[1:], **scales) / 1e4
    out = kernels.op("paged_attention", *args, **small).float()
    torch.testing.assert_close(out, large, rtol=2e-3, atol=1e-7)


def _with_scales(op: str, dim: int | None) -> list[Tensor]:
    """What an op gives or leaves; one dimension of both scales of tokens is far."""
    from pagedkv_ops import _triton

    rng = torch.Generator().manual_seed(3)
    caches = [torch.randint(-127, 128, (3, 3, 3, 16), generator=rng).to(torch.int8) for _ in range(2)]
    scales = [torch.rand(3, 3, 3, generator=rng) / 127 for _ in range(2)]
    rows = [torch.randn(3, 3, 16, generator=rng) for _ in range(3)]
    table, seq_lens = torch.tensor([[0, 1, 2], [2, 0, 1], [1, 2, 0]]), torch.tensor([9, 7, 8])
    if dim is not None:
        scales = [far(scale, dim) for scale in scales]
    if op == "write_kv":
        _triton.write_kv(*rows[1:], *caches, torch.tensor([8, 2, 4]), None, None, *scales)
        return [tensor.contiguous() for tensor in (*caches, *scales)]
    if op == "gather_kv":
        return [_triton.gather_kv(caches[0], table, seq_lens, 9, scale=scales[0])]
    return [_triton.paged_attention(rows[0], *caches, table, seq_lens, k_scale=scales[0], v_scale=scales[1])]


@pytest.mark.parametrize("op", ["write_kv", "gather_kv", "paged_attention"])
@pytest.mark.parametrize("dim", range(3))
def test_scales_whose_strides_pass_2_to_31(kernels: Kernels, op: str, dim: int) -> None:
    result, near = kernels.run(_with_scales, op, dim), kernels.run(_with_scales, op, None)
    torch.testing.assert_close(result, near, rtol=0, atol=0)
