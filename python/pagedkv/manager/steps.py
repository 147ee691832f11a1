"""Decode steps of many sequences, one token each, at a fraction of the cost of a call per sequence."""

from __future__ import annotations

from array import array
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from pagedkv.errors import CommitError, InvalidArgumentError
from pagedkv.manager.allocation import Plan, SlotRequest, apply_plan, make_plan
from pagedkv.manager.commits import check_arrived, new_links, publish
from pagedkv.manager.sequence import SequenceState
from pagedkv.manager.state import State


@dataclass(slots=True)
class DecodeStep:
    """Table entries that a step changed, per group: (rows, columns, block_ids), a row being an index into `seq_ids`.

    They fit `BlockTable.set_entries`; the slots follow from the table and the lengths (`BlockTable.fill`).
    """

    entries: list[tuple[list[int], list[int], list[int]]]


def append_step(state: State, seq_ids: Sequence[Hashable], tokens: array[int]) -> DecodeStep | None:
    """`append` of one token and `allocate_slots` of one slot for every sequence; all or nothing."""
    seqs = state.get_all(seq_ids)
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
    extended, planned = _split(state, seqs, slow)
    available = state.pool.num_free - len(extended)
    for row in planned:  # a block that two of them would copy counts twice
        available -= _plan(state, seqs[row], 1).num_needed if available >= 0 else 0
    if available < 0:
        return None
    for seq, token in zip(seqs, tokens.tolist(), strict=True):
        if seq.all_known:
            seq.tokens.tail.append(token)
        seq.num_tokens = length = seq.num_tokens + 1
        if seq.num_granted < length:
            seq.num_granted = length
    step = DecodeStep([([], [], []) for _ in state.groups])
    _extend_tables(state, seqs, extended, step)
    for row in planned:
        # planned again: an earlier sequence of this step may have copied the block that this one would copy
        _, entries = apply_plan(state, seqs[row], _plan(state, seqs[row], 0))
        for (rows, columns, blocks), (changed, ids) in zip(step.entries, entries, strict=True):
            rows += [row] * len(changed)
            columns += changed
            blocks += ids
    return step


def _split(state: State, seqs: list[SequenceState], slow: list[int]) -> tuple[list[int], list[int]]:
    """Rows that take one block behind their table and nothing else, and those that need a plan."""
    group = state.groups[0]
    if len(state.groups) > 1 or not group.is_full:
        return [], slow
    extended: list[int] = []
    planned: list[int] = []
    for row in slow:
        seq = seqs[row]
        (extended if seq.num_tokens == len(seq.tables[0]) * group.block_size else planned).append(row)
    return extended, planned


def _plan(state: State, seq: SequenceState, num_more: int) -> Plan:
    """For one token, of which `num_more` do not exist yet."""
    return make_plan(state, seq, seq.num_computed, seq.tables, SlotRequest(1, 0, 0, seq.num_tokens + num_more))


def _extend_tables(state: State, seqs: list[SequenceState], extended: list[int], step: DecodeStep) -> None:
    """One block behind each of these tables."""
    rows, columns, blocks = step.entries[0]
    rows += extended
    blocks += state.pool.take(len(extended))
    size = state.groups[0].block_size
    for row, block in zip(extended, blocks, strict=True):
        seq = seqs[row]
        table = seq.tables[0]
        columns.append(len(table))
        table.append(block)
        seq.fast_end = len(table) * size


def commit_step(state: State, seq_ids: Sequence[Hashable]) -> None:
    """`commit` of one token for every sequence; all or nothing."""
    seqs = state.get_all(seq_ids)
    for seq in seqs if state.moves else ():
        check_arrived(state, seq)
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
        links = [new_links(state, seq, seq.num_computed) for seq in filled]
    except BaseException:  # out of the caller's hash_fn
        for seq in seqs:
            seq.num_computed -= 1
        raise
    for seq, fresh in zip(filled, links, strict=True):
        publish(state, seq, fresh)
