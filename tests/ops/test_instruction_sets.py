"""The kernels of every instruction set that this processor has, not of the best alone (PAGEDKV_ISA chooses one)."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkv_ops

HERE = Path(__file__).parent
FILES = ("test_attention.py", "test_append.py", "test_quantised.py", "test_writing.py", "test_states.py")
# a sixth of the grids; the reference is the same with each
PICK = (
    "not reference and (grid and (interleaved or hnd and not cache_dtype) and int64 or any_shape or any_row "
    "or every_stored or special_values or merge_equals)"
)

pytestmark = pytest.mark.skipif(
    pagedkv_ops.backends()["cpu"] == "reference", reason="the reference has no instruction sets"
)


def run(code: list[str], isa: str) -> subprocess.CompletedProcess[str]:
    root = str(HERE.parents[1])
    env = {**os.environ, "PAGEDKV_ISA": isa}
    return subprocess.run([sys.executable, *code], cwd=root, env=env, capture_output=True, text=True, timeout=280)


@pytest.fixture(scope="module")
def instruction_sets() -> list[str]:
    refused = run(["-c", "import pagedkv_ops"], "none")
    assert refused.returncode != 0
    names = re.search(r"PAGEDKV_ISA must be one of (.*) on this processor, got none", refused.stderr)
    assert names, refused.stderr
    return names[1].split(", ")


def test_the_best_one_is_the_default(instruction_sets):
    if "PAGEDKV_ISA" in os.environ:
        pytest.skip("another one was asked for")
    assert pagedkv_ops.backends()["cpu"] == f"c++ ({instruction_sets[-1]})"


@pytest.mark.parametrize("isa", ["baseline", "avx2", "avx512", "avx512_bf16", "avx512_amx"])
def test_results_hold_with(isa, instruction_sets):
    if isa not in instruction_sets:
        pytest.skip(f"this processor has {', '.join(instruction_sets)}")
    if f"({isa})" in pagedkv_ops.backends()["cpu"]:
        pytest.skip("the other tests run with this one")
    files = [str(HERE / name) for name in FILES]
    done = run(["-m", "pytest", "-p", "no:cacheprovider", "-k", PICK, *files], isa)
    assert done.returncode == 0, done.stdout[-4000:]  # 5 if the expression picked no test
