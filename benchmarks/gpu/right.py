"""Part "right": results on the device are those of the reference, at every level, all in processes side by side."""

from __future__ import annotations

import time
from pathlib import Path

import torch

from . import checks, device, kernel_tests
from .parallel import Call
from .report import ENVIRONMENT, Report, Step

_MODELS = {
    "engine, eager": ("gpu.models:check_engine", (False, False)),
    "engine, captured": ("gpu.models:check_engine", (False, True)),
    "patch": ("gpu.models:check_patch", (False,)),
}
_COMPILED = {
    "engine, compiled and captured": ("gpu.models:check_engine", (True, True)),
    "patch, compiled": ("gpu.models:check_patch", (True,)),
}
_TESTS_AT_LEAST = 45  # seconds
_COMPILED_TAKE = 0 if device.REHEARSAL else 90  # seconds that the tests leave, as torch.compile uses every core


def calls(prefix: str = "") -> list[Call]:
    """The slow ones first, so that none of them begins last."""
    found = [Call(name, *what) for name, what in _MODELS.items()]
    if not prefix:  # torch captures on the current device; the engine's own captures must see to that
        found += [Call(f"capture, num_splits={n}", "gpu.capture:every_length", (n,)) for n in (0, 1, 4)]
    found += [Call(f"check {name}", "gpu.checks:check", (name,)) for name in checks.cases()]
    return [call._replace(name=prefix + call.name) for call in found]


def run(report: Report, out: Path) -> None:
    report.run([Step(ENVIRONMENT, 0, device.facts)])
    report.run_parallel(calls())
    if torch.cuda.device_count() < 2:
        report.add("a device that is not current", {"skipped": "one device"})
    else:
        report.run_parallel(calls("cuda:1: "), {"PAGEDKV_GPU_DEVICE": "cuda:1"})
    report.run([Step("kernel tests", _TESTS_AT_LEAST, lambda: _tests(report, out))])
    if not device.REHEARSAL:  # on CPU Inductor compiles for minutes, and nothing of a device takes part
        report.run_parallel([Call(name, *what) for name, what in _COMPILED.items()])


def _tests(report: Report, out: Path) -> dict[str, object]:
    only = "test_merge and float" if device.REHEARSAL else ""
    end = max(report.deadline - _COMPILED_TAKE, time.time() + _TESTS_AT_LEAST) - 3
    return kernel_tests.run(end, out / "kernel_tests.log", only)
