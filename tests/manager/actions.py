"""Short ways to say what the manager tests do over and over."""

from __future__ import annotations

from typing import Any

from pagedkv.manager import Allocation, KVCacheManager


def run(manager: KVCacheManager, seq_id: Any, num_new: int | None = None, **options: Any) -> Allocation:
    """Allocates, takes what is pending and commits, as a step would."""
    granted = manager.allocate_slots(seq_id, num_new, **options)
    assert granted is not None
    manager.take_swaps()
    manager.take_copies()
    slots = granted.slots[0] if manager.grouped else granted.slots
    manager.commit(seq_id, len(slots) + options.get("num_external_tokens", 0))
    manager.check_integrity()
    return granted


def compute(manager: KVCacheManager, seq_id: Any, token_ids: Any, **options: Any) -> Allocation:
    """Adds a sequence and computes all of it."""
    manager.add(seq_id, token_ids, **options)
    return run(manager, seq_id)


def cache(manager: KVCacheManager, token_ids: Any, **options: Any) -> None:
    """Leaves the blocks of a prompt cached and free."""
    compute(manager, "cache", token_ids, **options)
    manager.free("cache")
    manager.check_integrity()


def snapshot(manager: KVCacheManager) -> Any:
    """Everything that an error or a None must leave as it was."""
    blocks, index, moves = manager.pool, manager.state.index, manager.state.moves
    return (
        {
            seq_id: (
                list(seq.tokens.part(0, len(seq.tokens))),
                seq.num_tokens,
                seq.num_computed,
                seq.num_granted,
                seq.running,
                [list(table) for table in seq.tables],
                seq.published,
                seq.attached,
                seq.released,
                seq.host,
            )
            for seq_id, seq in manager.sequences.items()
        },
        list(blocks.refs),
        blocks.free_ids(),
        list(index.hashes),
        {key: list(value) if isinstance(value, list) else value for key, value in index.by_hash.items()},
        dict(blocks.pins),
        dict(moves.copies),
        dict(moves.swap_ins),
        dict(moves.swap_outs),
        list(moves.host.refs),
        manager.state.num_running,
        None if index.events is None else list(index.events),
    )
