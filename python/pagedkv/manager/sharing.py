"""Sharing blocks between sequences, cutting sequences, and taking their blocks away."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from pagedkv.errors import InvalidArgumentError, ReleasedPositionError
from pagedkv.manager.sequence import SequenceState, lowered
from pagedkv.manager.state import State


def give_back(state: State, seq: SequenceState) -> None:
    """Drop a sequence's references to device and host blocks."""
    state.drop_tables(seq.tables, seq.released)
    seq.tables.clear()  # an Allocation may still look at it
    if seq.host is not None:
        state.drop_host(seq)
    if seq.running:
        state.num_running -= 1


def share(state: State, parent: SequenceState, child_id: Hashable) -> SequenceState:
    """A new sequence with the parent's committed tokens on the same blocks, host blocks included."""
    length = parent.num_computed
    child = SequenceState(
        child_id, parent.keys, len(state.groups), parent.tokens.fork(length), length, num_computed=length
    )
    child.all_known = len(child.tokens) == length
    child.tip, child.num_links = parent.tip, parent.num_links
    child.cut_links(length // state.hasher.chunk)
    child.num_hit = min(parent.num_hit, length)
    if parent.host is not None:
        child.host = [list(hosts) for hosts in parent.host]
        for hosts in child.host:
            for host in hosts:
                if host >= 0:
                    state.moves.host.acquire(host)
    elif length:
        _share_blocks(state, parent, child)
    return child


def _share_blocks(state: State, parent: SequenceState, child: SequenceState) -> None:
    length = child.num_computed
    child.running = True
    child.num_granted = length
    child.publish_at = parent.publish_at
    child.published = min(parent.published, length)
    child.attached, child.released = parent.attached, parent.released
    for number, group in enumerate(state.groups):
        keep = -(-length // group.block_size)
        child.tables[number] = parent.tables[number][:keep]
        child.attached = lowered(child.attached, number, keep)
        state.pool.acquire(child.tables[number])
    parent.fast_end = 0
    if parent.awaited:
        tables, is_pending = parent.tables, state.moves.is_pending
        parent.awaited = [(n, at) for n, at in parent.awaited if at < len(tables[n]) and is_pending(tables[n][at])]
        child.awaited = parent.awaited[:]
    state.num_running += 1


def reorder(state: State, seq_ids: list[Hashable], parents: list[int]) -> None:
    old = state.get_all(seq_ids)
    if len(parents) != len(old) or any(parent >= len(old) for parent in parents):
        raise InvalidArgumentError(f"parents: expected {len(old)} indices into seq_ids, got {parents!r}")
    shared = [share(state, old[parent], seq_id) for seq_id, parent in zip(seq_ids, parents, strict=True)]
    for seq in old:
        give_back(state, seq)
    state.sequences.update(zip(seq_ids, shared, strict=True))


def truncate(state: State, seq: SequenceState, length: int) -> None:
    """Cut a sequence to a length that it has, and drop its lookahead slots."""
    _check_in_sight(state, seq, length)
    seq.cut(length, state.hasher.chunk)
    seq.published = min(seq.published, length)
    dropped, nulls = [], []
    for number, group in enumerate(state.groups):
        keep = -(-length // group.block_size)
        nulls.append(max(0, seq.released[number] - keep))
        seq.attached = lowered(seq.attached, number, keep)
        seq.released = lowered(seq.released, number, keep)
        dropped.append(seq.tables[number][keep:])
        del seq.tables[number][keep:]
        if seq.host is not None:
            held = -(-seq.num_computed // group.block_size)
            state.moves.drop_hosts(seq.host[number][held:])
            del seq.host[number][held:]
    state.drop_tables(dropped, nulls)
    if seq.running:
        state.note_limits(seq, writable=False)


def _check_in_sight(state: State, seq: SequenceState, length: int) -> None:
    computed = min(length, seq.num_computed)
    for number, group in enumerate(state.groups):
        released = seq.released[number] if seq.host is None else seq.host[number].count(-1)
        lost = min(computed, released * group.block_size)
        split = computed % group.block_size and computed // group.block_size < released
        if group.first_visible(computed) < lost or split:
            raise ReleasedPositionError(
                f"num_tokens: after {length} tokens the next one sees positions below "
                f"{released * group.block_size}, which were given back"
            )


def preempt(state: State, seq: SequenceState, mode: str) -> str:
    """Take a sequence's blocks, not its tokens; give "swap" if its KV goes to the host pool, else "recompute"."""
    if not seq.running:
        if seq.host is not None and mode == "swap":
            return "swap"
        state.drop_host(seq)
        seq.num_computed = 0
        return "recompute"
    host = _swap_out(state, seq) if mode == "swap" else None
    give_back(state, seq)
    seq.detach()
    seq.host = host
    state.num_preemptions += 1
    if host is None:
        seq.num_computed = 0
        return "recompute"
    state.num_swaps += 1
    return "swap"


def _swap_out(state: State, seq: SequenceState) -> list[list[int]] | None:
    """Host blocks for what a sequence has committed; None when the host pool cannot hold it."""
    held: Sequence[Sequence[int]] = [
        table[: -(-seq.num_computed // group.block_size)] for table, group in zip(seq.tables, state.groups, strict=True)
    ]
    blocks = [block for table in held for block in table if block]
    if not blocks or state.moves.num_host_needed(blocks) > len(state.moves.host.free):
        return None
    return [[state.moves.swap_out(block) if block else -1 for block in table] for table in held]
