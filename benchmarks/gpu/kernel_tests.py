"""The project's own kernel tests, ``tests/triton``, on the device: split over processes, none stops at a failure.

Without pytest on the machine they are left out; the checks of ``checks`` need nothing.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from . import parallel
from .device import REHEARSAL
from .supervisor import ROOT

_RESULT = re.compile(r"^(\S+::.+?) (PASSED|FAILED|ERROR|SKIPPED|XFAIL)\b", re.MULTILINE)
# without the project's options and settings: the plugins that they name may be missing on a borrowed machine
_BARE = ("-o", "addopts=", "--noconftest", "-p", "tests.triton.conftest", "-p", "no:cacheprovider", "-W", "ignore")


def _pytest(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "pytest", *_BARE, *arguments]


def _environment() -> dict[str, str]:
    return os.environ | {"PAGEDKV_TEST_DEVICE": "cpu" if REHEARSAL else "cuda", "PYTHONWARNINGS": "ignore"}


def files() -> list[str]:
    """Those whose tests call kernels on the device, or need one; the others pass without."""
    texts = {path: path.read_text() for path in sorted((ROOT / "tests" / "triton").glob("test_*.py"))}
    marks = ("(kernels: Kernels", "needs a CUDA device")
    return [str(path.relative_to(ROOT)) for path, text in texts.items() if any(mark in text for mark in marks)]


def collect(files: list[str], only: str) -> list[str]:
    command = _pytest("--collect-only", "-q", "-k", only, *files)
    done = subprocess.run(command, cwd=ROOT, env=_environment(), capture_output=True, text=True, timeout=120)
    found = [line for line in done.stdout.splitlines() if "::" in line]
    if not found:
        raise RuntimeError(f"pytest found no tests: {(done.stdout + done.stderr)[-400:]}")
    return found


def run(deadline: float, log: Path, only: str = "") -> dict[str, Any]:
    """Counts, and the names of what failed; the log holds the processes' whole output.

    Args:
        deadline: ``time.time()`` at which the processes are ended; what they had not run yet counts as left out.
        only: expression of ``pytest -k``.
    """
    if importlib.util.find_spec("pytest") is None:
        return {"skipped": "pytest is not installed"}
    tests = collect(files(), only)
    count = min(parallel.workers(), len(tests))
    with tempfile.TemporaryDirectory() as directory:
        shards = [_start(Path(directory) / str(i), tests[i::count]) for i in range(count)]
        for process, _ in shards:
            _wait(process, deadline)
        outputs = [output.read_text(errors="replace") for _, output in shards]
    log.write_text("\n".join(outputs))
    return summary(tests, outputs)


def _wait(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(timeout=max(deadline - time.time(), 0.1))
    except subprocess.TimeoutExpired:
        process.kill()  # its kernel process ends with its input
        process.wait()


def _start(folder: Path, tests: list[str]) -> tuple[subprocess.Popen[bytes], Path]:
    folder.mkdir()
    (folder / "tests").write_text("\n".join(tests))
    output = folder / "output"
    command = _pytest("-v", "--tb=short", "-rfE", f"@{folder / 'tests'}")
    with output.open("wb") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=_environment(), stdout=file, stderr=subprocess.STDOUT)
    return process, output


def summary(tests: list[str], outputs: list[str]) -> dict[str, Any]:
    results: dict[str, str] = {}
    for output in outputs:
        for name, result in _RESULT.findall(output):
            results.setdefault(name, result)
    counts = {kind.lower(): n for kind in sorted(set(results.values())) if (n := list(results.values()).count(kind))}
    failed = sorted(name for name, result in results.items() if result in ("FAILED", "ERROR"))
    record: dict[str, Any] = {"collected": len(tests), "processes": len(outputs), **counts}
    missing = [name for name in tests if name not in results]
    if missing:
        record |= {"not_run": len(missing), "first_not_run": missing[0]}
    if failed or not results:
        record["error"] = f"{len(failed)} of {len(results)} kernel tests failed" if results else "no test has run"
        record["failed"] = failed
        record["tail"] = outputs[0].splitlines()[-15:]
    return record
