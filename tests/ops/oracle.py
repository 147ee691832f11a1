"""The ops once more, in numpy and float64, from lists of the keys that each row sees: shares no code with the package.

The reference is tested and fuzzed against this, because kernels that agree with it may share its mistakes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Array = Any  # numpy.ndarray


def _bits(tensor: Tensor) -> Array:
    """The tensor's own memory as integers: copies of it are copies of bits."""
    return tensor.view(_INTEGERS[tensor.element_size()]).numpy()


def _wide(tensor: Tensor) -> Array:
    return tensor.double().numpy()


def visible_keys(query_len: int, seq_len: int, causal: bool, left: int, right: int) -> list[list[int]]:
    """Per query row the positions of the keys that it sees, in Python's unbounded integers."""
    rows = []
    for row in range(query_len):
        position = seq_len - query_len + row
        rows.append(
            [
                key
                for key in range(seq_len)
                if (key <= position or not causal)
                and (left == -1 or position - key <= left)
                and (right == -1 or key - position <= right)
            ]
        )
    return rows


def _attend(query: Array, keys: Array, values: Array, bias: Array, scale: float, cap: float, sink: Any) -> Any:
    """One row [D] over its keys [n, D] and values [n, Dv]."""
    logits = keys @ query * scale
    if cap:
        logits = cap * np.tanh(logits / cap)
    logits = logits + bias
    everything = logits if sink is None else np.append(logits, sink)
    if everything.size == 0:
        return np.zeros(values.shape[1]), -math.inf
    highest = everything.max()
    denominator = np.exp(everything - highest).sum()
    return np.exp(logits - highest) @ values / denominator, highest + math.log(denominator)


def paged_attention_with_lse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    *,
    scale: float | None = None,
    causal: bool = True,
    window_left: int = -1,
    window_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sinks: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    num_splits: int = 0,
) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, head_size = query.shape
    block_size, group = key_cache.size(1), num_heads // key_cache.size(2)
    out = np.zeros((num_tokens, num_heads, value_cache.size(3)))
    lse = np.full((num_tokens, num_heads), -math.inf)
    bounds = range(num_tokens + 1) if cu_seqlens_q is None else cu_seqlens_q.tolist()
    queries = _wide(query)
    for b, seq_len in enumerate(seq_lens.tolist()):
        query_len = bounds[b + 1] - bounds[b]
        for row, seen in enumerate(visible_keys(query_len, seq_len, causal, window_left, window_right)):
            blocks = [int(block_table[b, key // block_size]) for key in seen]
            offsets = [key % block_size for key in seen]
            keys = _wide(_dequantised(key_cache, k_scale, blocks, offsets))
            values = _wide(_dequantised(value_cache, v_scale, blocks, offsets))
            distance = np.array(seen, dtype=float) - (seq_len - query_len + row)
            for head in range(num_heads):
                token = bounds[b] + row
                out[token, head], lse[token, head] = _attend(
                    queries[token, head],
                    keys[:, head // group],
                    values[:, head // group],
                    distance * (0.0 if alibi_slopes is None else float(alibi_slopes[head])),
                    head_size**-0.5 if scale is None else scale,
                    softcap,
                    None if sinks is None else float(sinks[head]),
                )
    return torch.from_numpy(out), torch.from_numpy(lse)


def paged_attention(*args: Any, **options: Any) -> Tensor:
    return paged_attention_with_lse(*args, **options)[0]


def _dequantised(cache: Tensor, scale: Tensor | None, blocks: list[int], offsets: list[int]) -> Tensor:
    """Tokens [n, Hkv, D] as the numbers that they stand for; quantised ones in float32."""
    tokens = cache[blocks, offsets]
    if scale is None:
        return tokens
    return tokens.float() * (scale[blocks, offsets] if scale.dim() == 3 else scale)[..., None]


def _quantised(rows: Tensor, dtype: torch.dtype, scale: Tensor) -> Tensor:
    """Finite rows [n, Hkv, D] divided by scales [n, Hkv], [Hkv] or [1] and rounded; rows without a scale are zeros."""
    divisors = np.broadcast_to(scale.numpy()[..., None], rows.shape)
    quotients = np.divide(rows.float().numpy(), divisors, out=np.zeros(rows.shape, np.float32), where=divisors != 0)
    largest = _largest(dtype)
    limited = np.clip(quotients, -largest, largest)
    return torch.from_numpy(np.rint(limited) if dtype == torch.int8 else limited).to(dtype)


def _largest(dtype: torch.dtype) -> np.float32:
    return np.float32(127 if dtype == torch.int8 else torch.finfo(dtype).max)


def write_kv(
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
) -> None:
    block_size = key_cache.size(1)
    written = ((key_cache, key, k_scale, k_scale_cache), (value_cache, value, v_scale, v_scale_cache))
    for cache, rows, scale, scale_cache in written:
        if scale_cache is not None:
            scale = torch.from_numpy(np.abs(rows.float().numpy()).max(2, initial=0) / _largest(cache.dtype))
        rounded = _bits(rows.to(cache.dtype, copy=True) if scale is None else _quantised(rows, cache.dtype, scale))
        for token, slot in enumerate(slot_mapping.tolist()):
            if slot >= 0:
                place = slot // block_size, slot % block_size
                _bits(cache)[place] = rounded[token]
                if scale_cache is not None and scale is not None:
                    scale_cache[place] = scale[token]


def paged_attention_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    *args: Any,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    **options: Any,
) -> Tensor:
    query = query.clone()
    fixed = (options.get("k_scale"), options.get("v_scale"))
    write_kv(key, value, key_cache, value_cache, slot_mapping, *fixed, k_scale_cache, v_scale_cache)
    options |= {name: s for name, s in (("k_scale", k_scale_cache), ("v_scale", v_scale_cache)) if s is not None}
    return paged_attention(query, key_cache, value_cache, *args, **options)


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    out, lse = np.zeros(out_a.shape), np.full(lse_a.shape, -math.inf)
    a, b = _wide(out_a), _wide(out_b)
    for index in np.ndindex(lse.shape):
        parts = [(float(x[index]), y[index]) for x, y in ((lse_a, a), (lse_b, b)) if x[index] > -math.inf]
        if parts:
            highest = max(part for part, _ in parts)
            lse[index] = highest + math.log(sum(math.exp(part - highest) for part, _ in parts))
            out[index] = sum(math.exp(part - lse[index]) * values for part, values in parts)
    return torch.from_numpy(out), torch.from_numpy(lse)


def copy_blocks(caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    src, dst = block_mapping.numpy().T
    sources = [_bits(cache)[src].copy() for cache in caches]
    for cache, source in zip(caches, sources, strict=True):
        _bits(cache)[dst] = source


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    from_ids, to_ids = block_mapping.numpy().T
    _bits(dst)[to_ids] = _bits(src)[from_ids].copy()


def gather_kv(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_len: int,
    *,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    block_size = cache.size(1)
    dtype = dtype or (cache.dtype if scale is None else torch.float32)
    out = torch.zeros(seq_lens.size(0), max_len, *cache.shape[2:], dtype=dtype)
    for b, length in enumerate(seq_lens.tolist()):
        for i in range(min(length, max_len)):
            tokens = _dequantised(cache, scale, [int(block_table[b, i // block_size])], [i % block_size])
            _bits(out)[b, i] = _bits(tokens.to(dtype))[0]
    return out
