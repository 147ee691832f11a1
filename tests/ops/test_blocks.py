"""copy_blocks, swap_blocks and gather_kv."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pagedkv_ops
from pagedkv_ops import reference

from .builders import INDEX_DTYPES, OUT_OF_RANGE, copy_strided, make_caches, strided_index

COPIES = pytest.mark.parametrize("copy", [pagedkv_ops.copy_blocks, reference.copy_blocks], ids=["op", "reference"])
SWAPS = pytest.mark.parametrize("swap", [pagedkv_ops.swap_blocks, reference.swap_blocks], ids=["op", "reference"])
GATHERS = pytest.mark.parametrize("gather", [pagedkv_ops.gather_kv, reference.gather_kv], ids=["op", "reference"])

# Source and destination pairs in which a destination occurs once and sources may be destinations too.
MAPPINGS = st.integers(1, 9).flatmap(
    lambda n: st.tuples(
        st.just(n),
        st.permutations(range(n)).flatmap(
            lambda destinations: st.lists(st.integers(0, n - 1), max_size=n).map(
                lambda sources: list(zip(sources, destinations, strict=False))
            )
        ),
    )
)


def mapping(pairs, index_dtype=torch.int64):
    return torch.tensor(pairs, dtype=index_dtype).reshape(-1, 2)


def pool(num_blocks: int, dtype: torch.dtype = torch.float32, layout: str = "nhd", heads: int = 2):
    """K and V caches in which every element differs from every other block's."""
    caches = make_caches(num_blocks, 4, heads, 6, 5, dtype, layout)
    for cache in caches:
        cache.copy_(torch.arange(cache.numel()).view(cache.shape) % 251)
    return caches


def after_copy(cache, pairs):
    """Every source is read before any destination is written."""
    old = cache.contiguous().clone()
    new = old.clone()
    for src, dst in pairs:
        new[dst] = old[src]
    return new


@COPIES
@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        ([(0, 1), (1, 2)], [1.0, 1.0, 2.0]),  # every source is read first
        ([(0, 1), (1, 0)], [2.0, 1.0, 3.0]),
        ([], [1.0, 2.0, 3.0]),
    ],
)
def test_chains_swaps_and_nothing(run, copy, pairs, expected):
    cache = torch.tensor([1.0, 2.0, 3.0])[:, None, None, None].expand(3, 4, 2, 8).contiguous()
    if copy is reference.copy_blocks:
        copy([cache], mapping(pairs, torch.int32))
    else:
        run(copy, [cache], mapping(pairs, torch.int32))
    assert cache[:, 0, 0, 0].tolist() == expected


@COPIES
@pytest.mark.parametrize("layout", ["nhd", "hnd", "interleaved"])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("strided", [False, True])
def test_every_layer_in_one_call(copy, layout, index_dtype, strided):
    """Caches of several types, a 2-d latent cache and a scale tensor among them."""
    caches = [
        *pool(5, torch.float32, layout),
        *pool(5, torch.bfloat16, layout),
        *pool(6, torch.float16, layout),
        torch.arange(5 * 4 * 7).view(5, 4, 7).to(torch.int8),
        torch.arange(20.0).view(5, 4),
        torch.arange(5.0),
    ]
    pairs = [(0, 3), (3, 1), (2, 2), (1, 4)]
    expected = [after_copy(cache, pairs) for cache in caches]
    ids = mapping(pairs, index_dtype)
    copy(caches, strided_index(ids) if strided else ids)
    torch.testing.assert_close(list(caches), expected, rtol=0, atol=0)


@given(MAPPINGS, st.sampled_from(["nhd", "hnd", "interleaved"]))
def test_any_mapping_copies(sized_pairs, layout):
    num_blocks, pairs = sized_pairs
    caches = pool(num_blocks, layout=layout)
    expected = [after_copy(cache, pairs) for cache in caches]
    pagedkv_ops.copy_blocks(list(caches), mapping(pairs))
    torch.testing.assert_close(list(caches), expected, rtol=0, atol=0)


@COPIES
def test_nan_payloads_are_copied_bit_for_bit(copy):
    bits = torch.tensor([0x7FC00001, 0x7F800001, -1], dtype=torch.int32)[:, None].repeat(1, 3)
    cache = bits.clone().view(torch.float32)
    copy([cache], mapping([(0, 2), (1, 0)]))
    assert cache.view(torch.int32)[:, 0].tolist() == [0x7F800001, 0x7F800001, 0x7FC00001]


