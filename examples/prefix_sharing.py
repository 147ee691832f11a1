"""Many requests under one long system prompt, with and without prefix sharing: hit rate, memory, time, equal tokens.

    python examples/prefix_sharing.py [--model DIR] [--requests N] [--new-tokens N]

The first request fills the cache; the others start together and compute only their own question. Exits with 1 if a
token differs between the two ways.
"""

from __future__ import annotations

import argparse
import time

import torch
from _models import model_directory
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer

import pagedkv

RULE = "Rule {n}: answer in plain words, keep to what was asked, and say so when you are not sure of an answer. "
TOPICS = ["the sea", "bread", "a compiler", "the moon", "tea", "rain", "a bicycle", "glass", "salt", "sleep"]


def serve(model, prompts, block_size, new_tokens, sharing):
    """Tokens by prompt; of all requests but the first: share of the prompt hit, blocks and bytes at most, seconds."""
    num_blocks = 2 + len(prompts) * -(-(max(map(len, prompts)) + new_tokens) // block_size)
    with pagedkv.Engine(
        model,
        num_blocks=num_blocks,
        block_size=block_size,
        max_num_seqs=len(prompts),
        max_num_batched_tokens=sum(map(len, prompts)),
        prefix_caching=sharing,
    ) as engine:
        results = engine.generate(prompts[:1], max_new_tokens=new_tokens)
        start = time.perf_counter()
        for prompt in prompts[1:]:
            engine.add_request(prompt, max_new_tokens=new_tokens)
        most_blocks = 0
        while not engine.is_idle:
            results += engine.step().finished
            most_blocks = max(most_blocks, engine.stats().kv.num_used_blocks)
        seconds = time.perf_counter() - start
        tokens = {tuple(result.prompt_ids): result.token_ids for result in results}
        cached = sum(result.num_cached_tokens for result in results[1:])
        memory = most_blocks * engine.runner.pool.block_bytes
        return tokens, cached / sum(map(len, prompts[1:])), most_blocks, memory, seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory of a causal language model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--new-tokens", type=int, default=16)
    args = parser.parse_args()
    directory = args.model or model_directory("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
    system = "You are a careful assistant. " + "".join(RULE.format(n=n) for n in range(1, 25))
    prompts = [
        tokenizer.apply_chat_template(
            [
                {"role": "system", "content": system},
                {"role": "user", "content": f"({i}) In one sentence, what is {TOPICS[i % len(TOPICS)]}?"},
            ],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for i in range(args.requests)
    ]
    block_size = 16
    runs = {sharing: serve(model, prompts, block_size, args.new_tokens, sharing) for sharing in (False, True)}

    table = Table(title=f"{args.requests - 1} requests of {len(prompts[0])} tokens after a first one, float32")
    for column in ("prefix sharing", "prompt tokens from the cache", "KV memory at most", "seconds"):
        table.add_column(column, justify="right")
    for sharing, (_, hit_rate, blocks, memory, seconds) in runs.items():
        used = f"{blocks} blocks, {memory / 2**20:.0f} MiB"
        table.add_row("on" if sharing else "off", f"{hit_rate:.1%}", used, f"{seconds:.2f}")
    Console().print(table)
    equal = runs[False][0] == runs[True][0]
    print(f"tokens equal: {equal}")
    return 0 if equal else 1


if __name__ == "__main__":
    raise SystemExit(main())
