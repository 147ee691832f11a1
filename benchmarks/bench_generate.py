"""``generate`` on a real model, with its own cache, patched, and patched and compiled: tokens first, then speed.

    python benchmarks/bench_generate.py [--cases batch long] [--dtypes bfloat16 float32] [--ways patched compiled]
                                        [--rounds N]

batch: 16 ragged, left-padded prompts of 8 to 128 tokens, 64 new tokens each. long: one prompt of 4,096 tokens, 64 new
tokens, patched only. By default all six rows.

Every way runs in a fresh process of its own; the processes take turns, one call each per round, and medians are
reported. The peak is that of resident memory over all calls, the first and the compilation included, above what the
process held with the model loaded: blocks count as they are touched. Nothing is reported where tokens differ (float32),
or differ by more than a near-tie (bfloat16).
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import sys
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from _models import model_directory

NEW_TOKENS = 64
GOALS = {("batch", "patched"): 1.5, ("batch", "compiled"): 2.0, ("long", "patched"): 1.3}
NEAR_TIE = 0.25  # between the two best logits, in bfloat16


def prompts(case: str, vocabulary: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = [4096] if case == "long" else [8 + 8 * i for i in range(16)]
    width = max(lengths)
    ids = torch.randint(5, vocabulary, (len(lengths), width), generator=generator)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        mask[row, width - length :] = 1
    return {"input_ids": ids * mask, "attention_mask": mask}


def resident(name: str = "VmRSS") -> int:
    """MiB of this process: resident now, or the most (VmHWM) since :func:`reset_peak`."""
    status = Path("/proc/self/status").read_text()
    return int(status.split(name + ":")[1].split()[0]) // 1024


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def serve(connection, way: str, dtype: str, case: str) -> None:
    """A process with one model: answers "run" with (seconds, tokens), "peak" with MiB, and ids with their logits."""
    from transformers import AutoModelForCausalLM

    import pagedkv

    model = AutoModelForCausalLM.from_pretrained(model_directory("smollm2"), dtype=getattr(torch, dtype)).eval()
    inputs = prompts(case, model.config.vocab_size)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # read from the file, which is mapped, before the memory is noted
    model.generation_config.eos_token_id = None  # every row gets all its tokens
    options = {"do_sample": False, "pad_token_id": 0}
    loaded = resident()
    reset_peak()
    if way != "native":
        pagedkv.patch(model, memory=2**31, compile=way == "compiled")
    model.generate(**inputs, **options, max_new_tokens=2)  # warm up, compile
    connection.send("ready")
    while (request := connection.recv()) is not None:
        if isinstance(request, torch.Tensor):
            with torch.no_grad():
                connection.send(model(request[None]).logits[0, -1].float())
        elif request == "peak":
            connection.send(resident("VmHWM") - loaded)
        else:
            start = time.perf_counter()
            out = model.generate(**inputs, **options, max_new_tokens=NEW_TOKENS)
            connection.send((time.perf_counter() - start, out))


@contextmanager
def contender(way: str, dtype: str, case: str):
    """A connection to a process that runs one way."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there, way, dtype, case), daemon=True)
    process.start()
    there.close()
    try:
        assert here.recv() == "ready"
        yield here
    finally:
        with suppress(BrokenPipeError):  # it died: its own traceback says why
            here.send(None)
        process.join()


def ask(connection, request):
    connection.send(request)
    return connection.recv()


def check(native, inputs, dtype: str, expected, got) -> None:
    """Equal tokens; in bfloat16 a row may part from native where its two best logits were a near-tie."""
    start = inputs["input_ids"].shape[1]
    for row in range(len(expected)):
        differs = expected[row, start:] != got[row, start:]
        if not differs.any():
            continue
        step = int(differs.int().argmax())
        top = ask(native, expected[row, int((inputs["attention_mask"][row] == 0).sum()) : start + step]).topk(2).values
        if dtype == "float32" or float(top[0] - top[1]) > NEAR_TIE:
            raise SystemExit(f"row {row} differs at step {step}, best logits {top.tolist()}: nothing is reported")


def measure(case: str, dtype: str, ways: list[str], rounds: int) -> None:
    """One line per way, against native."""
    inputs = prompts(case, 1000)
    seconds: dict[str, list[float]] = {way: [] for way in ("native", *ways)}
    expected = None
    with ExitStack() as stack:
        contenders = {way: stack.enter_context(contender(way, dtype, case)) for way in seconds}
        for number in range(rounds):
            for way in sorted(seconds, reverse=number % 2 == 1):
                duration, out = ask(contenders[way], "run")
                seconds[way].append(duration)
                expected = out if expected is None else expected
                check(contenders["native"], inputs, dtype, expected, out)
        peaks = {way: ask(connection, "peak") for way, connection in contenders.items()}
    speed = {way: len(inputs["input_ids"]) * NEW_TOKENS / statistics.median(times) for way, times in seconds.items()}
    for way in ways:
        work = "16 prompts of 8..128" if case == "batch" else "1 prompt of 4,096"
        print(
            f"{work:21} {dtype:9} {way:9} {speed['native']:7.1f} {speed[way]:8.1f} {speed[way] / speed['native']:6.2f}x"
            f" {GOALS.get((case, way), 1.0):5.1f}x {peaks['native']:9} {peaks[way]:9}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=["batch", "long"], choices=["batch", "long"])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    parser.add_argument("--ways", nargs="+", default=["patched", "compiled"], choices=["patched", "compiled"])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    print(f"SmolLM2-135M, {NEW_TOKENS} new tokens, {torch.get_num_threads()} threads, median of {args.rounds} rounds")
    print(f"{'':41} {'tokens/s':>16} {'':7} {'':6} {'peak MiB over model':>19}")
    print(
        f"{'work':21} {'type':9} {'way':9} {'native':>7} {'way':>8} {'ratio':>7} {'goal':>6} {'native':>9} {'way':>9}"
    )
    for case in args.cases:
        ways = [way for way in args.ways if (case, way) in GOALS]
        for dtype in args.dtypes if ways else ():
            measure(case, dtype, ways, args.rounds)


if __name__ == "__main__":
    main()
