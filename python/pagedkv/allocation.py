"""Allocation: what a request for slots takes is planned first, and carried out only if the free blocks can serve it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.errors import InvalidArgumentError, NonCausalError
from pagedkv.lookup import Hit
from pagedkv.release import drop_blocks, drop_host
from pagedkv.sequence import NEVER, lowered

if TYPE_CHECKING:
    from pagedkv.manager import KVCacheManager
    from pagedkv.sequence import SequenceState


Entries = tuple[Sequence[int], Sequence[int]]
_UNCHANGED: Entries = ((), ())
Taken = tuple[list[list[int]], list[Entries]]  # new blocks, and changed entries of the table, per group


@dataclass(slots=True)
class Allocation:
    """What `allocate_slots` granted. With groups every list holds one list per group.

    num_cached_tokens: tokens attached by this call that need no computation: cached, or swapped in.
    new_block_ids: handed out by this call, copy destinations included.
    slots: block * block_size + offset for every new token, in order. lookahead_slots: the same for lookahead tokens.
    entries: (columns, block ids) of the table that this call changed, a pair per group even where there is one: what
    was attached, new blocks, copies in the places of what they copy, 0 where a window has passed.
    """

    num_cached_tokens: int
    new_block_ids: list[Any]
    slots: list[Any]
    lookahead_slots: list[Any]
    entries: list[Entries]
    _tables: list[array[int]] = field(repr=False)
    _is_grouped: bool = field(default=True, repr=False)

    @property
    def block_ids(self) -> list[Any]:
        """The whole table, read when asked for: as later calls left it, empty once its blocks were given back."""
        tables = [table.tolist() for table in self._tables] or [[] for _ in self.entries]
        return tables if self._is_grouped else tables[0]

    def of_one_group(self) -> Allocation:
        """The view of a manager without groups."""
        self.new_block_ids = self.new_block_ids[0]
        self.slots = self.slots[0]
        self.lookahead_slots = self.lookahead_slots[0]
        self._is_grouped = False
        return self


@dataclass(slots=True)
class Request:
    """The arguments of `allocate_slots`; num_new None: all that remain of num_tokens."""

    num_new: int | None
    num_external: int
    num_lookahead: int
    num_tokens: int


@dataclass(slots=True)
class Plan:
    """Positions: [computed, start) external, [start, stop) new, [stop, end) lookahead. Lists have an entry per group.

    tables: the current ones, or those to attach (-1: a block to swap in). attached: leading blocks from the index.
    released: leading blocks out of sight. written: the partly filled block that is written and is shared or published,
    or -1. copied: whether it is copied (or else unpublished). num_new_blocks: copy destinations, blocks to swap in,
    blocks behind the table. num_freed: blocks that the release frees.
    """

    computed: int
    start: int
    stop: int
    end: int
    tables: list[array[int]]
    attached: list[int]
    released: list[int]
    written: list[int]
    copied: list[bool]
    num_new_blocks: list[int]
    num_freed: int = 0

    @property
    def num_needed(self) -> int:
        return sum(self.num_new_blocks) - self.num_freed


def allocate(manager: KVCacheManager, seq: SequenceState, request: Request) -> Allocation | None:
    """Serves a running sequence."""
    computed, end = seq.num_computed, _end(seq.num_computed, request)
    if manager.causal and seq.num_computed < seq.fast_end and end <= seq.fast_end:
        _check_external(request, computed)
        start = computed + request.num_external
        stop = end - request.num_lookahead
        seq.num_granted = max(seq.num_granted, end)
        return _result(manager, seq, 0, ([[] for _ in seq.tables], [_UNCHANGED] * len(seq.tables)), start, stop, end)
    plan = make_plan(manager, seq, seq.num_computed, seq.tables, request)
    if plan.num_needed > manager.pool.num_free:
        return None
    return _result(manager, seq, 0, apply_plan(manager, seq, plan), plan.start, plan.stop, plan.end)


def allocate_next(manager: KVCacheManager, seq: SequenceState) -> Allocation:
    """Serves one token of a running sequence that is known to need no block."""
    at = seq.num_computed
    seq.num_granted = max(seq.num_granted, at + 1)
    slots = []
    for group, table in zip(manager.groups, seq.tables):  # noqa: B905  as long by construction, and 0.1 us
        size = group.block_size
        slots.append([table[at // size] * size + at % size])
    return Allocation(0, [[] for _ in slots], slots, [[] for _ in slots], [_UNCHANGED] * len(slots), seq.tables)


def admit(manager: KVCacheManager, seq: SequenceState, request: Request) -> Allocation | None:
    """Serves a sequence that holds no blocks: attaches what is cached, or swaps in."""
    if seq.host is not None:
        cached = seq.num_computed
        plan = _admission(manager, seq, cached, _swapped_tables(manager, seq), request)
    else:
        hit = _find(manager, seq)
        cached = hit.num_tokens + hit.tail_tokens
        plan = _admission(manager, seq, cached, hit.with_tail(), request)
        if plan is None and hit.tail_tokens:
            cached = hit.num_tokens
            plan = _admission(manager, seq, cached, hit.tables, request)
    if plan is None:
        return None
    seq.num_hit = cached
    if seq.host is None and manager.prefix_caching:
        manager.recent_hits.append((seq.num_tokens, cached))
    return _result(manager, seq, cached, apply_plan(manager, seq, plan), plan.start, plan.stop, plan.end)


def _admission(
    manager: KVCacheManager, seq: SequenceState, cached: int, tables: list[array[int]], request: Request
) -> Plan | None:
    """A plan that leaves the watermark free, unless nothing else runs."""
    plan = make_plan(manager, seq, cached, tables, request)
    available = manager.pool.num_free - sum(map(manager.pool.num_taken_from_free, tables))
    if manager.num_running:
        available -= manager.watermark_blocks
    return plan if plan.num_needed <= available else None


def _find(manager: KVCacheManager, seq: SequenceState) -> Hit:
    if not manager.prefix_caching:
        return Hit(0, [array("q") for _ in manager.groups])
    chain = seq.links()
    hit = manager.lookup.find(chain, seq.tokens, seq.keys, min(seq.num_known, seq.num_tokens - 1))
    seq.keep_links(chain)
    return hit


def _swapped_tables(manager: KVCacheManager, seq: SequenceState) -> list[array[int]]:
    """Tables of a swapped sequence: cached blocks where the pool still has them, -1 where the host block is needed."""
    assert seq.host is not None
    tables = []
    chain = seq.links()
    for number, (group, hosts) in enumerate(zip(manager.groups, seq.host, strict=True)):
        full = min(seq.num_computed, seq.num_known) // group.block_size if manager.prefix_caching else 0
        manager.hasher.extend(chain, seq.tokens, seq.keys, full * group.chunks_per_block)
        table = array("q")
        for block, host in enumerate(hosts):
            found = manager.lookup.block_at(number, chain, block) if block < full and host >= 0 else 0
            table.append(found or (0 if host < 0 else -1))
        tables.append(table)
    seq.keep_links(chain)
    return tables


def _end(computed: int, request: Request) -> int:
    start = computed + request.num_external
    stop = request.num_tokens if request.num_new is None else min(start + request.num_new, request.num_tokens)
    return stop + request.num_lookahead


def _check_external(request: Request, computed: int) -> None:
    if request.num_external > request.num_tokens - computed:
        raise InvalidArgumentError(
            f"num_external_tokens: expected at most the {request.num_tokens - computed} tokens after the {computed} "
            f"computed ones, got {request.num_external}"
        )


def make_plan(
    manager: KVCacheManager, seq: SequenceState, computed: int, tables: list[array[int]], request: Request
) -> Plan:
    """Works out what the request takes; changes nothing."""
    _check_external(request, computed)
    end = _end(computed, request)
    plan = Plan(computed, computed + request.num_external, end - request.num_lookahead, end, tables, [], [], [], [], [])
    if not manager.causal and plan.stop < request.num_tokens:
        raise NonCausalError(
            f"num_new_tokens: attention is not causal, expected all {request.num_tokens - plan.start} tokens at once, "
            f"got {request.num_new}"
        )
    pool = manager.pool
    for number, (group, table) in enumerate(zip(manager.groups, tables, strict=True)):
        num_swapped = 0
        if seq.running:
            attached = seq.attached[number]
            released = max(seq.released[number], group.num_released(computed))
            for block in table[seq.released[number] : released]:
                plan.num_freed += pool.refs[block] == 1 and block not in pool.pins
        else:
            released = _leading(table, 0)
            num_swapped = sum(block < 0 for block in table) if seq.host is not None else 0
            attached = len(table) - (_leading(table[::-1], -1) if num_swapped else 0)
        written = _written_block(manager, seq, table, plan, group.block_size)
        copied = written >= 0 and (not seq.running or pool.refs[table[written]] > 1 or written < attached)
        plan.attached.append(attached)
        plan.released.append(released)
        plan.written.append(written)
        plan.copied.append(copied)
        plan.num_new_blocks.append(copied + num_swapped + max(0, -(-end // group.block_size) - len(table)))
    return plan


def _written_block(manager: KVCacheManager, seq: SequenceState, table: array[int], plan: Plan, block_size: int) -> int:
    index, offset = divmod(plan.computed, block_size)
    if offset == 0 or plan.end == plan.computed or table[index] < 0:
        return -1
    pool = manager.pool
    shared = not seq.running or pool.refs[table[index]] > 1 or pool.is_published(table[index])
    return index if shared else -1


def apply_plan(manager: KVCacheManager, seq: SequenceState, plan: Plan) -> Taken:
    """Carries out a plan that the free blocks can serve."""
    pool = manager.pool
    passed, kept = plan.released, [0] * len(seq.tables)
    if seq.running:
        passed, kept = list(seq.released), [len(table) for table in seq.tables]
        _release_windows(manager, seq, plan.released)
    else:
        for table in plan.tables:
            pool.acquire(table)
        seq.tables = [table[:] for table in plan.tables]
        seq.attached = tuple(plan.attached)
        seq.released = tuple(plan.released)
        if seq.host is None:
            seq.published = plan.computed
        seq.running = True
        manager.num_running += 1
    new_blocks: list[list[int]] = []
    entries: list[Entries] = []
    for number, table in enumerate(seq.tables):
        fresh = pool.get_new_blocks(plan.num_new_blocks[number])
        new_blocks.append(fresh)
        used = _make_writable(manager, seq, number, plan, fresh)
        if seq.host is not None:
            for index, host in enumerate(seq.host[number]):
                if table[index] < 0:
                    table[index] = fresh[used]
                    manager.transfers.swap_in(host, fresh[used])
                    seq.awaited.append((number, index))
                    used += 1
        table.extend(fresh[used:])
        columns = [*range(passed[number], seq.released[number]), *range(kept[number], len(table))]
        if plan.copied[number] and plan.written[number] < kept[number]:
            columns.append(plan.written[number])
        entries.append((columns, [table[column] for column in columns]))
    drop_host(manager, seq)
    seq.num_computed = plan.computed
    seq.num_granted = max(seq.num_granted, plan.end)
    note_limits(manager, seq, writable=plan.end > plan.computed)
    return new_blocks, entries


def _make_writable(manager: KVCacheManager, seq: SequenceState, number: int, plan: Plan, fresh: list[int]) -> int:
    """Copies or unpublishes the block that is written; gives the number of fresh blocks used."""
    written = plan.written[number]
    if written < 0:
        return 0
    source = seq.tables[number][written]
    seq.published = min(seq.published, written * manager.groups[number].block_size)
    if not plan.copied[number]:
        manager.pool.unpublish(source)
        return 0
    seq.tables[number][written] = fresh[0]
    seq.attached = lowered(seq.attached, number, written)
    manager.transfers.copy(source, fresh[0])
    seq.awaited.append((number, written))
    drop_blocks(manager, [source])
    return 1


def _release_windows(manager: KVCacheManager, seq: SequenceState, released: list[int]) -> None:
    dropped = []
    for number, table in enumerate(seq.tables):
        for index in range(seq.released[number], released[number]):
            dropped.append(table[index])
            table[index] = 0
    if dropped:
        seq.released = tuple(released)
        drop_blocks(manager, dropped)


def note_limits(manager: KVCacheManager, seq: SequenceState, *, writable: bool) -> None:
    """Settles fast_end (0 unless the written blocks are known to be the sequence's own) and publish_at."""
    fast_end = NEVER
    for group, table, released in zip(manager.groups, seq.tables, seq.released, strict=True):
        fast_end = min(fast_end, len(table) * group.block_size, group.next_release(released))
    seq.fast_end = fast_end if writable else 0
    if manager.prefix_caching:
        seq.publish_at = (seq.published // manager.hasher.chunk + 1) * manager.hasher.chunk


def _result(
    manager: KVCacheManager, seq: SequenceState, cached: int, taken: Taken, start: int, stop: int, end: int
) -> Allocation:
    groups = list(zip(seq.tables, (group.block_size for group in manager.groups), strict=True))
    slots = [_slots(table, size, start, stop) for table, size in groups]
    return Allocation(
        cached, taken[0], slots, [_slots(table, size, stop, end) for table, size in groups], taken[1], seq.tables
    )


def _slots(table: array[int], block_size: int, start: int, stop: int) -> list[int]:
    if stop - start <= 2:
        return [table[at // block_size] * block_size + at % block_size for at in range(start, stop)]
    first, last = start // block_size, -(-stop // block_size)
    blocks = np.array(table[first:last], np.int64)
    grid = blocks[:, None] * block_size + np.arange(block_size)
    slots: list[int] = grid.ravel()[start - first * block_size : stop - first * block_size].tolist()
    return slots


def _leading(blocks: Sequence[int], value: int) -> int:
    """How many entries at the start equal `value`."""
    return next((index for index, block in enumerate(blocks) if block != value), len(blocks))
