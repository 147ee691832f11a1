"""A tiny greedy decoder over paged caches, for exported and compiled programs: a lost write changes its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import pagedkv_ops
from pagedkv import LayerSpec, PagedKVCache

VOCABULARY, NUM_HEADS, NUM_KV_HEADS, HEAD_SIZE = 97, 4, 2, 16
BLOCK_SIZE, NUM_BLOCKS, BLOCKS_PER_SEQUENCE = 4, 17, 4


def new_caches(num_layers: int, layout: str = "NHD", dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """[K0, V0, K1, V1, ...], zeros; ``layout="HND"`` gives transposed views, as on a CPU they would be.

    Quantised layers have four tensors each: [K0, V0, scales of K0, scales of V0, K1, ...].
    """
    specs = [LayerSpec(NUM_KV_HEADS, HEAD_SIZE, dtype=dtype)] * num_layers
    cache = PagedKVCache(NUM_BLOCKS, BLOCK_SIZE, specs, layout=layout)
    layers = zip(cache.key_caches, cache.value_caches, cache.read_scales, strict=True)
    return [tensor.zero_() for *pair, scales in layers for tensor in (*pair, *scales.values())]


class Attention(nn.Module):
    """Writes the new tokens, then attends; ``append`` does both in one op."""

    def __init__(self, append: bool) -> None:
        super().__init__()
        width = NUM_HEADS * HEAD_SIZE
        self.qkv = nn.Linear(width, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_SIZE, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.append = append

    def forward(self, x: Tensor, caches: Sequence[Tensor], slots: Tensor, table: Tensor, seq_lens: Tensor) -> Tensor:
        qkv = self.qkv(x).view(-1, NUM_HEADS + 2 * NUM_KV_HEADS, HEAD_SIZE)
        query, key, value = qkv.split([NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS], 1)
        key_cache, value_cache, *scales = caches
        written = dict(zip(("k_scale_cache", "v_scale_cache"), scales, strict=False))
        if self.append:
            out = pagedkv_ops.paged_attention_append(
                query, key, value, key_cache, value_cache, slots, table, seq_lens, num_splits=1, **written
            )
        else:
            pagedkv_ops.write_kv(key, value, key_cache, value_cache, slots, **written)
            read = dict(zip(("k_scale", "v_scale"), scales, strict=False))
            out = pagedkv_ops.paged_attention(query, key_cache, value_cache, table, seq_lens, num_splits=1, **read)
        return x + 6 * self.out(out.flatten(1))


class Decoder(nn.Module):
    """``forward(tokens [B], positions [B], block_table [B, W], caches=None) -> next tokens [B]``."""

    def __init__(self, num_layers: int = 2, *, buffers: bool = False, append: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, NUM_HEADS * HEAD_SIZE)
        self.layers = nn.ModuleList(Attention(append) for _ in range(num_layers))
        self.head = nn.Linear(NUM_HEADS * HEAD_SIZE, VOCABULARY)
        caches = new_caches(num_layers) if buffers else []
        self.names = [f"cache_{i}" for i in range(len(caches))]
        for name, cache in zip(self.names, caches, strict=True):
            self.register_buffer(name, cache)
        self.requires_grad_(False)

    def forward(
        self, tokens: Tensor, positions: Tensor, block_table: Tensor, caches: list[Tensor] | None = None
    ) -> Tensor:
        if caches is None:
            caches = [getattr(self, name) for name in self.names]
        blocks = block_table.gather(1, (positions // BLOCK_SIZE).unsqueeze(1)).squeeze(1)
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
        x = self.embedding(tokens)
        size = len(caches) // len(self.layers)
        for i, layer in enumerate(self.layers):
            x = layer(x, caches[size * i : size * (i + 1)], slots, block_table, positions + 1)
        return self.head(x).argmax(-1)


def step_inputs(batch: int, position: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    table = torch.arange(1, 1 + batch * BLOCKS_PER_SEQUENCE).view(batch, BLOCKS_PER_SEQUENCE)
    return torch.arange(5, 5 + batch), torch.full((batch,), position), table


def decode(step: Callable[..., Any], steps: int = 6, batch: int = 2, caches: list[Tensor] | None = None) -> list[Any]:
    """The tokens of ``steps`` greedy steps; ``steps`` > BLOCK_SIZE crosses into a second block."""
    tokens, _, table = step_inputs(batch)
    generated = []
    for position in range(steps):
        inputs = (tokens, torch.full((batch,), position), table)
        tokens = step(*inputs) if caches is None else step(*inputs, caches)
        if isinstance(tokens, tuple):
            (tokens,) = tokens
        generated.append(tokens.tolist())
    return generated


def expected(
    num_layers: int = 2,
    *,
    append: bool = False,
    steps: int = 6,
    batch: int = 2,
    dtype: torch.dtype = torch.float32,
) -> tuple[Any, list[Tensor]]:
    """Tokens and caches of the eager model; the tokens differ from those of a model that forgets."""
    caches = new_caches(num_layers, dtype=dtype)
    return decode(Decoder(num_layers, append=append), steps, batch, caches), caches


def assert_caches_equal(actual: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    assert len(actual) == len(wanted)
    for i, (a, b) in enumerate(zip(actual, wanted, strict=True)):
        bits = torch.int8 if a.dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else a.dtype
        torch.testing.assert_close(a.view(bits), b.view(bits), msg=lambda text, i=i: f"cache {i}: {text}")
