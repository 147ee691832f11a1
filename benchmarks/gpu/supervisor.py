"""Runs a part in a process of its own: ends it in time, and starts another where it was lost in the middle.

A part ends a little before its limit by itself. This is for what it can not see: a hanging kernel, a crash, a device
that answers nothing but errors any more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from .report import RUNNING, Report

ROOT = Path(__file__).parents[2]
LOST = 75  # exit status of a part that can not go on with its device
_RESERVE = 8  # seconds between the part's own end and its limit
_RESTARTS = 6


def environment(rehearsal: bool) -> dict[str, str]:
    """No build and no install: the packages from their sources, and the reference for ops on CPU."""
    paths = [ROOT, ROOT / "python", ROOT / "benchmarks", os.environ.get("PYTHONPATH", "")]
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if str(path)),
        "PAGEDKV_CPU": "reference",
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
    }
    if rehearsal:
        env |= {"PAGEDKV_REHEARSAL": "1", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    return env


def supervise(command: list[str], path: Path, seconds: float, rehearsal: bool) -> int:
    """``command`` gets ``--deadline``; the exit status: 0 where every result was right.

    Args:
        path: the part's JSON file; an older one is replaced.
        seconds: after which the part and all that it started are ended.
    """
    path.unlink(missing_ok=True)
    end = time.time() + seconds
    for _ in range(_RESTARTS):
        command_line = [sys.executable, *command, "--deadline", str(end - _RESERVE)]
        child = subprocess.Popen(command_line, env=environment(rehearsal), start_new_session=True)
        try:
            status = child.wait(timeout=max(end - time.time(), 0.1))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end_session(child)
        if status == 2 or (status in (0, 1) and path.exists()):
            return status
        report = Report(path, end)
        running = json.loads(path.read_text())[RUNNING] if path.exists() else "start"
        why = f"still running after {seconds:.0f} s" if status is None else f"its process ended with status {status}"
        if running is not None:
            report.add(running, {"error": why})
        elif status != LOST:
            report.add(f"process {len(report.steps)}", {"error": why})
        if status is None or report.left() < 2 * _RESERVE or running == "start":
            break
    return 1


def _end_session(child: subprocess.Popen[bytes]) -> None:
    """The process and everything it started: they share a session of their own, in several groups."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError, IndexError):  # it has ended meanwhile
            session = stat.read_text().rpartition(")")[2].split()[3]
            if int(session) == child.pid:
                os.kill(int(stat.parent.name), signal.SIGKILL)
    child.wait()
