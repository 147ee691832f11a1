"""Kernels compiled for GPUs that are not there: no spills, shared memory within limits, the right instructions.

A sample; ``benchmarks/triton_compile_report.md`` holds every kernel and configuration, and must agree with it.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton is not installed (pip install triton==3.7.1)")

import triton

from pagedkv_ops._triton import compile_report, tune
from pagedkv_ops._triton.tuned import TABLE

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "benchmarks" / "triton_compile_report.md"
SAMPLE = [
    ("sm_80", "attention prefill bfloat16 D=128"),
    ("sm_90", "attention decode bfloat16 D=128"),
    ("sm_90", "attention prefill bfloat16 D=128"),
    ("sm_90", "attention decode float32 D=128 softcap alibi sinks lse splits"),
    ("sm_90", "combine bfloat16 D=128"),
    ("sm_90", "write_kv float32 to bfloat16"),
    ("sm_90", "copy_blocks bfloat16 read"),
    ("sm_90", "gather_kv bfloat16"),
    ("sm_100", "attention prefill bfloat16 D=128"),
]


def checked_in_rows() -> dict[tuple[str, str], str]:
    rows = (line for line in REPORT.read_text().splitlines() if line.startswith(("| sm_", "| small")))
    return {tuple(cell.strip() for cell in row.split("|")[1:3]): row for row in rows}  # type: ignore[misc]


def compile_elsewhere(code: str, *arguments: str) -> Any:
    """The JSON that ``code`` prints in a process without the interpreter."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", "import json, sys; " + code, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_sample_compiles_without_problems() -> None:
    """By the report's own function; one test, so that parallel workers repeat nothing."""
    code = (
        "from pagedkv_ops._triton.compile_report import row_of\n"
        "print(json.dumps([row_of(*pair) for pair in json.loads(sys.argv[1])]))"
    )
    rows = compile_elsewhere(code, json.dumps(SAMPLE))
    assert [problem for _, problems in rows for problem in problems] == []
    if f"by Triton {triton.__version__}:" in REPORT.read_text():  # another assembler may well use other registers
        checked_in = checked_in_rows()
        assert [row for row, _ in rows] == [checked_in[pair] for pair in SAMPLE], (
            "the table is out of date: python -m pagedkv_ops._triton.compile_report --write " + REPORT.name
        )


def test_one_split_uses_the_same_arithmetic_for_decode_and_prefill() -> None:
    """Two kernels, one per way of cutting rows into tiles: the same bits need the same floating-point instructions."""
    code = (
        "from pagedkv_ops._triton import compile_report, offline\n"
        "names = [f'attention {kind} bfloat16 D=128 num_splits=1' for kind in ('decode', 'prefill')]\n"
        "launches = [compile_report.launch_of('sm_90', name) for name in names]\n"
        "print(json.dumps([offline.float_instructions(offline.compile_launch(l, 90)) for l in launches]))"
    )
    decode, prefill = compile_elsewhere(code)
    assert any(name.startswith("HMMA") for name in decode)
    assert decode == prefill


def test_the_table_covers_every_kernel_and_configuration() -> None:
    wanted = {(arch, name) for arch in compile_report.TARGETS for name in compile_report.cases(arch)}
    assert set(checked_in_rows()) == wanted


def test_the_table_shows_no_spill_and_enough_shared_memory() -> None:
    for (arch, name), row in checked_in_rows().items():
        cells = [cell.strip() for cell in row.split("|")[1:-1]]
        registers, shared, spills, stack = map(int, cells[5:9])
        assert registers <= 255, name
        assert shared <= compile_report.TARGETS[arch].shared_bytes, name
        assert (spills, stack) == (0, 0), name
        if "attention" in name and "float32" not in name:
            assert re.match(r"\d+ \w*MMA", cells[9]), name


def test_problems_are_found() -> None:
    """The judgement itself: a report of a bad kernel names each fault."""
    launch = compile_report.launch_of("sm_90", "attention prefill bfloat16 D=128")
    good = compile_report.Report(100, 1000, 0, 0, 8, "HGMMA", 8, 8, 8, 1000)
    judge = lambda **faults: compile_report.problems(  # noqa: E731
        "sm_90", "attention prefill bfloat16 D=128", launch, good._replace(**faults)
    )
    assert judge() == []
    assert "spills" in judge(local_memory_instructions=1)[0]
    assert "shared memory" in judge(shared_bytes=300_000)[0]
    assert "HGMMA expected, HMMA found" in judge(tensor_core="HMMA")[0]
    assert "asynchronous" in judge(async_copies_128=0)[0]


def test_the_tuned_table_is_what_the_tuner_writes() -> None:
    assert (ROOT / "pagedkv_ops" / "_triton" / "tuned.py").read_text() == tune.render(TABLE)


def test_every_architecture_has_every_row() -> None:
    keys = {arch: {key[1:] for key in TABLE if key[0] == arch} for arch in compile_report.TARGETS}
    assert all(rows == keys["sm_80"] for rows in keys.values())
