"""One run on a machine with a CUDA GPU: builds, runs the GPU tests, replays CUDA graphs, measures against peers.

    python benchmarks/gpu_check.py                 everything, within --budget seconds (default 330)
    python benchmarks/gpu_check.py --dry-run       what would run, without a GPU

Prints a table (% of the measured copy bandwidth and of the measured matrix peak) and writes JSON. A result that is
wrong is reported as wrong, without a speed; a step that finds no time left is reported as left out. Exit status 1:
a test failed, a result was wrong, or no GPU is there.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from peers import gpu as peers

ROOT = Path(__file__).parents[1]
DEVICE = "cuda"
STEPS = ("build", "tests", "ceilings", "attention", "write", "latency")
Record = dict[str, Any]


@dataclass(frozen=True)
class Shape:
    """A batch of equal sequences; attention of the last ``query_len`` positions of each, causal."""

    name: str
    batch: int
    query_len: int
    seq_len: int
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16

    def flops(self) -> int:
        """4 * head_size per visible (query, key, head)."""
        pairs = sum(self.seq_len - self.query_len + i + 1 for i in range(self.query_len))
        return 4 * self.head_size * self.num_heads * self.batch * pairs

    def bytes(self) -> int:
        """Keys and values read once, queries read, results written; two bytes each."""
        cache = 2 * self.batch * self.seq_len * self.num_kv_heads * self.head_size
        rows = 2 * self.batch * self.query_len * self.num_heads * self.head_size
        return 2 * (cache + rows)

    @property
    def is_decode(self) -> bool:
        return self.query_len == 1


SHAPES = (
    Shape("decode B=64 L=8192", 64, 1, 8192),
    Shape("decode B=1 L=16384", 1, 1, 16384),
    Shape("decode B=8 L=4096", 8, 1, 4096),
    Shape("decode B=256 L=1024", 256, 1, 1024),
    Shape("prefill B=1 L=8192", 1, 8192, 8192),
    Shape("prefill B=8 L=2048", 8, 2048, 2048),
    Shape("chunk B=4 256 of 16384", 4, 256, 16384),
)
GOALS = {
    "decode B=64 L=8192": ("bandwidth", 0.85),  # of copy bandwidth
    "prefill B=1 L=8192": ("peer", 0.70),  # of FlashAttention 3, or torch's flash SDPA where it is not installed
}


def verdict(shape: Shape, record: Record) -> str | None:
    """Whether the shape's goal is reached, in words; None without a goal."""
    if shape.name not in GOALS:
        return None
    kind, share = GOALS[shape.name]
    if "milliseconds" not in record:
        return "not measured"
    if kind == "bandwidth":
        reached, what = record["share_of_copy_bandwidth"], "copy bandwidth"
    else:
        times = record["peers"]
        what = next((name for name in ("flash_attention_3", "sdpa") if "milliseconds" in times.get(name, {})), None)
        if what is None:
            return "no peer to compare with"
        reached = times[what]["milliseconds"] / record["milliseconds"]
    return f"{'reached' if reached >= share else 'missed'}: {reached:.0%} of {what}, goal {share:.0%}"


class Budget:
    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        return self._end - time.monotonic()


def run_command(command: list[str], timeout: float, **env: str) -> Record:
    """Exit status, last lines and duration of a command; a time-out is an exit status too."""
    start = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | env, timeout=max(timeout, 1), capture_output=True, text=True
        )
        status, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as expired:
        status, output = 124, f"{expired.stdout or b''!r} ended after {timeout:.0f} s"
    return {"status": status, "seconds": round(time.monotonic() - start, 1), "tail": output.splitlines()[-15:]}


def build(budget: Budget) -> Record:
    command = [sys.executable, "-m", "pip", "install", "--no-build-isolation", "--no-deps", "-q", "-e", "."]
    record = run_command(command, min(150, budget.left()))
    if record["status"]:  # the GPU path does not need the CPU extension
        os.environ["PAGEDKV_CPU"] = "reference"
    return record


