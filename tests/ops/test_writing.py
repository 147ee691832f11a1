"""write_kv: every type, layout and slot pattern against plain indexing, and small exact inputs."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import pagedkv_ops
from pagedkv_ops import reference

from .builders import FLOATS, INDEX_DTYPES, make_caches, pairwise, row_id, sliced, strided_index

GRID = pairwise(
    2,
    head_size=(1, 13, 46, 64, 80, 128, 256, 576),
    v_head_size=(None, 24, 64),
    block_size=(1, 3, 8, 16, 544),
    num_kv_heads=(1, 2, 5, 13),
    num_tokens=(0, 1, 7, 64, 300),
    key_dtype=FLOATS,
    value_dtype=FLOATS,
    cache_dtype=FLOATS,
    layout=("nhd", "hnd", "interleaved"),
    strided=(False, True),
    index_dtype=INDEX_DTYPES,
    fill=(math.nan, math.inf, 7.0),
)


def random_slots(num_slots: int, num_tokens: int, *, padding: float, seed: int) -> torch.Tensor:
    """Distinct slots in random order, about a ``padding`` share of them negative."""
    rng = torch.Generator().manual_seed(seed)
    slots = torch.randperm(num_slots, generator=rng)[:num_tokens]
    return torch.where(torch.rand(num_tokens, generator=rng) < padding, -1 - slots, slots)


def expected_caches(key, value, key_cache, value_cache, slots):
    """The caches after the write, by plain indexing on contiguous copies."""
    results = []
    for new, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.contiguous().clone().flatten(0, 1)
        written = slots >= 0
        flat[slots[written].long()] = new[: slots.size(0)][written].to(cache.dtype)
        results.append(flat.view(cache.shape))
    return results


def assert_writes(write, key, value, key_cache, value_cache, slots):
    expected = expected_caches(key, value, key_cache, value_cache, slots)
    assert write(key, value, key_cache, value_cache, slots) is None
    for actual, wanted in zip((key_cache, value_cache), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=0, equal_nan=True)


def tokens(num_tokens, num_kv_heads, head_size, dtype, seed, strided=False):
    """Random values over many magnitudes, halves of the last kept bit among them, so that rounding is exercised."""
    rng = torch.Generator().manual_seed(seed)
    new = torch.randn(num_tokens, num_kv_heads, head_size, generator=rng)
    new = torch.where(torch.rand(new.shape, generator=rng) < 0.2, 1 + 2.0**-8, new).to(dtype)
    return sliced(new) if strided else new


@pytest.mark.parametrize("row", GRID, ids=row_id)
@pytest.mark.parametrize("write", [pagedkv_ops.write_kv, reference.write_kv], ids=["op", "reference"])
def test_grid_equals_indexing(write, row):
    num_tokens, heads, block_size = row["num_tokens"], row["num_kv_heads"], row["block_size"]
    head_size, v_head_size = row["head_size"], row["v_head_size"] or row["head_size"]
    num_blocks = num_tokens // block_size + 2
    caches = make_caches(
        num_blocks, block_size, heads, head_size, v_head_size, row["cache_dtype"], row["layout"], row["fill"]
    )
    slots = random_slots(num_blocks * block_size, num_tokens, padding=0.2, seed=3).to(row["index_dtype"])
    assert_writes(
        write,
        tokens(num_tokens, heads, head_size, row["key_dtype"], 4, row["strided"]),
        tokens(num_tokens, heads, v_head_size, row["value_dtype"], 5, row["strided"]),
        *caches,
        strided_index(slots) if row["strided"] else slots,
    )


@given(
    num_tokens=st.integers(0, 40),
    num_slots_missing=st.integers(0, 5),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 6), st.integers(1, 70), st.integers(1, 70)),
    cache_dtype=st.sampled_from(FLOATS),
    seed=st.integers(0, 99),
)
def test_any_shape_equals_indexing(num_tokens, num_slots_missing, shape, cache_dtype, seed):
    block_size, num_kv_heads, head_size, v_head_size = shape
    caches = make_caches(num_tokens + 1, *shape, cache_dtype)
    slots = random_slots((num_tokens + 1) * block_size, max(0, num_tokens - num_slots_missing), padding=0.3, seed=seed)
    key = tokens(num_tokens, num_kv_heads, head_size, torch.float32, seed)
    value = tokens(num_tokens, num_kv_heads, v_head_size, torch.bfloat16, seed + 1)
    assert_writes(pagedkv_ops.write_kv, key, value, *caches, slots)


def rows(*values: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """[T, 1, 2] with a row of each value."""
    return torch.tensor(values, dtype=dtype)[:, None, None].expand(-1, 1, 2).contiguous()


def filled(num_blocks: int, block_size: int, value: float, dtype: torch.dtype = torch.float32):
    return make_caches(num_blocks, block_size, 1, 2, 2, dtype, fill=value)


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_negative_slots_are_padding(run, index_dtype):
    key_cache, value_cache = filled(3, 4, 7.0)
    new = rows(1.0, 2.0, 3.0, 4.0)
    slots = torch.tensor([5, -1, -2, torch.iinfo(index_dtype).min], dtype=index_dtype)
    run(pagedkv_ops.write_kv, new, new, key_cache, value_cache, slots)
    for cache in (key_cache, value_cache):
        assert cache.flatten(0, 1)[:, 0, 0].tolist() == [7.0] * 5 + [1.0] + [7.0] * 6


def test_slot_past_the_cache_raises_and_writes_nothing(run):
    key_cache, value_cache = filled(3, 4, 7.0)
    with pytest.raises(RuntimeError, match=r"slot_mapping\[1\] must be below 12 .*, got 12"):
        run(pagedkv_ops.write_kv, rows(1.0, 2.0), rows(1.0, 2.0), key_cache, value_cache, torch.tensor([5, 12]))
    assert (key_cache == 7.0).all()
    assert (value_cache == 7.0).all()


def test_bfloat16_into_float16_keeps_the_number(run):
    key_cache, value_cache = filled(1, 2, 0.0, torch.float16)
    new = rows(1.0, dtype=torch.bfloat16)
    run(pagedkv_ops.write_kv, new, new, key_cache, value_cache, torch.tensor([1]))
    assert key_cache[0, 1].tolist() == [[1.0, 1.0]]  # 1.875 if the bits were taken over
    assert value_cache[0, 1].tolist() == [[1.0, 1.0]]


def test_cast_rounds_to_nearest_even(run):
    """bfloat16 keeps 8 bits: 1 + 2^-8 and 1 + 3 * 2^-8 lie halfway."""
    key_cache, value_cache = filled(1, 4, 0.0, torch.bfloat16)
    key = rows(1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-16)
    value = rows(2.0, 3.0, 4.0, dtype=torch.bfloat16)
    run(pagedkv_ops.write_kv, key, value, key_cache, value_cache, torch.tensor([0, 1, 2]))
    assert key_cache[0, :, 0, 0].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7, 0.0]
    assert value_cache[0, :, 0, 0].tolist() == [2.0, 3.0, 4.0, 0.0]


@pytest.mark.parametrize("cache_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
def test_special_values_are_cast_like_torch_does(dtype, cache_dtype):
    """Infinities, NaN, signed zero, subnormals and overflow."""
    values = [math.inf, -math.inf, math.nan, -0.0, 1e-7, 6e-8, 1e-40, 65504.0, 65520.0, 3e38, -3e38, 2.0**-14, 2.0**-25]
    new = torch.tensor(values).to(dtype)[None, None, :].expand(2, 1, -1).contiguous()
    key_cache, value_cache = make_caches(2, 2, 1, len(values), len(values), cache_dtype, fill=5.0)
    pagedkv_ops.write_kv(new, new, key_cache, value_cache, torch.tensor([3, 0]))
    expected = new[0].to(cache_dtype)
    for written in (key_cache[1, 1], value_cache[0, 0]):
        torch.testing.assert_close(written, expected, rtol=0, atol=0, equal_nan=True)
        number = ~torch.isnan(expected)
        assert torch.equal(torch.signbit(written[number]), torch.signbit(expected[number]))


def write_and_attend(key, value, key_cache, value_cache, slots, *rest):
    pagedkv_ops.write_kv(key, value, key_cache, value_cache, slots)
    return pagedkv_ops.paged_attention(torch.zeros_like(key), key_cache, value_cache, *rest)


def append(key, *args):
    return pagedkv_ops.paged_attention_append(torch.zeros_like(key), key, *args)


@pytest.mark.parametrize("step", [write_and_attend, append])
def test_metadata_shorter_than_the_batch(run, step):
    """Four rows, three slots; row 3 has length 0 and a table of padding: zero, and nothing of it is written."""
    key_cache, value_cache = filled(2, 4, math.nan)
    new = rows(1.0, 2.0, 3.0, 99.0)
    table, lengths = torch.tensor([[0], [1], [1], [-1]]), torch.tensor([1, 1, 2, 0])
    out = run(step, new, new, key_cache, value_cache, torch.tensor([0, 4, 5]), table, lengths)
    assert torch.nonzero(~torch.isnan(key_cache.flatten(0, 1)[:, 0, 0])).flatten().tolist() == [0, 4, 5]
    assert out[:, 0, 0].tolist() == pytest.approx([1.0, 2.0, 2.5, 0.0], rel=1e-6)
    assert out[3].tolist() == [[0.0, 0.0]]


def test_padded_prefill_of_a_reused_table_row(run):
    """A static row once held blocks 5, 6, 7; a request of 3 tokens on block 2 takes it, padded to 8."""
    key_cache, value_cache = filled(8, 4, 7.0)
    new = rows(*range(1, 9))
    slots = torch.tensor([8, 9, 10, -1, -1, -1, -1, -1])
    run(pagedkv_ops.write_kv, new, new, key_cache, value_cache, slots)
    assert key_cache[2, :, 0, 0].tolist() == [1.0, 2.0, 3.0, 7.0]
    untouched = [0, 1, 3, 4, 5, 6, 7]
    assert (key_cache[untouched] == 7.0).all()
    table = torch.tensor([[2, -1, -1, -1]])
    out, lse = run(
        pagedkv_ops.paged_attention_with_lse,
        torch.zeros(8, 1, 2),
        key_cache,
        value_cache,
        table,
        torch.tensor([3]),
        torch.tensor([0, 3]),
    )
    assert out[:, 0, 0].tolist() == pytest.approx([1.0, 1.5, 2.0, 0, 0, 0, 0, 0], rel=1e-6)
    assert torch.isneginf(lse[3:]).all()


@pytest.mark.parametrize("index_dtype", INDEX_DTYPES)
def test_offsets_past_two_to_the_31_elements(index_dtype):
    """Block 131072 of S=16, Hkv=8, D=128 starts at element 2^31. Memory is only reserved until it is touched."""
    shape = (131073, 16, 8, 128)
    try:
        key_cache, value_cache = (torch.empty(shape, dtype=torch.bfloat16) for _ in range(2))
    except RuntimeError as error:
        pytest.skip(f"this machine does not reserve 2 x 4.3 GB: {error}")
    assert key_cache[131072].storage_offset() == 2**31
    key_cache[0], value_cache[0] = 7.0, 7.0
    new = torch.ones(1, 8, 128)
    slot = torch.tensor([131072 * 16], dtype=index_dtype)
    pagedkv_ops.write_kv(new, new, key_cache, value_cache, slot)
    table, length = torch.tensor([[131072]], dtype=index_dtype), torch.tensor([1], dtype=index_dtype)
    out = pagedkv_ops.paged_attention(torch.zeros(1, 8, 128), key_cache, value_cache, table, length)
    assert (out == 1.0).all()
    assert (key_cache[0] == 7.0).all()
    assert (value_cache[0] == 7.0).all()
    dense = pagedkv_ops.gather_kv(value_cache, table, length, 1)
    assert (dense == 1.0).all()


def test_write_into_a_cache_interleaved_by_block():
    """K and V of one block side by side: [blocks, 2, S, Hkv, D]."""
    pool = torch.full((3, 2, 4, 1, 2), 7.0)
    pagedkv_ops.write_kv(rows(1.0), rows(2.0), pool[:, 0], pool[:, 1], torch.tensor([5]))
    assert pool[1, 0, 1].tolist() == [[1.0, 1.0]]
    assert pool[1, 1, 1].tolist() == [[2.0, 2.0]]
    assert int((pool != 7.0).sum()) == 4
