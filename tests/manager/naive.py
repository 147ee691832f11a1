"""A naive model of the manager: every sequence's KV as a plain list, and a memory whose blocks really hold something.

The KV of a token is told apart by everything it depends on: the keys and all tokens up to it. Copies, swaps and writes
are carried out on lists in the documented order; afterwards what a sequence can see must be what it computed.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

from pagedkv.manager import KVCacheManager
from pagedkv.manager.groups import GroupSpec
from tests.manager.actions import snapshot

KEYS: list[dict[str, Any]] = [
    {},
    {"cache_salt": "a"},
    {"extra_keys": [("lora", "x")]},
    {"extra_keys": [("image", "d", 3, 7)]},
]
IMAGE_KEY, IMAGE_START = 3, 3

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"num_blocks": 14, "block_size": 4},
    "partial": {"num_blocks": 14, "block_size": 4, "partial_hits": True, "num_host_blocks": 6},
    "uncached": {"num_blocks": 12, "block_size": 3, "enable_prefix_caching": False, "num_host_blocks": 8},
    "colliding": {"num_blocks": 14, "block_size": 2, "hash_fn": lambda data: b"x", "num_host_blocks": 8},
    "sliding": {"num_blocks": 12, "block_size": 2, "sliding_window": 5, "num_host_blocks": 8},
    "sliding partial": {"num_blocks": 12, "block_size": 4, "sliding_window": 6, "partial_hits": True},
    "watermark": {"num_blocks": 14, "block_size": 4, "watermark": 0.2, "record_events": True, "num_host_blocks": 4},
    "chunked": {"num_blocks": 14, "block_size": 2, "groups": [GroupSpec("chunked", 6)], "num_host_blocks": 6},
    "hybrid": {
        "num_blocks": 30,
        "block_size": 4,
        "groups": [GroupSpec(), GroupSpec("sliding", 6), GroupSpec("sliding", 6)],
        "num_host_blocks": 12,
    },
    "hybrid partial": {
        "num_blocks": 24,
        "block_size": 4,
        "groups": [GroupSpec("sliding", 5), GroupSpec()],
        "partial_hits": True,
    },
    "sizes": {
        "num_blocks": 30,
        "block_size": 4,
        "groups": [GroupSpec(block_size=4), GroupSpec("sliding", 5, block_size=2), GroupSpec(block_size=6)],
        "record_events": True,
        "num_host_blocks": 10,
    },
}


@dataclass
class NaiveSequence:
    key: int
    tokens: list[int]
    computed: int = 0
    granted: int = 0
    running: bool = False
    swapped: bool = False
    kv: list[Any] = field(default_factory=list)

    def value(self, position: int) -> Any:
        # what lies before an image does not depend on it
        key = 0 if self.key == IMAGE_KEY and position < IMAGE_START else self.key
        return (key, tuple(self.tokens[: position + 1]))


class Harness:
    """One manager, its memory and its naive twin. Operations on sequences that do not allow them are skipped."""

    def __init__(self, settings: dict[str, Any], *, thorough: bool = True) -> None:
        self.manager = KVCacheManager(**settings)
        self.thorough = thorough
        self.seqs: dict[int, NaiveSequence] = {}
        self.device: dict[tuple[int, int], Any] = {}
        self.host: dict[tuple[int, int], Any] = {}
        self.published: set[bytes] = set()

    def add(self, name: int, tokens: list[int], key: int) -> None:
        self.manager.add(name, tokens, **KEYS[key])
        self.seqs[name] = NaiveSequence(key, list(tokens))

    def append(self, name: int, tokens: list[int]) -> None:
        self.manager.append(name, tokens)
        self.seqs[name].tokens += tokens

    def allocate(self, name: int, new: int | None, external: int, lookahead: int) -> None:
        seq, manager = self.seqs[name], self.manager
        before = snapshot(manager) if self.thorough else None
        matched = None
        if not seq.running and not seq.swapped:
            matched = manager.match_prefix(seq.tokens, **KEYS[seq.key])
        left = len(seq.tokens) - (seq.computed if matched is None else matched)
        external = min(external, left)
        tables = self._tables(name)
        granted = manager.allocate_slots(name, new, num_external_tokens=external, num_lookahead_tokens=lookahead)
        if granted is None:
            assert before is None or snapshot(manager) == before
            return
        if not seq.running:
            if matched is not None:
                seq.computed = granted.num_cached_tokens
                whole = matched // manager.state.step * manager.state.step
                assert seq.computed in (matched, whole)
                seq.kv = [seq.value(position) for position in range(seq.computed)]
            assert granted.num_cached_tokens == seq.computed
            seq.running, seq.swapped = True, False
        assert manager.num_computed_tokens(name) == seq.computed
        start = seq.computed + external
        stop = len(seq.tokens) if new is None else min(len(seq.tokens), start + new)
        seq.granted = max(seq.granted, stop + lookahead)
        for table, (columns, blocks) in zip(tables, granted.entries, strict=True):
            table += [-1] * (max(columns, default=-1) + 1 - len(table))
            for column, block in zip(columns, blocks, strict=True):
                table[column] = block
        assert tables == self._tables(name)
        assert granted.block_ids == manager.block_ids(name)
        self._check_slots(name, granted.slots, start, stop)
        self._check_slots(name, granted.lookahead_slots, stop, stop + lookahead)

    def _check_slots(self, name: int, slots: list[Any], start: int, stop: int) -> None:
        per_group = slots if self.manager.grouped else [slots]
        for group, table, found in zip(self.manager.state.groups, self._tables(name), per_group, strict=True):
            size = group.block_size
            assert found == [table[at // size] * size + at % size for at in range(start, stop)]

    def _tables(self, name: int) -> list[list[int]]:
        tables = self.manager.block_ids(name)
        return tables if self.manager.grouped else [tables]

    def step(self, commits: dict[int, int]) -> None:
        """Moves what is pending, writes every granted slot and commits so many tokens of each sequence."""
        outs, ins = self.manager.take_swaps()
        copies = self.manager.take_copies()
        self._move(outs, self.device, self.host)
        self._move(copies, self.device, self.device)
        self._move(ins, self.host, self.device)
        for name, seq in self.seqs.items():
            for position in range(seq.computed, seq.granted):
                value = seq.value(position) if position < len(seq.tokens) else ("draft", name, position)
                self._write(name, position, value)
        for name, count in commits.items():
            seq = self.seqs[name]
            count = max(0, min(count, seq.granted - seq.computed, len(seq.tokens) - seq.computed))
            self.manager.commit(name, count)
            seq.kv += [seq.value(position) for position in range(seq.computed, seq.computed + count)]
            seq.computed += count

    def _move(self, pairs: list[tuple[int, int]], source: dict, destination: dict) -> None:
        size = max(group.block_size for group in self.manager.state.groups)
        assert len({pair[1] for pair in pairs}) == len(pairs)
        moved = [(to, at, source.get((block, at))) for block, to in pairs for at in range(size)]
        for to, at, value in moved:
            destination[to, at] = value

    def _write(self, name: int, position: int, value: Any) -> None:
        for group, table in zip(self.manager.state.groups, self._tables(name), strict=True):
            block = table[position // group.block_size]
            assert block > 0
            assert not self.manager.pool.is_published(block)
            self.device[block, position % group.block_size] = value

    def decode(self, names: list[int], tokens: list[int]) -> None:
        """The batched step, for the sequences that it takes."""
        names = [
            name
            for name in names
            if self.seqs[name].running and self.seqs[name].computed == len(self.seqs[name].tokens)
        ]
        tokens = tokens[: len(names)]
        before = snapshot(self.manager) if self.thorough else None
        tables = {name: self._tables(name) for name in names}
        step = self.manager.append_step(names, tokens)
        if step is None:
            assert before is None or snapshot(self.manager) == before
            return
        for row, name in enumerate(names):
            seq = self.seqs[name]
            seq.tokens.append(tokens[row])
            seq.granted = max(seq.granted, len(seq.tokens))
        for number, (rows, columns, blocks) in enumerate(step.entries):
            for row, column, block in zip(rows, columns, blocks, strict=True):
                table = tables[names[row]][number]
                table[column : column + 1] = [block]
        for name in names:
            for group, mine, theirs in zip(self.manager.state.groups, tables[name], self._tables(name), strict=True):
                first = group.first_visible(self.seqs[name].computed) // group.block_size
                assert mine[first:] == theirs[first:]
        self.step({})
        self.manager.commit_step(names)
        for name in names:
            seq = self.seqs[name]
            seq.kv.append(seq.value(seq.computed))
            seq.computed += 1

    def truncate(self, name: int, length: int) -> None:
        seq = self.seqs[name]
        if not self._may_truncate(seq, name, length):
            return
        self.manager.truncate(name, length)
        del seq.tokens[length:]
        del seq.kv[length:]
        seq.computed = min(seq.computed, length)
        seq.granted = min(seq.granted, length)

    def _may_truncate(self, seq: NaiveSequence, name: int, length: int) -> bool:
        """What the next token would see must be there; what was given back is known from the null blocks."""
        computed = min(length, seq.computed)
        state = self.manager.sequences[name]
        for number, group in enumerate(self.manager.state.groups):
            nulls = state.released[number] if state.host is None else state.host[number].count(-1)
            seen = range(group.first_visible(computed), computed)
            if any(position // group.block_size < nulls for position in seen):
                return False
            if computed % group.block_size and computed // group.block_size < nulls:
                return False
        return True

    def fork(self, parent: int, child: int) -> None:
        self.manager.fork(parent, child)
        self.seqs[child] = self._forked(self.seqs[parent])

    def _forked(self, seq: NaiveSequence) -> NaiveSequence:
        count = seq.computed
        running = seq.running and count > 0
        return NaiveSequence(
            seq.key, seq.tokens[:count], count, count if running else 0, running, seq.swapped, list(seq.kv)
        )

    def reorder(self, names: list[int], parents: list[int]) -> None:
        self.manager.reorder(names, parents)
        forked = [self._forked(self.seqs[names[parent]]) for parent in parents]
        self.seqs.update(zip(names, forked, strict=True))

    def preempt(self, name: int, mode: str) -> None:
        seq = self.seqs[name]
        done = self.manager.preempt(name, mode)
        assert mode == "swap" or done == "recompute"
        seq.running, seq.granted, seq.swapped = False, 0, done == "swap"
        if done == "recompute":
            seq.computed, seq.kv = 0, []

    def free(self, name: int) -> None:
        self.manager.free(name)
        del self.seqs[name]

    def reset(self) -> None:
        used = any(any(block for table in self._tables(name) for block in table) for name in self.seqs)
        done = self.manager.reset_prefix_cache()
        assert done == (not used and not self.manager.pool.pins)
        if done:
            assert self.manager.pool.num_published == 0

    def duplicate(self) -> None:
        """Goes on with a copy; what happens to the original does not reach it."""
        original, before = self.manager, snapshot(self.manager)
        self.manager = copy.deepcopy(original)
        for name in list(self.seqs):
            original.free(name)
        original.pool.evict(original.pool.get_new_blocks(original.num_free_blocks))
        assert snapshot(self.manager) == before

    def verify(self) -> None:
        """Every visible position holds what was computed, cached blocks hold what their hash stands for."""
        manager = self.manager
        manager.check_integrity()
        self._check_events()
        pending = {*manager.state.moves.copies, *manager.state.moves.swap_ins}
        for name, seq in self.seqs.items():
            assert manager.num_tokens(name) == len(seq.tokens)
            assert manager.num_computed_tokens(name) == seq.computed == len(seq.kv)
            if not seq.running:
                continue
            for group, table in zip(manager.state.groups, self._tables(name), strict=True):
                for position in range(group.first_visible(seq.computed), seq.computed):
                    block = table[position // group.block_size]
                    assert block > 0
                    if block not in pending:
                        assert self.device[block, position % group.block_size] == seq.kv[position]
        for block, link in enumerate(manager.pool.contents):
            if link is not None:
                self._check_cached(block, link)

    def _check_cached(self, block: int, link: Any) -> None:
        size = next(
            group.block_size
            for group in self.manager.state.groups
            if self.manager.pool.index.hashes[block] == link.hash + group.suffix
        )
        chunks = []
        while link is not None:
            chunks.append(link.tokens)
            link = link.parent
        tokens = memoryview(b"".join(reversed(chunks))).cast("q").tolist()
        for offset in range(size):
            position = len(tokens) - size + offset
            assert self.device[block, offset][1] == tuple(tokens[: position + 1])

    def _check_events(self) -> None:
        for event in self.manager.take_events():
            if event[0] == "stored":
                assert event[1] not in self.published
                self.published.add(event[1])
            elif event[0] == "removed":
                self.published.remove(event[1])
            else:
                self.published.clear()
        if self.manager.pool.index.events is not None:
            assert self.published == self.manager.pool.index.by_hash.keys()
