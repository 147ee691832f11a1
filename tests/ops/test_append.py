"""paged_attention_append: write and attention in one op, equal to the two ops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pagedkv_ops
from pagedkv_ops import reference
from pagedkv_ops.testing import assert_within_rounding

from .builders import FLOATS, make_case

APPENDS = pytest.mark.parametrize(
    "append", [pagedkv_ops.paged_attention_append, reference.paged_attention_append], ids=["op", "reference"]
)


@APPENDS
@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 70)), min_size=1, max_size=5),
    block_size=st.integers(1, 20),
    head_size=st.integers(1, 70),
    padding_rows=st.integers(0, 3),
    dtype=st.sampled_from(FLOATS),
    window_left=st.integers(-1, 20),
)
def test_any_shape_writes_and_attends(append, lengths, window_left, **shape):
    query_lens, seq_lens = zip(*lengths, strict=True)
    case = make_case(query_lens=query_lens, seq_lens=seq_lens, options={"window_left": window_left}, **shape)
    args = case.append_args()
    out = append(*args, **case.options)
    assert out.is_contiguous()
    assert_within_rounding(out, case.dense()[0], *(rounded for rounded, _ in case.rounded()))
    torch.testing.assert_close(args[3:5], (case.key_cache, case.value_cache), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_write_then_attend_bitwise(run, dtype):
    case = make_case(query_lens=(3, 1), seq_lens=(9, 21), dtype=dtype)
    query, key, value, key_cache, value_cache, slots, *rest = case.append_args()
    fused = run(pagedkv_ops.paged_attention_append, *case.append_args())
    pagedkv_ops.write_kv(key, value, key_cache, value_cache, slots)
    separate = pagedkv_ops.paged_attention(query, key_cache, value_cache, *rest)
    torch.testing.assert_close(fused, separate, rtol=0, atol=0)


def test_appending_token_by_token_equals_one_prefill():
    case = make_case(query_lens=(12,), seq_lens=(12,), heads=(4, 2))
    query, key, value, key_cache, value_cache, slots, table, _, _ = case.append_args()
    whole = pagedkv_ops.paged_attention(*case.args)
    for t in range(12):
        row = slice(t, t + 1)
        out = pagedkv_ops.paged_attention_append(
            query[row], key[row], value[row], key_cache, value_cache, slots[row], table, torch.tensor([t + 1])
        )
        torch.testing.assert_close(out[0], whole[t])
