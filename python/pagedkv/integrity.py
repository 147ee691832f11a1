"""Cross-checks of a manager's whole state."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagedkv.errors import IntegrityError

if TYPE_CHECKING:
    from pagedkv.manager import KVCacheManager
    from pagedkv.sequence import SequenceState


def check_manager(manager: KVCacheManager) -> None:
    """Raises IntegrityError unless free + in use + null = total, references equal those from tables, pins and the host
    pool equal the pending moves and every table fits its sequence."""
    pool = manager.pool
    pool.check_integrity()
    references = np.zeros(pool.num_blocks, np.int64)
    host_references = [0] * len(manager.transfers.host.refs)
    num_running = 0
    for seq in manager.sequences.values():
        _check_sequence(manager, seq)
        num_running += seq.running
        for table in seq.tables:
            np.add.at(references, np.array(table, np.int64), 1)
        for hosts in seq.host or ():
            for host in hosts:
                if host >= 0:
                    host_references[host] += 1
    references[0] = 0
    wrong = np.flatnonzero(references != pool.refs_np)
    if len(wrong):
        block = int(wrong[0])
        raise IntegrityError(f"block {block} has {pool.refs[block]} references, the tables hold {references[block]}")
    in_use = {*np.flatnonzero(references).tolist(), *pool.pins}
    if pool.num_free + len(in_use) + 1 != pool.num_blocks:
        raise IntegrityError(f"{pool.num_free} free + {len(in_use)} used + 1 null blocks are not {pool.num_blocks}")
    if num_running != manager.num_running:
        raise IntegrityError(f"{num_running} sequences run, the manager counts {manager.num_running}")
    manager.transfers.check_integrity(host_references)


def _check_sequence(manager: KVCacheManager, seq: SequenceState) -> None:
    def require(condition: bool, message: str) -> None:
        if not condition:
            raise IntegrityError(f"sequence {seq.seq_id!r}: {message}")

    require(0 <= seq.num_computed <= seq.num_tokens, "computed tokens exceed the existing ones")
    require(seq.num_known <= seq.num_tokens, "more ids than tokens")
    require(seq.num_links * manager.hasher.chunk <= seq.num_known, "hashed past the known tokens")
    require(not (seq.running and seq.host is not None), "runs while it is swapped out")
    require(seq.running or not any(seq.tables), "holds blocks without running")
    require(not seq.running or seq.num_computed <= seq.num_granted, "computed past the granted slots")
    links = seq.links()
    require(seq.published <= seq.num_computed, "published past the computed tokens")
    for number, (group, table) in enumerate(zip(manager.groups, seq.tables, strict=True)):
        size = group.block_size
        released = seq.released[number]
        held = table[released:].tolist()
        require(not any(table[:released]), "a released block is not null")
        require(all(held), "the null block stands among blocks in sight")
        pending = {
            (number, column)
            for column, block in (enumerate(table) if manager.transfers else ())
            if manager.transfers.is_pending(block)
        }
        require(pending <= set(seq.awaited), "a pending move into its blocks is not awaited")
        require(len(set(held)) == len(held), "a table names a block twice")
        require(len(table) * size >= seq.num_granted, "granted slots have no block")
        require(
            seq.host is None or len(seq.host[number]) == -(-seq.num_computed // size), "host table of a wrong length"
        )
        for block, block_id in enumerate(table[: seq.published // size]):
            content = manager.pool.contents[block_id]
            link = links[(block + 1) * group.chunks_per_block - 1]
            require(block_id == 0 or content is None or content.tokens == link.tokens, "a block was published wrongly")
