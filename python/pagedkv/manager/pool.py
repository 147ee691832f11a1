"""BlockPool: blocks with their index, and checks for people with a manager of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pagedkv.errors import BlockReferenceError, OutOfBlocksError, UnknownBlockError, integer
from pagedkv.manager.blocks import HASHED, Blocks
from pagedkv.manager.index import PrefixIndex


class BlockPool(Blocks):
    """`num_blocks` reference-counted blocks, block 0 being the null block, which is never handed out or published.

    Free blocks keep their hashes until they are reused: those without one go first (last freed, first reused), then
    those with one (least recently used first). A freed block whose hash another block carries too is among the first.

    Methods that take ids check them first: `UnknownBlockError`, `BlockReferenceError` and `OutOfBlocksError` leave the
    pool as it was.

    >>> pool = BlockPool(4)
    >>> first, second = pool.get_new_blocks(2)
    >>> pool.publish(first, b"hash of what it holds")
    >>> pool.free_blocks([second, first])
    >>> pool.cached_block(b"hash of what it holds"), pool.num_free
    (1, 3)
    """

    def __init__(self, num_blocks: int, *, record_events: bool = False) -> None:
        super().__init__(num_blocks)
        self.index = PrefixIndex(self, record_events=record_events)

    @property
    def num_published(self) -> int:
        """Blocks that carry a hash, used or free."""
        return sum(map(self.flags.count, range(HASHED, 256, 2)))

    @property
    def num_evictions(self) -> int:
        """Hashes that died with the reuse of their block, or by `evict`."""
        return self.index.num_evictions

    @property
    def contents(self) -> Sequence[Any]:
        """What was published with each block, to be read."""
        return self.index.contents

    def __repr__(self) -> str:
        used = self.num_usable - self.num_free
        return f"BlockPool({used} of {self.num_usable} blocks used, {self.num_published} published)"

    def get_new_blocks(self, count: int) -> list[int]:
        """Hand out `count` blocks with one reference each; the hashes they carried die."""
        return self.take(integer("count", count, 0))

    def take(self, count: int) -> list[int]:
        """`get_new_blocks` of a count that was checked."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks asked for, {self.num_free} are free")
        taken: list[int] = []
        if count == 0:
            return taken
        hashed: list[int] = []
        following, refs, flags = self._next, self.refs, self.flags
        block = following[0]
        for _ in range(count):
            refs[block] = 1
            if flags[block]:
                hashed.append(block)
            taken.append(block)
            block = following[block]
        following[0] = block
        self._prev[block] = 0
        self.num_free -= count
        if hashed:
            self.index.forget(hashed, reused=True)
        return taken

    def touch(self, block_ids: Sequence[int]) -> None:
        """Add a reference to each block, taking free ones out of the queue."""
        self.acquire(self._checked(block_ids))

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Drop a reference per entry. Give a sequence's blocks tail first, so that its tail is evicted first."""
        blocks = self._checked(block_ids)
        for block, times in Counter(blocks).items():
            if times > self.refs[block]:
                raise BlockReferenceError(
                    f"block {block} is freed {times} times but referenced {self.refs[block]} times"
                )
        for block in blocks:
            self.release_one(block)

    def publish(
        self,
        block_id: int,
        block_hash: bytes,
        content: Any = None,
        *,
        parent: bytes | None = None,
        tokens: Sequence[int] = (),
    ) -> None:
        """Let a referenced, completely written block be found by its hash. Equal blocks are all kept.

        content: what was hashed, kept in `contents` for a comparison on hits; parent, tokens: for the event alone.
        """
        (block,) = self._checked((block_id,))
        if self.refs[block] == 0:
            raise BlockReferenceError(f"block {block} is free and cannot be published")
        if self.is_published(block):
            if self.index.hashes[block] == block_hash:
                return
            raise BlockReferenceError(f"block {block} is published under another hash")
        if self.index.put(block, block_hash, content) and self.index.events is not None:
            self.index.events.append(("stored", block_hash, parent, tuple(tokens)))

    def cached_block(self, block_hash: bytes) -> int | None:
        """A block that carries the hash, one in use before a free one; None if there is none."""
        return next(iter(self.index.carriers(block_hash)), None)

    def evict(self, block_ids: Sequence[int]) -> None:
        """Make blocks forget their hashes; free ones among them are reused first from now on."""
        for block in self._checked(block_ids):
            if self.is_published(block):
                self.index.forget((block,))
                self.index.num_evictions += 1
                self.requeue(block)

    def reset(self) -> bool:
        """Forget every hash; False, and nothing changes, while a block is referenced or pinned."""
        if self.num_free != self.num_usable:
            return False
        self.index.clear()
        return True

    def take_events(self) -> list[tuple[Any, ...]]:
        """("stored", hash, parent, tokens), ("removed", hash), ("cleared",) since the last call, in order."""
        events = self.index.events
        if not events:
            return []
        self.index.events = []
        return events

    def _checked(self, block_ids: Iterable[int]) -> list[int]:
        blocks = []
        for block in block_ids:
            if not hasattr(block, "__index__") or not 0 < block < self.num_blocks:
                raise UnknownBlockError(f"block id: expected 1..{self.num_blocks - 1}, got {block!r}")
            blocks.append(int(block))
        return blocks

    def check_integrity(self) -> None:
        """Raise IntegrityError unless queue, counts, pins and hashes agree."""
        super().check_integrity()
        self.index.check_integrity()
