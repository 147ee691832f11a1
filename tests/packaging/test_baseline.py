"""The baseline kernels in a program of their own (baseline.cpp): compiled for this machine, and for emulated Arm."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ["tests/packaging/baseline.cpp", "csrc/cpu/isa/kernels_baseline.cpp", "csrc/cpu/scratch.cpp"]

pytestmark = pytest.mark.skipif(not (ROOT / "csrc").is_dir(), reason="these tests are beside a wheel, not its sources")


def found(*names: str) -> str | None:
    return next((path for path in map(shutil.which, names) if path), None)


@pytest.mark.parametrize("machine", ["native", "aarch64"])
def test_baseline_kernels_against_a_plain_loop(tmp_path: Path, machine: str) -> None:
    compiler, emulator, level = os.environ.get("CXX") or found("c++", "g++", "clang++"), [], "-O0"
    if machine == "aarch64":
        compiler, qemu = found("aarch64-linux-gnu-g++"), found("qemu-aarch64-static", "qemu-aarch64")
        if compiler is None or qemu is None:
            pytest.skip("needs Debian's g++-aarch64-linux-gnu and qemu-user: apt-get install them")
        emulator, level = [qemu], "-O2"  # here nothing else tests what the optimiser makes of them
    assert compiler is not None
    program = tmp_path / "baseline"
    flags = ["-std=c++20", level, "-fno-math-errno", "-ffp-contract=fast", "-Icsrc", "-w", "-static"]
    subprocess.run([compiler, *flags, *SOURCES, "-o", program], cwd=ROOT, check=True, timeout=280)
    done = subprocess.run([*emulator, program], capture_output=True, text=True, timeout=280)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, "\n".join(line for line in lines if not line.startswith("ok")) or done.stderr
    assert len(lines) == 71
