"""A decoder whose heads are divided among ranks by hand, without DTensors, over paged ops on each rank's own heads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

import pagedkv_ops  # noqa: F401  registers torch.ops.pagedkv.*
from pagedkv import KVCacheManager, LayerSpec, PagedKVCache
from pagedkv.tensor_parallel import kv_heads_of_ranks

HEAD_SIZE, HIDDEN, LAYERS, VOCABULARY, BLOCK_SIZE = 8, 32, 2, 64, 4


class Weights:
    """Whole projections, the same on every rank. q [Hq, D, hidden], k and v [Hkv, D, hidden], out [hidden, Hq, D]."""

    def __init__(self, num_heads: int, num_kv_heads: int) -> None:
        generator = torch.Generator().manual_seed(num_heads * 10 + num_kv_heads)

        def normal(*shape):
            return torch.randn(*shape, generator=generator) * 0.4

        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.embedding, self.head = normal(VOCABULARY, HIDDEN) * 3, normal(VOCABULARY, HIDDEN)
        self.layers = [
            (*(normal(heads, HEAD_SIZE, HIDDEN) for heads in (num_heads, num_kv_heads, num_kv_heads)),
             normal(HIDDEN, num_heads, HEAD_SIZE))
            for _ in range(LAYERS)
        ]  # fmt: skip

    def dense(self, ids):
        """Logits [L, vocabulary] of one whole sequence."""
        x = self.embedding[ids]
        for q, k, v, out in self.layers:
            heads = [torch.einsum("lc,hdc->hld", x, weight)[None] for weight in (q, k, v)]
            attended = F.scaled_dot_product_attention(*heads, is_causal=True, enable_gqa=True)[0]
            x = x + torch.einsum("hld,chd->lc", attended, out)
        return x @ self.head.T


class Rank(nn.Module):
    """A rank's heads; ``reduce`` sums its part of the attention's output with those of the other ranks."""

    def __init__(self, weights: Weights, rank: int, num_ranks: int, num_blocks: int, reduce) -> None:
        super().__init__()
        kv = kv_heads_of_ranks(weights.num_heads, weights.num_kv_heads, num_ranks)[rank]
        count = weights.num_heads // num_ranks
        heads, kv_heads = slice(rank * count, (rank + 1) * count), slice(kv.start, kv.stop)
        self.weights, self.reduce = weights, reduce
        self.layers = [(q[heads], k[kv_heads], v[kv_heads], out[:, heads]) for q, k, v, out in weights.layers]
        self.cache = PagedKVCache(num_blocks, BLOCK_SIZE, [LayerSpec(len(kv), HEAD_SIZE)] * LAYERS)
        self.manager = KVCacheManager(num_blocks, BLOCK_SIZE)

    def step(self, x, layer, slots, table, lengths, offsets):
        """The rank's part of a layer's output [T, hidden]."""
        q, k, v, out = self.layers[layer]
        query, key, value = (torch.einsum("tc,hdc->thd", x, weight) for weight in (q, k, v))
        caches = self.cache.key_caches[layer], self.cache.value_caches[layer]
        torch.ops.pagedkv.write_kv(key, value, *caches, slots)
        attended = torch.ops.pagedkv.paged_attention(query, *caches, table, lengths, offsets)
        return torch.einsum("thd,chd->tc", attended, out)

    @torch.no_grad()
    def forward(self, seq_id: str, ids):
        """Logits [vocabulary] after the sequence's next tokens."""
        index = self.inputs(seq_id, len(ids))
        x = self.weights.embedding[ids]
        for layer in range(LAYERS):
            x = x + self.reduce(self.step(x, layer, *index))
        self.manager.commit(seq_id, len(ids))
        return x[-1] @ self.weights.head.T

    def inputs(self, seq_id, count):
        allocation = self.manager.allocate_slots(seq_id, count)
        assert allocation is not None
        table = torch.tensor([self.manager.block_ids(seq_id)], dtype=torch.int32)
        length = self.manager.num_computed_tokens(seq_id) + count
        offsets = torch.tensor([0, count], dtype=torch.int32)
        return torch.tensor(allocation.slots), table, torch.tensor([length], dtype=torch.int32), offsets


def generate(rank: Rank, prompt: list[int], num_new: int) -> list[int]:
    """Greedy tokens of one prompt."""
    rank.manager.add("sequence", prompt)
    tokens, ids = [], torch.tensor(prompt)
    for _ in range(num_new):
        tokens.append(int(rank("sequence", ids).argmax()))
        rank.manager.append("sequence", tokens[-1:])
        ids = torch.tensor(tokens[-1:])
    return tokens


def generate_dense(weights: Weights, prompt: list[int], num_new: int) -> list[int]:
    """The same without blocks and ranks."""
    ids = list(prompt)
    for _ in range(num_new):
        ids.append(int(weights.dense(torch.tensor(ids))[-1].argmax()))
    return ids[len(prompt) :]
