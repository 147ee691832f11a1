"""A contender of bench_engine.py in a process of its own: JSON lines on stdin, answers on stdout, as vllm_engine.py.

    python benchmarks/peers/generators.py MODEL --dtype bfloat16 --contender compiled|eager|padded|generate_batch

Answers {"ready": version of torch} once it is loaded, then per line {"prompts": [[ids]], "new_tokens": n} answers
{"seconds": s, "token_ids": [[ids]]}, and the engines {"forward_seconds": s, "steps": n} with it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

import pagedkv

Run = Callable[[list[list[int]], int], dict]


def engine(model, max_num_seqs: int, buckets: list[int], compile: bool) -> Run:
    engine = pagedkv.Engine(
        model,
        num_blocks=2048,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=4096,
        prefix_caching=False,
        compile=compile,
        buckets=buckets,
    )

    def run(prompts: list[list[int]], new_tokens: int) -> dict:
        before = engine.stats()
        results = engine.generate(prompts, max_new_tokens=new_tokens, eos_token_id=None, do_sample=False)
        after = engine.stats()
        return {
            "token_ids": [result.token_ids for result in results],
            "forward_seconds": after.forward_seconds - before.forward_seconds,
            "steps": after.num_steps - before.num_steps,
        }

    return run


def padded(model) -> Run:
    def run(prompts: list[list[int]], new_tokens: int) -> dict:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "pad_token_id": 0, "do_sample": False}
        with torch.inference_mode():
            return {"token_ids": model.generate(ids, attention_mask=mask, **options)[:, width:].tolist()}

    return run


def generate_batch(model) -> Run:
    def run(prompts: list[list[int]], new_tokens: int) -> dict:
        config = GenerationConfig(max_new_tokens=new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
        outputs = model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        ordered = sorted(outputs.values(), key=lambda output: int(output.request_id.split("_")[-1]))
        return {"token_ids": [output.generated_tokens for output in ordered]}

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contender", choices=["compiled", "eager", "padded", "generate_batch"], required=True)
    parser.add_argument("--batches", type=int, nargs="+", default=[64])
    args = parser.parse_args()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever is printed goes to stderr
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)).eval()
    model.generation_config.eos_token_id = None
    if args.contender in ("compiled", "eager"):
        run = engine(model, max(args.batches), sorted(args.batches), args.contender == "compiled")
    else:
        run = {"padded": padded, "generate_batch": generate_batch}[args.contender](model)
    print(json.dumps({"ready": torch.__version__}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        start = time.perf_counter()
        answer = run(command["prompts"], command["new_tokens"])
        print(json.dumps({"seconds": time.perf_counter() - start, **answer}), file=answers)


if __name__ == "__main__":
    main()
