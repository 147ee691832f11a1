"""What only a CUDA device can show: captured graphs, no waiting on the host, swaps, opcheck, compiled steps."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import pagedkv_ops
from pagedkv_ops import reference
from pagedkv_ops.testing import assert_no_cache_clone

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

B, HQ, HKV, D, S, W = 4, 8, 2, 64, 16, 40


class Step:
    """Static buffers of a decode step, refilled for every batch of lengths."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        options: dict[str, Any] = {"dtype": torch.bfloat16, "device": "cuda"}
        self.key_cache, self.value_cache = torch.randn(2, B * W, S, HKV, D, **options)
        self.query = torch.randn(B, HQ, D, **options)
        self.key, self.value = torch.randn(2, B, HKV, D, **options)
        self.block_table = torch.empty(B, W, dtype=torch.int32, device="cuda")
        self.seq_lens = torch.empty(B, dtype=torch.int32, device="cuda")
        self.slot_mapping = torch.empty(B, dtype=torch.int64, device="cuda")

    def fill(self, seq_lens: list[int]) -> None:
        table = torch.randperm(B * W).view(B, W)
        slots = [int(table[b, (n - 1) // S]) * S + (n - 1) % S if n else -1 for b, n in enumerate(seq_lens)]
        for buffer, values in (
            (self.block_table, table),
            (self.seq_lens, torch.tensor(seq_lens)),
            (self.slot_mapping, torch.tensor(slots)),
        ):
            buffer.copy_(values)

    def run(self, **options: Any) -> Tensor:
        tables = (self.key_cache, self.value_cache, self.slot_mapping, self.block_table, self.seq_lens)
        return pagedkv_ops.paged_attention_append(self.query, self.key, self.value, *tables, **options)


LENGTHS = [[1, 1, 1, 1], [640, 1, 0, 333], [17, 16, 15, 600], [0, 0, 0, 0]]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("num_splits", [0, 1, 5])
def test_one_captured_graph_serves_every_length(num_splits: int) -> None:
    step = Step()
    step.fill([5, 6, 7, 8])
    step.run(num_splits=num_splits)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step.run(num_splits=num_splits)
    for seq_lens in LENGTHS:
        step.fill(seq_lens)
        graph.replay()
        replayed = out.clone()
        assert torch.equal(replayed, step.run(num_splits=num_splits))
        expected = reference.paged_attention(
            *(x.cpu() for x in (step.query, step.key_cache, step.value_cache, step.block_table, step.seq_lens))
        )
        torch.testing.assert_close(replayed.cpu(), expected, rtol=2e-2, atol=2e-2)


def test_nothing_waits_for_the_device(no_waiting: None) -> None:
    torch.cuda.set_sync_debug_mode("default")
    step = Step()
    step.fill([5, 600, 7, 8])
    step.run()
    mapping = torch.tensor([[0, 1], [2, 3]], device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    step.run()
    pagedkv_ops.gather_kv(step.key_cache, step.block_table, step.seq_lens, 64)
    pagedkv_ops.copy_blocks([step.key_cache, step.value_cache], mapping)


def test_a_prompt_gives_the_same_bits_in_one_piece_and_token_by_token() -> None:
    step = Step()
    step.fill([100, 1, 1, 1])
    query = torch.randn(100, HQ, D, dtype=torch.bfloat16, device="cuda")
    tables = (step.key_cache, step.value_cache)
    table = step.block_table[:1]

    def attend(rows: slice, length: int, boundaries: list[int] | None) -> Tensor:
        cu = None if boundaries is None else torch.tensor(boundaries, device="cuda")
        seq_lens = torch.tensor([length], device="cuda")
        return pagedkv_ops.paged_attention(query[rows], *tables, table, seq_lens, cu, num_splits=1)

    whole = attend(slice(None), 100, [0, 100])
    tokens = [attend(slice(i, i + 1), i + 1, None) for i in range(100)]
    assert torch.equal(torch.cat(tokens), whole)


@pytest.mark.parametrize("pinned", [False, True])
def test_swaps_move_the_same_bytes(pinned: bool) -> None:
    host = torch.randint(-99, 99, (300, 16, 2, 8), dtype=torch.int16)
    host = host.pin_memory() if pinned else host
    device = torch.zeros(400, 16, 2, 8, dtype=torch.int16, device="cuda")
    there = torch.stack([torch.randperm(300), torch.randperm(400)[:300]], 1)
    pagedkv_ops.swap_blocks(host, device, there)
    assert torch.equal(device.cpu()[there[:, 1]], host[there[:, 0]])
    back = torch.zeros_like(host)
    pagedkv_ops.swap_blocks(device, back, there.flip(1))
    assert torch.equal(back, host)
    pagedkv_ops.swap_blocks(device, device, torch.tensor([[0, 1], [1, 2]]))


def test_swaps_follow_the_work_of_the_current_stream() -> None:
    """The copies run on another stream: what was queued before a swap reads and writes the old content."""
    host = torch.ones(64, 1 << 16, dtype=torch.int32).pin_memory()  # 16 MB
    device = torch.zeros_like(host, device="cuda")
    pairs = torch.arange(64)[:, None].repeat(1, 2)
    torch.cuda._sleep(100_000_000)
    before = device.sum()
    pagedkv_ops.swap_blocks(host, device, pairs)
    after = device.sum()
    torch.cuda._sleep(100_000_000)
    device += 1
    pagedkv_ops.swap_blocks(device, host, pairs)
    assert (int(before), int(after)) == (0, host.numel())
    assert bool((host == 2).all())


def test_every_op_passes_opcheck() -> None:
    step = Step()
    step.fill([5, 600, 7, 8])
    caches = (step.key_cache, step.value_cache)
    tables = (step.block_table, step.seq_lens)
    lse = torch.randn(B, HQ, device="cuda")
    new = (step.key, step.value)
    calls = {
        "write_kv": (*new, *caches, step.slot_mapping),
        "paged_attention": (step.query, *caches, *tables),
        "paged_attention_with_lse": (step.query, *caches, *tables),
        "paged_attention_append": (step.query, *new, *caches, step.slot_mapping, *tables),
        "merge_states": (step.query, lse, step.query, lse),
        "copy_blocks": (list(caches), torch.tensor([[0, 1]], device="cuda")),
        "gather_kv": (step.key_cache, *tables, 64),
    }
    for name, args in calls.items():
        torch.library.opcheck(getattr(torch.ops.pagedkv, name).default, args)


def test_a_compiled_step_is_the_eager_one_without_clones() -> None:
    step = Step()
    step.fill([5, 600, 7, 8])
    tables = (step.key_cache, step.value_cache, step.slot_mapping, step.block_table, step.seq_lens)
    args = (step.query, step.key, step.value, *tables)
    compiled = torch.compile(pagedkv_ops.paged_attention_append, fullgraph=True)
    assert torch.equal(compiled(*args), step.run())
    assert_no_cache_clone(pagedkv_ops.paged_attention_append, *args)
