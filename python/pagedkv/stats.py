"""Counters and occupancy of a manager at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pagedkv.manager import KVCacheManager


@dataclass(frozen=True, slots=True)
class KVCacheStats:
    """Blocks without the null block: used ones are referenced or pinned, cached ones carry a hash (used or free).

    num_tokens: committed tokens in the blocks of tables, a shared block counted once (with groups: over all groups).
    wasted_slots: the slots there that hold none; wasted_percent: of all of them; wasted_bytes: None unless the size of
    a block was given.
    hit_rate: cached / asked tokens over the last 1000 admissions, 0 when there were none.
    """

    num_blocks: int
    num_used_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_host_blocks: int
    num_used_host_blocks: int
    num_sequences: int
    num_running: int
    num_tokens: int
    wasted_slots: int
    wasted_percent: float
    wasted_bytes: int | None
    hit_rate: float
    num_evictions: int
    num_preemptions: int
    num_swaps: int
    num_copies: int


def collect_stats(manager: KVCacheManager, bytes_per_block: int | None) -> KVCacheStats:
    pool, host = manager.pool, manager.transfers.host
    num_slots, wasted, share = _wasted_slots(manager)
    asked = sum(asked for asked, _ in manager.recent_hits)
    return KVCacheStats(
        num_blocks=pool.num_usable,
        num_used_blocks=pool.num_usable - pool.num_free,
        num_cached_blocks=pool.num_published,
        num_free_blocks=pool.num_free,
        num_host_blocks=len(host.refs),
        num_used_host_blocks=len(host.refs) - len(host.free),
        num_sequences=len(manager.sequences),
        num_running=manager.num_running,
        num_tokens=num_slots - wasted,
        wasted_slots=wasted,
        wasted_percent=100.0 * wasted / num_slots if num_slots else 0.0,
        wasted_bytes=None if bytes_per_block is None else round(share * bytes_per_block),
        hit_rate=sum(hit for _, hit in manager.recent_hits) / asked if asked else 0.0,
        num_evictions=pool.num_evictions,
        num_preemptions=manager.num_preemptions,
        num_swaps=manager.num_swaps,
        num_copies=manager.transfers.num_copies,
    )


def _wasted_slots(manager: KVCacheManager) -> tuple[int, int, float]:
    """Slots of the blocks in tables, those among them that hold no token, and the latter in blocks.

    A block is filled as far as the owner that has committed most into it.
    """
    num_slots, wasted, share = 0, 0, 0.0
    for number, group in enumerate(manager.groups):
        size = group.block_size
        filled = np.full(manager.pool.num_blocks, -1, np.int64)  # tokens by block, -1 outside of tables
        for seq in manager.sequences.values():
            num_full = seq.num_computed // size
            table = np.array(seq.tables[number], np.int64)
            filled[table[:num_full]] = size
            rest = table[num_full:]
            tokens = np.maximum(seq.num_computed - size * np.arange(num_full, len(table)), 0)
            filled[rest] = np.maximum(filled[rest], tokens)
        held = filled[1:][filled[1:] >= 0]
        empty = int((size - held).sum())
        num_slots += size * len(held)
        wasted += empty
        share += empty / size
    return num_slots, wasted, share
