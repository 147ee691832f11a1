"""Chat with a small real model twice: with its own KV cache, and after ``pagedkv.patch(model)``. The tokens are equal.

    python examples/generate.py [--model DIR] [--dtype float32|bfloat16] [--new-tokens N] [--compile]
                                [--kv-dtype int8|fp8_e4m3|fp8_e5m2]

Prints both texts, the KV memory each way holds, blocks used and tokens per second; exits with 1 if the tokens differ,
unless the keys and values are quantised: then it prints how many are equal.
"""

from __future__ import annotations

import argparse
import time

import torch
from _models import model_directory
from transformers import AutoModelForCausalLM, AutoTokenizer

import pagedkv
import pagedkv_ops

PROMPTS = [
    "What is the capital of France?",
    "Write a haiku about the sea.",
    "Explain in two sentences why the sky is blue, for a child who has just learned what light is.",
    "Give me three tips for learning to play the guitar when you only have fifteen minutes a day, a cheap instrument, "
    "no teacher, and neighbours who go to bed early. Keep each tip to one sentence.",
]


def timed_generate(model, inputs, new_tokens):
    model.generate(**inputs, max_new_tokens=2, do_sample=False)  # warm-up, compilation included
    start = time.perf_counter()
    out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True)
    return out, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="directory of a causal language model (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--new-tokens", type=int, default=48)
    parser.add_argument("--compile", action="store_true", help="compile the decode steps of the patched model")
    parser.add_argument("--kv-dtype", choices=["int8", "fp8_e4m3", "fp8_e5m2"], help="quantise keys and values")
    args = parser.parse_args()
    directory = args.model or model_directory("smollm2")
    tokenizer = AutoTokenizer.from_pretrained(directory, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, args.dtype)).eval()
    chats = [[{"role": "user", "content": prompt}] for prompt in PROMPTS]
    inputs = tokenizer.apply_chat_template(
        chats, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    lengths = inputs["attention_mask"].sum(1).tolist()
    print(f"{len(PROMPTS)} chats of {lengths} tokens, padded on the left; {args.dtype}")
    print(f"ops: {pagedkv_ops.backends()['cpu']}")

    native, native_seconds = timed_generate(model, inputs, args.new_tokens)
    cache = native.get("cache") or native.past_key_values
    native_bytes = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)

    pagedkv.patch(model, compile=args.compile, kv_dtype=args.kv_dtype)
    paged, paged_seconds = timed_generate(model, inputs, args.new_tokens)
    pool = pagedkv.pool(model)
    paged_blocks, paged_bytes = pool.used_blocks, pool.used_bytes  # held until the returned cache goes

    start = inputs["input_ids"].shape[1]
    for row, prompt in enumerate(PROMPTS):
        print(f"\n> {prompt}")
        for name, out in (("native", native), ("paged ", paged)):
            text = tokenizer.decode(out.sequences[row, start:], skip_special_tokens=True)
            print(f"  {name} {text!r}")
    equal = torch.equal(native.sequences, paged.sequences)
    num_tokens = len(PROMPTS) * (native.sequences.shape[1] - start)
    print(f"\ntoken ids equal: {equal}")
    if args.kv_dtype:
        same = (native.sequences == paged.sequences)[:, start:].float().mean()
        print(f"of the new ones: {same:.1%} at {args.kv_dtype}")
    print(f"KV memory held:  native {native_bytes / 2**20:.1f} MiB, paged {paged_bytes / 2**20:.1f} MiB")
    print(f"blocks used:     {paged_blocks} of {pool.num_blocks - 1}, {pool.block_size} tokens each")
    print(f"tokens/s:        native {num_tokens / native_seconds:.1f}, paged {num_tokens / paged_seconds:.1f}")
    del paged, out  # with them goes the cache that generate returned
    print(f"after the returned cache is gone: {pool.used_blocks} blocks used")
    return 0 if equal or args.kv_dtype else 1


if __name__ == "__main__":
    raise SystemExit(main())
