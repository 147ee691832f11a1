"""Export a decoder with paged KV, compile it ahead of time, and run the package where the model's code is not needed.

    python examples/export_aoti.py decoder.pt2                  exports, compiles, prints the tokens of the eager model
    python examples/export_aoti.py decoder.pt2 --run            runs the package alone; examples/cpp does so in C++

With ``--caches inputs`` the caller owns the caches and passes them in every step; with ``--caches buffers`` they live
in the package. Either way the package writes them in place. C++ programs run CPU packages: the CUDA kernels are Triton
kernels, which Python launches.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import pagedkv_ops
from pagedkv import LayerSpec, PagedKVCache

VOCABULARY, NUM_LAYERS, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 256, 2, 8, 2, 32
NUM_BLOCKS, BLOCK_SIZE, BLOCKS_PER_SEQUENCE = 33, 16, 4
METADATA = {
    "num_blocks": NUM_BLOCKS,
    "num_kv_heads": NUM_KV_HEADS,
    "block_size": BLOCK_SIZE,
    "head_size": HEAD_SIZE,
    "blocks_per_sequence": BLOCKS_PER_SEQUENCE,
}


def new_caches(device: str) -> list[Tensor]:
    """[K0, V0, K1, V1], each [num_blocks, block_size, num_kv_heads, head_size]."""
    cache = PagedKVCache(NUM_BLOCKS, BLOCK_SIZE, [LayerSpec(NUM_KV_HEADS, HEAD_SIZE, device=device)] * NUM_LAYERS)
    return [t.zero_() for pair in zip(cache.key_caches, cache.value_caches, strict=True) for t in pair]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        width = NUM_HEADS * HEAD_SIZE
        self.qkv = nn.Linear(width, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self, x: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor, block_table: Tensor, seq_lens: Tensor
    ) -> Tensor:
        qkv = self.qkv(x).view(-1, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_SIZE)
        query, key, value = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], 1)
        pagedkv_ops.write_kv(key, value, key_cache, value_cache, slots)
        out = pagedkv_ops.paged_attention(query, key_cache, value_cache, block_table, seq_lens)
        return x + 8 * self.out(out.flatten(1))  # type: ignore[no-any-return]


class Decoder(nn.Module):
    """One greedy step: ``(tokens [B], positions [B], block_table [B, W], *caches) -> next tokens [B]``."""

    def __init__(self, caches: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, NUM_HEADS * HEAD_SIZE)
        self.layers = nn.ModuleList(Layer() for _ in range(NUM_LAYERS))
        self.head = nn.Linear(NUM_HEADS * HEAD_SIZE, VOCABULARY)
        self.own_caches = caches == "buffers"
        if self.own_caches:
            for i, cache in enumerate(new_caches("cpu")):
                self.register_buffer(f"cache_{i}", cache)

    def forward(self, tokens: Tensor, positions: Tensor, block_table: Tensor, *caches: Tensor) -> Tensor:
        if self.own_caches:
            caches = tuple(self.buffers())
        block = block_table.gather(1, (positions // BLOCK_SIZE).unsqueeze(1)).squeeze(1)
        slots = block * BLOCK_SIZE + positions % BLOCK_SIZE
        x = self.embedding(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, caches[2 * i], caches[2 * i + 1], slots, block_table, positions + 1)
        return self.head(x).argmax(-1)  # type: ignore[no-any-return]


def generate(step: Callable[..., Any], caches: list[Tensor], first_tokens: Tensor, steps: int) -> list[list[int]]:
    """The next tokens of every sequence, step by step; block 0 stays free, as the manager keeps it."""
    tokens, batch, generated = first_tokens, len(first_tokens), []
    block_table = torch.arange(1, 1 + batch * BLOCKS_PER_SEQUENCE, device=tokens.device).view(batch, -1)
    for position in range(steps):
        tokens = step(tokens, torch.full_like(tokens, position), block_table, *caches)
        generated.append(tokens.tolist())
    return generated


def build_package(path: str, caches: str, device: str) -> None:
    """Write the AOTInductor package of a :class:`Decoder`; its batch is dynamic, its table width fixed."""
    # two tensors: the same one given twice would be exported as one input
    tokens, positions = (torch.zeros(2, dtype=torch.int64, device=device) for _ in range(2))
    table = torch.zeros(2, BLOCKS_PER_SEQUENCE, dtype=torch.int64, device=device)
    cache_inputs = new_caches(device) if caches == "inputs" else []
    batch = torch.export.Dim("batch", min=1, max=(NUM_BLOCKS - 1) // BLOCKS_PER_SEQUENCE)
    shapes = [{0: batch}, {0: batch}, {0: batch}, *([tuple({} for _ in cache_inputs)] if cache_inputs else [])]
    model = Decoder(caches).to(device)
    program = torch.export.export(model, (tokens, positions, table, *cache_inputs), dynamic_shapes=shapes)
    metadata = {name: str(value) for name, value in METADATA.items()} | {"num_cache_inputs": str(len(cache_inputs))}
    torch._inductor.aoti_compile_and_package(
        program, package_path=path, inductor_configs={"aot_inductor.metadata": metadata}
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package")
    parser.add_argument("--run", action="store_true", help="run the package instead of building it")
    parser.add_argument("--caches", choices=["inputs", "buffers"], default="inputs")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, nargs="+", default=[3, 1, 4], help="the first token of each sequence")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    with torch.no_grad():
        if options.run:
            step = torch._inductor.aoti_load_package(options.package)
            has_inputs = step.get_metadata()["num_cache_inputs"] != "0"
        else:
            build_package(options.package, options.caches, options.device)
            step = Decoder(options.caches).to(options.device)
            has_inputs = options.caches == "inputs"
        caches = new_caches(options.device) if has_inputs else []
        first_tokens = torch.tensor(options.tokens, device=options.device)
        for tokens in generate(step, caches, first_tokens, options.steps):
            print(*tokens)


if __name__ == "__main__":
    main()
