"""The oracle itself: dense float64 attention against PyTorch's, tolerances, and the builders of the other tests."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from pagedkv_ops import value_checks
from pagedkv_ops.testing import assert_within_rounding, dense_attention, tolerance

from .builders import attention_options, make_case, pairwise


def _sdpa_mask(query_len, seq_len, causal, left, right, slopes):
    """Additive mask [Hq or 1, query_len, seq_len], written as loops over positions."""
    rows = []
    for i in range(query_len):
        position = seq_len - query_len + i
        rows.append(
            [
                (not causal or j <= position)
                and (left < 0 or j >= position - left)
                and (right < 0 or j <= position + right)
                for j in range(seq_len)
            ]
        )
    mask = torch.zeros(query_len, seq_len, dtype=torch.float64).masked_fill(~torch.tensor(rows), -math.inf)
    if slopes is None:
        return mask[None]
    distance = torch.tensor([[j - (seq_len - query_len + i) for j in range(seq_len)] for i in range(query_len)])
    return mask + slopes.double()[:, None, None] * distance


@pytest.mark.parametrize(("causal", "left", "right"), [(True, -1, -1), (False, -1, -1), (True, 3, -1), (False, 2, 4)])
@pytest.mark.parametrize("alibi", [False, True])
def test_dense_attention_equals_sdpa_in_float64(causal, left, right, alibi):
    query, key = torch.randn(5, 9, 13), torch.randn(11, 3, 13)
    value = torch.randn(11, 3, 7)
    slopes = attention_options(9, alibi=True)["alibi_slopes"] if alibi else None
    out, _ = dense_attention(
        query, key, value, causal=causal, window_left=left, window_right=right, alibi_slopes=slopes
    )
    expected = F.scaled_dot_product_attention(
        query.double().transpose(0, 1),
        key.double().transpose(0, 1),
        value.double().transpose(0, 1),
        attn_mask=_sdpa_mask(5, 11, causal, left, right, slopes),
        enable_gqa=True,
    )
    torch.testing.assert_close(out, expected.transpose(0, 1), rtol=0, atol=1e-14)


def test_sink_equals_a_key_whose_value_is_zero():
    """A sink of the head's own logit is one more key with V = 0."""
    query, key, value = torch.randn(3, 2, 8), torch.randn(6, 2, 8), torch.randn(6, 2, 8)
    sinks = torch.tensor([0.5, -2.0])
    out, lse = dense_attention(query, key, value, causal=False, sinks=sinks)
    for head in range(2):
        logits = torch.cat(
            [query[:, head].double() @ key[:, head].double().T * 8**-0.5, torch.full((3, 1), sinks[head])], 1
        )
        padded = torch.cat([value[:, head].double(), torch.zeros(1, 8, dtype=torch.float64)])
        torch.testing.assert_close(out[:, head], torch.softmax(logits, 1) @ padded, rtol=0, atol=1e-14)
        torch.testing.assert_close(lse[:, head], torch.logsumexp(logits, 1), rtol=0, atol=1e-14)


def test_tolerance_is_twice_the_error_but_never_below_rounding():
    exact = torch.tensor([1.0, -4.0], dtype=torch.float64)
    assert tolerance(exact, torch.tensor([1.25, -4.0])) == 0.5
    assert tolerance(exact, torch.tensor([1.25, -4.0]), torch.tensor([1.5, -4.0])) == 1.0
    assert tolerance(exact, torch.tensor([1.0, -4.0])) == 4 * 2 * torch.finfo(torch.float32).eps
    assert tolerance(exact, torch.tensor([1.0, -4.0]).bfloat16()) == 4 * (2**-7 + 2**-23)
    assert tolerance(torch.tensor([-math.inf], dtype=torch.float64), torch.tensor([-math.inf])) == 0


def test_assert_within_rounding_refuses_nan_missing_infinities_and_other_types():
    exact = torch.tensor([1.0, -math.inf], dtype=torch.float64)
    rounded = exact.float()
    assert_within_rounding(rounded, exact, rounded)
    for wrong in ([math.nan, -math.inf], [1.0, 0.0], [1.1, -math.inf]):
        with pytest.raises(AssertionError):
            assert_within_rounding(torch.tensor(wrong), exact, rounded)
    with pytest.raises(AssertionError, match=r"expected torch\.float32, got torch\.float16"):
        assert_within_rounding(rounded.half(), exact, rounded)


@given(st.integers(0, 9), st.integers(0, 20), st.integers(1, 5), st.booleans(), st.integers(-1, 6), st.integers(-1, 6))
def test_visible_blocks_holds_every_visible_key_and_no_other_block(query_len, seq_len, block_size, causal, left, right):
    visible = set()
    for position, key in itertools.product(range(seq_len - query_len, seq_len), range(seq_len)):
        if (
            not (causal and key > position)
            and (left < 0 or key >= position - left)
            and (right < 0 or key <= position + right)
        ):
            visible.add(key // block_size)
    columns = value_checks.visible_blocks(query_len, seq_len, block_size, causal, left, right)
    assert set(columns) == visible


def test_pairwise_covers_every_pair():
    factors = {"a": [1, 2, 3], "b": "xy", "c": [True, False], "d": range(4)}
    rows = pairwise(0, **factors)
    for one, other in itertools.combinations(factors, 2):
        assert {(row[one], row[other]) for row in rows} == set(itertools.product(factors[one], factors[other]))
    assert len(rows) < 3 * 2 * 2 * 4


def test_make_case_poisons_what_no_token_owns():
    case = make_case(query_lens=(2, 1), seq_lens=(6, 3), block_size=4)
    tokens = 9
    assert int((~torch.isnan(case.key_cache[..., 0, 0])).sum()) == tokens
    assert case.block_table.tolist()[1][1:] == [2**31 - 1] * 2
