"""The fused append, interpreted: the bits of a write followed by attention, whatever the slots are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagedkv_ops import reference
from pagedkv_ops.testing import dense_attention
from tests.ops.builders import attention_options, make_caches, pairwise, row_id, sliced, strided_index

from .worker import DEVICE, Kernels

NUM_BLOCKS = 24
SLOTS = ["last", "skipped", "short", "of another", "middle", "of no one", "out of range", "twice"]


def slot_mapping(kind: str, table: Tensor, seq_lens: list[int], block_size: int) -> Tensor:
    """Where each token goes: its sequence's last position, or something that a caller may do as well."""

    def slot(b: int, position: int) -> int:
        return int(table[b, position // block_size]) * block_size + position % block_size

    slots = [slot(b, n - 1) if n else -1 for b, n in enumerate(seq_lens)]
    if kind == "skipped":
        slots[0] = -1
    elif kind == "short":
        slots = slots[:-1]
    elif kind == "of another":  # the first keys of the longest sequence
        slots = [slot(2, b) for b in range(len(slots))]
    elif kind == "middle":
        slots = [slot(b, n // 2) if n else -1 for b, n in enumerate(seq_lens)]
    elif kind == "of no one":
        slots = [NUM_BLOCKS * block_size - 1 - b for b in range(len(slots))]
    elif kind == "out of range":
        slots[1] = NUM_BLOCKS * block_size + 3
        slots[2] = 2**31 - 1
    elif kind == "twice":  # the last one stays
        slots[1] = slots[2]
    return torch.tensor(slots)


def make_args(
    slots: str,
    *,
    heads: tuple[int, int] = (4, 2),
    head_size: int = 16,
    block_size: int = 4,
    dtypes: tuple[torch.dtype, ...] = (torch.float32,) * 3,  # query, new, cache
    seq_lens: tuple[int, ...] = (5, 9, 150),
    layout: str = "nhd",
    index_dtype: torch.dtype = torch.int64,
    shared_table: bool = False,
) -> tuple[Tensor, ...]:
    """Arguments of paged_attention_append for one token of each sequence; blocks may occur in several tables."""
    rng = torch.Generator().manual_seed(1)
    dtype, new_dtype, cache_dtype = dtypes
    num_heads, num_kv_heads = heads
    v_head_size = head_size + 3
    caches = make_caches(NUM_BLOCKS, block_size, num_kv_heads, head_size, v_head_size, cache_dtype, layout)
    for cache in caches:
        cache.copy_(torch.randn(cache.shape, generator=rng))
    batch, columns = len(seq_lens), -(-max(*seq_lens, len(seq_lens)) // block_size) + 1
    table = torch.randint(0, NUM_BLOCKS - 1, (batch, columns), generator=rng)  # the last block is nobody's
    if shared_table:
        table[:] = table[0]
    query = torch.randn(batch, num_heads, head_size, generator=rng).to(dtype)
    key, value = (  # values that bfloat16 holds: the interpreter truncates where torch rounds
        sliced((torch.randint(-128, 128, (batch, num_kv_heads, size), generator=rng) / 64).to(new_dtype))
        for size in (head_size, v_head_size)
    )
    mapping = strided_index(slot_mapping(slots, table, list(seq_lens), block_size).to(index_dtype))
    return query, key, value, *caches, mapping, table.to(index_dtype), torch.tensor(seq_lens, dtype=index_dtype)


def last_of_each(slots: Tensor) -> Tensor:
    """Slots without those that a later token writes too: ``write_kv`` leaves open which of two stays."""
    last = {slot: i for i, slot in enumerate(slots.tolist())}
    return torch.tensor([slot if last[slot] == i else -1 for i, slot in enumerate(slots.tolist())])


def assert_append_is_write_then_attend(
    kernels: Kernels, args: tuple[Tensor, ...], same_bits: bool = False, **options: Any
) -> None:
    """As the reference does it; with ``same_bits`` as the kernels do it one after the other."""
    query, *new, key_cache, value_cache, slots, table, seq_lens = args
    if same_bits:
        _, after = kernels.op_and_args("write_kv", *new, key_cache, value_cache, last_of_each(slots))
        caches = after[2:4]
        expected = kernels.op("paged_attention", query, *caches, table, seq_lens, **options)
    else:
        caches = [key_cache.clone(), value_cache.clone()]
        num_slots = key_cache.size(0) * key_cache.size(1)  # the reference refuses those beyond
        reference.write_kv(*new, *caches, torch.where(slots < num_slots, last_of_each(slots), -1))
        expected = reference.paged_attention(query, *caches, table, seq_lens, **options)
    out, after = kernels.op_and_args("paged_attention_append", *args, **options)
    error = 0.0 if same_bits and DEVICE == "cpu" else 1e-4 if query.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, expected, rtol=error, atol=error)
    for written, wanted in zip(after[3:5], caches, strict=True):
        torch.testing.assert_close(written, wanted, rtol=0, atol=0)


GRID = pairwise(
    3,
    slots=SLOTS,
    heads=[(4, 4), (8, 2), (5, 1), (34, 1)],  # 34: two tiles of heads where a tile has 32 rows
    head_size=[13, 64],
    block_size=[1, 3, 16],
    dtypes=[
        (torch.float32,) * 3,
        (torch.float16,) * 3,
        (torch.float32, torch.float16, torch.float16),
        (torch.float16, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.bfloat16),  # not fused: it converts
    ],
    seq_lens=[(1, 1, 1), (5, 9, 130), (32, 64, 96), (0, 33, 70)],
    mask=[{}, {"causal": False}, {"window_left": 20}, {"window_left": 0}],
    options=[{}, {"softcap": 3.0, "alibi": True, "sinks": True}],
    num_splits=[0, 2, 5],
    layout=["nhd", "hnd", "interleaved"],
    index_dtype=[torch.int32, torch.int64],
    shared_table=[False, True],
)


@pytest.mark.parametrize("row", GRID, ids=row_id)
def test_append_is_write_then_attend(kernels: Kernels, row: dict[str, Any]) -> None:
    row = dict(row)
    options = attention_options(row["heads"][0], **row.pop("options"), **row.pop("mask"))
    options["num_splits"] = row.pop("num_splits")
    args = list(make_args(**row))
    if args[1].dtype != args[3].dtype:  # not fused
        args[5] = last_of_each(args[5])
    assert_append_is_write_then_attend(kernels, tuple(args), **options)


@pytest.mark.parametrize("slots", SLOTS)
def test_append_has_the_bits_of_write_then_attend(kernels: Kernels, slots: str) -> None:
    args = make_args(slots, seq_lens=(5, 9, 70), shared_table=slots in ("middle", "twice"))
    assert_append_is_write_then_attend(kernels, args, same_bits=True, window_left=20 if slots == "last" else -1)


@pytest.mark.parametrize("batch", [1, 33])
def test_append_of_many_tokens(kernels: Kernels, batch: int) -> None:
    """More than are compared at a time; all sequences share a table that any of the tokens writes."""
    args = make_args("last", heads=(2, 1), seq_lens=tuple(1 + b % 24 for b in range(batch)), shared_table=True)
    slots = torch.randperm(batch, generator=torch.Generator().manual_seed(0)) % (NUM_BLOCKS * 4)
    args = (*args[:5], slots, torch.arange(7).expand(batch, -1), args[7])
    assert_append_is_write_then_attend(kernels, args)


def test_a_new_token_is_seen_as_the_cache_rounds_it(kernels: Kernels) -> None:
    query, key, value, key_cache, value_cache, slots, table, seq_lens = make_args(
        "last", dtypes=(torch.float32, torch.float32, torch.float16), seq_lens=(1, 1, 1)
    )
    value.fill_(1 + 2**-13)  # float16 rounds it to 1
    out = kernels.op("paged_attention_append", query, key, value, key_cache, value_cache, slots, table, seq_lens)
    assert torch.equal(out, torch.ones_like(out))


def test_against_dense_attention(kernels: Kernels) -> None:
    query, key, value, key_cache, value_cache, _, _, seq_lens = make_args("last", seq_lens=(5, 9, 27))
    table = torch.randperm(NUM_BLOCKS)[: 3 * 7].view(3, 7)
    slots = slot_mapping("last", table, seq_lens.tolist(), 4)
    args = (query, key, value, key_cache, value_cache, slots, table, seq_lens)
    out = kernels.op("paged_attention_append", *args)
    for cache, new in ((key_cache, key), (value_cache, value)):
        cache.flatten(0, 1)[slots] = new
    for b, n in enumerate(seq_lens.tolist()):
        keys, values = (cache[table[b]].flatten(0, 1)[:n] for cache in (key_cache, value_cache))
        expected, _ = dense_attention(query[b : b + 1], keys, values, dtype=torch.float64)
        torch.testing.assert_close(out[b : b + 1].double(), expected, rtol=1e-4, atol=1e-4)
