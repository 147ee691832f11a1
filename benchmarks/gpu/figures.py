"""Part "figures": how long what takes, beside the least it could take on this device.

The floor of a figure is the larger of its bytes over the measured bandwidth and its operations over the measured peak;
its ratio is the floor over the time, so 1.0 is the best there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from . import checks, device, inputs, parallel, timing
from .device import DEVICE, DTYPE, REHEARSAL
from .inputs import SHAPES, Shape
from .parallel import Call
from .report import ENVIRONMENT, Record, Report, Step, described

CEILINGS = "ceilings"
GOALS = {  # of the ratio; of the peer's time over ours
    "decode B=64 L=8192 HND": ("floor", 0.85),
    "prefill B=1 L=8192 HND": ("sdpa", 0.70),
}
_PEERS = ("sdpa", "varlen", "flash_attention_3", "flashinfer", "vllm")


def measured(record: Record, limits: Record, bytes: int, operations: int = 0) -> Record:
    """A time with its rates, floor and ratio. ``limits``: the record of the ceilings."""
    seconds = record["milliseconds"] / 1e3
    floors = {
        "bytes over bandwidth": bytes / limits["read_gb_per_s"] / 1e6,
        "operations over peak": operations / limits["matmul_tflop_per_s"] / 1e9,
    }
    of = max(floors, key=floors.__getitem__)
    return record | {
        "gb_per_s": bytes / seconds / 1e9,
        "tflop_per_s": operations / seconds / 1e12,
        "floor_milliseconds": floors[of],
        "floor": of,
        "ratio": floors[of] / record["milliseconds"],
    }


def _is_timed(check: str) -> bool:
    """Whether figures are reported of what a check checks: that type, without options."""
    return str(DTYPE)[6:] in check and ("plain" in check or check.startswith("write"))


def gate(deadline: float) -> Record:
    """Checks against the reference, in processes side by side; what is wrong here is refused a figure."""
    todo = [Call(name, "gpu.checks:check", (name,)) for name in checks.cases() if _is_timed(name)]
    results = dict(parallel.run(todo, deadline))
    wrong = {name: record for name, record in results.items() if "seconds" not in record or "error" in record}
    record: Record = {"checks": len(results)}
    if wrong:
        name, first = next(iter(wrong.items()))
        record |= {"error": f"{len(wrong)} wrong, the first: {name}: {first.get('error', first)}", "wrong": list(wrong)}
    return record


def compile_all(deadline: float) -> Record:
    """Every shape once, in processes side by side: what they compile, this process finds on disk."""
    todo = [Call(name, "gpu.figures:run_once", (name,)) for name in SHAPES]
    results = dict(parallel.run(todo, deadline))
    return {"shapes": len(results), "seconds_each": {name: record.get("seconds") for name, record in results.items()}}


def run_once(name: str) -> None:
    import pagedkv_ops

    pagedkv_ops.paged_attention(*inputs.make(SHAPES[name]).attention_args)
    torch.cuda.synchronize()


def ceilings() -> Record:
    """Reading alone (a sum of 4 GB), a copy (bytes read and written), and a product of 8192 x 8192 matrices."""
    size, n = (1 << 12, 64) if REHEARSAL else (1 << 31, 8192)
    source = torch.randn(size, dtype=torch.float32, device=DEVICE).to(DTYPE)
    target = torch.empty_like(source)
    a, b = torch.randn(2, n, n, device=DEVICE).to(DTYPE)
    words = source.view(torch.int32)
    read = timing.milliseconds([lambda: words.sum(dtype=torch.int32)])["milliseconds"]
    copy = timing.milliseconds([lambda: target.copy_(source)])["milliseconds"]
    product = timing.milliseconds([lambda: a @ b])["milliseconds"]
    copied = 2 * 2 * size / copy / 1e6
    alone = 2 * size / read / 1e6
    return {
        "read_gb_per_s": max(alone, copied),  # a sum that is slower than a copy is no ceiling
        "sum_gb_per_s": alone,
        "copy_gb_per_s": copied,
        "matmul_tflop_per_s": 2 * n**3 / product / 1e9,
    }


def attention(shape: Shape, limits: Record) -> Record:
    import pagedkv_ops

    count = min(timing.copies(shape.bytes()), max(1, int(torch.cuda.mem_get_info()[0] // (4 * shape.bytes()))))
    sets = [inputs.make(shape, seed) for seed in range(count)]
    inputs.assert_right(sets[0], pagedkv_ops.paged_attention(*sets[0].attention_args))
    calls = [partial(pagedkv_ops.paged_attention, *one.attention_args) for one in sets]
    record = measured(timing.milliseconds(calls), limits, shape.bytes(), shape.operations()) | {"input_sets": count}
    if GOALS.get(shape.name, ("", 0))[0] == "floor":
        goal = GOALS[shape.name][1]
        record["goal"] = f"{'reached' if record['ratio'] >= goal else 'missed'}: {record['ratio']:.0%}, goal {goal:.0%}"
    return record


def write(tokens: int, limits: Record) -> Record:
    """``write_kv`` to random slots: keys and values are read once and written once."""
    import pagedkv_ops

    blocks, heads, size = (64, 2, 16) if REHEARSAL else (16384, 8, 128)
    tokens = min(tokens, 4) if REHEARSAL else tokens
    caches = torch.zeros(2, blocks, heads, 16, size, dtype=DTYPE, device=DEVICE).transpose(2, 3)
    sets = []
    for seed in range(1 if REHEARSAL else min(timing.copies(8 * tokens * heads * size), 16)):
        torch.manual_seed(seed)
        new = torch.randn(2, tokens, heads, size, device=DEVICE).to(DTYPE)
        sets.append((*new, *caches, torch.randperm(blocks * 16, device=DEVICE)[:tokens]))
    for one in sets:
        pagedkv_ops.write_kv(*one)
    key, value, key_cache, value_cache, slots = sets[-1]
    for cache, new in ((key_cache, key), (value_cache, value)):
        assert torch.equal(cache[slots // 16, slots % 16], new), "wrong content"
    calls = [partial(pagedkv_ops.write_kv, *one) for one in sets]
    return measured(timing.milliseconds(calls), limits, 2 * 2 * 2 * key.numel())


def _decode_calls(name: str) -> dict[str, Callable[[], Any]]:
    """Attention, write and append of one small decode step."""
    import pagedkv_ops

    one = inputs.make(SHAPES[name])
    batch, (heads, size) = len(one.seq_lens), one.key_cache.shape[2:]
    new = torch.randn(2, batch, heads, size, device=DEVICE).to(DTYPE)
    last = (one.seq_lens - 1).long()
    block = one.block_table.gather(1, (last // 16)[:, None])[:, 0].long()
    slots = block * 16 + last % 16
    query, key_cache, value_cache, table, seq_lens, _ = one.attention_args
    return {
        "attention": lambda: pagedkv_ops.paged_attention(query, key_cache, value_cache, table, seq_lens),
        "write": lambda: pagedkv_ops.write_kv(*new, key_cache, value_cache, slots),
        "append": lambda: pagedkv_ops.paged_attention_append(
            query, *new, key_cache, value_cache, slots, table, seq_lens
        ),
    }


def eager_and_graph(name: str) -> Record:
    """Microseconds of a call launched one by one and replayed, and of the host's part alone (goal: 30, writes 20)."""
    record: Record = {}
    for op, call in _decode_calls(name).items():
        graph = timing.milliseconds([call])
        host, waited = timing.host_microseconds(call)
        record[op] = {
            "host_us": host,
            "eager_us": waited,
            "graph_us": graph["milliseconds"] * 1e3,
            "timed": graph["timed"],
            "host_goal_us": 20 if op == "write" else 30,
        }
    return record


