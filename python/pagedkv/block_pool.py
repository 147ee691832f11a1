"""Physical blocks: a free queue, reference counts, pins and the prefix index. Integers in, integers out; no torch.

State lies in flat int64 arrays indexed by block id, each seen twice: through `array.array` for single entries (a list's
speed) and through numpy for whole tables (0.2 us for 128 entries; int32 indices would take 4x longer).
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pagedkv.errors import (
    BlockReferenceError,
    IntegrityError,
    InvalidArgumentError,
    OutOfBlocksError,
    UnknownBlockError,
    integer,
)

Ids = npt.NDArray[np.int64]
NULL_BLOCK = 0
MAX_BLOCKS = 2**31  # block tables hold 32-bit ids
# Below this many ids a Python loop is faster than the fixed cost of numpy calls.
_BULK = 12
# Flags of a block, so that one gather tells whether a table can be given back in bulk.
_HASHED, _SHARED, _TWIN, _PINNED = 1, 2, 4, 8


def _equal(content: Any, other: Any) -> bool:
    return content is other or bool(content == other)


class BlockPool:
    """`num_blocks` blocks, block 0 being the null block, which is never handed out, freed or published.

    A block is free exactly when its reference count is 0 and nothing pins it; it keeps its hash, and can be hit, until
    it is handed out again. The free queue is a doubly linked list with its ends at entry 0: blocks without a hash join
    it at the front, blocks with one at the back. Of blocks with equal hashes and contents (twins) the back keeps one: a
    freed one joins the front, and another that is free counts as just used. A fresh pool hands out 1, 2, 3, ...

    Methods that take ids check them first: `UnknownBlockError`, `BlockReferenceError` and `OutOfBlocksError` leave the
    pool as it was.
    """

    def __init__(self, num_blocks: int, *, record_events: bool = False) -> None:
        self.num_blocks = num_blocks = integer(
            "num_blocks", num_blocks, 2, " (one is the null block)", maximum=MAX_BLOCKS
        )
        self.refs = array("q", bytes(8 * num_blocks))
        self.refs_np: Ids = np.frombuffer(self.refs, np.int64)
        self._flags = bytearray(num_blocks)
        self._flags_np = np.frombuffer(self._flags, np.uint8)
        self.hashes: list[bytes | None] = [None] * num_blocks
        self.contents: list[Any] = [None] * num_blocks
        self.index: dict[bytes, int | list[int]] = {}
        self.pins: dict[int, int] = {}
        self.events: list[tuple[Any, ...]] | None = [] if record_events else None
        self.num_evictions = 0
        # the last hashes that died, as many as there are blocks: they explain misses
        self.evicted: deque[bytes] = deque(maxlen=num_blocks)
        self.on_unpublish: Callable[[list[tuple[int, Any]]], None] | None = None
        self._link_fresh()

    def _link_fresh(self) -> None:
        n = self.num_blocks
        self._next = array("q", [*range(1, n), 0])
        self._prev = array("q", [n - 1, *range(n - 1)])
        self._view_links()
        self.num_free = n - 1

    def _view_links(self) -> None:
        self._next_np: Ids = np.frombuffer(self._next, np.int64)
        self._prev_np: Ids = np.frombuffer(self._prev, np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.endswith("_np")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.refs_np = np.frombuffer(self.refs, np.int64)
        self._flags_np = np.frombuffer(self._flags, np.uint8)
        self._view_links()

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    def __repr__(self) -> str:
        used = self.num_usable - self.num_free
        return f"BlockPool({used} of {self.num_usable} blocks used, {self.num_published} published)"

    # The free queue.

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _link(self, block: int) -> None:
        """Puts a free block where its hash says: at the back with one, at the front without or if a twin stays."""
        flags = self._flags[block]
        if flags & _TWIN:
            self._keep_twin(block)
        if flags == _HASHED:
            before, after = self._prev[0], 0
        else:
            before, after = 0, self._next[0]
        self._prev[block], self._next[block] = before, after
        self._next[before] = block
        self._prev[after] = block
        self.num_free += 1

    def _keep_twin(self, block: int) -> None:
        """The first of the others is the one to stay; `block` becomes the last of them."""
        block_hash = self.hashes[block]
        assert block_hash is not None
        known, content = self.index[block_hash], self.contents[block]
        assert isinstance(known, list)
        if known[-1] != block:
            known.remove(block)
            known.append(block)
        kept = next(other for other in known if _equal(self.contents[other], content))
        self._requeue(kept)

    def _requeue(self, block: int) -> None:
        """A hashed block counts as just used, if it is free."""
        if self.refs[block] == 0 and block not in self.pins:
            self._unlink(block)
            before = self._prev[0]
            self._prev[block], self._next[block] = before, 0
            self._next[before] = self._prev[0] = block
            self.num_free += 1

    # Handing out and taking back.

    def get_new_blocks(self, count: int) -> list[int]:
        """Hands out `count` blocks with one reference each; the hashes they carried die."""
        if not hasattr(count, "__index__") or count < 0:
            raise InvalidArgumentError(f"count: expected an int of at least 0, got {count!r}")
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks asked for, {self.num_free} are free")
        if count == 0:
            return []
        blocks, hashed = [], []
        following, refs, flags = self._next, self.refs, self._flags
        block = following[0]
        for _ in range(count):
            refs[block] = 1
            if flags[block]:
                hashed.append(block)
            blocks.append(block)
            block = following[block]
        if hashed:
            self._unpublish(hashed)
            self.num_evictions += len(hashed)
        following[0] = block
        self._prev[block] = 0
        self.num_free -= count
        return blocks

    def touch(self, block_ids: Sequence[int]) -> None:
        """Adds a reference to each block, taking free ones out of the queue."""
        self.acquire(self._checked(block_ids))

    def free_blocks(self, block_ids: Sequence[int]) -> None:
        """Drops a reference per entry. Give a sequence's blocks tail first, so that its tail is evicted first."""
        blocks = self._checked(block_ids)
        for block, times in Counter(blocks).items():
            if times > self.refs[block]:
                raise BlockReferenceError(
                    f"block {block} is freed {times} times but referenced {self.refs[block]} times"
                )
        for block in blocks:
            self._release_one(block)

    def acquire(self, block_ids: Sequence[int] | array[int]) -> None:
        """`touch` without checks; null blocks and the negative ids of blocks to come are skipped.

        An array must name distinct blocks.
        """
        if isinstance(block_ids, array) and len(block_ids) >= _BULK:
            blocks = _real(block_ids)
            counts = self.refs_np[blocks]
            if counts.all():
                self.refs_np[blocks] = counts + 1
                self._flags_np[blocks] |= _SHARED
                return
        refs, flags = self.refs, self._flags
        for block in block_ids:
            if block > 0:
                count = refs[block]
                if count:
                    flags[block] |= _SHARED
                elif not flags[block] & _PINNED:
                    self._unlink(block)
                refs[block] = count + 1

    def _release_one(self, block: int) -> None:
        left = self.refs[block] - 1
        self.refs[block] = left
        if left == 1:
            self._flags[block] &= ~_SHARED
        elif left == 0 and not self._flags[block] & _PINNED:
            self._link(block)

    def release(self, blocks: Ids) -> None:
        """`free_blocks` without checks for distinct non-null ids, the last of which is reused first."""
        if len(blocks) < _BULK or self.pins:
            for block in reversed(blocks.tolist()):
                self._release_one(block)
            return
        flags = self._flags_np[blocks]
        values = flags.tobytes()
        num_hashed = values.count(_HASHED)
        if num_hashed + values.count(0) < len(blocks):
            for block in blocks[flags >= _TWIN][::-1].tolist():
                self._release_one(block)
            shared = blocks[(flags >= _SHARED) & (flags < _TWIN)]
            counts = self.refs_np[shared] - 1
            self.refs_np[shared] = counts
            self._flags_np[shared[counts == 1]] &= _HASHED
            blocks, flags = blocks[flags < _SHARED], flags[flags < _SHARED]
        self._release_sole(blocks, flags, num_hashed)

    def _release_sole(self, blocks: Ids, flags: npt.NDArray[np.uint8], num_hashed: int) -> None:
        """Blocks of one owner that nothing pins, in bulk."""
        self.refs_np[blocks] = 0
        if num_hashed < len(blocks):
            if flags[:num_hashed].all():  # as in a table whose last blocks are not full
                front, blocks = blocks[num_hashed:], blocks[:num_hashed]
            else:
                front, blocks = blocks[flags == 0], blocks[flags == _HASHED]
            for block in reversed(front.tolist()):
                self._link(block)
        if num_hashed == 0:
            return
        # from the last to the first: the tail of the sequence is reused first
        first, last, before = int(blocks[-1]), int(blocks[0]), self._prev[0]
        self._next_np[blocks[1:]] = blocks[:-1]
        self._prev_np[blocks[:-1]] = blocks[1:]
        self._next[before], self._prev[first] = first, before
        self._next[last], self._prev[0] = 0, last
        self.num_free += num_hashed

    def num_taken_from_free(self, block_ids: array[int]) -> int:
        """How many blocks of a table `acquire` would take out of the free queue."""
        blocks = _real(block_ids)
        return int(np.count_nonzero((self.refs_np[blocks] == 0) & (self._flags_np[blocks] < _PINNED)))

    # Pins: a pinned block is neither free nor handed out, whatever its reference count.

    def pin(self, block: int) -> None:
        if self.refs[block] == 0 and block not in self.pins:
            self._unlink(block)
        self.pins[block] = self.pins.get(block, 0) + 1
        self._flags[block] |= _PINNED

    def unpin(self, block: int) -> None:
        left = self.pins[block] - 1
        if left:
            self.pins[block] = left
            return
        del self.pins[block]
        self._flags[block] &= ~_PINNED
        if self.refs[block] == 0:
            self._link(block)

    # The prefix index.

    def publish(
        self,
        block_id: int,
        block_hash: bytes,
        content: Any = None,
        *,
        parent: bytes | None = None,
        tokens: Sequence[int] = (),
    ) -> None:
        """Lets a referenced, completely written block be found by its hash. Equal blocks are all kept.

        content: what was hashed, kept in `contents` for a comparison on hits; parent, tokens: for the event alone.
        """
        self._checked((block_id,))
        if self.refs[block_id] == 0:
            raise BlockReferenceError(f"block {block_id} is free and can not be published")
        if self._flags[block_id] & _HASHED:
            if self.hashes[block_id] == block_hash:
                return
            raise BlockReferenceError(f"block {block_id} is published under another hash")
        if self.publish_checked(block_id, block_hash, content) and self.events is not None:
            self.events.append(("stored", block_hash, parent, tuple(tokens)))

    def publish_checked(
        self, block: int, block_hash: bytes, content: Any, equal: Callable[[Any, Any], bool] = _equal
    ) -> bool:
        """`publish` without checks and events; whether nothing carried the hash. A twin's content is kept for both."""
        self.hashes[block] = block_hash
        self.contents[block] = content
        self._flags[block] |= _HASHED
        known = self.index.setdefault(block_hash, block)
        if known is block:  # the very object that was put in
            return True
        if not isinstance(known, list):
            known = self.index[block_hash] = [known]
        twin = next((other for other in known if equal(self.contents[other], content)), 0)
        known.append(block)
        if twin:
            self.contents[block] = self.contents[twin]
            self._flags[twin] |= _TWIN
            self._flags[block] |= _TWIN
        return False

    def cached_block(self, block_hash: bytes) -> int | None:
        """A block that carries the hash, one in use before a free one; None if there is none."""
        return next(iter(self.carriers(block_hash)), None)

    def carriers(self, block_hash: bytes) -> Iterable[int]:
        """The blocks that carry the hash, those in use before free ones."""
        known = self.index.get(block_hash, ())
        if isinstance(known, int):
            return (known,)
        return (block for in_use in (True, False) for block in known if (self.refs[block] > 0) == in_use)

    def evict(self, block_ids: Sequence[int]) -> None:
        """Makes blocks forget their hashes; free ones among them are reused first from now on."""
        for block in self._checked(block_ids):
            if self._flags[block] & _HASHED:
                queued = self.refs[block] == 0 and block not in self.pins
                if queued:
                    self._unlink(block)
                self.unpublish(block)
                self.num_evictions += 1
                if queued:
                    self._link(block)

    def unpublish(self, block: int) -> None:
        """Forgets the hash of a block that is not in the queue; a twin that is the last now belongs at the back."""
        if self._flags[block] & _HASHED:
            for last in self._unpublish((block,)):
                self._requeue(last)

    def _unpublish(self, blocks: Sequence[int]) -> list[int]:
        """Forgets hashes; gives the blocks that have no twin any more."""
        hashes, contents, flags, index = self.hashes, self.contents, self._flags, self.index
        gone, lasts = [], []
        for block in blocks:
            block_hash = hashes[block]
            assert block_hash is not None
            content = contents[block]
            gone.append((block, content))
            hashes[block] = contents[block] = None
            was_twin = flags[block] & _TWIN
            flags[block] &= ~(_HASHED | _TWIN)
            known = index.pop(block_hash)
            if isinstance(known, list):
                known.remove(block)
                index[block_hash] = known if len(known) > 1 else known[0]
                twins = (other for other in known if was_twin and _equal(contents[other], content))
                last = next(twins, 0)
                if last and not next(twins, 0):
                    flags[last] &= ~_TWIN
                    lasts.append(last)
                continue
            self.evicted.append(block_hash)
            if self.events is not None:
                self.events.append(("removed", block_hash))
        if self.on_unpublish is not None:
            self.on_unpublish(gone)
        return lasts

    def is_published(self, block: int) -> bool:
        return bool(self._flags[block] & _HASHED)

    @property
    def num_published(self) -> int:
        return int(np.count_nonzero(self._flags_np & _HASHED))

    def reset(self) -> bool:
        """Forgets every hash; False, and nothing changes, while a block is referenced or pinned."""
        if self.num_free != self.num_usable:
            return False
        self.index.clear()
        self.evicted.clear()
        self.hashes = [None] * self.num_blocks
        if self.on_unpublish is not None:
            self.on_unpublish(list(enumerate(self.contents)))
        self.contents = [None] * self.num_blocks
        self._flags_np[:] = 0
        self._link_fresh()
        if self.events is not None:
            self.events.append(("cleared",))
        return True

    # Checks.

    def _checked(self, block_ids: Iterable[int]) -> list[int]:
        blocks = []
        for block in block_ids:
            if not hasattr(block, "__index__") or not 0 < block < self.num_blocks:
                raise UnknownBlockError(f"block id: expected 1..{self.num_blocks - 1}, got {block!r}")
            blocks.append(int(block))
        return blocks

    def free_ids(self) -> list[int]:
        """The free queue in the order of reuse."""
        order: list[int] = []
        block = self._next[0]
        while block and len(order) <= self.num_blocks:
            order.append(block)
            block = self._next[block]
        return order

    def check_integrity(self) -> None:
        """Raises IntegrityError unless queue, counts, pins and index agree."""
        order = np.array(self.free_ids(), np.int64)
        queued = np.zeros(self.num_blocks, bool)
        queued[order] = True
        free = self.refs_np == 0
        free[[0, *self.pins]] = False
        _require(len(order) == self.num_free == np.count_nonzero(queued), "the free queue repeats or loses a block")
        _require(bool((queued == free).all()), "the free queue and the reference counts disagree")
        _require(
            bool((self.refs_np >= 0).all()) and self.refs[0] == 0, "a reference count is negative, or counts block 0"
        )
        before = np.concatenate((np.zeros(1, np.int64), order))
        after = np.concatenate((order, np.zeros(1, np.int64)))
        _require(bool((self._prev_np[after] == before).all()), "the free queue's two directions disagree")
        _require(all(count > 0 for count in self.pins.values()), "a pin count is not positive")
        indexed = 0
        for block_hash, known in self.index.items():
            blocks = known if isinstance(known, list) else [known]
            for block in blocks:
                equal = sum(_equal(self.contents[block], self.contents[other]) for other in blocks)
                _require((self._flags[block] & _TWIN != 0) == (equal > 1), "twin flags and contents disagree")
            _require(len(set(blocks)) == len(blocks) > 0, "the index repeats a block")
            _require(all(self.hashes[block] == block_hash for block in blocks), "an indexed block carries another hash")
            indexed += len(blocks)
        carried = [block for block, block_hash in enumerate(self.hashes) if block_hash is not None]
        _require(indexed == len(carried), "a block carries a hash that is not indexed")
        _require(carried == np.flatnonzero(self._flags_np & _HASHED).tolist(), "hash flags and hashes disagree")
        _require(
            bool(((self._flags_np & _SHARED != 0) == (self.refs_np > 1)).all()), "shared flags and counts disagree"
        )
        _require(sorted(self.pins) == np.flatnonzero(self._flags_np & _PINNED).tolist(), "pin flags and pins disagree")


def _real(table: array[int]) -> Ids:
    blocks: Ids = np.array(table, np.int64)
    return blocks[blocks > 0]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise IntegrityError(message)