@COPIES
def test_smallest_cache_bounds_the_ids(copy):
    small, large = torch.zeros(2, 4), torch.zeros(9, 4)
    with pytest.raises(RuntimeError, match=r"block_mapping\[0, 1\] must be in 0\.\.1, got 2"):
        copy([large, small], mapping([(0, 2)]))


@SWAPS
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
@pytest.mark.parametrize("layouts", [("nhd", "nhd"), ("nhd", "hnd"), ("interleaved", "nhd"), ("hnd", "interleaved")])
def test_swap_between_pools(swap, layouts, index_dtype):
    src, _ = pool(4, layout=layouts[0])
    dst = torch.full_like(copy_strided(pool(7, layout=layouts[1])[0]), -1.0)
    expected = dst.contiguous().clone()
    expected[6], expected[0], expected[2] = src[0], src[3], src[0]
    swap(src, dst, mapping([(0, 6), (3, 0), (0, 2)], index_dtype))
    torch.testing.assert_close(dst, expected, rtol=0, atol=0)


@given(MAPPINGS)
def test_swap_within_one_pool_reads_every_source_first(sized_pairs):
    num_blocks, pairs = sized_pairs
    cache, _ = pool(num_blocks)
    expected = after_copy(cache, pairs)
    pagedkv_ops.swap_blocks(cache, cache, mapping(pairs))
    torch.testing.assert_close(cache, expected, rtol=0, atol=0)


@SWAPS
def test_swap_between_overlapping_views(swap):
    """src and dst are one block apart in one storage: dst block i is src block i+1."""
    storage = torch.arange(5.0)[:, None].repeat(1, 3)
    swap(storage[:4], storage[1:], mapping([(0, 0), (1, 1), (2, 2), (3, 3)]))
    assert storage[:, 0].tolist() == [0.0, 0.0, 1.0, 2.0, 3.0]


def dense_gather(cache, table, lengths, max_len):
    """[B, max_len, Hkv, D] by indexing, zero past each length."""
    rows = []
    for blocks, length in zip(table.tolist(), lengths.tolist(), strict=True):
        used = -(-min(length, max_len) // cache.size(1))
        tokens = cache[blocks[:used]].flatten(0, 1)[: min(length, max_len)]
        rows.append(torch.cat([tokens, tokens.new_zeros(max_len - len(tokens), *tokens.shape[1:])]))
    return torch.stack(rows)


@GATHERS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("layout", ["nhd", "hnd", "interleaved"])
@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_gather(gather, dtype, layout, index_dtype):
    cache, _ = pool(6, dtype, layout)
    lengths = torch.tensor([0, 1, 4, 9, 12], dtype=index_dtype)
    table = torch.full((5, 4), OUT_OF_RANGE, dtype=index_dtype)
    for b, length in enumerate(lengths.tolist()):
        table[b, : -(-length // 4)] = torch.tensor([5, 0, 3], dtype=index_dtype)[: -(-length // 4)]
    for max_len in (0, 1, 7, 12, 20):
        out = gather(cache, strided_index(table), strided_index(lengths), max_len)
        assert out.is_contiguous()
        torch.testing.assert_close(out, dense_gather(cache, table, lengths, max_len), rtol=0, atol=0)


def test_gather_never_shows_the_poisoned_tail(run):
    cache = torch.full((2, 4, 1, 3), math.nan)
    cache[1, :3] = 5.0
    out = run(pagedkv_ops.gather_kv, cache, torch.tensor([[1, OUT_OF_RANGE]]), torch.tensor([3]), 6)
    assert out[0, :, 0, 0].tolist() == [5.0, 5.0, 5.0, 0.0, 0.0, 0.0]


@GATHERS
def test_longer_sequences_are_cut_and_their_further_blocks_not_read(gather):
    cache, _ = pool(2)
    table = torch.tensor([[1, OUT_OF_RANGE]])
    out = gather(cache, table, torch.tensor([8]), 4)
    torch.testing.assert_close(out[0], cache[1], rtol=0, atol=0)


@given(
    lengths=st.lists(st.integers(0, 30), min_size=1, max_size=6),
    block_size=st.integers(1, 9),
    max_len=st.integers(0, 40),
    head_size=st.integers(1, 33),
)
def test_any_lengths_gather(lengths, block_size, max_len, head_size):
    width = max(-(-n // block_size) for n in lengths) + 1
    num_blocks = len(lengths) * width
    cache = torch.randn(num_blocks, block_size, 2, head_size)
    table = torch.randperm(num_blocks).view(len(lengths), width)
    seq_lens = torch.tensor(lengths)
    out = pagedkv_ops.gather_kv(cache, table, seq_lens, max_len)
    torch.testing.assert_close(out, dense_gather(cache, table, seq_lens, max_len), rtol=0, atol=0)
