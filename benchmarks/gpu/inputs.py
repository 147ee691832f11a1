"""Batches to measure: what they must compute and move at least, their tensors, and their right results."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .device import DEVICE, DTYPE, REHEARSAL

ITEMSIZE = 2


@dataclass(frozen=True)
class Shape:
    """A batch; of each sequence the attention of its last query_len positions, causal."""

    name: str
    lens: tuple[tuple[int, int], ...]  # (query_len, seq_len)
    layout: str = "NHD"  # or "HND": whole heads of a block lie together
    num_heads: int = 32
    num_kv_heads: int = 8
    head_size: int = 128
    block_size: int = 16

    @property
    def num_tokens(self) -> int:
        return sum(query_len for query_len, _ in self.lens)

    @property
    def is_decode(self) -> bool:
        return all(query_len == 1 for query_len, _ in self.lens)

    def operations(self) -> int:
        """4 * head_size per visible (query, key, head)."""
        pairs = sum(q * n - q * (q - 1) // 2 for q, n in self.lens)
        return 4 * self.head_size * self.num_heads * pairs

    def bytes(self) -> int:
        """Keys and values read once, queries read, results written."""
        cache = 2 * sum(n for _, n in self.lens) * self.num_kv_heads * self.head_size
        return ITEMSIZE * (cache + 2 * self.num_tokens * self.num_heads * self.head_size)

    def small(self) -> Shape:
        """The same kind of batch for a rehearsal on an interpreter."""
        lens = tuple((min(q, 5), 13 + n % 97) for q, n in self.lens[:2])
        return replace(self, lens=lens, num_heads=4, num_kv_heads=2, head_size=16)


def batch(name: str, count: int, query_len: int, seq_len: int, **options: Any) -> Shape:
    return Shape(name, ((query_len, seq_len),) * count, **options)


def _shapes() -> tuple[Shape, ...]:
    decodes = [("B=64 L=8192", 64, 8192), ("B=1 L=16384", 1, 16384), ("B=256 L=1024", 256, 1024)]
    layouts = ("NHD", "HND")
    return (
        *(batch(f"decode {name} {x}", b, 1, n, layout=x) for name, b, n in decodes for x in layouts),
        batch("decode B=1 L=131072 HND", 1, 1, 131072, layout="HND"),
        Shape("mixed 63 decodes of 8192, a chunk of 512", ((512, 8192), *((1, 8192),) * 63), layout="HND"),
        Shape("mixed a decode of 131072, a chunk of 512", ((512, 2048), (1, 131072)), layout="HND"),
        batch("prefill B=1 L=8192 HND", 1, 8192, 8192, layout="HND"),
        batch("prefill B=1 L=8192 NHD", 1, 8192, 8192),
        batch("prefill B=8 L=2048 HND", 8, 2048, 2048, layout="HND"),
        batch("chunk B=4 256 of 16384 HND", 4, 256, 16384, layout="HND"),
    )


SHAPES = {shape.name: shape.small() if REHEARSAL else shape for shape in _shapes()}


@dataclass
class Inputs:
    query: Tensor  # [T, Hq, D]
    key_cache: Tensor  # [N, S, Hkv, D]
    value_cache: Tensor
    block_table: Tensor  # [B, W] int32
    seq_lens: Tensor  # [B] int32
    cu_seqlens_q: Tensor  # [B+1] int32
    shape: Shape

    @property
    def attention_args(self) -> tuple[Any, ...]:
        boundaries = None if self.shape.is_decode else self.cu_seqlens_q
        return self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens, boundaries

    def dense(self, row: int) -> tuple[Tensor, Tensor]:
        """Keys and values [L, Hkv, D] of one sequence without pages."""
        length = self.shape.lens[row][1]
        key, value = (cache[self.block_table[row].long()].flatten(0, 1) for cache in (self.key_cache, self.value_cache))
        return key[:length], value[:length]


def make(shape: Shape, seed: int = 0) -> Inputs:
    """Random tokens in randomly placed blocks; past a sequence's end its last block is NaN, as nothing may read it."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    options: dict[str, Any] = {"dtype": DTYPE, "device": DEVICE, "generator": generator}
    columns = [-(-n // shape.block_size) for _, n in shape.lens]
    sizes = [sum(columns), shape.block_size, shape.num_kv_heads, shape.head_size]
    if shape.layout == "HND":
        sizes[1:3] = sizes[2:0:-1]
    caches = [torch.randn(sizes, **options) for _ in range(2)]
    if shape.layout == "HND":
        caches = [cache.transpose(1, 2) for cache in caches]
    blocks = torch.randperm(sizes[0], device=DEVICE, generator=generator).to(torch.int32)
    table = torch.zeros(len(shape.lens), max(columns), dtype=torch.int32, device=DEVICE)
    for row, part in enumerate(blocks.split(columns)):
        table[row, : len(part)] = part
        used = shape.lens[row][1] - (len(part) - 1) * shape.block_size
        for cache in caches:
            cache[part[-1].long(), used:] = torch.nan
    query_lens = torch.tensor([0, *(q for q, _ in shape.lens)])
    return Inputs(
        query=torch.randn(shape.num_tokens, shape.num_heads, shape.head_size, **options),
        key_cache=caches[0],
        value_cache=caches[1],
        block_table=table,
        seq_lens=torch.tensor([n for _, n in shape.lens], dtype=torch.int32, device=DEVICE),
        cu_seqlens_q=query_lens.cumsum(0).to(torch.int32).to(DEVICE),
        shape=shape,
    )


def _bands(query_len: int) -> list[tuple[int, int]]:
    """The first, middle and last rows of a sequence: as many as dense float64 attention does at once."""
    if query_len <= 32:
        return [(0, query_len)]
    middle = query_len // 2
    return [(0, 8), (middle, middle + 8), (query_len - 16, query_len)]


def assert_right(inputs: Inputs, out: Tensor) -> None:
    """Compare with dense float64 attention: every result is finite, and bands of rows of up to four sequences match.

    Torch's products on the device: right kernels would have to be wrong in the same way. Against the reference on the
    CPU stand the checks of ``checks``, which come first.
    """
    from pagedkv_ops.testing import assert_within_rounding, dense_attention

    assert out.dtype == DTYPE, f"expected {DTYPE}, got {out.dtype}"
    assert bool(torch.isfinite(out).all()), "a result is not finite"
    lens = inputs.shape.lens
    starts = [0]
    for query_len, _ in lens:
        starts.append(starts[-1] + query_len)
    rows = sorted({0, 1, len(lens) // 2, len(lens) - 1} & set(range(len(lens))))
    for row in rows:
        key, value = inputs.dense(row)
        query_len, seq_len = lens[row]
        for first, last in _bands(query_len):
            part = slice(starts[row] + first, starts[row] + last)
            seen = seq_len - query_len + last
            tensors = (inputs.query[part], key[:seen], value[:seen])
            with torch.device(DEVICE):
                exact, rounded = (dense_attention(*tensors, dtype=dtype)[0] for dtype in (torch.float64, DTYPE))
            assert_within_rounding(out[part], exact, rounded)
