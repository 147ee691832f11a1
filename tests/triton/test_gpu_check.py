"""``benchmarks/gpu_check.py`` without a GPU: its four calls in small, what they judge, and that they end in time.

Triton's interpreter stands for the device, and small scripts for ncu and compute-sanitizer.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed (pip install triton==3.7.1)")

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from gpu import checks, figures, kernel_tests, launches, parallel, profiling, report, supervisor, tuning
from gpu.inputs import Shape, batch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu_check.py"
CEILINGS = {"read_gb_per_s": 4000.0, "matmul_tflop_per_s": 800.0}


def rehearse(part: str, out: Path, only: str, **env: str) -> tuple[int, dict[str, Any]]:
    """Exit status and steps of a call."""
    command = [sys.executable, str(SCRIPT), part, "--out", str(out), "--rehearse", "--only", only]
    done = subprocess.run(command, env=os.environ | env, cwd=out, timeout=280, capture_output=True, text=True)
    path = out / f"{part}.json"
    assert path.exists(), done.stdout + done.stderr
    return done.returncode, json.loads(path.read_text())["steps"]


def run_code(code: str, out: Path) -> dict[str, Any]:
    """Steps of code that has a report, in a process with the rehearsal's device."""
    head = "from gpu import device; device.prepare()\nimport time, pathlib, torch\nfrom gpu import figures\n"
    head += (
        f"from gpu.report import Report\nreport = Report(pathlib.Path({str(out / 'x.json')!r}), time.time() + 200)\n"
    )
    env = supervisor.environment(rehearsal=True)
    done = subprocess.run([sys.executable, "-c", head + code], env=env, timeout=280, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads((out / "x.json").read_text())["steps"]


# The four calls.


def test_right(tmp_path: Path) -> None:
    only = r"environment|(append decode|mixed|write).*plain|capture, num_splits=0|patch|kernel tests"
    status, steps = rehearse("right", tmp_path, only)
    assert status == 0, steps
    assert steps["environment"]["rehearsal"]
    assert steps["capture, num_splits=0"]["lengths"] == 5
    assert steps["patch"]["prompts"] == 2
    assert steps["a device that is not current"] == {"skipped": "one device"}
    assert steps["kernel tests"]["passed"] == steps["kernel tests"]["collected"] == 2
    assert "test_merge" in (tmp_path / "kernel_tests.log").read_text()
    assert sum(name.startswith("check ") for name in steps) == 3


def test_figures(tmp_path: Path) -> None:
    name = "decode B=64 L=8192 HND"
    status, steps = rehearse("figures", tmp_path, f"{name}|write 64|generate: engine|host time")
    assert status == 0, steps
    for figure in (name, "write 64", "generate: engine"):
        assert steps[figure]["ratio"] == pytest.approx(
            steps[figure]["floor_milliseconds"] / steps[figure]["milliseconds"]
        )
    assert steps[name]["timed"] == "graph"
    assert steps[name]["goal"].endswith("goal 85%")
    assert steps[f"peers: {name}"]["sdpa"]["milliseconds"] > 0
    assert steps["generate: engine"]["same_tokens"] == 1.0
    assert set(steps["eager against graph, host time"]) >= {"attention", "write", "append"}


def test_tune(tmp_path: Path) -> None:
    status, steps = rehearse("tune", tmp_path, "decode 2 128")
    assert status == 0, steps
    record = steps["sm_80 decode 2 128"]
    assert record["candidates"] == record["right"] == record["timed"] == 3
    table: dict[str, Any] = {}
    exec((tmp_path / "tuned.py").read_text(), table)
    assert list(table["TABLE"]["sm_80", "decode", 2, 128]) == record["best"]
    assert table["TABLE"].keys() == tuning._table().keys()


NCU = """
print("==PROF== Connected")
subprocess.run(command, check=True)
print('"ID","Kernel Name","dram__bytes.sum","gpu__time_duration.sum","launch__registers_per_thread"')
print('"","","Mbyte","us","register/thread"')
print('"0","attention_kernel","1,024.5","12.5","96"')
"""
SANITIZER = """
subprocess.run(command, check=True)
bad = "racecheck" in sys.argv
print(f"========= a hazard\\n========= ERROR SUMMARY: 1 error" if bad else "========= ERROR SUMMARY: 0 errors")
"""


def test_profile(tmp_path: Path) -> None:
    for name, body in (("ncu", NCU), ("compute-sanitizer", SANITIZER)):
        tool = tmp_path / name
        head = f"#!{sys.executable}\nimport subprocess, sys\nsys.stdout.reconfigure(line_buffering=True)\n"
        tool.write_text(head + "command = sys.argv[sys.argv.index(sys.executable):]\n" + body)
        tool.chmod(0o755)
    only = "decode B=1 L=16384|(mem|race)check: small copy"
    status, steps = rehearse("profile", tmp_path, only, PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert status == 1
    (kernel,) = steps["counters: decode B=1 L=16384 HND"]["kernels"]
    assert kernel == {"kernel": "attention_kernel", "dram_bytes": 1.0245e9, "nanoseconds": 12500, "registers": 96}
    assert steps["memcheck: small copy"]["clean"]
    assert "racecheck is not clean" in steps["racecheck: small copy"]["error"]
    assert "launched small copy" in (tmp_path / "profile.log").read_text()


def test_small_launches_run(tmp_path: Path) -> None:
    code = """
from gpu import launches
for name, make in launches.SMALL.items():
    make()()
    report.add(name, {})
"""
    assert run_code(code, tmp_path).keys() == launches.SMALL.keys()


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_a_device_nothing_is_measured(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "figures", "--out", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "torch sees no CUDA device; nothing was measured" in done.stderr
    assert not (tmp_path / "figures.json").exists()


def test_a_call_in_which_nothing_ran_does_not_say_that_all_is_right(tmp_path: Path) -> None:
    status, steps = rehearse("figures", tmp_path, "no such step")
    assert status == 1
    assert not steps
    steps = {"environment": {}, "a": {"left_out": "no time"}, "b": {"skipped": "ncu is not installed"}}
    verdict = of_steps(tmp_path, steps).verdict()
    assert verdict == ("no step ran to its end, 1 left out, 1 skipped", False)
    assert of_steps(tmp_path, steps | {"c": {}}).verdict() == ("1 steps right, 1 left out, 1 skipped", True)
    failed = of_steps(tmp_path, steps | {"c": {}, "d": {"error": "wrong"}}).verdict()
    assert failed == ("d: wrong\n1 steps right, 1 error, 1 left out, 1 skipped", False)


def of_steps(path: Path, steps: dict[str, Any]) -> report.Report:
    made = report.Report(path / "none.json", 0.0)
    made.steps = steps
    return made


def test_without_arguments_the_four_calls_are_said() -> None:
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    for part in ("right", "figures", "tune", "profile"):
        assert f"gpu_check.py {part} --out DIR" in done.stdout


# No figures on wrong results.


def test_a_wrong_result_has_no_figure_and_the_next_shape_goes_on(tmp_path: Path) -> None:
    steps = run_code(
        """
import pagedkv_ops
right = pagedkv_ops.paged_attention
pagedkv_ops.paged_attention = lambda query, *args: right(query, *args) * (1 if args[4] is not None else 1.1)
report.only = "decode B=1 L=16384 HND|prefill B=1 L=8192 HND"
figures.gate, figures.ceilings = lambda deadline: {}, lambda: {"read_gb_per_s": 1.0, "matmul_tflop_per_s": 1.0}
figures.run(report, None)
""",
        tmp_path,
    )
    assert steps["decode B=1 L=16384 HND"]["error"].startswith("AssertionError")
    assert "milliseconds" not in steps["decode B=1 L=16384 HND"]
    assert "refused" in steps["peers: decode B=1 L=16384 HND"]
    assert steps["prefill B=1 L=8192 HND"]["milliseconds"] > 0


def test_no_figures_where_the_reference_says_otherwise(tmp_path: Path) -> None:
    steps = run_code(
        """
from gpu import parallel
parallel.run = lambda calls, deadline: iter([(call.name, {"seconds": 1.0}) for call in calls[1:]]
    + [(calls[0].name, {"seconds": 1.0, "error": "AssertionError: 3 of 8 rows differ"})])
report.only = "decode B=1 L=16384 HND|write 64|generate"
figures.ceilings = lambda: {"read_gb_per_s": 1.0, "matmul_tflop_per_s": 1.0}
figures.run(report, None)
""",
        tmp_path,
    )
    assert "3 of 8 rows differ" in steps.pop("gate")["error"]
    assert {name for name, record in steps.items() if "refused" not in record} == {"ceilings"}


def test_rows_are_compared() -> None:
    wanted = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    checks.assert_rows_close(wanted * 1.01, wanted, 0.02)
    for got, message in (
        (wanted * 1.05, "2 of 2 rows differ"),
        (wanted + torch.tensor([[0.0, 0.0], [torch.nan, 0.0]]), "NaN in 1 rows"),
        (wanted[:1], "expected shape"),
        (wanted.double(), "expected torch.float32"),
    ):
        with pytest.raises(AssertionError, match=message):
            checks.assert_rows_close(got, wanted, 0.02)


# Time, crashes and hangs.


def working(steps: str) -> list[str]:
    """A part's command: like ``gpu_check.py --deadline``, without torch."""
    code = f"""
import os, sys, time
from pathlib import Path
from gpu.report import Report, Step
report = Report(Path(sys.argv[1]), float(sys.argv[-1]))
def crash(): os._exit(9)
def hang(): time.sleep(100)
def fail(): raise ValueError("no")
lost = report.run([{steps}], lambda: True)
report.write()
sys.exit(0 if lost else 75)
"""
    return ["-c", code]


def supervised(tmp_path: Path, steps: str, seconds: float = 30) -> dict[str, Any]:
    path = tmp_path / "part.json"
    supervisor.supervise([*working(steps), str(path)], path, seconds, False)
    return json.loads(path.read_text())["steps"]


def test_a_crash_costs_one_step(tmp_path: Path) -> None:
    steps = supervised(tmp_path, "Step('a', 1, dict), Step('b', 1, crash), Step('c', 1, dict)")
    assert steps["b"] == {"error": "its process ended with status 9"}
    assert set(steps) == {"a", "b", "c"}


def test_a_part_that_does_not_start_is_named(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    assert supervisor.supervise(["-c", "import missing_module"], path, 30, False) == 1
    assert json.loads(path.read_text())["steps"] == {"start": {"error": "its process ended with status 1"}}


def test_a_lost_device_costs_one_step(tmp_path: Path) -> None:
    steps = supervised(tmp_path, "Step('a', 1, fail), Step('b', 1, os.getpid and dict), Step('c', 1, dict, ('a',))")
    assert steps["a"]["error"] == "ValueError: no"
    assert "error" not in steps["b"]
    assert steps["c"] == {"refused": "no figures without right results of: a"}


def test_a_part_is_ended_in_time_with_all_that_it_started(tmp_path: Path) -> None:
    start = time.monotonic()
    hang = f"lambda: __import__('subprocess').run(['sleep', '97.{os.getpid()}'], start_new_session=False)"
    steps = supervised(tmp_path, f"Step('a', 0, dict), Step('b', -99, {hang}), Step('c', 1, dict)", seconds=4)
    assert time.monotonic() - start < 20
    assert steps["b"] == {"error": "still running after 4 s"}
    assert "c" not in steps
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True, check=True).stdout
    assert f"sleep 97.{os.getpid()}" not in processes


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    one = report.Report(tmp_path / "x.json", time.time() + 5)
    one.run([report.Step("long", 60, dict), report.Step("short", 1, dict)])
    assert re.match(r"needs about 60 s of \d left", one.steps["long"]["left_out"])
    assert "seconds" in one.steps["short"]
    assert one.failures() == []


def test_the_file_is_written_after_every_step(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    seen: list[Any] = []
    steps = [report.Step(name, 0, lambda: seen.append(json.loads(path.read_text()))) for name in "ab"]
    report.Report(path, time.time() + 9).run(steps)
    assert [(content["running"], list(content["steps"])) for content in seen] == [("a", []), ("b", ["a"])]


def test_only_takes_what_it_names_and_what_that_requires(tmp_path: Path) -> None:
    one = report.Report(tmp_path / "x.json", time.time() + 9, "fig")
    gate, figure, other = (
        report.Step("gate", 0, dict),
        report.Step("fig", 0, dict, ("gate",)),
        report.Step("o", 0, dict),
    )
    one.run([gate, figure, other])
    assert list(one.steps) == ["gate", "fig"]


def test_a_call_that_crashes_hangs_or_fails_costs_its_own_result() -> None:
    calls = [
        parallel.Call("crash", "os:_exit", (5,)),
        parallel.Call("hang", "time:sleep", (60,)),
        parallel.Call("fail", "json:loads", ("{",)),
        parallel.Call("right", "json:loads", ('{"x": 1}',)),
    ]

    def results(fork: str) -> dict[str, Any]:
        env = supervisor.environment(rehearsal=True) | {"PAGEDKV_GPU_FORK": fork}
        return dict(parallel.run(calls, time.time() + 200, count=2, seconds=25, env=env))

    with ThreadPoolExecutor(2) as both:  # most of it is waiting for what hangs
        for found in both.map(results, ("0", "1")):
            assert "ended with" in found["crash"]["error"]
            assert found["hang"]["error"] == "still running after 25 s"
            assert found["fail"]["error"].startswith("JSONDecodeError")
            assert found["right"]["x"] == 1


def test_a_call_that_the_end_of_the_part_cuts_off_is_left_out() -> None:
    calls = [parallel.Call(name, "time:sleep", (60,)) for name in ("cut", "late")]
    env = supervisor.environment(rehearsal=True)
    results = dict(parallel.run(calls, time.time() + 4, count=1, env=env))
    assert results["cut"]["left_out"].startswith("no time: still running after ")
    assert results["late"] == {"left_out": "no time"}


# Arithmetic.


def test_operations_count_visible_pairs() -> None:
    shape = Shape("x", ((3, 5), (1, 7)), num_heads=4, num_kv_heads=2, head_size=8)
    assert shape.operations() == 4 * 8 * 4 * (3 + 4 + 5 + 7)
    assert shape.bytes() == 2 * (2 * 12 * 2 * 8 + 2 * 4 * 4 * 8)
    assert not shape.is_decode
    assert batch("y", 3, 1, 9).is_decode


def test_a_figure_stands_beside_its_floor() -> None:
    reading = figures.measured({"milliseconds": 2.0}, CEILINGS, bytes=4_000_000_000, operations=10)
    assert (reading["floor"], reading["floor_milliseconds"], reading["ratio"]) == ("bytes over bandwidth", 1.0, 0.5)
    product = figures.measured({"milliseconds": 4.0}, CEILINGS, bytes=1, operations=800_000_000_000)
    assert (product["floor"], product["floor_milliseconds"], product["ratio"]) == ("operations over peak", 1.0, 0.25)
    assert product["tflop_per_s"] == pytest.approx(200)


def test_a_row_changes_for_a_gain_beyond_the_noise_only() -> None:
    times = {"old": {"a": 1.0, "b": 2.0}, "noise": {"a": 0.98, "b": 2.0}}
    assert tuning.choose("old", times) == ("old", 1.0)
    best, ratio = tuning.choose("old", times | {"new": {"a": 0.5, "b": 2.2}})
    assert (best, ratio) == ("new", pytest.approx((0.5 * 1.1) ** 0.5))


def test_red_and_unfinished_kernel_tests_are_told_apart() -> None:
    tests = ["t.py::a", "t.py::b[x y]", "t.py::c"]
    record = kernel_tests.summary(tests, ["t.py::a PASSED [ 50%]\nt.py::b[x y] FAILED [100%]\nwhy", ""])
    assert (record["passed"], record["failed"], record["not_run"]) == (1, ["t.py::b[x y]"], 1)
    assert record["error"] == "1 of 2 kernel tests failed"
    assert "error" not in kernel_tests.summary(tests, ["t.py::a PASSED [ 50%]"])
    assert kernel_tests.summary(tests, [""])["error"] == "no test has run"


def test_kernel_tests_are_those_that_use_a_device() -> None:
    names = {Path(name).stem for name in kernel_tests.files()}
    assert names >= {"test_attention", "test_append", "test_ops", "test_device"}
    assert "test_launches" not in names


def test_kernel_tests_need_pytest(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(kernel_tests.importlib.util, "find_spec", lambda name: None)
    assert kernel_tests.run(time.time() + 9, tmp_path / "log") == {"skipped": "pytest is not installed"}


@pytest.mark.parametrize("call", [profiling.counters, lambda *args: profiling.sanitized("memcheck", *args)])
def test_missing_tools_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, call: Callable[..., Any]) -> None:
    monkeypatch.setattr(profiling, "find", lambda tool: None)
    assert "is not installed" in call("small copy", 5, tmp_path)["skipped"]