def against_peers(shape: Shape, ours: Record) -> Record:
    """Milliseconds of other kernels on the same inputs, and how many times ours each takes."""
    from peers import gpu as peers

    one = inputs.make(shape)
    dense = [torch.stack(parts) for parts in zip(*(one.dense(row) for row in range(len(shape.lens))), strict=True)]
    same = peers.Inputs(*one.attention_args[:5], one.cu_seqlens_q, *dense, shape.lens[0][0])

    def peer(name: str) -> Record:
        try:
            call = peers.PEERS[name](same)
            inputs.assert_right(one, call())
            took = timing.milliseconds([call])
        except Exception as error:  # a peer that is not there, or wrong, is a finding
            return {"none": described(error)}
        return took | {"times_ours": took["milliseconds"] / ours["milliseconds"]}

    record: Record = {name: peer(name) for name in _PEERS}
    kind, goal = GOALS.get(shape.name, ("", 0))
    if "times_ours" in record.get(kind, {}):
        reached = record[kind]["times_ours"]
        record["goal"] = f"{'reached' if reached >= goal else 'missed'}: {reached:.0%} of {kind}, goal {goal:.0%}"
    return record


def run(report: Report, out: Path) -> bool:
    from . import generation

    def limits() -> Record:
        return report.steps[CEILINGS]

    right = ("gate", CEILINGS)
    steps = [
        Step(ENVIRONMENT, 0, device.facts),
        Step("gate", 20, lambda: gate(min(report.deadline, time.time() + 90))),
        Step(CEILINGS, 10, ceilings),
        Step("compilation", 20, lambda: compile_all(min(report.deadline, time.time() + 60)), ("gate",)),
    ]
    steps += [Step(name, 8, lambda shape=shape: attention(shape, limits()), right) for name, shape in SHAPES.items()]
    steps += [Step(f"write {n}", 8, lambda n=n: write(n, limits()), right) for n in (64, 2048, 16384)]
    small = "decode B=1 L=16384 HND"
    steps.append(Step("eager against graph, host time", 10, lambda: eager_and_graph(small), ("gate",)))
    generated = generation.steps(limits, right)
    steps += [step for step in generated if "compiled" not in step.name]
    for name in ("decode B=64 L=8192 HND", "prefill B=1 L=8192 HND", "prefill B=8 L=2048 HND", small):
        one = SHAPES[name]
        peers = Step(f"peers: {name}", 12, lambda s=one: against_peers(s, report.steps[s.name]), (*right, name))
        steps.append(peers)
    steps += [step for step in generated if "compiled" in step.name]  # they take longest, and compiling may hang
    return report.run(steps, device.is_lost)
