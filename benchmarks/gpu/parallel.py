"""Calls in several worker processes at once, each with a device context of its own.

A call that crashes, hangs or loses the device costs its own result only: its worker is replaced.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

Record = dict[str, Any]


class Call(NamedTuple):
    """``function`` as "module:name"; arguments that JSON holds."""

    name: str
    function: str
    args: tuple[Any, ...] = ()


def workers() -> int:
    """Two cores are left for this process and the driver's threads; each worker takes about 1 GB of host memory."""
    return max(1, min(14, (os.cpu_count() or 2) - 2))


class _Worker:
    def __init__(self, env: Mapping[str, str]) -> None:
        command = [sys.executable, "-m", "gpu.worker"]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        folder = Path(__file__).parents[1]
        # a group of its own, to end with what it forked: that would hold the pipe open
        self.process = subprocess.Popen(command, env=os.environ | env, cwd=folder, preexec_fn=os.setpgrp, **pipes)

    def _kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def call(self, call: Call, seconds: float) -> Record:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        timer = threading.Timer(max(seconds, 0.1), self._kill)
        timer.start()
        try:
            self.process.stdin.write(json.dumps([call.function, call.args]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except OSError:  # it has ended
            line = ""
        finally:
            is_late = not timer.is_alive()
            timer.cancel()
        if line:
            return dict(json.loads(line))
        status = self.process.wait()
        if is_late:
            return {"error": f"still running after {seconds:.0f} s", "lost": True, "late": True}
        return {"error": f"its process ended with status {status}", "lost": True}

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._kill()
            self.process.wait()


def run(
    calls: list[Call], deadline: float, count: int | None = None, seconds: float = 120, env: Mapping[str, str] = {}
) -> Iterator[tuple[str, Record]]:
    """(Name, result) of every call, as they end.

    Args:
        deadline: ``time.time()`` after which no call begins; the rest is left out.
        count: of workers; None: as many as the cores allow. seconds: of one call.
    """
    todo: queue.SimpleQueue[Call] = queue.SimpleQueue()
    for call in calls:
        todo.put(call)
    done: queue.SimpleQueue[tuple[str, Record]] = queue.SimpleQueue()

    def serve() -> None:
        worker = None
        while True:
            try:
                call = todo.get_nowait()
            except queue.Empty:
                break
            left = deadline - time.time()
            if left < 1:
                done.put((call.name, {"left_out": "no time"}))
                continue
            worker = worker or _Worker(env)
            start = time.perf_counter()
            record = worker.call(call, min(seconds, left))
            if record.pop("late", False) and left < seconds:
                record = {"left_out": f"no time: {record['error']}", "lost": True}
            is_lost = record.pop("lost", False)
            done.put((call.name, record | {"seconds": round(time.perf_counter() - start, 1)}))
            if is_lost:
                worker.close()
                worker = None
        if worker is not None:
            worker.close()

    threads = [threading.Thread(target=serve, daemon=True) for _ in range(min(count or workers(), len(calls)))]
    for thread in threads:
        thread.start()
    for _ in calls:
        yield done.get()
    for thread in threads:  # no worker holds on to the device while something is timed
        thread.join()
