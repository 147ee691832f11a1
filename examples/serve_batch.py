"""Serve many prompts at once on a real model, with a live table of every request.

    python examples/serve_batch.py [--model DIR] [--dtype bfloat16] [--compile] [--blocks N] [--new-tokens N] [--plain]

Requests share a system prompt, come with two priorities, and the pool is small, so that hits show, and preemption where
answers are long. The table has each request's state and the text so far; below it tokens per second, and the blocks in
use.
"""

from __future__ import annotations

import argparse
import time

import torch
from _models import model_directory
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer

import pagedkv

SYSTEM = "You are a helpful assistant. Answer in one short paragraph, in plain words, without lists or headings."
QUESTIONS = [
    "What is the capital of France?",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Name a novel by Jane Austen and say what it is about.",
    "What does a compiler do?",
    "Why do leaves turn red in autumn?",
    "Explain what a prime number is.",
    "How far away is the moon?",
    "What is the difference between a lake and a pond?",
    "Why do cats purr?",
    "What is inflation?",
    "Who painted the Mona Lisa?",
]


def render(engine, rows, start) -> Group:
    table = Table(title="pagedkv engine", expand=True)
    for name in ("request", "state", "cached", "tokens", "text"):
        table.add_column(name, no_wrap=True, overflow="ellipsis", ratio=1 if name == "text" else None)
    for number, row in rows.items():
        table.add_row(
            str(number),
            row["state"],
            str(row["cached"]),
            str(len(row["ids"])),
            Text(" ".join(row["text"].split())[-60:]),
        )
    stats = engine.stats()
    used = stats.kv.num_used_blocks
    speed = stats.num_generated_tokens / max(time.monotonic() - start, 1e-9)
    figures = (
        f"{speed:.0f} tokens/s | {stats.num_running} running, "
        f"{stats.num_waiting} waiting | blocks {used}/{stats.kv.num_blocks} | {stats.num_preemptions} preemptions | "
        f"prefix hit rate {stats.kv.hit_rate:.0%}"
    )
    return Group(table, figures)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory of a causal language model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "bfloat16"])
    parser.add_argument("--compile", action="store_true", help="compile every forward (on CPU about 100 s)")
    parser.add_argument("--blocks", type=int, default=40, help="blocks of 16 tokens in the pool")
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--plain", action="store_true", help="no live table: only the last one")
    args = parser.parse_args()
    directory = args.model or model_directory("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, args.dtype)).eval()
    console = Console()
    with pagedkv.Engine(
        model, tokenizer, num_blocks=args.blocks, max_num_seqs=8, compile=args.compile, progress=True
    ) as engine:
        rows = {}
        for index, question in enumerate(QUESTIONS):
            chat = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            number = engine.add_request(ids, max_new_tokens=args.new_tokens, do_sample=False, priority=index % 3 == 2)
            rows[number] = {"state": "waiting", "cached": "", "ids": [], "text": ""}
        start = time.monotonic()
        with Live(console=console, refresh_per_second=8, transient=args.plain) as live:
            while not engine.is_idle:
                output = engine.step()
                for token in output.tokens:
                    row = rows[token.request_id]
                    row["ids"].append(token.token_id)
                    row["state"], row["text"] = "running", tokenizer.decode(row["ids"], skip_special_tokens=True)
                for result in output.finished:
                    state = f"{result.finish_reason}, {result.seconds:.1f} s"
                    rows[result.request_id] |= {"state": state, "cached": result.num_cached_tokens, "text": result.text}
                if not args.plain:
                    live.update(render(engine, rows, start))
        if args.plain:
            console.print(render(engine, rows, start))
        engine.check_integrity()
        done = all(len(row["ids"]) > 0 and "error" not in row["state"] for row in rows.values())
    return 0 if done else 1


if __name__ == "__main__":
    raise SystemExit(main())
