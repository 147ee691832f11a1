"""Paged attention: over the cache alone, with the log-sum-exp, and fused with the write of the new tokens."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import checks
from .arguments import Attention
from .registration import op, register_fake

_paged_attention = op("paged_attention")
_paged_attention_with_lse = op("paged_attention_with_lse")
_paged_attention_append = op("paged_attention_append")


def paged_attention(
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
) -> Tensor:
    """Attend from packed query tokens to keys and values that lie in blocks.

    logits = scale * q.k, then softcap * tanh(logits / softcap), then + alibi_slope * (key_position - query_position),
    then the mask; accumulation in float32 (online softmax, arXiv:1805.02867; pages, arXiv:2309.06180).

    Args:
        query: [T, num_heads, head_size], float32, float16 or bfloat16; num_heads is a multiple of num_kv_heads.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size], a float type, also another one than the query's,
            or quantised: int8, float8_e4m3fn or float8_e5m2; last dimension contiguous, outer strides free.
        value_cache: [num_blocks, block_size, num_kv_heads, v_head_size], of the same type, or another quantised one.
        block_table: [B, W] int32 or int64, the blocks of each sequence in order. Entries that hold no visible key are
            never read.
        seq_lens: [B] int32 or int64, number of keys up to the last query token of each sequence, the new ones included.
        cu_seqlens_q: [B+1] int32 or int64, the sequences' first query rows and the end; None: one query token each
            (T == B). Rows past its end give 0.
        scale: default head_size ** -0.5.
        causal: aligned bottom-right, so that the last query token sees every key.
        window_left: keys before the query's position that it sees, besides its own; -1 is unlimited.
        window_right: keys after it; -1 is unlimited.
        softcap: 0 is off.
        alibi_slopes: [num_heads] (arXiv:2108.12409).
        sinks: [num_heads], a logit per head that joins the denominator alone.
        k_scale: of a quantised key_cache, float32: [1], [num_kv_heads], or [num_blocks, block_size, num_kv_heads] with
            free strides, as :func:`write_kv` fills it. A key is what is stored times its scale.
        v_scale: likewise of value_cache.
        num_splits: 0 splits long sequences over threads as it sees fit; 1 gives results that are bitwise independent of
            the rest of the batch and of how a prompt was cut into chunks.

    Returns:
        [T, num_heads, v_head_size] in the query's type, contiguous. A row that sees no key is 0.

    Raises:
        RuntimeError: a shape, type, device or option does not fit; on CPU also a length or block id out of range.

    >>> import torch
    >>> values = torch.arange(8.0).view(2, 4, 1, 1).expand(2, 4, 1, 2).contiguous()  # 2 blocks of 4 tokens
    >>> query, keys = torch.zeros(1, 1, 2), torch.zeros(2, 4, 1, 2)
    >>> table, seq_lens = torch.tensor([[1, 0]]), torch.tensor([8])  # tokens 4, 5, 6, 7, 0, 1, 2, 3
    >>> paged_attention(query, keys, values, table, seq_lens).tolist()  # a query of 0 takes their mean
    [[[3.5, 3.5]]]
    >>> paged_attention(query, keys, values, table, seq_lens, window_left=1).tolist()  # tokens 2 and 3
    [[[2.5, 2.5]]]
    """
    return _paged_attention(  # type: ignore[no-any-return]
        query,
        key_cache,
        value_cache,
        block_table,
        seq_lens,
        cu_seqlens_q,
        scale=scale,
        causal=causal,
        window_left=window_left,
        window_right=window_right,
        softcap=softcap,
        alibi_slopes=alibi_slopes,
        sinks=sinks,
        k_scale=k_scale,
        v_scale=v_scale,
        num_splits=num_splits,
    )


def paged_attention_with_lse(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    cu_seqlens_q: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Attend as :func:`paged_attention` does, and return the log of the softmax denominator too.

    Args:
        query: [T, num_heads, head_size]; like all that follow, as in :func:`paged_attention`.
        key_cache: [num_blocks, block_size, num_kv_heads, head_size].
        value_cache: [num_blocks, block_size, num_kv_heads, v_head_size].
        block_table: [B, W].
        seq_lens: [B].
        cu_seqlens_q: [B+1] or None.
        **options: the keyword arguments.

    Returns:
        out [T, num_heads, v_head_size] and lse [T, num_heads] float32 (natural log, sink included; -inf for a row that
        sees neither key nor sink). Parts over disjoint keys are joined by :func:`merge_states`; give ``sinks`` to one
        of them only.

    Raises:
        RuntimeError: as :func:`paged_attention` does.

    >>> import torch
    >>> caches, table = torch.zeros(2, 2, 4, 1, 2), torch.tensor([[1, 0]])
    >>> out, lse = paged_attention_with_lse(torch.zeros(1, 1, 2), *caches, table, torch.tensor([6]))
    >>> lse.exp().round().tolist()  # six keys of logit 0
    [[6.0]]
    """
    return _paged_attention_with_lse(  # type: ignore[no-any-return]
        query, key_cache, value_cache, block_table, seq_lens, cu_seqlens_q, **options
    )


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
    **options: Any,
) -> Tensor:
    """Write new tokens as :func:`write_kv` does, then attend as :func:`paged_attention` does, in one op.

    A compiled graph that calls this several times on one cache needs no clone of it, which separate write and
    attention calls would cost. An error leaves the caches unchanged.

    Args:
        query: [T, num_heads, head_size]; may be rows of a cache, then as they are before the write.
        key: [T, num_kv_heads, head_size], of the query's tokens; as the next four those of :func:`write_kv`.
        value: [T, num_kv_heads, v_head_size].
        key_cache: [num_blocks, block_size, num_kv_heads, head_size].
        value_cache: [num_blocks, block_size, num_kv_heads, v_head_size].
        slot_mapping: [<= T].
        block_table: [B, W]; as the rest those of :func:`paged_attention`.
        seq_lens: [B]; the new tokens count.
        cu_seqlens_q: [B+1] or None.
        **options: its keyword arguments. k_scale and v_scale are those of the write too; instead of them k_scale_cache
            and v_scale_cache, which the write fills and attention reads.

    Returns:
        [T, num_heads, v_head_size] in the query's type, contiguous.

    Raises:
        RuntimeError: as the two ops do.

    >>> import torch
    >>> key_cache, value_cache = torch.zeros(2, 2, 4, 1, 2)
    >>> token, table = torch.ones(1, 1, 2), torch.tensor([[1]])
    >>> for position in range(3):  # three decode steps in block 1
    ...     slot, seq_lens = torch.tensor([4 + position]), torch.tensor([position + 1])
    ...     out = paged_attention_append(token, token, token * position, key_cache, value_cache, slot, table, seq_lens)
    >>> out.tolist()  # the mean of 0, 1 and 2
    [[[1.0, 1.0]]]
    """
    return _paged_attention_append(  # type: ignore[no-any-return]
        query, key, value, key_cache, value_cache, slot_mapping, block_table, seq_lens, cu_seqlens_q, **options
    )


def _empty_out(a: Attention) -> Tensor:
    return a.query.new_empty(*a.query.shape[:2], a.value_cache.size(3))


@register_fake("paged_attention")
def _fake(*args: Any, **options: Any) -> Tensor:
    return _empty_out(checks.check_paged_attention(*args, **options))


@register_fake("paged_attention_with_lse")
def _fake_with_lse(*args: Any, **options: Any) -> tuple[Tensor, Tensor]:
    a = checks.check_paged_attention(*args, **options, op="paged_attention_with_lse")
    return _empty_out(a), a.query.new_empty(a.query.shape[:2], dtype=torch.float32)


@register_fake("paged_attention_append")
def _fake_append(*args: Any, **options: Any) -> Tensor:
    return _empty_out(checks.check_paged_attention_append(*args, **options))
