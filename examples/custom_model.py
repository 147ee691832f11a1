"""A decoder written by hand whose attention is two ops on a paged cache, compiled with ``fullgraph=True``.

Prefills a ragged batch of packed prompts (no padding), decodes greedily, and checks every token against the same model
with dense attention over whole sequences. Run: ``python examples/custom_model.py``.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pagedkv_ops  # registers torch.ops.pagedkv.*
from pagedkv import KVCacheManager, LayerSpec, PagedKVCache


@dataclass
class PagedBatch:
    """What attention needs to know of a step; T packed query tokens of B sequences."""

    positions: Tensor  # [T]
    slot_mapping: Tensor  # [T]
    block_table: Tensor  # [B, W]
    seq_lens: Tensor  # [B], the new tokens included
    cu_seqlens_q: Tensor | None  # [B+1]; None in decode steps, where each sequence has one token


def rotate(x: Tensor, positions: Tensor) -> Tensor:  # [T, H, D]
    half = x.size(-1) // 2
    frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float32) / half)
    angles = positions[:, None, None] * frequencies  # [T, 1, D/2]
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    def __init__(self, hidden: int, num_heads: int, num_kv_heads: int, cache: PagedKVCache, layer: int) -> None:
        super().__init__()
        self.head_size = hidden // num_heads
        self.sizes = [num_heads * self.head_size, num_kv_heads * self.head_size, num_kv_heads * self.head_size]
        self.qkv = nn.Linear(hidden, sum(self.sizes), bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.register_buffer("key_cache", cache.key_caches[layer], persistent=False)
        self.register_buffer("value_cache", cache.value_caches[layer], persistent=False)

    def project(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = (part.unflatten(-1, (-1, self.head_size)) for part in self.qkv(x).split(self.sizes, dim=-1))
        return rotate(query, positions), rotate(key, positions), value

    def forward(self, x: Tensor, batch: PagedBatch) -> Tensor:  # [T, hidden]
        query, key, value = self.project(x, batch.positions)
        torch.ops.pagedkv.write_kv(key, value, self.key_cache, self.value_cache, batch.slot_mapping)
        attended = torch.ops.pagedkv.paged_attention(
            query, self.key_cache, self.value_cache, batch.block_table, batch.seq_lens, batch.cu_seqlens_q
        )
        return self.out(attended.flatten(1))

    def dense(self, x: Tensor) -> Tensor:
        query, key, value = (t.transpose(0, 1) for t in self.project(x, torch.arange(len(x))))
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return self.out(attended.transpose(0, 1).flatten(1))


class Layer(nn.Module):
    def __init__(self, hidden: int, attention: Attention) -> None:
        super().__init__()
        self.attention = attention
        self.norms = nn.ModuleList([nn.RMSNorm(hidden), nn.RMSNorm(hidden)])
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.SiLU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor, batch: PagedBatch | None) -> Tensor:
        normed = self.norms[0](x)
        x = x + (self.attention.dense(normed) if batch is None else self.attention(normed, batch))
        return x + self.mlp(self.norms[1](x))


class Decoder(nn.Module):
    """``batch=None`` runs one whole sequence with dense attention: the oracle of this example."""

    def __init__(self, cache: PagedKVCache, vocabulary: int, hidden: int, num_heads: int, num_kv_heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(
            Layer(hidden, Attention(hidden, num_heads, num_kv_heads, cache, i)) for i in range(len(cache.layers))
        )
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, ids: Tensor, batch: PagedBatch | None) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x, batch)
        return self.head(self.norm(x))


def plan(manager: KVCacheManager, num_new: list[int], width: int) -> PagedBatch:
    """Blocks and slots for the next ``num_new`` tokens of every sequence."""
    table = torch.zeros(len(num_new), width, dtype=torch.int32)
    slots, positions, lengths = [], [], []
    for seq_id, count in enumerate(num_new):
        allocation = manager.allocate_slots(seq_id, count)
        if allocation is None:
            raise MemoryError(f"no block left for sequence {seq_id}")
        start = manager.num_computed_tokens(seq_id)
        slots += allocation.slots
        positions += range(start, start + count)
        lengths.append(start + count)
        blocks = manager.block_ids(seq_id)
        table[seq_id, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
    decode = all(count == 1 for count in num_new)
    bounds = torch.tensor([0, *num_new], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return PagedBatch(
        torch.tensor(positions),
        torch.tensor(slots),
        table,
        torch.tensor(lengths, dtype=torch.int32),
        None if decode else bounds,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=24, help="new tokens per prompt")
    parser.add_argument("--no-compile", action="store_true")
    num_new_tokens, compiled = (args := parser.parse_args()).tokens, not args.no_compile
    torch.manual_seed(0)
    lengths, num_heads, num_kv_heads, hidden, vocabulary, block_size = [37, 5, 120, 64], 8, 2, 256, 512, 16
    cache = PagedKVCache(64, block_size, [LayerSpec(num_kv_heads, hidden // num_heads)] * 3)
    model = Decoder(cache, vocabulary, hidden, num_heads, num_kv_heads).eval()
    step = torch.compile(model, fullgraph=True, dynamic=True) if compiled else model
    prompts = [torch.randint(vocabulary, (length,)) for length in lengths]
    width = -(-(max(lengths) + num_new_tokens) // block_size)

    manager = KVCacheManager(num_blocks=64, block_size=block_size)
    for seq_id, prompt in enumerate(prompts):
        manager.add(seq_id, prompt.tolist())
    generated: list[Tensor] = []
    seconds = []
    with torch.no_grad():
        ids, num_new = torch.cat(prompts), lengths
        for _ in range(num_new_tokens):
            start = time.perf_counter()
            batch = plan(manager, num_new, width)
            logits = step(ids, batch)
            last = torch.tensor(num_new).cumsum(0) - 1  # the last query token of each sequence
            ids = logits[last].argmax(-1)
            for seq_id, count in enumerate(num_new):
                manager.commit(seq_id, count)
                manager.append(seq_id, [int(ids[seq_id])])
            generated.append(ids)
            num_new = [1] * len(prompts)
            seconds.append(time.perf_counter() - start)
        tokens = torch.stack(generated, dim=1)  # [B, num_new_tokens]
        for prompt, row in zip(prompts, tokens, strict=True):
            dense_logits = model(torch.cat([prompt, row[:-1]]), None)[len(prompt) - 1 :]
            torch.testing.assert_close(dense_logits.argmax(-1), row, msg="paged and dense tokens differ")

    print(f"ops: {pagedkv_ops.backends()['cpu']}, {'compiled fullgraph' if compiled else 'eager'}")
    print(f"{len(prompts)} prompts of {lengths} tokens, {num_new_tokens} new each: equal to dense attention")
    stats = manager.stats()
    print(f"{stats.num_used_blocks} blocks in use, {stats.wasted_percent:.1f}% of their slots unused")
    print(f"decode step {sorted(seconds)[len(seconds) // 2] * 1e3:.2f} ms (median)")


if __name__ == "__main__":
    main()
