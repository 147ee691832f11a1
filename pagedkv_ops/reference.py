"""The specification: every op as a readable loop in plain PyTorch.

Slow on purpose. Kernels are tested against these functions, and these against dense float64 attention.
Arguments are those of the ops; shapes are written [T, Hq, D] for T query tokens, Hq query heads, head size D.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import checks, value_checks
from .arguments import Attention


def write_kv(*args: Any, **scales: Any) -> None:
    checks.check_write_kv(*args, **scales)
    write = _Write(*args, **scales)
    _check_write_values("write_kv", write)
    _write(write)


@dataclass(frozen=True)
class _Write:
    """One call of write_kv; construct it as the op is called."""

    key: Tensor  # [T, Hkv, D]
    value: Tensor  # [T, Hkv, Dv]
    key_cache: Tensor  # [N, S, Hkv, D]
    value_cache: Tensor  # [N, S, Hkv, Dv]
    slot_mapping: Tensor  # [<= T]
    k_scale: Tensor | None = None  # [1] or [Hkv]
    v_scale: Tensor | None = None
    k_scale_cache: Tensor | None = None  # [N, S, Hkv]
    v_scale_cache: Tensor | None = None


def _check_write_values(op: str, w: _Write) -> None:
    value_checks.check_distinct_caches(op, w.key_cache, w.value_cache, w.k_scale_cache, w.v_scale_cache)
    value_checks.check_slots(op, w.slot_mapping, w.key_cache)
    value_checks.check_fixed_scale(op, "k_scale", w.k_scale)
    value_checks.check_fixed_scale(op, "v_scale", w.v_scale)
    value_checks.check_numbers(op, "key", w.key, w.slot_mapping, w.key_cache)
    value_checks.check_numbers(op, "value", w.value, w.slot_mapping, w.value_cache)


def _write(w: _Write) -> None:
    block_size = w.key_cache.size(1)
    # they may be rows of the caches: every row is read before any is written
    key, value = w.key.clone(), w.value.clone()
    for token, slot in enumerate(w.slot_mapping.tolist()):
        if slot < 0:  # padding
            continue
        place = divmod(slot, block_size)
        w.key_cache[place] = _stored(key[token], w.key_cache.dtype, w.k_scale, w.k_scale_cache, place)
        w.value_cache[place] = _stored(value[token], w.value_cache.dtype, w.v_scale, w.v_scale_cache, place)


def _stored(
    row: Tensor, dtype: torch.dtype, scale: Tensor | None, scale_cache: Tensor | None, place: tuple[int, int]
) -> Tensor:
    """A token [Hkv, D] in the cache's type; where there is a cache of scales its own is stored too."""
    if dtype not in checks.QUANTISED_MAX:
        return row.to(dtype)
    largest, row = checks.QUANTISED_MAX[dtype], row.float()
    if scale_cache is not None:  # infinities saturate, so that the rest of their row keeps its digits
        finite = row.abs().masked_fill(~row.isfinite(), 0.0)
        scale = finite.amax(1) / largest if row.size(1) else row.new_zeros(len(row))
        scale_cache[place] = scale
    assert scale is not None
    scale = scale[:, None]  # [Hkv or 1, 1]
    row = row.clamp(torch.finfo().min, torch.finfo().max)  # keeps NaN
    quotient = torch.where(scale == 0, row * 0, row / scale).clamp(-largest, largest)
    return quotient.round().to(dtype) if dtype == torch.int8 else quotient.to(dtype)


def _zeros(op: str, like: Tensor, shape: tuple[int, ...], dtype: torch.dtype, purpose: str = "") -> Tensor:
    try:
        return like.new_zeros(shape, dtype=dtype)
    except RuntimeError:
        num_bytes = math.prod(shape) * dtype.itemsize
        amount = f"{num_bytes} bytes" if num_bytes < 2**63 - 1 else "2**63 bytes or more"
        raise RuntimeError(f"{op}: cannot allocate {amount}{purpose}") from None


def _values(stored: Tensor, scale: Tensor | None) -> Tensor:
    """[tokens, Hkv, D] of the cache in float32; its scales are [1], [Hkv] or [tokens, Hkv]."""
    return stored.float() if scale is None else stored.float() * scale[..., None]


