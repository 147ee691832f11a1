"""Offering full, committed blocks to the prefix index."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pagedkv.errors import PendingCopyError

if TYPE_CHECKING:
    from pagedkv.manager import KVCacheManager
    from pagedkv.prefix import Link
    from pagedkv.sequence import SequenceState


def check_arrived(manager: KVCacheManager, seq: SequenceState, computed: int) -> None:
    """Raises unless the content of every block below `computed` that is not published yet has been brought."""
    for number, (group, table) in enumerate(zip(manager.groups, seq.tables, strict=True)):
        for block in table[seq.published[number] : -(-computed // group.block_size)]:
            if manager.transfers.is_pending(block):
                raise PendingCopyError(f"block {block} of sequence {seq.seq_id!r} waits for take_copies or take_swaps")


def publish(manager: KVCacheManager, seq: SequenceState) -> None:
    """Publishes the blocks that committed tokens with known ids have filled, and notes when the next one will be."""
    pool, groups, first = manager.pool, manager.groups, seq.published
    known = min(seq.num_computed, seq.num_known)
    full = tuple(max(known // group.block_size, done) for group, done in zip(groups, first, strict=True))
    num_links = max(count * group.chunks_per_block for count, group in zip(full, groups, strict=True))
    if num_links > seq.num_links:
        fresh = manager.hasher.grow(seq.tip, seq.num_links, seq.tokens, seq.keys, num_links)
        seq.tip, seq.num_links = fresh[-1], num_links
    start = min(count * group.chunks_per_block for count, group in zip(first, groups, strict=True))
    links = seq.links(start)
    for number, (group, suffix) in enumerate(zip(groups, manager.lookup.suffixes, strict=True)):
        per_block, table = group.chunks_per_block, seq.tables[number]
        for index in range(first[number], full[number]):
            block = table[index]
            if block and not pool.is_published(block):
                link = links[(index + 1) * per_block - 1 - start]
                if pool.events is None:
                    pool.publish_checked(block, link.hash + suffix, link)
                else:
                    _publish_with_event(manager, seq, number, index, link)
                manager.lookup.add_child(number, block, link)
    seq.published = full
    seq.publish_at = min((count + 1) * group.block_size for count, group in zip(full, groups, strict=True))


def _publish_with_event(manager: KVCacheManager, seq: SequenceState, number: int, index: int, link: Link) -> None:
    group, suffix = manager.groups[number], manager.lookup.suffixes[number]
    above: Link | None = link
    for _ in range(group.chunks_per_block):
        above = above.parent if above else None
    tokens = seq.tokens[index * group.block_size : (index + 1) * group.block_size]
    parent = above.hash + suffix if above else None
    manager.pool.publish_checked(seq.tables[number][index], link.hash + suffix, link, parent, tokens)
