"""merge_states: attention over parts of the keys, joined, is attention over all of them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pagedkv_ops
from pagedkv_ops import reference
from pagedkv_ops.testing import assert_within_rounding, dense_attention

from .builders import FLOATS, sliced

MERGES = pytest.mark.parametrize("merge", [pagedkv_ops.merge_states, reference.merge_states], ids=["op", "reference"])


def states(seed: int, num_tokens: int, num_heads: int, v_head_size: int, dtype: torch.dtype):
    """Random parts; about a quarter of the rows saw nothing in one of them."""
    rng = torch.Generator().manual_seed(seed)
    parts = []
    for _ in range(2):
        out = torch.randn(num_tokens, num_heads, v_head_size, generator=rng).to(dtype)
        lse = 4 * torch.randn(num_tokens, num_heads, generator=rng)
        nothing = torch.rand(lse.shape, generator=rng) < 0.25
        parts += [out.masked_fill(nothing[..., None], 0.0), lse.masked_fill(nothing, -math.inf)]
    return parts


def merged(out_a, lse_a, out_b, lse_b, dtype=torch.float64):
    lse_a, lse_b = lse_a.to(dtype), lse_b.to(dtype)
    lse = torch.logaddexp(lse_a, lse_b)
    out = sum(
        torch.nan_to_num(torch.exp(part - lse), nan=0.0)[..., None] * out.to(dtype)
        for out, part in ((out_a, lse_a), (out_b, lse_b))
    )
    return out, lse


@MERGES
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("v_head_size", [1, 13, 64, 80, 576])
def test_merge_equals_float64(merge, dtype, v_head_size):
    parts = states(0, 37, 5, v_head_size, dtype)
    out, lse = merge(*parts)
    exact, exact_lse = merged(*parts)
    rounded, rounded_lse = merged(*parts, dtype=torch.float32)
    assert out.is_contiguous()
    assert_within_rounding(out, exact, rounded.to(dtype))
    assert_within_rounding(lse, exact_lse, rounded_lse)


@given(st.integers(0, 20), st.integers(1, 6), st.integers(1, 70), st.sampled_from(FLOATS), st.integers(0, 99))
def test_any_shape(num_tokens, num_heads, v_head_size, dtype, seed):
    """And parts that are heads of a wider tensor, with the log-sum-exps transposed."""
    out_a, lse_a, out_b, lse_b = states(seed, num_tokens, num_heads, v_head_size, dtype)
    merged_states = pagedkv_ops.merge_states(sliced(out_a), lse_a.T.contiguous().T, out_b, lse_b)
    torch.testing.assert_close(merged_states, reference.merge_states(out_a, lse_a, out_b, lse_b))


def test_parts_that_saw_nothing(run):
    """Both, either and none of two parts empty: 0 and -inf, the other part itself, ln 2 more."""
    lse_a = torch.tensor([[-math.inf, 1.0, -math.inf, 2.0]])
    lse_b = torch.tensor([[-math.inf, -math.inf, 3.0, 2.0]])
    out_a = torch.tensor([0.0, 4.0, 0.0, 1.0])[None, :, None]
    out_b = torch.tensor([0.0, 0.0, 6.0, 3.0])[None, :, None]
    out, lse = run(pagedkv_ops.merge_states, out_a, lse_a, out_b, lse_b)
    assert out.flatten().tolist() == pytest.approx([0.0, 4.0, 6.0, 2.0])
    assert lse.flatten().tolist() == pytest.approx([-math.inf, 1.0, 3.0, 2.0 + math.log(2)])


def test_far_apart_denominators_do_not_overflow():
    parts = [torch.ones(1, 1, 1), torch.tensor([[3e4]]), torch.full((1, 1, 1), 5.0), torch.tensor([[-3e4]])]
    out, lse = pagedkv_ops.merge_states(*parts)
    assert (out.item(), lse.item()) == (1.0, 3e4)


@pytest.mark.parametrize("with_sink", [False, True])
def test_attention_in_two_parts(run, with_sink):
    """A shared prefix without mask and each sequence's own tail; the sink is given to one part only."""
    rng = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, 1, 24, 2, 8, generator=rng)  # one sequence of 24, Hkv = 2
    query = torch.randn(5, 4, 8, generator=rng)
    pool_k, pool_v = keys.view(6, 4, 2, 8), values.view(6, 4, 2, 8)  # block i holds tokens 4i..4i+3
    bounds = torch.tensor([0, 5])
    sinks = torch.tensor([0.0, 1.0, -1.0, 2.0]) if with_sink else None

    def two_parts(query, pool_k, pool_v):
        prefix = pagedkv_ops.paged_attention_with_lse(
            query, pool_k, pool_v, torch.tensor([[0, 1, 2]]), torch.tensor([12]), bounds, causal=False, sinks=sinks
        )
        tail = pagedkv_ops.paged_attention_with_lse(
            query, pool_k, pool_v, torch.tensor([[3, 4, 5]]), torch.tensor([12]), bounds
        )
        return pagedkv_ops.merge_states(*prefix, *tail)

    out, lse = run(two_parts, query, pool_k, pool_v)
    exact, exact_lse = dense_attention(query, keys[0], values[0], sinks=sinks)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), exact_lse, rtol=1e-5, atol=1e-5)
