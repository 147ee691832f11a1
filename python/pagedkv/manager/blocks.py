"""Physical blocks: a free queue, reference counts, pins and twins. Ids in, ids out; what blocks hold is the index's.

State lies in flat arrays indexed by block id, each seen twice: through `array.array` for single entries (a list's
speed) and through numpy for whole tables (0.2 us for 128 entries; int32 indices would take 4x longer). Without numpy
loops do the same.
"""

from __future__ import annotations

import functools
from array import array
from collections.abc import Sequence
from typing import Any

from pagedkv.errors import IntegrityError, integer

NULL_BLOCK = 0
MAX_BLOCKS = 2**31  # block tables hold 32-bit ids
# Flags of a block, so that one gather tells whether a table can be given back in bulk.
HASHED, TWIN, SHARED, PINNED = 1, 2, 4, 8
# Below this many ids a Python loop is faster than the fixed cost of numpy calls.
_BULK = 12


@functools.cache
def numpy() -> Any:
    """The module, or None where it is missing; imported when it is first asked for, as that takes 0.1 s."""
    try:
        import numpy
    except ImportError:
        return None
    return numpy


class Blocks:
    """`num_blocks` blocks, block 0 being the null block, which is never handed out.

    A block is free exactly when its reference count is 0 and nothing pins it; it keeps its hash, and can be hit, until
    it is handed out again. The free queue is a doubly linked list with its ends at entry 0: blocks without a hash join
    it at the front, blocks with one at the back. Of blocks with equal hashes and contents (twins) the back keeps one,
    the first that was published, and none while another is in use. Fresh blocks come as 1, 2, 3, ...
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = integer("num_blocks", num_blocks, 2, " (one is the null block)", maximum=MAX_BLOCKS)
        self.start_afresh()

    def start_afresh(self) -> None:
        """Every block is free and carries no hash."""
        n = self.num_blocks
        self.refs = array("q", bytes(8 * n))
        self.flags = bytearray(n)
        self.pins: dict[int, int] = {}
        # of twins: the one to keep, which stands for them all; and how many of those it stands for are in use
        self._kept, self._num_used = array("q", bytes(8 * n)), array("q", bytes(8 * n))
        self._next = array("q", [*range(1, n), 0])
        self._prev = array("q", [n - 1, *range(n - 1)])
        self.num_free = n - 1
        self._view()

    def _view(self) -> None:
        self.np = np = numpy()
        if np:
            self._flags_np = np.frombuffer(self.flags, np.uint8)
            self._refs_np, self._next_np, self._prev_np, self._kept_np, self._num_used_np = (
                np.frombuffer(data, np.int64)
                for data in (self.refs, self._next, self._prev, self._kept, self._num_used)
            )

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if not name.endswith("np")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._view()  # of its own arrays

    @property
    def num_usable(self) -> int:
        return self.num_blocks - 1

    # The free queue.

    def _unlink(self, block: int) -> None:
        before, after = self._prev[block], self._next[block]
        self._next[before] = after
        self._prev[after] = before
        self.num_free -= 1

    def _insert(self, block: int, before: int, after: int) -> None:
        self._prev[block], self._next[block] = before, after
        self._next[before] = self._prev[after] = block
        self.num_free += 1

    def _insert_all(self, blocks: Any, *, at_front: bool) -> None:
        """Insert an array of numpy at one end of the queue, its first block outermost."""
        inward, outward, inward_np, outward_np = self._next, self._prev, self._next_np, self._prev_np
        if not at_front:
            inward, outward, inward_np, outward_np = outward, inward, outward_np, inward_np
        first, last, neighbour = int(blocks[0]), int(blocks[-1]), inward[0]
        inward_np[blocks[:-1]] = blocks[1:]
        outward_np[blocks[1:]] = blocks[:-1]
        inward[0], outward[first] = first, 0
        inward[last], outward[neighbour] = neighbour, last
        self.num_free += len(blocks)

    def _link(self, block: int) -> None:
        """Put a free block where its hash says: at the back with one, at the front without or if a twin stays."""
        flags = self.flags[block]
        if flags & TWIN:
            kept = self._kept[block]
            if not self._num_used[kept] and self.is_free(kept):
                if kept != block:
                    self._unlink(kept)
                self._insert(kept, self._prev[0], 0)
                if kept == block:
                    return
        elif flags & HASHED:
            self._insert(block, self._prev[0], 0)
            return
        self._insert(block, 0, self._next[0])

    def is_free(self, block: int) -> bool:
        return self.refs[block] == 0 and block not in self.pins

    def requeue(self, block: int) -> None:
        """Put a block, if it is free, where its flags of now say."""
        if self.is_free(block):
            self._unlink(block)
            self._link(block)

    # Handing out and taking back.

    def acquire(self, block_ids: Sequence[int] | array[int]) -> None:
        """A reference more for each block, free ones included; null blocks and the negative ids of blocks to come are
        skipped. An array must name distinct blocks."""
        if isinstance(block_ids, array) and len(block_ids) >= _BULK and self.np:
            blocks = self.np.array(block_ids)
            blocks = blocks[blocks > 0]
            counts = self._refs_np[blocks]
            if counts.all():
                self._refs_np[blocks] = counts + 1
                self._flags_np[blocks] |= SHARED
                return
        refs, flags = self.refs, self.flags
        for block in block_ids:
            if block > 0:
                count = refs[block]
                refs[block] = count + 1
                if count:
                    flags[block] |= SHARED
                    continue
                if flags[block] & TWIN:
                    self._num_used[self._kept[block]] += 1
                if not flags[block] & PINNED:
                    self._unlink(block)

    def release_one(self, block: int) -> None:
        left = self.refs[block] - 1
        self.refs[block] = left
        if left == 1:
            self.flags[block] &= ~SHARED
        elif left == 0:
            flags = self.flags[block]
            if flags & TWIN:
                self._num_used[self._kept[block]] -= 1
            if not flags & PINNED:
                self._link(block)

    def release(self, block_ids: Any) -> None:
        """A reference less for each of these distinct non-null blocks, no two of them twins; the last is reused first.

        block_ids: an array, of numpy too.
        """
        np = self.np
        if len(block_ids) < _BULK or self.pins or not np:
            for block in reversed(block_ids.tolist()):
                self.release_one(block)
            return
        blocks = np.frombuffer(block_ids, np.int64)
        flags = self._flags_np[blocks]
        values = flags.tobytes()
        num_hashed, num_plain = values.count(HASHED), values.count(0)
        if num_hashed + num_plain < len(blocks):
            is_sole = flags < SHARED
            self._release_shared(blocks[flags >= SHARED])
            blocks, flags = blocks[is_sole], flags[is_sole]
            values = flags.tobytes()
        self._refs_np[blocks] = 0
        if num_hashed == len(blocks):
            if num_hashed:
                self._insert_all(blocks, at_front=False)
            return
        if num_hashed + num_plain < len(blocks):
            back, front = self._part_twins(blocks, flags)
        elif values.count(HASHED, 0, num_hashed) == num_hashed:  # as in a table whose last blocks are not full
            back, front = blocks[:num_hashed], blocks[num_hashed:]
        else:
            back, front = blocks[flags > 0], blocks[flags == 0]
        if len(front) < _BULK:
            for block in reversed(front.tolist()):
                self._insert(block, 0, self._next[0])
        else:
            self._insert_all(front, at_front=True)
        if len(back):
            self._insert_all(back, at_front=False)

    def _release_shared(self, blocks: Any) -> None:
        counts = self._refs_np[blocks] - 1
        self._refs_np[blocks] = counts
        self._flags_np[blocks[counts == 1]] &= HASHED | TWIN

    def _part_twins(self, blocks: Any, flags: Any) -> tuple[Any, Any]:
        """As `_link`: of blocks that have just lost their last reference, those for the back and for the front."""
        stays = blocks * (flags > 0)
        is_twin = flags >= TWIN
        kept = self._kept_np[blocks[is_twin]]
        num_used = self._num_used_np[kept] - 1
        self._num_used_np[kept] = num_used
        stays[is_twin] = kept * (num_used == 0)
        for block in stays[(stays > 0) & (stays != blocks)].tolist():
            self._unlink(block)
        return stays[stays > 0], blocks[stays != blocks]

    def num_taken_from_free(self, block_ids: array[int]) -> int:
        """How many blocks of a table `acquire` would take out of the free queue."""
        if self.np:
            blocks = self.np.array(block_ids)
            return int(((self._refs_np[blocks] == 0) & (self._flags_np[blocks] < PINNED) & (blocks > 0)).sum())
        refs, flags = self.refs, self.flags
        return sum(block > 0 and refs[block] == 0 and flags[block] < PINNED for block in block_ids)

    # Pins: a pinned block is neither free nor handed out, whatever its reference count.

    def pin(self, block: int) -> None:
        if self.is_free(block):
            self._unlink(block)
        self.pins[block] = self.pins.get(block, 0) + 1
        self.flags[block] |= PINNED

    def unpin(self, block: int) -> None:
        left = self.pins[block] - 1
        if left:
            self.pins[block] = left
            return
        del self.pins[block]
        self.flags[block] &= ~PINNED
        if self.refs[block] == 0:
            self._link(block)

    # What the index says of a block.

    def is_published(self, block: int) -> bool:
        return bool(self.flags[block] & HASHED)

    def join_twins(self, block: int, other: int) -> None:
        """`block`, which is in use, carries what `other` carries."""
        if not self.flags[other] & TWIN:
            self.flags[other] |= TWIN
            self._kept[other] = other
            self._num_used[other] = self.refs[other] > 0
        self.flags[block] |= TWIN
        kept = self._kept[block] = self._kept[other]
        self._num_used[kept] += 1

    def forget_hash(self, block: int, others: Sequence[int] = (), *, reused: bool = False) -> None:
        """others: the blocks that carry the hash still. reused: it was free until now."""
        flags = self.flags[block]
        self.flags[block] = flags & ~(HASHED | TWIN)
        if not flags & TWIN:
            return
        kept = self._kept[block]
        was_used = self.refs[block] > 0 and not reused
        self._num_used[kept] -= was_used
        if kept == block:
            twins = [other for other in others if self._kept[other] == block and self.flags[other] & TWIN]
            for other in twins:
                self._kept[other] = kept = twins[0]
            self._num_used[kept] = self._num_used[block]
            self.requeue(kept)
        elif was_used and not self._num_used[kept]:
            self.requeue(kept)

    # Checks.

    def free_ids(self) -> list[int]:
        """The free queue in the order of reuse."""
        order: list[int] = []
        block = self._next[0]
        while block and len(order) <= self.num_blocks:
            order.append(block)
            block = self._next[block]
        return order

    def check_integrity(self) -> None:
        """Raise IntegrityError unless queue, counts, pins and flags agree."""
        order, blocks = self.free_ids(), range(self.num_blocks)
        require(len(order) == self.num_free == len(set(order)), "the free queue repeats or loses a block")
        free = [block for block in blocks[1:] if self.is_free(block)]
        require(sorted(order) == free, "the free queue and the reference counts disagree")
        require(min(self.refs) >= 0 == self.refs[0], "a reference count is negative, or counts block 0")
        back = all(self._prev[after] == before for before, after in zip([0, *order], [*order, 0], strict=True))
        require(back, "the free queue's two directions disagree")
        require(all(count > 0 for count in self.pins.values()), "a pin count is not positive")
        shared = all(bool(self.flags[block] & SHARED) == (self.refs[block] > 1) for block in blocks)
        require(shared, "shared flags and counts disagree")
        require(sorted(self.pins) == [block for block in blocks if self.flags[block] & PINNED], "pin flags disagree")

    def check_twins(self, twins: list[int]) -> None:
        """Raise IntegrityError unless these blocks, all that hold the same, are known as twins."""
        kept = {self._kept[block] if self.flags[block] & TWIN else 0 for block in twins}
        require(kept == {twins[0]} or (kept == {0} and len(twins) == 1), "twins and contents disagree")
        num_used = sum(self.refs[block] > 0 for block in twins)
        require(kept == {0} or self._num_used[twins[0]] == num_used, "used twins are counted wrongly")


def require(condition: bool, message: str) -> None:
    """Raise IntegrityError unless the condition holds."""
    if not condition:
        raise IntegrityError(message)
