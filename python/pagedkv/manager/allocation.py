"""Allocation: what a request for slots takes is planned first, and carried out only if the free blocks can serve it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagedkv.errors import InvalidArgumentError, NonCausalError
from pagedkv.manager.blocks import numpy
from pagedkv.manager.groups import Group
from pagedkv.manager.search import Hit, find
from pagedkv.manager.sequence import SequenceState, lowered
from pagedkv.manager.state import State

TableEntries = tuple[Sequence[int], Sequence[int]]  # columns, block ids
_UNCHANGED: TableEntries = ((), ())


@dataclass(slots=True)
class Allocation:
    """What `allocate_slots` granted. With groups every list holds one list per group.

    Attributes:
        num_cached_tokens: tokens attached by this call that need no computation: cached, or swapped in.
        new_block_ids: handed out by this call, copy destinations included.
        slots: block * block_size + offset for every new token, in order.
        lookahead_slots: the same for lookahead tokens.
        entries: (columns, block ids) of the table that this call changed, a pair per group even where there is one:
            what was attached, new blocks, copies in the places of what they copy, 0 where a window has passed.
    """

    num_cached_tokens: int
    new_block_ids: list[Any]
    slots: list[Any]
    lookahead_slots: list[Any]
    entries: list[TableEntries]
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
class SlotRequest:
    """The arguments of `allocate_slots`; num_new None: all that remain of num_tokens."""

    num_new: int | None
    num_external: int
    num_lookahead: int
    num_tokens: int

    def span(self, computed: int) -> tuple[int, int, int]:
        """Positions: [computed, start) external, [start, stop) new, [stop, end) lookahead."""
        if self.num_external > self.num_tokens - computed:
            raise InvalidArgumentError(
                f"num_external_tokens: expected at most the {self.num_tokens - computed} tokens after the {computed} "
                f"computed ones, got {self.num_external}"
            )
        start = computed + self.num_external
        stop = self.num_tokens if self.num_new is None else min(start + self.num_new, self.num_tokens)
        return start, stop, stop + self.num_lookahead


@dataclass(slots=True)
class GroupPlan:
    """What one group takes.

    attached: leading blocks from the index. released: leading blocks out of sight. written: the partly filled block
    that is written and is shared or published, or -1; is_copied: it is copied, or else unpublished. num_new: copy
    destination, blocks to swap in, blocks behind the table.
    """

    attached: int
    released: int
    written: int
    is_copied: bool
    num_new: int


@dataclass(slots=True)
class Plan:
    """tables: the current ones, or those to attach (-1: a block to swap in). num_freed: blocks that windows free."""

    computed: int
    end: int
    tables: list[array[int]]
    groups: list[GroupPlan] = field(default_factory=list)
    num_freed: int = 0

    @property
    def num_needed(self) -> int:
        return sum(group.num_new for group in self.groups) - self.num_freed


def allocate(state: State, seq: SequenceState, request: SlotRequest) -> Allocation | None:
    """Serve a running sequence."""
    computed = seq.num_computed
    start, stop, end = request.span(computed)
    if state.causal and computed < seq.fast_end and end <= seq.fast_end:
        seq.num_granted = max(seq.num_granted, end)
        return _granted(state, seq, 0, [[] for _ in seq.tables], [_UNCHANGED] * len(seq.tables), (start, stop, end))
    plan = make_plan(state, seq, computed, seq.tables, request)
    if plan.num_needed > state.pool.num_free:
        return None
    return _granted(state, seq, 0, *apply_plan(state, seq, plan), (start, stop, end))


def allocate_next(state: State, seq: SequenceState) -> Allocation:
    """Serve one token of a running sequence that is known to need no block."""
    at = seq.num_computed
    seq.num_granted = max(seq.num_granted, at + 1)
    slots = []
    for group, table in zip(state.groups, seq.tables):  # noqa: B905  as long by construction, and 0.1 us
        size = group.block_size
        slots.append([table[at // size] * size + at % size])
    return Allocation(0, [[] for _ in slots], slots, [[] for _ in slots], [_UNCHANGED] * len(slots), seq.tables)


def admit(state: State, seq: SequenceState, request: SlotRequest) -> Allocation | None:
    """Serve a sequence that holds no blocks: attach what is cached, or swap in."""
    if seq.host is not None:
        choices = [(seq.num_computed, _swapped_tables(state, seq))]
    else:
        hit = _find(state, seq)
        choices = [(hit.num_tokens + hit.tail_tokens, hit.with_tail())]
        if hit.tail_tokens:  # its block has to be copied; without room for that, whole blocks alone
            choices.append((hit.num_tokens, hit.tables))
    for cached, tables in choices:
        plan = make_plan(state, seq, cached, tables, request)
        # the watermark stays free, unless nothing else runs
        kept = state.watermark_blocks if state.num_running else 0
        if plan.num_needed + kept <= state.pool.num_free - sum(map(state.pool.num_taken_from_free, tables)):
            break
    else:
        return None
    seq.num_hit = cached
    if seq.host is None and state.prefix_caching:
        state.recent_hits.append((seq.num_tokens, cached))
    return _granted(state, seq, cached, *apply_plan(state, seq, plan), request.span(cached))


def _find(state: State, seq: SequenceState) -> Hit:
    if not state.prefix_caching:
        return Hit(0, [array("q") for _ in state.groups])
    chain = seq.links()
    hit = find(state, chain, seq.tokens, seq.keys, min(len(seq.tokens), seq.num_tokens - 1))
    seq.tip, seq.num_links = (chain[-1] if chain else None), len(chain)
    return hit


def _swapped_tables(state: State, seq: SequenceState) -> list[array[int]]:
    """Tables of a swapped sequence: cached blocks where the pool still has them, -1 where the host block is needed."""
    assert seq.host is not None
    tables = []
    chain = seq.links()
    for group, hosts in zip(state.groups, seq.host, strict=True):
        full = min(seq.num_computed, len(seq.tokens)) // group.block_size if state.prefix_caching else 0
        state.hasher.extend(chain, seq.tokens, seq.keys, full * group.chunks_per_block)
        table = array("q")
        for block, host in enumerate(hosts):
            found = state.index.block_at(group, chain, block) if block < full and host >= 0 else 0
            table.append(found or (0 if host < 0 else -1))
        tables.append(table)
    seq.tip, seq.num_links = (chain[-1] if chain else None), len(chain)
    return tables


def make_plan(state: State, seq: SequenceState, computed: int, tables: list[array[int]], request: SlotRequest) -> Plan:
    """Work out what the request takes; change nothing."""
    start, stop, end = request.span(computed)
    if not state.causal and stop < request.num_tokens:
        raise NonCausalError(
            f"num_new_tokens: attention is not causal, expected all {request.num_tokens - start} tokens at once, "
            f"got {request.num_new}"
        )
    plan = Plan(computed, end, tables)
    for number, (group, table) in enumerate(zip(state.groups, tables, strict=True)):
        num_swapped = 0
        if seq.running:
            attached = seq.attached[number]
            released = max(seq.released[number], group.num_released(computed))
            for block in table[seq.released[number] : released]:
                plan.num_freed += state.pool.refs[block] == 1 and block not in state.pool.pins
        else:
            released = _leading(table, 0)
            num_swapped = sum(block < 0 for block in table) if seq.host is not None else 0
            attached = len(table) - (_leading(table[::-1], -1) if num_swapped else 0)
        written = _written_block(state, seq, table, group, computed) if end > computed else -1
        is_copied = written >= 0 and (not seq.running or state.pool.refs[table[written]] > 1 or written < attached)
        num_new = is_copied + num_swapped + max(0, -(-end // group.block_size) - len(table))
        plan.groups.append(GroupPlan(attached, released, written, is_copied, num_new))
    return plan


def _written_block(state: State, seq: SequenceState, table: array[int], group: Group, computed: int) -> int:
    index, offset = divmod(computed, group.block_size)
    if offset == 0 or table[index] < 0:
        return -1
    block = table[index]
    shared = not seq.running or state.pool.refs[block] > 1 or state.pool.is_published(block)
    return index if shared else -1


def apply_plan(state: State, seq: SequenceState, plan: Plan) -> tuple[list[list[int]], list[TableEntries]]:
    """Carry out a plan that the free blocks can serve; give the new blocks and the changed entries per group."""
    released = tuple(group.released for group in plan.groups)
    if seq.running:
        lengths, passed = [len(table) for table in seq.tables], seq.released
        _release_windows(state, seq, released)
    else:
        lengths, passed = [0] * len(plan.tables), released
        _attach(state, seq, plan)
    new_blocks: list[list[int]] = []
    entries: list[TableEntries] = []
    for number, (group, table) in enumerate(zip(plan.groups, seq.tables, strict=True)):
        fresh = state.pool.take(group.num_new)
        new_blocks.append(fresh)
        used = _make_writable(state, seq, number, group, fresh)
        for index, host in enumerate(seq.host[number] if seq.host is not None else ()):
            if table[index] < 0:
                table[index] = fresh[used]
                state.moves.swap_in(host, fresh[used])
                seq.awaited.append((number, index))
                used += 1
        table.extend(fresh[used:])
        columns: Sequence[int] = range(lengths[number], len(table))
        ids = table[lengths[number] :].tolist()
        if lengths[number] and (group.is_copied or seq.released != passed):
            changed = [*range(passed[number], seq.released[number]), *([group.written] if group.is_copied else ())]
            columns, ids = [*changed, *columns], [*(table[column] for column in changed), *ids]
        entries.append((columns, ids))
    if seq.host is not None:
        state.drop_host(seq)
    seq.num_computed = plan.computed
    seq.num_granted = max(seq.num_granted, plan.end)
    state.note_limits(seq, writable=plan.end > plan.computed)
    return new_blocks, entries


def _attach(state: State, seq: SequenceState, plan: Plan) -> None:
    for table in plan.tables:
        state.pool.acquire(table)
    seq.tables = [table[:] for table in plan.tables]
    seq.attached = tuple(group.attached for group in plan.groups)
    seq.released = tuple(group.released for group in plan.groups)
    if seq.host is None:
        seq.published = plan.computed
    seq.running = True
    state.num_running += 1


def _make_writable(state: State, seq: SequenceState, number: int, plan: GroupPlan, fresh: list[int]) -> int:
    """Copies or unpublishes the block that is written; gives the number of fresh blocks used."""
    if plan.written < 0:
        return 0
    table = seq.tables[number]
    source = table[plan.written]
    seq.published = min(seq.published, plan.written * state.groups[number].block_size)
    if not plan.is_copied:
        state.index.forget((source,))
        return 0
    table[plan.written] = fresh[0]
    seq.attached = lowered(seq.attached, number, plan.written)
    state.moves.copy(source, fresh[0])
    seq.awaited.append((number, plan.written))
    state.drop(array("q", (source,)))
    return 1


def _release_windows(state: State, seq: SequenceState, released: tuple[int, ...]) -> None:
    dropped = array("q")
    for number, table in enumerate(seq.tables):
        for index in range(seq.released[number], released[number]):
            dropped.append(table[index])
            table[index] = 0
    if dropped:
        seq.released = released
        state.drop(dropped)


def _granted(
    state: State,
    seq: SequenceState,
    cached: int,
    new_blocks: list[list[int]],
    entries: list[TableEntries],
    span: tuple[int, int, int],
) -> Allocation:
    start, stop, end = span
    groups = list(zip(seq.tables, (group.block_size for group in state.groups), strict=True))
    slots = [_slots(table, size, start, stop) for table, size in groups]
    ahead = [_slots(table, size, stop, end) for table, size in groups]
    return Allocation(cached, new_blocks, slots, ahead, entries, seq.tables)


def _slots(table: array[int], block_size: int, start: int, stop: int) -> list[int]:
    if stop - start <= 2:
        return [table[at // block_size] * block_size + at % block_size for at in range(start, stop)]
    first, last = start // block_size, -(-stop // block_size)
    asked = slice(start - first * block_size, stop - first * block_size)
    if np := numpy():
        slots = np.array(table[first:last])[:, None] * block_size + np.arange(block_size)
        return slots.ravel()[asked].tolist()  # type: ignore[no-any-return]
    return [slot for block in table[first:last] for slot in range(block * block_size, (block + 1) * block_size)][asked]


def _leading(blocks: Sequence[int], value: int) -> int:
    """How many entries at the start equal `value`."""
    return next((index for index, block in enumerate(blocks) if block != value), len(blocks))
