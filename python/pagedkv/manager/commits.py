"""Committing tokens: their KV is written, and the blocks that they fill can be found."""

from __future__ import annotations

from pagedkv.errors import CommitError, PendingCopyError
from pagedkv.manager.hashing import Link
from pagedkv.manager.sequence import SequenceState
from pagedkv.manager.state import State


def commit(state: State, seq: SequenceState, num_tokens: int) -> None:
    computed = seq.num_computed + num_tokens
    if computed > seq.num_tokens or (computed > seq.num_granted and num_tokens):
        raise CommitError(
            f"num_tokens: sequence {seq.seq_id!r} has {seq.num_computed} of {seq.num_tokens} tokens committed and "
            f"slots for {seq.num_granted}, got {num_tokens} more"
        )
    if seq.awaited and num_tokens:
        check_arrived(state, seq)
    if computed < seq.publish_at:
        seq.num_computed = computed
        return
    links = new_links(state, seq, computed)  # the caller's hash_fn may raise
    seq.num_computed = computed
    publish(state, seq, links)


def check_arrived(state: State, seq: SequenceState) -> None:
    """Raise unless what copies and swaps had to bring into the sequence's blocks is there, or on its way."""
    for number, index in seq.awaited:
        table = seq.tables[number]
        if index < len(table) and state.moves.is_pending(table[index]):
            raise PendingCopyError(
                f"block {table[index]} of sequence {seq.seq_id!r} waits for take_copies or take_swaps"
            )
    seq.awaited.clear()


def new_links(state: State, seq: SequenceState, computed: int) -> list[Link]:
    """The links of chunks that `computed` tokens fill and that were not hashed yet; changes nothing."""
    tip, stop = seq.tip, min(computed, len(seq.tokens)) // state.hasher.chunk
    if tip is not None and stop > seq.num_links + 1:  # what follows need not be hashed if it was published meanwhile
        tip = state.index.published_as(tip)
    return state.hasher.grow(tip, seq.num_links, seq.tokens, seq.keys, stop)


def publish(state: State, seq: SequenceState, links: list[Link]) -> None:
    """Publish the blocks that committed tokens with known ids have filled, and note when the next one will be.

    links: what `new_links` gave.
    """
    chunk = state.hasher.chunk
    known = min(seq.num_computed, len(seq.tokens))
    start, stop, hashed = seq.published // chunk, known // chunk, seq.num_links
    if links:
        seq.tip, seq.num_links = links[-1], stop
    if start != hashed:
        links = seq.links(start)
    for group, table in zip(state.groups, seq.tables, strict=True):
        size = group.block_size
        state.index.publish(group, table, (seq.published // size, known // size), links, start)
    if links:
        seq.tip = links[-1]
    seq.published = known
    seq.publish_at = (stop + 1) * chunk