def _sequence(cache: Tensor, scale: Tensor | None, row: Tensor, length: int, columns: range) -> Tensor:
    """One sequence as float32 [length, Hkv, D]; positions outside the table ``columns`` are zero and never read."""
    block_size = cache.size(1)
    out = torch.zeros(length, *cache.shape[2:], dtype=torch.float32, device=cache.device)
    for column in columns:
        start = column * block_size
        stop = min(start + block_size, length)
        place = (int(row[column]), slice(stop - start))
        out[start:stop] = _values(cache[place], scale[place] if scale is not None and scale.dim() == 3 else scale)
    return out


def _distance(query_len: int, seq_len: int, device: torch.device) -> Tensor:
    """Key position minus query position [query_len, seq_len]: the last query row stands at the last key."""
    query_position = torch.arange(seq_len - query_len, seq_len, device=device)[:, None]
    return torch.arange(seq_len, device=device)[None, :] - query_position


def _visible(a: Attention, distance: Tensor) -> Tensor:
    """Mask like ``distance``: windows are inclusive, -1 is unlimited."""
    visible = torch.ones_like(distance, dtype=torch.bool)
    if a.causal:
        visible &= distance <= 0
    longest = max(distance.shape)  # no two positions are further apart, and a longer window may not fit 64 bits
    if a.window_left >= 0:
        visible &= distance >= -min(a.window_left, longest)
    if a.window_right >= 0:
        visible &= distance <= min(a.window_right, longest)
    return visible


def _attend_one_head(
    a: Attention,
    head: int,
    query: Tensor,  # [query_len, D]
    key: Tensor,  # [seq_len, D]
    value: Tensor,  # [seq_len, Dv]
) -> tuple[Tensor, Tensor]:
    distance = _distance(len(query), len(key), query.device)
    logits = (query @ key.T) * (query.size(1) ** -0.5 if a.scale is None else a.scale)
    if a.softcap > 0:
        # in float64: 1e-50 and 1e39 are no numbers of float32, and 1 / 3e38 loses digits there
        softcap = min(a.softcap, torch.finfo(torch.float32).max)
        logits = (softcap * torch.tanh(logits.double() / softcap)).float()
    if a.alibi_slopes is not None:
        logits = logits + float(a.alibi_slopes[head]) * distance
    logits = logits.masked_fill(~_visible(a, distance), -math.inf)
    if a.sinks is not None:  # a logit that joins the denominator alone
        logits = torch.cat([logits, logits.new_full((len(query), 1), float(a.sinks[head]))], dim=1)
        value = torch.cat([value, value.new_zeros(1, value.size(1))])
    # not exp(logits - lse): at a logit of 3e4 the rounding of lse alone moves every weight by 2e-4
    weights = torch.softmax(logits, dim=1).masked_fill(torch.isneginf(logits), 0.0)  # a row of -inf gives NaN
    return weights @ value, torch.logsumexp(logits, dim=1)


def _attend(op: str, a: Attention) -> tuple[Tensor, Tensor]:
    num_tokens, num_heads, _ = a.query.shape
    block_size, group_size = a.key_cache.size(1), num_heads // a.key_cache.size(2)
    bounds = value_checks.query_bounds(a)
    out = _zeros(op, a.query, (num_tokens, num_heads, a.value_cache.size(3)), torch.float32)
    lse = _zeros(op, a.query, (num_tokens, num_heads), torch.float32).fill_(-math.inf)
    for b, (row, seq_len) in enumerate(zip(a.block_table, a.seq_lens.tolist(), strict=True)):
        rows, query_len = slice(bounds[b], bounds[b + 1]), bounds[b + 1] - bounds[b]
        columns = value_checks.visible_blocks(query_len, seq_len, block_size, a.causal, a.window_left, a.window_right)
        key = _sequence(a.key_cache, a.k_scale, row, seq_len, columns)
        value = _sequence(a.value_cache, a.v_scale, row, seq_len, columns)
        for head in range(num_heads):
            kv_head = head // group_size
            query = a.query[rows, head].float()
            out[rows, head], lse[rows, head] = _attend_one_head(a, head, query, key[:, kv_head], value[:, kv_head])
    return out.to(a.query.dtype), lse


