"""Offering full, committed blocks to the prefix index."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from pagedkv.errors import PendingCopyError

if TYPE_CHECKING:
    from pagedkv.manager import KVCacheManager
    from pagedkv.prefix import Link
    from pagedkv.sequence import SequenceState


def check_arrived(manager: KVCacheManager, seq: SequenceState, computed: int) -> None:
    """Raises unless the content of every block below `computed` that is not published yet has been brought."""
    for group, table in zip(manager.groups, seq.tables, strict=True):
        for block in table[seq.published // group.block_size : -(-computed // group.block_size)]:
            if manager.transfers.is_pending(block):
                raise PendingCopyError(f"block {block} of sequence {seq.seq_id!r} waits for take_copies or take_swaps")


def publish(manager: KVCacheManager, seq: SequenceState) -> None:
    """Publishes the blocks that committed tokens with known ids have filled, and notes when the next one will be."""
    chunk = manager.hasher.chunk
    computed, known = seq.num_computed, len(seq.tokens)
    if computed < known:
        known = computed
    start, stop, hashed = seq.published // chunk, known // chunk, seq.num_links
    links = manager.hasher.grow(seq.tip, hashed, seq.tokens, seq.keys, stop)
    if links:
        seq.tip, seq.num_links = links[-1], stop
    if start != hashed:
        links = seq.links(start)
    for number, table in enumerate(seq.tables):
        _publish_group(manager, seq, number, table, known, links, start)
    seq.published = known
    seq.publish_at = (stop + 1) * chunk


def _publish_group(
    manager: KVCacheManager,
    seq: SequenceState,
    number: int,
    table: array[int],
    known: int,
    links: list[Link],
    start: int,
) -> None:
    """links: those of the chunks from `start` on."""
    pool, group, suffix = manager.pool, manager.groups[number], manager.lookup.suffixes[number]
    hashes, publish_checked, partial_hits = pool.hashes, pool.publish_checked, manager.lookup.partial_hits
    size, per_block = group.block_size, group.chunks_per_block
    for index in range(seq.published // size, known // size):
        block = table[index]
        if block and hashes[block] is None:
            link = links[(index + 1) * per_block - 1 - start]
            if pool.events is None:
                publish_checked(block, link.hash + suffix, link)
            else:
                _publish_with_event(manager, seq, number, index, link)
            if link.parent is not None:
                link.parent.next = link
            if partial_hits:
                manager.lookup.add_child(number, block, link)


def _publish_with_event(manager: KVCacheManager, seq: SequenceState, number: int, index: int, link: Link) -> None:
    group, suffix = manager.groups[number], manager.lookup.suffixes[number]
    above: Link | None = link
    for _ in range(group.chunks_per_block):
        above = above.parent if above else None
    tokens = seq.tokens[index * group.block_size : (index + 1) * group.block_size]
    parent = above.hash + suffix if above else None
    manager.pool.publish_checked(seq.tables[number][index], link.hash + suffix, link, parent, tokens)
