"""What quantised keys and values cost in accuracy: perplexity and equal greedy tokens, on a fixed text.

    python benchmarks/bench_kv_dtypes.py [--models smollm2 gemma3] [--tokens 8000] [--context 2000] [--chunk 100]

The text is this library's own documents. A context is computed in chunks over blocks of each type, so that most keys
are read as they were stored; the next token's loss, and whether it is the one that blocks in the model's type give,
are counted at every position. "before rotary" rounds keys where the model computes them instead, by hooks and with its
own dense attention: what a cache that stored them there would cost.
"""

from __future__ import annotations

import argparse
import math
import sys
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

import pagedkv
import pagedkv_ops
from pagedkv.hf.cache import cache_argument

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))
from _models import model_directory  # noqa: E402

DOCUMENTS = ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "csrc/README.md", "pagedkv_ops/_triton/README.md")
TYPES = {None: None, "int8": torch.int8, "fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}


def text_tokens(tokenizer, count: int) -> torch.Tensor:
    text = "\n\n".join((ROOT / name).read_text() for name in DOCUMENTS)
    ids = tokenizer(text, return_tensors="pt", add_special_tokens=False).input_ids[0]
    if len(ids) < count:
        raise SystemExit(f"the documents are {len(ids)} tokens, fewer than {count}")
    return ids[:count]


def rounded(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[tokens, heads, head_size] as they come out of a cache with a scale for each token and head."""
    cache = torch.empty(1, *rows.shape, dtype=dtype)
    scale = torch.empty(1, *rows.shape[:2])
    slots = torch.arange(len(rows))
    options = {"k_scale_cache": scale, "v_scale_cache": scale.clone()}
    pagedkv_ops.write_kv(rows, rows, cache, cache.clone(), slots, **options)
    return (cache[0].float() * scale[0, ..., None]).to(rows.dtype)


@contextmanager
def rounded_projections(model, dtype: torch.dtype):
    """Keys rounded before rotary: where their norm gives them, if there is one, else the projection; and values."""
    config = model.config.get_text_config(decoder=True)
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads

    def hook(module, args, output):
        heads = output if output.dim() == 4 else output.unflatten(-1, (-1, head_size))
        return rounded(heads.flatten(0, -3), dtype).view(output.shape)

    with ExitStack() as stack:
        for layer in model.model.layers:
            attention = layer.self_attn
            for module in (getattr(attention, "k_norm", attention.k_proj), attention.v_proj):
                stack.callback(module.register_forward_hook(hook).remove)
        yield


@torch.inference_mode()
def logits_of(model, ids: torch.Tensor, chunk: int, new_cache) -> torch.Tensor:
    """[len(ids), vocabulary] float32 of one context."""
    cache, parts = new_cache(), []
    for part in ids.split(chunk):
        options = {} if cache is None else {cache_argument(model): cache}
        parts.append(model(part[None], **options).logits[0].float())
    return torch.cat(parts)


def measure(model, contexts, chunk, new_cache, base):
    """(perplexity, share of positions whose likeliest token is that of ``base``, those tokens)."""
    losses, tokens = [], []
    for ids in tqdm(contexts, leave=False):
        logits = logits_of(model, ids, chunk, new_cache)
        losses.append(torch.nn.functional.cross_entropy(logits[:-1], ids[1:], reduction="none"))
        tokens.append(logits[:-1].argmax(-1))
    found = torch.cat(tokens)
    share = 1.0 if base is None else float((found == base).float().mean())
    return math.exp(float(torch.cat(losses).double().mean())), share, found


def report(name: str, label: str, num_bytes: int, perplexity: float, first: float, share: float) -> None:
    row = f"| {name} | {label} | {num_bytes} | {perplexity:.4f} | {perplexity / first - 1:+.3%} | {share:.2%} |"
    print(row, flush=True)


def compare(name: str, args: argparse.Namespace) -> None:
    directory = model_directory(name)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, args.dtype)).eval()
    contexts = text_tokens(tokenizer, args.tokens).split(args.context)
    base = first = None
    for kv_dtype, dtype in TYPES.items():
        pagedkv.patch(model, kv_dtype=kv_dtype, num_blocks=2 * (args.context // 16 + 2))
        pool = pagedkv.pool(model)
        new_cache = lambda: pagedkv.PagedCache(model.config, pool=pool)  # noqa: B023, E731
        perplexity, share, found = measure(model, contexts, args.chunk, new_cache, base)
        num_bytes = pool.block_bytes // pool.block_size
        pagedkv.unpatch(model)
        base, first = (found, perplexity) if base is None else (base, first)
        label = kv_dtype or args.dtype
        report(name, label, num_bytes, perplexity, first, share)
        if dtype is not None:
            with rounded_projections(model, dtype):
                perplexity, share, _ = measure(model, contexts, args.context, lambda: None, base)
            report(name, f"{label}, keys before rotary", num_bytes, perplexity, first, share)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2", "gemma3"])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float32"])
    parser.add_argument("--tokens", type=int, default=8000)
    parser.add_argument("--context", type=int, default=2000)
    parser.add_argument("--chunk", type=int, default=100, help="tokens of a forward")
    args = parser.parse_args()
    print("| model | keys and values | bytes per token | perplexity | against the first | equal greedy tokens |")
    print("|---|---|---|---|---|---|")
    for name in args.models:
        compare(name, args)


if __name__ == "__main__":
    main()
