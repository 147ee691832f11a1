"""The Triton attention kernels, interpreted, against dense float64 attention on poisoned caches.

float32 and float16 only: the interpreter multiplies the raw bit patterns of bfloat16, which a device alone can test. It
appears as a cache type next to another query type, where the kernel widens it before the product.
"""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from pagedkv_ops.testing import assert_within_rounding, tolerance
from tests.ops.builders import attention_options, make_case, mean_probe, pairwise, row_id

from .worker import DEVICE, Kernels

# base-2 exponentials lose a few units; a device also multiplies float32 in three parts of 11 bits and has a fast exp2
FLOAT32_ERROR = 4e-6 if DEVICE == "cpu" else 3e-5


def assert_matches_dense(kernels: Kernels, **spec: Any) -> None:
    case = make_case(**spec)
    out, lse = kernels.op("paged_attention_with_lse", *case.args, **case.options)
    exact, exact_lse = case.dense()
    compute = torch.promote_types(case.query.dtype, case.key_cache.dtype)
    rounded = case.dense(compute if compute == case.query.dtype else case.query.dtype)[0]
    if compute == torch.float32:
        torch.testing.assert_close(out.double(), exact, rtol=0, atol=max(FLOAT32_ERROR, tolerance(exact, rounded)))
    else:
        assert_within_rounding(out, exact, rounded)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=2e-5 if compute == torch.float32 else 2e-3)


MASKS: list[dict[str, Any]] = [
    {},
    {"causal": False},
    {"window_left": 5},
    {"causal": False, "window_left": 20, "window_right": 3},
    {"causal": False, "window_right": 40},
]

GRID = pairwise(
    7,
    heads=[(4, 4), (8, 2), (5, 1), (9, 3), (13, 13)],
    head_size=[13, 64, 80, 128],
    block_size=[1, 3, 8, 16, 64],
    dtype=[torch.float32, torch.float16] + [torch.bfloat16] * (DEVICE == "cuda"),
    lens=[((1, 1, 1), (1, 77, 300)), ((1, 1), (0, 777)), ((7, 1, 0, 20), (7, 90, 4, 135)), ((4, 2), (2, 2))],
    mask=MASKS,
    options=[{}, {"softcap": 3.0}, {"alibi": True}, {"sinks": True}, {"alibi": True, "sinks": True, "softcap": 1.5}],
    num_splits=[0, 1, 3],
    layout=["nhd", "hnd", "interleaved"],
    index_dtype=[torch.int32, torch.int64],
)


@pytest.mark.parametrize("row", GRID, ids=row_id)
def test_grid(kernels: Kernels, row: dict[str, Any]) -> None:
    row = dict(row)
    query_lens, seq_lens = row.pop("lens")
    options = attention_options(row["heads"][0], **row.pop("options"), **row.pop("mask"))
    options["num_splits"] = row.pop("num_splits")
    assert_matches_dense(kernels, query_lens=query_lens, seq_lens=seq_lens, options=options, padding_rows=2, **row)


@pytest.mark.parametrize("head_sizes", [(96, 40), (256, 256), (576, 512)], ids=str)
def test_wide_and_unequal_heads(kernels: Kernels, head_sizes: tuple[int, int]) -> None:
    head_size, v_head_size = head_sizes
    dtype = torch.float32 if head_size <= 256 else torch.float16
    for query_lens in ((1, 1), (5, 2)):
        assert_matches_dense(
            kernels,
            query_lens=query_lens,
            seq_lens=(9, 40),
            head_size=head_size,
            v_head_size=v_head_size,
            dtype=dtype,
        )


