"""Other CUDA attention kernels on the same inputs: each prepares a call, or raises because it is not there."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass
class Inputs:
    query: Tensor  # [B * query_len, Hq, D]
    key_cache: Tensor  # [N, S, Hkv, D]
    value_cache: Tensor
    block_table: Tensor  # [B, W] int32
    seq_lens: Tensor  # [B] int32
    cu_seqlens_q: Tensor  # [B+1] int32
    key: Tensor  # [B, L, Hkv, D], the same keys without pages
    value: Tensor
    query_len: int


Call = Callable[[], Tensor]


def sdpa(inputs: Inputs) -> Call:
    """torch's flash kernel on contiguous keys and values."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    batch, seq_len = inputs.key.shape[:2]
    query = inputs.query.unflatten(0, (batch, inputs.query_len)).transpose(1, 2)
    key, value = (x.transpose(1, 2).contiguous() for x in (inputs.key, inputs.value))
    mask = causal_lower_right(inputs.query_len, seq_len) if 1 < inputs.query_len < seq_len else None
    causal = inputs.query_len == seq_len

    def call() -> Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(query, key, value, mask, is_causal=causal, enable_gqa=True)
        return out.transpose(1, 2).flatten(0, 1)

    return call


def varlen(inputs: Inputs) -> Call:
    """torch's variable-length attention on contiguous keys and values."""
    from torch.nn.attention.varlen import varlen_attn

    batch, seq_len = inputs.key.shape[:2]
    key, value = inputs.key.flatten(0, 1).contiguous(), inputs.value.flatten(0, 1).contiguous()
    cu_seqlens_k = torch.arange(batch + 1, dtype=torch.int32, device=key.device) * seq_len
    lengths = (inputs.cu_seqlens_q, cu_seqlens_k, inputs.query_len, seq_len)
    options: dict[str, Any] = {"window_size": (-1, 0)}
    if "enable_gqa" in inspect.signature(varlen_attn).parameters:  # torch 2.11 has no such switch
        options["enable_gqa"] = True
    return lambda: varlen_attn(inputs.query, key, value, *lengths, **options)


def flex(inputs: Inputs) -> Call:
    """FlexAttention with a causal block mask; compiling it takes most of a minute, so prefill alone."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    batch, seq_len = inputs.key.shape[:2]
    if inputs.query_len != seq_len:
        raise NotImplementedError("only whole prompts")
    query = inputs.query.unflatten(0, (batch, inputs.query_len)).transpose(1, 2)
    key, value = (x.transpose(1, 2).contiguous() for x in (inputs.key, inputs.value))
    mask = create_block_mask(lambda b, h, q, k: k <= q, None, None, seq_len, seq_len)
    compiled = torch.compile(flex_attention)
    return lambda: compiled(query, key, value, block_mask=mask, enable_gqa=True).transpose(1, 2).flatten(0, 1)


def flash_attention_3(inputs: Inputs) -> Call:
    from flash_attn_interface import flash_attn_with_kvcache

    batch = inputs.block_table.size(0)
    query = inputs.query.unflatten(0, (batch, inputs.query_len))
    options = {"cache_seqlens": inputs.seq_lens, "page_table": inputs.block_table, "causal": True}
    return lambda: flash_attn_with_kvcache(query, inputs.key_cache, inputs.value_cache, **options).flatten(0, 1)


def flashinfer(inputs: Inputs) -> Call:
    import flashinfer

    workspace = torch.empty(256 << 20, dtype=torch.uint8, device=inputs.query.device)
    batch, columns = inputs.block_table.shape
    block_size, num_kv_heads, head_size = inputs.key_cache.shape[1:]
    indptr = torch.arange(batch + 1, dtype=torch.int32, device=inputs.query.device) * columns
    last = (inputs.seq_lens - 1) % block_size + 1
    pages = (indptr, inputs.block_table.flatten(), last)
    heads = (inputs.query.size(1), num_kv_heads, head_size, block_size)
    if inputs.query_len == 1:
        wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
        wrapper.plan(*pages, *heads, q_data_type=inputs.query.dtype)
    else:
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        wrapper.plan(inputs.cu_seqlens_q, *pages, *heads, causal=True, q_data_type=inputs.query.dtype)
    return lambda: wrapper.run(inputs.query, (inputs.key_cache, inputs.value_cache))


def vllm(inputs: Inputs) -> Call:
    """vLLM's Triton kernel over the same pages."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    out = torch.empty_like(inputs.query)
    arguments = {
        "q": inputs.query,
        "k": inputs.key_cache,
        "v": inputs.value_cache,
        "out": out,
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "max_seqlen_q": inputs.query_len,
        "seqused_k": inputs.seq_lens,
        "max_seqlen_k": inputs.key.size(1),
        "softmax_scale": inputs.query.size(2) ** -0.5,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": inputs.block_table,
        "softcap": 0.0,
        "q_descale": None,
        "k_descale": None,
        "v_descale": None,
    }

    def call() -> Tensor:
        unified_attention(**arguments)
        return out

    return call


PEERS: dict[str, Callable[[Inputs], Call]] = {
    "sdpa": sdpa,
    "varlen": varlen,
    "flash_attention_3": flash_attention_3,
    "flashinfer": flashinfer,
    "vllm": vllm,
    "flex": flex,
}
