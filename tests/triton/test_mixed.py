"""Decode rows beside chunks: two launches, and the keys of decode rows shared out by each sequence's own length."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="triton is not installed (pip install triton==3.7.1)")

import triton
import triton.language as tl

from pagedkv_ops import reference
from pagedkv_ops._triton.shares import find_share
from tests.ops.builders import make_case

from .worker import DEVICE, Kernels

TOLERANCE = 2e-5 if DEVICE == "cpu" else 2e-4


def assert_as_the_reference(kernels: Kernels, case: Any, **options: Any) -> None:
    args = (case.query, case.key_cache, case.value_cache, case.block_table, case.seq_lens, case.cu_seqlens_q)
    expected = reference.paged_attention_with_lse(*args, **options)
    actual = kernels.op("paged_attention_with_lse", *args, **options)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize(
    "options",
    [{}, {"window_left": 100}, {"causal": False, "window_right": 2}, {"softcap": 3.0, "sinks": True}],
    ids=str,
)
@pytest.mark.parametrize(
    ("query_lens", "seq_lens", "padding"),
    [
        ((1, 20, 1, 0, 3), (600, 30, 1, 0, 300), 1),  # one row past the last sequence is no decode row
        ((1, 1, 1), (300, 0, 5), 0),  # packed, but no chunk; a row without keys
        ((5, 7), (100, 30), 3),  # no decode row
        ((0, 0, 1), (0, 9, 300), 0),
    ],
    ids=str,
)
def test_decode_rows_beside_chunks(
    kernels: Kernels, query_lens: tuple[int, ...], seq_lens: tuple[int, ...], padding: int, options: dict[str, Any]
) -> None:
    case = make_case(query_lens=query_lens, seq_lens=seq_lens, heads=(2, 1), head_size=16, padding_rows=padding)
    options = options | ({"sinks": torch.randn(2)} if "sinks" in options else {})
    assert_as_the_reference(kernels, case, **options)


@triton.jit
def _kernel(out_ptr, num_shares, seq_lens_ptr, cu_ptr, batch, num_tokens, window_left, SPEC: tl.constexpr):
    share = tl.program_id(0)
    found = find_share(share, num_shares, seq_lens_ptr, cu_ptr, batch, num_tokens, 2**30, window_left, SPEC)
    for i in tl.static_range(3):
        tl.store(out_ptr + 3 * share + i, found[i])


def _shares_of(num_shares: int, seq_lens: Tensor, cu_seqlens: Tensor | None, window_left: int) -> list[list[int]]:
    """(sequence, which of its shares, how many) of every program."""
    from pagedkv_ops._triton import attention
    from pagedkv_ops._triton.launch import recording

    batch = len(seq_lens)
    query, cache = torch.zeros(batch, 2, 64), torch.zeros(1, 16, 2, 64)
    table = torch.zeros(batch, 64, dtype=torch.int32)
    with recording() as recorded:
        attention.paged_attention(query, cache, cache.clone(), table, seq_lens, window_left=window_left)
    spec = recorded[0].meta["SPEC"]
    assert batch <= spec.SHARES
    assert spec.MIN_TILES * spec.BLOCK_N == 256
    out = torch.full((num_shares, 3), -1, dtype=torch.int32)
    num_tokens = batch if cu_seqlens is None else int(cu_seqlens[-1])
    _kernel[(num_shares,)](out, num_shares, seq_lens, cu_seqlens, batch, num_tokens, window_left, SPEC=spec)
    return out.tolist()


@pytest.mark.parametrize(
    ("seq_lens", "cu_seqlens", "window_left", "counts"),
    [
        # the worst case would have one program walk 131,072 keys
        ([131072, 100, 100, 100], None, -1, [60, 1, 1, 1]),
        ([4096] * 4, None, -1, [16] * 4),
        ([16384, 8192, 4096, 4096], None, -1, [32, 16, 8, 8]),
        ([131072, 100, 100, 100], None, 1000, [4, 1, 1, 1]),  # what a window hides is no work
        ([131072, 9000, 131072, 0], [0, 1, 5, 6, 7], -1, [31, 0, 31, 1]),  # a chunk has no share
        ([200, 256, 257, 512], None, -1, [1, 1, 2, 2]),  # not below 256 keys
        ([0, 0, 0, 0], None, -1, [1, 1, 1, 1]),
    ],
)
def test_shares_follow_each_length(
    kernels: Kernels, seq_lens: list[int], cu_seqlens: list[int] | None, window_left: int, counts: list[int]
) -> None:
    cu = None if cu_seqlens is None else torch.tensor(cu_seqlens)
    shares = kernels.run(_shares_of, 64, torch.tensor(seq_lens), cu, window_left)
    expected = [[b, which, count] for b, count in enumerate(counts) for which in range(count)]
    assert shares[: len(expected)] == expected
    assert all(count == 0 for *_, count in shares[len(expected) :])


def test_every_sequence_has_its_shares_whatever_the_lengths(kernels: Kernels) -> None:
    rng = torch.Generator().manual_seed(0)
    for _ in range(5):
        batch = int(torch.randint(1, 13, (1,), generator=rng))
        seq_lens = (torch.rand(batch, generator=rng) ** 6 * 200_000).long()
        num_shares = 2 * batch + int(torch.randint(0, 20, (1,), generator=rng))
        shares = [share for share in kernels.run(_shares_of, num_shares, seq_lens, None, -1) if share[2]]
        assert sorted({b for b, *_ in shares}) == list(range(batch))
        for b in range(batch):
            mine = [(which, count) for owner, which, count in shares if owner == b]
            assert mine == [(which, len(mine)) for which in range(len(mine))]
        keys = max(int(seq_lens[b]) / count for b, _, count in shares)
        assert keys <= max(512, 2 * int(seq_lens.sum()) / num_shares + 256)


def _long_row_beside_a_chunk(num_splits: int) -> tuple[Tensor, list[tuple[str, int, int]]]:
    """The result, and of each attention launch its kernel's rows, programs and splits."""
    from pagedkv_ops import _triton
    from pagedkv_ops._triton import launch

    case = make_case(query_lens=(1, 9), seq_lens=(3000, 20), heads=(2, 1), head_size=16)
    started = []

    class Started(list):
        def append(self, each: Any) -> None:
            if (spec := each.meta.get("SPEC")) is not None:
                started.append((spec.ROWS, each.grid[0] if spec.SHARES else 0, each.grid[2]))
            each.kernel[each.grid](*each.args, **each.meta)

    launch._recorded = Started()
    try:
        out = _triton.paged_attention(*case.args, num_splits=num_splits)
    finally:
        launch._recorded = None
    return out, started


def test_a_long_row_beside_a_chunk_is_split(kernels: Kernels) -> None:
    out, (chunks, rows) = kernels.run(_long_row_beside_a_chunk, 0)
    one, (alone,) = kernels.run(_long_row_beside_a_chunk, 1)
    assert (chunks[0], rows[0], alone[0]) == (2, 1, 0)
    assert rows[1] >= 12  # 3,000 keys, no fewer than 256 in a share
    assert alone[1:] == (0, 1)
    torch.testing.assert_close(out, one, rtol=TOLERANCE, atol=TOLERANCE)
