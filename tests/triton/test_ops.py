"""The other Triton ops, interpreted, against the reference: writes, merges, copies, gathers, swaps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from pagedkv_ops import reference
from tests.ops.builders import make_caches, sliced, strided_index

from .worker import DEVICE, Kernels


def assert_same(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


def representable(*shape: int) -> Tensor:
    """Values that bfloat16 holds exactly: the interpreter truncates where the device rounds to nearest."""
    return torch.randint(-128, 128, shape).float() / 16


@pytest.mark.parametrize("layout", ["nhd", "hnd", "interleaved"])
@pytest.mark.parametrize("sizes", [(4, 2, 16, 16), (3, 5, 13, 46), (16, 1, 128, 80), (1, 13, 576, 512)], ids=str)
def test_write(kernels: Kernels, sizes: tuple[int, ...], layout: str) -> None:
    block_size, num_heads, head_size, v_head_size = sizes
    caches = make_caches(3, block_size, num_heads, head_size, v_head_size, layout=layout, fill=7.0)
    key, value = sliced(representable(5, num_heads, head_size)), sliced(representable(5, num_heads, v_head_size))
    slots = strided_index(torch.tensor([3 * block_size - 1, -1, 0, -1]))  # shorter than the tokens
    _, args = kernels.op_and_args("write_kv", key, value, *caches, slots)
    expected = [cache.clone() for cache in caches]
    reference.write_kv(key, value, *expected, slots)
    assert_same(args[2], expected[0])
    assert_same(args[3], expected[1])


@pytest.mark.parametrize("cache_dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_write_converts(kernels: Kernels, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    caches = make_caches(2, 4, 2, 16, 8, dtype=cache_dtype, fill=7.0)
    key, value = representable(3, 2, 16).to(dtype), representable(3, 2, 8)
    slots = torch.tensor([6, 0, 3], dtype=torch.int32)
    _, args = kernels.op_and_args("write_kv", key, value, *caches, slots)
    reference.write_kv(key, value, *caches, slots)
    assert_same(args[2], caches[0])
    assert_same(args[3], caches[1])


def test_slots_out_of_range_are_skipped(kernels: Kernels) -> None:
    caches = make_caches(3, 4, 1, 8, 8, fill=7.0)
    rows = torch.arange(1.0, 4.0)[:, None, None].repeat(1, 1, 8)
    _, args = kernels.op_and_args("write_kv", rows, rows, *caches, torch.tensor([5, 12, 2**40]))
    written = torch.full((12, 1, 8), 7.0)
    written[5] = 1
    assert_same(args[2].flatten(0, 1), written)


def test_caches_that_share_elements_are_refused(kernels: Kernels) -> None:
    key_cache, _ = make_caches(3, 4, 1, 8, 8)
    rows = torch.ones(1, 1, 8)
    with pytest.raises(RuntimeError, match="write_kv: key_cache and value_cache must not share elements"):
        kernels.op("write_kv", rows, rows, key_cache, key_cache, torch.tensor([0]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_merge(kernels: Kernels, dtype: torch.dtype) -> None:
    out_a, out_b = (sliced(torch.randn(3, 13, 80).to(dtype)) for _ in range(2))
    lse_a, lse_b = torch.randn(2, 3, 13) * 20
    lse_a[0, :3] = -torch.inf
    lse_b[0, 2:5] = -torch.inf
    lse_b = lse_b.t().contiguous().t()
    out, lse = kernels.op("merge_states", out_a, lse_a, out_b, lse_b)
    expected_out, expected_lse = reference.merge_states(out_a, lse_a, out_b, lse_b)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(lse, expected_lse)


def _caches_of_many_layouts() -> list[Tensor]:
    torch.manual_seed(0)
    nhd = torch.randn(2, 5, 4, 3, 6).unbind(0)  # K and V of one storage
    both = torch.randn(5, 4, 3, 10).split([6, 4], dim=3)  # interleaved
    hnd = torch.randn(5, 3, 4, 6).transpose(1, 2)
    gaps = torch.randn(5, 8, 6, 12)[:, ::2, ::2, ::2]
    deep = torch.randn(5, 4, 4, 4, 4)[:, ::2, ::2, ::2, ::2]  # four strides in a block
    scales, flat = torch.randn(5, 4, 3), torch.arange(5)
    bits = torch.randint(0, 255, (5, 7), dtype=torch.uint8).view(torch.float8_e4m3fn)
    ten_alike = [torch.randn(5, 2, 2, 2, dtype=torch.float16) for _ in range(10)]
    return [*nhd, *both, hnd, gaps, deep, scales, flat, bits, *ten_alike]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64], ids=str)
def test_copy_reads_all_before_it_writes(kernels: Kernels, index_dtype: torch.dtype) -> None:
    caches = _caches_of_many_layouts()
    mapping = torch.tensor([[0, 1], [1, 2], [4, 0], [2, 4]], dtype=index_dtype)
    src, dst = mapping.long().unbind(1)
    expected = [cache.clone() for cache in caches]
    for cache in expected:
        bits = cache.view(torch.uint8) if cache.element_size() == 1 else cache
        bits[dst] = bits[src].clone()
    _, (copied, _) = kernels.op_and_args("copy_blocks", caches, mapping)
    for cache, wanted in zip(copied, expected, strict=True):
        as_bytes = torch.uint8 if cache.element_size() == 1 else cache.dtype
        assert_same(cache.view(as_bytes), wanted.view(as_bytes))


def test_copy_between_aliases(kernels: Kernels) -> None:
    cache = torch.arange(3.0)[:, None].repeat(1, 4)
    _, (copied, _) = kernels.op_and_args("copy_blocks", [cache, cache], torch.tensor([[0, 1], [1, 2]]))
    assert copied[0][:, 0].tolist() == [0, 0, 1]


def test_copy_skips_ids_out_of_range(kernels: Kernels) -> None:
    cache = torch.arange(3.0)[:, None].repeat(1, 4)
    mapping = torch.tensor([[0, 3], [-1, 1], [3, 1], [0, 2], [1, -1]])
    _, (copied, _) = kernels.op_and_args("copy_blocks", [cache], mapping)
    assert copied[0][:, 0].tolist() == [0, 1, 0]


@pytest.mark.parametrize("max_len", [0, 5, 9, 40])
@pytest.mark.parametrize("layout", ["nhd", "hnd"])
def test_gather(kernels: Kernels, layout: str, max_len: int) -> None:
    cache, _ = make_caches(6, 3, 2, 13, 13, layout=layout)
    table = torch.tensor([[3, 1, 2**31 - 1], [2, 5, 0], [0, 0, 0]], dtype=torch.int32)
    seq_lens = torch.tensor([4, 7, 0])
    for block in (3, 2, 5):
        cache[block] = torch.randn(3, 2, 13)
    cache[0, 0], cache[1, 0] = 1.0, 2.0
    gathered = kernels.op("gather_kv", cache, table, seq_lens, max_len)
    assert_same(gathered, reference.gather_kv(cache, table, seq_lens, max_len))


def test_gather_clamps_lengths_and_ids(kernels: Kernels) -> None:
    cache = torch.ones(2, 2, 1, 4)
    gathered = kernels.op("gather_kv", cache, torch.tensor([[1, 7]]), torch.tensor([99]), 6)
    assert gathered[0, :, 0, 0].tolist() == [1, 1, 0, 0, 0, 0]


@pytest.mark.skipif(DEVICE == "cuda", reason="the move to a device would make an expanded tensor dense")
def test_expanded_destinations_are_refused(kernels: Kernels) -> None:
    cache, mapping = torch.zeros(4, 2), torch.tensor([[0, 1]])
    with pytest.raises(RuntimeError, match=r"copy_blocks: caches\[1\] must have a place of its own in memory"):
        kernels.op("copy_blocks", [cache, cache[:1].expand(4, 2)], mapping)
    with pytest.raises(RuntimeError, match="swap_blocks: dst must have a place of its own in memory"):
        kernels.op("swap_blocks", cache.to("meta"), cache[:1].to("meta").expand(4, 2), mapping)


@pytest.mark.skipif(DEVICE == "cuda", reason="test_device.py swaps with a real device")
def test_swap_within_the_device(kernels: Kernels) -> None:
    """Of equal devices: the branch that two tensors on one GPU take, here on meta tensors and so without values."""
    src, dst = torch.empty(4, 2, device="meta"), torch.empty(5, 2, device="meta")
    kernels.op("swap_blocks", src, dst, torch.tensor([[0, 4], [3, 0]]))
    with pytest.raises(RuntimeError, match=r"swap_blocks: block_mapping\[1, 0\] must be in 0..3, got 4"):
        kernels.op("swap_blocks", src, dst, torch.tensor([[0, 4], [4, 0]]))


def _with_checks(name: str, *args: Any) -> None:
    import os

    from pagedkv_ops import _triton

    os.environ["PAGEDKV_CHECK"] = "1"
    try:
        getattr(_triton, name)(*args)
    finally:
        del os.environ["PAGEDKV_CHECK"]


def _write_args(slots: list[int]) -> tuple[Tensor, ...]:
    rows = torch.ones(len(slots), 1, 8)
    return (rows, rows, *make_caches(3, 4, 1, 8, 8, fill=7.0), torch.tensor(slots))


def _attention_args(table: list[list[int]], seq_lens: list[int], cu_seqlens_q: list[int]) -> tuple[Tensor, ...]:
    query = torch.ones(2, 2, 8)
    caches = make_caches(3, 4, 1, 8, 8, fill=1.0)
    return (query, *caches, torch.tensor(table), torch.tensor(seq_lens), torch.tensor(cu_seqlens_q))


@pytest.mark.parametrize(
    ("name", "args", "message"),
    [
        ("write_kv", _write_args([3, 12]), "slot_mapping[1] must be below 12 (num_blocks * block_size), got 12"),
        (
            "write_kv",
            _write_args([3, -1, -1, 3]),
            "slot_mapping[3] must name a slot of its own, got 3 like slot_mapping",
        ),
        ("paged_attention", _attention_args([[0, 1]], [9], [0, 2]), "seq_lens[0] must be in 0..8"),
        ("paged_attention", _attention_args([[0, 3]], [8], [0, 2]), "block_table[0, 1] must be in 0..2"),
        ("paged_attention", _attention_args([[0, 1]], [8], [0, 3]), "cu_seqlens_q[1] must be at most 2"),
        ("paged_attention", _attention_args([[0, 1]], [8], [1, 2]), "cu_seqlens_q[0] must be 0, got 1"),
        ("copy_blocks", ([torch.ones(3, 2)], torch.tensor([[0, 1], [2, 1]])), "name each destination block once"),
        (
            "gather_kv",
            (torch.ones(3, 2, 1, 4), torch.tensor([[5]]), torch.tensor([1]), 2),
            "block_table[0, 0] must be in",
        ),
    ],
    ids=["slot", "duplicate slot", "length", "block id", "rows", "first row", "duplicate block", "gather"],
)
def test_debug_mode_names_the_bad_index(kernels: Kernels, name: str, args: Any, message: str) -> None:
    with pytest.raises(RuntimeError) as error:
        kernels.run(_with_checks, name, *args)
    assert f"{name}: " in str(error.value)
    assert message in str(error.value)
    kernels.op(name, *args)  # without the checks the same call is harmless
