"""The longest cached prefix that every attention group can serve."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from pagedkv.manager.groups import Group
from pagedkv.manager.hashing import Extras, KeySet, Link, common_tokens, same_prefix
from pagedkv.manager.state import State
from pagedkv.manager.tokens import TOKEN_BYTES, TokenIds


@dataclass(slots=True)
class Hit:
    """num_tokens of whole blocks with one table per group (0 where a window has passed), then tail_tokens more in
    tail_blocks, one block per group, when a cached block begins like the rest of the sequence."""

    num_tokens: int
    tables: list[array[int]]
    tail_tokens: int = 0
    tail_blocks: Sequence[int] = ()

    def with_tail(self) -> list[array[int]]:
        if not self.tail_tokens:
            return self.tables
        return [table + array("q", [block]) for table, block in zip(self.tables, self.tail_blocks, strict=True)]


def find(state: State, chain: list[Link], tokens: TokenIds, keys: KeySet, max_tokens: int) -> Hit:
    """The longest prefix of at most `max_tokens` tokens that every group can serve; extends `chain` as needed."""
    max_tokens = max(max_tokens, 0)
    hit = _Search(state, chain, tokens, keys).run(max_tokens // state.step * state.step)
    if state.partial_hits:
        _find_tail(state, hit, chain, tokens, keys, max_tokens)
    return hit


def _find_tail(state: State, hit: Hit, chain: list[Link], tokens: TokenIds, keys: KeySet, max_tokens: int) -> None:
    """Add a block per group that begins like the rest of the sequence."""
    size, start = state.step, hit.num_tokens
    rest = tokens.to_bytes(start, min(max_tokens, start + size))
    if not rest:
        return
    parent = chain[start // size - 1] if start else None
    extras = keys.at(start, start + size)
    blocks, length = [], len(rest) // TOKEN_BYTES
    for group in state.groups:
        best, best_block = 0, 0
        for block in state.index.children_of(group, parent, rest[:TOKEN_BYTES]):
            link = state.index.contents[block]
            common = common_tokens(link, rest, extras)
            if common > best and same_prefix(link.parent, parent):
                best, best_block = common, block
        blocks.append(best_block)
        length = min(length, best)
    if length:
        hit.tail_tokens, hit.tail_blocks = length, blocks


def _equal(content: Link, parent: Link, tokens: bytes, extras: Extras) -> bool:
    return content.parent is parent and content.tokens == tokens and content.extras == extras


class _Search:
    """One search: remembers what each group was found to hold."""

    def __init__(self, state: State, chain: list[Link], tokens: TokenIds, keys: KeySet) -> None:
        self.state = state
        self.chain = chain
        self.tokens = tokens
        self.keys = keys
        self.runs: dict[Group, list[int]] = {}
        self.found: dict[tuple[Group, int], int] = {}

    def run(self, length: int) -> Hit:
        """Every group's answer only ever shortens the prefix; a round that changes nothing ends the search."""
        groups = self.state.groups
        # full groups first: they bound the search of the others
        order = sorted(groups, key=lambda group: not group.is_full) if len(groups) > 1 else groups
        unsettled = True
        while length and unsettled:
            unsettled = False
            for group in order:
                served = self._full(group, length) if group.is_full else self._windowed(group, length)
                unsettled = unsettled or served != length
                length = served
            unsettled = unsettled and len(groups) > 1
        return Hit(length, [self._table(group, length) for group in groups])

    def _table(self, group: Group, length: int) -> array[int]:
        num_blocks = length // group.block_size
        if group.is_full:
            return array("q", self.runs.get(group, [])[:num_blocks])
        first = group.first_needed(num_blocks) if num_blocks else 0
        return array("q", [0] * first + [self._cached(group, block) for block in range(first, num_blocks)])

    def _full(self, group: Group, length: int) -> int:
        num_blocks = length // group.block_size
        run = self.runs.get(group)
        if run is None:
            run = self._long_run(group, num_blocks) if group.chunks_per_block > 1 else self._run(group, num_blocks)
            self.runs[group] = run
        return min(num_blocks, len(run)) * group.block_size // self.state.step * self.state.step

    def _windowed(self, group: Group, length: int) -> int:
        while length:
            num_blocks = length // group.block_size
            for block in range(num_blocks - 1, group.first_needed(num_blocks) - 1, -1):
                if not self._cached(group, block):
                    # what is needed never moves to the right as the prefix gets shorter, so this block has to go
                    length = block * group.block_size // self.state.step * self.state.step
                    break
            else:
                break
        return length

    def _cached(self, group: Group, block: int) -> int:
        known = self.found.get((group, block))
        if known is None:
            num_chunks = (block + 1) * group.chunks_per_block
            if num_chunks > len(self.chain):
                self.state.hasher.extend(self.chain, self.tokens, self.keys, num_chunks)
            known = self.found[group, block] = self.state.index.block_at(group, self.chain, block)
        return known

    def _long_run(self, group: Group, num_blocks: int) -> list[int]:
        run: list[int] = []
        while len(run) < num_blocks and (block := self._cached(group, len(run))):
            run.append(block)
        return run

    def _run(self, group: Group, num_blocks: int) -> list[int]:
        """Blocks of one chunk from the left until one is missing, hashing no further than that.

        New links get the cached links as parents, so that equality is decided by one comparison of identity.
        """
        index, chain, hasher = self.state.index, self.chain, self.state.hasher
        known_links = max(len(chain), 1)  # the first chunk may have a salt
        if self.keys.ranges or not hasher.is_sha256 or known_links >= num_blocks:
            return self._long_run(group, num_blocks)
        run = self._long_run(group, known_links)
        if len(run) < known_links:
            return run
        extras, extra_bytes = self.keys.whole, self.keys.whole_bytes
        get, contents, sha256 = index.by_hash.get, index.contents, hashlib.sha256
        width, suffix = hasher.chunk * TOKEN_BYTES, group.suffix
        data = self.tokens.to_bytes(len(chain) * hasher.chunk, num_blocks * hasher.chunk)
        parent = chain[-1]
        for low in range(0, len(data), width):
            chunk = data[low : low + width]
            link = parent.next
            if link is None or link.tokens != chunk or link.extras != extras:
                link = Link(sha256(parent.hash + chunk + extra_bytes).digest(), parent, chunk, extras)
            known = get(link.hash + suffix)
            if known.__class__ is int:
                content = contents[known]
                if content is link or (content is not None and _equal(content, parent, chunk, extras)):
                    parent = content
                    chain.append(parent)
                    run.append(known)
                    continue
            chain.append(link)
            block = index.block_at(group, chain, len(run)) if known is not None else 0
            if not block:
                break
            parent = chain[-1]
            run.append(block)
        return run
