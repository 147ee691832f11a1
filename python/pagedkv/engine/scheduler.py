"""Which tokens the next forward computes: running sequences decode, long prompts come in chunks, the rest waits.

Sequences are served by priority (the larger first), then first come first served. When blocks are missing the last in
that order is preempted; the first one always fits, since what can not fit the empty pool is refused, so that every step
makes progress.
"""

from __future__ import annotations

import bisect
import logging
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from ..block_table import BlockTable
from ..manager import Allocation
from .batch import Batch

if TYPE_CHECKING:
    from ..hf.kv_pool import Pool
    from .config import EngineConfig
    from .requests import Request, Sample

logger = logging.getLogger(__name__)


class Scheduler:
    """Rows of running samples and the queue of waiting ones, over a pool and its block tables."""

    def __init__(self, pool: Pool, tables: Seq[BlockTable], config: EngineConfig) -> None:
        self.pool = pool
        self.manager = pool.manager
        self.tables = tables
        self.max_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.preempt_mode = "swap" if config.num_host_blocks else "recompute"
        self.running: list[Sample] = []  # row r is running[r]
        self.waiting: list[Sample] = []  # by rank
        self._preempted = False

    def add(self, seq: Sample) -> None:
        self._register(seq)
        self._wait(seq)

    def _register(self, seq: Sample) -> None:
        request = seq.request
        if request.is_private:  # its ids stay unknown
            self.manager.add(seq.seq_id, len(seq.tokens))
        else:
            keys = request.identity.keys or () if request.identity is not None else ()
            self.manager.add(seq.seq_id, seq.tokens, cache_salt=request.cache_salt, extra_keys=keys)

    def make_private(self, request: Request) -> None:
        """Share no blocks with a request that holds none, or is about to be reset."""
        seqs = request.scheduled()
        for seq in seqs:
            if seq.seq_id in self.manager.sequences:
                self.manager.free(seq.seq_id)
        request.is_private = True  # in this order: what an interrupt leaves is registered again, as the request says
        for seq in seqs:
            self._register(seq)

    def fork(self, parent: Sample, child: Sample) -> None:
        """Let a child run from the parent's computed tokens, in a row that was kept free for it."""
        self.manager.fork(parent.seq_id, child.seq_id)
        child.num_computed, child.num_cached = parent.num_computed, parent.num_cached
        self._run(child)
        self._fill_row(child)

    def remove(self, seq: Sample) -> None:
        """Free a sequence, running or waiting."""
        if seq.row >= 0:
            self._leave_row(seq)
        elif seq in self.waiting:
            self.waiting.remove(seq)
        if seq.seq_id in self.manager.sequences:
            self.manager.free(seq.seq_id)

    def reset(self, seqs: Seq[Sample]) -> None:
        """Let these sequences wait, with their tokens and without blocks, whatever an interrupted step has left.

        Can be repeated. Where the manager was interrupted in the middle of a change it begins anew, and cached prefixes
        are lost.
        """
        for table in self.tables:
            for row in range(self.max_num_seqs):
                table.clear_row(row)
        self.running, self.waiting = [], sorted(seqs, key=_rank)
        for seq in seqs:
            seq.is_pending, seq.draft, seq.row, seq.work, seq.num_computed = False, [], -1, 0, 0
        try:
            self._give_back({seq.seq_id: seq for seq in seqs})
            self.manager.check_integrity()
        except Exception as error:  # whatever half a change makes of the manager's own checks
            logger.warning("pagedkv: cached prefixes are lost: the manager begins anew after %r", error)
            self.pool.renew()
            self._give_back({})
        for seq in seqs:
            if seq.seq_id not in self.manager.sequences:
                self._register(seq)

    def _give_back(self, known: dict[int, Sample]) -> None:
        """Free the manager's other sequences, and take the blocks of these; moves that are due are moot then."""
        manager = self.manager
        for seq_id in list(manager.sequences):
            if seq_id not in known:
                manager.free(seq_id)
            else:
                manager.append(seq_id, known[seq_id].tokens[manager.num_tokens(seq_id) :])
                manager.preempt(seq_id)
        manager.take_swaps()
        manager.take_copies()

    # A step.

    def schedule(self) -> Batch | None:
        """Grant slots and set every running sequence's `work`; None: there is none."""
        self._preempted = False
        decoded = self._decode()
        budget, is_all = self.max_num_batched_tokens - len(decoded), len(decoded) == len(self.running)
        if not is_all:
            budget = self._verify_drafts(budget)
            for seq in sorted(self.running, key=_rank):
                if seq.row >= 0 and not seq.work and budget:
                    budget -= self._prefill(seq, budget, lowest=seq)
        if self.waiting and not self._preempted:
            self._admit(budget)
            is_all = is_all and not self._preempted and len(decoded) == len(self.running)
        if not self.running:
            return None
        return Batch.of(self.running, decoded if is_all else None)

    def _decode(self) -> list[int]:
        """Slots for the tokens sampled last, in one call for all that have no draft; gives those tokens."""
        while True:
            plain = [seq for seq in self.running if seq.is_pending and not seq.draft]
            tokens = [seq.tokens[-1] for seq in plain]
            step = self.manager.append_step([seq.seq_id for seq in plain], tokens)
            if step is not None:
                break
            self._preempt(max(self.running, key=_rank))
        for table, (rows, columns, blocks) in zip(self.tables, step.entries, strict=True):
            if rows:
                table.set_entries([plain[row].row for row in rows], columns, blocks)
        if len(plain) < len(self.running):
            for seq in self.running:
                seq.work = 0
        for seq in plain:
            seq.is_pending, seq.work = False, 1
        return tokens

    def _verify_drafts(self, budget: int) -> int:
        """Slots for sampled tokens and the drafts behind them; a draft that does not fit is dropped."""
        for seq in sorted((seq for seq in self.running if seq.draft), key=_rank):
            if seq.row < 0:
                continue
            others = sum(1 for other in self.running if other.draft and not other.work) - 1
            seq.draft = seq.draft[: max(0, budget - others - 1)]
            self.manager.append(seq.seq_id, seq.tokens[-1:])
            seq.is_pending = False
            if self._allocate(seq, 1, len(seq.draft)) is None:
                seq.draft = []
                if not self._allocate_or_preempt(seq, 1, lowest=seq):
                    continue
            self._fill_row(seq)
            seq.work = 1
            budget -= 1 + len(seq.draft)
        return budget

    def _prefill(self, seq: Sample, budget: int, lowest: Sample | None) -> int:
        """Slots for the next chunk of a prompt; gives its size."""
        count = min(len(seq.tokens) - seq.num_computed, budget)
        if not self._allocate_or_preempt(seq, count, lowest):
            return 0
        self._fill_row(seq)
        seq.work = count
        return count

    def _admit(self, budget: int) -> None:
        """Let waiting sequences run in order; the first that finds no room ends it."""
        while self.waiting and budget:
            seq = self.waiting[0]
            if not self._has_rows(seq) or not self._allocate_or_preempt(seq, budget, lowest=None):
                return
            self.waiting.remove(seq)
            seq.num_computed = self.manager.num_computed_tokens(seq.seq_id)
            if seq.num_cached < 0:
                seq.num_cached = seq.num_computed
            self._run(seq)
            self._fill_row(seq)
            seq.work = min(len(seq.tokens) - seq.num_computed, budget)
            budget -= seq.work

    def _has_rows(self, seq: Sample) -> bool:
        """Rows for it and its samples, those of unforked samples counted; takes them from lower priorities."""
        while sum(1 + other.num_forks for other in self.running) + 1 + seq.num_forks > self.max_num_seqs:
            if not self._preempt_below(seq):
                return False
        return True

    def _allocate_or_preempt(self, seq: Sample, count: int, lowest: Sample | None) -> bool:
        """Preempt until the slots are granted. A running sequence (`lowest`) may have to go itself; a waiting one only
        displaces lower priorities."""
        while self._allocate(seq, count) is None:
            if lowest is None:
                if not self._preempt_below(seq):
                    return False
                continue
            victim = max(self.running, key=_rank)
            self._preempt(victim)
            if victim is seq:
                return False
        return True

    def _allocate(self, seq: Sample, count: int, num_lookahead: int = 0) -> Allocation | None:
        return self.manager.allocate_slots(seq.seq_id, count, num_lookahead_tokens=num_lookahead)

    def _preempt_below(self, seq: Sample) -> bool:
        victim = max(self.running, key=_rank, default=None)
        if victim is None or victim.priority >= seq.priority:
            return False
        self._preempt(victim)
        return True

    def _preempt(self, seq: Sample) -> None:
        if seq.is_pending:
            self.manager.append(seq.seq_id, seq.tokens[-1:])
            seq.is_pending = False
        if self.manager.preempt(seq.seq_id, self.preempt_mode) == "recompute":
            seq.num_computed = 0
        seq.draft, seq.work = [], 0
        seq.num_preemptions += 1
        self._preempted = True
        self._leave_row(seq)
        self._wait(seq)

    # Rows.

    def _wait(self, seq: Sample) -> None:
        bisect.insort(self.waiting, seq, key=_rank)

    def _run(self, seq: Sample) -> None:
        seq.row = len(self.running)
        self.running.append(seq)

    def _fill_row(self, seq: Sample) -> None:
        for table, blocks in zip(self.tables, self.manager.block_ids(seq.seq_id), strict=True):
            table.set_row(seq.row, blocks)

    def _leave_row(self, seq: Sample) -> None:
        """The last row moves into the place of the one that is left."""
        last = self.running.pop()
        for table in self.tables:
            if last is seq:
                table.clear_row(seq.row)
            else:
                table.move_row(last.row, seq.row)
        if last is not seq:
            last.row, self.running[seq.row] = seq.row, last
        seq.row = -1


def _rank(seq: Sample) -> tuple[int, int]:
    return seq.rank