def run_tests(budget: Budget) -> Record:
    """The Triton tests on the device in place of the interpreter, and those that only a device can run."""
    files = [f"tests/triton/test_{name}.py" for name in ("device", "attention", "append", "ops")]
    # without the project's options and settings: the plugins that they name may be missing on a borrowed machine
    bare = ["-o", "addopts=", "--noconftest", "-p", "tests.triton.conftest"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", *bare, *files]
    return run_command(command, min(170, budget.left() - 100), PAGEDKV_TEST_DEVICE="cuda", PAGEDKV_CPU="reference")


def milliseconds(call: Callable[[], Any]) -> float:
    """Median over 100 ms of repeats, the L2 cache flushed between them."""
    from triton.testing import do_bench

    call()
    return float(do_bench(call, warmup=20, rep=100, return_mode="median"))


def ceilings() -> Record:
    """GB/s of a 2 GiB device copy (reads plus writes), and TFLOP/s of an 8192 x 8192 x 8192 bfloat16 product."""
    source = torch.empty(1 << 30, dtype=torch.bfloat16, device=DEVICE)
    target = torch.empty_like(source)
    copy = 2 * source.numel() * 2 / milliseconds(lambda: target.copy_(source)) / 1e6
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device=DEVICE)
    matmul = 2 * 8192**3 / milliseconds(lambda: a @ a) / 1e9
    return {"copy_gb_per_s": copy, "matmul_tflop_per_s": matmul}


