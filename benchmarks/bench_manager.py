"""The manager against vLLM's, both in this process, interleaved, median of the rounds.

    PYTHONPATH=python python benchmarks/bench_manager.py            where vLLM (its CPU wheel, say) is installed
    PYTHONPATH=python python benchmarks/bench_manager.py --no-peer  this library alone; numpy and torch are enough

Work: a decode step of 256 sequences (append, allocate, commit, table rows and slots ready for the kernel), freeing 256
sequences of 2,048 tokens, admission of a 4,096-token prompt whose first 75% are cached (hashing included), long
sequences and the slots that ragged loads waste. Results are compared before anything is reported.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from pagedkv.block_table import BlockTable
from pagedkv.manager import KVCacheManager

BLOCK_SIZE = 16
NUM_SEQS = 256
NUM_BLOCKS = 40_000
MAX_LEN = 4096


class Ours:
    """The same calls as the peer's adapter, on this library."""

    def __init__(self) -> None:
        self.manager = KVCacheManager(NUM_BLOCKS, BLOCK_SIZE)
        self.table = BlockTable(NUM_SEQS, MAX_LEN // BLOCK_SIZE, NUM_SEQS, BLOCK_SIZE)

    def admit(self, name: int, token_ids: list[int]) -> None:
        self.manager.add(name, token_ids)
        granted = self.manager.allocate_slots(name)
        assert granted is not None
        self.manager.commit(name, len(token_ids) - granted.num_cached_tokens)
        self.num_cached = granted.num_cached_tokens

    def fill_rows(self, names: list[int]) -> None:
        for row, name in enumerate(names):
            self.table.set_row(row, self.manager.block_ids(name))
        self.lengths = np.array([self.manager.num_computed_tokens(name) for name in names])

    def decode_step(self, names: list[int], token_ids: list[int]) -> None:
        step = self.manager.append_step(names, token_ids)
        assert step is not None
        self.table.set_entries(*step.entries[0])
        self.table.fill(self.lengths)
        self.table.upload()
        self.lengths = self.lengths + 1
        self.manager.commit_step(names)

    def decode_calls(self, names: list[int], token_ids: list[int]) -> None:
        """The same step by one call of each kind per sequence."""
        manager, table = self.manager, self.table
        for row, (name, token) in enumerate(zip(names, token_ids, strict=True)):
            manager.append(name, (token,))
            granted = manager.allocate_slots(name, 1)
            assert granted is not None
            table.append_row(row, granted.new_block_ids)
        table.fill(self.lengths)
        table.upload()
        self.lengths = self.lengths + 1
        for name in names:
            manager.commit(name, 1)

    def slots(self, count: int) -> list[int]:
        return self.table.slot_mapping[:count].tolist()

    def free(self, names: list[int]) -> None:
        for name in names:
            self.manager.free(name)

    @property
    def num_free_blocks(self) -> int:
        return self.manager.num_free_blocks


def seconds(work: Callable[..., object], *arguments: Any) -> float:
    start = time.perf_counter()
    work(*arguments)
    return time.perf_counter() - start


def decode(sides: list, rounds: int, rng: random.Random) -> list[list[float]]:
    """Sequences of 1,025 to 1,280 tokens: one in 16 needs a block in every step."""
    names = list(range(NUM_SEQS))
    prompts = [[rng.randrange(50_000) for _ in range(1025 + name)] for name in names]
    times: list[list[float]] = [[] for _ in range(len(sides) + 1)]
    for side in sides:
        for name in names:
            side.admit(name, prompts[name])
        side.fill_rows(names)
    for _ in range(rounds):
        token_ids = [rng.randrange(50_000) for _ in names]
        for number, side in enumerate(sides):
            times[number].append(seconds(side.decode_step, names, token_ids))
        check(len({tuple(block_offsets(side)) for side in sides}) == 1, "slots differ in their offsets")
        check(len({side.num_free_blocks for side in sides}) == 1, "free blocks differ")
        token_ids = [rng.randrange(50_000) for _ in names]
        times[-1].append(seconds(sides[0].decode_calls, names, token_ids))
        for side in sides[1:]:
            side.decode_step(names, token_ids)
    for side in sides:
        side.free(names)
    return times


def block_offsets(side) -> list[int]:
    return [slot % BLOCK_SIZE for slot in side.slots(NUM_SEQS)]


def freeing(sides: list, rounds: int, rng: random.Random) -> list[list[float]]:
    names = list(range(NUM_SEQS))
    times: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        prompts = [[rng.randrange(50_000) for _ in range(2048)] for _ in names]
        for number, side in enumerate(sides):
            for name in names:
                side.admit(name, prompts[name])
            times[number].append(seconds(side.free, names))
            check(side.num_free_blocks == NUM_BLOCKS - 1, "blocks were lost")
    return times


def admission(sides: list, rounds: int, rng: random.Random) -> list[list[float]]:
    prefix = [rng.randrange(50_000) for _ in range(3072)]
    times: list[list[float]] = [[] for _ in sides]
    for side in sides:
        side.admit(-1, prefix)
    for name in range(rounds):
        prompt = prefix + [rng.randrange(50_000) for _ in range(1024)]
        for number, side in enumerate(sides):
            times[number].append(seconds(side.admit, name, prompt))
            check(side.num_cached == 3072, f"{side.num_cached} tokens hit, not 3072")
            side.free([name])
    for side in sides:
        side.free([-1])
    return times


def sha256_seconds(rounds: int) -> float:
    """The hashing alone of 256 blocks: 32 bytes of parent and 16 tokens of 8 bytes each."""
    data = bytes(range(160))

    def work() -> None:
        for _ in range(MAX_LEN // BLOCK_SIZE):
            hashlib.sha256(data).digest()

    return statistics.median(seconds(work) for _ in range(rounds))


def long_sequences() -> list[tuple[str, str]]:
    """What must not grow with the length of a sequence."""
    manager = KVCacheManager(100_000, BLOCK_SIZE)
    manager.add("chunks", range(1_000_000))

    def chunks() -> None:
        while manager.num_computed_tokens("chunks") < 1_000_000:
            granted = manager.allocate_slots("chunks", 512)
            assert granted is not None
            manager.commit("chunks", len(granted.slots))

    rows = [("1,000,000 tokens in chunks of 512", f"{seconds(chunks):.2f} s")]
    manager.free("chunks")
    for length in (400, 400_000):
        manager.add(length, range(length, 2 * length))
        granted = manager.allocate_slots(length)
        assert granted is not None
        manager.commit(length, length)
        times = []
        for token in range(500):
            manager.append(length, (token,))
            times.append(seconds(manager.allocate_slots, length, 1))
            manager.commit(length, 1)
        rows.append((f"`allocate_slots` of one token after {length:,}", f"{1e6 * statistics.median(times):.1f} us"))
    tracemalloc.start()
    manager.truncate(400_000, 100_000)
    held = tracemalloc.get_traced_memory()[0]
    took = seconds(lambda: [manager.fork(400_000, ("child", number)) for number in range(1000)])
    held = tracemalloc.get_traced_memory()[0] - held
    tracemalloc.stop()
    return [*rows, ("1,000 forks of 100,000 tokens", f"{held / 1e6:.0f} MB, {took:.2f} s under tracemalloc")]


def waste(rng: random.Random) -> list[tuple[int, float]]:
    """Per cent of the used slots that hold no token, for lengths uniform in 1..limit."""
    curve = []
    for limit in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096):
        manager = KVCacheManager(1 + NUM_SEQS * limit // BLOCK_SIZE, BLOCK_SIZE, enable_prefix_caching=False)
        for name in range(NUM_SEQS):
            length = rng.randint(1, limit)
            manager.add(name, length)
            manager.allocate_slots(name)
            manager.commit(name, length)
        curve.append((limit, manager.stats().wasted_percent))
    return curve


def compared(mine: list[float], theirs: list[float] | None) -> str:
    """The peer's median, and the median of the ratios round by round: what disturbs the machine disturbs both sides."""
    if theirs is None:
        return "- | -"
    ratio = statistics.median(other / own for own, other in zip(mine, theirs, strict=True))
    return f"{1e3 * statistics.median(theirs):.3f} ms | {ratio:.1f}x"


def check(condition: bool, message: str) -> None:
    if not condition:
        raise SystemExit(f"no figures: {message}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-peer", action="store_true", help="measure this library alone")
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    sides: list = [Ours()]
    title = "alone"
    if not options.no_peer:
        from peers.vllm_manager import VERSION, VllmManager

        sides.append(VllmManager(NUM_BLOCKS, BLOCK_SIZE, NUM_SEQS, MAX_LEN))
        title = f"vLLM {VERSION}"
    # collections and threads that wait for a core would hit either side at random
    gc.disable()
    torch.set_num_threads(1)
    rng = random.Random(0)
    steps = decode(sides, options.rounds * 4, rng)
    peer = steps[1] if len(sides) > 1 else None
    rows = [("decode step of 256 sequences", steps[0], peer), ("the same by single calls", steps[-1], peer)]
    for label, work in (("free 256 sequences of 2,048 tokens", freeing), ("admit 4,096 tokens, 75% cached", admission)):
        times = work(sides, options.rounds, rng)
        rows.append((label, times[0], times[1] if len(sides) > 1 else None))
    sides[0].manager.check_integrity()
    print(f"| work | pagedkv | {title} | ratio |\n|---|---|---|---|")
    for label, mine, theirs in rows:
        print(f"| {label} | {1e3 * statistics.median(mine):.3f} ms | {compared(mine, theirs)} |")
    hashing = sha256_seconds(options.rounds)
    share = 100 * hashing / statistics.median(rows[-1][1])
    print(f"\nsha256 alone of the 256 blocks: {hashing * 1e3:.3f} ms, {share:.0f}% of the admission")
    print("\n| long sequences | pagedkv |\n|---|---|")
    for label, figure in long_sequences():
        print(f"| {label} | {figure} |")
    print("\n| lengths uniform in 1..n | wasted slots |\n|---|---|")
    for limit, percent in waste(rng):
        print(f"| {limit} | {percent:.2f}% |")


if __name__ == "__main__":
    main()
