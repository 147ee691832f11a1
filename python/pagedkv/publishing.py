"""Offering full, committed blocks to the prefix index."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from pagedkv.errors import PendingCopyError
from pagedkv.prefix import same_prefix
from pagedkv.token_ids import unpack_tokens

if TYPE_CHECKING:
    from pagedkv.groups import Group
    from pagedkv.manager import KVCacheManager
    from pagedkv.prefix import Link
    from pagedkv.sequence import SequenceState


def check_arrived(manager: KVCacheManager, seq: SequenceState) -> None:
    """Raises unless what copies and swaps had to bring into the sequence's blocks is there, or on its way."""
    for number, index in seq.awaited:
        table = seq.tables[number]
        if index < len(table) and manager.transfers.is_pending(table[index]):
            raise PendingCopyError(
                f"block {table[index]} of sequence {seq.seq_id!r} waits for take_copies or take_swaps"
            )
    seq.awaited.clear()


def new_links(manager: KVCacheManager, seq: SequenceState, computed: int) -> list[Link]:
    """The links of chunks that `computed` tokens fill and that were not hashed yet; changes nothing."""
    known = min(computed, len(seq.tokens))
    return manager.hasher.grow(seq.tip, seq.num_links, seq.tokens, seq.keys, known // manager.hasher.chunk)


def publish(manager: KVCacheManager, seq: SequenceState, links: list[Link]) -> None:
    """Publishes the blocks that committed tokens with known ids have filled, and notes when the next one will be.

    links: what `new_links` gave.
    """
    chunk = manager.hasher.chunk
    known = min(seq.num_computed, len(seq.tokens))
    start, stop, hashed = seq.published // chunk, known // chunk, seq.num_links
    if links:
        seq.tip, seq.num_links = links[-1], stop
    if start != hashed:
        links = seq.links(start)
    for number, table in enumerate(seq.tables):
        _publish_group(manager, seq, number, table, known, links, start)
    if links:
        seq.tip = links[-1]
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
    """links: those of the chunks from `start` on; equal ones of the index take their places."""
    pool, group, suffix = manager.pool, manager.groups[number], manager.lookup.suffixes[number]
    hashes, contents, publish_checked = pool.hashes, pool.contents, pool.publish_checked
    size, per_block, partial_hits = group.block_size, group.chunks_per_block, manager.lookup.partial_hits
    for index in range(seq.published // size, known // size):
        block = table[index]
        if block and hashes[block] is None:
            at = (index + 1) * per_block - 1 - start
            link = links[at]
            if publish_checked(block, link.hash + suffix, link, same_prefix):
                if pool.events is not None:
                    pool.events.append(_stored(group, suffix, link))
            elif contents[block] is not link:
                # one object for one content: the comparison of what follows ends at once
                link = links[at] = contents[block]
                if at + 1 < len(links):
                    links[at + 1].parent = link
            if link.parent is not None:
                link.parent.next = link
            if partial_hits:
                manager.lookup.add_child(number, block, link)


def _stored(group: Group, suffix: bytes, link: Link) -> tuple[Any, ...]:
    parts: list[Link] = []
    above: Link | None = link
    for _ in range(group.chunks_per_block):
        assert above is not None
        parts.append(above)
        above = above.parent
    tokens = unpack_tokens(b"".join(part.tokens for part in reversed(parts)))
    return ("stored", link.hash + suffix, above.hash + suffix if above else None, tokens)
