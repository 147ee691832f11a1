"""Inputs of the op tests: paged attention cases with their dense truth, pairwise samples of a grid, poisoned caches."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

import pagedkv_ops
from pagedkv_ops import value_checks
from pagedkv_ops.testing import assert_within_rounding, dense_attention, poison

OUT_OF_RANGE = 2**31 - 1  # an id that no cache holds: reading it must fail or crash
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
INDEX_DTYPES = (torch.int32, torch.int64)

WRITE_ARGUMENTS = ("key", "value", "key_cache", "value_cache", "slot_mapping")
TABLE_ARGUMENTS = ("block_table", "seq_lens", "cu_seqlens_q")
ATTENTION_ARGUMENTS = ("query", "key_cache", "value_cache", *TABLE_ARGUMENTS)  # Case.args
APPEND_ARGUMENTS = ("query", *WRITE_ARGUMENTS, *TABLE_ARGUMENTS)  # Case.append_args()


def pairwise(seed: int, **factors: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows such that every pair of values of two factors occurs together at least once (greedy, deterministic)."""
    names = list(factors)
    rng = random.Random(seed)
    missing = {
        ((a, i), (b, j))
        for a, b in itertools.combinations(names, 2)
        for i in range(len(factors[a]))
        for j in range(len(factors[b]))
    }

    def pairs(row: dict[str, int]) -> set[Any]:
        return {((a, row[a]), (b, row[b])) for a, b in itertools.combinations(names, 2)}

    rows = []
    while missing:
        (a, i), (b, j) = min(missing)
        candidates = [{n: rng.randrange(len(factors[n])) for n in names} | {a: i, b: j} for _ in range(60)]
        best = max(candidates, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        rows.append({name: factors[name][best[name]] for name in names})
    return rows


def row_id(row: dict[str, Any]) -> str:
    return "-".join(f"{name}={value}".replace("torch.", "").replace(" ", "") for name, value in row.items())


def make_caches(
    num_blocks: int,
    block_size: int,
    num_kv_heads: int,
    head_size: int,
    v_head_size: int,
    dtype: torch.dtype = torch.float32,
    layout: str = "nhd",
    fill: float = math.nan,
) -> tuple[Tensor, Tensor]:
    """Key and value caches full of ``fill``; ``interleaved`` puts K and V side by side in one storage."""
    if layout == "nhd":
        sizes = (num_blocks, block_size, num_kv_heads)
        key_cache, value_cache = (poison(*sizes, d, dtype=dtype, value=fill) for d in (head_size, v_head_size))
    elif layout == "hnd":
        sizes = (num_blocks, num_kv_heads, block_size)
        key_cache, value_cache = (
            poison(*sizes, d, dtype=dtype, value=fill).transpose(1, 2) for d in (head_size, v_head_size)
        )
    elif layout == "interleaved":
        sizes = (num_blocks, block_size, num_kv_heads)
        both = poison(*sizes, head_size + v_head_size, dtype=dtype, value=fill)
        key_cache, value_cache = both.split([head_size, v_head_size], dim=3)
    else:
        raise ValueError(layout)
    return key_cache, value_cache


def sliced(tensor: Tensor) -> Tensor:
    """The same values as a strided slice of a wider tensor (as of a fused projection) whose rest is NaN."""
    wide = poison(tensor.size(0), tensor.size(1) + 2, tensor.size(2) + 3, dtype=tensor.dtype)
    view = wide[:, 1:-1, : tensor.size(2)]
    view.copy_(tensor)
    return view


def strided_index(tensor: Tensor) -> Tensor:
    """The same integers with gaps of out-of-range values between them."""
    wide = tensor.new_full((*tensor.shape[:-1], 2 * tensor.size(-1)), OUT_OF_RANGE)
    view = wide[..., ::2]
    view.copy_(tensor)
    return view


@dataclass(frozen=True)
class Spec:
    """What a case is made of; ``query_lens`` and ``seq_lens`` per sequence."""

    query_lens: Sequence[int] = (1, 1)
    seq_lens: Sequence[int] = (5, 9)
    heads: tuple[int, int] = (4, 2)  # query heads, KV heads
    head_size: int = 16
    v_head_size: int | None = None
    block_size: int = 4
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    index_dtype: torch.dtype = torch.int64
    layout: str = "nhd"
    strided: bool = False  # query and index tensors
    fill: float = math.nan  # of every element that no visible token owns
    padding_rows: int = 0  # query rows past cu_seqlens_q[-1]
    options: dict[str, Any] = field(default_factory=dict)
    seed: int = 0
    placement_seed: int = 0  # which blocks the tokens lie in

    def window(self) -> tuple[bool, int, int]:
        o = self.options
        return o.get("causal", True), o.get("window_left", -1), o.get("window_right", -1)


@dataclass
class Case:
    """A paged attention call and the dense keys and values that its tables stand for."""

    spec: Spec
    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    seq_lens: Tensor
    cu_seqlens_q: Tensor | None
    keys: list[Tensor]  # per sequence [seq_len, Hkv, D]
    values: list[Tensor]
    options: dict[str, Any]

    @property
    def args(self) -> tuple[Any, ...]:
        return (self.query, self.key_cache, self.value_cache, self.block_table, self.seq_lens, self.cu_seqlens_q)

    def rounded(self) -> list[tuple[Tensor, Tensor]]:
        """:meth:`dense` in the query's type, with q.k summed in several orders."""
        head_size = self.query.size(2)
        orders = [torch.randperm(head_size, generator=torch.Generator().manual_seed(i)) for i in range(4)]
        return [self.dense(self.query.dtype, order) for order in orders]

    def dense(self, dtype: torch.dtype = torch.float64, order: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """out [T, Hq, Dv] and lse [T, Hq] by dense attention in ``dtype``; padding rows are 0 and -inf.

        ``order``: a permutation of the head dimension, which changes nothing but rounding.
        """
        num_tokens, num_heads, _ = self.query.shape
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        out = torch.zeros(num_tokens, num_heads, self.value_cache.size(3), dtype=dtype)
        lse = torch.full((num_tokens, num_heads), -math.inf, dtype=wide)
        options = {k: v for k, v in self.options.items() if k != "num_splits"}
        start = 0
        for query_len, key, value in zip(self.spec.query_lens, self.keys, self.values, strict=True):
            rows = slice(start, start + query_len)
            query = self.query[rows]
            if order is not None:
                query, key = query[..., order], key[..., order]
            out[rows], lse[rows] = dense_attention(query, key, value, dtype=dtype, **options)
            start += query_len
        return out, lse

    def slots(self, b: int, positions: range) -> list[int]:
        block_size = self.spec.block_size
        return [int(self.block_table[b, p // block_size]) * block_size + p % block_size for p in positions]

    def append_args(self) -> tuple[Any, ...]:
        """The arguments of paged_attention_append that write the query tokens' keys and values, still poison here.

        The caches returned among them are copies of this case's without those tokens; query rows that stand before the
        sequence's first position, and padding rows, have the slot -1.
        """
        key_cache, value_cache = copy_strided(self.key_cache), copy_strided(self.value_cache)
        key = poison(self.query.size(0), *self.key_cache.shape[2:])
        value = poison(self.query.size(0), *self.value_cache.shape[2:])
        slots = torch.full((self.query.size(0),), -1, dtype=self.spec.index_dtype)
        start = 0
        for b, (query_len, seq_len) in enumerate(zip(self.spec.query_lens, self.spec.seq_lens, strict=True)):
            count = min(query_len, seq_len)
            rows = slice(start + query_len - count, start + query_len)
            key[rows], value[rows] = self.keys[b][seq_len - count :], self.values[b][seq_len - count :]
            slots[rows] = torch.tensor(self.slots(b, range(seq_len - count, seq_len)), dtype=slots.dtype)
            start += query_len
        for slot in slots[slots >= 0].tolist():
            for cache in (key_cache, value_cache):
                cache[slot // self.spec.block_size, slot % self.spec.block_size] = self.spec.fill
        if self.spec.strided:
            key, value, slots = sliced(key), sliced(value), strided_index(slots)
        return (
            self.query,
            key,
            value,
            key_cache,
            value_cache,
            slots,
            self.block_table,
            self.seq_lens,
            self.cu_seqlens_q,
        )


def copy_strided(tensor: Tensor) -> Tensor:
    """A copy with the same strides (clone gives others to a tensor with gaps)."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
    return copy.copy_(tensor)


def attention_options(num_heads: int, *, alibi: bool = False, sinks: bool = False, **options: Any) -> dict[str, Any]:
    if alibi:
        options["alibi_slopes"] = 2.0 ** -(torch.arange(1, num_heads + 1) * 8 / num_heads)
    if sinks:
        options["sinks"] = torch.linspace(-1, 2, num_heads)
    return options


def make_case(spec: Spec | None = None, **changes: Any) -> Case:
    """Random tokens in randomly placed blocks; what the op must not read is poison or out of range."""
    spec = replace(spec or Spec(), **changes)
    rng = torch.Generator().manual_seed(spec.seed)
    num_heads, num_kv_heads = spec.heads
    v_head_size = spec.v_head_size or spec.head_size
    cache_dtype = spec.cache_dtype or spec.dtype
    num_columns = [-(-n // spec.block_size) for n in spec.seq_lens]
    num_blocks = sum(num_columns) + 2
    key_cache, value_cache = make_caches(
        num_blocks,
        spec.block_size,
        num_kv_heads,
        spec.head_size,
        v_head_size,
        cache_dtype,
        spec.layout,
        spec.fill,
    )
    free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(spec.placement_seed)).tolist()
    table = torch.full((len(spec.seq_lens), max(num_columns, default=0) + 1), OUT_OF_RANGE, dtype=spec.index_dtype)
    keys, values = [], []
    for b, (query_len, seq_len) in enumerate(zip(spec.query_lens, spec.seq_lens, strict=True)):
        key = torch.randn(seq_len, num_kv_heads, spec.head_size, generator=rng).to(cache_dtype)
        value = torch.randn(seq_len, num_kv_heads, v_head_size, generator=rng).to(cache_dtype)
        for column in value_checks.visible_blocks(query_len, seq_len, spec.block_size, *spec.window()):
            table[b, column] = block = free.pop()
            tokens = slice(column * spec.block_size, min((column + 1) * spec.block_size, seq_len))
            key_cache[block, : tokens.stop - tokens.start] = key[tokens]
            value_cache[block, : tokens.stop - tokens.start] = value[tokens]
        keys.append(key)
        values.append(value)
    num_tokens = sum(spec.query_lens) + spec.padding_rows
    query = torch.randn(num_tokens, num_heads, spec.head_size, generator=rng).to(spec.dtype)
    seq_lens = torch.tensor(spec.seq_lens, dtype=spec.index_dtype)
    cu_seqlens_q: Tensor | None = None
    if spec.padding_rows or any(n != 1 for n in spec.query_lens):
        cu_seqlens_q = torch.tensor([0, *itertools.accumulate(spec.query_lens)], dtype=spec.index_dtype)
    if spec.strided:
        query, table, seq_lens = sliced(query), strided_index(table), strided_index(seq_lens)
        cu_seqlens_q = None if cu_seqlens_q is None else strided_index(cu_seqlens_q)
    return Case(spec, query, key_cache, value_cache, table, seq_lens, cu_seqlens_q, keys, values, dict(spec.options))


def assert_attention(case: Case, *implementations: Callable[..., Any]) -> None:
    """Each implementation of paged_attention_with_lse equals dense attention, within the query type's rounding."""
    exact, exact_lse = case.dense()
    rounded, rounded_lse = zip(*case.rounded(), strict=True)
    for implementation in implementations:
        out, lse = implementation(*case.args, **case.options)
        assert out.is_contiguous()
        assert lse.is_contiguous()
        assert_within_rounding(out, exact, *rounded)
        assert_within_rounding(lse, exact_lse, *rounded_lse)


def mean_probe(
    length: int, block_size: int, *, num_queries: int = 1, dtype: torch.dtype = torch.float32, fill: float = math.nan
) -> Case:
    """Query 0 and V[j] = j at position j: the output is the mean of the visible positions, lse = ln(number visible)."""
    case = make_case(
        query_lens=(num_queries,),
        seq_lens=(length,),
        heads=(2, 1),
        head_size=8,
        block_size=block_size,
        dtype=dtype,
        fill=fill,
    )
    case.query.zero_()
    for position, slot in enumerate(case.slots(0, range(length))):
        case.value_cache[slot // block_size, slot % block_size] = position
    return case


def run_rows(case: Case, b: int, rows: slice, seq_len: int) -> tuple[Tensor, Tensor]:
    """Rows of sequence ``b`` alone, as a batch of one that ends at ``seq_len``."""
    bounds = torch.tensor([0, rows.stop - rows.start])
    caches, table = (case.key_cache, case.value_cache), case.block_table[b : b + 1]
    return pagedkv_ops.paged_attention_with_lse(
        case.query[rows], *caches, table, torch.tensor([seq_len]), bounds, **case.options
    )
