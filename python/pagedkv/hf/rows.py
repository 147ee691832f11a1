"""The rows of a batch as sequences of the manager: slots for their next tokens, sharing, rollback. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import OutOfBlocksError
from .kv_pool import Pool

Ints = NDArray[np.int64]


class Rows:
    """Sequences of one batch.

    The manager hears of decoded tokens when a block is full: slots are granted to the end of a block, so that a step
    costs vector arithmetic, not a call per row. Rows that hold the same tokens follow a leader and own nothing until
    :meth:`split`.

    Attributes:
        leaders: [B] the row whose blocks each row uses.
        lengths: [B] tokens of each row; the newest may not be written yet.
        blocks: per group, per row: block ids.
        changed: rows whose blocks changed since the caller cleared it.
        hold: keep tokens uncommitted, so that a rollback finds what a window would give back.
    """

    def __init__(self, pool: Pool, batch: int, copies: int = 1) -> None:
        self.pool = pool
        self.block_size = pool.block_size
        self.seqs: list[int] = []
        self.leaders: Ints = np.arange(batch) // copies * copies
        self.lengths: Ints = np.zeros(batch, np.int64)
        self.blocks: list[list[list[int]]] = [[[] for _ in range(batch)] for _ in pool.windows]
        self.changed: set[int] = set(range(batch))
        self.hold = False
        self._known: Ints = np.zeros(batch, np.int64)  # tokens that the manager knows
        self._unsent: list[list[int]] = [[] for _ in range(batch)]  # ids of the tokens after those
        self._ids_known = True
        self._open = np.zeros(batch, bool)  # slots are granted to the end of the last block

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def _is_leader(self) -> NDArray[np.bool_]:
        own: NDArray[np.bool_] = self.leaders == np.arange(self.batch)
        return own

    @property
    def is_split(self) -> bool:
        """Every row has a sequence of its own."""
        return bool(self._is_leader.all())

    def start(self, prompts: Sequence[Sequence[int]] | None = None, extra_keys: Sequence[tuple[Any, ...]] = ()) -> Ints:
        """Register the rows. With prompts their cached prefixes are attached; returns the tokens found, [B]."""
        hits = np.zeros(self.batch, np.int64)
        manager = self.pool.manager
        for row, leader in enumerate(self.leaders.tolist()):
            self.seqs.append(self.pool.new_seq_id())
            if leader != row:
                hits[row] = hits[leader]
                continue
            manager.add(self.seqs[row], prompts[row] if prompts else [], extra_keys=extra_keys)
            if prompts:
                self._known[row] = len(prompts[row])
                allocation = manager.allocate_slots(self.seqs[row], 0)
                assert allocation is not None, "a hit takes no new block"
                hits[row] = allocation.num_cached_tokens
                self._set_blocks(row, allocation.block_ids)
        return hits

    def grow(self, counts: Ints, token_ids: list[list[int]] | None) -> Ints:
        """Make room for ``counts[row]`` more tokens of each row; returns the tokens of each that are held already, [B].

        Raises:
            OutOfBlocksError: the pool has too few blocks; nothing was changed.
        """
        self._note_ids(token_ids)
        held: Ints = self.lengths.copy()
        in_block = self._open & (self.lengths % self.block_size + counts <= self.block_size)
        in_block &= (self.lengths % self.block_size != 0) | (counts == 0)
        due = np.flatnonzero(~in_block & self._is_leader)
        done: list[int] = []
        for row in due.tolist():
            computed = self._grow(row, int(counts[row]))
            if computed is None:
                self._undo_growth(done, row, int(counts[row]))
            else:
                held[row] = max(held[row], computed)
                done.append(row)
        if done:
            self.pool.note_use()
        self.lengths += counts
        if not self.is_split:
            for row, leader in enumerate(self.leaders.tolist()):
                for blocks in self.blocks:
                    blocks[row] = blocks[leader]
            self.changed.update(range(self.batch))
        return held

    def _note_ids(self, token_ids: list[list[int]] | None) -> None:
        if not self.pool.prefix_caching or not self._ids_known:
            return
        self._ids_known = token_ids is not None
        for row, ids in enumerate(token_ids or []):
            # a prompt that start() registered comes again with the steps that compute it
            self._unsent[row].extend(ids[max(0, int(self._known[row] - self.lengths[row])) :])

    def _undo_growth(self, done: list[int], row: int, count: int) -> None:
        free = self.pool.manager.num_free_blocks
        for other in (*done, row):
            self.truncate(other, int(self.lengths[other]))
        length = int(self.lengths[row]) + count
        raise OutOfBlocksError(
            f"row {row} of {self.batch} needs {-(-length // self.block_size)} blocks for {length} tokens, {free} of "
            f"{self.pool.num_blocks - 1} blocks of {self.block_size} tokens are free: raise num_blocks or memory, "
            "send fewer or shorter rows, or drop a returned cache that holds blocks"
        )

    def _grow(self, row: int, count: int) -> int | None:
        """Returns the tokens that are held already; None where blocks are missing."""
        manager, seq = self.pool.manager, self.seqs[row]
        length = int(self.lengths[row])
        self._settle(row, commit=not self.hold)
        computed = manager.num_computed_tokens(seq)
        self._tell(row, length + count)
        allocation = manager.allocate_slots(seq, num_lookahead_tokens=-(length + count) % self.block_size)
        if allocation is None:
            return None
        self._set_blocks(row, allocation.block_ids)
        self._open[row] = True
        return computed

    def _set_blocks(self, row: int, block_ids: list[list[int]]) -> None:
        for blocks, ids in zip(self.blocks, block_ids, strict=True):
            blocks[row] = ids
        self.changed.add(row)

    def _tell(self, row: int, length: int) -> None:
        """Let the manager know the tokens below ``length``."""
        missing = length - int(self._known[row])
        if missing > 0:
            ids = self._unsent[row][:missing]
            self.pool.manager.append(self.seqs[row], ids if self._ids_known and ids else missing)
            del self._unsent[row][:missing]
            self._known[row] = length

    def _settle(self, row: int, commit: bool = True) -> None:
        """Let the manager know that the row's tokens are written."""
        manager, seq = self.pool.manager, self.seqs[row]
        length = int(self.lengths[row])
        self._tell(row, length)
        if commit and (written := length - manager.num_computed_tokens(seq)) > 0:
            manager.commit(seq, written)

    def settle(self) -> None:
        """Let the manager know that every row's tokens are written."""
        for row in np.flatnonzero(self._is_leader).tolist():
            self._settle(row)

    def truncate(self, row: int, length: int) -> None:
        """Cut a row to ``length`` tokens."""
        if self._known[row] > length and self.leaders[row] == row:
            self.pool.manager.truncate(self.seqs[row], length)
        self._known[row] = min(int(self._known[row]), length)
        del self._unsent[row][max(0, length - int(self._known[row])) :]
        for blocks in self.blocks:
            blocks[row] = blocks[row][: -(-length // self.block_size)]
        self.changed.add(row)
        self.lengths[row] = length
        self._open[row] = False

    def split(self) -> None:
        """Give every follower a sequence of its own on its leader's blocks."""
        if self.is_split:
            return
        self.settle()
        for row, leader in enumerate(self.leaders.tolist()):
            if row != leader:
                self.pool.manager.fork(self.seqs[leader], self.seqs[row])
                self._known[row] = self._known[leader]
        self._open[:] = False
        self.leaders = np.arange(self.batch)

    def select(self, parents: Sequence[int]) -> None:
        """Row i goes on from what row ``parents[i]`` holds now; rows that nobody goes on from are freed."""
        if self.batch == len(parents) and list(parents) == list(range(self.batch)):
            return
        self.split()
        self.settle()
        manager = self.pool.manager
        if len(parents) == self.batch:
            manager.reorder(self.seqs, parents)
            seqs = self.seqs
        else:
            seqs = [self.pool.new_seq_id() for _ in parents]
            for seq, parent in zip(seqs, parents, strict=True):
                manager.fork(self.seqs[parent], seq)
            self._free()
        index = np.asarray(parents, np.int64)
        self.seqs[:] = seqs
        self.leaders = np.arange(len(seqs))
        self.lengths = self.lengths[index]
        self._known = self.lengths.copy()
        self.blocks = [[blocks[parent] for parent in parents] for blocks in self.blocks]
        self._open = np.zeros(len(seqs), bool)
        self._unsent = [[] for _ in seqs]
        self.changed = set(range(len(seqs)))

    def fork(self) -> Rows:
        """The same rows once more, on the same blocks."""
        self.split()
        self.settle()
        self._open[:] = False
        other = Rows(self.pool, self.batch)
        other.seqs = [self.pool.new_seq_id() for _ in self.seqs]
        for seq, child in zip(self.seqs, other.seqs, strict=True):
            self.pool.manager.fork(seq, child)
        other.lengths = self.lengths.copy()
        other._known = self.lengths.copy()
        other.blocks = [list(blocks) for blocks in self.blocks]
        other.hold = self.hold
        return other

    def _free(self) -> None:
        free_sequences(self.pool, self.seqs)

    def free(self, publish: bool) -> None:
        """Give back every block. Full blocks stay findable where prefix caching is on, if asked to publish the last."""
        if publish and self.pool.prefix_caching and self.seqs:
            self.settle()
        self._free()


def free_sequences(pool: Pool, seqs: list[int]) -> None:
    """Give back the blocks of ``seqs``, those that still hold any, and empty the list."""
    for seq in seqs:
        if seq in pool.manager.sequences:
            pool.manager.free(seq)
    seqs.clear()
