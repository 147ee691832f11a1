"""Giving blocks back, sharing them, and moving them to the host."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from pagedkv.sequence import SequenceState, lowered

if TYPE_CHECKING:
    from pagedkv.block_pool import Ids
    from pagedkv.manager import KVCacheManager


def give_back(manager: KVCacheManager, seq: SequenceState) -> None:
    """Drops a sequence's references to device and host blocks."""
    drop_tables(manager, seq.tables, seq.released)
    seq.tables.clear()  # an Allocation may still look at it
    drop_host(manager, seq)
    if seq.running:
        manager.num_running -= 1


def drop_tables(manager: KVCacheManager, tables: Sequence[array[int]], released: Sequence[int]) -> None:
    """Gives back what tables hold behind their null blocks; the tail, over all groups, is reused first."""
    if len(tables) == 1:
        blocks: Ids = np.frombuffer(tables[0], np.int64)[released[0] :]
    else:
        parts = [np.frombuffer(table, np.int64)[first:] for table, first in zip(tables, released, strict=True)]
        distances = [
            np.arange(len(part), 0, -1) * group.block_size for part, group in zip(parts, manager.groups, strict=True)
        ]
        blocks = np.concatenate(parts)[np.argsort(-np.concatenate(distances), kind="stable")]
    if len(blocks):
        _drop(manager, blocks)


def drop_blocks(manager: KVCacheManager, blocks: list[int]) -> None:
    """Gives back single blocks, last to be reused first."""
    _drop(manager, np.array(blocks, np.int64))


def _drop(manager: KVCacheManager, blocks: Ids) -> None:
    manager.pool.release(blocks)
    if manager.transfers:
        for block in blocks.tolist():
            if manager.pool.refs[block] == 0:
                manager.transfers.drop(block)


def drop_host(manager: KVCacheManager, seq: SequenceState) -> None:
    if seq.host is not None:
        for hosts in seq.host:
            drop_host_blocks(manager, hosts)
        seq.host = None


def drop_host_blocks(manager: KVCacheManager, hosts: Sequence[int]) -> None:
    for host in hosts:
        if host >= 0:
            manager.transfers.drop_host(host)


def share(manager: KVCacheManager, parent: SequenceState, child_id: Hashable) -> SequenceState:
    """A new sequence with the parent's committed tokens on the same blocks, host blocks included."""
    length = parent.num_computed
    child = SequenceState(
        child_id, parent.keys, len(manager.groups), parent.tokens.fork(length), length, num_computed=length
    )
    child.all_known = len(child.tokens) == length
    child.tip, child.num_links = parent.tip, parent.num_links
    child.cut_links(length // manager.hasher.chunk)
    child.num_hit = min(parent.num_hit, length)
    if parent.host is not None:
        child.host = [list(hosts) for hosts in parent.host]
        for hosts in child.host:
            for host in hosts:
                if host >= 0:
                    manager.transfers.host.acquire(host)
    elif length:
        child.running = True
        child.num_granted = length
        manager.num_running += 1
        parent.fast_end = 0
        parent.awaited = [
            (number, index)
            for number, index in parent.awaited
            if index < len(parent.tables[number]) and manager.transfers.is_pending(parent.tables[number][index])
        ]
        child.awaited = list(parent.awaited)
        child.published, child.attached, child.released = (
            min(parent.published, length),
            parent.attached,
            parent.released,
        )
        for number, group in enumerate(manager.groups):
            keep = -(-length // group.block_size)
            child.tables[number] = parent.tables[number][:keep]
            child.attached = lowered(child.attached, number, keep)
            manager.pool.acquire(child.tables[number])
        child.publish_at = parent.publish_at
    return child


def swap_out(manager: KVCacheManager, seq: SequenceState) -> list[list[int]] | None:
    """Host blocks for what a sequence has committed; None when the host pool can not hold it."""
    transfers = manager.transfers
    held = [
        table[: -(-seq.num_computed // group.block_size)]
        for table, group in zip(seq.tables, manager.groups, strict=True)
    ]
    blocks = [block for table in held for block in table if block]
    if not blocks or transfers.num_host_needed(blocks) > len(transfers.host.free):
        return None
    return [[transfers.swap_out(block) if block else -1 for block in table] for table in held]