def paged_attention_with_lse(*args: Any, op: str = "paged_attention_with_lse", **options: Any) -> tuple[Tensor, Tensor]:
    attention = checks.check_paged_attention(*args, op=op, **options)
    value_checks.check_attention_values(op, attention)
    return _attend(op, attention)


def paged_attention(*args: Any, **options: Any) -> Tensor:
    return paged_attention_with_lse(*args, **options, op="paged_attention")[0]


def paged_attention_append(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    k_scale_cache: Tensor | None = None,
    v_scale_cache: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """``write_kv``, then ``paged_attention``, as one op: a compiled graph sees one mutation per layer and step."""
    op, caches, scale_caches = "paged_attention_append", (key_cache, value_cache), (k_scale_cache, v_scale_cache)
    attention = checks.check_paged_attention_append(
        query, key, value, *caches, slot_mapping, block_table, seq_lens, cu_seqlens_q, *scale_caches, **options
    )
    scales = (options.get("k_scale"), options.get("v_scale"))
    write = _Write(key, value, *caches, slot_mapping, *scales, *scale_caches)
    _check_write_values(op, write)
    value_checks.check_attention_values(op, attention)
    attention = replace(attention, query=query.clone())  # like key and value it is read before anything is written
    _write(write)
    return _attend(op, attention)[0]


def merge_states(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys: softmax weights of the two denominators.

    A part of weight 0, as one that saw no key, is not taken at all: its values may be NaN. An lse of +inf stays one.
    """
    checks.check_merge_states(out_a, lse_a, out_b, lse_b)
    lse = torch.logaddexp(lse_a, lse_b)
    out = torch.zeros(out_a.shape, dtype=torch.float32, device=out_a.device)
    for part, part_lse, other_lse in ((out_a, lse_a, lse_b), (out_b, lse_b, lse_a)):
        weight = torch.exp(part_lse - lse)
        weight = weight.masked_fill(torch.isneginf(other_lse), 1.0).masked_fill(torch.isneginf(part_lse), 0.0)
        weight = weight[..., None]
        out += torch.where(weight == 0, 0.0, weight * part.float())
    return out.to(out_a.dtype), lse.contiguous()


def copy_blocks(caches: Sequence[Tensor], block_mapping: Tensor) -> None:
    checks.check_copy_blocks(caches, block_mapping)
    for i, cache in enumerate(caches):
        value_checks.check_places("copy_blocks", f"caches[{i}]", cache)
    fewest = min(cache.size(0) for cache in caches)
    value_checks.check_block_mapping("copy_blocks", block_mapping, fewest, fewest)
    src, dst = block_mapping.long().unbind(1)
    sources = [cache[src] for cache in caches]  # all are read first: caches of the list may share memory
    for cache, source in zip(caches, sources, strict=True):
        cache[dst] = source


def swap_blocks(src: Tensor, dst: Tensor, block_mapping: Tensor) -> None:
    checks.check_swap_blocks(src, dst, block_mapping)
    value_checks.check_places("swap_blocks", "dst", dst)
    value_checks.check_block_mapping("swap_blocks", block_mapping, src.size(0), dst.size(0))
    from_ids, to_ids = block_mapping.long().unbind(1)
    dst[to_ids.to(dst.device)] = src[from_ids.to(src.device)].to(dst.device)


def gather_kv(
    cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    max_len: int,
    *,
    scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dtype = checks.check_gather_kv(cache, block_table, seq_lens, max_len, scale=scale, dtype=dtype)
    value_checks.check_gather_values(cache, block_table, seq_lens, max_len)
    block_size = cache.size(1)
    out = _zeros("gather_kv", cache, (seq_lens.size(0), max_len, *cache.shape[2:]), dtype, " for max_len tokens")
    if out.numel() == 0:
        return out
    for b, (row, seq_len) in enumerate(zip(block_table, seq_lens.tolist(), strict=True)):
        for position in range(min(seq_len, max_len)):
            place = (int(row[position // block_size]), position % block_size)
            if scale is None:
                out[b, position] = cache[place]
            else:
                out[b, position] = _values(cache[place], scale[place] if scale.dim() == 3 else scale)
    return out
