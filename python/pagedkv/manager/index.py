"""The prefix index: which blocks hold what, by hash. Publishing, look-up and unpublishing live here."""

from __future__ import annotations

import operator
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from pagedkv.manager.blocks import HASHED, Blocks, require
from pagedkv.manager.groups import Group
from pagedkv.manager.hashing import Link, adopt, same_prefix
from pagedkv.manager.tokens import TOKEN_BYTES, unpack_tokens


class PrefixIndex:
    """Hashes of blocks, and what was hashed.

    Groups share one chain of links and differ by a suffix of the hash, so that each chunk is hashed once for all of
    them. Blocks with equal hashes are all indexed; those with equal contents too share the content object (for links:
    the comparison of all that follows then ends at once), and are twins in the free queue.

    Attributes:
        hashes, contents: by block.
        evicted: the last hashes that died, as many as there are blocks: they explain misses.
        num_evictions: hashes that died with the reuse of their block, or by `evict`.
        keeps_children: blocks are found by their first token too, for partial hits.
    """

    def __init__(self, blocks: Blocks, *, record_events: bool = False) -> None:
        self.blocks = blocks
        self.hashes: list[bytes | None] = [None] * blocks.num_blocks
        self.contents: list[Any] = [None] * blocks.num_blocks
        self.by_hash: dict[bytes, int | list[int]] = {}
        self.events: list[tuple[Any, ...]] | None = [] if record_events else None
        self.evicted: deque[bytes] = deque(maxlen=blocks.num_blocks)
        self.num_evictions = 0
        self.keeps_children = False
        self.children: dict[tuple[bytes, bytes], dict[int, None]] = {}

    # Publishing.

    def put(self, block: int, block_hash: bytes, content: Any) -> bool:
        """Enter a referenced block that carries no hash; whether nothing else carries this one."""
        self.hashes[block] = block_hash
        self.contents[block] = content
        self.blocks.flags[block] |= HASHED
        known = self.by_hash.setdefault(block_hash, block)
        if known is block:  # the very object that was put in
            return True
        self._join(known, block, operator.eq)
        return False

    def _join(self, known: int | list[int], block: int, equal: Callable[[Any, Any], bool]) -> None:
        """Add a block to those that carry its hash already."""
        contents = self.contents
        if not isinstance(known, list):
            block_hash = self.hashes[block]
            assert block_hash is not None
            known = self.by_hash[block_hash] = [known]
        for other in known:
            if contents[other] is contents[block] or equal(contents[other], contents[block]):
                contents[block] = contents[other]
                self.blocks.join_twins(block, other)
                break
        known.append(block)

    def publish(self, group: Group, table: array[int], span: tuple[int, int], links: list[Link], start: int) -> None:
        """Let blocks span[0]..span[1]-1 of a group's table be found.

        links: of the chunks from `start` on; where an equal content is known its link takes the place of ours.
        """
        hashes, contents, flags, events = self.hashes, self.contents, self.blocks.flags, self.events
        enter, suffix, per_block = self.by_hash.setdefault, group.suffix, group.chunks_per_block
        at = (span[0] + 1) * per_block - 1 - start
        for block in table[span[0] : span[1]]:
            if block and hashes[block] is None:
                link = links[at]
                # as `put`, whose call would cost a tenth
                hashes[block] = block_hash = link.hash + suffix
                contents[block] = link
                flags[block] |= HASHED
                known = enter(block_hash, block)
                if known is not block:
                    self._join(known, block, same_prefix)
                    if contents[block] is not link:
                        link = links[at] = contents[block]
                        if at + 1 < len(links):
                            links[at + 1].parent = link
                elif events is not None:
                    events.append(_stored(group, link))
                if link.parent is not None:
                    link.parent.next = link
                if self.keeps_children:
                    self.children.setdefault(_child_key(suffix, link), {})[block] = None
            at += per_block

    # Look-up.

    def carriers(self, block_hash: bytes) -> Iterable[int]:
        """The blocks that carry a hash, those in use before free ones."""
        known = self.by_hash.get(block_hash, ())
        if isinstance(known, int):
            return (known,)
        refs = self.blocks.refs
        return (block for in_use in (True, False) for block in known if (refs[block] > 0) == in_use)

    def block_at(self, group: Group, chain: list[Link], block: int) -> int:
        """A cached block of a group that holds block `block` of the chain, or 0.

        It is one only if everything that was hashed is equal: a collision is a miss.
        """
        last = (block + 1) * group.chunks_per_block - 1
        link = chain[last]
        for candidate in self.carriers(link.hash + group.suffix):
            content = self.contents[candidate]
            if content is link:
                return candidate
            if content is not None and same_prefix(content, link):
                adopt(chain, last, content)
                return candidate
        return 0

    def published_as(self, link: Link) -> Link:
        """The equal link that blocks of the first group were published with, or this one."""
        for block in self.carriers(link.hash):
            content: Link | None = self.contents[block]
            if content is not None and same_prefix(content, link):
                return content
        return link

    def children_of(self, group: Group, parent: Link | None, first_token: bytes) -> Iterable[int]:
        """Blocks of a group that continue a prefix with this token."""
        return self.children.get(((parent.hash if parent else b"") + group.suffix, first_token), ())

    # Unpublishing.

    def forget(self, blocks: Sequence[int], *, reused: bool = False) -> None:
        """Let blocks carry no hash any more. reused: they were free until now, and count as evicted."""
        self.num_evictions += reused and len(blocks)
        hashes, contents, by_hash = self.hashes, self.contents, self.by_hash
        for block in blocks:
            block_hash, content = hashes[block], contents[block]
            assert block_hash is not None
            hashes[block] = contents[block] = None
            if self.keeps_children and isinstance(content, Link):
                key = _child_key(block_hash[len(content.hash) :], content)
                self.children[key].pop(block)
                if not self.children[key]:
                    del self.children[key]
            known = by_hash.pop(block_hash)
            if isinstance(known, list):
                known.remove(block)
                by_hash[block_hash] = known if len(known) > 1 else known[0]
                self.blocks.forget_hash(block, known, reused=reused)
                continue
            self.blocks.forget_hash(block, reused=reused)
            if isinstance(content, Link) and content.parent is not None and content.parent.next is content:
                content.parent.next = None
            self.evicted.append(block_hash)
            if self.events is not None:
                self.events.append(("removed", block_hash))

    def clear(self) -> None:
        """Forget every hash, of blocks that are all free."""
        for content in self.contents:
            if isinstance(content, Link) and content.parent is not None:
                content.parent.next = None
        self.by_hash.clear()
        self.evicted.clear()
        self.children.clear()
        self.hashes = [None] * len(self.hashes)
        self.contents = [None] * len(self.contents)
        self.blocks.start_afresh()
        if self.events is not None:
            self.events.append(("cleared",))

    def check_integrity(self) -> None:
        """Raise IntegrityError unless hashes, contents and the flags of the blocks agree."""
        indexed = 0
        for block_hash, known in self.by_hash.items():
            carriers = known if isinstance(known, list) else [known]
            require(len(set(carriers)) == len(carriers) > 0, "the index repeats a block")
            require(all(self.hashes[block] == block_hash for block in carriers), "an indexed block has another hash")
            for block in carriers:
                self.blocks.check_twins([other for other in carriers if self.contents[other] is self.contents[block]])
            indexed += len(carriers)
        hashed = [block for block, block_hash in enumerate(self.hashes) if block_hash is not None]
        require(indexed == len(hashed), "a block carries a hash that is not indexed")
        flagged = [block for block, flags in enumerate(self.blocks.flags) if flags & HASHED]
        require(hashed == flagged, "hash flags and hashes disagree")


def _child_key(suffix: bytes, link: Link) -> tuple[bytes, bytes]:
    """Hash of the parent in its group, first token."""
    return (link.parent.hash if link.parent else b"") + suffix, link.tokens[:TOKEN_BYTES]


def _stored(group: Group, link: Link) -> tuple[Any, ...]:
    chunks: list[bytes] = []
    above: Link | None = link
    for _ in range(group.chunks_per_block):
        assert above is not None
        chunks.append(above.tokens)
        above = above.parent
    tokens = unpack_tokens(b"".join(reversed(chunks)))
    return ("stored", link.hash + group.suffix, above.hash + group.suffix if above else None, tokens)