@pytest.mark.parametrize(
    ("dtype", "cache_dtype"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float32),
    ],
    ids=str,
)
def test_cache_of_another_type(kernels: Kernels, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    case = make_case(query_lens=(3, 1), seq_lens=(30, 9), dtype=dtype, cache_dtype=cache_dtype)
    out = kernels.op("paged_attention", *case.args)
    assert out.dtype == dtype
    # the interpreter truncates where the device rounds a bfloat16 to nearest: one unit instead of half of one
    error = 3 * FLOAT32_ERROR if dtype == torch.float32 else 2 * torch.finfo(dtype).eps
    torch.testing.assert_close(out.double(), case.dense()[0], rtol=error, atol=error)


@pytest.mark.parametrize("fill", [math.nan, math.inf])
@pytest.mark.parametrize("num_splits", [0, 1, 4])
def test_poisoned_tail_never_reaches_a_result(kernels: Kernels, fill: float, num_splits: int) -> None:
    case = mean_probe(13, block_size=4, fill=fill)
    out = kernels.op("paged_attention", *case.args, num_splits=num_splits)
    torch.testing.assert_close(out, torch.full_like(out, 6.0))


def test_rows_that_see_nothing(kernels: Kernels) -> None:
    case = mean_probe(2, block_size=4, num_queries=4)
    case.value_cache *= 4
    case.value_cache += 4  # V = 4, 8
    out, lse = kernels.op("paged_attention_with_lse", *case.args)
    torch.testing.assert_close(out[:, 0, 0], torch.tensor([0.0, 0.0, 4.0, 6.0]))
    torch.testing.assert_close(lse[:, 0], torch.tensor([-math.inf, -math.inf, 0.0, math.log(2)]))


@pytest.mark.parametrize(("window_left", "mean"), [(2, 4.0), (0, 5.0), (5, 2.5), (100, 2.5)])
def test_window_is_inclusive(kernels: Kernels, window_left: int, mean: float) -> None:
    case = mean_probe(6, block_size=4)
    out = kernels.op("paged_attention", *case.args, window_left=window_left)
    torch.testing.assert_close(out, torch.full_like(out, mean))


def test_softcap_saturates_without_nan(kernels: Kernels) -> None:
    case = make_case(query_lens=(1,), seq_lens=(8,), options={"softcap": 50.0, "scale": 5000.0})
    out = kernels.op("paged_attention", *case.args, **case.options)
    error = 5000 * FLOAT32_ERROR  # of a logit before the cap
    torch.testing.assert_close(out.double(), case.dense()[0], rtol=error, atol=error)


def test_more_heads_than_a_tile_has_rows(kernels: Kernels) -> None:
    assert_matches_dense(kernels, query_lens=(1, 3), seq_lens=(9, 40), heads=(142, 2), head_size=16)


def test_nan_in_a_query_stays_in_its_row(kernels: Kernels) -> None:
    case = make_case(query_lens=(3,), seq_lens=(9,), heads=(2, 1))
    case.query[1, 0] = math.nan
    for num_splits in (1, 2):
        out, lse = kernels.op("paged_attention_with_lse", *case.args, num_splits=num_splits)
        is_nan = torch.zeros(3, 2, dtype=torch.bool)
        is_nan[1, 0] = True
        assert torch.equal(out.isnan().all(2), is_nan)
        assert torch.equal(lse.isnan(), is_nan)


def test_strided_query_and_indices(kernels: Kernels) -> None:
    assert_matches_dense(kernels, query_lens=(3, 1), seq_lens=(30, 9), strided=True)


def test_lengths_out_of_range_are_clamped(kernels: Kernels) -> None:
    case = mean_probe(8, block_size=4, num_queries=2)
    table = case.block_table[:, :2]
    for seq_len, means in ((1000, (3.0, 3.5)), (-3, (0.0, 0.0))):
        out = kernels.op("paged_attention", *case.args[:3], table, torch.tensor([seq_len]), torch.tensor([0, 999]))
        torch.testing.assert_close(out[:, 0, 0], torch.tensor(means))


def test_block_ids_out_of_range_are_not_followed(kernels: Kernels) -> None:
    case = mean_probe(8, block_size=4)
    for bad in (-1, case.key_cache.size(0), 2**31 - 1):
        case.block_table[0, 1] = bad  # counts as keys and values of zero
        out = kernels.op("paged_attention", *case.args)
        torch.testing.assert_close(out, torch.full_like(out, (0 + 1 + 2 + 3) / 8))


def _attend_past_2_to_31_elements(block: int, index_dtype: torch.dtype) -> tuple[Tensor, Tensor, float]:
    from pagedkv_ops import _triton

    block_size, num_kv_heads, head_size = 16, 8, 128
    # pages that nothing touches take no memory
    cache = torch.empty(block + 1, block_size, num_kv_heads, head_size, dtype=torch.float16)
    cache[0] = 7.0
    ones = torch.ones(1, num_kv_heads, head_size, dtype=torch.float16)
    slot = torch.tensor([block * block_size], dtype=index_dtype)
    _triton.write_kv(0 * ones, ones, torch.empty_like(cache), cache, slot)
    table, seq_lens = torch.tensor([[block]], dtype=index_dtype), torch.tensor([1], dtype=index_dtype)
    key_cache = cache[:, :, :, :64]
    out = _triton.paged_attention(ones[..., :64], key_cache, cache, table, seq_lens)
    gathered = _triton.gather_kv(cache, table, seq_lens, 1)
    return out, gathered, float(cache[0].min())


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_offsets_past_2_to_31_elements(kernels: Kernels, index_dtype: torch.dtype) -> None:
    out, gathered, untouched = kernels.run(_attend_past_2_to_31_elements, 131072, index_dtype)
    assert torch.equal(out, torch.ones_like(out))
    assert torch.equal(gathered, torch.ones_like(gathered))
    assert untouched == 7.0


def _attend_by_rows(args: Any, options: dict[str, Any]) -> Tensor:
    """Interpreted with products whose rows do not depend on their place: numpy's BLAS has other kernels at edges."""
    from pagedkv_ops import _triton

    by_rows = lambda a, b, dtype=None: np.einsum("ij,jk->ik", a, b, dtype=dtype)  # noqa: E731
    with mock.patch.object(np, "matmul", by_rows):
        return _triton.paged_attention(*args, **options)


@pytest.mark.parametrize("options", [{}, {"window_left": 30, "softcap": 5.0}], ids=["plain", "window"])
def test_one_split_gives_the_same_bits_in_any_batch_and_chunking(kernels: Kernels, options: Any) -> None:
    seq_len = 75
    case = make_case(query_lens=(seq_len, 9), seq_lens=(seq_len, 100), heads=(6, 2), head_size=16)
    query, key_cache, value_cache, table, seq_lens, _ = case.args
    options = {"num_splits": 1, **options}

    def attend(rows: slice, table: Tensor, seq_lens: list[int], cu_seqlens_q: list[int] | None) -> Tensor:
        cu = None if cu_seqlens_q is None else torch.tensor(cu_seqlens_q)
        args = (query[rows], key_cache, value_cache, table, torch.tensor(seq_lens), cu)
        return kernels.run(_attend_by_rows, args, options)

    whole = attend(slice(None), table, seq_lens.tolist(), [0, seq_len, seq_len + 9])[:seq_len]
    alone = attend(slice(seq_len), table[:1], [seq_len], [0, seq_len])
    chunks = [attend(slice(a, b), table[:1], [b], [0, b - a]) for a, b in ((0, 1), (1, 40), (40, 74), (74, 75))]
    decoded = [attend(slice(i, i + 1), table[:1], [i + 1], None) for i in (0, 31, 32, 63, 64, 74)]
    assert torch.equal(alone, whole)
    assert torch.equal(torch.cat(chunks), whole)
    assert torch.equal(torch.cat(decoded), whole[[0, 31, 32, 63, 64, 74]])


def test_append_is_write_then_attend(kernels: Kernels) -> None:
    case = make_case(query_lens=(5, 1), seq_lens=(12, 30))
    key, value = torch.randn(6, 2, 16), torch.randn(6, 2, 16)
    slots = torch.tensor([*case.slots(0, range(7, 12)), *case.slots(1, range(29, 30))])
    caches = [case.key_cache.clone(), case.value_cache.clone()]
    interpreted, args = kernels.op_and_args(
        "paged_attention_append", case.query, key, value, *case.args[1:3], slots, *case.args[3:], softcap=2.0
    )
    for cache, new, written in zip(caches, (key, value), args[3:5], strict=True):
        cache.flatten(0, 1)[slots] = new
        torch.testing.assert_close(written, cache, rtol=0, atol=0, equal_nan=True)
    expected = kernels.op("paged_attention", case.query, *caches, *case.args[3:], softcap=2.0)
    assert torch.equal(interpreted, expected)


def test_head_sizes_that_no_tile_holds_are_refused(kernels: Kernels) -> None:
    for dtype, head_size, most in ((torch.float16, 1100, 1024), (torch.float32, 300, 256)):
        case = make_case(query_lens=(1,), seq_lens=(3,), head_size=head_size, dtype=dtype)
        message = rf"key_cache.size\(3\) must be at most {most} with float\d\d products on CUDA, got {head_size}"
        with pytest.raises(RuntimeError, match=message):
            kernels.op("paged_attention", *case.args)
