"""num_splits=1 gives the same bits whatever else is in the batch and however a prompt was cut into chunks."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pagedkv_ops

from .builders import FLOATS, Case, attention_options, make_case, run_rows

pytestmark = pytest.mark.skipif(
    pagedkv_ops.backends()["cpu"] == "reference",
    reason="the reference multiplies by PyTorch's matmul, whose bits depend on the number of rows",
)

SHAPES = {
    "heads": st.sampled_from([(4, 4), (8, 2), (5, 1), (6, 3)]),
    "head_size": st.sampled_from([13, 16, 64, 80, 128]),
    "block_size": st.sampled_from([1, 3, 16, 64]),
    "dtype": st.sampled_from(FLOATS),
    "cache_dtype": st.sampled_from([None, torch.bfloat16, torch.float16]),
}
OPTIONS = st.sampled_from(
    [{}, {"window_left": 20}, {"softcap": 3.0}, {"alibi": True, "sinks": True}, {"causal": False, "window_right": 2}]
)


def assert_bitwise(actual, expected):
    torch.testing.assert_close(tuple(actual), tuple(expected), rtol=0, atol=0)


def make(lengths, heads, options, **shape) -> Case:
    query_lens, seq_lens = zip(*lengths, strict=True)
    options = attention_options(heads[0], num_splits=1, **options)
    return make_case(query_lens=query_lens, seq_lens=seq_lens, heads=heads, options=options, padding_rows=1, **shape)


@given(
    lengths=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 300)), min_size=2, max_size=6),
    options=OPTIONS,
    **SHAPES,
)
def test_independent_of_the_rest_of_the_batch(lengths, heads, options, **shape):
    case = make([(query_len, query_len + past) for query_len, past in lengths], heads, options, **shape)
    together = pagedkv_ops.paged_attention_with_lse(*case.args, **case.options)
    bounds = case.cu_seqlens_q.tolist()
    for b, seq_len in enumerate(case.spec.seq_lens):
        rows = slice(bounds[b], bounds[b + 1])
        assert_bitwise([part[rows] for part in together], run_rows(case, b, rows, seq_len))


@given(
    length=st.integers(1, 200),
    cuts=st.lists(st.integers(1, 200), max_size=6),
    options=OPTIONS.filter(lambda options: options.get("causal", True)),
    **SHAPES,
)
def test_independent_of_how_the_prompt_was_cut(length, cuts, heads, options, **shape):
    case = make([(length, length)], heads, options, **shape)
    whole = pagedkv_ops.paged_attention_with_lse(*case.args, **case.options)
    bounds = [0, *sorted({cut for cut in cuts if cut < length}), length]
    for start, stop in itertools.pairwise(bounds):
        rows = slice(start, stop)
        assert_bitwise([part[rows] for part in whole], run_rows(case, 0, rows, stop))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (9, 1)])
def test_chunks_of_one_token(heads, dtype):
    """Decode rows (no cu_seqlens_q) have the bits of the prefill that holds them."""
    case = make([(150, 150)], heads, {}, head_size=64, block_size=16, dtype=dtype)
    whole = pagedkv_ops.paged_attention_with_lse(*case.args, **case.options)
    for token in (0, 1, 15, 16, 17, 63, 64, 127, 128, 149):
        row = case.query[token : token + 1]
        args = (row, case.key_cache, case.value_cache, case.block_table, torch.tensor([token + 1]))
        decoded = pagedkv_ops.paged_attention_with_lse(*args, **case.options)
        assert_bitwise(decoded, [part[token : token + 1] for part in whole])


@given(
    seq_lens=st.lists(st.integers(1, 700), min_size=2, max_size=9),
    options=OPTIONS,
    **SHAPES,
)
def test_decode_batch_equals_each_sequence_alone(seq_lens, heads, options, **shape):
    options = attention_options(heads[0], num_splits=1, **options)
    case = make_case(query_lens=(1,) * len(seq_lens), seq_lens=seq_lens, heads=heads, options=options, **shape)
    together = pagedkv_ops.paged_attention_with_lse(*case.args, **case.options)
    for b, seq_len in enumerate(seq_lens):
        rows = slice(b, b + 1)
        assert_bitwise([part[rows] for part in together], run_rows(case, b, rows, seq_len))


def test_independent_of_threads_and_of_where_the_blocks_lie():
    threads = torch.get_num_threads()
    results = []
    try:
        for count, placement_seed in ((1, 0), (2, 0), (3, 0), (1, 1)):
            torch.set_num_threads(count)
            shape = {"head_size": 64, "block_size": 16, "placement_seed": placement_seed}
            case = make([(3, 500), (1, 90), (70, 70)], (8, 2), {}, **shape)
            results.append(pagedkv_ops.paged_attention_with_lse(*case.args, **case.options))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert_bitwise(other, results[0])
