"""Host time of a call on the Triton path: the driver is faked, so that what is left is Python. Needs no GPU.

``python benchmarks/bench_host.py``: microseconds per call of the launcher, and the Python-level calls and
memory blocks that it takes, which do not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pagedkv_ops import _triton

sys.path.insert(0, str(Path(__file__).parents[1]))
from tools import fake_driver

HEADS, KV_HEADS, HEAD_SIZE, BLOCK_SIZE, BATCH = 32, 8, 128, 16, 8


def calls() -> dict[str, Callable[[], Any]]:
    """Calls of a decode step of 8 sequences, of a mixed step, and of moving blocks."""
    options = {"dtype": torch.bfloat16}
    key_cache, value_cache = torch.zeros(2, 64, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, **options)
    query = torch.zeros(BATCH, HEADS, HEAD_SIZE, **options)
    key, value = torch.zeros(2, BATCH, KV_HEADS, HEAD_SIZE, **options)
    slots = torch.arange(BATCH)
    lengths = torch.ones(BATCH, dtype=torch.int32)
    narrow = torch.zeros(BATCH, 8, dtype=torch.int32)  # 128 keys: not split
    wide = torch.zeros(BATCH, 2048, dtype=torch.int32)
    chunks = torch.zeros(BATCH + 64, HEADS, HEAD_SIZE, **options)
    boundaries = torch.arange(BATCH + 1, dtype=torch.int32)
    caches = [torch.zeros(64, BLOCK_SIZE, KV_HEADS, HEAD_SIZE, **options) for _ in range(8)]
    pairs = torch.tensor([[0, 1], [2, 3]])
    tables = (key_cache, value_cache)
    return {
        "attention": lambda: _triton.paged_attention(query, *tables, narrow, lengths),
        "attention, split": lambda: _triton.paged_attention(query, *tables, wide, lengths),
        "attention, mixed": lambda: _triton.paged_attention(chunks, *tables, wide, lengths, boundaries),
        "append": lambda: _triton.paged_attention_append(query, key, value, *tables, slots, narrow, lengths),
        "append, split": lambda: _triton.paged_attention_append(query, key, value, *tables, slots, wide, lengths),
        "write": lambda: _triton.write_kv(key, value, *tables, slots),
        "copy of 8 caches": lambda: _triton.copy_blocks(caches, pairs),
    }


def python_work(function: Callable[[], Any]) -> tuple[int, int]:
    """Functions of Python that one call enters, and the most memory blocks of Python that it holds at once."""
    entered = most = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal entered, most
        entered += event == "call"
        most = max(most, sys.getallocatedblocks())

    gc.collect()
    gc.disable()
    sys.setprofile(count)
    try:
        before = sys.getallocatedblocks()
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return entered - 1, most - before  # less the lambda


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    print("| call | us, median | us, fastest round | Python functions entered | memory blocks held | launches |")
    print("| --- | --- | --- | --- | --- | --- |")
    with fake_driver.installed() as driver:
        for name, function in calls().items():
            function()
            driver.started = []
            function()
            launches, driver.started = len(driver.started), None
            entered, blocks = python_work(function)
            times = []
            for _ in range(rounds):
                start = time.perf_counter()
                for _ in range(10):
                    function()
                times.append((time.perf_counter() - start) * 1e5)
            median = statistics.median(times)
            print(f"| {name} | {median:.1f} | {min(times):.1f} | {entered} | {blocks} | {launches} |")


if __name__ == "__main__":
    main()
