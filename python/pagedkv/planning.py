"""What an allocation would take, worked out before anything changes."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagedkv.errors import InvalidArgumentError, NonCausalError

if TYPE_CHECKING:
    from pagedkv.manager import KVCacheManager
    from pagedkv.sequence import SequenceState


@dataclass(slots=True)
class Plan:
    """Positions: [computed, start) external, [start, stop) new, [stop, end) lookahead. Lists have an entry per group.

    tables: current ones, or those to attach (-1: a block to swap in). attached: leading blocks that come from the prefix
    index. released: leading blocks out of sight.
    written: the partly filled block that is written and needs care, or -1; copies: whether it is copied (else unpublished).
    num_new_blocks: copy destinations, blocks to swap in, blocks behind the table.
    """

    computed: int
    start: int
    stop: int
    end: int
    tables: list[array[int]]
    attached: list[int]
    released: list[int]
    written: list[int]
    copies: list[bool]
    num_new_blocks: list[int]


def make_plan(
    manager: KVCacheManager,
    seq: SequenceState,
    computed: int,
    tables: list[array[int]],
    new: int | None,
    external: int,
    lookahead: int,
) -> Plan | None:
    """A plan that the free blocks can serve, or None."""
    remaining = seq.num_tokens - computed
    if external > remaining:
        raise InvalidArgumentError(
            f"num_external_tokens: expected at most the {remaining} tokens after the {computed} computed, got {external}"
        )
    start = computed + external
    stop = seq.num_tokens if new is None else min(start + new, seq.num_tokens)
    if not manager.causal and stop < seq.num_tokens:
        raise NonCausalError(
            f"num_new_tokens: attention is not causal, expected all {seq.num_tokens - start} at once, got {new}"
        )
    plan = Plan(computed, start, stop, stop + lookahead, tables, [], [], [], [], [])
    pool = manager.pool
    gained = 0
    for number, (group, table) in enumerate(zip(manager.groups, tables, strict=True)):
        if seq.running:
            released = max(seq.released[number], group.num_released(computed))
            for block in table[seq.released[number] : released]:
                gained += pool.refs[block] == 1 and block not in pool.pins
            attached = seq.attached[number]
        else:
            released = next((block for block, held in enumerate(table) if held), len(table))
            attached = len(table) if seq.host is None else len(table) - _trailing_swapped(table)
        written = _written_block(manager, seq, table, plan, group.block_size)
        copied = written >= 0 and (pool.refs[table[written]] + (not seq.running) > 1 or written < attached)
        plan.attached.append(attached)
        plan.released.append(released)
        plan.written.append(written)
        plan.copies.append(copied)
        num_swapped = sum(block < 0 for block in table) if seq.host is not None else 0
        plan.num_new_blocks.append(copied + num_swapped + max(0, -(-plan.end // group.block_size) - len(table)))
    available = pool.num_free + gained
    if not seq.running:
        available -= sum(pool.num_taken_from_free(block for block in table if block > 0) for table in tables)
        if manager.num_running:
            available -= manager.watermark_blocks
    return plan if sum(plan.num_new_blocks) <= available else None


def _written_block(manager: KVCacheManager, seq: SequenceState, table: array[int], plan: Plan, block_size: int) -> int:
    """The block that holds computed tokens, will be written, and is shared or published; or -1."""
    index, offset = divmod(plan.computed, block_size)
    if offset == 0 or plan.end == plan.computed:
        return -1
    block = table[index]
    if block < 0:
        return -1
    pool = manager.pool
    return index if not seq.running or pool.refs[block] > 1 or pool.is_published(block) else -1


def _trailing_swapped(table: array[int]) -> int:
    return next((count for count, block in enumerate(reversed(table)) if block >= 0), len(table))
