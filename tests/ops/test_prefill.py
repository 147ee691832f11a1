"""Many query tokens per sequence: memory that must not be read, and bits that do not depend on how the work was cut."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import pagedkv_ops

from .builders import FLOATS, Spec, assert_attention, make_case, mean_probe, run_rows


@pytest.mark.parametrize("fill", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_lies_behind_the_length_and_before_the_window_stays_there(dtype, fill):
    """The blocks of both places hold ``fill``, and the table names none that the window has passed."""
    for seq_len, window_left in ((301, -1), (301, 20), (600, 270)):
        spec = Spec(query_lens=(30,), seq_lens=(seq_len,), heads=(4, 2), block_size=16, dtype=dtype, fill=fill)
        case = make_case(spec, options={"window_left": window_left})
        assert_attention(case, pagedkv_ops.paged_attention_with_lse)


def test_a_masked_key_that_is_nan_does_not_reach_earlier_rows():
    case = make_case(query_lens=(64,), seq_lens=(64,), heads=(2, 1), block_size=16)
    expected, expected_lse = pagedkv_ops.paged_attention_with_lse(*case.args)
    block, offset = divmod(case.slots(0, range(40, 41))[0], 16)
    case.key_cache[block, offset] = math.nan
    out, lse = pagedkv_ops.paged_attention_with_lse(*case.args)
    torch.testing.assert_close(out[:40], expected[:40], rtol=0, atol=0)
    torch.testing.assert_close(lse[:40], expected_lse[:40], rtol=0, atol=0)
    assert out[40:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_are_one_average_to_one(dtype):
    """However the weights were rounded, their sum is the one they are divided by."""
    case = make_case(query_lens=(70,), seq_lens=(700,), heads=(4, 2), head_size=64, block_size=16, dtype=dtype)
    case.value_cache.fill_(1.0)
    out = pagedkv_ops.paged_attention(*case.args)
    torch.testing.assert_close(out, torch.ones_like(out), rtol=0, atol=4e-3 if dtype == torch.bfloat16 else 1e-6)


def test_mean_of_visible_positions():
    case = mean_probe(600, 16, num_queries=300)
    position = torch.arange(300, 600, dtype=torch.float32)
    for options, mean, count in (
        ({}, position / 2, position + 1),
        ({"window_left": 9}, position - 4.5, torch.full((300,), 10.0)),
        ({"causal": False}, torch.full((300,), 299.5), torch.full((300,), 600.0)),
    ):
        out, lse = pagedkv_ops.paged_attention_with_lse(*case.args, **options)
        torch.testing.assert_close(out[:, 0, 0], mean, rtol=1e-6, atol=1e-5)
        torch.testing.assert_close(lse[:, 0], count.log())


def test_huge_logits_do_not_overflow():
    case = make_case(query_lens=(40,), seq_lens=(300,), heads=(2, 1), head_size=64, block_size=16)
    out, lse = pagedkv_ops.paged_attention_with_lse(*case.args, scale=1e4)
    assert torch.isfinite(out).all()
    assert torch.isfinite(lse).all()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("mask", [{}, {"window_left": 100}])
def test_bits_do_not_depend_on_chunks_and_threads(dtype, mask):
    """Tiles of keys begin at multiples of their size and unseen keys add zeros, whatever rows share a task."""
    case = make_case(
        query_lens=(560, 40), seq_lens=(560, 90), heads=(8, 2), head_size=64, block_size=16, dtype=dtype, options=mask
    )
    whole = pagedkv_ops.paged_attention_with_lse(*case.args, **case.options)
    for start, stop in itertools.pairwise((0, 33, 47, 300, 411, 560)):
        chunk = run_rows(case, 0, slice(start, stop), stop)
        for part, expected in zip(chunk, whole, strict=True):
            torch.testing.assert_close(part, expected[start:stop], rtol=0, atol=0)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        serial = pagedkv_ops.paged_attention_with_lse(*case.args, **case.options)
    finally:
        torch.set_num_threads(num_threads)
    for part, expected in zip(serial, whole, strict=True):
        torch.testing.assert_close(part, expected, rtol=0, atol=0)
