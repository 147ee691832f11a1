"""Times of calls on the device, from captured graphs: the host's part is measured on its own (``host_microseconds``).

Calls rotate over copies of their inputs that together exceed the L2 cache, so that every one reads from memory.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import device

Call = Callable[[], Any]
_REPLAY = 4.0  # milliseconds that one replay should take at least: what a launch of a graph costs vanishes in it
_TOTAL = 120.0  # milliseconds of replays
_MOST_CALLS = 256  # in one graph
_COLD = 3  # times the L2 cache


def copies(bytes_of_one: int) -> int:
    """Input sets that exceed the L2 cache three times."""
    return max(1, min(64, math.ceil(_COLD * device.properties().L2_cache_size / max(bytes_of_one, 1))))


def _once(calls: Sequence[Call]) -> float:
    """Milliseconds of all calls in turn, launched one by one."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for call in calls:
        call()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def capture(calls: Sequence[Call]) -> Any:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def milliseconds(calls: Sequence[Call]) -> dict[str, Any]:
    """Median of one call, and the spread of the replays; from launches one by one where no graph can be captured."""
    for call in calls:
        call()  # compiles
    torch.cuda.synchronize()
    record: dict[str, Any] = {"timed": "graph"}
    sequence = list(calls)
    try:
        replay: Call = capture(sequence).replay
        replay()
        estimate = min(_once([replay]) for _ in range(1 if device.REHEARSAL else 3))
        rounds = min(math.ceil(_REPLAY / max(estimate, 1e-3)), max(1, _MOST_CALLS // len(calls)))
        if rounds > 1:
            sequence = [call for _ in range(rounds) for call in calls]
            replay = capture(sequence).replay
    except Exception as error:
        torch.cuda.synchronize()
        record["timed"] = f"eager: {type(error).__name__} in the capture"
        estimate, rounds = _once(sequence), 1

        def replay() -> None:
            for call in sequence:
                call()

    replay()
    torch.cuda.synchronize()
    repeats = 1 if device.REHEARSAL else max(5, min(100, round(_TOTAL / max(estimate * rounds, 1e-3))))
    times = sorted(_once([replay]) / len(sequence) for _ in range(repeats))
    return record | {"milliseconds": statistics.median(times), "spread": [times[0], times[-1]]}


def host_microseconds(call: Call) -> tuple[float, float]:
    """Of a call: of the host alone, which launches and does not wait, and with the wait; medians of five rounds.

    300 calls a round: the queue of launches (about 1,000) does not fill, so that the host never waits for the device.
    """
    calls, rounds = (1, 1) if device.REHEARSAL else (300, 5)
    call()
    launched, done = [], []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        launched.append((time.perf_counter() - start) / calls * 1e6)
        torch.cuda.synchronize()
        done.append((time.perf_counter() - start) / calls * 1e6)
    return statistics.median(launched), statistics.median(done)
