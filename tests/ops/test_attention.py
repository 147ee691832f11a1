"""The attention ops: a grid of parameters against dense float64 attention, and small exact inputs."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pagedkv_ops
from pagedkv_ops import reference

from .builders import (
    FLOATS,
    INDEX_DTYPES,
    OUT_OF_RANGE,
    Case,
    assert_attention,
    attention_options,
    make_case,
    mean_probe,
    pairwise,
    row_id,
)

WITH_LSE = (pagedkv_ops.paged_attention_with_lse, reference.paged_attention_with_lse)
LENGTHS = {  # query lengths, key lengths: also around the kernels' tiles (6 rows, 16 to 64 columns, 256 keys)
    "decode": ((1, 1, 1, 1, 1), (1, 2, 7, 16, 65)),
    "long_decode": ((1, 1), (2011, 640)),
    "prefill": ((17, 1, 64), (17, 1, 64)),
    "long_prefill": ((300,), (300,)),
    "chunk": ((33, 5), (2011, 96)),
    "mixed": ((1, 40, 0, 3, 1), (130, 40, 9, 515, 0)),
    "more_queries_than_keys": ((4, 6, 1, 40), (2, 0, 3, 11)),
    "one_tile": ((8, 97), (8, 256)),
    "about_one_tile": ((9, 31), (255, 257)),
    "about_two_tiles": ((64, 65, 12), (511, 65, 513)),
    "long_chunk": ((200,), (300,)),
}
MASKS = {
    "causal": {},
    "full": {"causal": False},
    "window": {"window_left": 15},
    "window_0": {"window_left": 0},
    "window_256": {"window_left": 256},
    "two_sided": {"causal": False, "window_left": 30, "window_right": 7},
    "wide": {"causal": False, "window_left": 40, "window_right": 130},
    "right_only": {"causal": False, "window_right": 3},
}
GRID = pairwise(
    1,
    head_size=(13, 32, 46, 64, 80, 96, 128, 256, 576),
    block_size=(1, 3, 8, 16, 64, 544),
    heads=((4, 4), (8, 2), (5, 1), (9, 3), (13, 13), (16, 2)),
    lengths=tuple(LENGTHS),
    mask=tuple(MASKS),
    dtype=FLOATS,
    cache_dtype=FLOATS,
    v_head_size=(None, 16, 24, 64, 144),
    extras=({}, {"softcap": 2.0}, {"alibi": True}, {"sinks": True}, {"alibi": True, "sinks": True, "softcap": 30.0}),
    layout=("nhd", "hnd", "interleaved"),
    strided=(False, True),
    index_dtype=INDEX_DTYPES,
    fill=(math.nan, math.inf),
    padding_rows=(0, 3),
    num_splits=(0, 1, 5),
)


@pytest.mark.parametrize("row", GRID, ids=row_id)
def test_grid_equals_dense_attention(row):
    """With the log-sum-exp, without it, and with the write of the new tokens."""
    shape = dict(row)
    query_lens, seq_lens = LENGTHS[shape.pop("lengths")]
    options = {**MASKS[shape.pop("mask")], **shape.pop("extras"), "num_splits": shape.pop("num_splits")}
    options = attention_options(row["heads"][0], **options)
    case = make_case(query_lens=query_lens, seq_lens=seq_lens, options=options, **shape)
    assert_attention(case, *WITH_LSE)
    expected, _ = pagedkv_ops.paged_attention_with_lse(*case.args, **case.options)
    torch.testing.assert_close(pagedkv_ops.paged_attention(*case.args, **case.options), expected, rtol=0, atol=0)
    args = case.append_args()
    out = pagedkv_ops.paged_attention_append(*args, **case.options)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)
    torch.testing.assert_close(args[3:5], (case.key_cache, case.value_cache), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_longest_prefill(dtype):
    case = make_case(query_lens=(2011,), seq_lens=(2011,), heads=(1, 1), head_size=64, block_size=16, dtype=dtype)
    assert_attention(case, pagedkv_ops.paged_attention_with_lse)


@given(
    lengths=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 70)), min_size=1, max_size=5),
    block_size=st.integers(1, 20),
    head_size=st.integers(1, 70),
    v_head_size=st.integers(1, 70),
    num_kv_heads=st.integers(1, 4),
    group_size=st.integers(1, 5),
    causal=st.booleans(),
    window_left=st.integers(-1, 20),
    window_right=st.integers(-1, 20),
    num_splits=st.integers(0, 9),
    dtype=st.sampled_from(FLOATS),
)
def test_any_shape_equals_dense_attention(
    lengths, num_kv_heads, group_size, causal, window_left, window_right, num_splits, **shape
):
    query_lens, seq_lens = zip(*lengths, strict=True)
    options = {"causal": causal, "window_left": window_left, "window_right": window_right, "num_splits": num_splits}
    heads = (num_kv_heads * group_size, num_kv_heads)
    case = make_case(query_lens=query_lens, seq_lens=seq_lens, heads=heads, options=options, **shape)
    assert_attention(case, *WITH_LSE)


def test_empty_batches():
    for query_lens, padding_rows in (((), 0), ((), 3), ((0, 0), 0), ((0, 0), 2)):
        case = make_case(query_lens=query_lens, seq_lens=(0,) * len(query_lens), padding_rows=padding_rows)
        if not query_lens:
            case.cu_seqlens_q = torch.zeros(1, dtype=torch.int64)
        out, lse = pagedkv_ops.paged_attention_with_lse(*case.args)
        assert out.shape == (padding_rows, 4, 16)
        assert not out.any()
        assert torch.isneginf(lse).all()


# Small inputs with known answers: mean_probe gives the mean of the visible positions.


def probe(run, case: Case, **options) -> tuple[list[float], list[float]]:
    """Output and lse of the first head, one number per query row (all D elements are equal)."""
    out, lse = run(pagedkv_ops.paged_attention_with_lse, *case.args, **options)
    torch.testing.assert_close(out, out[:, :1, :1].expand_as(out), rtol=0, atol=0)
    return out[:, 0, 0].tolist(), lse[:, 0].tolist()


def about(*values: float) -> Any:
    return pytest.approx(list(values), rel=1e-6, abs=1e-6)


POISONS = [(fill, dtype) for fill in (math.nan, math.inf, -math.inf) for dtype in FLOATS]
BOTH_SIDES = {"causal": False, "window_left": 0, "window_right": 1}


@pytest.mark.parametrize(
    ("length", "shape", "options", "means"),
    [
        *((13, {"fill": fill, "dtype": dtype}, {}, [6.0]) for fill, dtype in POISONS),  # poisoned tail
        (5, {"fill": 0.0}, {"causal": False}, [2.0]),  # 1.25 if the tail of three zeros counted
        (5, {"num_queries": 2}, {}, [1.5, 2.0]),
        (6, {}, {"window_left": 2}, [4.0]),  # as a sliding_window of 3, which counts the token itself
        (6, {}, {"window_left": 0}, [5.0]),
        (6, {}, {"window_left": 5}, [2.5]),
        (6, {}, {"window_left": 99}, [2.5]),
        (6, {"num_queries": 3}, {"causal": False, "window_right": 1}, [2.0, 2.5, 2.5]),  # it is inclusive
        (6, {"num_queries": 3}, BOTH_SIDES, [3.5, 4.5, 5.0]),
    ],
)
def test_mean_of_the_visible_positions(run, length, shape, options, means):
    out, lse = probe(run, mean_probe(length, 4, **shape), **options)
    assert out == about(*means)
    if not options:
        assert lse == about(*(math.log(length - len(means) + 1 + row) for row in range(len(means))))


def test_rows_that_see_nothing(run):
    case = mean_probe(2, 4, num_queries=4)
    for slot, value in zip(case.slots(0, range(2)), (4.0, 8.0), strict=True):
        case.value_cache[slot // 4, slot % 4] = value
    out, lse = probe(run, case)
    assert out == about(0.0, 0.0, 4.0, 6.0)
    assert out[:2] == [0.0, 0.0]
    assert lse == about(-math.inf, -math.inf, 0.0, math.log(2))


@pytest.mark.parametrize("sink", [False, True])
def test_sequence_of_length_zero(run, sink):
    case = make_case(query_lens=(1, 1), seq_lens=(0, 3), heads=(2, 1))
    sinks = torch.tensor([0.5, -1.5]) if sink else None
    out, lse = run(pagedkv_ops.paged_attention_with_lse, *case.args, sinks=sinks)
    assert out[0].tolist() == [[0.0] * 16] * 2
    assert lse[0].tolist() == ([0.5, -1.5] if sink else [-math.inf, -math.inf])
    assert torch.isfinite(out).all()


KEYS = {  # a query of 1 over keys and values, all of one element: the output, and the lse where it tells more
    "softcap": ((0.0, 2.0), (0.0, 1.0), {"softcap": 1.0}, 0.7239, None),
    "no softcap": ((0.0, 2.0), (0.0, 1.0), {}, 0.8808, None),
    "softcap keeps a masked key at weight 0": (
        (900.0, 1.0, 1.0),
        (1000.0, 3.0, 5.0),
        {"softcap": 1.0, "window_left": 1},
        4.0,
        None,
    ),
    "softcap of a huge score": ((5000.0, -5000.0), (7.0, 1.0), {"softcap": 50.0}, 7.0, 50.0),
    "huge logits do not overflow": ((3e4, 3e4, -3e4), (1.0, 2.0, 9.0), {}, 1.5, 3e4 + math.log(2)),
}


@pytest.mark.parametrize("name", KEYS)
def test_few_keys(run, name):
    logits, values, options, expected, expected_lse = KEYS[name]
    case = make_case(query_lens=(1,), seq_lens=(len(logits),), heads=(1, 1), head_size=1)
    case.query.fill_(1.0)
    for slot, key, value in zip(case.slots(0, range(len(logits))), logits, values, strict=True):
        case.key_cache[slot // 4, slot % 4], case.value_cache[slot // 4, slot % 4] = key, value
    out, lse = run(pagedkv_ops.paged_attention_with_lse, *case.args, **options)
    assert out.item() == pytest.approx(expected, abs=5e-5)
    if expected_lse is not None:
        assert lse.item() == pytest.approx(expected_lse)


@pytest.mark.parametrize(("length", "mean"), [(16, 7.5), (15, 7.0), (17, 8.0), (32, 15.5)])
def test_length_comes_from_seq_lens_and_not_from_the_table(run, length, mean):
    case = mean_probe(length, 16, fill=1000.0)
    used = case.block_table[0, : -(-length // 16)].tolist()
    spare = next(block for block in range(case.key_cache.size(0)) if block not in used)
    case.block_table[0, len(used) :] = spare  # a block full of V = 1000
    case.key_cache.zero_()
    assert probe(run, case)[0] == about(mean)


def test_entries_outside_a_sliding_window_are_not_read(run):
    """Positions 0..7 have left the window: their blocks are gone and their table entries are rubbish."""
    case = mean_probe(11, 4)
    case.block_table[0, :2] = OUT_OF_RANGE
    assert probe(run, case, window_left=2)[0] == about(9.0)
    case.block_table[0, :2] = -5
    assert probe(run, case, window_left=2)[0] == about(9.0)


def test_static_length_table_row_past_the_last_token_may_hold_anything(run):
    case = mean_probe(3, 4)
    case.block_table = torch.tensor([[case.block_table[0, 0].item(), -1, OUT_OF_RANGE]])
    assert probe(run, case)[0] == about(1.0)


def test_scale_and_its_default():
    case = make_case(query_lens=(3,), seq_lens=(8,))
    default = pagedkv_ops.paged_attention(*case.args)
    torch.testing.assert_close(pagedkv_ops.paged_attention(*case.args, scale=16**-0.5), default, rtol=0, atol=0)
    for scale in (0.7, -0.1):
        case.options = {"scale": scale}
        assert_attention(case, pagedkv_ops.paged_attention_with_lse)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_head_vectors_of_a_narrow_type(dtype):
    """Slopes and sinks may have any float type."""
    options = {k: v.to(dtype) for k, v in attention_options(4, alibi=True, sinks=True).items()}
    assert_attention(
        make_case(query_lens=(3, 1), seq_lens=(8, 5), options=options), pagedkv_ops.paged_attention_with_lse
    )


def test_table_shared_by_two_sequences():
    """Prefix sharing: the same blocks under two lengths."""
    case = make_case(query_lens=(1, 1), seq_lens=(11, 11))
    case.block_table[1] = case.block_table[0]
    case.seq_lens[1] = 6
    case.keys[1], case.values[1] = case.keys[0][:6], case.values[0][:6]
    assert_attention(case, pagedkv_ops.paged_attention_with_lse)