def make_inputs(shape: Shape) -> peers.Inputs:
    """Random tokens in randomly placed blocks, and the same keys and values contiguous."""
    torch.manual_seed(0)
    columns = -(-shape.seq_len // shape.block_size)
    num_blocks = shape.batch * columns
    sizes = (num_blocks, shape.block_size, shape.num_kv_heads, shape.head_size)
    options = {"dtype": torch.bfloat16, "device": DEVICE}
    key_cache, value_cache = torch.randn(sizes, **options), torch.randn(sizes, **options)
    table = torch.randperm(num_blocks, device=DEVICE).to(torch.int32).view(shape.batch, columns)
    dense = [cache[table].flatten(1, 2)[:, : shape.seq_len] for cache in (key_cache, value_cache)]  # [B, L, Hkv, D]
    return peers.Inputs(
        query=torch.randn(shape.batch * shape.query_len, shape.num_heads, shape.head_size, **options),
        key_cache=key_cache,
        value_cache=value_cache,
        block_table=table,
        seq_lens=torch.full((shape.batch,), shape.seq_len, dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=torch.arange(shape.batch + 1, dtype=torch.int32, device=DEVICE) * shape.query_len,
        key=dense[0],
        value=dense[1],
        query_len=shape.query_len,
    )


Expected = list[tuple[slice, torch.Tensor, torch.Tensor]]


def expect(inputs: peers.Inputs) -> Expected:
    """The last rows of the first and the last sequence by dense attention on the CPU: float64, and rounded."""
    from pagedkv_ops.testing import dense_attention

    rows = min(inputs.query_len, 32)
    expected = []
    for b in sorted({0, inputs.block_table.size(0) - 1}):
        part = slice((b + 1) * inputs.query_len - rows, (b + 1) * inputs.query_len)
        tensors = (inputs.query[part].cpu(), inputs.key[b].cpu(), inputs.value[b].cpu())
        exact, rounded = (dense_attention(*tensors, dtype=dtype)[0] for dtype in (torch.float64, torch.bfloat16))
        expected.append((part, exact, rounded))
    return expected


def measure(call: Callable[[], torch.Tensor], expected: Expected) -> Record:
    from pagedkv_ops.testing import assert_within_rounding

    try:
        out = call()
        for part, exact, rounded in expected:
            assert_within_rounding(out[part].cpu(), exact, rounded)
        return {"milliseconds": milliseconds(call)}
    except Exception as error:  # a peer's failure is a finding, not the end of the run
        return {"error": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"}


def attention(shape: Shape, limits: Record, budget: Budget) -> Record:
    import pagedkv_ops

    inputs = make_inputs(shape)
    tables = (inputs.key_cache, inputs.value_cache, inputs.block_table, inputs.seq_lens)
    boundaries = None if shape.is_decode else inputs.cu_seqlens_q
    expected = expect(inputs)
    record = measure(lambda: pagedkv_ops.paged_attention(inputs.query, *tables, boundaries), expected)
    if "milliseconds" in record:
        record["gb_per_s"] = shape.bytes() / record["milliseconds"] / 1e6
        record["tflop_per_s"] = shape.flops() / record["milliseconds"] / 1e9
        record["share_of_copy_bandwidth"] = record["gb_per_s"] / limits["copy_gb_per_s"]
        record["share_of_matmul"] = record["tflop_per_s"] / limits["matmul_tflop_per_s"]
    record["peers"] = {}
    for name, prepare in peers.PEERS.items():
        if budget.left() < 20:
            record["peers"][name] = {"error": "left out: no time"}
            continue
        try:
            call = prepare(inputs)
        except Exception as error:
            record["peers"][name] = {"error": f"{type(error).__name__}: {error}"}
            continue
        record["peers"][name] = measure(call, expected)
    record["goal"] = verdict(shape, record)
    return record


def write(limits: Record) -> Record:
    """``write_kv`` of 64 and of 8,192 tokens to random slots, against the bytes it must read and write."""
    import pagedkv_ops

    key_cache, value_cache = torch.empty(2, 4096, 16, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    record: Record = {}
    for tokens in (64, 8192):
        key, value = torch.randn(2, tokens, 8, 128, dtype=torch.bfloat16, device=DEVICE)
        slots = torch.randperm(4096 * 16, device=DEVICE)[:tokens]
        pagedkv_ops.write_kv(key, value, key_cache, value_cache, slots)
        if not (
            torch.equal(key_cache.flatten(0, 1)[slots], key) and torch.equal(value_cache.flatten(0, 1)[slots], value)
        ):
            record[f"{tokens} tokens"] = {"error": "wrong bytes"}
            continue
        args = (key, value, key_cache, value_cache, slots)
        took = milliseconds(lambda args=args: pagedkv_ops.write_kv(*args))
        rate = 4 * key.numel() * 2 / took / 1e6
        share = rate / limits["copy_gb_per_s"]
        record[f"{tokens} tokens"] = {"milliseconds": took, "gb_per_s": rate, "share_of_copy_bandwidth": share}
    return record


def latency() -> Record:
    """Microseconds of one append of a short sequence: the eager call, and its replay from a CUDA graph."""
    import pagedkv_ops

    inputs = make_inputs(Shape("tiny", 1, 1, 128))
    key, value = torch.randn(2, 1, 8, 128, dtype=torch.bfloat16, device=DEVICE)
    slot = inputs.block_table[0, -1:].long() * 16 + 15
    tables = (inputs.key_cache, inputs.value_cache, slot, inputs.block_table, inputs.seq_lens)

    def step() -> torch.Tensor:
        return pagedkv_ops.paged_attention_append(inputs.query, key, value, *tables)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    record = {}
    for name, call in (("eager_us", step), ("graph_us", graph.replay)):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(500):
            call()
        torch.cuda.synchronize()
        record[name] = (time.perf_counter() - start) / 500 * 1e6
    return record


def environment() -> Record:
    import triton

    properties = torch.cuda.get_device_properties(0)
    return {
        "device": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": sys.version.split()[0],
    }


def run(steps: list[str], budget: Budget) -> Record:
    report: Record = {"environment": environment()}
    if "build" in steps:
        report["build"] = build(budget)
    if "tests" in steps:
        report["tests"] = run_tests(budget)
    report["ceilings"] = ceilings()
    if "attention" in steps:
        report["attention"] = {}
        for shape in SHAPES:
            enough = budget.left() > 30
            result = attention(shape, report["ceilings"], budget) if enough else {"error": "left out: no time"}
            report["attention"][shape.name] = asdict(shape) | result
            torch.cuda.empty_cache()
    if "write" in steps:
        report["write"] = write(report["ceilings"])
    if "latency" in steps:
        report["latency"] = latency()
    return report


def failures(report: Record) -> list[str]:
    """What makes the run fail: red tests and wrong results; not a missed goal, a missing peer or a lack of time."""
    found = []
    if report.get("tests", {}).get("status"):
        found.append(f"tests: exit status {report['tests']['status']}")
    for part in ("attention", "write"):
        for name, record in report.get(part, {}).items():
            if "error" in record and not record["error"].startswith("left out"):
                found.append(f"{name}: {record['error']}")
    return found


def table(report: Record) -> str:
    lines = [f"{'shape':26}{'ms':>9}{'GB/s':>8}{'% copy':>8}{'TFLOP/s':>9}{'% mm':>7}  peers: ms (this / peer)"]
    for name, r in report.get("attention", {}).items():
        if "milliseconds" not in r:
            lines.append(f"{name:26}{r['error']}")
            continue
        ours = f"{r['milliseconds']:9.3f}{r['gb_per_s']:8.0f}{r['share_of_copy_bandwidth']:8.0%}"
        ours += f"{r['tflop_per_s']:9.1f}{r['share_of_matmul']:7.0%}"
        others = [
            f"{peer} {p['milliseconds']:.3f} ({r['milliseconds'] / p['milliseconds']:.2f})"
            for peer, p in r["peers"].items()
            if "milliseconds" in p
        ]
        lines.append(f"{name:26}{ours}  {', '.join(others)}")
        if r["goal"]:
            lines.append(f"{'':26}goal {r['goal']}")
    lines += [f"{part}: {json.dumps(report[part])}" for part in ("ceilings", "write", "latency") if part in report]
    return "\n".join(lines)


def plan(steps: list[str]) -> str:
    """What a run would do, for ``--dry-run``."""
    lines = [f"steps: {', '.join(steps)}"]
    for shape in SHAPES if "attention" in steps else ():
        goal = GOALS.get(shape.name)
        lines.append(
            f"{shape.name}: {shape.bytes() / 1e9:.3f} GB, {shape.flops() / 1e12:.4f} TFLOP"
            + (
                f", goal {goal[1]:.0%} of {'copy bandwidth' if goal[0] == 'bandwidth' else 'the fastest kernel'}"
                if goal
                else ""
            )
        )
    lines.append(f"peers: {', '.join(peers.PEERS)}")
    return "\n".join(lines)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", default=",".join(STEPS), help=f"some of {','.join(STEPS)} (ceilings always run)")
    parser.add_argument("--budget", type=float, default=330.0, help="seconds (default 330)")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "out" / "gpu_check.json")
    parser.add_argument("--dry-run", action="store_true", help="print the plan; needs no GPU")
    options = parser.parse_args(arguments)
    options.steps = [step for step in options.steps.split(",") if step]
    for step in options.steps:
        if step not in STEPS:
            parser.error(f"--steps must name some of {','.join(STEPS)}, got {step}")
    return options


def main() -> int:
    options = parse()
    if options.dry_run:
        print(plan(options.steps))
        return 0
    if not torch.cuda.is_available():
        print("gpu_check: torch sees no CUDA device; nothing was measured (--dry-run shows the plan)", file=sys.stderr)
        return 1
    report = run(options.steps, Budget(options.budget))
    report["failures"] = failures(report)
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    print("\n".join(report["failures"]) or "all results right")
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
