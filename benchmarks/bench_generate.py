"""``generate`` on a real model, with its own cache, patched, and patched and compiled: tokens first, then speed.

    python benchmarks/bench_generate.py [--dtype float32|bfloat16] [--case batch|long] [--rounds N] [--ways ...]

batch: 16 ragged, left-padded prompts of 8 to 128 tokens, 64 new tokens each. long: one prompt of 4,096 tokens, 64 new
tokens, with the peak memory of each way. The ways take turns in one process; medians are reported, as ratios to native.
Nothing is reported where tokens differ (float32), or differ by more than a near-tie (bfloat16).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import threading
import time
from pathlib import Path

import psutil
import torch
from transformers import AutoModelForCausalLM

import pagedkv

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from _models import model_directory

NEW_TOKENS = 64


def prompts(case: str, vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = [4096] if case == "long" else [8 + 8 * i for i in range(16)]
    width = max(lengths)
    ids = torch.randint(5, vocabulary, (len(lengths), width), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


class PeakMemory:
    """The most resident memory of this process while it runs, above what it had at the start, in MiB."""

    def __enter__(self) -> PeakMemory:
        self._process, self._done = psutil.Process(), threading.Event()
        self._start = self._peak = self._process.memory_info().rss
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self._peak = max(self._peak, self._process.memory_info().rss)

    def __exit__(self, *exc: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def mib(self) -> float:
        return (self._peak - self._start) / 2**20


def check(native, inputs, expected, got) -> None:
    """Equal tokens; in bfloat16 a row may part from native where its two best logits were a near-tie."""
    start = inputs["input_ids"].shape[1]
    for row in range(len(expected)):
        differs = expected[row, start:] != got[row, start:]
        if not differs.any():
            continue
        step = int(differs.int().argmax())
        real = expected[row, int((inputs["attention_mask"][row] == 0).sum()) : start + step]
        with torch.no_grad():
            top = native(real[None]).logits[0, -1].float().topk(2).values
        if native.dtype == torch.float32 or float(top[0] - top[1]) > 0.25:
            raise SystemExit(f"row {row} differs at step {step}, best logits {top.tolist()}: nothing is reported")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--case", default="batch", choices=["batch", "long"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", nargs="+", default=["patched", "compiled"], choices=["patched", "compiled"])
    args = parser.parse_args()
    directory = model_directory("smollm2")

    def load():
        return AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, args.dtype)).eval()

    ways = {"native": load()}
    for name in args.ways:
        ways[name] = pagedkv.patch(load(), memory=2**31, compile=name == "compiled")
    inputs = prompts(args.case, ways["native"].config.vocab_size)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    seconds = {name: [] for name in ways}
    peaks, expected = {}, None
    for model in ways.values():  # warm up, compile
        model.generate(**inputs, **{**options, "max_new_tokens": 2, "min_new_tokens": 2})
    for _ in range(args.rounds):
        for name, model in ways.items():
            with PeakMemory() as memory:
                start = time.perf_counter()
                out = model.generate(**inputs, **options)
                seconds[name].append(time.perf_counter() - start)
            peaks[name] = max(memory.mib, peaks.get(name, 0))
            expected = out if expected is None else expected
            check(ways["native"], inputs, expected, out)
    for name, model in ways.items():
        if name != "native":  # its blocks were touched by the warm-up, so that the process grew before
            peaks[name] += pagedkv.pool(model).peak_used_blocks * pagedkv.pool(model).block_bytes / 2**20
    num_tokens = len(inputs["input_ids"]) * NEW_TOKENS
    native = statistics.median(seconds["native"])
    print(f"{args.case}, {args.dtype}, {torch.get_num_threads()} threads, median of {args.rounds}")
    for name, times in seconds.items():
        median = statistics.median(times)
        print(
            f"{name:9} {num_tokens / median:7.1f} tokens/s  {native / median:5.2f}x native  peak {peaks[name]:6.0f} MiB"
        )


if __name__ == "__main__":
    main()
