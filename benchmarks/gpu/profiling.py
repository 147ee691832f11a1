"""Part "profile": hardware counters of single launches (Nsight Compute), and memory and race checks of small ones
(Compute Sanitizer). Where a tool is not there its steps say so.
"""

from __future__ import annotations

import csv
import io
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

from . import device, launches
from .inputs import SHAPES
from .parallel import Call
from .report import ENVIRONMENT, Record, Report, Step

METRICS = {
    "gpu__time_duration.sum": "nanoseconds",
    "dram__bytes.sum": "dram_bytes",
    "dram__throughput.avg.pct_of_peak_sustained_elapsed": "dram_percent",
    "sm__throughput.avg.pct_of_peak_sustained_elapsed": "sm_percent",
    "sm__inst_executed_pipe_tensor.avg.pct_of_peak_sustained_active": "tensor_percent",
    "lts__t_sector_hit_rate.pct": "l2_hit_percent",
    "sm__warps_active.avg.pct_of_peak_sustained_active": "occupancy_percent",
    "launch__registers_per_thread": "registers",
    "launch__shared_mem_per_block": "shared_bytes",
    "launch__waves_per_multiprocessor": "waves",
    "launch__grid_size": "programs",
    "smsp__inst_executed.sum": "instructions",
}
_CHECKS = ("memcheck", "racecheck", "initcheck", "synccheck")
_FOLDERS = ("/usr/local/cuda/bin", "/opt/nvidia/nsight-compute")
_CLEAN = re.compile(r"ERROR SUMMARY: 0 errors|RACECHECK SUMMARY: 0 hazards")


def find(tool: str) -> str | None:
    """On the PATH, or where CUDA's packages put it."""
    found = shutil.which(tool) or next((str(path) for f in _FOLDERS for path in Path(f).glob(f"**/{tool}")), None)
    return found if found is None or os.access(found, os.X_OK) else None


def _run(tool: str, options: list[str], name: str, seconds: float, **env: str) -> tuple[int, str]:
    """Exit status and output of the tool over one launch; its folder is that of ``python -m gpu.launches``."""
    path = find(tool)
    if path is None:
        raise FileNotFoundError(tool)
    command = [path, *options, sys.executable, "-m", "gpu.launches", name]
    process = subprocess.Popen(
        command,
        cwd=Path(__file__).parents[1],
        env=os.environ | env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        preexec_fn=os.setpgrp,  # the tool and the program under it end together
    )
    try:
        output, _ = process.communicate(timeout=max(seconds, 1))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        raise
    return process.returncode, output


def counters(name: str, seconds: float, out: Path) -> Record:
    """Of every kernel between the marks. The clocks stay as they are: they are not this program's to change."""
    options = ["--csv", "--page", "raw", "--clock-control", "none", "--profile-from-start", "off"]
    try:
        status, output = _run("ncu", [*options, "--metrics", ",".join(METRICS)], name, seconds)
    except FileNotFoundError:
        return {"skipped": "ncu is not installed"}
    with (out / "profile.log").open("a") as log:
        log.write(f"=== ncu: {name}\n{output}\n")
    kernels = parse(output)
    if not kernels:
        return {"error": f"ncu gave no counters, status {status}", "tail": output.splitlines()[-8:]}
    record: Record = {"kernels": kernels}
    if name in SHAPES:
        moved = sum(kernel.get("dram_bytes", 0) for kernel in kernels)
        record["dram_bytes_over_floor"] = moved / SHAPES[name].bytes()
    return record


def parse(output: str) -> list[Record]:
    """Rows of ncu's CSV: a header, a row of units, and a row per kernel, among lines of its own and the program's."""
    lines = output.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        return []
    table = [line for line in lines[start:] if line.startswith('"')]
    units, *rows = list(csv.DictReader(io.StringIO("\n".join(table))))
    return [{"kernel": row["Kernel Name"]} | _values(row, units) for row in rows]


_SCALES = {"K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_NANOSECONDS = {"ns": 1.0, "nsecond": 1.0, "us": 1e3, "usecond": 1e3, "ms": 1e6, "msecond": 1e6, "s": 1e9}


def _values(row: dict[str, str], units: dict[str, str]) -> dict[str, float]:
    """In bytes and nanoseconds: ncu chooses other units for large values."""
    values = {}
    for metric, name in METRICS.items():
        text, unit = (row.get(metric) or "").replace(",", ""), units.get(metric) or ""
        if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", text):
            scale = _SCALES.get(unit[:1], 1.0) if "byte" in unit.lower() else _NANOSECONDS.get(unit, 1.0)
            values[name] = float(text) * scale
    return values


def sanitized(check: str, name: str, seconds: float, out: str) -> Record:
    """Without torch's cache of allocations, so that an access past a tensor's end is one past an allocation's."""
    options = ["--tool", check, "--target-processes", "application-only", "--print-limit", "20"]
    try:
        status, output = _run("compute-sanitizer", options, name, seconds, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    except FileNotFoundError:
        return {"skipped": "compute-sanitizer is not installed"}
    with (Path(out) / "profile.log").open("a") as log:
        log.write(f"=== {check}: {name}\n{output}\n")
    if "Device not supported" in output:
        return {"skipped": "compute-sanitizer does not support the device here"}
    if status or f"launched {name}" not in output or not _CLEAN.search(output):
        found = [line for line in output.splitlines() if line.startswith("=========")] or output.splitlines()
        return {"error": f"{check} is not clean, status {status}", "tail": found[:12] + found[-2:]}
    return {"clean": True}


def run(report: Report, out: Path) -> bool:
    """The counters one by one, as they need the device for themselves; the checks side by side."""
    steps = [Step(ENVIRONMENT, 0, device.facts)]
    for name in launches.LARGE:
        call = lambda name=name: counters(name, min(60, report.left() - 2), out)  # noqa: E731
        steps.append(Step(f"counters: {name}", 12, call))
    report.run(steps)
    pairs = [(check, name) for check in _CHECKS for name in launches.SMALL]
    calls = [Call(f"{check}: {name}", "gpu.profiling:sanitized", (check, name, 60, str(out))) for check, name in pairs]
    report.run_parallel(calls)
    return True
