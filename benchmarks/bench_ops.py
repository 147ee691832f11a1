"""The CPU ops against the ceilings of the machine and against other kernels, all in one process.

    python benchmarks/bench_ops.py --short            the main rows, under two minutes (`make bench`)
    python benchmarks/bench_ops.py                    every row
    python benchmarks/bench_ops.py --only decode,write --json out.json --plot roofline.png
    python benchmarks/bench_ops.py --only sweep       prefill over head sizes and group sizes
    python benchmarks/bench_ops.py --layouts          NHD against HND storage, block sizes 8 .. 256

Results are compared with float32 SDPA first: a call that is wrong has no speed. Every round runs every candidate once
(a fast one several times), and the medians over the rounds are compared: a machine that slows down slows all of them.
Ceilings are taken in the same rounds: 512 MB read in sequence by all threads, a memcpy of the same bytes, torch.mm.
Pools and the ceilings' buffers are all torch's own allocations, so they lie in the same kind of memory pages.
FLOPs: 4 * head_size per visible (query, key, head).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import machine
import roofline
import torch
from peers.cpu import PEERS, Inputs, NotApplicableError
from torch.nn.functional import scaled_dot_product_attention

import pagedkv_ops

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
TOLERANCE = {F32: 2e-5, F16: 2e-3, BF16: 1.6e-2}
MIN_SECONDS = 0.003  # of one timing: shorter calls are repeated


@dataclass
class Row:
    kind: str  # decode, prefill, write, copy, overhead
    name: str
    goal: float | None  # of the ceiling; overhead: microseconds
    unit: str
    ceiling: float = 0.0
    intensity: float | None = None  # attention: FLOPs per byte of queries, keys, values and output
    speeds: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def verdict(self) -> str:
        """The goal beside the figure."""
        if self.goal is None:
            return ""
        mine = self.speeds["pagedkv"]
        if self.kind == "overhead":
            return f"goal <= {self.goal} us{'' if mine <= self.goal else '   MISSED'}"
        reached = mine / self.ceiling >= self.goal - 0.005  # as printed
        return f"goal {100 * self.goal:.0f}%{'' if reached else '   MISSED'}"


def seconds(call: Callable[[], Any], repeat: int) -> float:
    start = time.perf_counter()
    for _ in range(repeat):
        call()
    return (time.perf_counter() - start) / repeat


def interleave(calls: dict[str, Callable[[], Any]], rounds: int, min_seconds: float = MIN_SECONDS) -> dict[str, float]:
    """Median seconds of each call; every round runs all of them."""
    repeats = {name: max(1, int(min_seconds / max(seconds(call, 1), 1e-7))) for name, call in calls.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, repeats[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def make_inputs(
    batch: int, query_len: int, seq_len: int, heads: tuple[int, int], head_size: int, dtype: torch.dtype,
    block_size: int = 16, layout: str = "HND",
) -> Inputs:  # fmt: skip
    width = -(-seq_len // block_size)
    shape = (batch * width, block_size, heads[1], head_size)
    table = torch.randperm(batch * width).to(torch.int32).view(batch, width)
    key, value = (torch.randn(batch, heads[1], seq_len, head_size).to(dtype) for _ in range(2))

    def paged(dense: torch.Tensor) -> torch.Tensor:
        cache = torch.zeros(shape, dtype=dtype)
        if layout == "HND":
            cache = cache.transpose(1, 2).contiguous().transpose(1, 2)
        slots = (table.long()[:, :, None] * block_size + torch.arange(block_size)).flatten(1)[:, :seq_len]
        for b in range(batch):
            rows = dense[b].transpose(0, 1).contiguous()
            pagedkv_ops.write_kv(rows, rows[..., :0], cache, cache[..., :0], slots[b].contiguous())
        return cache

    return Inputs(
        query=torch.randn(batch * query_len, heads[0], head_size).to(dtype),
        key_cache=paged(key),
        value_cache=paged(value),
        block_table=table,
        seq_lens=torch.full((batch,), seq_len, dtype=torch.int32),
        cu_seqlens_q=torch.arange(batch + 1, dtype=torch.int32) * query_len,
        key=key,
        value=value,
        query_len=query_len,
    )


def ours(inputs: Inputs, **options: Any) -> Callable[[], torch.Tensor]:
    op = torch.ops.pagedkv.paged_attention.default
    args = (inputs.query, inputs.key_cache, inputs.value_cache, inputs.block_table, inputs.seq_lens)
    cu_seqlens_q = inputs.cu_seqlens_q if inputs.query_len > 1 else None
    return lambda: op(*args, cu_seqlens_q, **options)


def truth(inputs: Inputs) -> torch.Tensor:
    ones = torch.ones(inputs.query_len, inputs.seq_len, dtype=torch.bool)
    mask = ones.tril(inputs.seq_len - inputs.query_len)
    out = []
    for b in range(inputs.batch):  # one sequence at a time: a float32 copy of everything may not fit
        query = inputs.dense_query()[b : b + 1].float()
        key, value = inputs.key[b : b + 1].float(), inputs.value[b : b + 1].float()
        out.append(scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True))
    return torch.cat(out).transpose(1, 2).flatten(0, 1)


def attention_calls(inputs: Inputs, row: Row, peers: list[str]) -> dict[str, Callable[[], Any]]:
    """The calls whose results are right; the others are noted."""
    expected = truth(inputs)
    calls: dict[str, Callable[[], Any]] = {}
    for name, prepare in {"pagedkv": ours, **{n: PEERS[n] for n in peers}}.items():
        try:
            call = prepare(inputs)
            error = (call().float() - expected).abs().max().item()
        except NotApplicableError:
            continue
        except Exception as error:
            row.notes.append(f"{name}: {type(error).__name__}: {str(error).splitlines()[0][:90]}")
            continue
        if error <= TOLERANCE[inputs.query.dtype]:
            calls[name] = call
        else:
            row.notes.append(f"{name}: wrong by {error:.1e}, no speed reported")
    if "pagedkv" not in calls:
        raise SystemExit(f"{row.name}: {row.notes}")
    return calls


def flops(inputs: Inputs) -> int:
    visible = inputs.query_len * inputs.seq_len - inputs.query_len * (inputs.query_len - 1) // 2
    return 4 * inputs.query.shape[2] * inputs.query.shape[1] * inputs.batch * visible


def intensity(inputs: Inputs) -> float:
    """FLOPs per byte that has to move: queries, keys, values and output, once each."""
    return flops(inputs) / (2 * (inputs.query.numel() + inputs.key.numel()) * inputs.key.element_size())


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def storage(cache: dict[str, Any]) -> str:
    return f" S={cache['block_size']} {cache['layout']}" if cache else ""


def bench_decode(
    batch: int, seq_len: int, heads: tuple[int, int], head_size: int, dtype: torch.dtype,
    goal: float | None, rounds: int, peers: list[str], **cache: Any,
) -> Row:  # fmt: skip
    name = f"{dtype_name(dtype)} B={batch} L={seq_len} {heads[0]}/{heads[1]} D={head_size}{storage(cache)}"
    row = Row("decode", name, goal, "GB/s")
    inputs = make_inputs(batch, 1, seq_len, heads, head_size, dtype, **cache)
    calls = attention_calls(inputs, row, peers)
    # no repeats: the next call would find the 13 MB of the smallest row in the last-level cache
    times = interleave({"read": machine.read_all, **calls}, rounds, min_seconds=0)
    row.ceiling = machine.READ_BYTES / times.pop("read") / 1e9
    row.intensity = intensity(inputs)
    num_bytes = 2 * inputs.key.numel() * inputs.key.element_size()
    row.speeds = {n: num_bytes / t / 1e9 for n, t in times.items()}
    return row


def bench_prefill(
    query_len: int, seq_len: int, heads: tuple[int, int], head_size: int, dtype: torch.dtype,
    goal: float | None, rounds: int, peers: list[str], **cache: Any,
) -> Row:  # fmt: skip
    name = f"{dtype_name(dtype)} {query_len} over {seq_len} {heads[0]}/{heads[1]} D={head_size}{storage(cache)}"
    row = Row("prefill", name, goal, "GFLOP/s")
    inputs = make_inputs(1, query_len, seq_len, heads, head_size, dtype, **cache)
    calls = attention_calls(inputs, row, peers)
    # torch.mm in float16 runs at 1/1000 of float32 on processors without float16 arithmetic
    times = interleave({"mm": machine.matmul(F32 if dtype == F16 else dtype), **calls}, rounds)
    row.ceiling = machine.MATMUL_FLOPS / times.pop("mm") / 1e9
    row.intensity = intensity(inputs)
    row.speeds = {n: flops(inputs) / t / 1e9 for n, t in times.items()}
    return row


def bench_write(num_tokens: int, layout: str, goal: float, rounds: int) -> Row:
    """Against a memcpy of the same bytes; destinations rotate through a 256 MB pool, so that they are cold."""
    heads, head_size, block_size, num_blocks = 8, 128, 16, 4096
    row = Row("write", f"bfloat16 {num_tokens} tokens 8 heads D=128 {layout}", goal, "GB/s")
    shape = (num_blocks, block_size, heads, head_size)
    caches = [torch.zeros(shape, dtype=BF16) for _ in range(2)]
    flat = [c.view(-1) for c in caches]
    if layout == "HND":
        caches = [c.transpose(1, 2).contiguous().transpose(1, 2) for c in caches]
        flat = [c.transpose(1, 2).view(-1) for c in caches]
    key, value = (torch.randn(num_tokens, heads, head_size).to(BF16) for _ in range(2))
    order = torch.randperm(num_blocks)
    blocks = -(-num_tokens // block_size)
    starts = range(0, num_blocks - blocks, blocks)
    slots = [
        (order[s : s + blocks, None] * block_size + torch.arange(block_size)).flatten()[:num_tokens] for s in starts
    ]
    position = {"write": 0, "copy": 0}

    def turn(what: str) -> int:
        position[what] += 1
        return position[what] % len(slots)

    def write() -> None:
        torch.ops.pagedkv.write_kv.default(key, value, *caches, slots[turn("write")])

    def copy() -> None:
        start = turn("copy") * key.numel()
        start = min(start, flat[0].numel() - key.numel()) // 32 * 32
        stop = start + key.numel()
        machine.copy_two((flat[0][start:stop], flat[1][start:stop]), (key, value))

    write()
    gathered = caches[0][slots[1] // block_size, slots[1] % block_size]
    if not torch.equal(gathered, key):
        raise SystemExit(f"{row.name}: the cache does not hold what was written")
    times = interleave({"memcpy": copy, "pagedkv": write}, rounds)
    num_bytes = 2 * key.numel() * key.element_size()
    row.ceiling = num_bytes / times["memcpy"] / 1e9
    row.speeds = {"pagedkv": num_bytes / times["pagedkv"] / 1e9}
    return row


def bench_copy(num_blocks: int, layout: str, goal: float, rounds: int) -> Row:
    """copy_blocks in a cache of keys and one of values against a memcpy of the same blocks side by side."""
    shape = (2048, 16, 8, 128)
    row = Row("copy", f"bfloat16 {num_blocks} blocks of 16 tokens 8 heads D=128 {layout}", goal, "GB/s")
    flat = [torch.randn(shape).to(BF16) for _ in range(2)]
    caches = [c.transpose(1, 2).contiguous().transpose(1, 2) for c in flat] if layout == "HND" else flat
    order = torch.randperm(shape[0])
    pairs = [p.view(2, num_blocks).t().contiguous() for p in order.split(2 * num_blocks) if p.numel() == 2 * num_blocks]
    size = num_blocks * flat[0][0].numel()
    lines = [c.transpose(1, 2).reshape(-1) if layout == "HND" else c.view(-1) for c in caches]
    position = {"copy": 0, "memcpy": 0}

    def turn(what: str) -> int:
        position[what] = (position[what] + 1) % len(pairs)
        return position[what]

    def copy() -> None:
        torch.ops.pagedkv.copy_blocks.default(caches, pairs[turn("copy")])

    def memcpy() -> None:
        start = 2 * size * turn("memcpy")
        src, dst = slice(start, start + size), slice(start + size, start + 2 * size)
        machine.copy_two((lines[0][dst], lines[1][dst]), (lines[0][src], lines[1][src]))

    copy()
    src, dst = pairs[position["copy"]].unbind(1)
    if not all(torch.equal(c[dst], c[src]) for c in caches):
        raise SystemExit(f"{row.name}: the destination blocks do not equal their sources")
    times = interleave({"memcpy": memcpy, "pagedkv": copy}, rounds)
    num_bytes = 2 * size * flat[0].element_size()
    row.ceiling = num_bytes / times["memcpy"] / 1e9
    row.speeds = {"pagedkv": num_bytes / times["pagedkv"] / 1e9}
    return row


def bench_overhead(rounds: int) -> list[Row]:
    """Microseconds of a call on almost nothing."""
    inputs = make_inputs(1, 1, 16, (4, 2), 16, F32)
    key = torch.randn(1, 2, 16)
    slots = torch.tensor([3])
    caches = (inputs.key_cache.clone(), inputs.value_cache.clone())
    write_op = torch.ops.pagedkv.write_kv.default
    calls = {"attention": ours(inputs), "write": lambda: write_op(key, key, *caches, slots)}
    times = interleave(calls, max(rounds, 15))
    rows = []
    for name, goal in (("attention", 4.0), ("write", 2.5)):
        row = Row("overhead", f"{name}, one short sequence", goal, "us", goal)
        row.speeds = {"pagedkv": times[name] * 1e6}
        rows.append(row)
    return rows


def show(row: Row) -> None:
    mine = row.speeds["pagedkv"]
    if row.kind == "overhead":
        print(f"{row.kind:8} {row.name:46} {mine:6.2f} us   {row.verdict()}", flush=True)
        return
    print(
        f"{row.kind:8} {row.name:46} {mine:6.1f} {row.unit:7} {100 * mine / row.ceiling:4.0f}% of {row.ceiling:5.1f}"
        f"   {row.verdict()}",
        flush=True,
    )
    for name, speed in row.speeds.items():
        if name != "pagedkv":
            print(f"{'':12}{name:20} {speed:6.1f} {row.unit:7} pagedkv is {mine / speed:.2f}x", flush=True)
    for note in row.notes:
        print(f"{'':12}{note}", flush=True)


def run(only: set[str], short: bool, rounds: int, peers: list[str]) -> list[Row]:
    rows: list[Row] = []

    def add(*new: Row) -> None:
        rows.extend(new)
        for row in new:
            show(row)

    big = (32, 8)
    if "decode" in only:
        shapes = [(8, 4096, big, 128), (1, 16384, big, 128), (64, 1024, big, 128)]
        others = [(32, 512, (9, 3), 64), (8, 2048, (8, 8), 128)]
        for batch, seq_len, heads, head_size in shapes[:2] if short else shapes + others:
            main = heads == big
            for dtype, goal in ((BF16, 0.85), (F32, 0.9), (F16, 0.8)):
                if not short or dtype == BF16 or batch > 1:
                    goal = goal if main else 0.7
                    add(bench_decode(batch, seq_len, heads, head_size, dtype, goal, rounds, peers))
        if not short:  # the block size that FlexAttention can page
            cache = {"block_size": 128, "layout": "HND"}
            add(bench_decode(8, 4096, big, 128, BF16, 0.85, rounds, peers, **cache))
    if "prefill" in only:
        shapes = [(2048, 2048, big, 128), (256, 2048, big, 128)]
        others = [(2048, 2048, (9, 3), 64), (1024, 1024, (8, 8), 96), (1024, 1024, (8, 1), 256)]
        for query_len, seq_len, heads, head_size in shapes if short else shapes + others:
            main = heads == big
            for dtype in (BF16, F32) if short or not main else (BF16, F32, F16):
                goal = (0.85 if dtype == BF16 else 1.0) if main else 0.6
                add(bench_prefill(query_len, seq_len, heads, head_size, dtype, goal, max(3, rounds // 2), peers))
    if "sweep" in only:
        for head_size in (64, 96, 128, 256):
            for heads in ((8, 8), (9, 3), (8, 2), (8, 1)):
                for dtype in (BF16, F32):
                    add(bench_prefill(1024, 1024, heads, head_size, dtype, 0.6, max(3, rounds // 2), peers))
    sizes = [(2048, 0.9, "HND"), (2048, 0.9, "NHD"), (64, 0.65, "HND"), (64, 0.65, "NHD")]
    if "write" in only:
        add(*(bench_write(num_tokens, layout, goal, 5 * rounds) for num_tokens, goal, layout in sizes))
    if "copy" in only:
        add(*(bench_copy(num_tokens // 16, layout, goal, 5 * rounds) for num_tokens, goal, layout in sizes))
    if "overhead" in only:
        add(*bench_overhead(rounds))
    return rows


def layouts(rounds: int) -> list[Row]:
    rows = []
    for dtype in (BF16, F32):
        for block_size in (8, 16, 32, 64, 128, 256):
            for layout in ("HND", "NHD"):
                cache = {"block_size": block_size, "layout": layout}
                rows.append(bench_decode(8, 4096, (32, 8), 128, dtype, None, rounds, [], **cache))
                show(rows[-1])
                rows.append(bench_prefill(1024, 1024, (32, 8), 128, dtype, None, max(3, rounds // 2), [], **cache))
                show(rows[-1])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true")
    parser.add_argument(
        "--only", default="decode,prefill,write,copy,overhead", help="kinds, and sweep, separated by commas"
    )
    parser.add_argument("--layouts", action="store_true")
    parser.add_argument("--peers", default=",".join(PEERS), help="names, separated by commas; empty: none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    print(", ".join(f"{k} {v}" for k, v in machine.facts().items()), flush=True)
    torch.manual_seed(0)
    peers = [p for p in options.peers.split(",") if p]
    with torch.inference_mode():
        if options.layouts:
            rows = layouts(options.rounds)
        else:
            rows = run(set(options.only.split(",")), options.short, options.rounds, peers)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"machine": machine.facts(), "rows": [vars(r) for r in rows]}, file, indent=1)
    if options.plot:
        roofline.draw(rows, options.plot)


if __name__ == "__main__":
    main()
