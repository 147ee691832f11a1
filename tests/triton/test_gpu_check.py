"""benchmarks/gpu_check.py without a GPU: its arguments, plan, arithmetic and judgement, on small CPU tensors."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

import pagedkv_ops

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
LIMITS = {"copy_gb_per_s": 1000.0, "matmul_tflop_per_s": 500.0}


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The script with the CPU as its device and a clock that says 0.5 ms."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(module, "milliseconds", lambda call: (call(), 0.5)[1])
    monkeypatch.setattr(module, "environment", lambda: {"device": "none"})
    monkeypatch.setattr(module, "ceilings", lambda: LIMITS)

    def dense(inputs):  # a peer that works on CPU
        batch = inputs.key.size(0)
        q = inputs.query.unflatten(0, (batch, inputs.query_len)).transpose(1, 2)
        k, v = inputs.key.transpose(1, 2), inputs.value.transpose(1, 2)
        mask = torch.ones(q.size(2), k.size(2), dtype=torch.bool).tril(k.size(2) - q.size(2))
        attend = torch.nn.functional.scaled_dot_product_attention
        return lambda: attend(q, k, v, mask, enable_gqa=True).transpose(1, 2).flatten(0, 1)

    def missing(inputs):
        raise ModuleNotFoundError("No module named 'missing'")

    kernels = {"sdpa": dense, "wrong": lambda inputs: lambda: torch.zeros_like(inputs.query), "missing": missing}
    monkeypatch.setattr(module.peers, "PEERS", kernels)
    shapes = [module.Shape("prefill B=1 L=8192", 1, 40, 40, 4, 2, 16, 4), module.Shape("decode", 3, 1, 70, 4, 2, 16, 4)]
    monkeypatch.setattr(module, "SHAPES", shapes)
    return module


def run_script(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=120)


def test_dry_run_prints_the_plan() -> None:
    done = run_script("--dry-run", "--steps", "attention,write")
    assert done.returncode == 0, done.stderr
    assert "steps: attention, write" in done.stdout
    assert "decode B=64 L=8192: 2.149 GB, 0.0086 TFLOP, goal 85% of copy bandwidth" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_a_device_nothing_is_measured() -> None:
    done = run_script()
    assert done.returncode == 1
    assert "torch sees no CUDA device; nothing was measured" in done.stderr


def test_unknown_steps_are_refused(script: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.parse(["--steps", "attention,wirte"])
    assert "got wirte" in capsys.readouterr().err


def test_flops_count_visible_pairs(script: ModuleType) -> None:
    shape = script.Shape("x", batch=2, query_len=3, seq_len=5, num_heads=4, num_kv_heads=2, head_size=8)
    assert shape.flops() == 4 * 8 * 4 * 2 * (3 + 4 + 5)
    assert shape.bytes() == 2 * (2 * 2 * 5 * 2 * 8 + 2 * 2 * 3 * 4 * 8)


def test_a_right_result_is_measured(script: ModuleType, tmp_path: Path) -> None:
    report = script.run(["attention", "write"], script.Budget(100))
    assert script.failures(report) == []
    record = report["attention"]["decode"]
    assert record["gb_per_s"] == pytest.approx(script.SHAPES[1].bytes() / 0.5e-3 / 1e9)
    assert record["share_of_copy_bandwidth"] == pytest.approx(record["gb_per_s"] / 1000)
    assert record["peers"]["sdpa"] == {"milliseconds": 0.5}
    assert record["peers"]["wrong"]["error"].startswith("AssertionError")
    assert record["peers"]["missing"]["error"] == "ModuleNotFoundError: No module named 'missing'"
    assert report["attention"]["prefill B=1 L=8192"]["goal"] == "reached: 100% of sdpa, goal 70%"
    assert report["write"]["64 tokens"]["milliseconds"] == 0.5
    table = script.table(report)
    assert "sdpa 0.500 (1.00)" in table
    assert "wrong 0" not in table
    json.dumps(report)


def test_a_wrong_result_has_no_speed_and_fails(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pagedkv_ops, "paged_attention", lambda query, *args: torch.zeros_like(query))
    monkeypatch.setattr(pagedkv_ops, "write_kv", lambda *args: None)
    report = script.run(["attention", "write"], script.Budget(100))
    assert len(script.failures(report)) == len(script.SHAPES) + 2
    assert "milliseconds" not in report["attention"]["decode"]
    assert report["attention"]["prefill B=1 L=8192"]["goal"] == "not measured"
    assert "wrong bytes" in script.failures(report)[-1]


def test_what_the_budget_leaves_out_is_named(script: ModuleType) -> None:
    report = script.run(["attention"], script.Budget(0))
    assert report["attention"]["decode"]["error"] == "left out: no time"
    assert script.failures(report) == []


def test_red_tests_fail_the_run(script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "run_tests", lambda budget: {"status": 1, "seconds": 2.0, "tail": ["1 failed"]})
    report = script.run(["tests"], script.Budget(100))
    assert script.failures(report) == ["tests: exit status 1"]


def test_commands_report_status_and_end_in_time(script: ModuleType) -> None:
    assert script.run_command([sys.executable, "-c", "print('x'); raise SystemExit(3)"], 30)["status"] == 3
    assert script.run_command([sys.executable, "-c", "import time; time.sleep(30)"], 0.5)["status"] == 124
