"""Offering full, committed blocks to the prefix index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.errors import PendingCopyError

if TYPE_CHECKING:
    from pagedkv.manager import KVCacheManager
    from pagedkv.sequence import SequenceState


def check_arrived(manager: KVCacheManager, seq: SequenceState, computed: int) -> None:
    """Raises unless the content of every block below `computed` that is not published yet has been brought."""
    for number, (group, table) in enumerate(zip(manager.groups, seq.tables, strict=True)):
        for block in table[seq.published[number] : -(-computed // group.block_size)]:
            if manager.transfers.is_pending(block):
                raise PendingCopyError(f"block {block} of sequence {seq.seq_id!r} waits for take_copies or take_swaps")


def publish(manager: KVCacheManager, seq: SequenceState) -> None:
    """Publishes the blocks that committed tokens with known ids have filled, and notes when the next one will be."""
    pool, suffixes = manager.pool, manager.lookup.suffixes
    known = min(seq.num_computed, seq.num_known)
    for number, group in enumerate(manager.groups):
        full, first = known // group.block_size, seq.published[number]
        if full <= first:
            continue
        per_block, suffix, table = group.chunks_per_block, suffixes[number], seq.tables[number]
        manager.hasher.extend(seq.chain, seq.tokens, seq.keys, full * per_block)
        for index in range(first, full):
            block = table[index]
            if block and not pool.is_published(block):
                link = seq.chain[(index + 1) * per_block - 1]
                if pool.events is None:
                    pool.publish_checked(block, link.hash + suffix, link)
                else:
                    parent = seq.chain[index * per_block - 1].hash + suffix if index else None
                    tokens = seq.tokens[index * group.block_size : (index + 1) * group.block_size]
                    pool.publish_checked(block, link.hash + suffix, link, parent, tokens)
                manager.lookup.add_child(number, block, link)
        seq.published[number] = full
    seq.publish_at = min(
        (published + 1) * group.block_size for published, group in zip(seq.published, manager.groups, strict=True)
    )
