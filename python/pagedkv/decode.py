"""Decode steps of many sequences, one token each, at a fraction of the cost of a call per sequence."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.allocation import Plan, Request, apply_plan, make_plan
from pagedkv.errors import CommitError, DuplicateSequenceError, InvalidArgumentError, UnknownSequenceError, refused
from pagedkv.publishing import check_arrived, new_links, publish

if TYPE_CHECKING:
    from pagedkv.manager import KVCacheManager
    from pagedkv.sequence import SequenceState

Entries = tuple[list[int], list[int], list[int]]


@dataclass(slots=True)
class DecodeStep:
    """Table entries that a step changed, per group: (rows, columns, block_ids), a row being an index into `seq_ids`.

    They fit `BlockTable.set_entries`; the slots follow from the table and the lengths (`BlockTable.fill`).
    """

    entries: list[Entries]


def append_step(manager: KVCacheManager, seq_ids: Sequence[Hashable], tokens: array[int]) -> DecodeStep | None:
    """`append` of one token and `allocate_slots` of one slot for every sequence; all or nothing."""
    seqs = _states(manager, seq_ids)
    if len(tokens) != len(seqs):
        raise InvalidArgumentError(f"token_ids: expected one for each of {len(seqs)} sequences, got {len(tokens)}")
    slow = []
    for row, seq in enumerate(seqs):
        length = seq.num_tokens
        if length >= seq.fast_end or seq.num_computed != length:
            if seq.num_computed != length or not seq.running:
                raise InvalidArgumentError(
                    f"seq_ids: expected running sequences with every token committed; {seq.seq_id!r} has "
                    f"{seq.num_computed} of {length}, running: {seq.running}"
                )
            slow.append(row)
    plans = _plans(manager, seqs, slow)
    if plans is None:
        return None
    for seq, token in zip(seqs, tokens.tolist(), strict=True):
        if seq.all_known:
            seq.tokens.tail.append(token)
        seq.num_tokens = length = seq.num_tokens + 1
        if seq.num_granted < length:
            seq.num_granted = length
    step = DecodeStep([([], [], []) for _ in manager.groups])
    _extend_tables(manager, seqs, [row for row, plan in zip(slow, plans, strict=True) if plan is None], step)
    for row, plan in zip(slow, plans, strict=True):
        if plan is not None:
            _carry_out(manager, seqs[row], row, step)
    return step


def _plans(manager: KVCacheManager, seqs: list[SequenceState], slow: list[int]) -> list[Plan | None] | None:
    """A plan for each row in `slow`, None in place of one that takes a single block behind the table; None when blocks
    are missing. Plans are made side by side: a block that two of them would copy counts twice."""
    available = manager.pool.num_free
    plans: list[Plan | None] = []
    only_full = len(manager.groups) == 1 and manager.groups[0].is_full
    for row in slow:
        seq = seqs[row]
        if only_full and seq.num_tokens == len(seq.tables[0]) * manager.groups[0].block_size:
            plans.append(None)
            available -= 1
        else:
            plan = make_plan(manager, seq, seq.num_computed, seq.tables, Request(1, 0, 0, seq.num_tokens + 1))
            plans.append(plan)
            available -= plan.num_needed
        if available < 0:
            return None
    return plans


def _extend_tables(manager: KVCacheManager, seqs: list[SequenceState], extended: list[int], step: DecodeStep) -> None:
    """One block behind each of these tables."""
    rows, columns, blocks = step.entries[0]
    rows += extended
    blocks += manager.pool.get_new_blocks(len(extended))
    size = manager.groups[0].block_size
    for row, block in zip(extended, blocks, strict=True):
        seq = seqs[row]
        table = seq.tables[0]
        columns.append(len(table))
        table.append(block)
        seq.fast_end = len(table) * size


def _carry_out(manager: KVCacheManager, seq: SequenceState, row: int, step: DecodeStep) -> None:
    # planned again: an earlier sequence of this step may have copied the block that this one would copy
    plan = make_plan(manager, seq, seq.num_computed, seq.tables, Request(1, 0, 0, seq.num_tokens))
    _, entries = apply_plan(manager, seq, plan)
    for (rows, columns, blocks), (changed, ids) in zip(step.entries, entries, strict=True):
        rows += [row] * len(changed)
        columns += changed
        blocks += ids


def commit_step(manager: KVCacheManager, seq_ids: Sequence[Hashable]) -> None:
    """`commit` of one token for every sequence; all or nothing."""
    seqs = _states(manager, seq_ids)
    for seq in seqs if manager.transfers else ():
        check_arrived(manager, seq)
    filled = []
    for row, seq in enumerate(seqs):
        computed = seq.num_computed + 1
        if computed > seq.num_granted or computed > seq.num_tokens:
            for earlier in seqs[:row]:
                earlier.num_computed -= 1
            raise CommitError(
                f"seq_ids: sequence {seq.seq_id!r} has {seq.num_computed} of {seq.num_tokens} tokens committed and "
                f"slots for {seq.num_granted}, got 1 more"
            )
        seq.num_computed = computed
        if computed >= seq.publish_at:
            filled.append(seq)
    try:
        links = [new_links(manager, seq, seq.num_computed) for seq in filled]
    except BaseException:  # out of the caller's hash_fn
        for seq in seqs:
            seq.num_computed -= 1
        raise
    for seq, fresh in zip(filled, links, strict=True):
        publish(manager, seq, fresh)


def _states(manager: KVCacheManager, seq_ids: Sequence[Hashable]) -> list[SequenceState]:
    sequences = manager.sequences
    try:
        seqs = [sequences[seq_id] for seq_id in seq_ids]
    except KeyError as error:
        raise UnknownSequenceError(f"sequence {error.args[0]!r} is unknown: never added, or freed") from None
    except TypeError:
        raise refused("seq_ids", "a sequence of hashable ids", seq_ids) from None
    if len(set(seq_ids)) != len(seqs):
        raise DuplicateSequenceError("seq_ids: an id is named twice")
    return seqs
